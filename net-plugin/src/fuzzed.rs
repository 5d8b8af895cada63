//! Messages, signals and answers of any words from a peer, at the receiving and at the sending end of a connection.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_engine::proxy::Proxy;
use pushgate_tests::fuzz::{depth, fuzz, kind};

use crate::comm::{Comm, Request};
use crate::join::Role;
use crate::large::{self, Invitation};
use crate::props::MAX_BYTES;
use crate::registration::{Kind, Mr, Wanted};
use crate::runtime::Runtime;
use crate::testing::{Pair, WINDOW, pair_in};

/// Steps of an input, by their first byte: this end begins a receive or a send; the peer sends a message through the window,
/// of whose work request some bits are changed; it writes a signal; it sends a few bytes in the record; it posts a receive;
/// it takes a message.
const BEGINS: u8 = 0;
const SENDS: u8 = 1;
const SIGNALS: u8 = 2;
const ANSWERS: u8 = 3;
const RECEIVES: u8 = 4;
const TAKES: u8 = 5;
const STEPS: u8 = 6;

/// Bytes of a buffer, and the number of buffers. Nobody may write the bytes that lie before the first buffer or after the last one.
const ROOM: usize = 1024;
const BUFFERS: usize = 8;
/// Bytes of a message that does not fit in the window.
const LONG: usize = WINDOW as usize + 1000;
/// The most payload of the peer's messages.
const MOST: usize = 2 * ROOM;
/// How often this end looks for each step.
const LOOKS: usize = 10;

/// Splits `N` bytes off.
fn next<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (now, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*now)
}

/// Begins a receive, or a send whose length `what` gives. An error is the kind of the refusal.
fn begins<'a>(
    (comm, mr): (&'a Comm, &Mr),
    role: Role,
    what: u8,
    (buffers, payload): (&[AtomicU8], &[u8]),
    requests: &mut Vec<&'a Request>,
) -> Result<(), u64> {
    let tag = u32::from(what & 1);
    // SAFETY: buffers and payload outlive the connection.
    let begun = unsafe {
        match role {
            Role::Receive => {
                let at = usize::from(what >> 1) % BUFFERS * ROOM;
                let data = buffers[ROOM + at..].as_ptr() as usize;
                comm.receive(&[Wanted { data, size: ROOM, tag, mr: Some(mr) }])
            }
            Role::Send => {
                let size = if what < 128 { usize::from(what) * 16 } else { LONG };
                comm.send(payload.as_ptr(), size, tag, None)
            }
        }
    };
    requests.extend(begun.map_err(|e| kind(e.text))?);
    Ok(())
}

/// What becomes of an input, and how many requests were done.
fn run(runtime: &Arc<Runtime>, input: &[u8]) -> (u64, usize) {
    let Some((first, mut rest)) = input.split_first() else { return (0, 0) };
    let role = if first & 1 == 0 { Role::Receive } else { Role::Send };
    let buffers: Box<[AtomicU8]> = (0..(BUFFERS + 2) * ROOM).map(|_| AtomicU8::new(0)).collect();
    let (payload, mut room) = (vec![7u8; LONG], vec![0u8; LONG]);
    let Pair { comm, mut peer, socket } = pair_in(runtime.clone(), role, MAX_BYTES, None);
    let mr = comm.register(buffers[ROOM..].as_ptr() as usize, BUFFERS * ROOM, Kind::Host).unwrap();
    let proxy: &dyn Proxy = &*peer.lane.engine;
    // SAFETY: the buffer outlives the connection and is not read meanwhile.
    let key =
        unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, LONG as u64, None) }.unwrap();
    let (mut requests, mut done, mut answer) = (Vec::new(), 0, 0u64);
    while let Some([step]) = next(&mut rest) {
        let producer = &mut peer.producer;
        let taken = match step % STEPS {
            BEGINS => next(&mut rest).map(|[what]| {
                let begun = begins((&comm, &mr), role, what, (&buffers, &payload), &mut requests);
                answer ^= begun.err().unwrap_or(0);
            }),
            SENDS => next(&mut rest).zip(next::<64>(&mut rest)).map(|(length, changes)| {
                let length = usize::from(u16::from_le_bytes(length)) % MOST;
                let Some((taken, mut words)) = producer.stage(Record::new(Opcode::Send), length) else {
                    return;
                };
                let (changes, _) = changes.as_chunks::<8>();
                for (word, change) in words.iter_mut().zip(changes) {
                    *word ^= u64::from_le_bytes(*change) & abi::PUSHGATE_DATA_MASK;
                }
                producer.publish(taken.slot, &words);
            }),
            SIGNALS => next(&mut rest).zip(next(&mut rest)).map(|([signal], value)| {
                let signal = u32::from(signal) % (large::SIGNALS + 1);
                let signal_value = u64::from_le_bytes(value) & abi::PUSHGATE_DATA_MASK;
                producer.post(Record { signal, signal_value, ..Record::new(Opcode::Signal) }, &[]);
            }),
            ANSWERS => next(&mut rest).map(|[tag, length]| {
                let length = usize::from(length).min(rest.len()).min(abi::PUSHGATE_INLINE_SEND as usize);
                let (bytes, after) = rest.split_at(length);
                rest = after;
                // The key of the peer's region is another one each time.
                let mut bytes = bytes.to_vec();
                bytes.iter_mut().zip(key.to_le_bytes()).for_each(|(byte, of_key)| *byte ^= of_key);
                let record = Record { flags: Record::INLINE, tag: tag.into(), ..Record::new(Opcode::Send) };
                producer.post(record, &bytes);
            }),
            RECEIVES => next::<13>(&mut rest).map(|bytes| {
                let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
                producer.post_recv(key ^ word(0), word(4).into(), word(8), bytes[12].into());
            }),
            _ => {
                if producer.try_recv().is_some() {
                    producer.release(1);
                }
                Some(())
            }
        };
        if taken.is_none() {
            break;
        }
        producer.wake();
        for _ in 0..LOOKS {
            peer.lane.drive_all();
            requests.retain(|request| {
                let size = Cell::new(0);
                // SAFETY: the connection is open.
                match unsafe { request.test(|_, bytes| size.set(bytes)) } {
                    Ok(false) => true,
                    Ok(true) => {
                        let most = if role == Role::Receive { ROOM } else { LONG };
                        assert!(size.get() <= most, "{} bytes were received", size.get());
                        done += 1;
                        false
                    }
                    Err(e) => {
                        assert!(e.text.len() < 4096, "{}", e.text);
                        answer = answer.wrapping_mul(31) ^ kind(&e.text);
                        false
                    }
                }
            });
        }
    }
    let waits = requests.len();
    let status = peer.producer.status().map_or(0, |status| u64::from(status.code));
    // The connection learns that its peer is gone, and waits for nothing.
    let _ = peer.lane.engine.remove_qp(peer.qp);
    drop(socket);
    comm.deregister(mr).unwrap();
    drop((comm, peer));
    let beside = buffers[..ROOM].iter().chain(&buffers[(BUFFERS + 1) * ROOM..]);
    assert!(beside.into_iter().all(|byte| byte.load(Ordering::Relaxed) == 0), "a byte beside the buffers");
    (answer.wrapping_mul(31) ^ status << 16 ^ depth(done) << 8 ^ depth(waits), done)
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_messages_of_a_peer_make_a_connection_panic_or_write_beside_its_buffers() {
    let runtime = Runtime::of_a_test(WINDOW);
    let begins = |what: u8| vec![BEGINS, what];
    let sends = |length: u16| [&[SENDS][..], &length.to_le_bytes(), &[0; 64]].concat();
    let signals = |signal: u32, value: u64| [&[SIGNALS, signal as u8][..], &value.to_le_bytes()].concat();
    let receives = |length: usize| [&[RECEIVES][..], &[0; 8], &(length as u32).to_le_bytes(), &[0]].concat();
    let takes = vec![TAKES];
    // The key is that of the peer's region.
    let invites = |offset: u64| {
        let invitation = Invitation { key: 0, offset }.encode();
        [&[ANSWERS, 0, invitation.len() as u8][..], &invitation].concat()
    };
    let long = [vec![1], receives(LONG), begins(254), takes.clone(), invites(128 << 10), takes.repeat(8)];
    let seeds = [
        [vec![0], begins(0), sends(100), begins(2), sends(ROOM as u16)].concat(),
        [
            vec![0],
            begins(0),
            signals(large::BYTES, 1000),
            signals(large::BEGINS, 1),
            sends(100),
            takes.clone(),
            signals(large::ENDS, 1),
        ]
        .concat(),
        [vec![1], receives(ROOM), begins(50), takes.clone(), receives(ROOM), begins(0), takes].concat(),
        long.concat(),
    ];
    for (seed, expected) in seeds.iter().zip([2, 1, 2, 1]) {
        assert_eq!(run(&runtime, seed).1, expected, "requests that are done");
    }
    fuzz(&seeds, |input| run(&runtime, input).0);
}
