//! A connection with another agent: what it owes and is owed, over one queue pair. [`Session::progress`] takes what has come and sends
//! what there is credit for; it never waits.
//!
//! A WRITE goes as payload with its places, and the peer says how many WRITEs are in place. A READ asks in requests of bounded size,
//! [`JOBS`] of them at once, and the peer sends their payload. Larger pieces of host memory are put from region to region of the queue
//! pair instead, once the peer has leased its registrations (`regions.rs`). Between host memory of two processes of one host the bytes
//! are copied directly, with leases too (`transfer.rs`). `receiving.rs` and `sending.rs` are the two ways.

pub mod receiving;
mod sending;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use pushgate::{Comm, HostEnd};
use pushgate_driver_shim::process::Process;

use crate::gate::{Closing, Gate, Reached};
use crate::gpu::Gpus;
use crate::on_gpu::{Grave, OnGpu, Within};
use crate::pieces::Cursor;
use crate::regions::{LEAST, Regions, Standing};
use crate::registrations::{Own, Registrations};
use crate::status::Status;
use crate::transfer::{Copying, Lease, Transfer, Way};
use crate::wire::{CHUNK, HEAD, Message, Place, TOKEN};

/// Requests of READs that are under way at once, each way.
const JOBS: usize = 16;
/// Answers that a peer may leave untaken.
pub const MOST_ANSWERS: usize = 1 << 18;

/// Why a connection has ended.
pub enum Ended {
    /// The peer has ended it.
    Left,
    /// Something failed, or the peer did what it may not.
    Failed(String),
}

impl From<pushgate::Error> for Ended {
    fn from(e: pushgate::Error) -> Ended {
        match e {
            pushgate::Error::Aborted { .. } => Ended::Left,
            other => Ended::Failed(other.to_string()),
        }
    }
}

impl From<String> for Ended {
    fn from(why: String) -> Ended {
        Ended::Failed(why)
    }
}

impl From<&str> for Ended {
    fn from(why: &str) -> Ended {
        Ended::Failed(why.into())
    }
}

/// What the connections of an agent share.
pub struct Shared {
    /// Connections that have ended while GPUs copied.
    pub graves: Vec<Grave>,
    /// Connections that have ended and are to be dropped.
    pub ended: Vec<Grave>,
    /// Gates of connections that have ended, through which a peer still copies.
    pub closing: Vec<Closing>,
    /// Transfers within the agent that GPUs copy.
    pub within: Vec<Within>,
    /// The GPUs.
    pub gpus: Gpus,
    /// What is registered.
    pub registrations: Registrations,
    /// Notifications that have come: the agent that sent each, and the text.
    pub inbox: VecDeque<(String, Vec<u8>)>,
    /// Bytes of them.
    pub inbox_bytes: usize,
}

impl Shared {
    /// Nothing is registered.
    pub fn new(gpus: Gpus) -> Shared {
        let (graves, ended, closing, within, registrations, inbox, inbox_bytes) = Default::default();
        Shared { graves, ended, closing, within, gpus, registrations, inbox, inbox_bytes }
    }

    /// Moves on what GPUs copy besides the connections' messages. True if something has ended. `name` is the agent's.
    pub fn advance(&mut self, name: &str) -> bool {
        let Shared { graves, ended, closing, within, gpus, registrations, inbox, .. } = self;
        closing.retain(|one| {
            let used = one.is_used();
            if !used {
                registrations.unlease(one.session);
            }
            used
        });
        let before = graves.len() + within.len();
        ended.extend(graves.extract_if(.., |grave| !grave.is_used(gpus)));
        within.retain_mut(|one| {
            let Some(status) = one.advance(gpus, registrations) else { return true };
            let note = one.transfer.run().note.take();
            if status == Status::Success && one.transfer.is_active() {
                inbox.extend(note.map(|note| (name.to_owned(), note)));
            }
            one.transfer.end(status);
            false
        });
        before != graves.len() + within.len()
    }
}

/// A request of ours that the peer answers.
struct Job {
    transfer: Arc<Transfer>,
    cursor: Cursor,
    left: u64,
    /// The peer may put its bytes into regions here.
    straight: Option<Arc<()>>,
}

/// A request of the peer that we answer.
struct Serve {
    job: u64,
    places: Vec<Place>,
    /// Regions of the peer that the bytes are put into; empty: they go in messages.
    into: Vec<Place>,
    index: usize,
    offset: u64,
}

enum Leased {
    Asked,
    Granted(Arc<Lease>),
    /// Until those transfers have failed that wait for it.
    Refused,
}

/// Direct copies between two processes of this host.
enum Direct {
    /// The peer has not said hello.
    Unknown,
    No,
    Yes(Arc<Reached>),
}

/// A connection.
pub struct Session {
    /// Unique within the agent.
    pub number: u64,
    /// The peer's name.
    pub peer: String,
    /// Which run of the peer it is.
    pub instance: String,
    // Before the queue pair, whose memory GPUs see.
    on_gpu: OnGpu,
    // Before the communicator, over which its link is replaced.
    end: HostEnd,
    comm: Comm,
    /// How often something was taken in.
    received: u64,
    /// The peer has left. What it sent before is still taken: WRITEs and notifications.
    has_left: bool,
    control: VecDeque<(u32, Vec<u8>)>,
    /// Of them those that answer the peer.
    answers: usize,
    /// Transfers that wait for the peer's hello, its leases, or regions here.
    early: Vec<Arc<Transfer>>,
    sending: VecDeque<Arc<Transfer>>,
    sent: VecDeque<Arc<Transfer>>,
    jobs: HashMap<u64, Job>,
    next_job: u64,
    serving: VecDeque<Serve>,
    serves: bool,
    /// Parts of a notification.
    note: Vec<u8>,
    /// WRITEs of the peer that are in place, and how many the peer was told of.
    placed: u64,
    told: u64,
    /// WRITEs of ours that are in place at the peer.
    done: u64,
    /// A WRITE of the peer that named bytes which it may not write.
    refused: Option<u64>,
    direct: Direct,
    /// What lets the peer copy directly.
    gate: Option<Gate>,
    /// The peer's process, if its end can be seen.
    process: Option<Arc<Process>>,
    leases: HashMap<u64, Leased>,
    /// Registrations here that the peer wants leased, once it is known whether they are regions.
    wanted: Vec<u64>,
    regions: Regions,
    copying: Vec<Arc<Copying>>,
    revoking: Vec<(u64, Arc<Lease>)>,
}

impl Session {
    /// A connection that stands. `offers`: whether the peer may copy directly; `token` is random.
    pub fn new(
        number: u64,
        peer: String,
        instance: String,
        comm: Comm,
        end: HostEnd,
        offers: bool,
        token: [u8; TOKEN],
    ) -> Session {
        let gate = offers
            .then(|| Gate::new(&token))
            .and_then(|made| made.inspect_err(|e| tracing::warn!(peer, "no direct copies: {e}")).ok());
        let place = gate.as_ref().map_or(0, Gate::place);
        let process = gate.as_ref().and_then(|_| comm.process(1 - comm.rank()).ok()?);
        Session {
            number,
            peer,
            instance,
            on_gpu: OnGpu::of(&end),
            end,
            comm,
            received: 0,
            has_left: false,
            control: [Message::Hello { place, token }.encode()].into(),
            answers: 0,
            early: Vec::new(),
            sending: VecDeque::new(),
            sent: VecDeque::new(),
            jobs: HashMap::new(),
            next_job: 0,
            serving: VecDeque::new(),
            serves: false,
            note: Vec::new(),
            placed: 0,
            told: 0,
            done: 0,
            refused: None,
            direct: if gate.is_some() { Direct::Unknown } else { Direct::No },
            gate,
            process,
            leases: HashMap::new(),
            wanted: Vec::new(),
            regions: Regions::default(),
            copying: Vec::new(),
            revoking: Vec::new(),
        }
    }

    /// Starts a transfer that has begun. A copy that is small was made when this returns a copy that has no more.
    pub fn start(
        &mut self,
        transfer: Arc<Transfer>,
        registrations: &mut Registrations,
    ) -> Option<Arc<Copying>> {
        match &self.direct {
            Direct::Unknown => self.early.push(transfer),
            Direct::No => match self.goes_straight(&transfer, registrations) {
                Ok(Some(straight)) => {
                    transfer.run().straight = straight;
                    self.sending.push_back(transfer);
                }
                Ok(None) => self.early.push(transfer),
                Err(status) => transfer.end(status),
            },
            // No copy ends it, or GPUs copy.
            Direct::Yes(_) if transfer.pieces.is_empty() || transfer.is_gpu() => {
                self.sending.push_back(transfer)
            }
            Direct::Yes(reached) => {
                let reached = reached.clone();
                match self.lease(&transfer, false) {
                    Ok(Some(leases)) => {
                        let copying = Arc::new(Copying::new(transfer, Way::Process(reached, leases)));
                        copying.transfer.run().copying = Some(copying.clone());
                        self.copying.push(copying.clone());
                        return Some(copying);
                    }
                    Ok(None) => self.early.push(transfer),
                    Err(status) => transfer.end(status),
                }
            }
        }
        None
    }

    /// Whether a transfer's bytes go from region to region. `None`: that is not known yet.
    fn goes_straight(
        &mut self,
        transfer: &Transfer,
        registrations: &mut Registrations,
    ) -> Result<Option<bool>, Status> {
        if transfer.is_gpu() || transfer.bytes < LEAST * transfer.pieces.len().max(1) as u64 {
            return Ok(Some(false));
        }
        let mut known = true;
        for key in &transfer.own_keys {
            match self.regions.standing(self.end.queue_pair(), *key, registrations.own(*key)?) {
                Standing::Unknown => known = false,
                Standing::Region(..) => {}
                Standing::None => return Ok(Some(false)),
            }
        }
        if transfer.write {
            match self.lease(transfer, true)? {
                None => known = false,
                Some(leases) if leases.iter().any(|lease| lease.region.is_none()) => return Ok(Some(false)),
                Some(_) => {}
            }
        }
        Ok(known.then_some(true))
    }

    /// The leases of a transfer; asks for those that are missing.
    fn lease(&mut self, transfer: &Transfer, region: bool) -> Result<Option<Vec<Arc<Lease>>>, Status> {
        let mut all = Vec::with_capacity(transfer.their_keys.len());
        for key in &transfer.their_keys {
            match self.leases.get(key) {
                Some(Leased::Granted(lease)) => all.push(lease.clone()),
                Some(Leased::Asked) => {}
                Some(Leased::Refused) => return Err(Status::NotFound),
                None => {
                    self.leases.insert(*key, Leased::Asked);
                    self.say(&Message::Ask { key: *key, region });
                }
            }
        }
        Ok((all.len() == transfer.their_keys.len()).then_some(all))
    }

    /// Sends a notification after all that was posted before.
    pub fn notify(&mut self, text: &[u8]) {
        let mut parts = text.chunks(CHUNK).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let last = parts.peek().is_none();
            let (tag, mut bytes) = Message::Note { last, payload: HEAD }.encode();
            bytes.extend(part);
            self.control.push_back((tag, bytes));
            if last {
                return;
            }
        }
    }

    /// Asks the peer to end its use of a registration of ours.
    pub fn revoke(&mut self, key: u64) {
        self.say(&Message::Revoke { key });
    }

    /// Forgets a transfer that was cancelled, as far as it was not begun.
    pub fn forget(&mut self, transfer: &Arc<Transfer>) {
        self.early.retain(|other| !Arc::ptr_eq(other, transfer));
        if transfer.run().cursor == Cursor::default() {
            self.sending.retain(|other| !Arc::ptr_eq(other, transfer));
        }
    }

    /// Whether the peer has all that was posted, or will never have it.
    pub fn is_empty(&self) -> bool {
        if self.has_left {
            return true;
        }
        self.end.is_flushed()
            && self.on_gpu.is_empty()
            && self.control.is_empty()
            && self.sending.is_empty()
            && self.serving.is_empty()
            && self.early.is_empty()
    }

    /// Whether bytes are under way out of regions.
    #[cfg(test)]
    pub fn puts(&self) -> bool {
        self.regions.puts()
    }

    /// Holds the communicator's messages back for `time`, a farewell too.
    #[cfg(test)]
    pub fn hold(&self, time: std::time::Duration) {
        self.comm.hold(1 - self.comm.rank(), time).unwrap();
    }

    /// How many registrations of the peer are asked for, leased or revoked.
    #[cfg(test)]
    pub fn known_leases(&self) -> usize {
        self.leases.len()
    }

    /// The peer's process, where bytes go directly.
    #[cfg(test)]
    pub fn reached(&self) -> Option<Arc<Reached>> {
        match &self.direct {
            Direct::Yes(reached) => Some(reached.clone()),
            _ => None,
        }
    }

    /// Breaks the link of the queue pair, which is replaced. False: no link stands now.
    #[cfg(test)]
    pub fn break_link(&self) -> bool {
        self.end.queue_pair().break_link().unwrap()
    }

    /// Whether the queue pair may touch memory of a transfer.
    pub fn uses(&self, transfer: &Arc<Transfer>) -> bool {
        let lands = |job: &Job| job.straight.is_some() && Arc::ptr_eq(&job.transfer, transfer);
        self.regions.uses(&transfer.users) || self.jobs.values().any(lands)
    }

    /// Grows while something comes from the peer, or arrives there.
    pub fn moves(&self) -> u64 {
        self.received + self.end.delivered()
    }

    /// Whether something waits for GPUs or for a thread that registers memory: neither wakes anybody.
    pub fn needs_looks(&self) -> bool {
        !self.on_gpu.is_empty() || self.regions.is_asked()
    }

    /// Ends the use of a registration that the peer may not name any more. False: something still uses its memory.
    pub fn let_go(&mut self, key: u64, own: &Own) -> bool {
        let lands = |job: &Job| job.straight.is_some() && job.transfer.uses(key);
        !self.jobs.values().any(lands) && self.regions.let_go(key, own)
    }

    /// Whether the peer has left, and messages that it sent before are still to be taken.
    pub fn has_left(&self) -> bool {
        self.has_left
    }

    /// Whether the queue pair has ended. What the peer sent before may still be there.
    pub fn is_over(&self) -> bool {
        self.end.queue_pair().check().is_err()
    }

    /// Takes what has come if `takes`, and sends what can be sent. True if there was something. Copies that can begin go to `begun`.
    pub fn progress(
        &mut self,
        takes: bool,
        shared: &mut Shared,
        begun: &mut Vec<Arc<Copying>>,
    ) -> Result<bool, Ended> {
        if self.regions.ask_again() {
            for key in std::mem::take(&mut self.wanted) {
                self.grant(key, true, &mut shared.registrations);
            }
            self.start_early(&mut shared.registrations, begun);
        }
        let received = takes && self.receive(shared, begun)?;
        self.received += u64::from(received);
        if self.has_left {
            self.on_gpu.drop_filled(&mut shared.gpus)?;
            return Ok(received);
        }
        self.settle();
        let filled = self.on_gpu.publish(&mut shared.gpus, &mut self.end)?;
        match self.send(shared) {
            Ok(sent) => Ok(sent | received | filled),
            Err(why) if !self.is_over() => Err(why),
            Err(_) => {
                // What the peer sent before it left is taken first. This call fails once there is nothing more.
                if takes {
                    self.receive(shared, begun)?;
                }
                self.quit(shared, Status::RemoteDisconnect);
                self.has_left = true;
                Ok(true)
            }
        }
    }
    // ----------------------------------------------------------------- the end

    /// Ends the connection: nothing of it goes on but copies of GPUs, and its transfers fail.
    pub fn end(mut self, shared: &mut Shared, status: Status) {
        // The queue pair's own end would tell the peer nothing as long as nothing is under way.
        self.comm.abort();
        let _ = self.end.queue_pair().abort();
        if !self.has_left {
            self.quit(shared, status);
        }
        let Shared { graves, ended, .. } = shared;
        let grave = self.on_gpu.bury(self.end, self.comm);
        if grave.is_empty() { ended } else { graves }.push(grave);
    }

    /// Ends all but what takes messages. The queue pair has ended.
    fn quit(&mut self, shared: &mut Shared, status: Status) {
        let Shared { closing, registrations, .. } = shared;
        let gate = self.gate.take().inspect(Gate::close);
        self.control.clear();
        self.serving.clear();
        for key in std::mem::take(&mut self.regions).close() {
            tracing::error!(peer = self.peer, "the queue pair does not end: memory that it uses must stay");
            // Deregistering fails then.
            let _ = registrations.own(key).map(|own| std::mem::forget(own.users.clone()));
        }
        for (_, lease) in self.leases.drain() {
            if let Leased::Granted(lease) = lease {
                lease.revoke();
            }
        }
        let jobs = self.jobs.drain().map(|(_, job)| job.transfer);
        let copies = self.copying.drain(..).map(|copying| copying.transfer.clone());
        for transfer in self
            .early
            .drain(..)
            .chain(self.sending.drain(..))
            .chain(self.sent.drain(..))
            .chain(jobs)
            .chain(copies)
        {
            transfer.end(status);
        }
        let gate = gate.map(|gate| Closing { session: self.number, gate, peer: self.process.take() });
        match gate.filter(Closing::is_used) {
            Some(used) => closing.push(used),
            None => registrations.unlease(self.number),
        }
    }
}

fn add_user(users: &mut Vec<Arc<()>>, user: &Arc<()>) {
    if !users.last().is_some_and(|last| Arc::ptr_eq(last, user)) {
        users.push(user.clone());
    }
}
