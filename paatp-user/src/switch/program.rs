//! What the program in a switch calls our tables: P4Runtime's numbers for them, out of the P4Info that the switch tells.

use std::net::Ipv4Addr;

use paatp_common::limits::LANES_PER_BLOCK;
use paatp_common::switch::{Count, MAX_SWITCH_BLOCKS};
use thiserror::Error;

use super::entries::{Entry, Field, Neighbour, SwitchedJob, broadcast, station};
use super::messages::p4::config::v1 as config;
use super::messages::p4::v1::{
    Action, CounterEntry, Entity, FieldMatch, MulticastGroupEntry, PacketReplicationEngineEntry, Replica,
    TableAction, TableEntry, action, entity, field_match, packet_replication_engine_entry, replica,
    table_action,
};
use super::plan::{Key, State, Table, Value};

/// The counter that the program counts in.
const COUNTS: &str = "PaatpIngress.counts";
/// A register that has as many cells as the table has slots.
const OWNERS: &str = "PaatpIngress.slot_owner";
/// The register of a block's first two lanes, with the block's number.
const LANES: &str = "PaatpIngress.lanes.lanes_{}_0";

/// The switch runs another program than ours, or another version of it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProgramError {
    /// Something of ours is missing.
    #[error(
        "the switch's program has no {kind} `{name}`; load p4/paatp.p4 of this version (--switch-pipeline)"
    )]
    Missing {
        /// What kind of thing.
        kind: &'static str,
        /// What we call it.
        name: String,
    },
    /// Something of ours is something else.
    #[error(
        "in the switch's program {kind} `{name}` has {found}, not {expected}; load p4/paatp.p4 of this version (--switch-pipeline)"
    )]
    Differs {
        /// What kind of thing.
        kind: &'static str,
        /// What we call it.
        name: String,
        /// What it is there.
        found: String,
        /// What it is here.
        expected: String,
    },
}

/// Numbers of a table, its keys, its action and the action's parameters, in the program's order.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Numbers {
    table: u32,
    keys: Vec<u32>,
    action: u32,
    params: Vec<u32>,
}

/// The program in a switch, as far as it is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    tables: [Numbers; Table::ALL.len()],
    /// The action of stations that sends to a group, and its parameter.
    flood: (u32, u32),
    counter: u32,
    slots: u32,
    lanes: u32,
}

/// One entry of each table, in the order of [`Table::ALL`]: what the program must have.
fn samples() -> Vec<Entry> {
    let neighbour = |rank| Neighbour { rank, port: 0, mac: [0; 6], address: Ipv4Addr::UNSPECIFIED };
    let job = SwitchedJob {
        number: 0,
        generation: 0,
        ranks: [0, 1].map(neighbour).into(),
        reach: 0,
        k: 1,
        granted: 0,
        patience: 0,
        slots: 1,
        node: Ipv4Addr::UNSPECIFIED,
        node_port: 0,
    };
    let mut entries = job.entries();
    entries.push(station([0; 6], 0));
    let of = |table: Table| entries.iter().find(|entry| entry.table == table.name()).cloned();
    Table::ALL.into_iter().filter_map(of).collect()
}

fn missing(kind: &'static str, name: &str) -> ProgramError {
    ProgramError::Missing { kind, name: name.into() }
}

/// The one of this name.
fn find<'a, T>(
    list: &'a [T],
    kind: &'static str,
    name: &str,
    preamble: impl Fn(&T) -> Option<&config::Preamble>,
) -> Result<(&'a T, u32), ProgramError> {
    let found = list.iter().find_map(|thing| {
        let preamble = preamble(thing)?;
        (preamble.name == name).then_some((thing, preamble.id))
    });
    found.ok_or_else(|| missing(kind, name))
}

/// Numbers of fields, which must be those that we have, in any order.
fn fields<T>(
    of: &str,
    kind: &'static str,
    ours: &[Field],
    theirs: &[T],
    tell: impl Fn(&T) -> (&str, u32, i32),
) -> Result<Vec<u32>, ProgramError> {
    let name = |field: &Field| format!("{of}: {}", field.name);
    if theirs.len() != ours.len() {
        let (found, expected) = (theirs.len().to_string(), ours.len().to_string());
        return Err(ProgramError::Differs { kind, name: of.into(), found, expected });
    }
    let number = |ours: &Field| {
        let found = theirs.iter().map(&tell).find(|(name, ..)| *name == ours.name);
        let (_, id, bits) = found.ok_or_else(|| missing(kind, &name(ours)))?;
        if bits == i32::from(ours.bits) {
            return Ok(id);
        }
        let (found, expected) = (format!("{bits} bits"), ours.bits.to_string());
        Err(ProgramError::Differs { kind, name: name(ours), found, expected })
    };
    ours.iter().map(number).collect()
}

impl Program {
    /// Finds everything that is ours.
    ///
    /// # Errors
    /// The first thing that is missing or different.
    pub fn of(info: &config::P4Info) -> Result<Program, ProgramError> {
        let action_of = |sample: &Entry| {
            let (action, id) =
                find(&info.actions, "action", sample.action, |action| action.preamble.as_ref())?;
            let params =
                fields(sample.action, "parameters of action", &sample.params, &action.params, |param| {
                    (&param.name, param.id, param.bitwidth)
                })?;
            Ok::<_, ProgramError>((id, params))
        };
        let numbers = |sample: &Entry| {
            let (table, id) = find(&info.tables, "table", sample.table, |table| table.preamble.as_ref())?;
            let keys = fields(sample.table, "keys of table", &sample.keys, &table.match_fields, |key| {
                (&key.name, key.id, key.bitwidth)
            })?;
            let (action, params) = action_of(sample)?;
            if !table.action_refs.iter().any(|reference| reference.id == action) {
                return Err(missing("action of the table", &format!("{}: {}", sample.table, sample.action)));
            }
            Ok(Numbers { table: id, keys, action, params })
        };
        let tables: Vec<Numbers> = samples().iter().map(numbers).collect::<Result<_, _>>()?;
        let tables = tables.try_into().map_err(|_| missing("table", "of all four"))?;
        let Numbers { action, params, .. } = numbers(&broadcast())?;
        let flood = (action, params.first().copied().unwrap_or_default());
        let (counts, counter) = find(&info.counters, "counter", COUNTS, |counter| counter.preamble.as_ref())?;
        if counts.size != Count::COUNT as i64 {
            return Err(ProgramError::Differs {
                kind: "counter",
                name: COUNTS.into(),
                found: format!("{} cells", counts.size),
                expected: Count::COUNT.to_string(),
            });
        }
        let register = |name: &str| find(&info.registers, "register", name, |cells| cells.preamble.as_ref());
        let size = register(OWNERS)?.0.size;
        let slots = u32::try_from(size).ok().filter(|slots| slots.is_power_of_two());
        let slots = slots.ok_or_else(|| ProgramError::Differs {
            kind: "register",
            name: OWNERS.into(),
            found: format!("{size} cells"),
            expected: "a power of two".into(),
        })?;
        let name = |block: usize| LANES.replace("{}", &block.to_string());
        let blocks = (0..MAX_SWITCH_BLOCKS).take_while(|block| register(&name(*block)).is_ok()).count();
        if blocks == 0 {
            return Err(missing("register", &name(0)));
        }
        let lanes = (blocks * LANES_PER_BLOCK) as u32;
        Ok(Program { tables, flood, counter, slots, lanes })
    }

    /// Slots of its table: a power of two.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Most lanes of a packet that it adds.
    #[must_use]
    pub const fn lanes(&self) -> u32 {
        self.lanes
    }

    fn numbers(&self, table: Table) -> &Numbers {
        let [stations, jobs, ranks, copies] = &self.tables;
        match table {
            Table::Stations => stations,
            Table::Jobs => jobs,
            Table::Ranks => ranks,
            Table::Copies => copies,
        }
    }

    /// As P4Runtime has it.
    #[must_use]
    pub fn entity(&self, key: &Key, value: &Value) -> Entity {
        let entity = match (key, value) {
            (Key::Entry(table, keys), Value::Action { params, .. }) => {
                let Numbers { action, params: ids, .. } = self.numbers(*table);
                let params = ids.iter().zip(params);
                let params =
                    params.map(|(id, value)| action::Param { param_id: *id, value: shortest(*value) });
                self.entry_with(*table, keys, Action { action_id: *action, params: params.collect() })
            }
            (Key::Entry(table, keys), Value::Flood(group)) => {
                let (action_id, param_id) = self.flood;
                let param = action::Param { param_id, value: shortest((*group).into()) };
                self.entry_with(*table, keys, Action { action_id, params: vec![param] })
            }
            (Key::Group(number), Value::Copies(copies)) => group(*number, copies.iter().copied()),
            // Keys and values are made in pairs; a group that copies nothing is as good as none.
            (Key::Group(number), Value::Action { .. } | Value::Flood(_)) => {
                group(*number, std::iter::empty())
            }
            (Key::Entry(table, _), Value::Copies(_)) => entity::Entity::TableEntry(TableEntry {
                table_id: self.numbers(*table).table,
                ..TableEntry::default()
            }),
        };
        Entity { entity: Some(entity) }
    }

    fn entry_with(&self, table: Table, keys: &[u128], action: Action) -> entity::Entity {
        let numbers = self.numbers(table);
        let keys = numbers.keys.iter().zip(keys).map(|(id, value)| FieldMatch {
            field_id: *id,
            field_match_type: Some(field_match::FieldMatchType::Exact(field_match::Exact {
                value: shortest(*value),
            })),
        });
        entity::Entity::TableEntry(TableEntry {
            table_id: numbers.table,
            r#match: keys.collect(),
            action: Some(TableAction { r#type: Some(table_action::Type::Action(action)) }),
            ..TableEntry::default()
        })
    }

    /// What to read: all entries of our tables, and all groups.
    #[must_use]
    pub fn all(&self) -> Vec<Entity> {
        let table = |table: Table| {
            let table_id = self.numbers(table).table;
            entity::Entity::TableEntry(TableEntry { table_id, ..TableEntry::default() })
        };
        let all = Table::ALL.into_iter().map(table).chain([group(0, std::iter::empty())]);
        all.map(|entity| Entity { entity: Some(entity) }).collect()
    }

    /// What to read for [`Program::count`].
    #[must_use]
    pub fn counts(&self) -> Entity {
        let counter = CounterEntry { counter_id: self.counter, index: None, data: None };
        Entity { entity: Some(entity::Entity::CounterEntry(counter)) }
    }

    /// What an entity that was read says stands in the switch, if that is ours to know.
    #[must_use]
    pub fn item(&self, entity: &Entity) -> Option<(Key, Value)> {
        match entity.entity.as_ref()? {
            entity::Entity::TableEntry(entry) => self.entry(entry),
            entity::Entity::PacketReplicationEngineEntry(PacketReplicationEngineEntry {
                r#type: Some(packet_replication_engine_entry::Type::MulticastGroupEntry(group)),
            }) => {
                let copies = group.replicas.iter().map(|copy| (port_of(copy), copy.instance));
                Some((Key::Group(group.multicast_group_id), Value::Copies(copies.collect())))
            }
            _ => None,
        }
    }

    fn entry(&self, entry: &TableEntry) -> Option<(Key, Value)> {
        let table = Table::ALL.into_iter().find(|table| self.numbers(*table).table == entry.table_id)?;
        if entry.is_default_action {
            return None;
        }
        let numbers = self.numbers(table);
        let key = |id: &u32| {
            let found = entry.r#match.iter().find(|key| key.field_id == *id)?;
            match found.field_match_type.as_ref()? {
                field_match::FieldMatchType::Exact(exact) => number(&exact.value),
                _ => None,
            }
        };
        let keys = numbers.keys.iter().map(key).collect::<Option<Vec<u128>>>()?;
        let action = match entry.action.as_ref().and_then(|action| action.r#type.as_ref()) {
            Some(table_action::Type::Action(action)) => action,
            _ => return Some((Key::Entry(table, keys), Value::Action { is_ours: false, params: vec![] })),
        };
        if table == Table::Stations && action.action_id == self.flood.0 {
            let group = action.params.iter().find(|param| param.param_id == self.flood.1);
            let group = group.and_then(|param| u32::try_from(number(&param.value)?).ok());
            return Some((Key::Entry(table, keys), Value::Flood(group.unwrap_or_default())));
        }
        let param = |id: &u32| number(&action.params.iter().find(|param| param.param_id == *id)?.value);
        let is_ours = action.action_id == numbers.action;
        let params = if is_ours { numbers.params.iter().map(param).collect() } else { Some(vec![]) };
        // An action without its parameters is none that we wrote.
        let value = match params {
            Some(params) => Value::Action { is_ours, params },
            None => Value::Action { is_ours: false, params: vec![] },
        };
        Some((Key::Entry(table, keys), value))
    }

    /// What was read, as a state.
    #[must_use]
    pub fn state(&self, entities: &[Entity]) -> State {
        entities.iter().filter_map(|entity| self.item(entity)).collect()
    }

    /// Takes in what was read of the counters.
    pub fn count(&self, entities: &[Entity], counts: &mut [u64; Count::COUNT]) {
        for entity in entities {
            let Some(entity::Entity::CounterEntry(cell)) = &entity.entity else { continue };
            let index = cell.index.as_ref().and_then(|index| usize::try_from(index.index).ok());
            let place = index.and_then(|index| counts.get_mut(index));
            if let (Some(place), Some(data)) = (place.filter(|_| cell.counter_id == self.counter), &cell.data)
            {
                *place = u64::try_from(data.packet_count).unwrap_or(0);
            }
        }
    }
}

#[allow(deprecated, reason = "the older of two ways to name a port: servers of both kinds understand it")]
fn group(number: u32, copies: impl Iterator<Item = (u32, u32)>) -> entity::Entity {
    let replica =
        |(port, instance)| Replica { port_kind: Some(replica::PortKind::EgressPort(port)), instance };
    let group = MulticastGroupEntry {
        multicast_group_id: number,
        replicas: copies.map(replica).collect(),
        ..MulticastGroupEntry::default()
    };
    let kind = packet_replication_engine_entry::Type::MulticastGroupEntry(group);
    entity::Entity::PacketReplicationEngineEntry(PacketReplicationEngineEntry { r#type: Some(kind) })
}

#[allow(deprecated, reason = "servers tell ports in the way in which they were named")]
fn port_of(copy: &Replica) -> u32 {
    let port = match &copy.port_kind {
        Some(replica::PortKind::EgressPort(port)) => Some(*port),
        Some(replica::PortKind::Port(bytes)) => number(bytes).and_then(|port| u32::try_from(port).ok()),
        None => None,
    };
    // None of a switch.
    port.unwrap_or(u32::MAX)
}

/// As P4Runtime wants numbers: in network order, without zeros before them, one byte at least.
fn shortest(value: u128) -> Vec<u8> {
    let bytes = value.to_be_bytes();
    let zeros = bytes.iter().take(bytes.len() - 1).take_while(|byte| **byte == 0).count();
    bytes[zeros..].to_vec()
}

/// A number of any length that fits.
fn number(bytes: &[u8]) -> Option<u128> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    let bytes = bytes.get(zeros..)?;
    (bytes.len() <= 16).then(|| bytes.iter().fold(0, |number, byte| number << 8 | u128::from(*byte)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use prost::Message;

    use super::*;
    use crate::switch::entries::flood_group;
    use crate::switch::plan;

    /// What `p4c-bm2-ss` tells of p4/paatp.p4, with 1024 slots of 8 blocks.
    fn info() -> config::P4Info {
        config::P4Info::decode(&include_bytes!("../../../tests/data/paatp.p4info.bin")[..]).unwrap()
    }

    fn refused(change: impl Fn(&mut config::P4Info)) -> String {
        let mut info = info();
        change(&mut info);
        Program::of(&info).unwrap_err().to_string()
    }

    fn named(list: &mut [config::Action], name: &str) -> usize {
        let is_it = |action: &config::Action| action.preamble.as_ref().unwrap().name == name;
        list.iter().position(is_it).unwrap()
    }

    #[test]
    fn another_program_is_named() {
        let cases = [
            (refused(|info| drop(info.tables.remove(1))), "no table `PaatpIngress.jobs`"),
            (
                refused(|info| {
                    let forward = named(&mut info.actions, "PaatpIngress.forward");
                    info.actions.remove(forward);
                }),
                "no action `PaatpIngress.forward`",
            ),
            (
                refused(|info| {
                    let flood = named(&mut info.actions, "PaatpIngress.flood");
                    info.actions[flood].params.clear();
                }),
                "`PaatpIngress.flood` has 0, not 1",
            ),
            (refused(|info| info.tables[2].action_refs.clear()), "PaatpIngress.ranks: NoAction"),
            (
                refused(|info| info.tables[2].match_fields[2].bitwidth = 16),
                "ranks: hdr.paatp.worker` has 16 bits, not 8",
            ),
            (
                refused(|info| info.tables[2].match_fields[2].name.push('x')),
                "`PaatpIngress.ranks: hdr.paatp.worker`",
            ),
            (refused(|info| drop(info.tables[2].match_fields.pop())), "`PaatpIngress.ranks` has 3, not 4"),
            (
                refused(|info| {
                    let set_job = named(&mut info.actions, "PaatpIngress.set_job");
                    info.actions[set_job].params[2].name = "l".into();
                }),
                "PaatpIngress.set_job: k",
            ),
            (refused(|info| info.counters[0].size = 5), "has 5 cells, not 11"),
            (
                refused(|info| info.registers.iter_mut().for_each(|cells| cells.size = 1000)),
                "has 1000 cells, not a power of two",
            ),
            (
                refused(|info| {
                    info.registers.retain(|cells| !cells.preamble.as_ref().unwrap().name.contains("lanes"));
                }),
                "no register `PaatpIngress.lanes.lanes_0_0`",
            ),
            (refused(|info| *info = config::P4Info::default()), "no table `PaatpIngress.stations`"),
        ];
        for (message, part) in cases {
            assert!(message.contains(part) && message.contains("p4/paatp.p4"), "{message}");
        }
    }

    #[test]
    fn slots_and_lanes_are_the_programs() {
        let size = |info| Program::of(&info).map(|program| (program.slots(), program.lanes()));
        assert_eq!(size(info()), Ok((1024, 256)));
        let mut small = info();
        small.registers.retain(|cells| !cells.preamble.as_ref().unwrap().name.contains("lanes_3_"));
        small.registers.iter_mut().for_each(|cells| cells.size = 16);
        assert_eq!(size(small), Ok((16, 96)));
    }

    #[test]
    fn what_is_written_reads_the_same() {
        let program = Program::of(&info()).unwrap();
        let neighbour = |rank: u8| Neighbour {
            rank,
            port: 500 + u16::from(rank),
            mac: [0, 0, 0, 0, 1, rank],
            address: Ipv4Addr::new(10, 0, 0, rank),
        };
        let job = SwitchedJob {
            number: 0,
            generation: 0xC0FF_EE00,
            ranks: [0, 1, 63].map(neighbour).into(),
            reach: 256,
            k: 4,
            granted: 0,
            patience: 250_000,
            slots: 1024,
            node: Ipv4Addr::new(0, 0, 0, 1),
            node_port: 511,
        };
        let flood = flood_group([3, 500]);
        let state = plan::wanted(&[station([0xFE; 6], 3), broadcast()], Some(&flood), [&job]);
        let entities: Vec<Entity> = state.iter().map(|(key, value)| program.entity(key, value)).collect();
        assert_eq!(program.state(&entities), state);
        // Also by a switch that writes zeros before numbers.
        let mut padded = entities;
        for entity in &mut padded {
            let Some(entity::Entity::TableEntry(entry)) = &mut entity.entity else { continue };
            for key in &mut entry.r#match {
                if let Some(field_match::FieldMatchType::Exact(exact)) = &mut key.field_match_type {
                    exact.value.insert(0, 0);
                }
            }
        }
        assert_eq!(program.state(&padded), state);
    }

    #[test]
    fn numbers_are_as_short_as_can_be() {
        let cases: [(u128, &[u8]); 4] =
            [(0, &[0]), (0xFF, &[0xFF]), (0x1_00, &[1, 0]), (u128::MAX, &[0xFF; 16])];
        for (value, bytes) in cases {
            assert_eq!((shortest(value).as_slice(), number(bytes)), (bytes, Some(value)));
        }
        assert_eq!((number(&[1; 17]), number(&[]), number(&[0; 20])), (None, Some(0), Some(0)));
    }
}
