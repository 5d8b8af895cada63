//! Links over a port whose LID, MTU or address changes: the next link is made for the port as it is then.

use std::net::Ipv6Addr;
use std::time::Instant;

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_tests::hang;

use super::config::{Config, RdmaCm};
use super::simulated::Sim;
use super::simulated_tests::{pair, pair_between};
use pushgate_test_ends::{End, recovering};

/// Sends a message each way, and looks whether both arrive.
fn talks(sim: &Sim, ends: &mut [End; 2]) {
    for end in ends.iter_mut() {
        end.posted += 1;
        let number = end.posted;
        assert!(end.device.post(Record::new(Opcode::Send), &number.to_ne_bytes()));
        end.sends.push(number);
    }
    let begin = Instant::now();
    while ends.iter().any(|end| end.taken < end.sends.len()) {
        assert!(begin.elapsed() < hang(), "no link comes up over the port as it is");
        for end in ends.iter_mut() {
            end.now += 1_000_000;
            end.endpoint.control();
            end.poll();
        }
        while sim.complete(0) {}
        sim.expire();
        let [a, b] = ends;
        a.take(b);
        b.take(a);
    }
}

/// Two ends talk over the port, which changes, and go on over another link.
fn goes_on_when(sim: Sim, change: impl Fn(&Sim)) {
    let mut ends = recovering(pair(&sim, &Config { cm: RdmaCm::Off, ..Config::default() }));
    sim.drains();
    talks(&sim, &mut ends);
    assert_eq!(ends.each_ref().map(|end| end.endpoint.counters().recovered), [0, 0]);
    change(&sim);
    talks(&sim, &mut ends);
    for end in &ends {
        assert_eq!(end.endpoint.status(), None);
        assert!(end.endpoint.counters().recovered > 0, "messages went over the link of before");
    }
}

#[test]
fn p7_links_are_replaced_when_a_subnet_manager_gives_the_port_another_lid() {
    goes_on_when(Sim::infiniband(), |sim| sim.lid(9));
}

#[test]
fn p7_links_are_replaced_when_the_mtu_of_the_port_becomes_less() {
    goes_on_when(Sim::new(), |sim| sim.mtu(3));
}

#[test]
fn p7_links_are_replaced_when_another_address_takes_the_place_of_the_ports() {
    goes_on_when(Sim::new(), |sim| sim.address(4, "::ffff:10.0.0.9".parse().unwrap()));
}

#[test]
fn queue_pairs_come_up_in_the_subnet_that_both_hosts_have_and_go_on_when_its_address_moves() {
    let addresses = |all: &[(u32, &str)]| -> Vec<(u32, Ipv6Addr)> {
        all.iter().map(|(index, ip)| (*index, format!("::ffff:{ip}").parse().unwrap())).collect()
    };
    let here = Sim::new();
    let there = here.another();
    // The lowest index leads nowhere.
    here.addresses(&addresses(&[(0, "10.1.0.1"), (3, "10.2.0.1")]));
    there.addresses(&addresses(&[(0, "10.3.0.2"), (1, "10.4.0.2"), (2, "10.2.0.2")]));
    let config = Config { cm: RdmaCm::Off, ..Config::default() };
    let mut ends = recovering(pair_between([&here, &there], &config));
    here.drains();
    talks(&here, &mut ends);
    assert_eq!(ends.each_ref().map(|end| end.endpoint.counters().recovered), [0, 0]);
    there.addresses(&addresses(&[(0, "10.3.0.2"), (1, "10.4.0.2"), (5, "10.1.0.2")]));
    assert!(ends[0].endpoint.break_link());
    talks(&here, &mut ends);
    assert!(ends.iter().all(|end| end.endpoint.counters().recovered > 0));
}
