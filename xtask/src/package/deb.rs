//! The Debian package: command, plugins, C library, headers, manual, and the kernel module's sources for dkms.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::VERSION;
use super::natives::{GLIBC, Natives};
use super::tree::{Layout, Tree, files, set_mode};
use crate::files::put;
use crate::install;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::Need;

/// What making the package needs.
pub const NEEDS: &[Need] = &[Need::Cxx, Need::Packaging, Need::Manual];

/// glibc's libraries, with their versions.
const GLIBC_LIBRARIES: [&str; 7] =
    ["ld-linux-aarch64 1", "libc 6", "libdl 2", "libm 6", "libpthread 0", "librt 1", "libutil 1"];

/// The oldest libstdc++ under which portable programs run: GCC's 8, as in the hosts with [`GLIBC`].
const LIBSTDCXX: &str = "8";

/// Scripts that dpkg runs; `@VERSION@` is replaced in them.
const SCRIPTS: &[&str] = &["postinst", "prerm", "postrm"];

/// Makes the package; returns its path.
pub fn build(paths: &Paths, natives: &Natives, guard: Guard) -> Result<PathBuf> {
    let out = paths.scratch("package")?;
    let whole = out.join("tree");
    if whole.exists() {
        fs::remove_dir_all(&whole).with_context(|| format!("cannot remove {}", whole.display()))?;
    }
    let tree = Tree { paths, out: out.clone(), root: whole.join("usr"), guard };
    let libdir = natives.arch.libdir();
    let layout = Layout {
        libdir: &libdir,
        units: "lib/systemd/user",
        zsh: "share/zsh/vendor-completions",
        prefix: Some("/usr"),
    };
    tree.fill(&layout, natives)?;
    let maker = Maker { tree, whole, natives };
    let changelog = maker.changelog()?;
    maker.control(&changelog)?;
    let package = out.join(format!("pushgate_{VERSION}_{}.deb", natives.arch.debian()));
    let mut command = process::command("dpkg-deb", &out);
    // Makes two builds of the same sources alike: no owner and no time of this build.
    command.env("SOURCE_DATE_EPOCH", changelog.time()?);
    command.args(["--root-owner-group", "-Zxz", "--build"]).arg(&maker.whole).arg(&package);
    process::run(command, guard)?;
    Ok(package)
}

/// The newest entry of the changelog, by the names of its fields.
struct Changelog(BTreeMap<String, String>);

impl Changelog {
    fn field(&self, name: &str) -> Result<&str> {
        let value = self.0.get(name).map(String::as_str);
        value.with_context(|| format!("packaging/changelog says nothing of {name} in its first entry"))
    }

    /// Seconds since 1970, in the form that build tools agree on: the caller's value if there is
    /// one.
    fn time(&self) -> Result<String> {
        match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(time) => Ok(time),
            Err(_) => self.field("Timestamp").map(str::to_string),
        }
    }
}

/// What every part of the package is made with.
struct Maker<'a> {
    tree: Tree<'a>,
    /// The folder that stands for the root.
    whole: PathBuf,
    natives: &'a Natives,
}

impl Maker<'_> {
    fn changelog(&self) -> Result<Changelog> {
        let said =
            self.tree.capture("dpkg-parsechangelog", &self.tree.paths.root, &["-lpackaging/changelog"])?;
        let fields = said.lines().filter_map(|line| line.split_once(": "));
        Ok(Changelog(fields.map(|(name, value)| (name.to_string(), value.to_string())).collect()))
    }

    /// Makes the folder DEBIAN.
    fn control(&self, changelog: &Changelog) -> Result<()> {
        let tree = &self.whole;
        let folder = tree.join("DEBIAN");
        let files = files(tree)?;
        let mut names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        names.sort();
        let sums = self.tree.capture("md5sum", tree, &[&["--"], names.as_slice()].concat())?;
        put(&folder.join("md5sums"), sums.as_bytes())?;
        for script in SCRIPTS {
            let text = String::from_utf8(self.tree.read(&format!("packaging/{script}"))?)?;
            put(&folder.join(script), text.replace("@VERSION@", VERSION).as_bytes())?;
            set_mode(&folder.join(script), 0o755)?;
        }
        // For packages of programs that link the library; and the loader learns of it.
        let interface =
            install::interface(&String::from_utf8(self.tree.read("c-api/libpushgate.map")?)?)?.to_string();
        put(&folder.join("shlibs"), format!("libpushgate {interface} pushgate (>= {VERSION})\n").as_bytes())?;
        put(&folder.join("triggers"), b"activate-noawait ldconfig\n")?;
        let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
        let control = format!(
            "Package: pushgate\n\
             Version: {VERSION}\n\
             Architecture: {}\n\
             Maintainer: {}\n\
             Installed-Size: {}\n\
             Depends: {}, adduser, dkms, kmod, udev\n\
             Suggests: libibverbs1\n\
             Section: net\n\
             Priority: optional\n\
             Description: GPU-initiated networking that pushes\n \
             Kernels on a GPU store their payload into a window, and a proxy releases each\n \
             message to a queue pair once nothing can stop it.\n \
             .\n \
             This package has the command, the NCCL plugin, the NIXL backend, the library for\n \
             programs in C, the headers for device code, and the kernel module as sources for\n \
             dkms: a PCI function's BAR, and kernel pages that outlive a process, as windows.\n \
             Members of the group pushgate may use them.\n",
            self.natives.arch.debian(),
            changelog.field("Maintainer")?,
            bytes.div_ceil(1024),
            self.libraries(tree)?,
        );
        put(&folder.join("control"), control.as_bytes())
    }

    /// The packages of the libraries that the command and the C library link.
    fn libraries(&self, tree: &Path) -> Result<String> {
        // The program must run where a source package lies.
        let stub = self.tree.out.join("stub");
        let arch = self.natives.arch;
        let control = format!("Source: pushgate\n\nPackage: pushgate\nArchitecture: {}\n", arch.debian());
        put(&stub.join("debian/control"), control.as_bytes())?;
        let program = tree.join("usr/bin/pushgate").display().to_string();
        let libraries = tree.join("usr").join(arch.libdir());
        let library = libraries.join("libpushgate.so").display().to_string();
        let plugin = libraries.join("libnccl-net-pushgate.so").display().to_string();
        let nixl = libraries.join("pushgate/nixl/libplugin_PUSHGATE.so").display().to_string();
        let local = stub.join("debian/shlibs.local");
        let _ = fs::remove_file(&local);
        let mut command = match &self.natives.cross {
            None => process::command("dpkg-shlibdeps", &stub),
            // dpkg knows no package of another architecture: these libraries are the ones that portable programs may need.
            Some(cross) => {
                let of_glibc = GLIBC_LIBRARIES.map(|library| format!("{library} libc6 (>= {GLIBC})\n"));
                fs::write(&local, of_glibc.concat() + &format!("libstdc++ 6 libstdc++6 (>= {LIBSTDCXX})\n"))?;
                let mut command = cross.tools.command("dpkg-shlibdeps", &stub);
                command
                    .env("DEB_HOST_ARCH", arch.debian())
                    .arg(format!("-l{}", cross.tools.libraries().display()));
                command
            }
        };
        command.args(["-O", &program, &library, &plugin, &nixl]);
        let said = process::capture(command, false, self.tree.guard)?;
        let depends = said.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
        Ok(depends.context("dpkg-shlibdeps names no library of the command")?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changelog_without_a_field_is_named() {
        let error = Changelog(BTreeMap::new()).field("Maintainer").unwrap_err().to_string();
        assert!(error.contains("Maintainer"), "{error}");
    }
}
