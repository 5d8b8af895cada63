//! Queue pairs: what carries a released message to the peer. Nothing outside
//! this folder knows a transport.

pub mod local;

use pushgate_driver_shim::record::{Record, Words};

use crate::gate::{Limits, Permit};
use crate::session::Status;

/// What [`QueuePair::poll_recv`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// Nothing.
    Empty,
    /// The next record was copied out; its `id` is a sequence number.
    Record,
    /// The slot holds what no sender of this session could have written.
    Torn,
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

/// A reliable, ordered connection to one peer. Belongs to one engine thread;
/// no call blocks.
pub trait QueuePair: Send {
    /// "local", later "verbs", "tcp".
    fn name(&self) -> &'static str;

    /// What the gate must keep to.
    fn limits(&self) -> Limits;

    /// Posts one message. The permit is what makes it safe to: a message that
    /// is posted arrives. `words` are the record as the producer wrote it.
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        record: &Record,
        words: &Words,
    ) -> Result<(), Status>;

    /// Work requests completed since the last call; `received` is the peer's
    /// count, for transports that have no completions of their own.
    fn poll_send(&mut self, received: u64) -> u32;

    /// The peer's counts, as last seen.
    fn peer_counts(&self) -> PeerCounts;

    /// The peer's status word.
    fn peer_status(&self) -> u64;

    /// Takes the next inbound record, if there is one, into `words`.
    fn poll_recv(&mut self, words: &mut Words) -> Inbound;

    /// True if [`QueuePair::poll_recv`] would find one; takes nothing.
    fn has_inbound(&self) -> bool;

    /// Host address of `units` units of inbound payload at `unit`, if they lie
    /// within what the peer may name.
    fn payload(&self, unit: u32, units: u32) -> Option<usize>;

    /// True if the receiving device can read inbound payload where it lies.
    fn in_place(&self) -> bool;

    /// True if payload can lie in a region that the WQE names.
    fn sends_from_regions(&self) -> bool;

    /// Publishes our counts to the peer: words of epoch and count.
    fn acknowledge(&mut self, counts: PeerCounts);

    /// Publishes how we ended.
    fn set_status(&mut self, word: u64);

    /// Called once after a pass that posted or acknowledged. True if it rang
    /// the peer awake.
    fn notify(&mut self) -> bool;

    /// The word that tells the peer that this engine sleeps.
    fn sleeping(&self) -> Option<&std::sync::atomic::AtomicU64>;
}
