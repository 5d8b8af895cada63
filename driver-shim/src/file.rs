//! Reading files that a user names: each read is limited in bytes and in time.
//!
//! The name may be that of a device without an end (`/dev/zero`) or of a pipe that is never closed.
//! Such a file is refused with an error that names the remedy.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::OFlags;

use crate::eventfd::poll_until;

/// The longest text file, in bytes, that a user may name.
pub const LONGEST: u64 = 4 << 20;

/// How long a pipe or a device may take to deliver everything.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads a whole text file in UTF-8 of at most [`LONGEST`] bytes.
///
/// The name may be that of a pipe, such as a shell's `<(command)`: then the pipe is read to its
/// end, for at most 10 s. The error says what is wrong with the file and what to do; the caller
/// adds the file's name.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    read_text_within(path.as_ref(), LONGEST, PATIENCE)
}

/// Reads a whole file of at most `longest` bytes, as [`read_text`] does.
pub fn read_bytes(path: impl AsRef<Path>, longest: u64) -> io::Result<Vec<u8>> {
    read_within(path.as_ref(), longest, PATIENCE)
}

fn read_text_within(path: &Path, longest: u64, patience: Duration) -> io::Result<String> {
    String::from_utf8(read_within(path, longest, patience)?).map_err(|e| {
        let text = format!("no text in UTF-8 (byte {}): name a text file", e.utf8_error().valid_up_to());
        io::Error::new(ErrorKind::InvalidData, text)
    })
}

fn read_within(path: &Path, longest: u64, patience: Duration) -> io::Result<Vec<u8>> {
    let deadline = Instant::now().checked_add(patience);
    // Without O_NONBLOCK, opening a pipe that has no writer would never return. For a regular file
    // the flag changes nothing, and no other code uses the open file.
    let mut file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let mut bytes = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        // A pipe is not readable before its first writer has come, and is at its end afterwards.
        if !poll_until(&file, PollFlags::IN, deadline)? || deadline.is_some_and(|d| Instant::now() > d) {
            let text = format!(
                "no end within {} s, and {} bytes until then: name a regular file",
                patience.as_secs(),
                bytes.len()
            );
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        if bytes.len() as u64 > longest {
            let text = format!("longer than the {longest} bytes that are read at most: name another file");
            return Err(io::Error::new(ErrorKind::FileTooLarge, text));
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    /// Far beyond what a test takes.
    const LONG: Duration = Duration::from_secs(600);

    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pushgate-file-{name}-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Folder(path)
        }

        fn pipe(&self) -> std::path::PathBuf {
            let path = self.0.join("pipe");
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn p8_a_file_without_an_end_is_refused_with_the_bound_and_the_remedy() {
        let e = read_text("/dev/zero").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::FileTooLarge);
        assert_eq!(e.to_string(), "longer than the 4194304 bytes that are read at most: name another file");
    }

    #[test]
    fn a_file_of_the_longest_length_is_read_and_one_byte_more_is_refused() {
        let folder = Folder::new("bound");
        let path = folder.0.join("text");
        std::fs::write(&path, "a".repeat(1000)).unwrap();
        assert_eq!(read_text_within(&path, 1000, LONG).unwrap().len(), 1000);
        let e = read_text_within(&path, 999, LONG).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::FileTooLarge);
        std::fs::write(&path, b"ab\xff").unwrap();
        let e = read_text(&path).unwrap_err();
        assert_eq!(e.to_string(), "no text in UTF-8 (byte 2): name a text file");
    }

    #[test]
    fn p7_a_pipe_that_nobody_writes_or_closes_ends_the_read_at_its_limit() {
        let folder = Folder::new("silent");
        let path = folder.pipe();
        let short = Duration::from_millis(50);
        assert_eq!(read_text_within(&path, 100, short).unwrap_err().kind(), ErrorKind::TimedOut);
        let mut writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        writer.write_all(b"half").unwrap();
        let e = read_text_within(&path, 100, short).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::TimedOut);
        assert!(e.to_string().contains("4 bytes until then: name a regular file"), "{e}");
    }

    #[test]
    fn a_pipe_is_read_to_its_end_however_late_its_writer_comes() {
        let folder = Folder::new("pipe");
        let path = folder.pipe();
        let writes = path.clone();
        let writer = std::thread::spawn(move || {
            let mut pipe = OpenOptions::new().write(true).open(writes).unwrap();
            for _ in 0..100 {
                pipe.write_all(&[b'x'; 1000]).unwrap();
            }
        });
        assert_eq!(read_text_within(&path, 100_000, LONG).unwrap().len(), 100_000);
        writer.join().unwrap();
    }
}
