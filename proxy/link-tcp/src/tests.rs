//! Two ends of a link over streams of memory, which misbehave as a seed says, and one end whose peer is the test.

mod mutated;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pushgate_core::session::count_word;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;
use pushgate_link::receives::MOST_AHEAD;
use pushgate_link::region::RegionMemory;
use pushgate_link::{Arrival, Link, Receives};
use pushgate_test_ends::{
    ABORTED, End, GEOMETRY, Random as Xorshift, STRIPES, check_signal, ends, memory, recovering, words,
};

use super::frame::{Head, Kind, MOST_HEAD};
use super::host::LINGER;
use super::inbox::{Inbox, Mirror};
use super::incoming::{Incoming, Takes, sum_of};
use super::outgoing::{Leaving, Outgoing};
use super::setup::{Config, TcpOpening};
use super::simulated::{Habits, Net};
use super::tcp_link::PASSES;
use super::wire::{Piece, Wire};
use crate::random::Random;

/// How the ends of a test are joined.
#[derive(Clone, Copy)]
struct Way {
    streams: u32,
    /// Bytes of a part.
    part: usize,
    checksum: bool,
    posted_receives: bool,
    ahead: u32,
}

const WAY: Way = Way { streams: 1, part: 1 << 16, checksum: false, posted_receives: false, ahead: 0 };

/// Both links, and the window and the mirror of each end.
type Links = ([Box<dyn Link>; 2], [Arc<SharedMemory>; 2], [Arc<SharedMemory>; 2]);

/// Streams, and the time of both ends.
struct Rig {
    net: Net,
    time: Arc<AtomicU64>,
}

impl Rig {
    fn new(seed: u64, habits: Option<Habits>) -> Self {
        Rig { net: Net::new(Random::new(seed, 0), habits), time: Arc::default() }
    }

    fn links(&self, way: Way) -> Links {
        let geometry = |rank| Geometry { rank, ..GEOMETRY };
        let windows = [0, 1].map(|rank| memory("window", geometry(rank).window_bytes()));
        let config = Config {
            streams: way.streams,
            checksum: way.checksum,
            posted_receives: way.posted_receives,
            ahead: way.ahead,
            thrifty: true,
            beat: 10_000_000,
        };
        let openings = [0, 1].map(|rank: u32| {
            let (window, meeting): (Arc<dyn Window>, _) =
                (windows[rank as usize].clone(), self.net.meeting(rank as usize, &self.time));
            let opening = TcpOpening::new(config.clone(), geometry(rank), window, meeting).unwrap();
            opening.recovering().in_parts(way.part)
        });
        let [first, second] = [openings[0].offer(), openings[1].offer()];
        let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
        let [a, b] = openings;
        let a = a.prepare(1, &second, &mut allocate).unwrap();
        let b = b.prepare(0, &first, &mut allocate).unwrap();
        let mirrors = [a.mirror().clone(), b.mirror().clone()];
        let links = [a, b].map(|prepared| Box::new(prepared.join().0) as Box<dyn Link>);
        (links, windows, mirrors)
    }

    /// Both ends, which know each other's regions.
    fn pair(&self, way: Way) -> [End; 2] {
        let (links, windows, mirrors) = self.links(way);
        let pass = || _ = self.time.fetch_add(1_000, Ordering::Relaxed);
        let mut pair = ends(links.into(), windows, mirrors, way.posted_receives, pass);
        self.pass(&mut pair, 0);
        // Until both know the other's region.
        self.run(&mut pair, 400);
        pair
    }

    /// Time goes on, nanoseconds.
    fn pass(&self, ends: &mut [End; 2], time: u64) {
        let now = self.time.fetch_add(time, Ordering::Relaxed) + time;
        ends.iter_mut().for_each(|end| end.now = now);
    }

    /// Both ends act for `us` microseconds.
    fn run(&self, ends: &mut [End; 2], us: u64) {
        for _ in 0..us {
            self.pass(ends, 1_000);
            ends.iter_mut().for_each(End::poll);
        }
        assert_eq!(self.net.wrong(), None);
    }
}

/// One run. `seed` decides what is posted, which end has its turn, how the streams behave, and with `breaks` where they break.
/// Returns how many links took the place of one that broke.
fn any_order(seed: u64, way: Way, breaks: bool) -> u64 {
    let rig = Rig::new(seed, None);
    let mut random = Xorshift(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut ends = rig.pair(way);
    if breaks {
        ends = recovering(ends);
    }
    let keys = [ends[0].key, ends[1].key];
    let mut puts: [[Vec<(u64, usize)>; STRIPES]; 2] = Default::default();
    let mut messages = 60;
    let mut quiet = 0;
    while quiet < 3_000 {
        let (i, j) = if random.next().is_multiple_of(2) { (0, 1) } else { (1, 0) };
        quiet += 1;
        rig.pass(&mut ends, if breaks { 20_000 } else { 500 });
        if breaks {
            ends.iter_mut().for_each(|end| end.endpoint.control());
            match random.next() % 100 {
                0 if messages > 0 => rig.net.break_behind(i, random.next() as u64 % 2_000),
                1 if messages > 0 => rig.net.refuse(1),
                _ => {}
            }
        }
        match random.next() % 8 {
            0 if messages > 0 => {
                let (before, last) = (ends[i].posted, ends[i].last);
                let state = random.0;
                ends[i].post(keys[j], &mut random);
                if ends[i].posted > before {
                    (messages, quiet) = (messages - 1, 0);
                    let words = words(state);
                    let put = (0..STRIPES).find(|s| ends[i].last[*s] != last[*s]);
                    put.into_iter().for_each(|s| puts[i][s].push((before + 1, words)));
                }
            }
            _ => ends[i].poll(),
        }
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
        check_signal(a, &puts[1]);
        check_signal(b, &puts[0]);
        assert_eq!(rig.net.wrong(), None, "seed {seed}");
    }
    // Far longer than an attempt to make a link may take, and the pause after the attempt.
    for _ in 0..200_000 {
        rig.pass(&mut ends, 100_000);
        ends.iter_mut().for_each(|end| {
            end.endpoint.control();
            end.poll();
        });
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
        if ends.iter().all(|end| end.taken == end.sends.len() && end.device.retired() == end.posted) {
            break;
        }
    }
    for i in [0, 1] {
        let (end, peer) = (&ends[i], &ends[1 - i]);
        assert_eq!((end.endpoint.status(), end.device.status()), (None, None), "seed {seed}");
        assert_eq!(end.taken, end.sends.len(), "seed {seed}: {:?}", end.endpoint.counters());
        // The bytes of overlapping PUTs are those of the later one.
        for (stripe, puts) in puts[i].iter().enumerate() {
            for (at, word) in peer.stripe(stripe).iter().enumerate() {
                let last = puts.iter().rev().find(|(_, n)| at < *n).map_or(0, |p| p.0);
                assert_eq!(*word, last, "seed {seed}: stripe {stripe}, word {at} at the end");
            }
        }
    }
    let links = ends.iter().map(|end| end.endpoint.counters().recovered).sum();
    drop(ends);
    assert_eq!(rig.net.wrong(), None, "seed {seed}");
    links
}

/// Seeds of a test.
fn seeds() -> std::ops::Range<u64> {
    1..if cfg!(debug_assertions) { 12 } else { 120 }
}

#[test]
fn p3_p6_messages_arrive_whole_and_in_order_over_one_two_and_four_streams() {
    for seed in seeds() {
        let streams = [1, 2, 4][seed as usize % 3];
        let part = [16, 64, 200, 1 << 16][seed as usize / 3 % 4];
        any_order(seed, Way { streams, part, checksum: seed % 2 == 0, ..WAY }, false);
    }
}

#[test]
fn p5_p6_streams_that_break_at_any_byte_and_are_replaced_lose_double_and_reorder_nothing() {
    let mut links = 0;
    for seed in seeds() {
        let streams = [1, 2, 4][seed as usize % 3];
        let part = [16, 64, 200, 1 << 16][seed as usize / 3 % 4];
        links += any_order(seed, Way { streams, part, checksum: seed % 2 == 0, ..WAY }, true);
    }
    assert!(links > 10, "{links} links took the place of one that broke");
}

/// A PUT of as many bytes as the region has, whose words are all `number`.
fn put(from: &mut End, key: u32, number: u64) {
    let payload: Vec<u8> = std::iter::repeat_n(number.to_ne_bytes(), 40).flatten().collect();
    let put =
        Record { flags: Record::WITH_SIGNAL, rkey: key, signal_value: number, ..Record::new(Opcode::Put) };
    assert!(from.device.post(put, &payload));
}

#[test]
fn p5_p8_a_region_stays_while_a_frame_lands_in_it_and_while_the_wire_reads_out_of_it() {
    // 9 bytes in each call, so that a frame of 320 bytes lands over many passes.
    let rig = Rig::new(1, Some(Habits { most: 9, ..Habits::PLAIN }));
    let mut pair = rig.pair(WAY);
    let key = pair[1].key;
    put(&mut pair[0], key, 7);
    let (mut landing, mut looks) = (0, 0);
    while pair[1].device.signal(0) != 7 {
        rig.run(&mut pair, 1);
        let words = pair[1].stripe(0);
        if words[0] == 7 && words[39] != 7 {
            assert!(!pair[1].endpoint.remove_region(key), "a region is removed while a frame lands in it");
            landing += 1;
        }
        looks += 1;
        assert!(looks < 10_000);
    }
    assert!(landing > 3, "{landing} looks found the frame on its way");
    assert!(pair[1].endpoint.remove_region(key));

    // The peer has the message long before the wire has settled.
    let rig = Rig::new(2, Some(Habits { late: true, usual: 1_000_000, ..Habits::PLAIN }));
    let mut pair = rig.pair(WAY);
    let (lkey, rkey) = (pair[0].key, pair[1].key);
    let put = Record {
        flags: Record::REGION | Record::WITH_SIGNAL,
        place: lkey,
        rkey,
        signal_value: 3,
        ..Record::new(Opcode::Put)
    };
    // SAFETY: a payload in a region is not read here.
    assert!(unsafe { pair[0].device.post_raw(put, std::ptr::null(), 320) }.is_some());
    let mut held = 0;
    for _ in 0..10_000 {
        rig.run(&mut pair, 1);
        if pair[1].device.signal(0) == 3 && !pair[0].endpoint.remove_region(lkey) {
            held += 1;
        }
    }
    assert!(held > 10, "{held} passes in which only the wire had the region");
    assert!(!pair[0].endpoint.region_in_use(lkey), "it has settled");
}

#[test]
fn an_end_owes_itself_turns_until_the_wire_has_taken_all_of_its_message() {
    let rig = Rig::new(1, Some(Habits { most: 9, ..Habits::PLAIN }));
    let mut pair = rig.pair(WAY);
    let key = pair[1].key;
    assert!(!pair[0].endpoint.owes());
    put(&mut pair[0], key, 7);
    let turn = |end: usize, pair: &mut [End; 2]| {
        rig.pass(pair, 1_000);
        pair[end].poll();
    };
    let mut turns = 1;
    turn(0, &mut pair);
    while pair[0].endpoint.owes() {
        turn(0, &mut pair);
        turns += 1;
        assert!(turns < 1_000, "the wire takes nothing more");
    }
    assert!(turns > 3, "320 bytes went in {turns} turns of few bytes each");
    // This end has done its part: the other one finds all of the message without it.
    let arrived = (0..1_000).any(|_| {
        turn(1, &mut pair);
        pair[1].device.signal(0) == 7
    });
    assert!(arrived, "something of the message was not sent");
}

#[test]
fn p5_a_slot_is_given_back_when_the_wire_reads_it_no_more_though_the_peer_has_its_message() {
    let rig = Rig::new(3, Some(Habits { late: true, usual: 100_000, ..Habits::PLAIN }));
    let mut pair = rig.pair(WAY);
    // Each place of the window is written many times; `run` asks the streams whether memory changed that they still read.
    for number in 1..=200u64 {
        let payload = [number as u8; 300];
        while !pair[0].device.post(Record::new(Opcode::Send), &payload) {
            rig.run(&mut pair, 1);
            let got = pair[1].device.try_recv().is_some();
            pair[1].device.release(got as u64);
        }
    }
    assert_eq!(pair[0].device.status(), None);
}

#[test]
fn p6_a_receive_whose_tag_comes_late_is_found_when_its_ring_went_round_many_times() {
    let rig = Rig::new(4, Some(Habits::PLAIN));
    let mut pair = rig.pair(Way { posted_receives: true, ..WAY });
    let (lkey, key) = (pair[0].key, pair[1].key);
    assert!(pair[1].device.post_recv(key, 0, 64, 1000));
    for tag in 0..40u32 {
        assert!(pair[1].device.post_recv(key, 64, 64, tag));
        rig.run(&mut pair, 40);
        assert!(pair[0].device.post(Record { tag, ..Record::new(Opcode::Send) }, &[tag as u8; 64]));
        rig.run(&mut pair, 40);
        assert_eq!(pair[1].device.try_recv().map(|m| m.tag), Some(tag));
        pair[1].device.release(1);
    }
    let late = Record { flags: Record::REGION, place: lkey, tag: 1000, ..Record::new(Opcode::Send) };
    // SAFETY: a payload in a region is not read here.
    assert!(unsafe { pair[0].device.post_raw(late, std::ptr::null(), 64) }.is_some());
    rig.run(&mut pair, 80);
    assert_eq!(pair[1].device.try_recv().map(|m| m.tag), Some(1000));
    assert_eq!(pair.map(|end| end.endpoint.status()), [None, None]);
}

/// Passes from the post of a receive until the message that waits for it has arrived. `others`: the peer knows of a receive of another
/// tag.
fn passes_until_it_is_known(others: bool) -> u32 {
    let rig = Rig::new(4, Some(Habits::PLAIN));
    let mut pair = rig.pair(Way { posted_receives: true, ..WAY });
    let key = pair[1].key;
    if others {
        assert!(pair[1].device.post_recv(key, 0, 64, 1000));
    }
    assert!(pair[0].device.post(Record { tag: 7, ..Record::new(Opcode::Send) }, &[7; 64]));
    rig.run(&mut pair, 40);
    assert!(pair[1].device.post_recv(key, 64, 64, 7));
    (1..100)
        .find(|_| {
            rig.run(&mut pair, 1);
            pair[1].device.try_recv().is_some()
        })
        .expect("it arrives")
}

#[test]
fn news_of_a_posted_receive_waits_a_few_passes_unless_the_peer_knows_of_no_receive() {
    let [alone, beside] = [false, true].map(passes_until_it_is_known);
    assert!(alone < beside && beside <= alone + PASSES + 1, "{alone} passes alone, {beside} beside another");
}

/// Two ends. The first may send `most` short messages before the second has posted receives for them.
fn ahead(rig: &Rig, most: u32) -> [End; 2] {
    let mut pair = rig.pair(Way { posted_receives: true, ahead: most, ..WAY });
    // Until the first one has heard what the second grants.
    rig.run(&mut pair, 200);
    pair
}

fn send(end: &mut End, tag: u32, bytes: &[u8]) {
    assert!(end.device.post(Record { tag, ..Record::new(Opcode::Send) }, bytes));
}

#[test]
fn p4_p6_short_messages_leave_before_their_receives_up_to_a_number_and_meet_them_in_order() {
    let rig = Rig::new(5, Some(Habits::PLAIN));
    let mut pair = ahead(&rig, 2);
    for n in 1..=3 {
        send(&mut pair[0], 7, &[n; 64]);
    }
    rig.run(&mut pair, 200);
    let released = |pair: &[End; 2]| pair[0].endpoint.counters().released;
    assert_eq!((released(&pair), pair[1].device.try_recv().is_none()), (2, true), "the third one waits");
    let key = pair[1].key;
    for n in 0..3 {
        assert!(pair[1].device.post_recv(key, 64 * n, 64, 7));
    }
    rig.run(&mut pair, 400);
    let address = pair[1].region.as_ptr().as_ptr() as usize;
    for n in 1..=3u8 {
        let got = pair[1].device.try_recv().expect("it has its receive");
        // SAFETY: the region is longer, and nothing writes there now.
        let bytes = unsafe { std::slice::from_raw_parts((address + 64 * (n as usize - 1)) as *const u8, 64) };
        assert_eq!((got.tag, bytes), (7, &[n; 64][..]));
        pair[1].device.release(1);
    }
    assert_eq!(pair.map(|end| end.endpoint.status()), [None, None]);
}

#[test]
fn a_receive_whose_message_came_before_it_is_not_one_that_no_message_has() {
    let mirror = Mirror::new(memory("mirror", GEOMETRY.window_bytes()), &GEOMETRY);
    let mut inbox = Inbox::new(mirror, &GEOMETRY, Some((GEOMETRY.rx_log, 2)), None);
    let record = Record { flags: Record::INLINE, tag: 7, ..Record::new(Opcode::Send) };
    inbox.frame(&Head { message: 0, ..Head::new(Kind::Data, 0) }, &record.encode(0)).unwrap();
    assert_eq!(inbox.take(&mut [0; 8]), Arrival::Record);
    inbox.post(0, [0, 0, 64, 8]);
    inbox.post(1, [0, 0, 64, 7]);
    assert_eq!((inbox.open_receives(), inbox.receive(1)[3]), (1, 7));
    inbox.post(2, [0, 0, 64, 7]);
    assert_eq!(inbox.open_receives(), 2);
}

#[test]
fn p5_p7_an_end_hears_its_peer_while_a_message_waits_for_its_receive_and_keeps_the_message_when_the_peer_ends()
 {
    let rig = Rig::new(7, Some(Habits::PLAIN));
    let mut pair = ahead(&rig, 2);
    let key = pair[0].key;
    send(&mut pair[0], 7, &[1; 64]);
    rig.run(&mut pair, 200);
    // The other way goes on: a message, and the peer's word that it has it.
    assert!(pair[0].device.post_recv(key, 0, 64, 8));
    send(&mut pair[1], 8, &[2; 64]);
    rig.run(&mut pair, 200);
    assert!(pair[0].device.try_recv().is_some());
    assert_eq!(pair[1].device.retired(), 1, "the peer's counts lie after the message that waits");
    pair[0].endpoint.fail(ABORTED);
    rig.run(&mut pair, 400);
    assert_eq!(pair[1].endpoint.status(), None, "a message waits for its receive");
    let key = pair[1].key;
    assert!(pair[1].device.post_recv(key, 0, 64, 7));
    rig.run(&mut pair, 400);
    assert!(pair[1].device.try_recv().is_some());
    assert_eq!(pair[1].endpoint.status(), Some(ABORTED));
}

#[test]
fn p7_links_whose_peers_have_stopped_end_after_one_wait_and_not_after_one_each() {
    let rig = Rig::new(13, Some(Habits { room: 200, ..Habits::PLAIN }));
    let ends: Vec<Duration> = (0..20)
        .map(|_| {
            let mut pair = rig.pair(WAY);
            for n in 0..4 {
                send(&mut pair[0], 7, &[n; 320]);
                rig.pass(&mut pair, 1_000);
                pair[0].poll();
            }
            pair[0].endpoint.fail(ABORTED);
            let began = pair[0].now;
            while !pair[0].endpoint.is_gone() {
                rig.pass(&mut pair, 1_000_000);
                pair[0].poll();
            }
            Duration::from_nanos(pair[0].now - began)
        })
        .collect();
    let (all, each) = LINGER;
    assert!(ends[0] >= all && ends[0] < 2 * all, "{ends:?}");
    // The words and the wire, each.
    assert!(ends[1..].iter().all(|end| *end < 3 * each), "{ends:?}");
}

#[test]
fn a_message_out_of_a_region_waits_for_its_receive() {
    let rig = Rig::new(6, Some(Habits::PLAIN));
    let mut pair = ahead(&rig, 2);
    let record = Record { flags: Record::REGION, place: pair[0].key, tag: 7, ..Record::new(Opcode::Send) };
    // SAFETY: a payload in a region is not read here.
    assert!(unsafe { pair[0].device.post_raw(record, std::ptr::null(), 64) }.is_some());
    rig.run(&mut pair, 400);
    assert_eq!(pair[0].endpoint.counters().released, 0);
    let key = pair[1].key;
    assert!(pair[1].device.post_recv(key, 0, 64, 7));
    rig.run(&mut pair, 400);
    assert!(pair[1].device.try_recv().is_some());
}

#[test]
fn p6_a_put_after_a_message_that_went_ahead_is_not_overwritten_by_that_message() {
    let rig = Rig::new(8, Some(Habits::PLAIN));
    let mut pair = ahead(&rig, 2);
    let key = pair[1].key;
    // The receive is there, and the sender has yet to hear of it. Message and PUT are for the same bytes.
    assert!(pair[1].device.post_recv(key, 0, 320, 7));
    send(&mut pair[0], 7, &[1; 320]);
    put(&mut pair[0], key, 9);
    rig.run(&mut pair, 400);
    assert_eq!(pair[1].device.signal(0), 9);
    assert_eq!(pair[1].stripe(0)[..40], [9; 40]);
}

#[test]
fn news_of_receives_is_told_of_several_at_once_where_short_messages_need_not_wait_for_it() {
    let frames = [0, 16].map(|most| {
        let rig = Rig::new(9, Some(Habits::PLAIN));
        rig.net.keep_what_is_sent();
        let mut pair = ahead(&rig, most);
        let key = pair[1].key;
        for n in 0..64 {
            assert!(pair[1].device.post_recv(key, 0, 64, 7));
            send(&mut pair[0], 7, &[n; 64]);
            let mut passes = 0;
            while pair[1].device.try_recv().is_none() {
                rig.run(&mut pair, 1);
                passes += 1;
                assert!(passes < 1_000, "message {n} did not come");
            }
            pair[1].device.release(1);
        }
        let [sent] = rig.net.sent::<1>(1);
        let mut counts = (0, &sent[..]);
        while let Ok(Some((head, _, length))) = Head::read(counts.1) {
            counts = (counts.0 + (head.kind == Kind::Counts) as usize, &counts.1[length..]);
        }
        counts.0
    });
    assert!(
        frames[0] >= 32 && frames[1] <= frames[0] / 3,
        "counts were sent {frames:?} times for 64 messages"
    );
}

#[test]
fn p8_ends_that_differ_in_how_many_messages_may_come_before_their_receives_refuse_each_other() {
    let rig = Rig::new(1, Some(Habits::PLAIN));
    let meet = |change: &dyn Fn(&mut serde_json::Value)| {
        let opening = |rank: u32| {
            let geometry = Geometry { rank, ..GEOMETRY };
            let (window, meeting): (Arc<dyn Window>, _) =
                (memory("window", geometry.window_bytes()), rig.net.meeting(rank as usize, &rig.time));
            let config = Config {
                streams: 1,
                checksum: false,
                posted_receives: true,
                ahead: 3,
                thrifty: false,
                beat: 1_000_000,
            };
            TcpOpening::new(config, geometry, window, meeting).unwrap()
        };
        let (own, peer) = (opening(0), opening(1));
        let mut offer = serde_json::to_value(peer.offer()).unwrap();
        change(&mut offer);
        let offer = serde_json::from_value(offer).unwrap();
        let link = own.prepare(1, &offer, &mut |name, bytes| SharedMemory::builder(name, bytes).create())?;
        let (link, _) = link.join();
        Ok::<_, String>([link.goes_ahead(), link.takes_ahead()])
    };
    let of = |ahead: u32| meet(&move |offer| offer["ahead"] = ahead.into());
    assert_eq!(meet(&|_| {}), Ok([3, 3]));
    for other in [of(2), of(9), meet(&|offer| _ = offer.as_object_mut().unwrap().remove("ahead"))] {
        assert!(
            other.unwrap_err().contains("messages leave before their receives are posted, and this end 3")
        );
    }
    let refused: Result<_, String> = of(MOST_AHEAD + 1);
    assert_eq!(refused, Err("65 messages before their receives, expected at most 64".into()));
}

#[test]
fn p6_a_message_out_of_a_region_waits_until_the_peer_has_told_of_its_regions_over_the_next_link() {
    for seed in 1..20 {
        let rig = Rig::new(seed, Some(Habits { most: 7, usual: 5_000, ..Habits::PLAIN }));
        let mut pair = recovering(rig.pair(WAY));
        let (lkey, rkey) = (pair[0].key, pair[1].key);
        rig.net.break_behind(1, 0);
        for n in 0..20_000u64 {
            rig.run(&mut pair, 1);
            pair.iter_mut().for_each(|end| end.endpoint.control());
            // The first one is posted while there is no link.
            if n == 20 {
                let put = Record {
                    flags: Record::REGION | Record::WITH_SIGNAL,
                    place: lkey,
                    rkey,
                    signal_value: 5,
                    ..Record::new(Opcode::Put)
                };
                // SAFETY: a payload in a region is not read here.
                assert!(unsafe { pair[0].device.post_raw(put, std::ptr::null(), 320) }.is_some());
            }
        }
        assert_eq!(pair.each_ref().map(|end| end.endpoint.status()), [None, None], "seed {seed}");
        assert_eq!(pair[1].device.signal(0), 5, "seed {seed}");
        assert!(rig.net.links() > 1);
    }
}

#[test]
fn an_engine_may_sleep_while_a_broken_link_waits_for_the_next_one() {
    let rig = Rig::new(1, None);
    let mut pair = recovering(rig.pair(WAY));
    assert!(pair[0].endpoint.break_link(), "another one is to take its place");
    // The peer does nothing.
    for _ in 0..200 {
        rig.pass(&mut pair, 1_000);
        pair[0].poll();
        pair[0].endpoint.control();
    }
    assert_eq!((pair[0].endpoint.status(), pair[0].endpoint.counters().recovered), (None, 0));
    assert!(!pair[0].endpoint.prepare_sleep());
}

#[test]
fn p7_a_status_and_a_farewell_arrive_though_other_streams_end_before_them() {
    for seed in 1..60 {
        // Each stream is late by itself, so that the ends of some overtake the last words on the first one.
        let rig = Rig::new(seed, Some(Habits { usual: 20_000, ..Habits::PLAIN }));
        let mut pair = rig.pair(Way { streams: 4, ..WAY });
        pair[0].endpoint.fail(ABORTED);
        for _ in 0..100 {
            rig.run(&mut pair, 300);
            if pair[1].endpoint.status().is_some() {
                break;
            }
        }
        let statuses = pair.each_ref().map(|end| end.endpoint.status());
        assert_eq!(statuses, [Some(ABORTED); 2], "seed {seed}");
    }
}

#[test]
fn p7_an_end_whose_peer_ended_says_why_though_a_message_is_posted_when_the_streams_have_ended() {
    let rig = Rig::new(1, Some(Habits::PLAIN));
    let mut pair = rig.pair(WAY);
    pair[0].endpoint.fail(ABORTED);
    // The second end looks when everything has come: the status, and the end of the stream.
    for _ in 0..100 {
        rig.pass(&mut pair, 1_000);
        pair[0].poll();
    }
    assert!(pair[1].device.post(Record { flags: Record::INLINE, ..Record::new(Opcode::Send) }, &[1; 8]));
    pair[1].endpoint.poll(&mut None);
    rig.run(&mut pair, 10);
    assert_eq!(pair[1].endpoint.status(), Some(ABORTED));
}

#[test]
fn p7_of_streams_of_which_one_ends_alone_the_link_breaks() {
    let rig = Rig::new(1, Some(Habits::PLAIN));
    let (links, ..) = rig.links(Way { streams: 2, ..WAY });
    let [mut a, b] = links;
    assert_eq!(a.notify(), Ok(false));
    let mut bare = rig.net.bare(&rig.time).expect("the first end has dialled");
    // The peer ends its second stream, and says nothing on the first one.
    rig.net.end_one(1, 1);
    let mut record = [0; 8];
    for ms in 0..5_000u64 {
        rig.time.store(ms * 1_000_000, Ordering::Relaxed);
        assert_eq!(a.poll_recv(&mut record), Arrival::Empty);
        if a.check(ms * 1_000_000).is_err() {
            assert!(ms >= 500, "the first stream may yet say why");
            while !bare.stopped() {}
            drop((a, b));
            return;
        }
        let _ = a.notify();
    }
    panic!("a link goes on without one of its streams");
}

/// Sends a frame that a peer could send, over a stream that nobody else sends over.
fn say(wire: &mut dyn Wire, kind: Kind, number: u32, words: &[u64]) {
    let mut bytes = [0; MOST_HEAD];
    let n = Head::new(kind, number).write(words, &mut bytes);
    // SAFETY: the streams have no habits that keep the bytes.
    let sent = unsafe { wire.send(0, &[Piece { address: bytes.as_ptr() as usize, bytes: n }]) };
    assert_eq!(sent.unwrap(), n);
}

#[test]
fn p7_a_peer_that_acknowledges_what_it_did_not_get_fills_no_memory() {
    // The peer reads nothing, so the streams take 200 bytes, and says that it has all that was posted.
    let rig = Rig::new(1, Some(Habits { room: 200, ..Habits::PLAIN }));
    let (links, windows, _) = rig.links(WAY);
    let [a, b] = links;
    let mut outgoing = Outgoing::new(1, 8, 0, false, 1 << 16);
    drop((a, b));
    let payload = Piece { address: windows[0].as_ptr().as_ptr() as usize, bytes: 64 };
    for sequence in 0..8 {
        outgoing.message(Leaving { sequence, words: [0; 8], payload, placed: false });
    }
    // SAFETY: the payload lies in the window.
    unsafe { outgoing.fill() };
    assert_eq!(outgoing.settled(8), 0);
    outgoing.taken(0, 3 * (96 + 64) + 20);
    assert_eq!(outgoing.settled(8), 0, "the wire may still read what it has taken");
    outgoing.settle(0, 2 * (96 + 64) + 159);
    assert_eq!(outgoing.settled(8), 2);

    let rig = Rig::new(1, Some(Habits { room: 200, ..Habits::PLAIN }));
    let (links, windows, mirrors) = rig.links(WAY);
    let [a, b] = links;
    let mut pair = unacquainted([a, b], windows, mirrors);
    pair[0].poll();
    let mut bare = rig.net.bare(&rig.time).expect("the first end has dialled");
    let word = |count| count_word(0, count);
    let (mut posted, mut number) = (0u64, 0);
    for pass in 0..20_000u64 {
        posted += pair[0].device.post(Record::new(Opcode::Send), &[1; 64]) as u64;
        rig.pass(&mut pair, 1_000);
        pair[0].poll();
        let sent = pair[0].endpoint.counters().released;
        if pass % 8 == 0 {
            say(&mut *bare, Kind::Counts, number, &[word(sent), word(sent), word(sent + 4)]);
            number += 1;
        }
    }
    let slots = pair[0].device.slots();
    assert!(posted > 1 && posted <= slots + 4, "{posted} messages went to a peer that reads nothing");
    while !bare.stopped() {}
}

/// Both ends; one may be the test itself.
fn unacquainted(
    links: [Box<dyn Link>; 2],
    windows: [Arc<SharedMemory>; 2],
    mirrors: [Arc<SharedMemory>; 2],
) -> [End; 2] {
    pushgate_test_ends::ends_alone(GEOMETRY, links.into(), windows, mirrors, false)
}

/// What a stream brings is taken down.
#[derive(Default)]
struct Down {
    frames: Vec<Kind>,
    place: Vec<u8>,
    landed: u32,
}

impl Takes for Down {
    fn frame(&mut self, head: &Head, _: &[u64; 8]) -> Result<usize, &'static str> {
        self.frames.push(head.kind);
        self.place.resize(head.payload as usize, 0);
        Ok(self.place.as_mut_ptr() as usize)
    }

    fn landed(&mut self, _: u64, bytes: u32) {
        self.landed += bytes;
    }
}

/// A DATA frame of this payload with its checksum.
fn data(payload: &[u8]) -> Vec<u8> {
    // SAFETY: a slice can be read.
    let sum = unsafe { sum_of(payload.as_ptr() as usize, payload.len()) };
    let head = Head { payload: payload.len() as u32, sum: Some(sum), ..Head::new(Kind::Data, 0) };
    let mut bytes = [0; MOST_HEAD];
    let n = head.write(&[0; 8], &mut bytes);
    [&bytes[..n], payload].concat()
}

/// Feeds bytes to a stream's end, `step` at a time.
fn feed(bytes: &[u8], step: usize) -> (Down, Result<(), String>) {
    let (mut incoming, mut down) = (Incoming::new(0), Down::default());
    let mut at = 0;
    while at < bytes.len() {
        let (pieces, n) = incoming.pieces();
        let mut moved = 0;
        for piece in &pieces[..n] {
            let now = piece.bytes.min(step - moved).min(bytes.len() - at);
            // SAFETY: the piece is memory of `incoming`, or of `down`, which has `now` bytes there.
            unsafe { std::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), piece.address as *mut u8, now) };
            (at, moved) = (at + now, moved + now);
        }
        // SAFETY: as above.
        if let Err(e) = unsafe { incoming.received(moved, &mut down) } {
            return (down, Err(e.to_string()));
        }
    }
    (down, Ok(()))
}

#[test]
fn p6_a_payload_that_differs_from_its_checksum_breaks_the_link_however_it_comes() {
    let payload: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
    for step in [1, 33, 4_096, 70_000] {
        let right = data(&payload);
        let (down, result) = feed(&right, step);
        assert_eq!((result, down.landed, down.place == payload), (Ok(()), 100_000, true), "{step}");
        for at in [96, 70_000, right.len() - 1] {
            let mut wrong = right.clone();
            wrong[at] ^= 4;
            let (down, result) = feed(&wrong, step);
            assert_eq!(down.landed, 0);
            assert!(result.unwrap_err().contains("the checksum of its payload is wrong"));
        }
    }
}

#[test]
fn p6_of_the_latest_words_about_a_region_the_last_one_is_withdrawn() {
    let rig = Rig::new(1, Some(Habits::PLAIN));
    let (links, ..) = rig.links(WAY);
    let [mut a, b] = links;
    let region = memory("region", 4096);
    let at = RegionMemory::Host { address: region.as_ptr().as_ptr() as usize, keep: None };
    let pass = |a: &mut Box<dyn Link>, mut b: Option<&mut Box<dyn Link>>| {
        for _ in 0..100 {
            rig.time.fetch_add(1_000, Ordering::Relaxed);
            a.notify().unwrap();
            let _ = a.poll_recv(&mut [0; 8]);
            if let Some(b) = &mut b {
                b.notify().unwrap();
                let _ = b.poll_recv(&mut [0; 8]);
            }
        }
    };
    let mut b = b;
    a.add_region(7, &at, 4096);
    pass(&mut a, Some(&mut b));
    // The peer knows of the region. It goes, comes again and goes, before the peer is told of any of that.
    a.remove_region(7);
    a.add_region(7, &at, 4096);
    a.remove_region(7);
    pass(&mut a, Some(&mut b));
    let put = Record { flags: Record::REGION, rkey: 7, place: 9, length: 8, ..Record::new(Opcode::Put) };
    b.add_region(9, &at, 4096);
    // It asks whether the peer has told of all its regions.
    assert!(matches!(b.takes_region(&put), pushgate_link::RegionSends::Unknown));
    pass(&mut a, Some(&mut b));
    assert!(
        matches!(b.takes_region(&put), pushgate_link::RegionSends::No(_)),
        "the peer has no region any more"
    );
}
