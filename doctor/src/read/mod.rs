//! The edge: looks at a host. Every file is bounded, every failure becomes a sentence of what could
//! not be read and why; nothing here judges.

mod gpu;
pub(crate) mod host;
mod module;
mod nccl;
mod netlink;
mod pci;
mod rdma;

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use crate::archive::{Answers, UNREADABLE};
use crate::checks::Part;
use crate::readings::{Read, Readings, Wants, Window};

/// Where the kernel's files are.
#[derive(Clone, Debug)]
pub struct Roots {
    /// /sys
    pub sys: PathBuf,
    /// /proc
    pub proc: PathBuf,
    /// /dev
    pub dev: PathBuf,
    /// /etc
    pub etc: PathBuf,
    /// System calls, netlink and libraries are asked, too. They tell of this host alone.
    pub live: bool,
    /// What the host said that is in no file, of a tree that was kept by [`archive`](crate::archive).
    pub answers: Option<Answers>,
}

impl Roots {
    /// This host.
    pub fn host() -> Roots {
        Roots { live: true, ..Roots::below(Path::new("/")) }
    }

    /// A tree of files that was kept of a host, or made by a test: `sys`, `proc`, `dev` and `etc` below
    /// a folder. Nothing but files is looked at.
    pub fn below(root: &Path) -> Roots {
        let at = |name| root.join(name);
        let (sys, proc, dev, etc) = (at("sys"), at("proc"), at("dev"), at("etc"));
        Roots { sys, proc, dev, etc, live: false, answers: None }
    }

    /// A tree as [`Roots::below`] takes it, or an unpacked archive, whose answers are read too.
    ///
    /// # Errors
    /// A sentence: the folder is none, or its answers make no sense.
    pub fn kept(root: &Path) -> Result<Roots, String> {
        match std::fs::canonicalize(root) {
            Ok(root) if root.is_dir() => Ok(Roots { answers: Answers::load(&root)?, ..Roots::below(&root) }),
            _ => Err(format!(
                "{} is no folder: name one that holds sys, proc, dev and etc of a host, such as an unpacked \
                 archive of `pushgate doctor --archive`",
                root.display()
            )),
        }
    }
}

/// Looks at what these parts need.
pub fn read(roots: &Roots, wants: Wants, parts: &[Part]) -> Readings {
    let has = |part| parts.contains(&part);
    let root = roots.sys.parent().filter(|_| !roots.live).map_or(String::new(), |r| r.display().to_string());
    let mut r = Readings { wants, root, ..Readings::default() };
    if has(Part::Rdma) {
        r.rdma = rdma::devices(roots, r.wants.device.as_deref());
        r.netdevs = rdma::netdevs(roots, &r.rdma);
    }
    if has(Part::Gpu) {
        r.gpu = gpu::gpu(roots);
    }
    if has(Part::Pci) {
        r.pci = pci::functions(roots, &r.rdma);
        r.iommu_groups = pci::iommu_groups(roots);
        r.cmdline = text(&roots.proc.join("cmdline"));
    }
    if has(Part::Host) {
        r.host = host::host(roots, &r.wants);
        // Reading all of the kernel's symbols takes a while, so only where it matters.
        if r.gpu.count > 0 || r.wants.window == Window::Bar {
            r.host.umem_dmabuf = host::symbol(roots, "ib_umem_dmabuf_get");
        }
    }
    if has(Part::Module) {
        r.module = module::module(roots);
    }
    if has(Part::Nccl) && roots.live {
        r.nccl = nccl::nccl();
    }
    if let Some(answers) = &roots.answers {
        answers.fill(&mut r);
    }
    r
}

/// No file of sysfs or proc that is read whole is longer.
const LONGEST: u64 = 1 << 20;

/// What became of asking for a file.
fn failed<T>(path: &Path, error: &std::io::Error) -> Read<T> {
    match error.kind() {
        ErrorKind::NotFound => Read::Absent,
        ErrorKind::NotADirectory => Read::Absent,
        _ => Read::Unreadable(format!("{} can't be read: {error}", path.display())),
    }
}

/// Opens a file to read. A pipe or a device in a tree that was kept would hold us up.
fn open(path: &Path) -> std::io::Result<File> {
    match std::fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(std::io::Error::other("no regular file")),
    }
}

/// A file's bytes, the first MiB.
pub(crate) fn binary(path: &Path) -> Read<Vec<u8>> {
    let mut bytes = Vec::new();
    match open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes)) {
        Ok(_) => match bytes.strip_prefix(UNREADABLE) {
            Some(why) => kept_unreadable(path, why),
            None => Read::Is(bytes),
        },
        Err(error) => failed(path, &error),
    }
}

/// A file of an archive that could not be read on the host.
fn kept_unreadable<T>(path: &Path, why: &[u8]) -> Read<T> {
    let why = String::from_utf8_lossy(why);
    Read::Unreadable(format!("{} can't be read: {}", path.display(), why.trim_end()))
}

/// A file's text without space around it.
fn text(path: &Path) -> Read<String> {
    binary(path).then(|bytes| match String::from_utf8(bytes) {
        Ok(text) => Ok(text.trim().to_string()),
        Err(_) => Err(format!("{} is no text", path.display())),
    })
}

/// A file that holds one number.
fn number<T: std::str::FromStr>(path: &Path) -> Read<T> {
    text(path).then(|text| {
        let short: String = text.chars().take(40).collect();
        text.parse().map_err(|_| format!("{} holds `{short}`, which is no number in range", path.display()))
    })
}

/// The names in a folder, in order; none if it can't be read.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}
