//! One connection on its way through the door: the handshake's bytes, the encryption, the greeting. Nothing here waits.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;

use pushgate_driver_shim::log::Foreign;
use rustix::event::PollFlags;

use super::crowd::Heard;
use super::{HELLO, Handshake, PROOF, Refused, Stream, Terms};

/// The header of a greeting: its length.
const HEADER: usize = 4;

/// A connection on its way.
pub(super) struct Passage {
    stream: Stream,
    handshake: Handshake,
    dials: bool,
    /// Bytes that the socket has not taken.
    output: Vec<u8>,
    /// A dialer's greeting with its header, until it is on its way.
    greeting: Option<Vec<u8>>,
    /// What has arrived of a listener's greeting: header and body.
    input: Vec<u8>,
    /// The most bytes of a greeting.
    most: usize,
}

impl Passage {
    /// A connection that this end has dialled; `greeting` is sent behind the proofs.
    pub(super) fn dialer(socket: TcpStream, terms: &Terms, greeting: &[u8]) -> std::io::Result<Passage> {
        let length = u32::try_from(greeting.len())
            .map_err(|_| std::io::Error::new(ErrorKind::InvalidInput, "a greeting of 4 GiB or more"))?;
        let greeting = [&length.to_le_bytes(), greeting].concat();
        Passage::new(socket, terms, Some(greeting), 0)
    }

    /// A connection that has come to this end, with a greeting of at most `most` bytes.
    pub(super) fn listener(socket: TcpStream, terms: &Terms, most: usize) -> std::io::Result<Passage> {
        Passage::new(socket, terms, None, most)
    }

    fn new(
        socket: TcpStream,
        terms: &Terms,
        greeting: Option<Vec<u8>>,
        most: usize,
    ) -> std::io::Result<Passage> {
        socket.set_nodelay(true)?;
        let dials = greeting.is_some();
        let mut handshake = Handshake::new(terms, dials)?;
        let output = handshake.output();
        let stream = Stream::plain(socket)?;
        Ok(Passage { stream, handshake, dials, output, greeting, input: Vec::new(), most })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What the socket must be ready for before there is more to do.
    pub(super) fn awaits(&self) -> PollFlags {
        match self.output.is_empty() && !self.stream.wants_write() {
            true => PollFlags::IN,
            false => PollFlags::OUT,
        }
    }

    /// What a dialer has said so far.
    pub(super) fn heard(&self) -> Heard {
        self.handshake.heard()
    }

    /// Goes as far as it can. True at the end.
    pub(super) fn advance(&mut self) -> Result<bool, Refused> {
        loop {
            if !self.send()? {
                return Ok(false);
            }
            if self.handshake.awaits_tls() {
                if !self.stream.is_encrypted() {
                    self.stream.encrypt(self.dials).map_err(|e| self.failed(e))?;
                }
                let mut tls = self.stream.tls().expect("it is encrypted");
                if !tls.set_up(self.stream.socket()).map_err(|e| self.failed(e))? {
                    return Ok(false);
                }
                let binding = tls.binding().map_err(|e| self.failed(e))?;
                drop(tls);
                self.handshake.encrypted(binding);
                self.output = self.handshake.output();
            } else if !self.handshake.is_proved() {
                if !self.hear()? {
                    return Ok(false);
                }
            } else if let Some(greeting) = self.greeting.take() {
                self.output = greeting;
            } else {
                return Ok(self.dials || self.greeted()?);
            }
        }
    }

    /// The stream and the dialer's greeting, at the end.
    pub(super) fn finish(mut self) -> (Stream, Vec<u8>) {
        let greeting = if self.dials { Vec::new() } else { self.input.split_off(HEADER) };
        (self.stream, greeting)
    }

    /// Sends what is to be sent. True when nothing is left.
    fn send(&mut self) -> Result<bool, Refused> {
        while !self.output.is_empty() {
            match self.stream.send(&[IoSlice::new(&self.output)]) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(self.failed(e)),
            }
        }
        self.stream.flush().map_err(|e| self.failed(e))
    }

    /// Takes in a part of the handshake. True if there may be more to do.
    fn hear(&mut self) -> Result<bool, Refused> {
        let mut bytes = [0; if HELLO > PROOF { HELLO } else { PROOF }];
        let wants = self.handshake.wants();
        let n = self.receive(&mut bytes[..wants])?;
        if n == 0 {
            return Ok(false);
        }
        let taken = self.handshake.take(&bytes[..n]);
        self.output = self.handshake.output();
        if let Err(why) = taken {
            // The other end learns from this end's hello what differs, if the socket takes the hello at once.
            let _ = self.send();
            self.stream.close_past(4);
            return Err(why);
        }
        Ok(true)
    }

    /// Takes in a part of the greeting. True once it is whole.
    fn greeted(&mut self) -> Result<bool, Refused> {
        loop {
            let mut want = HEADER;
            if let Some(header) = self.input.first_chunk::<HEADER>() {
                let bytes = u32::from_le_bytes(*header) as usize;
                if bytes > self.most {
                    return Err(Refused::Greeting { bytes, most: self.most });
                }
                want += bytes;
            }
            if self.input.len() == want {
                return Ok(true);
            }
            // Memory grows with what arrived, not with the announced length.
            let mut chunk = [0; 4096];
            let most = (want - self.input.len()).min(chunk.len());
            let n = self.receive(&mut chunk[..most])?;
            if n == 0 {
                return Ok(false);
            }
            self.input.extend_from_slice(&chunk[..n]);
        }
    }

    /// Receives what is there; 0 if there is nothing yet.
    fn receive(&self, bytes: &mut [u8]) -> Result<usize, Refused> {
        match self.stream.recv(&mut [IoSliceMut::new(bytes)]) {
            Ok(0) => Err(self.closed()),
            Ok(n) => Ok(n),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(e) => Err(self.failed(e)),
        }
    }

    /// Why the connection failed.
    fn failed(&self, e: std::io::Error) -> Refused {
        match e.kind() {
            ErrorKind::InvalidData => Refused::Encryption(Foreign::word(e).to_string()),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => self.closed(),
            kind => Refused::Io(kind),
        }
    }

    /// Why the other end may have closed.
    fn closed(&self) -> Refused {
        match self.dials && self.handshake.has_said_all() {
            true => Refused::TurnedAway,
            false => Refused::Closed,
        }
    }
}
