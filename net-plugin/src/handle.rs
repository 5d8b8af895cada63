//! The 128-byte handle by which a connector finds a listener. NCCL carries it from one rank to the
//! other, so its content is checked on arrival. A listener does not know who will connect, so its handle
//! has every address at which the listener listens, and says whose they are.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 to 7 | "PGNCCLH3"; its last character is the version |
//! | 8 | where it listens: 1, a Unix socket, for `local` queue pairs; 2, TCP; 3, both |
//! | 9 | for whom it listens over TCP: 1, `verbs` queue pairs; 2, `tcp`; 3, both; 0 without TCP |
//! | 10 to 11 | TCP: port |
//! | 12 to 15 | TCP: scope of a link-local address |
//! | 16 to 31 | key: made for this listener. Over TCP both ends prove that they know the key; what names the Unix socket and stands in greetings follows from the key |
//! | 32 to 47 | TCP: IPv6 address, or an IPv4 address mapped into it |
//! | 48 to 63 | boot id of the listener's host |
//! | 64 to 67 | process number of the listener |
//! | 68 to 99 | name of the listener's host, behind it zeros |
//! | 104 to 111 | checksum of the bytes before |
//! | 112 to 119 | not carried: the connector's own mark in its copy, 0 at first |

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use pushgate_driver_shim::versions::Versions;
use pushgate_proxy::door::{Purpose, Secret, Terms};

use crate::error::{Code, Failure, Result};
use crate::identity::{Identity, NAME};

/// Versions that this build speaks of everything that the two ends say to each other.
pub const VERSIONS: Versions = Versions::new(6, 6);

/// The size of a handle, `NCCL_NET_HANDLE_MAXSIZE`.
pub const BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"PGNCCLH3";
const UNIX: u8 = 1;
const TCP: u8 = 2;
const VERBS: u8 = 1;
const LINKS: u8 = 2;
const CHECKED: usize = 104;
const MARK: std::ops::Range<usize> = 112..120;

/// 16 random bytes that name something.
pub type Nonce = [u8; 16];

/// 16 bytes that nobody can guess.
pub fn random() -> Result<Nonce> {
    let mut nonce = [0; 16];
    let mut file = std::fs::File::open("/dev/urandom").map_err(Failure::system("/dev/urandom"))?;
    std::io::Read::read_exact(&mut file, &mut nonce).map_err(Failure::system("/dev/urandom"))?;
    Ok(nonce)
}

/// Which queue pairs a process can make with others of other hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Between {
    pub verbs: bool,
    pub tcp: bool,
}

/// 16 random bytes that those alone know who have the handle. They show in no log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; 16]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// What two ends with the handle prove to know.
    pub fn secret(&self) -> Secret {
        Secret::new(&self.0).expect("it is long enough")
    }

    /// What the ends of a connection over TCP agree on.
    pub fn terms(&self, tls: bool) -> Terms {
        Terms { secret: self.secret(), purpose: Purpose::NCCL, tls }
    }

    /// What names the listener where others may read it.
    pub fn nonce(&self) -> Nonce {
        self.secret().bytes(b"nonce")
    }
}

/// Where a listener listens, and who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub key: Key,
    /// It listens at the Unix socket that is named after the key's nonce, in its network namespace.
    pub unix: bool,
    /// It listens at this address.
    pub tcp: Option<SocketAddr>,
    /// Queue pairs over RDMA, and those over TCP, can be made there.
    pub between: Between,
    pub listener: Identity,
}

/// The checksum, FNV-1a: it detects accidents, not forgeries.
pub fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ *b as u64).wrapping_mul(0x0100_0000_01b3))
}

/// Gives a handle its checksum.
pub fn seal(h: &mut [u8; BYTES]) {
    let check = sum(&h[..CHECKED]);
    h[CHECKED..CHECKED + 8].copy_from_slice(&check.to_le_bytes());
}

impl Handle {
    pub fn encode(&self) -> [u8; BYTES] {
        let mut h = [0; BYTES];
        h[..8].copy_from_slice(&MAGIC);
        h[16..32].copy_from_slice(&self.key.0);
        if self.unix {
            h[8] |= UNIX;
        }
        if let Some(tcp) = self.tcp {
            h[8] |= TCP;
            h[9] = if self.between.verbs { VERBS } else { 0 } | if self.between.tcp { LINKS } else { 0 };
            h[10..12].copy_from_slice(&tcp.port().to_le_bytes());
            let (ip, scope) = match tcp {
                SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
                SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
            };
            h[12..16].copy_from_slice(&scope.to_le_bytes());
            h[32..48].copy_from_slice(&ip.octets());
        }
        h[48..64].copy_from_slice(&self.listener.boot_id);
        h[64..68].copy_from_slice(&self.listener.pid.to_le_bytes());
        h[68..68 + NAME].copy_from_slice(&self.listener.name);
        seal(&mut h);
        h
    }

    pub fn decode(h: &[u8; BYTES]) -> Result<Handle> {
        let wrong = |why: String| {
            Err(Failure::new(
                Code::Argument,
                format!(
                    "a connection handle that no listener of pushgate made: {why}; do all ranks load the same build of the plugin?"
                ),
            ))
        };
        if h[..8] != MAGIC {
            return wrong(format!("it begins with {:02x?}, not with {MAGIC:02x?}", &h[..8]));
        }
        if h[CHECKED..CHECKED + 8] != sum(&h[..CHECKED]).to_le_bytes() {
            return wrong("its check sum is wrong".into());
        }
        if !(UNIX..=UNIX | TCP).contains(&h[8]) {
            return wrong(format!("its kind is {}, known are 1, 2 and 3", h[8]));
        }
        if h[9] > VERBS | LINKS || (h[9] != 0) != (h[8] & TCP != 0) {
            return wrong(format!("its kind is {} with queue pairs {}", h[8], h[9]));
        }
        let sixteen = |at: usize| -> [u8; 16] { h[at..at + 16].try_into().expect("sixteen bytes") };
        let word = |at: usize| u32::from_le_bytes(h[at..at + 4].try_into().expect("four bytes"));
        let port = u16::from_le_bytes([h[10], h[11]]);
        let ip = Ipv6Addr::from(sixteen(32));
        let tcp = match IpAddr::V6(ip).to_canonical() {
            IpAddr::V4(v4) => (v4, port).into(),
            IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, word(12)).into(),
        };
        let name = h[68..68 + NAME].try_into().expect("as long as a name");
        Ok(Handle {
            key: Key(sixteen(16)),
            unix: h[8] & UNIX != 0,
            tcp: (h[8] & TCP != 0).then_some(tcp),
            between: Between { verbs: h[9] & VERBS != 0, tcp: h[9] & LINKS != 0 },
            listener: Identity { boot_id: sixteen(48), pid: word(64), name },
        })
    }
}

/// The connector's mark in its copy of a handle.
pub fn mark(h: &[u8; BYTES]) -> u64 {
    u64::from_le_bytes(h[MARK].try_into().expect("eight bytes"))
}

/// Sets the connector's mark in its copy of a handle.
pub fn set_mark(h: &mut [u8; BYTES], mark: u64) {
    h[MARK].copy_from_slice(&mark.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_back_and_garbage_is_refused() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let link_local = SocketAddrV6::new("fe80::1".parse().unwrap(), 9, 0, 3).into();
        for (unix, tcp) in [
            (true, None),
            (false, Some(address("10.1.2.3:4567"))),
            (true, Some(address("[2001:db8::5]:1"))),
            (true, Some(link_local)),
        ] {
            let between = Between { verbs: tcp.is_some(), tcp: tcp.is_some() && unix };
            let handle = Handle { key: Key([0xab; 16]), unix, tcp, between, listener: Identity::here() };
            let mut bytes = handle.encode();
            assert_eq!(Handle::decode(&bytes).unwrap(), handle);
            set_mark(&mut bytes, 12);
            assert_eq!((Handle::decode(&bytes).unwrap(), mark(&bytes)), (handle, 12));
            for i in 0..MARK.start {
                let mut bad = bytes;
                bad[i] ^= 0x40;
                assert_eq!(Handle::decode(&bad).unwrap_err().code, Code::Argument, "byte {i}");
            }
        }
        for bad in [[0; BYTES], [0xff; BYTES]] {
            assert!(Handle::decode(&bad).unwrap_err().text.contains("same build"));
        }
    }
}
