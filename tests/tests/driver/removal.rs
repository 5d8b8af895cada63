//! Functions that go while they are used, and the module, which stays while it is used.

use std::time::{Duration, Instant};
use std::{fs, thread};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::kmod::Device;
use pushgate_driver_shim::uapi;
use pushgate_tests::{hang, wait_until};
use rustix::io::Errno;

use crate::dma_buf::Importer;
use crate::harness::{
    Actor, MIB, PAGE, PATTERN, SLOTS, WINDOW, alone, bind, caching, errno, function, load, log, long, module,
    quiet, read, staging, sysfs, unbind,
};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_function_that_goes_raises_sigbus_and_says_so() {
    let Some(_guard) = alone() else { return };
    let device = function(0);
    let (status, bell) = (device.status().unwrap(), EventFd::new().unwrap());
    let with_vectors = function(2);
    let _bell = with_vectors.doorbell(&bell, 0, 0).unwrap();
    let status2 = with_vectors.status().unwrap();
    let mut reader = Actor::new("reader");
    assert_eq!(reader.hear(), format!("mapped {PATTERN:x}"));
    assert_eq!(status.function(), uapi::PUSHGATE_FUNCTION_LIVE);

    unbind(SLOTS[0]);
    assert_eq!(status.function(), uapi::PUSHGATE_FUNCTION_GONE);
    assert_eq!(status2.function(), uapi::PUSHGATE_FUNCTION_LIVE);
    assert!(!fs::exists("/dev/pushgate0").unwrap());
    reader.say("read");
    assert_eq!(reader.end(), Some(7), "SIGBUS");
    assert_eq!(device.info().unwrap().function, uapi::PUSHGATE_FUNCTION_GONE);
    assert_eq!(errno(device.slice(PAGE, 0)), Errno::NODEV);
    assert_eq!(errno(device.ring(0)), Errno::NODEV);
    assert_eq!(errno(device.doorbell(&bell, 0, 0)), Errno::NODEV);
    // Staging needs no function.
    device.create_staging("after", PAGE, 0).unwrap();

    // A sleeper is woken, whether armed or not.
    assert!(!bell.wait(Some(Duration::ZERO)).unwrap());
    unbind(SLOTS[2]);
    assert!(bell.wait(long()).unwrap());
    assert_eq!(status2.function(), uapi::PUSHGATE_FUNCTION_GONE);
    // A function that was bound again is a new one: old files stay dead.
    bind(SLOTS[0]);
    bind(SLOTS[2]);
    assert_eq!(errno(device.slice(PAGE, 0)), Errno::NODEV);
    function(0).slice(PAGE, 0).unwrap();
    assert_eq!(function(2).info().unwrap().vectors, 4);
}

/// The device itself is taken out under a live mapping and under importers of its slice.
#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_that_is_taken_out_leaves_no_mapping_and_waits_for_what_is_pinned() {
    let Some(_guard) = alone() else { return };
    let importer = Importer::new();
    let file = sysfs(SLOTS[0]);
    for how in ["peer", "pinned"] {
        let device = function(0);
        let exported = device.slice(MIB, 0).unwrap().export().unwrap();
        let mut reader = Actor::new("reader");
        assert_eq!(reader.hear(), format!("mapped {PATTERN:x}"));
        importer.import(how, &exported).unwrap();
        thread::scope(|scope| {
            let removal = scope.spawn(|| fs::write(format!("{file}/remove"), "1").unwrap());
            if how == "pinned" {
                wait_until("the kernel names the importer", || log().contains("waits: pushgate-importer"));
                assert!(!removal.is_finished() && importer.mapping()[3] == 1);
                assert_eq!(importer.ask("again"), Err(Errno::BUSY));
                importer.ask("end").unwrap();
            }
            removal.join().unwrap();
        });
        assert!(!fs::exists(&file).unwrap());
        assert_eq!(importer.mapping()[3], 0, "{how}");
        // A mapping that was given up does not come back.
        let again = if how == "peer" { Errno::NODEV } else { Errno::NODATA };
        assert_eq!(importer.ask("again"), Err(again));
        importer.ask("end").unwrap();
        reader.say("read");
        assert_eq!(reader.end(), Some(7), "SIGBUS");
        assert_eq!(device.info().unwrap().function, uapi::PUSHGATE_FUNCTION_GONE);
        assert_eq!(errno(device.ring(0)), Errno::NODEV);
        fs::write("/sys/bus/pci/rescan", "1").unwrap();
        bind(SLOTS[0]);
    }
}

/// Unbinding while others open, map, read and close: nothing is left, and no process hangs.
#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn unbinding_races_with_everything() {
    let Some(_guard) = alone() else { return };
    let end = Instant::now() + Duration::from_secs(6);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut mapped = 0;
                // After the end, nothing unbinds any more.
                while Instant::now() < end || mapped == 0 {
                    assert!(Instant::now() < end + hang(), "never mapped");
                    // The mapping is not touched, because that would sometimes raise SIGBUS.
                    let Ok(device) = Device::open("/dev/pushgate1") else { continue };
                    if let Ok(slice) = device.slice(PAGE * 16, 0) {
                        mapped += usize::from(slice.map().is_ok());
                        let _ = slice.export();
                    }
                }
            });
        }
        while Instant::now() < end {
            unbind(SLOTS[1]);
            bind(SLOTS[1]);
        }
    });
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn the_module_stays_while_it_is_used() {
    let Some(_guard) = alone() else { return };
    let remove = || module("rmmod", &["pushgate"]);
    let device = function(0);
    assert!(!remove());
    let map = device.status().unwrap();
    drop(device);
    assert!(!remove());
    drop(map);
    let device = staging();
    // The area outlives the next call of rmmod however slow this machine is, and is then freed by name.
    device.create_staging("kept", PAGE, 60_000).unwrap();
    drop(device);
    assert!(!remove(), "an area that no file is attached to still holds the module");
    staging().open_staging("kept").unwrap().free().unwrap();
    quiet();
    assert!(remove());
    assert!(!fs::exists("/dev/pushgate").unwrap() && !fs::exists("/dev/pushgate0").unwrap());
    for _ in 0..5 {
        load(&[]);
        function(3).slice(PAGE, 0).unwrap();
        assert!(remove());
    }
    // A register in the window itself: its page is mapped by itself, and no slice contains it.
    load(&["doorbell_bar=2", &format!("doorbell_offset={}", MIB + 8)]);
    let device = function(0);
    let info = device.info().unwrap();
    assert_ne!(info.features as u32 & uapi::PUSHGATE_FEATURE_DOORBELL_MMAP, 0);
    assert_eq!(info.doorbell_offset, 8);
    assert_eq!(errno(device.map_doorbell()), Errno::NODATA, "with a slice alone");
    let slice = device.slice(WINDOW - MIB - PAGE, 0).unwrap();
    assert_eq!(slice.offset as usize, MIB + PAGE, "the doorbell's page is in no slice");
    let page = device.map_doorbell().unwrap();
    device.ring(0x1234_5678).unwrap();
    assert_eq!(read(&page, 8) as u32, 0x1234_5678);
    assert!(caching(0x10).contains(&"uncached-minus".to_string()), "the doorbell");
    assert_eq!(errno(function(0).slice(MIB + 1, 0)), Errno::NOSPC);
    function(0).slice(MIB, 0).unwrap();
}
