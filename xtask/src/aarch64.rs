//! The project for 64-bit ARM (Grace hosts, DGX Spark, Graviton). C and C++: warnings are errors, and QEMU runs what can run in a
//! program of its own. Then the kernel module, which nothing loads, and the Rust code (`programs`).

mod litmus;
mod pages;
mod programs;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

pub use self::toolchain::Toolchain;
use crate::bench::{Bench, Outcome};
use crate::output::say;
use crate::paths::Paths;
use crate::progress::Guard;
use crate::system::Need;
use crate::vm::kernel;
use crate::{cuda, kmod, layout, process};

/// The script that has a namespace's kernel start programs for 64-bit ARM by QEMU.
pub const ENTER: &str = include_str!("aarch64/enter.sh");

/// What builds for 64-bit ARM, and runs what was built.
pub struct Cross {
    /// Compilers, linkers and the like.
    pub tools: Toolchain,
    /// QEMU for single programs.
    pub emulator: PathBuf,
}

impl Cross {
    /// All of it, fetched if it is not there.
    pub fn get(paths: &Paths, guard: Guard) -> Result<Cross> {
        Ok(Cross { emulator: emulator(paths, guard)?, tools: Toolchain::get(paths, guard)? })
    }

    /// What runs a program that takes loader and libraries from where ARM's hosts have them.
    pub fn run(&self, program: &Path, dir: &Path) -> Command {
        let mut command = process::command(&self.emulator, dir);
        command.arg("-L").arg(self.tools.root()).arg(program);
        command
    }
}

/// What the step needs beside what is fetched.
pub const NEEDS: &[Need] = &[Need::Cxx, Need::Python, Need::ModuleBuild, Need::KernelBuild, Need::Qemu];

/// The scenarios of tests/litmus/orderings.cc that run with nothing weakened: each operation of the device API, with threads
/// of every scope, against engines that read and write the payload. (QEMU on x86 shows no reordering that x86 forbids.)
const SCENARIOS: &[&str] =
    &["put", "share", "recv-thread", "recv-block", "recv-warp", "signal-block", "cq-block", "flush-block"];

/// Compiles and runs everything.
pub fn step(bench: &mut Bench) -> Result<Outcome> {
    let Cross { tools, emulator } = Cross::get(&bench.paths, bench.guard)?;
    check(&bench.paths, &tools, &emulator, bench.guard)?;
    litmus::run(&bench.paths, &tools, bench.guard)?;
    let module = kmod::copied(&bench.paths, "aarch64")?;
    let headers = tools.kernel_headers(bench.guard)?;
    kmod::make(tools.make(&module), &headers, &module, &["W=1", "PUSHGATE_TEST=m"], bench.guard)?;
    programs::run(bench, &tools, &emulator)?;
    Ok(Outcome::Passed)
}

/// What is C and C++.
fn check(paths: &Paths, tools: &Toolchain, emulator: &Path, guard: Guard) -> Result<()> {
    let out = paths.scratch("aarch64")?;
    let compiler = |which: &str| {
        let mut command = process::command(tools.compilers().join(which), &paths.root);
        // Linked statically, so that QEMU needs no ARM libraries.
        command.args(["-static", "-Wall", "-Wextra", "-Werror"]);
        command
    };
    let run = |program: &Path| {
        let mut command = process::command(emulator, &paths.root);
        command.arg(program);
        command
    };
    for (which, standard, file) in [("cc", "-std=c11", "layout.c"), ("c++", "-std=c++17", "layout.cpp")] {
        layout::check_with((compiler(which), standard), &out.join(file), run, paths, guard)?;
    }
    let objects = |standard: &str, language: &str, source: &Path| {
        let mut command = compiler(if language == "c" { "cc" } else { "c++" });
        // `#pragma unroll` is for nvcc; a constant may be for the GPU's part of a source alone.
        command.args([standard, "-O2", "-Wno-unknown-pragmas", "-Wno-unused-const-variable"]);
        command.args(["-c", "-x", language]);
        command.args(cuda::includes()).arg(source);
        let name = source.file_name().expect("a source has a name").to_string_lossy();
        command.arg("-o").arg(out.join(format!("{name}{standard}.o")));
        command
    };
    let header = Path::new("c-api/include/pushgate/pushgate.h");
    let mut compile: Vec<Command> = Vec::new();
    for (standard, language) in [("-std=c99", "c"), ("-std=c11", "c"), ("-std=c++17", "c++")] {
        compile.push(objects(standard, language, header));
    }
    compile.push(objects("-std=c11", "c", Path::new("examples/c/put.c")));
    for source in cuda::sources(&paths.root)? {
        compile.push(objects("-std=c++17", "c++", &source));
    }
    let files = compile.len();
    process::run_all(compile, 2, guard)?;
    let program = out.join("orderings");
    let mut litmus = compiler("c++");
    litmus.args(["-std=c++17", "-O2", "-pthread"]).args(cuda::includes());
    litmus.arg("tests/litmus/orderings.cc").arg("-o").arg(&program);
    process::run(litmus, guard)?;
    for (seed, scenario) in SCENARIOS.iter().enumerate() {
        let mut command = run(&program);
        command.args([scenario, &*seed.to_string()]);
        process::run(command, guard)?;
    }
    say!("aarch64: {files} files compile, {} scenarios run", SCENARIOS.len());
    Ok(())
}

/// QEMU for programs of that architecture: Debian's static build, unpacked in the cache.
pub fn emulator(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("aarch64")?.canonicalize()?;
    let dir = cache.join("qemu");
    kernel::made(&cache, &dir, |part| {
        let files = kernel::fetch_packages(part, &["qemu-user-static".into()], guard)?;
        let mut unpack = process::command("dpkg-deb", part);
        unpack.arg("--extract").args(&files).arg("tree");
        process::run(unpack, guard)
    })
    .context("no qemu-user-static: run: sudo apt-get update")?;
    let program = dir.join("usr/bin/qemu-aarch64-static");
    ensure!(program.is_file(), "qemu-user-static has no {}", program.display());
    Ok(program)
}
