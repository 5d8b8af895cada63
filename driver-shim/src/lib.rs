//! Windows and where they come from, and the one ABI for all memory that is shared with devices and
//! other processes.

use std::io;

pub use pushgate_abi::{abi, record, versions};

pub mod bell;
mod closers;
pub mod closing;
pub mod eventfd;
pub mod fdpass;
pub mod file;
pub mod fork;
pub mod interrupt;
pub mod kmod;
pub mod limits;
pub mod log;
pub mod memory;
pub mod order;
pub mod placed;
pub mod process;
pub mod provider;
mod scm;
pub mod segment;
#[allow(missing_docs, non_camel_case_types, clippy::undocumented_unsafe_blocks)]
pub mod uapi;
pub mod users;
pub mod window;

/// Why memory could not be made, taken over or recognised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShimError {
    /// A size that is not possible.
    #[error("memory {name:?} of {bytes} bytes: expected {allowed}")]
    Size {
        /// What the memory is for.
        name: String,
        /// How many bytes were asked for.
        bytes: usize,
        /// What would have been accepted.
        allowed: &'static str,
    },
    /// [`memory::HugePages::Require`] could not be satisfied.
    #[error(
        "no 2 MiB pages for {name:?} of {bytes} bytes ({call}: {source}): raise vm.nr_hugepages and the hugetlb \
         limit of the cgroup, or allow normal pages"
    )]
    HugePages {
        /// What the memory is for.
        name: String,
        /// How many bytes were asked for.
        bytes: usize,
        /// The call that failed.
        call: &'static str,
        /// The call's error.
        source: io::Error,
    },
    /// The kernel refused to place the memory on a NUMA node.
    #[error(
        "{name:?} cannot be placed on NUMA node {node} ({source}): name a node of \
         /sys/devices/system/node/online, let the sandbox allow mbind, or name no node"
    )]
    Numa {
        /// What the memory is for.
        name: String,
        /// The node that was asked for.
        node: u32,
        /// The error of `mbind`.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} for {name:?} of {bytes} bytes: {source}; {}", limits::remedy(source).unwrap_or_else(|| (*remedy).into()))]
    System {
        /// What the memory is for.
        name: String,
        /// The memory's size.
        bytes: usize,
        /// The call that failed.
        call: &'static str,
        /// The call's error.
        source: io::Error,
        /// What helps where the error is no limit of the system ([`limits::remedy`]).
        remedy: &'static str,
    },
    /// A peer's memory does not have the size that was agreed on.
    #[error(
        "the peer's memory has {found} bytes, agreed on were {expected}: both sides must use one geometry"
    )]
    PeerSize {
        /// The size of the memory that was handed over.
        found: u64,
        /// The size that was agreed on.
        expected: usize,
    },
    /// The peer could still change its memory in a way that would hurt this process.
    #[error("the peer's memory lacks the seal {missing}: {remedy}")]
    PeerSeals {
        /// The seals that are missing.
        missing: &'static str,
        /// What the peer has to do.
        remedy: &'static str,
    },
    /// The memory lies in huge pages into which another process may punch holes.
    #[error(
        "the peer's writable memory lies in huge pages, which it could take away under us: create it with \
         HugePages::Never"
    )]
    PeerHugePages,
    /// A process of another user handed over memory that lacks pages; they would be allocated on this process's account.
    #[error(
        "the memory has holes: {there} of its {bytes} bytes have pages; write to all of it before it is handed over"
    )]
    PeerHoles {
        /// Bytes that have pages.
        there: u64,
        /// The size of the memory.
        bytes: usize,
    },
    /// A geometry is outside its limits.
    #[error(transparent)]
    Geometry(#[from] segment::GeometryError),
    /// The header is not that of a segment that this process can use.
    #[error(transparent)]
    Header(#[from] segment::HeaderError),
}
