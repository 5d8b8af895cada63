//! Faults of a worker that tests cause on purpose, through `_PUSHGATE_WORKER_FAULT` in the
//! environment.
//!
//! | value | effect |
//! | --- | --- |
//! | `silent:N` | generation N ends soon after it began, without announcing it |
//! | `context:N` | generation N ends so, and then every call of the driver reports a lost context |
//! | `refused:N:M` | from generation N on, M launches fail in a way that may pass |
//! | `late:N:MS` | from generation N on, launches are made MS milliseconds late |
//!
//! Generation 1 is the trial run of the kernel in [`super::Worker::new`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{DeviceError, Result};

const VARIABLE: &str = "_PUSHGATE_WORKER_FAULT";

/// A fault to cause on purpose, as `_PUSHGATE_WORKER_FAULT` names it.
#[derive(Debug)]
pub(super) enum Fault {
    Silent { generation: u64 },
    Context { generation: u64 },
    Refused { first: u64, left: AtomicU64 },
    Late { first: u64, by: Duration },
}

impl Fault {
    pub(super) fn from_environment() -> Option<Self> {
        let value = std::env::var(VARIABLE).ok()?;
        let fault = Self::parse(&value);
        match &fault {
            Some(fault) => tracing::info!("{VARIABLE}: {fault:?}"),
            None => tracing::error!("{VARIABLE}={value} names no fault"),
        }
        fault
    }

    fn parse(value: &str) -> Option<Self> {
        let mut parts = value.split(':');
        let kind = parts.next()?;
        let numbers: Vec<u64> = parts.map(|n| n.parse().ok()).collect::<Option<_>>()?;
        Some(match (kind, &numbers[..]) {
            ("silent", &[generation]) => Fault::Silent { generation },
            ("context", &[generation]) => Fault::Context { generation },
            ("refused", &[first, times]) => Fault::Refused { first, left: times.into() },
            ("late", &[first, ms]) => Fault::Late { first, by: Duration::from_millis(ms) },
            _ => return None,
        })
    }

    /// Whether this generation ends without announcing it; it is also told to leave.
    pub(super) fn dies(&self, generation: u64) -> bool {
        matches!(self, Fault::Silent { generation: at } | Fault::Context { generation: at } if *at == generation)
    }

    /// The driver's answer to the launch of this generation.
    pub(super) fn before_launch(&self, generation: u64) -> Result<()> {
        match self {
            Fault::Refused { first, left } if generation >= *first => {
                let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                taken.map_or(Ok(()), |_| Err(said("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 701)))
            }
            Fault::Late { first, by } if generation >= *first => {
                std::thread::sleep(*by);
                Ok(())
            }
            Fault::Context { .. } => self.after_end(generation - 1),
            _ => Ok(()),
        }
    }

    /// The driver's answer to calls after the end of this generation.
    pub(super) fn after_end(&self, generation: u64) -> Result<()> {
        match self {
            Fault::Context { generation: at } if generation >= *at => {
                Err(said("CUDA_ERROR_LAUNCH_FAILED", 719))
            }
            _ => Ok(()),
        }
    }
}

fn said(name: &str, code: u32) -> DeviceError {
    DeviceError::Cuda {
        call: "a call",
        name: name.to_owned(),
        code,
        text: format!("{VARIABLE} asks for this error"),
        doing: "running the worker".to_owned(),
        hint: "",
    }
}
