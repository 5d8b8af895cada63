//! Whether the RDMA device can register a GPU's memory, tried on some of our own, and what
//! a registration of NCCL's is made by.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pushgate_gpu_kernels::DeviceBuffer;
use pushgate_proxy::qp::verbs::{Device, Word};
use pushgate_proxy::region::Exported;

use crate::error::{Failure, Result};
use crate::gpu::Gpu;

/// Bytes that are tried: a page of any GPU's.
const BYTES: usize = 64 << 10;

/// How the RDMA device came to register the memory of a GPU.
pub struct Reach {
    memory: Arc<DeviceBuffer>,
    exported: Exported,
}

impl Reach {
    /// Tries, on the thread that has the GPU: by dma-buf, then by address. `Err` says why it
    /// can't be.
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
            // SAFETY: a buffer of ours, of which the export is.
            match unsafe { device.try_device_memory(memory.addr(), memory.len(), &exported) } {
                Ok(()) => return Ok(Ok(Reach { memory, exported })),
                Err(e) => why.push(e.to_string()),
            }
        }
        Ok(Err(why.join("; ")))
    }

    /// NCCL must hand over dma-bufs.
    pub fn by_dma_buf(&self) -> bool {
        matches!(self.exported, Exported::DmaBuf(..))
    }

    /// How, in words.
    pub fn describe(&self) -> &'static str {
        if self.by_dma_buf() { "registered by dma-buf" } else { "registered by its address" }
    }

    /// Memory of the GPU that may be read at any time.
    pub fn word(&self) -> Word {
        Word {
            address: self.memory.addr(),
            bytes: self.memory.len(),
            exported: self.exported.clone(),
            keep: self.memory.clone(),
        }
    }
}

/// Of memory that NCCL registers: with the dma-buf and the place in it that it hands over,
/// or with its address alone. NCCL closes its descriptor when the call returns.
pub fn exported(dma_buf: Option<(BorrowedFd<'_>, u64)>) -> Result<Exported> {
    Ok(match dma_buf {
        None => Exported::Address,
        Some((fd, offset)) => {
            let own = fd.as_fd().try_clone_to_owned().map_err(Failure::system("a dma-buf's descriptor"))?;
            Exported::DmaBuf(Arc::new(own), offset)
        }
    })
}
