//! How many ranks there may be.

use crate::error::{Error, Result};

/// The most ranks that a communicator may have.
pub const MAX_RANKS: u32 = 256;

/// Refuses a number of ranks that no communicator has.
pub(crate) fn check_size(size: u32) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::config("ranks", size, format!("1 to {MAX_RANKS}")));
    }
    Ok(())
}

/// Refuses a rank that there is not among `size`, and such a size.
pub(crate) fn check_rank(rank: u32, size: u32) -> Result<()> {
    check_size(size)?;
    if rank >= size {
        return Err(Error::config("rank", rank, format!("0 to {}", size - 1)));
    }
    Ok(())
}
