//! The cache of modules that were compiled from users' sources.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

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
}

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
        Self::at(dir.clone())
    }

    /// Opens the cache at `dir`; makes the folder if it is not there.
    pub(crate) fn at(dir: PathBuf) -> Result<Self> {
        let io = |source| DeviceError::Io {
            what: "use as a cache of compiled modules",
            path: dir.clone(),
            source,
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(io)?;
        let found = fs::symlink_metadata(&dir).map_err(io)?;
        let ours = found.uid() == rustix::process::geteuid().as_raw();
        if !found.is_dir() || !ours || found.mode() & 0o022 != 0 {
            let reason = "it must be a folder of this user that no other can write (chmod 700)";
            return Err(io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, reason)));
        }
        Ok(Self { dir })
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
        if path.is_file() {
            return Ok(path);
        }
        let temporary = self.temporary(extension);
        let written = compile(&temporary).and_then(|()| {
            fs::rename(&temporary, &path).map_err(|source| DeviceError::Io {
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
            if path.is_file() {
                continue;
            }
            let temporary = self.temporary("h");
            fs::write(&temporary, text).map_err(|e| io("write a header", &temporary, e))?;
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
        use std::os::unix::fs::PermissionsExt;
        let folder = Folder::new("perm");
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Cache::at(folder.0.clone()).err().unwrap().to_string();
        assert!(error.contains("chmod 700"), "{error}");
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
