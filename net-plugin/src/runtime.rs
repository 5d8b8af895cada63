//! The running threads of a process, one set for all of its communicators: an engine for each GPU that a rank of this
//! process uses and each RDMA device that its connections go over, and more for connections over TCP ([`Lane`]), the watch of
//! connections, and what they were started with.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pushgate::settings::{AutoOr, DriveChoice, PluginSettings};
use pushgate_door::addresses::Places;
use pushgate_door::linger::Lingered;
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{HugePages, SharedMemory, SharedMemoryBuilder};
use pushgate_engine::engine::{Drive, Engine, EngineOptions, StallReport};
use pushgate_link::memory::Keep;
use pushgate_link_tcp::{Host, Readiness, Tuning};

use crate::error::{Code, Failure, Result};
use crate::gpu::{self, Gpu};
use crate::hosts::Hosts;
use crate::join::Role;
use crate::lane::Lane;
use crate::listening::listen_tcp;
use crate::loaded::Loaded;
use crate::log;
use crate::path::OverRdma;
use crate::ranks::Cores;
use crate::rdma::{self, Rdma};
use crate::watch::Watch;

/// The running threads and their state.
pub struct Runtime {
    // Dropped first, because its thread calls the engine.
    pub watch: Watch,
    lanes: Mutex<HashMap<Option<u32>, Lanes>>,
    /// Where `tcp` queue pairs meet their other ends, from the first one on.
    tcp: Mutex<Option<Arc<Host>>>,
    pub loaded: Arc<Loaded>,
    /// The RDMA devices of the hosts that this process has heard from.
    pub hosts: Hosts,
    pub lingered: Lingered,
    /// What ends with the runtime, for the runtime's owner.
    _keep: Keep,
    next_seed: AtomicU64,
}

/// The lanes of a GPU, or of all connections without one. Each is started when it is needed.
struct Lanes {
    /// For connections over `local`, and for those over TCP where NCCL's threads carry them.
    first: Option<Arc<Lane>>,
    /// For connections over RDMA, by the number of the device.
    verbs: HashMap<usize, Arc<Lane>>,
    /// For connections over TCP, which take the lanes in turn: a lane's thread copies through the kernel what its connections
    /// send and receive, so one alone would be as slow as one core.
    tcp: Vec<Option<Arc<Lane>>>,
    /// Connections over TCP that were given a lane: sending and receiving ends.
    given: [usize; 2],
    /// What is done with the GPU's memory over each RDMA device. Dropped before the GPU, because it holds some of the GPU's memory.
    rdma: Vec<Arc<OverRdma>>,
    gpu: Option<Arc<Gpu>>,
}

/// How many threads carry a GPU's connections over TCP; 0: NCCL's own do. With fewer than four cores NCCL's threads need them. The
/// threads of all ranks of a host take half of its cores at most.
fn tcp_threads(settings: &PluginSettings, cores: Cores) -> usize {
    match (settings.net_tcp_threads, settings.drive) {
        (AutoOr::Is(threads), _) => threads,
        (_, DriveChoice::Caller) => 0,
        _ => (cores.allowed / 4).min(cores.own / 2).min(8),
    }
}

/// The socket at which other hosts dial this process again when a connection broke, how long a connection may be gone, and
/// whether it is encrypted.
fn dialled_again(loaded: &Loaded) -> Option<(Vec<TcpListener>, Duration, bool)> {
    let recover = loaded.settings.recovery().filter(|_| loaded.reaches_others())?;
    match listen_tcp(loaded) {
        Ok(listener) => Some((listener, recover, loaded.settings.tls)),
        Err(e) => {
            tracing::warn!("sockets between hosts that break are not replaced: {e}");
            None
        }
    }
}

/// How long closing connections may wait for peers that have not received messages already reported as sent. A link that breaks is
/// replaced within the setting `recover`, or the connection ends, so they wait for longer than that. A peer whose program does not
/// call is moved on by a thread within 10 ms.
fn lingered(recover: Option<Duration>) -> Lingered {
    let all = Duration::from_secs(5);
    let noticed = Duration::from_secs(1);
    Lingered::new(recover.map_or(all, |recover| all.max(recover + noticed)), Duration::from_millis(50))
}

impl Runtime {
    /// Starts the threads. `keep` is dropped with the runtime.
    pub fn start(loaded: Arc<Loaded>, keep: Keep) -> Result<Self> {
        Ok(Runtime {
            watch: Watch::start(dialled_again(&loaded))?,
            lanes: Mutex::default(),
            tcp: Mutex::default(),
            lingered: lingered(loaded.settings.recovery()),
            hosts: Hosts::new(loaded.listed.as_ref()),
            loaded,
            _keep: keep,
            next_seed: AtomicU64::new(0),
        })
    }

    /// Opens the GPU that is current on this thread, if NCCL hands its memory over.
    pub fn open_gpu(&self) -> Result<()> {
        self.with_lanes(|_| Ok(()))
    }

    /// The lane for connections over `local` of the GPU that is current on this thread; started if needed.
    pub fn lane(&self) -> Result<Arc<Lane>> {
        self.with_lanes(|lanes| self.first(lanes))
    }

    /// The lane for connections over RDMA device `dev` of the GPU that is current on this thread; started if needed.
    pub fn verbs_lane(&self, dev: usize) -> Result<Arc<Lane>> {
        self.with_lanes(|lanes| match lanes.verbs.entry(dev) {
            Entry::Occupied(found) => Ok(found.get().clone()),
            Entry::Vacant(place) => {
                let over_rdma = lanes.rdma.get(dev).cloned();
                let lane =
                    self.start_lane(self.drive(), lanes.gpu.clone(), Some((self.device(dev)?, over_rdma)))?;
                Ok(place.insert(lane).clone())
            }
        })
    }

    /// A lane of its own for an RMA coll comm, for the GPU that is current on this thread, and for RDMA device `dev` if there are some.
    /// NCCL's thread that calls for the coll comm's progress drives it, and the lane's own thread does the coll comm's work while NCCL
    /// does not call.
    pub fn rma_lane(&self, dev: usize) -> Result<Arc<Lane>> {
        let device = (!self.loaded.rdma.is_empty()).then(|| self.device(dev)).transpose()?;
        let gpu = self.with_lanes(|lanes| Ok(lanes.gpu.clone()))?;
        self.start_lane(Drive::Caller, gpu, device.map(|device| (device, None)))
    }

    /// The lane for another connection over TCP of the GPU that is current on this thread; started if needed.
    ///
    /// NCCL makes a connection of each channel in turn, and short collectives take the first channels alone. So sending and receiving
    /// ends are dealt out from different lanes on: those of the first channels then lie on as many lanes as there are.
    pub fn tcp_lane(&self, role: Role) -> Result<Arc<Lane>> {
        let threads = tcp_threads(&self.loaded.settings, self.loaded.cores);
        self.with_lanes(|lanes| {
            if threads == 0 {
                return self.first(lanes);
            }
            let (given, first) = match role {
                Role::Send => (&mut lanes.given[0], 0),
                Role::Receive => (&mut lanes.given[1], threads / 2),
            };
            let at = (first + *given) % threads;
            lanes.tcp.resize(threads.max(lanes.tcp.len()), None);
            let lane = match &lanes.tcp[at] {
                Some(lane) => lane.clone(),
                None => {
                    lanes.tcp[at].insert(self.start_lane(Drive::Thread, lanes.gpu.clone(), None)?).clone()
                }
            };
            *given += 1;
            Ok(lane)
        })
    }

    /// RDMA device `dev`.
    fn device(&self, dev: usize) -> Result<Arc<Rdma>> {
        self.loaded.rdma.get(dev).cloned().ok_or_else(|| {
            Failure::new(Code::Argument, format!("RDMA device {dev} of {}", self.loaded.rdma.len()))
        })
    }

    fn first(&self, lanes: &mut Lanes) -> Result<Arc<Lane>> {
        if let Some(first) = &lanes.first {
            return Ok(first.clone());
        }
        Ok(lanes.first.insert(self.start_lane(self.drive(), lanes.gpu.clone(), None)?).clone())
    }

    /// What drives lanes that no setting gives a thread.
    fn drive(&self) -> Drive {
        match self.loaded.settings.drive {
            DriveChoice::Auto | DriveChoice::Caller => Drive::Caller,
            DriveChoice::Thread => Drive::Thread,
        }
    }

    /// Calls `with` for the lanes of the GPU that is current on this thread, which is opened if needed.
    fn with_lanes<T>(&self, with: impl FnOnce(&mut Lanes) -> Result<T>) -> Result<T> {
        let index = self.loaded.gpu.as_ref().and_then(|_| gpu::current());
        let mut all = self.lanes.lock().unwrap_or_else(|e| e.into_inner());
        let gpus = all.keys().filter(|of| of.is_some()).count();
        let lanes = match all.entry(index) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => {
                let lanes = self.lanes_of(index)?;
                self.loaded.under_way.serves(gpus + usize::from(index.is_some()));
                place.insert(lanes)
            }
        };
        with(lanes)
    }

    fn lanes_of(&self, index: Option<u32>) -> Result<Lanes> {
        let (gpu, rdma) = match (index, &self.loaded.gpu) {
            (Some(index), Some(first)) => {
                // The first GPU stays open for its own lanes if another GPU's are made first.
                let first = first.lock().unwrap_or_else(|e| e.into_inner()).take_if(|o| o.index == index);
                let opened = match first {
                    Some(first) => first,
                    None => self.loaded.another(index)?,
                };
                (Some(Arc::new(opened.gpu)), opened.rdma.into_iter().map(Arc::new).collect())
            }
            _ => (None, Vec::new()),
        };
        Ok(Lanes { first: None, verbs: HashMap::new(), tcp: Vec::new(), given: [0; 2], rdma, gpu })
    }

    fn start_lane(
        &self,
        drive: Drive,
        gpu: Option<Arc<Gpu>>,
        over: Option<(Arc<Rdma>, Option<Arc<OverRdma>>)>,
    ) -> Result<Arc<Lane>> {
        let bell = Arc::new(EventFd::new().map_err(Failure::system("eventfd"))?);
        let theirs = bell.try_clone().map_err(Failure::system("eventfd"))?;
        // NCCL posts a receive when it waits for a message.
        let stall_report = StallReport { after: self.loaded.settings.stall_report, receives: true };
        let options = EngineOptions {
            drive,
            // The engine spins longer before it sleeps where that takes no core from NCCL's threads.
            alone: self.loaded.cores.own >= 8,
            mover: gpu.as_ref().and_then(|gpu| gpu.mover()),
            stall_report,
            ..EngineOptions::default()
        };
        let engine = Arc::new(log::scoped(|| Engine::start(theirs, options))?);
        let readiness = Readiness::new().map_err(Failure::system("epoll"))?;
        let (device, over_rdma) = over.unzip();
        Ok(Arc::new(Lane { engine, drive, bell, readiness, device, over_rdma: over_rdma.flatten(), gpu }))
    }

    /// Where `tcp` queue pairs meet their other ends.
    pub fn tcp(&self) -> Result<Arc<Host>> {
        let at = self.loaded.at.as_ref().map_err(|why| Failure::new(Code::System, why.as_str()))?;
        let mut addresses = at.sockets();
        addresses.truncate(Places::MOST);
        let mut host = self.tcp.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(host) = &*host {
            return Ok(host.clone());
        }
        let s = &self.loaded.settings;
        let limit = s.path_timeout;
        let tuning = Tuning {
            path_timeout: (!limit.is_zero()).then_some(limit),
            io: s.tcp_io.into(),
            // NCCL's threads may drive, and there may be several engines.
            one_thread: false,
            tls: s.tls,
        };
        let opened = Host::open(&addresses, tuning).map_err(|e| Failure::new(Code::System, e.to_string()))?;
        Ok(host.insert(opened).clone())
    }

    /// Allocates memory for segments, windows and transports of a lane's connections.
    pub fn memory(
        &self,
        lane: &Lane,
        name: &str,
        bytes: usize,
        huge: HugePages,
    ) -> Result<SharedMemory, ShimError> {
        self.allocate(lane, name, bytes, |memory| memory.huge_pages(huge))
    }

    /// Allocates memory for a lane's connections: near the lane's RDMA device, if it has one, unless the settings name another place.
    pub fn allocate(
        &self,
        lane: &Lane,
        name: &str,
        bytes: usize,
        how: impl Fn(SharedMemoryBuilder) -> SharedMemoryBuilder,
    ) -> Result<SharedMemory, ShimError> {
        let setting = self.loaded.settings.numa_node;
        let near = lane.device.as_ref().and_then(|rdma| rdma.node);
        let on =
            |node| how(SharedMemory::builder(format!("pushgate-net-{name}"), bytes)).numa_node(node).create();
        let node = rdma::node(setting, near);
        match on(node) {
            // The node was found and not set: where a sandbox forbids binding to it, go without.
            Err(ShimError::Numa { .. }) if setting == AutoOr::Auto => on(None),
            made => made,
        }
    }

    /// The first tag of a queue pair's region keys.
    pub fn key_seed(&self) -> u32 {
        let n = self.next_seed.fetch_add(1, Ordering::Relaxed) as u32;
        std::process::id().wrapping_mul(2654435761) ^ n.wrapping_mul(0x9e37_79b9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_over_tcp_take_their_lanes_in_turn_and_without_threads_the_first_lane() {
        use Role::{Receive, Send};
        let lanes_of = |threads, roles: [Role; 5]| {
            let runtime = Runtime::of_a_test_with(1 << 16, |settings| settings.net_tcp_threads = threads);
            let lanes: Vec<_> =
                roles.iter().map(|role| Arc::as_ptr(&runtime.tcp_lane(*role).unwrap())).collect();
            let first = Arc::as_ptr(&runtime.lane().unwrap());
            lanes.iter().map(|lane| (*lane != first).then_some(*lane)).collect::<Vec<_>>()
        };
        for role in [Send, Receive] {
            let [a, b, c, d, e] = lanes_of(AutoOr::Is(2), [role; 5])[..] else { unreachable!() };
            assert!(a.is_some() && b.is_some() && a != b && [c, d, e] == [a, b, a]);
            assert_eq!(lanes_of(AutoOr::Is(0), [role; 5]), [None; 5]);
        }
        // Both ends of two channels, and a third one's.
        let [a, b, c, d, e] = lanes_of(AutoOr::Is(4), [Receive, Receive, Send, Send, Send])[..] else {
            unreachable!()
        };
        assert!(e == a && [a, b, c, d].iter().collect::<std::collections::HashSet<_>>().len() == 4);
    }

    #[test]
    fn with_few_cores_or_where_the_caller_is_to_drive_no_thread_is_started_for_tcp() {
        let of = |drive, threads, (allowed, ranks)| {
            let mut settings = PluginSettings::default();
            (settings.drive, settings.net_tcp_threads) = (drive, threads);
            tcp_threads(&settings, Cores::of(allowed, allowed, ranks))
        };
        let auto = [1, 3, 4, 16, 32, 256].map(|cores| of(DriveChoice::Auto, AutoOr::Auto, (cores, 1)));
        assert_eq!(auto, [0, 0, 1, 4, 8, 8]);
        let beside_others =
            [(32, 2), (64, 8), (16, 8), (8, 8)].map(|of_host| of(DriveChoice::Auto, AutoOr::Auto, of_host));
        assert_eq!(beside_others, [8, 4, 1, 0]);
        assert_eq!(of(DriveChoice::Caller, AutoOr::Auto, (32, 1)), 0);
        assert_eq!(of(DriveChoice::Caller, AutoOr::Is(2), (1, 1)), 2);
    }
}
