//! A connection with another agent: what it owes and is owed, over one queue pair. [`Session::progress`] takes what has come and sends
//! what there is credit for; it never waits.
//!
//! A WRITE goes as payload with its places, and the peer says how many WRITEs are in place. A READ asks in requests of bounded size,
//! [`JOBS`] of them at once, and the peer sends their payload. Larger pieces of host memory are put from region to region of the queue
//! pair instead, once the peer has leased its registrations (`regions.rs`). Between host memory of two processes of one host the bytes are copied
//! directly, with leases too (`transfer.rs`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate::{Comm, HostEnd, InPlace};

use crate::gate::{Gate, Reached};
use crate::gpu::{Gpus, Lists};
use crate::on_gpu::{Grave, OnGpu, Then, Within};
use crate::pieces::{self, Cursor, Piece};
use crate::regions::{LEAST, Regions, Standing};
use crate::registrations::{Memory, Own, Registrations};
use crate::status::Status;
use crate::transfer::{Copying, Lease, Transfer, Way};
use crate::wire::{CHUNK, GPU_CHUNK, HEAD, MOST_PLACES, Message, Place, Remote, TOKEN, payload_after};

/// Requests of READs that are under way at once, each way.
const JOBS: usize = 16;
/// Bytes of a request.
const JOB: u64 = 16 << 20;
/// Messages that one call takes, and bytes that it sends: it holds the agent's lock.
const TAKES: usize = 32;
const SENDS: usize = 2 << 20;
/// Notifications that nobody has taken, in bytes: then the connection takes no message.
const MOST_NOTES: usize = 64 << 20;
/// The longest notification of a peer.
const LONGEST_NOTE: usize = 16 << 20;

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
        let (graves, within, registrations, inbox, inbox_bytes) = Default::default();
        Shared { graves, within, gpus, registrations, inbox, inbox_bytes }
    }

    /// Moves on what GPUs copy besides the connections' messages. True if something has ended. `name` is the agent's.
    pub fn advance(&mut self, name: &str) -> bool {
        let Shared { graves, within, gpus, registrations, inbox, .. } = self;
        let before = graves.len() + within.len();
        graves.retain_mut(|grave| grave.is_used(gpus));
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
    control: VecDeque<(u32, Vec<u8>)>,
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
        Session {
            number,
            peer,
            instance,
            on_gpu: OnGpu::of(&end),
            end,
            comm,
            control: [Message::Hello { place, token }.encode()].into(),
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

    /// Whether the peer has all that was posted.
    pub fn is_empty(&self) -> bool {
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

    /// Breaks the link of the queue pair, which is replaced. False: no link stands now.
    #[cfg(test)]
    pub fn break_link(&self) -> bool {
        self.end.queue_pair().break_link().unwrap()
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

    /// Takes what has come, and sends what can be sent. True if there was something. Copies that can begin go to `begun`.
    pub fn progress(&mut self, shared: &mut Shared, begun: &mut Vec<Arc<Copying>>) -> Result<bool, Ended> {
        if self.regions.ask_again() {
            for key in std::mem::take(&mut self.wanted) {
                self.grant(key, true, &mut shared.registrations);
            }
            self.start_early(&mut shared.registrations, begun);
        }
        let received = self.receive(shared, begun)?;
        self.settle();
        let filled = self.on_gpu.publish(&mut shared.gpus, &mut self.end)?;
        Ok(self.send(shared)? | received | filled)
    }

    // ------------------------------------------------------------- receiving

    fn receive(&mut self, shared: &mut Shared, begun: &mut Vec<Arc<Copying>>) -> Result<bool, Ended> {
        let mut some = false;
        while let Some((then, message)) = self.on_gpu.landed(&mut shared.gpus)? {
            self.then(then, &message, shared, begun)?;
            self.end.give_back(1);
            some = true;
        }
        for _ in 0..TAKES {
            if shared.inbox_bytes >= MOST_NOTES || self.on_gpu.is_full() {
                return Ok(some);
            }
            let Some(message) = self.end.take()? else {
                // What came before the end was taken.
                self.end.queue_pair().check()?;
                return Ok(some);
            };
            some = true;
            let read = |from: usize, to: &mut [u8]| {
                // SAFETY: `to` is a slice; the message is given back below.
                unsafe { message.copy_to(from, to.as_mut_ptr(), to.len()) }
            };
            let kind = message.message();
            let decoded =
                Message::decode(kind.tag, kind.length, read).map_err(|why| format!("it sent {why}"))?;
            let (lists, users, then) = match decoded {
                Message::Write { transfer, last, places, payload } => {
                    let (lists, users) = self.place(transfer, &places, payload, &message, shared)?;
                    self.refused = self.refused.filter(|_| !last);
                    (lists, users, Then::Placed { last })
                }
                Message::Data { job, last, status, payload } => {
                    let (lists, users) = self.data(job, last, status, payload, &message)?;
                    (lists, users, Then::Answered { job, last, status })
                }
                other => (Lists::default(), Vec::new(), Then::Take(other)),
            };
            if lists.is_empty() && !self.on_gpu.is_landing() {
                self.then(then, &message, shared, begun)?;
                self.end.give_back(1);
            } else {
                // SAFETY: `place` and `data` have listed registered memory, and bytes of the message.
                unsafe { self.on_gpu.land(&mut shared.gpus, lists, users, then, message) };
            }
        }
        Ok(true)
    }

    /// Goes on after a message whose payload is in place.
    fn then(
        &mut self,
        then: Then,
        message: &InPlace,
        shared: &mut Shared,
        begun: &mut Vec<Arc<Copying>>,
    ) -> Result<(), Ended> {
        match then {
            Then::Placed { last } => self.placed += u64::from(last),
            Then::Answered { job, last, status } => self.answered(job, last, status),
            Then::Take(decoded) => self.take(decoded, message, shared, begun)?,
        }
        Ok(())
    }

    fn take(
        &mut self,
        decoded: Message,
        message: &InPlace,
        shared: &mut Shared,
        begun: &mut Vec<Arc<Copying>>,
    ) -> Result<(), Ended> {
        let length = message.message().length;
        match decoded {
            Message::Hello { place, token } => {
                self.hello(place, &token, &mut shared.registrations, begun);
            }
            // Their payload was taken before.
            Message::Write { .. } | Message::Data { .. } => {}
            Message::Read { job, places, mut into } => {
                if self.serving.len() >= JOBS {
                    return Err(format!("it sent more than {JOBS} requests at once").into());
                }
                let mut checker = shared.registrations.checker();
                let checked = places.iter().try_for_each(|place| checker.check(place).map(drop));
                match checked {
                    Ok(()) => {
                        if !into.is_empty() && !self.puts_from(&places, &mut shared.registrations) {
                            into.clear();
                        }
                        self.serving.push_back(Serve { job, places, into, index: 0, offset: 0 });
                    }
                    Err(status) => {
                        self.say(&Message::Data { job, last: true, status: status as i32, payload: HEAD })
                    }
                }
            }
            Message::Note { last, payload } => {
                let (from, more) = (self.note.len(), length - payload);
                if from + more > LONGEST_NOTE {
                    return Err(format!("it sent a notification of more than {LONGEST_NOTE} bytes").into());
                }
                self.note.resize(from + more, 0);
                // SAFETY: the vector has these bytes.
                unsafe { message.copy_to(payload, self.note[from..].as_mut_ptr(), more) };
                if last {
                    shared.inbox_bytes += self.note.len();
                    shared.inbox.push_back((self.peer.clone(), std::mem::take(&mut self.note)));
                }
            }
            Message::Done { count } => {
                let more = count.checked_sub(self.done).filter(|n| *n <= self.sent.len() as u64);
                for _ in 0..more.ok_or("it says that transfers are in place which there are not")? {
                    let transfer = self.sent.pop_front().expect("counted above");
                    let failed = transfer.run().failed;
                    self.regions.arrived(&transfer.users);
                    transfer.end(failed.unwrap_or(Status::Success));
                    self.done += 1;
                }
            }
            Message::Failed { transfer, status } => {
                let all = self.sent.iter().chain(&self.sending);
                if let Some(transfer) = all.into_iter().find(|other| other.id == transfer) {
                    transfer.run().failed.get_or_insert(Status::of(status));
                }
            }
            Message::Ask { key, region } => self.grant(key, region, &mut shared.registrations),
            Message::Lease { key, granted, region } => {
                let asked = self.leases.get_mut(&key).filter(|lease| matches!(lease, Leased::Asked));
                let asked = asked.ok_or("it leases what nobody asked for")?;
                let lease = Lease { region, ..Lease::default() };
                *asked = if granted { Leased::Granted(Arc::new(lease)) } else { Leased::Refused };
                self.start_early(&mut shared.registrations, begun);
            }
            Message::Landed { job } => {
                let known = self.jobs.get(&job).is_some_and(|job| job.straight.is_some());
                if !known {
                    return Err("it says that bytes have landed which nobody asked for".into());
                }
                self.answered(job, true, 0);
            }
            Message::Revoke { key } => {
                // What was refused stays refused: keys are not given twice.
                if let Some(Leased::Granted(lease)) = self.leases.insert(key, Leased::Refused) {
                    // With `Copying::help` in one order.
                    lease.revoked.store(true, Ordering::SeqCst);
                    self.revoking.push((key, lease));
                } else {
                    self.say(&Message::Revoked { key });
                }
            }
            Message::Revoked { key } => {
                if let Ok(own) = shared.registrations.own(key) {
                    own.leased.remove(&self.number);
                }
            }
        }
        Ok(())
    }

    /// Answers a peer that wants a lease, or does so once it is known whether the registration is a region.
    fn grant(&mut self, key: u64, by_region: bool, registrations: &mut Registrations) {
        let own = registrations.own(key).ok().filter(|own| !own.ends && own.memory == Memory::Host);
        let mut region = None;
        if let Some(own) = own.as_deref().filter(|_| by_region) {
            match self.regions.standing(self.end.queue_pair(), key, own) {
                Standing::Unknown if self.wanted.contains(&key) => return,
                Standing::Unknown => return self.wanted.push(key),
                Standing::Region(of, base) => region = Some(Remote { rkey: of.key(), base }),
                Standing::None => {}
            }
        }
        let granted = own.map(|own| own.leased.insert(self.number)).is_some();
        self.say(&Message::Lease { key, granted, region });
    }

    /// Whether all bytes of a request can be put out of regions here. Registrations that are none become regions meanwhile.
    fn puts_from(&mut self, places: &[Place], registrations: &mut Registrations) -> bool {
        let (mut all, mut last) = (true, None);
        for key in places.iter().map(|place| place.key) {
            if last.replace(key) != Some(key) {
                all &= registrations.own(key).is_ok_and(|own| {
                    matches!(self.regions.standing(self.end.queue_pair(), key, own), Standing::Region(..))
                });
            }
        }
        all
    }

    fn hello(
        &mut self,
        place: u64,
        token: &[u8; TOKEN],
        registrations: &mut Registrations,
        begun: &mut Vec<Arc<Copying>>,
    ) {
        if let Direct::Unknown = self.direct {
            // The kernel says which process it is; the token shows that it is the one that this process numbers so.
            let pid = self.comm.process_of(1 - self.comm.rank()).ok().flatten();
            let reached = pid.filter(|_| place != 0).and_then(|pid| Reached::find(pid, place, token));
            tracing::info!(peer = self.peer, pid, direct = reached.is_some(), "connected");
            self.direct = reached.map_or(Direct::No, |reached| Direct::Yes(Arc::new(reached)));
            self.start_early(registrations, begun);
        }
    }

    fn start_early(&mut self, registrations: &mut Registrations, begun: &mut Vec<Arc<Copying>>) {
        for transfer in std::mem::take(&mut self.early) {
            begun.extend(self.start(transfer, registrations));
        }
    }

    /// Puts the payload of a peer's WRITE into place, but for what GPUs are to copy.
    fn place(
        &mut self,
        transfer: u64,
        places: &[Place],
        mut payload: usize,
        message: &InPlace,
        shared: &mut Shared,
    ) -> Result<(Lists, Vec<Arc<()>>), Ended> {
        let (mut lists, mut users) = (Lists::default(), Vec::new());
        let mut checker = shared.registrations.checker();
        for place in places {
            match checker.check(place) {
                Ok(own) if own.memory == Memory::Gpu => {
                    let from = address_in(message, payload)?;
                    lists.add(own.device, (place.address, from), place.length);
                    add_user(&mut users, &own.users);
                }
                // SAFETY: the registration lives, checked above, and with the agent's lock it stays so during the copy; the decoded
                // places are as long as the payload.
                Ok(_) => unsafe { message.copy_to(payload, place.address as *mut u8, place.length as usize) },
                Err(status) if self.refused != Some(transfer) => {
                    tracing::warn!(
                        peer = self.peer,
                        ?place,
                        "a WRITE to memory that is not registered was refused"
                    );
                    self.refused = Some(transfer);
                    self.say(&Message::Failed { transfer, status: status as i32 });
                }
                Err(_) => {}
            }
            payload += place.length as usize;
        }
        Ok((lists, users))
    }

    /// Puts the payload of an answer into place, but for what GPUs are to copy.
    fn data(
        &mut self,
        number: u64,
        last: bool,
        status: i32,
        mut from: usize,
        message: &InPlace,
    ) -> Result<(Lists, Vec<Arc<()>>), Ended> {
        let length = message.message().length - from;
        let (mut lists, mut users) = (Lists::default(), Vec::new());
        let job = self.jobs.get_mut(&number).ok_or("it answers a request that there is not")?;
        if length as u64 > job.left || last && status == 0 && length as u64 != job.left {
            return Err("its answer is not as long as what was asked for".into());
        }
        job.left -= length as u64;
        let Job { transfer, cursor, .. } = job;
        let transfer = transfer.clone();
        for piece in pieces::part(&transfer.pieces, cursor, length as u64, usize::MAX) {
            let bytes = piece.there.length as usize;
            // With the agent's lock, which a call that cancels takes too.
            let cancelled = transfer.cancelled.load(Ordering::Relaxed);
            if !cancelled && transfer.memory[0] == Memory::Gpu {
                lists.add(piece.device, (piece.here, address_in(message, from)?), piece.there.length);
                add_user(&mut users, &transfer.users);
            } else if !cancelled {
                // SAFETY: the piece lies in registrations that live: deregistering cancels the transfer.
                unsafe { message.copy_to(from, piece.here as *mut u8, bytes) };
            }
            from += bytes;
        }
        Ok((lists, users))
    }

    /// Notes that a part of an answer is in place.
    fn answered(&mut self, number: u64, last: bool, status: i32) {
        let Some(Job { transfer, .. }) = self.jobs.get(&number) else { return };
        let transfer = transfer.clone();
        if status != 0 {
            transfer.run().failed.get_or_insert(Status::of(status));
        }
        if last {
            self.jobs.remove(&number);
            transfer.run().jobs -= 1;
            self.maybe_read(&transfer);
        }
    }

    /// Ends a READ, if all of it was asked for and answered.
    fn maybe_read(&mut self, transfer: &Arc<Transfer>) {
        let run = transfer.run();
        if run.jobs > 0 || run.cursor.piece < transfer.pieces.len() && run.failed.is_none() {
            return;
        }
        let failed = run.failed;
        drop(run);
        self.sending.retain(|other| !Arc::ptr_eq(other, transfer));
        self.finish(transfer, failed.unwrap_or(Status::Success));
    }

    /// Ends a transfer whose notification has not been sent.
    pub fn finish(&mut self, transfer: &Arc<Transfer>, status: Status) {
        if status == Status::Success
            && transfer.is_active()
            && let Some(note) = transfer.run().note.take()
        {
            self.notify(&note);
        }
        transfer.end(status);
    }

    /// Ends copies whose last batch is done, and answers revocations that nothing holds up any more.
    fn settle(&mut self) {
        self.regions.settle(&self.end);
        self.copying.retain(|copying| copying.transfer.is_active() || copying.is_running());
        let Session { revoking, copying, .. } = self;
        let free = |lease: &Arc<Lease>| !copying.iter().any(|c| c.uses(lease) && c.is_running());
        let (done, held) = std::mem::take(revoking).into_iter().partition(|(_, lease)| free(lease));
        self.revoking = held;
        for (key, _) in <Vec<_> as IntoIterator>::into_iter(done) {
            self.say(&Message::Revoked { key });
        }
    }

    // --------------------------------------------------------------- sending

    fn say(&mut self, message: &Message) {
        self.control.push_back(message.encode());
    }

    fn send(&mut self, shared: &mut Shared) -> Result<bool, Ended> {
        let (mut some, mut left) = (false, SENDS);
        loop {
            if self.told < self.placed {
                self.told = self.placed;
                self.say(&Message::Done { count: self.told });
            }
            while let Some((tag, bytes)) = self.control.front() {
                if !self.end.try_send(bytes, *tag)? {
                    return Ok(some);
                }
                self.control.pop_front();
                some = true;
            }
            if left == 0 {
                return Ok(true);
            }
            // By turns, so that neither way waits for the other.
            self.serves = !self.serves;
            let first = if self.serves { self.serve(shared)? } else { self.send_transfer(shared)? };
            let sent = match first {
                None if self.serves => self.send_transfer(shared)?,
                None => self.serve(shared)?,
                some => some,
            };
            let Some(bytes) = sent else { return Ok(some) };
            (some, left) = (true, left.saturating_sub(bytes.max(1)));
        }
    }

    /// Sends a part of the peer's oldest request. The bytes; `None`: there is none, or no credit.
    fn serve(&mut self, shared: &mut Shared) -> Result<Option<usize>, Ended> {
        let Some(serve) = self.serving.front_mut() else { return Ok(None) };
        if !serve.into.is_empty() {
            return self.serve_straight(&shared.registrations);
        }
        let rest: u64 = serve.places[serve.index..].iter().map(|p| p.length).sum::<u64>() - serve.offset;
        let of_gpu =
            |place: &Place| shared.registrations.check(place).is_ok_and(|own| own.memory == Memory::Gpu);
        let most = if serve.places.get(serve.index).is_some_and(of_gpu) { GPU_CHUNK } else { CHUNK };
        let bytes = rest.min(most as u64) as usize;
        let (mut lists, mut users) = (Lists::default(), Vec::new());
        let (mut last, mut status) = (bytes as u64 == rest, 0);
        let payload = payload_after(0);
        let tag = Message::Data { job: serve.job, last, status, payload }.encode().0;
        let Some(staged) = self.end.stage(payload + bytes, tag)? else {
            return Ok(None);
        };
        let (mut to, mut left) = (payload, bytes);
        let mut checker = shared.registrations.checker();
        while left > 0 {
            let place = serve.places[serve.index];
            let length = (place.length - serve.offset).min(left as u64);
            let from = place.address + serve.offset;
            match checker.check(&place) {
                Err(e) => {
                    // The registration has ended meanwhile.
                    (last, status) = (true, e as i32);
                    break;
                }
                Ok(own) if own.memory == Memory::Gpu => {
                    lists.add(own.device, (staged.as_ptr().as_ptr() as u64 + to as u64, from), length);
                    add_user(&mut users, &own.users);
                }
                // SAFETY: the registration lives, checked above, and stays so as long as this has the agent's lock; what was staged has
                // room for the head and `bytes` bytes of payload after it.
                Ok(_) => unsafe {
                    let to = staged.as_ptr().as_ptr().add(to);
                    std::ptr::copy_nonoverlapping(from as *const u8, to, length as usize);
                },
            }
            (to, left, serve.offset) = (to + length as usize, left - length as usize, serve.offset + length);
            if serve.offset == place.length {
                (serve.index, serve.offset) = (serve.index + 1, 0);
            }
        }
        let (_, head) = Message::Data { job: serve.job, last, status, payload }.encode();
        // SAFETY: the head is shorter than what was staged.
        unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), staged.as_ptr().as_ptr(), head.len()) };
        if lists.is_empty() || status != 0 {
            self.end.publish(staged);
        } else {
            // SAFETY: listed above: registered memory, and room of the staged message.
            unsafe { self.on_gpu.fill(&mut shared.gpus, lists, users, staged) };
        }
        if last {
            self.serving.pop_front();
        }
        Ok(Some(bytes))
    }

    /// Puts bytes of the peer's oldest request into its regions, as [`Session::serve`] does by messages.
    fn serve_straight(&mut self, registrations: &Registrations) -> Result<Option<usize>, Ended> {
        let Some(serve) = self.serving.front_mut() else { return Ok(None) };
        let (place, to) = (serve.places[serve.index], serve.into[serve.index]);
        let own = match registrations.check(&place) {
            Ok(own) => own,
            Err(e) => {
                // The registration has ended meanwhile.
                let ended = Message::Data { job: serve.job, last: true, status: e as i32, payload: HEAD };
                self.serving.pop_front();
                self.say(&ended);
                return Ok(Some(0));
            }
        };
        let (offset, length) = (serve.offset, place.length - serve.offset);
        let to =
            (Remote { rkey: to.key as u32, base: 0 }, Place { address: to.address + offset, length, ..to });
        let from = (place.key, place.address + offset);
        let Some(put) = self.regions.put(&mut self.end, from, to, [&own.users; 2])? else { return Ok(None) };
        serve.offset += put;
        if serve.offset == place.length {
            (serve.index, serve.offset) = (serve.index + 1, 0);
        }
        if serve.index == serve.places.len() {
            let landed = Message::Landed { job: serve.job };
            self.serving.pop_front();
            self.say(&landed);
        }
        Ok(Some(put as usize))
    }

    /// Sends the next message or put of the oldest transfer.
    fn send_transfer(&mut self, shared: &mut Shared) -> Result<Option<usize>, Ended> {
        let Some(transfer) = self.sending.front().cloned() else { return Ok(None) };
        match transfer.write {
            true if transfer.run().straight => self.put(&transfer, &mut shared.registrations),
            true => self.send_write(&transfer, &mut shared.gpus),
            false => self.send_read(&transfer),
        }
    }

    /// Puts the next bytes of a WRITE into the peer's region, or tells the peer that all are there.
    fn put(
        &mut self,
        transfer: &Arc<Transfer>,
        registrations: &mut Registrations,
    ) -> Result<Option<usize>, Ended> {
        let mut run = transfer.run();
        let mut cursor = run.cursor;
        // With the agent's lock, which a call that cancels takes too.
        let cancelled = transfer.cancelled.load(Ordering::Relaxed);
        let next = pieces::part(&transfer.pieces, &mut cursor, u64::MAX, 1).next();
        if let Some(piece) = next.filter(|_| !cancelled && run.failed.is_none()) {
            let lease = match self.leases.get(&piece.there.key) {
                Some(Leased::Granted(lease)) => lease.region,
                _ => None,
            };
            let Some(to) = lease else {
                run.failed = Some(Status::NotFound);
                return Ok(Some(0));
            };
            // Deregistering cancels the transfer.
            let own = registrations.own(piece.key).map_err(|_| "a transfer outlives its registration")?;
            let users = [&transfer.users, &own.users];
            let Some(put) =
                self.regions.put(&mut self.end, (piece.key, piece.here), (to, piece.there), users)?
            else {
                return Ok(None);
            };
            let length = piece.there.length;
            run.cursor.offset += put;
            if put == length {
                run.cursor = cursor;
            }
            return Ok(Some(put as usize));
        }
        let note = run.note.take().filter(|_| !cancelled && run.failed.is_none());
        drop(run);
        self.sending.pop_front();
        self.sent.push_back(transfer.clone());
        self.say(&Message::Write { transfer: transfer.id, last: true, places: Vec::new(), payload: HEAD });
        if let Some(note) = note {
            self.notify(&note);
        }
        Ok(Some(0))
    }

    fn send_write(&mut self, transfer: &Arc<Transfer>, gpus: &mut Gpus) -> Result<Option<usize>, Ended> {
        let most = if transfer.is_gpu() { GPU_CHUNK } else { CHUNK };
        let mut run = transfer.run();
        let mut cursor = run.cursor;
        // With the agent's lock, which a call that cancels takes too.
        let cancelled = transfer.cancelled.load(Ordering::Relaxed);
        let parts: Vec<Piece> = match cancelled {
            true => Vec::new(),
            false => pieces::message(&transfer.pieces, &mut cursor, most).collect(),
        };
        let last = cancelled || cursor.piece == transfer.pieces.len();
        let payload = payload_after(parts.len());
        let places: Vec<Place> = parts.iter().map(|p| p.there).collect();
        let bytes: usize = places.iter().map(|p| p.length as usize).sum();
        let (tag, head) = Message::Write { transfer: transfer.id, last, places, payload }.encode();
        let Some(staged) = self.end.stage(payload + bytes, tag)? else {
            return Ok(None);
        };
        let mut lists = Lists::default();
        // SAFETY: what was staged has room for the head and for the payload behind it. The pieces lie in registrations that live:
        // deregistering cancels the transfer, with the agent's lock.
        unsafe {
            let to = staged.as_ptr().as_ptr();
            std::ptr::copy_nonoverlapping(head.as_ptr(), to, head.len());
            let mut to = to.add(payload);
            for piece in &parts {
                let length = piece.there.length as usize;
                if transfer.memory[0] == Memory::Gpu {
                    lists.add(piece.device, (to as u64, piece.here), piece.there.length);
                } else {
                    std::ptr::copy_nonoverlapping(piece.here as *const u8, to, length);
                }
                to = to.add(length);
            }
        }
        if lists.is_empty() {
            self.end.publish(staged);
        } else {
            // SAFETY: as above; the transfer's users say how long its memory is used.
            unsafe { self.on_gpu.fill(gpus, lists, vec![transfer.users.clone()], staged) };
        }
        run.cursor = cursor;
        if last {
            let note = run.note.take().filter(|_| !cancelled);
            drop(run);
            self.sending.pop_front();
            self.sent.push_back(transfer.clone());
            if let Some(note) = note {
                self.notify(&note);
            }
        }
        Ok(Some(bytes))
    }

    fn send_read(&mut self, transfer: &Arc<Transfer>) -> Result<Option<usize>, Ended> {
        if self.jobs.len() >= JOBS {
            return Ok(None);
        }
        let mut run = transfer.run();
        let begin = run.cursor;
        let ends = transfer.cancelled.load(Ordering::Relaxed) || run.failed.is_some();
        let straight = run.straight.then(|| transfer.users.clone());
        let (mut places, mut into) = (Vec::new(), Vec::new());
        if !ends {
            for piece in pieces::part(&transfer.pieces, &mut run.cursor, JOB, MOST_PLACES) {
                places.push(piece.there);
                if straight.is_some() {
                    let Remote { rkey, base } =
                        self.regions.own(piece.key).ok_or("a transfer outlives its region")?;
                    let (key, address) = (rkey.into(), piece.here - base);
                    into.push(Place { key, address, length: piece.there.length });
                }
            }
        }
        if ends || places.is_empty() {
            drop(run);
            self.sending.pop_front();
            self.maybe_read(transfer);
            return Ok(Some(0));
        }
        self.next_job += 1;
        let job = self.next_job;
        run.jobs += 1;
        let all = run.cursor.piece == transfer.pieces.len();
        drop(run);
        let left = places.iter().map(|p| p.length).sum();
        self.jobs.insert(job, Job { transfer: transfer.clone(), cursor: begin, left, straight });
        self.say(&Message::Read { job, places, into });
        if all {
            self.sending.pop_front();
        }
        Ok(Some(0))
    }

    // ----------------------------------------------------------------- the end

    /// Ends the connection: nothing of it goes on but copies of GPUs, and its transfers fail.
    pub fn end(mut self, registrations: &mut Registrations, status: Status) -> Option<Grave> {
        if self.gate.as_ref().is_some_and(|gate| !gate.close()) {
            tracing::error!(peer = self.peer, "the peer copies directly though its connection has ended");
        }
        // The queue pair's own end would tell the peer nothing as long as nothing is under way.
        self.comm.abort();
        let _ = self.end.queue_pair().abort();
        for key in std::mem::take(&mut self.regions).close() {
            tracing::error!(peer = self.peer, "the queue pair does not end: memory that it uses must stay");
            // Deregistering fails then.
            let _ = registrations.own(key).map(|own| std::mem::forget(own.users.clone()));
        }
        for lease in self.leases.values() {
            if let Leased::Granted(lease) = lease {
                lease.revoked.store(true, Ordering::SeqCst);
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
        registrations.all().for_each(|(_, own)| _ = own.leased.remove(&self.number));
        self.on_gpu.bury(self.end, self.comm)
    }
}

/// Where a byte of a message lies, for a GPU.
fn address_in(message: &InPlace, offset: usize) -> Result<u64, Ended> {
    let at = message.as_ptr().ok_or("it sent payload for a GPU within a record")?;
    Ok(at.as_ptr() as u64 + offset as u64)
}

fn add_user(users: &mut Vec<Arc<()>>, user: &Arc<()>) {
    if !users.last().is_some_and(|last| Arc::ptr_eq(last, user)) {
        users.push(user.clone());
    }
}
