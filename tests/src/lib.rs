//! Code that the integration suites share.

pub mod built;
pub mod nccl;
mod patience;

use std::io::Write;

pub use built::pushgate;
pub use patience::{Pause, hang, patience, patience_factor, wait_until};

/// Reports that a test did not run, and why: on standard output and, if `PUSHGATE_SKIP_LOG` names a
/// file, as a line appended to that file, so that a runner can list what this machine lacked.
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
