//! Files of the repository: finding them, writing them, and comparing a committed file with what a task makes.

use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::output::say;

/// The repository's files with this extension, as paths from the root, sorted. Hidden folders and cargo's target
/// folders are left out.
pub fn with_extension(root: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            let path = entry.path();
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            if entry.file_type()?.is_dir() {
                // Cargo puts the tag into each target folder, whatever the folder's name is.
                if !is_hidden && !path.join("CACHEDIR.TAG").exists() && !path.ends_with("target") {
                    folders.push(path);
                }
            } else if !is_hidden && path.extension().is_some_and(|found| found == extension) {
                found.push(path.strip_prefix(root)?.to_path_buf());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The text of a file of the repository.
pub fn read(root: &Path, file: impl AsRef<Path>) -> Result<String> {
    let file = file.as_ref();
    fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {}", file.display()))
}

/// Writes a file, and makes the folder that the file is in.
pub fn put(file: &Path, content: &[u8]) -> Result<()> {
    let folder = file.parent().expect("a file lies in a folder");
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}

/// Copies a folder with all that is below the folder.
pub fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| format!("cannot write {}", target.display()))?;
        }
    }
    Ok(())
}

/// A committed file that a task makes from something else.
pub struct Made<'a> {
    /// The file, from the repository root.
    pub file: &'a str,
    /// What the file is made from, for messages.
    pub source: &'a str,
    /// The task that writes the file.
    pub task: &'a str,
}

impl Made<'_> {
    /// Writes the file. With `check` writes nothing, and fails if the committed file has another text.
    pub fn write(&self, root: &Path, text: &str, check: bool) -> Result<()> {
        let Made { file, source, task } = self;
        if !check {
            return put(&root.join(file), text.as_bytes());
        }
        let committed = read(root, file)?;
        if committed == text {
            say!("{file} agrees with {source}");
            return Ok(());
        }
        let line = committed.lines().zip(text.lines()).take_while(|(a, b)| a == b).count();
        let of = |text: &str| text.lines().nth(line).unwrap_or("(the end)").to_string();
        bail!(
            "{file} does not agree with {source}; line {}:\n  committed  {}\n  generated  {}\nrun: {task}",
            line + 1,
            of(&committed),
            of(text)
        );
    }
}

/// The path without `.` and `..`; `None` if the path leads out of the folder that it starts from.
pub fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir if normal.pop() => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

/// The way from a folder to a file, both being normal paths from the same root.
pub fn relative(folder: &Path, file: &Path) -> PathBuf {
    let shared = folder.components().zip(file.components()).take_while(|(a, b)| a == b).count();
    let up = folder.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(file.components().skip(shared)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lose_their_dots_and_none_leads_out() {
        assert_eq!(normal(Path::new("docs/../src/./lib.rs")), Some("src/lib.rs".into()));
        assert_eq!(normal(Path::new("docs/..")), Some("".into()));
        assert_eq!(normal(Path::new("docs/../../other")), None);
        assert_eq!(normal(Path::new("/etc/passwd")), None);
    }

    #[test]
    fn the_way_from_a_folder_to_a_file_goes_up_only_where_they_differ() {
        let way = |folder, file| relative(Path::new(folder), Path::new(file)).display().to_string();
        assert_eq!(way("", "docs/a.md"), "docs/a.md");
        assert_eq!(way("docs", "docs/a.md"), "a.md");
        assert_eq!(way("docs", "README.md"), "../README.md");
        assert_eq!(way("files/src/bin", "files/docs/a.svg"), "../../docs/a.svg");
    }

    #[test]
    fn a_committed_file_that_differs_is_named_with_line_and_task() {
        let root = std::env::temp_dir().join(format!("xtask-made-{}", std::process::id()));
        let made = Made { file: "docs/page.md", source: "the source", task: "cargo xtask page" };
        made.write(&root, "one\ntwo\n", false).unwrap();
        made.write(&root, "one\ntwo\n", true).unwrap();
        let error = made.write(&root, "one\n2\n", true).unwrap_err().to_string();
        fs::remove_dir_all(&root).unwrap();
        for part in ["docs/page.md", "line 2", "committed  two", "generated  2", "run: cargo xtask page"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn hidden_folders_and_target_folders_are_left_out() {
        let root = std::env::temp_dir().join(format!("xtask-files-{}", std::process::id()));
        for file in
            ["b.md", "a/c.md", "a/c.rs", ".hidden/d.md", "target/e.md", "built/CACHEDIR.TAG", "built/f.md"]
        {
            put(&root.join(file), b"").unwrap();
        }
        let found = with_extension(&root, "md").unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [Path::new("a/c.md"), Path::new("b.md")]);
    }
}
