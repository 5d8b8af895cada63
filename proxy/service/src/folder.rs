//! A folder that containers of one host have in common. Processes of different network namespaces do not see each other's abstract
//! names, so they meet at sockets in the folder. A socket joins two processes of one kernel alone, so the process that is met is on this host.
//!
//! Who connects still looks at the other end's user: the folder keeps others from taking a socket away, and from nothing else.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use pushgate_driver_shim::closing::{PeerListener, PeerStream};
use pushgate_driver_shim::users::{is_ours, is_ours_or_root, remark};
use rustix::fs::{Access, access};

use crate::socket_file::{self, SocketFile};
use crate::wire;

/// What to do where processes of one host do not find each other's sockets.
pub const BESIDE: &str = "containers and pods with networks of their own do not find each other's sockets; mount one \
     folder of the host into both and name it in PUSHGATE_LOCAL_FOLDER (local-folder) on both";

/// How the name of each socket begins.
const PREFIX: &str = "pushgate-";
/// The longest name of a socket, after what all such names begin with.
pub const LONGEST: usize = 40;
/// The longest path of a socket: `sun_path` of unix(7) has 108 bytes, and a zero ends it.
const PATH: usize = 107;
/// How many files of a folder are looked at for sockets of processes that were killed.
const SWEPT: usize = 4096;
/// A younger file may be one that a process is about to listen at.
const AGE: Duration = Duration::from_secs(10);

/// A folder in which processes of this host meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(PathBuf);

impl Folder {
    /// The folder that a setting names, if it names one: `none` is none.
    pub fn of_setting(path: &Path) -> Result<Option<Folder>, String> {
        (path != Path::new("none")).then(|| Folder::open(path)).transpose()
    }

    /// The folder at a path. It must exist, and be one in which nobody else removes or replaces this user's files. Removes sockets
    /// there that this user's processes left when they were killed. An error says what is wrong and what to do.
    pub fn open(path: &Path) -> Result<Folder, String> {
        if !path.is_absolute() {
            return Err("an absolute path: each container may have its own working directory".into());
        }
        let most = PATH - 1 - PREFIX.len() - LONGEST;
        if path.as_os_str().len() > most {
            return Err(format!("a path of at most {most} bytes, for a socket's path has at most {PATH}"));
        }
        let meta = fs::metadata(path).map_err(|e| format!("a folder that exists ({e})"))?;
        let others_write = meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0;
        if !meta.is_dir() || !is_ours_or_root(meta.uid()) || others_write {
            return Err(format!(
                "a folder of this user or of root, in which no other user removes sockets (it is {} of user {}{}, mode {:o}): \
                 chmod go-w it, or chmod +t where all users write to it",
                if meta.is_dir() { "one" } else { "no folder, but a file" },
                meta.uid(),
                remark(meta.uid()),
                meta.mode() & 0o7777
            ));
        }
        access(path, Access::WRITE_OK | Access::EXEC_OK)
            .map_err(|e| format!("a folder in which this process can make sockets ({e})"))?;
        let folder = Folder(path.into());
        folder.sweep();
        Ok(folder)
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("{PREFIX}{name}"))
    }

    /// Listens at a name, which has no `/` and at most [`LONGEST`] bytes. The file goes when it is dropped. Where another process
    /// listens the error is an `AddrInUse`.
    pub fn listen(&self, name: &str) -> io::Result<(PeerListener, SocketFile)> {
        let path = self.socket(name);
        let listener = match UnixListener::bind(&path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse && socket_file::remove_dead(&path)? => {
                UnixListener::bind(&path)?
            }
            bound => bound?,
        };
        let file = SocketFile::at(&path)?;
        listener.set_nonblocking(true)?;
        Ok((listener.into(), file))
    }

    /// Connects to the process that listens at a name, as [`wire::dial`] does.
    pub fn dial(&self, name: &str, deadline: Instant) -> io::Result<PeerStream> {
        wire::dial(&self.socket(name), deadline)
    }

    /// Removes sockets of processes that were killed.
    fn sweep(&self) {
        let Ok(files) = fs::read_dir(&self.0) else { return };
        let named =
            |file: &fs::DirEntry| file.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        for file in files.flatten().take(SWEPT).filter(named) {
            let Ok(meta) = file.path().symlink_metadata() else { continue };
            let age = meta.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
            let old = age.is_some_and(|age| age > AGE);
            if meta.file_type().is_socket() && is_ours(meta.uid()) && old {
                // One that can't be looked at stays.
                let _ = socket_file::remove_dead(&file.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use pushgate_tests::hang;

    use super::*;

    /// A folder of a test's own.
    struct Made(PathBuf);

    impl Drop for Made {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn made(test: &str) -> Made {
        let path = std::env::temp_dir().join(format!("pushgate-{test}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Made(path)
    }

    fn folder(test: &str) -> (Made, Folder) {
        let made = made(test);
        let folder = Folder::open(&made.0).unwrap();
        (made, folder)
    }

    fn names(folder: &Folder) -> Vec<String> {
        let name = |file: io::Result<fs::DirEntry>| file.unwrap().file_name().into_string().unwrap();
        fs::read_dir(folder.path()).unwrap().map(name).collect()
    }

    #[test]
    fn who_listens_is_dialled_and_the_file_goes_with_the_listener() {
        let (_made, folder) = folder("listens");
        let (listener, file) = folder.listen("a").unwrap();
        folder.dial("a", Instant::now() + hang()).unwrap();
        assert!(listener.accept().is_ok());
        let twice = folder.listen("a").unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::AddrInUse);
        drop((listener, file));
        assert_eq!(names(&folder), [""; 0]);
        assert!(folder.dial("a", Instant::now()).is_err());
    }

    #[test]
    fn the_socket_of_a_process_that_was_killed_is_replaced_and_old_ones_are_swept() {
        let (_made, folder) = folder("killed");
        // The file stays, as after SIGKILL.
        let leave = |name: &str| drop(UnixListener::bind(folder.socket(name)).unwrap());
        leave("a");
        let (listener, _file) = folder.listen("a").unwrap();
        folder.dial("a", Instant::now() + hang()).unwrap();
        assert!(listener.accept().is_ok());
        leave("young");
        leave("old");
        fs::write(folder.path().join("other"), "").unwrap();
        let age = |name: &str| {
            // std sets no time of a socket, which it can't open.
            let path = folder.socket(name);
            let then = rustix::fs::Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };
            let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
            rustix::fs::utimensat(rustix::fs::CWD, &path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
                .unwrap();
        };
        ["old", "a"].iter().for_each(|name| age(name));
        Folder::open(folder.path()).unwrap();
        let mut left = names(&folder);
        left.sort();
        assert_eq!(left, ["other", "pushgate-a", "pushgate-young"]);
        // Who listens has noticed nothing.
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn p8_a_folder_where_others_take_sockets_away_is_refused_with_the_remedy() {
        let made = made("modes");
        let open = |mode| {
            fs::set_permissions(&made.0, fs::Permissions::from_mode(mode)).unwrap();
            Folder::open(&made.0)
        };
        for mode in [0o700, 0o755, 0o1777] {
            assert!(open(mode).is_ok(), "{mode:o}");
        }
        for mode in [0o777, 0o770] {
            let why = open(mode).unwrap_err();
            assert!(why.contains(&format!("mode {mode:o}")) && why.contains("chmod +t"), "{why}");
        }
        for (path, says) in [
            ("relative", "an absolute path"),
            ("/no/such/folder", "a folder that exists (No such file"),
            ("/etc/passwd", "no folder, but a file"),
            (&format!("/{}", "x".repeat(60)), "at most 57 bytes"),
        ] {
            let why = Folder::open(Path::new(path)).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
