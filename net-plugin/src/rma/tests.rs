//! Coll comms of several ranks in one process, over `local` queue pairs and host memory.

mod fuzzed;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};

use super::coll::{Coll, Contexts, Door, Registered};
use super::memory::{Signal, Stretch};
use super::requests::Handle;
use super::state::DEPTH;
use super::wire::{Adds, HEADER, Header, Place, Words};
use crate::error::{Code, Failure};
use crate::handshake::Attempts;
use crate::join::Purpose;
use crate::lane::Lane;
use crate::runtime::Runtime;
use crate::testing::{WINDOW, until};

/// A rank with one memory of its own, whose last 8 words are signals.
struct Rank {
    contexts: Contexts,
    memory: Registered,
    // Dropped after the contexts, as NCCL does.
    coll: Coll,
    // Never moves; read and written through its address alone while it is registered.
    words: Box<[AtomicU64]>,
}

/// Bytes of a rank's memory: more than its window.
const BYTES: usize = 3 * WINDOW as usize;
const WORDS: usize = BYTES / 8;

impl Rank {
    fn at(&self, offset: usize) -> Option<Stretch<'_>> {
        Some(Stretch { memory: &self.memory, offset: offset as u64 })
    }

    fn signal(&self, index: usize, value: u64) -> Option<Signal<'_>> {
        Some(Signal { at: self.at(BYTES - 64 + 8 * index).unwrap(), value })
    }

    fn seen(&self, index: usize) -> u64 {
        self.words[WORDS - 8 + index].load(Ordering::Acquire)
    }

    fn put(
        &self,
        rank: u32,
        payload: (usize, usize, usize),
        signal: Option<Signal<'_>>,
    ) -> Result<Handle, Failure> {
        let (from, to, bytes) = payload;
        // SAFETY: the memory outlives its registration.
        unsafe { self.contexts.put((0, rank), (self.at(from), self.at(to), bytes as u64), signal) }
    }

    fn get(&self, rank: u32, (from, to, bytes): (usize, usize, usize)) -> Handle {
        let (from, to) = (self.at(from).unwrap(), self.at(to).unwrap());
        // SAFETY: the memory outlives its registration.
        unsafe { self.contexts.get((0, rank), (from, to, bytes as u64)) }.unwrap()
    }

    fn fill(&self, value: u64) {
        self.words.iter().take(WORDS - 8).for_each(|word| word.store(value, Ordering::Relaxed));
    }
}

fn coll_comms(n: u32) -> Vec<Coll> {
    coll_comms_without(n, None)
}

/// Of coll comms whose last rank can't reach the one that is named.
fn coll_comms_without(n: u32, unreached: Option<usize>) -> Vec<Coll> {
    let (runtime, attempts) = (Runtime::of_a_test(WINDOW), Arc::new(Attempts::new()));
    let doors: Vec<_> = (0..n).map(|_| Door::new(runtime.clone(), 0).unwrap()).collect();
    let handles: Box<[_]> = doors.iter().map(|(_, handle)| *handle).collect();
    // Of a door that is gone.
    let nowhere = Door::new(runtime.clone(), 0).unwrap().1;
    let made = (0..).zip(&doors).map(|(rank, (door, _))| {
        let mut handles = handles.clone();
        if let Some(unreached) = unreached.filter(|_| rank + 1 == n) {
            handles[unreached] = nowhere;
        }
        Coll::new((runtime.clone(), attempts.clone()), door, handles, rank).unwrap()
    });
    made.collect()
}

fn memory() -> Box<[AtomicU64]> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

/// A rank whose first registration is its memory.
fn rank(coll: Coll) -> Rank {
    let words = memory();
    let memory = coll.register(words.as_ptr() as usize, BYTES, false, false).unwrap();
    Rank { contexts: coll.contexts(2, -1).unwrap(), memory, coll, words }
}

fn ranks(n: u32) -> Vec<Rank> {
    coll_comms(n).into_iter().map(rank).collect()
}

/// Has all ranks make progress until there is something.
#[track_caller]
fn progress_until<T>(ranks: &[Rank], mut look: impl FnMut() -> Option<T>) -> T {
    until(|| {
        ranks.iter().for_each(|rank| rank.contexts.progress().unwrap());
        look()
    })
}

/// Has all ranks make progress until the request of a rank has ended.
#[track_caller]
fn ended(ranks: &[Rank], of: usize, request: Handle) -> Result<(), Failure> {
    progress_until(ranks, || match ranks[of].coll.test(request) {
        Ok(done) => done.then_some(Ok(())),
        Err(failure) => Some(Err(failure)),
    })
}

#[test]
fn p3_a_signal_is_seen_after_the_payload_of_all_earlier_puts() {
    let ranks = ranks(2);
    let bytes = BYTES - 64;
    for round in 1..=20u64 {
        ranks[0].fill(round);
        // In two parts, each of several slices, at odd places of the window.
        let half = bytes / 2 - 8 * round as usize;
        let first = ranks[0].put(1, (0, 0, half), None).unwrap();
        let second = ranks[0].put(1, (half, half, bytes - half), ranks[0].signal(0, 3)).unwrap();
        progress_until(&ranks, || (ranks[1].seen(0) == 3 * round).then_some(()));
        assert!(ranks[1].words[..bytes / 8].iter().all(|word| word.load(Ordering::Relaxed) == round));
        for request in [first, second] {
            ended(&ranks, 0, request).unwrap();
        }
    }
    assert!(!ranks[0].contexts.has_failed() && !ranks[1].contexts.has_failed());
}

#[test]
fn a_get_brings_every_byte_and_nothing_beside() {
    let ranks = ranks(3);
    ranks[1].fill(u64::from_le_bytes([7; 8]));
    for bytes in [0, 1, 100, WINDOW as usize, BYTES - 64 - 13] {
        ranks[2].fill(0);
        let request = ranks[2].get(1, (5, 13, bytes));
        ended(&ranks, 2, request).unwrap();
        let own: Vec<u8> =
            ranks[2].words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        assert!(
            own.iter().enumerate().all(|(i, byte)| *byte == 7 * u8::from((13..13 + bytes).contains(&i))),
            "{bytes}"
        );
    }
}

#[test]
fn a_rank_puts_and_gets_at_itself_too_and_a_flush_is_done() {
    let ranks = ranks(1);
    ranks[0].words[0].store(5, Ordering::Relaxed);
    let put = ranks[0].put(0, (0, 8, 8), ranks[0].signal(1, 9)).unwrap();
    ended(&ranks, 0, put).unwrap();
    assert_eq!((ranks[0].words[1].load(Ordering::Relaxed), ranks[0].seen(1)), (5, 9));
    let requests = [ranks[0].get(0, (8, 16, 8)), ranks[0].contexts.flush(1, 0).unwrap()];
    requests.into_iter().for_each(|request| ended(&ranks, 0, request).unwrap());
    assert_eq!(ranks[0].words[2].load(Ordering::Relaxed), 5);
}

#[test]
fn signals_of_many_ranks_add_up() {
    let ranks = ranks(4);
    let mut requests = Vec::new();
    for (of, rank) in ranks.iter().enumerate() {
        for value in 1..=10 {
            requests.push((of, rank.put(2, (0, 0, 0), rank.signal(3, value)).unwrap()));
        }
    }
    requests.into_iter().for_each(|(of, request)| ended(&ranks, of, request).unwrap());
    progress_until(&ranks, || (ranks[2].seen(3) == 4 * 55).then_some(()));
}

#[test]
fn a_put_waits_for_the_registration_that_it_names() {
    let [early, late] = coll_comms(2).try_into().ok().unwrap();
    let words = [memory(), memory()];
    let memory = early.register(words[0].as_ptr() as usize, BYTES, false, false).unwrap();
    let (a, b) = (early.contexts(1, -1).unwrap(), late.contexts(1, -1).unwrap());
    words[0][0].store(7, Ordering::Relaxed);
    let at = |offset| Some(Stretch { memory: &memory, offset });
    // SAFETY: the memory outlives its registration.
    let request = unsafe { a.put((0, 1), (at(0), at(8), 8), None) }.unwrap();
    let both = || {
        a.progress().unwrap();
        b.progress().unwrap();
    };
    until(|| {
        both();
        early.test(request).unwrap().then_some(())
    });
    (0..1000).for_each(|_| both());
    assert_eq!(words[1][1].load(Ordering::Relaxed), 0);
    late.register(words[1].as_ptr() as usize, BYTES, false, false).unwrap();
    until(|| {
        both();
        (words[1][1].load(Ordering::Acquire) == 7).then_some(())
    });
}

#[test]
fn p8_a_put_to_memory_that_is_not_registered_any_more_is_refused_at_both_ends() {
    let ranks = ranks(3);
    let other = ranks[2].put(1, (0, 0, 8), ranks[2].signal(0, 1)).unwrap();
    ended(&ranks, 2, other).unwrap();
    progress_until(&ranks, || (ranks[1].seen(0) == 1).then_some(()));
    ranks[1].coll.deregister(&ranks[1].memory).unwrap();
    ranks[0].put(1, (0, 0, 8), ranks[0].signal(0, 1)).unwrap();
    progress_until(&ranks, || {
        (ranks[0].contexts.has_failed() && ranks[1].contexts.has_failed()).then_some(())
    });
    let late = ranks[0].put(1, (0, 0, 8), None).unwrap();
    assert_eq!(ended(&ranks, 0, late).unwrap_err().code, Code::Usage);
    // The others go on.
    assert!(!ranks[2].contexts.has_failed());
    let request = ranks[2].put(0, (0, 0, 8), ranks[2].signal(5, 1)).unwrap();
    ended(&ranks, 2, request).unwrap();
    progress_until(&ranks, || (ranks[0].seen(5) == 1).then_some(()));
}

#[test]
fn p7_what_is_asked_of_a_rank_that_is_gone_fails_and_the_others_go_on() {
    let mut ranks = ranks(3);
    let request = ranks[1].put(0, (0, 0, 8), ranks[1].signal(0, 1)).unwrap();
    ended(&ranks, 1, request).unwrap();
    progress_until(&ranks, || (ranks[0].seen(0) == 1).then_some(()));
    // A get out of memory that the other rank has yet to register, so that no answer comes, and a rank that goes without a word.
    let early = ranks[0].coll.register(ranks[0].words.as_ptr() as usize, 8, false, false).unwrap();
    let (from, to) = (Stretch { memory: &early, offset: 0 }, ranks[0].at(0).unwrap());
    // SAFETY: the memory outlives its registration.
    let get = unsafe { ranks[0].contexts.get((0, 1), (from, to, 8)) }.unwrap();
    let gone = ranks.remove(1);
    std::mem::forget(gone.words);
    drop((gone.contexts, gone.coll));
    let failure = ended(&ranks, 0, get).unwrap_err();
    assert!(failure.text.contains("rank 1"), "{failure}");
    let put = ranks[0].put(1, (0, 0, 8), None).unwrap();
    assert!(ended(&ranks, 0, put).is_err() && ranks[0].contexts.has_failed());
    let put = ranks[1].put(0, (0, 0, 8), ranks[1].signal(1, 1)).unwrap();
    ended(&ranks, 1, put).unwrap();
    progress_until(&ranks, || (ranks[0].seen(1) == 1).then_some(()));
}

#[test]
fn p7_a_get_whose_answer_finds_no_way_back_fails_and_so_do_later_ones() {
    let ranks: Vec<_> = coll_comms_without(2, Some(0)).into_iter().map(rank).collect();
    for _ in 0..2 {
        let get = ranks[0].get(1, (0, 0, 8));
        let failure = ended(&ranks, 0, get).unwrap_err();
        assert!(failure.text.contains("rank 1"), "{failure}");
    }
    assert!(ranks[0].contexts.has_failed() && ranks[1].contexts.has_failed());
}

#[test]
fn what_was_put_arrives_though_its_rank_closes_at_once() {
    for _ in 0..10 {
        let mut ranks = ranks(2);
        ranks[0].fill(7);
        let request = ranks[0].put(1, (0, 0, BYTES - 64), ranks[0].signal(0, 1)).unwrap();
        ended(&ranks, 0, request).unwrap();
        let closes = ranks.remove(0);
        std::thread::scope(|threads| {
            threads.spawn(move || drop(closes));
            progress_until(&ranks, || (ranks[0].seen(0) == 1).then_some(()));
        });
        assert!(ranks[0].words[..WORDS - 8].iter().all(|word| word.load(Ordering::Relaxed) == 7));
        (0..1000).for_each(|_| ranks[0].contexts.progress().unwrap());
        assert!(!ranks[0].contexts.has_failed(), "the rank said that it closes");
    }
}

#[test]
fn more_operations_than_a_context_has_are_refused_until_one_is_done() {
    let ranks = ranks(2);
    let requests: Vec<_> = (0..DEPTH).map(|_| ranks[0].put(1, (0, 0, 1000), None).unwrap()).collect();
    assert_eq!(ranks[0].put(1, (0, 0, 8), None).unwrap_err().code, Code::Usage);
    for request in requests {
        ended(&ranks, 0, request).unwrap();
    }
    let request = ranks[0].put(1, (0, 0, 8), ranks[0].signal(0, 1)).unwrap();
    ended(&ranks, 0, request).unwrap();
    assert_eq!(ranks[0].coll.test(request).unwrap_err().code, Code::Argument, "it is done already");
}

#[test]
fn p8_what_leaves_its_registration_or_names_no_rank_is_refused_and_nothing_happens() {
    let ranks = ranks(2);
    let code = |result: Result<Handle, Failure>| result.unwrap_err().code;
    let rank = &ranks[0];
    for payload in [(BYTES, 0, 1), (0, BYTES - 7, 8), (usize::MAX, 0, 2), (0, 0, BYTES + 1)] {
        assert_eq!(code(rank.put(1, payload, None)), Code::Usage, "{payload:?}");
    }
    assert_eq!(code(rank.put(2, (0, 0, 8), None)), Code::Argument);
    let signal = |offset| Some(Signal { at: Stretch { memory: &rank.memory, offset }, value: 1 });
    for offset in [4, BYTES as u64, BYTES as u64 - 4, u64::MAX - 7] {
        assert_eq!(code(rank.put(1, (0, 0, 8), signal(offset))), Code::Usage, "{offset}");
    }
    // SAFETY: nothing is begun.
    let context = unsafe { rank.contexts.put((2, 1), (None, None, 0), signal(0)) };
    assert_eq!(code(context), Code::Argument);
    // SAFETY: nothing is begun.
    let nowhere = unsafe { rank.contexts.put((0, 1), (None, rank.at(0), 8), None) };
    assert_eq!(code(nowhere), Code::Argument);
    (0..100).for_each(|_| ranks.iter().for_each(|rank| rank.contexts.progress().unwrap()));
    assert!(ranks.iter().all(|rank| rank.words.iter().all(|word| word.load(Ordering::Relaxed) == 0)));
}

/// What no rank would send, told to rank 0 by a stranger that has the rank's handle.
#[test]
fn p8_messages_that_no_rank_sends_end_their_own_queue_pair_and_touch_nothing() {
    let (runtime, attempts) = (Runtime::of_a_test(WINDOW), Arc::new(Attempts::new()));
    let others: Vec<_> = (1..3).map(|_| Door::new(runtime.clone(), 0).unwrap()).collect();
    let at = |offset| Place { memory: 0, offset };
    let hello = Header::Hello { rank: 2, ranks: 3 }.encode();
    let put = |offset, bytes, signal: Option<u64>| {
        let signal = signal.map(|offset| Adds { at: at(offset), value: 1 });
        Header::Put { to: at(offset), bytes, signal }.encode()
    };
    let end = BYTES as u64;
    let mut garbage = hello;
    garbage[0] ^= 0xff;
    let mut unknown = hello;
    unknown[0] |= 0xf << 48;
    // The words of each message, and the bytes behind the header that are said to be there.
    let wrong: [(&[(Words, usize)], &str); 14] = [
        (&[(put(0, 8, None), 8)], "where a rank of 3 should say its name"),
        (&[(Header::Hello { rank: 3, ranks: 3 }.encode(), 0)], "should say its name"),
        (&[(Header::Hello { rank: 0, ranks: 3 }.encode(), 0)], "should say its name"),
        (&[(Header::Hello { rank: 2, ranks: 4 }.encode(), 0)], "should say its name"),
        (&[(garbage, 0)], "it begins with no header"),
        (&[(hello, 0), (unknown, 0)], "kind 15"),
        (&[(hello, 0), (hello, 0)], "says its name again"),
        (&[(hello, 0), (put(end - 7, 8, None), 8)], "which has"),
        (&[(hello, 0), (put(u64::MAX, 8, None), 8)], "which has"),
        (&[(hello, 0), (put(0, 9, None), 8)], "its header says 9 bytes"),
        (&[(hello, 0), (put(0, 8, Some(4)), 8)], "no multiple of 8"),
        (&[(hello, 0), (put(0, 8, Some(end)), 8)], "which has"),
        (&[(hello, 0), (Header::Get { from: at(1), bytes: end, get: 1 }.encode(), 0)], "which has"),
        (
            &[(hello, 0), (Header::Data { get: 1, offset: 0, bytes: 8 }.encode(), 8), (garbage, 0)],
            "no header",
        ),
    ];
    let ranks = ranks(2);
    for (messages, says) in wrong {
        let (door, mut handle) = Door::new(runtime.clone(), 0).unwrap();
        let handles = [handle, others[0].1, others[1].1].into();
        let target = rank(Coll::new((runtime.clone(), attempts.clone()), &door, handles, 0).unwrap());
        let purpose = Purpose::Rma { lane: runtime.rma_lane(0).unwrap(), window: 64 << 10 };
        let mut stranger = until(|| {
            target.contexts.progress().unwrap();
            attempts.dial(&runtime, &mut handle, None, &purpose).unwrap()
        });
        for (words, bytes) in messages {
            let producer = &mut stranger.joined.producer;
            let (taken, record) = producer.stage(Record::new(Opcode::Send), HEADER + bytes).expect("room");
            let mut message = vec![0x77; HEADER + bytes];
            message[..HEADER].copy_from_slice(&words.map(u64::to_le_bytes).concat());
            // SAFETY: the vector's own bytes.
            unsafe { producer.push(taken.place, message.as_ptr(), message.len()) };
            producer.publish(taken.slot, &record);
            producer.wake();
        }
        let status = until(|| {
            target.contexts.progress().unwrap();
            purpose_lane(&purpose).drive_all();
            stranger.joined.producer.status()
        });
        assert_eq!(status.code as u32, abi::PUSHGATE_REFUSED, "{says}");
        // A stranger that has not said its name is no loss.
        let told = target.coll.failure();
        let named = messages.len() > 1;
        assert!(told.is_some() == named && told.is_none_or(|told| told.contains(says)), "{says}");
        assert!(target.words.iter().all(|word| word.load(Ordering::Relaxed) == 0), "{says}");
        stranger.joined.lane.engine.remove_qp(stranger.joined.qp).unwrap();
    }
    // Other coll comms of the process go on.
    let request = ranks[0].put(1, (0, 0, 8), ranks[0].signal(0, 1)).unwrap();
    ended(&ranks, 0, request).unwrap();
    progress_until(&ranks, || (ranks[1].seen(0) == 1).then_some(()));
}

fn purpose_lane(purpose: &Purpose) -> &Lane {
    match purpose {
        Purpose::Rma { lane, .. } => lane,
        Purpose::Messages { .. } => unreachable!("the tests make none"),
    }
}
