//! A GPU's contexts: opening them, making them current on a thread, and the driver's errors with the
//! device's name.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Mutex;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute_enum as Attribute, CUevent, CUstream,
    CUstreamCaptureMode_enum as CaptureMode,
};

use pushgate_driver_shim::fork::Owner;

use super::driver::{self, Driver, NOT_READY, Raw, SUCCESS};
use super::ledger::Ledger;
use super::rdma::Rdma;
use crate::error::{DeviceError, Result};
use crate::lock::lock;

const STREAM_NON_BLOCKING: u32 = 1;

/// A context of a GPU, with the state that everything using it in this process shares.
pub(crate) struct Context {
    owner: Owner,
    /// The context is the GPU's primary one, which the program's CUDA runtime uses too.
    primary: bool,
    pub(super) driver: &'static Driver,
    pub(super) index: u32,
    pub(super) device: CUdevice,
    pub(super) raw: Raw<CUcontext>,
    pub(super) name: String,
    pub(super) pci: String,
    pub(super) version: (u32, u32),
    pub(super) sm: u32,
    pub(super) processors: u32,
    pub(super) max_shared: u32,
    pub(super) read_only: bool,
    pub(super) rdma: Rdma,
    /// The stream for copies to and from buffers, and for filling them.
    pub(super) copies: Raw<CUstream>,
    pub(super) ledger: Mutex<Ledger>,
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

thread_local! {
    /// The context that the innermost [`Current`] of this thread has pushed, 0 if there is none.
    static PUSHED: Cell<usize> = const { Cell::new(0) };
}

/// Makes the context current on this thread while it lives, and keeps our calls from disturbing
/// other threads' captures.
pub(crate) struct Current<'a> {
    context: &'a Context,
    /// Dropped before the context is popped, because the call may need a context. `None`: an outer value has pushed the context, and
    /// this one does nothing.
    relaxed: Option<Relaxed>,
    /// What [`PUSHED`] said before. Values are dropped in the reverse order.
    outer: usize,
    /// It belongs to one thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(relaxed) = self.relaxed.take() else { return };
        drop(relaxed);
        PUSHED.set(self.outer);
        let mut popped = null_mut();
        // SAFETY: writes one handle. This code pushed the context on this thread, and every later
        // push has been popped.
        unsafe { (self.context.driver.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

impl Context {
    /// Retains the primary context of GPU `index`.
    pub(super) fn open(index: u32) -> Result<Self> {
        let (driver, info) = driver::driver().map_err(|reason| DeviceError::CudaUnavailable { reason })?;
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
            primary: true,
            driver,
            index,
            device,
            raw: Raw(context),
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

    /// Makes another context on the same GPU, which sees the same memory.
    ///
    /// Measured on H100 with driver 580: copies and stores in this context are not held up by calls that wait in the primary one:
    /// cudaFree beside a running kernel, a launch that loads its kernel first, a full queue of launches. But kernels of two contexts
    /// take turns of about 2 ms. So this context is for work that needs no SM: copies between host and GPU, if they are described to
    /// the driver in the right form, and stores of words.
    pub(super) fn beside(&self) -> Result<Self> {
        let (Some(create), Some(_)) = (self.driver.cuCtxCreate_v2, self.driver.cuCtxDestroy_v2) else {
            let reason = "libcuda.so.1 lacks cuCtxCreate: it is a stub".to_owned();
            return Err(DeviceError::CudaUnavailable { reason });
        };
        let _current = self.current()?;
        let mut context = null_mut();
        // SAFETY: writes one handle; `drop` destroys it. Flags 0: the default way of waiting.
        let code = unsafe { create(&mut context, 0, self.device) };
        self.check("cuCtxCreate", code, || "making a context for copies".to_owned())?;
        let mut popped = null_mut();
        // SAFETY: writes one handle. The call above left the new context current on this thread.
        unsafe { (self.driver.cuCtxPopCurrent_v2)(&mut popped) };
        Ok(Self {
            owner: Owner::here(),
            primary: false,
            driver: self.driver,
            index: self.index,
            device: self.device,
            raw: Raw(context),
            name: self.name.clone(),
            pci: self.pci.clone(),
            version: self.version,
            sm: self.sm,
            processors: self.processors,
            max_shared: self.max_shared,
            read_only: self.read_only,
            rdma: self.rdma,
            copies: Raw(null_mut()),
            ledger: Mutex::default(),
        })
    }

    /// Whether this is the GPU's primary context.
    pub(super) fn is_primary(&self) -> bool {
        self.primary
    }

    /// Makes the context current on this thread until the value is dropped.
    pub(crate) fn current(&self) -> Result<Current<'_>> {
        // CUDA does not work in a child of `fork`: calls fail there, or never return.
        self.owner.check()?;
        let (own, outer) = (self.raw.0 as usize, PUSHED.get());
        let mut current = Current { context: self, relaxed: None, outer, _thread: PhantomData };
        if own != outer {
            // SAFETY: the context is retained as long as self lives.
            let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.raw.0) };
            self.check("cuCtxPushCurrent", code, || "entering the context".to_owned())?;
            PUSHED.set(own);
            current.relaxed = Some(Relaxed::new(self.driver));
        }
        Ok(current)
    }

    /// Returns an error that names the device, unless `code` is success.
    pub(super) fn check(&self, call: &'static str, code: u32, doing: impl FnOnce() -> String) -> Result<()> {
        self.driver.check(call, code, || format!("{} on device {} ({})", doing(), self.index, self.name))
    }

    /// Logs an error in a drop, which has no caller to return it to.
    pub(super) fn note(&self, call: &'static str, code: u32, doing: impl FnOnce() -> String) {
        if let Err(error) = self.check(call, code, doing) {
            tracing::warn!("{error}");
        }
    }

    /// Makes a stream, of the highest priority if `first` and of the lowest otherwise.
    pub(super) fn make_stream(&self, first: bool) -> Result<CUstream> {
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

    /// Waits for the stream of copies, and for nothing else.
    pub(super) fn finish_copies(&self, doing: impl FnOnce() -> String) -> Result<()> {
        // SAFETY: the stream is our own.
        let code = unsafe { (self.driver.cuStreamSynchronize)(self.copies.0) };
        self.check("cuStreamSynchronize", code, doing)
    }

    /// Whether a stream can be told to store a word of 64 bits (cuStreamWriteValue64).
    pub(super) fn writes_words(&self) -> bool {
        let mut able = 0;
        let which = Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        // SAFETY: writes one int about a valid device.
        let code = unsafe { (self.driver.cuDeviceGetAttribute)(&mut able, which, self.device) };
        code == SUCCESS && able != 0
    }

    /// The driver's answer whether an event is over. The context must be current.
    pub(super) fn query(&self, event: CUevent) -> u32 {
        // SAFETY: the event is alive: either an `Event` holds it, or the ledger still does (the
        // ledger drops an event's entry before the event is destroyed).
        unsafe { (self.driver.cuEventQuery)(event) }
    }

    /// Removes launches that have ended, and frees the memory that waited for them. The context
    /// must be current.
    pub(super) fn sweep(&self, ledger: &mut Ledger) {
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
        if !self.primary {
            let Some(destroy) = self.driver.cuCtxDestroy_v2 else { return };
            // SAFETY: made in `beside`, and destroyed only here.
            let code = unsafe { destroy(self.raw.0) };
            self.note("cuCtxDestroy", code, || "destroying the context for copies".to_owned());
            return;
        }
        // SAFETY: retained once in `open`.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
        self.note("cuDevicePrimaryCtxRelease", code, || "releasing the context".to_owned());
    }
}
