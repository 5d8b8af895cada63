//! A child of `fork` that has its parent's handles: its calls are refused, its drops and its exit
//! do nothing, and the parent's queue pairs go on.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushgate::{
    Comm, Context, DeviceBuffer, DeviceEnd, Error, Launch, Module, QpConfig, QueuePair, Region, Settings,
    Shared, Stream, WaitOutcome, proxy, upload_descriptors,
};
use pushgate_tests::hang;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const BYTES: u64 = 1024;

/// One test at a time: a child has the descriptors of everything that is open at its fork.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

// ------------------------------------------------------------------- children

unsafe extern "C" {
    fn fork() -> i32;
}

struct Child(Pid);

/// Forks; `None` in the child.
fn forked() -> Option<Child> {
    // SAFETY: the child has only this thread and leaves through `leave`; the C library keeps its
    // own allocator usable in the child.
    match unsafe { fork() } {
        0 => None,
        pid => Some(Child(Pid::from_raw(pid).expect("a child"))),
    }
}

/// Ends the child, in order and with exit handlers, if `f` does not panic.
fn leave(f: impl FnOnce()) -> ! {
    // The test harness captures output in the parent only.
    std::panic::set_hook(Box::new(|panic| {
        let _ = rustix::io::write(std::io::stderr(), format!("in a child: {panic}\n").as_bytes());
    }));
    let well = catch_unwind(AssertUnwindSafe(f)).is_ok();
    unsafe extern "C" {
        safe fn exit(status: std::ffi::c_int) -> !;
    }
    // Rust's own exit waits for a lock of the standard library that another thread may have held when this process was forked.
    exit(if well { 0 } else { 1 })
}

impl Child {
    fn ends_well(self) {
        let begin = Instant::now();
        loop {
            if let Some((_, status)) = waitpid(Some(self.0), WaitOptions::NOHANG).unwrap() {
                return assert_eq!(status.exit_status(), Some(0), "the child: {status:?}");
            }
            if begin.elapsed() > hang() {
                let _ = kill_process(self.0, Signal::KILL);
                let _ = waitpid(Some(self.0), WaitOptions::empty());
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

// ------------------------------------------------------------------- a program

/// Two ranks of this process with a queue pair, and one of every other handle.
struct Program {
    qps: [QueuePair; 2],
    results: [DeviceBuffer; 2],
    descriptors: [DeviceBuffer; 2],
    streams: [Stream; 2],
    shared: Shared,
    region: Region,
    module: Module,
    comms: Vec<Comm>,
    context: Context,
}

impl Program {
    fn new(more: &[(&str, &str)]) -> Self {
        let mut settings = Settings::default();
        for (name, value) in [("device", "cpu"), ("timeout", "120000")].iter().chain(more) {
            settings.set(name, value).unwrap();
        }
        let context = Context::builder().settings(settings).build().unwrap();
        let comms = Comm::local(&context, 2).unwrap();
        let qps: Vec<QueuePair> = std::thread::scope(|s| {
            let ends = [0, 1].map(|rank: u32| {
                let comm = &comms[rank as usize];
                s.spawn(move || comm.queue_pair(1 - rank, 0, QpConfig::default()).unwrap())
            });
            ends.into_iter().map(|end| end.join().unwrap()).collect()
        });
        let qps: [QueuePair; 2] = qps.try_into().unwrap_or_else(|_| unreachable!("two ends"));
        let descriptors = [0, 1].map(|i: usize| upload_descriptors(&context, [&qps[i]]).unwrap());
        let shared = context.shared("fork-shared", 4096).unwrap();
        let region = qps[0].register_shared(&shared).unwrap();
        Program {
            descriptors,
            results: [(); 2].map(|()| context.alloc(24).unwrap()),
            streams: [(); 2].map(|()| context.stream().unwrap()),
            shared,
            region,
            module: Module::embedded(&context),
            qps,
            comms,
            context,
        }
    }

    /// Sends `count` messages from one end to the other and calls `meanwhile`; checks every byte.
    fn exchange(&self, count: u64, meanwhile: impl FnOnce()) {
        self.results.iter().for_each(|result| result.copy_from_host(&[0; 24]).unwrap());
        let [from, to] = [0, 1].map(|i: usize| [self.descriptors[i].addr(), self.results[i].addr()]);
        let one = Launch::new(1, 1);
        let take = [to[0], to[1], count, BYTES];
        let send = [from[0], from[1], 0, count, BYTES];
        // SAFETY: everything that the kernels use lives until they have ended, below.
        let [taking, sending] = unsafe {
            [
                self.context.launch(&self.streams[1], &self.module, "outside_take", one, &take).unwrap(),
                self.context.launch(&self.streams[0], &self.module, "outside_send", one, &send).unwrap(),
            ]
        };
        meanwhile();
        for running in [taking, sending] {
            assert_eq!(running.wait(Some(hang())).unwrap(), WaitOutcome::Done);
        }
        let mut sent = [0; 8];
        self.results[0].copy_to_host(&mut sent).unwrap();
        assert_eq!(u64::from_ne_bytes(sent), 0, "the sender's status");
        let mut taken = [0; 24];
        self.results[1].copy_to_host(&mut taken).unwrap();
        let taken = taken.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect::<Vec<_>>();
        assert_eq!(taken, [0, count, 0], "status, messages, wrong words");
        self.qps.iter().for_each(|qp| qp.check().unwrap());
    }
}

fn refused<T>(call: &str, result: Result<T, impl Into<Error>>) {
    let error = result.err().unwrap_or_else(|| panic!("{call} is allowed")).into();
    assert!(matches!(error, Error::Forked(_)), "{call}: {error}");
    assert!(error.to_string().contains("open a new context in the child"), "{call}: {error}");
}

/// What a child must find: every call refused, no window mapped.
fn everything_is_refused(p: &Program) {
    let Program { qps, results, streams, shared, region, module, comms, context, .. } = p;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("pushgate-") && !maps.contains("fork-shared"), "{maps}");

    refused("alloc", context.alloc(64));
    refused("upload", context.upload(&[0u64][..]));
    refused("stream", context.stream());
    refused("shared", context.shared("child", 4096));
    refused("counters", context.counters());
    refused("max_resident_blocks", context.max_resident_blocks(module, "outside_send", 1, 0));
    let params = [0u64; 5];
    // SAFETY: the launch is refused and runs nothing.
    refused("launch", unsafe {
        context.launch(&streams[0], module, "outside_send", Launch::new(1, 1), &params)
    });
    refused("copy_to_host", results[0].copy_to_host(&mut [0; 8]));
    refused("copy_from_host", results[0].copy_from_host(&[0; 8]));

    refused("Comm::local", Comm::local(context, 2));
    refused("Comm::connect", Comm::connect(context, "child", 0, 2));
    refused("queue_pair", comms[0].queue_pair(1, 1, QpConfig::default()));
    refused("all_gather", comms[0].all_gather(b"child"));
    refused("barrier", comms[0].barrier());
    refused("Comm::check", comms[0].check());
    comms[0].abort();

    for qp in qps {
        refused("QueuePair::check", qp.check());
        refused("register_shared", qp.register_shared(shared));
        // SAFETY: the call is refused.
        refused("register_buffer", unsafe { qp.register_buffer(&results[0]) });
        refused("deregister", region.deregister());
        refused("QueuePair::abort", qp.abort());
        let _ = (qp.descriptor(), qp.peer(), qp.max_message(), qp.ring_state(), qp.place());
    }
    let words = catch_unwind(AssertUnwindSafe(|| shared.words(0, 1).len()));
    assert!(words.is_err(), "words of memory that is not here");
}

// ----------------------------------------------------------------------- tests

#[test]
fn p8_a_child_is_refused_everything_and_the_parent_goes_on() {
    let _one = alone();
    let program = Program::new(&[]);
    program.exchange(100, || {});
    let Some(child) = forked() else {
        leave(|| {
            everything_is_refused(&program);
            drop(program);
        })
    };
    child.ends_well();
    program.exchange(100, || {});
    assert!(program.region.deregister().unwrap());
    program.comms.iter().for_each(|comm| comm.check().unwrap());
}

#[test]
fn p8_a_child_of_a_program_whose_proxy_is_a_process_is_refused_and_the_parent_goes_on() {
    let _one = alone();
    let name = format!("pushgate-fork-{}", std::process::id());
    let socket = PathBuf::from(format!("@{name}"));
    let stop = proxy::Stop::new().unwrap();
    let rung = stop.try_clone().unwrap();
    let listens = socket.clone();
    let server = std::thread::spawn(move || proxy::run(&listens, rung));
    let begin = Instant::now();
    let place = socket.to_str().unwrap();
    let more = [("proxy", "process"), ("proxy-socket", place)];
    let address = {
        use std::os::linux::net::SocketAddrExt;
        std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap()
    };
    while std::os::unix::net::UnixStream::connect_addr(&address).is_err() {
        assert!(begin.elapsed() < hang(), "the proxy does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let program = Program::new(&more);
    program.exchange(100, || {});
    let Some(child) = forked() else {
        leave(|| {
            everything_is_refused(&program);
            drop(program);
        })
    };
    child.ends_well();
    program.exchange(100, || {});
    drop(program);
    stop.ring();
    server.join().unwrap().unwrap();
}

#[test]
fn p6_children_that_come_and_go_disturb_no_message() {
    let _one = alone();
    let program = Program::new(&[]);
    let mut children = Vec::new();
    program.exchange(20_000, || {
        for i in 0..20 {
            match forked() {
                None if i % 2 == 0 => leave(|| ()),
                // Drops what `program` owns, one value at a time, while the parent's kernels run.
                None => leave(|| {
                    // SAFETY: the child's copy is dropped once, here, and the process ends
                    // afterwards.
                    drop(unsafe { std::ptr::read(&program) });
                }),
                Some(child) => children.push(child),
            }
        }
    });
    children.into_iter().for_each(Child::ends_well);
    program.exchange(100, || {});
}

#[test]
fn p7_a_parent_leaves_in_order_while_a_child_sleeps() {
    let _one = alone();
    let (reads, writes): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
    let program = Program::new(&[]);
    program.exchange(100, || {});
    let Some(child) = forked() else {
        leave(|| {
            drop(writes);
            // Until the parent has finished all of its drops.
            assert_eq!(rustix::io::read(&reads, &mut [0; 1]), Ok(0));
            everything_is_refused(&program);
        })
    };
    drop(program);
    drop(writes);
    child.ends_well();
}

#[test]
fn a_child_opens_a_context_of_its_own() {
    let _one = alone();
    let program = Program::new(&[]);
    let Some(child) = forked() else {
        leave(|| {
            let own = Program::new(&[]);
            own.exchange(1000, || {});
            refused("counters", program.context.counters());
            own.exchange(10, || {});
        })
    };
    program.exchange(1000, || {});
    child.ends_well();
    program.exchange(10, || {});
}
