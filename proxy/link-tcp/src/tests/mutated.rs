//! Frames of real conversations, changed in every way that a peer could think of, for a link beside which a healthy one works.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::Arrival;
use pushgate_link::region::MAX_REGIONS;
use pushgate_tests::fuzz::{depth, fuzz};

use super::{GEOMETRY, Habits, Rig, WAY, Way, Xorshift, memory};
use crate::frame::{HEAD, Head, Kind, reseal};
use crate::inbox::{Inbox, Mirror, OwnRegion};
use crate::incoming::Incoming;
use crate::random::Random;
use crate::simulated::forge;

/// Frames that the test changes.
const FRAMES: u64 = if cfg!(debug_assertions) { 40_000 } else { 500_000 };
/// Streams of the link.
const STREAMS: usize = 2;
/// Bytes of the region, and of a guard beside it.
const REGION: usize = 1920;
const GUARD: usize = 512;

/// The frames of each stream of a conversation, and the region that they name.
struct Conversation {
    streams: [Vec<Vec<u8>>; STREAMS],
    key: u32,
    posts: bool,
}

/// What one end says in some hundred messages of all kinds.
fn conversation(posts: bool) -> Conversation {
    let rig = Rig::new(7, Some(Habits::PLAIN));
    let way = Way {
        streams: STREAMS as u32,
        part: 200,
        checksum: posts,
        posted_receives: posts,
        ahead: if posts { 2 } else { 0 },
    };
    rig.net.keep_what_is_sent();
    let mut pair = rig.pair(way);
    let (key, lkey) = (pair[1].key, pair[0].key);
    let mut random = Xorshift(99);
    let mut receives = 0;
    for n in 0..300u64 {
        if posts && receives < n + 3 {
            receives += pair[1].device.post_recv(key, 8 * (n % 100), 320, abi::PUSHGATE_ANY_TAG) as u64;
        }
        if posts && n % 7 == 3 {
            let put = Record { flags: Record::REGION, place: lkey, rkey: key, ..Record::new(Opcode::Put) };
            // SAFETY: a payload in a region is not read here.
            unsafe { pair[0].device.post_raw(put, std::ptr::null(), 300) };
        }
        pair[0].post(key, &mut random);
        rig.run(&mut pair, 30);
        while pair[1].device.try_recv().is_some() {
            pair[1].device.release(1);
        }
    }
    assert_eq!(pair[0].endpoint.status(), None);
    let streams = rig.net.sent(0).map(|mut bytes: Vec<u8>| {
        let mut frames = Vec::new();
        while let Some((head, _, n)) = Head::read(&bytes).expect("frames") {
            frames.push(bytes.drain(..n + head.payload as usize).collect::<Vec<_>>());
        }
        frames
    });
    assert!(streams[0].len() > 200 && streams[1].len() > 30, "{:?}", streams.each_ref().map(Vec::len));
    Conversation { streams, key, posts }
}

/// The receiving end of a link, and memory with guards.
struct Victim {
    mirror: Arc<SharedMemory>,
    region: Arc<SharedMemory>,
}

const CANARY: u64 = 0xc5c5_c5c5_c5c5_c5c5;

impl Victim {
    fn new() -> Self {
        let window = GEOMETRY.window_bytes();
        let victim =
            Victim { mirror: memory("mirror", window + GUARD), region: memory("region", REGION + 2 * GUARD) };
        victim.guards().for_each(|(m, at)| m.words(at, 1)[0].store(CANARY, Ordering::Relaxed));
        victim
    }

    /// Each word that nobody may write.
    fn guards(&self) -> impl Iterator<Item = (&SharedMemory, usize)> {
        let window = 64 << GEOMETRY.window_log;
        let mirror = (window..self.mirror.len()).step_by(8).map(|at| (&*self.mirror, at));
        let behind = GUARD + REGION..self.region.len();
        let region = (0..GUARD).chain(behind).step_by(8).map(|at| (&*self.region, at));
        mirror.chain(region)
    }

    fn is_whole(&self) -> bool {
        self.guards().all(|(m, at)| m.words(at, 1)[0].load(Ordering::Relaxed) == CANARY)
    }

    fn inbox(&self, conversation: &Conversation) -> Inbox {
        let mirror = Mirror::new(self.mirror.clone(), &GEOMETRY);
        let receives = conversation.posts.then(|| Inbox::receives_of(&GEOMETRY, 2));
        let mut inbox =
            Inbox::new(mirror, &GEOMETRY, conversation.posts.then_some((GEOMETRY.rx_log, 2)), receives);
        let address = self.region.as_ptr().as_ptr() as usize + GUARD;
        inbox.own.insert(conversation.key, OwnRegion { address, bytes: REGION as u64 });
        (0..8).for_each(|n| post(&mut inbox, conversation, n));
        inbox
    }
}

fn post(inbox: &mut Inbox, conversation: &Conversation, number: u64) {
    if conversation.posts {
        inbox.post(number, [conversation.key.into(), 8 * (number % 100), 320, abi::PUSHGATE_ANY_TAG.into()]);
    }
}

/// What becomes of a frame. `other`: another frame of the conversation.
fn change(frame: &[u8], other: &[u8], number: u32, random: &mut Random) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let at = random.below(frame.len() as u64) as usize;
    match random.below(9) {
        0 => frame[at] ^= 1 << random.below(8),
        1 => frame.truncate(at),
        2 => frame.extend(frame.clone()),
        3 => frame = [&frame[..at], &other[at.min(other.len())..]].concat(),
        4 => frame = other.to_vec(),
        5 => {
            let far = random.next() as u32;
            let length: u32 = random.of(&[
                0,
                1,
                63,
                64,
                65,
                264,
                384,
                1 << 19,
                (1 << 19) + 64,
                (1 << 19) + 65,
                u32::MAX,
                far,
            ]);
            frame[4..8].copy_from_slice(&length.to_le_bytes());
            reseal(&mut frame);
        }
        6 => {
            // A byte of header or record, with the right checksum.
            let at = random.below(96.min(frame.len() as u64)) as usize;
            frame[at] = random.of(&[0, 1, 0x7f, 0x80, 0xff, frame[at] ^ 1]);
            reseal(&mut frame);
        }
        _ => {
            let like = Head::read(&frame).ok().flatten().map(|(head, words, _)| (head, words));
            return forge(like, number, random);
        }
    }
    frame
}

/// Receives bytes on a stream. False when the link has broken.
fn feed(bytes: &[u8], incoming: &mut Incoming, inbox: &mut Inbox, random: &mut Random) -> bool {
    let mut at = 0;
    while at < bytes.len() {
        let (pieces, n) = incoming.pieces();
        let most = random.of(&[1, 50, 1000, usize::MAX]);
        let mut moved = 0;
        for piece in &pieces[..n] {
            let now = piece.bytes.min(most - moved).min(bytes.len() - at);
            // SAFETY: the link says that these bytes are to go there, as it says to a socket; the guards show whether that is so.
            unsafe { std::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), piece.address as *mut u8, now) };
            (at, moved) = (at + now, moved + now);
        }
        // SAFETY: as above.
        if unsafe { incoming.received(moved, inbox) }.is_err() {
            return false;
        }
    }
    true
}

#[test]
fn p7_p8_changed_frames_write_nothing_elsewhere_fill_no_memory_and_stop_no_other_link() {
    let conversations = [conversation(false), conversation(true)];
    let (victim, rig) = (Victim::new(), Rig::new(5, Some(Habits::PLAIN)));
    let mut healthy = rig.pair(WAY);
    let mut random = Random::new(2026, 0);
    let mut out = Xorshift(3);
    let (mut changed, mut cases, mut broken, mut taken) = (0u64, 0u64, 0u64, 0u64);
    let mut placed = 0u64;
    while changed < FRAMES {
        let conversation = &conversations[cases as usize % 2];
        let mut inbox = victim.inbox(conversation);
        let bound = inbox.footprint();
        let mut streams: [Incoming; STREAMS] = std::array::from_fn(Incoming::new);
        let (mut next, mut numbers) = ([0; STREAMS], [0u32; STREAMS]);
        let usual = random.of(&[1, 3, 10, 30]);
        cases += 1;
        for _ in 0..400 {
            // No stream is much ahead of the others: the receiver takes few messages that are not due.
            let message = |stream: usize| {
                let head = conversation.streams[stream].get(next[stream]).map(|frame| Head::read(frame));
                head.map_or(u64::MAX, |head| head.ok().flatten().map_or(0, |(head, ..)| head.message))
            };
            let stream = match random.one_in(30) {
                true => random.below(STREAMS as u64) as usize,
                false => (0..STREAMS).min_by_key(|stream| message(*stream)).expect("there are some"),
            };
            let frames = &conversation.streams[stream];
            let Some(frame) = frames.get(next[stream]) else { break };
            let other = &frames[random.below(frames.len() as u64) as usize];
            let mut bytes = frame.clone();
            if random.one_in(usual) {
                changed += 1;
                bytes = change(frame, other, numbers[stream], &mut random);
                // The frame itself may follow.
                next[stream] += random.below(2) as usize;
            } else {
                next[stream] += 1;
            }
            if bytes.len() >= 12 && !random.one_in(20) {
                // So that not every frame after one that was left out or put in is refused for its number.
                let right = Head::read(&bytes).is_ok();
                bytes[8..12].copy_from_slice(&numbers[stream].to_le_bytes());
                if right || random.one_in(4) {
                    reseal(&mut bytes);
                }
            }
            numbers[stream] += 1;
            if !feed(&bytes, &mut streams[stream], &mut inbox, &mut random) {
                broken += 1;
                break;
            }
            let mut words = [0; 8];
            loop {
                let arrival = inbox.take(&mut words);
                if arrival == Arrival::Empty {
                    break;
                }
                taken += 1;
                placed += (arrival == Arrival::Placed) as u64;
                let posts = inbox.posts;
                if inbox.open_receives() < 8 {
                    post(&mut inbox, conversation, posts);
                }
            }
            assert!(inbox.regions.len() <= MAX_REGIONS);
        }
        assert_eq!(inbox.footprint(), bound, "the rings are as long as before");
        if cases.is_multiple_of(64) {
            assert!(victim.is_whole(), "bytes beside mirror or region were written, within case {cases}");
        }
        // The other link of the same thread goes on.
        let key = healthy[1].key;
        healthy[0].post(key, &mut out);
        healthy.iter_mut().for_each(|end| end.poll());
        rig.pass(&mut healthy, 1_000);
        let [a, b] = &mut healthy;
        b.take(a);
    }
    for _ in 0..1_000 {
        rig.run(&mut healthy, 1);
        let [a, b] = &mut healthy;
        b.take(a);
    }
    assert!(victim.is_whole());
    assert_eq!(healthy[0].taken, healthy[0].sends.len());
    assert_eq!(healthy.each_ref().map(|end| end.endpoint.status()), [None; 2]);
    println!(
        "{changed} frames in {cases} links, {broken} broke; {taken} messages taken, {placed} placed; {} messages beside",
        healthy[0].sends.len()
    );
    // Not every frame was refused for its form.
    assert!(
        broken > cases / 4 && taken > cases && placed > cases / 8,
        "{broken} of {cases} links broke, {taken} messages"
    );
}

/// Gives the frames in these bytes the numbers and the checksums that are due, as far as they are frames.
fn sealed(bytes: &mut [u8]) {
    let (mut at, mut number) = (0, 0u32);
    while bytes.len() - at >= HEAD {
        let frame = &mut bytes[at..];
        frame[8..12].copy_from_slice(&number.to_le_bytes());
        reseal(frame);
        let length = u32::from_le_bytes(frame[4..8].try_into().expect("four bytes")) as usize;
        at += (HEAD + length).min(frame.len());
        number += 1;
    }
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_bytes_of_a_peer_make_a_link_over_tcp_panic_or_write_outside_of_its_memory() {
    let conversations = [conversation(false), conversation(true)];
    let victim = Victim::new();
    // On one stream, in the order of their messages.
    let frames = |conversation: &Conversation, n: usize| {
        let mut frames: Vec<_> = conversation.streams.iter().flatten().collect();
        frames.sort_by_key(|frame| match Head::read(frame) {
            Ok(Some((head, ..))) if head.kind == Kind::Data => head.message,
            _ => 0,
        });
        frames.into_iter().take(n).flatten().copied().collect::<Vec<u8>>()
    };
    // The first byte says whose frames they are, and whether their checksums are made right.
    let seeds: Vec<_> = (0..4)
        .flat_map(|how: u8| {
            let all = &conversations[how as usize & 1];
            [10, 100, 400].map(|n| [&[how][..], &frames(all, n)].concat())
        })
        .collect();
    let mut taken = 0;
    let mut target = |bytes: &[u8]| {
        let Some((how, bytes)) = bytes.split_first() else { return 0 };
        let (conversation, mut bytes) = (&conversations[*how as usize & 1], bytes.to_vec());
        if how & 2 == 0 {
            sealed(&mut bytes);
        }
        let (mut inbox, mut incoming) = (victim.inbox(conversation), Incoming::new(0));
        let bound = inbox.footprint();
        let whole = feed(&bytes, &mut incoming, &mut inbox, &mut Random::new(u64::from(how >> 2), 0));
        let (mut words, mut arrived) = ([0; 8], [0; 3]);
        loop {
            match inbox.take(&mut words) {
                Arrival::Record => arrived[0] += 1,
                Arrival::Placed => arrived[1] += 1,
                Arrival::Empty | Arrival::Torn => break,
            }
        }
        taken += arrived[0] + arrived[1];
        arrived[2] = inbox.frames as usize;
        assert_eq!(inbox.footprint(), bound, "the rings are as long as before");
        assert!(inbox.regions.len() <= MAX_REGIONS && victim.is_whole());
        let seen = [inbox.left, inbox.status != 0, inbox.asked != 0, inbox.answered != 0, whole];
        let counts = arrived.into_iter().chain([inbox.regions.len()]).fold(0, |all, n| all * 32 + depth(n));
        seen.into_iter().fold(counts, |all, flag| all * 2 + u64::from(flag))
    };
    seeds.iter().for_each(|seed| _ = target(seed));
    fuzz(&seeds, target);
    assert!(taken > 0, "no message was taken");
}
