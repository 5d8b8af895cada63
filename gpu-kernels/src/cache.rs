//! The cache of modules that were compiled from users' sources.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::users::is_ours;

use crate::embedded::HEADERS;
use crate::error::{DeviceError, Result};

/// The name of a compiled form, computed from everything that went into it: FNV-1a over 128 bits.
/// The cache is private to its user, so no other user can forge a collision.
pub(crate) struct Key(u128);

impl Key {
    pub(crate) fn new(kind: &str) -> Self {
        let mut key = Self(0x6c62272e07bb014262b821756295c58d);
        key.add(kind.as_bytes());
        key
    }

    /// Adds one part. Its length is added too, which keeps ("ab", "c") and ("a", "bc") apart.
    pub(crate) fn add(&mut self, part: &[u8]) {
        for byte in (part.len() as u64).to_le_bytes().iter().chain(part) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }

    pub(crate) fn hex(&self) -> String {
        format!("{:032x}", self.0)
    }
}

/// A folder of compiled modules. Only this user may be able to write to it, because modules found
/// there are loaded and run.
pub(crate) struct Cache {
    dir: PathBuf,
    /// This process has made the folder, under a name that nobody guesses.
    made_here: bool,
}

/// What others can do to files.
const OTHERS_WRITE: u32 = 0o022;

impl Cache {
    /// Opens `$XDG_CACHE_HOME/pushgate` or `~/.cache/pushgate`. If neither can be a private folder,
    /// makes a folder of this process under the temporary folder.
    pub(crate) fn open() -> Result<Self> {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let home = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        if let Some(dir) = home.map(|home| home.join("pushgate")) {
            match Self::at(dir) {
                Ok(cache) => return Ok(cache),
                Err(error) => tracing::debug!("no lasting cache of compiled modules: {error}"),
            }
        }
        static PRIVATE: OnceLock<PathBuf> = OnceLock::new();
        let dir = PRIVATE.get_or_init(|| {
            let random = RandomState::new().hash_one(std::process::id());
            std::env::temp_dir().join(format!("pushgate-{}-{random:016x}", std::process::id()))
        });
        Self::of(dir.clone(), true)
    }

    /// Opens the cache at `dir`; makes the folder if it is not there.
    pub(crate) fn at(dir: PathBuf) -> Result<Self> {
        Self::of(dir, false)
    }

    fn of(dir: PathBuf, made_here: bool) -> Result<Self> {
        let io = |source| DeviceError::Io {
            what: "use as a cache of compiled modules",
            path: dir.clone(),
            source,
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(io)?;
        let found = fs::symlink_metadata(&dir).map_err(io)?;
        let cache = Self { dir: dir.clone(), made_here };
        if !found.is_dir() || !cache.is_private(&found) {
            let reason = "it must be a folder of this user that no other can write (chmod 700)";
            return Err(io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, reason)));
        }
        Ok(cache)
    }

    /// Whether a file or folder is this user's, and no other one can write to it.
    fn is_private(&self, found: &fs::Metadata) -> bool {
        let own = rustix::process::geteuid().as_raw();
        (is_ours(found.uid()) || self.made_here && found.uid() == own) && found.mode() & OTHERS_WRITE == 0
    }

    /// Whether there is a file that this user has put there. Where others could once write to the folder there may be files of theirs.
    fn has(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && self.is_private(&found))
    }

    /// Returns the file for `key`; calls `compile` to write it if it is not there yet. Two
    /// processes that compile the same source at once both succeed, because a whole file is renamed
    /// into place.
    pub(crate) fn get(
        &self,
        key: &Key,
        extension: &str,
        compile: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.dir.join(format!("{}.{extension}", key.hex()));
        if self.has(&path) {
            return Ok(path);
        }
        let temporary = self.temporary(extension);
        let written = compile(&temporary).and_then(|()| {
            // Compilers go by the umask, which may let a group write.
            let private = fs::metadata(&temporary).and_then(|found| {
                let mode = found.mode() & !OTHERS_WRITE;
                fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))
            });
            private.and_then(|()| fs::rename(&temporary, &path)).map_err(|source| DeviceError::Io {
                what: "put a compiled module into its place",
                path: path.clone(),
                source,
            })
        });
        if written.is_err() {
            // The file may not exist; the first error is the one that counts.
            let _ = fs::remove_file(&temporary);
        }
        written.map(|()| path)
    }

    /// A name that no other thread or process uses.
    pub(crate) fn temporary(&self, extension: &str) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let random = RandomState::new().hash_one(n);
        self.dir.join(format!("tmp-{}-{n}-{random:016x}.{extension}", std::process::id()))
    }

    /// The folder to pass with `-I`: the headers of the device API, written once.
    pub(crate) fn headers(&self) -> Result<PathBuf> {
        let mut key = Key::new("headers");
        for (name, text) in HEADERS {
            key.add(name.as_bytes());
            key.add(text.as_bytes());
        }
        let dir = self.dir.join(format!("headers-{}", key.hex()));
        let inner = dir.join("pushgate");
        let io = |what, path: &Path, source| DeviceError::Io { what, path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&inner).map_err(|e| io("make", &inner, e))?;
        for (name, text) in HEADERS {
            let path = dir.join(name);
            if self.has(&path) {
                continue;
            }
            let temporary = self.temporary("h");
            let write = |path| {
                fs::write(path, text)?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o644))
            };
            write(&temporary).map_err(|e| io("write a header", &temporary, e))?;
            fs::rename(&temporary, &path).map_err(|e| io("put a header into its place", &path, e))?;
        }
        Ok(dir)
    }
}

/// A file that is removed on drop.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use pushgate_tests::users::{STRANGER, as_user, is_root};

    use super::*;

    /// A folder for one test, removed at its end.
    pub(crate) struct Folder(pub(crate) PathBuf);

    impl Folder {
        pub(crate) fn new(name: &str) -> Self {
            let random = RandomState::new().hash_one(name);
            let dir = std::env::temp_dir().join(format!("pushgate-test-{name}-{random:016x}"));
            DirBuilder::new().mode(0o700).create(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_cache_that_others_can_write_is_refused() {
        let folder = Folder::new("perm");
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Cache::at(folder.0.clone()).err().unwrap().to_string();
        assert!(error.contains("chmod 700"), "{error}");
    }

    #[test]
    fn p8_a_cache_of_another_user_is_refused_and_files_that_others_own_or_can_write_are_compiled_again() {
        if !is_root("a cache of another user") {
            return;
        }
        let folder = Folder::new("owner");
        let chown = |path: &Path, user| std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
        chown(&folder.0, STRANGER);
        let error = Cache::at(folder.0.clone()).err().unwrap().to_string();
        assert!(error.contains("a folder of this user"), "{error}");
        let link = folder.0.with_extension("link");
        chown(&folder.0, 0);
        std::os::unix::fs::symlink(&folder.0, &link).unwrap();
        let through_a_link = Cache::at(link.clone());
        fs::remove_file(&link).unwrap();
        assert!(through_a_link.is_err());

        let cache = Cache::at(folder.0.clone()).unwrap();
        let get = || {
            let mut compiled = false;
            let path = cache.get(&Key::new("x"), "so", |path| {
                compiled = true;
                fs::write(path, "ours").unwrap();
                fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
                Ok(())
            });
            let path = path.unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
            (path, compiled)
        };
        let (path, compiled) = get();
        assert!(compiled && !get().1);
        // As in a folder that others could once write to.
        fs::remove_file(&path).unwrap();
        as_user_in(&folder.0, || fs::write(&path, "theirs").unwrap());
        assert!(get().1 && !get().1);
        fs::write(&path, "theirs").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(get().1 && !get().1);
        let header = cache.headers().unwrap().join(HEADERS[0].0);
        fs::write(&header, "theirs").unwrap();
        chown(&header, STRANGER);
        cache.headers().unwrap();
        assert_eq!(fs::read_to_string(&header).unwrap(), HEADERS[0].1);
    }

    /// Does something as another user while others can write to a folder.
    fn as_user_in(folder: &Path, work: impl FnOnce() + Send) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
        as_user(STRANGER, work);
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn a_failed_compile_leaves_nothing() {
        let folder = Folder::new("leave");
        let cache = Cache::at(folder.0.clone()).unwrap();
        let failed = cache.get(&Key::new("x"), "so", |path| {
            fs::write(path, "half").unwrap();
            Err(DeviceError::NoCompiler { tried: String::new() })
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    }
}
