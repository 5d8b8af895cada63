//! NVIDIA's driver, as /proc and sysfs show it.

use std::ffi::{c_int, c_uint};
use std::path::Path;

use pushgate_topology::{Address, Function, Parent};

use super::files::{names, text};
use super::nccl::open;
use super::roots::Roots;
use crate::readings::{Gpu, Read};

pub fn gpu(roots: &Roots) -> Gpu {
    let nvidia = roots.proc.join("driver/nvidia");
    let found = gpus(roots);
    let count = found.len();
    let folder = roots.sys.join("bus/pci/devices");
    let driver_of = |gpu: &String| {
        let link = std::fs::read_link(folder.join(gpu).join("driver")).ok()?;
        Some(link.file_name()?.to_string_lossy().into_owned())
    };
    let mut bound: Vec<String> = found.iter().filter_map(driver_of).collect();
    bound.sort();
    bound.dedup();
    let driver = text(&nvidia.join("version")).then(|t| match t.lines().next() {
        Some(line) if !line.is_empty() => Ok(line.trim().to_string()),
        _ => Err(format!("{} is empty", nvidia.join("version").display())),
    });
    let present = count > 0 || driver != Read::Absent;
    Gpu {
        count,
        bound,
        driver,
        params: text(&nvidia.join("params")),
        peermem: ["nvidia_peermem", "nv_peer_mem"].iter().any(|m| roots.sys.join("module").join(m).exists()),
        mig_instances: mig_instances(roots),
        mps: if present { mps(roots) } else { None },
        compute_modes: if present && roots.live { compute_modes() } else { Read::Absent },
    }
}

/// The compute mode of each GPU, as the driver's library says. Opens no GPU.
fn compute_modes() -> Read<Vec<u32>> {
    // cuda.h, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE.
    const COMPUTE_MODE: c_int = 20;
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
    let ask = || -> Result<Vec<u32>, String> {
        let library = open("libcuda.so.1")?;
        let lacks = |e: libloading::Error| format!("libcuda.so.1: {e}");
        // SAFETY: cuda.h: CUresult cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGetAttribute(int *, attribute, CUdevice).
        let (init, count, attribute) = unsafe {
            (
                library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit\0").map_err(lacks)?,
                library
                    .get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount\0")
                    .map_err(lacks)?,
                library.get::<Attribute>(b"cuDeviceGetAttribute\0").map_err(lacks)?,
            )
        };
        let check = |call: &str, code: c_int| match code {
            0 => Ok(()),
            code => Err(format!("{call} of libcuda.so.1 fails with error {code}")),
        };
        // SAFETY: as above; flags must be 0.
        check("cuInit", unsafe { init(0) })?;
        let mut gpus = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { count(&mut gpus) })?;
        (0..gpus)
            .map(|gpu| {
                let mut mode = 0;
                // SAFETY: writes one int. A device is its index.
                check("cuDeviceGetAttribute", unsafe { attribute(&mut mode, COMPUTE_MODE, gpu) })?;
                Ok(mode.max(0) as u32)
            })
            .collect()
    };
    ask().map_or_else(Read::Unreadable, Read::Is)
}

/// PCI functions that topology takes for GPUs.
pub fn gpus(roots: &Roots) -> Vec<String> {
    let devices = roots.sys.join("bus/pci/devices");
    let hex = |path: &Path| u32::from_str_radix(text(path).is()?.strip_prefix("0x")?, 16).ok();
    let is_gpu = |name: &String| {
        let Ok(address) = name.parse::<Address>() else { return false };
        let folder = devices.join(name);
        let mut function = Function::new(address, Parent::RootComplex(String::new()));
        function.vendor = hex(&folder.join("vendor")).and_then(|v| v.try_into().ok());
        function.class = hex(&folder.join("class"));
        function.is_gpu()
    };
    names(&devices).into_iter().filter(is_gpu).collect()
}

/// Folders capabilities/gpuN/mig/giM of the driver.
fn mig_instances(roots: &Roots) -> usize {
    let folder = roots.proc.join("driver/nvidia/capabilities");
    let of = |gpu: String| {
        let instances = names(&folder.join(gpu).join("mig"));
        instances.iter().filter(|n| n.strip_prefix("gi").is_some_and(|i| i.parse::<u32>().is_ok())).count()
    };
    names(&folder).into_iter().filter(|n| n.starts_with("gpu")).map(of).sum()
}

/// The kernel keeps 15 bytes of a program's name, so the command line tells daemon and server apart.
fn mps(roots: &Roots) -> Option<u32> {
    names(&roots.proc).iter().filter_map(|n| n.parse::<u32>().ok()).find(|pid| {
        let folder = roots.proc.join(pid.to_string());
        text(&folder.join("comm")).is().is_some_and(|c| c == "nvidia-cuda-mps")
            && text(&folder.join("cmdline")).is().is_some_and(|c| c.contains("nvidia-cuda-mps-control"))
    })
}
