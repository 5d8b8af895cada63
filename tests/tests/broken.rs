//! Tests a transport that breaks and cannot tell its peer: the engine hands the cause to the
//! program, which can.

mod common;

use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;

use common::{GEOMETRY, Memory, options};
use pushgate_core::gate::{Budget, Permit};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::Endpoint;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Telling, Waking,
};

const DOWN: LinkDown = LinkDown::Failed { cause: 4, by_peer: false };
/// What ends the queue pair of rank 0 then.
const CAUSE: Status = Status { code: abi::PUSHGATE_LINK_DOWN as u8, rank: Some(0), detail: 4 };

/// A transport that has failed and brings nothing.
struct Failed;

impl Link for Failed {
    fn name(&self) -> &'static str {
        "failed"
    }

    fn budget(&self) -> Budget {
        Budget { send_slots: 4, cq_slots: 4, bytes: 4096 }
    }

    fn post_send(&mut self, _: Permit<'_>, _: u64, _: &Record, _: &RecordWords) -> Result<(), LinkDown> {
        Err(DOWN)
    }

    fn poll_send(&mut self, _: u64) -> Result<u32, LinkDown> {
        Ok(0)
    }

    fn poll_recv(&mut self, _: &mut RecordWords) -> Arrival {
        Arrival::Empty
    }

    fn has_inbound(&self) -> bool {
        false
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        Ok(false)
    }

    fn check(&mut self, _: u64) -> Result<(), LinkDown> {
        Err(DOWN)
    }
}

impl Telling for Failed {
    fn peer_counts(&self) -> PeerCounts {
        PeerCounts::default()
    }

    fn peer_status(&self) -> u64 {
        0
    }

    fn acknowledge(&mut self, _: PeerCounts) {}

    fn set_status(&mut self, _: u64) {}
}

impl Receives for Failed {}

impl OwnRegions for Failed {
    fn takes_region(&self, _: &Record) -> RegionSends {
        RegionSends::Unknown
    }

    fn region_sends(&self) -> RegionSends {
        RegionSends::Unknown
    }
}

impl PeerMemory for Failed {
    fn payload(&self, _: u32, _: u32) -> Option<usize> {
        None
    }

    fn in_place(&self) -> bool {
        true
    }
}

impl Waking for Failed {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }
}

fn endpoint(memory: &Memory) -> Endpoint {
    let (work, control) = (memory.work_read.clone(), memory.control.clone());
    let peer = Geometry { rank: 1, ..GEOMETRY };
    Endpoint::new(work, control, memory.geometry, peer, Box::new(Failed), options(1)).unwrap()
}

#[test]
fn p7_a_transport_that_breaks_tells_its_cause_once_to_who_can_tell_the_peer() {
    let memory = Memory::new(GEOMETRY);
    let (sender, told) = channel();
    let mut end = endpoint(&memory).with_broken(Box::new(move |status| sender.send(status).unwrap()));
    end.tick(1);
    // The peer is told which rank's end failed.
    assert_eq!(told.try_recv(), Ok(CAUSE));
    assert_eq!(end.status(), Some(CAUSE));
    end.tick(2);
    end.fail(CAUSE);
    assert!(told.try_recv().is_err());
}

#[test]
fn an_end_that_the_transport_itself_can_tell_is_not_told_twice() {
    let memory = Memory::new(GEOMETRY);
    let (sender, told) = channel();
    let mut end = endpoint(&memory).with_broken(Box::new(move |status: Status| sender.send(status).unwrap()));
    end.fail(Status::new(abi::PUSHGATE_ABORTED));
    end.tick(1);
    assert!(told.try_recv().is_err());
}
