//! A P4 program as p4c's front and middle end leave it (`p4test --toJSON`): everything inlined, all types known. As much
//! of it as `p4/paatp_tna.p4` needs.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;

/// A type of values.
#[derive(Clone, Debug)]
pub enum Type {
    /// A number.
    Bits {
        /// Bits of it.
        width: u32,
        /// Two's complement.
        signed: bool,
    },
    /// True or false.
    Bool,
    /// A struct or a header.
    Fields(Rc<Fields>),
    /// An enumeration.
    Enum,
}

/// A struct or a header.
#[derive(Debug)]
pub struct Fields {
    /// Headers are valid or not.
    pub is_header: bool,
    /// Names and types.
    pub fields: Vec<(String, Type)>,
}

/// Operators with two sides of one width.
#[derive(Clone, Copy, Debug)]
pub enum Operator {
    Add,
    Sub,
    /// Subtracts without a sign, to 0 at least.
    Saturate,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    Equal,
    NotEqual,
    Less,
    Greater,
    BothTrue,
    EitherTrue,
}

/// An expression.
#[derive(Clone, Debug)]
pub enum Expression {
    Number { value: u128, width: u32, signed: bool },
    Truth(bool),
    Name(String),
    Member(Box<Expression>, String),
    Enum(String),
    Slice(Box<Expression>, u32, u32),
    Concat(Box<Expression>, Box<Expression>),
    Binary(Operator, Box<Expression>, Box<Expression>),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    Complement(Box<Expression>),
    Cast(Type, Box<Expression>),
    List(Vec<Expression>),
    Masked(Box<Expression>, Box<Expression>),
    Any,
    Call(Call),
}

/// A call of a method, an action or a function.
#[derive(Clone, Debug)]
pub struct Call {
    /// Whose method it is.
    pub receiver: Option<Box<Expression>>,
    /// Its name.
    pub name: String,
    /// Of a generic method.
    pub types: Vec<Type>,
    /// What it gets.
    pub arguments: Vec<Expression>,
}

/// A statement.
#[derive(Clone, Debug)]
pub enum Statement {
    Block(Vec<Statement>),
    Assign(Expression, Expression),
    Call(Expression),
    If(Expression, Box<Statement>, Box<Statement>),
    Variable(String, Type, Option<Expression>),
}

/// An action, or the function of a register action.
#[derive(Clone, Debug)]
pub struct Function {
    /// Names and types of its parameters.
    pub parameters: Vec<(String, Type)>,
    /// What it does.
    pub body: Statement,
}

/// A table. What the control plane enters is exact.
#[derive(Clone, Debug)]
pub struct Table {
    /// What is looked up.
    pub keys: Vec<Expression>,
    /// Entries that the program has itself: patterns and action; the first that fits counts.
    pub entries: Vec<(Vec<Expression>, Expression)>,
    /// What happens where nothing is found.
    pub default: Option<Expression>,
}

/// Something that the architecture provides.
#[derive(Clone, Debug)]
pub struct Instance {
    /// What it is.
    pub kind: String,
    /// Types that it was made with.
    pub types: Vec<Type>,
    /// What it was made with.
    pub arguments: Vec<Expression>,
    /// Of a register action: what it does.
    pub function: Option<Function>,
}

/// A parser or a control.
#[derive(Debug, Default)]
pub struct Block {
    /// Names and types of parameters that are values.
    pub parameters: Vec<(String, Type)>,
    /// Variables.
    pub variables: Vec<(String, Type)>,
    /// Actions by name.
    pub actions: HashMap<String, Function>,
    /// Tables by name.
    pub tables: HashMap<String, Table>,
    /// Externs by name.
    pub instances: HashMap<String, Instance>,
    /// Of a control.
    pub body: Option<Statement>,
    /// Of a parser: by name.
    pub states: HashMap<String, State>,
}

/// A state of a parser.
#[derive(Debug)]
pub struct State {
    /// What it does.
    pub statements: Vec<Statement>,
    /// What decides on the next one.
    pub select: Vec<Expression>,
    /// Next states: the first of them whose pattern fits.
    pub cases: Vec<(Vec<Expression>, String)>,
}

/// All parsers and controls by name.
pub fn read(json: &Json) -> Result<HashMap<String, Block>> {
    let mut reader = Reader { ids: HashMap::new(), declarations: HashMap::new() };
    reader.index(json);
    let mut blocks = HashMap::new();
    for object in reader.list(json, "objects")? {
        if let Some(name) = object["name"].as_str() {
            reader.declarations.insert(name, object);
        }
    }
    for (name, object) in &reader.declarations {
        if matches!(kind(object), "P4Parser" | "P4Control") {
            let block = reader.block(object).with_context(|| format!("in {name}"))?;
            blocks.insert((*name).to_owned(), block);
        }
    }
    Ok(blocks)
}

/// p4c writes each node once, and its number wherever it stands again.
struct Reader<'a> {
    ids: HashMap<u64, &'a Json>,
    declarations: HashMap<&'a str, &'a Json>,
}

fn kind(node: &Json) -> &str {
    node["Node_Type"].as_str().unwrap_or_default()
}

impl<'a> Reader<'a> {
    fn index(&mut self, node: &'a Json) {
        match node {
            Json::Object(fields) => {
                if let (Some(id), true) = (node["Node_ID"].as_u64(), fields.contains_key("Node_Type")) {
                    self.ids.insert(id, node);
                }
                fields.values().for_each(|value| self.index(value));
            }
            Json::Array(items) => items.iter().for_each(|item| self.index(item)),
            _ => {}
        }
    }

    fn whole(&self, node: &'a Json) -> &'a Json {
        let id = node["Node_ID"].as_u64().filter(|_| node["Node_Type"].is_null());
        id.and_then(|id| self.ids.get(&id).copied()).unwrap_or(node)
    }

    fn get(&self, node: &'a Json, field: &str) -> &'a Json {
        self.whole(&self.whole(node)[field])
    }

    fn list(&self, node: &'a Json, field: &str) -> Result<Vec<&'a Json>> {
        let vector = self.get(node, field);
        let items =
            vector["vec"].as_array().with_context(|| format!("{} has no list `{field}`", kind(node)))?;
        Ok(items.iter().map(|item| self.whole(item)).collect())
    }

    fn name(&self, node: &'a Json, field: &str) -> Result<String> {
        let name = self.get(node, field).as_str();
        Ok(name.with_context(|| format!("{} has no `{field}`", kind(node)))?.to_owned())
    }

    fn path(&self, node: &'a Json) -> Result<String> {
        self.name(self.get(node, "path"), "name")
    }

    fn number_type(&self, node: &'a Json) -> Result<Type> {
        let width = node["size"].as_u64().context("a number without a size")?;
        Ok(Type::Bits { width: u32::try_from(width)?, signed: node["isSigned"] == true })
    }

    fn type_of(&self, node: &'a Json) -> Result<Type> {
        let node = self.whole(node);
        match kind(node) {
            "Type_Bits" => self.number_type(node),
            "Type_Boolean" => Ok(Type::Bool),
            "Type_Enum" => Ok(Type::Enum),
            "Type_Name" => {
                let name = self.path(node)?;
                let declared = self.declarations.get(name.as_str());
                self.type_of(declared.with_context(|| format!("there is no type {name}"))?)
            }
            kind @ ("Type_Struct" | "Type_Header") => {
                let mut fields = Vec::new();
                for field in self.list(node, "fields")? {
                    fields.push((self.name(field, "name")?, self.type_of(self.get(field, "type"))?));
                }
                Ok(Type::Fields(Rc::new(Fields { is_header: kind == "Type_Header", fields })))
            }
            other => bail!("a type of kind {other}"),
        }
    }

    fn expressions(&self, node: &'a Json, field: &str) -> Result<Vec<Expression>> {
        self.list(node, field)?.into_iter().map(|item| self.expression(item)).collect()
    }

    fn boxed(&self, node: &'a Json, field: &str) -> Result<Box<Expression>> {
        Ok(Box::new(self.expression(self.get(node, field))?))
    }

    fn constant(&self, node: &'a Json, field: &str) -> Result<u32> {
        let value = self.get(self.get(node, field), "value").as_u64();
        Ok(u32::try_from(value.context("a slice that is no number")?)?)
    }

    fn expression(&self, node: &'a Json) -> Result<Expression> {
        let node = self.whole(node);
        Ok(match kind(node) {
            "Constant" => {
                let value = u128::from(node["value"].as_u64().context("a constant of more than 64 bits")?);
                match self.get(node, "type") {
                    of if kind(of) == "Type_Bits" => {
                        let Type::Bits { width, signed } = self.number_type(of)? else { bail!("no number") };
                        Expression::Number { value, width, signed }
                    }
                    _ => Expression::Number { value, width: 0, signed: false },
                }
            }
            "BoolLiteral" => Expression::Truth(node["value"] == true),
            "PathExpression" => Expression::Name(self.path(node)?),
            "Member" if kind(self.get(node, "expr")) == "TypeNameExpression" => {
                Expression::Enum(self.name(node, "member")?)
            }
            "Member" => Expression::Member(self.boxed(node, "expr")?, self.name(node, "member")?),
            "Slice" => Expression::Slice(
                self.boxed(node, "e0")?,
                self.constant(node, "e1")?,
                self.constant(node, "e2")?,
            ),
            "Concat" => Expression::Concat(self.boxed(node, "left")?, self.boxed(node, "right")?),
            "Mask" => Expression::Masked(self.boxed(node, "left")?, self.boxed(node, "right")?),
            "LNot" => Expression::Not(self.boxed(node, "expr")?),
            "Neg" => Expression::Negative(self.boxed(node, "expr")?),
            "Cmpl" => Expression::Complement(self.boxed(node, "expr")?),
            "Cast" => Expression::Cast(self.type_of(self.get(node, "destType"))?, self.boxed(node, "expr")?),
            "ListExpression" => Expression::List(self.expressions(node, "components")?),
            "StructExpression" => {
                let components = self.list(node, "components")?;
                let values =
                    components.into_iter().map(|named| self.expression(self.get(named, "expression")));
                Expression::List(values.collect::<Result<_>>()?)
            }
            "DefaultExpression" => Expression::Any,
            "MethodCallExpression" => Expression::Call(self.call(node)?),
            other => {
                let operator = operator(other)?;
                Expression::Binary(operator, self.boxed(node, "left")?, self.boxed(node, "right")?)
            }
        })
    }

    fn arguments(&self, node: &'a Json) -> Result<Vec<Expression>> {
        let arguments = self.list(node, "arguments")?;
        arguments.into_iter().map(|argument| self.expression(self.get(argument, "expression"))).collect()
    }

    fn call(&self, node: &'a Json) -> Result<Call> {
        let method = self.get(node, "method");
        let (receiver, name) = match kind(method) {
            // A register action's own.
            "Member" if kind(self.get(method, "expr")) == "This" => (None, self.name(method, "member")?),
            "Member" => (Some(self.boxed(method, "expr")?), self.name(method, "member")?),
            _ => (None, self.path(method)?),
        };
        // What is generic in other ways has types that are no values.
        let types = if name == "lookahead" { self.list(node, "typeArguments")? } else { Vec::new() };
        let types = types.into_iter().map(|of| self.type_of(of)).collect::<Result<_>>()?;
        Ok(Call { receiver, name, types, arguments: self.arguments(node)? })
    }

    fn statements(&self, nodes: Vec<&'a Json>) -> Result<Vec<Statement>> {
        nodes.into_iter().map(|node| self.statement(node)).collect()
    }

    fn statement(&self, node: &'a Json) -> Result<Statement> {
        Ok(match kind(node) {
            "BlockStatement" => Statement::Block(self.statements(self.list(node, "components")?)?),
            "AssignmentStatement" => {
                Statement::Assign(*self.boxed(node, "left")?, *self.boxed(node, "right")?)
            }
            "MethodCallStatement" => Statement::Call(*self.boxed(node, "methodCall")?),
            "IfStatement" => {
                let otherwise = match self.get(node, "ifFalse") {
                    Json::Null => Statement::Block(Vec::new()),
                    node => self.statement(node)?,
                };
                let then = self.statement(self.get(node, "ifTrue"))?;
                Statement::If(*self.boxed(node, "condition")?, Box::new(then), Box::new(otherwise))
            }
            "Declaration_Variable" => {
                let (name, of) = self.variable(node)?;
                let first = match self.get(node, "initializer") {
                    Json::Null => None,
                    node => Some(self.expression(node)?),
                };
                Statement::Variable(name, of, first)
            }
            "EmptyStatement" => Statement::Block(Vec::new()),
            other => bail!("a statement of kind {other}"),
        })
    }

    fn variable(&self, node: &'a Json) -> Result<(String, Type)> {
        Ok((self.name(node, "name")?, self.type_of(self.get(node, "type"))?))
    }

    fn function(&self, parameters: &'a Json, node: &'a Json) -> Result<Function> {
        let parameters = self.list(self.get(parameters, "parameters"), "parameters")?;
        let parameters = parameters.into_iter().map(|node| self.variable(node)).collect::<Result<_>>()?;
        Ok(Function { parameters, body: self.statement(self.get(node, "body"))? })
    }

    fn table(&self, node: &'a Json) -> Result<Table> {
        let mut table = Table { keys: Vec::new(), entries: Vec::new(), default: None };
        for property in self.list(self.get(node, "properties"), "properties")? {
            let value = self.get(property, "value");
            match property["name"].as_str() {
                Some("key") => {
                    for element in self.list(value, "keyElements")? {
                        let how = self.path(self.get(element, "matchType"))?;
                        ensure!(
                            matches!(how.as_str(), "exact" | "ternary"),
                            "a key that is matched by {how}"
                        );
                        table.keys.push(*self.boxed(element, "expression")?);
                    }
                }
                Some("entries") => {
                    for entry in self.list(value, "entries")? {
                        let keys = self.expressions(self.get(entry, "keys"), "components")?;
                        table.entries.push((keys, *self.boxed(entry, "action")?));
                    }
                }
                Some("default_action") => table.default = Some(*self.boxed(value, "expression")?),
                _ => {}
            }
        }
        Ok(table)
    }

    fn instance(&self, node: &'a Json) -> Result<Instance> {
        let of = self.get(node, "type");
        let (base, types) = match kind(of) {
            "Type_Specialized" => (self.get(of, "baseType"), self.list(of, "arguments")?),
            _ => (of, Vec::new()),
        };
        let function = match self.get(node, "initializer") {
            Json::Null => None,
            initializer => {
                let functions = self.list(initializer, "components")?;
                let function = functions.first().context("a register action that does nothing")?;
                Some(self.function(self.get(function, "type"), function)?)
            }
        };
        let types = types.into_iter().map(|of| self.type_of(of)).collect::<Result<_>>()?;
        Ok(Instance { kind: self.path(base)?, types, arguments: self.arguments(node)?, function })
    }

    fn state(&self, node: &'a Json) -> Result<State> {
        let statements = self.statements(self.list(node, "components")?)?;
        let next = self.get(node, "selectExpression");
        if kind(next) == "PathExpression" {
            return Ok(State { statements, select: Vec::new(), cases: vec![(Vec::new(), self.path(next)?)] });
        }
        let select = self.expressions(self.get(next, "select"), "components")?;
        let mut cases = Vec::new();
        for case in self.list(next, "selectCases")? {
            let pattern = match self.expression(self.get(case, "keyset"))? {
                Expression::List(patterns) => patterns,
                Expression::Any => Vec::new(),
                pattern => vec![pattern],
            };
            cases.push((pattern, self.path(self.get(case, "state"))?));
        }
        Ok(State { statements, select, cases })
    }

    fn block(&self, node: &'a Json) -> Result<Block> {
        let is_parser = kind(node) == "P4Parser";
        let mut block = Block::default();
        for parameter in self.list(self.get(self.get(node, "type"), "applyParams"), "parameters")? {
            // A packet is no value.
            if let Ok(parameter) = self.variable(parameter) {
                block.parameters.push(parameter);
            }
        }
        for local in self.list(node, if is_parser { "parserLocals" } else { "controlLocals" })? {
            let name = self.name(local, "name")?;
            match kind(local) {
                "Declaration_Variable" => block.variables.push(self.variable(local)?),
                "P4Action" => drop(block.actions.insert(name, self.function(local, local)?)),
                "P4Table" => drop(block.tables.insert(name, self.table(local)?)),
                "Declaration_Instance" => drop(block.instances.insert(name, self.instance(local)?)),
                other => bail!("a declaration of kind {other}"),
            }
        }
        if is_parser {
            for state in self.list(node, "states")? {
                let name = self.name(state, "name")?;
                if !matches!(name.as_str(), "accept" | "reject") {
                    block.states.insert(name, self.state(state)?);
                }
            }
        } else {
            block.body = Some(self.statement(self.get(node, "body"))?);
        }
        Ok(block)
    }
}

fn operator(kind: &str) -> Result<Operator> {
    Ok(match kind {
        "Add" => Operator::Add,
        "Sub" => Operator::Sub,
        "SubSat" => Operator::Saturate,
        "BAnd" => Operator::And,
        "BOr" => Operator::Or,
        "BXor" => Operator::Xor,
        "Shl" => Operator::Shl,
        "Shr" => Operator::Shr,
        "Equ" => Operator::Equal,
        "Neq" => Operator::NotEqual,
        "Lss" => Operator::Less,
        "Grt" => Operator::Greater,
        "LAnd" => Operator::BothTrue,
        "LOr" => Operator::EitherTrue,
        other => bail!("an expression of kind {other}"),
    })
}
