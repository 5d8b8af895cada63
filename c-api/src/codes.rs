//! The numbers that calls return, and what each means in words.

use std::ffi::{CStr, c_char, c_int};

use pushgate::ErrorCode;

/// The call has done what it should.
pub const PUSHGATE_E_OK: c_int = 0;
/// A setting or argument of the library that is not allowed.
pub const PUSHGATE_E_CONFIG: c_int = 1;
/// A name that no setting has.
pub const PUSHGATE_E_UNKNOWN_SETTING: c_int = 2;
/// The settings file is no TOML.
pub const PUSHGATE_E_SETTINGS_FILE: c_int = 3;
/// A rank is gone: its process or its proxy ended, or its host can't be reached.
pub const PUSHGATE_E_PEER_LOST: c_int = 4;
/// Something that a rank asked for was refused, as a put that leaves its region.
pub const PUSHGATE_E_REFUSED: c_int = 5;
/// A wait took longer than its limit.
pub const PUSHGATE_E_TIMED_OUT: c_int = 6;
/// The communicator or the queue pair was aborted.
pub const PUSHGATE_E_ABORTED: c_int = 7;
/// A WQE slot was reserved and never published.
pub const PUSHGATE_E_STUCK: c_int = 8;
/// A message arrived for which there was no room: a fault of the sender's proxy.
pub const PUSHGATE_E_OVERRUN: c_int = 9;
/// The transport to a rank failed under a queue pair.
pub const PUSHGATE_E_LINK_DOWN: c_int = 10;
/// A handle of the process that this one was forked from.
pub const PUSHGATE_E_FORKED: c_int = 11;
/// The GPU, its driver or a compiler said no.
pub const PUSHGATE_E_DEVICE: c_int = 12;
/// Memory, sockets or files: the system said no.
pub const PUSHGATE_E_IO: c_int = 13;
/// Shared memory could not be made, or is not what a peer said.
pub const PUSHGATE_E_MEMORY: c_int = 14;
/// The proxy's engine has ended, or refused.
pub const PUSHGATE_E_PROXY: c_int = 15;
/// The engine can't take the queue pair.
pub const PUSHGATE_E_QUEUE_PAIR: c_int = 16;
/// An RDMA device, or what it was asked for.
pub const PUSHGATE_E_RDMA: c_int = 17;
/// A queue pair over TCP.
pub const PUSHGATE_E_TCP: c_int = 18;
/// The kernel module gave no window.
pub const PUSHGATE_E_WINDOW: c_int = 19;
/// Two ends that do not fit together.
pub const PUSHGATE_E_MISMATCH: c_int = 20;
/// The program has ended the call while it waited, by pushgate_interrupt_by.
pub const PUSHGATE_E_INTERRUPTED: c_int = 21;
/// An argument of this interface is wrong: NULL, misaligned, no UTF-8, of a wrong size, or an unknown flag.
pub const PUSHGATE_E_ARGUMENT: c_int = 64;
/// NULL, a handle of another kind, a closed one, or no handle at all.
pub const PUSHGATE_E_HANDLE: c_int = 65;
/// The handle is in use, by an open handle that was made with it or by a call of another thread; it stays open.
pub const PUSHGATE_E_BUSY: c_int = 66;
/// There is nothing yet, or no credit; nothing was taken.
pub const PUSHGATE_E_AGAIN: c_int = 67;
/// A fault of the library itself. What the call was about may be unusable; other handles are not.
pub const PUSHGATE_E_INTERNAL: c_int = 68;

/// The library's own numbers are these; ErrorCode says that they never change.
const _: () = {
    let all = [
        (PUSHGATE_E_CONFIG, ErrorCode::Config),
        (PUSHGATE_E_UNKNOWN_SETTING, ErrorCode::UnknownSetting),
        (PUSHGATE_E_SETTINGS_FILE, ErrorCode::SettingsFile),
        (PUSHGATE_E_PEER_LOST, ErrorCode::PeerLost),
        (PUSHGATE_E_REFUSED, ErrorCode::Refused),
        (PUSHGATE_E_TIMED_OUT, ErrorCode::TimedOut),
        (PUSHGATE_E_ABORTED, ErrorCode::Aborted),
        (PUSHGATE_E_STUCK, ErrorCode::Stuck),
        (PUSHGATE_E_OVERRUN, ErrorCode::Overrun),
        (PUSHGATE_E_LINK_DOWN, ErrorCode::Transport),
        (PUSHGATE_E_FORKED, ErrorCode::Forked),
        (PUSHGATE_E_DEVICE, ErrorCode::Device),
        (PUSHGATE_E_IO, ErrorCode::Io),
        (PUSHGATE_E_MEMORY, ErrorCode::Memory),
        (PUSHGATE_E_PROXY, ErrorCode::Proxy),
        (PUSHGATE_E_QUEUE_PAIR, ErrorCode::QueuePair),
        (PUSHGATE_E_RDMA, ErrorCode::Rdma),
        (PUSHGATE_E_TCP, ErrorCode::Tcp),
        (PUSHGATE_E_WINDOW, ErrorCode::Window),
        (PUSHGATE_E_MISMATCH, ErrorCode::Mismatch),
        (PUSHGATE_E_INTERRUPTED, ErrorCode::Interrupted),
    ];
    let mut i = 0;
    while i < all.len() {
        assert!(all[i].0 == all[i].1 as c_int);
        i += 1;
    }
};

/// What a number means, in a few words.
pub(crate) fn words(code: c_int) -> &'static CStr {
    match code {
        PUSHGATE_E_OK => c"success",
        PUSHGATE_E_CONFIG => c"a setting or argument is not allowed",
        PUSHGATE_E_UNKNOWN_SETTING => c"there is no such setting",
        PUSHGATE_E_SETTINGS_FILE => c"the settings file is no TOML",
        PUSHGATE_E_PEER_LOST => c"a rank is lost",
        PUSHGATE_E_REFUSED => c"a request was refused",
        PUSHGATE_E_TIMED_OUT => c"timed out",
        PUSHGATE_E_ABORTED => c"aborted",
        PUSHGATE_E_STUCK => c"a slot was reserved and never published",
        PUSHGATE_E_OVERRUN => c"a message came for which there was no room",
        PUSHGATE_E_LINK_DOWN => c"the link to a rank failed",
        PUSHGATE_E_FORKED => c"a handle of the process that this one was forked from",
        PUSHGATE_E_DEVICE => c"the device, its driver or a compiler refused",
        PUSHGATE_E_IO => c"input or output failed",
        PUSHGATE_E_MEMORY => c"shared memory failed",
        PUSHGATE_E_PROXY => c"the proxy's engine has ended or refused",
        PUSHGATE_E_QUEUE_PAIR => c"the engine can't take the queue pair",
        PUSHGATE_E_RDMA => c"an RDMA device refused",
        PUSHGATE_E_TCP => c"a queue pair over TCP failed",
        PUSHGATE_E_WINDOW => c"the kernel module gave no window",
        PUSHGATE_E_MISMATCH => c"two ends do not fit together",
        PUSHGATE_E_INTERRUPTED => c"interrupted by the program",
        PUSHGATE_E_ARGUMENT => c"an argument is wrong",
        PUSHGATE_E_HANDLE => c"a handle is wrong",
        PUSHGATE_E_BUSY => c"it is in use",
        PUSHGATE_E_AGAIN => c"not yet",
        PUSHGATE_E_INTERNAL => c"a fault of the library",
        _ => c"an unknown number",
    }
}

/// What a number that a call returned means, in a few words. Never NULL; the text is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pushgate_strerror(code: c_int) -> *const c_char {
    words(code).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A number that is in the header and nowhere else would be "an unknown number".
    #[test]
    fn each_number_of_the_header_has_words_of_its_own() {
        let header = include_str!("../include/pushgate/pushgate.h");
        let numbers = header.lines().filter_map(|line| line.strip_prefix("#define PUSHGATE_E_"));
        let numbers: Vec<c_int> =
            numbers.map(|rest| rest.split(' ').next_back().unwrap().parse().unwrap()).collect();
        assert!(numbers.len() >= 26, "{numbers:?}");
        let said: HashSet<_> = numbers.iter().map(|code| words(*code)).collect();
        assert!(said.len() == numbers.len() && !said.contains(words(-1)), "{said:?}");
    }
}
