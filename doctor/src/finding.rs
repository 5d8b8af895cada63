//! What a check found, and how it is shown.

use std::fmt::Write;

use pushgate_driver_shim::log::Foreign;
use serde::Serialize;

/// How a check ended. Ordered: the worse, the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The host has no such thing, or nothing in the settings needs it.
    NotApplicable,
    /// As it should be.
    Passed,
    /// It works, but slower, for some peers only, or by luck; or it can't be read.
    Warned,
    /// It does not work.
    Failed,
}

impl Status {
    /// The status as people read it.
    pub fn word(self) -> &'static str {
        match self {
            Status::NotApplicable => "n/a",
            Status::Passed => "passed",
            Status::Warned => "warned",
            Status::Failed => "failed",
        }
    }
}

/// What one check says of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's name.
    pub check: &'static str,
    /// What it is about: `rxe0/1`, an interface, a PCI function; empty for the host.
    pub subject: String,
    /// How it ended.
    pub status: Status,
    /// What was read, in a sentence.
    pub reading: String,
    /// What to do, in a sentence. There whenever the status is warned or failed.
    pub remedy: Option<String>,
}

impl Finding {
    fn new(subject: &str, status: Status, reading: String, remedy: Option<String>) -> Finding {
        Finding { check: "", subject: plain(subject), status, reading: plain(&reading), remedy }
    }

    /// Says that there is nothing to look at, and why.
    pub fn not_applicable(subject: &str, why: impl Into<String>) -> Finding {
        Finding::new(subject, Status::NotApplicable, why.into(), None)
    }

    /// Says that all is well with a subject.
    pub fn passed(subject: &str, reading: impl Into<String>) -> Finding {
        Finding::new(subject, Status::Passed, reading.into(), None)
    }

    /// Says that a subject could be better, or is not known.
    pub fn warned(subject: &str, reading: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding::new(subject, Status::Warned, reading.into(), Some(plain(&remedy.into())))
    }

    /// Says that a subject does not work.
    pub fn failed(subject: &str, reading: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding::new(subject, Status::Failed, reading.into(), Some(plain(&remedy.into())))
    }
}

/// Text from files and libraries ends up in readings.
fn plain(text: &str) -> String {
    Foreign::sentence(text).to_string()
}

/// All that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// This release.
    pub version: &'static str,
    /// The kind of queue pair that was looked for: the setting `qp`.
    pub queue_pair: &'static str,
    /// What was looked for, in a sentence, and how to look for RDMA where nobody asked for it.
    pub looked_for: String,
    /// In the order of the checks.
    pub findings: Vec<Finding>,
    /// How many passed.
    pub passed: usize,
    /// How many are warnings.
    pub warned: usize,
    /// How many failed.
    pub failed: usize,
    /// How many had nothing to look at.
    pub not_applicable: usize,
}

impl Report {
    /// Counts the findings. What was looked for is left empty.
    pub fn new(findings: Vec<Finding>) -> Report {
        let count = |status| findings.iter().filter(|f| f.status == status).count();
        Report {
            version: env!("CARGO_PKG_VERSION"),
            queue_pair: "",
            looked_for: String::new(),
            passed: count(Status::Passed),
            warned: count(Status::Warned),
            failed: count(Status::Failed),
            not_applicable: count(Status::NotApplicable),
            findings,
        }
    }

    /// 0: nothing to say; 1: warnings; 2: failures.
    pub fn exit_code(&self) -> u8 {
        match (self.failed, self.warned) {
            (0, 0) => 0,
            (0, _) => 1,
            _ => 2,
        }
    }

    /// A line for each finding, the remedy below it, what was looked for, and a last line that counts.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let width = self.findings.iter().map(|f| f.check.len()).max().unwrap_or(0);
        let mut rest = self.findings.as_slice();
        while let Some((f, after)) = rest.split_first() {
            // One line for checks in a row that have nothing to look at, for one reason.
            let same = |g: &&Finding| {
                f.status == Status::NotApplicable && Finding { check: f.check, ..(*g).clone() } == *f
            };
            let row = after.iter().take_while(same).count();
            let (others, after) = after.split_at(row);
            rest = after;
            let subject = if f.subject.is_empty() { String::new() } else { format!("{}: ", f.subject) };
            let others: Vec<_> = others.iter().map(|g| g.check).collect();
            let others = if row > 0 { format!(" (so too {})", others.join(", ")) } else { String::new() };
            let _ =
                writeln!(text, "{:<6}  {:<width$}  {subject}{}{others}", f.status.word(), f.check, f.reading);
            if let Some(remedy) = &f.remedy {
                let _ = writeln!(text, "{:<6}  {:<width$}  -> {remedy}", "", "");
            }
        }
        if !self.looked_for.is_empty() {
            let _ = writeln!(text, "{}", self.looked_for);
        }
        let _ = writeln!(
            text,
            "{} passed, {} warned, {} failed, {} not applicable",
            self.passed, self.warned, self.failed, self.not_applicable
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_worst() {
        let report = |findings| Report::new(findings).exit_code();
        assert_eq!(report(vec![]), 0);
        assert_eq!(report(vec![Finding::passed("", "x"), Finding::not_applicable("", "x")]), 0);
        assert_eq!(report(vec![Finding::passed("", "x"), Finding::warned("", "x", "y")]), 1);
        assert_eq!(report(vec![Finding::failed("", "x", "y"), Finding::warned("", "x", "y")]), 2);
    }

    #[test]
    fn text_names_subject_and_remedy_and_counts_last() {
        let mut finding = Finding::failed("rxe0/1", "its port is down", "bring it up");
        finding.check = "rdma-port";
        let text = Report::new(vec![finding]).text();
        assert_eq!(
            text,
            "failed  rdma-port  rxe0/1: its port is down\n                   -> bring it up\n\
             0 passed, 0 warned, 1 failed, 0 not applicable\n"
        );
    }

    #[test]
    fn checks_that_have_nothing_to_look_at_for_one_reason_share_a_line() {
        let na = |check| Finding { check, ..Finding::not_applicable("", "no device") };
        let findings =
            vec![na("a"), na("b"), na("c"), Finding { check: "d", ..Finding::passed("", "no device") }];
        let text = Report::new(findings).text();
        assert_eq!(
            text,
            "n/a     a  no device (so too b, c)\npassed  d  no device\n1 passed, 0 warned, 0 failed, 3 not applicable\n"
        );
    }

    #[test]
    fn what_is_read_can_not_steer_a_terminal_or_flood_it() {
        let finding = Finding::passed("", format!("\x1b[31mred\n{}", "x".repeat(5000)));
        assert!(finding.reading.starts_with("\\u{1b}[31mred\\nx") && finding.reading.len() < 1100);
    }
}
