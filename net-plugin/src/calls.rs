//! Whether the kernel that NCCL launches for a thread's calls waits for copies by the GPU's worker.
//!
//! Messages of the protocol LL leave from host memory, and where NCCL has LL buffers between every two ranks
//! (`path.rs`, `NCCL_ALLOC_P2P_NET_LL_BUFFERS`) they arrive there too. So the kernel of a collective that takes LL waits for
//! no copy. Without a worker beside it, it starts sooner: most of all in a graph, where the worker is a kernel of its own
//! in each replay.
//!
//! NCCL tells its tuner and its profiler of a call on the thread that makes the call, in this order: the group of calls
//! begins, each call, the tuner's answer to each, the launch, the group's end. Where something of this is missing (a thread
//! of NCCL's own launches, NCCL takes another tuner) or there is more than one call, the launch counts as one that waits.

use std::cell::Cell;

/// What NCCL has told of a thread's group of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    collectives: u32,
    others: u32,
    /// Answers of the tuner, and how many of them take LL for sure.
    answers: u32,
    takes_ll: u32,
}

thread_local! {
    static SEEN: Cell<Seen> = const { Cell::new(Seen { collectives: 0, others: 0, answers: 0, takes_ll: 0 }) };
}

fn change(with: impl FnOnce(&mut Seen)) {
    let mut seen = SEEN.get();
    with(&mut seen);
    SEEN.set(seen);
}

/// A group of calls begins or ends.
pub fn start_anew() {
    SEEN.set(Seen::default());
}

/// The thread calls a collective of which NCCL asks its tuner.
pub fn collective() {
    change(|seen| seen.collectives += 1);
}

/// The thread calls something else.
pub fn other() {
    change(|seen| seen.others += 1);
}

/// The tuner has answered. `takes_ll`: the collective takes LL, and its messages arrive in host memory.
pub fn answered(takes_ll: bool) {
    change(|seen| {
        seen.answers += 1;
        seen.takes_ll += u32::from(takes_ll);
    });
}

/// Whether the kernel that is launched now is sure to wait for no copy.
pub fn need_no_copies() -> bool {
    SEEN.get() == Seen { collectives: 1, others: 0, answers: 1, takes_ll: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_collective_that_takes_ll_needs_no_copies_and_everything_else_may() {
        let of = |calls: &[fn()]| {
            start_anew();
            calls.iter().for_each(|call| call());
            need_no_copies()
        };
        assert!(of(&[collective, || answered(true)]));
        assert!(!of(&[]), "a launch on a thread of NCCL's own");
        assert!(!of(&[collective]), "another tuner");
        assert!(!of(&[|| answered(true)]), "a collective that was called elsewhere");
        assert!(!of(&[collective, || answered(false)]));
        assert!(!of(&[collective, collective, || answered(true)]));
        assert!(!of(&[collective, collective, || answered(true), || answered(true)]));
        assert!(!of(&[collective, other, || answered(true)]), "a message beside it");
        assert!(of(&[other, start_anew, collective, || answered(true)]), "an earlier group is forgotten");
    }
}
