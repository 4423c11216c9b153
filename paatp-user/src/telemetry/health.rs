//! Is the node well? One judgement for status page, `paatp status` and `paatp top`: a pure function over the snapshot.

use std::time::Duration;

use paatp_transport::words::{Ranks, Span};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::control::protocol::JobState;

use crate::switch::error::SwitchState;
use crate::switch::report::SwitchSnapshot;

use super::snapshot::Snapshot;

/// The core loop goes round four times a second. If it has not for this long, nobody looks after lost ranks.
const CORE_LATE: Duration = Duration::from_secs(2);

/// How bad something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing to do.
    #[default]
    Well,
    /// Worth knowing; somebody wanted it so.
    Notice,
    /// Somebody should look at it.
    Trouble,
}

/// Something worth saying.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Notice {
    /// How bad it is.
    pub level: Level,
    /// The job that it is about.
    pub job: Option<String>,
    /// What it is.
    pub sentence: String,
}

/// The node's health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// That of the worst notice.
    pub level: Level,
    /// What there is to say, the worst first.
    pub notices: Vec<Notice>,
}

impl Health {
    fn of(mut notices: Vec<Notice>) -> Health {
        notices.sort_by_key(|notice| std::cmp::Reverse(notice.level));
        Health { level: notices.first().map(|notice| notice.level).unwrap_or_default(), notices }
    }

    /// Leaves the notices that pass, and judges by them.
    pub fn keep(&mut self, pass: impl FnMut(&Notice) -> bool) {
        self.notices.retain(pass);
        *self = Health::of(std::mem::take(&mut self.notices));
    }
}

/// Judges everything but `health` itself.
#[must_use]
pub fn judge(snapshot: &Snapshot) -> Health {
    let of_node = |level, sentence: String| Notice { level, job: None, sentence };
    let mut notices: Vec<Notice> = snapshot
        .problems
        .iter()
        .map(|problem| of_node(Level::Trouble, format!("a table cannot be read: {problem}")))
        .collect();
    notices.extend(snapshot.attachment.notices.iter().cloned());
    if snapshot.core_age_seconds >= CORE_LATE.as_secs_f64() {
        let age = Span(Duration::try_from_secs_f64(snapshot.core_age_seconds).unwrap_or_default());
        let sentence = format!("the aggregator's core loop has not gone round for {age}: see its log");
        notices.push(of_node(Level::Trouble, sentence));
    }
    notices.extend(snapshot.switch.iter().filter_map(switch_notice));
    for job in &snapshot.jobs {
        let name = &job.status.name;
        let trouble = |sentence| Notice { level: Level::Trouble, job: Some(name.clone()), sentence };
        notices.extend(job.stall.iter().map(|stall| trouble(stall.sentence.clone())));
        let lost = Ranks(&job.status.lost_ranks);
        if job.status.state == JobState::Failed {
            notices.push(trouble(format!("job `{name}` failed: {lost} held the others up for too long")));
        } else if !job.status.lost_ranks.is_empty() {
            notices.push(trouble(format!("job `{name}` goes on without {lost}")));
        }
    }
    if snapshot.node.draining {
        notices.push(of_node(Level::Notice, "draining: no new jobs and ranks; what runs goes on".into()));
    }
    Health::of(notices)
}

/// What is wrong with the switch. Jobs go on without it, only slower.
fn switch_notice(switch: &SwitchSnapshot) -> Option<Notice> {
    let why = switch.why.as_deref().unwrap_or("its tables are being read for the first time");
    let time = Span(Duration::try_from_secs_f64(switch.state_seconds).unwrap_or_default());
    let (level, does) = match switch.state {
        SwitchState::Up => return None,
        SwitchState::Connecting => (Level::Notice, "is not in use yet"),
        SwitchState::Refusing => (Level::Trouble, "is in use for some jobs only"),
        SwitchState::Down | SwitchState::NotPrimary | SwitchState::WrongProgram => {
            (Level::Trouble, "is not in use, jobs go on over XDP")
        }
    };
    let sentence = format!("switch {} {does}, for {time}: {why}", switch.address);
    Some(Notice { level, job: None, sentence })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::sample;

    #[test]
    fn the_worst_comes_first() {
        let mut snapshot = sample::node();
        snapshot.node.draining = true;
        snapshot.jobs[1].status.lost_ranks = vec![1];
        snapshot.jobs[2].status.lost_ranks = vec![3, 4];
        snapshot.jobs[2].status.state = JobState::Failed;
        snapshot.problems = vec!["counters: gone".into()];
        snapshot.core_age_seconds = 12.0;
        let down = Notice { level: Level::Trouble, job: None, sentence: "interface `eth0` is down".into() };
        snapshot.attachment.notices = vec![down];
        let health = judge(&snapshot);
        let sentences: Vec<_> = health.notices.iter().map(|notice| notice.sentence.as_str()).collect();
        let expected = [
            "a table cannot be read: counters: gone",
            "interface `eth0` is down",
            "the aggregator's core loop has not gone round for 12 s: see its log",
            "job `train` waits for contributions of rank 2 for 3.2 s, 64 chunks behind",
            "job `eval` goes on without rank 1",
            "job `idle` failed: ranks 3 and 4 held the others up for too long",
            "draining: no new jobs and ranks; what runs goes on",
        ];
        assert_eq!((sentences.as_slice(), health.level), (&expected[..], Level::Trouble));
        let mut rest = health;
        rest.keep(|notice| notice.level < Level::Trouble);
        assert_eq!((rest.level, rest.notices.len()), (Level::Notice, 1));
        rest.keep(|_| false);
        assert_eq!(rest, Health::default());
    }

    #[test]
    fn a_node_without_troubles_is_well() {
        let mut snapshot = sample::node();
        snapshot.jobs.remove(0);
        assert_eq!(judge(&snapshot), Health::default());
    }
}
