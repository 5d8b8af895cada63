//! A small Debian in a folder, in which packages are installed, used and removed. What a run changes is gone with the run.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::aarch64;
use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::{self, Need};

/// A Debian of one suite with some packages.
pub struct Root {
    folder: PathBuf,
    /// What runs programs of its architecture, where it is another one than this host's.
    emulation: Option<Emulation>,
}

/// What has programs for 64-bit ARM run as others do.
pub struct Emulation {
    words: Vec<PathBuf>,
}

impl Emulation {
    /// By this emulator. Needs root.
    pub fn new(paths: &Paths, emulator: &Path) -> Result<Emulation> {
        let place = paths.scratch("roots")?;
        let (users, enter) = (place.join("users.sh"), place.join("binfmt.sh"));
        fs::write(&users, USERS)?;
        fs::write(&enter, aarch64::ENTER)?;
        Ok(Emulation { words: ["sh".into(), users, "sh".into(), enter, emulator.into()].into() })
    }

    /// Why it is not to be had here, if it is not.
    pub fn unavailable(&self, guard: Guard) -> Option<String> {
        let ran = process::run_quietly(self.command("true"), guard);
        let why = ran.err()?;
        Some(format!("needs Linux 6.7, for a binfmt_misc of a user namespace: {why:#}"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = process::command(&self.words[0], Path::new("/"));
        command.args(&self.words[1..]).arg(program);
        command
    }
}

/// The scripts on the host's side: what runs a script in the root, and what boots systemd there.
const ENTER: &str = concat!(include_str!("chroot/root.sh"), include_str!("chroot/enter.sh"));
const BOOT: &str = concat!(include_str!("chroot/root.sh"), include_str!("chroot/boot.sh"));

/// Has files of several users in a user namespace, so that a package manager can work there.
const USERS: &str = include_str!("chroot/users.sh");

impl Root {
    /// The Debian in the target folder, fetched with mmdebstrap if it is not there or has other packages. Needs [`Need::Chroot`].
    pub fn debian(paths: &Paths, suite: &str, packages: &[&str], guard: Guard) -> Result<Root> {
        Root::made(paths, suite, suite, packages, None, guard)
    }

    /// A Debian for 64-bit ARM, likewise.
    pub fn debian_for_arm(
        paths: &Paths,
        suite: &str,
        packages: &[&str],
        emulation: Emulation,
        guard: Guard,
    ) -> Result<Root> {
        Root::made(paths, &format!("{suite}-arm64"), suite, packages, Some(emulation), guard)
    }

    fn made(
        paths: &Paths,
        name: &str,
        suite: &str,
        packages: &[&str],
        emulation: Option<Emulation>,
        guard: Guard,
    ) -> Result<Root> {
        if let Some(reason) = system::unmet(&[Need::Chroot]) {
            bail!("a small Debian in a folder {reason}");
        }
        let place = paths.scratch("roots")?;
        let folder = place.join(name);
        let stamp = place.join(format!("{name}.txt"));
        let wanted = packages.join(",");
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(Root { folder, emulation });
        }
        say!("Fetching a small Debian ({name}) into {} (once)", folder.display());
        let _ = fs::remove_file(&stamp);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let mut make = match &emulation {
            None => process::command("mmdebstrap", &place),
            Some(emulation) => {
                let mut make = emulation.command("mmdebstrap");
                // It would ask a program of its own whether ARM's programs run.
                make.args(["--arch=arm64", "--skip=check/qemu"]);
                make
            }
        };
        make.args(["--quiet", "--variant=minbase", "--include", &wanted, suite]).arg(&folder);
        make.arg("http://deb.debian.org/debian");
        process::run(make, guard).context("fetching a small Debian needs its archive, deb.debian.org")?;
        fs::write(&stamp, wanted)?;
        Ok(Root { folder, emulation })
    }

    /// Runs a script of the folder `given`, by `sh -eu`, as root, without a network, where `given` is /given.
    pub fn run(&self, paths: &Paths, given: &Path, script: &str, guard: Guard) -> Result<()> {
        let emulation = self.emulation.iter().flat_map(|emulation| emulation.words.iter().map(AsRef::as_ref));
        let words: Vec<&OsStr> = [script.as_ref()].into_iter().chain(emulation).collect();
        self.enter(paths, ENTER, given, &words, guard).with_context(|| format!("{script} in a small Debian"))
    }

    /// Runs a script as [`Root::run`] does, as a service of a systemd that is booted there, and shows what the script wrote. The Debian
    /// has the packages systemd, systemd-sysv and dbus.
    pub fn boot(&self, paths: &Paths, given: &Path, script: &str, guard: Guard) -> Result<()> {
        let said = paths.scratch("roots")?.join("said");
        fs::write(&said, "")?;
        let ended = self.enter(paths, BOOT, given, &[script.as_ref(), said.as_os_str()], guard);
        say!("{}", fs::read_to_string(&said)?.trim_end());
        ended.with_context(|| format!("{script} in a small Debian with systemd"))
    }

    fn enter(&self, paths: &Paths, how: &str, given: &Path, more: &[&OsStr], guard: Guard) -> Result<()> {
        let place = paths.scratch("roots")?;
        let (empty, enter) = (place.join("run"), place.join("enter.sh"));
        fs::create_dir_all(&empty)?;
        fs::write(&enter, how)?;
        let mut unshare = process::command("unshare", given);
        unshare
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--net",
                "--ipc",
                "--uts",
                "--cgroup",
                "sh",
                "-eu",
            ])
            .arg(enter);
        let folders: [&OsStr; 3] = [self.folder.as_os_str(), empty.as_os_str(), given.as_os_str()];
        unshare.args(folders).args(more);
        process::run_quietly(unshare, guard)
    }
}
