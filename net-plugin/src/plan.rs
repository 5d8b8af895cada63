//! What is done with GPU memory over RDMA: who brings it out, and where it arrives. A pure
//! choice from what is asked for and what is known of the machine.

use std::fmt;

use pushgate::settings::{NetLanding, NetPath};

/// How messages leave a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// The GPU pushes them into the window, out of which the RDMA device sends.
    Push,
    /// The RDMA device reads the GPU's memory.
    Pull,
}

/// Where messages for a GPU's memory arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landing {
    /// There: the RDMA device writes them.
    Gpu,
    /// In the copy of the peer's window in host memory, out of which the GPU pulls.
    Host,
}

/// Both. What NCCL is told follows from it, so it holds for all GPUs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub out: Out,
    pub landing: Landing,
}

impl Plan {
    /// The GPU's worker has something to copy.
    pub fn copies(self) -> bool {
        self.out == Out::Push || self.landing == Landing::Host
    }

    /// The RDMA device is used on the GPU's memory.
    pub fn reaches(self) -> bool {
        self.out == Out::Pull || self.landing == Landing::Gpu
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.out {
            Out::Push => "path push: the GPU pushes into the window, which the RDMA device sends; ",
            Out::Pull => "path pull: the RDMA device reads the GPU's memory; ",
        })?;
        f.write_str(match self.landing {
            Landing::Gpu => "landing gpu: it writes what arrives into the GPU's memory",
            Landing::Host => "landing host: what arrives lies in host memory, and the GPU pulls it",
        })
    }
}

/// How a packet goes between GPU and RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a switch that is above both.
    Switch,
    /// Through one root complex.
    RootComplex,
    /// From one root complex to another, or to another socket.
    Farther,
    /// It is not known: a virtual machine that does not tell, or a device that is no PCI
    /// function.
    Unknown,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Switch => "a PCIe switch joins GPU and RDMA device",
            Way::RootComplex => "GPU and RDMA device are at one root complex",
            Way::Farther => "GPU and RDMA device are at different root complexes",
            Way::Unknown => "how far GPU and RDMA device are apart is not known",
        })
    }
}

/// What can't be, and what the setting may be.
#[derive(Debug, PartialEq, Eq)]
pub struct Impossible {
    /// "path" or "landing".
    pub setting: &'static str,
    pub allowed: String,
}

/// Chooses. `path` is auto, push or pull; `registers` says whether the RDMA device can
/// register the GPU's memory, and why not. Returns the reason too.
///
/// A read over PCIe is non-posted: a request out, the answer back, and a bound on those
/// under way. Below a switch that costs little, and then nobody copies at all. Through a
/// root complex it is where peer-to-peer traffic is slow, or refused by processors that
/// pass peer writes only: there the GPU pushes. Writes are posted and pass one root
/// complex; what happens between two is the processor's own business, so that there, and
/// where nothing is known, host memory is in between.
pub fn choose(
    path: NetPath,
    landing: NetLanding,
    way: Way,
    registers: Result<(), &str>,
) -> Result<(Plan, String), Impossible> {
    let impossible = |setting, allowed: &str, why: &str| {
        Err(Impossible {
            setting,
            allowed: format!("{allowed} here: the RDMA device can't register the GPU's memory ({why})"),
        })
    };
    if path == NetPath::Pull && landing == NetLanding::Host {
        let allowed = "auto or gpu with path = pull: a message out of GPU memory must have a place to go";
        return Err(Impossible { setting: "landing", allowed: allowed.into() });
    }
    if let Err(why) = registers {
        return match (path, landing) {
            (NetPath::Pull, _) => impossible("path", "auto, push or bounce", why),
            (_, NetLanding::Gpu) => impossible("landing", "auto or host", why),
            _ => {
                let plan = Plan { out: Out::Push, landing: Landing::Host };
                Ok((plan, format!("the RDMA device can't register the GPU's memory ({why})")))
            }
        };
    }
    let near = matches!(way, Way::Switch | Way::RootComplex);
    let landing = match landing {
        NetLanding::Gpu => Landing::Gpu,
        NetLanding::Host => Landing::Host,
        // Both ends read and write.
        NetLanding::Auto if near || path == NetPath::Pull => Landing::Gpu,
        NetLanding::Auto => Landing::Host,
    };
    let out = match path {
        NetPath::Pull => Out::Pull,
        NetPath::Auto if way == Way::Switch && landing == Landing::Gpu => Out::Pull,
        _ => Out::Push,
    };
    Ok((Plan { out, landing }, way.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Way; 4] = [Way::Switch, Way::RootComplex, Way::Farther, Way::Unknown];

    fn chosen(path: NetPath, landing: NetLanding, way: Way) -> (Out, Landing) {
        let (plan, why) = choose(path, landing, way, Ok(())).unwrap();
        assert_eq!(why, way.to_string());
        (plan.out, plan.landing)
    }

    #[test]
    fn the_distance_decides_where_nothing_is_asked_for() {
        let auto = |way| chosen(NetPath::Auto, NetLanding::Auto, way);
        assert_eq!(auto(Way::Switch), (Out::Pull, Landing::Gpu));
        assert_eq!(auto(Way::RootComplex), (Out::Push, Landing::Gpu));
        assert_eq!(auto(Way::Farther), (Out::Push, Landing::Host));
        assert_eq!(auto(Way::Unknown), (Out::Push, Landing::Host));
    }

    #[test]
    fn what_is_asked_for_is_done() {
        for way in ALL {
            assert_eq!(chosen(NetPath::Pull, NetLanding::Auto, way), (Out::Pull, Landing::Gpu));
            assert_eq!(chosen(NetPath::Push, NetLanding::Gpu, way), (Out::Push, Landing::Gpu));
            for path in [NetPath::Auto, NetPath::Push] {
                assert_eq!(chosen(path, NetLanding::Host, way), (Out::Push, Landing::Host), "{path}");
            }
        }
        assert_eq!(chosen(NetPath::Push, NetLanding::Auto, Way::Switch), (Out::Push, Landing::Gpu));
    }

    #[test]
    fn memory_that_can_not_be_registered_is_pushed_and_pulled_by_the_gpu_or_refused() {
        for way in ALL {
            for path in [NetPath::Auto, NetPath::Push] {
                let (plan, why) = choose(path, NetLanding::Auto, way, Err("no module")).unwrap();
                assert_eq!((plan.out, plan.landing), (Out::Push, Landing::Host));
                assert!(plan.copies() && !plan.reaches() && why.contains("no module"), "{why}");
            }
            for (path, landing, setting) in
                [(NetPath::Pull, NetLanding::Auto, "path"), (NetPath::Push, NetLanding::Gpu, "landing")]
            {
                let e = choose(path, landing, way, Err("no module")).unwrap_err();
                assert!(e.setting == setting && e.allowed.contains("no module"), "{e:?}");
            }
            let e = choose(NetPath::Pull, NetLanding::Host, way, Ok(())).unwrap_err();
            assert_eq!(e.setting, "landing");
        }
    }
}
