//! A file whose close waits for as long as its owner likes, and so does another open of it: one of a file system in user space (FUSE)
//! that never answers them.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{UnshareFlags, unshare_unsafe};

unsafe extern "C" {
    fn mount(
        source: *const c_char,
        at: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn umount2(at: *const c_char, flags: c_int) -> c_int;
}

const MNT_DETACH: c_int = 2;
const O_NONBLOCK: i32 = 0o4000;
const ENOSYS: i32 = 38;
/// Operations, as linux/fuse.h numbers them.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const OPEN: u32 = 14;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;

/// Files of one file system. Dropping this lets all closes and opens go on that wait.
pub struct Hanging {
    files: Vec<OwnedFd>,
    flushes: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl Hanging {
    /// Opens `n` files. Fails with the kernel's error where the file system can't be mounted, which takes root and /dev/fuse.
    pub fn open(n: usize) -> io::Result<Hanging> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let at = std::env::temp_dir().join(format!("pushgate-hanging-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&at)?;
        let place = CString::new(at.as_os_str().as_bytes()).expect("a path");
        let (flushes, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, stops, mounts) = (flushes.clone(), stop.clone(), place.clone());
        let (ready, is_ready) = channel();
        let server = std::thread::spawn(move || {
            let device = mounted(&mounts);
            let _ = ready.send(device.as_ref().map(drop).map_err(|e| e.raw_os_error().unwrap_or(0)));
            device.map(|device| serve(device, n, &seen, &stops)).unwrap_or(());
        });
        let is_mounted = is_ready.recv().expect("it says so").map_err(io::Error::from_raw_os_error);
        let mut hanging = Hanging { files: Vec::new(), flushes, stop, server: Some(server) };
        let files = is_mounted.and_then(|()| {
            let files = (0..n).map(|n| File::open(at.join(n.to_string())).map(OwnedFd::from)).collect();
            // SAFETY: the path ends with a zero byte and lives until the call returns. The open files stay.
            unsafe { umount2(place.as_ptr(), MNT_DETACH) };
            files
        });
        std::fs::remove_dir(&at)?;
        hanging.files = files?;
        Ok(hanging)
    }

    /// The files. A close of one, even if it is not the last close, waits, and so does to open one again.
    pub fn files(&self) -> &[OwnedFd] {
        &self.files
    }

    /// How many closes wait.
    pub fn waiting(&self) -> usize {
        self.flushes.load(Ordering::Acquire)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The kernel ends all that waits once the device is closed.
        let _ = self.server.take().map(JoinHandle::join);
    }
}

/// Mounts the file system. The device is in a table of descriptors of the calling thread's own: so it is closed when the process ends,
/// although other threads hang, and then they go on.
fn mounted(at: &CStr) -> io::Result<File> {
    // SAFETY: this thread uses no descriptor that was opened before.
    unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
    // The copies would keep open what others close.
    let all: Vec<_> =
        std::fs::read_dir("/proc/thread-self/fd")?.flatten().map(|entry| entry.file_name()).collect();
    for fd in all.iter().filter_map(|name| name.to_str()?.parse().ok()).filter(|fd| *fd > 2) {
        // SAFETY: the table is this thread's own, and nothing in this thread uses the descriptor.
        unsafe { rustix::io::close(fd) };
    }
    let device = OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open("/dev/fuse")?;
    let fd = device.as_raw_fd();
    let data = CString::new(format!("fd={fd},rootmode=40000,user_id=0,group_id=0")).expect("no zero byte");
    let kind = c"fuse".as_ptr();
    // SAFETY: all pointers are of strings that end with a zero byte and live until the call returns.
    match unsafe { mount(kind, at.as_ptr(), kind, 0, data.as_ptr().cast()) } {
        0 => Ok(device),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Answers all that the kernel asks but for flushes, and opens after the first `opens`, until it is stopped.
fn serve(mut device: File, mut opens: usize, flushes: &AtomicUsize, stop: &AtomicBool) {
    let mut request = vec![0; 1 << 17];
    while !stop.load(Ordering::Acquire) {
        let look = Timespec::try_from(Duration::from_millis(20)).expect("a short time");
        let _ = poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&look));
        let Ok(40..) = device.read(&mut request) else { continue };
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let words = |all: &[u32]| all.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        let answer = match word(4) {
            FORGET => continue,
            FLUSH => {
                flushes.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            // Version 7.31; the kernel takes defaults for the rest, which is zero but for the largest write.
            INIT => Ok(words(&[7, 31, 0, 0, 0, 4096, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            // Every name is one regular file, number 2, that is valid for a second; its attributes begin after ten words.
            LOOKUP => {
                let mut entry = [0; 32];
                (entry[0], entry[4], entry[6]) = (2, 1, 1);
                (entry[10], entry[25], entry[26]) = (2, 0o100_644, 1);
                Ok(words(&entry))
            }
            OPEN if opens == 0 => continue,
            OPEN => {
                opens -= 1;
                Ok(words(&[0; 4]))
            }
            RELEASE => Ok(Vec::new()),
            _ => Err(ENOSYS),
        };
        let (error, body) = answer.map_or_else(|e| (-e, Vec::new()), |body| (0, body));
        let mut reply = words(&[16 + body.len() as u32, error as u32, word(8), word(12)]);
        reply.extend(body);
        let _ = device.write(&reply);
    }
}
