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
    /// A connection that this end has dialled; `greeting` is sent after the proofs.
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, Shutdown, TcpListener};
    use std::time::Duration;

    use pushgate_tests::fuzz::{depth, fuzz, kind};
    use rustix::net::sockopt::set_socket_linger;

    use super::super::tls::Tls;
    use super::super::{Purpose, Secret};
    use super::*;

    const MOST: usize = 100;
    /// Random bytes of the listener and of the dialer: the same each time, so that the same proof is right.
    const NONCES: [[u8; 32]; 2] = [[1; 32], [2; 32]];

    fn terms(tls: bool) -> Terms {
        Terms { secret: Secret::new(&[7; 32]).unwrap(), purpose: Purpose::MESH, tls }
    }

    /// What the dialer says up to the encryption or to the end of its proof.
    fn proof(tls: bool) -> Vec<u8> {
        let [mut listener, mut dialer] =
            [false, true].map(|dials| Handshake::with_nonce(&terms(tls), dials, NONCES[dials as usize]));
        let mut said = dialer.output();
        listener.take(&said).unwrap();
        dialer.take(&listener.output()).unwrap();
        said.extend(dialer.output());
        said
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_bytes_of_a_stranger_make_the_door_panic_or_take_a_greeting_that_is_too_long() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let pair = || {
            let stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            // It ends with a reset, so that its port is free at once.
            set_socket_linger(&stranger, Some(Duration::ZERO)).unwrap();
            (listener.accept().unwrap().0, stranger)
        };
        let greeting = |text: &[u8]| [&(text.len() as u32).to_le_bytes(), text].concat();
        let (socket, mut stranger) = pair();
        Tls::new(true).unwrap().set_up(Stream::plain(socket).unwrap().socket()).unwrap();
        let mut tls = [0; 4096];
        let n = stranger.read(&mut tls).unwrap();
        // The first byte says whether this end encrypts.
        let seeds = [
            [&[0][..], &proof(false), &greeting(b"hello")].concat(),
            [&[0][..], &proof(false), &greeting(&[7; MOST])].concat(),
            [&[1][..], &proof(true), &tls[..n]].concat(),
        ];
        let taken = std::cell::Cell::new(0);
        let target = |bytes: &[u8]| {
            let Some((how, bytes)) = bytes.split_first() else { return 0 };
            let (socket, mut stranger) = pair();
            let terms = terms(how & 1 != 0);
            let mut passage = Passage::listener(socket, &terms, MOST).unwrap();
            passage.handshake = Handshake::with_nonce(&terms, false, NONCES[0]);
            stranger.write_all(bytes).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            let heard = loop {
                match passage.advance() {
                    Ok(true) => break 1,
                    // The rest is on its way.
                    Ok(false) => std::thread::yield_now(),
                    Err(why) => break kind(why),
                }
            };
            let heard = heard ^ kind(format!("{:?}", passage.heard())) ^ depth(passage.input.len());
            if passage.input.len() >= HEADER && passage.handshake.is_proved() && passage.greeting.is_none() {
                assert!(
                    passage.input.len() <= HEADER + MOST && passage.input.capacity() <= 4 * (HEADER + MOST)
                );
                taken.set(taken.get() + 1);
            }
            heard
        };
        seeds.iter().for_each(|seed| _ = target(seed));
        assert_eq!(taken.get(), 2, "the two greetings are taken");
        fuzz(&seeds, target);
    }
}
