//! How a server runs, and how much of it one program may take.

use pushgate_driver_shim::eventfd::EventFd;

use crate::engine::StallReport;
use crate::recorder;
use crate::wire::{MAX_FDS, QP_FDS};

/// How a server runs, and how much of it one program may take.
#[derive(Debug)]
pub struct ServerOptions {
    /// The most programs that are connected at a time.
    pub max_clients: usize,
    /// The most queue pairs of one program.
    pub max_qps: usize,
    /// The most regions of one program, over all of its queue pairs.
    pub max_regions: usize,
    /// The most bytes of one program's memory that are mapped here. Memory that the program has not touched yet is
    /// allocated by mapping it, on this process's account.
    pub max_bytes: u64,
    /// Cores to pin the engines to, one core after the other. Empty: the engines are not pinned.
    pub cpus: Vec<usize>,
    /// Whether the engines have cores to spare for spinning.
    pub alone: bool,
    /// When the engines report queue pairs in which nothing moves.
    pub stall_report: StallReport,
    /// Asked when the server is stopped, for a server whose process ends with it: if this is true, queue pairs that can go on
    /// with another proxy are left as they are for the next one. `None`, or false: all queue pairs end.
    pub hands_over: Option<fn() -> bool>,
    /// The bell that ends the server when it is rung. The server leaves the bell rung.
    pub stop: EventFd,
}

impl ServerOptions {
    /// The defaults: 64 programs, each with 64 queue pairs, 256 regions and 16 GiB; no engine is pinned and none reports a stall.
    pub fn new(stop: EventFd) -> Self {
        ServerOptions {
            max_clients: 64,
            max_qps: 64,
            max_regions: 256,
            max_bytes: 16 << 30,
            cpus: Vec::new(),
            alone: false,
            stall_report: StallReport::default(),
            hands_over: None,
            stop,
        }
    }

    /// The number of descriptors that the server holds if every program takes all that it may.
    ///
    /// With a lower limit of open files, a greedy program leaves too few descriptors to the others: raise
    /// `RLIMIT_NOFILE` to this number before [`serve`](super::serve).
    pub fn descriptors(&self) -> usize {
        // A queue pair has five descriptors of memory, that of its session, a bell and a ringer; while its link is replaced two
        // segments more. A program has five more (the connection, the program's process, the engine's two bells, the way of
        // frames), those of the engine's flight recorder and, for a moment, those
        // of a request.
        let client = 5
            + recorder::descriptors(self.max_qps)
            + MAX_FDS
            + self.max_qps * (QP_FDS + 5)
            + self.max_regions;
        64 + self.max_clients * client
    }
}
