//! The limits of slices for each user.

use std::{fs, thread};

use pushgate_driver_shim::kmod::Device;
use rustix::io::Errno;

use crate::harness::{Actor, MIB, PAGE, WINDOW, alone, as_user, errno, function, state};

/// Sets one of the module's limits of slices for each user until it is dropped.
struct SliceLimit {
    file: &'static str,
    before: String,
}

impl SliceLimit {
    fn new(bytes: usize) -> SliceLimit {
        Self::of("/sys/module/pushgate/parameters/slice_user_bytes", bytes)
    }

    fn slices(count: usize) -> SliceLimit {
        Self::of("/sys/module/pushgate/parameters/slice_user_slices", count)
    }

    fn of(file: &'static str, value: usize) -> SliceLimit {
        let before = fs::read_to_string(file).unwrap();
        fs::write(file, value.to_string()).unwrap();
        SliceLimit { file, before }
    }
}

impl Drop for SliceLimit {
    fn drop(&mut self) {
        fs::write(self.file, &self.before).unwrap();
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_user_at_its_limit_of_slices_stops_no_other() {
    let Some(_guard) = alone() else { return };
    let _limit = SliceLimit::new(2 * MIB);
    let devices = |user| as_user(user, || [0, 1, 0].map(function));
    let (mine, others) = (devices(1000), devices(1001));
    // The limit covers all functions together, and counts for the user who opened the file, not for
    // the caller.
    mine[0].slice(MIB, 0).unwrap();
    mine[1].slice(MIB, 0).unwrap();
    assert_eq!(errno(mine[2].slice(1, 0)), Errno::DQUOT);
    as_user(1001, || assert_eq!(errno(mine[2].slice(1, 0)), Errno::DQUOT));
    others[0].slice(2 * MIB, 0).unwrap();
    assert_eq!(errno(others[1].slice(PAGE, 0)), Errno::DQUOT);
    function(0).slice(MIB, 0).unwrap();
    // A lack of room is reported as such, not as a limit.
    assert_eq!(errno(function(0).slice(WINDOW, 0)), Errno::NOSPC);
    assert_eq!(errno(function(1).slice(2 * MIB + PAGE, 0)), Errno::DQUOT);
    // What is given back can be had again, and a dma-buf keeps its part of the share.
    let [first, second, third] = mine;
    drop(first);
    third.slice(MIB, 0).unwrap();
    drop(third);
    drop(second);
    drop(others);
    let again = devices(1000);
    let exported = again[0].slice(2 * MIB - PAGE, 0).unwrap().export().unwrap();
    let [first, second, _] = again;
    drop(first);
    assert_eq!(errno(second.slice(2 * PAGE, 0)), Errno::DQUOT);
    drop(exported);
    let slice = second.slice(2 * MIB, 0).unwrap();
    // A limit that falls below what a user has takes nothing away.
    let _lower = SliceLimit::new(0);
    assert_eq!(errno(function(3).slice(1, 0)), Errno::DQUOT);
    slice.map().unwrap();
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_user_gets_no_more_slices_than_the_limit() {
    let Some(_guard) = alone() else { return };
    let _limit = SliceLimit::slices(4);
    let take = |device: &Device| device.slice(PAGE, 0).map(|slice| slice.offset);
    // The limit covers all functions together.
    let held: Vec<_> = (0..4).map(|i| function(i % 2)).collect();
    for device in &held {
        take(device).unwrap();
    }
    let more = function(1);
    assert_eq!(errno(take(&more)), Errno::DQUOT);
    as_user(1000, || take(&function(1)).map(drop)).unwrap();
    // Slices given back unmapped no longer count; slices given back mapped do.
    drop(held);
    for _ in 0..4 {
        let device = function(0);
        device.slice(PAGE, 0).unwrap().map().unwrap();
    }
    assert_eq!(state()["retired"], 1, "one place, taken four times");
    // Others' slices between them keep them apart.
    let between: Vec<_> = (0..3).map(|_| as_user(1000, || function(0))).collect();
    let kept: Vec<_> = (0..4).map(|_| function(0)).collect();
    for (i, device) in kept.iter().enumerate() {
        device.slice(PAGE, 0).unwrap().map().unwrap();
        between.get(i).map(|device| take(device).unwrap());
    }
    drop(kept);
    assert_eq!(state()["retired"], 4);
    assert_eq!(errno(more.slice(PAGE, 0)), Errno::DQUOT, "on a function where there is none to take over");
    drop(between);
    // A new slice takes the place of a retired one, or of several.
    for pages in [1, 3] {
        function(0).slice(pages * PAGE, 0).unwrap();
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_slice_given_back_can_be_taken_again_in_parts() {
    let Some(_guard) = alone() else { return };
    let limit = SliceLimit::new(3 * MIB);
    let (first, second) = (function(0), function(0));
    first.slice(MIB, 0).unwrap();
    let slice = second.slice(2 * MIB, 0).unwrap();
    assert_eq!(slice.offset, MIB as u64);
    slice.map().unwrap();
    drop((first, second));
    assert_eq!(state()["retired"], 1);
    drop(limit);
    let _limit = SliceLimit::new(2 * MIB);
    // There is room before it, but the user may not have that in addition.
    let halves = [0, 0].map(function);
    let offsets = halves.each_ref().map(|device| device.slice(MIB, 0).unwrap().offset);
    assert_eq!(offsets, [MIB as u64, 2 * MIB as u64]);
    assert_eq!(errno(function(0).slice(MIB, 0)), Errno::DQUOT);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_retired_slice_counts_for_its_user_until_the_process_exits() {
    let Some(_guard) = alone() else { return };
    let _limit = SliceLimit::new(WINDOW);
    let take = || function(1).slice(PAGE, 0).map(|_| ()).map_err(|e| e.errno().unwrap());
    let mut owner = Actor::new("former-owner");
    assert_eq!(owner.hear(), "given back");
    assert_eq!((state()["files"], state()["retired"]), (0, 1));
    assert_eq!(take(), Err(Errno::DQUOT.raw_os_error()));
    as_user(1000, || take().unwrap());
    // For the process itself it counts once.
    owner.say("again");
    assert_eq!(owner.hear(), "taken again");
    owner.kill();
    take().expect("it is dead, so its share is free at once");
}

/// Bytes that a process had and then takes again, at another place or in other sizes, count once
/// each.
#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn overlaps_of_retired_slices_count_once() {
    let Some(_guard) = alone() else { return };
    let _limit = SliceLimit::new(2 * MIB);
    let first = function(1);
    first.slice(MIB, 0).unwrap();
    drop(function(1).slice(MIB, 0).unwrap().map().unwrap());
    drop(first);
    {
        // There is room in front, but beyond the limit, so the slice goes where the retired one
        // was.
        let _lower = SliceLimit::new(MIB);
        assert_eq!(function(1).slice(MIB, 0).unwrap().offset, MIB as u64);
    }
    for round in 0..60 {
        // Another user's slice pushes ours to ever other places, within 2 MiB in all.
        let filler = as_user(1001, || function(1));
        let pages = 1 + round * 37 % 200;
        filler.slice(pages * PAGE, 0).unwrap();
        drop(function(1).slice((1 + round * 53 % 311) * PAGE, 0).unwrap().map().unwrap());
    }
    function(1).slice(2 * MIB, 0).unwrap();
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_limit_holds_for_calls_at_the_same_time() {
    let Some(_guard) = alone() else { return };
    let _limit = SliceLimit::new(5 * 64 * PAGE);
    for _ in 0..20 {
        let devices: Vec<_> = (0..16).map(|n| function(n % 2)).collect();
        let start = std::sync::Barrier::new(devices.len());
        let ask = |device: &Device| {
            start.wait();
            device.slice(64 * PAGE, 0).map(|_| ()).map_err(|e| e.errno().unwrap())
        };
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = devices.iter().map(|device| scope.spawn(|| ask(device))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let refused = Err(Errno::DQUOT.raw_os_error());
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 5, "{results:?}");
        assert_eq!(results.iter().filter(|result| **result == refused).count(), 11, "{results:?}");
    }
}
