//! What a client and its copier say to each other over their socket: requests and answers, one after the other. A frame is words
//! of eight bytes and descriptors; an answer may carry a sentence.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::layout::shortened;
use pushgate_driver_shim::fdpass::{recv_message, send_message};
use pushgate_driver_shim::log::Foreign;

/// The form of everything that two processes share here. It is part of a copier's name, so builds that differ in it have copiers of
/// their own.
pub(super) const VERSION: u32 = 2;

/// How long a copier may take to open its GPU. Where dozens of programs open GPUs at once, that took more than a minute; the ranks of a
/// job must not come to different paths by it. A copier that ends is noticed at once.
pub(super) const OPENS: Duration = Duration::from_secs(600);
/// How long an answer may take after that: importing memory takes a second or two on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a CUDA IPC handle.
pub(super) const IPC: usize = 64;
const WORDS: usize = 4 + IPC / 8;
const MOST_FDS: usize = 1;

/// What a client asks for.
#[derive(Debug)]
pub(super) enum Request {
    /// The first: the memory that both share, `bytes` long. The answer carries the copier's bell, which the client rings.
    Hello { bytes: u64, memory: OwnedFd },
    /// Host memory, a memfd of `bytes` bytes.
    Host { bytes: u64, writable: bool, memory: OwnedFd },
    /// Device memory that begins at an address of the client's.
    Device { address: u64, bytes: u64, how: Handed },
    /// Forgets a memory.
    Forget { device: bool, key: u32 },
}

/// How device memory is handed over.
#[derive(Debug)]
pub(super) enum Handed {
    /// By the descriptor of an allocation (cuMemExportToShareableHandle).
    Allocation(OwnedFd),
    /// By the handle of a whole allocation (cuIpcGetMemHandle).
    Ipc([u8; IPC]),
    /// By its address: the device is `cpu`.
    Address,
}

const HELLO: u64 = 1;
const HOST: u64 = 2;
const ALLOCATION: u64 = 3;
const BY_IPC: u64 = 4;
pub(super) const BY_ADDRESS: u64 = 5;
const FORGET: u64 = 6;

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends a request; its descriptors stay open here.
pub(super) fn ask(stream: &UnixStream, request: &Request) -> io::Result<()> {
    use std::os::fd::AsFd;
    let mut words = [0u64; WORDS];
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    match request {
        Request::Hello { bytes, memory } => {
            words[..2].copy_from_slice(&[HELLO, *bytes]);
            fds.push(memory.as_fd());
        }
        Request::Host { bytes, writable, memory } => {
            words[..3].copy_from_slice(&[HOST, *bytes, u64::from(*writable)]);
            fds.push(memory.as_fd());
        }
        Request::Device { address, bytes, how } => {
            words[1..3].copy_from_slice(&[*bytes, *address]);
            match how {
                Handed::Allocation(fd) => {
                    words[0] = ALLOCATION;
                    fds.push(fd.as_fd());
                }
                Handed::Ipc(handle) => {
                    words[0] = BY_IPC;
                    for (word, eight) in words[4..].iter_mut().zip(handle.chunks_exact(8)) {
                        *word = u64::from_le_bytes(eight.try_into().expect("eight bytes"));
                    }
                }
                Handed::Address => words[0] = BY_ADDRESS,
            }
        }
        Request::Forget { device, key } => {
            words[..3].copy_from_slice(&[FORGET, u64::from(*device), u64::from(*key)]);
        }
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    send_message(stream, &bytes, &fds)
}

/// Receives a request.
pub(super) fn hear(stream: &UnixStream) -> io::Result<Request> {
    let (bytes, fds) = recv_message(stream, WORDS * 8, MOST_FDS)?;
    if bytes.len() != WORDS * 8 {
        return Err(invalid("a request of another length"));
    }
    let word = |n: usize| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().expect("eight bytes"));
    let mut fds = fds.into_iter();
    let mut fd = || fds.next().ok_or_else(|| invalid("a request without its descriptor"));
    Ok(match word(0) {
        HELLO => Request::Hello { bytes: word(1), memory: fd()? },
        HOST => Request::Host { bytes: word(1), writable: word(2) != 0, memory: fd()? },
        ALLOCATION => Request::Device { bytes: word(1), address: word(2), how: Handed::Allocation(fd()?) },
        BY_IPC => {
            let handle = bytes[4 * 8..].try_into().expect("as many bytes as a handle has");
            Request::Device { bytes: word(1), address: word(2), how: Handed::Ipc(handle) }
        }
        BY_ADDRESS => Request::Device { bytes: word(1), address: word(2), how: Handed::Address },
        FORGET => Request::Forget { device: word(1) != 0, key: word(2) as u32 },
        _ => return Err(invalid("a request of no known kind")),
    })
}

/// The longest sentence of an answer.
const SENTENCE: usize = 4096;

/// Sends an answer: a number and descriptors, or why not.
pub(super) fn answer(
    stream: &UnixStream,
    answer: Result<u64, &str>,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let (status, value, text) = match answer {
        Ok(value) => (0u64, value, ""),
        Err(why) => (1, 0, shortened(why, SENTENCE)),
    };
    let mut bytes = [status, value].map(u64::to_le_bytes).concat();
    bytes.extend(text.as_bytes());
    send_message(stream, &bytes, fds)
}

/// What an answer carries: a number and descriptors, or why not.
pub(super) type Answer = Result<(u64, Vec<OwnedFd>), String>;

/// Receives an answer.
pub(super) fn answered(stream: &UnixStream) -> io::Result<Answer> {
    let (bytes, fds) = recv_message(stream, 16 + SENTENCE, MOST_FDS)?;
    let word = |n: usize| bytes.get(n * 8..n * 8 + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let (Some(status), Some(value)) = (word(0), word(1)) else {
        return Err(invalid("an answer of another length"));
    };
    Ok(match status {
        0 => Ok((value, fds)),
        _ => Err(Foreign::sentence(String::from_utf8_lossy(&bytes[16..])).to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_are_heard_as_they_were_said() {
        let (a, b) = UnixStream::pair().unwrap();
        let fd = || std::fs::File::open("/dev/null").unwrap().into();
        let handle: [u8; IPC] = std::array::from_fn(|n| n as u8);
        for request in [
            Request::Hello { bytes: 1 << 33, memory: fd() },
            Request::Host { bytes: 7, writable: true, memory: fd() },
            Request::Device { address: 1 << 47, bytes: 5, how: Handed::Allocation(fd()) },
            Request::Device { address: 3, bytes: 5, how: Handed::Ipc(handle) },
            Request::Device { address: 3, bytes: 5, how: Handed::Address },
            Request::Forget { device: true, key: u32::MAX },
        ] {
            ask(&a, &request).unwrap();
            let shown = |request: &Request| {
                let text = format!("{request:?}");
                text.split("OwnedFd { fd: ")
                    .map(|part| part.trim_start_matches(char::is_numeric).to_owned())
                    .collect::<Vec<_>>()
            };
            assert_eq!(shown(&hear(&b).unwrap()), shown(&request));
        }
        for said in [Ok(u64::MAX), Err("no"), Err("")] {
            answer(&b, said, &[]).unwrap();
            assert_eq!(answered(&a).unwrap().map(|(value, _)| value), said.map_err(str::to_owned));
        }
        answer(&b, Err(&"ö".repeat(SENTENCE)), &[]).unwrap();
        let cut = answered(&a).unwrap().unwrap_err();
        assert!(cut.starts_with(&"ö".repeat(1000)) && cut.ends_with("...") && cut.len() < SENTENCE, "{cut}");
    }

    #[test]
    fn p8_a_request_that_is_none_is_an_error() {
        for (bytes, says) in [
            (vec![0; 8], "length"),
            (vec![0; WORDS * 8], "kind"),
            ([&HELLO.to_le_bytes()[..], &[0; (WORDS - 1) * 8]].concat(), "descriptor"),
        ] {
            let (a, b) = UnixStream::pair().unwrap();
            send_message(&a, &bytes, &[]).unwrap();
            let error = hear(&b).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
