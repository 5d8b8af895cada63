//! Tests of packages: each is installed, used and removed on a Debian without Rust, and nothing is left behind.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::natives;
use super::{ALL, Arch, For, Kind};
use crate::aarch64;
use crate::bench::{Bench, Outcome, both};
use crate::chroot::{Emulation, Root};
use crate::files::copy_folder;
use crate::output::say;
use crate::process;
use crate::steps::NIXL_WHEELS;
use crate::system::Need;
use crate::venv::Venv;

/// What the step `packages` needs.
pub const NEEDS: &[Need] =
    &[Need::Cxx, Need::Packaging, Need::Manual, Need::Rpm, Need::Python, Need::Strip, Need::Chroot];

/// What the step `wheel` needs.
pub const WHEEL_NEEDS: &[Need] = &[Need::Cxx, Need::Python, Need::Strip];

/// What a user's Debian has: compilers for C and C++ and pkg-config, Python, and what the packages depend on.
const INSTALLED: &[&str] = &[
    "g++",
    "pkg-config",
    "python3-venv",
    "iproute2",
    "man-db",
    "adduser",
    "dkms",
    "kmod",
    "udev",
    "rpm",
    "systemd",
    "systemd-sysv",
    "dbus",
];

/// What a Debian has that gets no package of its own kind: the archive and the wheel serve it.
const OLD: &[&str] = &["g++", "pkg-config", "python3-venv", "iproute2", "man-db", "bash"];

/// What a Debian for 64-bit ARM has: what the packages depend on, and Python. Of the compilers that dkms does with, the smallest: it
/// builds no module there.
const ON_ARM: &[&str] = &["python3-venv", "iproute2", "adduser", "dkms", "tcc", "kmod", "udev", "rpm"];

/// Checks the bindings' types as a user's program sees them.
const MYPY: [&str; 6] = [
    "mypy==2.4.1",
    "mypy_extensions==1.2.0",
    "ast_serialize==0.13.1",
    "librt==0.17.0",
    "pathspec==1.1.1",
    "typing_extensions==4.16.0",
];

/// The wheel, installed into a fresh virtual environment without Rust.
pub fn wheel(bench: &mut Bench) -> Result<Outcome> {
    let (paths, guard) = (&bench.paths, bench.guard);
    let wheel = super::build(paths, Arch::HOST, For::Users, &[Kind::Wheel], guard)?.remove(0);
    let caller = caller(bench, Arch::HOST)?;
    let fresh = paths.scratch("wheel-test")?;
    fs::remove_dir_all(&fresh)?;
    let run = |program: &Path, arguments: &[&str]| {
        let mut command = process::command(program, &paths.root);
        // Nothing of Rust, and nothing of this checkout.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", &fresh).env("NCCL_CALLER", &caller);
        process::run(command_with(command, arguments), guard)
    };
    let python = fresh.join("bin/python");
    run(Path::new("python3"), &["-m", "venv", &fresh.display().to_string()])?;
    let wheel = wheel.display().to_string();
    run(&python, &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", &wheel])?;
    run(&python, &["-m", "unittest", "discover", "-s", "python/tests", "-v"])?;
    let mypy = Venv::new(paths, "xtask/mypy", &MYPY, "mypy (about 20 MB)");
    mypy.make(paths, guard)?;
    let executable = format!("--python-executable={}", python.display());
    run(&mypy.program("mypy"), &["--strict", "--cache-dir=/dev/null", &executable, "python/tests"])?;
    // Agents of NIXL's own wheel with the backend of ours.
    let mut install = process::command(&python, &paths.root);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    install.args(["--no-deps", "--only-binary", ":all:"]).args(NIXL_WHEELS);
    process::run(install, guard)?;
    run(&python, &["examples/nixl/paged_cache.py"])?;
    // What docs/python.md says, with this wheel.
    bench.cargo(&["test", "--release", "--package", "pushgate-tests", "--test", "pages", "--", "--ignored"])
}

fn command_with(mut command: std::process::Command, arguments: &[&str]) -> std::process::Command {
    command.args(arguments);
    command
}

/// Every package, in a small Debian.
pub fn packages(bench: &mut Bench) -> Result<Outcome> {
    let (paths, guard) = (&bench.paths, bench.guard);
    let given = given(bench, Arch::HOST, For::Users)?;
    let run = |root: &Root, suite: &str, scripts: &[&str]| {
        scripts.iter().try_for_each(|script| {
            say!("{script} ({suite}):");
            root.run(paths, &given, &format!("tests/{script}"), guard)
        })
    };
    let root = Root::debian(paths, "bookworm", INSTALLED, guard)?;
    run(&root, "bookworm", &["deb.sh", "rpm.sh", "archive.sh", "wheel.sh"])?;
    say!("service.sh (bookworm):");
    root.boot(paths, &given, "tests/service.sh", guard)?;
    // Debian 11 has glibc 2.31.
    run(&Root::debian(paths, "bullseye", OLD, guard)?, "bullseye", &["archive.sh", "wheel.sh"])?;
    Ok(Outcome::Passed)
}

/// Every package for 64-bit ARM, in a small Debian of that architecture under QEMU.
pub fn packages_for_arm(bench: &mut Bench) -> Result<Outcome> {
    let (paths, guard) = (&bench.paths, bench.guard);
    let emulation = Emulation::new(paths, &aarch64::emulator(paths, guard)?)?;
    if let Some(reason) = emulation.unavailable(guard) {
        return Ok(Outcome::Skipped(reason));
    }
    let bench = &*bench;
    // What the emulated package manager does takes one core.
    let (root, given) = both(
        || Root::debian_for_arm(paths, "bookworm", ON_ARM, emulation, guard),
        || given(bench, Arch::Aarch64, For::Tests),
    )?;
    root.run(paths, &given, "tests/arm.sh", guard)?;
    Ok(Outcome::Passed)
}

/// A folder with every package of an architecture and what the tests take beside them.
fn given(bench: &Bench, arch: Arch, whom: For) -> Result<PathBuf> {
    let (paths, guard) = (&bench.paths, bench.guard);
    let packages = super::build(paths, arch, whom, &ALL, guard)?;
    let caller = caller(bench, arch)?;
    let given = paths.scratch(&format!("given-{}", arch.name()))?;
    fs::remove_dir_all(&given)?;
    copy_folder(&paths.root.join("packaging/tests"), &given.join("tests"))?;
    copy_folder(&paths.root.join("python/tests"), &given.join("python-tests"))?;
    for file in packages.iter().chain([&caller]) {
        let name = file.file_name().context("a file has a name")?;
        fs::copy(file, given.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    Ok(given)
}

/// The program that drives the plugin as NCCL does, for old hosts too.
fn caller(bench: &Bench, arch: Arch) -> Result<PathBuf> {
    natives::test_program(&bench.paths, arch, "nccl-caller", bench.guard)
}
