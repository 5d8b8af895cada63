//! The engine of this process as a [`Proxy`].

use std::sync::Arc;
use std::time::Duration;

use pushgate_core::session::Status;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_link::RegionSends;
use pushgate_link::memory::Keep;
use pushgate_link::region::{Exported, RegionMemory};

use crate::connect::Patience;
use crate::counters::Counters;
use crate::endpoint::{Endpoint, QpOptions};
use crate::engine::{Engine, EngineError, QpId};
use crate::idle::{Step, Wake};
use crate::proxy::{Proxy, QpFds, Recovers};

impl Proxy for Engine {
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        // The memory is not mapped in a child.
        self.here()?;
        self.add_qp(fds.into_endpoint(options)?, wake)
    }

    fn add_recovering_qp(
        &self,
        fds: QpFds,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<QpId, EngineError> {
        // The memory is not mapped in a child.
        self.here()?;
        let Recovers { connect, limit, mailbox, send } = recovers;
        let patience = Patience::within(limit, options.key_seed as u64);
        self.add_qp(fds.into_endpoint(options)?.with_recovery(connect, patience, mailbox, send), wake)
    }

    fn add_endpoint(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError> {
        self.add_qp(endpoint, wake)
    }

    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        let address = memory.as_ptr().as_ptr() as usize;
        let region = RegionMemory::Host { address, keep: Some(memory.clone()) };
        // SAFETY: the mapping is writable for its length, and `keep` holds it as long as the region is registered.
        // References into the mapping are to atomic words alone, which others may change.
        unsafe { self.add_region(qp, region, memory.len() as u64) }
    }

    unsafe fn add_host_region(
        &self,
        qp: QpId,
        address: usize,
        bytes: u64,
        keep: Option<Keep>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises the same.
        unsafe { self.add_region(qp, RegionMemory::Host { address, keep }, bytes) }
    }

    unsafe fn add_device_region(
        &self,
        qp: QpId,
        address: u64,
        bytes: u64,
        exported: Option<Exported>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises the same.
        unsafe { self.add_region(qp, RegionMemory::Device { address, exported }, bytes) }
    }

    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.remove_region(qp, key)
    }

    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.remove_qp(qp)
    }

    fn control(&self, qp: QpId) -> Result<(), EngineError> {
        self.control(qp)
    }

    fn break_link(&self, qp: QpId) -> Result<bool, EngineError> {
        self.break_link(qp)
    }

    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.fail(qp, status)
    }

    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.status(qp)
    }

    fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError> {
        self.region_sends(qp)
    }

    fn is_registered(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.is_registered(qp, key)
    }

    fn counters(&self) -> Result<Counters, EngineError> {
        self.counters()
    }

    fn drive(&self) -> Result<Step, EngineError> {
        self.drive()
    }

    fn rest(&self, limit: Duration) -> Result<(), EngineError> {
        self.rest(limit)
    }

    fn place(&self) -> &'static str {
        "thread"
    }
}
