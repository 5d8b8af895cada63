//! One end of a connection's queue pair: its memory, and how it is joined to the other end's. The
//! sending end is rank 0 of the queue pair, the receiving end rank 1.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushgate::copier::HostPlace;
use pushgate::settings::{CqEvents, NetPath, Transport};
use pushgate_driver_shim::bell::{self, Bell};
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::{ShimError, abi};
use pushgate_engine::connect::{
    Connect, ConnectError, Fds, Frame, LocalMet, LocalOpening, Met, Opening, Patience, Prepared, TcpMet,
    TcpOpening, VerbsMet, VerbsOpening,
};
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::QpId;
use pushgate_engine::idle::Wake;
use pushgate_gpu_kernels::{Access, Registration};
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::memory::Keep;
use pushgate_link::producer::Producer;
use pushgate_link::receives::PostedReceives;
use pushgate_link_tcp as tcp;
use pushgate_link_verbs::{Config, Flusher};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure, Result};
use crate::lane::Lane;
use crate::plan::{Landing, Out, Plan};
use crate::props::MAX_BYTES;
use crate::runtime::Runtime;
use crate::socket::Line;

/// How many receives NCCL may have outstanding on a connection, as a power of two: 32 of 8 buffers
/// each.
pub const RECEIVES_LOG: u32 = 8;
/// Short messages of a connection over TCP that may leave before their receives are posted, where connections are
/// [in order](crate::props::Properties::in_order). NCCL has at most 8 steps of a collective under way on a connection; its next one
/// begins before the last of them is known to be done.
const AHEAD: u32 = 16;
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

    fn other(self) -> Role {
        match self {
            Role::Send => Role::Receive,
            Role::Receive => Role::Send,
        }
    }
}

/// What one end tells the other beside its transport's offer. Over `local` a receiving end appends the descriptor of its
/// work segment.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Note {
    /// The buffers of this end may lie in a GPU, which over `local` pulls out of windows only.
    gpu: bool,
    /// Over RDMA: where messages for this end's GPU arrive, if it has one. If they arrive in host memory,
    /// they must come through the window.
    landing: Option<Landing>,
}

/// What a connection carries.
#[derive(Clone)]
pub enum Purpose {
    /// The messages of NCCL's network table: the receiving end posts a buffer for each. NCCL names this end's device.
    Messages { dev: usize },
    /// The operations of NCCL's RMA table, on the coll comm's own lane: the receiving end reads each message where it lies.
    Rma {
        /// What drives the connection.
        lane: Arc<Lane>,
        /// Bytes of the sending end's window, a power of two.
        window: u64,
    },
}

impl Purpose {
    fn is_messages(&self) -> bool {
        matches!(self, Purpose::Messages { .. })
    }
}

/// Where a receiving end reads the payload of messages that have no posted buffer.
pub struct Inbound {
    /// Payload of the peer: `bytes` bytes at `address`, mapped as long as `_keep` lives.
    pub address: usize,
    pub bytes: usize,
    _keep: Keep,
}

/// Memory that the GPU's copies may use, with what keeps it mapped.
pub struct Registered {
    _with: With,
    _keep: Keep,
}

/// Who copies.
enum With {
    /// The copier.
    Copier { _place: HostPlace },
    /// A queue of copies of this process, for the RMA table.
    Queue { _registration: Registration },
}

struct Own {
    lane: Arc<Lane>,
    role: Role,
    /// Its receiving end posts buffers.
    posts: bool,
    transport: Transport,
    geometry: Geometry,
    window: Arc<SharedMemory>,
    /// The window at the copier, on a sending end whose messages the copier may push.
    pushed: Option<HostPlace>,
    work: Arc<SharedMemory>,
    control: Arc<SharedMemory>,
}

/// This end, before the other end's offer is known.
pub struct NewEnd {
    own: Own,
    opening: Opening,
    /// Of the queue pair over RDMA.
    config: Option<Config>,
}

/// This end, ready to receive.
pub struct ReadyEnd {
    own: Own,
    prepared: Prepared,
    config: Option<Config>,
    /// What the peer told.
    note: Note,
    /// The peer's work segment, where the peer's receives are read.
    work: Option<OwnedFd>,
    /// The RDMA device is used on the GPU's memory at this end.
    reaches: bool,
}

/// This end with the other end's places, whose link may still lack its streams.
pub struct MetEnd {
    own: Own,
    met: Met,
    config: Option<Config>,
    note: Note,
    work: Option<OwnedFd>,
    reaches: bool,
}

/// How an end meets the other end again when a link breaks: the machine by which they met, which the engine takes if both
/// ends replace links, and the socket that outlives the links.
pub struct Again<'a> {
    pub connect: &'a mut Option<Connect<Fds>>,
    pub line: &'a Arc<Line>,
}

/// An end that an engine drives.
pub struct Joined {
    pub qp: QpId,
    /// Where the other end's frames go, if both ends replace a link that breaks.
    pub mailbox: Option<Mailbox>,
    pub producer: Producer,
    pub geometry: Geometry,
    pub lane: Arc<Lane>,
    pub transport: Transport,
    /// Where the GPU's copies see our window, on a sending end whose messages they may push.
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
    /// On a receiving end: where the payload lies.
    pub inbound: Option<Inbound>,
    /// What the GPU sees of both ends' memory, each entry with the memory itself, which is dropped
    /// after its registration.
    pub registrations: Vec<Registered>,
}

/// Where this host reads the peer's payload.
enum PeerWindow<'a> {
    /// The peer's window itself.
    Shared(&'a Arc<ReadOnlyMemory>),
    /// Our copy of the peer's window, which the peer's RDMA device writes.
    Mirror(&'a Arc<SharedMemory>),
}

fn failed(e: ConnectError) -> Failure {
    match e {
        ConnectError::Peer(why) => refused(why),
        ConnectError::Rdma(e) => e.into(),
        ConnectError::Descriptors(e) => Failure::system("a connection's descriptors")(e),
    }
}

fn refused(why: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("the other end's offer of a connection: {why}"))
}

/// A window of `window` bytes, or as long as an RDMA device's `longest` message allows: over RDMA no window is longer than that.
fn window_within(window: u64, longest: Option<u32>) -> u64 {
    longest.and_then(u32::checked_ilog2).map_or(window, |log| window.min(1 << log))
}

impl Own {
    fn new(runtime: &Runtime, role: Role, transport: Transport, purpose: &Purpose) -> Result<Self> {
        let settings = &runtime.loaded.settings;
        // A receiving end answers with a few words inline, so it needs little.
        let (window, slots_log, rx_log) = match (role, purpose) {
            (Role::Send, Purpose::Messages { .. }) => (settings.net_window_size, SLOTS_LOG, 4),
            (Role::Send, Purpose::Rma { window, lane }) => {
                let device = lane.device.as_ref().filter(|_| transport == Transport::Verbs);
                let longest = device.map(|rdma| rdma.device.longest_message());
                (window_within(*window, longest), SLOTS_LOG, 4)
            }
            (Role::Receive, _) => (abi::PUSHGATE_PAGE as u64, 4, RECEIVES_LOG),
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
        let lane = match (purpose, transport) {
            (Purpose::Rma { lane, .. }, _) => lane.clone(),
            (Purpose::Messages { .. }, Transport::Tcp) => runtime.tcp_lane(role)?,
            (Purpose::Messages { dev }, Transport::Verbs) => runtime.verbs_lane(*dev)?,
            (Purpose::Messages { .. }, _) => runtime.lane()?,
        };
        let gpu =
            lane.gpu.as_ref().filter(|gpu| purpose.is_messages() && role == Role::Send && gpu.has_copier());
        let window = Arc::new(payload(runtime, "window", geometry.window_bytes(), &lane, transport)?);
        let work = segment(runtime, &lane, &geometry, Segment::Work)?;
        // Before the seal, after which nobody can map the window to write it.
        let pushed = gpu.map(|gpu| gpu.register(&window)).transpose()?;
        // Sealed for the same reason as a link segment (`NewEnd::new`): the peer may only read.
        window.seal_against_writers()?;
        work.seal_against_writers()?;
        let control = segment(runtime, &lane, &geometry, Segment::Control)?;
        Ok(Own {
            lane,
            role,
            posts: purpose.is_messages(),
            transport,
            window,
            pushed,
            work,
            control,
            geometry,
        })
    }

    fn options(&self, runtime: &Runtime) -> QpOptions {
        QpOptions {
            peer: self.role.other().rank(),
            roles: self.posts,
            posted_receives: self.posts && self.role == Role::Receive,
            reader_flushes: true,
            // A slot waits as long as the GPU takes to push its payload.
            stuck_ns: STUCK_NS,
            in_place_share: 255,
            slow_ns: u64::MAX,
            ungated: false,
            key_seed: runtime.key_seed(),
        }
    }

    /// What an end becomes whose queue pair an engine drives. `wake`: how the producer wakes the engine.
    fn joined(self, qp: QpId, wake: Wake) -> Joined {
        let bell = (wake == Wake::Doorbell).then(|| self.lane.bell.clone());
        let producer = Producer::new(self.geometry, &self.work, &self.control, self.window, bell);
        let (geometry, lane, transport) = (self.geometry, self.lane, self.transport);
        Joined {
            qp,
            mailbox: None,
            producer,
            geometry,
            lane,
            transport,
            window: None,
            regions: None,
            in_record: true,
            longest: MAX_BYTES,
            reaches: false,
            flusher: None,
            receives: None,
            inbound: None,
            registrations: Vec::new(),
        }
    }

    /// Where this end reads the payload of the peer.
    fn inbound(&self, window: &PeerWindow<'_>) -> Option<Inbound> {
        let (address, bytes, _keep) = match window {
            _ if self.role == Role::Send => return None,
            PeerWindow::Shared(window) => (window.as_ptr(), window.len(), window.mapping()),
            PeerWindow::Mirror(mirror) => (mirror.as_ptr(), mirror.len(), mirror.mapping()),
        };
        Some(Inbound { address: address.as_ptr() as usize, bytes, _keep })
    }

    /// Registers the memory that the GPU's copies push to or pull from. Also returns where those see our window, on a sending end.
    fn register(&mut self, peer_window: &PeerWindow<'_>) -> Result<(Vec<Registered>, Option<u64>)> {
        let Some(gpu) = &self.lane.gpu else { return Ok((Vec::new(), None)) };
        if !self.posts {
            // A kernel may wait already for what the first operation brings, which this connection is made for.
            let registered = match (self.role, peer_window) {
                (Role::Send, _) => {
                    let window = &self.window;
                    let place = gpu.register_for_copies(window.as_ptr(), window.len(), Access::ReadWrite)?;
                    (place, window.mapping())
                }
                (Role::Receive, PeerWindow::Shared(window)) => {
                    let place = gpu.register_for_copies(window.as_ptr(), window.len(), Access::ReadOnly)?;
                    (place, window.mapping())
                }
                (Role::Receive, PeerWindow::Mirror(mirror)) => {
                    let place = gpu.register_for_copies(mirror.as_ptr(), mirror.len(), Access::ReadWrite)?;
                    (place, mirror.mapping())
                }
            };
            let (_registration, _keep) = registered;
            let at = (self.role == Role::Send).then(|| _registration.device_addr());
            return Ok((vec![Registered { _with: With::Queue { _registration }, _keep }], at));
        }
        let registered = |_place, _keep| Registered { _with: With::Copier { _place }, _keep };
        Ok(match (self.role, peer_window) {
            (Role::Send, _) => match self.pushed.take() {
                Some(place) => {
                    let at = self.window.as_ptr().as_ptr() as u64;
                    (vec![registered(place, self.window.mapping())], Some(at))
                }
                None => (Vec::new(), None),
            },
            (Role::Receive, _) if !gpu.has_copier() => (Vec::new(), None),
            (Role::Receive, peer_window) => {
                let window = match peer_window {
                    PeerWindow::Shared(window) => {
                        registered(gpu.register_read_only(window)?, window.mapping())
                    }
                    PeerWindow::Mirror(mirror) => registered(gpu.register(mirror)?, mirror.mapping()),
                };
                let control = registered(gpu.register(&self.control)?, self.control.mapping());
                (vec![window, control], None)
            }
        })
    }

    /// Whether an end in this role hands over its work segment: over `local` the sending end reads the receiving end's
    /// receives there.
    fn shows_receives(&self, role: Role) -> bool {
        self.posts && role == Role::Receive && self.transport == Transport::Local
    }

    /// The work segment for the engine, which only reads it: a mapping that can do nothing else.
    fn work_to_read(&self) -> Result<Arc<ReadOnlyMemory>> {
        let work = self.work.fd().try_clone_to_owned().map_err(Failure::system("work segment"))?;
        Ok(Arc::new(ReadOnlyMemory::from_fd(work, self.work.len())?))
    }

    /// What this end does with GPU memory over RDMA.
    fn plan(&self) -> Option<Plan> {
        let rdma = self.lane.over_rdma.as_ref().filter(|_| self.transport == Transport::Verbs);
        rdma.map(|r| r.plan)
    }
}

fn segment(runtime: &Runtime, lane: &Lane, geometry: &Geometry, kind: Segment) -> Result<Arc<SharedMemory>> {
    let memory = runtime.memory(lane, &kind.to_string(), geometry.bytes(kind), HugePages::Never)?;
    write_header(&memory, kind, geometry)?;
    Ok(Arc::new(memory))
}

impl NewEnd {
    /// Makes this end. `class` is the traffic class that NCCL asks for.
    pub fn new(
        runtime: &Runtime,
        role: Role,
        class: Option<u8>,
        transport: Transport,
        purpose: &Purpose,
    ) -> Result<Self> {
        let own = Own::new(runtime, role, transport, purpose)?;
        let posted = own.posts && role == Role::Receive;
        let settings = &runtime.loaded.settings;
        let device = own.lane.device.as_ref().filter(|_| transport == Transport::Verbs);
        let (opening, config) = match device {
            None if transport == Transport::Tcp => (open_tcp(runtime, &own)?, None),
            None => {
                let link = segment(runtime, &own.lane, &own.geometry, Segment::Link)?;
                // The engine writes the segment through this mapping; a process that receives the
                // descriptor can only read.
                link.seal_against_writers()?;
                let rings = own.lane.wake() == Wake::Doorbell;
                let bells =
                    rings.then(bell::pair).transpose().map_err(Failure::system("a doorbell's sockets"))?;
                let opening = LocalOpening::new(link, own.window.clone(), posted, bells);
                let recovers = settings.recovery().is_some();
                let opening = if recovers { opening.recovering() } else { opening };
                // A rank may use many others, and a process may open 1,024 files.
                let opening = if own.posts { opening } else { opening.ringing_beside() };
                (Opening::Local(opening), None)
            }
            Some(rdma) => {
                let device = &rdma.device;
                let polled = settings.cq_events == CqEvents::Poll || own.lane.wake() == Wake::Polled;
                let events = !polled && !settings.no_imm;
                // Memory that messages are sent out of is never written by the peer.
                let regions_written = role == Role::Receive;
                let mut config = Config {
                    events,
                    posted_receives: posted,
                    regions_written,
                    // As NCCL's own network: all peers are ranks of one job.
                    domain: Some(rdma.domain.clone()),
                    ..Config::from(&settings.common)
                };
                config.traffic_class = class.or(config.traffic_class);
                let allocate =
                    &mut |name: &str, bytes| runtime.memory(&own.lane, name, bytes, HugePages::Never);
                let opening = VerbsOpening::new(device, &config, own.geometry, own.window.clone(), allocate)?;
                let recovers = settings.recovery().is_some();
                let opening = if recovers { opening.recovering() } else { opening };
                (Opening::Verbs(Box::new(opening)), Some(config))
            }
        };
        Ok(NewEnd { own, opening, config })
    }

    /// What the other end is told.
    pub fn offer(&self) -> Result<Frame> {
        let gpu = self.own.lane.gpu.is_some();
        let landing = match self.own.transport {
            // The mirror lies in host memory, and the GPU pulls out of it.
            Transport::Tcp => gpu.then_some(Landing::Host),
            _ => self.own.plan().map(|plan| plan.landing),
        };
        let note = Note { gpu, landing };
        let appended = self.own.shows_receives(self.own.role).then(|| self.own.work.fd());
        self.opening.offer(note, appended.as_slice()).map_err(failed)
    }

    /// Takes the other end's offer, and gets ready to receive.
    pub fn prepare(self, runtime: &Runtime, offer: Frame) -> Result<ReadyEnd> {
        let NewEnd { own, opening, config } = self;
        let allocate = &mut |name: &str, bytes| match name {
            "mirror" => payload(runtime, name, bytes, &own.lane, own.transport),
            _ => runtime.memory(&own.lane, name, bytes, HugePages::Never),
        };
        let appended = own.shows_receives(own.role.other()) as usize;
        let prepared = opening.prepare::<Note>(own.role.other().rank(), offer, appended, allocate);
        let (prepared, note, mut work) = prepared.map_err(failed)?;
        let path = runtime.loaded.settings.path;
        let reaches = reaches(own.role, own.plan(), note.landing, path)?;
        Ok(ReadyEnd { own, prepared, config, note, work: work.pop(), reaches })
    }
}

impl ReadyEnd {
    /// Where the other end may write.
    pub fn places(&self) -> Vec<u8> {
        self.prepared.places()
    }

    /// Takes the other end's places.
    pub fn meet(self, places: &[u8]) -> Result<MetEnd> {
        let ReadyEnd { own, prepared, config, note, work, reaches } = self;
        let met = prepared.meet(places).map_err(failed)?;
        Ok(MetEnd { own, met, config, note, work, reaches })
    }
}

impl MetEnd {
    /// Whether the link has all that it needs. Asked again and again until then.
    pub fn is_complete(&mut self) -> Result<bool> {
        match &mut self.met {
            Met::Tcp(met) => met.link.joined().map_err(|why| Failure::new(Code::Remote, why)),
            _ => Ok(true),
        }
    }

    /// Joins the queue pair. `peer_pid` is the other end's process, if that process has a number here. Without `again` the
    /// end of the link is the queue pair's.
    pub fn join(self, runtime: &Runtime, peer_pid: Option<u32>, again: Option<Again<'_>>) -> Result<Joined> {
        let MetEnd { own, met, config, note, work, reaches } = self;
        match met {
            Met::Local(met) => join_local(runtime, own, *met, note, work, peer_pid, again),
            Met::Verbs(met) => {
                let config = config.expect("an end over RDMA has one");
                join_verbs(runtime, own, *met, &config, note, reaches, again)
            }
            Met::Tcp(met) => join_tcp(runtime, own, *met, note, again),
            Met::Rails(_) => unreachable!("the plugin makes ends over one device"),
        }
    }
}

fn join_local(
    runtime: &Runtime,
    mut own: Own,
    met: LocalMet,
    note: Note,
    work: Option<OwnedFd>,
    peer_pid: Option<u32>,
    again: Option<Again<'_>>,
) -> Result<Joined> {
    let receives = work.map(|work| posted_receives(work, &met.peer.geometry)).transpose()?;
    // Register before the engine may copy from there.
    let window = met.peer.window.clone();
    let (registrations, pushed) = own.register(&PeerWindow::Shared(&window))?;
    let inbound = own.inbound(&PeerWindow::Shared(&window));
    let (recovers, beside) = (met.recovers, met.beside);
    let fds = met.into_fds(own.work.clone(), own.control.clone(), peer_pid);
    let wake = own.lane.wake();
    let options = own.options(runtime);
    // The watch takes rings where it takes the frames of ends that replace their link.
    let again_beside = again.as_ref().filter(|again| beside && again.connect.is_some());
    let endpoint = match again_beside.map(|again| again.line.clone()) {
        Some(line) => {
            fds.into_endpoint_beside((Bell::beside(line.stream()), Box::new(move || line.ring())), options)?
        }
        None => fds.into_endpoint(options)?,
    };
    let (endpoint, mailbox) = with_recovery(runtime, endpoint, recovers, options.key_seed, again);
    let qp = own.lane.engine.add_qp(endpoint, wake)?;
    let regions = note.gpu.then_some(false);
    Ok(Joined { mailbox, window: pushed, regions, receives, inbound, registrations, ..own.joined(qp, wake) })
}

/// Has the link of an endpoint replaced when it breaks, where both ends do so: `recovers`. Returns also where the frames of
/// the other end go.
fn with_recovery(
    runtime: &Runtime,
    endpoint: Endpoint,
    recovers: bool,
    jitter: u32,
    again: Option<Again<'_>>,
) -> (Endpoint, Option<Mailbox>) {
    let recovery = runtime.loaded.settings.recovery().filter(|_| recovers);
    let again = again.and_then(|again| Some((again.connect.take_if(|_| recovery.is_some())?, again.line)));
    let (Some(limit), Some((connect, line))) = (recovery, again) else { return (endpoint, None) };
    let (patience, mailbox) = (Patience::within(limit, jitter.into()), Mailbox::default());
    // Before the engine sends the first frame: the other end counts all those after READY.
    line.keep();
    let endpoint = endpoint.with_recovery(connect, patience, mailbox.clone(), send_frame(line.clone()));
    (endpoint, Some(mailbox))
}

/// Sends the frames of an end that replaces its link. The watch sends what the socket does not take at once.
fn send_frame(line: Arc<Line>) -> SendFrame {
    Box::new(move |frame: Frame| match frame.along.into_owned() {
        Ok(fds) => line.tell(&frame.bytes, fds),
        Err(e) => tracing::debug!("a frame to the other end is lost: {e}"),
    })
}

fn join_verbs(
    runtime: &Runtime,
    mut own: Own,
    met: VerbsMet,
    config: &Config,
    note: Note,
    reaches: bool,
    again: Option<Again<'_>>,
) -> Result<Joined> {
    let VerbsMet { link, mirror, peer_geometry, receives } = met;
    // Register before the engine may copy from there.
    let (registrations, pushed) = own.register(&PeerWindow::Mirror(&mirror))?;
    let inbound = own.inbound(&PeerWindow::Mirror(&mirror));
    let reach = own.lane.over_rdma.as_ref().and_then(|over| over.reach.as_ref());
    let flusher = match (reach, &own.lane.device) {
        (Some(reach), Some(rdma)) if reaches && own.role == Role::Receive => {
            let allocate = &mut |name: &str, bytes| runtime.memory(&own.lane, name, bytes, HugePages::Never);
            // SAFETY: the word is memory that the lane holds, together with its export.
            Some(unsafe { Flusher::new(&rdma.device, config, reach.word(), allocate)? })
        }
        _ => None,
    };
    let longest = own.lane.device.as_ref().map_or(MAX_BYTES, |rdma| rdma.longest());
    // Where completions can't wake the engine, it must poll.
    let wake = if link.can_wake() { own.lane.wake() } else { Wake::Polled };
    let recovers = link.recovers();
    let work = own.work_to_read()?;
    let options = own.options(runtime);
    let endpoint =
        Endpoint::new(work, own.control.clone(), own.geometry, peer_geometry, Box::new(link), options)?;
    let (endpoint, mailbox) = with_recovery(runtime, endpoint, recovers, options.key_seed, again);
    let qp = own.lane.engine.add_qp(endpoint, wake)?;
    Ok(Joined {
        mailbox,
        window: pushed,
        regions: Some(note.landing != Some(Landing::Host)),
        // The receiver would have to copy a payload in a record into the GPU's memory.
        in_record: note.landing != Some(Landing::Gpu),
        longest,
        reaches,
        flusher,
        receives,
        inbound,
        registrations,
        ..own.joined(qp, wake)
    })
}

/// Memory for payload: a window, or the mirror of the peer's.
fn payload(
    runtime: &Runtime,
    name: &str,
    bytes: usize,
    lane: &Lane,
    transport: Transport,
) -> std::result::Result<SharedMemory, ShimError> {
    runtime.allocate(lane, name, bytes, |memory| match lane.gpu.is_none() && transport == Transport::Tcp {
        // Over TCP the peer maps none of it, so where no GPU pins it either, pages that no message needs are not there.
        true => memory.when_touched(),
        false => memory.huge_pages(runtime.loaded.settings.huge_pages),
    })
}

fn open_tcp(runtime: &Runtime, own: &Own) -> Result<Opening> {
    let settings = &runtime.loaded.settings;
    let posted_receives = own.posts && own.role == Role::Receive;
    let ahead = if runtime.loaded.network.first().is_in_order() { AHEAD } else { 0 };
    let thrifty = own.lane.caller_drives();
    let config = tcp::Config { posted_receives, ahead, thrifty, ..tcp::Config::from(&settings.common) };
    let meeting = runtime.tcp()?.meeting(own.role == Role::Send, &own.lane.readiness);
    let opening = TcpOpening::new(config, own.geometry, own.window.clone(), meeting)
        .map_err(|why| Failure::new(Code::System, why))?;
    let opening = if settings.recovery().is_some() { opening.recovering() } else { opening };
    Ok(Opening::Tcp(Box::new(opening)))
}

fn join_tcp(
    runtime: &Runtime,
    mut own: Own,
    met: TcpMet,
    note: Note,
    again: Option<Again<'_>>,
) -> Result<Joined> {
    let TcpMet { link, mirror, peer_geometry, receives } = met;
    // Register before the engine may copy from there.
    let (registrations, pushed) = own.register(&PeerWindow::Mirror(&mirror))?;
    let inbound = own.inbound(&PeerWindow::Mirror(&mirror));
    let (wake, recovers) = (own.lane.wake(), link.recovers());
    let options = own.options(runtime);
    let endpoint = Endpoint::new(
        own.work_to_read()?,
        own.control.clone(),
        own.geometry,
        peer_geometry,
        Box::new(link),
        options,
    )?;
    let (endpoint, mailbox) = with_recovery(runtime, endpoint, recovers, options.key_seed, again);
    let qp = own.lane.engine.add_qp(endpoint, wake)?;
    let regions = Some(note.landing != Some(Landing::Host));
    Ok(Joined { mailbox, window: pushed, regions, receives, inbound, registrations, ..own.joined(qp, wake) })
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

    #[test]
    fn a_window_is_no_longer_than_the_longest_message_of_an_rdma_device() {
        let within = |longest| window_within(16 << 20, longest);
        assert_eq!([None, Some(1 << 31), Some(16 << 20)].map(within), [16 << 20; 3]);
        assert_eq!([Some(8 << 20), Some((16 << 20) - 1)].map(within), [8 << 20; 2]);
        assert_eq!(within(Some(0)), 16 << 20, "a device that tells nothing");
    }

    /// A peer has these descriptors before there is a queue pair.
    #[test]
    fn p8_memory_that_a_peer_is_handed_over_local_is_read_only_for_the_peer() {
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let ends = [Role::Send, Role::Receive].map(|role| {
            NewEnd::new(&runtime, role, None, Transport::Local, &Purpose::Messages { dev: 0 }).unwrap()
        });
        let [ours, theirs] = [&ends[0], &ends[1]].map(|end| end.offer().unwrap());
        // Transport segment and window; a receiving end also hands over its work segment, after its
        // doorbell.
        let (our_fds, their_fds) = (ours.along.borrow(), theirs.along.borrow());
        let behind = our_fds.len();
        assert_eq!(their_fds.len(), behind + 1);
        for fd in our_fds[..2].iter().chain(&their_fds[..2]).chain(&their_fds[behind..]) {
            let bytes = rustix::fs::fstat(fd).unwrap().st_size as usize;
            let mapped = SharedMemory::from_fd(fd.try_clone_to_owned().unwrap(), bytes);
            assert!(mapped.is_err(), "{bytes} bytes can be written");
            // A peer that seals first must not make any later step fail.
            let _ = fcntl_add_seals(fd, SealFlags::SEAL);
        }
        let [end, _] = ends;
        let met = end.prepare(&runtime, theirs).unwrap().meet(&[]).unwrap();
        let joined = met.join(&runtime, None, None).unwrap();
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
