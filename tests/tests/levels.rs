//! Two racks of four ranks each and a root: the results are bit for bit those of one level, whatever happens on the links
//! and to the racks' daemons.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::net::UdpSocket;

use nix::sys::signal::Signal;
use paatp_common::wire::{Chunk, Kind, Request};
use paatp_common::{Event, Refusal, Seq};
use paatp_tests::gradients::{real, synthetic};
use paatp_tests::job::run;
use paatp_tests::kernel::attached;
use paatp_tests::process::{PORT, wait_until};
use paatp_tests::reference::{Reduction, reduce};

use paatp_tests::racks::{DEADLINE, Naming, RACK, RACKS, Racks, lanes};
use paatp_tests::{
    Direction, Disturbance, Dtype, Family, Gradient, JobOptions, Lab, Layout, Rates, require_bpf,
};

/// Ends everything; the root knows that the ranks have left.
fn stop(racks: Racks) {
    let output = racks.stop().unwrap();
    assert!(output.contains("all ranks have left"), "{output}");
}

/// What one level gives.
fn one_level(inputs: &[Gradient], family: Family) -> Vec<String> {
    let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
    let mut options = JobOptions { family, ..JobOptions::world(inputs.len()) };
    options.aggregator.lanes = lanes(family);
    run(&lab, inputs, &options).unwrap().digests().unwrap()
}

#[test]
fn two_racks_and_a_root_give_the_bits_of_one_level() {
    if !require_bpf("levels::two_racks_and_a_root_give_the_bits_of_one_level") {
        return;
    }
    let inputs = real(1, RACK * RACKS).unwrap();
    for family in [Family::V4, Family::V6] {
        let bench = Racks::new(family, "--levels").unwrap();
        let expected = one_level(&inputs, family);
        assert_eq!(bench.all_reduce(&inputs).unwrap().digests, expected);
        let host = &bench.lab.racks[0];
        let program = attached(&host.namespace, &host.interface).unwrap().unwrap();
        assert_eq!((program.name.as_str(), program.is_native), ("levels", true));
        let root = bench.root_counters().unwrap();
        let chunks = root.noted(Event::Completions);
        // Every contribution that the root took was a rack's sum.
        let sums = [Event::Sums, Event::Contributions].map(|event| root.noted(event));
        assert!(chunks > 0);
        assert_eq!(sums, [2 * chunks, 2 * chunks]);
        for rack in 0..RACKS {
            let counters = bench.counters(rack).unwrap();
            let noted = |event| counters.noted(event);
            assert_eq!(noted(Event::Contributions), RACK as u64 * chunks);
            println!(
                "{family:?}, rack {rack}: {chunks} chunks, {} requests, {} sums and {} others went up",
                noted(Event::Requests),
                noted(Event::Lifted),
                noted(Event::PassedOn)
            );
        }
        // Again, with the generation after.
        assert_eq!(bench.all_reduce(&inputs).unwrap().digests, expected);
        stop(bench);
    }
}

#[test]
fn every_link_loses_packets() {
    if !require_bpf("levels::every_link_loses_packets") {
        return;
    }
    let inputs = synthetic(RACK * RACKS, 5, &[(Dtype::F32, 200_000), (Dtype::I32, 3000)], 1.0);
    let expected = one_level(&inputs, Family::V4);
    let bench = Racks::new(Family::V4, "--levels").unwrap();
    let loss = Rates { loss: 0.05, ..Rates::NONE };
    let of_workers =
        (0..inputs.len()).map(|rank| bench.lab.disturb(rank, PORT..=PORT, rank as u64, loss, loss).unwrap());
    let mut all: Vec<Disturbance> = of_workers.collect();
    all.extend(
        (0..RACKS)
            .map(|rack| bench.lab.disturb_rack(rack, PORT..=PORT, 100 + rack as u64, loss, loss).unwrap()),
    );
    assert_eq!(bench.all_reduce(&inputs).unwrap().digests, expected);
    let dropped = |disturbance: &Disturbance| {
        [Direction::Egress, Direction::Ingress]
            .map(|direction| disturbance.counts(direction).unwrap().dropped)
    };
    let dropped: Vec<_> = all.iter().map(dropped).collect();
    assert!(dropped.iter().flatten().all(|count| *count > 0), "{dropped:?}");
    println!("lost on each link, there and back: {dropped:?}");
    stop(bench);
}

#[test]
fn a_racks_daemon_is_killed_in_the_middle() {
    if !require_bpf("levels::a_racks_daemon_is_killed_in_the_middle") {
        return;
    }
    let inputs = synthetic(RACK * RACKS, 6, &[(Dtype::F32, 2_000_000)], 1.0);
    let expected = one_level(&inputs, Family::V4);
    let mut bench = Racks::new(Family::V4, "--levels").unwrap();
    let (commands, workers) = bench.spawn(&inputs).unwrap();
    wait_until("results came down", DEADLINE, || {
        Ok(bench.counters(0).unwrap().noted(Event::Completions) > 200)
    })
    .unwrap();
    // Without this rank it cannot end before the daemon is killed.
    workers[7].signal(Signal::SIGSTOP).unwrap();
    let before = bench.counters(0).unwrap().noted(Event::Completions);
    bench.restart_the_first().unwrap();
    workers[7].signal(Signal::SIGCONT).unwrap();
    assert_eq!(bench.finish(&commands, workers).unwrap().digests, expected);
    assert!(
        bench.counters(0).unwrap().noted(Event::Completions) > before,
        "it was over before the daemon was killed"
    );
    stop(bench);
}

/// What cannot be is refused where it is asked for, with what to do.
#[test]
fn refusals_say_what_to_do() {
    if !require_bpf("levels::refusals_say_what_to_do") {
        return;
    }
    let bench = Racks::new(Family::V4, "--levels").unwrap();
    // A rank of the other rack.
    let input = synthetic(1, 7, &[(Dtype::F32, 10)], 1.0).swap_remove(0);
    let mut command = bench.command(5, RACK * RACKS, &input).unwrap();
    command.aggregator = bench.lab.racks[0].address(Family::V4);
    let finished = command.spawn(&bench.lab.workers[5]).unwrap().wait(DEADLINE).unwrap();
    assert!(!finished.is_success() && finished.output.contains("ranks 0-3 do"), "{}", finished.output);
    drop(bench.stop().unwrap());
    // A root that was not started for it.
    let bench = Racks::new(Family::V4, "").unwrap();
    let inputs = synthetic(RACK * RACKS, 7, &[(Dtype::F32, 10)], 1.0);
    let (_, mut workers) = bench.spawn(&inputs).unwrap();
    for worker in &mut workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(
            !finished.is_success() && finished.output.contains("start it with --levels"),
            "{}",
            finished.output
        );
    }
    drop(bench.stop().unwrap());
}

/// Each rack is one rank of the root's job.
#[test]
fn f22_nodes_for_ranks_give_the_bits_of_one_level() {
    if !require_bpf("levels::f22_nodes_for_ranks_give_the_bits_of_one_level") {
        return;
    }
    let inputs = real(1, RACK * RACKS).unwrap();
    for family in [Family::V4, Family::V6] {
        let bench = Racks::with(family, "", Naming::Nodes, RACK).unwrap();
        let expected = one_level(&inputs, family);
        assert_eq!(bench.all_reduce(&inputs).unwrap().digests, expected);
        // The root needs no program of its own for it.
        let host = &bench.lab.aggregator;
        assert_eq!(attached(&host.namespace, &host.interface).unwrap().unwrap().name, "aggregate");
        let root = bench.root_counters().unwrap();
        let counted = [Event::Contributions, Event::Completions].map(|event| root.noted(event));
        assert!(counted[1] > 0 && counted[0] == RACKS as u64 * counted[1], "{counted:?}");
        assert_eq!(bench.all_reduce(&inputs).unwrap().digests, expected);
        stop(bench);
    }
}

/// The same with 5 % loss on every link, and a daemon of a rack that is killed meanwhile.
#[test]
fn f22_loss_and_a_killed_daemon() {
    if !require_bpf("levels::f22_loss_and_a_killed_daemon") {
        return;
    }
    let inputs = synthetic(RACK * RACKS, 8, &[(Dtype::F32, 300_000), (Dtype::I32, 3000)], 1.0);
    let expected = one_level(&inputs, Family::V4);
    let mut bench = Racks::with(Family::V4, "", Naming::Nodes, RACK).unwrap();
    let loss = Rates { loss: 0.05, ..Rates::NONE };
    let disturb = |rank| bench.lab.disturb(rank, PORT..=PORT, rank as u64, loss, loss).unwrap();
    let of_workers: Vec<Disturbance> = (0..inputs.len()).map(disturb).collect();
    // Between rack and root answers come to other ports.
    let ports = PORT..=PORT + 64;
    let disturb = |rack| bench.lab.disturb_rack(rack, ports.clone(), 100 + rack as u64, loss, loss).unwrap();
    let of_racks: Vec<Disturbance> = (0..RACKS).map(disturb).collect();
    let (commands, workers) = bench.spawn(&inputs).unwrap();
    wait_until("results came down", DEADLINE, || {
        Ok(bench.counters(0).unwrap().noted(Event::Completions) > 100)
    })
    .unwrap();
    workers[7].signal(Signal::SIGSTOP).unwrap();
    bench.restart_the_first().unwrap();
    workers[7].signal(Signal::SIGCONT).unwrap();
    assert_eq!(bench.finish(&commands, workers).unwrap().digests, expected);
    for disturbance in of_workers.iter().chain(&of_racks) {
        for direction in [Direction::Egress, Direction::Ingress] {
            assert!(disturbance.counts(direction).unwrap().dropped > 0, "{disturbance:?}");
        }
    }
    stop(bench);
}

/// More ranks than a packet has bits.
#[test]
fn f22_sixty_six_ranks() {
    if !require_bpf("levels::f22_sixty_six_ranks") {
        return;
    }
    const SIZE: usize = 33;
    let inputs = synthetic(SIZE * RACKS, 9, &[(Dtype::I32, 4000), (Dtype::F32, 4000)], 1.0);
    let bench = Racks::with(Family::V4, "", Naming::Nodes, SIZE).unwrap();
    let result = bench.all_reduce(&inputs).unwrap();
    assert!(result.digests.iter().all(|digest| *digest == result.digests[0]));
    let command = bench.command(0, SIZE * RACKS, &inputs[0]).unwrap();
    let output = Gradient::read(&command.output).unwrap();
    let exact = reduce(&inputs, Reduction::Sum).unwrap();
    for (name, exact) in &exact {
        let tensor = output.tensor(name).unwrap();
        let (values, largest) =
            (tensor.values(), exact.iter().fold(1.0, |most: f64, value| most.max(value.abs())));
        let bound = if tensor.dtype == Dtype::I32 { 0.0 } else { largest * 66.0 / f64::from(1 << 20) };
        assert!(values.iter().zip(exact).all(|(value, exact)| (value - exact).abs() <= bound), "{name}");
    }
    stop(bench);
}

/// The ports that a root's answers come to take them of nobody else, and there are no more than one for each rank that a
/// node may have.
#[test]
fn f22_answers_of_strangers_end_at_the_rack() {
    if !require_bpf("levels::f22_answers_of_strangers_end_at_the_rack") {
        return;
    }
    let bench = Racks::with(Family::V4, "", Naming::Nodes, RACK).unwrap();
    let inputs = synthetic(RACK * RACKS, 7, &[(Dtype::F32, 10)], 1.0);
    bench.all_reduce(&inputs).unwrap();
    let request = Request {
        kind: Kind::Pull,
        flags: 0,
        job: 0,
        worker: 0,
        generation: 1,
        seq: Seq(0),
        want: Seq(0),
        ack: Seq(0),
        progress: Seq(0),
        token: 0,
        bitmap: 0,
        tag: 0,
        chunk: Chunk::default(),
        next_exponent: 0,
        attempt: 0,
    };
    let mut answer = request.encode();
    answer.set_kind(Kind::Answer);
    answer.seal();
    // A rank of the rack itself.
    let (host, rack) = (&bench.lab.workers[0], bench.lab.racks[0].address(Family::V4));
    let socket = host.namespace.run(|| UdpSocket::bind((host.address(Family::V4), 0))).unwrap().unwrap();
    let refused = || bench.counters(0).unwrap().refused(Refusal::ForeignAddress);
    let before = refused();
    // That behind the last one is not ours, and leaves the count as it is for the next.
    for (port, counted) in [(PORT, 1), (PORT + 1, 2), (PORT + 64, 3), (PORT + 65, 3), (PORT, 4)] {
        socket.send_to(answer.as_bytes(), (rack, port)).unwrap();
        wait_until("it was refused", DEADLINE, || Ok(refused() >= before + counted)).unwrap();
        assert_eq!(refused(), before + counted, "{port}");
    }
    stop(bench);
}
