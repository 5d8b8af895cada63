//! What can go wrong before there is a queue pair.

use pushgate_driver_shim::ShimError;

use super::gid::Gid;

/// Why there is no RDMA queue pair.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// libibverbs is not there, or not whole.
    #[error("{0}")]
    Library(String),
    /// The host has no such device.
    #[error(
        "RDMA device {} is not there; this host has {}",
        name.as_deref().unwrap_or("(any with an active port)"),
        if found.is_empty() { "none".into() } else { found.join(", ") }
    )]
    NoDevice {
        /// What was asked for.
        name: Option<String>,
        /// What there is.
        found: Vec<String>,
    },
    /// The device has no such port.
    #[error("ib-port is {port}, but {device} has ports 1 to {ports}")]
    NoPort {
        /// Its name.
        device: String,
        /// Asked for.
        port: u8,
        /// How many there are.
        ports: u8,
    },
    /// The device has no reliable connected queue pairs.
    #[error(
        "{device} has no reliable connected queue pairs; name an InfiniBand, RoCE or iWARP device by ib-dev"
    )]
    Unconnected {
        /// Its name.
        device: String,
    },
    /// The port is not active.
    #[error("port {port} of {device} is down; {}", match ethernet {
        true => "bring its network interface up (ip link set ... up)",
        false => "look at the cable, and whether a subnet manager (opensm) runs",
    })]
    PortDown {
        /// Its name.
        device: String,
        /// The port.
        port: u8,
        /// Its port is RoCE's or iWARP's, and not InfiniBand's.
        ethernet: bool,
    },
    /// No address to send from.
    #[error(
        "port {port} of {device} has no {}; it has {found:?}: {}, or set gid-index",
        match index { Some(i) => format!("address at gid-index {i}"), None => "address".into() },
        match ethernet {
            true => "give its network interface an IP address",
            false => "look whether a subnet manager (opensm) runs",
        }
    )]
    NoGid {
        /// Its name.
        device: String,
        /// The port.
        port: u8,
        /// Its port is RoCE's or iWARP's, and not InfiniBand's.
        ethernet: bool,
        /// Asked for.
        index: Option<u32>,
        /// What there is.
        found: Vec<(u32, Gid)>,
    },
    /// The port's table has no key of the partition that was asked for.
    #[error(
        "port {port} of {device} is in no partition {partition:#06x}; it has {}: set pkey to one of those, or have the subnet manager put \
         the port into the partition (opensm: partitions.conf)",
        match &found[..] {
            [] => "no key at all".into(),
            all => all.iter().map(|key| format!("{key:#06x}")).collect::<Vec<_>>().join(", "),
        }
    )]
    NoPartition {
        /// Its name.
        device: String,
        /// The port.
        port: u8,
        /// Asked for.
        partition: u16,
        /// The keys that there are.
        found: Vec<u16>,
    },
    /// A message could be longer than the device sends.
    #[error("window-size is {bytes}, but {device} sends at most {message} bytes in one message")]
    Window {
        /// Of the window.
        bytes: u64,
        /// Its name.
        device: String,
        /// Its limit.
        message: u32,
    },
    /// The device's queues are too short.
    #[error(
        "{receives} receives are more than {device} can have (queues of {queue}, CQs of {cq}); set receives lower"
    )]
    Queues {
        /// Its name.
        device: String,
        /// Asked for, with what is set aside.
        receives: u32,
        /// Longest queue.
        queue: u32,
        /// Longest CQ.
        cq: u32,
    },
    /// The installed libibverbs lacks something.
    #[error("the installed libibverbs has no {name}, needed on {device}")]
    Missing {
        /// The symbol.
        name: &'static str,
        /// The device.
        device: String,
    },
    /// The device has no memory of its own, or too little.
    #[error(
        "{device} {}: use window = memory",
        match most {
            0 => "has no memory of its own (max_dm_size 0)".into(),
            _ => format!("gives at most {most} bytes of its own memory (max_dm_size), and {bytes} were asked for"),
        }
    )]
    NicMemory {
        /// Its name.
        device: String,
        /// Asked for.
        bytes: usize,
        /// What there is in one piece.
        most: u64,
    },
    /// A call failed.
    #[error("{what}: {error}{remedy}")]
    Call {
        /// What was tried.
        what: String,
        /// What came of it.
        #[source]
        error: std::io::Error,
        /// What to do, if known; begins with a semicolon.
        remedy: String,
    },
    /// Memory for the peer to write could not be made.
    #[error(transparent)]
    Memory(#[from] ShimError),
    /// The other end does not fit.
    #[error("rank {rank}: {why}")]
    Peer {
        /// Whose offer it is.
        rank: u32,
        /// What is wrong with it.
        why: String,
    },
}
