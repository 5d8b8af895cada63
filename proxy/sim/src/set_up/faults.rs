//! Faults while a queue pair is set up: when they happen, what they do, and what they excuse.

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;

use super::lies;
use super::state::{FAILED, REPEATED, Stands};
use crate::cluster::Cluster;
use crate::plan::{MS, SetUpFault, SetUpKind};
use crate::qp::ANY;
use crate::violation::Violation;

impl Cluster<'_> {
    /// Faults of an end's set-up whose time has come.
    pub(super) fn fire_in_set_up(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        loop {
            let dead = self.qps[qp].dead[end];
            let e = self.end(qp, end);
            let due = e.faults.iter().position(|fault| fault.after <= e.events);
            match due {
                Some(at) if !dead && matches!(e.stands, Stands::Calls(_)) => {
                    let fault = e.faults.remove(at);
                    self.fire_one_in_set_up(qp, end, fault)?;
                }
                _ => return Ok(()),
            }
        }
    }

    fn fire_one_in_set_up(&mut self, qp: usize, end: usize, fault: SetUpFault) -> Result<(), Violation> {
        let now = self.now;
        self.faults.fired += 1;
        self.log.event(now, "fault in set-up", qp as u64 * 2 + end as u64, fault.number.into());
        self.log.note(format_args!("{:?}", fault.kind));
        let aborted = self.aborted(qp, end);
        // What this end does may end either call, and both programs call again.
        let both_call = |cluster: &mut Self, excused: u64, again: u32, pause: u64| {
            cluster.qps[qp].excused |= excused;
            for e in &mut cluster.set_ups[qp].ends {
                e.again += again;
                e.pause = e.pause.max(pause);
            }
        };
        match fault.kind {
            SetUpKind::Late { .. } => unreachable!("its end's first call is late"),
            SetUpKind::Repeat { pause } => {
                let alone = self.set_ups[qp].faults == 1;
                both_call(self, if alone { REPEATED } else { FAILED }, 2, pause);
                self.call_fails(qp, end, aborted, true)?;
            }
            SetUpKind::GiveUp => {
                both_call(self, FAILED, 0, 0);
                self.call_fails(qp, end, aborted, false)?;
            }
            SetUpKind::Stop { time } => {
                both_call(self, FAILED, 1, MS);
                let e = self.end(qp, end);
                e.stopped_until = now + time;
                e.stalled += time;
                self.end(qp, 1 - end).channel.stall(now, time);
            }
            SetUpKind::Die => {
                let node = self.qps[qp].nodes[end];
                self.die(node);
            }
            SetUpKind::Echo { times } => self.end(qp, end).channel.echo(times),
            SetUpKind::Lie { seed } => self.lie_in_set_up(qp, end, seed)?,
        }
        Ok(())
    }

    /// An end forges frames. Its queue pair is given up a while later, as programs do whose calls time out.
    fn lie_in_set_up(&mut self, qp: usize, end: usize, seed: u64) -> Result<(), Violation> {
        self.nic.refuses();
        self.rails.iter().for_each(pushgate_link_verbs::simulated::Sim::refuses);
        let q = &mut self.qps[qp];
        (q.tainted, q.lied_in_set_up) = (true, true);
        q.expect(self.now, [ANY; 2]);
        if let Some(expected) = &mut q.expected {
            expected.liar = Some(q.ranks[end]);
            self.due = self.due.min(expected.by);
        }
        let ends = &self.set_ups[qp].ends;
        let (what, frames) = lies::forge(&ends[end].sent, ends[1 - end].incarnation, seed);
        self.log.note(format_args!("{what}"));
        for frame in frames {
            self.send(qp, end, frame)?;
        }
        for end in [0, 1] {
            self.programs[2 * qp + end].give_up();
            let delay = self.random.within(20 * MS, 400 * MS);
            self.tell(qp, end, Status::new(abi::PUSHGATE_ABORTED), delay);
        }
        Ok(())
    }
}
