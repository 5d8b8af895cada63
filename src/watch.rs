//! The thread that sees to a proxy process: it passes frames of queue pairs on, and has the next proxy go on with them when
//! the process is gone, or ends them where none does (P7).

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::interrupt::interrupt_by;
use pushgate_driver_shim::window::{Piece, Window};
use pushgate_service::remote::RemoteEngine;

use crate::error::{Error, Result};

/// The thread that sees to a proxy process. Dropping it ends the thread.
pub(crate) struct Watch {
    stop: Arc<EventFd>,
    thread: OwnedHere<Option<JoinHandle<()>>>,
}

impl Watch {
    /// Starts to see to `proxy`.
    pub(crate) fn start(proxy: Arc<RemoteEngine>) -> Result<Self> {
        let stop = Arc::new(EventFd::new().map_err(Error::io("eventfd"))?);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("pushgate-watch".into())
            .spawn(move || {
                let stop = stopped.clone();
                interrupt_by(Some(Rc::new(move || stop.is_rung())));
                proxy.attend(&stopped);
            })
            .map_err(Error::io("starting the watch of the proxy"))?;
        Ok(Watch { stop, thread: OwnedHere::new(Some(thread)) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A child of `fork` has the eventfd but not the thread.
        if self.thread.here().is_err() {
            return;
        }
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes a status word where the device or the peer looks, in place of an engine that is gone. A
/// status that is already there stays.
pub(crate) fn tell(control: &Piece, status: Status) {
    let word = &control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0];
    if !control.io_memory() {
        let _ = word.compare_exchange(0, status.word(), Ordering::Release, Ordering::Relaxed);
    } else if word.load(Ordering::Relaxed) == 0 {
        // On ARM an atomic operation on a device's memory faults. Of two threads that get here at once one may be
        // overwritten: both name a cause.
        word.store(status.word(), Ordering::Release);
    }
}
