//! The set-up of a queue pair as it stands: how far each end is, and what is under way for it.

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_engine::connect::{Connect, Fds, Frame, Incarnation, Opening, Prepared};

use super::channel::Channel;
use crate::plan::{MS, SetUpFault, SetUpKind, US};
use crate::qp::bit;
use crate::random::Random;

/// Codes of a call that failed at one end or waited too long for the other.
pub(crate) const FAILED: u64 = bit(abi::PUSHGATE_ABORTED) | bit(abi::PUSHGATE_TIMED_OUT);
/// The code of a call whose program, or the other one, calls again at once.
pub(super) const REPEATED: u64 = bit(abi::PUSHGATE_ABORTED);

/// How far the transport of an end is.
pub(super) enum Step {
    /// It has nothing.
    Closed,
    Opened(Opening),
    Prepared(Prepared),
}

/// What an end takes its time for.
pub(super) enum Work {
    Fence,
    Prepare { epoch: u32, offer: Frame },
}

/// Where an end stands.
pub(super) enum Stands {
    /// Its program calls at this time.
    Waits(u64),
    Calls(Box<Connect<Fds>>),
    /// It has met this incarnation of the other end over this epoch, and is its engine's.
    Live {
        with: Incarnation,
        epoch: u32,
    },
    /// Its program calls no more.
    Over,
}

/// An end while it is set up.
pub(super) struct End {
    pub(super) stands: Stands,
    /// The latest call.
    pub(super) incarnation: u64,
    pub(super) began: u64,
    /// For how long the end did nothing since then.
    pub(super) stalled: u64,
    pub(super) stopped_until: u64,
    /// How often it may call again.
    pub(super) again: u32,
    pub(super) pause: u64,
    pub(super) step: Step,
    /// What is under way beside the frames, and when it is done.
    pub(super) work: Option<(u64, Work)>,
    /// The number of its offer, and that of the other end's offer that it has got ready for.
    pub(super) attempt: u64,
    pub(super) ready_for: u64,
    /// Memory that the other end may write, looked at from beside, where a fault is to come.
    pub(super) watched: Vec<ReadOnlyMemory>,
    /// What comes from the other end.
    pub(super) channel: Channel,
    pub(super) events: u32,
    /// Those that have not happened.
    pub(super) faults: Vec<SetUpFault>,
    /// It is to forge frames, of those that it has sent.
    pub(super) lies: bool,
    pub(super) sent: Vec<Frame>,
}

/// The set-up of one queue pair.
pub(crate) struct SetUp {
    pub(super) ends: [End; 2],
    /// How many faults there are. If there is one, memory of attempts that are given up is looked at.
    pub(super) faults: usize,
    pub(super) random: Random,
}

/// Memory of an attempt that was given up, and what lay there then.
pub(crate) struct Grave {
    pub(super) qp: usize,
    pub(super) end: usize,
    pub(super) attempt: u64,
    pub(super) memory: ReadOnlyMemory,
    pub(super) hash: u64,
}

pub(super) fn hash(memory: &ReadOnlyMemory) -> u64 {
    // SAFETY: the words are only loaded.
    let words = unsafe { memory.words(0, memory.len() / 8) };
    words.iter().fold(0, |hash: u64, word| {
        let word = word.load(std::sync::atomic::Ordering::Relaxed);
        (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

impl SetUp {
    /// The set-up of a queue pair with these faults.
    pub(crate) fn new(faults: &[SetUpFault], mut random: Random) -> Self {
        let usual = if random.one_in(10) { MS } else { 20 * US };
        // Where an end is so late that the other gives up, both call again.
        let again = faults.iter().filter(|fault| fault.kind.is_too_late()).count() as u32;
        let ends = [0, 1].map(|end| {
            let (late, faults): (Vec<SetUpFault>, Vec<SetUpFault>) = faults
                .iter()
                .filter(|fault| fault.end == end)
                .partition(|fault| matches!(fault.kind, SetUpKind::Late { .. }));
            let late = late.iter().map(|fault| if let SetUpKind::Late { by } = fault.kind { by } else { 0 });
            End {
                stands: Stands::Waits(random.time(50 * US) + late.max().unwrap_or(0)),
                incarnation: 0,
                began: 0,
                stalled: 0,
                stopped_until: 0,
                again,
                pause: if again > 0 { MS } else { 0 },
                step: Step::Closed,
                work: None,
                attempt: 0,
                ready_for: 0,
                watched: Vec::new(),
                channel: Channel::new(usual),
                events: 0,
                lies: faults.iter().any(|fault| matches!(fault.kind, SetUpKind::Lie { .. })),
                faults,
                sent: Vec::new(),
            }
        });
        SetUp { ends, faults: faults.len(), random }
    }

    /// The channel to an end loses what is on its way, and the next `frames` frames.
    pub(crate) fn lose(&mut self, end: usize, frames: u32) {
        self.ends[end].channel.lose(frames);
    }

    /// Of an end that is live: its incarnation, that of the other end which it is live with, and the epoch.
    pub(super) fn live(&self, end: usize) -> Option<(u64, u64, u32)> {
        let e = &self.ends[end];
        match e.stands {
            Stands::Live { with, epoch } => Some((e.incarnation, with.get(), epoch)),
            _ => None,
        }
    }
}
