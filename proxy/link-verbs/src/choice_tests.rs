//! The choice of a device: tables, any order of any devices, and trees of files.

use proptest::prelude::*;

use super::super::gid::Gid;
use super::*;

fn entry(index: u32, ip: &str, kind: GidType) -> GidEntry {
    let ip = match ip.parse().unwrap() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    GidEntry { index, gid: Gid(ip.octets()), kind, netdev: None }
}

/// A RoCE v2 adapter with an address.
fn roce(device: &str) -> Description {
    Description {
        device: device.into(),
        port: 1,
        exists: true,
        protocol: Some(Protocol::Ib),
        active: true,
        gids: vec![entry(0, "fe80::1", GidType::RoceV2), entry(1, "10.0.0.1", GidType::RoceV2)],
        gigabits: Some(100.0),
        ..Description::default()
    }
}

/// An iWARP adapter with an address.
fn iwarp(device: &str) -> Description {
    Description {
        protocol: Some(Protocol::Iwarp),
        gids: Vec::new(),
        addresses: vec!["10.0.0.1".parse().unwrap()],
        ..roce(device)
    }
}

fn infiniband(device: &str) -> Description {
    Description {
        infiniband: true,
        lid: 7,
        gids: vec![entry(0, "fe80::1", GidType::IbOrRoceV1)],
        ..roce(device)
    }
}

fn v1(device: &str) -> Description {
    Description { gids: vec![entry(0, "10.0.0.1", GidType::IbOrRoceV1)], ..roce(device) }
}

fn away(steps: u8, d: Description) -> Description {
    Description { distance: Distance { steps, words: format!("distance {steps}") }, ..d }
}

const V4: Wish = Wish { family: Some(Family::V4), gid_index: None };

#[test]
fn the_best_of_two_devices_is_taken_and_the_report_says_why() {
    let down = |d| Description { active: false, ..d };
    let without = |d: Description| Description { gids: Vec::new(), addresses: Vec::new(), lid: 0, ..d };
    let local = |d: Description| Description { gids: vec![entry(0, "fe80::1", GidType::RoceV2)], ..d };
    let v6 = |d: Description| Description { gids: vec![entry(0, "2001:db8::1", GidType::RoceV2)], ..d };
    let fast = |d: Description| Description { gigabits: Some(400.0), ..d };
    let soft = |d: Description| Description { software: true, gigabits: Some(800.0), ..d };
    let cases: [(Description, Description, &str); 17] = [
        // What it reaches, before all else.
        (iwarp("b"), without(fast(roce("a"))), "a not: it has no address"),
        (roce("b"), without(fast(iwarp("a"))), "a not: it has no address"),
        (roce("b"), without(fast(infiniband("a"))), "a not: it has no address"),
        (roce("b"), down(fast(roce("a"))), "a not: its port is down"),
        (roce("b"), local(fast(roce("a"))), "a not: its only address reaches no further than the link"),
        (roce("b"), v6(fast(roce("a"))), "a not: its address is not of the family"),
        (v6(roce("b")), local(fast(roce("a"))), "a not: its only address"),
        (
            iwarp("b"),
            Description { protocol: Some(Protocol::Other), ..fast(roce("a")) },
            "a not: it has no RC queue pairs",
        ),
        (roce("b"), Description { exists: false, active: false, ..roce("a") }, "a not: it has no such port"),
        // Then the speed, which a device in software has none of.
        (fast(iwarp("b")), infiniband("a"), "a not: 100 Gb/s is slower"),
        (roce("b"), Description { gigabits: None, ..roce("a") }, "a not: it says no speed"),
        (iwarp("b"), soft(roce("a")), "a not: it is in software"),
        // Then the transport.
        (infiniband("b"), away(0, roce("a")), "a not: RoCE v2 comes after InfiniBand"),
        (roce("b"), away(0, v1("a")), "a not: RoCE v1 comes after RoCE v2"),
        (v1("b"), away(0, iwarp("a")), "a not: iWARP comes after RoCE v1"),
        // Then the distance from the GPU, and at last the name.
        (away(1, roce("b")), away(2, roce("a")), "a not: it is farther from the GPU (distance 2)"),
        (roce("a"), roce("b"), "b not: its name comes later"),
    ];
    for (best, other, said) in cases {
        let taken = best.device.clone();
        for all in [[best.clone(), other.clone()], [other, best]] {
            let choice = Choice::new(all, &V4);
            assert_eq!(choice.taken().unwrap().description.device, taken, "{said}");
            let why = choice.report();
            assert!(
                why.starts_with(&format!("{taken} is taken: ")) && why.contains(said),
                "{why:?}: {said:?}"
            );
        }
    }
}

#[test]
fn software_iwarp_is_not_taken_where_soft_roce_is_there_whichever_the_kernel_lists_first() {
    let siw = Description { software: true, gigabits: Some(10.0), ..iwarp("a-siw0") };
    let rxe = Description { software: true, gigabits: Some(2.5), ..roce("rxe0") };
    for all in [[siw.clone(), rxe.clone()], [rxe.clone(), siw.clone()]] {
        let choice = Choice::new(all, &Wish::default());
        assert_eq!(
            choice.report(),
            "rxe0 is taken: RoCE v2, address 10.0.0.1, in software; a-siw0 not: iWARP comes after RoCE v2"
        );
        assert_eq!(choice.near(), ["rxe0"], "links of one queue pair speak the same");
    }
    // Alone it is taken.
    assert_eq!(Choice::new([siw], &Wish::default()).near(), ["a-siw0"]);
}

#[test]
fn no_device_is_taken_where_none_can_be_and_the_report_says_what_each_lacks() {
    let down = Description { active: false, ..roce("mlx5_0") };
    let efa = Description { protocol: Some(Protocol::Other), ..roce("efa0") };
    let choice = Choice::new([efa, down], &V4);
    assert!(choice.taken().is_none() && choice.near().is_empty());
    assert_eq!(
        choice.report(),
        "no RDMA device can be taken: mlx5_0: its port is down; efa0: it has no RC queue pairs"
    );
    assert_eq!(Choice::default().report(), "no RDMA device");
}

#[test]
fn the_family_and_the_index_that_are_wished_for_say_which_address_counts() {
    let both = Description {
        gids: vec![entry(1, "10.0.0.1", GidType::RoceV2), entry(2, "2001:db8::1", GidType::RoceV2)],
        ..roce("a")
    };
    let address = |family, gid_index| {
        let candidate = Candidate::new(both.clone(), &Wish { family, gid_index });
        (candidate.reach, candidate.address.map(|ip| ip.to_string()))
    };
    assert_eq!(address(Some(Family::V6), None), (Reach::Good, Some("2001:db8::1".into())));
    assert_eq!(address(Some(Family::V4), None), (Reach::Good, Some("10.0.0.1".into())));
    assert_eq!(address(Some(Family::V4), Some(2)), (Reach::OtherFamily, Some("2001:db8::1".into())));
    assert_eq!(address(None, Some(9)), (Reach::NoAddress, None));
}

#[test]
fn devices_of_one_queue_pair_reach_as_much_as_the_best_over_the_same_transport() {
    let all = [
        roce("mlx5_1"),
        Description { gigabits: Some(400.0), ..roce("mlx5_2") },
        Description { active: false, ..roce("mlx5_0") },
        v1("mlx5_3"),
        iwarp("cxgb4_0"),
    ];
    assert_eq!(Choice::new(all.clone(), &V4).near(), ["mlx5_1", "mlx5_2"]);
    // The nearest of them; speed decides nothing here.
    let mut apart = all.map(|d| away(3, d));
    apart[0].distance.steps = 1;
    assert_eq!(Choice::new(apart.clone(), &V4).near(), ["mlx5_1"]);
    // Where the nearest has no address, those that have one are taken.
    apart[0].gids.clear();
    assert_eq!(Choice::new(apart, &V4).near(), ["mlx5_2"]);
}

#[test]
fn a_device_that_could_not_be_opened_is_named() {
    let choice = Choice::new([roce("mlx5_0"), roce("mlx5_1")], &V4);
    let why = choice.why("mlx5_1");
    assert!(why.starts_with("mlx5_1 is taken: ") && why.ends_with("; mlx5_0 not: it does not open"), "{why}");
}

/// Any device, often one that has a part in common with another.
fn any_device() -> impl Strategy<Value = Description> {
    let gids = prop::sample::subsequence(vec!["fe80::1", "10.0.0.1", "2001:db8::1", "169.254.0.1"], 0..=4);
    let protocols = [None, Some(Protocol::Ib), Some(Protocol::Iwarp), Some(Protocol::Other)];
    let speeds = [None, Some(2.5), Some(100.0), Some(400.0)];
    (
        prop::sample::select(protocols.to_vec()),
        (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), 0u16..2),
        (gids, any::<bool>()),
        prop::sample::select(speeds.to_vec()),
        0u8..3,
    )
        .prop_map(
            |(protocol, (exists, infiniband, software, active, lid), (ips, v2), gigabits, steps)| {
                let kind = if v2 { GidType::RoceV2 } else { GidType::IbOrRoceV1 };
                let indexed = ips.iter().zip(0..);
                Description {
                    device: String::new(),
                    port: 1,
                    exists,
                    protocol,
                    infiniband,
                    software,
                    active: active && exists,
                    lid,
                    gids: indexed.map(|(ip, index)| entry(index, ip, kind)).collect(),
                    addresses: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
                    gigabits,
                    distance: Distance { steps, words: "so far".into() },
                }
            },
        )
}

fn names_of(choice: &Choice) -> Vec<&str> {
    choice.ranked().iter().map(|c| &*c.description.device).collect()
}

proptest! {
    #[test]
    fn any_devices_have_one_order_in_whatever_order_they_are_listed(
        mut all in prop::collection::vec(any_device(), 1..7),
        seed in any::<u64>(),
        family in prop::sample::select(vec![None, Some(Family::V4), Some(Family::V6)]),
    ) {
        for (i, d) in all.iter_mut().enumerate() {
            d.device = format!("dev{i}");
        }
        let wish = Wish { family, gid_index: None };
        let choice = Choice::new(all.clone(), &wish);
        // A total order: each two differ, one is before the other, and the order holds over three.
        for (i, a) in choice.ranked().iter().enumerate() {
            for b in &choice.ranked()[i + 1..] {
                prop_assert!(a.key() < b.key());
            }
        }
        let mut shuffled = all.clone();
        let n = shuffled.len();
        (0..n).for_each(|i| shuffled.swap(i, (seed.rotate_left(i as u32 * 8) as usize) % n));
        let again = Choice::new(shuffled, &wish);
        prop_assert_eq!(names_of(&choice), names_of(&again));

        // A device that can be used and has an address is not passed over for one without.
        let has = |c: &Candidate| c.reach < Reach::NoAddress;
        if let Some(taken) = choice.taken() {
            prop_assert!(has(taken) || !choice.ranked().iter().any(has));
            prop_assert!(taken.description.active && taken.transport != Transport::None);
            prop_assert!(!choice.near().is_empty());
        } else {
            prop_assert!(!choice.ranked().iter().any(has));
        }
    }
}

#[test]
fn a_tree_of_files_is_described_and_the_address_of_an_iwarp_device_is_its_interfaces() {
    let root = std::env::temp_dir().join(format!("pushgate-choice-{}", std::process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    for (path, text) in [
        ("class/net/d0/address", "52:54:00:12:34:56\n"),
        ("class/net/lo/address", "00:00:00:00:00:00\n"),
        ("class/infiniband/siw0/node_type", "4: RNIC\n"),
        ("class/infiniband/siw0/node_desc", "Software iWARP stack\n"),
        ("class/infiniband/siw0/ports/1/state", "4: ACTIVE\n"),
        ("class/infiniband/siw0/ports/1/link_layer", "Ethernet\n"),
        ("class/infiniband/siw0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n"),
        ("class/infiniband/siw0/ports/1/gids/0", "5254:0012:3456:0000:0000:0000:0000:0000\n"),
        ("class/infiniband/rxe0/node_type", "1: CA\n"),
        ("class/infiniband/rxe0/parent", "d0\n"),
        ("class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n"),
        ("class/infiniband/rxe0/ports/1/link_layer", "Ethernet\n"),
        ("class/infiniband/rxe0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a09:0001\n"),
        ("class/infiniband/rxe0/ports/1/gid_attrs/types/1", "RoCE v2\n"),
        ("class/infiniband/ib0/node_type", "1: CA\n"),
        ("class/infiniband/ib0/ports/1/state", "1: DOWN\n"),
        ("class/infiniband/ib0/ports/1/link_layer", "InfiniBand\n"),
        ("class/infiniband/ib0/ports/1/lid", "0x1f\n"),
        ("class/infiniband/ib0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
    ] {
        write(path, text);
    }
    let ip: IpAddr = "10.9.0.1".parse().unwrap();
    let addresses = |name: &str| if name == "d0" { vec![ip] } else { Vec::new() };
    let all: Vec<_> = names(&root).iter().map(|name| describe(&root, name, 1, addresses)).collect();
    let second_port = describe(&root, "rxe0", 2, addresses);
    std::fs::remove_dir_all(&root).unwrap();

    let siw = all.iter().find(|d| d.device == "siw0").unwrap();
    assert_eq!((&siw.addresses[..], siw.software, siw.gigabits), (&[ip][..], true, Some(2.5)));
    let ib = all.iter().find(|d| d.device == "ib0").unwrap();
    assert_eq!((ib.lid, ib.infiniband, ib.active, ib.software), (0x1f, true, false, false));
    assert!(!second_port.exists);
    assert_eq!(
        Choice::new(all, &V4).report(),
        "rxe0 is taken: RoCE v2, address 10.9.0.1, in software; siw0 not: iWARP comes after RoCE v2; ib0 not: its port is \
         down"
    );
}

#[test]
fn the_network_interface_of_a_port_is_found_by_the_ports_number_and_a_function_without_one_has_none() {
    let root = std::env::temp_dir().join(format!("pushgate-beside-{}", std::process::id()));
    let (device, net) = (root.join("mlx4_0"), root.join("net"));
    for (name, port) in [("ib0", "0\n"), ("ib1", "1\n")] {
        std::fs::create_dir_all(device.join("device/net").join(name)).unwrap();
        std::fs::create_dir_all(net.join(name)).unwrap();
        std::fs::write(net.join(name).join("dev_port"), port).unwrap();
    }
    let found = [1, 2, 3].map(|port| netdev_of_port(&device, port, &net));
    let none = netdev_of_port(&root.join("mlx5_0"), 1, &net);
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!(found, [Some("ib0".into()), Some("ib1".into()), None]);
    assert_eq!(none, None);
}
