//! Device memory: allocating, zeroing, copying and freeing beside kernels that run.

use std::sync::Arc;

use super::context::Context;
use super::driver::SUCCESS;
use crate::error::Result;
use crate::executor::{BufferMemory, DmaBuf};
use crate::lock::lock;

/// A range of device memory, freed on drop as soon as nothing runs.
pub(super) struct CudaBuffer {
    context: Arc<Context>,
    pub(super) addr: u64,
}

impl CudaBuffer {
    /// Allocates zeroed memory.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.current()?;
        let mut addr = 0;
        // At least one word, so that an empty buffer has an address too.
        // SAFETY: writes one address.
        let code = unsafe { (context.driver.cuMemAlloc_v2)(&mut addr, bytes.max(16)) };
        context.check("cuMemAlloc", code, || format!("allocating {bytes} bytes"))?;
        let buffer = Self { context: context.clone(), addr };
        buffer.zero(bytes)?;
        Ok(buffer)
    }

    fn zero(&self, bytes: usize) -> Result<()> {
        let driver = self.context.driver;
        let stream = self.context.copies.0;
        let doing = || format!("zeroing {bytes} bytes at {:#x}", self.addr);
        let mut ledger = lock(&self.context.ledger);
        self.context.sweep(&mut ledger);
        if ledger.is_quiet() {
            if bytes > 0 {
                // SAFETY: memory of this buffer, of that length.
                let code = unsafe { (driver.cuMemsetD8Async)(self.addr, 0, bytes, stream) };
                self.context.check("cuMemsetD8Async", code, doing)?;
            }
            drop(ledger);
        } else {
            drop(ledger);
            // A fill is a kernel and would wait for room among the running kernels; a copy needs no
            // room.
            let zeros = vec![0u8; bytes.min(1 << 20)];
            for offset in (0..bytes).step_by(1 << 20) {
                let len = (bytes - offset).min(1 << 20);
                let to = self.addr + offset as u64;
                // SAFETY: the destination lies within this buffer; the zeros outlive the wait
                // below.
                let code = unsafe { (driver.cuMemcpyHtoDAsync_v2)(to, zeros.as_ptr().cast(), len, stream) };
                if code != SUCCESS {
                    // Copies that were started still read `zeros`.
                    let _ = self.context.finish_copies(doing);
                    return self.context.check("cuMemcpyHtoDAsync", code, doing);
                }
            }
            return self.context.finish_copies(doing);
        }
        self.context.finish_copies(doing)
    }
}

impl BufferMemory for CudaBuffer {
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.context.current()?;
        let to = self.addr + offset as u64;
        let doing = || format!("copying {} bytes to {to:#x}", from.len());
        // SAFETY: DeviceBuffer has checked the range, and `from` is borrowed past the wait below.
        let code = unsafe {
            (self.context.driver.cuMemcpyHtoDAsync_v2)(
                to,
                from.as_ptr().cast(),
                from.len(),
                self.context.copies.0,
            )
        };
        self.context.check("cuMemcpyHtoDAsync", code, doing)?;
        self.context.finish_copies(doing)
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let _current = self.context.current()?;
        let from = self.addr + offset as u64;
        let len = to.len();
        let doing = || format!("copying {len} bytes from {from:#x}");
        // SAFETY: DeviceBuffer has checked the range, and `to` is borrowed past the wait below.
        let code = unsafe {
            (self.context.driver.cuMemcpyDtoHAsync_v2)(
                to.as_mut_ptr().cast(),
                from,
                len,
                self.context.copies.0,
            )
        };
        self.context.check("cuMemcpyDtoHAsync", code, doing)?;
        self.context.finish_copies(doing)
    }

    fn export(&self, bytes: usize) -> Result<Option<DmaBuf>> {
        self.context.export(self.addr, bytes)
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let mut ledger = lock(&self.context.ledger);
        ledger.freed.push(self.addr);
        if let Ok(_current) = self.context.current() {
            self.context.sweep(&mut ledger);
        }
    }
}
