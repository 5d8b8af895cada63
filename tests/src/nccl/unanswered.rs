//! Links that break while the other rank is stopped, so that no other link takes their place.

use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::pair::{self, Bootstrap, Buffer, Ends};
use super::recovering::down;
use super::scenario::{Options, begin, close, counts, counts_down_to, die_with_parent, parent, receive};
use super::table::{Plugin, Ptr, warnings};
use crate::{Pause, hang, patience, wait_until};

/// The limit for closing a connection whose link is being replaced, as for any other connection: closing waits for limits of
/// 2 s each, and few of them coincide.
const CLOSED: Duration = Duration::from_secs(60);

/// Bytes of a message.
const BYTES: usize = 4096;

/// Connections that are closed with receives in flight while their links are replaced, `times` times. Closing ends within its
/// limit, nothing is left, and the other rank's receives fail when that rank goes on.
pub fn abandoned(o: &Options) {
    unanswered(o, |_, open| {
        assert_eq!(
            open, 2,
            "receives that failed although the other rank was stopped for less than `recover`"
        );
    });
}

/// The other rank is stopped until `recover` is over, `times` times: the receives fail, and the log says that the link failed.
pub fn given_up(o: &Options) {
    unanswered(o, |posted, _| {
        posted.until_failed();
        let said = warnings();
        assert!(said.iter().any(|line| line.contains("its link failed at ")), "{said:#?}");
    });
}

/// A connection each way, with two receives that no message fills.
struct Posted<'a> {
    plugin: &'a Plugin,
    ends: Ends,
    mr: Ptr,
    requests: Vec<Ptr>,
    pause: Pause,
    /// After the connection: the plugin may write into it until the connection is closed.
    _into: Buffer,
}

impl<'a> Posted<'a> {
    fn new(plugin: &'a Plugin, ctx: Ptr, peer: &mut dyn Bootstrap) -> Self {
        let ends = pair::connect(plugin, ctx, peer).expect("connect");
        let into = Buffer::new(BYTES);
        let mr = plugin.reg_mr(ends.recv, into.at(0), BYTES).expect("regMr");
        let one = |tag| receive(plugin, ends, &into, BYTES, tag, mr).expect("room");
        let requests = [1, 2].map(one).to_vec();
        Posted { plugin, ends, mr, requests, pause: Pause::default(), _into: into }
    }

    /// Tests the receives; how many have not failed.
    fn open(&mut self) -> usize {
        let before = self.requests.len();
        // SAFETY: requests that have not ended, of a connection that is open.
        self.requests.retain(|request| match unsafe { self.plugin.test(*request, None) } {
            Ok(done) => {
                assert!(!done, "a receive is done, and nothing was sent");
                true
            }
            Err(_) => false,
        });
        self.pause.after(self.requests.len() < before);
        self.requests.len()
    }

    fn until_failed(&mut self) {
        let begin = Instant::now();
        while self.open() > 0 {
            assert!(begin.elapsed() < hang(), "receives that never end: the plugin says {:#?}", warnings());
        }
    }

    fn close(self) {
        let begin = Instant::now();
        self.plugin.dereg_mr(self.ends.recv, self.mr).expect("deregMr");
        close(self.plugin, self.ends);
        assert!(begin.elapsed() < patience(CLOSED), "closed after {:?}", begin.elapsed());
    }
}

/// The first rank. `then` gets the connections while their links are down, and how many receives are open.
fn unanswered(o: &Options, then: impl Fn(&mut Posted, usize)) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("unanswering-rank");
    let ctx = begin(&plugin);
    let mut before = None;
    // The first round makes what is made once.
    for _ in 0..=o.times {
        let earlier = down();
        let mut posted = Posted::new(&plugin, ctx, &mut *peer);
        peer.barrier();
        let resume = stop(&child);
        let mut open = 2;
        wait_until("links that both broke", || {
            open = posted.open();
            down() >= earlier + 2
        });
        then(&mut posted, open);
        posted.close();
        kill_process(resume, Signal::CONT).expect("kill");
        // The other rank has closed too.
        peer.barrier();
        before = before.or_else(|| Some(counts()));
    }
    let before = before.expect("one round at the least");
    let after = counts_down_to(before, hang());
    o.promise("descriptors and threads as before", after[0] <= before[0] && after[1] <= before[1], &after);
    plugin.finalize(ctx).expect("finalize");
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    println!("{} times; descriptors, threads, mappings {before:?} before and {after:?} after", o.times);
}

/// Stops all threads of the other rank.
fn stop(child: &Child) -> Pid {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).expect("kill");
    let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("waitpid");
    assert!(stopped.is_some_and(|(_, status)| status.stopped()), "the rank is not stopped: {stopped:?}");
    pid
}

/// The second process of [`unanswered`].
pub fn second(o: &Options) {
    die_with_parent();
    let (plugin, mut peer) = (o.open(), parent());
    let ctx = begin(&plugin);
    for _ in 0..=o.times {
        let mut posted = Posted::new(&plugin, ctx, &mut *peer);
        peer.barrier();
        // Here this process is stopped.
        posted.until_failed();
        posted.close();
        peer.barrier();
    }
    plugin.finalize(ctx).expect("finalize");
}
