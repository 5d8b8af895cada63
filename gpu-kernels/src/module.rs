//! A user's source, and the cache of modules compiled from such sources.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::file::read_text;

use crate::build_support::kernel_names;
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

    fn hex(&self) -> String {
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

    /// Writes the source for a command-line compiler, whose messages then cite the name that the
    /// user knows. The file is removed when the guard is dropped.
    pub(crate) fn source_file(&self, source: &Source) -> Result<Temporary> {
        let path = self.temporary("cu");
        let text = format!("#line 1 {:?}\n{}", source.name(), source.body());
        fs::write(&path, text).map_err(|e| DeviceError::Io {
            what: "write the source",
            path: path.clone(),
            source: e,
        })?;
        Ok(Temporary(path))
    }
}

/// A file that is removed on drop.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Runs a compiler; if it fails, what it printed becomes the error.
pub(crate) fn run_compiler(source: &Source, mut command: Command) -> Result<()> {
    let compiler = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| DeviceError::Io {
        what: "start the compiler",
        path: PathBuf::from(command.get_program()),
        source: e,
    })?;
    if output.status.success() {
        return Ok(());
    }
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    text += &String::from_utf8_lossy(&output.stdout);
    if text.trim().is_empty() {
        text = format!("({}, no output)", output.status);
    }
    Err(DeviceError::Compile { source_name: source.name().to_owned(), compiler, output: text })
}

/// A compiler command, with its output for `--version`, which goes into the key.
#[derive(Clone, Debug)]
pub(crate) struct Compiler {
    words: Vec<OsString>,
    version: String,
}

impl Compiler {
    /// Makes a compiler from `words`, the program and its first arguments (`ccache g++`). `None` if
    /// it does not run.
    pub(crate) fn new(words: Vec<OsString>) -> Option<Self> {
        let (program, arguments) = words.split_first()?;
        let output = Command::new(program).args(arguments).arg("--version").output().ok()?;
        if !output.status.success() {
            return None;
        }
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        Some(Self { words, version })
    }

    /// The C++ compiler: `$CXX`, or else the first of c++, g++, clang++ that runs. Looked for once.
    pub(crate) fn cxx() -> Result<Self> {
        static FOUND: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let split = |text: OsString| -> Vec<OsString> {
                text.to_string_lossy().split_whitespace().map(OsString::from).collect()
            };
            let named: Option<Vec<OsString>> =
                std::env::var_os("CXX").map(split).filter(|words| !words.is_empty());
            let candidates = match named {
                // A user who names a compiler wants no other.
                Some(words) => vec![words],
                None => ["c++", "g++", "clang++"].map(|name| vec![name.into()]).to_vec(),
            };
            let tried: Vec<String> = candidates
                .iter()
                .map(|words| words.join(" ".as_ref()).to_string_lossy().into_owned())
                .collect();
            candidates.into_iter().find_map(Compiler::new).ok_or_else(|| tried.join(", "))
        });
        found.clone().map_err(|tried| DeviceError::NoCompiler { tried })
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command
    }

    pub(crate) fn add_to(&self, key: &mut Key) {
        for word in &self.words {
            key.add(word.as_encoded_bytes());
        }
        key.add(self.version.as_bytes());
    }
}

/// Joins names as "a, b, c"; "(none)" if there are none.
pub(crate) fn list(names: &[String]) -> String {
    if names.is_empty() { "(none)".to_owned() } else { names.join(", ") }
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
