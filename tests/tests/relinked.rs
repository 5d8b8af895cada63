//! Links that break under two engines' threads while programs on both sides send: nothing is lost, doubled or changed, and
//! what can't be replaced ends with a status.

mod common;

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::*;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::connect::{Fds, Frame, Patience};
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::engine::{Engine, EngineOptions, QpId};
use pushgate_engine::idle::Wake;
use pushgate_engine::recorder::{self, NAME, Phase, QueuePair};
use pushgate_link::local::{LocalLink, Processes};
use pushgate_link::mailbox::Mailbox;
use pushgate_test_ends::met;
use pushgate_tests::hang;

const LONGEST: usize = 1000;
const SLOTS: usize = 8;

/// Where frames for an end go: its engine, once that has the end.
type Far = Arc<OnceLock<(Arc<Engine>, QpId, Mailbox)>>;

/// One side: an engine with its end of the queue pair, the program's device, and the region that the peer puts to.
struct Side {
    engine: Arc<Engine>,
    qp: QpId,
    mailbox: Mailbox,
    /// The inode of its first link segment.
    link: u64,
    device: Device,
    /// What the peer puts to, and what this side's SENDs go out of.
    regions: [Region; 2],
    keys: [u32; 2],
}

/// Two engines, each with what wakes it.
fn engines() -> [(Arc<Engine>, EventFd); 2] {
    [0, 1].map(|_| {
        let bell = EventFd::new().unwrap();
        let engine = Engine::start(bell.try_clone().unwrap(), EngineOptions::default()).unwrap();
        (Arc::new(engine), bell)
    })
}

/// Two sides whose links are replaced. `cut`: frames between them are lost while it is set.
fn sides(whole: Duration, cut: &Arc<AtomicBool>) -> [Side; 2] {
    sides_of(&engines(), whole, cut)
}

/// Two sides on these engines.
fn sides_of(engines: &[(Arc<Engine>, EventFd); 2], whole: Duration, cut: &Arc<AtomicBool>) -> [Side; 2] {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let far: [Far; 2] = Default::default();
    let mailboxes: [Mailbox; 2] = Default::default();
    let mut peers = common::bells().map(Some);
    let mut connects = met().map(Some);
    let sides = [0, 1].map(|i: usize| {
        let (engine, bell) = (engines[i].0.clone(), engines[i].1.try_clone().unwrap());
        let endpoint = Endpoint::local(m[i].joined(&m[1 - i], peers[i].take()), options(1 - i as u32));
        let (to, cut) = (far[1 - i].clone(), cut.clone());
        let send = move |frame: Frame| {
            if let Some((engine, qp, mailbox)) = to.get().filter(|_| !cut.load(Ordering::Relaxed))
                && mailbox.put(frame)
            {
                engine.control(*qp).unwrap();
            }
        };
        let connect = connects[i].take().unwrap();
        let endpoint = endpoint.unwrap().with_recovery(
            connect,
            Patience::within(whole, i as u64),
            mailboxes[i].clone(),
            Box::new(send),
        );
        let qp = engine.add_qp(endpoint, Wake::Doorbell).unwrap();
        let regions = [Region::new(SLOTS * 64), Region::new(LONGEST * SLOTS)];
        // SAFETY: the engine keeps the regions' memory, which is mapped and read and written through pointers alone.
        let keys = [0, 1].map(|r: usize| unsafe {
            engine.add_region(qp, regions[r].memory(), regions[r].bytes as u64).unwrap()
        });
        let mut device = Device::new(&m[i], &m[1 - i]);
        device.set_bell(Some(bell));
        let link = std::fs::File::from(m[i].link.fd().try_clone_to_owned().unwrap());
        let link = link.metadata().unwrap().ino();
        Side { engine, qp, mailbox: mailboxes[i].clone(), link, device, regions, keys }
    });
    for i in [0, 1] {
        assert!(far[i].set((sides[i].engine.clone(), sides[i].qp, mailboxes[i].clone())).is_ok());
    }
    sides
}

fn number(seed: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// What message `n` carries. Every fourth one is a PUT with a signal, the others are SENDs: in the WQE, in the window, out
/// of a region.
fn content(n: u64) -> Vec<u8> {
    let length = match n % 4 {
        0 => 1 + number(n) as usize % 40,
        3 => 64,
        _ => 1 + number(n) as usize % LONGEST,
    };
    let mut bytes = vec![0; length];
    pattern(n, &mut bytes);
    bytes
}

impl Side {
    /// Posts message `n`, unless credit is missing.
    fn post(&mut self, n: u64, rkey: u32) -> bool {
        let (bytes, tag) = (content(n), (n / 4 * 3 + n % 4) as u32);
        match n % 4 {
            0 => self.device.post(inline_send(tag), &bytes),
            1 => self.device.post(window_send(tag), &bytes),
            2 => {
                let slot = (n / 4) as usize % SLOTS;
                self.regions[1].write(slot * LONGEST, &bytes);
                self.device.post_from(region_send(tag, self.keys[1], (slot * LONGEST) as u64), bytes.len())
            }
            _ => {
                let put = Record {
                    flags: Record::WITH_SIGNAL,
                    rkey,
                    remote_offset: (n / 4) % SLOTS as u64 * 64,
                    signal: 1,
                    signal_value: n / 4 + 1,
                    ..Record::new(Opcode::Put)
                };
                self.device.post(put, &bytes)
            }
        }
    }

    /// Takes one SEND, if one has come, and compares it. `sends`: those taken before.
    fn take(&mut self, sends: u64) -> bool {
        let Some(m) = self.device.try_recv() else { return false };
        assert_eq!(m.tag as u64, sends, "a SEND is missing, doubled or out of order");
        let expected = content(sends / 3 * 4 + sends % 3);
        let mut found = vec![0; m.length as usize];
        self.device.read(&m, &mut found);
        assert_eq!(found, expected, "SEND {sends}");
        self.device.release(1);
        true
    }

    /// Looks at the signal of the PUTs: the PUT that it announces is there.
    fn look(&self, before: u64) -> u64 {
        let signal = self.device.signal(1);
        assert!(signal >= before, "the signal falls from {before} to {signal}");
        if signal > before {
            let found = self.regions[0].read((signal - 1) as usize % SLOTS * 64, 64);
            // The next PUT to the same place begins after the signals of those between.
            let still = self.device.signal(1) < signal + SLOTS as u64 - 1;
            assert!(!still || found == content((signal - 1) * 4 + 3), "PUT {signal} is not there");
        }
        signal
    }
}

/// Sends both ways and takes what comes until `stop`, and then until everything has arrived. `totals`: how many messages
/// each side has sent, once it sends no more.
fn traffic(mut side: Side, at: usize, rkey: u32, shared: &Shared) -> Side {
    let (mut posted, mut sends, mut signal) = (0, 0, 0);
    let mut moved_at = Instant::now();
    let mut sending = true;
    loop {
        let mut moved = false;
        // What lies in a region is written anew 32 messages later: the one before must have arrived.
        if sending && side.device.slots() < side.device.delivered() + 16 && side.post(posted, rkey) {
            (posted, moved) = (posted + 1, true);
            // Whole rounds of four.
            if shared.stop.load(Ordering::Relaxed) && posted % 4 == 0 {
                sending = false;
                shared.totals[at].store(posted, Ordering::SeqCst);
            }
        }
        while side.take(sends) {
            (sends, moved) = (sends + 1, true);
        }
        let now = side.look(signal);
        moved |= now > signal;
        signal = now;
        assert!(side.device.status().is_none(), "{:?}", side.device.status());
        let theirs = shared.totals[1 - at].load(Ordering::SeqCst);
        let all = theirs > 0 && (sends, signal) == (theirs / 4 * 3, theirs / 4);
        if !sending && all && side.device.delivered() == side.device.slots() {
            return side;
        }
        if moved {
            moved_at = Instant::now();
            shared.taken[at].store(sends + signal, Ordering::Relaxed);
        } else {
            assert!(
                moved_at.elapsed() < hang(),
                "posted {posted}, took {sends} SENDs, signal {signal} of {theirs}"
            );
            std::thread::yield_now();
        }
    }
}

/// What the threads of a run share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    totals: [AtomicU64; 2],
    /// Messages that each side has taken.
    taken: [AtomicU64; 2],
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < hang(), "waiting for {what}");
        std::thread::yield_now();
    }
}

fn recovered(engine: &Engine) -> u64 {
    engine.counters().unwrap().recovered
}

#[test]
fn p6_links_that_break_hundreds_of_times_under_traffic_lose_double_and_change_nothing() {
    const BREAKS: usize = 300;
    let shared = Shared::default();
    let [a, b] = sides(Duration::from_secs(20), &Arc::default());
    let engines = [&a, &b].map(|side| (side.engine.clone(), side.qp));
    let keys = [b.keys[0], a.keys[0]];
    let mut times = Vec::new();
    let (a, b) = std::thread::scope(|scope| {
        let shared = &shared;
        let a = scope.spawn(move || traffic(a, 0, keys[0], shared));
        let b = scope.spawn(move || traffic(b, 1, keys[1], shared));
        for n in 0..BREAKS {
            let taken = || [0, 1].map(|i| shared.taken[i].load(Ordering::Relaxed));
            // Something has arrived each way since the last fault, and now and then both ends break together.
            let before = taken();
            until("traffic", || {
                taken().iter().zip(before).all(|(now, before)| *now > before + n as u64 % 64)
            });
            let begin = Instant::now();
            let counts = [0, 1].map(|i: usize| recovered(&engines[i].0));
            let (engine, qp) = &engines[n % 2];
            let breaks = engine.break_link(*qp).unwrap();
            if n % 5 == 0 {
                let (engine, qp) = &engines[1 - n % 2];
                engine.break_link(*qp).unwrap();
            }
            assert!(breaks, "the link is replaced");
            until("another link", || (0..2).all(|i| recovered(&engines[i].0) > counts[i]));
            let before = taken();
            until("a message", || taken() != before);
            times.push(begin.elapsed());
        }
        shared.stop.store(true, Ordering::Relaxed);
        (a.join().unwrap(), b.join().unwrap())
    });
    times.sort();
    let messages: u64 = shared.totals.iter().map(|n| n.load(Ordering::SeqCst)).sum();
    println!(
        "{BREAKS} faults, {messages} messages; from the break to the next message: p50 {:?}, p99 {:?}, longest {:?}",
        times[BREAKS / 2],
        times[BREAKS * 99 / 100],
        times[BREAKS - 1]
    );
    for side in [&a, &b] {
        let c = side.engine.counters().unwrap();
        assert_eq!((c.dropped, c.refused, c.stuck), (0, 0, 0));
        assert!(c.recovered >= BREAKS as u64 && c.delivered > 0, "{c:?}");
        side.regions.iter().for_each(Region::check_guards);
    }
}

#[test]
fn p6_a_hundred_links_that_break_together_are_all_replaced() {
    const LINKS: u64 = 100;
    let both = engines();
    let pairs: Vec<_> =
        (0..LINKS).map(|_| sides_of(&both, Duration::from_secs(20), &Arc::default())).collect();
    let mut times = Vec::new();
    for n in 1..=20 {
        // Links that break at once again have a pause between them.
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        for [a, _] in &pairs {
            assert!(a.engine.break_link(a.qp).unwrap());
        }
        until("a hundred links", || both.iter().all(|(engine, _)| recovered(engine) == n * LINKS));
        times.push(begin.elapsed());
    }
    times.sort();
    println!(
        "{LINKS} links of two engines that break together: all are back after {:?} at best, {:?} in the median",
        times[0],
        times[times.len() / 2]
    );
}

#[test]
fn p7_a_link_whose_peer_does_not_answer_ends_with_link_down_at_its_limit() {
    let cut = Arc::new(AtomicBool::new(false));
    let [a, b] = sides(Duration::from_millis(300), &cut);
    cut.store(true, Ordering::Relaxed);
    assert!(a.engine.break_link(a.qp).unwrap());
    let expected = (abi::PUSHGATE_LINK_DOWN, Some(0), abi::PUSHGATE_DOWN_PORT);
    // The other side finds the end where the link was: its own link has not broken.
    for side in [&a, &b] {
        until("the end", || side.device.status().is_some());
        let status = side.device.status().unwrap();
        assert_eq!((status.code as u32, status.rank, status.detail), expected);
    }
}

/// What a reader of this process's flight recorders sees of the end whose first link segment has this inode.
fn recorded(link: u64) -> QueuePair {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let memories = fds.filter_map(|path| {
        let name = std::fs::read_link(&path).ok()?;
        let file = name.to_str()?.contains(NAME).then(|| std::fs::File::open(&path).ok())??;
        let bytes = file.metadata().ok()?.len() as usize;
        Some(Arc::new(ReadOnlyMemory::from_fd(file.into(), bytes).ok()?))
    });
    let mut all = memories
        .filter_map(|m| recorder::read(&[recorder::Memory::open(&m).ok()?]))
        .flat_map(|engine| engine.queue_pairs);
    all.find(|qp| qp.about.ends[0] == link).expect("it is recorded")
}

#[test]
fn the_recorder_shows_the_phase_of_a_queue_pair_whose_link_is_replaced() {
    let cut = Arc::new(AtomicBool::new(true));
    let [a, b] = sides(Duration::from_secs(60), &cut);
    let last = |side: &Side| {
        let view = recorded(side.link).last().view;
        (view.phase, view.epoch)
    };
    assert!(a.engine.break_link(a.qp).unwrap());
    // Nobody answers.
    until("the end of the link", || last(&a) == (Phase::Offered, 1));
    assert_eq!(last(&b), (Phase::Live, 0));
    cut.store(false, Ordering::Relaxed);
    for side in [&a, &b] {
        until("another link", || matches!(last(side), (Phase::Live, 1..)));
    }
    let phases: Vec<_> = recorded(a.link).entries.iter().map(|e| e.view.phase).collect();
    assert!(phases.contains(&Phase::Offered), "{phases:?}");
    for side in [&a, &b] {
        until("the recovery in the metrics", || {
            let metrics = recorded(side.link).metrics;
            metrics.is_some_and(|m| m.counters.recovered >= 1 && m.recovery.counts.iter().sum::<u64>() >= 1)
        });
    }
}

#[test]
fn p7_a_side_that_ends_while_its_link_is_replaced_ends_the_other_side() {
    let cut = Arc::new(AtomicBool::new(true));
    let [a, b] = sides(Duration::from_secs(20), &cut);
    // Nobody answers, so it stays without a link.
    assert!(a.engine.break_link(a.qp).unwrap());
    cut.store(false, Ordering::Relaxed);
    a.engine.fail(Some(a.qp), Status::new(abi::PUSHGATE_ABORTED)).unwrap();
    for side in [&a, &b] {
        until("the end", || side.device.status().is_some());
        let status = side.device.status().unwrap();
        assert_eq!((status.code as u32, status.rank.unwrap_or(0)), (abi::PUSHGATE_ABORTED, 0));
    }
}

#[test]
fn p7_a_side_without_a_link_finds_the_other_sides_end_though_no_frame_says_so() {
    let cut = Arc::new(AtomicBool::new(true));
    let [a, b] = sides(Duration::from_secs(3600), &cut);
    assert!(a.engine.break_link(a.qp).unwrap());
    b.engine.fail(Some(b.qp), Status::new(abi::PUSHGATE_ABORTED)).unwrap();
    until("the end", || a.device.status().is_some());
    let status = a.device.status().unwrap();
    assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_ABORTED, Some(1)));
}

#[test]
fn p7_a_side_that_ends_or_leaves_gives_up_its_way_to_the_peer_before_its_copies_end() {
    for ends in [true, false] {
        let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
        let [connect, _] = met();
        let told = Arc::new(AtomicU64::new(0));
        let theirs = Arc::downgrade(&told);
        let send = move |_| _ = told.fetch_add(1, Ordering::Relaxed);
        let endpoint = Endpoint::local(m[0].joined(&m[1], None), options(1)).unwrap();
        let patience = Patience::within(Duration::from_secs(1), 7);
        let mut endpoint = endpoint.with_recovery(connect, patience, Mailbox::default(), Box::new(send));
        assert_eq!(theirs.strong_count(), 1);
        match ends {
            true => endpoint.fail(Status::new(abi::PUSHGATE_ABORTED)),
            false => endpoint.leave(),
        }
        assert_eq!(theirs.strong_count(), 0, "the channel's owner would not know that frames need an answer");
    }
}

#[test]
fn p7_an_end_that_can_not_make_its_link_tries_again_every_10_ms_and_does_not_spin() {
    const AGAIN: u64 = 10_000_000;
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let memory = m[0].joined(&m[1], None);
    let (geometries, tries) = ([0, 1].map(|rank| Geometry { rank, ..GEOMETRY }), Arc::new(AtomicU64::new(0)));
    let (own, peer) = (&memory.link.into(), &memory.peer_link.into());
    let processes = Processes { peer: None, in_program: true };
    let window = memory.peer_window.into();
    let link = LocalLink::new(own, &geometries[0], peer, &geometries[1], window, (None, None), processes);
    let tried = tries.clone();
    let link = link.with_segments(Box::new(move |bytes| {
        tried.fetch_add(1, Ordering::Relaxed);
        // More than there is.
        SharedMemory::builder("recovering-test", usize::MAX / 2 + bytes).create().map(Arc::new)
    }));
    let [g, peer_g] = geometries;
    let endpoint = Endpoint::new(memory.work, memory.control, g, peer_g, Box::new(link), options(1)).unwrap();
    let [connect, _] = met();
    let patience = Patience::within(Duration::from_secs(1), 7);
    let mut endpoint = endpoint.with_recovery(connect, patience, Mailbox::default(), Box::new(|_| {}));
    endpoint.set_time(0);
    assert!(endpoint.break_link());
    for n in 1..=100 {
        (0..3).for_each(|_| _ = endpoint.poll(&mut None));
        assert_eq!(tries.load(Ordering::Relaxed), n);
        assert!(!endpoint.is_ending() && !endpoint.has_work(), "an engine would spin");
        assert_eq!(endpoint.wakes_at(), Some(AGAIN * n));
        endpoint.set_time(AGAIN * n);
    }
    endpoint.poll(&mut None);
    assert_eq!(endpoint.status().map(|s| s.code as u32), Some(abi::PUSHGATE_LINK_DOWN));
}

#[test]
fn p8_a_peer_that_sends_frames_without_end_fills_no_memory() {
    let [a, _b] = sides(Duration::from_secs(20), &Arc::default());
    // The engine is told once; until it looks, a bounded number of frames waits, whose descriptors are open and counted.
    let memory = Memory::new(GEOMETRY);
    // Other tests of this process have descriptors of their own.
    let link = std::fs::File::from(memory.link.fd().try_clone_to_owned().unwrap());
    let file = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let ours = file(link.metadata().unwrap());
    let is_ours = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|e| std::fs::metadata(e.path()).is_ok_and(|found| file(found) == ours))
    };
    let open =
        || std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| is_ours(e).then_some(())).count();
    let before = open();
    let fds = |n| (0..n).map(|_| memory.link.fd().try_clone_to_owned().unwrap()).collect::<Vec<_>>();
    for n in 0..1000 {
        assert_eq!(a.mailbox.put(Frame { bytes: vec![9; 40], along: fds(1).into() }), n == 0);
    }
    assert!(open() < before + 20, "{} descriptors are open, {before} were", open());

    let counted = Arc::new(AtomicUsize::new(0));
    let [first, second] = [0, 1].map(|_| Mailbox::counted(counted.clone()));
    assert!(!first.put(Frame { bytes: vec![9; (1 << 19) + 1], along: Fds::default() }), "too long");
    assert!(!first.put(Frame { bytes: vec![9], along: fds(5).into() }), "too many descriptors");
    assert!(first.put(Frame { bytes: vec![9; 1 << 19], along: fds(2).into() }));
    assert!(!first.put(Frame { bytes: vec![9], along: fds(1).into() }), "too many bytes together");
    assert!(second.put(Frame { bytes: vec![9; 1 << 19], along: fds(1).into() }));
    assert_eq!(counted.load(Ordering::Relaxed), 3);
    drop(first);
    assert_eq!(counted.load(Ordering::Relaxed), 1);
}

#[test]
fn p8_a_frame_that_no_peer_would_send_ends_the_queue_pair_and_names_the_peer() {
    let [a, b] = sides(Duration::from_secs(20), &Arc::default());
    assert!(a.mailbox.put(Frame { bytes: vec![9; 40], along: Fds::default() }));
    a.engine.control(a.qp).unwrap();
    until("the end", || a.device.status().is_some());
    let status = a.device.status().unwrap();
    assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_REFUSED, Some(1)));
    until("the end", || b.device.status().is_some());
}
