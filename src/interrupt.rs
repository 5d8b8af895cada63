//! Ends calls that wait, because the program wants its thread back: as Ctrl-C does for a program in Python, where a signal
//! ends no call of C.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pushgate_proxy::redial::envelope;
use rustix::event::PollFd;

use crate::error::{Error, Result};

/// How often a call that waits asks.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

type Ask = Rc<dyn Fn() -> bool>;

thread_local! {
    static ASK: RefCell<Option<Ask>> = const { RefCell::new(None) };
}

/// Has each call of this thread that waits ask `ask` about ten times a second. True ends the call with
/// [`Error::Interrupted`]. `None`: calls ask nothing, as before.
///
/// No lock of the library is held while `ask` runs. It calls nothing of this library and returns soon.
pub fn interrupt_by(ask: Option<Rc<dyn Fn() -> bool>>) {
    ASK.set(ask);
}

/// Ends the call if the program asks for that. The caller holds no lock.
pub(crate) fn check() -> Result<()> {
    // A thread that is ending has none.
    let ask = ASK.try_with(|ask| ask.borrow().clone()).ok().flatten();
    match ask.is_some_and(|ask| ask()) {
        true => Err(Error::Interrupted),
        false => Ok(()),
    }
}

/// Waits until one of the descriptors is ready. False once the time is over.
pub(crate) fn wait(fds: &mut [PollFd<'_>], until: Instant) -> Result<bool> {
    loop {
        if envelope::wait(fds, until.min(Instant::now() + LOOK)) {
            return Ok(true);
        }
        check()?;
        if Instant::now() >= until {
            return Ok(false);
        }
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
