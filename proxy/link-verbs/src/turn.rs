//! A link's turns to be made anew, among the links of this process on the same port: see [`Fabric`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pushgate_core::fabric::{Fabric, Limits, Order, Round};

/// A link that had nothing to carry for so long has worked, nanoseconds.
pub(super) const STEADY: u64 = 1_000_000_000;

/// Each link that is made has a thread. A failure costs an attempt to recover no more than a link's own pauses do.
const LIMITS: Limits = Limits { most: 16, first_pause: 10_000_000, longest_pause: 500_000_000 };

/// The turns of all links of one port.
pub(super) struct Turns {
    fabric: Mutex<Fabric>,
    /// When the port's links began to take turns. `None`: there is one engine, whose time counts.
    begin: Option<Instant>,
}

impl Turns {
    /// In the host's time: engines count theirs from starts of their own. Processes of a host have pauses of their own.
    #[allow(clippy::disallowed_methods, reason = "the simulator has the other kind")]
    pub(super) fn of_host() -> Self {
        Turns {
            fabric: Mutex::new(Fabric::new(LIMITS, std::process::id().into())),
            begin: Some(Instant::now()),
        }
    }

    /// In the time of the engine: a test or the simulator has one.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn of_engine() -> Self {
        Turns { fabric: Mutex::new(Fabric::new(LIMITS, 0)), begin: None }
    }

    /// Forgets the links, which are gone.
    #[cfg(feature = "sim")]
    pub(super) fn reset(&self) {
        *self.fabric() = Fabric::new(LIMITS, 0);
    }

    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        // A panic leaves the counts whole.
        self.fabric.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self, engine: u64) -> u64 {
        self.begin.map_or(engine, |begin| begin.elapsed().as_nanos() as u64)
    }
}

#[derive(Clone, Copy)]
enum State {
    Waits,
    Making(Round),
    Made(Round),
}

/// The turn of a link that is away. Dropping it says that nobody waits for the link any more.
pub(super) struct Turn {
    turns: Arc<Turns>,
    state: State,
    /// How often the link has failed in a row, and a number that both of its ends know.
    order: Order,
    carries: bool,
}

impl Turn {
    /// Of a link that has broken, or was never made, with a number that both of its ends know.
    pub(super) fn new(turns: &Arc<Turns>, number: u64) -> Self {
        turns.fabric().leaves();
        // The number is of numbers of first packets, which differ from run to run: where there is one engine, its order is that of both ends.
        let order = (0, if turns.begin.is_some() { number } else { 0 });
        Turn { turns: turns.clone(), state: State::Waits, order, carries: false }
    }

    /// Whether the link may be made now. `now`: the engine's time. If so [`Turn::made`] follows.
    pub(super) fn begins(&mut self, now: u64) -> bool {
        let now = self.turns.now(now);
        self.fails(now);
        let round = self.turns.fabric().begins(self.order, now);
        self.state = round.map_or(State::Waits, State::Making);
        round.is_some()
    }

    /// The link is made, or could not be made.
    pub(super) fn made(&mut self, made: bool, now: u64) {
        let State::Making(round) = self.state else { return };
        self.state = State::Made(round);
        self.turns.fabric().made();
        if !made {
            self.fails(self.turns.now(now));
        }
    }

    /// The link that was made has carried something.
    pub(super) fn carries(mut self) {
        self.carries = true;
    }

    /// A link that was made and is to be made again has failed.
    fn fails(&mut self, now: u64) {
        if let State::Made(round) = std::mem::replace(&mut self.state, State::Waits) {
            self.order.0 += 1;
            self.turns.fabric().failed(round, now);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut fabric = self.turns.fabric();
        if let State::Making(_) = self.state {
            fabric.made();
        }
        fabric.returns(self.carries);
    }
}
