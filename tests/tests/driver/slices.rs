//! Slices of a BAR: zeroed, apart, mapped whole, and kept from others until their former owner has exited.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::time::Duration;
use std::{fs, thread};

use pushgate_driver_shim::kmod::Device;
use pushgate_driver_shim::{fdpass, uapi};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use crate::harness::{
    Actor, MIB, PAGE, PATTERN, SLOTS, WINDOW, alone, as_user, bind, caching, errno, fill, fork_and_read,
    function, module, other_than, read, staging, state, unbind, write,
};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn slices_are_apart_and_zero() {
    let Some(_guard) = alone() else { return };
    for round in 0..3 {
        let devices: Vec<_> = (0..8).map(|_| function(1)).collect();
        let sizes = [PAGE, 3 * PAGE + 1, MIB, 64, MIB - 1, PAGE * 7, MIB / 2, PAGE];
        let aligns = [0, PAGE, 1 << 16, 0, MIB, 8 * PAGE, 0, 0];
        let slices: Vec<_> = (0..8).map(|i| devices[i].slice(sizes[i], aligns[i]).unwrap()).collect();
        let maps: Vec<_> = slices.iter().map(|slice| slice.map().unwrap()).collect();
        for (i, (slice, map)) in slices.iter().zip(&maps).enumerate() {
            assert_eq!(slice.bytes, sizes[i].next_multiple_of(PAGE));
            assert_eq!(slice.offset as usize % aligns[i].max(PAGE), 0);
            assert_eq!(other_than(map, 0), None, "slice {i} of round {round}");
            fill(map, PATTERN + i as u64);
        }
        for (i, map) in maps.iter().enumerate() {
            assert_eq!(other_than(map, PATTERN + i as u64), None, "slice {i} was written by another");
        }
        let mut ranges: Vec<_> = slices.iter().map(|s| (s.offset, s.offset + s.bytes as u64)).collect();
        ranges.sort();
        assert!(ranges.windows(2).all(|two| two[0].1 <= two[1].0), "{ranges:?}");
        // The slices are dropped by now; the same process may get them again, zeroed.
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_slices_mapping_stays_whole_and_its_processs_own() {
    let Some(_guard) = alone() else { return };
    let device = function(0);
    let slice = device.slice(16 * PAGE, 0).unwrap();
    let map = slice.map().unwrap();
    let at = map.as_ptr().as_ptr();
    let map_at = |bytes, protection, flags, offset| {
        // SAFETY: the kernel chooses the place.
        let result = unsafe { rustix::mm::mmap(null_mut(), bytes, protection, flags, &device, offset) };
        result.err()
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map_at(PAGE, both, MapFlags::PRIVATE, 0), Some(Errno::INVAL));
    assert_eq!(map_at(17 * PAGE, both, MapFlags::SHARED, 0), Some(Errno::INVAL));
    assert_eq!(map_at(PAGE, both, MapFlags::SHARED, 16 * PAGE as u64), Some(Errno::INVAL));
    assert_eq!(map_at(PAGE, both | ProtFlags::EXEC, MapFlags::SHARED, 0), Some(Errno::ACCESS));
    let status = uapi::PUSHGATE_MMAP_STATUS;
    assert_eq!(map_at(PAGE, both, MapFlags::SHARED, status), Some(Errno::ACCESS));
    assert_eq!(map_at(2 * PAGE, ProtFlags::READ, MapFlags::SHARED, status), Some(Errno::INVAL));
    assert_eq!(map_at(PAGE, both, MapFlags::SHARED, status + PAGE as u64), Some(Errno::INVAL));
    assert_eq!(map_at(PAGE, both, MapFlags::SHARED, uapi::PUSHGATE_MMAP_STAGING), Some(Errno::NODATA));
    assert_eq!(map_at(PAGE, both, MapFlags::SHARED, 0x7fff_ffff_ffff_f000), Some(Errno::NODATA));
    assert_eq!(
        map_at(PAGE, both, MapFlags::SHARED, uapi::PUSHGATE_MMAP_DOORBELL + PAGE as u64),
        Some(Errno::INVAL)
    );
    // SAFETY: these calls are refused, so the mapping stays as it is.
    unsafe {
        assert_eq!(rustix::mm::munmap(at.cast(), PAGE), Err(Errno::INVAL), "no part of it alone");
        assert_eq!(rustix::mm::munmap(at.add(5 * PAGE).cast(), PAGE), Err(Errno::INVAL));
        assert_eq!(rustix::mm::mprotect(at.cast(), PAGE, MprotectFlags::READ), Err(Errno::INVAL));
        let grow = rustix::mm::mremap(at.cast(), 16 * PAGE, 17 * PAGE, MremapFlags::MAYMOVE);
        assert!(grow.is_err(), "{grow:?}");
        let twice = rustix::mm::mremap(at.cast(), 0, 16 * PAGE, MremapFlags::MAYMOVE);
        assert!(twice.is_err(), "{twice:?}");
    }
    assert_eq!(caching(0x10), ["write-combining"]);
    fill(&map, PATTERN);
    assert_eq!(other_than(&map, PATTERN), None);
    // A second mapping of a part shows the same bytes.
    let again = slice.map().unwrap();
    assert_eq!(other_than(&again, PATTERN), None);
    drop(again);
    // A child has no mapping: a mapping that it passed to a GPU would outlive its parent unnoticed.
    assert_eq!(fork_and_read(&map, PATTERN) & 0x7f, 11);
    // The mapping holds the file, and the file holds the slice.
    drop(device);
    write(&map, 0, PATTERN ^ 1);
    assert_eq!(read(&map, 0), PATTERN ^ 1);
    assert_eq!(state()["slices"], 1);
    assert_eq!(function(0).slice(WINDOW, 0).map(|_| ()).map_err(|e| e.errno()), Err(Some(28)));
    drop(map);
    let whole = function(0);
    let map = whole.slice(WINDOW, 0).unwrap().map().unwrap();
    assert_eq!(other_than(&map, 0), None);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn taking_and_giving_back_in_a_loop_leaves_little() {
    let Some(_guard) = alone() else { return };
    for round in 0..400 {
        let pages = if round % 2 == 0 { round % 97 } else { 200 - round % 89 };
        let device = function(1);
        let map = device.slice((1 + pages) * PAGE, 0).unwrap().map().unwrap();
        assert_eq!((read(&map, 0), read(&map, map.len() - 8)), (0, 0));
        fill(&map, PATTERN);
    }
    let state = state();
    assert!(state["retired"] <= 2, "{state:?}");
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_passed_over_a_socket_is_the_same_file() {
    let Some(_guard) = alone() else { return };
    let (here, there) = UnixStream::pair().unwrap();
    let device = function(0);
    let slice = device.slice(MIB, 0).unwrap();
    fill(&slice.map().unwrap(), PATTERN);
    fdpass::send_message(&here, b"device", &[device.as_fd()]).unwrap();
    drop(device);
    let (_, mut descriptors) = fdpass::recv_message(&there, 64, 1).unwrap();
    let device = Device::from_fd(descriptors.remove(0)).unwrap();
    assert_eq!(errno(device.slice(PAGE, 0)), Errno::EXIST);
    // A process that has the descriptor acts as the user who opened it, not as its own user.
    device.create_staging("by-root", PAGE, 0).unwrap();
    as_user(1000, || assert_eq!(errno(staging().open_staging("by-root")), Errno::NOENT));
    // A descriptor of any other file is refused.
    assert!(Device::from_fd(fs::File::open("/dev/null").unwrap().into()).is_err());
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_slice_waits_for_its_former_owner_to_exit() {
    let Some(_guard) = alone() else { return };
    let whole = || function(0).slice(WINDOW, 0).map(|_| ()).map_err(|e| e.errno().unwrap());
    let mut owner = Actor::new("former-owner");
    assert_eq!(owner.hear(), "given back");
    // The process has unmapped and closed everything, but a GPU may still have the slice mapped.
    assert_eq!(whole(), Err(Errno::NOSPC.raw_os_error()));
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(whole(), Err(Errno::NOSPC.raw_os_error()));
    assert_eq!((state()["files"], state()["retired"]), (0, 1));
    // The module stays too; otherwise the record would be lost.
    assert!(!module("rmmod", &["pushgate"]));
    // Binding the function to the driver again does not lose the record either.
    unbind(SLOTS[0]);
    bind(SLOTS[0]);
    assert_eq!(whole(), Err(Errno::NOSPC.raw_os_error()));
    owner.say("again");
    assert_eq!(owner.hear(), "taken again");
    assert_eq!(whole(), Err(Errno::NOSPC.raw_os_error()));
    owner.kill();
    let device = function(0);
    let slice = device.slice(WINDOW, 0).expect("it is dead, so it is free at once");
    assert_eq!(other_than(&slice.map().unwrap(), 0), None, "what it wrote is gone");
}
