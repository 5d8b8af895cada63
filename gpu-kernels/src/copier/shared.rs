//! What the handles of a copier share: the conversation with it, its memory, and what is registered there.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use pushgate_driver_shim::bell::Ringer;
use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;

use super::layout::{ASIDE, Layout, State};
use super::protocol::{self, Answer, Request};
use crate::executor::Executor;
use crate::lock::lock;

/// Bytes of each direction's own memory, through which short payloads pass.
pub(super) const ASIDE_BYTES: usize = 1 << 20;
/// Why no copier can copy for this process: a sentence.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub(super) String);

/// Why a copier copies no more.
#[derive(Clone, Debug)]
pub struct Lost {
    /// A sentence that names the copier.
    pub reason: String,
    /// The copier's process is gone: nothing of it reads or writes memory any more.
    pub ended: bool,
}

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From device memory to host memory.
    Push,
    /// From host memory to device memory.
    Pull,
}

impl Direction {
    /// The ring of the direction.
    pub(super) fn ring(self) -> usize {
        match self {
            Direction::Push => 0,
            Direction::Pull => 1,
        }
    }
}

/// An allocation of device memory that the copier has.
pub(super) struct Allocation {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
    /// Registrations that use it.
    pub(super) count: usize,
}

/// Host memory that the copier has.
pub(super) struct Host {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
}

/// What is registered, sorted by address.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) devices: Vec<Allocation>,
    pub(super) hosts: Vec<Host>,
}

impl Tables {
    /// The key and offset of `length` bytes of host memory.
    pub fn host(&self, address: u64, length: u64) -> Option<(u32, u64)> {
        let next = self.hosts.partition_point(|host| host.address <= address);
        // A memory may be registered twice, as one connection's window and the next one's.
        let host = self.hosts[..next].last()?;
        let offset = address - host.address;
        (offset.checked_add(length)? <= host.bytes).then_some((host.key, offset))
    }

    /// The key and offset of device memory, and how many of `length` bytes lie in its allocation.
    pub fn device(&self, address: u64, length: u64) -> Option<(u32, u64, u64)> {
        let next = self.devices.partition_point(|device| device.base <= address);
        let device = self.devices[..next].last()?;
        let offset = address - device.base;
        let left = device.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        Some((device.key, offset, length.min(left)))
    }

    /// Over how many allocations `length` bytes of device memory extend, at least one.
    pub fn pieces(&self, address: u64, length: u64) -> Option<u64> {
        let (mut at, mut pieces) = (0, 0);
        loop {
            at += self.device(address.checked_add(at)?, length - at)?.2;
            pieces += 1;
            if at >= length {
                return Some(pieces);
            }
        }
    }

    pub(super) fn allocation(&mut self, base: u64) -> Option<(usize, &mut Allocation)> {
        let at = self.devices.binary_search_by_key(&base, |device| device.base).ok()?;
        Some((at, &mut self.devices[at]))
    }
}

/// What the handles of a copier share.
pub(super) struct Shared {
    pub(super) owner: Owner,
    pub memory: SharedMemory,
    pub ringer: Ringer,
    pub(super) stream: Mutex<PeerStream>,
    pub(super) tables: Mutex<Tables>,
    pub lost: OnceLock<Lost>,
    pub(super) name: String,
    /// The copier's process, if it has a number here.
    pub pid: Option<u32>,
    pub(super) executor: Arc<dyn Executor>,
    pub(super) stop: EventFd,
}

impl Shared {
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }

    /// A direction's own memory.
    pub fn aside(&self, direction: Direction) -> (usize, usize) {
        let begin = self.memory.as_ptr().as_ptr() as usize + ASIDE;
        (begin + ASIDE_BYTES * usize::from(direction == Direction::Pull), ASIDE_BYTES)
    }

    pub(super) fn ask(&self, request: &Request) -> Result<(u64, Vec<OwnedFd>), Unavailable> {
        self.owner.check().map_err(|e| Unavailable(e.to_string()))?;
        let stream = lock(&self.stream);
        let broken = |e: io::Error| match self.lost.get() {
            Some(lost) => Unavailable(lost.reason.clone()),
            None => Unavailable(format!("{} does not answer: {e}", self.name)),
        };
        conversation(&stream, request)
            .map_err(broken)?
            .map_err(|why| Unavailable(format!("{}: {why}", self.name)))
    }

    pub(super) fn lose(&self, ended: bool) {
        let reason = match Layout(&self.memory).state() {
            (State::Stopped, why) => format!("{} copies no more: {why}", self.name),
            (State::Running, _) => format!("{} has ended: it was killed, or has crashed", self.name),
        };
        let _ = self.lost.set(Lost { reason, ended });
    }
}

pub(super) fn conversation(stream: &UnixStream, request: &Request) -> io::Result<Answer> {
    protocol::ask(stream, request)?;
    protocol::answered(stream)
}
