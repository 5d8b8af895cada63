//! The keeper: the thread that starts the worker when a command finds none, and checks that it lives.
//! A launch may block, and a thread that posts must not. [`Keeping`] decides; this file performs.

use std::sync::atomic::Ordering;
use std::thread;

use super::control::{Direction, Layout};
use super::policy::{Answer, Attempt, Failures, Keeping, Next, Phase, Verdict, Wait};
use super::shared::Shared;
use crate::cuda::Resident;

/// Keeps the worker until it is dropped.
pub(super) fn keep(shared: &Shared) {
    let mut keeping = Keeping::default();
    while !shared.control.flags.is_stopping() {
        match keeping.wait() {
            Wait::Sleep(pause) => thread::sleep(pause),
            Wait::Woken(limit) => thread::park_timeout(limit),
        }
        // A graph's launch that stays for other graphs' operations is relieved, so that its own graph
        // can end. Relaxed: the word asks for a start and publishes nothing.
        let stays = shared.control.word(Layout::STAYS);
        let relieves = stays.load(Ordering::Relaxed) != 0 && stays.swap(0, Ordering::Relaxed) != 0;
        let asked = shared.control.flags.take_wish() || relieves || has_commands(shared);
        if keeping.needs_start(asked, shared.control.phase()) {
            start(shared, &mut keeping);
        }
        look(shared, &mut keeping);
    }
}

/// Whether there are commands that not all blocks have passed.
fn has_commands(shared: &Shared) -> bool {
    [Direction::Push, Direction::Pull].iter().any(|way| {
        // Relaxed: a command that is missed here is found in a later round.
        let posted = shared.posted[*way as usize].load(Ordering::Relaxed);
        shared.control.counts(*way).iter().any(|count| count.load(Ordering::Relaxed) < posted)
    })
}

/// Starts the worker on demand.
fn start(shared: &Shared, keeping: &mut Keeping) {
    let result = shared.ensure(shared.options.linger_on_demand);
    let attempt = match &result {
        Ok(()) => Attempt::Done,
        Err(error) if error.is_final() => Attempt::Final,
        Err(_) => Attempt::Failed,
    };
    match (keeping.attempted(shared.now(), attempt), result) {
        (Next::TryAgain, _) => shared.control.flags.want(),
        (Next::GiveUp(Failures { times, over }), Err(error)) => {
            // A worker that has only said that it leaves may still stay.
            let ended = shared.control.phase().is_gone();
            shared.lose(format!("{error} ({times} times in {over:?})"), ended);
        }
        _ => {}
    }
}

/// Checks whether the kernel has died: it ended without announcing that it leaves, or its context is
/// lost. May block like any call of the driver, so only the keeper calls this.
fn look(shared: &Shared, keeping: &mut Keeping) {
    let control = &shared.control;
    let started = control.flags.started();
    let launching = control.flags.launched() != started;
    let can_tell = shared.resident.as_ref().is_none_or(Resident::tells_its_end);
    if !keeping.needs_look(launching, control.phase(), shared.lost.get().is_some(), can_tell) {
        return;
    }
    if let Some(fault) = &shared.fault
        && fault.dies(started)
    {
        // This is the last that the host sees of the kernel.
        control.word(Layout::STATE).store(started << 8 | Phase::RUNNING, Ordering::Release);
        control.word(Layout::QUIT).store(started, Ordering::Release);
    }
    let result = shared.ended();
    let answer = match &result {
        Ok(false) => Answer::Runs,
        // Acquire: the kernel's last stores are ordered before its end, which this thread has seen.
        Ok(true) => Answer::Ended { state: control.word(Layout::STATE).load(Ordering::Acquire), started },
        Err(error) if error.is_final() => Answer::Final,
        Err(_) => Answer::Failed,
    };
    match (keeping.looked(shared.now(), answer), result) {
        (Verdict::Silent, _) => {
            let said = "its kernel ended without announcing it, and CUDA reports no error";
            shared.lose(said.to_owned(), true);
        }
        (Verdict::Dead, Err(error)) => shared.lose(format!("its kernel has died: {error}"), true),
        (Verdict::Unknown(Failures { times, over }), Err(error)) => shared.lose(
            format!("the driver can't say whether it runs, asked {times} times in {over:?}: {error}"),
            false,
        ),
        _ => {}
    }
}
