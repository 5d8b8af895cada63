//! A client's handle of a copier: joining it, registering memory with it, and noticing its end.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pushgate_driver_shim::bell::Ringer;
use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use super::hands;
use super::layout::{Layout, State};
use super::protocol::{OPENS, PATIENCE, Request};
use super::queue::CopyQueue;
use super::shared::{ASIDE_BYTES, Allocation, Direction, Host, Lost, Shared, Unavailable, conversation};
use crate::executor::Executor;
use crate::lock::lock;

/// How often the watch looks whether the copier says that it copies no more.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long the process of a copier whose socket has ended may take to be gone.
const GONE: Duration = Duration::from_secs(1);

/// A client of a copier. May be shared by threads. Dropping it leaves the copier, which ends when nobody needs it.
pub struct Copier {
    shared: Arc<Shared>,
    watch: Option<JoinHandle<()>>,
}

impl Copier {
    /// Joins the copier at the other end of `stream`, for the device of `executor`. Fails if the copier can't copy for it.
    pub(super) fn over(stream: PeerStream, executor: &Arc<dyn Executor>) -> Result<Self, Unavailable> {
        let failed = |what: &'static str| move |e: &dyn fmt::Display| Unavailable(format!("{what}: {e}"));
        let io = |e: io::Error| failed("the copier's socket")(&e);
        // The copier may still be opening the GPU. If its process ends, so does the stream.
        stream.set_read_timeout(Some(OPENS)).map_err(io)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(io)?;
        let pid = socket_peercred(&stream).ok().map(|peer| peer.pid.as_raw_nonzero().get() as u32);
        // While the socket is open its process has not ended, so the number is that process's.
        let process = pid.and_then(|pid| Process::of(pid).ok());
        let bytes = Layout::bytes(2 * ASIDE_BYTES);
        let memory = SharedMemory::builder("pushgate-copies", bytes)
            .huge_pages(HugePages::Never)
            .create()
            .map_err(|e| failed("memory for the copier's rings")(&e))?;
        let handed = memory.fd().try_clone_to_owned().map_err(io)?;
        let hello = Request::Hello { bytes: bytes as u64, memory: handed };
        let (_, fds) = conversation(&stream, &hello).map_err(io)?.map_err(Unavailable)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
        let ringer =
            fds.into_iter().next().ok_or_else(|| Unavailable("the copier hands over no bell".into()))?;
        let at = pid.map_or(String::new(), |pid| format!(" (process {pid})"));
        let shared = Arc::new(Shared {
            owner: Owner::here(),
            memory,
            ringer: Ringer::from_fd(ringer).map_err(io)?,
            stream: Mutex::new(stream),
            tables: Mutex::default(),
            lost: OnceLock::new(),
            name: format!("the copier of {}{at}", executor.describe()),
            pid,
            executor: executor.clone(),
            stop: EventFd::new().map_err(io)?,
        });
        // The memory that both share is the client's first host memory.
        let begin = shared.memory.as_ptr().as_ptr() as u64;
        shared.tables().hosts.push(Host { address: begin, bytes: bytes as u64, key: 0 });
        let watched = lock(&shared.stream).try_clone().map_err(io)?;
        let seen = shared.clone();
        let watch = thread::Builder::new()
            .name("pushgate-copier".to_owned())
            .spawn(move || watch(&seen, &watched, process.as_deref()))
            .map_err(io)?;
        Ok(Copier { shared, watch: Some(watch) })
    }

    /// The copier's process, if it has a number here.
    pub fn pid(&self) -> Option<u32> {
        self.shared.pid
    }

    /// Why no copy completes any more, if that is so. Noticed within half a second. Makes no system call.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.shared.lost.get()
    }

    /// The queue of a direction. Use one at a time: drop it, with all of its copies complete, before the next call.
    pub fn queue(&self, direction: Direction) -> CopyQueue {
        CopyQueue::new(self.shared.clone(), direction)
    }

    /// Registers host memory for copies: `memory` is mapped at `address` in this process, and is a memfd. `writable`: copies may go
    /// there; then the memory must not be sealed against writers yet.
    pub fn register_host(
        &self,
        address: usize,
        bytes: usize,
        memory: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<HostPlace, Unavailable> {
        let memory = memory.try_clone_to_owned().map_err(|e| Unavailable(format!("a descriptor: {e}")))?;
        let (key, _) = self.shared.ask(&Request::Host { bytes: bytes as u64, writable, memory })?;
        let (address, bytes, key) = (address as u64, bytes as u64, key as u32);
        let mut tables = self.shared.tables();
        let at = tables.hosts.partition_point(|host| host.address < address);
        tables.hosts.insert(at, Host { address, bytes, key });
        drop(tables);
        Ok(HostPlace { shared: self.shared.clone(), key })
    }

    /// Registers `bytes` of device memory at `address`. The copier gets the allocations that they lie in, each once.
    ///
    /// The memory may be freed once the value is dropped.
    pub fn register_device(&self, address: u64, bytes: u64) -> Result<DeviceMemory, Unavailable> {
        let shared = &self.shared;
        let mut held = DeviceMemory { shared: shared.clone(), bases: Vec::new() };
        let end = address.saturating_add(bytes.max(1));
        let mut at = address;
        while at < end {
            let (base, length) =
                hands::allocation(&shared.executor, at).map_err(|e| Unavailable(e.to_string()))?;
            let known = shared.tables().allocation(base).map(|(_, found)| found.count += 1).is_some();
            if !known {
                let how = hands::hand_over(&shared.executor, base).map_err(|e| Unavailable(e.to_string()))?;
                let (key, _) = shared.ask(&Request::Device { address: base, bytes: length, how })?;
                let mut tables = shared.tables();
                let key = key as u32;
                match tables.allocation(base) {
                    // Another thread was faster.
                    Some((_, found)) => {
                        found.count += 1;
                        drop(tables);
                        let _ = shared.ask(&Request::Forget { device: true, key });
                    }
                    None => {
                        let place = tables.devices.partition_point(|device| device.base < base);
                        tables.devices.insert(place, Allocation { base, bytes: length, key, count: 1 });
                    }
                }
            }
            held.bases.push(base);
            at = base.saturating_add(length.max(1));
        }
        Ok(held)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if !self.shared.owner.is_here() {
            std::mem::forget(self.watch.take());
            return;
        }
        self.shared.stop.ring();
        let _ = self.watch.take().map(JoinHandle::join);
        let _ = lock(&self.shared.stream).shutdown(std::net::Shutdown::Both);
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({}, lost: {:?})", self.shared.name, self.lost())
    }
}

/// Host memory that a copier has; forgotten there on drop.
pub struct HostPlace {
    shared: Arc<Shared>,
    key: u32,
}

impl Drop for HostPlace {
    fn drop(&mut self) {
        if !self.shared.owner.is_here() {
            return;
        }
        self.shared.tables().hosts.retain(|host| host.key != self.key);
        // A copier that is gone has forgotten it.
        let _ = self.shared.ask(&Request::Forget { device: false, key: self.key });
    }
}

/// Device memory that a copier has; its allocations are forgotten there when nothing else needs them.
pub struct DeviceMemory {
    shared: Arc<Shared>,
    bases: Vec<u64>,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.shared.owner.is_here() {
            return;
        }
        for base in &self.bases {
            let mut tables = self.shared.tables();
            let Some((at, found)) = tables.allocation(*base) else { continue };
            found.count -= 1;
            if found.count == 0 {
                let key = tables.devices.remove(at).key;
                drop(tables);
                let _ = self.shared.ask(&Request::Forget { device: true, key });
            }
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory(allocations at {:x?})", self.bases)
    }
}

/// Waits for the copier's end, on a thread of its own.
fn watch(shared: &Shared, stream: &UnixStream, process: Option<&Process>) {
    let mut gone_since = None;
    loop {
        let mut fds = vec![PollFd::new(&shared.stop, PollFlags::IN)];
        if gone_since.is_none() {
            fds.push(PollFd::new(stream, PollFlags::RDHUP));
        }
        if let Some(process) = process {
            fds.push(PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN));
        }
        if let Err(e) = poll(&mut fds, Some(&LOOK))
            && e != rustix::io::Errno::INTR
        {
            tracing::warn!("the end of {} can't be seen: {e}", shared.name);
            return;
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        let hung_up = gone_since.is_none() && !fds[1].revents().is_empty();
        let ended = process.is_some_and(Process::has_ended);
        if hung_up {
            gone_since = Some(std::time::Instant::now());
        }
        let waited = gone_since.map_or(Duration::ZERO, |since| since.elapsed());
        if ended || (process.is_none() && waited > GONE) {
            return shared.lose(true);
        }
        if Layout(&shared.memory).state().0 == State::Stopped || waited > GONE {
            return shared.lose(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shared::Tables;
    use super::*;

    #[test]
    fn a_stretch_is_found_in_the_memory_that_holds_it_and_cut_where_its_allocation_ends() {
        let device = |base, bytes, key| Allocation { base, bytes, key, count: 1 };
        let host = |address, bytes, key| Host { address, bytes, key };
        let tables = Tables {
            devices: vec![device(0x1000, 0x100, 4), device(0x1100, 0x100, 2), device(0x2000, 0x10, 7)],
            hosts: vec![host(0x5000, 0x100, 0), host(0x6000, 0x80, 9)],
        };
        assert_eq!(tables.device(0x1010, 8), Some((4, 0x10, 8)));
        assert_eq!(tables.device(0x10f8, 0x10), Some((4, 0xf8, 8)));
        assert_eq!([0xfff, 0x1200, 0x2010].map(|at| tables.device(at, 1)), [None; 3]);
        assert_eq!(tables.pieces(0x1080, 0x100), Some(2));
        assert_eq!(tables.pieces(0x1000, 0x100), Some(1));
        assert_eq!(tables.pieces(0x1000, 0), Some(1));
        assert_eq!([tables.pieces(0x1080, 0x200), tables.pieces(0x2000, 0x11)], [None; 2]);
        assert_eq!(tables.host(0x6010, 0x70), Some((9, 0x10)));
        assert_eq!([tables.host(0x6010, 0x71), tables.host(0x4fff, 1), tables.host(0x5101, 1)], [None; 3]);
    }
}
