//! What many queue pairs in one process take: memory, descriptors, time to set up, and the time of a message among them.
//!
//! `cargo bench -p pushgate-tests --bench peers [-- PEERS]`, 1024 unless said. Both ends of every queue pair are in this
//! process, each side's in an engine of its own, over `local` with doorbells. The memory of the segments themselves is
//! made before the clock starts, and is told apart.

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::Instant;

use common::*;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::engine::{Engine, EngineOptions};
use pushgate_engine::idle::Wake;

/// Messages of the last figure.
const ROUNDS: u32 = 2_000;

/// Private memory of this process, KiB.
fn private() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = |l: &&str| l.starts_with("Private_Dirty:") || l.starts_with("Private_Clean:");
    text.lines().filter(line).map(|l| l.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn main() {
    let peers = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(1024usize);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, most).unwrap();

    let geometry = |rank| Geometry { rank, ..GEOMETRY };
    let before = (private(), descriptors());
    let memory: Vec<[Arc<Memory>; 2]> =
        (0..peers).map(|_| [0, 1].map(|rank| Memory::new(geometry(rank)))).collect();
    let made = (private(), descriptors());

    let bells = [0, 1].map(|_| EventFd::new().unwrap());
    let engines =
        [0, 1].map(|i| Engine::start(bells[i].try_clone().unwrap(), EngineOptions::default()).unwrap());
    let begin = Instant::now();
    for m in &memory {
        let mut rings = common::bells().map(Some);
        for i in [0, 1] {
            let qp = m[i].joined(&m[1 - i], rings[i].take());
            let end = Endpoint::local(qp, options(1 - i as u32)).unwrap();
            engines[i].add_qp(end, Wake::Doorbell).unwrap();
        }
    }
    let (set_up, joined) = (begin.elapsed(), (private(), descriptors()));

    let mut devices = [0, 1].map(|i| Device::new(&memory[peers - 1][i], &memory[peers - 1][1 - i]));
    for (device, bell) in devices.iter_mut().zip(&bells) {
        device.set_bell(Some(bell.try_clone().unwrap()));
    }
    let begin = Instant::now();
    for tag in 0..ROUNDS {
        let (from, to) = (tag as usize % 2, 1 - tag as usize % 2);
        while !devices[from].post(inline_send(tag), b"one of many") {
            std::thread::yield_now();
        }
        let received = loop {
            match devices[to].try_recv() {
                Some(m) => break m,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(received.tag, tag);
        devices[to].release(1);
    }
    let message = begin.elapsed() / ROUNDS;
    let begin = Instant::now();
    drop(engines);
    let ended = begin.elapsed();

    let ends = 2 * peers as u64;
    println!("{peers} queue pairs, both ends here: for each end");
    println!(
        "  segments   {:>8.1} KiB private, {:.1} descriptors",
        (made.0 - before.0) as f64 / ends as f64,
        (made.1 - before.1) as f64 / ends as f64
    );
    println!(
        "  engine     {:>8.1} KiB private, {:.1} descriptors",
        (joined.0.saturating_sub(made.0)) as f64 / ends as f64,
        (joined.1 - made.1) as f64 / ends as f64
    );
    println!(
        "  set up in  {:>8.1} us, ended in {:.1} us",
        set_up.as_secs_f64() * 1e6 / ends as f64,
        ended.as_secs_f64() * 1e6 / ends as f64
    );
    println!("a message among them, one way: {:.1} us", message.as_secs_f64() * 1e6);
}
