//! Which tuner NCCL takes. This plugin's lies in the library that is NCCL's network, and NCCL looks there last.

use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Once;

use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

use crate::log;

/// The variable that names NCCL's tuner.
const TUNER: &str = "NCCL_TUNER_PLUGIN";
/// What NCCL opens where the variable names nothing.
const DEFAULT: &str = "libnccl-tuner.so";

/// Versions of the tuner interface that NCCL looks for.
const VERSIONS: RangeInclusive<u32> = 2..=6;
/// NCCL opens the program itself for a prefix of this name.
const STATIC: &str = "STATIC_PLUGIN";

/// A tuner.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tuner {
    Ours,
    Nobodys,
    /// The library's name, as NCCL opens it.
    Another(String),
}

/// What a library is to NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Library {
    /// The loader does not open it.
    Missing,
    WithoutTuner,
    WithTuner,
}

/// Whether a library's name is this one's.
fn is_ours(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|name| name.to_string_lossy().contains("pushgate"))
}

/// Which tuner NCCL takes with this value of the variable, where the loader finds what `find` says. As `ncclTunerPluginLoad` and
/// `openPluginLib` do it in NCCL 2.28 to 2.32: the library that the variable names, else `libnccl-tuner-VALUE.so`, without a value
/// `libnccl-tuner.so`; where none opens, the network's library. One that opens and has no tuner is the last one that is tried.
fn taken(value: Option<&str>, find: impl Fn(&str) -> Library) -> Tuner {
    let value = value.filter(|value| !value.is_empty());
    if value.is_some_and(|value| value.eq_ignore_ascii_case("none")) {
        return Tuner::Nobodys;
    }
    let is_short =
        |value: &&str| !(value.contains('/') || value.starts_with("lib") && value.ends_with(".so"));
    let long = value.filter(is_short).map(|value| format!("libnccl-tuner-{value}.so"));
    let names = [Some(value.unwrap_or(DEFAULT).to_owned()), long];
    for name in names.into_iter().flatten() {
        if is_ours(&name) {
            return Tuner::Ours;
        }
        match find(&name) {
            Library::Missing => {}
            Library::WithoutTuner => return Tuner::Nobodys,
            Library::WithTuner => return Tuner::Another(name),
        }
    }
    Tuner::Ours
}

/// Opens a library, as NCCL is about to do.
fn find(name: &str) -> Library {
    let is_static = STATIC.get(..name.len()).is_some_and(|prefix| prefix.eq_ignore_ascii_case(name));
    let name = (!is_static).then_some(name);
    // SAFETY: runs the constructors of a library that NCCL opens itself.
    let Ok(library) = (unsafe { Opened::open(name, RTLD_NOW | RTLD_LOCAL) }) else { return Library::Missing };
    let has = |version: &u32| {
        // SAFETY: the symbol is looked for and not used.
        unsafe { library.get::<*const c_void>(format!("ncclTunerPlugin_v{version}")) }.is_ok()
    };
    let found = if VERSIONS.clone().any(|version| has(&version)) {
        Library::WithTuner
    } else {
        Library::WithoutTuner
    };
    // Closing it would run its destructors, and opening it again its constructors.
    std::mem::forget(library);
    found
}

/// Which tuner NCCL takes in this process.
fn here() -> Tuner {
    let value = std::env::var_os(TUNER).map(|value| value.to_string_lossy().into_owned());
    taken(value.as_deref(), find)
}

/// Which tuner NCCL takes, in words that are alike in all ranks that take the same one.
pub fn tuner() -> String {
    match here() {
        Tuner::Ours => "the plugin's".into(),
        Tuner::Nobodys => "none".into(),
        Tuner::Another(name) => name,
    }
}

/// Called where NCCL hands over GPU memory, whose collectives the tuner is for. Says, once, what it costs that NCCL takes another
/// tuner, or none.
pub fn tell_without_tuner() {
    static ONCE: Once = Once::new();
    let taken = match here() {
        Tuner::Ours => return,
        Tuner::Nobodys => "no tuner".into(),
        Tuner::Another(name) => format!("the tuner {name}"),
    };
    ONCE.call_once(|| {
        log::init(&format!(
            "NCCL takes {taken} ({TUNER} is {}), so this plugin's does not keep the protocol LL from collectives that are faster \
             without it, those of more than 64 KiB on two ranks; let {TUNER} name this plugin's library if they are slow",
            std::env::var_os(TUNER).map_or("not set".into(), |value| value.to_string_lossy().into_owned()),
        ));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_takes_the_first_library_that_opens_and_this_plugin_s_where_none_does() {
        use Library::{Missing, WithTuner, WithoutTuner};
        let of = |value, there: &[&str]| {
            taken(value, |name| if there.contains(&name) { WithTuner } else { Missing })
        };
        let another = |name: &str| Tuner::Another(name.into());
        assert_eq!(of(None, &[]), Tuner::Ours);
        assert_eq!(of(None, &[DEFAULT]), another(DEFAULT));
        assert_eq!(of(Some(""), &[DEFAULT]), another(DEFAULT));
        assert_eq!(of(Some("None"), &["None", DEFAULT]), Tuner::Nobodys);
        assert_eq!(of(Some("x"), &["x", "libnccl-tuner-x.so"]), another("x"));
        assert_eq!(of(Some("x"), &[DEFAULT, "libnccl-tuner-x.so"]), another("libnccl-tuner-x.so"));
        assert_eq!(of(Some("/opt/x.so"), &["/opt/x.so"]), another("/opt/x.so"));
        // Neither a path nor a library's name is made longer.
        for value in ["/opt/x.so", "libx.so"] {
            assert_eq!(of(Some(value), &[DEFAULT, &format!("libnccl-tuner-{value}.so")]), Tuner::Ours);
        }
        for ours in ["libnccl-net-pushgate.so", "/opt/pushgate/libnccl-net-pushgate.so"] {
            assert_eq!(of(Some(ours), &[ours, DEFAULT]), Tuner::Ours);
        }
        assert_eq!(taken(Some("x"), |_| WithoutTuner), Tuner::Nobodys);
    }

    #[test]
    fn a_library_is_found_if_the_loader_opens_it_and_has_a_tuner_if_it_has_the_symbol() {
        assert_eq!(find("libc.so.6"), Library::WithoutTuner);
        assert_eq!(find("static_"), Library::WithoutTuner, "the program");
        assert_eq!(find("libnccl-tuner-that-there-is-not.so"), Library::Missing);
    }
}
