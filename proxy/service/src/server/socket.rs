//! The socket at which a proxy listens: its place, its privacy, and the removal of its file.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use pushgate_driver_shim::closing::PeerListener;
use rustix::fs::{FlockOperation, flock};

use crate::socket_file::{self, SocketFile};
use crate::wire;

/// Listens at `path`, or for `@name` at an abstract socket, for programs of this process's user and of root.
///
/// The directory of a path must be private (mode 0700, this process's user); a directory that does not exist is made.
/// The socket of a proxy that died is replaced; where a proxy still listens, the error is an `AddrInUse`. An abstract
/// socket can be reached by any user (and [`serve`](super::serve) refuses other users), and any user can take its name
/// first.
pub fn bind(path: &Path) -> io::Result<(PeerListener, SocketFile)> {
    bind_with(path, private, None)
}

/// Listens as [`bind`] does, for programs of other users too: every user that may enter the directory can connect, and
/// [`serve`](super::serve) says who is admitted.
///
/// The directory must be this process's user's or root's, and nobody else may write there: a user that can may put a socket in
/// the place of this one; some other user must be able to enter. A directory that does not exist is made with mode 0755.
pub fn bind_for_users(path: &Path) -> io::Result<(PeerListener, SocketFile)> {
    bind_with(path, entered, Some(0o666))
}

fn bind_with(
    path: &Path,
    directory: fn(&Path) -> io::Result<fs::File>,
    mode: Option<u32>,
) -> io::Result<(PeerListener, SocketFile)> {
    let at = path.display();
    if let Some(name) = wire::abstract_name(path) {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?).map_err(|e| {
            if e.kind() == ErrorKind::AddrInUse { live(path) } else { told(e, format_args!("binding {at}")) }
        })?;
        return Ok((listener.into(), SocketFile::none()));
    }
    let dir = match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() => Path::new("."),
        Some(dir) => dir,
        None => return Err(io::Error::new(ErrorKind::InvalidInput, format!("{at} names no socket"))),
    };
    let directory = directory(dir)?;
    // Of two proxies that start at once, neither must take the other's new socket for a dead one.
    flock(&directory, FlockOperation::LockExclusive)?;
    clear(path)?;
    let listener = UnixListener::bind(path).map_err(|e| told(e, format_args!("binding {at}")))?;
    if let Some(mode) = mode {
        // Nobody else can have put another file there: the directory is ours or root's, and only its owner writes there.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(|e| told(e, format_args!("chmod {mode:o} of {at}")))?;
    }
    Ok((listener.into(), SocketFile::at(path)?))
}

/// Opens a directory; makes the directory with this mode if it does not exist.
fn open(dir: &Path, mode: u32) -> io::Result<(fs::File, fs::Metadata)> {
    match fs::DirBuilder::new().mode(mode).create(dir) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            return Err(told(e, format_args!("making {}", dir.display())));
        }
        _ => {}
    }
    let handle = fs::File::open(dir).map_err(|e| told(e, format_args!("opening {}", dir.display())))?;
    let meta = handle.metadata()?;
    Ok((handle, meta))
}

/// Opens a directory that other users may enter and not write; makes the directory if it does not exist.
fn entered(dir: &Path) -> io::Result<fs::File> {
    let (handle, meta) = open(dir, 0o755)?;
    let uid = rustix::process::geteuid().as_raw();
    // In a user namespace a number may stand for many users. Here the owner alone may make a socket, so one is made by the owner.
    let ours = meta.uid() == uid || meta.uid() == 0;
    if meta.is_dir() && ours && meta.mode() & 0o022 == 0 && meta.mode() & 0o011 != 0 {
        return Ok(handle);
    }
    let text = format!(
        "{} must be a directory of user {uid} or of root that others may enter and not write, mode 0755, or 0750 for one \
         group (it is user {}'s, mode {:o}), because programs of other users look for the proxy there: chmod it, or name \
         another",
        dir.display(),
        meta.uid(),
        meta.mode() & 0o7777
    );
    Err(io::Error::new(ErrorKind::PermissionDenied, text))
}

/// Opens a directory that only this process's user may enter; makes the directory if it does not exist.
fn private(dir: &Path) -> io::Result<fs::File> {
    let (handle, meta) = open(dir, 0o700)?;
    let uid = rustix::process::geteuid().as_raw();
    // As in `entered`: in a directory of another user with the same number no socket can be made.
    if !meta.is_dir() || meta.uid() != uid || meta.mode() & 0o077 != 0 {
        let text = format!(
            "{} must be a directory of user {uid} with mode 0700 (it is user {}'s, mode {:o}), because a user who \
             reaches the socket there can hand the proxy work: chmod it, or name another",
            dir.display(),
            meta.uid(),
            meta.mode() & 0o7777
        );
        return Err(io::Error::new(ErrorKind::PermissionDenied, text));
    }
    Ok(handle)
}

/// Makes a path free for a new socket: removes the socket of a proxy that has ended, and nothing else.
fn clear(path: &Path) -> io::Result<()> {
    let at = path.display();
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            let text = format!("{at} is there and no socket: name another path");
            Err(io::Error::new(ErrorKind::AlreadyExists, text))
        }
        Ok(_) => match socket_file::remove_dead(path) {
            Ok(true) => {
                tracing::info!("removed the socket of a proxy that is gone: {at}");
                Ok(())
            }
            Ok(false) => Err(live(path)),
            Err(e) => Err(told(e, format_args!("looking whether a proxy listens at {at}"))),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(told(e, format_args!("looking at {at}"))),
    }
}

/// The error where another proxy listens.
fn live(path: &Path) -> io::Error {
    let at = path.display();
    let text = format!("a proxy listens at {at} already: use that one, end it, or name another socket");
    io::Error::new(ErrorKind::AddrInUse, text)
}

/// The error with what was being done.
fn told(e: io::Error, what: std::fmt::Arguments<'_>) -> io::Error {
    io::Error::new(e.kind(), format!("{what}: {e}"))
}
