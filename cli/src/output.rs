//! Standard output and standard error. Their reader may be gone, as after `| head`, and a disk may be full: `println!` would panic.

use std::fmt;
use std::io::{self, IsTerminal as _, Write};

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

/// Says a line on standard error, if anyone takes it.
pub fn tell(line: fmt::Arguments<'_>) {
    // In one write: `writeln!` makes one for each part, and the lines of processes that share standard error would mix.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Says a line on standard error. It stays whole beside the lines of other processes; where nobody takes it, nothing happens.
macro_rules! errln {
    ($($text:tt)*) => { $crate::output::tell(format_args!($($text)*)) };
}

/// A bar of steps on standard error, where that is a terminal.
pub fn bar(steps: u64) -> anyhow::Result<indicatif::ProgressBar> {
    let bar = match io::stderr().is_terminal() {
        true => indicatif::ProgressBar::new(steps),
        false => indicatif::ProgressBar::hidden(),
    };
    bar.set_style(indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")?);
    Ok(bar)
}

pub(crate) use {errln, out, outln};
