use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate::settings::{QpKind, Transport};
use pushgate_core::session::Status;
use pushgate_door::addresses::Places;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::closing::{MOST_CLOSES, PeerStream};
use pushgate_engine::connect::{self, Incarnation};
use pushgate_tests::fuse::Hanging;
use pushgate_tests::fuzz::{depth, fuzz, kind};
use pushgate_tests::lingering::lingering;
use pushgate_tests::users::{STRANGER, as_user, is_root};
use pushgate_tests::wait_until;

use super::attempts::{Stage, begin};
use super::greeting::{greet_with, greeting};
use super::progress::{FRAMES, Progress, Step};
use super::*;
use crate::again::Place;
use crate::alike::Alike;
use crate::dial::{self, Dialed};
use crate::error::Code;
use crate::handle::{self, Between, Handle, Key};
use crate::hosts::Listed;
use crate::identity::Identity;
use crate::join::Purpose;
use crate::listening::Sockets;
use crate::runtime::Runtime;
use crate::socket::Channel;
use crate::stream::Stream;

const MESSAGES: Purpose = Purpose::Messages { dev: 0 };

#[test]
fn a_greeting_of_another_version_is_refused_by_its_version() {
    let key = Key([7u8; 16]);
    let nonce = key.nonce();
    let say = |version: u32, rest: &str| {
        let text = format!(r#"{{"version":{version},{rest}}}"#);
        greeting(text.as_bytes(), &key).map_err(|e| e.text)
    };
    // Version 3 had the offer in its greeting.
    let earlier = format!(r#""nonce":{nonce:?},"offer":{{"Verbs":{{"qp":1}}}}"#);
    for rest in [&earlier[..], r#""Other":null"#] {
        for version in [1, 3, 5, 7] {
            let text = say(version, rest).unwrap_err();
            assert!(text.contains(&format!("speaks version {version}, expected 6")), "{text}");
        }
    }
    let text = say(6, r#""Other":null"#).unwrap_err();
    assert!(!text.contains("speaks version"), "{text}");
    say(6, &format!(r#""nonce":{nonce:?},"told":{{}}"#)).unwrap();
}

#[test]
fn ends_at_which_nccl_was_told_different_things_refuse_each_other_by_name() {
    let [here, there] = [QpKind::Local, QpKind::Auto]
        .map(|qp| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = qp));
    let (listener, mut bytes) = Listener::new(there, None).unwrap();
    let attempts = Attempts::new();
    assert!(attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap().is_none());
    let refused = crate::testing::until(|| listener.next(&MESSAGES).err());
    let e = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).err());
    assert!(refused.text.contains("qp is auto here and local there"), "{refused}");
    assert!(e.text.contains("qp is local here and auto there"), "{e}");
    assert_eq!([refused.code, e.code], [Code::Usage; 2]);
}

#[test]
fn an_end_that_is_refused_before_it_has_sent_its_offer_hears_why() {
    let [here, there] = [QpKind::Local, QpKind::Auto]
        .map(|qp| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = qp));
    let (listener, bytes) = Listener::new(there, None).unwrap();
    let handle = Handle::decode(&bytes).unwrap();
    let Dialed::Connected(stream) = dial::dial_unix(&handle.key.nonce(), None).unwrap() else {
        panic!("it listens")
    };
    let joining = begin(&here, &handle, stream, (None, Transport::Local), &MESSAGES).unwrap();
    let Stage::Joining(mut progress) = joining else { panic!("it joins") };
    crate::testing::until(|| listener.next(&MESSAGES).err());
    let e = progress.advance(&here).err().expect("the listener refuses it");
    assert!(e.code == Code::Usage && e.text.contains("qp is local here and auto there"), "{e}");
}

#[test]
fn a_listener_that_turns_a_process_away_is_not_reached_by_local() {
    let runtime = Runtime::of_a_test(crate::testing::WINDOW);
    let key = Key([0x77; 16]);
    let sockets = Sockets::open(&runtime.loaded, &key).unwrap();
    let listener = runtime.loaded.identity;
    let mut bytes = Handle { key, unix: true, tcp: None, between: Between::default(), listener }.encode();
    let attempts = Attempts::new();
    assert!(attempts.dial(&runtime, &mut bytes, None, &MESSAGES).unwrap().is_none());
    // As a listener does with a process of another user.
    drop(sockets.accept().unwrap().expect("a connection"));
    let e = crate::testing::until(|| attempts.dial(&runtime, &mut bytes, None, &MESSAGES).err());
    let why = "local queue pairs do not go there (its listener turned this process away, ";
    assert!(e.text.contains(why) && e.text.contains("no RDMA device for verbs (a test has none)"), "{e}");
}

/// A connection to a listener's Unix socket, over which these bytes have come with a descriptor.
fn stranger(key: &Key, bytes: &[u8], fd: BorrowedFd<'_>) -> Stream {
    let Dialed::Connected(stream) = dial::dial_unix(&key.nonce(), None).unwrap() else {
        panic!("it listens")
    };
    assert_eq!(stream.send(bytes, &[fd]).unwrap(), bytes.len());
    stream
}

/// A frame with one descriptor.
fn frame(bytes: &[u8]) -> Vec<u8> {
    [&b"PGF1"[..], &(bytes.len() as u32).to_le_bytes(), &1u32.to_le_bytes(), bytes].concat()
}

/// The runtimes of two ends that meet over `local`.
fn local() -> [Arc<Runtime>; 2] {
    [(); 2].map(|()| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = QpKind::Local))
}

#[test]
fn p7_p8_strangers_of_another_user_who_know_the_key_are_refused_unread_and_the_connector_comes_through() {
    if !is_root("strangers of another user at a listener of the plugin") {
        return;
    }
    let [here, there] = local();
    let (listener, mut bytes) = Listener::new(there, None).unwrap();
    let key = Handle::decode(&bytes).unwrap().key;
    let right = frame(&greet_with(&key, &here.loaded.alike, None, None, false));
    let strangers: Vec<_> = (0..20)
        .map(|_| {
            let (fd, end) = lingering();
            let stranger = as_user(STRANGER, || stranger(&key, &right, fd.as_fd()));
            // The listener's copy may be closed already, and then this close lingers.
            std::thread::spawn(|| drop(fd));
            (stranger, end)
        })
        .collect();
    let accepts = std::thread::spawn(move || crate::testing::until(|| listener.next(&MESSAGES).unwrap()));
    let attempts = Attempts::new();
    let connected = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap());
    wait_until("the connector is accepted", || accepts.is_finished());
    drop((connected, accepts.join().unwrap()));
    for (stranger, _) in &strangers {
        // A listener that had read the greeting would answer.
        assert!(!matches!(stranger.receive(&mut [0], &mut Vec::new()), Ok((1.., _))));
    }
}

/// Each close of the descriptors hangs for as long as the stranger likes.
#[test]
fn p7_p8_greetings_with_files_that_hang_hold_up_no_listener_and_leave_few_threads() {
    // The threads that close begin before there is a file that hangs.
    let _before = PeerStream::from(UnixStream::pair().unwrap().0);
    let hanging = match Hanging::open(1) {
        Ok(hanging) => hanging,
        Err(e) => {
            return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
        }
    };
    let [here, there] = local();
    let (listener, mut bytes) = Listener::new(there, None).unwrap();
    let key = Handle::decode(&bytes).unwrap().key;
    let accepts = std::thread::spawn(move || crate::testing::until(|| listener.next(&MESSAGES).unwrap()));
    for n in 0..60 {
        // A frame that is no greeting, or the beginning of a frame.
        let said = if n % 2 == 0 { frame(b"none") } else { b"PGF1".to_vec() };
        stranger(&key, &said, hanging.files()[0].as_fd());
    }
    // Each close under way has two threads.
    wait_until("closes hang", || hanging.waiting() >= MOST_CLOSES);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(hanging.waiting(), MOST_CLOSES);
    let attempts = Attempts::new();
    let connected = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap());
    wait_until("the connector is accepted", || accepts.is_finished());
    drop((connected, accepts.join().unwrap()));
}

#[test]
fn p8_a_connector_that_greets_and_then_sends_frames_without_end_loses_its_connection() {
    let runtime = Runtime::of_a_test(crate::testing::WINDOW);
    let told = runtime.loaded.alike.clone();
    let (listener, bytes) = Listener::new(runtime, None).unwrap();
    let key = Handle::decode(&bytes).unwrap().key;
    let Dialed::Connected(stream) = dial::dial_unix(&key.nonce(), None).unwrap() else {
        panic!("it listens")
    };
    let mut channel = Channel::new(stream);
    channel.send(&greet_with(&key, &told, None, None, false), Vec::new()).unwrap();
    // They change nothing: they are of an end that has never heard of this one.
    let end = connect::end(Incarnation::MIN, None, Status::new(abi::PUSHGATE_ABORTED));
    for _ in 0..FRAMES {
        channel.send(&end, Vec::new()).unwrap();
    }
    let refused = listener.next(&MESSAGES).err().expect("it goes on");
    assert!(refused.text.contains("more than 8 frames"), "{refused}");
    // Greeting and offer at most, then the end of the connection.
    let closed = (0..3).any(|_| channel.receive().is_err());
    assert!(closed, "the connection is still open");
}

/// Calls both ends until the listener waits for a connector that has made an offer and is not called any more.
fn begun() -> (Listener, Arc<Runtime>, Attempts, [u8; handle::BYTES]) {
    let runtime = || Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = QpKind::Tcp);
    let (here, there) = (runtime(), runtime());
    let (listener, mut bytes) = Listener::new(there, None).unwrap();
    let attempts = Attempts::new();
    crate::testing::until(|| {
        assert!(listener.next(&MESSAGES).unwrap().is_none());
        let is_ready = |current: &Progress| matches!(current.step, Step::Ready(_));
        if listener.state.lock().unwrap().current.as_ref().is_some_and(is_ready) {
            return Some(());
        }
        assert!(attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap().is_none());
        None
    });
    (listener, here, attempts, bytes)
}

#[test]
fn p7_a_connector_that_nccl_does_not_call_for_12_seconds_is_joined() {
    let (listener, here, attempts, mut bytes) = begun();
    let until = Instant::now() + Duration::from_secs(12);
    while Instant::now() < until {
        assert!(listener.next(&MESSAGES).unwrap().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    let (mut connected, mut accepted) = (None, None);
    crate::testing::until(|| {
        if connected.is_none() {
            connected = attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap();
        }
        // Before the streams that the connector has just begun to dial.
        if accepted.is_none() {
            accepted = listener.next(&MESSAGES).unwrap();
        }
        (connected.is_some() && accepted.is_some()).then_some(())
    });
    for Made { joined, .. } in [connected, accepted].into_iter().flatten() {
        joined.lane.engine.remove_qp(joined.qp).unwrap();
    }
}

#[test]
fn p7_a_listener_whose_connector_gives_up_in_the_middle_fails_its_accept() {
    let (listener, _here, attempts, mut bytes) = begun();
    attempts.abandon(&mut bytes);
    let e = crate::testing::until(|| listener.next(&MESSAGES).err());
    assert_eq!(e.code, Code::Remote, "{e}");
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_greeting_or_handle_of_a_stranger_makes_an_end_of_the_plugin_panic() {
    let key = Key([7; 16]);
    let ours = Alike::of_a_test(&[("devices", "4"), ("tuner", "ours")]);
    let again = Place::of_a_test();
    let listed = Listed::here(&Identity::here(), None, &["mlx5_0", "mlx5_1"]);
    let places = |all: &[&str]| Places::of(&all.iter().map(|at| at.parse().unwrap()).collect::<Vec<_>>());
    let handle = |unix, tcp| {
        let between = Between { verbs: false, tcp: true };
        Handle { key, unix, tcp, between, listener: Identity::here() }.encode().to_vec()
    };
    let seeds = [
        greet_with(&key, &ours, None, None, false),
        greet_with(&key, &Alike::of_a_test(&[("devices", "8")]), Some(&listed), Some(again), true),
        handle(false, places(&["10.1.2.3:4567", "[2001:db8::1]:4567"])),
        handle(true, places(&["[fe80::1%3]:9"])),
    ];
    greeting(&seeds[0], &key).unwrap();
    fuzz(&seeds, |bytes| {
        if let Ok(mut bytes) = <[u8; handle::BYTES]>::try_from(bytes) {
            // The checksum finds accidents; a stranger makes it right.
            handle::seal(&mut bytes);
            return match Handle::decode(&bytes) {
                Ok(handle) => {
                    assert!(handle.unix || handle.tcp.is_some());
                    assert!(!handle.listener.to_string().contains(char::is_control));
                    handle.unix as u64
                        | (handle.tcp.is_some() as u64) << 1
                        | (handle.between.verbs as u64) << 2
                }
                Err(e) => kind(e),
            };
        }
        match greeting(bytes, &key) {
            Ok(heard) => {
                let why = ours.differs(&heard.told).unwrap_or_default();
                assert!(!why.contains(char::is_control) && why.len() < 4096, "{why:?}");
                depth(why.len()) << 2 | (heard.again.is_some() as u64) << 1 | heard.links as u64
            }
            Err(e) => kind(e),
        }
    });
}
