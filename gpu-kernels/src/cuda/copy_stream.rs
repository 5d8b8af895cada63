//! Copies by the GPU's copy engines, on a stream of their own, and marks between them.

use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::context::Context;
use super::driver::NOT_READY;
use super::event::{Event, TIMED, UNTIMED};
use super::stream::CudaStream;
use crate::error::{DeviceError, Result};

/// A stream of copies, which run in the order in which they were added. Dropping it waits for all of
/// them.
pub(crate) struct CopyStream(CudaStream);

/// The most stores of one call ([`CopyStream::store`]). The driver documents no limit; 256 is what others found.
pub(crate) const STORES: usize = 32;

/// Copies of fewer bytes of host memory to device memory are made by the engine that runs kernels, unless the driver is given
/// them as rectangles. Measured on H100 with driver 580: that engine copies 24,576 bytes, and a copy engine 32,768.
pub(crate) const ROWS_BELOW: usize = 64 << 10;

/// A store of a 64-bit word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    /// The word's address for the GPU.
    pub dst: u64,
    /// What is stored.
    pub value: u64,
}

/// The most copies of one call of the driver.
const COPIES: usize = 64;

/// Copies to device memory of at least this many bytes may be handed to the driver together. The copy engine makes these; it was seen
/// to leave batches of copies of 4 KiB to the engine that runs kernels (H100, driver 580).
const TOGETHER: usize = 32 << 10;

/// A copy between host memory and device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    /// Where the bytes go.
    pub dst: u64,
    /// Where the bytes are.
    pub src: u64,
    /// Bytes, at least one.
    pub length: usize,
    /// From the device to the host.
    pub out: bool,
}

/// A point in a [`CopyStream`].
pub(crate) struct CopyMark(pub(super) Event);

fn lacks(name: &str) -> DeviceError {
    DeviceError::CudaUnavailable { reason: format!("libcuda.so.1 lacks {name}: it is a stub, or too old") }
}

impl CopyStream {
    /// Makes a stream of the highest priority, so that no kernel delays its copies.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        CudaStream::new(context, true).map(Self)
    }

    /// Makes a stream of the lowest priority, as programs' own streams have it.
    pub(crate) fn beside_kernels(context: &Arc<Context>) -> Result<Self> {
        CudaStream::new(context, false).map(Self)
    }

    /// The stream's handle.
    pub(crate) fn raw(&self) -> u64 {
        self.0.raw.0 as u64
    }

    /// Starts a copy of `len` bytes from host memory to device memory; returns the point after it.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and `to` is device memory valid for writes of
    /// `len` bytes, until the mark has been seen passed or self has been dropped.
    pub(crate) unsafe fn copy_in(&self, to: u64, from: *const u8, len: usize) -> Result<CopyMark> {
        let context = &self.0.context;
        let mark = Event::new(context, UNTIMED)?;
        let _current = context.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (context.driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), len, self.0.raw.0) };
        context
            .check("cuMemcpyHtoDAsync", code, || format!("copying {len} bytes from {from:p} to {to:#x}"))?;
        mark.record(self.0.raw.0)?;
        Ok(CopyMark(mark))
    }

    /// Starts a copy of `len` bytes between any two memories that the driver knows.
    ///
    /// # Safety
    /// Both ranges are valid, and left alone, until a later mark has been passed.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        let context = &self.0.context;
        let copy = context.driver.cuMemcpyAsync.ok_or_else(|| lacks("cuMemcpyAsync"))?;
        let _current = context.current()?;
        // SAFETY: the caller's promise; the stream is ours.
        let code = unsafe { copy(dst, src, len, self.0.raw.0) };
        context.check("cuMemcpyAsync", code, || format!("copying {len} bytes from {src:#x} to {dst:#x}"))
    }

    /// Starts a copy of fewer than [`ROWS_BELOW`] bytes of host memory to device memory.
    ///
    /// Given to the driver as one stretch, such a copy is made by the engine that runs kernels, and waits in a context beside the
    /// primary one until kernels of the program give way (2 ms). Given as two rows of a rectangle, the copy is made by a copy engine.
    /// A single byte has no two rows, so a copy of one byte waits.
    ///
    /// # Safety
    /// As [`CopyStream::copy`], and `src` is host memory.
    pub(crate) unsafe fn copy_rows(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        let half = len / 2;
        if half == 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.copy(dst, src as u64, len) };
        }
        // SAFETY: the caller's promise: the rows lie in the ranges.
        unsafe { self.rectangle(dst, src, half)? };
        if !len.is_multiple_of(2) {
            // The last two bytes; one is in place already.
            // SAFETY: as above.
            unsafe { self.rectangle(dst + len as u64 - 2, src.add(len - 2), 1)? };
        }
        Ok(())
    }

    /// Starts a copy of two rows of `width` bytes each, which follow each other.
    ///
    /// # Safety
    /// As [`CopyStream::copy_rows`], of twice `width` bytes.
    unsafe fn rectangle(&self, dst: u64, src: *const u8, width: usize) -> Result<()> {
        let context = &self.0.context;
        let copy = context.driver.cuMemcpy2DAsync_v2.ok_or_else(|| lacks("cuMemcpy2DAsync"))?;
        let rectangle = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: src.cast(),
            srcDevice: 0,
            srcArray: null_mut(),
            srcPitch: width,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: null_mut(),
            dstDevice: dst,
            dstArray: null_mut(),
            dstPitch: width,
            WidthInBytes: width,
            Height: 2,
        };
        let _current = context.current()?;
        // SAFETY: the caller's promise; the driver reads the description before it returns; the stream is ours.
        let code = unsafe { copy(&rectangle, self.0.raw.0) };
        context
            .check("cuMemcpy2DAsync", code, || format!("copying 2 x {width} bytes from {src:p} to {dst:#x}"))
    }

    /// Starts copies and places `mark` after them. The copies may be made in any order. No SM takes part, whatever
    /// their lengths are, but for copies of a single byte to the device.
    ///
    /// A copy and its mark cost the caller 1.8 us, and copies that are handed over together 1.3 us each. A store (cuStreamBatchMemOp) in
    /// place of the mark costs 0.9 us more, and a fence before each store (H100, driver 580).
    ///
    /// # Safety
    /// As [`CopyStream::copy`]; host memory is registered.
    pub(crate) unsafe fn group(&self, copies: &[Copy], mark: &CopyMark) -> Result<()> {
        let together = |copy: &&Copy| copy.out || copy.length >= TOGETHER;
        let batch = self.0.context.driver.cuMemcpyBatchAsync_v2;
        let many = batch.is_some() && copies.iter().filter(together).count() > 1;
        if let (Some(batch), true) = (batch, many) {
            let context = &self.0.context;
            let _current = context.current()?;
            let mut those = copies.iter().filter(together).peekable();
            while those.peek().is_some() {
                let (mut dst, mut src, mut length, mut count) = ([0; COPIES], [0; COPIES], [0; COPIES], 0);
                for copy in those.by_ref().take(COPIES) {
                    (dst[count], src[count], length[count]) = (copy.dst, copy.src, copy.length);
                    count += 1;
                }
                // SAFETY: a structure of numbers, for which zeros are valid: no hints where the memories are.
                let mut how: sys::CUmemcpyAttributes_st = unsafe { std::mem::zeroed() };
                how.srcAccessOrder = sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                how.flags = sys::CUmemcpyFlags_enum::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as c_uint;
                let (to, from, bytes) = (dst.as_mut_ptr(), src.as_mut_ptr(), length.as_mut_ptr());
                // SAFETY: `count` addresses and lengths stand in the arrays, with one description for all of them from the first
                // on; the caller promises the memories.
                let code = unsafe { batch(to, from, bytes, count, &mut how, &mut 0, 1, self.0.raw.0) };
                context.check("cuMemcpyBatchAsync", code, || format!("copying {:x?}", &copies))?;
            }
        }
        for copy in copies.iter().filter(|copy| !(many && together(copy))) {
            if !copy.out && copy.length < ROWS_BELOW {
                // SAFETY: the caller's promise.
                unsafe { self.copy_rows(copy.dst, copy.src as *const u8, copy.length)? };
            } else {
                // SAFETY: the caller's promise.
                unsafe { self.copy(copy.dst, copy.src, copy.length)? };
            }
        }
        self.mark_again(mark)
    }

    /// Waits until everything that was added so far is carried out.
    pub(crate) fn finish(&self) -> Result<()> {
        let context = &self.0.context;
        let _current = context.current()?;
        // SAFETY: our own stream.
        let code = unsafe { (context.driver.cuStreamSynchronize)(self.0.raw.0) };
        context.check("cuStreamSynchronize", code, || "waiting for copies to end".to_owned())
    }

    /// Fails if the GPU can't store a word in a stream's order.
    pub(crate) fn can_store(&self) -> Result<()> {
        let context = &self.0.context;
        match context.writes_words() && context.driver.cuStreamBatchMemOp_v2.is_some() {
            true => Ok(()),
            false => Err(lacks("64-bit stream memory operations (cuStreamBatchMemOp)")),
        }
    }

    /// Adds stores of values to words, in this order and after everything that was added before. Each is carried out when
    /// all before it is complete and visible to running kernels. One call of the driver takes them all.
    ///
    /// # Safety
    /// Each word is 8-byte aligned memory that the GPU can write, and stays valid until a later mark has been passed.
    pub(crate) unsafe fn store(&self, stores: &[Store]) -> Result<()> {
        let context = &self.0.context;
        let batch = context.driver.cuStreamBatchMemOp_v2.ok_or_else(|| lacks("cuStreamBatchMemOp"))?;
        assert!(stores.len() <= STORES);
        let mut ops = [sys::CUstreamBatchMemOpParams { pad: [0; 6] }; STORES];
        for (op, store) in ops.iter_mut().zip(stores) {
            // Flags 0: with the barrier before the store.
            op.writeValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
                operation: sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64,
                address: store.dst,
                __bindgen_anon_1:
                    sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
                        value64: store.value,
                    },
                flags: 0,
                alias: 0,
            };
        }
        let _current = context.current()?;
        // SAFETY: our own stream; the array has `stores.len()` operations; the caller promises the words.
        let code = unsafe { batch(self.0.raw.0, stores.len() as c_uint, ops.as_mut_ptr(), 0) };
        context.check("cuStreamBatchMemOp", code, || format!("storing {stores:x?}"))
    }

    /// Fails with the device's error if the device has failed.
    pub(crate) fn check(&self) -> Result<()> {
        let context = &self.0.context;
        let _current = context.current()?;
        let query = context.driver.cuStreamQuery.ok_or_else(|| lacks("cuStreamQuery"))?;
        // SAFETY: our own stream.
        match unsafe { query(self.0.raw.0) } {
            NOT_READY => Ok(()),
            code => context.check("cuStreamQuery", code, || "copying".to_owned()),
        }
    }

    /// Uses each kind of operation once, and waits until all are complete. `host` is 8 bytes of registered memory that nobody else
    /// uses, which the device sees at `seen`; the bytes keep their values.
    pub(crate) fn warm_up(&self, seen: u64, host: *const u8) -> Result<()> {
        let context = &self.0.context;
        let doing = || "trying a queue of copies".to_owned();
        let mark = self.spare_mark()?;
        let _current = context.current()?;
        let mut memory = 0;
        // SAFETY: writes one address, which is freed below.
        context.check("cuMemAlloc", unsafe { (context.driver.cuMemAlloc_v2)(&mut memory, 64) }, doing)?;
        let tried = (|| {
            // SAFETY: eight bytes on either side, until the stream is synchronised; the words are aligned.
            unsafe {
                self.copy_rows(memory, host, 8)?;
                self.copy(seen, memory, 8)?;
                self.store(&[Store { dst: memory, value: 0 }])?;
            }
            self.mark_again(&mark)
        })();
        // SAFETY: our own stream.
        let code = unsafe { (context.driver.cuStreamSynchronize)(self.0.raw.0) };
        let ended = context.check("cuStreamSynchronize", code, doing);
        // SAFETY: allocated above; nothing uses it any more.
        let code = unsafe { (context.driver.cuMemFree_v2)(memory) };
        tried.and(ended).and(context.check("cuMemFree", code, doing))
    }

    /// A mark that [`CopyStream::mark_again`] places, and places again.
    pub(crate) fn spare_mark(&self) -> Result<CopyMark> {
        Event::new(&self.0.context, UNTIMED).map(CopyMark)
    }

    /// Places a mark after all copies that were added so far. Where the mark was before is forgotten.
    pub(crate) fn mark_again(&self, mark: &CopyMark) -> Result<()> {
        let _current = self.0.context.current()?;
        mark.0.record(self.0.raw.0)
    }

    /// Marks the point after all copies that were added so far, with its time.
    pub(crate) fn mark(&self) -> Result<CopyMark> {
        let mark = Event::new(&self.0.context, TIMED)?;
        let _current = self.0.context.current()?;
        mark.record(self.0.raw.0)?;
        Ok(CopyMark(mark))
    }

    /// Makes later copies wait for a mark of another stream, on this GPU or another.
    pub(crate) fn wait_for(&self, mark: &CopyMark) -> Result<()> {
        let context = &self.0.context;
        let wait = context.driver.cuStreamWaitEvent.ok_or_else(|| lacks("cuStreamWaitEvent"))?;
        let _current = context.current()?;
        // SAFETY: a stream of ours, and an event that lives as long as `mark`; the driver keeps what
        // it needs of the event.
        let code = unsafe { wait(self.0.raw.0, mark.0.raw.0, 0) };
        context.check("cuStreamWaitEvent", code, || "waiting for another stream".to_owned())
    }

    /// Makes what RDMA devices wrote visible to kernels ([`Context::flush_rdma_writes`]).
    pub(crate) fn flush_rdma_writes(&self) -> Result<()> {
        self.0.context.flush_rdma_writes()
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let Ok(_current) = self.0.context.current() else { return };
        // SAFETY: the stream is our own; it holds only copies, which end by themselves.
        let code = unsafe { (self.0.context.driver.cuStreamSynchronize)(self.0.raw.0) };
        self.0.context.note("cuStreamSynchronize", code, || "waiting for copies to end".to_owned());
    }
}

impl CopyMark {
    /// Whether all copies before the mark are complete. Never blocks.
    pub(crate) fn passed(&self) -> Result<bool> {
        let context = &self.0.context;
        let _current = context.current()?;
        match context.query(self.0.raw.0) {
            NOT_READY => Ok(false),
            code => context.check("cuEventQuery", code, || "copying".to_owned()).map(|()| true),
        }
    }

    /// The time from `earlier` to this mark ([`CopyStream::mark`]). Both must have been passed.
    pub(crate) fn since(&self, earlier: &CopyMark) -> Result<Duration> {
        self.0.since(&earlier.0, || "timing copies".to_owned())
    }
}
