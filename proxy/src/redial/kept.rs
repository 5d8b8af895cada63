//! Frames that may have to be sent again over the next connection.

use std::collections::VecDeque;

/// Frames that the peer has not said to have.
#[derive(Default)]
pub struct Kept {
    frames: VecDeque<Vec<u8>>,
    /// How many frames were before the first of these.
    before: u64,
    bytes: usize,
}

impl Kept {
    /// Keeps a frame behind the others.
    pub fn push(&mut self, frame: &[u8]) {
        self.bytes += frame.len();
        self.frames.push_back(frame.to_vec());
    }

    /// The peer has received so many frames in all. An error says why that can't be.
    pub fn received(&mut self, count: u64) -> Result<(), String> {
        let sent = self.before + self.frames.len() as u64;
        if !(self.before..=sent).contains(&count) {
            return Err(format!("it says that it has received {count} frames, of {} to {sent}", self.before));
        }
        for frame in self.frames.drain(..(count - self.before) as usize) {
            self.bytes -= frame.len();
        }
        self.before = count;
        Ok(())
    }

    /// The frames, in order.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = &Vec<u8>> {
        self.frames.iter()
    }

    /// The bytes of all frames.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
