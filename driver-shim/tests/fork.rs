//! Tests shared memory in a child of `fork`: the memory is not there, and dropping its handle
//! touches nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use pushgate_driver_shim::fork::{Forked, Owner};
use pushgate_driver_shim::memory::SharedMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Pid, WaitOptions, waitpid};

unsafe extern "C" {
    fn fork() -> i32;
}

#[test]
fn p8_a_child_has_no_shared_mapping_and_unmaps_nothing_of_its_own() {
    let owner = Owner::here();
    let memory = SharedMemory::builder("fork-test", 4096).create().unwrap();
    // SAFETY: the child has only this thread, and exits below.
    let child = unsafe { fork() };
    if child == 0 {
        let checks = AssertUnwindSafe(|| {
            assert_eq!(owner.check(), Err(Forked));
            assert!(Owner::here().is_here() && Owner::here() != owner);
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains("fork-test"));
            // A mapping of the child's own, where the parent has its memory.
            let place = memory.as_ptr().as_ptr().cast();
            let both = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: nothing is mapped there, as was just checked.
            let own = unsafe { mmap_anonymous(place, 4096, both, MapFlags::PRIVATE | MapFlags::FIXED) };
            let own = own.unwrap().cast::<u64>();
            // SAFETY: mapped a moment ago, and only this thread uses it.
            unsafe { own.write(7) };
            drop(memory);
            // SAFETY: mapped above, unless the drop unmapped it, in which case this access faults.
            assert_eq!(unsafe { own.read() }, 7);
        });
        std::process::exit(i32::from(catch_unwind(checks).is_err()));
    }
    let (_, status) = waitpid(Pid::from_raw(child), WaitOptions::empty()).unwrap().expect("it ended");
    assert_eq!(status.exit_status(), Some(0), "{status:?}");
    memory.words(0, 1)[0].store(3, Ordering::Relaxed);
    assert!(owner.is_here());
}
