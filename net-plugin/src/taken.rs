//! Whether NCCL takes this plugin's profiler and tuner, which lie in the library that is its network.
//!
//! NCCL tells its profiler when it launches kernels (`ffi/profiler.rs`). Without being told, the plugin launches the kernel
//! that copies when a message comes. That launch waits while another thread holds the driver's lock, and a thread that
//! copies from GPU memory behind a collective holds the lock until the collective has ended. So the program stops for ever
//! (seen on an H200 with driver 580: PyTorch's DistributedDataParallel, at its first broadcast).

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::log;

/// The variable that names NCCL's profiler.
pub const PROFILER: &str = "NCCL_PROFILER_PLUGIN";

/// The variable that names NCCL's tuner.
const TUNER: &str = "NCCL_TUNER_PLUGIN";

/// NCCL has loaded this plugin's profiler.
static HOOKED: AtomicBool = AtomicBool::new(false);

/// NCCL has no profiler interface that tells of launches: it is older than 2.28.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Records that NCCL has loaded this plugin's profiler. NCCL loads profilers before it makes connections.
pub fn profiler_is_taken() {
    HOOKED.store(true, Ordering::Release);
}

/// Records the version of the network interface that NCCL uses. NCCL 2.28 brought version 11, and the profiler interface
/// that tells of kernel launches.
pub fn interface(version: u32) {
    SILENT.store(version < 11, Ordering::Relaxed);
}

/// Whether NCCL is too old to tell of its kernel launches.
pub fn nccl_is_silent() -> bool {
    SILENT.load(Ordering::Relaxed)
}

/// Warns, once, if NCCL does not tell of its kernel launches. Called for a connection of a GPU that copies.
pub fn tell_without_profiler() {
    static ONCE: Once = Once::new();
    if HOOKED.load(Ordering::Acquire) {
        return;
    }
    ONCE.call_once(|| {
        let cause = match std::env::var_os(PROFILER) {
            _ if nccl_is_silent() => "it is older than 2.28".to_owned(),
            Some(other) => format!("{PROFILER} is {}", other.display()),
            None => "it has loaded another profiler".to_owned(),
        };
        log::warn(&format!(
            "NCCL does not tell this plugin of its kernel launches: {cause}. So each collective waits for the launch of the \
             kernel that copies, and a program that copies from GPU memory behind a collective, or fills its launch queue, \
             can stop for ever; let NCCL load this plugin's profiler, or set PUSHGATE_PATH=bounce on all ranks"
        ));
    });
}

/// Whether a variable that names a library names this one.
fn is_ours(value: &OsStr) -> bool {
    Path::new(value).file_name().is_some_and(|name| name.to_string_lossy().contains("pushgate"))
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
