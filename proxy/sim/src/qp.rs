//! A queue pair of a cluster, as the checks know it: both ends' memory, what each end sends, and why it may end.

use std::sync::Arc;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::counters::Counts;
use pushgate_link::mailbox::Mailbox;
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::producer::Producer;
use pushgate_link::ring;
use pushgate_link_tcp::simulated::Net;

use super::flaky::Control;
use super::kept::Kept;
use super::memory::{Guarded, allocate};
use super::model::{Flow, Side};
use super::plan::{Carrier, NEVER, S};
use super::rails::Wires;
use super::violation::{Violation, broken};

/// The memory that a program makes for one call that sets its end up.
pub(super) struct Memory {
    pub(super) geometry: Geometry,
    pub(super) window: Arc<SharedMemory>,
    pub(super) work: Mapped,
    pub(super) control: Mapped,
}

impl Memory {
    /// Fresh memory.
    pub(super) fn new(geometry: Geometry) -> Self {
        let window = allocate("window", geometry.window_bytes());
        Memory {
            geometry,
            window: Arc::new(window.expect("memory for a window of the simulation")),
            work: Mapped::heap(geometry.work_bytes()),
            control: Mapped::heap(geometry.control_bytes()),
        }
    }

    /// What the checks read. Link and inbound payload come when the ends have met.
    pub(super) fn side(&self, rank: u32, regions: &[Guarded; 2], buffer: usize) -> Side {
        let (g, control) = (&self.geometry, &self.control);
        Side {
            rank,
            geometry: self.geometry,
            line: Words::writable(control, abi::PUSHGATE_CTL_CREDIT as usize, 3),
            signals: Words::writable(control, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            rx: Words::writable(control, g.control_rx_offset(), 8 << g.rx_log),
            link: None,
            inbound: 0,
            landing: control.address() + g.control_landing_offset(),
            buffers: regions[1].address(),
            buffer,
            region: regions[0].address(),
        }
    }

    /// The program's producer. `bell` wakes the engine, where the engine can block.
    pub(super) fn producer(&self, bell: Option<EventFd>) -> Producer {
        Producer::new(self.geometry, &self.work, &self.control, &self.window, bell.map(Arc::new))
    }
}

/// P7: what has a cause to end is ended within this time, and a run makes progress within it.
pub(super) const BOUND: u64 = 15 * S;

pub(super) const fn bit(code: u32) -> u64 {
    1 << code
}

/// Codes with which an end may end whose peer or link has a fault.
pub(super) const ANY: u64 = !bit(abi::PUSHGATE_OK);
pub(super) const LINK: u64 = bit(abi::PUSHGATE_LINK_DOWN);

/// Why a queue pair may end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// The time by which both ends must have ended.
    pub(super) by: u64,
    /// Status codes that each end may have.
    pub(super) codes: [u64; 2],
    /// The rank that garbage comes from: no other may be named for it.
    pub(super) liar: Option<u32>,
}

/// An inbox: its address, and in it slots, regions, receives, the end.
pub(super) type Inbox = (usize, [usize; 4]);

/// A queue pair between two ranks.
pub(super) struct Qp {
    pub(super) number: u32,
    pub(super) carrier: Carrier,
    pub(super) ranks: [u32; 2],
    pub(super) nodes: [usize; 2],
    /// What the program of each end has made for its latest call.
    pub(super) memory: [Memory; 2],
    pub(super) sides: [Side; 2],
    /// What end 0 sends, and what end 1 sends.
    pub(super) flows: [Flow; 2],
    pub(super) controls: [Arc<Control>; 2],
    /// What each end is told by the other about their link.
    pub(super) mailboxes: [Mailbox; 2],
    pub(super) key_seeds: [u32; 2],
    /// Keys of each end's regions: the one that the peer puts to, the buffers, the one that messages go out of.
    pub(super) keys: [[u32; 3]; 2],
    /// Numbers of the RDMA queue pairs.
    pub(super) numbers: [u32; 2],
    pub(super) regions: [[Guarded; 2]; 2],
    /// What each end's peer may write by RDMA.
    pub(super) inboxes: [Option<Inbox>; 2],
    /// What lies between the ends of a queue pair over rails.
    pub(super) wires: Option<Wires>,
    /// What lies between the ends of a queue pair over TCP.
    pub(super) net: Option<Net>,
    /// The links' own segments, which a lying engine writes.
    pub(super) links: [Option<Mapped>; 2],
    /// Over `local`: each end's first link segment, and what an end's program writes there if its engine is lost.
    pub(super) first_links: [Option<Mapped>; 2],
    /// Both ends have met, and the programs post.
    pub(super) started: bool,
    /// Status codes with which a call that sets an end up may fail.
    pub(super) excused: u64,
    pub(super) expected: Option<Expected>,
    /// How each end ended, once that is shown.
    pub(super) ended: [Option<Status>; 2],
    pub(super) dead: [bool; 2],
    /// The engine of an end died, and no other one goes on with the end.
    pub(super) lost: [bool; 2],
    /// What outlives the engine of an end, where another engine is to go on with the end.
    pub(super) kept: [Option<Kept>; 2],
    /// Somebody has lied: what it carries is no longer compared.
    pub(super) tainted: bool,
    pub(super) lied_in_set_up: bool,
    pub(super) finished: bool,
}

impl Qp {
    /// Both ends are allowed to end now, and have to within the bound.
    pub(super) fn expect(&mut self, now: u64, codes: [u64; 2]) {
        let before = self.expected.unwrap_or(Expected { by: NEVER, codes: [0; 2], liar: None });
        let both = [0, 1].map(|end| before.codes[end] | codes[end]);
        self.expected = Some(Expected { by: before.by.min(now + BOUND), codes: both, liar: before.liar });
    }

    /// The end has gone over to its next link: the checks read what the end publishes there. `number` is that of its RDMA
    /// queue pair, if it has one.
    pub(super) fn look_at_next_link(&mut self, end: usize, number: Option<u32>) {
        self.numbers[end] = number.unwrap_or(0);
        let segments = self.controls[end].segments.lock().unwrap_or_else(|e| e.into_inner());
        let Some(memory) = segments.last() else { return };
        let memory = Mapped::from(memory);
        self.sides[end].link = Some(Words::writable(&memory, abi::PUSHGATE_LINK_RECEIVED as usize, 4));
        self.links[end] = Some(memory);
    }

    /// P6: the end has asked its link nothing that no end may ask.
    pub(super) fn check_link(&self, end: usize) -> Result<(), Violation> {
        let wrong = self.controls[end].wrong.lock().unwrap_or_else(|e| e.into_inner()).take();
        match wrong {
            Some(wrong) => {
                Err(broken(6, format!("queue pair {}, rank {}: {wrong}", self.number, self.ranks[end])))
            }
            None => Ok(()),
        }
    }

    /// P5, P6: released <= received <= accepted by the other end <= sent. What an engine that died had sent is counted again
    /// with the next link.
    pub(super) fn check_counts(&self, end: usize, own: Counts, other: Counts) -> Result<(), Violation> {
        let sent = own.rebuilds || other.accepted <= own.sent;
        if own.released <= own.received && own.received <= other.accepted && sent {
            return Ok(());
        }
        let why = format!(
            "queue pair {}, rank {}: {own:?}, and the other end has {other:?}",
            self.number, self.ranks[end]
        );
        Err(broken(6, why))
    }

    /// An end shows that it has ended.
    pub(super) fn ends_shown(&self, end: usize) -> bool {
        Status::from_word(ring::observe(&self.sides[end].line[1])).is_some()
    }

    pub(super) fn has_ended(&self, end: usize) -> bool {
        self.dead[end] || self.ended[end].is_some()
    }
}
