//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Result, Write as _};
use std::path::Path;

/// Names that are tried for the new file before another one takes the target's place.
const TRIES: usize = 16;

/// Whether [`write()`] may replace what is at a path: nothing, or a regular file. A link may be another user's, who names a file
/// for root to replace; renaming over a device takes the device from the whole host.
pub fn may_replace(path: &Path) -> Result<()> {
    let what = match path.symlink_metadata() {
        Ok(there) if there.is_file() => return Ok(()),
        Ok(there) if there.is_symlink() => "a link: name the file itself",
        Ok(there) if there.is_dir() => "a folder: name a file in it",
        Ok(_) => {
            "no regular file, and a device, pipe or socket is not replaced: name a regular file or a new one"
        }
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("{} is {what}", path.display())))
}

/// Replaces the file at `path` by another one with this text, or makes it. A reader finds one or the other, and a crash leaves one
/// or the other. What [`may_replace`] refuses stays as it is.
///
/// The text is first written beside the file under a hidden name that nobody can guess and that ends in `.tmp`, in a new file: a
/// link that another user has put there is not followed.
pub fn write(path: &Path, text: &str) -> Result<()> {
    may_replace(path)?;
    let name = path.file_name().ok_or(ErrorKind::IsADirectory)?.to_string_lossy();
    let fresh = || path.with_file_name(format!(".{name}.{:016x}.tmp", RandomState::new().hash_one(&name)));
    let create = |_| {
        let beside = fresh();
        match File::create_new(&beside) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => None,
            created => Some(created.map(|file| (beside, file))),
        }
    };
    let (beside, mut file) = (0..TRIES).find_map(create).ok_or(ErrorKind::AlreadyExists)??;
    let mut fill = || {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        may_replace(path)?;
        fs::rename(&beside, path)
    };
    fill().inspect_err(|_| drop(fs::remove_file(&beside)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pushgate-whole-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Folder(path)
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn p8_a_file_is_made_or_replaced_whole_and_nothing_else_is_left() {
        let folder = Folder::new("file");
        let path = folder.0.join("a");
        write(&path, "one").unwrap();
        let before = File::open(&path).unwrap();
        write(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        // One who had it open still has the old one whole.
        assert_eq!(std::io::read_to_string(before).unwrap(), "one");
        assert_eq!(folder.names(), ["a"]);
    }

    #[test]
    fn p8_a_link_a_folder_and_a_socket_are_refused_by_name_and_stay() {
        let folder = Folder::new("others");
        let at = |name: &str| folder.0.join(name);
        fs::write(at("precious"), "precious").unwrap();
        symlink(at("precious"), at("link")).unwrap();
        symlink("/dev/null", at("null")).unwrap();
        symlink(at("nowhere"), at("dangling")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let names = folder.names();
        for (name, says) in [
            ("link", "a link: name the file itself"),
            ("null", "a link: name the file itself"),
            ("dangling", "a link: name the file itself"),
            ("folder", "a folder: name a file in it"),
            ("socket", "no regular file"),
        ] {
            let e = write(&at(name), "x").unwrap_err().to_string();
            assert!(e.contains(&format!("{name} is {says}")), "{e}");
        }
        for device in ["/dev/null", "/dev/stdout"] {
            let e = may_replace(Path::new(device)).unwrap_err().to_string();
            assert!(e.contains(device), "{e}");
        }
        assert_eq!(fs::read_to_string(at("precious")).unwrap(), "precious");
        assert_eq!(folder.names(), names);
    }

    #[test]
    fn p8_links_at_names_that_can_be_foretold_are_not_followed() {
        let folder = Folder::new("beside");
        let path = folder.0.join("a");
        // Another user's links at names by the number of this process.
        for name in [format!("a.{}", std::process::id()), format!(".a.{}.tmp", std::process::id())] {
            symlink(folder.0.join("stolen"), folder.0.join(name)).unwrap();
        }
        write(&path, "text").unwrap();
        assert!(!folder.0.join("stolen").exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }
}
