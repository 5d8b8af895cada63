//! Takes a queue pair out of its engine again, if making it fails.

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_engine::engine::QpId;

use crate::context::Context;

/// Takes a queue pair out of its engine, and tells the peer, if it is dropped before `done`.
pub(super) struct Undo<'a> {
    context: &'a Context,
    id: QpId,
    done: bool,
}

impl<'a> Undo<'a> {
    pub(super) fn new(context: &'a Context, id: QpId) -> Self {
        Undo { context, id, done: false }
    }

    /// Keeps the queue pair.
    pub(super) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if !self.done {
            let proxy = &self.context.inner.proxy;
            let _ = proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED));
            let _ = proxy.remove_qp(self.id);
        }
    }
}
