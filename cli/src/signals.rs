//! SIGINT, SIGTERM and SIGHUP as requests to end in order, and SIGUSR1 as a request to say what the process waits for.
//!
//! A subcommand that has nothing to tidy up leaves the first three alone: the kernel ends the process.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use pushgate::proxy::Stop;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;

/// Sent by service managers to end a service.
pub const TERMINATE: i32 = Signal::TERM.as_raw();
/// Sent when the terminal is gone.
pub const HANG_UP: i32 = Signal::HUP.as_raw();

/// The first signal that was caught; 0: none.
static CAUGHT: AtomicI32 = AtomicI32::new(0);
/// The eventfd that the handler rings; -1: none.
static BELL: AtomicI32 = AtomicI32::new(-1);

/// Ends the process, as before [`catch`].
const SIG_DFL: usize = 0;

unsafe extern "C" {
    /// signal(2), of the C library.
    fn signal(number: c_int, handler: usize) -> usize;
}

extern "C" fn on_signal(number: c_int) {
    let _ = CAUGHT.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
    let bell = BELL.load(Ordering::Acquire);
    if bell >= 0 {
        // SAFETY: `catch` leaked this descriptor, so nothing closes it.
        let bell = unsafe { BorrowedFd::borrow_raw(bell) };
        // write(2) is async-signal-safe, and rustix calls it without allocating or locking.
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }
    // A second Ctrl-C ends a program that does not get to its end.
    // SAFETY: signal(2) is async-signal-safe, and SIG_DFL is a handler that it takes.
    unsafe { signal(number, SIG_DFL) };
}

/// Catches the three signals from now on. The first of each is kept for [`caught`] and rings `bell`;
/// the second of each ends the process. Called at most once.
pub fn catch(bell: Option<Stop>) {
    if let Some(bell) = bell {
        BELL.store(bell.as_fd().as_raw_fd(), Ordering::Release);
        // The handler may run until the process ends.
        std::mem::forget(bell);
    }
    catch_each(&[Signal::INT, Signal::TERM, Signal::HUP]);
}

/// Catches SIGINT and SIGTERM from now on, as [`catch`] does, for a program that restores its terminal. SIGHUP still ends the
/// process: it says that the terminal is gone.
pub fn catch_in_terminal() {
    catch_each(&[Signal::INT, Signal::TERM]);
}

fn catch_each(signals: &[Signal]) {
    for number in signals {
        // SAFETY: `on_signal` has the signature that signal(2) calls, and does only what is
        // async-signal-safe: atomics, write(2), signal(2).
        unsafe { signal(number.as_raw(), on_signal as extern "C" fn(c_int) as usize) };
    }
}

/// The eventfd that SIGUSR1 rings; -1: none.
static ASKED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_asked(_: c_int) {
    let bell = ASKED.load(Ordering::Acquire);
    if bell >= 0 {
        // SAFETY: `on_usr1` leaked this descriptor, so nothing closes it.
        let bell = unsafe { BorrowedFd::borrow_raw(bell) };
        // Async-signal-safe, as in `on_signal`.
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }
}

/// Calls `say` on a thread of its own for each SIGUSR1 from now on. Several that come while `say` runs are one. Without a
/// descriptor or a thread to spare SIGUSR1 ends the process, as before. Called at most once.
pub fn on_usr1(say: impl Fn() + Send + 'static) {
    let Ok(bell) = eventfd(0, EventfdFlags::CLOEXEC) else { return };
    let theirs = bell.as_raw_fd();
    let wait = move || {
        let mut count = [0; 8];
        loop {
            match rustix::io::read(&bell, &mut count) {
                Ok(_) => say(),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    };
    // The thread keeps the descriptor until the process ends.
    if std::thread::Builder::new().name("pushgate-usr1".into()).spawn(wait).is_err() {
        return;
    }
    ASKED.store(theirs, Ordering::Release);
    // SAFETY: `on_asked` has the signature that signal(2) calls, and does only what is async-signal-safe.
    unsafe { signal(Signal::USR1.as_raw(), on_asked as extern "C" fn(c_int) as usize) };
}

/// The number of the first signal that was caught.
pub fn caught() -> Option<i32> {
    Some(CAUGHT.load(Ordering::Relaxed)).filter(|number| *number != 0)
}
