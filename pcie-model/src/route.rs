//! The route between a GPU and a NIC.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{ParameterError, Result, within};
use crate::link::Link;
use crate::parameters::Parameters;

/// Something that a TLP passes on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hop {
    /// A PCIe switch.
    Switch,
    /// A root complex, from one of its ports to another.
    RootComplex,
    /// The link between two sockets.
    Socket,
}

impl Hop {
    /// The hop's latency, one way, in ns.
    pub fn latency(self, p: &Parameters) -> f64 {
        match self {
            Hop::Switch => p.switch_ns,
            Hop::RootComplex => p.root_ns,
            Hop::Socket => p.socket_ns,
        }
    }
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hop::Switch => "switch",
            Hop::RootComplex => "root",
            Hop::Socket => "socket",
        })
    }
}

impl FromStr for Hop {
    type Err = ParameterError;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "switch" => Ok(Hop::Switch),
            "root" => Ok(Hop::RootComplex),
            "socket" => Ok(Hop::Socket),
            other => {
                Err(ParameterError::new("hops", other, "switch, root and socket, joined by commas, or none"))
            }
        }
    }
}

/// Where the window lies that a GPU pushes into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// In host memory: the NIC then reads it from there, over a short way.
    #[default]
    Host,
    /// In the NIC's own memory.
    Nic,
}

/// The route from GPU to NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Route {
    /// The narrowest link of the route.
    pub link: Link,
    /// The hops between, from the GPU on. None means that GPU and NIC share a wire.
    pub hops: Vec<Hop>,
    /// Where the window lies.
    pub window: Window,
    /// How many writers (GPUs) share the narrowest link. 0 and 1 both mean only this one.
    pub sharers: u32,
}

impl Route {
    /// Checks that the route is possible.
    ///
    /// # Errors
    /// The first parameter that is not allowed, with the allowed values.
    pub fn check(&self) -> Result<()> {
        self.link.check()?;
        within("hops", self.hops.len() as f64, 0.0, 32.0)?;
        within("sharers", self.sharers.into(), 0.0, 64.0)
    }

    /// The hops from the GPU to host memory: as far as the first root complex, and over every link
    /// between sockets, because a window lies at the NIC's socket. Without a root complex on the
    /// route, GPU and NIC sit below one up-link, and the hops are all of the route.
    pub fn gpu_to_host(&self) -> Vec<Hop> {
        let sockets = self.hops.iter().filter(|h| **h == Hop::Socket);
        let near = self.hops.iter().take_while(|h| **h != Hop::RootComplex).filter(|h| **h != Hop::Socket);
        near.chain(sockets).copied().collect()
    }

    /// The hops from host memory to the NIC: those after the last root complex.
    pub fn host_to_nic(&self) -> Vec<Hop> {
        let behind = self.hops.iter().rposition(|h| *h == Hop::RootComplex).map_or(0, |i| i + 1);
        self.hops[behind..].iter().filter(|h| **h != Hop::Socket).copied().collect()
    }

    /// Whether the two ends reach each other only through a root complex.
    pub fn through_root(&self) -> bool {
        self.hops.iter().any(|h| *h != Hop::Switch)
    }
}

/// The sum of the hops' one-way latencies in ns.
pub fn latency(hops: &[Hop], p: &Parameters) -> f64 {
    hops.iter().map(|h| h.latency(p)).sum()
}
