//! The simulator (docs/simulator.md): builds the command `pushgate-sim` and runs it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::progress::Guard;
use crate::{process, programs};

/// Cargo's arguments for the command `pushgate-sim` alone.
const COMMAND: &[&str] =
    &["build", "--package", "pushgate-proxy", "--features", "sim", "--bin", "pushgate-sim"];

/// Cargo's arguments for the simulator's tests, beside which cargo builds the command. With pushgate-tests for the reason
/// that [`crate::vm::suites::ENDPOINT_TESTS`] names.
#[rustfmt::skip]
pub const TESTS: &[&str] = &[
    "test", "--package", "pushgate-proxy", "--package", "pushgate-tests", "--features", "pushgate-proxy/sim", "--test", "sim",
];

/// Cargo's arguments for the simulator's unit tests.
#[rustfmt::skip]
pub const UNIT_TESTS: &[&str] = &[
    "test", "--package", "pushgate-proxy", "--package", "pushgate-tests", "--features", "pushgate-proxy/sim", "--lib", "sim::",
];

/// Builds the simulator's tests and the command, and returns where the command is.
pub fn build_with_tests(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    build(paths, &[TESTS, &["--no-run"]].concat(), guard)
}

fn build(paths: &Paths, arguments: &[&str], guard: Guard) -> Result<PathBuf> {
    let programs = programs::build(paths, arguments, &[], guard)?;
    let program = programs.into_iter().find(|program| program.name == "pushgate-sim");
    Ok(program.context("pushgate-sim was not built")?.path)
}

/// Runs the command with these arguments. The exit status is the command's: 0, 1 if a promise was broken, 2 for a wrong
/// call. Nothing but the command's result goes to standard output.
pub fn run(paths: &Paths, arguments: &[String]) -> Result<ExitCode> {
    let program = build(paths, COMMAND, Guard::NONE)?;
    let mut command = Command::new(&program);
    process::die_with_us(command.args(arguments));
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    Ok(status.code().map_or(ExitCode::from(130), |code| ExitCode::from(code as u8)))
}
