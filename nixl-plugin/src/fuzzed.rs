//! Changed bytes of a hostile agent: its metadata, and its messages over a connection that stands.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pushgate::{Comm, Context, HostEnd, Settings};
use pushgate_tests::fuzz::{fuzz, kind, part, split};

use crate::greet::Connection;
use crate::tests::{GPU, HOST, Memory, agent};
use crate::wire::{HEAD, Message, PLACE, Place, Remote};

/// How long the victim may take for the messages of an input, before the next input.
const ANSWERS: Duration = Duration::from_millis(3);

/// A message as an input has it: its tag, and its bytes after their length.
fn framed(message: &Message) -> Vec<u8> {
    let (tag, mut bytes) = message.encode();
    if let Message::Write { places, .. } = message {
        bytes.resize(bytes.len() + places.iter().map(|p| p.length as usize).sum::<usize>(), 0xee);
    }
    [vec![tag as u8], part(&bytes)].concat()
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_metadata_or_messages_of_a_hostile_agent_make_an_agent_panic_or_touch_what_is_not_registered() {
    let [victim, friend] = ["victim", "friend"].map(|name| agent(name, &[("qp", "local")]));
    let [secret, played] = [HOST, GPU].map(|kind| Memory::within(&victim, 3 * 4096, 4, 4096, kind));
    let before = [&secret, &played].map(Memory::content);
    let mut settings = Settings::default();
    for (key, value) in [("device", "cpu"), ("qp", "local"), ("timeout", "20s")] {
        settings.set(key, value).unwrap();
    }
    let context = Context::builder().settings(settings).build().unwrap();
    let connection = Connection::from_bytes(&victim.connection()).unwrap();

    let places = |of: &Memory| vec![Place { key: of.key, address: of.at as u64 + 4096, length: 16 }; 2];
    let messages = [&secret, &played].map(|of| {
        let places = places(of);
        let payload = HEAD + places.len() * PLACE;
        [
            Message::Hello { place: 3, token: [7; 16] },
            Message::Write { transfer: 1, last: true, payload, places: places.clone() },
            Message::Read { job: 1, places: places.clone(), into: places.clone() },
            Message::Read { job: 2, places, into: Vec::new() },
            Message::Note { last: true, payload: HEAD },
            Message::Ask { key: of.key, region: true },
            Message::Revoked { key: of.key },
        ]
    });
    let others = [
        Message::Data { job: 1, last: true, status: 0, payload: HEAD },
        Message::Done { count: 1 },
        Message::Failed { transfer: 1, status: -3 },
        Message::Lease { key: 1, granted: true, region: Some(Remote { rkey: 1, base: 0 }) },
        Message::Landed { job: 1 },
        Message::Revoke { key: 1 },
    ];
    let mut seeds: Vec<Vec<u8>> = messages
        .iter()
        .map(|all| [vec![0], all.iter().flat_map(framed).collect()].concat())
        .chain(others.iter().map(|one| [vec![0], framed(one)].concat()))
        .collect();
    seeds.push([vec![1], victim.connection()].concat());
    seeds.push([vec![2], victim.publish(secret.key).unwrap()].concat());
    seeds.push([vec![3], victim.publish(played.key).unwrap()].concat());

    // The agents' threads may panic where nobody joins them.
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, hook) = (panics.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        count.fetch_add(1, Ordering::Relaxed);
        hook(panic);
    }));
    let mut stands: Option<(HostEnd, Comm)> = None;
    fuzz(&seeds, |input| {
        let Some((how, mut rest)) = input.split_first() else { return 0 };
        let mut answer = DefaultHasher::new();
        match how % 4 {
            1 => kind(format!("{:?}", friend.load_connection("stranger", rest))).hash(&mut answer),
            2 | 3 => {
                let memory = i32::from(how % 4 == 3);
                kind(format!("{:?}", friend.load("victim", rest, memory).map(drop))).hash(&mut answer);
            }
            _ => {
                let (end, _comm) = stands.get_or_insert_with(|| {
                    let (comm, end) = connection.dial(&context, "hostile", "another", 1 << 20).unwrap();
                    (end, comm)
                });
                let mut ended = false;
                while let Some((tag, after)) = rest.split_first() {
                    let Some((bytes, after)) = split(after) else { break };
                    ended |= !matches!(end.try_send(bytes, u32::from(*tag)), Ok(true));
                    rest = after;
                }
                let begin = Instant::now();
                while !ended && begin.elapsed() < ANSWERS && !end.is_flushed() {
                    ended = end.queue_pair().check().is_err();
                    std::thread::yield_now();
                }
                while let Ok(Some(message)) = end.take() {
                    message.message().tag.hash(&mut answer);
                    end.give_back(1);
                }
                victim.notifications();
                ended.hash(&mut answer);
                if ended {
                    stands = None;
                    // A connection has windows: one is gone before the next one comes.
                    let begin = Instant::now();
                    while victim.connections() > 0 && begin.elapsed() < pushgate_tests::hang() {
                        victim.notifications();
                    }
                }
            }
        }
        assert_eq!(panics.load(Ordering::Relaxed), 0, "a thread of an agent panicked");
        // Only what is registered may have changed.
        for (memory, before) in [&secret, &played].into_iter().zip(&before) {
            let now = memory.content();
            assert!(
                now[..4096] == before[..4096] && now[8192..] == before[8192..],
                "bytes beside a registration"
            );
        }
        answer.finish()
    });
}
