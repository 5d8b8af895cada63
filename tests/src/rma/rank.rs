//! A rank: its groups (collComms), contexts and registrations, and the calls with which it waits. As NCCL's progress thread
//! does, a rank makes progress whenever it waits for something.

use std::time::Instant;

use super::group::Group;
use super::scenario::Options;
use super::table::{Bytes, CUDA, Failed, HOST, Mr, Props, Ptr, Result, Signal, Table, To, warnings};
use crate::nccl::pair::Buffer;
use crate::{Pause, hang};
use pushgate_net_caller::cuda::Driver;

/// A group of all ranks and its contexts.
pub struct Coll {
    /// collComm
    pub comm: Ptr,
    /// Contexts of createContext; in GIN one, which has the contexts of the collComm.
    pub ctxs: Vec<Ptr>,
}

/// Memory with its registration.
pub struct Memory {
    /// The memory.
    pub buffer: Buffer,
    /// The registration.
    pub mr: Mr,
}

impl Memory {
    /// The value of the word at an offset. What came before the signal is seen after this call.
    pub fn value(&self, at: usize) -> u64 {
        self.buffer.word(at)
    }
}

/// A rank with everything that it has made.
pub struct Rank<'a> {
    /// The plugin's table.
    pub table: &'a Table,
    /// The bootstrap network.
    pub group: Group,
    /// What init returned.
    pub init: Ptr,
    /// The groups.
    pub colls: Vec<Coll>,
    /// Contexts in each context of createContext.
    pub contexts: usize,
    /// The most operations outstanding for a context and peer.
    pub depth: usize,
    /// The kind of memory for signals and data: [`HOST`] or [`CUDA`].
    pub kind: i32,
    /// Memory may be registered by a dma-buf.
    pub dma_bufs: bool,
}

impl<'a> Rank<'a> {
    /// Begins as NCCL does: init, properties, and one group with `ctxs` contexts of createContext.
    pub fn new(o: &Options, table: &'a Table, group: Group, ctxs: usize) -> Self {
        if let Some(driver) = Driver::real().filter(|_| o.gpu) {
            driver.enter(group.rank);
        }
        let init = table
            .init()
            .unwrap_or_else(|e| panic!("{e}: NCCL would pass the plugin over: {:#?}", warnings()));
        assert_eq!(table.name(), "pushgate");
        let n = table.devices().expect("devices");
        assert!(n > 0, "the plugin has {n} devices: NCCL would pass it over");
        let props = table.properties(0).expect("getProperties");
        check(&props);
        let mut rank = Rank {
            table,
            group,
            init,
            colls: Vec::new(),
            contexts: table.version.contexts(o.contexts),
            depth: super::table::MAX_REQUESTS * props.max_recvs as usize,
            kind: if o.gpu { CUDA } else { HOST },
            dma_bufs: props.ptr_support & 4 != 0,
        };
        rank.add_coll(ctxs);
        rank
    }

    /// The rank's number.
    pub fn me(&self) -> usize {
        self.group.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.group.ranks
    }

    /// Makes another group, with `ctxs` contexts of createContext; returns its place.
    pub fn add_coll(&mut self, ctxs: usize) -> usize {
        // NCCL 2.28 names any device of the network; later releases name those of the table.
        let last = self.table.devices().expect("devices") - 1;
        let (listener, own) = self.table.listen(self.init, last).expect("listen");
        let mut handles: Vec<[u8; 128]> =
            self.exchange(&own).into_iter().map(|told| told.try_into().expect("a handle")).collect();
        let (me, contexts) = (self.me() as i32, self.contexts);
        // NCCL 2.30.7 names the network's context there, and nothing requires one.
        let ctx = if self.colls.is_empty() { self.init } else { std::ptr::null_mut() };
        let comm = self.table.connect(ctx, &mut handles, me, contexts, listener);
        let comm = comm.unwrap_or_else(|e| panic!("{e}: {:#?}", warnings()));
        // The handles' memory is free again.
        handles.fill([0x5a; 128]);
        self.table.close_listen(listener).expect("closeListen");
        let ctxs = if self.table.version.is_gin() { 1 } else { ctxs };
        if let Some(flushes) = self.table.flushes_all_puts(comm) {
            assert!(
                !flushes.expect("getRmaProperties"),
                "a signal of one rank tells nothing of another's puts"
            );
        }
        // Of GIN the first group is used as by NCCL 2.29, which takes the collComm, and the others as by 2.30.4.
        let takes_comm = self.table.version.is_gin() && self.colls.is_empty();
        let create = |_| match takes_comm {
            true => comm,
            false => self.table.create_context(comm, contexts as i32).expect("createContext"),
        };
        let ctxs = (0..ctxs).map(create).collect();
        self.colls.push(Coll { comm, ctxs });
        self.colls.len() - 1
    }

    /// Registers zeroed memory with the group at `coll`. All ranks do that in the same order.
    pub fn memory(&self, coll: usize, bytes: usize, kind: i32, flags: u64) -> Memory {
        let buffer = if kind == CUDA { Buffer::of_gpu(bytes) } else { Buffer::new(bytes) };
        let mr = self.table.reg(self.colls[coll].comm, buffer.at(0), bytes, kind, flags);
        Memory { buffer, mr: mr.unwrap_or_else(|e| panic!("{e}: {:#?}", warnings())) }
    }

    /// Deregisters memory of [`Rank::memory`].
    pub fn forget(&self, coll: usize, memory: Memory) {
        self.table.dereg(self.colls[coll].comm, memory.mr).expect("deregMrSym");
    }

    /// Calls the progress of every context.
    pub fn try_progress(&self) -> Result<()> {
        self.colls.iter().flat_map(|coll| &coll.ctxs).try_for_each(|ctx| self.table.progress(*ctx))
    }

    /// Calls the progress of every context, which succeeds.
    pub fn progress(&self) {
        self.try_progress().unwrap_or_else(|e| panic!("rank {}: {e}: {:#?}", self.me(), warnings()));
    }

    /// Waits until every rank is here. Progress is made meanwhile.
    pub fn barrier(&mut self) {
        self.exchange(b"!");
    }

    /// Exchanges bytes with every rank. Progress is made meanwhile.
    pub fn exchange(&mut self, own: &[u8]) -> Vec<Vec<u8>> {
        let (table, colls) = (self.table, &self.colls);
        let mut idle = || {
            for ctx in colls.iter().flat_map(|coll| &coll.ctxs) {
                // What fails here fails in the tests of requests too.
                let _ = table.progress(*ctx);
            }
        };
        self.group.all_gather(own, &mut idle)
    }

    /// Where an operation goes: `context` counts the contexts of all of the group's createContexts.
    pub fn to(&self, coll: usize, context: usize, rank: usize) -> To {
        let ctx = self.colls[coll].ctxs[context / self.contexts];
        To { ctx, context: (context % self.contexts) as i32, rank: rank as u32, flags: 0 }
    }

    /// The number of contexts of a group that [`Rank::to`] takes.
    pub fn all_contexts(&self, coll: usize) -> usize {
        self.colls[coll].ctxs.len() * self.contexts
    }

    /// Begins a put, which is accepted.
    pub fn put(&self, to: To, bytes: Bytes) -> Ptr {
        // SAFETY: the scenarios deregister memory, or close its group, before they free it.
        unsafe { self.table.iput(to, bytes) }
            .unwrap_or_else(|e| panic!("{e}, {to:?}, {bytes:?}: {:#?}", warnings()))
    }

    /// Begins a put with a signal, which is accepted.
    pub fn put_signal(&self, to: To, bytes: Bytes, signal: Signal) -> Ptr {
        // SAFETY: the scenarios deregister memory, or close its group, before they free it.
        unsafe { self.table.iput_signal(to, bytes, signal) }
            .unwrap_or_else(|e| panic!("{e}, {to:?}, {bytes:?}, {signal:?}: {:#?}", warnings()))
    }

    /// Begins a get, which is accepted.
    pub fn get(&self, to: To, bytes: Bytes) -> Ptr {
        // SAFETY: the scenarios deregister memory, or close its group, before they free it.
        unsafe { self.table.iget(to, bytes) }
            .unwrap_or_else(|e| panic!("{e}, {to:?}, {bytes:?}: {:#?}", warnings()))
    }

    /// Tests a request once.
    pub fn test(&self, coll: usize, request: Ptr) -> Result<bool> {
        // SAFETY: the scenarios test no request again that is done.
        unsafe { self.table.test(self.colls[coll].comm, request) }
    }

    /// Waits until a request is done or fails.
    pub fn ended(&self, coll: usize, request: Ptr) -> Result<()> {
        let (begin, pause) = (Instant::now(), Pause::default());
        while !self.test(coll, request)? {
            let _ = self.try_progress();
            assert!(begin.elapsed() < hang(), "rank {}: a request does not end", self.me());
            pause.after(false);
        }
        Ok(())
    }

    /// Waits until a request is done.
    #[track_caller]
    pub fn done(&self, coll: usize, request: Ptr) {
        self.ended(coll, request).unwrap_or_else(|e| panic!("rank {}: {e}: {:#?}", self.me(), warnings()));
    }

    /// Waits until something is so. Progress is made meanwhile.
    #[track_caller]
    pub fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        let (begin, pause) = (Instant::now(), Pause::default());
        while !so() {
            self.progress();
            assert!(begin.elapsed() < hang(), "rank {}: there is still not: {what}", self.me());
            pause.after(false);
        }
    }

    /// Waits until the word at an offset has this value and no other one beyond.
    #[track_caller]
    pub fn until_value(&self, memory: &Memory, at: usize, wanted: u64) {
        self.until(&format!("{wanted} in the word at {at}, where {} is", memory.value(at)), || {
            memory.value(at) == wanted
        });
    }

    /// Checks that no context has seen an error.
    #[track_caller]
    pub fn no_error(&self) {
        for ctx in self.colls.iter().flat_map(|coll| &coll.ctxs) {
            let error = self.table.last_error(*ctx);
            assert!(error == Ok(false), "rank {}: {error:?}: {:#?}", self.me(), warnings());
        }
    }

    /// Checks that a context of the first group reports an error, in tables whose NCCL asks.
    #[track_caller]
    pub fn has_error(&self, context: usize) {
        let error = self.table.last_error(self.to(0, context, 0).ctx).expect("queryLastError");
        assert_eq!(error, !self.table.version.is_gin(), "queryLastError");
    }

    /// Ends in NCCL's order: the contexts, the registrations, the groups, finalize. (`memories`: of the first group.) Returns
    /// the bootstrap network.
    pub fn end(self, memories: impl IntoIterator<Item = Memory>) -> Group {
        for (i, coll) in self.colls.iter().enumerate() {
            if !(self.table.version.is_gin() && i == 0) {
                coll.ctxs.iter().for_each(|ctx| self.table.destroy_context(*ctx).expect("destroyContext"));
            }
        }
        memories.into_iter().for_each(|memory| self.forget(0, memory));
        for coll in &self.colls {
            self.table.close_coll(coll.comm).expect("closeColl");
        }
        self.table.finalize(self.init).expect("finalize");
        self.group
    }
}

fn check(p: &Props) {
    assert!(!p.name.is_empty() && p.speed < 10_000_000 && p.max_comms > 0, "{p:?}");
    assert_eq!(p.max_recvs, 8, "{p:?}");
    assert_eq!(p.device_type, super::table::PROXY, "NCCL refuses tables of another type: {p:?}");
    assert!(p.ptr_support & HOST == HOST, "{p:?}");
    assert!(p.max_p2p_bytes > 0 && p.max_p2p_bytes <= 1 << 40, "{p:?}");
}

/// Whether a call was refused as wrong: `ncclInvalidArgument` or `ncclInvalidUsage`.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(what: &str, answer: Result<T>) {
    assert!(matches!(answer, Err(Failed { code: 4 | 5, .. })), "{what}: {answer:?}");
}
