//! What a connection takes from its peer: messages, their payload, and what they ask for.

use std::sync::Arc;

use pushgate::InPlace;

use super::{Direct, Ended, JOBS, Job, Leased, MOST_ANSWERS, Serve, Session, Shared, add_user};
use crate::gate::Reached;
use crate::gpu::Lists;
use crate::on_gpu::Then;
use crate::pieces;
use crate::regions::Standing;
use crate::registrations::{Memory, Registrations};
use crate::status::Status;
use crate::transfer::{Copying, Lease, Transfer};
use crate::wire::{HEAD, Message, Place, Remote, TOKEN};

/// Messages that one call takes: it holds the agent's lock.
const TAKES: usize = 32;
/// Notifications that nobody has taken, in bytes: then the connection takes no message.
pub const MOST_NOTES: usize = 64 << 20;
/// What a notification counts besides its text: an empty one takes memory too.
pub const NOTE: usize = 256;
/// The longest notification.
pub const LONGEST_NOTE: usize = 16 << 20;

impl Session {
    /// Takes messages. True if there was something. Fails once the queue pair has ended and nothing of the peer is left to be taken, or
    /// to be put into place by GPUs.
    pub(super) fn receive(
        &mut self,
        shared: &mut Shared,
        begun: &mut Vec<Arc<Copying>>,
    ) -> Result<bool, Ended> {
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
            let message = match self.end.take()? {
                Some(message) => message,
                None if self.on_gpu.is_landing() => return Ok(some),
                None => match self.end.queue_pair().check() {
                    Ok(()) => return Ok(some),
                    // What came before the end is there now.
                    Err(why) => self.end.take()?.ok_or(why)?,
                },
            };
            some = true;
            let read = |from: usize, to: &mut [u8]| {
                // SAFETY: `to` is a slice; the message is given back below.
                unsafe { message.copy_to(from, to.as_mut_ptr(), to.len()) }
            };
            if self.answers > MOST_ANSWERS {
                return Err("it asks, and does not take the answers".into());
            }
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
        if self.has_left && !matches!(decoded, Message::Note { .. }) {
            return Ok(());
        }
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
                    shared.inbox_bytes += NOTE + self.note.len();
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
                let lease = Lease::new(region);
                *asked = if granted { Leased::Granted(Arc::new(lease)) } else { Leased::Refused };
                self.start_early(&mut shared.registrations, begun);
                if !granted {
                    self.leases.remove(&key);
                }
            }
            Message::Landed { job } => {
                let known = self.jobs.get(&job).is_some_and(|job| job.straight.is_some());
                if !known {
                    return Err("it says that bytes have landed which nobody asked for".into());
                }
                self.answered(job, true, 0);
            }
            Message::Revoke { key } => match self.leases.remove(&key) {
                Some(Leased::Granted(lease)) => {
                    lease.revoke();
                    self.revoking.push((key, lease));
                }
                other => {
                    self.leases.extend(other.map(|other| (key, other)));
                    self.say(&Message::Revoked { key });
                }
            },
            Message::Revoked { key } => {
                if let Ok(own) = shared.registrations.own(key) {
                    own.leased.remove(&self.number);
                }
            }
        }
        Ok(())
    }

    /// Answers a peer that wants a lease, or does so once it is known whether the registration is a region.
    pub(super) fn grant(&mut self, key: u64, by_region: bool, registrations: &mut Registrations) {
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
            let pid = self.comm.process_number(1 - self.comm.rank()).ok().flatten();
            let offered = pid.filter(|_| place != 0).zip(self.gate.as_ref());
            let reached = offered.and_then(|(pid, own)| Reached::find(pid, place, token, own));
            tracing::info!(peer = self.peer, pid, direct = reached.is_some(), "connected");
            self.direct = reached.map_or(Direct::No, |reached| Direct::Yes(Arc::new(reached)));
            self.start_early(registrations, begun);
        }
    }

    pub(super) fn start_early(&mut self, registrations: &mut Registrations, begun: &mut Vec<Arc<Copying>>) {
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
        if self.has_left {
            return Ok((lists, users));
        }
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
            let cancelled = transfer.is_cancelled();
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
    pub(super) fn maybe_read(&mut self, transfer: &Arc<Transfer>) {
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
    pub(super) fn settle(&mut self) {
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
}

/// Where a byte of a message lies, for a GPU.
fn address_in(message: &InPlace, offset: usize) -> Result<u64, Ended> {
    let at = message.as_ptr().ok_or("it sent payload for a GPU within a record")?;
    Ok(at.as_ptr() as u64 + offset as u64)
}
