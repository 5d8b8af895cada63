//! Movers: what copies payload on the receiving host where the place cannot
//! simply be handed over. Host memory is copied by the engine itself; memory
//! of a device by the device's copy engine, which the program that owns the
//! device lends to its engine as a [`Mover`].

use crate::region::Stretch;

/// Copies host memory into a device's, in the background.
///
/// Called by one engine thread. Nothing here may block. Several copies are under way
/// at once; they are asked for in the order in which they were started.
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
}

/// A copy could not be made.
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
const SLICE: usize = 1 << 20;

/// A copy under way.
#[derive(Debug)]
pub(crate) enum Move {
    Host { dst: usize, src: usize, left: usize },
    Device { ticket: u64 },
}

impl Move {
    /// Begins a copy. Both stretches were checked by whoever resolved them.
    pub(crate) fn start(
        src: usize,
        dst: Stretch,
        length: usize,
        mover: Option<&mut (dyn Mover + 'static)>,
    ) -> Result<Self, MoveError> {
        match (dst, mover) {
            (Stretch::Host(dst), _) => Ok(Move::Host { dst, src, left: length }),
            (Stretch::Device(dst), Some(m)) => Ok(Move::Device { ticket: m.start(dst, src, length)? }),
            (Stretch::Device(_), None) => Err(MoveError {
                length,
                reason: "this engine was given no mover; run it in the program that owns the device".into(),
            }),
        }
    }

    /// It needs no more of the engine than a look.
    pub(crate) fn by_device(&self) -> bool {
        matches!(self, Move::Device { .. })
    }

    /// Moves on; true when complete.
    ///
    /// # Safety
    /// The stretches of a host copy are mapped (destination writable) and do not
    /// overlap. Others may write the source meanwhile: bytes are moved, never
    /// interpreted, so that spoils their own payload alone.
    pub(crate) unsafe fn advance(
        &mut self,
        mover: Option<&mut (dyn Mover + 'static)>,
    ) -> Result<bool, MoveError> {
        match self {
            Move::Host { dst, src, left } => {
                let n = (*left).min(SLICE);
                // SAFETY: see above; `n` never passes the stretch that was checked.
                unsafe { std::ptr::copy_nonoverlapping(*src as *const u8, *dst as *mut u8, n) };
                (*dst, *src, *left) = (*dst + n, *src + n, *left - n);
                Ok(*left == 0)
            }
            Move::Device { ticket } => mover.expect("it began the copy").done(*ticket),
        }
    }
}
