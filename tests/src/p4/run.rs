//! Carries out what [`ir`](super::ir) read, one packet after the other: what a program means, on any chip.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};

use super::ir::{Block, Call, Expression, Fields, Function, Operator, Statement, Type};
use crate::testrun::support::packet::internet_checksum;

/// Width of what a register action hands out of its two conditions: one of four bits.
const PREDICATE_BITS: u32 = 8;
/// Most states that a parser goes through for one packet.
const MOST_STATES: usize = 64;

/// A number of so many bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// Without a sign, whatever it is.
    pub value: u128,
    width: u32,
    signed: bool,
}

impl Bits {
    fn new(value: u128, width: u32, signed: bool) -> Bits {
        // Numbers without a width stand in slices and shifts alone.
        let value = if width == 0 { value } else { value & mask(width) };
        Bits { value, width, signed }
    }

    /// With its sign.
    fn number(self) -> i128 {
        let is_negative = self.signed && self.value >> (self.width - 1) & 1 == 1;
        self.value as i128 - if is_negative { 1 << self.width } else { 0 }
    }
}

const fn mask(width: u32) -> u128 {
    if width >= 128 { u128::MAX } else { (1 << width) - 1 }
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number.
    Bits(Bits),
    /// True or false.
    Truth(bool),
    /// Of an enumeration.
    Enum(String),
    /// A struct or a header.
    Record(Record),
    /// Several.
    List(Vec<Value>),
    /// What a call without a result results in.
    Nothing,
}

/// A struct or a header.
#[derive(Clone, Debug)]
pub struct Record {
    of: Rc<Fields>,
    is_valid: bool,
    values: Vec<Value>,
}

impl PartialEq for Record {
    fn eq(&self, other: &Record) -> bool {
        self.is_valid == other.is_valid && self.values == other.values
    }
}

impl Value {
    /// A value of a type, with all bits as in `fill`.
    #[must_use]
    pub fn of(of: &Type, fill: u128) -> Value {
        match of {
            Type::Bits { width, signed } => Value::Bits(Bits::new(fill, *width, *signed)),
            Type::Bool => Value::Truth(false),
            Type::Enum => Value::Enum(String::new()),
            Type::Fields(fields) => Value::Record(Record {
                of: Rc::clone(fields),
                is_valid: false,
                values: fields.fields.iter().map(|(_, of)| Value::of(of, fill)).collect(),
            }),
        }
    }

    /// A field of it.
    ///
    /// # Errors
    /// Where it has none of this name.
    pub fn field(&mut self, name: &str) -> Result<&mut Value> {
        let Value::Record(record) = self else { bail!("no struct, so no `{name}`") };
        let at = record.of.fields.iter().position(|(field, _)| field == name);
        at.and_then(|at| record.values.get_mut(at)).with_context(|| format!("no field `{name}`"))
    }

    /// The number that it is.
    ///
    /// # Errors
    /// Where it is none.
    pub fn bits(&self) -> Result<Bits> {
        match self {
            Value::Bits(bits) => Ok(*bits),
            other => bail!("no number: {other:?}"),
        }
    }

    /// Sets the number that it is.
    ///
    /// # Errors
    /// Where it is none.
    pub fn set(&mut self, value: u128) -> Result<()> {
        let Bits { width, signed, .. } = self.bits()?;
        *self = Value::Bits(Bits::new(value, width, signed));
        Ok(())
    }

    fn truth(&self) -> Result<bool> {
        match self {
            Value::Truth(truth) => Ok(*truth),
            other => bail!("neither true nor false: {other:?}"),
        }
    }

    fn numbers(&self) -> Vec<Bits> {
        match self {
            Value::Bits(bits) => vec![*bits],
            Value::List(values) => values.iter().flat_map(Value::numbers).collect(),
            Value::Record(record) => record.values.iter().flat_map(Value::numbers).collect(),
            _ => Vec::new(),
        }
    }

    /// Its numbers one behind the other, most significant bits first. They must end at a byte.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut digits = Vec::new();
        for bits in self.numbers() {
            digits.extend((0..bits.width).rev().map(|at| (bits.value >> at & 1) as u8));
        }
        digits.chunks(8).map(|byte| byte.iter().fold(0, |value, digit| value << 1 | digit)).collect()
    }
}

/// A table's entries: by key, action and parameters.
pub type Entries = HashMap<Vec<u128>, (&'static str, Vec<u128>)>;

/// What a run leaves: parameters and variables by name, and the packet.
pub type Ran = (HashMap<String, Value>, Vec<u8>);

/// A parser or a control, with its memory and its tables.
#[derive(Debug)]
pub struct Unit {
    block: Rc<Block>,
    registers: HashMap<String, BTreeMap<u128, Value>>,
    /// By name of the counter and index.
    pub counts: BTreeMap<u128, u64>,
    /// By name of the table.
    pub tables: HashMap<&'static str, Entries>,
    scopes: Vec<HashMap<String, Value>>,
    touched: HashSet<String>,
    /// Bits that a parser is given; what a deparser has put out.
    packet: Vec<u8>,
    at: usize,
}

impl Unit {
    /// With empty memory.
    #[must_use]
    pub fn new(block: Rc<Block>) -> Unit {
        Unit {
            block,
            registers: HashMap::new(),
            counts: BTreeMap::new(),
            tables: HashMap::new(),
            scopes: Vec::new(),
            touched: HashSet::new(),
            packet: Vec::new(),
            at: 0,
        }
    }

    /// The type of a parameter.
    ///
    /// # Errors
    /// Where there is none of this name.
    pub fn parameter(&self, name: &str) -> Result<&Type> {
        let found = self.block.parameters.iter().find(|(parameter, _)| parameter == name);
        Ok(&found.with_context(|| format!("no parameter `{name}`"))?.1)
    }

    /// Runs it. `values` are those of its parameters, by name; others have `fill` for all their bits. A parser is given
    /// the packet; what is left of it, or what a deparser put out, comes back. None: the parser refuses the packet.
    ///
    /// # Errors
    /// Where the program does what it must not, or what this cannot do.
    pub fn run(
        &mut self,
        packet: Vec<u8>,
        values: HashMap<&'static str, Value>,
        fill: u128,
    ) -> Result<Option<Ran>> {
        let block = Rc::clone(&self.block);
        let mut scope = HashMap::new();
        for (name, of) in block.parameters.iter().chain(&block.variables) {
            scope.insert(name.clone(), Value::of(of, fill));
        }
        scope.extend(values.into_iter().map(|(name, value)| (name.to_owned(), value)));
        (self.scopes, self.packet, self.at) = (vec![scope], packet, 0);
        self.touched.clear();
        let is_accepted = match &block.body {
            Some(body) => self.statement(body).map(|()| true)?,
            None => self.parse(&block)?,
        };
        let rest = self.packet.get(self.at / 8..).unwrap_or_default().to_vec();
        let values = self.scopes.pop().unwrap_or_default();
        Ok(is_accepted.then_some((values, rest)))
    }

    fn parse(&mut self, block: &Block) -> Result<bool> {
        let mut name = "start";
        for _ in 0..MOST_STATES {
            if matches!(name, "accept" | "reject") {
                return Ok(name == "accept");
            }
            let state = block.states.get(name).with_context(|| format!("no state `{name}`"))?;
            state.statements.iter().try_for_each(|statement| self.statement(statement))?;
            let mut values = Vec::new();
            for value in &state.select {
                values.push(self.value(value)?.bits()?.value);
            }
            name = "reject";
            for (patterns, next) in &state.cases {
                let mut fits = true;
                for (pattern, value) in patterns.iter().zip(&values) {
                    fits &= self.fits(pattern, *value)?;
                }
                if fits {
                    name = next;
                    break;
                }
            }
        }
        bail!("the parser does not end")
    }

    fn fits(&mut self, pattern: &Expression, value: u128) -> Result<bool> {
        Ok(match pattern {
            Expression::Any => true,
            Expression::Masked(wanted, mask) => {
                let mask = self.value(mask)?.bits()?.value;
                self.value(wanted)?.bits()?.value & mask == value & mask
            }
            wanted => self.value(wanted)?.bits()?.value == value,
        })
    }

    fn statement(&mut self, statement: &Statement) -> Result<()> {
        match statement {
            Statement::Block(statements) => statements.iter().try_for_each(|inner| self.statement(inner)),
            Statement::Assign(place, value) => {
                let value = self.value(value)?;
                self.assign(place, value)
            }
            Statement::Call(call) => self.value(call).map(drop),
            Statement::If(condition, then, otherwise) => {
                let truth = self.value(condition)?.truth()?;
                self.statement(if truth { then } else { otherwise })
            }
            Statement::Variable(name, of, first) => {
                let value = first.as_ref().map_or_else(|| Ok(Value::of(of, 0)), |first| self.value(first))?;
                self.scopes.last_mut().context("no scope")?.insert(name.clone(), value);
                Ok(())
            }
        }
    }

    fn assign(&mut self, place: &Expression, value: Value) -> Result<()> {
        if let Expression::Slice(whole, high, low) = place {
            let (old, part) = (self.value(whole)?.bits()?, value.bits()?);
            let hole = mask(high - low + 1) << low;
            let new = old.value & !hole | part.value << low;
            return self.place(whole)?.set(new);
        }
        *self.place(place)? = value;
        Ok(())
    }

    fn place(&mut self, place: &Expression) -> Result<&mut Value> {
        match place {
            Expression::Name(name) => {
                let scope = self.scopes.iter_mut().rev().find_map(|scope| scope.get_mut(name));
                scope.with_context(|| format!("no variable `{name}`"))
            }
            Expression::Member(whole, name) => self.place(whole)?.field(name),
            other => bail!("nothing can be put into {other:?}"),
        }
    }

    fn value(&mut self, expression: &Expression) -> Result<Value> {
        Ok(match expression {
            Expression::Number { value, width, signed } => Value::Bits(Bits::new(*value, *width, *signed)),
            Expression::Truth(truth) => Value::Truth(*truth),
            Expression::Enum(member) => Value::Enum(member.clone()),
            Expression::Name(_) | Expression::Member(..) => self.place(expression)?.clone(),
            Expression::Slice(whole, high, low) => {
                Value::Bits(Bits::new(self.value(whole)?.bits()?.value >> low, high - low + 1, false))
            }
            Expression::Concat(left, right) => {
                let (left, right) = (self.value(left)?.bits()?, self.value(right)?.bits()?);
                let (value, width) = (left.value << right.width | right.value, left.width + right.width);
                Value::Bits(Bits::new(value, width, false))
            }
            Expression::Binary(operator, left, right) => self.binary(*operator, left, right)?,
            Expression::Not(value) => Value::Truth(!self.value(value)?.truth()?),
            Expression::Negative(value) => {
                let Bits { value, width, signed } = self.value(value)?.bits()?;
                Value::Bits(Bits::new(value.wrapping_neg(), width, signed))
            }
            Expression::Complement(value) => {
                let Bits { value, width, signed } = self.value(value)?.bits()?;
                Value::Bits(Bits::new(!value, width, signed))
            }
            Expression::Cast(of, value) => match (of, self.value(value)?) {
                (Type::Bits { width, signed }, Value::Bits(bits)) => {
                    Value::Bits(Bits::new(bits.number() as u128, *width, *signed))
                }
                (Type::Bits { width, signed }, Value::Truth(truth)) => {
                    Value::Bits(Bits::new(truth.into(), *width, *signed))
                }
                (Type::Bool, Value::Bits(bits)) => Value::Truth(bits.value != 0),
                (of, value) => bail!("{value:?} cannot become {of:?}"),
            },
            Expression::List(values) => {
                Value::List(values.iter().map(|value| self.value(value)).collect::<Result<_>>()?)
            }
            Expression::Call(call) => self.call(call)?,
            Expression::Masked(..) | Expression::Any => bail!("a pattern is no value"),
        })
    }

    fn binary(&mut self, operator: Operator, left: &Expression, right: &Expression) -> Result<Value> {
        match operator {
            Operator::BothTrue => {
                return Ok(Value::Truth(self.value(left)?.truth()? && self.value(right)?.truth()?));
            }
            Operator::EitherTrue => {
                return Ok(Value::Truth(self.value(left)?.truth()? || self.value(right)?.truth()?));
            }
            _ => {}
        }
        let (left, right) = (self.value(left)?, self.value(right)?);
        match operator {
            Operator::Equal => return Ok(Value::Truth(left == right)),
            Operator::NotEqual => return Ok(Value::Truth(left != right)),
            _ => {}
        }
        let (left, right) = (left.bits()?, right.bits()?);
        let shift = || u32::try_from(right.value).context("a shift by too much");
        let value = match operator {
            Operator::Add => left.value.wrapping_add(right.value),
            Operator::Sub => left.value.wrapping_sub(right.value),
            Operator::Saturate => left.value.saturating_sub(right.value),
            Operator::And => left.value & right.value,
            Operator::Or => left.value | right.value,
            Operator::Xor => left.value ^ right.value,
            Operator::Shl => left.value.wrapping_shl(shift()?),
            Operator::Shr => left.number().wrapping_shr(shift()?) as u128,
            Operator::Less => return Ok(Value::Truth(left.number() < right.number())),
            Operator::Greater => return Ok(Value::Truth(left.number() > right.number())),
            _ => bail!("{operator:?} is done above"),
        };
        Ok(Value::Bits(Bits::new(value, left.width, left.signed)))
    }

    fn call(&mut self, call: &Call) -> Result<Value> {
        let block = Rc::clone(&self.block);
        let Some(receiver) = &call.receiver else {
            return self.function(&block, call);
        };
        if let Expression::Name(name) = &**receiver {
            if block.tables.contains_key(name) {
                return self.apply(&block, name);
            }
            if block.instances.contains_key(name) {
                return self.provided(&block, name, call);
            }
            if name == "packet" {
                return self.packet(call);
            }
        }
        let Value::Record(header) = self.place(receiver)? else { bail!("`{}` of no header", call.name) };
        match call.name.as_str() {
            "isValid" => return Ok(Value::Truth(header.is_valid)),
            "setValid" => header.is_valid = true,
            "setInvalid" => header.is_valid = false,
            other => bail!("a header has no `{other}`"),
        }
        Ok(Value::Nothing)
    }

    fn function(&mut self, block: &Block, call: &Call) -> Result<Value> {
        let arguments = call.arguments.iter().map(|value| self.value(value)).collect::<Result<Vec<_>>>()?;
        if let ("min" | "max", [left, right]) = (call.name.as_str(), &arguments[..]) {
            let is_left = (left.bits()?.number() <= right.bits()?.number()) == (call.name == "min");
            return Ok(if is_left { left.clone() } else { right.clone() });
        }
        if let ("predicate", [lower, upper]) = (call.name.as_str(), &arguments[..]) {
            let bit = u32::from(lower.truth()?) | u32::from(upper.truth()?) << 1;
            return Ok(Value::Bits(Bits::new(1 << bit, PREDICATE_BITS, false)));
        }
        if call.name == "NoAction" {
            return Ok(Value::Nothing);
        }
        let action = block.actions.get(&call.name).with_context(|| format!("no action `{}`", call.name))?;
        self.act(action, arguments)?;
        Ok(Value::Nothing)
    }

    /// Runs a function; returns its parameters as they are afterwards.
    fn act(&mut self, function: &Function, arguments: Vec<Value>) -> Result<Vec<Value>> {
        let names = function.parameters.iter().map(|(name, _)| name.clone());
        self.scopes.push(names.zip(arguments).collect());
        let outcome = self.statement(&function.body);
        let mut scope = self.scopes.pop().unwrap_or_default();
        outcome?;
        Ok(function.parameters.iter().filter_map(|(name, _)| scope.remove(name)).collect())
    }

    fn apply(&mut self, block: &Block, name: &str) -> Result<Value> {
        let table = &block.tables[name];
        let mut key = Vec::new();
        for part in &table.keys {
            key.push(self.value(part)?.bits()?.value);
        }
        let entry = self.tables.get(plain(name)).and_then(|entries| entries.get(&key)).cloned();
        for (patterns, action) in &table.entries {
            let mut fits = true;
            for (pattern, part) in patterns.iter().zip(&key) {
                fits &= self.fits(pattern, *part)?;
            }
            if fits {
                return self.value(action);
            }
        }
        if let Some((action, parameters)) = entry.filter(|_| !table.keys.is_empty()) {
            let found = block.actions.iter().find(|(name, _)| plain(name) == action);
            let action = found.with_context(|| format!("no action `{action}`"))?.1;
            let types = action.parameters.iter().zip(parameters);
            let arguments = types.map(|((_, of), value)| Value::of(of, value)).collect();
            self.act(action, arguments)?;
        } else if let Some(default) = &table.default {
            self.value(default)?;
        }
        Ok(Value::Nothing)
    }

    fn packet(&mut self, call: &Call) -> Result<Value> {
        let argument = call.arguments.first();
        match call.name.as_str() {
            "extract" => {
                let header = argument.context("extract what?")?;
                let Value::Record(mut record) = self.value(header)? else { bail!("no header") };
                record.is_valid = true;
                for value in &mut record.values {
                    let width = value.bits()?.width;
                    value.set(self.take(width)?)?;
                }
                *self.place(header)? = Value::Record(record);
            }
            "advance" => {
                let bits = self.value(argument.context("advance how far?")?)?.bits()?.value;
                self.at += usize::try_from(bits)?;
            }
            "lookahead" => {
                let Some(Type::Bits { width, .. }) = call.types.first() else { bail!("lookahead of what?") };
                let (at, value) = (self.at, self.take(*width)?);
                self.at = at;
                return Ok(Value::Bits(Bits::new(value, *width, false)));
            }
            "emit" => {
                let header = self.value(argument.context("emit what?")?)?;
                self.emit(&header);
            }
            other => bail!("a packet has no `{other}`"),
        }
        Ok(Value::Nothing)
    }

    fn take(&mut self, width: u32) -> Result<u128> {
        let mut value = 0;
        for _ in 0..width {
            let byte = self.packet.get(self.at / 8).context("the packet is too short")?;
            value = value << 1 | u128::from(byte >> (7 - self.at % 8) & 1);
            self.at += 1;
        }
        Ok(value)
    }

    fn emit(&mut self, value: &Value) {
        let Value::Record(record) = value else { return };
        if !record.of.is_header {
            record.values.iter().for_each(|header| self.emit(header));
        } else if record.is_valid {
            self.packet.extend(value.bytes());
        }
    }

    fn provided(&mut self, block: &Block, name: &str, call: &Call) -> Result<Value> {
        let instance = &block.instances[name];
        let arguments = call.arguments.iter().map(|value| self.value(value)).collect::<Result<Vec<_>>>()?;
        let first = arguments.first().cloned().unwrap_or(Value::Nothing);
        match instance.kind.as_str() {
            "RegisterAction" => {
                let Some(Expression::Name(register)) = instance.arguments.first() else {
                    bail!("of no register")
                };
                let function = instance.function.as_ref().context("a register action that does nothing")?;
                self.register(block, register, function, first.bits()?.value)
            }
            "RegisterParam" => self.value(instance.arguments.first().context("without a value")?),
            "Hash" => {
                let of = instance.types.first().context("a hash of no type")?;
                Ok(Value::of(of, crc32(&first.bytes()).into()))
            }
            "Counter" => {
                *self.counts.entry(first.bits()?.value).or_default() += 1;
                Ok(Value::Nothing)
            }
            "Checksum" => Ok(Value::Bits(Bits::new(internet_checksum(&first.bytes()).into(), 16, false))),
            other => bail!("nothing is known of {other}"),
        }
    }

    fn register(&mut self, block: &Block, name: &str, function: &Function, index: u128) -> Result<Value> {
        ensure!(self.touched.insert(name.to_owned()), "{name} is touched twice for one packet");
        let register = block.instances.get(name).with_context(|| format!("no register `{name}`"))?;
        let size =
            self.value(register.arguments.first().context("a register without a size")?)?.bits()?.value;
        ensure!(index < size, "{name}[{index}] is beyond its end, {size}");
        let of = register.types.first().context("a register of no type")?;
        let old = self.registers.get(name).and_then(|values| values.get(&index));
        let mut arguments = vec![old.cloned().unwrap_or_else(|| Value::of(of, 0))];
        arguments.extend(function.parameters.iter().skip(1).map(|(_, of)| Value::of(of, 0)));
        let mut after = self.act(function, arguments)?.into_iter();
        let new = after.next().context("a register action without a value")?;
        self.registers.entry(name.to_owned()).or_default().insert(index, new);
        Ok(after.next().unwrap_or(Value::Nothing))
    }
}

/// A name without the number that p4c puts behind it.
fn plain(name: &str) -> &str {
    match name.rsplit_once('_') {
        Some((plain, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => plain,
        _ => name,
    }
}

/// CRC-32 as Ethernet has it.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (crc & 1).wrapping_neg() & 0xEDB8_8320)
    })
}
