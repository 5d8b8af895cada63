//! The Python wheel: `python/` with the programs, the libraries and the headers in it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::natives::{self, GLIBC, Natives};
use super::{VERSION, epoch};
use crate::files::{copy_folder, put};
use crate::paths::Paths;
use crate::progress::Guard;
use crate::{install, process};

/// Makes the wheel in the target folder's `wheels`, and has auditwheel check that it runs where its name says; returns its path.
pub fn build(paths: &Paths, natives: &Natives, guard: Guard) -> Result<PathBuf> {
    let tools = natives::tools(paths);
    let out = paths.scratch("package")?.join("wheel");
    // Files of an earlier version must not be packaged.
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    let stage = out.join("python");
    for file in ["pyproject.toml", "setup.py", "README.md"] {
        put(&stage.join(file), &fs::read(paths.root.join("python").join(file))?)?;
    }
    for file in ["LICENSE-MIT", "LICENSE-APACHE"] {
        put(&stage.join(file), &fs::read(paths.root.join(file))?)?;
    }
    let package = stage.join("src/pushgate");
    copy_folder(&paths.root.join("python/src/pushgate"), &package)?;
    // What an import in the checkout leaves is not packaged.
    let _ = fs::remove_dir_all(package.join("__pycache__"));
    fill(paths, natives, &package.join("_native"))?;

    let (machine, epoch) = (natives.arch.name(), epoch(paths, guard)?);
    let built = out.join("built");
    let mut pip = process::command(tools.program("python"), &stage);
    pip.args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]);
    pip.args(["--no-deps", "--no-build-isolation", "--wheel-dir"]).arg(&built).arg(".");
    // The machine that the wheel is for, where it is another one.
    pip.env("SOURCE_DATE_EPOCH", &epoch).env("_PYTHON_HOST_PLATFORM", format!("linux-{machine}"));
    process::run(pip, guard)?;
    let made = built.join(format!("pushgate-{VERSION}-py3-none-linux_{machine}.whl"));
    ensure!(made.is_file(), "pip has not made {}", made.display());

    // Refuses libraries that ask for a later glibc, or for a library that such hosts may not have.
    let wheels = paths.target.join("wheels");
    let platform = format!("manylinux_{}_{machine}", GLIBC.replace('.', "_"));
    let mut audit = process::command(tools.program("auditwheel"), &out);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let programs = [tools.folder().join("bin")].into_iter().chain(std::env::split_paths(&path));
    audit.env("PATH", std::env::join_paths(programs)?).env("SOURCE_DATE_EPOCH", &epoch);
    // It knows the names of its own machine's platforms alone, but the one that it finds itself.
    let wanted = if natives.cross.is_some() { "auto" } else { &platform };
    audit.args(["repair", "--only-plat", "--plat", wanted, "--wheel-dir"]).arg(&wheels).arg(&made);
    process::run(audit, guard)?;
    let wheel = wheels.join(format!("pushgate-{VERSION}-py3-none-{platform}.whl"));
    ensure!(wheel.is_file(), "auditwheel has not made {}: it finds another platform", wheel.display());
    Ok(wheel)
}

/// Puts in what is no Python.
fn fill(paths: &Paths, natives: &Natives, native: &Path) -> Result<()> {
    let target = install::Target {
        prefix: native.to_path_buf(),
        destdir: None,
        libdir: "lib".into(),
        is_movable: true,
    };
    install::put_files(paths, &target, &natives.library)?;
    // A wheel has no links, and its manual nobody would find.
    fs::remove_file(native.join("lib/libpushgate.so"))?;
    fs::remove_dir_all(native.join("share"))?;
    fs::remove_dir_all(native.join("lib/cmake"))?;
    let name = natives.library.file_name().context("a library has a name")?.to_string_lossy().into_owned();
    let pc = native.join("lib/pkgconfig/pushgate.pc");
    let text = fs::read_to_string(&pc)?;
    ensure!(text.contains("-lpushgate"), "{} names no library", pc.display());
    fs::write(&pc, text.replace("-lpushgate", &format!("-l:{name} -Wl,-rpath,${{libdir}}")))?;
    put(&native.join("lib/libnccl-net-pushgate.so"), &fs::read(&natives.plugin)?)?;
    put(&native.join("lib/nixl/libplugin_PUSHGATE.so"), &fs::read(&natives.nixl)?)?;
    let command = native.join("bin/pushgate");
    put(&command, &[])?;
    // With its mode.
    fs::copy(&natives.command, &command).with_context(|| format!("cannot write {}", command.display()))?;
    Ok(())
}
