//! The documentation as a site: the repository's Markdown by mdBook, with search, and rustdoc's pages beside.
//!
//! The pages are copied to a folder below the target folder, at the places that they have in the repository, so links
//! between pages stay as they are. A README becomes the index of its folder. A link to any other file of the
//! repository leads to a copy of that file in the site.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::paths::Paths;
use crate::progress::Guard;
use crate::tools::Tool;
use crate::workspace::Package;
use crate::{files, markdown, process, workspace};

/// What builds the site; docs/dependencies.md says why. Without the server that rebuilds pages while one writes.
const MDBOOK: Tool =
    Tool { name: "mdbook", version: "0.5.4", options: &["--no-default-features", "--features", "search"] };

const SETTINGS: &str = include_str!("site/book.toml");
const STYLE: &str = include_str!("site/site.css");

/// The page that lists rustdoc's pages, beside the repository's own.
const API_PAGE: &str = "rust-api.md";
/// The site's folder of rustdoc's pages.
const RUSTDOC: &str = "rust";
/// The site's folder of files that pages link to.
const FILES: &str = "files";

/// The order of the pages in the site's list, under headings. Pages that no entry names follow at the end.
const ORDER: &[(&str, &[&str])] = &[
    (
        "Use",
        &[
            "docs/README.md",
            "docs/getting-started.md",
            "docs/clusters.md",
            "docs/nccl.md",
            "docs/device-api-nccl.md",
            "docs/nixl.md",
            "docs/device-api.md",
            "docs/c-api.md",
            "docs/python.md",
            "docs/packages.md",
            "examples/README.md",
            "docs/operations.md",
            "docs/glossary.md",
        ],
    ),
    (
        "This host",
        &[
            "docs/doctor.md",
            "docs/roce.md",
            "docs/first-nic.md",
            "docs/probe.md",
            "docs/topology.md",
            "docs/report.md",
        ],
    ),
    (
        "How it works",
        &[
            "docs/architecture.md",
            "docs/protocol.md",
            "docs/rdma.md",
            "docs/copier.md",
            "docs/driver.md",
            "docs/pushgate.4.md",
            "docs/pcie-model.md",
        ],
    ),
    (
        "Evidence",
        &["docs/status.md", "docs/stability.md", "docs/benchmarks.md", "docs/promises.md", "docs/testing.md"],
    ),
    ("Project", &["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/dependencies.md"]),
];

/// Builds the site; returns the path of its first page.
pub fn build(paths: &Paths, guard: Guard) -> Result<PathBuf> {
    let dead = markdown::dead_links(&paths.root)?;
    ensure!(dead.is_empty(), "the repository's Markdown has dead links:\n{}", dead.join("\n"));
    let mdbook = MDBOOK.get(paths, guard)?;
    let book = paths.scratch("site")?;
    let packages = workspace::packages(paths)?;
    write_book(&paths.root, &packages, &book)?;
    let site = paths.target.join("site");
    let mut command = process::command(&mdbook, &paths.root);
    command.arg("build").arg(&book).arg("--dest-dir").arg(&site);
    process::run(command, guard)?;
    let mut command = process::cargo(&paths.root);
    command.args(["doc", "--workspace", "--no-deps"]);
    process::run(command, guard)?;
    files::copy_folder(&paths.target.join("doc"), &site.join(RUSTDOC))?;
    let dead = dead_references(&site)?;
    ensure!(dead.is_empty(), "the site has dead links:\n{}", dead.join("\n"));
    Ok(site.join("index.html"))
}

/// Writes what mdBook reads: settings, pages, the list of the pages, and the files that pages link to.
fn write_book(root: &Path, packages: &[Package], book: &Path) -> Result<()> {
    // A page that is gone must not stay in the site.
    fs::remove_dir_all(book).with_context(|| format!("cannot remove {}", book.display()))?;
    let pages = pages(root)?;
    let mut linked = BTreeSet::new();
    let source = book.join("src");
    for (page, text) in &pages {
        let text = with_links_of_the_site(root, &pages, page, text, &mut linked);
        files::put(&source.join(place(page)), text.as_bytes())?;
    }
    for file in &linked {
        let path = root.join(file);
        if is_shown_as_it_is(file) {
            let content = fs::read(&path).with_context(|| format!("cannot read {}", file.display()))?;
            files::put(&source.join(file), &content)?;
        } else {
            let text = if path.is_dir() { listing(&path)? } else { lossy(&path)? };
            files::put(&source.join(shown(file)), file_page(file, &text).as_bytes())?;
        }
    }
    files::put(&source.join(API_PAGE), api_page(packages)?.as_bytes())?;
    files::put(&source.join("SUMMARY.md"), summary(&pages)?.as_bytes())?;
    files::put(&book.join("book.toml"), SETTINGS.as_bytes())?;
    files::put(&book.join("site.css"), STYLE.as_bytes())
}

/// The pages of the site with their texts: the Markdown of the repository's root, of docs/ and of examples/.
fn pages(root: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let is_page = |file: &PathBuf| {
        file.components().count() == 1 || file.starts_with("docs") || file.starts_with("examples")
    };
    let pages = files::with_extension(root, "md")?.into_iter().filter(is_page);
    pages.map(|page| Ok((page.clone(), files::read(root, &page)?))).collect()
}

/// Where a page is in the site's sources.
fn place(page: &Path) -> PathBuf {
    if page.ends_with("README.md") { page.with_file_name("index.md") } else { page.to_path_buf() }
}

/// Where the copy of a file is that browsers do not show.
fn shown(file: &Path) -> PathBuf {
    Path::new(FILES).join(format!("{}.html", file.display()))
}

/// Whether browsers show the file.
fn is_shown_as_it_is(file: &Path) -> bool {
    let extension = file.extension().unwrap_or_default().to_string_lossy();
    ["svg", "png", "jpg", "gif", "html", "pdf"].contains(&extension.as_ref())
}

/// A page with its relative links as the site has their targets. Adds the files that are no pages to `linked`.
fn with_links_of_the_site(
    root: &Path,
    pages: &BTreeMap<PathBuf, String>,
    page: &Path,
    text: &str,
    linked: &mut BTreeSet<PathBuf>,
) -> String {
    let place_of_page = place(page);
    let folder = place_of_page.parent().unwrap_or(Path::new(""));
    let mut out = String::with_capacity(text.len());
    let mut copied = 0;
    for link in markdown::links(text) {
        let destination = &text[link.clone()];
        if markdown::is_external(destination) || destination.starts_with('#') || destination.is_empty() {
            continue;
        }
        let Some((mut file, fragment)) = markdown::resolve(page, destination) else { continue };
        if root.join(&file).is_dir() && pages.contains_key(&file.join("README.md")) {
            file.push("README.md");
        }
        let target = if pages.contains_key(&file) {
            place(&file)
        } else {
            let target = if is_shown_as_it_is(&file) { file.clone() } else { shown(&file) };
            linked.insert(file);
            target
        };
        out.push_str(&text[copied..link.start]);
        out.push_str(&files::relative(folder, &target).display().to_string());
        if let Some(fragment) = fragment {
            let _ = write!(out, "#{fragment}");
        }
        copied = link.end;
    }
    out + &text[copied..]
}

/// mdBook's list of pages, each by its first heading.
fn summary(pages: &BTreeMap<PathBuf, String>) -> Result<String> {
    let line = |page: &Path| -> Result<String> {
        let title = markdown::title(&pages[page]);
        let title = title
            .with_context(|| format!("{} has no heading: begin the page with `# TITLE`", page.display()))?;
        Ok(format!("[{}]({})\n", title.replace(['[', ']'], ""), place(page).display()))
    };
    let first = Path::new("README.md");
    ensure!(pages.contains_key(first), "the repository has no README.md, which is the site's first page");
    let mut rest: BTreeSet<&Path> =
        pages.keys().map(PathBuf::as_path).filter(|page| *page != first).collect();
    let mut summary = format!("# Summary\n\n{}", line(first)?);
    for (heading, order) in ORDER {
        let section: Vec<_> = order.iter().map(Path::new).filter(|page| rest.remove(page)).collect();
        if !section.is_empty() {
            let _ = write!(summary, "\n# {heading}\n\n");
        }
        for page in section {
            let _ = write!(summary, "- {}", line(page)?);
        }
    }
    let _ = write!(summary, "\n# Reference\n\n- [Rust API]({API_PAGE})\n");
    for page in rest {
        let _ = write!(summary, "- {}", line(page)?);
    }
    Ok(summary)
}

/// The page that leads to rustdoc's pages.
fn api_page(packages: &[Package]) -> Result<String> {
    let mut page = String::from(
        "# Rust API\n\nrustdoc's pages of each crate. They have a search of their own. A program that uses pushgate\n\
         begins with the crate `pushgate`.\n\n| crate | what it is |\n| --- | --- |\n",
    );
    for package in packages {
        let Package { name, description, .. } = package;
        let description = description.trim_start_matches("pushgate: ");
        let Some(folder) = package.rustdoc_folder() else { continue };
        let _ = writeln!(page, "| [{name}]({RUSTDOC}/{folder}/index.html) | {description} |");
    }
    Ok(page)
}

/// A page that shows a file's text.
fn file_page(file: &Path, text: &str) -> String {
    let name = escaped(&file.display().to_string());
    let home = files::relative(shown(file).parent().unwrap_or(Path::new("")), Path::new("index.html"));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{name} - pushgate</title>\n</head>\n<body>\n\
         <p><a href=\"{}\">pushgate</a>: <b>{name}</b></p>\n<pre>{}</pre>\n</body>\n</html>\n",
        home.display(),
        escaped(text)
    )
}

/// The names in a folder, one a line.
fn listing(folder: &Path) -> Result<String> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        let slash = if entry.file_type()?.is_dir() { "/" } else { "" };
        names.push(format!("{}{slash}\n", entry.file_name().to_string_lossy()));
    }
    names.sort();
    Ok(names.concat())
}

fn lossy(file: &Path) -> Result<String> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// A sentence for each reference of the site's pages that leads nowhere. rustdoc's pages, which rustdoc checks, are
/// targets alone.
fn dead_references(site: &Path) -> Result<Vec<String>> {
    let mut texts = BTreeMap::new();
    let pages = files::with_extension(site, "html")?;
    for page in pages.into_iter().filter(|page| !page.starts_with(RUSTDOC)) {
        let text = files::read(site, &page)?;
        texts.insert(page, text);
    }
    let ids: BTreeMap<&PathBuf, BTreeSet<&str>> = texts
        .iter()
        .map(|(page, text)| {
            (page, markdown::values(text, " id=\"").into_iter().map(|id| &text[id]).collect())
        })
        .collect();
    let mut dead = Vec::new();
    for (page, text) in &texts {
        let references =
            [" href=\"", " src=\""].iter().flat_map(|attribute| markdown::values(text, attribute));
        for reference in references.map(|range| text[range].replace("&amp;", "&")) {
            if markdown::is_external(&reference) {
                continue;
            }
            let found = markdown::resolve(page, &reference).is_some_and(|(file, fragment)| {
                let has = |fragment: &String| {
                    ids.get(&file).is_none_or(|ids| ids.contains(fragment.as_str()) || fragment.is_empty())
                };
                site.join(&file).is_file() && fragment.as_ref().is_none_or(has)
            });
            if !found {
                dead.push(format!("{}: {reference}", page.display()));
            }
        }
    }
    if texts.len() < 2 {
        bail!("mdBook has written no page to {}", site.display());
    }
    dead.dedup();
    Ok(dead)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_pages() -> BTreeMap<PathBuf, String> {
        let page = |(name, text): (&str, &str)| (PathBuf::from(name), text.to_string());
        [
            ("README.md", "# pushgate\n"),
            ("CONTRIBUTING.md", "# Contributing\n"),
            ("docs/README.md", "# Documents\n"),
            ("docs/architecture.md", "<!-- made -->\n# The `architecture`\n"),
            ("docs/of-nobody.md", "# New [page]\n"),
        ]
        .map(page)
        .into()
    }

    #[test]
    fn the_list_follows_the_order_and_has_every_page() {
        let wanted = "# Summary\n\n[pushgate](index.md)\n\
                      \n# Use\n\n- [Documents](docs/index.md)\n\
                      \n# How it works\n\n- [The architecture](docs/architecture.md)\n\
                      \n# Project\n\n- [Contributing](CONTRIBUTING.md)\n\
                      \n# Reference\n\n- [Rust API](rust-api.md)\n- [New page](docs/of-nobody.md)\n";
        assert_eq!(summary(&some_pages()).unwrap(), wanted);
        let mut pages = some_pages();
        pages.insert("docs/a.md".into(), "no heading\n".into());
        let error = summary(&pages).unwrap_err().to_string();
        assert!(error.contains("docs/a.md has no heading"), "{error}");
    }

    #[test]
    fn links_lead_to_the_places_of_the_site() {
        let root = std::env::temp_dir().join(format!("xtask-site-{}", std::process::id()));
        for folder in ["docs", "src"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let mut linked = BTreeSet::new();
        let mut rewritten = |page: &str, text: &str| {
            with_links_of_the_site(&root, &some_pages(), Path::new(page), text, &mut linked)
        };
        assert_eq!(
            rewritten(
                "README.md",
                "[a](docs/architecture.md#b) [c](docs) [d](#e) [f](https://g.h) [i](LICENSE)"
            ),
            "[a](docs/architecture.md#b) [c](docs/index.md) [d](#e) [f](https://g.h) [i](files/LICENSE.html)"
        );
        assert_eq!(
            rewritten(
                "docs/architecture.md",
                "[a](../README.md#b) ![c](d.svg) [e](../src/lib.rs) [f](../src) `[g](h)`"
            ),
            "[a](../index.md#b) ![c](d.svg) [e](../files/src/lib.rs.html) [f](../files/src.html) `[g](h)`"
        );
        fs::remove_dir_all(&root).unwrap();
        let wanted = ["LICENSE", "docs/d.svg", "src", "src/lib.rs"].map(PathBuf::from);
        assert_eq!(linked, wanted.into());
    }

    #[test]
    fn the_text_of_a_file_is_no_markup() {
        let page = file_page(Path::new("src/a.rs"), "if a < b && c { \"d\" }");
        assert!(page.contains("<pre>if a &lt; b &amp;&amp; c { &quot;d&quot; }</pre>"), "{page}");
        assert!(page.contains("<a href=\"../../index.html\">") && page.contains("<b>src/a.rs</b>"), "{page}");
    }

    #[test]
    fn the_repositorys_pages_make_a_book() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let book = std::env::temp_dir().join(format!("xtask-book-{}", std::process::id()));
        fs::create_dir(&book).unwrap();
        write_book(root, &[], &book).unwrap();
        let summary = fs::read_to_string(book.join("src/SUMMARY.md")).unwrap();
        for page in pages(root).unwrap().keys() {
            let place = place(page).display().to_string();
            assert!(summary.contains(&format!("({place})")), "{place} is not in the list:\n{summary}");
            assert!(book.join("src").join(&place).is_file(), "{place} is not there");
        }
        // The order names pages once.
        let mut named: Vec<_> = ORDER.iter().flat_map(|(_, pages)| *pages).collect();
        let all = named.len();
        named.sort();
        named.dedup();
        fs::remove_dir_all(&book).unwrap();
        assert_eq!(named.len(), all, "the order names a page twice");
    }

    #[test]
    fn a_reference_that_leads_nowhere_is_named() {
        let site = std::env::temp_dir().join(format!("xtask-references-{}", std::process::id()));
        let index = "<a href=\"docs/a.html#b\"> <a href=\"docs/a.html#c\"> <img src=\"d.svg\"> <a href=\"#\"> \
                     <a href=\"https://e.f\"> <a href=\"rust/g/index.html\">";
        files::put(&site.join("index.html"), index.as_bytes()).unwrap();
        files::put(&site.join("docs/a.html"), b"<h1 id=\"b\"> <a href=\"../index.html\">").unwrap();
        files::put(&site.join("rust/g/index.html"), b"<a href=\"none.html\">").unwrap();
        let dead = dead_references(&site).unwrap();
        fs::remove_dir_all(&site).unwrap();
        assert_eq!(dead, ["index.html: docs/a.html#c", "index.html: d.svg"]);
    }
}
