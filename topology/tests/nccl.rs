//! Files of NCCL's in which a bus id is no identity, alone and on a host.

mod common;

use common::*;
use pushgate_topology::{Distance, Topology};

/// A virtual machine with all functions flat on one bus: a GPU and two NICs.
fn flat(nics: [&str; 2]) -> Topology {
    let host = Host::server(1);
    host.cpu("AMD EPYC 9575F 64-Core Processor", "fpu hypervisor vme");
    let flat = |dev: Dev| Dev { link: None, ..dev }.cut();
    host.add("pci0000:00/0000:00:00.0", flat(dev(0x060000, 0x8086, 0)));
    host.add("pci0000:00/0000:00:05.0", flat(gpu()));
    for (n, nic_at) in nics.iter().enumerate() {
        let place = format!("pci0000:00/{nic_at}");
        host.add(&place, flat(nic()));
        host.rdma(&format!("mlx5_{n}"), &place);
    }
    host.clean()
}

fn distance(t: &Topology, a: &str, b: &str) -> Distance {
    let place = |name| t.find(name).unwrap_or_else(|| panic!("{name} has no place: {:?}", t.notes));
    t.path(place(a), place(b)).unwrap().distance
}

fn names(t: &Topology) -> Vec<&str> {
    t.nics.iter().map(|nic| nic.name.as_str()).collect()
}

/// What is below a CPU of NUMA node 0.
fn cpu(inner: &str) -> Topology {
    Topology::from_nccl(&format!(r#"<system version="1"><cpu numaid="0">{inner}</cpu></system>"#)).unwrap()
}

const GPU: &str = r#"<pci busid="0000:00:05.0" class="0x030200" vendor="0x10de"><gpu dev="0"/></pci>"#;

#[test]
fn a_switch_with_the_bus_id_of_a_nic_elsewhere_keeps_its_place_and_its_gpu() {
    let gpu =
        |at: &str, n| format!(r#"<pci busid="{at}" class="0x030200" vendor="0x10de"><gpu dev="{n}"/></pci>"#);
    let nic = r#"<pci busid="0000:a1:00.0" class="0x020700"><nic><net name="mlx5_7" port="1"/></nic></pci>"#;
    let switch = |at: &str, below: String| format!(r#"<pci busid="{at}" class="0x060400">{below}</pci>"#);
    let first = switch("0000:a1:00.0", gpu("0000:b3:00.0", 0));
    let second = switch("0000:81:00.0", gpu("0000:93:00.0", 1) + nic);
    for text in [format!("{first}{second}"), format!("{second}{first}")] {
        let t = cpu(&text);
        assert_eq!(distance(&t, "gpu0", "mlx5_7"), Distance::SameSocket);
        assert_eq!(distance(&t, "gpu1", "mlx5_7"), Distance::SameSwitch);
        assert!(
            t.notes.iter().any(|n| n.starts_with("0000:a1:00.0: a switch has the bus id")),
            "{:?}",
            t.notes
        );
        let again = Topology::from_toml(&t.to_toml()).unwrap();
        assert_eq!(again.functions, t.functions);
    }
    // Two switches with one bus id.
    let t = cpu(&[
        switch("0000:a1:00.0", gpu("0000:b3:00.0", 0)),
        switch("0000:a1:00.0", gpu("0000:93:00.0", 1)),
    ]
    .concat());
    assert_eq!(distance(&t, "gpu0", "gpu1"), Distance::SameSocket);
    // Two devices: one of them can't be right.
    let t = cpu(&[gpu("0000:b3:00.0", 0), nic.replace("a1", "b3")].concat());
    assert!(
        t.find("mlx5_7").is_none() && t.notes.iter().any(|n| n.contains("two functions")),
        "{:?}",
        t.notes
    );
}

#[test]
fn two_ports_at_one_function_of_a_file_are_two_functions_of_the_host_at_one_place() {
    let nets = r#"<nic><net name="mlx5_0" port="1"/><net name="mlx5_1" port="2"/></nic>"#;
    let nic = format!(r#"<pci busid="0000:00:06.0" class="0x020000" vendor="0x15b3">{nets}</pci>"#);
    let t = cpu(&format!(r#"<pci busid="ffff:01:00.0" class="0x060400">{nic}{GPU}</pci>"#));
    let t = t.on_host(flat(["0000:00:06.0", "0000:00:06.1"]));
    for nic in ["mlx5_0", "mlx5_1"] {
        assert_eq!(distance(&t, "gpu0", nic), Distance::SameSwitch);
    }
    assert!(!t.notes.iter().any(|note| note.contains("unknown")), "{:?}", t.notes);
    // A second port that the file leaves out.
    let one = format!(
        r#"<pci busid="ffff:01:00.0">{}{GPU}</pci>"#,
        nic.replace(r#"<net name="mlx5_1" port="2"/>"#, "")
    );
    let t = cpu(&one).on_host(flat(["0000:00:06.0", "0000:00:06.1"]));
    assert_eq!(distance(&t, "gpu0", "mlx5_1"), Distance::SameSwitch);
}

#[test]
fn nics_that_nccl_joined_are_the_hosts_nics_where_the_file_has_them() {
    // Virtual functions, joined at the number of the host bridge.
    let bridge = r#"<pci busid="0000:00:00.0" class="0x020700" vendor="0x15b3"><nic><net name="mlx5_0" port="1"/><net name="mlx5_1" port="2"/></nic></pci>"#;
    let t = cpu(&format!("{bridge}{GPU}")).on_host(flat(["0000:00:06.0", "0000:00:07.0"]));
    for nic in ["mlx5_0", "mlx5_1"] {
        assert_eq!(distance(&t, "gpu0", nic), Distance::SameSocket);
    }
    assert!(!t.notes.iter().any(|note| note.contains("unknown")), "{:?}", t.notes);

    // One device out of two, below no function.
    let joined = r#"<nic><net name="mlx5_0+mlx5_1" speed="400000" port="1" gdr="1"/></nic>"#;
    let alone = cpu(&format!("{GPU}{joined}"));
    assert_eq!((names(&alone), alone.nics[0].ports[0].gigabits), (vec!["mlx5_0", "mlx5_1"], Some(200.0)));
    assert_eq!(distance(&alone, "gpu0", "mlx5_1"), Distance::SameSocket);
    let t = alone.on_host(flat(["0000:00:06.0", "0000:00:06.1"]));
    assert_eq!(names(&t), ["mlx5_0", "mlx5_1"]);
    for nic in ["mlx5_0", "mlx5_1"] {
        assert_eq!(distance(&t, "gpu0", nic), Distance::SameSocket);
    }
    assert!(t.functions.keys().all(|at| !at.to_string().starts_with("ffffffff")), "{:?}", t.functions.keys());

    // A NIC and the function by which it reaches GPUs directly.
    let direct = r#"<nic><net name="mlx5_0" port="1"/><net name="mlx5_0_dma" port="1"/></nic>"#;
    let t = cpu(&format!(r#"{GPU}<pci busid="0000:00:06.0" class="0x020700">{direct}</pci>"#));
    assert_eq!(names(&t), ["mlx5_0"]);
}

#[test]
fn infiniband_functions_without_names_are_nics_until_the_host_names_them() {
    let bare = r#"<pci busid="0000:00:06.0" class="0x020700" vendor="0x15b3"/>"#;
    let file = cpu(&format!(r#"<pci busid="ffff:01:00.0" class="0x060400">{bare}{GPU}</pci>"#));
    assert_eq!(names(&file), ["0000:00:06.0"]);
    assert_eq!(file.pairs().len(), 1);
    let t = file.on_host(flat(["0000:00:06.0", "0000:00:07.0"]));
    assert_eq!(names(&t), ["mlx5_0", "mlx5_1"]);
    assert_eq!(distance(&t, "gpu0", "mlx5_0"), Distance::SameSwitch);
    assert_eq!(distance(&t, "gpu0", "mlx5_1"), Distance::Unknown);
}

#[test]
fn a_gpu_of_another_vendor_is_none() {
    let t = cpu(&format!("{GPU}{}", GPU.replace("00:05.0", "00:08.0").replace("0x10de", "0x1002")));
    assert_eq!(t.gpus.len(), 1);
    assert!(
        t.notes.iter().any(|note| note.starts_with("0000:00:08.0: a GPU of another vendor")),
        "{:?}",
        t.notes
    );
    let unknown = GPU.replace(r#" vendor="0x10de""#, "");
    assert_eq!(cpu(&unknown).gpus.len(), 1);
    assert_eq!(cpu(&unknown.replace(r#"<gpu dev="0"/>"#, r#"<gpu dev="0" gcn="906"/>"#)).gpus.len(), 0);
}

#[test]
fn links_that_are_wider_at_a_device_than_at_its_port_are_emulated_and_bound_nothing() {
    let (port, up) = ("pci0000:00/0000:00:02.0", "pci0000:00/0000:00:02.0/0000:01:00.0");
    let emulated = [("2.5 GT/s PCIe", 1); 2];
    let host = |ports: Option<[(&'static str, u8); 2]>| {
        let host = Host::server(1);
        let of = |dev: Dev| Dev { link: ports.or(dev.link), ..dev };
        host.add(port, of(root_port()));
        host.add(up, of(upstream()));
        for (n, dev) in [gpu(), nic()].into_iter().enumerate() {
            host.add(&format!("{up}/0000:02:0{n}.0"), of(downstream()));
            host.add(&format!("{up}/0000:02:0{n}.0/0000:0{}:00.0", 3 + n), dev);
        }
        host.rdma("mlx5_0", &format!("{up}/0000:02:01.0/0000:04:00.0"));
        host
    };
    let path = |t: &Topology| t.path(at("0000:03:00.0"), at("0000:04:00.0")).unwrap();
    assert!(path(&host(None).clean()).narrowest.is_some());
    let t = host(Some(emulated)).read();
    let path = path(&t);
    assert_eq!((path.distance, path.narrowest), (Distance::SameSwitch, None));
    let note = t.notes.iter().find(|note| note.contains("emulated")).expect("a note");
    assert!(
        note.starts_with("pci0000:00: ") && note.contains("2.5 GT/s x1") && note.contains("32 GT/s x16"),
        "{note}"
    );
}
