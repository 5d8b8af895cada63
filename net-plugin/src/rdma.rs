//! The RDMA devices of this process, as NCCL is told of them: described by sysfs, listed by [`crate::devices`], opened.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use pushgate::settings::{AutoOr, PluginSettings, QpKind};
use pushgate_door::netlink::addresses_of;
use pushgate_link_verbs::choice::{self, Choice, Distance, Wish};
use pushgate_link_verbs::{Device, SharedDomain, VerbsError};
use pushgate_topology::{Address, Sysfs, Topology};

use crate::devices::{self, Classes, HCA, Hca};
use crate::error::{Code, Failure, Result};
use crate::log;
use crate::props::{MAX_BYTES, Properties, pci_path};

/// An RDMA device that is open.
pub struct Rdma {
    pub device: Arc<Device>,
    /// The NUMA node to which it is attached, if the kernel knows.
    pub node: Option<u32>,
    /// The protection domain of the connections over the device.
    pub domain: Arc<SharedDomain>,
}

impl Rdma {
    /// The longest message of a queue pair.
    pub fn longest(&self) -> usize {
        MAX_BYTES.min(self.device.longest_message() as usize)
    }

    /// The device and its port, for people.
    pub fn describe(&self) -> String {
        format!("{} port {}", self.device.name(), self.device.port())
    }
}

/// Which of these devices of the sysfs at `sys` can stand in one list by their port, in the list's order. `addresses` gives the IP
/// addresses of a network interface.
fn listed(
    sys: &Path,
    names: &[String],
    (port, wish): (u8, &Wish),
    hca: Option<&Hca>,
    addresses: impl Fn(&str) -> Vec<IpAddr>,
) -> Classes {
    let all = names.iter().map(|name| choice::describe(sys, name, port, &addresses));
    let mut classes = Classes::of(&Choice::new(all, wish), hca);
    for class in &mut classes.classes {
        let mut devices: Vec<_> = class.drain(..).map(|name| (place(sys, &name), name)).collect();
        devices::in_order(&mut devices);
        class.extend(devices.into_iter().map(|(_, name)| name));
    }
    classes
}

/// The PCI function that a device is.
fn place(sys: &Path, name: &str) -> Option<Address> {
    let path = pci_path(&sys.join("class/infiniband").join(name).join("device"))?;
    path.file_name()?.to_str()?.parse().ok()
}

/// Opens the RDMA devices that the settings name, in their order; or else all that can stand in one list. The inner error: there is none.
pub fn open(settings: &PluginSettings) -> Result<std::result::Result<Vec<Rdma>, VerbsError>> {
    let (sys, port) = (Path::new("/sys"), settings.ib_port as u8);
    if settings.near_devices() {
        let allowed = "auto or names of devices in the NCCL plugin: NCCL takes those that are near each GPU";
        return Err(settings.refused("ib-dev", allowed).into());
    }
    let named = settings.rdma_devices();
    let hca = std::env::var(HCA).ok();
    let opened = if named.is_empty() {
        let hca = Hca::parse(hca.as_deref().unwrap_or_default(), port);
        let hca = hca.map_err(|why| Failure::new(Code::Usage, why))?;
        open_all(sys, settings, hca.as_ref())
    } else {
        if let Some(hca) = hca.filter(|hca| !hca.is_empty()) {
            log::init(&format!("{HCA}={hca} has no effect: PUSHGATE_IB_DEV names the devices"));
        }
        // A device that was asked for and can't be had is an error where nothing but RDMA may be used.
        open_each(named, port, settings.qp == QpKind::Verbs)
    };
    let all = match opened {
        Ok(all) => all,
        Err(e) => return Ok(Err(e)),
    };
    let host = Sysfs::host().read();
    let opened = all.into_iter().map(|device| Rdma {
        node: node_of(&host, device.name()),
        device,
        domain: Arc::default(),
    });
    Ok(Ok(opened.collect()))
}

/// Opens the best ports of this host that can stand in one list, and says why the others are not listed.
fn open_all(
    sys: &Path,
    settings: &PluginSettings,
    hca: Option<&Hca>,
) -> std::result::Result<Vec<Arc<Device>>, VerbsError> {
    let (port, wish) = (settings.ib_port as u8, pushgate::rdma::wish(settings));
    let found = Device::list()?;
    let Classes { classes, mut left_out } = listed(sys, &found, (port, &wish), hca, addresses_of);
    for class in classes {
        let mut opened = Vec::new();
        for name in class {
            match Device::open(&name, port) {
                Ok(device) => opened.push(device),
                Err(e) => left_out.push((name, e.to_string())),
            }
        }
        if !opened.is_empty() {
            let is_taken = |name: &str| opened.iter().any(|device| device.name() == name);
            for (name, why) in left_out.iter().filter(|(name, _)| !is_taken(name)) {
                log::init(&format!("RDMA device {name} is not used: {why}"));
            }
            return Ok(opened);
        }
    }
    match hca {
        // What is wrong with the best one.
        None => Device::choose(port, &wish, |_| Distance::default()).map(|device| vec![device]),
        Some(hca) => Err(VerbsError::NoDevice { name: Some(hca.to_string()), found }),
    }
}

/// Opens the devices of these names. `each`: one that can't be opened is an error though others can.
fn open_each(names: Vec<&str>, port: u8, each: bool) -> std::result::Result<Vec<Arc<Device>>, VerbsError> {
    let (mut opened, mut first) = (Vec::new(), None);
    for name in names {
        match Device::open(name, port) {
            Ok(device) => opened.push(device),
            Err(e) if each => return Err(e),
            Err(e) => {
                log::init(&format!("RDMA device {name} is not used: {e}"));
                first.get_or_insert(e);
            }
        }
    }
    match first {
        Some(e) if opened.is_empty() => Err(e),
        _ => Ok(opened),
    }
}

/// What NCCL is told of these devices.
pub fn properties(all: &[Rdma]) -> Vec<Properties> {
    let of = |rdma: &Rdma| {
        Properties::read(Path::new("/sys"), rdma.device.name(), rdma.device.port(), rdma.longest())
    };
    all.iter().map(of).collect()
}

/// The NUMA node of an RDMA device.
fn node_of(host: &Topology, name: &str) -> Option<u32> {
    let nic = host.nics.iter().find(|nic| nic.name == name)?;
    host.functions.get(&nic.address?)?.numa
}

/// The NUMA node on which memory of a connection lies: the setting's, or else the RDMA device's.
pub fn node(setting: AutoOr<usize>, device: Option<u32>) -> Option<u32> {
    match setting {
        AutoOr::Is(node) => Some(node as u32),
        AutoOr::None => None,
        AutoOr::Auto => device,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use crate::props::Network;

    use super::*;

    /// A sysfs as the kernel lays it out: real folders below `devices`, links from `class` and `bus`. Removed with its owner.
    struct Tree(PathBuf);

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    impl Tree {
        fn new(of: &str) -> Tree {
            let root = std::env::temp_dir().join(format!("pushgate-net-{of}-{}", std::process::id()));
            fs::create_dir_all(&root).unwrap();
            // As NCCL sees it, without links.
            Tree(fs::canonicalize(root).unwrap())
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// A PCI function at this path below `devices`; returns the path.
        fn function(&self, path: &str, class: &str, node: u32) -> String {
            let at = format!("devices/{path}");
            self.file(&format!("{at}/class"), class);
            self.file(&format!("{at}/vendor"), "0x15b3");
            self.file(&format!("{at}/numa_node"), &format!("{node}\n"));
            let link = self.0.join("bus/pci/devices").join(path.rsplit('/').next().unwrap());
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(self.0.join(&at), link).unwrap();
            at
        }

        /// An InfiniBand adapter whose port is up: the RDMA device `name` of a function.
        fn adapter(&self, function: &str, name: &str, guid: &str, gigabits: u32) {
            let at = format!("{function}/infiniband/{name}");
            for (file, text) in [
                ("node_type", "1: CA\n"),
                ("node_guid", "ffff:ffff:ffff:ffff\n"),
                ("sys_image_guid", guid),
                ("ports/1/state", "4: ACTIVE\n"),
                ("ports/1/link_layer", "InfiniBand\n"),
                ("ports/1/lid", "0x7\n"),
                ("ports/1/rate", &format!("{gigabits} Gb/sec (4X NDR)\n")),
            ] {
                self.file(&format!("{at}/{file}"), text);
            }
            symlink(self.0.join(function), self.0.join(&at).join("device")).unwrap();
            fs::create_dir_all(self.0.join("class/infiniband")).unwrap();
            symlink(self.0.join(&at), self.0.join("class/infiniband").join(name)).unwrap();
        }

        /// What NCCL is told of the devices of this tree.
        fn network(&self) -> Network {
            let names = choice::names(&self.0);
            let Classes { mut classes, .. } =
                listed(&self.0, &names, (1, &Wish::default()), None, |_| Vec::new());
            let told = |name: &String| Properties::read(&self.0, name, 1, MAX_BYTES);
            Network::of_devices(classes.remove(0).iter().map(told).collect())
        }
    }

    /// A node of eight GPUs, each with an adapter below its own switch, on two sockets. NCCL makes its tree of the folders above the
    /// path of each device: a GPU and an adapter are as near as the folders that their paths share are many.
    #[test]
    fn of_a_node_with_eight_gpus_and_eight_adapters_nccl_is_told_which_adapter_is_below_which_gpus_switch() {
        let tree = Tree::new("node");
        let mut gpus = Vec::new();
        for at in 0..8u32 {
            let (node, bus) = (at / 4, 0x10 + 0x10 * at);
            let port = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
            let switch = format!("{port}/0000:{:02x}:00.0", bus + 1);
            let slots = [0, 1].map(|slot| format!("{switch}/0000:{:02x}:{slot:02x}.0", bus + 2));
            for bridge in [&port, &switch, &slots[0], &slots[1]] {
                tree.function(bridge, "0x060400\n", node);
            }
            let gpu = tree.function(&format!("{}/0000:{:02x}:00.0", slots[0], bus + 3), "0x030200\n", node);
            let nic = tree.function(&format!("{}/0000:{:02x}:00.0", slots[1], bus + 4), "0x020700\n", node);
            // The kernel found them in another order.
            tree.adapter(&nic, &format!("mlx5_{}", 7 - at), &format!("98fe:1403:0012:ab{at:02x}\n"), 400);
            gpus.push((gpu, nic));
        }
        let network = tree.network();
        assert_eq!(network.len(), 8);
        let topology = Sysfs::new(&tree.0).read();
        for (at, (_, nic)) in gpus.iter().enumerate() {
            let p = network.get(at as i32).unwrap();
            let name = format!("mlx5_{}", 7 - at);
            assert_eq!(p.name.to_str().unwrap(), name, "in the order of the PCI addresses");
            assert_eq!(p.path().unwrap().to_str().unwrap(), tree.0.join(nic).to_str().unwrap());
            assert_eq!((p.guid, p.speed, p.port), (0x98fe_1403_0012_ab00 + at as u64, 400_000, 1));
            assert_eq!(node_of(&topology, &name), Some(at as u32 / 4));
        }
        let paths: Vec<_> = network.all().iter().map(|p| p.path().unwrap().to_str().unwrap()).collect();
        for (at, (gpu, _)) in gpus.iter().enumerate() {
            let gpu = tree.0.join(gpu);
            let shared =
                |path: &&str| gpu.iter().zip(Path::new(path).iter()).take_while(|(a, b)| a == b).count();
            let nearest = paths.iter().map(shared).enumerate().max_by_key(|(_, shared)| *shared).unwrap();
            // Down to the upstream port of the switch.
            assert_eq!(nearest, (at, gpu.iter().count() - 2), "GPU {at}");
            assert_eq!(paths.iter().filter(|path| shared(path) == nearest.1).count(), 1, "GPU {at}");
        }
        assert_eq!(network.compared(), "8 RDMA devices of 400000 Mbit/s");
    }

    #[test]
    fn ports_of_one_adapter_are_told_with_its_path_and_numbers_of_their_own_and_a_device_without_a_function_with_none()
     {
        let tree = Tree::new("ports");
        for (function, name) in [("00.0", "mlx5_0"), ("00.1", "mlx5_1")] {
            let at = tree.function(&format!("pci0000:17/0000:17:01.0/0000:18:{function}"), "0x020700\n", 0);
            tree.adapter(&at, name, "98fe:1403:0012:ab34\n", 200);
        }
        tree.adapter("devices/other", "rdma0", "0000:0000:0000:0000\n", 100);
        let network = tree.network();
        let adapter = tree.0.join("devices/pci0000:17/0000:17:01.0/0000:18:00.0");
        let told = |p: &Properties| {
            (p.name.to_str().unwrap(), p.path().map(|path| PathBuf::from(path.to_str().unwrap())), p.port)
        };
        let all: Vec<_> = network.all().iter().map(told).collect();
        assert_eq!(
            all,
            [("mlx5_0", Some(adapter.clone()), 1), ("mlx5_1", Some(adapter), 2), ("rdma0", None, 1)]
        );
        assert_eq!(network.all()[0].guid, network.all()[1].guid);
        assert_eq!(network.all()[2].guid, u64::MAX, "that of the node, where there is none of an image");
        assert_eq!(network.compared(), "3 RDMA devices of 100000, 200000, 200000 Mbit/s");
        let merging = network.merging(|name| (name == "NCCL_IB_MERGE_NICS").then(|| "1".into()));
        assert!(merging.is_some_and(|why| why.contains("mlx5_1 and another port of its adapter")));
    }

    #[test]
    fn memory_lies_near_the_device_unless_a_setting_names_another_place() {
        assert_eq!([Some(1), None].map(|near| node(AutoOr::Auto, near)), [Some(1), None]);
        assert_eq!(node(AutoOr::Is(0), Some(1)), Some(0));
        assert_eq!(node(AutoOr::None, Some(1)), None);
    }
}
