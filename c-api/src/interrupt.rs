//! How a program gets back a thread that waits in a call.

use std::ffi::{c_int, c_void};

use crate::boundary::{Failure, call};
use crate::codes::*;

/// Says whether the call of this thread is to end: 0, or another number for yes. It returns soon, throws nothing, and calls nothing of
/// the library.
pub type pushgate_interrupt = Option<unsafe extern "C" fn(argument: *mut c_void) -> c_int>;

/// A function of the program, with its argument.
struct Ask(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void);

// SAFETY: the program has promised that function and argument serve every thread, several at once.
unsafe impl Send for Ask {}
// SAFETY: as above.
unsafe impl Sync for Ask {}

impl Ask {
    fn ends(&self) -> bool {
        // SAFETY: the program has promised that function and argument are valid for every thread.
        unsafe { (self.0)(self.1) != 0 }
    }
}

/// Has each call that waits ask `ask` about ten times a second, on the thread of the call; a yes ends the call with
/// PUSHGATE_E_INTERRUPTED. For programs in whose language a signal ends no call. A process calls it once; PUSHGATE_E_BUSY later.
///
/// An interrupted call has taken nothing and the handle stays open; ranks that were interrupted in a call of all ranks do not agree any
/// more: close the communicator.
///
/// @param ask       Not NULL.
/// @param argument  Goes to `ask`; it is valid, for every thread, to the process's end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_interrupt_by(ask: pushgate_interrupt, argument: *mut c_void) -> c_int {
    call(|| {
        let ask = ask.ok_or_else(|| Failure::argument("ask", "NULL, expected a function"))?;
        let ask = Ask(ask, argument);
        match pushgate::interrupt_by(move || ask.ends()) {
            true => Ok(()),
            false => {
                Err(Failure::new(PUSHGATE_E_BUSY, "this process has set what interrupts its calls before"))
            }
        }
    })
}
