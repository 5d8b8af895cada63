//! What was read of a host: plain data, for the checks. No I/O here.

use std::collections::BTreeMap;
use std::net::IpAddr;

use pushgate_door::addresses::Interface;
use pushgate_link_verbs::PortState;
use pushgate_link_verbs::gid::GidEntry;
use pushgate_link_verbs::kinds::Protocol;
use serde::{Deserialize, Serialize};

/// What was asked of one place.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Read<T> {
    /// This.
    Is(T),
    /// It is not there, or was not looked at.
    #[default]
    Absent,
    /// It is there and can't be read, or makes no sense: a sentence.
    Unreadable(String),
}

impl<T> Read<T> {
    /// The content, if there is one.
    pub fn is(&self) -> Option<&T> {
        match self {
            Read::Is(it) => Some(it),
            _ => None,
        }
    }

    /// The content, if there is one, to be changed.
    pub(crate) fn is_mut(&mut self) -> Option<&mut T> {
        match self {
            Read::Is(it) => Some(it),
            _ => None,
        }
    }

    /// Looks into the content; what it makes no sense of is unreadable.
    pub fn then<U>(self, parse: impl FnOnce(T) -> Result<U, String>) -> Read<U> {
        match self {
            Read::Is(it) => parse(it).map_or_else(Read::Unreadable, Read::Is),
            Read::Absent => Read::Absent,
            Read::Unreadable(why) => Read::Unreadable(why),
        }
    }
}

/// Where the payload is to land.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Window {
    /// Shared memory.
    #[default]
    Memory,
    /// Pages of the kernel module.
    Staging,
    /// A BAR, by the kernel module.
    Bar,
}

/// Whether windows shall lie in huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum HugePages {
    /// Where there are any.
    #[default]
    Try,
    /// No.
    Never,
    /// Without them there is no window.
    Require,
}

/// The queue pairs that the settings ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum QueuePairs {
    /// Those that go, for each pair of ranks.
    #[default]
    Auto,
    /// Between ranks of one host.
    Local,
    /// Over RDMA.
    Verbs,
    /// Over TCP.
    Tcp,
}

impl QueuePairs {
    /// The word that the setting `qp` has for the queue pairs.
    pub fn name(self) -> &'static str {
        match self {
            QueuePairs::Auto => "auto",
            QueuePairs::Local => "local",
            QueuePairs::Verbs => "verbs",
            QueuePairs::Tcp => "tcp",
        }
    }
}

/// What the settings in force ask of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wants {
    /// Queue pairs are `verbs`.
    pub verbs: bool,
    /// What `qp` is.
    #[serde(default)]
    pub qp: QueuePairs,
    /// The address at which other hosts reach this one, if one is named.
    #[serde(default)]
    pub host: Option<String>,
    /// The window.
    pub window: Window,
    /// Bytes of a window.
    pub window_size: u64,
    /// Bytes of a window of the NCCL plugin.
    pub net_window_size: u64,
    /// WQE slots of a queue pair.
    pub slots: u64,
    /// Receives of a queue pair.
    pub receives: u64,
    /// The RDMA devices that are named.
    #[serde(default)]
    pub devices: Vec<String>,
    /// The RDMA devices' port.
    pub port: u8,
    /// The entry of its GID table, if one is named.
    pub gid_index: Option<u32>,
    /// The partition's key, if one is named.
    #[serde(default)]
    pub pkey: Option<u16>,
    /// Records follow their payload at once, whatever is known of the device.
    pub assumes_order: bool,
    /// Traffic class of RDMA packets.
    pub traffic_class: u8,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// Queue pairs that are to fit.
    #[serde(default = "queue_pairs")]
    pub queue_pairs: u64,
    /// Where the settings came from, or what is wrong with them.
    pub settings: Result<String, String>,
}

/// As many as one program may have.
fn queue_pairs() -> u64 {
    64
}

impl Wants {
    /// Whether the settings allow a device: it is named, or none is.
    pub fn allows(&self, device: &str) -> bool {
        self.devices.is_empty() || self.devices.iter().any(|name| name == device)
    }
}

impl Default for Wants {
    fn default() -> Self {
        Wants {
            verbs: false,
            qp: QueuePairs::Auto,
            host: None,
            window: Window::Memory,
            window_size: 1 << 20,
            net_window_size: 4 << 20,
            slots: 1024,
            receives: 1024,
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            pkey: None,
            assumes_order: false,
            traffic_class: 0,
            huge_pages: HugePages::Try,
            queue_pairs: queue_pairs(),
            settings: Ok("defaults".into()),
        }
    }
}

impl Wants {
    /// Bytes that one `verbs` queue pair registers, about: window, mirror of a peer's as large,
    /// inbox and outbox (docs/rdma.md, "What lies where").
    pub fn queue_pair_bytes(&self) -> u64 {
        let boxes = (4 << 10) + (128 << 10) + 256 * self.slots + 32 * self.receives;
        2 * self.window_size + 2 * boxes
    }
}

/// Everything that was read.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    /// The settings.
    pub wants: Wants,
    /// The folder below which a tree of files kept of a host lies. Empty: this host.
    pub root: String,
    /// RDMA devices; absent: the kernel has no such class.
    pub rdma: Read<Vec<RdmaDevice>>,
    /// What rdma_cm needs.
    pub rdma_cm: RdmaCm,
    /// Network interfaces of RDMA ports, by name.
    pub netdevs: BTreeMap<String, Netdev>,
    /// GPUs and RDMA devices on PCI.
    pub pci: Vec<PciFunction>,
    /// The kernel's command line.
    pub cmdline: Read<String>,
    /// The IOMMU has groups.
    pub iommu_groups: usize,
    /// NVIDIA's driver.
    pub gpu: Gpu,
    /// The kernel and this process.
    pub host: Host,
    /// The module `pushgate`.
    pub module: Module,
    /// NCCL and its plugin.
    pub nccl: Nccl,
}

/// What a queue pair needs that comes up through rdma_cm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaCm {
    /// The module rdma_ucm is loaded; absent: it is not.
    pub module: Read<()>,
    /// This user may read and write /dev/infiniband/rdma_cm; absent: it is not there.
    pub device: Read<()>,
    /// librdmacm.so.1 can be opened; absent: nobody tried.
    pub library: Read<()>,
}

/// A device of /sys/class/infiniband.
#[derive(Clone, Debug, Default)]
pub struct RdmaDevice {
    /// `mlx5_0`.
    pub name: String,
    /// `1: CA`.
    pub node_type: Read<String>,
    /// The device's PCI function; software devices have none.
    pub pci: Option<String>,
    /// The device's ports.
    pub ports: Vec<RdmaPort>,
}

impl RdmaDevice {
    /// The protocol that the device speaks, if it says.
    pub fn protocol(&self) -> Option<Protocol> {
        self.node_type.is().and_then(|text| Protocol::of_node_type(text))
    }

    /// Whether the device speaks iWARP.
    pub fn is_iwarp(&self) -> bool {
        self.protocol() == Some(Protocol::Iwarp)
    }
}

/// A port.
#[derive(Clone, Debug, Default)]
pub struct RdmaPort {
    /// From 1.
    pub number: u8,
    /// `4: ACTIVE`.
    pub state: Read<String>,
    /// `5: LinkUp`.
    pub phys_state: Read<String>,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: Read<String>,
    /// `100 Gb/sec (4X EDR)`.
    pub rate: Read<String>,
    /// `0x1f`.
    pub lid: Read<String>,
    /// Entries of its GID table that hold an address.
    pub gids: Vec<GidEntry>,
    /// The port's partition keys, each with its place.
    pub pkeys: Vec<(u16, u16)>,
    /// The port's network interface.
    pub netdev: Option<String>,
    /// The ToS byte that an administrator has rdma_cm give packets of RoCE; absent: none was set.
    pub tos: Read<u8>,
    /// Errors that the port has counted since its driver was loaded, by the names of its files in sysfs. Those that are not 0.
    pub errors: Vec<(String, u64)>,
    /// What libibverbs says.
    pub verbs: Read<PortState>,
}

/// A network interface.
#[derive(Clone, Debug, Default)]
pub struct Netdev {
    /// Bytes.
    pub mtu: Read<u32>,
    /// The interface's IP addresses.
    pub addresses: Read<Vec<IpAddr>>,
    /// Data centre bridging.
    pub dcb: Read<Dcb>,
    /// The folder `ecn` of mlx5's driver: for each priority, whether the NIC notifies of marks and
    /// reacts to them.
    pub ecn: Read<Ecn>,
}

/// IEEE 802.1Qaz as the driver tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dcb {
    /// Bit for each priority: pause frames on.
    pub pfc: Option<u8>,
    /// Traffic class of each priority.
    pub prio_tc: Option<[u8; 8]>,
    /// Entries of the APP table: selector, priority, protocol.
    pub apps: Vec<(u8, u8, u16)>,
}

/// Priorities with ECN on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ecn {
    /// Bit for each priority: it answers marks (notification point).
    pub notifies: u8,
    /// Bit for each priority: it slows down (reaction point).
    pub reacts: u8,
}

/// What a function is that is no RDMA device.
pub const GPU: &str = "GPU";

/// A GPU or an RDMA device on PCI.
#[derive(Clone, Debug, Default)]
pub struct PciFunction {
    /// `0000:01:00.0`.
    pub address: String,
    /// [`GPU`] or the RDMA device's name.
    pub what: String,
    /// The type of the function's IOMMU group: `identity`, `DMA`, `DMA-FQ`.
    pub iommu: Read<String>,
    /// The function may mark its packets relaxed-ordered; absent: it is not on PCI Express.
    pub relaxed: Read<bool>,
    /// Address Translation Services are on; absent: it has none.
    pub ats: Read<bool>,
    /// `PCI_WR_ORDERING` of NVIDIA's firmware; absent: it is another vendor's, or mlxconfig is not there.
    pub write_ordering: Read<String>,
    /// From the root to it.
    pub bridges: Vec<Bridge>,
}

/// A bridge above a function.
#[derive(Clone, Debug, Default)]
pub struct Bridge {
    /// `0000:00:01.0`.
    pub address: String,
    /// The ACS control register; absent: it has none.
    pub acs: Read<u16>,
}

/// NVIDIA's driver.
#[derive(Clone, Debug, Default)]
pub struct Gpu {
    /// GPUs on PCI.
    pub count: usize,
    /// Drivers that they are bound to, each once.
    pub bound: Vec<String>,
    /// First line of /proc/driver/nvidia/version.
    pub driver: Read<String>,
    /// /proc/driver/nvidia/params.
    pub params: Read<String>,
    /// The module nvidia_peermem is loaded.
    pub peermem: bool,
    /// GPU instances of MIG.
    pub mig_instances: usize,
    /// The process of the MPS control daemon.
    pub mps: Option<u32>,
    /// The compute mode of each GPU that CUDA shows this process, by index.
    pub compute_modes: Read<Vec<u32>>,
}

/// The kernel and this process.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// `6.1.0-56-amd64`.
    pub release: Read<String>,
    /// The kernel has the function by which RDMA drivers take dma-bufs.
    pub umem_dmabuf: Read<bool>,
    /// Bits of CapEff.
    pub capabilities: Read<u64>,
    /// This process is in a user namespace of less than the whole host.
    pub user_namespace: bool,
    /// RLIMIT_MEMLOCK: soft and hard, bytes; `u64::MAX`: none.
    pub memlock: Read<(u64, u64)>,
    /// What systemd's files say that a service gets.
    pub systemd_memlock: Option<String>,
    /// Huge pages of 2 MiB: all and free.
    pub huge_pages: Read<(u64, u64)>,
    /// kernel.yama.ptrace_scope.
    pub ptrace_scope: Read<u32>,
    /// process_vm_readv was called on this process itself.
    pub readv: Read<()>,
    /// A memfd of a window's size was made, sealed and filled.
    pub memfd: Read<()>,
    /// /dev/shm: all and free bytes.
    pub shm: Read<(u64, u64)>,
    /// The network interfaces of this namespace with their addresses.
    pub interfaces: Read<Vec<Interface>>,
    /// The cgroup's limits that are set, the tightest of all levels.
    pub cgroup: Cgroup,
}

/// A limit and what is used of it.
pub type Limit = Option<(u64, u64)>;

/// Limits of this process's cgroups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// There is at least one.
    pub found: bool,
    /// Bytes in use, excluding reclaimable page cache.
    pub memory: Limit,
    /// Processes and threads.
    pub pids: Limit,
    /// RDMA objects, by device.
    pub rdma_objects: BTreeMap<String, (u64, u64)>,
    /// Bytes of 2 MiB pages.
    pub huge: Limit,
    /// Files that make no sense or can't be read.
    pub unreadable: Vec<String>,
}

/// What an open device says: version of its interface, and whether it has a window; or why it does not open.
pub type Opened = Result<(u32, bool), String>;

/// The kernel module.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// The module's version; absent: not loaded.
    pub version: Read<String>,
    /// Device files, and what came of opening them.
    pub devices: Vec<(String, Opened)>,
}

/// NCCL.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Nccl {
    /// `ncclGetVersion`, and the library that answered.
    pub version: Read<(u32, String)>,
    /// The plugin's variable.
    pub plugin_variable: Option<String>,
    /// NCCL_NET_PLUGIN_REF_COUNT.
    pub ref_count: Option<String>,
    /// The plugin that NCCL would open.
    pub plugin: Read<Plugin>,
}

/// A network plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plugin {
    /// The file's name as the linker was asked for it.
    pub file: String,
    /// What its newest table says it is called.
    pub name: String,
    /// The versions of its tables, of v8 to v12.
    pub tables: Vec<u32>,
}
