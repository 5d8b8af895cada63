//! The firmware of the simulated devices of a thread, in virtual time. Where it is slow a command to it takes 1 to 100 ms. What
//! links have done beside their engine is done that much later, and a command that an engine waits for is counted.

use std::cell::RefCell;

use super::device::Task;

const MS: u64 = 1_000_000;

#[derive(Default)]
struct Firmware {
    slow: bool,
    /// Virtual time, nanoseconds.
    now: u64,
    /// Commands and tasks so far, which decide how long the next one takes.
    count: u64,
    /// A task is done just now, beside the engines.
    beside: bool,
    /// How long engines have waited, nanoseconds.
    waited: u64,
    /// What is done beside the engines, with the time at which it is done.
    tasks: Vec<(u64, Task)>,
}

thread_local! {
    static FIRMWARE: RefCell<Firmware> = RefCell::default();
}

impl Firmware {
    /// How long the next command takes, nanoseconds: most of them a few milliseconds.
    fn takes(&mut self) -> u64 {
        self.count += 1;
        let part = (self.count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 100;
        MS + 99 * MS * part.pow(4) / 99_u64.pow(4)
    }
}

fn with<T>(act: impl FnOnce(&mut Firmware) -> T) -> T {
    FIRMWARE.with_borrow_mut(act)
}

/// The firmware of a run. When this is dropped what is under way is done, and the firmware is quick.
pub struct Run(());

/// The devices' firmware begins at time 0, slow or quick.
pub fn begin(slow: bool) -> Run {
    let before = with(|all| std::mem::replace(all, Firmware { slow, ..Firmware::default() }));
    // What it holds of a run that was given up may have commands for it.
    drop(before);
    Run(())
}

impl Drop for Run {
    fn drop(&mut self) {
        with(|all| all.slow = false);
        while let Some(at) = next() {
            advance(at);
        }
    }
}

/// A command to the firmware: an engine waits for its own.
pub(super) fn command() {
    with(|all| {
        if all.slow && !all.beside {
            all.waited += all.takes();
        }
    });
}

/// How long engines have waited for commands since the last time, nanoseconds.
pub fn waited() -> u64 {
    with(|all| std::mem::take(&mut all.waited))
}

/// When the next task is done.
pub fn next() -> Option<u64> {
    with(|all| all.tasks.iter().map(|task| task.0).min())
}

/// Time goes on, and what is due is done.
pub fn advance(now: u64) {
    while let Some(task) = with(|all| {
        all.now = all.now.max(now);
        let first = (0..all.tasks.len()).min_by_key(|at| all.tasks[*at].0)?;
        (all.tasks[first].0 <= now).then(|| all.tasks.remove(first).1)
    }) {
        carry_out(task);
    }
}

/// Has a task done beside the engines: at once where the firmware is quick.
#[expect(clippy::unnecessary_wraps, reason = "as a device has it")]
pub(super) fn beside(task: Task) -> std::io::Result<()> {
    let now = with(|all| {
        if !all.slow {
            return Some(task);
        }
        let at = all.now + all.takes();
        all.tasks.push((at, task));
        None
    });
    now.into_iter().for_each(carry_out);
    Ok(())
}

fn carry_out(task: Task) {
    let outer = with(|all| std::mem::replace(&mut all.beside, true));
    task();
    with(|all| all.beside = outer);
}
