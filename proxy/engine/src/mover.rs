//! Copies of payload on the receiving host, where the place cannot simply be handed over. The engine copies host memory
//! itself. A device's copy engine copies to the device's memory; the program that owns the device lends the copy engine
//! to its engine as a [`Mover`].

use std::io;

use pushgate_link::Link;
use pushgate_link::region::Stretch;

/// Copies host memory into a device's memory, in the background.
///
/// One engine thread calls it. No call may block. Several copies are under way at once; the engine asks for their ends
/// in the order in which it started them.
pub trait Mover: Send {
    /// Begins to copy `length` bytes from host address `src` to device address
    /// `dst`. Both stay valid until [`Mover::done`] says so.
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError>;

    /// True once the copy is complete *and visible to the device*: a signal
    /// written after this may be taken for "the data is there" (P3).
    fn done(&mut self, ticket: u64) -> Result<bool, MoveError>;

    /// Makes what an RDMA device has written into the device's memory visible to
    /// the device (P3). Called before the signal that announces it.
    fn flush(&mut self) -> Result<(), MoveError> {
        let reason = "this mover can't flush what an RDMA device wrote".into();
        Err(MoveError { length: 0, reason })
    }

    /// The process that makes the copies, if it is another one.
    fn process(&self) -> Option<u32> {
        None
    }
}

/// Why a copy could not be made.
#[derive(Clone, Debug, thiserror::Error)]
#[error("copy of {length} bytes to device memory: {reason}")]
pub struct MoveError {
    /// Bytes.
    pub length: usize,
    /// What the device said.
    pub reason: String,
}

/// Bytes that the engine copies before it looks at its other queue pairs, so
/// that a large copy for one does not stop the rest.
pub(crate) const SLICE: usize = 1 << 20;

/// Where the bytes of a copy come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// Mapped here.
    Mapped(usize),
    /// An address of the peer's process.
    Peer(u64),
}

/// Why a copy ended short.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    /// The device, or its mover.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// The peer's memory.
    #[error("reading {length} bytes at {address:#x} of the peer's process: {error}")]
    Peer { length: usize, address: u64, error: io::Error },
}

/// What one call of [`Move::advance`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    /// All bytes are where they belong.
    Done,
    /// Some more are, or are on their way.
    Moved,
    /// A device is not done.
    Waiting,
}

/// A copy under way.
#[derive(Debug)]
pub(crate) enum Move {
    Host {
        dst: usize,
        src: usize,
        left: usize,
    },
    Device {
        ticket: u64,
    },
    /// Out of the peer's process.
    Read {
        dst: usize,
        src: u64,
        left: usize,
    },
    /// Out of the peer's process into memory of a device: in pieces by way of `room` bytes at `stage`.
    Relay {
        dst: u64,
        src: u64,
        left: usize,
        stage: usize,
        room: usize,
        /// Bytes that were read and not yet copied on.
        staged: usize,
        ticket: Option<u64>,
    },
}

impl Move {
    /// Begins a copy between two stretches that were checked. `stage` is the address and size of memory of this end,
    /// which bytes on their way from the peer's process to a device may use until the copy is complete.
    pub(crate) fn start(
        src: Source,
        dst: Stretch,
        length: usize,
        mover: Option<&mut (dyn Mover + 'static)>,
        stage: (usize, usize),
    ) -> Result<Self, MoveError> {
        if length == 0 {
            // No bytes, so nothing that a device would do: its mover may not be there, where an RDMA device writes all others.
            let nowhere = std::ptr::dangling::<u8>() as usize;
            return Ok(Move::Host { dst: nowhere, src: nowhere, left: 0 });
        }
        match (dst, src, mover) {
            (Stretch::Host(dst), Source::Mapped(src), _) => Ok(Move::Host { dst, src, left: length }),
            (Stretch::Host(dst), Source::Peer(src), _) => Ok(Move::Read { dst, src, left: length }),
            (Stretch::Device(dst), Source::Mapped(src), Some(m)) => {
                Ok(Move::Device { ticket: m.start(dst, src, length)? })
            }
            (Stretch::Device(dst), Source::Peer(src), Some(_)) => {
                let (stage, room) = (stage.0, stage.1.min(SLICE));
                Ok(Move::Relay { dst, src, left: length, stage, room, staged: 0, ticket: None })
            }
            (Stretch::Device(_), _, None) => Err(MoveError {
                length,
                reason: "this engine was given no mover; run it in the program that owns the device".into(),
            }),
        }
    }

    /// Whether other copies of this kind may be under way at the same time: they end in the order in which they began.
    pub(crate) fn queues(&self) -> bool {
        matches!(self, Move::Device { .. })
    }

    /// Whether a device is copying.
    pub(crate) fn on_device(&self) -> bool {
        matches!(self, Move::Device { .. } | Move::Relay { ticket: Some(_), .. })
    }

    /// Gives up what this engine has yet to copy or to read. True if a device is still copying, which can only be waited
    /// for.
    pub(crate) fn cut(&mut self) -> bool {
        if let Move::Relay { left, .. } = self {
            *left = 0;
        }
        self.on_device()
    }

    /// Whether the bytes come out of the peer's process.
    pub(crate) fn reads_peer(&self) -> bool {
        matches!(self, Move::Read { .. } | Move::Relay { .. })
    }

    /// Moves on, [`SLICE`] bytes at most.
    ///
    /// # Safety
    /// The stretches of a host copy are mapped (destination writable) and do not
    /// overlap; so is the destination of what is read from the peer's process, and the
    /// stage, which nobody else uses. Others may write the source meanwhile: bytes are
    /// moved, never interpreted, so that spoils their own payload alone.
    pub(crate) unsafe fn advance(
        &mut self,
        mover: Option<&mut (dyn Mover + 'static)>,
        qp: &dyn Link,
    ) -> Result<Advance, Failed> {
        let done = |yes| if yes { Advance::Done } else { Advance::Moved };
        // SAFETY: the caller's promise, for as many bytes as are left of what was checked.
        let read = |src: u64, dst: usize, length: usize| match unsafe { qp.read_peer(src, dst, length) } {
            Ok(0) => {
                let error = io::ErrorKind::UnexpectedEof.into();
                Err(Failed::Peer { length, address: src, error })
            }
            Ok(n) => Ok(n.min(length)),
            Err(error) => Err(Failed::Peer { length, address: src, error }),
        };
        match self {
            Move::Host { dst, src, left } => {
                let n = (*left).min(SLICE);
                // SAFETY: see above; `n` never passes the stretch that was checked.
                unsafe { std::ptr::copy_nonoverlapping(*src as *const u8, *dst as *mut u8, n) };
                (*dst, *src, *left) = (*dst + n, *src + n, *left - n);
                Ok(done(*left == 0))
            }
            Move::Device { ticket } => match mover.expect("it began the copy").done(*ticket)? {
                true => Ok(Advance::Done),
                false => Ok(Advance::Waiting),
            },
            Move::Read { dst, src, left } => {
                if *left > 0 {
                    let n = read(*src, *dst, (*left).min(SLICE))?;
                    (*dst, *src, *left) = (*dst + n, *src + n as u64, *left - n);
                }
                Ok(done(*left == 0))
            }
            Move::Relay { dst, src, left, stage, room, staged, ticket } => {
                let mover = mover.expect("it was there when the copy began");
                if let Some(copy) = *ticket {
                    if !mover.done(copy)? {
                        return Ok(Advance::Waiting);
                    }
                    (*dst, *staged, *ticket) = (*dst + *staged as u64, 0, None);
                }
                if *left > 0 {
                    let n = read(*src, *stage, (*left).min(*room))?;
                    (*src, *left, *staged) = (*src + n as u64, *left - n, n);
                    *ticket = Some(mover.start(*dst, *stage, n)?);
                }
                Ok(done(ticket.is_none()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_message_for_device_memory_needs_no_mover() {
        let start =
            |length| Move::start(Source::Mapped(0x1000), Stretch::Device(0x2000), length, None, (0, 0));
        assert!(start(0).is_ok());
        assert!(start(1).unwrap_err().reason.contains("no mover"));
    }
}
