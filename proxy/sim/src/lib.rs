//! A simulator of whole clusters: 2 to 16 ranks in one thread and in virtual time, with random workloads and random
//! faults. A seed decides a run, event by event, and after each event the promises P1 to P8 are checked.
//!
//! What runs is the code of the proxy: producers, endpoints, engines (`Machine`), the links `local` and `verbs`, `Rails`, the
//! set-up of queue pairs (`connect`), and beneath them sender, receiver, gate, staging ring and `Connect` of
//! `pushgate-core`. What is simulated is what stands around them: the clock is a number, a kernel of `process_vm_readv` and
//! a copy engine are a few lines, set-up frames arrive late and in pieces, and the RDMA device places the pieces of WRITEs
//! in any order and completes them in order. Rails are simulated links (`rails/`), or links over several such devices. docs/simulator.md says what such a run
//! can show, and what it cannot.
//!
//! # What is checked, and how
//!
//! The model keeps what the programs have posted, in its own words (`model.rs`), and never reads the state of the code
//! under test, but for three places: how many slots an engine has taken, what its gate counts, and whether it has work. A
//! payload is a function of its direction, its message and the word's place, so each word in memory tells whose it is.
//!
//! After each pass of an engine, at each of its queue pairs:
//!
//! * **P1**: the credit word gives back whole slots, no more than were taken, with exactly the units that these slots hold.
//!   After each reservation: slot and place are those of the rule of abi.h, and slots, units and CQEs that are taken lie
//!   within what was given back.
//! * **P2**: each new receive record is whole and is that of the next SEND: number, length, tag, payload. Programs store
//!   the words of some WQEs one by one in any order, with other events between them.
//! * **P3**: at the event at which a receive record or a signal becomes visible, the payload of its message and of all
//!   messages before it lies where it belongs, each byte. A device's copies end late, and their bytes come last.
//! * **P4**: the gate's receives are those that the receiver has granted, less the SENDs posted; a granted receive is one
//!   that the program has given back or posted. Over `local` the work requests that hold slots are exactly the messages
//!   that the peer does not have yet; over `verbs` they lie between that number and all messages. A receive record has a
//!   receive. The counts `dropped` and `rnr` stay 0, and the RDMA device has a receive for each immediate datum.
//! * **P5**: a slot that is given back, a message that is counted as received or released, and a completion cover only
//!   messages that have arrived, and no place that the reader still reads. A payload that is read in place is compared
//!   again when the reader gives it back.
//! * **P6**: SENDs are shown in order, each once, in the posted receive that the rule names; signals grow, and only to
//!   values that were posted; completions come in order, each once; a word of a region never belongs to an older PUT than
//!   one that has arrived, and at the end belongs to the last PUT that covers it. Over `local` a link that breaks is
//!   replaced: released <= received <= accepted <= sent at all times; an end posts and takes in nothing between the offer
//!   of its next link and that link's beginning, and goes over to a link only when the other end has left the one before
//!   and is ready for this one. Sender and receiver of the core are also driven alone over a link that breaks and is
//!   replaced (`replay.rs`).
//!   An engine that dies and is replaced (`restart.rs`) changes none of that: what its session segments say is so, and covers
//!   what devices and peers were told, at each store at which the engine may die.
//! * **P7**: an engine that sleeps and was not rung has no work, unless its program has yet to ring. A link that broke is
//!   replaced within 10 s. An end has a status
//!   only for a cause, and one of the cause's codes; once there is a cause both ends show a status within 15 s of virtual
//!   time, with a completion for each work request that was published and wanted one. A run makes progress within 15 s.
//!   Queue pairs that are closed are gone within 15 s, and their programs see the end.
//! * **P8**: no engine waits for a command to an RDMA device's firmware. Nobody writes to the bytes beside a region. An end that refuses what it reads names the rank that wrote it.
//!   Queue pairs that nobody lies on end with nothing refused.
//!
//! After each event of the set-up of a queue pair (`set_up/`):
//!
//! * **P5, P8**: memory that an end made for an attempt is not written after the end has given the attempt up: compared at
//!   the end of the run. No frame, however wrong, makes an end panic, say more than 8 things, or send more than 4 KiB.
//! * **P6**: an end goes live only if its offer is the one that the other end got ready for, and the reverse; where both are
//!   live, they are so over one epoch, each with the other's incarnation. Programs post only then.
//! * **P7**: a call that is under way knows when it ends, at most twice the limit after it began. A call fails only for a
//!   cause, with one of the cause's codes, and names one of the two ranks. Where no fault happens, or a call fails and is
//!   repeated before the other end is live, the ends meet. When one end can't meet the other any more, both
//!   end within 15 s.

#![cfg(feature = "sim")]
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod checks;
mod cluster;
mod faults;
mod flaky;
mod kept;
mod log;
mod make;
mod memory;
mod model;
mod mover;
mod node;
#[cfg(test)]
// Threads make the links of rails, with the clock.
#[allow(clippy::disallowed_methods)]
mod offer_tests;
mod plan;
mod program;
mod qp;
mod rails;
#[cfg(test)]
// Threads make the links of rails, with the clock.
#[allow(clippy::disallowed_methods)]
mod rails_tests;
mod replay;
mod restart;
mod set_up;
mod shrink;
#[cfg(test)]
mod tests;
mod violation;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use pushgate_link_tcp::random::{self, Random};
use pushgate_link_verbs::profiles::PROFILES;
use pushgate_link_verbs::simulated::Sim;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::cluster::{Cluster, Devices, Sums};
use self::plan::Plan;
use self::violation::broken;

pub use self::plan::{Cut, MOST_RANKS};
pub use self::shrink::Shrunk;
pub use self::violation::Violation;
pub use pushgate_core::plant::Plant;

/// Events after which a run is given up: far more than any run has.
const MOST_STEPS: u64 = 20_000_000;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Events.
    pub steps: u64,
    /// Messages that programs posted.
    pub messages: u64,
    /// Faults that happened.
    pub faults: u32,
    /// Ranks that have a queue pair.
    pub ranks: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Queue pairs whose ends met at a later attempt than the first one of both.
    pub repeated: u32,
    /// Queue pairs whose ends did not meet.
    pub unmet: u32,
    /// Links that took the place of one that broke, those of rails too.
    pub recovered: u64,
    /// Engines that died and were replaced.
    pub restarted: u32,
    /// Links of rails that broke while their queue pairs went on.
    pub rails_broken: u32,
    /// Stripes that were on their way over them and never arrived.
    pub stripes_lost: u32,
    /// Virtual time, nanoseconds.
    pub time: u64,
    /// Times that an engine slept.
    pub sleeps: u64,
    /// Hash over all events: of one seed and one build always the same.
    pub hash: u64,
    /// The promise that was broken, if one was.
    pub violation: Option<Violation>,
    /// The last events before the promise was broken, oldest first.
    pub last: Vec<String>,
}

/// What runs seeds, one after the other. For one thread.
pub struct Simulator {
    ethernet: Devices,
    infiniband: Devices,
}

impl Default for Simulator {
    fn default() -> Self {
        Self::new()
    }
}

thread_local! {
    /// A run is under way on this thread: its panics are its own.
    static RUNS: Cell<bool> = const { Cell::new(false) };
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Panics of a run are kept for its sentence, and not printed. A run has some hundred descriptors, and there is one run on
/// each core: as many may be open as the hard limit says.
fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match RUNS.get() {
            true => PANIC.set(Some(info.to_string())),
            false => before(info),
        }));
    });
}

/// What `act` returned, or the panic's message.
fn quietly<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    RUNS.set(true);
    let result = catch_unwind(AssertUnwindSafe(act));
    RUNS.set(false);
    result.map_err(|_| PANIC.take().unwrap_or_default())
}

impl Simulator {
    /// A simulator with RDMA devices of its own.
    pub fn new() -> Self {
        prepare();
        Simulator { ethernet: Devices::new(Sim::new), infiniband: Devices::new(Sim::infiniband) }
    }

    /// Runs one seed. `plant`: with a fault of ours switched on. `prints`: each event is printed to stderr.
    pub fn run(&mut self, seed: u64, cut: &Cut, plant: Option<Plant>, prints: bool) -> Outcome {
        pushgate_core::plant::set(plant);
        let mut cluster = None;
        let profile = Random::new(seed, 97_000).of(&PROFILES);
        let devices = if profile.is_infiniband() { &self.infiniband } else { &self.ethernet };
        let result = quietly(|| {
            let cluster = cluster.insert(Cluster::new(Plan::new(seed, cut), devices, profile, prints));
            cluster.run(MOST_STEPS)
        });
        let violation = match result {
            Ok(Ok(())) => None,
            Ok(Err(violation)) => Some(violation),
            Err(panic) => Some(broken(0, panic)),
        };
        let mut outcome = Outcome {
            seed,
            steps: 0,
            messages: 0,
            faults: 0,
            ranks: 0,
            qps: 0,
            repeated: 0,
            unmet: 0,
            recovered: 0,
            restarted: 0,
            rails_broken: 0,
            stripes_lost: 0,
            time: 0,
            sleeps: 0,
            hash: 0,
            violation,
            last: Vec::new(),
        };
        if let Some(cluster) = cluster {
            let sums = cluster.sums();
            let Sums { steps, messages, faults, ranks, qps, repeated, unmet, falls, time, sleeps, .. } = sums;
            (outcome.recovered, outcome.restarted) = (sums.recovered, sums.restarted);
            (outcome.steps, outcome.messages, outcome.faults) = (steps, messages, faults);
            (outcome.ranks, outcome.qps, outcome.time, outcome.sleeps) = (ranks, qps, time, sleeps);
            (outcome.repeated, outcome.unmet) = (repeated, unmet);
            (outcome.rails_broken, outcome.stripes_lost) = (falls.links, falls.stripes);
            outcome.hash = cluster.log.hash();
            if outcome.violation.is_some() {
                outcome.last = cluster.log.last();
                clear(devices, cluster);
            }
        }
        pushgate_core::plant::set(None);
        outcome
    }
}

/// Frees what a run has left that ended with a violation, in virtual time.
fn clear(devices: &Devices, mut cluster: Cluster<'_>) {
    devices.all().for_each(Sim::drains);
    let cleared = quietly(|| {
        cluster.take_down();
        for _ in 0..20_000 {
            if !cluster.move_out() {
                return true;
            }
        }
        false
    });
    if cleared == Ok(true) {
        // A panic here is no news.
        let _ = quietly(|| drop(cluster));
    } else {
        // Its links would wait for the device in real time.
        std::mem::forget(cluster);
    }
}
