//! What completions tell a link over RDMA: work requests that are done, immediate data that arrived, and what failed.

use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::order;
use pushgate_rdma_core_sys as sys;

use super::super::inbox::NOTIFY;
use super::super::{LAST_SEND, NOTIFIES, RECEIVE};
use super::{COMPLETIONS, VerbsLink};

/// How often completions are taken in a row before other queue pairs have their turn.
const ROUNDS: u32 = 4;

impl VerbsLink {
    /// Takes completions. True if there were any.
    pub(super) fn poll_cq(&mut self) -> bool {
        let mut any = false;
        // A bound, for a peer may send what wakes as fast as we take it (P8).
        for _ in 0..ROUNDS {
            let Some(rc) = &self.rc else { return any };
            let n = match rc.cq.poll(&mut self.completions[..]) {
                Ok(n) => n,
                Err(e) => {
                    limited!(
                        error,
                        self.terms.peer,
                        rank = self.own.rank,
                        peer = self.terms.peer,
                        "polling the CQ: {e}"
                    );
                    self.health.fail(abi::PUSHGATE_DOWN_DEVICE);
                    return true;
                }
            };
            any |= n > 0;
            for i in 0..n {
                let wc = self.completions[i];
                if wc.status != sys::ibv_wc_status::IBV_WC_SUCCESS {
                    self.broken(&wc);
                } else if wc.wr_id == RECEIVE {
                    if wc.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_IMM.0 == 0 {
                        limited!(
                            error,
                            self.terms.peer,
                            rank = self.own.rank,
                            peer = self.terms.peer,
                            "a receive without immediate data"
                        );
                        self.health.fail(abi::PUSHGATE_DOWN_WC);
                        return true;
                    }
                    // SAFETY: the flag says that this member of the union was set.
                    self.arrived(u32::from_be(unsafe { wc.__bindgen_anon_1.imm_data }));
                } else if wc.wr_id >= LAST_SEND {
                    self.last_completed(wc.wr_id);
                } else {
                    self.chain.done = self.chain.done.max(wc.wr_id);
                }
            }
            if n < COMPLETIONS {
                break;
            }
        }
        if any {
            let mask = self.flight.last_wr.len() as u64 - 1;
            while self.flight.messages_done < self.flight.sent
                && self.flight.last_wr[(self.flight.messages_done & mask) as usize] <= self.chain.done
            {
                self.flight.messages_done += 1;
            }
            // What the completions announce was written before them. The provider's barrier is before its reads of the CQE.
            order::from_device();
        }
        any
    }

    /// Immediate data arrived, and with it a receive was consumed.
    pub(super) fn arrived(&mut self, imm: u32) {
        if imm & NOTIFY != 0 {
            self.line.was_notified();
            self.post_receives();
            return;
        }
        self.inbox.announce(imm);
    }

    /// As many receives as were granted, and those set aside.
    pub(super) fn post_receives(&mut self) {
        if !self.terms.imm || self.has_ended() {
            return;
        }
        let due = self.line.granted() + NOTIFIES as u64 + self.line.notified();
        let missing = due.saturating_sub(self.receives_posted);
        self.receives_posted += missing;
        let Some(rc) = &self.rc else { return };
        if let Err(e) = rc.post_receives(missing as u32) {
            self.refused("posting receives", &e);
        }
    }

    /// A work request failed.
    #[cold]
    pub(super) fn broken(&mut self, wc: &sys::ibv_wc) {
        if self.has_ended() {
            // Flushed, as they should be.
            return self.last_completed(wc.wr_id);
        }
        use sys::ibv_wc_status as s;
        let flushed = wc.status == s::IBV_WC_WR_FLUSH_ERR;
        if self.health.is_over() && (flushed || !self.health.awaits_cause()) {
            return;
        }
        let detail = match wc.status {
            s::IBV_WC_RETRY_EXC_ERR => abi::PUSHGATE_DOWN_RETRY,
            s::IBV_WC_RNR_RETRY_EXC_ERR => abi::PUSHGATE_DOWN_RNR,
            s::IBV_WC_REM_ACCESS_ERR => abi::PUSHGATE_DOWN_ACCESS,
            other => abi::PUSHGATE_DOWN_WC + other.0,
        };
        // Who said that it leaves takes nothing more, and need not.
        let taken = if self.own.rail { self.inbox.stripes() } else { self.inbox.received() };
        if self.has_told_its_end() || self.inbox.peer_left() && self.flight.base + self.flight.sent == taken {
            self.health.desert();
            return;
        }
        // SAFETY: the library's own text for any value.
        let text = unsafe { std::ffi::CStr::from_ptr(self.device.verbs.ibv_wc_status_str(wc.status)) };
        let device = self.device.name();
        limited!(
            error,
            self.terms.peer,
            rank = self.own.rank,
            peer = self.terms.peer,
            device,
            "RDMA work request failed: {}",
            text.to_string_lossy()
        );
        match detail {
            // The peer's answer: there is no doubt.
            abi::PUSHGATE_DOWN_RNR => self.health.fail(detail),
            // This host's own end may be the cause of a packet that does not go out, or that
            // nobody answers, and the port may say so a moment later. Access is refused too where the peer's process was
            // killed: the kernel takes its registrations back one by one, some before the queue pair. Then the peer is lost,
            // as the mesh says a moment later.
            _ => self.health.doubt(detail),
        }
    }
}
