//! What leaves: messages and control frames become frames of the streams.
//!
//! A message waits in a ring until all of it is cut into frames. A stream takes the next part of the oldest message
//! when it has room, so a stream that is faster takes more. Each stream has a few frames at a time, in memory that does not
//! move, for a wire may read them in the background. All of it is bounded: messages by the gate's permits, frames by
//! the streams' rings, control frames by what is set aside for them.

use std::collections::VecDeque;

use pushgate_driver_shim::record::RecordWords;

use super::frame::{Head, Kind, MOST_HEAD, MOST_PAYLOAD};
use super::incoming::sum_of;
use super::wire::{MOST_PIECES, Piece};

/// Frames of a stream that the wire has not taken.
const FRAMES: usize = 32;
/// Frames of a stream at all: a wire may still read some that it has taken.
const HELD: usize = 128;
/// Of these, frames of the first stream that are set aside for what is no message.
const CONTROL: usize = 8;
/// Bytes of messages that a stream has at a time, at most, but for the last frame.
const AHEAD: usize = MOST_PAYLOAD;

/// A message that is to leave.
#[derive(Clone, Copy)]
pub struct Leaving {
    /// The message's sequence number.
    pub sequence: u64,
    /// The message's record, as the peer gets it.
    pub words: RecordWords,
    /// The message's payload, if that is not in the record.
    pub payload: Piece,
    /// The payload goes to a region of the peer.
    pub placed: bool,
}

/// A frame of a stream.
struct Frame {
    head: [u8; MOST_HEAD],
    /// Bytes of `head`.
    length: usize,
    payload: Piece,
    /// The message, if it is one.
    message: Option<u64>,
    /// The stream's bytes up to the end of the frame, once the wire has taken it.
    end: u64,
}

/// The sending end of one stream.
struct Stream {
    frames: VecDeque<Frame>,
    /// Frames that the wire has taken and may still read: their headers must not change either.
    gone: usize,
    /// Bytes of the first frame after those that the wire has taken.
    taken: usize,
    /// Bytes of all frames that the wire has not taken.
    waiting: usize,
    /// Bytes that the wire has taken since the stream began.
    total: u64,
    number: u32,
}

impl Stream {
    fn new() -> Self {
        Stream { frames: VecDeque::with_capacity(HELD), gone: 0, taken: 0, waiting: 0, total: 0, number: 0 }
    }

    /// Whether there is room for another frame when `aside` places stay free.
    fn has_room(&self, aside: usize) -> bool {
        self.frames.len() - self.gone + aside < FRAMES && self.frames.len() + aside < HELD
    }

    fn push(&mut self, head: Head, words: &[u64], payload: Piece, message: Option<u64>) {
        // Never beyond: the frames must not move.
        assert!(self.frames.len() < HELD);
        let mut frame = Frame { head: [0; MOST_HEAD], length: 0, payload, message, end: 0 };
        let head = Head { number: self.number, ..head };
        self.number = self.number.wrapping_add(1);
        frame.length = head.write(words, &mut frame.head);
        self.waiting += frame.length + payload.bytes;
        self.frames.push_back(frame);
    }
}

/// The sending end of a link's streams.
pub struct Outgoing {
    streams: Vec<Stream>,
    messages: VecDeque<Leaving>,
    /// Bytes of the first message's payload that are in frames.
    cut: usize,
    /// Payloads have checksums.
    sums: bool,
    /// The most payload of a frame, bytes.
    part: usize,
    /// The first message that the wire may still read, or that waits.
    settled: u64,
    /// For each message in flight, by its number: frames of it that the wire may still read.
    frames_of: Box<[u32]>,
}

impl Outgoing {
    /// The sending end of `streams` streams, for at most `messages` messages in flight (a power of two), beginning with message
    /// `first`. Messages are cut into parts of `part` bytes.
    pub fn new(streams: usize, messages: usize, first: u64, sums: bool, part: usize) -> Self {
        Outgoing {
            streams: (0..streams).map(|_| Stream::new()).collect(),
            messages: VecDeque::with_capacity(messages),
            cut: 0,
            sums,
            part,
            settled: first,
            frames_of: vec![0; messages].into(),
        }
    }

    /// Takes a message that is to leave. The caller holds a permit for it.
    #[inline]
    pub fn message(&mut self, message: Leaving) {
        debug_assert!(self.messages.len() < self.frames_of.len());
        self.messages.push_back(message);
    }

    /// Whether there is room for another control frame.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.streams[0].has_room(0)
    }

    /// Takes a control frame that is to leave, after what is in frames already.
    ///
    /// # Panics
    ///
    /// If there is no room ([`Outgoing::has_room`]).
    #[inline]
    pub fn control(&mut self, kind: Kind, words: &[u64]) {
        self.streams[0].push(Head::new(kind, 0), words, Piece { address: 0, bytes: 0 }, None);
    }

    /// Cuts messages into frames, as far as the streams have room.
    ///
    /// # Safety
    ///
    /// The payloads of the messages are mapped for reading.
    #[inline]
    pub unsafe fn fill(&mut self) {
        while let Some(m) = self.messages.front() {
            // The stream with the least to send. Short messages keep to one stream, so that they come in few packets.
            let at = match m.payload.bytes <= self.part / 8 {
                true => 0,
                false => (0..self.streams.len()).min_by_key(|s| self.streams[*s].waiting).unwrap_or(0),
            };
            let stream = &mut self.streams[at];
            let aside = if at == 0 { CONTROL } else { 0 };
            if !stream.has_room(aside) || stream.waiting > AHEAD {
                return;
            }
            let bytes = (m.payload.bytes - self.cut).min(self.part);
            let part = Piece { address: m.payload.address + self.cut, bytes };
            // SAFETY: as our caller promises.
            let sum = (self.sums && bytes > 0).then(|| unsafe { sum_of(part.address, bytes) });
            let head = Head {
                placed: m.placed,
                sum,
                payload: bytes as u32,
                offset: self.cut as u32,
                message: m.sequence,
                ..Head::new(Kind::Data, 0)
            };
            stream.push(head, &m.words, part, Some(m.sequence));
            self.frames_of[m.sequence as usize & (self.frames_of.len() - 1)] += 1;
            self.cut += bytes;
            if self.cut == m.payload.bytes {
                self.cut = 0;
                self.messages.pop_front();
            }
        }
    }

    /// What a stream has to send, as far as one call takes it. Returns how many pieces.
    #[inline]
    pub fn pieces(&self, stream: usize, pieces: &mut [Piece; MOST_PIECES]) -> usize {
        let (stream, mut n) = (&self.streams[stream], 0);
        let mut skip = stream.taken;
        for frame in stream.frames.range(stream.gone..) {
            for piece in [Piece { address: frame.head.as_ptr() as usize, bytes: frame.length }, frame.payload]
            {
                let from = skip.min(piece.bytes);
                skip -= from;
                if piece.bytes > from {
                    if n == MOST_PIECES {
                        return n;
                    }
                    pieces[n] = Piece { address: piece.address + from, bytes: piece.bytes - from };
                    n += 1;
                }
            }
        }
        n
    }

    /// The wire has taken `bytes` bytes of a stream.
    #[inline]
    pub fn taken(&mut self, stream: usize, bytes: usize) {
        let stream = &mut self.streams[stream];
        debug_assert!(bytes <= stream.waiting);
        stream.waiting -= bytes;
        stream.total += bytes as u64;
        stream.taken += bytes;
        while let Some(frame) = stream.frames.get_mut(stream.gone) {
            let length = frame.length + frame.payload.bytes;
            if stream.taken < length {
                break;
            }
            stream.taken -= length;
            frame.end = stream.total - stream.taken as u64;
            stream.gone += 1;
        }
    }

    /// The wire will not read a stream's first `settled` bytes again.
    #[inline]
    pub fn settle(&mut self, stream: usize, settled: u64) {
        let stream = &mut self.streams[stream];
        while stream.gone > 0
            && let Some(frame) = stream.frames.front()
            && frame.end <= settled
        {
            let message = frame.message;
            stream.frames.pop_front();
            stream.gone -= 1;
            if let Some(message) = message {
                self.frames_of[message as usize & (self.frames_of.len() - 1)] -= 1;
            }
        }
    }

    /// Messages, of all of the session, up to the first one that waits or that the wire may still read. `sent`: up to the last
    /// one that was posted.
    #[inline]
    pub fn settled(&mut self, sent: u64) -> u64 {
        let uncut = self.messages.front().map_or(sent, |m| m.sequence);
        while self.settled < uncut && self.frames_of[self.settled as usize & (self.frames_of.len() - 1)] == 0
        {
            self.settled += 1;
        }
        self.settled
    }

    /// Whether a stream has bytes that the wire has not taken.
    #[inline]
    pub fn waits(&self, stream: usize) -> bool {
        self.streams[stream].waiting > 0
    }

    /// Frames that a stream has got, modulo 2^32.
    pub fn number(&self, stream: usize) -> u32 {
        self.streams[stream].number
    }

    /// Whether nothing is left that the wire has not taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.streams.iter().all(|s| s.waiting == 0)
    }

    /// Drops the messages that have no frame yet: nobody waits for them any more.
    pub fn forget(&mut self) {
        if self.cut == 0 {
            self.messages.clear();
        } else {
            self.messages.truncate(1);
        }
    }
}
