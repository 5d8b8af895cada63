//! The file of a Unix socket: whether a process has the socket still, and the file's removal.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pushgate_driver_shim::fork::OwnedHere;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Removes the socket's file when it is dropped, if the file is still the one that was made.
///
/// A child of `fork` leaves the file alone.
#[derive(Debug)]
pub struct SocketFile {
    _named: OwnedHere<Named>,
}

impl SocketFile {
    /// That of an abstract name: there is none.
    pub(crate) fn none() -> SocketFile {
        SocketFile { _named: OwnedHere::new(Named(None)) }
    }

    /// That of a socket which was made at `path`.
    pub(crate) fn at(path: &Path) -> io::Result<SocketFile> {
        Ok(SocketFile { _named: OwnedHere::new(Named(Some((path.to_path_buf(), FileId::of(path)?)))) })
    }
}

/// The path of a socket and the file that was made there; none for an abstract name.
#[derive(Debug)]
struct Named(Option<(PathBuf, FileId)>);

impl Drop for Named {
    fn drop(&mut self) {
        if let Some((path, id)) = &self.0 {
            id.remove(path);
        }
    }
}

/// Device, inode, and ctime in seconds and nanoseconds. The ctime is there because inode numbers are used again.
#[derive(Debug, PartialEq, Eq)]
struct FileId(u64, u64, i64, i64);

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        fs::symlink_metadata(path).map(|m| FileId(m.dev(), m.ino(), m.ctime(), m.ctime_nsec()))
    }

    /// Removes the file, unless another one took its place.
    fn remove(&self, path: &Path) {
        if FileId::of(path).is_ok_and(|found| found == *self) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether a process of this kernel has the socket of a file. The process does not notice.
pub(crate) fn is_alive(path: &Path) -> io::Result<bool> {
    // For a socket of another type the kernel says so before it connects, and for one that nobody has it says that first
    // (unix_find_bsd in net/unix/af_unix.c).
    let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(false),
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Removes the file of a socket that no process has. True if there is none of them at `path` now.
pub(crate) fn remove_dead(path: &Path) -> io::Result<bool> {
    let id = FileId::of(path)?;
    if is_alive(path)? {
        return Ok(false);
    }
    id.remove(path);
    Ok(true)
}
