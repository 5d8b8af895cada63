//! Pages of 64 KiB: a virtual machine whose kernel has them, under QEMU's emulation, with tests of what maps memory.
//!
//! Debian has kernels for ARM with pages of 4 and of 16 KiB. So the kernel is built of Debian's sources, with nothing but what the
//! tests need: no disk, no network device, no module. Its first file system holds the tests and their libraries.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::toolchain::Toolchain;
use crate::bench::Bench;
use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::vm::initramfs::Archive;
use crate::vm::kernel;

/// Debian's sources of Linux.
const SOURCE: &str = "linux-source-6.1";

/// What the kernel has beyond `allnoconfig`.
const CONFIG: &str = include_str!("pages.config");

/// The guest's first program.
const INIT: &str = include_str!("pages.sh");

/// Libraries that the tests are linked with, and their loader.
const LIBRARIES: [&str; 8] = [
    "ld-linux-aarch64.so.1",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
];

/// What runs in the guest: a name, the program, its arguments.
pub type Job = (&'static str, PathBuf, String);

/// Boots the guest with this kernel and has it run the jobs; each must end with status 0.
pub fn run(bench: &Bench, tools: &Toolchain, kernel: &Path, jobs: &[Job]) -> Result<()> {
    let (paths, guard) = (&bench.paths, bench.guard);
    let qemu = qemu(paths, guard)?;
    let out = paths.scratch("aarch64/pages")?;
    fs::write(out.join("initrd"), initrd(&out, tools, jobs, guard)?)?;
    let log = out.join("console.log");
    let mut guest = process::command(&qemu, &out);
    // Of the processors that QEMU emulates without features that cost time, one of Graviton2's kind.
    guest.args([
        "-M",
        "virt",
        "-cpu",
        "neoverse-n1",
        "-accel",
        "tcg,thread=multi",
        "-smp",
        "2",
        "-m",
        "2560",
    ]);
    guest.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
    guest.arg("-kernel").arg(kernel).arg("-initrd").arg(out.join("initrd"));
    guest.args(["-append", "console=ttyAMA0 loglevel=4 panic=-1 oops=panic"]);
    let said = process::capture(guest, true, guard)?;
    fs::write(&log, &said)?;
    let has = |line: &str| said.lines().any(|found| found.trim() == line);
    ensure!(has("pages: 64"), "the guest's pages are not of 64 KiB: {}", log.display());
    for (name, _, _) in jobs {
        ensure!(
            has(&format!("pages: {name} ends with 0")),
            "{name} fails with pages of 64 KiB: {}",
            log.display()
        );
    }
    say!("aarch64: {} programs run with pages of 64 KiB", jobs.len());
    Ok(())
}

/// The kernel's image, built if it is not in the cache.
pub fn kernel(paths: &Paths, tools: &Toolchain, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("aarch64")?.canonicalize()?;
    let dir = cache.join("kernel-64k");
    kernel::made(&cache, &dir, |part| {
        say!("Building a kernel with pages of 64 KiB (once)");
        let files = kernel::fetch_packages(part, &[SOURCE.into()], guard)?;
        let mut unpack = process::command("dpkg-deb", part);
        unpack.arg("-x").args(&files).arg("package");
        process::run(unpack, guard)?;
        let mut unpack = process::command("tar", part);
        unpack.arg("-xf").arg(format!("package/usr/src/{SOURCE}.tar.xz"));
        process::run(unpack, guard)?;
        let (source, config) = (part.join(SOURCE), part.join("config"));
        fs::write(&config, CONFIG)?;
        let mut choose = tools.make(&source);
        choose.arg("--silent").arg("allnoconfig").env("KCONFIG_ALLCONFIG", &config);
        process::run(choose, guard)?;
        let mut build = tools.make(&source);
        build.args(["--silent", "-j2", "Image"]);
        process::run(build, guard)?;
        fs::rename(source.join("arch/arm64/boot/Image"), part.join("tree/Image"))?;
        Ok(())
    })
    .context("no kernel for 64-bit ARM with pages of 64 KiB")?;
    Ok(dir.join("Image"))
}

/// QEMU that emulates a machine. Its libraries are those of this host's QEMU for x86.
fn qemu(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    let cache = paths.scratch("aarch64")?.canonicalize()?;
    let dir = cache.join("qemu-system");
    kernel::made(&cache, &dir, |part| kernel::download(part, &["qemu-system-arm".into()], guard))
        .context("no qemu-system-arm: run: sudo apt-get update")?;
    Ok(dir.join("usr/bin/qemu-system-aarch64"))
}

/// The guest's first file system.
fn initrd(out: &Path, tools: &Toolchain, jobs: &[Job], guard: Guard) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["proc", "sys", "dev", "tmp", "jobs"] {
        archive.folder(folder);
    }
    archive.file("init", INIT.as_bytes());
    archive.file("busybox", &fs::read(tools.busybox())?);
    let mut list = String::new();
    for (name, program, arguments) in jobs {
        let small = out.join(name);
        let mut strip = process::command(tools.strip(), out);
        strip.arg("-o").arg(&small).arg(program);
        process::run_quietly(strip, guard)?;
        archive.file(&format!("jobs/{name}"), &fs::read(&small)?);
        list += &format!("{name} {arguments}\n");
    }
    archive.file("list", list.as_bytes());
    archive.folder("lib");
    for library in LIBRARIES {
        let file = tools.libraries().join(library);
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        archive.file(&format!("lib/{library}"), &content);
    }
    Ok(archive.finish())
}
