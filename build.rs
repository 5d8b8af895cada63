//! Tells the library and the command their version with the commit that they are built from, as `_PUSHGATE_VERSION`.

use std::path::Path;
use std::process::Command;

/// What the library and the command are made of, in the repository's top folder.
const SOURCES: [&str; 11] = [
    "build.rs",
    "Cargo.toml",
    "Cargo.lock",
    COMMAND,
    "src",
    "doctor",
    "driver-shim",
    "gpu-kernels",
    "pcie-model",
    "proxy",
    "topology",
];

/// The command's folder. The library is not compiled anew for a change there.
const COMMAND: &str = "cli";

fn main() {
    let variable = |name| std::env::var(name).expect("cargo sets it");
    let (mut version, folder) = (variable("CARGO_PKG_VERSION"), variable("CARGO_MANIFEST_DIR"));
    let folder = Path::new(&folder);
    let of_the_command = folder.ends_with(COMMAND);
    let top = if of_the_command { folder.parent().expect("it lies in the repository") } else { folder };
    // When one of these changes all is compiled anew anyway. A commit alone changes nothing that is compiled, and
    // is not waited for.
    for source in SOURCES.iter().filter(|source| of_the_command || **source != COMMAND) {
        println!("cargo::rerun-if-changed={}", top.join(source).display());
    }
    if let Some(commit) = commit(top) {
        version += &format!(" (commit {commit})");
    }
    println!("cargo::rustc-env=_PUSHGATE_VERSION={version}");
}

/// The commit that is checked out in a folder, and a word about sources that were changed since.
///
/// The folder must be the top folder of its repository: an unpacked archive has no commit, even where it lies in a
/// folder of some other repository.
pub fn commit(folder: &Path) -> Option<String> {
    let top = git(folder, &["rev-parse", "--show-toplevel"])?;
    if std::fs::canonicalize(top).ok()? != std::fs::canonicalize(folder).ok()? {
        return None;
    }
    let commit = git(folder, &["rev-parse", "--short=12", "HEAD"])?;
    let status = [&["--no-optional-locks", "status", "--porcelain", "--"][..], &SOURCES].concat();
    Some(if git(folder, &status)?.is_empty() { commit } else { format!("{commit}, changed") })
}

/// What git says in a folder, if git is there and succeeds.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // A hook of another repository has its own in the environment.
    command.args(arguments).current_dir(folder).env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}
