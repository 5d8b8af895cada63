//! Where a host's files are: on this host, or in a tree that was kept of another host.

use std::path::{Path, PathBuf};

use crate::answers::Answers;

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
