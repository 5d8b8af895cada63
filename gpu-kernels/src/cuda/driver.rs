//! Calls of the CUDA driver that can't panic.
//!
//! cudarc's own entry points panic where libcuda is missing or lacks a symbol, and read the result
//! as a Rust enum, which a newer driver's code would make undefined behaviour. So this module takes
//! only the types from cudarc's bindings and makes the calls itself: each symbol is looked up once,
//! in the library that is then called, and results are plain numbers. Each signature is checked
//! against cudarc's at compile time.
#![allow(non_snake_case)] // the driver's own names

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::ptr::null;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D_st, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUfunction, CUfunction_attribute,
    CUipcMemHandle, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemRangeHandleType, CUmemcpyAttributes, CUmodule,
    CUpointer_attribute_enum, CUresult, CUstream, CUstreamBatchMemOpParams, CUstreamCaptureMode, CUuuid,
};
use libloading::Library;

use crate::error::DeviceError;
use crate::library;

/// The result of a call, in place of `CUresult`.
pub(crate) type Code = u32;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const NOT_READY: Code = 600;

/// A handle of the driver.
#[derive(Clone, Copy)]
pub(super) struct Raw<T>(pub(super) T);

// SAFETY: the driver's handles name the driver's own objects; its functions accept them from any
// thread and lock internally. This code only stores the handles and passes them on.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as for Send: a handle is a name that any thread may pass to the driver.
unsafe impl<T> Sync for Raw<T> {}

/// The oldest CUDA version of the driver that this code supports.
const OLDEST: i32 = 12000;

macro_rules! driver {
    (
        $(fn $name:ident($($type:ty),*);)*
        older: $(fn $older:ident = $newer:ident($($older_type:ty),*);)*
        optional: $(fn $maybe:ident($($maybe_type:ty),*);)*
    ) => {
        /// The functions of libcuda that this crate calls.
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> Code,)*
            $(pub(crate) $older: unsafe extern "C" fn($($older_type),*) -> Code,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_type),*) -> Code>,)*
            cuGetErrorName: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
            cuGetErrorString: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
            /// cudarc's bindings for CUDA 13 have only later forms, which drivers for CUDA 12.0 lack.
            pub(crate) cuCtxCreate_v2: Option<unsafe extern "C" fn(*mut CUcontext, c_uint, CUdevice) -> Code>,
            /// Keeps the functions mapped.
            _library: Library,
        }

        // cudarc's generated bindings agree with each signature above.
        $(const _: unsafe fn($($type),*) -> CUresult = sys::$name;)*
        $(const _: unsafe fn($($older_type),*) -> CUresult = sys::$newer;)*
        $(const _: unsafe fn($($maybe_type),*) -> CUresult = sys::$maybe;)*

        /// The functions without which a library is no driver.
        #[cfg(test)]
        pub(super) const SYMBOLS: &[&str] = &["cuGetErrorName", "cuGetErrorString", $(stringify!($name),)* $(stringify!($older)),*];

        impl Driver {
            fn resolve(library: Library) -> Result<Self, String> {
                Ok(Self {
                    $(
                        // SAFETY: cuda.h declares the symbol with this type (the constants above
                        // check it against cudarc's bindings of cuda.h); an enum result is a 32-bit
                        // number in C.
                        $name: unsafe { symbol(&library, stringify!($name)) }?,
                    )*
                    $(
                        // SAFETY: cuda.h declares the symbol with this type, an enum result being a
                        // 32-bit number in C.
                        $older: unsafe { symbol(&library, stringify!($older)) }?,
                    )*
                    $(
                        // SAFETY: cuda.h declares the symbol with this type, an enum result being a
                        // 32-bit number in C.
                        $maybe: unsafe { symbol(&library, stringify!($maybe)) }.ok(),
                    )*
                    // SAFETY: cuda.h declares both so, except that they take the code by value as
                    // an enum, for which a 32-bit number can stand.
                    cuGetErrorName: unsafe { symbol(&library, "cuGetErrorName") }?,
                    // SAFETY: cuda.h declares it so, except for the code, for which a 32-bit number
                    // can stand.
                    cuGetErrorString: unsafe { symbol(&library, "cuGetErrorString") }?,
                    // SAFETY: every driver has the symbol with this type (cuda.h declared it so until CUDA 12), except that it
                    // returns the code as an enum.
                    cuCtxCreate_v2: unsafe { symbol(&library, "cuCtxCreate_v2") }.ok(),
                    _library: library,
                })
            }
        }
    };
}

driver! {
    fn cuInit(c_uint);
    fn cuDriverGetVersion(*mut c_int);
    fn cuDeviceGetCount(*mut c_int);
    fn cuDeviceGet(*mut CUdevice, c_int);
    fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
    fn cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    fn cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(CUdevice);
    fn cuCtxPushCurrent_v2(CUcontext);
    fn cuCtxPopCurrent_v2(*mut CUcontext);
    fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
    fn cuMemFree_v2(CUdeviceptr);
    fn cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    fn cuMemHostUnregister(*mut c_void);
    fn cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    fn cuStreamDestroy_v2(CUstream);
    fn cuStreamSynchronize(CUstream);
    fn cuEventCreate(*mut CUevent, c_uint);
    fn cuEventDestroy_v2(CUevent);
    fn cuEventRecord(CUevent, CUstream);
    fn cuEventQuery(CUevent);
    fn cuModuleLoadData(*mut CUmodule, *const c_void);
    fn cuModuleUnload(CUmodule);
    fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    fn cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
    fn cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
    fn cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
        *mut *mut c_void
    );
    // Every driver's library has this name; cudarc's bindings for CUDA 13 have only the name of
    // 12.8 and later, which has the same type.
    older:
    fn cuEventElapsedTime = cuEventElapsedTime_v2(*mut f32, CUevent, CUevent);
    optional:
    fn cuCtxGetDevice(*mut CUdevice);
    // CUDA 12.4 and later.
    fn cuFuncLoad(CUfunction);
    fn cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    // Only for RDMA devices that write into the GPU's memory. A stub of the driver may lack these.
    fn cuMemGetHandleForAddressRange(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong);
    fn cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope);
    // Only for queues of copies and stores.
    fn cuStreamQuery(CUstream);
    fn cuStreamBatchMemOp_v2(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
    fn cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
    // Only for a context beside the primary one.
    fn cuCtxDestroy_v2(CUcontext);
    fn cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D_st, CUstream);
    // Only for a copier, and for its clients. The batch needs CUDA 13.
    fn cuMemcpyBatchAsync_v2(
        *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CUmemcpyAttributes, *mut usize, usize, CUstream
    );
    fn cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    fn cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    fn cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
    fn cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
    fn cuIpcCloseMemHandle(CUdeviceptr);
    fn cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
    fn cuMemExportToShareableHandle(
        *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong
    );
    fn cuMemImportFromShareableHandle(
        *mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType
    );
    fn cuMemGetAllocationGranularity(
        *mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags
    );
    fn cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    fn cuMemRelease(CUmemGenericAllocationHandle);
    fn cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    fn cuMemAddressFree(CUdeviceptr, usize);
    fn cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    fn cuMemUnmap(CUdeviceptr, usize);
    fn cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    // Copies between any two memories, and other GPUs' memory.
    fn cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    fn cuStreamWaitEvent(CUstream, CUevent, c_uint);
    fn cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    fn cuCtxEnablePeerAccess(CUcontext, c_uint);
    // What memory an address is of.
    fn cuPointerGetAttribute(*mut c_void, CUpointer_attribute_enum, CUdeviceptr);
}

/// Looks a symbol up in a library.
///
/// # Safety
/// `name` must have the type `T`, a function pointer.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller promises that the symbol has the type `T`.
    match unsafe { library.get::<T>(name.as_bytes()) } {
        Ok(found) => Ok(*found),
        Err(error) => {
            Err(format!("the library lacks {name} ({}): it is a stub, or too old", library::explain(&error)))
        }
    }
}

/// The CUDA driver and GPUs that [`probe`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// How many GPUs this process sees.
    pub devices: u32,
    /// The CUDA version that the driver supports: (13, 0), say.
    pub driver: (u32, u32),
}

impl fmt::Display for CudaInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GPU(s), driver for CUDA {}.{}", self.devices, self.driver.0, self.driver.1)
    }
}

/// Looks for a CUDA driver and GPUs; an error is a sentence that says why there are none. Opens the
/// driver once for the process and makes no context.
pub fn probe() -> Result<CudaInfo, String> {
    driver().map(|(_, info)| info.clone())
}

/// The driver, which is opened and initialised on the first call.
pub(crate) fn driver() -> Result<(&'static Driver, &'static CudaInfo), String> {
    static DRIVER: OnceLock<Result<(Driver, CudaInfo), String>> = OnceLock::new();
    match DRIVER.get_or_init(open) {
        Ok((driver, info)) => Ok((driver, info)),
        Err(reason) => Err(reason.clone()),
    }
}

fn open() -> Result<(Driver, CudaInfo), String> {
    // Open the soname, never libcuda.so: a toolkit's folder of stubs on LD_LIBRARY_PATH has a
    // libcuda.so that serves no call.
    // SAFETY: NVIDIA's driver library, or what the administrator put in its place; its constructors
    // may run on any thread.
    let library = unsafe { Library::new("libcuda.so.1") }
        .map_err(|error| format!("libcuda.so.1 does not load ({})", library::explain(&error)))?;
    let driver = Driver::resolve(library).map_err(|reason| format!("libcuda.so.1: {reason}"))?;
    let failed = |call: &str, code| {
        let (name, text) = driver.explain(code);
        format!("{call} failed with {name} ({code}): {text}")
    };
    // SAFETY: 0 is the only value of the flags.
    let code = unsafe { (driver.cuInit)(0) };
    if code != SUCCESS {
        return Err(failed("cuInit", code));
    }
    let mut version = 0;
    // SAFETY: writes one int.
    let code = unsafe { (driver.cuDriverGetVersion)(&mut version) };
    if code != SUCCESS {
        return Err(failed("cuDriverGetVersion", code));
    }
    if version < OLDEST {
        return Err(format!(
            "the driver speaks CUDA {}.{}, and {}.{} is the oldest that will do",
            version / 1000,
            version % 1000 / 10,
            OLDEST / 1000,
            OLDEST % 1000 / 10
        ));
    }
    let mut count = 0;
    // SAFETY: writes one int.
    let code = unsafe { (driver.cuDeviceGetCount)(&mut count) };
    if code != SUCCESS {
        return Err(failed("cuDeviceGetCount", code));
    }
    if count <= 0 {
        return Err("the driver is there but shows no GPU (CUDA_VISIBLE_DEVICES may hide it)".to_owned());
    }
    let info =
        CudaInfo { devices: count as u32, driver: ((version / 1000) as u32, (version % 1000 / 10) as u32) };
    Ok((driver, info))
}

impl Driver {
    /// The name of a code and the driver's sentence for it.
    pub(crate) fn explain(&self, code: Code) -> (String, String) {
        let ask = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = null();
            // SAFETY: writes one pointer: to a static string, or null for a code that the driver
            // does not know.
            let answer = unsafe { function(code, &mut text) };
            (answer == SUCCESS && !text.is_null())
                // SAFETY: the pointer is not null, as checked just before.
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        (
            ask(self.cuGetErrorName).unwrap_or_else(|| "an unknown code".to_owned()),
            ask(self.cuGetErrorString).unwrap_or_else(|| "the driver has no text for it".to_owned()),
        )
    }

    /// Returns an error unless `code` is success.
    pub(crate) fn check(
        &self,
        call: &'static str,
        code: Code,
        doing: impl FnOnce() -> String,
    ) -> Result<(), DeviceError> {
        if code == SUCCESS {
            return Ok(());
        }
        let (name, text) = self.explain(code);
        Err(DeviceError::Cuda { call, name, code, text, doing: doing(), hint: hint(code) })
    }
}

/// The remedy for a code, empty for codes that have none.
fn hint(code: Code) -> &'static str {
    match code {
        2 => "; ask for less, or look in nvidia-smi which process holds the device's memory",
        3 => "; look in the kernel log for what became of the device",
        4 => "; the process is ending: drop the device's handles before main returns",
        34 => "; a toolkit's stub libcuda was loaded: take its folder off LD_LIBRARY_PATH",
        46 | 101 => "; see nvidia-smi: the device may be in exclusive mode, or split by MIG",
        200 | 209 => {
            "; the image has no code for this device: rebuild where nvcc is, or remove the build's fatbins so that NVRTC compiles for it"
        }
        218 | 222 => {
            "; the driver is older than the compiler: update the driver, or set PUSHGATE_NVCC to an older nvcc"
        }
        700 | 714..=718 => {
            "; a kernel used an address that it may not: the context is lost, and the process must start again"
        }
        701 => "; take fewer threads or less shared memory for a block",
        702 => "; a watchdog ended the kernel: use a device without a display",
        712 => "; another range that overlaps this one is registered: register the whole mapping once",
        719 => {
            "; the kernel failed: the context is lost, and the process must start again (compute-sanitizer finds the line)"
        }
        800 => "; io memory needs a driver and a user that may map it: see docs/driver.md",
        801 => "; the device or this platform does not offer it",
        802 => "; the system is not ready (on NVSwitch machines: start nvidia-fabricmanager)",
        803 | 804 => {
            "; the driver's library and its kernel module differ: reboot, or remove the compat package"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::stub::{CHILD, build_stub, run_child, stub_source};
    use super::*;
    use crate::cache::tests::Folder;
    use crate::choose::{DeviceChoice, available_executors, choose};

    /// What the child process prints. It must run in a process of its own: a library stays loaded
    /// once it has been, and the driver that was found is kept.
    #[test]
    #[ignore = "other tests start this in processes of their own"]
    fn child() {
        assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
        println!("PROBE {:?}", probe());
        println!("CUDA {}", choose(DeviceChoice::Cuda).map(|_| ()).unwrap_err());
        println!(
            "AUTO {}",
            choose(DeviceChoice::Auto).map(|(_, why)| why).unwrap_or_else(|error| error.to_string())
        );
        println!("AVAILABLE {:?}", available_executors());
    }

    fn probe_in_child(libraries: &Path) -> String {
        run_child("cuda::driver::tests::child", libraries)
    }

    fn whole_stub(init: u32, version: u32, devices: u32) -> String {
        stub_source(init, version, devices, "")
    }

    #[test]
    fn without_libcuda_there_is_a_sentence() {
        // A file that is not a library stands for a missing library, so that the test does the same
        // where a driver is installed.
        let folder = Folder::new("no-libcuda");
        std::fs::write(folder.0.join("libcuda.so.1"), "no library").unwrap();
        let text = probe_in_child(&folder.0);
        assert!(text.contains("PROBE Err(\"libcuda.so.1 does not load"), "{text}");
        assert!(text.contains("CUDA CUDA is unavailable: libcuda.so.1"), "{text}");
        assert!(text.contains("AUTO cpu: "), "{text}");
    }

    #[test]
    fn a_library_without_our_symbols_is_named() {
        let folder = Folder::new("lacking");
        build_stub(
            &folder,
            "int cuInit(unsigned f) { return 0; }\nint cuDriverGetVersion(int *v) { *v = 13000; return 0; }",
        );
        let text = probe_in_child(&folder.0);
        assert!(text.contains("lacks cuDeviceGetCount"), "{text}");
        assert!(text.contains("AUTO cpu: "), "{text}");
    }

    #[test]
    fn a_failing_init_is_named() {
        let folder = Folder::new("init");
        build_stub(&folder, &whole_stub(100, 13000, 1));
        let text = probe_in_child(&folder.0);
        assert!(text.contains("cuInit failed with CUDA_ERROR_FAKE (100)"), "{text}");
        assert!(text.contains("AUTO cpu: "), "{text}");
    }

    #[test]
    fn an_old_driver_and_no_device_are_named() {
        let old = Folder::new("old");
        build_stub(&old, &whole_stub(0, 11040, 1));
        let text = probe_in_child(&old.0);
        assert!(text.contains("speaks CUDA 11.4, and 12.0 is the oldest"), "{text}");

        let none = Folder::new("none");
        build_stub(&none, &whole_stub(0, 13000, 0));
        let text = probe_in_child(&none.0);
        assert!(text.contains("shows no GPU"), "{text}");
    }

    #[test]
    fn a_code_that_nobody_knows_is_an_error_like_any() {
        let folder = Folder::new("unknown");
        build_stub(&folder, &whole_stub(0, 13000, 1));
        let text = probe_in_child(&folder.0);
        assert!(text.contains("CUDA cuDeviceGet failed with CUDA_ERROR_FAKE (12345)"), "{text}");
        // A GPU that is present and fails is reported; the CPU does not silently replace it.
        assert!(text.contains("AUTO cuDeviceGet failed"), "{text}");
    }
}
