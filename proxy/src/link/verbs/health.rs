//! Whether a link still carries, by what work requests, the port and the queue pair's state say. Pure policy: time is
//! passed in, in nanoseconds.
//!
//! A sign of failure may be the first of a worse one: a port goes down before its device is removed, and a work request
//! fails because this host's own port did. So a sign is watched for [`SETTLE`] before it counts, unless the peer's answer
//! leaves no doubt.

use pushgate_driver_shim::abi;

use crate::link::LinkDown;

/// Between two looks for asynchronous events, each a system call, nanoseconds. All links of a device share one look.
pub(super) const EVENTS: u64 = 10_000_000;
/// Between two looks at a port that says nothing, nanoseconds. Each may be a command to the device's firmware, so links share a look that
/// found the port well, for half of this time.
pub(super) const LOOK: u64 = 500_000_000;
/// How long a sign of failure is watched before it counts, nanoseconds.
const SETTLE: u64 = 300_000_000;

/// The health of one link.
#[derive(Debug, Default)]
pub(super) struct Health {
    failed: Option<LinkDown>,
    /// The cause that a work request or the queue pair's state gave, until it is clear that this host has no worse.
    doubt: Option<u32>,
    /// The peer left in order, and this end has nothing more to tell it.
    deserted: bool,
    /// Asynchronous events that the device had reported at the last look.
    news: u64,
    next_events: u64,
    next_look: u64,
    /// The cause that is watched, and since when.
    watched: Option<(u32, u64)>,
}

impl Health {
    /// An error once the link has failed.
    #[inline]
    pub(super) fn healthy(&self) -> Result<(), LinkDown> {
        self.failed.map_or(Ok(()), Err)
    }

    /// Whether the link has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Whether something failed whose cause is not certain yet. Nothing is posted meanwhile.
    pub(super) fn is_doubtful(&self) -> bool {
        self.doubt.is_some()
    }

    /// Whether the peer has left in order, with nothing more to tell it.
    pub(super) fn is_deserted(&self) -> bool {
        self.deserted
    }

    /// Whether the link carries nothing more, for whatever reason.
    pub(super) fn is_over(&self) -> bool {
        self.failed.is_some() || self.doubt.is_some() || self.deserted
    }

    /// Notes that the peer has left in order.
    pub(super) fn desert(&mut self) {
        self.deserted = true;
    }

    /// The link has failed with `cause`, `PUSHGATE_DOWN_*`. The first cause stays.
    pub(super) fn fail(&mut self, cause: u32) {
        use abi::{PUSHGATE_DOWN_ACCESS as ACCESS, PUSHGATE_DOWN_RETRY as RETRY, PUSHGATE_DOWN_RNR as RNR};
        // What the peer's queue pair answered, or did not.
        let by_peer = [RETRY, RNR, ACCESS].contains(&cause);
        self.failed.get_or_insert(LinkDown::Failed { cause, by_peer });
    }

    /// Something failed with `cause`, and this host's own end may be why. The device is looked at without delay.
    pub(super) fn doubt(&mut self, cause: u32) {
        self.doubt.get_or_insert(cause);
        (self.next_events, self.next_look) = (0, 0);
    }

    /// Whether asynchronous events are to be asked for now. Asking is a system call, so the next time is a while off.
    pub(super) fn asks_for_events(&mut self, now: u64) -> bool {
        let due = now >= self.next_events;
        if due {
            self.next_events = now + EVENTS;
        }
        due
    }

    /// Whether the device has to be looked at: it has reported `news` events in all.
    pub(super) fn needs_a_look(&self, news: u64, now: u64) -> bool {
        news != self.news || now >= self.next_look
    }

    /// Whether something is amiss, or was at the last look: then a look of another link's is not enough.
    pub(super) fn is_wary(&self, news: u64) -> bool {
        news != self.news || self.doubt.is_some() || self.watched.is_some()
    }

    /// Takes in a look at the device, which has reported `news` events in all: `in_error` tells whether it reported the
    /// queue pair's error state, `found` what is wrong with the port. Returns the cause once the link has failed.
    pub(super) fn looked(
        &mut self,
        news: u64,
        in_error: impl FnOnce() -> bool,
        found: Option<u32>,
        now: u64,
    ) -> Option<u32> {
        // A responder learns of its end so, and not by a completion.
        if news != self.news && self.doubt.is_none() && in_error() {
            self.doubt = Some(abi::PUSHGATE_DOWN_WC);
        }
        (self.news, self.next_look) = (news, now + LOOK);
        match (found.or(self.doubt), self.watched) {
            (None, _) => self.watched = None,
            (Some(cause), None) => {
                self.watched = Some((cause, now));
                self.next_look = now + SETTLE;
            }
            (Some(cause), Some((_, since))) if now - since >= SETTLE => {
                self.fail(cause);
                return Some(cause);
            }
            (Some(_), Some((_, since))) => self.next_look = since + SETTLE,
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: u32 = abi::PUSHGATE_DOWN_PORT;
    const DEVICE: u32 = abi::PUSHGATE_DOWN_DEVICE;
    const MS: u64 = 1_000_000;

    fn look(h: &mut Health, found: Option<u32>, now: u64) -> Option<u32> {
        h.looked(0, || false, found, now)
    }

    #[test]
    fn p7_a_sign_counts_once_it_has_lasted_with_the_worst_that_was_found_by_then() {
        let mut h = Health::default();
        assert_eq!(look(&mut h, Some(PORT), 0), None);
        assert!(!h.needs_a_look(0, 299 * MS) && h.needs_a_look(0, 300 * MS) && h.needs_a_look(1, 0));
        assert_eq!(look(&mut h, Some(DEVICE), 200 * MS), None);
        assert_eq!(look(&mut h, Some(DEVICE), 300 * MS), Some(DEVICE));
        let down = LinkDown::Failed { cause: DEVICE, by_peer: false };
        assert_eq!(h.healthy(), Err(down));
        h.fail(abi::PUSHGATE_DOWN_RNR);
        assert_eq!(h.healthy(), Err(down), "the first cause stays");
    }

    #[test]
    fn p7_a_port_that_comes_back_in_time_is_healthy() {
        let mut h = Health::default();
        for turn in 0..5 {
            assert_eq!(look(&mut h, Some(PORT), turn * 400 * MS), None);
            assert_eq!(look(&mut h, None, turn * 400 * MS + 299 * MS), None);
        }
        assert_eq!((h.healthy(), h.is_over()), (Ok(()), false));
    }

    #[test]
    fn p7_a_request_that_failed_is_put_down_to_this_hosts_port_if_that_has_failed_too() {
        for (port, cause) in [(Some(PORT), PORT), (None, abi::PUSHGATE_DOWN_RETRY)] {
            let mut h = Health::default();
            assert!(h.asks_for_events(0) && !h.asks_for_events(EVENTS - 1));
            h.doubt(abi::PUSHGATE_DOWN_RETRY);
            assert!(h.asks_for_events(0) && h.needs_a_look(0, 0), "at once");
            assert!(h.is_doubtful() && !h.has_failed());
            look(&mut h, None, MS);
            assert_eq!(look(&mut h, port, 301 * MS), Some(cause));
            assert_eq!(h.healthy(), Err(LinkDown::Failed { cause, by_peer: port.is_none() }));
        }
    }

    #[test]
    fn p7_an_error_state_that_the_device_reports_is_a_sign_and_one_that_it_does_not_report_is_not() {
        let mut h = Health::default();
        assert_eq!(h.looked(0, || true, None, 0), None);
        assert!(!h.is_doubtful(), "no event came");
        h.looked(1, || true, None, 0);
        assert!(h.is_doubtful());
        assert_eq!(h.looked(1, || panic!("known"), None, 300 * MS), Some(abi::PUSHGATE_DOWN_WC));
    }
}
