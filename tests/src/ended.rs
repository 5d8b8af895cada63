//! Programs that a test starts and that must end.

use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A command's output, if the command ends within `limit`.
///
/// # Panics
///
/// If the command does not end in time, with what it has written as errors.
pub fn output(command: &mut Command, limit: Duration) -> Output {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nccl-caller starts");
    // Read all the time: a panic may tell more than a pipe holds.
    let (stdout, stderr) = (child.stdout.take().map(read), child.stderr.take().map(read));
    let begin = Instant::now();
    let (mut late, mut status) = (false, child.try_wait().expect("wait"));
    while status.is_none() {
        if begin.elapsed() > limit {
            late = true;
            child.kill().expect("kill");
        }
        std::thread::sleep(Duration::from_millis(5));
        status = child.try_wait().expect("wait");
    }
    let whole = |reader: Option<JoinHandle<Vec<u8>>>| reader.expect("piped").join().expect("it reads");
    let (stdout, stderr) = (whole(stdout), whole(stderr));
    assert!(!late, "{command:?} did not end within {limit:?}: {}", String::from_utf8_lossy(&stderr));
    Output { status: status.expect("it ended"), stdout, stderr }
}

/// Reads a pipe to its end.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe is read");
        bytes
    })
}
