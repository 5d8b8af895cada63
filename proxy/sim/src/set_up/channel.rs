//! One direction of the channel over which two ends meet. Frames come late, in pieces and in order, and a frame is heard
//! once its last piece is there.

use std::collections::VecDeque;

use pushgate_engine::connect::{Frame, ended};

use crate::plan::MS;
use crate::random::Random;

/// The longest time of a piece on its way, and between two pieces of a frame.
const LATEST: u64 = 20 * MS;
const LONGEST_GAP: u64 = 2 * MS;

/// A piece of a frame: when its sender has written it, and when it arrives.
struct Piece {
    sent: u64,
    arrives: u64,
}

/// A frame on its way.
struct Sent {
    frame: Frame,
    /// Those that have not arrived.
    pieces: VecDeque<Piece>,
    /// Its sender was gone before the last piece was written.
    partial: bool,
}

/// One direction of a channel.
pub(super) struct Channel {
    /// How long a piece usually takes, nanoseconds.
    usual: u64,
    frames: VecDeque<Sent>,
    /// The times of the last piece.
    sent: u64,
    arrives: u64,
    /// How many frames are to be heard again, and those that were heard since that is so.
    echoes: u32,
    heard: Vec<Frame>,
    /// How many of the next frames are lost.
    loses: u32,
}

/// Whether a frame says that its sender has ended. What carries it between two processes says so, too, by ending.
fn is_end(frame: &Frame) -> bool {
    matches!(ended(&frame.bytes), Ok(Some(_)))
}

impl Channel {
    pub(super) fn new(usual: u64) -> Self {
        Channel {
            usual,
            frames: VecDeque::new(),
            sent: 0,
            arrives: 0,
            echoes: 0,
            heard: Vec::new(),
            loses: 0,
        }
    }

    /// The sender begins to write a frame.
    pub(super) fn send(&mut self, frame: Frame, now: u64, random: &mut Random) {
        if self.loses > 0 && !is_end(&frame) {
            self.loses -= 1;
            return;
        }
        let pieces = (0..random.of(&[1, 1, 2, 3, 4])).map(|i| {
            let gap = if i == 0 { 0 } else { random.time(self.usual).min(LONGEST_GAP) };
            self.sent = self.sent.max(now) + gap;
            self.arrives = self.arrives.max(self.sent + random.time(self.usual).min(LATEST));
            Piece { sent: self.sent, arrives: self.arrives }
        });
        let pieces = pieces.collect();
        self.frames.push_back(Sent { frame, pieces, partial: false });
    }

    /// When the next piece arrives; `u64::MAX`: nothing is on its way.
    pub(super) fn next(&self) -> u64 {
        self.frames.front().map_or(u64::MAX, |f| f.pieces[0].arrives)
    }

    /// How many frames are on their way.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// The next piece arrives. Returns the frame if that was its last piece.
    pub(super) fn arrive(&mut self, now: u64, random: &mut Random) -> Option<Frame> {
        let first = self.frames.front_mut()?;
        first.pieces.pop_front();
        if !first.pieces.is_empty() {
            return None;
        }
        let Sent { frame, partial, .. } = self.frames.pop_front()?;
        if partial {
            return None;
        }
        if self.echoes > 0 {
            self.heard.push(frame.clone());
            if random.one_in(2) {
                self.echoes -= 1;
                let again = self.heard[random.below(self.heard.len() as u64) as usize].clone();
                self.send(again, now, random);
            }
        }
        Some(frame)
    }

    /// The sender is gone: what it has not written yet never comes.
    pub(super) fn cut_off(&mut self, now: u64) {
        for frame in &mut self.frames {
            let before = frame.pieces.len();
            frame.pieces.retain(|piece| piece.sent <= now);
            frame.partial |= frame.pieces.len() < before;
        }
        self.frames.retain(|frame| !frame.pieces.is_empty());
    }

    /// The sender does nothing for so long: what it has not written yet comes later.
    pub(super) fn stall(&mut self, now: u64, time: u64) {
        for piece in self.frames.iter_mut().flat_map(|frame| &mut frame.pieces) {
            if piece.sent > now {
                piece.sent += time;
                piece.arrives += time;
            }
        }
        if self.sent > now {
            self.sent += time;
        }
        let last = self.frames.back().and_then(|frame| frame.pieces.back());
        self.arrives = self.arrives.max(last.map_or(0, |piece| piece.arrives));
    }

    /// The channel is lost, with what is on its way, and the next `frames` frames.
    pub(super) fn lose(&mut self, frames: u32) {
        self.frames.retain(|sent| is_end(&sent.frame));
        self.loses += frames;
    }

    /// From now on frames are heard again, `times` times.
    pub(super) fn echo(&mut self, times: u32) {
        self.echoes += times;
    }
}
