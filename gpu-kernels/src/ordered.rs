//! A queue of copies and 64-bit stores that a device carries out in order, for programs that move payload while kernels
//! of others fill the device and wait for it.
//!
//! P3, data before signal: a store is carried out only when everything that was queued before it is complete and visible
//! to kernels that are running. On a GPU that is what `cuStreamBatchMemOp` promises for a store without
//! `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER` (CUDA driver API, stream memory operations). On the CPU a copy is complete on
//! return, and the store is a release.
//!
//! A mark tells how far the queue is. After short copies and stores a mark is a store of the mark's number to a word of host
//! memory, which the program reads without a call of the driver; after long copies it is an event.

use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::order;

use crate::cuda::{CopyMark, CopyStream, ROWS_BELOW, STORES, Store};
use crate::error::Result;
use crate::executor::{Access, Executor, Registration};

/// Words for the program's own use: with the word of the marks they fill a page.
const PLACES: usize = 511;
/// Bytes of host memory through which copies within device memory go.
const STAGING: usize = 1 << 20;
/// Copies within device memory of at least this number of bytes do not go through host memory: that would take longer than
/// to wait for the engine that runs kernels.
const WITHIN: usize = 16 << 20;

/// Bytes of copies after which a mark is an event of the driver in place of a stored word. A store has a fence of its own, and a
/// copy has one already; so an event saves a fence, and costs a call of the driver to look at it. Where blocks of a kernel poll
/// one word of host memory, a fence takes 20 to 300 us (docs/device-api-nccl.md).
const LARGE: usize = 128 << 10;
/// Bytes of copies without a mark between them, at most: what waits for them need not wait for more.
const UNMARKED: usize = 512 << 10;
/// Events that a queue has from the beginning.
const SPARE_EVENTS: usize = 16;

/// A queue of copies and stores on a device. Dropping it waits until everything up to the last copy or mark is carried out.
///
/// Stores that follow each other are handed to the device together, by the next copy or mark. A store after the last copy or mark is
/// never carried out, so a program makes a mark after its last store.
///
/// One thread at a time uses a queue.
pub struct OrderedCopies {
    // Dropped first: it waits for what still uses the words.
    kind: Kind,
    /// Marks that were made.
    marks: u64,
    /// The last mark that was seen passed.
    passed: u64,
    /// Something was added after the last mark.
    open: bool,
    /// Bytes of copies after the last mark.
    unmarked: usize,
    /// Word 0 is the number of the last mark that was passed, of those that are stores; the other words are for values that
    /// the device reads or writes.
    words: Words,
}

enum Kind {
    Cuda(Box<Cuda>),
    Cpu,
}

/// A stream of a GPU, and what the GPU has yet to be told or to pass.
struct Cuda {
    stream: CopyStream,
    /// Stores that the driver has not been given.
    stores: Vec<Store>,
    /// Marks that are events, with their numbers.
    events: VecDeque<(u64, CopyMark)>,
    /// Events that are free.
    spare: Vec<CopyMark>,
}

impl Cuda {
    fn hand_over(&mut self) -> Result<()> {
        if self.stores.is_empty() {
            return Ok(());
        }
        // SAFETY: the callers of `OrderedCopies::store` promise valid words until a later mark; a mark's word is the queue's own.
        let stored = unsafe { self.stream.store(&self.stores) };
        self.stores.clear();
        stored
    }

    fn store(&mut self, store: Store) -> Result<()> {
        self.stores.push(store);
        if self.stores.len() == STORES { self.hand_over() } else { Ok(()) }
    }

    fn mark_by_event(&mut self, number: u64) -> Result<()> {
        self.hand_over()?;
        let event = match self.spare.pop() {
            Some(event) => event,
            None => self.stream.spare_mark()?,
        };
        self.stream.mark_again(&event)?;
        self.events.push_back((number, event));
        Ok(())
    }

    /// The last mark that was passed; `stored` is the last of those that are stores.
    fn passed(&mut self, stored: u64, before: u64) -> Result<u64> {
        let mut passed = before.max(stored);
        while let Some((number, event)) = self.events.front() {
            // Marks are passed in their order, so a later mark says that this one was passed too.
            if *number > passed {
                if !event.passed()? {
                    break;
                }
                passed = *number;
            }
            self.spare.extend(self.events.pop_front().map(|(_, event)| event));
        }
        Ok(passed)
    }
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

    /// Where the CPU reads a word.
    fn host(&self, index: usize) -> *const u8 {
        self.word(index).as_ptr().cast_const().cast()
    }

    /// The memory of the words, of [`STAGING`] bytes: for the CPU, and for the device.
    fn staging(&self) -> *const u8 {
        // SAFETY: `OrderedCopies::new` asserts that the memory has the bytes of the words; one behind them is its end at least.
        unsafe { self.memory.as_ptr().as_ptr().cast_const().add(OrderedCopies::BYTES) }
    }

    fn staging_address(&self) -> u64 {
        self.registration.device_addr() + OrderedCopies::BYTES as u64
    }
}

impl OrderedCopies {
    /// Words of host memory that the device sees and the program may use as it likes ([`OrderedCopies::word`]).
    pub const WORDS: usize = PLACES;
    /// Bytes of host memory that a queue takes for its words.
    pub const BYTES: usize = (PLACES + 1) * size_of::<u64>();
    /// Bytes of host memory for a queue that copies within device memory ([`OrderedCopies::copy_within`]).
    pub const BYTES_TO_COPY_WITHIN: usize = Self::BYTES + STAGING;

    /// Makes a queue on the executor's device, of the highest priority, with its words in `memory`: zeros that nobody else
    /// uses. On a GPU the queue belongs to a context of its own, so that calls of the program that wait for a kernel do not hold the
    /// queue up; all queues of a GPU share that context. Work that needs an SM waits there until kernels of the program give way, for
    /// about 2 ms. Only two kinds of copy need an SM: of a single byte into the device, and of 16 MiB and more within the device. Fails
    /// on a GPU that can't store a word in a stream's order.
    ///
    /// # Panics
    /// If the memory is smaller than [`OrderedCopies::BYTES`].
    pub fn new(executor: &Arc<dyn Executor>, memory: SharedMemory) -> Result<Self> {
        assert!(memory.len() >= Self::BYTES);
        let registration = Self::register(executor, memory.as_ptr(), memory.len(), Access::ReadWrite)?;
        let words = Words { registration, memory };
        let kind = match executor.as_cuda() {
            Some(cuda) => {
                let stream = CopyStream::new(&cuda.beside()?)?;
                stream.can_store()?;
                // What the driver sets up at the first use of a stream or an event is not left until a kernel waits for it.
                stream.warm_up(words.address(1), words.host(1))?;
                let spare = (0..SPARE_EVENTS).map(|_| stream.spare_mark()).collect::<Result<_>>()?;
                let stores = Vec::with_capacity(STORES);
                Kind::Cuda(Box::new(Cuda { stream, stores, events: VecDeque::new(), spare }))
            }
            None => Kind::Cpu,
        };
        Ok(Self { kind, marks: 0, passed: 0, open: false, unmarked: 0, words })
    }

    /// Registers host memory of the program that queues on the executor's device copy from or to: on a GPU with the context of the
    /// queues, and not with the one in which calls of the program may wait for a kernel.
    pub fn register(
        executor: &Arc<dyn Executor>,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Registration> {
        match executor.as_cuda() {
            Some(cuda) => cuda.register_beside(ptr, len, access),
            None => executor.register(ptr, len, access, false),
        }
    }

    /// Adds a copy of `len` bytes of host memory to device memory. The host memory is registered, or the call may take as long as
    /// the copy.
    ///
    /// # Safety
    /// Both ranges must be valid for the copy, must not overlap, and must be left alone until mark [`OrderedCopies::next`]
    /// has been passed or this queue has been dropped.
    pub unsafe fn copy_in(&mut self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        match self.begin(len)? {
            // SAFETY: this function's caller promises what both require.
            Some(stream) if len < ROWS_BELOW => unsafe { stream.copy_rows(dst, src, len) },
            // SAFETY: as above. Host memory has one address in CUDA's unified address space.
            Some(stream) => unsafe { stream.copy(dst, src as u64, len) },
            None => {
                // SAFETY: the caller promises that both ranges are valid; on the CPU, device addresses are host addresses.
                unsafe { std::ptr::copy_nonoverlapping(src, dst as *mut u8, len) };
                Ok(())
            }
        }
    }

    /// Adds a copy of `len` bytes of device memory to host memory at `dst`, the device's address of registered memory.
    ///
    /// # Safety
    /// As [`OrderedCopies::copy_in`].
    pub unsafe fn copy_out(&mut self, dst: u64, src: u64, len: usize) -> Result<()> {
        match self.begin(len)? {
            // SAFETY: this function's caller promises what `copy` requires.
            Some(stream) => unsafe { stream.copy(dst, src, len) },
            None => {
                // SAFETY: as in `copy_in`.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
                Ok(())
            }
        }
    }

    /// Adds a copy of `len` bytes within device memory. On a GPU a copy of less than 16 MiB goes through host memory, because copies
    /// within the GPU's memory are made by the engine that runs kernels and wait about 2 ms for their turn.
    ///
    /// # Panics
    /// If the queue's memory is smaller than [`OrderedCopies::BYTES_TO_COPY_WITHIN`].
    ///
    /// # Safety
    /// As [`OrderedCopies::copy_in`], but the ranges may overlap.
    pub unsafe fn copy_within(&mut self, dst: u64, src: u64, len: usize) -> Result<()> {
        assert!(self.words.memory.len() >= Self::BYTES_TO_COPY_WITHIN);
        if dst == src {
            return Ok(());
        }
        if matches!(self.kind, Kind::Cpu) {
            self.begin(len)?;
            // SAFETY: the caller's promise; on the CPU, device addresses are host addresses.
            unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) };
            return Ok(());
        }
        let overlap = dst < src + len as u64 && src < dst + len as u64;
        if len >= WITHIN && !overlap {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_out(dst, src, len) };
        }
        let (address, staging) = (self.words.staging_address(), self.words.staging());
        let parts = len.div_ceil(STAGING);
        for n in 0..parts {
            // From the end that no later part reads.
            let at = STAGING * if dst < src { n } else { parts - 1 - n };
            let part = STAGING.min(len - at);
            // The device makes the copies in their order, so that each part finds the staging memory free.
            // SAFETY: the caller's promise; the staging memory is the queue's own.
            unsafe {
                self.copy_out(address, src + at as u64, part)?;
                self.copy_in(dst + at as u64, staging, part)?;
            }
        }
        Ok(())
    }

    /// Begins a copy of `len` bytes. Returns the stream for it; `None` on the CPU.
    fn begin(&mut self, len: usize) -> Result<Option<&CopyStream>> {
        if self.unmarked >= UNMARKED {
            self.mark()?;
        }
        self.open = true;
        self.unmarked += len;
        match &mut self.kind {
            Kind::Cuda(cuda) => {
                cuda.hand_over()?;
                Ok(Some(&cuda.stream))
            }
            Kind::Cpu => Ok(None),
        }
    }

    /// Adds a store of `value` to the word at device address `dst`, after everything that was added before.
    ///
    /// # Safety
    /// `dst` is 8-byte aligned and valid for an atomic store of 8 bytes until mark [`OrderedCopies::next`] has been passed.
    pub unsafe fn store(&mut self, dst: u64, value: u64) -> Result<()> {
        self.open = true;
        match &mut self.kind {
            Kind::Cuda(cuda) => cuda.store(Store { dst, value }),
            Kind::Cpu => {
                // Release: orders the copies before it, which are plain stores of this thread, for a thread that
                // reads the value with acquire.
                // SAFETY: the caller's promise; on the CPU, device addresses are host addresses.
                unsafe { AtomicU64::from_ptr(dst as *mut u64) }.store(value, Ordering::Release);
                Ok(())
            }
        }
    }

    /// Marks the point after everything that was added so far, and hands all of that to the device. Marks are numbered from 1.
    pub fn mark(&mut self) -> Result<u64> {
        let number = self.next();
        match &mut self.kind {
            Kind::Cuda(cuda) if self.unmarked >= LARGE => cuda.mark_by_event(number)?,
            Kind::Cuda(cuda) => {
                cuda.stores.push(Store { dst: self.words.address(0), value: number });
                cuda.hand_over()?;
            }
            // Everything is complete already.
            Kind::Cpu => self.passed = number,
        }
        (self.marks, self.open, self.unmarked) = (number, false, 0);
        Ok(number)
    }

    /// Makes a mark if something was added after the last one. Returns the last mark.
    pub fn mark_what_is_open(&mut self) -> Result<u64> {
        if self.open { self.mark() } else { Ok(self.marks) }
    }

    /// The number that the next mark will have.
    pub fn next(&self) -> u64 {
        self.marks + 1
    }

    /// Whether everything that was added is marked, and the last mark was seen passed.
    pub fn is_done(&self) -> bool {
        !self.open && self.passed == self.marks
    }

    /// Looks how far the device is. Returns the number of the last mark that was passed: everything that was added before that
    /// mark is complete. Calls the driver only where a mark after long copies is under way.
    #[inline]
    pub fn look(&mut self) -> Result<u64> {
        if let Kind::Cuda(cuda) = &mut self.kind
            && self.passed < self.marks
        {
            let stored = self.words.word(0).load(Ordering::Relaxed);
            // What the device wrote before the mark is seen by what this thread reads after this.
            order::from_device();
            self.passed = cuda.passed(stored, self.passed)?;
        }
        Ok(self.passed)
    }

    /// What the last [`OrderedCopies::look`] returned.
    #[inline]
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// The device address of word `index`, below [`OrderedCopies::WORDS`], for copies to it.
    pub fn word_address(&self, index: usize) -> u64 {
        self.words.address(1 + index)
    }

    /// Word `index`, below [`OrderedCopies::WORDS`]. What a copy wrote there is seen once a mark after the copy was passed.
    pub fn word(&self, index: usize) -> u64 {
        self.words.word(1 + index).load(Ordering::Relaxed)
    }

    /// Fails if the device has failed, with its error: no mark would ever be passed.
    pub fn check(&self) -> Result<()> {
        match &self.kind {
            Kind::Cuda(cuda) => cuda.stream.check(),
            Kind::Cpu => Ok(()),
        }
    }
}

impl fmt::Debug for OrderedCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OrderedCopies {{ marked: {}, passed: {} }}", self.marks, self.passed)
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
        assert_eq!((queue.next(), queue.passed(), queue.is_done()), (1, 0, true));
        // SAFETY: the arrays and the word outlive the queue's work, which is complete on return.
        unsafe {
            queue.copy_in(to.as_mut_ptr() as u64, from.as_ptr(), 100).unwrap();
            queue.store(signal.as_ptr() as u64, 5).unwrap();
            queue.copy_out(queue.word_address(3), signal.as_ptr() as u64, 8).unwrap();
        }
        assert!(!queue.is_done());
        assert_eq!((queue.mark_what_is_open().unwrap(), queue.look().unwrap()), (1, 1));
        assert!(queue.is_done());
        assert_eq!(queue.mark_what_is_open().unwrap(), 1);
        assert_eq!((queue.passed(), to, signal.load(Ordering::Acquire), queue.word(3)), (1, from, 5, 5));
        assert_eq!(queue.word(OrderedCopies::WORDS - 1), 0);
        queue.check().unwrap();
    }
}
