//! What a link is: it carries released messages to the peer. A link is one way for bytes, and may break at any call.
//!
//! [`Link`] carries messages and counts; a [`Rail`] carries stripes of messages beside other links. What else a link can do stands in traits of its own: [`Receives`] (posted
//! receives that the sender knows), [`OwnRegions`] (memory of this end), [`PeerMemory`] (payload of the peer),
//! [`Waking`] (an engine that sleeps).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

use pushgate_core::gate::{Budget, Permit};
use pushgate_core::rails::Stripe;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::record::{Record, RecordWords};

use crate::region::RegionMemory;
use crate::renew::Renew;
use crate::watch::Watch;

/// Why a link carries nothing any more. What the device of a program sees of it is the session's to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkDown {
    /// The way failed.
    #[error("the link failed at {} end, cause {cause:#x}", if *.by_peer { "the peer's" } else { "this" })]
    Failed {
        /// The cause, `PUSHGATE_DOWN_*`.
        cause: u32,
        /// The peer's end is at fault and not this one.
        by_peer: bool,
    },
    /// The peer left in order and takes nothing more.
    #[error("the peer has left")]
    PeerLeft,
    /// A message named a region that was removed after the message was checked.
    #[error("the region that a message names was removed")]
    RegionGone,
}

impl LinkDown {
    /// Whether another link may carry what this one did not. A peer without a receive, or one that refuses access, would
    /// fail the next link as well.
    pub fn is_recoverable(self) -> bool {
        match self {
            LinkDown::Failed { cause, .. } => {
                !matches!(cause, abi::PUSHGATE_DOWN_RNR | abi::PUSHGATE_DOWN_ACCESS)
            }
            LinkDown::PeerLeft | LinkDown::RegionGone => false,
        }
    }

    /// The status that ends a queue pair of ranks `own` and `peer`, if no other link takes the place of this one.
    pub fn status(self, own: u32, peer: u32) -> Status {
        match self {
            LinkDown::Failed { cause, by_peer } => {
                let rank = if by_peer { peer } else { own };
                Status { rank: Some(rank), detail: cause, ..Status::new(abi::PUSHGATE_LINK_DOWN) }
            }
            LinkDown::PeerLeft => Status { rank: Some(peer), ..Status::new(abi::PUSHGATE_PEER_LOST) },
            LinkDown::RegionGone => Status { rank: Some(own), ..Status::new(abi::PUSHGATE_REFUSED) },
        }
    }
}

/// What [`Link::poll_recv`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Nothing.
    Empty,
    /// The next record was copied out; its `id` is a sequence number.
    Record,
    /// The next record was copied out, that of a PUT whose payload lies in its region already, or of a
    /// SEND whose payload lies in the posted receive that its `place` numbers.
    Placed,
    /// The slot holds what no sender of this session could have written.
    Torn,
}

/// Whether a message may go out of a region of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionSends {
    /// The message may.
    Yes,
    /// Whether the message may is not known yet, or not yet so; the peer will tell.
    Unknown,
    /// The message may not; a sentence says why, and what else to do.
    No(&'static str),
}

/// The peer's cumulative counts as it published them: words of epoch and count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Messages whose place it no longer needs.
    pub released: u64,
    /// Messages that it has.
    pub received: u64,
    /// Receives that it has granted.
    pub granted: u64,
}

impl PeerCounts {
    /// Of two that the peer published over several links the greatest: the words are cumulative.
    pub fn greatest(self, other: PeerCounts) -> PeerCounts {
        PeerCounts {
            released: self.released.max(other.released),
            received: self.received.max(other.received),
            granted: self.granted.max(other.granted),
        }
    }
}

/// A producer's record as the peer gets it: its wr_id gives way to the sequence
/// number, which the receiver checks (P4), and what concerns only the producer's
/// side is left out. The laps are the transport's business.
#[inline(always)]
pub fn crossing(words: &RecordWords, sequence: u64) -> RecordWords {
    const OWN: u64 = 0xff << abi::PUSHGATE_ID_HIGH_SHIFT
        | ((abi::PUSHGATE_F_SIGNALED | abi::PUSHGATE_F_REGION) as u64) << abi::PUSHGATE_FLAGS_SHIFT;
    let w0 = words[0] & !OWN | (sequence >> abi::PUSHGATE_ID_LOW_BITS & 0xff) << abi::PUSHGATE_ID_HIGH_SHIFT;
    let w1 = words[1] & 0xffff_ffff | (sequence & 0xff_ffff) << abi::PUSHGATE_ID_LOW_SHIFT;
    [w0, w1, words[2], words[3], words[4], words[5], words[6], words[7]]
}

/// What [`Rail::poll_stripe`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StripeArrival {
    /// Nothing.
    Empty,
    /// The next stripe: its payload has landed, and its message's record was copied out.
    Stripe(Stripe),
    /// The slot holds what no sender of this session could have written.
    Torn,
}

/// A reliable, ordered way to one peer. Belongs to one engine thread; no call blocks.
pub trait Link: Telling + Receives + OwnRegions + PeerMemory + Waking + Send {
    /// "local" or "verbs".
    fn name(&self) -> &'static str;

    /// What names this end of the link and the peer's to readers of the flight recorder; the peer's end has them the other
    /// way round. Both 0: the link has no such names.
    fn ends(&self) -> [u64; 2] {
        [0, 0]
    }

    /// What the link can hold at once.
    fn budget(&self) -> Budget;

    /// Posts one message. The permit makes sure that the message arrives unless the link breaks. `words` are the record as
    /// the producer wrote it.
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        record: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown>;

    /// Work requests that completed since the last call. `received` is the peer's count, for transports that have no
    /// completions of their own.
    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown>;

    /// Takes the next inbound record into `words`, if there is one.
    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival;

    /// Adds the words that show whether the link has work: while none changes, it has none. False where there is more to ask than words: a
    /// device's completions, a stream.
    fn watch(&self, _watch: &mut Watch) -> bool {
        false
    }

    /// Asks for what the next turn needs of memory that the link only points to, ahead of that turn.
    fn prefetch(&self) {}

    /// Whether [`Link::poll_recv`] would find a record. Takes nothing.
    fn has_inbound(&self) -> bool;

    /// Stops all that was posted, once the peer was told of the end or can't be told. True when nothing of the link can
    /// read or write memory of this end any more. Asked again and again until then; nothing is posted meanwhile. Bounded:
    /// the answer becomes true whatever peer and device do, as the time `now`, nanoseconds, goes on.
    fn stopped(&mut self, _now: u64) -> bool {
        true
    }

    /// What makes the next link in place of this one once this one has broken; `None` for a link whose end is the
    /// session's.
    fn renews(&mut self) -> Option<&mut dyn Renew> {
        None
    }

    /// What several links that are one answer beside; `None` for a single link.
    fn several(&mut self) -> Option<&mut dyn Several> {
        None
    }

    /// The number of the RDMA queue pair that carries the link, for the simulator.
    #[cfg(feature = "sim")]
    fn number(&self) -> Option<u32> {
        None
    }

    /// The number of the RDMA queue pair of one of several links that are one, for the simulator.
    #[cfg(feature = "sim")]
    fn number_of(&self, _rail: usize) -> Option<u32> {
        None
    }

    /// Called at the end of each pass: what was posted or acknowledged goes out. True if that rang the peer awake.
    fn notify(&mut self) -> Result<bool, LinkDown>;

    /// Called now and then, with the time in nanoseconds: whether the link has failed by itself.
    fn check(&mut self, _now: u64) -> Result<(), LinkDown> {
        Ok(())
    }

    /// Payloads, and their bytes, that were copied at this end because the transport could not send them from the window.
    fn bounced(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// What the ends tell each other beside messages: counts, and how an end has ended.
pub trait Telling {
    /// The peer's counts, as seen last.
    fn peer_counts(&self) -> PeerCounts;

    /// The peer's status word, over this link or over the next one that this end is ready for.
    fn peer_status(&self) -> u64;

    /// Takes in what the peer says while no message is taken, because one waits: counts, its end, and messages that come after. True
    /// if anything came.
    fn hear(&mut self) -> bool {
        false
    }

    /// Publishes this end's counts to the peer: words of epoch and count.
    fn acknowledge(&mut self, counts: PeerCounts);

    /// Publishes how this end ended.
    fn set_status(&mut self, word: u64);

    /// Tells the peer that this end leaves in order: the peer need not expect more.
    fn leave(&mut self) {}

    /// Whether something that the peer is to be told, or that is to be sent, waits for the next passes. They should come soon, whether
    /// there is other work or not.
    fn owes(&self) -> bool {
        false
    }
}

/// Several links that are one.
pub trait Several {
    /// Breaks one of those that carry, if one does, for tests and fault injection.
    fn break_one(&mut self) -> bool;

    /// Links that took the place of one that broke, since the last call.
    fn rejoined(&mut self) -> u64;
}

/// A link that carries stripes of messages beside other links of the same session (`Rails` of `pushgate-engine`), and is made anew
/// when it breaks. Such a link posts and takes stripes by these calls, not by [`Link::post_send`] and [`Link::poll_recv`]; all else it does as any
/// link.
pub trait Rail: Link + Renew {
    /// Posts one stripe. The permit comes from the rail's own gate: it makes sure that the stripe arrives unless the link
    /// breaks. `record` is the message's record as the producer wrote it, `words` are the record as the peer gets it.
    fn post_stripe(
        &mut self,
        permit: Permit<'_>,
        stripe: &Stripe,
        record: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown>;

    /// Takes the next stripe, if there is one, and its message's record into `words`.
    fn poll_stripe(&mut self, words: &mut RecordWords) -> StripeArrival;

    /// Stripes of this end that the peer has taken in over this link.
    fn stripes_taken(&self) -> u64;

    /// Publishes how many stripes of the peer this end has taken in over this link.
    fn acknowledge_stripes(&mut self, taken: u64);

    /// Whether the payload of a PUT can be written straight into its region. Once yes, the answer stays yes over this link
    /// until the peer takes the region back. The next link of the rail may hear of the region only after it has joined.
    fn reaches(&self, record: &Record) -> bool;
}

/// Posted receives over a link whose sender knows them.
pub trait Receives {
    /// Whether the peer was told that receives of this end name buffers, on transports whose ends agree on that when they
    /// meet.
    fn offered_receives(&self) -> Option<bool> {
        None
    }

    /// Whether SENDs go to posted receives that the peer has told of. Then [`Receives::receive_for`] is asked for each.
    fn knows_receives(&self) -> bool {
        false
    }

    /// Bytes that a SEND may have: those of the receive that it will take, if the peer has told of it, or those of a SEND that may
    /// leave before that ([`Receives::goes_ahead`]). Until then the SEND waits, and the messages after it.
    fn receive_for(&self, _record: &Record) -> Option<u32> {
        None
    }

    /// Takes in receives that the peer has told of, a bounded number, until one is known that a SEND of this tag takes. Comes before
    /// [`Receives::receive_for`] and [`OwnRegions::takes_region`] are asked of such a SEND. True if any was taken in.
    fn learn_receives(&mut self, _tag: u32) -> bool {
        false
    }

    /// Whether [`Receives::learn_receives`] would take in any.
    fn may_learn_receives(&self, _tag: u32) -> bool {
        false
    }

    /// SENDs of this end that may leave before the peer has told of the receives that they take.
    fn goes_ahead(&self) -> u32 {
        0
    }

    /// SENDs of the peer that may come before the receives that they take are posted.
    fn takes_ahead(&self) -> u32 {
        0
    }

    /// A receive of this end was taken in, `number` before it: its words, laps included.
    fn receive_posted(&mut self, _number: u64, _words: [u64; 4]) {}
}

/// Regions of this end: memory that messages go out of, and that the peer may write.
pub trait OwnRegions {
    /// Whether a message may be sent whose payload lies in a region of this end. While that is unknown the message waits,
    /// and the messages after it.
    fn takes_region(&self, record: &Record) -> RegionSends;

    /// Whether SENDs may go out of regions of this end at large, before there is any region.
    fn region_sends(&self) -> RegionSends;

    /// A region was added, which the peer may write and messages may go out of. `key` is its rkey and lkey.
    fn add_region(&mut self, _key: u32, _memory: &RegionMemory, _bytes: u64) {}

    /// Whether what was posted out of a region may still be read there. `received` is the peer's count. A caller that
    /// waits for the end of that asks again after the next pass.
    fn region_in_use(&mut self, _key: u32, _received: u64) -> bool {
        false
    }

    /// Whether a region is being registered, or its registration taken back: that has no limit in time.
    fn works_on_region(&self, _key: u32) -> bool {
        false
    }

    /// A region was removed. Nothing is posted out of it any more, and nothing under way reads it.
    fn remove_region(&mut self, _key: u32) {}

    /// Whether the peer was told that its device may write that region.
    fn offers(&self, _key: u32) -> bool {
        false
    }

    /// Whether the RDMA device of this end has that region: messages go out of it, and come into it where the peer may
    /// write regions, without a copy.
    fn registers(&self, _key: u32) -> bool {
        false
    }

    /// Whether the peer knows of all regions, or never will.
    fn regions_told(&self) -> bool {
        true
    }
}

/// Payload that lies with the peer.
pub trait PeerMemory {
    /// Host address of `units` units of inbound payload at `unit`, if they lie within what the peer may name.
    fn payload(&self, unit: u32, units: u32) -> Option<usize>;

    /// Whether the receiving device can read inbound payload where it lies.
    fn in_place(&self) -> bool;

    /// Whether this end reads payload out of the memory of the peer's process.
    fn reads_peer(&self) -> bool {
        false
    }

    /// Reads `length` bytes at `address` of the peer's process. Returns how many came.
    ///
    /// # Safety
    ///
    /// `length` bytes at `to` are mapped, writable, and free of Rust references.
    unsafe fn read_peer(&self, _address: u64, _to: usize, _length: usize) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// What wakes an engine that sleeps.
pub trait Waking {
    /// The word that tells the peer that this engine sleeps.
    fn sleeping(&self) -> Option<&AtomicU64>;

    /// What the peer rings when it finds that word set.
    fn bell(&self) -> Option<&Bell> {
        None
    }

    /// Where several links are one: what wakes for the others, `n` from 1.
    fn beside(&self, _n: usize) -> Option<&dyn Waking> {
        None
    }

    /// The engine is about to sleep: what arrives from now on wakes it. True if something has arrived already.
    fn prepare_sleep(&mut self) -> bool {
        false
    }

    /// Adds the descriptors that become readable when something arrives.
    fn wakes<'a>(&'a self, _fds: &mut Vec<BorrowedFd<'a>>) {}

    /// The engine woke.
    fn woken(&mut self) {}
}
