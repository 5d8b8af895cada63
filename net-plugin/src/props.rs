//! What NCCL is told about the network: the RDMA device's port where there is one, else host memory. NCCL asks before it
//! connects any ranks, so with `qp = auto` what it is told must be right for connections over `local` and over `verbs`.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;

use pushgate_driver_shim::abi;
use pushgate_proxy::link::verbs::Device;

use crate::ffi::types::{MAX_RECVS, PTR_CUDA, PTR_DMABUF, PTR_HOST};
use crate::plan::Landing;

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
/// How many devices NCCL is told of where GPUs push and pull, and over TCP. NCCL opens two channels to a peer for
/// send/recv, or as many as there are devices if filling a GPU's link takes that many
/// (`ncclTopoGetNchannels`). Two of its blocks copy 41 GB/s from and to its buffers on an H200,
/// which is less than the link carries.
pub const GPU_DEVICES: c_int = 4;
/// Microseconds that a message takes through two engines; NCCL adds them to its own.
const LATENCY: f32 = 3.0;

/// What NCCL is told about the network.
#[derive(Clone, Copy)]
pub struct Properties {
    /// The path of the device's PCI function. NCCL keeps the pointer for ever.
    pci_path: Option<&'static CStr>,
    /// Identifies the chip, so that NCCL sees which ports share bandwidth.
    pub guid: u64,
    /// How many devices NCCL is told of; they differ only in their port.
    pub devices: c_int,
    /// The speed of each device in Mbit/s.
    pub speed: c_int,
    /// The port number of the first device, from 1.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Kinds of memory that NCCL may hand over: `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// The longest message.
    pub max_bytes: usize,
    /// Buffers of a receive ([`Properties::in_order`]).
    pub max_recvs: c_int,
}

impl Properties {
    /// The properties where no RDMA device is used, for host memory. `gpu`: as many devices as where GPUs push and pull.
    pub fn local(gpu: bool) -> Self {
        let guid = u64::from_be_bytes(*b"pushgate");
        let (devices, speed) = if gpu { (GPU_DEVICES, GPU_SPEED / GPU_DEVICES) } else { (1, LOCAL_SPEED) };
        let (latency, max_bytes) = (LATENCY, MAX_BYTES);
        let max_recvs = MAX_RECVS as c_int;
        Properties {
            pci_path: None,
            guid,
            devices,
            speed,
            port: 1,
            latency,
            ptr_support: PTR_HOST,
            max_bytes,
            max_recvs,
        }
    }

    /// These properties of a network to which NCCL may hand over memory of the host alone, or GPU memory too.
    pub fn with_gpu_memory(self, gpu: bool) -> Self {
        Properties { ptr_support: if gpu { PTR_HOST | PTR_CUDA } else { PTR_HOST }, ..self }
    }

    /// These properties where the messages of a connection are taken in their order, whatever their tags are, as over TCP: short
    /// ones leave before their receives are posted.
    ///
    /// If a device takes several buffers in a receive, NCCL lets ranks that send through one rank of their host (PXN) share a
    /// connection, told apart by tags, and then a message that waits for its receive must not hold up others. All ranks have to say
    /// the same: an end that shares its connections does not fit one that has a connection for each rank. So the setting `qp` decides,
    /// which is that of all ranks, and not what a host has.
    pub fn in_order(self) -> Self {
        Properties { max_recvs: 1, ..self }
    }

    pub fn of(device: &Device) -> Self {
        let base = Path::new("/sys/class/infiniband").join(device.name());
        let read = |file: String| std::fs::read_to_string(base.join(file)).unwrap_or_default();
        let port = device.port();
        Properties {
            // Leaking is fine: a process opens few devices.
            pci_path: pci_path(&base.join("device")).map(|path| &*Box::leak(path.into_boxed_c_str())),
            guid: guid(&read("node_guid".into())).unwrap_or(1),
            devices: 1,
            // If the kernel does not report a rate, use NCCL's own guess for such a case.
            speed: speed(&read(format!("ports/{port}/rate"))).unwrap_or(10_000),
            port: port as c_int,
            latency: LATENCY,
            ptr_support: PTR_HOST,
            max_bytes: MAX_BYTES.min(device.longest_message() as usize),
            max_recvs: MAX_RECVS as c_int,
        }
    }

    /// Whether messages of a connection are taken in their order ([`Properties::in_order`]).
    pub fn is_in_order(&self) -> bool {
        self.max_recvs == 1
    }

    /// Whether NCCL may hand over memory of GPUs.
    pub fn takes_gpu_memory(&self) -> bool {
        self.ptr_support & PTR_CUDA != 0
    }

    /// These properties of an RDMA device where some connections may be over `local`: four devices without a place on PCIe, which share
    /// the port's rate. A rank without an RDMA device has as many, and releases of NCCL after 2.30 may refuse ranks that differ in this
    /// (NCCL_IGNORE_NET_MISMATCH).
    ///
    /// NCCL uses its LL128 protocol, at all sizes that its model finds it good for, if it sees GPU and NIC at one switch. The
    /// model does not know what the copier's copies cost. So the device has no place there, and the tuner says for which sizes LL128 is
    /// taken (`tuning.rs`).
    pub fn beside_local(self) -> Self {
        let (devices, speed) = (GPU_DEVICES, (self.speed / GPU_DEVICES).max(1));
        Properties { devices, speed, pci_path: None, ..self }
    }

    /// These properties of a network to which NCCL may hand over GPU memory. `dma_buf`: as a dma-buf.
    ///
    /// NCCL need not know how messages leave. Everything else is independent of the plan: ranks of
    /// one communicator may have different plans, and NCCL must come to the same conclusions on
    /// each.
    pub fn with_gpu(self, landing: Landing, dma_buf: bool) -> Self {
        let dma_buf = if dma_buf && landing == Landing::Gpu { PTR_DMABUF } else { 0 };
        let pci_path = self.pci_path.filter(|_| landing == Landing::Gpu);
        Properties { pci_path, ptr_support: PTR_HOST | PTR_CUDA | dma_buf, ..self }
    }

    /// The PCI path for NCCL; NULL if the device is no PCI function, and then NCCL places it at the
    /// first CPU.
    pub fn pci_path(&self) -> *const c_char {
        self.pci_path.map_or(std::ptr::null(), |p| p.as_ptr())
    }
}

/// The path below /sys of a device's PCI function, in the form that NCCL wants.
fn pci_path(device: &Path) -> Option<CString> {
    let path = std::fs::canonicalize(device).ok()?;
    is_pci(path.file_name()?.to_str()?).then_some(())?;
    CString::new(path.into_os_string().into_encoded_bytes()).ok()
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

    #[test]
    fn ll128_is_never_offered_where_our_kernel_brings_the_lines() {
        let device = Properties { pci_path: Some(c"/sys/devices/pci0000:00"), ..Properties::local(false) };
        for (landing, local, place, types) in [
            (Landing::Gpu, false, true, PTR_HOST | PTR_CUDA | PTR_DMABUF),
            (Landing::Gpu, true, false, PTR_HOST | PTR_CUDA | PTR_DMABUF),
            (Landing::Host, false, false, PTR_HOST | PTR_CUDA),
        ] {
            let device = if local { device.beside_local() } else { device };
            let p = device.with_gpu(landing, true);
            assert_eq!((p.pci_path.is_some(), p.ptr_support), (place, types), "{landing:?} {local}");
            assert_eq!(p.max_bytes, MAX_BYTES);
            // The ways to all ranks have one speed together, however many devices there are.
            assert_eq!((p.devices, p.devices * p.speed), (if local { GPU_DEVICES } else { 1 }, LOCAL_SPEED));
            let p = device.with_gpu(landing, false);
            assert_eq!(p.ptr_support, PTR_HOST | PTR_CUDA);
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
