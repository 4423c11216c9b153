//! What a switch holds, what it is to hold, and the way from one to the other: pure, in steps of which each prefix is safe.
//!
//! Tables and groups are told apart by what they are about, so that nothing here knows of P4Runtime's numbers.

use std::collections::{BTreeMap, BTreeSet};

use paatp_common::limits::MAX_JOBS;

use super::entries::{Entry, FLOOD_ACTION, Group, SwitchedJob};

/// A table of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Where everybody is.
    Stations,
    /// What the switch is told of a job.
    Jobs,
    /// Who may speak for a rank.
    Ranks,
    /// To whom copies of results go.
    Copies,
}

impl Table {
    /// All of them.
    pub const ALL: [Table; 4] = [Table::Stations, Table::Jobs, Table::Ranks, Table::Copies];

    /// As the program calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Table::Stations => "PaatpIngress.stations",
            Table::Jobs => "PaatpIngress.jobs",
            Table::Ranks => "PaatpIngress.ranks",
            Table::Copies => "PaatpEgress.copies",
        }
    }
}

/// What one thing in a switch is known by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// An entry, by its keys in the program's order.
    Entry(Table, Vec<u128>),
    /// A group, by its number.
    Group(u32),
}

/// What stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// What an entry does.
    Action {
        /// Its action is the one that we use in this table.
        is_ours: bool,
        /// Its parameters in the program's order.
        params: Vec<u128>,
    },
    /// A station's frames go to all ports of this group.
    Flood(u32),
    /// To which ports a group copies, each with the copy's number.
    Copies(BTreeSet<(u32, u32)>),
}

/// All that stands in our tables, and all groups.
pub type State = BTreeMap<Key, Value>;

/// What is to be done with one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is not there yet.
    Insert,
    /// It is there, and is something else.
    Modify,
    /// It is not to be there.
    Delete,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// What is done.
    pub kind: Kind,
    /// With what.
    pub key: Key,
    /// What it is to be; what it was, of a deletion.
    pub value: Value,
}

impl Update {
    /// What it does, for people.
    #[must_use]
    pub fn in_words(&self) -> String {
        let verb = match self.kind {
            Kind::Insert => "insert into",
            Kind::Modify => "modify",
            Kind::Delete => "delete from",
        };
        match &self.key {
            Key::Entry(table, keys) => {
                let keys: Vec<String> = keys.iter().map(|key| format!("{key:#x}")).collect();
                format!("{verb} {} {}", table.name(), keys.join(" "))
            }
            Key::Group(number) => format!("{verb} multicast group {number}"),
        }
    }

    /// Does it to a state.
    pub fn apply(&self, state: &mut State) {
        match self.kind {
            Kind::Delete => state.remove(&self.key),
            Kind::Insert | Kind::Modify => state.insert(self.key.clone(), self.value.clone()),
        };
    }
}

/// The steps, in their order. What belongs to one may be done in any order, and what is left out of one (because the
/// switch refused it) makes later ones smaller: each is made from what the switch really holds then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Jobs that are over, or whose ranks, copies or group are about to change, are taken out.
    RetireJobs,
    /// What no job needs goes.
    Retire,
    /// Stations, ranks, copies and groups come.
    Prepare,
    /// Jobs all of whose ranks, copies and group are there come.
    Serve,
}

impl Step {
    /// All, in their order.
    pub const ALL: [Step; 4] = [Step::RetireJobs, Step::Retire, Step::Prepare, Step::Serve];

    /// What is to be done in this step.
    #[must_use]
    pub fn updates(self, held: &State, wanted: &State) -> Vec<Update> {
        match self {
            Step::RetireJobs => retire_jobs(held, wanted),
            Step::Retire => retire(held, wanted),
            Step::Prepare => prepare(held, wanted),
            Step::Serve => serve(held, wanted),
        }
    }
}

/// An entry as it stands in a switch.
#[must_use]
pub fn item(entry: &Entry) -> Option<(Key, Value)> {
    let table = Table::ALL.into_iter().find(|table| table.name() == entry.table)?;
    let keys = entry.keys.iter().map(|key| key.value).collect();
    let params: Vec<u128> = entry.params.iter().map(|param| param.value).collect();
    let value = match (entry.action, params.first()) {
        (FLOOD_ACTION, Some(group)) => Value::Flood(u32::try_from(*group).ok()?),
        _ => Value::Action { is_ours: true, params },
    };
    Some((Key::Entry(table, keys), value))
}

/// A group as it stands in a switch.
#[must_use]
pub fn group(group: &Group) -> (Key, Value) {
    let copies = group.copies.iter().map(|(port, copy)| (u32::from(*port), u32::from(*copy)));
    (Key::Group(group.number.into()), Value::Copies(copies.collect()))
}

/// What a switch is to hold.
#[must_use]
pub fn wanted<'a>(
    stations: &[Entry],
    flood: Option<&Group>,
    jobs: impl IntoIterator<Item = &'a SwitchedJob>,
) -> State {
    let mut state: State = stations.iter().filter_map(item).chain(flood.map(group)).collect();
    for job in jobs {
        state.extend(job.entries().iter().filter_map(item));
        let (key, value) = group(&job.group());
        state.insert(key, value);
    }
    state
}

/// What the entry of a job itself is known by.
#[must_use]
pub fn job_key(job: &SwitchedJob) -> Key {
    Key::Entry(Table::Jobs, vec![job.number.into(), job.generation.into()])
}

/// The number of the job that something belongs to, if it belongs to one. A group's is one less than its own; groups
/// beyond are not ours.
fn job_of(key: &Key) -> Option<u128> {
    match key {
        Key::Entry(Table::Jobs | Table::Ranks | Table::Copies, keys) => keys.first().copied(),
        Key::Entry(Table::Stations, _) => None,
        Key::Group(number) => number.checked_sub(1).map(u128::from),
    }
}

fn is_job(key: &Key) -> bool {
    matches!(key, Key::Entry(Table::Jobs, _))
}

/// Ours to delete. The switch may forward for others, who tell it where their stations are and how broadcasts go.
fn is_ours(key: &Key) -> bool {
    match key {
        Key::Entry(Table::Stations, _) => false,
        Key::Group(number) => (1..=MAX_JOBS as u32).contains(number),
        Key::Entry(..) => true,
    }
}

/// A way that somebody else gave broadcasts, which is as good as ours. (A station of ours cannot be elsewhere.)
const fn is_as_good(ours: &Value) -> bool {
    matches!(ours, Value::Flood(_))
}

/// Belongs to the job with this entry: to the job's number, and if it is of a generation, to that one.
fn supports(key: &Key, job: &Key) -> bool {
    let same_generation = match (key, job) {
        (Key::Entry(Table::Ranks, rank), Key::Entry(_, job)) => rank.get(1) == job.get(1),
        _ => true,
    };
    !is_job(key) && job_of(key).is_some() && job_of(key) == job_of(job) && same_generation
}

/// All that a wanted job stands on is there.
fn is_supported(job: &Key, held: &State, wanted: &State) -> bool {
    wanted.iter().filter(|(key, _)| supports(key, job)).all(|(key, value)| held.get(key) == Some(value))
}

/// A job of the switch is to stay while all else is put right: as it is, or with other numbers. (Its ranks are the same, or
/// its group were another one.)
fn is_to_stay(job: &Key, held: &State, wanted: &State) -> bool {
    wanted.contains_key(job) && is_supported(job, held, wanted)
}

/// Jobs that the switch has and is not to have like that: it did not let go of them.
struct Stuck<'a>(Vec<&'a Key>);

impl Stuck<'_> {
    fn of<'a>(held: &'a State, wanted: &State) -> Stuck<'a> {
        Stuck(held.keys().filter(|key| is_job(key) && !is_to_stay(key, held, wanted)).collect())
    }

    /// One of them stands on it.
    fn need(&self, key: &Key) -> bool {
        self.0.iter().any(|job| supports(key, job))
    }
}

fn deletions(held: &State, gone: impl Fn(&Key, &Value) -> bool) -> Vec<Update> {
    let gone = held.iter().filter(|(key, value)| is_ours(key) && gone(key, value));
    gone.map(|(key, value)| Update { kind: Kind::Delete, key: key.clone(), value: value.clone() }).collect()
}

fn retire_jobs(held: &State, wanted: &State) -> Vec<Update> {
    deletions(held, |key, _| is_job(key) && !is_to_stay(key, held, wanted))
}

fn retire(held: &State, wanted: &State) -> Vec<Update> {
    let stuck = Stuck::of(held, wanted);
    deletions(held, |key, _| !is_job(key) && !wanted.contains_key(key) && !stuck.need(key))
}

/// What differs of what passes.
fn differences(held: &State, wanted: &State, passes: impl Fn(&Key) -> bool) -> Vec<Update> {
    let change = |(key, value): (&Key, &Value)| {
        let kind = match held.get(key) {
            None => Kind::Insert,
            Some(old) if old != value && !is_as_good(value) => Kind::Modify,
            Some(_) => return None,
        };
        passes(key).then(|| Update { kind, key: key.clone(), value: value.clone() })
    };
    wanted.iter().filter_map(change).collect()
}

fn prepare(held: &State, wanted: &State) -> Vec<Update> {
    let stuck = Stuck::of(held, wanted);
    // What a job stands on that could not be taken out stays as it is.
    differences(held, wanted, |key| !is_job(key) && !stuck.need(key))
}

fn serve(held: &State, wanted: &State) -> Vec<Update> {
    differences(held, wanted, |key| is_job(key) && is_supported(key, held, wanted))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
