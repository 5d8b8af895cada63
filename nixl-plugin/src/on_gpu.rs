//! What GPUs copy for an agent: messages of a connection that a GPU fills or empties, in their order, and transfers within the agent.

use std::collections::VecDeque;
use std::sync::Arc;

use pushgate::{Comm, HostEnd, InPlace, Staged};
use pushgate_gpu_kernels::PageWay;

use crate::gpu::{Gpus, Lists, Windows, Work};
use crate::pieces::{Cursor, message};
use crate::registrations::{Memory, Registrations};
use crate::status::Status;
use crate::transfer::Transfer;
use crate::wire::{GPU_CHUNK, Message};

/// Messages of a connection that wait for GPUs at once, and copies of a transfer within the agent.
const MOST_LANDING: usize = 64;
const MOST_WITHIN: usize = 4;

/// What a message brings once its payload is in place.
pub enum Then {
    /// A part of a WRITE is in place.
    Placed { last: bool },
    /// A part of a READ is in place.
    Answered { job: u64, last: bool, status: i32 },
    /// A message without payload for GPUs, after some with it.
    Take(Message),
}

struct Landing {
    work: Work,
    then: Then,
    message: InPlace,
}

/// The messages of a connection that wait for GPUs.
pub struct OnGpu {
    filling: VecDeque<(Work, Staged)>,
    landing: VecDeque<Landing>,
    // After the work that uses it.
    windows: Windows,
}

/// What is left of a connection that has ended. It stays until GPUs that copied have ended too.
pub struct Grave {
    works: Vec<Work>,
    // In this order: registrations before their memory, and the queue pair before its communicator.
    _windows: Windows,
    _end: HostEnd,
    _comm: Comm,
}

impl OnGpu {
    /// Nothing waits yet.
    pub fn of(end: &HostEnd) -> OnGpu {
        OnGpu { filling: VecDeque::new(), landing: VecDeque::new(), windows: Windows::of(end) }
    }

    /// Fills a staged message by GPUs, and publishes it then.
    ///
    /// # Safety
    /// The lists name GPU memory that is registered, and stays as long as `users` say, and bytes of the staged message.
    pub unsafe fn fill(&mut self, gpus: &mut Gpus, lists: Lists, users: Vec<Arc<()>>, staged: Staged) {
        // SAFETY: the caller's promise; the message stays until it is published.
        let work = unsafe { gpus.start(&mut self.windows, lists, PageWay::Out, users) };
        self.filling.push_back((work, staged));
    }

    /// Publishes what GPUs have filled. True if there was something.
    pub fn publish(&mut self, gpus: &mut Gpus, end: &mut HostEnd) -> Result<bool, String> {
        let mut some = false;
        while let Some((work, _)) = self.filling.front_mut() {
            if !gpus.is_done(work)? {
                break;
            }
            let (_, staged) = self.filling.pop_front().expect("seen above");
            end.publish(staged);
            some = true;
        }
        Ok(some)
    }

    /// Forgets what GPUs have filled, of a queue pair that has ended.
    pub fn drop_filled(&mut self, gpus: &mut Gpus) -> Result<(), String> {
        while let Some((work, _)) = self.filling.front_mut()
            && gpus.is_done(work)?
        {
            self.filling.pop_front();
        }
        Ok(())
    }

    /// Copies a message's payload to GPU memory. What the message brings comes after that, and after all messages before it.
    ///
    /// # Safety
    /// The lists name GPU memory that is registered, and stays as long as `users` say, and bytes of the message.
    pub unsafe fn land(
        &mut self,
        gpus: &mut Gpus,
        lists: Lists,
        users: Vec<Arc<()>>,
        then: Then,
        message: InPlace,
    ) {
        // SAFETY: the caller's promise; the message stays until it is given back.
        let work = unsafe { gpus.start(&mut self.windows, lists, PageWay::In, users) };
        self.landing.push_back(Landing { work, then, message });
    }

    /// The oldest message that has waited, if its payload is in place: to be given back.
    pub fn landed(&mut self, gpus: &mut Gpus) -> Result<Option<(Then, InPlace)>, String> {
        let Some(landing) = self.landing.front_mut() else { return Ok(None) };
        if !gpus.is_done(&mut landing.work)? {
            return Ok(None);
        }
        Ok(self.landing.pop_front().map(|landing| (landing.then, landing.message)))
    }

    /// Whether messages of the peer wait.
    pub fn is_landing(&self) -> bool {
        !self.landing.is_empty()
    }

    /// Whether no further message of the peer may wait.
    pub fn is_full(&self) -> bool {
        self.landing.len() >= MOST_LANDING
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.filling.is_empty() && self.landing.is_empty()
    }

    /// Ends the connection: what GPUs still use is kept.
    pub fn bury(self, end: HostEnd, comm: Comm) -> Grave {
        let OnGpu { filling, landing, windows } = self;
        let works = filling.into_iter().map(|(work, _)| work).chain(landing.into_iter().map(|l| l.work));
        Grave { works: works.collect(), _windows: windows, _end: end, _comm: comm }
    }
}

impl Grave {
    /// Whether no GPU used it when the connection ended.
    pub fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// Whether a GPU still uses it.
    pub fn is_used(&mut self, gpus: &mut Gpus) -> bool {
        // A GPU that has failed copies nothing more.
        self.works.retain_mut(|work| !gpus.is_done(work).unwrap_or(true));
        !self.works.is_empty()
    }
}

/// A transfer within the agent that GPUs copy.
pub struct Within {
    /// The transfer.
    pub transfer: Arc<Transfer>,
    cursor: Cursor,
    works: VecDeque<Work>,
    failed: Option<Status>,
}

impl Within {
    /// A transfer that has begun.
    pub fn new(transfer: Arc<Transfer>) -> Within {
        Within { transfer, cursor: Cursor::default(), works: VecDeque::new(), failed: None }
    }

    /// Moves it on. How it has ended, once it has.
    pub fn advance(&mut self, gpus: &mut Gpus, registrations: &Registrations) -> Option<Status> {
        let transfer = &*self.transfer;
        while let Some(work) = self.works.front_mut() {
            match gpus.is_done(work) {
                Ok(false) => break,
                Ok(true) => {}
                Err(why) => {
                    tracing::error!("a transfer within the agent has failed: {why}");
                    self.failed = Some(Status::Backend);
                }
            }
            self.works.pop_front();
        }
        if !transfer.is_active() {
            self.failed.get_or_insert(Status::Canceled);
        }
        while self.failed.is_none() && self.works.len() < MOST_WITHIN {
            let parts: Vec<_> = message(&transfer.pieces, &mut self.cursor, GPU_CHUNK).collect();
            if parts.is_empty() {
                break;
            }
            let (mut lists, mut way) = (Lists::default(), PageWay::Within);
            for piece in &parts {
                let Ok(own) = registrations.check(&piece.there) else {
                    self.failed = Some(Status::NotFound);
                    return self.outcome();
                };
                let here = transfer.memory[0] == Memory::Gpu;
                if !here || own.memory != Memory::Gpu || own.device != piece.device {
                    way = PageWay::Any;
                }
                let ends = if transfer.write {
                    (piece.there.address, piece.here)
                } else {
                    (piece.here, piece.there.address)
                };
                lists.add(if here { piece.device } else { own.device }, ends, piece.there.length);
            }
            // SAFETY: both ends lie in registrations of the agent that live; deregistering cancels the transfer and waits for its users.
            let work = unsafe { gpus.start_own(lists, way, vec![transfer.users.clone()]) };
            self.works.push_back(work);
        }
        self.outcome()
    }

    /// How it has ended, if nothing is under way.
    fn outcome(&self) -> Option<Status> {
        self.works.is_empty().then(|| self.failed.unwrap_or(Status::Success))
    }
}
