//! Staging: areas that outlive their owner, their time, their limits, their memory.

use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use pushgate_driver_shim::kmod::{Device, view_bytes};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory, is_memory};
use pushgate_driver_shim::uapi::{PUSHGATE_MMAP_DOORBELL, PUSHGATE_MMAP_STAGING, PUSHGATE_MMAP_STATUS};
use pushgate_tests::{patience, wait_until};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap};

use crate::harness::{
    Actor, MIB, PAGE, PATTERN, alone, as_user, errno, fill, fork_and_read, function, other_than, quiet, read,
    staging, state,
};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn staging_survives_its_owners_sigkill() {
    let Some(_guard) = alone() else { return };
    let mut owner = Actor::new("staging-owner");
    assert_eq!(owner.hear(), "written");
    assert_eq!(errno(staging().open_staging("survivor")), Errno::BUSY);
    as_user(1000, || assert_eq!(errno(staging().open_staging("survivor")), Errno::NOENT));
    owner.kill();
    assert_eq!((state()["files"], state()["areas"], state()["areas_idle"]), (0, 1, 1));
    as_user(1000, || {
        assert_eq!(errno(staging().open_staging("survivor")), Errno::NOENT);
        // Each user has names of their own; another user's names are invisible.
        staging().create_staging("survivor", PAGE, 0).unwrap();
    });
    let device = staging();
    let area = device.open_staging("survivor").unwrap();
    assert_eq!((area.bytes, area.attaches), (3 * MIB + PAGE, 2));
    let map = area.map().unwrap();
    let wrong = (0..map.len()).step_by(8).find(|at| read(&map, *at) != *at as u64 ^ PATTERN);
    assert_eq!(wrong, None, "every byte is kept");
    assert_eq!(errno(staging().open_staging("survivor")), Errno::BUSY);
    assert_eq!(errno(device.open_staging("survivor")), Errno::BUSY, "one for each file");
    area.free().unwrap();
    assert_eq!(errno(staging().open_staging("survivor")), Errno::NOENT);
    // Freed but mapped: the area still exists, and still counts.
    assert_eq!(read(&map, 0), PATTERN);
    drop(device);
    assert_eq!(state()["areas"], 1);
    drop(map);
    quiet();
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn an_area_that_nobody_takes_up_is_freed_after_its_time() {
    let Some(_guard) = alone() else { return };
    let device = staging();
    // What must happen in time happens within a quarter of it.
    let time = patience(Duration::from_millis(1400));
    device.create_staging("short", MIB, time.as_millis().try_into().unwrap()).unwrap();
    thread::sleep(time * 3 / 2);
    assert_eq!(state()["areas"], 1, "while a file is attached its time does not run");
    drop(device);
    // Each time the area is taken over before its time runs out, that time starts again.
    for _ in 0..3 {
        thread::sleep(time / 4);
        staging().open_staging("short").unwrap();
    }
    let opened = Instant::now();
    wait_until("the area is freed", || state()["areas"] == 0);
    // Measured from before the call, because the area's time begins when the call ends.
    assert!(opened.elapsed() >= time * 3 / 4, "it was freed {:?} after it was opened", opened.elapsed());
    assert_eq!(errno(staging().open_staging("short")), Errno::NOENT);
    assert_eq!(state()["areas_bytes"], 0);
    staging().create_staging("never", MIB, 0).unwrap();
    quiet();
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn staging_has_limits_for_each_user() {
    let Some(_guard) = alone() else { return };
    let set = |name: &str, value: u64| {
        fs::write(format!("/sys/module/pushgate/parameters/{name}"), value.to_string()).unwrap();
    };
    set("staging_user_bytes", 2 * MIB as u64);
    set("staging_user_areas", 3);
    let user = || as_user(1000, staging);
    let devices: Vec<_> = (0..4).map(|_| user()).collect();
    assert_eq!(errno(devices[0].create_staging("a", 2 * MIB + 1, 0)), Errno::DQUOT);
    devices[0].create_staging("a", MIB, 0).unwrap();
    assert_eq!(errno(devices[1].create_staging("a", PAGE, 0)), Errno::EXIST);
    assert_eq!(errno(devices[1].create_staging("b", MIB + 1, 0)), Errno::DQUOT);
    devices[1].create_staging("b", PAGE, 0).unwrap();
    devices[2].create_staging("c", PAGE, 0).unwrap();
    assert_eq!(errno(devices[3].create_staging("d", PAGE, 0)), Errno::MFILE);
    // Another user has a share of their own.
    staging().create_staging("a", 2 * MIB, 0).unwrap();
    drop(devices);
    quiet();
    user().create_staging("d", 2 * MIB, 0).unwrap();
    set("staging_user_bytes", 1 << 30);
    set("staging_user_areas", 64);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn staging_is_ordinary_memory() {
    let Some(_guard) = alone() else { return };
    let device = function(1);
    let area = device.create_staging("plain", 8 * MIB, 0).unwrap();
    println!("8 MiB of staging in {} contiguous pieces", area.pieces.unwrap());
    let map = area.map().unwrap();
    assert_eq!(other_than(&map, 0), None);
    fill(&map, PATTERN);
    assert_eq!(fork_and_read(&map, PATTERN) & 0x7f, 11, "a child does not have it");
    // SAFETY: the pages are given back, and come again unchanged on the next access.
    unsafe {
        let at = map.as_ptr().as_ptr();
        rustix::mm::madvise(at.cast(), MIB, rustix::mm::Advice::LinuxDontNeed).unwrap();
        assert_eq!(other_than(&map, PATTERN), None);
        // Parts may be unmapped in any way.
        rustix::mm::munmap(at.add(MIB).cast(), MIB).unwrap();
        rustix::mm::mprotect(at.cast(), PAGE, MprotectFlags::READ).unwrap();
    }
    assert_eq!(read(&map, MIB - 8), PATTERN);
    assert_eq!(read(&map, 2 * MIB), PATTERN);
    let again = area.map().unwrap();
    assert_eq!(other_than(&again, PATTERN), None);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn p8_a_view_of_an_area_can_only_be_read_and_keeps_the_area() {
    let Some(_guard) = alone() else { return };
    let device = staging();
    let bytes = MIB + PAGE;
    // 100 bytes less: the area has whole pages.
    let area = device.create_staging("view", bytes - 100, 0).unwrap();
    let map = area.map().unwrap();
    fill(&map, PATTERN);
    let view = area.export().unwrap();
    let again = || view.try_clone().unwrap();
    assert_eq!(view_bytes(view.as_fd()), Some(bytes as u64));
    assert!(is_memory(view.as_fd()) && !is_memory(device.as_fd()));
    assert_eq!(view_bytes(device.as_fd()), None, "the device itself is no view");
    for wrong in [0, 1, bytes - PAGE, bytes + 1] {
        assert!(ReadOnlyMemory::from_fd(again(), wrong).is_err(), "{wrong} bytes");
    }
    assert!(SharedMemory::from_fd(again(), bytes).is_err());
    let own = device.as_fd().try_clone_to_owned().unwrap();
    assert!(ReadOnlyMemory::from_fd(own, bytes).is_err());
    let reader = ReadOnlyMemory::from_fd(again(), bytes - 100).unwrap();
    let load = |at: usize| {
        // SAFETY: the words are only loaded.
        let words = unsafe { reader.words(at, 1) };
        words[0].load(Ordering::Relaxed)
    };
    assert_eq!((load(0), load(MIB)), (PATTERN, PATTERN));
    // SAFETY: an atomic word of our mapping.
    unsafe { &*map.as_ptr().as_ptr().cast::<AtomicU64>() }.store(7, Ordering::Relaxed);
    assert_eq!(load(0), 7);

    let (both, read_only) = (ProtFlags::READ | ProtFlags::WRITE, ProtFlags::READ);
    let maps = |protection, flags, offset| {
        // SAFETY: the kernel chooses the place; what it maps against expectation stays mapped.
        unsafe { mmap(null_mut(), PAGE, protection, flags, &view, offset) }.map(drop)
    };
    let at = PUSHGATE_MMAP_STAGING;
    assert_eq!(maps(both, MapFlags::SHARED, at), Err(Errno::ACCESS));
    assert_eq!(maps(read_only | ProtFlags::EXEC, MapFlags::SHARED, at), Err(Errno::ACCESS));
    assert_eq!(maps(both, MapFlags::PRIVATE, at), Err(Errno::INVAL));
    for offset in [0, PUSHGATE_MMAP_STATUS, PUSHGATE_MMAP_DOORBELL, at + bytes as u64] {
        assert_eq!(maps(read_only, MapFlags::SHARED, offset), Err(Errno::INVAL));
    }
    // SAFETY: the range is `reader`'s mapping; the call must fail.
    let more = unsafe {
        rustix::mm::mprotect(
            reader.as_ptr().as_ptr().cast(),
            PAGE,
            MprotectFlags::READ | MprotectFlags::WRITE,
        )
    };
    assert_eq!(more, Err(Errno::ACCESS));
    assert_eq!(rustix::io::write(&view, b"x"), Err(Errno::BADF));
    // A process that holds a view makes no call of the module.
    let other = Device::from_fd(again()).unwrap();
    assert_eq!(errno(other.open_staging("view").map(drop)), Errno::NOTTY);
    assert_eq!(errno(other.create_staging("other", PAGE, 0).map(drop)), Errno::NOTTY);
    assert_eq!(errno(other.slice(PAGE, 0).map(drop)), Errno::NOTTY);
    drop(other);

    // Freed, closed and unmapped by its owner, the area stays for those who read it.
    area.free().unwrap();
    drop((map, device));
    assert_eq!((state()["areas"], load(MIB)), (1, PATTERN));
    drop(view);
    assert_eq!((state()["areas"], load(MIB)), (1, PATTERN));
    drop(reader);
    wait_until("the area is gone", || state()["areas"] == 0);
    quiet();
}

/// Bytes of memory that the kernel has left; the module's tests must not use any up.
fn available() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemFree:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() << 10
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn nothing_leaks() {
    let Some(_guard) = alone() else { return };
    let round = || {
        for i in 0..40 {
            let device = function(i % 4);
            let area = device.create_staging("leak", 4 * MIB, 0).unwrap();
            fill(&area.map().unwrap(), PATTERN);
            let slice = function(1);
            let slice = slice.slice(PAGE, 0).unwrap();
            slice.map().unwrap();
            slice.export().unwrap();
        }
        // The slice stays retired as long as this process, which has mapped it, lives.
        let left = || ["files", "areas", "areas_bytes"].iter().any(|name| state()[*name] > 0);
        wait_until("the module holds no area", || !left());
        thread::sleep(Duration::from_millis(300));
        available()
    };
    round();
    let (before, after) = (round(), round());
    println!("free memory over 160 MiB of staging: {} KiB less", (before - after) >> 10);
    assert!(before - after < 32 * MIB as i64);
}
