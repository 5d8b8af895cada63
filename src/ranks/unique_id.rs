//! The id of a job whose program hands it to the ranks itself, as NCCL's unique id.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use pushgate_door::addresses::{Places, Wish, listen, offer};

use crate::context::Context;
use crate::error::{Error, Result};

/// What every id begins with: four letters and the version of the layout.
const MAGIC: [u8; 8] = *b"pgid\x02\0\0\0";
/// Where the addresses lie, of 16 bytes each: the first one, then those that may follow. An IPv4 address is mapped into IPv6.
const ADDRESSES: [usize; Places::MOST] = [8, 80, 96, 112];
/// The most ids of a context whose ranks have not met yet: each holds a socket open.
const MOST_OPEN: usize = 64;

/// Names a job and where its ranks meet. 128 bytes, for a program that hands them to its ranks by a way of its own.
///
/// Rank 0's process makes the id, and joins with [`Comm::connect_with`](crate::Comm::connect_with) as every other rank
/// does. An id serves for one communicator. Treat it as a password: who has it can be a rank.
///
/// The text of an id is 256 hexadecimal digits (`to_string`, `parse`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    /// Bytes of an id.
    pub const BYTES: usize = 128;

    /// Makes an id, and opens the socket at which rank 0 meets the others. Call this in rank 0's process.
    ///
    /// The socket's address is that of the setting `rendezvous`, else the setting `host` with a port of the system's choice.
    /// With neither the id has up to four addresses of this host, and each rank takes the first that it reaches: addresses of
    /// interfaces that are up, neither of the loopback device nor of a bridge for containers where there are others. Where other hosts
    /// reach none of them, the id is for ranks of this host alone, which a warning says. The socket stays open until rank 0 has
    /// joined or the context is gone.
    pub fn new(context: &Context) -> Result<Self> {
        context.here()?;
        let s = context.settings();
        let listeners = match (s.rendezvous.as_str(), s.host.as_str()) {
            ("none", host) => {
                let wish = Wish { host, ..Wish::default() };
                let offered = offer(&wish).map_err(|why| {
                    s.refused("host", format!("auto or an IP address of this host ({why})"))
                })?;
                if offered.only_here.is_some() {
                    tracing::warn!("the unique id is for ranks of this host alone: its address is {offered}");
                }
                let mut at = offered.sockets();
                at.truncate(Places::MOST);
                listen(&at)
                    .map_err(|why| s.refused("host", format!("auto or an IP address of this host ({why})")))?
            }
            (place, _) => crate::mesh::listen_at(place).map_err(|e| s.with_origin(e))?,
        };
        let local =
            |listener: &TcpListener| listener.local_addr().map_err(Error::io("the address of a unique id"));
        let places = listeners.iter().map(local).collect::<Result<Vec<_>>>()?;
        if places.iter().any(|place| place.ip().is_unspecified()) {
            let allowed = "HOST:PORT with an address of this host alone, which an id can name";
            return Err(s.refused("rendezvous", allowed));
        }
        let mut random = [0; 48];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut random))
            .map_err(Error::io("a key for a unique id from /dev/urandom"))?;
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (at, place) in ADDRESSES.into_iter().zip(&places) {
            let ip = match place.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            bytes[at..at + 16].copy_from_slice(&ip.octets());
        }
        bytes[24..26].copy_from_slice(&places[0].port().to_be_bytes());
        bytes[26] = places[0].is_ipv6().into();
        bytes[27] = places.len() as u8;
        bytes[32..80].copy_from_slice(&random);
        let id = UniqueId(bytes);
        context.inner.listeners.keep(id.name(), listeners)?;
        Ok(id)
    }

    /// The bytes of the id, for a way that carries bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The id of these bytes. Refuses what [`UniqueId::to_bytes`] can't have made.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = |why: &str| {
            let allowed = format!("the {} bytes that rank 0's UniqueId::new made, unchanged", Self::BYTES);
            // Not the id itself: it is a secret.
            Err(Error::config("unique id", why, allowed))
        };
        let Ok(bytes) = <[u8; Self::BYTES]>::try_from(bytes) else {
            return wrong(&format!("of {} bytes", bytes.len()));
        };
        if bytes[..8] != MAGIC {
            return wrong("with another beginning; run one release of pushgate in all ranks");
        }
        let id = UniqueId(bytes);
        let count = usize::from(bytes[27]);
        let rest = ADDRESSES.get(count).map_or(Self::BYTES, |at| *at);
        let is_whole = bytes[26] <= 1
            && (1..=Places::MOST).contains(&count)
            && bytes[28..32].iter().chain(&bytes[rest.max(80)..]).all(|byte| *byte == 0);
        let meets = |place: &SocketAddr| {
            place.port() != 0 && !place.ip().is_unspecified() && !place.ip().is_multicast()
        };
        if !is_whole || !id.places().iter().all(meets) {
            return wrong("that was changed on its way");
        }
        Ok(id)
    }

    /// Where rank 0 listens; the first of its addresses.
    pub fn place(&self) -> SocketAddr {
        self.places()[0]
    }

    /// All addresses at which rank 0 listens, in the order in which they are to be tried; at least one. Each rank takes its own
    /// interface for a link-local one.
    pub fn places(&self) -> Vec<SocketAddr> {
        let port = u16::from_be_bytes([self.0[24], self.0[25]]);
        let ip = |(place, at): (usize, usize)| {
            let octets: [u8; 16] = self.0[at..at + 16].try_into().expect("16 bytes");
            let ip = IpAddr::from(octets);
            // The first may be an IPv6 address that looks like a mapped one.
            SocketAddr::new(if place == 0 && self.0[26] == 1 { ip } else { ip.to_canonical() }, port)
        };
        ADDRESSES.into_iter().enumerate().take(usize::from(self.0[27]).max(1)).map(ip).collect()
    }

    /// The job's name. It tells nothing of the key.
    pub(crate) fn name(&self) -> String {
        self.0[32..48].iter().fold("id-".into(), |mut name, byte| {
            let _ = write!(name, "{byte:02x}");
            name
        })
    }

    /// What the ranks of this job alone know.
    pub fn key(&self) -> [u8; 32] {
        self.0[48..80].try_into().expect("32 bytes")
    }
}

/// The text of the id, its key among it.
impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where the id's ranks meet, without its key: for logs.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<_> = self.places().iter().map(SocketAddr::to_string).collect();
        write!(f, "UniqueId({} at {})", self.name(), places.join(", "))
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim().as_bytes();
        let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
        let pairs = text.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?));
        match pairs.collect::<Option<Vec<u8>>>() {
            Some(bytes) if text.len() == 2 * Self::BYTES => Self::from_bytes(&bytes),
            _ => {
                let allowed = format!("the {} hexadecimal digits that rank 0 printed", 2 * Self::BYTES);
                Err(Error::config("unique id", format!("of {} characters", text.len()), allowed))
            }
        }
    }
}

/// The sockets of ids whose ranks have not met yet, by the job's name.
#[derive(Default)]
pub(crate) struct Listeners(Mutex<HashMap<String, Vec<TcpListener>>>);

impl Listeners {
    fn keep(&self, name: String, listeners: Vec<TcpListener>) -> Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST_OPEN {
            let allowed = format!(
                "at most {MOST_OPEN} of a context whose rank 0 has not joined: join, or drop the context"
            );
            return Err(Error::config("unique ids", all.len() + 1, allowed));
        }
        all.insert(name, listeners);
        Ok(())
    }

    /// The sockets of an id that this context made, once.
    pub(crate) fn take(&self, id: &UniqueId) -> Result<Vec<TcpListener>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&id.name()).ok_or_else(|| {
            let allowed = "an id that this context made and that no rank 0 has joined with: each communicator needs an id \
                           of its own, made by rank 0";
            Error::config("unique id", format!("{id:?}"), allowed)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use pushgate_tests::fuzz::{fuzz, kind};

    use super::*;

    fn id() -> [u8; UniqueId::BYTES] {
        let mut bytes = [0; UniqueId::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&Ipv4Addr::new(10, 0, 0, 7).to_ipv6_mapped().octets());
        bytes[24..26].copy_from_slice(&7000u16.to_be_bytes());
        bytes[27] = 1;
        bytes[32..80].fill(0xab);
        bytes
    }

    /// An id with another two addresses.
    fn id_of_three() -> [u8; UniqueId::BYTES] {
        let mut bytes = id();
        bytes[27] = 3;
        bytes[80..96].copy_from_slice(&"fe80::7".parse::<std::net::Ipv6Addr>().unwrap().octets());
        bytes[96..112].copy_from_slice(&Ipv4Addr::new(10, 1, 0, 7).to_ipv6_mapped().octets());
        bytes
    }

    #[test]
    fn an_id_as_text_is_the_same_id() {
        let id = UniqueId::from_bytes(&id()).unwrap();
        assert_eq!(id.to_string().len(), 256);
        assert_eq!(format!("{id}\n").parse::<UniqueId>().unwrap(), id);
        assert_eq!(UniqueId::from_bytes(&id.to_bytes()).unwrap(), id);
        assert_eq!(id.place(), "10.0.0.7:7000".parse().unwrap());
        assert_eq!((id.key(), id.name().len()), ([0xab; 32], 35));
        let id = UniqueId::from_bytes(&id_of_three()).unwrap();
        let places: Vec<_> = id.places().iter().map(SocketAddr::to_string).collect();
        assert_eq!(places, ["10.0.0.7:7000", "[fe80::7]:7000", "10.1.0.7:7000"]);
    }

    #[test]
    fn logs_show_no_key() {
        let mut bytes = id();
        bytes[48..80].fill(0x5c);
        let shown = format!("{:?}", UniqueId(bytes));
        assert!(shown.contains("10.0.0.7:7000") && !shown.contains("5c5c"), "{shown}");
    }

    #[test]
    fn p8_an_id_that_was_changed_is_refused_without_being_shown() {
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = id().to_vec();
            change(&mut bytes);
            let e = UniqueId::from_bytes(&bytes).unwrap_err();
            let (e, said) = (e.is_config(), e.to_string());
            assert!(e && !said.contains("abab"), "{said}");
            said
        };
        assert!(refused(&|b| b.truncate(127)).contains("of 127 bytes"));
        assert!(refused(&|b| b.push(0)).contains("of 129 bytes"));
        assert!(refused(&|b| b[4] = 1).contains("another beginning"));
        for at in [26, 27, 28, 31, 80, 127] {
            assert!(refused(&|b| b[at] = 9).contains("changed"), "{at}");
        }
        assert!(refused(&|b| b[24..26].fill(0)).contains("changed"));
        assert!(refused(&|b| b[20..24].fill(0)).contains("changed"));
        for text in ["", "zz", &"0".repeat(255), &"x".repeat(256), &"0".repeat(258), "é"] {
            assert!(text.parse::<UniqueId>().unwrap_err().is_config(), "{text}");
        }
        assert!("0".repeat(256).parse::<UniqueId>().is_err());
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_text_or_bytes_of_an_id_make_its_reader_panic_and_what_it_takes_is_an_id() {
        let text = UniqueId(id()).to_string();
        let seeds = [id().to_vec(), id_of_three().to_vec(), text.into_bytes()];
        fuzz(&seeds, |bytes| {
            let text = std::str::from_utf8(bytes).unwrap_or_default().parse::<UniqueId>();
            match UniqueId::from_bytes(bytes).or(text) {
                Ok(id) => {
                    assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
                    assert!(id.place().port() != 0 && !id.place().ip().is_unspecified());
                    id.place().is_ipv4().into()
                }
                Err(e) => kind(e),
            }
        });
    }
}
