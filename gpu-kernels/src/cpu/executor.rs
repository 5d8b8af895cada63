//! [`CpuExecutor`]: the trait [`Executor`] over the other files of this folder.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use pushgate_driver_shim::fork::{OwnedHere, Owner};

use super::host_range::CpuHostRange;
use super::launch::{CpuRunning, Job, start};
use super::memory::{ALIGN, Heap};
use super::module::{CpuModule, cpu_module};
use super::stream::CpuStream;
use crate::cache::{Cache, Key};
use crate::compiler::{Compiler, run_compiler, source_file};
use crate::error::{DeviceError, Result};
use crate::executor::{Access, DeviceBuffer, Executor, Launch, LoadedModule, Registration, Running, Stream};
use crate::image::Image;
use crate::lock::lock;
use crate::source::Source;

/// The most threads of one launch; more would only load the scheduler.
const MAX_THREADS: u64 = 32_768;
/// The most dynamic shared memory of a block. A GPU has at most 227 KiB, so this is about as much.
const MAX_SHARED: u32 = 256 << 10;

/// An executor that runs kernels on this CPU.
#[derive(Debug)]
pub struct CpuExecutor(Owner);

impl Default for CpuExecutor {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuExecutor {
    /// Makes the executor; there is no device to open.
    pub fn new() -> Self {
        Self(Owner::here())
    }

    /// Loads a source that `compiler` compiles, unless the cache has it.
    pub(super) fn load_with(
        source: &Source,
        cache: &Cache,
        compiler: &Compiler,
    ) -> Result<Arc<dyn LoadedModule>> {
        // Symbols are hidden by default, so that two modules in one process never share the inline
        // variables of the headers.
        const FLAGS: &[&str] =
            &["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-unknown-pragmas"];
        let mut key = Key::new("cpu");
        compiler.add_to(&mut key);
        for flag in FLAGS {
            key.add(flag.as_bytes());
        }
        source.add_to(&mut key);
        let path = cache.get(&key, "so", |out| {
            let headers = cache.headers()?;
            let file = source_file(cache, source)?;
            let mut command = compiler.command();
            command.args(FLAGS).arg("-I").arg(headers);
            if let Some(dir) = source.dir() {
                command.arg("-iquote").arg(dir);
            }
            command.args(["-x", "c++"]).arg(file.path()).arg("-o").arg(out);
            run_compiler(source, command)
        })?;
        Ok(Arc::new(CpuModule::open(&path, source)?))
    }
}

impl Executor for CpuExecutor {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn describe(&self) -> String {
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        format!("{cores} CPU core(s), one OS thread for each GPU thread")
    }

    fn device_index(&self) -> u32 {
        0
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>> {
        self.0.check()?;
        static EMBEDDED: OnceLock<Arc<CpuModule>> = OnceLock::new();
        Ok(EMBEDDED.get_or_init(|| Arc::new(CpuModule::embedded())).clone())
    }

    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>> {
        self.0.check()?;
        Self::load_with(source, &Cache::open()?, &Compiler::cxx()?)
    }

    fn load_image(&self, image: &Image) -> Result<Arc<dyn LoadedModule>> {
        self.0.check()?;
        image.check_cpu()?;
        Ok(Arc::new(CpuModule::load(image)?))
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.0.check()?;
        let heap = Heap::new(bytes, ALIGN)?;
        Ok(DeviceBuffer::new(heap.as_ptr() as u64, bytes, Box::new(heap)))
    }

    fn register(&self, ptr: NonNull<u8>, len: usize, _: Access, _: bool) -> Result<Registration> {
        self.0.check()?;
        let range = CpuHostRange { addr: ptr.as_ptr() as usize, len };
        Ok(Registration::new(ptr.as_ptr() as u64, len, Box::new(range)))
    }

    fn stream(&self) -> Result<Stream> {
        self.0.check()?;
        Ok(Stream::new(CpuStream::default()))
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        launch: Launch,
        params: &[u8],
    ) -> Result<Running> {
        self.0.check()?;
        let queue =
            stream.queue::<CpuStream>().ok_or(DeviceError::Foreign { handle: "stream", executor: "cpu" })?;
        let (entry, size) = cpu_module(module)?.find(kernel)?;
        if params.len() != size as usize {
            return Err(DeviceError::ParamsSize {
                kernel: kernel.to_owned(),
                given: params.len(),
                expected: size as usize,
            });
        }
        launch.check(kernel, MAX_SHARED)?;
        let wanted = u64::from(launch.grid) * u64::from(launch.block);
        if wanted > MAX_THREADS {
            return Err(DeviceError::Launch {
                kernel: kernel.to_owned(),
                what: "grid x block",
                value: wanted,
                allowed: format!("1 to {MAX_THREADS} threads on the device `cpu`"),
            });
        }

        let mut last = lock(&queue.last);
        let job = Arc::new(Job::new(module.clone(), entry, launch, params, last.clone())?);
        // SAFETY: `find` returned the entry point of this kernel, the parameters have the size that
        // the kernel asked for, and the caller promises that the addresses in them are valid.
        let handles = unsafe { start(&job, kernel, launch) }?;
        *last = Some(job.end.clone());
        Ok(Running(OwnedHere::new(Box::new(CpuRunning { job, handles: Mutex::new(handles) }))))
    }

    fn max_resident_blocks(
        &self,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        cpu_module(module)?.find(kernel)?;
        Launch::new(1, block).shared_bytes(shared_bytes).check(kernel, MAX_SHARED)?;
        // The OS schedules all threads in turn, so every block counts as resident.
        Ok(u32::MAX)
    }
}
