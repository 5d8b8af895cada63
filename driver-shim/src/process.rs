//! A handle of another process of this host, a pidfd, which shows the process's end whatever else
//! holds its sockets.
//!
//! A socket's end shows a death only when the last holder of the socket is gone, and a child that
//! was forked without exec holds all of its parent's sockets. A pidfd becomes readable when the
//! process itself ends. A process that is stopped has not ended.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

/// A process, which may have ended. The descriptor ([`AsFd`]) is readable once the process has
/// ended. It can be handed to other processes, also of other PID namespaces.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// A handle of this process, for its peers. Errors are the system's: `ENOSYS` before Linux 5.3,
    /// `EPERM` under some seccomp filters.
    pub fn own() -> io::Result<Process> {
        Self::open(getpid())
    }

    /// A handle of the process that has a number in our PID namespace now. Reliable only while
    /// something else shows that the process has not ended, because numbers are reused.
    ///
    /// Callers share a handle while the process lives: a rank has many connections to another one, and a limit of descriptors.
    pub fn of(pid: u32) -> io::Result<Arc<Process>> {
        static SHARED: Mutex<BTreeMap<u32, Weak<Process>>> = Mutex::new(BTreeMap::new());
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ErrorKind::InvalidInput)?;
        // Waits for nobody: in a child of fork the lock's holder may be missing, and a handle of one's own does as well.
        let Ok(mut shared) = SHARED.try_lock() else { return Self::open(number).map(Arc::new) };
        let there = shared.get(&pid).and_then(Weak::upgrade);
        // Who has the number of a process that ended is another one.
        if let Some(process) = there.filter(|process| !process.has_ended()) {
            return Ok(process);
        }
        let process = Arc::new(Self::open(number)?);
        shared.retain(|_, process| process.strong_count() > 0);
        shared.insert(pid, Arc::downgrade(&process));
        Ok(process)
    }

    fn open(pid: Pid) -> io::Result<Process> {
        Ok(Process(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Takes over the descriptor that a peer made of itself. Fails with `InvalidInput` unless it is
    /// a pidfd: waiting for a file of some file systems takes as long as their server likes. Other
    /// errors come from reading `/proc`, which tells the type. The descriptor comes back with the error: its close may take as
    /// long as the peer likes.
    pub fn from_fd(fd: OwnedFd) -> Result<Process, (io::Error, OwnedFd)> {
        match std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())) {
            Ok(info) if info.lines().any(|line| line.starts_with("Pid:")) => Ok(Process(fd)),
            Ok(_) => {
                let text = "the descriptor is not a pidfd, by which the end of a process is seen";
                Err((io::Error::new(ErrorKind::InvalidInput, text), fd))
            }
            Err(e) => Err((e, fd)),
        }
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)), Ok(1..))
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn p7_a_process_that_ended_is_told_from_one_that_lives() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(!process.has_ended() && !Process::own().unwrap().has_ended());
        child.kill().unwrap();
        // Without reaping the child: a child that has not been waited for has ended too.
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        assert!(process.has_ended());
        child.wait().unwrap();
        assert!(process.has_ended());
    }

    #[test]
    fn callers_share_the_handle_of_a_process_until_it_has_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let [first, second] = [0, 1].map(|_| Process::of(child.id()).unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        child.kill().unwrap();
        poll(&mut [PollFd::new(&first, PollFlags::IN)], None).unwrap();
        // Before the child is reaped it has its number still.
        assert!(!Arc::ptr_eq(&first, &Process::of(child.id()).unwrap()));
        child.wait().unwrap();
        assert!(Process::of(child.id()).is_err());
    }

    #[test]
    fn p8_a_descriptor_that_is_no_pidfd_is_refused() {
        let own = Process::own().unwrap();
        Process::from_fd(own.0.try_clone().unwrap()).unwrap();
        let (pipe, _write) = rustix::pipe::pipe().unwrap();
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bell = crate::eventfd::EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        for fd in [pipe, memory, bell] {
            assert_eq!(Process::from_fd(fd).unwrap_err().0.kind(), ErrorKind::InvalidInput);
        }
    }
}
