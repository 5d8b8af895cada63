//! Two agents of this process, over each way that bytes take.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pushgate::{Context, Settings};

use crate::agent::{Agent, Described};
use crate::engine::State;
use crate::gpu::Offer;
use crate::greet::Connection;
use crate::regions::LEAST;
use crate::registrations::{self, Published};
use crate::session::Session;
use crate::status::Status;
use crate::wire::{HEAD, Message, PLACE, Place};

/// What a test lets pass before it calls a wait a hang.
pub const HANG: Duration = Duration::from_secs(60);

/// Ways by which no bytes go directly.
fn ways_by_messages() -> Vec<Vec<(&'static str, &'static str)>> {
    ways().into_iter().filter(|way| way[..] != [("qp", "local")]).collect()
}

/// Whether a process reads another's memory here: QEMU's emulation of a process lacks the system call.
pub fn goes_directly() -> bool {
    pushgate_link::process_vm_readv_callable().is_ok()
}

/// Over what two agents reach each other: by the first way, where there is it, bytes may go directly. With `_PUSHGATE_TEST_IB_DEV` in
/// the environment over that RDMA device alone.
fn ways() -> Vec<Vec<(&'static str, &'static str)>> {
    const DEVICE: &str = "_PUSHGATE_TEST_IB_DEV";
    match std::env::var(DEVICE) {
        Ok(device) => vec![vec![("qp", "verbs"), ("ib_dev", device.leak())]],
        Err(_) => {
            let direct = goes_directly().then(|| vec![("qp", "local")]);
            let others =
                [vec![("qp", "local"), ("direct", "false")], vec![("qp", "tcp"), ("host", "127.0.0.1")]];
            direct.into_iter().chain(others).collect()
        }
    }
}

pub fn agent(name: &str, parameters: &[(&str, &str)]) -> Agent {
    let parameters: Vec<_> = parameters.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    crate::log::start();
    Agent::open(name, &parameters, Offer::Played).unwrap()
}

/// Kinds of memory. The CPU plays the GPU, and makes a copy only when it is asked whether the copy is complete.
pub const HOST: i32 = 0;
pub const GPU: i32 = 1;

/// Memory of a test, as an agent has registered it. What the agents write is read through raw pointers alone.
pub struct Memory {
    pub at: *mut u8,
    bytes: usize,
    pub key: u64,
}

impl Memory {
    pub fn new(agent: &Agent, bytes: usize, seed: usize) -> Memory {
        Memory::within(agent, bytes, seed, 0, HOST)
    }

    /// Memory of a kind whose first and last `guard` bytes are not registered.
    pub fn within(agent: &Agent, bytes: usize, seed: usize, guard: usize, kind: i32) -> Memory {
        let all: Vec<u8> = (0..bytes).map(|i| (i * 31 + i / 251 + seed) as u8).collect();
        let at = Box::into_raw(all.into_boxed_slice()).cast::<u8>();
        let key = agent.register((at as usize + guard) as u64, (bytes - 2 * guard) as u64, kind, 0).unwrap();
        Memory { at, bytes, key }
    }

    pub fn content(&self) -> Vec<u8> {
        // SAFETY: the memory is the test's, and the transfers that touch it have ended.
        (0..self.bytes).map(|i| unsafe { self.at.add(i).read_volatile() }).collect()
    }

    pub fn fill(&self, with: u8) {
        // SAFETY: as above.
        (0..self.bytes).for_each(|i| unsafe { self.at.add(i).write_volatile(with) });
    }

    pub fn part(&self, from: usize, length: usize, registration: u64) -> Described {
        Described { address: self.at as u64 + from as u64, length: length as u64, device: 0, registration }
    }
}

/// What memory is here, and what at the peer.
const KINDS: [[i32; 2]; 4] = [[HOST, HOST], [GPU, GPU], [GPU, HOST], [HOST, GPU]];

pub fn pair(way: &[(&str, &str)]) -> [Agent; 2] {
    let both = [agent("first", way), agent("second", way)];
    both[0].load_connection("second", &both[1].connection()).unwrap();
    both
}

pub fn run(
    agent: &Agent,
    transfer: &std::sync::Arc<crate::transfer::Transfer>,
    note: Option<&[u8]>,
) -> Status {
    let mut status = agent.post(transfer, note).unwrap_or_else(|status| status);
    let begin = Instant::now();
    while status == Status::InProgress {
        assert!(begin.elapsed() < HANG, "a transfer hangs");
        status = agent.check(transfer);
    }
    status
}

/// Waits for a notification, which is the only one.
fn next_note(agent: &Agent) -> (String, Vec<u8>) {
    let mut all = notes(agent);
    assert_eq!(all.len(), 1);
    all.pop_front().expect("counted above")
}

/// Waits for notifications.
pub fn notes(agent: &Agent) -> VecDeque<(String, Vec<u8>)> {
    let begin = Instant::now();
    loop {
        let all = agent.notifications();
        if !all.is_empty() {
            return all;
        }
        assert!(begin.elapsed() < HANG, "a notification does not come");
        std::thread::yield_now();
    }
}

/// Drives an agent until it sees the end of all its connections, whose messages nobody takes meanwhile.
pub fn wait_for_ends(agent: &Agent, state: &State) {
    let begin = Instant::now();
    while !state.sessions.values().all(Session::is_over) {
        assert!(begin.elapsed() < HANG, "the agent does not see the end");
        let _ = agent.core.context.drive();
    }
}

#[test]
fn a_notification_that_is_too_long_is_refused_and_ends_no_connection() {
    let [first, second] = pair(&[("qp", "local")]);
    let most = crate::session::receiving::LONGEST_NOTE;
    first.notify("second", &vec![1; most]).unwrap();
    assert_eq!(next_note(&second).1.len(), most);
    assert_eq!(first.notify("second", &vec![1; most + 1]).unwrap_err(), Status::InvalidParam);
    first.notify("second", b"short").unwrap();
    assert_eq!(next_note(&second).1, b"short");
}

#[test]
fn p6_writes_and_reads_of_scattered_pages_end_with_the_bytes_in_place_and_their_notification() {
    for (way, kinds) in ways().into_iter().flat_map(|way| KINDS.map(|kinds| (way.clone(), kinds))) {
        let [first, second] = pair(&way);
        let bytes = 3 << 20;
        let here = Memory::within(&first, bytes, 1, 0, kinds[0]);
        let there = Memory::within(&second, bytes, 2, 0, kinds[1]);
        let loaded = first.load("second", &second.publish(there.key).unwrap(), kinds[1]).unwrap();
        for (round, (count, page)) in
            [(1, 8), (1, 3 << 20), (700, 4096), (90, 31 << 10), (3, 1), (2, 0)].into_iter().enumerate()
        {
            for write in [true, false] {
                let step = bytes / count;
                // The pages in reverse on the other side.
                let own: Vec<_> = (0..count).map(|i| here.part(i * step, page, here.key)).collect();
                let theirs: Vec<_> = (0..count).rev().map(|i| there.part(i * step, page, loaded)).collect();
                let mut expected = if write { there.content() } else { here.content() };
                let from = if write { here.content() } else { there.content() };
                for i in 0..count {
                    let (a, b) = (i * step, (count - 1 - i) * step);
                    let (from_at, to) = if write { (a, b) } else { (b, a) };
                    expected[to..to + page].copy_from_slice(&from[from_at..from_at + page]);
                }
                let transfer = first.prepare(write, "second", kinds, &own, &theirs).unwrap();
                let text = format!("round {round}");
                assert_eq!(run(&first, &transfer, Some(text.as_bytes())), Status::Success);
                let straight =
                    kinds == [HOST, HOST] && page as u64 >= LEAST && !way.contains(&("qp", "local"));
                assert_eq!(transfer.run().straight, straight, "{way:?}, {kinds:?}, {page}");
                let got = if write { there.content() } else { here.content() };
                assert!(got == expected, "{way:?}, {kinds:?}, {count} pages of {page}, write: {write}");
                assert_eq!(next_note(&second), ("first".into(), text.into_bytes()));
                // Once more, without a notification.
                assert_eq!(run(&first, &transfer, None), Status::Success);
                first.release(&transfer).unwrap();
            }
        }
        assert!(second.notifications().is_empty());
    }
}

#[test]
fn p6_transfers_and_notifications_survive_links_that_break_under_them_once_each_and_whole() {
    let kinds = [[HOST, HOST], [GPU, GPU]];
    for (way, kinds) in ways_by_messages().into_iter().flat_map(|way| kinds.map(|kinds| (way.clone(), kinds)))
    {
        let [first, second] = pair(&way);
        let bytes = 4 << 20;
        let there = Memory::within(&second, bytes, 99, 0, kinds[1]);
        let loaded = first.load("second", &second.publish(there.key).unwrap(), kinds[1]).unwrap();
        let (mut broken, mut texts) = (0, Vec::new());
        for round in 0..24 {
            let here = Memory::within(&first, bytes, round, 0, kinds[0]);
            let write = round % 3 != 0;
            let pages = |of: &Memory, key| (0..64).map(|i| of.part(i << 16, 60_000, key)).collect::<Vec<_>>();
            let (own, theirs) = (pages(&here, here.key), pages(&there, loaded));
            let transfer = first.prepare(write, "second", kinds, &own, &theirs).unwrap();
            texts.push(("first".to_owned(), vec![round as u8]));
            let source = if write { here.content() } else { there.content() };
            first.post(&transfer, Some(&[round as u8])).unwrap();
            let (begin, mut checks, before) = (Instant::now(), 0, broken);
            loop {
                // Somewhere within the transfer, at either end; no link may stand yet.
                if broken == before && checks >= round / 2 % 4 {
                    let agent = if round % 2 == 0 { &first } else { &second };
                    broken += agent.break_links();
                }
                checks += 1;
                if first.check(&transfer) != Status::InProgress {
                    break;
                }
                assert!(begin.elapsed() < HANG, "{way:?}, {kinds:?}, round {round} hangs");
            }
            assert_eq!(first.check(&transfer), Status::Success, "{way:?}, round {round}");
            let got = if write { there.content() } else { here.content() };
            let whole = (0..64).all(|i| got[i << 16..][..60_000] == source[i << 16..][..60_000]);
            assert!(whole, "{way:?}, {kinds:?}, round {round}");
            first.release(&transfer).unwrap();
            first.deregister(here.key).unwrap();
        }
        let mut got = Vec::new();
        while got.len() < texts.len() {
            got.extend(notes(&second));
        }
        assert_eq!(got, texts);
        assert!(broken >= 8, "{broken} links were broken");
    }
}

#[test]
fn p6_transfers_within_an_agent_end_with_the_bytes_in_place_and_their_notification() {
    let agent = agent("alone", &[("qp", "local")]);
    for kinds in KINDS {
        let bytes = 5 << 20;
        let [from, to] = [0, 1].map(|i| Memory::within(&agent, bytes, i, 0, kinds[i]));
        for write in [true, false] {
            let [own, other] = if write { [&from, &to] } else { [&to, &from] };
            let memory = if write { kinds } else { [kinds[1], kinds[0]] };
            let list =
                |of: &Memory| (0..40).map(|i| of.part(i * 131_072, 100_000, of.key)).collect::<Vec<_>>();
            let transfer = agent.prepare(write, "alone", memory, &list(own), &list(other)).unwrap();
            assert_eq!(run(&agent, &transfer, Some(b"within")), Status::Success);
            assert_eq!(next_note(&agent), ("alone".into(), b"within".to_vec()));
            let [got, expected] = [&to, &from].map(Memory::content);
            assert!((0..40).all(|i| got[i * 131_072..][..100_000] == expected[i * 131_072..][..100_000]));
            agent.release(&transfer).unwrap();
        }
    }
}

#[test]
fn p8_memory_is_not_touched_after_its_transfer_is_released_or_its_registration_has_ended() {
    for (way, kind) in ways().into_iter().flat_map(|way| [HOST, GPU].map(|kind| (way.clone(), kind))) {
        let [first, second] = pair(&way);
        let bytes = 8 << 20;
        for round in 0..30 {
            let [here, there] = [(&first, round), (&second, round + 100)]
                .map(|(agent, seed)| Memory::within(agent, bytes, seed, 0, kind));
            let loaded = first.load("second", &second.publish(there.key).unwrap(), kind).unwrap();
            let write = round % 2 == 0;
            let pages =
                |of: &Memory, key| (0..64).rev().map(|i| of.part(i << 17, 100_000, key)).collect::<Vec<_>>();
            let prepare = |write| {
                let (here, there) = (pages(&here, here.key), pages(&there, loaded));
                first.prepare(write, "second", [kind, kind], &here, &there).unwrap()
            };
            // Both ends have leased their memory and know it after these.
            for write in [false, true] {
                let before = prepare(write);
                assert_eq!(run(&first, &before, None), Status::Success);
                first.release(&before).unwrap();
            }
            let transfer = prepare(write);
            first.post(&transfer, None).unwrap();
            for _ in 0..round / 6 * 7 {
                first.check(&transfer);
            }
            // The owner takes the memory back while copies may be under way; the other end's transfer fails then.
            let (mut owner, mut other) = (&here, &there);
            match round % 3 {
                0 => {
                    first.release(&transfer).unwrap();
                    assert!(!first.puts(), "{way:?}, {kind}, round {round}: it is still read");
                }
                1 => first.deregister(here.key).unwrap(),
                _ => {
                    second.deregister(there.key).unwrap();
                    (owner, other) = (&there, &here);
                }
            }
            owner.fill(0x5a);
            let mut status = first.check(&transfer);
            let begin = Instant::now();
            while status == Status::InProgress {
                assert!(begin.elapsed() < HANG, "a transfer hangs");
                status = first.check(&transfer);
            }
            for _ in 0..50 {
                first.notifications();
                second.notifications();
            }
            assert!(
                owner.content().iter().all(|byte| *byte == 0x5a),
                "{way:?}, {kind}, round {round}: written"
            );
            let read = other.content().chunks(64).any(|bytes| bytes == [0x5a; 64]);
            assert!(!read, "{way:?}, {kind}, round {round}: read");
            first.release(&transfer).unwrap();
            // Only then may the test's memory be another agent's.
            for (agent, memory) in [(&first, &here), (&second, &there)] {
                let _ = agent.deregister(memory.key);
            }
        }
        assert_eq!(first.connections(), 1, "{way:?}, {kind}: the connection has ended");
    }
}

/// Random numbers that a seed fixes (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Bytes at each end of the victim's memory that are not registered.
const GUARD: u64 = 4096;

/// A message that a hostile agent may send: mostly one that can be read, about memory that is not the agent's to touch.
fn hostile(random: &mut Random, victim: &Memory) -> (u32, Vec<u8>) {
    let (begin, end) = (victim.at as u64 + GUARD, victim.at as u64 + victim.bytes as u64 - GUARD);
    let key = [victim.key, victim.key, 0, random.next()][random.below(4) as usize];
    let address = [end, end - 4, begin - 8, begin - 1, 4096, random.next()][random.below(6) as usize];
    let places = vec![Place { key, address, length: 8 }; random.below(4) as usize];
    let number = random.below(3);
    let message = match random.below(24) {
        0 => Message::Hello { place: random.below(64), token: [number as u8; 16] },
        1 | 2 | 12.. => {
            Message::Write { transfer: number, last: true, payload: HEAD + places.len() * PLACE, places }
        }
        3 => Message::Read {
            job: number,
            into: if key.is_multiple_of(2) { places.clone() } else { Vec::new() },
            places,
        },
        4 => Message::Data { job: number, last: true, status: 0, payload: HEAD },
        5 => Message::Note { last: number == 0, payload: HEAD },
        6 => Message::Done { count: number },
        7 => Message::Failed { transfer: number, status: -3 },
        8 => Message::Ask { key, region: number.is_multiple_of(2) },
        9 => Message::Lease { key, granted: true, region: None },
        10 => Message::Revoke { key },
        11 => Message::Revoked { key },
    };
    let (mut tag, mut bytes) = message.encode();
    if let Message::Write { places, .. } = &message {
        bytes.resize(bytes.len() + 8 * places.len(), 0xee);
    }
    match random.below(40) {
        0 => tag = random.next() as u32,
        1 => bytes.truncate(random.below(bytes.len() as u64 + 1) as usize),
        2 => {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        3 => bytes.extend(vec![0xee; random.below(10_000) as usize]),
        _ => {}
    }
    (tag, bytes)
}

#[test]
fn p8_a_hostile_agent_touches_no_memory_and_stops_no_other_connection() {
    let ways = [[("qp", "local"), ("host", "127.0.0.1")], [("qp", "tcp"), ("host", "127.0.0.1")]];
    for (way, kind) in [(ways[0], HOST), (ways[0], GPU), (ways[1], HOST)] {
        // Bytes between the other two agents go directly over `local`.
        if way == ways[0] && !goes_directly() {
            continue;
        }
        a_hostile_agent_touches_no_memory(&way, kind);
    }
}

fn a_hostile_agent_touches_no_memory(way: &[(&str, &str)], kind: i32) {
    let [friend, victim] = [agent("friend", way), agent("victim", way)];
    friend.load_connection("victim", &victim.connection()).unwrap();
    let (here, secret, open) = (
        Memory::new(&friend, 4096, 3),
        Memory::within(&victim, 3 * 4096, 4, GUARD as usize, kind),
        Memory::new(&victim, 4096, 5),
    );
    let loaded = friend.load("victim", &victim.publish(open.key).unwrap(), 0).unwrap();
    let transfer = friend
        .prepare(true, "victim", [0, 0], &[here.part(0, 4096, here.key)], &[open.part(0, 4096, loaded)])
        .unwrap();
    let mut settings = Settings::default();
    for (key, value) in [("device", "cpu"), ("timeout", "20s")].iter().chain(way) {
        settings.set(key, value).unwrap();
    }
    let context = Context::builder().settings(settings).build().unwrap();
    let connection = Connection::from_bytes(&victim.connection()).unwrap();
    let (before, mut random) = (secret.content(), Random(1));
    for round in 0..60u32 {
        let (comm, mut end) = connection.dial(&context, "hostile", "another instance", 1 << 20).unwrap();
        for _ in 0..40 {
            let (tag, bytes) = hostile(&mut random, &secret);
            // Once the victim has ended the connection, no message goes.
            if end.send(&bytes, tag).is_err() {
                break;
            }
        }
        drop((end, comm));
        assert_eq!(run(&friend, &transfer, Some(b"friend")), Status::Success, "round {round}");
        assert!(open.content() == here.content());
        // A hostile agent may send notifications too.
        while !notes(&victim).contains(&("friend".into(), b"friend".to_vec())) {}
        assert!(secret.content() == before, "round {round}");
    }
    // What is no metadata of an agent.
    for round in 0..2000 {
        let mut bytes = if round % 2 == 0 { victim.connection() } else { victim.publish(open.key).unwrap() };
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(3) {
            0 => bytes[at] = random.next() as u8,
            1 => bytes.truncate(at),
            _ => bytes.insert(at, random.next() as u8),
        }
        let _ = friend.load_connection("stranger", &bytes);
        let _ = friend.load("victim", &bytes, 0);
    }
    assert_eq!(run(&friend, &transfer, None), Status::Success);
}

#[test]
fn a_notification_survives_attempts_to_connect_that_fail_and_is_given_up_where_nobody_listens() {
    let way = [("qp", "local"), ("timeout", "30s")];
    let [first, second] = [agent("first", &way), agent("second", &way)];
    let mut connection: serde_json::Value = serde_json::from_slice(&second.connection()).unwrap();
    let door: SocketAddr = connection["places"][0].as_str().unwrap().parse().unwrap();
    // Closes two connections, and passes on the third.
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    connection["places"] = serde_json::json!([between.local_addr().unwrap()]);
    let passes = std::thread::spawn(move || {
        for _ in 0..2 {
            drop(between.accept().unwrap());
        }
        let (near, far) = (between.accept().unwrap().0, TcpStream::connect(door).unwrap());
        let [mut a, mut b] = [near.try_clone().unwrap(), far.try_clone().unwrap()];
        let back = std::thread::spawn(move || std::io::copy(&mut b, &mut a));
        let _ = std::io::copy(&mut &near, &mut &far);
        let _ = far.shutdown(std::net::Shutdown::Write);
        let _ = back.join();
    });
    first.load_connection("second", &serde_json::to_vec(&connection).unwrap()).unwrap();
    first.notify("second", b"once").unwrap();
    assert_eq!(next_note(&second), ("first".into(), b"once".to_vec()));
    passes.join().unwrap();
    assert!(second.notifications().is_empty());
    // Nobody listens where the next one is said to be.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    connection["places"] = serde_json::json!([gone]);
    connection["instance"] = "another".into();
    first.load_connection("third", &serde_json::to_vec(&connection).unwrap()).unwrap();
    let third = Published {
        instance: "another".into(),
        key: 1,
        address: 4096,
        length: 8,
        memory: registrations::Memory::Host,
    };
    let loaded = first.load("third", &serde_json::to_vec(&third).unwrap(), 0).unwrap();
    let here = Memory::new(&first, 8, 1);
    let there = Described { address: 4096, length: 8, device: 0, registration: loaded };
    let transfer = first.prepare(true, "third", [0, 0], &[here.part(0, 8, here.key)], &[there]).unwrap();
    assert_eq!(run(&first, &transfer, None), Status::RemoteDisconnect);
}
