//! Which cores a rank runs on, and how long its threads have run.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds this process, which is rank `rank` of two, to `count` of the cores that it may use, other ones than the
/// other rank's where there are enough. 0: the process keeps all of them. To be called while there is one thread.
pub fn bind(rank: usize, count: usize) {
    if count == 0 {
        return;
    }
    let may = sched_getaffinity(None).expect("the cores of this process");
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| may.is_set(*core)).collect();
    let mut own = CpuSet::new();
    (0..count).for_each(|i| own.set(all[(rank * count + i) % all.len()]));
    sched_setaffinity(None, &own).expect("cores that this process may use");
}

/// Nanoseconds for which this process's threads have run so far: those that the plugin has started, and the others.
/// This project's plugin names its threads `pushgate-...`; threads of another plugin count as others.
pub fn run_times() -> [u64; 2] {
    let mut times = [0; 2];
    for task in std::fs::read_dir("/proc/self/task").expect("the threads of this process") {
        let task = task.expect("a thread of this process").path();
        // A thread that ended meanwhile has no files any more.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        let run: u64 =
            read("schedstat").split_whitespace().next().map_or(0, |ns| ns.parse().expect("nanoseconds"));
        times[usize::from(!read("comm").starts_with("pushgate-"))] += run;
    }
    times
}
