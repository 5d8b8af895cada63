//! A second profiler. NCCL loads one profiler alone, and this plugin needs to be that one. A profiler that the user
//! names by the setting `profiler-plugin`, or by NCCL's own variable, such as NCCL's Inspector, is loaded here and gets
//! every event.

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Once, OnceLock};

use libloading::Library;

use super::types::{COLL_API, GROUP_API, KERNEL_LAUNCH, P2P_API, ProfilerEvent, ProfilerTable};
use crate::log::{self, Logger};
use crate::plugin;
use crate::taken::PROFILER;

/// The name of this plugin's profiler, in its tables.
pub(super) const NAME: &CStr = c"pushgate";

/// The event types that this plugin asks for, whether the other profiler does or not.
pub(super) const OWN: u64 = GROUP_API | COLL_API | P2P_API | KERNEL_LAUNCH;

/// The event types of v6 that v5 lacks: `ncclProfileCeColl`, `ncclProfileCeSync`, `ncclProfileCeBatch`.
const NEW_IN_V6: u64 = 0b111 << 12;

/// The other profiler. Its library is never unloaded.
pub(super) struct Second {
    table: &'static ProfilerTable,
    version: u32,
}

/// The other profiler's view of a communicator.
pub(super) struct Theirs {
    second: &'static Second,
    context: *mut c_void,
    /// The event types that the other profiler does not take: those that only this plugin asked for, and those that its
    /// table lacks.
    unwanted: u64,
}

impl Second {
    /// The profiler that the settings name, or whose place this plugin has taken, loaded at the first call. `None` if there is
    /// none, or if it can't be loaded: NCCL's log says why.
    pub(super) fn loaded() -> Option<&'static Second> {
        static SECOND: OnceLock<Option<Second>> = OnceLock::new();
        SECOND
            .get_or_init(|| {
                let name = plugin::profiler().or_else(|| DISPLACED.get().cloned())?;
                let second = Second::load(&name);
                match &second {
                    Ok(second) => {
                        // SAFETY: a table's name is a string of the library, which stays loaded.
                        let told = unsafe { CStr::from_ptr(second.table.name) }.to_string_lossy();
                        log::init(&format!(
                            "the second profiler {told} (v{}) gets every event",
                            second.version
                        ))
                    }
                    Err(why) => log::warn(&format!(
                        "profiler-plugin {}: {why}; NCCL goes on without that profiler",
                        name.display()
                    )),
                }
                second.ok()
            })
            .as_ref()
    }

    fn load(name: &Path) -> Result<Second, String> {
        // As NCCL finds profilers: by the name, then by the name within a library's name.
        let mut names = vec![name.to_owned()];
        if name.components().count() == 1 {
            names.push(PathBuf::from(format!("libnccl-profiler-{}.so", name.display())));
        }
        let mut errors = Vec::new();
        let library = names.iter().find_map(|name| {
            // SAFETY: the user names the library for this very purpose: its initialisers may run here.
            unsafe { Library::new(name) }.map_err(|e| errors.push(why(&e))).ok()
        });
        let library = Box::leak(Box::new(library.ok_or_else(|| errors.join("; "))?));
        for (version, symbol) in [(6, c"ncclProfiler_v6"), (5, c"ncclProfiler_v5")] {
            // SAFETY: a data symbol, of which only the address is taken.
            if let Ok(found) = unsafe { library.get::<*const c_void>(symbol.to_bytes_with_nul()) } {
                // SAFETY: the library is never unloaded.
                let at = unsafe { found.into_raw() }.as_raw_ptr();
                // SAFETY: NCCL's headers say that a table of this name has this layout; the library is never unloaded.
                let table = unsafe { &*at.cast::<ProfilerTable>() };
                // SAFETY: a table's name is a string of the library, which stays loaded.
                if unsafe { CStr::from_ptr(table.name) } == NAME {
                    return Err("that is this plugin itself".into());
                }
                return Ok(Second { table, version });
            }
        }
        Err("it has no table ncclProfiler_v6 or ncclProfiler_v5".into())
    }

    /// Tells the other profiler of a communicator. `None` if it refuses.
    ///
    /// # Safety
    /// The arguments are those of NCCL's call, `shape` nodes, ranks and rank.
    pub(super) unsafe fn begin(
        &'static self,
        comm: u64,
        mask: *mut c_int,
        name: *const c_char,
        shape: [c_int; 3],
        logger: Logger,
    ) -> Option<Theirs> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise. The mask is NCCL's own, which profilers may keep and change later.
        unsafe {
            let [nodes, ranks, rank] = shape;
            let code = (self.table.init)(&mut context, comm, mask, name, nodes, ranks, rank, logger);
            if code != 0 {
                log::warn(&format!("the second profiler's init answered {code}: it gets no events"));
                return None;
            }
            let mut unwanted = OWN & !(*mask as u64);
            if self.version < 6 {
                *mask &= !(NEW_IN_V6 as c_int);
                unwanted |= NEW_IN_V6;
            }
            Some(Theirs { second: self, context, unwanted })
        }
    }

    /// Passes the end of an event on.
    ///
    /// # Safety
    /// The handle comes from [`Theirs::start`] and is given back once.
    pub(super) unsafe fn stop(&self, handle: *mut c_void) {
        // SAFETY: the caller's promise. Its answer has no meaning for NCCL's caller.
        let _ = unsafe { (self.table.stop)(handle) };
    }

    /// Passes a change of an event's state on.
    ///
    /// # Safety
    /// The arguments are those of NCCL's call.
    pub(super) unsafe fn record(&self, handle: *mut c_void, state: c_int, arguments: *const c_void) {
        // SAFETY: the caller's promise.
        let _ = unsafe { (self.table.record)(handle, state, arguments) };
    }
}

/// Why a library can't be loaded, as the linker says it.
fn why(e: &libloading::Error) -> String {
    e.source().map_or_else(|| e.to_string(), ToString::to_string)
}

impl Theirs {
    /// Passes the begin of an event on. Returns the other profiler's handle of the event, NULL if it wants to hear no more
    /// of the event.
    ///
    /// # Safety
    /// `event` is an event of NCCL's.
    pub(super) unsafe fn start(&self, event: *const ProfilerEvent) -> *mut c_void {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        let kind = unsafe { (*event).kind };
        if kind & self.unwanted == 0 {
            // SAFETY: the caller's promise, and the context is of the same table.
            let _ = unsafe { (self.second.table.start)(self.context, &mut handle, event.cast()) };
        }
        handle
    }

    /// Tells the other profiler that the communicator ends.
    pub(super) fn end(self) {
        // SAFETY: the context comes from `begin`, and is given back once.
        let _ = unsafe { (self.second.table.finalize)(self.context) };
    }
}

/// The profiler that the user named to NCCL, and whose place this plugin has taken.
static DISPLACED: OnceLock<PathBuf> = OnceLock::new();

/// What is done about the profiler that the user names to NCCL.
#[derive(Debug, PartialEq, Eq)]
enum Remedy {
    /// The user's profiler stays, or none is named.
    Nothing,
    /// This plugin becomes NCCL's profiler.
    Take,
    /// This plugin becomes NCCL's profiler, and passes every event on to the user's.
    PassOn,
}

impl Remedy {
    /// `named` is the user's profiler, `second` says whether the settings name a second one, and `loads` tries to load the
    /// user's as one that events can be passed on to.
    fn of(
        named: Option<&OsStr>,
        second: bool,
        loads: impl FnOnce(&Path) -> Result<(), String>,
    ) -> (Remedy, String) {
        let Some(named) = named.filter(|named| !named.is_empty()) else {
            return (Remedy::Nothing, String::new());
        };
        if named.eq_ignore_ascii_case("none") {
            return (Remedy::Take, String::new());
        }
        if second {
            return (Remedy::Nothing, "PUSHGATE_PROFILER_PLUGIN names a profiler already".into());
        }
        match loads(Path::new(named)) {
            Ok(()) => (Remedy::PassOn, String::new()),
            Err(why) => (Remedy::Nothing, why),
        }
    }
}

/// Makes NCCL load this plugin's profiler where the user's environment names another one, which then gets every event from
/// this plugin. Called behind an init, before NCCL loads its profiler. Does nothing unless NCCL may hand over GPU memory.
pub(super) fn take_the_profilers_place() {
    static ONCE: Once = Once::new();
    if !plugin::has_gpu() {
        return;
    }
    ONCE.call_once(|| {
        let named = std::env::var_os(PROFILER);
        let (remedy, why) =
            Remedy::of(named.as_deref(), plugin::profiler().is_some(), |name| Second::load(name).map(drop));
        let named = PathBuf::from(named.unwrap_or_default());
        let then = match remedy {
            Remedy::Nothing if why.is_empty() => return,
            Remedy::Nothing => return log::init(&format!("{PROFILER} stays {}: {why}", named.display())),
            Remedy::Take => "",
            Remedy::PassOn => "; that profiler gets every event from this plugin",
        };
        log::init(&format!(
            "{PROFILER}={} is unset: this plugin must be NCCL's profiler to be told of kernel launches{then}",
            named.display()
        ));
        if remedy == Remedy::PassOn {
            let _ = DISPLACED.set(named);
        }
        // SAFETY: this is the first init, on the user's thread. The plugin's own threads, which run by now, read the
        // environment through Rust's std alone, whose lock this call takes. Of C threads the race remains that
        // [`crate::path::tell_nccl`] argues for the variables that the plugin sets.
        unsafe { std::env::remove_var(PROFILER) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_profiler_is_displaced_only_where_events_can_be_passed_on() {
        let of = |named: &str, second: bool, loads: Result<(), String>| {
            Remedy::of(Some(OsStr::new(named)), second, |_| loads).0
        };
        assert_eq!(Remedy::of(None, false, |_| unreachable!()).0, Remedy::Nothing);
        assert_eq!(of("", false, Ok(())), Remedy::Nothing);
        assert_eq!([of("none", false, Ok(())), of("NONE", true, Ok(()))], [Remedy::Take, Remedy::Take]);
        assert_eq!(of("inspector", false, Ok(())), Remedy::PassOn);
        assert_eq!(
            of("inspector", true, Ok(())),
            Remedy::Nothing,
            "there is one place for a second profiler"
        );
        assert_eq!(of("inspector", false, Err("v4 alone".into())), Remedy::Nothing);
    }
}
