//! Where a step's output goes: to stdout, or into memory while another step writes to stdout.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

/// Where output goes. The default is this program's own stdout and stderr.
#[derive(Clone, Default)]
pub struct Output {
    /// Collects both streams, in the order in which they come.
    buffer: Option<Arc<Mutex<Vec<u8>>>>,
}

thread_local! {
    static OF_THIS_THREAD: RefCell<Output> = RefCell::default();
}

impl Output {
    /// The output of what this thread runs. A thread that passes on a command's output gets it from the thread that
    /// started the command.
    pub fn of_this_thread() -> Output {
        OF_THIS_THREAD.with_borrow(Output::clone)
    }

    /// Writes bytes to stdout, or to the buffer.
    pub fn write(&self, bytes: &[u8]) {
        self.write_or(io::stdout(), bytes);
    }

    /// Writes bytes to stderr, or to the buffer.
    pub fn write_error(&self, bytes: &[u8]) {
        self.write_or(io::stderr(), bytes);
    }

    /// Ignores errors: the job goes on even if its output is no longer read.
    fn write_or(&self, mut stream: impl Write, bytes: &[u8]) {
        match &self.buffer {
            Some(buffer) => buffer.lock().expect("no writer panics").extend_from_slice(bytes),
            None => _ = stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }
}

/// Runs `work` on this thread, and returns what it and its commands have written.
pub fn collect<T>(work: impl FnOnce() -> T) -> (T, Vec<u8>) {
    let buffer = Arc::default();
    let before = OF_THIS_THREAD.replace(Output { buffer: Some(Arc::clone(&buffer)) });
    let result = work();
    OF_THIS_THREAD.set(before);
    let bytes = std::mem::take(&mut *buffer.lock().expect("no writer panics"));
    (result, bytes)
}

/// Prints a line to [`Output::of_this_thread`]; what a step says goes through this and not through `println!`.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::output::Output::of_this_thread().write(format!("{}\n", format_args!($($words)*)).as_bytes())
    };
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_a_thread_says_is_collected_with_what_it_lets_other_threads_write() {
        let ((), bytes) = collect(|| {
            say!("one {}", 1);
            let output = Output::of_this_thread();
            thread::spawn(move || output.write_error(b"two\n")).join().unwrap();
        });
        assert_eq!(String::from_utf8(bytes).unwrap(), "one 1\ntwo\n");
        assert!(Output::of_this_thread().buffer.is_none());
    }
}
