//! A client and a copier in one process, on the device `cpu`.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate_driver_shim::memory::SharedMemory;

use super::layout::{Command, Layout};
use super::serve::Server;
use super::*;
use crate::CpuExecutor;
use crate::executor::Executor;

struct Rig {
    copier: Copier,
    window: SharedMemory,
    _place: HostPlace,
    // Dropped last.
    server: Server,
    executor: Arc<dyn Executor>,
}

fn join(server: &Server, executor: &Arc<dyn Executor>) -> Copier {
    let (ours, theirs) = UnixStream::pair().unwrap();
    server.admit(theirs.into());
    Copier::over(ours.into(), executor).unwrap()
}

fn rig() -> Rig {
    let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
    let server = Server::start(executor.clone()).unwrap();
    let copier = join(&server, &executor);
    let window = SharedMemory::builder("window", 1 << 20).create().unwrap();
    let place = copier.register_host(window.as_ptr().as_ptr() as usize, 1 << 20, window.fd(), true).unwrap();
    Rig { copier, window, _place: place, server, executor }
}

fn wait(queue: &mut CopyQueue, ticket: Ticket) {
    let began = Instant::now();
    while !queue.done(ticket) {
        queue.health().unwrap();
        assert!(began.elapsed() < pushgate_tests::hang(), "{queue:?}");
        std::thread::yield_now();
    }
}

fn lost(copier: &Copier) -> String {
    let began = Instant::now();
    while copier.lost().is_none() {
        assert!(began.elapsed() < pushgate_tests::hang());
        std::thread::sleep(Duration::from_millis(5));
    }
    copier.lost().unwrap().reason.clone()
}

#[test]
fn a_copier_that_finds_another_one_opens_no_gpu() {
    // No GPU has this UUID, so opening it would fail.
    let gpu = format!("{:032x}", std::process::id());
    let at = start::address(&start::name(&gpu)).unwrap();
    let _other = UnixListener::bind_addr(&at).unwrap();
    let options = ServeOptions { gpu, cpus: CopierCpus::Inherit, stay: false };
    let mut said = String::new();
    serve(&options, &mut |who| said = who.to_owned()).unwrap();
    assert!(said.starts_with("another copier serves GPU"), "{said}");
}

#[test]
fn p3_copies_both_ways_are_complete_when_their_marks_are_seen() {
    let rig = rig();
    let host = rig.window.as_ptr().as_ptr();
    let device = rig.executor.alloc(1 << 20).unwrap();
    let _held = rig.copier.register_device(device.addr(), 1 << 20).unwrap();
    let (mut push, mut pull) = (rig.copier.queue(Direction::Push), rig.copier.queue(Direction::Pull));
    // More copies than a ring holds, so that posts are refused and tried again, with pauses after which the copier sleeps.
    for (round, length) in [1usize, 8, 100, 4096, 65536].into_iter().cycle().take(40).enumerate() {
        let many = (1 << 20) / length.max(512);
        for n in 0..many {
            // SAFETY: within the window, while no copy uses it.
            unsafe { host.add(n * length).write_bytes((n + round) as u8, length) };
        }
        let each = |queue: &mut CopyQueue, at: usize| loop {
            // SAFETY: every copy is waited for before its memory is used again.
            match unsafe { queue.post(device.addr() + at as u64, host as u64 + at as u64, length) } {
                Ok(ticket) => return ticket,
                Err(PostError::Full) => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        };
        let tickets: Vec<_> = (0..many).map(|n| each(&mut pull, n * length)).collect();
        tickets.into_iter().for_each(|ticket| wait(&mut pull, ticket));
        // SAFETY: within the window, while no copy uses it.
        unsafe { host.write_bytes(0, many * length) };
        let tickets: Vec<_> = (0..many).map(|n| each(&mut push, n * length)).collect();
        for (n, ticket) in tickets.into_iter().enumerate() {
            wait(&mut push, ticket);
            // SAFETY: within the window; the copy there is complete.
            let got = unsafe { std::slice::from_raw_parts(host.add(n * length), length) };
            assert!(
                got.iter().all(|byte| *byte == (n + round) as u8),
                "round {round}: copy {n} of {length} bytes"
            );
        }
        if round % 10 == 9 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn p3_a_queue_goes_on_where_the_queue_before_it_has_left_the_rings() {
    let rig = rig();
    let host = rig.window.as_ptr().as_ptr();
    let device = rig.executor.alloc(64).unwrap();
    let _held = rig.copier.register_device(device.addr(), 64).unwrap();
    for round in 1..=4u8 {
        // SAFETY: within the window, while no copy uses it.
        unsafe { host.write_bytes(round, 64) };
        let (mut pull, mut push) = (rig.copier.queue(Direction::Pull), rig.copier.queue(Direction::Push));
        // SAFETY: both copies are waited for before their memory is used again.
        let ticket = unsafe { pull.post(device.addr(), host as u64, 64) }.unwrap();
        wait(&mut pull, ticket);
        // SAFETY: as above.
        let ticket = unsafe { push.post(device.addr(), host as u64 + 64, 64) }.unwrap();
        wait(&mut push, ticket);
        // SAFETY: within the window; the copy there is complete.
        assert_eq!(unsafe { *host.add(64) }, round);
    }
}

#[test]
fn p8_a_command_outside_of_what_a_client_registered_ends_that_client_alone() {
    let rig = rig();
    let other = join(&rig.server, &rig.executor);
    let shared = rig.copier.queue(Direction::Push);
    let command = Command { out: true, device: 7, host: 0, device_offset: 0, host_offset: 0, length: 8 };
    let memory = shared.memory();
    Layout(memory).write(0, 0, command);
    Layout(memory).tail(0).store(1, Ordering::Release);
    assert!(lost(&rig.copier).contains("device memory 7 is not registered"), "{:?}", rig.copier);
    // More commands than a ring has, from a client that has done nothing wrong so far.
    let third = join(&rig.server, &rig.executor);
    Layout(third.queue(Direction::Push).memory()).tail(1).store(1 << 40, Ordering::Release);
    assert!(lost(&third).contains("commands in a ring"), "{third:?}");
    // The other one is served.
    let device = rig.executor.alloc(64).unwrap();
    let _held = other.register_device(device.addr(), 64).unwrap();
    let mut pull = other.queue(Direction::Pull);
    // SAFETY: the queue's own memory and a buffer of 64 bytes, until the wait is over.
    let ticket = unsafe { pull.post(device.addr(), pull.aside().0 as u64, 64) }.unwrap();
    wait(&mut pull, ticket);
    assert!(other.lost().is_none());
}

#[test]
fn p8_memory_that_is_not_registered_is_refused_by_both_ends() {
    let rig = rig();
    let mut push = rig.copier.queue(Direction::Push);
    let begin = rig.window.as_ptr().as_ptr() as u64;
    // SAFETY: refused.
    let e = unsafe { push.post(64, begin, 8) }.unwrap_err();
    assert!(matches!(e, PostError::Unregistered { kind: "device", .. }), "{e}");
    let device = rig.executor.alloc(64).unwrap();
    let held = rig.copier.register_device(device.addr(), 64).unwrap();
    // SAFETY: refused.
    let e = unsafe { push.post(device.addr(), begin + (1 << 20) - 4, 8) }.unwrap_err();
    assert!(matches!(e, PostError::Unregistered { kind: "host", .. }), "{e}");
    drop(held);
    // SAFETY: refused.
    assert!(unsafe { push.post(device.addr(), begin, 8) }.is_err());
    // A descriptor that is no memory, memory of another size, and memory that nobody may write any more.
    let null = std::fs::File::open("/dev/null").unwrap();
    let sealed = SharedMemory::builder("sealed", 4096).create().unwrap();
    sealed.seal_against_writers().unwrap();
    assert!(rig.copier.register_host(0, 4096, null.as_fd(), true).is_err());
    assert!(rig.copier.register_host(0, 8192, sealed.fd(), false).is_err());
    assert!(rig.copier.register_host(0, 4096, sealed.fd(), true).is_err());
    let at = sealed.as_ptr().as_ptr() as usize;
    drop(rig.copier.register_host(at, 4096, sealed.fd(), false).unwrap());
    assert!(rig.copier.lost().is_none());
}
