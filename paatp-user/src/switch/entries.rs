//! What stands in the tables of a switch (`p4/paatp.p4`): made from jobs, pure, for whichever way they get there.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;

use paatp_common::limits::MAX_RANKS;
use paatp_common::pool::K_MAX;

/// One key or parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in the program.
    pub name: &'static str,
    /// Its width.
    pub bits: u16,
    /// Its value.
    pub value: u128,
}

impl Field {
    fn new(name: &'static str, bits: u16, value: impl Into<u128>) -> Field {
        Field { name, bits, value: value.into() }
    }

    /// In network order, in as few bytes as its width has.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let bytes = usize::from(self.bits).div_ceil(8);
        self.value.to_be_bytes()[16 - bytes..].to_vec()
    }
}

/// One entry of a table; all keys are exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The table.
    pub table: &'static str,
    /// In the program's order.
    pub keys: Vec<Field>,
    /// The action.
    pub action: &'static str,
    /// In the program's order.
    pub params: Vec<Field>,
}

/// As the command line of BMv2's simple_switch takes it.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table_add {} {}", self.table, self.action)?;
        self.keys.iter().try_for_each(|key| write!(f, " {:#x}", key.value))?;
        write!(f, " =>")?;
        self.params.iter().try_for_each(|param| write!(f, " {:#x}", param.value))
    }
}

/// To whom the results of a job go: a group of the packet replication engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number, not 0.
    pub number: u16,
    /// Ports, each with the number that its copy carries: the rank plus one.
    pub copies: Vec<(u16, u16)>,
}

/// A rank behind the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its number.
    pub rank: u8,
    /// Port that it is at.
    pub port: u16,
    /// Address of Ethernet.
    pub mac: [u8; 6],
    /// The address that may speak for it.
    pub address: Ipv4Addr,
}

/// What a switch is to know of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchedJob {
    /// Number on the aggregator.
    pub number: u16,
    /// Incarnation of its membership.
    pub generation: u32,
    /// The ranks whose contributions are to be in a partial sum.
    pub ranks: Vec<Neighbour>,
    /// S: slots of the ring.
    pub reach: u32,
    /// Places of the table that a chunk may claim, 1 to [`K_MAX`].
    pub k: u8,
    /// Window stamped into answers, in chunks.
    pub granted: u16,
    /// How long a slot may be untouched before another chunk may have it, in µs.
    pub patience: u64,
    /// Slots of the table that are used: a power of two.
    pub slots: u32,
    /// Address of the aggregator.
    pub node: Ipv4Addr,
    /// Port that it is at.
    pub node_port: u16,
}

/// Why a job cannot be put on a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// A partial sum of one rank saves nothing.
    #[error("a switch adds for two ranks at least, and {0} of the job are behind it")]
    TooFewRanks(usize),
    /// The program's masks want it.
    #[error("a switch's table has a power of two of slots, not {0}")]
    Slots(u32),
    /// The program looks at that many.
    #[error("a chunk may have 1 to {K_MAX} places at a switch, not {0}")]
    Places(u8),
    /// The bitmap has no more bits.
    #[error("rank {0} is beyond the 64 that a switch can tell apart")]
    Rank(u8),
}

impl SwitchedJob {
    /// Checks what the program relies on.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), Unfit> {
        if self.ranks.len() < 2 {
            return Err(Unfit::TooFewRanks(self.ranks.len()));
        }
        if !self.slots.is_power_of_two() {
            return Err(Unfit::Slots(self.slots));
        }
        if !(1..=K_MAX).contains(&self.k) {
            return Err(Unfit::Places(self.k));
        }
        match self.ranks.iter().find(|neighbour| usize::from(neighbour.rank) >= MAX_RANKS) {
            Some(neighbour) => Err(Unfit::Rank(neighbour.rank)),
            None => Ok(()),
        }
    }

    /// The group of its results.
    #[must_use]
    pub fn group(&self) -> Group {
        let copies = self.ranks.iter().map(|rank| (rank.port, u16::from(rank.rank) + 1)).collect();
        Group { number: self.number + 1, copies }
    }

    /// Its entries: ranks and copies before the job itself, so that no packet meets a half of it.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for neighbour in &self.ranks {
            entries.push(self.rank_entry(neighbour));
            entries.push(self.copy_entry(neighbour));
        }
        entries.push(self.job_entry());
        entries
    }

    fn job_entry(&self) -> Entry {
        let local = self.ranks.iter().fold(0u64, |bits, neighbour| bits | 1 << neighbour.rank);
        Entry {
            table: "PaatpIngress.jobs",
            keys: vec![
                Field::new("hdr.paatp.job", 16, self.number),
                Field::new("hdr.paatp.generation", 32, self.generation),
            ],
            action: "PaatpIngress.set_job",
            params: vec![
                Field::new("local", 64, local),
                Field::new("reach", 32, self.reach),
                Field::new("k", 8, self.k),
                Field::new("granted", 16, self.granted),
                Field::new("patience", 48, self.patience),
                Field::new("mask", 32, self.slots.wrapping_sub(1)),
                Field::new("node", 32, u32::from(self.node)),
                Field::new("node_port", 9, self.node_port),
                Field::new("group", 16, self.group().number),
            ],
        }
    }

    fn rank_entry(&self, neighbour: &Neighbour) -> Entry {
        Entry {
            table: "PaatpIngress.ranks",
            keys: vec![
                Field::new("hdr.paatp.job", 16, self.number),
                Field::new("hdr.paatp.generation", 32, self.generation),
                Field::new("hdr.paatp.worker", 8, neighbour.rank),
                Field::new("hdr.ipv4.source", 32, u32::from(neighbour.address)),
            ],
            action: "NoAction",
            params: Vec::new(),
        }
    }

    fn copy_entry(&self, neighbour: &Neighbour) -> Entry {
        Entry {
            table: "PaatpEgress.copies",
            keys: vec![
                Field::new("hdr.paatp.job", 16, self.number),
                Field::new("standard_metadata.egress_rid", 16, u16::from(neighbour.rank) + 1),
            ],
            action: "PaatpEgress.set_copy",
            params: vec![
                Field::new("of_rank", 8, neighbour.rank),
                Field::new("of_mac", 48, number_of(neighbour.mac)),
                Field::new("of_address", 32, u32::from(neighbour.address)),
            ],
        }
    }
}

/// The action that sends a frame to all ports of a group.
pub const FLOOD_ACTION: &str = "PaatpIngress.flood";
/// Address of Ethernet of everybody.
const EVERYBODY: [u8; 6] = [0xFF; 6];
/// The group of broadcasts. Groups of jobs have numbers up to 64; this one is unlikely to be somebody else's.
pub const FLOOD_GROUP: u16 = 0x5041;
/// The number of a broadcast's copies, which the program does not send back to where they came from. No rank's is that large.
pub const FLOOD_COPY: u16 = 0xFFFF;

/// Broadcasts go to all ports of [`flood_group`].
#[must_use]
pub fn broadcast() -> Entry {
    Entry {
        action: FLOOD_ACTION,
        params: vec![Field::new("group", 16, FLOOD_GROUP)],
        ..station(EVERYBODY, 0)
    }
}

/// The group of broadcasts, over these ports.
#[must_use]
pub fn flood_group(ports: impl IntoIterator<Item = u16>) -> Group {
    let ports: BTreeSet<u16> = ports.into_iter().collect();
    Group { number: FLOOD_GROUP, copies: ports.into_iter().map(|port| (port, FLOOD_COPY)).collect() }
}

/// Where a station is.
#[must_use]
pub fn station(mac: [u8; 6], port: u16) -> Entry {
    Entry {
        table: "PaatpIngress.stations",
        keys: vec![Field::new("hdr.ethernet.destination", 48, number_of(mac))],
        action: "PaatpIngress.forward",
        params: vec![Field::new("port", 9, port)],
    }
}

fn number_of(mac: [u8; 6]) -> u64 {
    mac.into_iter().fold(0, |number, byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use super::*;

    fn job() -> SwitchedJob {
        let neighbour = |rank: u8| Neighbour {
            rank,
            port: u16::from(rank) + 4,
            mac: [2, 0x50, 0, 0, 1, rank],
            address: Ipv4Addr::new(10, 80, 1, rank),
        };
        SwitchedJob {
            number: 3,
            generation: 0xC0FF_EE00,
            ranks: [0, 2, 63].map(neighbour).into(),
            reach: 256,
            k: 4,
            granted: 64,
            patience: 100_000,
            slots: 1024,
            node: Ipv4Addr::new(10, 80, 0, 1),
            node_port: 9,
        }
    }

    /// What stands between an opening and the closing bracket of it.
    fn inside<'a>(text: &'a str, opening: &str, closing: &str) -> &'a str {
        let from =
            text.find(opening).unwrap_or_else(|| panic!("the program has no `{opening}`")) + opening.len();
        &text[from..from + text[from..].find(closing).unwrap()]
    }

    /// Tables, keys, actions and parameters are those of the program, in its order and of its widths.
    #[test]
    fn entries_are_what_the_program_takes() {
        let program = include_str!("../../../p4/paatp.p4");
        let mut entries = job().entries();
        entries.extend([station([0xFF; 6], 511), broadcast()]);
        let constant = format!("const bit<16> FLOOD_COPY = 0x{FLOOD_COPY:X};");
        assert!(program.contains(&constant), "{constant}");
        for entry in entries {
            let (control, table) = entry.table.split_once('.').unwrap();
            let control = &program[program.find(&format!("control {control}(")).unwrap()..];
            let table = inside(control, &format!("table {table} {{"), "size =");
            let keys: Vec<_> = inside(table, "key = {", "}").split(';').map(str::trim).collect();
            let named: Vec<_> = entry.keys.iter().map(|key| format!("{}: exact", key.name)).collect();
            assert_eq!(keys[..keys.len() - 1], named, "{entry}");
            let action = entry.action.rsplit('.').next().unwrap();
            assert!(inside(table, "actions = {", "}").contains(&format!("{action};")), "{entry}");
            let declared =
                if action == "NoAction" { "" } else { inside(control, &format!("action {action}("), ")") };
            let declared: Vec<_> =
                declared.split(',').map(str::trim).filter(|param| !param.is_empty()).collect();
            assert_eq!(declared.len(), entry.params.len(), "{entry}");
            for (declared, param) in declared.iter().zip(&entry.params) {
                let (kind, name) = declared.split_once(' ').unwrap();
                let bits = match kind {
                    "port_t" => 9,
                    "mac_t" => 48,
                    "ipv4_t" => 32,
                    bits => bits.strip_prefix("bit<").unwrap().strip_suffix('>').unwrap().parse().unwrap(),
                };
                assert_eq!((name, bits), (param.name, param.bits), "{entry}");
            }
            for field in entry.keys.iter().chain(&entry.params) {
                assert!(field.value >> field.bits == 0, "{entry}: {field:?}");
                assert_eq!(field.bytes().len(), usize::from(field.bits).div_ceil(8));
            }
        }
    }

    #[test]
    fn a_broadcast_goes_to_each_port_once() {
        let group = flood_group([4, 9, 4]);
        assert_eq!(group.copies, [(4, FLOOD_COPY), (9, FLOOD_COPY)]);
        let said = format!(
            "table_add PaatpIngress.stations PaatpIngress.flood 0xffffffffffff => {:#x}",
            group.number
        );
        assert_eq!(broadcast().to_string(), said);
    }

    #[test]
    fn the_job_comes_last_and_knows_its_ranks() {
        let entries = job().entries();
        assert_eq!(entries.len(), 7);
        assert_eq!(
            entries.last().unwrap().to_string(),
            "table_add PaatpIngress.jobs PaatpIngress.set_job 0x3 0xc0ffee00 => 0x8000000000000005 0x100 0x4 0x40 0x186a0 \
             0x3ff 0xa500001 0x9 0x4"
        );
        let group = job().group();
        assert_eq!((group.number, group.copies), (4, vec![(4, 1), (6, 3), (67, 64)]));
    }

    #[test]
    fn what_the_program_cannot_do_is_refused() {
        let refused = |change: &dyn Fn(&mut SwitchedJob)| {
            let mut job = job();
            change(&mut job);
            job.check().unwrap_err()
        };
        assert_eq!(refused(&|job| job.ranks.truncate(1)), Unfit::TooFewRanks(1));
        assert_eq!(refused(&|job| job.slots = 1000), Unfit::Slots(1000));
        assert_eq!(refused(&|job| job.k = 0), Unfit::Places(0));
        assert_eq!(refused(&|job| job.k = 9), Unfit::Places(9));
        assert_eq!(refused(&|job| job.ranks[0].rank = 64), Unfit::Rank(64));
        assert_eq!(job().check(), Ok(()));
    }
}
