//! Tests what a peer can do to an engine through the doorbells between the two: ring it, and
//! nothing else.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::*;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::engine::{Engine, EngineOptions};
use pushgate_engine::idle::Wake;
use pushgate_engine::proxy::{Proxy, QpFds};
use pushgate_link::ring;
use pushgate_service::remote::RemoteEngine;
use pushgate_service::server::{ServerOptions, bind, serve};
use pushgate_tests::hang;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

/// An engine that serves an evil peer and a good one, wherever the engine runs.
struct Served {
    engine: Box<dyn Proxy>,
    /// The engine's doorbell, for the device of a program in this process.
    own: Option<EventFd>,
}

/// The good peer, and the devices at both ends.
struct Good {
    engine: Engine,
    /// The device at the served end, then the device at the good peer's end.
    devices: [Device; 2],
}

/// The evil peer: its memory and its ends of both bells.
struct Evil {
    memory: Arc<Memory>,
    /// The doorbell that the served engine rings.
    bell: Bell,
    /// The descriptor by which the served engine rings that doorbell; the peer has the descriptor
    /// too.
    ringer: OwnedFd,
    /// The ringer for the served engine.
    rings: Ringer,
    /// The device at the served end.
    device: Device,
}

fn fds(own: &Memory, peer: &Memory, (bell, ringer): (Bell, Ringer)) -> QpFds {
    QpFds {
        work: own.work.clone(),
        control: own.control.clone(),
        link: own.link.clone(),
        peer_link: peer.link_read.clone(),
        peer_window: peer.window_read.clone(),
        bell: Some(bell),
        peer_bell: Some(ringer),
        peer_pid: None,
    }
}

fn dup(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().unwrap()
}

/// Makes both peers of the engine, joined, each with messages to send at the served end.
fn peers(served: &Served) -> (Evil, Good) {
    let m = [0, 1, 0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let bell_of = |served: &Served| served.own.as_ref().map(|b| b.try_clone().unwrap());
    let ((victims, rings), (bell, ringer)) = (bell::pair().unwrap(), bell::pair().unwrap());
    let theirs = dup(ringer.as_fd());
    served.engine.add_qp(fds(&m[0], &m[1], (victims, ringer)), options(1), Wake::Doorbell).unwrap();
    let mut device = Device::new(&m[0], &m[1]);
    device.set_bell(bell_of(served));
    let evil = Evil { memory: m[1].clone(), bell, ringer: theirs, rings, device };

    let [x, y] = bells();
    let good = EventFd::new().unwrap();
    let engine = Engine::start(good.try_clone().unwrap(), EngineOptions::default()).unwrap();
    served.engine.add_qp(fds(&m[2], &m[3], x), options(1), Wake::Doorbell).unwrap();
    Proxy::add_qp(&engine, fds(&m[3], &m[2], y), options(0), Wake::Doorbell).unwrap();
    let mut devices = [Device::new(&m[2], &m[3]), Device::new(&m[3], &m[2])];
    devices[0].set_bell(bell_of(served));
    devices[1].set_bell(Some(good));
    (evil, Good { engine, devices })
}

impl Good {
    /// Passes messages there and back; for some of them waits until engines sleep.
    fn messages(&mut self, n: u32) {
        for tag in 0..n {
            for from in [0, 1] {
                if tag % 2 == 0 {
                    // About the time when an engine falls asleep.
                    std::thread::sleep(Duration::from_micros(tag as u64 * 37 % 300));
                }
                let begin = Instant::now();
                while !self.devices[from].post(inline_send(tag), b"good") {
                    assert!(begin.elapsed() < hang(), "message {tag} of {from}: no credit");
                }
                while self.devices[1 - from].try_recv().map(|m| m.tag) != Some(tag) {
                    assert!(begin.elapsed() < hang(), "message {tag} of {from} does not arrive");
                    std::thread::yield_now();
                }
                self.devices[1 - from].release(1);
            }
        }
    }
}

impl Evil {
    /// Makes everything that the peer holds blocking and full, and says that the peer sleeps.
    fn set_trap(&self) {
        for fd in [self.bell.handle(), self.ringer.as_fd(), self.rings.as_fd()] {
            fcntl_setfl(fd, fcntl_getfl(fd).unwrap() & !OFlags::NONBLOCK).unwrap();
        }
        let one_more = || send(&self.ringer, &[0; 64], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
        while one_more() {}
        let link = &self.memory.link;
        // Grants a receive, so that the served engine has a reason to ring.
        ring::advance(&link.words(abi::PUSHGATE_LINK_GRANTED as usize, 1)[0], 8);
        link.words(abi::PUSHGATE_LINK_SLEEPING as usize, 1)[0].store(1, Ordering::SeqCst);
    }

    /// Makes the served engine ring the evil peer, because it has something for it.
    fn is_rung(&mut self, served: &Served) {
        let rings = || served.engine.counters().unwrap().rings;
        let before = rings();
        assert!(self.device.post(inline_send(1), b"ring"));
        let begin = Instant::now();
        while rings() == before {
            assert!(begin.elapsed() < hang(), "it is not rung");
            std::thread::yield_now();
        }
    }
}

fn thread() -> Served {
    let bell = EventFd::new().unwrap();
    let engine = Engine::start(bell.try_clone().unwrap(), EngineOptions::default()).unwrap();
    Served { engine: Box::new(engine), own: Some(bell) }
}

/// `pushgate proxy`, run as a thread of this process.
struct Server {
    stop: EventFd,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.ring();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

fn process(name: &str) -> (Served, Server) {
    let path = std::path::PathBuf::from(format!("@pushgate-bells-{name}-{}", std::process::id()));
    let (listener, _file) = bind(&path).unwrap();
    let stop = EventFd::new().unwrap();
    let options = ServerOptions::new(stop.try_clone().unwrap());
    let server = Server { stop, thread: Some(std::thread::spawn(move || serve(listener, options))) };
    let engine = RemoteEngine::connect(&path, "bells").unwrap();
    // Its devices do not ring: it looks by itself often enough for a test.
    (Served { engine: Box::new(engine), own: None }, server)
}

fn a_trap_catches_nobody(served: Served) {
    let (mut evil, mut good) = peers(&served);
    good.messages(4);
    evil.set_trap();
    evil.is_rung(&served);
    good.messages(20);
    // The other bell is full too, so a ring of the good peer must not be queued after that.
    let full = || send(evil.rings.as_fd(), &[0; 64], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err();
    let begin = Instant::now();
    while !full() {
        assert!(begin.elapsed() < hang());
    }
    good.messages(20);
    assert_eq!(good.devices[0].status(), None);
}

#[test]
fn p8_a_peer_whose_bells_are_full_and_blocking_stops_no_engine_of_a_thread() {
    a_trap_catches_nobody(thread());
}

#[test]
fn p8_a_peer_whose_bells_are_full_and_blocking_stops_no_engine_of_a_proxy_process() {
    let (served, _server) = process("full");
    a_trap_catches_nobody(served);
}

/// If a silent bell were still polled, it would be found readable each time, and the engine would
/// never sleep. The engine looks by itself ten times a second, and the number of its sleeps shows
/// whether it sleeps.
#[test]
fn p8_a_peer_that_shuts_its_bell_down_keeps_no_engine_awake_and_hides_no_ring() {
    let served = thread();
    let (evil, mut good) = peers(&served);
    good.messages(4);
    shutdown(&evil.rings, Shutdown::Both).unwrap();
    shutdown(evil.bell.handle(), Shutdown::Both).unwrap();
    good.messages(20);
    let sleeps = || served.engine.counters().unwrap().sleeps;
    let (before, begin) = (sleeps(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (slept, tenths) = (sleeps() - before, begin.elapsed().as_millis() as u64 / 100);
    // Each sleep lasts a tenth of a second; the limit is twice that rate, because of the questions
    // above.
    assert!(
        slept <= 2 * tenths + 4,
        "{slept} sleeps in {tenths} tenths of a second: a poll finds the dead bell"
    );
    good.messages(20);
    // The dead end is closed too, with its ringer.
    drop(evil);
    good.messages(4);
    assert_eq!(good.engine.counters().unwrap().dropped, 0);
}

#[test]
fn p8_a_descriptor_that_a_peer_sends_along_does_not_end_a_ring_of_anothers() {
    let served = thread();
    let (evil, mut good) = peers(&served);
    let (a, _b) = UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [a.as_fd()];
    assert!(along.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(&[1])];
    rustix::net::sendmsg(evil.rings.as_fd(), &bytes, &mut along, SendFlags::NOSIGNAL).unwrap();
    good.messages(20);
}
