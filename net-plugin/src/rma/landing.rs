//! Copies into this rank's memory, and what follows each copy: a signal, the end of a get or of a put, the release of the
//! place that the payload came in.
//!
//! Host memory is written by this thread at once, and GPU memory by the copy engine later. What follows comes in the order
//! of the messages: so a signal in host memory comes behind the payload of all earlier messages of its queue pair (P3).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_gpu_kernels::OrderedCopies;

use super::memory::Memory;
use super::requests::{Handle, Requests};
use super::signals::Signals;
use crate::error::{Code, Failure, Result};

/// Bytes of a word, which the GPU's queue can store as a value.
pub const WORD: u64 = size_of::<u64>() as u64;

/// Copies into memories and signals of this rank.
pub struct Inward {
    /// `None` without a GPU: then all memory is host memory.
    copies: Option<OrderedCopies>,
    signals: Signals,
}

fn failed(e: pushgate_gpu_kernels::DeviceError) -> Failure {
    Failure::new(Code::System, format!("copying into the GPU's memory: {e}"))
}

impl Inward {
    pub fn new(copies: Option<OrderedCopies>) -> Self {
        Inward { copies, signals: Signals::new() }
    }

    fn copies(&mut self) -> Result<&mut OrderedCopies> {
        let text = "GPU memory, but there is no GPU";
        self.copies.as_mut().ok_or_else(|| Failure::new(Code::Internal, text))
    }

    /// Copies `bytes` bytes of host memory at `from` to `to`, an address in `memory`. Returns the mark that [`Inward::mark`] will
    /// make behind the copy, 0 if the copy is complete.
    ///
    /// # Safety
    /// Both stretches are valid, and stay so until the mark is passed. Others may write them meanwhile: that spoils their
    /// own payload alone.
    pub unsafe fn copy(&mut self, from: usize, memory: &Memory, to: usize, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        if !memory.cuda {
            // The stretches overlap where a rank puts into the memory that it puts out of.
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
            return Ok(0);
        }
        let copies = self.copies()?;
        let added = match bytes {
            // A word, as kernels put by value: the device stores it in one call with the signal that follows.
            WORD if to.is_multiple_of(WORD as usize) => {
                // SAFETY: the caller's promise. Bytes, because the peer chooses where payload lies; volatile, because a peer that
                // breaks the rules writes meanwhile.
                let value =
                    u64::from_ne_bytes(unsafe { (from as *const [u8; WORD as usize]).read_volatile() });
                // SAFETY: the caller's promise, and the target is aligned.
                unsafe { copies.store(to as u64, value) }
            }
            // SAFETY: the caller's promise.
            _ => unsafe { copies.copy_in(to as u64, from as *const u8, bytes as usize) },
        };
        added.map_err(failed)?;
        Ok(copies.next())
    }

    /// Adds `value` to the signal at `address` of a GPU's `memory`, behind all copies so far.
    ///
    /// # Safety
    /// The signal is 8 aligned bytes of the memory, which is registered until [`Inward::forget`].
    pub unsafe fn add(&mut self, memory: &Memory, address: usize, value: u64) -> Result<()> {
        let text = "a signal in GPU memory, but there is no GPU";
        let copies = self.copies.as_mut().ok_or_else(|| Failure::new(Code::Internal, text))?;
        // SAFETY: the caller's promise.
        unsafe { self.signals.add(copies, address as u64, value, memory.kept) }.map_err(failed)
    }

    /// Looks how far the copies are, and goes as far with the signals.
    pub fn advance(&mut self) -> Result<()> {
        let Some(copies) = &mut self.copies else { return Ok(()) };
        copies.look().map_err(failed)?;
        if self.signals.is_busy() { self.signals.advance(copies).map_err(failed) } else { Ok(()) }
    }

    /// Makes a mark if something was added since the last one: to be called when a turn ends. Returns the last mark.
    pub fn mark(&mut self) -> Result<u64> {
        self.copies.as_mut().map_or(Ok(0), |copies| copies.mark_what_is_open().map_err(failed))
    }

    /// The last mark that was passed when [`Inward::advance`] looked.
    pub fn passed(&self) -> u64 {
        self.copies.as_ref().map_or(0, OrderedCopies::passed)
    }

    /// The queue of copies, if there is a GPU.
    pub fn queue(&self) -> Option<&OrderedCopies> {
        self.copies.as_ref()
    }

    /// Whether copies or signals are under way.
    pub fn is_busy(&self) -> bool {
        self.copies.as_ref().is_some_and(|copies| !copies.is_done()) || self.signals.is_busy()
    }

    /// Fails if the GPU has failed.
    pub fn check(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.check().map_err(failed))
    }

    /// Forgets the signals in a memory that is deregistered. Nothing is under way.
    pub fn forget(&mut self, memory: &Memory) {
        if memory.cuda {
            self.signals.forget(memory.address as u64, memory.bytes as u64);
        }
    }
}

/// What is to be added to a signal.
#[derive(Clone, Debug)]
pub struct Addition {
    /// The signal's memory.
    pub memory: Arc<Memory>,
    /// The signal's address: 8 aligned bytes in the memory.
    pub address: usize,
    /// What is added, modulo 2^64.
    pub value: u64,
}

/// What follows a copy.
#[derive(Debug, Default)]
pub struct Landing {
    /// The mark behind the copy; 0 if the copy is complete.
    pub mark: u64,
    /// What is added to a signal.
    pub adds: Option<Addition>,
    /// A get that so many bytes arrived for.
    pub arrived: Option<(Handle, u64)>,
    /// A request that is done.
    pub done: Option<Handle>,
}

/// Copies of one queue pair, in their order.
#[derive(Debug, Default)]
pub struct Landings(VecDeque<Landing>);

impl Landings {
    pub fn push(&mut self, landing: Landing) {
        self.0.push_back(landing);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many wait for their copies.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Does what follows the copies that are complete: those with a mark up to `passed`. Returns how many these were. `on_gpu` gets
    /// what is to be added to signals of a GPU.
    pub fn settle(&mut self, passed: u64, requests: &mut Requests, mut on_gpu: impl FnMut(Addition)) -> u64 {
        let mut settled = 0;
        while let Some(landing) = self.0.front()
            && landing.mark <= passed
        {
            let Landing { adds, arrived, done, .. } = self.0.pop_front().expect("there is one");
            match adds {
                Some(addition) if addition.memory.cuda => on_gpu(addition),
                Some(Addition { address, value, memory: _memory }) => {
                    // Release: orders the payload before the signal for a thread that reads the signal with acquire. Payload that this
                    // thread copied is its own stores; payload that the GPU copied was complete when `passed` was read.
                    // SAFETY: `Memory::signal` checked 8 aligned bytes of registered memory; deregistration settles first.
                    unsafe { AtomicU64::from_ptr(address as *mut u64) }.fetch_add(value, Ordering::Release);
                }
                None => {}
            }
            if let Some((get, bytes)) = arrived {
                requests.arrived(get, bytes);
            }
            if let Some(request) = done {
                requests.done(request);
            }
            settled += 1;
        }
        settled
    }
}
