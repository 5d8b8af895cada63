//! PCI functions for our kernel module: QEMU's ivshmem, whose BAR is a file of the host's and which no other driver drives; and
//! devices of other drivers, which the module must leave alone.
//!
//! `ivshmem-plain` has only the BAR. `ivshmem-doorbell` also has interrupt vectors, and a register
//! that rings the vectors of its peers; QEMU gets the eventfds from a server, which is this
//! program. The server's socket lies in the run's folder as `ivshmem.sock`, so any process of the
//! host can be a peer too. (Protocol: docs/specs/ivshmem-spec of QEMU.)
//!
//! Another thread does what a test in the guest asks of "the host" through the first words of the
//! shared memory: tests/tests/driver/doorbell.rs has the other end.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::qemu::option;

/// How many vectors each peer has.
const VECTORS: usize = 4;
const SHARED_MIB: u64 = 4;
const SOCKET: &str = "ivshmem.sock";
const TICK: Duration = Duration::from_millis(1);

/// A function of the guest at 0000:00:`slot`.0, or the port to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The slot on the bus, which also names the file of its memory: `ivshmem-SLOT` in hexadecimal.
    pub slot: u8,
    /// What the function's BAR 2 is, or which other device it is.
    pub memory: Memory,
}

/// What backs a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A file of its own of this many MiB; no interrupts.
    Own(u64),
    /// The file `ivshmem-shared`, which all such functions share; each rings the others.
    Shared,
    /// No ivshmem: these options of QEMU's, in which `SLOT` is the slot.
    Other(&'static [&'static str]),
}

impl Device {
    /// The file that is the BAR, and its length.
    fn file(&self, run: &Path) -> Option<(PathBuf, u64)> {
        match self.memory {
            Memory::Own(mib) => Some((run.join(format!("ivshmem-{:x}", self.slot)), mib << 20)),
            Memory::Shared => Some((run.join("ivshmem-shared"), SHARED_MIB << 20)),
            Memory::Other(_) => None,
        }
    }

    /// The options for QEMU.
    pub fn arguments(&self, run: &Path) -> Result<Vec<OsString>> {
        let slot = self.slot;
        let mut list: Vec<OsString> = Vec::new();
        match (self.memory, self.file(run)) {
            (Memory::Own(mib), Some((file, _))) => {
                let start = format!("memory-backend-file,id=memory{slot},share=on,size={mib}M,mem-path=");
                list.extend(["-object".into(), option(&start, &file)]);
                list.extend([
                    "-device".into(),
                    format!("ivshmem-plain,memdev=memory{slot},addr={slot:x}").into(),
                ]);
            }
            (Memory::Other(options), _) => {
                list.extend(options.iter().map(|words| words.replace("SLOT", &format!("{slot:x}")).into()));
            }
            _ => {
                let start = format!("socket,id=peer{slot},path=");
                list.extend(["-chardev".into(), option(&start, &run.join(SOCKET))]);
                let device = format!("ivshmem-doorbell,chardev=peer{slot},vectors={VECTORS},addr={slot:x}");
                list.extend(["-device".into(), device.into()]);
            }
        }
        Ok(list)
    }
}

/// A connected peer. Its id is never given to another peer.
struct Peer {
    id: i64,
    stream: UnixStream,
    vectors: Vec<OwnedFd>,
}

type Peers = Arc<Mutex<Vec<Peer>>>;

/// What rings the functions of a run.
#[derive(Clone, Default)]
pub struct Bells(Peers);

impl Bells {
    /// An eventfd for vector 0 of each function that has interrupts, in the order in which QEMU has
    /// connected them, which is the order of their slots.
    pub fn all(&self) -> Result<Vec<OwnedFd>> {
        let peers = self.0.lock().expect("no thread panics");
        Ok(peers.iter().map(|peer| peer.vectors[0].try_clone()).collect::<Result<_, _>>()?)
    }
}

/// The threads that serve a run; they end when it is dropped.
pub struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    bells: Bells,
}

impl Server {
    /// Makes the memory, and serves the functions that share one.
    pub fn start(run: &Path, devices: &[Device]) -> Result<Server> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut server = Server { stop: stop.clone(), threads: Vec::new(), bells: Bells::default() };
        let mut files = Vec::new();
        for device in devices {
            let Some((path, bytes)) = device.file(run) else { continue };
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let file = file.with_context(|| format!("cannot make {}", path.display()))?;
            file.set_len(bytes)?;
            files.push((device.slot, file));
        }
        let shared = devices.iter().find(|device| device.memory == Memory::Shared);
        let Some((path, _)) = shared.and_then(|device| device.file(run)) else {
            return Ok(server);
        };
        let memory = File::options().read(true).write(true).open(path)?;
        let socket = run.join(SOCKET);
        // A machine that is booted once more finds the socket of its first boot.
        let _ = fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).with_context(|| {
            format!("cannot listen at {}: a shorter CARGO_TARGET_DIR may help", socket.display())
        })?;
        listener.set_nonblocking(true)?;
        let peers = server.bells.0.clone();
        let (at, with) = (stop.clone(), peers.clone());
        let shared = memory.try_clone()?;
        server.threads.push(thread::spawn(move || serve(&listener, &memory, &with, &at)));
        server.threads.push(thread::spawn(move || host(&shared, &files, &peers, &stop)));
        Ok(server)
    }

    /// What rings the functions of this server.
    pub fn bells(&self) -> Bells {
        self.bells.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &UnixListener, memory: &File, peers: &Peers, stop: &AtomicBool) {
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        if let Ok((stream, _)) = listener.accept() {
            let mut peers = peers.lock().expect("no thread panics");
            if let Err(error) = welcome(next, stream, memory, &mut peers) {
                println!("ivshmem: peer {next}: {error:#}");
            }
            next += 1;
        }
        // Tell the other peers about one that has left.
        let mut all = peers.lock().expect("no thread panics");
        let (stay, left): (Vec<_>, Vec<_>) = all.drain(..).partition(is_connected);
        for (gone, other) in left.iter().flat_map(|gone| stay.iter().map(move |other| (gone, other))) {
            let _ = send(other, gone.id, None);
        }
        *all = stay;
        drop(all);
        thread::sleep(TICK);
    }
}

fn is_connected(peer: &Peer) -> bool {
    match (&peer.stream).read(&mut [0]) {
        Ok(count) => count > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

/// Sends version, the peer's own id and the memory; then the vectors of all peers, each peer to
/// each.
fn welcome(id: i64, stream: UnixStream, memory: &File, peers: &mut Vec<Peer>) -> Result<()> {
    let vectors = (0..VECTORS).map(|_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC));
    let new = Peer { id, stream, vectors: vectors.collect::<Result<_, _>>()? };
    send(&new, 0, None)?;
    send(&new, id, None)?;
    send(&new, -1, Some(memory.as_fd()))?;
    for other in peers.iter() {
        for vector in &other.vectors {
            send(&new, other.id, Some(vector.as_fd()))?;
        }
        for vector in &new.vectors {
            send(other, id, Some(vector.as_fd()))?;
        }
    }
    for vector in &new.vectors {
        send(&new, id, Some(vector.as_fd()))?;
    }
    new.stream.set_nonblocking(true)?;
    peers.push(new);
    Ok(())
}

fn send(to: &Peer, value: i64, descriptor: Option<BorrowedFd>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "room for one");
    }
    sendmsg(&to.stream, &[IoSlice::new(&value.to_le_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The value of word 7 of the shared memory if the words before it are a request.
const REQUESTS: u64 = u64::from_le_bytes(*b"REQUESTS");

/// Does what the guest asks. Words 0 to 5 of the shared memory are a number, a request and its
/// arguments; words 8 and 9 are the number of the last request that was done, and its result.
fn host(shared: &File, files: &[(u8, File)], peers: &Peers, stop: &AtomicBool) {
    let mut words = [0; 80];
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(TICK);
        if shared.read_exact_at(&mut words, 0).is_err() {
            continue;
        }
        let word = |i: usize| u64::from_le_bytes(words[8 * i..8 * i + 8].try_into().expect("8 bytes"));
        if word(7) != REQUESTS || word(0) == 0 || word(0) == word(8) {
            continue;
        }
        let result = perform(word(1), [word(2), word(3), word(4), word(5)], files, peers).unwrap_or(u64::MAX);
        let _ = shared.write_all_at(&result.to_le_bytes(), 72);
        let _ = shared.write_all_at(&word(0).to_le_bytes(), 64);
    }
}

fn perform(request: u64, [a, b, c, d]: [u64; 4], files: &[(u8, File)], peers: &Peers) -> Option<u64> {
    let file = || files.iter().find(|(slot, _)| u64::from(*slot) == a).map(|(_, file)| file);
    match request {
        // Rings vector b of peer a, c times, every d us.
        1 => {
            let peers = peers.lock().ok()?;
            let peer = peers.iter().find(|peer| peer.id == a as i64)?;
            for _ in 0..c {
                rustix::io::write(peer.vectors.get(b as usize)?, &1u64.to_ne_bytes()).ok()?;
                thread::sleep(Duration::from_micros(d));
            }
            Some(c)
        }
        // Stores the word d every 8 bytes from b to c of the memory of slot a.
        2 => {
            let bytes = d.to_le_bytes().repeat((c.saturating_sub(b) / 8) as usize);
            file()?.write_all_at(&bytes, b).ok()?;
            Some(bytes.len() as u64)
        }
        // Counts the words there that equal d.
        3 => {
            let mut bytes = vec![0; c.saturating_sub(b) as usize];
            file()?.read_exact_at(&mut bytes, b).ok()?;
            Some(bytes.chunks_exact(8).filter(|word| **word == d.to_le_bytes()).count() as u64)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn a_peer_is_told_of_the_others() {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ivshmem-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let run = std::env::temp_dir().join(name);
        fs::create_dir(&run).unwrap();
        let devices = [Device { slot: 1, memory: Memory::Shared }];
        let server = Server::start(&run, &devices).unwrap();
        let read = |mut stream: &UnixStream| {
            let mut word = [0; 8];
            stream.read_exact(&mut word).unwrap();
            i64::from_le_bytes(word)
        };
        let first = UnixStream::connect(run.join(SOCKET)).unwrap();
        let vectors = |id| vec![id; VECTORS];
        let mut said: Vec<_> = (0..3 + VECTORS).map(|_| read(&first)).collect();
        assert_eq!(said, [vec![0, 0, -1], vectors(0)].concat());
        let second = UnixStream::connect(run.join(SOCKET)).unwrap();
        said = (0..3 + 2 * VECTORS).map(|_| read(&second)).collect();
        assert_eq!(said, [vec![0, 1, -1], vectors(0), vectors(1)].concat());
        said = (0..VECTORS).map(|_| read(&first)).collect();
        assert_eq!(said, vectors(1));
        drop(second);
        assert_eq!(read(&first), 1);
        drop(server);
        fs::remove_dir_all(&run).unwrap();
    }
}
