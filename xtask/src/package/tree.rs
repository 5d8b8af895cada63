//! The files of a package, below a folder that stands for the prefix.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::VERSION;
use super::natives::Natives;
use crate::files::put;
use crate::install;
use crate::paths::Paths;
use crate::process::{self, Redirect};
use crate::progress::Guard;
use crate::system::Need;

/// What laying out a tree needs.
pub const NEEDS: &[Need] = &[Need::Strip, Need::Python, Need::Manual];

/// Files that are packaged unchanged: where they lie in the repository, and where below the prefix.
const FILES: &[(&str, &str)] = &[
    ("driver-shim/include/uapi/pushgate.h", "include/uapi/pushgate.h"),
    ("packaging/60-pushgate.rules", "lib/udev/rules.d/60-pushgate.rules"),
    ("packaging/grafana-dashboard.json", "share/doc/pushgate/examples/grafana-dashboard.json"),
    ("packaging/copyright", "share/doc/pushgate/copyright"),
    ("README.md", "share/doc/pushgate/README.md"),
    ("examples/README.md", "share/doc/pushgate/examples/README.md"),
];

/// Folders whose files that git knows are packaged unchanged.
const FOLDERS: &[(&str, &str)] = &[
    ("docs", "share/doc/pushgate/docs"),
    ("examples/c", "share/doc/pushgate/examples/c"),
    ("examples/cuda", "share/doc/pushgate/examples/cuda"),
    ("examples/halo", "share/doc/pushgate/examples/halo"),
    ("examples/mpi", "share/doc/pushgate/examples/mpi"),
    ("examples/nccl-device", "share/doc/pushgate/examples/nccl-device"),
    ("examples/nixl", "share/doc/pushgate/examples/nixl"),
    ("examples/pytorch", "share/doc/pushgate/examples/pytorch"),
];

/// Units of systemd, for users and for the system alike: `packaging/` has those for users, `packaging/system/` the others.
const UNITS: [&str; 2] = ["pushgate-proxy.service", "pushgate-proxy.socket"];

/// Folder of systemd's units for the system, below every prefix in which systemd looks.
const SYSTEM_UNITS: &str = "lib/systemd/system";

/// Where things lie that each distribution puts elsewhere, below the prefix.
pub struct Layout<'a> {
    /// Folder of libraries.
    pub libdir: &'a str,
    /// Folder of systemd's units for users.
    pub units: &'static str,
    /// Folder of zsh's completions.
    pub zsh: &'static str,
    /// Where programs will find the prefix; None: the prefix may be moved.
    pub prefix: Option<&'static str>,
}

/// What every part of a tree is made with.
pub struct Tree<'a> {
    pub paths: &'a Paths,
    /// A folder for what is made on the way.
    pub out: PathBuf,
    /// The folder that is filled: it stands for the prefix.
    pub root: PathBuf,
    pub guard: Guard,
}

impl Tree<'_> {
    /// Puts all files in. The folder is emptied before: files of an earlier version must not be packaged.
    pub fn fill(&self, layout: &Layout, natives: &Natives) -> Result<()> {
        let root = &self.root;
        if root.exists() {
            fs::remove_dir_all(root).with_context(|| format!("cannot remove {}", root.display()))?;
        }
        for (from, to) in FILES {
            put(&root.join(to), &self.read(from)?)?;
        }
        for (from, to) in FOLDERS {
            self.folder(from, to)?;
        }
        for unit in UNITS {
            put(&root.join(layout.units).join(unit), &self.read(&format!("packaging/{unit}"))?)?;
            put(&root.join(SYSTEM_UNITS).join(unit), &self.read(&format!("packaging/system/{unit}"))?)?;
        }
        self.module(&root.join(format!("src/pushgate-{VERSION}")))?;
        self.c_library(layout, natives)?;
        put(&root.join(layout.libdir).join("libnccl-net-pushgate.so"), &fs::read(&natives.plugin)?)?;
        let nixl = root.join(layout.libdir).join("pushgate/nixl/libplugin_PUSHGATE.so");
        put(&nixl, &fs::read(&natives.nixl)?)?;
        self.packed("share/doc/pushgate/changelog.gz", &self.read("packaging/changelog")?)?;
        self.packed("share/man/man4/pushgate.4.gz", &self.manual()?)?;
        let command = root.join("bin/pushgate");
        put(&command, &[])?;
        fs::copy(&natives.command, &command)?;
        set_mode(&command, 0o755)?;
        self.pages(natives, layout)
    }

    /// What a program writes to stdout.
    pub fn capture(&self, program: &str, dir: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = process::command(program, dir);
        command.args(arguments);
        process::capture(command, false, self.guard)
    }

    /// A file of the repository.
    pub fn read(&self, file: &str) -> Result<Vec<u8>> {
        fs::read(self.paths.root.join(file)).with_context(|| format!("cannot read {file}"))
    }

    /// Puts in the files of a folder of the repository that git knows.
    fn folder(&self, from: &str, to: &str) -> Result<()> {
        let listed = self.capture("git", &self.paths.root, &["ls-files", "-z", "--", from])?;
        let mut count = 0;
        for file in listed.split('\0').filter(|file| !file.is_empty()) {
            let below = Path::new(file).strip_prefix(from)?;
            put(&self.root.join(to).join(below), &self.read(file)?)?;
            count += 1;
        }
        ensure!(count > 0, "git knows no file in {from}");
        Ok(())
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
    fn c_library(&self, layout: &Layout, natives: &Natives) -> Result<()> {
        let target = match layout.prefix {
            // The folder stands for the prefix, so without the prefix it stands for the root.
            Some(prefix) => install::Target {
                prefix: prefix.into(),
                destdir: Some(outer(&self.root, prefix)?),
                libdir: layout.libdir.into(),
                is_movable: false,
            },
            None => install::Target {
                prefix: self.root.clone(),
                destdir: None,
                libdir: layout.libdir.into(),
                is_movable: true,
            },
        };
        install::put_files(self.paths, &target, &natives.library)?;
        let pages = self.root.join("share/man/man3");
        for (name, _) in files(&pages)? {
            let page = pages.join(&name);
            self.packed(&format!("share/man/man3/{name}.gz"), &fs::read(&page)?)?;
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

    /// What the command itself makes: pushgate(1) with a page for each subcommand, and completions for shells.
    fn pages(&self, natives: &Natives, layout: &Layout) -> Result<()> {
        let pages = self.out.join("man1");
        // A subcommand that is no more must not come along.
        if pages.exists() {
            fs::remove_dir_all(&pages).with_context(|| format!("cannot remove {}", pages.display()))?;
        }
        fs::create_dir_all(&pages)?;
        let said = |dir: &Path, arguments: &[&str]| {
            let mut command = natives.run(dir);
            command.args(arguments);
            process::capture(command, false, self.guard)
        };
        said(&pages, &["manual", "--folder", "."])?;
        for (name, _) in files(&pages)? {
            self.packed(&format!("share/man/man1/{name}.gz"), &fs::read(pages.join(&name))?)?;
        }
        for (shell, file) in [
            ("bash", "share/bash-completion/completions/pushgate"),
            ("fish", "share/fish/vendor_completions.d/pushgate.fish"),
            ("zsh", &format!("{}/_pushgate", layout.zsh)),
        ] {
            let text = said(&self.out, &["completions", shell])?;
            put(&self.root.join(file), text.as_bytes())?;
        }
        Ok(())
    }

    /// Compresses as Debian wants it: at the best level, without name and time.
    fn packed(&self, to: &str, content: &[u8]) -> Result<()> {
        let plain = self.out.join("plain");
        fs::write(&plain, content)?;
        let to = self.root.join(to);
        put(&to, &[])?;
        let mut gzip = process::command("gzip", &self.out);
        gzip.args(["-9nc"]).arg(&plain);
        let to = Redirect { stdout: Some(fs::File::create(to)?), ..Redirect::default() };
        process::run_redirected(gzip, to, self.guard)
    }
}

/// The folder that stands for the root, where `tree` stands for the prefix.
fn outer(tree: &Path, prefix: &str) -> Result<PathBuf> {
    let depth = Path::new(prefix).components().count() - 1;
    let outer = tree.ancestors().nth(depth).filter(|outer| outer.join(&prefix[1..]) == tree);
    Ok(outer.with_context(|| format!("{} does not end with {prefix}", tree.display()))?.to_path_buf())
}

fn is_module_source(name: &str) -> bool {
    let is_code = (name.ends_with(".c") && !name.ends_with(".mod.c")) || name.ends_with(".h");
    is_code || ["Kbuild", "Makefile", "dkms.conf"].contains(&name)
}

/// Sets a file's mode.
pub fn set_mode(file: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(file, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// All files below a folder that are no links, as paths within it, with their lengths.
pub fn files(tree: &Path) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    walk(tree, &mut |name, entry| {
        if !entry.file_type()?.is_symlink() {
            found.push((name, entry.metadata()?.len()));
        }
        Ok(())
    })?;
    Ok(found)
}

/// All links below a folder, as paths within it, with what they name.
pub fn links(tree: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    walk(tree, &mut |name, entry| {
        if entry.file_type()?.is_symlink() {
            found.push((name, fs::read_link(entry.path())?));
        }
        Ok(())
    })?;
    Ok(found)
}

/// Shows everything below a folder that is no folder.
fn walk(tree: &Path, show: &mut dyn FnMut(String, &fs::DirEntry) -> Result<()>) -> Result<()> {
    let mut folders = vec![tree.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                show(entry.path().strip_prefix(tree)?.to_string_lossy().into_owned(), &entry)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_build_leaves_is_no_source() {
        assert!(["main.c", "compat.h", "Kbuild", "dkms.conf"].into_iter().all(is_module_source));
        assert!(
            !["pushgate.mod.c", "main.o", "pushgate.ko", "Module.symvers"].into_iter().any(is_module_source)
        );
    }

    #[test]
    fn the_folder_of_the_root_is_found_after_the_prefix() {
        assert_eq!(outer(Path::new("/t/tree/usr"), "/usr").unwrap(), Path::new("/t/tree"));
        assert_eq!(outer(Path::new("/t/opt/x"), "/opt/x").unwrap(), Path::new("/t"));
        outer(Path::new("/t/tree"), "/usr").unwrap_err();
    }
}
