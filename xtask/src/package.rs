//! The Debian package: the command, the C library, headers and manual, and the kernel module's sources for dkms.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::Mode;

use crate::files::put;
use crate::install;
use crate::paths::Paths;
use crate::process::{self, Redirect};
use crate::programs;
use crate::progress::Guard;
use crate::system::{self, Need};

/// What making the package needs.
pub const NEEDS: &[Need] = &[Need::Cxx, Need::Packaging];

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Files that are packaged unchanged: where they lie in the repository, and where in the package.
const FILES: &[(&str, &str)] = &[
    ("driver-shim/include/uapi/pushgate.h", "usr/include/uapi/pushgate.h"),
    ("packaging/60-pushgate.rules", "usr/lib/udev/rules.d/60-pushgate.rules"),
    ("packaging/pushgate-proxy.service", "usr/lib/systemd/user/pushgate-proxy.service"),
    ("packaging/pushgate-proxy.socket", "usr/lib/systemd/user/pushgate-proxy.socket"),
    ("packaging/copyright", "usr/share/doc/pushgate/copyright"),
    ("examples/c/put.c", "usr/share/doc/pushgate/examples/put.c"),
    ("examples/c/put.cu", "usr/share/doc/pushgate/examples/put.cu"),
    ("examples/c/CMakeLists.txt", "usr/share/doc/pushgate/examples/CMakeLists.txt"),
];

/// Debian's folder of libraries, below /usr.
const LIBDIR: &str = "lib/x86_64-linux-gnu";

/// Shells, and where each looks for the completions that packages bring.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/pushgate"),
    ("fish", "usr/share/fish/vendor_completions.d/pushgate.fish"),
    ("zsh", "usr/share/zsh/vendor-completions/_pushgate"),
];

/// Scripts that dpkg runs; `@VERSION@` is replaced in them.
const SCRIPTS: &[&str] = &["postinst", "prerm", "postrm"];

/// Makes the package; returns its path.
pub fn build(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    if let Some(reason) = system::unmet(NEEDS) {
        bail!("the package {reason}");
    }
    ensure!(
        cfg!(target_arch = "x86_64"),
        "the package is made for amd64 alone, and this is {}: make it on an x86-64 host",
        std::env::consts::ARCH
    );
    // Whatever the caller's umask is, everybody may read what is installed.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let maker = Maker { paths, out: paths.scratch("package")?, guard };
    let changelog = maker.changelog()?;
    check_versions(paths, &changelog)?;
    let tree = maker.out.join("tree");
    // Files of an earlier version must not be packaged.
    if tree.exists() {
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))?;
    }
    maker.fill(&tree)?;
    maker.control(&tree, &changelog)?;
    let package = maker.out.join(format!("pushgate_{VERSION}_amd64.deb"));
    let mut command = process::command("dpkg-deb", &maker.out);
    // Makes two builds of the same sources alike: no owner and no time of this build.
    command.env("SOURCE_DATE_EPOCH", changelog.time()?);
    command.args(["--root-owner-group", "-Zxz", "--build"]).arg(&tree).arg(&package);
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

/// Checks that each place that states the version states the same.
fn check_versions(paths: &Paths, changelog: &Changelog) -> Result<()> {
    let stated = |file: &str, before: &str| -> Result<String> {
        let text =
            fs::read_to_string(paths.root.join(file)).with_context(|| format!("cannot read {file}"))?;
        let found = text.lines().find_map(|line| line.strip_prefix(before)?.split('"').next());
        Ok(found.with_context(|| format!("{file} has no line that begins with {before}"))?.into())
    };
    let places = [
        ("packaging/changelog", changelog.field("Version")?.to_string()),
        ("driver-shim/kmod/dkms.conf", stated("driver-shim/kmod/dkms.conf", "PACKAGE_VERSION=\"")?),
        ("driver-shim/kmod/main.c", stated("driver-shim/kmod/main.c", "MODULE_VERSION(\"")?),
    ];
    for (place, version) in places {
        ensure!(
            version == VERSION,
            "{place} is of version {version}, Cargo.toml of {VERSION}: make them one"
        );
    }
    Ok(())
}

/// What every part of the package is made with.
struct Maker<'a> {
    paths: &'a Paths,
    out: PathBuf,
    guard: Guard,
}

impl Maker<'_> {
    fn capture(&self, program: &str, dir: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = process::command(program, dir);
        command.args(arguments);
        process::capture(command, false, self.guard)
    }

    fn changelog(&self) -> Result<Changelog> {
        let said = self.capture("dpkg-parsechangelog", &self.paths.root, &["-lpackaging/changelog"])?;
        let fields = said.lines().filter_map(|line| line.split_once(": "));
        Ok(Changelog(fields.map(|(name, value)| (name.to_string(), value.to_string())).collect()))
    }

    /// Puts in all files except those for dpkg itself.
    fn fill(&self, tree: &Path) -> Result<()> {
        for (from, to) in FILES {
            put(&tree.join(to), &self.read(from)?)?;
        }
        self.module(&tree.join(format!("usr/src/pushgate-{VERSION}")))?;
        self.c_library(tree)?;
        self.packed(&tree.join("usr/share/doc/pushgate/changelog.gz"), &self.read("packaging/changelog")?)?;
        self.packed(&tree.join("usr/share/man/man4/pushgate.4.gz"), &self.manual()?)?;
        let built = self.command(&tree.join("usr/bin/pushgate"))?;
        self.pages(&built, tree)
    }

    fn read(&self, file: &str) -> Result<Vec<u8>> {
        fs::read(self.paths.root.join(file)).with_context(|| format!("cannot read {file}"))
    }

    /// Puts in what dkms builds, without the tests' importer and without what a build beside the
    /// sources has left.
    fn module(&self, folder: &Path) -> Result<()> {
        let kmod = self.paths.root.join("driver-shim/kmod");
        for entry in fs::read_dir(&kmod).with_context(|| format!("cannot read {}", kmod.display()))? {
            let entry = entry?;
            let name = entry.file_name();
            if is_module_source(&name.to_string_lossy()) {
                put(&folder.join(&name), &fs::read(entry.path())?)?;
            }
        }
        put(&folder.join("include/uapi/pushgate.h"), &self.read("driver-shim/include/uapi/pushgate.h")?)
    }

    /// Puts in the C library with its headers, its manual, and what pkg-config and CMake look for.
    fn c_library(&self, tree: &Path) -> Result<()> {
        let target = install::Target {
            prefix: "/usr".into(),
            destdir: Some(tree.to_path_buf()),
            libdir: LIBDIR.into(),
        };
        install::run(self.paths, &target, self.guard)?;
        let pages = tree.join("usr/share/man/man3");
        for (name, _) in files(&pages)? {
            let page = pages.join(&name);
            self.packed(&pages.join(format!("{name}.gz")), &fs::read(&page)?)?;
            fs::remove_file(&page)?;
        }
        Ok(())
    }

    /// Makes the page of section 4. Its first heading is omitted, because the page's header says
    /// the same.
    fn manual(&self) -> Result<Vec<u8>> {
        let text = String::from_utf8(self.read("docs/pushgate.4.md")?)?;
        let body = text.strip_prefix("# pushgate(4)\n").context("docs/pushgate.4.md has another heading")?;
        let source = self.out.join("pushgate.4.md");
        fs::write(&source, body.replace("\n## ", "\n# ").replace("\n### ", "\n## "))?;
        // Names like PUSHGATE_IOC_INFO have underscores that emphasise nothing.
        let how = ["-s", "-Tman", "--parse-no-intraemph", "-Mtitle=PUSHGATE", "-Msection=4", "pushgate.4.md"];
        let roff = self.capture("lowdown", &self.out, &how)?;
        ensure!(roff.contains(".TH "), "lowdown has made no manual page of {}", source.display());
        // lowdown's layout of a table makes groff widen all columns alike; here only the last
        // column is widened.
        let roff = roff.replace("tab(|) expand allbox;", "tab(|) allbox;").replace(" l.\n", " lx.\n");
        // This line tells man that the page has tables.
        Ok(format!("'\\\" t\n{roff}").into_bytes())
    }

    /// Puts the command there; returns cargo's, with which it is the same but for symbols.
    fn command(&self, to: &Path) -> Result<PathBuf> {
        let arguments = ["build", "--package", "pushgate", "--bin", "pushgate"];
        let built = programs::build(self.paths, &arguments, &[], self.guard)?;
        let built = built.iter().find(|program| program.name == "pushgate");
        let built = built.context("cargo has not built the command pushgate")?.path.clone();
        fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
        let mut strip = process::command("strip", &self.out);
        strip.args(["--strip-all", "--remove-section=.comment", "-o"]).arg(to).arg(&built);
        process::run(strip, self.guard)?;
        set_mode(to, 0o755)?;
        Ok(built)
    }

    /// What the command itself makes: pushgate(1) with a page for each subcommand, and completions for shells.
    fn pages(&self, command: &Path, tree: &Path) -> Result<()> {
        let command = command.display().to_string();
        let pages = self.out.join("man1");
        // A subcommand that is no more must not come along.
        if pages.exists() {
            fs::remove_dir_all(&pages).with_context(|| format!("cannot remove {}", pages.display()))?;
        }
        fs::create_dir_all(&pages)?;
        self.capture(&command, &pages, &["manual", "--folder", "."])?;
        for (name, _) in files(&pages)? {
            self.packed(&tree.join(format!("usr/share/man/man1/{name}.gz")), &fs::read(pages.join(&name))?)?;
        }
        for (shell, file) in COMPLETIONS {
            put(&tree.join(file), self.capture(&command, &self.out, &["completions", shell])?.as_bytes())?;
        }
        Ok(())
    }

    /// Compresses as Debian wants it: at the best level, without name and time.
    fn packed(&self, to: &Path, content: &[u8]) -> Result<()> {
        let plain = self.out.join("plain");
        fs::write(&plain, content)?;
        put(to, &[])?;
        let mut gzip = process::command("gzip", &self.out);
        gzip.args(["-9nc"]).arg(&plain);
        let to = Redirect { stdout: Some(fs::File::create(to)?), ..Redirect::default() };
        process::run_redirected(gzip, to, self.guard)
    }

    /// Makes the folder DEBIAN.
    fn control(&self, tree: &Path, changelog: &Changelog) -> Result<()> {
        let folder = tree.join("DEBIAN");
        let files = files(tree)?;
        let mut names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        names.sort();
        let sums = self.capture("md5sum", tree, &[&["--"], names.as_slice()].concat())?;
        put(&folder.join("md5sums"), sums.as_bytes())?;
        for script in SCRIPTS {
            let text = String::from_utf8(self.read(&format!("packaging/{script}"))?)?;
            put(&folder.join(script), text.replace("@VERSION@", VERSION).as_bytes())?;
            set_mode(&folder.join(script), 0o755)?;
        }
        // For packages of programs that link the library; and the loader learns of it.
        let interface =
            install::interface(&String::from_utf8(self.read("c-api/libpushgate.map")?)?)?.to_string();
        put(&folder.join("shlibs"), format!("libpushgate {interface} pushgate (>= {VERSION})\n").as_bytes())?;
        put(&folder.join("triggers"), b"activate-noawait ldconfig\n")?;
        let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
        let control = format!(
            "Package: pushgate\n\
             Version: {VERSION}\n\
             Architecture: amd64\n\
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
             This package has the command, the library for programs in C, the headers for\n \
             device code, and the kernel module as sources for dkms: a PCI function's BAR,\n \
             and kernel pages that outlive a process, as windows. Members of the group\n \
             pushgate may use them.\n",
            changelog.field("Maintainer")?,
            bytes.div_ceil(1024),
            self.libraries(tree)?,
        );
        put(&folder.join("control"), control.as_bytes())
    }

    /// The packages of the libraries that the command and the C library link.
    fn libraries(&self, tree: &Path) -> Result<String> {
        // The program must run where a source package lies.
        let stub = self.out.join("stub");
        put(&stub.join("debian/control"), b"Source: pushgate\n\nPackage: pushgate\nArchitecture: amd64\n")?;
        let program = tree.join("usr/bin/pushgate").display().to_string();
        let library = tree.join("usr").join(LIBDIR).join("libpushgate.so").display().to_string();
        let said = self.capture("dpkg-shlibdeps", &stub, &["-O", &program, &library])?;
        let depends = said.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
        Ok(depends.context("dpkg-shlibdeps names no library of the command")?.into())
    }
}

fn is_module_source(name: &str) -> bool {
    let is_code = (name.ends_with(".c") && !name.ends_with(".mod.c")) || name.ends_with(".h");
    is_code || ["Kbuild", "Makefile", "dkms.conf"].contains(&name)
}

fn set_mode(file: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(file, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// All files below a folder that are no links, as paths within it, with their lengths.
fn files(tree: &Path) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    let mut folders = vec![tree.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
                continue;
            }
            if entry.file_type()?.is_symlink() {
                continue;
            }
            let name = entry.path().strip_prefix(tree)?.to_string_lossy().into_owned();
            found.push((name, entry.metadata()?.len()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_version(version: &str) -> Result<()> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
        let paths = Paths { target: root.join("target"), root };
        check_versions(&paths, &Changelog([("Version".to_string(), version.to_string())].into()))
    }

    #[test]
    fn all_places_state_the_same_version() {
        of_version(VERSION).unwrap();
        let error = of_version("99.0").unwrap_err().to_string();
        assert!(
            error.contains("packaging/changelog is of version 99.0") && error.contains(VERSION),
            "{error}"
        );
    }

    #[test]
    fn what_a_build_leaves_is_no_source() {
        assert!(["main.c", "compat.h", "Kbuild", "dkms.conf"].into_iter().all(is_module_source));
        assert!(
            !["pushgate.mod.c", "main.o", "pushgate.ko", "Module.symvers"].into_iter().any(is_module_source)
        );
    }

    #[test]
    fn a_changelog_without_a_field_is_named() {
        let error = Changelog(BTreeMap::new()).field("Maintainer").unwrap_err().to_string();
        assert!(error.contains("Maintainer"), "{error}");
    }
}
