//! Programs that a test starts and that must end.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A command's output, if the command ends within `limit`.
///
/// # Panics
///
/// If the command does not end in time, with what it has written as errors.
pub fn output(command: &mut Command, limit: Duration) -> Output {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nccl-caller starts");
    let begin = Instant::now();
    // The output fits into the pipes.
    while child.try_wait().expect("wait").is_none() {
        if begin.elapsed() > limit {
            child.kill().expect("kill");
            let output = child.wait_with_output().expect("output");
            panic!("{command:?} did not end within {limit:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("output")
}
