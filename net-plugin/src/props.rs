//! What NCCL is told about the network: the RDMA devices where there are some, else host memory. NCCL asks before it connects any ranks.

use std::collections::HashSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use pushgate_driver_shim::abi;

use crate::devices;
use crate::error::{Code, Failure, Result};
use crate::ffi::types::{MAX_RECVS, PTR_CUDA, PTR_DMABUF, PTR_HOST};

/// How many connections there may be at once: as many as descriptors allow, at two or three each.
pub const MAX_COMMS: c_int = 65536;
/// The longest message of a queue pair, which is what NCCL is told.
pub const MAX_BYTES: usize = abi::PUSHGATE_MAX_MESSAGE as usize;
/// The longest message that is accepted, in slices. NCCL reads the limit that it was told, and
/// still sends up to 1 GiB at once out of a user's buffers (`NCCL_MAX_NET_SIZE`). No `isend` before
/// v9 can name a larger size.
pub const LONGEST: usize = i32::MAX as usize;

/// The speed in Mbit/s that NCCL is told of a `local` queue pair: 25 GB/s, which one thread that
/// copies host memory reaches on a server, and more than NCCL's socket transport ever reaches. NCCL
/// opens channels by it.
const LOCAL_SPEED: c_int = 200_000;
/// The speed in Mbit/s of all devices together where GPUs push and pull, and over TCP: 50 GB/s, which is what a
/// GPU's PCIe 5 x16 link carries.
const GPU_SPEED: c_int = 400_000;
/// How many devices NCCL is told of where GPUs push and pull without an RDMA device, and over TCP. NCCL opens two channels to a peer for
/// send/recv, or as many as there are devices if filling a GPU's link takes that many
/// (`ncclTopoGetNchannels`). Two of its blocks copy 41 GB/s from and to its buffers on an H200,
/// which is less than the link carries.
const GPU_DEVICES: usize = 4;
/// Their names. NCCL takes devices of the same name for one device.
const NAMES: [&CStr; GPU_DEVICES] = [c"pushgate", c"pushgate-1", c"pushgate-2", c"pushgate-3"];
/// Microseconds that a message takes through two engines; NCCL adds them to its own.
const LATENCY: f32 = 3.0;

/// What NCCL is told about a device.
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// NCCL keeps the pointer for ever, as it does the path's.
    pub name: &'static CStr,
    /// The path of the PCI function of the device's adapter.
    pci_path: Option<&'static CStr>,
    /// Identifies the chip, so that NCCL sees which ports share bandwidth.
    pub guid: u64,
    /// In Mbit/s.
    pub speed: c_int,
    /// The port's number, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Kinds of memory that NCCL may hand over: `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// The longest message.
    pub max_bytes: usize,
    /// Buffers of a receive ([`Network::in_order`]).
    pub max_recvs: c_int,
}

impl Properties {
    /// A device of host memory.
    fn of_host(name: &'static CStr, port: c_int, speed: c_int) -> Self {
        let guid = u64::from_be_bytes(*b"pushgate");
        let (latency, max_bytes, max_recvs) = (LATENCY, MAX_BYTES, MAX_RECVS as c_int);
        let ptr_support = PTR_HOST;
        Properties { name, pci_path: None, guid, speed, port, latency, ptr_support, max_bytes, max_recvs }
    }

    /// What the sysfs at `sys` says of a port of an RDMA device that takes messages of up to `longest` bytes.
    pub fn read(sys: &Path, device: &str, port: u8, longest: usize) -> Self {
        let base = sys.join("class/infiniband").join(device);
        let read = |file: String| std::fs::read_to_string(base.join(file)).unwrap_or_default();
        let name = kept(CString::new(device).unwrap_or_default());
        // Ports of an adapter have one image.
        let guid = guid(&read("sys_image_guid".into())).or_else(|| guid(&read("node_guid".into())));
        // If the kernel does not report a rate, use NCCL's own guess for such a case.
        let speed = speed(&read(format!("ports/{port}/rate"))).unwrap_or(10_000);
        Properties {
            pci_path: pci_path(&base.join("device"))
                .and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok())
                .map(kept),
            // NCCL must not take devices that say nothing for ports of one chip.
            guid: guid.unwrap_or_else(|| crate::handle::sum(device.as_bytes()) | 1),
            max_bytes: longest,
            ..Properties::of_host(name, port.into(), speed)
        }
    }

    /// Whether messages of a connection are taken in their order ([`Network::in_order`]).
    pub fn is_in_order(&self) -> bool {
        self.max_recvs == 1
    }

    /// Whether NCCL may hand over memory of GPUs.
    pub fn takes_gpu_memory(&self) -> bool {
        self.ptr_support & PTR_CUDA != 0
    }

    /// The PCI path for NCCL; NULL if the device is no PCI function, and then NCCL places it at the
    /// first CPU.
    pub fn pci_path(&self) -> *const c_char {
        self.path().map_or(std::ptr::null(), CStr::as_ptr)
    }

    /// The PCI path.
    pub fn path(&self) -> Option<&'static CStr> {
        self.pci_path
    }
}

/// The devices that NCCL is told of; at least one. NCCL names a device by its place here.
#[derive(Clone, Debug)]
pub struct Network {
    all: Vec<Properties>,
    /// They are RDMA devices.
    rdma: bool,
}

impl Network {
    /// The network where no RDMA device is used, for host memory. `gpu`: as many devices as where GPUs push and pull. All of them are
    /// the same, and differ in their port.
    pub fn of_host(gpu: bool) -> Self {
        let (devices, speed) =
            if gpu { (GPU_DEVICES, GPU_SPEED / GPU_DEVICES as c_int) } else { (1, LOCAL_SPEED) };
        let all = NAMES.into_iter().zip(1..).take(devices);
        Network { all: all.map(|(name, port)| Properties::of_host(name, port, speed)).collect(), rdma: false }
    }

    /// The network of these RDMA devices, as they are. Ports of one adapter have its path and numbers of their own, by which NCCL sees
    /// that they share its link. NCCL may choose its protocol LL128 where a device is near a GPU: lines arrive whole, whether the RDMA
    /// device writes them or the GPU pulls them (docs/nccl.md).
    pub fn of_devices(mut all: Vec<Properties>) -> Self {
        let before = Self::ports_before(&all);
        for (p, before) in all.iter_mut().zip(before) {
            p.port += before as c_int;
            let adapter =
                p.pci_path.and_then(|path| CString::new(devices::adapter(path.to_str().ok()?)).ok());
            p.pci_path = adapter.map(kept);
        }
        Network { all, rdma: true }
    }

    fn ports_before(all: &[Properties]) -> Vec<usize> {
        let paths: Vec<_> = all.iter().map(|p| p.pci_path.and_then(|path| path.to_str().ok())).collect();
        devices::ports_before(&paths)
    }

    /// Why these devices can't stand beside what NCCL's variables ask for, if so ([`devices::merging`]).
    pub fn merging(&self, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
        let names: Vec<_> = self.all.iter().map(|p| p.name.to_str().unwrap_or_default()).collect();
        if self.rdma { devices::merging(variable, &names, &Self::ports_before(&self.all)) } else { None }
    }

    /// This network, if NCCL may hand over memory of the host alone, or GPU memory too.
    pub fn with_gpu_memory(self, gpu: bool) -> Self {
        let ptr_support = if gpu { PTR_HOST | PTR_CUDA } else { PTR_HOST };
        self.with(|p| p.ptr_support = ptr_support)
    }

    /// This network, if NCCL is to hand over GPU memory by dma-buf for the devices that `takes` accepts.
    pub fn with_dma_bufs(mut self, takes: impl Fn(usize) -> bool) -> Self {
        for (dev, p) in self.all.iter_mut().enumerate() {
            p.ptr_support |= if takes(dev) { PTR_DMABUF } else { 0 };
        }
        self
    }

    /// This network where the messages of a connection are taken in their order, whatever their tags are, as over TCP: short
    /// ones leave before their receives are posted.
    ///
    /// If a device takes several buffers in a receive, NCCL lets ranks that send through one rank of their host (PXN) share a
    /// connection, told apart by tags, and then a message that waits for its receive must not hold up others. All ranks have to say
    /// the same: an end that shares its connections does not fit one that has a connection for each rank. So the setting `qp` decides,
    /// which is that of all ranks, and not what a host has.
    pub fn in_order(self) -> Self {
        self.with(|p| p.max_recvs = 1)
    }

    fn with(mut self, change: impl Fn(&mut Properties)) -> Self {
        self.all.iter_mut().for_each(change);
        self
    }

    /// All devices.
    pub fn all(&self) -> &[Properties] {
        &self.all
    }

    /// Whether they are RDMA devices.
    pub fn is_rdma(&self) -> bool {
        self.rdma
    }

    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The first device. All have the kinds of memory and the buffers of a receive alike, but for dma-bufs.
    pub fn first(&self) -> &Properties {
        &self.all[0]
    }

    /// The device of this number.
    pub fn get(&self, dev: c_int) -> Result<&Properties> {
        usize::try_from(dev).ok().and_then(|dev| self.all.get(dev)).ok_or_else(|| {
            let text = format!("device {dev} of {}: devices() says how many there are", self.all.len());
            Failure::new(Code::Argument, text)
        })
    }

    /// What must be alike of this on two hosts ([`crate::alike`]).
    pub fn compared(&self) -> String {
        if self.rdma {
            return devices::compared(&self.all.iter().map(|p| p.speed).collect::<Vec<_>>());
        }
        format!("{} of host memory, for no RDMA device", self.all.len())
    }
}

/// This text, for ever. A process names few.
fn kept(text: CString) -> &'static CStr {
    static KEPT: Mutex<Option<HashSet<&'static CStr>>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap_or_else(|e| e.into_inner());
    let kept = kept.get_or_insert_default();
    if let Some(found) = kept.get(&*text) {
        return found;
    }
    let text: &'static CStr = Box::leak(text.into_boxed_c_str());
    kept.insert(text);
    text
}

/// The path below /sys of a device's PCI function, in the form that NCCL wants; nothing for a device that is no function itself.
pub fn pci_path(device: &Path) -> Option<PathBuf> {
    let path = std::fs::canonicalize(device).ok()?;
    is_pci(path.file_name()?.to_str()?).then_some(path)
}

/// Whether a name is a PCI address, like 0000:3b:00.1.
fn is_pci(name: &str) -> bool {
    let b = name.as_bytes();
    b.len() >= 12 && b[b.len() - 2] == b'.' && b[b.len() - 5] == b':' && b[b.len() - 8] == b':'
}

/// Parses a GUID like "98fe:1403:0012:ab34".
fn guid(text: &str) -> Option<u64> {
    u64::from_str_radix(&text.trim().replace(':', ""), 16).ok().filter(|g| *g != 0)
}

/// Parses a rate like "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)" into Mbit/s.
fn speed(text: &str) -> Option<c_int> {
    let (number, unit) = text.trim().split_once(' ')?;
    unit.starts_with("Gb/sec").then_some(())?;
    number.parse::<f64>().ok().filter(|n| *n > 0.0).map(|n| (n * 1000.0) as c_int)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was measured on hosts without an RDMA device.
    #[test]
    fn without_an_rdma_device_nccl_is_told_of_four_devices_of_host_memory_for_gpus_and_of_one_else() {
        for (gpu, devices, speed) in [(true, 4, 100_000), (false, 1, 200_000)] {
            let network = Network::of_host(gpu).with_gpu_memory(gpu);
            assert_eq!(network.len(), devices);
            for dev in 0..devices {
                let p = network.get(dev as c_int).unwrap();
                assert_eq!((p.speed, p.port, p.path()), (speed, dev as c_int + 1, None));
                assert_eq!((p.max_recvs, p.max_bytes), (8, MAX_BYTES));
                assert_eq!(p.ptr_support, if gpu { PTR_HOST | PTR_CUDA } else { PTR_HOST });
                assert_eq!(p.guid, u64::from_be_bytes(*b"pushgate"));
            }
            assert!(network.get(devices as c_int).is_err() && network.get(-1).is_err());
        }
    }

    #[test]
    fn values_of_sysfs_are_parsed() {
        assert_eq!(speed("100 Gb/sec (4X EDR)\n"), Some(100_000));
        assert_eq!(speed("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(speed(""), None);
        assert_eq!(guid("98fe:1403:0012:ab34\n"), Some(0x98fe_1403_0012_ab34));
        assert_eq!((guid("0000:0000:0000:0000"), guid("")), (None, None));
        assert!(is_pci("0000:3b:00.1") && is_pci("10000:01:00.0"));
        assert!(!is_pci("rxe0") && !is_pci("virtio0") && !is_pci(""));
    }
}
