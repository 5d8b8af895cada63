//! An engine dies after any one of its stores, and another one goes on over the same memory: every message arrives once, in
//! order, and what a device has taken is not written again.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::window::Window;
use pushgate_link::crash;
use pushgate_link::local::{LocalLink, Processes};
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::producer::Producer;
use pushgate_link::region::RegionMemory;

use crate::connect::{Connect, Incarnation, Patience};
use crate::endpoint::{Endpoint, QpOptions};
use crate::journal::session_bytes;

const UNIT: usize = abi::PUSHGATE_UNIT as usize;
/// Places of the region that PUTs go to: more than messages that can be under way.
const PLACES: u64 = 32;
/// What a device writes to a place once it has taken what was put there.
const USED: u8 = 0xee;
/// Messages that each rank sends. The last one announces itself.
const MESSAGES: u64 = 63;
/// Messages that a reader holds before it gives the oldest back.
const HOLDS: usize = 3;

fn geometry(rank: u32) -> Geometry {
    Geometry {
        window_log: 4,
        slots_log: 3,
        cq_log: 3,
        rx_log: 3,
        link_log: 3,
        landing_log: 4,
        signals: 2,
        rank,
    }
}

/// What message `n` is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Inline,
    Window,
    PutWithSignal,
    /// Announced by the message after it.
    Put,
    Signal,
}

fn kind(n: u64) -> Kind {
    match n % 7 {
        0 => Kind::Inline,
        1 | 5 => Kind::Window,
        2 => Kind::PutWithSignal,
        3 => Kind::Put,
        4 if n.is_multiple_of(2) => Kind::Signal,
        4 => Kind::Inline,
        _ => Kind::Window,
    }
}

fn content(n: u64) -> Vec<u8> {
    let length = match kind(n) {
        Kind::Inline => 1 + n as usize % 40,
        Kind::Window => 1 + n as usize * 37 % 200,
        Kind::PutWithSignal | Kind::Put => UNIT,
        Kind::Signal => 0,
    };
    (0..length).map(|i| (n as usize * 31 + i) as u8 & 0x7f).collect()
}

/// What message `n` has where it goes to a buffer.
fn in_buffer(n: u64) -> Vec<u8> {
    let mut bytes = content(n);
    bytes.truncate(UNIT);
    if bytes.is_empty() { vec![n as u8 & 0x7f] } else { bytes }
}

/// Tags of the messages, and of the receives in the order in which they are posted. Messages take receives out of their order, by four
/// each; a few receives stay open while many younger ones are taken.
static TAGS: LazyLock<[Vec<u32>; 2]> = LazyLock::new(|| {
    let late = [(0, 38), (1, 7), (21, 59)];
    let (mut messages, mut receives) = (vec![0; MESSAGES as usize], vec![0; MESSAGES as usize]);
    for (i, (receive, message)) in late.into_iter().enumerate() {
        (receives[receive], messages[message]) = (100 + i as u32, 100 + i as u32);
    }
    let mut places: Vec<usize> = (0..receives.len()).filter(|i| receives[*i] == 0).collect();
    let all: Vec<usize> = (0..messages.len()).filter(|i| messages[*i] == 0).collect();
    places.chunks_mut(4).for_each(|four| four.rotate_left(1));
    for (n, (message, receive)) in all.into_iter().zip(places).enumerate() {
        // The last of four receives has the tag of its own; the others have one.
        let tag = 1 + (n % 4 == 3) as u32;
        (messages[message], receives[receive]) = (tag, tag);
    }
    [messages, receives]
});

/// Memory of one rank, which outlives engines.
struct Rank {
    rank: u32,
    /// SENDs go to buffers of posted receives.
    posts: bool,
    receives: u64,
    window: Mapped,
    work: Mapped,
    control: Mapped,
    link: Mapped,
    session: Mapped,
    region: Mapped,
    mailbox: Mailbox,
    device: Producer,
    posted: u64,
    completed: u64,
    /// Sequence numbers of the messages that were taken, less one; records that are held, with their contents.
    taken: u64,
    held: VecDeque<(u64, Vec<u8>, usize)>,
}

fn segment(kind: Segment, g: &Geometry) -> Mapped {
    // A header is written through a window.
    let memory = pushgate_driver_shim::memory::SharedMemory::builder("resuming-test", g.bytes(kind));
    let memory = Arc::new(memory.create().unwrap());
    write_header(&memory, kind, g).unwrap();
    (memory as Arc<dyn Window>).into()
}

impl Rank {
    fn new(rank: u32, posts: bool) -> Self {
        let g = geometry(rank);
        let [work, control, link] = [Segment::Work, Segment::Control, Segment::Link].map(|k| segment(k, &g));
        let window = Mapped::heap(g.window_bytes());
        let device = Producer::new(g, &work, &control, &window, None);
        let region = Mapped::heap(PLACES as usize * UNIT);
        (0..PLACES).for_each(|place| fill(&region, place));
        Rank {
            rank,
            posts,
            receives: 0,
            window,
            work,
            control,
            link,
            session: Mapped::heap(session_bytes(posts.then_some(g.rx_log))),
            region,
            mailbox: Mailbox::default(),
            device,
            posted: 0,
            completed: 0,
            taken: 0,
            held: VecDeque::new(),
        }
    }

    fn region_memory(&self) -> RegionMemory {
        RegionMemory::Host { address: self.region.address(), keep: Some(Arc::new(self.region.clone())) }
    }

    /// An engine's end, over this link segment of its own.
    fn endpoint(&self, peer: &Rank, own: &Mapped) -> Endpoint {
        let [g, theirs] = [self.rank, peer.rank].map(geometry);
        let processes = Processes { peer: None, in_program: false };
        let window = peer.window.clone();
        let link = LocalLink::new(own, &g, &peer.link, &theirs, window, (None, None), processes);
        let options = QpOptions {
            peer: peer.rank,
            roles: false,
            posted_receives: self.posts,
            reader_flushes: false,
            stuck_ns: u64::MAX / 2,
            in_place_share: 64,
            slow_ns: 0,
            ungated: false,
            key_seed: 9,
        };
        Endpoint::new(&self.work, &self.control, g, theirs, Box::new(link), options).unwrap()
    }

    fn ends(&self, peer: &Rank) -> [Incarnation; 2] {
        [self.rank, peer.rank].map(|rank| Incarnation::new(rank as u64 + 5).unwrap())
    }

    fn way_to(peer: &Rank) -> SendFrame {
        let mailbox = peer.mailbox.clone();
        Box::new(move |frame| _ = mailbox.put(frame))
    }

    fn begin(&self, peer: &Rank) -> (Endpoint, u32) {
        let [own, theirs] = self.ends(peer);
        let connect = Connect::joined(own, theirs, 0).unwrap();
        let patience = Patience::within(Duration::from_secs(100), 1);
        let mailbox = self.mailbox.clone();
        let endpoint = self.endpoint(peer, &self.link);
        let mut endpoint = endpoint
            .with_recovery(connect, patience, mailbox, Rank::way_to(peer))
            .with_journal(&self.session);
        let key = endpoint.add_region(self.region_memory(), self.region.bytes() as u64).unwrap();
        (endpoint, key)
    }

    /// The next engine's end.
    fn resume(&self, peer: &Rank, key: u32, now: u64) -> Endpoint {
        let fresh = segment(Segment::Link, &geometry(self.rank));
        let patience = Patience::within(Duration::from_secs(100), 1);
        let (ends, mailbox) = (self.ends(peer), self.mailbox.clone());
        let endpoint = self.endpoint(peer, &fresh);
        let endpoint = endpoint.resumed(&self.session, ends, patience, mailbox, Rank::way_to(peer));
        let mut endpoint = endpoint.unwrap();
        endpoint.set_time(now);
        assert!(endpoint.restore_region(key, self.region_memory(), self.region.bytes() as u64));
        endpoint.begin_again();
        endpoint
    }

    /// Posts the next message if there is credit.
    fn post(&mut self, key: u32) {
        let n = self.posted;
        if n >= MESSAGES {
            return;
        }
        let bytes = if self.posts { in_buffer(n) } else { content(n) };
        let flags = if n.is_multiple_of(3) { Record::SIGNALED } else { 0 };
        let record = match kind(n) {
            Kind::Window | Kind::PutWithSignal | Kind::Put if self.posts => {
                Record { flags, ..Record::new(Opcode::Send) }
            }
            Kind::Inline | Kind::Signal if self.posts => {
                Record { flags: flags | Record::INLINE, ..Record::new(Opcode::Send) }
            }
            Kind::Inline => Record { flags: flags | Record::INLINE, ..Record::new(Opcode::Send) },
            Kind::Window => Record { flags, ..Record::new(Opcode::Send) },
            Kind::PutWithSignal => Record {
                flags: flags | Record::WITH_SIGNAL,
                rkey: key,
                remote_offset: n % PLACES * UNIT as u64,
                signal: 0,
                signal_value: n + 1,
                ..Record::new(Opcode::Put)
            },
            Kind::Put => Record {
                flags,
                rkey: key,
                remote_offset: n % PLACES * UNIT as u64,
                ..Record::new(Opcode::Put)
            },
            Kind::Signal => Record { flags, signal: 1, signal_value: n + 1, ..Record::new(Opcode::Signal) },
        };
        let tag = if self.posts { TAGS[0][n as usize] } else { n as u32 };
        let record = Record { id: n as u32, tag, ..record };
        self.posted += self.device.post(record, &bytes) as u64;
    }

    /// Takes what has arrived, and checks it. `peer_window` is where payload that lies in place is.
    fn take(&mut self, peer: &Rank) {
        while let Some(c) = self.device.poll_cq() {
            assert_eq!((c.wr_id as u64, c.status), (self.completed, abi::PUSHGATE_OK as u8));
            self.completed += 3;
        }
        if self.posts {
            return self.take_in_buffers();
        }
        let signals = [self.device.signal(0), self.device.signal(1)];
        loop {
            let n = self.taken;
            match kind(n) {
                Kind::Inline | Kind::Window => {
                    let Some(r) = self.device.try_recv() else { return };
                    assert_eq!(
                        r.tag as u64, n,
                        "rank {}: a message was lost, doubled or passed over",
                        self.rank
                    );
                    let expected = content(n);
                    assert_eq!(r.length as usize, expected.len());
                    let at = match r.flags {
                        f if f & Record::INLINE != 0 => r.inline.as_ptr() as usize,
                        f if f & Record::LANDING != 0 => {
                            let g = geometry(self.rank);
                            self.control.address() + g.control_landing_offset() + r.place as usize * UNIT
                        }
                        _ => peer.window.address() + r.place as usize * UNIT,
                    };
                    assert_eq!(read(at, expected.len()), expected);
                    let stays = if r.flags & Record::INLINE == 0 { at } else { 0 };
                    self.held.push_back((n, expected, stays));
                    if self.held.len() > HOLDS {
                        self.check_held();
                        self.held.pop_front();
                        self.device.release(1);
                    }
                }
                Kind::PutWithSignal if signals[0] > n => self.use_up(n),
                Kind::Signal if signals[1] > n => {}
                // The message after it says when it is there.
                Kind::Put => {}
                _ => return,
            }
            if matches!(kind(n), Kind::Inline | Kind::Signal) && n > 0 && kind(n - 1) == Kind::Put {
                self.use_up(n - 1);
            }
            self.taken += 1;
        }
    }

    /// Posts receives, as many as may be.
    fn post_receives(&mut self, key: u32) {
        while let Some(tag) = TAGS[1].get(self.receives as usize)
            && self.device.post_recv(key, self.place_of(self.receives) * UNIT as u64, UNIT as u32, *tag)
        {
            self.receives += 1;
        }
    }

    /// The place of a receive's buffer: those that are open for long have their own.
    fn place_of(&self, receive: u64) -> u64 {
        match TAGS[1][receive as usize] {
            late @ 100.. => PLACES - 1 - (late as u64 - 100),
            _ => receive % (PLACES - 3),
        }
    }

    fn take_in_buffers(&mut self) {
        let [messages, receives] = &*TAGS;
        while let Some(r) = self.device.try_recv() {
            let n = self.taken;
            assert_eq!((r.tag, r.flags), (messages[n as usize], Record::BUFFER), "message {n}");
            assert_eq!(receives[r.place as usize], r.tag, "message {n} took receive {}", r.place);
            let place = self.place_of(r.place as u64);
            let at = self.region.address() + place as usize * UNIT;
            let expected = in_buffer(n);
            assert_eq!(r.length as usize, expected.len());
            assert_eq!(read(at, expected.len()), expected, "message {n}");
            fill(&self.region, place);
            self.taken += 1;
            self.held.push_back((n, Vec::new(), 0));
            if self.held.len() > HOLDS {
                self.held.pop_front();
                self.device.release(1);
            }
        }
    }

    /// What the device holds stays as it was.
    fn check_held(&self) {
        for (n, expected, at) in &self.held {
            assert!(*at == 0 || read(*at, expected.len()) == *expected, "message {n} was overwritten");
        }
    }

    /// Takes what was put to a place, which the device writes from now on.
    fn use_up(&mut self, n: u64) {
        let at = self.region.address() + (n % PLACES) as usize * UNIT;
        assert_eq!(read(at, UNIT), content(n), "message {n}");
        fill(&self.region, n % PLACES);
    }
}

fn read(at: usize, length: usize) -> Vec<u8> {
    // SAFETY: in memory of this test, and nobody else runs.
    unsafe { std::slice::from_raw_parts(at as *const u8, length) }.to_vec()
}

fn fill(region: &Mapped, place: u64) {
    // SAFETY: within the region, which is this test's; nobody else runs.
    unsafe { ((region.address() + place as usize * UNIT) as *mut u8).write_bytes(USED, UNIT) };
}

/// Which engines die.
#[derive(Clone, Copy, PartialEq)]
enum Dies {
    /// Rank 0's.
    One,
    /// Both ranks' at once: one process drove them.
    Both,
}

/// Both ranks send [`MESSAGES`], to buffers of posted receives if `posts`. Engines die after store number `at`, and once more a
/// while later. False if none died.
fn run(at: u64, dies: Dies, posts: bool) -> bool {
    let mut ranks = [0, 1].map(|rank| Rank::new(rank, posts));
    let [(a, key_a), (b, key_b)] = [ranks[0].begin(&ranks[1]), ranks[1].begin(&ranks[0])];
    let (mut ends, keys) = ([a, b], [key_a, key_b]);
    let (mut left, mut deaths, mut now) = (at, 0, 0);
    for round in 0.. {
        assert!(
            round < 40_000,
            "store {at}: nothing moves: {:?}",
            ranks.each_ref().map(|r| (r.posted, r.taken))
        );
        now += 1_000_000;
        for i in [0, 1] {
            if posts {
                ranks[i].post_receives(keys[i]);
            }
            for _ in 0..3 {
                ranks[i].post(keys[1 - i]);
            }
        }
        for i in [0, 1] {
            let end = &mut ends[i];
            end.set_time(now);
            let mut step = || {
                end.control();
                end.poll(&mut None);
            };
            let dead = match i {
                0 if deaths < 2 => crash::within(&mut left, step),
                _ => {
                    step();
                    false
                }
            };
            assert!(end.status().is_none(), "store {at}: {:?}", end.status());
            if dead {
                deaths += 1;
                left = at * 13 % 97;
                // Meanwhile devices and the peer's engine go on by what they were told.
                for _ in 0..3 {
                    for i in [0, 1] {
                        if posts {
                            ranks[i].post_receives(keys[i]);
                        }
                        (0..8).for_each(|_| ranks[i].post(keys[1 - i]));
                    }
                    if dies == Dies::One {
                        ends[1].poll(&mut None);
                    }
                    let [one, other] = &mut ranks;
                    one.take(other);
                    other.take(one);
                }
                let [one, other] = &ranks;
                ends[0] = one.resume(other, keys[0], now);
                if dies == Dies::Both {
                    ends[1] = other.resume(one, keys[1], now);
                }
            }
            let [one, other] = &mut ranks;
            one.take(other);
            other.take(one);
        }
        if ranks.iter().all(|r| r.taken == MESSAGES && r.device.retired() == r.device.slots()) {
            break;
        }
        // The last few are given back by a reader that has nothing else to do.
        for r in &mut ranks {
            if r.taken == MESSAGES && !r.held.is_empty() {
                r.held.clear();
                let held = r.device.rx_head() - r.device.released();
                r.device.release(held);
            }
        }
    }
    for r in &ranks {
        assert_eq!(r.completed, MESSAGES.div_ceil(3) * 3, "a completion for each that asked for one");
        let used = (0..PLACES).all(|p| read(r.region.address() + p as usize * UNIT, UNIT) == [USED; UNIT]);
        assert!(used, "store {at}: a copy was made again after its signal");
        assert!(r.device.delivered() == r.device.slots());
    }
    deaths > 0
}

#[test]
fn p6_an_engine_that_dies_after_any_store_is_gone_on_with_and_every_message_arrives_once() {
    let died = (0..).take_while(|at| run(*at, Dies::One, false)).count();
    assert!(died > 1000, "{died} stores");
}

#[test]
fn p6_two_engines_that_die_together_after_any_store_are_gone_on_with() {
    let died = (0..).take_while(|at| run(*at, Dies::Both, false)).count();
    assert!(died > 1000, "{died} stores");
}

#[test]
fn p6_an_engine_with_posted_receives_that_dies_after_any_store_is_gone_on_with() {
    for (dies, step) in [(Dies::One, 1), (Dies::Both, 3)] {
        let died = (0..).step_by(step).take_while(|at| run(*at, dies, true)).count();
        assert!(died * step > 1000, "{died} stores");
    }
}

/// splitmix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[test]
fn p8_whatever_a_program_writes_to_its_own_memory_the_next_engine_refuses_or_goes_on() {
    let (mut refused, mut ended, mut went_on) = (0, 0, 0);
    for seed in 0..3000u64 {
        let mut state = seed;
        let posts = seed % 2 == 1;
        let mut ranks = [0, 1].map(|rank| Rank::new(rank, posts));
        let (mut a, key) = ranks[0].begin(&ranks[1]);
        let (mut b, other_key) = ranks[1].begin(&ranks[0]);
        let mut now = 0;
        for _ in 0..draw(&mut state) % 12 {
            now += 1_000_000;
            if posts {
                ranks[0].post_receives(key);
                ranks[1].post_receives(other_key);
            }
            ranks[0].post(other_key);
            ranks[1].post(key);
            for end in [&mut a, &mut b] {
                end.set_time(now);
                end.poll(&mut None);
            }
            let [one, other] = &mut ranks;
            one.take(other);
            other.take(one);
        }
        drop(a);
        let g = geometry(0);
        let places = [
            (&ranks[0].session, 0, if posts { 72 } else { 40 }),
            (&ranks[0].control, g.control_rx_offset(), 8 << g.rx_log),
            (&ranks[0].control, abi::PUSHGATE_CTL_CREDIT as usize, 3),
            (&ranks[0].work, abi::PUSHGATE_WORK_CONSUMED as usize, 1),
            (&ranks[0].work, abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log),
            (&ranks[0].work, g.work_receives_offset(), 4 << g.rx_log),
        ];
        for _ in 0..1 + draw(&mut state) % 3 {
            let (memory, offset, words) = places[draw(&mut state) as usize % places.len()];
            let words = Words::writable(memory, offset, words);
            let word = &words[draw(&mut state) as usize % words.len()];
            let old = word.load(Ordering::Relaxed);
            let new = match draw(&mut state) % 5 {
                0 => draw(&mut state),
                1 => old ^ 1 << (draw(&mut state) % 64),
                2 => old.wrapping_add(1 + draw(&mut state) % 9),
                3 => old.wrapping_sub(1 + draw(&mut state) % 9),
                _ => u64::MAX >> (draw(&mut state) % 64),
            };
            word.store(new, Ordering::Relaxed);
        }
        let fresh = segment(Segment::Link, &g);
        let patience = Patience::within(Duration::from_secs(100), 1);
        let (ends, mailbox) = (ranks[0].ends(&ranks[1]), ranks[0].mailbox.clone());
        let endpoint = ranks[0].endpoint(&ranks[1], &fresh);
        let way = Rank::way_to(&ranks[1]);
        let Ok(mut a) = endpoint.resumed(&ranks[0].session, ends, patience, mailbox, way) else {
            refused += 1;
            continue;
        };
        a.set_time(now);
        a.restore_region(key, ranks[0].region_memory(), ranks[0].region.bytes() as u64);
        a.begin_again();
        for _ in 0..40 {
            now += 1_000_000;
            for end in [&mut a, &mut b] {
                end.set_time(now);
                end.control();
                end.poll(&mut None);
            }
        }
        match a.status().or(b.status()) {
            Some(_) => ended += 1,
            None => went_on += 1,
        }
    }
    println!("{refused} refused, {ended} ended, {went_on} went on");
    assert!(refused > 100 && ended > 100 && went_on > 100);
}
