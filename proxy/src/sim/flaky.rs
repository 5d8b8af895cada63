//! A link that breaks at any call, hears old counts, and holds back what arrives. It stands before the real link.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::record::{Record, RecordWords};

use crate::forward_to;
use crate::gate::{Budget, Permit};
use crate::link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Waking,
};
use crate::region::RegionMemory;

/// Why a link of the simulator breaks.
const DOWN: LinkDown = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_PORT, by_peer: false };

/// What the simulator does to a link. Shared with it.
#[derive(Default)]
pub(super) struct Control {
    /// Calls until the link breaks; 0: it does not.
    pub(super) breaks_in: AtomicU32,
    pub(super) broken: AtomicBool,
    /// Looks at the peer's counts that find those of before.
    pub(super) old_counts: AtomicU32,
    /// Looks for inbound messages that find none.
    pub(super) delay: AtomicU32,
    /// Whether the engine is asked whether it has work: then nothing is held back, for what is held back wakes nobody.
    pub(super) truthful: Arc<AtomicBool>,
}

/// A link under control.
pub(super) struct Flaky {
    inner: Box<dyn Link>,
    control: Arc<Control>,
    /// The counts as last heard.
    heard: Cell<PeerCounts>,
    /// The last words of an end go out although the link broke: an RDMA device may still carry them.
    tells: bool,
}

impl Flaky {
    pub(super) fn new(inner: Box<dyn Link>, control: Arc<Control>, tells: bool) -> Self {
        Flaky { inner, control, heard: Cell::default(), tells }
    }

    /// A call that may be the one at which the link breaks.
    #[inline]
    fn call(&self) -> Result<(), LinkDown> {
        let c = &self.control;
        if c.broken.load(Relaxed) {
            return Err(DOWN);
        }
        match c.breaks_in.load(Relaxed) {
            0 => Ok(()),
            n => {
                c.breaks_in.store(n - 1, Relaxed);
                if n > 1 {
                    return Ok(());
                }
                c.broken.store(true, Relaxed);
                Err(DOWN)
            }
        }
    }

    fn is_silent(&self) -> bool {
        self.control.broken.load(Relaxed) && !self.tells
    }

    /// True if this look is to find nothing new.
    #[inline]
    fn holds_back(&self, looks: &AtomicU32) -> bool {
        let left = looks.load(Relaxed);
        if left == 0 || self.control.truthful.load(Relaxed) {
            return false;
        }
        looks.store(left - 1, Relaxed);
        true
    }
}

impl Link for Flaky {
    forward_to!(inner;
        fn name(&self) -> &'static str;
        fn budget(&self) -> Budget;
        fn has_inbound(&self) -> bool;
        fn leave(&mut self);
        fn stopped(&mut self, now: u64) -> bool;
        fn bounced(&self) -> (u64, u64);
    );

    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        r: &Record,
        w: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.call()?;
        self.inner.post_send(permit, sequence, r, w)
    }

    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        self.call()?;
        self.inner.poll_send(received)
    }

    fn peer_counts(&self) -> PeerCounts {
        if self.holds_back(&self.control.old_counts) {
            return self.heard.get();
        }
        let counts = self.inner.peer_counts();
        self.heard.set(counts);
        counts
    }

    fn peer_status(&self) -> u64 {
        if self.is_silent() { 0 } else { self.inner.peer_status() }
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        if self.is_silent() || self.holds_back(&self.control.delay) {
            return Arrival::Empty;
        }
        self.inner.poll_recv(words)
    }

    fn acknowledge(&mut self, counts: PeerCounts) {
        if !self.is_silent() {
            self.inner.acknowledge(counts);
        }
    }

    fn set_status(&mut self, word: u64) {
        if !self.is_silent() {
            self.inner.set_status(word);
        }
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        let before = self.call();
        // What was posted before goes out, and the peer that reads it is rung.
        let rang = self.inner.notify();
        before?;
        rang
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.call()?;
        self.inner.check(now)
    }
}

impl Receives for Flaky {
    forward_to!(inner;
        fn offered_receives(&self) -> Option<bool>;
        fn knows_receives(&self) -> bool;
        fn receive_for(&self, record: &Record) -> Option<u32>;
        fn receive_posted(&mut self, number: u64, words: [u64; 4]);
    );
}

impl OwnRegions for Flaky {
    forward_to!(inner;
        fn takes_region(&self, record: &Record) -> RegionSends;
        fn region_sends(&self) -> RegionSends;
        fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64);
        fn region_in_use(&mut self, key: u32, received: u64) -> bool;
        fn remove_region(&mut self, key: u32);
        fn offers(&self, key: u32) -> bool;
        fn registers(&self, key: u32) -> bool;
        fn regions_told(&self) -> bool;
    );
}

impl PeerMemory for Flaky {
    forward_to!(inner;
        fn payload(&self, unit: u32, units: u32) -> Option<usize>;
        fn in_place(&self) -> bool;
        fn reads_peer(&self) -> bool;
    );

    unsafe fn read_peer(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.read_peer(address, to, length) }
    }
}

impl Waking for Flaky {
    forward_to!(inner;
        fn sleeping(&self) -> Option<&AtomicU64>;
        fn bell(&self) -> Option<&Bell>;
        fn prepare_sleep(&mut self) -> bool;
        fn woken(&mut self);
    );

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.inner.wakes(fds);
    }
}
