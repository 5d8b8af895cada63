//! Messages of any words from a stranger that has a rank's handle.

use pushgate_driver_shim::record::RecordWords;
use pushgate_tests::fuzz::{depth, fuzz, kind};

use super::*;
use crate::handshake::Made;

/// Steps of an input, by their first byte.
const MESSAGE: u8 = 0;
/// A message, and what of its record's words is changed.
const RECORD: u8 = 1;
/// The rank gets bytes of the stranger's rank.
const GETS: u8 = 2;
/// The rank registers another memory.
const REGISTERS: u8 = 3;
/// The rank deregisters its memory.
const DEREGISTERS: u8 = 4;
const STEPS: u8 = 5;

/// Words on either side of the memory, which nobody may write.
const GUARD: usize = 64;
/// Words of the memory.
const INSIDE: usize = 512;
/// The most payload of a message.
const MOST: usize = 2048;
/// Turns that a rank takes for each step.
const TURNS: usize = 20;

fn message(words: &Words, payload: usize) -> Vec<u8> {
    [&[MESSAGE][..], &(payload as u16).to_le_bytes(), &words.map(u64::to_le_bytes).concat()].concat()
}

/// Splits words off.
fn words(rest: &mut &[u8]) -> Option<Words> {
    let (bytes, after) = rest.split_first_chunk::<HEADER>()?;
    *rest = after;
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    Some(std::array::from_fn(word))
}

/// Posts a message, if there is room. `changes`: what of the record's words is another.
fn post(stranger: &mut Made, header: &Words, payload: usize, changes: &RecordWords) {
    let producer = &mut stranger.joined.producer;
    let Some((taken, mut record)) = producer.stage(Record::new(Opcode::Send), HEADER + payload) else {
        return;
    };
    let mut bytes = vec![0x77; HEADER + payload];
    bytes[..HEADER].copy_from_slice(&header.map(u64::to_le_bytes).concat());
    // SAFETY: the vector's own bytes.
    unsafe { producer.push(taken.place, bytes.as_ptr(), bytes.len()) };
    record.iter_mut().zip(changes).for_each(|(word, change)| *word ^= change & abi::PUSHGATE_DATA_MASK);
    producer.publish(taken.slot, &record);
    producer.wake();
}

/// A rank, a memory of it between guards, and a stranger that is connected with it.
struct Two {
    runtime: Arc<Runtime>,
    attempts: Arc<Attempts>,
    /// The other rank, in whose place the stranger speaks.
    other: (Door, [u8; crate::handle::BYTES]),
    purpose: Purpose,
}

impl Two {
    fn new() -> Two {
        let (runtime, attempts) = (Runtime::of_a_test(WINDOW), Arc::new(Attempts::new()));
        let other = Door::new(runtime.clone(), 0).unwrap();
        let purpose = Purpose::Rma { lane: runtime.rma_lane(0).unwrap(), window: 64 << 10 };
        Two { runtime, attempts, other, purpose }
    }

    /// What becomes of an input: an answer, and how many words of the memory were written where nothing has failed.
    fn run(&self, mut rest: &[u8]) -> (u64, Option<usize>) {
        let (door, mut handle) = Door::new(self.runtime.clone(), 0).unwrap();
        let handles: Box<[_]> = [handle, self.other.1].into();
        let made = (self.runtime.clone(), self.attempts.clone());
        let [coll, other] = [(&door, 0), (&self.other.0, 1)]
            .map(|(door, rank)| Coll::new(made.clone(), door, handles.clone(), rank).unwrap());
        let others = other.contexts(1, -1).unwrap();
        let all: Box<[AtomicU64]> = (0..INSIDE + 2 * GUARD).map(|_| AtomicU64::new(0)).collect();
        let address = all[GUARD..].as_ptr() as usize;
        let mut memory = Some(coll.register(address, 8 * INSIDE, false, false).unwrap());
        let contexts = coll.contexts(1, -1).unwrap();
        let mut stranger = until(|| {
            contexts.progress().unwrap();
            self.attempts.dial(&self.runtime, &mut handle, None, &self.purpose).unwrap()
        });
        let (mut answer, mut got) = (0, 0);
        while let Some((step, after)) = rest.split_first() {
            rest = after;
            match step % STEPS {
                kind @ (MESSAGE | RECORD) => {
                    let Some((payload, after)) = rest.split_first_chunk() else { break };
                    rest = after;
                    let Some(header) = words(&mut rest) else { break };
                    let changes = if kind == RECORD { words(&mut rest) } else { Some([0; 8]) };
                    let Some(changes) = changes else { break };
                    let payload = usize::from(u16::from_le_bytes(*payload)) % MOST;
                    if let Ok(read) = Header::decode(&header, payload) {
                        assert_eq!(
                            Header::decode(&read.encode(), payload),
                            Ok(read),
                            "it is written as it is read"
                        );
                    }
                    post(&mut stranger, &header, payload, &changes);
                }
                GETS => {
                    if let Some(memory) = &memory {
                        let at = Stretch { memory, offset: 8 };
                        // SAFETY: the memory outlives its registration.
                        got += u64::from(unsafe { contexts.get((0, 1), (at, at, 64)) }.is_ok());
                    }
                }
                REGISTERS => _ = coll.register(address + 4 * INSIDE, 4 * INSIDE, false, false).unwrap(),
                _ => _ = memory.take().map(|memory| coll.deregister(&memory).unwrap()),
            }
            for _ in 0..TURNS {
                contexts.progress().unwrap();
                others.progress().unwrap();
                stranger.joined.lane.drive_all();
            }
        }
        let status = stranger.joined.producer.status().map_or(0, |status| u64::from(status.code));
        let taken = stranger.joined.producer.delivered();
        let why = coll.failure();
        if let Some(why) = &why {
            assert!(why.len() < 4096, "{why:?}");
            answer = kind(why);
        }
        // What the rank has begun to send reaches the other rank, or the rank would wait for that.
        std::thread::scope(|threads| {
            let closes = threads.spawn(move || drop((contexts, coll, door)));
            while !closes.is_finished() {
                others.progress().unwrap();
                std::thread::yield_now();
            }
        });
        drop((others, other));
        // A stranger whose queue pair was ended is gone from its engine already.
        let _ = stranger.joined.lane.engine.remove_qp(stranger.joined.qp);
        let guards = all[..GUARD].iter().chain(&all[GUARD + INSIDE..]);
        assert!(guards.into_iter().all(|word| word.load(Ordering::Relaxed) == 0), "a word beside the memory");
        let touched = all.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        let more = depth(touched) << 8 | depth(taken as usize) << 4 | got.min(1);
        (answer.wrapping_mul(31) ^ status << 16 ^ more, (status == 0 && why.is_none()).then_some(touched))
    }
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_messages_of_a_stranger_make_a_rank_panic_or_touch_what_it_has_not_registered() {
    let two = Two::new();
    let hello = message(&Header::Hello { rank: 1, ranks: 2 }.encode(), 0);
    let place = |memory, offset| Place { memory, offset };
    let put = |memory, bytes: u64, signal: bool| {
        let signal = signal.then_some(Adds { at: place(0, 8), value: 3 });
        message(&Header::Put { to: place(memory, 64), bytes, signal }.encode(), bytes as usize)
    };
    let get = message(&Header::Get { from: place(0, 0), bytes: 256, get: 9 }.encode(), 0);
    let data = message(&Header::Data { get: 1, offset: 0, bytes: 64 }.encode(), 64);
    let bye = message(&Header::Bye.encode(), 0);
    let mut changed = put(0, 64, false);
    changed[0] = RECORD;
    changed.extend([0; HEADER]);
    // Each with the number of words that are written.
    let seeds = [
        (vec![hello.clone(), put(0, 100, true), put(0, 0, true), bye.clone()], 14),
        (vec![hello.clone(), vec![GETS], data, get, bye.clone()], 8),
        (vec![hello.clone(), put(1, 64, false), vec![REGISTERS], put(0, 8, true), bye], 10),
        (vec![hello.clone(), changed, vec![DEREGISTERS]], 8),
    ];
    for (steps, expected) in &seeds {
        assert_eq!(two.run(&steps.concat()).1, Some(*expected), "words that were written");
    }
    let seeds: Vec<_> = seeds.into_iter().map(|(steps, _)| steps.concat()).collect();
    fuzz(&seeds, |input| two.run(input).0);
}
