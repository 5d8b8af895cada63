//! The kernel that copies pages (`kernels/pages.cu`), on a stream of its own in the primary context.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;

use super::copy_stream::CopyMark;
use super::driver::Raw;
use super::event::{Event, UNTIMED};
use super::executor::CudaExecutor;
use super::module::CudaModule;
use super::stream::CudaStream;
use crate::error::Result;
use crate::executor::{Access, Executor, Launch, Registration};
use cudarc::driver::sys::CUfunction;

/// Warps of a launch: few enough for the kernels of a program beside it, and enough to fill the bus. Measured on H200 (PCIe 5 x16).
const BLOCKS: u32 = 16;
const THREADS: u32 = 256;

/// An entry of the kernel's list, as pages.cu has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct PiecesEntry {
    /// Where the bytes go.
    pub dst: u64,
    /// Where they are.
    pub src: u64,
    /// How many, [`PageKernel::LONGEST`] at most.
    pub bytes: u64,
}

/// A list that the kernel reads.
pub(crate) struct PiecesTable {
    // Dropped before the memory.
    registration: Registration,
    memory: SharedMemory,
}

/// The kernel, loaded.
pub(crate) struct PageKernel {
    // Dropped first: its end waits for nothing, and the driver keeps what it needs.
    stream: CudaStream,
    function: Raw<CUfunction>,
    _module: Arc<CudaModule>,
}

impl PageKernel {
    /// The longest entry of a list.
    pub(crate) const LONGEST: u64 = 4096;
    /// The most entries of a list.
    pub(crate) const MOST: usize = 4096;

    /// Loads the kernel, which is compiled first where the program was built without its image.
    pub(crate) fn new(cuda: &CudaExecutor) -> Result<PageKernel> {
        let module = cuda.load_kernels_of("pages.cu")?;
        let _current = cuda.context().current()?;
        let function = Raw(module.find("copy_pages")?.raw.0);
        let stream = CudaStream::new(cuda.context(), true)?;
        Ok(PageKernel { stream, function, _module: module })
    }

    /// Makes a list for launches of this GPU.
    pub(crate) fn table(cuda: &CudaExecutor) -> Result<PiecesTable> {
        let bytes = Self::MOST * size_of::<PiecesEntry>();
        let memory = SharedMemory::builder("pushgate-pages", bytes).create()?;
        let registration = cuda.register(memory.as_ptr(), bytes, Access::ReadWrite, false)?;
        Ok(PiecesTable { registration, memory })
    }

    /// A mark for [`PageKernel::start`].
    pub(crate) fn mark(&self) -> Result<CopyMark> {
        Event::new(&self.stream.context, UNTIMED).map(CopyMark)
    }

    /// Starts a launch that copies `entries`, at most [`PageKernel::MOST`], and places the mark after it.
    ///
    /// # Safety
    /// The GPU can read and write what the entries name until the mark was seen passed, and no other launch uses the table until then.
    pub(crate) unsafe fn start(
        &self,
        entries: &[PiecesEntry],
        table: &PiecesTable,
        mark: &CopyMark,
    ) -> Result<()> {
        assert!(entries.len() <= Self::MOST);
        let context = &self.stream.context;
        // SAFETY: the table has room, asserted above, is aligned to pages, and is this call's alone by the caller's promise.
        unsafe {
            let to = table.memory.as_ptr().cast::<PiecesEntry>().as_ptr();
            std::ptr::copy_nonoverlapping(entries.as_ptr(), to, entries.len());
        }
        let params: Vec<u8> = [table.registration.device_addr(), entries.len() as u64]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        let per_block = (THREADS / 32) as usize;
        let blocks = (entries.len().div_ceil(per_block) as u32).clamp(1, BLOCKS);
        let _current = context.current()?;
        // The launch makes what the CPU stored in the table visible to the kernel.
        // SAFETY: function and stream are of this context; the parameters are the kernel's; the caller's promise for the rest.
        let code = unsafe {
            context.start(self.function.0, self.stream.raw.0, Launch::new(blocks, THREADS), &params)
        };
        context.check("cuLaunchKernel", code, || format!("copying {} pieces", entries.len()))?;
        mark.0.record(self.stream.raw.0)
    }
}
