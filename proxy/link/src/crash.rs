//! Crashes for tests and for the simulator: an engine that dies after any of its stores to memory that others see.

/// An engine may die here with the feature `sim` (`within`). Does nothing in any other build. Stands after stores
/// to shared memory.
#[inline(always)]
pub fn may_crash() {
    #[cfg(all(feature = "sim", not(loom)))]
    point();
}

#[cfg(all(feature = "sim", not(loom)))]
std::thread_local! {
    /// How many stores the thread still makes.
    static LEFT: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

/// What a crash unwinds with.
#[cfg(all(feature = "sim", not(loom)))]
struct Crash;

#[cfg(all(feature = "sim", not(loom)))]
fn point() {
    let left = LEFT.get();
    if left == 0 {
        LEFT.set(u64::MAX);
        // Without the panic's message.
        std::panic::resume_unwind(Box::new(Crash));
    }
    if left != u64::MAX {
        LEFT.set(left - 1);
    }
}

/// Runs `what`, and cuts it off after the store number `left`, counted from 0. True if it was cut off; else the stores that
/// were made are taken off `left`. What is dropped on the way must store nothing.
#[cfg(all(feature = "sim", not(loom)))]
pub fn within(left: &mut u64, what: impl FnOnce()) -> bool {
    LEFT.set(*left);
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(what));
    let rest = LEFT.replace(u64::MAX);
    match end {
        Ok(()) => {
            *left = rest;
            false
        }
        Err(e) if e.is::<Crash>() => true,
        Err(e) => std::panic::resume_unwind(e),
    }
}
