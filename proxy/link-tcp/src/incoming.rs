//! What arrives on one stream: bytes become frames, and payload goes straight to its place.
//!
//! Headers, and what comes along with them, are received into a buffer of the stream. Of a payload that did not come along
//! the rest is received where it belongs, without a copy. So after a long payload the buffer takes little, for
//! what comes there is copied once more.

use pushgate_driver_shim::record::RecordWords;

use super::frame::{FrameError, Head, MOST_HEAD};
use super::wire::Piece;

/// Bytes of a stream's buffer.
const BUFFER: usize = 64 << 10;
/// A payload of this length is received where it belongs as far as possible, bytes.
const LONG: u32 = 16 << 10;

/// Why a stream carries nothing more.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// What came is no frame.
    #[error("a frame of its stream {stream}: {error}")]
    Frame {
        /// The stream.
        stream: usize,
        /// What is wrong.
        error: FrameError,
    },
    /// A frame says what it must not. The text is a sentence.
    #[error("a frame of its stream {stream}: {why}")]
    Peer {
        /// The stream.
        stream: usize,
        /// What is wrong.
        why: &'static str,
    },
}

/// What takes the frames of all streams of a link.
pub trait Takes {
    /// Takes a frame. Of one with payload: the address at which the payload belongs, where the payload's bytes are mapped for
    /// writing until [`Takes::landed`] is called or the link ends. An error is a sentence.
    fn frame(&mut self, head: &Head, words: &RecordWords) -> Result<usize, &'static str>;

    /// The payload of a frame, `bytes` bytes of that message, is in its place.
    fn landed(&mut self, message: u64, bytes: u32);
}

/// A payload on its way.
struct Landing {
    /// Where the rest belongs, and how much that is.
    rest: Piece,
    head: Head,
    /// Where the payload begins.
    first: usize,
}

/// The receiving end of one stream.
pub struct Incoming {
    stream: usize,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that were received, and those of them that were read.
    filled: usize,
    read: usize,
    landing: Option<Landing>,
    /// Frames that have come.
    number: u32,
    /// The last payload was a long one, so the next one may be as well.
    long: bool,
}

impl Incoming {
    /// The receiving end of the stream of this number.
    pub fn new(stream: usize) -> Self {
        let buffer = vec![0; BUFFER].into();
        Incoming { stream, buffer, filled: 0, read: 0, landing: None, number: 0, long: false }
    }

    /// Frames that have come with all of their payload, modulo 2^32.
    pub fn whole(&self) -> u32 {
        self.number.wrapping_sub(self.landing.is_some() as u32)
    }

    /// Where the next bytes of the stream go. The pieces are those of the call before until bytes have come.
    #[inline]
    pub fn pieces(&mut self) -> ([Piece; 2], usize) {
        let most = if self.long { self.filled + MOST_HEAD } else { BUFFER };
        let address = self.buffer.as_mut_ptr() as usize + self.filled;
        let buffer = Piece { address, bytes: most.min(BUFFER) - self.filled };
        match &self.landing {
            Some(landing) => ([landing.rest, buffer], 2),
            None => ([buffer, buffer], 1),
        }
    }

    /// `bytes` bytes have come where [`Incoming::pieces`] says.
    ///
    /// # Safety
    ///
    /// Where `to` says that a payload belongs its bytes are mapped for writing and free of Rust references.
    pub unsafe fn received(&mut self, mut bytes: usize, to: &mut impl Takes) -> Result<(), Broken> {
        if let Some(landing) = &mut self.landing {
            let n = bytes.min(landing.rest.bytes);
            landing.rest = Piece { address: landing.rest.address + n, bytes: landing.rest.bytes - n };
            bytes -= n;
            // SAFETY: as our caller promises.
            unsafe { self.land(to) }?;
        }
        self.filled += bytes;
        debug_assert!(self.filled <= BUFFER);
        while self.landing.is_none() && self.read < self.filled {
            // SAFETY: as our caller promises.
            if !unsafe { self.next(to) }? {
                break;
            }
        }
        if self.read == self.filled {
            (self.read, self.filled) = (0, 0);
        } else if self.filled + MOST_HEAD > BUFFER {
            // A part of a header: fewer than `MOST_HEAD` bytes, or the loop had gone on.
            self.buffer.copy_within(self.read..self.filled, 0);
            (self.read, self.filled) = (0, self.filled - self.read);
        }
        Ok(())
    }

    /// Reads the next frame out of the buffer. False if it is not all there.
    ///
    /// # Safety
    ///
    /// As [`Incoming::received`].
    #[inline]
    unsafe fn next(&mut self, to: &mut impl Takes) -> Result<bool, Broken> {
        let (stream, bytes) = (self.stream, &self.buffer[self.read..self.filled]);
        let Some((head, words, n)) = Head::read(bytes).map_err(|error| Broken::Frame { stream, error })?
        else {
            return Ok(false);
        };
        if head.number != self.number {
            let error = FrameError::Number { found: head.number, expected: self.number };
            return Err(Broken::Frame { stream, error });
        }
        self.number = self.number.wrapping_add(1);
        let first = to.frame(&head, &words).map_err(|why| Broken::Peer { stream, why })?;
        self.read += n;
        if head.payload > 0 {
            self.long = head.payload >= LONG;
            let here = (head.payload as usize).min(self.filled - self.read);
            // SAFETY: `first` is where `here` bytes or more may be written, as our caller promises; the buffer is this
            // stream's own memory, which is no place of a payload.
            unsafe {
                let from = self.buffer.as_ptr().add(self.read);
                std::ptr::copy_nonoverlapping(from, first as *mut u8, here);
            }
            self.read += here;
            let rest = Piece { address: first + here, bytes: head.payload as usize - here };
            self.landing = Some(Landing { rest, head, first });
            // SAFETY: as our caller promises.
            unsafe { self.land(to) }?;
        }
        Ok(true)
    }

    /// Ends the payload that is on its way, if all of it has come.
    ///
    /// # Safety
    ///
    /// As [`Incoming::received`].
    unsafe fn land(&mut self, to: &mut impl Takes) -> Result<(), Broken> {
        let Some(landing) = self.landing.take_if(|landing| landing.rest.bytes == 0) else { return Ok(()) };
        let Head { payload, message, sum, .. } = landing.head;
        if let Some(expected) = sum {
            // SAFETY: `payload` bytes from there on were written by this stream, and are mapped, as our caller promises.
            let found = unsafe { sum_of(landing.first, payload as usize) };
            if found != expected {
                let error = FrameError::Sum("payload");
                return Err(Broken::Frame { stream: self.stream, error });
            }
        }
        to.landed(message, payload);
        Ok(())
    }
}

/// The checksum of memory that a device or a peer may write meanwhile: whatever it reads there is some number.
///
/// # Safety
///
/// The bytes are mapped for reading.
pub unsafe fn sum_of(address: usize, bytes: usize) -> u32 {
    /// Bytes that are copied at once, for a reference to memory that others write may not exist.
    const STEP: usize = 4096;
    let (mut sum, mut step, mut done) = (crc32fast::Hasher::new(), [0u8; STEP], 0);
    while done < bytes {
        let n = STEP.min(bytes - done);
        // SAFETY: mapped, as our caller promises; `step` is this function's own.
        unsafe { std::ptr::copy_nonoverlapping((address + done) as *const u8, step.as_mut_ptr(), n) };
        sum.update(&step[..n]);
        done += n;
    }
    sum.finalize()
}
