//! Markdown, as far as the tasks need it: links, anchors, the first heading; and the check that no relative link of
//! the repository's Markdown is dead.
//!
//! What is found is what the repository's pages use: fenced blocks, code spans, `#` headings, inline links, link
//! definitions, and `href`, `src`, `id` and `name` of HTML.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::files;

/// The text with all fenced blocks blanked. The length stays, so positions stay too.
fn without_fences(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut fence: Option<(char, usize)> = None;
    for line in text.split_inclusive('\n') {
        let trimmed = line.trim();
        let mark = trimmed.chars().next().filter(|c| ['`', '~'].contains(c));
        let length = mark.map_or(0, |mark| trimmed.chars().take_while(|c| *c == mark).count());
        match fence {
            None if length < 3 => out.push_str(line),
            None => {
                fence = mark.map(|mark| (mark, length));
                out.push_str(&blank(line));
            }
            Some((open, least)) => {
                if mark == Some(open) && length >= least && trimmed.chars().all(|c| c == open) {
                    fence = None;
                }
                out.push_str(&blank(line));
            }
        }
    }
    out
}

/// The text with all fenced blocks and code spans blanked.
fn prose(text: &str) -> String {
    let mut out = without_fences(text);
    for span in spans(&out) {
        let blanked = blank(&out[span.clone()]);
        out.replace_range(span, &blanked);
    }
    out
}

/// What stands in the code spans of the text, in order.
#[cfg(test)]
pub fn code(text: &str) -> Vec<String> {
    let text = without_fences(text);
    spans(&text).into_iter().map(|span| text[span].trim_matches('`').trim().to_string()).collect()
}

/// Where the code spans of a text without fenced blocks stand, their backticks included.
fn spans(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = text[at..].find('`').map(|found| at + found) {
        let run = text[start..].bytes().take_while(|byte| *byte == b'`').count();
        let inside = start + run;
        // A span ends at a run of the same length, within the paragraph.
        let paragraph = inside + text[inside..].find("\n\n").unwrap_or(text.len() - inside);
        at = inside;
        if let Some(end) = closing(&text[inside..paragraph], run).map(|found| inside + found + run) {
            found.push(start..end);
            at = end;
        }
    }
    found
}

/// Where a run of exactly `run` backticks begins.
fn closing(text: &str, run: usize) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].find('`').map(|found| at + found) {
        let length = text[found..].bytes().take_while(|byte| *byte == b'`').count();
        if length == run {
            return Some(found);
        }
        at = found + length;
    }
    None
}

fn blank(text: &str) -> String {
    text.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect()
}

/// Where the destinations of all links and images stand in the text, in order.
pub fn links(text: &str) -> Vec<Range<usize>> {
    let prose = prose(text);
    let mut found = Vec::new();
    for (at, _) in prose.match_indices("](") {
        found.extend(destination(&prose, at + 2));
    }
    let mut start = 0;
    for line in prose.split_inclusive('\n') {
        // A definition: `[label]: destination`.
        if line.trim_start().starts_with('[')
            && let Some(at) = line.find("]: ")
        {
            found.extend(destination(&prose, start + at + 3));
        }
        start += line.len();
    }
    for attribute in ["href=\"", "src=\"", "srcset=\""] {
        found.extend(values(&prose, attribute));
    }
    found.sort_by_key(|range| range.start);
    found
}

/// The destination that begins at this position: up to a blank, or to the bracket that ends the link.
fn destination(text: &str, start: usize) -> Option<Range<usize>> {
    let start = start + text[start..].find(|c: char| !c.is_whitespace())?;
    if text[start..].starts_with('<') {
        let end = start + text[start..].find('>')?;
        return Some(start + 1..end);
    }
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        match c {
            '(' => depth += 1,
            ')' if depth == 0 => return Some(start..start + at),
            ')' => depth -= 1,
            c if c.is_whitespace() => return Some(start..start + at),
            _ => {}
        }
    }
    Some(start..text.len())
}

/// The values of an HTML attribute, which is given with `="`.
pub fn values(text: &str, attribute: &str) -> Vec<Range<usize>> {
    let starts = text.match_indices(attribute).map(|(at, _)| at + attribute.len());
    starts.filter_map(|start| Some(start..start + text[start..].find('"')?)).collect()
}

/// The text of each `#` heading, in order, with its Markdown.
fn headings(text: &str) -> Vec<String> {
    let text = without_fences(text);
    let heading = |line: &str| {
        let rest = line.trim_start_matches('#');
        let depth = line.len() - rest.len();
        let is_heading = (1..=6).contains(&depth) && rest.starts_with([' ', '\t']);
        is_heading.then(|| rest.trim().trim_end_matches('#').trim_end().to_string())
    };
    text.lines().filter_map(heading).collect()
}

/// The first heading, as plain text.
pub fn title(text: &str) -> Option<String> {
    headings(text).first().map(|heading| plain(heading))
}

/// A heading without code marks, emphasis by asterisks, and the destinations of links.
fn plain(heading: &str) -> String {
    let mut text = heading.to_string();
    while let Some(at) = text.find("](")
        && let Some(open) = text[..at].rfind('[')
        && let Some(end) = text[at..].find(')').map(|found| at + found)
    {
        text = format!("{}{}{}", &text[..open], &text[open + 1..at], &text[end + 1..]);
    }
    text.replace(['`', '*'], "")
}

/// All names that a link's fragment may have in this text: those of the headings, made as GitHub and mdBook make
/// them, and those that HTML states.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for heading in headings(text) {
        let anchor: String = plain(&heading)
            .to_lowercase()
            .chars()
            .filter_map(|c| match c {
                c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
                c if c.is_whitespace() => Some('-'),
                _ => None,
            })
            .collect();
        let times = seen.entry(anchor.clone()).or_default();
        anchors.insert(if *times == 0 { anchor } else { format!("{anchor}-{times}") });
        *times += 1;
    }
    let prose = prose(text);
    for attribute in ["id=\"", "name=\""] {
        anchors.extend(values(&prose, attribute).into_iter().map(|range| prose[range].to_string()));
    }
    anchors
}

/// Whether a destination names its own scheme, as `https:` does, so that it does not lead to a file beside.
pub fn is_external(destination: &str) -> bool {
    let scheme = destination.split([':', '/', '#', '?']).next().unwrap_or_default();
    destination[scheme.len()..].starts_with(':') || destination.starts_with("//")
}

/// The file that a relative destination in `page` leads to, and its fragment; both paths from the root. `None`: the
/// path leads out of the repository.
pub fn resolve(page: &Path, destination: &str) -> Option<(PathBuf, Option<String>)> {
    let (path, fragment) = match destination.split_once('#') {
        Some((path, fragment)) => (path, Some(fragment.to_string())),
        None => (destination, None),
    };
    let file = match path {
        "" => page.to_path_buf(),
        path => files::normal(&page.parent().unwrap_or(Path::new("")).join(path))?,
    };
    Some((file, fragment))
}

/// A sentence for each dead relative link in the repository's Markdown: the page, the line, the link, what is wrong.
pub fn dead_links(root: &Path) -> Result<Vec<String>> {
    let mut dead = Vec::new();
    for page in files::with_extension(root, "md")? {
        let text = files::read(root, &page)?;
        for link in links(&text) {
            let line = text[..link.start].lines().count().max(1);
            let destination = &text[link];
            if let Some(reason) = fault(root, &page, &text, destination)? {
                dead.push(format!("{}:{line}: the link `{destination}` {reason}", page.display()));
            }
        }
    }
    Ok(dead)
}

/// What is wrong with a link.
fn fault(root: &Path, page: &Path, text: &str, destination: &str) -> Result<Option<String>> {
    if is_external(destination) {
        return Ok(None);
    }
    let Some((file, fragment)) = resolve(page, destination) else {
        return Ok(Some("leads out of the repository".into()));
    };
    if !root.join(&file).exists() {
        return Ok(Some(format!("leads to {}, which does not exist", file.display())));
    }
    let Some(fragment) = fragment else { return Ok(None) };
    if file.extension().is_none_or(|extension| extension != "md") {
        return Ok(Some("has a fragment, but leads to no Markdown page: leave the fragment out".into()));
    }
    let anchors = if file == page { anchors(text) } else { anchors(&files::read(root, &file)?) };
    Ok((!anchors.contains(&fragment)).then(|| format!("names no heading of {}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<&str> {
        links(text).into_iter().map(|range| &text[range]).collect()
    }

    #[test]
    fn links_of_every_form_are_found() {
        assert_eq!(
            found("a [b](c.md), [d `e`](f.md#g \"title\") and ![h](i.svg)"),
            ["c.md", "f.md#g", "i.svg"]
        );
        assert_eq!(
            found("[a\nb](c.md)\n\n[d]: e.md\n[f](<g h.md>) [i](j(k).md)"),
            ["c.md", "e.md", "g h.md", "j(k).md"]
        );
        assert_eq!(found("<a href=\"b.md\"><img src=\"c.svg\"></a>"), ["b.md", "c.svg"]);
        assert_eq!(found("[![plot](a.svg)](b.md)"), ["a.svg", "b.md"]);
    }

    #[test]
    fn what_stands_in_code_is_no_link() {
        assert_eq!(found("`[a](b)` and ``[`](c)`` [d](e)"), ["e"]);
        assert_eq!(found("```\n[a](b)\n``` not the end\n```\n[c](d)\n~~~~\n[e](f)\n~~~\n~~~~\n"), ["d"]);
        // A backtick without its partner begins no span.
        assert_eq!(found("a ` b\n\n[c](d) ` e"), ["d"]);
        assert_eq!(code("`a` b ``c ` d`` `` ` `` e\n```\n`f`\n```\n`g\nh`"), ["a", "c ` d", "`", "g\nh"]);
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# A `b_c` & *d*\n## E.f (g), h\n```\n# no heading\n```\n## E.f (g), h\n### [i](j.md) –  k\n#no\n\
                    <a id=\"own\"></a>\n";
        let wanted = ["a-b_c--d", "ef-g-h", "ef-g-h-1", "i---k", "own"];
        assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), wanted);
        assert_eq!(title(text).as_deref(), Some("A b_c & d"));
        assert_eq!(title("no heading\n"), None);
    }

    #[test]
    fn a_destination_with_a_scheme_is_external() {
        for external in ["https://a.b/c", "mailto:a@b", "//a.b"] {
            assert!(is_external(external), "{external}");
        }
        for internal in ["a.md", "#b", "../a:b.md", "a.md#b:c", ""] {
            assert!(!is_external(internal), "{internal}");
        }
    }

    #[test]
    fn each_dead_link_is_named_with_page_line_and_reason() {
        let root = std::env::temp_dir().join(format!("xtask-links-{}", std::process::id()));
        let page = "# One\n[a](docs/b.md#two) [c](#one) [d](LICENSE) [e](docs) [f](https://x.y/z#w)\n\n\
                    [g](docs/none.md)\n[h](docs/b.md#three) [i](../k)\n[l](LICENSE#m) [n](/etc)\n";
        files::put(&root.join("README.md"), page.as_bytes()).unwrap();
        files::put(&root.join("docs/b.md"), b"# Two\n[up](../README.md#one) [nowhere](#one)\n").unwrap();
        files::put(&root.join("LICENSE"), b"").unwrap();
        let dead = dead_links(&root).unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        let wanted = [
            "README.md:4: the link `docs/none.md` leads to docs/none.md, which does not exist",
            "README.md:5: the link `docs/b.md#three` names no heading of docs/b.md",
            "README.md:5: the link `../k` leads out of the repository",
            "README.md:6: the link `LICENSE#m` has a fragment, but leads to no Markdown page: leave the fragment out",
            "README.md:6: the link `/etc` leads out of the repository",
            "docs/b.md:2: the link `#one` names no heading of docs/b.md",
        ];
        assert_eq!(dead, wanted);
    }

    #[test]
    fn no_link_of_the_repositorys_markdown_is_dead() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let dead = dead_links(root).unwrap();
        assert!(dead.is_empty(), "{} dead links:\n{}", dead.len(), dead.join("\n"));
        // The check is of use only if pages and links are found.
        let readme = files::read(root, "README.md").unwrap();
        assert!(links(&readme).len() >= 5, "found only {} links in README.md", links(&readme).len());
    }
}
