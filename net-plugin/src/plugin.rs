//! What a process has once: its settings, its engine, the watch of its connections.
//!
//! The threads run as long as a context or a connection needs them. (Contexts came
//! with v11 of the interface; before, NCCL never says that it is done.) A seam: one
//! engine for each GPU would be chosen in [`Runtime::engine`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pushgate::settings::{AutoOr, ProxyPlace, QpKind, WindowKind};
use pushgate::{Error, Settings};
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_proxy::engine::{Engine, EngineOptions};
use pushgate_proxy::qp::verbs::Device;

use crate::error::{Code, Failure, Result};
use crate::handshake::Connecting;
use crate::log;
use crate::props::Properties;
use crate::watch::Watch;

/// What the first init has read.
pub struct Loaded {
    pub settings: Settings,
    pub rdma: Option<Arc<Device>>,
    properties: &'static Properties,
}

/// The threads, and what goes with them.
pub struct Runtime {
    // Dropped first: its thread asks the engine.
    pub watch: Watch,
    engine: Arc<Engine>,
    pub bell: EventFd,
    pub loaded: Arc<Loaded>,
    /// Connections that are not there yet, by the mark in their handles.
    pub connecting: Mutex<HashMap<u64, Connecting>>,
    pub next_mark: AtomicU64,
    next_seed: AtomicU64,
}

/// One of NCCL's communicators.
pub struct Context {
    pub traffic_class: Option<u8>,
    _runtime: Arc<Runtime>,
}

#[derive(Default)]
struct Process {
    loaded: Option<Arc<Loaded>>,
    runtime: Weak<Runtime>,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { loaded: None, runtime: Weak::new() });

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(|e| e.into_inner())
}

/// Reads the settings, unless something that was made by them is in use.
pub fn load() -> Result<()> {
    let mut process = process();
    if process.runtime.strong_count() == 0 {
        // Not those of before, should these be wrong.
        process.loaded = None;
        process.loaded = Some(Arc::new(Loaded::new()?));
    }
    Ok(())
}

/// The same, for a communicator, with the threads that it needs.
pub fn open(traffic_class: Option<u8>) -> Result<Context> {
    load()?;
    Ok(Context { traffic_class, _runtime: running()? })
}

/// Ends a context; the last one, with no connection open, joins all threads.
pub fn close(context: Context) {
    drop(context);
    let mut process = process();
    if process.runtime.strong_count() == 0 {
        // With it the RDMA device.
        process.loaded = None;
    }
}

/// What getProperties says.
pub fn properties() -> Result<&'static Properties> {
    Ok(loaded(&process())?.properties)
}

fn loaded(process: &Process) -> Result<&Arc<Loaded>> {
    process.loaded.as_ref().ok_or_else(|| {
        Failure::new(Code::Internal, "called before init, or after one that failed: call init first")
    })
}

/// The running threads, started if need be.
pub fn running() -> Result<Arc<Runtime>> {
    let mut process = process();
    if let Some(runtime) = process.runtime.upgrade() {
        return Ok(runtime);
    }
    let runtime = Arc::new(Runtime::start(loaded(&process)?.clone())?);
    process.runtime = Arc::downgrade(&runtime);
    Ok(runtime)
}

impl Loaded {
    fn new() -> Result<Self> {
        let settings = Settings::load()?;
        settings.check()?;
        if settings.proxy == ProxyPlace::Process {
            return Err(refused("proxy", "process", "thread"));
        }
        if settings.window != WindowKind::Memory {
            return Err(refused("window", &settings.window.to_string(), "memory"));
        }
        static LOCAL: OnceLock<Properties> = OnceLock::new();
        let (rdma, properties) = match settings.qp {
            QpKind::Verbs => {
                let name = (settings.ib_dev != "auto").then_some(settings.ib_dev.as_str());
                let device = Device::open(name, settings.ib_port as u8)?;
                // NCCL keeps the strings for ever; a process opens few devices.
                let properties = &*Box::leak(Box::new(Properties::of(&device)));
                (Some(device), properties)
            }
            _ => (None, LOCAL.get_or_init(Properties::local)),
        };
        log::info(&match &rdma {
            Some(device) => format!(
                "queue pairs are verbs: {} port {}, {} Mbit/s; host pointers; window of {} bytes a connection",
                device.name(),
                device.port(),
                properties.speed,
                settings.net_window_size
            ),
            None => format!(
                "queue pairs are local: ranks of this host only; host pointers; window of {} bytes a connection",
                settings.net_window_size
            ),
        });
        Ok(Loaded { settings, rdma, properties })
    }
}

impl Runtime {
    fn start(loaded: Arc<Loaded>) -> Result<Self> {
        let bell = EventFd::new().map_err(Failure::system("eventfd"))?;
        let theirs = bell.try_clone().map_err(Failure::system("eventfd"))?;
        // It spins longer before it sleeps where that takes no core from NCCL's threads.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let options = EngineOptions { cpu: None, alone: cores >= 8, mover: None };
        let engine = Arc::new(log::scoped(|| Engine::start(theirs, options))?);
        Ok(Runtime {
            watch: Watch::start(engine.clone())?,
            engine,
            bell,
            loaded,
            connecting: Mutex::default(),
            next_mark: AtomicU64::new(1),
            next_seed: AtomicU64::new(0),
        })
    }

    /// The engine for a connection.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Memory for segments, windows and transports.
    pub fn memory(&self, name: &str, bytes: usize, huge: HugePages) -> Result<SharedMemory, ShimError> {
        let node = match self.loaded.settings.numa_node {
            AutoOr::Is(node) => Some(node as u32),
            _ => None,
        };
        SharedMemory::builder(format!("pushgate-net-{name}"), bytes).huge_pages(huge).numa_node(node).create()
    }

    /// Where the tags of a queue pair's region keys begin.
    pub fn key_seed(&self) -> u32 {
        let n = self.next_seed.fetch_add(1, Ordering::Relaxed) as u32;
        std::process::id().wrapping_mul(2654435761) ^ n.wrapping_mul(0x9e37_79b9)
    }
}

fn refused(name: &str, value: &str, allowed: &str) -> Failure {
    let allowed = format!("{allowed} in the NCCL plugin");
    Error::Config { name: name.into(), value: value.into(), allowed }.into()
}
