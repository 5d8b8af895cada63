//! What builds Rust programs for 64-bit ARM, fetched by apt and unpacked in the cache: nothing is installed.
//!
//! rustc takes only a standard library of its own build. Debian has both, so rustc is Debian's too: that of its next release,
//! because the one of today is older than the workspace's `rust-version`. That rustc is linked with a later C library than
//! this host may have, and is run by that library's loader. zig compiles the C code of crates and links, as for packages; the
//! compilers for C and C++ by themselves are this host's release's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bench::both;
use crate::package::For;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::vm::kernel;

/// The part of Debian that rustc is fetched from.
const SUITE: &str = "testing";

/// rustc with all that it is linked with, and the standard library for this host and for ARM.
const RUST: [&str; 3] = ["libstd-rust-dev:amd64", "rustc:amd64", "libstd-rust-dev:arm64"];

/// What checks barriers by the model of the architecture.
const HERD: &str = "herdtools7:amd64";

/// The part of Debian that the kernel's headers and programs beside a kernel are fetched from.
const OF_KERNEL: &str = "bookworm";

/// Compilers for C and C++, and the headers of RDMA, which are those of every architecture.
const CROSS: [&str; 3] = ["g++-aarch64-linux-gnu", "libibverbs-dev", "librdmacm-dev"];

/// The unpacked tools.
pub struct Toolchain {
    folder: PathBuf,
}

impl Toolchain {
    /// The tools, fetched if they are not there.
    pub fn get(paths: &Paths, guard: Guard) -> Result<Toolchain> {
        let cache = paths.scratch("aarch64")?.canonicalize()?;
        let (testing, cross) = (cache.join(SUITE), cache.join("cross"));
        let rust = || {
            kernel::made(&cache, &testing, |part| {
                let apt = Apt::of_suite(part, SUITE)?;
                apt.run(&["update"], guard)?;
                // What the library needs comes with it; what rustc needs beside it (a C compiler) is this host's.
                apt.run(
                    &["install", "--download-only", "--yes", "--no-install-recommends", RUST[0], HERD],
                    guard,
                )?;
                apt.run(&[&["download"], &RUST[1..]].concat(), guard)?;
                apt.unpack(guard)
            })
            .with_context(|| format!("no rustc for 64-bit ARM, or no herd7, of Debian {SUITE}"))
        };
        let compilers = || {
            kernel::made(&cache, &cross, |part| {
                let apt = Apt::of_host(part)?;
                let install = ["install", "--download-only", "--yes", "--no-install-recommends"];
                apt.run(&[&install[..], &CROSS].concat(), guard)?;
                apt.unpack(guard)
            })
            .context("no g++-aarch64-linux-gnu: run: sudo apt-get update")
        };
        both(rust, compilers)?;
        let tools = Toolchain { folder: cache };
        tools.write_programs()?;
        Ok(tools)
    }

    /// The folder of the compilers for ARM, under the names that tests call compilers by.
    pub fn compilers(&self) -> PathBuf {
        self.folder.join("bin")
    }

    /// Has a command of cargo-zigbuild build for ARM; returns the target folder.
    pub fn cargo(&self, command: &mut Command, whom: For) -> PathBuf {
        let folder = self.folder.join("build");
        command
            .env("RUSTC", self.folder.join("rustc"))
            .env("_PUSHGATE_NIXL_CXX", self.compilers().join("c++"));
        // Packages have no symbols anyway.
        command.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        if whom == For::Tests {
            command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_LTO", "off");
            command.args(["--config", "profile.release.package.\"*\".opt-level=0"]);
            // What a test alone asks of the engine. With it everywhere each crate is compiled once.
            command.args(["--features", "pushgate-tests/test-ungated"]);
        }
        command.arg("--target-dir").arg(&folder);
        folder
    }

    /// A herd7 that looks at a test. It is linked with a later C library than this host may have.
    pub fn herd(&self, test: &Path) -> Command {
        let usr = self.folder.join(SUITE).join("usr");
        let libraries = usr.join("lib/x86_64-linux-gnu");
        let mut command = process::command(libraries.join("ld-linux-x86-64.so.2"), &self.folder);
        command.arg("--library-path").arg(&libraries).arg(usr.join("bin/herd7"));
        command.arg("-set-libdir").arg(usr.join("share/herdtools7/herd")).arg(test);
        command
    }

    /// The headers of Debian 12's newest kernel for ARM, with the programs of this host that build modules.
    pub fn kernel_headers(&self, guard: Guard) -> Result<PathBuf> {
        let unpacked = self.folder.join(OF_KERNEL);
        kernel::made(&self.folder, &unpacked, |part| {
            let apt = Apt::of_suite(part, OF_KERNEL)?;
            apt.run(&["update"], guard)?;
            let said = process::capture(
                apt.of("apt-cache", &["depends", "linux-headers-arm64:arm64"]),
                false,
                guard,
            )?;
            let newest = said.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-headers-"));
            let newest = newest.and_then(|name| name.strip_suffix("-arm64:arm64"));
            let newest = newest.context("apt knows no linux-headers-arm64")?;
            let version = newest.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
            let packages = [
                format!("linux-headers-{newest}-arm64:arm64"),
                format!("linux-headers-{newest}-common"),
                format!("linux-kbuild-{version}:amd64"),
                "busybox-static:arm64".into(),
            ];
            apt.run(&[&["download"], &packages.each_ref().map(String::as_str)[..]].concat(), guard)?;
            apt.unpack(guard)?;
            let sources = part.join("tree/usr/src");
            kernel::make_movable(&sources.join(format!("linux-headers-{newest}-arm64")))?;
            Ok(symlink(format!("linux-headers-{newest}-arm64"), sources.join("headers"))?)
        })
        .context("no headers of Debian 12's kernel for 64-bit ARM")?;
        Ok(unpacked.join("usr/src/headers").canonicalize()?)
    }

    /// A shell for ARM that needs no library. It comes with the kernel's headers.
    pub fn busybox(&self) -> PathBuf {
        self.folder.join(OF_KERNEL).join("bin/busybox")
    }

    /// What takes the symbols out of programs for ARM.
    pub fn strip(&self) -> PathBuf {
        self.folder.join("strip")
    }

    /// The folder of the libraries that programs for ARM are linked with, and of their loader.
    pub fn libraries(&self) -> PathBuf {
        self.root().join("lib")
    }

    /// The folder that stands for the root of a host with those libraries.
    pub fn root(&self) -> PathBuf {
        self.folder.join("cross/usr/aarch64-linux-gnu")
    }

    /// A make that builds Linux and its modules for ARM.
    pub fn make(&self, folder: &Path) -> Command {
        let mut make = self.command("make", folder);
        make.args(["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"]);
        make
    }

    /// A program that calls programs for ARM's files by Debian's names, such as aarch64-linux-gnu-objdump.
    pub fn command(&self, program: &str, folder: &Path) -> Command {
        let mut command = process::command(program, folder);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = [self.folder.join("cross/usr/bin")].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(places).expect("they were one variable before"));
        command.env("LD_LIBRARY_PATH", self.folder.join("lib"));
        command
    }

    /// Scripts that run the unpacked programs where they lie.
    fn write_programs(&self) -> Result<()> {
        let (rust, cross) = (self.folder.join(SUITE).join("usr"), self.folder.join("cross"));
        let libraries = rust.join("lib/x86_64-linux-gnu");
        let loader = libraries.join("ld-linux-x86-64.so.2");
        let (rust, libraries, loader) = (rust.display(), libraries.display(), loader.display());
        script(
            &self.folder.join("rustc"),
            &format!("exec {loader} --library-path {libraries} {rust}/bin/rustc --sysroot {rust} \"$@\""),
        )?;
        // Of the host's libraries among the packages the assembler's own alone: the C library must be that of the loader.
        let own = self.folder.join("lib");
        let _ = fs::remove_dir_all(&own);
        fs::create_dir_all(&own)?;
        for file in fs::read_dir(cross.join("usr/lib/x86_64-linux-gnu"))?.flatten() {
            if file.file_name().to_string_lossy().contains("-arm64.") {
                symlink(file.path(), own.join(file.file_name()))?;
            }
        }
        let (own, cross) = (own.display(), cross.display());
        let tool = format!("LD_LIBRARY_PATH={own} exec {cross}/usr/bin/aarch64-linux-gnu");
        for name in ["ar", "strip"] {
            script(&self.folder.join(name), &format!("{tool}-{name} \"$@\""))?;
        }
        fs::create_dir_all(self.compilers())?;
        for (name, program) in [("cc", "gcc"), ("gcc", "gcc"), ("c++", "g++"), ("g++", "g++")] {
            script(&self.compilers().join(name), &format!("{tool}-{program} --sysroot={cross} \"$@\""))?;
        }
        Ok(())
    }
}

/// A script of one line. Of bash: other shells drop variables whose names are not theirs, such as `CARGO_BIN_EXE_nccl-caller`.
fn script(file: &Path, line: &str) -> Result<()> {
    fs::write(file, format!("#!/bin/bash\n{line}\n"))?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// An apt for which nothing is installed, so that it fetches all that a package needs. Its state lies in a folder.
struct Apt<'a> {
    part: &'a Path,
    options: Vec<String>,
}

impl<'a> Apt<'a> {
    /// With this host's lists of packages.
    fn of_host(part: &'a Path) -> Result<Apt<'a>> {
        for folder in ["apt/archives/partial", "apt/lists/partial"] {
            fs::create_dir_all(part.join(folder))?;
        }
        fs::write(part.join("status"), "")?;
        let at = |name: &str| part.join(name).display().to_string();
        let options = [
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("apt")),
            "Debug::NoLocking=1".into(),
            "APT::Sandbox::User=root".into(),
        ];
        Ok(Apt { part, options: options.into() })
    }

    /// With the lists of a part of Debian for this host and for ARM.
    fn of_suite(part: &'a Path, suite: &str) -> Result<Apt<'a>> {
        let mut apt = Apt::of_host(part)?;
        let sources = part.join("sources.list");
        let archive = "[arch=amd64,arm64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian";
        fs::write(&sources, format!("deb {archive} {suite} main\n"))?;
        apt.options.extend([
            format!("Dir::Etc::sourcelist={}", sources.display()),
            "Dir::Etc::sourceparts=-".into(),
            format!("Dir::State::lists={}", part.join("apt/lists").display()),
            "APT::Architectures::=amd64".into(),
            "APT::Architectures::=arm64".into(),
            "Acquire::Languages=none".into(),
        ]);
        Ok(apt)
    }

    fn run(&self, arguments: &[&str], guard: Guard) -> Result<()> {
        let mut apt = self.of("apt-get", arguments);
        apt.arg("--quiet=2");
        process::run(apt, guard)
    }

    fn of(&self, program: &str, arguments: &[&str]) -> Command {
        let mut apt = process::command(program, self.part);
        apt.args(arguments).args(self.options.iter().flat_map(|option| ["-o", option]));
        apt
    }

    /// Unpacks all that was fetched into the folder's `tree`.
    fn unpack(&self, guard: Guard) -> Result<()> {
        let folders = [self.part.to_path_buf(), self.part.join("apt/archives")];
        let files = folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
        let files: Vec<_> = files.map(|file| file.path()).collect();
        let packages: Vec<_> =
            files.iter().filter(|path| path.extension() == Some(OsStr::new("deb"))).collect();
        ensure!(!packages.is_empty(), "apt-get has fetched no package");
        for package in packages {
            let mut unpack = process::command("dpkg-deb", self.part);
            unpack.arg("-x").arg(package).arg(self.part.join("tree"));
            process::run_quietly(unpack, guard)?;
        }
        Ok(())
    }
}
