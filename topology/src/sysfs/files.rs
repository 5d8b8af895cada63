//! Reads small files below a root, with a note for everything that is wrong with them.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

/// The most bytes of a file that is read as text.
const LARGEST: u64 = 64 << 10;
/// The most bytes of a value of one line.
const LONGEST_WORD: usize = 256;
/// The most entries of a listing.
const MOST_ENTRIES: usize = 1 << 16;
/// The most notes that are kept.
const MOST_NOTES: usize = 100;

pub(super) struct Files {
    root: PathBuf,
    /// `root` with symbolic links resolved.
    real_root: Option<PathBuf>,
    notes: Vec<String>,
    dropped: usize,
}

/// A text as a note shows it: quoted, and shortened.
fn shown(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    if short.len() < text.len() { format!("{short:?}...") } else { format!("{short:?}") }
}

impl Files {
    pub(super) fn new(root: &Path) -> Self {
        let real_root = fs::canonicalize(root).ok();
        Self { root: root.to_owned(), real_root, notes: Vec::new(), dropped: 0 }
    }

    pub(super) fn note(&mut self, text: String) {
        if self.notes.len() < MOST_NOTES {
            self.notes.push(text);
        } else {
            self.dropped += 1;
        }
    }

    pub(super) fn into_notes(mut self) -> Vec<String> {
        if self.dropped > 0 {
            self.notes.push(format!("{}: {} more notes of the same kind", self.root.display(), self.dropped));
        }
        self.notes
    }

    fn failed(&mut self, path: &str, error: &std::io::Error) {
        let remedy =
            if error.kind() == ErrorKind::PermissionDenied { "; run as root to read it" } else { "" };
        self.note(format!("{path}: cannot be read: {error}{remedy}"));
    }

    /// Whether a path exists, following links.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The names in a folder, sorted. Names that are not plain text are left out, with a note.
    pub(super) fn list(&mut self, path: &str) -> Vec<String> {
        let entries = match fs::read_dir(self.root.join(path)) {
            Ok(entries) => entries,
            Err(e) => {
                if e.kind() != ErrorKind::NotFound {
                    self.failed(path, &e);
                }
                return Vec::new();
            }
        };
        let mut names = Vec::new();
        for entry in entries.take(MOST_ENTRIES).flatten() {
            match entry.file_name().into_string() {
                Ok(name) if !name.chars().any(char::is_control) => names.push(name),
                Ok(name) => self.note(format!("{path}: {} is no name", shown(&name))),
                Err(name) => self.note(format!("{path}: {} is no name", shown(&name.to_string_lossy()))),
            }
        }
        names.sort();
        names
    }

    /// The first `limit` bytes of a file. `None`, without a note, if there is no file.
    pub(super) fn bytes(&mut self, path: &str, limit: u64) -> Option<Vec<u8>> {
        let full = self.root.join(path);
        let mut bytes = Vec::new();
        let read = || {
            // A pipe or a device would make the reader wait.
            if !fs::metadata(&full)?.is_file() {
                return Err(std::io::Error::other("no regular file"));
            }
            File::open(&full)?.take(limit).read_to_end(&mut bytes)
        };
        match { read }() {
            Ok(_) => Some(bytes),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => None,
            // Attributes that a device does not have in its present state return this error.
            Err(e) if e.kind() == ErrorKind::InvalidInput => None,
            Err(e) => {
                self.failed(path, &e);
                None
            }
        }
    }

    /// A file as text, of at most 64 KiB; the rest is cut off.
    pub(super) fn text(&mut self, path: &str) -> Option<String> {
        let bytes = self.bytes(path, LARGEST)?;
        match String::from_utf8(bytes) {
            Ok(text) => Some(text),
            // The text was cut in the middle of a character, or is not text.
            Err(e) if e.utf8_error().error_len().is_none() => {
                Some(String::from_utf8_lossy(e.as_bytes()).into_owned())
            }
            Err(_) => {
                self.note(format!("{path}: holds no text"));
                None
            }
        }
    }

    /// A file of one short line. `None`, without a note, if the file is missing or empty.
    pub(super) fn word(&mut self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let word = text.trim();
        if word.is_empty() {
            return None;
        }
        if word.len() > LONGEST_WORD || word.chars().any(char::is_control) {
            self.note(format!("{path}: {} is no value of one line", shown(word)));
            return None;
        }
        Some(word.to_owned())
    }

    /// A file of one value, parsed by `parse`; a value that can't be parsed becomes a note.
    pub(super) fn parsed<T>(
        &mut self,
        path: &str,
        what: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let word = self.word(path)?;
        let value = parse(&word);
        if value.is_none() {
            self.note(format!("{path}: {} is no {what}", shown(&word)));
        }
        value
    }

    /// The real path of a file below the root. `None` if the file is missing; also `None`, with a
    /// note, if it is outside of the root or in a loop.
    pub(super) fn real(&mut self, path: &str) -> Option<PathBuf> {
        let real = match fs::canonicalize(self.root.join(path)) {
            Ok(real) => real,
            Err(e) => {
                self.note(format!("{path}: leads nowhere: {e}"));
                return None;
            }
        };
        match self.real_root.as_ref().and_then(|root| real.strip_prefix(root).ok()) {
            Some(below) => Some(below.to_owned()),
            None => {
                self.note(format!("{path}: leads out of {}", self.root.display()));
                None
            }
        }
    }

    /// The last part of a symbolic link's target: for `driver`, the driver's name. `None`, without
    /// a note, if there is no link.
    pub(super) fn link_name(&mut self, path: &str) -> Option<String> {
        let target = fs::read_link(self.root.join(path)).ok()?;
        let name = match target.components().next_back() {
            Some(Component::Normal(name)) => name.to_string_lossy().into_owned(),
            _ => String::new(),
        };
        if name.is_empty() || name.len() > LONGEST_WORD || name.chars().any(char::is_control) {
            self.note(format!("{path}: points to {}, which is no name", shown(&target.to_string_lossy())));
            return None;
        }
        Some(name)
    }
}
