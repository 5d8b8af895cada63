//! Code that the integration suites share.

pub mod built;
mod ended;
pub mod fuse;
pub mod fuzz;
pub mod lingering;
pub mod namespaces;
pub mod nccl;
mod patience;
pub mod rma;
pub mod users;

use std::io::Write;
use std::time::Duration;

pub use built::pushgate;
pub use ended::output;
pub use patience::{Pause, hang, patience, patience_factor, wait_until};

/// The numbers of a process's children, whichever of its threads started them.
pub fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let all: Vec<String> = tasks.map(of).collect();
    all.iter()
        .flat_map(|text| text.split_whitespace())
        .map(|child| child.parse().expect("a number"))
        .collect()
}

/// The CPU time that a process has used, or 0 if there is none.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let mut fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().skip(11);
    let mut ticks = || fields.next().and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0);
    // Ticks are hundredths of a second.
    Duration::from_millis(10 * (ticks() + ticks()))
}

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
