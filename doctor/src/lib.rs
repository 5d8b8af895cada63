//! What is wrong with a host for RDMA and GPUs: `pushgate doctor`.
//!
//! Two halves. [`read`](mod@read) looks (files, netlink, libibverbs, NCCL) and gives [`Readings`],
//! plain data. A [`Check`] is a function of those alone and gives [`Finding`]s: passed, warned,
//! failed or not applicable, with what was read and what to do. docs/doctor.md describes each.
//!
//! [`archive`] packs what was read, so that the checks can be run elsewhere.
//!
//! Nothing here needs root; what only root may read is said to be so.

pub mod answers;
pub mod archive;
pub mod checks;
pub mod finding;
pub mod read;
pub mod readings;
mod stand_ins;

pub use checks::{CHECKS, Check, Part};
pub use finding::{Finding, Report, Status};
pub use read::Roots;
pub use readings::{HugePages, QueuePairs, Readings, Wants, Window};

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
    judge(checks, &look(checks, roots, wants))
}

/// Looks at what the checks need.
pub fn look(checks: &[&Check], roots: &Roots, wants: Wants) -> Readings {
    let parts: Vec<Part> = checks.iter().flat_map(|check| check.parts).copied().collect();
    read::read(roots, wants, &parts)
}

/// Runs checks over what was read.
pub fn judge(checks: &[&Check], readings: &Readings) -> Report {
    // A tree of files kept of a host reads as on that host.
    let inside = format!("{}/", readings.root);
    let outside = |text: String| if readings.root.is_empty() { text } else { text.replace(&inside, "/") };
    let findings = checks.iter().flat_map(|check| {
        (check.run)(readings).into_iter().map(|finding| Finding {
            check: check.name,
            subject: outside(finding.subject),
            reading: outside(finding.reading),
            remedy: finding.remedy.map(outside),
            ..finding
        })
    });
    let looked_at_rdma = checks.iter().any(|check| check.parts.contains(&Part::Rdma));
    Report {
        queue_pair: readings.wants.qp.name(),
        looked_for: looked_for(readings, looked_at_rdma),
        ..Report::new(findings.collect())
    }
}

/// What was looked for, and how to look for RDMA where nobody asked for it.
fn looked_for(readings: &Readings, looked_at_rdma: bool) -> String {
    let wants = &readings.wants;
    match (&wants.devices[..], wants.verbs) {
        ([device], true) => {
            format!("Looked for what queue pairs of the kind verbs (RDMA) need, on the device {device}.")
        }
        ([_, _, ..], true) => format!(
            "Looked for what queue pairs of the kind verbs (RDMA) need, on the devices {}.",
            wants.devices.join(", ")
        ),
        ([], true) => "Looked for what queue pairs of the kind verbs (RDMA) need, on any device.".into(),
        (_, false) => {
            let devices = match readings.rdma.is() {
                _ if !looked_at_rdma => "",
                Some(devices) if !devices.is_empty() => "",
                _ => " This host has no RDMA device.",
            };
            let kinds = match wants.qp {
                QueuePairs::Local => "of the kind local need, which join ranks of one host",
                QueuePairs::Tcp => "of the kind tcp need, which join ranks of any hosts",
                _ => "of the kinds local and tcp need: local joins ranks of one host, tcp those of several",
            };
            format!(
                "Looked for what queue pairs {kinds}.{devices} `pushgate doctor --qp verbs` asks for RDMA."
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_rdma_is_told_what_was_looked_for_and_how_to_ask_for_rdma() {
        let said = |readings: &Readings| judge(&CHECKS.iter().collect::<Vec<_>>(), readings);
        let mut readings = Readings::default();
        let report = said(&readings);
        assert_eq!(report.queue_pair, "auto");
        assert_eq!(
            report.looked_for,
            "Looked for what queue pairs of the kinds local and tcp need: local joins ranks of one host, tcp those of \
             several. This host has no RDMA device. `pushgate doctor --qp verbs` asks for RDMA."
        );
        let text = report.text();
        assert_eq!(text.lines().rev().nth(1), Some(&*report.looked_for), "{text}");
        // Checks that look at no RDMA device know of none.
        let module = judge(&named(&["module".into()]).unwrap(), &readings);
        assert!(!module.looked_for.contains("has no RDMA"), "{}", module.looked_for);
        for (qp, says) in [
            (QueuePairs::Tcp, "of the kind tcp need, which join ranks of any hosts."),
            (QueuePairs::Local, "of the kind local need, which join ranks of one host."),
        ] {
            readings.wants.qp = qp;
            let report = said(&readings);
            assert!(
                report.queue_pair == qp.name() && report.looked_for.contains(says),
                "{}",
                report.looked_for
            );
        }
        (readings.wants.verbs, readings.wants.qp) = (true, QueuePairs::Verbs);
        let report = said(&readings);
        assert_eq!((report.queue_pair, report.failed), ("verbs", 1));
        assert_eq!(
            report.looked_for,
            "Looked for what queue pairs of the kind verbs (RDMA) need, on any device."
        );
    }
}
