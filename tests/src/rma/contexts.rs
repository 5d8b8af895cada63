//! Several groups and contexts at once, and a thread that makes and destroys others meanwhile, as NCCL's main thread does
//! beside its progress thread.

use std::sync::atomic::{AtomicBool, Ordering};

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, Ptr, Signal, Table};
use crate::nccl::pair::Buffer;

/// Bytes of each put.
const SIZE: usize = 3000;
/// Registrations of the second thread, half of which stay.
const REGISTRATIONS: usize = 12;

/// What the second thread works on.
struct Other<'a> {
    table: &'a Table,
    coll: Ptr,
    kind: i32,
    contexts: i32,
}

// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Send for Other<'_> {}

/// Memory that the second thread has registered.
struct Kept(Memory);

// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Send for Kept {}

impl Other<'_> {
    /// Registers memory again and again, and makes and destroys contexts; returns the registrations that stay.
    fn run(&self) -> Vec<Kept> {
        let mut kept = Vec::new();
        for i in 0..REGISTRATIONS {
            let ctx = self.table.create_context(self.coll, self.contexts).expect("createContext");
            let buffer = Buffer::new(SIZE);
            let mr = self.table.reg(self.coll, buffer.at(0), SIZE, self.kind, 0).expect("regMrSym");
            if i % 2 == 0 {
                self.table.dereg(self.coll, mr).expect("deregMrSym");
            } else {
                kept.push(Kept(Memory { buffer, mr }));
            }
            self.table.destroy_context(ctx).expect("destroyContext");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kept
    }
}

/// Traffic over all contexts of two groups, while another thread makes contexts and registrations; then traffic to what that
/// thread has registered.
pub fn contexts(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 2);
    let second = rank.add_coll(2);
    let (me, ranks) = (rank.me(), rank.ranks());
    let peer = (me + 1) % ranks;
    let from = (me + ranks - 1) % ranks;
    let all = rank.all_contexts(0);
    let memories: Vec<[Memory; 3]> = [0, second]
        .map(|coll| {
            // Another order in each group.
            let signals = rank.memory(coll, 8 * all + 8, rank.kind, FORCE_SO);
            let source = rank.memory(coll, all * SIZE, rank.kind, 0);
            let target = rank.memory(coll, all * SIZE, rank.kind, 0);
            [signals, source, target]
        })
        .into();
    for (coll, [_, source, _]) in memories.iter().enumerate() {
        source.buffer.fill(0, all * SIZE, (me * 8 + coll) as u64);
    }
    rank.barrier();
    let stop = AtomicBool::new(false);
    let other = Other { table, coll: rank.colls[0].comm, kind: rank.kind, contexts: rank.contexts as i32 };
    let (rounds, kept) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // The whole of it goes to the thread.
            let other = other;
            let kept = other.run();
            stop.store(true, Ordering::Release);
            kept
        });
        let mut rounds = 0u64;
        while !(stop.load(Ordering::Acquire) || thread.is_finished()) || rounds < o.rounds as u64 {
            let mut requests = Vec::new();
            for (coll, [signals, source, target]) in memories.iter().enumerate() {
                for context in 0..all {
                    let at = (context * SIZE) as u64;
                    let bytes = Bytes {
                        local: at,
                        local_mr: source.mr.device,
                        size: SIZE,
                        remote: at,
                        remote_mr: target.mr.device,
                    };
                    let signal = Signal {
                        at: 8 * context as u64,
                        mr: signals.mr.device,
                        value: 0,
                        op: INC,
                        strong: true,
                    };
                    requests.push((coll, rank.put_signal(rank.to(coll, context, peer), bytes, signal)));
                }
            }
            requests.into_iter().for_each(|(coll, request)| rank.done(coll, request));
            rounds += 1;
        }
        (rounds, thread.join().expect("the second thread"))
    });
    let told = rank.exchange(&rounds.to_ne_bytes());
    let wanted = u64::from_ne_bytes(told[from][..].try_into().expect("a number"));
    for (coll, [signals, _, target]) in memories.iter().enumerate() {
        (0..all).for_each(|context| rank.until_value(signals, 8 * context, wanted));
        let wrong = target.buffer.differs(0, all * SIZE, (from * 8 + coll) as u64);
        assert_eq!(wrong, None, "rank {me}, group {coll}");
    }
    // The registrations that stay are the same ones at every rank.
    let [signals, source, _] = &memories[0];
    for Kept(memory) in &kept {
        let bytes = Bytes {
            local: 0,
            local_mr: source.mr.device,
            size: SIZE,
            remote: 0,
            remote_mr: memory.mr.device,
        };
        let signal = Signal { at: 8 * all as u64, mr: signals.mr.device, value: 0, op: INC, strong: true };
        let request = rank.put_signal(rank.to(0, 0, peer), bytes, signal);
        rank.done(0, request);
    }
    rank.until_value(signals, 8 * all, kept.len() as u64);
    for Kept(memory) in &kept {
        assert_eq!(memory.buffer.differs(0, SIZE, (from * 8) as u64), None, "rank {me}");
    }
    rank.no_error();
    rank.barrier();
    if me == 0 {
        println!("{}: {rounds} rounds over {} contexts", table.version.name(), 2 * all);
    }
    let mut memories = memories.into_iter();
    let first = memories.next().expect("two groups");
    for memory in memories.flatten() {
        rank.forget(second, memory);
    }
    rank.end(first.into_iter().chain(kept.into_iter().map(|Kept(memory)| memory)));
}
