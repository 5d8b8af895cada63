//! Other users of this host, for tests that run as root. The users have numbers and no names.

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_res_uid};

/// A user that is neither root nor the one who runs the tests.
pub const STRANGER: u32 = 65003;

/// Whether this process can become other users. Says that the test is skipped where not.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        crate::skip(&format!("{test}: only root can become other users"));
    }
    root
}

/// Does something in a thread of another user. The thread's group has the user's number.
pub fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    let become_user = move || {
        set_thread_groups(&[]).unwrap();
        set_thread_gid(Gid::from_raw(uid)).unwrap();
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).unwrap();
        work()
    };
    std::thread::scope(|s| s.spawn(become_user).join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
}
