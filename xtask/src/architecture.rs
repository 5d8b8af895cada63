//! The check of docs/architecture.md, the page that says where things are: each path that the page names exists, and the
//! page names the folder of each crate.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::files;
use crate::markdown;
use crate::paths::Paths;
use crate::workspace;

const PAGE: &str = "docs/architecture.md";

/// The folder that stands for the crate of the repository's root.
const LIBRARY: &str = "src";

/// The paths among a page's code spans, without a slash at the end: what has a slash, and names of source files. A path
/// that begins with a slash is one of the host.
fn paths(text: &str) -> BTreeSet<String> {
    let is_source = |span: &str| [".rs", ".c", ".h", ".cuh"].iter().any(|end| span.ends_with(end));
    let is_path = |span: &String| {
        (span.contains('/') || is_source(span))
            && !span.starts_with('/')
            && !span.contains(char::is_whitespace)
    };
    let named = markdown::code(text).into_iter().filter(is_path);
    named.map(|path| path.trim_end_matches('/').to_string()).collect()
}

/// A sentence for each path that the page names and that does not exist, and for each crate that the page does not name.
fn faults(root: &Path, text: &str, crates: &[PathBuf]) -> Vec<String> {
    let named = paths(text);
    let exists = |path: &String| files::normal(Path::new(path)).is_some_and(|path| root.join(path).exists());
    let dead = named.iter().filter(|path| !exists(path));
    let dead = dead.map(|path| format!("{PAGE} names `{path}`, which is no path from the repository's root"));
    let folder = |folder: &PathBuf| match folder.to_string_lossy() {
        root if root.is_empty() => LIBRARY.to_string(),
        folder => folder.into_owned(),
    };
    let lacking = crates.iter().map(folder).filter(|folder| !named.contains(folder));
    let lacking = lacking
        .map(|folder| format!("{PAGE} does not name the crate `{folder}/`: add it to the table of crates"));
    dead.chain(lacking).collect()
}

#[test]
fn each_path_of_the_architecture_exists_and_each_crate_is_named() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
    let text = files::read(&root, PAGE).unwrap();
    let paths_of_tasks = Paths { target: root.join("target"), root: root.clone() };
    let packages = workspace::packages(&paths_of_tasks).unwrap();
    let crates: Vec<_> = packages.into_iter().map(|package| package.folder).collect();
    // The check is of use only if paths and crates are found.
    assert!(
        paths(&text).len() >= 50 && crates.len() >= 10,
        "{} paths, {} crates",
        paths(&text).len(),
        crates.len()
    );
    let faults = faults(&root, &text, &crates);
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn a_path_that_does_not_exist_and_a_crate_that_is_not_named_are_faults() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = "`xtask/` and `xtask/src/main.rs`, `/proc/1/fd`, `cargo a/b`, `recv`, `src/`\n```\n`in/a/fence.rs`\n```\n\
                `main.rs` `abi.h` `xtask/src/none.rs` `../other/`";
    let crates = ["", "xtask", "proxy/core"].map(PathBuf::from);
    let wanted = [
        "docs/architecture.md names `../other`, which is no path from the repository's root",
        "docs/architecture.md names `abi.h`, which is no path from the repository's root",
        "docs/architecture.md names `main.rs`, which is no path from the repository's root",
        "docs/architecture.md names `xtask/src/none.rs`, which is no path from the repository's root",
        "docs/architecture.md does not name the crate `proxy/core/`: add it to the table of crates",
    ];
    assert_eq!(faults(root, text, &crates), wanted);
}
