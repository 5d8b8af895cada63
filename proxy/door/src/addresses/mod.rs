//! The IP addresses at which other hosts reach this one, and how a place that another process names is reached from here.
//!
//! A host may have several addresses, and none of them need be reached by every other host: networks may be apart, and there need be
//! no default route. So a process offers several ([`offer`]), and who dials takes the one that it reaches ([`Reach`]).

mod interfaces;
mod names;
mod places;
mod reach;
#[cfg(test)]
mod tests;
mod words;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, ToSocketAddrs};

pub use interfaces::{Held, Interface};
pub use names::Names;
pub use places::Places;
pub use reach::{Reach, routes};
pub use words::{Message, REMEDY};

/// The kind of IP address that hosts reach each other by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The most interfaces that a message lists.
const MOST_TOLD: usize = 8;
/// How often a port is sought that is free at several addresses.
const PORTS: usize = 16;

/// What a process wishes of the addresses that it offers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish<'a> {
    /// The setting `host`: `auto`, or the one address that is wanted. Empty is `auto`.
    pub host: &'a str,
    /// The family that addresses must be of; `None`: any.
    pub family: Option<Family>,
    /// The interfaces that addresses must be of, whatever these are; `None`: all that are up.
    pub names: Option<&'a Names>,
    /// Addresses of the RDMA device's own interface, which come first.
    pub own: &'a [IpAddr],
    /// The RDMA device's NUMA node: interfaces of that node come before others.
    pub node: Option<u32>,
}

/// An address at which this process can listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The address.
    pub ip: IpAddr,
    /// The number of its interface, for a link-local IPv6 address; else 0.
    pub scope: u32,
    /// The name of its interface; empty where the address was named and its interface is not known.
    pub interface: String,
}

impl At {
    /// The address with a port.
    pub fn with_port(&self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope).into(),
        }
    }
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.scope, self.interface.is_empty()) {
            (0, true) => write!(f, "{}", self.ip),
            (0, false) => write!(f, "{} ({})", self.ip, self.interface),
            (scope, true) => write!(f, "{}%{scope}", self.ip),
            (_, false) => write!(f, "{}%{}", self.ip, self.interface),
        }
    }
}

/// The addresses that a process offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offered {
    /// In the order in which others are to try them; at least one.
    pub at: Vec<At>,
    /// No other host reaches them; the sentence says what else was looked at, and what to do.
    pub only_here: Option<String>,
}

impl Offered {
    /// An offer of one address, which was named.
    pub fn named(ip: IpAddr) -> Offered {
        Offered { at: vec![At { ip, scope: 0, interface: String::new() }], only_here: None }
    }

    /// The addresses without ports.
    pub fn sockets(&self) -> Vec<SocketAddr> {
        self.at.iter().map(|at| at.with_port(0)).collect()
    }
}

impl std::fmt::Display for Offered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<_> = self.at.iter().map(At::to_string).collect();
        f.write_str(&all.join(", "))?;
        match &self.only_here {
            Some(why) => write!(f, ", which no other host reaches: {why}"),
            None => Ok(()),
        }
    }
}

/// The addresses at which this process is reached, chosen as [`choose`] does from the interfaces of this namespace.
///
/// # Errors
/// A sentence that says what was looked at and what to do.
pub fn offer(wish: &Wish<'_>) -> Result<Offered, String> {
    match Interface::all() {
        Ok(all) => choose(&all, wish, numa_node),
        // A sandbox may forbid to ask. What is named needs no answer.
        Err(why) => match wish.host.parse() {
            Ok(ip) => Ok(Offered::named(ip)),
            Err(_) => Err(Message::Unknown { why: &why.to_string() }.to_string()),
        },
    }
}

/// The NUMA node of an interface's device, if the kernel knows.
fn numa_node(interface: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/device/numa_node")).ok()?;
    text.trim().parse().ok()
}

/// What an address is worth to another host, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Of an interface, or of the loopback device for the hosts that its routes are told to (BGP).
    Routed,
    /// The hosts of one link reach it.
    Link,
    /// Of a bridge for this host's containers or virtual machines, which other hosts have with the same address.
    Bridge,
    /// This host alone reaches it.
    Here,
}

/// Chooses what to offer of these interfaces: all addresses of the best class that there is, in order; or of the interfaces that
/// are named, whatever they are. `node` gives an interface's NUMA node.
///
/// # Errors
/// A sentence that says what was looked at and what to do.
pub fn choose(
    all: &[Interface],
    wish: &Wish<'_>,
    node: impl Fn(&str) -> Option<u32>,
) -> Result<Offered, String> {
    if !matches!(wish.host, "" | "auto") {
        return named(all, wish.host);
    }
    let takes = |interface: &Interface| wish.names.is_none_or(|names| names.takes(&interface.name));
    let fits = |ip: IpAddr| match wish.family {
        None => true,
        Some(Family::V4) => ip.is_ipv4(),
        Some(Family::V6) => ip.is_ipv6(),
    };
    let mut found = Vec::new();
    for (place, interface) in all.iter().enumerate().filter(|(_, i)| i.up && takes(i)) {
        let near = wish.node.is_some() && node(&interface.name) == wish.node;
        for held in interface.addresses.iter().filter(|held| held.usable && fits(held.ip)) {
            let class = class(interface, held.ip);
            let listed = wish.names.map_or(0, |names| names.place(&interface.name));
            let order = (
                !wish.own.contains(&held.ip),
                listed,
                class,
                (interface.loopback, !near, !held.routed),
                (held.ip.is_ipv6(), held.passing, place),
            );
            let scope = if held.ip.is_ipv6() && is_link_local(held.ip) { interface.index } else { 0 };
            found.push((order, class, At { ip: held.ip, scope, interface: interface.name.clone() }));
        }
    }
    found.sort_by_key(|(order, ..)| *order);
    let best = found.iter().map(|(_, class, _)| *class).min();
    let Some(best) = best else {
        return Err(Message::None { looked_at: &looked_at(all, wish) }.to_string());
    };
    // What is named is wanted, of whatever kind; but no other host is sent to its own loopback device.
    let keeps = |class: Class| class == best || (wish.names.is_some() && class < Class::Here);
    let at: Vec<_> = found.into_iter().filter(|(_, class, _)| keeps(*class)).map(|(.., at)| at).collect();
    let only_here =
        (best == Class::Here).then(|| Message::OnlyHere { looked_at: &looked_at(all, wish) }.to_string());
    Ok(Offered { at, only_here })
}

/// The address that the setting `host` names: `10.0.0.1`, `fe80::1%eth0`, or `fe80::1` where one interface has that.
fn named(all: &[Interface], host: &str) -> Result<Offered, String> {
    let of = |why: String| Message::Named { host, why: &why }.to_string();
    let (ip, zone) = split(host).ok_or_else(|| of("it is no IP address".into()))?;
    let mut holders = all.iter().filter(|interface| {
        zone.is_none_or(|zone| interface.name == zone || interface.index.to_string() == zone)
            && interface.addresses.iter().any(|held| held.ip == ip)
    });
    let holder = holders.next();
    let mut at = At { ip, scope: 0, interface: holder.map(|i| i.name.clone()).unwrap_or_default() };
    if ip.is_ipv6() && is_link_local(ip) {
        match (holder, holders.next()) {
            (Some(one), None) => at.scope = one.index,
            (Some(one), Some(other)) => {
                let why = format!("{} and {} have it; name one, as {ip}%{}", one.name, other.name, one.name);
                return Err(of(why));
            }
            (None, _) => {
                return Err(of(format!("no interface has it: {}", looked_at(all, &Wish::default()))));
            }
        }
    }
    Ok(Offered { at: vec![at], only_here: None })
}

fn class(interface: &Interface, ip: IpAddr) -> Class {
    match ip.to_canonical() {
        ip if ip.is_loopback() => Class::Here,
        _ if is_bridge(&interface.name) => Class::Bridge,
        ip if is_link_local(ip) => Class::Link,
        _ => Class::Routed,
    }
}

/// Whether an interface is, by its name, a bridge for this host's containers or virtual machines.
fn is_bridge(name: &str) -> bool {
    ["docker", "virbr", "br-", "cni", "podman", "lxcbr", "lxdbr", "nerdctl"]
        .iter()
        .any(|b| name.starts_with(b))
}

/// Whether an address is of one link alone.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// What there is at each interface, and why it is of no use: for messages.
fn looked_at(all: &[Interface], wish: &Wish<'_>) -> String {
    let of = |interface: &Interface| {
        let name = &interface.name;
        let says = match &interface.addresses[..] {
            _ if wish.names.is_some_and(|names| !names.takes(name)) => {
                format!("is not in {}", wish.names.expect("there are names"))
            }
            _ if !interface.up => "is down".into(),
            [] => "has no address".into(),
            held => {
                let one = |held: &Held| match (held.usable, class(interface, held.ip)) {
                    (false, _) => format!("{} (tentative)", held.ip),
                    (_, Class::Bridge) => format!("{} (of a bridge of this host)", held.ip),
                    _ => held.ip.to_string(),
                };
                format!("has {}", held.iter().map(one).collect::<Vec<_>>().join(", "))
            }
        };
        format!("{name} {says}")
    };
    let mut told: Vec<_> = all.iter().take(MOST_TOLD).map(of).collect();
    if all.len() > MOST_TOLD {
        told.push(format!("and {} more", all.len() - MOST_TOLD));
    }
    let family = match wish.family {
        None => "",
        Some(Family::V4) => " (IPv4 addresses alone are asked for)",
        Some(Family::V6) => " (IPv6 addresses alone are asked for)",
    };
    match told.is_empty() {
        true => format!("there is no network interface{family}"),
        false => format!("{}{family}", told.join(", ")),
    }
}

/// An IP address and the interface that a `%` separates from it, if the text is one.
pub fn split(text: &str) -> Option<(IpAddr, Option<&str>)> {
    let (ip, zone) = match text.split_once('%') {
        Some((ip, zone)) => (ip, Some(zone)),
        None => (text, None),
    };
    let ip: IpAddr = ip.parse().ok()?;
    let is_name = |zone: &str| {
        (1..=15).contains(&zone.len()) && zone.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
    };
    match zone {
        None => Some((ip, None)),
        // Only of a link-local address does an interface say anything.
        Some(zone) => (ip.is_ipv6() && is_link_local(ip) && is_name(zone)).then_some((ip, Some(zone))),
    }
}

/// The addresses of a place, `HOST:PORT`, `[ADDRESS]:PORT` or `[ADDRESS%INTERFACE]:PORT`, with `port` where it names none. Several
/// places are separated by commas.
///
/// # Errors
/// Where the text is no place, the name has no address, or there is no such interface here.
pub fn resolve(place: &str, port: Option<u16>) -> io::Result<Vec<SocketAddr>> {
    let mut all = Vec::new();
    for place in place.split(',') {
        let (host, given) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, rest)) => (host, rest.strip_prefix(':')),
            None if split(place).is_some() => (place, None),
            None => place.rsplit_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
        };
        let invalid = |why: String| io::Error::new(ErrorKind::InvalidInput, why);
        let port = match given {
            Some(text) => text.parse().map_err(|_| invalid(format!("`{text}` is no port")))?,
            None => port.ok_or_else(|| invalid("there is no port".into()))?,
        };
        match split(host) {
            Some((IpAddr::V6(ip), zone)) => {
                all.push(SocketAddrV6::new(ip, port, 0, zone.map_or(Ok(0), index_of)?).into());
            }
            Some((IpAddr::V4(ip), _)) => all.push((ip, port).into()),
            None => all.extend((host, port).to_socket_addrs()?),
        }
    }
    Ok(all)
}

/// The number of the interface of this name.
fn index_of(name: &str) -> io::Result<u32> {
    if let Ok(index) = name.parse() {
        return Ok(index);
    }
    let all = Interface::all().map_err(io::Error::other)?;
    let found = all.iter().find(|interface| interface.name == name).map(|interface| interface.index);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|interface| interface.name.as_str()).collect();
        io::Error::new(ErrorKind::NotFound, format!("no interface {name}, there are {}", names.join(", ")))
    })
}

/// Adds to each link-local address that names no interface the number of this host's interface that has the address, to listen there.
pub fn own(mut all: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let unscoped =
        |at: &SocketAddr| matches!(at, SocketAddr::V6(v6) if v6.scope_id() == 0 && is_link_local(at.ip()));
    if all.iter().any(unscoped) {
        let interfaces = Interface::all().unwrap_or_default();
        for at in &mut all {
            if let SocketAddr::V6(v6) = at
                && v6.scope_id() == 0
                && let Some(holder) = interfaces.iter().find(|i| holds(i, *v6.ip()))
            {
                v6.set_scope_id(holder.index);
            }
        }
    }
    all
}

fn holds(interface: &Interface, ip: Ipv6Addr) -> bool {
    is_link_local(ip.into()) && interface.addresses.iter().any(|held| held.ip == ip)
}

/// Listens at each of these addresses, at one port that is free at all of them. An address that is gone is left out where others
/// are there.
///
/// # Errors
/// Where no address can be listened at; the text names them all.
pub fn listen(all: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let mut failed = Vec::new();
    for _ in 0..PORTS {
        failed.clear();
        let (mut listeners, mut port) = (Vec::new(), 0);
        for at in all {
            let mut at = *at;
            at.set_port(if port == 0 { at.port() } else { port });
            match TcpListener::bind(at) {
                Ok(listener) => {
                    port = listener.local_addr()?.port();
                    listeners.push(listener);
                }
                Err(e) => failed.push((at, e)),
            }
        }
        let taken = failed.iter().any(|(_, e)| e.kind() == ErrorKind::AddrInUse) && !listeners.is_empty();
        if !listeners.is_empty() && !taken {
            for (at, e) in &failed {
                tracing::debug!("not listening at {}: {e}", at.ip());
            }
            return Ok(listeners);
        }
        if !taken {
            break;
        }
    }
    let kind = failed.first().map_or(ErrorKind::InvalidInput, |(_, e)| e.kind());
    let each: Vec<_> = failed.iter().map(|(at, e)| format!("{}: {e}", at.ip())).collect();
    Err(io::Error::new(kind, each.join(", ")))
}
