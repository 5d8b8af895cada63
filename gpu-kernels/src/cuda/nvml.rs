//! Who else uses a GPU: NVML, asked for that alone.
//!
//! The driver's own interface does not tell, nor does /proc. NVML's library comes
//! with the driver; it is opened, asked and closed. Functions and layouts are those
//! of NVIDIA's "NVML API Reference Manual", Device Queries.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::guard::symbol;
use crate::cpu::with_source;

const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;

/// nvmlProcessInfo_t (the third version's).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// What other programs do with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Processes with a CUDA context there, our own left out. Their ids are those of
    /// the host, in a container maybe not ours to see.
    pub processes: Vec<u32>,
    /// Per cent of the last sample period (up to a second) in which a kernel ran.
    pub utilization: Option<u32>,
}

/// Asks NVML about the GPU at a PCI address ("0000:3b:00.0"). `Err` is a sentence:
/// nobody can be asked.
pub fn busy(pci: &str) -> Result<Busy, String> {
    type Init = unsafe extern "C" fn() -> c_int;
    type ByPci = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int;
    type Utilization = unsafe extern "C" fn(*mut c_void, *mut [c_uint; 2]) -> c_int;

    // SAFETY: NVIDIA's own library; its constructors are made for being loaded by
    // any thread.
    let library = unsafe { Library::new("libnvidia-ml.so.1") }
        .map_err(|error| format!("libnvidia-ml.so.1 does not load ({})", with_source(&error)))?;
    // SAFETY: nvml.h declares these symbols with these types, a result being an int.
    let (init, shutdown, by_pci, processes, utilization) = unsafe {
        (
            symbol::<Init>(&library, "nvmlInit_v2")?,
            symbol::<Init>(&library, "nvmlShutdown")?,
            symbol::<ByPci>(&library, "nvmlDeviceGetHandleByPciBusId_v2")?,
            symbol::<Processes>(&library, "nvmlDeviceGetComputeRunningProcesses_v3")?,
            symbol::<Utilization>(&library, "nvmlDeviceGetUtilizationRates").ok(),
        )
    };
    let failed = |call: &str, code: c_int| format!("NVML: {call} failed with code {code}");
    // SAFETY: takes nothing.
    let code = unsafe { init() };
    if code != SUCCESS {
        return Err(failed("nvmlInit", code));
    }
    let ask = || {
        let name = CString::new(pci).map_err(|_| format!("{pci:?} is no PCI address"))?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a C string; writes one handle.
        let code = unsafe { by_pci(name.as_ptr(), &mut device) };
        if code != SUCCESS {
            return Err(failed("nvmlDeviceGetHandleByPciBusId", code));
        }
        let mut found = vec![ProcessInfo::default(); 64];
        let mut count = found.len() as c_uint;
        // SAFETY: writes at most `count` entries, and how many there are.
        let code = unsafe { processes(device, &mut count, found.as_mut_ptr()) };
        // More than fit: nobody needs all of them.
        if code != SUCCESS && code != INSUFFICIENT_SIZE {
            return Err(failed("nvmlDeviceGetComputeRunningProcesses", code));
        }
        found.truncate(count as usize);
        let own = std::process::id();
        let processes = found.iter().map(|p| p.pid).filter(|pid| *pid != own).collect();
        let mut rates = [0; 2];
        let utilization = utilization.filter(|ask| {
            // SAFETY: writes two ints.
            unsafe { ask(device, &mut rates) == SUCCESS }
        });
        Ok(Busy { processes, utilization: utilization.map(|_| rates[0]) })
    };
    let answer = ask();
    // SAFETY: initialised above.
    unsafe { shutdown() };
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With or without the library: an answer or a sentence, and no panic.
    #[test]
    fn a_wrong_address_is_a_sentence() {
        let error = busy("no address").unwrap_err();
        assert!(error.contains("libnvidia-ml") || error.contains("NVML"), "{error}");
    }
}
