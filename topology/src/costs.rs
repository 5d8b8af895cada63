//! The costs of a pair by the cost model and a probe, for [`crate::advise`].

use pushgate_pcie_model::choose::to_nic;
use pushgate_pcie_model::findings::Findings;
use pushgate_pcie_model::{Link, Parameters, Route, Way, Window};

use crate::address::Address;
use crate::advise::{Costs, Evidence, Method};
use crate::distance::{Distance, Hop, narrowest};
use crate::host_link::HostLink;
use crate::pair::{Far, Pair};
use crate::tree::Topology;

/// The seconds of messages by the model, with the probe's parameters if there are some.
#[derive(Clone, Copy, Debug)]
pub struct Figures<'a> {
    /// What a probe of this host found.
    pub findings: Option<&'a Findings>,
    /// The parameters that the probe did not find.
    pub parameters: &'a Parameters,
}

/// The narrowest of a function's links up to the host, in the model's terms. `None` if no link is
/// known.
pub fn link_to_host(topology: &Topology, at: Address) -> Option<Link> {
    let (chain, _) = topology.above(at);
    let state = narrowest(topology, chain.iter().copied())?.state;
    let known = Link::new(state.generation().into(), state.width.into()).ok()?;
    let payloads = chain.iter().filter_map(|f| Some(f.config.express.get()?.max_payload));
    Some(Link { mps: payloads.min().unwrap_or(known.mps), ..known })
}

/// The route of a pair in the model's terms. `None` if it is not known: no PCI function, a virtual
/// machine that hides it, no link.
pub fn route(pair: &Pair) -> Option<Route> {
    if matches!(pair.distance(), Distance::Virtual | Distance::Unknown) {
        return None;
    }
    let (path, p) = (pair.path.as_ref()?, &pair.parameters);
    let state = p.link?;
    let known = Link::new(state.generation().into(), state.width.into()).ok()?;
    let link = Link {
        mps: p.max_payload.unwrap_or(known.mps),
        mrrs: p.max_read_request.unwrap_or(known.mrrs),
        rcb: p.read_completion_boundary.unwrap_or(known.rcb),
        tags: p.tags.unwrap_or(known.tags),
        ..known
    };
    let hops = path.hops.iter().filter_map(|hop| match hop {
        // A bridge costs hardly less than a switch.
        Hop::Switch(_) | Hop::Bridge(_) => Some(pushgate_pcie_model::Hop::Switch),
        Hop::RootComplex(_) => Some(pushgate_pcie_model::Hop::RootComplex),
        Hop::Sockets(..) => Some(pushgate_pcie_model::Hop::Socket),
        Hop::Nodes(..) => None,
    });
    let window = if pair.far == Far::Shim { Window::Nic } else { Window::Host };
    Some(Route { link, hops: hops.collect(), window, sharers: 1 })
}

/// The size in bytes for an advice that must cover all messages: a slice of NCCL's.
pub const ADVISED: u64 = 512 << 10;

/// The evidence that these figures are for an advice.
pub fn evidence<'a>(costs: &'a dyn Costs, findings: Option<&Findings>) -> Evidence<'a> {
    match findings {
        Some(_) => Evidence::Probe { costs, bytes: ADVISED },
        None => Evidence::Model { costs, bytes: ADVISED },
    }
}

impl Costs for Figures<'_> {
    fn seconds(&self, pair: &Pair, method: Method, bytes: u64) -> Option<f64> {
        // The model knows PCIe alone.
        if pair.host_link != HostLink::Pcie && self.findings.is_none() {
            return None;
        }
        let way = match method {
            Method::Push => Way::Push,
            // Nothing reads through a window, and a software NIC reads only host memory.
            Method::Pull if pair.far == Far::Nic => Way::Pull,
            Method::Bounce if pair.far != Far::Shim => Way::Bounce,
            _ => return None,
        };
        let from = pair.gpu.to_string();
        let us = to_nic(self.findings, self.parameters, &from, &route(pair)?, way, bytes).ok()??;
        Some(us / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advise::{Basis, Evidence, advise};
    use crate::tree::{Function, Gpu, Nic, Parent, Topology};

    /// A GPU and a NIC below two root complexes, as a pair.
    fn pair(known: bool) -> Pair {
        let mut topology = Topology::default();
        for (at, root) in [("0000:17:00.0", "pci0000:15"), ("0000:98:00.0", "pci0000:97")] {
            let mut function = Function::new(at.parse().unwrap(), Parent::RootComplex(root.into()));
            function.numa = known.then_some(0);
            function.link.now = known.then_some(crate::LinkState { gts: 32.0, width: 16 });
            topology.functions.insert(function.address, function);
            let numa = known.then_some(0);
            topology.root_complexes.push(crate::RootComplex { name: root.into(), numa });
        }
        topology.gpus.push(Gpu::new("0000:17:00.0".parse().unwrap()));
        topology.nics.push(Nic {
            name: "mlx5_0".into(),
            address: Some("0000:98:00.0".parse().unwrap()),
            software: false,
            netdev: None,
            ports: Vec::new(),
        });
        topology.pairs().remove(0)
    }

    #[test]
    fn the_narrowest_link_leads_to_the_host() {
        let mut topology = Topology::default();
        let (gpu, port): (Address, Address) =
            ("0000:17:00.0".parse().unwrap(), "0000:16:00.0".parse().unwrap());
        let mut function = Function::new(port, Parent::RootComplex("pci0000:15".into()));
        function.role = crate::Role::Switch;
        function.link.now = Some(crate::LinkState { gts: 16.0, width: 8 });
        topology.functions.insert(port, function);
        let mut function = Function::new(gpu, Parent::Function(port));
        function.link.now = Some(crate::LinkState { gts: 32.0, width: 16 });
        topology.functions.insert(gpu, function);
        let link = link_to_host(&topology, gpu).unwrap();
        assert_eq!((link.generation, link.lanes), (4, 8));
        topology.functions.values_mut().for_each(|f| f.link = crate::Link::default());
        assert_eq!(link_to_host(&topology, gpu), None);
    }

    #[test]
    fn the_model_answers_for_a_known_way_and_for_no_other() {
        let parameters = Parameters::default();
        let figures = Figures { findings: None, parameters: &parameters };
        let known = pair(true);
        let way = route(&known).unwrap();
        assert_eq!((way.link.generation, way.link.lanes, way.window), (5, 16, Window::Host));
        assert!(way.through_root(), "{way:?}");
        for method in [Method::Push, Method::Pull, Method::Bounce] {
            let us = figures.seconds(&known, method, 1 << 20).unwrap() * 1e6;
            assert!((20.0..1000.0).contains(&us), "{method}: {us}");
        }
        assert_eq!(figures.seconds(&known, Method::Local, 64), None);
        let advice = advise(&known, Evidence::Model { costs: &figures, bytes: 1 << 20 });
        assert_eq!(advice.basis, Basis::Model);
        let software = Pair { far: Far::SoftwareNic, ..known.clone() };
        assert_eq!(figures.seconds(&software, Method::Pull, 64), None);

        let unknown = pair(false);
        assert_eq!(route(&unknown), None);
        let advice = advise(&unknown, Evidence::Model { costs: &figures, bytes: 1 << 20 });
        assert_eq!(advice.basis, Basis::Distance);
    }

    #[test]
    fn no_figure_sends_reads_through_a_root_complex() {
        struct PullIsQuick;
        impl Costs for PullIsQuick {
            fn seconds(&self, _: &Pair, method: Method, _: u64) -> Option<f64> {
                Some(if method == Method::Pull { 1e-9 } else { 1e-3 })
            }
        }
        for evidence in [
            Evidence::Model { costs: &PullIsQuick, bytes: 1 },
            Evidence::Probe { costs: &PullIsQuick, bytes: 1 },
        ] {
            let advice = advise(&pair(true), evidence);
            assert_eq!(advice.method, Method::Push);
            assert!(
                advice.reason.contains("no pull: the devices are under different root complexes"),
                "{}",
                advice.reason
            );
        }
    }

    #[test]
    fn a_way_of_small_payloads_has_figures_too() {
        let mut pair = pair(true);
        pair.parameters.max_payload = Some(128);
        let figures = Figures { findings: None, parameters: &Parameters::default() };
        assert!(figures.seconds(&pair, Method::Push, 4096).is_some());
    }
}
