//! A program's end of a queue pair: it posts messages of all kinds, takes what comes, gives it back, and posts receives,
//! one action in each step. What it posts it tells the model, and what it takes it compares with the model.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords, lap_of, set_inline, with_lap};
use pushgate_link::producer::Producer;

use super::memory::Guarded;
use super::model::{Flow, Message, Receive, Side, Way};
use super::plan::{EndPlan, MS, Posts, Reader, US};
use super::random::{Random, mix};
use super::violation::{Violation, broken};

const UNIT: usize = abi::PUSHGATE_UNIT as usize;
/// Stretches of the region that messages go out of.
const SOURCES: usize = 6;
/// WQEs that are published word by word at a time.
const PARTIAL: usize = 3;

/// What a program knows of its queue pair.
pub(super) struct Facts {
    pub(super) plan: EndPlan,
    /// What the peer posts, its signals, the key and the bytes of its region.
    pub(super) peer_posts: Posts,
    pub(super) peer_signals: u32,
    pub(super) rkey: u32,
    pub(super) region: u32,
    /// The key of the region that messages go out of, and whether SENDs and PUTs may.
    pub(super) lkey: u32,
    pub(super) region_sends: bool,
    pub(super) region_puts: bool,
    /// The key of the buffers, and the bytes of each.
    pub(super) buffers: u32,
    pub(super) buffer: u32,
    /// Longest payload of a SEND and of a PUT.
    pub(super) longest_send: u32,
    pub(super) longest_put: u32,
}

/// A message that waits for credit.
#[derive(Clone, Copy, Debug)]
struct Draft {
    opcode: Opcode,
    way: Way,
    length: u32,
    offset: u32,
    signal: Option<u32>,
    signaled: bool,
    wordwise: bool,
}

/// A WQE with words that are not stored yet.
struct Partial {
    slot: u64,
    words: RecordWords,
    /// A bit for each word that is missing.
    missing: u8,
}

/// What a step of a program did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Did {
    Nothing,
    Posted,
    Padded,
    Stored,
    Woke,
    Took,
    Released,
    Completed,
    PostedReceive,
}

/// The program of one end.
pub(super) struct Program {
    pub(super) facts: Facts,
    pub(super) producer: Producer,
    pub(super) source: Guarded,
    random: Random,
    seed: u64,
    /// Messages to be posted.
    pub(super) left: u32,
    next: Option<Draft>,
    partial: Vec<Partial>,
    /// Something was published, posted or given back since the engine was rung.
    pub(super) owes: bool,
    /// Flags and places of the receive records that are held.
    held: VecDeque<(u8, u32)>,
    next_release: u64,
    free: Vec<u16>,
    scratch: Vec<u8>,
    /// For each stretch of the source: one more than the slot that reads it.
    sources: [u64; SOURCES],
    /// A slot that was taken and is never published.
    hole: Option<u64>,
    /// Actions in a row that found nothing to do.
    idle: u32,
    /// It does nothing before this time.
    pub(super) stopped_until: u64,
}

/// Bytes of the region that messages go out of, for payload of at most `longest` bytes.
pub(super) fn source_bytes(longest: u32) -> usize {
    (longest as usize).next_multiple_of(8).max(8) * SOURCES
}

impl Program {
    pub(super) fn new(
        facts: Facts,
        producer: Producer,
        source: Guarded,
        seed: u64,
        schedule: Random,
    ) -> Self {
        let buffers = 1u16 << facts.plan.geometry.rx_log;
        Program {
            left: facts.plan.messages,
            producer,
            random: schedule,
            seed,
            next: None,
            partial: Vec::with_capacity(PARTIAL),
            owes: false,
            held: VecDeque::with_capacity(buffers.into()),
            next_release: 0,
            free: (0..if facts.plan.posts == Posts::Nothing { 0 } else { buffers }).collect(),
            scratch: vec![0; facts.longest_send.max(facts.longest_put).max(64) as usize],
            sources: [0; SOURCES],
            hole: None,
            idle: 0,
            stopped_until: 0,
            source,
            facts,
        }
    }

    /// How long until the next step, nanoseconds.
    pub(super) fn pause(&mut self, did: Did) -> u64 {
        self.idle = if did == Did::Nothing { (self.idle + 1).min(14) } else { 0 };
        let pace = self.random.time(self.facts.plan.pace);
        if self.idle < 4 { pace } else { (pace << (self.idle - 3)).min(pace.max(2 * MS)) }
    }

    /// Something has changed: it need not wait as long as it meant to.
    pub(super) fn attend(&mut self) {
        self.idle = 0;
    }

    /// Everything was posted and published.
    pub(super) fn is_done(&self) -> bool {
        self.left == 0 && self.partial.is_empty() && self.next.is_none() && !self.owes
    }

    /// Slots that were published in a row.
    pub(super) fn published(&self) -> u64 {
        let missing = self.partial.iter().map(|p| p.slot).chain(self.hole);
        missing.min().unwrap_or(u64::MAX).min(self.producer.slots())
    }

    /// One action. `out` is what this end sends, `inward` what it receives; `own` and `peer` are both ends' memory.
    pub(super) fn step(
        &mut self,
        now: u64,
        (out, inward): (&mut Flow, &mut Flow),
        own: &Side,
    ) -> Result<Did, Violation> {
        const ACTIONS: u64 = 7;
        // Publishing, taking and giving back come first more often than the rest.
        let first = [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6][self.random.below(11) as usize];
        for i in 0..ACTIONS {
            let did = match (first + i) % ACTIONS {
                0 => self.post(out)?,
                1 => self.take(inward, own)?,
                2 => self.release(now, inward, own)?,
                3 => self.poll_cq(out)?,
                4 => self.post_receive(inward)?,
                5 => self.store(),
                _ => self.wake(),
            };
            if did != Did::Nothing {
                return Ok(did);
            }
        }
        Ok(Did::Nothing)
    }

    /// After the end: completions alone.
    pub(super) fn wind_down(&mut self, code: u8, out: &mut Flow) -> Result<Did, Violation> {
        let Some(completion) = self.producer.poll_cq() else { return Ok(Did::Nothing) };
        out.completed(completion, Some(code))?;
        Ok(Did::Completed)
    }

    // ---------------------------------------------------------------- sending

    /// A length up to `limit`: often one at an edge.
    fn length(&mut self, limit: u32) -> u32 {
        let units = limit as u64 / UNIT as u64 + 1;
        let length = match self.random.below(12) {
            0 => 0,
            1 | 2 => self.random.below(9),
            3 => self.random.below(41),
            4 => self.random.below(units) * UNIT as u64,
            5 => self.random.below(units) * UNIT as u64 + 1,
            6 => (self.random.below(units) * UNIT as u64).saturating_sub(1),
            7 => limit.into(),
            8 => self.random.within(1, 300),
            _ => self.random.below(limit as u64 + 1),
        };
        length.min(limit as u64) as u32
    }

    fn draft(&mut self) -> Draft {
        let plan = &self.facts.plan;
        let ([puts, signals, nops], [inline, region]) = (plan.mix, plan.ways);
        let (signaled, wordwise) = (plan.signaled, plan.wordwise);
        let kind = self.random.below(100);
        let (opcode, region_allowed, longest, most_inline) = match kind {
            _ if kind < puts => {
                (Opcode::Put, self.facts.region_puts, self.facts.longest_put, abi::PUSHGATE_INLINE_PUT)
            }
            _ if kind < puts + signals => (Opcode::Signal, false, 0, 0),
            _ if kind < puts + signals + nops => (Opcode::Nop, false, 0, 0),
            _ => (Opcode::Send, self.facts.region_sends, self.facts.longest_send, abi::PUSHGATE_INLINE_SEND),
        };
        let way = match self.random.below(100) {
            _ if most_inline == 0 => Way::Inline,
            n if n < inline => Way::Inline,
            n if n < inline + region && region_allowed => Way::Region,
            _ => Way::Window,
        };
        let window = (UNIT as u32) << self.facts.plan.geometry.window_log;
        let limit = match way {
            Way::Inline => longest.min(most_inline),
            Way::Window => longest.min(window),
            Way::Region => longest,
        };
        let mut length = if most_inline == 0 { 0 } else { self.length(limit) };
        let mut offset = 0;
        if opcode == Opcode::Put {
            // Whole words, so that each word of the region tells whose it is.
            length &= !7;
            offset = 8 * self.random.below((self.facts.region - length) as u64 / 8 + 1) as u32;
        }
        let signal = match opcode {
            Opcode::Signal => true,
            Opcode::Put => self.random.percent(60),
            _ => false,
        };
        Draft {
            opcode,
            way,
            length,
            offset,
            signal: signal.then(|| self.random.below(self.facts.peer_signals as u64) as u32),
            signaled: self.random.percent(signaled),
            wordwise: self.random.percent(wordwise),
        }
    }

    /// The tag of SEND number `n` of this program, or of its peer.
    fn tag(seed: u64, n: u64, posts: Posts) -> u32 {
        match posts {
            // Few, so that several SENDs have the same.
            Posts::Tags => 40 + (mix(seed ^ n) % 4) as u32,
            _ => (mix(seed ^ n) % 1000) as u32,
        }
    }

    /// How many units of the window are used from `slot` on: all of them half of the time, else any number, which stays the
    /// same for 32 slots.
    fn usable(&self, slot: u64) -> u64 {
        let any = mix(self.seed ^ (slot >> 5) ^ 0x75);
        let ring = 1 << self.facts.plan.geometry.window_log;
        if any & 1 == 0 { ring } else { 1 + (any >> 1) % ring }
    }

    fn post(&mut self, out: &mut Flow) -> Result<Did, Violation> {
        if self.left == 0 || self.partial.len() == PARTIAL {
            return Ok(Did::Nothing);
        }
        let mut draft = match self.next.take() {
            Some(draft) => draft,
            None => self.draft(),
        };
        let stretch = self.source.bytes() / SOURCES;
        let mut at = 0;
        if draft.way == Way::Region {
            let free = self.sources.iter().position(|slot| *slot <= out.credit());
            match free {
                Some(free) if draft.length as usize <= stretch => at = free,
                _ => {
                    draft.way = Way::Window;
                    draft.length = draft.length.min((UNIT as u32) << self.facts.plan.geometry.window_log);
                }
            }
        }
        let units = if draft.way == Way::Window { (draft.length as u64).div_ceil(UNIT as u64) } else { 0 };
        let before = self.producer.slots();
        let usable = self.usable(before);
        self.producer.use_window(usable);
        let reservation = self.producer.reserve(units, draft.signaled);
        let padded = self.producer.slots() > before + reservation.is_some() as u64;
        if padded {
            out.padded()?;
        }
        let Some(reservation) = reservation else {
            self.next = Some(draft);
            return Ok(if padded { Did::Padded } else { Did::Nothing });
        };
        if units <= usable && reservation.place + units > usable {
            return Err(broken(
                1,
                format!("{units} units at unit {} of {usable} that are used", reservation.place),
            ));
        }
        let number = out.messages.len() as u32;
        let wr_id = mix(number as u64 ^ self.seed << 7) as u32;
        let tag = Self::tag(self.seed, out.sends().into(), self.facts.peer_posts);
        let message = (draft.opcode != Opcode::Nop).then(|| Message {
            tag: if draft.opcode == Opcode::Send { tag } else { 0 },
            sends: out.sends(),
            offset: draft.offset,
            signal: draft.signal,
            ..Flow::message(draft.opcode, draft.way, draft.length)
        });
        out.reserved(reservation, units, message, draft.signaled, wr_id)?;
        self.left -= 1;
        // The payload, then the WQE.
        let length = draft.length as usize;
        let first = if draft.opcode == Opcode::Put { draft.offset / 8 } else { 0 };
        let mut record = Record {
            flags: if draft.signaled { Record::SIGNALED } else { 0 },
            id: wr_id,
            length: draft.length,
            tag,
            place: reservation.place as u32,
            place_offset: units,
            signal: draft.signal.unwrap_or(0),
            signal_value: number as u64 + 1,
            ..Record::new(draft.opcode)
        };
        if draft.opcode == Opcode::Put {
            record.flags |= if draft.signal.is_some() { Record::WITH_SIGNAL } else { 0 };
            (record.rkey, record.remote_offset) = (self.facts.rkey, draft.offset.into());
        }
        out.fill(number, first, &mut self.scratch[..length]);
        let bytes = &self.scratch[..length];
        let words = match draft.way {
            _ if matches!(draft.opcode, Opcode::Nop | Opcode::Signal) => record.encode(0),
            Way::Inline => {
                let mut words = Record { flags: record.flags | Record::INLINE, ..record }.encode(0);
                set_inline(&mut words, draft.opcode, bytes);
                words
            }
            Way::Window => {
                // SAFETY: a slice can be read.
                unsafe { self.producer.push(reservation.place, bytes.as_ptr(), length) };
                record.encode(0)
            }
            Way::Region => {
                self.sources[at] = reservation.slot + 1;
                let to = (self.source.address() + at * stretch) as *mut u8;
                // SAFETY: the stretch lies in the region, and no message that is under way reads it: its slot was given
                // back.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
                let place_offset = (at * stretch) as u64;
                Record {
                    flags: record.flags | Record::REGION,
                    place: self.facts.lkey,
                    place_offset,
                    ..record
                }
                .encode(0)
            }
        };
        if draft.wordwise {
            self.partial.push(Partial { slot: reservation.slot, words, missing: 0xff });
        } else {
            self.producer.publish(reservation.slot, &words);
            self.owes = true;
        }
        Ok(Did::Posted)
    }

    /// Stores one word of a WQE that is published word by word. P2: its words become visible in any order.
    fn store(&mut self) -> Did {
        if self.partial.is_empty() {
            return Did::Nothing;
        }
        let at = self.random.below(self.partial.len() as u64) as usize;
        let p = &mut self.partial[at];
        let log = self.facts.plan.geometry.slots_log;
        let words = with_lap(&p.words, lap_of(p.slot, log));
        let first = (p.slot as usize & ((1 << log) - 1)) * abi::PUSHGATE_RECORD_WORDS as usize;
        let nth = self.random.below(p.missing.count_ones().into()) as usize;
        let i = (0..8).filter(|i| p.missing & 1 << i != 0).nth(nth).expect("a word is missing");
        self.producer.wqe_ring()[first + i].store(words[i], Ordering::Release);
        p.missing &= !(1 << i);
        if p.missing == 0 {
            self.partial.swap_remove(at);
            self.owes = true;
        }
        Did::Stored
    }

    fn poll_cq(&mut self, out: &mut Flow) -> Result<Did, Violation> {
        let Some(completion) = self.producer.poll_cq() else { return Ok(Did::Nothing) };
        let ended = self.producer.status().map(|s| s.code);
        out.completed(completion, ended)?;
        Ok(Did::Completed)
    }

    fn wake(&mut self) -> Did {
        if !std::mem::take(&mut self.owes) {
            return Did::Nothing;
        }
        self.producer.wake();
        Did::Woke
    }

    // -------------------------------------------------------------- receiving

    fn take(&mut self, inward: &mut Flow, own: &Side) -> Result<Did, Violation> {
        if inward.receiver.taken == inward.receiver.shown {
            return Ok(Did::Nothing);
        }
        let Some(m) = self.producer.try_recv() else {
            return Err(broken(
                6,
                format!("rank {}: receive record {} was there, and is not", own.rank, inward.receiver.taken),
            ));
        };
        self.held.push_back((m.flags, m.place));
        inward.receiver.taken += 1;
        Ok(Did::Took)
    }

    fn release(&mut self, now: u64, inward: &mut Flow, own: &Side) -> Result<Did, Violation> {
        if self.held.is_empty() || now < self.next_release {
            return Ok(Did::Nothing);
        }
        let held = self.held.len() as u64;
        let (count, pause) = match self.facts.plan.reader {
            Reader::Prompt => (self.random.within(1, held), 0),
            Reader::Slow => (1, self.random.time(400 * US)),
            Reader::Bursts => (held, self.random.time(MS)),
        };
        self.next_release = now + pause;
        for _ in 0..count {
            let (flags, place) = self.held.pop_front().expect("counted");
            let number = inward.number_of_send(inward.receiver.released);
            if flags & Record::INLINE == 0 {
                // P1, P5: until now nobody has written there.
                inward.check_payload(5, number, flags, place, own)?;
            }
            if flags & Record::BUFFER != 0 {
                self.free.push(inward.receiver.receives[place as usize].buffer);
            }
            inward.receiver.released += 1;
        }
        self.producer.release(count);
        self.owes = true;
        Ok(Did::Released)
    }

    fn post_receive(&mut self, inward: &mut Flow) -> Result<Did, Violation> {
        let ring = 1u64 << self.facts.plan.geometry.rx_log;
        let number = inward.receiver.receives.len() as u64;
        if self.facts.plan.posts == Posts::Nothing || number - inward.receiver.released as u64 >= ring {
            return Ok(Did::Nothing);
        }
        let Some(buffer) = self.free.pop() else { return Ok(Did::Nothing) };
        let tag = match self.facts.plan.posts {
            Posts::AnyTag => abi::PUSHGATE_ANY_TAG,
            _ => {
                // In blocks of as many as can be out at once; in a block in another order than the SENDs.
                let block = ring.min(8);
                let send = number / block * block + (number * 5 + 3) % block;
                Self::tag(self.peer_seed(), send, Posts::Tags)
            }
        };
        let bytes = self.facts.buffer;
        if !self.producer.post_recv(self.facts.buffers, buffer as u64 * bytes as u64, bytes, tag) {
            return Err(broken(1, format!("receive {number} found no room")));
        }
        inward.receiver.receives.push(Receive::new(tag, buffer, bytes));
        self.owes = true;
        Ok(Did::PostedReceive)
    }

    fn peer_seed(&self) -> u64 {
        self.seed ^ 1
    }

    // ----------------------------------------------------------------- faults

    /// Posts nothing more.
    pub(super) fn give_up(&mut self) {
        (self.left, self.next) = (0, None);
    }

    /// Takes a slot that is never published, and a slot after it that is. False without credit.
    pub(super) fn make_hole(&mut self) -> bool {
        if self.hole.is_some() || self.producer.status().is_some() {
            return false;
        }
        let Some(hole) = self.producer.reserve(0, false) else { return false };
        self.hole = Some(hole.slot);
        if let Some(behind) = self.producer.reserve(0, false) {
            self.producer.publish(behind.slot, &Record::new(Opcode::Nop).encode(0));
        } else {
            // The ring has one slot left: a part of the WQE is as good.
            let log = self.facts.plan.geometry.slots_log;
            let first = (hole.slot as usize & ((1 << log) - 1)) * abi::PUSHGATE_RECORD_WORDS as usize;
            let word = with_lap(&Record::new(Opcode::Nop).encode(0), lap_of(hole.slot, log))[0];
            self.producer.wqe_ring()[first].store(word, Ordering::Release);
        }
        self.producer.wake();
        true
    }

    /// Writes something wrong where a program may write.
    pub(super) fn lie(&mut self, seed: u64, guard: usize) -> &'static str {
        let mut random = Random::new(seed, 5);
        let log = self.facts.plan.geometry.slots_log;
        let slot = self.producer.slots();
        let put =
            Record { flags: Record::INLINE, length: 16, rkey: self.facts.rkey, ..Record::new(Opcode::Put) };
        let beyond = (self.facts.region as u64 - 8) + 8 * random.below(guard as u64 / 8 - 2);
        let (what, record) = match random.below(12) {
            0 | 1 => ("a PUT beyond the region", Record { remote_offset: beyond, ..put }),
            2 => ("a PUT to a key that names nothing", Record { rkey: random.next() as u32 | 1, ..put }),
            3 => ("a SEND at another unit", {
                let place = random.next() as u32;
                Record { length: 100, place, place_offset: 2, ..Record::new(Opcode::Send) }
            }),
            4 => ("a SEND longer than its units", {
                let place = (self.producer.units() & ((1 << self.facts.plan.geometry.window_log) - 1)) as u32;
                Record { length: 65, place, place_offset: 1, ..Record::new(Opcode::Send) }
            }),
            5 => ("a signal that the peer does not have", {
                let signal = self.facts.peer_signals + random.below(1000) as u32;
                Record { signal, signal_value: 7, ..Record::new(Opcode::Signal) }
            }),
            6 => ("a region that the program does not have", {
                let place = random.next() as u32 | 1;
                Record { flags: Record::REGION, place, length: 8, ..Record::new(Opcode::Send) }
            }),
            7 => {
                let words: RecordWords = std::array::from_fn(|_| random.next());
                let words = with_lap(&words, lap_of(slot, log));
                // No region of the peer may be named by accident.
                let words = [
                    words[0],
                    words[1],
                    words[2] & !0xffff_ffff | 1,
                    words[3],
                    words[4],
                    words[5],
                    words[6],
                    words[7],
                ];
                self.store_raw(slot, &words);
                return "a WQE of random words";
            }
            8 => {
                let words: RecordWords = std::array::from_fn(|_| random.next());
                self.store_raw(slot, &words);
                return "a torn WQE";
            }
            9 | 10 => {
                let consumed = self.producer.consumed();
                consumed.store(
                    consumed.load(Ordering::Relaxed).wrapping_add(1 + random.next() % 1000),
                    Ordering::Release,
                );
                return "receive records given back that were not there";
            }
            _ => {
                let offset = self.facts.buffer as u64 * (1 << self.facts.plan.geometry.rx_log) - 8;
                self.producer.post_recv_unasked(
                    self.facts.buffers,
                    offset,
                    self.facts.buffer.max(16),
                    abi::PUSHGATE_ANY_TAG,
                );
                return "a posted receive beyond the buffers";
            }
        };
        let mut words = record.encode(0);
        if record.has(Record::INLINE) {
            set_inline(&mut words, record.opcode, &[0xee; 16]);
        }
        self.producer.publish(slot, &words);
        what
    }

    fn store_raw(&mut self, slot: u64, words: &RecordWords) {
        let log = self.facts.plan.geometry.slots_log;
        let first = (slot as usize & ((1 << log) - 1)) * abi::PUSHGATE_RECORD_WORDS as usize;
        for (to, word) in self.producer.wqe_ring()[first..].iter().zip(words) {
            to.store(*word, Ordering::Release);
        }
    }
}
