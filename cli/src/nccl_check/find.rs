//! What the check needs of this host: a GPU, NCCL, the plugin. What is missing is said all at once, with the remedy.

use std::path::{Path, PathBuf};

use anyhow::Result;
use pushgate_doctor::checks::nccl::version;
use pushgate_doctor::read::{nccl_library, nccl_library_at};
use pushgate_doctor::readings::Read;

use crate::exit::Input;
use crate::plugin::Plugin;

/// The plugin.
pub const PLUGIN: Plugin = Plugin {
    file: "libnccl-net-pushgate.so",
    below: ["", "pushgate"],
    build: "`cargo xtask plugin`, which prints its path",
};

/// What the check needs, as found on this host.
#[derive(Debug)]
pub struct Found {
    /// GPUs that this process sees.
    pub gpus: u32,
    /// The CUDA version of the driver.
    pub driver: (u32, u32),
    pub nccl: PathBuf,
    pub nccl_version: (u32, u32, u32),
    pub plugin: PathBuf,
}

/// Looks for all that the check needs. `nccl` and `plugin`: files that the command line names.
pub fn find(nccl: Option<&Path>, plugin: Option<&Path>) -> Result<Found> {
    let gpu = pushgate::probe_cuda().map_err(|reason| {
        format!("a GPU ({reason}): install NVIDIA's driver for CUDA 12.0 or later (`nvidia-smi` then shows the GPU)")
    });
    let nccl = nccl_at(nccl);
    let plugin = PLUGIN.find(plugin, std::env::current_exe().ok().as_deref());
    match (gpu, nccl, plugin) {
        (Ok(gpu), Ok((nccl, nccl_version)), Ok(plugin)) => {
            Ok(Found { gpus: gpu.devices, driver: gpu.driver, nccl, nccl_version, plugin })
        }
        (gpu, nccl, plugin) => {
            let missing = [gpu.err(), nccl.err(), plugin.err()];
            let lines: String = missing.into_iter().flatten().map(|line| format!("\n  {line}")).collect();
            Err(Input(format!("nccl-check needs what this host lacks:{lines}")).into())
        }
    }
}

fn nccl_at(named: Option<&Path>) -> Result<(PathBuf, (u32, u32, u32)), String> {
    let read = match named {
        // The linker would look for a bare name elsewhere.
        Some(path) => match std::path::absolute(path) {
            Ok(path) => nccl_library_at(&path.to_string_lossy()),
            Err(e) => Read::Unreadable(format!("{}: {e}", path.display())),
        },
        None => nccl_library(),
    };
    match (read, named) {
        (Read::Is((code, name)), _) => Ok((loaded(&name), version(code))),
        (Read::Unreadable(why), _) => Err(format!("NCCL ({why}): name another libnccl.so.2 with --nccl")),
        (Read::Absent, Some(path)) => Err(format!("NCCL (no file {}): name libnccl.so.2 with --nccl", path.display())),
        (Read::Absent, None) => Err(
            "NCCL (no libnccl.so.2 where the linker or a Python environment would have it): install libnccl2, or activate \
             the Python environment that has PyTorch, or `pip install nvidia-nccl-cu13`; or name the file with --nccl"
                .into(),
        ),
    }
}

/// The file of a library that this process has loaded by `name`: the linker may have found it anywhere.
fn loaded(name: &str) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    // libnccl.so.2 may be a link to libnccl.so.2.30.7.
    let is = |file: &&str| Path::new(file).file_name().is_some_and(|f| f.to_string_lossy().starts_with(name));
    match Path::new(name).is_absolute() {
        true => name.into(),
        false => files.find(is).unwrap_or(name).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nccl_that_is_not_there_or_no_library_is_named() {
        let gone = nccl_at(Some(Path::new("/nonexistent/libnccl.so.2"))).unwrap_err();
        assert_eq!(gone, "NCCL (no file /nonexistent/libnccl.so.2): name libnccl.so.2 with --nccl");
        let file = std::env::temp_dir().join(format!("pushgate-no-nccl-{}", std::process::id()));
        std::fs::write(&file, "no library").unwrap();
        let broken = nccl_at(Some(&file)).unwrap_err();
        assert!(broken.contains("can't be loaded") && broken.contains("--nccl"), "{broken}");
        std::fs::remove_file(&file).unwrap();
    }
}
