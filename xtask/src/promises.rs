//! docs/promises.md: the tests of each promise, found by the tests' names.
//!
//! A test's name begins with the promises that the test shows: `p4_` for P4, `p4_p6_` for both. The sources are
//! scanned, not compiled, so tests inside macros and tests of other targets are found too.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::files::{self, Made};
use crate::paths::Paths;
use crate::workspace::{self, Package};

/// How many promises there are: P1 to P8.
const PROMISES: usize = 8;

/// The page that says what each promise is.
const HOME: &str = "docs/architecture.md";

const PAGE: Made =
    Made { file: "docs/promises.md", source: "the tests' names", task: "cargo xtask promises" };

/// Writes docs/promises.md. With `check` writes nothing, and fails if the committed page differs.
pub fn run(paths: &Paths, check: bool) -> Result<()> {
    let promises = promises(&files::read(&paths.root, HOME)?)?;
    let page = page(&promises, &tests(&paths.root)?, &workspace::packages(paths)?)?;
    PAGE.write(&paths.root, &page, check)
}

/// A promise, as the table of [`HOME`] states it.
#[derive(Debug, PartialEq)]
struct Promise {
    name: String,
    /// What the promise says; empty if the table says no more than the name.
    text: String,
}

/// P1 to P8, from the table whose rows begin with the promise's number in bold.
fn promises(architecture: &str) -> Result<Vec<Promise>> {
    let mut found = Vec::new();
    let mut columns: Vec<&str> = Vec::new();
    for line in architecture.lines() {
        let cells: Vec<_> = line.trim().trim_matches('|').split(" | ").map(str::trim).collect();
        let number = format!("**P{}** ", found.len() + 1);
        if let Some(name) = cells[0].strip_prefix(&number) {
            let text = columns.iter().position(|column| *column == "what it says");
            let text = text.and_then(|column| cells.get(column)).copied().unwrap_or_default();
            found.push(Promise { name: name.into(), text: text.into() });
        } else if cells[0] == "promise" {
            columns = cells;
        }
    }
    ensure!(
        found.len() == PROMISES,
        "{HOME} has a table row for {} of {PROMISES} promises: each row begins with | **Pn** and the promise's name",
        found.len()
    );
    Ok(found)
}

/// A test that is named after promises.
#[derive(Debug, PartialEq)]
struct Test {
    name: String,
    /// The numbers in the name.
    promises: Vec<usize>,
    /// The suite of the virtual machine that runs the test, where `cargo test` does not.
    suite: Option<String>,
}

/// All tests of promises in the repository's Rust sources, by file.
fn tests(root: &Path) -> Result<BTreeMap<PathBuf, Vec<Test>>> {
    let mut found = BTreeMap::new();
    for file in files::with_extension(root, "rs")? {
        let tests = tests_of(&files::read(root, &file)?).with_context(|| file.display().to_string())?;
        if !tests.is_empty() {
            found.insert(file, tests);
        }
    }
    Ok(found)
}

/// The tests of promises in one source, in their order.
fn tests_of(source: &str) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for function in functions(source) {
        let promises = numbers(function.name);
        let Some(last) = promises.iter().max() else { continue };
        let name = function.name;
        ensure!(
            *last <= PROMISES && !promises.contains(&0),
            "{name} names a promise that does not exist: there are P1 to P{PROMISES}"
        );
        ensure!(
            function.attributes.iter().any(|attribute| is_test(attribute)),
            "{name} is named like a test of a promise, but has no #[test]: add the attribute or rename the function"
        );
        let suite = function.attributes.iter().find_map(|attribute| suite(attribute));
        tests.push(Test { name: name.into(), promises, suite });
    }
    Ok(tests)
}

/// The promises at the beginning of a test's name.
fn numbers(name: &str) -> Vec<usize> {
    let number = |part: &str| part.strip_prefix('p').filter(|digits| digits.len() == 1)?.parse().ok();
    let mut parts: Vec<_> = name.split('_').collect();
    // What follows the numbers says what the test shows.
    parts.pop();
    parts.into_iter().map_while(number).collect()
}

/// Whether an attribute makes its function a test: `test`, or a path that ends so.
fn is_test(attribute: &str) -> bool {
    attribute == "test" || attribute.ends_with("::test")
}

/// The suite that an attribute `ignore = "...: cargo xtask vm --suite NAME"` names.
fn suite(attribute: &str) -> Option<String> {
    let (_, rest) = attribute.strip_prefix("ignore")?.split_once("--suite ")?;
    Some(rest.split(|c: char| !c.is_alphanumeric() && c != '-').next()?.to_string())
}

/// A function of a source, with what its attributes have between the brackets.
#[derive(Debug, PartialEq)]
struct Function<'a> {
    name: &'a str,
    attributes: Vec<&'a str>,
}

/// All named functions of a source, also those inside macros.
fn functions(source: &str) -> Vec<Function<'_>> {
    let code = code(source);
    let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric() || byte >= 0x80;
    let word = |at: usize| at + code[at..].iter().take_while(|byte| is_word(**byte)).count();
    let blanks = |at: usize| at + code[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    let mut functions = Vec::new();
    let mut attributes = Vec::new();
    let mut at = blanks(0);
    while at < code.len() {
        let end = if code[at..].starts_with(b"#[") {
            let end = at + attribute(&code[at..]);
            attributes.push(source[at + 2..end - 1].trim());
            end
        } else if is_word(code[at]) {
            let end = word(at);
            match &source[at..end] {
                "fn" => {
                    let start = blanks(end);
                    let end = word(start);
                    let attributes = std::mem::take(&mut attributes);
                    if end > start {
                        functions.push(Function { name: &source[start..end], attributes });
                    }
                }
                // These stand between a function's attributes and its `fn`.
                "pub" | "const" | "async" | "unsafe" | "extern" => {}
                _ => attributes.clear(),
            }
            end
        } else {
            attributes.clear();
            at + 1
        };
        at = blanks(end);
    }
    functions
}

/// The length of the attribute that the code begins with, brackets included.
fn attribute(code: &[u8]) -> usize {
    let mut depth = 0;
    for (at, byte) in code.iter().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' if depth == 1 => return at + 1,
            b']' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// A Rust source with comments, strings and characters blanked. The length stays, so positions stay too.
fn code(source: &str) -> Vec<u8> {
    let bytes = source.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &source[at..];
        let length = match bytes[at] {
            b'/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            b'/' if rest.starts_with("/*") => block_comment(rest),
            b'"' => string(rest),
            b'r' if raw_string(rest).is_some() && !ends_a_word(&bytes[..at]) => {
                raw_string(rest).unwrap_or_default()
            }
            b'\'' => character(rest),
            _ => 0,
        };
        code[at..at + length].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at += length.max(1);
        while !source.is_char_boundary(at) {
            at += 1;
        }
    }
    code
}

/// Whether a word runs up to here, the prefixes `b` and `c` of strings aside.
fn ends_a_word(before: &[u8]) -> bool {
    let is_word = |byte: &u8| *byte == b'_' || byte.is_ascii_alphanumeric() || *byte >= 0x80;
    match before {
        [.., last, b'b' | b'c'] => is_word(last),
        [b'b' | b'c'] => false,
        before => before.last().is_some_and(is_word),
    }
}

/// The length of the block comment at the beginning; block comments nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    let bytes = text.as_bytes();
    while at < bytes.len() {
        match &bytes[at..bytes.len().min(at + 2)] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" if depth == 1 => return at + 2,
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    text.len()
}

/// The length of the string at the beginning.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The length of the raw string at the beginning, if there is one.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text[1..].bytes().take_while(|byte| *byte == b'#').count();
    let inside = text[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(inside.find(&end).map_or(text.len(), |found| 2 + hashes + found + end.len()))
}

/// The length of the character at the beginning; 0 for a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let inside = at + escaped.len_utf8();
            text[inside..].find('\'').map_or(text.len(), |found| inside + found + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// The page. A promise without a test is an error.
fn page(promises: &[Promise], tests: &BTreeMap<PathBuf, Vec<Test>>, packages: &[Package]) -> Result<String> {
    let mut page = String::from(
        "<!-- Made by `cargo xtask promises` from the tests' names; do not edit. -->\n\
         # Tests of each promise\n\n\
         This page lists the tests that show each promise, for readers who want to see how a promise is tested and for\n\
         contributors who add a test. [Architecture](architecture.md) says what each promise is and where the code keeps\n\
         the promise.\n\n\
         A test's name begins with the numbers of its promises: `p4_p6_...` is a test of P4 and of P6, and both sections\n\
         list the test. `cargo test -p PACKAGE p4_` runs one package's tests of P4. Tests with a suite behind the name\n\
         need a device or a module; `cargo xtask vm --suite NAME` runs them in a virtual machine\n\
         ([testing](testing.md#the-virtual-machine)).\n\n\
         `cargo xtask promises` makes this page from the names. The step `promises` of `cargo xtask test` fails if the page\n\
         is not what the names say, or if a promise has no test.\n\n\
         | promise | name | tests |\n| --- | --- | --- |\n",
    );
    let of = |number: usize| {
        let shown = move |test: &&Test| test.promises.contains(&number);
        tests.iter().map(move |(file, tests)| (file, tests.iter().filter(shown).collect::<Vec<_>>()))
    };
    for (at, promise) in promises.iter().enumerate() {
        let number = at + 1;
        let count: usize = of(number).map(|(_, tests)| tests.len()).sum();
        if count == 0 {
            bail!("no test shows P{number} ({}): a test of P{number} is named p{number}_...", promise.name);
        }
        let _ = writeln!(page, "| [P{number}](#p{number}) | {} | {count} |", promise.name);
    }
    for (at, promise) in promises.iter().enumerate() {
        let number = at + 1;
        let Promise { name, text } = promise;
        let text = if text.is_empty() { name.clone() } else { format!("{name}. {text}") };
        let _ = write!(page, "\n## P{number}\n\n{}.\n", capital(text.trim_end_matches('.')));
        for package in packages {
            let is_owner = |file: &Path| {
                workspace::owner(packages, file).is_some_and(|owner| owner.name == package.name)
            };
            let files: Vec<_> =
                of(number).filter(|(file, tests)| !tests.is_empty() && is_owner(file)).collect();
            if files.is_empty() {
                continue;
            }
            let _ = write!(page, "\n**{}**\n\n", package.name);
            for (file, tests) in files {
                let _ = writeln!(page, "* [{0}](../{0})", file.display());
                for Test { name, suite, .. } in tests {
                    let suite = suite.as_ref().map(|suite| format!(" (suite `{suite}`)")).unwrap_or_default();
                    let _ = writeln!(page, "  * `{name}`{suite}");
                }
            }
        }
    }
    Ok(page)
}

/// The text with a capital at the beginning.
fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_promises_are_the_rows_of_the_table() {
        let rows = |n: std::ops::RangeInclusive<usize>| -> String {
            n.map(|n| format!("| **P{n}** name {n} | `a` of {n} | text {n} |\n")).collect()
        };
        let table = |head: &str| format!("# A\n\n{head}\n| --- | --- | --- |\n{}", rows(1..=8));
        let found = promises(&table("| promise | kept by | what it says |")).unwrap();
        assert_eq!(found.len(), 8);
        assert_eq!(found[2], Promise { name: "name 3".into(), text: "text 3".into() });
        let found = promises(&table("| promise | kept by | shown by |")).unwrap();
        assert_eq!(found[7], Promise { name: "name 8".into(), text: String::new() });
        let error = promises(&rows(1..=7)).unwrap_err().to_string();
        assert!(error.contains("7 of 8"), "{error}");
    }

    #[test]
    fn a_name_begins_with_its_promises() {
        assert_eq!(numbers("p4_p6_both_ends"), [4, 6]);
        assert_eq!(numbers("p1_a_p2_b"), [1]);
        assert_eq!(numbers("p9_a"), [9]);
        for other in ["a_p1_b", "p1", "pp1_a", "p12_a", "peer_lost", "p_1", ""] {
            assert!(numbers(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn tests_are_found_wherever_they_stand() {
        let source = r###"
//! #[test] fn p1_in_a_comment() {}
/* #[test] fn p1_in_a_block /* that nests */ () {} */
const A: &str = "#[test] fn p1_in_a_string() {} \" ";
const B: &str = r#"#[test] fn p1_in_a_raw_string() {} "" "#;
const C: [char; 3] = ['"', '\'', '\u{e9}'];
fn lifetime<'a>(text: &'a str) -> &'a str { text }
#[test]
fn p2_plain() {}
proptest! {
    #![proptest_config(config())]
    #[test]
    fn p3_p4_in_a_macro(
        a in 0..3,
    ) { f("\\"); }
}
mod inner {
    #[tokio::test]
    #[cfg(any(a, b = "]"))]
    #[ignore = "needs a device: cargo xtask vm --suite verbs-endpoint"]
    pub async fn p5_with_attributes() {}
    #[test]
    #[ignore = "another test starts this"]
    fn p6_ignored() {}
}
#[test]
fn of_no_promise() {}
"###;
        let found = tests_of(source).unwrap();
        let found: Vec<_> = found.iter().map(|test| (test.name.as_str(), test.suite.as_deref())).collect();
        let wanted = [
            ("p2_plain", None),
            ("p3_p4_in_a_macro", None),
            ("p5_with_attributes", Some("verbs-endpoint")),
            ("p6_ignored", None),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_name_of_a_promise_without_its_test_or_its_promise_is_refused() {
        let error = |source| tests_of(source).unwrap_err().to_string();
        assert!(error("#[test] fn a() {} fn p1_helper() {}").contains("p1_helper is named like a test"));
        assert!(error("#[test] struct S; fn p1_helper() {}").contains("p1_helper is named like a test"));
        assert!(error("#[test] fn p9_a() {}").contains("p9_a names a promise that does not exist"));
        assert!(error("#[test] fn p0_a() {}").contains("p0_a names a promise that does not exist"));
    }

    #[test]
    fn a_promise_without_a_test_is_refused() {
        let promises: Vec<_> =
            (1..=8).map(|n| Promise { name: format!("name {n}"), text: String::new() }).collect();
        let test = |numbers: &[usize]| Test {
            name: "p_".into(),
            promises: numbers.to_vec(),
            suite: Some("driver".into()),
        };
        let tests = |numbers: &[usize]| BTreeMap::from([(PathBuf::from("src/a.rs"), vec![test(numbers)])]);
        page(&promises, &tests(&[1, 2, 3, 4, 5, 6, 7, 8]), &[]).unwrap();
        let error = page(&promises, &tests(&[1, 2, 3, 5, 6, 7, 8]), &[]).unwrap_err().to_string();
        assert!(error.contains("no test shows P4 (name 4)"), "{error}");
    }

    #[test]
    fn the_page_lists_a_test_under_each_of_its_promises() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
        let tests = tests(&root).unwrap();
        let promises = promises(&files::read(&root, HOME).unwrap()).unwrap();
        let paths = Paths { target: root.join("target"), root };
        let packages = workspace::packages(&paths).unwrap();
        let page = page(&promises, &tests, &packages).unwrap();
        for (file, tests) in &tests {
            assert!(workspace::owner(&packages, file).is_some(), "{} is of no package", file.display());
            for test in tests {
                let line = format!("  * `{}`", test.name);
                let listed = page.lines().filter(|listed| listed.starts_with(&line)).count();
                assert!(listed >= test.promises.len(), "{} in {}: {listed} times", test.name, file.display());
            }
        }
    }
}
