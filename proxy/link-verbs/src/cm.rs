//! Bringing a queue pair up through rdma_cm, where its device needs that (iWARP) or the settings say so.
//!
//! Each end listens at an address and a port of its own before it makes its offer, which names both and a number
//! that no other listener has. With the peer's offer both ends decide alike who connects: the end with the lower rank.
//! The connecting end shows both numbers in its request; a request without them is rejected. All of it runs on
//! a thread of its own from then on, so neither end waits for the other end's caller: both may be passive at once.
//!
//! The queue pair stays on the device's own context. rdma_cm gives the attributes of each state, and
//! what the settings say of retries and access is put over them. The connection lives as long as its [`Connection`].

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use pushgate_driver_shim::limited;
use pushgate_rdma_core_sys as sys;
use serde::{Deserialize, Serialize};
use sys::ibv_qp_attr_mask as m;
use sys::rdma_cm_event_type as event;

use super::VerbsError;
use super::config::Config;
use super::device::{Device, non_blocking};
use super::kinds::Protocol;
use super::objects::Lent;

/// How long the ends may take from the peer's offer to the connection: the peer's thread may be busy with other peers.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the answer of one step of rdma_cm may take, milliseconds.
const STEP: i32 = 5000;
/// The longest wait until a thread sees that nobody waits for its connection any more.
const SLICE: Duration = Duration::from_millis(100);
/// Ports of the kernel's choice that an end tries at most.
const CHOICES: u64 = 32;
/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(50);
/// The first bytes of private data: ours, in this version.
const MAGIC: [u8; 8] = *b"pgcm\0\0\0\x01";
/// Bytes of private data with a request. rdma_cm leaves 56 on InfiniBand and RoCE.
const PRIVATE: usize = 24;
/// Private data with a rejection: not one of the requests that this end waits for.
const STRANGER: [u8; 9] = *b"pgcm\0\0\0\x01s";

/// Where an end listens, and the number that a request to it must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CmOffer {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) nonce: u64,
}

impl CmOffer {
    /// Checks a peer's; a sentence if nobody can connect there.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.port == 0 || self.address.is_unspecified() || self.address.is_multicast() {
            true => Err(format!("it listens to rdma_cm at {}, which is no address", self.at())),
            false => Ok(()),
        }
    }

    fn at(&self) -> SocketAddr {
        (self.address, self.port).into()
    }
}

/// What a request shows: the number of the listener, then that of the end that connects.
fn private_data(listener: u64, other: u64) -> [u8; PRIVATE] {
    let mut bytes = [0; PRIVATE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&listener.to_be_bytes());
    bytes[16..].copy_from_slice(&other.to_be_bytes());
    bytes
}

/// Whether a request's private data, which the transport may have padded with zeroes, are the expected.
fn is_expected(data: &[u8], expected: &[u8; PRIVATE]) -> bool {
    data.len() >= PRIVATE && data[..PRIVATE] == expected[..] && data[PRIVATE..].iter().all(|byte| *byte == 0)
}

/// A number that nobody guesses by chance: from the seed of the standard library's hash maps.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

fn library() -> Result<&'static sys::Cm, VerbsError> {
    sys::open_cm().map_err(|e| VerbsError::Library(e.to_string()))
}

/// An identifier of rdma_cm with the channel that reports its events.
struct Id {
    cm: &'static sys::Cm,
    channel: NonNull<sys::rdma_event_channel>,
    id: NonNull<sys::rdma_cm_id>,
    device: Arc<Device>,
    own: SocketAddr,
}

// SAFETY: librdmacm's calls are thread-safe; nothing here is tied to the thread that made it.
unsafe impl Send for Id {}

/// An event, taken and acknowledged.
struct Event {
    kind: event,
    status: i32,
    /// The identifier that a request brings.
    id: *mut sys::rdma_cm_id,
    data: Vec<u8>,
    /// READs that this end may answer, and that it may ask for, at once, as a request has them.
    reads: [u8; 2],
}

impl Event {
    /// Copies what an event says.
    ///
    /// # Safety
    ///
    /// The private data of a request or rejection have the length that the event names.
    unsafe fn of(e: &sys::rdma_cm_event) -> Event {
        let with_data = [event::RDMA_CM_EVENT_CONNECT_REQUEST, event::RDMA_CM_EVENT_REJECTED];
        // SAFETY: both members of the union are numbers and an address; other events have none there, or the same member.
        let conn = unsafe { &e.param.conn };
        let data = match with_data.contains(&e.event) && !conn.private_data.is_null() {
            // SAFETY: the caller's promise.
            true => unsafe {
                std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
            },
            false => &[],
        };
        let reads = [conn.responder_resources, conn.initiator_depth];
        Event { kind: e.event, status: e.status, id: e.id, data: data.to_vec(), reads }
    }

    /// Why this is not the event that was waited for; `text`: the library's name of it.
    fn refusal(&self, text: &str) -> (String, io::Error) {
        let said = match self.kind == event::RDMA_CM_EVENT_REJECTED && self.data.starts_with(&STRANGER) {
            true => "rejected: the peer waits for another attempt's request".into(),
            false => format!("{text} ({})", self.status),
        };
        let error = match self.status {
            errno @ ..0 => io::Error::from_raw_os_error(errno.saturating_neg()),
            _ => io::Error::other(said.clone()),
        };
        (said, error)
    }
}

/// READs that an end may answer, and that it may ask for, at once: as a request has them, at most as many as the device takes. A
/// device that tells nothing of them has what it takes.
fn reads_within(told: [u8; 2], most: u8) -> [u8; 2] {
    told.map(|told| if told == 0 { most } else { told.min(most) })
}

impl Id {
    /// At an address of this host, which must be that of `device`; port 0: the kernel's choice.
    fn bound(device: &Arc<Device>, own: SocketAddr) -> Result<Id, VerbsError> {
        let cm = library()?;
        let failed = |what: &str, error: io::Error| {
            let remedy = match error.raw_os_error() {
                Some(2 | 19) => "; load the kernel's modules: modprobe rdma_ucm",
                Some(1 | 13) => "; may this user open /dev/infiniband/rdma_cm?",
                Some(98) => "; set another rdma-port-range",
                Some(99) => "; does the device's network interface have this address?",
                _ => "",
            };
            let what = format!("{what} at {own} for {}", device.name());
            VerbsError::Call { what, error, remedy: remedy.into() }
        };
        // SAFETY: takes nothing.
        let raw = NonNull::new(unsafe { cm.rdma_create_event_channel() });
        let channel = raw.ok_or_else(|| failed("a channel of rdma_cm", io::Error::last_os_error()))?;
        let mut id = null_mut();
        // SAFETY: the channel is alive, the place ours.
        let made = unsafe {
            cm.rdma_create_id(channel.as_ptr(), &mut id, null_mut(), sys::rdma_port_space::RDMA_PS_TCP)
        };
        let Some(id) = NonNull::new(id).filter(|_| made == 0) else {
            let error = io::Error::last_os_error();
            // SAFETY: made above; it has no identifier.
            unsafe { cm.rdma_destroy_event_channel(channel.as_ptr()) };
            return Err(failed("an identifier of rdma_cm", error));
        };
        // From here on its drop lets go of both.
        let id = Id { cm, channel, id, device: device.clone(), own };
        non_blocking(id.as_fd())?;
        let mut address = sys::sockaddr_storage::from(own);
        // SAFETY: the identifier is alive; the address is copied by the call.
        if unsafe { cm.rdma_bind_addr(id.id.as_ptr(), (&raw mut address).cast()) } != 0 {
            return Err(failed("binding rdma_cm", io::Error::last_os_error()));
        }
        match id.device_name() {
            Some(name) if name == device.name() => Ok(id),
            other => Err(VerbsError::Call {
                what: format!("binding rdma_cm at {own} for {}", device.name()),
                error: io::Error::other(format!(
                    "rdma_cm takes the device {} for it",
                    other.as_deref().unwrap_or("(none)")
                )),
                remedy: "; rdma_cm takes the first device of a network interface: set ib-dev to that".into(),
            }),
        }
    }

    /// The device that rdma_cm has bound it to.
    fn device_name(&self) -> Option<String> {
        // SAFETY: the identifier is alive; its context, if any, is librdmacm's, open as long.
        unsafe {
            let verbs = self.id.as_ref().verbs;
            let name = (!verbs.is_null()).then(|| self.device.verbs.ibv_get_device_name((*verbs).device));
            name.map(|name| CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }

    fn raw(&self) -> *mut sys::rdma_cm_id {
        self.id.as_ptr()
    }

    fn failed(&self, what: &str, peer: SocketAddr, error: io::Error) -> VerbsError {
        let remedy = match error.raw_os_error() {
            Some(111) => "; nobody listens there any more: did the peer's process end?",
            Some(101 | 113) => "; is there a route to it?",
            Some(110) => "; do firewalls let rdma-port-range through?",
            _ => "",
        };
        let what = format!("{what} over {} from {} to {peer} (rdma_cm)", self.device.name(), self.own);
        VerbsError::Call { what, error, remedy: remedy.into() }
    }

    /// Takes an event, if one waits.
    fn event(&self) -> Option<Event> {
        let mut raw = null_mut();
        // SAFETY: the channel is alive and does not block; the place is ours.
        if unsafe { self.cm.rdma_get_cm_event(self.channel.as_ptr(), &mut raw) } != 0 {
            return None;
        }
        // SAFETY: the event is ours until it is acknowledged, once, here, and as the library made it.
        unsafe {
            let taken = Event::of(&*raw);
            self.cm.rdma_ack_cm_event(raw);
            Some(taken)
        }
    }

    /// Waits for an event until `deadline`, or until nobody waits any more.
    fn wait(&self, deadline: Instant, cancelled: &AtomicBool) -> io::Result<Event> {
        loop {
            if let Some(taken) = self.event() {
                return Ok(taken);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // Relaxed: the flag orders no other memory.
            if left.is_zero() || cancelled.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let fds = &mut [rustix::event::PollFd::new(self, rustix::event::PollFlags::IN)];
            let slice = rustix::event::Timespec::try_from(left.min(SLICE)).expect("a short time");
            let _ = rustix::event::poll(fds, Some(&slice));
        }
    }

    fn text(&self, kind: event) -> String {
        // SAFETY: the library's own text for any value.
        unsafe { CStr::from_ptr(self.cm.rdma_event_str(kind)) }.to_string_lossy().into_owned()
    }

    /// Waits for one of `expected`.
    fn expect(
        &self,
        what: &str,
        peer: SocketAddr,
        expected: &[event],
        until: (Instant, &AtomicBool),
    ) -> Result<event, VerbsError> {
        let e = self.wait(until.0, until.1).map_err(|e| self.failed(what, peer, e))?;
        if expected.contains(&e.kind) {
            return Ok(e.kind);
        }
        let (said, error) = e.refusal(&self.text(e.kind));
        Err(self.failed(&format!("{what}: {said}"), peer, error))
    }

    /// Moves the queue pair on, as rdma_cm says of an identifier, and the settings.
    fn modify(
        &self,
        of: *mut sys::rdma_cm_id,
        qp: &Lent,
        state: sys::ibv_qp_state,
        (config, mtu): (&Config, sys::ibv_mtu),
    ) -> Result<(), VerbsError> {
        let mut a = sys::ibv_qp_attr { qp_state: state, ..Default::default() };
        let mut mask = 0;
        // SAFETY: the identifier is alive, both places ours.
        if unsafe { self.cm.rdma_init_qp_attr(of, &mut a, &mut mask) } != 0 {
            let what = format!("rdma_cm's attributes of a queue pair on {}", self.device.name());
            return Err(VerbsError::Call { what, error: io::Error::last_os_error(), remedy: String::new() });
        }
        let mask = mask as u32;
        if mask == 0 {
            return Ok(());
        }
        a.qp_access_flags = self.device.kind.access();
        if mask & m::IBV_QP_PATH_MTU.0 != 0 {
            a.path_mtu = sys::ibv_mtu(a.path_mtu.0.min(mtu.0));
        }
        mark(&mut a, config);
        // As without rdma_cm: see `States`.
        (a.min_rnr_timer, a.rnr_retry) = (12, 0);
        (a.timeout, a.retry_cnt) = (config.ack_timeout, config.retry_count);
        qp.modify("moving the queue pair on as rdma_cm says", a, mask)
    }

    /// Accepts a request, for a queue pair that gets ready before.
    fn accept(
        &self,
        request: &Request,
        peer: SocketAddr,
        qp: &Lent,
        with: (&Config, sys::ibv_mtu),
        reads: [u8; 2],
    ) -> Result<(), VerbsError> {
        use sys::ibv_qp_state as s;
        for next in [s::IBV_QPS_INIT, s::IBV_QPS_RTR, s::IBV_QPS_RTS] {
            self.modify(request.id.as_ptr(), qp, next, with)?;
        }
        let mut parameters = self.parameters(qp, with.0, &[], reads);
        // SAFETY: the identifier has the peer's request; parameters are copied by the call.
        match unsafe { self.cm.rdma_accept(request.id.as_ptr(), &mut parameters) } {
            0 => Ok(()),
            _ => Err(self.failed("accepting the peer's request", peer, io::Error::last_os_error())),
        }
    }

    /// Of a request or its answer; `data` must outlive the call that they are for. `reads`: what a request that is answered has, else 0.
    fn parameters(&self, qp: &Lent, config: &Config, data: &[u8], reads: [u8; 2]) -> sys::rdma_conn_param {
        // An end whose WRITEs tell of their arrival reads nothing; but not every driver takes 0.
        let device = &self.device;
        let most = if device.kind.acknowledges() { 1 } else { device.limits.reads };
        let [answered, asked] = reads_within(reads, most);
        sys::rdma_conn_param {
            private_data: if data.is_empty() { null() } else { data.as_ptr().cast() },
            private_data_len: data.len() as u8,
            responder_resources: answered,
            initiator_depth: asked,
            retry_count: config.retry_count,
            // P4: the first RNR NAK is an error.
            rnr_retry_count: 0,
            qp_num: qp.number,
            ..Default::default()
        }
    }
}

impl AsFd for Id {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open until it is destroyed.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // SAFETY: made in `bound` or taken from a request; each event was acknowledged when it was taken.
        unsafe {
            self.cm.rdma_destroy_id(self.id.as_ptr());
            self.cm.rdma_destroy_event_channel(self.channel.as_ptr());
        }
    }
}

/// This end as it listens, before it knows the peer.
pub(super) struct Listening {
    id: Id,
    pub(super) told: CmOffer,
}

impl Listening {
    /// At the device's address, on a port of the range that the settings name.
    pub(super) fn new(device: &Arc<Device>, config: &Config, address: IpAddr) -> Result<Self, VerbsError> {
        let nonce = nonce();
        let (low, high) = config.cm_ports.unwrap_or((0, 0));
        let ports = u64::from(high - low) + 1;
        // The kernel's choice may be a port that TCP uses already, which over iWARP shows when the end listens; the next choice is
        // another one.
        let tries = if config.cm_ports.is_some() { ports } else { CHOICES };
        let mut refused = None;
        for n in 0..tries {
            // From another place of the range each time, so that few ports are tried that others have.
            let port = low + ((nonce % ports + n) % ports) as u16;
            let id = match Id::bound(device, (address, port).into()) {
                Ok(id) => id,
                Err(VerbsError::Call { error, .. }) if error.raw_os_error() == Some(98) && n + 1 < tries => {
                    continue;
                }
                Err(e) => return Err(e),
            };
            // SAFETY: the identifier is alive and bound.
            if unsafe { id.cm.rdma_listen(id.raw(), 4) } != 0 {
                let error = io::Error::last_os_error();
                refused = Some(id.failed("listening", id.own, error));
                continue;
            }
            // SAFETY: as above.
            let port = u16::from_be(unsafe { id.cm.rdma_get_src_port(id.raw()) });
            return Ok(Listening { id, told: CmOffer { address, port, nonce } });
        }
        Err(refused.expect("one port is tried at least"))
    }

    /// Begins to connect with the peer on a thread of its own. `connects`: this end sends the request.
    pub(super) fn begin(
        self,
        peer: CmOffer,
        connects: bool,
        qp: Lent,
        config: &Config,
        mtu: sys::ibv_mtu,
    ) -> Result<Connecting, VerbsError> {
        let (tell, answer) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let (flag, config) = (cancelled.clone(), config.clone());
        let task = move || {
            // An end that is gone lets go of the connection.
            let _ = tell.send(self.connect(peer, connects, &qp, (&config, mtu), &flag, PATIENCE));
        };
        std::thread::Builder::new().name("pushgate-cm".into()).spawn(task).map_err(|error| {
            VerbsError::Call { what: "a thread for rdma_cm".into(), error, remedy: String::new() }
        })?;
        Ok(Connecting { answer, cancelled })
    }

    /// Connects with the peer. Blocks up to `patience`, and on iWARP as long as TCP takes.
    pub(super) fn connect(
        self,
        peer: CmOffer,
        connects: bool,
        qp: &Lent,
        with: (&Config, sys::ibv_mtu),
        cancelled: &AtomicBool,
        patience: Duration,
    ) -> Result<Connection, VerbsError> {
        let until = (Instant::now() + patience, cancelled);
        let data = private_data(
            if connects { peer.nonce } else { self.told.nonce },
            if connects { self.told.nonce } else { peer.nonce },
        );
        match connects {
            true => active(self, peer.at(), qp, with, &data, until),
            false => passive(self.id, peer.at(), qp, with, &data, until),
        }
    }
}

fn active(
    listening: Listening,
    peer: SocketAddr,
    qp: &Lent,
    with: (&Config, sys::ibv_mtu),
    data: &[u8; PRIVATE],
    until: (Instant, &AtomicBool),
) -> Result<Connection, VerbsError> {
    let (device, own) = (listening.id.device.clone(), listening.told.address);
    // This end connects, so nobody connects to it.
    drop(listening);
    loop {
        match attempt(&device, own, peer, qp, with, data, until) {
            Ok(connection) => return Ok(connection),
            // Relaxed: the flag orders no other memory.
            Err(e) if Instant::now() >= until.0 || until.1.load(Ordering::Relaxed) => return Err(e),
            Err(e) => tracing::debug!("{e}: trying again"),
        }
        std::thread::sleep(AGAIN);
        qp.again()?;
    }
}

fn attempt(
    device: &Arc<Device>,
    own: IpAddr,
    peer: SocketAddr,
    qp: &Lent,
    with: (&Config, sys::ibv_mtu),
    data: &[u8; PRIVATE],
    until: (Instant, &AtomicBool),
) -> Result<Connection, VerbsError> {
    let id = Id::bound(device, (own, 0).into())?;
    let last = || io::Error::last_os_error();
    let mut address = sys::sockaddr_storage::from(peer);
    // SAFETY: the identifier is alive; the address is copied by the call.
    if unsafe { id.cm.rdma_resolve_addr(id.raw(), null_mut(), (&raw mut address).cast(), STEP) } != 0 {
        return Err(id.failed("resolving the peer's address", peer, last()));
    }
    id.expect("resolving the peer's address", peer, &[event::RDMA_CM_EVENT_ADDR_RESOLVED], until)?;
    // SAFETY: the identifier is alive, its address resolved.
    if unsafe { id.cm.rdma_resolve_route(id.raw(), STEP) } != 0 {
        return Err(id.failed("resolving the route", peer, last()));
    }
    id.expect("resolving the route", peer, &[event::RDMA_CM_EVENT_ROUTE_RESOLVED], until)?;
    id.modify(id.raw(), qp, sys::ibv_qp_state::IBV_QPS_INIT, with)?;
    let mut parameters = id.parameters(qp, with.0, data, [0, 0]);
    // SAFETY: the identifier is alive; parameters and data are copied by the call.
    if unsafe { id.cm.rdma_connect(id.raw(), &mut parameters) } != 0 {
        return Err(id.failed("connecting", peer, last()));
    }
    let answers = [event::RDMA_CM_EVENT_CONNECT_RESPONSE, event::RDMA_CM_EVENT_ESTABLISHED];
    if id.expect("connecting", peer, &answers, until)? == event::RDMA_CM_EVENT_CONNECT_RESPONSE {
        id.modify(id.raw(), qp, sys::ibv_qp_state::IBV_QPS_RTR, with)?;
        id.modify(id.raw(), qp, sys::ibv_qp_state::IBV_QPS_RTS, with)?;
        // SAFETY: the identifier has the peer's response.
        if unsafe { id.cm.rdma_establish(id.raw()) } != 0 {
            return Err(id.failed("establishing the connection", peer, last()));
        }
    }
    Ok(Connection { id: Some(id) })
}

fn passive(
    mut id: Id,
    peer: SocketAddr,
    qp: &Lent,
    with: (&Config, sys::ibv_mtu),
    data: &[u8; PRIVATE],
    until: (Instant, &AtomicBool),
) -> Result<Connection, VerbsError> {
    // The request that was accepted, until both ends have the connection. The listener stays as long: an attempt that fails at the
    // peer is followed by another one.
    let mut accepted: Option<Request> = None;
    let mut why = None;
    loop {
        let e = match id.wait(until.0, until.1) {
            Ok(e) => e,
            Err(error) => {
                return Err(why.unwrap_or_else(|| id.failed("waiting for the peer's request", peer, error)));
            }
        };
        let of_accepted = accepted.as_ref().is_some_and(|request| request.id.as_ptr() == e.id);
        match (e.kind, NonNull::new(e.id)) {
            (event::RDMA_CM_EVENT_CONNECT_REQUEST, Some(request)) => {
                let request = Request { cm: id.cm, id: request };
                if !is_expected(&e.data, data) {
                    let device = id.device.name();
                    limited!(warn, 0u32, device, "a stranger's request at {} is rejected (rdma_cm)", id.own);
                    request.reject();
                    continue;
                }
                if accepted.take().is_some() || why.is_some() {
                    qp.again()?;
                }
                match id.accept(&request, peer, qp, with, e.reads) {
                    Ok(()) => accepted = Some(request),
                    Err(e) => why = Some(e),
                }
            }
            (event::RDMA_CM_EVENT_ESTABLISHED, _) if of_accepted => {
                // The connection takes the place of the listener, whose channel reports its events too. Requests that wait are rejected by
                // the kernel.
                let connection = accepted.take().expect("the event is of it").into_id();
                let listener = std::mem::replace(&mut id.id, connection);
                drop(Request { cm: id.cm, id: listener });
                return Ok(Connection { id: Some(id) });
            }
            _ if of_accepted => {
                accepted = None;
                let said = format!("accepting the peer's request: {} ({})", id.text(e.kind), e.status);
                why = Some(id.failed(&said, peer, io::Error::other("the connection did not come about")));
            }
            _ => {}
        }
    }
}

/// An identifier that a request has brought, or a listener. Dropping it ends it.
struct Request {
    cm: &'static sys::Cm,
    id: NonNull<sys::rdma_cm_id>,
}

impl Request {
    /// Tells the peer that its request is not one of those that this end waits for.
    fn reject(self) {
        // SAFETY: the request's identifier is ours.
        unsafe { self.cm.rdma_reject(self.id.as_ptr(), STRANGER.as_ptr().cast(), STRANGER.len() as u8) };
    }

    /// The identifier, which its new owner ends.
    fn into_id(self) -> NonNull<sys::rdma_cm_id> {
        std::mem::ManuallyDrop::new(self).id
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: the identifier is this one's; each of its events was acknowledged when it was taken.
        unsafe { self.cm.rdma_destroy_id(self.id.as_ptr()) };
    }
}

/// A connection on its way. Dropping it gives it up.
pub(super) struct Connecting {
    answer: Receiver<Result<Connection, VerbsError>>,
    cancelled: Arc<AtomicBool>,
}

impl Connecting {
    /// Waits for the connection, up to a bound (P7).
    pub(super) fn wait(self) -> Result<Connection, VerbsError> {
        match self.answer.recv_timeout(PATIENCE + Duration::from_secs(1)) {
            Ok(answer) => answer,
            Err(e) => Err(VerbsError::Call {
                what: "connecting through rdma_cm".into(),
                error: match e {
                    RecvTimeoutError::Timeout => io::ErrorKind::TimedOut.into(),
                    RecvTimeoutError::Disconnected => {
                        io::Error::other("its thread has ended without an answer")
                    }
                },
                remedy: String::new(),
            }),
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // Relaxed: the flag orders no other memory.
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// A connection. Its end is the queue pair's: the peer is told so.
pub(super) struct Connection {
    id: Option<Id>,
}

impl Connection {
    /// Whether the connection has ended: the peer's end is gone, or its TCP connection. Does not block.
    pub(super) fn has_ended(&self) -> bool {
        let ends = [event::RDMA_CM_EVENT_DISCONNECTED, event::RDMA_CM_EVENT_DEVICE_REMOVAL];
        let Some(id) = &self.id else { return true };
        std::iter::from_fn(|| id.event()).any(|e| ends.contains(&e.kind))
    }

    /// The address that the connection has at this end, over iWARP.
    pub(super) fn address(&self) -> Option<IpAddr> {
        let id = self.id.as_ref().filter(|id| id.device.kind.protocol == Protocol::Iwarp)?;
        Some(id.own.ip())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(id) = self.id.take().filter(|id| id.device.owner.is_here()) else { return };
        // The kernel may wait for what is under way. Where there is no thread to be had it waits here.
        let task = move || drop(id);
        let _ = std::thread::Builder::new().name("pushgate-cm-end".into()).spawn(task);
    }
}

/// Marks packets as the settings ask; what they leave open stays as rdma_cm found it for the route (a site's default, a subnet manager's
/// service level).
fn mark(a: &mut sys::ibv_qp_attr, config: &Config) {
    a.ah_attr.grh.traffic_class = config.traffic_class.unwrap_or(a.ah_attr.grh.traffic_class);
    a.ah_attr.sl = config.service_level.unwrap_or(a.ah_attr.sl);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ffi::c_int;

    use super::super::config::RdmaCm;
    use super::super::kinds::Kind;
    use super::super::mock::Mock;
    use super::super::objects::{Cq, Pd, Rc};
    use super::*;

    thread_local! {
        /// Traffic class and service level of the last queue pair that was moved on.
        static MARKED: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
    }

    unsafe extern "C" fn route(_: *mut sys::rdma_cm_id, a: *mut sys::ibv_qp_attr, mask: *mut c_int) -> c_int {
        // SAFETY: the caller's places.
        unsafe {
            ((*a).ah_attr.grh.traffic_class, (*a).ah_attr.sl) = (106, 3);
            *mask = m::IBV_QP_AV.0 as c_int;
        }
        0
    }

    unsafe extern "C" fn modify_qp(_: *mut sys::ibv_qp, a: *mut sys::ibv_qp_attr, _: c_int) -> c_int {
        // SAFETY: the caller passes attributes.
        MARKED.set(unsafe { ((*a).ah_attr.grh.traffic_class, (*a).ah_attr.sl) });
        0
    }

    unsafe extern "C" fn destroy_id(_: *mut sys::rdma_cm_id) -> c_int {
        0
    }

    unsafe extern "C" fn destroy_channel(_: *mut sys::rdma_event_channel) {}

    #[test]
    fn traffic_class_and_service_level_of_the_route_stay_unless_they_are_set() {
        let mock = Mock::with_functions(null_mut(), Kind::of(Protocol::Ib, 0), |verbs, _| {
            verbs.ibv_modify_qp = Ok(modify_qp);
        });
        // SAFETY: nothing is loaded; functions are set with the types of the fields.
        let mut cm = unsafe { sys::Cm::from_library(libloading::os::unix::Library::this()) }.unwrap();
        cm.rdma_init_qp_attr = Ok(route);
        cm.rdma_destroy_id = Ok(destroy_id);
        cm.rdma_destroy_event_channel = Ok(destroy_channel);
        let id = Id {
            cm: Box::leak(Box::new(cm)),
            channel: NonNull::dangling(),
            id: NonNull::dangling(),
            device: mock.device.clone(),
            own: "10.0.0.1:5".parse().unwrap(),
        };
        let cq = Cq::new(&mock.device, 2, false).unwrap();
        let mut rc = Rc::new(&Pd::new(&mock.device).unwrap(), cq, 1, 1, &[0]).unwrap();
        let qp = rc.lend();
        let marked = |traffic_class, service_level| {
            let config = Config { traffic_class, service_level, ..Config::default() };
            let (state, mtu) = (sys::ibv_qp_state::IBV_QPS_RTR, sys::ibv_mtu::IBV_MTU_1024);
            id.modify(id.raw(), &qp, state, (&config, mtu)).unwrap();
            MARKED.get()
        };
        assert_eq!(marked(None, None), (106, 3));
        assert_eq!(marked(Some(0), Some(5)), (0, 5));
    }

    #[test]
    fn auto_takes_rdma_cm_where_the_device_needs_it_alone() {
        let all =
            [RdmaCm::Auto, RdmaCm::On, RdmaCm::Off].map(|cm| [false, true].map(|needed| cm.decide(needed)));
        assert_eq!(all, [[false, true], [true, true], [false, false]]);
    }

    #[test]
    fn p8_a_request_without_both_ends_numbers_is_not_expected() {
        let expected = private_data(1, 2);
        assert!(expected.len() <= 56);
        let padded = [&expected[..], &[0; 32]].concat();
        assert!(is_expected(&expected, &expected) && is_expected(&padded, &expected));
        let older = private_data(1, 3);
        let mut other_version = expected;
        other_version[7] = 9;
        for wrong in [&[][..], &older, &private_data(2, 1), &expected[..23], &other_version] {
            assert!(!is_expected(wrong, &expected), "{wrong:?}");
        }
        let behind = [&expected[..], &[1]].concat();
        assert!(!is_expected(&behind, &expected));
    }

    #[test]
    fn p8_an_offer_that_names_no_address_is_refused_with_a_sentence() {
        let offer = |address: &str, port| CmOffer { address: address.parse().unwrap(), port, nonce: 1 };
        offer("10.0.0.1", 5).check().unwrap();
        for wrong in [offer("10.0.0.1", 0), offer("0.0.0.0", 5), offer("224.0.0.1", 5), offer("::", 5)] {
            assert!(wrong.check().unwrap_err().contains("which is no address"));
        }
    }

    /// What a peer's request or rejection brings, and what becomes of it.
    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_private_data_of_a_peer_are_read_beyond_their_end_or_taken_for_those_of_another() {
        use pushgate_tests::fuzz::{depth, fuzz, kind};

        let expected = private_data(7, 9);
        // Kind, status, READs, then the private data.
        let input = |kind: event, status: i32, data: &[u8]| {
            [&[kind.0 as u8][..], &status.to_le_bytes(), &[4, 200], data].concat()
        };
        let (request, rejected) = (event::RDMA_CM_EVENT_CONNECT_REQUEST, event::RDMA_CM_EVENT_REJECTED);
        let seeds = [
            input(request, 0, &[&expected[..], &[0; 32]].concat()),
            input(request, 0, &private_data(9, 7)),
            input(rejected, 28, &STRANGER),
            input(rejected, -111, &[]),
            input(event::RDMA_CM_EVENT_ESTABLISHED, 0, &[1]),
        ];
        let mut taken = 0;
        let mut target = |bytes: &[u8]| {
            let Some((&[what, a, b, c, d, answers, asks], data)) = bytes.split_first_chunk() else {
                return 0;
            };
            // Memory of this length, so that a read beyond its end is one of other memory.
            let data = data[..data.len().min(u8::MAX.into())].to_vec().into_boxed_slice();
            let mut e = sys::rdma_cm_event { event: event(what.into()), ..Default::default() };
            e.status = i32::from_le_bytes([a, b, c, d]);
            e.param.conn = sys::rdma_conn_param {
                private_data: if data.is_empty() { null() } else { data.as_ptr().cast() },
                private_data_len: data.len() as u8,
                responder_resources: answers,
                initiator_depth: asks,
                ..Default::default()
            };
            // SAFETY: the private data have the length that the event names.
            let e = unsafe { Event::of(&e) };
            let has_data = [request, rejected].contains(&e.kind);
            assert_eq!(e.data, if has_data { &data[..] } else { &[] });
            for most in [1, 16, u8::MAX] {
                assert!(reads_within(e.reads, most).iter().all(|reads| (1..=most).contains(reads)));
            }
            let (said, error) = e.refusal("the library's name");
            assert!(
                said.len() < 80 && !said.contains(char::is_control) && !error.to_string().is_empty(),
                "{said:?}"
            );
            if e.kind != request {
                return kind(&said) ^ kind(error.to_string());
            }
            let number = |at: usize| Some(u64::from_be_bytes(data.get(at..at + 8)?.try_into().ok()?));
            let numbers = (data.starts_with(&MAGIC), number(8), number(16));
            let padded = data.iter().skip(PRIVATE).all(|byte| *byte == 0);
            let is_ours = numbers == (true, Some(7), Some(9)) && padded;
            assert_eq!(is_expected(&e.data, &expected), is_ours);
            taken += u32::from(is_ours);
            depth(data.iter().zip(&expected).take_while(|(a, b)| a == b).count()) << 1 | u64::from(is_ours)
        };
        target(&seeds[0]);
        target(&seeds[1]);
        fuzz(&seeds, &mut target);
        assert!(taken > 0, "none was expected");
    }
}
