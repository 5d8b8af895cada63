//! Software iWARP for the guest: Debian's kernels leave the module siw out, so it is built from their source.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::kernel::{self, Kernel};
use crate::paths::Paths;
use crate::progress::Guard;
use crate::{kmod, process, system};

/// The module's folder in the kernel's source.
const FOLDER: &str = "drivers/infiniband/sw/siw";

/// Unpacks into `tree`, of a package in a file, its archive of a name, and of that one a folder.
const UNPACK: &str = r#"dpkg-deb --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" |
    tar -xJ -C tree --strip-components=5 "$2/$3""#;

/// The module's source for a kernel: Debian's package of the kernel's own version. Only the module's
/// folder is unpacked; it comes from the cache if it is there.
///
/// Fails if the source is not in the cache and apt cannot fetch it.
pub fn source(paths: &Paths, kernel: &Kernel, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("vm")?.canonicalize()?;
    let release = &kernel.release;
    let dir = cache.join(format!("siw-source-{release}"));
    let make = |part: &Path| fetch(part, &kernel.version()?, guard);
    kernel::made(&cache, &dir, make)
        .with_context(|| format!("no source of software iWARP (siw) for the guest's kernel {release}"))?;
    Ok(dir)
}

/// The folder of the module `siw.ko` for a kernel; from the cache if it is there.
pub fn build(paths: &Paths, kernel: &Kernel, source: &Path, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("vm")?.canonicalize()?;
    let dir = cache.join(format!("siw-{}", kernel.release));
    kernel::made(&cache, &dir, |part| build_into(part, paths, kernel, source, guard))?;
    Ok(dir)
}

fn fetch(part: &Path, version: &str, guard: Guard) -> Result<()> {
    let package = format!("linux-source-{}", series(version)?);
    let files =
        kernel::fetch_packages(part, &[format!("{package}={version}")], guard).with_context(|| {
            format!(
                "apt cannot fetch {package} in the kernel's own version {version}; run: sudo apt-get update"
            )
        })?;
    // Of the package only one file is needed, and of that file one folder, so nothing else is written. If one
    // of the programs fails, the next one finds its input cut short and fails, too.
    let mut unpack = process::command("sh", part);
    unpack.args(["-ec", UNPACK, "sh"]).args(&files).args([&package, FOLDER]);
    process::run(unpack, guard)?;
    ensure!(part.join("tree/siw_main.c").is_file(), "{package} {version} has no {FOLDER}");
    Ok(())
}

fn build_into(part: &Path, paths: &Paths, kernel: &Kernel, source: &Path, guard: Guard) -> Result<()> {
    if let Some(reason) = system::unmet(kmod::NEEDS) {
        bail!("building software iWARP {reason}");
    }
    // Kbuild writes beside the sources.
    let copy = part.join("build");
    fs::create_dir_all(&copy)?;
    for file in fs::read_dir(source)?.flatten() {
        fs::copy(file.path(), copy.join(file.file_name()))?;
    }
    kmod::compile(paths, kernel, &copy, &["CONFIG_RDMA_SIW=m"], guard)?;
    let mut strip = process::command("strip", part);
    strip.args(["--strip-debug", "-o", "tree/siw.ko", "build/siw.ko"]);
    process::run(strip, guard)
}

/// The kernel's series in a version: `6.1` of `6.1.192-2`.
fn series(version: &str) -> Result<String> {
    let mut numbers = version.split(['.', '-', '~', '+']);
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if !major.is_empty() && !minor.is_empty() => {
            Ok(format!("{major}.{minor}"))
        }
        _ => bail!("{version:?} is not the version of a kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_versions_series_names_the_source() {
        assert_eq!(series("6.1.192-2").unwrap(), "6.1");
        assert_eq!(series("6.12~rc1").unwrap(), "6.12");
        series("6").unwrap_err();
        series("").unwrap_err();
    }
}
