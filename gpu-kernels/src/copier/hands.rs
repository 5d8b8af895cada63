//! What moves the bytes: a GPU's copy engines, or on the device `cpu` the kernel's copies between processes. And how a client hands
//! over memory of either device.
//!
//! P3 on a GPU. *What is pushed*: a kernel of the client wrote the bytes and then a flag in host memory, by a release of system
//! scope; the client saw the flag, and posted the copy. The GPU's copy engines read through the L2 that all SMs write to, so they
//! find the bytes. *Bytes before mark*: an event follows the copies in their stream; when the driver says that the event is over, the
//! copies are complete and host and kernels may read them (CUDA driver API, cuEventQuery). Only then the copier stores the mark, by a
//! release. *What is pulled* lies in the GPU's memory when the mark is seen, and running kernels read it from the L2: NCCL's kernels
//! read volatile or with an acquire once they have seen the flag that follows the mark. NCCL's own transports that copy between GPUs
//! by copy engines rely on the same: copy, event, then a flag for a running kernel.
//!
//! On the device `cpu` a copy is a system call of the copier's thread, complete on return.

use std::any::Any;
use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};

use super::places::{Checked, Place};
use super::protocol::Handed;
use crate::cuda::{Copy, CopyMark, CopyStream, CudaExecutor, Current, HandedOver};
use crate::error::Result;
use crate::executor::{Access, Executor, Registration};

/// The most copies that are handed to the device in one call.
pub(super) const GROUP: usize = 16;

/// Groups of a ring that are with the device at once: what it copies, and what it goes on with. Commands that arrive meanwhile make one
/// group, whose copies cost less time than copies by themselves (docs/copier.md).
const GROUPS: u64 = 3;

/// Device memory of the device `cpu` is handed over in pieces of this size: the process's address space as a grid.
const GRID: u64 = 1 << 32;

/// The allocation that an address of device memory lies in: where it begins, and its bytes.
pub(super) fn allocation(executor: &Arc<dyn Executor>, address: u64) -> Result<(u64, u64)> {
    match executor.as_cuda() {
        Some(cuda) => cuda.allocation(address),
        None => Ok((address / GRID * GRID, GRID)),
    }
}

/// How the allocation at `base` is handed to another process.
pub(super) fn hand_over(executor: &Arc<dyn Executor>, base: u64) -> Result<Handed> {
    Ok(match executor.as_cuda() {
        None => Handed::Address,
        Some(cuda) => match cuda.hand_over(base)? {
            HandedOver::Allocation(fd) => Handed::Allocation(fd),
            HandedOver::Ipc(handle) => Handed::Ipc(handle),
        },
    })
}

/// A device that copies for clients.
#[derive(Clone)]
pub(super) struct Hands(pub Arc<dyn Executor>);

/// A mapping of a client's host memory, with what lets the device see it.
struct HostMemory<M> {
    // Dropped before the memory.
    registration: Registration,
    _memory: M,
}

fn refused(e: impl std::fmt::Display) -> String {
    e.to_string()
}

impl Hands {
    fn cuda(&self) -> Option<&CudaExecutor> {
        self.0.as_cuda()
    }

    /// Makes the device's context current on this thread, so that the calls of [`Line`] need not.
    pub fn enter(&self) -> Result<Option<Current<'_>>> {
        self.cuda().map(|cuda| cuda.context().current()).transpose()
    }

    fn register<M: Send + Sync + 'static>(
        &self,
        memory: M,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> std::result::Result<Place, String> {
        let registration = self.0.register(ptr, bytes, access, false).map_err(refused)?;
        let address = match self.cuda() {
            Some(_) => registration.device_addr(),
            None => ptr.as_ptr() as u64,
        };
        let keep = Arc::new(HostMemory { registration, _memory: memory });
        debug_assert_eq!(keep.registration.len(), bytes);
        Ok(Place { address, bytes: bytes as u64, writable: access == Access::ReadWrite, keep })
    }

    /// Maps the memory with a client's rings, and lets the device see it: the place, and the mapping.
    pub fn rings(&self, fd: OwnedFd, bytes: u64) -> std::result::Result<(Place, Arc<SharedMemory>), String> {
        let bytes = usize::try_from(bytes).map_err(refused)?;
        let memory = Arc::new(SharedMemory::from_fd(fd, bytes).map_err(refused)?);
        let place = self.register(memory.clone(), memory.as_ptr(), memory.len(), Access::ReadWrite)?;
        Ok((place, memory))
    }

    /// Takes a client's host memory. No byte of the mapping is touched here: the device has its pages, and on the device `cpu` the
    /// kernel does. So a hole that the client punches there can't stop the copier.
    pub fn host(&self, fd: OwnedFd, bytes: u64, writable: bool) -> std::result::Result<Place, String> {
        let bytes = usize::try_from(bytes).map_err(refused)?;
        if writable {
            let memory = SharedMemory::from_fd_untouched(fd, bytes).map_err(refused)?;
            let (ptr, len) = (memory.as_ptr(), memory.len());
            return self.register(memory, ptr, len, Access::ReadWrite);
        }
        let memory = ReadOnlyMemory::from_fd(fd, bytes).map_err(refused)?;
        let (ptr, len) = (memory.as_ptr(), memory.len());
        self.register(memory, ptr, len, Access::ReadOnly)
    }

    /// Takes a client's device memory.
    pub fn device(&self, address: u64, bytes: u64, how: Handed) -> std::result::Result<Place, String> {
        let place =
            |address, keep: Arc<dyn Any + Send + Sync>| Place { address, bytes, writable: true, keep };
        match (how, self.cuda()) {
            // The kernel checks each copy against what the client's process has there.
            (Handed::Address, None) => Ok(place(address, Arc::new(()))),
            (Handed::Allocation(fd), Some(cuda)) => {
                let imported = cuda.import(HandedOver::Allocation(fd), bytes).map_err(refused)?;
                Ok(place(imported.address(), Arc::new(imported)))
            }
            (Handed::Ipc(handle), Some(cuda)) => {
                let imported = cuda.import(HandedOver::Ipc(handle), bytes).map_err(refused)?;
                Ok(place(imported.address(), Arc::new(imported)))
            }
            _ => Err("the copier is for another kind of device".into()),
        }
    }

    /// Makes the queue of copies of a ring for the client process `pid`.
    pub fn line(&self, pid: u32) -> Result<Line> {
        let copies = match self.cuda() {
            None => Copies::Cpu { pid },
            Some(cuda) => {
                let stream = Arc::new(cuda.copy_stream()?);
                let marks: Vec<_> = (0..GROUPS).map(|_| stream.spare_mark()).collect::<Result<_>>()?;
                Copies::Cuda { stream, marks }
            }
        };
        Ok(Line { copies, ends: [0; GROUPS as usize], handed: 0, complete: 0 })
    }
}

enum Copies {
    /// A stream, and an event for each group that may be with the device.
    Cuda {
        stream: Arc<CopyStream>,
        marks: Vec<CopyMark>,
    },
    Cpu {
        pid: u32,
    },
}

/// The copies of one ring, handed to the device in groups. A group is complete after those before it.
pub(super) struct Line {
    copies: Copies,
    /// How many commands of the ring are complete when a group is. Groups use the places in turn.
    ends: [u64; GROUPS as usize],
    /// Groups that were handed to the device, and those that were seen complete.
    handed: u64,
    complete: u64,
}

impl Line {
    /// Whether another group can be handed over.
    pub fn has_room(&self) -> bool {
        self.handed - self.complete < GROUPS
    }

    /// Whether a group is with the device.
    pub fn is_busy(&self) -> bool {
        self.handed != self.complete
    }

    /// Hands a group of copies to the device, at most [`GROUP`]. When they are complete, `end` commands of the ring are. Only where there
    /// [is room](Line::has_room).
    ///
    /// # Safety
    /// The copies were checked against memories that stay until [`Line::advance`] has returned `end` or the line is finished.
    pub unsafe fn copy(&mut self, copies: &[Checked], end: u64) -> std::result::Result<(), Stopped> {
        let place = (self.handed % GROUPS) as usize;
        match &self.copies {
            Copies::Cuda { stream, marks } => {
                let mut of = [Copy { dst: 0, src: 0, length: 0, out: false }; GROUP];
                let mut count = 0;
                for c in copies.iter().filter(|c| c.length > 0) {
                    let (dst, src) = if c.out { (c.host, c.device) } else { (c.device, c.host) };
                    of[count] = Copy { dst, src, length: c.length as usize, out: c.out };
                    count += 1;
                }
                // SAFETY: the caller's promise.
                unsafe { stream.group(&of[..count], &marks[place]) }
                    .map_err(|e| Stopped::Device(e.to_string()))?;
            }
            Copies::Cpu { pid } => {
                for c in copies {
                    // SAFETY: the caller's promise.
                    unsafe { copy_between(*pid, c) }.map_err(|e| {
                        Stopped::Client(format!(
                            "{} bytes at {:#x} of process {pid}: {e}",
                            c.length, c.device
                        ))
                    })?;
                }
            }
        }
        self.ends[place] = end;
        self.handed += 1;
        Ok(())
    }

    /// How many commands of the ring are complete, if that is news. An error is the device's.
    pub fn advance(&mut self) -> Result<Option<u64>> {
        let before = self.complete;
        while self.is_busy() {
            let place = (self.complete % GROUPS) as usize;
            if let Copies::Cuda { marks, .. } = &self.copies
                && !marks[place].passed()?
            {
                break;
            }
            self.complete += 1;
        }
        Ok((self.complete != before).then(|| self.ends[((self.complete - 1) % GROUPS) as usize]))
    }

    /// What waits for the line's copies, from any thread.
    pub fn fence(&self) -> Fence {
        match &self.copies {
            Copies::Cuda { stream, .. } => Fence(Some(stream.clone())),
            Copies::Cpu { .. } => Fence(None),
        }
    }
}

/// Waits for the copies of a [`Line`].
pub(super) struct Fence(Option<Arc<CopyStream>>);

impl Fence {
    /// Waits until all copies that were handed over are complete.
    pub fn wait(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |stream| stream.finish())
    }
}

/// Why copies were not made.
#[derive(Debug)]
pub(super) enum Stopped {
    /// The device has failed, for all clients.
    Device(String),
    /// The client's memory is not what the client says.
    Client(String),
}

#[repr(C)]
struct IoVec {
    base: usize,
    length: usize,
}

// std links the C library anyway; rustix does not have these.
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

/// Copies between memory of process `pid` and memory that is mapped here. The kernel touches both, so memory that is not there is an
/// error.
///
/// # Safety
/// `host` is a stretch of a mapping that nobody has a Rust reference to.
unsafe fn copy_between(pid: u32, copy: &Checked) -> io::Result<()> {
    let Checked { out, mut device, mut host, mut length } = *copy;
    while length > 0 {
        let local = IoVec { base: host as usize, length: length as usize };
        let remote = IoVec { base: device as usize, length: length as usize };
        let pid = pid as c_int;
        let call = if out { process_vm_readv } else { process_vm_writev };
        // SAFETY: one vector each; the kernel checks both ranges; the caller vouches for the local one.
        let moved = unsafe { call(pid, &local, 1, &remote, 1, 0) };
        let moved = match moved {
            1.. => moved as u64,
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => return Err(io::Error::last_os_error()),
        };
        (device, host, length) = (device + moved, host + moved, length - moved);
    }
    Ok(())
}
