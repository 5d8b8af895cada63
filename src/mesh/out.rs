//! What leaves for one peer: frames that wait to be sent, and frames that may have to be sent again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pushgate_door::redial::Kept;
use pushgate_driver_shim::fdpass::Outgoing;

use super::{MAX_OUT, MAX_OUT_FDS, Stream};

/// This rank's frames to a peer.
pub(super) struct Out {
    /// The socket. Between hosts another one takes its place after the connection broke.
    pub(super) stream: Arc<Stream>,
    /// Frames that the socket has not taken.
    frames: Outgoing,
    /// Frames that may have to be sent again, where a connection that breaks is replaced.
    kept: Option<Kept>,
    /// The connection broke, and no other one has taken its place yet.
    broken: bool,
    /// Until then nothing is sent over the socket, and nothing taken from it: a fault of a test.
    held: Option<Instant>,
    /// Nothing more is sent to this peer.
    pub(super) closed: bool,
    /// This rank's farewell is among the frames, or was sent.
    pub(super) farewell: bool,
}

impl Out {
    /// `replaced`: a connection that breaks is replaced.
    pub(super) fn new(stream: Stream, replaced: bool) -> Self {
        Out {
            stream: Arc::new(stream),
            frames: Outgoing::default(),
            kept: replaced.then(Kept::default),
            broken: false,
            held: None,
            closed: false,
            farewell: false,
        }
    }

    /// Adds a frame after those that wait; sends nothing yet.
    pub(super) fn push(&mut self, frame: &[u8], fds: Vec<OwnedFd>) -> io::Result<()> {
        if !self.broken {
            self.frames.push(frame, fds)?;
        }
        if let Some(kept) = &mut self.kept {
            kept.push(frame);
        }
        Ok(())
    }

    /// Adds a frame that need not arrive, as a sign of life. The frame is not counted.
    pub(super) fn push_uncounted(&mut self, frame: &[u8]) -> io::Result<()> {
        match self.broken {
            true => Ok(()),
            false => self.frames.push(frame, Vec::new()),
        }
    }

    /// Sends what the socket takes now. True if something is left for the reader's thread to send.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        if self.held().is_some() {
            return Ok(self.has_frames());
        }
        match self.frames.flush(&*self.stream).and_then(|all| Ok(self.stream.flush()? && all)) {
            Ok(all) => Ok(!all),
            // The reader's thread sees the end of the connection too, once it has taken what came before.
            Err(_) if self.kept.is_some() => {
                self.breaks();
                Ok(false)
            }
            Err(e) => {
                self.close();
                Err(e)
            }
        }
    }

    /// Nothing goes over the socket until then. What comes meanwhile waits in the socket.
    pub(super) fn hold(&mut self, until: Instant) {
        self.held = Some(until);
    }

    /// Until when nothing goes over the socket; `None` if bytes may go.
    pub(super) fn held(&self) -> Option<Instant> {
        self.held.filter(|until| Instant::now() < *until)
    }

    /// Whether the kernel took no descriptors ([`Outgoing::is_refused`]).
    pub(super) fn is_refused(&self) -> bool {
        self.frames.is_refused()
    }

    /// Whether the socket has frames to take.
    pub(super) fn has_frames(&self) -> bool {
        !self.frames.is_empty() || !self.broken && self.stream.wants_write()
    }

    /// Whether all frames have left for the peer.
    pub(super) fn has_left(&self) -> bool {
        !self.has_frames() && !self.broken
    }

    /// Bytes that the socket has not taken, or that the peer has not said to have where frames may be sent again.
    pub(super) fn waiting(&self) -> usize {
        self.kept.as_ref().map_or(self.frames.len(), |kept| kept.bytes())
    }

    /// Whether a frame must wait until the peer has taken others.
    pub(super) fn is_full(&self, bytes: usize, fds: usize) -> bool {
        let waiting = self.waiting();
        waiting > 0 && (waiting + bytes > MAX_OUT || self.frames.fds() + fds > MAX_OUT_FDS)
    }

    /// Descriptors that the socket has not taken.
    pub(super) fn fds(&self) -> usize {
        self.frames.fds()
    }

    /// Nothing more is sent to this peer.
    pub(super) fn close(&mut self) {
        (self.frames, self.kept, self.closed) = (Outgoing::default(), None, true);
    }

    /// The connection broke: frames are kept until another one takes its place.
    pub(super) fn breaks(&mut self) {
        (self.frames, self.broken) = (Outgoing::default(), true);
    }

    /// The peer has received `count` of this rank's frames. An error says why that can't be.
    pub(super) fn received(&mut self, count: u64) -> Result<(), String> {
        let Some(kept) = self.kept.as_mut() else { return Ok(()) };
        kept.received(count)
    }

    /// Whether the peer has said before that it has more than `count` frames.
    pub(super) fn has_gone_beyond(&self, count: u64) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.has_gone_beyond(count))
    }

    /// Another connection takes the place of the one that broke; the peer has received `count` frames.
    pub(super) fn goes_on(&mut self, stream: Arc<Stream>, count: u64) -> Result<(), String> {
        self.received(count)?;
        (self.stream, self.broken, self.frames) = (stream, false, Outgoing::default());
        for frame in self.kept.iter().flat_map(Kept::frames) {
            self.frames.push(frame, Vec::new()).expect("it was pushed before");
        }
        // A socket that breaks at once is seen by the reader's thread.
        let _ = self.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Stream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Stream::Unix(ours.into()), theirs)
    }

    /// The first bytes of the frames that have come.
    fn labels(theirs: &mut UnixStream) -> Vec<u8> {
        theirs.set_nonblocking(true).unwrap();
        let mut bytes = Vec::new();
        _ = theirs.read_to_end(&mut bytes);
        // Eight bytes of header, and one of the frame.
        bytes.chunks(9).map(|frame| frame[8]).collect()
    }

    #[test]
    fn what_the_peer_has_not_received_is_sent_again_in_order_and_the_rest_is_not() {
        let (ours, mut theirs) = pair();
        let mut out = Out::new(ours, true);
        for label in [1, 2, 3] {
            out.push(&[label], Vec::new()).unwrap();
        }
        assert!(!out.flush().unwrap());
        assert_eq!(labels(&mut theirs), [1, 2, 3]);
        // A child that another test forks may hold the peer's end.
        theirs.shutdown(std::net::Shutdown::Both).unwrap();
        // The first one fails, and breaks the connection.
        out.push(&[4], Vec::new()).unwrap();
        assert!(!out.flush().unwrap() && !out.has_left());
        out.push(&[5], Vec::new()).unwrap();
        out.push_uncounted(&[9]).unwrap();
        assert!(!out.has_frames() && out.kept.as_ref().unwrap().bytes() == 5);
        let (ours, mut theirs) = pair();
        assert!(out.received(6).is_err());
        out.goes_on(Arc::new(ours), 2).unwrap();
        assert!(out.has_left());
        assert_eq!(labels(&mut theirs), [3, 4, 5]);
        out.received(5).unwrap();
        assert_eq!(out.kept.as_ref().unwrap().bytes(), 0);
        assert_eq!(out.received(4).unwrap_err(), "it says that it has received 4 frames, of 5 to 5");
    }

    #[test]
    fn a_peer_that_says_nothing_of_what_it_has_received_fills_the_queue() {
        let (ours, _theirs) = pair();
        let mut out = Out::new(ours, true);
        out.push(&vec![0; MAX_OUT], Vec::new()).unwrap();
        out.breaks();
        assert!(out.is_full(1, 0));
        out.received(1).unwrap();
        // However long a single frame is.
        assert!(!out.is_full(MAX_OUT + 1, 0));
    }

    #[test]
    fn without_replacement_a_socket_that_fails_closes_the_queue() {
        let (ours, theirs) = pair();
        let mut out = Out::new(ours, false);
        drop(theirs);
        out.push(&[1], Vec::new()).unwrap();
        assert!(out.flush().is_err() && out.closed);
    }
}
