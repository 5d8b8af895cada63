//! The plan for GPU memory over RDMA: who reads it, and where messages for it arrive. A pure choice
//! from what is asked for and what is known about the machine.

use std::fmt;

use pushgate::settings::{NetLanding, NetPath};
use pushgate_pcie_model::Parameters;
use pushgate_pcie_model::findings::Findings;
use pushgate_topology::{Costs, Distance, Figures, Method, Pair, advise, evidence};
use serde::{Deserialize, Serialize};

/// How messages leave a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// The GPU pushes them into the window, and the RDMA device sends them from there.
    Push,
    /// The RDMA device reads the GPU's memory.
    Pull,
}

/// Where messages for a GPU's memory arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Landing {
    /// In the GPU's memory: the RDMA device writes them there.
    Gpu,
    /// In the copy of the peer's window in host memory, from which the GPU pulls them.
    Host,
}

/// How messages leave and where they arrive, for one GPU over one RDMA device. Nothing that NCCL is told follows from it but whether
/// memory is handed over as dma-bufs, so the connections of a process may have different plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub out: Out,
    pub landing: Landing,
}

impl Plan {
    /// Whether the copier has something to copy.
    pub fn copies(self) -> bool {
        self.out == Out::Push || self.landing == Landing::Host
    }

    /// Whether the RDMA device is used on the GPU's memory.
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

/// What is known about the way between GPU and RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    pub distance: Distance,
    /// The way is good for the RDMA device's reads.
    pub pull: bool,
    /// The reason, as a sentence.
    pub why: String,
}

impl Way {
    /// The way between a pair of GPU and RDMA device: by the advice for the pair, and by what a
    /// probe of this host found, if one has run. Without a pair, nothing is known.
    pub fn of(pair: Option<&Pair>, findings: Option<&Findings>) -> Way {
        match pair {
            Some(pair) => {
                let parameters = Parameters::default();
                let costs = Ours(Figures { findings, parameters: &parameters });
                let advice = advise(pair, evidence(&costs, findings));
                let pull = advice.method == Method::Pull;
                Way { distance: pair.distance(), pull, why: advice.reason }
            }
            None => {
                let why = "it is not known how far GPU and RDMA device are from each other".into();
                Way { distance: Distance::Unknown, pull: false, why }
            }
        }
    }

    /// Whether the RDMA device's writes pass at most one root complex.
    fn near(&self) -> bool {
        matches!(self.distance, Distance::SameDevice | Distance::SameSwitch | Distance::SameRootComplex)
    }
}

/// The measured paths among which this plugin can choose. The path through host memory is not one
/// of them: NCCL's own kernels would have to copy there, and the ranks must agree on that
/// beforehand.
struct Ours<'a>(Figures<'a>);

impl Costs for Ours<'_> {
    fn seconds(&self, pair: &Pair, method: Method, bytes: u64) -> Option<f64> {
        if method == Method::Bounce { None } else { self.0.seconds(pair, method, bytes) }
    }
}

/// A choice that is impossible.
#[derive(Debug, PartialEq, Eq)]
pub struct Impossible {
    /// The setting: "path" or "landing".
    pub setting: &'static str,
    /// The values that are allowed, and where.
    pub allowed: &'static str,
    pub why: String,
}

/// Chooses a plan. `path` is auto, push or pull; `registers` says whether the RDMA device can
/// register the GPU's memory, and why not. Also returns the reason.
///
/// A read over PCIe is non-posted: a request goes out, the answer comes back, and the number under
/// way is bounded. Below a switch that costs little, and then no one copies at all. Through a root
/// complex reads are slow, or refused by processors that pass peer writes only: there the GPU
/// pushes. Writes are posted and pass one root complex. What happens between two root complexes
/// depends on the processor. So in that case, and if nothing is known, messages go through host
/// memory.
pub fn choose(
    path: NetPath,
    landing: NetLanding,
    way: &Way,
    registers: Result<(), &str>,
) -> Result<(Plan, String), Impossible> {
    let impossible = |setting, allowed, why| Err(Impossible { setting, allowed, why });
    if path == NetPath::Pull && landing == NetLanding::Host {
        let why = "a message out of GPU memory must have a place to go".into();
        return impossible("landing", "auto or gpu with path = pull", why);
    }
    if let Err(why) = registers {
        let why = format!("the RDMA device can't register the GPU's memory ({why})");
        return match (path, landing) {
            (NetPath::Pull, _) => impossible("path", "auto, push or bounce here", why),
            (_, NetLanding::Gpu) => impossible("landing", "auto or host here", why),
            _ => Ok((Plan { out: Out::Push, landing: Landing::Host }, why)),
        };
    }
    let landing = match landing {
        NetLanding::Gpu => Landing::Gpu,
        NetLanding::Host => Landing::Host,
        // Both ends read and write GPU memory.
        NetLanding::Auto if way.near() || path == NetPath::Pull => Landing::Gpu,
        NetLanding::Auto => Landing::Host,
    };
    let out = match path {
        NetPath::Pull => Out::Pull,
        NetPath::Auto if way.pull && landing == Landing::Gpu => Out::Pull,
        _ => Out::Push,
    };
    Ok((Plan { out, landing }, way.why.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Distance; 7] = [
        Distance::SameDevice,
        Distance::SameSwitch,
        Distance::SameRootComplex,
        Distance::SameSocket,
        Distance::AcrossSockets,
        Distance::Virtual,
        Distance::Unknown,
    ];

    /// The way as an advice without ACS describes it.
    fn way(distance: Distance) -> Way {
        let pull = matches!(distance, Distance::SameDevice | Distance::SameSwitch);
        Way { distance, pull, why: distance.to_string() }
    }

    fn chosen(path: NetPath, landing: NetLanding, distance: Distance) -> (Out, Landing) {
        let (plan, why) = choose(path, landing, &way(distance), Ok(())).unwrap();
        assert_eq!(why, distance.to_string());
        (plan.out, plan.landing)
    }

    #[test]
    fn without_a_setting_the_distance_decides() {
        let auto = |distance| chosen(NetPath::Auto, NetLanding::Auto, distance);
        assert_eq!(ALL[..2].iter().map(|d| auto(*d)).collect::<Vec<_>>(), [(Out::Pull, Landing::Gpu); 2]);
        assert_eq!(auto(Distance::SameRootComplex), (Out::Push, Landing::Gpu));
        assert_eq!(ALL[3..].iter().map(|d| auto(*d)).collect::<Vec<_>>(), [(Out::Push, Landing::Host); 4]);
        // ACS sends packets of a switch up to the root complex, and the advice says so.
        let redirected = Way { pull: false, ..way(Distance::SameSwitch) };
        let (plan, _) = choose(NetPath::Auto, NetLanding::Auto, &redirected, Ok(())).unwrap();
        assert_eq!(plan, Plan { out: Out::Push, landing: Landing::Gpu });
    }

    #[test]
    fn devices_of_unknown_distance_meet_in_host_memory() {
        let nothing = Way::of(None, None);
        let (plan, why) = choose(NetPath::Auto, NetLanding::Auto, &nothing, Ok(())).unwrap();
        assert_eq!(plan, Plan { out: Out::Push, landing: Landing::Host });
        assert!(why.contains("not known"), "{why}");
    }

    #[test]
    fn a_setting_decides_over_the_distance() {
        for way in ALL {
            assert_eq!(chosen(NetPath::Pull, NetLanding::Auto, way), (Out::Pull, Landing::Gpu));
            assert_eq!(chosen(NetPath::Push, NetLanding::Gpu, way), (Out::Push, Landing::Gpu));
            for path in [NetPath::Auto, NetPath::Push] {
                assert_eq!(chosen(path, NetLanding::Host, way), (Out::Push, Landing::Host), "{path}");
            }
        }
        assert_eq!(chosen(NetPath::Push, NetLanding::Auto, Distance::SameSwitch), (Out::Push, Landing::Gpu));
    }

    #[test]
    fn memory_that_can_not_be_registered_is_pushed_and_pulled_by_the_gpu_or_refused() {
        for distance in ALL {
            let way = &way(distance);
            for path in [NetPath::Auto, NetPath::Push] {
                let (plan, why) = choose(path, NetLanding::Auto, way, Err("no module")).unwrap();
                assert_eq!((plan.out, plan.landing), (Out::Push, Landing::Host));
                assert!(plan.copies() && !plan.reaches() && why.contains("no module"), "{why}");
            }
            for (path, landing, setting) in
                [(NetPath::Pull, NetLanding::Auto, "path"), (NetPath::Push, NetLanding::Gpu, "landing")]
            {
                let e = choose(path, landing, way, Err("no module")).unwrap_err();
                assert!(e.setting == setting && e.why.contains("no module"), "{e:?}");
            }
            let e = choose(NetPath::Pull, NetLanding::Host, way, Ok(())).unwrap_err();
            assert_eq!(e.setting, "landing");
        }
    }
}
