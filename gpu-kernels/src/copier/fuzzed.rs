//! What a client says to its copier, with descriptors of any kind, and what it writes into the memory that both share.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pushgate_driver_shim::bell;
use pushgate_driver_shim::fdpass::{recv_message, send_message};
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_tests::fuzz::{Step, fuzz, kind};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use super::layout::{Command, Layout, RINGS, State};
use super::protocol::{self, BY_ADDRESS, Handed, Request};
use super::serve::Server;
use super::*;
use crate::CpuExecutor;
use crate::executor::Executor;

/// Bytes of the memory that a client shares with the copier, of its device memory, and of a host memory.
const SHARED: usize = Layout::bytes(4096);
const DEVICE: u64 = 1 << 16;
const HOST: usize = 1 << 14;
/// How many kinds of descriptors there are. The first is the shared memory.
const KINDS: u8 = 11;

/// Bits of a step's first byte: the step writes into the shared memory; the frame announces another number of descriptors than come
/// along. The low bits: how many come along.
const IN_MEMORY: u8 = 0x80;
const MISCOUNTED: u8 = 0x40;
const NUMBER: u8 = 0x03;
/// No process has memory at addresses with this bit.
const NOWHERE: u64 = 1 << 62;

fn memory(bytes: usize) -> SharedMemory {
    SharedMemory::builder("fuzz", bytes).huge_pages(HugePages::Never).create().unwrap()
}

/// A descriptor of this kind. What must stay open with it is leaked with the process.
fn descriptor(kind: u8) -> OwnedFd {
    let owned = |memory: SharedMemory| memory.fd().try_clone_to_owned().unwrap();
    let memfd = |bytes, seals| {
        let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let both = SealFlags::GROW | SealFlags::SHRINK;
    match kind {
        1 => owned(memory(HOST)),
        2 => {
            let memory = memory(HOST);
            memory.seal_against_writers().unwrap();
            owned(memory)
        }
        3 => {
            let memory = memory(HOST);
            fallocate(memory.fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, HOST as u64)
                .unwrap();
            owned(memory)
        }
        4 => memfd(HOST as u64, SealFlags::empty()),
        5 => memfd(0, both),
        6 => memfd(HOST as u64 - 1, both),
        7 => bell::pair().unwrap().1.as_fd().try_clone_to_owned().unwrap(),
        8 => rustix::pipe::pipe().unwrap().1,
        9 => UnixStream::pair().unwrap().0.into(),
        _ => File::open("/proc/self/exe").unwrap().into(),
    }
}

/// A request's bytes.
fn encoded(request: &Request) -> Vec<u8> {
    let (a, b) = UnixStream::pair().unwrap();
    protocol::ask(&a, request).unwrap();
    recv_message(&b, 1024, 1).unwrap().0
}

/// A step that writes a command into a ring as the one before `tail`, and publishes `tail`.
fn posts(ring: u8, tail: u64, command: Command) -> Vec<u8> {
    let keys = u64::from(command.device) << 32 | u64::from(command.host);
    let words = [u64::from(command.out), keys, command.device_offset, command.host_offset, command.length];
    let all = std::iter::once(tail).chain(words).flat_map(u64::to_le_bytes);
    Step::bytes(IN_MEMORY, &[], &std::iter::once(ring).chain(all).collect::<Vec<_>>())
}

fn conversations() -> [Vec<Vec<u8>>; 2] {
    let fd = || memory(4096).fd().try_clone_to_owned().unwrap();
    let asks = |request: &Request, kinds: &[u8]| Step::bytes(0, kinds, &encoded(request));
    let hello = || asks(&Request::Hello { bytes: SHARED as u64, memory: fd() }, &[0]);
    let host = |writable, kind| asks(&Request::Host { bytes: HOST as u64, writable, memory: fd() }, &[kind]);
    let by = |address, how| asks(&Request::Device { address, bytes: DEVICE, how }, &[]);
    let forget = |device, key| asks(&Request::Forget { device, key }, &[]);
    let copy = Command { out: true, device: 0, host: 1, device_offset: 8, host_offset: 64, length: 512 };
    [
        vec![
            hello(),
            host(true, 1),
            by(0, Handed::Address),
            posts(0, 1, copy),
            posts(1, 1, Command { out: false, host: 0, ..copy }),
            host(false, 2),
            posts(1, 2, Command { out: false, host: 2, ..copy }),
            forget(false, 2),
            forget(true, 0),
            forget(false, 1),
        ],
        vec![
            hello(),
            host(true, 3),
            by(NOWHERE, Handed::Address),
            asks(&Request::Device { address: 1, bytes: 2, how: Handed::Allocation(fd()) }, &[4]),
            by(3, Handed::Ipc([7; protocol::IPC])),
            posts(0, 1, copy),
        ],
    ]
}

/// A client that says what an input holds, and what the copier answered.
struct Client {
    stream: UnixStream,
    shared: SharedMemory,
    descriptors: BTreeMap<u8, OwnedFd>,
    /// Where its device memory lies.
    device: u64,
    /// How many requests were carried out, and commands.
    done: usize,
    answer: u64,
}

impl Client {
    /// Takes one step. False once nothing more follows.
    fn takes(&mut self, rest: &mut &[u8]) -> bool {
        let Some(Step { flags, kinds, frame }) = Step::next(rest, NUMBER) else { return false };
        if flags & IN_MEMORY != 0 {
            return self.posts(frame);
        }
        let frame = self.harmless(frame);
        for kind in kinds.iter().map(|kind| kind % KINDS) {
            let shared = || self.shared.fd().try_clone_to_owned().unwrap();
            self.descriptors
                .entry(kind)
                .or_insert_with(|| if kind == 0 { shared() } else { descriptor(kind) });
        }
        let along: Vec<_> = kinds.iter().map(|kind| self.descriptors[&(kind % KINDS)].as_fd()).collect();
        if flags & MISCOUNTED != 0 {
            // The bytes of the frame come where more descriptors are announced.
            let header = [frame.len() as u32, along.len() as u32 + 1].map(u32::to_le_bytes).concat();
            let _ = (&self.stream).write_all(&header).and_then(|()| (&self.stream).write_all(&frame));
            let _ = self.stream.shutdown(Shutdown::Write);
        } else if send_message(&self.stream, &frame, &along).is_err() {
            return false;
        }
        let answer = match protocol::answered(&self.stream) {
            Ok(Ok((value, fds))) => {
                self.done += 1;
                value.min(5) << 1 | fds.len() as u64
            }
            Ok(Err(why)) => {
                assert!(!why.contains(char::is_control), "{why:?}");
                kind(why)
            }
            Err(_) => return false,
        };
        self.answer = self.answer.wrapping_mul(31) ^ answer;
        true
    }

    /// A frame that names device memory by an address is changed so that it names this client's, or none: copies go to this process.
    fn harmless(&self, frame: &[u8]) -> Vec<u8> {
        let mut frame = frame.to_vec();
        let word = |n: usize| u64::from_le_bytes(frame[8 * n..8 * n + 8].try_into().unwrap());
        if frame.len() >= 24 && word(0) == BY_ADDRESS {
            let (bytes, address) = (word(1), word(2));
            let offset = address % DEVICE;
            let (bytes, address) = match address & NOWHERE {
                0 => (bytes.min(DEVICE - offset), self.device + offset),
                _ => (bytes.min(NOWHERE - 1), NOWHERE),
            };
            frame[8..16].copy_from_slice(&bytes.to_le_bytes());
            frame[16..24].copy_from_slice(&address.to_le_bytes());
        }
        frame
    }

    /// Writes a command into a ring, and waits for it if the copier may copy it.
    fn posts(&mut self, bytes: &[u8]) -> bool {
        let Some((&ring, words)) = bytes.split_first() else { return true };
        let words: Vec<_> =
            words.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect();
        let [tail, out, keys, device_offset, host_offset, length] = words[..] else { return true };
        let (ring, layout) = (usize::from(ring) % RINGS, Layout(&self.shared));
        let (device, host) = ((keys >> 32) as u32, keys as u32);
        let command = Command { out: out != 0, device, host, device_offset, host_offset, length };
        layout.write(ring, tail.wrapping_sub(1), command);
        layout.tail(ring).store(tail, Ordering::Release);
        // The copier looks sooner or later.
        let ring_bell = |_: &usize| {
            layout.mark(ring).load(Ordering::Acquire) < tail && layout.state().0 == State::Running
        };
        (0..200).take_while(ring_bell).for_each(|_| std::thread::yield_now());
        let (state, why) = layout.state();
        let copied = layout.mark(ring).load(Ordering::Acquire) == tail;
        self.done += usize::from(copied);
        self.answer = self.answer.wrapping_mul(31) ^ u64::from(copied) ^ kind(why);
        state == State::Running
    }
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_requests_or_commands_of_a_client_make_a_copier_panic_or_stop_another_client() {
    let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
    let server = Server::start(executor.clone()).unwrap();
    let join = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.admit(theirs.into());
        ours
    };
    let good = Copier::over(join().into(), &executor).unwrap();
    let device = executor.alloc(DEVICE as usize).unwrap();
    let _held = good.register_device(device.addr(), DEVICE).unwrap();
    let mut pull = good.queue(Direction::Pull);
    let done = std::cell::Cell::new(0);
    // The copier's threads may panic where nobody joins them.
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, hook) = (panics.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        count.fetch_add(1, Ordering::Relaxed);
        hook(panic);
    }));
    let mut target = |input: &[u8]| {
        let (shared, descriptors) = (memory(SHARED), BTreeMap::new());
        let mut client =
            Client { stream: join(), shared, descriptors, device: device.addr(), done: 0, answer: 0 };
        let mut rest = input;
        while client.takes(&mut rest) {}
        let _ = client.stream.shutdown(Shutdown::Write);
        // Until the copier has let go of all that this client brought.
        let _ = client.stream.read_to_end(&mut Vec::new());
        assert_eq!(panics.load(Ordering::Relaxed), 0, "a thread of the copier has panicked");
        // SAFETY: the queue's own memory and a buffer that is larger, until the wait is over.
        let ticket = unsafe { pull.post(device.addr(), pull.aside().0 as u64, 64) }.unwrap();
        super::tests::wait(&mut pull, ticket);
        done.set(client.done);
        client.answer
    };
    let mut seeds = Vec::new();
    for (steps, expected) in conversations().into_iter().zip([10, 3]) {
        let seed = steps.concat();
        target(&seed);
        assert_eq!(done.get(), expected, "requests and commands that were carried out");
        seeds.push(seed);
    }
    fuzz(&seeds, target);
    drop(std::panic::take_hook());
}
