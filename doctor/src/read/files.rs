//! Files of a host, each read as far as a bound. A file that can't be read becomes a sentence.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use crate::readings::Read;

/// What a file begins with that could not be read on the host; the reason follows.
pub(crate) const UNREADABLE: &[u8] = b"\0unreadable: ";

/// No file of sysfs or proc that is read whole is longer.
const LONGEST: u64 = 1 << 20;

/// What became of asking for a file.
pub(super) fn failed<T>(path: &Path, error: &std::io::Error) -> Read<T> {
    match error.kind() {
        ErrorKind::NotFound => Read::Absent,
        ErrorKind::NotADirectory => Read::Absent,
        _ => Read::Unreadable(format!("{} can't be read: {error}", path.display())),
    }
}

/// Opens a file to read. A pipe or a device in a tree that was kept would hold us up.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    match std::fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(std::io::Error::other("no regular file")),
    }
}

/// A file's bytes, the first MiB.
pub(crate) fn binary(path: &Path) -> Read<Vec<u8>> {
    let mut bytes = Vec::new();
    match open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes)) {
        Ok(_) => match bytes.strip_prefix(UNREADABLE) {
            Some(why) => kept_unreadable(path, why),
            None => Read::Is(bytes),
        },
        Err(error) => failed(path, &error),
    }
}

/// A file of an archive that could not be read on the host.
pub(super) fn kept_unreadable<T>(path: &Path, why: &[u8]) -> Read<T> {
    let why = String::from_utf8_lossy(why);
    Read::Unreadable(format!("{} can't be read: {}", path.display(), why.trim_end()))
}

/// A file's text without space around it.
pub(super) fn text(path: &Path) -> Read<String> {
    binary(path).then(|bytes| match String::from_utf8(bytes) {
        Ok(text) => Ok(text.trim().to_string()),
        Err(_) => Err(format!("{} is no text", path.display())),
    })
}

/// A file that holds one number.
pub(super) fn number<T: std::str::FromStr>(path: &Path) -> Read<T> {
    text(path).then(|text| {
        let short: String = text.chars().take(40).collect();
        text.parse().map_err(|_| format!("{} holds `{short}`, which is no number in range", path.display()))
    })
}

/// The names in a folder, in order; none if it can't be read.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}
