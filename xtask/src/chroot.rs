//! A small Debian in a folder, in which packages are installed, used and removed. What a run changes is gone with the run.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::{self, Need};

/// A Debian of one suite with some packages.
pub struct Root {
    folder: PathBuf,
}

/// Runs in namespaces of its own, so mounts and processes end with it: $1 is the root's folder, $2 an empty folder, $3 a folder
/// that the guest sees as /given, $4 the script in it.
const ENTER: &str = r#"
mount --make-rprivate /
mount -t tmpfs -o size=3G none "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" none "$2/root"
cd "$2/root"
mkdir -p given
mount --bind "$3" given
mount -o remount,bind,ro given
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none dev/shm
exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    sh -euc 'cd /; ip link set lo up; . "/given/$1"' sh "$4"
"#;

impl Root {
    /// The Debian in the target folder, fetched with mmdebstrap if it is not there or has other packages. Needs [`Need::Chroot`].
    pub fn debian(paths: &Paths, suite: &str, packages: &[&str], guard: Guard) -> Result<Root> {
        if let Some(reason) = system::unmet(&[Need::Chroot]) {
            bail!("a small Debian in a folder {reason}");
        }
        let place = paths.scratch("roots")?;
        let folder = place.join(suite);
        let stamp = place.join(format!("{suite}.txt"));
        let wanted = packages.join(",");
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(Root { folder });
        }
        say!("Fetching a small Debian ({suite}) into {} (once)", folder.display());
        let _ = fs::remove_file(&stamp);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let mut make = process::command("mmdebstrap", &place);
        make.args(["--quiet", "--variant=minbase", "--include", &wanted, suite]).arg(&folder);
        make.arg("http://deb.debian.org/debian");
        process::run(make, guard).context("fetching a small Debian needs its archive, deb.debian.org")?;
        fs::write(&stamp, wanted)?;
        Ok(Root { folder })
    }

    /// Runs a script of the folder `given`, by `sh -eu`, as root, without a network, where `given` is /given.
    pub fn run(&self, paths: &Paths, given: &Path, script: &str, guard: Guard) -> Result<()> {
        let empty = paths.scratch("roots")?.join("run");
        fs::create_dir_all(&empty)?;
        let mut unshare = process::command("unshare", given);
        unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "sh", "-euc"]);
        let folders: [&OsStr; 3] = [self.folder.as_os_str(), empty.as_os_str(), given.as_os_str()];
        unshare.args([ENTER, "sh"]).args(folders).arg(script);
        process::run_quietly(unshare, guard).with_context(|| format!("{script} in a small Debian"))
    }
}
