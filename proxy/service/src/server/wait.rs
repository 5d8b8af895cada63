//! Waiting in a server's threads: for a descriptor, for the end of a process, or for the end of the server.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// What ended a wait.
#[derive(Debug, PartialEq)]
pub(super) enum WaitEnd {
    /// The server ends.
    Stop,
    /// The descriptor is readable or closed.
    Ready {
        /// The process has ended, too.
        died: bool,
    },
    /// The process has ended, and the descriptor has nothing to read.
    Died,
    /// The other descriptor is readable or closed.
    Other,
    /// Time ran out, or a signal interrupted the wait.
    Nothing,
}

/// Waits until `fd` or `other` is readable or closed, `process` has ended, `stop` is rung, or `timeout` has passed. Without
/// a timeout the wait has no limit of its own.
pub(super) fn wait(
    stop: &EventFd,
    fd: impl AsFd,
    process: Option<&Process>,
    other: Option<BorrowedFd<'_>>,
    timeout: Option<Duration>,
) -> io::Result<WaitEnd> {
    let timeout = timeout.map(|t| Timespec::try_from(t).expect("a short time"));
    let both = [process.map(AsFd::as_fd), other];
    let mut all = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&fd, PollFlags::IN)];
    all.extend(both.iter().flatten().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
    match poll(&mut all, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    let mut ready = all.iter().map(|fd| !fd.revents().is_empty());
    let mut next = |is_there: bool| is_there && ready.next().unwrap_or(false);
    let found = [next(true), next(true), next(process.is_some()), next(other.is_some())];
    Ok(match found {
        [true, ..] => WaitEnd::Stop,
        [_, true, died, _] => WaitEnd::Ready { died },
        [_, _, true, _] => WaitEnd::Died,
        [.., true] => WaitEnd::Other,
        _ => WaitEnd::Nothing,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;

    /// One look, without waiting.
    fn look(stop: &EventFd, stream: &UnixStream, process: Option<&Process>) -> WaitEnd {
        wait(stop, stream, process, None, Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn a_process_that_ended_is_reported_beside_what_it_left_to_read() {
        let stop = EventFd::new().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert_eq!(look(&stop, &ours, Some(&process)), WaitEnd::Nothing);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(look(&stop, &ours, Some(&process)), WaitEnd::Died);
        theirs.write_all(b"x").unwrap();
        assert_eq!(look(&stop, &ours, Some(&process)), WaitEnd::Ready { died: true });
        assert_eq!(look(&stop, &ours, None), WaitEnd::Ready { died: false });
    }

    #[test]
    fn a_closed_descriptor_is_ready_and_the_servers_end_goes_before_everything() {
        let stop = EventFd::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(look(&stop, &ours, None), WaitEnd::Nothing);
        drop(theirs);
        assert_eq!(look(&stop, &ours, None), WaitEnd::Ready { died: false });
        stop.ring();
        // The bell stays rung: each thread of the server sees it.
        for _ in 0..2 {
            assert_eq!(look(&stop, &ours, None), WaitEnd::Stop);
        }
    }
}
