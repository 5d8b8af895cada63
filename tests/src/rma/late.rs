//! The order of registrations.

use std::time::{Duration, Instant};

use super::group::Group;
use super::rank::Rank;
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, NEVER_RESET, Signal, Table, warnings};

/// Makes progress for a while.
fn while_time_passes(rank: &Rank) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        rank.progress();
        std::thread::yield_now();
    }
}

/// A put that arrives before its target has registered the memory waits and lands, and so does the signal after the put.
pub fn late(o: &Options, table: &Table, group: Group) {
    registered_late(o, table, group, false);
}

/// As [`late`], and the target registers the memory when the plugin has said what waits there (setting stall-report).
pub fn stalls(o: &Options, table: &Table, group: Group) {
    registered_late(o, table, group, true);
}

fn registered_late(o: &Options, table: &Table, group: Group, until_said: bool) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let size = o.max.min(100_000);
    let signals = rank.memory(0, 64 * ranks, rank.kind, FORCE_SO | NEVER_RESET);
    for round in 0..o.rounds as u64 {
        rank.barrier();
        let is_late = me == ranks - 1;
        let mut memory = (!is_late).then(|| rank.memory(0, size, rank.kind, 0));
        let mut requests = Vec::new();
        let signal = Signal { at: 0, mr: signals.mr.device, value: 5, op: INC, strong: true };
        if let Some(memory) = &memory
            && me == 0
        {
            memory.buffer.fill(0, size, round);
            let bytes =
                Bytes { local: 0, local_mr: memory.mr.device, size, remote: 0, remote_mr: memory.mr.device };
            let to = rank.to(0, 0, ranks - 1);
            requests.push(rank.put(to, bytes));
            requests.push(rank.put_signal(to, Bytes::NONE, signal));
        }
        while_time_passes(&rank);
        rank.no_error();
        if is_late && until_said {
            let begin = Instant::now();
            let said = |warning: &String| {
                warning.contains("RMA: nothing has moved for")
                    && warning.contains("from rank 0: 0 messages wait for their copies, and the next one waits for a registration")
            };
            while !warnings().iter().any(said) {
                assert!(begin.elapsed() < crate::hang(), "no report of the stall: {:#?}", warnings());
                rank.progress();
                std::thread::yield_now();
            }
        }
        if is_late {
            assert_eq!(signals.value(0), round, "the signal came before the bytes have a place");
            let here = rank.memory(0, size, rank.kind, 0);
            rank.until_value(&signals, 0, round + 1);
            assert_eq!(here.buffer.differs(0, size, round), None, "what was put before there was a place");
            memory = Some(here);
        }
        requests.into_iter().for_each(|request| rank.done(0, request));
        rank.barrier();
        rank.forget(0, memory.expect("registered"));
    }
    rank.no_error();
    if me == 0 {
        println!("{}: {} times", table.version.name(), o.rounds);
    }
    rank.end([signals]);
}

/// A put to memory that its target has deregistered fails at the rank that puts.
pub fn deregistered(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let kept = rank.memory(0, 4096, rank.kind, 0);
    let memory = rank.memory(0, 4096, rank.kind, 0);
    let bytes = |mr| Bytes { local: 0, local_mr: kept.mr.device, size: 64, remote: 0, remote_mr: mr };
    let signal = Signal { at: 128, mr: kept.mr.device, value: 0, op: INC, strong: true };
    if me == 0 {
        let request = rank.put_signal(rank.to(0, 0, ranks - 1), bytes(memory.mr.device), signal);
        rank.done(0, request);
    }
    if me == ranks - 1 {
        rank.until_value(&kept, 128, 1);
    }
    rank.barrier();
    let mut memory = Some(memory);
    if me == ranks - 1 {
        let memory = memory.take().expect("registered");
        rank.table.dereg(rank.colls[0].comm, memory.mr).expect("deregMrSym");
        memory.buffer.set(0, 4096, 0x77);
        rank.exchange(b"!");
        rank.exchange(b"!");
        let same = (0..512).all(|i| memory.value(8 * i) == 0x7777_7777_7777_7777);
        assert!(same, "memory was written after its deregistration");
    } else {
        rank.exchange(b"!");
        if me == 0 {
            let mr = memory.as_ref().expect("registered").mr.device;
            // The end may be known by a later request alone.
            let begin = Instant::now();
            let failed = loop {
                // SAFETY: the memory stays until the end.
                match unsafe { table.iput(rank.to(0, 0, ranks - 1), bytes(mr)) } {
                    Ok(request) => {
                        if let Err(failed) = rank.ended(0, request) {
                            break failed;
                        }
                    }
                    Err(failed) => break failed,
                }
                assert!(begin.elapsed() < crate::hang(), "puts to memory that is deregistered succeed");
            };
            println!("{}: {failed}", table.version.name());
            rank.has_error(0);
        }
        rank.exchange(b"!");
    }
    rank.end(memory.into_iter().chain([kept]));
}
