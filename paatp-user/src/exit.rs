//! Exit statuses of `paatp`: what a script, a service manager or a container platform can act on.

use crate::control::listen::ListenError;
use crate::daemon::DaemonError;
use crate::engine::EngineError;

/// Why a process ended. Beyond these there is 128 and a signal's number, after a second signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All went well.
    Success,
    /// It failed while it ran. Starting again may help.
    Failure,
    /// Called or configured wrongly. Starting again does not help.
    Usage,
    /// This machine, or this process's privileges, cannot run it as it is.
    Preflight,
    /// Another one runs here: the interface or a port is taken.
    Taken,
    /// Pinned state of another build is in the way.
    Incompatible,
    /// `paatp status`: the aggregator answers, and somebody should look at it.
    Trouble,
}

impl Exit {
    /// All of them, by number.
    pub const ALL: [Exit; 7] = [
        Exit::Success,
        Exit::Failure,
        Exit::Usage,
        Exit::Preflight,
        Exit::Taken,
        Exit::Incompatible,
        Exit::Trouble,
    ];

    /// The number that the process ends with.
    #[must_use]
    pub const fn status(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Failure => 1,
            Exit::Usage => 2,
            Exit::Preflight => 3,
            Exit::Taken => 4,
            Exit::Incompatible => 5,
            Exit::Trouble => 6,
        }
    }

    /// For the documentation.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Exit::Success => "all went well; for `run`: ended by one signal",
            Exit::Failure => "it failed; standard error says why and what to do",
            Exit::Usage => "called or configured wrongly",
            Exit::Preflight => {
                "`run` cannot work here as it is: capabilities, kernel, BPF file system, interface, MTU, driver, memory"
            }
            Exit::Taken => "`run`: the interface or the port is taken, perhaps by another `paatp run`",
            Exit::Incompatible => "`run`: pinned state of another build is in the way",
            Exit::Trouble => "`status`: the aggregator answers, and something needs a look",
        }
    }

    /// What an error of the daemon amounts to.
    #[must_use]
    pub const fn of_daemon(error: &DaemonError) -> Exit {
        match error {
            DaemonError::SwitchOptions(_)
            | DaemonError::NotAtSwitch { .. }
            | DaemonError::Config(_)
            | DaemonError::Ports { .. }
            | DaemonError::NoToken(_)
            | DaemonError::Token(_)
            | DaemonError::Tls(_) => Exit::Usage,
            DaemonError::Engine(error) => Exit::of_engine(error),
            DaemonError::Listen(error) => match error {
                ListenError::InUse(_) => Exit::Taken,
                ListenError::Other { .. } => Exit::Preflight,
                ListenError::Address(_) | ListenError::Everywhere(_) => Exit::Usage,
            },
            DaemonError::System { .. } | DaemonError::Metrics(_) | DaemonError::Counters { .. } => {
                Exit::Failure
            }
        }
    }

    /// What an error of the engine amounts to.
    #[must_use]
    pub const fn of_engine(error: &EngineError) -> Exit {
        match error {
            EngineError::Refused { taken: true, .. } | EngineError::Locked { .. } => Exit::Taken,
            EngineError::HeldByPins { .. } => Exit::Incompatible,
            EngineError::Refused { .. } | EngineError::Interface(_) => Exit::Preflight,
            EngineError::NoObject
            | EngineError::Incomplete { .. }
            | EngineError::BadObject(_)
            | EngineError::Table { .. }
            | EngineError::OtherBuild { .. }
            | EngineError::Cost(_)
            | EngineError::Descriptor { .. }
            | EngineError::Map { .. }
            | EngineError::NumberTaken
            | EngineError::OtherWay { .. }
            | EngineError::Gone(_)
            | EngineError::TakenOff(_) => Exit::Failure,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> std::process::ExitCode {
        exit.status().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    #[test]
    fn statuses_are_their_places() {
        let statuses: Vec<u8> = Exit::ALL.iter().map(|exit| exit.status()).collect();
        assert_eq!(statuses, [0, 1, 2, 3, 4, 5, 6]);
    }

    /// `docs/operations.md` and `paatp --help` tell each with its meaning.
    #[test]
    fn the_documentation_lists_them() {
        let page = include_str!("../../docs/operations.md");
        for exit in Exit::ALL {
            let row = format!("| {} | {} |", exit.status(), exit.meaning());
            assert!(page.contains(&row), "docs/operations.md lacks:\n{row}");
        }
        assert!(crate::cli::AFTER_HELP.contains("Exit status: 0"));
        for exit in &Exit::ALL[1..] {
            assert!(crate::cli::AFTER_HELP.contains(&format!("\n  {} ", exit.status())), "{exit:?}");
        }
    }

    #[test]
    fn errors_have_the_status_that_tells_what_to_do() {
        let taken = |taken| EngineError::Refused {
            what: "attach".into(),
            why: "busy".into(),
            advice: "wait".into(),
            taken,
        };
        let cases = [
            (DaemonError::Config(ConfigError::NoJob), Exit::Usage),
            (DaemonError::Engine(taken(true)), Exit::Taken),
            (DaemonError::Engine(taken(false)), Exit::Preflight),
            (DaemonError::Engine(EngineError::Gone("eth0".into())), Exit::Failure),
            (DaemonError::Listen(ListenError::InUse(([127, 0, 0, 1], 1).into())), Exit::Taken),
            (DaemonError::Listen(ListenError::Address("x".into())), Exit::Usage),
        ];
        for (error, exit) in cases {
            assert_eq!(Exit::of_daemon(&error), exit, "{error}");
        }
    }
}
