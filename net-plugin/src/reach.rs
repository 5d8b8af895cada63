//! Tries whether the RDMA device can register a GPU's memory, on a piece of our own, and says how a
//! registration of NCCL's is made.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pushgate_gpu_kernels::DeviceBuffer;
use pushgate_proxy::link::verbs::{Device, Word};
use pushgate_proxy::region::Exported;

use crate::error::{Failure, Result};
use crate::gpu::Gpu;

/// How many bytes are tried: a page of any GPU.
const BYTES: usize = 64 << 10;

/// How the RDMA device registered the memory of a GPU.
pub struct Reach {
    memory: Arc<DeviceBuffer>,
    exported: Exported,
}

impl Reach {
    /// Tries to register, on the thread on which the GPU is current: by dma-buf, then by address.
    /// The inner `Err` says why neither works.
    pub fn of(gpu: &Gpu, device: &Arc<Device>) -> Result<Result<Reach, String>> {
        let memory = Arc::new(gpu.memory(BYTES)?);
        let mut why = Vec::new();
        let dma_buf = match memory.export() {
            Ok(Some(d)) => Some(Exported::DmaBuf(Arc::new(d.fd), d.offset)),
            Ok(None) => {
                why.push("the GPU's driver exports no dma-buf".to_owned());
                None
            }
            Err(e) => {
                why.push(e.to_string());
                None
            }
        };
        for exported in dma_buf.into_iter().chain([Exported::Address]) {
            // SAFETY: a buffer of ours; the export is of that buffer.
            match unsafe { device.try_device_memory(memory.addr(), memory.len(), &exported) } {
                Ok(()) => return Ok(Ok(Reach { memory, exported })),
                Err(e) => why.push(e.to_string()),
            }
        }
        Ok(Err(why.join("; ")))
    }

    /// Whether NCCL must hand over dma-bufs.
    pub fn by_dma_buf(&self) -> bool {
        matches!(self.exported, Exported::DmaBuf(..))
    }

    /// How the memory was registered, in words.
    pub fn describe(&self) -> &'static str {
        if self.by_dma_buf() { "registered by dma-buf" } else { "registered by its address" }
    }

    /// A word of the GPU's memory that may be read at any time.
    pub fn word(&self) -> Word {
        Word {
            address: self.memory.addr(),
            bytes: self.memory.len(),
            exported: self.exported.clone(),
            keep: self.memory.clone(),
        }
    }
}

/// The export for memory that NCCL registers: with the dma-buf and the offset that NCCL hands over,
/// or with the address alone. NCCL closes its descriptor when the call returns.
pub fn exported(dma_buf: Option<(BorrowedFd<'_>, u64)>) -> Result<Exported> {
    Ok(match dma_buf {
        None => Exported::Address,
        Some((fd, offset)) => {
            let own = fd.as_fd().try_clone_to_owned().map_err(Failure::system("a dma-buf's descriptor"))?;
            Exported::DmaBuf(Arc::new(own), offset)
        }
    })
}
