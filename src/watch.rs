//! Notices that the proxy process is gone, and writes the final status that the proxy can no longer
//! write (P7).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::window::WeakPiece;
use pushgate_proxy::session::Status;
use rustix::event::{PollFd, PollFlags, poll};

use crate::error::{Error, Result};

/// The queue pairs that a proxy in another process drives. Clones share one list.
#[derive(Clone, Default)]
pub(crate) struct Watched(Arc<Mutex<List>>);

#[derive(Default)]
struct List {
    /// The proxy process is gone: nothing reads `all` any more.
    gone: bool,
    all: Vec<WatchedQp>,
}

/// One queue pair: the segments where its device and its peer look for the status, and its rank.
struct WatchedQp {
    control: WeakPiece,
    link: WeakPiece,
    rank: u32,
}

impl WatchedQp {
    /// Writes *peer lost* to both segments, in place of the proxy.
    fn tell(&self) {
        let status = Status { rank: Some(self.rank), ..Status::new(abi::PUSHGATE_PEER_LOST) };
        for (segment, at) in
            [(&self.control, abi::PUSHGATE_CTL_STATUS), (&self.link, abi::PUSHGATE_LINK_STATUS)]
        {
            if let Some(memory) = segment.upgrade() {
                tell(&memory.words(at as usize, 1)[0], status);
            }
        }
    }
}

impl Watched {
    /// Adds a queue pair that the proxy has taken in.
    ///
    /// If the proxy process has died since it took the queue pair in, the queue pair has its status
    /// when this returns.
    pub(crate) fn add(&self, control: WeakPiece, link: WeakPiece, rank: u32) {
        let member = WatchedQp { control, link, rank };
        let mut list = self.lock();
        if list.gone {
            return member.tell();
        }
        list.all.retain(|m| m.control.is_alive());
        list.all.push(member);
    }

    /// Marks the proxy process as gone; current and future members get their status.
    fn lose(&self) {
        let mut list = self.lock();
        list.gone = true;
        list.all.drain(..).for_each(|m| m.tell());
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        // A panic leaves the list whole, so a poisoned lock is no reason to stop.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that waits for the end of the proxy process.
pub(crate) struct Watch {
    stop: Arc<EventFd>,
    thread: OwnedHere<Option<JoinHandle<()>>>,
}

impl Watch {
    /// Starts to watch `proxy`, the socket to the proxy process.
    pub(crate) fn start(proxy: BorrowedFd<'_>, members: Watched) -> Result<Self> {
        let proxy = proxy.try_clone_to_owned().map_err(Error::io("the proxy's socket"))?;
        let stop = Arc::new(EventFd::new().map_err(Error::io("eventfd"))?);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("pushgate-watch".into())
            .spawn(move || {
                loop {
                    // Poll only for the connection's end: the proxy's answers are for the threads
                    // that asked.
                    let mut fds = [
                        PollFd::new(&proxy, PollFlags::RDHUP | PollFlags::HUP),
                        PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN),
                    ];
                    if poll(&mut fds, None).is_err() {
                        continue;
                    }
                    if !fds[1].revents().is_empty() {
                        return;
                    }
                    if !fds[0].revents().is_empty() {
                        break;
                    }
                }
                tracing::error!("the proxy's process is gone");
                members.lose();
            })
            .map_err(Error::io("starting the watch of the proxy"))?;
        Ok(Watch { stop, thread: OwnedHere::new(Some(thread)) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A child of `fork` has the eventfd but not the thread.
        if self.thread.here().is_err() {
            return;
        }
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes a status word where the device or the peer looks, in place of an engine that is gone. A
/// status that is already there stays.
pub(crate) fn tell(word: &AtomicU64, status: Status) {
    let _ = word.compare_exchange(0, status.word(), Ordering::Release, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use pushgate_driver_shim::memory::SharedMemory;
    use pushgate_driver_shim::window::Piece;

    use super::*;

    fn piece() -> Piece {
        Piece::whole(Arc::new(SharedMemory::builder("segment", 4096).create().unwrap()))
    }

    #[test]
    fn p7_a_proxy_that_dies_before_its_queue_pair_is_watched_ends_the_queue_pair() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let members = Watched::default();
        let mut watch = Watch::start(ours.as_fd(), members.clone()).unwrap();
        let [early, early_link, late, late_link] = [(); 4].map(|()| piece());
        members.add(early.downgrade(), early_link.downgrade(), 3);
        drop(theirs);
        // The thread ends after it saw the proxy's end and told every member on the list.
        watch.thread.take().unwrap().join().unwrap();
        members.add(late.downgrade(), late_link.downgrade(), 5);
        for (control, link, rank) in [(early, early_link, 3), (late, late_link, 5)] {
            for (piece, at) in [(control, abi::PUSHGATE_CTL_STATUS), (link, abi::PUSHGATE_LINK_STATUS)] {
                let word = piece.words(at as usize, 1)[0].load(Ordering::Acquire);
                let status = Status::from_word(word).expect("a status");
                assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_PEER_LOST, Some(rank)));
            }
        }
    }
}
