//! Files of the repository: finding them, writing them, and comparing a committed file with what a task makes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

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
            println!("{file} agrees with {source}");
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

#[cfg(test)]
mod tests {
    use super::*;

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
