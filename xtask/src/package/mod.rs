//! What users without Rust install: packages of distributions, an archive, a Python wheel.

mod arch;
mod archive;
mod deb;
pub mod natives;
mod rpm;
pub mod test;
mod tree;
mod wheel;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use rustix::fs::Mode;

use crate::paths::Paths;
use crate::progress::Guard;
use crate::{files, system};

pub use arch::Arch;
pub use natives::For;
use natives::Natives;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A kind of package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// For Debian and Ubuntu; built against this host's libraries, or for another architecture as the kinds below are.
    Deb,
    /// For distributions with RPM; for glibc 2.28 and later, as the kinds below are.
    Rpm,
    /// An archive with scripts that install it below any prefix and remove it, and a Containerfile.
    Archive,
    /// The Python wheel.
    Wheel,
}

/// All kinds.
pub const ALL: [Kind; 4] = [Kind::Deb, Kind::Rpm, Kind::Archive, Kind::Wheel];

/// Makes packages of these kinds; returns their paths in the same order.
pub fn build(paths: &Paths, arch: Arch, whom: For, kinds: &[Kind], guard: Guard) -> Result<Vec<PathBuf>> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "packages are made on x86-64 alone, and this is {}: make them on an x86-64 host, with --arch",
        std::env::consts::ARCH
    );
    for kind in kinds {
        let (name, needs) = match kind {
            Kind::Deb => ("the Debian package", deb::NEEDS),
            Kind::Rpm => ("the RPM package", rpm::NEEDS),
            Kind::Archive => ("the archive", tree::NEEDS),
            Kind::Wheel => ("the wheel", natives::PORTABLE_NEEDS),
        };
        if let Some(reason) = system::unmet(needs) {
            anyhow::bail!("{name} {reason}");
        }
    }
    // Whatever the caller's umask is, everybody may read what is installed.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    check_versions(paths)?;
    let for_host = |kind: &Kind| *kind == Kind::Deb && arch == Arch::HOST;
    let portable = match kinds.iter().all(for_host) {
        true => None,
        false => Some(Natives::portable(paths, arch, whom, guard)?),
    };
    let build = |kind: &Kind| match &portable {
        Some(natives) if !for_host(kind) => match kind {
            Kind::Deb => deb::build(paths, natives, guard),
            Kind::Rpm => rpm::build(paths, natives, guard),
            Kind::Archive => archive::build(paths, natives, guard),
            Kind::Wheel => wheel::build(paths, natives, guard),
        },
        _ => deb::build(paths, &Natives::of_host(paths, guard)?, guard),
    };
    kinds.iter().map(build).collect()
}

/// Checks that each place that states the version states the same.
fn check_versions(paths: &Paths) -> Result<()> {
    let stated = |file: &str, before: &str, behind: &str| -> Result<String> {
        let text = files::read(&paths.root, file)?;
        let found = text.lines().find_map(|line| line.strip_prefix(before)?.split_once(behind));
        let (version, _) =
            found.ok_or_else(|| anyhow::anyhow!("{file} has no line that begins with {before}"))?;
        Ok(version.into())
    };
    for (file, before, behind) in [
        ("packaging/changelog", "pushgate (", ")"),
        ("driver-shim/kmod/dkms.conf", "PACKAGE_VERSION=\"", "\""),
        ("driver-shim/kmod/main.c", "MODULE_VERSION(\"", "\""),
        ("python/pyproject.toml", "version = \"", "\""),
    ] {
        let version = stated(file, before, behind)?;
        ensure!(version == VERSION, "{file} is of version {version}, Cargo.toml of {VERSION}: make them one");
    }
    Ok(())
}

/// The time that packages give their files, in seconds since 1970, so that two builds of the same sources are alike: the caller's
/// `SOURCE_DATE_EPOCH`, else the commit's.
fn epoch(paths: &Paths, guard: Guard) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut git = crate::process::command("git", &paths.root);
    git.args(["log", "-1", "--format=%ct"]);
    Ok(crate::process::capture(git, false, guard)?.trim().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn all_places_state_the_same_version() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
        check_versions(&Paths { target: root.join("target"), root: root.clone() }).unwrap();
        let other = std::env::temp_dir().join(format!("xtask-versions-{}", std::process::id()));
        let changelog = fs::read_to_string(root.join("packaging/changelog")).unwrap();
        files::put(
            &other.join("packaging/changelog"),
            changelog.replace(&format!("({VERSION})"), "(99.0)").as_bytes(),
        )
        .unwrap();
        let paths = Paths { target: other.join("target"), root: other.clone() };
        let error = check_versions(&paths).unwrap_err().to_string();
        fs::remove_dir_all(&other).unwrap();
        assert!(
            error.contains("packaging/changelog is of version 99.0") && error.contains(VERSION),
            "{error}"
        );
    }
}
