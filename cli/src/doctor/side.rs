//! What one end of `pushgate doctor --peer` says of itself, and how the two ends talk after the door.
//!
//! The dialer's greeting is a [`Side`] as JSON; the listener answers with its own in an envelope. Then the dialer asks and the
//! listener answers: nine bytes say what is asked ([`PING`], [`TAKE`], [`GIVE`]) and of how many bytes.

use std::io::{Error, ErrorKind, IoSliceMut, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use pushgate_doctor::{self as doctor, Part, Roots, Wants};
use pushgate_door::addresses::{Wish, offer, resolve};
use pushgate_door::redial::envelope::{send_all, wait};
use pushgate_door::{Purpose, Stream};
use pushgate_link_verbs::gid::{GidEntry, GidType};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

/// Port at which `--listen` listens, and to which `--peer` connects, unless another one is named.
pub const PORT: u16 = 7118;
/// What these connections are for.
pub const PURPOSE: Purpose = Purpose::new("doctor");
/// Version of what the two ends say after the door.
pub const VERSION: u32 = 1;
/// The most bytes of what an end says of itself.
pub const LONGEST: usize = 64 << 10;
/// Time for all that the two ends do with one connection.
pub const SESSION: Duration = Duration::from_secs(60);
/// Bytes that cross at once.
pub const CHUNK: usize = 64 << 10;
/// The most ports of RDMA devices that an end names, and the most addresses of each.
const MOST: usize = 32;

/// Sends the nine bytes back.
pub const PING: u8 = 1;
/// Bytes follow; the nine bytes come back when these are here.
pub const TAKE: u8 = 2;
/// The number of bytes that the request names comes back.
pub const GIVE: u8 = 3;

/// What an end says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Side {
    /// Version of what is said after the door.
    pub speaks: u32,
    /// The release of pushgate.
    pub release: String,
    /// Path MTU to the other end, as far as this end's kernel knows; a dialer has none yet.
    pub mtu: Option<u32>,
    /// Ports of RDMA devices that are active.
    pub ports: Vec<Port>,
    /// The addresses that ranks of this end offer to others, or why there are none. An earlier release says nothing.
    #[serde(default)]
    pub offers: Option<Offers>,
}

/// The addresses at which other hosts reach an end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offers {
    /// In words.
    pub at: String,
    /// No other host reaches them.
    pub only_here: bool,
}

impl Offers {
    /// Those of this host; `host` is the setting.
    fn of_this_host(host: &str) -> Offers {
        match offer(&Wish { host, ..Wish::default() }) {
            Ok(offered) => Offers { only_here: offered.only_here.is_some(), at: offered.to_string() },
            Err(why) => Offers { only_here: true, at: why },
        }
    }
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    /// `rxe0/1`.
    pub name: String,
    pub ethernet: bool,
    /// The port's device speaks iWARP. An earlier release says nothing.
    #[serde(default)]
    pub iwarp: bool,
    /// Addresses that reach beyond the link, on Ethernet. Those of an iWARP device are none.
    pub gids: Vec<Gid>,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gid {
    pub ip: IpAddr,
    pub roce_v2: bool,
    /// Length of the prefix of the interface's network, if the kernel tells it.
    pub prefix: Option<u8>,
}

impl Side {
    /// What this host says of itself; `host` is the setting.
    pub fn of_this_host(mtu: Option<u32>, host: &str) -> Side {
        let checks: Vec<_> = doctor::CHECKS.iter().filter(|c| c.parts == [Part::Rdma]).collect();
        let readings = doctor::look(&checks, &Roots::host(), Wants::default());
        let prefixes = prefixes();
        let mut ports = Vec::new();
        for device in readings.rdma.is().into_iter().flatten() {
            let active = |state: &&String| state.ends_with("ACTIVE");
            for port in device.ports.iter().filter(|port| port.state.is().filter(active).is_some()) {
                let gid = |entry: &GidEntry| Gid {
                    ip: entry.ip(),
                    roce_v2: entry.kind == GidType::RoceV2,
                    prefix: prefixes
                        .iter()
                        .find(|(net, length)| same(*net, entry.ip(), *length))
                        .map(|p| p.1),
                };
                let iwarp = device.is_iwarp();
                let ethernet = port.link_layer.is().is_some_and(|layer| layer == "Ethernet");
                let gids = port.gids.iter().filter(|entry| ethernet && !iwarp && !entry.link_local());
                let gids = gids.take(MOST).map(gid).collect();
                ports.push(Port { name: format!("{}/{}", device.name, port.number), ethernet, iwarp, gids });
            }
        }
        ports.truncate(MOST);
        let offers = Some(Offers::of_this_host(host));
        Side { speaks: VERSION, release: env!("CARGO_PKG_VERSION").into(), mtu, ports, offers }
    }
}

/// Whether two addresses are of one network whose prefix has this length.
pub fn same(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(32 - u32::from(prefix.min(32))).unwrap_or(0) == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(128 - u32::from(prefix.min(128))).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// The networks to which this host is connected, those with the longest prefix first.
fn prefixes() -> Vec<(IpAddr, u8)> {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let v4 = read("/proc/net/route");
    let v6 = read("/proc/net/if_inet6");
    let mut all: Vec<_> = v4.lines().filter_map(route).chain(v6.lines().filter_map(address)).collect();
    all.sort_by_key(|(_, length)| std::cmp::Reverse(*length));
    all
}

/// A network of `/proc/net/route` that takes no gateway.
fn route(line: &str) -> Option<(IpAddr, u8)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let word = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok().map(u32::from_be);
    let (net, gateway, mask) = (word(1)?, word(2)?, word(7)?);
    (gateway == 0 && mask != 0).then(|| (Ipv4Addr::from_bits(net).into(), mask.count_ones() as u8))
}

/// The network of an address of `/proc/net/if_inet6`.
fn address(line: &str) -> Option<(IpAddr, u8)> {
    let mut words = line.split_whitespace();
    let bits = u128::from_str_radix(words.next()?, 16).ok()?;
    let length = u8::from_str_radix(words.nth(1)?, 16).ok()?;
    Some((Ipv6Addr::from_bits(bits).into(), length))
}

/// The path MTU of a connection, as far as this host's kernel knows.
pub fn mtu(stream: &Stream) -> Option<u32> {
    let mtu = match stream.peer_addr().ok()?.ip().to_canonical() {
        IpAddr::V4(_) => sockopt::ip_mtu(stream),
        IpAddr::V6(_) => sockopt::ipv6_mtu(stream),
    };
    mtu.ok()
}

/// The addresses of `HOST[:PORT]`, where an IPv6 address with a port stands in brackets, and a link-local one may name an interface.
pub fn addresses(place: &str) -> Result<Vec<SocketAddr>> {
    resolve(place, Some(PORT))
}

/// A connection that passed the door, with the time that all of it may take.
pub struct Talk {
    pub stream: Stream,
    pub until: Instant,
}

impl Talk {
    pub fn put(&self, bytes: &[u8]) -> Result<()> {
        send_all(&self.stream, bytes, self.until)
    }

    /// Fills `bytes`.
    pub fn take(&self, mut bytes: &mut [u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.stream.recv(&mut [IoSliceMut::new(bytes)]) {
                Ok(0) => {
                    return Err(Error::new(ErrorKind::UnexpectedEof, "the other end closed the connection"));
                }
                Ok(n) => bytes = &mut bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if !wait(&mut [PollFd::new(&self.stream, PollFlags::IN)], self.until) {
                        let text = format!("no answer within {} s", SESSION.as_secs());
                        return Err(Error::new(ErrorKind::TimedOut, text));
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// The nine bytes that ask for something.
pub fn ask(kind: u8, bytes: usize) -> [u8; 9] {
    let mut all = [kind; 9];
    all[1..].copy_from_slice(&(bytes as u64).to_le_bytes());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_the_kernel_writes_them() {
        let line = "eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0";
        assert_eq!(route(line), Some(("192.168.0.0".parse().unwrap(), 24)));
        // The default route takes a gateway.
        assert_eq!(route("eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0"), None);
        assert_eq!(route("Iface\tDestination\tGateway \tFlags"), None);
        let line = "20010db8000000000000000000000007 02 40 00 80     eth0";
        assert_eq!(address(line), Some(("2001:db8::7".parse().unwrap(), 64)));
    }

    #[test]
    fn addresses_of_one_network_have_one_prefix() {
        let [a, b, c]: [IpAddr; 3] = ["10.0.0.1", "10.0.0.200", "10.0.1.1"].map(|ip| ip.parse().unwrap());
        assert!(same(a, b, 24) && !same(a, c, 24) && same(a, c, 16) && same(a, c, 0) && !same(a, b, 32));
        assert!(same(a, a, 32) && !same(a, "::1".parse().unwrap(), 0));
    }

    #[test]
    fn a_place_without_a_port_has_the_doctors() {
        let one = |place: &str| addresses(place).unwrap()[0].to_string();
        assert_eq!(
            [one("10.0.0.1"), one("::1"), one("[::1]")],
            ["10.0.0.1:7118", "[::1]:7118", "[::1]:7118"]
        );
        assert_eq!([one("127.0.0.1:5"), one("[::1]:5")], ["127.0.0.1:5", "[::1]:5"]);
        assert_eq!([one("fe80::1%1"), one("[fe80::1%1]:5")], ["[fe80::1%1]:7118", "[fe80::1%1]:5"]);
        assert!(addresses("127.0.0.1:x").is_err());
    }
}
