//! Memory of another process of this host, read or written by one system call: one copy, and
//! nothing is mapped. What UCX and MPI libraries call CMA.
//!
//! The kernel lets a process read another where it might trace it: processes of
//! one user that both kept their rights. Yama at 1 asks besides that
//! the one that is read has said so.

use std::ffi::{c_int, c_ulong};
use std::io;
use std::sync::{Arc, Mutex};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::process::Process;
use rustix::io::Errno;
use rustix::process::{PTracer, Pid, set_ptracer};

#[repr(C)]
struct IoVec {
    base: usize,
    length: usize,
}

// std links the C library anyway; rustix does not have it.
unsafe extern "C" {
    fn process_vm_readv(
        pid: c_int,
        local: *const IoVec,
        locals: c_ulong,
        remote: *const IoVec,
        remotes: c_ulong,
        flags: c_ulong,
    ) -> isize;
    fn process_vm_writev(
        pid: c_int,
        local: *const IoVec,
        locals: c_ulong,
        remote: *const IoVec,
        remotes: c_ulong,
        flags: c_ulong,
    ) -> isize;
}

/// A stretch of this process's memory, and one of another process's, of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Address in this process.
    pub here: usize,
    /// Address in the other process.
    pub there: u64,
    /// Bytes, at least 1.
    pub length: usize,
}

/// The most stretches of one system call.
const AT_ONCE: usize = 64;

/// The process of a peer's program, whose memory an end reads.
pub trait PeerProcess: Send {
    /// Lets that process read this one, where the kernel wants to be told.
    fn allow(&self);

    /// Reads `length` bytes at `address` of that process to `to`. Returns how many came: fewer where the rest is not
    /// mapped there.
    ///
    /// # Safety
    ///
    /// `length` bytes at `to` are mapped, writable, and free of Rust references.
    unsafe fn read(&self, address: u64, to: usize, length: usize) -> io::Result<usize>;
}

/// A process of this host, by its number in our PID namespace.
#[derive(Debug)]
pub struct HostProcess {
    pid: u32,
    /// The process that had the number at first. The kernel gives the number to another process once that one has ended.
    first: Result<Arc<Process>, Errno>,
}

impl HostProcess {
    /// The process that has a number now. Where the kernel gives no handle of it, each read fails with the kernel's
    /// reason.
    pub fn of(pid: u32) -> HostProcess {
        let first = Process::of(pid).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::SRCH));
        HostProcess { pid, first }
    }
}

impl HostProcess {
    /// Whether the kernel lets this process copy to and from that one. It asks for more than for a look at that process's descriptors:
    /// Yama's `ptrace_scope`, SELinux and seccomp filters keep apart processes of one user.
    pub fn may_be_copied(&self) -> bool {
        // No program's memory: the kernel refuses the address last.
        const NOBODYS: u64 = !4095;
        let byte = std::sync::atomic::AtomicU8::new(0);
        let stretch = [Stretch { here: byte.as_ptr() as usize, there: NOBODYS, length: 1 }];
        [false, true].into_iter().all(|into| {
            // SAFETY: the byte is ours, and an atomic.
            let copied = unsafe { self.copy(into, &stretch) };
            copied.is_err_and(|e| e.raw_os_error() == Some(Errno::FAULT.raw_os_error()))
        })
    }

    /// Copies each stretch: out of the process that has the number now, or with `into` into it. An error says that some of the bytes
    /// were not copied; others may have been.
    ///
    /// The caller knows by what it finds in that process that it is the right one: the kernel gives the number of a process that has
    /// ended to another one, at the earliest once it has given all other numbers.
    ///
    /// # Safety
    /// The stretches of this process are mapped, free of Rust references, and writable unless `into`.
    pub unsafe fn copy(&self, into: bool, stretches: &[Stretch]) -> io::Result<()> {
        for some in stretches.chunks(AT_ONCE) {
            let mut here = [const { IoVec { base: 0, length: 0 } }; AT_ONCE];
            let mut there = [const { IoVec { base: 0, length: 0 } }; AT_ONCE];
            let mut wanted = 0;
            for (i, stretch) in some.iter().enumerate() {
                here[i] = IoVec { base: stretch.here, length: stretch.length };
                there[i] = IoVec { base: stretch.there as usize, length: stretch.length };
                wanted += stretch.length;
            }
            let (pid, count) = (self.pid as c_int, some.len() as c_ulong);
            let call = if into { process_vm_writev } else { process_vm_readv };
            // SAFETY: `count` vectors each; the kernel checks both sides, and the caller vouches for ours.
            let n = unsafe { call(pid, here.as_ptr(), count, there.as_ptr(), count, 0) };
            match usize::try_from(n) {
                Err(_) => return Err(io::Error::last_os_error()),
                Ok(n) if n < wanted => return Err(Errno::FAULT.into()),
                Ok(_) => {}
            }
        }
        Ok(())
    }
}

impl PeerProcess for HostProcess {
    fn allow(&self) {
        allow(self.pid);
    }

    unsafe fn read(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        let first = self.first.as_ref().map_err(|errno| io::Error::from(*errno))?;
        // SAFETY: the caller's promise.
        let n = unsafe { read(self.pid, address, to, length) }?;
        // The number was the first process's during the read if that process lives after it.
        if first.has_ended() { Err(Errno::SRCH.into()) } else { Ok(n) }
    }
}

/// Reads `length` bytes at `address` of process `pid` to `to`; how many came. Fewer
/// where the rest is not mapped there.
///
/// # Safety
/// `length` bytes at `to` are mapped, writable, and free of Rust references.
unsafe fn read(pid: u32, address: u64, to: usize, length: usize) -> io::Result<usize> {
    let local = IoVec { base: to, length };
    let remote = IoVec { base: address as usize, length };
    // SAFETY: one vector each; the kernel writes the stretch that the caller vouches
    // for and checks the other in the other process.
    let n = unsafe { process_vm_readv(pid as c_int, &local, 1, &remote, 1, 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Whether this process may make the call at all: it reads a word of itself, for which
/// no right is asked. Fails where a sandbox keeps the call from it.
pub fn callable() -> io::Result<()> {
    let (from, mut to) = (0x1234_5678_9abc_def0u64, 0u64);
    // SAFETY: the word is ours, and not looked at before the call is over.
    let n = unsafe { read(std::process::id(), &raw const from as u64, &raw mut to as usize, 8)? };
    if n == 8 && to == from { Ok(()) } else { Err(io::Error::other(format!("{n} bytes of 8 came"))) }
}

/// The address that an engine names which is not in its program's process.
pub(super) const NOWHERE: u64 = u64::MAX;

/// Whether the process has the segment that its engine says it has at `address`,
/// and may be read: a `PUSHGATE_READS_*`.
pub(super) fn probe(process: &dyn PeerProcess, address: u64) -> u32 {
    if address == NOWHERE {
        return abi::PUSHGATE_READS_ELSEWHERE;
    }
    let mut word = 0u64;
    let at = address.wrapping_add(abi::PUSHGATE_LINK_ADDRESS as u64);
    // SAFETY: the word is ours, and not looked at before the call is over.
    match unsafe { process.read(at, &raw mut word as usize, size_of::<u64>()) } {
        // The word that holds its own segment's address: the process has that segment there.
        // (So has a program whose engine is elsewhere, if by chance; that says NOWHERE.)
        Ok(8) if word == address => abi::PUSHGATE_READS_YES,
        Ok(_) => abi::PUSHGATE_READS_ELSEWHERE,
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::FAULT) => abi::PUSHGATE_READS_ELSEWHERE,
            Some(Errno::SRCH) => abi::PUSHGATE_READS_UNKNOWN,
            _ => abi::PUSHGATE_READS_DENIED,
        },
    }
}

/// Where Yama asks for it, says that `pid` may read this process. The kernel keeps
/// one such name for a process, so with a second peer it is any process of this user.
fn allow(pid: u32) {
    static ALLOWED: Mutex<Option<u32>> = Mutex::new(None);
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if scope.trim() != "1" || pid == std::process::id() {
        return;
    }
    let mut allowed = ALLOWED.lock().unwrap_or_else(|e| e.into_inner());
    let tracer = match (*allowed, Pid::from_raw(pid as i32)) {
        (None, Some(only)) => PTracer::ProcessID(only),
        (Some(one), _) if one == pid => return,
        _ => PTracer::Any,
    };
    *allowed = Some(pid);
    if let Err(e) = set_ptracer(tracer) {
        // The peer's probe will say what it comes to.
        tracing::debug!(pid, "PR_SET_PTRACER: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_what_is_not_mapped_is_an_error_and_never_a_fault() {
        let own = std::process::id();
        let from = [7u8; 100];
        let mut to = [0u8; 100];
        let (at, target) = (from.as_ptr() as u64, to.as_mut_ptr() as usize);
        // SAFETY: `to` is ours and written by nobody else.
        let read = |pid, at| unsafe { read(pid, at, target, 100) };
        assert_eq!(read(own, at).unwrap(), 100);
        let faults = [0, 8, 1 << 46, 1 << 55, u64::MAX - 50].map(|at| read(own, at).unwrap_err());
        assert!(faults.iter().all(|e| e.raw_os_error() == Some(14)), "{faults:?}");
        // No process has this number.
        assert_eq!(read(0x7fff_fff0, at).unwrap_err().raw_os_error(), Some(3));
        assert_eq!(to, from);
    }

    #[test]
    fn a_process_that_copies_cannot_reach_is_told_from_one_that_they_can() {
        assert!(HostProcess::of(std::process::id()).may_be_copied());
        // No process has this number.
        assert!(!HostProcess::of(0x7fff_fff0).may_be_copied());
    }

    #[test]
    fn stretches_are_copied_both_ways_and_one_that_is_not_mapped_is_an_error() {
        let own = HostProcess::of(std::process::id());
        let from: Vec<u8> = (0..200u8).collect();
        let mut to = vec![0u8; 200];
        let at = to.as_mut_ptr() as usize;
        // More than one call takes, in reverse.
        let stretches: Vec<_> = (0..200)
            .map(|i| Stretch { here: at + 199 - i, there: from.as_ptr() as u64 + i as u64, length: 1 })
            .collect();
        // SAFETY: `to` is ours, and nobody else looks at it meanwhile.
        unsafe { own.copy(false, &stretches) }.unwrap();
        assert!(from.iter().rev().eq(&to));
        let back: Vec<_> = stretches
            .iter()
            .map(|s| Stretch {
                here: s.there as usize,
                there: at as u64 + s.there - from.as_ptr() as u64,
                ..*s
            })
            .collect();
        // SAFETY: as above.
        unsafe { own.copy(true, &back) }.unwrap();
        assert_eq!(from, to);
        let wrong = [stretches[0], Stretch { there: 8, ..stretches[1] }];
        // SAFETY: as above.
        assert_eq!(unsafe { own.copy(false, &wrong) }.unwrap_err().raw_os_error(), Some(14));
    }

    const CHILD: &str = "PUSHGATE_TEST_IS_READ";

    /// The process that the next test reads: this test alone, told so.
    #[test]
    #[ignore = "another test starts this in a process of its own"]
    fn is_read() {
        assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
        let words = vec![0x5a5a_5a5a_5a5a_5a5au64; 64].leak();
        let address = words.as_ptr() as u64;
        words[abi::PUSHGATE_LINK_ADDRESS as usize / 8] = address;
        allow(std::os::unix::process::parent_id());
        println!("\nat {address}");
        // Until the other end is closed.
        let _ = io::read_to_string(io::stdin());
        std::hint::black_box(words);
    }

    #[test]
    fn p7_another_process_is_read_until_it_ends() {
        use std::io::BufRead;
        use std::process::{Command, Stdio};
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process_memory::tests::is_read", "--ignored", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
        let address =
            lines.find_map(|l| l.unwrap().strip_prefix("at ")?.parse().ok()).expect("it says where");
        let pid = child.id();
        let process = HostProcess::of(pid);
        assert_eq!(probe(&process, address), abi::PUSHGATE_READS_YES);
        let mut word = 0u64;
        // SAFETY: the word is ours.
        let mut get = || unsafe { process.read(address, &raw mut word as usize, 8) };
        assert_eq!(get().unwrap(), 8);
        drop(child.stdin.take());
        lines.for_each(drop);
        child.wait().unwrap();
        assert_eq!(get().unwrap_err().raw_os_error(), Some(3), "nobody has that number now");
        assert_eq!(word, 0x5a5a_5a5a_5a5a_5a5a);
        assert_eq!(probe(&HostProcess::of(pid), address), abi::PUSHGATE_READS_UNKNOWN);
    }

    #[test]
    fn p8_a_process_that_took_the_number_of_one_that_ended_is_not_read() {
        let words = [7u64; 8];
        let mut word = 0u64;
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        let first = Process::of(gone.id());
        gone.wait().unwrap();
        // Our own number stands for the one that the kernel gave again: the read itself succeeds.
        let again = HostProcess { pid: std::process::id(), first: first.map_err(|_| Errno::SRCH) };
        // SAFETY: the word is ours.
        let n = unsafe { again.read(words.as_ptr() as u64, &raw mut word as usize, 8) };
        assert_eq!(n.unwrap_err().raw_os_error(), Some(Errno::SRCH.raw_os_error()));
        assert_eq!(word, 7, "the call was made");
    }

    #[test]
    fn a_probe_knows_a_segment_by_the_address_that_lies_in_it() {
        let own = std::process::id();
        let words = vec![0u64; 64].leak();
        let address = words.as_ptr() as u64;
        assert_eq!(probe(&HostProcess::of(own), address), abi::PUSHGATE_READS_ELSEWHERE);
        words[abi::PUSHGATE_LINK_ADDRESS as usize / 8] = address;
        assert_eq!(probe(&HostProcess::of(own), address), abi::PUSHGATE_READS_YES);
        assert_eq!(probe(&HostProcess::of(own), address + 8), abi::PUSHGATE_READS_ELSEWHERE);
        assert_eq!(probe(&HostProcess::of(own), 64), abi::PUSHGATE_READS_ELSEWHERE);
        assert_eq!(probe(&HostProcess::of(own), NOWHERE), abi::PUSHGATE_READS_ELSEWHERE);
        assert_eq!(probe(&HostProcess::of(0x7fff_fff0), address), abi::PUSHGATE_READS_UNKNOWN);
    }
}
