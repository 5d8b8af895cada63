//! What to run on a host with a GPU. Tests that need a GPU skip themselves elsewhere, so on such a
//! host the same command runs more tests; the bundle is for a host without a Rust toolchain.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::process;
use crate::programs::{self, Kind};
use crate::progress::Guard;
use crate::{cuda, files, plugin};

/// Prints what to run.
pub fn explain() {
    println!(
        "\
On a GPU host with a Rust toolchain:
  cargo xtask test --strict
runs the tests that are skipped elsewhere for want of a GPU.

For one without: `cargo xtask gpu --bundle --tests NAME,...` builds everything here, device code
included, into one folder. Copy it there and run in it:
  ./pushgate bench allreduce --ranks 2 --size 1M,16M --device cuda --json
  ./allreduce
  ./custom_kernel
  ./nccl.py                     PyTorch over the NCCL plugin, beside NCCL's own transports
  programs/programs.py          programs of others over the plugin: frameworks, trainings, many streams
  rma.cu                        kernels on NCCL's device API over the plugin: its first lines say how
  ./run-tests                   the tests of the bundle, then a summary
  ./run-tests NAME ARGUMENT...  one of them, with arguments for it"
    );
}

/// Builds `pushgate`, the examples and the named integration tests with the device code embedded,
/// and puts them, stripped, into one folder.
pub fn bundle(paths: &Paths, out: Option<PathBuf>, tests: &[String]) -> Result<()> {
    let out = match out {
        Some(out) => std::env::current_dir()?.join(out),
        None => paths.target.join("gpu-bundle"),
    };
    let nvcc = cuda::toolkit(paths, Guard::NONE)?.nvcc;
    let build = |arguments: &[&str]| {
        programs::build(paths, arguments, &[("PUSHGATE_NVCC", nvcc.as_os_str())], Guard::NONE)
    };
    let mut programs = build(&[
        "build",
        "--package=pushgate",
        "--package=pushgate-cli",
        "--bin=pushgate",
        "--example=allreduce",
        "--example=custom_kernel",
    ])?;
    if !tests.is_empty() {
        let wanted: Vec<_> = tests.iter().map(|name| format!("--test={name}")).collect();
        let mut arguments = vec!["test", "--no-run", "--package=pushgate-tests"];
        arguments.extend(wanted.iter().map(String::as_str));
        programs.extend(build(&arguments)?);
    }
    if out.join("tests").exists() {
        // Tests of an earlier bundle that this one lacks must not run.
        fs::remove_dir_all(out.join("tests"))?;
    }
    fs::create_dir_all(out.join("tests")).with_context(|| format!("cannot make {}", out.display()))?;
    let plugin = plugin::build(paths, Some(&nvcc), Guard::NONE)?;
    strip(paths, &plugin, &out.join(plugin.file_name().context("the plugin has a name")?))?;
    let suite = out.join("nccl.py");
    fs::copy(paths.root.join("tests/gpu/nccl.py"), &suite).context("the suite of the plugin")?;
    println!("{}", suite.display());
    let others = out.join("programs");
    files::copy_folder(&paths.root.join("tests/gpu/programs"), &others)?;
    println!("{}", others.display());
    let kernels = out.join("rma.cu");
    fs::copy(paths.root.join("tests/gpu/rma.cu"), &kernels).context("the suite of NCCL's device API")?;
    println!("{}", kernels.display());
    for folder in SOURCES {
        files::copy_folder(&paths.root.join(folder), &out.join("source").join(folder))?;
    }
    let run = out.join("run-tests");
    fs::write(&run, include_str!("gpu/run-tests.sh"))?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;
    println!("{}", run.display());
    for program in programs {
        let folder = if program.kind == Kind::Test { out.join("tests") } else { out.clone() };
        strip(paths, &program.path, &folder.join(&program.name))?;
    }
    Ok(())
}

/// Sources that tests read: kernels for NVRTC, headers, programs for ThreadSanitizer.
const SOURCES: &[&str] = &["driver-shim/include", "gpu-kernels/include", "tests/kernels", "tests/litmus"];

fn strip(paths: &Paths, from: &Path, to: &Path) -> Result<()> {
    let mut strip = process::command("strip", &paths.root);
    strip.arg("-o").arg(to).arg(from);
    process::run_quietly(strip, Guard::NONE)?;
    println!("{}", to.display());
    Ok(())
}
