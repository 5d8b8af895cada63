//! What a peer may write over RDMA into an end's memory, and a device into its rings: any words.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record, lap_of};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::Link;
use pushgate_tests::fuzz::{depth, fuzz};

use super::config::Config;
use super::mock;
use super::setup::VerbsOpening;
use super::simulated::Sim;
use super::slot::{COUNTS, SLOT_WORDS};
use pushgate_test_ends::{End, GEOMETRY, REGION, Random, ends, memory};

/// Steps of an input, by their first byte: the peer writes a word of the inbox, or the slot of the next message; the device
/// publishes a work request with some bits changed; time goes on; the device takes a message.
const WORD: u8 = 0;
const SLOT: u8 = 1;
const REQUEST: u8 = 2;
const TIME: u8 = 3;
const TAKES: u8 = 4;
const STEPS: u8 = 5;

const RECORD_WORDS: usize = COUNTS.start;

/// Both ends of a queue pair, and the first one's inbox, which the peer's device writes.
fn pair(sim: &Sim) -> ([End; 2], SharedMemory) {
    let geometry = |rank| Geometry { rank, ..GEOMETRY };
    let config = Config { imm: false, ..Config::default() };
    let inbox = Cell::new(None);
    let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
    let mut allocate_first = |name: &str, bytes: usize| {
        let memory = SharedMemory::builder(name, bytes).create()?;
        if name == "inbox" {
            let fd = memory.fd().try_clone_to_owned().unwrap();
            inbox.set(Some(SharedMemory::from_fd(fd, bytes).unwrap()));
        }
        Ok(memory)
    };
    let windows = [0, 1].map(|rank| memory("window", geometry(rank).window_bytes()));
    let openings = [0, 1].map(|rank| {
        let window = windows[rank as usize].clone();
        VerbsOpening::new(&sim.device, &config, geometry(rank), window, &mut allocate).unwrap()
    });
    let [first, second] = [openings[0].offer(), openings[1].offer()];
    let [a, b] = openings;
    let a = a.prepare(1, &second, &mut allocate_first).unwrap();
    let b = b.prepare(0, &first, &mut allocate).unwrap();
    let places = [b.places(), a.places()];
    let mirrors = [a.mirror().clone(), b.mirror().clone()];
    let links = [a, b].into_iter().zip(places);
    let links = links.map(|(prepared, places)| Box::new(prepared.join(places).unwrap()) as Box<dyn Link>);
    let ends = ends(links.collect(), windows, mirrors, false, || while sim.complete(0) {});
    (ends, inbox.take().expect("an end that may receive has an inbox"))
}

/// The words of the slot for message `n`.
fn slot(inbox: &SharedMemory, n: u64) -> &[std::sync::atomic::AtomicU64] {
    let at = abi::PUSHGATE_PAGE as usize + (n as usize % (1 << GEOMETRY.link_log)) * SLOT_WORDS * 8;
    inbox.words(at, SLOT_WORDS)
}

/// Writes the slot of message `n`, as the peer's device would: the lap is right.
fn arrives(inbox: &SharedMemory, n: u64, words: &[u64]) {
    let lap = u64::from(lap_of(n, GEOMETRY.link_log)) << abi::PUSHGATE_LAP_SHIFT;
    for (at, (to, word)) in slot(inbox, n).iter().zip(words).enumerate() {
        let has_lap = at < RECORD_WORDS || (at >= COUNTS.end && *word != 0);
        let word = if has_lap { word & abi::PUSHGATE_DATA_MASK | lap } else { *word };
        to.store(word, Ordering::Release);
    }
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Splits words off.
fn words<const N: usize>(rest: &mut &[u8]) -> Option<[u64; N]> {
    let (now, after) = rest.split_at_checked(8 * N)?;
    *rest = after;
    let (now, _) = now.as_chunks::<8>();
    Some(std::array::from_fn(|i| u64::from_le_bytes(now[i])))
}

/// The device's work request, whose payload goes through the window, with these changes.
fn publishes(end: &mut End, length: usize, changes: &[u64; 8]) {
    let Some((taken, mut words)) = end.device.stage(Record::new(Opcode::Send), length) else { return };
    words.iter_mut().zip(changes).for_each(|(word, change)| *word ^= change & abi::PUSHGATE_DATA_MASK);
    end.device.publish(taken.slot, &words);
}

/// The step by which a work request of no changes becomes `record`.
fn request(end: &mut End, record: Record, length: u8) -> Vec<u8> {
    let (_, plain) = end.device.stage(Record::new(Opcode::Send), length.into()).unwrap();
    let (place, units) = (plain[5] as u32, plain[6] & abi::PUSHGATE_DATA_MASK);
    let record = Record { length: length.into(), place, place_offset: units, ..record };
    let changes: Vec<u64> = plain.iter().zip(record.encode(0)).map(|(a, b)| a ^ b).collect();
    [&[REQUEST, length], &bytes(&changes)[..]].concat()
}

/// What a peer writes that keeps the rules, with turns between.
fn said(sim: &Sim) -> Vec<u8> {
    let ([mut own, mut peer], inbox) = pair(sim);
    let mut random = Random(7);
    let mut steps = Vec::new();
    for n in 0..6 {
        let before = peer.posted;
        // The record follows its payload once that is placed.
        while peer.posted == before || slot(&inbox, n)[0].load(Ordering::Acquire) == 0 {
            if peer.posted == before {
                peer.post(own.key, &mut random);
            }
            peer.poll();
            work(sim);
        }
        let words: Vec<_> = slot(&inbox, n).iter().map(|word| word.load(Ordering::Acquire)).collect();
        steps.extend([&[SLOT], &bytes(&words)[..], &[TAKES]].concat());
        own.poll();
        work(sim);
    }
    steps
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_words_of_a_peer_or_a_device_over_rdma_make_an_end_panic_or_write_beside_its_region() {
    let sim = Sim::new();
    // A WRITE elsewhere ends with an error, as at a real device.
    sim.refuses();
    sim.drains();
    // Nobody lets the device work while an end that is dropped waits for its last words.
    sim.prompt();
    let said = said(&sim);
    let asked = {
        let ([mut own, peer], _inbox) = pair(&sim);
        let put = Record {
            rkey: peer.key,
            flags: Record::WITH_SIGNAL,
            signal_value: 3,
            ..Record::new(Opcode::Put)
        };
        [
            request(&mut own, Record::new(Opcode::Send), 40),
            request(&mut own, put, 80),
            request(&mut own, Record { opcode: Opcode::Signal, ..put }, 0),
            vec![TIME, 9],
        ]
        .concat()
    };
    let leaves = [vec![WORD, 4, 0], bytes(&[1]), vec![TIME, 1]].concat();
    let seeds = [said.clone(), asked.clone(), [said, asked, leaves].concat()];
    let taken = Cell::new(0);
    let target = |mut rest: &[u8]| {
        let ([mut own, peer], inbox) = pair(&sim);
        let (mut messages, mut took) = (0, 0);
        while let Some((step, after)) = rest.split_first() {
            rest = after;
            match step % STEPS {
                WORD => {
                    let Some((at, after)) = rest.split_first_chunk() else { break };
                    rest = after;
                    let Some([word]) = words(&mut rest) else { break };
                    let at = usize::from(u16::from_le_bytes(*at)) % (inbox.len() / 8);
                    inbox.words(8 * at, 1)[0].store(word, Ordering::Release);
                }
                SLOT => {
                    let Some(all) = words::<SLOT_WORDS>(&mut rest) else { break };
                    arrives(&inbox, messages, &all);
                    messages += 1;
                }
                REQUEST => {
                    let Some((length, after)) = rest.split_first() else { break };
                    rest = after;
                    let Some(changes) = words(&mut rest) else { break };
                    publishes(&mut own, (*length).into(), &changes);
                }
                TIME => {
                    let Some((length, after)) = rest.split_first() else { break };
                    rest = after;
                    own.now += u64::from(*length) << 20;
                }
                _ => {
                    if own.device.try_recv().is_some() {
                        own.device.release(1);
                        took += 1;
                    }
                }
            }
            for _ in 0..2 {
                own.poll();
                work(&sim);
            }
        }
        let page = abi::PUSHGATE_PAGE as usize;
        for region in [&own.region, &peer.region] {
            // SAFETY: the mapping ends with the page, and nobody else writes there.
            let beside = unsafe {
                std::slice::from_raw_parts(region.as_ptr().as_ptr().add(REGION), page - REGION % page)
            };
            assert!(beside.iter().all(|byte| *byte == 0), "a byte beside a region");
        }
        let status = own.endpoint.status().map_or(0, |status| status.word());
        let touched =
            (0..REGION / 8).filter(|at| own.region.words(8 * at, 1)[0].load(Ordering::Relaxed) != 0).count();
        taken.set(took + touched);
        let counted = own.endpoint.counters().iter().fold(0, |all, (_, n)| all << 1 | u64::from(n > 0));
        drop((own, peer));
        mock::take();
        status.wrapping_mul(31) ^ counted << 16 ^ depth(touched) << 8 ^ depth(took)
    };
    for (seed, least) in seeds.iter().zip([2, 0, 2]) {
        target(seed);
        assert!(taken.get() >= least, "what a peer says that keeps the rules is taken: {}", taken.get());
    }
    fuzz(&seeds, target);
}

fn work(sim: &Sim) {
    while sim.complete(0) {}
}
