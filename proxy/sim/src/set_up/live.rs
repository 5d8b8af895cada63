//! What becomes of an end beside its machine: its program or the mesh ends it, its link breaks, its process dies; and when
//! the programs of a queue pair begin.

use pushgate_core::session::Status;
use pushgate_engine::connect::{self, Fds, Frame, Incarnation};

use super::state::{SetUp, Stands};
use crate::cluster::Cluster;
use crate::node::Order;
use crate::plan::US;
use crate::violation::Violation;

impl Cluster<'_> {
    /// Somebody other than the peer ends an end: its program, or the mesh that has lost the peer.
    pub(crate) fn end_one(&mut self, qp: usize, end: usize, status: Status) -> Result<(), Violation> {
        match &self.set_ups[qp].ends[end].stands {
            _ if self.qps[qp].dead[end] => {}
            Stands::Live { .. } => self.fail(qp, end, status),
            Stands::Waits(_) | Stands::Calls(_) => {
                self.call_fails(qp, end, status, false)?;
                self.look_whether_apart(qp);
                self.schedule_set_up();
            }
            Stands::Over => {}
        }
        Ok(())
    }

    /// Tells an end's engine that the end has failed.
    pub(super) fn fail(&mut self, qp: usize, end: usize, status: Status) {
        let node = self.qps[qp].nodes[end];
        self.nodes[node].orders.push_back(Order::Fail { qp, end, status });
        self.rouse(node);
    }

    /// An end's link broke, and the end tells the other one beside it.
    pub(crate) fn tell_broken(&mut self, qp: usize, end: usize, status: Status) -> Result<(), Violation> {
        self.send_end(qp, end, status)?;
        self.schedule_set_up();
        Ok(())
    }

    /// Tells the other end that an end has ended, if the end is live.
    pub(crate) fn send_end(&mut self, qp: usize, end: usize, status: Status) -> Result<(), Violation> {
        let Some(([own, with], _)) = self.met_as(qp, end) else { return Ok(()) };
        let bytes = connect::end(own, Some(with), status);
        self.send(qp, end, Frame { bytes, along: Fds::default() })
    }

    /// Of an end that is live: its incarnation and the other end's, and the epoch in which they met.
    pub(crate) fn met_as(&self, qp: usize, end: usize) -> Option<([Incarnation; 2], u32)> {
        let (own, with, epoch) = self.set_ups[qp].live(end)?;
        Some(([own, with].map(|n| Incarnation::new(n).expect("counted from 1")), epoch))
    }

    /// An end's process is gone.
    pub(crate) fn set_up_dies(&mut self, qp: usize, end: usize) {
        let now = self.now;
        if !self.is_live(qp, end) {
            self.end(qp, end).stands = Stands::Over;
        }
        self.abandon(qp, end);
        self.end(qp, 1 - end).channel.cut_off(now);
        self.schedule_set_up();
    }

    /// Queue pairs whose ends met at a later attempt than the first one of both, and those whose ends did not meet.
    pub(crate) fn met(&self) -> (u32, u32) {
        let both = |set_up: &SetUp| Some([set_up.live(0)?, set_up.live(1)?]);
        let later = |[a, b]: [(u64, u64, u32); 2]| a.0 > 1 || b.0 > 1 || a.2 > 0;
        let all = self.set_ups.iter();
        let unmet = all.clone().filter(|set_up| both(set_up).is_none()).count();
        (all.filter_map(both).filter(|ends| later(*ends)).count() as u32, unmet as u32)
    }

    /// An end is live.
    pub(crate) fn is_live(&self, qp: usize, end: usize) -> bool {
        self.set_ups[qp].live(end).is_some()
    }

    /// The programs of a queue pair begin to post when both engines have their ends, and the regions are known.
    pub(crate) fn try_start(&mut self, qp: usize) {
        let q = &self.qps[qp];
        if q.expected.is_some() || q.dead.contains(&true) {
            return;
        }
        let told = (0..2).all(|end| {
            let endpoint = self.nodes[q.nodes[end]].endpoint(qp, end);
            endpoint.is_some_and(|e| e.status().is_none() && e.regions_told())
        });
        if !told {
            return;
        }
        self.qps[qp].started = true;
        for end in [0, 1] {
            let keys = self.qps[qp].keys;
            let facts = &mut self.programs[2 * qp + end].facts;
            (facts.rkey, facts.buffers, facts.lkey) = (keys[1 - end][0], keys[end][1], keys[end][2]);
            let actor = self.nodes.len() + 2 * qp + end;
            self.next[actor] = self.now + self.random.below(20 * US);
        }
        self.fire_deferred(qp);
    }
}
