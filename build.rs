//! Tells the crate its version with the commit that it is built from, as `_PUSHGATE_VERSION`.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let mut version = std::env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    if let Some((commit, files)) = commit(Path::new(&folder)) {
        version += &format!(" (commit {commit})");
        files.iter().for_each(|file| println!("cargo::rerun-if-changed={}", file.display()));
    }
    println!("cargo::rustc-env=_PUSHGATE_VERSION={version}");
}

/// The commit that is checked out in a folder, and the files that change with it.
///
/// The folder must be the top folder of its repository: an unpacked archive has no commit, even where it lies in a
/// folder of some other repository.
pub fn commit(folder: &Path) -> Option<(String, Vec<PathBuf>)> {
    let top = git(folder, &["rev-parse", "--show-toplevel"])?;
    if std::fs::canonicalize(top).ok()? != std::fs::canonicalize(folder).ok()? {
        return None;
    }
    let commit = git(folder, &["rev-parse", "--short=12", "HEAD"])?;
    let branch = git(folder, &["symbolic-ref", "--quiet", "HEAD"]);
    let names = ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref());
    let files = names.filter_map(|name| Some(folder.join(git(folder, &["rev-parse", "--git-path", name])?)));
    // Cargo takes a file that is not there for one that has changed.
    Some((commit, files.filter(|file| file.exists()).collect()))
}

/// What git says in a folder, if git is there and succeeds.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // A hook of another repository has its own in the environment.
    command.args(arguments).current_dir(folder).env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    let output = command.output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !said.is_empty()).then_some(said)
}
