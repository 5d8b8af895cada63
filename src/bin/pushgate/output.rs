//! Standard output. Its reader may be gone, as behind `| head`, and a disk may be full: `println!` would panic.

use std::fmt;
use std::io::{self, Write};

/// Why standard output takes no more.
#[derive(Debug)]
pub struct OutputError(io::Error);

impl OutputError {
    /// Whether the reader has gone. That is no failure: it has seen what it wanted.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot write to standard output: {}", self.0)
    }
}

impl std::error::Error for OutputError {}

impl From<io::Error> for OutputError {
    fn from(e: io::Error) -> Self {
        Self(e)
    }
}

/// Writes text as it is.
pub fn write(text: fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    out.write_fmt(text)?;
    Ok(out.flush()?)
}

/// Prints without an end of line; an error of standard output is returned.
macro_rules! out {
    ($($text:tt)*) => { $crate::output::write(format_args!($($text)*)) };
}

/// Prints a line; an error of standard output is returned.
macro_rules! outln {
    () => { $crate::output::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($text)*))) };
}

pub(crate) use {out, outln};
