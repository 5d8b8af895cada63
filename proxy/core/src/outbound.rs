//! The sender of one queue pair: which WQE is next, whether it may be posted, and what is given back to the producer.
//!
//! Pure state. The caller reads the WQE ring, asks the link what only the link knows, posts, and writes the words that
//! the producer reads.

use pushgate_abi::record::{Malformed, Opcode, Record, RecordWords};

use crate::gate::{Budget, Gate, GrantError, Need, Permit, Stall};
use crate::staging::{Completion, Retired, Staging};

/// What is known of the WQE at the ring's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Head {
    /// Nothing: the ring has to be looked at.
    Unread,
    /// Its words were read. Whether it may be sent is for the peer to say.
    Undecided,
    /// It was read and checked, and waits for a permit.
    Checked,
}

/// Where the next WQE comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// There is none: the producer has to wait for credit.
    Full,
    /// From this slot of the ring, into [`Outbound::words`].
    Slot(u64),
    /// The next WQE was read before.
    Held,
}

/// The sender of one queue pair.
#[derive(Debug)]
pub struct Outbound {
    staging: Staging,
    gate: Gate,
    /// The WQE at the ring's head, a private copy.
    words: RecordWords,
    head: Head,
    /// A stall of the WQE at the head was reported.
    stalled: bool,
    credit: u64,
    delivered: u64,
}

impl Outbound {
    /// A sender that has released nothing.
    pub fn new(staging: Staging, gate: Gate) -> Self {
        let credit = staging.credit_word();
        Outbound { staging, gate, words: [0; 8], head: Head::Unread, stalled: false, credit, delivered: 0 }
    }

    /// A sender in place of an earlier one. Of the slots that were released to a link and not given back, nothing is known
    /// yet ([`Outbound::was_posted`]). `delivered` is the count of slots that the producer was told last.
    pub fn resumed(staging: Staging, gate: Gate, delivered: u64) -> Self {
        Outbound { delivered, ..Outbound::new(staging, gate) }
    }

    /// Takes the WQE at the head for one that an earlier sender released and that the peer has accepted. To be followed by
    /// [`Outbound::rewind`].
    pub fn was_posted(&mut self, r: &Record) -> Result<(), Malformed> {
        self.staging.check(r)?;
        if r.opcode != Opcode::Nop {
            self.gate.was_posted(Need { bytes: r.length, receive: r.opcode == Opcode::Send });
        }
        self.staging.release(r);
        Ok(())
    }

    /// The staging ring.
    #[inline(always)]
    pub fn staging(&self) -> &Staging {
        &self.staging
    }

    /// The staging ring, to note holes in it.
    pub fn staging_mut(&mut self) -> &mut Staging {
        &mut self.staging
    }

    /// The gate.
    #[inline(always)]
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    // ----------------------------------------------------------- the next WQE

    /// Where the next WQE comes from.
    #[inline(always)]
    pub fn next(&self) -> Next {
        match self.head {
            Head::Unread if self.staging.has_room() => Next::Slot(self.staging.head()),
            Head::Unread => Next::Full,
            _ => Next::Held,
        }
    }

    /// Room for the words of the WQE that [`Outbound::next`] asks for.
    #[inline(always)]
    pub fn words(&mut self) -> &mut RecordWords {
        &mut self.words
    }

    /// Decodes the WQE. It is decoded again for each look at it, which is cheaper than to keep the record.
    #[inline(always)]
    pub fn record(&self) -> Result<Record, Malformed> {
        Record::decode(&self.words)
    }

    /// Whether the WQE at the head was read, and waits for the peer or for a permit.
    #[inline(always)]
    pub fn is_pending(&self) -> bool {
        self.head != Head::Unread
    }

    /// Whether the WQE at the head waits for the peer to say whether it may be sent.
    #[inline(always)]
    pub fn is_undecided(&self) -> bool {
        self.head == Head::Undecided
    }

    /// Whether the WQE at the head has still to be checked, because it is new or was undecided.
    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        self.head != Head::Checked
    }

    /// Notes that the peer has yet to say whether the WQE may be sent. True if that is a stall that was not reported yet: each
    /// SEND reports one stall.
    #[inline]
    pub fn undecided(&mut self, r: &Record) -> bool {
        self.head = Head::Undecided;
        r.opcode == Opcode::Send && !std::mem::replace(&mut self.stalled, true)
    }

    /// A NOP was taken: it is sent nowhere.
    #[inline]
    pub fn skip(&mut self, r: &Record) {
        self.release(r);
    }

    /// Asks the gate for a permit to post the WQE, which was checked. Returns the permit, the message's sequence
    /// number and the WQE's words, or what is missing.
    #[inline(always)]
    pub fn reserve(&self, r: &Record) -> Result<(Permit<'_>, u64, &RecordWords), Stall> {
        let need = Need { bytes: r.length, receive: r.opcode == Opcode::Send };
        let permit = self.gate.reserve(need)?;
        Ok((permit, self.staging.messages(), &self.words))
    }

    /// The gate had no permit. True if that was not reported yet: each message reports one stall.
    #[inline]
    pub fn stall(&mut self) -> bool {
        self.head = Head::Checked;
        !std::mem::replace(&mut self.stalled, true)
    }

    /// The WQE was posted.
    #[inline(always)]
    pub fn posted(&mut self, r: &Record) {
        self.release(r);
        self.stalled = false;
    }

    #[inline(always)]
    fn release(&mut self, r: &Record) {
        self.staging.release(r);
        self.head = Head::Unread;
    }

    // ------------------------------------------------------ what comes back

    /// The peer has granted `granted` receives in all. True if that is news.
    #[inline]
    pub fn grant(&self, granted: u64) -> Result<bool, GrantError> {
        self.gate.grant(granted)
    }

    /// `n` work requests completed.
    #[inline]
    pub fn complete(&self, n: u32) {
        self.gate.complete(n);
    }

    /// The peer no longer needs the places of its first `released` messages: gives back their slots and payload, with
    /// a completion for each that asked for one.
    #[inline]
    pub fn retire(&mut self, released: u64, completion: impl FnMut(Completion)) -> Retired {
        let retired = self.staging.retire(released, completion);
        if retired.messages > 0 {
            self.gate.retire(retired.bytes);
        }
        retired
    }

    /// The credit word, if it has changed since the last call.
    #[inline]
    pub fn new_credit(&mut self) -> Option<u64> {
        let credit = self.staging.credit_word();
        (credit != self.credit).then(|| {
            self.credit = credit;
            credit
        })
    }

    /// Another link takes the place of one that broke, with a fresh `budget`. The peer has accepted the first `accepted`
    /// messages: what comes after them is read, checked and posted again.
    ///
    /// # Panics
    ///
    /// If the peer has accepted more than was posted or less than was given back: the caller has compared the counts.
    pub fn rewind(&mut self, accepted: u64, budget: Budget) {
        let again = self.staging.rewind(accepted);
        self.gate.renew(budget, again.sends, again.bytes);
        (self.head, self.stalled) = (Head::Unread, false);
    }

    /// The count of slots that the peer has, if it has changed with the peer's `received` messages.
    #[inline]
    pub fn newly_delivered(&mut self, received: u64) -> Option<u64> {
        let delivered = self.staging.deliver(received);
        // An earlier sender may have told more than this one knows of yet.
        (delivered > self.delivered).then(|| {
            self.delivered = delivered;
            delivered
        })
    }
}
