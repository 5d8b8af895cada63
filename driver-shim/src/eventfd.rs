//! A doorbell between the threads of one process, and from the kernel module to a process. For
//! peers and other processes there is [`crate::bell`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd, non-blocking and closed on exec. Rings that have not been taken add up to one. All
/// calls may be made from any thread.
///
/// The non-blocking mode belongs to every holder of the descriptor, so hand the descriptor to the
/// kernel only and to no other process.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes an eventfd that has not been rung.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Makes another handle of the same eventfd.
    pub fn try_clone(&self) -> io::Result<EventFd> {
        Ok(EventFd(self.0.try_clone()?))
    }

    /// Wakes a thread that waits, or else the next one that will wait.
    pub fn ring(&self) {
        // A full counter (EAGAIN) has been rung already; nothing else can fail.
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &1u64.to_ne_bytes()));
    }

    /// Takes all rings so far; true if there were any.
    pub fn drain(&self) -> bool {
        rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut [0u8; 8])).is_ok()
    }

    /// Whether there is a ring that was not taken.
    pub fn is_rung(&self) -> bool {
        poll_until(&self.0, PollFlags::IN, Some(Instant::now())).unwrap_or(false)
    }

    /// Waits for a ring and takes it; false if `timeout` passes without one. `None` waits for ever.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = deadline(timeout);
        // Another thread may take the ring between poll and drain.
        while poll_until(&self.0, PollFlags::IN, deadline)? {
            if self.drain() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The time at which a wait that begins now ends; `None` means never.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|t| Instant::now().checked_add(t))
}

/// Waits until `fd` is ready, or broken, which the next call on it will report. False once the
/// deadline has passed.
pub(crate) fn poll_until(fd: impl AsFd, flags: PollFlags, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        // A time that no timespec can hold is as good as for ever.
        let timeout = left.and_then(|t| Timespec::try_from(t).ok());
        match poll(&mut [PollFd::new(&fd, flags)], timeout.as_ref()) {
            Ok(n) => return Ok(n > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A limit against a hang.
    fn long() -> Option<Duration> {
        Some(pushgate_tests::hang())
    }

    #[test]
    fn rings_add_up_to_one() {
        let bell = EventFd::new().unwrap();
        assert!(!bell.drain());
        bell.ring();
        bell.ring();
        assert!(bell.wait(long()).unwrap());
        assert!(!bell.drain());
        assert!(!bell.wait(Some(Duration::ZERO)).unwrap());
    }

    #[test]
    fn a_full_counter_neither_blocks_nor_is_lost() {
        let bell = EventFd::new().unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        bell.ring();
        assert!(bell.drain());
        assert!(!bell.drain());
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let begin = Instant::now();
        assert!(!EventFd::new().unwrap().wait(Some(Duration::from_secs(1))).unwrap());
        assert!(begin.elapsed() >= Duration::from_secs(1));
    }

    #[test]
    fn a_clone_wakes_another_thread() {
        let bell = EventFd::new().unwrap();
        let other = bell.try_clone().unwrap();
        let waiter = thread::spawn(move || other.wait(long()).unwrap());
        bell.ring();
        assert!(waiter.join().unwrap());
    }
}
