//! Where GPUs, NICs and windows sit on a host, how far they are from each other, and which path is
//! advised for each pair: docs/topology.md.
//!
//! [`Topology`] is plain data, read from sysfs ([`Sysfs`]). [`Topology::path`] gives the way
//! between two functions, [`Topology::pairs`] every GPU with every NIC, [`advise`] the advice.
//! Everything but the readers is pure.

mod address;
mod advise;
mod config;
mod costs;
mod distance;
pub mod draw;
mod emulated;
mod file;
mod fingerprint;
mod host_link;
mod link;
mod machine;
mod merge;
mod nccl;
pub mod nvml;
mod pair;
mod report;
mod sysfs;
mod tree;

pub use address::{Address, BadAddress};
pub use advise::{Advice, Basis, Costs, Evidence, Method, advise, without_nic};
pub use config::{Acs, Config, Express, PortType, Read, parse as parse_config};
pub use costs::{ADVISED, Figures, evidence, link_to_host, route};
pub use distance::{AcsOnWay, Distance, Hop, Path, PathLink};
pub use file::FileError;
pub use host_link::HostLink;
pub use link::{Link, LinkState, parse_speed, parse_width};
pub use machine::{CpuKind, Machine, Node};
pub use pair::{Far, Pair, Parameters};
pub use report::{GpuGpu, GpuNic, Report};
pub use sysfs::Sysfs;
pub use tree::{
    Function, Gpu, Iommu, Mig, Nic, NvLink, NvLinkEnd, Parent, Peer, Port, Role, RootComplex, Shim, Source,
    Topology,
};
