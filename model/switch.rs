// A switch in front of the aggregator (docs/switch.md): one chunk, ranks 0 and 1 behind the switch, rank 2 beside it.
// Explicit state, breadth first; every packet may be lost, doubled and overtaken, a switch may forget its slot at any
// moment. Checked: nobody is added twice, all results are the same, and from every state all ranks can get theirs.
//   rustc --edition 2021 -O -o /tmp/switch model/switch.rs && /tmp/switch
use std::collections::{HashMap, VecDeque};

const RANKS: u8 = 3;
const ALL: u8 = 0b111;
const LOCAL: u8 = 0b011;
const MOST_STATES: usize = 6_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Packet {
    // To the switch: a contribution, sent for the first time or again.
    Data { rank: u8, again: bool },
    // To the aggregator: bits of a contribution or of a partial sum, in the name of a rank.
    Sum { rank: u8, bits: u8 },
    // To the aggregator: a rank asks, and tells whether its contribution is acknowledged.
    Pull { rank: u8, progress: bool },
    // To a rank: the switch has its contribution.
    Trusted { rank: u8 },
    // To a rank: the aggregator's word. `taken` speaks of its contribution; `passed`: every rank's is acknowledged.
    Pending { rank: u8, taken: bool, bits: u8, passed: bool },
    // Through the switch: a result. A copy of one.
    Result { rank: u8, taken: bool, bits: u8 },
    Copy { rank: u8, bits: u8 },
}
use Packet::*;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Rank {
    sent: bool,
    // 0: to be sent, 1: a switch has acknowledged it, 2: the aggregator has.
    acknowledged: u8,
    passed: bool,
    result: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Default)]
struct State {
    net: Vec<Packet>,
    slot: u8,
    sent_up: bool,
    root: u8,
    added: [u8; 3],
    done: u8,
    progress: u8,
    ranks: [Rank; 3],
}

#[derive(Clone, Copy)]
struct Rules {
    name: &'static str,
    // A retransmission goes past the switch.
    bypass: bool,
    // What the aggregator lacks is sent again, if every rank's contribution is acknowledged / in any case.
    reclaim: bool,
    reclaim_early: bool,
    // A duplicate at a slot whose sum was sent sends the sum again.
    send_again: bool,
    // The switch may forget its slot.
    forgets: bool,
    // Bits that are in already make a duplicate, not a conflict.
    subset: bool,
    cap: usize,
    flawed: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            name: "",
            bypass: true,
            reclaim: true,
            reclaim_early: false,
            send_again: false,
            forgets: true,
            subset: true,
            cap: 2,
            flawed: false,
        }
    }
}

impl State {
    // False where the network holds as many packets as it may: then the packet is lost.
    fn throw(mut self, rules: &Rules, packet: Packet) -> State {
        if !self.net.contains(&packet) && self.net.len() < rules.cap {
            self.net.push(packet);
            self.net.sort();
        }
        self
    }

    fn successors(&self, rules: &Rules) -> Vec<(String, State)> {
        let mut all = Vec::new();
        for rank in 0..RANKS {
            let own = self.ranks[rank as usize];
            if own.result == 0 && own.acknowledged == 0 {
                let mut next = self.clone();
                next.ranks[rank as usize].sent = true;
                let packet = if LOCAL >> rank & 1 == 1 { Data { rank, again: own.sent } } else { Sum { rank, bits: 1 << rank } };
                all.push((format!("rank {rank} sends"), next.throw(rules, packet)));
            }
            let progress = own.acknowledged > 0 || own.result != 0;
            all.push((format!("rank {rank} asks"), self.clone().throw(rules, Pull { rank, progress })));
        }
        if rules.forgets && self.slot != 0 {
            all.push(("the switch forgets".into(), State { slot: 0, sent_up: false, ..self.clone() }));
        }
        for packet in &self.net {
            let mut without = self.clone();
            without.net.retain(|other| other != packet);
            all.push(("lost".into(), without.clone()));
            // Taken, and taken while a double stays under way.
            for net in [without, self.clone()] {
                all.push(net.arrive(rules, *packet));
            }
        }
        all
    }

    fn arrive(mut self, rules: &Rules, packet: Packet) -> (String, State) {
        let what = match packet {
            Data { .. } => "a contribution at the switch",
            Sum { .. } => "bits at the aggregator",
            Pull { .. } => "a question",
            _ => "an answer",
        };
        let next = match packet {
            Data { rank, again } => self.at_the_switch(rules, rank, again),
            Sum { rank, bits } => {
                let taken = if bits & self.root == 0 && self.done == 0 {
                    self.root |= bits;
                    (0..3).for_each(|r| self.added[r] += bits >> r & 1);
                    true
                } else {
                    rules.subset && bits & !self.root == 0
                };
                if self.root == ALL {
                    self.done = self.root;
                }
                let answer = self.word(rank, taken);
                self.throw(rules, answer)
            }
            Pull { rank, progress } => {
                self.progress |= (progress as u8) << rank;
                let answer = self.word(rank, false);
                self.throw(rules, answer)
            }
            Trusted { rank } => {
                let own = &mut self.ranks[rank as usize];
                own.acknowledged = own.acknowledged.max(1);
                self
            }
            Pending { rank, taken, bits, passed } => {
                let own = &mut self.ranks[rank as usize];
                own.passed |= passed;
                if taken {
                    own.acknowledged = 2;
                } else if rules.reclaim && own.acknowledged == 1 && bits >> rank & 1 == 0 && (own.passed || rules.reclaim_early) {
                    own.acknowledged = 0;
                }
                self
            }
            // Every result of a local rank passes the switch: the one that finds the slot frees it and goes to all.
            Result { rank, taken, bits } => {
                self.deliver(rank, taken, bits);
                if LOCAL >> rank & 1 == 1 && self.slot != 0 {
                    (self.slot, self.sent_up) = (0, false);
                    self = self.throw(rules, Copy { rank: 1 - rank, bits });
                }
                self
            }
            Copy { rank, bits } => {
                self.deliver(rank, false, bits);
                self
            }
        };
        (format!("{what}"), next)
    }

    fn deliver(&mut self, rank: u8, taken: bool, bits: u8) {
        let own = &mut self.ranks[rank as usize];
        own.result = bits;
        own.acknowledged = if taken { 2 } else { own.acknowledged.max(1) };
    }

    fn word(&self, rank: u8, taken: bool) -> Packet {
        if self.done != 0 {
            return Result { rank, taken, bits: self.done };
        }
        Pending { rank, taken, bits: self.root, passed: self.progress == ALL }
    }

    fn at_the_switch(mut self, rules: &Rules, rank: u8, again: bool) -> State {
        let bit = 1 << rank;
        // No room is the same as a slot that was forgotten.
        if rules.bypass && again {
            return self.throw(rules, Sum { rank, bits: bit });
        }
        if self.slot & bit != 0 {
            if rules.send_again && self.sent_up {
                let bits = self.slot;
                return self.throw(rules, Sum { rank, bits });
            }
            return self.throw(rules, Trusted { rank });
        }
        if self.sent_up {
            return self.throw(rules, Sum { rank, bits: bit });
        }
        self.slot |= bit;
        if self.slot == LOCAL {
            self.sent_up = true;
            return self.throw(rules, Sum { rank, bits: LOCAL });
        }
        self.throw(rules, Trusted { rank })
    }

    fn is_goal(&self) -> bool {
        self.ranks.iter().all(|rank| rank.result != 0)
    }

    fn flaw(&self) -> Option<&'static str> {
        let results: Vec<u8> = self.ranks.iter().map(|rank| rank.result).filter(|bits| *bits != 0).collect();
        if self.added.iter().any(|times| *times > 1) {
            return Some("added twice");
        }
        results.iter().any(|bits| *bits != ALL).then_some("a result that lacks a rank")
    }
}

fn trace(parents: &[(usize, String)], mut index: usize) {
    let mut steps = Vec::new();
    while index != 0 {
        steps.push(parents[index].1.clone());
        index = parents[index].0;
    }
    steps.iter().rev().enumerate().for_each(|(number, step)| println!("    {:2} {step}", number + 1));
}

// True if it came out as it should.
fn check(rules: Rules) -> bool {
    let mut states = vec![State::default()];
    let mut seen = HashMap::from([(states[0].clone(), 0)]);
    let (mut parents, mut before) = (vec![(0, String::new())], vec![Vec::new()]);
    let mut at = 0;
    while at < states.len() {
        if let Some(flaw) = states[at].flaw() {
            println!("{}: flaw: {flaw} ({} states)", rules.name, states.len());
            trace(&parents, at);
            return rules.flawed;
        }
        if states.len() > MOST_STATES {
            println!("{}: no flaw in the first {} states; completion not tested", rules.name, states.len());
            return false;
        }
        for (what, next) in states[at].clone().successors(&rules) {
            let index = *seen.entry(next.clone()).or_insert_with(|| {
                states.push(next);
                parents.push((at, what));
                before.push(Vec::new());
                states.len() - 1
            });
            before[index].push(at as u32);
        }
        at += 1;
    }
    let mut can = vec![false; states.len()];
    let mut open: VecDeque<usize> = (0..states.len()).filter(|index| states[*index].is_goal()).collect();
    open.iter().for_each(|index| can[*index] = true);
    while let Some(index) = open.pop_front() {
        for other in &before[index] {
            if !std::mem::replace(&mut can[*other as usize], true) {
                open.push_back(*other as usize);
            }
        }
    }
    match can.iter().position(|can| !can) {
        Some(index) => {
            println!("{}: flaw: a state without a way to the end ({} states)", rules.name, states.len());
            trace(&parents, index);
            rules.flawed
        }
        None => {
            println!("{}: ok, {} states", rules.name, states.len());
            !rules.flawed
        }
    }
}

fn main() {
    let all = [
        Rules { name: "rules", ..Rules::default() },
        Rules { name: "the switch forgets nothing", forgets: false, ..Rules::default() },
        Rules { name: "what is missing is sent again at once", reclaim_early: true, ..Rules::default() },
        Rules { name: "a duplicate sends the sum again", send_again: true, ..Rules::default() },
        Rules { name: "nothing is reclaimed", reclaim: false, flawed: true, ..Rules::default() },
        Rules { name: "nothing is reclaimed nor forgotten", reclaim: false, forgets: false, flawed: true, ..Rules::default() },
        Rules { name: "retransmissions through the switch", bypass: false, forgets: false, flawed: true, ..Rules::default() },
        Rules { name: "any overlap is a conflict", subset: false, flawed: true, ..Rules::default() },
    ];
    let mut right = true;
    for rules in all {
        right &= check(rules);
    }
    std::process::exit(i32::from(!right));
}
