//! The ranks of one host: Unix sockets under abstract names made of job and rank.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use pushgate_driver_shim::fdpass::{recv_message, send_message};
use rustix::event::{PollFd, PollFlags, poll};

use super::timespec;
use crate::error::{Error, Result};

/// Version of the messages between ranks of one host.
const VERSION: u32 = 1;

/// All ranks of one process: sockets in pairs.
pub(super) fn pairs(size: u32) -> Result<Vec<Vec<Option<UnixStream>>>> {
    let mut streams: Vec<Vec<Option<UnixStream>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for (a, b) in (0..size as usize).flat_map(|a| (a + 1..size as usize).map(move |b| (a, b))) {
        let (x, y) = UnixStream::pair().map_err(Error::io("socket pair between ranks"))?;
        (streams[a][b], streams[b][a]) = (Some(x), Some(y));
    }
    Ok(streams)
}

/// A rank in a process of its own: each listens under an abstract name made
/// of `job` and its rank, and connects to all lower ranks. Nothing is left
/// behind whatever happens.
pub(super) fn connect(job: &str, rank: u32, size: u32, timeout: Duration) -> Result<Vec<Option<UnixStream>>> {
    let deadline = Instant::now() + timeout;
    let address = |rank: u32| {
        SocketAddr::from_abstract_name(format!("pushgate/{job}/{rank}"))
            .map_err(|_| Error::config("job", job, "a name of at most 80 bytes"))
    };
    let listener = UnixListener::bind_addr(&address(rank)?)
        .map_err(Error::io(format!("listening as rank {rank} of job {job}; is it running twice?")))?;
    listener.set_nonblocking(true).map_err(Error::io("rendezvous socket"))?;
    let hello = |to: u32| {
        let mut bytes = Vec::with_capacity(20);
        for v in [VERSION, rank, to, size, std::process::id()] {
            bytes.extend(v.to_le_bytes());
        }
        bytes
    };
    let mut streams: Vec<Option<UnixStream>> = (0..size).map(|_| None).collect();
    for lower in 0..rank {
        let stream = loop {
            match UnixStream::connect_addr(&address(lower)?) {
                Ok(s) => break s,
                Err(_) if Instant::now() >= deadline => {
                    return Err(Error::TimedOut {
                        what: format!("waiting for rank {lower}"),
                        after: timeout,
                    });
                }
                // It has not begun to listen, or its backlog is full.
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        check_owner(&stream, lower)?;
        send_message(&stream, &hello(lower), &[]).map_err(Error::io(format!("greeting rank {lower}")))?;
        streams[lower as usize] = Some(stream);
    }
    while streams[rank as usize + 1..].iter().any(Option::is_none) {
        let stream = loop {
            match listener.accept() {
                Ok((s, _)) => break s,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        let missing: Vec<_> = (rank + 1..size)
                            .filter(|r| streams[*r as usize].is_none())
                            .map(|r| r.to_string())
                            .collect();
                        let what = format!("waiting for rank {}", missing.join(", "));
                        return Err(Error::TimedOut { what, after: timeout });
                    }
                    let mut fds = [PollFd::new(&listener, PollFlags::IN)];
                    let _ = poll(&mut fds, Some(&timespec(Duration::from_millis(50))));
                }
                Err(e) => return Err(Error::io("accepting a rank")(e)),
            }
        };
        // The name is public: whoever is not ours is shown the door unheard.
        if let Err(e) = check_owner(&stream, rank) {
            tracing::warn!(rank, "a stranger at the rendezvous: {e}");
            continue;
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(Error::io("rendezvous socket"))?;
        let (bytes, _) = recv_message(&stream, 64, 0).map_err(Error::io("greeting of a rank"))?;
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().expect("four bytes"))).collect();
        let [version, from, to, theirs, _] = words[..] else {
            return Err(Error::Mismatch { rank, reason: "a greeting of the wrong length".into() });
        };
        if (version, to, theirs) != (VERSION, rank, size) || from <= rank || from >= size {
            return Err(Error::Mismatch {
                rank: from,
                reason: format!(
                    "it speaks version {version} to rank {to} of {theirs}, but this is version {VERSION}, rank \
                     {rank} of {size}"
                ),
            });
        }
        // A rank that was started anew takes the place of its former self.
        streams[from as usize] = Some(stream);
    }
    Ok(streams)
}

/// Only processes of our own user (or root) may be ranks of our job.
fn check_owner(stream: &UnixStream, rank: u32) -> Result<()> {
    let peer = pushgate_proxy::wire::peer_cred(stream).map_err(Error::io("peer's user"))?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid != own && peer.uid != 0 {
        let reason = format!("runs as user {}, this rank as {own}", peer.uid);
        return Err(Error::Mismatch { rank, reason });
    }
    Ok(())
}
