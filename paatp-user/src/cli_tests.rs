use super::*;
use clap::CommandFactory;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

/// Every option has a help text, and a newcomer finds an example and what the exit status means.
#[test]
fn help_is_for_newcomers() {
    let mut command = Cli::command();
    command.build();
    for name in ["run", "allreduce", "job", "sim", "doctor", "capture", "cleanup", "setup-queues", "config"] {
        let subcommand = command.find_subcommand_mut(name).unwrap_or_else(|| panic!("no {name}"));
        for argument in subcommand.get_arguments() {
            assert!(argument.get_help().is_some(), "{name} {}", argument.get_id());
        }
        let help = subcommand.render_long_help().to_string();
        for wanted in ["Example", "paatp ", "Exit status: 0", "--log"] {
            assert!(help.contains(wanted), "{name}: {wanted}");
        }
        // What is not told elsewhere on the same page.
        for jargon in ["control plane", "data plane", "the ring", "lanes (", "chunk"] {
            assert!(!help.contains(jargon), "{name}: {jargon}\n{help}");
        }
    }
}

#[test]
fn run_takes_a_job() {
    let Ok(Cli { command: Command::Run(run), .. }) =
        parse("paatp run --iface eth0 --job train --world 4 --slots 512 --xdp-mode native")
    else {
        panic!("refused");
    };
    let job = run.job();
    assert_eq!(
        job.map(|job| (job.name, job.world, job.lanes, job.slots, job.window, job.quorum)),
        Some(("train".into(), 4, 352, 512, 64, None))
    );
    assert_eq!((run.xdp_mode, run.port, run.ports), (XdpMode::Native, 20545, 1));
}

#[test]
fn run_without_a_job_is_for_files() {
    let Ok(Cli { command: Command::Run(run), .. }) = parse("paatp run --iface eth0 --config x.toml") else {
        panic!("refused");
    };
    assert_eq!(run.job(), None);
}

#[test]
fn allreduce_takes_durations() {
    let line = "paatp allreduce --job j --rank 0 --world 2 --aggregator 10.0.0.1 --input a --output b";
    let timeout = |line: &str| match parse(line) {
        Ok(Cli { command: Command::Allreduce(args), .. }) => Some((args.timeout, args.reduction)),
        _ => None,
    };
    assert_eq!(timeout(line), Some((Duration::from_secs(30), ReductionName::Sum)));
    let ms = format!("{line} --timeout 500ms --reduction mean");
    assert_eq!(timeout(&ms), Some((Duration::from_millis(500), ReductionName::Mean)));
}

#[test]
fn jobs_are_managed() {
    let action = |line: &str| match parse(line) {
        Ok(Cli { command: Command::Job(job), .. }) => Some((job.action, job.control, job.json)),
        _ => None,
    };
    let create = action("paatp job create a --world 2 --access open --timeout 5s --on-failure shrink --json");
    let Some((JobAction::Create(create), control, true)) = create else { panic!("refused") };
    assert_eq!((create.name.as_str(), create.world, control.as_str()), ("a", 2, "127.0.0.1"));
    assert_eq!((create.access, create.on_failure), (AccessName::Open, PolicyName::Shrink));
    assert!(
        matches!(action("paatp job list --control 10.0.0.1"), Some((JobAction::List, c, false)) if c == "10.0.0.1")
    );
    assert!(matches!(action("paatp job sync a quorum --quorum 2"), Some((JobAction::Sync(_), ..))));
    assert!(action("paatp job sync a quorum").is_none());
}

#[test]
fn allreduce_takes_drivers() {
    let line = "paatp allreduce --job j --rank 0 --world 2 --aggregator 10.0.0.1 --input a --output b";
    let io = |more: &str| match parse(&format!("{line}{more}")) {
        Ok(Cli { command: Command::Allreduce(args), .. }) => Some(args.io),
        _ => None,
    };
    let named = ["", " --io auto", " --io af-xdp", " --io udp", " --io tcp"].map(io);
    let wanted = [Some(IoName::Auto), Some(IoName::Auto), Some(IoName::AfXdp), Some(IoName::Udp), None];
    assert_eq!(named, wanted);
}

#[test]
fn usage_errors_have_exit_code_2() {
    for line in [
        "paatp",
        "paatp run",
        "paatp run --iface e --job j",
        "paatp run --iface e --lanes 32",
        "paatp run --iface e --ports 257",
        "paatp allreduce --job j --rank 64 --world 2 --aggregator a --input a --output b",
        "paatp allreduce --job j --rank 0 --world 0 --aggregator a --input a --output b",
        "paatp allreduce --job j --rank 0 --world 1 --aggregator a --input a --output b --timeout x",
        "paatp sim",
        "paatp sim a.toml --controller tcp",
        "paatp sim a.toml soak",
        "paatp doctor eth0 --worker nobody",
        "paatp doctor eth0 --ports 0",
        "paatp setup-queues",
    ] {
        assert_eq!(parse(line).map_err(|error| error.exit_code()).err(), Some(2), "{line}");
    }
}

/// A lower node's job says which ranks it has, or which rank it is, and where.
#[test]
fn a_parent_goes_with_ranks_or_with_a_child() {
    let create = |more: &str| parse(&format!("paatp job create train --world 4 {more}"));
    for good in
        ["", "--parent 10.0.0.1 --ranks 0-3", "--parent 10.0.0.1:7 --child 0", "--parent fd00::1 --child 63"]
    {
        assert!(create(good).is_ok(), "{good}");
    }
    for bad in [
        "--child 0",
        "--ranks 0-3",
        "--parent 10.0.0.1",
        "--parent 10.0.0.1 --child 0 --ranks 0-3",
        "--parent 10.0.0.1 --child -1",
        "--parent 10.0.0.1 --child x",
        "--parent 10.0.0.1 --child 0 --quorum 2",
        "--parent 10.0.0.1 --child 0 --shared",
        "--parent 10.0.0.1 --child 0 --timeout 5s",
    ] {
        assert!(create(bad).is_err(), "{bad}");
    }
}
