//! From every state to every other, with refusals on the way: never a job without what it stands on.

use std::net::Ipv4Addr;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, subsequence};

use super::*;
use crate::switch::entries::{Neighbour, broadcast, flood_group, station};

/// What stands for a rank's place: the same rank may be elsewhere in the next generation.
fn neighbour(rank: u8, moved: u8) -> Neighbour {
    Neighbour {
        rank,
        port: u16::from(rank) + u16::from(moved),
        mac: [2, 0, 0, 0, moved, rank],
        address: Ipv4Addr::new(10, 0, moved, rank),
    }
}

fn job(number: u16, generation: u32, ranks: &[u8], moved: u8, k: u8) -> SwitchedJob {
    SwitchedJob {
        number,
        generation,
        ranks: ranks.iter().map(|rank| neighbour(*rank, moved)).collect(),
        reach: 256,
        k,
        granted: 0,
        patience: 1000,
        slots: 1024,
        node: Ipv4Addr::new(10, 9, 9, 9),
        node_port: 9,
    }
}

fn any_job(number: u16) -> impl Strategy<Value = SwitchedJob> {
    let ranks = subsequence((0u8..5).collect::<Vec<_>>(), 2..=4);
    (1u32..3, ranks, 0u8..2, 1u8..3)
        .prop_map(move |(generation, ranks, moved, k)| job(number, generation, &ranks, moved, k))
}

fn any_state() -> impl Strategy<Value = State> {
    let jobs = (0u16..3).map(|number| proptest::option::of(any_job(number))).collect::<Vec<_>>();
    (jobs, vec((0u8..4, 0u16..3), 0..4)).prop_map(|(jobs, stations)| {
        let stations: Vec<Entry> =
            stations.iter().map(|(mac, port)| station([2, 0, 0, 0, 9, *mac], *port)).collect();
        wanted(&stations, None, jobs.iter().flatten())
    })
}

/// No job without the ranks, copies and group of its bits.
fn is_whole(state: &State) -> bool {
    state.iter().filter(|(key, _)| is_job(key)).all(|(key, value)| {
        let (Key::Entry(_, keys), Value::Action { params, .. }) = (key, value) else { return false };
        let (number, generation, local) = (keys[0], keys[1], params[0]);
        (0..64u128).filter(|rank| local >> rank & 1 == 1).all(|rank| {
            let registered = state.keys().any(|key| {
                matches!(key, Key::Entry(Table::Ranks, keys) if keys[..3] == [number, generation, rank])
            });
            let copies = state.get(&Key::Entry(Table::Copies, vec![number, rank + 1])).is_some();
            let group = match state.get(&Key::Group(number as u32 + 1)) {
                Some(Value::Copies(copies)) => copies.iter().any(|copy| u128::from(copy.1) == rank + 1),
                _ => false,
            };
            registered && copies && group
        })
    })
}

/// A switch refuses to insert what is there, and to change what is not.
fn can(update: &Update, state: &State) -> bool {
    match (update.kind, state.get(&update.key)) {
        (Kind::Insert, None) => true,
        (Kind::Modify, Some(old)) => *old != update.value,
        (Kind::Delete, Some(old)) => *old == update.value,
        _ => false,
    }
}

/// Does all steps, each in an order of its own; `refuse` says what the switch does not do. Every state on the way is whole
/// if the first is.
fn walk(
    mut state: State,
    goal: &State,
    order: &[Index],
    refuse: impl Fn(&Update) -> bool,
) -> Result<State, TestCaseError> {
    let mut turns = order.iter().cycle();
    let mut was_whole = is_whole(&state);
    for step in Step::ALL {
        let mut updates = step.updates(&state, goal);
        while !updates.is_empty() {
            let next = turns.next().map_or(0, |turn| turn.index(updates.len()));
            let update = updates.swap_remove(next);
            prop_assert!(can(&update, &state), "{update:?}");
            if !refuse(&update) {
                update.apply(&mut state);
            }
            let whole = is_whole(&state);
            prop_assert!(whole || !was_whole, "after {update:?}: {state:#?}");
            was_whole |= whole;
        }
    }
    Ok(state)
}

/// All that is wanted is there, and nothing else but stations of others.
fn is_there(state: &State, goal: &State) -> bool {
    let others = |key: &Key| matches!(key, Key::Entry(Table::Stations, _)) && !goal.contains_key(key);
    state.iter().filter(|(key, _)| !others(key)).eq(goal)
}

proptest! {
    #[test]
    fn the_way_leads_there_and_is_safe(from in any_state(), goal in any_state(), order in vec(any::<Index>(), 1..20)) {
        let end = walk(from, &goal, &order, |_| false)?;
        prop_assert!(is_there(&end, &goal), "{:#?} is not {:#?}", end, goal);
        prop_assert!(Step::ALL.iter().all(|step| step.updates(&end, &goal).is_empty()));
    }

    /// What somebody took out, or changed, comes back.
    #[test]
    fn what_was_taken_out_comes_back(
        goal in any_state(),
        other in any_state(),
        gone in vec(any::<Index>(), 0..8),
        order in vec(any::<Index>(), 1..20),
    ) {
        let mut from = goal.clone();
        from.extend(other);
        for index in gone {
            if let Some(key) = from.keys().nth(index.index(from.len().max(1))).cloned() {
                from.remove(&key);
            }
        }
        let end = walk(from, &goal, &order, |_| false)?;
        prop_assert!(is_there(&end, &goal), "{:#?} is not {:#?}", end, goal);
    }

    /// One refusal costs what depends on it, and nothing else; when it is over the rest comes.
    #[test]
    fn a_refusal_costs_only_what_depends_on_it(
        from in any_state(),
        goal in any_state(),
        refused in any::<Index>(),
        order in vec(any::<Index>(), 1..20),
    ) {
        let keys: Vec<&Key> = from.keys().chain(goal.keys()).collect();
        prop_assume!(!keys.is_empty());
        let refused = keys[refused.index(keys.len())].clone();
        let end = walk(from, &goal, &order, |update| update.key == refused)?;
        let number = job_of(&refused);
        let of_others = |(key, _): &(&Key, &Value)| number.is_none() || job_of(key) != number;
        for (key, value) in goal.iter().filter(of_others).filter(|(key, _)| **key != refused) {
            prop_assert_eq!(end.get(key), Some(value), "{:?}", key);
        }
        let end = walk(end, &goal, &order, |_| false)?;
        prop_assert!(is_there(&end, &goal), "{:#?} is not {:#?}", end, goal);
    }
}

#[test]
fn the_order_is_that_of_the_documentation() {
    let goal = wanted(&[station([2; 6], 4)], None, &[job(3, 7, &[0, 1], 0, 4)]);
    let kinds = |from: &State, goal: &State| -> Vec<Vec<(Kind, String)>> {
        let mut state = from.clone();
        let each = Step::ALL.map(|step| {
            let updates = step.updates(&state, goal);
            updates.iter().for_each(|update| update.apply(&mut state));
            let name = |key: &Key| match key {
                Key::Entry(table, _) => format!("{table:?}"),
                Key::Group(number) => format!("group {number}"),
            };
            updates.iter().map(|update| (update.kind, name(&update.key))).collect()
        });
        each.into()
    };
    let names = |kind: Kind, names: &[&str]| -> Vec<(Kind, String)> {
        names.iter().map(|name| (kind, (*name).to_owned())).collect()
    };
    let supports = ["Stations", "Ranks", "Ranks", "Copies", "Copies", "group 4"];
    let come = [names(Kind::Insert, &supports), names(Kind::Insert, &["Jobs"])];
    assert_eq!(kinds(&State::new(), &goal), [vec![], vec![], come[0].clone(), come[1].clone()]);
    // The station stays.
    let go = [names(Kind::Delete, &["Jobs"]), names(Kind::Delete, &supports[1..])];
    assert_eq!(kinds(&goal, &State::new()), [go[0].clone(), go[1].clone(), vec![], vec![]]);
    // Only the number of places changes: the job goes on meanwhile.
    let tuned = wanted(&[station([2; 6], 4)], None, &[job(3, 7, &[0, 1], 0, 2)]);
    assert_eq!(kinds(&goal, &tuned), [vec![], vec![], vec![], names(Kind::Modify, &["Jobs"])]);
    // The next generation.
    let next = wanted(&[station([2; 6], 4)], None, &[job(3, 8, &[0, 1], 0, 4)]);
    let ranks = ["Ranks", "Ranks"];
    assert_eq!(
        kinds(&goal, &next),
        [
            names(Kind::Delete, &["Jobs"]),
            names(Kind::Delete, &ranks),
            names(Kind::Insert, &ranks),
            names(Kind::Insert, &["Jobs"])
        ]
    );
}

#[test]
fn what_is_somebody_elses_stays() {
    let at = |address: u128, value: Value| (Key::Entry(Table::Stations, vec![address]), value);
    let forward = |port: u128| Value::Action { is_ours: true, params: vec![port] };
    let everybody = 0xFFFF_FFFF_FFFF;
    let flood = (Key::Group(100), Value::Copies([(0, 0)].into()));
    let held: State = [at(7, forward(1)), at(everybody, Value::Flood(100)), flood].into();
    let updates = |goal: &State| -> Vec<Update> {
        Step::ALL.into_iter().flat_map(|step| step.updates(&held, goal)).collect()
    };
    assert_eq!(updates(&State::new()), []);
    // A way of ours for broadcasts is not needed, and our own stations are where we say.
    let mut goal = wanted(&[broadcast()], Some(&flood_group([1, 2])), []);
    assert!(matches!(&updates(&goal)[..], [Update { kind: Kind::Insert, key: Key::Group(_), .. }]));
    goal.extend([at(7, forward(2))]);
    assert!(updates(&goal).contains(&Update {
        kind: Kind::Modify,
        key: at(7, forward(2)).0,
        value: forward(2)
    }));
}
