//! The check that pages, comments, help texts and messages have no phrase that makes a reader stop.
//!
//! A phrase is found in any case and over the end of a line. Of CHANGELOG.md the newest section alone is searched.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::files;
use crate::output::say;

/// The extensions of the files that are searched.
const EXTENSIONS: [&str; 8] = ["md", "rs", "c", "h", "cu", "cuh", "py", "sh"];

/// A phrase that no text may have.
struct Rule {
    /// The phrase, in small letters. In a text it begins and ends with a word.
    phrase: &'static str,
    /// Longer phrases that are plain English, though they have `phrase` in them.
    fine: &'static [&'static str],
    /// Whether the rule is for pages (Markdown) alone.
    pages: bool,
    /// What to write in place of the phrase.
    instead: &'static str,
}

/// A rule for all files.
const fn rule(phrase: &'static str, instead: &'static str) -> Rule {
    Rule { phrase, fine: &[], pages: false, instead }
}

const RULES: &[Rule] = &[
    rule("so many", "the number or its name: `count` bytes, 30 ms"),
    Rule {
        fine: &["all of which", "none of which", "one of which", "half of which", "the first of which"],
        ..rule("of which", "whose, or a second sentence")
    },
    rule("tells of", "reports, lists, announces"),
    rule("whoever", "the noun: a user that, a peer that"),
    rule("for who", "the noun: for operators who"),
    rule("the same with", "what is meant, once more"),
    rule("the reverse of", "what happens"),
    rule("that there is none of", "unknown"),
    rule("see the module's text", "what the reader needs from there"),
    rule("in order to", "to"),
    rule("utilise", "use"),
    rule("utilize", "use"),
    Rule {
        fine: &["no longer need", "no longer than"],
        pages: true,
        ..rule("no longer", "how things are; git keeps how they were")
    },
];

/// A phrase that one file may have. The reason stands beside each.
struct Allowed {
    file: &'static str,
    /// Empty: each phrase.
    phrase: &'static str,
}

const ALLOWED: &[Allowed] = &[
    // Names the phrases.
    Allowed { file: "xtask/src/words.rs", phrase: "" },
    // Implements a trait for the type `Who`.
    Allowed { file: "proxy/engine/src/recorder/report.rs", phrase: "for who" },
];

/// A phrase of a file that breaks a rule.
struct Found {
    file: PathBuf,
    line: usize,
    rule: &'static Rule,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rule { phrase, instead, .. } = self.rule;
        write!(f, "{}:{}: \"{phrase}\": write {instead}", self.file.display(), self.line)
    }
}

/// Searches the repository. An error names each phrase that breaks a rule, with its file and line.
pub fn check(root: &Path) -> Result<()> {
    let (mut files, mut found) = (0, Vec::new());
    for extension in EXTENSIONS {
        for file in files::with_extension(root, extension)? {
            found.extend(in_text(&file, &files::read(root, &file)?));
            files += 1;
        }
    }
    if found.is_empty() {
        say!("none of {} phrases in {files} files", RULES.len());
        return Ok(());
    }
    let lines: Vec<_> = found.iter().map(Found::to_string).collect();
    bail!("phrases that make a reader stop (xtask/src/words.rs):\n{}", lines.join("\n"))
}

/// The phrases of one file that break a rule, by rule and line.
fn in_text(file: &Path, text: &str) -> Vec<Found> {
    let (prose, starts) = prose(if file.ends_with("CHANGELOG.md") { newest(text) } else { text });
    let is_page = file.extension().is_some_and(|extension| extension == "md");
    let mut found = Vec::new();
    for rule in RULES.iter().filter(|rule| is_page || !rule.pages) {
        let is_allowed = |allowed: &Allowed| {
            file == Path::new(allowed.file) && [rule.phrase, ""].contains(&allowed.phrase)
        };
        if ALLOWED.iter().any(is_allowed) {
            continue;
        }
        for (at, phrase) in prose.match_indices(rule.phrase) {
            let is_in_word = |c: char| c.is_alphanumeric() || c == '_';
            let (before, after) = (&prose[..at], &prose[at + phrase.len()..]);
            let is_part = before.ends_with(is_in_word) || after.starts_with(is_in_word);
            let is_fine = rule.fine.iter().any(|fine| {
                let begin = fine.find(phrase).and_then(|offset| at.checked_sub(offset));
                begin.is_some_and(|begin| prose.as_bytes()[begin..].starts_with(fine.as_bytes()))
            });
            if !is_part && !is_fine {
                let line = starts.partition_point(|start| *start <= at);
                found.push(Found { file: file.to_path_buf(), line, rule });
            }
        }
    }
    found
}

/// The text up to its second section.
fn newest(text: &str) -> &str {
    let mut sections = text.match_indices("\n## ").map(|(at, _)| at);
    sections.nth(1).map_or(text, |end| &text[..end])
}

/// The text in small letters, and where each line begins there. The lines are joined without indents, marks of comments and
/// the backslashes that continue strings.
fn prose(text: &str) -> (String, Vec<usize>) {
    let (mut prose, mut starts) = (String::with_capacity(text.len()), Vec::new());
    for line in text.lines() {
        starts.push(prose.len());
        prose.push_str(
            line.trim_start_matches([' ', '\t', '/', '!', '*', '#', '>']).trim_end_matches(['\\', ' ']),
        );
        prose.push(' ');
    }
    prose.make_ascii_lowercase();
    (prose, starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        in_text(Path::new(file), text).iter().map(Found::to_string).collect()
    }

    #[test]
    fn a_banned_phrase_is_named_with_file_line_and_what_to_write() {
        let text =
            "//! A page.\n\n/// Copies so many bytes.\nfn so_many() {}\n// Waits; whoever comes waits.\n";
        let wanted = [
            "src/a.rs:3: \"so many\": write the number or its name: `count` bytes, 30 ms",
            "src/a.rs:5: \"whoever\": write the noun: a user that, a peer that",
        ];
        assert_eq!(found("src/a.rs", text), wanted);
    }

    #[test]
    fn a_phrase_over_the_end_of_a_line_and_in_capitals_is_found_at_its_first_line() {
        let named = |text| found("a.h", text).iter().map(|said| said[..6].to_string()).collect::<Vec<_>>();
        assert_eq!(named("one\n/// In\n/// order to go\n"), ["a.h:2:"]);
        assert_eq!(named("/*\n * So\n * many\n */\n"), ["a.h:2:"]);
        assert_eq!(named("say(\"so \\\n    many\");\n"), ["a.h:1:"]);
    }

    #[test]
    fn a_phrase_within_a_longer_word_or_a_longer_plain_phrase_passes() {
        assert_eq!(found("a.rs", "// also many, so manyfold, utilized\n"), [""; 0]);
        assert_eq!(
            found("a.rs", "// two ends, one of which fails\n// ends, all\n// of which live\n"),
            [""; 0]
        );
        assert_eq!(found("a.rs", "// two ends, of which one fails\n").len(), 1);
        assert_eq!(found("a.rs", "of which").len(), 1);
    }

    #[test]
    fn history_is_found_in_pages_alone() {
        assert_eq!(found("docs/a.md", "It no longer waits, and no longer needs it.\n").len(), 1);
        assert_eq!(found("a.rs", "// It no longer waits.\n"), [""; 0]);
    }

    #[test]
    fn an_allowed_phrase_passes_in_its_file_alone() {
        let text = "impl fmt::Display for Who {\n// so many\n";
        assert_eq!(found("proxy/engine/src/recorder/report.rs", text).len(), 1);
        assert_eq!(found("proxy/engine/src/recorder/other.rs", text).len(), 2);
        assert_eq!(found("xtask/src/words.rs", text), [""; 0]);
    }

    #[test]
    fn only_the_newest_section_of_the_changelog_is_searched() {
        let text = "# Changelog\n\n## 0.3.0\n\n* utilise\n\n## 0.2.0\n\n* utilise\n";
        assert_eq!(found("CHANGELOG.md", text).len(), 1);
        assert_eq!(found("docs/other.md", text).len(), 2);
    }

    #[test]
    fn every_allowed_phrase_stands_in_its_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for Allowed { file, phrase } in ALLOWED {
            let (prose, _) = prose(&files::read(root, file).unwrap());
            assert!(prose.contains(phrase), "{file} has no \"{phrase}\": take the entry out of the list");
        }
    }
}
