//! Tests a queue pair whose engine says that a device still copies for it.

use std::sync::{Arc, Weak};

use pushgate_core::session::Status;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::window::{WeakPiece, Window};
use pushgate_engine::counters::Counters;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::idle::{Step, Wake};
use pushgate_engine::proxy::{Proxy, QpFds, Recovers};
use pushgate_link::RegionSends;
use pushgate_link::memory::Keep;
use pushgate_link::region::Exported;
use pushgate_tests::hang;

use super::{OwnEnd, QpConfig, QueuePair};
use crate::Settings;
use crate::context::Context;
use crate::mesh::{BothReady, Events, Mesh, QUEUE_PAIRS, meet};

/// An engine for which a device's copies never end.
struct Unsettled(Arc<dyn Proxy>);

impl Proxy for Unsettled {
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        self.0.add_qp(fds, options, wake)
    }
    fn add_recovering_qp(
        &self,
        fds: QpFds,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<QpId, EngineError> {
        self.0.add_recovering_qp(fds, options, wake, recovers)
    }
    fn control(&self, qp: QpId) -> Result<(), EngineError> {
        self.0.control(qp)
    }
    fn add_endpoint(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError> {
        self.0.add_endpoint(endpoint, wake)
    }
    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        self.0.add_shared_region(qp, memory)
    }
    unsafe fn add_host_region(
        &self,
        qp: QpId,
        address: usize,
        bytes: u64,
        keep: Option<Keep>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises what the inner call requires.
        unsafe { self.0.add_host_region(qp, address, bytes, keep) }
    }
    unsafe fn add_device_region(
        &self,
        qp: QpId,
        address: u64,
        bytes: u64,
        exported: Option<Exported>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises what the inner call requires.
        unsafe { self.0.add_device_region(qp, address, bytes, exported) }
    }
    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.0.remove_region(qp, key)
    }
    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        Err(EngineError::Unsettled(Box::new(self.0.remove_qp(qp)?)))
    }
    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.0.fail(qp, status)
    }
    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.0.status(qp)
    }
    fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError> {
        self.0.region_sends(qp)
    }
    fn counters(&self) -> Result<Counters, EngineError> {
        self.0.counters()
    }
    fn drive(&self) -> Result<Step, EngineError> {
        Ok(Step::Yield)
    }

    fn place(&self) -> &'static str {
        self.0.place()
    }
}

/// Makes a queue pair between two ranks of one context, with handles that tell whether its memory
/// still exists.
fn queue_pair(unsettled: bool) -> ([QueuePair; 2], Weak<dyn Window>, [WeakPiece; 2]) {
    let mut settings = Settings::default();
    settings.set("device", "cpu").unwrap();
    let mut context = Context::builder().settings(settings).build().unwrap();
    if unsettled {
        let inner = Arc::get_mut(&mut context.inner).expect("no other reference exists yet");
        inner.proxy = Arc::new(Unsettled(inner.proxy.clone()));
    }
    let mut meshes = Mesh::local(2, hang()).unwrap();
    for mesh in &mut meshes {
        mesh.listen(Events { lost: Box::new(|_| {}), ended: Box::new(|_| {}) }).unwrap();
    }
    let join = |mesh: &Mesh| {
        let peer = 1 - mesh.rank;
        let end = OwnEnd::new(&context, mesh, peer, QpConfig::default()).unwrap();
        let ready = meet(mesh, vec![(mesh.set_up(peer, QUEUE_PAIRS + 1), end)]).unwrap();
        let [BothReady { end, places, mut call }] = <[_; 1]>::try_from(ready).ok().expect("one");
        let qp = end.join(&places, &mut call).unwrap();
        assert!(call.joined(None).is_none());
        qp
    };
    let qps = std::thread::scope(|s| {
        let other = s.spawn(|| join(&meshes[1]));
        [join(&meshes[0]), other.join().unwrap()]
    });
    let own = &qps[0].memory.own;
    let (window, pieces) = (Arc::downgrade(&own.window), [own.work.downgrade(), own.control.downgrade()]);
    (qps, window, pieces)
}

#[test]
fn p8_the_memory_of_a_queue_pair_that_a_device_still_copies_for_stays() {
    let (qps, window, pieces) = queue_pair(true);
    drop(qps);
    assert!(window.strong_count() > 0, "the window was unmapped under the device");
    assert!(pieces.iter().all(WeakPiece::is_alive), "a segment was unmapped under the device");
    // The memory of an engine that has settled is freed.
    let (qps, window, pieces) = queue_pair(false);
    drop(qps);
    assert!(window.strong_count() == 0 && !pieces.iter().any(WeakPiece::is_alive));
}
