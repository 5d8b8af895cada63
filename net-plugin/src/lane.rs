//! An engine with what its connections have in common.

use std::sync::Arc;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_engine::engine::{Drive, Engine, QpId};
use pushgate_engine::idle::Wake;
use pushgate_link_tcp::Readiness;

use crate::gpu::Gpu;
use crate::log;
use crate::path::OverRdma;
use crate::rdma::Rdma;

/// An engine, and the GPU and the RDMA device that its connections are for.
pub struct Lane {
    /// Dropped before the GPU, because its mover uses the GPU's memory.
    pub engine: Arc<Engine>,
    /// What drives the engine.
    pub drive: Drive,
    pub bell: Arc<EventFd>,
    /// Which streams of the lane's connections over TCP can go on.
    pub readiness: Arc<Readiness>,
    /// The RDMA device of a lane for connections over RDMA, as all RMA lanes may be.
    pub device: Option<Arc<Rdma>>,
    /// What is done with the GPU's memory over the device. Dropped before the GPU, because it holds some of the GPU's memory.
    pub over_rdma: Option<Arc<OverRdma>>,
    pub gpu: Option<Arc<Gpu>>,
}

impl Lane {
    /// How the lane's connections wake the engine's thread. A GPU's connections have a message every
    /// few microseconds while they are busy, and each would find the thread just going to sleep, so
    /// that thread polls, less and less often while idle. A thread that only stands in for NCCL's
    /// runs while there is none of that.
    pub fn wake(&self) -> Wake {
        let copies = self.gpu.as_ref().is_some_and(|gpu| gpu.has_copier());
        if copies && self.drive == Drive::Thread { Wake::Polled } else { Wake::Doorbell }
    }

    /// Wakes the engine before a post if the engine sleeps and NCCL's thread drives it
    /// ([`Engine::rouse`]).
    #[inline]
    pub fn rouse(&self) {
        // An engine that has ended has ended its queue pairs: their status says how.
        let _ = self.engine.rouse();
    }

    /// Whether NCCL's own thread drives the connections.
    pub fn caller_drives(&self) -> bool {
        self.drive == Drive::Caller
    }

    /// Moves all of the lane's connections on, where the caller drives.
    #[inline]
    pub fn drive_all(&self) {
        if self.drive == Drive::Caller {
            log::take_thread();
            // An engine that has ended has ended its queue pairs: their status says how.
            let _ = self.engine.drive();
        }
    }

    /// Moves the connection of this queue pair on, where the caller drives: NCCL's own thread does, after
    /// each send and receive that it posts and in each test. False: another thread was at it, so what was just posted may not
    /// have been seen.
    #[inline]
    pub fn drive(&self, qp: QpId) -> bool {
        if self.drive == Drive::Caller {
            log::take_thread();
            // An engine that has ended has ended its queue pairs: their status says how.
            return self.engine.drive_for(qp).unwrap_or(true);
        }
        true
    }
}
