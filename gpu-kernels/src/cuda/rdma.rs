//! Decides when kernels may read what an RDMA device wrote into the GPU's memory (P3, data before
//! signal).

use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering_enum as WritesOrdering, CUdevice_attribute_enum as Attribute,
    CUflushGPUDirectRDMAWritesOptions_enum as Options,
};

use super::driver::Driver;

/// What the driver reports about a GPU's memory and other devices' access to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rdma {
    /// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED is set.
    pub(super) supported: bool,
    /// CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED is set and the driver has the call.
    pub(super) dma_buf: bool,
    /// The value of CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING.
    ordering: u32,
    /// The value of CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS; 0 if the driver lacks
    /// the call.
    options: u32,
}

/// What must happen between an RDMA device's write and our signal, so that a kernel that sees the
/// signal also sees the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Nothing: the GPU sees such writes in order by itself.
    Ordered,
    /// A flush of the writes.
    Flush,
    /// Nothing would suffice.
    Never,
}

impl Rdma {
    pub(super) fn ask(driver: &Driver, attribute: impl Fn(Attribute) -> u32) -> Self {
        let dma_buf = attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0;
        let options = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
        Rdma {
            supported: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0,
            dma_buf: dma_buf && driver.cuMemGetHandleForAddressRange.is_some(),
            ordering: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
            options: if driver.cuFlushGPUDirectRDMAWrites.is_some() { options } else { 0 },
        }
    }

    /// Decides how writes become visible (P3); this is the only place that decides.
    ///
    /// CUDA Driver API, "Event Management", cuFlushGPUDirectRDMAWrites: the call blocks until
    /// remote writes are visible to the scope, and "can be safely omitted" where the scope lies
    /// within WRITES_ORDERING, by comparing the numbers. Our scope is the owner: the kernels of the
    /// GPU that has the memory. The bit HOST of FLUSH_WRITES_OPTIONS says whether the call is
    /// supported.
    ///
    /// For GPUs whose memory can be reached by several paths, that page leaves the choice of the
    /// path (CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE) to the user. This code exports by the one
    /// default path.
    pub(super) fn visibility(&self) -> Visibility {
        if self.ordering >= WritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32 {
            Visibility::Ordered
        } else if self.options & Options::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as u32 != 0 {
            Visibility::Flush
        } else {
            Visibility::Never
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p3_memory_is_ordered_or_flushed_or_not_exported() {
        let of = |ordering, options| Rdma { supported: true, dma_buf: true, ordering, options }.visibility();
        assert_eq!(of(200, 0), Visibility::Ordered);
        assert_eq!(of(100, 1), Visibility::Ordered);
        assert_eq!(of(0, 1), Visibility::Flush);
        assert_eq!(of(0, 3), Visibility::Flush);
        // This GPU flushes only by operations on a stream, which the engine can't use.
        assert_eq!(of(0, 2), Visibility::Never);
        assert_eq!(of(0, 0), Visibility::Never);
    }
}
