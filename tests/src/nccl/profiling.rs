//! Scenarios of what NCCL tells profilers and tuners of its calls and kernel launches.

use std::ffi::CStr;

use super::scenario::{Options, close, loopback};
use super::table::warnings;

/// What the plugin logs about its profiler: connections without it and, with `--times 1`, with it.
pub fn queue(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    if o.times == 1 {
        assert_eq!(plugin.profile(5).expect("a profiler").mask, 0xf00);
    }
    for _ in 0..2 {
        let ends = loopback(&plugin, ctx);
        close(&plugin, ends);
    }
    plugin.finalize(ctx).expect("finalize");
    warnings().iter().for_each(|w| println!("warning: {w}"));
}

/// What NCCL tells a profiler, in the table of version `--times`: a group of calls, a collective call, a kernel launch, a
/// state, an event that v5 lacks.
pub fn profiler(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    // The GPU copies once it has a connection.
    let ends = loopback(&plugin, ctx);
    let profiling = plugin.profile(o.times as u32).expect("a profiler");
    println!("mask {:#x}", profiling.mask);
    let group = profiling.start(1 << 8, 0);
    let call = profiling.start(1 << 9, 0);
    let launches = [0, 1].map(|_| profiling.start(1 << 11, 0));
    assert!(launches[0] != launches[1] || launches[0].is_null());
    if !call.is_null() {
        profiling.record(call, 23);
    }
    let copies = profiling.start(1 << 12, 0);
    for event in [copies, launches[0], call, launches[1], group] {
        if !event.is_null() {
            profiling.stop(event);
        }
    }
    close(&plugin, ends);
    profiling.finalize();
    plugin.finalize(ctx).expect("finalize");
    warnings().iter().for_each(|w| println!("warning: {w}"));
}

/// What NCCL tells the profiler v6 of broadcasts, whose kernels it launches without an event: groups of calls. The worker
/// fails to be launched once (`_PUSHGATE_WORKER_FAULT`), which shows when it is launched.
pub fn broadcasts(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    let ends = loopback(&plugin, ctx);
    let profiling = plugin.profile(6).expect("a profiler");
    let group = || profiling.start(1 << 8, 0);
    // Within a group only a broadcast launches the worker; the second one finds it.
    for func in [c"AllReduce", c"Broadcast", c"Broadcast"] {
        let group = group();
        profiling.record(group, 23);
        let call = profiling.call(func, group, 0);
        println!("{func:?} {:?}", call.as_ref().err());
        if let Some(call) = call.ok().filter(|call| !call.is_null()) {
            profiling.stop(call);
        }
        profiling.stop(group);
    }
    // Many in a group, and the same handles again.
    for _ in 0..3 {
        let group = group();
        for stream in [0, 0, 0] {
            assert!(profiling.call(c"Broadcast", group, stream).is_ok());
        }
        profiling.stop(group);
    }
    // A call outside of a group has no end, so it takes no lease.
    assert!(profiling.call(c"Broadcast", std::ptr::null_mut(), 0).is_ok());
    close(&plugin, ends);
    profiling.finalize();
    plugin.finalize(ctx).expect("finalize");
    warnings().iter().for_each(|w| println!("warning: {w}"));
}

/// What NCCL tells profiler and tuner of groups of calls, and for which kernel launches the plugin's worker comes: a launch
/// that has no handle has no worker.
pub fn launches(o: &Options) {
    const LL: [f32; 6] = [5.0, -1.0, 7.0, 3.0, -1.0, 6.0];
    const SIMPLE: [f32; 6] = [5.0, -1.0, 2.0, 3.0, -1.0, 6.0];
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    // The GPU copies once it has a connection.
    let ends = loopback(&plugin, ctx);
    let profiling = plugin.profile(o.times as u32).expect("a profiler");
    let told = |calls: &[&CStr], answers: &[(usize, [f32; 6])], what: &str| {
        let group = profiling.start(1 << 8, 0);
        for func in calls {
            match *func == c"Send" {
                true => assert!(profiling.start(1 << 10, 0).is_null()),
                false => assert!(profiling.call(func, group, 0).expect("no launch").is_null()),
            }
        }
        for (bytes, costs) in answers {
            plugin.tune(*bytes, *costs);
        }
        let launch = profiling.start(1 << 11, 0);
        println!("{what}: {}", if launch.is_null() { "no worker" } else { "worker" });
        if !launch.is_null() {
            profiling.stop(launch);
        }
        profiling.stop(group);
    };
    told(&[c"AllReduce"], &[(8, LL)], "LL");
    told(&[c"AllReduce"], &[(8, SIMPLE)], "Simple");
    told(&[c"AllReduce"], &[(4 << 20, LL)], "LL where the tuner is against it");
    told(&[c"AllReduce"; 2], &[(8, LL), (8, LL)], "two calls");
    told(&[c"AllReduce", c"Send"], &[(8, LL)], "a send beside it");
    told(&[c"AllReduce"], &[], "no tuner");
    told(&[c"AllGather"], &[(8, LL)], "LL again");
    plugin.tune(8, LL);
    let launch = profiling.start(1 << 11, 0);
    assert!(!launch.is_null(), "a launch outside of a group");
    profiling.stop(launch);
    close(&plugin, ends);
    profiling.finalize();
    plugin.finalize(ctx).expect("finalize");
    warnings().iter().for_each(|w| println!("warning: {w}"));
}
