//! Ends calls that wait, because the program wants its thread back: as Ctrl-C does for a program in Python, where a signal
//! ends no call of C.
//!
//! Each call that waits comes here about ten times a second, whatever it waits for: a peer, the engine, a proxy's process, a thread.
//! Threads of the library's own have themselves ended in the same way when what they belong to is dropped.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// How often a call that waits asks whether the program wants its thread back.
pub const LOOK: Duration = Duration::from_millis(100);
/// The longest pause between two looks whether a thread has ended.
const PAUSE: Duration = Duration::from_millis(2);

/// The program has ended the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the program has interrupted the call")]
pub struct Interrupted;

type Ask = Rc<dyn Fn() -> bool>;

thread_local! {
    static ASK: RefCell<Option<Ask>> = const { RefCell::new(None) };
    static UNDONE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Has each call of this thread that waits ask `ask` about ten times a second. True ends the call with the error *interrupted*.
/// `None`: calls ask nothing.
///
/// A drop, or another call that can't fail, ends what it waits for at once; [`left_undone`] says what it has left undone.
///
/// No lock of the library is held while `ask` runs. It calls nothing of this library and returns soon. One call may ask several
/// times, for a close has several things to wait for: once `ask` has said true, it says so until the call has returned.
pub fn interrupt_by(ask: Option<Rc<dyn Fn() -> bool>>) {
    ASK.set(ask);
}

/// What calls of this thread that the program has ended have left undone, where they could not return it: drops above all. Taken
/// by this call; `None`: nothing.
pub fn left_undone() -> Option<String> {
    UNDONE.try_with(|undone| undone.take()).ok().flatten()
}

/// Says what the call leaves undone that the program has ended: a part of a sentence.
pub fn leaves_undone(what: &str) {
    // A thread that is ending has none.
    let _ = UNDONE.try_with(|undone| {
        let mut undone = undone.borrow_mut();
        *undone = Some(match undone.take() {
            Some(before) => format!("{before}; {what}"),
            None => what.into(),
        });
    });
}

/// Ends the call if the program asks for that. The caller holds no lock.
pub fn check() -> Result<(), Interrupted> {
    // A thread that is ending has none.
    let ask = ASK.try_with(|ask| ask.borrow().clone()).ok().flatten();
    match ask.is_some_and(|ask| ask()) {
        true => Err(Interrupted),
        false => Ok(()),
    }
}

/// Waits until one of the descriptors is ready. False once the time is over.
pub fn wait(fds: &mut [PollFd<'_>], until: Instant) -> Result<bool, Interrupted> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let look = left.min(LOOK);
        let look = Timespec { tv_sec: look.as_secs() as i64, tv_nsec: look.subsec_nanos().into() };
        // A signal may be why the program wants its thread back.
        if !left.is_zero() && !matches!(poll(fds, Some(&look)), Ok(0) | Err(Errno::INTR)) {
            return Ok(true);
        }
        check()?;
        if left.is_zero() {
            return Ok(false);
        }
    }
}

/// Waits for a thread's end. `hurry` is called once, when the program asks for its thread back; the other thread ends soon then.
pub fn join(thread: JoinHandle<()>, hurry: impl FnOnce()) {
    let (mut hurry, mut asked, mut pause) = (Some(hurry), Now::begin(), Duration::from_micros(20));
    while !thread.is_finished() && hurry.is_some() {
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE);
        if asked.check().is_err() {
            hurry.take().into_iter().for_each(|hurry| hurry());
        }
    }
    // A panic there was printed by its hook; here it would only abort.
    let _ = thread.join();
}

/// Gives threads a turn, one at a time. A thread stops waiting for its turn when its program wants it back.
#[derive(Debug, Default)]
pub struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

impl Turns {
    /// Waits for this thread's turn.
    pub fn take(&self) -> Result<Turn<'_>, Interrupted> {
        let mut taken = self.taken();
        while *taken {
            let waited = self.free.wait_timeout(taken, LOOK);
            let (still, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            taken = still;
            if *taken && waited.timed_out() {
                drop(taken);
                check()?;
                taken = self.taken();
            }
        }
        *taken = true;
        Ok(Turn(self))
    }

    fn taken(&self) -> MutexGuard<'_, bool> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's turn, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken() = false;
        self.0.free.notify_one();
    }
}

/// Asks within a loop that does not sleep for long whether the program wants its thread back: once each [`LOOK`].
pub struct Now(Instant);

impl Now {
    /// Begins a loop, without a question.
    pub fn begin() -> Self {
        Now(Instant::now())
    }

    /// Asks in a turn of the loop, if a [`LOOK`] has passed since the last question.
    pub fn check(&mut self) -> Result<(), Interrupted> {
        if self.0.elapsed() < LOOK {
            return Ok(());
        }
        self.0 = Instant::now();
        check()
    }
}
