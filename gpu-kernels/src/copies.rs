//! Copies by the device's copy engines, for measuring: between any two memories, with timed points,
//! on streams that can wait for each other. On the CPU a copy is a memcpy, complete on return.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cuda::{CopyMark, CopyStream};
use crate::error::Result;
use crate::executor::Executor;

/// A queue of copies, which run in the order in which they were added. Dropping it waits for all of
/// them.
pub struct Copies(Kind);

enum Kind {
    Cuda(CopyStream),
    Cpu,
}

/// A point in a [`Copies`] queue, between two copies.
pub struct Point(At);

enum At {
    Cuda(CopyMark),
    Cpu(Instant),
}

impl Copies {
    /// Makes a queue on the executor's device.
    pub fn new(executor: &Arc<dyn Executor>) -> Result<Self> {
        Ok(Self(match executor.as_cuda() {
            Some(cuda) => Kind::Cuda(CopyStream::new(cuda.context())?),
            None => Kind::Cpu,
        }))
    }

    /// Makes a queue for what other libraries launch on its stream ([`Copies::raw`]), with points between their
    /// kernels. The stream has the priority of programs' own streams.
    pub fn beside_kernels(executor: &Arc<dyn Executor>) -> Result<Self> {
        Ok(Self(match executor.as_cuda() {
            Some(cuda) => Kind::Cuda(CopyStream::beside_kernels(cuda.context())?),
            None => Kind::Cpu,
        }))
    }

    /// The queue's `CUstream`, for libraries that take one; `None` on the CPU. The handle is valid as long as the queue
    /// lives.
    pub fn raw(&self) -> Option<u64> {
        match &self.0 {
            Kind::Cuda(copies) => Some(copies.raw()),
            Kind::Cpu => None,
        }
    }

    /// Copies `len` bytes between device memory, registered host memory (by its device address) and
    /// memory of other GPUs. Returns at once on a GPU.
    ///
    /// # Safety
    /// Both ranges must be valid for the copy, must not overlap, and must be left alone until a
    /// [`Point`] made later has been passed or this queue has been dropped.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        match &self.0 {
            // SAFETY: this function's caller promises what the inner `copy` requires.
            Kind::Cuda(copies) => unsafe { copies.copy(dst, src, len) },
            Kind::Cpu => {
                // SAFETY: the caller promises that both ranges are valid; on the CPU, device
                // addresses are host addresses.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
                Ok(())
            }
        }
    }

    /// Marks a point after all copies added so far.
    pub fn point(&self) -> Result<Point> {
        Ok(Point(match &self.0 {
            Kind::Cuda(copies) => At::Cuda(copies.mark()?),
            Kind::Cpu => At::Cpu(Instant::now()),
        }))
    }

    /// Makes copies added from now on wait for a point of another queue on a device of this kind.
    pub fn wait_for(&self, point: &Point) -> Result<()> {
        match (&self.0, &point.0) {
            (Kind::Cuda(copies), At::Cuda(mark)) => copies.wait_for(mark),
            // The copies before a point on the CPU are complete already.
            _ => Ok(()),
        }
    }
}

impl Point {
    /// Whether all copies before this point are complete. Never blocks.
    pub fn passed(&self) -> Result<bool> {
        match &self.0 {
            At::Cuda(mark) => mark.passed(),
            At::Cpu(_) => Ok(true),
        }
    }

    /// The time from `earlier`, a point of the same queue, to this point, by the device's clock.
    /// Both points must have been seen passed. Zero for points of two different kinds of device.
    pub fn since(&self, earlier: &Point) -> Result<Duration> {
        match (&self.0, &earlier.0) {
            (At::Cuda(later), At::Cuda(earlier)) => later.since(earlier),
            (At::Cpu(later), At::Cpu(earlier)) => Ok(later.duration_since(*earlier)),
            _ => Ok(Duration::ZERO),
        }
    }
}
