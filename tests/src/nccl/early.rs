//! Short messages, whose requests are done before the peer has them, and connections that are closed right after.

use std::time::{Duration, Instant};

use super::pair::{self, Buffer, Ends};
use super::scenario::{
    Options, begin, close, die_with_parent, end, finish_one, goes_on, loopback, parent, receive, send, stop,
    wait,
};
use super::table::{Plugin, Ptr, warnings};
use crate::{hang, patience};

/// Lengths of the messages: in a WQE, and through the window.
const SIZES: [usize; 3] = [8, 4096, 8192];
/// Messages of each length.
const TIMES: usize = 4;
const MESSAGES: usize = TIMES * SIZES.len();
const STRIDE: usize = SIZES[SIZES.len() - 1];

/// The most bytes of a message that leaves before its receive is posted, and of one that is too long for that.
const AHEAD: usize = 64 << 10;
const LONG: usize = AHEAD + 1;

/// For so long a receiver stands still while its sender closes.
const STILL: Duration = Duration::from_millis(500);
/// Closing waits for at least so long for a receiver that hangs.
const WAITS: Duration = Duration::from_secs(5);
/// The limit for closing: with the default settings it waits 11 seconds, and the rest is room for a slow and busy machine.
const CLOSED: Duration = Duration::from_secs(60);

fn size(number: usize) -> usize {
    SIZES[number % SIZES.len()]
}

/// What the receiver does while its sender closes.
#[derive(Clone, Copy, PartialEq)]
enum Receiver {
    /// It calls nothing of the plugin.
    Runs,
    /// Its process stands still for [`STILL`].
    StandsStill,
    /// Its process stands still for ever.
    Hangs,
}

/// Messages whose requests are done arrive whole though their memory is used anew and their connection is closed at once, also
/// when the receiver goes on only later.
pub fn early(o: &Options) {
    close_behind(o, &[Receiver::Runs, Receiver::StandsStill]);
}

/// A receiver that hangs holds up closing for a limited time.
pub fn hanging(o: &Options) {
    close_behind(o, &[Receiver::Hangs]);
}

/// Over TCP a number of short messages are sent and done before their receives are posted, and no more than that; a longer message waits.
pub fn ahead(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let ends = loopback(&plugin, ctx);
    let [out, into] = [Buffer::new(LONG), Buffer::new(LONG)];
    let out_mr = plugin.reg_mr(ends.send, out.at(0), LONG).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), LONG).expect("regMr");
    let try_to_send = |size: usize| {
        // SAFETY: the buffer outlives the connection.
        unsafe { plugin.isend(ends.send, out.at(0), size, 1, out_mr) }.expect("isend")
    };
    // The longest comes first, beside which the connection's window has room for the others.
    let size = |number: usize| if number == 0 { AHEAD } else { size(number) };
    let mut most = 0;
    for round in 0..TIMES {
        // Until several in a row find no room; the first ones may wait for what the receiver grants.
        let (mut sent, mut refused, begin) = (0, 0, Instant::now());
        while sent == 0 || refused < 1_000 {
            assert!(begin.elapsed() < hang(), "no message leaves before its receive is posted");
            out.fill(0, size(sent), (1_000 * round + sent) as u64);
            match try_to_send(size(sent)) {
                Some(request) => {
                    wait(&plugin, request).expect("send");
                    (sent, refused) = (sent + 1, 0);
                }
                None => refused += 1,
            }
        }
        most = most.max(sent);
        assert!(sent <= 16, "{sent} messages left before their receives");
        for number in 0..sent {
            into.set(0, AHEAD, 0);
            let posted = receive(&plugin, ends, &into, AHEAD, 1, into_mr).expect("room");
            wait(&plugin, posted).expect("receive");
            let wrong = into.differs(0, size(number), (1_000 * round + number) as u64);
            assert_eq!(wrong, None, "message {number} of round {round} is not what was sent");
        }
        out.fill(0, LONG, round as u64);
        let refused = (0..1_000).all(|_| try_to_send(LONG).is_none());
        assert!(refused, "{LONG} bytes left before their receive");
        let posted = receive(&plugin, ends, &into, LONG, 1, into_mr).expect("room");
        let begin = Instant::now();
        let request = loop {
            if let Some(request) = try_to_send(LONG) {
                break request;
            }
            assert!(begin.elapsed() < hang(), "the sender does not hear of a receive");
        };
        finish_one(&plugin, posted, request);
        assert_eq!(into.differs(0, LONG, round as u64), None);
    }
    assert_eq!(most, 16, "messages that left before their receives");
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// A message that is longer than its receive fails at both ends, and what the sender sends next fails with both lengths. Over TCP a short
/// message that is sent before its receive is done by then; everywhere else it waits for its receive, and fails too.
pub fn long(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    for receive_first in [true, false] {
        for (size, room) in [(30, 20), (5000, 4999), (STRIDE, 0)] {
            let ends = loopback(&plugin, ctx);
            let [out, into] = [Buffer::new(STRIDE), Buffer::new(STRIDE)];
            let out_mr = plugin.reg_mr(ends.send, out.at(0), STRIDE).expect("regMr");
            let into_mr = plugin.reg_mr(ends.recv, into.at(0), STRIDE).expect("regMr");
            let post = || receive(&plugin, ends, &into, room, 1, into_mr).expect("room");
            // SAFETY: the buffer outlives the connection.
            let try_to_send =
                || unsafe { plugin.isend(ends.send, out.at(0), size, 1, out_mr) }.expect("isend");
            let until_sent = || {
                let begin = Instant::now();
                loop {
                    if let Some(request) = try_to_send() {
                        return request;
                    }
                    assert!(begin.elapsed() < hang(), "it is not sent");
                }
            };
            let case = format!("{size} bytes, receive of {room} first: {receive_first}");
            let posted = match receive_first {
                true => {
                    let posted = post();
                    // Over TCP it may leave before the sender hears of the receive.
                    let _ = wait(&plugin, until_sent());
                    posted
                }
                false if over_tcp() => {
                    wait(&plugin, until_sent()).unwrap_or_else(|e| panic!("{case}: {e}"));
                    post()
                }
                false => {
                    assert!(
                        (0..1_000).all(|_| try_to_send().is_none()),
                        "{case}: it left before its receive"
                    );
                    let posted = post();
                    wait(&plugin, until_sent()).expect_err(&case);
                    posted
                }
            };
            wait(&plugin, posted).expect_err(&case);
            let told = warnings().len();
            let begin = Instant::now();
            while wait(&plugin, until_sent()).is_ok() {
                assert!(begin.elapsed() < hang(), "{case}: sends succeed after a receive that failed");
            }
            let said = warnings().split_off(told);
            let why = format!("it has {size} bytes, and the receive that it met takes {room}: send less");
            assert!(said.iter().any(|line| line.contains(&why)), "{case}: {said:?}");
            end(o, &plugin, ends, (out_mr, into_mr));
        }
    }
    plugin.finalize(ctx).expect("finalize");
}

/// Messages whose requests are done at a sender that then ends without a word arrive whole, over TCP also by receives that are posted
/// only after its end. A receive that has no message fails.
pub fn gone(o: &Options) {
    let before = if over_tcp() { MESSAGES / 2 } else { MESSAGES };
    receive_from_one_that_ends(o, "gone-rank", before);
}

/// Over TCP, messages of a sender that has closed in order arrive by receives that are posted only then: closing waits until the
/// receiver's end has them, and not for the receives.
pub fn late(o: &Options) {
    receive_from_one_that_ends(o, "late-rank", 0);
}

/// Posts `before` receives before the sender sends, and the others after its process has ended.
fn receive_from_one_that_ends(o: &Options, sender: &str, before: usize) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn(sender);
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let buffers: Vec<Buffer> = (0..=MESSAGES).map(|_| Buffer::new(STRIDE)).collect();
    let post = |buffer: &Buffer| {
        buffer.set(0, STRIDE, 0);
        let mr = plugin.reg_mr(ends.recv, buffer.at(0), STRIDE).expect("regMr");
        (receive(&plugin, ends, buffer, STRIDE, 1, mr).expect("room"), mr)
    };
    let mut posted: Vec<_> = buffers[..before].iter().map(post).collect();
    peer.barrier();
    assert!(child.wait().expect("wait").success(), "the sender failed");
    // Until this process has seen the end of the other one.
    std::thread::sleep(patience(STILL));
    posted.extend(buffers[before..].iter().map(post));
    for (number, (request, _)) in posted[..MESSAGES].iter().enumerate() {
        wait(&plugin, *request).unwrap_or_else(|e| panic!("message {number} is lost: {e}"));
        let wrong = buffers[number].differs(0, size(number), number as u64);
        assert_eq!(wrong, None, "message {number} is not what was sent");
    }
    assert!(wait(&plugin, posted[MESSAGES].0).is_err(), "a receive without a message is done");
    posted.iter().for_each(|(_, mr)| plugin.dereg_mr(ends.recv, *mr).expect("deregMr"));
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// The sending rank of [`gone`].
pub fn gone_second(o: &Options) {
    send_all(o);
    if over_tcp() {
        // Until the plugin's threads have given the bytes to the kernel.
        std::thread::sleep(patience(STILL));
    }
    std::process::exit(0);
}

/// The sending rank of [`late`].
pub fn late_second(o: &Options) {
    let (plugin, ctx, ends, mr) = send_all(o);
    plugin.dereg_mr(ends.send, mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// Sends messages and sees them done.
fn send_all(o: &Options) -> (Plugin, Ptr, Ends, Ptr) {
    die_with_parent();
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let buffer = Buffer::new(STRIDE);
    let mr = plugin.reg_mr(ends.send, buffer.at(0), STRIDE).expect("regMr");
    peer.barrier();
    for number in 0..MESSAGES {
        buffer.fill(0, size(number), number as u64);
        let s = send(&plugin, ends, &buffer, size(number), 1, mr).expect("room");
        wait(&plugin, s).expect("send");
        buffer.set(0, STRIDE, 0xff);
    }
    // Registered memory stays.
    std::mem::forget(buffer);
    (plugin, ctx, ends, mr)
}

fn over_tcp() -> bool {
    std::env::var_os("PUSHGATE_QP").is_some_and(|qp| qp == "tcp")
}

/// Sends messages, sees them done, and closes, on one connection after the other.
fn close_behind(o: &Options, receivers: &[Receiver]) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("early-rank");
    let ctx = plugin.init().expect("init");
    let buffer = Buffer::new(STRIDE);
    for receiver in receivers {
        let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
        let mr = plugin.reg_mr(ends.send, buffer.at(0), STRIDE).expect("regMr");
        let one = |number: usize, tag: i32| {
            buffer.fill(0, size(number), number as u64);
            let s = send(&plugin, ends, &buffer, size(number), tag, mr).expect("room");
            wait(&plugin, s).expect("send");
            buffer.set(0, STRIDE, 0xff);
        };
        // This one meets the receive that was posted last, so this end knows of all receives after it.
        one(0, 2);
        peer.barrier();
        if *receiver != Receiver::Runs {
            stop(&child);
        }
        (0..MESSAGES).for_each(|number| one(number, 1));
        let begin = Instant::now();
        std::thread::scope(|scope| {
            if *receiver == Receiver::StandsStill {
                scope.spawn(|| {
                    std::thread::sleep(STILL);
                    goes_on(&child);
                });
            }
            plugin.dereg_mr(ends.send, mr).expect("deregMr");
            close(&plugin, ends);
        });
        let took = begin.elapsed();
        let least = match receiver {
            Receiver::Runs => Duration::ZERO,
            Receiver::StandsStill => STILL,
            Receiver::Hangs => WAITS,
        };
        println!("closed after {took:?}");
        assert!(
            took >= least && took < patience(CLOSED),
            "closed after {took:?}, not within {least:?} to {CLOSED:?}"
        );
        if *receiver != Receiver::Hangs {
            // The receiver has all messages.
            peer.barrier();
            peer.barrier();
        }
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    plugin.finalize(ctx).expect("finalize");
}

/// The receiving rank of [`early`] and [`hanging`], until it is killed.
pub fn second(o: &Options) {
    die_with_parent();
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let buffers: Vec<Buffer> = (0..=MESSAGES).map(|_| Buffer::new(STRIDE)).collect();
    loop {
        let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
        // The last one is of another tag.
        let one = |(number, buffer): (usize, &Buffer)| {
            buffer.set(0, STRIDE, 0);
            let mr = plugin.reg_mr(ends.recv, buffer.at(0), STRIDE).expect("regMr");
            let tag = if number == MESSAGES { 2 } else { 1 };
            (receive(&plugin, ends, buffer, STRIDE, tag, mr).expect("room"), mr)
        };
        let posted: Vec<_> = buffers.iter().enumerate().map(one).collect();
        wait(&plugin, posted[MESSAGES].0).expect("receive");
        peer.barrier();
        // This process may be stopped here. Nothing of the plugin is called until the sender has closed.
        peer.barrier();
        for (number, (request, _)) in posted[..MESSAGES].iter().enumerate() {
            wait(&plugin, *request).unwrap_or_else(|e| panic!("message {number} is lost: {e}"));
            let wrong = buffers[number].differs(0, size(number), number as u64);
            assert_eq!(wrong, None, "message {number} is not what was sent");
        }
        posted.iter().for_each(|(_, mr)| plugin.dereg_mr(ends.recv, *mr).expect("deregMr"));
        close(&plugin, ends);
        peer.barrier();
    }
}
