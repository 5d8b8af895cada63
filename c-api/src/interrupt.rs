//! How a program gets back a thread that waits in a call.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use crate::boundary::call;

/// Says whether the call of this thread is to end: 0, or another number for yes. It returns soon, throws nothing, calls nothing of
/// the library, and waits for no thread that is in a call of the library. One call may ask several times: once the answer was yes, it
/// is yes until the call has returned.
pub type pushgate_interrupt = Option<unsafe extern "C" fn(argument: *mut c_void) -> c_int>;

/// Has each call of this thread that waits ask `ask` about ten times a second; a yes ends the call with PUSHGATE_E_INTERRUPTED. For
/// programs in whose language a signal ends no call.
///
/// The handles of an interrupted call stay open. A call for one message has then sent and taken nothing; after a call in which ranks
/// meet, the ranks may not agree any more: close the communicator.
///
/// The closes of a queue pair, a communicator and a context close the handle all the same: they wait for no peer any more, and
/// pushgate_last_message() says what the peers have not got. A region and a kernel stay open, for their memory is still in use.
///
/// What the library waits for in other libraries, ends by itself alone: the driver of a GPU, and the system's look-up of a host's name.
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
