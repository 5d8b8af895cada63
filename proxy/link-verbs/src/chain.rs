//! Work requests on their way: written one after the other, posted as one
//! chain, and counted until they are done.

use pushgate_rdma_core_sys as sys;

use super::objects::Rc;
use super::path::UnderWay;
use super::sge::{Remote, Sge};

/// After this number of bytes a completion is asked for, so that one tells soon whether the peer's device answers.
const BYTES: u64 = 1 << 20;

/// Work requests chained into one post, at most.
pub(super) const CHAIN: usize = 2 * 64;

/// How a link learns that the peer's device has what was written, where the completion of a WRITE says only that the bytes
/// have left this end: a READ after the WRITEs completes once they are there.
#[derive(Clone, Copy)]
pub(super) struct Echo {
    /// What is read of the peer's memory.
    pub(super) from: Remote,
    /// Where that goes.
    pub(super) into: Sge,
}

/// Work requests that are posted together as one chain, and the count of those that are done.
pub(super) struct Chain {
    requests: Vec<sys::ibv_send_wr>,
    sources: Vec<sys::ibv_sge>,
    inline: u32,
    /// Where there is one, no WRITE asks for a completion: the READ at a chain's end does. The READ has the number of the last
    /// WRITE before it.
    echo: Option<Echo>,
    /// A completion of what the chain has is asked for, by the READ at its end.
    asks: bool,
    /// WRITEs written so far. The number of each is its `wr_id`.
    pub(super) written: u64,
    /// Those known to be done: completions come in order, and the last speaks for all.
    pub(super) done: u64,
    /// The last that asks for a completion.
    pub(super) signaled: u64,
    /// A completion is asked for at least once in this number of work requests.
    interval: u64,
    /// Bytes written since then, and the most that were written from one that asks for a completion to the next, since the
    /// last time that nothing was under way.
    bytes: u64,
    most_bytes: u64,
}

// SAFETY: the pointers in the requests point into the vectors beside them, and
// are made anew before each post.
unsafe impl Send for Chain {}

impl Chain {
    /// For a queue pair that carries `inline` bytes in a work request. `echo`: for a device whose WRITEs complete before the
    /// peer has them.
    pub(super) fn new(inline: u32, interval: u64, echo: Option<Echo>) -> Self {
        Chain {
            // The READ comes on top.
            requests: Vec::with_capacity(CHAIN + 1),
            sources: Vec::with_capacity(CHAIN + 1),
            inline,
            echo,
            asks: false,
            written: 0,
            done: 0,
            signaled: 0,
            interval,
            bytes: 0,
            most_bytes: 0,
        }
    }

    /// Asks for a completion of every work request from now on.
    pub(super) fn signal_all(&mut self) {
        self.interval = 1;
    }

    /// Whether a READ, and not the completion of a WRITE, tells that a WRITE is there.
    pub(super) fn asks_by_echo(&self) -> bool {
        self.echo.is_some()
    }

    /// Whether the device has a copy of this many bytes of the link's own memory once they are posted, so that their source may change.
    pub(super) fn copies(&self, bytes: usize) -> bool {
        bytes <= self.inline as usize
    }

    /// True if `n` more fit before the chain must be posted.
    pub(super) fn has_room(&self, n: usize) -> bool {
        self.requests.len() + n <= CHAIN
    }

    /// An RDMA WRITE. `signal` asks for a completion, which otherwise is asked for
    /// now and then.
    #[inline]
    pub(super) fn write(&mut self, from: Sge, to: Remote, imm: Option<u32>, signal: bool) {
        assert!(self.requests.len() < CHAIN, "the chain is posted before it is full");
        self.written += 1;
        // SAFETY: plain data, for which zeroes are "nothing".
        let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.written;
        wr.num_sge = 1;
        wr.opcode = match imm {
            Some(_) => sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            None => sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        };
        wr.__bindgen_anon_1.imm_data = imm.unwrap_or(0).to_be();
        if from.own && from.bytes <= self.inline {
            wr.send_flags |= sys::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        self.bytes += from.bytes as u64;
        if signal || self.written - self.signaled >= self.interval || self.bytes >= BYTES {
            if self.echo.is_some() {
                self.asks = true;
            } else {
                wr.send_flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
                self.asked();
            }
        }
        wr.wr.rdma.remote_addr = to.address;
        wr.wr.rdma.rkey = to.key;
        self.requests.push(wr);
        self.sources.push(sys::ibv_sge { addr: from.address, length: from.bytes, lkey: from.key });
    }

    /// A completion of all that was written so far is asked for.
    #[inline]
    fn asked(&mut self) {
        (self.signaled, self.most_bytes) = (self.written, self.most_bytes.max(self.bytes));
        self.bytes = 0;
    }

    /// Ends the chain with the READ that tells that all before it is there, if a completion is asked for.
    fn end_with_echo(&mut self) {
        let Some(echo) = self.echo.filter(|_| std::mem::take(&mut self.asks)) else { return };
        // SAFETY: plain data, for which zeroes are "nothing".
        let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.written;
        wr.num_sge = 1;
        wr.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
        wr.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (echo.from.address, echo.from.key);
        self.requests.push(wr);
        let Sge { address, bytes, key, .. } = echo.into;
        self.sources.push(sys::ibv_sge { addr: address, length: bytes, lkey: key });
        self.asked();
    }

    /// What is under way, for a look at the path.
    pub(super) fn under_way(&mut self) -> UnderWay {
        if self.done == self.written {
            self.most_bytes = 0;
        }
        let bytes = self.most_bytes.max(self.bytes);
        UnderWay { written: self.written, done: self.done, signaled: self.signaled, bytes }
    }

    /// Drops what was written and not posted: the queue pair is in an error state.
    pub(super) fn forget(&mut self) {
        self.requests.clear();
        self.sources.clear();
        self.asks = false;
    }

    /// Posts what was written.
    ///
    /// # Safety
    /// The sources are registered with the queue pair's domain, stay so until they
    /// are done, and do not change before.
    #[inline]
    pub(super) unsafe fn post(&mut self, rc: &Rc) -> std::io::Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        self.end_with_echo();
        let (requests, sources) = (self.requests.as_mut_ptr(), self.sources.as_mut_ptr());
        for i in 0..self.requests.len() {
            // SAFETY: `i` and, where it is used, `i + 1` lie in the vectors, which do not
            // move before the call below is over.
            unsafe {
                let last = i + 1 == self.requests.len();
                (*requests.add(i)).sg_list = sources.add(i);
                (*requests.add(i)).next = if last { std::ptr::null_mut() } else { requests.add(i + 1) };
            }
        }
        // SAFETY: the chain was linked above; the rest is the caller's promise.
        let posted = unsafe { rc.post_send(requests) };
        self.requests.clear();
        self.sources.clear();
        posted
    }
}
