//! Every command of README.md and docs/ is run, or parsed where there is a reason why it cannot be run.
//!
//! Each block of commands (```` ```sh ````) has a comment before it that says how:
//!
//! | comment | the block |
//! |---|---|
//! | `<!-- test: shell -->` | is one script, run by bash in a folder of its own with the repository's `scenarios`, in a network namespace of its own |
//! | `<!-- test: host -->` | is run line by line on the aggregator's machine: `eth0` with 10.0.0.1, four workers beside it. What `paatp run` starts stays for the rest of the page |
//! | `<!-- test: aggregator -->` | the same, with an aggregator of a job `train` of four ranks, unless one runs |
//! | `<!-- test: empty aggregator -->` | the same, without jobs |
//! | `<!-- test: workers -->` | is run on four workers' machines at once, with R from 0 to 3; all must have the same `sum.safetensors` |
//! | `<!-- test: playground -->` | is run as `cargo xtask run` would run it; the text block that follows `<!-- output of … -->` has the shape of what it prints |
//! | `<!-- test: peer -->` | is run with PEER as the end of a veth, which then has a native program |
//! | `<!-- test: config -->` | is a configuration file that `paatp config check` takes (for TOML) |
//! | `<!-- not run: REASON -->` | is only parsed, like every command in the running text |
//!
//! All of a page's blocks share one folder, and are run in their order.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use paatp_tests::gradients::synthetic;
use paatp_tests::kernel::attached;
use paatp_tests::lab::Host;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, Process, paatp, wait_until};
use paatp_tests::{Dtype, Lab, Layout, require_bpf, require_program};

/// A command, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);
/// Ranks of the job `train`.
const WORLD: usize = 4;

/// Pages with blocks that are run, each in a test of its own.
macro_rules! pages {
    ($($test:ident = $page:literal;)*) => {
        const RUN: &[&str] = &[$($page),*];

        $(#[test]
        fn $test() {
            if require_bpf(concat!("docs::", stringify!($test))) {
                Session::new().page($page);
            }
        })*
    };
}

pages! {
    readme_does_what_it_says = "README.md";
    jobs_does_what_it_says = "docs/jobs.md";
    operations_does_what_it_says = "docs/operations.md";
    simulator_does_what_it_says = "docs/simulator.md";
    transport_does_what_it_says = "docs/transport.md";
    troubleshooting_does_what_it_says = "docs/troubleshooting.md";
}

/// How a block is tested.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mark {
    Test(String),
    NotRun(String),
}

/// A block between fences.
#[derive(Clone, Debug)]
struct Block {
    /// Page and line.
    place: String,
    language: String,
    mark: Option<Mark>,
    text: String,
    /// What it prints, by the page.
    output: Option<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// README.md and all pages of docs/.
fn pages() -> Vec<(String, String)> {
    let mut names = vec!["README.md".to_owned()];
    let docs = fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()));
    names.extend(docs.filter(|name| name.ends_with(".md")));
    names.sort();
    names.into_iter().map(|name| (name.clone(), fs::read_to_string(root().join(name)).unwrap())).collect()
}

fn blocks(page: &str, text: &str) -> Vec<Block> {
    let (mut blocks, mut comment): (Vec<Block>, &str) = (Vec::new(), "");
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let line = line.trim();
        let Some(language) = line.strip_prefix("```") else {
            if !line.is_empty() {
                comment = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")).unwrap_or("");
            }
            continue;
        };
        let inside: Vec<&str> =
            lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```").collect();
        let text = inside.join("\n");
        if let Some(command) = comment.strip_prefix("output of ") {
            let printing = blocks.iter_mut().rev().find(|block| block.text.contains(command));
            printing.into_iter().for_each(|block| block.output = Some(text.clone()));
        }
        let mark = match comment.split_once(": ") {
            Some(("test", fixture)) => Some(Mark::Test(fixture.into())),
            Some(("not run", reason)) => Some(Mark::NotRun(reason.into())),
            _ => None,
        };
        let place = format!("{page}:{}", number + 1);
        blocks.push(Block { place, language: language.into(), mark, text, output: None });
        comment = "";
    }
    blocks
}

/// A block's command lines, each in one piece and without comments.
fn commands(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" # ").next().unwrap_or_default());
    let lines = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

#[test]
fn every_block_of_commands_says_how_it_is_tested() {
    /// What commands begin with.
    const PROGRAMS: [&str; 14] = [
        "paatp ",
        "cargo ",
        "apt",
        "systemctl ",
        "journalctl ",
        "kubectl ",
        "docker ",
        "podman ",
        "ip ",
        "sed ",
        "curl ",
        "ethtool ",
        "sudo ",
        "for ",
    ];
    for (page, text) in pages() {
        for block in blocks(&page, &text) {
            let Block { place, language, mark, .. } = &block;
            match (language.as_str(), mark) {
                ("sh", Some(Mark::Test(_))) => {
                    assert!(
                        RUN.contains(&page.as_str()),
                        "{place}: no test runs this page; name it in `pages!`"
                    );
                }
                ("sh", Some(Mark::NotRun(reason))) => assert!(reason.len() > 10, "{place}: why not?"),
                ("sh", None) => panic!("{place}: say how it is tested (see the top of tests/tests/docs.rs)"),
                _ => {
                    let has_command =
                        block.text.lines().any(|line| PROGRAMS.iter().any(|name| line.starts_with(name)));
                    assert!(
                        !has_command,
                        "{place}: these are commands, so the block's language is sh:\n{}",
                        block.text
                    );
                }
            }
        }
    }
}

/// Pieces of code in the running text.
fn inline(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    for paragraph in prose.split("\n\n") {
        let pieces = paragraph.split('`').skip(1).step_by(2);
        found.extend(pieces.map(|piece| piece.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    found
}

/// Words that stand for something else, as something that can be parsed.
fn filled_in(word: &str) -> String {
    // The first of alternatives; a bar alone is a pipe.
    let word = word.split_once('|').map_or(word, |(first, _)| if first.is_empty() { word } else { first });
    match word {
        "IFACE" | "IF" => "eth0".into(),
        "NAME" | "JOB" => "train".into(),
        "MODE" => "bsp".into(),
        "SHELL" => "bash".into(),
        "COMMAND" => "run".into(),
        "N" | "P" | "Q" | "R" | "SEED" | "$seed" => "1".into(),
        "DURATION" => "5s".into(),
        "ADDRESS" | "WORKER" | "ADDR" => "10.0.0.2".into(),
        other => other.trim_matches('\'').replace("$s", "0"),
    }
}

/// Complains if a command has an option, a value or a name that does not exist.
fn parse(place: &str, line: &str) {
    let mut words: Vec<String> = line.split(' ').map(filled_in).collect();
    while words.first().is_some_and(|word| word.contains('=') || word == "do") {
        words.remove(0);
    }
    let end = words
        .iter()
        .position(|word| ["&", "&&", "|", ";", "\\"].contains(&word.as_str()) || word.ends_with(';'));
    words.truncate(end.unwrap_or(words.len()));
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["paatp", args @ ..] => shows_help(place, paatp().unwrap(), args),
        ["cargo", "xtask", "run", args @ ..] => {
            shows_help(place, env!("CARGO_BIN_EXE_playground").into(), args)
        }
        ["cargo", "xtask", "verify", args @ ..] => {
            shows_help(place, env!("CARGO_BIN_EXE_verify").into(), args)
        }
        ["cargo", "xtask", "screenshot", args @ ..] => {
            shows_help(place, env!("CARGO_BIN_EXE_screenshot").into(), args);
        }
        ["cargo", "xtask", "bench", name, args @ ..] => {
            // Beside the others of this package.
            let program = Path::new(env!("CARGO_BIN_EXE_playground")).with_file_name(format!("bench-{name}"));
            assert!(program.is_file(), "{place}: no benchmark `{name}`");
            shows_help(place, program, args);
        }
        ["cargo", "xtask", "test", args @ ..] | ["cargo", "test", args @ ..] => tests_exist(place, args),
        ["cargo", "xtask", task, ..] => {
            let tasks = fs::read_to_string(root().join("xtask/src/main.rs")).unwrap();
            let name = task[..1].to_uppercase() + &task[1..];
            let is_there =
                ["\n    {} {", "\n    {},"].iter().any(|form| tasks.contains(&form.replace("{}", &name)));
            assert!(is_there, "{place}: `cargo xtask` has no `{task}`");
        }
        _ => {}
    }
}

/// Time between two keys: a terminal holds 4096 that nobody reads.
const BETWEEN_KEYS: Duration = Duration::from_millis(300);

/// Less than what is written for a whole screen, in bytes: more than what a terminal is told before.
const A_SCREEN: usize = 500;

/// With `--help` at the end everything before it is parsed, and nothing is done.
fn shows_help(place: &str, program: PathBuf, args: &[&str]) {
    let output = Command::new(&program).args(args).arg("--help").stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if args.last().is_some_and(|last| last.starts_with("--")) && said.contains("a value is required for") {
        // The text speaks of the option, whatever its value.
        return;
    }
    assert!(output.status.success(), "{place}: {} {}: {said}", program.display(), args.join(" "));
}

/// A package, a file of tests and a name of a test that `cargo test` is given are there.
fn tests_exist(place: &str, args: &[&str]) {
    let args: Vec<&str> = args.iter().copied().take_while(|arg| *arg != "--").collect();
    let after =
        |option: &str| args.iter().position(|arg| *arg == option).and_then(|at| args.get(at + 1).copied());
    let package = after("-p").map(|name| if name == "paatp-tests" { "tests" } else { name });
    if let Some(name) = after("--test") {
        let file = root().join(package.unwrap_or("tests")).join(format!("tests/{name}.rs"));
        assert!(file.is_file(), "{place}: there is no {}", file.display());
    }
    let values = [after("-p"), after("--test")];
    let filter = args.iter().find(|arg| !arg.starts_with('-') && !values.contains(&Some(**arg)));
    if let (Some(filter), Some(package)) = (filter, package) {
        // `module::` chooses a module's tests.
        let pattern = match filter.strip_suffix("::") {
            Some(module) => format!("mod {module};"),
            None => format!("fn \\w*{filter}"),
        };
        let found = Command::new("grep").args(["-rqE", &pattern]).arg(root().join(package)).status();
        assert!(found.unwrap().success(), "{place}: no test is called `{filter}`");
    }
}

#[test]
fn every_command_can_be_parsed() {
    for (page, text) in pages() {
        for block in blocks(&page, &text).iter().filter(|block| block.language == "sh") {
            for line in commands(&block.text) {
                parse(&block.place, &line);
            }
        }
        for piece in inline(&text) {
            parse(
                &page,
                piece
                    .strip_prefix("for s in ")
                    .and_then(|rest| rest.split_once("; "))
                    .map_or(&piece, |(_, rest)| rest),
            );
        }
    }
}

/// Numbers and names that differ from run to run, as one sign.
fn shape(line: &str) -> Vec<&str> {
    let words = line.split_whitespace().take_while(|word| !word.contains('…'));
    words.map(|word| if word.contains(|c: char| c.is_ascii_digit()) { "#" } else { word }).collect()
}

/// Every line of `expected` has its like in `output`, in this order.
fn assert_shape(place: &str, expected: &str, output: &str) {
    let mut rest = output.lines();
    for line in expected.lines().filter(|line| !line.trim().is_empty()) {
        let wanted = shape(line);
        let found = rest.any(|line| shape(line).starts_with(&wanted));
        assert!(found, "{place}: no line like\n{line}\nin\n{output}");
    }
}

#[test]
fn shapes_are_compared() {
    assert_shape(
        "here",
        "rank  ms\n 0 4.37\nready: iface=pa1 …",
        "rank ms\n0 17.1\nready: iface=pb2 mode=native",
    );
    for bad in ["rank  ms\n", "0 1\nrank ms", "rank ms\nfast"] {
        assert!(
            std::panic::catch_unwind(|| assert_shape("here", "rank  ms\n 0 4.37", bad)).is_err(),
            "{bad}"
        );
    }
}

/// Machines and folder of one page.
struct Session {
    folder: tempfile::TempDir,
    alone: Namespace,
    lab: Option<Lab>,
    aggregator: Option<Aggregator>,
}

impl Session {
    fn new() -> Session {
        let folder = tempfile::tempdir().unwrap();
        symlink(root().canonicalize().unwrap().join("scenarios"), folder.path().join("scenarios")).unwrap();
        Session { folder, alone: Namespace::new("docs").unwrap(), lab: None, aggregator: None }
    }

    fn page(&mut self, page: &str) {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let mut ran = 0;
        for block in blocks(page, &text) {
            let Some(Mark::Test(fixture)) = &block.mark else { continue };
            println!("{} ({fixture})", block.place);
            self.block(fixture, &block);
            ran += 1;
        }
        assert!(ran > 0, "nothing of {page} is run; take it out of `pages!`");
    }

    fn block(&mut self, fixture: &str, block: &Block) {
        match fixture {
            "shell" => drop(self.succeed(&block.place, self.bash(&self.alone, &block.text))),
            "host" => self.lines(block),
            "aggregator" | "empty aggregator" => {
                if self.aggregator.is_none() {
                    let job = if fixture == "aggregator" { " --job train --world 4" } else { "" };
                    self.start(&block.place, &format!("paatp run --iface eth0{job}"));
                }
                self.lines(block);
            }
            "workers" => self.workers(block),
            "playground" => self.playground(block),
            "peer" => self.peer(block),
            "config" => {
                fs::write(self.folder.path().join("block.toml"), &block.text).unwrap();
                drop(self.succeed(&block.place, self.bash(&self.alone, "paatp config check block.toml")));
            }
            other => panic!("{}: there is no fixture `{other}`", block.place),
        }
    }

    /// A script in a namespace, with this `paatp` and a token of its own.
    fn bash(&self, namespace: &Namespace, script: &str) -> Command {
        let mut command = namespace.command("bash");
        command.args(["-euo", "pipefail", "-c", script]).current_dir(self.folder.path());
        let mut paths = vec![paatp().unwrap().parent().unwrap().to_owned()];
        paths.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        command.env("PATH", std::env::join_paths(paths).unwrap());
        command.env("PAATP_TOKEN_FILE", self.folder.path().join("token"));
        command
    }

    /// What it wrote.
    fn succeed(&self, place: &str, command: Command) -> String {
        let finished = Process::spawn(place, command).unwrap().wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{place}: {}:\n{}", finished.status, finished.output);
        finished.output
    }

    /// Four workers and an aggregator's machine, whose interfaces are called as in the documentation.
    fn lab(&mut self) -> &Lab {
        self.lab.get_or_insert_with(|| {
            let lab = Lab::new(Layout::workers(WORLD)).unwrap();
            let dress = |host: &Host, last: usize| {
                let ip = |args: &[&str]| host.namespace.ip(args).unwrap();
                ip(&["link", "set", &host.interface, "down"]);
                ip(&["link", "set", &host.interface, "name", "eth0"]);
                ip(&["address", "add", &format!("10.0.0.{last}/24"), "dev", "eth0"]);
                ip(&["link", "set", "eth0", "up"]);
            };
            dress(&lab.aggregator, 1);
            lab.workers.iter().enumerate().for_each(|(rank, worker)| dress(worker, rank + 2));
            lab
        })
    }

    fn start(&mut self, place: &str, line: &str) {
        self.aggregator = None;
        self.lab();
        let namespace = &self.lab.as_ref().unwrap().aggregator.namespace;
        let command = self.bash(namespace, &format!("exec {line}"));
        let aggregator = Aggregator::watch(Process::spawn(place, command).unwrap());
        self.aggregator = Some(aggregator.unwrap_or_else(|error| panic!("{place}: {error}")));
    }

    /// Line by line on the aggregator's machine.
    fn lines(&mut self, block: &Block) {
        self.lab();
        for line in commands(&block.text) {
            let place = format!("{}: {line}", block.place);
            if line.starts_with("paatp run ") {
                self.start(&place, line.trim_end_matches(" &"));
                continue;
            }
            let namespace = &self.lab.as_ref().unwrap().aggregator.namespace;
            if line.starts_with("paatp top") {
                self.on_a_terminal(&place, namespace, &line);
            } else if line.contains(" --watch") {
                let mut process =
                    Process::spawn(&place, self.bash(namespace, &format!("exec {line}"))).unwrap();
                process.wait_for_line("paatp ", DEADLINE).unwrap();
                process.signal(Signal::SIGINT).unwrap();
                let finished = process.wait(DEADLINE).unwrap();
                assert!(finished.is_success(), "{place}: {}", finished.output);
            } else {
                self.succeed(&place, self.bash(namespace, &line));
            }
        }
    }

    /// Shows something, and ends when `q` is typed.
    fn on_a_terminal(&self, place: &str, namespace: &Namespace, line: &str) {
        let inner = format!("stty rows 30 cols 100; exec {line}");
        let mut command = self.bash(namespace, "exec script -qefc \"$INNER\" screen");
        command.env("INNER", inner).env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut keys = child.stdin.take().unwrap();
        let screen = self.folder.path().join("screen");
        let shown = || fs::read(&screen).unwrap_or_default();
        let end = Instant::now() + DEADLINE;
        let mut typed = None;
        let ended = wait_until("it ended by q", DEADLINE, || {
            // A key that comes before the terminal is read as it should be is lost. So many that they fill the terminal would
            // stop `script`, and with it what it shows.
            let is_due = typed.is_none_or(|at: Instant| at.elapsed() >= BETWEEN_KEYS);
            if is_due && shown().len() > A_SCREEN {
                let _ = keys.write_all(b"q");
                typed = Some(Instant::now());
            }
            Ok(child.try_wait()?.is_some())
        });
        let _ = child.kill();
        assert!(ended.is_ok() && Instant::now() < end, "{place}: {}", String::from_utf8_lossy(&shown()));
        assert!(child.wait().unwrap().success(), "{place}");
    }

    /// On all workers' machines at once.
    fn workers(&mut self, block: &Block) {
        self.lab();
        let lab = self.lab.as_ref().unwrap();
        let gradients = synthetic(WORLD, 41, &[(Dtype::F32, 5000)], 1.0);
        let folder = |rank: usize| self.folder.path().join(format!("worker-{rank}"));
        let mut running = Vec::new();
        for (rank, gradient) in gradients.iter().enumerate() {
            fs::create_dir_all(folder(rank)).unwrap();
            gradient.write(&folder(rank).join("gradients.safetensors")).unwrap();
            let script = block.text.replace(" R ", &format!(" {rank} "));
            let mut command = self.bash(&lab.workers[rank].namespace, &script);
            command.current_dir(folder(rank)).env_remove("PAATP_TOKEN_FILE");
            running.push(Process::spawn(format!("{} on worker {rank}", block.place), command).unwrap());
        }
        for mut worker in running {
            let finished = worker.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}: {}", block.place, finished.output);
        }
        let sums: Vec<_> =
            (0..WORLD).map(|rank| fs::read(folder(rank).join("sum.safetensors")).unwrap()).collect();
        assert!(sums.iter().all(|sum| *sum == sums[0]), "{}: sums differ", block.place);
    }

    fn playground(&self, block: &Block) {
        for line in commands(&block.text) {
            let args = line.strip_prefix("cargo xtask run").expect("only `cargo xtask run` is run here");
            let mut command = Command::new(env!("CARGO_BIN_EXE_playground"));
            command.args(args.split_whitespace()).env("PAATP_BIN", paatp().unwrap());
            let output = self.succeed(&block.place, command);
            if let Some(expected) = &block.output {
                assert_shape(&block.place, expected, &output);
            }
        }
    }

    fn peer(&self, block: &Block) {
        if !require_program("docs::troubleshooting_does_what_it_says", "llvm-mc") {
            return;
        }
        let namespace = Namespace::new("peer").unwrap();
        namespace.ip(&["link", "add", "near", "type", "veth", "peer", "name", "far"]).unwrap();
        let script = block.text.replace("PEER", "far");
        self.succeed(&block.place, self.bash(&namespace, &script));
        let program = attached(&namespace, "far").unwrap().expect("a program is attached");
        assert!(program.is_native, "{}", block.place);
    }
}
