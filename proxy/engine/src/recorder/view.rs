//! What an engine knows of one queue pair at one moment, as plain numbers, and how the numbers are put into words.

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use serde::Serialize;

use crate::status::status_text;

/// Words of a [`View`].
pub(super) const WORDS: usize = COUNTS + 3;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The positions of a queue pair's rings and the credits that are left. All but the last two only grow.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        const COUNTS: usize = [$(stringify!($name)),*].len();

        impl Counts {
            fn words(&self) -> [u64; COUNTS] {
                [$(self.$name),*]
            }

            fn of(words: [u64; COUNTS]) -> Self {
                let [$($name),*] = words;
                Counts { $($name),* }
            }
        }
    };
}

counts! {
    /// WQEs that this side's device has posted and the engine has seen, NOPs included.
    posted,
    /// WQE slots that were given back to the device, NOPs included.
    retired,
    /// Messages released to the link: the sequence number of the next one.
    released,
    /// Messages of this side that the peer has received.
    peer_received,
    /// Messages of this side whose places the peer no longer needs.
    peer_freed,
    /// Receives that the peer has granted.
    peer_granted,
    /// Messages of the peer that were accepted here.
    accepted,
    /// Messages of the peer that are in their places here, as the peer is told.
    received,
    /// Messages of the peer whose places this side no longer needs, as the peer is told.
    freed,
    /// Receives granted to the peer.
    granted,
    /// Receive records shown to this side's device.
    shown,
    /// Receive records that this side's device has given back.
    taken,
    /// Receive credits of the peer that are left.
    credits,
    /// Work requests that are posted to the link and not completed.
    in_flight,
}

impl Counts {
    /// What moves with messages of this side.
    pub(super) fn sends(&self) -> [u64; 8] {
        [
            self.posted,
            self.retired,
            self.released,
            self.peer_received,
            self.peer_freed,
            self.peer_granted,
            self.credits,
            self.in_flight,
        ]
    }

    /// What moves with messages of the peer.
    pub(super) fn receives(&self) -> [u64; 6] {
        [self.accepted, self.received, self.freed, self.granted, self.shown, self.taken]
    }
}

/// When something moved last, nanoseconds of the engine's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// With messages of this side.
    pub sends: u64,
    /// With messages of the peer.
    pub receives: u64,
}

/// Where a queue pair stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Phase {
    /// Messages go over the link of the epoch.
    #[default]
    Live,
    /// The link broke and is being brought to its end.
    Fencing,
    /// Nothing of an earlier epoch can touch this end's memory; the peer was told.
    Offered,
    /// The peer has said the same; this end is ready to receive.
    Joining,
    /// The queue pair has ended; the device was not shown the end yet, because something may still touch memory.
    Ending,
    /// The queue pair has ended, and the device was shown the end.
    Ended,
}

impl Phase {
    pub(super) const ALL: [Phase; 6] =
        [Phase::Live, Phase::Fencing, Phase::Offered, Phase::Joining, Phase::Ending, Phase::Ended];

    /// The phase in words.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Live => "live",
            Phase::Fencing => "fencing the link that broke",
            Phase::Offered => "waits for the peer to resume",
            Phase::Joining => "joins the next link",
            Phase::Ending => "ending",
            Phase::Ended => "ended",
        }
    }
}

/// What the WQE at the head of the ring waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Missing {
    /// Nothing: no WQE waits.
    #[default]
    Nothing,
    /// A send-queue slot.
    SendQueue,
    /// A slot of the link's completion queue.
    CompletionQueue,
    /// A receive credit of the peer.
    Receive,
    /// Bytes in flight.
    Bytes,
    /// A receive that the peer posts, on links whose sender knows the peer's receives.
    PostedReceive,
    /// The peer has not said yet whether messages may go out of that region.
    Region,
}

impl Missing {
    pub(super) const ALL: [Missing; 7] = [
        Missing::Nothing,
        Missing::SendQueue,
        Missing::CompletionQueue,
        Missing::Receive,
        Missing::Bytes,
        Missing::PostedReceive,
        Missing::Region,
    ];

    /// What a WQE may wait for.
    pub const CAUSES: [Missing; 6] = {
        let [_nothing, causes @ ..] = Missing::ALL;
        causes
    };

    /// The place in [`Missing::CAUSES`]. `None` for [`Missing::Nothing`].
    pub(super) fn cause(self) -> Option<usize> {
        (self as usize).checked_sub(1)
    }

    /// The credit in a word.
    pub fn word(self) -> &'static str {
        match self {
            Missing::Nothing => "nothing",
            Missing::SendQueue => "send-queue",
            Missing::CompletionQueue => "completion-queue",
            Missing::Receive => "receive",
            Missing::Bytes => "bytes",
            Missing::PostedReceive => "posted-receive",
            Missing::Region => "region",
        }
    }

    /// The credit in words.
    pub fn name(self) -> &'static str {
        match self {
            Missing::Nothing => "nothing",
            Missing::SendQueue => "a send-queue slot",
            Missing::CompletionQueue => "a completion-queue slot",
            Missing::Receive => "a receive credit",
            Missing::Bytes => "bytes in flight",
            Missing::PostedReceive => "a receive that the peer posts",
            Missing::Region => "the peer's word whether messages may go out of that region",
        }
    }
}

/// How often something went wrong. Each number stops at 65535.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// Receiver-not-ready answers of the transport.
    pub rnr: u16,
    /// Messages posted that this side could not take.
    pub dropped: u16,
    /// WQEs and records refused.
    pub refused: u16,
    /// Slots reserved and never published.
    pub stuck: u16,
}

/// What an engine knows of one queue pair at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct View {
    /// Ring positions and credits.
    pub counts: Counts,
    /// Where the queue pair stands.
    pub phase: Phase,
    /// The link's epoch, its low 16 bits.
    pub epoch: u16,
    /// What the WQE at the head waits for.
    pub missing: Missing,
    /// An inbound message waits for a receive or for room, and the messages after it.
    pub waiting: bool,
    /// Copies of inbound payload under way, at most 255.
    pub copies: u8,
    /// How the queue pair ended.
    #[serde(serialize_with = "status")]
    pub status: Option<Status>,
    /// What went wrong.
    pub errors: Errors,
}

fn status<S: serde::Serializer>(status: &Option<Status>, to: S) -> Result<S::Ok, S::Error> {
    match status {
        None => to.serialize_none(),
        Some(status) => to.serialize_str(&status_text(*status)),
    }
}

impl View {
    /// WQEs that wait at the head: seen by the engine and not released.
    pub fn pending(&self) -> bool {
        self.missing != Missing::Nothing
    }

    /// Messages of this side should move: a WQE waits, or the peer owes an answer.
    pub fn owes_sends(&self) -> bool {
        self.pending() || self.counts.posted > self.counts.retired || self.is_between_links()
    }

    /// Messages of the peer should move: one waits here or is copied, or this side's device holds some.
    pub fn owes_receives(&self) -> bool {
        self.waiting || self.copies > 0 || self.counts.shown > self.counts.taken || self.is_between_links()
    }

    fn is_between_links(&self) -> bool {
        matches!(self.phase, Phase::Fencing | Phase::Offered | Phase::Joining | Phase::Ending)
    }

    /// Receives that this side's device has posted and no message has filled.
    pub fn unfilled(&self) -> u64 {
        self.counts.granted.saturating_sub(self.counts.shown)
    }

    pub(super) fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[..COUNTS].copy_from_slice(&self.counts.words());
        words[COUNTS] = self.phase as u64
            | (self.missing as u64) << 8
            | (self.epoch as u64) << 16
            | (self.copies as u64) << 32
            | (self.waiting as u64) << 40;
        words[COUNTS + 1] = self.status.map_or(0, Status::word);
        let e = self.errors;
        words[COUNTS + 2] =
            [e.rnr, e.dropped, e.refused, e.stuck].iter().rev().fold(0, |word, n| word << 16 | *n as u64);
        words
    }

    /// The view in these words, if they are one. They may have been written by anybody (P8).
    pub(super) fn of(words: &[u64; WORDS]) -> Option<View> {
        let counts: [u64; COUNTS] = *words.first_chunk().expect("a view has more words");
        // Cumulative counts have 48 bits. Below that no sum and no difference of two overflows.
        if counts.iter().any(|count| *count > abi::PUSHGATE_COUNT_MASK) {
            return None;
        }
        let (flags, errors) = (words[COUNTS], words[COUNTS + 2]);
        if flags >> 41 != 0 {
            return None;
        }
        Some(View {
            counts: Counts::of(counts),
            phase: *Phase::ALL.get(flags as u8 as usize)?,
            missing: *Missing::ALL.get((flags >> 8) as u8 as usize)?,
            epoch: (flags >> 16) as u16,
            copies: (flags >> 32) as u8,
            waiting: flags >> 40 & 1 != 0,
            status: Status::from_word(words[COUNTS + 1]).map(Status::checked),
            errors: Errors {
                rnr: errors as u16,
                dropped: (errors >> 16) as u16,
                refused: (errors >> 32) as u16,
                stuck: (errors >> 48) as u16,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_cause_has_its_place() {
        for (at, cause) in Missing::CAUSES.into_iter().enumerate() {
            assert_eq!(cause.cause(), Some(at));
        }
        assert_eq!(Missing::Nothing.cause(), None);
    }

    #[test]
    fn a_view_comes_back_from_its_words() {
        let words: [u64; COUNTS] = std::array::from_fn(|i| 1000 + i as u64);
        for (phase, missing) in Phase::ALL.into_iter().cycle().zip(Missing::ALL) {
            let view = View {
                counts: Counts::of(words),
                phase,
                epoch: 65535,
                missing,
                waiting: true,
                copies: 255,
                status: Some(Status { rank: Some(3), detail: 7, ..Status::new(abi::PUSHGATE_LINK_DOWN) }),
                errors: Errors { rnr: 1, dropped: 2, refused: 3, stuck: 65535 },
            };
            assert_eq!(View::of(&view.words()), Some(view));
        }
        assert_eq!(View::of(&View::default().words()), Some(View::default()));
    }

    proptest! {
        #[test]
        fn p8_any_words_are_a_view_or_none(words: [u64; WORDS]) {
            if let Some(view) = View::of(&words) {
                // Nothing in it overflows.
                let _ = (view.owes_sends(), view.owes_receives(), view.unfilled(), view.status.map(status_text));
            }
        }
    }
}
