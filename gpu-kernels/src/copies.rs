//! Copies by engines of the device, for measuring: any two memories, timed points,
//! streams that wait for each other. On the CPU a copy is memcpy, done on return.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cuda::{CudaCopies, CudaPoint};
use crate::executor::{Executor, Result};

/// A queue of copies, which run in the order in which they were put in. Dropping it
/// waits for them.
pub struct Copies(Kind);

enum Kind {
    Cuda(CudaCopies),
    Cpu,
}

/// A place in a [`Copies`], between two copies.
pub struct Point(At);

enum At {
    Cuda(CudaPoint),
    Cpu(Instant),
}

impl Copies {
    /// A queue of the executor's device.
    pub fn new(executor: &Arc<dyn Executor>) -> Result<Self> {
        Ok(Self(match executor.as_cuda() {
            Some(cuda) => Kind::Cuda(CudaCopies::new(cuda)?),
            None => Kind::Cpu,
        }))
    }

    /// Copies `len` bytes between device memory, registered host memory (by its
    /// device address) and memory of other GPUs. Returns at once on a GPU.
    ///
    /// # Safety
    /// Both ranges must be valid for it, not overlap, and be left alone until a
    /// [`Point`] made later was seen passed or this queue was dropped.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        match &self.0 {
            // SAFETY: the caller's promise.
            Kind::Cuda(copies) => unsafe { copies.copy(dst, src, len) },
            Kind::Cpu => {
                // SAFETY: the caller's promise; on the CPU device addresses are addresses.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
                Ok(())
            }
        }
    }

    /// Marks a place: behind all copies so far.
    pub fn point(&self) -> Result<Point> {
        Ok(Point(match &self.0 {
            Kind::Cuda(copies) => At::Cuda(copies.point()?),
            Kind::Cpu => At::Cpu(Instant::now()),
        }))
    }

    /// Copies put in from now on wait for a point of another queue of this kind.
    pub fn wait_for(&self, point: &Point) -> Result<()> {
        match (&self.0, &point.0) {
            (Kind::Cuda(copies), At::Cuda(point)) => copies.wait_for(point),
            // Passed already.
            _ => Ok(()),
        }
    }
}

impl Point {
    /// Whether all copies before it are complete. Never blocks.
    pub fn passed(&self) -> Result<bool> {
        match &self.0 {
            At::Cuda(point) => point.passed(),
            At::Cpu(_) => Ok(true),
        }
    }

    /// By the device's clock, the time from `earlier` of the same queue to here; both
    /// were seen passed. Zero for points of two kinds of device.
    pub fn since(&self, earlier: &Point) -> Result<Duration> {
        match (&self.0, &earlier.0) {
            (At::Cuda(later), At::Cuda(earlier)) => later.since(earlier),
            (At::Cpu(later), At::Cpu(earlier)) => Ok(later.duration_since(*earlier)),
            _ => Ok(Duration::ZERO),
        }
    }
}
