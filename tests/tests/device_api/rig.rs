//! Two ranks of this process on one context, and the kernels that play scripts on their queue pairs. Their transport is `local`, or what
//! `PUSHGATE_TEST_QP` says.

use std::cell::Cell;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use pushgate::settings::DeviceChoice;
use pushgate::{
    Comm, Context, Counters, DeviceBuffer, Error, Launch, Module, QpConfig, QueuePair, Running, Settings,
    Source, Stream, WaitOutcome, status_name, upload_descriptors,
};
use pushgate_tests::{built, hang};

use crate::step::Step;

/// Held by each test: tests spin, and some measure time, so one runs at a time.
static ONE: Mutex<()> = Mutex::new(());

/// Runs a test on the CPU, and on a GPU where there is one.
pub fn on_every_device(test: impl Fn(DeviceChoice)) {
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
pub struct Rig {
    script: Module,
    pub crowd: Module,
    ranks: [Comm; 2],
    label: Cell<u32>,
    pub context: Context,
}

impl Rig {
    pub fn new(device: DeviceChoice, with: &[(&str, &str)]) -> Rig {
        let mut settings = Settings::default();
        settings.device = device;
        settings.timeout = hang();
        if let Ok(qp) = std::env::var("PUSHGATE_TEST_QP") {
            settings.set("qp", &qp).unwrap();
        }
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

    pub fn pair(&self, config: QpConfig) -> [End<'_>; 2] {
        self.pair_of([config; 2])
    }

    pub fn pair_of(&self, configs: [QpConfig; 2]) -> [End<'_>; 2] {
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

    pub fn zeroed(&self, bytes: usize) -> DeviceBuffer {
        self.context.alloc(bytes.max(16)).unwrap()
    }

    pub fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        self.context.upload(bytes).unwrap()
    }

    pub fn counters(&self) -> Counters {
        self.context.counters().unwrap()
    }

    /// A launch with as many threads as this device handles well.
    pub fn crowd(&self) -> Launch {
        Launch::new(4, 64).cooperating()
    }

    pub fn cpu(&self) -> bool {
        self.context.device() == "cpu"
    }
}

/// One end of a queue pair between the two ranks, with its stream and its descriptor on the device.
pub struct End<'a> {
    pub descriptor: DeviceBuffer,
    stream: Stream,
    pub qp: QueuePair,
    rig: &'a Rig,
}

/// Which threads make a call together, and the number of threads in the block.
#[derive(Clone, Copy, Debug)]
pub struct Scope(pub &'static str, pub u32);

pub const THREAD: Scope = Scope("script_thread", 1);
/// The short ones are a warp and a block that are not full.
pub const SCOPES: [Scope; 5] = [
    THREAD,
    Scope("script_warp", 32),
    Scope("script_warp", 20),
    Scope("script_block", 64),
    Scope("script_block", 33),
];

impl End<'_> {
    pub fn launch<const N: usize>(
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

    pub fn start(&self, scope: Scope, steps: &[Step]) -> Script {
        let bytes: Vec<u8> = steps.iter().flat_map(|s| s.words()).flat_map(u64::to_le_bytes).collect();
        let steps_there = self.rig.upload(&bytes);
        let outcomes = self.rig.upload(&vec![0xff; steps.len() * 32]);
        let params = [self.descriptor.addr(), steps_there.addr(), outcomes.addr(), steps.len() as u64];
        let running = self.launch(&self.rig.script, scope.0, Launch::new(1, scope.1).cooperating(), params);
        Script { running, outcomes, _steps: steps_there, n: steps.len() }
    }

    pub fn run(&self, scope: Scope, steps: &[Step]) -> Vec<Outcome> {
        self.start(scope, steps).end()
    }

    pub fn refused(&self) -> u32 {
        match self.qp.check() {
            Err(Error::Refused { rank, .. }) => rank,
            other => panic!("{other:?} instead of a refusal"),
        }
    }

    /// The cause with which the engine ended the queue pair, once it has.
    pub fn ended(&self) -> Error {
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

/// A script that runs on the device.
pub struct Script {
    pub running: Running,
    outcomes: DeviceBuffer,
    _steps: DeviceBuffer,
    n: usize,
}

impl Script {
    pub fn end(self) -> Vec<Outcome> {
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

pub fn finish(running: &Running) {
    assert_eq!(running.wait(Some(2 * hang())).unwrap(), WaitOutcome::Done, "a kernel did not end");
}

/// What a step of a script came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: &'static str,
    pub x: u64,
    pub y: u64,
    pub took: Duration,
}

impl Outcome {
    pub fn length(&self) -> u64 {
        self.x >> 32
    }

    pub fn tag(&self) -> u32 {
        self.x as u32
    }
}

#[track_caller]
pub fn all_ok(outcomes: &[Outcome]) {
    for (i, o) in outcomes.iter().enumerate() {
        assert_eq!(o.status, "ok", "step {i} of {}", outcomes.len());
    }
}

pub fn read_words(buffer: &DeviceBuffer, n: usize) -> Vec<u64> {
    read(buffer, n * 8).chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect()
}

pub fn read(buffer: &DeviceBuffer, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    buffer.copy_to_host(&mut bytes).unwrap();
    bytes
}

pub fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    let next = || {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (x >> 56) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Passes a message, which shows that nothing holds up the queue pair.
#[track_caller]
pub fn works(pair: &[End<'_>; 2], tag: u32) {
    let rig = pair[0].rig;
    let (from, to) = (rig.upload(&noise(48, tag.into())), rig.zeroed(48));
    let receiver = pair[1].start(THREAD, &[Step::recv(to.addr(), 48), Step::release(1)]);
    all_ok(&pair[0].run(THREAD, &[Step::send(from.addr(), 48, tag), Step::flush()]));
    let got = receiver.end();
    all_ok(&got);
    assert_eq!((got[0].length(), got[0].tag()), (48, tag));
    assert_eq!(read(&to, 48), noise(48, tag.into()));
}

pub fn window(bytes: u64) -> QpConfig {
    QpConfig { window_size: Some(bytes), ..QpConfig::default() }
}
