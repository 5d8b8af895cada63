//! What is wrong with a host for RDMA and GPUs: `pushgate doctor`.
//!
//! Two halves. [`read`](mod@read) looks (files, netlink, libibverbs, NCCL) and gives [`Readings`],
//! plain data. A [`Check`] is a function of those alone and gives [`Finding`]s: passed, warned,
//! failed or not applicable, with what was read and what to do. docs/doctor.md describes each.
//!
//! Nothing here needs root; what only root may read is said to be so.

pub mod checks;
pub mod finding;
pub mod read;
pub mod readings;

pub use checks::{CHECKS, Check, Part};
pub use finding::{Finding, Report, Status};
pub use read::Roots;
pub use readings::{HugePages, Readings, Wants, Window};

/// The checks of these names, all if there are none. An unknown one is a sentence.
pub fn named(names: &[String]) -> Result<Vec<&'static Check>, String> {
    if let Some(unknown) = names.iter().find(|name| CHECKS.iter().all(|check| check.name != **name)) {
        let known: Vec<_> = CHECKS.iter().map(|check| check.name).collect();
        return Err(format!("there is no check {unknown}; there are {}", known.join(", ")));
    }
    let is_named = |check: &&Check| names.is_empty() || names.iter().any(|name| name == check.name);
    Ok(CHECKS.iter().filter(is_named).collect())
}

/// Looks at what the checks need, and runs them.
pub fn run(checks: &[&Check], roots: &Roots, wants: Wants) -> Report {
    let parts: Vec<Part> = checks.iter().flat_map(|check| check.parts).copied().collect();
    judge(checks, &read::read(roots, wants, &parts))
}

/// Runs checks over what was read.
pub fn judge(checks: &[&Check], readings: &Readings) -> Report {
    let findings = checks.iter().flat_map(|check| {
        (check.run)(readings).into_iter().map(|finding| Finding { check: check.name, ..finding })
    });
    Report::new(findings.collect())
}
