//! What a step of `cargo xtask test` works with, and how it ends.

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use anyhow::Result;

use crate::output::{self, Output};
use crate::paths::Paths;
use crate::programs::Program;
use crate::progress::{self, Guard};
use crate::{cuda, process};

/// How a step that did not fail ended.
pub enum Outcome {
    /// The step did everything that it should.
    Passed,
    /// The step did nothing, for this reason.
    Skipped(String),
}

/// What the steps of one lane work with.
pub struct Bench {
    /// Where files and folders are.
    pub paths: Paths,
    /// The name of the step that runs.
    pub step: &'static str,
    /// What ends a command that hangs.
    pub guard: Guard,
    /// The factor by which the tests multiply their limits against a hang.
    pub patience: u32,
    /// Steps may take longer: a run with `--full`.
    pub full: bool,
    /// Nothing may be installed.
    pub no_install: bool,
    /// Parts of the step that were left out, and why.
    pub skips: Vec<String>,
}

impl Bench {
    /// Runs cargo with these arguments.
    pub fn cargo(&mut self, arguments: &[&str]) -> Result<Outcome> {
        self.cargo_with(arguments, &[])
    }

    /// Runs cargo with these arguments and these variables.
    pub fn cargo_with(&mut self, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Outcome> {
        let mut command = self.command();
        command.args(arguments).envs(variables.iter().copied());
        passed(process::run(command, self.guard))
    }

    /// A cargo command, with the variables that tests read.
    pub fn command(&self) -> Command {
        self.with_variables(process::cargo(&self.paths.root))
    }

    /// A test program with these arguments, in the folder of its package and with the variables that tests read.
    pub fn test(&self, program: &Program, arguments: &[&str]) -> Command {
        let mut command = self.with_variables(process::command(&program.path, &program.package));
        command.args(arguments);
        command
    }

    fn with_variables(&self, mut command: Command) -> Command {
        self.add_variables(&mut command, 1);
        // If there is a toolkit, tests that need NVRTC load the toolkit's, and those that need nvcc run it. Programs find no nvcc
        // by this variable: they are tested without one.
        if let Some(toolkit) = cuda::present(&self.paths) {
            command.env("_PUSHGATE_TEST_NVCC", toolkit.nvcc);
            if std::env::var_os("PUSHGATE_NVRTC_DIR").is_none() {
                command.envs(toolkit.nvrtc.map(|nvrtc| ("PUSHGATE_NVRTC_DIR", nvrtc)));
            }
        }
        command
    }

    /// The variables of all tests, for one that takes `slower` times as long.
    pub fn add_variables(&self, command: &mut Command, slower: u32) {
        command.env("PUSHGATE_SKIP_LOG", self.skip_log());
        command.env("_PUSHGATE_TEST_PATIENCE", (self.patience * slower).to_string());
    }

    /// The file to which tests append a line `SKIPPED: reason` for everything that they leave out:
    /// libtest shows nothing of what a passing test prints.
    pub fn skip_log(&self) -> PathBuf {
        self.paths.target.join("xtask").join(format!("skips-{}.txt", self.step))
    }
}

/// Runs `beside` on a thread of its own while `here` runs, and then shows what `beside` has written.
pub fn both<A: Send, B>(
    beside: impl FnOnce() -> Result<A> + Send,
    here: impl FnOnce() -> Result<B>,
) -> Result<(A, B)> {
    thread::scope(|scope| {
        let beside = scope.spawn(|| (output::collect(beside), progress::take_usage()));
        let here = here();
        let ((beside, output), usage) = beside.join().expect("no command panics");
        progress::add(usage);
        Output::of_this_thread().write(&output);
        Ok((beside?, here?))
    })
}

/// The outcome of a step that left nothing out.
pub fn passed(result: Result<()>) -> Result<Outcome> {
    result.map(|()| Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::output::say;

    #[test]
    fn what_ran_beside_is_shown_last_and_either_error_is_the_result() {
        let one = || {
            say!("one");
            Ok(1)
        };
        let two = || {
            say!("two");
            Ok(2)
        };
        let (results, bytes) = output::collect(|| both(one, two));
        assert_eq!((results.unwrap(), bytes.as_slice()), ((1, 2), b"two\none\n".as_slice()));
        let fails = || -> Result<u32> { bail!("no") };
        both(fails, || Ok(2)).unwrap_err();
        both(|| Ok(1), fails).unwrap_err();
    }
}
