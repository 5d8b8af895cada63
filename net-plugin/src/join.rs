//! One end of a connection's queue pair: its memory, and how it is joined to the
//! other's. The sending end is rank 0 of the queue pair, the receiving end rank 1.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushgate::settings::{CqEvents, NetPath};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_gpu_kernels::Registration;
use pushgate_proxy::endpoint::{Endpoint, QpOptions};
use pushgate_proxy::engine::QpId;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::memory::Keep;
use pushgate_proxy::offer::LocalOffer;
use pushgate_proxy::producer::Producer;
use pushgate_proxy::proxy::{Proxy, QpFds};
use pushgate_proxy::qp::verbs::{self, Accepted, Config, Flusher, Places};
use pushgate_proxy::receives::PostedReceives;
use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure, Result};
use crate::path::OverRdma;
use crate::plan::{Landing, Out, Plan};
use crate::plugin::{Lane, Runtime};
use crate::props::MAX_BYTES;
use crate::socket::Frame;

/// Receives that NCCL may have out on a connection: 32 of 8 buffers each.
pub const RECEIVES_LOG: u32 = 8;
/// WQEs of a sending end. NCCL has at most 32 requests of its own for each of the 8
/// buffers of a receive; the rest is for slices.
pub const SLOTS_LOG: u32 = 9;

/// An hour: our own producer publishes what it takes.
const STUCK_NS: u64 = 3_600_000_000_000;

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Send,
    Receive,
}

impl Role {
    fn rank(self) -> u32 {
        (self == Role::Receive) as u32
    }
}

/// What one end tells the other first.
#[derive(Serialize, Deserialize)]
pub enum Offer {
    /// The descriptors are those of the offer; of a receiving end its work segment comes behind them.
    Local {
        offer: LocalOffer,
        /// Its buffers may lie in a GPU, which pulls out of windows alone.
        gpu: bool,
    },
    Verbs {
        offer: verbs::Offer,
        /// Where messages for its GPU arrive, if it has one: those that arrive in host memory
        /// must come by way of the window.
        landing: Option<Landing>,
    },
}

/// Memory that the GPU sees.
pub type Registered = (Registration, Keep);

struct Own {
    lane: Arc<Lane>,
    role: Role,
    geometry: Geometry,
    window: Arc<SharedMemory>,
    work: Arc<SharedMemory>,
    control: Arc<SharedMemory>,
}

/// This end, before the other is known.
pub struct Half {
    own: Own,
    link: Link,
}

enum Link {
    Local {
        link: Arc<SharedMemory>,
        /// What the other end rings, and it alone, if our engine sleeps; and what it rings that by.
        bells: Option<(Bell, Ringer)>,
    },
    Verbs(Box<(verbs::Half, Config)>),
}

/// An end that an engine drives.
pub struct Joined {
    pub qp: QpId,
    pub producer: Producer,
    pub geometry: Geometry,
    pub lane: Arc<Lane>,
    /// Where the GPU sees our window, on a sending end whose messages it may push.
    pub window: Option<u64>,
    /// Whether messages may go out of registered memory; `None`: the engine must be asked.
    pub regions: Option<bool>,
    /// Whether a short payload may go in its record.
    pub in_record: bool,
    /// Longest message of the queue pair.
    pub longest: usize,
    /// The RDMA device is used on the GPU's memory.
    pub reaches: bool,
    /// What makes its writes there complete, on a receiving end that reaches.
    pub flusher: Option<Flusher>,
    /// What the peer has posted, on a sending end.
    pub receives: Option<PostedReceives>,
    /// What the GPU sees of both ends' memory, each with that memory: it goes behind.
    pub registrations: Vec<Registered>,
}

/// What became of a half when the other end's offer was there.
pub enum Taken {
    Joined(Box<Joined>),
    /// The peer must be told these places, and tells its own.
    Exchange(Box<Exchange>, Places),
}

/// An end over RDMA that waits for the other's places.
pub struct Exchange {
    own: Own,
    accepted: Accepted,
    config: Config,
    /// As its offer said.
    peer_landing: Option<Landing>,
    reaches: bool,
}

/// Where the peer's payload is read here.
enum PeerWindow<'a> {
    /// Its window itself.
    Shared(&'a Arc<ReadOnlyMemory>),
    /// Our copy of it, which its RDMA device writes.
    Mirror(&'a Arc<SharedMemory>),
}

fn refused(why: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("the other end's offer of a connection: {why}"))
}

impl Own {
    fn new(runtime: &Runtime, role: Role) -> Result<Self> {
        let settings = &runtime.loaded.settings;
        // A receiving end answers with a few words inline.
        let (window, slots_log, rx_log) = match role {
            Role::Send => (settings.net_window_size, SLOTS_LOG, 4),
            Role::Receive => (abi::PUSHGATE_PAGE as u64, 4, RECEIVES_LOG),
        };
        let geometry = Geometry {
            window_log: window.trailing_zeros() - abi::PUSHGATE_UNIT_LOG,
            slots_log,
            // Requests end with the credit that their slot gives back: no CQE says more.
            cq_log: 0,
            rx_log,
            link_log: slots_log,
            landing_log: 0,
            signals: crate::large::SIGNALS,
            rank: role.rank(),
        };
        let lane = runtime.lane()?;
        let window = Arc::new(runtime.memory("window", geometry.window_bytes(), settings.huge_pages)?);
        let work = segment(runtime, &geometry, Segment::Work)?;
        // As for a link segment, in `Half::new`.
        window.seal_against_writers()?;
        work.seal_against_writers()?;
        Ok(Own {
            lane,
            role,
            window,
            work,
            control: segment(runtime, &geometry, Segment::Control)?,
            geometry,
        })
    }

    fn options(&self, runtime: &Runtime) -> QpOptions {
        QpOptions {
            peer: 1 - self.role.rank(),
            posted_receives: self.role == Role::Receive,
            reader_flushes: true,
            // A slot waits for the GPU that pushes its payload as long as that takes.
            stuck_ns: STUCK_NS,
            in_place_share: 255,
            slow_ns: u64::MAX,
            ungated: false,
            key_seed: runtime.key_seed(),
        }
    }

    /// What our producer rings. Asked for before there is a queue pair, which a failure behind
    /// it would leave with the engine.
    fn bell(&self, wake: Wake) -> Result<Option<EventFd>> {
        match wake {
            Wake::Doorbell => self.lane.bell.try_clone().map(Some).map_err(Failure::system("eventfd")),
            Wake::Polled => Ok(None),
        }
    }

    fn joined(self, qp: QpId, bell: Option<EventFd>) -> Joined {
        let producer = Producer::new(self.geometry, &self.work, &self.control, self.window, bell);
        let (geometry, lane) = (self.geometry, self.lane);
        Joined {
            qp,
            producer,
            geometry,
            lane,
            window: None,
            regions: None,
            in_record: true,
            longest: MAX_BYTES,
            reaches: false,
            flusher: None,
            receives: None,
            registrations: Vec::new(),
        }
    }

    /// Shows the GPU what it pushes to or pulls from.
    fn register(&self, peer_window: &PeerWindow<'_>) -> Result<Vec<Registered>> {
        let Some(gpu) = &self.lane.gpu else { return Ok(Vec::new()) };
        Ok(match (self.role, peer_window) {
            (Role::Send, _) => vec![(gpu.register(&*self.window)?, self.window.clone() as Keep)],
            (Role::Receive, peer_window) => {
                let window = match peer_window {
                    PeerWindow::Shared(window) => {
                        (gpu.register_read_only(window)?, Arc::clone(window) as Keep)
                    }
                    PeerWindow::Mirror(mirror) => (gpu.register(&***mirror)?, Arc::clone(mirror) as Keep),
                };
                vec![window, (gpu.register(&*self.control)?, self.control.clone() as Keep)]
            }
        })
    }

    /// What is done with GPU memory here.
    fn plan(&self) -> Option<Plan> {
        self.lane.rdma.as_ref().map(|r| r.plan)
    }
}

fn segment(runtime: &Runtime, geometry: &Geometry, kind: Segment) -> Result<Arc<SharedMemory>> {
    let memory = runtime.memory(&kind.to_string(), geometry.bytes(kind), HugePages::Never)?;
    write_header(&memory, kind, geometry)?;
    Ok(Arc::new(memory))
}

impl Half {
    /// Makes this end. `class`: the traffic class that NCCL asks for.
    pub fn new(runtime: &Runtime, role: Role, class: Option<u8>) -> Result<Self> {
        let own = Own::new(runtime, role)?;
        let settings = &runtime.loaded.settings;
        let link = match &runtime.loaded.rdma {
            None => {
                let link = segment(runtime, &own.geometry, Segment::Link)?;
                // The engine writes it through this mapping; whoever is handed it can only read.
                link.seal_against_writers()?;
                let rings = own.lane.wake() == Wake::Doorbell;
                let bells = rings.then(bell::pair).transpose();
                Link::Local { link, bells: bells.map_err(Failure::system("a doorbell's sockets"))? }
            }
            Some(device) => {
                let polled = settings.cq_events == CqEvents::Poll || own.lane.wake() == Wake::Polled;
                let events = !polled && !settings.no_imm;
                // Nobody writes into memory that is sent.
                let [posted_receives, regions_written] = [role == Role::Receive; 2];
                let mut config =
                    Config { events, posted_receives, regions_written, ..Config::from(settings) };
                config.traffic_class = class.unwrap_or(config.traffic_class);
                let allocate = &mut |name: &str, bytes| runtime.memory(name, bytes, HugePages::Never);
                let half = verbs::Half::new(device, &config, own.geometry, own.window.clone(), allocate)?;
                Link::Verbs(Box::new((half, config)))
            }
        };
        Ok(Half { own, link })
    }

    /// What the other end is told, with the descriptors that go along.
    pub fn offer(&self) -> Result<(Offer, Vec<OwnedFd>)> {
        match &self.link {
            Link::Verbs(verbs) => {
                let landing = self.own.plan().map(|plan| plan.landing);
                Ok((Offer::Verbs { offer: verbs.0.offer(), landing }, Vec::new()))
            }
            Link::Local { link, bells } => {
                let posted = self.own.role == Role::Receive;
                let offer = LocalOffer::new(link, &*self.own.window, posted, bells.is_some());
                let gpu = self.own.lane.gpu.is_some();
                let ringer = bells.as_ref().map(|(_, ringer)| ringer);
                // Its sender looks there for receives.
                let work = posted.then(|| self.own.work.fd());
                let fds = LocalOffer::fds(link, &*self.own.window, ringer)
                    .into_iter()
                    .chain(work)
                    .map(|fd| fd.try_clone_to_owned())
                    .collect::<std::io::Result<_>>()
                    .map_err(Failure::system("a connection's descriptors"))?;
                Ok((Offer::Local { offer, gpu }, fds))
            }
        }
    }

    /// Takes the other end's offer. `peer_pid` is its process, if that has a number here.
    pub fn take(
        self,
        runtime: &Runtime,
        offer: Offer,
        mut fds: Vec<OwnedFd>,
        peer_pid: Option<u32>,
    ) -> Result<Taken> {
        let peer = 1 - self.own.role.rank();
        match (self.link, offer) {
            (Link::Local { link, bells }, Offer::Local { offer, gpu }) => {
                let own = self.own;
                let sends = own.role == Role::Send;
                let work = fds.pop_if(|_| sends);
                let theirs = offer.take(fds, peer).map_err(refused)?;
                let receives = work.map(|work| posted_receives(work, &theirs.geometry)).transpose()?;
                // Before the engine may copy from there.
                let registrations = own.register(&PeerWindow::Shared(&theirs.window))?;
                let fds = QpFds {
                    work: own.work.clone(),
                    control: own.control.clone(),
                    link,
                    peer_link: theirs.link,
                    peer_window: theirs.window,
                    bell: bells.map(|(bell, _)| bell),
                    peer_bell: theirs.bell,
                    peer_pid,
                };
                let proxy: &dyn Proxy = &*own.lane.engine;
                let wake = own.lane.wake();
                let bell = own.bell(wake)?;
                let qp = proxy.add_qp(fds, own.options(runtime), wake)?;
                let window = registrations.first().filter(|_| sends).map(|(r, _)| r.device_addr());
                let regions = gpu.then_some(false);
                let joined = Joined { window, regions, receives, registrations, ..own.joined(qp, bell) };
                Ok(Taken::Joined(Box::new(joined)))
            }
            (Link::Verbs(verbs), Offer::Verbs { offer, landing: peer_landing }) => {
                let allocate = &mut |name: &str, bytes| {
                    let huge = match name {
                        "mirror" => runtime.loaded.settings.huge_pages,
                        _ => HugePages::Never,
                    };
                    runtime.memory(name, bytes, huge)
                };
                let (half, config) = *verbs;
                let path = runtime.loaded.settings.path;
                let reaches = reaches(self.own.role, self.own.plan(), peer_landing, path)?;
                let accepted = half.accept(peer, &offer, allocate)?;
                let places = accepted.places();
                let exchange = Exchange { own: self.own, accepted, config, peer_landing, reaches };
                Ok(Taken::Exchange(Box::new(exchange), places))
            }
            _ => Err(refused("one end is qp = local, the other qp = verbs; set PUSHGATE_QP alike on both")),
        }
    }
}

impl Exchange {
    /// Takes the other end's places.
    pub fn join(self, runtime: &Runtime, (bytes, _): Frame) -> Result<Joined> {
        let places: Places = serde_json::from_slice(&bytes).map_err(refused)?;
        let Exchange { own, accepted, config, peer_landing, reaches } = self;
        if let (Role::Send, false, Some(gpu)) = (own.role, reaches, &own.lane.gpu) {
            // One that pulls elsewhere too.
            gpu.will_copy()?;
        }
        let peer_geometry = accepted.peer_geometry();
        // Before the engine may copy from there.
        let registrations = own.register(&PeerWindow::Mirror(accepted.mirror()))?;
        let flusher = match (&own.lane.rdma, &runtime.loaded.rdma) {
            (Some(OverRdma { reach: Some(reach), .. }), Some(device))
                if reaches && own.role == Role::Receive =>
            {
                let allocate = &mut |name: &str, bytes| runtime.memory(name, bytes, HugePages::Never);
                // SAFETY: the word is memory that the lane holds, with its export.
                Some(unsafe { Flusher::new(device, &config, reach.word(), allocate)? })
            }
            _ => None,
        };
        let receives = accepted.posted_receives();
        let qp = accepted.join(places)?;
        // Where completions can't wake it, the engine must poll.
        let wake = if qp.can_wake() { own.lane.wake() } else { Wake::Polled };
        // The engine only reads it: a mapping of its own that can do nothing else.
        let work = own.work.fd().try_clone_to_owned().map_err(Failure::system("work segment"))?;
        let work = Arc::new(ReadOnlyMemory::from_fd(work, own.work.len())?);
        let endpoint = Endpoint::new(
            work,
            own.control.clone(),
            own.geometry,
            peer_geometry,
            Box::new(qp),
            own.options(runtime),
        )?;
        let sends = own.role == Role::Send;
        let bell = own.bell(wake)?;
        let qp = own.lane.engine.add_qp(endpoint, wake)?;
        let window = registrations.first().filter(|_| sends).map(|(r, _)| r.device_addr());
        Ok(Joined {
            window,
            regions: Some(peer_landing != Some(Landing::Host)),
            // A payload in a record would have to be copied into the GPU's memory by somebody.
            in_record: peer_landing != Some(Landing::Gpu),
            longest: runtime.loaded.properties.max_bytes,
            reaches,
            flusher,
            receives,
            registrations,
            ..own.joined(qp, bell)
        })
    }
}

/// What the peer has posted, in the work segment that it handed over.
fn posted_receives(work: OwnedFd, geometry: &Geometry) -> Result<PostedReceives> {
    let refused = |e: &dyn std::fmt::Display| refused(format!("its work segment: {e}"));
    let work = ReadOnlyMemory::from_fd(work, geometry.work_bytes()).map_err(|e| refused(&e))?;
    PostedReceives::of_work(&Arc::new(work), geometry).map_err(|e| refused(&e))
}

/// Whether the RDMA device is used on the GPU's memory at one end; what arrives for the
/// peer's GPU does so at `peer`.
fn reaches(role: Role, plan: Option<Plan>, peer: Option<Landing>, path: NetPath) -> Result<bool> {
    Ok(match (role, plan) {
        (_, None) => false,
        (Role::Receive, Some(plan)) => plan.landing == Landing::Gpu,
        (Role::Send, Some(Plan { out: Out::Push, .. })) => false,
        (Role::Send, Some(Plan { out: Out::Pull, .. })) if peer != Some(Landing::Host) => true,
        // A message out of GPU memory has no place there to go to.
        (Role::Send, Some(_)) if path == NetPath::Pull => {
            return Err(refused(
                "messages for its GPU arrive in host memory, to which path = pull does not go; set \
                 PUSHGATE_PATH=push or auto here, or PUSHGATE_PATH=pull there too",
            ));
        }
        (Role::Send, Some(_)) => false,
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::{SealFlags, fcntl_add_seals};

    use super::*;

    /// They are in a peer's hands before there is a queue pair.
    #[test]
    fn p8_what_a_peer_is_handed_over_local_it_can_only_read() {
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let halves = [Role::Send, Role::Receive].map(|role| Half::new(&runtime, role, None).unwrap());
        let [ours, theirs] = [&halves[0], &halves[1]].map(|half| half.offer().unwrap());
        // Link segment and window; of a receiving end also its work segment, behind its doorbell.
        let behind = ours.1.len();
        assert_eq!(theirs.1.len(), behind + 1);
        for fd in ours.1[..2].iter().chain(&theirs.1[..2]).chain(&theirs.1[behind..]) {
            let bytes = rustix::fs::fstat(fd).unwrap().st_size as usize;
            let mapped = SharedMemory::from_fd(fd.try_clone().unwrap(), bytes);
            assert!(mapped.is_err(), "{bytes} bytes can be written");
            // A peer that seals first: nothing that comes later may fail for it.
            let _ = fcntl_add_seals(fd, SealFlags::SEAL);
        }
        let [half, _] = halves;
        let taken = half.take(&runtime, theirs.0, theirs.1, None);
        let Taken::Joined(joined) = taken.unwrap() else { unreachable!("this is no RDMA") };
        joined.lane.engine.remove_qp(joined.qp).unwrap();
    }

    #[test]
    fn a_sender_pulls_only_to_a_receiver_whose_gpu_is_written_to() {
        let plan = |out, landing| Some(Plan { out, landing });
        let pull = plan(Out::Pull, Landing::Gpu);
        let (written, lands) = (Some(Landing::Gpu), Some(Landing::Host));
        for (role, plan, peer, expected) in [
            (Role::Send, pull, written, true),
            (Role::Send, pull, None, true),
            (Role::Send, pull, lands, false),
            (Role::Send, plan(Out::Push, Landing::Gpu), written, false),
            (Role::Send, None, written, false),
            (Role::Receive, pull, lands, true),
            (Role::Receive, plan(Out::Push, Landing::Gpu), lands, true),
            (Role::Receive, plan(Out::Push, Landing::Host), written, false),
            (Role::Receive, None, lands, false),
        ] {
            assert_eq!(
                reaches(role, plan, peer, NetPath::Auto).unwrap(),
                expected,
                "{role:?} {plan:?} {peer:?}"
            );
        }
        assert!(reaches(Role::Send, pull, written, NetPath::Pull).unwrap());
        let e = reaches(Role::Send, pull, lands, NetPath::Pull).unwrap_err();
        assert!(e.text.contains("PUSHGATE_PATH=push"), "{e}");
    }
}
