//! The distance between two functions, and what lies between them. Pure functions.

use std::fmt;

use serde::Serialize;

use crate::address::Address;
use crate::config::Read;
use crate::link::LinkState;
use crate::tree::{Function, Parent, Role, Source, Topology, UNPLACED};

/// The distance between two functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Distance {
    /// Functions of one device, or the same function.
    SameDevice,
    /// A switch is above both: packets need not reach the root complex.
    SameSwitch,
    /// Different ports of one root complex.
    SameRootComplex,
    /// Different root complexes of one NUMA node, or of nodes in one package.
    SameSocket,
    /// Packets cross the link between sockets.
    AcrossSockets,
    /// A virtual machine's tree, which says nothing about distances.
    Virtual,
    /// Unknown: one of the two has no place, or its NUMA node is not reported.
    Unknown,
}

impl Distance {
    /// A short name, for tables.
    pub fn short(self) -> &'static str {
        match self {
            Self::SameDevice => "DEV",
            Self::SameSwitch => "SW",
            Self::SameRootComplex => "RC",
            Self::SameSocket => "NODE",
            Self::AcrossSockets => "SYS",
            Self::Virtual => "VIRT",
            Self::Unknown => "?",
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameDevice => "same device",
            Self::SameSwitch => "same switch",
            Self::SameRootComplex => "same root complex",
            Self::SameSocket => "same socket, another root complex",
            Self::AcrossSockets => "across sockets",
            Self::Virtual => "not told by this virtual machine",
            Self::Unknown => "unknown",
        })
    }
}

/// Something that a packet passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Hop {
    /// A switch, named by its upstream port.
    Switch(Address),
    /// A bridge to a conventional bus.
    Bridge(Address),
    /// A root complex.
    RootComplex(String),
    /// From one NUMA node to another in the same package.
    Nodes(u32, u32),
    /// From the socket of one NUMA node to the socket of another.
    Sockets(u32, u32),
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(at) => write!(f, "switch {at}"),
            Self::Bridge(at) => write!(f, "bridge {at}"),
            Self::RootComplex(name) => write!(f, "root complex {name}"),
            Self::Nodes(a, b) => write!(f, "NUMA node {a} to {b}"),
            Self::Sockets(a, b) => write!(f, "sockets (node {a} to {b})"),
        }
    }
}

/// A link on the way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PathLink {
    /// The function at the lower end of the link.
    pub below: Address,
    /// The link under load: as trained now, but for a GPU the best speed of both ends, because idle
    /// GPUs lower their speed.
    pub state: LinkState,
}

/// What access control services do to packets between the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AcsOnWay {
    /// Irrelevant: the path goes through the root complex anyway, or there is no port between.
    NotAsked,
    /// Packets take the short path.
    Direct,
    /// Packets go up to the root complex, because of these ports.
    Redirects(Vec<Address>),
    /// Packets go up to the root complex. Concluded from different IOMMU groups: behind one switch
    /// the kernel separates only what the switch's ports isolate.
    InferredRedirects,
    /// Unknown: only root may read it, or a table of P2P egress control decides.
    Unknown,
}

impl AcsOnWay {
    /// Whether packets go up to the root complex, if that is known.
    pub fn redirects(&self) -> Option<bool> {
        match self {
            Self::Redirects(_) | Self::InferredRedirects => Some(true),
            Self::NotAsked | Self::Direct => Some(false),
            Self::Unknown => None,
        }
    }
}

/// The way between two functions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Path {
    /// One end.
    pub from: Address,
    /// The other end of the way.
    pub to: Address,
    /// The distance between the ends.
    pub distance: Distance,
    /// The hops that packets pass, in order, including a redirection by ACS. Empty if the distance
    /// is unknown.
    pub hops: Vec<Hop>,
    /// The functions that packets pass, in order, including both ends but not a redirection.
    pub through: Vec<Address>,
    /// The known link with the least bandwidth, including a redirection by ACS.
    pub narrowest: Option<PathLink>,
    /// Redirection by ACS.
    pub acs: AcsOnWay,
}

impl Topology {
    /// The way between two functions; `None` if one is not in the tree.
    pub fn path(&self, from: Address, to: Address) -> Option<Path> {
        let (up, _) = self.above(from);
        let (down, _) = self.above(to);
        let (Some(first), Some(last)) = (up.first(), down.first()) else { return None };
        let meet = up.iter().position(|f| down.iter().any(|g| g.address == f.address));
        // Both chains without the part that they share.
        let shared = meet.map_or(0, |at| up.len() - at);
        let (left, right) = (&up[..up.len() - shared], &down[..down.len() - shared]);
        let top = meet.map(|at| up[at]);
        let (left_root, right_root) = (root_name(&up), root_name(&down));

        let mut path = Path {
            from,
            to,
            distance: Distance::Unknown,
            hops: Vec::new(),
            through: Vec::new(),
            narrowest: None,
            acs: AcsOnWay::NotAsked,
        };
        path.through.extend(left.iter().map(|f| f.address));
        path.through.extend(top.map(|f| f.address));
        path.through.extend(right.iter().rev().map(|f| f.address));
        if self.machine.flat && self.source == Source::Sysfs {
            path.distance = if from.same_device(to) { Distance::SameDevice } else { Distance::Virtual };
            return Some(path);
        }
        path.narrowest = narrowest(self, left.iter().chain(right.iter()).copied());
        let rise: Vec<Hop> = left.iter().filter_map(|f| hop(f)).collect();
        let fall: Vec<Hop> = right.iter().rev().filter_map(|f| hop(f)).collect();
        path.hops = rise;
        match top {
            // One of the two is above the other, or both are the same.
            _ if left.is_empty() || right.is_empty() => {
                path.distance = if from == to { Distance::SameDevice } else { Distance::SameSwitch };
            }
            _ if from.same_device(to) && first.parent == last.parent => path.distance = Distance::SameDevice,
            Some(top) if top.role == Role::Switch => {
                path.distance = Distance::SameSwitch;
                path.acs = acs(first, last, left, top, right);
                if path.acs.redirects() == Some(true) {
                    // Up through the switch to the root complex, and back.
                    let rest: Vec<Hop> = up[up.len() - shared..].iter().filter_map(|f| hop(f)).collect();
                    path.hops.extend(rest.iter().cloned());
                    path.hops.push(Hop::RootComplex(left_root.to_owned()));
                    path.hops.extend(rest.into_iter().rev());
                    let detour = left.iter().chain(right).chain(&up[up.len() - shared..]);
                    path.narrowest = narrowest(self, detour.copied());
                } else {
                    path.hops.extend(hop(top));
                }
            }
            Some(top) => {
                // Below a root port or a downstream port is one device, or a bridge's bus.
                path.distance = Distance::SameSwitch;
                path.hops.extend(hop(top));
            }
            None if left_root == UNPLACED || right_root == UNPLACED => {
                path.hops.clear();
                return Some(path);
            }
            None if left_root == right_root => {
                path.distance = Distance::SameRootComplex;
                path.hops.push(Hop::RootComplex(left_root.to_owned()));
            }
            None => {
                let Some((distance, hop)) = self.between(self.numa_of(from), self.numa_of(to)) else {
                    path.hops.clear();
                    return Some(path);
                };
                path.distance = distance;
                path.hops.push(Hop::RootComplex(left_root.to_owned()));
                path.hops.extend(hop);
                path.hops.push(Hop::RootComplex(right_root.to_owned()));
            }
        }
        path.hops.extend(fall);
        Some(path)
    }

    /// The distance between root complexes of two NUMA nodes, and the hop between them.
    fn between(&self, a: Option<u32>, b: Option<u32>) -> Option<(Distance, Option<Hop>)> {
        let (a, b) = (a?, b?);
        if a == b {
            return Some((Distance::SameSocket, None));
        }
        let package = |n| self.machine.nodes.iter().find(|node| node.number == n)?.package;
        match (package(a), package(b)) {
            (Some(x), Some(y)) if x == y => Some((Distance::SameSocket, Some(Hop::Nodes(a, b)))),
            _ => Some((Distance::AcrossSockets, Some(Hop::Sockets(a, b)))),
        }
    }
}

fn root_name<'a>(chain: &[&'a Function]) -> &'a str {
    match chain.last().map(|f| &f.parent) {
        Some(Parent::RootComplex(name)) => name,
        _ => UNPLACED,
    }
}

fn hop(f: &Function) -> Option<Hop> {
    match f.role {
        Role::Switch => Some(Hop::Switch(f.address)),
        Role::Bridge => Some(Hop::Bridge(f.address)),
        Role::RootPort | Role::DownstreamPort | Role::Endpoint => None,
    }
}

/// The link above `f`, as both ends report it. There is none between a switch's upstream port and
/// its downstream ports, nor between a root port and its root complex.
pub(crate) fn link_above(topology: &Topology, f: &Function) -> Option<LinkState> {
    if matches!(f.role, Role::RootPort | Role::DownstreamPort) {
        return None;
    }
    let port = match &f.parent {
        Parent::Function(up) => topology.function(*up).filter(|u| u.role != Role::Switch),
        Parent::RootComplex(_) => None,
    };
    let both = |a: Option<LinkState>, b: Option<LinkState>| match (a, b) {
        (Some(a), Some(b)) => Some(a.lesser(b)),
        (a, b) => a.or(b),
    };
    let now = both(f.link.now, port.and_then(|p| p.link.now));
    let best = both(f.link.best, port.and_then(|p| p.link.best));
    match (now, best) {
        (Some(now), Some(best)) if f.is_gpu() => {
            Some(LinkState { gts: best.gts.max(now.gts), width: now.width })
        }
        (now, best) => now.or(best),
    }
}

pub(crate) fn narrowest<'a>(
    topology: &Topology,
    ways: impl Iterator<Item = &'a Function>,
) -> Option<PathLink> {
    ways.filter_map(|f| Some(PathLink { below: f.address, state: link_above(topology, f)? }))
        .min_by(|a, b| a.state.gigabytes().total_cmp(&b.state.gigabytes()))
}

/// What the ports between two functions behind the switch `top` do to packets. In a file one entry
/// stands for a whole switch, so its settings count for the switch's ports.
fn acs(
    first: &Function,
    last: &Function,
    left: &[&Function],
    top: &Function,
    right: &[&Function],
) -> AcsOnWay {
    let told = |f: &Function| matches!(f.config.acs, Read::Is(_) | Read::Absent);
    let ways = || left.iter().chain(right).copied();
    let ports: Vec<&Function> =
        ways().filter(|f| f.role == Role::DownstreamPort).chain(told(top).then_some(top)).collect();
    let redirecting: Vec<Address> = ports
        .iter()
        .filter(|f| f.config.acs.get().is_some_and(|a| a.redirects_requests() || a.redirects_completions()))
        .map(|f| f.address)
        .collect();
    if !redirecting.is_empty() {
        return AcsOnWay::Redirects(redirecting);
    }
    if ports.iter().any(|f| f.config.acs.get().is_some_and(|a| a.egress_controlled())) {
        return AcsOnWay::Unknown;
    }
    if !ports.is_empty() && ports.iter().all(|f| told(f)) {
        return AcsOnWay::Direct;
    }
    match (&first.iommu, &last.iommu) {
        (Some(a), Some(b)) if a.group != b.group => AcsOnWay::InferredRedirects,
        (Some(_), Some(_)) => AcsOnWay::Direct,
        _ => AcsOnWay::Unknown,
    }
}
