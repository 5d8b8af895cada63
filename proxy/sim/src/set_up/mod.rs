//! How the queue pairs of a run are made: each end's program calls, the ends meet over a channel, and an end that has met
//! the other goes live: its engine takes it in, while the rest of the cluster runs.
//!
//! What decides is [`Connect`], what performs is [`pushgate_engine::connect`]; this stands in place of the loops around them, the
//! mesh of the library among them. An end adds a number to its offer and two to its places, which say what was made for
//! what: so each end that goes live can be compared with the other.

mod channel;
mod faults;
mod join;
mod lies;
mod live;
pub(super) mod state;

use pushgate_core::recovery::Patience;
use pushgate_core::session::Status;
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_engine::connect::{self, Connect, ConnectError, Event, Fds, Frame, Incarnation};
use pushgate_engine::endpoint::Endpoint;
use pushgate_link::mailbox::SendFrame;

pub(super) use self::join::local_link;
use self::state::{End, FAILED, Grave, REPEATED, SetUp, Stands, Step, Work, hash};
use super::cluster::Cluster;
use super::memory::allocate;
use super::node::Order;
use super::plan::{MS, NEVER, S, SET_UP, US};
use super::qp::{LINK, bit};
use super::violation::{Violation, broken};

/// Limits of the replacement of a link over `local`.
pub(super) const RECOVERY: Patience =
    Patience { attempt: 200 * MS, first_pause: MS, longest_pause: 50 * MS, whole: 10 * S, jitter: 0 };

/// Most that one frame or one look at the time may make an end say, and most bytes of a frame.
const MOST_EVENTS: usize = 8;
const LONGEST_FRAME: usize = 4096;
/// Most frames on their way to an end.
const MOST_FRAMES: usize = 256;

impl Cluster<'_> {
    fn end(&mut self, qp: usize, end: usize) -> &mut End {
        &mut self.set_ups[qp].ends[end]
    }

    fn own_rank(&self, qp: usize, end: usize) -> Option<u32> {
        Some(self.qps[qp].ranks[end])
    }

    pub(super) fn set_up_actor(&self) -> usize {
        self.next.len() - 4
    }

    /// When the set-up of an end goes on.
    fn next_at(&self, qp: usize, end: usize) -> u64 {
        let e = &self.set_ups[qp].ends[end];
        let next = match &e.stands {
            _ if self.qps[qp].dead[end] => NEVER,
            Stands::Waits(at) => *at,
            Stands::Calls(connect) => {
                let work = e.work.as_ref().map_or(NEVER, |(until, _)| *until);
                e.channel.next().min(connect.wakes_at().unwrap_or(NEVER)).min(work)
            }
            Stands::Live { .. } => e.channel.next(),
            Stands::Over => NEVER,
        };
        if next == NEVER { NEVER } else { next.max(e.stopped_until) }
    }

    fn next_set_up(&self) -> (u64, usize, usize) {
        let all = (0..self.set_ups.len()).flat_map(|qp| [(qp, 0), (qp, 1)]);
        all.map(|(qp, end)| (self.next_at(qp, end), qp, end)).min().unwrap_or((NEVER, 0, 0))
    }

    /// To be called when something was sent, or somebody has died.
    pub(super) fn schedule_set_up(&mut self) {
        let actor = self.set_up_actor();
        self.next[actor] = self.next_set_up().0;
    }

    /// The end that is due first goes on.
    pub(super) fn step_set_up(&mut self) -> Result<(), Violation> {
        let (at, qp, end) = self.next_set_up();
        if at <= self.now {
            self.progress.at = self.now;
            self.end(qp, end).events += 1;
            self.act(qp, end)?;
            self.fire_in_set_up(qp, end)?;
            self.look_whether_apart(qp);
        }
        self.schedule_set_up();
        Ok(())
    }

    fn act(&mut self, qp: usize, end: usize) -> Result<(), Violation> {
        let (now, who) = (self.now, qp as u64 * 2 + end as u64);
        let SetUp { ends, random, .. } = &mut self.set_ups[qp];
        let e = &mut ends[end];
        let arrives = e.channel.next() <= now;
        match &mut e.stands {
            Stands::Calls(_) if e.work.as_ref().is_some_and(|(until, _)| *until <= now) => {
                self.log.event(now, "end has worked", who, 0);
                let (_, work) = e.work.take().expect("just seen");
                self.done(qp, end, work)?;
                self.go_on(qp, end, false)
            }
            Stands::Waits(_) => {
                self.log.event(now, "call begins", who, e.incarnation);
                self.begin(qp, end);
                self.go_on(qp, end, false)
            }
            Stands::Calls(connect) if arrives => {
                let Some(frame) = e.channel.arrive(now, random) else {
                    self.log.event(now, "part of a frame arrives", who, 0);
                    return Ok(());
                };
                self.log.event(now, "frame arrives", who, frame.bytes.first().copied().unwrap_or(0).into());
                match connect.take(frame, now) {
                    Ok(()) => self.go_on(qp, end, false),
                    Err(e) => self.refuses(qp, end, &e),
                }
            }
            Stands::Calls(connect) => {
                self.log.event(now, "call looks at the time", who, 0);
                connect.tick(now);
                self.go_on(qp, end, true)
            }
            Stands::Live { with, .. } => {
                let with = *with;
                let Some(frame) = e.channel.arrive(now, random) else { return Ok(()) };
                // As the mesh does: it looks at what says that an incarnation has ended.
                let Ok(Some((from, status))) = connect::ended(&frame.bytes) else {
                    if connect::sender(&frame.bytes) == Some(with) {
                        if let Some(status) = self.qps[qp].ended[end].filter(|_| self.answers(qp)) {
                            // As the mesh does: an engine that took the place of another one may not have heard of the end, and
                            // rails that are away have no way of their own for it.
                            return self.send_end(qp, end, status);
                        }
                        self.log.event(now, "frame for a live end", who, frame.bytes[0].into());
                        let node = self.qps[qp].nodes[end];
                        if self.qps[qp].mailboxes[end].put(frame) {
                            self.nodes[node].orders.push_back(Order::Control { qp, end });
                            self.rouse(node);
                        }
                    }
                    return Ok(());
                };
                if from == with {
                    let status = Status { rank: status.rank.or(self.own_rank(qp, 1 - end)), ..status };
                    self.log.event(now, "mesh tells", who, status.word());
                    self.fail(qp, end, status);
                }
                Ok(())
            }
            Stands::Over => Ok(()),
        }
    }

    /// An end's program calls.
    fn begin(&mut self, qp: usize, end: usize) {
        let now = self.now;
        if self.end(qp, end).incarnation > 0 {
            self.make_anew(qp, end);
        }
        let offer = self.offer(qp, end);
        let gives_up = self.aborted(qp, end);
        let e = self.end(qp, end);
        e.incarnation += 1;
        (e.began, e.stalled) = (now, 0);
        let own = Incarnation::new(e.incarnation).expect("counted from 1");
        e.stands = Stands::Calls(Box::new(Connect::new(own, offer, SET_UP, gives_up, now)));
    }

    /// What an end whose call fails tells the other.
    fn aborted(&self, qp: usize, end: usize) -> Status {
        Status { rank: self.own_rank(qp, end), ..Status::new(abi::PUSHGATE_ABORTED) }
    }

    /// Opens the transport of an end.
    fn offer(&mut self, qp: usize, end: usize) -> Frame {
        self.attempts += 1;
        let (opening, attempt) = (self.open(qp, end), self.attempts);
        let offer = opening.offer(attempt, &[]).expect("descriptors are there");
        let e = self.end(qp, end);
        (e.step, e.attempt) = (Step::Opened(opening), attempt);
        offer
    }

    /// Does everything that an end's machine says. `ticked`: it says so because of the time.
    fn go_on(&mut self, qp: usize, end: usize, ticked: bool) -> Result<(), Violation> {
        for n in 0.. {
            let Stands::Calls(connect) = &mut self.end(qp, end).stands else { return Ok(()) };
            let Some(event) = connect.poll() else { break };
            if n == MOST_EVENTS {
                return Err(self.wrong(8, qp, end, format!("one frame makes it say {event:?} and more")));
            }
            match event {
                Event::Send(frame) => self.send(qp, end, frame)?,
                Event::Fence => {
                    self.abandon(qp, end);
                    self.works(qp, end, Work::Fence)?;
                }
                Event::Prepare { epoch, offer } => self.works(qp, end, Work::Prepare { epoch, offer })?,
                Event::Go { epoch, places, .. } => return self.goes_live(qp, end, epoch, &places),
                Event::End(_) if ticked => {
                    let status = Status::new(abi::PUSHGATE_TIMED_OUT);
                    let rank = self.own_rank(qp, 1 - end);
                    return self.call_fails(qp, end, Status { rank, ..status }, true);
                }
                Event::End(status) => {
                    let rank = status.rank.or(self.own_rank(qp, 1 - end));
                    return self.call_fails(qp, end, Status { rank, ..status }, true);
                }
            }
        }
        // P7: the peer's first answer begins the limit anew, once.
        let e = &self.set_ups[qp].ends[end];
        let Stands::Calls(connect) = &e.stands else { return Ok(()) };
        let bound = e.began + 2 * SET_UP + e.stalled;
        if connect.wakes_at().is_none_or(|at| at > bound) {
            let why = format!("waits until {:?}, and its limit is {bound}", connect.wakes_at());
            return Err(self.wrong(7, qp, end, why));
        }
        Ok(())
    }

    /// An end begins to do something: it is done at once, or while frames go on to arrive.
    fn works(&mut self, qp: usize, end: usize, work: Work) -> Result<(), Violation> {
        let SetUp { ends, random, .. } = &mut self.set_ups[qp];
        if random.one_in(2) {
            ends[end].work = Some((self.now + random.time(30 * US), work));
            return Ok(());
        }
        self.done(qp, end, work)
    }

    /// An end has done something: its machine is told.
    fn done(&mut self, qp: usize, end: usize, work: Work) -> Result<(), Violation> {
        let now = self.now;
        match work {
            Work::Fence => {
                let offer = self.offer(qp, end);
                self.connect(qp, end).fenced(0, offer, now);
            }
            Work::Prepare { epoch, offer } => match self.prepare(qp, end, offer) {
                Ok(places) => self.connect(qp, end).prepared(epoch, places, now),
                Err(e) => return self.refuses(qp, end, &e),
            },
        }
        Ok(())
    }

    fn connect(&mut self, qp: usize, end: usize) -> &mut Connect<Fds> {
        match &mut self.end(qp, end).stands {
            Stands::Calls(connect) => connect,
            _ => unreachable!("it has just said something"),
        }
    }

    #[cold]
    fn wrong(&self, promise: u8, qp: usize, end: usize, what: String) -> Violation {
        let q = &self.qps[qp];
        broken(promise, format!("queue pair {}, rank {}, set-up: {what}", q.number, q.ranks[end]))
    }

    /// Sends a frame to the other end.
    fn send(&mut self, qp: usize, end: usize, frame: Frame) -> Result<(), Violation> {
        let (now, SetUp { ends, random, .. }) = (self.now, &mut self.set_ups[qp]);
        if ends[end].lies {
            ends[end].sent.push(frame.clone());
        }
        let (bytes, channel) = (frame.bytes.len(), &mut ends[1 - end].channel);
        channel.send(frame, now, random);
        if bytes > LONGEST_FRAME || channel.len() > MOST_FRAMES {
            let why = format!("{} frames are under way, the last one of {bytes} bytes", channel.len());
            return Err(self.wrong(8, qp, end, why));
        }
        Ok(())
    }

    /// Gets ready to receive. Returns the places, after the numbers of both offers.
    fn prepare(&mut self, qp: usize, end: usize, offer: Frame) -> Result<Vec<u8>, ConnectError> {
        let (peer, watches) = (self.qps[qp].ranks[1 - end], self.set_ups[qp].faults > 0);
        let e = self.end(qp, end);
        let Step::Opened(opening) = std::mem::replace(&mut e.step, Step::Closed) else {
            unreachable!("an end prepares what it offered")
        };
        let mut watched = Vec::new();
        let mut allocate = |name: &str, bytes: usize| -> Result<SharedMemory, ShimError> {
            let memory = allocate(name, bytes)?;
            if watches {
                let fd = memory.fd().try_clone_to_owned().expect("a descriptor");
                watched.push(ReadOnlyMemory::from_fd(fd, bytes)?);
            }
            Ok(memory)
        };
        let (prepared, theirs, _) = opening.prepare::<u64>(peer, offer, 0, &mut allocate)?;
        let mut places = [e.attempt, theirs].map(u64::to_le_bytes).concat();
        places.extend(prepared.places());
        (e.step, e.ready_for, e.watched) = (Step::Prepared(prepared), theirs, watched);
        Ok(places)
    }

    /// Lets go of everything that an end has prepared: nobody may write there any more (P5, P8).
    fn abandon(&mut self, qp: usize, end: usize) {
        let e = self.end(qp, end);
        (e.step, e.work) = (Step::Closed, None);
        let (attempt, watched) = (e.attempt, std::mem::take(&mut e.watched));
        let graves =
            watched.into_iter().map(|memory| Grave { qp, end, attempt, hash: hash(&memory), memory });
        self.deaths.graves.extend(graves);
    }

    /// P5, P8: nobody has written to memory of an attempt that was given up.
    pub(super) fn check_graves(&self) -> Result<(), Violation> {
        match self.deaths.graves.iter().find(|grave| hash(&grave.memory) != grave.hash) {
            Some(Grave { qp, end, attempt, .. }) => {
                let why = format!("memory of attempt {attempt} was written after it was given up");
                Err(self.wrong(5, *qp, *end, why))
            }
            None => Ok(()),
        }
    }

    /// An end and the other one are ready: the end goes live.
    fn goes_live(&mut self, qp: usize, end: usize, epoch: u32, places: &[u8]) -> Result<(), Violation> {
        let tainted = self.qps[qp].tainted;
        let (numbers, places) = places.split_at(places.len().min(16));
        let e = self.end(qp, end);
        let expected = [e.ready_for, e.attempt];
        if !tainted && numbers != expected.map(u64::to_le_bytes).concat() {
            let why = format!("it goes live with attempts {expected:?}, and the other end with {numbers:?}");
            return Err(self.wrong(6, qp, end, why));
        }
        let own = e.incarnation;
        let Step::Prepared(prepared) = std::mem::replace(&mut e.step, Step::Closed) else {
            unreachable!("an end goes live when it is prepared")
        };
        let with = self.connect(qp, end).peer().expect("it is live with one");
        if self.set_ups[qp].faults == 0 && (epoch, own, with.get()) != (0, 1, 1) {
            let why = format!("without a fault incarnation {own} meets {with} in epoch {epoch}");
            return Err(self.wrong(7, qp, end, why));
        }
        let met = match prepared.meet(places) {
            Ok(met) => met,
            Err(e) => return self.refuses(qp, end, &e),
        };
        let endpoint = match self.join(qp, end, met) {
            Ok(endpoint) => endpoint,
            Err(e) => return self.refuses(qp, end, &e),
        };
        let endpoint = Box::new(self.with_recovery(qp, end, endpoint));
        self.log.event(self.now, "end goes live", qp as u64 * 2 + end as u64, epoch.into());
        let e = self.end(qp, end);
        e.watched.clear();
        e.stands = Stands::Live { with, epoch };
        // P6: both ends are live with each other, over one epoch.
        if let [Some(own), Some(other)] = [end, 1 - end].map(|end| self.set_ups[qp].live(end))
            && !tainted
            && own != (other.1, other.0, other.2)
        {
            let why = format!("incarnation, the other one and epoch are {own:?} here and {other:?} there");
            return Err(self.wrong(6, qp, end, why));
        }
        let node = self.qps[qp].nodes[end];
        let peer = self.qps[qp].nodes[1 - end];
        self.nodes[node].orders.push_back(Order::Add { endpoint, qp, end, peer });
        self.rouse(node);
        Ok(())
    }

    /// Has an end's link replaced when it breaks, if the plan says so.
    fn with_recovery(&mut self, qp: usize, end: usize, endpoint: Endpoint) -> Endpoint {
        let Stands::Calls(connect) = std::mem::replace(&mut self.end(qp, end).stands, Stands::Over) else {
            unreachable!("it has just gone live")
        };
        if !self.plan.qps[qp].recovers {
            return endpoint;
        }
        let mailbox = self.qps[qp].mailboxes[end].clone();
        let endpoint = endpoint.with_recovery(*connect, RECOVERY, mailbox, self.way(qp, end));
        match &self.qps[qp].kept[end] {
            Some(kept) => endpoint.with_journal(&kept.session),
            None => endpoint,
        }
    }

    /// The incarnations of an end that goes live, its own first.
    fn incarnations(&mut self, qp: usize, end: usize) -> (Incarnation, Incarnation) {
        let own = Incarnation::new(self.end(qp, end).incarnation).expect("counted from 1");
        (own, self.connect(qp, end).peer().expect("it is live with one"))
    }

    /// The way of an end's frames about its link.
    pub(super) fn way(&self, qp: usize, end: usize) -> SendFrame {
        let sent = self.sent.clone();
        Box::new(move |frame| sent.lock().unwrap_or_else(|e| e.into_inner()).push((qp, end, frame)))
    }

    /// Carries the frames that engines have sent.
    pub(super) fn take_sent(&mut self) -> Result<(), Violation> {
        let sent = std::mem::take(&mut *self.sent.lock().unwrap_or_else(|e| e.into_inner()));
        let any = !sent.is_empty();
        for (qp, end, frame) in sent {
            self.send(qp, end, frame)?;
        }
        if any {
            self.schedule_set_up();
        }
        Ok(())
    }

    /// What the other end has sent does not fit.
    fn refuses(&mut self, qp: usize, end: usize, why: &dyn std::fmt::Display) -> Result<(), Violation> {
        self.log.note(format_args!("{why}"));
        let rank = self.own_rank(qp, 1 - end);
        self.call_fails(qp, end, Status { rank, ..Status::new(abi::PUSHGATE_REFUSED) }, false)
    }

    /// An end's call has failed. Its program calls again if it may and wants to.
    fn call_fails(&mut self, qp: usize, end: usize, status: Status, again: bool) -> Result<(), Violation> {
        let now = self.now;
        let aborted = self.aborted(qp, end);
        if let Stands::Calls(mut connect) = std::mem::replace(&mut self.end(qp, end).stands, Stands::Over) {
            connect.abort(aborted);
            while let Some(event) = connect.poll() {
                if let Event::Send(frame) = event
                    && matches!(connect::ended(&frame.bytes), Ok(Some(_)))
                {
                    self.send(qp, end, frame)?;
                }
            }
        }
        self.abandon(qp, end);
        self.log.event(now, "call fails", qp as u64 * 2 + end as u64, status.word());
        let q = &self.qps[qp];
        let excused = q.excused | q.expected.map_or(0, |expected| expected.codes[end]);
        if excused & bit(status.code.into()) == 0 {
            return Err(self.wrong(7, qp, end, format!("{status:?} without a cause")));
        }
        if !q.tainted && status.rank.is_none_or(|rank| !q.ranks.contains(&rank)) {
            return Err(self.wrong(7, qp, end, format!("{status:?} names no rank of the two")));
        }
        let e = self.end(qp, end);
        if again && e.again > 0 {
            e.again -= 1;
            e.stands = Stands::Waits(now + e.pause);
            return Ok(());
        }
        let q = &mut self.qps[qp];
        // P7: where calls only fail and are repeated, and no end is live with one that failed, the ends meet.
        if q.excused == REPEATED && q.expected.is_none() {
            return Err(self.wrong(7, qp, end, format!("{status:?}, though both programs call again")));
        }
        let q = &mut self.qps[qp];
        q.ended[end] = Some(status);
        self.cannot_meet(qp);
        self.look_whether_finished(qp);
        Ok(())
    }

    /// The ends of a queue pair will not meet any more: both have to end.
    fn cannot_meet(&mut self, qp: usize) {
        let q = &mut self.qps[qp];
        q.expect(self.now, [q.excused | FAILED | LINK; 2]);
        self.due = self.due.min(q.expected.map_or(NEVER, |e| e.by));
    }

    /// One end is live with an incarnation of the other that has ended.
    fn look_whether_apart(&mut self, qp: usize) {
        let set_up = &self.set_ups[qp];
        let apart = (0..2).any(|end| {
            let peer = &set_up.ends[1 - end];
            let there = matches!(peer.stands, Stands::Calls(_) | Stands::Live { .. });
            set_up.live(end).is_some_and(|(_, with, _)| !there || peer.incarnation != with)
        });
        if apart && self.qps[qp].expected.is_none() {
            self.cannot_meet(qp);
        }
    }
}
