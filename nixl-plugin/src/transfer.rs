//! A transfer that a program has prepared, from its post to its end, and the copies of one that needs no message for its bytes: of
//! host memory between processes of one host, or within one process.

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushgate_link::{Stretch, busy};

use crate::gate::Reached;
use crate::pieces::{Cursor, Piece, cuts, part};
use crate::registrations::Memory;
use crate::status::Status;
use crate::wire::Remote;

/// Bytes that one thread copies between two looks at what may end the copy.
const BATCH: u64 = 512 << 10;
/// Batches of a transfer that the posting thread copies alone.
const SMALL: usize = 2;
/// Pieces of a batch.
const BATCH_PIECES: usize = 512;
/// Stretches of a system call.
const AT_ONCE: usize = 64;
/// `ESRCH`.
const NO_PROCESS: i32 = 3;

/// What the other end has promised for a registration: its memory may be touched until it revokes.
#[derive(Debug, Default)]
pub struct Lease {
    /// Not 0: the peer has revoked it.
    revoked: AtomicU64,
    /// The region by which it may be written.
    pub region: Option<Remote>,
}

impl Lease {
    /// A lease that is granted.
    pub fn new(region: Option<Remote>) -> Lease {
        Lease { region, ..Lease::default() }
    }

    /// Lets no batch begin. One that was begun is seen by [`Copying::is_running`].
    pub fn revoke(&self) {
        busy::close(&self.revoked, 1);
    }
}

/// How the bytes of a run go.
pub enum Way {
    /// By a system call, between this process and the peer's, as long as no lease is revoked.
    Process(Arc<Reached>, Vec<Arc<Lease>>),
    /// Within this process.
    Own,
}

/// One posting of a transfer that is copied here. Any thread may make its batches.
pub struct Copying {
    /// The transfer.
    pub transfer: Arc<Transfer>,
    way: Way,
    /// The next batch that nobody has taken.
    next: AtomicUsize,
    /// Batches that are not done.
    left: AtomicUsize,
    /// Threads within a batch.
    running: AtomicU64,
    /// 0, or the status with which it fails.
    failed: AtomicI32,
}

/// A transfer of a program.
pub struct Transfer {
    /// Unique within the agent.
    pub id: u64,
    /// From here to the peer.
    pub write: bool,
    /// The other agent; the agent itself for a transfer within it.
    pub peer: String,
    /// Which run of the peer published the memory.
    pub instance: String,
    /// What memories they are: here, and at the peer.
    pub memory: [Memory; 2],
    /// What uses memory of this process, a GPU or the queue pair, holds a clone as long as it does.
    pub users: Arc<()>,
    /// What is transferred.
    pub pieces: Vec<Piece>,
    /// Bytes of it.
    pub bytes: u64,
    /// The registrations of this process that the pieces lie in.
    pub own_keys: Vec<u64>,
    /// The peer's.
    pub their_keys: Vec<u64>,
    /// Where each batch of a copy begins, and the end.
    batches: Vec<Cursor>,
    /// A value of [`Status`].
    status: AtomicI32,
    /// Not 0: nothing of it may touch memory of this process any more.
    cancelled: AtomicU64,
    run: Mutex<Run>,
}

/// What a posted transfer has to do besides.
#[derive(Default)]
pub struct Run {
    /// The notification that follows it.
    pub note: Option<Vec<u8>>,
    /// Where the next message begins, or the next put.
    pub cursor: Cursor,
    /// Bytes go from region to region.
    pub straight: bool,
    /// Requests of a READ that were sent and are not answered.
    pub jobs: usize,
    /// Why it has failed, though more messages of it may come.
    pub failed: Option<Status>,
    /// The copy, if it is one.
    pub copying: Option<Arc<Copying>>,
    /// A release has failed.
    pub refused: bool,
}

impl Run {
    /// Whether the copy is the run's. That of an earlier run, which has ended with its connection, may have batches that nobody has taken.
    fn has(&self, copying: &Arc<Copying>) -> bool {
        self.copying.as_ref().is_some_and(|own| Arc::ptr_eq(own, copying))
    }
}

impl Transfer {
    /// A transfer that is not posted yet.
    pub fn new(
        id: u64,
        write: bool,
        (peer, instance): (String, String),
        memory: [Memory; 2],
        pieces: Vec<Piece>,
        own_keys: Vec<u64>,
        their_keys: Vec<u64>,
    ) -> Transfer {
        Transfer {
            id,
            write,
            peer,
            instance,
            memory,
            users: Arc::default(),
            bytes: pieces.iter().map(|piece| piece.there.length).sum(),
            batches: cuts(&pieces, BATCH, BATCH_PIECES),
            pieces,
            own_keys,
            their_keys,
            status: AtomicI32::new(Status::NotPosted as i32),
            cancelled: AtomicU64::new(0),
            run: Mutex::default(),
        }
    }

    /// How it stands.
    pub fn status(&self) -> i32 {
        // Acquire: a thread that sees the end also sees the bytes.
        self.status.load(Ordering::Acquire)
    }

    /// Whether it is posted and has not ended.
    pub fn is_active(&self) -> bool {
        self.status() == Status::InProgress as i32
    }

    /// Begins a run.
    pub fn begin(&self, note: Option<Vec<u8>>) {
        // Relaxed: no copy goes on that could miss it.
        self.cancelled.store(0, Ordering::Relaxed);
        *self.run() = Run { note, ..Run::default() };
        self.status.store(Status::InProgress as i32, Ordering::Release);
    }

    /// Ends the run, if it has not ended.
    pub fn end(&self, status: Status) {
        let in_progress = Status::InProgress as i32;
        // Release: the bytes are there for a thread that sees the end.
        let _ =
            self.status.compare_exchange(in_progress, status as i32, Ordering::Release, Ordering::Relaxed);
    }

    /// Lets nothing of it begin to touch memory, and ends the run. Threads that copy are seen by [`Transfer::is_copied`].
    pub fn cancel(&self) {
        busy::close(&self.cancelled, 1);
        self.end(Status::Canceled);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        // Relaxed: who copies without the agent's lock, which a call that cancels takes too, has counted itself before (`busy`).
        self.cancelled.load(Ordering::Relaxed) != 0
    }

    /// Ends the run with its copy, unless a notification has to be sent first: false.
    pub fn end_copy(&self, copying: &Arc<Copying>, outcome: Status) -> bool {
        let run = self.run();
        // A next run begins with this lock.
        if run.has(copying) && run.note.is_none() {
            self.end(outcome);
        }
        run.note.is_none()
    }

    /// What the run has to do.
    pub fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it uses a registration of this process.
    pub fn uses(&self, key: u64) -> bool {
        self.own_keys.contains(&key)
    }

    /// Whether GPU memory is at one of its ends.
    pub fn is_gpu(&self) -> bool {
        self.memory.contains(&Memory::Gpu)
    }

    /// Whether a thread, a GPU or a queue pair uses memory of it now.
    pub fn is_copied(&self) -> bool {
        is_used(&self.users) || self.run().copying.as_ref().is_some_and(|copying| copying.is_running())
    }

    /// Whether the thread that posts it copies it faster than another one wakes.
    pub fn is_small(&self) -> bool {
        self.batches.len() - 1 <= SMALL
    }
}

/// Whether what uses memory holds a clone. False: it has ended, and what it did is seen.
pub fn is_used(users: &Arc<()>) -> bool {
    let used = Arc::strong_count(users) > 1;
    // With the release of the clone that was dropped last.
    fence(Ordering::Acquire);
    used
}

impl Copying {
    /// A copy of all of a transfer.
    pub fn new(transfer: Arc<Transfer>, way: Way) -> Copying {
        let left = AtomicUsize::new(transfer.batches.len() - 1);
        let (next, running, failed) = Default::default();
        Copying { transfer, way, next, left, running, failed }
    }

    /// Makes one batch. True if that was the last: then the caller ends the transfer with [`Copying::outcome`].
    pub fn help(&self) -> bool {
        // Relaxed: the number is only taken once.
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.transfer.batches.len() - 1 {
            return false;
        }
        // Before `may_go_on`: either this thread sees a revocation, or the one that revokes sees this thread.
        let running = busy::begin(&self.running);
        if self.failed.load(Ordering::Relaxed) == 0 {
            let done = self.may_go_on().and_then(|()| self.copy(index).map_err(|e| self.status_of(&e)));
            if let Err(status) = done {
                // Relaxed: `left` orders it.
                self.failed.store(status as i32, Ordering::Relaxed);
            }
        }
        drop(running);
        // AcqRel: the last one has seen what all others wrote.
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether a batch is left that nobody has taken.
    pub fn has_more(&self) -> bool {
        // Relaxed: a hint.
        self.next.load(Ordering::Relaxed) < self.transfer.batches.len() - 1
    }

    /// Whether a thread is within a batch. After [`Transfer::cancel`] or [`Lease::revoke`] false means that no thread touches the memory
    /// any more.
    pub fn is_running(&self) -> bool {
        busy::goes_on(&self.running)
    }

    /// Whether it uses this lease.
    pub fn uses(&self, lease: &Arc<Lease>) -> bool {
        matches!(&self.way, Way::Process(_, leases) if leases.iter().any(|own| Arc::ptr_eq(own, lease)))
    }

    /// Whether it is the copy of the transfer's present run.
    pub fn is_current(self: &Arc<Self>) -> bool {
        self.transfer.run().has(self)
    }

    /// How it has ended, after the last batch.
    pub fn outcome(&self) -> Status {
        Status::of(self.failed.load(Ordering::Relaxed))
    }

    fn may_go_on(&self) -> Result<(), Status> {
        if self.transfer.is_cancelled() {
            return Err(Status::Canceled);
        }
        match &self.way {
            Way::Process(_, leases)
                if leases.iter().any(|lease| lease.revoked.load(Ordering::Relaxed) != 0) =>
            {
                Err(Status::NotFound)
            }
            _ => Ok(()),
        }
    }

    fn status_of(&self, e: &io::Error) -> Status {
        tracing::warn!(peer = self.transfer.peer, "copying between two processes: {e}");
        match e.kind() {
            _ if e.raw_os_error() == Some(NO_PROCESS) => Status::RemoteDisconnect,
            _ => Status::Backend,
        }
    }

    fn copy(&self, index: usize) -> io::Result<()> {
        let transfer = &*self.transfer;
        let mut cursor = transfer.batches[index];
        let mut pieces = part(&transfer.pieces, &mut cursor, BATCH, BATCH_PIECES);
        match &self.way {
            Way::Own => pieces.for_each(|piece| {
                let (from, to) = match transfer.write {
                    true => (piece.here, piece.there.address),
                    false => (piece.there.address, piece.here),
                };
                // SAFETY: both ranges lie in registrations of this agent, checked at the post, whose memory the program keeps until
                // it deregisters; deregistering cancels and waits for this batch. `copy`, for they may overlap.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, piece.there.length as usize) };
            }),
            Way::Process(reached, _) => {
                let _open = reached.enter().ok_or_else(|| io::Error::from_raw_os_error(NO_PROCESS))?;
                let mut some = [Stretch { here: 0, there: 0, length: 0 }; AT_ONCE];
                loop {
                    let mut count = 0;
                    for (stretch, Piece { here, there, .. }) in some.iter_mut().zip(&mut pieces) {
                        *stretch = Stretch {
                            here: here as usize,
                            there: there.address,
                            length: there.length as usize,
                        };
                        count += 1;
                    }
                    if count == 0 {
                        break;
                    }
                    // SAFETY: as above for the ranges here. The others lie in registrations that the peer has leased to us, and
                    // their revocation waits for this batch.
                    unsafe { reached.process().copy(transfer.write, &some[..count])? };
                }
            }
        }
        Ok(())
    }
}
