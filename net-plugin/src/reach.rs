//! Tries whether the RDMA device can register a GPU's memory, on a piece of our own, and says how a
//! registration of NCCL's is made.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pushgate_gpu_kernels::DeviceBuffer;
use pushgate_link::region::Exported;
use pushgate_link_verbs::{Device, Word};

use crate::error::Failure;
use crate::gpu::Gpu;

/// How many bytes are tried: a page of any GPU.
const BYTES: usize = 64 << 10;

/// Memory of a GPU on which registrations are tried.
#[derive(Clone)]
pub struct Sample(Arc<DeviceBuffer>);

impl Sample {
    /// Allocates it, on the thread on which the GPU is current.
    pub fn of(gpu: &Gpu) -> crate::error::Result<Sample> {
        Ok(Sample(Arc::new(gpu.memory(BYTES)?)))
    }
}

/// How the RDMA device registered the memory of a GPU.
pub struct Reach {
    memory: Arc<DeviceBuffer>,
    exported: Exported,
}

impl Reach {
    /// Tries to register, on the thread on which the GPU is current: by dma-buf, then by address.
    /// The `Err` says why neither works.
    pub fn of(Sample(memory): &Sample, device: &Arc<Device>) -> Result<Reach, String> {
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
                Ok(()) => return Ok(Reach { memory: memory.clone(), exported }),
                Err(e) => why.push(e.to_string()),
            }
        }
        Err(why.join("; "))
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
pub fn exported(dma_buf: Option<(BorrowedFd<'_>, u64)>) -> crate::error::Result<Exported> {
    Ok(match dma_buf {
        None => Exported::Address,
        Some((fd, offset)) => {
            let own = fd.as_fd().try_clone_to_owned().map_err(Failure::system("a dma-buf's descriptor"))?;
            Exported::DmaBuf(Arc::new(own), offset)
        }
    })
}
