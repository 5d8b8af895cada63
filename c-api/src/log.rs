//! The library's log, for programs that ask for it.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use pushgate::Error;
use pushgate::settings::Origin;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::arguments::text;
use crate::boundary::{Failure, call};
use crate::codes::*;

/// Something failed, and the library goes on without.
pub const PUSHGATE_LOG_ERROR: u32 = 1;
/// Something that a person should look at.
pub const PUSHGATE_LOG_WARN: u32 = 2;
/// What was chosen, and why.
pub const PUSHGATE_LOG_INFO: u32 = 3;
/// What helps to find a fault.
pub const PUSHGATE_LOG_DEBUG: u32 = 4;
/// Everything.
pub const PUSHGATE_LOG_TRACE: u32 = 5;

/// Takes a line of the log, without an end of line. `level` is a PUSHGATE_LOG_ number; `line` is valid for the call alone.
///
/// Any thread of the library calls it, several at once. It returns soon, throws nothing, and calls nothing of the library.
pub type pushgate_log_write =
    Option<unsafe extern "C" fn(argument: *mut c_void, level: u32, line: *const c_char)>;

/// The variable that says what is shown, where the program does not.
const VARIABLE: &str = "PUSHGATE_LOG";

/// Shows the library's log from now on, which is silent without this call. A process calls it once; PUSHGATE_E_BUSY later, and where
/// the program has a log of Rust's crate tracing already.
///
/// @param filter    Levels (error, warn, info, debug, trace, off), each alone or behind CRATE=, with commas between. NULL: what the
///                  variable PUSHGATE_LOG says, else warn.
/// @param write     Takes the lines. NULL: they go to stderr.
/// @param argument  Goes to `write`; it is valid, for every thread, to the process's end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_log_start(
    filter: *const c_char,
    write: pushgate_log_write,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        let (words, origin) = match filter.is_null() {
            // SAFETY: the header's rules for pointers, which the program keeps.
            false => (unsafe { text("filter", filter)? }.to_string(), Origin::Program),
            true => {
                let set = std::env::var_os(VARIABLE).filter(|words| !words.is_empty());
                let words = set.map_or("warn".into(), |words| words.to_string_lossy().into_owned());
                (words, Origin::Variable(VARIABLE.into()))
            }
        };
        let filter: Targets = words.parse().map_err(|_| {
            let allowed =
                "levels (error, warn, info, debug, trace, off), each alone or behind CRATE=, with commas between";
            Error::config("log filter", &words, allowed).from_origin(origin)
        })?;
        // Relaxed: the flag orders nothing, it is only taken once.
        static STARTED: AtomicBool = AtomicBool::new(false);
        if STARTED.swap(true, Ordering::Relaxed) {
            return Err(Failure::new(PUSHGATE_E_BUSY, "the log was started before"));
        }
        let lines = tracing_subscriber::fmt::layer().with_ansi(false);
        let registry = tracing_subscriber::registry().with(filter);
        let started = match write {
            Some(write) => registry.with(lines.with_writer(Lines { write, argument })).try_init(),
            None => registry.with(lines.with_writer(io::stderr)).try_init(),
        };
        started.map_err(|e| Failure::new(PUSHGATE_E_BUSY, format!("the process has another log: {e}")))
    })
}

/// Where the program wants its lines.
#[derive(Clone, Copy)]
struct Lines {
    write: unsafe extern "C" fn(*mut c_void, u32, *const c_char),
    argument: *mut c_void,
}

// SAFETY: the program has promised that function and argument serve every thread, several at once.
unsafe impl Send for Lines {}
// SAFETY: as above.
unsafe impl Sync for Lines {}

/// One line while it is put together; handed over when it is dropped.
struct Line {
    to: Lines,
    level: u32,
    bytes: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { to: *self, level: PUSHGATE_LOG_INFO, bytes: Vec::new() }
    }

    fn make_writer_for(&'a self, of: &Metadata<'_>) -> Line {
        let level = match *of.level() {
            Level::ERROR => PUSHGATE_LOG_ERROR,
            Level::WARN => PUSHGATE_LOG_WARN,
            Level::INFO => PUSHGATE_LOG_INFO,
            Level::DEBUG => PUSHGATE_LOG_DEBUG,
            Level::TRACE => PUSHGATE_LOG_TRACE,
        };
        Line { to: *self, level, bytes: Vec::new() }
    }
}

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.retain(|byte| *byte != 0);
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        }
        let line = CString::new(bytes).unwrap_or_default();
        // SAFETY: the program has promised that function and argument are valid for every thread.
        unsafe { (self.to.write)(self.to.argument, self.level, line.as_ptr()) };
    }
}
