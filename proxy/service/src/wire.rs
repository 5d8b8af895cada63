//! What a program and `pushgate proxy` say to each other: one request, one
//! reply, JSON in the frames of [`pushgate_driver_shim::fdpass`]. Payload and
//! WQEs never come this way; they lie in the memory whose descriptors do.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use pushgate_driver_shim::closing::{PeerStream, drop_elsewhere_within};
use pushgate_driver_shim::fdpass;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::Versions;
use pushgate_engine::connect::Incarnation;
use pushgate_engine::counters::Counters;
use pushgate_engine::endpoint::QpOptions;
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::idle::Wake;
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Versions of this language that this build speaks. A program and its proxy use the newest that both speak.
pub const VERSIONS: Versions = Versions::new(2, 3);

/// Longest frame, bytes of JSON.
pub const MAX_FRAME: usize = 64 << 10;

/// The version from which on a queue pair's link is replaced when it breaks, and its session goes on with another proxy.
pub const SESSIONS: u32 = 3;

/// Most descriptors of a frame: those of [`Request::AddQp`] with a session and both bells.
pub const MAX_FDS: usize = QP_FDS + 3;

/// Descriptors of [`Request::AddQp`], those of the session and the bells aside.
pub const QP_FDS: usize = 5;

/// How long either side waits for the other to begin or finish a frame.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// A program's request. The first one, and it alone, is `Hello`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Descriptor: the bell of the engine that is to be started, which the program rings.
    Hello {
        /// The oldest version that the program speaks.
        version: u32,
        /// The newest, if that is another.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        newest: Option<u32>,
        /// What logs call the program.
        #[serde(default)]
        name: String,
    },
    /// Descriptors: work, control, link, the peer's link, the peer's window, then the session segment, the
    /// bell that the peer rings and the ringer of the peer's bell, each if there is one.
    AddQp {
        /// The options of the queue pair.
        options: QpOptions,
        /// How the producer can wake the engine.
        #[serde(with = "WakeDef")]
        wake: Wake,
        /// There is a bell that the peer rings.
        bell: bool,
        /// There is a ringer that wakes the peer's engine.
        peer_bell: bool,
        /// The link is replaced when it breaks, and there is a session segment. Since version 3.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session: Option<SessionOffer>,
    },
    /// Asks for the way of frames. Answered with two descriptors: the program's end of a pair of sockets, and a pidfd of the
    /// proxy's process. Since version 3.
    Channel,
    /// Adds a queue pair with a session as `AddQp` does: the queue pair goes on where another proxy died. The link segment is a new one. The
    /// queue pair is taken in by `Begin`, after its regions. Since version 3.
    ResumeQp {
        /// The options of the queue pair.
        options: QpOptions,
        /// How the producer can wake the engine.
        #[serde(with = "WakeDef")]
        wake: Wake,
        /// There is a bell that the peer rings.
        bell: bool,
        /// There is a ringer that wakes the peer's engine.
        peer_bell: bool,
        /// What replaces the link.
        session: SessionOffer,
    },
    /// Descriptor: shared memory, which is a region of the queue pair that is being resumed. Since version 3.
    RestoreRegion {
        /// The key that the region had.
        key: u32,
        /// Size of the memory.
        bytes: u64,
    },
    /// Takes the queue pair in that is being resumed. Since version 3.
    Begin,
    /// Descriptor: shared memory, all of which becomes a region.
    AddRegion {
        /// Queue pair that may name it.
        qp: QpId,
        /// Size of the memory.
        bytes: u64,
    },
    /// Removes a region.
    RemoveRegion {
        /// The queue pair of the region.
        qp: QpId,
        /// What `AddRegion` answered.
        key: u32,
    },
    /// Drops a queue pair, its regions and all mappings.
    RemoveQp {
        /// Which.
        qp: QpId,
    },
    /// Ends queue pairs with a status.
    Fail {
        /// Which; all of the program's if none is named.
        qp: Option<QpId>,
        /// A status word.
        status: u64,
    },
    /// How a queue pair ended.
    Status {
        /// Which.
        qp: QpId,
    },
    /// Counts of the program's queue pairs.
    Counters,
    /// The program is done. Answered when its mappings are gone.
    Bye,
    /// Asks what users hold of the proxy. Comes in place of `Hello`, and the connection ends with the answer. A proxy of an
    /// earlier release does not know it.
    Usage,
}

/// What replaces a queue pair's link when it breaks.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SessionOffer {
    /// Names the queue pair on the way of frames.
    pub tag: u32,
    /// The incarnation of this end that has met the peer.
    pub own: Incarnation,
    /// The peer's incarnation.
    pub peer: Incarnation,
    /// The epoch of the link that the ends have met over. A session that is resumed goes by its segment.
    pub epoch: u32,
    /// How long the ends try to meet again, nanoseconds.
    pub recover_ns: u64,
}

/// What a request brought.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// To `Hello`.
    Welcome {
        /// The version that both use.
        version: u32,
    },
    /// To `AddQp` and `Begin`.
    Qp(QpId),
    /// To `Channel`.
    Channel,
    /// To `AddRegion` and `RestoreRegion`.
    Key(u32),
    /// To `RemoveRegion`: false if the key named none.
    Removed(bool),
    /// To `RemoveQp` and `Counters`.
    Counters(Counters),
    /// To `Status`: a status word, if it has ended.
    Status(Option<u64>),
    /// To `ResumeQp`, `Fail` and `Bye`.
    Done,
    /// To `Usage`.
    Usage(Usage),
}

/// Amounts of what a proxy shares out to users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amounts {
    /// Programs that have said `Hello`.
    pub programs: u64,
    /// Queue pairs.
    pub queue_pairs: u64,
    /// Bytes: memory of programs that is mapped in the proxy, and what the proxy has in memory for the programs.
    pub bytes: u64,
    /// Descriptors.
    pub descriptors: u64,
}

/// What users hold of a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The user that the proxy runs as.
    pub proxy: u32,
    /// The most that one user may hold.
    pub quota: Amounts,
    /// Users that are connected: all of them for root and the proxy's own user, else the one that asks. At most
    /// [`MOST_ROWS`].
    pub users: Vec<UserUsage>,
    /// How many users were left out.
    pub left_out: usize,
}

/// Most users of a [`Usage`], which must fit in a frame.
pub const MOST_ROWS: usize = 256;

/// What one user holds of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserUsage {
    /// The user's number.
    pub uid: u32,
    /// What the user holds.
    #[serde(flatten)]
    pub held: Amounts,
    /// Processor time of the threads that the proxy runs for the user's programs of now, nanoseconds.
    pub cpu_ns: u64,
    /// By how much these threads yield to those of other users: a nice value.
    pub nice: i32,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// The program's engine has ended.
    Gone,
    /// No such queue pair.
    NoQp(u32),
    /// The queue pair's table is full.
    TooManyRegions,
    /// The proxy ends, and every queue pair of the program with it. Comes without a request, as the proxy's last word. A program of
    /// an earlier release does not know it.
    Ended {
        /// The proxy's process, by its number in the proxy's PID namespace.
        pid: u32,
        /// Why, as the end of a sentence that begins with the proxy.
        why: String,
    },
    /// Anything else, in a sentence.
    Why(String),
}

/// What comes back for a [`Request`].
pub type Reply = Result<Answer, Refusal>;

#[derive(Serialize, Deserialize)]
#[serde(remote = "Wake")]
enum WakeDef {
    Doorbell,
    Polled,
}

impl From<EngineError> for Refusal {
    fn from(e: EngineError) -> Self {
        match e {
            EngineError::Gone => Refusal::Gone,
            EngineError::NoQp(qp) => Refusal::NoQp(qp),
            EngineError::TooManyRegions => Refusal::TooManyRegions,
            EngineError::Remote(why) => Refusal::Why(why),
            other => Refusal::Why(other.to_string()),
        }
    }
}

impl From<Refusal> for EngineError {
    fn from(r: Refusal) -> Self {
        match r {
            Refusal::Gone => EngineError::Gone,
            Refusal::NoQp(qp) => EngineError::NoQp(qp),
            Refusal::TooManyRegions => EngineError::TooManyRegions,
            // The proxy is another process, and may quote this one.
            Refusal::Ended { pid, why } => {
                EngineError::Remote(format!("the process (pid {pid}) {}", Foreign::sentence(why)))
            }
            Refusal::Why(why) => EngineError::Remote(Foreign::sentence(why).to_string()),
        }
    }
}

/// Sends one request or reply.
pub fn send<T: Serialize>(stream: &UnixStream, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    fdpass::send_message(stream, &serde_json::to_vec(message)?, fds)
}

/// Receives one request or reply. `InvalidData` if it is none, `UnexpectedEof` if the other side
/// closed.
pub fn recv<T: DeserializeOwned>(stream: &UnixStream) -> io::Result<(T, Vec<OwnedFd>)> {
    let (bytes, fds) = fdpass::recv_message(stream, MAX_FRAME, MAX_FDS)?;
    Ok((message(&bytes)?, fds))
}

/// Receives one request or reply from a peer that is not trusted: descriptors of what is no message are closed without waiting,
/// and the peer holds
/// what it holds of a quota until they are.
pub fn recv_from_peer<T: DeserializeOwned>(stream: &PeerStream) -> io::Result<(T, Vec<OwnedFd>)> {
    let (bytes, fds) = fdpass::recv_from_peer(stream, MAX_FRAME, MAX_FDS)?;
    match message(&bytes) {
        Ok(message) => Ok((message, fds)),
        Err(e) => {
            if !fds.is_empty() {
                drop_elsewhere_within(fds, stream.held());
            }
            Err(e)
        }
    }
}

fn message<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes).map_err(|e| {
        io::Error::new(io::ErrorKind::InvalidData, format!("not a message: {}", Foreign::word(e)))
    })
}

/// The name behind a leading `@`, of a socket that is no file.
pub(crate) fn abstract_name(path: &Path) -> Option<&[u8]> {
    path.as_os_str().as_bytes().strip_prefix(b"@")
}

/// Connects to the socket at `path` (`@name`: an abstract one). A proxy whose
/// queue of new connections is full is waited for until `deadline`, then
/// `WouldBlock`; a plain `connect` could wait for ever.
pub fn dial(path: &Path, deadline: Instant) -> io::Result<PeerStream> {
    let address = match abstract_name(path) {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(path)?,
    };
    PeerStream::connect(&address, deadline)
}

/// Who is at the other end of a Unix socket.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerCred {
    /// 0 if the process lies outside our PID namespace.
    pub pid: c_int,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

// rustix's `socket_peercred` has a PID that cannot be 0, which is what the
// kernel gives for a process of another PID namespace: a container that shares
// the socket. std links the C library anyway.
unsafe extern "C" {
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut u32) -> c_int;
}

const SOL_SOCKET: c_int = 1;
const SO_PEERCRED: c_int = 17;
const SO_PEERGROUPS: c_int = 59;
/// The most groups of a process that Linux knows.
const MOST_GROUPS: usize = 1 << 16;

/// The peer's process, user and group (`SO_PEERCRED`), as they were when it connected, or when it listened.
pub fn peer_cred(stream: &UnixStream) -> io::Result<PeerCred> {
    let mut cred = PeerCred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<PeerCred>() as u32;
    // SAFETY: the kernel writes at most `length` bytes of a struct ucred (three
    // 32-bit integers; any pattern is a valid `PeerCred`) behind the
    // pointer, and the length; both outlive the call, and the descriptor is open.
    let rc = unsafe {
        getsockopt(
            stream.as_fd().as_raw_fd(),
            SOL_SOCKET,
            SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut length,
        )
    };
    if rc == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}

/// The peer's supplementary groups (`SO_PEERGROUPS`), as they were when it connected.
pub fn peer_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; 64];
    loop {
        let mut length = (groups.len() * size_of::<u32>()) as u32;
        // SAFETY: the kernel writes at most `length` bytes behind the pointer, which are group numbers of 32 bits, and the
        // length; both outlive the call, and the descriptor is open.
        let rc = unsafe {
            getsockopt(
                stream.as_fd().as_raw_fd(),
                SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let n = length as usize / size_of::<u32>();
        if rc == 0 {
            groups.truncate(n);
            return Ok(groups);
        }
        let e = io::Error::last_os_error();
        // Too many for the room that there is: the kernel says how many there are.
        if e.raw_os_error() != Some(Errno::RANGE.raw_os_error()) || n <= groups.len() || n > MOST_GROUPS {
            return Err(e);
        }
        groups.resize(n, 0);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};

    use pushgate_tests::fuzz::{fuzz, kind};

    use super::*;

    #[test]
    fn a_later_hello_is_still_understood_as_one() {
        // Whatever a later version adds or drops, its number can be refused by name.
        for text in [r#"{"Hello":{"version":7,"name":"x","more":[1]}}"#, r#"{"Hello":{"version":7}}"#] {
            let Ok(Request::Hello { version: 7, .. }) = serde_json::from_str(text) else { panic!("{text}") };
        }
    }

    /// Options of a queue pair in valid requests.
    pub(crate) const OPTIONS: QpOptions = QpOptions {
        peer: 1,
        roles: false,
        posted_receives: true,
        reader_flushes: false,
        stuck_ns: u64::MAX,
        in_place_share: 128,
        slow_ns: 1,
        ungated: false,
        key_seed: 7,
    };

    #[test]
    fn peers_are_known_by_uid() {
        let (a, _b) = UnixStream::pair().unwrap();
        let cred = peer_cred(&a).unwrap();
        assert_eq!(cred.uid, rustix::process::geteuid().as_raw());
        assert_eq!(cred.pid, std::process::id() as i32);
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_bytes_of_a_program_make_its_requests_or_a_proxys_answers_panic() {
        let options = OPTIONS;
        let (one, qp) = (Incarnation::MIN, QpId(3));
        let session = SessionOffer { tag: 1, own: one, peer: one, epoch: 2, recover_ns: 3 };
        let requests = [
            Request::Hello { version: 2, newest: Some(3), name: "a program".into() },
            Request::AddQp {
                options,
                wake: Wake::Polled,
                bell: false,
                peer_bell: false,
                session: Some(session),
            },
            Request::ResumeQp { options, wake: Wake::Doorbell, bell: false, peer_bell: false, session },
            Request::AddRegion { qp, bytes: 4096 },
            Request::RestoreRegion { key: 7, bytes: 4096 },
            Request::Fail { qp: None, status: 1 },
            Request::Usage,
        ];
        let held = UserUsage { uid: 1, held: Amounts::default(), cpu_ns: 1, nice: 5 };
        let usage = Usage { proxy: 0, quota: Amounts::default(), users: vec![held; 2], left_out: 0 };
        let replies: [Reply; 5] = [
            Ok(Answer::Welcome { version: 3 }),
            Ok(Answer::Counters(Counters::default())),
            Ok(Answer::Usage(usage)),
            Err(Refusal::Why("no".into())),
            Err(Refusal::Ended { pid: 7, why: "was stopped".into() }),
        ];
        fn framed(which: u8, message: &impl Serialize) -> Vec<u8> {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            send(&ours, message, &[]).unwrap();
            drop(ours);
            let mut all = vec![which];
            theirs.read_to_end(&mut all).unwrap();
            all
        }
        // The first byte says which of the two ends has sent the rest.
        let seeds: Vec<_> = (requests.iter().map(|request| framed(0, request)))
            .chain(replies.iter().map(|reply| framed(1, reply)))
            .collect();
        let taken = std::cell::Cell::new(0);
        let target = |bytes: &[u8]| {
            let Some((which, bytes)) = bytes.split_first() else { return 0 };
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(bytes).unwrap();
            drop(theirs);
            let mut answer = 0;
            loop {
                let shown = match which % 2 {
                    0 => recv_from_peer::<Request>(&PeerStream::from(ours.try_clone().unwrap()))
                        .map(|(request, _)| format!("{request:?}")),
                    _ => recv::<Reply>(&ours).map(|(reply, _)| match reply {
                        Err(refusal) => EngineError::from(refusal).to_string(),
                        Ok(answer) => format!("{answer:?}"),
                    }),
                };
                match shown {
                    Ok(shown) => answer ^= kind(shown),
                    Err(e) => return answer ^ kind(e),
                }
                taken.set(taken.get() + 1);
            }
        };
        seeds.iter().for_each(|seed| _ = target(seed));
        assert_eq!(taken.get(), seeds.len());
        fuzz(&seeds, target);
    }
}
