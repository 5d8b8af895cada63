//! Reads from NVML what it reports about GPUs: index, name, MIG, MPS, NVLinks, peer access. The
//! library is opened at run time.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_C2C_LINK_COUNT;
use nvml_wrapper::{Device, Nvml};

use crate::address::Address;
use crate::tree::{Gpu, Mig, NvLink, NvLinkEnd, Peer};

/// The most NVLinks of a GPU that are asked for (NVML_NVLINK_MAX_LINKS is 18 as of CUDA 13).
const MOST_NVLINKS: u32 = 36;
/// The most MIG instances of a GPU that are asked for (7 as of CUDA 13).
const MOST_INSTANCES: u32 = 64;

/// What NVML reported, and what could not be read, one sentence each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// What failed.
    pub notes: Vec<String>,
}

/// Asks NVML of this host. An error says why there is no NVML: most often because there is no
/// driver.
pub fn read() -> Result<Told, String> {
    read_from(OsStr::new("libnvidia-ml.so.1"))
}

/// Asks NVML, loading the library by this name or path ([`read`]).
pub fn read_from(library: &OsStr) -> Result<Told, String> {
    let nvml = Nvml::builder()
        .lib_path(library)
        .init()
        .map_err(|e| format!("{}: {}", library.to_string_lossy(), chain(&e)))?;
    let count = nvml.device_count().map_err(|e| format!("NVML does not count GPUs: {}", chain(&e)))?;
    let mut told = Told::default();
    let mut devices = Vec::new();
    for index in 0..count {
        match nvml.device_by_index(index).and_then(|d| Ok((d.pci_info()?, d))) {
            Ok((pci, device)) => match pci.bus_id.parse::<Address>() {
                Ok(at) => devices.push((index, at, device)),
                Err(e) => told.notes.push(format!("NVML, GPU {index}: {e}")),
            },
            Err(e) => told.notes.push(format!("NVML, GPU {index}: {}; nvidia-smi says more", chain(&e))),
        }
    }
    let service = mps_service();
    let all: Vec<Address> = devices.iter().map(|(_, at, _)| *at).collect();
    for (index, at, device) in &devices {
        let mut gpu = Gpu::new(*at);
        gpu.index = Some(*index);
        gpu.name = device.name().ok().map(printable);
        gpu.uuid = device.uuid().ok().map(printable);
        gpu.mig = mig(device);
        gpu.mps = Some(service || device.mps_running_compute_processes().is_ok_and(|p| !p.is_empty()));
        gpu.nvlinks = nvlinks(device, &all);
        gpu.peers = devices
            .iter()
            .filter(|(_, to, _)| to != at)
            .filter_map(|(_, to, other)| Some(Peer { to: *to, access: peer_access(device, other)? }))
            .collect();
        told.gpus.push(gpu);
    }
    Ok(told)
}

/// What other programs do with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Processes other than this one that have a CUDA context there. Their ids are those of the
    /// host; a container may be unable to see them.
    pub processes: Vec<u32>,
    /// Percentage of the last sample period (up to a second) in which a kernel ran.
    pub utilization: Option<u32>,
}

/// Finds out which processes use the GPU at a PCI address. An error says why NVML can't be asked.
pub fn busy(at: &str) -> Result<Busy, String> {
    busy_by(OsStr::new("libnvidia-ml.so.1"), at)
}

/// Finds out which processes use a GPU, loading the library by this name or path ([`busy`]).
pub fn busy_by(library: &OsStr, at: &str) -> Result<Busy, String> {
    let nvml = Nvml::builder()
        .lib_path(library)
        .init()
        .map_err(|e| format!("{}: {}", library.to_string_lossy(), chain(&e)))?;
    let asked = nvml.device_by_pci_bus_id(at).and_then(|device| {
        let own = std::process::id();
        let processes =
            device.running_compute_processes()?.iter().map(|p| p.pid).filter(|pid| *pid != own).collect();
        // Not every GPU reports this.
        Ok(Busy { processes, utilization: device.utilization_rates().ok().map(|rates| rates.gpu) })
    });
    asked.map_err(|e| format!("NVML, GPU at {at}: {}", chain(&e)))
}

fn chain(e: &NvmlError) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(e) = source {
        text = format!("{text}: {e}");
        source = e.source();
    }
    text
}

fn printable(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(96).collect()
}

/// Whether the control daemon of the multi-process service has its pipe where CUDA programs look
/// for it.
fn mps_service() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or("/tmp/nvidia-mps".into(), PathBuf::from);
    folder.join("control").exists()
}

fn mig(device: &Device<'_>) -> Option<Mig> {
    if device.mig_mode().ok()?.current == 0 {
        return None;
    }
    let most = device.mig_device_count().unwrap_or(0).min(MOST_INSTANCES);
    // Indices without an instance answer that nothing is found.
    let names = (0..most).filter_map(|i| device.mig_device_by_index(i).ok()?.name().ok().map(printable));
    Some(Mig { instances: names.collect() })
}

fn nvlinks(device: &Device<'_>, gpus: &[Address]) -> Vec<NvLink> {
    let mut ends: BTreeMap<NvLinkEnd, u32> = BTreeMap::new();
    for link in 0..MOST_NVLINKS {
        let wrapper = device.link_wrapper_for(link);
        match wrapper.is_active() {
            Ok(true) => {}
            Ok(false) | Err(NvmlError::NotSupported) => continue,
            // The last link has been passed.
            Err(_) => break,
        }
        // The address is that of a GPU of this host, or else of a switch, which virtual machines do
        // not see. (nvml-wrapper 0.13.0 has `remote_device_type`, which always returns unknown,
        // because the answer goes into a temporary.)
        let remote = wrapper.remote_pci_info().ok().and_then(|p| p.bus_id.parse::<Address>().ok());
        let end = remote.filter(|at| gpus.contains(at)).map_or(NvLinkEnd::Switch, NvLinkEnd::Gpu);
        *ends.entry(end).or_default() += 1;
    }
    let c2c = c2c_links(device);
    if c2c > 0 {
        ends.insert(NvLinkEnd::Cpu, c2c);
    }
    ends.into_iter().map(|(to, links)| NvLink { to, links }).collect()
}

/// How many links of NVLink-C2C join the GPU and the processor.
fn c2c_links(device: &Device<'_>) -> u32 {
    let count = device.field_values_for(&[FieldId(NVML_FI_DEV_C2C_LINK_COUNT)]);
    // A GPU that has none, or a driver that does not know the field, answers with an error.
    match count.ok().and_then(|mut values| values.pop()?.ok()?.value.ok()) {
        Some(SampleValue::U32(links)) => links,
        _ => 0,
    }
}

fn peer_access(device: &Device<'_>, other: &Device<'_>) -> Option<bool> {
    let can = |what| device.p2p_status(other, what).ok().map(|s| s == P2pStatus::Ok);
    Some(can(P2pCapabilitiesIndex::Read)? && can(P2pCapabilitiesIndex::Write)?)
}
