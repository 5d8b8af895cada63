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

/// Where payload is copied from.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its address for the CPU, unless it is GPU memory.
    pub host: Option<usize>,
    /// Its address for the GPU, if there is a GPU that sees it.
    pub device: Option<u64>,
}

impl Source {
    /// The bytes of a registered memory at `address`.
    pub fn of(memory: &Memory, address: usize) -> Self {
        Source { host: (!memory.cuda).then_some(address), device: Some(address as u64) }
    }
}

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

    /// Copies `bytes` bytes to `to`, an address in `memory`. Returns the mark behind the copy, 0 if the copy is complete.
    ///
    /// # Safety
    /// Both stretches are valid, and stay so until the mark is passed. Others may write them meanwhile: that spoils their
    /// own payload alone.
    pub unsafe fn copy(&mut self, from: Source, memory: &Memory, to: usize, bytes: u64) -> Result<u64> {
        match (bytes, from, memory.cuda) {
            (0, ..) => Ok(0),
            (_, Source { host: Some(from), .. }, false) => {
                // The stretches overlap where a rank puts into the memory that it puts out of.
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
                Ok(0)
            }
            (_, Source { device: Some(from), .. }, _) => {
                let copies = self.copies()?;
                if from != to as u64 {
                    // SAFETY: the caller's promise; the addresses are the device's.
                    unsafe { copies.copy(to as u64, from, bytes as usize) }.map_err(failed)?;
                }
                copies.mark().map_err(failed)
            }
            _ => Err(Failure::new(Code::Internal, "the GPU does not see the window of a queue pair")),
        }
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

    /// Goes as far as the copies are.
    pub fn advance(&mut self) -> Result<()> {
        match &mut self.copies {
            Some(copies) if self.signals.is_busy() => self.signals.advance(copies).map_err(failed),
            _ => Ok(()),
        }
    }

    /// The last mark that was passed.
    pub fn passed(&self) -> u64 {
        self.copies.as_ref().map_or(0, OrderedCopies::passed)
    }

    /// Whether copies or signals are under way.
    pub fn is_busy(&self) -> bool {
        self.copies.as_ref().is_some_and(|copies| copies.passed() < copies.marked()) || self.signals.is_busy()
    }

    /// Fails if the GPU has failed.
    pub fn check(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.check().map_err(failed))
    }

    /// Makes a mark behind everything so far.
    pub fn mark(&mut self) -> Result<u64> {
        self.copies.as_mut().map_or(Ok(0), |copies| copies.mark().map_err(failed))
    }

    /// Forgets the signals in a memory that is deregistered. Nothing is under way.
    pub fn forget(&mut self, memory: &Memory) {
        if memory.cuda {
            self.signals.forget(memory.address as u64, memory.bytes as u64);
        }
    }
}

/// What follows a copy.
#[derive(Debug, Default)]
pub struct Landing {
    /// The mark behind the copy; 0 if the copy is complete.
    pub mark: u64,
    /// A signal in host memory, and what is added to it.
    pub adds: Option<(Arc<Memory>, usize, u64)>,
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

    /// Does what follows the copies that are complete. Returns how many these were.
    pub fn settle(&mut self, passed: u64, requests: &mut Requests) -> u64 {
        let mut settled = 0;
        while let Some(landing) = self.0.front()
            && landing.mark <= passed
        {
            let Landing { adds, arrived, done, .. } = self.0.pop_front().expect("there is one");
            if let Some((_memory, address, value)) = adds {
                // Release: orders the payload before the signal for a thread that reads the signal with acquire. Payload that this
                // thread copied is its own stores; payload that the GPU copied was complete when `passed` was read.
                // SAFETY: `Memory::signal` checked 8 aligned bytes of registered memory; deregistration settles first.
                unsafe { AtomicU64::from_ptr(address as *mut u64) }.fetch_add(value, Ordering::Release);
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
