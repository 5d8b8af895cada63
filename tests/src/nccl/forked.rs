//! A child of `fork` that calls the plugin, as a data loader's worker might.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::pair::Buffer;
use super::scenario::{Options, begin, close, finish_one, loopback, post, send};
use super::table::{Failed, Plugin, Ptr};
use crate::hang;

unsafe extern "C" {
    pub(crate) fn fork() -> i32;
}

/// The result `ncclInvalidUsage`.
const USAGE: i32 = 5;

/// What the child inherits from its parent.
struct Inherited {
    ctx: Ptr,
    listener: Ptr,
    send: Ptr,
    recv: Ptr,
    mr: Ptr,
    receive: Ptr,
}

fn refused<T>(call: &str, answer: Result<T, Failed>) {
    match answer {
        Err(failed) => assert_eq!(failed.code, USAGE, "{call}"),
        Ok(_) => panic!("{call} is allowed"),
    }
}

fn every_call_is_refused(plugin: &Plugin, version: u32, buffer: &Buffer, i: &Inherited) {
    refused("devices", plugin.devices());
    refused("getProperties", plugin.properties(0));
    refused("listen", plugin.listen(i.ctx));
    refused("connect", plugin.connect(i.ctx, &mut [0; 128]));
    refused("accept", plugin.accept(i.listener));
    refused("regMr", plugin.reg_mr(i.send, buffer.at(0), 4096));
    // SAFETY: the calls are refused and touch nothing.
    unsafe {
        refused("isend", plugin.isend(i.send, buffer.at(0), 4096, 1, i.mr));
        refused("irecv", plugin.irecv(i.recv, &[buffer.at(4096)], &[4096], &[1], &[i.mr]));
        refused("test", plugin.test(i.receive, None));
    }
    refused("iflush", plugin.iflush(i.recv, buffer.at(4096), 4096, i.mr));
    refused("deregMr", plugin.dereg_mr(i.recv, i.mr));
    refused("closeSend", plugin.close_send(i.send));
    refused("closeRecv", plugin.close_recv(i.recv));
    refused("closeListen", plugin.close_listen(i.listener));
    if version >= 11 {
        refused("finalize", plugin.finalize(i.ctx));
        refused("init", plugin.init());
    }
}

/// A child makes every call, is refused, and exits; the parent's requests complete all the same.
pub(super) fn forked(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let (listener, _) = plugin.listen(ctx).expect("listen");
    let ends = loopback(&plugin, ctx);
    let buffer = Buffer::new(8192);
    let out_mr = plugin.reg_mr(ends.send, buffer.at(0), 4096).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, buffer.at(4096), 4096).expect("regMr");
    for round in 0..8 {
        buffer.fill(0, 4096, round);
        // SAFETY: the buffer outlives the connection.
        let receive = post(&plugin, || unsafe {
            plugin.irecv(ends.recv, &[buffer.at(4096)], &[4096], &[1], &[into_mr])
        });
        let receive = receive.expect("room");
        let inherited = Inherited { ctx, listener, send: ends.send, recv: ends.recv, mr: into_mr, receive };
        // SAFETY: the child has only this thread, calls the plugin, which takes no lock in a child,
        // and exits.
        let child = unsafe { fork() };
        if child == 0 {
            let calls = AssertUnwindSafe(|| every_call_is_refused(&plugin, o.version, &buffer, &inherited));
            // Exits with exit handlers.
            std::process::exit(i32::from(catch_unwind(calls).is_err()));
        }
        ends_well(Pid::from_raw(child).expect("a child"));
        let sent = send(&plugin, ends, &buffer, 4096, 1, out_mr).expect("room");
        finish_one(&plugin, receive, sent);
        if super::table::is_gpu_memory()
            && let Some(flush) = plugin.iflush(ends.recv, buffer.at(4096), 4096, into_mr).expect("iflush")
        {
            finish_flush(&plugin, flush);
        }
        assert_eq!(buffer.differs(4096, 4096, round), None);
    }
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.close_listen(listener).expect("closeListen");
    plugin.finalize(ctx).expect("finalize");
    println!("8 children were refused every call");
}

fn finish_flush(plugin: &Plugin, flush: Ptr) {
    let begin = Instant::now();
    // SAFETY: our own request, not done yet.
    while !unsafe { plugin.test(flush, None).expect("flush") } {
        assert!(begin.elapsed() < hang(), "a flush hangs");
        std::thread::yield_now();
    }
}

/// Waits until a child has ended without a failure.
pub(crate) fn ends_well(child: Pid) {
    let begin = Instant::now();
    loop {
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).expect("waitpid") {
            return assert_eq!(status.exit_status(), Some(0), "the child: {status:?}");
        }
        if begin.elapsed() > hang() {
            let _ = kill_process(child, Signal::KILL);
            let _ = waitpid(Some(child), WaitOptions::empty());
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
