//! When a PUT may be written straight into its region.
//!
//! Two rails keep no order, and a rail that breaks makes the sender post an older message again. Were a later PUT in its
//! region by then, the older bytes would be written over the newer ones (P6). So a PUT is written straight only while no
//! earlier message that the peer does not have yet goes to any of the same bytes. Otherwise the payload waits at the sender
//! or lands elsewhere first, and the peer copies it when its turn comes.

use crate::copies::Copies;

/// Where the payload of a message ends up, as far as the sender knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// In no region.
    Nowhere,
    /// In a region of the peer: its key and the offset.
    Region(u32, u64),
    /// In a buffer that the peer chooses, which may be any bytes of its regions.
    Unknown,
}

/// The messages on their way that go to regions of the peer.
#[derive(Debug)]
pub struct Placing {
    on_their_way: Copies,
    /// One more than the last message whose place only the peer knows.
    unknown: u64,
    received: u64,
}

impl Placing {
    /// A sender's view with nothing on its way; at most `messages` ever are.
    pub fn new(messages: usize) -> Self {
        Placing { on_their_way: Copies::new(messages), unknown: 0, received: 0 }
    }

    /// Whether the next message may be written straight into these bytes of a region.
    #[inline]
    pub fn may_place(&self, rkey: u32, begin: u64, length: u32) -> bool {
        let touched = self.on_their_way.touch((rkey, begin), length, 0) && !planted!(P6Overlap);
        self.unknown <= self.received && !touched
    }

    /// Notes that message `message`, the next one, was taken, and that its payload goes to `target`.
    #[inline]
    pub fn posted(&mut self, message: u64, target: Target, length: u32) {
        match target {
            Target::Region(rkey, begin) if length > 0 => {
                self.on_their_way.posted(message, (rkey, begin), length);
            }
            Target::Unknown if length > 0 => self.unknown = message + 1,
            _ => {}
        }
    }

    /// The first `received` messages are in their places at the peer.
    #[inline]
    pub fn received(&mut self, received: u64) {
        self.received = self.received.max(received);
        self.on_their_way.received(received, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p6_a_put_is_placed_only_where_nothing_older_is_still_to_come() {
        let mut p = Placing::new(8);
        assert!(p.may_place(7, 0, 100));
        p.posted(0, Target::Region(7, 0), 100);
        p.posted(1, Target::Region(7, 200), 50);
        assert!(!p.may_place(7, 99, 1) && !p.may_place(7, 150, 51) && !p.may_place(7, 0, 1000));
        assert!(p.may_place(7, 100, 100) && p.may_place(8, 0, 100));
        p.received(1);
        assert!(p.may_place(7, 0, 200) && !p.may_place(7, 0, 201));
        p.received(2);
        assert!(p.may_place(7, 0, 1000));
    }

    #[test]
    fn p6_nothing_is_placed_after_a_message_whose_buffer_the_peer_chooses() {
        let mut p = Placing::new(8);
        p.posted(0, Target::Unknown, 8);
        p.posted(1, Target::Nowhere, 8);
        assert!(!p.may_place(1, 0, 8));
        p.received(1);
        assert!(p.may_place(1, 0, 8));
    }

    #[test]
    fn p8_offsets_that_the_peer_will_refuse_do_no_harm() {
        let mut p = Placing::new(8);
        p.posted(0, Target::Region(7, u64::MAX - 1), 50);
        assert!(!p.may_place(7, u64::MAX - 1, 1) && p.may_place(7, 0, 50));
    }
}
