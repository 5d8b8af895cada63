//! The executor that runs kernels on this CPU: each CUDA thread is an OS thread that enters the
//! kernel's C entry point (arch.cuh).

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use libloading::Library;
use pushgate_driver_shim::fork::{OwnedHere, Owner};

use crate::arch::{CpuBlock, CpuThread};
use crate::embedded::{self, CPU_KERNELS, CpuEntry};
use crate::error::{DeviceError, Result};
use crate::executor::{
    Access, BufferMemory, DeviceBuffer, Executor, Launch, LaunchQueue, LoadedModule, Registration, Running,
    RunningKernel, Stream, WaitOutcome,
};
use crate::library;
use crate::lock::lock;
use crate::module::{Cache, Compiler, Key, Source, list, run_compiler};

/// Stack of a kernel's thread: kernels are leaf code with a few words of state.
const STACK_BYTES: usize = 256 << 10;
/// The most threads of one launch; more would only load the scheduler.
const MAX_THREADS: u64 = 32_768;
/// The most dynamic shared memory of a block. A GPU has at most 227 KiB, so this is about as much.
const MAX_SHARED: u32 = 256 << 10;
/// Alignment of device memory: as large as a GPU's allocator gives, and whole pages for callers
/// that register the memory.
const ALIGN: usize = 4096;

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

    fn load_with(source: &Source, cache: &Cache, compiler: &Compiler) -> Result<Arc<dyn LoadedModule>> {
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
            let file = cache.source_file(source)?;
            let mut command = compiler.command();
            command.args(FLAGS).arg("-I").arg(headers);
            if let Some(dir) = source.dir() {
                command.arg("-iquote").arg(dir);
            }
            command.args(["-x", "c++"]).arg(file.path()).arg("-o").arg(out);
            run_compiler(source, command)
        })?;
        let library = open(&path)?;
        Ok(Arc::new(CpuModule {
            name: source.name().to_owned(),
            code: Code::Library(library, source.kernels()),
        }))
    }
}

fn open(path: &Path) -> Result<Library> {
    // SAFETY: the file lies in a folder that only this user can write, and was made from a source
    // whose kernels this user asked to run, so its constructors may do what its kernels may do.
    // dlopen uses RTLD_LOCAL here, so the file's symbols replace none of ours.
    unsafe { Library::new(path) }.map_err(|error| DeviceError::Load {
        module: path.display().to_string(),
        reason: library::explain(&error),
    })
}

enum Code {
    Embedded,
    /// The library, and the kernel names in the source's text, for messages.
    Library(Library, Vec<String>),
}

struct CpuModule {
    name: String,
    code: Code,
}

impl CpuModule {
    fn unknown(&self, kernel: &str) -> DeviceError {
        DeviceError::UnknownKernel {
            kernel: kernel.to_owned(),
            module: self.name.clone(),
            known: list(&self.kernels()),
        }
    }

    /// Finds a kernel's entry point and the size of its parameters.
    fn find(&self, kernel: &str) -> Result<(CpuEntry, u32)> {
        match &self.code {
            Code::Embedded => CPU_KERNELS
                .iter()
                .find(|known| known.name == kernel)
                .map(|known| (known.entry, (known.params_size)()))
                .ok_or_else(|| self.unknown(kernel)),
            Code::Library(library, _) => {
                let size_name = format!("{kernel}_params_size");
                // SAFETY: a symbol NAME with a NAME_params_size beside it comes from
                // PUSHGATE_KERNEL, which gives the two symbols exactly these types; a source that
                // fakes the pair is responsible for the result. The pointers are used only while
                // the module is alive: a launch holds a reference to it.
                let found = unsafe {
                    let size = library.get::<extern "C" fn() -> u32>(size_name.as_bytes());
                    let entry = library.get::<CpuEntry>(kernel.as_bytes());
                    size.and_then(|size| Ok((*entry?, *size)))
                };
                let (entry, size) = found.map_err(|_| self.unknown(kernel))?;
                Ok((entry, size()))
            }
        }
    }
}

impl LoadedModule for CpuModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        match &self.code {
            Code::Embedded => embedded::kernel_names(),
            Code::Library(_, names) => names.clone(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A registered range of host memory.
///
/// A GPU pins the pages. If the range is unmapped before it is unregistered, the GPU goes on using
/// the old pages, even after other memory has been mapped and registered at that address. On the
/// CPU that mistake does no harm and would stay unnoticed, so this executor checks for it.
struct Held {
    addr: usize,
    len: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let start = self.addr & !(rustix::param::page_size() - 1);
        let length = self.addr + self.len - start;
        // SAFETY: msync with MS_ASYNC changes nothing. On Linux it only checks that all of the
        // range is mapped (msync(2), ENOMEM).
        let mapped =
            unsafe { rustix::mm::msync(start as *mut c_void, length, rustix::mm::MsyncFlags::ASYNC) };
        if mapped == Err(rustix::io::Errno::NOMEM) {
            tracing::error!(
                "{} bytes at {:#x} are unmapped and still registered with the device; drop the registration first",
                self.len,
                self.addr
            );
        }
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
        let module = EMBEDDED
            .get_or_init(|| Arc::new(CpuModule { name: "embedded".to_owned(), code: Code::Embedded }));
        Ok(module.clone())
    }

    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>> {
        self.0.check()?;
        Self::load_with(source, &Cache::open()?, &Compiler::cxx()?)
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.0.check()?;
        let heap = Heap::new(bytes, ALIGN)?;
        Ok(DeviceBuffer::new(heap.ptr.as_ptr() as u64, bytes, Box::new(heap)))
    }

    fn register(&self, ptr: NonNull<u8>, len: usize, _: Access, _: bool) -> Result<Registration> {
        self.0.check()?;
        let held = Held { addr: ptr.as_ptr() as usize, len };
        Ok(Registration::new(ptr.as_ptr() as u64, len, Box::new(held)))
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

fn cpu_module(module: &Arc<dyn LoadedModule>) -> Result<&CpuModule> {
    module.as_any().downcast_ref().ok_or(DeviceError::Foreign { handle: "module", executor: "cpu" })
}

// --------------------------------------------------------------------- memory

struct Heap {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory without ties to a thread; `read` and `write` access it through atomics.
unsafe impl Send for Heap {}
// SAFETY: shared access is through atomics (`read`, `write`) or by kernels.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(bytes: usize, align: usize) -> Result<Self> {
        // At least one word, so that an empty buffer has an address too.
        let layout = bytes
            .checked_next_multiple_of(16)
            .and_then(|bytes| Layout::from_size_align(bytes.max(16), align).ok())
            .ok_or(DeviceError::OutOfMemory { bytes })?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(DeviceError::OutOfMemory { bytes })?;
        Ok(Self { ptr, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout. No kernel still uses the memory: that was
        // promised at the kernel's launch.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// A kernel may run at the same time, so whole aligned words are copied as relaxed atomics, as
// arch.cuh accesses them: neither side sees half a word.
impl BufferMemory for Heap {
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        debug_assert!(offset + from.len() <= self.layout.size());
        let (head, rest) = from.split_at(from.len().min(offset.wrapping_neg() % 8));
        let (words, tail) = rest.as_chunks::<8>();
        let at = |offset: usize| self.ptr.as_ptr().wrapping_add(offset);
        // SAFETY: DeviceBuffer has checked that the range lies in the buffer, which lives as long
        // as self and is accessed only through raw pointers and atomics. `base` + 8i is a multiple
        // of 8, because the block is aligned to more than that.
        unsafe {
            for (i, byte) in head.iter().enumerate() {
                AtomicU8::from_ptr(at(offset + i)).store(*byte, Ordering::Relaxed);
            }
            let base = offset + head.len();
            for (i, word) in words.iter().enumerate() {
                AtomicU64::from_ptr(at(base + 8 * i).cast())
                    .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
            }
            let base = base + 8 * words.len();
            for (i, byte) in tail.iter().enumerate() {
                AtomicU8::from_ptr(at(base + i)).store(*byte, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        debug_assert!(offset + to.len() <= self.layout.size());
        let (head, rest) = to.split_at_mut(to.len().min(offset.wrapping_neg() % 8));
        let (words, tail) = rest.as_chunks_mut::<8>();
        let at = |offset: usize| self.ptr.as_ptr().wrapping_add(offset);
        // SAFETY: DeviceBuffer has checked the range, and the accesses are aligned and atomic as in
        // `write`.
        unsafe {
            for (i, byte) in head.iter_mut().enumerate() {
                *byte = AtomicU8::from_ptr(at(offset + i)).load(Ordering::Relaxed);
            }
            let base = offset + head.len();
            for (i, word) in words.iter_mut().enumerate() {
                *word = AtomicU64::from_ptr(at(base + 8 * i).cast()).load(Ordering::Relaxed).to_ne_bytes();
            }
            let base = base + 8 * words.len();
            for (i, byte) in tail.iter_mut().enumerate() {
                *byte = AtomicU8::from_ptr(at(base + i)).load(Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

// ------------------------------------------------------------------- launches

/// A stream. The next launch waits for the end of the launch before it.
#[derive(Default)]
struct CpuStream {
    last: Mutex<Option<Arc<End>>>,
}

impl LaunchQueue for CpuStream {
    fn raw(&self) -> Option<u64> {
        None
    }
}

/// The end of one launch: whether it has ended, and the times of its beginning and end.
#[derive(Default)]
struct End {
    times: Mutex<(Option<Instant>, Option<Instant>)>,
    ended: Condvar,
}

impl End {
    fn begin(&self) {
        lock(&self.times).0.get_or_insert_with(Instant::now);
    }

    fn finish(&self) {
        lock(&self.times).1 = Some(Instant::now());
        self.ended.notify_all();
    }

    fn is_done(&self) -> bool {
        lock(&self.times).1.is_some()
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let times = lock(&self.times);
        let running = |times: &mut (Option<Instant>, Option<Instant>)| times.1.is_none();
        match timeout {
            None => {
                drop(self.ended.wait_while(times, running).unwrap_or_else(PoisonError::into_inner));
                WaitOutcome::Done
            }
            Some(timeout) => {
                let waited = self.ended.wait_timeout_while(times, timeout, running);
                let (times, _) = waited.unwrap_or_else(PoisonError::into_inner);
                if times.1.is_some() { WaitOutcome::Done } else { WaitOutcome::TimedOut }
            }
        }
    }

    fn elapsed(&self) -> Option<Duration> {
        let times = lock(&self.times);
        Some(times.1?.duration_since(times.0?))
    }
}

/// Whether a launch's threads may enter the kernel. Blocks wait for each other, so none may start
/// before all of them exist.
#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Closed,
    Open,
    Cancelled,
}

/// Everything that the threads of one launch share.
struct Job {
    entry: CpuEntry,
    /// The parameters, aligned for any struct.
    params: Vec<u128>,
    blocks: Vec<UnsafeCell<CpuBlock>>,
    /// The memory that `CpuBlock::shared` points to.
    _shared: Vec<Heap>,
    /// Keeps the kernel's code mapped.
    _module: Arc<dyn LoadedModule>,
    before: Option<Arc<End>>,
    gate: Mutex<Gate>,
    opened: Condvar,
    left: AtomicUsize,
    end: Arc<End>,
}

// SAFETY: the raw pointers point into heap blocks that the job owns. Once the job is made, Rust
// only reads `params` and takes addresses of `blocks`; the kernel alone accesses what lies there,
// with atomics.
unsafe impl Send for Job {}
// SAFETY: as for Send: after the job is made, Rust only reads it, and the kernel uses atomics.
unsafe impl Sync for Job {}

impl Job {
    fn new(
        module: Arc<dyn LoadedModule>,
        entry: CpuEntry,
        launch: Launch,
        params: &[u8],
        before: Option<Arc<End>>,
    ) -> Result<Self> {
        let mut copy: Vec<u128> = params
            .chunks(16)
            .map(|chunk| {
                let mut bytes = [0; 16];
                bytes[..chunk.len()].copy_from_slice(chunk);
                u128::from_ne_bytes(bytes)
            })
            .collect();
        copy.push(0); // an address even where there are no parameters
        let shared: Vec<Heap> = if launch.shared_bytes == 0 {
            Vec::new()
        } else {
            (0..launch.grid).map(|_| Heap::new(launch.shared_bytes as usize, 128)).collect::<Result<_>>()?
        };
        let blocks = (0..launch.grid)
            .map(|index| {
                let shared = shared.get(index as usize).map_or(null_mut(), |heap| heap.ptr.as_ptr().cast());
                UnsafeCell::new(CpuBlock::new(index, launch.grid, launch.block, shared))
            })
            .collect();
        Ok(Self {
            entry,
            params: copy,
            blocks,
            _shared: shared,
            _module: module,
            before,
            gate: Mutex::new(Gate::Closed),
            opened: Condvar::new(),
            left: AtomicUsize::new(launch.grid as usize * launch.block as usize),
            end: Arc::default(),
        })
    }

    fn set_gate(&self, gate: Gate) {
        *lock(&self.gate) = gate;
        self.opened.notify_all();
    }

    /// Runs one thread of the launch.
    ///
    /// # Safety
    /// `entry` takes what `params` holds, and the caller of the launch promised that the addresses
    /// in `params` are valid.
    unsafe fn run(&self, block: usize, index: u32) {
        let gate = self
            .opened
            .wait_while(lock(&self.gate), |gate| *gate == Gate::Closed)
            .map_or_else(|poisoned| *poisoned.into_inner(), |gate| *gate);
        if gate == Gate::Cancelled {
            return;
        }
        if let Some(before) = &self.before {
            let _ = before.wait(None);
        }
        self.end.begin();
        let thread = CpuThread { block: self.blocks[block].get(), index: index.into() };
        // SAFETY: `thread` and its block live until the call returns (the job is borrowed). The
        // parameters are aligned to 16 and as large as the kernel asked for. The caller promises
        // the rest.
        unsafe { (self.entry)(&thread, self.params.as_ptr().cast()) };
        // AcqRel: the thread that counts down to zero has seen all that the other threads wrote,
        // and passes it on through End's lock.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end.finish();
        }
    }
}

/// Starts all threads of a job, or none.
///
/// # Safety
/// The requirements of [`Job::run`] hold for every thread.
unsafe fn start(job: &Arc<Job>, kernel: &str, launch: Launch) -> Result<Vec<JoinHandle<()>>> {
    let wanted = u64::from(launch.grid) * u64::from(launch.block);
    let mut handles = Vec::with_capacity(wanted as usize);
    for block in 0..launch.grid {
        for index in 0..launch.block {
            let shared = job.clone();
            let spawned = thread::Builder::new()
                .name(format!("gpu-{block}-{index}"))
                .stack_size(STACK_BYTES)
                // SAFETY: the caller of `start` promises what `Job::run` requires.
                .spawn(move || unsafe { shared.run(block as usize, index) });
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(source) => {
                    let started = handles.len() as u64;
                    job.set_gate(Gate::Cancelled);
                    join(handles);
                    return Err(DeviceError::Threads { kernel: kernel.to_owned(), wanted, started, source });
                }
            }
        }
    }
    job.set_gate(Gate::Open);
    Ok(handles)
}

fn join(handles: Vec<JoinHandle<()>>) {
    for handle in handles {
        // The thread runs C code and a few lines of ours. The panic hook prints a panic in those
        // lines; there is nothing more to do about it here.
        let _ = handle.join();
    }
}

struct CpuRunning {
    job: Arc<Job>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl RunningKernel for CpuRunning {
    fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        let outcome = self.job.end.wait(timeout);
        if outcome == WaitOutcome::Done {
            join(std::mem::take(&mut *lock(&self.handles)));
        }
        Ok(outcome)
    }

    fn is_done(&self) -> Result<bool> {
        Ok(self.job.end.is_done())
    }

    fn elapsed(&self) -> Result<Option<Duration>> {
        Ok(self.job.end.elapsed())
    }
}

impl Drop for CpuRunning {
    fn drop(&mut self) {
        join(std::mem::take(&mut *lock(&self.handles)));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::module::tests::Folder;

    fn words(values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    const FILL: &str = r#"
#include "pushgate/arch.cuh"
using namespace pushgate;
struct fill_params { u64 dst; u64 value; };
PUSHGATE_KERNEL(fill, fill_params)
{
	// Uses shared memory and both barriers, so that these are tested too.
	u64 *shared = (u64 *)shared_memory();
	shared[thread_index()] = p.value;
	block_barrier();
	u64 mine = shared[(thread_index() + 1) % block_size()];
	u64 first = warp_broadcast(thread_index());
	u64 block = block_broadcast(block_index());
	((u64 *)p.dst)[block_index() * block_size() + thread_index()] = mine + first * 1000 + block * 1000000;
}
"#;

    #[test]
    fn bare_store_fills_the_memory() {
        let executor = CpuExecutor::new();
        let module = executor.load_embedded().unwrap();
        let buffer = executor.alloc(64 << 10).unwrap();
        assert_eq!(buffer.addr() % 4096, 0);
        let stream = executor.stream().unwrap();
        // Four blocks, a quarter of the memory each, three rounds.
        let params = words(&[buffer.addr(), 16 << 10, 1, 3]);
        // SAFETY: the buffer outlives the launch and is as long as the kernel is told.
        let running =
            unsafe { executor.launch(&stream, &module, "bare_store", Launch::new(4, 64), &params) }.unwrap();
        assert_eq!(running.wait(None).unwrap(), WaitOutcome::Done);
        assert!(running.is_done().unwrap() && running.elapsed().unwrap().is_some());
        let mut bytes = vec![0; 64 << 10];
        buffer.copy_to_host(&mut bytes).unwrap();
        for (i, pair) in bytes.as_chunks::<16>().0.iter().enumerate() {
            assert_eq!(pair[..8], 2u64.to_ne_bytes());
            assert_eq!(pair[8..], (i as u64 % 1024).to_ne_bytes());
        }
    }

    #[test]
    fn refused_launches_name_the_wrong_value() {
        let executor = CpuExecutor::new();
        let module = executor.load_embedded().unwrap();
        let stream = executor.stream().unwrap();
        let error = |kernel, launch, params: &[u8]| {
            // SAFETY: none of these launches reaches the kernel.
            unsafe { executor.launch(&stream, &module, kernel, launch, params) }.unwrap_err().to_string()
        };
        let good = Launch::new(1, 1);
        assert!(error("bare_store", good, &[0; 31]).contains("takes 32 bytes of parameters, not 31"));
        let unknown = error("bear_store", good, &[0; 32]);
        assert!(unknown.contains("`bear_store`") && unknown.contains("bare_store"), "{unknown}");
        assert!(error("bare_store", Launch::new(1, 1025), &[0; 32]).contains("block = 1025"));
        assert!(error("bare_store", Launch::new(0, 1), &[0; 32]).contains("grid = 0"));
        assert!(error("bare_store", Launch::new(1000, 1000), &[0; 32]).contains("1000000"));
        assert_eq!(executor.max_resident_blocks(&module, "bare_store", 64, 0).unwrap(), u32::MAX);
    }

    #[test]
    fn copies_keep_to_the_buffer_and_to_odd_ends() {
        let buffer = CpuExecutor::new().alloc(100).unwrap();
        let from: Vec<u8> = (0..50).collect();
        buffer.copy_from_host_at(3, &from).unwrap();
        let mut to = vec![9; 54];
        buffer.copy_to_host_at(1, &mut to).unwrap();
        assert_eq!(to[..2], [0, 0]);
        assert_eq!(to[2..52], from);
        assert_eq!(to[52..], [0, 0]);
        let error = buffer.copy_from_host_at(51, &from).unwrap_err().to_string();
        assert!(error.contains("50 bytes at offset 51 do not fit into 100"), "{error}");
        assert!(buffer.copy_from_host_at(usize::MAX, &from).is_err());
    }

    /// Makes a compiler that counts how often it compiles.
    fn counting_compiler(folder: &Folder) -> Compiler {
        let script = folder.0.join("counting");
        let log = folder.0.join("log");
        let text = format!(
            "#!/bin/sh\ncase \"$*\" in --version) ;; *) echo >>{} ;; esac\nexec c++ \"$@\"\n",
            log.display()
        );
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
        Compiler::new(vec!["/bin/sh".into(), script.into()]).unwrap()
    }

    #[test]
    fn a_users_source_is_compiled_once_and_runs() {
        let folder = Folder::new("user");
        let compiler = counting_compiler(&folder);
        let cache = Cache::at(folder.0.join("cache")).unwrap();
        let compiled = || fs::read_to_string(folder.0.join("log")).map_or(0, |log| log.lines().count());

        let source = Source::text("fill.cu", FILL);
        let executor = CpuExecutor::new();
        drop(CpuExecutor::load_with(&source, &cache, &compiler).unwrap());
        assert_eq!(compiled(), 1);
        let module = CpuExecutor::load_with(&source, &cache, &compiler).unwrap();
        assert_eq!(compiled(), 1, "the second load is from the cache");
        assert_eq!(module.kernels(), ["fill"]);

        let (grid, block) = (4u64, 70u64); // the last warp is short
        let buffer = executor.alloc((grid * block * 8) as usize).unwrap();
        let stream = executor.stream().unwrap();
        let launch = Launch::new(grid as u32, block as u32).shared_bytes(block as u32 * 8).cooperating();
        // Two launches on one stream: the second starts when the first has ended.
        let runs: Vec<Running> = [5, 7]
            .iter()
            .map(|value| {
                // SAFETY: the buffer has a word for each thread and outlives both launches.
                unsafe { executor.launch(&stream, &module, "fill", launch, &words(&[buffer.addr(), *value])) }
                    .unwrap()
            })
            .collect();
        drop(module); // the launches keep the code
        for run in runs {
            assert_eq!(run.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        }
        let mut bytes = vec![0; buffer.len()];
        buffer.copy_to_host(&mut bytes).unwrap();
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let i = i as u64;
            assert_eq!(u64::from_ne_bytes(*word), 7 + (i % block / 32 * 32) * 1000 + i / block * 1_000_000);
        }
    }

    #[test]
    fn a_compile_error_cites_the_users_line() {
        let folder = Folder::new("error");
        let cache = Cache::at(folder.0.join("cache")).unwrap();
        let source = Source::text("wrong.cu", "int fine;\nint wrong = nonsense;\n");
        let compiler = Compiler::cxx().unwrap();
        let error = CpuExecutor::load_with(&source, &cache, &compiler).unwrap_err().to_string();
        assert!(error.contains("wrong.cu does not compile"), "{error}");
        assert!(error.contains("wrong.cu:2") && error.contains("nonsense"), "{error}");
    }

    /// A kernel that waits until a word is not 0.
    pub(crate) const GATE: &str = r#"
#include "pushgate/arch.cuh"
using namespace pushgate;
struct gate_params { u64 word; };
PUSHGATE_KERNEL(gate, gate_params)
{
	backoff pause;
	while (!load<order::acquire>((const u64 *)p.word))
		pause.wait();
}
"#;

    #[test]
    fn a_wait_ends_in_time_and_streams_run_side_by_side() {
        let folder = Folder::new("wait");
        let cache = Cache::at(folder.0.join("cache")).unwrap();
        let module =
            CpuExecutor::load_with(&Source::text("gate.cu", GATE), &cache, &Compiler::cxx().unwrap())
                .unwrap();
        let executor = CpuExecutor::new();
        let word = executor.alloc(8).unwrap();
        let (one, two) = (executor.stream().unwrap(), executor.stream().unwrap());
        let launch = |stream: &Stream, buffer: &DeviceBuffer| {
            // SAFETY: the buffer has the word and outlives the launch.
            unsafe {
                executor.launch(stream, &module, "gate", Launch::new(1, 2), &words(&[buffer.addr()])).unwrap()
            }
        };
        let open = executor.alloc(8).unwrap();
        open.copy_from_host(&1u64.to_ne_bytes()).unwrap();

        let stuck = launch(&one, &word);
        assert_eq!(stuck.wait(Some(Duration::from_millis(20))).unwrap(), WaitOutcome::TimedOut);
        let behind = launch(&one, &open);
        let beside = launch(&two, &open);
        assert_eq!(beside.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        assert!(!stuck.is_done().unwrap() && !behind.is_done().unwrap());
        assert!(behind.elapsed().unwrap().is_none());
        word.copy_from_host(&1u64.to_ne_bytes()).unwrap();
        drop(behind); // joins, and so does the one it waits for end
        assert!(stuck.is_done().unwrap());
    }
}
