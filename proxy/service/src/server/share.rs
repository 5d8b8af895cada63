//! The processor time that users get of a server: users who want the same core get equal parts of it, however many programs
//! each of them has.
//!
//! Each program has threads of its own here, and the kernel gives each *thread* that wants to run the same part of a core. So a
//! user with 20 busy programs would get 20 times what a user with one gets. Linux weighs threads by their nice values, each
//! step by 1.25, from 1 to about 1/69. So every tenth of a second the server looks how many threads of each user want to
//! run, and sets the nice values of all threads of a user by that number. The engines' passes know nothing of it and cost what they cost.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pushgate_driver_shim::limited;
use pushgate_engine::engine::Thread;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::gettid;

/// What one step of the nice value changes a thread's weight by.
const STEP: f64 = 1.25;
/// The largest nice value.
const LAST: i32 = 19;
/// By how much threads stand back that serve new connections: a sixth of the weight of a program's thread. With a tenth a new program
/// waits seconds on a core that others flood.
const STRANGERS: i32 = 8;
/// A user of whose threads fewer than this want to run, on average, wants nothing.
const LITTLE: f64 = 0.02;

/// The threads that a server runs for users, and how they share the cores.
pub(super) struct Share {
    threads: Mutex<Threads>,
    /// The nice value of the process; `None`: the process may not take a nice value back, so all threads keep theirs.
    base: Option<i32>,
}

#[derive(Default)]
struct Threads {
    next: u64,
    all: BTreeMap<u64, Entry>,
    /// When the threads were looked at last.
    looked: Option<Instant>,
    /// By how much the threads of a user stand back, where they do.
    back: HashMap<u32, i32>,
    /// How many threads of a user want to run, on average.
    wants: BTreeMap<u32, f64>,
}

struct Entry {
    uid: u32,
    thread: Thread,
    /// The thread's times at the last look.
    times: Option<Times>,
    /// By how much the thread stands back.
    back: i32,
}

/// How long a thread has run, and has wanted to run but waited for a core. Nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    ran: u64,
    waited: u64,
}

/// A thread that counts for its user until this is dropped.
pub(super) struct Counted<'a>(&'a Share, u64);

impl Share {
    /// The share of users in a server; `others`: whether there can be several.
    pub(super) fn new(others: bool) -> Share {
        let base = others.then(base).flatten();
        Share { threads: Mutex::default(), base }
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an engine's thread for a user.
    pub(super) fn add(&self, uid: u32, thread: Thread) -> Counted<'_> {
        let mut threads = self.threads();
        let number = threads.next;
        threads.next += 1;
        threads.all.insert(number, Entry { uid, thread, times: None, back: 0 });
        Counted(self, number)
    }

    /// Counts the calling thread for a user. The thread must outlive what this returns.
    pub(super) fn add_this(&self, uid: u32) -> Counted<'_> {
        self.add(uid, Arc::new(Mutex::new(Some(gettid()))))
    }

    /// Gives the calling thread, and the threads that it starts, less weight than the threads of programs: anybody can connect all the
    /// time, and so keep the thread running.
    pub(super) fn stand_back(&self) {
        self.nice_here(STRANGERS);
    }

    /// Gives the calling thread the weight of a thread of a user's program.
    pub(super) fn come_forward(&self, uid: u32) {
        self.nice_here(self.threads().back.get(&uid).copied().unwrap_or(0));
    }

    fn nice_here(&self, by: i32) {
        let Some(base) = self.base else { return };
        if let Err(e) = setpriority_process(Some(gettid()), (base + by).min(LAST)) {
            limited!(warn, 0u32, "a thread keeps its nice value: {e}");
        }
    }

    /// Looks what each user wants, and sets the nice values. To be called from time to time.
    pub(super) fn look(&self) {
        let Some(base) = self.base else { return };
        let mut threads = self.threads();
        let Threads { all, looked, back, wants, .. } = &mut *threads;
        let uid = all.values().next().map(|entry| entry.uid);
        if all.values().all(|entry| Some(entry.uid) == uid) && back.is_empty() {
            // One user has no other to yield to.
            wants.clear();
            return;
        }
        let now = Instant::now();
        let time = looked.replace(now).map_or(0, |before| (now - before).as_nanos() as u64);
        let mut sums: BTreeMap<u32, f64> = BTreeMap::new();
        for entry in all.values_mut() {
            let thread = entry.thread.lock().unwrap_or_else(PoisonError::into_inner);
            let times = thread.and_then(times);
            let before = std::mem::replace(&mut entry.times, times);
            *sums.entry(entry.uid).or_default() +=
                before.zip(times).map_or(0.0, |(before, now)| part(before, now, time));
        }
        // Half of the last average: a look at a moment says little of a program that comes and goes.
        *wants = sums
            .into_iter()
            .map(|(uid, sum)| (uid, (sum + wants.get(&uid).copied().unwrap_or(sum)) / 2.0))
            .collect();
        *back = stand_back(wants);
        for entry in all.values_mut() {
            let by = back.get(&entry.uid).copied().unwrap_or(0);
            if by == entry.back {
                continue;
            }
            // The lock is kept, so that the number is not another thread's by then.
            let thread = entry.thread.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = *thread
                && let Err(e) = setpriority_process(Some(thread), (base + by).min(LAST))
            {
                limited!(warn, entry.uid, user = entry.uid, "its thread keeps its nice value: {e}");
            }
            entry.back = by;
        }
    }

    /// The processor time of the threads of a user that run now, nanoseconds, and by how much they stand back.
    pub(super) fn of(&self, uid: u32) -> (u64, i32) {
        let threads = self.threads();
        let ran = threads.all.values().filter(|entry| entry.uid == uid).map(|entry| {
            let thread = entry.thread.lock().unwrap_or_else(PoisonError::into_inner);
            thread.and_then(times).map_or(0, |times| times.ran)
        });
        (ran.sum(), threads.back.get(&uid).copied().unwrap_or(0))
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.threads().all.remove(&self.1);
    }
}

/// How much of the time between two looks a thread wanted to run.
fn part(before: Times, now: Times, time: u64) -> f64 {
    let wanted = (now.ran + now.waited).saturating_sub(before.ran + before.waited);
    if time == 0 { 0.0 } else { (wanted as f64 / time as f64).min(1.0) }
}

/// By how many steps the threads of each user stand back, if they do; `wants` says how many threads of each user want to run. So far that
/// the threads of each user together weigh what those of the user with the fewest weigh.
fn stand_back(wants: &BTreeMap<u32, f64>) -> HashMap<u32, i32> {
    let busy = wants.iter().filter(|(_, wants)| **wants >= LITTLE);
    // A user of whom less than one thread wants to run weighs what one thread weighs.
    let busy: Vec<_> = busy.map(|(uid, wants)| (*uid, wants.max(1.0))).collect();
    let fewest = busy.iter().map(|(_, wants)| *wants).fold(f64::INFINITY, f64::min);
    let steps = |wants: f64| ((wants / fewest).log(STEP).round() as i32).clamp(0, LAST);
    busy.iter().map(|(uid, wants)| (*uid, steps(*wants))).filter(|(_, steps)| *steps > 0).collect()
}

/// The times of a thread of this process. `None` if the kernel does not say.
fn times(thread: Pid) -> Option<Times> {
    let text =
        std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero())).ok()?;
    parse(&text)
}

fn parse(text: &str) -> Option<Times> {
    let mut numbers = text.split_ascii_whitespace().map(|n| n.parse().ok());
    Some(Times { ran: numbers.next()??, waited: numbers.next()?? })
}

/// The nice value of this process, if its threads may go back to it from a larger one.
fn base() -> Option<i32> {
    let goes_back = || {
        let own = Some(gettid());
        let base = getpriority_process(own)?;
        setpriority_process(own, (base + 1).min(LAST))?;
        setpriority_process(own, base).map(|()| base)
    };
    let told = |why: &dyn std::fmt::Display| {
        tracing::warn!(
            "users with many busy programs get more of the cores than users with few, because the nice values of threads \
             can't be taken back ({why}): set LimitNICE=+0 in the unit of the proxy, or run the proxy as root"
        );
    };
    if times(gettid()).is_none() {
        told(&"/proc/self/task/*/schedstat is missing");
        return None;
    }
    // A thread of its own, for where the second call fails the nice value stays.
    let tried = std::thread::scope(|s| s.spawn(goes_back).join());
    match tried {
        Ok(Ok(base)) => Some(base),
        Ok(Err(e)) => {
            told(&e);
            None
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(wants: &[(u32, f64)]) -> Vec<(u32, i32)> {
        let mut all: Vec<_> = stand_back(&wants.iter().copied().collect()).into_iter().collect();
        all.sort();
        all
    }

    #[test]
    fn users_with_equal_wants_stand_back_behind_nobody_and_others_by_the_ratio() {
        assert_eq!(back(&[(1, 1.0), (2, 1.0)]), []);
        assert_eq!(back(&[(1, 0.5), (2, 0.1)]), []);
        assert_eq!(back(&[(1, 8.0), (2, 8.0)]), []);
        // 1.25^9 = 7.45.
        assert_eq!(back(&[(1, 8.0), (2, 1.0)]), [(1, 9)]);
        assert_eq!(back(&[(1, 8.0), (2, 0.03)]), [(1, 9)]);
        assert_eq!(back(&[(1, 16.0), (2, 4.0), (3, 2.0)]), [(1, 9), (2, 3)]);
        // Who wants nothing is nobody to yield to.
        assert_eq!(back(&[(1, 8.0), (2, 0.01)]), []);
        assert_eq!(back(&[(1, 1000.0), (2, 1.0)]), [(1, 19)]);
        assert_eq!(back(&[]), []);
    }

    #[test]
    fn the_weights_of_users_threads_together_are_equal_within_a_step() {
        for n in 1..=69 {
            let steps = back(&[(1, n as f64), (2, 1.0)]).first().map_or(0, |(_, steps)| *steps);
            let weight = n as f64 / STEP.powi(steps);
            assert!((1.0 / STEP..=STEP).contains(&weight), "{n} threads, {steps} steps: {weight}");
        }
    }

    #[test]
    fn a_thread_wants_what_it_ran_and_waited_for() {
        assert_eq!(parse("100 50 7\n"), Some(Times { ran: 100, waited: 50 }));
        assert_eq!((parse("100"), parse("x 1 2")), (None, None));
        let at = |ran, waited| Times { ran, waited };
        assert_eq!(part(at(0, 0), at(10, 40), 100), 0.5);
        assert_eq!(part(at(5, 5), at(205, 5), 100), 1.0);
        assert_eq!(part(at(5, 5), at(5, 5), 0), 0.0);
        assert!(times(gettid()).is_some());
    }
}
