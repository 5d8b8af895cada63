//! A folder of this user alone, for what a command's processes write.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// A folder that this user alone may look into.
pub struct Folder {
    path: PathBuf,
    /// Whether the folder is removed on drop.
    temporary: bool,
}

impl Folder {
    /// Makes the folder that was named, which is kept, or a temporary one for a subcommand.
    pub fn new(named: Option<&Path>, subcommand: &str) -> Result<Self> {
        let path = match named {
            Some(path) => std::path::absolute(path)?,
            None => std::env::temp_dir().join(format!("pushgate-{subcommand}-{}", std::process::id())),
        };
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("making the folder {}", path.display()))?;
        Ok(Self { path, temporary: named.is_none() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.temporary {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_folder_is_removed_and_one_that_was_named_is_kept() {
        let named = std::env::temp_dir().join(format!("pushgate-kept-{}", std::process::id()));
        let _ = fs::remove_dir_all(&named);
        drop(Folder::new(Some(&named), "folder-test").unwrap());
        assert!(named.is_dir());
        let again = Folder::new(Some(&named), "folder-test").err().unwrap();
        assert!(again.to_string().contains(&named.display().to_string()), "{again}");
        fs::remove_dir(&named).unwrap();
        let temporary = Folder::new(None, "folder-test").unwrap();
        let path = temporary.path().to_owned();
        fs::write(path.join("file"), "").unwrap();
        drop(temporary);
        assert!(!path.exists());
    }
}
