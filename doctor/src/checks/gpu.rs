//! NVIDIA's driver, and whether RDMA devices reach GPU memory.

use super::host::{CAP_SYS_ADMIN, capable};
use super::rdma;
use crate::finding::Finding;
use crate::readings::{Read, Readings, Window};

fn no_gpu(r: &Readings) -> Option<Finding> {
    (r.gpu.count == 0 && r.gpu.driver.is().is_none()).then(|| Finding::not_applicable("", "no NVIDIA GPU"))
}

/// The driver's own line says so; GSP-only GPUs have no other.
fn is_open(driver: &str) -> bool {
    driver.contains("Open Kernel Module")
}

/// The branch: 580 of "580.159.03".
fn branch(driver: &str) -> Option<u32> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    driver.split_whitespace().find(is_version)?.split('.').next()?.parse().ok()
}

/// Loaded, and of branch 525 or later: CUDA 12.0, which the executor needs (docs/operations.md; CUDA
/// toolkit release notes, driver versions).
pub fn driver(r: &Readings) -> Vec<Finding> {
    const CUDA_12: u32 = 525;
    if let Some(finding) = no_gpu(r) {
        return vec![finding];
    }
    let install = "install NVIDIA's driver, open kernel modules, of branch 525 or later";
    vec![match &r.gpu.driver {
        Read::Is(line) => match branch(line) {
            Some(branch) if branch < CUDA_12 => Finding::failed(
                "",
                format!("{line}: driver branch {branch} does not support CUDA 12"),
                install,
            ),
            Some(_) => Finding::passed("", line),
            None => Finding::warned("", format!("its version is not known: {line}"), "look with nvidia-smi"),
        },
        Read::Absent if r.gpu.bound.is_empty() => {
            Finding::failed("", format!("{} GPUs on PCI, and no driver is loaded", r.gpu.count), install)
        }
        Read::Absent => Finding::failed(
            "",
            format!(
                "{} GPUs on PCI, bound to {}, so CUDA can't use them",
                r.gpu.count,
                r.gpu.bound.join(", ")
            ),
            install,
        ),
        Read::Unreadable(why) => Finding::warned("", why, "look with nvidia-smi"),
    }]
}

/// Major and minor of a kernel release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    let minor = parts.clone().nth(1)?;
    let end = minor.find(|c: char| !c.is_ascii_digit()).unwrap_or(minor.len());
    Some((parts.next()?.parse().ok()?, minor[..end].parse().ok()?))
}

/// `ib_umem_dmabuf_get` is in Linux since 5.12; NVIDIA's driver exports dma-bufs from its open
/// modules alone (GPUDirect RDMA guide, "Using DMA-BUF"). Without it the payload goes through host
/// memory (docs/driver.md): slower, never wrong.
pub fn dma_buf(r: &Readings) -> Vec<Finding> {
    if r.wants.window != Window::Bar
        && let Some(finding) = no_gpu(r)
    {
        return vec![finding];
    }
    if let Some(finding) = rdma::none(r) {
        return vec![finding];
    }
    if rdma::chosen(r).all(|d| d.pci.is_none()) {
        return vec![Finding::not_applicable("", "RDMA devices in software take no dma-bufs")];
    }
    let fall_back = "until then payload goes through host memory";
    let number = r.host.release.is().and_then(|t| release(t));
    let kernel = r.host.release.is().map_or("not known", String::as_str);
    let by_module = match (&r.gpu.driver, no_gpu(r)) {
        (_, Some(_)) => None,
        (Read::Is(line), _) => Some(is_open(line)),
        _ => Some(false),
    };
    vec![match (&r.host.umem_dmabuf, by_module) {
        (Read::Is(true), None | Some(true)) => {
            let gpu = if by_module.is_some() { ", and the GPU's driver has the open modules" } else { "" };
            Finding::passed("", format!("Linux {kernel} has ib_umem_dmabuf_get{gpu}"))
        }
        (Read::Is(true), Some(false)) => Finding::warned(
            "",
            "the GPU's driver is not the open kernel module, which alone exports dma-bufs",
            format!("install NVIDIA's open kernel modules (branch 515 or later); {fall_back}"),
        ),
        (Read::Is(false), _) if number.is_some_and(|n| n < (5, 12)) => Finding::warned(
            "",
            format!("Linux {kernel} has no ib_umem_dmabuf_get"),
            format!("Linux 5.12 or later; {fall_back}"),
        ),
        (Read::Is(false), _) => Finding::warned(
            "",
            format!("Linux {kernel}, and ib_umem_dmabuf_get is not among its symbols"),
            format!("modprobe ib_uverbs; the RDMA modules of a vendor may lack it, too; {fall_back}"),
        ),
        (Read::Absent, _) => Finding::warned(
            "",
            "the kernel's symbols were not read",
            "look in /proc/kallsyms for ib_umem_dmabuf_get",
        ),
        (Read::Unreadable(why), _) => {
            Finding::warned("", why, "look in /proc/kallsyms for ib_umem_dmabuf_get")
        }
    }]
}

/// pushgate registers dma-bufs; NCCL's own network and other programs take this module where there
/// are none.
pub fn peermem(r: &Readings) -> Vec<Finding> {
    if let Some(finding) = no_gpu(r).or_else(|| rdma::none(r)) {
        return vec![finding];
    }
    let open = r.gpu.driver.is().is_some_and(|line| is_open(line));
    vec![match (r.gpu.peermem, open && r.host.umem_dmabuf == Read::Is(true)) {
        (true, _) => Finding::passed("", "nvidia_peermem is loaded"),
        (false, true) => Finding::passed("", "nvidia_peermem is not loaded; dma-buf serves the same purpose"),
        (false, false) => Finding::warned(
            "",
            "neither nvidia_peermem nor dma-buf works, so no RDMA device reaches GPU memory",
            "see dma-buf; for other programs: sudo modprobe nvidia_peermem",
        ),
    }]
}

/// A BAR is registered as IOMEMORY, which the driver allows root, or all with PeerMappingOverride=1
/// (docs/driver.md, "What a BAR window has to meet").
pub fn peer_mapping(r: &Readings) -> Vec<Finding> {
    if r.wants.window != Window::Bar {
        return vec![Finding::not_applicable("", "window is not bar")];
    }
    if let Some(finding) = no_gpu(r) {
        return vec![finding];
    }
    let remedy = "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1\" in /etc/modprobe.d/nvidia.conf, then load nvidia anew; or run as root";
    vec![match &r.gpu.params {
        Read::Is(params) => {
            let set = params
                .split([';', '"', '\n', ' '])
                .filter_map(|word| word.split_once('='))
                .any(|(key, value)| key == "PeerMappingOverride" && !["0", "0x0"].contains(&value.trim()));
            match (set, capable(r, CAP_SYS_ADMIN)) {
                (true, _) => Finding::passed("", "PeerMappingOverride is set"),
                (false, true) => Finding::passed("", "PeerMappingOverride is not set; root needs none"),
                (false, false) => {
                    Finding::failed("", "PeerMappingOverride is not set, and this user is not root", remedy)
                }
            }
        }
        Read::Absent => Finding::warned("", "there is no /proc/driver/nvidia/params", remedy),
        Read::Unreadable(why) => Finding::warned("", why, remedy),
    }]
}

/// A program sees one instance alone, and peers over PCIe or NVLink are not given to instances (MIG
/// user guide, "Application considerations").
pub fn mig(r: &Readings) -> Vec<Finding> {
    if let Some(finding) = no_gpu(r) {
        return vec![finding];
    }
    vec![match r.gpu.mig_instances {
        0 => Finding::passed("", "no GPU instance"),
        n => Finding::warned(
            "",
            format!("GPU instances: {n}; a program sees one, and no peer GPU"),
            "nvidia-smi mig -dci && nvidia-smi mig -dgi, then nvidia-smi -mig 0 (root; ends what runs there)",
        ),
    }]
}

/// With MPS kernels of several processes share a GPU at once, and one client's fault ends them all
/// (CUDA MPS guide). Two training programs over the NCCL plugin were seen under it at once (docs/benchmarks.md).
pub fn mps(r: &Readings) -> Vec<Finding> {
    if let Some(finding) = no_gpu(r) {
        return vec![finding];
    }
    vec![match r.gpu.mps {
        None => Finding::passed("", "no MPS daemon runs"),
        Some(pid) => Finding::warned(
            "",
            format!(
                "nvidia-cuda-mps-control runs (process {pid}): a fault of one program ends all programs on the GPU"
            ),
            "echo quit | nvidia-cuda-mps-control, unless you want MPS",
        ),
    }]
}

/// The NCCL plugin's copies are another process's (docs/copier.md), which opens each GPU beside the program. The modes are
/// `CUcomputemode` of cuda.h: 2 PROHIBITED, 3 EXCLUSIVE_PROCESS.
pub fn copier(r: &Readings) -> Vec<Finding> {
    if let Some(finding) = no_gpu(r) {
        return vec![finding];
    }
    let modes = match &r.gpu.compute_modes {
        Read::Is(modes) => modes,
        Read::Absent => return vec![Finding::not_applicable("", "CUDA was not asked for the compute modes")],
        Read::Unreadable(why) => return vec![Finding::warned("", why, "look with nvidia-smi -q -d COMPUTE")],
    };
    let of = |mode| {
        let gpus = (0..).zip(modes).filter(|(_, found)| **found == mode);
        gpus.map(|(gpu, _): (usize, _)| gpu.to_string()).collect::<Vec<_>>().join(", ")
    };
    match (of(3), of(2)) {
        (alone, closed) if alone.is_empty() && closed.is_empty() => {
            vec![Finding::passed("", "no GPU is in an exclusive compute mode")]
        }
        (alone, closed) => [
            (alone, "EXCLUSIVE_PROCESS: one process, and the copier is another"),
            (closed, "PROHIBITED"),
        ]
        .into_iter()
        .filter(|(gpus, _)| !gpus.is_empty())
        .map(|(gpus, mode)| {
            Finding::warned(
                "",
                format!(
                    "GPU {gpus}: compute mode {mode}; the NCCL plugin takes path bounce, which is slower"
                ),
                format!("sudo nvidia-smi -i {} -c DEFAULT", gpus.replace(", ", ",")),
            )
        })
        .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_admit_one_process_alone_are_named() {
        let of = |compute_modes| {
            let mut r = Readings::default();
            (r.gpu.count, r.gpu.compute_modes) = (4, compute_modes);
            copier(&r).into_iter().map(|f| format!("{f:?}")).collect::<Vec<_>>()
        };
        let shared = of(Read::Is(vec![0, 0]));
        assert!(shared.len() == 1 && shared[0].contains("no GPU is in"), "{shared:?}");
        let some = of(Read::Is(vec![0, 3, 2, 3]));
        assert!(
            some.len() == 2 && some[0].contains("GPU 1, 3: ") && some[0].contains("-i 1,3 -c DEFAULT"),
            "{some:?}"
        );
        assert!(some[1].contains("GPU 2: compute mode PROHIBITED"), "{some:?}");
        assert!(of(Read::Unreadable("no library".into()))[0].contains("no library"));
    }

    #[test]
    fn versions_are_found_in_the_lines_that_carry_them() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13";
        assert_eq!((branch(open), is_open(open)), (Some(580), true));
        assert_eq!((branch(closed), is_open(closed)), (Some(470), false));
        assert_eq!(branch("....."), None);
        assert_eq!(release("6.1.0-56-amd64"), Some((6, 1)));
        assert_eq!(release("5.4-rc1"), Some((5, 4)));
        assert_eq!(release("x"), None);
    }
}
