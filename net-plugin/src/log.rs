//! NCCL's log. What the libraries below log by `tracing` goes there too, through a subscriber of
//! the plugin's own that applies only to the plugin's threads and calls, so a program's own
//! subscriber is not disturbed.

use std::cell::OnceCell;
use std::ffi::{CString, c_char, c_int, c_ulong};
use std::fmt::{Debug, Write};
use std::sync::{OnceLock, RwLock};

use tracing::dispatcher::DefaultGuard;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// NCCL's log function, `ncclDebugLogger_t`.
pub type Logger = Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

/// The levels of NCCL's log, `ncclDebugLogLevel`.
#[derive(Clone, Copy)]
#[repr(i32)]
enum NcclLevel {
    Warn = 2,
    Info = 3,
    Trace = 5,
}

/// The subsystem `NCCL_INIT`.
const INIT: c_ulong = 0x1;
/// The subsystem `NCCL_NET`.
const NET: c_ulong = 0x10;
/// All subsystems, `NCCL_ALL`: a warning is shown whatever NCCL_DEBUG_SUBSYS says.
const ALL: c_ulong = !0;

static LOGGER: RwLock<Logger> = RwLock::new(None);

/// Sends all later log lines to `logger`.
pub fn set_logger(logger: Logger) {
    if logger.is_some() {
        *LOGGER.write().unwrap_or_else(|e| e.into_inner()) = logger;
    }
}

fn write(level: NcclLevel, flags: c_ulong, file: &str, line: u32, text: &str) {
    let Some(logger) = *LOGGER.read().unwrap_or_else(|e| e.into_inner()) else { return };
    // A zero byte within the text would end it there.
    let c = |s: &str| CString::new(s.replace('\0', " ")).expect("it has no zero byte");
    let (file, text) = (c(file), c(text));
    // SAFETY: NCCL's own function, of the type that its headers declare; "%s" takes the one string
    // that follows, and all strings live until the call returns.
    unsafe {
        logger(
            level as c_int,
            flags,
            file.as_ptr(),
            line as c_int,
            c"NET/pushgate: %s".as_ptr(),
            text.as_ptr(),
        )
    }
}

/// Logs a failure that NCCL will be told of.
#[track_caller]
pub fn warn(text: &str) {
    let at = std::panic::Location::caller();
    write(NcclLevel::Warn, ALL, at.file(), at.line(), text);
}

/// Logs a line for information.
#[track_caller]
pub fn info(text: &str) {
    let at = std::panic::Location::caller();
    write(NcclLevel::Info, NET, at.file(), at.line(), text);
}

/// Logs a line about the whole plugin, at a level that NCCL shows by default where it shows
/// anything.
#[track_caller]
pub fn init(text: &str) {
    let at = std::panic::Location::caller();
    write(NcclLevel::Info, INIT | NET, at.file(), at.line(), text);
}

/// Runs `f`, with log events of the libraries below going to NCCL.
pub fn scoped<R>(f: impl FnOnce() -> R) -> R {
    tracing::dispatcher::with_default(to_nccl(), f)
}

/// Sends what the libraries below log on this thread to NCCL's log from now on, unless the thread logs elsewhere. For the
/// threads of NCCL that post and test, in whose calls [`scoped`] would cost more than the rest.
#[inline]
pub fn take_thread() {
    thread_local! {
        static TAKEN: OnceCell<Option<DefaultGuard>> = const { OnceCell::new() };
    }
    // A thread that ends logs no more.
    let _ = TAKEN.try_with(|taken| {
        taken.get_or_init(|| {
            let none = tracing::dispatcher::get_default(|to| to.is::<NoSubscriber>());
            none.then(|| tracing::dispatcher::set_default(to_nccl()))
        });
    });
}

fn to_nccl() -> &'static Dispatch {
    static DISPATCH: OnceLock<Dispatch> = OnceLock::new();
    DISPATCH.get_or_init(|| Dispatch::new(ToNccl))
}

/// The subscriber that sends `tracing` events to NCCL's log. Spans are not shown.
struct ToNccl;

impl Subscriber for ToNccl {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let m = event.metadata();
        let level = match *m.level() {
            Level::ERROR | Level::WARN => NcclLevel::Warn,
            Level::INFO => NcclLevel::Info,
            _ => NcclLevel::Trace,
        };
        let (file, line) = (m.file().unwrap_or("pushgate"), m.line().unwrap_or(0));
        let flags = if matches!(level, NcclLevel::Warn) { ALL } else { NET };
        // NCCL cuts what is longer than 1 KiB, so each line of a report is one of the log.
        for part in format!("{}{}", text.message, text.fields).lines() {
            write(level, flags, file, line, part);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name} {value:?})"),
        };
    }
}
