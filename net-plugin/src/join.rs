//! One end of a connection's queue pair: its memory, and how it is joined to the other end's. The
//! sending end is rank 0 of the queue pair, the receiving end rank 1.

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
use pushgate_proxy::link::verbs::{self, Accepted, Config, Flusher, Places};
use pushgate_proxy::memory::Keep;
use pushgate_proxy::offer::LocalOffer;
use pushgate_proxy::producer::Producer;
use pushgate_proxy::proxy::{Proxy, QpFds};
use pushgate_proxy::receives::PostedReceives;
use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure, Result};
use crate::path::OverRdma;
use crate::plan::{Landing, Out, Plan};
use crate::props::MAX_BYTES;
use crate::runtime::{Lane, Runtime};
use crate::socket::Frame;

/// How many receives NCCL may have outstanding on a connection, as a power of two: 32 of 8 buffers
/// each.
pub const RECEIVES_LOG: u32 = 8;
/// WQE slots of a sending end, as a power of two. NCCL has at most 32 requests of its own for each
/// of the 8 buffers of a receive; the rest is for slices.
pub const SLOTS_LOG: u32 = 9;

/// The limit for a slot taken and not published: an hour, because our own producer publishes what
/// it takes.
const STUCK_NS: u64 = 3_600_000_000_000;

/// Which end of a connection.
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

/// The first thing that one end tells the other.
#[derive(Serialize, Deserialize)]
pub enum EndOffer {
    /// Over `local`. The frame's descriptors are those of the offer; a receiving end appends that
    /// of its work segment.
    Local {
        offer: LocalOffer,
        /// The buffers of this end may lie in a GPU, which pulls out of windows only.
        gpu: bool,
    },
    Verbs {
        offer: verbs::Offer,
        /// Where messages for this end's GPU arrive, if it has one. If they arrive in host memory,
        /// they must come through the window.
        landing: Option<Landing>,
    },
}

/// Memory that the GPU sees, with what keeps it mapped.
pub type Registered = (Registration, Keep);

struct Own {
    lane: Arc<Lane>,
    role: Role,
    geometry: Geometry,
    window: Arc<SharedMemory>,
    work: Arc<SharedMemory>,
    control: Arc<SharedMemory>,
}

/// This end, before the other end's offer is known.
pub struct NewEnd {
    own: Own,
    transport: Transport,
}

enum Transport {
    Local {
        link: Arc<SharedMemory>,
        /// The bell that only the other end rings when our engine sleeps, and the ringer handed to
        /// that end.
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
    /// The GPU's address of our window, on a sending end whose messages the GPU may push.
    pub window: Option<u64>,
    /// Whether messages may be sent out of registered memory; `None`: the engine must be asked.
    pub regions: Option<bool>,
    /// Whether a short payload may travel in its record.
    pub in_record: bool,
    /// The longest message of the queue pair.
    pub longest: usize,
    /// The RDMA device is used on the GPU's memory.
    pub reaches: bool,
    /// Completes what the RDMA device wrote into the GPU's memory, on a receiving end whose device
    /// writes there.
    pub flusher: Option<Flusher>,
    /// The receives that the peer has posted, on a sending end.
    pub receives: Option<PostedReceives>,
    /// What the GPU sees of both ends' memory, each entry with the memory itself, which is dropped
    /// after its registration.
    pub registrations: Vec<Registered>,
}

/// What an end has become after the other end's offer arrived.
pub enum Taken {
    Joined(Box<Joined>),
    /// Over RDMA: the peer must be told these places, and tells its own.
    Exchange(Box<Exchange>, Places),
}

/// An end over RDMA that waits for the other end's places.
pub struct Exchange {
    own: Own,
    accepted: Accepted,
    config: Config,
    /// Where messages for the peer's GPU arrive, as the peer's offer said.
    peer_landing: Option<Landing>,
    reaches: bool,
}

/// Where this host reads the peer's payload.
enum PeerWindow<'a> {
    /// The peer's window itself.
    Shared(&'a Arc<ReadOnlyMemory>),
    /// Our copy of the peer's window, which the peer's RDMA device writes.
    Mirror(&'a Arc<SharedMemory>),
}

fn refused(why: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("the other end's offer of a connection: {why}"))
}

impl Own {
    fn new(runtime: &Runtime, role: Role) -> Result<Self> {
        let settings = &runtime.loaded.settings;
        // A receiving end answers with a few words inline, so it needs little.
        let (window, slots_log, rx_log) = match role {
            Role::Send => (settings.net_window_size, SLOTS_LOG, 4),
            Role::Receive => (abi::PUSHGATE_PAGE as u64, 4, RECEIVES_LOG),
        };
        let geometry = Geometry {
            window_log: window.trailing_zeros() - abi::PUSHGATE_UNIT_LOG,
            slots_log,
            // A request ends when the credit of its slot returns, so a CQE would say nothing more.
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
        // Sealed for the same reason as a link segment (`NewEnd::new`): the peer may only read.
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
            // A slot waits as long as the GPU takes to push its payload.
            stuck_ns: STUCK_NS,
            in_place_share: 255,
            slow_ns: u64::MAX,
            ungated: false,
            key_seed: runtime.key_seed(),
        }
    }

    /// The doorbell that our producer rings. It is requested before there is a queue pair, because
    /// a failure after that would leave the queue pair in the engine.
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

    /// Registers with the GPU the memory that it pushes to or pulls from.
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

    /// What this end does with GPU memory.
    fn plan(&self) -> Option<Plan> {
        self.lane.rdma.as_ref().map(|r| r.plan)
    }
}

fn segment(runtime: &Runtime, geometry: &Geometry, kind: Segment) -> Result<Arc<SharedMemory>> {
    let memory = runtime.memory(&kind.to_string(), geometry.bytes(kind), HugePages::Never)?;
    write_header(&memory, kind, geometry)?;
    Ok(Arc::new(memory))
}

impl NewEnd {
    /// Makes this end. `class` is the traffic class that NCCL asks for.
    pub fn new(runtime: &Runtime, role: Role, class: Option<u8>) -> Result<Self> {
        let own = Own::new(runtime, role)?;
        let settings = &runtime.loaded.settings;
        let transport = match &runtime.loaded.rdma {
            None => {
                let link = segment(runtime, &own.geometry, Segment::Link)?;
                // The engine writes the segment through this mapping; a process that receives the
                // descriptor can only read.
                link.seal_against_writers()?;
                let rings = own.lane.wake() == Wake::Doorbell;
                let bells = rings.then(bell::pair).transpose();
                Transport::Local { link, bells: bells.map_err(Failure::system("a doorbell's sockets"))? }
            }
            Some(device) => {
                let polled = settings.cq_events == CqEvents::Poll || own.lane.wake() == Wake::Polled;
                let events = !polled && !settings.no_imm;
                // Memory that messages are sent out of is never written by the peer.
                let [posted_receives, regions_written] = [role == Role::Receive; 2];
                let mut config =
                    Config { events, posted_receives, regions_written, ..Config::from(settings) };
                config.traffic_class = class.unwrap_or(config.traffic_class);
                let allocate = &mut |name: &str, bytes| runtime.memory(name, bytes, HugePages::Never);
                let half = verbs::Half::new(device, &config, own.geometry, own.window.clone(), allocate)?;
                Transport::Verbs(Box::new((half, config)))
            }
        };
        Ok(NewEnd { own, transport })
    }

    /// What the other end is told, with the descriptors that go along.
    pub fn offer(&self) -> Result<(EndOffer, Vec<OwnedFd>)> {
        match &self.transport {
            Transport::Verbs(verbs) => {
                let landing = self.own.plan().map(|plan| plan.landing);
                Ok((EndOffer::Verbs { offer: verbs.0.offer(), landing }, Vec::new()))
            }
            Transport::Local { link, bells } => {
                let posted = self.own.role == Role::Receive;
                let offer = LocalOffer::new(link, &*self.own.window, posted, bells.is_some());
                let gpu = self.own.lane.gpu.is_some();
                let ringer = bells.as_ref().map(|(_, ringer)| ringer);
                // The other end, which sends, reads our receives there.
                let work = posted.then(|| self.own.work.fd());
                let fds = LocalOffer::fds(link, &*self.own.window, ringer)
                    .into_iter()
                    .chain(work)
                    .map(|fd| fd.try_clone_to_owned())
                    .collect::<std::io::Result<_>>()
                    .map_err(Failure::system("a connection's descriptors"))?;
                Ok((EndOffer::Local { offer, gpu }, fds))
            }
        }
    }

    /// Takes the other end's offer. `peer_pid` is its process, if that process has a number here.
    pub fn take(
        self,
        runtime: &Runtime,
        offer: EndOffer,
        mut fds: Vec<OwnedFd>,
        peer_pid: Option<u32>,
    ) -> Result<Taken> {
        let peer = 1 - self.own.role.rank();
        match (self.transport, offer) {
            (Transport::Local { link, bells }, EndOffer::Local { offer, gpu }) => {
                let own = self.own;
                let sends = own.role == Role::Send;
                let work = fds.pop_if(|_| sends);
                let theirs = offer.take(fds, peer).map_err(refused)?;
                let receives = work.map(|work| posted_receives(work, &theirs.geometry)).transpose()?;
                // Register before the engine may copy from there.
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
            (Transport::Verbs(verbs), EndOffer::Verbs { offer, landing: peer_landing }) => {
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
    /// Takes the other end's places and joins the queue pair.
    pub fn join(self, runtime: &Runtime, (bytes, _): Frame) -> Result<Joined> {
        let places: Places = serde_json::from_slice(&bytes).map_err(refused)?;
        let Exchange { own, accepted, config, peer_landing, reaches } = self;
        if let (Role::Send, false, Some(gpu)) = (own.role, reaches, &own.lane.gpu) {
            // The GPU's worker pushes on this connection, even if the RDMA device reads the GPU's
            // memory on others.
            gpu.will_copy()?;
        }
        let peer_geometry = accepted.peer_geometry();
        // Register before the engine may copy from there.
        let registrations = own.register(&PeerWindow::Mirror(accepted.mirror()))?;
        let flusher = match (&own.lane.rdma, &runtime.loaded.rdma) {
            (Some(OverRdma { reach: Some(reach), .. }), Some(device))
                if reaches && own.role == Role::Receive =>
            {
                let allocate = &mut |name: &str, bytes| runtime.memory(name, bytes, HugePages::Never);
                // SAFETY: the word is memory that the lane holds, together with its export.
                Some(unsafe { Flusher::new(device, &config, reach.word(), allocate)? })
            }
            _ => None,
        };
        let receives = accepted.posted_receives();
        let qp = accepted.join(places)?;
        // Where completions can't wake the engine, it must poll.
        let wake = if qp.can_wake() { own.lane.wake() } else { Wake::Polled };
        // The engine only reads the work segment, so it gets a mapping of its own that can do
        // nothing else.
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
            // The receiver would have to copy a payload in a record into the GPU's memory.
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

/// The receives that the peer has posted, in the work segment that it handed over.
fn posted_receives(work: OwnedFd, geometry: &Geometry) -> Result<PostedReceives> {
    let refused = |e: &dyn std::fmt::Display| refused(format!("its work segment: {e}"));
    let work = ReadOnlyMemory::from_fd(work, geometry.work_bytes()).map_err(|e| refused(&e))?;
    PostedReceives::of_work(&Arc::new(work), geometry).map_err(|e| refused(&e))
}

/// Whether the RDMA device is used on the GPU's memory at this end; messages for the peer's GPU
/// arrive at `peer`.
fn reaches(role: Role, plan: Option<Plan>, peer: Option<Landing>, path: NetPath) -> Result<bool> {
    Ok(match (role, plan) {
        (_, None) => false,
        (Role::Receive, Some(plan)) => plan.landing == Landing::Gpu,
        (Role::Send, Some(Plan { out: Out::Push, .. })) => false,
        (Role::Send, Some(Plan { out: Out::Pull, .. })) if peer != Some(Landing::Host) => true,
        // With path = pull, a message out of GPU memory needs a place in the peer's GPU memory, and
        // there is none.
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

    /// A peer has these descriptors before there is a queue pair.
    #[test]
    fn p8_memory_that_a_peer_is_handed_over_local_is_read_only_for_the_peer() {
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let ends = [Role::Send, Role::Receive].map(|role| NewEnd::new(&runtime, role, None).unwrap());
        let [ours, theirs] = [&ends[0], &ends[1]].map(|end| end.offer().unwrap());
        // Transport segment and window; a receiving end also hands over its work segment, after its
        // doorbell.
        let behind = ours.1.len();
        assert_eq!(theirs.1.len(), behind + 1);
        for fd in ours.1[..2].iter().chain(&theirs.1[..2]).chain(&theirs.1[behind..]) {
            let bytes = rustix::fs::fstat(fd).unwrap().st_size as usize;
            let mapped = SharedMemory::from_fd(fd.try_clone().unwrap(), bytes);
            assert!(mapped.is_err(), "{bytes} bytes can be written");
            // A peer that seals first must not make any later step fail.
            let _ = fcntl_add_seals(fd, SealFlags::SEAL);
        }
        let [end, _] = ends;
        let taken = end.take(&runtime, theirs.0, theirs.1, None);
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
