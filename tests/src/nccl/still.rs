//! Connections that are closed, as NCCL does when it aborts, while the rank at their other ends stands still.

use std::time::{Duration, Instant};

use super::growth::connect_all;
use super::pair::{Bootstrap, Buffer, Ends};
use super::scenario::{Options, begin, close, die_with_parent, parent, receive, send, stop, wait};
use super::table::{Plugin, Ptr};
use crate::hang;

const BYTES: usize = 64;

/// `--times` connections each way and one more. A send on each is done; the other rank, which is stopped, has none of them. The
/// first connection waits in vain for as long as the process's connections may all together; the others share what is left.
pub fn still(o: &Options) {
    let (mut child, mut peer) = o.spawn("still-rank");
    let (plugin, ctx, all, buffer) = connected(o, &mut *peer);
    let register = |ends: &Ends| plugin.reg_mr(ends.send, buffer.at(0), BYTES).expect("regMr");
    let registered: Vec<Ptr> = all.iter().map(register).collect();
    peer.barrier();
    stop(&child);
    for (ends, mr) in all.iter().zip(&registered) {
        let sent = send(&plugin, *ends, &buffer, BYTES, 1, *mr).expect("room");
        wait(&plugin, sent).expect("its receive was posted");
    }
    let closed = |ends: &[(Ends, Ptr)]| {
        let began = Instant::now();
        for (ends, mr) in ends {
            plugin.dereg_mr(ends.send, *mr).expect("deregMr");
            close(&plugin, *ends);
        }
        began.elapsed()
    };
    let all: Vec<_> = all.into_iter().zip(registered).collect();
    let (first, others) = all.split_first().expect("there is one more");
    let alone = closed(std::slice::from_ref(first));
    let rest = closed(others) + {
        let began = Instant::now();
        plugin.finalize(ctx).expect("finalize");
        began.elapsed()
    };
    child.kill().expect("kill");
    child.wait().expect("wait");
    println!(
        "closed after {:.2} s, {} others after {:.2} s",
        alone.as_secs_f64(),
        o.times,
        rest.as_secs_f64()
    );
    // So long that the others would take as long each if they did not share it.
    assert!(alone > Duration::from_secs(1), "the first connection waited for {alone:?} alone");
    let most = alone * o.times as u32 / 4;
    o.promise(
        "connections to a rank that stands still are closed in a quarter of the time of each",
        rest < most,
        &rest,
    );
}

/// The other rank, which posts a receive on each connection and is stopped then.
pub fn second(o: &Options) {
    die_with_parent();
    let mut peer = parent();
    let (plugin, _, all, buffer) = connected(o, &mut *peer);
    for ends in all {
        let mr = plugin.reg_mr(ends.recv, buffer.at(0), BYTES).expect("regMr");
        receive(&plugin, ends, &buffer, BYTES, 1, mr).expect("room");
    }
    peer.barrier();
    // This process is stopped, then killed.
    std::thread::sleep(hang() * 2);
}

fn connected(o: &Options, peer: &mut dyn Bootstrap) -> (Plugin, Ptr, Vec<Ends>, Buffer) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let all = connect_all(&plugin, ctx, o.times + 1, peer);
    (plugin, ctx, all, Buffer::new(BYTES))
}
