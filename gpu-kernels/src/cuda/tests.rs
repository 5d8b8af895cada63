//! Tests of the CUDA executor: with a stand-in for the driver always, on a GPU where there is one.

use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pushgate_driver_shim::memory::SharedMemory;

use super::executor::CudaExecutor;
use super::export;
use super::module::CudaModule;
use super::stub::{CHILD, DRIVER, build_stub, run_child, stub_source};
use crate::cache::tests::Folder;
use crate::error::{DeviceError, Result};
use crate::executor::{Access, Executor, Launch, LoadedModule, Running, WaitOutcome};
use crate::lock::lock;
use crate::mover::CudaCopy;
use crate::ordered::OrderedCopies;
use crate::source::Source;

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

/// Runs in a process of its own, with the driver of `stub`.
#[test]
#[ignore = "another test starts this in a process of its own"]
fn child() {
    assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
    let executor = CudaExecutor::new(0).unwrap();
    assert!(CudaExecutor::new(1).unwrap_err().to_string().contains("device 1 does not exist"));
    let second = CudaExecutor::new(0).unwrap();
    assert!(Arc::ptr_eq(executor.context(), second.context()));
    assert!(executor.describe().contains("Stub, sm_90, 4 SMs, PCI 0000:01:00.0"), "{}", executor.describe());

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

    // The stub registers one memory at a time.
    drop(one);
    let shared: Arc<dyn Executor> = Arc::new(second);
    let words = SharedMemory::builder("test", OrderedCopies::BYTES_TO_COPY_WITHIN).create().unwrap();
    let mut queue = OrderedCopies::new(&shared, words).unwrap();
    let (long, mut back) = (vec![3u8; 300_000], vec![0u8; 300_000]);
    let memory = shared.alloc(700_000).unwrap();
    let at = |offset: u64| memory.addr() + offset;
    // SAFETY: the memories outlive the queue's work, and the stretches lie in them.
    unsafe {
        // Two rows and a rest; one byte; a store, which waits for the next copy; a long copy.
        for (offset, len) in [(0, 31), (40, 1), (50, 2), (60, 64)] {
            queue.copy_in(at(offset), host.as_ptr(), len).unwrap();
        }
        queue.store(at(128), 5).unwrap();
        queue.copy_out(queue.word_address(0), at(128), 8).unwrap();
        assert_eq!((queue.mark().unwrap(), queue.look().unwrap(), queue.word(0)), (1, 1, 5));
        queue.copy_in(at(200), long.as_ptr(), long.len()).unwrap();
        queue.copy_within(at(300_200), at(0), 99).unwrap();
        assert_eq!((queue.mark().unwrap(), queue.look().unwrap()), (2, 1), "an event that is not over yet");
        while queue.look().unwrap() < 2 {}
        queue.copy_out(back.as_mut_ptr() as u64, at(300_200), 99).unwrap();
        queue.mark().unwrap();
    }
    assert!(queue.look().unwrap() == 3 && queue.is_done());
    let sevens: Vec<usize> = (0..99).filter(|i| back[*i] == 7).collect();
    let expected: Vec<usize> = (0..31).chain([40, 50, 51]).chain(60..99).collect();
    assert_eq!(sevens, expected);
    drop((queue, memory, shared));

    drop((six, ticket, copies, module, word, executor));
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

/// Copies of every length by [`OrderedCopies`], beside a kernel that runs and a thread whose call of the driver waits for that
/// kernel to end. Returns what is left to do once the kernel has ended.
fn copies_go_on_while_memory_is_freed(cuda: &CudaExecutor) -> impl FnOnce() {
    let executor: Arc<dyn Executor> = Arc::new(CudaExecutor::new(0).unwrap());
    let words = SharedMemory::builder("test", OrderedCopies::BYTES_TO_COPY_WITHIN).create().unwrap();
    let mut queue = OrderedCopies::new(&executor, words).unwrap();
    let (most, host) = (3 << 20, SharedMemory::builder("test", 8 << 20).create().unwrap());
    let seen = OrderedCopies::register(&executor, host.as_ptr(), host.len(), Access::ReadWrite).unwrap();
    // Memory that does not belong to the context in which the thread below waits, as a window of NCCL belongs to no context: calls of the
    // driver on memory of that context would wait too.
    let beside = executor.as_cuda().unwrap().beside().unwrap();
    let mut memory = 0;
    {
        let _current = beside.current().unwrap();
        // SAFETY: writes one address, which is freed below.
        assert_eq!(unsafe { (beside.driver.cuMemAlloc_v2)(&mut memory, 8 << 20) }, 0);
    }
    let context = cuda.context().clone();
    let mut waits = 0;
    {
        let _current = context.current().unwrap();
        // SAFETY: writes one address, which the thread below frees.
        assert_eq!(unsafe { (context.driver.cuMemAlloc_v2)(&mut waits, 1 << 20) }, 0);
    }
    let frees = thread::spawn(move || {
        let _current = context.current().unwrap();
        // SAFETY: allocated above, and used by nobody.
        assert_eq!(unsafe { (context.driver.cuMemFree_v2)(waits) }, 0);
    });
    thread::sleep(Duration::from_millis(50));
    println!(
        "a thread that frees memory {}",
        if frees.is_finished() { "has ended" } else { "waits for the kernel" }
    );
    // What a connection needs that is made now, and a queue whose first operation is a store.
    let began = std::time::Instant::now();
    let late = SharedMemory::builder("test", OrderedCopies::BYTES).create().unwrap();
    let mut second = OrderedCopies::new(&executor, late).unwrap();
    // SAFETY: a word of memory that nobody else uses now.
    unsafe { second.store(memory + 64, 3).unwrap() };
    let mark = second.mark().unwrap();
    while second.look().unwrap() < mark {
        assert!(began.elapsed() < pushgate_tests::hang(), "a queue that is made now waits for the kernel");
        thread::yield_now();
    }
    println!("another queue, and its first store: {:?}", began.elapsed());
    let byte = |len: usize, i: usize| (len * 31 + i * 7 + i / 251) as u8;
    for len in [1, 2, 3, 8, 31, 4096, 20_001, 65_535, 65_536, most] {
        // SAFETY: `most` bytes from the first on, which the device does not use now.
        let from = unsafe { std::slice::from_raw_parts_mut(host.as_ptr().as_ptr(), len) };
        from.iter_mut().enumerate().for_each(|(i, at)| *at = byte(len, i));
        let began = std::time::Instant::now();
        // SAFETY: the stretches lie in their memories, which outlive the queue's work, and do not overlap.
        let mark = unsafe {
            queue.copy_in(memory + 5, from.as_ptr(), len).unwrap();
            queue.copy_within(memory + (4 << 20) + 3, memory + 5, len).unwrap();
            queue.store(memory + (8 << 20) - 8, len as u64).unwrap();
            queue.copy_out(seen.device_addr() + (4 << 20) + 1, memory + (4 << 20) + 3, len).unwrap();
            queue.copy_out(queue.word_address(7), memory + (8 << 20) - 8, 8).unwrap();
            queue.mark().unwrap()
        };
        while queue.look().unwrap() < mark {
            assert!(began.elapsed() < pushgate_tests::hang(), "{len} bytes wait for the kernel");
            thread::yield_now();
        }
        println!("{len} bytes in, within and out beside a kernel: {:?}", began.elapsed());
        // SAFETY: after the mark, nobody writes there.
        let to = unsafe { std::slice::from_raw_parts(host.as_ptr().as_ptr().add((4 << 20) + 1), len) };
        assert!(to.iter().enumerate().all(|(i, at)| *at == byte(len, i)), "{len} bytes");
        assert_eq!(queue.word(7), len as u64);
    }
    move || {
        frees.join().unwrap();
        drop((second, queue, seen));
        let _current = beside.current().unwrap();
        // SAFETY: allocated above; the queues that used it are gone.
        assert_eq!(unsafe { (beside.driver.cuMemFree_v2)(memory) }, 0);
    }
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
        let run = unsafe { executor.launch(&stream, &embedded, "bare_store", Launch::new(4, 64), &params) };
        assert_eq!(run.unwrap().wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        let mut bytes = vec![0; 64 << 10];
        buffer.copy_to_host(&mut bytes).unwrap();
        for (i, pair) in bytes.as_chunks::<16>().0.iter().enumerate() {
            assert_eq!(pair[..], words(&[2, i as u64 % 1024]));
        }
    }
    // SAFETY: the launch is refused before the kernel runs.
    let short = unsafe { executor.launch(&stream, &embedded, "bare_store", Launch::new(4, 64), &[0; 31]) };
    assert!(matches!(short, Err(DeviceError::ParamsSize { expected: 32, given: 31, .. })), "{short:?}");

    // A read-only mapping, as a peer's window is.
    let file = rustix::fs::memfd_create("pushgate-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    // SAFETY: a new mapping that nothing else refers to; it is never unmapped.
    let mapped = unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(std::ptr::null_mut(), 1 << 20, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap()
    };
    let read_only = executor.register(NonNull::new(mapped.cast()).unwrap(), 1 << 20, Access::ReadOnly, false);
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
    let (flushed, took) = export::tests::timed_flush(&executor);
    println!("flush beside a kernel: {flushed:?}, {took:?}");
    assert!(took < pushgate_tests::hang(), "the kernel waits until it is let go");
    drop(buffer);
    let copied = copies_go_on_while_memory_is_freed(&executor);
    assert!(!waiting.is_done().unwrap());
    host.copy_from_host(&1u64.to_ne_bytes()).unwrap();
    assert_eq!(waiting.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
    assert!(waiting.elapsed().unwrap().unwrap() >= Duration::from_millis(40));
    copied();
    assert!(lock(&executor.context().ledger).freed.is_empty());
}

#[test]
fn every_call_has_its_context_and_nothing_is_left() {
    let folder = Folder::new("driver");
    build_stub(&folder, &format!("{DRIVER}{}", stub_source(0, 13000, 1, DRIVER)));
    let text = run_child("cuda::tests::child", &folder.0);
    assert!(text.contains("CHILD depth 0 live 0 flushed 1 pinned 3"), "{text}");
}
