//! Whether a link still carries, by what work requests, the port and the queue pair's state say. Pure policy: time is
//! passed in, in nanoseconds.
//!
//! A sign of failure may be the first of a worse one: a port goes down before its device is removed, and a work request
//! fails because this host's own port did. So a sign is watched for [`SETTLE`] before it counts, unless the peer's answer
//! leaves no doubt.

use pushgate_driver_shim::abi;
use pushgate_link::LinkDown;
use pushgate_rdma_core_sys::ibv_wc_status;

/// Between two looks of a link at what was seen of its port and at its path, nanoseconds.
pub(super) const LOOK: u64 = 10_000_000;
/// What a flushed work request tells, and the queue pair's error state: something else was the cause.
const VAGUE: [u32; 2] = [abi::PUSHGATE_DOWN_WC, abi::PUSHGATE_DOWN_WC + ibv_wc_status::IBV_WC_WR_FLUSH_ERR.0];
/// How long a sign of failure is watched before it counts, nanoseconds.
pub(super) const SETTLE: u64 = 300_000_000;

/// The health of one link.
#[derive(Debug, Default)]
pub(super) struct Health {
    failed: Option<LinkDown>,
    /// The cause that a work request or the queue pair's state gave, until it is clear that this host has no worse.
    doubt: Option<u32>,
    /// The peer left in order, and this end has nothing more to tell it.
    deserted: bool,
    /// The port is to be looked at, for there is a doubt.
    asks: bool,
    next_look: u64,
    /// Since when a sign is watched.
    watched: Option<u64>,
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

    /// Something failed with `cause`, and this host's own end may be why. The port is to be looked at without delay. The first cause stays,
    /// unless that was another one's consequence.
    pub(super) fn doubt(&mut self, cause: u32) {
        if self.doubt.is_none() {
            (self.asks, self.next_look) = (true, 0);
        }
        if self.doubt.is_none_or(|doubt| VAGUE.contains(&doubt)) {
            self.doubt = Some(cause);
        }
    }

    /// Whether something failed whose cause is still to be told: devices may flush other work requests before they complete the one that
    /// failed.
    pub(super) fn awaits_cause(&self) -> bool {
        self.failed.is_none() && !self.deserted && self.doubt.is_some_and(|doubt| VAGUE.contains(&doubt))
    }

    /// Whether the port is to be looked at for a doubt that has come up since the last time.
    pub(super) fn takes_ask(&mut self) -> bool {
        std::mem::take(&mut self.asks)
    }

    /// Whether it is time to take in what was seen. The next time is a while off.
    pub(super) fn is_due(&mut self, now: u64) -> bool {
        let due = now >= self.next_look;
        if due {
            self.next_look = now + LOOK;
        }
        due
    }

    /// Takes in what the last look `found` wrong with the port. Returns the cause once the link has failed.
    pub(super) fn looked(&mut self, found: Option<u32>, now: u64) -> Option<u32> {
        match (found.or(self.doubt), self.watched) {
            (None, _) => self.watched = None,
            (Some(_), None) => self.watched = Some(now),
            (Some(cause), Some(since)) if now - since >= SETTLE => {
                self.fail(cause);
                return Some(cause);
            }
            (Some(_), Some(_)) => {}
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

    #[test]
    fn p7_a_sign_counts_once_it_has_lasted_with_the_worst_that_was_found_by_then() {
        let mut h = Health::default();
        for now in [0, 200, 299] {
            assert_eq!(h.looked(Some(PORT), now * MS), None);
        }
        assert_eq!(h.looked(Some(DEVICE), 300 * MS), Some(DEVICE));
        let down = LinkDown::Failed { cause: DEVICE, by_peer: false };
        assert_eq!(h.healthy(), Err(down));
        h.fail(abi::PUSHGATE_DOWN_RNR);
        assert_eq!(h.healthy(), Err(down), "the first cause stays");
    }

    #[test]
    fn p7_a_port_that_comes_back_in_time_is_healthy() {
        let mut h = Health::default();
        for turn in 0..5 {
            assert_eq!(h.looked(Some(PORT), turn * 400 * MS), None);
            assert_eq!(h.looked(None, turn * 400 * MS + 299 * MS), None);
        }
        assert_eq!((h.healthy(), h.is_over()), (Ok(()), false));
    }

    #[test]
    fn p7_a_request_that_failed_is_put_down_to_this_hosts_port_if_that_has_failed_too() {
        for (port, cause) in [(Some(PORT), PORT), (None, abi::PUSHGATE_DOWN_RETRY)] {
            let mut h = Health::default();
            assert!(h.is_due(0) && !h.is_due(LOOK - 1) && !h.takes_ask());
            h.doubt(abi::PUSHGATE_DOWN_RETRY);
            assert!(h.is_due(0) && h.takes_ask() && !h.takes_ask(), "at once");
            assert!(h.is_doubtful() && !h.has_failed());
            h.looked(None, MS);
            assert_eq!(h.looked(port, 301 * MS), Some(cause));
            assert_eq!(h.healthy(), Err(LinkDown::Failed { cause, by_peer: port.is_none() }));
        }
    }
}
