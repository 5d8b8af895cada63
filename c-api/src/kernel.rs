//! Modules of kernels, streams, and kernels that run.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use pushgate::{Context, DeviceError, Image, Launch, Module, Running, Source, Stream, WaitOutcome};

use crate::arguments::{Options, Out, bytes, flags, options, text};
use crate::boundary::{Failure, Result, call};
use crate::codes::*;
use crate::context::pushgate_context;
use crate::table::{self, Object};

/// Blocks of the launch wait for each other, or for a peer's kernel that waits for them: the launch is refused unless all of them
/// can run at once.
pub const PUSHGATE_LAUNCH_COOPERATING: u32 = 1;
/// A time without a limit.
pub const PUSHGATE_FOREVER: u64 = u64::MAX;

/// Kernels that were loaded from a source or an image. Any thread may use one.
pub struct pushgate_module;
/// A queue of launches: those of one stream run one after the other, those of different streams side by side. Any thread may use
/// one.
pub struct pushgate_stream;
/// A kernel that was launched. Any thread may use one.
pub struct pushgate_kernel;

/// The shape of a launch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_launch_options {
    /// sizeof(struct pushgate_launch_options).
    pub size: usize,
    /// Blocks, 1 or more.
    pub grid: u32,
    /// Threads of each block, 1 to 1024.
    pub block: u32,
    /// Dynamic shared memory of each block in bytes.
    pub shared_bytes: u32,
    /// PUSHGATE_LAUNCH_*.
    pub flags: u32,
}

// SAFETY: integers, 8 + 4 times 4 bytes without padding, the size first.
unsafe impl Options for pushgate_launch_options {
    const LEAST: usize = 24;
}
const _: () = assert!(size_of::<pushgate_launch_options>() == 24);

/// A module, with the context that it was made with.
pub(crate) struct ModuleObject {
    module: Module,
    context: Arc<Context>,
}

impl Object for ModuleObject {
    type Handle = pushgate_module;
    const NAME: &'static str = "module";
}

/// A stream, with the context that it was made with.
pub(crate) struct StreamObject {
    stream: Stream,
    context: Arc<Context>,
}

impl Object for StreamObject {
    type Handle = pushgate_stream;
    const NAME: &'static str = "stream";
}

/// A kernel that was launched, with what it runs on.
pub(crate) struct KernelObject {
    // Dropped first: its drop waits for the kernel's end.
    running: Running,
    stream: Arc<StreamObject>,
    _module: Arc<ModuleObject>,
}

impl Object for KernelObject {
    type Handle = pushgate_kernel;
    const NAME: &'static str = "kernel";
}

/// Loads kernels from a `.cu` file that includes "pushgate/device.cuh". Files that it includes with quotes are found beside it.
///
/// The file is compiled for the context's device: by NVRTC or nvcc for a GPU, by the C++ compiler (CXX, c++, g++, clang++) for the
/// CPU; the result is cached. Load modules before the first kernel runs that waits for another kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_from_file(
    context: *const pushgate_context,
    path: *const c_char,
    module: *mut *mut pushgate_module,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, path) = unsafe { (Out::handle("module", module)?, text("path", path)?) };
        load(context, out, || Ok(Source::path(path).map_err(pushgate::Error::from)?))
    })
}

/// Loads kernels from a text, as pushgate_module_from_file does.
///
/// @param name  What messages call the text, as a file's name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_from_text(
    context: *const pushgate_context,
    name: *const c_char,
    source: *const c_char,
    module: *mut *mut pushgate_module,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, name, source) =
            unsafe { (Out::handle("module", module)?, text("name", name)?, text("source", source)?) };
        load(context, out, || Ok(Source::text(name, source)))
    })
}

/// Loads kernels that were compiled before: a cubin, a fatbin or PTX (nvcc -cubin, -fatbin, -ptx) for a GPU, a shared library for the
/// CPU. The image is copied. An image for other devices is refused with what it is for.
///
/// The source includes "pushgate/device.cuh" of this release. Load modules before the first kernel runs that waits for another
/// kernel.
///
/// @param name   What messages call the image, as a file's name.
/// @param image  Its bytes.
/// @param size   How many they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_from_image(
    context: *const pushgate_context,
    name: *const c_char,
    image: *const c_void,
    size: usize,
    module: *mut *mut pushgate_module,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, name, image) = unsafe {
            (Out::handle("module", module)?, text("name", name)?, bytes("image", image.cast(), size)?)
        };
        load_image(context, out, || Image::bytes(name, image))
    })
}

/// Loads kernels of a file that was compiled before, as pushgate_module_from_image does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_from_image_file(
    context: *const pushgate_context,
    path: *const c_char,
    module: *mut *mut pushgate_module,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, path) = unsafe { (Out::handle("module", module)?, text("path", path)?) };
        load_image(context, out, || Image::path(path))
    })
}

fn load_image(
    context: *const pushgate_context,
    out: Out<*mut pushgate_module>,
    image: impl FnOnce() -> std::result::Result<Image, DeviceError>,
) -> Result<()> {
    let context = table::get::<Context>(context)?;
    let module = Module::from_image(&context, &image().map_err(pushgate::Error::from)?)?;
    out.put(table::open(ModuleObject { module, context }));
    Ok(())
}

fn load(
    context: *const pushgate_context,
    out: Out<*mut pushgate_module>,
    source: impl FnOnce() -> Result<Source>,
) -> Result<()> {
    let context = table::get::<Context>(context)?;
    let module = Module::from_source(&context, &source()?)?;
    out.put(table::open(ModuleObject { module, context }));
    Ok(())
}

/// Closes a module none of whose kernels is open. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_close(module: *mut pushgate_module) -> c_int {
    call(|| table::close::<ModuleObject>(module))
}

/// How many blocks of a kernel the idle device runs at once, each of `block` threads with `shared_bytes` of dynamic shared memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_module_resident_blocks(
    module: *const pushgate_module,
    kernel: *const c_char,
    block: u32,
    shared_bytes: u32,
    blocks: *mut u32,
) -> c_int {
    call(|| {
        let object = table::get::<ModuleObject>(module)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, kernel) = unsafe { (Out::new("blocks", blocks)?, text("kernel", kernel)?) };
        out.put(object.context.max_resident_blocks(&object.module, kernel, block, shared_bytes)?);
        Ok(())
    })
}

/// Makes a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_stream_create(
    context: *const pushgate_context,
    stream: *mut *mut pushgate_stream,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::handle("stream", stream)? };
        let context = table::get::<Context>(context)?;
        out.put(table::open(StreamObject { stream: context.stream()?, context }));
        Ok(())
    })
}

/// Closes a stream none of whose kernels is open. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_stream_close(stream: *mut pushgate_stream) -> c_int {
    call(|| table::close::<StreamObject>(stream))
}

/// Launches a kernel with one structure of parameters, which is copied, and returns at once.
///
/// Until the kernel has ended, each address among the parameters is valid for what the kernel does with it: the memory, and the
/// queue pairs, that it names stay open.
///
/// @param kernel   The name that the source's PUSHGATE_KERNEL gives it.
/// @param options  Its shape; NULL: one block of one thread.
/// @param params   The kernel's structure, field by field as the source has it.
/// @param size     The structure's size, which must be the kernel's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_kernel_launch(
    stream: *const pushgate_stream,
    module: *const pushgate_module,
    kernel: *const c_char,
    options: *const pushgate_launch_options,
    params: *const c_void,
    size: usize,
    running: *mut *mut pushgate_kernel,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, kernel, given, params) = unsafe {
            (
                Out::handle("running", running)?,
                text("kernel", kernel)?,
                self::options("options", options)?,
                bytes("params", params.cast(), size)?,
            )
        };
        let stream = table::get::<StreamObject>(stream)?;
        let module = table::get::<ModuleObject>(module)?;
        if !Arc::ptr_eq(&stream.context, &module.context) {
            return Err(Failure::argument("module", "of another context than the stream's"));
        }
        let mut launch = Launch::new(1, 1);
        if let Some(given) = given {
            flags("flags", given.flags, PUSHGATE_LAUNCH_COOPERATING)?;
            launch = Launch::new(given.grid, given.block).shared_bytes(given.shared_bytes);
            launch.cooperating = given.flags & PUSHGATE_LAUNCH_COOPERATING != 0;
        }
        // SAFETY: the program keeps what the parameters name, as this call's comment asks for.
        let running =
            unsafe { stream.context.launch(&stream.stream, &module.module, kernel, launch, params)? };
        out.put(table::open(KernelObject { running, stream, _module: module }));
        Ok(())
    })
}

/// Waits for a kernel's end, and drives the engine meanwhile where this program is to (`drive = caller`). What the kernel wrote can
/// be read then.
///
/// @param timeout_ms  Milliseconds, or PUSHGATE_FOREVER: kernels end by themselves, because each wait of the device API is bounded.
///                    When it has passed: PUSHGATE_E_TIMED_OUT, and the kernel still runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_kernel_wait(kernel: *const pushgate_kernel, timeout_ms: u64) -> c_int {
    call(|| {
        let object = table::get::<KernelObject>(kernel)?;
        let timeout = (timeout_ms != PUSHGATE_FOREVER).then(|| Duration::from_millis(timeout_ms));
        match object.stream.context.wait(&object.running, timeout)? {
            WaitOutcome::Done => Ok(()),
            WaitOutcome::TimedOut => {
                let why = format!("the kernel still runs after {timeout_ms} ms");
                Err(Failure::new(PUSHGATE_E_TIMED_OUT, why))
            }
        }
    })
}

/// Waits for a kernel's end, then closes it. NULL is no error. If the program ends the call, the kernel runs on and stays open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_kernel_close(kernel: *mut pushgate_kernel) -> c_int {
    call(|| {
        table::close_if::<KernelObject>(kernel, |object| {
            match object.stream.context.wait(&object.running, None) {
                Err(pushgate::Error::Interrupted) => Err(pushgate::Error::Interrupted.into()),
                // Its own errors are pushgate_kernel_wait's to tell.
                Ok(_) | Err(_) => Ok(()),
            }
        })
    })
}
