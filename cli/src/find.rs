//! Finds the flight recorders of this host's processes, by what `/proc` shows of their descriptors.
//!
//! A recorder is a memfd of the process that runs the engine. It is opened through `/proc/PID/fd`, which the kernel allows
//! root and the process's own user, whether the process runs, hangs or is stopped. What is found there was written by that
//! process and is not trusted: the file must be a sealed memfd of a bounded size, and every field is checked.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_engine::recorder::report::Process;
use pushgate_engine::recorder::{JOB, MOST_BYTES, Memory, NAME, ReadError, read};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

/// The most bytes of one process's recorders that are read: 16,000 queue pairs.
const MOST: u64 = 64 << 20;

/// A process with what it shows of engines and jobs.
pub struct Found {
    pub process: Process,
    /// The jobs that it is one of.
    pub jobs: Vec<String>,
    /// What was there and could not be read, a sentence each.
    pub unread: Vec<String>,
}

/// All processes of this host that can be looked at and have an engine or are of a job.
pub fn all() -> io::Result<Vec<Found>> {
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // One that is another user's, or has ended meanwhile, is passed over.
    let mut found: Vec<Found> = pids.filter_map(|pid| one(pid).ok()).collect();
    found.retain(|found| !found.process.engines.is_empty() || !found.jobs.is_empty());
    found.sort_by_key(|found| found.process.pid);
    Ok(found)
}

/// Reads what one process shows.
pub fn one(pid: u32) -> io::Result<Found> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let own = own_number(&proc).unwrap_or(pid);
    let (mut jobs, mut unread, mut left) = (Vec::new(), Vec::new(), MOST);
    let mut engines: BTreeMap<u64, Vec<Memory>> = BTreeMap::new();
    for entry in fs::read_dir(proc.join("fd"))? {
        let Ok(path) = entry.map(|entry| entry.path()) else { continue };
        // A descriptor that was closed meanwhile.
        let Ok(target) = fs::read_link(&path) else { continue };
        let Some(name) = memfd(target.as_os_str()) else { continue };
        if let Some(job) = name.strip_prefix(JOB.as_bytes()) {
            jobs.push(Foreign::word(String::from_utf8_lossy(job)).to_string());
        } else if name == NAME.as_bytes() {
            match open(&path, &mut left) {
                // A child of `fork` has its parent's descriptors.
                Ok(Some(memory)) if memory.pid() != own => {}
                Ok(None) => {}
                Ok(Some(memory)) => engines.entry(memory.engine()).or_default().push(memory),
                Err(e) => unread.push(format!("a recorder of process {pid} can't be read: {e}")),
            }
        }
    }
    jobs.sort();
    jobs.dedup();
    let engines = engines.into_values().filter_map(|memories| {
        let mut engine = read(&memories)?;
        engine.state = state(&proc, engine.thread);
        if let Some(copier) = &mut engine.copier {
            copier.state = state(&seen_by(&proc, copier.pid), None);
        }
        if let Some(program) = &mut engine.program {
            let proc = seen_by(&proc, program.pid);
            program.state = state(&proc, None);
            program.name = program.state.map(|_| name(&proc));
        }
        Some(engine)
    });
    let process = Process { pid, name: name(&proc), engines: engines.collect() };
    Ok(Found { process, jobs, unread })
}

/// The name of a memfd whose link in `/proc` this is.
fn memfd(link: &OsStr) -> Option<&[u8]> {
    link.as_bytes().strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")
}

/// Opens a recorder's memory, if it has no more bytes than are `left` for this process. A process may have given another file
/// such a name: that is refused, and not waited for. `None` if the process is still setting the recorder up, or has closed it already.
fn open(path: &Path, left: &mut u64) -> Result<Option<Memory>, String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd: OwnedFd = match openat(CWD, path, flags, Mode::empty()) {
        // The process has closed it, or has ended, since its name was read.
        Err(Errno::NOENT | Errno::SRCH) => return Ok(None),
        opened => opened.map_err(|e| e.to_string())?,
    };
    let stat = fstat(&fd).map_err(|e| e.to_string())?;
    let (bytes, most) = (u64::try_from(stat.st_size).unwrap_or(0), MOST_BYTES.min(*left));
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if regular && bytes == 0 {
        return Ok(None);
    }
    if !regular || bytes > most {
        return Err(format!("it has {bytes} bytes, expected 1 to {most} of a memfd"));
    }
    *left -= bytes;
    let memory = ReadOnlyMemory::from_fd(fd, bytes as usize).map_err(|e| e.to_string())?;
    match Memory::open(&Arc::new(memory)) {
        Ok(memory) => Ok(Some(memory)),
        // The magic is written last.
        Err(ReadError::Magic(0)) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// The process's number in its own PID namespace.
fn own_number(proc: &Path) -> Option<u32> {
    let status = fs::read_to_string(proc.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// The folder of a process that the process of `proc` calls `pid`: by way of its own /proc, where its numbers hold.
fn seen_by(proc: &Path, pid: u32) -> PathBuf {
    proc.join(format!("root/proc/{pid}"))
}

fn name(proc: &Path) -> String {
    let comm = fs::read_to_string(proc.join("comm")).unwrap_or_default();
    Foreign::word(comm.trim_end()).to_string()
}

/// The state of a thread, or of the process's first thread.
fn state(proc: &Path, thread: Option<u32>) -> Option<char> {
    let of = |path: PathBuf| {
        let stat = fs::read(path).ok()?;
        // The name stands in parentheses and may hold any of them.
        let behind = stat.rsplit(|b| *b == b')').next()?;
        behind.iter().find(|b| b.is_ascii_alphabetic()).map(|b| *b as char)
    };
    let thread = thread.and_then(|thread| of(proc.join(format!("task/{thread}/stat"))));
    thread.or_else(|| of(proc.join("stat")))
}

/// Why a process can't be looked at, with the remedy.
pub fn refused(pid: u32, e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::NotFound => format!("there is no process {pid}"),
        ErrorKind::PermissionDenied => {
            format!("process {pid} is another user's: run `pushgate inspect` as that user or as root")
        }
        _ => format!("process {pid} can't be looked at: {e}"),
    }
}
