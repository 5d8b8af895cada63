//! One end of a session over simulated rails: its links, and what stands beside them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pushgate_core::gate::{Budget, Permit};
use pushgate_core::rails::Stripe;
use pushgate_core::recovery::Control;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_engine::rails::{Beside, Options, Rails};
use pushgate_link::frame::Frame;
use pushgate_link::memory::Mapped;
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Rail, Receives, RegionSends, Renew,
    RenewError, StripeArrival, Telling, Waking,
};

use super::{Flying, Lane, Memory, State, Wires};
use crate::plan::US;

const DOWN: LinkDown = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_PORT, by_peer: false };

/// How far the next link of a rail is, and its epoch.
enum Next {
    Nothing,
    Offered,
    Preparing(u32),
    Prepared(u32),
}

/// One end of the links of a rail.
struct SimRail {
    wires: Wires,
    rail: usize,
    end: usize,
    epoch: u32,
    next: Next,
    /// Stripes whose completion was told.
    completed: u64,
    /// The peer may write regions of this end.
    written: bool,
    time: Arc<AtomicU64>,
}

/// What one end has beside its links.
struct SimBeside {
    wires: Wires,
    end: usize,
    time: Arc<AtomicU64>,
}

/// Joins one end of a session over these rails, of epoch 0. `written`: the peer may write regions of this end.
pub(crate) fn join(
    wires: &Wires,
    end: usize,
    (window, mirror): (Mapped, Mapped),
    written: bool,
    options: Options,
    time: Arc<AtomicU64>,
) -> Rails {
    let rails = {
        let state = &mut *wires.state();
        state.memory[end] = Some(Memory { window, mirror, regions: Default::default() });
        state.wires.len()
    };
    let now = time.load(Relaxed);
    let links = (0..rails).map(|rail| {
        let (wires, time) = (wires.clone(), time.clone());
        let link = SimRail { wires, rail, end, epoch: 0, next: Next::Nothing, completed: 0, written, time };
        (Box::new(link) as Box<dyn Rail>, true)
    });
    Rails::new(links.collect(), Box::new(SimBeside { wires: wires.clone(), end, time }), options, now)
}

impl Beside for SimBeside {
    fn send(&mut self, rail: usize, control: Control, body: &[u8]) {
        let (now, state) = (self.time.load(Relaxed), &mut *self.wires.state());
        let mut body = body.to_vec();
        if let Control::Resume { epoch, .. } = control {
            let own = &state.wires[rail].lanes[self.end];
            if !own.cleared || own.epoch >= epoch {
                let end = self.end;
                state.wrong = Some(format!(
                    "end {end} says RESUME of epoch {epoch} over rail {rail} before the link is let go"
                ));
            }
            if !body.is_empty() {
                // The links of both ends that go together know each other by it.
                body = epoch.to_le_bytes().into();
            }
        }
        // A frame may be lost, come twice, and overtake another one.
        let copies = match state.random.below(24) {
            0 => 0,
            1 | 2 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let at = now + state.random.time(100 * US);
            state.control[1 - self.end].push_back((at, rail, control, body.clone()));
        }
    }

    fn receive(&mut self) -> Option<(usize, Control, Vec<u8>)> {
        let (now, state) = (self.time.load(Relaxed), &mut *self.wires.state());
        let due = state.control[self.end].iter().position(|(at, ..)| *at <= now)?;
        state.control[self.end].remove(due).map(|(_, rail, control, body)| (rail, control, body))
    }

    fn set_status(&mut self, word: u64) {
        self.wires.state().status[1 - self.end] = word;
    }

    fn peer_status(&self) -> u64 {
        self.wires.state().status[self.end]
    }
}

fn here(why: &str) -> RenewError {
    RenewError::Here(why.into())
}

impl Renew for SimRail {
    fn fence(&mut self, _now: u64) -> bool {
        let of = self.newest();
        let state = &mut *self.wires.state();
        let wire = &mut state.wires[self.rail];
        // The peer's end of the link breaks, too, sooner or later.
        wire.broken_before = wire.broken_before.max(of + 1);
        let lane = &mut wire.lanes[self.end];
        if lane.epoch != of || lane.fenced {
            return true;
        }
        // What has not arrived never does. Its bytes may land until the link is let go.
        lane.fenced = state.random.one_in(3);
        lane.fenced
    }

    fn offer(&mut self) -> Result<Option<Frame>, RenewError> {
        let state = &mut *self.wires.state();
        let lane = &mut state.wires[self.rail].lanes[self.end];
        if !lane.fenced {
            state.wrong = Some(format!("end {} lets rail {} go before its fence", self.end, self.rail));
        }
        if !lane.cleared {
            if !state.random.one_in(3) {
                return Ok(None);
            }
            state.falls.stripes += lane.flying.len() as u32;
            (lane.cleared, _) = (true, lane.flying.clear());
        }
        match state.random.below(16) {
            0 | 1 => Err(here("no next link")),
            2..6 => Ok(None),
            _ => {
                self.next = Next::Offered;
                Ok(Some(Frame { bytes: b"an offer".into(), along: Default::default() }))
            }
        }
    }

    fn is_cleared(&self) -> bool {
        self.wires.state().wires[self.rail].lanes[self.end].cleared
    }

    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError> {
        let epoch = offer.bytes.try_into().map(u32::from_le_bytes).map_err(|_| here("no offer"))?;
        let state = &mut *self.wires.state();
        let lane = &state.wires[self.rail].lanes[self.end];
        if !matches!(self.next, Next::Offered) || !lane.cleared || lane.epoch >= epoch {
            state.wrong = Some(format!("end {} prepares rail {} before its fence", self.end, self.rail));
        }
        self.next = Next::Preparing(epoch);
        Ok(())
    }

    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError> {
        let Next::Preparing(epoch) = self.next else { return Err(here("it was not prepared")) };
        let state = &mut *self.wires.state();
        match state.random.below(16) {
            0 | 1 => Err(here("it can't be prepared")),
            2..6 => Ok(None),
            _ => {
                state.wires[self.rail].lanes[self.end] = Lane { epoch, ..Lane::default() };
                self.next = Next::Prepared(epoch);
                Ok(Some(b"places".into()))
            }
        }
    }

    fn go(&mut self, _places: &[u8], _accepted: u64) -> Result<(), RenewError> {
        let state = &mut *self.wires.state();
        let Next::Prepared(epoch) = self.next else {
            state.wrong = Some(format!("end {} joins rail {}, which was not prepared", self.end, self.rail));
            return Err(here("it was not prepared"));
        };
        if state.random.one_in(16) {
            return Err(here("it can't be joined"));
        }
        (self.next, self.epoch, self.completed) = (Next::Nothing, epoch, 0);
        Ok(())
    }
}

impl SimRail {
    /// The epoch of the link that the peer may write over.
    fn newest(&self) -> u32 {
        if let Next::Prepared(epoch) = self.next { epoch } else { self.epoch }
    }

    /// A call over the link: it may be the one at which the link breaks.
    fn call<T>(&self, act: impl FnOnce(&mut State) -> T) -> Result<T, LinkDown> {
        let state = &mut *self.wires.state();
        let wire = &mut state.wires[self.rail];
        if wire.breaks_in > 0 && self.epoch >= wire.broken_before {
            // Most links break while something is on its way.
            let empty = wire.lanes.iter().all(|lane| lane.flying.is_empty());
            if wire.breaks_in > 1 || !empty || state.random.one_in(200) {
                wire.breaks_in -= 1;
            }
            if wire.breaks_in == 0 {
                state.fall(self.rail);
            }
        }
        if self.epoch < state.wires[self.rail].broken_before {
            return Err(DOWN);
        }
        Ok(act(state))
    }

    /// Writes to the other end's memory, if the other end still lets this link.
    fn tell(&self, act: impl FnOnce(&mut Lane)) {
        let state = &mut *self.wires.state();
        let lane = &mut state.wires[self.rail].lanes[1 - self.end];
        if lane.epoch < self.epoch {
            state.wrong =
                Some(format!("end {} writes over rail {} before the peer is ready", self.end, self.rail));
        } else if lane.epoch == self.epoch && !lane.fenced {
            act(lane);
        }
    }

    /// What the other end has written to this one over this link.
    fn heard<T: Default>(&self, read: impl FnOnce(&mut Lane) -> T) -> T {
        let state = &mut *self.wires.state();
        let lane = &mut state.wires[self.rail].lanes[self.end];
        if lane.epoch == self.epoch { read(lane) } else { T::default() }
    }
}

impl Rail for SimRail {
    fn post_stripe(
        &mut self,
        permit: Permit<'_>,
        stripe: &Stripe,
        record: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        let (rail, end, epoch, now) = (self.rail, self.end, self.epoch, self.time.load(Relaxed));
        self.call(|state| {
            let State { wires, memory, random, wrong, .. } = state;
            let wire = &mut wires[rail];
            let lane = &mut wire.lanes[1 - end];
            if lane.epoch < epoch {
                *wrong = Some(format!(
                    "end {end} posts over rail {rail} before the peer is ready for epoch {epoch}"
                ));
            }
            // A link that the other end has left takes what is posted, and nothing comes of it.
            if lane.epoch != epoch || lane.fenced {
                return;
            }
            let own = memory[end].as_ref().expect("it has joined");
            let (base, bytes, at) = match record.has(Record::REGION) {
                true => {
                    let (base, bytes, _) = own.regions.get(&record.place).copied().unwrap_or((0, 0, false));
                    (base, bytes, record.place_offset)
                }
                false => {
                    let place = (record.place as u64) << abi::PUSHGATE_UNIT_LOG;
                    (own.window.address(), own.window.bytes() as u64, place)
                }
            };
            let at = at + stripe.offset as u64;
            if stripe.length > 0 && at + stripe.length as u64 > bytes {
                *wrong = Some(format!("end {end} posts {stripe:?} of {record:?}: beyond its memory"));
                return;
            }
            let begins = lane.last.max(now + random.time(wire.delay));
            let arrives_at = begins + stripe.length as u64 * wire.pace / 1024 + 1;
            let lands_at = now + random.below(arrives_at - now + 1);
            lane.last = arrives_at;
            let from = base + at as usize;
            lane.flying.push_back(Flying {
                stripe: *stripe,
                words: *words,
                from,
                lands_at,
                landed: false,
                arrives_at,
            });
        })?;
        permit.post();
        Ok(())
    }

    fn poll_stripe(&mut self, words: &mut RecordWords) -> StripeArrival {
        match self.heard(|lane| lane.ready.pop_front()) {
            None => StripeArrival::Empty,
            Some((stripe, record)) => {
                *words = record;
                StripeArrival::Stripe(stripe)
            }
        }
    }

    fn stripes_taken(&self) -> u64 {
        self.heard(|lane| lane.taken)
    }

    fn acknowledge_stripes(&mut self, taken: u64) {
        self.tell(|lane| lane.taken = taken);
    }

    fn reaches(&self, record: &Record) -> bool {
        let state = &*self.wires.state();
        let region = state.memory[1 - self.end].as_ref().and_then(|m| m.regions.get(&record.rkey));
        region.is_some_and(|(_, bytes, written)| {
            *written
                && record.remote_offset.checked_add(record.length as u64).is_some_and(|end| end <= *bytes)
        })
    }
}

impl Link for SimRail {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn budget(&self) -> Budget {
        self.wires.state().wires[self.rail].budget
    }

    fn post_send(&mut self, _: Permit<'_>, _: u64, _: &Record, _: &RecordWords) -> Result<(), LinkDown> {
        unreachable!("a rail carries stripes")
    }

    fn poll_send(&mut self, _received: u64) -> Result<u32, LinkDown> {
        let (rail, to) = (self.rail, 1 - self.end);
        let epoch = self.epoch;
        let arrived = self.call(|state| {
            let lane = &state.wires[rail].lanes[to];
            (lane.epoch == epoch).then_some(lane.arrived)
        })?;
        let new = arrived.map_or(0, |arrived| arrived - self.completed);
        self.completed += new;
        Ok(new as u32)
    }

    fn poll_recv(&mut self, _: &mut RecordWords) -> Arrival {
        Arrival::Empty
    }

    fn has_inbound(&self) -> bool {
        self.heard(|lane| !lane.ready.is_empty())
    }

    fn stopped(&mut self, now: u64) -> bool {
        self.fence(now)
            && (self.is_cleared() || {
                let _ = self.offer();
                self.is_cleared()
            })
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        self.call(|_| false)
    }

    fn check(&mut self, _now: u64) -> Result<(), LinkDown> {
        self.call(|_| ())
    }
}

impl Telling for SimRail {
    fn peer_counts(&self) -> PeerCounts {
        self.heard(|lane| lane.counts)
    }

    fn peer_status(&self) -> u64 {
        self.heard(|lane| lane.status)
    }

    fn acknowledge(&mut self, counts: PeerCounts) {
        self.tell(|lane| lane.counts = counts);
    }

    fn set_status(&mut self, word: u64) {
        self.tell(|lane| lane.status = word);
    }
}

impl Receives for SimRail {}

impl OwnRegions for SimRail {
    fn takes_region(&self, _record: &Record) -> RegionSends {
        RegionSends::Yes
    }

    fn region_sends(&self) -> RegionSends {
        RegionSends::Yes
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        if let RegionMemory::Host { address, .. } = memory
            && let Some(own) = &mut self.wires.state().memory[self.end]
        {
            own.regions.insert(key, (*address, bytes, self.written));
        }
    }

    fn remove_region(&mut self, key: u32) {
        if let Some(own) = &mut self.wires.state().memory[self.end] {
            own.regions.remove(&key);
        }
    }

    fn offers(&self, key: u32) -> bool {
        let state = &*self.wires.state();
        state.memory[self.end].as_ref().and_then(|m| m.regions.get(&key)).is_some_and(|region| region.2)
    }
}

impl PeerMemory for SimRail {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        let state = &*self.wires.state();
        let mirror = &state.memory[self.end].as_ref()?.mirror;
        let end = (unit as usize + units as usize) << abi::PUSHGATE_UNIT_LOG;
        (end <= mirror.bytes()).then(|| mirror.address() + ((unit as usize) << abi::PUSHGATE_UNIT_LOG))
    }

    fn in_place(&self) -> bool {
        true
    }
}

impl Waking for SimRail {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }

    fn bell(&self) -> Option<&Bell> {
        None
    }

    fn wakes<'a>(&'a self, _fds: &mut Vec<BorrowedFd<'a>>) {}
}
