//! The folders that tasks use.

use std::path::PathBuf;
use std::{env, fs};

use anyhow::{Context, Result};

/// The folders that tasks use.
#[derive(Clone)]
pub struct Paths {
    /// The repository's root.
    pub root: PathBuf,
    /// Cargo's target folder; everything that a task makes goes below it.
    pub target: PathBuf,
}

impl Paths {
    /// Finds the repository and the target folder of this run.
    pub fn find() -> Result<Paths> {
        // Cargo sets the variable for programs that it runs; the other value serves a binary started by hand.
        let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = PathBuf::from(manifest).parent().context("xtask lies in no workspace")?.to_path_buf();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            // Made absolute: steps run in the repository's root, the caller perhaps elsewhere.
            Some(dir) if !dir.is_empty() => env::current_dir()?.join(dir),
            _ => root.join("target"),
        };
        Ok(Paths { root, target })
    }

    /// A folder for tasks below the target folder; made if it does not exist.
    pub fn scratch(&self, name: &str) -> Result<PathBuf> {
        let dir = self.target.join("xtask").join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }
}
