//! Rings and payload that lie in staging, after the proxy's process was killed (P6).

use std::thread;
use std::time::{Duration, Instant};

use pushgate_tests::{hang, patience};
use rustix::io::Errno;

use crate::harness::{Actor, alone};

const MESSAGES: u64 = 16;
const MESSAGE: u64 = 1024;

/// A rank of two. Rank 0, whose rings lie in staging, pushes more messages than rank 1, which takes
/// none, has receives for. The messages that rank 1 has it holds in place, so that nothing is
/// retired.
pub fn rank(rank: u32) {
    let mut settings = pushgate::Settings::default();
    for (name, value) in [
        ("device", "cpu"),
        ("qp", "verbs"),
        ("ib-dev", "rxe0"),
        ("window", "staging"),
        ("rings", if rank == 0 { "window" } else { "host" }),
        ("window-size", "64K"),
        ("slots", "32"),
        ("receives", "4"),
    ] {
        settings.set(name, value).unwrap();
    }
    let context = pushgate::Context::builder().settings(settings).build().unwrap();
    let comm = pushgate::Comm::connect(&context, "killed", rank, 2).unwrap();
    let qp = comm.queue_pair(1 - rank, 0, pushgate::QpConfig::default()).unwrap();
    let mut line = String::new();
    if rank == 1 {
        println!("@joined");
        std::io::stdin().read_line(&mut line).unwrap();
        return;
    }
    let qps = pushgate::upload_descriptors(&context, [&qp]).unwrap();
    let result = context.alloc(8).unwrap();
    let (module, stream) = (pushgate::Module::embedded(&context), context.stream().unwrap());
    let params = [qps.addr(), result.addr(), 0, MESSAGES, MESSAGE];
    // SAFETY: everything that the kernel uses lives until this process is killed.
    let running = unsafe {
        context.launch(&stream, &module, "outside_send", pushgate::Launch::new(1, 1), &params).unwrap()
    };
    let end = Instant::now() + hang();
    let settled = loop {
        let state = qp.ring_state().unwrap();
        if context.counters().unwrap().released == 4 && state.waiting.len() as u64 == MESSAGES {
            break state;
        }
        assert!(Instant::now() < end, "{state:?}");
        thread::sleep(Duration::from_millis(10));
    };
    // The peer's counts arrive a little later: wait until nothing changes any more.
    let mut state = settled.clone();
    loop {
        thread::sleep(patience(Duration::from_millis(300)));
        let before = std::mem::replace(&mut state, qp.ring_state().unwrap());
        if before == state {
            break;
        }
    }
    assert_eq!(state.waiting, settled.waiting);
    println!("@{}", qp.area().expect("it lies in staging"));
    println!("@{state:?}");
    std::io::stdin().read_line(&mut line).unwrap();
    drop(running);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn p6_a_killed_proxy_leaves_rings_and_payload_to_the_next() {
    use pushgate_driver_shim::placed::Placed;
    use pushgate_driver_shim::provider::StagingWindow;
    use pushgate_driver_shim::window::Window;

    let Some(_guard) = alone() else { return };
    let mut proxy = Actor::new("killed-proxy");
    let mut peer = Actor::new("peer-of-the-killed");
    peer.hear();
    let name = proxy.hear();
    let said = proxy.hear();
    let busy = StagingWindow::take_up(None, &name).expect_err("it has an owner");
    assert_eq!(busy.errno(), Some(Errno::BUSY.raw_os_error()), "{busy}");
    proxy.kill();
    let end = Instant::now() + hang();
    let taken = loop {
        match StagingWindow::take_up(None, &name) {
            Ok(window) => break std::sync::Arc::new(window),
            // The dead process's descriptors close a little after it was reaped.
            Err(e) => assert!(Instant::now() < end, "{e}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    let placed = Placed::find(taken.clone()).unwrap();
    let state = placed.state();
    assert_eq!(format!("{state:?}"), said);
    assert_eq!(state.waiting.len() as u64, MESSAGES);
    for (number, waiting) in (0u64..).zip(&state.waiting) {
        assert_eq!((waiting.slot, u64::from(waiting.length)), (number, MESSAGE));
        let at = waiting.place as usize * 64;
        let words = placed.payload.words(at, MESSAGE as usize / 8);
        for (i, pair) in (0u64..).zip(words.chunks(2)) {
            let pair = [0, 1].map(|w: usize| pair[w].load(std::sync::atomic::Ordering::Relaxed));
            assert_eq!(pair, [number, i], "message {number}");
        }
    }
    // Once freed, the area is gone.
    assert!(taken.len() >= placed.payload.len());
    drop((placed, taken));
    let gone = StagingWindow::take_up(None, &name).expect_err("it was freed");
    assert_eq!(gone.errno(), Some(Errno::NOENT.raw_os_error()), "{gone}");
    peer.say("go");
    assert_eq!(peer.end(), None);
}
