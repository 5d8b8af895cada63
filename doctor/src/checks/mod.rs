//! The checks: each a function of the readings, with its threshold and where that is from.

pub mod address;
pub mod counters;
pub mod gpu;
pub mod host;
pub mod module;
pub mod nccl;
pub mod network;
pub mod ordering;
pub mod partition;
pub mod pci;
pub mod rdma;

use crate::finding::Finding;
use crate::readings::Readings;

/// What a check needs to have been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// RDMA devices and their network interfaces.
    Rdma,
    /// GPUs, the driver, MPS.
    Gpu,
    /// PCI functions, IOMMU, bridges.
    Pci,
    /// The kernel, this process, its cgroups.
    Host,
    /// The module `pushgate`.
    Module,
    /// NCCL and the plugin: opens libraries.
    Nccl,
}

/// One check.
pub struct Check {
    /// The check's name, as in `--only`.
    pub name: &'static str,
    /// What it asks, for `--list`.
    pub about: &'static str,
    /// What it needs.
    pub parts: &'static [Part],
    /// At least one finding, whatever was read; pure.
    pub run: fn(&Readings) -> Vec<Finding>,
}

macro_rules! checks {
    ($($name:literal, $about:literal, [$($part:ident),*], $run:path;)+) => {
        /// All checks, in the order in which they are shown: what others stand on comes first.
        pub const CHECKS: &[Check] = &[$(Check {
            name: $name, about: $about, parts: &[$(Part::$part),*], run: $run,
        },)+];
    };
}

checks! {
    "settings", "the settings in force are allowed", [], host::settings;
    "tcp-address", "other hosts reach an address of this one", [Host], address::reach;
    "rdma-devices", "there are RDMA devices of a kind that queue pairs can use", [Rdma], rdma::devices;
    "rdma-choice", "the device that `ib-dev = auto` takes, and why", [Rdma], rdma::choice;
    "rdma-cm", "rdma_cm, which iWARP devices connect by", [Rdma], rdma::cm;
    "rdma-verbs", "libibverbs opens them", [Rdma], rdma::verbs;
    "rdma-port", "their ports are active", [Rdma], rdma::port;
    "rdma-gid", "a port has an address: an entry in its GID table", [Rdma], rdma::gid;
    "rdma-gid-type", "RoCE v2, which is routed, not v1 alone", [Rdma], rdma::gid_type;
    "rdma-pkey", "an InfiniBand port is a full member of the partition", [Rdma], partition::pkey;
    "rdma-address", "the interface has the IP address that the GID stands for", [Rdma], rdma::address;
    "rdma-write-order", "whether RDMA WRITEs are known to be placed in order", [Rdma], rdma::write_order;
    "rdma-pci-order", "an RDMA device's writes reach memory in their order", [Rdma, Pci, Gpu], ordering::pci;
    "rdma-ats", "what an RDMA device has translated by itself takes the short way", [Rdma, Pci, Gpu], ordering::ats;
    "rdma-grh", "an InfiniBand port that asks for global headers has an address for them", [Rdma], partition::global;
    "rdma-mtu", "path MTU 4096, and an interface that allows it", [Rdma], network::mtu;
    "rdma-pfc", "pause frames for the priority of RDMA packets", [Rdma], network::pfc;
    "rdma-ecn", "congestion notification for that priority", [Rdma], network::ecn;
    "rdma-traffic-class", "which priority the traffic class stands for", [Rdma], network::traffic_class;
    "rdma-tos", "queue pairs have the ToS that rdma_cm gives RoCE by default", [Rdma], network::tos;
    "rdma-counters", "ports have counted no lost or damaged packets", [Rdma], counters::errors;
    "memlock", "memory that may be locked, for registrations", [Rdma, Host], host::memlock;
    "cgroup", "room within the limits of the control group", [Rdma, Host], host::cgroup;
    "huge-pages", "2 MiB pages for windows", [Host], host::huge_pages;
    "memfd", "shared memory of a window's size can be made", [Host], host::memfd;
    "shm", "room in /dev/shm, for NCCL", [Host, Gpu], host::shm;
    "process-vm-readv", "one process may read another, for `local` queue pairs", [Host], host::readv;
    "module", "the kernel module is there, of this release, and opens", [Module], module::module;
    "gpu-driver", "NVIDIA GPUs have a driver", [Gpu], gpu::driver;
    "dma-buf", "RDMA devices can be given GPU memory as a dma-buf", [Gpu, Host, Rdma], gpu::dma_buf;
    "peermem", "nvidia_peermem, the older way to give RDMA devices GPU memory", [Gpu, Host, Rdma], gpu::peermem;
    "peer-mapping", "the GPU's driver maps a BAR for users that are not root", [Gpu, Host], gpu::peer_mapping;
    "mig", "GPUs are not split", [Gpu], gpu::mig;
    "mps", "no MPS daemon stands between programs and GPU", [Gpu], gpu::mps;
    "copier", "GPUs let another process copy their memory", [Gpu], gpu::copier;
    "iommu", "GPUs and RDMA devices reach each other without translation", [Gpu, Pci, Rdma], pci::iommu;
    "acs", "no bridge sends their traffic up to the root", [Gpu, Pci, Rdma], pci::acs;
    "nccl", "NCCL is there, of a version that takes the plugin", [Nccl], nccl::library;
    "nccl-plugin", "NCCL would find the plugin", [Nccl], nccl::plugin;
}

/// Bytes as people say them.
pub(crate) fn bytes(n: u64) -> String {
    match n {
        u64::MAX => "no limit".into(),
        n if n >= 10 << 30 => format!("{} GiB", n >> 30),
        n if n >= 10 << 20 => format!("{} MiB", n >> 20),
        n if n >= 10 << 10 => format!("{} KiB", n >> 10),
        n => format!("{n} bytes"),
    }
}

/// The first whole number of some text: `4` of "4: ACTIVE".
pub(crate) fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}
