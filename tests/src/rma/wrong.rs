//! Wrong arguments, and a child of `fork`.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use rustix::process::Pid;

use super::group::Group;
use super::rank::{Memory, Rank, refused};
use super::scenario::Options;
use super::table::{
    ADD, Bytes, CUDA, FORCE_SO, Failed, HOST, INC, Mr, Ptr, Result, Signal, Table, To, Version,
};
use crate::nccl::forked::{ends_well, fork};

const SIZE: usize = 4096;

/// Wrong arguments of every call are refused, and nothing happens; what is right still works.
pub fn wrong(o: &Options, table: &Table, group: Group) {
    making(table);
    let mut rank = Rank::new(o, table, group, 1);
    let data = rank.memory(0, SIZE, rank.kind, 0);
    let signals = rank.memory(0, 64, rank.kind, FORCE_SO);
    data.buffer.set(0, SIZE, 0xee);
    registering(&rank);
    rank.barrier();
    operations(&rank, &data, &signals);
    requests(&rank);
    // What other ranks did would be here after the right operations of theirs.
    let (me, ranks) = (rank.me(), rank.ranks());
    for peer in 0..ranks {
        let bytes = Bytes {
            local: 0,
            local_mr: data.mr.device,
            size: 8,
            remote: (SIZE - 8) as u64,
            remote_mr: data.mr.device,
        };
        let signal = Signal { at: 56, mr: signals.mr.device, value: 0, op: INC, strong: true };
        let request = rank.put_signal(rank.to(0, 0, peer), bytes, signal);
        rank.done(0, request);
    }
    rank.until_value(&signals, 56, ranks as u64);
    assert!((0..7).all(|i| signals.value(8 * i) == 0), "rank {me}: a signal that was refused");
    let same = (0..SIZE / 8).all(|i| data.value(8 * i) == 0xeeee_eeee_eeee_eeee);
    assert!(same, "rank {me}: bytes of a put that was refused");
    rank.no_error();
    rank.barrier();
    if me == 0 {
        println!("{}: refused", table.version.name());
    }
    rank.end([data, signals]);
}

/// What comes before there is a group.
fn making(table: &Table) {
    // What NCCL calls after an init that failed.
    table.finalize(null_mut()).expect("finalize of NULL");
    let init = table.init().expect("init");
    refused("properties of device 1000", table.properties(1000));
    refused("properties of device -1", table.properties(-1));
    refused("listen at device 1000", table.listen(init, 1000));
    // NCCL's network may have another context.
    let (listener, own) = table.listen(null_mut(), 0).expect("listen without a context");
    let mut handle = own;
    let mut one = [handle.as_mut_ptr().cast()];
    let mut two = [one[0], one[0]];
    refused("connect without ranks", table.connect_raw(init, &mut one, 0, 0, 1, listener));
    refused("connect of rank 1 of 1", table.connect_raw(init, &mut one, 1, 1, 1, listener));
    refused("connect of rank -1", table.connect_raw(init, &mut one, 1, -1, 1, listener));
    refused("connect without handles", table.connect_raw(init, &mut [], 1, 0, 1, listener));
    refused("connect with a NULL handle", table.connect_raw(init, &mut [null_mut()], 1, 0, 1, listener));
    refused("connect without a listener", table.connect_raw(init, &mut one, 1, 0, 1, null_mut()));
    let mut garbage = [[0x5au8; 128], own];
    two[0] = garbage[0].as_mut_ptr().cast();
    refused("connect with garbage", table.connect_raw(init, &mut two, 2, 1, 1, listener));
    table.close_listen(listener).expect("closeListen");
    refused("createContext of NULL", table.create_context(null_mut(), 1));
    refused("destroyContext of NULL", table.destroy_context(null_mut()));
    refused("closeColl of NULL", table.close_coll(null_mut()));
    refused("closeListen of NULL", table.close_listen(null_mut()));
    table.finalize(init).expect("finalize");
}

fn registering(rank: &Rank) {
    let (table, coll) = (rank.table, rank.colls[0].comm);
    let buffer = crate::nccl::pair::Buffer::new(SIZE);
    refused("regMrSym of no group", table.reg(null_mut(), buffer.at(0), SIZE, HOST, 0));
    refused("regMrSym of NULL", table.reg(coll, null_mut(), SIZE, HOST, 0));
    for kind in [0, 3, 8, -1] {
        refused("regMrSym of an unknown kind", table.reg(coll, buffer.at(0), SIZE, kind, 0));
    }
    refused("regMrSym beyond the last address", table.reg(coll, buffer.at(0), usize::MAX, HOST, 0));
    if rank.dma_bufs {
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        for fd in [-1, file.as_raw_fd()] {
            let answer = table.reg_dma_buf(coll, buffer.at(0), SIZE, CUDA, fd);
            assert!(answer.is_err(), "a dma-buf that is none: {answer:?}");
        }
    }
    refused("regMrSymDmaBuf of NULL", table.reg_dma_buf(coll, null_mut(), SIZE, CUDA, -1));
    // Nothing is deregistered.
    let _ = table.dereg(coll, Mr::NONE);
    if table.version != Version::Gin11 {
        refused("createContext with -1 contexts", table.create_context(coll, -1));
        refused("createContext with a million contexts", table.create_context(coll, 1 << 20));
    }
}

fn operations(rank: &Rank, data: &Memory, signals: &Memory) {
    let table = rank.table;
    let peer = (rank.me() + 1) % rank.ranks();
    let to = rank.to(0, 0, peer);
    let good = Bytes { local: 0, local_mr: data.mr.device, size: 64, remote: 64, remote_mr: data.mr.device };
    let signal = Signal { at: 8, mr: signals.mr.device, value: 1, op: ADD, strong: true };
    let size = SIZE as u64;
    let mut places = vec![
        ("no context", To { ctx: null_mut(), ..to }),
        ("a rank beyond the last", To { rank: rank.ranks() as u32, ..to }),
        ("rank -1", To { rank: u32::MAX, ..to }),
    ];
    if table.version != Version::Gin11 {
        places.push(("a context beyond the last", To { context: rank.contexts as i32, ..to }));
        places.push(("context -1", To { context: -1, ..to }));
    }
    let stretches = [
        ("no source", Bytes { local_mr: null_mut(), ..good }),
        ("no target", Bytes { remote_mr: null_mut(), ..good }),
        ("a source that begins behind the end", Bytes { local: size + 1, ..good }),
        ("a source that ends behind the end", Bytes { local: size - 63, ..good }),
        ("a source behind the last address", Bytes { local: u64::MAX - 63, ..good }),
        ("a target that begins behind the end", Bytes { remote: size + 1, ..good }),
        ("a target that ends behind the end", Bytes { remote: size - 63, ..good }),
        ("a target behind the last address", Bytes { remote: u64::MAX - 63, ..good }),
        ("a length beyond all", Bytes { size: usize::MAX, ..good }),
        ("a length of all but the offset", Bytes { local: 64, size: usize::MAX - 63, ..good }),
    ];
    let wrong_signals = [
        ("no signal", Signal { mr: null_mut(), ..signal }),
        ("a signal between two words", Signal { at: 12, ..signal }),
        ("a signal behind the end", Signal { at: 64, ..signal }),
        ("a signal behind the last address", Signal { at: u64::MAX - 7, ..signal }),
        ("operation 0", Signal { op: 0, ..signal }),
        ("operation 3", Signal { op: 3, ..signal }),
        ("an operation of many bits", Signal { op: u32::MAX, ..signal }),
    ];
    let each = |what: &str, to: To, bytes: Bytes| {
        // SAFETY: the memory stays until the end.
        unsafe {
            refused(&format!("iput, {what}"), table.iput(to, bytes));
            refused(&format!("iputSignal, {what}"), table.iput_signal(to, bytes, signal));
            if table.version.has_get() {
                refused(&format!("iget, {what}"), table.iget(to, bytes));
            }
        }
    };
    places.iter().for_each(|(what, to)| each(what, *to, good));
    stretches.iter().for_each(|(what, bytes)| each(what, to, *bytes));
    for (what, signal) in wrong_signals {
        for bytes in [good, Bytes::NONE] {
            // SAFETY: the memory stays until the end.
            refused(&format!("iputSignal, {what}"), unsafe { table.iput_signal(to, bytes, signal) });
        }
    }
    if table.version.has_get() {
        for (what, to) in places {
            refused(&format!("iflush, {what}"), table.iflush(to, data.mr.device));
        }
    }
}

fn requests(rank: &Rank) {
    let (table, coll) = (rank.table, rank.colls[0].comm);
    // SAFETY: NULL is no request.
    unsafe {
        refused("test of NULL", table.test(coll, null_mut()));
        refused("test of NULL of no group", table.test(null_mut(), null_mut()));
        refused("test without a place", table.test_without_place(coll, null_mut()));
    }
    refused("progress of NULL", table.progress(null_mut()));
    match table.version.is_gin() {
        // A pointer that nothing may follow.
        true => assert_eq!(table.last_error(std::ptr::dangling_mut()), Ok(false)),
        false => refused("queryLastError of NULL", table.last_error(null_mut())),
    }
}

/// What a child inherits from its parent.
struct Inherited<'a> {
    rank: &'a Rank<'a>,
    memory: &'a Memory,
    listener: Ptr,
    request: Ptr,
}

/// Every call of a child is refused with `ncclInvalidUsage`; the parent's operations complete all the same.
pub fn forked(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    assert_eq!(rank.ranks(), 1, "forked has one rank");
    let memory = rank.memory(0, 8192, rank.kind, FORCE_SO);
    let (listener, _) = table.listen(rank.init, 0).expect("listen");
    for round in 0..o.rounds as u64 {
        memory.buffer.fill(0, 2048, round);
        let bytes = Bytes {
            local: 0,
            local_mr: memory.mr.device,
            size: 2048,
            remote: 4096,
            remote_mr: memory.mr.device,
        };
        let signal = Signal { at: 8184, mr: memory.mr.device, value: 0, op: INC, strong: true };
        let request = rank.put_signal(rank.to(0, 0, 0), bytes, signal);
        let inherited = Inherited { rank: &rank, memory: &memory, listener, request };
        // SAFETY: the child has only this thread, calls the plugin, which takes no lock in a child, and exits.
        let child = unsafe { fork() };
        if child == 0 {
            let calls = AssertUnwindSafe(|| every_call_is_refused(&inherited));
            // Exits with exit handlers.
            std::process::exit(i32::from(catch_unwind(calls).is_err()));
        }
        ends_well(Pid::from_raw(child).expect("a child"));
        rank.done(0, request);
        rank.until_value(&memory, 8184, round + 1);
        assert_eq!(memory.buffer.differs(4096, 2048, round), None);
    }
    table.close_listen(listener).expect("closeListen");
    rank.no_error();
    rank.barrier();
    println!("{}: {} children were refused every call", table.version.name(), o.rounds);
    rank.end([memory]);
}

fn every_call_is_refused(i: &Inherited) {
    #[track_caller]
    fn usage<T: std::fmt::Debug>(answer: Result<T>) {
        assert!(matches!(answer, Err(Failed { code: 5, .. })), "{answer:?}");
    }
    let (rank, table) = (i.rank, i.rank.table);
    let (coll, to, mr) = (rank.colls[0].comm, rank.to(0, 0, 0), i.memory.mr);
    let bytes = Bytes { local: 0, local_mr: mr.device, size: 64, remote: 4096, remote_mr: mr.device };
    let signal = Signal { at: 8184, mr: mr.device, value: 0, op: INC, strong: true };
    usage(table.devices());
    usage(table.properties(0));
    usage(table.listen(rank.init, 0));
    usage(table.connect(rank.init, &mut [[0; 128]], 0, 1, i.listener));
    usage(table.reg(coll, i.memory.buffer.at(0), 64, HOST, 0));
    // SAFETY: the calls are refused and touch nothing.
    unsafe {
        usage(table.iput(to, bytes));
        usage(table.iput_signal(to, bytes, signal));
        if table.version.has_get() {
            usage(table.iget(to, bytes));
            usage(table.iflush(to, mr.device));
        }
        usage(table.test(coll, i.request));
    }
    usage(table.progress(to.ctx));
    usage(table.last_error(to.ctx));
    usage(table.create_context(coll, 1));
    usage(table.destroy_context(to.ctx));
    usage(table.dereg(coll, mr));
    usage(table.close_coll(coll));
    usage(table.close_listen(i.listener));
    usage(table.finalize(rank.init));
    usage(table.init());
}
