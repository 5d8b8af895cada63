//! The archive: files with scripts that install them below any prefix and remove them, and a Containerfile.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::natives::Natives;
use super::tree::{self, Layout, Tree, files, set_mode};
use super::{VERSION, epoch};
use crate::files::put;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// Places that serve /usr/local and a folder in a home alike.
const LAYOUT: Layout<'static> =
    Layout { libdir: "lib", units: "share/systemd/user", zsh: "share/zsh/site-functions", prefix: None };

/// Makes the archive; returns its path.
pub fn build(paths: &Paths, natives: &Natives, guard: Guard) -> Result<PathBuf> {
    let out = paths.scratch("package")?;
    let name = format!("pushgate-{VERSION}-{}-linux", natives.arch.name());
    let whole = out.join(&name);
    if whole.exists() {
        fs::remove_dir_all(&whole).with_context(|| format!("cannot remove {}", whole.display()))?;
    }
    let tree = Tree { paths, out: out.clone(), root: whole.join("files"), guard };
    tree.fill(&LAYOUT, natives)?;
    for (file, mode) in [("install.sh", 0o755), ("uninstall.sh", 0o755), ("Containerfile", 0o644)] {
        let text = String::from_utf8(tree.read(&format!("packaging/archive/{file}"))?)?;
        let text = [
            ("@VERSION@", VERSION),
            ("@MACHINE@", natives.arch.name()),
            ("@ARCHITECTURE@", natives.arch.spoken()),
        ]
        .iter()
        .fold(text, |text, (name, value)| text.replace(name, value));
        put(&whole.join(file), text.as_bytes())?;
        set_mode(&whole.join(file), mode)?;
    }
    fs::write(whole.join("MANIFEST"), manifest(&tree)?)?;
    let archive = out.join(format!("{name}.tar.gz"));
    let mut tar = process::command("tar", &out);
    // Makes two builds of the same sources alike.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.arg(format!("--mtime=@{}", epoch(paths, guard)?)).args(["-I", "gzip -9n", "-cf"]);
    tar.arg(&archive).arg(&name);
    process::run(tar, guard)?;
    Ok(archive)
}

/// What install.sh puts where: a line for each file, with its SHA-256, and for each link, with what the link names.
fn manifest(tree: &Tree) -> Result<String> {
    let mut names: Vec<_> = files(&tree.root)?.into_iter().map(|(name, _)| name).collect();
    names.sort();
    // install.sh reads words.
    let odd = names.iter().find(|name| name.contains(char::is_whitespace) || name.contains('\\'));
    ensure!(odd.is_none(), "the archive has a file with a space in its name: {odd:?}");
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let sums = tree.capture("sha256sum", &tree.root, &[&["--"], names.as_slice()].concat())?;
    let mut text = String::new();
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").context("sha256sum prints another form")?;
        writeln!(text, "f {sum} {name}")?;
    }
    for (link, to) in tree::links(&tree.root)? {
        writeln!(text, "l {} {}", to.display(), Path::new(&link).display())?;
    }
    Ok(text)
}
