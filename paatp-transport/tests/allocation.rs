//! In steady state a worker allocates nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::{Aggregator, Shape, membership, settings};
use paatp_transport::rate::Algorithm;
use paatp_transport::{Reduction, Tensor, Time, Values, Worker};

thread_local! {
    // The test harness has threads of its own, which allocate when they like.
    static COUNTING: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counter;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(u64::from(COUNTING.get()), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counter = Counter;

fn counted<T>(call: impl FnOnce() -> T) -> T {
    COUNTING.set(true);
    let result = call();
    COUNTING.set(false);
    result
}

#[test]
fn no_allocation_for_a_packet() {
    for algorithm in Algorithm::ALL {
        let requests = run(algorithm);
        assert!(requests > 4000);
        assert_eq!(ALLOCATIONS.load(Relaxed), 0, "{algorithm}");
    }
}

/// Two ranks reduce 2000 chunks; returns how many requests they sent.
fn run(algorithm: Algorithm) -> u64 {
    let shape = Shape { world: 2, lanes: 64, window: 8, slots: 16 };
    let mut aggregator = Aggregator::new(shape);
    let worker = |rank| {
        let membership = membership(shape, rank);
        Worker::with_controller(membership, settings(), algorithm.controller(&membership)).unwrap()
    };
    let mut workers: Vec<Worker> = (0..2).map(worker).collect();
    for worker in &mut workers {
        let values = Values::F32(vec![1.0; 64 * 2000]);
        worker.all_reduce(Time(0), Reduction::Sum, vec![Tensor { name: "w".into(), values }]);
    }
    let (mut now, mut buffer, mut requests) = (0, vec![0; 64 + 256], 0_u64);
    while workers.iter().any(|worker| worker.chunks().0 < 2000) {
        now += 10;
        for (rank, worker) in workers.iter_mut().enumerate() {
            while let Some(transmit) = counted(|| worker.poll_transmit(Time(now), &mut buffer)) {
                requests += 1;
                let mut datagram = buffer[..transmit.len].to_vec();
                // Every seventh request is lost.
                if requests % 7 != 0 && aggregator.handle(rank as u8, &mut datagram) {
                    counted(|| worker.handle_datagram(Time(now + 5), &datagram));
                }
            }
            counted(|| worker.handle_timeout(Time(now)));
        }
    }
    requests
}
