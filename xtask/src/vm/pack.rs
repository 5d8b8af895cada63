//! Packs a suite with everything that it needs into one archive, for a host that has neither QEMU
//! nor packages nor a toolchain: a GPU host, whose kernels push into the guest's BAR.
//!
//! The guest sees a small root file system in place of its host's: busybox, iproute2, libibverbs,
//! and the suite's programs where they were built. QEMU brings its libraries and their loader.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

use super::batch::{Report, build, suites_job};
use super::guest;
use super::kernel::Kernel;
use super::qemu::Machine;
use super::suites::{SUITES, Suite};
use crate::paths::Paths;
use crate::process;
use crate::progress::{Guard, SILENCE};
use crate::{cuda, kmod, system};

/// Name of the folder in the archive.
const FOLDER: &str = "pushgate-vm";
/// What the guest finds besides busybox. This `ip`, unlike busybox's, knows soft-RoCE links.
const PROGRAMS: &[&str] = &["dash", "ip", "rdma", "ss"];
/// The firmware of a PC, and what QEMU boots a kernel with.
const FIRMWARE: &[&str] = &["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin", "pvh.bin"];
const MEMORY: u32 = 2048;

/// Gathers everything and packs it into `file`.
pub fn pack(paths: &Paths, kernel: &Kernel, suite: &Suite, file: &Path) -> Result<()> {
    ensure!(suite.guests == 1, "{} runs in two machines; packed is one", suite.name);
    ensure!(!suite.siw, "{} needs software iWARP, which an archive does not hold", suite.name);
    let nvcc = cuda::toolkit(paths, Guard::NONE)?.nvcc;
    let mut settings = build(paths, &[suite], &[("PUSHGATE_NVCC", nvcc.as_os_str())], Guard::NONE)?;
    let scratch = paths.scratch("pack")?;
    let folder = scratch.join(FOLDER);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let root = folder.join("root");
    let mut tree = Tree::new(root.clone());
    if suite.module {
        let modules = kmod::build(paths, kernel, Guard::NONE)?;
        settings.push_str(&format!("export KMOD_DIR={}\n", process::quote(modules.as_os_str())));
        for module in fs::read_dir(&modules)?.flatten().map(|entry| entry.path()) {
            if module.extension().is_some_and(|end| end == "ko") {
                tree.copy(&module, &module)?;
            }
        }
    }
    for program in PROGRAMS {
        let file = system::find_program(program).with_context(|| format!("no program {program}"))?;
        tree.program(&file)?;
    }
    tree.busybox()?;
    tree.libibverbs()?;
    // In the guest the programs are where they were built; on the host they are in a folder of the
    // archive.
    let mut host = String::new();
    for (name, program) in variables(&settings).filter(|(_, path)| path.is_file()) {
        tree.program(&program)?;
        let file = Path::new("host").join(program.file_name().context("a program has a name")?);
        strip(paths, &program, &folder.join(&file))?;
        strip(paths, &program, &tree.place(&program))?;
        host.push_str(&format!("export {name}=\"$HERE/{}\"\n", file.display()));
    }
    for folder in [&paths.root, &paths.target] {
        fs::create_dir_all(tree.place(&folder.canonicalize()?))?;
    }
    fs::write(folder.join("host/settings"), host)?;
    fs::write(folder.join("suite"), suite.name)?;
    let job = suites_job(&[suite], &settings, MEMORY, None, Guard::NONE);
    fs::write(folder.join("initrd"), guest::initramfs(paths, kernel, &job)?)?;
    fs::copy(kernel.image(), folder.join("vmlinux"))?;
    qemu(&folder)?;
    strip(paths, &env::current_exe()?, &folder.join("xtask"))?;
    let run = folder.join("run");
    fs::write(&run, "#!/bin/sh\ncd \"$(dirname \"$0\")\" && exec ./xtask packed \"$PWD\"\n")?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;
    let file = env::current_dir()?.join(file);
    let mut tar = process::command("tar", &scratch);
    tar.args(["--owner=0", "--group=0", "-cf"]).arg(&file).args(["-I", "xz -T0 -6", FOLDER]);
    process::run(tar, Guard::NONE)?;
    println!("{} ({} MiB): unpack it there and start {FOLDER}/run", file.display(), megabytes(&file)?);
    Ok(())
}

fn megabytes(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file)?.len().div_ceil(1 << 20))
}

/// Runs what lies in a folder.
pub fn run(folder: &Path) -> Result<ExitCode> {
    let folder = folder.canonicalize()?;
    let name = fs::read_to_string(folder.join("suite")).context("no packed suite lies there")?;
    let suite = SUITES.iter().find(|suite| suite.name == name).context("packed by another release")?;
    let host = fs::read_to_string(folder.join("host/settings"))?;
    let settings = format!("HERE={}\n{host}", process::quote(folder.as_os_str()));
    // What runs in the guest is in the initrd already; these settings are for the host.
    let job = suites_job(&[suite], &settings, MEMORY, None, Guard::new(Some(SILENCE), None));
    // In memory, because a GPU's driver can't pin the pages of a file on disk, and the BAR is such
    // a file.
    let runs = Path::new("/dev/shm/pushgate-vm");
    fs::create_dir_all(runs)?;
    let run = guest::run_folder(runs)?;
    fs::copy(folder.join("initrd"), run.join("initrd"))?;
    let part = |name: &str| OsString::from(folder.join("qemu").join(name));
    let machine = Machine {
        qemu: vec![
            part("loader"),
            "--library-path".into(),
            part("lib"),
            part("qemu-system-x86_64"),
            "-L".into(),
            part("firmware"),
        ],
        modules: Some(part("modules").into()),
        image: folder.join("vmlinux"),
        root: folder.join("root"),
    };
    let ended = guest::boot(&machine, run, &job)?;
    let mut report = Report::default();
    report.add(&[suite], ended)?;
    Ok(ExitCode::from(report.code))
}

/// The variables of [`build`]'s settings whose value is a path without quotes in it.
fn variables(settings: &str) -> impl Iterator<Item = (&str, PathBuf)> {
    let lines = settings.lines().filter_map(|line| line.strip_prefix("export ")?.split_once('='));
    lines.map(|(name, value)| (name, PathBuf::from(value.trim_matches('\''))))
}

fn strip(paths: &Paths, from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
    let mut strip = process::command("strip", &paths.root);
    strip.arg("-o").arg(to).arg(from);
    process::run_quietly(strip, Guard::NONE)
}

/// Adds QEMU, its libraries, the loader that finds them, and firmware.
fn qemu(folder: &Path) -> Result<()> {
    let program = system::find_program("qemu-system-x86_64").context("no QEMU")?;
    let into = folder.join("qemu");
    fs::create_dir_all(into.join("lib"))?;
    fs::create_dir_all(into.join("firmware"))?;
    fs::copy(&program, into.join("qemu-system-x86_64"))?;
    for library in libraries(&program)? {
        let name = library.file_name().context("a library has a name")?.to_owned();
        let to = if name.to_string_lossy().starts_with("ld-linux") {
            into.join("loader")
        } else {
            into.join("lib").join(name)
        };
        fs::copy(&library, to)?;
    }
    fs::create_dir_all(into.join("modules"))?;
    let emulation = "accel-tcg-x86_64.so";
    let module = Path::new("/usr/lib/x86_64-linux-gnu/qemu").join(emulation);
    fs::copy(&module, into.join("modules").join(emulation))
        .with_context(|| format!("QEMU's module {} is not there", module.display()))?;
    for name in FIRMWARE {
        let places = ["/usr/share/seabios", "/usr/share/qemu"].map(|dir| Path::new(dir).join(name));
        let file = places.iter().find(|file| file.is_file());
        let file = file.with_context(|| format!("QEMU's firmware {name} is not there"))?;
        fs::copy(file, into.join("firmware").join(name))?;
    }
    Ok(())
}

/// The libraries of a program, including their loader, by the names that the program asks for.
fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut ldd = process::command("ldd", Path::new("/"));
    ldd.arg(program);
    let text = process::capture(ldd, false, Guard::NONE)?;
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("{}: {}", program.display(), line.trim());
    }
    let is_path = |word: &&str| word.starts_with('/');
    Ok(text.lines().filter_map(|line| line.split_whitespace().find(is_path)).map(PathBuf::from).collect())
}

/// The guest's root file system.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn new(root: PathBuf) -> Self {
        Tree { root }
    }

    /// Where a file of the host's lies in it.
    fn place(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn copy(&mut self, from: &Path, at: &Path) -> Result<()> {
        let to = self.place(at);
        fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
        if !to.exists() {
            fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Ok(())
    }

    fn program(&mut self, file: &Path) -> Result<()> {
        self.copy(file, file)?;
        for library in libraries(file)? {
            self.copy(&library, &library)?;
        }
        Ok(())
    }

    /// Makes every other program busybox, in /bin, last in the guest's PATH. /bin/sh is dash,
    /// because busybox's shell would use its own ip.
    fn busybox(&mut self) -> Result<()> {
        let busybox = system::static_busybox().context("no static busybox")?;
        self.copy(&busybox, Path::new("/bin/busybox"))?;
        let mut list = process::command(&busybox, Path::new("/"));
        list.arg("--list");
        for name in process::capture(list, false, Guard::NONE)?.lines() {
            let at = self.place(Path::new("/bin")).join(name);
            if !["sh", "ip"].contains(&name) && !at.exists() {
                symlink("busybox", at)?;
            }
        }
        let dash = system::find_program("dash").context("no dash")?;
        symlink(dash, self.place(Path::new("/bin/sh")))?;
        for folder in ["proc", "sys", "dev", "run", "tmp", "var/tmp", "etc"] {
            fs::create_dir_all(self.root.join(folder))?;
        }
        Ok(())
    }

    /// Adds libibverbs and its providers, which are opened at run time.
    fn libibverbs(&mut self) -> Result<()> {
        let folder = Path::new("/usr/lib/x86_64-linux-gnu");
        self.program(&folder.join("libibverbs.so.1"))?;
        let provider = |name: &str| name.starts_with("librxe");
        for file in fs::read_dir(folder.join("libibverbs"))?.flatten() {
            if provider(&file.file_name().to_string_lossy()) {
                self.program(&file.path())?;
            }
        }
        for file in fs::read_dir("/etc/libibverbs.d")?.flatten() {
            if file.file_name() == "rxe.driver" {
                self.copy(&file.path(), &file.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_name_programs() {
        let all: Vec<_> = variables("export A=/bin/sh\nexport B='/a b/c'\nnonsense\n").collect();
        assert_eq!(all, [("A", "/bin/sh".into()), ("B", "/a b/c".into())]);
    }

    #[test]
    fn a_programs_libraries_are_found() {
        let libraries = libraries(&env::current_exe().unwrap()).unwrap();
        assert!(libraries.iter().any(|file| file.to_string_lossy().contains("ld-linux")));
        assert!(libraries.iter().all(|file| file.is_file()));
    }
}
