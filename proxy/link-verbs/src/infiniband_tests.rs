//! Queue pairs over an InfiniBand port without a network interface (IPoIB): its GID is no IP address.

use super::config::{Config, RdmaCm};
use super::simulated::Sim;
use super::simulated_tests::any_order_on;

#[test]
fn over_infiniband_without_a_network_interface_queue_pairs_come_up_and_are_replaced() {
    for seed in 0..4 {
        let sim = Sim::infiniband();
        assert!(sim.device.addresses().is_empty(), "its GID is no address at which TCP listens");
        any_order_on(&sim, seed, seed % 2 == 0, false);
        assert!(any_order_on(&Sim::infiniband(), seed, seed % 2 == 0, true) > 0);
    }
}

#[test]
fn rdma_cm_over_infiniband_without_a_network_interface_is_refused_with_the_setting_that_needs_none() {
    let sim = Sim::infiniband();
    let gid = sim.device.gids().remove(0);
    let why = sim.device.ip(&gid, None).unwrap_err().to_string();
    for says in ["for rdma_cm over InfiniBand", "no network interface (IPoIB)", "set rdma-cm = auto"] {
        assert!(why.contains(says), "{why}");
    }
    assert!(!RdmaCm::Auto.decide(sim.device.kind().rdma_cm));
}

#[test]
fn an_infiniband_port_without_a_gid_names_the_subnet_manager_and_no_ip_address() {
    let sim = Sim::infiniband();
    let config = Config { gid_index: Some(3), ..Config::default() };
    let why = super::config::chosen_gid(&sim.device, &config).unwrap_err().to_string();
    assert!(why.contains("subnet manager") && !why.contains("IP address"), "{why}");
}
