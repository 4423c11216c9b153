//! The UDP driver allocates nothing for a packet. (What AF_XDP allocates, `cargo xtask bench worker` counts.)

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::UdpSocket;
use std::time::Duration;

use paatp_user::worker::driver::{BATCH, Driver};
use paatp_user::worker::socket::{Buffers, DataSocket, Target};
use paatp_user::worker::udp::UdpDriver;

thread_local! {
    // The test harness has threads of its own.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counter;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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

/// Sockets on so many neighbouring ports.
fn neighbours(ports: u16) -> Vec<UdpSocket> {
    for _ in 0..100 {
        let first = UdpSocket::bind("127.0.0.1:0").unwrap();
        let base = first.local_addr().unwrap().port();
        let others = (1..ports).map(|i| UdpSocket::bind(("127.0.0.1", base.checked_add(i)?)).ok());
        if let Some(all) = std::iter::once(Some(first)).chain(others).collect::<Option<Vec<_>>>() {
            return all;
        }
    }
    panic!("no {ports} neighbouring ports are free")
}

/// Sends a batch of changing lengths to echoes and receives what comes back.
fn turn(driver: &mut UdpDriver, echoes: &[UdpSocket], buffer: &mut [u8]) -> usize {
    for seq in 0..BATCH as u32 {
        let length = if seq % 5 == 0 { 64 } else { 1472 };
        driver.room().unwrap()[..length].fill(seq as u8);
        driver.push(length, seq);
    }
    assert!(driver.flush().unwrap());
    for echo in echoes {
        while let Ok((length, from)) = echo.recv_from(buffer) {
            echo.send_to(&buffer[..length], from).unwrap();
        }
    }
    let mut received = 0;
    assert!(driver.wait(Duration::from_secs(5)).unwrap().is_none());
    while driver.receive(&mut |datagram, _| received += usize::from(!datagram.is_empty())).unwrap() {}
    received
}

#[test]
fn no_allocation_for_a_packet() {
    // With one port (connected) and with several.
    for ports in [1, 2] {
        let echoes = neighbours(ports);
        echoes.iter().for_each(|echo| echo.set_nonblocking(true).unwrap());
        let address = echoes[0].local_addr().unwrap();
        let buffers = Buffers { window: 256, datagram: 1472 };
        let target = Target::new(address, address.port(), ports);
        let socket = DataSocket::open(target, buffers).unwrap();
        let mut driver = UdpDriver::new(socket).unwrap();
        let mut buffer = vec![0; 2048];
        turn(&mut driver, &echoes, &mut buffer);
        let before = ALLOCATIONS.get();
        let received: usize = (0..100).map(|_| turn(&mut driver, &echoes, &mut buffer)).sum();
        assert_eq!(ALLOCATIONS.get(), before, "{ports} ports, {received} datagrams received");
        assert_eq!(received, 100 * BATCH, "a datagram was lost");
        assert!(driver.system_calls() < 100 * BATCH as u64, "batches are not sent at once");
    }
}
