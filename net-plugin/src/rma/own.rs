//! Operations of a rank on its own memory: no queue pair takes part.
//!
//! Copies to and from GPU memory are made in a queue of their own, so that a long one holds up nothing that comes from other ranks.
//! All stores to signals in GPU memory go through one queue ([`Inward`]), so that two additions never overwrite each other. An addition
//! that follows one of this rank's own copies is given to that queue when the copy is complete.

use pushgate_gpu_kernels::OrderedCopies;

use super::landing::{Addition, Inward, Landing, Landings, WORD};
use super::memory::{Signal, Stretch};
use super::requests::{Handle, Requests};
use crate::error::{Code, Failure, Result};

/// What this rank does to its own memory.
pub struct Own {
    /// `None` without a GPU.
    copies: Option<OrderedCopies>,
    landings: Landings,
}

fn failed(e: pushgate_gpu_kernels::DeviceError) -> Failure {
    Failure::new(Code::System, format!("copying within the GPU's memory: {e}"))
}

impl Own {
    pub fn new(copies: Option<OrderedCopies>) -> Self {
        Own { copies, landings: Landings::default() }
    }

    /// Copies bytes, then adds to a signal. The request is done when the source may be used again.
    ///
    /// # Safety
    /// The memories stay valid until they are deregistered.
    pub unsafe fn put(
        &mut self,
        request: Handle,
        (from, to, bytes): (Option<Stretch<'_>>, Option<Stretch<'_>>, u64),
        signal: Option<Signal<'_>>,
    ) -> Result<()> {
        let mut landing = Landing { done: Some(request), ..Landing::default() };
        if let (Some(from), Some(to)) = (from, to) {
            // SAFETY: the caller's promise.
            landing.mark = unsafe { self.copy(from, to, bytes)? };
        }
        if let Some(Signal { at, value }) = signal {
            let address = at.memory.signal(at.offset).map_err(|why| Failure::new(Code::Usage, why))?;
            landing.adds = Some(Addition { memory: at.memory.clone(), address, value });
        }
        self.landings.push(landing);
        Ok(())
    }

    /// Copies bytes. Returns the mark after the copy, 0 if the copy is complete.
    ///
    /// # Safety
    /// As [`Own::put`].
    unsafe fn copy(&mut self, from: Stretch<'_>, to: Stretch<'_>, bytes: u64) -> Result<u64> {
        let source = from.memory.stretch(from.offset, bytes)?;
        let target = to.memory.stretch(to.offset, bytes)?;
        if bytes == 0 {
            return Ok(0);
        }
        let length = bytes as usize;
        if !from.memory.cuda && !to.memory.cuda {
            // The stretches overlap where a rank puts into the memory that it puts out of.
            // SAFETY: the caller's promise; both stretches lie in their memories.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, length) };
            return Ok(0);
        }
        let text = "GPU memory, but there is no GPU";
        let copies = self.copies.as_mut().ok_or_else(|| Failure::new(Code::Internal, text))?;
        let added = match (from.memory.cuda, to.memory.cuda) {
            // SAFETY: the caller's promise; both stretches lie in their memories.
            (true, true) => unsafe { copies.copy_within(target as u64, source as u64, length) },
            // SAFETY: as above. NCCL's host memory may be unknown to the driver, which then copies before the call returns.
            (true, false) => unsafe { copies.copy_out(target as u64, source as u64, length) },
            (false, _) if bytes == WORD && target.is_multiple_of(length) => {
                // SAFETY: as above. A value that a kernel puts comes out of memory that the GPU does not see.
                let value = unsafe { (source as *const u64).read_unaligned() };
                // SAFETY: as above, and aligned.
                unsafe { copies.store(target as u64, value) }
            }
            // SAFETY: as above.
            (false, _) => unsafe { copies.copy_in(target as u64, source as *const u8, length) },
        };
        added.map_err(failed)?;
        copies.mark().map_err(failed)
    }

    /// Does what follows the copies that are complete.
    pub fn advance(&mut self, inward: &mut Inward, requests: &mut Requests) -> Result<()> {
        let passed = match &mut self.copies {
            Some(copies) => copies.look().map_err(failed)?,
            None => 0,
        };
        if self.landings.is_empty() {
            return Ok(());
        }
        let mut added = Ok(());
        self.landings.settle(passed, requests, |addition| {
            if added.is_ok() {
                // SAFETY: `Memory::signal` checked the word; deregistration waits for these copies first.
                added = unsafe { inward.add(&addition.memory, addition.address, addition.value) };
            }
        });
        added
    }

    /// The queue of copies, if there is a GPU.
    pub fn queue(&self) -> Option<&OrderedCopies> {
        self.copies.as_ref()
    }

    /// The last mark that was passed when [`Own::advance`] looked.
    pub fn passed(&self) -> u64 {
        self.copies.as_ref().map_or(0, OrderedCopies::passed)
    }

    /// Whether copies are under way, or what follows them.
    pub fn is_busy(&self) -> bool {
        !self.landings.is_empty() || self.copies.as_ref().is_some_and(|copies| !copies.is_done())
    }

    /// Gives up the queue, because the GPU does not complete the copies. The queue's memory stays mapped.
    pub fn forget(&mut self) {
        std::mem::forget(self.copies.take());
    }
}
