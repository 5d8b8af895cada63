//! Every TCP connection of pushgate begins here: the two ends prove to each other that they know one secret, and
//! encrypt the connection where both ask for that.
//!
//! A connection goes through the door in these steps:
//!
//! 1. Each end says hello, the dialer first: 64 bytes with a version, flags, the connection's [`Purpose`] and 32 random
//!    bytes ([`Handshake`]).
//! 2. The dialer proves that it knows the [`Secret`]: an HMAC-SHA256 over both hellos. The listener reads nothing else
//!    before, and says nothing else.
//! 3. With TLS both ends encrypt now (TLS 1.3 with keys of the process), and the dialer proves the secret again, this time
//!    over what both ends know of the encryption. So one who sits between the two is found out.
//! 4. The listener proves that it knows the secret.
//! 5. The dialer sends a frame that says what it wants, its greeting. Then the connection belongs to its owners.
//!
//! A [`Door`] listens. It keeps a bounded number of connections on their way, each for a bounded time and with bounded
//! memory. When it is full, one of the address with the most makes room, and none that has proved the secret makes room for a
//! stranger (`crowd.rs`). [`dial()`] and [`Dialer`] are the other end. A [`Stream`] is what comes out.
//!
//! Without TLS the proof protects the set-up alone: one who can change packets on their way can still change what follows.

pub mod addresses;
mod counts;
mod crowd;
mod dial;
mod handshake;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod linger;
mod listener;
pub mod netlink;
mod passage;
mod plain;
pub mod redial;
mod secret;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub use counts::{Counted, Counts};
pub use dial::{Dialer, dial, pass};
pub use handshake::{HELLO, Handshake, PROOF, Refused, VERSION};
pub use listener::{Arrival, Door, Limits};
pub use secret::{Secret, SecretError, VARIABLE};
pub use stream::Stream;

/// Time for all steps of one connection, from its arrival to its greeting.
pub const PASSAGE: Duration = Duration::from_secs(5);

/// What a connection is for. A proof for one purpose is worth nothing for another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Purpose([u8; 12]);

impl Purpose {
    /// Connections between the ranks of a job.
    pub const MESH: Purpose = Purpose::new("mesh");
    /// Links of queue pairs over TCP.
    pub const LINK: Purpose = Purpose::new("link");
    /// Connections of the NCCL plugin.
    pub const NCCL: Purpose = Purpose::new("nccl");

    /// A purpose with a label of its own, of at most 12 bytes.
    pub const fn new(label: &str) -> Purpose {
        let (label, mut bytes) = (label.as_bytes(), [0; 12]);
        assert!(label.len() <= bytes.len(), "a label has at most 12 bytes");
        let mut i = 0;
        while i < label.len() {
            bytes[i] = label[i];
            i += 1;
        }
        Purpose(bytes)
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let label = self.0.iter().take_while(|b| **b != 0);
        label.flat_map(|b| std::ascii::escape_default(*b)).try_for_each(|b| write!(f, "{}", b as char))
    }
}

impl std::fmt::Debug for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Purpose({self})")
    }
}

/// What the two ends of a connection must agree on.
#[derive(Clone, Debug)]
pub struct Terms {
    /// What both ends know.
    pub secret: Secret,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

/// Why there is no connection, or no door.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// Nobody was reached at the address.
    #[error("{at} can't be reached: {error}")]
    Connect {
        /// The address.
        at: SocketAddr,
        /// What the kernel says.
        error: io::Error,
    },
    /// The connection ended on its way through the door.
    #[error("{0}")]
    Refused(#[from] Refused),
    /// A door without a secret would be open to other hosts.
    #[error(
        "listening at {0} takes a secret, because other hosts reach that address: set secret-file \
         (PUSHGATE_SECRET_FILE) or {VARIABLE} to one secret on all hosts, or use an address of the loopback device"
    )]
    Open(IpAddr),
    /// The kernel refused something, as an address to listen at or another descriptor.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the kernel says.
        error: io::Error,
    },
}
