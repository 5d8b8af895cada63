//! A slice as a dma-buf, for an importer of another driver.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use crate::harness::{
    MIB, PAGE, PATTERN, SLOTS, WINDOW, alone, bind, errno, function, module, read, sysfs, unbind, write,
};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn an_importer_attaches_to_an_exported_slice() {
    let Some(_guard) = alone() else { return };
    let file = format!("{}/pushgate-importer.ko", std::env::var("KMOD_DIR").unwrap());
    assert!(module("insmod", &[&file]));
    let import = |descriptor: &OwnedFd| -> std::io::Result<[u64; 3]> {
        let path = "/sys/kernel/debug/pushgate-importer/import";
        fs::write(path, descriptor.as_raw_fd().to_string())?;
        let text = fs::read_to_string(path)?;
        let words: Vec<_> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();
        Ok([words[0], words[1], words[2]])
    };
    let device = function(0);
    // A gap separates the first slice from the second, so that an offset shows.
    let first = function(0);
    first.slice(3 * PAGE, 0).unwrap();
    let slice = device.slice(MIB, 0).unwrap();
    let map = slice.map().unwrap();
    write(&map, 0, PATTERN);
    let exported = slice.export().unwrap();
    let [address, bytes, word] = import(&exported).unwrap();
    let resource = fs::read_to_string(format!("{}/resource", sysfs(SLOTS[0]))).unwrap();
    let bar = resource.lines().nth(2).unwrap().split(' ').next().unwrap().trim_start_matches("0x");
    let bar = u64::from_str_radix(bar, 16).unwrap();
    assert_eq!((address, bytes, word), (bar + slice.offset, MIB as u64, PATTERN));
    assert_eq!(read(&map, 8), !PATTERN, "what the importer wrote");

    // The dma-buf keeps the slice, and keeps others off it, after the file is gone.
    let offset = slice.offset;
    drop(map);
    drop(device);
    assert_eq!(import(&exported).unwrap()[0], bar + offset);
    assert_eq!(errno(function(0).slice(WINDOW - 3 * PAGE, 0)), Errno::NOSPC);
    // After the function is gone nothing can map the slice any more; existing dma-bufs stay.
    unbind(SLOTS[0]);
    assert_eq!(import(&exported).unwrap_err().raw_os_error(), Some(Errno::NODEV.raw_os_error()));
    bind(SLOTS[0]);
    assert_eq!(import(&exported).unwrap_err().raw_os_error(), Some(Errno::NODEV.raw_os_error()));
    assert!(!module("rmmod", &["pushgate"]), "a dma-buf holds the module");
    drop(exported);
    drop(first);
    function(0).slice(WINDOW, 0).unwrap();
    assert!(module("rmmod", &["pushgate_importer"]));
}
