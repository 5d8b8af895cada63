//! How a coll comm loses ranks, fails and is closed, and what waits for copies of the GPU that are under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Reach, State};
use crate::end::SETTLE;
use crate::error::{Code, Failure, Result};
use crate::log;
use crate::rma::incoming::Incoming;
use crate::rma::landing::Inward;
use crate::rma::means::Means;
use crate::rma::memory::Memory;
use crate::rma::outgoing::What;
use crate::rma::requests::Cause;

/// How long closing waits until other ranks have what was sent to them.
const DELIVERY: Duration = Duration::from_secs(2);

impl State {
    /// A rank is lost: what waits for it fails, and what is asked of it later. A rank that closes in order is no loss, unless
    /// something still waits for it.
    pub(super) fn lose(&mut self, means: &Means, rank: u32, cause: Cause) {
        let peer = &mut self.peers[rank as usize];
        // A rank that has asked nothing of this one has no queue pair to say so with.
        let in_order = peer.bye || matches!(&peer.reach, Reach::Live(outgoing) if outgoing.has_all());
        let ops = std::mem::take(&mut peer.ops);
        let mut waited = !ops.is_empty();
        let unanswered = !peer.bye && ops.iter().any(|op| matches!(op.what, What::Reply { .. }));
        for request in ops.into_iter().filter_map(|op| op.request) {
            self.requests.fail(request, &cause);
        }
        waited |= self.requests.fail_gets(rank, &cause);
        match std::mem::replace(&mut peer.reach, Reach::Lost(cause.clone())) {
            Reach::Live(mut outgoing) => {
                waited |= outgoing.is_staging();
                outgoing.give_up(|request| self.requests.fail(request, &cause));
                // The window goes with the queue pair, unless the GPU still copies to it.
                if let Err(failure) = self.settle_copies() {
                    log::warn(&format!("RMA: the window to rank {rank} stays mapped: {failure}"));
                    std::mem::forget(outgoing);
                }
            }
            Reach::Dialing(mut handle) => {
                means.attempts.abandon(&mut handle);
                if unanswered {
                    // No queue pair to it ends here, so its gets would wait for ever.
                    self.incoming.iter().filter(|from| from.rank == Some(rank)).for_each(Incoming::abort);
                }
            }
            Reach::Unasked => {}
            Reach::Lost(_) => {
                // It was said when the rank was lost, unless the rank had closed in order.
                if waited {
                    means.failed(&cause);
                }
                return;
            }
        }
        if waited || !in_order {
            log::warn(&format!("RMA: rank {rank} is lost: {}", cause.text));
            means.failed(&cause);
        }
    }

    /// Looks whether a rank is lost to which nothing waits to be sent.
    pub(super) fn look_for_losses(&mut self, means: &Means) {
        for rank in 0..self.peers.len() as u32 {
            if let Reach::Live(outgoing) = &self.peers[rank as usize].reach
                && let Some(cause) = outgoing.ended()
            {
                self.lose(means, rank, cause);
            }
        }
    }

    /// The coll comm as a whole fails. The other ranks are told by the end of all queue pairs.
    pub(super) fn break_off(&mut self, means: &Means, cause: Cause) {
        log::warn(&format!("RMA: {}", cause.text));
        means.failed(&cause);
        self.requests.fail_all(&cause);
        self.incoming.iter().for_each(Incoming::abort);
        for peer in &mut self.peers {
            match &mut peer.reach {
                Reach::Live(outgoing) => outgoing.abort(),
                Reach::Dialing(handle) => {
                    means.attempts.abandon(handle);
                    peer.reach = Reach::Lost(cause.clone());
                }
                Reach::Unasked | Reach::Lost(_) => {}
            }
        }
        self.broken = Some(cause);
    }

    /// Of a coll comm that has failed: ranks that connect are told so by the end of their queue pairs.
    pub(super) fn turn_away(&mut self, means: &Means) {
        // What fails here ends the attempt of that rank too.
        while let Ok(Some(made)) = means.listener.next(&means.purpose()) {
            drop(Incoming::new(means.runtime.clone(), made));
        }
    }

    /// Whether copies by the GPU are under way.
    pub(super) fn copies_are_under_way(&self) -> bool {
        self.inward.is_busy()
            || self.own.is_busy()
            || self.outward.as_ref().is_some_and(|copies| !copies.is_done())
    }

    /// Waits until the GPU has done what it was told. A copy takes as long as its bytes take over PCIe.
    pub(super) fn settle_copies(&mut self) -> Result<()> {
        let began = Instant::now();
        while self.copies_are_under_way() {
            self.inward.advance()?;
            self.own.advance(&mut self.inward, &mut self.requests)?;
            self.inward.mark()?;
            if let Some(outward) = &mut self.outward {
                outward
                    .mark_what_is_open()
                    .and_then(|_| outward.look())
                    .map_err(Failure::system("copying"))?;
            }
            if began.elapsed() > SETTLE {
                self.inward.check()?;
                return Err(Failure::new(Code::System, format!("the GPU still copies after {SETTLE:?}")));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Nothing uses this memory any more, which is deregistered: what still waits to be sent out of it fails, with all that
    /// is asked of the same ranks.
    pub fn forget(&mut self, means: &Means, memory: &Arc<Memory>) -> Result<()> {
        let cause = || Cause {
            code: Code::Usage,
            text: format!(
                "{} bytes at {:#x} were deregistered while an operation still needed them",
                memory.bytes, memory.address
            )
            .into(),
        };
        for rank in 0..self.peers.len() as u32 {
            if self.peers[rank as usize].ops.iter().any(|op| op.uses(memory)) {
                self.lose(means, rank, cause());
            }
        }
        self.requests.fail_gets_into(memory, &cause());
        self.settle_copies()?;
        let passed = self.inward.passed();
        for from in &mut self.incoming {
            from.settle(passed, &mut self.requests);
        }
        self.settle_flushes();
        self.inward.forget(memory);
        Ok(())
    }

    /// Sends what was begun, tells the ranks that no more follows, and waits a while until they have it.
    pub fn close(&mut self, means: &Means) {
        let began = Instant::now();
        let mut said = vec![false; self.peers.len()];
        loop {
            self.progress(means);
            let mut waits = false;
            for (peer, said) in self.peers.iter_mut().zip(&mut said) {
                let outgoing = match &mut peer.reach {
                    Reach::Live(outgoing) if outgoing.ended().is_none() => outgoing,
                    Reach::Dialing(_) => {
                        waits |= !peer.ops.is_empty();
                        continue;
                    }
                    _ => continue,
                };
                if peer.ops.is_empty() && !outgoing.is_staging() && !*said {
                    *said = outgoing.say_bye();
                }
                waits |= !*said || !outgoing.is_delivered();
            }
            if !waits || self.broken.is_some() {
                break;
            }
            if began.elapsed() > DELIVERY {
                log::warn(&format!(
                    "RMA: closed after {DELIVERY:?}, though some rank does not have all that was sent to it"
                ));
                break;
            }
            std::thread::yield_now();
        }
        for peer in &mut self.peers {
            if let Reach::Dialing(handle) = &mut peer.reach {
                means.attempts.abandon(handle);
            }
        }
        let cause = Cause { code: Code::Usage, text: "the coll comm is closed".into() };
        self.requests.fail_all(&cause);
        self.broken = Some(cause);
        let settled = self.settle_copies();
        let ends = (std::mem::take(&mut self.incoming), std::mem::take(&mut self.peers));
        if settled.is_err() {
            log::warn("RMA: the GPU still copies, so the memory that it copies to stays mapped");
            std::mem::forget(ends);
            std::mem::forget(std::mem::replace(&mut self.inward, Inward::new(None)));
            std::mem::forget(self.outward.take());
            self.own.forget();
        }
    }
}
