//! An event of the driver: a place in a stream, which is over when the work before it is complete.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};

use super::context::Context;
use super::driver::Raw;
use crate::error::Result;

/// The flags of an event that keeps the time at which it was over.
pub(super) const TIMED: u32 = 0;
/// The flags of an event that does not, which is cheaper.
pub(super) const UNTIMED: u32 = 2;

/// An event of the driver, destroyed on drop.
pub(super) struct Event {
    pub(super) context: Arc<Context>,
    pub(super) raw: Raw<CUevent>,
}

impl Event {
    /// Makes an event. [`TIMED`] or [`UNTIMED`] are the flags.
    pub(super) fn new(context: &Arc<Context>, flags: u32) -> Result<Self> {
        let _current = context.current()?;
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (context.driver.cuEventCreate)(&mut raw, flags) };
        context.check("cuEventCreate", code, || "making an event".to_owned())?;
        Ok(Self { context: context.clone(), raw: Raw(raw) })
    }

    /// Records the event on a stream. The context must be current.
    pub(super) fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: both are valid and belong to this context.
        let code = unsafe { (self.context.driver.cuEventRecord)(self.raw.0, stream) };
        self.context.check("cuEventRecord", code, || "marking a place in a stream".to_owned())
    }

    /// The time from `earlier` to this event. Both must be timed and over. The driver answers with an
    /// error otherwise.
    pub(super) fn since(&self, earlier: &Event, doing: impl FnOnce() -> String) -> Result<Duration> {
        let mut milliseconds = 0f32;
        let _current = self.context.current()?;
        // SAFETY: two events of the driver; writes one float.
        let code =
            unsafe { (self.context.driver.cuEventElapsedTime)(&mut milliseconds, earlier.raw.0, self.raw.0) };
        self.context.check("cuEventElapsedTime", code, doing)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        // SAFETY: made by this value and destroyed only here.
        let code = unsafe { (self.context.driver.cuEventDestroy_v2)(self.raw.0) };
        self.context.note("cuEventDestroy", code, || "destroying an event".to_owned());
    }
}
