//! Which slots of the node's table belong to whom. First fit; a range that is given back joins its neighbours.
//!
//! Nobody clears a range: a slot names the generation that wrote it, no generation is given out twice, and a slot of
//! another generation counts as empty, compared under its lock (protocol-rules F11, F12).

use std::collections::BTreeMap;

/// Slots of one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A ring of its own.
    Reserved {
        /// Its first slot in the node's table.
        first: u32,
        /// Their number.
        slots: u32,
    },
    /// The pool, and one slot of its own.
    Shared {
        /// That slot.
        own: u32,
    },
}

impl Memory {
    /// The first slot of its own.
    #[must_use]
    pub const fn first(self) -> u32 {
        match self {
            Memory::Reserved { first, .. } => first,
            Memory::Shared { own } => own,
        }
    }

    /// The number of slots of its own.
    #[must_use]
    pub const fn slots(self) -> u32 {
        match self {
            Memory::Reserved { slots, .. } => slots,
            Memory::Shared { .. } => 1,
        }
    }
}

/// So many slots in a row are not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Free slots, all together.
    pub free: u32,
    /// Most free slots in a row.
    pub longest: u32,
}

/// The node's slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotTable {
    total: u32,
    /// Length of each free range, by its start; no two touch.
    free: BTreeMap<u32, u32>,
}

impl SlotTable {
    /// A table of so many free slots.
    #[must_use]
    pub fn new(total: u32) -> SlotTable {
        SlotTable { total, free: (total > 0).then_some((0, total)).into_iter().collect() }
    }

    /// All slots.
    #[must_use]
    pub const fn total(&self) -> u32 {
        self.total
    }

    /// What is free.
    #[must_use]
    pub fn room(&self) -> NoRoom {
        NoRoom { free: self.free.values().sum(), longest: self.free.values().copied().max().unwrap_or(0) }
    }

    /// Takes the first free range of that length.
    ///
    /// # Errors
    /// What is free, if there is none.
    pub fn reserve(&mut self, slots: u32) -> Result<Memory, NoRoom> {
        let found = self.free.iter().find(|(_, length)| **length >= slots);
        let Some((first, length)) = found.map(|(first, length)| (*first, *length)) else {
            return Err(self.room());
        };
        self.free.remove(&first);
        if length > slots {
            self.free.insert(first + slots, length - slots);
        }
        Ok(Memory::Reserved { first, slots })
    }

    /// Takes the range that somebody has already, as far as it is free.
    pub fn take(&mut self, first: u32, slots: u32) -> Option<Memory> {
        let end = first.checked_add(slots).filter(|_| slots > 0)?;
        let (start, length) =
            self.free.range(..=first).next_back().map(|(start, length)| (*start, *length))?;
        if start + length < end {
            return None;
        }
        self.free.remove(&start);
        if start < first {
            self.free.insert(start, first - start);
        }
        if end < start + length {
            self.free.insert(end, start + length - end);
        }
        Some(Memory::Reserved { first, slots })
    }

    /// Takes a range back.
    pub fn release(&mut self, memory: Memory) {
        let (mut first, mut length) = (memory.first(), memory.slots());
        if length == 0 {
            return;
        }
        if let Some(after) = self.free.remove(&(first + length)) {
            length += after;
        }
        let before = self.free.range(..first).next_back().map(|(start, length)| (*start, *length));
        if let Some((start, before)) = before.filter(|(start, before)| start + before == first) {
            first = start;
            length += before;
        }
        self.free.insert(first, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_does_not_fit_is_told_how_much_would() {
        let mut table = SlotTable::new(100);
        let Ok(first) = table.reserve(40) else { panic!("refused") };
        let Ok(_) = table.reserve(30) else { panic!("refused") };
        table.release(first);
        assert_eq!(table.reserve(64), Err(NoRoom { free: 70, longest: 40 }));
        assert_eq!(table.reserve(16).map(Memory::first), Ok(0));
    }

    proptest! {
        /// Ranges never overlap, nothing is lost, and an empty table is whole again.
        #[test]
        fn ranges_are_kept_apart(total in 0..300u32, steps in proptest::collection::vec((any::<bool>(), 1..80u32, any::<prop::sample::Index>()), 0..120)) {
            let mut table = SlotTable::new(total);
            let mut held: Vec<Memory> = Vec::new();
            for (take, slots, which) in steps {
                if take {
                    match table.reserve(slots) {
                        Ok(memory) => held.push(memory),
                        Err(room) => prop_assert!(room.longest < slots && room.longest <= room.free),
                    }
                } else if !held.is_empty() {
                    table.release(held.swap_remove(which.index(held.len())));
                }
                let mut owner = vec![0; total as usize];
                for memory in &held {
                    for slot in memory.first()..memory.first() + memory.slots() {
                        owner[slot as usize] += 1;
                    }
                }
                prop_assert!(owner.iter().all(|owners| *owners < 2));
                prop_assert_eq!(table.room().free as usize, owner.iter().filter(|owners| **owners == 0).count());
            }
            held.into_iter().for_each(|memory| table.release(memory));
            prop_assert_eq!(table, SlotTable::new(total));
        }
    }
}
