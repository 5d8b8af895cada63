//! What a window is and where it comes from, and the one ABI that everyone
//! who shares memory with us speaks.

use std::io;

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
pub mod abi;
pub mod bell;
pub mod eventfd;
pub mod fdpass;
pub mod file;
pub mod fork;
pub mod kmod;
pub mod memory;
pub mod placed;
pub mod process;
pub mod provider;
pub mod record;
pub mod segment;
#[allow(missing_docs, non_camel_case_types, clippy::undocumented_unsafe_blocks)]
pub mod uapi;
pub mod window;

/// Why memory could not be made, taken over or recognised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShimError {
    /// A size that cannot be had.
    #[error("memory {name:?} of {bytes} bytes: allowed is {allowed}")]
    Size {
        /// What the memory is for.
        name: String,
        /// Bytes asked for.
        bytes: usize,
        /// What would have been accepted.
        allowed: &'static str,
    },
    /// [`memory::HugePages::Require`] could not be met.
    #[error(
        "no 2 MiB pages for {name:?} of {bytes} bytes ({call}: {source}): raise vm.nr_hugepages and the hugetlb \
         limit of the cgroup, or allow normal pages"
    )]
    HugePages {
        /// What the memory is for.
        name: String,
        /// Bytes asked for.
        bytes: usize,
        /// The call that failed.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The kernel would not place the memory on a NUMA node.
    #[error(
        "{name:?} cannot be placed on NUMA node {node} ({source}): name a node of \
         /sys/devices/system/node/online, let the sandbox allow mbind, or name no node"
    )]
    Numa {
        /// What the memory is for.
        name: String,
        /// Node asked for.
        node: u32,
        /// What `mbind` said.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} for {name:?} of {bytes} bytes: {source}; {remedy}")]
    System {
        /// What the memory is for.
        name: String,
        /// Its size.
        bytes: usize,
        /// The call that failed.
        call: &'static str,
        /// Its error.
        source: io::Error,
        /// What usually helps.
        remedy: &'static str,
    },
    /// A peer's memory does not have the size that was agreed on.
    #[error(
        "the peer's memory has {found} bytes, agreed on were {expected}: both sides must use one geometry"
    )]
    PeerSize {
        /// Size of what was handed over.
        found: u64,
        /// Size agreed on.
        expected: usize,
    },
    /// A peer's memory could still be changed in a way that would hurt us.
    #[error("the peer's memory lacks the seal {missing}: {remedy}")]
    PeerSeals {
        /// The seals that are not there.
        missing: &'static str,
        /// What the peer has to do.
        remedy: &'static str,
    },
    /// Huge pages that another process may punch holes into.
    #[error(
        "the peer's writable memory lies in huge pages, which it could take away under us: create it with \
         HugePages::Never"
    )]
    PeerHugePages,
    /// Limits not kept.
    #[error(transparent)]
    Geometry(#[from] segment::GeometryError),
    /// Not a segment that we could use.
    #[error(transparent)]
    Header(#[from] segment::HeaderError),
}
