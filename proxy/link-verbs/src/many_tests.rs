//! What a message takes both engines, in instructions, among many receives of other tags and many WRITEs under way. Valgrind's
//! callgrind counts the engines' instructions and leaves out those of the device.

use std::process::Command;
use std::time::Duration;

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::Link;
use pushgate_link::region::RegionMemory;
use pushgate_tests::{output, patience, skip};

use super::config::{Config, RdmaCm, WriteOrder};
use super::simulated::Sim;
use super::simulated_tests::links_between;
use pushgate_test_ends::{End, GEOMETRY, ends_alone, memory};

/// Messages that a program posts at once, and how often while they are counted.
const BATCH: usize = 32;
const BATCHES: usize = 200;
/// Bytes of a message: it goes by a WRITE of its own.
const BYTES: usize = 512;
/// Logarithm of the places for messages in the receiver's region.
const PLACES: u32 = 15;
const FOREIGN: u32 = 9;
const TAG: u32 = 7;
/// Names for the second process what it is to do.
const CASE: &str = "_PUSHGATE_TEST_CASE";

/// Where callgrind begins to count, and ends.
#[inline(never)]
fn counted(act: &mut dyn FnMut()) {
    act();
}

/// Both ends, and the key of the receiver's region.
fn pair(sim: &Sim) -> ([End; 2], u32) {
    let geometry = Geometry { window_log: 20, slots_log: 16, rx_log: 16, link_log: 16, ..GEOMETRY };
    let config = Config {
        cm: RdmaCm::Off,
        posted_receives: true,
        imm: false,
        write_order: WriteOrder::Wait,
        ..Config::default()
    };
    let (links, windows, mirrors) = links_between([sim, sim], &config, geometry);
    let links = links.map(|link| Box::new(link) as Box<dyn Link>);
    let mut ends = ends_alone(geometry, links.into(), windows, mirrors, true);
    let region = memory("places", BYTES << PLACES);
    let at = RegionMemory::Host { address: region.as_ptr().as_ptr().addr(), keep: Some(region.clone()) };
    let key = ends[1].endpoint.add_region(at, (BYTES as u64) << PLACES).unwrap();
    while !ends.iter().all(|end| end.endpoint.regions_told()) {
        ends.iter_mut().for_each(End::poll);
        while sim.complete(0) {}
    }
    (ends, key)
}

/// Messages of one tag, each with a receive of its own, among `foreign` receives for which no message comes.
fn among_receives(foreign: u64, tag_of: fn(u64) -> u32) {
    let sim = Sim::new();
    let ([mut a, mut b], key) = pair(&sim);
    sim.prompt();
    sim.drains();
    for n in 0..foreign {
        assert!(b.device.post_recv(key, 0, BYTES as u32, tag_of(n)));
    }
    let mut batch = || {
        for _ in 0..BATCH {
            assert!(b.device.post_recv(key, 0, BYTES as u32, TAG));
            assert!(a.device.post(Record { tag: TAG, ..Record::new(Opcode::Send) }, &[1; BYTES]));
        }
        let mut taken = 0;
        while taken < BATCH {
            a.poll();
            b.poll();
            while b.device.try_recv().is_some() {
                taken += 1;
                b.device.release(1);
            }
        }
    };
    // Until the engines know of all receives, and the first pages of their rings are there.
    (0..BATCHES).for_each(|_| batch());
    counted(&mut || (0..BATCHES).for_each(|_| batch()));
}

/// Messages to places that `place` chooses. The payload of `under_way` of them or more is under way all the time.
fn among_writes(under_way: usize, place: fn(u64) -> u64) {
    let sim = Sim::new();
    let ([mut a, mut b], key) = pair(&sim);
    let [of_a, of_b] = sim.numbers()[..] else { panic!("two queue pairs") };
    let mut posted = 0;
    let mut post = |a: &mut End, messages: usize| {
        for _ in 0..messages {
            let remote_offset = (place(posted) % (1 << PLACES)) * BYTES as u64;
            let put = Record { rkey: key, remote_offset, ..Record::new(Opcode::Put) };
            assert!(a.device.post(put, &[1; BYTES]));
            posted += 1;
        }
        a.poll();
    };
    let mut batch = |writes: usize| {
        post(&mut a, BATCH);
        (0..writes).for_each(|_| assert!(sim.complete_of(of_a)));
        a.poll();
        b.poll();
        while sim.complete_of(of_b) {}
    };
    (0..under_way.div_ceil(BATCH)).for_each(|_| batch(0));
    // The records of messages come to be among the payloads.
    (0..under_way.div_ceil(BATCH)).for_each(|_| batch(BATCH));
    (0..BATCHES).for_each(|_| batch(2 * BATCH));
    counted(&mut || (0..BATCHES).for_each(|_| batch(2 * BATCH)));
    let expected = 2 * under_way.next_multiple_of(BATCH);
    assert_eq!((sim.under_way(of_a), a.device.status()), (expected, None));
    sim.drains();
}

/// A tag each, or a place each.
const EACH: fn(u64) -> u32 = |n| n as u32 + 100;
const ONE: fn(u64) -> u32 = |_| FOREIGN;
const IN_TURN: fn(u64) -> u64 = |n| n;
/// A permutation in which nothing follows its neighbour.
const IN_NO_ORDER: fn(u64) -> u64 = |n| {
    let at = n.wrapping_mul(0x9e37_79b1) % (1 << PLACES);
    (at ^ at >> 7).wrapping_mul(0x85eb_ca6b) % (1 << PLACES)
};

#[test]
#[ignore = "a process of its own under callgrind: the tests below start it"]
fn case() {
    let case = std::env::var(CASE).expect("the tests below name the case");
    let (what, number) = case.split_once(' ').unwrap();
    let number: u64 = number.parse().unwrap();
    match what {
        "one-tag" => among_receives(number, ONE),
        "tags" => among_receives(number, EACH),
        "in-turn" => among_writes(number as usize, IN_TURN),
        "in-no-order" => among_writes(number as usize, IN_NO_ORDER),
        _ => panic!("{case}"),
    }
}

/// Instructions of a message, those of the device left out.
fn instructions(what: &str, number: u64) -> Option<f64> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        skip("no valgrind: install it to count instructions");
        return None;
    }
    let file = std::env::temp_dir().join(format!("pushgate-counts-{}-{what}-{number}", std::process::id()));
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*many_tests*counted*"]);
    command.arg(format!("--callgrind-out-file={}", file.display()));
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "many_tests::case", "--ignored", "--test-threads=1"]);
    command.env(CASE, format!("{what} {number}"));
    let output = output(&mut command, patience(Duration::from_secs(600)));
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{said:?}");
    let counts = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    Some(engines(&counts) as f64 / (BATCH * BATCHES) as f64)
}

/// What callgrind's file counts in all, without what calls of the device's functions cost.
fn engines(counts: &str) -> u64 {
    let last = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    let is_device = |name: &str| {
        let of_device = ["post_send", "post_recv", "poll_cq", "complete_of"];
        name.contains("simulated") && of_device.iter().any(|function| name.contains(function))
    };
    // A function's name stands where its number comes first.
    let (mut of_device, mut calls_device, mut all, mut device) = (Vec::new(), false, 0, 0);
    let mut lines = counts.lines();
    while let Some(line) = lines.next() {
        let (key, value) = line.split_once(['=', ':']).unwrap_or((line, ""));
        match key {
            "fn" | "cfn" => {
                let (number, name) = value.split_once(' ').unwrap_or((value, ""));
                if is_device(name) {
                    of_device.push(number);
                }
                calls_device = key == "cfn" && of_device.contains(&number);
            }
            "calls" => device += if calls_device { last(lines.next().unwrap()) } else { 0 },
            "totals" => all = last(line),
            _ => {}
        }
    }
    assert!(device > 0, "no call of the device");
    all - device
}

fn compare(what: &str, few: u64, many: u64) {
    let Some(few) = instructions(what, few) else { return };
    let many = instructions(what, many).unwrap();
    println!("{what}: {few:.0} instructions a message, {many:.0} among many: {:.2}", many / few);
    assert!(few > 200.0 && many <= 1.2 * few, "{what}: {few:.0}, {many:.0} instructions a message");
}

#[test]
fn p8_a_message_takes_as_many_instructions_among_two_to_the_sixteenth_foreign_receives_as_among_64() {
    for what in ["one-tag", "tags"] {
        compare(what, 64, (1 << 16) - BATCH as u64);
    }
}

#[test]
fn p8_a_message_takes_as_many_instructions_with_16383_writes_under_way_as_with_64() {
    for what in ["in-turn", "in-no-order"] {
        compare(what, 64, (1 << 14) - 1);
    }
}
