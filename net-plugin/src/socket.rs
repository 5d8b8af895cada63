//! Frames of bytes and descriptors over a socket that never blocks, for the handshake of two ends.
//! (`driver-shim` has frames for callers that may block.)
//!
//! A frame is "PGF1", its length and its number of descriptors (32 bits each, little endian), then
//! the bytes. The descriptors come with its first byte.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use pushgate_door::redial::Kept;
use pushgate_driver_shim::closing::Closes;
use pushgate_driver_shim::limited;
use rustix::io::Errno;

use crate::again::{Place, Token};
use crate::stream::{FDS, Stream};

const MAGIC: [u8; 4] = *b"PGF1";
const HEADER: usize = 12;
/// The most bytes of a frame. A greeting is a few hundred bytes; the offer of another link over RDMA has up to 64 for each of
/// 4,096 regions.
const MAX_BYTES: usize = 1 << 19;
/// The most frames that may be lost and wait for the peer to read.
const MOST_WAITING: usize = 16;
/// The most frames that wait until the peer has said to have them, where the socket is replaced when it breaks.
const MOST_KEPT: usize = 64;
/// The most bytes of them.
const MOST_KEPT_BYTES: usize = 4 * MAX_BYTES;

/// In front of the count in a frame that says how many frames have come.
const RECEIVED: [u8; 8] = *b"PGGOT\0\0\0";

/// The count in a frame that says how many frames have come; `None` if these bytes are none.
pub fn received(bytes: &[u8]) -> Option<u64> {
    let (label, count) = bytes.split_first_chunk::<8>()?;
    (*label == RECEIVED).then(|| count.try_into().ok().map(u64::from_le_bytes))?
}

/// What a frame says that wakes the engine of the end to which it comes.
const RING: [u8; 8] = *b"PGRNG\0\0\0";
const RING_FRAME: usize = HEADER + RING.len();

/// Whether these are the bytes of a frame that wakes the engine.
pub fn is_ring(bytes: &[u8]) -> bool {
    *bytes == RING
}

/// A frame's bytes and descriptors.
pub type Frame = (Vec<u8>, Vec<OwnedFd>);

/// How two ends of a connection meet again when their socket broke.
pub struct Renewal {
    /// This end's token.
    pub own: Token,
    /// This end dials.
    pub dials: bool,
    /// Where the other end is dialled.
    pub other: Place,
}

/// The frames on their way out over a socket, and the socket, which another one may replace when it broke. Any thread may
/// send; no call waits for the peer.
pub struct Line {
    out: Mutex<Out>,
    renewal: OnceLock<Renewal>,
}

struct Out {
    stream: Arc<Stream>,
    /// Frames that are not sent as a whole yet: what is left of each, and its descriptors before its first byte is sent.
    frames: VecDeque<Frame>,
    /// Where the socket is replaced when it breaks: frames that the peer has not said to have.
    kept: Option<Kept>,
    /// The socket broke, and no other one has taken its place yet.
    broken: bool,
}

impl Line {
    /// A socket on which nothing was sent yet.
    pub fn new(stream: Stream) -> Self {
        let (stream, frames) = (Arc::new(stream), VecDeque::new());
        Line { out: Mutex::new(Out { stream, frames, kept: None, broken: false }), renewal: OnceLock::new() }
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The socket, as long as no other one takes its place.
    pub fn stream(&self) -> Arc<Stream> {
        self.out().stream.clone()
    }

    /// Both ends know how they meet again. Frames are not kept before [`Line::keep`].
    pub fn may_renew(&self, renewal: Renewal) {
        // A line has one greeting of the other end, so this is the only call.
        let _ = self.renewal.set(renewal);
    }

    /// From here on the socket is replaced when it breaks, if both ends know how: frames are kept until the peer has them.
    pub fn keep(&self) {
        if self.renewal.get().is_some() {
            self.out().kept.get_or_insert_default();
        }
    }

    /// How the ends meet again, where the socket is replaced when it breaks.
    pub fn renewal(&self) -> Option<&Renewal> {
        self.renewal.get().filter(|_| self.out().kept.is_some())
    }

    /// Sends as much as fits now, after what is left of earlier frames; later calls of [`Line::flush`] send the rest.
    /// True if nothing is left. At most 4 descriptors.
    pub fn send(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<bool> {
        let mut out = self.out();
        out.push(bytes, fds);
        out.flush()
    }

    /// Sends a frame that may be lost ([`Line::send`]): the frame is dropped if the peer has not read 16 earlier ones, or, where
    /// frames are kept, has not said to have 64 earlier ones, so that
    /// a peer that reads nothing cannot make frames pile up, or if the socket is broken for good.
    pub fn tell(&self, bytes: &[u8], fds: Vec<OwnedFd>) {
        let mut out = self.out();
        if !out.is_full() {
            out.push(bytes, fds);
        }
        if let Err(e) = out.flush() {
            tracing::debug!("a frame to the other end is lost: {e}");
            if is_refused(&e) {
                // Those after it may leave.
                let _ = out.flush_past_refused();
            }
        }
    }

    /// Whether [`Line::tell`] would drop a frame.
    #[cfg(test)]
    pub fn is_full(&self) -> bool {
        self.out().is_full()
    }

    /// Wakes the other end's engine. If earlier frames wait, or the socket has no room, the ring is dropped: the frames in the
    /// socket wake that engine, which looks at the socket itself.
    pub fn ring(&self) {
        let mut out = self.out();
        if out.frames.is_empty() {
            out.push_uncounted(&RING, Vec::new());
            // An error means that the peer is gone, which the watch sees.
            if !out.flush().unwrap_or(true)
                && out.frames.front().is_some_and(|(left, _)| left.len() == RING_FRAME)
            {
                out.frames.clear();
            }
        }
    }

    /// Tells how many of the peer's frames have come, in a frame that is not counted and not sent again.
    pub fn tell_received(&self, count: u64) {
        let mut out = self.out();
        // A peer that reads nothing is told later.
        if out.frames.len() < MOST_KEPT {
            out.push_uncounted(&[&RECEIVED[..], &count.to_le_bytes()].concat(), Vec::new());
        }
        // An error breaks the socket, which the watch sees.
        let _ = out.flush();
    }

    /// Sends what is left. True when nothing is left. A frame whose descriptors the kernel does not take is lost.
    pub fn flush(&self) -> io::Result<bool> {
        self.out().flush_past_refused()
    }

    /// The socket broke: frames are kept until another one takes its place.
    pub fn breaks(&self) {
        let mut out = self.out();
        out.breaks();
        out.stream.shutdown();
    }

    /// The peer has received `count` of the frames that are counted. An error says why that can't be.
    pub fn received(&self, count: u64) -> Result<(), String> {
        self.out().kept.as_mut().map_or(Ok(()), |kept| kept.received(count))
    }

    /// Whether the peer has said before that it has more than `count` frames.
    pub fn has_gone_beyond(&self, count: u64) -> bool {
        self.out().kept.as_ref().is_some_and(|kept| kept.has_gone_beyond(count))
    }

    /// Another socket takes the place of the one that broke; the peer has received `count` frames.
    pub fn goes_on(&self, stream: Stream, count: u64) -> Result<Arc<Stream>, String> {
        let mut out = self.out();
        let Out { kept, frames, .. } = &mut *out;
        if let Some(kept) = kept {
            kept.received(count)?;
            *frames = kept.frames().map(|frame| (frame.clone(), Vec::new())).collect();
        }
        (out.stream, out.broken) = (Arc::new(stream), false);
        // A socket that breaks at once is seen by the watch.
        let _ = out.flush();
        Ok(out.stream.clone())
    }

    /// Shuts the socket down; no other one takes its place.
    pub fn shutdown(&self) {
        self.out().stream.shutdown();
    }
}

impl Out {
    fn is_full(&self) -> bool {
        match &self.kept {
            None => self.frames.len() >= MOST_WAITING,
            Some(kept) => kept.frames().len() >= MOST_KEPT || kept.bytes() >= MOST_KEPT_BYTES,
        }
    }

    fn push(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) {
        if let Some(kept) = &mut self.kept {
            // A socket that is replaced carries no descriptors.
            kept.push(&framed(bytes, 0));
        }
        self.push_uncounted(bytes, fds);
    }

    fn push_uncounted(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) {
        if !self.broken {
            self.frames.push_back((framed(bytes, fds.len()), fds));
        }
    }

    fn breaks(&mut self) {
        self.broken = true;
        self.frames.clear();
    }

    fn flush(&mut self) -> io::Result<bool> {
        match self.flush_all() {
            // The watch sees the end of the socket too, once it has taken what came before.
            Err(_) if self.kept.is_some() => {
                self.breaks();
                Ok(true)
            }
            flushed => flushed,
        }
    }

    fn flush_past_refused(&mut self) -> io::Result<bool> {
        loop {
            match self.flush() {
                Err(e) if is_refused(&e) => limited!(warn, 0u32, "a frame to the other end is lost: {e}"),
                flushed => return flushed,
            }
        }
    }

    fn flush_all(&mut self) -> io::Result<bool> {
        while let Some((bytes, fds)) = self.frames.front_mut() {
            let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            match self.stream.send(bytes, &borrowed) {
                Ok(n) => {
                    bytes.drain(..n);
                    fds.clear();
                    if bytes.is_empty() {
                        self.frames.pop_front();
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if is_refused(&e) && !fds.is_empty() => {
                    // Nothing of this frame was sent.
                    self.frames.pop_front();
                    return Err(e);
                }
                Err(e) => {
                    // Nothing after a frame that was begun can be understood any more.
                    self.frames.clear();
                    return Err(e);
                }
            }
        }
        self.stream.flush()
    }
}

/// The bytes of a frame.
fn framed(bytes: &[u8], fds: usize) -> Vec<u8> {
    let mut frame = MAGIC.to_vec();
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend((fds as u32).to_le_bytes());
    frame.extend(bytes);
    frame
}

/// Whether the kernel took no more descriptors: as many of this user's as a process may open wait in sockets until they are
/// received.
fn is_refused(e: &io::Error) -> bool {
    Errno::from_io_error(e) == Some(Errno::TOOMANYREFS)
}

/// A socket with the frames on their way out and in.
pub struct Channel {
    line: Arc<Line>,
    /// Where frames come from.
    stream: Arc<Stream>,
    input: Vec<u8>,
    in_fds: Vec<OwnedFd>,
    /// Descriptors of the frame that is arriving were lost: this process may open no more files.
    lost: bool,
    closes: Closes,
}

impl Channel {
    /// A socket on which nothing was sent or received yet.
    pub fn new(stream: Stream) -> Self {
        Channel::of(Arc::new(Line::new(stream)))
    }

    /// A socket on which nothing was sent or received yet, of one of several peers whose descriptors are closed together.
    pub fn closed_by(stream: Stream, closes: &Closes) -> Self {
        let mut channel = Channel::new(stream);
        channel.closes = closes.clone();
        channel
    }

    /// A socket that has received whole frames up to here.
    pub fn of(line: Arc<Line>) -> Self {
        let stream = line.stream();
        let (input, in_fds) = (Vec::new(), Vec::new());
        Channel { line, stream, input, in_fds, lost: false, closes: Closes::default() }
    }

    /// Closes descriptors of frames that should have none, without waiting.
    pub fn discard(&self, fds: Vec<OwnedFd>) {
        self.closes.close(fds, ());
    }

    /// The socket that frames come from.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The socket and its frames on their way out.
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Sends a frame ([`Line::send`]).
    pub fn send(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<bool> {
        self.line.send(bytes, fds)
    }

    /// Sends what is left ([`Line::flush`]).
    pub fn flush(&self) -> io::Result<bool> {
        self.line.flush()
    }

    /// The next frame, if it has arrived whole. After `QuotaExceeded` the channel goes on: descriptors were lost because this
    /// process may open no more files, and only the frame that they came with is lost.
    pub fn receive(&mut self) -> io::Result<Option<Frame>> {
        let invalid = |text: String| io::Error::new(ErrorKind::InvalidData, text);
        loop {
            let begun = self.input.len().min(MAGIC.len());
            if self.input[..begun] != MAGIC[..begun] {
                return Err(invalid("it does not speak pushgate's protocol".into()));
            }
            let mut want = HEADER;
            if self.input.len() >= HEADER {
                let word = |at: usize| {
                    u32::from_le_bytes(self.input[at..at + 4].try_into().expect("four bytes")) as usize
                };
                let (bytes, fds) = (word(4), word(8));
                if bytes > MAX_BYTES || fds > FDS {
                    return Err(invalid(format!(
                        "a frame of {bytes} bytes and {fds} descriptors, allowed are {MAX_BYTES} and {FDS}"
                    )));
                }
                want = HEADER + bytes;
                if self.input.len() >= want && std::mem::take(&mut self.lost) {
                    self.input.drain(..want);
                    self.closes.close(std::mem::take(&mut self.in_fds), ());
                    let text = "descriptors were lost: raise the limit of open files";
                    return Err(io::Error::new(ErrorKind::QuotaExceeded, text));
                }
                if self.input.len() >= want && self.in_fds.len() < fds {
                    let found = self.in_fds.len();
                    return Err(invalid(format!("{found} descriptors came with a frame, expected {fds}")));
                }
                if self.input.len() >= want {
                    let bytes = self.input[HEADER..want].to_vec();
                    self.input.drain(..want);
                    return Ok(Some((bytes, self.in_fds.drain(..fds).collect())));
                }
            }
            // Never read more than this frame: what follows belongs to the next one.
            let mut chunk = [0; 4096];
            let most = want.saturating_sub(self.input.len()).clamp(1, chunk.len());
            match self.receive_some(&mut chunk[..most])? {
                None => return Ok(None),
                Some(0) => {
                    return Err(io::Error::new(ErrorKind::ConnectionReset, "the peer closed the connection"));
                }
                Some(n) => self.input.extend_from_slice(&chunk[..n]),
            }
        }
    }

    /// Reads what is there; `None` if there is nothing now.
    fn receive_some(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        match self.stream.receive(bytes, &mut self.in_fds) {
            Ok((n, lost)) => {
                self.lost |= lost;
                if self.in_fds.len() > FDS {
                    let text = format!("more than {FDS} descriptors came with a frame");
                    return Err(io::Error::new(ErrorKind::InvalidData, text));
                }
                Ok(Some(n))
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let left = std::mem::take(&mut self.in_fds);
        self.discard(left);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;
    use pushgate_tests::fuzz::{depth, fuzz, kind};

    fn pair() -> (Channel, Channel) {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        (Channel::new(Stream::Unix(a.into())), Channel::new(Stream::Unix(b.into())))
    }

    #[test]
    fn frames_arrive_whole_and_in_order_with_their_descriptors() {
        let (a, mut b) = pair();
        assert!(b.receive().unwrap().is_none());
        let fd = || a.stream.as_fd().try_clone_to_owned().unwrap();
        let fds = vec![fd(), fd(), fd()];
        assert!(a.send(b"first", fds).unwrap());
        assert!(a.send(&[7; 9000], vec![]).unwrap());
        let (bytes, fds) = b.receive().unwrap().unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"first"[..], 3));
        assert_eq!(b.receive().unwrap().unwrap().0, [7; 9000]);
        assert!(b.receive().unwrap().is_none());
        // Both ends of the same socket.
        drop((a, fds));
        assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn frames_that_wait_for_room_keep_their_descriptors_apart() {
        let (a, mut b) = pair();
        let fd = || a.stream.as_fd().try_clone_to_owned().unwrap();
        let (two, one) = (vec![fd(), fd()], vec![fd()]);
        while a.send(&[7; 4096], Vec::new()).unwrap() {}
        assert!(!a.send(b"two", two).unwrap());
        assert!(!a.send(b"none", Vec::new()).unwrap());
        assert!(!a.send(b"one", one).unwrap());
        let mut counts = Vec::new();
        while counts.len() < 3 {
            a.flush().unwrap();
            if let Some((bytes, fds)) = b.receive().unwrap()
                && bytes.len() < 4096
            {
                counts.push((bytes, fds.len()));
            }
        }
        assert_eq!(counts, [(b"two".to_vec(), 2), (b"none".to_vec(), 0), (b"one".to_vec(), 1)]);
    }

    /// Runs in a process of its own, whose limit of open files is lowered.
    #[test]
    fn a_frame_for_whose_descriptors_there_is_no_room_is_lost_and_the_next_one_comes() {
        const NAME: &str =
            "socket::tests::a_frame_for_whose_descriptors_there_is_no_room_is_lost_and_the_next_one_comes";
        const ALONE: &str = "_PUSHGATE_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            let output = alone.args([NAME, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let limit = |current| setrlimit(Resource::Nofile, Rlimit { current, ..getrlimit(Resource::Nofile) });
        let before = getrlimit(Resource::Nofile).current;
        let (a, mut b) = pair();
        let fds = |n| (0..n).map(|_| a.stream.as_fd().try_clone_to_owned().unwrap()).collect::<Vec<_>>();
        a.send(b"lost", fds(4)).unwrap();
        a.send(b"comes", fds(1)).unwrap();
        // A new descriptor has the lowest number that is free.
        let free = fds(1)[0].as_raw_fd() as u64;
        limit(Some(free + 2)).unwrap();
        assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::QuotaExceeded);
        limit(before).unwrap();
        let (bytes, fds) = b.receive().unwrap().unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"comes"[..], 1));
    }

    #[test]
    fn garbage_is_refused_at_its_first_byte() {
        for garbage in [&b"GET / HTTP"[..], b"X", b"PGF1\xff\xff\xff\xff\0\0\0\0", b"PGF1\0\0\0\0\x09\0\0\0"]
        {
            let (a, mut b) = pair();
            rustix::io::write(a.stream(), garbage).unwrap();
            assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::InvalidData, "{garbage:?}");
        }
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_bytes_of_a_peer_make_its_frames_panic_or_be_longer_than_allowed() {
        let offer = framed(&[7; 300], 0);
        let seeds = [
            [framed(b"hello", 0), framed(&[], 0)].concat(),
            offer,
            framed(&[&RECEIVED[..], &[9; 8]].concat(), 0),
        ];
        let mut frames = 0;
        let mut target = |bytes: &[u8]| {
            let (a, mut b) = pair();
            rustix::io::write(a.stream(), bytes).unwrap();
            drop(a);
            let mut answer = 0u64;
            loop {
                match b.receive() {
                    Ok(Some((bytes, fds))) => {
                        assert!(bytes.len() <= MAX_BYTES && fds.is_empty());
                        frames += 1;
                        answer =
                            answer.wrapping_mul(31) + depth(bytes.len()) + received(&bytes).map_or(0, |_| 16);
                    }
                    Ok(None) => unreachable!("the peer has closed"),
                    Err(e) => return answer ^ kind(e),
                }
            }
        };
        seeds.iter().for_each(|seed| _ = target(seed));
        fuzz(&seeds, &mut target);
        assert!(frames >= 4, "what a peer sends is taken");
    }
}
