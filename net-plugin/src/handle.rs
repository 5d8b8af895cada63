//! The 128-byte handle by which a connector finds a listener. NCCL carries it from one rank to the
//! other, so its content is checked on arrival. A listener does not know who will connect, so its handle
//! has every address at which the listener listens, and says whose they are.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 to 7 | "PGNCCLH4"; its last character is the version |
//! | 8 | where it listens: 1, a Unix socket, for `local` queue pairs; 2, TCP; 3, both |
//! | 9 | for whom it listens over TCP: 1, `verbs` queue pairs; 2, `tcp`; 3, both; 0 without TCP |
//! | 10 to 11 | TCP: port, the same at all addresses |
//! | 12 to 27 | key: made for this listener. Over TCP both ends prove that they know the key; what names the Unix socket and stands in greetings follows from the key |
//! | 28 to 43 | boot id of the listener's host |
//! | 44 to 47 | process number of the listener |
//! | 48 to 67 | name of the listener's host, padded with zeros |
//! | 68 to 103 | TCP: addresses in the order in which they are to be tried, those that have room, then zeros. Each begins with its kind: 1, IPv4; 2, IPv6; 3, link-local IPv6, whose last 8 bytes follow |
//! | 104 to 111 | checksum of the bytes before |
//! | 112 to 119 | not carried: the connector's own mark in its copy, 0 at first |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use pushgate_door::addresses::Places;
use pushgate_door::{Purpose, Secret, Terms};
use pushgate_driver_shim::versions::Versions;

use crate::error::{Code, Failure, Result};
use crate::identity::Identity;

/// Versions that this build speaks of everything that the two ends say to each other.
pub const VERSIONS: Versions = Versions::new(6, 6);

/// The size of a handle, `NCCL_NET_HANDLE_MAXSIZE`.
pub const BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"PGNCCLH4";
const UNIX: u8 = 1;
const TCP: u8 = 2;
const VERBS: u8 = 1;
const LINKS: u8 = 2;
const V4: u8 = 1;
const V6: u8 = 2;
const LINK: u8 = 3;
/// The first half of a link-local address.
const LINK_PREFIX: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];
const KEY: Range<usize> = 12..28;
const BOOT: Range<usize> = 28..44;
const PID: Range<usize> = 44..48;
/// A host's name has room for fewer bytes than it may have.
const NAME: Range<usize> = 48..68;
const ADDRESSES: Range<usize> = 68..CHECKED;
const CHECKED: usize = 104;
const MARK: Range<usize> = 112..120;

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
    /// The listener has a Unix socket that is named after the key's nonce, in its network namespace.
    pub unix: bool,
    /// Addresses at which the listener listens over TCP.
    pub tcp: Option<Places>,
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
        h[KEY].copy_from_slice(&self.key.0);
        if self.unix {
            h[8] |= UNIX;
        }
        if let Some(tcp) = self.tcp {
            h[8] |= TCP;
            h[9] = if self.between.verbs { VERBS } else { 0 } | if self.between.tcp { LINKS } else { 0 };
            h[10..12].copy_from_slice(&tcp.first().port().to_le_bytes());
            let mut at = ADDRESSES.start;
            for entry in tcp.all().iter().map(entry) {
                let end = at + entry.len();
                if end <= ADDRESSES.end {
                    h[at..end].copy_from_slice(&entry);
                    at = end;
                }
            }
        }
        h[BOOT].copy_from_slice(&self.listener.boot_id);
        h[PID].copy_from_slice(&self.listener.pid.to_le_bytes());
        h[NAME].copy_from_slice(&self.listener.name[..NAME.len()]);
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
        let sixteen = |at: Range<usize>| -> [u8; 16] { h[at].try_into().expect("sixteen bytes") };
        let port = u16::from_le_bytes([h[10], h[11]]);
        let Some(all) = entries(&h[ADDRESSES], port) else {
            return wrong("its addresses make no sense".into());
        };
        let tcp = Places::of(&all);
        if tcp.is_some() != (h[8] & TCP != 0) {
            return wrong(format!("its kind is {} with {} addresses", h[8], all.len()));
        }
        let mut name = [0; crate::identity::NAME];
        name[..NAME.len()].copy_from_slice(&h[NAME]);
        Ok(Handle {
            key: Key(sixteen(KEY)),
            unix: h[8] & UNIX != 0,
            tcp,
            between: Between { verbs: h[9] & VERBS != 0, tcp: h[9] & LINKS != 0 },
            listener: Identity {
                boot_id: sixteen(BOOT),
                pid: u32::from_le_bytes(h[PID].try_into().expect("four bytes")),
                name,
            },
        })
    }
}

/// An address as it stands in a handle. The number of its interface is left out: it says nothing at another host.
fn entry(at: &SocketAddr) -> Vec<u8> {
    match at.ip().to_canonical() {
        IpAddr::V4(ip) => [&[V4][..], &ip.octets()].concat(),
        IpAddr::V6(ip) => match ip.octets().strip_prefix(&LINK_PREFIX) {
            Some(rest) => [&[LINK][..], rest].concat(),
            None => [&[V6][..], &ip.octets()].concat(),
        },
    }
}

/// The addresses of a handle; nothing where they make no sense.
fn entries(mut bytes: &[u8], port: u16) -> Option<Vec<SocketAddr>> {
    let mut all = Vec::new();
    while let Some((kind, rest)) = bytes.split_first().filter(|(kind, _)| **kind != 0) {
        let length = match *kind {
            V4 => 4,
            V6 => 16,
            LINK => 8,
            _ => return None,
        };
        let (ip, rest) = rest.split_at_checked(length)?;
        let ip = match *kind {
            V4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(ip).ok()?)),
            V6 => Ipv6Addr::from(<[u8; 16]>::try_from(ip).ok()?).into(),
            _ => Ipv6Addr::from(<[u8; 16]>::try_from([&LINK_PREFIX[..], ip].concat()).ok()?).into(),
        };
        all.push((ip, port).into());
        bytes = rest;
    }
    Some(all)
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
        let mut name = [0; crate::identity::NAME];
        name[..5].copy_from_slice(b"node7");
        let listener = Identity { boot_id: [7; 16], pid: 12, name };
        let places =
            |all: &[&str]| Places::of(&all.iter().map(|at| at.parse().unwrap()).collect::<Vec<SocketAddr>>());
        for (unix, tcp) in [
            (true, None),
            (false, places(&["10.1.2.3:4567"])),
            (true, places(&["[2001:db8::5]:1", "[2001:db8::6]:1"])),
            (true, places(&["10.1.2.3:9", "10.2.2.3:9", "[fe80::1]:9", "10.3.2.3:9"])),
        ] {
            let between = Between { verbs: tcp.is_some(), tcp: tcp.is_some() && unix };
            let handle = Handle { key: Key([0xab; 16]), unix, tcp, between, listener };
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
        // An address without room is left out, and so is the number of an interface.
        let tcp = places(&["[2001:db8::5]:1", "[2001:db8::6]:1", "10.1.2.3:1"]);
        let between = Between { verbs: false, tcp: true };
        let handle = Handle { key: Key([1; 16]), unix: false, tcp, between, listener };
        assert_eq!(
            Handle::decode(&handle.encode()).unwrap().tcp,
            places(&["[2001:db8::5]:1", "[2001:db8::6]:1"])
        );
        let scoped = Handle { tcp: places(&["[fe80::1%3]:9"]), ..handle };
        assert_eq!(Handle::decode(&scoped.encode()).unwrap().tcp, places(&["[fe80::1]:9"]));
        for bad in [[0; BYTES], [0xff; BYTES]] {
            assert!(Handle::decode(&bad).unwrap_err().text.contains("same build"));
        }
    }
}
