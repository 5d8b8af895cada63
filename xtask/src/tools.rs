//! Programs from crates.io that tasks run, compiled below the target folder when a task needs them first.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// A program of one version.
pub struct Tool {
    /// The crate's and the program's name.
    pub name: &'static str,
    /// The crate's version.
    pub version: &'static str,
    /// Options of `cargo install`.
    pub options: &'static [&'static str],
}

impl Tool {
    /// The program, compiled if it is not there.
    pub fn get(&self, paths: &Paths, guard: Guard) -> Result<PathBuf> {
        let Tool { name, version, options } = self;
        let root = paths.target.join("tools");
        let program = root.join("bin").join(name);
        // Written last. Not every program says its version.
        let stamp = root.join(format!("{name}.txt"));
        if program.exists() && fs::read_to_string(&stamp).is_ok_and(|found| found == *version) {
            return Ok(program);
        }
        say!(
            "{name} {version} is not in {} yet. Cargo compiles it now, once, for some minutes.",
            root.display()
        );
        let build = root.join(format!("build-{name}"));
        let mut command = process::cargo(&paths.root);
        command.args(["install", name, "--version", version, "--locked", "--force"]).args(*options);
        command.arg("--root").arg(&root).arg("--target-dir").arg(&build);
        process::run(command, guard)
            .with_context(|| format!("cannot install {name} {version} from crates.io"))?;
        fs::remove_dir_all(&build).with_context(|| format!("cannot remove {}", build.display()))?;
        fs::write(&stamp, version)?;
        Ok(program)
    }
}
