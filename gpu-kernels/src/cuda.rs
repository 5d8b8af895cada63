//! The executor on an NVIDIA GPU.
//!
//! A kernel may run as long as the program does and wait for other kernels. So this code never
//! waits for the whole device and never uses the default stream: copies have a stream of their own,
//! an event tells when a launch has ended, and memory is freed only when no launch is under way.
//! The context is pushed for each call and popped after it, so threads of other libraries (NCCL's,
//! say) keep their own context.

mod compile;
mod guard;
mod peer;
mod rdma;
mod resident;

use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute_enum as Attribute, CUevent, CUfunction,
    CUfunction_attribute_enum as FunctionAttribute, CUmodule, CUstream,
    CUstreamCaptureMode_enum as CaptureMode,
};

use pushgate_driver_shim::fork::{OwnedHere, Owner};

pub use self::guard::{CudaInfo, probe};
use self::guard::{Driver, NOT_READY, SUCCESS};
pub(crate) use self::peer::{CudaCopies, CudaPoint};
use self::rdma::Rdma;
use self::resident::Presence;
pub(crate) use self::resident::{Follows, Resident};
use crate::build_support::kernel_names;
use crate::embedded::{self, FATBINS, SOURCES};
use crate::error::{DeviceError, Result};
use crate::executor::{
    Access, BufferMemory, DeviceBuffer, DmaBuf, Executor, Launch, LaunchQueue, LoadedModule, Registration,
    Running, RunningKernel, Stream, WaitOutcome,
};
use crate::lock::lock;
use crate::module::{Cache, Source, list};

const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_TIMED: u32 = 0;
const EVENT_UNTIMED: u32 = 2;
const NOT_FOUND: u32 = 500;
/// Dynamic shared memory that every kernel may have without cuFuncSetAttribute.
const SHARED_UNASKED: u32 = 48 << 10;
/// The whole device, in the unit of `Active::share`.
const WHOLE: u64 = 1 << 32;

/// A handle of the driver.
#[derive(Clone, Copy)]
struct Raw<T>(T);

// SAFETY: the driver's handles name the driver's own objects; its functions accept them from any
// thread and lock internally. This code only stores the handles and passes them on.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as for Send: a handle is a name that any thread may pass to the driver.
unsafe impl<T> Sync for Raw<T> {}

// -------------------------------------------------------------------- context

/// One GPU's primary context, with the state that everything using it in this process shares.
pub(crate) struct Context {
    owner: Owner,
    driver: &'static Driver,
    index: u32,
    device: CUdevice,
    context: Raw<CUcontext>,
    name: String,
    pci: String,
    version: (u32, u32),
    sm: u32,
    processors: u32,
    max_shared: u32,
    read_only: bool,
    rdma: Rdma,
    /// The stream for copies to and from buffers, and for filling them.
    copies: Raw<CUstream>,
    ledger: Mutex<Ledger>,
}

/// What runs on the device, and what waits until nothing runs.
#[derive(Default)]
struct Ledger {
    active: Vec<Active>,
    /// Freed memory, kept here until nothing runs. cuMemFree waits for the device, and would wait
    /// for ever for a kernel that waits for the calling thread.
    freed: Vec<u64>,
    /// Resident kernels, which start and end by themselves.
    residents: Vec<Weak<Presence>>,
}

impl Ledger {
    /// True if no kernel runs that could wait for a thread of this process.
    fn is_quiet(&mut self) -> bool {
        self.residents.retain(|resident| resident.strong_count() > 0);
        self.active.is_empty() && !self.residents.iter().filter_map(Weak::upgrade).any(|r| (r.present)())
    }
}

/// A launch that has not been seen to end.
struct Active {
    id: u64,
    end: Raw<CUevent>,
    /// How much of the device the launch's cooperating blocks fill, in units of which `WHOLE` is
    /// all.
    share: u64,
    blocks: u32,
}

/// Lets this thread make any call of the driver while another thread captures a graph.
///
/// In the capture mode `global`, the default, calls that the driver holds for unsafe (registering
/// or allocating memory, querying an event) fail in other threads and end the capture with an
/// error. While this value lives the thread's mode is relaxed. None of our calls concerns a stream
/// that captures.
struct Relaxed {
    driver: &'static Driver,
    before: Option<CaptureMode>,
    /// Makes the type not Send: the capture mode belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    fn new(driver: &'static Driver) -> Self {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let before = driver.cuThreadExchangeStreamCaptureMode.and_then(|exchange| {
            // SAFETY: reads one enum and writes the previous mode, which is one of the three that
            // the enum has.
            (unsafe { exchange(&mut mode) } == SUCCESS).then_some(mode)
        });
        Self { driver, before, _thread: PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let (Some(mut mode), Some(exchange)) = (self.before, self.driver.cuThreadExchangeStreamCaptureMode)
        {
            // SAFETY: reads and writes one enum, which holds the mode that the driver gave before.
            unsafe { exchange(&mut mode) };
        }
    }
}

/// Passes a kernel's parameters as one block with its size. With a list of pointers the driver
/// would read as much from each pointer as the kernel's own signature says.
fn by_size(bytes: &mut [u8], size: &mut usize) -> [*mut c_void; 5] {
    [
        sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
        bytes.as_mut_ptr().cast(),
        sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
        (&raw mut *size).cast(),
        sys::CU_LAUNCH_PARAM_END_AS_INT as usize as *mut c_void,
    ]
}

/// Makes the context current on this thread while it lives, and keeps our calls from disturbing
/// other threads' captures.
struct Current<'a> {
    context: &'a Context,
    /// Dropped before the context is popped, because the call may need a context.
    relaxed: Option<Relaxed>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        drop(self.relaxed.take());
        let mut popped = null_mut();
        // SAFETY: writes one handle. This code pushed the context on this thread, and every later
        // push has been popped.
        unsafe { (self.context.driver.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

impl Context {
    fn open(index: u32) -> Result<Self> {
        let (driver, info) = guard::driver().map_err(|reason| DeviceError::CudaUnavailable { reason })?;
        if index >= info.devices {
            return Err(DeviceError::NoSuchDevice { index, count: info.devices });
        }
        let doing = || format!("opening device {index}");
        let _relaxed = Relaxed::new(driver);
        let mut device = 0;
        // SAFETY: writes one handle.
        driver.check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut device, index as i32) }, doing)?;
        let attribute = |which: Attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: writes one int about a valid device.
            let code = unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, device) };
            driver.check("cuDeviceGetAttribute", code, || format!("asking device {index} for {which:?}"))?;
            Ok(value.max(0) as u32)
        };
        let text =
            |call, function: unsafe extern "C" fn(*mut c_char, i32, CUdevice) -> u32| -> Result<String> {
                let mut buffer = [0u8; 256];
                // SAFETY: writes at most the given length, with a NUL at the end; the last byte is
                // kept back.
                let code = unsafe { function(buffer.as_mut_ptr().cast(), 255, device) };
                driver.check(call, code, doing)?;
                Ok(CStr::from_bytes_until_nul(&buffer)
                    .map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned()))
            };
        let name = text("cuDeviceGetName", driver.cuDeviceGetName)?;
        let pci = text("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId)?;
        let sm = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if sm < 70 {
            return Err(DeviceError::UnfitDevice {
                index,
                name,
                what: format!("sm_{sm} has no system-scope release and acquire"),
                remedy: "take a GPU of sm_70 or later, or the device `cpu`",
            });
        }
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let max_shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let read_only = attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0;
        let rdma = Rdma::ask(driver, |which| attribute(which).unwrap_or(0));

        let mut context = null_mut();
        // SAFETY: writes one handle; `drop` releases it.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", code, doing)?;
        let mut opened = Self {
            owner: Owner::here(),
            driver,
            index,
            device,
            context: Raw(context),
            name,
            pci,
            version: info.driver,
            sm,
            processors,
            max_shared,
            read_only,
            rdma,
            copies: Raw(null_mut()),
            ledger: Mutex::default(),
        };
        // With the highest priority, and so on another hardware queue than the kernels.
        opened.copies = Raw(opened.make_stream(true)?);
        Ok(opened)
    }

    fn current(&self) -> Result<Current<'_>> {
        // CUDA does not work in a child of `fork`: calls fail there, or never return.
        self.owner.check()?;
        // SAFETY: the context is retained as long as self lives.
        let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context.0) };
        self.check("cuCtxPushCurrent", code, || "entering the context".to_owned())?;
        Ok(Current { context: self, relaxed: Some(Relaxed::new(self.driver)) })
    }

    fn check(&self, call: &'static str, code: u32, doing: impl FnOnce() -> String) -> Result<()> {
        self.driver.check(call, code, || format!("{} on device {} ({})", doing(), self.index, self.name))
    }

    /// Logs an error in a drop, which has no caller to return it to.
    fn note(&self, call: &'static str, code: u32, doing: impl FnOnce() -> String) {
        if let Err(error) = self.check(call, code, doing) {
            tracing::warn!("{error}");
        }
    }

    fn make_stream(&self, first: bool) -> Result<CUstream> {
        let _current = self.current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two ints.
        let code = unsafe { (self.driver.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", code, || "making a stream".to_owned())?;
        let mut stream = null_mut();
        let priority = if first { greatest } else { least };
        // SAFETY: writes one handle.
        let code =
            unsafe { (self.driver.cuStreamCreateWithPriority)(&mut stream, STREAM_NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", code, || "making a stream".to_owned())?;
        Ok(stream)
    }

    /// Launches a kernel without any checks. The context must be current.
    ///
    /// # Safety
    /// Function and stream belong to this context, and until the kernel ends, it may do what it
    /// does with the memory that the parameters point to.
    unsafe fn start(&self, function: CUfunction, stream: CUstream, launch: Launch, params: &[u8]) -> u32 {
        let mut bytes = params.to_vec();
        let mut size = bytes.len();
        let mut extra = by_size(&mut bytes, &mut size);
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        unsafe {
            (self.driver.cuLaunchKernel)(
                function,
                launch.grid,
                1,
                1,
                launch.block,
                1,
                1,
                launch.shared_bytes,
                stream,
                null_mut(),
                extra.as_mut_ptr(),
            )
        }
    }

    /// Waits for the stream of copies, and for nothing else.
    fn finish_copies(&self, doing: impl FnOnce() -> String) -> Result<()> {
        // SAFETY: the stream is our own.
        let code = unsafe { (self.driver.cuStreamSynchronize)(self.copies.0) };
        self.check("cuStreamSynchronize", code, doing)
    }

    /// Asks whether an event is over. The context must be current.
    fn query(&self, event: CUevent) -> u32 {
        // SAFETY: the event is alive: either an `Event` holds it, or the ledger still does (the
        // ledger drops an event's entry before the event is destroyed).
        unsafe { (self.driver.cuEventQuery)(event) }
    }

    /// Removes launches that have ended, and frees the memory that waited for them. The context
    /// must be current.
    fn sweep(&self, ledger: &mut Ledger) {
        ledger.active.retain(|active| self.query(active.end.0) == NOT_READY);
        if ledger.is_quiet() {
            for addr in ledger.freed.drain(..) {
                // SAFETY: allocated by cuMemAlloc; the buffer that owned it is gone and put it here
                // once.
                let code = unsafe { (self.driver.cuMemFree_v2)(addr) };
                self.note("cuMemFree", code, || format!("freeing {addr:#x}"));
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        // Everything that refers to the context holds an Arc of it, so now nothing runs and every
        // buffer is gone.
        if let Ok(current) = self.current() {
            self.sweep(&mut lock(&self.ledger));
            if !self.copies.0.is_null() {
                // SAFETY: made by this value and destroyed only here.
                let code = unsafe { (self.driver.cuStreamDestroy_v2)(self.copies.0) };
                self.note("cuStreamDestroy", code, || "destroying the stream of copies".to_owned());
            }
            drop(current);
        }
        let _relaxed = Relaxed::new(self.driver);
        // SAFETY: retained once in `open`.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
        self.note("cuDevicePrimaryCtxRelease", code, || "releasing the context".to_owned());
    }
}

// --------------------------------------------------------------------- events

/// An event of the driver, destroyed on drop.
struct Event {
    context: Arc<Context>,
    raw: Raw<CUevent>,
}

impl Event {
    fn new(context: &Arc<Context>, flags: u32) -> Result<Self> {
        let _current = context.current()?;
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (context.driver.cuEventCreate)(&mut raw, flags) };
        context.check("cuEventCreate", code, || "making an event".to_owned())?;
        Ok(Self { context: context.clone(), raw: Raw(raw) })
    }

    /// Records the event on a stream. The context must be current.
    fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: both are valid and belong to this context.
        let code = unsafe { (self.context.driver.cuEventRecord)(self.raw.0, stream) };
        self.context.check("cuEventRecord", code, || "marking a place in a stream".to_owned())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        // SAFETY: made by this value and destroyed only here.
        let code = unsafe { (self.context.driver.cuEventDestroy_v2)(self.raw.0) };
        self.context.note("cuEventDestroy", code, || "destroying an event".to_owned());
    }
}

// -------------------------------------------------------------------- modules

struct Function {
    raw: Raw<CUfunction>,
    /// Bytes of parameters, where the driver reports them or our own tables do.
    params: Option<u32>,
    /// The dynamic shared memory that the function has been allowed so far.
    shared: Mutex<u32>,
}

struct CudaModule {
    name: String,
    context: Arc<Context>,
    /// The modules, each with its source's kernels where these are known: asking a module for a
    /// kernel that it does not have counts as an error in compute-sanitizer.
    modules: Vec<(Raw<CUmodule>, Option<Vec<String>>)>,
    embedded: bool,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

impl CudaModule {
    /// Loads the images, and the code of every kernel known by name.
    ///
    /// Kernels are loaded now rather than at their first launch, because loading then would wait
    /// for whatever runs on the device.
    fn load(
        context: &Arc<Context>,
        name: &str,
        images: &[(String, Vec<u8>)],
        known: &[String],
        embedded: bool,
    ) -> Result<Arc<Self>> {
        let current = context.current()?;
        let mut module = Self {
            name: name.to_owned(),
            context: context.clone(),
            modules: Vec::new(),
            embedded,
            functions: Mutex::default(),
        };
        for (image_name, image) in images {
            // The driver reads the header as 8-byte words.
            let mut aligned = vec![0u128; image.len() / 16 + 1];
            // SAFETY: the copy is at least as long as the image; both are plain bytes.
            unsafe {
                aligned.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(image.as_ptr(), image.len())
            };
            let mut raw = null_mut();
            // SAFETY: a whole cubin or fatbin, whose header says its length.
            let code = unsafe { (context.driver.cuModuleLoadData)(&mut raw, aligned.as_ptr().cast()) };
            context.check("cuModuleLoadData", code, || {
                format!("loading {image_name} ({} bytes)", image.len())
            })?;
            let source = SOURCES.iter().find(|(name, _)| embedded && image_name.starts_with(name));
            module.modules.push((Raw(raw), source.map(|(_, text)| kernel_names(text))));
        }
        for kernel in known {
            match module.find(kernel) {
                // The name stands in a comment or behind an #if, so the module need not have such a
                // kernel.
                Ok(_) | Err(DeviceError::UnknownKernel { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        drop(current);
        Ok(Arc::new(module))
    }

    /// Finds a kernel in the modules. The context must be current.
    fn find(&self, kernel: &str) -> Result<Arc<Function>> {
        let mut functions = lock(&self.functions);
        if let Some(found) = functions.get(kernel) {
            return Ok(found.clone());
        }
        let unknown = |functions: &HashMap<String, Arc<Function>>| {
            let mut known: Vec<String> = functions.keys().cloned().collect();
            known.sort();
            DeviceError::UnknownKernel {
                kernel: kernel.to_owned(),
                module: self.name.clone(),
                known: list(&known),
            }
        };
        let Ok(c_name) = CString::new(kernel) else { return Err(unknown(&functions)) };
        let driver = self.context.driver;
        for (module, names) in &self.modules {
            if names.as_ref().is_some_and(|names| !names.iter().any(|name| name == kernel)) {
                continue;
            }
            let mut raw = null_mut();
            // SAFETY: a valid module and a C string; writes one handle.
            let code = unsafe { (driver.cuModuleGetFunction)(&mut raw, module.0, c_name.as_ptr()) };
            if code == NOT_FOUND {
                continue;
            }
            let doing = || format!("loading kernel `{kernel}` of {}", self.name);
            self.context.check("cuModuleGetFunction", code, doing)?;
            self.load_now(raw, doing)?;
            let params =
                self.params_size(raw).or_else(|| embedded::params_size(kernel).filter(|_| self.embedded));
            let function = Arc::new(Function { raw: Raw(raw), params, shared: Mutex::new(SHARED_UNASKED) });
            functions.insert(kernel.to_owned(), function.clone());
            return Ok(function);
        }
        Err(unknown(&functions))
    }

    /// Loads one kernel's code now; the driver would otherwise load it lazily.
    fn load_now(&self, function: CUfunction, doing: impl Fn() -> String) -> Result<()> {
        let driver = self.context.driver;
        if let Some(load) = driver.cuFuncLoad {
            // SAFETY: a valid function.
            return self.context.check("cuFuncLoad", unsafe { load(function) }, doing);
        }
        let mut registers = 0;
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: a valid function; writes one int. To answer, the driver must have loaded the
        // code.
        let code = unsafe { (driver.cuFuncGetAttribute)(&mut registers, which, function) };
        self.context.check("cuFuncGetAttribute", code, doing)
    }

    fn params_size(&self, function: CUfunction) -> Option<u32> {
        let ask = self.context.driver.cuFuncGetParamInfo?;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a valid function; writes two sizes, or fails. A kernel here takes one struct;
        // asking for a second parameter would be an error.
        let code = unsafe { ask(function, 0, &mut offset, &mut size) };
        (code == SUCCESS).then(|| u32::try_from(offset + size).ok())?
    }

    /// How many blocks of this shape fit on the idle device at once. The context must be current.
    fn resident(&self, kernel: &str, function: &Function, block: u32, shared: u32) -> Result<u32> {
        self.allow_shared(kernel, function, shared)?;
        let mut per_processor = 0;
        // SAFETY: a valid function; writes one int.
        let code = unsafe {
            (self.context.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut per_processor,
                function.raw.0,
                block as i32,
                shared as usize,
            )
        };
        self.context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code, || {
            format!("asking how many blocks of {block} threads kernel `{kernel}` may have")
        })?;
        Ok(per_processor.max(0) as u32 * self.context.processors)
    }

    fn allow_shared(&self, kernel: &str, function: &Function, shared: u32) -> Result<()> {
        let mut allowed = lock(&function.shared);
        if shared <= *allowed {
            return Ok(());
        }
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a valid function.
        let code = unsafe { (self.context.driver.cuFuncSetAttribute)(function.raw.0, which, shared as i32) };
        self.context.check("cuFuncSetAttribute", code, || {
            format!("allowing kernel `{kernel}` {shared} bytes of dynamic shared memory")
        })?;
        *allowed = shared;
        Ok(())
    }
}

impl LoadedModule for CudaModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        let mut names: Vec<String> = lock(&self.functions).keys().cloned().collect();
        names.sort();
        names
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        for (module, _) in &self.modules {
            // SAFETY: loaded by this value; each launch of its kernels held an Arc of it until the
            // launch had ended.
            let code = unsafe { (self.context.driver.cuModuleUnload)(module.0) };
            self.context.note("cuModuleUnload", code, || format!("unloading {}", self.name));
        }
    }
}

// --------------------------------------------------------------------- memory

struct CudaBuffer {
    context: Arc<Context>,
    addr: u64,
}

impl CudaBuffer {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.current()?;
        let mut addr = 0;
        // At least one word, so that an empty buffer has an address too.
        // SAFETY: writes one address.
        let code = unsafe { (context.driver.cuMemAlloc_v2)(&mut addr, bytes.max(16)) };
        context.check("cuMemAlloc", code, || format!("allocating {bytes} bytes"))?;
        let buffer = Self { context: context.clone(), addr };
        buffer.zero(bytes)?;
        Ok(buffer)
    }

    fn zero(&self, bytes: usize) -> Result<()> {
        let driver = self.context.driver;
        let stream = self.context.copies.0;
        let doing = || format!("zeroing {bytes} bytes at {:#x}", self.addr);
        let mut ledger = lock(&self.context.ledger);
        self.context.sweep(&mut ledger);
        if ledger.is_quiet() {
            if bytes > 0 {
                // SAFETY: memory of this buffer, of that length.
                let code = unsafe { (driver.cuMemsetD8Async)(self.addr, 0, bytes, stream) };
                self.context.check("cuMemsetD8Async", code, doing)?;
            }
            drop(ledger);
        } else {
            drop(ledger);
            // A fill is a kernel and would wait for room among the running kernels; a copy needs no
            // room.
            let zeros = vec![0u8; bytes.min(1 << 20)];
            for offset in (0..bytes).step_by(1 << 20) {
                let len = (bytes - offset).min(1 << 20);
                let to = self.addr + offset as u64;
                // SAFETY: the destination lies within this buffer; the zeros outlive the wait
                // below.
                let code = unsafe { (driver.cuMemcpyHtoDAsync_v2)(to, zeros.as_ptr().cast(), len, stream) };
                if code != SUCCESS {
                    // Copies that were started still read `zeros`.
                    let _ = self.context.finish_copies(doing);
                    return self.context.check("cuMemcpyHtoDAsync", code, doing);
                }
            }
            return self.context.finish_copies(doing);
        }
        self.context.finish_copies(doing)
    }
}

impl BufferMemory for CudaBuffer {
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.context.current()?;
        let to = self.addr + offset as u64;
        let doing = || format!("copying {} bytes to {to:#x}", from.len());
        // SAFETY: DeviceBuffer has checked the range, and `from` is borrowed past the wait below.
        let code = unsafe {
            (self.context.driver.cuMemcpyHtoDAsync_v2)(
                to,
                from.as_ptr().cast(),
                from.len(),
                self.context.copies.0,
            )
        };
        self.context.check("cuMemcpyHtoDAsync", code, doing)?;
        self.context.finish_copies(doing)
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let _current = self.context.current()?;
        let from = self.addr + offset as u64;
        let len = to.len();
        let doing = || format!("copying {len} bytes from {from:#x}");
        // SAFETY: DeviceBuffer has checked the range, and `to` is borrowed past the wait below.
        let code = unsafe {
            (self.context.driver.cuMemcpyDtoHAsync_v2)(
                to.as_mut_ptr().cast(),
                from,
                len,
                self.context.copies.0,
            )
        };
        self.context.check("cuMemcpyDtoHAsync", code, doing)?;
        self.context.finish_copies(doing)
    }

    fn export(&self, bytes: usize) -> Result<Option<DmaBuf>> {
        self.context.export(self.addr, bytes)
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let mut ledger = lock(&self.context.ledger);
        ledger.freed.push(self.addr);
        if let Ok(_current) = self.context.current() {
            self.context.sweep(&mut ledger);
        }
    }
}

/// Host ranges that this process has registered: CUDA accepts each range only once.
static REGISTERED: Mutex<Option<HashMap<(usize, usize), Held>>> = Mutex::new(None);

struct Held {
    /// The context that registered the range. Every context sees the range, but only this one can
    /// unregister it.
    context: Arc<Context>,
    count: usize,
    access: Access,
    io_memory: bool,
}

struct HostRange {
    context: Arc<Context>,
    ptr: usize,
    len: usize,
}

impl HostRange {
    fn register(
        context: &Arc<Context>,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
        io_memory: bool,
    ) -> Result<Self> {
        let addr = ptr.as_ptr() as usize;
        let words = |access: Access, io: bool| format!("{access:?}{}", if io { ", io memory" } else { "" });
        let mut table = lock(&REGISTERED);
        let table = table.get_or_insert_default();
        if let Some(held) = table.get_mut(&(addr, len)) {
            if held.access != access || held.io_memory != io_memory {
                return Err(DeviceError::RegisteredOtherwise {
                    addr,
                    len,
                    held: words(held.access, held.io_memory),
                    asked: words(access, io_memory),
                });
            }
            held.count += 1;
        } else {
            let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            if access == Access::ReadOnly {
                flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
            }
            if io_memory {
                flags |= sys::CU_MEMHOSTREGISTER_IOMEMORY;
            }
            // SAFETY: the driver pins the pages of this range, or says that it can't; it changes no
            // byte of them.
            let code = unsafe { (context.driver.cuMemHostRegister_v2)(ptr.as_ptr().cast(), len, flags) };
            context.check("cuMemHostRegister", code, || {
                format!("registering {len} bytes at {addr:#x} ({})", words(access, io_memory))
            })?;
            table.insert((addr, len), Held { context: context.clone(), count: 1, access, io_memory });
        }
        Ok(Self { context: context.clone(), ptr: addr, len })
    }

    fn device_addr(&self) -> Result<u64> {
        let mut addr = 0;
        let code = {
            // SAFETY: the range is registered for every context; writes one address.
            unsafe {
                (self.context.driver.cuMemHostGetDevicePointer_v2)(&mut addr, self.ptr as *mut c_void, 0)
            }
        };
        self.context.check("cuMemHostGetDevicePointer", code, || {
            format!("asking where the device sees {} bytes at {:#x}", self.len, self.ptr)
        })?;
        Ok(addr)
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        let mut table = lock(&REGISTERED);
        let Some(table) = table.as_mut() else { return };
        let Some(held) = table.get_mut(&(self.ptr, self.len)) else { return };
        held.count -= 1;
        if held.count > 0 {
            return;
        }
        let Some(Held { context, .. }) = table.remove(&(self.ptr, self.len)) else { return };
        if let Ok(_current) = context.current() {
            // SAFETY: registered by this value, and its last holder is gone.
            let code = unsafe { (context.driver.cuMemHostUnregister)(self.ptr as *mut c_void) };
            context.note("cuMemHostUnregister", code, || {
                format!("unregistering {} bytes at {:#x}", self.len, self.ptr)
            });
        }
    }
}

// ------------------------------------------------------------------- launches

struct CudaStream {
    context: Arc<Context>,
    raw: Raw<CUstream>,
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        // SAFETY: made by this value; the driver documents that work already put on the stream
        // still completes.
        let code = unsafe { (self.context.driver.cuStreamDestroy_v2)(self.raw.0) };
        self.context.note("cuStreamDestroy", code, || "destroying a stream".to_owned());
    }
}

impl LaunchQueue for CudaStream {
    fn raw(&self) -> Option<u64> {
        Some(self.raw.0 as u64)
    }
}

struct CudaRunning {
    id: u64,
    /// The kernel and its shape, for error messages.
    what: String,
    start: Event,
    end: Event,
    _stream: Stream,
    _module: Arc<dyn LoadedModule>,
}

impl CudaRunning {
    /// Marks the launch as ended, with success or not.
    fn finish(&self) {
        let context = &self.end.context;
        let mut ledger = lock(&context.ledger);
        let before = ledger.active.len();
        ledger.active.retain(|active| active.id != self.id);
        if before != ledger.active.len()
            && let Ok(_current) = context.current()
        {
            context.sweep(&mut ledger);
        }
    }

    /// Whether the launch has ended; a launch that failed has ended too.
    fn poll(&self) -> Result<bool> {
        let current = self.end.context.current()?;
        let code = self.end.context.query(self.end.raw.0);
        if code == NOT_READY {
            return Ok(false);
        }
        drop(current);
        self.finish();
        self.end.context.check("cuEventQuery", code, || format!("running {}", self.what))?;
        Ok(true)
    }
}

impl RunningKernel for CudaRunning {
    fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        let began = Instant::now();
        loop {
            if self.poll()? {
                return Ok(WaitOutcome::Done);
            }
            let waited = began.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                return Ok(WaitOutcome::TimedOut);
            }
            // Spin while waiting for a short kernel. For a long one, sleep a tenth of the time it
            // has taken so far, which adds at most a tenth.
            if waited < Duration::from_micros(100) {
                std::hint::spin_loop();
            } else {
                let step = (waited / 10).min(Duration::from_micros(500));
                thread::sleep(timeout.map_or(step, |timeout| step.min(timeout - waited)));
            }
        }
    }

    fn is_done(&self) -> Result<bool> {
        self.poll()
    }

    fn elapsed(&self) -> Result<Option<Duration>> {
        if !self.poll()? {
            return Ok(None);
        }
        let mut milliseconds = 0f32;
        let context = &self.end.context;
        let _current = context.current()?;
        // SAFETY: both events are timed, recorded and over; writes one float.
        let code = unsafe {
            (context.driver.cuEventElapsedTime)(&mut milliseconds, self.start.raw.0, self.end.raw.0)
        };
        context.check("cuEventElapsedTime", code, || format!("timing {}", self.what))?;
        Ok(Some(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)))
    }
}

impl Drop for CudaRunning {
    fn drop(&mut self) {
        if let Err(error) = self.wait(None) {
            // A caller that waited has the error already; otherwise this line is the only report of
            // it.
            tracing::warn!("{error}");
        }
        self.finish();
    }
}

// ------------------------------------------------------------------- executor

/// What the executors of one GPU share.
struct Device {
    context: Arc<Context>,
    embedded: Mutex<Option<Arc<CudaModule>>>,
}

static DEVICES: Mutex<Vec<(u32, Weak<Device>)>> = Mutex::new(Vec::new());

/// An executor that runs kernels on an NVIDIA GPU.
///
/// Executors of one GPU in one process share its context, the embedded kernels and the account of
/// resident blocks.
pub struct CudaExecutor {
    device: Arc<Device>,
}

/// The index of the GPU whose context is current on this thread, if CUDA is in use in this process.
/// Does not initialise CUDA.
pub fn current_device() -> Option<u32> {
    let (driver, _) = guard::driver().ok()?;
    let mut device = 0;
    // SAFETY: writes one int, or returns an error where no context is current.
    let code = unsafe { driver.cuCtxGetDevice?(&mut device) };
    (code == SUCCESS).then(|| u32::try_from(device).ok()).flatten()
}

impl CudaExecutor {
    /// Opens a GPU by its index among those that the process sees.
    pub fn new(device_index: u32) -> Result<Self> {
        let mut devices = lock(&DEVICES);
        devices.retain(|(_, device)| device.strong_count() > 0);
        let open =
            devices.iter().find(|(index, _)| *index == device_index).and_then(|(_, device)| device.upgrade());
        if let Some(device) = open {
            return Ok(Self { device });
        }
        let context = Arc::new(Context::open(device_index)?);
        let device = Arc::new(Device { context, embedded: Mutex::new(None) });
        devices.push((device_index, Arc::downgrade(&device)));
        Ok(Self { device })
    }

    /// The GPU's PCI address, such as "0000:3b:00.0".
    pub fn pci_bus_id(&self) -> &str {
        &self.device.context.pci
    }

    /// The GPU's name, as NVIDIA gives it.
    pub fn device_name(&self) -> &str {
        &self.device.context.name
    }

    /// The GPU's compute capability: 90 for sm_90.
    pub fn sm(&self) -> u32 {
        self.device.context.sm
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.device.context
    }

    fn compile(&self, sources: &[Source]) -> Result<Vec<(String, Vec<u8>)>> {
        let cache = Cache::open()?;
        let arch = self.context().sm;
        sources
            .iter()
            .map(|source| Ok((source.name().to_owned(), compile::cubin(source, arch, &cache)?)))
            .collect()
    }

    fn load_project_kernels(&self) -> Result<Arc<CudaModule>> {
        let known = embedded::kernel_names();
        let context = self.context();
        let load = |images: &[(String, Vec<u8>)]| CudaModule::load(context, "embedded", images, &known, true);
        let compile = || {
            let sources: Vec<Source> =
                SOURCES.iter().map(|(name, text)| Source::text(*name, *text)).collect();
            load(&self.compile(&sources)?)
        };
        if FATBINS.is_empty() {
            return compile();
        }
        let images: Vec<(String, Vec<u8>)> =
            FATBINS.iter().map(|(name, image)| (format!("{name} (fatbin)"), image.to_vec())).collect();
        load(&images).or_else(|error| {
            // The image was built for other GPUs, or by an nvcc newer than the driver.
            tracing::warn!("{error}; compiling the kernels for this device instead");
            compile().map_err(|second| {
                tracing::warn!("{second}");
                error
            })
        })
    }

    fn module<'a>(&self, module: &'a Arc<dyn LoadedModule>) -> Result<&'a CudaModule> {
        module
            .as_any()
            .downcast_ref::<CudaModule>()
            .filter(|module| Arc::ptr_eq(&module.context, self.context()))
            .ok_or(DeviceError::Foreign { handle: "module", executor: "cuda" })
    }

    /// Refuses cooperating blocks that do not fit beside those that run; returns the share of the
    /// device that the blocks take.
    fn share(&self, ledger: &Ledger, kernel: &str, launch: Launch, resident: u32) -> Result<u64> {
        let resident_share = |resident: &Weak<Presence>| resident.upgrade().map_or(0, |r| r.share);
        let used = ledger.active.iter().map(|active| active.share).sum::<u64>()
            + ledger.residents.iter().map(resident_share).sum::<u64>();
        let free = ((u128::from(WHOLE.saturating_sub(used)) * u128::from(resident)) >> 32) as u32;
        if launch.grid > free {
            return Err(DeviceError::NotResident {
                kernel: kernel.to_owned(),
                grid: launch.grid,
                block: launch.block,
                resident,
                free,
                busy: ledger.active.iter().map(|active| active.blocks).sum::<u32>()
                    + ledger.residents.iter().filter_map(Weak::upgrade).map(|r| r.blocks).sum::<u32>(),
            });
        }
        // Rounded down, as `free` is, so that several launches of one shape can fill the device to
        // its last block.
        Ok(u64::from(launch.grid) * WHOLE / u64::from(resident))
    }
}

impl dyn Executor + '_ {
    /// The CUDA executor if this is one, for calls that only a GPU has.
    pub fn as_cuda(&self) -> Option<&CudaExecutor> {
        self.as_any().downcast_ref()
    }
}

impl fmt::Debug for CudaExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaExecutor({})", self.describe())
    }
}

impl Executor for CudaExecutor {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn describe(&self) -> String {
        let Context { index, name, sm, processors, pci, version, .. } = &**self.context();
        format!(
            "device {index}: {name}, sm_{sm}, {processors} SMs, PCI {pci}, driver for CUDA {}.{}",
            version.0, version.1
        )
    }

    fn device_index(&self) -> u32 {
        self.context().index
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>> {
        let mut embedded = lock(&self.device.embedded);
        if let Some(module) = &*embedded {
            return Ok(module.clone());
        }
        let module = self.load_project_kernels()?;
        *embedded = Some(module.clone());
        Ok(module)
    }

    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>> {
        let images = self.compile(std::slice::from_ref(source))?;
        Ok(CudaModule::load(self.context(), source.name(), &images, &source.kernels(), false)?)
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        let memory = CudaBuffer::new(self.context(), bytes)?;
        Ok(DeviceBuffer::new(memory.addr, bytes, Box::new(memory)))
    }

    fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
        io_memory: bool,
    ) -> Result<Registration> {
        let context = self.context();
        if access == Access::ReadOnly && !context.read_only {
            return Err(DeviceError::ReadOnlyUnsupported {
                index: context.index,
                name: context.name.clone(),
                addr: ptr.as_ptr() as usize,
                len,
            });
        }
        let _current = context.current()?;
        let range = HostRange::register(context, ptr, len, access, io_memory)?;
        Ok(Registration::new(range.device_addr()?, len, Box::new(range)))
    }

    fn stream(&self) -> Result<Stream> {
        let raw = self.context().make_stream(false)?;
        Ok(Stream::new(CudaStream { context: self.context().clone(), raw: Raw(raw) }))
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        launch: Launch,
        params: &[u8],
    ) -> Result<Running> {
        let context = self.context();
        let queue = stream
            .queue::<CudaStream>()
            .filter(|queue| Arc::ptr_eq(&queue.context, context))
            .ok_or(DeviceError::Foreign { handle: "stream", executor: "cuda" })?;
        let loaded = self.module(module)?;
        let _current = context.current()?;
        let function = loaded.find(kernel)?;
        if let Some(expected) = function.params
            && params.len() != expected as usize
        {
            return Err(DeviceError::ParamsSize {
                kernel: kernel.to_owned(),
                given: params.len(),
                expected: expected as usize,
            });
        }
        launch.check(kernel, context.max_shared)?;
        loaded.allow_shared(kernel, &function, launch.shared_bytes)?;
        let resident = match launch.cooperating {
            true => Some(loaded.resident(kernel, &function, launch.block, launch.shared_bytes)?),
            false => None,
        };
        let (start, end) = (Event::new(context, EVENT_TIMED)?, Event::new(context, EVENT_TIMED)?);
        let what = format!("kernel `{kernel}` of {} ({launch:?})", loaded.name);

        // The lock is held from counting the resident blocks until the launch, so that no other
        // launch comes between.
        let mut ledger = lock(&context.ledger);
        context.sweep(&mut ledger);
        let share = match resident {
            Some(resident) => self.share(&ledger, kernel, launch, resident)?,
            None => 0,
        };
        start.record(queue.raw.0)?;
        // SAFETY: function and stream belong to the current context; the caller promises that the
        // addresses in the parameters are valid.
        let code = unsafe { context.start(function.raw.0, queue.raw.0, launch, params) };
        context.check("cuLaunchKernel", code, || format!("launching {what}"))?;
        end.record(queue.raw.0)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let blocks = if launch.cooperating { launch.grid } else { 0 };
        ledger.active.push(Active { id, end: end.raw, share, blocks });
        drop(ledger);
        Ok(Running(OwnedHere::new(Box::new(CudaRunning {
            id,
            what,
            start,
            end,
            _stream: stream.clone(),
            _module: module.clone(),
        }))))
    }

    fn max_resident_blocks(
        &self,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let loaded = self.module(module)?;
        let _current = self.context().current()?;
        let function = loaded.find(kernel)?;
        Launch::new(1, block).shared_bytes(shared_bytes).check(kernel, self.context().max_shared)?;
        loaded.resident(kernel, &function, block, shared_bytes)
    }
}

// --------------------------------------------------------------- copy streams

/// A stream of host-to-device copies with marks in it, on which [`crate::CudaCopy`] is built.
pub(crate) struct CopyStream(CudaStream);

/// A point in a [`CopyStream`].
pub(crate) struct CopyMark(Event);

impl CopyStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let raw = context.make_stream(true)?;
        Ok(Self(CudaStream { context: context.clone(), raw: Raw(raw) }))
    }

    /// Starts a copy of `len` bytes, and marks the point after it.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and `to` is device memory valid for writes of
    /// `len` bytes, until the mark has been seen passed or self has been dropped.
    pub(crate) unsafe fn copy(&self, to: u64, from: *const u8, len: usize) -> Result<CopyMark> {
        let context = &self.0.context;
        let mark = Event::new(context, EVENT_UNTIMED)?;
        let _current = context.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (context.driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), len, self.0.raw.0) };
        context
            .check("cuMemcpyHtoDAsync", code, || format!("copying {len} bytes from {from:p} to {to:#x}"))?;
        mark.record(self.0.raw.0)?;
        Ok(CopyMark(mark))
    }

    /// Makes what RDMA devices wrote visible to kernels ([`Context::flush_rdma_writes`]).
    pub(crate) fn flush_rdma_writes(&self) -> Result<()> {
        self.0.context.flush_rdma_writes()
    }

    pub(crate) fn passed(&self, mark: &CopyMark) -> Result<bool> {
        let context = &self.0.context;
        let _current = context.current()?;
        match context.query(mark.0.raw.0) {
            NOT_READY => Ok(false),
            code => context.check("cuEventQuery", code, || "copying to the device".to_owned()).map(|()| true),
        }
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let Ok(_current) = self.0.context.current() else { return };
        // SAFETY: the stream is our own; it holds only copies, which end by themselves.
        let code = unsafe { (self.0.context.driver.cuStreamSynchronize)(self.0.raw.0) };
        self.0.context.note("cuStreamSynchronize", code, || "waiting for copies to end".to_owned());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::guard::tests::{CHILD, run_child, stub, stub_source};
    use super::*;
    use crate::module::tests::Folder;
    use crate::mover::CudaCopy;

    /// A stub driver without a GPU: device memory is the heap, a kernel stores 42 to the address
    /// that its parameters begin with, and an event is over at the sixth query. It aborts where a
    /// context should be current and is not, and where a call would end another thread's capture of
    /// a graph.
    const DRIVER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static __thread int depth, mode;
static int registered, pinned, live, flushed;
int stub_pinned(void) { return pinned; }
#define IN if (depth < 1 || mode != 2) { fprintf(stderr, "%s: depth %d, capture mode %d\n", __func__, depth, mode); abort(); }
int cuThreadExchangeStreamCaptureMode(int *m) { if (depth < 1) return 201; int before = mode; mode = *m; *m = before; return 0; }
int stub_depth(void) { return depth + mode; }
int stub_live(void) { return live + registered; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "Stub"); return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { strcpy(s, "0000:01:00.0"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 4 : a == 97 ? 232448 : a == 117 || a == 124 ? 1 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; live++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { live--; return 0; }
int cuCtxPushCurrent_v2(void *c) { depth++; return 0; }
int cuCtxPopCurrent_v2(void **c) { if (depth < 1 || (depth == 1 && mode)) abort(); depth--; *c = 0; return 0; }
int cuCtxGetStreamPriorityRange(int *l, int *g) { IN *l = 0; *g = -5; return 0; }
int cuMemAlloc_v2(void **p, size_t n) { IN *p = malloc(n); live++; return 0; }
int cuMemFree_v2(void *p) { IN free(p); live--; return 0; }
int cuMemsetD8Async(void *p, unsigned char c, size_t n, void *s) { IN if (!s) abort(); memset(p, c, n); return 0; }
int cuMemcpyHtoDAsync_v2(void *d, const void *h, size_t n, void *s) { IN if (!s) abort(); memcpy(d, h, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *h, const void *d, size_t n, void *s) { IN if (!s) abort(); memcpy(h, d, n); return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { IN if (registered) return 712; registered = 1; pinned++; return f == 3 ? 0 : 1; }
int cuMemHostUnregister(void *p) { IN if (!registered) return 713; registered = 0; return 0; }
int cuMemHostGetDevicePointer_v2(void **d, void *p, unsigned f) { IN *d = p; return 0; }
int cuStreamCreateWithPriority(void **s, unsigned f, int p) { IN *s = malloc(1); live++; return f == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *s) { IN free(s); live--; return 0; }
int cuStreamSynchronize(void *s) { IN return s ? 0 : 1; }
int cuEventCreate(int **e, unsigned f) { IN *e = calloc(1, 4); live++; return 0; }
int cuEventDestroy_v2(int *e) { IN free(e); live--; return 0; }
int cuEventRecord(int *e, void *s) { IN if (!s) abort(); *e = 6; return 0; }
int cuEventQuery(int *e) { IN return *e && --*e ? 600 : 0; }
int cuEventElapsedTime(float *t, void *a, void *b) { IN *t = 1.5f; return 0; }
int cuModuleLoadData(void **m, const void *i) { IN *m = malloc(1); live++; return (size_t)i % 16; }
int cuModuleUnload(void *m) { IN free(m); live--; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { IN *f = (void *)16; return strcmp(n, "poke") ? 500 : 0; }
int cuMemGetHandleForAddressRange(int *fd, size_t p, size_t n, int t, unsigned long long f) { IN *fd = t == 1 && !f && p % 4096 == 0 && n % 4096 == 0 ? dup(0) : -1; return *fd < 0; }
int cuFlushGPUDirectRDMAWrites(int t, int s) { IN flushed++; return t != 0 || s != 100; }
int stub_flushed(void) { return flushed; }
int cuFuncSetAttribute(void *f, int a, int v) { IN return a == 8 && v <= 232448 ? 0 : 1; }
int cuFuncGetAttribute(int *v, int a, void *f) { IN return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *o, size_t *n) { IN *o = 0; *n = 16; return i ? 1 : 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { IN *n = 2; return 0; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **k, void **x)
{
	IN
	if (!s || k || x[0] != (void *)1 || x[2] != (void *)2 || *(size_t *)x[3] != 16 || x[4]) abort();
	**(unsigned long **)x[1] = 42;
	return 0;
}
"#;

    fn poke(
        executor: &CudaExecutor,
        module: &Arc<dyn LoadedModule>,
        launch: Launch,
        params: &[u64],
    ) -> Result<Running> {
        let bytes: Vec<u8> = params.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // SAFETY: every caller passes the address of a live word, or the launch is refused.
        unsafe { executor.launch(&executor.stream().unwrap(), module, "poke", launch, &bytes) }
    }

    /// Runs in a process of its own, with the stub driver above.
    #[test]
    #[ignore = "another test starts this in a process of its own"]
    fn child() {
        assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
        let executor = CudaExecutor::new(0).unwrap();
        assert!(CudaExecutor::new(1).unwrap_err().to_string().contains("device 1 does not exist"));
        let second = CudaExecutor::new(0).unwrap();
        assert!(Arc::ptr_eq(executor.context(), second.context()));
        assert!(
            executor.describe().contains("Stub, sm_90, 4 SMs, PCI 0000:01:00.0"),
            "{}",
            executor.describe()
        );

        let images = [("image".to_owned(), vec![1; 100])];
        let names = ["poke".to_owned(), "behind_an_if".to_owned()];
        let module: Arc<dyn LoadedModule> =
            CudaModule::load(executor.context(), "test", &images, &names, false).unwrap();
        assert_eq!(module.kernels(), ["poke"]);
        assert_eq!(executor.max_resident_blocks(&module, "poke", 64, 100_000).unwrap(), 8);

        let word = executor.alloc(64).unwrap();
        let read = || {
            let mut bytes = [9; 8];
            word.copy_to_host(&mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        };
        assert_eq!(read(), 0);
        let at = [word.addr(), 0];

        // The running launch counts: 8 blocks can be resident.
        let six = poke(&executor, &module, Launch::new(6, 64).cooperating(), &at).unwrap();
        let error = poke(&second, &module, Launch::new(3, 64).cooperating(), &at).unwrap_err().to_string();
        assert!(error.contains("3 cooperating blocks") && error.contains("only 2 of the 8"), "{error}");
        assert!(error.contains("(6 blocks of other"), "{error}");
        // Memory freed meanwhile waits for the launch; new memory is zeroed by copies.
        drop(executor.alloc(100).unwrap());
        assert_eq!(lock(&executor.context().ledger).freed.len(), 1);
        assert!(six.elapsed().unwrap().is_none());
        assert_eq!(six.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        assert_eq!(lock(&executor.context().ledger).freed.len(), 0);
        assert_eq!(six.elapsed().unwrap(), Some(Duration::from_micros(1500)));
        assert_eq!(read(), 42);
        drop(poke(&second, &module, Launch::new(8, 64).shared_bytes(100_000).cooperating(), &at).unwrap());

        let error = poke(&executor, &module, Launch::new(1, 1), &at[..1]).unwrap_err().to_string();
        assert!(error.contains("takes 16 bytes of parameters, not 8"), "{error}");
        let error = executor.max_resident_blocks(&module, "pike", 1, 0).unwrap_err().to_string();
        assert!(error.contains("no kernel `pike`; it has: poke"), "{error}");
        assert!(executor.launch_check(&module).contains("shared_bytes = 300000"));

        let host = [7u8; 64];
        let ptr = NonNull::new(host.as_ptr().cast_mut()).unwrap();
        let one = executor.register(ptr, 64, Access::ReadWrite, false).unwrap();
        let two = second.register(ptr, 64, Access::ReadWrite, false).unwrap();
        assert_eq!(one.device_addr(), two.device_addr());
        let error = executor.register(ptr, 64, Access::ReadWrite, true).unwrap_err().to_string();
        assert!(
            error.contains("registered as ReadWrite and cannot be registered as ReadWrite, io memory"),
            "{error}"
        );
        let error = executor.register(ptr, 32, Access::ReadWrite, false).unwrap_err().to_string();
        assert!(error.contains("cuMemHostRegister failed with CUDA_ERROR_FAKE (712)"), "{error}");
        assert!(error.contains("32 bytes") && error.contains("register the whole mapping once"), "{error}");
        let error = executor.register(ptr, 64, Access::ReadOnly, false).unwrap_err().to_string();
        assert!(error.contains("READ_ONLY_HOST_REGISTER_SUPPORTED is 0"), "{error}");

        // Other memory at the same address is pinned again.
        drop((one, two));
        let one = executor.register(ptr, 64, Access::ReadWrite, false).unwrap();

        let copies = CudaCopy::new(&executor).unwrap();
        // SAFETY: both are 64 bytes and outlive `copies`.
        let ticket = unsafe { copies.start(word.addr(), host.as_ptr(), 64) }.unwrap();
        while !copies.done(&ticket).unwrap() {}
        assert_eq!(read(), 0x0707070707070707);

        // A dma-buf for RDMA devices; this driver must be asked to flush their writes.
        let exported = word.export().unwrap().unwrap();
        assert_eq!(exported.offset, word.addr() % rustix::param::page_size() as u64);
        copies.flush_rdma_writes().unwrap();

        drop((six, one, ticket, copies, module, word, second, executor));
        // SAFETY: these are the stub's own functions, with the types that the stub gives them.
        let (depth, live, flushed, pinned) = unsafe {
            let library = libloading::Library::new("libcuda.so.1").unwrap();
            let ask = |name: &str| library.get::<extern "C" fn() -> i32>(name.as_bytes()).unwrap()();
            (ask("stub_depth"), ask("stub_live"), ask("stub_flushed"), ask("stub_pinned"))
        };
        println!("CHILD depth {depth} live {live} flushed {flushed} pinned {pinned}");
    }

    impl CudaExecutor {
        fn launch_check(&self, module: &Arc<dyn LoadedModule>) -> String {
            self.max_resident_blocks(module, "poke", 64, 300_000).unwrap_err().to_string()
        }
    }

    /// Reports that a test needs a GPU and was skipped.
    pub(crate) fn no_gpu(test: &str, reason: &str) {
        pushgate_tests::skip(&format!("no GPU for {test}: {reason}"));
    }

    /// Needs a GPU.
    #[test]
    fn on_a_gpu_kernels_run_and_memory_moves_beside_them() {
        const NAME: &str = "on_a_gpu_kernels_run_and_memory_moves_beside_them";
        let executor = match CudaExecutor::new(0) {
            Err(DeviceError::CudaUnavailable { reason }) => return no_gpu(NAME, &reason),
            opened => opened.unwrap(),
        };
        println!("{}", executor.describe());
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        let load = |module: Result<Arc<dyn LoadedModule>>| match module {
            Err(error @ DeviceError::NoGpuCompiler { .. }) => {
                pushgate_tests::skip(&format!("{NAME}: {error}"));
                None
            }
            module => Some(module.unwrap()),
        };
        // Load all modules before the first kernel that waits.
        let Some(embedded) = load(executor.load_embedded()) else { return };
        let gate_source = Source::text("gate.cu", crate::cpu::tests::GATE);
        let gate = load(executor.load_source(&gate_source));

        // A kernel writes memory of the host and of the device.
        let host = crate::CpuExecutor::new().alloc(64 << 10).unwrap();
        let ptr = NonNull::new(host.addr() as *mut u8).unwrap();
        let seen = executor.register(ptr, host.len(), Access::ReadWrite, false).unwrap();
        let again = executor.register(ptr, host.len(), Access::ReadWrite, false).unwrap();
        assert_eq!(seen.device_addr(), again.device_addr());
        drop(again);
        let device = executor.alloc(64 << 10).unwrap();
        let stream = executor.stream().unwrap();
        for (addr, buffer) in [(seen.device_addr(), &host), (device.addr(), &device)] {
            let params = words(&[addr, 16 << 10, 1, 3]);
            // SAFETY: both buffers are as long as the kernel is told and outlive it.
            let run =
                unsafe { executor.launch(&stream, &embedded, "bare_store", Launch::new(4, 64), &params) };
            assert_eq!(run.unwrap().wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
            let mut bytes = vec![0; 64 << 10];
            buffer.copy_to_host(&mut bytes).unwrap();
            for (i, pair) in bytes.as_chunks::<16>().0.iter().enumerate() {
                assert_eq!(pair[..], words(&[2, i as u64 % 1024]));
            }
        }
        // SAFETY: the launch is refused before the kernel runs.
        let short =
            unsafe { executor.launch(&stream, &embedded, "bare_store", Launch::new(4, 64), &[0; 31]) };
        assert!(matches!(short, Err(DeviceError::ParamsSize { expected: 32, given: 31, .. })), "{short:?}");

        // A read-only mapping, as a peer's window is.
        let file = rustix::fs::memfd_create("pushgate-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        // SAFETY: a new mapping that nothing else refers to; it is never unmapped.
        let mapped = unsafe {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            mmap(std::ptr::null_mut(), 1 << 20, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap()
        };
        let read_only =
            executor.register(NonNull::new(mapped.cast()).unwrap(), 1 << 20, Access::ReadOnly, false);
        println!("read-only registration: {read_only:?}");
        assert_eq!(read_only.is_ok(), executor.context().read_only);

        // A kernel that fills the device and waits, with everything else running beside it.
        let Some(gate) = gate else { return };
        host.copy_from_host(&[0; 64]).unwrap();
        let resident = executor.max_resident_blocks(&gate, "gate", 64, 0).unwrap();
        let shape = Launch::new(resident, 64).cooperating();
        let params = words(&[seen.device_addr()]);
        // SAFETY: the word is registered and outlives the kernel.
        let launch = |launch| unsafe { executor.launch(&stream, &gate, "gate", launch, &params) };
        let waiting = launch(shape).unwrap();
        assert_eq!(waiting.wait(Some(Duration::from_millis(50))).unwrap(), WaitOutcome::TimedOut);
        let refused = launch(Launch::new(1, 64).cooperating());
        assert!(matches!(refused, Err(DeviceError::NotResident { free: 0, .. })), "{refused:?}");
        let buffer = executor.alloc(3 << 20).unwrap();
        let mut bytes = vec![1; 3 << 20];
        buffer.copy_to_host(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        buffer.copy_from_host_at(5, &[6; 1000]).unwrap();
        let copies = CudaCopy::new(&executor).unwrap();
        // SAFETY: the ranges lie within both buffers, which outlive the copy.
        let ticket = unsafe { copies.start(buffer.addr(), (host.addr() + 64) as *const u8, 4096) }.unwrap();
        while !copies.done(&ticket).unwrap() {
            thread::yield_now();
        }
        buffer.copy_to_host(&mut bytes[..16]).unwrap();
        assert_eq!(bytes[..16], words(&[2, 4])); // the fifth pair of bare_store
        // A flush waits for no kernel.
        let (flushed, took) = rdma::tests::timed_flush(&executor);
        println!("flush beside a kernel: {flushed:?}, {took:?}");
        assert!(took < pushgate_tests::hang(), "the kernel waits until it is let go");
        drop(buffer);
        assert!(!waiting.is_done().unwrap());
        host.copy_from_host(&1u64.to_ne_bytes()).unwrap();
        assert_eq!(waiting.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        assert!(waiting.elapsed().unwrap().unwrap() >= Duration::from_millis(40));
        assert!(lock(&executor.context().ledger).freed.is_empty());
    }

    #[test]
    fn every_call_has_its_context_and_nothing_is_left() {
        let folder = Folder::new("driver");
        stub(&folder, &format!("{DRIVER}{}", stub_source(0, 13000, 1, DRIVER)));
        let text = run_child("cuda::tests::child", &folder.0);
        assert!(text.contains("CHILD depth 0 live 0 flushed 1 pinned 2"), "{text}");
    }
}
