//! A receive that no message fills: the plugin says so in NCCL's log.

use super::pair::Buffer;
use super::scenario::{Options, begin, end, loopback, receive, send};
use super::table::warnings;
use crate::wait_until;

/// Bytes that a line of NCCL's log has, with what NCCL puts before the plugin's text.
const LINE: usize = 1024;

/// A receive that is tested again and again while nothing is sent, with `PUSHGATE_STALL_REPORT` in the environment: the log
/// names the end that is waited for, once. Then the message is sent and arrives.
pub fn stall(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let ends = loopback(&plugin, ctx);
    let (out, into) = (Buffer::new(64), Buffer::new(64));
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    let received = receive(&plugin, ends, &into, 64, 3, into_mr).expect("room");
    let said = |text: &str| warnings().iter().filter(|line| line.contains(text)).count();
    // SAFETY: our own request, not done before the message is sent.
    let test = || assert!(!unsafe { plugin.test(received, None).expect("test") }, "nothing was sent");
    let sentence =
        "the receiver has posted 1 receive that no message has filled: the sender has nothing to send";
    // A thread of the plugin writes the report line by line while this thread reads. The events come last.
    wait_until("the report", || {
        test();
        said(sentence) > 0 && said("    events ") > 0
    });
    let all = warnings();
    assert!(all.iter().all(|line| line.len() < LINE && !line.contains('\n')), "{all:#?}");
    assert!(said("    receives  granted 1, accepted 0") == 1 && said("    events ") == 1, "{all:#?}");
    let sent = send(&plugin, ends, &out, 64, 3, out_mr).expect("the peer has a receive");
    for request in [received, sent] {
        // SAFETY: our own requests, each tested until it is done.
        wait_until("the message", || unsafe { plugin.test(request, None).expect("test") });
    }
    assert_eq!(said(sentence), 1, "{:#?}", warnings());
    end(o, &plugin, ends, (out_mr, into_mr));
    plugin.finalize(ctx).expect("finalize");
    println!("{sentence}");
}
