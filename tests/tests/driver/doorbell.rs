//! Doorbells, and stores that host and guest see: the host's side is xtask's.

use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::kmod::{Device, Mapping};
use pushgate_tests::{hang, wait_until};

use crate::harness::{MIB, PATTERN, SHORT, SLOTS, WINDOW, alone, function, long, read, staging, write};

/// Asks the host through the first words of the shared memory; xtask/src/vm/ivshmem.rs answers.
struct Host {
    map: Mapping,
    number: u64,
}

impl Host {
    fn new(device: &Device) -> Host {
        let map = device.slice(WINDOW, 0).unwrap().map().unwrap();
        write(&map, 56, u64::from_le_bytes(*b"REQUESTS"));
        Host { map, number: 0 }
    }

    fn ask(&mut self, request: u64, arguments: [u64; 4]) {
        write(&self.map, 8, request);
        for (i, word) in arguments.into_iter().enumerate() {
            write(&self.map, 16 + 8 * i, word);
        }
        self.number += 1;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        write(&self.map, 0, self.number);
    }

    fn answer(&self) -> u64 {
        let end = Instant::now() + hang();
        while read(&self.map, 64) != self.number {
            assert!(Instant::now() < end, "the host does not answer");
            thread::sleep(Duration::from_millis(1));
        }
        read(&self.map, 72)
    }

    fn ring(&mut self, vector: u64, times: u64, every_us: u64) {
        self.ask(1, [0, vector, times, every_us]);
    }
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn host_and_guest_see_each_others_stores() {
    let Some(_guard) = alone() else { return };
    let control = function(2);
    let mut host = Host::new(&control);
    let device = function(0);
    let slice = device.slice(WINDOW, 0).unwrap();
    let map = slice.map().unwrap();
    let range = [SLOTS[0].into(), MIB as u64, 2 * MIB as u64, PATTERN];
    host.ask(3, range);
    assert_eq!(host.answer(), 0);
    (MIB..2 * MIB).step_by(8).for_each(|at| write(&map, at, PATTERN));
    host.ask(3, range);
    assert_eq!(host.answer(), MIB as u64 / 8);
    host.ask(2, [SLOTS[0].into(), 0, MIB as u64, !PATTERN]);
    assert_eq!(host.answer(), MIB as u64);
    let seen = (0..MIB).step_by(8).filter(|at| read(&map, *at) == !PATTERN).count();
    assert_eq!(seen, MIB / 8);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn the_hosts_rings_wake_only_an_armed_doorbell() {
    let Some(_guard) = alone() else { return };
    let device = function(2);
    let (bell, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    let mut host = Host::new(&device);
    let doorbell = device.doorbell(&bell, 1, 0).unwrap();
    let (second, status) = (function(2), device.status().unwrap());
    let quiet = second.doorbell(&other, 2, 0).unwrap();
    assert_eq!(quiet.arm(0).unwrap(), (0, true));

    // Not armed: the ring is counted and wakes nothing.
    host.ring(1, 1, 0);
    assert_eq!(host.answer(), 1);
    wait_until("the ring is counted", || status.rings() > 0);
    assert!(!bell.wait(SHORT).unwrap());
    assert_eq!(status.rings(), 1);
    // There was a ring since the last look: nothing is armed, look again.
    assert_eq!(doorbell.arm(0).unwrap(), (1, false));
    assert_eq!(doorbell.arm(1).unwrap(), (1, true));
    host.ring(1, 1, 0);
    assert!(bell.wait(long()).unwrap());
    assert_eq!(doorbell.disarm().unwrap(), 2);
    host.answer();
    host.ring(1, 1, 0);
    host.answer();
    assert!(!bell.wait(SHORT).unwrap());
    // The other vector's listener got none of these rings.
    assert!(!other.drain());
    host.ring(2, 1, 0);
    assert!(other.wait(long()).unwrap());
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn no_ring_is_lost_between_look_and_sleep() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let doorbell = device.doorbell(&bell, 0, 0).unwrap();
    let rung = std::sync::atomic::AtomicU64::new(0);
    const ROUNDS: u64 = 3000;
    // Each ring waits until the one before was seen, so a lost ring ends in the time limit.
    let seen_all = std::sync::atomic::AtomicU64::new(0);
    use std::sync::atomic::Ordering::SeqCst;
    let mut sleeps = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                rung.store(round, SeqCst);
                // Rings peer 0, vector 0.
                ringer.ring(0).unwrap();
                let end = Instant::now() + hang();
                while seen_all.load(SeqCst) < round {
                    assert!(Instant::now() < end, "ring {round} was lost");
                    thread::yield_now();
                }
            }
        });
        let mut seen = 0;
        let mut looked = 0;
        while looked < ROUNDS {
            // The look; a ring may come at any point from here to the sleep.
            let now = rung.load(SeqCst);
            if now > looked {
                looked = now;
                seen_all.store(looked, SeqCst);
                continue;
            }
            let (rings, armed) = doorbell.arm(seen).unwrap();
            if !armed {
                seen = rings;
                continue;
            }
            // Work that was published before the doorbell was armed rang afterwards; otherwise it
            // is seen here.
            if rung.load(SeqCst) > looked {
                continue;
            }
            assert!(bell.wait(long()).unwrap(), "asleep with {looked} of {ROUNDS} rounds seen");
            sleeps += 1;
        }
    });
    println!("{ROUNDS} rounds, {sleeps} of them slept for");
    assert!(sleeps > 0);
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn interrupts_are_moderated_and_the_last_is_not_lost() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let status = device.status().unwrap();
    let doorbell = device.doorbell(&bell, 3, 100_000).unwrap();
    let (mut wakes, begin) = (0u32, Instant::now());
    assert_eq!(doorbell.arm(0).unwrap(), (0, true));
    while begin.elapsed() < Duration::from_secs(2) || wakes < 5 {
        assert!(begin.elapsed() < hang(), "{wakes} wakes");
        ringer.ring(3).unwrap();
        wakes += u32::from(bell.wait(Some(Duration::from_millis(2))).unwrap());
    }
    // The last ring's wake-up comes when the interval is over.
    thread::sleep(Duration::from_millis(250));
    wakes += u32::from(bell.drain());
    let most = begin.elapsed().as_millis() as u32 / 100 + 2;
    println!("{} rings, {wakes} wakes in {:?}, at most one in 100 ms", status.rings(), begin.elapsed());
    assert!(status.rings() > u64::from(wakes) && wakes >= 5 && wakes <= most, "{wakes} wakes");
    ringer.ring(3).unwrap();
    assert!(bell.wait(long()).unwrap());
}

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn what_a_doorbell_and_a_mapping_cost() {
    let Some(_guard) = alone() else { return };
    let (device, ringer) = (function(2), function(3));
    let bell = EventFd::new().unwrap();
    let doorbell = device.doorbell(&bell, 0, 0).unwrap();
    let mut times = Vec::new();
    for _ in 0..300 {
        let seen = doorbell.disarm().unwrap();
        assert!(doorbell.arm(seen).unwrap().1);
        let begin = Instant::now();
        ringer.ring(0).unwrap();
        assert!(bell.wait(long()).unwrap());
        times.push(begin.elapsed());
    }
    times.sort();
    println!("doorbell register to wake-up, emulated: median {:?}, 99th {:?}", times[150], times[297]);
    for bytes in [64 << 10, MIB, 4 * MIB] {
        let (a, b) = (function(1), staging());
        let begin = Instant::now();
        let slice = a.slice(bytes, 0).unwrap();
        let taken = begin.elapsed();
        let map = slice.map().unwrap();
        let mapped = begin.elapsed() - taken;
        let begin = Instant::now();
        let area = b.create_staging("cost", bytes, 0).unwrap();
        let created = begin.elapsed();
        let other = area.map().unwrap();
        println!(
            "{} KiB: slice zeroed in {taken:?}, mapped in {mapped:?}; staging made in {created:?}, mapped in {:?}",
            bytes >> 10,
            begin.elapsed() - created
        );
        drop((map, other));
    }
}
