//! Links that break again and again under traffic.

use super::pair::{self, Bootstrap};
use super::scenario::{Options, begin, close, die_with_parent, parent};
use super::table::{LOG, Plugin, warnings};

/// Traffic both ways between two processes, with every byte checked, until both have had `times` links replaced. The
/// environment says how often the plugin breaks links (`_PUSHGATE_BREAK_LINKS`, milliseconds). Links also break while the
/// ranks close.
pub fn recovering(o: &Options) {
    let plugin = o.open();
    let (mut child, peer) = o.spawn("recovering-rank");
    let bytes = rank(o, &plugin, 0, peer);
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    println!("{bytes} bytes received and right, {} links replaced, {} sockets", logged(LINK), logged(SOCKET));
}

/// The second process of [`recovering`].
pub fn second(o: &Options) {
    die_with_parent();
    rank(o, &o.open(), 1, parent());
}

fn rank(o: &Options, plugin: &Plugin, rank: u64, mut peer: Box<dyn Bootstrap>) -> u64 {
    let ctx = begin(plugin);
    let ends = pair::connect(plugin, ctx, &mut *peer).expect("connect");
    let mut bytes = 0;
    loop {
        let received = pair::exchange(plugin, rank, ends, &o.traffic(plugin)).unwrap_or_else(|e| {
            panic!("rank {rank}: {e}; the plugin says: {:#?}", warnings());
        });
        bytes += received.bytes;
        let (enough, mut theirs) = ([(logged(LINK) >= o.times) as u8], [0]);
        peer.tell(&enough);
        peer.hear(&mut theirs);
        if [enough, theirs] == [[1]; 2] {
            break;
        }
    }
    close(plugin, ends);
    plugin.finalize(ctx).expect("finalize");
    let warnings = warnings();
    let unexplained: Vec<_> =
        warnings.iter().filter(|line| !BROKEN.iter().any(|b| line.contains(b))).collect();
    o.promise("no warnings without a reason", unexplained.is_empty(), &unexplained);
    bytes
}

/// What it says of a link that the peer broke, where its RDMA device hears of the break before the peer's word comes: over iWARP a
/// connection ends at both ends.
const BROKEN: [&str; 2] = ["RDMA work request failed", "the RDMA link is down"];

/// What the plugin logs when a link has taken the place of one that broke.
const LINK: &str = "another link carries the queue pair";
/// What it logs when a socket has.
const SOCKET: &str = "another socket took the place of the one that broke";

/// How often this process's plugin has logged this.
fn logged(what: &str) -> usize {
    let log = LOG.lock().unwrap_or_else(|e| e.into_inner());
    log.iter().filter(|(_, line)| line.contains(what)).count()
}

/// This process's ends whose links broke and were not replaced. Ends that were closed meanwhile count too.
pub(super) fn down() -> usize {
    let log = LOG.lock().unwrap_or_else(|e| e.into_inner());
    // Of each end a break is logged before the replacement.
    let count = |text| log.iter().filter(|(_, line)| line.contains(text)).count();
    count("another one follows") - count(LINK)
}
