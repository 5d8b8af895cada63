//! Threads that close descriptors of a peer by their exit. Each has a table of descriptors with those of one call alone.
//!
//! A thread that exits closes its whole table in order, and each close flushes its file. In a copy of the process's table one peer's
//! file that hangs in its flush would keep the thread from the descriptors of all others. So these threads are started by one that has
//! emptied its table before a peer could send anything, and descriptors reach them over a socket.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::{Builder, JoinHandle};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};

use crate::fork::Owner;
use crate::scm::{FDS_AT_ONCE, recv_some, send_some};

/// A thread that has descriptors in a table of its own. It exits, and so closes them, when the sender is dropped.
pub(crate) type Exiting = (Pid, Sender<()>);

/// Bytes of a stack. A peer that sends descriptors all the time keeps hundreds of these threads, which do little.
const STACK: usize = 128 << 10;

/// By how much the nice value of a thread that closes is larger than that of the thread that starts it: two thirds of the weight. With much
/// less a thread that accepts connections waits for closes, on a core that others want.
const BACK: i32 = 2;

/// How a thread that closes is started.
pub(crate) fn builder(name: &str) -> Builder {
    Builder::new().name(name.into()).stack_size(STACK)
}

/// Gives the calling thread, and the threads that it starts, less of a core that others want: a peer can send descriptors all the time, and
/// nobody waits for their closes.
pub(crate) fn stand_back() {
    let own = Some(gettid());
    // A thread that can't change its nice value keeps it.
    let _ = getpriority_process(own).and_then(|nice| setpriority_process(own, (nice + BACK).min(19)));
}

/// The thread that starts the others. It has ended when the drop of this returns, so the code of a library that is unloaded is
/// free of it.
#[derive(Debug)]
pub(crate) struct Closers {
    /// `None` in the drop alone.
    line: Mutex<Option<Line>>,
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    orders: Sender<Order>,
}

#[derive(Debug)]
struct Order {
    /// How many messages with descriptors wait in the socket.
    messages: usize,
    ready: Sender<Pid>,
    exits: Receiver<()>,
}

/// The thread of this process that starts closing threads. A socket over which a peer may send descriptors keeps the value, so that the thread
/// has emptied its table before the peer's first descriptor arrives. `None`: the thread can't be started.
pub(crate) fn kept() -> Option<Arc<Closers>> {
    static KEPT: Mutex<Option<(Owner, Weak<Closers>)>> = Mutex::new(None);
    let mut kept = lock_soon(&KEPT)?;
    // A child of fork has none of its parent's threads.
    let there = kept.as_ref().filter(|(owner, _)| owner.is_here()).and_then(|(_, closers)| closers.upgrade());
    there.or_else(|| {
        let new = Arc::new(start()?);
        *kept = Some((Owner::here(), Arc::downgrade(&new)));
        Some(new)
    })
}

/// Locks, unless that takes long: in a child of fork the lock's holder may be missing.
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..10_000 {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(e)) => return Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

fn start() -> Option<Closers> {
    let (socket, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    let (number, (orders, to_do), (ready, is_ready)) = (theirs.as_raw_fd(), channel(), channel());
    let starts = move || {
        stand_back();
        // SAFETY: from here on this thread uses no descriptor but the socket, which is in its table too.
        let all = unsafe { unshare_unsafe(UnshareFlags::FILES) }.ok().and_then(|()| numbers());
        let _ = ready.send(all.is_some());
        let Some(all) = all else { return };
        for other in all.into_iter().filter(|other| *other != number) {
            // SAFETY: the table is this thread's own, and nothing in this thread uses the descriptor.
            unsafe { rustix::io::close(other) };
        }
        // SAFETY: the socket's number in this thread's table, where nothing else closes it.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        while to_do.recv().is_ok_and(|order| start_one(&socket, order)) {}
    };
    let thread = Some(builder("pushgate-closer").spawn(starts).ok()?);
    let line = Mutex::new(Some(Line { socket, orders }));
    // The other thread has a copy of `theirs` by then.
    is_ready.recv().ok()?.then_some(Closers { line, thread, owner: Owner::here() })
}

/// The descriptors of the calling thread's table.
fn numbers() -> Option<Vec<RawFd>> {
    let all = std::fs::read_dir("/proc/thread-self/fd").ok()?;
    Some(all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Starts a thread that takes its descriptors from the socket. False if the thread has not taken them.
fn start_one(socket: &OwnedFd, order: Order) -> bool {
    let (number, (took, has_taken)) = (socket.as_raw_fd(), channel());
    let exits = move || {
        // SAFETY: from here on this thread uses no descriptor but the socket, and leaves all to its exit.
        if unsafe { unshare_unsafe(UnshareFlags::FILES) }.is_err() {
            return;
        }
        // SAFETY: this thread's table is a copy of one that has the socket at this number.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let mut fds = Vec::new();
        let taken = (0..order.messages)
            .all(|_| matches!(recv_some(socket, &mut [0], &mut fds), Ok(Some((1, false)))));
        std::mem::forget(fds);
        if taken {
            let _ = took.send(());
            let _ = order.ready.send(gettid());
            let _ = order.exits.recv();
        }
    };
    builder("pushgate-exit").spawn(exits).is_ok() && has_taken.recv().is_ok()
}

impl Drop for Closers {
    fn drop(&mut self) {
        *self.line.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        // A child of fork has none of its parent's threads.
        if let Some(thread) = self.thread.take().filter(|_| self.owner.is_here()) {
            let _ = thread.join();
        }
    }
}

impl Closers {
    /// Runs `f` while nothing is closed.
    #[cfg(test)]
    pub(crate) fn held<T>(&self, f: impl FnOnce() -> T) -> T {
        let _line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        f()
    }

    /// Gives copies of descriptors to a thread. `None`: no thread has all of them.
    pub(crate) fn take(&self, fds: &[OwnedFd]) -> Option<Exiting> {
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let line = line.as_ref()?;
        let mut messages = 0;
        for some in fds.chunks(FDS_AT_ONCE) {
            let some: Vec<_> = some.iter().map(|fd| fd.as_fd()).collect();
            // Refused if too many are under way, or a socket has sockets in its queue too deeply.
            let Ok(Some(1)) = send_some(line.socket.as_fd(), &[0], &some) else { break };
            messages += 1;
        }
        let (ready, is_ready) = channel();
        let (goes, exits) = channel();
        line.orders.send(Order { messages, ready, exits }).ok()?;
        let thread = is_ready.recv().ok()?;
        (messages == fds.len().div_ceil(FDS_AT_ONCE)).then_some((thread, goes))
    }
}
