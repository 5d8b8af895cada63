//! The loss of a worker.

use super::KERNEL;
use crate::error::DeviceError;

/// The loss of a worker, which is final.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Lost {
    /// The cause, as a sentence.
    pub reason: String,
    /// True if nothing of the worker runs on the device, so no memory is touched any more. False if
    /// the driver says neither that it runs nor that it does not.
    pub ended: bool,
}

impl Lost {
    pub(super) fn error(&self) -> DeviceError {
        DeviceError::Lost { kernel: KERNEL.to_owned(), reason: self.reason.clone() }
    }
}
