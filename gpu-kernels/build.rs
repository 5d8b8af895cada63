//! Compiles kernels/*.cu twice: as C++17 for the CPU executor (always), and to fatbins for the GPU
//! (where nvcc is found; otherwise the executor compiles with NVRTC at run time). Then writes the
//! tables that src/embedded.rs includes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[path = "src/build_support.rs"]
mod build_support;

/// Checks of the structures that arch.rs mirrors: a mismatch fails here rather than in a kernel.
const LAYOUT: &str = r#"
#include "pushgate/arch.cuh"
using namespace pushgate;
static_assert(sizeof(cpu_barrier) == 16 && __builtin_offsetof(cpu_barrier, generation) == 4, "arch.rs: CpuBarrier");
static_assert(__builtin_offsetof(cpu_barrier, slot) == 8, "arch.rs: CpuBarrier");
static_assert(sizeof(cpu_block) == 552 && __builtin_offsetof(cpu_block, grid) == 4, "arch.rs: CpuBlock");
static_assert(__builtin_offsetof(cpu_block, size) == 8, "arch.rs: CpuBlock");
static_assert(__builtin_offsetof(cpu_block, shared) == 16, "arch.rs: CpuBlock");
static_assert(__builtin_offsetof(cpu_block, barrier) == 24, "arch.rs: CpuBlock");
static_assert(__builtin_offsetof(cpu_block, warps) == 40, "arch.rs: CpuBlock");
static_assert(sizeof(cpu_thread) == 16 && __builtin_offsetof(cpu_thread, index) == 8, "arch.rs: CpuThread");
"#;

fn main() {
    // Under loom only `copier/wake.rs` is built, which needs no kernels.
    if env::var_os("CARGO_CFG_LOOM").is_some() {
        return;
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let include = root.join("include");
    let abi_include = root.join("../driver-shim/include");
    let abi = abi_include.join("pushgate/abi.h");

    for path in
        [&root.join("kernels"), &include, &abi, &root.join("build.rs"), &root.join("src/build_support.rs")]
    {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    for name in ["PUSHGATE_NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }

    let sources = files(&root.join("kernels"), "cu");
    let mut headers = vec![(String::from("pushgate/abi.h"), abi)];
    for path in files(&include.join("pushgate"), "cuh") {
        headers.push((format!("pushgate/{}", file_name(&path)), path));
    }

    let kernels = compile_for_cpu(&out, &sources, &[&include, &abi_include]);
    let fatbins = compile_for_gpu(&out, &sources, &[&include, &abi_include]);
    let tables = tables(&headers, &sources, &kernels, &fatbins);
    fs::write(out.join("embedded.rs"), tables).expect("OUT_DIR is writable");
}

fn compile_for_cpu(out: &Path, sources: &[PathBuf], include: &[&Path]) -> Vec<String> {
    let layout = out.join("layout.cu");
    fs::write(&layout, LAYOUT).expect("OUT_DIR is writable");

    // No C++ library is needed and none is linked. Kernels are exported by their macro; all other
    // symbols stay hidden, so that they can't clash with those of a user's module.
    cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(3)
        .pic(true)
        .includes(include)
        .flag("-fvisibility=hidden")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fno-threadsafe-statics")
        .flag("-Wno-unknown-pragmas")
        .flag("-xc++")
        .file(layout)
        .files(sources)
        .compile("pushgate_kernels_cpu");

    let mut kernels = Vec::new();
    for source in sources {
        let text = fs::read_to_string(source).expect("listed a moment ago");
        kernels.extend(build_support::kernel_names(&text));
    }
    kernels
}

/// Compiles one fatbin for each source, or none at all: with only some of the kernels, the failure
/// would just come later, at run time.
fn compile_for_gpu(out: &Path, sources: &[PathBuf], include: &[&Path]) -> Vec<(String, PathBuf)> {
    let Some(nvcc) = build_support::find_nvcc() else {
        if env::var_os("PUSHGATE_NVCC").is_some_and(|named| !named.is_empty()) {
            println!(
                "cargo:warning=PUSHGATE_NVCC names no file; GPU kernels will be compiled by NVRTC at run time"
            );
        }
        return Vec::new();
    };
    // An nvcc that does not know one of these GPUs leaves it to the driver, which compiles the code for compute_90.
    let known = Command::new(&nvcc).arg("--list-gpu-code").output().map(|output| output.stdout);
    let known = String::from_utf8_lossy(&known.unwrap_or_default()).into_owned();
    let is_known = |n: &&str| known.lines().any(|line| line.strip_prefix("sm_") == Some(n));
    let newer = ["100", "103", "121"].into_iter().filter(is_known);
    let mut code = vec!["-gencode=arch=compute_90,code=[sm_90,compute_90]".to_owned()];
    code.extend(["80"].into_iter().chain(newer).map(|n| format!("-gencode=arch=compute_{n},code=sm_{n}")));
    let mut fatbins = Vec::new();
    for source in sources {
        let name = file_name(source);
        let fatbin = out.join(format!("{name}.fatbin"));
        let mut command = Command::new(&nvcc);
        command.args(["-fatbin", "-std=c++17", "-O3"]);
        command.args(&code);
        for dir in include {
            command.arg("-I").arg(dir);
        }
        command.arg(source).arg("-o").arg(&fatbin);
        match command.output() {
            Ok(output) if output.status.success() => fatbins.push((name, fatbin)),
            Ok(output) => {
                println!(
                    "cargo:warning={} failed on {name}; the GPU kernels will be compiled at run time",
                    nvcc.display()
                );
                for line in String::from_utf8_lossy(&output.stderr).lines().take(12) {
                    println!("cargo:warning={line}");
                }
                return Vec::new();
            }
            Err(error) => {
                println!(
                    "cargo:warning={} does not start ({error}); the GPU kernels will be compiled at run time",
                    nvcc.display()
                );
                return Vec::new();
            }
        }
    }
    fatbins
}

fn tables(
    headers: &[(String, PathBuf)],
    sources: &[PathBuf],
    kernels: &[String],
    fatbins: &[(String, PathBuf)],
) -> String {
    let mut text =
        String::from("/// (name in an #include, text).\npub static HEADERS: &[(&str, &str)] = &[\n");
    for (name, path) in headers {
        writeln!(text, "    ({name:?}, include_str!({:?})),", path.display().to_string()).unwrap();
    }
    text += "];\n/// (file name, text).\npub static SOURCES: &[(&str, &str)] = &[\n";
    for path in sources {
        writeln!(text, "    ({:?}, include_str!({:?})),", file_name(path), path.display().to_string())
            .unwrap();
    }
    text += "];\n/// (source's file name, image), one for each source, or none.\npub static FATBINS: &[(&str, &[u8])] = &[\n";
    for (name, path) in fatbins {
        writeln!(text, "    ({name:?}, include_bytes!({:?})),", path.display().to_string()).unwrap();
    }
    text += "];\nunsafe extern \"C\" {\n";
    for name in kernels {
        writeln!(text, "    fn {name}(thread: *const CpuThread, params: *const c_void);").unwrap();
        writeln!(text, "    safe fn {name}_params_size() -> u32;").unwrap();
    }
    text +=
        "}\n/// Every kernel that is compiled in, for the CPU.\npub static CPU_KERNELS: &[CpuKernel] = &[\n";
    for name in kernels {
        writeln!(text, "    CpuKernel {{ name: {name:?}, entry: {name}, params_size: {name}_params_size }},")
            .unwrap();
    }
    text += "];\n";
    text
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    files
}

fn file_name(path: &Path) -> String {
    path.file_name().expect("a file has a name").to_string_lossy().into_owned()
}
