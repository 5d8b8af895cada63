//! Device memory for RDMA devices that write into it: exporting it as a dma-buf, and making such writes
//! visible to kernels (P3, data before signal; `rdma` decides how).

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    CUflushGPUDirectRDMAWritesScope_enum as Scope, CUflushGPUDirectRDMAWritesTarget_enum as Target,
    CUmemRangeHandleType_enum as HandleType,
};

use super::context::Context;
use super::rdma::Visibility;
use crate::error::{DeviceError, Result};
use crate::executor::DmaBuf;

/// The whole pages around `bytes` from `addr`: their start, their length, and the offset of `addr`
/// in them.
fn pages(addr: u64, bytes: usize, page: u64) -> (u64, usize, u64) {
    let start = addr & !(page - 1);
    let end = (addr + bytes as u64).next_multiple_of(page);
    (start, (end - start) as usize, addr - start)
}

impl Context {
    /// Exports a range of device memory as a dma-buf ([`crate::DeviceBuffer::export`]).
    pub(super) fn export(&self, addr: u64, bytes: usize) -> Result<Option<DmaBuf>> {
        let Some(export) = self.driver.cuMemGetHandleForAddressRange.filter(|_| self.rdma.dma_buf) else {
            return Ok(None);
        };
        // Without a way to make writes visible, refuse: the payload is then copied instead of seen
        // too early.
        if bytes == 0 || self.rdma.visibility() == Visibility::Never {
            return Ok(None);
        }
        let _current = self.current()?;
        let (start, length, offset) = pages(addr, bytes, rustix::param::page_size() as u64);
        let mut fd: c_int = -1;
        let kind = HandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: for this type of handle the driver writes one int. It checks the range against
        // its own allocations.
        let code = unsafe { export((&raw mut fd).cast(), start, length, kind, 0) };
        let doing = || format!("exporting {length} bytes at {start:#x} as a dma-buf");
        self.check("cuMemGetHandleForAddressRange", code, doing)?;
        // SAFETY: a new descriptor, which the driver hands over to the caller.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Programs that this process starts must not inherit the GPU's memory.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|e| DeviceError::Io {
            what: "closing on exec",
            path: "a dma-buf".into(),
            source: e.into(),
        })?;
        Ok(Some(DmaBuf { fd, offset }))
    }

    /// Makes what RDMA devices have written into this GPU's memory visible to its kernels.
    pub(super) fn flush_rdma_writes(&self) -> Result<()> {
        match self.rdma.visibility() {
            Visibility::Ordered => Ok(()),
            Visibility::Flush => self.flush_by_call(),
            // Such memory is never exported, so no device can have written.
            Visibility::Never => Err(self.cannot_flush()),
        }
    }

    fn flush_by_call(&self) -> Result<()> {
        let flush = self.driver.cuFlushGPUDirectRDMAWrites.ok_or_else(|| self.cannot_flush())?;
        // The flush concerns the context that is current, and on an engine's thread none is.
        let _current = self.current()?;
        // SAFETY: takes two numbers; the context that it concerns is current.
        let code = unsafe {
            flush(
                Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
        };
        self.check("cuFlushGPUDirectRDMAWrites", code, || "making RDMA writes visible".to_owned())
    }

    fn cannot_flush(&self) -> DeviceError {
        DeviceError::UnfitDevice {
            index: self.index,
            name: self.name.clone(),
            what: "it neither orders nor flushes what RDMA devices write".to_owned(),
            remedy: "register shared memory in place of a buffer",
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{CudaCopy, CudaExecutor, Executor};

    #[test]
    fn an_export_is_of_whole_pages_around_the_buffer() {
        assert_eq!(pages(0x20_0000, 4096, 4096), (0x20_0000, 4096, 0));
        assert_eq!(pages(0x20_0200, 1, 4096), (0x20_0000, 4096, 0x200));
        assert_eq!(pages(0x20_0e00, 0x400, 4096), (0x20_0000, 8192, 0xe00));
        assert_eq!(pages(0x20_0e00, 1 << 30, 65536), (0x20_0000, (1 << 30) + 65536, 0xe00));
    }

    /// Times the driver's own flush, whether or not the flush is needed on this GPU.
    pub(in super::super) fn timed_flush(executor: &CudaExecutor) -> (Result<()>, Duration) {
        let start = Instant::now();
        (executor.context().flush_by_call(), start.elapsed())
    }

    /// Needs a GPU.
    #[test]
    fn on_a_gpu_buffers_are_exported_and_writes_flushed() {
        const NAME: &str = "on_a_gpu_buffers_are_exported_and_writes_flushed";
        let executor = match CudaExecutor::new(0) {
            Err(DeviceError::CudaUnavailable { reason }) => return crate::cuda::tests::no_gpu(NAME, &reason),
            opened => opened.unwrap(),
        };
        let rdma = executor.context().rdma;
        println!("{}: {rdma:?}: {:?}", executor.describe(), rdma.visibility());
        let copies = CudaCopy::new(&executor).unwrap();
        println!("flush as the engine asks for it: {:?}", copies.flush_rdma_writes());
        assert_eq!(copies.flush_rdma_writes().is_ok(), rdma.visibility() != Visibility::Never);
        for _ in 0..3 {
            println!("flush by the driver: {:?}", timed_flush(&executor));
        }
        // From a thread without a context, and beside another thread's.
        let elsewhere = std::thread::scope(|s| s.spawn(|| timed_flush(&executor)).join().unwrap());
        println!("flush by the driver on a new thread: {elsewhere:?}");

        // Small buffers share a page of the driver's and may begin anywhere in it.
        let sizes = [1, 64, 100, 4096, 4097, 65536, 1 << 20, (2 << 20) + 5, 64 << 20];
        let buffers: Vec<_> = sizes.iter().map(|size| executor.alloc(*size).unwrap()).collect();
        for buffer in &buffers {
            let dma_buf = match buffer.export() {
                Ok(None) => {
                    assert!(!rdma.dma_buf || rdma.visibility() == Visibility::Never);
                    return pushgate_tests::skip("no GPU here exports its memory as a dma-buf");
                }
                exported => exported.unwrap().unwrap(),
            };
            use std::os::fd::AsRawFd;
            let link = std::fs::read_link(format!("/proc/self/fd/{}", dma_buf.fd.as_raw_fd()));
            let size = rustix::fs::seek(&dma_buf.fd, rustix::fs::SeekFrom::End(0));
            println!("{buffer:?}: offset {:#x}, {size:?} bytes, {link:?}", dma_buf.offset);
            assert_eq!(dma_buf.offset, buffer.addr() % rustix::param::page_size() as u64);
            // A sandbox may hide what a descriptor refers to.
            if let Ok(size) = size {
                assert!(size >= dma_buf.offset + buffer.len() as u64);
            }
            let flags = rustix::io::fcntl_getfd(&dma_buf.fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        assert!(executor.alloc(0).unwrap().export().unwrap().is_none());
    }
}
