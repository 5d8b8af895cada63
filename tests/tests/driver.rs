//! Tests the kernel module in the virtual machine: `cargo xtask vm --suite driver`. Elsewhere every
//! test here is skipped. The machine has four ivshmem functions: two with a memory of their own,
//! and two peers that share one memory and ring each other. Modelled on gdrcopy's sanity suite.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::kmod::{Device, KmodError, Mapping, commands};
use pushgate_driver_shim::{fdpass, uapi};
use pushgate_tests::{hang, patience, wait_until};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The functions of the suite's row in xtask/src/vm/suites.rs, /dev/pushgate0 to 3.
const SLOTS: [u8; 4] = [0x10, 0x11, 0x12, 0x13];
const WINDOW: usize = 4 * MIB;
const PATTERN: u64 = 0x5a5a_1234_abcd_ef01;
const SHORT: Option<Duration> = Some(Duration::from_millis(60));

/// A limit against a hang.
fn long() -> Option<Duration> {
    Some(hang())
}

// ---------------------------------------------------------------- harness

fn sysfs(slot: u8) -> String {
    format!("/sys/bus/pci/devices/0000:00:{slot:02x}.0")
}

fn bind(slot: u8) {
    fs::write(format!("{}/driver_override", sysfs(slot)), "pushgate").unwrap();
    fs::write("/sys/bus/pci/drivers_probe", format!("0000:00:{slot:02x}.0")).unwrap();
    for node in fs::read_dir("/dev").unwrap().flatten() {
        if node.file_name().to_string_lossy().starts_with("pushgate") {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
            fs::set_permissions(node.path(), mode).unwrap();
        }
    }
}

fn unbind(slot: u8) {
    fs::write(format!("{}/driver/unbind", sysfs(slot)), format!("0000:00:{slot:02x}.0")).unwrap();
}

fn module(command: &str, arguments: &[&str]) -> bool {
    let output = Command::new(command).args(arguments).output().unwrap();
    if !output.status.success() {
        println!("{command} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    output.status.success()
}

fn load(options: &[&str]) {
    let file = format!("{}/pushgate.ko", std::env::var("KMOD_DIR").unwrap());
    assert!(module("insmod", &[&[file.as_str()], options].concat()));
    SLOTS.iter().copied().for_each(bind);
}

/// Held by each test, because the tests share the functions. The suite's script runs each test in a
/// process of its own: what a process has mapped is kept from others as long as it lives. `None` if
/// there is no module to test.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static LOCK: Mutex<()> = Mutex::new(());
    if std::env::var_os("KMOD_DIR").is_none() {
        pushgate_tests::skip("the kernel module runs in the virtual machine: cargo xtask vm --suite driver");
        return None;
    }
    let guard = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if !fs::exists("/sys/module/pushgate").unwrap() {
        load(&[]);
    }
    quiet();
    // An earlier test may have loaded the module with options of its own.
    if fs::read_to_string("/sys/module/pushgate/parameters/doorbell_bar").unwrap().trim() != "-1" {
        assert!(module("rmmod", &["pushgate"]));
        load(&[]);
    }
    Some(guard)
}

fn state() -> HashMap<String, u64> {
    let text = fs::read_to_string("/sys/kernel/debug/pushgate/state").unwrap();
    let pair =
        |line: &str| Some((line.split_once(' ')?.0.to_string(), line.split_once(' ')?.1.parse().ok()?));
    text.lines().filter_map(pair).collect()
}

/// Waits until the module holds nothing for anyone, as it must once every file is closed.
fn quiet() {
    let end = Instant::now() + hang();
    loop {
        let state = state();
        if ["files", "slices", "retired", "areas", "areas_bytes"].iter().all(|name| state[*name] == 0) {
            return;
        }
        assert!(Instant::now() < end, "the module still holds something: {state:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn function(number: usize) -> Device {
    Device::open(format!("/dev/pushgate{number}")).unwrap()
}

fn staging() -> Device {
    Device::open("/dev/pushgate").unwrap()
}

fn errno<T>(result: Result<T, KmodError>) -> Errno {
    let error = result.err().expect("is refused");
    Errno::from_raw_os_error(error.errno().unwrap_or_else(|| panic!("{error}")))
}

fn read(map: &Mapping, at: usize) -> u64 {
    assert!(at + 8 <= map.len());
    // SAFETY: within the mapping, which lives; others write there too, so the access is volatile.
    unsafe { map.as_ptr().as_ptr().add(at).cast::<u64>().read_volatile() }
}

fn write(map: &Mapping, at: usize, word: u64) {
    assert!(at + 8 <= map.len());
    // SAFETY: within the mapping, which lives; others access it too, so the access is volatile.
    unsafe { map.as_ptr().as_ptr().add(at).cast::<u64>().write_volatile(word) }
}

/// The first word of a range that is not `word`.
fn other_than(map: &Mapping, word: u64) -> Option<usize> {
    (0..map.len()).step_by(8).find(|at| read(map, *at) != word)
}

fn fill(map: &Mapping, word: u64) {
    (0..map.len()).step_by(8).for_each(|at| write(map, at, word));
}

/// Runs as another user: on Linux each thread has an identity of its own.
fn as_user<T: Send>(uid: u32, run: impl FnOnce() -> T + Send) -> T {
    let become_it = || {
        let uid = rustix::process::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        run()
    };
    thread::scope(|scope| scope.spawn(become_it).join().unwrap())
}

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

/// A process with a role of `role`, which exchanges lines with the test.
struct Actor {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Actor {
    fn new(role: &str) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture"]).env("DRIVER_ROLE", role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Actor { child, lines }
    }

    /// The process's next line that begins with @.
    fn hear(&mut self) -> String {
        for line in self.lines.by_ref() {
            // libtest writes before it on the same line.
            if let Some((_, said)) = line.unwrap().split_once('@') {
                return said.to_string();
            }
        }
        panic!("the other process has ended");
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{line}").unwrap();
    }

    /// Ends the process; returns the signal that it died by.
    fn end(mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// What the processes of Actor do.
#[test]
#[ignore = "other tests start this in processes of their own"]
fn role() {
    let role = std::env::var("DRIVER_ROLE").expect("no test by itself");
    let hear = || {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        line.trim().to_string()
    };
    match role.as_str() {
        // Maps all of /dev/pushgate0, writes it, gives it back and stays.
        "former-owner" => {
            let take = || {
                let device = function(0);
                let slice = device.slice(WINDOW, 0).unwrap();
                let map = slice.map().unwrap();
                assert_eq!(other_than(&map, 0), None);
                fill(&map, PATTERN);
            };
            take();
            println!("@given back");
            hear();
            // The process itself may get it again.
            take();
            println!("@taken again");
            hear();
        }
        "reader" => {
            let device = function(0);
            let slice = device.slice(MIB, 0).unwrap();
            let map = slice.map().unwrap();
            write(&map, 8, PATTERN);
            println!("@mapped {:x}", read(&map, 8));
            hear();
            println!("@read {:x}", read(&map, 8));
        }
        "staging-owner" => {
            let device = staging();
            let area = device.create_staging("survivor", 3 * MIB + 5, 20_000).unwrap();
            let map = area.map().unwrap();
            (0..map.len()).step_by(8).for_each(|at| write(&map, at, at as u64 ^ PATTERN));
            println!("@written");
            hear();
        }
        "random" => random_calls(),
        "killed-proxy" => rank(0),
        "peer-of-the-killed" => rank(1),
        other => panic!("no role {other}"),
    }
}

const MESSAGES: u64 = 16;
const MESSAGE: u64 = 1024;

/// A rank of two. Rank 0, whose rings lie in staging, pushes more messages than rank 1, which takes
/// none, has receives for. The messages that rank 1 has it holds in place, so that nothing is
/// retired.
fn rank(rank: u32) {
    let mut settings = pushgate::Settings::default();
    for (name, value) in [
        ("device", "cpu"),
        ("qp", "verbs"),
        ("ib-dev", "rxe0"),
        ("window", "staging"),
        ("rings", if rank == 0 { "window" } else { "host" }),
        ("window-size", "64K"),
        ("slots", "32"),
        ("receives", "4"),
    ] {
        settings.set(name, value).unwrap();
    }
    let context = pushgate::Context::builder().settings(settings).build().unwrap();
    let comm = pushgate::Comm::connect(&context, "killed", rank, 2).unwrap();
    let qp = comm.queue_pair(1 - rank, 0, pushgate::QpConfig::default()).unwrap();
    let mut line = String::new();
    if rank == 1 {
        println!("@joined");
        std::io::stdin().read_line(&mut line).unwrap();
        return;
    }
    let qps = pushgate::upload_descriptors(&context, [&qp]).unwrap();
    let result = context.alloc(8).unwrap();
    let (module, stream) = (pushgate::Module::embedded(&context), context.stream().unwrap());
    let params = [qps.addr(), result.addr(), 0, MESSAGES, MESSAGE];
    // SAFETY: everything that the kernel uses lives until this process is killed.
    let running = unsafe {
        context.launch(&stream, &module, "outside_send", pushgate::Launch::new(1, 1), &params).unwrap()
    };
    let end = Instant::now() + hang();
    let settled = loop {
        let state = qp.ring_state().unwrap();
        if context.counters().unwrap().released == 4 && state.waiting.len() as u64 == MESSAGES {
            break state;
        }
        assert!(Instant::now() < end, "{state:?}");
        thread::sleep(Duration::from_millis(10));
    };
    // The peer's counts arrive a little later: wait until nothing changes any more.
    let mut state = settled.clone();
    loop {
        thread::sleep(patience(Duration::from_millis(300)));
        let before = std::mem::replace(&mut state, qp.ring_state().unwrap());
        if before == state {
            break;
        }
    }
    assert_eq!(state.waiting, settled.waiting);
    println!("@{}", qp.area().expect("it lies in staging"));
    println!("@{state:?}");
    std::io::stdin().read_line(&mut line).unwrap();
    drop(running);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn p6_a_killed_proxy_leaves_rings_and_payload_to_the_next() {
    use pushgate_driver_shim::placed::Placed;
    use pushgate_driver_shim::provider::StagingWindow;
    use pushgate_driver_shim::window::Window;

    let Some(_guard) = alone() else { return };
    let mut proxy = Actor::new("killed-proxy");
    let mut peer = Actor::new("peer-of-the-killed");
    peer.hear();
    let name = proxy.hear();
    let said = proxy.hear();
    let busy = StagingWindow::take_up(None, &name).expect_err("it has an owner");
    assert_eq!(busy.errno(), Some(Errno::BUSY.raw_os_error()), "{busy}");
    proxy.kill();
    let end = Instant::now() + hang();
    let taken = loop {
        match StagingWindow::take_up(None, &name) {
            Ok(window) => break std::sync::Arc::new(window),
            // The dead process's descriptors close a little after it was reaped.
            Err(e) => assert!(Instant::now() < end, "{e}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    let placed = Placed::find(taken.clone()).unwrap();
    let state = placed.state();
    assert_eq!(format!("{state:?}"), said);
    assert_eq!(state.waiting.len() as u64, MESSAGES);
    for (number, waiting) in (0u64..).zip(&state.waiting) {
        assert_eq!((waiting.slot, u64::from(waiting.length)), (number, MESSAGE));
        let at = waiting.place as usize * 64;
        let words = placed.payload.words(at, MESSAGE as usize / 8);
        for (i, pair) in (0u64..).zip(words.chunks(2)) {
            let pair = [0, 1].map(|w: usize| pair[w].load(std::sync::atomic::Ordering::Relaxed));
            assert_eq!(pair, [number, i], "message {number}");
        }
    }
    // Once freed, the area is gone.
    assert!(taken.len() >= placed.payload.len());
    drop((placed, taken));
    let gone = StagingWindow::take_up(None, &name).expect_err("it was freed");
    assert_eq!(gone.errno(), Some(Errno::NOENT.raw_os_error()), "{gone}");
    peer.say("go");
    assert_eq!(peer.end(), None);
}

// ---------------------------------------------------------------- the files and calls

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn a_device_says_what_it_offers() {
    let Some(_guard) = alone() else { return };
    let plain = staging().info().unwrap();
    assert_eq!((plain.features, plain.window_bytes, plain.vectors), (1, 0, 0));
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

const CALLS: [(Opcode, usize); 9] = [
    (commands::INFO, size_of::<uapi::pushgate_info>()),
    (commands::SLICE_ALLOC, size_of::<uapi::pushgate_slice_alloc>()),
    (commands::SLICE_EXPORT, size_of::<uapi::pushgate_slice_export>()),
    (commands::STAGING_CREATE, size_of::<uapi::pushgate_staging_create>()),
    (commands::STAGING_OPEN, size_of::<uapi::pushgate_staging_open>()),
    (commands::STAGING_FREE, size_of::<uapi::pushgate_staging_free>()),
    (commands::DOORBELL_SET, size_of::<uapi::pushgate_doorbell_set>()),
    (commands::DOORBELL_ARM, size_of::<uapi::pushgate_doorbell_arm>()),
    (commands::DOORBELL_RING, size_of::<uapi::pushgate_doorbell_ring>()),
];

/// Two pages, of which the second is missing (or read-only, depending on `second`).
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
        let wanted =
            [commands::INFO, commands::STAGING_CREATE, commands::STAGING_OPEN, commands::STAGING_FREE];
        let result = raw(&staging(), command, null_mut());
        let expected = if wanted.contains(&command) { Errno::FAULT } else { Errno::NXIO };
        assert_eq!(result, Err(expected), "{command:#x}");
    }
    for unknown in [0xbd09u32, 0xbd00 | 0xff, 0x5401, 0x5421 + 1, 0, 0x4008_bd00, 0xc008_bd01] {
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
    assert_eq!(errno(device.doorbell(&bell, 1, 0)), Errno::USERS);
    drop(bells);

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
fn random_calls_change_nothing() {
    let Some(_guard) = alone() else { return };
    let mut actor = Actor::new("random");
    println!("{}", actor.hear());
    assert_eq!(actor.end(), None);
    quiet();
}

/// Runs in a process of its own, so that whatever it obtains ends with it.
fn random_calls() {
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
    for _ in 0..80_000 {
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
    println!("@200000 random calls, {accepted} accepted");
}

// ---------------------------------------------------------------- slices

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

/// How the processor caches the mapped parts of BAR 2 of a function, each kind once.
fn caching(slot: u8) -> Vec<String> {
    let resource = fs::read_to_string(format!("{}/resource", sysfs(slot))).unwrap();
    let mut words = resource.lines().nth(2).unwrap().split(' ').map(number);
    let bar = words.next().unwrap()..=words.next().unwrap();
    let list = fs::read_to_string("/sys/kernel/debug/x86/pat_memtype_list").unwrap();
    let mut found = Vec::new();
    for line in list.lines() {
        // "PAT: [mem 0x...-0x...] write-combining"
        let Some((range, how)) = line.strip_prefix("PAT: [mem ").and_then(|rest| rest.split_once("] "))
        else {
            continue;
        };
        if bar.contains(&number(range.split('-').next().unwrap())) && !found.contains(&how.to_string()) {
            found.push(how.to_string());
        }
    }
    found
}

fn number(hexadecimal: &str) -> u64 {
    u64::from_str_radix(hexadecimal.trim_start_matches("0x"), 16).unwrap()
}

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
}

/// The status of a forked child that only reads a word and compares it.
fn fork_and_read(map: &Mapping, word: u64) -> c_int {
    // SAFETY: the child reads one word and exits; it takes no lock and allocates nothing.
    unsafe {
        let child = fork();
        if child == 0 {
            _exit(c_int::from(read(map, 0) != word));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        status
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
    let kept: Vec<_> = (0..4).map(|_| function(0)).collect();
    let maps: Vec<_> = kept.iter().map(|device| device.slice(PAGE, 0).unwrap().map().unwrap()).collect();
    drop((maps, kept));
    assert_eq!(state()["retired"], 4);
    assert_eq!(errno(more.slice(PAGE, 0)), Errno::DQUOT, "on a function where there is none to take over");
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
    device.create_staging("kept", PAGE, 1500).unwrap();
    drop(device);
    assert!(!remove(), "an area that no file is attached to still holds the module");
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

// ---------------------------------------------------------------- staging

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

// ---------------------------------------------------------------- RDMA

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn an_rdma_device_registers_staging_and_refuses_a_slice() {
    let Some(_guard) = alone() else { return };
    let verbs = pushgate_rdma_core_sys::open().unwrap();
    let device = function(0);
    let slice = device.slice(MIB, 0).unwrap().map().unwrap();
    let area = device.create_staging("registered", 4 * MIB, 0).unwrap();
    let map = area.map().unwrap();
    // SAFETY: calls of libibverbs with what earlier calls returned; registered memory outlives its
    // registration.
    unsafe {
        let mut count = 0;
        let list = verbs.ibv_get_device_list(&mut count);
        assert!(count > 0);
        let context = verbs.ibv_open_device(*list);
        verbs.ibv_free_device_list(list);
        assert!(!context.is_null());
        let domain = verbs.ibv_alloc_pd(context);
        assert!(!domain.is_null());
        let begin = Instant::now();
        let region = verbs.ibv_reg_mr(domain, map.as_ptr().as_ptr().cast(), map.len(), 7);
        assert!(!region.is_null(), "{}", std::io::Error::last_os_error());
        println!("ibv_reg_mr of 4 MiB of staging: {:?}", begin.elapsed());
        let refused = verbs.ibv_reg_mr(domain, slice.as_ptr().as_ptr().cast(), slice.len(), 7);
        let error = std::io::Error::last_os_error();
        assert!(refused.is_null());
        println!("ibv_reg_mr of a slice: {error}");
        // Everything is dropped but the pin: the pages stay its own.
        drop((map, slice));
        drop(device);
        wait_until("the area is gone", || state()["areas"] == 0);
        let other = staging();
        let filled = other.create_staging("other", 64 * MIB, 0).unwrap().map().unwrap();
        assert_eq!(other_than(&filled, 0), None);
        assert_eq!(verbs.ibv_dereg_mr(region), 0);
        verbs.ibv_dealloc_pd(domain);
        verbs.ibv_close_device(context);
    }
}

// ---------------------------------------------------------------- the host's side, doorbells

/// Asks the host through the first words of the shared memory; xtask/src/vm/ivshmem.rs answers.
struct Host {
    map: Mapping,
    number: u64,
}

impl Host {
    fn new(device: &Device) -> Host {
        let map = device.slice(WINDOW, 0).unwrap().map().unwrap();
        write(&map, 56, u64::from_le_bytes(*b"REQUESTS"));
        Host { map, number: 0 }
    }

    fn ask(&mut self, request: u64, arguments: [u64; 4]) {
        write(&self.map, 8, request);
        for (i, word) in arguments.into_iter().enumerate() {
            write(&self.map, 16 + 8 * i, word);
        }
        self.number += 1;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        write(&self.map, 0, self.number);
    }

    fn answer(&self) -> u64 {
        let end = Instant::now() + hang();
        while read(&self.map, 64) != self.number {
            assert!(Instant::now() < end, "the host does not answer");
            thread::sleep(Duration::from_millis(1));
        }
        read(&self.map, 72)
    }

    fn ring(&mut self, vector: u64, times: u64, every_us: u64) {
        self.ask(1, [0, vector, times, every_us]);
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn host_and_guest_see_each_others_stores() {
    let Some(_guard) = alone() else { return };
    let control = function(2);
    let mut host = Host::new(&control);
    let device = function(0);
    let slice = device.slice(WINDOW, 0).unwrap();
    let map = slice.map().unwrap();
    let range = [SLOTS[0].into(), MIB as u64, 2 * MIB as u64, PATTERN];
    host.ask(3, range);
    assert_eq!(host.answer(), 0);
    (MIB..2 * MIB).step_by(8).for_each(|at| write(&map, at, PATTERN));
    host.ask(3, range);
    assert_eq!(host.answer(), MIB as u64 / 8);
    host.ask(2, [SLOTS[0].into(), 0, MIB as u64, !PATTERN]);
    assert_eq!(host.answer(), MIB as u64);
    let seen = (0..MIB).step_by(8).filter(|at| read(&map, *at) == !PATTERN).count();
    assert_eq!(seen, MIB / 8);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn the_hosts_rings_wake_only_an_armed_doorbell() {
    let Some(_guard) = alone() else { return };
    let device = function(2);
    let (bell, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    let mut host = Host::new(&device);
    let doorbell = device.doorbell(&bell, 1, 0).unwrap();
    let (second, status) = (function(2), device.status().unwrap());
    let quiet = second.doorbell(&other, 2, 0).unwrap();
    assert_eq!(quiet.arm(0).unwrap(), (0, true));

    // Not armed: the ring is counted and wakes nothing.
    host.ring(1, 1, 0);
    assert_eq!(host.answer(), 1);
    wait_until("the ring is counted", || status.rings() > 0);
    assert!(!bell.wait(SHORT).unwrap());
    assert_eq!(status.rings(), 1);
    // There was a ring since the last look: nothing is armed, look again.
    assert_eq!(doorbell.arm(0).unwrap(), (1, false));
    assert_eq!(doorbell.arm(1).unwrap(), (1, true));
    host.ring(1, 1, 0);
    assert!(bell.wait(long()).unwrap());
    assert_eq!(doorbell.disarm().unwrap(), 2);
    host.answer();
    host.ring(1, 1, 0);
    host.answer();
    assert!(!bell.wait(SHORT).unwrap());
    // The other vector's listener got none of these rings.
    assert!(!other.drain());
    host.ring(2, 1, 0);
    assert!(other.wait(long()).unwrap());
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn no_ring_is_lost_between_look_and_sleep() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let doorbell = device.doorbell(&bell, 0, 0).unwrap();
    let rung = std::sync::atomic::AtomicU64::new(0);
    const ROUNDS: u64 = 3000;
    // Each ring waits until the one before was seen, so a lost ring ends in the time limit.
    let seen_all = std::sync::atomic::AtomicU64::new(0);
    use std::sync::atomic::Ordering::SeqCst;
    let mut sleeps = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                rung.store(round, SeqCst);
                // Rings peer 0, vector 0.
                ringer.ring(0).unwrap();
                let end = Instant::now() + hang();
                while seen_all.load(SeqCst) < round {
                    assert!(Instant::now() < end, "ring {round} was lost");
                    thread::yield_now();
                }
            }
        });
        let mut seen = 0;
        let mut looked = 0;
        while looked < ROUNDS {
            // The look; a ring may come at any point from here to the sleep.
            let now = rung.load(SeqCst);
            if now > looked {
                looked = now;
                seen_all.store(looked, SeqCst);
                continue;
            }
            let (rings, armed) = doorbell.arm(seen).unwrap();
            if !armed {
                seen = rings;
                continue;
            }
            // Work that was published before the doorbell was armed rang afterwards; otherwise it
            // is seen here.
            if rung.load(SeqCst) > looked {
                continue;
            }
            assert!(bell.wait(long()).unwrap(), "asleep with {looked} of {ROUNDS} rounds seen");
            sleeps += 1;
        }
    });
    println!("{ROUNDS} rounds, {sleeps} of them slept for");
    assert!(sleeps > 0);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn interrupts_are_moderated_and_the_last_is_not_lost() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let status = device.status().unwrap();
    let doorbell = device.doorbell(&bell, 3, 100_000).unwrap();
    let (mut wakes, begin) = (0u32, Instant::now());
    assert_eq!(doorbell.arm(0).unwrap(), (0, true));
    while begin.elapsed() < Duration::from_secs(2) || wakes < 5 {
        assert!(begin.elapsed() < hang(), "{wakes} wakes");
        ringer.ring(3).unwrap();
        wakes += u32::from(bell.wait(Some(Duration::from_millis(2))).unwrap());
    }
    // The last ring's wake-up comes when the interval is over.
    thread::sleep(Duration::from_millis(250));
    wakes += u32::from(bell.drain());
    let most = begin.elapsed().as_millis() as u32 / 100 + 2;
    println!("{} rings, {wakes} wakes in {:?}, at most one in 100 ms", status.rings(), begin.elapsed());
    assert!(status.rings() > u64::from(wakes) && wakes >= 5 && wakes <= most, "{wakes} wakes");
    ringer.ring(3).unwrap();
    assert!(bell.wait(long()).unwrap());
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn what_a_doorbell_and_a_mapping_cost() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let doorbell = device.doorbell(&bell, 0, 0).unwrap();
    let mut times = Vec::new();
    for _ in 0..300 {
        let seen = doorbell.disarm().unwrap();
        assert!(doorbell.arm(seen).unwrap().1);
        let begin = Instant::now();
        ringer.ring(0).unwrap();
        assert!(bell.wait(long()).unwrap());
        times.push(begin.elapsed());
    }
    times.sort();
    println!("doorbell register to wake-up, emulated: median {:?}, 99th {:?}", times[150], times[297]);
    for bytes in [64 << 10, MIB, 4 * MIB] {
        let (a, b) = (function(1), staging());
        let begin = Instant::now();
        let slice = a.slice(bytes, 0).unwrap();
        let taken = begin.elapsed();
        let map = slice.map().unwrap();
        let mapped = begin.elapsed() - taken;
        let begin = Instant::now();
        let area = b.create_staging("cost", bytes, 0).unwrap();
        let created = begin.elapsed();
        let other = area.map().unwrap();
        println!(
            "{} KiB: slice zeroed in {taken:?}, mapped in {mapped:?}; staging made in {created:?}, mapped in {:?}",
            bytes >> 10,
            begin.elapsed() - created
        );
        drop((map, other));
    }
}

// ---------------------------------------------------------------- dma-buf

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
