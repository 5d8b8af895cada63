//! What the integration suites share.

pub mod nccl;
mod patience;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub use patience::{hang, patience, patience_factor, wait_until};

/// The command `pushgate`, built with the calling test's profile: no test's package builds it.
pub fn pushgate() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let this = std::env::current_exe().unwrap();
        let profile = this.parent().and_then(Path::parent).expect("…/PROFILE/deps/this");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root).args(["build", "--package", "pushgate", "--bin", "pushgate"]);
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let built = cargo.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        profile.join("pushgate")
    })
}

/// Says that a test did not run, and why: on standard output and, if
/// `PUSHGATE_SKIP_LOG` names a file, as a line appended to it, so that whoever
/// ran the suites can list what this machine lacked.
pub fn skip(reason: &str) {
    let line = format!("SKIPPED: {reason}\n");
    print!("{line}");
    if let Some(path) = std::env::var_os("PUSHGATE_SKIP_LOG").filter(|path| !path.is_empty()) {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut log| log.write_all(line.as_bytes()))
            .unwrap_or_else(|e| panic!("PUSHGATE_SKIP_LOG: {}: {e}", path.display()));
    }
}
