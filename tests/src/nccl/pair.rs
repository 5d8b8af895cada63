//! Two ranks that are connected both ways, and traffic between them. Each rank has two threads,
//! like NCCL's proxy: one that listens, connects, accepts and registers, one that posts and tests.

use std::ffi::c_int;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use pushgate_net_caller::memory::{Buffer, Random};

use super::table::{Plugin, Ptr, Result};
use crate::{Pause, hang};

/// The counterpart of NCCL's bootstrap network: bytes between the two ranks.
pub trait Bootstrap: Send {
    /// Sends bytes to the other rank.
    fn tell(&mut self, bytes: &[u8]);
    /// Receives as many bytes as `bytes` holds.
    fn hear(&mut self, bytes: &mut [u8]);

    /// Waits until the other rank is here too.
    fn barrier(&mut self) {
        self.tell(b"!");
        self.hear(&mut [0]);
    }
}

/// A bootstrap over a pair of streams.
pub struct Streams<R, W>(pub R, pub W);

impl<R: Read + Send, W: Write + Send> Bootstrap for Streams<R, W> {
    fn tell(&mut self, bytes: &[u8]) {
        self.1.write_all(bytes).and_then(|()| self.1.flush()).expect("the other rank is gone");
    }

    fn hear(&mut self, bytes: &mut [u8]) {
        self.0.read_exact(bytes).expect("the other rank is gone");
    }
}

/// Raw pointers of a plugin, which may go to another thread.
#[derive(Clone, Copy)]
pub struct Ends {
    /// The sendComm.
    pub send: Ptr,
    /// The recvComm.
    pub recv: Ptr,
}

// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Send for Ends {}
// SAFETY: NCCL uses such pointers from several threads too.
unsafe impl Sync for Ends {}

/// Connects both ways, polling both ends in turn as NCCL does.
pub fn connect(plugin: &Plugin, ctx: Ptr, peer: &mut dyn Bootstrap) -> Result<Ends> {
    let (listener, own) = plugin.listen(ctx)?;
    peer.tell(&own);
    let mut theirs = [0; 128];
    peer.hear(&mut theirs);
    let ends = poll_ends(plugin, ctx, listener, &mut theirs)?;
    plugin.close_listen(listener)?;
    Ok(ends)
}

/// The polls of [`connect`], from a handle on.
pub fn poll_ends(plugin: &Plugin, ctx: Ptr, listener: Ptr, handle: &mut [u8; 128]) -> Result<Ends> {
    let (mut send, mut recv) = (None, None);
    let (begin, pause) = (Instant::now(), Pause::default());
    loop {
        if send.is_none() {
            send = plugin.connect(ctx, handle)?;
        }
        if recv.is_none() {
            recv = plugin.accept(listener)?;
        }
        if let (Some(send), Some(recv)) = (send, recv) {
            return Ok(Ends { send, recv });
        }
        assert!(
            begin.elapsed() < hang(),
            "no connection within a long time: send {send:?}, receive {recv:?}"
        );
        pause.after(false);
    }
}

/// The traffic each way. Both ranks derive the same messages from it.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// Number of groups of messages.
    pub groups: usize,
    /// The longest message.
    pub max: usize,
    /// Requests in flight, each way.
    pub in_flight: usize,
    /// The most buffers of a receive.
    pub grouping: usize,
    /// Whether the messages of a group are sent in another order than their buffers.
    pub shuffle: bool,
    /// Whether sends name their registration. (NCCL's always do; a plugin need not accept others.)
    pub registered: bool,
    /// Seed of everything that is random.
    pub seed: u64,
}

#[derive(Clone, Copy)]
struct Message {
    size: usize,
    tag: c_int,
    seed: u64,
}

impl Traffic {
    /// The messages that `from` sends, group by group, in the order of the receive.
    fn plan(&self, from: u64) -> Vec<Vec<Message>> {
        let mut r = Random(self.seed ^ from.wrapping_mul(0x5851_f42d_4c95_7f2d));
        (0..self.groups)
            .map(|_| {
                let n = if r.below(3) == 0 { 1 + r.below(self.grouping) } else { 1 };
                // Tags within a group differ; those of different groups repeat.
                let first = r.below(50) as c_int;
                (0..n as c_int)
                    .map(|i| {
                        let size = match r.below(10) {
                            0 => 0,
                            1 => 1 + r.below(64),
                            2 | 3 => 1 + r.below(self.max),
                            _ => 1 + r.below((self.max / 8).max(1)),
                        };
                        Message { size: size.min(self.max), tag: first + i, seed: r.draw() }
                    })
                    .collect()
            })
            .collect()
    }
}

/// What a rank received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// Number of bytes, all of them checked.
    pub bytes: u64,
    /// Number of flushes that had to be waited for.
    pub flushes: u64,
}

/// Runs the traffic on one rank.
pub fn exchange(plugin: &Plugin, rank: u64, ends: Ends, traffic: &Traffic) -> Result<Received> {
    let t = *traffic;
    let stride = t.max.next_multiple_of(64) + 64;
    let out = Buffer::new(stride * t.in_flight);
    let into = Buffer::new(stride * t.in_flight * t.grouping);
    // Registered by the service thread.
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes())?;
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes())?;
    struct Shared<'a>(&'a Plugin, Ends, Ptr, Ptr);
    // SAFETY: the pointers in it may be used by several threads, as those of `Ends` may.
    unsafe impl Sync for Shared<'_> {}
    let shared = Shared(plugin, ends, out_mr, into_mr);
    let stop = AtomicBool::new(false);
    let (out, into) = (&out, &into);
    let received = std::thread::scope(|scope| {
        let progress = scope.spawn(|| {
            let shared = &shared;
            let done = progress(shared.0, rank, shared.1, &t, stride, (out, shared.2), (into, shared.3));
            stop.store(true, Ordering::Release);
            done
        });
        // Meanwhile the service thread registers and deregisters other memory, as it would a user's
        // buffers.
        let other = Buffer::new(1 << 16);
        while !stop.load(Ordering::Acquire) {
            let both = [ends.send, ends.recv]
                .map(|comm| plugin.reg_mr(comm, other.at(0), other.bytes()).map(|mr| (comm, mr)));
            for (comm, mr) in both.into_iter().flatten() {
                // If the connection has failed, the other thread gets an error too.
                let _ = plugin.dereg_mr(comm, mr);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        progress.join().expect("the progress thread panicked")
    })?;
    plugin.dereg_mr(ends.send, out_mr)?;
    plugin.dereg_mr(ends.recv, into_mr)?;
    Ok(received)
}

fn progress(
    plugin: &Plugin,
    rank: u64,
    ends: Ends,
    t: &Traffic,
    stride: usize,
    (out, out_mr): (&Buffer, Ptr),
    (into, into_mr): (&Buffer, Ptr),
) -> Result<Received> {
    let incoming = t.plan(1 - rank);
    let out_mr = if t.registered { out_mr } else { std::ptr::null_mut() };
    let mut r = Random(t.seed ^ rank ^ 0xabcd);
    // In the order in which they are sent.
    let outgoing: Vec<Message> = t
        .plan(rank)
        .into_iter()
        .flat_map(|mut group| {
            if t.shuffle {
                for i in (1..group.len()).rev() {
                    group.swap(i, r.below(i + 1));
                }
            }
            group
        })
        .collect();
    // For each slot: the request, and the number of its message.
    let mut sends: Vec<Option<(Ptr, usize)>> = vec![None; t.in_flight];
    let mut recvs: Vec<Option<(Ptr, usize)>> = vec![None; t.in_flight];
    // Receives that are done and being flushed: NCCL flushes before it tells a GPU that needs it.
    let mut flushing = vec![false; t.in_flight];
    let (mut next_send, mut next_recv, mut done_sends, mut done_recvs) = (0, 0, 0, 0);
    let mut received = Received::default();
    let mut last = Instant::now();
    while done_sends < outgoing.len() || done_recvs < incoming.len() {
        let before = (next_send, next_recv, done_sends, done_recvs);
        for (slot, place) in recvs.iter_mut().enumerate() {
            if place.is_none() && next_recv < incoming.len() {
                let group = &incoming[next_recv];
                let at = |i: usize| (slot * t.grouping + i) * stride;
                let room: Vec<usize> = group.iter().map(|m| m.size + r.below(stride - m.size)).collect();
                for (i, n) in room.iter().enumerate() {
                    into.set(at(i), (*n).min(group[i].size + 64), 0xee);
                }
                let data: Vec<Ptr> = (0..group.len()).map(|i| into.at(at(i))).collect();
                let tags: Vec<c_int> = group.iter().map(|m| m.tag).collect();
                // SAFETY: nothing else uses these stretches until the request is done.
                let request =
                    unsafe { plugin.irecv(ends.recv, &data, &room, &tags, &vec![into_mr; group.len()])? };
                if let Some(request) = request {
                    *place = Some((request, next_recv));
                    next_recv += 1;
                }
            }
            let Some((request, group)) = *place else { continue };
            // Each user of a connection in NCCL tests only its own oldest request. (A connection
            // has several users only if its receives take several buffers.) Otherwise requests are
            // tested in any order.
            if !plugin.strict && group != done_recvs {
                continue;
            }
            // SAFETY: the request is not done yet.
            let sizes = unsafe {
                match flushing[slot] {
                    true => plugin.test(request, None)?.then_some([0; 8]),
                    false => plugin.test_receive(request, true)?,
                }
            };
            if let Some(sizes) = sizes {
                if !flushing[slot] {
                    for (i, m) in incoming[group].iter().enumerate() {
                        assert_eq!(sizes[i] as usize, m.size, "size of message {i} of group {group}");
                    }
                    let first = incoming[group].iter().position(|m| m.size > 0);
                    let flush = match first.filter(|_| super::table::is_gpu_memory()) {
                        Some(i) => {
                            let at = into.at((slot * t.grouping + i) * stride);
                            plugin.iflush(ends.recv, at, sizes[i], into_mr)?
                        }
                        None => None,
                    };
                    if let Some(flush) = flush {
                        (*place, flushing[slot]) = (Some((flush, group)), true);
                        received.flushes += 1;
                        continue;
                    }
                }
                flushing[slot] = false;
                for (i, m) in incoming[group].iter().enumerate() {
                    let at = (slot * t.grouping + i) * stride;
                    if let Some(byte) = into.differs(at, m.size, m.seed) {
                        panic!("group {group}, message {i} of {} bytes: byte {byte} is wrong", m.size);
                    }
                    received.bytes += m.size as u64;
                }
                (*place, done_recvs) = (None, done_recvs + 1);
            }
        }
        for (slot, place) in sends.iter_mut().enumerate() {
            if place.is_none() && next_send < outgoing.len() {
                let m = outgoing[next_send];
                out.fill(slot * stride, m.size, m.seed);
                // SAFETY: nothing else uses this stretch until the request is done.
                let request =
                    unsafe { plugin.isend(ends.send, out.at(slot * stride), m.size, m.tag, out_mr)? };
                if let Some(request) = request {
                    *place = Some((request, next_send));
                    next_send += 1;
                }
            }
            let Some((request, number)) = *place else { continue };
            if !plugin.strict && number != done_sends {
                continue;
            }
            // With and without a place for the size.
            // SAFETY: the request is not done yet.
            if unsafe { plugin.test_send(request, number % 2 == 0)? } {
                // Overwrites the memory, as NCCL's next kernel would.
                out.set(slot * stride, outgoing[number].size, 0x11);
                (*place, done_sends) = (None, done_sends + 1);
            }
        }
        if before == (next_send, next_recv, done_sends, done_recvs) {
            assert!(last.elapsed() < hang(), "no progress within a long time: {before:?}");
            std::thread::yield_now();
        } else {
            last = Instant::now();
        }
    }
    Ok(received)
}
