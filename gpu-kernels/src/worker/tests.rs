//! Tests of the worker, always on the CPU, and also on a GPU where there is one.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_tests::{hang, patience};

use super::KERNEL;
use super::control::{self, Direction, LEASES, Layout};
use super::fault::Fault;
use super::handle::{END_LIMIT, MARK, Worker};
use super::lease::{CountedBy, Lease, OF_A_GRAPH};
use super::options::WorkerOptions;
use super::policy::{AGE, PATIENCE, Phase};
use super::queue::{PostError, Ticket, WorkerQueue};
use crate::choose::{DeviceChoice, choose};
use crate::cuda::tests::no_gpu;
use crate::error::DeviceError;
use crate::executor::{Access, DeviceBuffer, Executor, Launch, Registration, Running, Stream, WaitOutcome};
use crate::lock::lock;
use crate::source::Source;
use crate::{CpuExecutor, CudaExecutor};

/// Held by each test: they measure time and spin, so only one runs at a time.
static ONE: Mutex<()> = Mutex::new(());

fn on_every_device(test: impl Fn(&Arc<dyn Executor>)) {
    static SAID: std::sync::Once = std::sync::Once::new();
    let _one = lock(&ONE);
    test(&choose(DeviceChoice::Cpu).unwrap().0);
    match CudaExecutor::new(0) {
        Err(DeviceError::CudaUnavailable { reason }) => SAID.call_once(|| no_gpu("the copy worker", &reason)),
        opened => test(&(Arc::new(opened.unwrap()) as Arc<dyn Executor>)),
    }
}

fn gpu(executor: &Arc<dyn Executor>) -> bool {
    executor.as_cuda().is_some()
}

/// Random numbers, the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Registered host memory and device memory of the same length.
struct Memory {
    host: SharedMemory,
    seen: Registration,
    device: DeviceBuffer,
}

impl Memory {
    fn new(executor: &Arc<dyn Executor>, bytes: usize) -> Self {
        let host = SharedMemory::builder("worker-test", bytes).create().unwrap();
        let ptr = NonNull::new(host.as_ptr().as_ptr()).unwrap();
        let seen = executor.register(ptr, bytes, Access::ReadWrite, false).unwrap();
        Self { host, seen, device: executor.alloc(bytes).unwrap() }
    }

    fn host_addr(&self) -> u64 {
        self.seen.device_addr()
    }

    fn fill_host(&self, bytes: &[u8]) {
        // SAFETY: within the mapping; no copy is under way.
        unsafe { self.host.as_ptr().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read_host(&self, bytes: &mut [u8]) {
        // SAFETY: within the mapping; no copy is under way.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.host.as_ptr().as_ptr(), bytes.len()) };
    }
}

/// Waits for a copy to complete; fails the test after a limit.
fn finish(queue: &mut WorkerQueue, ticket: Ticket) {
    let began = Instant::now();
    while !queue.done(ticket) {
        queue.health().unwrap();
        assert!(began.elapsed() < hang(), "{queue:?}: {ticket:?} did not end");
        thread::yield_now();
    }
}

/// A few shapes of a worker, small enough for a small machine.
fn shapes(executor: &Arc<dyn Executor>) -> Vec<WorkerOptions> {
    let options = WorkerOptions::of(&**executor);
    let few = WorkerOptions { slots: 32, ..options };
    if gpu(executor) {
        vec![
            options,
            WorkerOptions {
                pushers: 3,
                pushers_beside_pulls: 2,
                bulk: 3000,
                pullers: 1,
                threads: 96,
                push_slice: 1000,
                pull_slice: 700,
                short_pull: 3000,
                ..few
            },
        ]
    } else {
        vec![
            options,
            WorkerOptions {
                pushers: 3,
                pushers_beside_pulls: 2,
                bulk: 3000,
                // Two of them share a short pull, three take turns with short ones, and all share a long one.
                pullers: 5,
                threads: 2,
                push_slice: 1000,
                pull_slice: 700,
                short_pull: 3000,
                short_pull_slice: 500,
                ..few
            },
        ]
    }
}

#[test]
fn copies_of_any_length_and_alignment_are_exact() {
    const BYTES: usize = 1 << 20;
    // Each copy has a place of its own, so that any number can be under way at once.
    const PLACE: usize = 8192;
    on_every_device(|executor| {
        for options in shapes(executor) {
            let (_worker, mut queue) = Worker::new(executor, options).unwrap();
            let memory = [Memory::new(executor, BYTES), Memory::new(executor, BYTES)];
            let mut random = Random(0x9e3779b97f4a7c15);
            for round in 0..if gpu(executor) { 40 } else { 12 } {
                let bytes: [Vec<u8>; 2] =
                    std::array::from_fn(|_| (0..BYTES).map(|_| random.below(256) as u8).collect());
                // Pushes copy from device 0 to host 0, pulls from host 1 to device 1.
                memory[0].device.copy_from_host(&bytes[0]).unwrap();
                memory[0].fill_host(&vec![0xee; BYTES]);
                memory[1].fill_host(&bytes[1]);
                memory[1].device.copy_from_host(&vec![0xee; BYTES]).unwrap();
                let mut expected = [vec![0xee; BYTES], vec![0xee; BYTES]];
                let mut tickets = Vec::new();
                for place in 0..BYTES / PLACE {
                    for (at, direction) in [Direction::Push, Direction::Pull].into_iter().enumerate() {
                        let step = [1, 4, 8, 16][random.below(4) as usize];
                        let mut offset = || place * PLACE + (random.below(64) as usize / step * step);
                        let (device, host) = (offset(), offset());
                        let len = match random.below(6) {
                            0 => random.below(40),
                            4 => 8,
                            5 => 16,
                            1 => random.below(700),
                            _ => random.below(PLACE as u64 - 64),
                        } as usize;
                        let (from, to) = if at == 0 { (device, host) } else { (host, device) };
                        expected[at][to..to + len].copy_from_slice(&bytes[at][from..from + len]);
                        let began = Instant::now();
                        let ticket = loop {
                            let addrs = (
                                memory[at].device.addr() + device as u64,
                                memory[at].host_addr() + host as u64,
                            );
                            let words: Vec<u64> = bytes[at][from..]
                                .chunks_exact(8)
                                .take(len / 8)
                                .map(|b| u64::from_le_bytes(b.try_into().unwrap()))
                                .collect();
                            let is_inline = at == 1 && (len == 8 || len == 16) && addrs.0.is_multiple_of(8);
                            let posted = match is_inline {
                                // SAFETY: within the buffers, which outlive the worker's copies; no
                                // two places overlap.
                                true => unsafe { queue.post_inline(addrs.0, &words) },
                                // SAFETY: within the buffers, which outlive the worker's copies; no
                                // two places overlap.
                                false => unsafe { queue.post(direction, addrs.0, addrs.1, len) },
                            };
                            match posted {
                                Ok(ticket) => break ticket,
                                Err(PostError::Full { .. }) => thread::yield_now(),
                                Err(error) => panic!("{error}"),
                            }
                            assert!(began.elapsed() < hang(), "{queue:?}");
                        };
                        tickets.push(ticket);
                    }
                    if random.below(8) == 0 {
                        let at = random.below(tickets.len() as u64) as usize;
                        finish(&mut queue, tickets[at]);
                    }
                    // Every copy up to the count of passed ones is done.
                    let passed = queue.passed(Direction::Pull);
                    let counted =
                        tickets.iter().filter(|t| t.direction == Direction::Pull && t.index < passed);
                    assert!(counted.copied().all(|t| queue.done(t)));
                }
                for ticket in tickets {
                    finish(&mut queue, ticket);
                }
                let mut got = vec![0; BYTES];
                memory[0].read_host(&mut got);
                assert!(got == expected[0], "pushes of round {round}");
                memory[1].device.copy_to_host(&mut got).unwrap();
                assert!(got == expected[1], "pulls of round {round}");
            }
        }
    });
}

/// Needs a GPU. NCCL's LL128 protocol takes a line of 128 bytes as a whole once the line's last word is there, while the pull that
/// stores the line is still under way. A pull of whole lines must store each of them at once, whatever its length.
#[test]
fn p3_a_kernel_sees_lines_of_128_bytes_that_are_pulled_whole_or_not_at_all() {
    const LINES: usize = 2048;
    const BYTES: usize = LINES * 128;
    let _one = lock(&ONE);
    let executor = match CudaExecutor::new(0) {
        Err(DeviceError::CudaUnavailable { reason }) => return no_gpu("lines of 128 bytes", &reason),
        opened => Arc::new(opened.unwrap()) as Arc<dyn Executor>,
    };
    let module = executor.load_source(&Source::text("lines.cu", include_str!("lines.cu"))).unwrap();
    // Word `j` of a line, as `line_word` in lines.cu makes it.
    let word = |round: u64, line: usize, j: usize| match j {
        15 => round,
        _ => (round << 32 | line as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ j as u64,
    };
    for options in shapes(&executor) {
        let rounds = 2000_u64;
        let (worker, mut queue) = Worker::new(&executor, options).unwrap();
        let memory = Memory::new(&executor, BYTES);
        let result = executor.alloc(24).unwrap();
        let stream = executor.stream().unwrap();
        let limit = hang().as_nanos() as u64;
        let params: Vec<u8> = [memory.device.addr(), LINES as u64, rounds, limit, result.addr()]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        let shape = Launch::new(LINES as u32 / 4 / 8, 256);
        // SAFETY: the parameters are those of the kernel, and what they name outlives the launch, which is waited for below.
        let readers = unsafe { executor.launch(&stream, &module, "watch_lines", shape, &params) }.unwrap();
        let mut random = Random(31);
        for round in 1..=rounds {
            for (i, w) in memory.host.words(0, BYTES / 8).iter().enumerate() {
                w.store(word(round, i / 16, i % 16), Ordering::Relaxed);
            }
            // In messages of 1 to 512 lines, all under way at once.
            let (mut at, mut tickets) = (0, Vec::new());
            while at < BYTES {
                let n = (128 << random.below(10)).min(BYTES - at);
                let (device, host) = (memory.device.addr() + at as u64, memory.host_addr() + at as u64);
                // SAFETY: within the buffers, which outlive the copies.
                match unsafe { queue.post(Direction::Pull, device, host, n) } {
                    Ok(ticket) => {
                        tickets.push(ticket);
                        at += n;
                    }
                    Err(PostError::Full { .. }) => tickets.drain(..).for_each(|t| finish(&mut queue, t)),
                    Err(e) => panic!("{e}"),
                }
            }
            tickets.drain(..).for_each(|t| finish(&mut queue, t));
        }
        assert!(matches!(readers.wait(Some(hang())).unwrap(), WaitOutcome::Done), "{worker:?}");
        let mut said = [0; 24];
        result.copy_to_host(&mut said).unwrap();
        let [torn, seen, late] =
            [0, 8, 16].map(|at| u64::from_le_bytes(said[at..at + 8].try_into().expect("eight bytes")));
        println!("{}: {seen} lines seen of {}, {torn} torn", executor.name(), rounds * LINES as u64);
        assert_eq!((torn, late), (0, 0), "{seen} lines seen");
        assert!(seen > LINES as u64, "the readers saw the last round alone: {seen} lines");
    }
}

/// Copies a number to the device and back, and checks it.
fn echo(queue: &mut WorkerQueue, memory: &Memory, value: u64) {
    let (there, back) = (memory.host_addr(), memory.host_addr() + 64);
    memory.host.words(0, 1)[0].store(value, Ordering::Relaxed);
    // SAFETY: within the buffers, which outlive the copies.
    let pull = unsafe { queue.post(Direction::Pull, memory.device.addr(), there, 8) }.unwrap();
    finish(queue, pull);
    // SAFETY: within the buffers, which outlive the copies.
    let push = unsafe { queue.post(Direction::Push, memory.device.addr(), back, 8) }.unwrap();
    finish(queue, push);
    assert_eq!(memory.host.words(64, 1)[0].load(Ordering::Relaxed), value);
}

#[test]
fn commands_and_leases_meet_a_worker_that_leaves() {
    on_every_device(|executor| {
        let options = WorkerOptions {
            linger: Duration::ZERO,
            linger_on_demand: Duration::from_micros(30),
            ..WorkerOptions::of(&**executor)
        };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        let memory = Memory::new(executor, 4096);
        let stream = executor.stream().unwrap();
        let raw = stream.raw().unwrap_or(1);
        let mut random = Random(42);
        let before = worker.starts();
        for cycle in 0..3000 {
            // Now and then with a lease, mostly without, after a pause about as long as the worker
            // lingers.
            let lease = (random.below(3) == 0).then(|| worker.lease(raw).unwrap());
            assert!(lease.as_ref().is_none_or(Lease::is_counted));
            echo(&mut queue, &memory, cycle);
            if let Some(lease) = lease {
                worker.lease_done(lease, raw).unwrap();
            }
            let pause = Duration::from_nanos(random.below(if gpu(executor) { 100_000 } else { 400_000 }));
            let began = Instant::now();
            while began.elapsed() < pause {
                thread::yield_now();
            }
        }
        println!("{}: {} starts", executor.name(), worker.starts() - before);
        assert!(worker.starts() - before > 100, "{worker:?}: it never left");
        assert!(worker.wait_gone(hang()).unwrap());
    });
}

#[test]
fn p7_a_worker_makes_way_for_a_launch_and_returns_for_a_lease() {
    on_every_device(|executor| {
        let (worker, mut queue) = Worker::new(executor, WorkerOptions::of(&**executor)).unwrap();
        let memory = Memory::new(executor, 4096);
        let streams: Vec<Stream> = (0..6).map(|_| executor.stream().unwrap()).collect();
        let raw = |at: usize| streams[at].raw().unwrap_or(at as u64 + 1);
        assert!(!worker.is_present());
        let leases: Vec<Lease> = (0..6).map(|at| worker.lease(raw(at)).unwrap()).collect();
        echo(&mut queue, &memory, 7);
        // A launch may wait for the worker: as long as no launch has been reported as made, the
        // worker does not stay.
        assert!(worker.wait_gone(hang()).unwrap());
        let starts = worker.starts();
        for (at, lease) in leases.into_iter().enumerate() {
            worker.lease_done(lease, raw(at)).unwrap();
        }
        assert!(worker.starts() > starts, "it did not come back for what was launched");
        let began = Instant::now();
        assert!(worker.wait_gone(hang()).unwrap());
        println!("{}: gone {:?} after the last lease", executor.name(), began.elapsed());
        // Without a lease: the worker stays for a while only.
        echo(&mut queue, &memory, 8);
        assert!(worker.wait_gone(hang()).unwrap());
        // More streams than there are words; the last ones are not counted.
        let many: Vec<Lease> = (0..LEASES + 2)
            .map(|at| worker.lease(if gpu(executor) { raw(at % 6) } else { 100 + at as u64 }).unwrap())
            .collect();
        let counted = many.iter().filter(|lease| lease.is_counted()).count();
        assert_eq!(counted, if gpu(executor) { LEASES + 2 } else { LEASES - 1 });
        for (at, lease) in many.into_iter().enumerate() {
            worker.lease_done(lease, if gpu(executor) { raw(at % 6) } else { 100 + at as u64 }).unwrap();
        }
        assert!(worker.wait_gone(hang()).unwrap());
    });
}

#[test]
fn a_worker_stays_between_operations_in_a_row_and_leaves_after_a_single_one() {
    on_every_device(|executor| {
        let long = 6 * hang();
        let options =
            WorkerOptions { linger: long, linger_alone: Duration::ZERO, ..WorkerOptions::of(&**executor) };
        let (worker, _queue) = Worker::new(executor, options).unwrap();
        let stream = executor.stream().unwrap();
        let raw = stream.raw().unwrap_or(1);
        let operation = || worker.lease_done(worker.lease(raw).unwrap(), raw).unwrap();
        operation();
        assert!(worker.wait_gone(hang()).unwrap(), "the first is alone");
        // Operations in a row: the first one is recent enough, given this long linger.
        operation();
        assert!(!worker.wait_gone(Duration::from_millis(300)).unwrap());
    });
}

#[test]
fn launches_of_graphs_and_of_the_host_take_turns() {
    on_every_device(|executor| {
        let options = WorkerOptions {
            // If the test fails, a thread that waits for the worker's end is released after this
            // limit.
            limit: hang(),
            linger: Duration::ZERO,
            linger_on_demand: Duration::from_micros(30),
            ..WorkerOptions::of(&**executor)
        };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        let module = executor.load_embedded().unwrap();
        let memory = Memory::new(executor, 4096);
        let streams: Vec<Stream> = (0..4).map(|_| executor.stream().unwrap()).collect();
        let raws = [0, 1, 3].map(|at: usize| streams[at].raw().unwrap_or(at as u64 + 2));
        let shared = &worker.shared;
        // Launches the worker as a graph's replay would.
        let begin = |at: usize| {
            let params = shared.params(OF_A_GRAPH, Duration::from_micros(5));
            // SAFETY: rings, words and mailboxes belong to the worker, and every launch has ended
            // before the worker is dropped, below.
            unsafe { executor.launch(&streams[at], &module, KERNEL, shared.options.shape(), &params) }
                .unwrap()
        };
        let closed = (shared.device.addr() + Layout::GRAPHS_CLOSED).to_le_bytes();
        let end = |at: usize| {
            // SAFETY: the word belongs to the worker, and every launch has ended before the worker
            // is dropped.
            unsafe { executor.launch(&streams[at], &module, MARK, Launch::new(1, 1), &closed) }.unwrap()
        };
        let ends = |run: &Running| {
            assert!(matches!(run.wait(Some(hang())).unwrap(), WaitOutcome::Done), "{worker:?}");
        };
        // One launch stays for the operations of both graphs, and then perhaps one of the host's.
        // Which of the two graphs' launches stays can't be known, nor whether its blocks come from
        // both.
        let two = [begin(0), begin(1)];
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(100));
            let serve = !two.iter().all(|run| run.is_done().unwrap());
            assert!(serve || worker.is_present(), "an operation is under way");
            ends(&end(2));
        }
        two.iter().for_each(ends);
        assert!(worker.wait_gone(hang()).unwrap());
        // Nothing is copied and no lease is open: a graph's launch does not keep its graph
        // incomplete for other graphs' operations, which may wait for work behind that graph.
        ends(&begin(0));
        assert!(!worker.wait_gone(Duration::from_millis(100)).unwrap(), "it stays for the graph's operation");
        ends(&end(2));
        assert!(worker.wait_gone(hang()).unwrap());
        // A launch of the host's takes over: the graph completes without its mark. A lease whose
        // operation stands behind the graph in the graph's own stream may need that.
        let first = streams[0].raw().unwrap_or(2);
        let one = begin(0);
        let lease = worker.lease(first).unwrap();
        worker.lease_done(lease, first).unwrap();
        ends(&one);
        echo(&mut queue, &memory, 1);
        assert!(!worker.wait_gone(Duration::from_millis(100)).unwrap(), "it stays for the graph's operation");
        ends(&end(2));
        assert!(worker.wait_gone(hang()).unwrap());
        let mut random = Random(7);
        let mut runs: Vec<Running> = Vec::new();
        for cycle in 0..500 {
            // The marks are on another stream, so some run before the operation that they end.
            let open = random.below(3) as usize;
            runs.extend((0..open).map(|at| begin((at + cycle) % 2)));
            // In one stream with the graphs' launches, before or behind them, or in a stream of its
            // own.
            let raw = raws[random.below(3) as usize];
            let lease = (random.below(3) == 0).then(|| worker.lease(raw).unwrap());
            if random.below(4) > 0 {
                echo(&mut queue, &memory, cycle as u64);
            }
            if let Some(lease) = lease {
                worker.lease_done(lease, raw).unwrap();
            }
            runs.extend((0..open).map(|_| end(2)));
            if runs.len() > 12 {
                runs.drain(..).for_each(|run| ends(&run));
            }
        }
        runs.iter().for_each(ends);
        assert!(worker.wait_gone(hang()).unwrap());
    });
}

#[test]
fn p7_a_launch_waits_for_its_turn_no_longer_than_the_limit() {
    on_every_device(|executor| {
        let limit = Duration::from_millis(300);
        let (worker, mut queue) =
            Worker::new(executor, WorkerOptions { limit, ..WorkerOptions::of(&**executor) }).unwrap();
        let memory = Memory::new(executor, 4096);
        // Makes a launch that never ends have the turn. The words are: forwarded pushes, forwarded
        // pulls, the launch that stops, the launch that has the turn.
        let turn = |number: u64| {
            // A launch gives the turn back only after its last word to the host.
            let began = Instant::now();
            while !worker.shared.ended().unwrap() {
                assert!(began.elapsed() < hang(), "{worker:?}");
                thread::yield_now();
            }
            let words: Vec<u8> = [0, 0, 2, number].iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
            worker.shared.device.copy_from_host(&words).unwrap();
        };
        turn(99);
        let stream = executor.stream().unwrap();
        let raw = stream.raw().unwrap_or(1);
        let began = Instant::now();
        let lease = worker.lease(raw).unwrap();
        assert!(!worker.wait_gone(limit / 3).unwrap() || began.elapsed() >= limit, "it waits");
        assert!(worker.wait_gone(hang()).unwrap());
        worker.lease_done(lease, raw).unwrap();
        assert!(worker.wait_gone(hang()).unwrap());
        turn(0);
        echo(&mut queue, &memory, 5);
    });
}

#[test]
fn a_launch_that_has_served_for_long_is_relieved() {
    on_every_device(|executor| {
        let long = 6 * hang();
        let options = WorkerOptions { linger: long, linger_alone: long, ..WorkerOptions::of(&**executor) };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        let memory = Memory::new(executor, 4096);
        let stream = executor.stream().unwrap();
        let raw = stream.raw().unwrap_or(1);
        let before = worker.starts();
        let began = Instant::now();
        let mut value = 0;
        // Without relief the worker would stay between these operations. (The loop runs longer on a
        // busy machine.)
        while began.elapsed() < 8 * AGE || worker.starts() - before < 2 {
            assert!(began.elapsed() < hang(), "the launch is not relieved");
            let lease = worker.lease(raw).unwrap();
            value += 1;
            echo(&mut queue, &memory, value);
            worker.lease_done(lease, raw).unwrap();
        }
        let (starts, time) = (worker.starts() - before, began.elapsed());
        assert!(starts as u128 <= 2 + time.as_nanos() / AGE.as_nanos(), "{starts} starts in {time:?}");
        // Before the memory is freed, because freeing waits for everything that runs.
        drop(worker);
    });
}

#[test]
fn a_command_posted_without_a_wakeup_is_still_executed() {
    on_every_device(|executor| {
        let (worker, mut queue) = Worker::new(executor, WorkerOptions::of(&**executor)).unwrap();
        let memory = Memory::new(executor, 4096);
        assert!(worker.wait_gone(hang()).unwrap());
        memory.host.words(0, 1)[0].store(77, Ordering::Relaxed);
        queue.write(Direction::Pull, [memory.device.addr(), memory.host_addr(), 8, 1 << 16]);
        let began = Instant::now();
        while queue.passed(Direction::Pull) < 1 {
            assert!(began.elapsed() < hang(), "{worker:?}");
            thread::yield_now();
        }
        let mut found = [0; 8];
        memory.device.copy_to_host(&mut found).unwrap();
        assert_eq!(u64::from_le_bytes(found), 77);
    });
}

#[test]
fn the_devices_words_and_phases_are_the_kernels() {
    let source = include_str!("../../kernels/worker.cu");
    for (name, value) in [
        ("closed_at", control::CLOSED_AT),
        ("passed_at", control::PASSED_AT),
        ("fates", control::FATES),
        ("phase_running", Phase::RUNNING as usize),
        ("phase_leaving", Phase::LEAVING as usize),
        ("phase_left", Phase::LEFT as usize),
    ] {
        let says = format!("{name} = {value}");
        assert!(source.contains(&format!("{says},")) || source.contains(&format!("{says};")), "not {says}");
    }
}

#[test]
fn many_threads_lease_at_once() {
    on_every_device(|executor| {
        let options = WorkerOptions { linger: Duration::ZERO, ..WorkerOptions::of(&**executor) };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        let memory = Memory::new(executor, 4096);
        thread::scope(|scope| {
            for at in 0..4 {
                let worker = &worker;
                scope.spawn(move || {
                    let stream = executor.stream().unwrap();
                    let raw = stream.raw().unwrap_or(at + 1);
                    for _ in 0..300 {
                        let lease = worker.lease(raw).unwrap();
                        worker.lease_done(lease, raw).unwrap();
                        thread::sleep(Duration::from_micros(50 * at));
                    }
                });
            }
            for value in 0..500 {
                echo(&mut queue, &memory, value);
            }
        });
        assert!(worker.wait_gone(hang()).unwrap());
    });
}

#[test]
fn p7_a_lease_that_never_ends_keeps_the_worker_no_longer_than_its_limit() {
    on_every_device(|executor| {
        let options = WorkerOptions { limit: Duration::from_millis(60), ..WorkerOptions::of(&**executor) };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        let memory = Memory::new(executor, 4096);
        let began = Instant::now();
        let lease = worker.lease(1).unwrap();
        assert!(worker.is_present() || began.elapsed() >= options.limit);
        assert!(worker.wait_gone(hang()).unwrap());
        // The worker still comes when a command needs it.
        echo(&mut queue, &memory, 5);
        assert!(worker.wait_gone(hang()).unwrap());
        drop(lease);
    });
}

#[test]
fn a_full_ring_says_so_and_a_worker_that_is_dropped_ends_its_queue() {
    on_every_device(|executor| {
        let options = WorkerOptions { slots: 32, ..WorkerOptions::of(&**executor) };
        let (worker, mut queue) = Worker::new(executor, options).unwrap();
        const BYTES: usize = 64 << 20;
        let memory = Memory::new(executor, BYTES);
        let mut posted = 0;
        let full = loop {
            // SAFETY: within the buffers; the copies write the same bytes.
            match unsafe { queue.post(Direction::Push, memory.device.addr(), memory.host_addr(), BYTES) } {
                Ok(_) => posted += 1,
                Err(error) => break error,
            }
            assert!(posted < 1000, "never full");
        };
        assert!(matches!(full, PostError::Full { slots: 32 }) && posted >= 32, "{full} after {posted}");
        // SAFETY: the copy is refused.
        let wrong = unsafe { queue.post(Direction::Push, 1 << 57, 0, 8) };
        assert!(matches!(wrong, Err(PostError::Range { .. })), "{wrong:?}");
        let _lease = worker.lease(1).unwrap();
        // Drop the worker while it is busy and a lease is open.
        drop(worker);
        // SAFETY: the copy is refused.
        let lost = unsafe { queue.post(Direction::Pull, memory.device.addr(), memory.host_addr(), 8) };
        assert!(matches!(lost, Err(PostError::Lost { .. })), "{lost:?}");
        drop(queue);
        let (_worker, mut queue) = Worker::new(executor, options).unwrap();
        echo(&mut queue, &memory, 1);
    });
}

#[test]
fn options_out_of_bounds_are_named() {
    let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
    let good = WorkerOptions::of(&*executor);
    for (what, options) in [
        ("pushers", WorkerOptions { pushers: 0, ..good }),
        ("pushers_beside_pulls", WorkerOptions { pushers_beside_pulls: 0, ..good }),
        ("pullers", WorkerOptions { pullers: 257, ..good }),
        ("threads", WorkerOptions { threads: 545, ..good }),
        ("slots", WorkerOptions { slots: 48, ..good }),
        ("push_slice", WorkerOptions { push_slice: 0, ..good }),
        ("pull_slice", WorkerOptions { pull_slice: 0, ..good }),
        ("short_pull_slice", WorkerOptions { short_pull_slice: 0, ..good }),
    ] {
        let error = Worker::new(&executor, options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

// ------------------------------------------------------------------- its end

/// Copies until a copy fails, and returns the error's text. Each wait has a limit.
fn until_lost(queue: &mut WorkerQueue, memory: &Memory) -> String {
    let began = Instant::now();
    loop {
        // SAFETY: within the buffers, which outlive the worker.
        let ticket =
            match unsafe { queue.post(Direction::Push, memory.device.addr(), memory.host_addr(), 64) } {
                Ok(ticket) => ticket,
                Err(PostError::Lost { reason }) => return reason,
                Err(error) => panic!("{error}"),
            };
        while !queue.done(ticket) {
            if let Err(PostError::Lost { reason }) = queue.health() {
                return reason;
            }
            assert!(began.elapsed() < hang(), "{queue:?}: waits for ever");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

#[test]
fn p7_a_wait_for_a_worker_that_died_fails_with_the_cause() {
    let silent = || Fault::Silent { generation: 2 };
    let context = || Fault::Context { generation: 2 };
    for (fault, cause) in [
        (silent as fn() -> Fault, "ended without announcing it"),
        (context, "CUDA_ERROR_LAUNCH_FAILED (719)"),
    ] {
        on_every_device(|executor| {
            let options = WorkerOptions { linger_on_demand: 6 * hang(), ..WorkerOptions::of(&**executor) };
            let (worker, mut queue) = Worker::with_fault(executor, options, Some(fault())).unwrap();
            let memory = Memory::new(executor, 4096);
            let reason = until_lost(&mut queue, &memory);
            assert!(reason.contains(cause), "{reason}");
            let lost = worker.lost().unwrap();
            assert!(lost.ended && lost.reason == reason, "{lost:?}");
            // Leases fail too, instead of waiting.
            let refused = worker.lease(1).map(|_| ()).unwrap_err();
            assert!(matches!(refused, DeviceError::Lost { .. }) && refused.is_final(), "{refused}");
            assert!(matches!(worker.wait_gone(hang()), Err(DeviceError::Lost { .. })));
            let began = Instant::now();
            drop(worker);
            assert!(began.elapsed() < END_LIMIT, "it waited all the time there is: {:?}", began.elapsed());
        });
    }
}

#[test]
fn p7_a_launch_that_fails_for_a_while_is_tried_again_and_not_for_ever() {
    on_every_device(|executor| {
        let start = |times: u64| {
            let fault = Fault::Refused { first: 2, left: times.into() };
            Worker::with_fault(executor, WorkerOptions::of(&**executor), Some(fault)).unwrap()
        };
        let memory = Memory::new(executor, 4096);
        // First on demand, then by a lease, which returns the error and leaves the retries to the
        // keeper.
        for leased in [false, true] {
            let (worker, mut queue) = start(3);
            if leased {
                let refused = worker.lease(1).map(|_| ()).unwrap_err();
                assert!(refused.to_string().contains("(701)") && !refused.is_final(), "{refused}");
            }
            echo(&mut queue, &memory, 3);
            assert!(worker.lost().is_none());
        }
        let (worker, mut queue) = start(u64::MAX);
        let began = Instant::now();
        let reason = until_lost(&mut queue, &memory);
        assert!(reason.contains("(701)") && reason.contains("times in"), "{reason}");
        assert!(began.elapsed() >= PATIENCE, "{:?}", began.elapsed());
        assert!(worker.lost().unwrap().ended);
    });
}

#[test]
fn a_first_start_that_fails_for_a_while_is_tried_again() {
    on_every_device(|executor| {
        let fault = Fault::Refused { first: 1, left: 3.into() };
        let (_worker, mut queue) =
            Worker::with_fault(executor, WorkerOptions::of(&**executor), Some(fault)).unwrap();
        echo(&mut queue, &Memory::new(executor, 4096), 9);
    });
}

/// Makes a worker whose launches, from the second on, take longer than a busy machine keeps a
/// thread waiting.
fn late(executor: &Arc<dyn Executor>) -> (Worker, WorkerQueue) {
    let fault = Fault::Late { first: 2, by: patience(Duration::from_secs(1)) };
    Worker::with_fault(executor, WorkerOptions::of(&**executor), Some(fault)).unwrap()
}

#[test]
fn a_lease_waits_for_a_launch_that_another_thread_has_begun() {
    on_every_device(|executor| {
        let (worker, _queue) = late(executor);
        let streams = [executor.stream().unwrap(), executor.stream().unwrap()];
        let [one, two] = [0, 1].map(|at: usize| streams[at].raw().unwrap_or(at as u64 + 1));
        thread::scope(|scope| {
            let first = scope.spawn(|| worker.lease(one).unwrap());
            let began = Instant::now();
            while worker.starts() < 2 {
                assert!(began.elapsed() < hang());
                thread::yield_now();
            }
            assert_eq!(worker.shared.control.flags.started(), 1, "the launch is not slow");
            // What this thread launches next must run after the worker's launch.
            let second = worker.lease(two).unwrap();
            assert_eq!(worker.shared.control.flags.started(), 2, "the lease came before the launch");
            for (lease, stream) in [(first.join().unwrap(), one), (second, two)] {
                worker.lease_done(lease, stream).unwrap();
            }
        });
    });
}

#[test]
fn a_worker_that_made_way_for_a_launch_is_back_before_the_mark() {
    on_every_device(|executor| {
        let (worker, _queue) = late(executor);
        let stream = executor.stream().unwrap();
        let raw = stream.raw().unwrap_or(1);
        let lease = worker.lease(raw).unwrap();
        let Lease(CountedBy::Words(at)) = lease else { panic!("{lease:?}") };
        let done = || worker.shared.control.word(worker.shared.lease_word(at, true)).load(Ordering::Acquire);
        assert!(worker.wait_gone(hang()).unwrap());
        let marked = done();
        thread::scope(|scope| {
            let over = scope.spawn(|| worker.lease_done(lease, raw).unwrap());
            let began = Instant::now();
            loop {
                // Read in this order: a mark that is seen here implies a launch that is seen there.
                let now = done();
                if worker.shared.control.flags.started() == 3 {
                    break;
                }
                assert_eq!(now, marked, "the mark came before the worker's launch");
                assert!(began.elapsed() < hang());
                thread::yield_now();
            }
            over.join().unwrap();
        });
        let began = Instant::now();
        while done() != marked + 1 {
            assert!(began.elapsed() < hang(), "no mark");
            thread::yield_now();
        }
    });
}

// ------------------------------------------------------------ a busy program

/// The driver's functions, called as a program's own threads call them.
struct DriverCalls(libloading::Library);

impl DriverCalls {
    fn call<T: Copy>(&self, name: &str) -> T {
        // SAFETY: each caller gives the type that cuda.h has.
        *unsafe { self.0.get::<T>(name.as_bytes()) }.unwrap()
    }
}

const CHILD: &str = "_PUSHGATE_TEST_WORKER";

/// Waits until another thread's launches block; returns how many it has made.
fn until_no_more_go_in(launched: &AtomicU64) -> u64 {
    let (began, mut before) = (Instant::now(), 0);
    loop {
        thread::sleep(patience(Duration::from_millis(300)));
        let now = launched.load(Ordering::Relaxed);
        if now == before && now > 0 {
            return now;
        }
        before = now;
        assert!(began.elapsed() < hang());
    }
}

/// Runs in processes of its own, once with one hardware queue and once with the usual number.
#[test]
#[ignore = "another test starts this in processes of its own"]
fn child() {
    assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
    // SAFETY: the driver's own library, which is loaded already.
    let driver = DriverCalls(unsafe { libloading::Library::new("libcuda.so.1") }.unwrap());
    let executor: Arc<dyn Executor> = Arc::new(CudaExecutor::new(0).unwrap());
    let (worker, mut queue) = Worker::new(&executor, WorkerOptions::of(&*executor)).unwrap();
    let module = executor.load_embedded().unwrap();
    let memory = Memory::new(&executor, 1 << 20);
    let flags = Memory::new(&executor, 4096);
    let bytes: Vec<u8> = (0..1 << 20).map(|i| (i * 7 % 251) as u8).collect();
    let (stream, other) = (executor.stream().unwrap(), executor.stream().unwrap());
    let params = |rounds: u64| -> Vec<u8> {
        [flags.host_addr(), flags.host_addr() + 64, 0, rounds].iter().flat_map(|w| w.to_le_bytes()).collect()
    };
    let launch = |stream: &Stream, rounds| {
        // SAFETY: the words are registered and outlive the kernel.
        unsafe { executor.launch(stream, &module, "bare_echo", Launch::new(1, 32), &params(rounds)) }.unwrap()
    };
    drop(launch(&stream, 0)); // whatever a first launch costs

    // With one hardware queue, a worker that comes late stands behind all that was queued before:
    // there is no promise on demand then.
    let one_queue = std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_some();
    for on_demand in if one_queue { &[false][..] } else { &[false, true] } {
        let on_demand = *on_demand;
        flags.host.words(0, 1)[0].store(0, Ordering::Relaxed);
        memory.fill_host(&bytes);
        memory.device.copy_from_host(&[0; 1 << 20]).unwrap();
        // As a library's hooks would call it: lease, the library's kernel that waits for copies,
        // mark.
        let raw = stream.raw().unwrap();
        let lease = (!on_demand).then(|| worker.lease(raw).unwrap());
        let waiting = launch(&stream, 1);
        if let Some(lease) = lease {
            assert!(lease.is_counted());
            worker.lease_done(lease, raw).unwrap();
        }
        let launched = AtomicU64::new(0);
        thread::scope(|scope| {
            // On demand, the copies must be made before the queue is full.
            if !on_demand {
                scope.spawn(|| {
                    // Launches queue up behind the kernel that waits, each behind the one before.
                    let mut runs = Vec::new();
                    for _ in 0..2000 {
                        runs.push(launch(&stream, 0));
                        launched.fetch_add(1, Ordering::Relaxed);
                    }
                });
                let before = until_no_more_go_in(&launched);
                println!("{before} of 2000 launched, and no more");
            }
            let began = Instant::now();
            let mut last = None;
            for at in 0..64 {
                let offset = at * (1 << 14);
                let (device, host) = (memory.device.addr() + offset, memory.host_addr() + offset);
                // SAFETY: within the buffers; the push is posted after the pull's end.
                let pull = unsafe { queue.post(Direction::Pull, device, host, 1 << 14) }.unwrap();
                finish(&mut queue, pull);
                // SAFETY: within the buffers; the push is posted after the pull's end.
                last = Some(unsafe { queue.post(Direction::Push, device, host, 1 << 14) }.unwrap());
            }
            finish(&mut queue, last.unwrap());
            println!("on demand: {on_demand}; 64 x 16 KiB there and back in {:?}", began.elapsed());
            assert!(!waiting.is_done().unwrap());
            if on_demand {
                return;
            }
            flags.host.words(0, 1)[0].store(1, Ordering::Release);
        });
        flags.host.words(0, 1)[0].store(1, Ordering::Release);
        let mut got = vec![0; 1 << 20];
        memory.read_host(&mut got);
        assert!(got == bytes);
        let began = Instant::now();
        let synchronize: extern "C" fn() -> u32 = driver.call("cuCtxSynchronize");
        let push: extern "C" fn(u64) -> u32 = driver.call("cuCtxPushCurrent_v2");
        let retain: extern "C" fn(&mut u64, i32) -> u32 = driver.call("cuDevicePrimaryCtxRetain");
        let mut context = 0;
        assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
        assert_eq!(synchronize(), 0);
        let took = began.elapsed();
        println!("synchronised in {took:?}");
        assert!(took < hang());
        assert!(worker.wait_gone(hang()).unwrap());
    }

    // Measures what the worker adds to a synchronisation right after an operation.
    let synchronize: extern "C" fn() -> u32 = driver.call("cuCtxSynchronize");
    let raw = other.raw().unwrap();
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..200 {
        let began = Instant::now();
        let lease = (round % 2 == 0).then(|| worker.lease(raw).unwrap());
        let run = launch(&other, 0);
        if let Some(lease) = lease {
            worker.lease_done(lease, raw).unwrap();
        }
        assert_eq!(synchronize(), 0);
        times[round % 2].push(began.elapsed());
        drop(run);
    }
    times.iter_mut().for_each(|t| t.sort());
    println!("launch and synchronise: {:?} with the worker, {:?} without", times[0][50], times[1][50]);

    // A stream that captures: the worker and its mark become part of the graph, and no lease is
    // counted.
    let begin: extern "C" fn(u64, u32) -> u32 = driver.call("cuStreamBeginCapture_v2");
    let end: extern "C" fn(u64, &mut u64) -> u32 = driver.call("cuStreamEndCapture");
    let nodes: extern "C" fn(u64, u64, &mut usize) -> u32 = driver.call("cuGraphGetNodes");
    let wait: extern "C" fn(u64, u64, u64, u32) -> u32 = driver.call("cuStreamWaitValue64_v2");
    let instantiate: extern "C" fn(&mut u64, u64, u64) -> u32 = driver.call("cuGraphInstantiateWithFlags");
    let replay: extern "C" fn(u64, u64) -> u32 = driver.call("cuGraphLaunch");
    flags.device.copy_from_host(&[0; 8]).unwrap();
    assert_eq!(begin(raw, 0), 0);
    let lease = worker.lease(raw).unwrap();
    assert!(lease.is_counted());
    // The operation waits until the word in the device's memory is 1 or more.
    assert_eq!(wait(raw, flags.device.addr(), 1, 0), 0);
    worker.lease_done(lease, raw).unwrap();
    // Another stream's lease, and copies on demand, while this stream captures.
    let second = stream.raw().unwrap();
    let lease = worker.lease(second).unwrap();
    assert!(lease.is_counted());
    echo(&mut queue, &memory, 77);
    worker.lease_done(lease, second).unwrap();
    assert!(worker.wait_gone(hang()).unwrap());
    echo(&mut queue, &memory, 78);
    let (mut graph, mut count, mut exec) = (0, 9, 0);
    assert_eq!((end(raw, &mut graph), nodes(graph, 0, &mut count)), (0, 0));
    assert_eq!(count, 3);
    assert_eq!(instantiate(&mut exec, graph, 0), 0);
    assert!(worker.wait_gone(hang()).unwrap());
    // Replays until no more fit, and no replay ends before a copy; a launch would block.
    let launched = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let push: extern "C" fn(u64) -> u32 = driver.call("cuCtxPushCurrent_v2");
            let retain: extern "C" fn(&mut u64, i32) -> u32 = driver.call("cuDevicePrimaryCtxRetain");
            let mut context = 0;
            assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
            for _ in 0..2000 {
                assert_eq!(replay(exec, raw), 0);
                launched.fetch_add(1, Ordering::Relaxed);
            }
        });
        let before = until_no_more_go_in(&launched);
        println!("{before} of 2000 replays, and no more");
        flags.host.words(0, 1)[0].store(1, Ordering::Relaxed);
        // SAFETY: within the buffers, which outlive the worker.
        let pull = unsafe { queue.post(Direction::Pull, flags.device.addr(), flags.host_addr(), 8) }.unwrap();
        finish(&mut queue, pull);
    });
    assert_eq!(synchronize(), 0);
    echo(&mut queue, &memory, 79);

    // Memory that is freed while the worker is present waits until the worker has left.
    let lease = worker.lease(second).unwrap();
    drop(executor.alloc(1 << 20).unwrap());
    worker.lease_done(lease, second).unwrap();
    println!("CHILD fine");
}

#[test]
fn copies_are_made_while_launches_block() {
    let _one = lock(&ONE);
    if let Err(reason) = crate::probe() {
        return no_gpu("copies_are_made_while_launches_block", &reason);
    }
    for connections in [Some("1"), None] {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "worker::tests::child", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(CHILD, "1").env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        command.envs(connections.map(|n| ("CUDA_DEVICE_MAX_CONNECTIONS", n)));
        let output = command.output().unwrap();
        let text =
            [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned()).concat();
        println!("CUDA_DEVICE_MAX_CONNECTIONS {connections:?}: {text}");
        assert!(text.contains("CHILD fine"));
    }
}
