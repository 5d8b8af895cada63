//! Queue pairs of a program whose links are replaced: their frames, and those that go on where another proxy died.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use pushgate_driver_shim::closing::Held;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::process::Process;
use pushgate_engine::connect::{Connect, Patience};
use pushgate_engine::endpoint::{Endpoint, QpMemory, QpOptions};
use pushgate_engine::engine::{Engine, QpId};
use pushgate_engine::idle::Wake;
use pushgate_link::frame::Frame;
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::region::RegionMemory;

use crate::frame_socket::FrameSocket;
use crate::wire::{Refusal, SessionOffer};

use super::ledger::Lease;

/// Most frames that one look takes in, before the program's requests have their turn.
const FRAMES: usize = 64;

/// Keys and sizes of regions, and what they take of the user's quota.
type Regions = Vec<(u32, u64, Lease)>;

/// The way of frames, and where they go.
#[derive(Default)]
pub(super) struct Sessions {
    frames: Option<Arc<FrameSocket>>,
    mailboxes: HashMap<u32, (Mailbox, QpId)>,
    /// Queue pairs that have a journal: another proxy may go on with them.
    kept: HashSet<QpId>,
    resuming: Option<Resuming>,
}

/// A queue pair that goes on here, before the engine has it.
pub(super) struct Resuming {
    endpoint: Endpoint,
    wake: Wake,
    tag: u32,
    mailbox: Mailbox,
    /// Bytes of its segments and of the peer's window.
    pub(super) bytes: u64,
    pub(super) regions: Regions,
    lease: Lease,
}

fn why(e: impl std::fmt::Display) -> Refusal {
    Refusal::Why(e.to_string())
}

fn patience(offer: &SessionOffer, options: &QpOptions) -> Patience {
    Patience::within(Duration::from_nanos(offer.recover_ns), options.key_seed as u64)
}

impl Sessions {
    /// Makes the way of frames of a program that holds so much of a quota. Returns what the program gets: its end, and a handle of
    /// this process.
    pub(super) fn open(&mut self, held: Option<Held>) -> Result<[OwnedFd; 2], Refusal> {
        let [mut ours, theirs] = FrameSocket::pair().map_err(why)?;
        if let Some(held) = held {
            ours = ours.within(held);
        }
        let own = Process::own().map_err(why)?;
        let own = own.as_fd().try_clone_to_owned().map_err(why)?;
        self.frames = Some(Arc::new(ours));
        Ok([theirs.into(), own])
    }

    /// The descriptor that is readable when a frame is there.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.frames.as_ref().map(|frames| frames.as_fd())
    }

    /// Hands frames that have come to the engine.
    pub(super) fn take_frames(&mut self, engine: &Engine) {
        let Some(frames) = self.frames.clone() else { return };
        for _ in 0..FRAMES {
            match frames.receive() {
                Ok(Some((tag, frame))) => {
                    let Some((mailbox, qp)) = self.mailboxes.get(&tag) else { continue };
                    if mailbox.put(frame) {
                        // An engine that has ended is found by the next request.
                        let _ = engine.control(*qp);
                    }
                }
                Ok(None) => return,
                Err(e) => {
                    // The queue pairs go on over the links that they have.
                    self.end_frames(&e);
                    return;
                }
            }
        }
    }

    fn end_frames(&mut self, e: &io::Error) {
        tracing::debug!("frames of a program: {e}");
        self.frames = None;
    }

    fn way(&self, tag: u32) -> Result<SendFrame, Refusal> {
        let frames = self.frames.clone();
        let frames = frames
            .ok_or_else(|| Refusal::Why("a session needs the way of frames: ask for Channel".into()))?;
        Ok(Box::new(move |frame: Frame| _ = frames.send(tag, &frame)))
    }

    /// A queue pair whose ends have just met.
    pub(super) fn begin(
        &self,
        endpoint: Endpoint,
        memory: Arc<SharedMemory>,
        offer: &SessionOffer,
        options: &QpOptions,
    ) -> Result<(Endpoint, Mailbox), Refusal> {
        let (bytes, expected) = (memory.len(), endpoint.session_bytes());
        if bytes < expected {
            let why = format!(
                "session segment: {bytes} bytes, expected at least {expected} for its posted receives"
            );
            return Err(Refusal::Why(why));
        }
        let connect = Connect::joined(offer.own, offer.peer, offer.epoch);
        let connect =
            connect.ok_or_else(|| Refusal::Why(format!("no ends meet in epoch {}", offer.epoch)))?;
        if self.mailboxes.contains_key(&offer.tag) {
            return Err(Refusal::Why(format!("tag {} is another queue pair's", offer.tag)));
        }
        let mailbox = Mailbox::default();
        let way = self.way(offer.tag)?;
        let endpoint = endpoint.with_recovery(connect, patience(offer, options), mailbox.clone(), way);
        Ok((endpoint.with_journal(memory), mailbox))
    }

    /// Keeps where the frames of a queue pair go that the engine took in.
    pub(super) fn add(&mut self, tag: u32, mailbox: Mailbox, qp: QpId, has_journal: bool) {
        self.mailboxes.insert(tag, (mailbox, qp));
        if has_journal {
            self.kept.insert(qp);
        }
    }

    /// Whether another proxy may go on with a queue pair.
    pub(super) fn keeps(&self, qp: QpId) -> bool {
        self.kept.contains(&qp)
    }

    /// Forgets a queue pair that is gone.
    pub(super) fn remove(&mut self, qp: QpId) {
        self.mailboxes.retain(|_, (_, id)| *id != qp);
        self.kept.remove(&qp);
    }

    /// A queue pair that goes on where another proxy died.
    pub(super) fn resume(
        &mut self,
        memory: QpMemory,
        session: Arc<SharedMemory>,
        (offer, options, wake): (&SessionOffer, QpOptions, Wake),
        (bytes, lease): (u64, Lease),
    ) -> Result<(), Refusal> {
        self.resuming = None;
        let endpoint = Endpoint::local(memory, options).map_err(why)?;
        let mailbox = Mailbox::default();
        let (ends, way) = ([offer.own, offer.peer], self.way(offer.tag)?);
        let patience = patience(offer, &options);
        let endpoint = endpoint.resumed(session, ends, patience, mailbox.clone(), way).map_err(why)?;
        let (tag, regions) = (offer.tag, Vec::new());
        self.resuming = Some(Resuming { endpoint, wake, tag, mailbox, bytes, regions, lease });
        Ok(())
    }

    /// The queue pair that is being resumed.
    pub(super) fn resuming(&mut self) -> Result<&mut Resuming, Refusal> {
        self.resuming.as_mut().ok_or_else(|| Refusal::Why("no queue pair is being resumed".into()))
    }

    /// Hands the queue pair that is being resumed to the engine, which begins to meet the peer.
    pub(super) fn finish(&mut self, engine: &Engine) -> Result<(QpId, u64, Lease, Regions), Refusal> {
        self.resuming()?;
        let Some(r) = self.resuming.take() else { unreachable!("it is there, as looked at above") };
        let id = engine.add_qp(r.endpoint, r.wake)?;
        self.add(r.tag, r.mailbox, id, true);
        Ok((id, r.bytes, r.lease, r.regions))
    }
}

impl Resuming {
    /// All bytes of it that are mapped.
    pub(super) fn mapped(&self) -> u64 {
        self.bytes + self.regions.iter().map(|(_, bytes, _)| bytes).sum::<u64>()
    }

    /// Registers a region under the key that it had.
    pub(super) fn restore(
        &mut self,
        key: u32,
        memory: Arc<SharedMemory>,
        lease: Lease,
    ) -> Result<(), Refusal> {
        let (address, bytes) = (memory.as_ptr().as_ptr() as usize, memory.len() as u64);
        let region = RegionMemory::Host { address, keep: Some(memory) };
        if !self.endpoint.restore_region(key, region, bytes) {
            return Err(Refusal::Why(format!("key {key:#010x} has the place of another region")));
        }
        self.regions.push((key, bytes, lease));
        Ok(())
    }
}
