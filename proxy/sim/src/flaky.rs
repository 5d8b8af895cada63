//! A link that breaks at any call, hears old counts, and holds back what arrives. It stands before the real link, and breaks
//! again when that was made anew.
//!
//! This link checks two rules that the other checks of a run do not see. From its offer of the next link until it goes over to
//! that link, an end posts nothing and takes nothing in. An end goes over only when the other end is ready for the next link.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use pushgate_core::gate::{Budget, Permit};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_link::frame::Frame;
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Renew, RenewError,
    Several, Telling, Waking,
};

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
    /// How often a link that takes the place of a broken one breaks, and at its so-many-th call.
    pub(super) again: AtomicU32,
    pub(super) every: AtomicU32,
    /// Which of the next calls that make a link anew fail, from the lowest bit on.
    pub(super) fails: AtomicU32,
    /// Which of the next looks whether something is made find that it is not, from the lowest bit on.
    pub(super) lingers: AtomicU32,
    /// This end has offered its next link, which has not begun.
    pub(super) offered: AtomicBool,
    /// How often this end has offered its next link, and was ready for it.
    pub(super) offers: AtomicU32,
    pub(super) prepared: AtomicU32,
    /// Links of this end that took the place of a broken one.
    pub(super) links: AtomicU32,
    /// The next link has begun, and the checks have yet to look at its memory.
    pub(super) renewed: AtomicBool,
    /// The link segments of this end after the first one. They stay, for a liar may name any of them.
    pub(super) segments: Mutex<Vec<Arc<SharedMemory>>>,
    /// What the link was asked that no end may ask.
    pub(super) wrong: Mutex<Option<&'static str>>,
}

impl Control {
    /// The engine of this end has died: its link is gone, and until the next one begins nothing may go over any link.
    pub(super) fn engine_dies(&self) {
        self.offered.store(true, Relaxed);
        self.broken.store(false, Relaxed);
        self.truthful.store(false, Relaxed);
    }

    fn breaks_a_rule(&self, rule: &'static str) {
        self.wrong.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(rule);
    }

    /// Whether what is asked for is not made yet.
    fn lingers(&self) -> bool {
        let lingers = self.lingers.load(Relaxed);
        self.lingers.store(lingers >> 1, Relaxed);
        lingers & 1 != 0
    }

    /// Whether this call, one of those that make a link anew, is to fail.
    fn fails(&self) -> Result<(), RenewError> {
        let fails = self.fails.load(Relaxed);
        self.fails.store(fails >> 1, Relaxed);
        match fails & 1 {
            0 => Ok(()),
            _ => Err(RenewError::Here("the simulator refuses".into())),
        }
    }
}

/// A link under control.
pub(super) struct Flaky {
    inner: Box<dyn Link>,
    control: Arc<Control>,
    /// That of the other end.
    other: Arc<Control>,
    /// The counts as last heard.
    heard: Cell<PeerCounts>,
    /// The last words of an end go out although the link broke: an RDMA device may still carry them.
    tells: bool,
}

impl Flaky {
    pub(super) fn new(inner: Box<dyn Link>, [control, other]: [Arc<Control>; 2], tells: bool) -> Self {
        Flaky { inner, control, other, heard: Cell::default(), tells }
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
    pushgate_link::forward_to!(inner;
        fn name(&self) -> &'static str;
        fn budget(&self) -> Budget;
        fn has_inbound(&self) -> bool;
        fn stopped(&mut self, now: u64) -> bool;
        fn bounced(&self) -> (u64, u64);
        fn number(&self) -> Option<u32>;
        fn number_of(&self, rail: usize) -> Option<u32>;
    );

    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        r: &Record,
        w: &RecordWords,
    ) -> Result<(), LinkDown> {
        if self.control.offered.load(Relaxed) {
            self.control.breaks_a_rule("it posts while its link is replaced");
        }
        self.call()?;
        self.inner.post_send(permit, sequence, r, w)
    }

    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        self.call()?;
        self.inner.poll_send(received)
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        if self.control.offered.load(Relaxed) {
            self.control.breaks_a_rule("it takes messages in while its link is replaced");
        }
        if self.is_silent() || self.holds_back(&self.control.delay) {
            return Arrival::Empty;
        }
        self.inner.poll_recv(words)
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

    fn renews(&mut self) -> Option<&mut dyn Renew> {
        self.inner.renews()?;
        Some(self)
    }

    fn several(&mut self) -> Option<&mut dyn Several> {
        Some(self)
    }
}

impl Telling for Flaky {
    pushgate_link::forward_to!(inner;
        fn hear(&mut self) -> bool;
        fn leave(&mut self);
    );

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
}

impl Several for Flaky {
    fn break_one(&mut self) -> bool {
        false
    }

    fn rejoined(&mut self) -> u64 {
        self.inner.several().map_or(0, |links| links.rejoined())
    }
}

impl Flaky {
    fn next(&mut self) -> &mut dyn Renew {
        self.inner.renews().expect("it was asked for before")
    }
}

impl Renew for Flaky {
    fn fence(&mut self, now: u64) -> bool {
        self.next().fence(now)
    }

    fn offer(&mut self) -> Result<Option<Frame>, RenewError> {
        self.control.fails()?;
        if self.control.lingers() {
            return Ok(None);
        }
        let offer = self.next().offer()?;
        if offer.is_some() {
            self.control.offers.fetch_add(1, Relaxed);
            self.control.offered.store(true, Relaxed);
        }
        Ok(offer)
    }

    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError> {
        self.control.fails()?;
        self.next().prepare(offer)
    }

    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError> {
        if self.control.lingers() {
            return Ok(None);
        }
        let places = self.next().prepared()?;
        self.control.prepared.fetch_add(places.is_some() as u32, Relaxed);
        Ok(places)
    }

    fn go(&mut self, places: &[u8], accepted: u64) -> Result<(), RenewError> {
        self.control.fails()?;
        self.next().go(places, accepted)?;
        let (c, other) = (&self.control, &self.other);
        let links = c.links.fetch_add(1, Relaxed) + 1;
        if other.offers.load(Relaxed).min(other.prepared.load(Relaxed)) < links {
            c.breaks_a_rule("it goes over to a link before the other end is ready");
        }
        c.offered.store(false, Relaxed);
        c.broken.store(false, Relaxed);
        c.renewed.store(true, Relaxed);
        let again = c.again.load(Relaxed);
        if again > 0 {
            c.again.store(again - 1, Relaxed);
            c.breaks_in.store(c.every.load(Relaxed), Relaxed);
        }
        Ok(())
    }
}

impl Receives for Flaky {
    pushgate_link::forward_to!(inner;
        fn offered_receives(&self) -> Option<bool>;
        fn knows_receives(&self) -> bool;
        fn receive_for(&self, record: &Record) -> Option<u32>;
        fn learn_receives(&mut self, tag: u32) -> bool;
        fn may_learn_receives(&self, tag: u32) -> bool;
        fn goes_ahead(&self) -> u32;
        fn takes_ahead(&self) -> u32;
        fn receive_posted(&mut self, number: u64, words: [u64; 4]);
    );
}

impl OwnRegions for Flaky {
    pushgate_link::forward_to!(inner;
        fn takes_region(&self, record: &Record) -> RegionSends;
        fn region_sends(&self) -> RegionSends;
        fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64);
        fn region_in_use(&mut self, key: u32, received: u64) -> bool;
        fn remove_region(&mut self, key: u32);
        fn offers(&self, key: u32) -> bool;
        fn works_on_region(&self, key: u32) -> bool;
        fn registers(&self, key: u32) -> bool;
        fn regions_told(&self) -> bool;
    );
}

impl PeerMemory for Flaky {
    pushgate_link::forward_to!(inner;
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
    pushgate_link::forward_to!(inner;
        fn sleeping(&self) -> Option<&AtomicU64>;
        fn bell(&self) -> Option<&Bell>;
        fn prepare_sleep(&mut self) -> bool;
        fn woken(&mut self);
    );

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.inner.wakes(fds);
    }
}
