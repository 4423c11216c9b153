//! Explicit-state model of how a chunk finds or claims its slot in the pool (docs/protocol.md, "The pool"): CPUs that are
//! interleaved at every read of a slot and every lock, chunks with homes of their own and the same, slots that become free
//! at any moment, and a k that changes. Each variant leaves out one part of the rule; `rules` is what is in force.
//!
//!     rustc -O -o /tmp/pool_claim model/pool_claim.rs && /tmp/pool_claim

use std::collections::{HashMap, VecDeque};

const SLOTS: usize = 2;
const KEYS: usize = 3;
const CPUS: usize = 2;
const RANKS: u8 = 0b11;
/// Places of each chunk, in their order. The first is its home.
const PLACES: [[usize; SLOTS]; KEYS] = [[0, 1], [0, 1], [1, 0]];

#[derive(Clone, Copy, Debug)]
struct Variant {
    name: &'static str,
    home_lock: bool,
    second_look: bool,
    /// All places are searched for a match, however many may be claimed.
    match_all: bool,
    /// The claim is tested against min_ack as well: no slot for what is over.
    test_over: bool,
    expect_ok: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Slot {
    /// Chunk + 1; 0 for none.
    key: u8,
    bits: u8,
    locked: bool,
}

/// What a CPU is at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Idle,
    LockHome,
    Look(u8),
    LockSlot,
    Claim,
    UnlockHome,
    Add,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Cpu {
    at: At,
    key: u8,
    rank: u8,
    k: u8,
    found: u8,
    free: u8,
    /// The slot it holds, or refused.
    slot: u8,
}

const NONE: u8 = 9;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    slots: [Slot; SLOTS],
    homes: [bool; SLOTS],
    /// Contributions that were taken, by chunk.
    taken: [u8; KEYS],
    /// Every rank has acknowledged the result.
    over: [bool; KEYS],
    k: u8,
    cpus: [Cpu; CPUS],
}

fn is_over(state: &State, slot: usize) -> bool {
    let key = state.slots[slot].key;
    key == 0 || state.over[key as usize - 1]
}

fn step_cpu(state: &State, i: usize, v: &Variant, next: &mut Vec<State>) {
    let cpu = state.cpus[i];
    let mut s = *state;
    let key = cpu.key as usize;
    match cpu.at {
        At::Idle => {
            for key in 0..KEYS {
                // The window test, before any lock.
                if state.over[key] {
                    continue;
                }
                for rank in 0..2 {
                    let mut s = *state;
                    s.cpus[i] = Cpu { at: At::LockHome, key: key as u8, rank, k: state.k, ..IDLE };
                    next.push(s);
                }
            }
        }
        At::LockHome => {
            let home = PLACES[key][0];
            if v.home_lock {
                if state.homes[home] {
                    return;
                }
                s.homes[home] = true;
            }
            s.cpus[i].at = At::Look(0);
            next.push(s);
        }
        At::Look(turn) => {
            let most = if v.match_all { SLOTS as u8 } else { cpu.k };
            let place = PLACES[key][turn as usize];
            if turn < most && state.slots[place].key as usize == key + 1 {
                s.cpus[i].found = place as u8;
            } else if turn < cpu.k && cpu.free == NONE && is_over(state, place) {
                s.cpus[i].free = place as u8;
            }
            let is_last = turn as usize + 1 == SLOTS || s.cpus[i].found != NONE;
            s.cpus[i].at = match (is_last, s.cpus[i].found, s.cpus[i].free) {
                (false, ..) => At::Look(turn + 1),
                (true, NONE, NONE) => At::UnlockHome,
                _ => At::LockSlot,
            };
            next.push(s);
        }
        At::LockSlot => {
            let slot = if cpu.found != NONE { cpu.found } else { cpu.free };
            if state.slots[slot as usize].locked {
                return;
            }
            s.slots[slot as usize].locked = true;
            s.cpus[i].slot = slot;
            s.cpus[i].at = At::Claim;
            next.push(s);
        }
        At::Claim => {
            let slot = cpu.slot as usize;
            let holds = state.slots[slot].key as usize == key + 1;
            let may = !v.second_look || (is_over(state, slot) && !(v.test_over && state.over[key]));
            if !holds && may {
                s.slots[slot] = Slot { key: key as u8 + 1, bits: 0, locked: true };
            } else if !holds {
                s.slots[slot].locked = false;
                s.cpus[i].slot = NONE;
            }
            s.cpus[i].at = At::UnlockHome;
            next.push(s);
        }
        At::UnlockHome => {
            if v.home_lock {
                s.homes[PLACES[key][0]] = false;
            }
            s.cpus[i] = if cpu.slot == NONE { IDLE } else { Cpu { at: At::Add, ..cpu } };
            next.push(s);
        }
        At::Add => {
            let slot = &mut s.slots[cpu.slot as usize];
            let bit = 1 << cpu.rank;
            if slot.bits & bit == 0 {
                slot.bits |= bit;
                if !state.over[key] {
                    s.taken[key] |= bit;
                }
            }
            slot.locked = false;
            s.cpus[i] = IDLE;
            next.push(s);
        }
    }
}

const IDLE: Cpu = Cpu { at: At::Idle, key: 0, rank: 0, k: 0, found: NONE, free: NONE, slot: NONE };

/// What must hold in every state.
fn flaw(state: &State) -> Option<&'static str> {
    for key in 0..KEYS {
        if state.over[key] {
            continue;
        }
        let holding: Vec<&Slot> = state.slots.iter().filter(|slot| slot.key as usize == key + 1).collect();
        if holding.len() > 1 {
            return Some("a chunk has two slots");
        }
        if holding.first().map_or(0, |slot| slot.bits) != state.taken[key] {
            return Some("a slot does not hold what was taken for its chunk");
        }
    }
    None
}

fn check(v: &Variant) -> (Option<(&'static str, Vec<State>)>, usize, bool) {
    let first = State {
        slots: [Slot::default(); SLOTS],
        homes: [false; SLOTS],
        taken: [0; KEYS],
        over: [false; KEYS],
        k: SLOTS as u8,
        cpus: [IDLE; CPUS],
    };
    let mut from: HashMap<State, Option<State>> = HashMap::from([(first, None)]);
    let mut queue = VecDeque::from([first]);
    let mut ghosts = false;
    while let Some(state) = queue.pop_front() {
        if let Some(flaw) = flaw(&state) {
            let mut trace = vec![state];
            while let Some(Some(before)) = from.get(&trace[trace.len() - 1]) {
                trace.push(*before);
            }
            trace.reverse();
            return (Some((flaw, trace)), from.len(), ghosts);
        }
        let mut next = Vec::new();
        for i in 0..CPUS {
            step_cpu(&state, i, v, &mut next);
        }
        // Nobody waits in a circle: some CPU can always go on.
        if next.is_empty() && state.over.iter().any(|over| !over) {
            return (Some(("all CPUs wait", vec![state])), from.len(), ghosts);
        }
        for key in 0..KEYS {
            if state.taken[key] == RANKS && !state.over[key] {
                let mut s = state;
                s.over[key] = true;
                next.push(s);
            }
        }
        next.push(State { k: 3 - state.k, ..state });
        for s in next {
            // A slot that begins for a chunk that is over.
            ghosts |= (0..SLOTS).any(|i| {
                let (old, new) = (state.slots[i].key, s.slots[i].key);
                old != new && new != 0 && state.over[new as usize - 1]
            });
            if !from.contains_key(&s) {
                from.insert(s, Some(state));
                queue.push_back(s);
            }
        }
    }
    (None, from.len(), ghosts)
}

fn main() {
    let rules = Variant {
        name: "rules",
        home_lock: true,
        second_look: true,
        match_all: true,
        test_over: true,
        expect_ok: true,
    };
    let variants = [
        rules,
        Variant { name: "without the home's lock", home_lock: false, expect_ok: false, ..rules },
        Variant { name: "without the second look", second_look: false, expect_ok: false, ..rules },
        Variant { name: "a match among the first k only", match_all: false, expect_ok: false, ..rules },
        Variant { name: "without the test of min_ack", test_over: false, ..rules },
    ];
    let mut wrong = 0;
    for v in &variants {
        let (found, states, ghosts) = check(v);
        let verdict = found.as_ref().map_or("ok", |(flaw, _)| flaw);
        println!("{:<32} {verdict} ({states} states{})", v.name, if ghosts { ", slots for chunks that are over" } else { "" });
        if found.is_none() != v.expect_ok {
            wrong += 1;
            if let Some((_, trace)) = found {
                trace.iter().for_each(|state| println!("  {state:?}"));
            }
        }
    }
    std::process::exit(i32::from(wrong > 0));
}
