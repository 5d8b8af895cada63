//! Streams of memory between the two ends of a queue pair, for the unit tests and the simulator: a [`Wire`] and a
//! [`Meeting`] that misbehave as a seed says.
//!
//! A call moves as much as was drawn, down to one byte. Bytes stay under way for some time, and the streams of a link run ahead
//! of each other. A wire may work in the background, so that memory is read and written between the calls, and may read what it
//! has taken until it settles that. A stream may end, or break at any byte.
//!
//! The streams hold their user to the contract of [`Wire`]: memory that a wire may still read stays as it is, nothing is asked of a
//! wire that has finished, and no wire is dropped that may still touch memory. [`Net::wrong`] says what was found.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pushgate_door::linger::Lingered;

use super::frame::{HEAD, Head, Kind, MOST_HEAD};
use super::host::LINGER;
use super::meeting::{Meeting, Place};
use super::wire::{Piece, Wire};
use crate::random::Random;

/// How the streams of a link behave.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// The wires answer later for what a call began.
    pub(crate) background: bool,
    /// The wires read what they have taken for some time.
    pub(crate) late: bool,
    /// The most bytes that a call moves.
    pub(crate) most: u64,
    /// Bytes of one stream under way at a time.
    pub(crate) room: u64,
    /// How long bytes usually stay under way, and memory in use, nanoseconds.
    pub(crate) usual: u64,
}

impl Habits {
    /// Streams that move all that there is at once.
    pub(crate) const PLAIN: Habits =
        Habits { background: false, late: false, most: u64::MAX, room: 1 << 20, usual: 0 };

    /// Some habits.
    pub(crate) fn drawn(random: &mut Random) -> Habits {
        Habits {
            background: random.one_in(3),
            late: random.one_in(2),
            // With one byte in each call a message of 8 KiB, cut into parts of 16 bytes, takes half a minute of an engine that looks
            // every millisecond: longer than the simulator waits for progress.
            most: random.of(&[16, 40, 700, 5_000, u64::MAX]),
            room: random.of(&[200, 3_000, 1 << 16]),
            usual: random.of(&[0, 500, 5_000, 50_000]),
        }
    }
}

/// Where the two ends of a queue pair meet, link after link.
#[derive(Clone)]
pub struct Net(Arc<Mutex<State>>);

struct State {
    random: Random,
    /// `None`: each link has habits of its own.
    habits: Option<Habits>,
    /// Attempts to meet that fail, before one succeeds.
    refused: u32,
    keeps: bool,
    offers: u64,
    /// Ends that wait, by token: the link that was dialled, once it was.
    waiting: BTreeMap<String, Option<Shared>>,
    /// The link that was made last.
    latest: Weak<Mutex<Streams>>,
    links: u64,
    wrong: Wrong,
    /// Both ends are of one process.
    lingered: Arc<Lingered>,
}

type Shared = Arc<Mutex<Streams>>;
type Wrong = Arc<Mutex<Option<String>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Net {
    /// Links with these habits, or with habits that are drawn for each.
    pub fn new(random: Random, habits: Option<Habits>) -> Self {
        Net(Arc::new(Mutex::new(State {
            random,
            habits,
            refused: 0,
            keeps: false,
            offers: 0,
            waiting: BTreeMap::new(),
            latest: Weak::new(),
            links: 0,
            wrong: Wrong::default(),
            lingered: Arc::new(Lingered::new(LINGER.0, LINGER.1)),
        })))
    }

    /// How end 0 or end 1 meets the other one. It reads the time at `time`, nanoseconds.
    pub fn meeting(&self, end: usize, time: &Arc<AtomicU64>) -> Box<dyn Meeting> {
        let lingered = lock(&self.0).lingered.clone();
        let (net, time) = (self.clone(), time.clone());
        Box::new(NetMeeting { net, end, time, lingered, token: None, coming: None })
    }

    /// What an end has done that the contract of its wire forbids.
    pub fn wrong(&self) -> Option<String> {
        let wrong = lock(&self.0).wrong.clone();
        lock(&wrong).take()
    }

    /// The streams that wait for end 1, which takes them no other way.
    #[cfg(test)]
    pub(crate) fn bare(&self, time: &Arc<AtomicU64>) -> Option<Box<dyn Wire>> {
        let mut net = lock(&self.0);
        let streams = net.waiting.values_mut().find_map(Option::take)?;
        Some(Box::new(NetWire { streams, end: 1, time: time.clone(), wrong: net.wrong.clone() }))
    }

    /// What goes over links from now on is kept.
    #[cfg(test)]
    pub(crate) fn keep_what_is_sent(&self) {
        lock(&self.0).keeps = true;
    }

    /// What an end has sent over each stream of the latest link.
    #[cfg(test)]
    pub(crate) fn sent<const N: usize>(&self, end: usize) -> [Vec<u8>; N] {
        let latest = lock(&self.0).latest.upgrade().expect("there is a link");
        let mut kept = lock(&latest).kept[end].values().cloned().collect::<Vec<_>>().into_iter();
        std::array::from_fn(|_| kept.next().unwrap_or_default())
    }

    /// One stream of the latest link ends in order.
    #[cfg(test)]
    pub(crate) fn end_one(&self, end: usize, stream: usize) {
        let latest = lock(&self.0).latest.upgrade().expect("there is a link");
        lock(&latest).ways[end][stream].closed = true;
    }

    /// Links that were made.
    pub(crate) fn links(&self) -> u64 {
        lock(&self.0).links
    }

    /// The next attempts to meet fail.
    pub fn refuse(&self, attempts: u32) {
        lock(&self.0).refused = attempts;
    }

    /// The latest link breaks when `bytes` more bytes have come from `end` over one of its streams.
    pub fn break_behind(&self, end: usize, bytes: u64) {
        let latest = lock(&self.0).latest.upgrade();
        if let Some(streams) = latest {
            let s = &mut *lock(&streams);
            let n = s.random.below(s.ways[end].len() as u64) as usize;
            let way = &mut s.ways[end][n];
            way.cut = Some(way.cut.unwrap_or(u64::MAX).min(way.arrived + bytes));
        }
    }

    /// Over the latest link all that an end sends from now on may be garbage.
    pub fn lie(&self, end: usize, seed: u64) {
        let latest = lock(&self.0).latest.upgrade();
        if let Some(streams) = latest {
            let s = &mut *lock(&streams);
            let n = s.random.below(s.ways[end].len() as u64) as usize;
            s.ways[end][n].liar = Some(Random::new(seed, 9));
        }
    }
}

/// How one end meets the other.
struct NetMeeting {
    net: Net,
    end: usize,
    time: Arc<AtomicU64>,
    lingered: Arc<Lingered>,
    token: Option<String>,
    coming: Option<Coming>,
}

/// Streams on their way.
struct Coming {
    /// The place of the end that waits.
    token: String,
    streams: usize,
    due: u64,
    fails: bool,
}

impl NetMeeting {
    fn now(&self) -> u64 {
        self.time.load(Ordering::Relaxed)
    }
}

impl Meeting for NetMeeting {
    fn offer(&mut self) -> Result<Place, String> {
        self.give_up();
        let mut net = lock(&self.net.0);
        let touches = net.latest.upgrade().is_some_and(|streams| lock(&streams).touches_memory(self.end));
        if touches {
            // The peer would replay messages into memory that the last link still writes.
            let rule = format!("end {}: it offers its next link before the last one has stopped", self.end);
            lock(&net.wrong).get_or_insert(rule);
        }
        net.offers += 1;
        let token = format!("{:032x}", net.offers);
        net.waiting.insert(token.clone(), None);
        drop(net);
        self.token = Some(token.clone());
        Ok(Place { addresses: vec![([127, 0, 0, 1], 1).into()], key: "0".repeat(64), token })
    }

    fn begin(&mut self, peer: &Place, streams: usize) -> Result<(), String> {
        let own = self.token.clone().ok_or("no place was offered")?;
        let mut net = lock(&self.net.0);
        let fails = self.end == 0 && net.refused > 0;
        net.refused -= fails as u32;
        let token = if self.end == 0 { peer.token.clone() } else { own };
        let usual = net.habits.map_or(20_000, |h| h.usual);
        let due = self.time.load(Ordering::Relaxed) + if usual > 0 { net.random.time(usual) } else { 0 };
        drop(net);
        self.coming = Some(Coming { token, streams, due, fails });
        Ok(())
    }

    fn met(&mut self) -> Option<Result<Box<dyn Wire>, String>> {
        let now = self.now();
        let coming = self.coming.as_ref().filter(|coming| coming.due <= now)?;
        let net = &mut *lock(&self.net.0);
        if coming.fails {
            self.coming = None;
            return Some(Err("connection refused".into()));
        }
        let shared = if self.end == 0 {
            // An end that waits no more is not met.
            let place = net.waiting.get_mut(&coming.token)?;
            let habits = net.habits.unwrap_or_else(|| Habits::drawn(&mut net.random));
            let random = Random::new(net.random.next(), 0);
            let mut streams = Streams::new(coming.streams, habits, random);
            if net.keeps {
                streams.kept =
                    [(); 2].map(|()| (0..coming.streams).map(|stream| (stream, Vec::new())).collect());
            }
            let shared = Arc::new(Mutex::new(streams));
            *place = Some(shared.clone());
            net.latest = Arc::downgrade(&shared);
            net.links += 1;
            shared
        } else {
            let shared = net.waiting.get_mut(&coming.token)?.take()?;
            net.waiting.remove(&coming.token);
            shared
        };
        let (time, wrong) = (self.time.clone(), net.wrong.clone());
        (self.coming, self.token) = (None, None);
        Some(Ok(Box::new(NetWire { streams: shared, end: self.end, time, wrong })))
    }

    fn give_up(&mut self) {
        self.coming = None;
        if let Some(token) = self.token.take() {
            let dialled = lock(&self.net.0).waiting.remove(&token).flatten();
            // The other end has streams that nobody takes.
            dialled.into_iter().for_each(|streams| lock(&streams).reset());
        }
    }

    fn lingered(&self) -> &Lingered {
        &self.lingered
    }
}

impl Drop for NetMeeting {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Memory that a wire may still read: where, and what has to lie there.
struct Held {
    pieces: Vec<(Piece, Box<[u8]>)>,
    /// The stream's bytes up to the last one of these.
    end: u64,
    until: u64,
}

impl Held {
    /// Copies the first `bytes` of these pieces.
    ///
    /// # Safety
    ///
    /// The pieces are mapped for reading.
    unsafe fn of(pieces: &[Piece], mut bytes: usize, until: u64) -> Self {
        let mut held = Vec::new();
        for piece in pieces {
            let piece = Piece { bytes: piece.bytes.min(bytes), ..*piece };
            bytes -= piece.bytes;
            let mut copy = vec![0; piece.bytes].into_boxed_slice();
            // SAFETY: mapped, as our caller promises; the copy is this function's own.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.address as *const u8, copy.as_mut_ptr(), piece.bytes);
            }
            held.push((piece, copy));
        }
        Held { pieces: held, end: 0, until }
    }

    /// Whether the memory has changed since.
    ///
    /// # Safety
    ///
    /// The pieces are mapped for reading still.
    unsafe fn has_changed(&self) -> bool {
        self.pieces.iter().any(|(piece, copy)| {
            // SAFETY: as our caller promises; each byte is read by itself, and no reference to it is made.
            (0..piece.bytes).any(|i| unsafe { ((piece.address + i) as *const u8).read_volatile() } != copy[i])
        })
    }

    fn bytes(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|(_, copy)| copy.iter().copied()).collect()
    }
}

/// One direction of one stream.
#[derive(Default)]
struct Way {
    /// Bytes that were sent, and when they arrive.
    under_way: VecDeque<(u64, Vec<u8>)>,
    /// Bytes of the first of these that have arrived.
    read: usize,
    /// Bytes that the sender's wire has taken, has settled, and that have arrived.
    taken: u64,
    settled: u64,
    arrived: u64,
    /// What the sender's wire has begun to send, and will answer for.
    sending: Option<Held>,
    /// What it has taken and may still read.
    held: VecDeque<Held>,
    /// Where the receiver's wire puts what comes, and how much it has put there.
    receiving: Option<(Vec<Piece>, usize)>,
    /// The stream breaks after this number of bytes.
    cut: Option<u64>,
    /// The sender has closed the stream in order.
    closed: bool,
    /// The frames that go this way, for one who lies.
    follows: Follows,
    liar: Option<Random>,
}

impl Way {
    fn bytes(&self) -> usize {
        self.under_way.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() - self.read
    }

    /// How many bytes can be received now.
    fn available(&self, now: u64) -> usize {
        let due = self.under_way.iter().take_while(|(at, _)| *at <= now);
        let bytes = due.map(|(_, bytes)| bytes.len()).sum::<usize>().saturating_sub(self.read);
        bytes.min(self.cut.map_or(usize::MAX, |cut| (cut - self.arrived) as usize))
    }

    /// Moves at most `most` bytes to these pieces. Returns how many.
    ///
    /// # Safety
    ///
    /// The pieces are mapped for writing and free of Rust references.
    unsafe fn deliver(&mut self, pieces: &[Piece], most: usize, now: u64) -> usize {
        let n = pieces.iter().map(|p| p.bytes).sum::<usize>().min(self.available(now)).min(most);
        let (mut left, mut at, mut pieces) = (n, 0, pieces.iter());
        let mut piece = pieces.next();
        while left > 0 {
            let Some(p) = piece.filter(|p| at < p.bytes) else {
                (piece, at) = (pieces.next(), 0);
                continue;
            };
            let (_, chunk) = &self.under_way[0];
            let step = left.min(p.bytes - at).min(chunk.len() - self.read);
            // SAFETY: the target lies in the piece, as our caller promises; the source is a chunk of this stream.
            unsafe {
                let from = chunk.as_ptr().add(self.read);
                std::ptr::copy_nonoverlapping(from, (p.address + at) as *mut u8, step);
            }
            (left, at, self.read) = (left - step, at + step, self.read + step);
            if self.read == chunk.len() {
                self.under_way.pop_front();
                self.read = 0;
            }
        }
        self.arrived += n as u64;
        n
    }
}

/// The streams of one link: for each end the ways from there.
struct Streams {
    ways: [Vec<Way>; 2],
    habits: Habits,
    random: Random,
    /// All streams are broken.
    broken: bool,
    /// An end's wire was asked to stop: calls until it has.
    stopping: [Option<u64>; 2],
    /// What each end has sent over each stream, if that is kept.
    kept: [BTreeMap<usize, Vec<u8>>; 2],
    stopped: [bool; 2],
    finished: [bool; 2],
}

impl Streams {
    fn new(streams: usize, habits: Habits, random: Random) -> Self {
        let ways = [(); 2].map(|()| (0..streams).map(|_| Way::default()).collect());
        Streams {
            ways,
            habits,
            random,
            broken: false,
            stopping: [None; 2],
            kept: Default::default(),
            stopped: [false; 2],
            finished: [false; 2],
        }
    }

    fn reset(&mut self) {
        self.broken = true;
    }

    /// Whether the wire of an end may still read or write memory.
    fn touches_memory(&self, end: usize) -> bool {
        let sends = self.ways[end].iter().any(|way| way.sending.is_some() || !way.held.is_empty());
        let receives = self.ways[1 - end].iter().any(|way| way.receiving.is_some());
        !self.stopped[end] && (sends || receives)
    }

    fn later(&mut self, now: u64) -> u64 {
        if self.habits.usual > 0 { now + self.random.time(self.habits.usual) } else { now }
    }

    /// The part of `bytes` bytes that one call moves.
    fn some(&mut self, bytes: usize) -> usize {
        let most = (bytes as u64).min(self.habits.most);
        if self.habits.most == u64::MAX || most == 0 {
            most as usize
        } else {
            self.random.within(1, most) as usize
        }
    }

    /// What wires do in the background, at this time.
    fn work(&mut self, now: u64) {
        if self.broken {
            return;
        }
        for way in self.ways.iter_mut().flatten() {
            if let Some((pieces, 0)) = &way.receiving {
                let pieces = pieces.clone();
                // SAFETY: the receiver's wire was promised that memory until it has answered for the call, or has stopped;
                // then `receiving` is gone.
                let n = unsafe { way.deliver(&pieces, usize::MAX, now) };
                way.receiving = Some((pieces, n));
            }
        }
    }

    /// Bytes leave.
    fn send(&mut self, end: usize, stream: usize, bytes: Vec<u8>, now: u64) {
        let at = self.later(now);
        if let Some(kept) = self.kept[end].get_mut(&stream) {
            kept.extend(&bytes);
        }
        let way = &mut self.ways[end][stream];
        let at = way.under_way.back().map_or(at, |(last, _)| at.max(*last));
        way.taken += bytes.len() as u64;
        let bytes = way.follows.pass(bytes, way.liar.as_mut());
        if !bytes.is_empty() {
            way.under_way.push_back((at, bytes));
        }
    }
}

/// One end's streams of a link.
struct NetWire {
    streams: Shared,
    end: usize,
    time: Arc<AtomicU64>,
    wrong: Wrong,
}

impl NetWire {
    fn now(&self) -> u64 {
        self.time.load(Ordering::Relaxed)
    }

    #[cold]
    fn breaks_a_rule(&self, rule: &str) {
        lock(&self.wrong).get_or_insert_with(|| format!("end {}: {rule}", self.end));
    }
}

fn reset() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl Wire for NetWire {
    fn streams(&self) -> usize {
        lock(&self.streams).ways[0].len()
    }

    unsafe fn send(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let (now, end) = (self.now(), self.end);
        let s = &mut *lock(&self.streams);
        s.work(now);
        if s.finished[end] || s.stopping[end].is_some() {
            self.breaks_a_rule("it sends over a wire that it has ended");
            return Err(reset());
        }
        // The peer's end is gone, or the way there. Streams that the peer has finished are read on beside its engine.
        if s.broken || s.stopped[1 - end] && !s.finished[1 - end] {
            return Err(reset());
        }
        if let Some(sending) = &s.ways[end][stream].sending {
            if pieces.first().map(|p| p.address) != sending.pieces.first().map(|(p, _)| p.address) {
                self.breaks_a_rule(
                    "it names other bytes before the wire has answered for those that it named",
                );
            }
            if sending.until > now {
                return Ok(0);
            }
        } else {
            let all = pieces.iter().map(|p| p.bytes).sum::<usize>();
            let room = (s.habits.room as usize).saturating_sub(s.ways[end][stream].bytes());
            let n = s.some(all.min(room));
            let until = s.later(now);
            // SAFETY: as our caller promises.
            s.ways[end][stream].sending = (n > 0).then(|| unsafe { Held::of(pieces, n, until) });
            if n == 0 || s.habits.background {
                return Ok(0);
            }
        }
        let mut sent = s.ways[end][stream].sending.take().expect("it was begun");
        // SAFETY: until now the pieces are mapped, as the call promised that began this.
        if unsafe { sent.has_changed() } {
            self.breaks_a_rule("memory changes that is being sent");
        }
        let bytes = sent.bytes();
        let n = bytes.len();
        s.send(end, stream, bytes, now);
        let until = s.later(now);
        let way = &mut s.ways[end][stream];
        if s.habits.late {
            (sent.end, sent.until) = (way.taken, way.held.back().map_or(until, |held| held.until.max(until)));
            way.held.push_back(sent);
        } else {
            way.settled = way.taken;
        }
        Ok(n)
    }

    unsafe fn receive(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let (now, end) = (self.now(), self.end);
        let s = &mut *lock(&self.streams);
        s.work(now);
        if s.finished[end] || s.stopping[end].is_some() {
            self.breaks_a_rule("it receives over a wire that it has ended");
            return Err(reset());
        }
        let most = s.some(usize::MAX >> 1);
        let background = s.habits.background;
        let way = &mut s.ways[1 - end][stream];
        let n = match way.receiving.take() {
            Some((before, 0)) => {
                if before != pieces {
                    self.breaks_a_rule(
                        "it names another place before the wire has answered for the one that it named",
                    );
                }
                way.receiving = Some((before, 0));
                0
            }
            Some((_, n)) => n,
            None if background => {
                way.receiving = Some((pieces.to_vec(), 0));
                0
            }
            // SAFETY: as our caller promises.
            None if !s.broken => unsafe { way.deliver(pieces, most, now) },
            None => 0,
        };
        if n > 0 {
            return Ok(n);
        }
        if s.broken {
            return Err(reset());
        }
        if way.cut.is_some_and(|cut| way.arrived >= cut) {
            s.reset();
            return Err(reset());
        }
        if way.closed && way.under_way.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(0)
    }

    fn settled(&self, stream: usize) -> u64 {
        let now = self.now();
        let s = &mut *lock(&self.streams);
        let broken = s.broken;
        let way = &mut s.ways[self.end][stream];
        while way.held.front().is_some_and(|held| held.until <= now || broken) {
            let held = way.held.pop_front().expect("just seen");
            // SAFETY: until it is settled the memory is mapped, as the call promised that sent it.
            if unsafe { held.has_changed() } {
                self.breaks_a_rule("memory changes that was sent and has not settled");
            }
            way.settled = held.end;
        }
        way.settled
    }

    fn stopped(&mut self) -> bool {
        let (now, end) = (self.now(), self.end);
        let s = &mut *lock(&self.streams);
        // Until it has stopped it goes on.
        s.work(now);
        let calls = match s.stopping[end] {
            Some(calls) => calls,
            None => {
                if s.habits.background {
                    s.random.below(4)
                } else {
                    0
                }
            }
        };
        s.stopping[end] = Some(calls.saturating_sub(1));
        if calls > 0 {
            return false;
        }
        for stream in 0..s.ways[0].len() {
            let held = std::mem::take(&mut s.ways[end][stream].held);
            // SAFETY: the wire has not stopped before this call answers, so the memory is mapped.
            if held.iter().any(|held| unsafe { held.has_changed() }) {
                self.breaks_a_rule("memory changes that the wire may still read while it stops");
            }
            (s.ways[end][stream].sending, s.ways[1 - end][stream].receiving) = (None, None);
            s.ways[end][stream].closed = true;
        }
        if !s.finished[end] && s.random.one_in(2) {
            // Bytes were left unread: the peer hears of a reset, which may take bytes from it.
            s.reset();
        }
        s.stopped[end] = true;
        true
    }

    fn finish(&mut self, _patience: Duration) {
        let s = &mut *lock(&self.streams);
        if s.finished[self.end] || s.stopping[self.end].is_some() {
            self.breaks_a_rule("it finishes a wire that it has ended");
        }
        s.finished[self.end] = true;
        s.ways[self.end].iter_mut().for_each(|way| way.closed = true);
    }

    fn prepare_sleep(&mut self, _full: &dyn Fn(usize) -> bool) -> bool {
        // It wakes nobody.
        true
    }

    fn wakes<'a>(&'a self, _fds: &mut Vec<BorrowedFd<'a>>) {}

    fn name(&self) -> &'static str {
        "memory"
    }
}

impl Drop for NetWire {
    fn drop(&mut self) {
        let s = &mut *lock(&self.streams);
        let end = self.end;
        if s.touches_memory(end) {
            self.breaks_a_rule("it drops a wire that may still touch memory");
        }
        if !s.stopped[end] {
            s.reset();
        }
    }
}

/// What goes over a stream, frame by frame, for one who lies on it.
#[derive(Default)]
struct Follows {
    /// The part of a header that has passed, and how much payload is still to pass.
    head: Vec<u8>,
    payload: usize,
    number: u32,
    /// The latest message.
    latest: Option<(Head, [u64; 8])>,
}

impl Follows {
    /// What becomes of bytes that pass.
    fn pass(&mut self, mut bytes: Vec<u8>, liar: Option<&mut Random>) -> Vec<u8> {
        let Some(random) = liar else {
            self.see(&bytes);
            return bytes;
        };
        if random.one_in(2) && self.head.is_empty() && self.payload == 0 {
            // Between two frames: one that is right in its form goes before them.
            let mut forged = forge(self.latest, self.number, random);
            forged.extend(bytes);
            return forged;
        }
        match random.below(4) {
            0 => _ = bytes.pop(),
            1 => bytes.extend((0..random.below(40)).map(|_| random.next() as u8)),
            2 => bytes.reverse(),
            _ => {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        }
        bytes
    }

    fn see(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.payload > 0 {
                let n = self.payload.min(bytes.len());
                (self.payload, bytes) = (self.payload - n, &bytes[n..]);
                continue;
            }
            let before = self.head.len();
            self.head.extend(&bytes[..bytes.len().min(MOST_HEAD - before)]);
            let Ok(Some((head, words, n))) = Head::read(&self.head) else {
                if self.head.len() == MOST_HEAD {
                    // A lie has passed before.
                    self.head.clear();
                }
                return;
            };
            bytes = &bytes[n.saturating_sub(before)..];
            self.head.clear();
            (self.payload, self.number) = (head.payload as usize, head.number.wrapping_add(1));
            if head.kind == Kind::Data {
                self.latest = Some((head, words));
            }
        }
    }
}

/// A frame that is right in its form: its checksum, its number on the stream. What it says may be anything. `like`: a frame of
/// the stream.
pub(crate) fn forge(like: Option<(Head, [u64; 8])>, number: u32, random: &mut Random) -> Vec<u8> {
    let (mut head, mut words) = like.unwrap_or((Head::new(Kind::Data, 0), [0; 8]));
    head.number = number;
    let edge = |random: &mut Random| {
        let (far, bit) = (random.next(), 1 << random.below(64));
        random.of(&[0, 1, 63, 64, 65, 1 << 16, u32::MAX.into(), 1 << 40, u64::MAX, far, bit])
    };
    let kind = random.of(&[
        Kind::Data,
        Kind::Data,
        Kind::Data,
        Kind::Data,
        Kind::Counts,
        Kind::Status,
        Kind::Leave,
        Kind::Beat,
        Kind::Receive,
        Kind::Region,
        Kind::Ask,
        Kind::Answer,
    ]);
    let asked = kind.words();
    if kind == Kind::Data {
        head.kind = kind;
        for _ in 0..random.within(1, 3) {
            let far = edge(random);
            match random.below(8) {
                0 => head.message = head.message.wrapping_add(random.of(&[0, 1, 2, 3, 16, u64::MAX, far])),
                1 => head.offset = random.of(&[0, 1, 64, far as u32, head.payload]),
                2 => head.placed ^= true,
                3 => {
                    head.payload =
                        random.of(&[0, 1, 64, head.payload / 2, head.payload + 1, (far & 0x7_ffff) as u32])
                }
                4 => head.message = head.message.wrapping_add(1),
                _ => {
                    let at = random.below(8) as usize;
                    words[at] = if random.one_in(2) { words[at] ^ 1 << random.below(64) } else { far };
                }
            }
        }
        head.sum = None;
    } else {
        head = Head::new(kind, number);
        (0..asked).for_each(|i| words[i] = edge(random));
    }
    let mut bytes = [0; MOST_HEAD];
    let n = head.write(&words[..asked], &mut bytes);
    debug_assert!(n >= HEAD);
    let mut frame = bytes[..n].to_vec();
    // The payload may be short of what is announced.
    let payload = (head.payload as u64).min(random.of(&[0, 16, 4096, u64::MAX])) as usize;
    frame.extend((0..payload).map(|i| i as u8));
    frame
}
