//! Several connections under one thread that polls them in turn: each gets its share.

use std::time::Instant;

use super::cores;
use super::pair::{self, Bootstrap, Buffer};
use super::scenario::{Options, begin, close, die_with_parent, parent};
use super::table::{Plugin, Ptr, Result};
use crate::hang;

/// Connections between the two ranks.
const CONNECTIONS: usize = 8;
/// Bytes of a message.
const SIZE: usize = 16 << 10;
const SEED: u64 = 91;

/// The messages of one connection.
#[derive(Default)]
struct Progress {
    requests: std::collections::VecDeque<Ptr>,
    posted: usize,
    done: usize,
}

/// Passes `times` messages over each connection, one way. Returns how many messages each connection had when the first one
/// had all of its messages.
fn pass(o: &Options, plugin: &Plugin, sends: bool, peer: &mut dyn Bootstrap) -> Result<Vec<usize>> {
    let ctx = begin(plugin);
    let memory = Buffer::new(SIZE);
    memory.fill(0, SIZE, SEED);
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        let ends = pair::connect(plugin, ctx, peer)?;
        let mr = plugin.reg_mr(if sends { ends.send } else { ends.recv }, memory.at(0), SIZE)?;
        all.push((ends, mr, Progress::default()));
    }
    peer.barrier();
    let mut counts = None;
    let mut last = Instant::now();
    while all.iter().any(|(_, _, p)| p.done < o.times) {
        let mut moved = false;
        for (ends, mr, p) in &mut all {
            if p.posted < o.times && p.posted < p.done + o.in_flight {
                // SAFETY: all messages are the same bytes, so it does not matter which one is written when; nobody reads
                // them before the end.
                let request = unsafe {
                    match sends {
                        true => plugin.isend(ends.send, memory.at(0), SIZE, 1, *mr)?,
                        false => plugin.irecv(ends.recv, &[memory.at(0)], &[SIZE], &[1], &[*mr])?,
                    }
                };
                p.posted += usize::from(request.is_some());
                p.requests.extend(request);
            }
            if let Some(&oldest) = p.requests.front() {
                // SAFETY: the request is not done yet.
                let done = unsafe {
                    match sends {
                        true => plugin.test_send(oldest, true)?,
                        false => plugin.test_receive(oldest, true)?.is_some(),
                    }
                };
                if done {
                    p.requests.pop_front();
                    p.done += 1;
                    moved = true;
                }
            }
        }
        if counts.is_none() && all.iter().any(|(_, _, p)| p.done == o.times) {
            counts = Some(all.iter().map(|(_, _, p)| p.done).collect());
        }
        if moved {
            last = Instant::now();
        } else {
            assert!(last.elapsed() < hang(), "no connection makes progress");
            std::thread::yield_now();
        }
    }
    assert_eq!(memory.differs(0, SIZE, SEED), None, "what came is not what was sent");
    // Neither rank closes before the other has its last message.
    peer.barrier();
    for (ends, mr, _) in all {
        plugin.dereg_mr(if sends { ends.send } else { ends.recv }, mr)?;
        close(plugin, ends);
    }
    plugin.finalize(ctx)?;
    Ok(counts.expect("a connection was the first"))
}

/// Eight connections that are all busy: prints how many messages the slowest had when the fastest had all, and fails if
/// those were fewer than a quarter.
pub fn fair(o: &Options) {
    let (mut child, mut peer) = o.spawn("fair-rank");
    cores::bind(0, o.cores);
    let counts = pass(o, &o.open(), true, &mut *peer).expect("the calls succeed");
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    let (fewest, most) = (counts.iter().min().expect("eight"), counts.iter().max().expect("eight"));
    println!("{CONNECTIONS} connections under one thread: {fewest} messages on one when another had {most}");
    assert!(4 * fewest >= *most, "messages of each connection: {counts:?}");
}

/// The second process of [`fair`].
pub fn second(o: &Options) {
    die_with_parent();
    cores::bind(1, o.cores);
    pass(o, &o.open(), false, &mut *parent()).expect("the calls succeed");
}
