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
    /// Keeps a frame after the others.
    pub fn push(&mut self, frame: &[u8]) {
        self.bytes += frame.len();
        self.frames.push_back(frame.to_vec());
    }

    /// The peer has received `count` frames in all. An error says why that can't be.
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

    /// Whether the peer has said before that it has more than `count` frames. A dial that says `count` is then an earlier attempt.
    pub fn has_gone_beyond(&self, count: u64) -> bool {
        count < self.before
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p6_frames_are_kept_until_the_peer_has_them_and_a_count_of_earlier_is_known_as_such() {
        let mut kept = Kept::default();
        (1..=5u8).for_each(|n| kept.push(&[n; 3]));
        kept.received(3).unwrap();
        assert_eq!(kept.frames().map(|frame| frame[0]).collect::<Vec<_>>(), [4, 5]);
        assert_eq!(kept.bytes(), 6);
        assert!(kept.has_gone_beyond(2) && !kept.has_gone_beyond(3) && !kept.has_gone_beyond(9));
        assert!(kept.received(2).is_err() && kept.received(6).is_err());
    }
}
