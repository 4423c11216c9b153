//! The program for Tofino as a switch with ports: its six parts one after the other, as the architecture joins them, with
//! the tables of a job. How a chip spreads it over its stages is not looked at, but that each register is touched once
//! for a packet is.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use paatp_common::limits::MAX_RANKS;
use paatp_common::tag::header_weight;
use paatp_common::wire::{Kind, flags};
use paatp_user::switch::entries::SwitchedJob;

use super::ir::Block;
use super::run::{Unit, Value};
use super::{ir, run};

/// Port and, of a copy, its number in the group.
type Exit = (u16, u16);
/// What stands in `ucast_egress_port` while nothing was put there.
const NOWHERE: u128 = 0x1FF;
/// Room that the chip puts in front of each packet for the data of its port.
const PORT_METADATA: [u8; 8] = [0; 8];
/// Modes of the egress.
const ANSWER: u128 = 1;
const SUM: u128 = 2;

/// The switch.
#[derive(Debug)]
pub struct Tofino {
    ingress_parser: Unit,
    /// Has the counters.
    pub ingress: Unit,
    ingress_deparser: Unit,
    egress_parser: Unit,
    egress: Unit,
    egress_deparser: Unit,
    groups: HashMap<u128, Vec<Exit>>,
    /// Nanoseconds.
    pub now: u64,
    /// What is in metadata that the program has not written.
    fill: u128,
}

/// The program.
#[derive(Debug)]
pub struct Program {
    blocks: HashMap<String, Rc<Block>>,
}

impl Program {
    /// From what `p4test --toJSON` wrote.
    ///
    /// # Errors
    /// Where that is not understood.
    pub fn read(json: &Path) -> Result<Program> {
        let text =
            std::fs::read_to_string(json).with_context(|| format!("cannot read {}", json.display()))?;
        let blocks = ir::read(&serde_json::from_str(&text)?)?;
        Ok(Program { blocks: blocks.into_iter().map(|(name, block)| (name, Rc::new(block))).collect() })
    }
}

impl Tofino {
    /// Without jobs.
    ///
    /// # Errors
    /// Where the program lacks a part.
    pub fn new(program: &Program) -> Result<Tofino> {
        let unit = |name: &str| {
            let block = program.blocks.get(name).with_context(|| format!("the program has no {name}"))?;
            anyhow::Ok(Unit::new(Rc::clone(block)))
        };
        Ok(Tofino {
            ingress_parser: unit("PaatpIngressParser")?,
            ingress: unit("PaatpIngress")?,
            ingress_deparser: unit("PaatpIngressDeparser")?,
            egress_parser: unit("PaatpEgressParser")?,
            egress: unit("PaatpEgress")?,
            egress_deparser: unit("PaatpEgressDeparser")?,
            groups: HashMap::new(),
            now: 0,
            fill: 1,
        })
    }

    /// Says where a station is.
    pub fn add_station(&mut self, mac: [u8; 6], port: u16) {
        let stations = self.ingress.tables.entry("stations").or_default();
        stations.insert(vec![number(mac)], ("forward", vec![port.into()]));
    }

    /// Installs a job: what docs/switch.md says of the tables. `seed` is to be another one for each job and generation.
    pub fn install(&mut self, job: &SwitchedJob, seed: u32) {
        let (name, generation) = (u128::from(job.number), u128::from(job.generation));
        let (node, node_port) = (u128::from(u32::from(job.node)), u128::from(job.node_port));
        let group = u128::from(job.group().number);
        self.groups.insert(group, job.group().copies);
        let bits = job.ranks.iter().fold(0u64, |bits, rank| bits | 1 << rank.rank);
        let contributors = job.ranks.len() as u32;
        for (local, neighbour) in (0u128..).zip(&job.ranks) {
            let (rank, port) = (u128::from(neighbour.rank), u128::from(neighbour.port));
            let (own, address) = (1u64 << neighbour.rank, u128::from(u32::from(neighbour.address)));
            let add = |unit: &mut Unit, table, key: &[u128], action, parameters: &[u128]| {
                let entry = (action, parameters.to_vec());
                unit.tables.entry(table).or_default().insert(key.to_vec(), entry);
            };
            let [own_high, own_low] = halves(own).map(u128::from);
            let key = [name, generation, rank, 0, own_high, own_low, address, node, port];
            let missing = contributors - 1;
            add(&mut self.ingress, "ranks", &key, "contribute", &[seed.into(), local, missing.into()]);
            let key = [name, generation, rank, node, node_port];
            add(&mut self.ingress, "results", &key, "take_result", &[seed.into(), group]);

            let index = (name % 64) * MAX_RANKS as u128 + rank;
            let parameters = [u128::from(job.granted), Gain::of_an_answer(job.granted).into(), index];
            add(&mut self.egress, "ranks", &[ANSWER, name, rank, generation], "answer", &parameters);
            let gain = Gain::of_a_sum(neighbour.rank, own, bits, contributors);
            let parameters = [rank, bits.into(), contributors.into(), gain.into()];
            add(&mut self.egress, "ranks", &[SUM, name, rank, generation], "send_up", &parameters);
            let gain = Gain::default().and(1, u32::from(neighbour.rank) << 8).0;
            let parameters = [rank, number(neighbour.mac), address, index, gain.into()];
            add(&mut self.egress, "copies", &[name, rank + 1], "set_copy", &parameters);
        }
    }

    /// One frame: what leaves, and where.
    ///
    /// # Errors
    /// Where the program cannot be carried out.
    pub fn frame(&mut self, port: u16, frame: &[u8]) -> Result<Vec<(u16, Vec<u8>)>> {
        // Something without a pattern: a linear congruential generator.
        self.fill = self.fill.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let stamp = u64::from(port) << 48 | self.now & 0xFFFF_FFFF_FFFF;
        let packet = [&stamp.to_be_bytes()[..], &PORT_METADATA, frame].concat();
        let Some((mut parsed, rest)) = self.ingress_parser.run(packet, HashMap::new(), self.fill)? else {
            return Ok(Vec::new());
        };
        let mut take = |name| parsed.remove(name).with_context(|| format!("no {name}"));
        let mut manager = Value::of(self.ingress.parameter("ig_tm_md")?, 0);
        manager.field("ucast_egress_port")?.set(NOWHERE)?;
        let values = HashMap::from([
            ("hdr", take("hdr")?),
            ("meta", take("meta")?),
            ("ig_intr_md", take("ig_intr_md")?),
            ("ig_tm_md", manager),
            ("ig_dprsr_md", Value::of(self.ingress.parameter("ig_dprsr_md")?, 0)),
        ]);
        let (mut after, _) = self.ingress.run(Vec::new(), values, 0)?.context("no parser")?;
        let mut take = |name| after.remove(name).with_context(|| format!("no {name}"));
        let (headers, mut manager, mut deparser) = (take("hdr")?, take("ig_tm_md")?, take("ig_dprsr_md")?);
        if field(&mut deparser, "drop_ctl")? != 0 {
            return Ok(Vec::new());
        }
        let values = HashMap::from([("hdr", headers)]);
        let (_, mut body) = self.ingress_deparser.run(Vec::new(), values, 0)?.context("no parser")?;
        body.extend(rest);

        let unicast = Some(field(&mut manager, "ucast_egress_port")?).filter(|port| *port != NOWHERE);
        let mut exits: Vec<Exit> = unicast.map(|port| (port as u16, 0)).into_iter().collect();
        let group = self.groups.get(&field(&mut manager, "mcast_grp_a")?);
        exits.extend(group.into_iter().flatten());
        let skips_egress = field(&mut manager, "bypass_egress")? == 1;
        let mut out = Vec::new();
        for (port, copy) in exits {
            let left = if skips_egress { Some(body.clone()) } else { self.leave(port, copy, &body)? };
            out.extend(left.map(|frame| (port, frame)));
        }
        out.sort();
        Ok(out)
    }

    fn leave(&mut self, port: u16, copy: u16, body: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut intrinsic = Value::of(self.egress_parser.parameter("eg_intr_md")?, 0);
        intrinsic.field("egress_port")?.set(port.into())?;
        intrinsic.field("egress_rid")?.set(copy.into())?;
        let packet = [intrinsic.bytes(), body.to_vec()].concat();
        let parsed = self.egress_parser.run(packet, HashMap::new(), self.fill)?;
        let (mut parsed, rest) = parsed.context("the egress refuses what the ingress sent")?;
        let mut take = |name| parsed.remove(name).with_context(|| format!("no {name}"));
        let values = HashMap::from([
            ("hdr", take("hdr")?),
            ("meta", take("meta")?),
            ("eg_intr_md", take("eg_intr_md")?),
            ("eg_dprsr_md", Value::of(self.egress.parameter("eg_dprsr_md")?, 0)),
        ]);
        let (mut after, _) = self.egress.run(Vec::new(), values, 0)?.context("no parser")?;
        let mut take = |name| after.remove(name).with_context(|| format!("no {name}"));
        if field(&mut take("eg_dprsr_md")?, "drop_ctl")? != 0 {
            return Ok(None);
        }
        let values = HashMap::from([("hdr", take("hdr")?)]);
        let (_, mut frame) = self.egress_deparser.run(Vec::new(), values, 0)?.context("no parser")?;
        frame.extend(rest);
        Ok(Some(frame))
    }
}

/// What a header's check gains as words change by what the control plane knows.
#[derive(Clone, Copy, Default)]
struct Gain(u32);

impl Gain {
    fn and(self, word: usize, change: u32) -> Gain {
        Gain(self.0.wrapping_add((header_weight(word) as u32).wrapping_mul(change)))
    }

    /// A contribution becomes an answer: kind, flags, and the window, which was 0.
    fn of_an_answer(granted: u16) -> u32 {
        let first = |kind: Kind, flags: u8| (kind as u32) << 8 | u32::from(flags);
        let change = first(Kind::Answer, flags::PARTIAL).wrapping_sub(first(Kind::Data, flags::PAYLOAD));
        Gain::default().and(0, change).and(13, granted.into()).0
    }

    /// A contribution becomes that of all.
    fn of_a_sum(rank: u8, own: u64, bits: u64, contributors: u32) -> u32 {
        let ([bits_high, bits_low], [own_high, own_low]) = (halves(bits), halves(own));
        Gain::default()
            .and(0, flags::PARTIAL.into())
            .and(1, rank.into())
            .and(8, bits_high.wrapping_sub(own_high))
            .and(9, bits_low.wrapping_sub(own_low))
            .and(12, contributors - 1)
            .0
    }
}

fn halves(bits: u64) -> [u32; 2] {
    [(bits >> 32) as u32, bits as u32]
}

fn number(mac: [u8; 6]) -> u128 {
    mac.iter().fold(0, |value, byte| value << 8 | u128::from(*byte))
}

fn field(of: &mut Value, name: &str) -> Result<u128> {
    let bits: run::Bits = of.field(name)?.bits()?;
    Ok(bits.value)
}
