//! Two agents of this process, over each way that bytes take.

use std::time::{Duration, Instant};

use crate::agent::{Agent, Described};
use crate::status::Status;

/// What a test lets pass before it calls a wait a hang.
const HANG: Duration = Duration::from_secs(60);

/// Over what two agents reach each other.
const WAYS: [&[(&str, &str)]; 3] =
    [&[("qp", "local")], &[("qp", "local"), ("direct", "false")], &[("qp", "tcp"), ("host", "127.0.0.1")]];

fn agent(name: &str, parameters: &[(&str, &str)]) -> Agent {
    let parameters: Vec<_> = parameters.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Agent::open(name, &parameters).unwrap()
}

/// Memory of a test, as an agent has registered it. What the agents write is read through raw pointers alone.
struct Memory {
    at: *mut u8,
    bytes: usize,
    key: u64,
}

impl Memory {
    fn new(agent: &Agent, bytes: usize, seed: usize) -> Memory {
        let all: Vec<u8> = (0..bytes).map(|i| (i * 31 + i / 251 + seed) as u8).collect();
        let at = Box::into_raw(all.into_boxed_slice()).cast::<u8>();
        let key = agent.register(at as u64, bytes as u64, 0).unwrap();
        Memory { at, bytes, key }
    }

    fn content(&self) -> Vec<u8> {
        // SAFETY: the memory is the test's, and the transfers that touch it have ended.
        (0..self.bytes).map(|i| unsafe { self.at.add(i).read_volatile() }).collect()
    }

    fn part(&self, from: usize, length: usize, registration: u64) -> Described {
        Described { address: self.at as u64 + from as u64, length: length as u64, device: 0, registration }
    }
}

fn pair(way: &[(&str, &str)]) -> [Agent; 2] {
    let both = [agent("first", way), agent("second", way)];
    both[0].load_connection("second", &both[1].connection()).unwrap();
    both
}

fn run(agent: &Agent, transfer: &std::sync::Arc<crate::transfer::Transfer>, note: Option<&[u8]>) -> Status {
    let mut status = agent.post(transfer, note).unwrap_or_else(|status| status);
    let begin = Instant::now();
    while status == Status::InProgress {
        assert!(begin.elapsed() < HANG, "a transfer hangs");
        status = agent.check(transfer);
    }
    status
}

fn next_note(agent: &Agent) -> (String, Vec<u8>) {
    let begin = Instant::now();
    loop {
        let mut all = agent.notifications();
        if let Some(note) = all.pop_front() {
            assert!(all.is_empty());
            return note;
        }
        assert!(begin.elapsed() < HANG, "a notification does not come");
        std::thread::yield_now();
    }
}

#[test]
fn p6_writes_and_reads_of_scattered_pages_end_with_the_bytes_in_place_and_their_notification() {
    for way in WAYS {
        let [first, second] = pair(way);
        let bytes = 3 << 20;
        let (here, there) = (Memory::new(&first, bytes, 1), Memory::new(&second, bytes, 2));
        let loaded = first.load("second", &second.publish(there.key).unwrap(), 0).unwrap();
        for (round, (count, page)) in
            [(1, 8), (1, 3 << 20), (700, 4096), (90, 31 << 10), (3, 1)].into_iter().enumerate()
        {
            for write in [true, false] {
                let step = bytes / count;
                // The pages in reverse on the other side.
                let own: Vec<_> = (0..count).map(|i| here.part(i * step, page, here.key)).collect();
                let theirs: Vec<_> = (0..count).rev().map(|i| there.part(i * step, page, loaded)).collect();
                let mut expected = if write { there.content() } else { here.content() };
                let from = if write { here.content() } else { there.content() };
                for i in 0..count {
                    let (a, b) = (i * step, (count - 1 - i) * step);
                    let (from_at, to) = if write { (a, b) } else { (b, a) };
                    expected[to..to + page].copy_from_slice(&from[from_at..from_at + page]);
                }
                let transfer = first.prepare(write, "second", [0, 0], &own, &theirs).unwrap();
                let text = format!("round {round}");
                assert_eq!(run(&first, &transfer, Some(text.as_bytes())), Status::Success);
                let got = if write { there.content() } else { here.content() };
                assert!(got == expected, "{way:?}, {count} pages of {page}, write: {write}");
                assert_eq!(next_note(&second), ("first".into(), text.into_bytes()));
                // Once more, without a notification.
                assert_eq!(run(&first, &transfer, None), Status::Success);
                first.release(&transfer);
            }
        }
        assert!(second.notifications().is_empty());
    }
}
