//! What runs on a host with a GPU. Tests that need one skip themselves elsewhere, so there the same
//! command runs more of them; the bundle is for a host without a Rust toolchain.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::{Paths, cuda};

/// Prints what to run.
pub fn explain() {
    println!(
        "\
On a GPU host with a Rust toolchain:
  cargo xtask test --strict
runs the tests that are skipped elsewhere for want of a GPU.

For one without: `cargo xtask gpu --bundle --tests NAME,...` builds everything here, device code
included, into one folder. Copy it there and run in it:
  ./allreduce --ranks 2 --size 1M,16M --device cuda --json
  ./custom_kernel
  ./tests/NAME --nocapture"
    );
}

/// Builds `pushgate`, the examples and the named integration tests with the device code embedded,
/// and puts them, stripped, into one folder.
pub fn bundle(paths: &Paths, out: Option<PathBuf>, tests: &[String]) -> Result<()> {
    let out = match out {
        Some(out) => std::env::current_dir()?.join(out),
        None => paths.target.join("gpu-bundle"),
    };
    let nvcc = cuda::toolkit(paths, None)?.nvcc;
    let mut programs = build(
        paths,
        &nvcc,
        &["build", "--package=pushgate", "--bin=pushgate", "--example=allreduce", "--example=custom_kernel"],
    )?;
    if !tests.is_empty() {
        let wanted: Vec<_> = tests.iter().map(|name| format!("--test={name}")).collect();
        let mut arguments = vec!["test", "--no-run", "--package=pushgate-tests"];
        arguments.extend(wanted.iter().map(String::as_str));
        programs.extend(build(paths, &nvcc, &arguments)?);
    }
    fs::create_dir_all(out.join("tests")).with_context(|| format!("cannot make {}", out.display()))?;
    for program in programs {
        let to = if program.is_test { out.join("tests") } else { out.clone() }.join(&program.name);
        let mut strip = process::command("strip", &paths.root);
        strip.arg("-o").arg(&to).arg(&program.path);
        process::run_quietly(strip, None)?;
        println!("{}", to.display());
    }
    Ok(())
}

struct Program {
    name: String,
    path: PathBuf,
    is_test: bool,
}

/// The programs that cargo says it has built, its own targets' only.
fn build(paths: &Paths, nvcc: &Path, arguments: &[&str]) -> Result<Vec<Program>> {
    let mut command = process::cargo(&paths.root);
    command.args(arguments).args(["--release", "--message-format=json-render-diagnostics"]);
    command.env("PUSHGATE_NVCC", nvcc);
    let output = process::capture(command, false, None)?;
    let mut programs = Vec::new();
    for line in output.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's output is no JSON")?;
        if let (Some(path), Some(name)) = (message["executable"].as_str(), message["target"]["name"].as_str())
        {
            let is_test = message["target"]["kind"][0] == "test";
            programs.push(Program { name: name.into(), path: path.into(), is_test });
        }
    }
    if programs.is_empty() {
        bail!("cargo has built no program");
    }
    Ok(programs)
}
