//! A client and a copier in one process, on the device `cpu`.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate_driver_shim::closing::PeerListener;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_tests::lingering::lingering;
use pushgate_tests::users::{STRANGER, as_user, is_root};
use pushgate_tests::wait_until;

use super::layout::{Command, Layout};
use super::protocol::{Request, ask};
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

pub(super) fn wait(queue: &mut CopyQueue, ticket: Ticket) {
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

/// An abstract name that no other test has.
fn name(of: &str) -> String {
    format!("pushgate-copier-test-{of}-{}", std::process::id())
}

#[test]
fn p7_p8_processes_of_another_user_are_refused_unread_and_hold_up_no_client_and_no_end_of_a_copier() {
    if !is_root("processes of another user at a copier") {
        return;
    }
    let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
    let at = SocketAddr::from_abstract_name(name("serves")).unwrap();
    let listener = PeerListener::from(UnixListener::bind_addr(&at).unwrap());
    // More than a copier has clients, with all that a client greets with.
    let memory = SharedMemory::builder("rings", Layout::bytes(0)).create().unwrap();
    let mut ends = Vec::new();
    let mut strangers: Vec<_> = (0..300)
        .map(|n| {
            let stranger = as_user(STRANGER, || UnixStream::connect_addr(&at).unwrap());
            let memory = match n % 30 {
                0 => {
                    let (fd, end) = lingering();
                    ends.push(end);
                    fd
                }
                _ => memory.fd().try_clone_to_owned().unwrap(),
            };
            let hello = Request::Hello { bytes: Layout::bytes(0) as u64, memory };
            ask(&stranger, &hello).unwrap();
            // The copier's copy may be closed already, and then this close lingers.
            std::thread::spawn(|| drop(hello));
            stranger
        })
        .collect();
    let server = Server::start(executor.clone()).unwrap();
    let serves = std::thread::spawn(move || server.run(&listener, false));
    let copier = Copier::over(UnixStream::connect_addr(&at).unwrap().into(), &executor).unwrap();
    for stranger in &mut strangers {
        // A copier that had read the greeting would answer.
        assert!(!matches!(stranger.read(&mut [0]), Ok(1..)));
    }
    let device = executor.alloc(64).unwrap();
    let held = copier.register_device(device.addr(), 64).unwrap();
    let mut pull = copier.queue(Direction::Pull);
    // SAFETY: the queue's own memory and a buffer of 64 bytes, until the wait is over.
    let ticket = unsafe { pull.post(device.addr(), pull.aside().0 as u64, 64) }.unwrap();
    wait(&mut pull, ticket);
    drop((pull, held, copier));
    wait_until("the copier ends", || serves.is_finished());
    serves.join().unwrap().unwrap();
}

#[test]
fn p7_p8_a_client_whose_copiers_name_another_user_has_taken_says_so_and_waits_for_nobody() {
    if !is_root("a copier's name that another user has taken") {
        return;
    }
    let (at, patience) = (name("taken"), Duration::from_millis(100));
    let join = |at: &str| {
        let at = at.to_owned();
        let joins = std::thread::spawn(move || {
            let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
            let program = Program { path: "/nowhere".into(), args: Vec::new() };
            Copier::join_at(&at, "cpu", &executor, &program, &CopierCpus::Inherit, patience).map(drop)
        });
        wait_until("the client has joined or given up", || joins.is_finished());
        joins.join().unwrap().unwrap_err().to_string()
    };
    let why = join(&at);
    assert!(why.contains("starting the copier (/nowhere)"), "{why}");
    let address = SocketAddr::from_abstract_name(&at).unwrap();
    let listener = as_user(STRANGER, || UnixListener::bind_addr(&address).unwrap());
    let why = join(&at);
    assert!(why.contains(&format!("another user ({STRANGER}) listens")), "{why}");
    // The queue has the connection from before, and is full for ever.
    as_user(STRANGER, || rustix::net::listen(&listener, 0).unwrap());
    let why = join(&at);
    assert!(why.contains("accepted nobody within 100ms"), "{why}");
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
