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

/// Frames that a stream has at a time.
const FRAMES: usize = 32;
/// Of these, frames of the first stream that are set aside for what is no message.
const CONTROL: usize = 8;
/// Bytes of messages that a stream has at a time, at most, but for the last frame.
const AHEAD: usize = MOST_PAYLOAD;

/// A message that is to leave.
#[derive(Clone, Copy)]
pub struct Leaving {
    /// Its sequence number.
    pub sequence: u64,
    /// Its record, as the peer gets it.
    pub words: RecordWords,
    /// Its payload, if that is not in the record.
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
}

/// The sending end of one stream.
struct Stream {
    frames: VecDeque<Frame>,
    /// Bytes of the first frame that the wire has taken.
    taken: usize,
    /// Bytes of all frames that the wire has not taken.
    waiting: usize,
    /// Bytes that the wire has taken since the stream began.
    total: u64,
    number: u32,
    /// Messages that the wire has taken and may still read: up to which byte of the stream, and which one.
    unsettled: VecDeque<(u64, u64)>,
}

impl Stream {
    fn new() -> Self {
        Stream {
            frames: VecDeque::with_capacity(FRAMES),
            taken: 0,
            waiting: 0,
            total: 0,
            number: 0,
            unsettled: VecDeque::new(),
        }
    }

    fn push(&mut self, head: Head, words: &[u64], payload: Piece, message: Option<u64>) {
        // Never beyond: the frames must not move.
        assert!(self.frames.len() < FRAMES);
        let mut frame = Frame { head: [0; MOST_HEAD], length: 0, payload, message };
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
    /// For each message in flight, by its number: frames of it that the wire may still read.
    frames_of: Box<[u32]>,
}

impl Outgoing {
    /// For so many streams, and at most so many messages in flight (a power of two).
    pub fn new(streams: usize, messages: usize, sums: bool) -> Self {
        Outgoing {
            streams: (0..streams).map(|_| Stream::new()).collect(),
            messages: VecDeque::with_capacity(messages),
            cut: 0,
            sums,
            frames_of: vec![0; messages].into(),
        }
    }

    /// A message is to leave. The caller holds a permit for it.
    #[inline]
    pub fn message(&mut self, message: Leaving) {
        debug_assert!(self.messages.len() < self.frames_of.len());
        self.messages.push_back(message);
    }

    /// Whether there is room for another control frame.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.streams[0].frames.len() < FRAMES
    }

    /// A control frame is to leave, behind what is in frames already.
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
            let at = match m.payload.bytes <= MOST_PAYLOAD / 8 {
                true => 0,
                false => (0..self.streams.len()).min_by_key(|s| self.streams[*s].waiting).unwrap_or(0),
            };
            let stream = &mut self.streams[at];
            let most = if at == 0 { FRAMES - CONTROL } else { FRAMES };
            if stream.frames.len() >= most || stream.waiting > AHEAD {
                return;
            }
            let bytes = (m.payload.bytes - self.cut).min(MOST_PAYLOAD);
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
        for frame in &stream.frames {
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

    /// The wire has taken so many bytes of a stream.
    #[inline]
    pub fn taken(&mut self, stream: usize, bytes: usize) {
        let stream = &mut self.streams[stream];
        debug_assert!(bytes <= stream.waiting);
        stream.waiting -= bytes;
        stream.total += bytes as u64;
        stream.taken += bytes;
        while let Some(frame) = stream.frames.front() {
            let length = frame.length + frame.payload.bytes;
            if stream.taken < length {
                break;
            }
            stream.taken -= length;
            if let Some(message) = frame.message {
                stream.unsettled.push_back((stream.total - stream.taken as u64, message));
            }
            stream.frames.pop_front();
        }
    }

    /// The wire will not read a stream's first `settled` bytes again.
    #[inline]
    pub fn settle(&mut self, stream: usize, settled: u64) {
        let unsettled = &mut self.streams[stream].unsettled;
        while let Some((end, message)) = unsettled.front().copied()
            && end <= settled
        {
            self.frames_of[message as usize & (self.frames_of.len() - 1)] -= 1;
            unsettled.pop_front();
        }
    }

    /// Whether nothing of a message that was cut into frames can be read any more.
    #[inline]
    pub fn is_settled(&self, message: u64) -> bool {
        self.frames_of[message as usize & (self.frames_of.len() - 1)] == 0
    }

    /// Whether a stream has bytes that the wire has not taken.
    #[inline]
    pub fn waits(&self, stream: usize) -> bool {
        self.streams[stream].waiting > 0
    }

    /// Whether nothing is left that the wire has not taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.streams.iter().all(|s| s.waiting == 0)
    }

    /// Drops the messages of which no frame was made yet: nobody waits for them any more.
    pub fn forget(&mut self) {
        if self.cut == 0 {
            self.messages.clear();
        } else {
            self.messages.truncate(1);
        }
    }

    /// Bytes that a stream has sent since it began.
    #[cfg(test)]
    pub fn total(&self, stream: usize) -> u64 {
        self.streams[stream].total
    }
}
