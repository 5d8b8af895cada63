//! Whether NCCL takes this plugin's tuner, which lies in the library that is its network.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Once;

use crate::log;

/// The variable that names NCCL's tuner.
const TUNER: &str = "NCCL_TUNER_PLUGIN";

/// Whether a variable that names a library names this one.
fn is_ours(value: &OsStr) -> bool {
    Path::new(value).file_name().is_some_and(|name| name.to_string_lossy().contains("pushgate"))
}

/// Which tuner NCCL takes, as far as the variable tells.
pub fn tuner() -> String {
    match std::env::var_os(TUNER).filter(|set| !is_ours(set)) {
        None => "the plugin's".into(),
        Some(set) => set.to_string_lossy().into_owned(),
    }
}

/// Called where NCCL hands over GPU memory, whose collectives the tuner is for. Says, once, what it costs that the user
/// has NCCL take another tuner, or none. (NCCL loads its tuner after this call, so only the variable can tell.)
pub fn tell_without_tuner() {
    static ONCE: Once = Once::new();
    let Some(set) = std::env::var_os(TUNER).filter(|set| !is_ours(set)) else { return };
    ONCE.call_once(|| {
        let takes = if set.eq_ignore_ascii_case("none") { "no tuner" } else { "another tuner" };
        log::init(&format!(
            "{TUNER}={}: NCCL takes {takes}, so this plugin's does not keep the protocol LL from collectives that are faster \
             without it, those of more than 64 KiB on two ranks; unset {TUNER} if they are slow",
            set.display()
        ));
    });
}
