use std::fs;

use super::*;
use crate::cli::XdpMode;
use crate::log::LogFormat;

struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new(text: &str) -> Case {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        assert!(fs::write(folder.path().join("paatp.toml"), text).is_ok());
        Case { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("paatp.toml")
    }

    fn line(&self, line: &str) -> Vec<OsString> {
        let path = self.path().display().to_string();
        line.split_whitespace()
            .map(|word| if word == "FILE" { path.clone() } else { word.into() }.into())
            .collect()
    }

    /// Without this process's environment.
    fn parse(&self, line: &str) -> Result<Parsed, String> {
        let bare = |run: clap::Command| run.mut_args(|arg| arg.env(Resettable::Reset));
        layered(|| in_both(command(), &bare), &self.line(line)).map_err(|error| error.to_string())
    }

    fn run(&self, line: &str) -> Run {
        match self.parse(line).map(|parsed| parsed.cli.command) {
            Ok(Command::Run(run)) => *run,
            Ok(_) => panic!("another command"),
            Err(message) => panic!("{message}"),
        }
    }

    fn refusal(text: &str) -> String {
        let case = Case::new(text);
        let error = check(&case.path()).err().map(|error| error.to_string());
        error
            .unwrap_or_else(|| panic!("accepted: {text}"))
            .replace(&case.path().display().to_string(), "FILE")
    }
}

#[test]
fn flags_go_before_the_file_and_the_file_before_defaults() {
    let case = Case::new(
        "[node]\niface = \"eth7\"\nport = 7000\nmemory = \"2MiB\"\nlanes = 832\nxdp_mode = \"native\"\n",
    );
    let run = case.run("paatp run --config FILE --port 8000");
    assert_eq!((run.iface.as_str(), run.port, run.ports), ("eth7", 8000, 1));
    assert_eq!((run.memory, run.node_lanes, run.xdp_mode), (Some(2 << 20), Some(832), XdpMode::Native));
    // Of the one job of the command line there is nothing in the file.
    assert_eq!((run.lanes, run.job()), (352, None));
    assert!(case.parse("paatp run --config FILE --world 2").is_err_and(|message| message.contains("--job")));
}

#[test]
fn the_interface_is_asked_for_if_nothing_names_it() {
    let case = Case::new("[[job]]\nname = \"a\"\nworld = 2\n");
    let message = case.parse("paatp run --config FILE").err().unwrap_or_default();
    assert!(message.contains("--iface"), "{message}");
    assert_eq!(case.run("paatp run --config FILE --iface eth0").iface, "eth0");
    let help = case.parse("paatp run --help").err().unwrap_or_default();
    assert!(help.contains("Usage: paatp run [OPTIONS] --iface <IF>"), "{help}");
}

#[test]
fn log_settings_are_in_the_file_too() {
    let case = Case::new("[node]\nlog = \"debug\"\nlog_format = \"json\"\n");
    let log = |line| case.parse(line).map(|parsed| (parsed.cli.log.log, parsed.cli.log.log_format));
    let from_file = log("paatp run --iface e --config FILE");
    assert_eq!(from_file, Ok((Some("debug".into()), LogFormat::Json)));
    let from_flags = log("paatp --log warn run --iface e --config FILE --log-format text");
    assert_eq!(from_flags, Ok((Some("warn".into()), LogFormat::Text)));
}

#[test]
fn mistakes_have_file_line_and_remedy() {
    for (text, parts) in [
        ("[node]\nifcae = \"e\"\n", vec!["FILE:2: [node] has no key `ifcae`", "did you mean `iface`?"]),
        ("[node]\nmemory = \"2MiB\"\ndrain = 5\n", vec!["FILE:3: [node] has no key `drain`"]),
        ("[node]\nworld = 5\n", vec!["FILE:2: [node] has no key `world`"]),
        ("[node]\nport = 70000\n", vec!["FILE:2: port: invalid value '70000'", "65535"]),
        ("[node]\nport = [1, 2]\n", vec!["FILE:2: port: one value"]),
        ("[node]\nmemory = \"2MB\"\n", vec!["FILE:2: memory:", "64MiB"]),
        ("[node]\ndrain_timeout = \"5 parsecs\"\n", vec!["FILE:2: drain_timeout:", "30s"]),
        ("[node]\nxdp_mode = \"fast\"\n", vec!["FILE:2: xdp_mode:", "fast"]),
        ("[[job]]\nname = \"a\"\nworlds = 2\n", vec!["FILE", "line 3", "did you mean `world`?"]),
        ("[[job]]\nname = \"a\"\nworld = 65\n", vec!["FILE:1: job `a`: world = 65"]),
        ("[node]\nlanes = 999\n", vec!["lanes = 999", "832"]),
        ("[node]\nport = 65535\nports = 2\n", vec!["65535"]),
    ] {
        let message = Case::refusal(text);
        assert!(parts.iter().all(|part| message.contains(part)), "{text}: {message}");
    }
}

#[test]
fn a_right_file_is_told_so() {
    let case = Case::new("[node]\nmemory = \"64MiB\"\n[[job]]\nname = \"a\"\nworld = 2\ntimeout = \"20s\"\n");
    let told = check(&case.path()).unwrap_or_default();
    assert!(told.ends_with("paatp.toml: right; settings: 1, jobs: 1\n"), "{told}");
}

#[test]
fn a_dump_names_origins_and_is_a_file_itself() {
    let case = Case::new("[node]\nmemory = \"2MiB\"\nlanes = 832\n[[job]]\nname = \"a\"\nworld = 2\n");
    let line = "paatp config dump --config FILE --iface eth0 --job b --world 3 --drain-timeout 0";
    let parsed = case.parse(line).unwrap_or_else(|error| panic!("{error}"));
    let Command::Config(Config { action: ConfigAction::Dump(run) }) = &parsed.cli.command else {
        panic!("another command")
    };
    let text = dump(&parsed, run).unwrap_or_else(|error| panic!("{error}"));
    let path = case.path().display().to_string();
    for expected in [
        "iface = \"eth0\"  # flag --iface".to_owned(),
        "drain_timeout = 0  # flag --drain-timeout".to_owned(),
        format!("memory = \"2MiB\"  # file {path}:2"),
        format!("lanes = 832  # file {path}:3"),
        "port = 20545  # default".to_owned(),
        "# tls_key is not set".to_owned(),
        format!("# {path}\n[[job]]\nname = \"a\"\n"),
        "# command line or environment\n[[job]]\nname = \"b\"\nworld = 3\n".to_owned(),
    ] {
        assert!(text.contains(&expected), "no {expected} in:\n{text}");
    }
    let again = Case::new(&text);
    assert!(check(&again.path()).is_ok(), "{:?}\n{text}", check(&again.path()));
    let run = again.run("paatp run --config FILE");
    assert_eq!((run.iface.as_str(), run.memory, run.drain_timeout.as_secs()), ("eth0", Some(2 << 20), 0));
}

/// By construction; this holds the construction to it.
#[test]
fn every_option_of_run_has_a_variable_and_a_key() {
    let command = command();
    let Some(run) = command.find_subcommand("run") else { panic!("no run") };
    let settings = settings(&command);
    for arg in run.get_arguments().filter(|arg| arg.get_id() != "help") {
        let id = arg.get_id().as_str();
        let variable = arg.get_env().unwrap_or_default().to_string_lossy().into_owned();
        assert_eq!(variable, format!("PAATP_{}", id.to_uppercase()));
        let has_key = settings.iter().any(|setting| setting.get_id() == id);
        assert_eq!(has_key, !JOB_OPTIONS.contains(&id) && id != "config", "{id}");
    }
    let mut keys: Vec<&str> = settings.iter().map(key_of).collect();
    assert!(keys.contains(&"log_format") && keys.contains(&"lanes"), "{keys:?}");
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), settings.len());
}
