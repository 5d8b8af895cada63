//! What the steps need from the system, and how to get it on Debian and Ubuntu.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::output::say;
use crate::process;
use crate::progress::Guard;

/// Something that a step needs and that cargo can't fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A C and a C++ compiler: for device code on the CPU executor, the layout check, and nvcc's
    /// host side.
    Cxx,
    /// Python with its venv module, into which nvcc is installed.
    Python,
    /// libclang of any version, for bindgen.
    Libclang,
    /// The headers of libibverbs and librdmacm, and with them the libraries: for the bindings and their tests.
    Verbs,
    /// The rustfmt component.
    Rustfmt,
    /// The clippy component.
    Clippy,
    /// QEMU, which emulates the virtual machine.
    Qemu,
    /// A shell that needs no library, for the guest's first programs.
    Busybox,
    /// Programs that make and test RDMA devices in the guest.
    RdmaTools,
    /// Programs for kernels and their modules.
    Kmod,
    /// What builds a module for Debian 12's kernel: the compiler that built that kernel.
    ModuleBuild,
    /// What builds a kernel beside what builds modules.
    KernelBuild,
    /// Programs that make the Debian package.
    Packaging,
    /// What makes the manual page of section 4.
    Manual,
    /// What makes the RPM package.
    Rpm,
    /// Root, and what makes a small Debian in a folder, in which packages are installed and used.
    Chroot,
    /// What the package and its test need on the system where it is installed.
    Installing,
    /// MPI's launcher, under which tests start ranks, and its compiler.
    Launcher,
    /// Valgrind's memcheck.
    Valgrind,
    /// What takes the symbols out of a library that is installed.
    Strip,
    /// What programs in C are built with against an installed library.
    CBuild,
    /// The terminal in which `pushgate top` is tested.
    Terminal,
}

/// All needs, in the order in which they are reported.
pub const ALL: [Need; 22] = [
    Need::Cxx,
    Need::Python,
    Need::Libclang,
    Need::Verbs,
    Need::Rustfmt,
    Need::Clippy,
    Need::Qemu,
    Need::Busybox,
    Need::RdmaTools,
    Need::Kmod,
    Need::ModuleBuild,
    Need::KernelBuild,
    Need::Packaging,
    Need::Manual,
    Need::Rpm,
    Need::Chroot,
    Need::Installing,
    Need::Launcher,
    Need::Valgrind,
    Need::Strip,
    Need::CBuild,
    Need::Terminal,
];

impl Need {
    /// The need's name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Need::Cxx => "cc and g++",
            Need::Python => "python3 with venv",
            Need::Libclang => "libclang",
            Need::Verbs => "libibverbs and librdmacm with headers",
            Need::Rustfmt => "rustfmt",
            Need::Clippy => "clippy",
            Need::Qemu => "qemu-system-x86_64",
            Need::Busybox => "a static busybox",
            Need::RdmaTools => {
                "rdma, ibv_devinfo, perftest, rping and the libraries of soft-RoCE and software iWARP"
            }
            Need::Kmod => "depmod and xz",
            Need::ModuleBuild => "gcc-12 and make",
            Need::KernelBuild => "bc, bison, flex and xz",
            Need::Packaging => "dpkg-deb, dpkg-shlibdeps and strip",
            Need::Manual => "lowdown",
            Need::Rpm => "rpmbuild",
            Need::Chroot => "root, mmdebstrap and unshare",
            Need::Installing => "dkms, addgroup, udev and man",
            Need::Launcher => "mpirun and mpicc",
            Need::Valgrind => "valgrind",
            Need::Strip => "strip",
            Need::CBuild => "pkg-config, cmake, make, nm, readelf and man",
            Need::Terminal => "tmux",
        }
    }

    /// Checks whether the need is met.
    pub fn is_met(self) -> bool {
        match self {
            Need::Cxx => succeeds("cc", &["--version"]) && succeeds("g++", &["--version"]),
            // Without Debian's python3-venv, the module venv exists but ensurepip does not.
            Need::Python => succeeds("python3", &["-c", "import venv, ensurepip"]),
            Need::Libclang => has_libclang(),
            Need::Verbs => ["infiniband/verbs.h", "rdma/rdma_cma.h"]
                .iter()
                .all(|header| Path::new("/usr/include").join(header).exists()),
            Need::Rustfmt => succeeds("rustfmt", &["--version"]),
            Need::Clippy => succeeds("cargo-clippy", &["--version"]),
            Need::Qemu => succeeds("qemu-system-x86_64", &["--version"]),
            Need::Busybox => static_busybox().is_some(),
            Need::RdmaTools => {
                let has_provider = |name| Path::new("/etc/libibverbs.d").join(name).exists();
                have(&["ip", "rdma", "tc", "ibv_devinfo", "ib_write_bw", "rping"])
                    && ["rxe.driver", "siw.driver"].into_iter().all(has_provider)
            }
            Need::Kmod => have(&["depmod", "modprobe", "xz"]),
            Need::ModuleBuild => succeeds("gcc-12", &["--version"]) && succeeds("make", &["--version"]),
            Need::KernelBuild => have(&["bc", "bison", "flex", "xz"]),
            Need::Packaging => have(&["dpkg-deb", "dpkg-shlibdeps", "dpkg-parsechangelog", "strip"]),
            Need::Manual => have(&["lowdown"]),
            Need::Rpm => have(&["rpmbuild"]),
            Need::Chroot => rustix::process::geteuid().is_root() && have(&["mmdebstrap", "unshare"]),
            Need::Installing => {
                have(&["dkms", "addgroup", "udevadm", "man"])
                    && Path::new("/lib/systemd/systemd-udevd").exists()
            }
            Need::Launcher => have(&["mpirun", "mpicc"]),
            Need::Valgrind => succeeds("valgrind", &["--version"]),
            Need::Strip => have(&["strip"]),
            Need::CBuild => have(&["pkg-config", "cmake", "make", "nm", "readelf", "man"]),
            Need::Terminal => have(&["tmux"]),
        }
    }

    fn source(self) -> Source {
        match self {
            Need::Cxx => Source::Apt(&["g++"]),
            Need::Python => Source::Apt(&["python3", "python3-venv"]),
            Need::Libclang => Source::Apt(&["libclang-dev"]),
            Need::Verbs => Source::Apt(&["libibverbs-dev", "librdmacm-dev"]),
            Need::Rustfmt => Source::Rustup("rustfmt"),
            Need::Clippy => Source::Rustup("clippy"),
            Need::Qemu => Source::Apt(&["qemu-system-x86"]),
            Need::Busybox => Source::Apt(&["busybox-static"]),
            Need::RdmaTools => {
                Source::Apt(&["iproute2", "ibverbs-providers", "ibverbs-utils", "perftest", "rdmacm-utils"])
            }
            Need::Kmod => Source::Apt(&["kmod", "xz-utils"]),
            Need::ModuleBuild => Source::Apt(&["gcc-12", "make"]),
            Need::KernelBuild => Source::Apt(&["bc", "bison", "flex", "xz-utils"]),
            Need::Packaging => Source::Apt(&["dpkg-dev", "binutils"]),
            Need::Manual => Source::Apt(&["lowdown"]),
            Need::Rpm => Source::Apt(&["rpm"]),
            Need::Chroot => Source::Apt(&["mmdebstrap", "util-linux"]),
            Need::Installing => Source::Apt(&["dkms", "adduser", "udev", "man-db"]),
            Need::Launcher => Source::Apt(&["openmpi-bin", "libopenmpi-dev"]),
            Need::Valgrind => Source::Apt(&["valgrind"]),
            Need::Strip => Source::Apt(&["binutils"]),
            Need::CBuild => Source::Apt(&["pkg-config", "cmake", "make", "binutils", "man-db"]),
            Need::Terminal => Source::Apt(&["tmux"]),
        }
    }
}

enum Source {
    Apt(&'static [&'static str]),
    Rustup(&'static str),
}

/// Why a step can't run, with the remedy; `None` if all its needs are met.
pub fn unmet(needs: &[Need]) -> Option<String> {
    let missing = missing(needs);
    if missing.is_empty() {
        return None;
    }
    let names: Vec<_> = missing.iter().map(|need| need.name()).collect();
    Some(format!("needs {}; run: {}", names.join(", "), remedy(&missing)))
}

/// Installs what is missing: packages if run as root, components if there is rustup.
pub fn install(root: &Path, guard: Guard) -> Result<()> {
    let missing = missing(&ALL);
    let packages = packages(&missing);
    let may_install = rustix::process::geteuid().is_root() && succeeds("apt-get", &["--version"]);
    if !packages.is_empty() && may_install {
        let apt = |arguments: &[&str]| {
            let mut command = process::command("apt-get", root);
            command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
            process::run(command, guard)
        };
        apt(&["update"])?;
        apt(&[&["install", "-y", "--no-install-recommends"], packages.as_slice()].concat())?;
    }
    let components = components(&missing);
    if !components.is_empty() && succeeds("rustup", &["--version"]) {
        let mut command = process::command("rustup", root);
        command.args(["component", "add"]).args(&components);
        process::run(command, guard)?;
    }
    Ok(())
}

/// Prints what the steps need and whether it is there. Returns what is missing, with the remedy.
pub fn report() -> Option<String> {
    let missing = missing(&ALL);
    for need in ALL {
        say!("{}: {}", need.name(), if missing.contains(&need) { "missing" } else { "found" });
    }
    unmet(&ALL)
}

fn missing(needs: &[Need]) -> Vec<Need> {
    needs.iter().copied().filter(|need| !need.is_met()).collect()
}

fn packages(missing: &[Need]) -> Vec<&'static str> {
    let apt = |need: &Need| match need.source() {
        Source::Apt(packages) => packages,
        Source::Rustup(_) => &[],
    };
    missing.iter().flat_map(apt).copied().collect()
}

fn components(missing: &[Need]) -> Vec<&'static str> {
    let rustup = |need: &Need| match need.source() {
        Source::Apt(_) => None,
        Source::Rustup(component) => Some(component),
    };
    missing.iter().filter_map(rustup).collect()
}

/// The commands that install what is missing.
fn remedy(missing: &[Need]) -> String {
    let mut commands = Vec::new();
    let packages = packages(missing);
    if !packages.is_empty() {
        let install = "sudo apt-get install -y --no-install-recommends";
        commands.push(format!("sudo apt-get update && {install} {}", packages.join(" ")));
    }
    let components = components(missing);
    if !components.is_empty() {
        commands.push(format!("rustup component add {}", components.join(" ")));
    }
    commands.join(" && ")
}

/// Whether libclang is in one of the places where bindgen looks: LIBCLANG_PATH, the loader's cache,
/// LLVM's own folders.
fn has_libclang() -> bool {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return true;
    }
    let is_libclang = |name: &str| {
        (name.starts_with("libclang.so") || name.starts_with("libclang-"))
            && name.contains(".so")
            && !name.starts_with("libclang-cpp")
    };
    // On Debian the program is not on a user's PATH.
    let cache = ["ldconfig", "/sbin/ldconfig"].iter().find_map(|ldconfig| {
        let output = Command::new(ldconfig).arg("-p").output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    if cache.is_some_and(|text| text.lines().any(|line| is_libclang(line.trim()))) {
        return true;
    }
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let llvm = folders.filter(|folder| folder.file_name().to_string_lossy().starts_with("llvm-"));
    llvm.filter_map(|folder| fs::read_dir(folder.path().join("lib")).ok())
        .flat_map(|files| files.flatten())
        .any(|file| is_libclang(&file.file_name().to_string_lossy()))
}

/// Finds a program, also in folders that are not on a user's PATH.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn have(programs: &[&str]) -> bool {
    programs.iter().all(|name| find_program(name).is_some())
}

/// Finds a busybox that needs no library. Debian's package busybox installs another one in the same
/// place.
pub fn static_busybox() -> Option<PathBuf> {
    let file = find_program("busybox")?;
    let bytes = fs::read(&file).ok()?;
    // A program that needs libraries names the loader in its first page.
    let start = &bytes[..bytes.len().min(4096)];
    let is_dynamic = start.windows(6).any(|window| window == b"/ld-li");
    (!is_dynamic).then_some(file)
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
