//! Where the memory of a context lies: its NUMA node, its huge pages, and the provider of its windows, as the settings
//! say.

use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::kmod::KmodError;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::provider::{BarWindow, StagingWindow};
use pushgate_driver_shim::window::Window;
use pushgate_gpu_kernels::Executor;

use crate::error::{Error, Result};
use crate::settings::{AutoOr, Settings, WindowKind};

/// Allocates host memory that this process shares with others, on the device's NUMA node unless the settings name
/// another. `payload`: in huge pages, where the settings allow them.
pub(crate) fn memory(
    settings: &Settings,
    executor: &Arc<dyn Executor>,
    name: &str,
    bytes: usize,
    payload: bool,
) -> Result<SharedMemory, ShimError> {
    let huge = if payload { settings.huge_pages } else { HugePages::Never };
    let make = |node| SharedMemory::builder(name, bytes).huge_pages(huge).numa_node(node).create();
    match settings.numa_node {
        AutoOr::Is(node) => make(Some(node as u32)),
        AutoOr::None => make(None),
        AutoOr::Auto => match executor.as_cuda().and_then(|c| numa_node_of(c.pci_bus_id())) {
            // The node was detected and not set by the user: where a sandbox forbids binding to the node, go without.
            Some(node) => make(Some(node)).or_else(|_| make(None)),
            None => make(None),
        },
    }
}

/// Allocates memory for payload from the window provider that the settings name.
pub(crate) fn window(
    settings: &Settings,
    executor: &Arc<dyn Executor>,
    name: &str,
    bytes: usize,
) -> Result<Arc<dyn Window>> {
    match settings.window {
        WindowKind::Memory => {
            let window = memory(settings, executor, name, bytes, true)?;
            // This process has mapped the window; from here on a process that receives the window can only read.
            window.seal_against_writers()?;
            Ok(Arc::new(window))
        }
        kind => kernel_window(settings, kind, name, bytes),
    }
}

/// Allocates memory for payload from the kernel module, under a name that no other area has ([`Window::name`]).
fn kernel_window(settings: &Settings, kind: WindowKind, name: &str, bytes: usize) -> Result<Arc<dyn Window>> {
    let name = area_name(name)?;
    let path = settings.window_dev.to_str().filter(|p| *p != "auto");
    let ttl = settings.staging_ttl.as_millis() as u32;
    let made: Result<Arc<dyn Window>, KmodError> = match kind {
        WindowKind::Bar => BarWindow::open(path, &name, bytes).map(|w| Arc::new(w) as _),
        _ => StagingWindow::create(path, &name, bytes, ttl).map(|w| Arc::new(w) as _),
    };
    made.map_err(|why| Error::Window { kind: kind.to_string(), bytes, why })
}

/// Makes a name for an area of the kernel module that no other process chooses, on this host or in
/// a container.
///
/// The process number alone is not enough: containers repeat process numbers, and a killed
/// process's areas keep their names until `staging_ttl` has passed. The number is in the name for
/// people who read it.
fn area_name(name: &str) -> Result<String> {
    let mut random = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut random))
        .map_err(Error::io("a name for a staging area from /dev/urandom"))?;
    Ok(format!("{name}-{}-{:016x}", std::process::id(), u64::from_ne_bytes(random)))
}

/// The NUMA node of a PCI function, if the kernel knows it.
fn numa_node_of(bus_id: &str) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus_id.to_lowercase());
    std::fs::read_to_string(path).ok()?.trim().parse::<i32>().ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_of_processes_with_one_number_have_different_names() {
        let names = [(); 3].map(|()| area_name("pushgate-window-16777214").unwrap());
        assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
        // The kernel module allows 63 characters, and a process number has up to seven digits.
        assert!(names.iter().all(|name| name.len() <= 63 - 7), "{names:?}");
    }
}
