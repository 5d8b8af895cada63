//! Tests of the CPU executor.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use super::CpuExecutor;
use crate::cache::Cache;
use crate::cache::tests::Folder;
use crate::compiler::Compiler;
use crate::executor::{DeviceBuffer, Executor, Launch, Running, Stream, WaitOutcome};
use crate::image::Image;
use crate::source::Source;

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
        CpuExecutor::load_with(&Source::text("gate.cu", GATE), &cache, &Compiler::cxx().unwrap()).unwrap();
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

#[test]
fn a_library_that_was_compiled_before_is_loaded_from_bytes_and_runs() {
    let folder = Folder::new("image");
    let compiler = counting_compiler(&folder);
    let cache = Cache::at(folder.0.join("cache")).unwrap();
    let executor = CpuExecutor::new();
    let compiled = |text: &str| {
        drop(CpuExecutor::load_with(&Source::text("fill.cu", text), &cache, &compiler).unwrap());
        let files = fs::read_dir(folder.0.join("cache")).unwrap().map(|entry| entry.unwrap().path());
        let libraries = files.filter(|path| path.extension().is_some_and(|extension| extension == "so"));
        let newest = libraries.max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap()).unwrap();
        let image = Image::path(&newest).unwrap();
        fs::remove_file(newest).unwrap();
        image
    };
    // Two of one name: each module has its own code, also where both are loaded.
    let images = [compiled(FILL), compiled(&FILL.replace("first * 1000", "first * 2000"))];
    let modules: Vec<_> = images.iter().map(|image| executor.load_image(image).unwrap()).collect();
    let stream = executor.stream().unwrap();
    for (module, factor) in modules.iter().zip([1000, 2000]) {
        assert_eq!(module.kernels(), ["fill"]);
        let buffer = executor.alloc(64 * 8).unwrap();
        let launch = Launch::new(1, 64).shared_bytes(64 * 8);
        let params = words(&[buffer.addr(), 3]);
        // SAFETY: the buffer has a word for each thread and outlives the launch.
        let run = unsafe { executor.launch(&stream, module, "fill", launch, &params) }.unwrap();
        assert_eq!(run.wait(Some(pushgate_tests::hang())).unwrap(), WaitOutcome::Done);
        let mut bytes = vec![0; buffer.len()];
        buffer.copy_to_host(&mut bytes).unwrap();
        let last = u64::from_ne_bytes(*bytes.last_chunk().unwrap());
        assert_eq!(last, 3 + 32 * factor);
        let refused = |kernel: &str, params: &[u8]| {
            // SAFETY: the launch is refused.
            unsafe { executor.launch(&stream, module, kernel, launch, params) }.unwrap_err().to_string()
        };
        assert!(refused("fall", &params).contains("has no kernel `fall`; it has: fill"));
        assert!(refused("fill", &params[1..]).contains("takes 16 bytes of parameters, not 15"));
    }
    let e = executor.load_image(&Image::bytes("k.ptx", ".version 8.5\n.target sm_80\n").unwrap());
    assert!(
        e.unwrap_err().to_string().starts_with("image k.ptx is for PTX of sm_80, and the device `cpu` takes")
    );
}
