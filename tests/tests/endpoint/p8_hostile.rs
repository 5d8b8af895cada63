//! P8: an endpoint between a program and a peer that write what they like.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use pushgate_core::session::count_word;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, lap_of};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::mover::{MoveError, Mover};
use pushgate_link::region::RegionMemory;

use crate::common::*;
use crate::device_memory::DEVICE;
use crate::{bytes, take};

/// A mover that checks its requests and copies nothing.
struct Watch {
    region: u64,
    window: std::ops::Range<usize>,
    polls: u64,
}

impl Mover for Watch {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        let end = dst.checked_add(length as u64).expect("the address wraps");
        assert!(dst >= DEVICE && end <= DEVICE + self.region, "{length} bytes to {dst:#x}");
        let inside = self.window.contains(&src) && src + length <= self.window.end;
        assert!(inside || length <= abi::PUSHGATE_INLINE_SEND as usize, "{length} bytes from {src:#x}");
        Ok(0)
    }

    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        self.polls += 1;
        match self.polls % 97 {
            0 => Err(MoveError { length: 0, reason: "now and then one fails".into() }),
            n => Ok(n % 2 == 0),
        }
    }
}

const HOSTILE: Geometry = Geometry {
    window_log: 3,
    slots_log: 2,
    cq_log: 1,
    rx_log: 2,
    link_log: 3,
    landing_log: 2,
    signals: 3,
    rank: 0,
};

const REGION: usize = 150;

/// One endpoint between a program and a peer that write what they like.
struct Victim {
    own: Arc<Memory>,
    peer: Arc<Memory>,
    region: Region,
}

/// How a case ended, and how far it came.
#[derive(Default)]
struct Outcome {
    ended: bool,
    delivered: u64,
    released: u64,
    copied: u64,
}

/// Picks one of the values, the last of them seldom; now and then anything at all.
fn pick(r: u64, values: &[u64]) -> u64 {
    let last = values.len() - 1;
    match r % 100 {
        0 => r / 100,
        1..4 => values[last],
        _ => values[(r >> 8) as usize % last],
    }
}

impl Victim {
    fn new() -> Self {
        let own = Memory::new(HOSTILE);
        let peer = Memory::new(Geometry { rank: 1, window_log: 2, ..HOSTILE });
        Victim { own, peer, region: Region::new(REGION) }
    }

    /// A record that may be right, made of values that are right or nearly so.
    fn record(w: &[u64; 10], id: u32, keys: &[u64], place: u64, units: u64) -> Record {
        let opcode = [Opcode::Send, Opcode::Send, Opcode::Put, Opcode::Put, Opcode::Signal, Opcode::Nop]
            [w[1] as usize % 6];
        let all = [0, 0, 0, 0, Record::INLINE, Record::INLINE, Record::INLINE, Record::REGION];
        let mut flags = all[(w[1] >> 8) as usize % 8];
        if opcode == Opcode::Put && w[1] >> 16 & 1 == 0 {
            flags |= Record::WITH_SIGNAL;
        }
        if matches!(opcode, Opcode::Signal | Opcode::Nop) {
            flags = 0;
        }
        if w[1] >> 17 & 1 == 0 {
            flags |= Record::SIGNALED;
        }
        let inline = flags & Record::INLINE != 0;
        let most = if inline { if opcode == Opcode::Send { 40 } else { 16 } } else { units * UNIT as u64 };
        let most = if opcode == Opcode::Put { most.min(128) } else { most };
        let length = match opcode {
            Opcode::Signal => 0,
            _ => pick(w[2], &[0, 1, most / 2, most.saturating_sub(1), most, most + 1]),
        };
        let region = flags & Record::REGION != 0;
        Record {
            opcode,
            flags,
            id,
            length: length as u32,
            tag: pick(w[3], &[1, 2]) as u32,
            place: if region { pick(w[4], keys) } else { pick(w[4], &[place, place + 1]) } as u32,
            place_offset: if region { pick(w[5], &[0, 1]) } else { pick(w[5], &[units, units + 1]) },
            rkey: pick(w[6], keys) as u32,
            remote_offset: pick(w[7], &[0, 1, 10, 22, REGION as u64 - 16, 1 << 55]),
            signal: pick(w[8], &[0, 1, 2, 3]) as u32,
            signal_value: w[9],
        }
    }

    /// The record for a slot, now and then with a word or a lap that is wrong.
    fn spoiled(slot: u64, log: u32, record: &Record, r: u64) -> [u64; 8] {
        let lap = lap_of(slot, log);
        let mut words = record.encode(lap);
        let word = &mut words[(r >> 4) as usize % 8];
        match r % 100 {
            0 => *word = r.rotate_right(13),
            1 => {
                let lap = (lap as u64) << abi::PUSHGATE_LAP_SHIFT;
                *word = r.rotate_right(13) & abi::PUSHGATE_DATA_MASK | lap;
            }
            2 => *word ^= 1 << (r >> 7 & 63),
            _ => {}
        }
        words
    }

    fn store(ring_words: &[AtomicU64], slot: u64, log: u32, words: &[u64; 8]) {
        let first = (slot as usize & ((1 << log) - 1)) * 8;
        for i in (0..8).rev() {
            ring_words[first + i].store(words[i], Ordering::Release);
        }
    }

    fn run(&self, posted_receives: bool, share: u8, steps: &[[u64; 10]]) -> Outcome {
        self.own.reset();
        self.peer.reset();
        self.region.reset();
        let options = QpOptions { posted_receives, in_place_share: share, ..options(1) };
        let wires = rdma::chosen().then(|| rdma::connect([&self.own, &self.peer], [posted_receives, false]));
        let mut end = match &wires {
            Some(wires) => wires[0].endpoint(&self.own, options),
            None => Endpoint::local(self.own.joined(&self.peer, None), options).unwrap(),
        };
        let host = end.add_region(self.region.memory(), REGION as u64).unwrap() as u64;
        let device = end
            .add_region(RegionMemory::Device { address: DEVICE, exported: None }, REGION as u64)
            .unwrap() as u64;
        let keys = [host, device, host + 1];
        let window = match &wires {
            Some(wires) => wires[0].mirror.as_ptr().as_ptr() as usize,
            None => self.peer.window_read.as_ptr().as_ptr() as usize,
        };
        let window = window..window + (UNIT << self.peer.geometry.window_log);
        let mut mover: Option<Box<dyn Mover>> =
            Some(Box::new(Watch { region: REGION as u64, window, polls: 1 }));

        let mut program = Device::new(&self.own, &self.peer);
        let link = self.peer.link.words(abi::PUSHGATE_LINK_RING as usize, 8 << HOSTILE.link_log);
        let line = self.peer.link.words(abi::PUSHGATE_LINK_RECEIVED as usize, 4);
        let (mut sequence, mut now, mut sends, mut receives) = (0u64, 0u64, 0u32, 0u32);
        for w in steps {
            let r = w[0] >> 8;
            match w[0] % 16 {
                0..4 => {
                    let units = w[2] >> 32 & 3;
                    let like = Self::record(w, 0, &keys, 0, units);
                    let units = if like.in_window() { units } else { 0 };
                    if let Some((slot, place)) = program.take(units, false) {
                        let record = Self::record(w, slot as u32, &keys, place, units);
                        let words = Self::spoiled(slot, HOSTILE.slots_log, &record, r);
                        Self::store(program.wqe_ring(), slot, HOSTILE.slots_log, &words);
                    }
                }
                4..8 => {
                    let id = pick(r, &[sequence, sequence + 1]) as u32;
                    let units = w[2] >> 32 & 3;
                    let mut record = Self::record(w, id, &keys, (w[2] >> 40) % (5 - units), units);
                    // Now and then the peer does what it may never do, or not now.
                    let held = program.rx_head().wrapping_sub(program.consumed().load(Ordering::Relaxed));
                    let full = held >= 3 || posted_receives && sends >= receives;
                    if w[3] >> 48 & 15 != 0 {
                        record.flags &= !Record::REGION;
                        if record.opcode == Opcode::Nop || record.opcode == Opcode::Send && full {
                            let flags = record.flags & Record::SIGNALED;
                            record = Record { opcode: Opcode::Signal, length: 0, flags, ..record };
                        }
                    }
                    sends += (record.opcode == Opcode::Send) as u32;
                    let mut words = Self::spoiled(sequence, HOSTILE.link_log, &record, w[9] >> 3);
                    match &wires {
                        Some(wires) => {
                            // What only this wire has: a short payload in the slot (here never a
                            // whole one), and a payload that lies in its region already.
                            match w[9] >> 40 & 31 {
                                0 => words[0] |= 0x80 << abi::PUSHGATE_FLAGS_SHIFT,
                                1 | 2 => words[0] |= 0x40 << abi::PUSHGATE_FLAGS_SHIFT,
                                _ => {}
                            }
                            wires[1].forge_record(sequence, HOSTILE.link_log, &words);
                        }
                        None => Self::store(link, sequence, HOSTILE.link_log, &words),
                    }
                    sequence += 1;
                }
                8 => {
                    let true_count = program.rx_head();
                    let count = pick(r, &[true_count, true_count + 1]);
                    program.consumed().store(count, Ordering::Relaxed);
                }
                9 | 10 => {
                    let released = end.counters().released;
                    let granted = program.slots() + 4;
                    let count = match r % 3 {
                        2 => pick(r >> 4, &[2, 4, granted]),
                        _ => pick(r >> 4, &[released / 2, released, released, released, released + 1]),
                    };
                    let epoch = if w[1].is_multiple_of(16) { w[1] as u16 } else { 0 };
                    match &wires {
                        Some(wires) => {
                            wires[1].forge((r % 3) as usize * 8, &[count_word(epoch, count)], None)
                        }
                        None => line[(r % 3) as usize].store(count_word(epoch, count), Ordering::Relaxed),
                    }
                }
                11 | 15 => {
                    receives += 1;
                    let field = |i: usize, likely: &[u64]| pick(w[i], likely);
                    let (key, offset) = (field(1, &keys) as u32, field(2, &[0, 10, 22, REGION as u64]));
                    program.post_recv(
                        key,
                        offset,
                        field(3, &[64, 128, 30]) as u32,
                        field(4, &[u64::MAX, u64::MAX, 1]) as u32,
                    );
                    if r.is_multiple_of(64) {
                        program.receive_slot()[(r >> 4) as usize % 4].store(w[5], Ordering::Relaxed);
                    }
                }
                12 => {
                    now += r % 2_000_000;
                    end.tick(now);
                }
                13 if r % 32 == 0 => match &wires {
                    // A status counts only with its complement after it.
                    Some(wires) => wires[1].forge(40, &[w[1], if r & 64 == 0 { !w[1] } else { w[2] }], None),
                    None => line[3].store(w[1], Ordering::Relaxed),
                },
                // Places of regions that do not exist.
                13 if r % 32 == 1 => {
                    if let Some(wires) = &wires {
                        let at = 8192 + (w[1] as usize % (4096 + 4)) * 32;
                        wires[1].forge(at, &w[2..6], None);
                    }
                }
                14 if r % 16 == 0 => _ = end.remove_region(host as u32),
                _ => {}
            }
            end.has_work();
            end.poll(&mut mover);
            while program.try_recv().is_some() {}
        }
        (0..4).for_each(|_| _ = end.poll(&mut mover));
        end.tick(now + 1);
        end.tick(now + 10_000_000);
        self.own.check_gaps();
        self.peer.check_gaps();
        self.region.check_guards();
        // A run of canaries in the region can only have come from beyond the window.
        let found = self.region.read(0, REGION);
        assert!(!found.windows(16).any(|w| w == [0xc5; 16]), "bytes from outside of the window");
        assert_eq!(program.status().map(|s| s.word()), end.status().map(|s| s.word()));
        let c = end.counters();
        Outcome {
            ended: end.status().is_some(),
            delivered: c.delivered,
            released: c.released,
            copied: c.copied_bytes,
        }
    }
}

/// Random programs and random peers: nothing outside of what was registered is touched, nothing
/// panics, and another queue pair in the same loop delivers everything as usual.
#[test]
fn p8_whatever_they_write_nothing_else_is_touched_or_stopped() {
    let victim = Victim::new();
    let bystander = RefCell::new((Pair::default(), 0u32));
    let sum = RefCell::new((0, Outcome::default(), 0));
    // Over RDMA each case makes a queue pair of its own and waits for every write.
    let count = if rdma::chosen() { 40 } else { 4000 };
    let config = Config { cases: count, failure_persistence: None, ..Config::default() };
    let steps = prop::collection::vec(any::<[u64; 10]>(), 1..60);
    let outcome =
        TestRunner::new(config).run(&(any::<bool>(), any::<u8>(), steps), |(receives, share, steps)| {
            let outcome = victim.run(receives, share, &steps);
            let (pair, tag) = &mut *bystander.borrow_mut();
            for _ in 0..3 {
                let content = bytes(*tag as u64, *tag as usize % 500);
                assert!(pair.devices[0].post(window_send(*tag), &content));
                pair.settle();
                take(&mut pair.devices[1], *tag, &content);
                pair.settle();
                *tag += 1;
            }
            let mut sum = sum.borrow_mut();
            sum.0 += 1;
            sum.1.delivered += outcome.delivered;
            sum.1.released += outcome.released;
            sum.1.copied += outcome.copied;
            sum.2 += outcome.ended as u32;
            Ok(())
        });
    outcome.unwrap();
    bystander.borrow().0.assert_clean();
    let (cases, all, ended) = sum.into_inner();
    println!(
        "{cases} cases, {ended} ended with a status; {} released, {} delivered, {} bytes copied",
        all.released, all.delivered, all.copied
    );
    // Not every case was refused at its first step.
    assert!(cases >= count / 2 && ended > count / 8 && ended < cases);
    let count = count as u64;
    assert!(all.released > count / 8 && all.delivered > count / 4 && all.copied > count / 4);
}
