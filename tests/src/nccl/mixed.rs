//! A rank with a peer in its own process and one in another process, which may be reached over different transports.

use super::pair::{self, Ends};
use super::scenario::{Options, begin, close, loopback};
use super::table::warnings;

/// Traffic with both peers at once, with every byte checked. The peer in the other process is as in the scenario `traffic`.
pub fn mixed(o: &Options) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("rank-1");
    let ctx = begin(&plugin);
    let far = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    // Two connections of this process to itself, one each way.
    let [there, back] = [(); 2].map(|()| loopback(&plugin, ctx));
    let near = [Ends { send: there.send, recv: back.recv }, Ends { send: back.send, recv: there.recv }];
    let traffic = &o.traffic(&plugin);
    let exchange = |rank, ends| {
        pair::exchange(&plugin, rank, ends, traffic).unwrap_or_else(|e| {
            panic!("rank {rank}: {e}; the plugin says: {:#?}", warnings());
        })
    };
    let bytes = std::thread::scope(|scope| {
        let others =
            [(0, near[0]), (1, near[1])].map(|(rank, ends)| scope.spawn(move || exchange(rank, ends)));
        let here = exchange(0, far).bytes;
        others.map(|other| other.join().expect("the traffic of this process alone").bytes).iter().sum::<u64>()
            + here
    });
    for ends in [far, near[0], near[1]] {
        close(&plugin, ends);
    }
    plugin.finalize(ctx).expect("finalize");
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    o.promise("no warnings without a reason", warnings().is_empty(), &warnings());
    println!("{bytes} bytes received and right");
}
