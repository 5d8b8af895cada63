//! What stands in place of a link for a rail that has had none yet.

use std::sync::atomic::AtomicU64;

use pushgate_core::rails::Stripe;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Record, RecordWords};

use crate::gate::{Budget, Permit};
use crate::link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Rail, Receives, RegionSends, StripeArrival,
    Waking,
};

/// A link that carries nothing and has stopped.
pub(super) struct Away;

const DOWN: LinkDown = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_PORT, by_peer: false };

impl Link for Away {
    fn name(&self) -> &'static str {
        "no link"
    }

    fn budget(&self) -> Budget {
        Budget { send_slots: 0, cq_slots: 0, bytes: 0 }
    }

    fn post_send(&mut self, _: Permit<'_>, _: u64, _: &Record, _: &RecordWords) -> Result<(), LinkDown> {
        Err(DOWN)
    }

    fn poll_send(&mut self, _: u64) -> Result<u32, LinkDown> {
        Err(DOWN)
    }

    fn peer_counts(&self) -> PeerCounts {
        PeerCounts::default()
    }

    fn peer_status(&self) -> u64 {
        0
    }

    fn poll_recv(&mut self, _: &mut RecordWords) -> Arrival {
        Arrival::Empty
    }

    fn has_inbound(&self) -> bool {
        false
    }

    fn acknowledge(&mut self, _: PeerCounts) {}

    fn set_status(&mut self, _: u64) {}

    fn notify(&mut self) -> Result<bool, LinkDown> {
        Err(DOWN)
    }
}

impl Rail for Away {
    fn post_stripe(
        &mut self,
        _: Permit<'_>,
        _: &Stripe,
        _: &Record,
        _: &RecordWords,
    ) -> Result<(), LinkDown> {
        Err(DOWN)
    }

    fn poll_stripe(&mut self, _: &mut RecordWords) -> StripeArrival {
        StripeArrival::Empty
    }

    fn stripes_taken(&self) -> u64 {
        0
    }

    fn acknowledge_stripes(&mut self, _: u64) {}

    fn reaches(&self, _: &Record) -> bool {
        false
    }
}

impl Receives for Away {}

impl OwnRegions for Away {
    fn takes_region(&self, _: &Record) -> RegionSends {
        RegionSends::Unknown
    }

    fn region_sends(&self) -> RegionSends {
        RegionSends::Unknown
    }
}

impl PeerMemory for Away {
    fn payload(&self, _: u32, _: u32) -> Option<usize> {
        None
    }

    fn in_place(&self) -> bool {
        false
    }
}

impl Waking for Away {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }
}
