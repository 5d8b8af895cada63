//! The RDMA devices of each host, as the host's ranks list them. NCCL names a device by its place in the list, puts the lists of a host's
//! ranks together by these numbers, and may have one rank use another rank's device (PXN). Ranks of a host that list different devices
//! under one number would all be led to the device of one of them. They seldom connect to each other over the network, so every process
//! remembers what it has heard of each host.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use pushgate_driver_shim::log::Foreign;
use serde::{Deserialize, Serialize};

use crate::handle;
use crate::identity::Identity;

/// How many hosts are remembered. What is beyond this is not compared.
const MOST: usize = 1 << 16;

/// The longest list that is remembered, in bytes of names.
const LONGEST: usize = 4096;

/// The RDMA devices that a rank lists, and the rank's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// What NCCL takes for one host.
    host: u64,
    /// The host's name.
    name: String,
    /// The devices' names, in their order.
    devices: String,
}

impl Listed {
    /// The devices that this process lists. `id`: what the variable NCCL_HOSTID holds, by which NCCL takes a rank for a host of its own.
    pub fn here(identity: &Identity, id: Option<&str>, devices: &[&str]) -> Self {
        let host = match id {
            Some(id) => handle::sum(id.as_bytes()),
            None => handle::sum(&[&identity.boot_id[..], &identity.name].concat()),
        };
        Listed { host, name: identity.host(), devices: devices.join(",") }
    }
}

/// What was heard of each host.
pub struct Hosts(Mutex<HashMap<u64, String>>);

impl Hosts {
    /// Knows what this process lists.
    pub fn new(own: Option<&Listed>) -> Self {
        Hosts(Mutex::new(own.map(|own| (own.host, own.devices.clone())).into_iter().collect()))
    }

    /// Takes in what a rank lists. Returns a sentence if another rank of its host has listed other devices.
    pub fn differs(&self, listed: &Listed) -> Option<String> {
        let mut heard = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let room = heard.len() < MOST && listed.devices.len() <= LONGEST;
        match heard.entry(listed.host) {
            Entry::Occupied(before) if *before.get() == listed.devices => None,
            Entry::Occupied(before) => Some(format!(
                "ranks of host {} list different RDMA devices, {} and {}, and NCCL takes devices of one number for the same; let \
                 PUSHGATE_IB_DEV and NCCL_IB_HCA be alike for all ranks of a host, and NCCL takes those near each GPU",
                Foreign::word(&listed.name),
                Foreign::word(before.get()),
                Foreign::word(&listed.devices)
            )),
            Entry::Vacant(place) if room => {
                place.insert(listed.devices.clone());
                None
            }
            Entry::Vacant(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Identity {
        let mut identity = Identity { boot_id: [7; 16], pid: 1, name: [0; crate::identity::NAME] };
        identity.name[..name.len()].copy_from_slice(name.as_bytes());
        identity
    }

    #[test]
    fn ranks_of_one_host_with_different_devices_are_told_apart_and_hosts_may_have_devices_of_their_own() {
        let hosts = Hosts::new(Some(&Listed::here(&host("a"), None, &["mlx5_0", "mlx5_1"])));
        let says =
            |identity: &Identity, id, devices: &[&str]| hosts.differs(&Listed::here(identity, id, devices));
        let rank = Identity { pid: 2, ..host("a") };
        assert_eq!(says(&rank, None, &["mlx5_0", "mlx5_1"]), None);
        let why = says(&rank, None, &["mlx5_1"]).unwrap();
        assert!(why.contains("host a list different RDMA devices, mlx5_0,mlx5_1 and mlx5_1,"), "{why}");
        assert!(says(&rank, None, &["mlx5_1", "mlx5_0"]).is_some(), "the number is what counts");
        // Containers of one kernel are hosts of their own for NCCL.
        assert_eq!(says(&host("b"), None, &["bnxt_re0"]), None);
        assert!(says(&host("b"), None, &["bnxt_re1"]).is_some(), "of two other ranks");
        // Ranks with a host id that the user sets are too.
        for (id, devices) in [("r0", "mlx5_0"), ("r1", "mlx5_1")] {
            assert_eq!(says(&rank, Some(id), &[devices]), None);
        }
    }

    #[test]
    fn p8_a_job_of_very_many_hosts_is_remembered_in_part() {
        let hosts = Hosts::new(Some(&Listed { host: 0, name: "a".into(), devices: "x".into() }));
        for host in 1..MOST as u64 + 10 {
            assert_eq!(hosts.differs(&Listed { host, name: "b".into(), devices: "y".into() }), None);
        }
        assert_eq!(hosts.0.lock().unwrap().len(), MOST);
        let hosts = Hosts::new(None);
        let long = Listed { host: 1, name: "a".into(), devices: "x".repeat(LONGEST + 1) };
        assert_eq!(hosts.differs(&long), None);
        assert!(hosts.0.lock().unwrap().is_empty(), "a list longer than that of any host");
    }
}
