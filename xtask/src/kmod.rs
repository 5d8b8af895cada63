//! Builds the kernel module for the virtual machine's kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::output::say;
use crate::paths::Paths;
use crate::process::{self, Redirect};
use crate::progress::Guard;
use crate::system::{self, Need};
use crate::vm::kernel::{self, Kernel};

/// What building the module needs.
pub const NEEDS: &[Need] = &[Need::ModuleBuild, Need::Kmod];

/// Builds the module; returns the folder of the modules.
pub fn task(paths: &Paths) -> Result<PathBuf> {
    if let Some(reason) = kernel::unavailable() {
        bail!("{reason}");
    }
    build(paths, &kernel::get(paths, None, Guard::NONE)?, Guard::NONE)
}

/// Builds the driver, and the importer that its tests load, into one folder. Any warning is an
/// error, sparse's too where sparse is installed.
pub fn build(paths: &Paths, kernel: &Kernel, guard: Guard) -> Result<PathBuf> {
    if let Some(reason) = system::unmet(NEEDS) {
        bail!("building the kernel module {reason}");
    }
    let module = copied(paths, &kernel.release)?;
    let mut arguments = vec!["W=1", "PUSHGATE_TEST=m"];
    // Checks what it compiles.
    if system::find_program("sparse").is_some() {
        arguments.push("C=1");
    } else {
        say!("sparse does not check the kernel module: it is not installed (sudo apt-get install sparse)");
    }
    compile(paths, kernel, &module, &arguments, guard)?;
    Ok(module)
}

/// Copies the sources into a folder of this name, because Kbuild writes beside them; returns the module's.
pub fn copied(paths: &Paths, name: &str) -> Result<PathBuf> {
    let copy = paths.scratch(&format!("kmod/{name}"))?;
    for folder in ["kmod", "include"] {
        mirror(&paths.root.join("driver-shim").join(folder), &copy.join(folder))?;
    }
    Ok(copy.join("kmod").canonicalize()?)
}

/// Builds the modules of a folder against the headers of a kernel, with these arguments of make. Any
/// warning is an error.
pub fn compile(
    paths: &Paths,
    kernel: &Kernel,
    folder: &Path,
    arguments: &[&str],
    guard: Guard,
) -> Result<()> {
    let headers = kernel::headers(paths, kernel, guard)?;
    let headers = headers.join("usr/src").join(format!("linux-headers-{}", kernel.release));
    make(process::command("make", folder), &headers, folder, arguments, guard)
}

/// Builds as [`compile`] does, by this make, with headers in a folder.
pub fn make(
    mut make: Command,
    headers: &Path,
    folder: &Path,
    arguments: &[&str],
    guard: Guard,
) -> Result<()> {
    make.args(["-s", "-j2", "KCFLAGS=-Werror"]).args(arguments).arg("modules");
    // If the headers come with a vmlinux, types for BPF would need pahole; nothing here reads them.
    make.arg("CONFIG_DEBUG_INFO_BTF_MODULES=");
    make.arg("-C").arg(headers).arg(format!("M={}", folder.display()));
    // modpost prints warnings to stderr and goes on.
    let log = folder.with_extension("log");
    let to = Redirect { stderr: Some(fs::File::create(&log)?), ..Redirect::default() };
    let result = process::run_redirected(make, to, guard);
    let said = fs::read_to_string(&log).unwrap_or_default();
    let said: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    result.with_context(|| said.join("\n"))?;
    if !said.is_empty() {
        bail!("{} builds with warnings:\n{}", folder.display(), said.join("\n"));
    }
    Ok(())
}

/// Copies a folder's files, only those that differ, so that make builds no more than it must.
fn mirror(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            mirror(&entry.path(), &target)?;
            continue;
        }
        let content = fs::read(entry.path())?;
        if fs::read(&target).ok().as_ref() != Some(&content) {
            fs::write(&target, content)?;
        }
    }
    Ok(())
}
