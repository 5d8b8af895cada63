//! An RDMA device and its port: opening it, its addresses, and how one learns
//! that it is in trouble.

use std::ffi::CStr;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};

use pushgate_door::addresses::Family;
use pushgate_driver_shim::fork::Owner;
use pushgate_rdma_core_sys as sys;

use super::VerbsError;
use super::choice::{self, Choice, Description, Distance, Wish};
use super::gid::{self, Gid, GidEntry, OwnAddress};
use super::kinds::{Kind, Protocol, failure};
use super::looker::Looker;
use super::pkey;
#[cfg(any(test, feature = "sim"))]
use super::turn::Turns;
use pushgate_door::addresses::Interface;
use pushgate_door::netlink::addresses_of;

/// An open device with one of its ports. Shared by the queue pairs of a process.
pub struct Device {
    pub(super) verbs: &'static sys::Verbs,
    context: NonNull<sys::ibv_context>,
    /// In a child the kernel's objects are the parent's: nothing is destroyed there.
    pub(super) owner: Owner,
    name: String,
    port: u8,
    /// The port's folder below /sys.
    sysfs: PathBuf,
    /// The port could carry something when the device was opened.
    was_active: bool,
    ethernet: bool,
    /// Longest message, bytes.
    message: u32,
    pub(super) limits: DeviceLimits,
    pub(super) kind: &'static Kind,
    /// Who looks at the port.
    pub(super) looker: Arc<Looker>,
    /// How many completion queues have taken a vector.
    vectors: AtomicU32,
    /// One of them said that the device is lost.
    fatal: AtomicBool,
    pub(super) beside: Beside,
    subnets: Subnets,
    /// Queue pairs get contexts of their own, see [`Kind`].
    own_contexts: bool,
}

/// What is done beside an engine.
pub(super) type Task = Box<dyn FnOnce() + Send>;

/// Has a task done beside the engine's thread.
pub(super) type Beside = fn(Task) -> std::io::Result<()>;

/// For each address its leading bits that all addresses of its subnet have; 0 where that is not known.
type Subnets = fn(&[&GidEntry]) -> Vec<u8>;

fn subnets(entries: &[&GidEntry]) -> Vec<u8> {
    let interfaces = Interface::all().unwrap_or_default();
    let bits = |entry: &&GidEntry| {
        let interface = interfaces.iter().find(|i| entry.netdev.as_ref() == Some(&i.name))?;
        let held = interface.addresses.iter().find(|held| held.ip == entry.ip())?;
        (held.prefix > 0).then(|| held.prefix.saturating_add(if held.ip.is_ipv4() { 96 } else { 0 }))
    };
    entries.iter().map(|entry| bits(entry).unwrap_or(0)).collect()
}

fn on_a_thread(task: Task) -> std::io::Result<()> {
    std::thread::Builder::new().name("pushgate-renew".into()).spawn(task).map(drop)
}

// SAFETY: libibverbs' calls on a context are thread-safe (verbs(7)).
unsafe impl Send for Device {}
// SAFETY: as above; what is mutable of ours is atomic.
unsafe impl Sync for Device {}

/// What a port said of itself at one time: a subnet manager and an interface's MTU change it under an open device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// The port can send and receive.
    pub active: bool,
    /// Path MTU now, bytes.
    pub mtu: u32,
    /// Greatest path MTU, bytes.
    pub max_mtu: u32,
    /// InfiniBand's address; 0 on Ethernet.
    pub lid: u16,
    /// RoCE, not InfiniBand.
    pub ethernet: bool,
    /// InfiniBand that routes by GID: packets need a global header, as those of a virtual function without a LID do.
    pub global: bool,
    /// Longest message, bytes.
    pub message: u32,
    /// The device is known to place the RDMA WRITEs that arrive on one queue pair in the order in
    /// which they were posted.
    pub in_order: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceLimits {
    pub(super) queue: u32,
    pub(super) cq: u32,
    /// RDMA READs of a queue pair that may be under way in either direction, [`READS`] at most.
    pub(super) reads: u8,
}

/// RDMA READs that a link has under way at most, where it uses them: one for each post that waits for an answer. There are
/// seldom more such posts.
const READS: i32 = 16;

/// A flag of `ibv_port_attr` (`IBV_QPF_GRH_REQUIRED` of verbs.h).
const GRH_REQUIRED: u8 = 1;

/// Bytes of an `ibv_mtu`: 256 for 1, 512 for 2, up to 4096 for 5.
pub(super) const fn mtu_bytes(code: u32) -> u32 {
    128 << code
}

pub(super) fn non_blocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    rustix::fs::fcntl_getfl(fd)
        .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK))
        .map_err(|e| VerbsError::Call {
            what: "a descriptor of the RDMA device".into(),
            error: e.into(),
            remedy: String::new(),
        })
}

fn library() -> Result<&'static sys::Verbs, VerbsError> {
    static FORK: Once = Once::new();
    let verbs = sys::open().map_err(|e| VerbsError::Library(e.to_string()))?;
    // Before any other call. Where the kernel copies pinned pages for a child at the fork (Linux
    // 5.12 with rdma-core 35 and later) nothing is needed. Elsewhere the library keeps registered pages
    // out of children, with all else that lies on those pages: a write after a fork would move the
    // parent to another page than the device's.
    FORK.call_once(|| {
        // SAFETY: takes nothing, and asks the kernel.
        let unneeded = verbs.ibv_is_fork_initialized.is_ok()
            && unsafe { verbs.ibv_is_fork_initialized() } == sys::ibv_fork_status::IBV_FORK_UNNEEDED;
        if unneeded {
            return;
        }
        // SAFETY: takes nothing, and sets a mode of the library's.
        let error = unsafe { verbs.ibv_fork_init() };
        if error != 0 {
            let error = failure(error);
            tracing::warn!(
                "ibv_fork_init: {error}: a fork of this process may cut the device off from its memory"
            );
        }
    });
    Ok(verbs)
}

/// The devices of this host with libibverbs' handles; freed by the guard.
struct List {
    verbs: &'static sys::Verbs,
    devices: *mut *mut sys::ibv_device,
    count: usize,
}

impl List {
    fn get() -> Result<Self, VerbsError> {
        let verbs = library()?;
        let mut count = 0;
        // SAFETY: `count` is ours.
        let devices = unsafe { verbs.ibv_get_device_list(&mut count) };
        if devices.is_null() {
            let error = std::io::Error::last_os_error();
            // What the library says where the kernel has no RDMA at all.
            let none = matches!(error.raw_os_error(), Some(38) | Some(2) | Some(95));
            return match none {
                true => Ok(List { verbs, devices, count: 0 }),
                false => Err(VerbsError::Call {
                    what: "listing RDMA devices".into(),
                    error,
                    remedy: String::new(),
                }),
            };
        }
        Ok(List { verbs, devices, count: count.max(0) as usize })
    }

    fn iter(&self) -> impl Iterator<Item = (*mut sys::ibv_device, String)> + '_ {
        (0..self.count).map(|i| {
            // SAFETY: the list holds `count` devices until it is freed.
            let device = unsafe { *self.devices.add(i) };
            // SAFETY: the name belongs to the device and ends with a zero.
            let name = unsafe { CStr::from_ptr(self.verbs.ibv_get_device_name(device)) };
            (device, name.to_string_lossy().into_owned())
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.devices.is_null() {
            // SAFETY: from `ibv_get_device_list`; what was opened keeps its own reference.
            unsafe { self.verbs.ibv_free_device_list(self.devices) };
        }
    }
}

impl Device {
    /// Names of this host's RDMA devices.
    pub fn list() -> Result<Vec<String>, VerbsError> {
        Ok(List::get()?.iter().map(|(_, name)| name).collect())
    }

    /// Opens a device by its name. An error if its port is down.
    pub fn open(name: &str, port: u8) -> Result<Arc<Self>, VerbsError> {
        let device = Self::find(&List::get()?, name, port)?;
        match device.is_active() {
            true => Ok(Arc::new(device)),
            false => Err(device.port_down()),
        }
    }

    /// Opens the best device of this host, by this port ([`Choice`]), and says in the debug log why; the next one where the best
    /// can't be opened. `distance` gives how far a device is from the GPU.
    ///
    /// # Errors
    /// What is wrong with the best one where none can be opened.
    pub fn choose(
        port: u8,
        wish: &Wish,
        distance: impl Fn(&str) -> Distance,
    ) -> Result<Arc<Self>, VerbsError> {
        let list = List::get()?;
        let all = list.iter().map(|(_, name)| Description {
            distance: distance(&name),
            ..choice::describe(Path::new("/sys"), &name, port, addresses_of)
        });
        let choice = Choice::new(all, wish);
        let mut first = None;
        for name in choice.ranked().iter().map(|candidate| &*candidate.description.device) {
            match Self::find(&list, name, port) {
                Ok(device) if !device.kind.connects => {
                    first.get_or_insert(VerbsError::Unconnected { device: name.into() });
                }
                Ok(device) if device.is_active() => {
                    tracing::debug!("ib-dev = auto: {}", choice.why(name));
                    return Ok(Arc::new(device));
                }
                Ok(device) => _ = first.get_or_insert(device.port_down()),
                Err(e) => _ = first.get_or_insert(e),
            }
        }
        Err(first.unwrap_or(VerbsError::NoDevice { name: None, found: Vec::new() }))
    }

    /// Opens a device by its name, be its port up or down.
    pub fn open_as_is(name: &str, port: u8) -> Result<Arc<Self>, VerbsError> {
        let list = List::get()?;
        Ok(Arc::new(Self::find(&list, name, port)?))
    }

    /// What a port says of itself, be it up or down.
    pub fn port_state(name: &str, port: u8) -> Result<PortState, VerbsError> {
        Self::find(&List::get()?, name, port)?.query_port()
    }

    fn find(list: &List, name: &str, port: u8) -> Result<Self, VerbsError> {
        let Some((device, found)) = list.iter().find(|(_, found)| found == name) else {
            let found = list.iter().map(|(_, name)| name).collect();
            return Err(VerbsError::NoDevice { name: Some(name.into()), found });
        };
        Self::open_one(list.verbs, device, found, port)
    }

    fn open_one(
        verbs: &'static sys::Verbs,
        device: *mut sys::ibv_device,
        name: String,
        port: u8,
    ) -> Result<Self, VerbsError> {
        let call = |what: String| {
            let remedy = "; is /dev/infiniband there and may this user open it?".into();
            VerbsError::Call { what, error: std::io::Error::last_os_error(), remedy }
        };
        // SAFETY: the device is of a list that the caller holds.
        let context = unsafe { verbs.ibv_open_device(device) };
        let context = NonNull::new(context).ok_or_else(|| call(format!("opening RDMA device {name}")))?;
        let looker = Looker::of(&name, port);
        // From here on its drop closes it.
        let mut d = Device {
            verbs,
            context,
            owner: Owner::here(),
            sysfs: format!("/sys/class/infiniband/{name}/ports/{port}").into(),
            name,
            port,
            was_active: false,
            ethernet: true,
            message: 0,
            limits: DeviceLimits { queue: 0, cq: 0, reads: 1 },
            kind: Kind::of(Protocol::Ib, 0),
            looker,
            // Processes of a host begin at different ones.
            vectors: AtomicU32::new(std::process::id()),
            fatal: AtomicBool::new(false),
            beside: on_a_thread,
            subnets,
            own_contexts: false,
        };
        // SAFETY: plain data.
        let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, the place ours.
        if unsafe { verbs.ibv_query_device(d.raw(), &mut attributes) } != 0 {
            return Err(call(format!("querying RDMA device {}", d.name)));
        }
        if port == 0 || port > attributes.phys_port_cnt {
            return Err(VerbsError::NoPort { device: d.name.clone(), port, ports: attributes.phys_port_cnt });
        }
        d.limits = DeviceLimits {
            queue: attributes.max_qp_wr.max(0) as u32,
            cq: attributes.max_cqe.max(0) as u32,
            reads: attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom).clamp(1, READS) as u8,
        };
        // SAFETY: the device is of a list that the caller holds.
        let transport = unsafe { (*device).transport_type };
        d.kind = Kind::of(Protocol::of_transport(transport), attributes.vendor_id);
        d.own_contexts = d.kind.own_contexts;
        d.opens(d.query_port()?);
        non_blocking(d.async_fd())?;
        Ok(d)
    }

    /// Of a library and context that a test or the simulator has made.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn mock(
        verbs: &'static sys::Verbs,
        context: NonNull<sys::ibv_context>,
        sysfs: PathBuf,
        kind: &'static Kind,
    ) -> Self {
        Device {
            verbs,
            context,
            owner: Owner::here(),
            name: "mock0".into(),
            port: 1,
            sysfs,
            was_active: true,
            ethernet: true,
            message: 1 << 30,
            limits: DeviceLimits { queue: 1 << 18, cq: 1 << 19, reads: 1 },
            kind,
            // The simulator has one thread, and a clock of its own.
            looker: Looker::new(true, Turns::of_engine()),
            vectors: AtomicU32::new(0),
            fatal: AtomicBool::new(false),
            // A test's device notes calls by thread, and the simulator has one thread.
            beside: |task| {
                task();
                Ok(())
            },
            // Those of 24 bits of IPv4.
            subnets: |entries| vec![120; entries.len()],
            own_contexts: false,
        }
    }

    /// Takes what stays of the port as long as the device is open.
    fn opens(&mut self, port: PortState) {
        (self.was_active, self.ethernet, self.message) = (port.active, port.ethernet, port.message);
    }

    /// Makes a test's device one whose port is of InfiniBand.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn be_infiniband(&mut self) {
        self.ethernet = false;
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.context.as_ptr()
    }

    /// The device's name, as `ibv_devices` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port, from 1.
    pub fn port(&self) -> u8 {
        self.port
    }

    /// What kind of device it is, with what differs from other kinds.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// Whether the port could carry anything when the device was opened.
    pub fn is_active(&self) -> bool {
        self.was_active
    }

    /// Whether the port is RoCE's, and not InfiniBand's.
    pub fn is_ethernet(&self) -> bool {
        self.ethernet
    }

    fn port_down(&self) -> VerbsError {
        VerbsError::PortDown { device: self.name.clone(), port: self.port, ethernet: self.is_ethernet() }
    }

    /// The longest message that it can send, bytes.
    pub fn longest_message(&self) -> u32 {
        self.message
    }

    /// The completion vector of one more completion queue, whose interrupts go to the core of that vector: one after the other of
    /// those that the device has.
    pub(super) fn next_vector(&self) -> i32 {
        // SAFETY: the context is open.
        let vectors = unsafe { self.context.as_ref() }.num_comp_vectors.max(1) as u32;
        (self.vectors.fetch_add(1, Ordering::Relaxed) % vectors) as i32
    }

    /// What the port says of itself now.
    pub(super) fn query_port(&self) -> Result<PortState, VerbsError> {
        // SAFETY: plain data.
        let mut a: sys::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, the place ours.
        let r = unsafe { sys::ibv_query_port(self.verbs, self.raw(), self.port, &mut a) };
        if r != 0 {
            return Err(VerbsError::Call {
                what: format!("querying port {} of {}", self.port, self.name),
                error: failure(r),
                remedy: String::new(),
            });
        }
        Ok(PortState {
            active: a.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            mtu: mtu_bytes(a.active_mtu.0),
            max_mtu: mtu_bytes(a.max_mtu.0),
            lid: a.lid,
            ethernet: a.link_layer == sys::IBV_LINK_LAYER_ETHERNET,
            global: a.flags & GRH_REQUIRED != 0,
            message: a.max_msg_sz,
            in_order: self.kind.in_order,
        })
    }

    /// The place of a partition's key in the port's table; `None`: of the first key.
    pub(super) fn partition(&self, partition: Option<u16>) -> Result<u16, VerbsError> {
        pkey::index(&self.sysfs, partition, || (self.name.clone(), self.port))
    }

    /// The entries of the port's table that hold an address.
    pub fn gids(&self) -> Vec<GidEntry> {
        gid::table(&self.sysfs, Path::new("/sys/class/net"))
    }

    /// The network interface, if the device speaks iWARP.
    fn iwarp_netdev(&self) -> Option<String> {
        let netdev = || choice::iwarp_netdev(&self.gids(), Path::new("/sys/class/net"));
        (self.kind.protocol == Protocol::Iwarp).then(netdev).flatten()
    }

    /// The IP addresses at which others reach the device's network interface: with iWARP those of the interface, else
    /// those of the GID table. Empty on InfiniBand, whose GIDs are no IP addresses.
    pub fn addresses(&self) -> Vec<IpAddr> {
        match self.kind.protocol {
            Protocol::Iwarp => self.iwarp_netdev().as_deref().map(addresses_of).unwrap_or_default(),
            _ if !self.is_ethernet() => Vec::new(),
            _ => self.gids().iter().filter(|gid| gid.netdev.is_some()).map(GidEntry::ip).collect(),
        }
    }

    /// The IP address at which rdma_cm binds a queue pair whose address is this entry. The entries of an iWARP device and of an InfiniBand
    /// port hold no IP address: that is the network interface's.
    pub(super) fn ip(&self, entry: &GidEntry, family: Option<Family>) -> Result<IpAddr, VerbsError> {
        let net = Path::new("/sys/class/net");
        let (speaks, netdev, none, remedy) = match self.kind.protocol {
            Protocol::Iwarp => (
                "iWARP",
                self.iwarp_netdev(),
                "no network interface has its hardware address",
                "; give its network interface an IP address",
            ),
            _ if self.is_ethernet() => return Ok(entry.ip()),
            _ => (
                "InfiniBand",
                self.folder().and_then(|folder| choice::netdev_of_port(folder, self.port, net)),
                "the port has no network interface (IPoIB)",
                "; set rdma-cm = auto, with which InfiniBand needs no IP address of its own, or give the port one \
                 (modprobe ib_ipoib)",
            ),
        };
        let addresses = netdev.as_deref().map(addresses_of).unwrap_or_default();
        choice::netdev_address(&addresses, family).ok_or_else(|| VerbsError::Call {
            what: format!("the IP address of {} for rdma_cm over {speaks}", self.name),
            error: std::io::Error::other(match netdev {
                Some(netdev) => format!("its network interface {netdev} has none"),
                None => none.into(),
            }),
            remedy: remedy.into(),
        })
    }

    /// The device with its port as they are now, for another link: this one, or the device of the same name if this one was
    /// removed, or had its port down when it was opened. An error if the port can't carry anything.
    pub fn as_now(self: &Arc<Self>) -> Result<Arc<Self>, VerbsError> {
        if self.is_lost() || !self.is_active() {
            return Device::open(&self.name, self.port);
        }
        match self.query_port()?.active {
            true => Ok(self.clone()),
            false => Err(self.port_down()),
        }
    }

    /// The device with a context for one more queue pair: this one, or a context of its own, where one context serves few.
    pub(super) fn for_queue_pair(self: &Arc<Self>) -> Result<Arc<Self>, VerbsError> {
        if self.own_contexts { Device::open(&self.name, self.port) } else { Ok(self.clone()) }
    }

    /// See [`Subnets`].
    pub(super) fn subnets(&self, entries: &[&GidEntry]) -> Vec<u8> {
        (self.subnets)(entries)
    }

    /// Whether the port still has these addresses at their places, and there are any.
    pub(super) fn has_all(&self, sources: &[OwnAddress]) -> bool {
        let has = |entry: &GidEntry| self.gid(entry.index).is_ok_and(|found| found == Some(entry.gid));
        !sources.is_empty() && sources.iter().all(|source| has(&source.entry))
    }

    /// Whether the kernel still shows the device.
    fn exists(&self) -> bool {
        self.folder().is_some_and(Path::exists)
    }

    /// The device's folder below /sys, which holds those of its ports.
    fn folder(&self) -> Option<&Path> {
        self.sysfs.ancestors().nth(2)
    }

    /// The address at an index, if there is one.
    fn gid(&self, index: u32) -> std::io::Result<Option<Gid>> {
        gid::at(&self.sysfs, index)
    }

    /// Readable when an asynchronous event waits.
    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }

    /// Takes the asynchronous events that wait: `fails` is told libibverbs' handle of a queue pair that came to the error state, or
    /// of a completion queue that failed. True if one of them may concern the port. Does not block.
    pub(super) fn take_events(&self, fails: impl Fn(usize)) -> bool {
        let mut news = false;
        loop {
            // SAFETY: plain data.
            let mut event: sys::ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: the context is open, its descriptor does not block, the place is ours.
            if unsafe { self.verbs.ibv_get_async_event(self.raw(), &mut event) } != 0 {
                return news;
            }
            // SAFETY: the library's own text for any value.
            let text = unsafe { CStr::from_ptr(self.verbs.ibv_event_type_str(event.event_type)) };
            use sys::ibv_event_type as e;
            let (text, device, port) = (text.to_string_lossy(), &*self.name, self.port);
            // SAFETY: any bytes are a handle, which is compared alone.
            let (qp, cq) = unsafe { (event.element.qp.addr(), event.element.cq.addr()) };
            match event.event_type {
                e::IBV_EVENT_CQ_ERR => fails(cq),
                e::IBV_EVENT_QP_FATAL
                | e::IBV_EVENT_QP_REQ_ERR
                | e::IBV_EVENT_QP_ACCESS_ERR
                | e::IBV_EVENT_QP_LAST_WQE_REACHED
                    if self.kind.state_told =>
                {
                    fails(qp)
                }
                _ => {}
            }
            match event.event_type {
                // A packet came before the queue pair was ready to send: all is well.
                e::IBV_EVENT_COMM_EST => {}
                // The queue pair's link finds what ended it, and says so with the ranks.
                e::IBV_EVENT_QP_FATAL
                | e::IBV_EVENT_QP_REQ_ERR
                | e::IBV_EVENT_QP_ACCESS_ERR
                | e::IBV_EVENT_SQ_DRAINED
                | e::IBV_EVENT_QP_LAST_WQE_REACHED => {
                    tracing::info!(device, port, "RDMA event of a queue pair: {text}");
                }
                _ => {
                    tracing::warn!(device, port, "RDMA event: {text}");
                    news = true;
                }
            }
            if event.event_type == sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL {
                self.fatal.store(true, Ordering::Release);
            }
            // SAFETY: taken above, acknowledged once.
            unsafe { self.verbs.ibv_ack_async_event(&mut event) };
        }
    }

    /// The device has said that it works no more, and maybe completes nothing.
    pub(super) fn is_fatal(&self) -> bool {
        self.fatal.load(Ordering::Acquire)
    }

    /// Whether the device works no more, or is not there any more.
    pub(super) fn is_lost(&self) -> bool {
        self.is_fatal() || !self.exists()
    }

    /// Whether an address of the port is gone.
    pub(super) fn has_lost(&self, entry: &GidEntry) -> bool {
        // Who can't look knows nothing.
        self.ethernet && self.gid(entry.index).is_ok_and(|found| found != Some(entry.gid))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        // SAFETY: opened by `open_one`; everything made from it holds this device.
        unsafe { self.verbs.ibv_close_device(self.raw()) };
    }
}
