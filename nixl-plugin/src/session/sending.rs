//! What a connection sends: control messages, payload of WRITEs, and what the peer reads.

use std::sync::Arc;

use super::{Ended, JOBS, Job, Leased, Session, Shared, add_user};
use crate::gpu::{Gpus, Lists};
use crate::pieces::{self, Piece};
use crate::registrations::{Memory, Registrations};
use crate::status::Status;
use crate::transfer::Transfer;
use crate::wire::{CHUNK, GPU_CHUNK, HEAD, MOST_PLACES, Message, Place, Remote, payload_after};

/// Bytes of a request.
const JOB: u64 = 16 << 20;
/// Bytes that one call sends: it holds the agent's lock.
const SENDS: usize = 2 << 20;

impl Session {
    pub(super) fn say(&mut self, message: &Message) {
        let (tag, bytes) = message.encode();
        self.answers += usize::from(Message::answers(tag));
        self.control.push_back((tag, bytes));
    }

    pub(super) fn send(&mut self, shared: &mut Shared) -> Result<bool, Ended> {
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
                self.answers -= usize::from(Message::answers(*tag));
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
        let cancelled = transfer.is_cancelled();
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
        let cancelled = transfer.is_cancelled();
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
        // SAFETY: what was staged has room for the head and for the payload after it. The pieces lie in registrations that live:
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
        let ends = transfer.is_cancelled() || run.failed.is_some();
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
}
