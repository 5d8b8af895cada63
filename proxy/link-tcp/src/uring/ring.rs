//! A ring of io_uring, which all links of an engine share: operations begin, go out together, and complete.
//!
//! A queue for what is to begin and one for what has completed lie in memory that the kernel sees too. So a look at a
//! ring where nothing has happened costs no system call.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::{EnterFlags, IoUring, Probe, cqueue, opcode, squeue};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Operations that can wait for the next system call.
const BEGINNINGS: u32 = 256;
/// Completions that can wait to be read. The kernel keeps more of them aside.
const COMPLETIONS: u32 = 4096;
/// The most sockets of a ring.
const MOST_FILES: u64 = 4096;
/// Marks a completion that nobody asks for.
const NOBODY: u64 = u64::MAX;

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel was built without io_uring.
    #[error("this kernel has no io_uring; set `tcp-io` to socket")]
    Missing,
    /// A switch or a filter forbids io_uring.
    #[error(
        "this process may not use io_uring: {0}; set `tcp-io` to socket, or set the sysctl kernel.io_uring_disabled \
         to 0 and, in a container, allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile"
    )]
    Denied(&'static str),
    /// The kernel is too old.
    #[error("io_uring of this kernel lacks {0}; set `tcp-io` to socket, or use Linux 5.19 or later")]
    Old(&'static str),
    /// Anything else.
    #[error("setting io_uring up: {0}; set `tcp-io` to socket, or raise the limit that this names")]
    Io(#[from] io::Error),
}

impl RingError {
    fn from_set_up(error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(Errno::NOSYS) => RingError::Missing,
            Some(Errno::PERM | Errno::ACCESS) => {
                let sysctl =
                    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
                RingError::Denied(match sysctl.trim() {
                    "1" => "the sysctl kernel.io_uring_disabled is 1",
                    "2" => "the sysctl kernel.io_uring_disabled is 2",
                    _ => "a seccomp filter or a security module refuses io_uring_setup",
                })
            }
            Some(Errno::INVAL) => RingError::Old("cooperative task running"),
            _ => RingError::Io(error),
        }
    }
}

/// Where one operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Begun,
    /// It has completed, with this result and these flags.
    Done(i32, u32),
}

/// Where the notice is that the kernel reads the memory of an operation no more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notice {
    /// There will be none, or it was taken.
    None,
    Due,
    /// It is in: whether the kernel has copied.
    In(bool),
}

/// An operation of a wire. Its number is what the kernel hands back.
struct Op {
    state: State,
    notice: Notice,
    /// Nobody will take what comes of it.
    muted: bool,
}

/// The number of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpId(u32);

/// What came of an operation.
#[derive(Clone, Copy)]
pub struct Outcome {
    /// The result that the system call would have returned.
    pub result: Result<usize, Errno>,
    /// The socket has more to read.
    pub more: bool,
}

/// The ring of an engine.
pub struct Ring {
    /// The engine's thread takes it for moments, and nobody else while links are live: a wire is made, and may be dropped,
    /// by other threads, and `Wire` is `Send`. So the lock is there for the compiler and for those moments, and waits for
    /// nobody on the hot path.
    queues: Mutex<Queues>,
    fd: RawFd,
    zero_copy: bool,
}

/// The queues of a ring, and what is known of its operations.
pub struct Queues {
    ring: IoUring,
    ops: Vec<Op>,
    free_ops: Vec<OpId>,
    free_files: Vec<u32>,
    /// Results and notices that were read from the queue and that a wire has still to take.
    unclaimed: u32,
    /// How often what had begun went out.
    flushes: u64,
    /// Wires on the ring.
    wires: usize,
}

impl Ring {
    /// A ring. `one_thread`: one thread drives the engine. Then a completion waits until that thread looks, and else it
    /// interrupts the thread that began the operation.
    pub fn open(one_thread: bool) -> Result<Arc<Ring>, RingError> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp().setup_submit_all().dontfork();
        if one_thread {
            builder.setup_coop_taskrun().setup_taskrun_flag();
        }
        let ring: IoUring = builder.build(BEGINNINGS).map_err(RingError::from_set_up)?;
        let features = ring.params();
        if !features.is_feature_nodrop() || !features.is_feature_submit_stable() {
            return Err(RingError::Old("completions that are never dropped"));
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Send::CODE, opcode::SendMsg::CODE, opcode::Recv::CODE, opcode::RecvMsg::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(RingError::Old("sending and receiving"));
        }
        // The kernel takes no longer table than the process may have files.
        let most = getrlimit(Resource::Nofile).current.unwrap_or(MOST_FILES).min(MOST_FILES) as u32;
        let sparse = ring.submitter().register_files_sparse(most);
        sparse.map_err(|e| match Errno::from_io_error(&e) {
            Some(Errno::INVAL) => RingError::Old("sparse tables of files"),
            _ => RingError::Io(e),
        })?;
        let fd = ring.as_raw_fd();
        let queues = Queues {
            ring,
            ops: Vec::new(),
            free_ops: Vec::new(),
            free_files: (0..most).rev().collect(),
            unclaimed: 0,
            flushes: 0,
            wires: 0,
        };
        let zero_copy = probe.is_supported(opcode::SendMsgZc::CODE);
        Ok(Arc::new(Ring { queues: Mutex::new(queues), fd, zero_copy }))
    }

    /// The queues, for a moment.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, Queues> {
        // After a panic the queues are still what the kernel knows of.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Becomes readable when something completes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the ring, which this holds and never replaces.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Whether the ring has room for `sockets` more sockets.
    pub fn has_room(&self, sockets: usize) -> bool {
        self.lock().free_files.len() >= sockets
    }

    /// Whether the kernel can send without a copy.
    pub fn zero_copy(&self) -> bool {
        self.zero_copy
    }
}

impl Queues {
    /// Takes a socket in; returns its number in the ring's table.
    pub fn add_file(&mut self, socket: &TcpStream) -> io::Result<u32> {
        let Some(file) = self.free_files.pop() else {
            return Err(io::Error::other("all places of the ring's table of sockets are taken"));
        };
        if let Err(e) = self.ring.submitter().register_files_update(file, &[socket.as_raw_fd()]) {
            self.free_files.push(file);
            return Err(e);
        }
        Ok(file)
    }

    /// Gives a socket back. No operation on it is under way.
    pub fn remove_file(&mut self, file: u32) {
        match self.ring.submitter().register_files_update(file, &[-1]) {
            Ok(_) => self.free_files.push(file),
            // The place is lost, and the socket stays open until the ring goes.
            Err(e) => tracing::debug!("taking a socket out of a ring: {e}"),
        }
    }

    /// Counts a wire that comes to the ring.
    pub fn add_wire(&mut self) {
        self.wires += 1;
    }

    /// Counts a wire that leaves the ring.
    pub fn remove_wire(&mut self) {
        self.wires -= 1;
    }

    /// Whether more than one wire is on the ring.
    pub fn is_shared(&self) -> bool {
        self.wires > 1
    }

    /// A new operation, which is idle.
    pub fn add_op(&mut self) -> OpId {
        let idle = Op { state: State::Idle, notice: Notice::None, muted: false };
        match self.free_ops.pop() {
            Some(op) => {
                self.ops[op.0 as usize] = idle;
                op
            }
            None => {
                self.ops.push(idle);
                OpId(self.ops.len() as u32 - 1)
            }
        }
    }

    /// Gives an operation back, which is idle.
    pub fn remove_op(&mut self, op: OpId) {
        debug_assert!(!self.is_busy(op));
        self.free_ops.push(op);
    }

    /// Begins an operation, which is idle; it goes out with the next [`Queues::flush`].
    ///
    /// # Safety
    ///
    /// What `entry` names stays until it has gone out. The memory that the operation reads or writes stays until its
    /// result was taken, and its notice, too, if one comes.
    #[inline]
    pub unsafe fn begin(&mut self, op: OpId, entry: squeue::Entry) -> io::Result<()> {
        debug_assert!(!self.is_busy(op));
        // SAFETY: as our caller promises.
        unsafe { self.push(entry.user_data(op.0.into())) }?;
        self.ops[op.0 as usize].state = State::Begun;
        Ok(())
    }

    /// Asks that an operation that is under way ends.
    pub fn cancel(&mut self, op: OpId) -> io::Result<()> {
        if self.ops[op.0 as usize].state != State::Begun {
            return Ok(());
        }
        let entry = opcode::AsyncCancel::new(op.0.into()).build().user_data(NOBODY);
        // SAFETY: it names no memory.
        unsafe { self.push(entry) }
    }

    /// # Safety
    ///
    /// As [`Queues::begin`].
    #[inline]
    unsafe fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.flush()?;
        }
        // SAFETY: as our caller promises.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The kernel has taken none of them: there is no memory for now.
        pushed.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Has what was begun go out, and completes what can complete.
    pub fn flush(&mut self) -> io::Result<()> {
        let n = self.ring.submission().len();
        if n == 0 {
            return Ok(());
        }
        self.enter(n as u32)?;
        // Where the kernel has no memory for now, the rest goes out later.
        self.flushes += self.ring.submission().is_empty() as u64;
        Ok(())
    }

    fn enter(&mut self, n: u32) -> io::Result<()> {
        // SAFETY: no argument is handed over; the entries name memory that stays, as `begin` asks.
        let entered = unsafe { self.ring.submitter().enter::<()>(n, 0, EnterFlags::GETEVENTS.bits(), None) };
        match entered {
            Ok(_) => Ok(()),
            // What is left goes out with the next call.
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::INTR | Errno::AGAIN | Errno::BUSY) => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// How often what had begun went out. An operation that began when this was the same has not gone out.
    #[inline]
    pub fn flushes(&self) -> u64 {
        self.flushes
    }

    /// Reads what has completed. Costs a system call only if the kernel has said that it waits for one.
    #[inline]
    pub fn look(&mut self) -> io::Result<()> {
        let queue = self.ring.submission();
        let asked = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if asked {
            self.enter(0)?;
        }
        for entry in self.ring.completion() {
            let Some(op) = self.ops.get_mut(entry.user_data() as usize) else { continue };
            let flags = entry.flags();
            if cqueue::notif(flags) {
                /// What the kernel says of a send that it was to do without a copy.
                const COPIED: u32 = 1 << 31;
                op.notice = Notice::In(entry.result() as u32 & COPIED != 0);
            } else {
                op.state = State::Done(entry.result(), flags);
                if cqueue::more(flags) && op.notice == Notice::None {
                    op.notice = Notice::Due;
                }
            }
            self.unclaimed += !op.muted as u32;
        }
        Ok(())
    }

    /// Wakes the engine, if anything has come that was not taken. After [`Queues::look`] on a thread that is not the
    /// engine's: what was read there can't wake an engine any more that sleeps.
    pub fn wake(&mut self) -> io::Result<()> {
        if self.unclaimed == 0 {
            return Ok(());
        }
        // SAFETY: it names no memory.
        unsafe { self.push(opcode::Nop::new().build().user_data(NOBODY)) }?;
        self.flush()
    }

    /// Takes what came of an operation, if it has completed.
    #[inline]
    pub fn take(&mut self, op: OpId) -> Option<Outcome> {
        let op = &mut self.ops[op.0 as usize];
        let State::Done(result, flags) = op.state else { return None };
        op.state = State::Idle;
        self.unclaimed -= !op.muted as u32;
        let result = match usize::try_from(result) {
            Ok(n) => Ok(n),
            Err(_) => Err(Errno::from_raw_os_error(-result)),
        };
        Some(Outcome { result, more: cqueue::sock_nonempty(flags) })
    }

    /// Whether a notice of an operation, whose result was taken, is still to come or to be taken.
    #[inline]
    pub fn expects_notice(&self, op: OpId) -> bool {
        self.ops[op.0 as usize].notice != Notice::None
    }

    /// Takes the notice of an operation, if one is in: whether the kernel has copied.
    #[inline]
    pub fn take_notice(&mut self, op: OpId) -> Option<bool> {
        let op = &mut self.ops[op.0 as usize];
        let Notice::In(copied) = op.notice else { return None };
        op.notice = Notice::None;
        self.unclaimed -= !op.muted as u32;
        Some(copied)
    }

    /// Says that nobody will ask for what comes of an operation, so that it keeps nobody awake.
    pub fn mute(&mut self, op: OpId) {
        let op = &mut self.ops[op.0 as usize];
        if !std::mem::replace(&mut op.muted, true) {
            self.unclaimed -= matches!(op.state, State::Done(..)) as u32;
            self.unclaimed -= matches!(op.notice, Notice::In(_)) as u32;
        }
    }

    /// Whether the kernel may still use the memory of an operation.
    pub fn is_busy(&self, op: OpId) -> bool {
        let op = &self.ops[op.0 as usize];
        op.state == State::Begun || op.notice == Notice::Due
    }

    /// Whether anything has come, for whichever wire, that was not taken.
    pub fn has_news(&mut self) -> bool {
        let queue = self.ring.submission();
        let asked = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        asked || self.unclaimed > 0 || !self.ring.completion().is_empty()
    }
}
