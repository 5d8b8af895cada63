//! A context: one device, one engine, and the settings for both.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::kmod::KmodError;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::provider::{BarWindow, StagingWindow};
use pushgate_driver_shim::window::Window;
use pushgate_gpu_kernels::{
    Access, CudaCopy, DeviceBuffer, Executor, Launch, LoadedModule, Registration, Running, Source, Stream,
    choose_at,
};
use pushgate_proxy::counters::Counters;
use pushgate_proxy::engine::{Engine, EngineOptions};
use pushgate_proxy::idle::Wake;
use pushgate_proxy::link::verbs::Device;
use pushgate_proxy::mover::{MoveError, Mover};
use pushgate_proxy::proxy::Proxy;
use pushgate_proxy::remote::RemoteEngine;
use zerocopy::{Immutable, IntoBytes};

use crate::error::{Error, Result};
use crate::settings::{AutoOr, ProxyPlace, Settings, WindowKind};
use crate::watch::{Members, Watch};

/// Options for a new [`Context`].
#[derive(Clone, Debug, Default)]
pub struct ContextBuilder {
    settings: Option<Settings>,
    device_index: u32,
    engine_index: usize,
    engines: usize,
}

impl ContextBuilder {
    /// Uses these settings in place of those that [`Settings::load`] finds.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Chooses the GPU by its index, from 0. Has no effect on the CPU executor.
    pub fn device_index(mut self, index: u32) -> Self {
        self.device_index = index;
        self
    }

    /// Says that this context is number `index` of `of` contexts on this host, so that each context
    /// pins its proxy thread to a core of its own. Default: the only context.
    pub fn share(mut self, index: usize, of: usize) -> Self {
        (self.engine_index, self.engines) = (index, of);
        self
    }

    /// Opens the device and starts the engine, or joins the proxy process.
    pub fn build(self) -> Result<Context> {
        let settings = match self.settings {
            Some(s) => s,
            None => Settings::load()?,
        };
        // Before the settings open anything. Code that has a context need not check them again.
        settings.check()?;
        let (executor, why) = choose_at(settings.device, self.device_index)?;
        tracing::info!("{why}");
        let embedded = executor.load_embedded()?;
        let wake = if executor.name() == "cpu" { Wake::Doorbell } else { Wake::Polled };
        let members = Members::default();
        let mut watch = None;
        let (proxy, bell): (Arc<dyn Proxy>, Doorbell) = match settings.proxy {
            ProxyPlace::Thread => {
                let (cpu, alone) = core(settings.proxy_cpu, self.engine_index, self.engines.max(1));
                let mover = match executor.as_cuda() {
                    Some(cuda) => {
                        Some(Box::new(GpuMover { copy: CudaCopy::new(cuda)?, tickets: Vec::new() })
                            as Box<dyn Mover>)
                    }
                    None => None,
                };
                let bell = EventFd::new().map_err(Error::io("eventfd"))?;
                let theirs = bell.try_clone().map_err(Error::io("eventfd"))?;
                let engine =
                    Engine::start(theirs, EngineOptions { cpu, alone, mover, ..EngineOptions::default() })?;
                (Arc::new(engine), Doorbell::Thread(bell))
            }
            ProxyPlace::Process => {
                let remote = Arc::new(RemoteEngine::connect(&settings.proxy_socket, "pushgate")?);
                watch = Some(Watch::start(remote.fd(), members.clone())?);
                (remote.clone(), Doorbell::Process(remote))
            }
        };
        let rdma = Mutex::default();
        let owner = Owner::here();
        let inner = Inner {
            owner,
            _watch: watch,
            members,
            rdma,
            settings,
            executor,
            why,
            embedded,
            proxy,
            bell,
            wake,
        };
        Ok(Context { inner: Arc::new(inner) })
    }
}

/// A device with its engine. Cheap to clone; may be used from any thread.
///
/// A context and everything made with it work only in the process that built it. In a child of
/// `fork` calls fail with [`Error::Forked`], drops do nothing, and the parent's connections go on;
/// the child may build a context of its own (docs/operations.md).
#[derive(Clone)]
pub struct Context {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    owner: Owner,
    // Dropped first, because its thread writes to `members`.
    _watch: Option<Watch>,
    pub(crate) members: Members,
    rdma: Mutex<Option<Arc<Device>>>,
    pub(crate) settings: Settings,
    pub(crate) executor: Arc<dyn Executor>,
    why: String,
    embedded: Arc<dyn LoadedModule>,
    pub(crate) proxy: Arc<dyn Proxy>,
    pub(crate) bell: Doorbell,
    pub(crate) wake: Wake,
}

/// What this program's producers ring when they find the engine asleep.
pub(crate) enum Doorbell {
    /// The eventfd of an engine in this process.
    Thread(EventFd),
    /// The ringer of an engine in the proxy process.
    Process(Arc<RemoteEngine>),
}

impl Doorbell {
    /// The descriptor that a producer writes to ring the engine.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Doorbell::Thread(bell) => bell.as_fd(),
            Doorbell::Process(remote) => remote.ringer().as_fd(),
        }
    }
}

/// A set of loaded kernels.
#[derive(Clone)]
pub struct Module(pub(crate) Arc<dyn LoadedModule>);

impl Module {
    /// Loads a user's own kernels from a `.cu` file that includes "pushgate/device.cuh".
    ///
    /// The file is compiled for this context's device (NVRTC or nvcc for a GPU, the C++ compiler
    /// for the CPU) and cached. Load modules before starting the first kernel that waits for
    /// another kernel.
    pub fn from_source(context: &Context, source: &Source) -> Result<Self> {
        Ok(Module(context.inner.executor.load_source(source)?))
    }

    /// The kernels that come with this library (`gpu-kernels/kernels`).
    pub fn embedded(context: &Context) -> Self {
        Module(context.inner.embedded.clone())
    }

    /// Names of the kernels in this module.
    pub fn kernels(&self) -> Vec<String> {
        self.0.kernels()
    }
}

impl Context {
    /// Starts the options for a new context.
    pub fn builder() -> ContextBuilder {
        ContextBuilder::default()
    }

    /// Fails with [`Error::Forked`] in a child of the process that built this context.
    pub(crate) fn here(&self) -> Result<()> {
        Ok(self.inner.owner.check()?)
    }

    /// A sentence that says which executor was chosen and why.
    pub fn why(&self) -> &str {
        &self.inner.why
    }

    /// The kind of device: "cpu" or "cuda".
    pub fn device(&self) -> &'static str {
        self.inner.executor.name()
    }

    /// A description of the device for people.
    pub fn describe(&self) -> String {
        self.inner.executor.describe()
    }

    /// The settings that this context was made with.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Where the engine runs: "thread" or "process".
    pub fn proxy_place(&self) -> &'static str {
        self.inner.proxy.place()
    }

    /// Allocates zeroed device memory, which is freed on drop.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        Ok(self.inner.executor.alloc(bytes)?)
    }

    /// Allocates device memory and copies `data` into it.
    pub fn upload(&self, data: &(impl IntoBytes + Immutable + ?Sized)) -> Result<DeviceBuffer> {
        let bytes = data.as_bytes();
        let buffer = self.alloc(bytes.len().max(1))?;
        buffer.copy_from_host(bytes)?;
        Ok(buffer)
    }

    /// Makes a stream. Launches on one stream run one after the other.
    pub fn stream(&self) -> Result<Stream> {
        Ok(self.inner.executor.stream()?)
    }

    /// Starts a kernel with one struct of parameters and returns at once.
    ///
    /// # Safety
    /// Until the kernel has ended, every address among the parameters is valid for what the kernel
    /// does with it, and no other access races with the kernel's except through the device API.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        module: &Module,
        kernel: &str,
        launch: Launch,
        params: &(impl IntoBytes + Immutable),
    ) -> Result<Running> {
        // SAFETY: this function's caller promises what `Executor::launch` requires.
        Ok(unsafe { self.inner.executor.launch(stream, &module.0, kernel, launch, params.as_bytes())? })
    }

    /// How many blocks of a kernel can be resident at once.
    pub fn max_resident_blocks(&self, module: &Module, kernel: &str, block: u32, shared: u32) -> Result<u32> {
        self.here()?;
        Ok(self.inner.executor.max_resident_blocks(&module.0, kernel, block, shared)?)
    }

    /// Allocates host memory that device and host share, for benches and for hand-written protocols
    /// beside queue pairs.
    pub fn shared(&self, name: &str, bytes: usize) -> Result<Shared> {
        self.here()?;
        let memory = Arc::new(self.memory(name, bytes, false)?);
        let registration = self.register(&*memory, Access::ReadWrite)?;
        Ok(Shared { owner: Owner::here(), _registration: registration, memory })
    }

    /// Counters of this context's engine.
    pub fn counters(&self) -> Result<Counters> {
        self.here()?;
        Ok(self.inner.proxy.counters()?)
    }

    /// The RDMA device that the settings name; opened on the first call.
    pub(crate) fn rdma(&self) -> Result<Arc<Device>> {
        self.here()?;
        let mut rdma = self.inner.rdma.lock().unwrap_or_else(|e| e.into_inner());
        Ok(match &*rdma {
            Some(device) => device.clone(),
            None => rdma.insert(crate::qp::open_rdma(&self.inner.settings)?).clone(),
        })
    }

    pub(crate) fn memory(&self, name: &str, bytes: usize, window: bool) -> Result<SharedMemory> {
        Ok(self.try_memory(name, bytes, window)?)
    }

    pub(crate) fn try_memory(
        &self,
        name: &str,
        bytes: usize,
        window: bool,
    ) -> Result<SharedMemory, ShimError> {
        let settings = &self.inner.settings;
        let huge = if window { settings.huge_pages } else { HugePages::Never };
        let make = |node| SharedMemory::builder(name, bytes).huge_pages(huge).numa_node(node).create();
        Ok(match settings.numa_node {
            AutoOr::Is(node) => make(Some(node as u32))?,
            AutoOr::None => make(None)?,
            AutoOr::Auto => match self.inner.executor.as_cuda().and_then(|c| numa_node_of(c.pci_bus_id())) {
                // The node was detected, not set by the user: where a sandbox forbids binding to
                // it, go without.
                Some(node) => make(Some(node)).or_else(|_| make(None))?,
                None => make(None)?,
            },
        })
    }

    /// Allocates memory for payload from the window provider that the settings name.
    pub(crate) fn window(&self, name: &str, bytes: usize) -> Result<Arc<dyn Window>> {
        match self.inner.settings.window {
            WindowKind::Memory => {
                let window = self.memory(name, bytes, true)?;
                // This process has mapped the window; from here on a process that receives it can
                // only read.
                window.seal_against_writers()?;
                Ok(Arc::new(window))
            }
            kind => self.kernel_window(kind, name, bytes),
        }
    }

    /// Allocates memory for payload from the kernel module, under a name that no other area has
    /// ([`Window::name`]).
    fn kernel_window(&self, kind: WindowKind, name: &str, bytes: usize) -> Result<Arc<dyn Window>> {
        let settings = &self.inner.settings;
        let name = area_name(name)?;
        let path = settings.window_dev.to_str().filter(|p| *p != "auto");
        let ttl = settings.staging_ttl.as_millis() as u32;
        let made: std::result::Result<Arc<dyn Window>, KmodError> = match kind {
            WindowKind::Bar => BarWindow::open(path, &name, bytes).map(|w| Arc::new(w) as _),
            _ => StagingWindow::create(path, &name, bytes, ttl).map(|w| Arc::new(w) as _),
        };
        made.map_err(|why| Error::Window { kind: kind.to_string(), bytes, why })
    }

    /// Registers memory of this process with the device.
    pub(crate) fn register(&self, memory: &dyn Window, access: Access) -> Result<Registration> {
        Ok(self.inner.executor.register(memory.as_ptr(), memory.len(), access, memory.io_memory())?)
    }

    /// Registers another process's memory with the device for reading.
    pub(crate) fn register_read_only(&self, memory: &ReadOnlyMemory) -> Result<Registration> {
        Ok(self.inner.executor.register(memory.as_ptr(), memory.len(), Access::ReadOnly, false)?)
    }
}

/// Host memory that device and host share, made by [`Context::shared`].
pub struct Shared {
    owner: Owner,
    // Dropped first: the memory is unregistered before it is unmapped.
    _registration: Registration,
    memory: Arc<SharedMemory>,
}

impl Shared {
    /// The memory's address for kernels.
    pub fn device_addr(&self) -> u64 {
        self._registration.device_addr()
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never true: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// A pointer to the first byte, for raw access.
    ///
    /// A child of `fork` has no memory there: an access raises SIGSEGV.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.memory.as_ptr()
    }

    /// `n` 8-byte words from byte `offset`, as atomics.
    ///
    /// # Panics
    /// If the words do not lie within the memory, or in a child of `fork`, which does not have the
    /// memory.
    pub fn words(&self, offset: usize, n: usize) -> &[std::sync::atomic::AtomicU64] {
        self.owner.check().unwrap_or_else(|forked| panic!("{forked}"));
        self.memory.words(offset, n)
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }
}

/// The GPU's copy engine as the proxy's [`Mover`].
struct GpuMover {
    copy: CudaCopy,
    tickets: Vec<Option<pushgate_gpu_kernels::CopyTicket>>,
}

impl Mover for GpuMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        // SAFETY: the engine resolved both ranges in registered regions and in a window that stay
        // valid until the copy is done.
        let ticket = unsafe { self.copy.start(dst, src as *const u8, length) }
            .map_err(|e| MoveError { length, reason: e.to_string() })?;
        let free = self.tickets.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.tickets.push(None);
            self.tickets.len() - 1
        });
        self.tickets[at] = Some(ticket);
        Ok(at as u64)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        let slot = &mut self.tickets[ticket as usize];
        let ended = match slot {
            Some(t) => self.copy.done(t).map_err(|e| MoveError { length: 0, reason: e.to_string() })?,
            None => true,
        };
        if ended {
            *slot = None;
        }
        Ok(ended)
    }

    fn flush(&mut self) -> Result<(), MoveError> {
        self.copy.flush_rdma_writes().map_err(|e| MoveError { length: 0, reason: e.to_string() })
    }
}

/// Makes a name for an area of the kernel module that no other process chooses, on this host or in
/// a container.
///
/// The process number alone is not enough: containers repeat process numbers, and a killed
/// process's areas keep their names until `staging_ttl` has passed. The number is in the name for
/// people who read it.
fn area_name(name: &str) -> Result<String> {
    let mut random = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut random))
        .map_err(Error::io("a name for a staging area from /dev/urandom"))?;
    Ok(format!("{name}-{}-{:016x}", std::process::id(), u64::from_ne_bytes(random)))
}

/// The NUMA node of a PCI function, if the kernel knows it.
fn numa_node_of(bus_id: &str) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus_id.to_lowercase());
    std::fs::read_to_string(path).ok()?.trim().parse::<i32>().ok()?.try_into().ok()
}

/// Chooses the core for an engine, and whether the engine may spin there.
///
/// Engines take the last cores, one each, if at least three cores for each engine remain for the
/// rest.
fn core(setting: AutoOr<usize>, index: usize, engines: usize) -> (Option<usize>, bool) {
    let allowed = crate::effect::cores();
    let alone = allowed.len() >= 4 * engines;
    let cpu = match setting {
        AutoOr::Is(cpu) => Some(cpu),
        AutoOr::None => None,
        AutoOr::Auto => alone.then(|| allowed[allowed.len() - 1 - index % allowed.len()]),
    };
    (cpu, alone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Comm;

    #[test]
    fn areas_of_processes_with_one_number_have_different_names() {
        let names = [(); 3].map(|()| area_name("pushgate-window-16777214").unwrap());
        assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
        // The kernel module allows 63 characters, and a process number has up to seven digits.
        assert!(names.iter().all(|name| name.len() <= 63 - 7), "{names:?}");
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused_before_anything_is_opened() {
        let build = |name: &str, value: &str| {
            let mut settings = Settings::default();
            settings.set("device", "cpu").unwrap();
            settings.set(name, value).unwrap();
            Context::builder().settings(settings).build()
        };
        for (name, value, says) in [
            ("window", "bar", "invalid window `bar`: expected memory with qp = local"),
            ("rings", "window", "invalid rings `window`: expected host with window = memory"),
            ("rendezvous", "node0:7000", "invalid rendezvous `node0:7000`: expected none with qp = local"),
        ] {
            let e = build(name, value).err().expect(says).to_string();
            assert!(e.starts_with(says), "{e}");
        }
        assert_eq!(Comm::local(&build("slots", "64").unwrap(), 2).unwrap().len(), 2);
    }
}
