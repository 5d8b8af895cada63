//! The module and its functions as the tests handle them: loading, binding, opening, mappings, other users, other
//! processes.

use std::collections::HashMap;
use std::ffi::c_int;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{fs, thread};

use pushgate_driver_shim::kmod::{Device, KmodError, Mapping};
use pushgate_tests::hang;
use rustix::io::Errno;

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;
/// The functions of the suite's row in xtask/src/vm/suites.rs, /dev/pushgate0 to 3.
pub const SLOTS: [u8; 4] = [0x10, 0x11, 0x12, 0x13];
/// Bytes of each function's BAR.
pub const WINDOW: usize = 4 * MIB;
/// What tests write into memory.
pub const PATTERN: u64 = 0x5a5a_1234_abcd_ef01;
/// Long enough to see that nothing happens.
pub const SHORT: Option<Duration> = Some(Duration::from_millis(60));

/// A limit against a hang.
pub fn long() -> Option<Duration> {
    Some(hang())
}

/// The folder of a function in sysfs.
pub fn sysfs(slot: u8) -> String {
    format!("/sys/bus/pci/devices/0000:00:{slot:02x}.0")
}

/// Binds a function to the module.
pub fn bind(slot: u8) {
    fs::write(format!("{}/driver_override", sysfs(slot)), "pushgate").unwrap();
    fs::write("/sys/bus/pci/drivers_probe", format!("0000:00:{slot:02x}.0")).unwrap();
    open_to_all();
}

/// Lets every user open the module's devices.
pub fn open_to_all() {
    for node in fs::read_dir("/dev").unwrap().flatten() {
        if node.file_name().to_string_lossy().starts_with("pushgate") {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
            fs::set_permissions(node.path(), mode).unwrap();
        }
    }
}

/// Takes a function from the module, as if the device went.
pub fn unbind(slot: u8) {
    fs::write(format!("{}/driver/unbind", sysfs(slot)), format!("0000:00:{slot:02x}.0")).unwrap();
}

/// The kernel's messages.
pub fn log() -> String {
    String::from_utf8_lossy(&Command::new("dmesg").output().unwrap().stdout).into_owned()
}

/// Runs insmod, rmmod or modprobe; whether it succeeded.
pub fn module(command: &str, arguments: &[&str]) -> bool {
    let output = Command::new(command).args(arguments).output().unwrap();
    if !output.status.success() {
        println!("{command} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    output.status.success()
}

/// Loads the module and binds all functions.
pub fn load(options: &[&str]) {
    let file = format!("{}/pushgate.ko", std::env::var("KMOD_DIR").unwrap());
    assert!(module("insmod", &[&[file.as_str()], options].concat()));
    SLOTS.iter().copied().for_each(bind);
}

/// Held by each test, because the tests share the functions. The suite's script runs each test in a
/// process of its own: what a process has mapped is kept from others as long as it lives. `None` if
/// there is no module to test.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
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
    let is_given = |option: &&str| {
        fs::read_to_string(format!("/sys/module/pushgate/parameters/{option}")).unwrap().trim() != "-1"
    };
    if ["doorbell_bar", "window_bar"].iter().any(is_given) {
        assert!(module("rmmod", &["pushgate"]));
        load(&[]);
    }
    Some(guard)
}

/// The module's own counts, from debugfs.
pub fn state() -> HashMap<String, u64> {
    let text = fs::read_to_string("/sys/kernel/debug/pushgate/state").unwrap();
    let pair =
        |line: &str| Some((line.split_once(' ')?.0.to_string(), line.split_once(' ')?.1.parse().ok()?));
    text.lines().filter_map(pair).collect()
}

/// Waits until the module holds nothing for anyone, as it must once every file is closed.
pub fn quiet() {
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

/// Opens the device of a function.
pub fn function(number: usize) -> Device {
    Device::open(format!("/dev/pushgate{number}")).unwrap()
}

/// Opens the device that has staging alone.
pub fn staging() -> Device {
    Device::open("/dev/pushgate").unwrap()
}

/// The errno of a call that must be refused.
pub fn errno<T>(result: Result<T, KmodError>) -> Errno {
    let error = result.err().expect("is refused");
    Errno::from_raw_os_error(error.errno().unwrap_or_else(|| panic!("{error}")))
}

pub fn read(map: &Mapping, at: usize) -> u64 {
    assert!(at + 8 <= map.len());
    // SAFETY: within the mapping, which lives; others write there too, so the access is volatile.
    unsafe { map.as_ptr().as_ptr().add(at).cast::<u64>().read_volatile() }
}

pub fn write(map: &Mapping, at: usize, word: u64) {
    assert!(at + 8 <= map.len());
    // SAFETY: within the mapping, which lives; others access it too, so the access is volatile.
    unsafe { map.as_ptr().as_ptr().add(at).cast::<u64>().write_volatile(word) }
}

/// The first word of a range that is not `word`.
pub fn other_than(map: &Mapping, word: u64) -> Option<usize> {
    (0..map.len()).step_by(8).find(|at| read(map, *at) != word)
}

pub fn fill(map: &Mapping, word: u64) {
    (0..map.len()).step_by(8).for_each(|at| write(map, at, word));
}

/// Runs as another user: on Linux each thread has an identity of its own.
pub fn as_user<T: Send>(uid: u32, run: impl FnOnce() -> T + Send) -> T {
    let become_it = || {
        let uid = rustix::process::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        run()
    };
    thread::scope(|scope| scope.spawn(become_it).join().unwrap())
}

/// A process that plays one of the roles of the test `role` (main.rs) and exchanges lines with the test.
pub struct Actor {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Actor {
    pub fn new(role: &str) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture"]).env("DRIVER_ROLE", role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Actor { child, lines }
    }

    /// The process's next line that begins with @.
    pub fn hear(&mut self) -> String {
        for line in self.lines.by_ref() {
            // libtest may have written before the @ on the same line.
            if let Some((_, said)) = line.unwrap().split_once('@') {
                return said.to_string();
            }
        }
        panic!("the other process has ended");
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{line}").unwrap();
    }

    /// Ends the process; returns the signal that it died by.
    pub fn end(mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// How the processor caches the mapped parts of BAR 2 of a function, each kind once.
pub fn caching(slot: u8) -> Vec<String> {
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
pub fn fork_and_read(map: &Mapping, word: u64) -> c_int {
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
