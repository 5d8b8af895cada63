//! The command's exit codes: docs/operations.md has their table.

use std::fmt;

use pushgate::{DeviceError, Error};

use crate::signals;

/// The work failed.
pub const FAILED: u8 = 1;
/// A flag, an argument, a setting, or a file that one of them names to be read is wrong.
pub const WRONG: u8 = 2;

/// A file, folder or name that the command line names and that can't be used. Attached to an error as
/// its context, or an error by itself.
#[derive(Debug)]
pub struct Input(pub String);

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Input {}

/// The exit code of an error. One cause has one code, whichever subcommand meets it.
pub fn code(e: &anyhow::Error) -> u8 {
    if let Some(number) = signals::caught() {
        return of_signal(number);
    }
    let device = match e.downcast_ref() {
        Some(wrong) if Error::is_config(wrong) => return WRONG,
        // No other file is read by the library and named by the user.
        Some(Error::Io { what, .. }) if what.contains("settings file") => return WRONG,
        Some(Error::Device(device)) => Some(device),
        _ => e.downcast_ref::<DeviceError>(),
    };
    // Only `device = cuda` meets this: `auto` takes the CPU.
    let no_cuda = matches!(device, Some(DeviceError::CudaUnavailable { .. }));
    if no_cuda || e.is::<Input>() { WRONG } else { FAILED }
}

/// What is said of an error: its causes, each once. Where a signal was caught, not what it interrupted.
pub fn sentence(e: &anyhow::Error) -> String {
    match signals::caught() {
        Some(_) => e.root_cause().to_string(),
        None => pushgate::explain(e.as_ref()),
    }
}

/// The exit code of a program that a signal asked to end, as shells show it.
pub fn of_signal(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn a_wrong_input_is_2_however_deep_it_lies_and_a_failure_is_1() {
        let no_file = || anyhow!(std::io::Error::from(std::io::ErrorKind::NotFound));
        assert_eq!(code(&no_file()), FAILED);
        assert_eq!(code(&no_file().context("reading x")), FAILED);
        assert_eq!(code(&no_file().context(Input("x can't be read".into()))), WRONG);
        assert_eq!(code(&no_file().context(Input("x can't be read".into())).context("the report")), WRONG);
        assert_eq!(code(&Error::config("slots", 3, "a power of two").into()), WRONG);
        let cuda = || DeviceError::CudaUnavailable { reason: "no driver".into() };
        assert_eq!((code(&cuda().into()), code(&Error::from(cuda()).into())), (WRONG, WRONG));
        assert_eq!(code(&Error::PeerLost { rank: 1 }.into()), FAILED);
        let wrong = Err::<(), _>(Error::config("slots", 3, "a power of two")).context("GPU 1");
        assert_eq!(code(&wrong.unwrap_err()), WRONG);
    }
}
