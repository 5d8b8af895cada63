//! The simulator (docs/simulator.md): builds the command `pushgate-sim` and runs it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::progress::Guard;
use crate::{process, programs};

/// Cargo's arguments for the command `pushgate-sim` alone.
const COMMAND: &[&str] =
    &["build", "--package", "pushgate-sim", "--features", "sim", "--bin", "pushgate-sim"];

/// Cargo's arguments for the simulator's tests, and for those of the engine in which engines die.
pub const TESTS: &[&str] = &[
    "test",
    "--package",
    "pushgate-sim",
    "--package",
    "pushgate-engine",
    "--features",
    "pushgate-sim/sim",
    "--lib",
];

/// Builds the command, and returns where it is.
pub fn build(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    let programs = programs::build(paths, COMMAND, &[], guard)?;
    let program = programs.into_iter().find(|program| program.name == "pushgate-sim");
    Ok(program.context("pushgate-sim was not built")?.path)
}

/// Runs the command with these arguments. The exit status is the command's: 0, 1 if a promise was broken, 2 for a wrong
/// call. Nothing but the command's result goes to standard output.
pub fn run(paths: &Paths, arguments: &[String]) -> Result<ExitCode> {
    let program = build(paths, Guard::NONE)?;
    let mut command = Command::new(&program);
    process::die_with_us(command.args(arguments));
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    Ok(status.code().map_or(ExitCode::from(130), |code| ExitCode::from(code as u8)))
}
