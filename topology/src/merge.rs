//! Combines several sources: a file and the running kernel, the kernel and a GPU's driver.

use std::collections::{BTreeMap, BTreeSet};

use crate::address::Address;
use crate::tree::{Function, Gpu, Nic, Parent, Topology, UNPLACED};

impl Gpu {
    /// Takes over what `other` knows.
    fn learn(&mut self, other: Self) {
        self.index = other.index.or(self.index);
        self.name = other.name.or(self.name.take());
        self.uuid = other.uuid.or(self.uuid.take());
        self.mig = other.mig.or(self.mig.take());
        self.mps = other.mps.or(self.mps);
        if !other.nvlinks.is_empty() {
            self.nvlinks = other.nvlinks;
        }
        if !other.peers.is_empty() {
            self.peers = other.peers;
        }
    }
}

impl Topology {
    /// Adds what a GPU's driver reports, through [`crate::nvml::read`] or a caller that asked CUDA.
    /// GPUs that are not in the tree are left out, with a note.
    pub fn learn_gpus(&mut self, told: Vec<Gpu>) {
        for gpu in told {
            match self.gpus.iter_mut().find(|g| g.address == gpu.address) {
                Some(known) => known.learn(gpu),
                None => {
                    self.notes.push(format!("{}: the driver reports a GPU that the tree lacks", gpu.address))
                }
            }
        }
    }

    /// Combines the tree of a file with what is found on this host: drivers, configuration spaces,
    /// links as trained, states of ports. Places come from the file. Devices that the file does not
    /// name have no place, with a note. If nothing on the host matters, and nothing of the file is
    /// on it, the host adds nothing: the file describes another machine.
    pub fn on_host(mut self, live: Self) -> Self {
        let on_host =
            |t: &Self| t.functions.keys().any(|at| t.matters(*at) && live.functions.contains_key(at));
        if !live.functions.keys().any(|at| live.matters(*at)) && !on_host(&self) {
            self.notes.push("nothing of the file is on this host: it is shown as the file has it".into());
            return self;
        }
        // The host knows the names of its NICs.
        self.nics.retain(|nic| !nic.is_unnamed());
        let told: BTreeSet<Address> = self.nics.iter().filter_map(|nic| nic.address).collect();
        let place_of = |nic: &Nic| self.functions.get(&nic.address?).map(|f| f.parent.clone());
        let places: BTreeMap<&str, Parent> =
            self.nics.iter().filter_map(|nic| Some((nic.name.as_str(), place_of(nic)?))).collect();
        // Where the file has a NIC at another function than this host, as for the second port of a device or for a NIC that NCCL
        // joined with others, the place is the same.
        let named = |at: Address| {
            live.nics.iter().find(|nic| nic.address == Some(at)).and_then(|nic| places.get(nic.name.as_str()))
        };
        let beside =
            |at: Address| self.functions.values().find(|f| f.address.same_device(at)).map(|f| &f.parent);
        let mut found = Vec::new();
        for (at, f) in live.functions.iter().filter(|(at, _)| !self.functions.contains_key(at)) {
            if !live.matters(*at) {
                continue;
            }
            let parent = named(*at).or_else(|| beside(*at)).cloned();
            if parent.is_none() {
                self.notes.push(format!("{at}: the file does not name it: its place is unknown"));
            }
            let parent = parent.unwrap_or(Parent::RootComplex(UNPLACED.into()));
            found.push(Function { parent, ..f.clone() });
        }
        for (at, f) in &mut self.functions {
            if let Some(found) = live.functions.get(at) {
                f.learn(found);
            }
        }
        self.functions.extend(found.into_iter().map(|f| (f.address, f)));
        for nic in live.nics {
            match self.nics.iter_mut().find(|n| n.name == nic.name) {
                Some(known) => *known = Nic { address: nic.address.or(known.address), ..nic },
                None => self.nics.push(nic),
            }
        }
        for at in told {
            if !self.matters(at) && !live.functions.contains_key(&at) {
                self.functions.remove(&at);
            }
        }
        let missing =
            self.functions.keys().filter(|at| self.matters(**at) && !live.functions.contains_key(at));
        let missing: Vec<String> = missing.map(ToString::to_string).collect();
        if !missing.is_empty() {
            self.notes.push(format!("in the file, but not on this host: {}", missing.join(", ")));
        }
        for gpu in live.gpus {
            match self.gpus.iter_mut().find(|g| g.address == gpu.address) {
                Some(known) => known.learn(gpu),
                None => self.gpus.push(gpu),
            }
        }
        for shim in live.shims {
            match self.shims.iter_mut().find(|s| s.address == shim.address) {
                Some(known) => *known = shim,
                None => self.shims.push(shim),
            }
        }
        let nodes = std::mem::take(&mut self.machine.nodes);
        self.machine = live.machine;
        self.machine.flat = false;
        if !nodes.is_empty() {
            self.machine.nodes = nodes;
        }
        self.notes.extend(live.notes);
        self.settle();
        self
    }
}

impl Function {
    fn learn(&mut self, found: &Self) {
        self.class = found.class.or(self.class);
        self.vendor = found.vendor.or(self.vendor);
        self.device = found.device.or(self.device);
        self.subsystem_vendor = found.subsystem_vendor.or(self.subsystem_vendor);
        self.driver = found.driver.clone();
        self.iommu = found.iommu.clone();
        self.link.now = found.link.now;
        self.link.best = self.link.best.or(found.link.best);
        let told = self.config.acs.get().copied();
        self.config = found.config.clone();
        if let Some(acs) = told {
            self.config.acs = crate::config::Read::Is(acs);
        }
    }
}
