//! A page that an agent shares with a peer of its host, by which it closes its memory to the peer's copies, and knows when none goes on.
//!
//! The peer finds the page as a descriptor of the agent's process, so it needs what copying needs: the right to trace that process. The
//! page's token shows that the process is the agent's, as this process numbers processes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::process::Process;
use pushgate_link::{HostProcess, busy};
use rustix::fs::{Mode, OFlags, open};

use crate::wire::TOKEN;

const BYTES: usize = 4096;
/// Words of the page: whether it is open, how many batches go on, the token.
const OPEN: usize = 0;
const BUSY: usize = 1;
const SECRET: usize = 2;

fn halves(token: &[u8; TOKEN]) -> [u64; 2] {
    [0, 8].map(|i| u64::from_ne_bytes(token[i..i + 8].try_into().expect("8 bytes")))
}

/// The owner's side.
pub struct Gate(SharedMemory);

impl Gate {
    /// A page that is open.
    pub fn new(token: &[u8; TOKEN]) -> Result<Gate, ShimError> {
        let memory = SharedMemory::builder("pushgate-nixl", BYTES).huge_pages(HugePages::Never).create()?;
        let words = memory.words(0, SECRET + 2);
        // Relaxed: nobody has the page yet.
        words
            .iter()
            .zip([1, 0].into_iter().chain(halves(token)))
            .for_each(|(w, v)| w.store(v, Ordering::Relaxed));
        Ok(Gate(memory))
    }

    /// Where the peer finds it: the number of a descriptor of this process.
    pub fn place(&self) -> u64 {
        self.0.fd().as_raw_fd() as u64
    }

    /// Opens memory of another process, found as the page is, without a wait. The peer names the descriptor, and to open or even to ask a
    /// file of some file systems takes as long as their server likes. Memory like the page lies on one mount, which is the kernel's own:
    /// what lies elsewhere is not opened.
    fn open_alike(&self, pid: u32, place: u64) -> io::Result<OwnedFd> {
        let own = mount(&format!("thread-self/fdinfo/{}", self.place()))?;
        let check = |descriptor: &str| match mount(descriptor)? == own {
            true => Ok(()),
            false => Err(io::Error::other("the descriptor is no memory")),
        };
        check(&format!("{pid}/fdinfo/{place}"))?;
        // The peer may have put another file there since. A descriptor of the path alone asks no file system, and its file stays the one
        // that is checked.
        let path = open(format!("/proc/{pid}/fd/{place}"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let held = path.as_raw_fd();
        check(&format!("thread-self/fdinfo/{held}"))?;
        // Without NONBLOCK a lease (fcntl) that the peer has of the file would be waited for.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(open(format!("/proc/thread-self/fd/{held}"), flags, Mode::empty())?)
    }

    /// Closes it to new batches.
    pub fn close(&self) {
        busy::close(&self.0.words(0, 2)[OPEN], 0);
    }

    /// Whether a batch of the peer goes on. A batch takes less than a millisecond; one of a peer that is stopped, longer. One of a peer
    /// that has ended does not go on.
    pub fn is_used(&self, peer: Option<&Process>) -> bool {
        busy::goes_on(&self.0.words(0, 2)[BUSY]) && !peer.is_some_and(Process::has_ended)
    }
}

/// A gate that was closed while a batch of its peer went on. The registrations that the peer has leases of stay until that has ended.
pub struct Closing {
    /// The connection that has ended.
    pub session: u64,
    /// The gate.
    pub gate: Gate,
    /// The peer. `None`: the kernel gives no handle of it.
    pub peer: Option<Arc<Process>>,
}

impl Closing {
    /// Whether the batch goes on.
    pub fn is_used(&self) -> bool {
        self.gate.is_used(self.peer.as_deref())
    }
}

/// The mount that the file of a descriptor lies on, by the kernel's number for it. Asks no file system.
fn mount(descriptor: &str) -> io::Result<String> {
    let info = std::fs::read_to_string(format!("/proc/{descriptor}"))?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(mount.ok_or(io::ErrorKind::Unsupported)?.trim().to_owned())
}

/// The peer's side: a process whose memory this one may touch while the page is open.
pub struct Reached {
    process: HostProcess,
    page: SharedMemory,
}

impl Reached {
    /// The process that has this number, if it has the page at this place and the kernel lets its memory be copied. `own` is a page of
    /// this process. Waits for nobody.
    pub fn find(pid: u32, place: u64, token: &[u8; TOKEN], own: &Gate) -> Option<Reached> {
        let page = SharedMemory::from_fd(own.open_alike(pid, place).ok()?, BYTES).ok()?;
        let is_its = page.words(8 * SECRET, 2).iter().map(|w| w.load(Ordering::Relaxed)).eq(halves(token));
        let process = HostProcess::of(pid);
        (is_its && process.may_be_copied()).then_some(Reached { process, page })
    }

    /// The process.
    pub fn process(&self) -> &HostProcess {
        &self.process
    }

    /// Begins a batch. `None`: the peer has closed its memory.
    pub fn enter(&self) -> Option<busy::Copy<'_>> {
        let words = self.page.words(0, 2);
        let batch = busy::begin(&words[BUSY]);
        // Relaxed: counted before.
        (words[OPEN].load(Ordering::Relaxed) == 1).then_some(batch)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use super::*;

    /// A process that has ended.
    fn ended() -> Arc<Process> {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        child.kill().and_then(|()| child.wait()).unwrap();
        process
    }

    #[test]
    fn p8_a_gate_that_is_closed_lets_no_batch_begin_and_is_used_until_those_of_a_living_peer_end() {
        let token = *b"0123456789abcdef";
        let gate = Gate::new(&token).unwrap();
        let own = std::process::id();
        let find = |pid, place, token| Reached::find(pid, place, token, &gate);
        assert!(find(own, gate.place(), b"another token...").is_none());
        assert!(find(own, 1 << 20, &token).is_none() && find(u32::MAX / 2, 0, &token).is_none());
        let reached = find(own, gate.place(), &token).unwrap();
        drop(reached.enter().unwrap());
        let batch = reached.enter().unwrap();
        gate.close();
        let (own, other) = (Process::own().unwrap(), ended());
        assert!(gate.is_used(Some(&own)) && gate.is_used(None) && !gate.is_used(Some(&other)));
        assert!(reached.enter().is_none());
        drop(batch);
        assert!(!gate.is_used(Some(&own)) && !gate.is_used(None));
    }
    unsafe extern "C" {
        fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    }

    #[test]
    fn p8_a_page_whose_opening_would_have_to_wait_is_not_opened() {
        const SETSIG: c_int = 10;
        const SETLEASE: c_int = 1024;
        const READ_LEASE: c_int = 0;
        /// Ignored: the default of a lease that another one breaks ends the process.
        const SIGURG: c_int = 23;
        let token = *b"0123456789abcdef";
        let gate = Gate::new(&token).unwrap();
        let (fd, own) = (gate.place() as c_int, std::process::id());
        // SAFETY: neither call touches memory.
        let leased = unsafe { fcntl(fd, SETSIG, SIGURG) | fcntl(fd, SETLEASE, READ_LEASE) };
        assert_eq!(leased, 0, "{}", io::Error::last_os_error());
        assert!(Reached::find(own, gate.place(), &token, &gate).is_none());
    }
}
