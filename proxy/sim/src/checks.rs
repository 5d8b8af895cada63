//! What is checked after the events of a run, for each end of a queue pair and at the end.

use std::sync::atomic::Ordering;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_link::ring;

use super::cluster::Cluster;
use super::memory::Guarded;
use super::model::Flow;
use super::node::Doing;
use super::plan::{Carrier, NEVER, S};
use super::qp::{BOUND, bit};
use super::violation::{Violation, broken};

impl Cluster<'_> {
    /// P7: an engine that sleeps and was not rung has no work, but what its program has yet to ring for. `by`: the node
    /// whose pass may have made work; `None`: any.
    pub(super) fn must_sleep_well(&self, node: usize, by: Option<usize>) -> Result<(), Violation> {
        let n = &self.nodes[node];
        if !n.is_asleep() || n.dead || n.unrung {
            return Ok(());
        }
        for (qp, end, id) in &n.ends {
            let q = &self.qps[*qp];
            if q.tainted || self.programs[2 * qp + end].owes || by.is_some_and(|by| q.nodes[1 - end] != by) {
                continue;
            }
            let Some(endpoint) = n.machine.endpoint(*id) else { continue };
            // The engine at the other end rings when it takes its end in.
            if !q.started && self.nodes[q.nodes[1 - end]].endpoint(*qp, 1 - end).is_none() {
                continue;
            }
            n.truthful.store(true, Ordering::Relaxed);
            let works = endpoint.has_work();
            n.truthful.store(false, Ordering::Relaxed);
            if works {
                let why = format!("rank {node} sleeps, was not rung, and queue pair {} has work", q.number);
                return Err(broken(7, why));
            }
        }
        Ok(())
    }

    /// Checks what a pass of an engine can have changed at one end. True if anything has.
    pub(super) fn check_end(&mut self, node: usize, nth: usize) -> Result<bool, Violation> {
        let (qp, end, id) = self.nodes[node].ends[nth];
        let Some(endpoint) = self.nodes[node].machine.endpoint(id) else { return Ok(false) };
        let q = &mut self.qps[qp];
        if !q.regions[end].iter().all(Guarded::is_whole) {
            return Err(broken(
                8,
                format!("queue pair {}, rank {}: bytes beside a region were written", q.number, q.ranks[end]),
            ));
        }
        if q.controls[end].renewed.swap(false, Ordering::Relaxed) {
            q.look_at_next_link(end, endpoint.rdma_number());
            self.progress.at = self.now;
        }
        let mut any = false;
        let q = &mut self.qps[qp];
        if let Some(wrong) = q.net.as_ref().and_then(|net| net.wrong()) {
            return Err(broken(5, format!("queue pair {}, over its streams {wrong}", q.number)));
        }
        if !q.tainted {
            q.check_link(end)?;
            let other = self.nodes[q.nodes[1 - end]].endpoint(qp, 1 - end);
            if let Some(other) = other {
                q.check_counts(end, endpoint.counts(), other.counts())?;
            }
            let [first, second] = &mut q.flows;
            let (out, inward) = if end == 0 { (first, second) } else { (second, first) };
            let (own, peer) = (&q.sides[end], &q.sides[1 - end]);
            any |= inward.see_records(own)?;
            any |= inward.see_signals(own)?;
            any |= inward.see_counts(own)?;
            if q.ended[end].is_none() {
                let outbound = endpoint.outbound();
                let head = outbound.staging().head();
                any |= out.see_credit(own, peer, head)?;
                any |= out.see_delivered(own, peer)?;
                let counts = endpoint.counts();
                // While the link is replaced the gate stands as it stood when the link broke.
                // An engine that died in the middle of a pass held a permit at most.
                let dies = self.nodes[node].doing == Doing::Dead;
                if endpoint.status().is_none() && counts.live && !dies {
                    let gate = outbound.gate();
                    let flight = (gate.in_flight().into(), counts.received.max(counts.resumed));
                    let exact = !matches!(q.carrier, Carrier::Verbs { .. } | Carrier::Tcp { .. });
                    out.see_gate(peer, head, flight, (gate.receives_left(), gate.granted()), exact)?;
                }
                self.log.mix(out.credit() << 32 | inward.receiver.seen as u64);
            }
        }
        self.check_journal(qp, end)?;
        Ok(any | self.see_end(qp, end)?)
    }

    /// Notes that an end shows its end, if it does and did not before.
    pub(super) fn see_end(&mut self, qp: usize, end: usize) -> Result<bool, Violation> {
        let (mut any, q) = (false, &mut self.qps[qp]);
        if q.ended[end].is_none()
            && let Some(status) = Status::from_word(ring::observe(&q.sides[end].line[1]))
        {
            q.ended[end] = Some(status);
            any = true;
            self.log.event(self.now, "end shown", qp as u64 * 2 + end as u64, status.word());
            self.check_status(qp, end, status)?;
            let published = self.programs[2 * qp + end].published();
            let q = &mut self.qps[qp];
            if !q.tainted {
                let taken = q.flows[end].taken_slots();
                q.flows[end].end(published.min(taken));
            }
            // Its program has not begun.
            if !q.started {
                self.look_whether_finished(qp);
            }
        }
        Ok(any)
    }

    /// P7 and others: an end has a status only for a cause, and the status names it.
    fn check_status(&self, qp: usize, end: usize, status: Status) -> Result<(), Violation> {
        let q = &self.qps[qp];
        let what = || format!("queue pair {}, rank {}: {status:?}", q.number, q.ranks[end]);
        let promise = match status.code as u32 {
            abi::PUSHGATE_OVERRUN => 4,
            abi::PUSHGATE_STUCK => 2,
            abi::PUSHGATE_REFUSED => 8,
            _ => 7,
        };
        let Some(expected) = q.expected else {
            return Err(broken(promise, format!("{} without a cause", what())));
        };
        if expected.codes[end] & bit(status.code.into()) == 0 {
            return Err(broken(
                promise,
                format!("{}, expected one of codes {:#x}", what(), expected.codes[end]),
            ));
        }
        let named = match status.code as u32 {
            // A liar's status may be any, and so may that of its own end where the liar lied in set-up.
            _ if q.tainted && expected.liar.is_none() => true,
            _ if q.lied_in_set_up && expected.liar == Some(q.ranks[end]) => true,
            abi::PUSHGATE_OVERRUN | abi::PUSHGATE_REFUSED => status.rank == expected.liar,
            abi::PUSHGATE_PEER_LOST if !q.tainted => {
                (0..2).any(|end| (q.dead[end] || q.lost[end]) && status.rank == Some(q.ranks[end]))
            }
            abi::PUSHGATE_LINK_DOWN => status.rank.is_some_and(|rank| q.ranks.contains(&rank)),
            _ => true,
        };
        if !named {
            return Err(broken(
                7,
                format!("{} names the wrong rank: {expected:?}, dead {:?}", what(), q.dead),
            ));
        }
        Ok(())
    }

    /// P7: an end that has a cause to end has ended within the bound.
    pub(super) fn look_for_overdue(&mut self) -> Result<(), Violation> {
        self.due = NEVER;
        for q in &self.qps {
            let Some(expected) = q.expected.filter(|_| !q.finished) else { continue };
            for end in [0, 1] {
                if self.now > expected.by && !q.has_ended(end) {
                    let why = format!(
                        "queue pair {}, rank {}: no end is shown {} s after its cause",
                        q.number,
                        q.ranks[end],
                        BOUND / S
                    );
                    return Err(broken(7, why));
                }
            }
            if !(q.has_ended(0) && q.has_ended(1)) {
                self.due = self.due.min(expected.by);
            }
        }
        Ok(())
    }

    pub(super) fn look_whether_finished(&mut self, qp: usize) {
        let q = &mut self.qps[qp];
        if q.finished {
            return;
        }
        let ended = [0, 1].map(|end| q.has_ended(end));
        let finished = if ended == [true; 2] {
            // P7: each work request that wanted a completion got one.
            // What an engine did not live to complete, nobody completes.
            q.tainted || (0..2).all(|end| q.dead[end] || q.lost[end] || q.flows[end].is_over())
        } else if !q.started || q.expected.is_some() || ended != [false; 2] {
            false
        } else {
            let done = (0..2).all(|end| self.programs[2 * qp + end].is_done());
            done && q.flows.iter().all(Flow::is_finished)
        };
        if finished {
            q.finished = true;
            self.progress.unfinished -= 1;
        }
    }

    /// When all is finished: nothing was lost on the way, and nobody wrote where nobody may.
    pub(super) fn check_the_end(&mut self) -> Result<(), Violation> {
        for (at, q) in self.qps.iter().enumerate() {
            for end in [0, 1] {
                if !q.regions[end].iter().all(Guarded::is_whole) {
                    return Err(broken(
                        8,
                        format!("queue pair {}: bytes beside a region were written", q.number),
                    ));
                }
                if q.expected.is_some() || q.tainted {
                    continue;
                }
                q.flows[1 - end].check_region(&q.sides[end])?;
                let Some(endpoint) = self.nodes[q.nodes[end]].endpoint(at, end) else { continue };
                let c = endpoint.counters();
                if (c.dropped, c.rnr, c.refused, c.stuck) != (0, 0, 0, 0) {
                    return Err(broken(4, format!("queue pair {}: {c:?}", q.number)));
                }
            }
        }
        Ok(())
    }

    pub(super) fn unfinished_state(&self) -> String {
        let all = self.qps.iter().filter(|q| !q.finished);
        let each = all.map(|q| {
            format!(
                "queue pair {} ({:?}, ended {:?}, dead {:?}, expected {:?}): {}; {}",
                q.number,
                q.carrier,
                q.ended,
                q.dead,
                q.expected,
                q.flows[0].state(),
                q.flows[1].state()
            )
        });
        each.collect::<Vec<_>>().join(" | ")
    }
}
