//! The edge: looks at a host. Every file is bounded, every failure becomes a sentence of what could
//! not be read and why; nothing here judges.

mod dcb;
pub(crate) mod files;
mod firmware;
mod gpu;
pub(crate) mod host;
mod module;
mod nccl;
mod pci;
pub(crate) use pci::ATS;
mod rdma;
mod roots;

pub use nccl::{library as nccl_library, library_at as nccl_library_at};
pub use roots::Roots;

use crate::checks::Part;
use crate::readings::{Readings, Wants, Window};

/// Looks at what these parts need.
pub fn read(roots: &Roots, wants: Wants, parts: &[Part]) -> Readings {
    let has = |part| parts.contains(&part);
    let root = roots.sys.parent().filter(|_| !roots.live).map_or(String::new(), |r| r.display().to_string());
    let mut r = Readings { wants, root, ..Readings::default() };
    if has(Part::Rdma) {
        r.rdma = rdma::devices(roots, &r.wants);
        r.netdevs = rdma::netdevs(roots, &r.rdma);
        r.rdma_cm = rdma::cm(roots);
    }
    if has(Part::Gpu) {
        r.gpu = gpu::gpu(roots);
    }
    if has(Part::Pci) {
        r.pci = pci::functions(roots, &r.rdma);
        r.iommu_groups = pci::iommu_groups(roots);
        r.cmdline = files::text(&roots.proc.join("cmdline"));
    }
    if has(Part::Host) {
        r.host = host::host(roots, &r.wants);
        // Reading all of the kernel's symbols takes a while, so only where it matters.
        if r.gpu.count > 0 || r.wants.window == Window::Bar {
            r.host.umem_dmabuf = host::symbol(roots, "ib_umem_dmabuf_get");
        }
    }
    if has(Part::Module) {
        r.module = module::module(roots);
    }
    if has(Part::Nccl) && roots.live {
        r.nccl = nccl::nccl();
    }
    if let Some(answers) = &roots.answers {
        answers.fill(&mut r);
    }
    r
}
