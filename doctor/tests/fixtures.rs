//! Every check against trees of files and what the system would have said: as it should be, and each
//! way of being wrong. And files that make no sense, which must give a sentence and no panic.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use pushgate_doctor::readings::{Dcb, Plugin, Read};
use pushgate_doctor::{
    CHECKS, Finding, HugePages, Part, QueuePairs, Readings, Report, Roots, Status, Wants, Window, archive,
    judge, look, named, read,
};
use pushgate_door::addresses::{Held, Interface};
use pushgate_link_verbs::PortState;

/// A host on which all is well: a GPU and a RoCE NIC below bridges of their own, the module, limits.
const FILES: &[(&str, &str)] = &[
    ("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt intel_iommu=on"),
    (
        "proc/self/limits",
        "Limit  Soft  Hard  Units\nMax locked memory         unlimited            unlimited            bytes",
    ),
    ("proc/self/status", "Name:\tdoctor\nCapEff:\t0000000000000000\n"),
    ("proc/self/cgroup", "0::/user.slice/job\n"),
    ("proc/sys/kernel/osrelease", "6.1.0-56-amd64\n"),
    ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
    ("proc/kallsyms", "0000000000000000 T start\n0000000000000000 t ib_umem_dmabuf_get\t[ib_uverbs]\n"),
    (
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12\n",
    ),
    (
        "proc/driver/nvidia/params",
        "ResmanDebugLevel: 4294967295\nRegistryDwords: \"A=1;PeerMappingOverride=1\"\n",
    ),
    ("proc/driver/nvidia/capabilities/gpu0/mig/config", ""),
    ("proc/77/comm", "bash\n"),
    ("etc/systemd/system.conf", "[Manager]\n#DefaultLimitMEMLOCK=8M\n"),
    ("etc/systemd/system.conf.d/50.conf", "[Manager]\nDefaultLimitMEMLOCK=infinity\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
    ("sys/kernel/iommu_groups/1/type", "identity\n"),
    ("sys/module/pushgate/version", "0.2.0\n"),
    ("sys/module/nvidia_peermem/initstate", "live\n"),
    ("sys/module/rdma_ucm/initstate", "live\n"),
    ("dev/infiniband/rdma_cm", ""),
    ("sys/fs/cgroup/cgroup.controllers", "memory pids\n"),
    ("sys/fs/cgroup/user.slice/memory.max", "max\n"),
    ("sys/fs/cgroup/user.slice/job/memory.max", "17179869184\n"),
    ("sys/fs/cgroup/user.slice/job/memory.current", "1073741824\n"),
    ("sys/fs/cgroup/user.slice/job/pids.max", "4096\n"),
    ("sys/fs/cgroup/user.slice/job/pids.current", "100\n"),
    ("sys/fs/cgroup/user.slice/job/hugetlb.2MB.max", "max\n"),
    ("sys/fs/cgroup/user.slice/job/rdma.max", "mlx5_0 hca_handle=max hca_object=2000\n"),
    ("sys/fs/cgroup/user.slice/job/rdma.current", "mlx5_0 hca_handle=1 hca_object=20\n"),
    ("N/vendor", "0x15b3\n"),
    ("N/class", "0x020000\n"),
    ("N/net/eth9/mtu", "9000\n"),
    ("N/net/eth9/dev_port", "0\n"),
    ("N/net/eth9/ifindex", "7\n"),
    ("N/infiniband/mlx5_0/node_type", "1: CA\n"),
    ("N/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
    ("N/infiniband/mlx5_0/ports/1/phys_state", "5: LinkUp\n"),
    ("N/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
    ("N/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n"),
    ("N/infiniband/mlx5_0/ports/1/lid", "0x0\n"),
    ("N/infiniband/mlx5_0/ports/1/gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n"),
    ("N/infiniband/mlx5_0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a01:0203\n"),
    ("N/infiniband/mlx5_0/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
    ("N/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "IB/RoCE v1\n"),
    ("N/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "RoCE v2\n"),
    ("N/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth9\n"),
    ("N/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "eth9\n"),
    ("G/vendor", "0x10de\n"),
    ("G/class", "0x030200\n"),
];

/// Where N and G, the NIC and the GPU, are.
const SWITCH: &str = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0";
const NIC: &str = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0";
const GPU: &str = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0";
const PORT: &str = "N/infiniband/mlx5_0/ports/1";

struct Host {
    root: PathBuf,
    wants: Wants,
    /// What the system would say, put into what the files said.
    live: fn(&mut Readings),
}

impl Host {
    /// Without a file.
    fn empty() -> Host {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("doctor-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        // Some 70 files for each of 150 cases: in memory where that may be.
        let memory = Path::new("/dev/shm").join(&name);
        let root = match fs::create_dir(&memory) {
            Ok(()) => memory,
            Err(_) => Path::new(env!("CARGO_TARGET_TMPDIR")).join(name),
        };
        Host { root, wants: Wants { verbs: true, ..Wants::default() }, live: |_| {} }
    }

    fn new() -> Host {
        let host = Host::empty();
        FILES.iter().for_each(|(file, text)| host.write(file, text.as_bytes()));
        for priority in 0..8 {
            for point in ["roce_np", "roce_rp"] {
                host.write(&format!("N/net/eth9/ecn/{point}/enable/{priority}"), b"1\n");
            }
        }
        host.write("sys/devices/pci0000:00/0000:00:01.0/config", &config(0x1d));
        host.write("N/config", &express(0));
        for port in ["0000:02:00.0", "0000:02:01.0"] {
            host.write(&format!("{SWITCH}/{port}/config"), &config(0x1));
        }
        let link = |from: &str, to: &str| {
            let from = host.root.join(from);
            fs::create_dir_all(from.parent().unwrap()).unwrap();
            symlink(host.root.join(to), from).unwrap();
        };
        link("sys/class/infiniband/mlx5_0", &format!("{NIC}/infiniband/mlx5_0"));
        link(&format!("{NIC}/infiniband/mlx5_0/device"), NIC);
        link("sys/class/net/eth9", &format!("{NIC}/net/eth9"));
        for (function, folder) in [
            ("0000:00:01.0", "sys/devices/pci0000:00/0000:00:01.0"),
            ("0000:01:00.0", SWITCH),
            ("0000:02:00.0", &format!("{SWITCH}/0000:02:00.0")),
            ("0000:02:01.0", &format!("{SWITCH}/0000:02:01.0")),
            ("0000:03:00.0", NIC),
            ("0000:04:00.0", GPU),
        ] {
            link(&format!("sys/bus/pci/devices/{function}"), folder);
            if [NIC, GPU].contains(&folder) {
                link(&format!("{folder}/iommu_group"), "sys/kernel/iommu_groups/1");
            }
        }
        host
    }

    fn path(&self, file: &str) -> PathBuf {
        let full = match file.split_once('/') {
            Some(("N", rest)) => format!("{NIC}/{rest}"),
            Some(("G", rest)) => format!("{GPU}/{rest}"),
            _ => file.to_string(),
        };
        self.root.join(full)
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn remove(&self, file: &str) {
        let path = self.path(file);
        let gone = if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(path)
        } else {
            fs::remove_file(path)
        };
        gone.unwrap();
    }

    fn readings(&self) -> Readings {
        let mut readings = look(&CHECKS.iter().collect::<Vec<_>>(), &self.roots(), self.wants.clone());
        said(&mut readings);
        (self.live)(&mut readings);
        readings
    }

    fn roots(&self) -> Roots {
        Roots::below(&self.root)
    }

    fn report(&self) -> Report {
        judge(&CHECKS.iter().collect::<Vec<_>>(), &self.readings())
    }

    /// What the checks say of an archive of this host, once it is unpacked elsewhere; and the archive.
    fn archived(&self) -> (Report, Vec<u8>) {
        let mut bytes = Vec::new();
        let files = archive::write(&mut bytes, &self.roots(), &self.readings(), &hidden).unwrap();
        assert!(files > 1);
        let elsewhere = Host::empty();
        tar::Archive::new(&*bytes).unpack(&elsewhere.root).unwrap();
        let roots = Roots::kept(&elsewhere.root.join(archive::FOLDER)).unwrap();
        let wants = roots.answers.as_ref().unwrap().wants().clone();
        (pushgate_doctor::run(&CHECKS.iter().collect::<Vec<_>>(), &roots, wants), bytes)
    }
}

/// What the command takes out of sentences, as far as these tests have it.
fn hidden(text: &str) -> String {
    text.replace("node17", "(host)")
}

/// A finding without what differs between a host and its archive: addresses, and names of control groups.
fn plain(finding: &Finding) -> Finding {
    let words = |text: &str| {
        let word = |word: &str| {
            let bare = word.trim_matches(['(', ')', ',', ':', ';']);
            let ip = bare.split('%').next().unwrap_or_default();
            if ip.parse::<IpAddr>().is_ok() { word.replace(bare, "ADDRESS") } else { word.to_owned() }
        };
        let text = text.split(' ').map(word).collect::<Vec<_>>().join(" ");
        let groups = text.replace("user.slice/job", "group1/group2").replace("user.slice/", "group1/");
        groups.replace("memory/job", "memory/group1")
    };
    Finding { reading: words(&finding.reading), ..finding.clone() }
}

/// The checks say the same of a host and of its archive.
#[track_caller]
fn is_kept(host: &Host, what: &str) {
    let plain = |report: &Report| report.findings.iter().map(plain).collect::<Vec<_>>();
    let (kept, _) = host.archived();
    let (here, kept) = (plain(&host.report()), plain(&kept));
    for (here, kept) in here.iter().zip(&kept) {
        assert_eq!(here, kept, "{what}");
    }
    assert_eq!(here.len(), kept.len(), "{what}");
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Configuration space with ACS at 0x148 and this control register.
fn config(control: u16) -> Vec<u8> {
    let mut bytes = vec![0u8; 4096];
    bytes[0x100..0x104].copy_from_slice(&[1, 0, 0x81, 0x14]);
    bytes[0x148..0x14c].copy_from_slice(&[0xd, 0, 1, 0]);
    bytes[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
    bytes
}

/// Configuration space of the NIC, with PCI Express at 0x60 and this Device Control.
fn express(control: u16) -> Vec<u8> {
    let mut bytes = vec![0u8; 4096];
    bytes[..4].copy_from_slice(&[0xb3, 0x15, 0x1d, 0x10]);
    (bytes[0x6], bytes[0x34]) = (1 << 4, 0x60);
    bytes[0x60..0x64].copy_from_slice(&[0x10, 0, 2, 0]);
    bytes[0x68..0x6a].copy_from_slice(&control.to_le_bytes());
    bytes
}

/// The NIC has ATS, on or off, and this is the ACS control of the root port.
fn ats(h: &mut Host, on: bool, acs: u16) {
    let mut bytes = express(0);
    bytes[0x100..0x108].copy_from_slice(&[0xf, 0, 1, 0, 0, 0, 0, if on { 0x80 } else { 0 }]);
    h.write("N/config", &bytes);
    h.write("sys/devices/pci0000:00/0000:00:01.0/config", &config(acs));
}

/// The port is a virtual function's on InfiniBand.
fn without_lid(h: &mut Host) {
    infiniband(h);
    h.live = |r| {
        let Read::Is(devices) = &mut r.rdma else { return };
        for port in devices.iter_mut().flat_map(|device| &mut device.ports) {
            if let Read::Is(state) = &mut port.verbs {
                state.global = true;
            }
        }
    };
}

/// An administrator has set what rdma_cm gives packets of RoCE.
fn tos(h: &mut Host, tos: &str) {
    h.write("sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", tos.as_bytes());
}

/// The NIC may mark its packets relaxed-ordered.
fn relaxed(h: &mut Host) {
    h.write("N/config", &express(1 << 4));
}

fn nic(r: &mut Readings) -> &mut pushgate_doctor::readings::PciFunction {
    r.pci.iter_mut().find(|function| function.what == "mlx5_0").expect("the NIC")
}

/// What libibverbs, netlink, the module and NCCL say of that host.
fn said(r: &mut Readings) {
    if let Read::Is(devices) = &mut r.rdma {
        for port in devices.iter_mut().flat_map(|d| &mut d.ports) {
            port.verbs = Read::Is(PortState {
                active: true,
                mtu: 4096,
                max_mtu: 4096,
                lid: 0,
                ethernet: true,
                global: false,
                message: 1 << 30,
                in_order: false,
            });
        }
    }
    for dev in r.netdevs.values_mut() {
        dev.addresses = Read::Is(vec!["fe80::ff:fe00:1".parse().unwrap(), "10.1.2.3".parse().unwrap()]);
        dev.dcb = Read::Is(Dcb { pfc: Some(0b1001), prio_tc: Some([0; 8]), apps: vec![(5, 3, 26)] });
    }
    r.module.devices =
        vec![("/dev/pushgate".into(), Ok((1, false))), ("/dev/pushgate0".into(), Ok((1, true)))];
    r.rdma_cm.library = Read::Is(());
    addresses_of_eth9(r, &["fe80::ff:fe00:1", "10.1.2.3", "fd00::9"]);
    r.host.readv = Read::Is(());
    r.host.memfd = Read::Is(());
    r.host.shm = Read::Is((8 << 30, 8 << 30));
    r.gpu.compute_modes = Read::Is(vec![0]);
    r.nccl.version = Read::Is((22809, "libnccl.so.2".into()));
    r.nccl.plugin_variable = Some("pushgate".into());
    r.nccl.ref_count = Some("1".into());
    r.nccl.plugin = Read::Is(Plugin {
        file: "libnccl-net-pushgate.so".into(),
        name: "pushgate".into(),
        tables: vec![12, 11, 10, 9, 8],
    });
}

/// The interfaces are the loopback device and one with these addresses.
fn addresses_of_eth9(r: &mut Readings, addresses: &[&str]) {
    let interface = |index, name: &str, addresses: &[&str]| Interface {
        index,
        name: name.into(),
        up: true,
        loopback: name == "lo",
        addresses: addresses
            .iter()
            .map(|ip| Held {
                ip: ip.parse().unwrap(),
                prefix: 24,
                usable: true,
                passing: false,
                routed: false,
            })
            .collect(),
    };
    let all = vec![interface(1, "lo", &["127.0.0.1", "::1"]), interface(2, "eth9", addresses)];
    r.host.interfaces = Read::Is(all);
}

/// Nor has the loopback device an address.
fn no_address_at_all(r: &mut Readings) {
    addresses_of_eth9(r, &[]);
    let Read::Is(all) = &mut r.host.interfaces else { panic!("no interfaces") };
    all.iter_mut().for_each(|interface| interface.addresses.clear());
}

struct Case {
    check: &'static str,
    status: Status,
    /// What the reading or the remedy says.
    says: &'static str,
    change: fn(&mut Host),
}

fn port(r: &mut Readings) -> &mut pushgate_doctor::readings::RdmaPort {
    let Read::Is(devices) = &mut r.rdma else { panic!("no devices") };
    &mut devices[0].ports[0]
}

fn dev(r: &mut Readings) -> &mut pushgate_doctor::readings::Netdev {
    r.netdevs.get_mut("eth9").expect("the interface")
}

fn no_rdma(h: &mut Host) {
    h.wants.verbs = false;
    h.remove("sys/class/infiniband");
}

fn no_gpu(h: &mut Host) {
    h.remove("proc/driver/nvidia");
    h.write("G/vendor", b"0x1002\n");
}

fn infiniband(h: &mut Host) {
    h.write(&format!("{PORT}/link_layer"), b"InfiniBand\n");
    for (place, key) in [(0, "0xffff"), (1, "0x8001"), (2, "0x0002"), (3, "0x0000")] {
        h.write(&format!("{PORT}/pkeys/{place}"), format!("{key}\n").as_bytes());
    }
}

/// An InfiniBand port without an interface of IPoIB: eth9 is another device's, as of a network for management alone.
fn without_ipoib(h: &mut Host) {
    infiniband(h);
    h.write(&format!("{PORT}/lid"), b"0x7\n");
    h.remove(&format!("{PORT}/gids"));
    h.remove(&format!("{PORT}/gid_attrs"));
    h.write(&format!("{PORT}/gids/0"), b"fe80:0000:0000:0000:0002:c903:0012:ab35\n");
    h.write(&format!("{PORT}/gid_attrs/types/0"), b"IB/RoCE v1\n");
    h.remove("N/net");
}

/// An iWARP device: its one GID is the hardware address of its interface.
fn iwarp(h: &mut Host) {
    h.write("N/infiniband/mlx5_0/node_type", b"4: RNIC\n");
    h.remove(&format!("{PORT}/gids"));
    h.remove(&format!("{PORT}/gid_attrs"));
    h.write(&format!("{PORT}/gids/0"), b"0200:5e10:0001:0000:0000:0000:0000:0000\n");
    h.write("N/net/eth9/address", b"02:00:5e:10:00:01\n");
}

fn limits(h: &mut Host, soft: &str) {
    h.write("proc/self/limits", format!("Max locked memory  {soft}  unlimited  bytes\n").as_bytes());
}

macro_rules! cases {
    ($($check:literal $status:ident $says:literal $change:expr;)+) => {
        const CASES: &[Case] = &[$(Case {
            check: $check, status: Status::$status, says: $says, change: $change,
        },)+];
    };
}

cases! {
    "settings" Passed "defaults" |_| {};
    "settings" Failed "slots is 3" |h| h.wants.settings = Err("slots is 3".into());

    "tcp-address" Passed "others connect to this host at 10.1.2.3 (eth9), fd00::9 (eth9)" |_| {};
    "tcp-address" Passed "at fe80::ff:fe00:1%eth9" |h| h.live = |r| addresses_of_eth9(r, &["fe80::ff:fe00:1"]);
    "tcp-address" Passed "others connect to this host at 10.1.2.3 (eth9)" without_ipoib;
    "tcp-address" Failed "InfiniBand too: lo has no address, eth9 has no address; set PUSHGATE_HOST" |h| {
        without_ipoib(h);
        h.live = no_address_at_all;
    };
    "tcp-address" Failed "eth9 has no address; set PUSHGATE_HOST" |h| h.live = |r| addresses_of_eth9(r, &[]);
    "tcp-address" Failed "127.0.0.1 (lo), ::1 (lo), which no other host reaches" |h| {
        h.wants.verbs = false;
        h.wants.qp = QueuePairs::Tcp;
        h.live = |r| addresses_of_eth9(r, &[]);
    };
    "tcp-address" Warned "to ranks of this host alone" |h| {
        h.wants.verbs = false;
        h.wants.qp = QueuePairs::Auto;
        h.live = |r| addresses_of_eth9(r, &[]);
    };
    "tcp-address" Failed "no interface has that address" |h| h.wants.host = Some("10.7.7.7".into());
    "tcp-address" Warned "netlink refuses" |h| {
        h.live = |r| r.host.interfaces = Read::Unreadable("netlink refuses: no".into());
    };
    "tcp-address" NotApplicable "not looked at" |h| h.live = |r| r.host.interfaces = Read::Absent;
    "tcp-address" NotApplicable "needs no address" |h| h.wants.qp = QueuePairs::Local;

    "rdma-devices" Passed "channel adapter on PCI" |_| {};
    "rdma-devices" Passed "channel adapter on PCI" |h| {
        // A sub-function: an auxiliary device below the function.
        let aux = h.path("N/mlx5_core.sf.4");
        fs::create_dir(&aux).unwrap();
        h.remove("N/infiniband/mlx5_0/device");
        symlink(aux, h.path("N/infiniband/mlx5_0/device")).unwrap();
    };
    "rdma-devices" Passed "channel adapter in software" |h| h.write("N/infiniband/mlx5_0/parent", b"eth9\n");
    "rdma-devices" NotApplicable "qp = local and qp = tcp need none" no_rdma;
    "rdma-devices" Failed "modprobe" |h| h.remove("sys/class/infiniband");
    "rdma-devices" Failed "this host has mlx5_0" |h| h.wants.devices = vec!["rxe7".into()];
    "rdma-devices" Passed "an iWARP device on PCI" iwarp;
    "rdma-devices" Passed "an iWARP device in software" |h| {
        iwarp(h);
        h.write("N/infiniband/mlx5_0/node_desc", b"Software iWARP stack\n");
    };
    "rdma-devices" Failed "EFA" |h| h.write("N/infiniband/mlx5_0/node_type", b"7: unspecified\n");
    "rdma-devices" Warned "EFA" |h| {
        // Nobody asked for RDMA.
        h.wants.verbs = false;
        h.write("N/infiniband/mlx5_0/node_type", b"7: unspecified\n");
    };
    "rdma-devices" Warned "another is" |h| {
        h.write("sys/class/infiniband/efa0/node_type", b"7: unspecified\n");
    };
    "rdma-devices" Warned "its kind is unknown" |h| h.remove("N/infiniband/mlx5_0/node_type");

    "rdma-choice" Passed "mlx5_0 is taken: RoCE v2, address 10.1.2.3, 100 Gb/s" |_| {};
    "rdma-choice" Passed "mlx5_0 is taken: iWARP, address 10.1.2.3, 100 Gb/s" iwarp;
    "rdma-choice" Passed "mlx5_0 is taken: InfiniBand, 100 Gb/s" without_ipoib;
    "rdma-choice" Passed "mlx5_0 is taken: InfiniBand" |h| {
        without_ipoib(h);
        h.write(&format!("{PORT}/lid"), b"0x0\n");
    };
    "rdma-choice" Warned "it has no address" |h| {
        without_ipoib(h);
        h.write(&format!("{PORT}/lid"), b"0x0\n");
        h.remove(&format!("{PORT}/gids"));
    };
    "rdma-choice" Warned "subnet manager" |h| {
        without_ipoib(h);
        h.write(&format!("{PORT}/lid"), b"0x0\n");
        h.remove(&format!("{PORT}/gids"));
    };
    "rdma-choice" Passed "irdma0 not: it has no such port" |h| {
        h.write("sys/class/infiniband/irdma0/node_type", b"4: RNIC\n");
    };
    "rdma-choice" NotApplicable "ib-dev names mlx5_0" |h| h.wants.devices = vec!["mlx5_0".into()];
    "rdma-choice" NotApplicable "no RDMA device" no_rdma;
    "rdma-choice" Warned "its only address reaches no further" |h| h.wants.gid_index = Some(0);
    "rdma-choice" Warned "it has no address" |h| {
        h.remove(&format!("{PORT}/gids/0"));
        h.remove(&format!("{PORT}/gids/1"));
    };
    "rdma-choice" NotApplicable "its port is down" |h| h.write(&format!("{PORT}/state"), b"1: DOWN\n");

    "rdma-cm" Passed "no device here needs it" |_| {};
    "rdma-cm" Passed "library are there; mlx5_0 connects by it alone" iwarp;
    "rdma-cm" Passed "the library was not asked" |h| h.live = |r| r.rdma_cm.library = Read::Absent;
    "rdma-cm" NotApplicable "no RDMA device" no_rdma;
    "rdma-cm" Warned "modprobe rdma_ucm" |h| h.remove("sys/module/rdma_ucm");
    "rdma-cm" Passed "module, device and library" |h| {
        // Built into the kernel.
        h.remove("sys/module/rdma_ucm");
        h.write("sys/class/misc/rdma_cm/dev", b"10:58\n");
    };
    "rdma-cm" Failed "modprobe rdma_ucm" |h| {
        iwarp(h);
        h.remove("sys/module/rdma_ucm");
    };
    "rdma-cm" Warned "install librdmacm1" |h| h.live = |r| r.rdma_cm.library = Read::Unreadable("no such file".into());
    "rdma-cm" Failed "install librdmacm1" |h| {
        iwarp(h);
        h.live = |r| r.rdma_cm.library = Read::Unreadable("no such file".into());
    };
    "rdma-cm" Failed "rdma_cm is not there" |h| {
        iwarp(h);
        h.remove("dev/infiniband/rdma_cm");
    };
    "rdma-cm" Failed "chmod 0666" |h| {
        iwarp(h);
        h.live = |r| r.rdma_cm.device = Read::Unreadable("this user may not read and write it".into());
    };
    "rdma-cm" Warned "modprobe rdma_ucm" |h| {
        // Nobody asked for RDMA.
        iwarp(h);
        h.wants.verbs = false;
        h.remove("sys/module/rdma_ucm");
    };

    "rdma-gid" NotApplicable "iWARP" iwarp;
    "rdma-pci-order" Passed "relaxed ordering is off" |_| {};
    "rdma-pci-order" Passed "only registrations that ask for it are relaxed, unless" relaxed;
    "rdma-pci-order" Passed "PCI_WR_ORDERING is per_mkey(0)" |h| {
        relaxed(h);
        h.live = |r| nic(r).write_ordering = Read::Is("per_mkey(0)".into());
    };
    "rdma-pci-order" Failed "mlxconfig -d 0000:03:00.0 set PCI_WR_ORDERING=per_mkey" |h| {
        relaxed(h);
        h.live = |r| nic(r).write_ordering = Read::Is("force_relax(1)".into());
    };
    "rdma-pci-order" Warned "a later write may reach memory before an earlier one" |h| {
        relaxed(h);
        h.wants.verbs = false;
        h.live = |r| nic(r).write_ordering = Read::Is("force_relax(1)".into());
    };
    "rdma-pci-order" NotApplicable "has not ended" |h| {
        relaxed(h);
        h.live = |r| nic(r).write_ordering = Read::Unreadable("mlxconfig has not ended".into());
    };
    "rdma-pci-order" NotApplicable "64 bytes of configuration space" |h| h.write("N/config", &express(0)[..64]);
    "rdma-pci-order" NotApplicable "no configuration space" |h| h.remove("N/config");
    "rdma-pci-order" NotApplicable "a device in software" |h| h.write("N/infiniband/mlx5_0/parent", b"eth9\n");
    "rdma-pci-order" NotApplicable "no RDMA device" no_rdma;

    "rdma-ats" Passed "it has no ATS" |_| {};
    "rdma-ats" Passed "ATS is off" |h| ats(h, false, 0x1d);
    "rdma-ats" Passed "no port above it redirects" |h| ats(h, true, 0x5d);
    "rdma-ats" Passed "no port above it redirects" |h| ats(h, true, 0x11);
    "rdma-ats" Warned "up to the root at 0000:00:01.0" |h| ats(h, true, 0x1d);
    "rdma-ats" NotApplicable "64 bytes of configuration space" |h| h.write("N/config", &express(0)[..64]);
    "rdma-ats" NotApplicable "a device in software" |h| h.write("N/infiniband/mlx5_0/parent", b"eth9\n");
    "rdma-ats" NotApplicable "no RDMA device" no_rdma;

    "rdma-grh" Passed "not asked for" infiniband;
    "rdma-grh" Passed "40 bytes a packet" without_lid;
    "rdma-grh" Failed "no GID to put into them" |h| {
        without_lid(h);
        h.remove(&format!("{PORT}/gids"));
    };
    "rdma-grh" NotApplicable "RoCE" |_| {};
    "rdma-grh" NotApplicable "iWARP" iwarp;
    "rdma-grh" NotApplicable "no RDMA device" no_rdma;

    "rdma-mtu" NotApplicable "iWARP" iwarp;
    "rdma-address" Passed "iWARP at fe80::ff:fe00:1, 10.1.2.3 of eth9" iwarp;
    "rdma-address" Failed "eth9 has no address" |h| {
        iwarp(h);
        h.live = |r| dev(r).addresses = Read::Is(vec![]);
    };
    "rdma-address" Warned "no interface with its hardware address" |h| {
        iwarp(h);
        h.remove("N/net/eth9/address");
        h.remove("N/net");
    };

    "rdma-verbs" Passed "1073741824 bytes" |_| {};
    "rdma-verbs" NotApplicable "not asked" |h| h.live = |r| port(r).verbs = Read::Absent;
    "rdma-verbs" NotApplicable "no RDMA device" no_rdma;
    "rdma-verbs" Failed "ibverbs-providers" |h| h.live = |r| port(r).verbs = Read::Unreadable("no library".into());

    "rdma-port" Passed "active, Ethernet" |_| {};
    "rdma-port" NotApplicable "no RDMA device" no_rdma;
    "rdma-port" Failed "ip link set dev eth9 up" |h| h.write(&format!("{PORT}/state"), b"1: DOWN\n");
    "rdma-port" Warned "ip link set dev eth9 up" |h| {
        h.wants.verbs = false;
        h.write(&format!("{PORT}/state"), b"1: DOWN\n");
    };
    "rdma-port" Failed "opensm" |h| {
        infiniband(h);
        h.write(&format!("{PORT}/state"), b"2: INIT\n");
        h.remove("N/net");
        h.remove(&format!("{PORT}/gids"));
    };
    // The interface of IPoIB comes up after the port.
    "rdma-port" Failed "opensm" |h| {
        infiniband(h);
        h.write(&format!("{PORT}/state"), b"2: INIT\n");
    };
    "rdma-port" Failed "ports are 1" |h| {
        h.wants.devices = vec!["mlx5_0".into()];
        h.wants.port = 2;
    };
    "rdma-port" Warned "link layer" |h| h.write(&format!("{PORT}/link_layer"), b"Unspecified\n");
    "rdma-port" Warned "does not say" |h| h.remove(&format!("{PORT}/state"));
    "rdma-port" Warned "another is active" |h| h.write("N/infiniband/mlx5_0/ports/2/state", b"1: DOWN\n");

    "rdma-gid" Passed "GID 1: 10.1.2.3 of eth9; entries: 2" |_| {};
    "rdma-gid" NotApplicable "not active" |h| h.write(&format!("{PORT}/state"), b"1: DOWN\n");
    "rdma-gid" Failed "dev eth9" |h| {
        h.remove(&format!("{PORT}/gids/0"));
        h.remove(&format!("{PORT}/gids/1"));
    };
    "rdma-gid" Passed "GID 0: fe80::2:c903:12:ab35; entries: 1" without_ipoib;
    "rdma-gid" Failed "gid-index is 2" |h| h.wants.gid_index = Some(2);
    "rdma-gid" Failed "subnet manager" |h| {
        infiniband(h);
        h.remove(&format!("{PORT}/gids"));
    };

    "rdma-pkey" NotApplicable "not InfiniBand" |_| {};
    "rdma-pkey" Passed "0xffff: a full member (all keys: 0xffff, 0x8001, 0x0002)" infiniband;
    "rdma-pkey" Passed "0x8001: a full member" |h| {
        infiniband(h);
        h.wants.pkey = Some(1);
    };
    "rdma-pkey" Warned "0x0002: a limited member" |h| {
        infiniband(h);
        h.wants.pkey = Some(0x8002);
    };
    "rdma-pkey" Warned "0x7fff: a limited member" |h| {
        infiniband(h);
        h.write(&format!("{PORT}/pkeys/0"), b"0x7fff\n");
    };
    "rdma-pkey" Failed "pkey is 0x8003, and the port has 0xffff" |h| {
        infiniband(h);
        h.wants.pkey = Some(0x8003);
    };
    "rdma-pkey" Failed "no partition key at the first place" |h| {
        infiniband(h);
        h.wants.verbs = true;
        h.write(&format!("{PORT}/pkeys/0"), b"0x0000\n");
    };

    "rdma-gid-type" Passed "RoCE v2" |_| {};
    "rdma-gid-type" NotApplicable "not Ethernet" infiniband;
    "rdma-gid-type" NotApplicable "no GID" |h| h.remove(&format!("{PORT}/gids"));
    "rdma-gid-type" Warned "RoCE v1 alone" |h| h.write(&format!("{PORT}/gid_attrs/types/1"), b"IB/RoCE v1\n");
    "rdma-gid-type" Warned "leave gid-index" |h| h.wants.gid_index = Some(0);

    "rdma-write-order" Passed "waits for its payload" |_| {};
    "rdma-write-order" Passed "at once" |h| h.live = |r| {
        if let Read::Is(devices) = &mut r.rdma
            && let Read::Is(state) = &mut devices[0].ports[0].verbs
        {
            state.in_order = true;
        }
    };
    "rdma-write-order" Warned "write-order is assume" |h| h.wants.assumes_order = true;
    "rdma-write-order" NotApplicable "see rdma-port" |h| h.write(&format!("{PORT}/state"), b"1: DOWN\n");

    "rdma-address" Passed "10.1.2.3 of eth9" |_| {};
    "rdma-address" NotApplicable "LID" infiniband;
    "rdma-address" NotApplicable "LID" without_ipoib;
    "rdma-address" Failed "it has no address" |h| h.live = |r| dev(r).addresses = Read::Is(vec![]);
    "rdma-address" Failed "it has 10.9.9.9" |h| {
        h.live = |r| dev(r).addresses = Read::Is(vec![IpAddr::from([10, 9, 9, 9])]);
    };
    "rdma-address" Warned "link-local" |h| h.wants.gid_index = Some(0);
    "rdma-address" Warned "netlink refuses" |h| {
        h.live = |r| dev(r).addresses = Read::Unreadable("netlink refuses: no".into());
    };
    "rdma-address" Warned "no interface" |h| h.remove("sys/class/net/eth9");

    "rdma-mtu" Passed "path MTU 4096, eth9 has 9000" |_| {};
    "rdma-mtu" NotApplicable "no RDMA device" no_rdma;
    "rdma-mtu" Warned "ip link set dev eth9 mtu 4200" |h| {
        h.write("N/net/eth9/mtu", b"1500\n");
        h.live = |r| if let Read::Is(v) = &mut port(r).verbs { v.mtu = 1024 };
    };
    "rdma-mtu" Warned "path MTU 1024, for eth9 has MTU 1500" |h| {
        h.write("N/net/eth9/mtu", b"1500\n");
        h.live = |r| port(r).verbs = Read::Absent;
    };
    "rdma-mtu" Warned "leaves room for 4096" |h| {
        h.live = |r| if let Read::Is(v) = &mut port(r).verbs { v.mtu = 1024 };
    };
    "rdma-mtu" Passed "the port's greatest" |h| {
        h.live = |r| if let Read::Is(v) = &mut port(r).verbs { (v.mtu, v.max_mtu) = (2048, 2048) };
    };
    "rdma-mtu" Warned "no number" |h| h.write("N/net/eth9/mtu", b"many\n");
    "rdma-mtu" Warned "not known" |h| h.remove("sys/class/net/eth9");
    "rdma-mtu" Warned "subnet manager" |h| {
        infiniband(h);
        h.live = |r| if let Read::Is(v) = &mut port(r).verbs { v.mtu = 256 };
    };

    "rdma-pfc" Passed "PFC on for priorities 0, 3; traffic-class 0 has priority 0" |_| {};
    "rdma-pfc" Passed "has priority 3" |h| h.wants.traffic_class = 106;
    "rdma-pfc" NotApplicable "credits" infiniband;
    "rdma-pfc" NotApplicable "software" |h| h.remove("N/infiniband/mlx5_0/device");
    "rdma-pfc" Warned "set traffic-class to 106" |h| {
        h.live = |r| if let Read::Is(d) = &mut dev(r).dcb { d.pfc = Some(8) };
    };
    "rdma-pfc" Warned "prio-pfc 0:on" |h| h.live = |r| if let Read::Is(d) = &mut dev(r).dcb { d.pfc = Some(0) };
    "rdma-pfc" Warned "can't be read: eth9's driver has no DCB" |h| h.live = |r| dev(r).dcb = Read::Absent;
    "rdma-pfc" Warned "can't be read: netlink" |h| h.live = |r| dev(r).dcb = Read::Unreadable("netlink".into());

    "rdma-ecn" Passed "reacts on 0, 1" |_| {};
    "rdma-ecn" NotApplicable "software" |h| h.remove("N/infiniband/mlx5_0/device");
    "rdma-ecn" Warned "roce_rp" |h| h.write("N/net/eth9/ecn/roce_rp/enable/0", b"0\n");
    "rdma-ecn" Warned "can't be read: eth9 has no folder ecn" |h| h.remove("N/net/eth9/ecn");
    "rdma-ecn" Warned "no number" |h| h.write("N/net/eth9/ecn/roce_np/enable/4", b"on\n");

    "rdma-traffic-class" Passed "DSCP 26, ECN bits 2, priority 3 (by the APP table)" |h| h.wants.traffic_class = 106;
    "rdma-traffic-class" NotApplicable "credits" infiniband;
    "rdma-traffic-class" Warned "add this one" |h| h.wants.traffic_class = 32;

    "rdma-tos" Passed "no default of rdma_cm is set" |_| {};
    "rdma-tos" Warned "set traffic-class to 106" |h| tos(h, "106\n");
    "rdma-tos" Passed "rdma_cm's default is 106, as traffic-class" |h| {
        tos(h, "106\n");
        h.wants.traffic_class = 106;
    };
    "rdma-tos" Warned "can't be read" |h| tos(h, "high\n");
    "rdma-tos" NotApplicable "its subnet manager chooses" infiniband;
    "rdma-tos" NotApplicable "iWARP" iwarp;
    "rdma-tos" NotApplicable "no RDMA device" no_rdma;

    "rdma-counters" Passed "none since the driver was loaded" |h| {
        h.write(&format!("{PORT}/counters/symbol_error"), b"0\n");
        h.write(&format!("{PORT}/counters/port_xmit_data"), b"77\n");
    };
    "rdma-counters" Warned "since the driver was loaded: symbol_error 3, out_of_sequence 12" |h| {
        h.write(&format!("{PORT}/counters/symbol_error"), b"3\n");
        h.write(&format!("{PORT}/hw_counters/out_of_sequence"), b"12\n");
        h.write(&format!("{PORT}/hw_counters/packet_seq_err"), b"garbage\n");
    };
    "rdma-counters" NotApplicable "no RDMA device" no_rdma;

    "memlock" Passed "no limit; systemd gives services infinity" |_| {};
    "memlock" Passed "no limit; systemd" |h| limits(h, "9223372036854775807");
    "memlock" Failed "not one fits" |h| limits(h, "65536");
    "memlock" Warned "2 fit" |h| limits(h, "8388608");
    "memlock" Passed "limit 8192 KiB" |h| {
        limits(h, "8388608");
        h.wants.queue_pairs = 2;
    };
    "cgroup" Warned "would be enough for 100000 queue pairs" |h| h.wants.queue_pairs = 100_000;
    "memlock" Passed "CAP_IPC_LOCK" |h| {
        limits(h, "65536");
        h.write("proc/self/status", b"CapEff:\t0000000000004000\n");
    };
    "memlock" Failed "not one fits" |h| {
        // Root of a user namespace.
        limits(h, "65536");
        h.write("proc/self/status", b"CapEff:\t000001ffffffffff\n");
        h.write("proc/self/uid_map", b"         0       1000          1\n");
    };
    "memlock" Passed "CAP_IPC_LOCK" |h| {
        limits(h, "65536");
        h.write("proc/self/status", b"CapEff:\t000001ffffffffff\n");
        h.write("proc/self/uid_map", b"         0          0 4294967295\n");
    };
    "memlock" Warned "not one fits" |h| {
        limits(h, "65536");
        h.wants.verbs = false;
    };
    "memlock" NotApplicable "no memory is registered" |h| {
        limits(h, "65536");
        no_rdma(h);
    };
    "memlock" Warned "does not tell" |h| h.write("proc/self/limits", b"Max locked memory none\n");

    "cgroup" Passed "15 GiB left" |_| {};
    "cgroup" Failed "memory.max" |h| h.write("sys/fs/cgroup/user.slice/job/memory.max", b"1073741900\n");
    "cgroup" Warned "memory.max" |h| h.write("sys/fs/cgroup/user.slice/job/memory.max", b"1140850688\n");
    "cgroup" Passed "256 MiB left" |h| {
        // All of it is used, most of that by the page cache.
        h.write("sys/fs/cgroup/user.slice/job/memory.max", b"1073741824\n");
        h.write("sys/fs/cgroup/user.slice/job/memory.stat", b"anon 1\nfile 3\ninactive_file 201326592\nactive_file 67108864\n");
    };
    "cgroup" Failed "pids.max" |h| h.write("sys/fs/cgroup/user.slice/job/pids.max", b"101\n");
    "cgroup" Warned "64 would be enough" |h| h.write("sys/fs/cgroup/user.slice/job/pids.max", b"120\n");
    "cgroup" Failed "hca_object" |h| {
        h.write("sys/fs/cgroup/user.slice/rdma.max", b"mlx5_0 hca_handle=max hca_object=3\n");
    };
    "cgroup" Warned "is no number" |h| h.write("sys/fs/cgroup/user.slice/job/memory.max", b"lots\n");
    "cgroup" NotApplicable "no control group" |h| h.remove("proc/self/cgroup");
    "cgroup" Failed "memory.max" |h| {
        // Version 1.
        h.write("proc/self/cgroup", b"4:memory:/job\n8:pids:/\n");
        h.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", b"1048576\n");
        h.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", b"1048576\n");
    };
    "cgroup" Failed "hugetlb.2MB.max" |h| {
        h.wants.huge_pages = HugePages::Require;
        h.write("sys/fs/cgroup/user.slice/job/hugetlb.2MB.max", b"0\n");
        h.write("sys/fs/cgroup/user.slice/job/hugetlb.2MB.current", b"0\n");
    };

    "huge-pages" Passed "500 of 512" |_| {};
    "huge-pages" Warned "normal pages work too" |h| {
        h.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"1\n");
    };
    "huge-pages" Failed "vm.nr_hugepages" |h| {
        h.wants.huge_pages = HugePages::Require;
        h.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"1\n");
    };
    "huge-pages" NotApplicable "0 of 0" |h| {
        h.wants.verbs = false;
        for file in ["nr_hugepages", "free_hugepages"] {
            h.write(&format!("sys/kernel/mm/hugepages/hugepages-2048kB/{file}"), b"0\n");
        }
    };
    "huge-pages" NotApplicable "never" |h| h.wants.huge_pages = HugePages::Never;
    "huge-pages" NotApplicable "no window" |h| h.wants.net_window_size = 1 << 20;
    "huge-pages" Warned "no number" |h| {
        h.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"-1\n");
    };

    "memfd" Passed "1024 KiB" |_| {};
    "memfd" NotApplicable "not tried" |h| h.live = |r| r.host.memfd = Read::Absent;
    "memfd" Failed "sandbox" |h| h.live = |r| r.host.memfd = Read::Unreadable("memfd_create".into());

    "shm" Passed "free" |_| {};
    "shm" Warned "--shm-size=1g" |h| h.live = |r| r.host.shm = Read::Is((64 << 20, 64 << 20));
    "shm" NotApplicable "no NVIDIA GPU" |h| {
        no_gpu(h);
        h.live = |r| r.host.shm = Read::Is((64 << 20, 64 << 20));
    };
    "shm" Warned "no /dev/shm" |h| h.live = |r| r.host.shm = Read::Absent;

    "process-vm-readv" Passed "ptrace_scope is 1" |_| {};
    "process-vm-readv" Passed "no Yama" |h| h.remove("proc/sys/kernel/yama");
    "process-vm-readv" Warned "ptrace_scope=1" |h| h.write("proc/sys/kernel/yama/ptrace_scope", b"2\n");
    "process-vm-readv" Passed "CAP_SYS_PTRACE" |h| {
        h.write("proc/sys/kernel/yama/ptrace_scope", b"2\n");
        h.write("proc/self/status", b"CapEff:\t0000000000080000\n");
    };
    "process-vm-readv" Warned "ptrace_scope is 3" |h| h.write("proc/sys/kernel/yama/ptrace_scope", b"3\n");
    "process-vm-readv" Warned "seccomp" |h| h.live = |r| r.host.readv = Read::Unreadable("refused".into());

    "module" Passed "0.2.0 is loaded" |_| {};
    "module" NotApplicable "not loaded" |h| h.remove("sys/module/pushgate");
    "module" Failed "modprobe pushgate" |h| {
        h.wants.window = Window::Staging;
        h.remove("sys/module/pushgate");
    };
    "module" Warned "this is" |h| h.write("sys/module/pushgate/version", b"0.0.9\n");
    "module" Warned "has no version" |h| h.remove("sys/module/pushgate/version");
    "module" Failed "group pushgate" |h| {
        h.wants.window = Window::Bar;
        h.live = |r| r.module.devices[1].1 = Err("Permission denied".into());
    };
    "module" Warned "group pushgate" |h| h.live = |r| r.module.devices[1].1 = Err("Permission denied".into());
    "module" Failed "speaks version 0" |h| {
        h.wants.window = Window::Staging;
        h.live = |r| r.module.devices[0].1 = Ok((0, false));
    };
    "module" Failed "no /dev/pushgate" |h| {
        h.wants.window = Window::Staging;
        h.live = |r| r.module.devices.clear();
    };
    "module" Failed "drivers_probe" |h| {
        h.wants.window = Window::Bar;
        h.live = |r| r.module.devices.truncate(1);
    };

    "gpu-driver" Passed "580.159.03" |_| {};
    "gpu-driver" NotApplicable "no NVIDIA GPU" no_gpu;
    "gpu-driver" Failed "no driver is loaded" |h| h.remove("proc/driver/nvidia");
    "gpu-driver" Failed "bound to vfio-pci, so CUDA" |h| {
        h.remove("proc/driver/nvidia");
        let driver = h.path("G/driver");
        let _ = fs::remove_file(&driver);
        symlink("../../../../bus/pci/drivers/vfio-pci", driver).unwrap();
    };
    "gpu-driver" Failed "branch 470" |h| {
        h.write("proc/driver/nvidia/version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue\n");
    };
    "gpu-driver" Warned "not known" |h| h.write("proc/driver/nvidia/version", b"NVRM\n");
    "gpu-driver" Warned "is empty" |h| h.write("proc/driver/nvidia/version", b"\n");

    "dma-buf" Passed "open modules" |_| {};
    "dma-buf" NotApplicable "no NVIDIA GPU" no_gpu;
    "dma-buf" NotApplicable "in software" |h| h.remove("N/infiniband/mlx5_0/device");
    "dma-buf" Warned "not the open kernel module" |h| {
        h.write("proc/driver/nvidia/version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.57.02  Tue\n");
    };
    "dma-buf" Warned "Linux 5.12 or later" |h| {
        h.write("proc/sys/kernel/osrelease", b"5.4.0-100-generic\n");
        h.write("proc/kallsyms", b"0000 T start\n");
    };
    "dma-buf" Warned "modprobe ib_uverbs" |h| h.write("proc/kallsyms", b"garbage\n\n \xff\n");
    "dma-buf" Warned "were not read" |h| h.remove("proc/kallsyms");

    "peermem" Passed "is loaded" |_| {};
    "peermem" NotApplicable "no NVIDIA GPU" no_gpu;
    "peermem" Passed "dma-buf serves the same purpose" |h| h.remove("sys/module/nvidia_peermem");
    "peermem" Warned "modprobe nvidia_peermem" |h| {
        h.remove("sys/module/nvidia_peermem");
        h.remove("proc/kallsyms");
    };

    "peer-mapping" Passed "is set" |h| h.wants.window = Window::Bar;
    "peer-mapping" NotApplicable "window is not bar" |_| {};
    "peer-mapping" Failed "NVreg_RegistryDwords" |h| {
        h.wants.window = Window::Bar;
        h.write("proc/driver/nvidia/params", b"RegistryDwords: \"PeerMappingOverride=0\"\n");
    };
    "peer-mapping" Passed "root needs none" |h| {
        h.wants.window = Window::Bar;
        h.write("proc/driver/nvidia/params", b"RegistryDwords: \"\"\n");
        h.write("proc/self/status", b"CapEff:\t000001ffffffffff\n");
    };
    "peer-mapping" Warned "params" |h| {
        h.wants.window = Window::Bar;
        h.remove("proc/driver/nvidia/params");
    };

    "mig" Passed "no GPU instance" |_| {};
    "mig" NotApplicable "no NVIDIA GPU" no_gpu;
    "mig" Warned "GPU instances: 1" |h| h.write("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", b"1\n");

    "copier" Passed "no GPU is in an exclusive" |_| {};
    "copier" NotApplicable "no NVIDIA GPU" no_gpu;
    "copier" NotApplicable "not asked" |h| h.live = |r| r.gpu.compute_modes = Read::Absent;
    "copier" Warned "GPU 0, 2: compute mode EXCLUSIVE_PROCESS" |h| h.live = |r| r.gpu.compute_modes = Read::Is(vec![3, 0, 3]);
    "copier" Warned "PROHIBITED" |h| h.live = |r| r.gpu.compute_modes = Read::Is(vec![2]);
    "copier" Warned "-d COMPUTE" |h| h.live = |r| r.gpu.compute_modes = Read::Unreadable("no library".into());

    "mps" Passed "no MPS" |_| {};
    "mps" NotApplicable "no NVIDIA GPU" no_gpu;
    "mps" Warned "process 78" |h| {
        h.write("proc/78/comm", b"nvidia-cuda-mps\n");
        h.write("proc/78/cmdline", b"nvidia-cuda-mps-control\0-d\0");
    };

    "iommu" Passed "identity (iommu=pt intel_iommu=on)" |_| {};
    "iommu" Passed "no IOMMU is on" |h| h.remove("sys/kernel/iommu_groups");
    "iommu" Warned "iommu=pt" |h| h.write("sys/kernel/iommu_groups/1/type", b"DMA-FQ\n");
    "iommu" NotApplicable "no GPU has a peer" |h| {
        no_gpu(h);
        h.write("sys/kernel/iommu_groups/1/type", b"DMA-FQ\n");
    };
    "iommu" Warned "iommu=pt" |h| {
        no_gpu(h);
        h.wants.window = Window::Bar;
        h.write("sys/kernel/iommu_groups/1/type", b"DMA-FQ\n");
    };
    "iommu" NotApplicable "no GPU and no RDMA" |h| {
        no_gpu(h);
        no_rdma(h);
    };

    "acs" Passed "in common: 1; no port" |_| {};
    "acs" NotApplicable "no GPU has a peer" no_gpu;
    "acs" NotApplicable "no GPU and no RDMA" |h| {
        no_gpu(h);
        no_rdma(h);
    };
    "acs" Warned "setpci -s 0000:02:01.0" |h| h.write(&format!("{SWITCH}/0000:02:01.0/config"), &config(0x1d));
    "acs" Warned "does not answer" |h| h.write(&format!("{SWITCH}/0000:02:00.0/config"), &[0xff; 4096]);
    "acs" Warned "64 bytes" |h| h.write(&format!("{SWITCH}/0000:02:00.0/config"), &[0; 64]);

    "nccl" Passed "NCCL 2.28.9" |_| {};
    "nccl" NotApplicable "no libnccl" |h| h.live = |r| r.nccl.version = Read::Absent;
    "nccl" Warned "2.20 or later" |h| h.live = |r| r.nccl.version = Read::Is((21805, "x".into()));
    "nccl" Warned "can't be loaded" |h| h.live = |r| r.nccl.version = Read::Unreadable("can't be loaded".into());

    "nccl-plugin" Passed "tables v12, v11" |_| {};
    "nccl-plugin" NotApplicable "not set" |h| h.live = |r| {
        r.nccl.plugin_variable = None;
        r.nccl.plugin = Read::Absent;
    };
    "nccl-plugin" NotApplicable "no plugin is wanted" |h| h.live = |r| {
        r.nccl.plugin_variable = Some("none".into());
        r.nccl.plugin = Read::Absent;
    };
    "nccl-plugin" Warned "NCCL_NET_PLUGIN=pushgate" |h| h.live = |r| r.nccl.plugin_variable = None;
    "nccl-plugin" Failed "no such library" |h| h.live = |r| r.nccl.plugin = Read::Absent;
    "nccl-plugin" Failed "no table" |h| h.live = |r| if let Read::Is(p) = &mut r.nccl.plugin { p.tables.clear() };
    "nccl-plugin" Warned "another one" |h| h.live = |r| if let Read::Is(p) = &mut r.nccl.plugin { p.name = "aws".into() };
    "nccl-plugin" Warned "NCCL_NET_PLUGIN_REF_COUNT=1" |h| h.live = |r| r.nccl.ref_count = None;
}

/// A sentence in each, and a remedy for what is wrong.
fn is_well_formed(finding: &Finding) -> bool {
    let wrong = finding.status >= Status::Warned;
    CHECKS.iter().any(|c| c.name == finding.check)
        && !finding.reading.is_empty()
        && finding.remedy.is_some() == wrong
        && finding.remedy.as_ref().is_none_or(|r| !r.is_empty())
}

#[test]
fn each_way_of_being_wrong_is_found_by_name() {
    for case in CASES {
        let mut host = Host::new();
        (case.change)(&mut host);
        let report = host.report();
        let of: Vec<_> = report.findings.iter().filter(|f| f.check == case.check).collect();
        let says = |f: &&&Finding| {
            f.status == case.status
                && (f.reading.contains(case.says) || f.remedy.as_ref().is_some_and(|r| r.contains(case.says)))
        };
        assert!(
            of.iter().any(|f| says(&f)),
            "{}: no {:?} with {:?} in {of:#?}",
            case.check,
            case.status,
            case.says
        );
        assert!(report.findings.iter().all(is_well_formed), "{:#?}", report.findings);
    }
}

#[test]
fn an_archive_has_the_findings_of_its_host() {
    is_kept(&Host::new(), "all is well");
    for case in CASES {
        let mut host = Host::new();
        (case.change)(&mut host);
        is_kept(&host, &format!("{} {:?} {:?}", case.check, case.status, case.says));
    }
}

#[test]
fn an_archive_holds_nothing_that_tells_its_host_from_others() {
    let mut host = Host::new();
    host.write(
        "proc/cmdline",
        b"root=UUID=1b2c3d4e-0000-1111-2222-333344445555 ip=10.9.8.7::node17 iommu=pt",
    );
    host.write("proc/self/status", b"Name:\tdoctor\nUid:\t1234\t1234\nCapEff:\t0000000000000000\n");
    host.write("proc/self/uid_map", b"         0       1234          1\n");
    host.write("N/infiniband/mlx5_0/node_guid", b"0c42:a103:0000:1234\n");
    host.write("N/net/eth9/address", b"0c:42:a1:00:12:34\n");
    host.write("etc/systemd/system.conf.d/node17.conf", b"# of node17\n[Manager]\nDefaultLimitMEMLOCK=8M\n");
    host.write("sys/fs/cgroup/user.slice/user-1234.slice/pids.max", b"100\n");
    host.write("sys/fs/cgroup/user.slice/user-1234.slice/pids.current", b"1\n");
    host.write("proc/self/cgroup", b"0::/user.slice/user-1234.slice\n");
    // A serial number: extended capability 3 (PCI Express, \"Device Serial Number\").
    let mut space = config(0x1);
    space[0x100..0x10c].copy_from_slice(&[3, 0, 0x81, 0x14, 0xde, 0xad, 0xbe, 0xef, 0x12, 0x34, 0x56, 0x78]);
    host.write(&format!("{SWITCH}/0000:02:01.0/config"), &space);
    host.live = |r| r.host.readv = Read::Unreadable("refused at node17".into());
    let (report, bytes) = host.archived();
    assert_eq!(report.findings.iter().find(|f| f.check == "acs").unwrap().status, Status::Passed);
    let secrets: [&[u8]; 12] = [
        b"node17",
        b"10.1.2.3",
        b"0a01:0203",
        b"10.9.8.7",
        b"ff:fe00",
        b"00ff:fe00",
        b"1234",
        b"1b2c3d4e",
        b"0c42",
        b"user.slice",
        b"\xde\xad\xbe\xef",
        b"bash",
    ];
    for secret in secrets {
        let found = bytes.windows(secret.len()).any(|window| window == secret);
        assert!(!found, "{}", String::from_utf8_lossy(secret));
    }
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("refused at (host)") && text.contains("198.18.0.") && text.contains("iommu=pt"));
}

#[test]
fn answers_that_make_no_sense_are_refused_with_the_file() {
    let host = Host::new();
    let folder = host.root.display();
    for (text, says) in [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{}", "missing field `format` at line 1 column 2"),
    ] {
        host.write("answers.json", text.as_bytes());
        let why = Roots::kept(&host.root).map(|_| ()).unwrap_err();
        assert_eq!(why, format!("{folder}/answers.json is no file of `pushgate doctor --archive`: {says}"));
    }
    host.remove("answers.json");
    assert!(Roots::kept(&host.root).unwrap().answers.is_none());
}

#[test]
fn every_check_has_a_case_of_each_end_that_it_can_come_to() {
    for check in CHECKS {
        let of = |status| CASES.iter().any(|c| c.check == check.name && c.status == status);
        assert!(of(Status::Passed), "{} never passes", check.name);
        assert!(of(Status::Warned) || of(Status::Failed), "{} finds nothing", check.name);
        // These two always have something to look at.
        let always = ["settings", "process-vm-readv"].contains(&check.name);
        assert!(of(Status::NotApplicable) != always, "{} and what does not apply", check.name);
    }
}

#[test]
fn a_host_that_is_right_has_nothing_to_say() {
    let report = Host::new().report();
    let wrong: Vec<_> = report.findings.iter().filter(|f| f.status >= Status::Warned).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(report.exit_code(), 0);
}

#[test]
fn files_that_make_no_sense_are_no_panic() {
    let files = FILES.iter().map(|(file, _)| *file);
    let more = ["N/net/eth9/ecn/roce_np/enable/3", "N/../config"];
    let long = vec![b'7'; 70_000];
    let garbage: [&[u8]; 8] = [
        b"",
        b"\n",
        b"\xff\xfe\x00",
        b"-1\n",
        b"99999999999999999999999\n",
        b": = ; \" \n:::\n=\n",
        b"0",
        &long,
    ];
    let host = Host::new();
    for file in files.chain(more) {
        let before = fs::read(host.path(file)).unwrap();
        for bytes in garbage {
            host.write(file, bytes);
            let report = host.report();
            assert!(report.findings.iter().all(is_well_formed), "{file}: {:#?}", report.findings);
            // An archive takes longer than a look: garbage that is no text, and garbage that is.
            if bytes.starts_with(b"\xff") || bytes.starts_with(b":") {
                is_kept(&host, file);
            }
        }
        // What can't be read at all, for root as well.
        host.remove(file);
        fs::create_dir(host.path(file)).unwrap();
        assert!(host.report().findings.iter().all(is_well_formed), "{file}");
        is_kept(&host, file);
        host.remove(file);
        assert!(host.report().findings.iter().all(is_well_formed), "{file}");
        is_kept(&host, file);
        host.write(file, &before);
    }
    // A host without any files.
    let nothing =
        read::read(&Roots::below(Path::new("/nonexistent")), Wants::default(), &[Part::Rdma, Part::Host]);
    assert!(judge(&CHECKS.iter().collect::<Vec<_>>(), &nothing).findings.iter().all(is_well_formed));
}

#[test]
fn this_host_is_looked_at_without_a_panic() {
    let all = named(&[]).unwrap();
    let report = pushgate_doctor::run(&all, &Roots::host(), Wants::default());
    assert!(report.findings.iter().all(is_well_formed), "{:#?}", report.findings);
    assert!(CHECKS.iter().all(|c| report.findings.iter().any(|f| f.check == c.name)));
    // The loopback calls are made for real: this process can read itself, wherever tests run.
    let readv = report.findings.iter().find(|f| f.check == "process-vm-readv").unwrap();
    assert!(!readv.reading.contains("not tried"), "{readv:?}");
}

#[test]
fn checks_are_named_and_unknown_names_refused() {
    let only = named(&["memlock".into(), "settings".into()]).unwrap();
    assert_eq!(
        only.iter().map(|c| c.name).collect::<Vec<_>>(),
        ["settings", "memlock"],
        "in their own order"
    );
    let error = named(&["memlok".into()]).map(|_| ()).unwrap_err();
    assert!(error.contains("memlok") && error.contains("memlock"));
    let mut names: Vec<_> = CHECKS.iter().map(|c| c.name).collect();
    names.dedup();
    assert_eq!(names.len(), CHECKS.len());
}
