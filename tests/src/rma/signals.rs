//! Signals: what many ranks add to one word, in memory of every kind.

use super::group::Group;
use super::rank::Rank;
use super::scenario::Options;
use super::table::{ADD, Bytes, CUDA, FORCE_SO, HOST, INC, NEVER_RESET, Signal, Table};

/// All ranks add to one word of every rank at once: the sum is right, with every kind of memory and every flag. The owner
/// resets the word where the flags allow that.
pub fn signals(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let flags = [0, FORCE_SO, NEVER_RESET, FORCE_SO | NEVER_RESET];
    let kinds = if o.gpu { &[HOST, CUDA][..] } else { &[HOST][..] };
    let memories: Vec<_> = kinds
        .iter()
        .flat_map(|kind| flags.map(|flags| (*kind, flags)))
        .map(|(kind, flags)| (flags, rank.memory(0, 4096, kind, flags)))
        .collect();
    // A word that is not the first, and the last word of the memory.
    let words = [8usize, 4096 - 8];
    for round in 0..o.rounds as u64 {
        rank.barrier();
        let mut requests = Vec::new();
        let times = (o.times / 10).clamp(2, rank.depth / (words.len() * memories.len()));
        for i in 0..times {
            for (_, memory) in &memories {
                for peer in (0..ranks).map(|i| (me + i) % ranks) {
                    for (word, op, value) in [(words[0], INC, 1000), (words[1], ADD, added(me, i, times))] {
                        let signal =
                            Signal { at: word as u64, mr: memory.mr.device, value, op, strong: true };
                        let to = rank.to(0, i % rank.all_contexts(0), peer);
                        requests.push(rank.put_signal(to, Bytes::NONE, signal));
                    }
                }
            }
        }
        requests.into_iter().for_each(|request| rank.done(0, request));
        let all = (0..ranks).flat_map(|source| (0..times).map(move |i| added(source, i, times)));
        let sum = all.fold(0, u64::wrapping_add);
        for (flags, memory) in &memories {
            let rounds = if flags & NEVER_RESET == 0 { 1 } else { round + 1 };
            rank.until_value(memory, words[0], rounds * (times * ranks) as u64);
            rank.until_value(memory, words[1], sum.wrapping_mul(rounds));
            let others = (0..512).filter(|i| !words.contains(&(8 * i)));
            assert!(others.into_iter().all(|i| memory.value(8 * i) == 0), "another word was written");
        }
        rank.barrier();
        for (flags, memory) in &memories {
            if flags & NEVER_RESET == 0 {
                words.iter().for_each(|word| memory.buffer.set_word(*word, 0));
            }
        }
    }
    rank.no_error();
    if me == 0 {
        println!("{}: {ranks} ranks add at once, {} kinds of memory", table.version.name(), memories.len());
    }
    rank.end(memories.into_iter().map(|(_, memory)| memory));
}

/// What a rank adds in its `i`th turn of `times`: large, and beyond the word's end at last.
fn added(rank: usize, i: usize, times: usize) -> u64 {
    match (rank, i + 1 == times) {
        (0, true) => u64::MAX,
        _ => (rank as u64 + 1) << 40 | i as u64,
    }
}
