//! Where a call enters and leaves the library: no panic passes, each error becomes a number, and its sentence is kept for
//! `pushgate_last_message`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::*;

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, message: impl Into<String>) -> Self {
        Failure { code, message: message.into() }
    }

    /// An argument, by its name in the header, that is wrong.
    pub(crate) fn argument(name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(PUSHGATE_E_ARGUMENT, format!("argument `{name}`: {why}"))
    }
}

impl From<pushgate::Error> for Failure {
    fn from(e: pushgate::Error) -> Self {
        Failure::new(e.code() as c_int, e.to_string())
    }
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Runs the body of a call. Its number is what the call returns.
///
/// Whatever a panic has left half done is under locks and atomics of the library, which say so themselves; nothing else of a
/// call outlives the call.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> c_int {
    // A drop of another library's, on this thread, may have left something.
    let _ = pushgate::left_undone();
    let done = catch_unwind(AssertUnwindSafe(body));
    let failed = match (done, pushgate::left_undone()) {
        (Ok(Ok(())), None) => return PUSHGATE_E_OK,
        (Ok(Err(failed)), None) => failed,
        (Ok(_), Some(left)) => {
            let why = format!("{}, which has ended at once: {left}", pushgate::Error::Interrupted);
            Failure::new(PUSHGATE_E_INTERRUPTED, why)
        }
        (Err(panic), _) => Failure::new(PUSHGATE_E_INTERNAL, told(&*panic)),
    };
    let mut text = failed.message.into_bytes();
    text.retain(|byte| *byte != 0);
    let text = CString::new(text).unwrap_or_default();
    // A thread that is ending has no place for it any more.
    let _ = MESSAGE.try_with(|message| message.replace(text));
    failed.code
}

/// The sentence about a panic. A payload that is dropped may panic itself, so nothing is taken out of it.
fn told(panic: &(dyn Any + Send)) -> String {
    let why = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    format!("a fault of the library, please report it: {}", why.unwrap_or("a panic without words"))
}

/// The sentence of the last call of this thread that failed: it names the thing, the value and the remedy. Empty if none has
/// failed. Never NULL; valid until the next call of this thread that fails, and until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn pushgate_last_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn message() -> String {
        // SAFETY: the text is this thread's, and is copied before the next call.
        unsafe { CStr::from_ptr(pushgate_last_message()) }.to_str().unwrap().into()
    }

    #[test]
    fn a_panic_becomes_a_number_with_its_words() {
        assert_eq!(call(|| panic!("seven {}", 7)), PUSHGATE_E_INTERNAL);
        assert!(message().ends_with("seven 7"), "{}", message());
    }

    #[test]
    fn a_success_keeps_the_message_and_another_thread_has_its_own() {
        assert_eq!(call(|| Err(Failure::argument("size", "7\0 bytes"))), PUSHGATE_E_ARGUMENT);
        assert_eq!(call(|| Ok(())), PUSHGATE_E_OK);
        assert_eq!(message(), "argument `size`: 7 bytes");
        assert_eq!(std::thread::spawn(message).join().unwrap(), "");
    }

    #[test]
    fn an_error_of_the_library_keeps_number_and_sentence() {
        let failed = Failure::from(pushgate::Error::config("rank", 9, "0 to 3"));
        assert_eq!((failed.code, &*failed.message), (PUSHGATE_E_CONFIG, "invalid rank `9`: expected 0 to 3"));
    }
}
