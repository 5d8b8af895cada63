//! A context: one device, one engine, and the settings for both.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::placed::Placed;
use pushgate_driver_shim::window::Window;
use pushgate_engine::counters::Counters;
use pushgate_engine::idle::{Step, Wake};
use pushgate_engine::proxy::Proxy;
use pushgate_gpu_kernels::{
    Access, DeviceBuffer, Executor, Image, Launch, LoadedModule, Registration, Running, Source, Stream,
    WaitOutcome, choose_at, probe,
};
use pushgate_link_tcp::{Host, Meeting, Readiness, Tuning};
use pushgate_link_verbs::Device;
use zerocopy::{Immutable, IntoBytes};

use crate::engine::{self, Doorbell, Started};
use crate::error::{Error, Result};
use crate::host_memory::HostMemory;
use crate::mesh::{Fabric, May};
use crate::ranks::{Listeners, Membership};
use crate::settings::{DeviceChoice, DriveChoice, Settings, Transport};
use crate::shared::Shared;
use crate::watch::Watch;
use crate::{placement, rdma};

/// Options for a new [`Context`].
#[derive(Clone, Debug, Default)]
pub struct ContextBuilder {
    settings: Option<Settings>,
    device_index: u32,
    /// The number of this context among those of the host, and how many they are.
    share: Option<(usize, usize)>,
    /// Where the launcher says that ranks of several hosts meet.
    rendezvous: Option<String>,
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
    /// pins its proxy thread to a core of its own. Default: not known. Then no thread is pinned, because another program's thread
    /// may be pinned to the same core, and two threads that spin on one core wait for each other.
    pub fn share(mut self, index: usize, of: usize) -> Self {
        self.share = Some((index, of));
        self
    }

    /// Chooses the GPU and the core of the proxy thread by this rank's number among the ranks of its host. With more ranks
    /// than GPUs several ranks share one. Where the launcher says that ranks of several hosts meet, the setting `rendezvous`
    /// says so too.
    pub fn for_rank(mut self, membership: &Membership) -> Self {
        let is_cpu = self.settings.as_ref().is_some_and(|s| s.device == DeviceChoice::Cpu);
        // Without a driver there is no GPU to choose, and an error of it comes with `build`.
        let devices = if is_cpu { 0 } else { probe().map_or(0, |found| found.devices) };
        self.rendezvous = membership.rendezvous.clone();
        // Where the launcher does not say which rank of the host this is, others may be here too.
        let known = membership.local_rank.zip(membership.local_size);
        self.share = known.map(|(index, of)| (index as usize, of as usize));
        self.device_index(membership.device_index(devices))
    }

    /// Opens the device and starts the engine, or joins the proxy process.
    pub fn build(self) -> Result<Context> {
        let mut settings = match self.settings {
            Some(s) => s,
            None => Settings::load()?,
        };
        if let Some(place) = self.rendezvous.filter(|_| settings.rendezvous == "none") {
            settings.rendezvous = place;
        }
        // Before the settings open anything. Code that has a context need not check them again.
        settings.check()?;
        let (executor, why) = choose_at(settings.device, self.device_index)?;
        tracing::info!("{why}");
        let embedded = executor.load_embedded()?;
        let wake = if executor.name() == "cpu" { Wake::Doorbell } else { Wake::Polled };
        let Started { proxy, bell, watch } = engine::start(&settings, &executor, self.share)?;
        let inner = Inner {
            owner: Owner::here(),
            _watch: watch,
            rdma: Mutex::default(),
            tcp: Mutex::default(),
            readiness: Mutex::default(),
            listeners: Listeners::default(),
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
/// `fork` calls fail with [`Error::Forked`](crate::Error::Forked), drops do nothing, and the parent's connections go on;
/// the child may build a context of its own (docs/operations.md).
#[derive(Clone)]
pub struct Context {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    owner: Owner,
    // Dropped first: its thread has the engine too.
    _watch: Option<Watch>,
    rdma: Mutex<Option<Vec<Arc<Device>>>>,
    /// Where queue pairs over TCP meet their peers, by the address at which they listen.
    tcp: Mutex<BTreeMap<SocketAddr, Arc<Host>>>,
    /// Which of their streams can go on; made for the first one.
    readiness: Mutex<Option<Arc<Readiness>>>,
    /// The sockets of unique ids that rank 0 has not joined with yet.
    pub(crate) listeners: Listeners,
    pub(crate) settings: Settings,
    pub(crate) executor: Arc<dyn Executor>,
    why: String,
    embedded: Arc<dyn LoadedModule>,
    pub(crate) proxy: Arc<dyn Proxy>,
    pub(crate) bell: Doorbell,
    pub(crate) wake: Wake,
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

    /// Loads kernels that were compiled before: a cubin, a fatbin or PTX for a GPU, a shared library for the device `cpu`.
    ///
    /// An image for other devices is refused with what it is for. Load modules before starting the first kernel that waits for
    /// another kernel.
    pub fn from_image(context: &Context, image: &Image) -> Result<Self> {
        Ok(Module(context.inner.executor.load_image(image)?))
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

    /// Starts a kernel with one struct of parameters, or its bytes, and returns at once.
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
        params: &(impl IntoBytes + Immutable + ?Sized),
    ) -> Result<Running> {
        // SAFETY: this function's caller promises what `Executor::launch` requires.
        Ok(unsafe { self.inner.executor.launch(stream, &module.0, kernel, launch, params.as_bytes())? })
    }

    /// Makes a pass over the queue pairs, where this program drives the engine (`drive = caller`); else nothing is to be
    /// done. Call this in every loop that waits for something of a queue pair. While no thread calls it for some
    /// milliseconds, a thread of the engine stands in.
    pub fn drive(&self) -> Result<Step> {
        self.here()?;
        Ok(self.inner.proxy.drive()?)
    }

    /// Makes a pass as [`Context::drive`] does, and waits for work if there is none: at first not at all, later until a peer or
    /// another thread of this program has some, or for `limit`. For the one thread that serves queue pairs of a program which drives
    /// the engine; it calls this in a loop. Another thread's [`Context::drive`] ends the wait. With any other setting of `drive` the
    /// call sleeps for `limit`.
    pub fn rest(&self, limit: Duration) -> Result<()> {
        self.here()?;
        Ok(self.inner.proxy.rest(limit)?)
    }

    /// Waits for a kernel as [`Running::wait`] does, and drives the engine meanwhile, where this program is to
    /// (`drive = caller`).
    pub fn wait(&self, running: &Running, timeout: Option<Duration>) -> Result<WaitOutcome> {
        if self.inner.settings.drive != DriveChoice::Caller {
            let begin = Instant::now();
            loop {
                let left = timeout.map_or(interrupt::LOOK, |timeout| timeout.saturating_sub(begin.elapsed()));
                match running.wait(Some(left.min(interrupt::LOOK)))? {
                    WaitOutcome::TimedOut if left > interrupt::LOOK || timeout.is_none() => {
                        interrupt::check()?
                    }
                    ended => return Ok(ended),
                }
            }
        }
        // A question to the GPU's driver costs about as much as this number of passes without work.
        const PASSES: u32 = 32;
        let (begin, mut asked) = (Instant::now(), interrupt::Now::begin());
        loop {
            asked.check()?;
            for _ in 0..PASSES {
                match self.drive()? {
                    Step::Spin => std::hint::spin_loop(),
                    _ => std::thread::yield_now(),
                }
            }
            if running.is_done()? {
                // Answers as the wait does, with the kernel's error if there was one.
                return Ok(running.wait(Some(Duration::ZERO))?);
            }
            if timeout.is_some_and(|timeout| begin.elapsed() >= timeout) {
                return Ok(WaitOutcome::TimedOut);
            }
        }
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
        Ok(Shared::new(memory, registration))
    }

    /// Makes host memory that the program allocated itself accessible to kernels. [`QueuePair::register_host`](crate::QueuePair::register_host)
    /// then lets a peer put into it.
    ///
    /// On a GPU this locks the memory's pages, which count toward `ulimit -l`. The same memory may be registered several times.
    ///
    /// # Errors
    /// Where `bytes` is 0 or the range leaves the address space, or the device refuses the memory.
    ///
    /// # Safety
    /// The `bytes` at `at` stay mapped, readable and writable until the [`HostMemory`] is dropped, and no Rust reference to
    /// them lives while a kernel or a peer accesses them.
    pub unsafe fn register_host(&self, at: NonNull<u8>, bytes: usize) -> Result<HostMemory> {
        self.here()?;
        if bytes == 0 || (at.as_ptr() as usize).checked_add(bytes).is_none() {
            return Err(Error::config("bytes", bytes, "1 or more, within the address space"));
        }
        let registration = self.inner.executor.register(at, bytes, Access::ReadWrite, false)?;
        Ok(HostMemory::new(registration, at))
    }

    /// Counters of this context's engine.
    pub fn counters(&self) -> Result<Counters> {
        self.here()?;
        Ok(self.inner.proxy.counters()?)
    }

    /// The names of the RDMA devices of this context's queue pairs over `verbs`, in the order of their links. The first call opens
    /// them, as the setting `ib-dev` says.
    ///
    /// # Errors
    /// Where there is no such device, or the port of the only one is not active; in a child of `fork`.
    pub fn rdma_devices(&self) -> Result<Vec<String>> {
        Ok(self.rdma()?.iter().map(|device| device.name().into()).collect())
    }

    /// The RDMA devices that the settings name, one at least; opened on the first call.
    pub(crate) fn rdma(&self) -> Result<Vec<Arc<Device>>> {
        self.here()?;
        let mut rdma = self.inner.rdma.lock().unwrap_or_else(|e| e.into_inner());
        Ok(match &*rdma {
            Some(devices) => devices.clone(),
            None => rdma.insert(rdma::open(&self.inner.settings, &*self.inner.executor)?).clone(),
        })
    }

    /// The transport of queue pairs between ranks of this host that have not agreed on one: what the settings say.
    pub(crate) fn transport_here(&self) -> Transport {
        // Settings with which nothing goes were refused when the context was built.
        self.settings().transports().first().copied().unwrap_or(Transport::Local)
    }

    /// What queue pairs with ranks that are met at a rendezvous may be. `hosts`: their launcher or their unique id names it.
    pub(crate) fn may(&self, hosts: bool) -> Result<May> {
        let s = self.settings();
        let transports = s.transports_between(hosts);
        let verbs = match transports.contains(&Transport::Verbs) {
            false => Err("qp, window or proxy here allow none".to_owned()),
            true => match self.rdma() {
                Ok(devices) if devices.iter().all(|device| device.is_ethernet()) => Ok(Fabric::Ethernet),
                Ok(_) => Ok(Fabric::Infiniband),
                // What was asked for must be there.
                Err(e) if transports == [Transport::Verbs] || s.ib_dev != "auto" => return Err(e),
                Err(e) => Err(e.to_string()),
            },
        };
        Ok(May {
            local: transports.contains(&Transport::Local),
            folder: s.folder()?,
            verbs,
            tcp: transports.contains(&Transport::Tcp),
        })
    }

    /// How a queue pair over TCP meets its peer: at `address`, where this process listens from the first call for that address
    /// on. `dials`: this end dials.
    pub(crate) fn tcp(&self, address: SocketAddr, dials: bool) -> Result<Box<dyn Meeting>> {
        self.here()?;
        let mut readiness = self.inner.readiness.lock().unwrap_or_else(|e| e.into_inner());
        let readiness = match &*readiness {
            Some(readiness) => readiness,
            None => readiness.insert(Readiness::new().map_err(Error::io("epoll"))?),
        };
        let mut hosts = self.inner.tcp.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(host) = hosts.get(&address) {
            return Ok(host.meeting(dials, readiness));
        }
        let s = &self.inner.settings;
        let tuning = Tuning {
            path_timeout: (!s.path_timeout.is_zero()).then_some(s.path_timeout),
            io: s.tcp_io.into(),
            one_thread: s.drive != DriveChoice::Caller,
            tls: s.tls,
        };
        let host = Host::open(&[address], tuning).map_err(|e| Error::Tcp(e.to_string()))?;
        hosts.insert(address, host.clone());
        Ok(host.meeting(dials, readiness))
    }

    /// Allocates host memory that this process shares with others. `payload`: in huge pages, where the settings allow
    /// them.
    pub(crate) fn memory(&self, name: &str, bytes: usize, payload: bool) -> Result<SharedMemory, ShimError> {
        placement::memory(&self.inner.settings, &self.inner.executor, name, bytes, payload)
    }

    /// Allocates memory for payload from the window provider that the settings name.
    pub(crate) fn window(&self, name: &str, bytes: usize) -> Result<Arc<dyn Window>> {
        placement::window(&self.inner.settings, &self.inner.executor, name, bytes)
    }

    /// Registers memory of this process with the device.
    pub(crate) fn register(&self, memory: &dyn Window, access: Access) -> Result<Registration> {
        Ok(self.inner.executor.register(memory.as_ptr(), memory.len(), access, memory.io_memory())?)
    }

    /// Registers the parts of a window with the device, all at once: where pages are larger than the ABI's, parts share pages,
    /// and a driver registers a page once. Returns the device addresses of payload, work and control.
    pub(crate) fn register_placed(&self, placed: &Placed) -> Result<(Registration, [u64; 3])> {
        let registration = self.register(&placed.whole(), Access::ReadWrite)?;
        let whole = registration.device_addr();
        let at = [&placed.payload, &placed.work, &placed.control];
        Ok((registration, at.map(|part| whole + (part.begin() - placed.control.begin()) as u64)))
    }

    /// Registers another process's memory with the device for reading.
    pub(crate) fn register_read_only(&self, memory: &ReadOnlyMemory) -> Result<Registration> {
        Ok(self.inner.executor.register(memory.as_ptr(), memory.len(), Access::ReadOnly, false)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Comm;

    #[test]
    fn settings_that_do_not_go_together_are_refused_before_anything_is_opened() {
        let build = |name: &str, value: &str| {
            let mut settings = Settings::default();
            settings.set("device", "cpu").unwrap();
            settings.set(name, value).unwrap();
            Context::builder().settings(settings).build()
        };
        for (name, value, says) in [
            ("window", "bar", "invalid window `bar`: expected memory or staging with qp = local"),
            ("rings", "window", "invalid rings `window`: expected host with window = memory"),
        ] {
            let e = build(name, value).err().expect(says).to_string();
            assert!(e.starts_with(says), "{e}");
        }
        assert_eq!(Comm::local(&build("slots", "64").unwrap(), 2).unwrap().len(), 2);
    }
}
