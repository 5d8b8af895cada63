//! Frames of a program with descriptors of any number and kind, as the thread that answers a program takes them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pushgate_driver_shim::bell;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::send_message;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_engine::connect::Incarnation;
use pushgate_engine::endpoint::QpOptions;
use pushgate_engine::engine::QpId;
use pushgate_engine::idle::Wake;
use pushgate_engine::journal::{Journal, SESSION_BYTES};
use pushgate_link::frame::Frame;
use pushgate_tests::fuzz::{Step, fuzz, kind};
use rustix::event::epoll;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::client::{Guest, Server, attend};
use super::ledger::Ledger;
use super::options::ServerOptions;
use super::share::Share;
use crate::frame_socket::FrameSocket;
use crate::wire::tests::OPTIONS;
use crate::wire::{self, Answer, MAX_FDS, Reply, Request, SessionOffer};

const GEOMETRY: Geometry = Geometry {
    window_log: 6,
    slots_log: 4,
    cq_log: 4,
    rx_log: 3,
    link_log: 4,
    landing_log: 6,
    signals: 4,
    rank: 0,
};
/// Bytes of a region.
const REGION: usize = 4096;
/// How many kinds of descriptors there are.
const KINDS: u8 = 27;
/// The descriptors of a queue pair, then those of its session and its bells.
const QP: [u8; MAX_FDS] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Bits of a step's first byte: the frame goes by the way of frames, as soon as the proxy has answered with one; the frame
/// announces another number of descriptors than come along. The low bits: how many come along.
const BY_CHANNEL: u8 = 0x80;
const MISCOUNTED: u8 = 0x40;
const NUMBER: u8 = 0x0f;

/// Memory of this size, with these seals and without pages.
fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn memory(bytes: usize) -> SharedMemory {
    SharedMemory::builder("fuzz", bytes).huge_pages(HugePages::Never).create().unwrap()
}

fn sealed(bytes: usize) -> OwnedFd {
    memory(bytes).fd().try_clone_to_owned().unwrap()
}

fn segment(rank: u32, kind: Segment) -> OwnedFd {
    let geometry = Geometry { rank, ..GEOMETRY };
    let memory = memory(geometry.bytes(kind));
    write_header(&memory, kind, &geometry).unwrap();
    memory.fd().try_clone_to_owned().unwrap()
}

/// A descriptor of this kind, and what must stay open with it.
fn descriptor(kind: u8) -> (OwnedFd, Option<OwnedFd>) {
    let (grow, shrink) = (SealFlags::GROW, SealFlags::SHRINK);
    let both = grow | shrink;
    let owned = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
    let alone = match kind {
        0 => segment(0, Segment::Work),
        1 => segment(0, Segment::Control),
        2 => segment(0, Segment::Link),
        3 => segment(1, Segment::Link),
        4 => sealed(GEOMETRY.window_bytes()),
        5 => sealed(SESSION_BYTES),
        6 | 7 => {
            let (bell, ringer) = bell::pair().unwrap();
            let (bell, ringer) = (owned(bell.handle()), owned(ringer.as_fd()));
            return if kind == 6 { (bell, Some(ringer)) } else { (ringer, Some(bell)) };
        }
        8 => sealed(REGION),
        9 => sealed(100),
        10 => memfd(0, both),
        11 => memfd(REGION as u64, SealFlags::empty()),
        12 => memfd(REGION as u64, grow),
        13 => memfd(REGION as u64, both),
        14 => memfd(1 << 45, both),
        15 => {
            let memory = memory(REGION);
            memory.seal_against_writers().unwrap();
            owned(memory.fd())
        }
        // The peer's segments in place of the program's own.
        16 => segment(1, Segment::Work),
        17 => segment(1, Segment::Control),
        18 => EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap(),
        19 => {
            let (read, write) = rustix::pipe::pipe().unwrap();
            return (read, Some(write));
        }
        20 => {
            let (read, write) = rustix::pipe::pipe().unwrap();
            return (write, Some(read));
        }
        21 => {
            let (a, b) = UnixStream::pair().unwrap();
            return (a.into(), Some(b.into()));
        }
        22 => UnixDatagram::pair().unwrap().0.into(),
        23 => File::open("/proc/self/exe").unwrap().into(),
        24 => owned(Process::own().unwrap().as_fd()),
        // The session segment of a proxy that has died.
        25 => {
            let memory = Arc::new(memory(SESSION_BYTES));
            drop(Journal::new(memory.clone(), 1, None));
            owned(memory.fd())
        }
        _ => epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
    };
    (alone, None)
}

fn asks(request: &Request, kinds: &[u8]) -> Vec<u8> {
    Step::bytes(0, kinds, &serde_json::to_vec(request).unwrap())
}

/// What conversations of programs are.
fn conversations() -> [Vec<Vec<u8>>; 4] {
    let options = OPTIONS;
    let (one, qp) = (Incarnation::MIN, QpId(0));
    let session = SessionOffer { tag: 1, own: one, peer: one, epoch: 1, recover_ns: 1_000_000 };
    let add = |session: Option<SessionOffer>, bells| Request::AddQp {
        options: QpOptions { posted_receives: session.is_none(), ..options },
        wake: Wake::Polled,
        bell: bells,
        peer_bell: bells,
        session,
    };
    let resume = Request::ResumeQp {
        options: QpOptions { posted_receives: false, ..options },
        wake: Wake::Doorbell,
        bell: true,
        peer_bell: true,
        session: SessionOffer { tag: 2, ..session },
    };
    let newest = wire::VERSIONS.newest();
    let hello = || {
        asks(
            &Request::Hello { version: wire::VERSIONS.oldest(), newest, name: "a program".into() },
            &QP[6..7],
        )
    };
    let plain = |request: Request| asks(&request, &[]);
    // A frame of a peer that leaves, with the tag of the queue pair in front.
    let status = pushgate_core::session::Status::new(pushgate_driver_shim::abi::PUSHGATE_ABORTED);
    let leaves = [&1u32.to_le_bytes()[..], &pushgate_core::connect::end(one, None, status)].concat();
    [
        vec![
            hello(),
            asks(&add(None, false), &QP[..5]),
            asks(&Request::AddRegion { qp, bytes: REGION as u64 }, &[8]),
            plain(Request::Counters),
            plain(Request::RemoveRegion { qp, key: 0 }),
            plain(Request::Status { qp }),
            plain(Request::Fail { qp: Some(qp), status: 0xffff_ff02 }),
            plain(Request::RemoveQp { qp }),
            plain(Request::Bye),
        ],
        vec![
            hello(),
            plain(Request::Channel),
            asks(&add(Some(session), true), &QP),
            Step::bytes(BY_CHANNEL, &[2], &leaves),
            plain(Request::Status { qp }),
        ],
        vec![
            hello(),
            plain(Request::Channel),
            asks(&resume, &[0, 1, 2, 3, 4, 25, 6, 7]),
            asks(&Request::RestoreRegion { key: 7, bytes: REGION as u64 }, &[8]),
            plain(Request::Begin),
            plain(Request::Bye),
        ],
        vec![plain(Request::Usage)],
    ]
}

/// A program that says what an input holds, and what the server answered.
struct Program {
    stream: UnixStream,
    channel: Option<FrameSocket>,
    descriptors: BTreeMap<u8, (OwnedFd, Option<OwnedFd>)>,
    /// How many requests were carried out.
    done: usize,
    answer: u64,
}

impl Program {
    /// Says one step. False once nothing more follows.
    fn says(&mut self, rest: &mut &[u8]) -> bool {
        let Some(Step { flags, kinds, frame }) = Step::next(rest, NUMBER) else { return false };
        for kind in kinds {
            let kind = kind % KINDS;
            self.descriptors.entry(kind).or_insert_with(|| descriptor(kind));
        }
        let along: Vec<_> = kinds.iter().map(|kind| self.descriptors[&(kind % KINDS)].0.as_fd()).collect();
        if let (Some(channel), true) = (&self.channel, flags & BY_CHANNEL != 0) {
            let Some((tag, bytes)) = frame.split_first_chunk() else { return true };
            let along: Vec<_> = along.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            let frame = Frame { bytes: bytes.to_vec(), along: along.into() };
            return channel.send(u32::from_le_bytes(*tag), &frame).is_ok();
        }
        if flags & MISCOUNTED != 0 {
            // The bytes of the frame come where more descriptors are announced.
            let header = [frame.len() as u32, along.len() as u32 + 1].map(u32::to_le_bytes).concat();
            let _ = (&self.stream).write_all(&header);
            let _ = self.stream.shutdown(Shutdown::Write);
        } else if send_message(&self.stream, frame, &along).is_err() {
            return false;
        }
        match wire::recv::<Reply>(&self.stream) {
            Ok((reply, fds)) => {
                self.done += usize::from(reply.is_ok());
                if let (Ok(Answer::Channel), Some(channel)) = (&reply, fds.into_iter().next()) {
                    self.channel = Some(FrameSocket::from_fd(channel).unwrap());
                }
                let shown = match reply {
                    Ok(answer) => {
                        kind(format!("{answer:?}").to_lowercase().split(['(', ' ']).next().unwrap())
                    }
                    Err(wire::Refusal::Why(why)) => kind(why),
                    Err(refusal) => kind(format!("{refusal:?}").to_lowercase()),
                };
                self.answer = self.answer.wrapping_mul(31) ^ shown;
                true
            }
            Err(_) => false,
        }
    }
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_frames_of_a_program_with_descriptors_of_any_kind_make_its_thread_panic_or_keep_what_they_brought()
 {
    let mut options = ServerOptions::new(EventFd::new().unwrap());
    (options.max_qps, options.max_regions, options.max_bytes) = (2, 4, 4 << 20);
    let ledger = Ledger::new(options.quota, None);
    let uid = rustix::process::geteuid().as_raw();
    let server = Server { options, ledger, share: Share::new(false), uid };
    let done = std::cell::Cell::new(0);
    // The server's threads and engines catch panics of their own.
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, hook) = (panics.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        count.fetch_add(1, Ordering::Relaxed);
        hook(panic);
    }));
    let target = |input: &[u8]| {
        let (ours, stream) = UnixStream::pair().unwrap();
        let guest = Guest { stream: ours.into(), process: None, uid, number: 0 };
        std::thread::scope(|scope| {
            let attends = scope.spawn(|| attend(&server, guest));
            let (channel, descriptors) = (None, BTreeMap::new());
            let mut program = Program { stream, channel, descriptors, done: 0, answer: 0 };
            let mut rest = input;
            while program.says(&mut rest) {}
            let _ = program.stream.shutdown(Shutdown::Both);
            attends.join().expect("the thread of a program does not panic");
            assert_eq!(panics.load(Ordering::Relaxed), 0, "a panic that the server has caught");
            done.set(program.done);
            assert_eq!(server.ledger.users(), [], "the user holds nothing once the program is gone");
            program.answer
        })
    };
    let mut seeds = Vec::new();
    for (steps, expected) in conversations().into_iter().zip([9, 4, 6, 1]) {
        let seed = steps.concat();
        target(&seed);
        assert_eq!(done.get(), expected, "requests that were carried out");
        seeds.push(seed);
    }
    fuzz(&seeds, target);
    drop(std::panic::take_hook());
}
