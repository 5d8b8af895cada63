//! The RDMA devices near a GPU.

use crate::address::Address;
use crate::distance::Distance;
use crate::tree::{Nic, Topology};

impl Topology {
    /// The RDMA devices whose port of this number is active and that are nearest to the GPU, by name. Devices that are equally near
    /// are all among them. Software devices count only where there are no others. Without a GPU, or on a host that says nothing
    /// about places, every device is equally near.
    pub fn near(&self, gpu: Option<Address>, port: u32) -> Vec<&str> {
        let active =
            |nic: &&Nic| nic.ports.iter().any(|p| p.number == port && p.state.as_deref() == Some("ACTIVE"));
        let distance = |nic: &Nic| {
            let path = gpu.zip(nic.address).and_then(|(gpu, to)| self.path(gpu, to));
            let distance = path.map_or(Distance::Unknown, |path| path.distance);
            (nic.software, distance)
        };
        let all: Vec<_> = self.nics.iter().filter(active).map(|nic| (distance(nic), &*nic.name)).collect();
        let least = all.iter().map(|(distance, _)| *distance).min();
        let mut near: Vec<_> = all.iter().filter(|(d, _)| Some(*d) == least).map(|(_, name)| *name).collect();
        near.sort_unstable();
        near
    }
}
