//! A queue of copies and 64-bit stores that a device carries out in order, for programs that move payload while kernels
//! of others fill the device and wait for it.
//!
//! P3, data before signal: a store is carried out only when everything that was queued before it is complete and visible
//! to kernels that are running. On a GPU that is what `cuStreamWriteValue64` promises without
//! `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER` (CUDA driver API, stream memory operations). On the CPU a copy is complete on
//! return, and the store is a release.
//!
//! How far the queue is costs no call of the driver: a mark is a store of the mark's number to a word of host memory,
//! which the program reads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::memory::SharedMemory;

use crate::cuda::CopyStream;
use crate::error::Result;
use crate::executor::{Access, Executor, Registration};

/// Words for the program's own use: with the word of the marks they fill a page.
const PLACES: usize = 511;

/// A queue of copies and stores on a device. Dropping it waits until all of them are carried out.
///
/// One thread at a time uses a queue.
pub struct OrderedCopies {
    // Dropped first: it waits for what still uses the words.
    kind: Kind,
    marks: u64,
    /// Word 0 is the number of the last mark that was passed; the other words are for values that the device reads or
    /// writes.
    words: Words,
}

enum Kind {
    Cuda(CopyStream),
    Cpu,
}

/// Host words that the device sees.
struct Words {
    // Dropped before the memory.
    registration: Registration,
    memory: SharedMemory,
}

impl Words {
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index <= PLACES);
        // SAFETY: within the memory, by the assertion; aligned, because memory begins at a page; shared memory is only ever
        // accessed as atomics here.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU64>().add(index).as_ptr() }
    }

    fn address(&self, index: usize) -> u64 {
        self.registration.device_addr() + (index * size_of::<u64>()) as u64
    }
}

impl OrderedCopies {
    /// Words of host memory that the device sees and the program may use as it likes ([`OrderedCopies::word`]).
    pub const WORDS: usize = PLACES;
    /// Bytes of host memory that a queue takes for its words.
    pub const BYTES: usize = (PLACES + 1) * size_of::<u64>();

    /// Makes a queue on the executor's device, of the highest priority, with its words in `memory`: zeros that nobody else
    /// uses. Fails on a GPU that can't store a word in a stream's order.
    ///
    /// # Panics
    /// If the memory is smaller than [`OrderedCopies::BYTES`].
    pub fn new(executor: &Arc<dyn Executor>, memory: SharedMemory) -> Result<Self> {
        assert!(memory.len() >= Self::BYTES);
        let registration = executor.register(memory.as_ptr(), memory.len(), Access::ReadWrite, false)?;
        let words = Words { registration, memory };
        let kind = match executor.as_cuda() {
            Some(cuda) => {
                let stream = CopyStream::new(cuda.context())?;
                stream.can_store()?;
                Kind::Cuda(stream)
            }
            None => Kind::Cpu,
        };
        Ok(Self { kind, marks: 0, words })
    }

    /// Adds a copy of `len` bytes between device memory, registered host memory (by its device address) and, if
    /// the driver reaches it, other host memory.
    ///
    /// # Safety
    /// Both ranges must be valid for the copy, must not overlap, and must be left alone until a mark made later has been
    /// passed or this queue has been dropped.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        match &self.kind {
            // SAFETY: this function's caller promises what the inner `copy` requires.
            Kind::Cuda(stream) => unsafe { stream.copy(dst, src, len) },
            Kind::Cpu => {
                // SAFETY: the caller promises that both ranges are valid; on the CPU, device addresses are host addresses.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
                Ok(())
            }
        }
    }

    /// Adds a store of `value` to the word at device address `dst`, behind everything that was added before.
    ///
    /// # Safety
    /// `dst` is 8-byte aligned and valid for an atomic store of 8 bytes until a mark made later has been passed.
    pub unsafe fn store(&self, dst: u64, value: u64) -> Result<()> {
        match &self.kind {
            // SAFETY: this function's caller promises what `store` requires.
            Kind::Cuda(stream) => unsafe { stream.store(dst, value) },
            Kind::Cpu => {
                // Release: orders the copies before it, which are plain stores of this thread, for a thread that
                // reads the value with acquire.
                // SAFETY: the caller's promise; on the CPU, device addresses are host addresses.
                unsafe { AtomicU64::from_ptr(dst as *mut u64) }.store(value, Ordering::Release);
                Ok(())
            }
        }
    }

    /// Marks the point behind everything that was added so far. Marks are numbered from 1.
    pub fn mark(&mut self) -> Result<u64> {
        // SAFETY: our own word, which outlives the queue.
        unsafe { self.store(self.words.address(0), self.marks + 1)? };
        self.marks += 1;
        Ok(self.marks)
    }

    /// The number of the last mark that was made; 0 before the first.
    pub fn marked(&self) -> u64 {
        self.marks
    }

    /// The number of the last mark that was passed: everything that was added before that mark is complete. Makes no call
    /// of the driver.
    #[inline]
    pub fn passed(&self) -> u64 {
        // Acquire: what the device wrote before the mark is seen by what this thread reads after this.
        self.words.word(0).load(Ordering::Acquire)
    }

    /// The device address of word `index`, below [`OrderedCopies::WORDS`], for copies to it.
    pub fn word_address(&self, index: usize) -> u64 {
        self.words.address(1 + index)
    }

    /// Word `index`, below [`OrderedCopies::WORDS`]. What a copy wrote there is seen once a mark behind the copy was passed.
    pub fn word(&self, index: usize) -> u64 {
        self.words.word(1 + index).load(Ordering::Relaxed)
    }

    /// Fails if the device has failed, with its error: no mark would ever be passed.
    pub fn check(&self) -> Result<()> {
        match &self.kind {
            Kind::Cuda(stream) => stream.check(),
            Kind::Cpu => Ok(()),
        }
    }
}

impl fmt::Debug for OrderedCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OrderedCopies {{ marked: {}, passed: {} }}", self.marked(), self.passed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::{DeviceChoice, choose_at};

    #[test]
    fn copies_and_stores_are_carried_out_in_order_and_marks_say_how_far() {
        let (executor, _) = choose_at(DeviceChoice::Cpu, 0).unwrap();
        let memory = SharedMemory::builder("copies", OrderedCopies::BYTES).create().unwrap();
        let mut queue = OrderedCopies::new(&executor, memory).unwrap();
        let from = [7u8; 100];
        let mut to = [0u8; 100];
        let signal = AtomicU64::new(0);
        assert_eq!((queue.marked(), queue.passed()), (0, 0));
        // SAFETY: the arrays and the word outlive the queue's work, which is complete on return.
        unsafe {
            queue.copy(to.as_mut_ptr() as u64, from.as_ptr() as u64, 100).unwrap();
            queue.store(signal.as_ptr() as u64, 5).unwrap();
            queue.copy(queue.word_address(3), signal.as_ptr() as u64, 8).unwrap();
        }
        assert_eq!(queue.mark().unwrap(), 1);
        assert_eq!((queue.passed(), to, signal.load(Ordering::Acquire), queue.word(3)), (1, from, 5, 5));
        assert_eq!(queue.word(OrderedCopies::WORDS - 1), 0);
        queue.check().unwrap();
    }
}
