//! A queue pair as the program has it: its memory, its registrations with the
//! device, and the structure that kernels get.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header, write_header};
use pushgate_gpu_kernels::{Access, DeviceBuffer, Registration};
use pushgate_proxy::endpoint::QpOptions;
use pushgate_proxy::engine::QpId;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::proxy::QpFds;
use pushgate_proxy::session::Status;
use serde::{Deserialize, Serialize};

use crate::context::{Context, Shared};
use crate::error::{Error, Result};
use crate::mesh::{Frame, Mesh};

/// Sizes of a queue pair, where they differ from the settings'.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpConfig {
    /// Payload ring, bytes: a power of two of at least 64.
    pub window_size: Option<u64>,
    /// WQE slots: a power of two.
    pub slots: Option<u64>,
    /// Receives: a power of two.
    pub receives: Option<u64>,
    /// Messages land in buffers that `post_recv` names.
    pub posted_receives: bool,
}

/// What one end tells the other about its segments.
#[derive(Serialize, Deserialize)]
struct Offer {
    abi: u32,
    link: usize,
    window: usize,
    posted_receives: bool,
    /// Its engine sleeps and must be rung; else it polls.
    rings: bool,
}

/// Our half of a queue pair, before the other end is known.
pub(crate) struct Half {
    geometry: Geometry,
    config: QpConfig,
    window: Arc<SharedMemory>,
    work: Arc<SharedMemory>,
    control: Arc<SharedMemory>,
    link: Arc<SharedMemory>,
}

/// A reliable, ordered connection between two ranks' devices. Dropping it takes
/// it out of the engine; kernels that use it must have ended.
pub struct QueuePair {
    // Fields drop in this order: out of the engine (Drop), unregister, unmap.
    descriptor: abi::pushgate_qp,
    _registrations: Vec<Registration>,
    _state: DeviceBuffer,
    _doorbell: EventFd,
    id: QpId,
    peer: u32,
    rank: u32,
    control: Arc<SharedMemory>,
    _memory: (Half, Arc<ReadOnlyMemory>, Arc<ReadOnlyMemory>),
    context: Context,
}

/// Takes a queue pair out of its engine unless it was `done`.
struct Joined<'a> {
    context: &'a Context,
    id: QpId,
    done: bool,
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if !self.done {
            let proxy = &self.context.inner.proxy;
            let _ = proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED));
            let _ = proxy.remove_qp(self.id);
        }
    }
}

/// A region's key: lkey and rkey in one.
pub type RegionKey = u32;

/// Registers of the CPU executor's doorbell: the descriptor of the engine's eventfd.
extern "C" fn ring(fd: u64) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the descriptor is kept open by the queue pair whose structure names
    // it, and kernels that use that structure end before it is dropped. A full
    // counter gives EAGAIN: then the engine is awake already.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd as i32) };
    let _ = rustix::io::write(fd, &one);
}

fn log2(name: &str, value: u64) -> Result<u32> {
    if !value.is_power_of_two() {
        return Err(Error::config(name, value, "a power of two"));
    }
    Ok(value.trailing_zeros())
}

impl Half {
    pub(crate) fn new(context: &Context, rank: u32, config: QpConfig) -> Result<Self> {
        let s = context.settings();
        let window = config.window_size.unwrap_or(s.window_size);
        if window < abi::PUSHGATE_UNIT as u64 {
            return Err(Error::config("window-size", window, "64 or more"));
        }
        let slots_log = log2("slots", config.slots.unwrap_or(s.slots))?;
        let window_log = log2("window-size", window)? - abi::PUSHGATE_UNIT_LOG;
        let geometry = Geometry {
            window_log,
            slots_log,
            cq_log: slots_log.min(abi::PUSHGATE_MAX_CQ_LOG),
            rx_log: log2("receives", config.receives.unwrap_or(s.receives))?,
            link_log: slots_log,
            landing_log: window_log,
            signals: s.signals as u32,
            rank,
        };
        geometry.validate().map_err(|e| Error::Memory(e.into()))?;
        let name = |what| format!("pushgate-{what}-{rank}");
        let segment = |kind, what| -> Result<_> {
            let memory = context.memory(&name(what), geometry.bytes(kind), false)?;
            write_header(&memory, kind, &geometry)?;
            Ok(Arc::new(memory))
        };
        let window = context.memory(&name("window"), geometry.window_bytes(), true)?;
        // Mapped here; from now on whoever is handed it can only read.
        window.seal_against_writers()?;
        Ok(Half {
            geometry,
            config,
            window: Arc::new(window),
            work: segment(Segment::Work, "work")?,
            control: segment(Segment::Control, "control")?,
            link: segment(Segment::Link, "link")?,
        })
    }

    pub(crate) fn offer(&self, mesh: &Mesh, peer: u32, label: u32, bell: &EventFd, wake: Wake) -> Result<()> {
        let offer = Offer {
            abi: abi::PUSHGATE_ABI_VERSION,
            link: self.link.len(),
            window: self.window.len(),
            posted_receives: self.config.posted_receives,
            rings: wake == Wake::Doorbell,
        };
        let bytes = serde_json::to_vec(&offer).expect("an offer is plain data");
        mesh.send(peer, label, &bytes, &[self.link.fd(), self.window.fd(), bell.as_fd()])
    }

    pub(crate) fn join(self, context: &Context, peer: u32, (bytes, fds): Frame) -> Result<QueuePair> {
        let mismatch = |reason: String| Error::Mismatch { rank: peer, reason };
        let offer: Offer = serde_json::from_slice(&bytes)
            .map_err(|e| mismatch(format!("its offer of a queue pair: {e}")))?;
        if offer.abi != abi::PUSHGATE_ABI_VERSION {
            return Err(mismatch(format!(
                "it speaks ABI version {}, this is {}; run the same build on both",
                offer.abi,
                abi::PUSHGATE_ABI_VERSION
            )));
        }
        let [link, window, bell] = <[_; 3]>::try_from(fds)
            .map_err(|fds| mismatch(format!("{} descriptors with a queue pair, expected 3", fds.len())))?;
        // At most what the limits of the ABI allow, whatever it says.
        const MOST: usize = 1 << 30;
        if offer.link > MOST || offer.window > MOST {
            return Err(mismatch(format!("segments of {} and {} bytes", offer.link, offer.window)));
        }
        let peer_link = Arc::new(ReadOnlyMemory::from_fd(link, offer.link)?);
        let peer_window = Arc::new(ReadOnlyMemory::from_fd(window, offer.window)?);
        // SAFETY: `check_header` only loads.
        let words = unsafe { peer_link.words(0, 8.min(peer_link.len() / 8)) };
        let theirs = check_header(words, Segment::Link, peer_link.len())
            .map_err(|e| mismatch(format!("its link segment: {e}")))?;
        if theirs.rank != peer {
            return Err(mismatch(format!("its link segment says rank {}", theirs.rank)));
        }
        let bell = EventFd::from_fd(bell).map_err(Error::io("doorbell of the peer"))?;

        let settings = context.settings();
        let options = QpOptions {
            peer,
            posted_receives: self.config.posted_receives,
            stuck_ns: settings.stuck.as_nanos() as u64,
            // A quarter of the sender's window stays free for its next messages.
            in_place_share: 192,
            // Long beside any kernel that works, short beside one that computes.
            slow_ns: 20_000_000,
            ungated: false,
            key_seed: std::process::id().wrapping_mul(2654435761) ^ peer,
        };
        let fds = QpFds {
            work: self.work.clone(),
            control: self.control.clone(),
            link: self.link.clone(),
            peer_link: peer_link.clone(),
            peer_window: peer_window.clone(),
            // Without one, every pass saves the fence that looks if it sleeps.
            peer_bell: offer.rings.then_some(bell),
        };
        let proxy = &context.inner.proxy;
        let id = proxy.add_qp(fds, options, context.inner.wake)?;
        // Until it belongs to a `QueuePair`, an error takes it out again and tells the peer.
        let mut joined = Joined { context, id, done: false };
        // The engine has its own writable mapping now, wherever it runs.
        self.link.seal_against_writers()?;
        {
            let mut members = context.inner.members.lock().unwrap_or_else(|e| e.into_inner());
            members.retain(|(control, ..)| control.strong_count() > 0);
            members.push((Arc::downgrade(&self.control), Arc::downgrade(&self.link), self.geometry.rank));
        }

        let g = &self.geometry;
        let register = |m: &SharedMemory| context.register(m.as_ptr(), m.len(), Access::ReadWrite);
        let registrations = vec![
            register(&self.window)?,
            register(&self.work)?,
            register(&self.control)?,
            context.register(peer_window.as_ptr(), peer_window.len(), Access::ReadOnly)?,
        ];
        let [window, work, control, from_peer] =
            [0, 1, 2, 3].map(|i: usize| Registration::device_addr(&registrations[i]));
        let state = context.alloc(size_of::<abi::pushgate_qp_state>())?;
        let doorbell = context.inner.bell.try_clone().map_err(Error::io("eventfd"))?;
        let rings = context.device() == "cpu";
        let descriptor = abi::pushgate_qp {
            window,
            wqes: work + abi::PUSHGATE_WORK_RING as u64,
            receives: work + g.work_receives_offset() as u64,
            consumed: work + abi::PUSHGATE_WORK_CONSUMED as u64,
            credit: control + abi::PUSHGATE_CTL_CREDIT as u64,
            delivered: control + abi::PUSHGATE_CTL_DELIVERED as u64,
            sleeping: control + abi::PUSHGATE_CTL_SLEEPING as u64,
            signals: control + abi::PUSHGATE_CTL_SIGNALS as u64,
            cq: control + g.control_cq_offset() as u64,
            rx: control + g.control_rx_offset() as u64,
            landing: control + g.control_landing_offset() as u64,
            peer_window: from_peer,
            state: state.addr(),
            doorbell: if rings { ring as extern "C" fn(u64) as usize as u64 } else { 0 },
            doorbell_arg: doorbell.as_fd().as_raw_fd() as u64,
            limit_ns: settings.timeout.as_nanos() as u64,
            window_log: g.window_log,
            slots_log: g.slots_log,
            cq_log: g.cq_log,
            rx_log: g.rx_log,
            landing_log: g.landing_log,
            peer_window_log: theirs.window_log,
            n_signals: g.signals,
            rank: g.rank,
            peer,
            pad: 0,
        };
        joined.done = true;
        Ok(QueuePair {
            descriptor,
            _registrations: registrations,
            _state: state,
            _doorbell: doorbell,
            id,
            peer,
            rank: g.rank,
            control: self.control.clone(),
            _memory: (self, peer_link, peer_window),
            context: context.clone(),
        })
    }
}

impl QueuePair {
    /// The structure that kernels get; pass an array of them in device memory
    /// ([`upload_descriptors`]).
    pub fn descriptor(&self) -> abi::pushgate_qp {
        self.descriptor
    }

    /// The other end.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// Largest message: what the window holds.
    pub fn max_message(&self) -> u64 {
        (abi::PUSHGATE_UNIT as u64) << self.descriptor.window_log
    }

    /// Lets the peer put into shared memory, and WQEs of this side name it.
    pub fn register_shared(&self, memory: &Shared) -> Result<RegionKey> {
        Ok(self.context.inner.proxy.add_shared_region(self.id, memory.memory())?)
    }

    /// Lets the peer put into device memory. With the engine in this process only.
    ///
    /// # Safety
    /// The buffer outlives the queue pair or [`QueuePair::deregister`].
    pub unsafe fn register_buffer(&self, buffer: &DeviceBuffer) -> Result<RegionKey> {
        let (proxy, bytes) = (&self.context.inner.proxy, buffer.len() as u64);
        if self.context.device() == "cpu" {
            // SAFETY: the CPU executor's device addresses are host addresses; the
            // caller keeps the buffer, and nobody holds references into it.
            return Ok(unsafe { proxy.add_host_region(self.id, buffer.addr() as usize, bytes, None)? });
        }
        // SAFETY: the caller keeps the buffer.
        Ok(unsafe { proxy.add_device_region(self.id, buffer.addr(), bytes)? })
    }

    /// Takes a registration back.
    pub fn deregister(&self, key: RegionKey) -> Result<bool> {
        Ok(self.context.inner.proxy.remove_region(self.id, key)?)
    }

    /// `Err` with the cause if the queue pair has ended.
    pub fn check(&self) -> Result<()> {
        // The word that devices read; it says the same wherever the engine runs.
        let word = self.control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0].load(Ordering::Acquire);
        match Status::from_word(word) {
            None => Ok(()),
            Some(status) => Err(Error::from_status(status, self.rank)),
        }
    }

    /// Ends it: waits here and at the peer end with *aborted*.
    pub fn abort(&self) -> Result<()> {
        Ok(self.context.inner.proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED))?)
    }

    /// The engine's number for it.
    pub(crate) fn id(&self) -> QpId {
        self.id
    }

    /// For whoever notices that the engine is gone and must speak for it.
    pub(crate) fn control(&self) -> &Arc<SharedMemory> {
        &self.control
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // An engine that is gone has dropped it already.
        let _ = self.context.inner.proxy.remove_qp(self.id);
    }
}

/// The structures of several queue pairs, side by side in device memory.
pub fn upload_descriptors<'a>(
    context: &Context,
    qps: impl IntoIterator<Item = &'a QueuePair>,
) -> Result<DeviceBuffer> {
    let all: Vec<_> = qps.into_iter().map(|q| q.descriptor()).collect();
    // SAFETY: `pushgate_qp` is plain integers without padding (16 u64, 10 u32), so
    // all its bytes are initialised; the slice covers the vector exactly.
    let bytes = unsafe { std::slice::from_raw_parts(all.as_ptr().cast::<u8>(), size_of_val(all.as_slice())) };
    const { assert!(size_of::<abi::pushgate_qp>() == 16 * 8 + 10 * 4) };
    context.upload(bytes)
}
