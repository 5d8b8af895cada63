//! A slice as a dma-buf, for an importer of another driver.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use crate::harness::{
    MIB, PAGE, PATTERN, SLOTS, WINDOW, alone, bind, errno, function, module, read, sysfs, unbind, write,
};

/// The importer of driver-shim/kmod/test, whose first lines say what it takes. Its module is loaded as long as this lives.
pub struct Importer;

const FILE: &str = "/sys/kernel/debug/pushgate-importer/import";

impl Importer {
    pub fn new() -> Importer {
        let file = format!("{}/pushgate-importer.ko", std::env::var("KMOD_DIR").unwrap());
        assert!(module("insmod", &[&file]));
        Importer
    }

    pub fn ask(&self, command: &str) -> Result<(), Errno> {
        fs::write(FILE, command).map_err(|error| Errno::from_io_error(&error).unwrap())
    }

    pub fn import(&self, how: &str, descriptor: &OwnedFd) -> Result<(), Errno> {
        self.ask(&format!("{how} {}", descriptor.as_raw_fd()))
    }

    /// Address, bytes and first word of the last mapping, and 1 if it is still there.
    pub fn mapping(&self) -> [u64; 4] {
        let text = fs::read_to_string(FILE).unwrap();
        let words: Vec<_> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();
        words.try_into().unwrap()
    }
}

impl Drop for Importer {
    fn drop(&mut self) {
        assert!(module("rmmod", &["pushgate_importer"]));
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn an_importer_attaches_to_an_exported_slice() {
    let Some(_guard) = alone() else { return };
    let importer = Importer::new();
    let device = function(0);
    // A gap separates the first slice from the second, so that an offset shows.
    let first = function(0);
    first.slice(3 * PAGE, 0).unwrap();
    let slice = device.slice(MIB, 0).unwrap();
    let map = slice.map().unwrap();
    write(&map, 0, PATTERN);
    let exported = slice.export().unwrap();
    // An importer that would look for pages is refused.
    assert_eq!(importer.import("plain", &exported), Err(Errno::OPNOTSUPP));
    importer.import("peer", &exported).unwrap();
    let resource = fs::read_to_string(format!("{}/resource", sysfs(SLOTS[0]))).unwrap();
    let bar = resource.lines().nth(2).unwrap().split(' ').next().unwrap().trim_start_matches("0x");
    let bar = u64::from_str_radix(bar, 16).unwrap();
    assert_eq!(importer.mapping(), [bar + slice.offset, MIB as u64, PATTERN, 1]);
    assert_eq!(read(&map, 8), !PATTERN, "what the importer wrote");

    // The dma-buf keeps the slice, and keeps others off it, after the file is gone.
    let offset = slice.offset;
    drop(map);
    drop(device);
    importer.import("pinned", &exported).unwrap();
    assert_eq!(importer.mapping()[0], bar + offset);
    importer.ask("end").unwrap();
    assert_eq!(errno(function(0).slice(WINDOW - 3 * PAGE, 0)), Errno::NOSPC);
    // After the function is gone nothing can map the slice any more; existing dma-bufs stay.
    unbind(SLOTS[0]);
    assert_eq!(importer.import("peer", &exported), Err(Errno::NODEV));
    bind(SLOTS[0]);
    assert_eq!(importer.import("peer", &exported), Err(Errno::NODEV));
    assert!(!module("rmmod", &["pushgate"]), "a dma-buf holds the module");
    drop(exported);
    drop(first);
    function(0).slice(WINDOW, 0).unwrap();
}
