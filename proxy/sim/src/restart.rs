//! Engines that die and are replaced, as the engine of a proxy process is: what outlives an engine, and what becomes of its
//! queue pairs.
//!
//! An engine dies after any of its stores to memory that others see, or between two passes. Its memory of its own is gone:
//! cursors, links, frames that it was handed. The memory of its queue pairs stays as the last store left it. Some time later
//! another engine goes on with those that have a session segment, by [`Endpoint::resumed`]; the others end with *peer lost*, which their programs
//! write in place of the engine.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_core::journal::Broken;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::segment::{Segment, write_header};
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::journal::{self, Journal};
use pushgate_link::memory::{Mapped, Words};

use super::cluster::Cluster;
use super::kept::copy;
use super::memory::{self, allocate};
use super::node::{Crash, Doing, Order};
use super::plan::{Carrier, MS, S, US};
use super::qp::bit;
use super::set_up::{RECOVERY, local_link};
use super::violation::{Violation, broken};

impl Cluster<'_> {
    /// Whether the engine of an end of this queue pair may be replaced.
    pub(super) fn goes_on(&self, qp: usize) -> bool {
        self.qps[qp].kept.iter().any(Option::is_some)
    }

    /// Whether frames for an end that has ended are answered, as a mesh does.
    pub(super) fn answers(&self, qp: usize) -> bool {
        self.goes_on(qp) || matches!(self.qps[qp].carrier, Carrier::Devices { .. })
    }

    /// A rank's engine is to die: after `left` stores, or soon.
    pub(super) fn crash(&mut self, node: usize, left: u64, down: Option<(usize, usize)>, again: u8) {
        let n = &mut self.nodes[node];
        if n.dead || n.crash.is_some() || n.doing == Doing::Dead {
            return;
        }
        // Most of them die after a store.
        let soon = if self.deaths.random.one_in(4) { 20 * MS } else { 500 * MS };
        let by = self.now + self.deaths.random.within(100 * US, soon);
        n.crash = Some(Crash { left, by, down, again });
        if n.doing == Doing::Asleep {
            self.next[node] = self.next[node].min(by);
        }
    }

    /// A rank's engine has died. Queue pairs whose links are not replaced end here.
    pub(super) fn bury(&mut self, node: usize) -> Result<(), Violation> {
        let again = self.nodes[node].crash.map_or(0, |crash| crash.again);
        let ends = self.nodes[node].bury();
        self.deaths.restarted += 1;
        self.log.event(self.now, "engine has died", node as u64, ends.len() as u64);
        let downtime = match self.deaths.random.below(16) {
            0 => self.deaths.random.within(100 * MS, S),
            1..5 => self.deaths.random.within(5 * MS, 50 * MS),
            _ => self.deaths.random.within(50 * US, 5 * MS),
        };
        self.next[node] = self.now + downtime;
        for (qp, end) in ends {
            let q = &mut self.qps[qp];
            q.controls[end].engine_dies();
            q.flows[end].engine_died(q.expected.is_some());
            // Frames that the engine was handed and had not looked at.
            if self.deaths.random.one_in(2) {
                q.mailboxes[end].take_all();
            }
            if self.plan.qps[qp].recovers {
                self.nodes[node].waiting.push((qp, end));
            } else {
                self.lose(qp, end)?;
            }
        }
        if let Some(crash) = again.checked_sub(1) {
            let left = self.deaths.random.of(&[8, 60, 400]);
            let (left, by) = (
                self.deaths.random.below(left),
                self.next[node] + self.deaths.random.within(100 * US, 20 * MS),
            );
            self.nodes[node].crash = Some(Crash { left, by, down: None, again: crash });
        }
        Ok(())
    }

    /// An engine that died may have made work for a peer that sleeps, and not have rung.
    pub(super) fn neighbours_may_sleep(&mut self, node: usize) {
        for i in 0..self.nodes[node].neighbours.len() {
            let other = self.nodes[node].neighbours[i];
            let other = &mut self.nodes[other];
            other.unrung |= other.doing == Doing::Asleep;
        }
    }

    /// Another engine takes the place of one that died.
    pub(super) fn take_over(&mut self, node: usize) -> Result<(), Violation> {
        self.nodes[node].set_time(self.now);
        self.log.event(self.now, "engine takes over", node as u64, 0);
        (self.nodes[node].doing, self.progress.at) = (Doing::Passing, self.now);
        let waiting = std::mem::take(&mut self.nodes[node].waiting);
        for (i, (qp, end)) in waiting.iter().copied().enumerate() {
            let q = &self.qps[qp];
            let (own, peer) = (q.ends_shown(end), q.nodes[1 - end]);
            if own || q.kept[end].is_none() {
                self.lose(qp, end)?;
                continue;
            }
            let (now, mut resumed) = (self.now, Ok(()));
            let (endpoint, regions) = (self.endpoint_anew(qp, end), self.regions(qp, end));
            let (q, ends) = (&self.qps[qp], self.met_as(qp, end).expect("it was live").0);
            let session = q.kept[end].as_ref().expect("seen above").session.clone();
            let (keys, mailbox, way) = (q.keys[end], q.mailboxes[end].clone(), self.way(qp, end));
            let died = self.nodes[node].dies_in(|n| {
                let endpoint = endpoint.resumed(session, ends, RECOVERY, mailbox, way);
                resumed = endpoint.map(|mut endpoint| {
                    endpoint.set_time(now);
                    for (key, (memory, bytes)) in keys.into_iter().zip(regions) {
                        assert!(endpoint.restore_region(key, memory, bytes), "no other region has its place");
                    }
                    n.add(Box::new(endpoint), qp, end, peer, now);
                    n.orders.push_back(Order::Control { qp, end });
                });
            });
            self.see_what_was_repeated(qp, end)?;
            if died {
                let rest =
                    waiting[i..].iter().filter(|end| self.nodes[node].endpoint(end.0, end.1).is_none());
                self.nodes[node].waiting = rest.copied().collect();
                return self.bury(node);
            }
            match resumed {
                Ok(()) => self.check_resumed(qp, end)?,
                Err(why) => self.is_refused(qp, end, &why)?,
            }
        }
        self.next[node] = self.now + self.deaths.random.below(2_000);
        self.take_sent()
    }

    /// What the next engine of an end begins with: over a link that nobody has seen.
    fn endpoint_anew(&self, qp: usize, end: usize) -> Endpoint {
        let (q, geometry) = (&self.qps[qp], self.plan.qps[qp].ends[end].geometry);
        let kept = q.kept[end].as_ref().expect("another engine goes on with it");
        let segment = Arc::new(allocate("link", geometry.link_bytes()).expect("memory for a link segment"));
        write_header(&segment, Segment::Link, &geometry).expect("a segment of this geometry");
        memory::make_readable(segment.as_ptr().as_ptr() as usize, segment.len());
        q.controls[end].segments.lock().unwrap_or_else(|e| e.into_inner()).push(segment.clone());
        let bell = kept.bell.as_ref().map(|fd| Bell::from_fd(copy(fd.as_fd())).expect("a bell"));
        let ringer = kept.peer_bell.as_ref().map(|fd| Ringer::from_fd(copy(fd.as_fd())).expect("a ringer"));
        // A process that is killed does not shut its sockets down. Who has asked for the descriptor does not, either.
        bell.iter().for_each(|bell| _ = bell.handle());
        ringer.iter().for_each(|ringer| _ = ringer.as_fd());
        let bells = (bell, ringer);
        let peer = (&kept.peer_link, &kept.peer_geometry);
        let link = local_link(q, end, geometry, &Mapped::from(segment), peer, kept.window.clone(), bells);
        self.endpoint_over(qp, end, link, kept.peer_geometry)
    }

    /// The next engine can't go on with an end: only where somebody has lied.
    fn is_refused(&mut self, qp: usize, end: usize, why: &Broken) -> Result<(), Violation> {
        let q = &self.qps[qp];
        self.log.note(format_args!("{why}"));
        if !q.tainted && !q.ends_shown(end) {
            return Err(broken(6, format!("queue pair {}, rank {}: {why}", q.number, q.ranks[end])));
        }
        self.lose(qp, end)
    }

    /// No engine goes on with an end: its program says so in place of the engine, as `RemoteEngine` does.
    fn lose(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        let now = self.now;
        let q = &mut self.qps[qp];
        q.lost[end] = true;
        let status = Status { rank: Some(q.ranks[end]), ..Status::new(abi::PUSHGATE_PEER_LOST) };
        let store = |word: &std::sync::atomic::AtomicU64| {
            _ = word.compare_exchange(0, status.word(), Ordering::Release, Ordering::Relaxed);
        };
        store(&q.sides[end].line[1]);
        let link = q.first_links[end].as_ref().expect("it has met the other end");
        store(&Words::writable(link, abi::PUSHGATE_LINK_STATUS as usize, 1)[0]);
        if !q.has_ended(end) {
            q.expect(now, [bit(abi::PUSHGATE_PEER_LOST); 2]);
            self.due = self.due.min(q.expected.map_or(u64::MAX, |e| e.by));
        }
        if self.plan.qps[qp].recovers {
            self.send_end(qp, end, status)?;
            self.schedule_set_up();
        }
        self.see_end(qp, end)?;
        self.look_whether_finished(qp);
        let node = self.qps[qp].nodes[end];
        self.neighbours_may_sleep(node);
        Ok(())
    }

    /// P6: the next engine of an end goes on after everything that the devices or the peer were told.
    fn check_resumed(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        let q = &self.qps[qp];
        let Some(endpoint) = self.nodes[q.nodes[end]].endpoint(qp, end).filter(|_| !q.tainted) else {
            return Ok(());
        };
        let counts = endpoint.counts();
        let least = q.flows[1 - end].told();
        if counts.accepted < least {
            let why = format!(
                "queue pair {}, rank {}: the next engine goes on after message {}, and {least} were shown",
                q.number, q.ranks[end], counts.accepted
            );
            return Err(broken(6, why));
        }
        Ok(())
    }

    /// P1, P5: an engine that takes over an end repeats the credit and the count of delivered slots, and the end's program
    /// goes by them at once. If that engine died meanwhile no endpoint is left to ask, so the session segment says how many
    /// slots were posted.
    fn see_what_was_repeated(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        let q = &mut self.qps[qp];
        let Some(kept) = q.kept[end].as_ref().filter(|_| !q.tainted && q.ended[end].is_none()) else {
            return Ok(());
        };
        let signals = q.sides[end].geometry.signals;
        let Ok((_, journal::Kept { sent, .. })) = Journal::resumed(&kept.session, signals, kept.receives)
        else {
            return Ok(());
        };
        let (out, own, peer) = (&mut q.flows[end], &q.sides[end], &q.sides[1 - end]);
        out.see_credit(own, peer, sent.slots)?;
        out.see_delivered(own, peer)?;
        Ok(())
    }

    /// P6: what an end's session segment says is so, and it covers what was told.
    pub(super) fn check_journal(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        let q = &mut self.qps[qp];
        let Some(kept) = q.kept[end].as_ref().filter(|_| !q.tainted) else { return Ok(()) };
        let journal::Kept { sent, taken, .. } =
            match Journal::resumed(&kept.session, q.sides[end].geometry.signals, kept.receives) {
                Ok((_, kept)) => kept,
                Err(e) => {
                    return Err(broken(6, format!("queue pair {}, rank {}: {e}", q.number, q.ranks[end])));
                }
            };
        let [first, second] = &mut q.flows;
        let (out, inward) = if end == 0 { (first, second) } else { (second, first) };
        out.see_journal_of_sender(&sent, &q.sides[1 - end])?;
        inward.see_journal_of_receiver(&taken, &q.sides[end])
    }
}
