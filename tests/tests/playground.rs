//! The playground as a program: what it prints, writes and leaves behind.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use paatp_tests::gradients::synthetic;
use paatp_tests::netns::residue;
use paatp_tests::process::{Process, paatp, wait_until};
use paatp_tests::{Dtype, Family, Lab, Layout, require_bpf};

const PROMPTLY: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(120);

fn playground(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_playground"));
    command.args(args).env("PAATP_BIN", paatp().unwrap());
    command
}

#[test]
fn disturbed_real_gradients_with_json() {
    if !require_bpf("playground::disturbed_real_gradients_with_json") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("summary.json");
    let args = ["--loss", "0.1", "--duplicate", "0.05", "--reorder", "0.05", "--corrupt", "0.01", "--json"];
    let mut command = playground(&args);
    command.arg(&file);
    let mut process = Process::spawn("the playground", command).unwrap();
    let finished = process.wait(LONG).unwrap();
    assert!(finished.is_success(), "{}", finished.output);
    assert!(finished.output.contains("\nright: all 4 ranks"), "{}", finished.output);
    let summary: serde_json::Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!((summary["schema_version"].as_u64(), summary["right"].as_bool()), (Some(1), Some(true)));
    let ranks = summary["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    assert!(ranks.iter().all(|rank| rank["digest"] == ranks[0]["digest"]));
    assert!(ranks.iter().all(|rank| rank["largest_error"].as_f64() <= rank["error_bound"].as_f64()));
    assert!(summary["disturbed"]["requests"]["dropped"].as_u64() > Some(0));
    assert_eq!(residue(process.pid()).unwrap(), Vec::<String>::new());
}

#[test]
fn gradients_of_a_folder() {
    if !require_bpf("playground::gradients_of_a_folder") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (rank, gradient) in synthetic(3, 1, &[(Dtype::F16, 700), (Dtype::I32, 90)], 50.0).iter().enumerate() {
        gradient.write(&folder.path().join(format!("mine-rank{rank}.safetensors"))).unwrap();
    }
    let mut command = playground(&["--reduction", "mean", "--gradients"]);
    command.arg(folder.path());
    let finished = Process::spawn("the playground", command).unwrap().wait(LONG).unwrap();
    assert!(finished.is_success() && finished.output.contains("right: all 3 ranks"), "{}", finished.output);
    let command = playground(&["--gradients", "/nothing/here"]);
    let finished = Process::spawn("the playground", command).unwrap().wait(PROMPTLY).unwrap();
    assert!(!finished.is_success() && finished.output.contains("/nothing/here"), "{}", finished.output);
}

#[test]
fn ctrl_c_cleans_up() {
    if !require_bpf("playground::ctrl_c_cleans_up") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (rank, gradient) in synthetic(2, 2, &[(Dtype::F32, 6_000_000)], 1.0).iter().enumerate() {
        gradient.write(&folder.path().join(format!("rank{rank}.safetensors"))).unwrap();
    }
    // Many losses, so that it takes long.
    let mut command = playground(&["--loss", "0.5", "--gradients"]);
    command.arg(folder.path());
    let mut process = Process::spawn("the playground", command).unwrap();
    process.wait_for_line("ready:", LONG).unwrap();
    let children = children_of(process.pid());
    assert!(!children.is_empty());
    process.signal(Signal::SIGINT).unwrap();
    let finished = process.wait(PROMPTLY).unwrap();
    assert_eq!(finished.status.code(), Some(130), "{}", finished.output);
    assert!(finished.output.contains("interrupted"), "{}", finished.output);
    assert_eq!(residue(process.pid()).unwrap(), Vec::<String>::new());
    wait_until("all children were gone", PROMPTLY, || {
        Ok(children.iter().all(|pid| !fs::exists(format!("/proc/{pid}")).unwrap_or(false)))
    })
    .unwrap();
}

fn children_of(pid: u32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
    children.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn on_an_interface_of_the_machine() {
    if !require_bpf("playground::on_an_interface_of_the_machine") {
        return;
    }
    // A namespace stands for the machine.
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let host = &lab.aggregator;
    let mut command = host.namespace.command(env!("CARGO_BIN_EXE_playground"));
    command.args(["--iface", &host.interface, "--workers", "2"]).env("PAATP_BIN", paatp().unwrap());
    let mut process = Process::spawn("the playground", command).unwrap();
    process.wait_for_line("ready:", LONG).unwrap();
    let line = process.wait_for_line("paatp allreduce", PROMPTLY).unwrap();
    let address = host.address(Family::V4).to_string();
    assert!(line.contains("--world 2") && line.contains(&address), "{line}");
    process.signal(Signal::SIGINT).unwrap();
    assert_eq!(process.wait(PROMPTLY).unwrap().status.code(), Some(130));
    assert_eq!(paatp_tests::kernel::attached(&host.namespace, &host.interface).unwrap(), None);
}
