//! Builds the plugins' shared libraries, under the names that NCCL and NIXL look for.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// Builds the plugin for release and returns its path. With `nvcc` its device code is embedded;
/// otherwise it is embedded if the build finds an nvcc, or else compiled at the first use on a
/// host.
pub fn build(paths: &Paths, nvcc: Option<&Path>, guard: Guard) -> Result<PathBuf> {
    let mut cargo = process::cargo(&paths.root);
    cargo.envs(nvcc.map(|nvcc| ("PUSHGATE_NVCC", nvcc)));
    cargo.args(["build", "--quiet", "--release", "--package", "pushgate-net-plugin"]);
    process::run_quietly(cargo, guard)?;
    let folder = paths.target.join("release");
    let (made, wanted) = (folder.join("libnccl_net_pushgate.so"), folder.join("libnccl-net-pushgate.so"));
    // A copy and not a link, renamed into place: a program may have the old library open.
    let new = folder.join("libnccl-net-pushgate.so.new");
    fs::copy(&made, &new)
        .and_then(|_| fs::rename(&new, &wanted))
        .with_context(|| format!("cannot put {} to {}", made.display(), wanted.display()))?;
    Ok(wanted)
}

/// Builds the NIXL plugin for release and returns its path.
pub fn build_nixl(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    let mut cargo = process::cargo(&paths.root);
    cargo.args(["build", "--quiet", "--release", "--package", "pushgate-nixl-plugin"]);
    process::run_quietly(cargo, guard)?;
    Ok(paths.target.join("release/libplugin_PUSHGATE.so"))
}
