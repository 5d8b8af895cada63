//! What two ranks of different hosts say to each other before frames: a greeting and its answer, 16 bytes and JSON.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use pushgate_driver_shim::versions::{ABI, Versions};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use serde::{Deserialize, Serialize};

use super::GREETING;
use crate::mesh::wait;

/// First bytes of every greeting and answer. The magic, the version and the length that follow, and
/// the refusal stay the same in all versions, so that any two versions can tell each other that
/// they do not fit.
pub(super) const MAGIC: [u8; 8] = *b"PUSHGATE";
/// Versions that this build speaks of everything that goes over these connections.
pub(super) const VERSIONS: Versions = Versions::new(4, 4);
/// Length of the header: magic, version, length of the body.
pub(super) const HEADER: usize = 16;
pub(super) const MAX_GREETING: usize = 1024;
pub(super) const MAX_ANSWER: usize = 1 << 16;
/// A greeting: who connects, and to which rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    /// The newest version that the sender speaks, if that is another than the header's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest: Option<u32>,
    pub(super) abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest_abi: Option<u32>,
    pub(super) job: String,
    pub(super) size: u32,
    pub(super) rank: u32,
    pub(super) to: u32,
    /// Sent to rank 0 only: where this rank listens.
    pub(super) listens: Option<SocketAddr>,
    /// Sent to other ranks, and by a rank that dials again: the secret that rank 0 gave to this job's ranks alone.
    pub(super) token: Option<String>,
    /// From a rank whose connection broke: how many frames it has received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) again: Option<u64>,
}

/// The part of a greeting that tells whether the rest can be read.
#[derive(Deserialize)]
pub(super) struct Spoken {
    newest: Option<u32>,
}

impl Hello {
    /// Reads a greeting, and checks that its sender is of this job. An error says what is wrong, what is allowed and what to
    /// do.
    pub(super) fn read(
        version: u32,
        body: &[u8],
        job: &str,
        size: u32,
    ) -> std::result::Result<Hello, String> {
        let newest = serde_json::from_slice::<Spoken>(body).ok().and_then(|s| s.newest);
        if let Err(e) = VERSIONS.agree(Versions::told(version, newest)) {
            return differs("wire version", &e.theirs, &e.ours, RELEASE);
        }
        let hello: Hello = serde_json::from_slice(body)
            .map_err(|e| format!("its greeting: {}: {RELEASE}", plain(&e.to_string())))?;
        if let Err(e) = ABI.agree(Versions::told(hello.abi, hello.newest_abi)) {
            return differs("ABI version", &e.theirs, &e.ours, RELEASE);
        }
        if hello.job != job {
            let remedy = "give all ranks of a job its name, and every job a rendezvous of its own";
            return differs("job", &plain(&hello.job), &job, remedy);
        }
        if hello.size != size {
            return differs("size", &hello.size, &size, "give all ranks the same number of ranks");
        }
        Ok(hello)
    }
}

/// What to do about ranks whose versions differ.
pub(super) const RELEASE: &str = "run one release of pushgate on all hosts";

pub(super) fn differs<T>(
    what: &str,
    its: &dyn Display,
    allowed: &dyn Display,
    remedy: &str,
) -> std::result::Result<T, String> {
    Err(format!("its {what} is {its}, expected {allowed}: {remedy}"))
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// From rank 0: where ranks 1, 2, ... listen, and the port at which rank 0 listens for ranks that dial again; 0 if it
    /// takes none.
    Table {
        token: String,
        addresses: Vec<SocketAddr>,
        port: u16,
    },
    Welcome,
    /// To a rank that has dialled again: how many of its frames have been received.
    Again {
        received: u64,
    },
    Refused(String),
}

/// A greeting or an answer that is still arriving. It is read without waiting, so a peer that stops
/// in the middle does not hold up anyone else.
pub(super) struct Incoming {
    pub(super) bytes: Vec<u8>,
    pub(super) want: usize,
}

impl Incoming {
    pub(super) fn envelope() -> Self {
        Incoming { bytes: Vec::new(), want: HEADER }
    }

    /// Reads what is there, never more than is wanted. True when everything is there.
    pub(super) fn fill(&mut self, stream: &TcpStream) -> io::Result<bool> {
        // Memory grows with what arrived, not with the announced length.
        let mut chunk = [0; 16 << 10];
        let most = (self.want - self.bytes.len()).min(chunk.len());
        match recv(stream, &mut chunk[..most], RecvFlags::DONTWAIT) {
            Ok((_, 0)) if self.bytes.is_empty() => {
                Err(io::Error::new(ErrorKind::UnexpectedEof, "peer closed the connection"))
            }
            Ok((_, 0)) => {
                let text =
                    format!("peer closed within a frame, after {} of {} bytes", self.bytes.len(), self.want);
                Err(io::Error::new(ErrorKind::ConnectionReset, text))
            }
            Ok((_, n)) => {
                self.bytes.extend_from_slice(&chunk[..n]);
                Ok(self.bytes.len() == self.want)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }
}

pub(super) fn send_all(stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        // NOSIGNAL: in a host program in C, SIGPIPE may still end the process.
        match send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !wait(&mut [PollFd::new(stream, PollFlags::OUT)], deadline) {
                    let text = format!("the peer did not take a frame, {} bytes left", bytes.len());
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Closes a connection so that the last bytes we sent still arrive: if unread bytes were left, the
/// kernel would send a reset and discard what it has not sent yet.
pub(in crate::mesh) fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let mut chunk = [0; 16 << 10];
    for _ in 0..1024 {
        match recv(stream, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => {}
            _ => return,
        }
    }
}

pub(super) fn envelope(body: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(body).expect("plain data");
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSIONS.oldest().to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Returns version and body of a greeting or an answer, once it is complete.
pub(super) fn open(
    stream: &TcpStream,
    incoming: &mut Incoming,
    max: usize,
) -> std::result::Result<Option<(u32, Vec<u8>)>, String> {
    loop {
        let full = incoming.fill(stream).map_err(|e| e.to_string())?;
        let begun = incoming.bytes.len().min(MAGIC.len());
        if incoming.bytes[..begun] != MAGIC[..begun] {
            return Err("it does not speak pushgate's protocol".into());
        }
        if !full {
            return Ok(None);
        }
        let length = incoming.word(12) as usize;
        if length > max {
            return Err(format!("a greeting or answer of {length} bytes, at most {max} allowed"));
        }
        if incoming.bytes.len() == HEADER + length {
            return Ok(Some((incoming.word(8), incoming.bytes.split_off(HEADER))));
        }
        incoming.want = HEADER + length;
    }
}

pub(super) fn answer(stream: &TcpStream, answer: &Answer) -> io::Result<()> {
    send_all(stream, &envelope(answer), Instant::now() + GREETING)
}

/// Text from another host, made fit to stand within one line of ours.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(1000).collect()
}

/// Sets keepalive and timeouts, so that a path that is dead is noticed, idle or not: in about ten seconds, or in three where
/// the connection is replaced. The other host's kernel answers, so a process that is stopped is no dead path.
pub(super) fn tune(stream: &TcpStream, replaced: bool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (idle, between, limit) = if replaced { (1, 1, 3_000) } else { (4, 2, 10_000) };
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(idle))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(between))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, limit)?;
    Ok(())
}
