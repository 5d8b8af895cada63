//! Who this process is, for the ranks that connect to it: which host it runs on, and its number there.

use std::fmt;

use pushgate_driver_shim::log::Foreign;

/// The bytes of a host's name that a handle has room for.
pub const NAME: usize = 32;

/// A process of a host. It goes with the handle of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The host's boot id, which names one start of one kernel. Containers of a host have the same.
    pub boot_id: [u8; 16],
    /// The process's number in its own PID namespace.
    pub pid: u32,
    /// The host's name, for messages alone; what is not used is zero.
    pub name: [u8; NAME],
}

impl Identity {
    /// This process. `_PUSHGATE_NET_HOST` in the environment gives it the name, and the boot id, of a host that is not this
    /// one, so that the ways between hosts can be tested on one.
    pub fn here() -> Self {
        let pid = std::process::id();
        if let Ok(other) = std::env::var("_PUSHGATE_NET_HOST") {
            return Identity { boot_id: padded(other.as_bytes()), pid, name: padded(other.as_bytes()) };
        }
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot_id = u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0).to_be_bytes();
        let name = padded(rustix::system::uname().nodename().to_bytes());
        Identity { boot_id, pid, name }
    }

    /// Whether both processes run under one kernel. They may still be in containers that share nothing else.
    pub fn shares_kernel_with(&self, other: &Identity) -> bool {
        self.boot_id == other.boot_id
    }

    /// The host's name. It may come from a peer, so what is no plain text in it is escaped.
    pub fn host(&self) -> String {
        let end = self.name.iter().position(|b| *b == 0).unwrap_or(NAME);
        Foreign::word(String::from_utf8_lossy(&self.name[..end])).to_string()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of host {}", self.pid, self.host())
    }
}

/// The beginning of `bytes`, with zeros behind where that is shorter.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    let n = bytes.len().min(N);
    padded[..n].copy_from_slice(&bytes[..n]);
    padded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_by_its_number_and_its_host() {
        let node7 = Identity { boot_id: [1; 16], pid: 12, name: padded(b"node7") };
        assert_eq!(node7.to_string(), "process 12 of host node7");
        let long = Identity { name: padded(&[b'n'; 80]), ..node7 };
        assert_eq!(long.host(), "n".repeat(NAME));
        // A peer says what it wants.
        let strange = Identity { name: padded(b"\x1b[31m\xff\n"), ..node7 };
        assert_eq!(strange.host(), "\\u{1b}[31m\u{fffd}\\n");
        let here = Identity::here();
        assert!(here.shares_kernel_with(&Identity { pid: 1, ..here }));
        assert!(!here.shares_kernel_with(&node7));
    }
}
