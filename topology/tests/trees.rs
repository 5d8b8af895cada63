//! Hosts of every shape: what is found, the distances, the advice, and the drawing.

mod common;

use std::fs;

use common::*;
use pushgate_topology::{
    AcsOnWay, Costs, Distance, Evidence, Far, Gpu, Hop, LinkState, Method, Mig, NvLink, NvLinkEnd, Pair,
    Peer, Role, Sysfs, Topology, advise, draw,
};

const RP: &str = "pci0000:15/0000:15:01.0";
const UP: &str = "pci0000:15/0000:15:01.0/0000:16:00.0";

/// One switch with a GPU (0000:18:00.0) and a NIC (0000:19:00.0, mlx5_0) at ports with this ACS
/// control register.
fn one_switch(acs: u16) -> Host {
    let host = Host::server(1);
    host.add(RP, root_port());
    host.add(UP, upstream());
    host.add(&format!("{UP}/0000:17:00.0"), downstream().acs(acs));
    host.add(&format!("{UP}/0000:17:01.0"), downstream().acs(acs));
    host.add(&format!("{UP}/0000:17:00.0/0000:18:00.0"), gpu());
    host.add(&format!("{UP}/0000:17:01.0/0000:19:00.0"), nic());
    host.rdma("mlx5_0", &format!("{UP}/0000:17:01.0/0000:19:00.0"));
    host
}

fn only_pair(t: &Topology) -> Pair {
    let mut pairs = t.pairs();
    assert_eq!(pairs.len(), 1);
    pairs.remove(0)
}

#[test]
fn the_last_level_cache_is_the_sum_of_the_caches_of_the_highest_level() {
    let host = Host::server(1);
    let read = || Sysfs::new(host.at("sys")).last_level_cache();
    assert_eq!(read(), None, "the kernel reports no cache");
    let cache = |cpu: u32, index: u32, level: &str, size: &str, shared: &str| {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
        for (name, value) in [("level", level), ("size", size), ("shared_cpu_list", shared)] {
            host.file(&format!("{folder}/{name}"), format!("{value}\n"));
        }
    };
    // Two processors of two cores: each has a cache for both of its cores.
    for cpu in 0..4 {
        cache(cpu, 2, "2", "2048K", &cpu.to_string());
        cache(cpu, 3, "3", "307200K", if cpu < 2 { "0-1" } else { "2-3" });
    }
    assert_eq!(read(), Some(2 * (300 << 20)));
    // Processors that are numbered in turn have long lists.
    let odd: Vec<String> = (0..112).map(|i| (2 * i + 1).to_string()).collect();
    for cpu in 2..4 {
        cache(cpu, 3, "3", "307200K", &odd.join(","));
    }
    assert_eq!(read(), Some(2 * (300 << 20)));
    // What is no number is left out.
    cache(2, 3, "3", "many", "2-3");
    assert_eq!(read(), Some(2 * (300 << 20)), "another core reports the same cache");
    cache(3, 3, "third", "307200K", "2-3");
    assert_eq!(read(), Some(300 << 20));
}

#[test]
fn one_switch_without_redirection_pulls() {
    let t = one_switch(0).clean();
    let pair = only_pair(&t);
    let path = pair.path.as_ref().unwrap();
    assert_eq!((path.distance, &path.acs), (Distance::SameSwitch, &AcsOnWay::Direct));
    assert_eq!(path.hops, [Hop::Switch(at("0000:16:00.0"))]);
    assert_eq!(path.narrowest.unwrap().state, LinkState { gts: 32.0, width: 16 });
    let p = pair.parameters;
    assert_eq!((p.switches, p.root_complexes, p.sockets), (1, 0, 0));
    assert_eq!(
        (p.max_payload, p.max_read_request, p.read_completion_boundary),
        (Some(256), Some(512), Some(64))
    );
    assert_eq!((p.tags, p.gpu_relaxed_ordering), (Some(256), Some(true)));
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!((advice.method, advice.warnings.len()), (Method::Pull, 0));

    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert_eq!(
        text,
        "host: Intel(R) Xeon(R) Platinum 8480C, 1 NUMA node in 1 socket

NUMA node 0, socket 0
└─ root complex pci0000:15
   └─ 0000:15:01.0 root port, 32 GT/s x16
      └─ 0000:16:00.0 switch, 32 GT/s x16
         ├─ 0000:17:00.0 port, 32 GT/s x16
         │  └─ 0000:18:00.0 gpu0 NVIDIA GPU, 32 GT/s x16, MPS 256 MRRS 512, driver nvidia
         └─ 0000:17:01.0 port, 32 GT/s x16
            └─ 0000:19:00.0 mlx5_0 400 Gb/s InfiniBand, 32 GT/s x16, MPS 256 MRRS 512, driver mlx5_core

GPU x NIC
        mlx5_0
  gpu0  SW pull
  (SW same switch)

advice
  pull: gpu0-mlx5_0
      one switch is above both, so the NIC's reads stay below it: plain GPUDirect RDMA is fine
"
    );
    let ascii = draw::tree(&t, draw::Style { ascii: true, all: true });
    assert!(ascii.is_ascii() && ascii.contains("\n         |- 0000:17:00.0 port"), "{ascii}");
}

#[test]
fn acs_on_the_way_makes_it_push() {
    // Source validation, request and completion redirect, upstream forwarding: what Linux sets.
    let t = one_switch(0x1d).clean();
    let pair = only_pair(&t);
    let path = pair.path.as_ref().unwrap();
    assert_eq!(path.distance, Distance::SameSwitch);
    assert_eq!(path.acs, AcsOnWay::Redirects(vec![at("0000:17:00.0"), at("0000:17:01.0")]));
    let switch = Hop::Switch(at("0000:16:00.0"));
    assert_eq!(path.hops, [switch.clone(), Hop::RootComplex("pci0000:15".into()), switch]);
    assert_eq!((pair.parameters.switches, pair.parameters.root_complexes), (2, 1));
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(
        advice.reason.starts_with("one switch is above both, but ACS redirects packets"),
        "{}",
        advice.reason
    );
    assert!(
        advice.warnings[0].starts_with("ACS redirects packets at 0000:17:00.0, 0000:17:01.0: if"),
        "{advice:?}"
    );
    let text = draw::gpu_nic(&t.report(Evidence::ByDistance));
    assert!(text.contains("gpu0  SW+ACS push"), "{text}");
    let way = draw::path(&t, at("0000:18:00.0"), at("0000:19:00.0")).unwrap();
    assert!(
        way.contains("over      switch 0000:16:00.0, root complex pci0000:15, switch 0000:16:00.0"),
        "{way}"
    );
    assert!(way.contains("ACS       redirects to the root complex at 0000:17:00.0, 0000:17:01.0"), "{way}");
}

/// That switch with its configuration spaces cut to 64 bytes, and GPU and NIC in these IOMMU
/// groups.
fn cut_switch(groups: Option<(u32, u32)>) -> Topology {
    let host = Host::server(1);
    host.add(RP, root_port().cut());
    host.add(UP, upstream().cut());
    let group = |dev: Dev, n: Option<u32>| n.map_or(dev.clone(), |n| dev.group(n, "DMA-FQ"));
    for (port, below, dev, n) in [
        ("0000:17:00.0", "0000:18:00.0", gpu(), groups.map(|g| g.0)),
        ("0000:17:01.0", "0000:19:00.0", nic(), groups.map(|g| g.1)),
    ] {
        host.add(&format!("{UP}/{port}"), downstream().cut());
        host.add(&format!("{UP}/{port}/{below}"), group(dev.cut(), n));
    }
    host.rdma("mlx5_0", &format!("{UP}/0000:17:01.0/0000:19:00.0"));
    host.clean()
}

#[test]
fn without_root_roles_follow_from_the_shape_and_acs_from_iommu_groups() {
    let t = cut_switch(None);
    let roles = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"]
        .map(|a| t.function(at(a)).unwrap().role);
    assert_eq!(roles, [Role::RootPort, Role::Switch, Role::DownstreamPort, Role::Endpoint]);
    assert!(t.needs_root());
    let advice = |t: &Topology| {
        let pair = only_pair(t);
        assert_eq!(pair.distance(), Distance::SameSwitch);
        (pair.path.clone().unwrap().acs, advise(&pair, Evidence::ByDistance))
    };
    let (acs, said) = advice(&t);
    assert_eq!((acs, said.method), (AcsOnWay::Unknown, Method::Pull));
    assert!(said.warnings[0].starts_with("the ACS settings are not known (root can read them"), "{said:?}");
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.contains("cut to 64 bytes: run as root to see MPS"), "{text}");

    let (acs, said) = advice(&cut_switch(Some((7, 8))));
    assert_eq!((acs, said.method), (AcsOnWay::InferredRedirects, Method::Push));
    let (acs, said) = advice(&cut_switch(Some((7, 7))));
    assert_eq!((acs, said.method), (AcsOnWay::Direct, Method::Pull));
    assert!(said.warnings[0].starts_with("the IOMMU translates"), "{said:?}");
}

/// GPUs at `gpus` and a NIC at `nic_at`, each behind a root port of its own; the number is the NUMA
/// node.
fn spread(host: &Host, gpus: &[(&str, i32)], nic_at: (&str, i32)) -> Topology {
    let put = |place: &str, numa: i32, below: Dev| {
        host.add(place.rsplit_once('/').unwrap().0, root_port().on(numa));
        host.add(place, below.on(numa));
    };
    gpus.iter().for_each(|(place, numa)| put(place, *numa, gpu()));
    put(nic_at.0, nic_at.1, nic());
    host.rdma("mlx5_0", nic_at.0);
    host.clean()
}

#[test]
fn ports_of_one_root_complex() {
    let host = Host::server(1);
    let t = spread(
        &host,
        &[("pci0000:15/0000:15:01.0/0000:16:00.0", 0)],
        ("pci0000:15/0000:15:02.0/0000:17:00.0", 0),
    );
    let pair = only_pair(&t);
    let path = pair.path.as_ref().unwrap();
    assert_eq!(path.distance, Distance::SameRootComplex);
    assert_eq!(
        (&path.acs, &path.hops[..]),
        (&AcsOnWay::NotAsked, &[Hop::RootComplex("pci0000:15".into())][..])
    );
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(
        advice.reason.contains("root complex, where reads are split into small ones"),
        "{}",
        advice.reason
    );
}

#[test]
fn two_root_complexes_of_a_socket() {
    let host = Host::server(2);
    let t = spread(
        &host,
        &[("pci0000:15/0000:15:01.0/0000:16:00.0", 0)],
        ("pci0000:26/0000:26:01.0/0000:27:00.0", 0),
    );
    let pair = only_pair(&t);
    let path = pair.path.as_ref().unwrap();
    assert_eq!(path.distance, Distance::SameSocket);
    assert_eq!(path.hops, ["pci0000:15", "pci0000:26"].map(|n| Hop::RootComplex(n.into())));
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(
        advice.reason.starts_with("the devices are under different root complexes:"),
        "{}",
        advice.reason
    );
}

#[test]
fn the_nic_on_the_other_socket() {
    let host = Host::server(2);
    let t = spread(
        &host,
        &[("pci0000:15/0000:15:01.0/0000:16:00.0", 0)],
        ("pci0000:97/0000:97:01.0/0000:98:00.0", 1),
    );
    let pair = only_pair(&t);
    let path = pair.path.as_ref().unwrap();
    assert_eq!(path.distance, Distance::AcrossSockets);
    let root = |n: &str| Hop::RootComplex(n.into());
    assert_eq!(path.hops, [root("pci0000:15"), Hop::Sockets(0, 1), root("pci0000:97")]);
    assert_eq!((pair.parameters.root_complexes, pair.parameters.sockets), (2, 1));
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(advice.reason.starts_with("the devices are at different sockets,"), "{}", advice.reason);
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.contains("NUMA node 1, socket 1\n└─ root complex pci0000:97"), "{text}");
    assert!(text.contains("  gpu0  SYS push\n  (SYS across sockets)\n"), "{text}");
}

#[test]
fn numa_nodes_of_one_package_are_one_socket() {
    let host = Host::new();
    host.node(0, 0);
    host.node(1, 0);
    let t = spread(
        &host,
        &[("pci0000:15/0000:15:01.0/0000:16:00.0", 0)],
        ("pci0000:97/0000:97:01.0/0000:98:00.0", 1),
    );
    let path = only_pair(&t).path.unwrap();
    assert_eq!(path.distance, Distance::SameSocket);
    assert_eq!(path.hops[1], Hop::Nodes(0, 1));
}

#[test]
fn an_unreported_node_is_unknown_unless_the_host_has_only_one() {
    let far = ("pci0000:97/0000:97:01.0/0000:98:00.0", -1);
    let near = [("pci0000:15/0000:15:01.0/0000:16:00.0", 0)];
    let pair = only_pair(&spread(&Host::server(2), &near, far));
    assert_eq!(pair.distance(), Distance::Unknown);
    let advice = advise(&pair, Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(advice.reason.starts_with("the distance between the devices is not known"), "{}", advice.reason);
    assert_eq!(only_pair(&spread(&Host::server(1), &near, far)).distance(), Distance::SameSocket);
}

#[test]
fn a_client_processor_passes_writes_alone() {
    let host = Host::server(1);
    host.cpu("Intel(R) Core(TM) Ultra 9 285K", "fpu");
    let t = spread(
        &host,
        &[("pci0000:15/0000:15:01.0/0000:16:00.0", 0)],
        ("pci0000:15/0000:15:02.0/0000:17:00.0", 0),
    );
    let advice = advise(&only_pair(&t), Evidence::ByDistance);
    assert_eq!(advice.method, Method::Push);
    assert!(advice.reason.contains("client processor"), "{}", advice.reason);
}

#[test]
fn gpus_that_share_an_uplink_are_warned_of_the_collapse() {
    let host = one_switch(0);
    host.add(&format!("{UP}/0000:17:02.0"), downstream());
    host.add(&format!("{UP}/0000:17:02.0/0000:1a:00.0"), gpu());
    host.add("pci0000:26/0000:26:01.0", root_port());
    host.add("pci0000:26/0000:26:01.0/0000:27:00.0", nic());
    host.rdma("mlx5_1", "pci0000:26/0000:26:01.0/0000:27:00.0");
    let t = host.clean();
    for pair in t.pairs() {
        let advice = advise(&pair, Evidence::ByDistance);
        let warned = advice.warnings.iter().any(|w| w.contains("collapses when several GPUs store"));
        match pair.name.as_str() {
            "mlx5_0" => assert!(advice.method == Method::Pull && !warned, "{advice:?}"),
            _ => assert!(advice.method == Method::Push && warned, "{advice:?}"),
        }
    }
    let gpus = draw::gpu_gpu(&t.report(Evidence::ByDistance));
    assert!(gpus.contains("  gpu0  X     SW\n  gpu1  SW    X\n"), "{gpus}");
}

#[test]
fn functions_of_one_device() {
    let host = Host::server(1);
    host.add(RP, root_port());
    host.add(&format!("{RP}/0000:16:00.0"), gpu());
    host.add(&format!("{RP}/0000:16:00.1"), nic());
    host.rdma("mlx5_0", &format!("{RP}/0000:16:00.1"));
    let pair = only_pair(&host.clean());
    assert_eq!(pair.distance(), Distance::SameDevice);
    assert_eq!(advise(&pair, Evidence::ByDistance).method, Method::Pull);
}

#[test]
fn a_flat_virtual_machine_says_so_and_a_file_tells_the_truth() {
    let host = Host::server(1);
    host.cpu("AMD EPYC 9575F 64-Core Processor", "fpu hypervisor vme");
    host.file("sys/class/dmi/id/sys_vendor", "QEMU\n");
    host.file("sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009)\n");
    let flat = |dev: Dev| Dev { link: None, ..dev }.cut();
    host.add("pci0000:00/0000:00:00.0", flat(dev(0x060000, 0x8086, 0)));
    host.add("pci0000:00/0000:00:05.0", flat(gpu()));
    host.add("pci0000:00/0000:00:06.0", flat(nic()));
    host.add("pci0000:00/0000:00:07.0", flat(gpu()));
    host.rdma("mlx5_0", "pci0000:00/0000:00:06.0");
    let live = host.clean();
    assert!(live.machine.flat);
    let text = draw::report(&live.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.starts_with(
        "host: QEMU Standard PC (Q35 + ICH9, 2009), AMD EPYC 9575F 64-Core Processor, 1 NUMA node in 1 socket\n\
         tree: a virtual machine's (DMI calls it \"QEMU\"), and flat: it does not tell how far devices are"
    ), "{text}");
    assert!(text.contains("  gpu0  VIRT push\n  gpu1  VIRT push\n"), "{text}");

    let file = Topology::from_toml(
        r#"
        version = 1
        [[root_complex]]
        name = "left"
        numa = 0
        [[device]]
        address = "ffff:01:00.0"
        parent = "left"
        role = "switch"
        acs = "direct"
        [[device]]
        address = "0000:00:05.0"
        parent = "ffff:01:00.0"
        speed = 32
        width = 16
        [[device]]
        address = "0000:00:06.0"
        parent = "ffff:01:00.0"
        speed = 16
        width = 16
        "#,
    )
    .unwrap();
    let t = file.on_host(live);
    let report = t.report(Evidence::ByDistance);
    let [first, second] = &report.gpu_nic[..] else { panic!("{report:?}") };
    assert_eq!((first.distance, first.advice.method), (Distance::SameSwitch, Method::Pull));
    let narrowest = first.pair.path.as_ref().unwrap().narrowest.unwrap();
    assert_eq!((narrowest.below, narrowest.state.gts), (at("0000:00:06.0"), 16.0));
    assert_eq!((second.distance, second.advice.method), (Distance::Unknown, Method::Push));
    assert_eq!(t.notes, ["0000:00:07.0: the file does not name it: its place is unknown"]);
    let text = draw::report(&report, draw::Style::default());
    assert!(text.contains("tree: from a file\n"), "{text}");
}

#[test]
fn the_file_of_another_machine_is_shown_as_it_is() {
    let file = || {
        Topology::from_toml(
            "version = 1
            root_complex = [{ name = 'r', numa = 1 }]
            device = [{ address = '0000:53:00.0', parent = 'r' }]
            gpu = [{ address = '0000:53:00.0' }]",
        )
    };
    let mut t = file().unwrap().on_host(Host::server(2).clean());
    assert_eq!(t.notes, ["nothing of the file is on this host: it is shown as the file has it"]);
    t.notes.clear();
    assert_eq!(t, file().unwrap());
    // If this host has a GPU of its own, the file describes this host, and wrongly.
    let t = file().unwrap().on_host(one_switch(0).clean());
    assert!(t.notes.contains(&"in the file, but not on this host: 0000:53:00.0".to_owned()), "{:?}", t.notes);
    assert_eq!(t.path(at("0000:18:00.0"), at("0000:53:00.0")).unwrap().distance, Distance::Unknown);
}

#[test]
fn what_the_driver_tells_of_mig_nvlinks_and_peers() {
    let host = one_switch(0);
    host.add(&format!("{UP}/0000:17:02.0"), downstream());
    host.add(&format!("{UP}/0000:17:02.0/0000:1a:00.0"), gpu());
    host.file(
        "proc/driver/nvidia/gpus/0000:18:00.0/information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 120\nGPU UUID: \t GPU-1\nBus Location: \t 0000:18:00.0\n",
    );
    host.file(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    );
    let mut t = host.clean();
    assert_eq!(t.machine.nvidia_driver.as_deref(), Some("580.65.06"));
    let (a, b) = (at("0000:18:00.0"), at("0000:1a:00.0"));
    let told = |own, other, index| Gpu {
        index: Some(index),
        nvlinks: vec![NvLink { to: NvLinkEnd::Switch, links: 18 }],
        peers: vec![Peer { to: other, access: true }],
        ..Gpu::new(own)
    };
    let mig = Some(Mig { instances: vec!["NVIDIA H200 MIG 3g.71gb".into(); 2] });
    t.learn_gpus(vec![Gpu { mig, ..told(a, b, 4) }, told(b, a, 5), Gpu::new(at("0000:99:00.0"))]);
    assert_eq!(t.notes, ["0000:99:00.0: the driver reports a GPU that the tree lacks"]);
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.contains("0000:18:00.0 gpu4 NVIDIA H200, MIG: 2 instances, 32 GT/s"), "{text}");
    assert!(text.contains("  gpu4  X             SW NV18 peer\n  gpu5  SW NV18 peer  X\n"), "{text}");
    assert_eq!((t.find("gpu5"), t.find("mlx5_0"), t.find("gpu0")), (Some(b), Some(at("0000:19:00.0")), None));
    // Peer access that fails in one direction counts as none.
    t.learn_gpus(vec![Gpu { peers: vec![Peer { to: a, access: false }], ..Gpu::new(b) }]);
    assert_eq!(t.peer_access(a, b), Some(false));
}

#[test]
fn software_nics_stand_on_their_network_device() {
    let host = one_switch(0);
    let nic_at = format!("{UP}/0000:17:01.0/0000:19:00.0");
    host.netdev("eth0", Some(&nic_at));
    host.netdev("lo", None);
    host.netdev("bond0", None);
    host.link("sys/devices/virtual/net/bond0/lower_eth0", &format!("../../../{nic_at}/net/eth0"));
    host.netdev("loop0", None);
    host.link("sys/devices/virtual/net/loop0/lower_loop0", "../loop0");
    for (rxe, netdev) in
        [("rxe0", "lo"), ("rxe1", "eth0"), ("rxe2", "bond0"), ("rxe3", "loop0"), ("rxe4", "gone")]
    {
        host.rxe(rxe, netdev);
    }
    let t = host.clean();
    let on = |name: &str| t.nics.iter().find(|n| n.name == name).unwrap().address;
    let places = ["rxe0", "rxe1", "rxe2", "rxe3", "rxe4"].map(on);
    let there = Some(at("0000:19:00.0"));
    assert_eq!(places, [None, there, there, None, None]);
    let pairs = t.pairs();
    for pair in pairs.iter().filter(|p| p.name.starts_with("rxe")) {
        let advice = advise(pair, Evidence::ByDistance);
        assert_eq!((&pair.far, advice.method), (&Far::SoftwareNic, Method::Push));
        assert!(advice.reason.starts_with("a software NIC reads host memory with the CPU"), "{advice:?}");
    }
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.contains("\nrxe0 (software on lo, no PCI function) 2.5 Gb/s Ethernet\n"), "{text}");
    assert!(text.contains("gpu0  SW pull  - push  SW push  SW push  - push  - push\n"), "{text}");
}

#[test]
fn functions_of_the_shim_driver_count_like_nics() {
    let host = one_switch(0);
    host.add("pci0000:26/0000:26:01.0", root_port());
    host.shim(3, "pci0000:26/0000:26:01.0/0000:27:00.0");
    // The module's own file has no device.
    host.file("sys/devices/virtual/pushgate/pushgate/dev", "240:0\n");
    host.link("sys/class/pushgate/pushgate", "../../devices/virtual/pushgate/pushgate");
    let t = host.clean();
    assert_eq!((t.shims.len(), t.shims[0].name.as_deref()), (1, Some("pushgate3")));
    let pairs = t.pairs();
    let pair = pairs.iter().find(|p| p.far == Far::Shim).unwrap();
    assert_eq!((pair.name.as_str(), pair.distance()), ("pushgate3", Distance::SameSocket));
    assert_eq!(advise(pair, Evidence::ByDistance).method, Method::Push);
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    assert!(text.contains("0000:27:00.0 pushgate3 window, 32 GT/s x16"), "{text}");
}

#[test]
fn a_narrow_link_is_found_and_an_idle_gpu_is_not_blamed() {
    let host = Host::server(1);
    host.add(RP, root_port());
    let idle = [("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16)];
    let bad = [("16.0 GT/s PCIe", 8), ("32.0 GT/s PCIe", 16)];
    host.add(&format!("{RP}/0000:16:00.0"), Dev { link: Some(idle), ..gpu() });
    host.add("pci0000:15/0000:15:02.0", root_port());
    host.add("pci0000:15/0000:15:02.0/0000:17:00.0", Dev { link: Some(bad), ..nic() });
    host.rdma("mlx5_0", "pci0000:15/0000:15:02.0/0000:17:00.0");
    let t = host.clean();
    let narrowest = only_pair(&t).path.unwrap().narrowest.unwrap();
    assert_eq!((narrowest.below, narrowest.state), (at("0000:17:00.0"), LinkState { gts: 16.0, width: 8 }));
    let found = t.findings();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|f| f.starts_with("0000:17:00.0: its link")), "{found:?}");
    let gpu_link = t.path(at("0000:16:00.0"), at("0000:15:01.0")).unwrap().narrowest.unwrap().state;
    assert_eq!(gpu_link.gts, 32.0);
}

#[test]
fn a_redirection_takes_the_uplink_with_it() {
    let host = one_switch(0x1d);
    fs::write(host.at(&format!("sys/devices/{UP}/current_link_width")), "8\n").unwrap();
    let narrowest = only_pair(&host.clean()).path.unwrap().narrowest.unwrap();
    assert_eq!((narrowest.below, narrowest.state.width), (at("0000:16:00.0"), 8));
    let host = one_switch(0);
    fs::write(host.at(&format!("sys/devices/{UP}/current_link_width")), "8\n").unwrap();
    assert_eq!(only_pair(&host.clean()).path.unwrap().narrowest.unwrap().state.width, 16);
}

#[test]
fn egress_control_leaves_it_unknown() {
    let pair = only_pair(&one_switch(1 << 5).clean());
    assert_eq!(pair.path.unwrap().acs, AcsOnWay::Unknown);
}

#[test]
fn payloads_that_do_not_fit_are_found() {
    let host = one_switch(0);
    let config = format!("sys/devices/{UP}/0000:17:01.0/0000:19:00.0/config");
    // The NIC is set to 128 bytes, though all functions could take 512.
    let mut bytes = fs::read(host.at(&config)).unwrap();
    bytes[0x48] &= !0xe0;
    fs::write(host.at(&config), &bytes).unwrap();
    let found = host.clean().findings();
    assert!(
        found[0].starts_with("0000:19:00.0: it sends 128 bytes a packet and could send 512")
            && found[1]
                .starts_with("0000:18:00.0: it sends 256 bytes a packet, and on the way to mlx5_0 128")
            && found.iter().all(|f| f.ends_with("boot with pci=pcie_bus_safe")),
        "{found:?}"
    );
    // A root port that takes no more is not the NIC's fault.
    let port = format!("sys/devices/{RP}/config");
    let mut bytes = fs::read(host.at(&port)).unwrap();
    bytes[0x44] = 0;
    fs::write(host.at(&port), &bytes).unwrap();
    assert_eq!(host.clean().findings().len(), 1);
}

#[test]
fn a_gpu_of_another_driver_is_warned_of() {
    let host = Host::server(1);
    host.add(RP, root_port());
    host.add(&format!("{RP}/0000:16:00.0"), Dev { driver: Some("vfio-pci"), ..gpu() });
    host.rxe("rxe0", "lo");
    let advice = advise(&only_pair(&host.clean()), Evidence::ByDistance);
    assert_eq!(advice.warnings, ["the GPU is bound to the driver vfio-pci, so CUDA can't use it here"]);
}

#[test]
fn without_a_nic_it_stays_local() {
    let host = Host::server(1);
    host.add(RP, root_port());
    host.add(&format!("{RP}/0000:16:00.0"), gpu());
    let report = host.clean().report(Evidence::ByDistance);
    assert_eq!(report.without_nic.as_ref().unwrap().method, Method::Local);
    let text = draw::report(&report, draw::Style::default());
    assert!(
        text.ends_with("\nadvice: local: this host has no RDMA NIC: messages to ranks of this host are local, those to other \
             hosts go over tcp\n"),
        "{text}"
    );
    let none = Host::new().clean();
    let text = draw::report(&none.report(Evidence::ByDistance), draw::Style::default());
    assert!(
        text.contains("no GPU, no RDMA NIC and no function of the shim driver among 0 PCI functions\n"),
        "{text}"
    );
}

/// A table of seconds, as if measured.
struct Table(Vec<(Method, f64)>);

impl Costs for Table {
    fn seconds(&self, _: &Pair, method: Method, _: u64) -> Option<f64> {
        self.0.iter().find(|(m, _)| *m == method).map(|(_, s)| *s)
    }
}

#[test]
fn figures_win_over_distances() {
    let pair = only_pair(&one_switch(0).clean());
    let measured = Table(vec![(Method::Pull, 9e-6), (Method::Bounce, 4e-6), (Method::Push, 5.5e-6)]);
    let advice = advise(&pair, Evidence::Probe { costs: &measured, bytes: 65536 });
    assert_eq!(advice.method, Method::Bounce);
    assert_eq!(
        advice.reason,
        "from a probe of this host the model predicts bounce 4.00 us, push 5.50 us, pull 9.00 us for 65536 bytes"
    );
    // A difference too small for such figures is no reason to deviate from what the distance says.
    let close = Table(vec![(Method::Pull, 4.3e-6), (Method::Bounce, 4e-6)]);
    assert_eq!(advise(&pair, Evidence::Model { costs: &close, bytes: 65536 }).method, Method::Pull);
    let silent = Table(vec![(Method::Push, f64::NAN)]);
    let advice = advise(&pair, Evidence::Model { costs: &silent, bytes: 1 });
    assert_eq!((advice.method, advice.basis), (Method::Pull, pushgate_topology::Basis::Distance));
}

#[test]
fn the_report_as_json_keeps_its_names() {
    let t = one_switch(0x1d).clean();
    let json = serde_json::to_value(t.report(Evidence::ByDistance)).unwrap();
    let at =
        |pointer: &str| json.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {json}")).clone();
    assert_eq!(at("/version"), 1);
    assert_eq!(at("/topology/functions/0000:18:00.0/parent/function"), "0000:17:00.0");
    assert_eq!(at("/topology/functions/0000:18:00.0/config/express/is/max_payload"), 256);
    assert_eq!(at("/topology/functions/0000:18:00.0/link/now/gts"), 32.0);
    assert_eq!(at("/topology/gpus/0/address"), "0000:18:00.0");
    assert_eq!(at("/topology/nics/0/ports/0/gigabits"), 400.0);
    assert_eq!(at("/gpu_nic/0/distance"), "same_switch");
    assert_eq!(at("/gpu_nic/0/path/acs/redirects/0"), "0000:17:00.0");
    assert_eq!(at("/gpu_nic/0/path/hops/1/root_complex"), "pci0000:15");
    assert_eq!(at("/gpu_nic/0/advice/method"), "push");
    assert_eq!(at("/gpu_nic/0/advice/basis"), "distance");
    assert_eq!(at("/gpu_nic/0/parameters/link/width"), 16);
    assert_eq!(at("/needs_root"), false);
}
