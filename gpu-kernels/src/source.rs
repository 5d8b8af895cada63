//! A user's source: its text, the kernels that it names, and everything that its compiled form depends
//! on.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use pushgate_driver_shim::file::read_text;

use crate::build_support::kernel_names;
use crate::cache::Key;
use crate::embedded::HEADERS;
use crate::error::{DeviceError, Result};

/// A user's own `.cu` source over the device API. It includes "pushgate/device.cuh" and has at
/// least one `PUSHGATE_KERNEL(name, params)`.
#[derive(Clone, Debug)]
pub struct Source {
    name: String,
    text: String,
    /// The folder in which the source's own `#include "..."` files are looked for.
    dir: Option<PathBuf>,
}

impl Source {
    /// Makes a source from a text in memory; errors call it `name`.
    pub fn text(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into(), dir: None }
    }

    /// Reads a source file now. Files that it includes with quotes are found beside it.
    pub fn path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |source| DeviceError::Io { what: "read the source", path: path.to_owned(), source };
        let text = read_text(path).map_err(io)?;
        let whole = path.canonicalize().map_err(io)?;
        Ok(Self { name: path.display().to_string(), text, dir: whole.parent().map(Path::to_owned) })
    }

    /// The name that errors use for the source.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn body(&self) -> &str {
        &self.text
    }

    pub(crate) fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The kernels that the source's text names.
    pub fn kernels(&self) -> Vec<String> {
        kernel_names(&self.text)
    }

    /// Adds to a key everything that the compiled form depends on: the text, the headers of the
    /// device API, and all headers of the user's that it includes, directly or not.
    pub(crate) fn add_to(&self, key: &mut Key) {
        key.add(self.name.as_bytes());
        key.add(self.text.as_bytes());
        for (name, text) in HEADERS {
            key.add(name.as_bytes());
            key.add(text.as_bytes());
        }
        if let Some(dir) = &self.dir {
            key.add(dir.as_os_str().as_encoded_bytes());
            add_includes(key, dir, dir, &self.text, &mut HashSet::new());
        }
    }
}

/// Adds the files that `text` includes. `root` is the folder of the source, `dir` the folder of the
/// including file: compilers look in both.
fn add_includes(key: &mut Key, root: &Path, dir: &Path, text: &str, seen: &mut HashSet<PathBuf>) {
    for line in text.lines() {
        let Some(rest) = line.trim_start().strip_prefix('#') else { continue };
        let Some(rest) = rest.trim_start().strip_prefix("include") else { continue };
        let Some(name) = rest.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next()) else {
            continue;
        };
        for path in [dir.join(name), root.join(name)] {
            if !seen.insert(path.clone()) {
                continue;
            }
            let Ok(text) = read_text(&path) else { continue };
            key.add(path.as_os_str().as_encoded_bytes());
            key.add(text.as_bytes());
            add_includes(key, root, path.parent().unwrap_or(root), &text, seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cache::tests::Folder;

    fn key_of(source: &Source) -> String {
        let mut key = Key::new("test");
        source.add_to(&mut key);
        key.hex()
    }

    #[test]
    fn kernels_are_found_in_a_text() {
        let text = "PUSHGATE_KERNEL(b, P)\n#define X(n) PUSHGATE_KERNEL(n, P)\n// kernels: c a\nPUSHGATE_KERNEL(n##_x, P)";
        assert_eq!(kernel_names(text), ["a", "b", "c"]);
    }

    #[test]
    fn a_changed_header_changes_the_key() {
        let folder = Folder::new("key");
        fs::write(folder.0.join("k.cu"), "#include \"a.h\"\n").unwrap();
        fs::write(folder.0.join("a.h"), "# include \"b.h\"\n").unwrap();
        fs::write(folder.0.join("b.h"), "1").unwrap();
        let before = key_of(&Source::path(folder.0.join("k.cu")).unwrap());
        assert_eq!(before, key_of(&Source::path(folder.0.join("k.cu")).unwrap()));
        fs::write(folder.0.join("b.h"), "2").unwrap();
        assert_ne!(before, key_of(&Source::path(folder.0.join("k.cu")).unwrap()));
    }
}
