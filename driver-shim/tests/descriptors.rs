//! Frames with descriptors where this process may open no more files, or where the kernel takes no more: a process of its own,
//! for its limits are lowered. One test, because limits are a process's.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use pushgate_driver_shim::fdpass::{Frame, Incoming, Outgoing, send_message};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

fn set_limit(files: u64) {
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), ..getrlimit(Resource::Nofile) }).unwrap();
}

fn next(incoming: &mut Incoming, socket: &UnixStream) -> Frame {
    incoming.receive(socket, 64, 16).unwrap().expect("a frame")
}

#[test]
fn a_frame_whose_descriptors_find_no_room_is_lost_or_late_and_the_stream_goes_on() {
    let before = getrlimit(Resource::Nofile).current.expect("a limit of open files");
    let (a, b) = UnixStream::pair().unwrap();
    let mut incoming = Incoming::default();
    let stdin = std::io::stdin();

    // The receiver may open no more files.
    send_message(&a, b"lost", &[stdin.as_fd(); 8]).unwrap();
    send_message(&a, b"comes", &[stdin.as_fd(); 2]).unwrap();
    // A new descriptor has the lowest number that is free.
    let free = stdin.as_fd().try_clone_to_owned().unwrap().as_raw_fd() as u64;
    set_limit(free + 3);
    let e = incoming.receive(&b, 64, 16).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::QuotaExceeded, "{e}");
    assert!(e.to_string().contains("the limit of open files is "), "{e}");
    set_limit(before);
    let (bytes, fds) = next(&mut incoming, &b);
    assert_eq!((&bytes[..], fds.len()), (&b"comes"[..], 2));
    drop(fds);

    // The sender has as many descriptors in sockets as a process may open. The kernel asks a privileged thread nothing.
    let privileged = CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN;
    let CapabilitySets { effective, permitted, inheritable } = capabilities(None).unwrap();
    let lowered = CapabilitySets { effective: effective - privileged, permitted, inheritable };
    set_capabilities(None, lowered).unwrap();
    set_limit(64);
    let mut out = Outgoing::default();
    let mut sent = 0;
    while !out.is_refused() {
        let fds: Vec<OwnedFd> = (0..8).map(|_| stdin.as_fd().try_clone_to_owned().unwrap()).collect();
        out.push(&[sent], fds).unwrap();
        sent += 1;
        let all = out.flush(&a).unwrap();
        assert_eq!(all, !out.is_refused(), "the socket itself has room");
        assert!(sent < 100, "{} descriptors wait and the kernel takes more", 8 * u32::from(sent));
    }
    assert!(!out.flush(&a).unwrap() && out.is_refused(), "nobody has read");
    let mut came = 0;
    while came < sent {
        match incoming.receive(&b, 64, 16).unwrap() {
            Some((bytes, fds)) => {
                assert_eq!((&bytes[..], fds.len()), (&[came][..], 8));
                came += 1;
            }
            None => _ = out.flush(&a).unwrap(),
        }
    }
    assert!(out.is_empty() && !out.is_refused());
    set_capabilities(None, CapabilitySets { effective, permitted, inheritable }).unwrap();
}
