//! Trees that no kernel writes: each gives a note that names the file, never a panic, and the rest
//! stays whole.

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use common::*;
use proptest::prelude::*;
use pushgate_topology::{Evidence, Sysfs, Topology, draw};

const GPU: &str = "pci0000:15/0000:15:01.0/0000:16:00.0";
const NIC: &str = "pci0000:15/0000:15:02.0/0000:17:00.0";

/// A host with a GPU and a NIC, both in order.
fn host() -> Host {
    let host = Host::server(1);
    for place in [GPU, NIC] {
        host.add(place.rsplit_once('/').unwrap().0, root_port());
    }
    host.add(GPU, gpu());
    host.add(NIC, nic());
    host.rdma("mlx5_0", NIC);
    host
}

/// Draws and judges a whole topology.
fn exercise(t: &Topology) -> String {
    let report = t.report(Evidence::ByDistance);
    serde_json::to_string(&report).unwrap();
    let addresses: Vec<_> = t.functions.keys().copied().take(8).collect();
    for a in &addresses {
        for b in &addresses {
            draw::path(t, *a, *b).unwrap();
        }
    }
    draw::report(&report, draw::Style { ascii: true, all: true })
        + &draw::report(&report, draw::Style::default())
}

/// The topology that is read after `spoil` has changed the host; checks that a note contains
/// `expected`.
fn spoiled(spoil: impl Fn(&Host), expected: &str) -> Topology {
    let host = host();
    spoil(&host);
    let t = host.read();
    assert!(t.notes.iter().any(|n| n.contains(expected)), "{expected:?} is not in {:?}", t.notes);
    assert!(exercise(&t).contains(expected));
    t
}

fn replaced(name: &'static str, content: &'static [u8]) -> impl Fn(&Host) {
    move |host| host.file(&format!("sys/devices/{GPU}/{name}"), content)
}

#[test]
fn values_that_do_not_parse_are_named() {
    let base = "bus/pci/devices/0000:16:00.0";
    for (name, content, expected) in [
        ("class", &b"display\n"[..], "class: \"display\" is no hexadecimal number like 0x10de"),
        ("class", b"0x1030200\n", "class: \"0x1030200\" is no hexadecimal"),
        ("vendor", b"\xff\xfe\x00\x80", "vendor: holds no text"),
        ("numa_node", b"-7\n", "numa_node: \"-7\" is no NUMA node"),
        ("numa_node", b"99999999999999999999\n", "is no NUMA node"),
        ("current_link_speed", b"fast\n", "current_link_speed: \"fast\" is no speed like 32.0 GT/s"),
        ("max_link_width", b"900\n", "max_link_width: \"900\" is no width from 1 to 32"),
        ("device", b"0x12\x1b[2J34", "is no value of one line"),
    ] {
        let t = spoiled(replaced(name, content), expected);
        assert!(t.notes[0].starts_with(base), "{:?}", t.notes);
        assert_eq!(t.notes.len(), 1, "{:?}", t.notes);
        assert_eq!(t.functions.len(), 4);
    }
}

#[test]
fn missing_files_are_no_fault() {
    let host = host();
    for name in ["class", "vendor", "device", "numa_node", "config", "current_link_speed", "max_link_width"] {
        fs::remove_file(host.at(&format!("sys/devices/{NIC}/{name}"))).unwrap();
    }
    let t = host.clean();
    assert_eq!((t.functions.len(), t.nics[0].address), (4, Some(at("0000:17:00.0"))));
    exercise(&t);
}

#[test]
fn names_that_are_no_addresses_are_left_out() {
    let t = spoiled(
        |h| h.link("sys/bus/pci/devices/0000:1z:00.0", "../../../devices/pci0000:15"),
        "bus/pci/devices/0000:1z:00.0: \"0000:1z:00.0\" is no PCI address",
    );
    assert_eq!(t.functions.len(), 4);
    spoiled(
        |h| {
            let name = std::ffi::OsStr::from_bytes(b"0000:\xff\x00".split_at(6).0);
            symlink("x", h.at("sys/bus/pci/devices").join(name)).unwrap();
        },
        "is no name",
    );
    spoiled(|h| h.file("sys/class/infiniband/a\x1bb", ""), "class/infiniband: \"a\\u{1b}b\" is no name");
}

#[test]
fn links_that_lead_nowhere_or_round_are_left_out() {
    let name = "sys/bus/pci/devices/0000:40:00.0";
    let t = spoiled(|h| h.link(name, "0000:40:00.0"), "0000:40:00.0: leads nowhere: ");
    assert_eq!(t.functions.len(), 4);
    spoiled(|h| h.link(name, "../../../devices/none"), "0000:40:00.0: leads nowhere: No such file");
    spoiled(|h| h.link(name, "/"), "0000:40:00.0: leads out of ");
    spoiled(|h| h.link(name, "../../../devices"), "its real path names no root complex");
    spoiled(|h| h.link(name, &format!("../../../devices/{GPU}")), "its real path ends elsewhere");
    spoiled(|h| h.link("sys/class/infiniband/mlx5_9", "mlx5_9"), "class/infiniband/mlx5_9: leads nowhere: ");
}

#[test]
fn functions_above_themselves_have_no_place() {
    let host = host();
    // Each of the two lies below the other.
    for (place, name) in [
        ("pci0000:15/0000:30:00.0/0000:31:00.0", "0000:31:00.0"),
        ("pci0000:15/0000:31:00.0/0000:30:00.0", "0000:30:00.0"),
        ("pci0000:15/0000:39:00.0/0000:32:00.0", "0000:32:00.0"),
    ] {
        host.file(&format!("sys/devices/{place}/class"), "0x060400\n");
        host.link(&format!("sys/bus/pci/devices/{name}"), &format!("../../../devices/{place}"));
    }
    let t = host.read();
    let what = "what is above it is not listed, or is itself; its place is unknown";
    assert_eq!(t.notes, [format!("0000:30:00.0: {what}"), format!("0000:32:00.0: {what}")]);
    assert_eq!(t.path(at("0000:31:00.0"), at("0000:16:00.0")).unwrap().distance.short(), "?");
    exercise(&t);
}

#[test]
fn pipes_devices_and_files_that_are_too_long_do_not_hold_up_the_reader() {
    let long = vec![b'7'; 3 << 20];
    let file = format!("sys/devices/{GPU}/numa_node");
    let t = spoiled(
        |h| h.file(&file, &long),
        "numa_node: \"7777777777777777777777777777777777777777\"... is no value of one line",
    );
    assert_eq!(t.gpus.len(), 1);
    let put = |h: &Host, make: &dyn Fn(&std::path::Path)| {
        fs::remove_file(h.at(&file)).unwrap();
        make(&h.at(&file));
    };
    spoiled(|h| put(h, &|p| fs::create_dir(p).unwrap()), "numa_node: cannot be read: no regular file");
    // The pipe has no writer, so opening it would wait for ever.
    let pipe = |p: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(p).status().unwrap().success())
    };
    spoiled(|h| put(h, &pipe), "numa_node: cannot be read: no regular file");
    let host = host();
    host.file("proc/cpuinfo", vec![b'x'; 1 << 20]);
    exercise(&host.clean());
}

#[test]
fn unreadable_files_give_a_note_that_says_who_may_read() {
    let host = host();
    let file = host.at(&format!("sys/devices/{GPU}/config"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    let read = || {
        let t = host.read();
        assert!(fs::File::open(&file).is_err());
        assert!(t.notes[0].contains("config: cannot be read: Permission denied"), "{:?}", t.notes);
        assert!(t.notes[0].contains("run as root to read it"), "{:?}", t.notes);
        exercise(&t);
    };
    if !rustix::process::geteuid().is_root() {
        return read();
    }
    // Root can read the file all the same.
    assert!(host.read().notes.is_empty());
    std::thread::scope(|s| {
        let nobody = s.spawn(|| {
            // Only this thread's user changes, and the thread ends afterwards.
            let uid = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            read();
        });
        nobody.join().unwrap();
    });
}

#[test]
fn rdma_devices_of_noise() {
    spoiled(
        |h| h.file(&format!("sys/devices/{NIC}/infiniband/mlx5_0/ports/1/rate"), "very\n"),
        "ports/1/rate: \"very\" is no rate like 400 Gb/sec",
    );
    spoiled(
        |h| h.file(&format!("sys/devices/{NIC}/infiniband/mlx5_0/ports/x/rate"), ""),
        "ports/x: no port number",
    );
    spoiled(
        |h| {
            h.file("sys/devices/pci0000:15/0000:66:00.0/infiniband/mlx5_7/state", "");
            h.link("sys/devices/pci0000:15/0000:66:00.0/infiniband/mlx5_7/device", "../..");
            h.link("sys/class/infiniband/mlx5_7", "../../devices/pci0000:15/0000:66:00.0/infiniband/mlx5_7");
        },
        "class/infiniband/mlx5_7: its function 0000:66:00.0 is not listed",
    );
    // A name that would lead to another folder.
    let host = host();
    host.rxe("rxe0", "../../../../../../etc");
    let t = host.clean();
    assert_eq!(t.nics.iter().find(|n| n.name == "rxe0").unwrap().netdev, None);
}

#[test]
fn nothing_at_all() {
    let t = Sysfs::new("/nonexistent/sysfs").read();
    assert_eq!((t.functions.len(), t.notes.len()), (0, 0));
    exercise(&t);
    let host = Host::new();
    host.file("sys/bus/pci/other", "");
    fs::remove_dir_all(host.at("sys/bus/pci/devices")).unwrap();
    host.file("sys/bus/pci/devices", "a file");
    let t = host.read();
    assert!(t.notes[0].starts_with("bus/pci/devices: cannot be read: Not a directory"), "{:?}", t.notes);
}

#[test]
fn notes_do_not_grow_without_end() {
    let host = host();
    for i in 0..300 {
        host.link(&format!("sys/bus/pci/devices/none{i}"), "none");
    }
    let t = host.read();
    assert_eq!(t.notes.len(), 101);
    assert!(t.notes[100].ends_with("200 more notes of the same kind"), "{}", t.notes[100]);
}

/// Contents that files may have: what the kernel writes, near misses, noise.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let word = prop::sample::select(vec![
        "0x030200",
        "0x060400",
        "0x10de",
        "0x020000",
        "-1",
        "0",
        "1",
        "32.0 GT/s PCIe",
        "Unknown",
        "255",
        "16",
        "4: ACTIVE",
        "400 Gb/sec (4X NDR)",
        "",
        "\n",
        "identity",
        "0-3",
        "eth0",
        "..",
        "/",
        "inf GT/s",
        "\u{1b}[31m",
    ]);
    prop_oneof![
        3 => word.prop_map(|w| w.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..80),
        1 => prop::collection::vec(any::<u8>(), 4000..4200),
    ]
}

fn place() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => (0u8..3, 0u8..3).prop_map(|(bus, dev)| format!("0000:{bus:02x}:{dev:02x}.0")),
        1 => Just("virtio0".to_owned()),
        1 => Just("0000:zz:00.0".to_owned()),
    ];
    let root = prop::sample::select(vec!["pci0000:00", "pci0000:01", "pcix", "platform"]);
    (root, prop::collection::vec(part, 0..5)).prop_map(|(root, parts)| {
        parts.into_iter().fold(root.to_owned(), |path, part| format!("{path}/{part}"))
    })
}

/// Something put into a tree. What can't be put there is skipped.
#[derive(Clone, Debug)]
enum Put {
    File(String, Vec<u8>),
    Link(String, String),
}

fn put() -> impl Strategy<Value = Put> {
    let names = vec![
        "class",
        "vendor",
        "device",
        "numa_node",
        "config",
        "current_link_speed",
        "current_link_width",
        "max_link_speed",
        "max_link_width",
        "driver",
        "iommu_group",
        "infiniband/mlx5_0/ports/1/rate",
        "infiniband/mlx5_0/parent",
    ];
    let other = prop::sample::select(vec![
        "class/net/eth0/x",
        "class/net/eth0/lower_eth0",
        "class/infiniband/rxe0/parent",
        "class/infiniband/rxe0/ports/1/state",
        "class/pushgate/pushgate0/device",
        "devices/system/node/node0/cpulist",
        "devices/system/cpu/cpu0/topology/physical_package_id",
        "class/dmi/id/sys_vendor",
        "hypervisor/type",
        "bus/pci/devices/0000:00:00.0/class",
        "kernel/iommu_groups/1/type",
    ]);
    let target = prop_oneof![
        place().prop_map(|p| format!("../../../devices/{p}")),
        prop::sample::select(vec![
            "..",
            ".",
            "/",
            "../../bus/pci/drivers/pushgate",
            "../../1",
            "x",
            "../../../../.."
        ])
        .prop_map(str::to_owned),
    ];
    prop_oneof![
        4 => (place(), prop::sample::select(names), content()).prop_map(|(p, n, c)| Put::File(format!("devices/{p}/{n}"), c)),
        1 => (other.clone(), content()).prop_map(|(p, c)| Put::File(p.to_owned(), c)),
        3 => place().prop_map(|p| Put::Link(
            format!("bus/pci/devices/{}", p.rsplit('/').next().unwrap_or("x")), format!("../../../devices/{p}"))),
        1 => (other, target.clone()).prop_map(|(p, t)| Put::Link(p.to_owned(), t)),
        1 => (place(), target).prop_map(|(p, t)| Put::Link(format!("devices/{p}/device"), t)),
        1 => place().prop_map(|p| Put::Link("class/infiniband/mlx5_0".into(), format!("../../devices/{p}/infiniband/mlx5_0"))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_is_read(puts in prop::collection::vec(put(), 0..40), cpuinfo in content()) {
        let folder = Folder::new();
        for put in puts {
            let (Put::File(path, _) | Put::Link(path, _)) = &put;
            let full = folder.path().join("sys").join(path);
            // A link made earlier may lead out of the folder.
            let parent = full.parent().unwrap();
            if fs::create_dir_all(parent).is_err()
                || !fs::canonicalize(parent).is_ok_and(|p| p.starts_with(folder.path()))
            {
                continue;
            }
            let _ = match put {
                Put::File(_, content) if !full.is_symlink() => fs::write(full, content),
                Put::File(..) => Ok(()),
                Put::Link(_, target) => symlink(target, full),
            };
        }
        fs::create_dir_all(folder.path().join("proc")).unwrap();
        fs::write(folder.path().join("proc/cpuinfo"), cpuinfo).unwrap();
        let t = Sysfs::new(folder.path().join("sys")).with_proc(folder.path().join("proc")).read();
        let text = exercise(&t);
        prop_assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{:?}", text);
        // Every function has a root complex that is listed.
        for at in t.functions.keys() {
            prop_assert!(t.above(*at).1.is_some());
        }
        // Written to a file and read again, the tree is the same.
        let file = Topology::from_toml(&t.to_toml()).unwrap();
        prop_assert_eq!(file.to_toml(), t.to_toml());
    }
}
