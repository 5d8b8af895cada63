//! A greeting or an answer over TCP, before there are frames: 16 bytes and JSON.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use serde::Serialize;

use crate::Stream;

/// The first bytes of every greeting and answer. The magic, the version and the length that follow, and
/// the refusal stay the same in all versions, so that any two versions can tell each other that
/// they do not fit.
pub const MAGIC: [u8; 8] = *b"PUSHGATE";
/// The length of the header: magic, version, length of the body.
pub const HEADER: usize = 16;

/// The bytes of a greeting or an answer.
pub fn envelope(version: u32, body: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(body).expect("plain data");
    let mut bytes = MAGIC.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// A greeting or an answer that is still arriving. It is read without waiting, so a peer that stops
/// in the middle does not hold up anyone else.
pub struct Incoming {
    bytes: Vec<u8>,
    want: usize,
}

impl Default for Incoming {
    fn default() -> Self {
        Incoming { bytes: Vec::new(), want: HEADER }
    }
}

impl Incoming {
    /// Reads what is there, never more than is wanted. True when everything is there.
    fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        // Memory grows with what arrived, not with the announced length.
        let mut chunk = [0; 16 << 10];
        let most = (self.want - self.bytes.len()).min(chunk.len());
        match stream.recv(&mut [IoSliceMut::new(&mut chunk[..most])]) {
            Ok(0) if self.bytes.is_empty() => {
                Err(io::Error::new(ErrorKind::UnexpectedEof, "peer closed the connection"))
            }
            Ok(0) => {
                let text =
                    format!("peer closed within a frame, after {} of {} bytes", self.bytes.len(), self.want);
                Err(io::Error::new(ErrorKind::ConnectionReset, text))
            }
            Ok(n) => {
                self.bytes.extend_from_slice(&chunk[..n]);
                Ok(self.bytes.len() == self.want)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }

    /// Returns version and body, of at most `max` bytes, once all is there.
    pub fn open(&mut self, stream: &Stream, max: usize) -> Result<Option<(u32, Vec<u8>)>, String> {
        loop {
            let full = self.fill(stream).map_err(|e| e.to_string())?;
            let begun = self.bytes.len().min(MAGIC.len());
            if self.bytes[..begun] != MAGIC[..begun] {
                return Err("it does not speak pushgate's protocol".into());
            }
            if !full {
                return Ok(None);
            }
            let length = self.word(12) as usize;
            if length > max {
                return Err(format!("a greeting or answer of {length} bytes, at most {max} allowed"));
            }
            if self.bytes.len() == HEADER + length {
                return Ok(Some((self.word(8), self.bytes.split_off(HEADER))));
            }
            self.want = HEADER + length;
        }
    }
}

/// Version and body of a greeting or an answer that has arrived whole.
pub fn opened(bytes: &[u8]) -> Result<(u32, &[u8]), String> {
    let length = |header: &[u8]| u32::from_le_bytes(header[12..].try_into().expect("four bytes")) as usize;
    match bytes.split_at_checked(HEADER) {
        Some((header, body)) if header.starts_with(&MAGIC) && length(header) == body.len() => {
            Ok((u32::from_le_bytes(header[8..12].try_into().expect("four bytes")), body))
        }
        _ => Err("it does not speak pushgate's protocol".into()),
    }
}

/// Waits until one of the descriptors is ready. False once the time is over.
pub fn wait(fds: &mut [PollFd<'_>], until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // An interrupted wait counts as ready: the caller looks again.
    !left.is_zero() && poll(fds, Some(&limit)) != Ok(0)
}

/// Sends all bytes, or fails once the time is over.
pub fn send_all(stream: &Stream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    loop {
        let sent = match bytes.is_empty() {
            true if stream.flush()? => return Ok(()),
            true => Err(ErrorKind::WouldBlock.into()),
            false => stream.send(&[IoSlice::new(bytes)]),
        };
        match sent {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if !wait(&mut [PollFd::new(stream, PollFlags::OUT)], deadline) {
                    let text = format!("the peer did not take a frame, {} bytes left", bytes.len());
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
            }
            Err(e) => return Err(e),
        }
    }
}

/// Sets keepalive and timeouts, so that a path that is dead is noticed, idle or not: in about ten seconds, or in three where
/// the connection is replaced. The other host's kernel answers, so a process that is stopped is no dead path.
pub fn tune(stream: impl AsFd, replaced: bool) -> io::Result<()> {
    let stream = stream.as_fd();
    sockopt::set_tcp_nodelay(stream, true)?;
    let (idle, between, limit) = if replaced { (1, 1, 3_000) } else { (4, 2, 10_000) };
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(idle))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(between))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, limit)?;
    Ok(())
}
