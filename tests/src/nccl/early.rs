//! Short messages, whose requests are done before the peer has them, and connections that are closed right behind.

use std::time::{Duration, Instant};

use super::pair::{self, Buffer};
use super::scenario::{Options, close, die_with_parent, parent, receive, send, stop, wait};
use crate::{hang, patience};

/// Lengths of the messages: in a WQE, and through the window.
const SIZES: [usize; 3] = [8, 4096, 8192];
/// Messages of each length.
const TIMES: usize = 4;
const MESSAGES: usize = TIMES * SIZES.len();
const STRIDE: usize = SIZES[SIZES.len() - 1];

/// The limit for closing a connection whose peer stands still: the plugin waits five seconds for it, and the rest is
/// room for a slow and busy machine.
const CLOSED: Duration = Duration::from_secs(30);

fn size(number: usize) -> usize {
    SIZES[number % SIZES.len()]
}

/// Messages whose requests are done arrive whole though their memory is used anew and their connection is closed at once. A
/// message to a process that is stopped is done too, and holds up closing for a limited time.
pub fn early(o: &Options) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("early-rank");
    let ctx = plugin.init().expect("init");
    let buffer = Buffer::new(STRIDE);
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let mr = plugin.reg_mr(ends.send, buffer.at(0), STRIDE).expect("regMr");
    peer.barrier();
    for number in 0..MESSAGES {
        buffer.fill(0, size(number), number as u64);
        let s = send(&plugin, ends, &buffer, size(number), 1, mr).expect("room");
        wait(&plugin, s).expect("send");
        buffer.set(0, STRIDE, 0xff);
    }
    plugin.dereg_mr(ends.send, mr).expect("deregMr");
    close(&plugin, ends);
    peer.barrier();

    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let mr = plugin.reg_mr(ends.send, buffer.at(0), STRIDE).expect("regMr");
    // The first message goes to a peer that runs, so that this end knows of the receive for the second one.
    for running in [true, false] {
        if running {
            peer.barrier();
        } else {
            stop(&child);
        }
        let s = send(&plugin, ends, &buffer, STRIDE, 1, mr).expect("room");
        wait(&plugin, s).expect("a short message is done though its peer stands still");
        if running {
            peer.barrier();
        }
    }
    let begin = Instant::now();
    plugin.dereg_mr(ends.send, mr).expect("deregMr");
    close(&plugin, ends);
    println!("closed after {:.2} s", begin.elapsed().as_secs_f64());
    assert!(begin.elapsed() < patience(CLOSED), "closed after {:?}", begin.elapsed());
    child.kill().expect("kill");
    child.wait().expect("wait");
    plugin.finalize(ctx).expect("finalize");
}

/// The receiving rank of [`early`]. It calls nothing of the plugin until the sender has closed.
pub fn second(o: &Options) {
    die_with_parent();
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let buffers: Vec<Buffer> = (0..MESSAGES).map(|_| Buffer::new(STRIDE)).collect();
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let posted: Vec<_> = buffers
        .iter()
        .map(|buffer| {
            let mr = plugin.reg_mr(ends.recv, buffer.at(0), STRIDE).expect("regMr");
            (receive(&plugin, ends, buffer, STRIDE, 1, mr).expect("room"), mr)
        })
        .collect();
    peer.barrier();
    // Until the sender has closed.
    peer.barrier();
    for (number, (request, mr)) in posted.into_iter().enumerate() {
        wait(&plugin, request).unwrap_or_else(|e| panic!("message {number} is lost: {e}"));
        let wrong = buffers[number].differs(0, size(number), number as u64);
        assert_eq!(wrong, None, "message {number} is not what was sent");
        plugin.dereg_mr(ends.recv, mr).expect("deregMr");
    }
    close(&plugin, ends);

    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let mr = plugin.reg_mr(ends.recv, buffers[0].at(0), STRIDE).expect("regMr");
    let [first, _] = [0, 1].map(|_| receive(&plugin, ends, &buffers[0], STRIDE, 1, mr).expect("room"));
    peer.barrier();
    wait(&plugin, first).expect("receive");
    peer.barrier();
    // This process is stopped, then killed.
    std::thread::sleep(hang() * 2);
}
