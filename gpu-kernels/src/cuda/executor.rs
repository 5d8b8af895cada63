//! [`CudaExecutor`]: the trait [`Executor`] over the other files of this folder.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute_enum as Attribute};
use pushgate_driver_shim::fork::OwnedHere;

use super::buffer::CudaBuffer;
use super::compile;
use super::context::Context;
use super::driver::{self, SUCCESS};
use super::event::{Event, TIMED};
use super::host_range::CudaHostRange;
use super::launch::CudaRunning;
use super::ledger::Active;
use super::module::CudaModule;
use super::peer;
use super::stream::CudaStream;
use crate::build_support::kernel_names;
use crate::cache::Cache;
use crate::embedded::{FATBINS, SOURCES};
use crate::error::{DeviceError, Result};
use crate::executor::{Access, DeviceBuffer, Executor, Launch, LoadedModule, Registration, Running, Stream};
use crate::image::Image;
use crate::lock::lock;
use crate::source::Source;

/// What the executors of one GPU share.
struct Device {
    context: Arc<Context>,
    embedded: Mutex<Option<Arc<CudaModule>>>,
    /// The context for copies that nothing of the program holds up, as long as somebody uses it.
    beside: Mutex<Weak<Context>>,
}

static DEVICES: Mutex<Vec<(u32, Weak<Device>)>> = Mutex::new(Vec::new());

/// An executor that runs kernels on an NVIDIA GPU.
///
/// Executors of one GPU in one process share its context, the embedded kernels and the account of
/// resident blocks.
pub struct CudaExecutor {
    device: Arc<Device>,
}

/// The index of the GPU whose context is current on this thread, if CUDA is in use in this process.
/// Does not initialise CUDA.
pub fn current_device() -> Option<u32> {
    let (driver, _) = driver::driver().ok()?;
    let mut device = 0;
    // SAFETY: writes one int, or returns an error where no context is current.
    let code = unsafe { driver.cuCtxGetDevice?(&mut device) };
    (code == SUCCESS).then(|| u32::try_from(device).ok()).flatten()
}

impl CudaExecutor {
    /// Opens a GPU by its index among those that the process sees.
    pub fn new(device_index: u32) -> Result<Self> {
        let mut devices = lock(&DEVICES);
        devices.retain(|(_, device)| device.strong_count() > 0);
        let open =
            devices.iter().find(|(index, _)| *index == device_index).and_then(|(_, device)| device.upgrade());
        if let Some(device) = open {
            return Ok(Self { device });
        }
        let context = Arc::new(Context::open(device_index)?);
        let device =
            Arc::new(Device { context, embedded: Mutex::new(None), beside: Mutex::new(Weak::new()) });
        devices.push((device_index, Arc::downgrade(&device)));
        Ok(Self { device })
    }

    /// The GPU's PCI address, such as "0000:3b:00.0".
    pub fn pci_bus_id(&self) -> &str {
        &self.device.context.pci
    }

    /// Whether the driver says that the GPU has GPUDirect RDMA (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED). GeForce cards and GB10
    /// have none.
    pub fn has_gpu_direct_rdma(&self) -> bool {
        self.device.context.rdma.supported
    }

    /// The GPU's name, as NVIDIA gives it.
    pub fn device_name(&self) -> &str {
        &self.device.context.name
    }

    /// The GPU's compute capability: 90 for sm_90.
    pub fn sm(&self) -> u32 {
        self.device.context.sm
    }

    /// Lets kernels of this GPU load from and store to the memory of `other` from now on. False if
    /// the two GPUs can't.
    pub fn reach(&self, other: &CudaExecutor) -> Result<bool> {
        peer::reach(self.context(), other.context())
    }

    /// The context of this executor's GPU.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.device.context
    }

    /// Registers host memory with a context of this executor's GPU, which is the primary one or [`CudaExecutor::beside`].
    fn register_with(
        context: &Arc<Context>,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
        io_memory: bool,
    ) -> Result<Registration> {
        if access == Access::ReadOnly && !context.read_only {
            return Err(DeviceError::ReadOnlyUnsupported {
                index: context.index,
                name: context.name.clone(),
                addr: ptr.as_ptr() as usize,
                len,
            });
        }
        let _current = context.current()?;
        let range = CudaHostRange::register(context, ptr, len, access, io_memory)?;
        Ok(Registration::new(range.device_addr()?, len, Box::new(range)))
    }

    /// Registers host memory for queues of copies alone ([`crate::OrderedCopies`]): nothing that the program does with CUDA holds
    /// up the call.
    pub(crate) fn register_beside(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Registration> {
        Self::register_with(&self.beside()?, ptr, len, access, false)
    }

    /// Another context of this executor's GPU ([`Context::beside`]). All that is made here at one time is the same one.
    pub(crate) fn beside(&self) -> Result<Arc<Context>> {
        let mut beside = lock(&self.device.beside);
        if let Some(context) = beside.upgrade() {
            return Ok(context);
        }
        let context = Arc::new(self.context().beside()?);
        *beside = Arc::downgrade(&context);
        Ok(context)
    }

    /// Whether every byte of a range is memory of this GPU, as far as its two ends say.
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        let context = self.context();
        let (Some(ask), Ok(_current)) = (context.driver.cuPointerGetAttribute, context.current()) else {
            return false;
        };
        let attribute = |which: Attribute, at: u64| {
            let mut value = 0u32;
            // SAFETY: both attributes are of 32 bits; the driver looks the address up.
            let code = unsafe { ask((&raw mut value).cast(), which, at) };
            (code == SUCCESS).then_some(value)
        };
        let of_device = CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
        [address, address.saturating_add(bytes.saturating_sub(1))].into_iter().all(|at| {
            attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == Some(of_device)
                && attribute(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) == Some(context.index)
        })
    }

    fn compile(&self, sources: &[Source]) -> Result<Vec<(String, Vec<u8>)>> {
        let cache = Cache::open()?;
        let arch = self.context().sm;
        sources
            .iter()
            .map(|source| Ok((source.name().to_owned(), compile::cubin(source, arch, &cache)?)))
            .collect()
    }

    /// Loads the kernels of one of the project's own sources.
    pub(super) fn load_kernels_of(&self, file: &str) -> Result<Arc<CudaModule>> {
        self.load_project_kernels(|name| name == file)
    }

    /// Loads the kernels of those of the project's own sources that `wanted` says.
    fn load_project_kernels(&self, wanted: impl Fn(&str) -> bool) -> Result<Arc<CudaModule>> {
        let sources = || SOURCES.iter().filter(|(name, _)| wanted(name));
        let known: Vec<String> = sources().flat_map(|(_, text)| kernel_names(text)).collect();
        let context = self.context();
        let load = |images: &[(String, Vec<u8>)]| CudaModule::load(context, "embedded", images, &known, true);
        let compile = || {
            let sources: Vec<Source> = sources().map(|(name, text)| Source::text(*name, *text)).collect();
            load(&self.compile(&sources)?)
        };
        if FATBINS.is_empty() {
            return compile();
        }
        let images: Vec<(String, Vec<u8>)> = FATBINS
            .iter()
            .filter(|(name, _)| wanted(name))
            .map(|(name, image)| (format!("{name} (fatbin)"), image.to_vec()))
            .collect();
        load(&images).or_else(|error| {
            // The image was built for other GPUs, or by an nvcc newer than the driver.
            tracing::warn!("{error}; compiling the kernels for this device instead");
            compile().map_err(|second| {
                tracing::warn!("{second}");
                error
            })
        })
    }

    /// The module as this executor's own; an error for a module of another executor.
    pub(super) fn module<'a>(&self, module: &'a Arc<dyn LoadedModule>) -> Result<&'a CudaModule> {
        module
            .as_any()
            .downcast_ref::<CudaModule>()
            .filter(|module| Arc::ptr_eq(&module.context, self.context()))
            .ok_or(DeviceError::Foreign { handle: "module", executor: "cuda" })
    }
}

impl dyn Executor + '_ {
    /// The CUDA executor if this is one, for calls that only a GPU has.
    pub fn as_cuda(&self) -> Option<&CudaExecutor> {
        self.as_any().downcast_ref()
    }
}

impl fmt::Debug for CudaExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaExecutor({})", self.describe())
    }
}

impl Executor for CudaExecutor {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn describe(&self) -> String {
        let Context { index, name, sm, processors, pci, version, .. } = &**self.context();
        format!(
            "device {index}: {name}, sm_{sm}, {processors} SMs, PCI {pci}, driver for CUDA {}.{}",
            version.0, version.1
        )
    }

    fn device_index(&self) -> u32 {
        self.context().index
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>> {
        let mut embedded = lock(&self.device.embedded);
        if let Some(module) = &*embedded {
            return Ok(module.clone());
        }
        let module = self.load_project_kernels(|_| true)?;
        *embedded = Some(module.clone());
        Ok(module)
    }

    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>> {
        let images = self.compile(std::slice::from_ref(source))?;
        Ok(CudaModule::load(self.context(), source.name(), &images, &source.kernels(), false)?)
    }

    fn load_image(&self, image: &Image) -> Result<Arc<dyn LoadedModule>> {
        let context = self.context();
        image.check_gpu(context.sm)?;
        let images = [(image.name().to_owned(), image.contents().to_vec())];
        Ok(CudaModule::load(context, image.name(), &images, image.kernels(), false)?)
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        let memory = CudaBuffer::new(self.context(), bytes)?;
        Ok(DeviceBuffer::new(memory.addr, bytes, Box::new(memory)))
    }

    fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
        io_memory: bool,
    ) -> Result<Registration> {
        Self::register_with(self.context(), ptr, len, access, io_memory)
    }

    fn stream(&self) -> Result<Stream> {
        Ok(Stream::new(CudaStream::new(self.context(), false)?))
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        launch: Launch,
        params: &[u8],
    ) -> Result<Running> {
        let context = self.context();
        let queue = stream
            .queue::<CudaStream>()
            .filter(|queue| Arc::ptr_eq(&queue.context, context))
            .ok_or(DeviceError::Foreign { handle: "stream", executor: "cuda" })?;
        let loaded = self.module(module)?;
        let _current = context.current()?;
        let function = loaded.find(kernel)?;
        if let Some(expected) = function.params
            && params.len() != expected as usize
        {
            return Err(DeviceError::ParamsSize {
                kernel: kernel.to_owned(),
                given: params.len(),
                expected: expected as usize,
            });
        }
        launch.check(kernel, context.max_shared)?;
        loaded.allow_shared(kernel, &function, launch.shared_bytes)?;
        let resident = match launch.cooperating {
            true => Some(loaded.resident_blocks(kernel, &function, launch.block, launch.shared_bytes)?),
            false => None,
        };
        let (start, end) = (Event::new(context, TIMED)?, Event::new(context, TIMED)?);
        let what = format!("kernel `{kernel}` of {} ({launch:?})", loaded.name());

        // The lock is held from counting the resident blocks until the launch, so that no other
        // launch comes between.
        let mut ledger = lock(&context.ledger);
        context.sweep(&mut ledger);
        let share = match resident {
            Some(resident) => ledger.share(kernel, launch, resident)?,
            None => 0,
        };
        start.record(queue.raw.0)?;
        // SAFETY: function and stream belong to the current context; the caller promises that the
        // addresses in the parameters are valid.
        let code = unsafe { context.start(function.raw.0, queue.raw.0, launch, params) };
        context.check("cuLaunchKernel", code, || format!("launching {what}"))?;
        end.record(queue.raw.0)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let blocks = if launch.cooperating { launch.grid } else { 0 };
        ledger.active.push(Active { id, end: end.raw, share, blocks });
        drop(ledger);
        Ok(Running(OwnedHere::new(Box::new(CudaRunning {
            id,
            what,
            start,
            end,
            _stream: stream.clone(),
            _module: module.clone(),
        }))))
    }

    fn max_resident_blocks(
        &self,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let loaded = self.module(module)?;
        let _current = self.context().current()?;
        let function = loaded.find(kernel)?;
        Launch::new(1, block).shared_bytes(shared_bytes).check(kernel, self.context().max_shared)?;
        loaded.resident_blocks(kernel, &function, block, shared_bytes)
    }
}
