//! The GPU's copy engine as the proxy's [`Mover`].

use std::sync::Arc;

use pushgate_engine::mover::{MoveError, Mover};
use pushgate_gpu_kernels::{CopyTicket, CudaCopy, Executor};

use crate::error::Result;

/// The mover for an engine of this executor's device. `None` on the CPU, whose memory the engine reaches itself.
pub(crate) fn of(executor: &Arc<dyn Executor>) -> Result<Option<Box<dyn Mover>>> {
    let Some(cuda) = executor.as_cuda() else { return Ok(None) };
    Ok(Some(Box::new(GpuMover { copy: CudaCopy::new(cuda)?, tickets: Vec::new() })))
}

/// Copies by the GPU's copy engine. A ticket of the engine is an index of `tickets`.
struct GpuMover {
    copy: CudaCopy,
    tickets: Vec<Option<CopyTicket>>,
}

impl Mover for GpuMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        // SAFETY: the engine resolved both ranges in registered regions and in a window that stay
        // valid until the copy is done.
        let ticket = unsafe { self.copy.start(dst, src as *const u8, length) }
            .map_err(|e| MoveError { length, reason: e.to_string() })?;
        let free = self.tickets.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.tickets.push(None);
            self.tickets.len() - 1
        });
        self.tickets[at] = Some(ticket);
        Ok(at as u64)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        let slot = &mut self.tickets[ticket as usize];
        let ended = match slot {
            Some(t) => self.copy.done(t).map_err(|e| MoveError { length: 0, reason: e.to_string() })?,
            None => true,
        };
        if ended {
            *slot = None;
        }
        Ok(ended)
    }

    fn flush(&mut self) -> Result<(), MoveError> {
        self.copy.flush_rdma_writes().map_err(|e| MoveError { length: 0, reason: e.to_string() })
    }
}
