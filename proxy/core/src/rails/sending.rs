//! The sender of a session with rails: cuts messages into stripes, says which rail carries which stripe, and takes back
//! what a rail that left still owes.
//!
//! Pure state. The caller keeps the messages' records, posts the stripes and passes the time in.

use std::collections::VecDeque;

use super::divide::{Load, divide};
use super::{MOST_RAILS, Rules, Stripe};
use crate::gate::{Budget, Gate, Need, Permit};
use crate::session::Violation;

/// Shortest time over which a rail's speed is measured, nanoseconds.
const MEASURED: u64 = 1_000_000;
/// A rail counts as no slower than this part of the fastest one: what it carries then keeps its speed measured.
const SLOWEST: u64 = 64;

/// A stripe, as it waits or travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    message: u64,
    index: u8,
    length: u32,
}

/// Where a message was cut.
#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    lengths: [u32; MOST_RAILS],
    of: u8,
    placed: bool,
}

/// How fast a rail is, as measured while the rail always had something to carry.
#[derive(Debug, Default)]
struct Speed {
    /// Bytes a millisecond; 0: not measured yet.
    rate: u64,
    since: u64,
    carried: u64,
    /// The rail had something to carry since then, without a pause.
    busy: bool,
}

impl Speed {
    fn tick(&mut self, now: u64, busy: bool) {
        let time = now.saturating_sub(self.since);
        if self.busy && self.carried == 0 || time < MEASURED {
            return;
        }
        if self.busy {
            let sample = (self.carried as u128 * MEASURED as u128 / time as u128) as u64;
            self.rate = if self.rate == 0 { sample } else { (3 * self.rate + sample) / 4 }.max(1);
        }
        *self = Speed { rate: self.rate, since: now, carried: 0, busy };
    }
}

/// One rail at the sender.
#[derive(Debug)]
struct Rail {
    /// Stripes may be posted.
    up: bool,
    /// What the rail's link has room for.
    gate: Gate,
    /// Stripes posted that the peer has not taken in, as far as is known, in their order.
    flying: VecDeque<Piece>,
    backlog: u64,
    /// Stripes that the peer has taken in over all of the rail's epochs.
    taken: u64,
    speed: Speed,
}

const NOTHING: Budget = Budget { send_slots: 0, cq_slots: 0, bytes: 0 };

/// The sender of a session with rails.
#[derive(Debug)]
pub struct Sending {
    rules: Rules,
    rails: Box<[Rail]>,
    /// Where the messages on their way were cut.
    cuts: Box<[Cut]>,
    /// Stripes that no rail carries yet, the oldest first.
    undecided: VecDeque<Piece>,
    /// Messages taken, and those that the peer has.
    next: u64,
    received: u64,
}

impl Sending {
    /// A sender whose rails are all down.
    ///
    /// # Panics
    ///
    /// If there are more rails than [`MOST_RAILS`], or none.
    pub fn new(rules: Rules, rails: usize) -> Self {
        assert!((1..=MOST_RAILS).contains(&rails), "{rails} rails");
        let window = 1usize << rules.window_log;
        let rail = |_| Rail {
            up: false,
            gate: Gate::new(0, NOTHING),
            flying: VecDeque::with_capacity(window * MOST_RAILS),
            backlog: 0,
            taken: 0,
            speed: Speed::default(),
        };
        Sending {
            rules,
            rails: (0..rails).map(rail).collect(),
            cuts: vec![Cut::default(); window].into(),
            undecided: VecDeque::with_capacity(window * MOST_RAILS),
            next: 0,
            received: 0,
        }
    }

    /// A rail's link is up, with a fresh budget.
    pub fn join(&mut self, rail: usize, budget: Budget) {
        let rail = &mut self.rails[rail];
        (rail.up, rail.gate) = (true, Gate::new(0, budget));
    }

    /// A rail takes nothing more. What the rail carries is not known to be lost before [`Sending::owed`].
    pub fn leave(&mut self, rail: usize) {
        self.rails[rail].up = false;
    }

    /// Whether stripes may be posted over a rail.
    pub fn is_up(&self, rail: usize) -> bool {
        self.rails[rail].up
    }

    /// The next message's sequence number.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Stripes posted over a rail that the peer is not known to have taken in, with the rail's count or with the message.
    pub fn owes(&self, rail: usize) -> usize {
        self.rails[rail].flying.iter().filter(|piece| piece.message >= self.received).count()
    }

    /// What is known of a rail that is up. A speed that was never measured counts as that of the fastest rail.
    fn loads(&self) -> [Option<Load>; MOST_RAILS] {
        let fastest = self.rails.iter().filter(|r| r.up).map(|r| r.speed.rate).max().unwrap_or(0).max(1);
        let mut loads = [None; MOST_RAILS];
        for (load, rail) in loads.iter_mut().zip(&self.rails).filter(|(_, rail)| rail.up) {
            let speed = if rail.speed.rate == 0 { fastest } else { rail.speed.rate.max(fastest / SLOWEST) };
            *load = Some(Load { speed: speed.max(1), backlog: rail.backlog });
        }
        loads
    }

    /// Takes the next message, whose stripes carry `length` bytes, and cuts it. Returns its sequence number.
    ///
    /// # Panics
    ///
    /// If the window is full: the caller holds a permit of the session's gate, whose budget is the window.
    pub fn post(&mut self, length: u32, placed: bool) -> u64 {
        let message = self.next;
        assert!(message - self.received < self.cuts.len() as u64, "message {message} beyond the window");
        let shares = divide(length, &self.loads(), self.rules.shortest);
        let mut cut = Cut { placed, ..Cut::default() };
        for share in shares.into_iter().filter(|share| *share > 0) {
            cut.lengths[cut.of as usize] = share;
            cut.of += 1;
        }
        if cut.of == 0 {
            // A message without payload, or no rail is up.
            (cut.of, cut.lengths[0]) = (1, length);
        }
        for index in 0..cut.of {
            self.undecided.push_back(Piece { message, index, length: cut.lengths[index as usize] });
        }
        let mask = self.cuts.len() - 1;
        self.cuts[message as usize & mask] = cut;
        self.next += 1;
        message
    }

    /// The oldest stripe that no rail carries yet, with the rail over which it would arrive first and that rail's permit.
    /// `None` if there is none or no rail has room.
    #[inline]
    pub fn reserve(&self) -> Option<(usize, Permit<'_>, Stripe)> {
        let piece = self.undecided.front()?;
        let need = Need { bytes: piece.length, receive: false };
        let mut best: Option<(usize, Permit<'_>, Load)> = None;
        for (at, load) in self.loads().into_iter().enumerate() {
            let Some(load) = load else { continue };
            let rail = &self.rails[at];
            let later = best.as_ref().is_some_and(|(_, _, best)| !load.ends_before(best, piece.length));
            if later || rail.flying.len() == self.cuts.len() * MOST_RAILS {
                continue;
            }
            if let Ok(permit) = rail.gate.reserve(need) {
                best = Some((at, permit, load));
            }
        }
        best.map(|(rail, permit, _)| (rail, permit, self.stripe(piece)))
    }

    fn stripe(&self, piece: &Piece) -> Stripe {
        let cut = &self.cuts[piece.message as usize & (self.cuts.len() - 1)];
        Stripe {
            message: piece.message,
            index: piece.index,
            of: cut.of,
            offset: cut.lengths[..piece.index as usize].iter().sum(),
            length: piece.length,
            placed: cut.placed,
        }
    }

    /// The stripe that [`Sending::reserve`] named was posted over this rail.
    #[inline]
    pub fn posted(&mut self, rail: usize) {
        let piece = self.undecided.pop_front().expect("`reserve` has named it");
        let rail = &mut self.rails[rail];
        rail.backlog += piece.length as u64;
        rail.flying.push_back(piece);
    }

    /// `n` work requests of a rail's link completed.
    pub fn complete(&mut self, rail: usize, n: u32) {
        self.rails[rail].gate.complete(n);
    }

    /// The peer has taken in `taken` stripes over a rail, over all of the rail's epochs. An old count changes nothing.
    pub fn taken(&mut self, rail: usize, taken: u64) -> Result<(), Violation> {
        let rail = &mut self.rails[rail];
        let new = taken.saturating_sub(rail.taken);
        let posted = rail.taken + rail.flying.len() as u64;
        if taken > posted {
            return Err(Violation::Count { counted: taken, sent: posted });
        }
        for _ in 0..new {
            let piece = rail.flying.pop_front().expect("compared with what was posted");
            rail.backlog -= piece.length as u64;
            rail.gate.retire(piece.length as u64);
            rail.speed.carried += piece.length as u64;
        }
        rail.taken += new;
        rail.speed.busy &= !rail.flying.is_empty();
        Ok(())
    }

    /// The peer has the first `received` messages, each in its place.
    pub fn received(&mut self, received: u64) {
        self.received = self.received.max(received);
        // A peer that counts what was not posted gets no stripe of it: where it was cut is forgotten.
        while self.undecided.front().is_some_and(|piece| piece.message < received) {
            self.undecided.pop_front();
        }
    }

    /// A rail that left was fenced at both ends: nothing of it can land at the peer any more, and the peer has taken in
    /// `taken` stripes over it, over all of its epochs. The other stripes go back to those that no rail carries yet.
    /// Returns how many.
    ///
    /// # Panics
    ///
    /// If the rail has not left.
    pub fn owed(&mut self, rail: usize, taken: u64) -> Result<usize, Violation> {
        assert!(!self.rails[rail].up, "rail {rail} is up");
        self.taken(rail, taken)?;
        let rail = &mut self.rails[rail];
        if taken < rail.taken {
            return Err(Violation::Count { counted: taken, sent: rail.taken });
        }
        let before = self.undecided.len();
        // A message that the peer has came whole, though the rail's count did not tell yet.
        self.undecided.extend(rail.flying.drain(..).filter(|piece| piece.message >= self.received));
        self.undecided.make_contiguous().sort_unstable();
        (rail.backlog, rail.speed) = (0, Speed::default());
        Ok(self.undecided.len() - before)
    }

    /// Looks at the time, nanoseconds: measures the rails' speeds.
    pub fn tick(&mut self, now: u64) {
        for rail in &mut self.rails {
            let busy = !rail.flying.is_empty();
            rail.speed.tick(now, busy);
        }
    }
}
