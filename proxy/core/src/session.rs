//! What two ends of a queue pair know of each other: the epoch, the cumulative counts of the peer, and how the queue
//! pair ended. Pure state.

use pushgate_abi::abi;

/// Packs an epoch and a cumulative count into one word, so that a reader sees both together.
#[inline(always)]
pub const fn count_word(epoch: u16, count: u64) -> u64 {
    (epoch as u64) << abi::PUSHGATE_COUNT_BITS | count & abi::PUSHGATE_COUNT_MASK
}

/// The count in a word, if the word is of `epoch`.
#[inline(always)]
pub const fn count_of(word: u64, epoch: u16) -> Option<u64> {
    if (word >> abi::PUSHGATE_COUNT_BITS) as u16 == epoch {
        Some(word & abi::PUSHGATE_COUNT_MASK)
    } else {
        None
    }
}

/// How a queue pair ended: a status, the rank at fault, a detail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// `PUSHGATE_*`, and not `PUSHGATE_OK`.
    pub code: u8,
    /// The rank at fault, if one is named.
    pub rank: Option<u32>,
    /// The slot or sequence number at fault, its low 32 bits.
    pub detail: u32,
}

impl Status {
    /// A status that names no rank and no detail.
    pub const fn new(code: u32) -> Self {
        Status { code: code as u8, rank: None, detail: 0 }
    }

    /// This status with a code that ends a queue pair: *aborted* in place of a code that no end has. For words that came
    /// from outside.
    pub const fn checked(self) -> Self {
        match self.code as u32 {
            abi::PUSHGATE_PEER_LOST..=abi::PUSHGATE_OVERRUN | abi::PUSHGATE_LINK_DOWN => self,
            _ => Status { code: abi::PUSHGATE_ABORTED as u8, ..self },
        }
    }

    /// The status word as devices read it.
    pub const fn word(self) -> u64 {
        let rank = match self.rank {
            Some(r) => r & abi::PUSHGATE_NO_RANK,
            None => abi::PUSHGATE_NO_RANK,
        };
        self.code as u64
            | (rank as u64) << abi::PUSHGATE_STATUS_RANK_SHIFT
            | (self.detail as u64) << abi::PUSHGATE_STATUS_DETAIL_SHIFT
    }

    /// Reads a status word; `None` if it says OK.
    pub const fn from_word(word: u64) -> Option<Self> {
        if word as u8 == abi::PUSHGATE_OK as u8 {
            return None;
        }
        let rank = (word >> abi::PUSHGATE_STATUS_RANK_SHIFT) as u32 & abi::PUSHGATE_NO_RANK;
        Some(Status {
            code: word as u8,
            rank: if rank == abi::PUSHGATE_NO_RANK { None } else { Some(rank) },
            detail: (word >> abi::PUSHGATE_STATUS_DETAIL_SHIFT) as u32,
        })
    }
}

/// How the peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The peer's count covers messages that were never sent.
    #[error("the peer counts {counted} messages of {sent}")]
    Count {
        /// Messages that the peer says it has.
        counted: u64,
        /// Messages that were sent.
        sent: u64,
    },
    /// A record does not carry the next sequence number: a slot was overwritten or skipped.
    #[error("sequence number {found}, expected {expected}")]
    Sequence {
        /// The number in the record.
        found: u32,
        /// The number that was due.
        expected: u32,
    },
}

/// What is known of the peer: its counts of this end's messages, the epoch, and how the queue pair ended.
#[derive(Debug, Clone, Default)]
pub struct Session {
    epoch: u16,
    received: u64,
    released: u64,
    status: Option<Status>,
}

impl Session {
    /// A session in `epoch`, without a message that the peer has.
    pub fn new(epoch: u16) -> Self {
        Session { epoch, ..Default::default() }
    }

    /// A session in `epoch` whose first `messages` messages the peer no longer needs.
    pub fn resumed(epoch: u16, messages: u64) -> Self {
        Session { received: messages, released: messages, ..Session::new(epoch) }
    }

    /// The epoch that counts must carry to be taken in.
    pub fn epoch(&self) -> u16 {
        self.epoch
    }

    /// Takes in the peer's cumulative counts, which were read from its words in this order. A word of another epoch or an
    /// old count changes nothing. Returns the counts that hold now, released and received.
    #[inline]
    pub fn peer_counts(&mut self, sent: u64, released: u64, received: u64) -> Result<(u64, u64), Violation> {
        let count = |word: u64, old: u64| count_of(word, self.epoch).map_or(old, |n| n.max(old));
        let released = count(released, self.released);
        // Released is read first, so it can only lag: the peer writes received first.
        let received = count(received, self.received).max(released);
        if received > sent {
            return Err(Violation::Count { counted: received, sent });
        }
        (self.released, self.received) = (released, received);
        Ok((released, received))
    }

    /// Messages of this end that the peer has.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Messages of this end whose places the peer no longer needs.
    pub fn released(&self) -> u64 {
        self.released
    }

    /// How the session ended, if it has.
    #[inline(always)]
    pub fn status(&self) -> Option<Status> {
        self.status
    }

    /// Ends the session with `status`, unless it has ended before. True if this was the first cause, which stays.
    pub fn fail(&mut self, status: Status) -> bool {
        let first = self.status.is_none();
        self.status.get_or_insert(status);
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p7_status_words_name_the_rank() {
        let s = Status { code: abi::PUSHGATE_PEER_LOST as u8, rank: Some(3), detail: 77 };
        assert_eq!(Status::from_word(s.word()), Some(s));
        assert_eq!(Status::from_word(Status::new(4).word()), Some(Status::new(4)));
        assert_eq!(Status::from_word(0), None);
    }

    #[test]
    fn p8_a_status_from_outside_always_ends() {
        for code in 0..=u8::MAX {
            let s = Status { code, rank: Some(2), detail: 5 }.checked();
            let ends = (abi::PUSHGATE_PEER_LOST..=abi::PUSHGATE_OVERRUN).contains(&(code as u32))
                || code as u32 == abi::PUSHGATE_LINK_DOWN;
            assert_eq!(s.code as u32, if ends { code as u32 } else { abi::PUSHGATE_ABORTED });
            assert_eq!((s.rank, s.detail), (Some(2), 5));
        }
    }

    #[test]
    fn p5_counts_of_another_epoch_or_from_the_past_change_nothing() {
        let mut s = Session::new(2);
        assert_eq!(s.peer_counts(9, count_word(2, 3), count_word(2, 5)), Ok((3, 5)));
        assert_eq!(s.peer_counts(9, count_word(1, 9), count_word(3, 9)), Ok((3, 5)));
        assert_eq!(s.peer_counts(9, count_word(2, 1), count_word(2, 2)), Ok((3, 5)));
    }

    #[test]
    fn p8_a_peer_cannot_acknowledge_what_was_not_sent() {
        let mut s = Session::new(0);
        assert_eq!(s.peer_counts(4, 0, 5), Err(Violation::Count { counted: 5, sent: 4 }));
        assert_eq!(s.peer_counts(4, 5, 0), Err(Violation::Count { counted: 5, sent: 4 }));
    }
}
