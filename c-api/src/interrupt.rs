//! How a program gets back a thread that waits in a call.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use crate::boundary::call;

/// Says whether the call of this thread is to end: 0, or another number for yes. It returns soon, throws nothing, and calls nothing of
/// the library.
pub type pushgate_interrupt = Option<unsafe extern "C" fn(argument: *mut c_void) -> c_int>;

/// Has each call of this thread that waits ask `ask` about ten times a second; a yes ends the call with PUSHGATE_E_INTERRUPTED. For
/// programs in whose language a signal ends no call.
///
/// The handles of an interrupted call stay open. A call for one message has then sent and taken nothing; after a call in which ranks
/// meet, the ranks may not agree any more: close the communicator.
///
/// @param ask       NULL: calls of this thread ask nothing, as before.
/// @param argument  Goes to `ask`; it is valid until the thread ends or sets another function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_interrupt_by(ask: pushgate_interrupt, argument: *mut c_void) -> c_int {
    call(|| {
        pushgate::interrupt_by(ask.map(|ask| {
            // SAFETY: the program has promised that function and argument are valid for this thread.
            Rc::new(move || unsafe { ask(argument) != 0 }) as Rc<dyn Fn() -> bool>
        }));
        Ok(())
    })
}
