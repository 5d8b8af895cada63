//! Tests the device API through the whole stack: kernels of tests/kernels, the public API, the
//! engine, the `local` queue pair. Always on the CPU, and on a GPU where there is one.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use pushgate::settings::DeviceChoice;
use pushgate::{
    Comm, Context, Counters, DeviceBuffer, Error, Launch, Module, QpConfig, QueuePair, Running, Settings,
    Source, Stream, WaitOutcome, abi, proxy, status_name, upload_descriptors,
};
use pushgate_tests::{built, hang, patience, wait_until};

// ------------------------------------------------------------------- harness

/// Held by each test: tests spin, and some measure time, so one runs at a time.
static ONE: Mutex<()> = Mutex::new(());

fn on_every_device(test: impl Fn(DeviceChoice)) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);

    test(DeviceChoice::Cpu);
    match pushgate::probe_cuda() {
        Ok(_) => {
            test(DeviceChoice::Cuda);
        }
        Err(why) => {
            static SAID: Once = Once::new();
            SAID.call_once(|| pushgate_tests::skip(&format!("no GPU: {why}")));
        }
    }
}

/// Two ranks of this process on one context.
struct Rig {
    script: Module,
    crowd: Module,
    ranks: [Comm; 2],
    label: Cell<u32>,
    context: Context,
}

impl Rig {
    fn new(device: DeviceChoice, with: &[(&str, &str)]) -> Rig {
        let mut settings = Settings::default();
        settings.device = device;
        settings.timeout = hang();
        for (name, value) in with {
            settings.set(name, value).unwrap();
        }
        let context = Context::builder().settings(settings).build().unwrap();
        let load = |name: &str| {
            let path = built::root().join("tests/kernels").join(name);
            Module::from_source(&context, &Source::path(path).unwrap()).unwrap()
        };
        let (script, crowd) = (load("script.cu"), load("crowd.cu"));
        let ranks = Comm::local(&context, 2).unwrap().try_into().ok().expect("two ranks");
        Rig { script, crowd, ranks, label: Cell::new(0), context }
    }

    fn pair(&self, config: QpConfig) -> [End<'_>; 2] {
        self.pair_of([config; 2])
    }

    fn pair_of(&self, configs: [QpConfig; 2]) -> [End<'_>; 2] {
        let label = self.label.replace(self.label.get() + 1);
        let [a, b] = &self.ranks;
        std::thread::scope(|s| {
            let other = s.spawn(|| b.queue_pair(0, label, configs[1]));
            let one = a.queue_pair(1, label, configs[0]).unwrap();
            [one, other.join().unwrap().unwrap()]
        })
        .map(|qp| End {
            descriptor: upload_descriptors(&self.context, [&qp]).unwrap(),
            stream: self.context.stream().unwrap(),
            qp,
            rig: self,
        })
    }

    fn zeroed(&self, bytes: usize) -> DeviceBuffer {
        self.context.alloc(bytes.max(16)).unwrap()
    }

    fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        self.context.upload(bytes).unwrap()
    }

    fn counters(&self) -> Counters {
        self.context.counters().unwrap()
    }

    /// A launch with as many threads as this device handles well.
    fn crowd(&self) -> Launch {
        Launch::new(4, 64).cooperating()
    }

    fn cpu(&self) -> bool {
        self.context.device() == "cpu"
    }
}

struct End<'a> {
    descriptor: DeviceBuffer,
    stream: Stream,
    qp: QueuePair,
    rig: &'a Rig,
}

/// Which threads make a call together, and the number of threads in the block.
#[derive(Clone, Copy, Debug)]
struct Scope(&'static str, u32);

const THREAD: Scope = Scope("script_thread", 1);
/// The short ones are a warp and a block that are not full.
const SCOPES: [Scope; 5] = [
    THREAD,
    Scope("script_warp", 32),
    Scope("script_warp", 20),
    Scope("script_block", 64),
    Scope("script_block", 33),
];

impl End<'_> {
    fn launch<const N: usize>(
        &self,
        module: &Module,
        kernel: &str,
        launch: Launch,
        params: [u64; N],
    ) -> Running {
        // SAFETY: each test keeps the queue pairs and buffers that it names until the kernel has
        // ended.
        unsafe { self.rig.context.launch(&self.stream, module, kernel, launch, &params).unwrap() }
    }

    fn start(&self, scope: Scope, steps: &[Step]) -> Script {
        let bytes: Vec<u8> = steps.iter().flat_map(|s| s.words()).flat_map(u64::to_le_bytes).collect();
        let steps_there = self.rig.upload(&bytes);
        let outcomes = self.rig.upload(&vec![0xff; steps.len() * 32]);
        let params = [self.descriptor.addr(), steps_there.addr(), outcomes.addr(), steps.len() as u64];
        let running = self.launch(&self.rig.script, scope.0, Launch::new(1, scope.1).cooperating(), params);
        Script { running, outcomes, _steps: steps_there, n: steps.len() }
    }

    fn run(&self, scope: Scope, steps: &[Step]) -> Vec<Outcome> {
        self.start(scope, steps).end()
    }

    fn refused(&self) -> u32 {
        match self.qp.check() {
            Err(Error::Refused { rank, .. }) => rank,
            other => panic!("{other:?} instead of a refusal"),
        }
    }

    /// The cause with which the engine ended the queue pair, once it has.
    fn ended(&self) -> Error {
        let start = Instant::now();
        loop {
            match self.qp.check() {
                Err(e) => return e,
                Ok(()) if start.elapsed() > hang() => panic!("the queue pair did not end"),
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

struct Script {
    running: Running,
    outcomes: DeviceBuffer,
    _steps: DeviceBuffer,
    n: usize,
}

impl Script {
    fn end(self) -> Vec<Outcome> {
        finish(&self.running);
        let words = read_words(&self.outcomes, self.n * 4);
        words
            .chunks_exact(4)
            .map(|w| Outcome {
                status: status_name(w[0]),
                x: w[1],
                y: w[2],
                took: Duration::from_nanos(w[3]),
            })
            .collect()
    }
}

fn finish(running: &Running) {
    assert_eq!(running.wait(Some(2 * hang())).unwrap(), WaitOutcome::Done, "a kernel did not end");
}

#[derive(Clone, Debug)]
struct Outcome {
    status: &'static str,
    x: u64,
    y: u64,
    took: Duration,
}

impl Outcome {
    fn length(&self) -> u64 {
        self.x >> 32
    }

    fn tag(&self) -> u32 {
        self.x as u32
    }
}

#[track_caller]
fn all_ok(outcomes: &[Outcome]) {
    for (i, o) in outcomes.iter().enumerate() {
        assert_eq!(o.status, "ok", "step {i} of {}", outcomes.len());
    }
}

fn read_words(buffer: &DeviceBuffer, n: usize) -> Vec<u64> {
    read(buffer, n * 8).chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect()
}

fn read(buffer: &DeviceBuffer, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    buffer.copy_to_host(&mut bytes).unwrap();
    bytes
}

fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    let next = || {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (x >> 56) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Mirrors `struct step` of script.cu.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    what: u64,
    flags: u64,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    wr_id: u64,
    lkey: u64,
    local: u64,
    rkey: u64,
    remote: u64,
    signal: u64,
    value: u64,
}

const TRY: u64 = 1;
const SIGNALED: u64 = 2;
const REGION: u64 = 4;
const WITH_SIGNAL: u64 = 8;
const CANCEL: u64 = 16;

impl Step {
    fn words(&self) -> [u64; 14] {
        let s = self;
        [
            s.what, s.flags, s.a, s.b, s.c, s.d, s.wr_id, s.lkey, s.local, s.rkey, s.remote, s.signal,
            s.value, 0,
        ]
    }

    fn post(opcode: u32, payload: u64, length: usize) -> Step {
        Step { a: opcode.into(), b: payload, c: length as u64, ..Step::default() }
    }

    fn send(payload: u64, length: usize, tag: u32) -> Step {
        Step { d: tag.into(), ..Step::post(abi::PUSHGATE_OP_SEND, payload, length) }
    }

    fn put(rkey: u32, remote: u64, payload: u64, length: usize) -> Step {
        Step { rkey: rkey.into(), remote, ..Step::post(abi::PUSHGATE_OP_PUT, payload, length) }
    }

    fn and_signal(self, signal: u64, value: u64) -> Step {
        Step { signal, value, flags: self.flags | WITH_SIGNAL, ..self }
    }

    fn signal(signal: u64, value: u64) -> Step {
        Step { signal, value, ..Step::post(abi::PUSHGATE_OP_SIGNAL, 0, 0) }
    }

    fn nop() -> Step {
        Step::post(abi::PUSHGATE_OP_NOP, 0, 0)
    }

    fn signaled(self, wr_id: u32) -> Step {
        Step { wr_id: wr_id.into(), flags: self.flags | SIGNALED, ..self }
    }

    fn trying(self) -> Step {
        Step { flags: self.flags | TRY, ..self }
    }

    fn out_of_region(self, lkey: u32, local: u64) -> Step {
        Step { lkey: lkey.into(), local, flags: self.flags | REGION, ..self }
    }

    fn cancelled(self) -> Step {
        Step { flags: self.flags | CANCEL, ..self }
    }

    /// Repeats the step as long as there is room.
    fn filling(self) -> Step {
        Step { what: 11, ..self }
    }

    fn call(what: u64, args: [u64; 4]) -> Step {
        let [a, b, c, d] = args;
        Step { what, a, b, c, d, ..Step::default() }
    }

    fn recv(to: u64, room: usize) -> Step {
        Step::call(1, [to, room as u64, 0, 0])
    }

    fn release(messages: u64) -> Step {
        Step::call(2, [messages, 0, 0, 0])
    }

    fn wait_signal(signal: u64, value: u64) -> Step {
        Step::call(3, [signal, value, 0, 0])
    }

    fn flush() -> Step {
        Step::call(4, [0; 4])
    }

    fn poll(at_most: Duration) -> Step {
        Step::call(5, [at_most.as_nanos() as u64, 0, 0, 0])
    }

    fn post_recv(lkey: u32, offset: u64, length: usize, tag: u32) -> Step {
        Step::call(6, [lkey.into(), offset, length as u64, tag.into()])
    }

    fn reserve(messages: u64, bytes: u64) -> Step {
        Step::call(7, [messages, bytes, 0, 0])
    }

    fn raw(words: u64, slot: u64) -> Step {
        Step::call(8, [words, slot, 0, 0])
    }

    fn consumed(count: u64) -> Step {
        Step::call(9, [count, 0, 0, 0])
    }

    fn batch(messages: u64, bytes: usize, tag: u32, from: u64) -> Step {
        Step::call(10, [messages, bytes as u64, tag.into(), from])
    }

    fn copy(to: u64, from: u64, bytes: usize) -> Step {
        Step::call(12, [to, from, bytes as u64, 0])
    }
}

/// Passes a message, which shows that nothing holds up the queue pair.
#[track_caller]
fn works(pair: &[End<'_>; 2], tag: u32) {
    let rig = pair[0].rig;
    let (from, to) = (rig.upload(&noise(48, tag.into())), rig.zeroed(48));
    let receiver = pair[1].start(THREAD, &[Step::recv(to.addr(), 48), Step::release(1)]);
    all_ok(&pair[0].run(THREAD, &[Step::send(from.addr(), 48, tag), Step::flush()]));
    let got = receiver.end();
    all_ok(&got);
    assert_eq!((got[0].length(), got[0].tag()), (48, tag));
    assert_eq!(read(&to, 48), noise(48, tag.into()));
}

fn window(bytes: u64) -> QpConfig {
    QpConfig { window_size: Some(bytes), ..QpConfig::default() }
}

// --------------------------------------------------------------- two-sided

const SIZES: [usize; 15] = [0, 1, 7, 8, 16, 39, 40, 41, 63, 64, 65, 1000, 4096, 8191, 8192];

fn every_size(rig: &Rig, scopes: &[Scope]) {
    let pair = rig.pair(window(8192));
    // Each in 16 KiB of its own, so that a write beyond the end shows.
    const EACH: usize = 16 << 10;
    let data = noise(SIZES.len() * EACH, 1);
    let from = rig.upload(&data);
    for (round, &scope) in scopes.iter().enumerate() {
        for shift in [0, 3] {
            let clean = vec![0xee; data.len()];
            let to = rig.upload(&clean);
            let tag = |i| 0xa000_0000 + (round * 100 + i) as u32;
            let at = |i: usize| (i * EACH + shift * (i % 5)) as u64;
            let to_at = |i: usize| (i * EACH + shift * (i % 3)) as u64;
            let n = 0..SIZES.len();
            let mut sends: Vec<_> =
                n.clone().map(|i| Step::send(from.addr() + at(i), SIZES[i], tag(i))).collect();
            sends.push(Step::flush());
            let receives: Vec<_> = n
                .clone()
                .flat_map(|i| [Step::recv(to.addr() + to_at(i), SIZES[i]), Step::release(1)])
                .collect();
            let receiver = pair[1].start(scope, &receives);
            let sent = pair[0].run(scope, &sends);
            let got = receiver.end();
            all_ok(&sent);
            all_ok(&got);
            let mut expected = clean;
            for i in n {
                let o = &got[2 * i];
                assert_eq!((o.length(), o.tag()), (SIZES[i] as u64, tag(i)), "{scope:?}, message {i}");
                assert_eq!(o.y == 1, SIZES[i] <= 40, "{scope:?}: {} bytes inline", SIZES[i]);
                let (at, to) = (at(i) as usize, to_at(i) as usize);
                expected[to..to + SIZES[i]].copy_from_slice(&data[at..at + SIZES[i]]);
            }
            assert!(read(&to, expected.len()) == expected, "{scope:?}, shift {shift}: other bytes arrived");
        }
    }
}

#[test]
fn send_and_recv_every_size_at_every_scope() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        every_size(&rig, &SCOPES);
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn an_engine_in_another_process_does_the_same() {
    on_every_device(|device| {
        let socket = PathBuf::from(format!("@pushgate-device-api-{}-{device:?}", std::process::id()));
        let stop = proxy::Stop::new().unwrap();
        let rung = stop.try_clone().unwrap();
        std::thread::scope(|s| {
            let server = s.spawn(|| proxy::run(&socket, rung));
            let start = Instant::now();
            let name = socket.to_str().unwrap();
            while std::os::unix::net::UnixStream::connect_addr(&abstract_name(&name[1..])).is_err() {
                assert!(start.elapsed() < hang(), "the proxy does not listen");
                std::thread::sleep(Duration::from_millis(5));
            }
            let rig = Rig::new(device, &[("proxy", "process"), ("proxy-socket", name)]);
            assert_eq!(rig.context.proxy_place(), "process");
            every_size(&rig, &[THREAD, SCOPES[3]]);
            one_sided(&rig, &[THREAD], Target::Shared);
            drop(rig);
            stop.ring();
            server.join().unwrap().unwrap();
        });
    });
}

fn abstract_name(name: &str) -> std::os::unix::net::SocketAddr {
    use std::os::linux::net::SocketAddrExt;
    std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap()
}

#[test]
fn p1_a_window_that_holds_exactly_one_message() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        for bytes in [64, 4096] {
            let pair = rig.pair(window(bytes));
            assert_eq!(pair[0].qp.max_message(), bytes);
            let data = noise(bytes as usize, bytes);
            let (from, to) = (rig.upload(&data), rig.zeroed(bytes as usize * 8));
            let mut sends = vec![
                Step::send(from.addr(), bytes as usize + 1, 0),
                Step::batch(2, bytes as usize, 0, from.addr()),
                Step::batch(2048, 0, 0, from.addr()),
            ];
            let refused = sends.len();
            sends.extend((0..8).map(|i| Step::send(from.addr(), bytes as usize, i)));
            sends.push(Step::flush());
            let receives: Vec<_> = (0..8)
                .flat_map(|i| [Step::recv(to.addr() + i * bytes, bytes as usize), Step::release(1)])
                .collect();
            let receiver = pair[1].start(THREAD, &receives);
            let sent = pair[0].run(THREAD, &sends);
            // What can never fit is reported at once and takes nothing.
            assert!(sent[..refused].iter().all(|o| o.status == "invalid"), "{sent:?}");
            all_ok(&sent[refused..]);
            let got = receiver.end();
            all_ok(&got);
            for (i, o) in got.iter().step_by(2).enumerate() {
                assert_eq!((o.length(), o.tag()), (bytes, i as u32));
            }
            assert!(read(&to, data.len() * 8) == data.repeat(8));
        }
    });
}

#[test]
fn p4_a_slow_receiver_stalls_the_gate_and_loses_nothing() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let config = QpConfig { receives: Some(4), slots: Some(64), ..window(8192) };
        let pair = rig.pair(config);
        let data = noise(64 << 10, 3);
        let from = rig.upload(&data);
        let to = rig.zeroed(64 << 10);
        let size = |i: u64| if i.is_multiple_of(2) { 24 } else { 1000 };
        let sends: Vec<_> = (0..60).map(|i| Step::send(from.addr() + i * 1000, size(i), i as u32)).collect();
        let sender = pair[0].start(THREAD, &sends);
        wait_until("a stall", || rig.counters().stall_receive >= 1 && rig.counters().delivered >= 4);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(rig.counters().delivered, 4, "no more than there are receives");
        let mut receives = Vec::new();
        for i in 0..60 {
            receives.push(Step::recv(to.addr() + i * 1000, 1000));
            // Several at once, which is allowed.
            if i % 3 == 2 {
                receives.push(Step::release(3));
            }
        }
        let got = pair[1].run(THREAD, &receives);
        all_ok(&got);
        all_ok(&sender.end());
        let tags: Vec<_> = got.iter().filter(|o| o.x != 0 || o.y != 0).map(|o| o.tag()).collect();
        assert_eq!(tags, (0..60).collect::<Vec<_>>(), "in order, each once");
        let arrived = read(&to, 60000);
        for i in 0..60usize {
            let (at, n) = (i * 1000, size(i as u64));
            assert!(arrived[at..at + n] == data[at..at + n], "message {i}");
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused, c.delivered), (0, 0, 0, 60));
    });
}

#[test]
fn p4_what_a_slow_reader_holds_too_long_is_copied_out() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(window(4096));
        let data = noise(64 << 10, 4);
        let (from, to) = (rig.upload(&data), rig.zeroed(64 << 10));
        let mut sends: Vec<_> = (0..40).map(|i| Step::send(from.addr() + i * 1000, 1000, i as u32)).collect();
        // Time to count as slow, between the third and the fourth: an engine that sleeps reads its
        // clock ten times a second.
        sends.insert(3, Step::poll(Duration::from_millis(500)));
        // After the fourth.
        sends.insert(5, Step::signal(0, 1));
        let sender = pair[0].start(THREAD, &sends);
        // Three messages are read late, in place: three quarters of the window.
        let mut receives: Vec<_> = (0..3).map(|i| Step::recv(to.addr() + i * 1000, 1000)).collect();
        receives.push(Step::wait_signal(0, 1));
        for i in 3..40 {
            receives.push(Step::release(1));
            receives.push(Step::recv(to.addr() + i * 1000, 1000));
        }
        receives.push(Step::release(3));
        let got = pair[1].run(THREAD, &receives);
        all_ok(&got);
        let sent = sender.end();
        assert!(
            sent.iter().enumerate().all(|(i, o)| o.status == if i == 3 { "again" } else { "ok" }),
            "{sent:?}"
        );
        assert!(read(&to, 40000) == data[..40000]);
        let c = rig.counters();
        assert!(c.copied_out >= 1, "{c:?}");
        assert_eq!((c.dropped, c.refused), (0, 0));
    });
}

// --------------------------------------------------------------- one-sided

#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    Shared,
    Buffer,
}

fn one_sided(rig: &Rig, scopes: &[Scope], target: Target) {
    let pair = rig.pair(window(8192));
    let shared = rig.context.shared("region", 64 << 10).unwrap();
    let buffer = rig.zeroed(64 << 10);
    let (region, rkey) = match target {
        Target::Shared => (shared.device_addr(), pair[1].qp.register_shared(&shared).unwrap()),
        // SAFETY: deregistered below, before the buffer is freed.
        Target::Buffer => (buffer.addr(), unsafe { pair[1].qp.register_buffer(&buffer) }.unwrap()),
    };
    let data = noise(64 << 10, 2);
    let from = rig.upload(&data);
    let mut sizes = SIZES.to_vec();
    sizes.extend([15, 17, 200]);
    let mut value = 0;
    for &scope in scopes {
        let to = rig.zeroed(sizes.len() << 13);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (i, &n) in sizes.iter().enumerate() {
            value += 1;
            let (at, remote) = ((i * 137) as u64, (i * 61) as u64);
            let put = Step::put(rkey, remote, from.addr() + at, n);
            if i % 2 == 0 {
                sends.push(put.and_signal(7, value));
            } else {
                sends.extend([put, Step::signal(7, value)]);
            }
            // The receiver reads at once what was announced, and only then the same bytes are
            // written again.
            receives.push(Step::wait_signal(7, value));
            receives.push(Step::copy(to.addr() + ((i as u64) << 13), region + remote, n));
            receives.push(Step::signal(0, value));
            sends.push(Step::wait_signal(0, value));
        }
        sends.push(Step::flush());
        let receiver = pair[1].start(scope, &receives);
        let sent = pair[0].run(scope, &sends);
        let got = receiver.end();
        all_ok(&sent);
        all_ok(&got);
        let arrived = read(&to, sizes.len() << 13);
        for (i, &n) in sizes.iter().enumerate() {
            let (at, to) = (i * 137, i << 13);
            assert!(arrived[to..to + n] == data[at..at + n], "{target:?}, {scope:?}: put {i} of {n} bytes");
        }
    }
    assert!(pair[1].qp.deregister(rkey).unwrap());
    assert!(!pair[1].qp.deregister(rkey).unwrap(), "once is enough");
}

#[test]
fn p3_data_is_there_before_its_signal() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        one_sided(&rig, &SCOPES, Target::Shared);
        one_sided(&rig, &SCOPES, Target::Buffer);
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn signals_only_grow() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig::default());
        let sent = pair[0].run(
            THREAD,
            &[
                Step::signal(63, 5),
                Step::signal(63, 3),
                Step::signal(1, abi::PUSHGATE_SIGNAL_MAX),
                Step::signal(2, abi::PUSHGATE_SIGNAL_MAX + 1),
                Step::flush(),
            ],
        );
        let statuses: Vec<_> = sent.iter().map(|o| o.status).collect();
        assert_eq!(statuses, ["ok", "ok", "ok", "invalid", "ok"]);
        let got = pair[1].run(
            THREAD,
            &[
                Step::wait_signal(63, 5),
                Step::wait_signal(1, abi::PUSHGATE_SIGNAL_MAX),
                Step::wait_signal(64, 0),
                Step::wait_signal(2, 0),
            ],
        );
        let statuses: Vec<_> = got.iter().map(|o| o.status).collect();
        assert_eq!(statuses, ["ok", "ok", "invalid", "ok"]);
        works(&pair, 9);
    });
}

// -------------------------------------------------------------- completions

#[test]
fn p5_completions_come_once_and_in_order() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(8), ..window(4096) });
        let shared = rig.context.shared("region", 4096).unwrap();
        let rkey = pair[1].qp.register_shared(&shared).unwrap();
        let (from, to) = (rig.upload(&noise(4096, 5)), rig.zeroed(4096));
        // The kinds in turn, every third without a completion, far more than the CQ holds.
        let (mut steps, mut expected, mut sends) = (Vec::new(), Vec::new(), 0);
        for i in 0..50u32 {
            let wr_id = 0xfedc_0000 + i;
            let (step, opcode, length) = match i % 4 {
                0 => (Step::send(from.addr(), 33, i), abi::PUSHGATE_OP_SEND, 33),
                1 => (Step::put(rkey, 0, from.addr(), 777), abi::PUSHGATE_OP_PUT, 777),
                2 => (Step::signal(3, i.into()), abi::PUSHGATE_OP_SIGNAL, 0),
                _ => (Step::nop(), abi::PUSHGATE_OP_NOP, 0),
            };
            sends += (i % 4 == 0) as usize;
            if i % 3 == 0 {
                steps.push(step);
                continue;
            }
            expected.push((wr_id, (opcode as u64) << 32 | length));
            steps.push(step.signaled(wr_id));
            if expected.len().is_multiple_of(5) {
                steps.extend([Step::poll(hang()); 5]);
            }
        }
        let left = expected.len() % 5;
        steps.extend(vec![Step::poll(hang()); left]);
        steps.extend([Step::flush(), Step::poll(Duration::from_millis(20))]);
        let receives = [Step::recv(to.addr(), 33), Step::release(1)].repeat(sends);
        for scope in [THREAD, SCOPES[3]] {
            let receiver = pair[1].start(THREAD, &receives);
            let mut sent = pair[0].run(scope, &steps);
            all_ok(&receiver.end());
            assert_eq!(sent.pop().unwrap().status, "again", "there is no completion left");
            all_ok(&sent);
            let got: Vec<_> = sent.iter().filter(|o| o.x != 0).map(|o| (o.x as u32, o.y)).collect();
            assert_eq!(got, expected, "{scope:?}");
        }
    });
}

#[test]
fn p5_many_threads_post_and_poll_and_each_completion_comes_once() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(32), ..QpConfig::default() });
        let (each, total) = (7, 7 * 256);
        let shared = rig.context.shared("region", total * 8).unwrap();
        let rkey = pair[1].qp.register_shared(&shared).unwrap();
        let (seen, result) = (rig.zeroed(total * 8), rig.zeroed(32));
        let first = 0xffff_ff00u64;
        let params = [pair[0].descriptor.addr(), seen.addr(), result.addr(), each, first << 32 | rkey as u64];
        finish(&pair[0].launch(&rig.crowd, "completions", rig.crowd(), params));
        let r = read_words(&result, 3);
        assert_eq!((status_name(r[0]), r[1], r[2]), ("ok", 256 * 4, 0));
        let expected: Vec<_> = (0..total as u64).map(|i| (i % each % 2 == 0) as u64).collect();
        assert_eq!(read_words(&seen, total), expected);
        all_ok(&pair[0].run(THREAD, &[Step::flush()]));
        for (i, word) in shared.words(0, total).iter().enumerate() {
            assert_eq!(word.load(std::sync::atomic::Ordering::Acquire), i as u64 + 1, "put {i}");
        }
    });
}

// ------------------------------------------------------------ many producers

#[test]
fn p1_p6_many_blocks_push_into_one_queue_pair() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(64), receives: Some(32), ..window(16384) });
        const MOST: u64 = 150;
        for (kernel, producers, each) in
            [("push_thread", 256, 6), ("push_warp", 8, 80), ("push_block", 4, 80)]
        {
            let scratch = rig.zeroed((producers * MOST) as usize * 8);
            let next = rig.zeroed(producers as usize * 8);
            let (result, taken) = (rig.zeroed(32), rig.zeroed(32));
            let params = |end: &End<'_>, result: &DeviceBuffer| {
                let qp = end.descriptor.addr();
                [qp, scratch.addr(), next.addr(), result.addr(), producers, each, MOST]
            };
            // On the CPU each additional thread costs a switch at each message.
            let threads = if rig.cpu() { 1 } else { 64 };
            let sink = Launch::new(1, threads).cooperating();
            let sink = pair[1].launch(&rig.crowd, "crowd_sink", sink, params(&pair[1], &taken));
            let push = pair[0].launch(&rig.crowd, kernel, rig.crowd(), params(&pair[0], &result));
            finish(&push);
            finish(&sink);
            assert_eq!(status_name(read_words(&result, 1)[0]), "ok", "{kernel}");
            let t = read_words(&taken, 3);
            assert_eq!((status_name(t[0]), t[1], t[2]), ("ok", producers * each, 0), "{kernel}");
            assert_eq!(read_words(&next, producers as usize), vec![each; producers as usize], "{kernel}");
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused, c.stuck), (0, 0, 0, 0));
    });
}

#[test]
fn recv_each_takes_a_message_for_each_thread() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(128), receives: Some(128), ..window(16384) });
        for (scope, threads) in [("warp", 32), ("warp", 20), ("block", 64)] {
            for bytes in [8u64, 40, 120] {
                let (sent, taken) = (rig.zeroed(32), rig.zeroed(32));
                let rounds = 12;
                let shape = Launch::new(1, threads).cooperating();
                let params =
                    |end: &End<'_>, r: &DeviceBuffer| [end.descriptor.addr(), r.addr(), rounds, bytes];
                let take = pair[1].launch(
                    &rig.crowd,
                    &format!("recv_each_{scope}"),
                    shape,
                    params(&pair[1], &taken),
                );
                let send =
                    pair[0].launch(&rig.crowd, &format!("send_each_{scope}"), shape, params(&pair[0], &sent));
                finish(&send);
                finish(&take);
                let (s, t) = (read_words(&sent, 1), read_words(&taken, 3));
                assert_eq!(
                    (status_name(s[0]), status_name(t[0]), t[2]),
                    ("ok", "ok", 0),
                    "{scope}, {bytes} bytes"
                );
            }
        }
    });
}

// ------------------------------------------------------------------- batches

#[test]
fn batches_go_out_whole_and_cancelled_ones_not_at_all() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        // Three messages of 1000 bytes and their padding do not divide the window.
        let pair = rig.pair(QpConfig { slots: Some(16), ..window(8192) });
        let data = noise(3000, 6);
        let (from, to, spare) = (rig.upload(&data), rig.zeroed(3000), rig.zeroed(8000));
        for scope in [THREAD, SCOPES[1], SCOPES[3]] {
            let before = rig.counters();
            let (mut sends, mut receives, mut tags) = (Vec::new(), Vec::new(), Vec::new());
            for r in 0..20u32 {
                let batch = Step::batch(3, 1000, r * 3, from.addr());
                match r % 4 {
                    1 => sends.push(batch.cancelled()),
                    2 => {
                        sends.extend([Step::nop(), Step::batch(5, 1600, 0, spare.addr()).cancelled(), batch])
                    }
                    3 => sends.push(Step::nop()),
                    _ => sends.push(batch),
                }
                if r % 2 == 0 {
                    for i in 0..3 {
                        receives.push(Step::recv(to.addr() + i * 1000, 1000));
                        tags.push(((1000 - i % 2) << 32) | (r as u64 * 3 + i));
                    }
                    receives.push(Step::release(3));
                }
            }
            sends.push(Step::flush());
            let receiver = pair[1].start(scope, &receives);
            all_ok(&pair[0].run(scope, &sends));
            let got = receiver.end();
            all_ok(&got);
            let got: Vec<_> = got.iter().filter(|o| o.y != 0).map(|o| o.x).collect();
            assert_eq!(got, tags, "{scope:?}");
            let mut expected = data.clone();
            expected[1999] = read(&to, 2000)[1999]; // the second is a byte shorter
            assert!(read(&to, 3000) == expected, "{scope:?}");
            let c = rig.counters() - before;
            assert!(c.nops >= 10 + 15 + 5 && c.delivered == 30 && c.refused == 0, "{c:?}");
        }
    });
}

// ---------------------------------------------------------------- try_ forms

#[test]
fn p1_try_forms_take_nothing_when_something_is_full() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(4096, 7));
        let to = rig.zeroed(4096);
        let drain = |n: usize| [Step::recv(to.addr(), 4096), Step::release(1)].repeat(n);
        // The window: four messages of 16 units. The slots: two receives and eight messages that
        // wait.
        let cases = [
            ("window", window(4096), 1000, 4),
            ("slots", QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() }, 8, 10),
        ];
        for (what, config, bytes, room) in cases {
            for scope in [THREAD, SCOPES[3]] {
                let pair = rig.pair(config);
                let empty = pair[1].run(scope, &[Step::recv(to.addr(), 4096).trying()]);
                assert_eq!(empty[0].status, "again");
                let send = Step::send(from.addr(), bytes, 0);
                let full = pair[0].run(
                    scope,
                    &[
                        send.filling(),
                        Step::batch(1, bytes.next_multiple_of(64), 0, from.addr()).trying(),
                        send.trying(),
                    ],
                );
                assert_eq!((full[0].x, full[0].y), (room, 0), "{what}, {scope:?}: {full:?}");
                assert!(full.iter().all(|o| o.status == "again"), "{what}: {full:?}");
                all_ok(&pair[1].run(scope, &drain(room as usize)));
                works(&pair, 1);
            }
        }
        // The CQ: messages that were retired long ago, and no thread has polled.
        let pair = rig.pair(QpConfig { slots: Some(8), ..QpConfig::default() });
        let signal = Step::signal(1, 1);
        for _ in 0..2 {
            let full = pair[0].run(THREAD, &[signal.signaled(1).filling(), Step::flush(), signal.trying()]);
            assert_eq!((full[0].status, full[0].x, full[0].y), ("again", 8, 0));
            // Without a completion there is room.
            all_ok(&full[1..]);
            let poll = Step::poll(hang());
            let some = pair[0].run(THREAD, &[poll, signal.signaled(2).trying(), signal.signaled(2).trying()]);
            let statuses: Vec<_> = some.iter().map(|o| o.status).collect();
            assert_eq!(statuses, ["ok", "ok", "again"]);
            all_ok(&pair[0].run(THREAD, &[poll; 8]));
        }
        works(&pair, 2);
    });
}

// -------------------------------------------------------------------- regions

#[test]
fn a_send_out_of_a_region_arrives() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let data = noise(4096, 3);
        for (i, bytes) in data.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().unwrap());
            shared.words(i * 8, 1)[0].store(word, std::sync::atomic::Ordering::Relaxed);
        }
        let lkey = pair[0].qp.register_shared(&shared).unwrap();
        let to = rig.zeroed(4096);
        all_ok(&pair[0].run(THREAD, &[Step::send(0, 3000, 7).out_of_region(lkey, 100), Step::flush()]));
        let got = pair[1].run(THREAD, &[Step::recv(to.addr(), 4096), Step::release(1)]);
        all_ok(&got);
        assert_eq!((got[0].length(), got[0].tag()), (3000, 7));
        assert!(read(&to, 3000) == data[100..3100]);
    });
}

#[test]
fn p8_puts_outside_of_what_was_registered_are_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(256, 8));
        let other = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let bytes = shared.len() as u64;
        let foreign = other[1].qp.register_shared(&shared).unwrap();
        let gone = other[1].qp.register_shared(&shared).unwrap();
        other[1].qp.deregister(gone).unwrap();
        type Put = fn(u32, u32, u64) -> (u32, u64);
        let cases: [(&str, Put); 5] = [
            ("another key", |rkey, _, _| (rkey ^ 1 << 20, 0)),
            ("a key of another queue pair", |_, foreign, _| (foreign, 0)),
            ("past the end", |rkey, _, bytes| (rkey, bytes - 199)),
            ("far past the end", |rkey, _, _| (rkey, abi::PUSHGATE_DATA_MASK - 100)),
            ("index without a region", |rkey, _, _| (rkey + 1, 0)),
        ];
        for (what, case) in cases {
            let pair = rig.pair(QpConfig::default());
            let rkey = pair[1].qp.register_shared(&shared).unwrap();
            // Only by chance does a seed for each key keep the tags of two queue pairs apart; with
            // equal tags this would not be another key.
            let (key, offset) = case(rkey, if foreign == rkey { !rkey } else { foreign }, bytes);
            let before = rig.counters().refused;
            let sent =
                pair[0].run(THREAD, &[Step::put(key, offset, from.addr(), 200), Step::wait_signal(0, 1)]);
            assert_eq!((sent[0].status, sent[1].status), ("ok", "refused"), "{what}");
            let far = pair[1].run(THREAD, &[Step::recv(0, 0)]);
            assert_eq!(far[0].status, "refused", "{what}");
            assert_eq!((pair[0].refused(), pair[1].refused()), (0, 0), "{what}: both name the sender");
            assert_eq!(rig.counters().refused - before, 1, "{what}");
            assert!(
                shared
                    .words(0, bytes as usize / 8)
                    .iter()
                    .all(|w| { w.load(std::sync::atomic::Ordering::Relaxed) == 0 })
            );
            works(&other, 3);
        }
    });
}

// ----------------------------------------------------------- posted receives

#[test]
fn messages_land_in_posted_buffers() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let config = QpConfig { receives: Some(8), posted_receives: true, ..window(8192) };
        let pair = rig.pair(config);
        let buffer = rig.zeroed(32 << 10);
        let shared = rig.context.shared("region", 32 << 10).unwrap();
        // SAFETY: the buffer lives until both kernels have ended, and with them the queue pair's
        // use of it.
        let lkeys = [
            unsafe { pair[1].qp.register_buffer(&buffer) }.unwrap(),
            pair[1].qp.register_shared(&shared).unwrap(),
        ];
        let data = noise(32 << 10, 9);
        let from = rig.upload(&data);
        let sizes = [0, 1, 40, 41, 1000, 4096, 8192, 64];
        for (round, scope) in [THREAD, SCOPES[1], SCOPES[3]].into_iter().enumerate() {
            let (mut receives, mut sends) = (Vec::new(), Vec::new());
            let mut at = 0;
            for (i, &n) in sizes.iter().enumerate() {
                let tag = if i % 2 == 0 { abi::PUSHGATE_ANY_TAG } else { i as u32 };
                receives.push(Step::post_recv(lkeys[i % 2], at as u64, n, tag));
                sends.push(Step::send(from.addr() + at as u64, n, i as u32));
                at += n;
            }
            receives.push(Step::post_recv(lkeys[0], 0, 8, 0));
            receives.extend([Step::recv(0, 8192), Step::release(1)].repeat(sizes.len()));
            let receiver = pair[1].start(scope, &receives);
            all_ok(&pair[0].run(scope, &sends));
            let got = receiver.end();
            assert_eq!(got[sizes.len()].status, "again", "as many as there are receives");
            all_ok(&got[..sizes.len()]);
            all_ok(&got[sizes.len() + 1..]);
            for (i, o) in got[sizes.len() + 1..].iter().step_by(2).enumerate() {
                let receive = (round * sizes.len() + i) as u64;
                assert_eq!((o.length(), o.tag()), (sizes[i] as u64, i as u32), "{scope:?}");
                assert_eq!(o.y, 2 | receive << 8, "{scope:?}");
            }
            let there = read(&buffer, at);
            let mut begin = 0;
            for (i, &n) in sizes.iter().enumerate() {
                let arrived = if i % 2 == 0 {
                    there[begin..begin + n].to_vec()
                } else {
                    // SAFETY: nothing writes to the memory now.
                    unsafe { std::slice::from_raw_parts(shared.as_ptr().as_ptr().add(begin), n) }.to_vec()
                };
                assert!(arrived == data[begin..begin + n], "{scope:?}: message {i}");
                begin += n;
            }
            buffer.copy_from_host(&vec![0; at]).unwrap();
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn a_message_says_which_receive_it_took() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let shared = rig.context.shared("region", 4096).unwrap();
        let lkey = pair[1].qp.register_shared(&shared).unwrap();
        let from = rig.upload(&noise(64, 1));
        for (round, scope) in SCOPES.into_iter().enumerate() {
            // Posted for the last message first.
            let post = |tag: u32| Step::post_recv(lkey, tag as u64 * 64, 64, tag);
            let mut receives: Vec<_> = (0..4).rev().map(post).collect();
            receives.extend([Step::recv(0, 64), Step::release(1)].repeat(4));
            let receiver = pair[1].start(scope, &receives);
            let send = |tag: u32| Step::send(from.addr(), 16 + 16 * tag as usize, tag);
            all_ok(&pair[0].run(scope, &(0..4).map(send).collect::<Vec<_>>()));
            let got = receiver.end();
            all_ok(&got);
            for (tag, o) in got[4..].iter().step_by(2).enumerate() {
                let receive = (4 * round + 3 - tag) as u64;
                assert_eq!((o.tag(), o.y), (tag as u32, 2 | receive << 8), "{scope:?}");
            }
        }
    });
}

#[test]
fn p4_without_a_posted_buffer_nothing_is_sent() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let sender = pair[0].start(THREAD, &[Step::send(from.addr(), 64, 0), Step::flush()]);
        wait_until("a stall", || rig.counters().stall_receive >= 1);
        std::thread::sleep(Duration::from_millis(100));
        let c = rig.counters();
        assert_eq!((c.released, c.delivered), (0, 0));
        let shared = rig.context.shared("region", 4096).unwrap();
        let lkey = pair[1].qp.register_shared(&shared).unwrap();
        all_ok(&pair[1].run(THREAD, &[Step::post_recv(lkey, 0, 64, 0), Step::recv(0, 64), Step::release(1)]));
        all_ok(&sender.end());
    });
}

#[test]
fn p8_a_message_that_does_not_fit_its_buffer_is_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(64, 1));
        let shared = rig.context.shared("region", 4096).unwrap();
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let lkey = pair[1].qp.register_shared(&shared).unwrap();
        let receiver = pair[1].start(THREAD, &[Step::post_recv(lkey, 0, 63, 5), Step::recv(0, 64)]);
        let sent = pair[0].run(THREAD, &[Step::send(from.addr(), 64, 5), Step::wait_signal(0, 1)]);
        assert_eq!(sent[1].status, "refused");
        assert_eq!(receiver.end()[1].status, "refused");
    });
}

// ------------------------------------------------------------- P7: every wait

#[test]
fn p7_waits_end_with_a_time_out() {
    on_every_device(|device| {
        // What must not time out below has to be done within this time.
        let limit = patience(Duration::from_secs(1));
        let rig = Rig::new(device, &[("timeout", &limit.as_millis().to_string())]);
        let pair = rig.pair(QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let to = rig.zeroed(64);
        let send = Step::send(from.addr(), 16, 0);
        for scope in [THREAD, SCOPES[3]] {
            let got = pair[1].run(scope, &[Step::recv(to.addr(), 64), Step::wait_signal(1, 1)]);
            // Two messages arrive, eight wait, and then there is no slot.
            all_ok(&pair[0].run(scope, &[send, send, Step::flush()]));
            wait_until("both are retired", || rig.counters().retired == rig.counters().released);
            let sent = pair[0].run(scope, &[send.filling(), send, Step::flush()]);
            assert_eq!(sent[0].x, 8);
            for o in got.iter().chain(&sent[1..]) {
                assert_eq!(o.status, "timed out");
                assert!(o.took >= limit && o.took < limit + hang(), "{o:?}");
            }
            // A timeout ends the wait, not the queue pair.
            pair[0].qp.check().unwrap();
            all_ok(&pair[1].run(scope, &[Step::recv(to.addr(), 64), Step::release(1)].repeat(10)));
            works(&pair, 1);
        }
    });
}

#[test]
fn p7_abort_ends_waits_at_both_ends() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(64, 1));
        let send = Step::send(from.addr(), 16, 0);
        let config = QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() };
        for scope in [THREAD, SCOPES[3]] {
            let cases: [(&str, Vec<Step>); 4] = [
                ("recv", vec![Step::recv(0, 0)]),
                ("wait_signal", vec![Step::wait_signal(1, 1)]),
                ("send", vec![send.filling(), send]),
                ("flush", vec![send.filling(), Step::flush()]),
            ];
            for (what, steps) in cases {
                let pair = rig.pair(config);
                let near = pair[0].start(scope, &steps);
                let far = pair[1].start(scope, &[Step::wait_signal(2, 1)]);
                std::thread::sleep(Duration::from_millis(150));
                assert!(!near.running.is_done().unwrap() && !far.running.is_done().unwrap(), "{what} waits");
                let start = Instant::now();
                let qp = &pair[0].qp;
                std::thread::scope(|s| s.spawn(|| qp.abort().unwrap()).join().unwrap());
                assert_eq!(near.end().last().unwrap().status, "aborted", "{what}");
                assert_eq!(far.end()[0].status, "aborted", "{what}");
                // Ended by the abort, and not by their own limits.
                assert!(start.elapsed() < hang(), "{what}: {:?}", start.elapsed());
                for end in &pair {
                    let e = end.ended();
                    assert!(matches!(e, Error::Aborted { rank: 0 }), "{what}: {e}");
                }
            }
        }
    });
}

#[test]
fn p5_what_was_not_retired_completes_with_the_status() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { receives: Some(2), ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let sends: Vec<_> = (0..6).map(|i| Step::send(from.addr(), 8, i).signaled(100 + i)).collect();
        all_ok(&pair[0].run(THREAD, &sends));
        // Inline messages are retired when they have arrived: two of them.
        let poll = Step::poll(hang());
        let two = pair[0].run(THREAD, &[poll, poll, Step::poll(Duration::from_millis(50))]);
        assert_eq!(two[2].status, "again");
        let ok = (abi::PUSHGATE_OP_SEND as u64) << 32 | 8;
        assert_eq!([(two[0].x, two[0].y), (two[1].x, two[1].y)], [(100, ok), (101, ok)]);
        pair[0].qp.abort().unwrap();
        let rest = pair[0].run(THREAD, &[poll, Step::poll(Duration::from_millis(50))]);
        assert_eq!((rest[0].x, rest[0].y), (102, (abi::PUSHGATE_ABORTED as u64) << 40 | ok));
    });
}

// --------------------------------------------------------------- hostile WQEs

const LAP: u64 = 1 << abi::PUSHGATE_LAP_SHIFT;

/// The eight words of slot 0 in its first lap: 100 bytes in the window's first two units.
fn wqe(opcode: u32, flags: u32) -> [u64; 8] {
    let head = (opcode as u64) << abi::PUSHGATE_OPCODE_SHIFT | (flags as u64) << abi::PUSHGATE_FLAGS_SHIFT;
    [head | 100, 0, 0, 0, 0, 0, 2, 0].map(|w| w | LAP)
}

#[test]
fn p8_hostile_wqes_end_their_queue_pair_alone() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let other = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let send = || wqe(abi::PUSHGATE_OP_SEND, 0);
        let with = |mut words: [u64; 8], changes: &[(usize, u64)]| {
            for &(i, w) in changes {
                words[i] = w | LAP;
            }
            words
        };
        let raw = |mut words: [u64; 8], i: usize, word: u64| {
            words[i] = word;
            words
        };
        let length = |words: [u64; 8], n: u64| raw(words, 0, words[0] & !0xffff_ffff | n);
        let (put, region) = (abi::PUSHGATE_OP_PUT, abi::PUSHGATE_F_REGION);
        let inline = abi::PUSHGATE_F_INLINE;
        let whole = abi::PUSHGATE_DATA_MASK;
        let cases = [
            ("another lap in its first word", raw(send(), 0, send()[0] + 8 * LAP)),
            ("another lap in one word", raw(send(), 3, 7 * LAP)),
            ("another lap in its last word", raw(send(), 7, 255 << 56)),
            ("opcode 0", wqe(0, 0)),
            ("an unknown opcode", wqe(0x77, 0)),
            ("an unknown flag", wqe(abi::PUSHGATE_OP_SEND, 0x80)),
            ("a flag of receive records", wqe(abi::PUSHGATE_OP_SEND, abi::PUSHGATE_F_LANDING)),
            ("inline and from a region", wqe(abi::PUSHGATE_OP_SEND, inline | region)),
            ("a signal flag on a send", wqe(abi::PUSHGATE_OP_SEND, abi::PUSHGATE_F_WITH_SIGNAL)),
            ("more bytes than room", length(send(), 129)),
            ("more bytes than any window", length(send(), 0xffff_ffff)),
            ("too long to be inline", length(wqe(abi::PUSHGATE_OP_SEND, inline), 41)),
            ("a put too long to be inline", length(wqe(put, inline), 17)),
            ("not where the ring's cursor is", with(send(), &[(5, 1)])),
            ("far outside of the window", with(send(), &[(5, 0xffff_ffff)])),
            ("more room than the window", with(send(), &[(6, 1 << 24)])),
            ("more room than a number holds", with(send(), &[(6, whole)])),
            ("a NOP with more room than the window", with(wqe(abi::PUSHGATE_OP_NOP, 0), &[(6, 1 << 20)])),
            ("from a region that is none", with(wqe(put, region), &[(5, 0xdead_beef), (6, 0)])),
            ("from past its own region", with(wqe(put, region), &[(5, 0), (6, whole)])),
            ("signal 64 of 64", length(with(wqe(abi::PUSHGATE_OP_SIGNAL, 0), &[(2, 64 << 32)]), 0)),
            (
                "the last signal there could be",
                length(with(wqe(abi::PUSHGATE_OP_SIGNAL, 0), &[(2, 0xff_ffff << 32)]), 0),
            ),
            ("a put with signal 64 of 64", with(wqe(put, abi::PUSHGATE_F_WITH_SIGNAL), &[(2, 64 << 32)])),
            ("into a region that is none", with(wqe(put, 0), &[(2, 0xdead_beef)])),
            ("all ones", [u64::MAX; 8]),
        ];
        for (i, (what, mut words)) in cases.into_iter().enumerate() {
            let pair = rig.pair(QpConfig::default());
            if what == "from past its own region" {
                words[5] |= pair[0].qp.register_shared(&shared).unwrap() as u64;
            }
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let there = rig.upload(&bytes);
            let before = rig.counters();
            let far = pair[1].start(THREAD, &[Step::recv(0, 0)]);
            let near = pair[0].run(THREAD, &[Step::raw(there.addr(), 0), Step::wait_signal(0, 1)]);
            assert_eq!(near[1].status, "refused", "{what}");
            assert_eq!(far.end()[0].status, "refused", "{what}");
            assert_eq!((pair[0].refused(), pair[1].refused()), (0, 0), "{what}: both name the rank");
            let c = rig.counters() - before;
            assert_eq!((c.refused, c.delivered, c.dropped), (1, 0, 0), "{what}");
            works(&other, i as u32);
        }
    });
}

#[test]
fn p8_a_receiver_that_gives_back_what_it_never_had_is_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let other = rig.pair(QpConfig::default());
        let pair = rig.pair(QpConfig::default());
        let got = pair[1].run(THREAD, &[Step::consumed(1000), Step::wait_signal(0, 1)]);
        assert_eq!(got[1].status, "refused");
        let far = pair[0].run(THREAD, &[Step::wait_signal(0, 1)]);
        assert_eq!(far[0].status, "refused");
        assert_eq!((pair[0].refused(), pair[1].refused()), (1, 1), "both name the receiver");
        assert_eq!(rig.counters().refused, 1);
        works(&other, 1);
    });
}

// -------------------------------------------------------------------- P2: holes

#[test]
fn p2_a_slot_that_is_never_published_is_stuck() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[("stuck", "200")]);
        let other = rig.pair(QpConfig::default());
        let from = rig.upload(&noise(64, 1));
        let half: Vec<u8> = {
            let mut words = wqe(abi::PUSHGATE_OP_SEND, 0);
            words[5] = 0; // still has the last lap's number
            words.iter().flat_map(|w| w.to_le_bytes()).collect()
        };
        let half = rig.upload(&half);
        let cases: [(&str, Vec<Step>); 2] = [
            ("a slot", vec![Step::reserve(1, 64), Step::send(from.addr(), 8, 0), Step::wait_signal(0, 1)]),
            (
                "words of a slot",
                vec![Step::reserve(1, 128), Step::raw(half.addr(), 0), Step::wait_signal(0, 1)],
            ),
        ];
        for (i, (what, steps)) in cases.into_iter().enumerate() {
            let pair = rig.pair(QpConfig::default());
            let near = pair[0].run(THREAD, &steps).pop().unwrap();
            assert_eq!(near.status, "stuck", "{what}");
            assert!(near.took >= Duration::from_millis(150) && near.took < hang(), "{near:?}");
            for end in &pair {
                let e = end.ended();
                assert!(matches!(e, Error::Stuck { rank: 0, slot: 0 }), "{what}: {e}");
            }
            assert_eq!(rig.counters().stuck, i as u64 + 1);
            works(&other, i as u32);
        }
    });
}
