//! Copies into this rank's memory, and what follows each copy: a signal, the end of a get or of a put, the release of the
//! place that the payload came in.
//!
//! Host memory is written by this thread at once, and GPU memory by the copy engine later. What follows comes in the order
//! of the messages: so a signal in host memory comes after the payload of all earlier messages of its queue pair (P3).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pushgate_gpu_kernels::OrderedCopies;

use super::memory::Memory;
use super::requests::{Handle, Requests};
use super::signals::Signals;
use crate::end::SETTLE;
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
    /// make after the copy, 0 if the copy is complete.
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
        self.let_signals_go_first(to, bytes)?;
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

    /// Waits until no sum for a signal in these bytes is outside of the queue: what was added before is stored before. A signal that
    /// is also written to is rare, and the GPU reads it within microseconds.
    fn let_signals_go_first(&mut self, to: usize, bytes: u64) -> Result<()> {
        let mut began = None;
        while self.signals.are_open_in(to as u64, bytes) {
            self.mark()?;
            self.advance()?;
            if began.get_or_insert_with(Instant::now).elapsed() > SETTLE {
                self.check()?;
                return Err(Failure::new(
                    Code::System,
                    format!("the GPU has not read a signal within {SETTLE:?}"),
                ));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Adds `value` to the signal at `address` of a GPU's `memory`, after all copies so far.
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
    /// The mark after the copy; 0 if the copy is complete.
    pub mark: u64,
    /// What is added to a signal.
    pub adds: Option<Addition>,
    /// A get, and the number of bytes that arrived for it.
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

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::memory::SharedMemory;
    use pushgate_gpu_kernels::{DeviceChoice, choose_at};

    use super::*;

    #[test]
    fn p3_what_is_put_onto_a_signal_comes_after_what_was_added_to_it_before() {
        let (executor, _) = choose_at(DeviceChoice::Cpu, 0).unwrap();
        let queue = SharedMemory::builder("test", OrderedCopies::BYTES).create().unwrap();
        let mut inward = Inward::new(Some(OrderedCopies::new(&executor, queue).unwrap()));
        let words: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let address = words[0].as_ptr() as usize;
        let memory = Memory { number: 0, address, bytes: 32, cuda: true, kept: false };
        let from = [70u64, 71, 72, 73];
        // Of one word, of bytes around it, and beside it.
        for (at, bytes, expected) in [(8, 8, [0, 70, 0, 0]), (4, 9, [0, 0, 0, 0]), (16, 16, [0, 5, 70, 71])] {
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            // SAFETY: words and payload outlive the queue's work; on the CPU executor they are device memory.
            unsafe {
                inward.add(&memory, address + 8, 5).unwrap();
                inward.copy(from.as_ptr() as usize, &memory, address + at, bytes).unwrap();
            }
            while inward.is_busy() {
                inward.mark().unwrap();
                inward.advance().unwrap();
            }
            let seen = words.iter().map(|word| word.load(Ordering::Acquire));
            if at == 4 {
                // Bytes 4 to 12 of the memory are the payload: a part of the word lies there.
                let bytes: Vec<u8> = seen.flat_map(u64::to_ne_bytes).collect();
                let payload: Vec<u8> = from.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert_eq!(bytes[4..13], payload[..9]);
            } else {
                assert_eq!(seen.collect::<Vec<_>>(), expected, "{bytes} bytes at {at}");
            }
        }
    }
}
