//! What can be wrong with a switch, as operators read it.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use super::program::ProgramError;

/// A switch cannot be used, or not all of it.
#[derive(Debug, Error)]
pub enum SwitchError {
    /// Nobody answers at its address.
    #[error(
        "no P4Runtime server can be reached ({0}); is the switch's agent running, and --switch its address?"
    )]
    Unreachable(String),
    /// It took the request and did not answer.
    #[error("the switch did not answer within {limit:?} when asked to {what}; see its agent's log")]
    Silent {
        /// What was asked.
        what: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// It answered that it does not.
    #[error("the switch refuses to {what}: {why}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// gRPC's code and the switch's words.
        why: String,
    },
    /// Another controller has it.
    #[error(
        "another controller is primary of the switch (election id {primary}, here {own}), and only one can be; stop the other `paatp run --switch`, or whatever it is"
    )]
    NotPrimary {
        /// Election id of the one that is.
        primary: u128,
        /// Our own.
        own: u128,
    },
    /// The controller that was primary is gone.
    #[error("the switch has no primary controller any more (the last had election id {last}); taking over")]
    Vacant {
        /// Election id of the last one.
        last: u128,
    },
    /// It ended the session.
    #[error("the switch ended the session; asking again")]
    Ended,
    /// It has no program.
    #[error(
        "the switch has no program; load p4/paatp.p4 into it, or let --switch-pipeline FILE,P4INFO.bin do it"
    )]
    NoProgram,
    /// It has another program.
    #[error(transparent)]
    WrongProgram(#[from] ProgramError),
    /// A file of `--switch-pipeline` cannot be used.
    #[error("--switch-pipeline: {path} cannot be used: {why}")]
    Pipeline {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Some entries are not taken.
    #[error(
        "the switch refuses {refused} of {all} changes of its tables, the first with \"{first}\"; their jobs go on over XDP, and it is tried again"
    )]
    Writes {
        /// Changes refused.
        refused: usize,
        /// Changes asked for.
        all: usize,
        /// What it says of the first one.
        first: String,
    },
    /// It answers with more than can be.
    #[error("the switch told of more than {0} entries, which our tables do not hold; see its agent's log")]
    TooMuch(usize),
}

/// How a switch does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SwitchState {
    /// Nobody has answered yet.
    #[default]
    Connecting,
    /// Its tables are what they are to be.
    Up,
    /// Some changes of its tables are refused.
    Refusing,
    /// It does not answer, or not as it should.
    Down,
    /// Another controller has it.
    NotPrimary,
    /// It has no program, or not ours.
    WrongProgram,
}

impl SwitchState {
    /// Its tables are in our hands.
    #[must_use]
    pub const fn is_up(self) -> bool {
        matches!(self, SwitchState::Up | SwitchState::Refusing)
    }
}

impl SwitchError {
    /// How a switch does of which this is the last that was heard.
    #[must_use]
    pub const fn state(&self) -> SwitchState {
        match self {
            SwitchError::Writes { .. } => SwitchState::Refusing,
            SwitchError::NotPrimary { .. } | SwitchError::Vacant { .. } => SwitchState::NotPrimary,
            SwitchError::NoProgram | SwitchError::WrongProgram(_) | SwitchError::Pipeline { .. } => {
                SwitchState::WrongProgram
            }
            _ => SwitchState::Down,
        }
    }

    /// The session can go on.
    #[must_use]
    pub const fn is_partial(&self) -> bool {
        matches!(self, SwitchError::Writes { .. })
    }
}
