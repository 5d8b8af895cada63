//! The module's files and calls: what they answer, and what they refuse.

use std::ffi::c_void;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::kmod::{Device, commands};
use pushgate_driver_shim::uapi;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::harness::{Actor, PAGE, WINDOW, alone, errno, function, long, quiet, staging, state};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_says_what_it_offers() {
    let Some(_guard) = alone() else { return };
    let plain = staging().info().unwrap();
    assert_eq!((plain.features, plain.window_bytes, plain.vectors), (0x41, 0, 0));
    assert_eq!(staging().status().unwrap().function(), uapi::PUSHGATE_FUNCTION_NONE);
    for (number, vectors) in [(0, 0), (1, 0), (2, 4), (3, 4)] {
        let info = function(number).info().unwrap();
        assert_eq!((info.window_bytes, info.vectors), (WINDOW as u64, vectors), "pushgate{number}");
        assert_eq!(info.function, uapi::PUSHGATE_FUNCTION_LIVE);
        // The device's register lies in a BAR of 256 bytes, which is never mapped.
        assert_eq!(info.features as u32 & uapi::PUSHGATE_FEATURE_DOORBELL_MMAP, 0);
        assert_ne!(info.features as u32 & uapi::PUSHGATE_FEATURE_DOORBELL_RING, 0);
        assert_eq!(function(number).status().unwrap().function(), uapi::PUSHGATE_FUNCTION_LIVE);
    }
    assert!(!fs::exists("/dev/pushgate4").unwrap());
}

/// The commands, and the size of each one's struct.
const CALLS: [(Opcode, usize); 10] = [
    (commands::INFO, size_of::<uapi::pushgate_info>()),
    (commands::SLICE_ALLOC, size_of::<uapi::pushgate_slice_alloc>()),
    (commands::SLICE_EXPORT, size_of::<uapi::pushgate_slice_export>()),
    (commands::STAGING_CREATE, size_of::<uapi::pushgate_staging_create>()),
    (commands::STAGING_OPEN, size_of::<uapi::pushgate_staging_open>()),
    (commands::STAGING_FREE, size_of::<uapi::pushgate_staging_free>()),
    (commands::DOORBELL_SET, size_of::<uapi::pushgate_doorbell_set>()),
    (commands::DOORBELL_ARM, size_of::<uapi::pushgate_doorbell_arm>()),
    (commands::DOORBELL_RING, size_of::<uapi::pushgate_doorbell_ring>()),
    (commands::STAGING_EXPORT, size_of::<uapi::pushgate_staging_export>()),
];

/// A call with any argument.
struct Raw(Opcode, *mut c_void);

// SAFETY: callers choose where the pointer leads, wrong addresses included: the kernel checks it.
unsafe impl Ioctl for Raw {
    type Output = i32;
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> Opcode {
        self.0
    }
    fn as_ptr(&mut self) -> *mut c_void {
        self.1
    }
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(out)
    }
}

fn raw(device: &Device, command: Opcode, argument: *mut c_void) -> Result<i32, Errno> {
    // SAFETY: the module writes no further than the length that the struct itself states, and each
    // caller here has that much memory or an address that is not mapped.
    unsafe { ioctl(device.as_fd(), Raw(command, argument)) }
}

/// Two pages; the second is missing (or read-only, depending on `second`).
fn edge(second: ProtFlags) -> *mut u8 {
    let (both, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: new memory, where the kernel chooses; never unmapped.
    let at = unsafe { rustix::mm::mmap_anonymous(null_mut(), 2 * PAGE, both, private) }.unwrap();
    // SAFETY: the second page belongs to that memory, and no reference leads there.
    unsafe {
        let page = at.cast::<u8>().add(PAGE).cast();
        rustix::mm::mprotect(page, PAGE, MprotectFlags::from_bits_retain(second.bits())).unwrap();
    }
    at.cast()
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn every_wrong_size_flag_and_pointer_is_refused() {
    let Some(_guard) = alone() else { return };
    let device = function(2);
    let mut words = [0u32; 2048];
    for (command, bytes) in CALLS {
        let mut call = |size: u32, at: usize, value: u32| {
            words.fill(0);
            words[at] = value;
            words[0] = size;
            raw(&device, command, words.as_mut_ptr().cast())
        };
        for size in (0..bytes as u32).chain([bytes as u32 - 1]) {
            assert_eq!(call(size, 0, 0), Err(Errno::INVAL), "command {command:#x} of size {size}");
        }
        for size in [PAGE as u32 + 1, 8192, u32::MAX] {
            assert_eq!(call(size, 0, 0), Err(Errno::TOOBIG), "command {command:#x} of size {size}");
        }
        // Longer than the module's struct: refused if the part that the module does not know is not
        // zero.
        assert_eq!(call(bytes as u32 + 4, bytes / 4, 1), Err(Errno::TOOBIG), "{command:#x}");
        assert_eq!(call(PAGE as u32, PAGE / 4 - 1, 1), Err(Errno::TOOBIG), "{command:#x}");
        assert_ne!(call(PAGE as u32, 0, 0), Err(Errno::TOOBIG), "{command:#x}");
        for bit in 2..32 {
            assert_eq!(call(bytes as u32, 1, 1 << bit), Err(Errno::INVAL), "{command:#x} flag {bit}");
        }
        for pointer in [0usize, 1, 0x1000, 0x7fff_ffff_f000, usize::MAX, usize::MAX - 3, 1 << 63] {
            assert_eq!(raw(&device, command, pointer as *mut c_void), Err(Errno::FAULT), "{command:#x}");
        }
        // A struct that extends into a page that is missing.
        let end = edge(ProtFlags::empty());
        // SAFETY: the last four bytes of the first page.
        let at = unsafe { end.add(PAGE - 4) };
        // SAFETY: the last four bytes of the first page.
        unsafe { at.cast::<u32>().write(bytes as u32) };
        assert_eq!(raw(&device, command, at.cast()), Err(Errno::FAULT), "{command:#x}");
        // The device without a function has none to report.
        let wanted = [
            commands::INFO,
            commands::STAGING_CREATE,
            commands::STAGING_OPEN,
            commands::STAGING_FREE,
            commands::STAGING_EXPORT,
        ];
        let result = raw(&staging(), command, null_mut());
        let expected = if wanted.contains(&command) { Errno::FAULT } else { Errno::NXIO };
        assert_eq!(result, Err(expected), "{command:#x}");
    }
    for unknown in [0xbd0au32, 0xbd00 | 0xff, 0x5401, 0x5421 + 1, 0, 0x4008_bd00, 0xc008_bd01] {
        assert_eq!(raw(&device, unknown as Opcode, null_mut()), Err(Errno::NOTTY), "{unknown:#x}");
    }
    // Results that cannot be written: the call is refused and nothing is kept.
    let name = b"unwritten\0";
    let page = edge(ProtFlags::READ | ProtFlags::WRITE);
    let set = |at: usize, word: u32| {
        // SAFETY: within the two pages.
        unsafe { page.add(at).cast::<u32>().write(word) };
    };
    for (command, bytes) in [CALLS[1], CALLS[3]] {
        set(0, bytes as u32);
        set(8, 4096);
        if command == commands::STAGING_CREATE {
            set(16, u32::MAX);
            // SAFETY: the name's place in the struct, in the first page.
            unsafe { page.add(32).copy_from(name.as_ptr(), name.len()) };
        }
        // SAFETY: our own page, to which no reference leads.
        unsafe { rustix::mm::mprotect(page.cast(), PAGE, MprotectFlags::READ) }.unwrap();
        assert_eq!(raw(&device, command, page.cast()), Err(Errno::FAULT));
        // SAFETY: our own page, to which no reference leads.
        unsafe { rustix::mm::mprotect(page.cast(), PAGE, MprotectFlags::READ | MprotectFlags::WRITE) }
            .unwrap();
    }
    let held = state();
    assert_eq!((held["slices"], held["areas"]), (0, 0));
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn each_refusal_has_its_errno() {
    let Some(_guard) = alone() else { return };
    let device = function(2);
    assert_eq!(errno(device.slice(0, 0)), Errno::INVAL);
    for align in [1, 2048, 4097, 3 * PAGE] {
        assert_eq!(errno(device.slice(PAGE, align)), Errno::INVAL, "{align}");
    }
    assert_eq!(errno(device.slice(WINDOW + 1, 0)), Errno::NOSPC);
    assert_eq!(errno(device.slice(usize::MAX, 0)), Errno::NOSPC);
    assert_eq!(errno(device.slice(PAGE, 1 << 62)), Errno::NOSPC);
    let mut export = uapi::pushgate_slice_export { size: 16, ..Default::default() };
    assert_eq!(raw(&device, commands::SLICE_EXPORT, (&raw mut export).cast()), Err(Errno::NODATA));
    let slice = device.slice(PAGE, 0).unwrap();
    assert_eq!(errno(device.slice(PAGE, 0)), Errno::EXIST);
    assert_eq!(errno(device.map_doorbell()), Errno::NXIO);
    assert_eq!(slice.offset, 0);

    let bell = EventFd::new().unwrap();
    assert_eq!(errno(device.doorbell(&bell, 4, 0)), Errno::CHRNG);
    assert_eq!(errno(function(0).doorbell(&bell, 0, 0)), Errno::CHRNG);
    assert_eq!(errno(device.doorbell(&bell, 0, 1_000_001)), Errno::RANGE);
    let mut set = uapi::pushgate_doorbell_set { size: 24, eventfd: 12345, ..Default::default() };
    assert_eq!(raw(&device, commands::DOORBELL_SET, (&raw mut set).cast()), Err(Errno::BADF));
    set.eventfd = device.as_fd().as_raw_fd();
    assert_eq!(raw(&device, commands::DOORBELL_SET, (&raw mut set).cast()), Err(Errno::BADFD));
    set.eventfd = -2;
    assert_eq!(raw(&device, commands::DOORBELL_SET, (&raw mut set).cast()), Err(Errno::INVAL));
    set.eventfd = -1;
    assert_eq!(raw(&device, commands::DOORBELL_SET, (&raw mut set).cast()), Ok(0));
    let mut arm = uapi::pushgate_doorbell_arm { size: 32, flags: 1, ..Default::default() };
    assert_eq!(raw(&device, commands::DOORBELL_ARM, (&raw mut arm).cast()), Err(Errno::NODATA));
    arm.flags = 3;
    assert_eq!(raw(&device, commands::DOORBELL_ARM, (&raw mut arm).cast()), Err(Errno::INVAL));
    let others: Vec<_> = (0..64).map(|_| function(2)).collect();
    let bells: Vec<_> = others.iter().map(|device| device.doorbell(&bell, 1, 0).unwrap()).collect();
    // An eventfd that is refused leaves the one before it.
    let before = EventFd::new().unwrap();
    let doorbell = device.doorbell(&before, 2, 0).unwrap();
    assert_eq!(errno(device.doorbell(&bell, 1, 0)), Errno::USERS);
    assert_eq!(doorbell.arm(0).unwrap(), (0, true));
    function(3).ring(2).unwrap();
    assert!(before.wait(long()).unwrap());
    // A file that listens to the vector already may take another eventfd.
    others[0].doorbell(&before, 1, 0).unwrap();
    drop((doorbell, bells));

    let plain = staging();
    assert_eq!(errno(plain.create_staging("", PAGE, 0)), Errno::INVAL);
    assert_eq!(errno(plain.create_staging("a", 0, 0)), Errno::INVAL);
    assert_eq!(errno(plain.create_staging("a", usize::MAX, 0)), Errno::DQUOT);
    assert_eq!(errno(plain.create_staging("a", PAGE, u32::MAX)), Errno::RANGE);
    assert_eq!(errno(plain.open_staging("a")), Errno::NOENT);
    let mut create =
        uapi::pushgate_staging_create { size: 96, bytes: 1, node: -1, name: [65; 64], ..Default::default() };
    assert_eq!(size_of_val(&create), 96);
    assert_eq!(raw(&plain, commands::STAGING_CREATE, (&raw mut create).cast()), Err(Errno::NAMETOOLONG));
    create.name[63] = 0;
    for node in [-2, 1000, i32::MIN, i32::MAX] {
        create.node = node;
        assert_eq!(raw(&plain, commands::STAGING_CREATE, (&raw mut create).cast()), Err(Errno::NXIO));
    }
    let mut free = uapi::pushgate_staging_free { size: 8, flags: 0 };
    assert_eq!(raw(&plain, commands::STAGING_FREE, (&raw mut free).cast()), Err(Errno::NODATA));
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_file_open_for_reading_changes_nothing_of_the_device() {
    let Some(_guard) = alone() else { return };
    let device = Device::from_fd(fs::File::open("/dev/pushgate2").unwrap().into()).unwrap();
    assert_eq!(errno(device.slice(PAGE, 0)), Errno::BADF);
    assert_eq!(errno(device.ring(0)), Errno::BADF);
    assert_eq!(device.info().unwrap().function, uapi::PUSHGATE_FUNCTION_LIVE);
    device.doorbell(&EventFd::new().unwrap(), 0, 0).unwrap().arm(0).unwrap();
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn random_calls_change_nothing() {
    let Some(_guard) = alone() else { return };
    let mut actor = Actor::new("random");
    println!("{}", actor.hear());
    assert_eq!(actor.end(), None);
    quiet();
}

/// Runs in a process of its own, so that whatever it obtains ends with it.
pub fn random_calls() {
    const COUNT: usize = 80_000;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let user = rustix::process::Uid::from_raw(1000);
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    let bell = EventFd::new().unwrap();
    let mut devices: Vec<_> = (0..4).map(|n| if n == 0 { staging() } else { function(n) }).collect();
    let mut words = [0u32; 64];
    let mut accepted = 0;
    for _ in 0..COUNT {
        let (command, bytes) = CALLS[next() as usize % CALLS.len()];
        for word in &mut words {
            // Mostly small numbers: an entirely random argument is refused at the first check.
            *word = match next() % 8 {
                0 => next() as u32,
                1 => bell.as_fd().as_raw_fd() as u32,
                2 => 1 << (next() % 32),
                3 => next() as u32 % 8,
                _ => 0,
            };
        }
        match next() % 8 {
            0 => (),
            _ => words[0] = bytes as u32,
        }
        if !next().is_multiple_of(4) {
            words[1] = u32::from(command == commands::DOORBELL_ARM);
        }
        let device = &devices[next() as usize % 4];
        if raw(device, command, words.as_mut_ptr().cast()).is_ok() {
            accepted += 1;
            if command == commands::SLICE_EXPORT {
                // SAFETY: the module has just made the descriptor, and no other code has it.
                drop(unsafe { OwnedFd::from_raw_fd(words[2] as i32) });
            }
        }
        if next().is_multiple_of(64) {
            let n = next() as usize % 4;
            devices[n] = if n == 0 { staging() } else { function(n) };
        }
    }
    println!("@{COUNT} random calls, {accepted} accepted");
}
