//! How a server runs, and how much of it one program may take.

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_engine::engine::StallReport;
use pushgate_engine::recorder;

use super::ledger::Ledger;
use crate::users::Users;
use crate::wire::{Amounts, MAX_FDS, QP_FDS};

/// What becomes of the queue pairs of a server that is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Queue pairs that can go on with another proxy are left as they are for the next one; the others end. For a server whose process
    /// ends with it.
    ToTheNext,
    /// All of them end, for this reason: the end of a sentence that begins with the proxy.
    Ends(&'static str),
}

impl Leaves {
    /// What becomes of the queue pairs of a server that is a part of a program.
    pub const OF_A_PROGRAM: Leaves = Leaves::Ends("was stopped by the program that it was a part of");
}

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
    /// Who is served besides this process's user and root.
    pub users: Users,
    /// The most that all programs of one user hold together.
    pub quota: Amounts,
    /// Cores to pin the engines to, one core after the other. Empty: the engines are not pinned.
    pub cpus: Vec<usize>,
    /// Whether the engines have cores to spare for spinning.
    pub alone: bool,
    /// When the engines report queue pairs in which nothing moves.
    pub stall_report: StallReport,
    /// Asked when the server is stopped: what becomes of the queue pairs.
    pub leaves: fn() -> Leaves,
    /// The bell that ends the server when it is rung. The server leaves the bell rung.
    pub stop: EventFd,
}

impl ServerOptions {
    /// The default options: 64 programs of this process's user and root, each with 64 queue pairs, 256 regions and 16 GiB, and no
    /// quota of a user that would be less; no engine is pinned and none reports a stall.
    pub fn new(stop: EventFd) -> Self {
        ServerOptions {
            max_clients: 64,
            max_qps: 64,
            max_regions: 256,
            max_bytes: 16 << 30,
            users: Users::Own,
            quota: Amounts {
                programs: u64::MAX,
                queue_pairs: u64::MAX,
                bytes: u64::MAX,
                descriptors: u64::MAX,
            },
            cpus: Vec::new(),
            alone: false,
            stall_report: StallReport::default(),
            leaves: || Leaves::OF_A_PROGRAM,
            stop,
        }
    }

    /// The fewest open files with which a server serves one program that has one queue pair and one region. With a lower limit a
    /// server would refuse everybody.
    pub fn least_open_files() -> u64 {
        Ledger::least()
    }

    /// The number of descriptors that the server holds if every program takes all that it may.
    ///
    /// With a lower limit of open files, a greedy program leaves too few descriptors to the others: raise
    /// `RLIMIT_NOFILE` to this number before [`serve`](super::serve).
    pub fn descriptors(&self) -> usize {
        // While its link is replaced a queue pair has two segments more. A program has five more (the connection, the
        // program's process, the engine's two bells, the way of frames), those of the engine's flight recorder and, for a
        // moment, those of a request.
        let client = 5
            + recorder::descriptors(self.max_qps)
            + MAX_FDS
            + self.max_qps * (QP_FDS + 5)
            + self.max_regions;
        64 + self.max_clients * client
    }
}
