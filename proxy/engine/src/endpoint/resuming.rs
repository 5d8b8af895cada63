//! How an endpoint goes on in place of one whose engine died, with the program's memory and what its journal says.
//!
//! Nothing is known of what the dead engine had sent and the peer has not retired. So this end gives the link up, whatever
//! its epoch, and meets the peer over the next one. The peer says how many messages it has accepted; their WQEs, which lie
//! in the work segment until their credit returns, are read and counted without being posted. The WQEs after them are
//! posted by the ordinary path.

// With `sim`: engines die in these tests.
#[cfg(all(test, feature = "sim"))]
mod tests;

use pushgate_core::gate::Gate;
use pushgate_core::inbound::{Inbound, Posted};
use pushgate_core::journal::Broken;
use pushgate_core::outbound::{Next, Outbound};
use pushgate_core::recovery::Patience;
use pushgate_core::refusal::Refusal;
use pushgate_core::session::{Session, Status};
use pushgate_core::staging::Staging;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Malformed, Record};
use pushgate_link::LinkDown;
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::memory::Mapped;
use pushgate_link::ring::{Found, Look};

use super::{Endpoint, Stands};
use crate::connect::{Connect, Incarnation};
use crate::journal::{Journal, Kept, session_bytes};

impl Endpoint {
    /// Keeps in `session`, which is zeroed and has [`session_bytes`], what an engine needs
    /// that goes on if this one dies. For endpoints whose links are replaced; has no effect on others, nor where `session` has less.
    pub fn with_journal(mut self, session: impl Into<Mapped>) -> Self {
        let (session, receives) = (session.into(), self.receives_log());
        let recovering = self.recovering.as_ref().filter(|_| session.bytes() >= session_bytes(receives));
        self.journal = recovering.map(|r| Journal::new(session, r.epoch(), receives));
        self
    }

    /// Whether an engine can go on that takes the place of this one.
    pub fn is_kept(&self) -> bool {
        self.journal.is_some()
    }

    /// Bytes of a session segment that this endpoint can keep its journal in.
    pub fn session_bytes(&self) -> usize {
        session_bytes(self.receives_log())
    }

    /// Logarithm to base 2 of the ring of posted receives, if there is one.
    fn receives_log(&self) -> Option<u32> {
        self.options.posted_receives.then_some(self.geometry.rx_log)
    }

    /// Goes on where an engine died that had kept a journal in `session` ([`Endpoint::with_journal`]). `ends` are the two
    /// incarnations that have met, this end's first. The endpoint was made over the same memory, but for a link segment
    /// that nobody has seen. That engine's process must have ended.
    ///
    /// Nothing moves before [`Endpoint::begin_again`].
    pub fn resumed(
        mut self,
        session: impl Into<Mapped>,
        ends: [Incarnation; 2],
        patience: Patience,
        mailbox: Mailbox,
        send: SendFrame,
    ) -> Result<Self, Broken> {
        let broken = |why: &str| Broken(why.into());
        let (session, receives) = (session.into(), self.receives_log());
        if session.bytes() < self.session_bytes() {
            return Err(broken("its session segment has no room for open receives"));
        }
        let (mut journal, kept) = Journal::resumed(session, self.geometry.signals, receives)?;
        let Kept { epoch, sent, taken, open } = kept;
        let (status, delivered) = self.control.resume(sent.completions);
        if Status::from_word(status).is_some() {
            return Err(broken("it has ended"));
        }
        let [own, peer] = ends;
        let connect = Connect::joined(own, peer, epoch).ok_or_else(|| Broken(format!("epoch {epoch}")))?;

        let g = &self.geometry;
        let staging = Staging::resumed(g.slots_log, g.window_log, &sent);
        let gate = Gate::resumed(1 << self.peer_geometry.rx_log, self.here.qp.budget(), sent.sends);
        // A count that is too great would only keep the program's own device waiting.
        let delivered = delivered.clamp(sent.slots, sent.slots + (1 << g.slots_log));
        self.outbound = Outbound::resumed(staging, gate, delivered);
        self.session = Session::resumed(self.session.epoch(), sent.messages);
        self.sends = sent.sends;
        let shown = |at| match self.control.shown(at) {
            Look::Ready(words) => Some(words),
            Look::Empty | Look::Torn => None,
        };
        let receive = |number| {
            let words = self.work.receive(number)?;
            Posted::decode(number, self.geometry.rx_log, &words)
        };
        let (rules, consumed) = (self.inbound.rules(), self.work.consumed());
        self.inbound = Inbound::resumed(rules, &taken, consumed, shown, &open, receive)?;
        journal.keep_only(self.inbound.shown(), |number| self.inbound.open(number).is_some());

        // What that engine may not have got to: the signal grows or stays, the credit is what the journal says,
        // and what was given back was delivered.
        if let Some((index, value)) = taken.signal {
            self.control.signal(index, value & abi::PUSHGATE_DATA_MASK);
        }
        self.control.credit(self.outbound.staging().credit_word());
        self.control.delivered(delivered);
        self = self.with_recovery(connect, patience, mailbox, send);
        let r = self.recovering.as_mut().ok_or_else(|| broken("its link can't be made anew"))?;
        r.rebuilds = true;
        (self.journal, self.stands) = (Some(journal), Stands::Down);
        Ok(self)
    }

    /// Begins to meet the peer again, for an endpoint that was [`Endpoint::resumed`] and has its regions. Does nothing to
    /// any other.
    pub fn begin_again(&mut self) {
        let lost = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_RETRY, by_peer: true };
        let (now, status) = (self.now, lost.status(self.rank(), self.peer()));
        if let Some(r) = self.recovering.as_mut().filter(|r| r.rebuilds) {
            r.connect.link_down(status, now);
            self.perform();
        }
    }

    /// Reads the WQEs of the messages before the first `accepted` ones that were not given back. False if the queue pair has
    /// ended for that.
    pub(super) fn rebuild(&mut self, accepted: u64) -> bool {
        while self.outbound.staging().messages() < accepted {
            let found = match self.outbound.next() {
                Next::Slot(slot) => self.work.look_into(slot, self.outbound.words()),
                Next::Full | Next::Held => Found::Empty,
            };
            let record = match found {
                Found::Ready => self.outbound.record(),
                Found::Torn => Err(Malformed::Lap),
                Found::Empty => {
                    let sent = self.outbound.staging().messages();
                    let why = format!("it says that it has accepted {accepted} messages of {sent}");
                    self.violated(&why);
                    return false;
                }
            };
            if let Err(e) = record.and_then(|r: Record| self.outbound.was_posted(&r)) {
                self.refuse(Refusal::Wqe, &e);
                return false;
            }
        }
        true
    }
}
