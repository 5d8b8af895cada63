//! Ends calls that wait, because the program wants its thread back: as Ctrl-C does for a program in Python, where a signal
//! ends no call of C.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How often a call that waits asks.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

type Ask = Box<dyn Fn() -> bool + Send + Sync>;

static ASK: OnceLock<Ask> = OnceLock::new();

/// Has each call that waits ask `ask` about ten times a second, on the caller's thread. True ends the call with
/// [`Error::Interrupted`]. A process sets this once; false where that was done before, and nothing has changed.
///
/// No lock is held during the call, which returns soon and waits for nothing of this library.
pub fn interrupt_by(ask: impl Fn() -> bool + Send + Sync + 'static) -> bool {
    ASK.set(Box::new(ask)).is_ok()
}

/// Ends the call if the program asks for that. The caller holds no lock.
pub(crate) fn check() -> Result<()> {
    match ASK.get().is_some_and(|ask| ask()) {
        true => Err(Error::Interrupted),
        false => Ok(()),
    }
}

/// Asks in a loop that does not sleep: at its start no question, then one each [`LOOK`].
pub(crate) struct Now(Instant);

impl Now {
    pub(crate) fn begin() -> Self {
        Now(Instant::now())
    }

    pub(crate) fn check(&mut self) -> Result<()> {
        if self.0.elapsed() < LOOK {
            return Ok(());
        }
        self.0 = Instant::now();
        check()
    }
}
