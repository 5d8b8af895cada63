//! Builds a sysfs and a /proc in a folder, laid out as the kernel does: real folders below
//! `devices`, symbolic links from `bus` and `class`.

#![allow(dead_code)] // each suite uses its part

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use pushgate_topology::{Address, Sysfs, Topology};

/// A folder that is removed with its owner.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("pushgate-topology-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // In memory if possible: the suites make thousands of small files.
        let memory = PathBuf::from("/dev/shm");
        let path = if memory.is_dir() { memory } else { std::env::temp_dir() }.join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A function to be made.
#[derive(Clone)]
pub struct Dev {
    pub class: u32,
    pub vendor: u16,
    pub device: u16,
    pub numa: i32,
    pub driver: Option<&'static str>,
    /// Speed and width of the link, now and at best.
    pub link: Option<[(&'static str, u8); 2]>,
    pub config: Vec<u8>,
    pub iommu: Option<(u32, &'static str)>,
}

pub const GEN5: [(&str, u8); 2] = [("32.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16)];

pub const ROOT_PORT: u8 = 4;
pub const UPSTREAM: u8 = 5;
pub const DOWNSTREAM: u8 = 6;
pub const ENDPOINT: u8 = 0;

/// A whole configuration space with the PCI Express capability of such a port, and with ACS and
/// this control register if one is given.
pub fn config(port: u8, acs: Option<u16>) -> Vec<u8> {
    let mut b = vec![0u8; 4096];
    b[6] = 1 << 4;
    b[0x34] = 0x40;
    b[0x40..0x44].copy_from_slice(&[0x10, 0, 2 | port << 4, 0]);
    b[0x44] = 2;
    // MPS 256, MRRS 512, 8-bit tags, relaxed ordering.
    b[0x48..0x4a].copy_from_slice(&(1u16 << 5 | 2 << 12 | 1 << 8 | 1 << 4).to_le_bytes());
    if let Some(control) = acs {
        b[0x100..0x104].copy_from_slice(&(0xdu32 | 1 << 16).to_le_bytes());
        b[0x104..0x106].copy_from_slice(&0x5fu16.to_le_bytes());
        b[0x106..0x108].copy_from_slice(&control.to_le_bytes());
    }
    b
}

pub fn dev(class: u32, vendor: u16, port: u8) -> Dev {
    Dev {
        class,
        vendor,
        device: 0x1234,
        numa: 0,
        driver: None,
        link: Some(GEN5),
        config: config(port, None),
        iommu: None,
    }
}

pub fn root_port() -> Dev {
    Dev { driver: Some("pcieport"), ..dev(0x060400, 0x8086, ROOT_PORT) }
}

pub fn upstream() -> Dev {
    Dev { driver: Some("pcieport"), ..dev(0x060400, 0x1000, UPSTREAM) }
}

pub fn downstream() -> Dev {
    Dev { driver: Some("pcieport"), config: config(DOWNSTREAM, Some(0)), ..dev(0x060400, 0x1000, DOWNSTREAM) }
}

pub fn gpu() -> Dev {
    Dev { driver: Some("nvidia"), ..dev(0x030200, 0x10de, ENDPOINT) }
}

pub fn nic() -> Dev {
    Dev { driver: Some("mlx5_core"), ..dev(0x020000, 0x15b3, ENDPOINT) }
}

impl Dev {
    pub fn on(self, numa: i32) -> Self {
        Self { numa, ..self }
    }

    pub fn acs(self, control: u16) -> Self {
        Self { config: config(DOWNSTREAM, Some(control)), ..self }
    }

    /// Cuts the configuration space to what a user other than root can read.
    pub fn cut(mut self) -> Self {
        self.config.truncate(64);
        self
    }

    pub fn group(self, group: u32, kind: &'static str) -> Self {
        Self { iommu: Some((group, kind)), ..self }
    }
}

pub struct Host {
    folder: Folder,
}

impl Host {
    pub fn new() -> Self {
        let host = Self { folder: Folder::new() };
        for folder in ["sys/bus/pci/devices", "sys/class", "sys/devices", "proc"] {
            fs::create_dir_all(host.at(folder)).unwrap();
        }
        host
    }

    /// A server with this many NUMA nodes, each a socket of its own.
    pub fn server(nodes: u32) -> Self {
        let host = Self::new();
        host.cpu("Intel(R) Xeon(R) Platinum 8480C", "fpu vme");
        (0..nodes).for_each(|n| host.node(n, n));
        host
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    pub fn cpu(&self, model: &str, flags: &str) {
        self.file(
            "proc/cpuinfo",
            format!("processor\t: 0\nvendor_id\t: X\nmodel name\t: {model}\nflags\t\t: {flags}\n"),
        );
    }

    pub fn node(&self, number: u32, package: u32) {
        let cpu = number * 8;
        self.file(&format!("sys/devices/system/node/node{number}/cpulist"), format!("{cpu}-{}\n", cpu + 7));
        self.file(
            &format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
            format!("{package}\n"),
        );
    }

    /// Adds a function at a place like `pci0000:15/0000:15:01.0/...`.
    pub fn add(&self, place: &str, dev: Dev) {
        let name = place.rsplit('/').next().unwrap();
        let base = format!("sys/devices/{place}");
        let file = |name: &str, content: String| self.file(&format!("{base}/{name}"), content);
        file("class", format!("0x{:06x}\n", dev.class));
        file("vendor", format!("0x{:04x}\n", dev.vendor));
        file("device", format!("0x{:04x}\n", dev.device));
        file("subsystem_vendor", "0x1028\n".into());
        file("numa_node", format!("{}\n", dev.numa));
        self.file(&format!("{base}/config"), &dev.config);
        if let Some([now, best]) = dev.link {
            file("current_link_speed", format!("{}\n", now.0));
            file("current_link_width", format!("{}\n", now.1));
            file("max_link_speed", format!("{}\n", best.0));
            file("max_link_width", format!("{}\n", best.1));
        }
        let up = "../".repeat(place.split('/').count() + 1);
        if let Some(driver) = dev.driver {
            self.link(&format!("{base}/driver"), &format!("{up}bus/pci/drivers/{driver}"));
        }
        if let Some((group, kind)) = dev.iommu {
            self.link(&format!("{base}/iommu_group"), &format!("{up}kernel/iommu_groups/{group}"));
            self.file(&format!("sys/kernel/iommu_groups/{group}/type"), format!("{kind}\n"));
        }
        self.link(&format!("sys/bus/pci/devices/{name}"), &format!("../../../devices/{place}"));
    }

    /// Adds an RDMA NIC on a function that was added before.
    pub fn rdma(&self, name: &str, place: &str) {
        let base = format!("sys/devices/{place}/infiniband/{name}");
        self.file(&format!("{base}/ports/1/state"), "4: ACTIVE\n");
        self.file(&format!("{base}/ports/1/rate"), "400 Gb/sec (4X NDR)\n");
        self.file(&format!("{base}/ports/1/link_layer"), "InfiniBand\n");
        self.link(&format!("{base}/device"), &format!("../../../{}", place.rsplit('/').next().unwrap()));
        self.link(
            &format!("sys/class/infiniband/{name}"),
            &format!("../../devices/{place}/infiniband/{name}"),
        );
    }

    /// Adds a network device, on a function or without one.
    pub fn netdev(&self, name: &str, place: Option<&str>) {
        match place {
            Some(place) => {
                let base = format!("devices/{place}/net/{name}");
                self.link(
                    &format!("sys/{base}/device"),
                    &format!("../../../{}", place.rsplit('/').next().unwrap()),
                );
                self.link(&format!("sys/class/net/{name}"), &format!("../../{base}"));
            }
            None => {
                self.file(&format!("sys/devices/virtual/net/{name}/address"), "00:00:00:00:00:00\n");
                self.link(&format!("sys/class/net/{name}"), &format!("../../devices/virtual/net/{name}"));
            }
        }
    }

    /// Adds a soft-RoCE device on a network device.
    pub fn rxe(&self, name: &str, netdev: &str) {
        let base = format!("sys/devices/virtual/infiniband/{name}");
        self.file(&format!("{base}/parent"), format!("{netdev}\n"));
        self.file(&format!("{base}/ports/1/state"), "4: ACTIVE\n");
        self.file(&format!("{base}/ports/1/rate"), "2.5 Gb/sec (1X SDR)\n");
        self.file(&format!("{base}/ports/1/link_layer"), "Ethernet\n");
        self.link(
            &format!("sys/class/infiniband/{name}"),
            &format!("../../devices/virtual/infiniband/{name}"),
        );
    }

    /// Adds a function bound to the shim driver, with the entry of its device file.
    pub fn shim(&self, number: u32, place: &str) {
        self.add(place, Dev { driver: Some("pushgate"), ..dev(0x050000, 0x1af4, ENDPOINT) });
        let name = format!("pushgate{number}");
        let base = format!("devices/{place}/pushgate/{name}");
        self.link(&format!("sys/{base}/device"), &format!("../../../{}", place.rsplit('/').next().unwrap()));
        self.link(&format!("sys/class/pushgate/{name}"), &format!("../../{base}"));
    }

    pub fn read(&self) -> Topology {
        Sysfs::new(self.at("sys")).with_proc(self.at("proc")).read()
    }

    /// Reads the host and checks that nothing was wrong.
    pub fn clean(&self) -> Topology {
        let topology = self.read();
        assert_eq!(topology.notes, Vec::<String>::new());
        topology
    }
}

pub fn at(text: &str) -> Address {
    text.parse().unwrap()
}
