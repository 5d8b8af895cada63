//! A connection in use: NCCL's sendComm or recvComm, its registrations, its requests.
//!
//! NCCL lets one thread post and test on a connection, while another registers and
//! deregisters. The first has the state of the connection to itself (`Exclusive`), the
//! second only asks the engine.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_proxy::engine::{EngineError, QpId};
use pushgate_proxy::producer::{Producer, Received};
use pushgate_proxy::proxy::Proxy;
use pushgate_proxy::qp::RegionSends;
use pushgate_proxy::qp::verbs::Flusher;
use pushgate_proxy::region::RegionMemory;
use pushgate_proxy::session::Status;

use crate::error::{Code, Failure, Result};
use crate::exclusive::Exclusive;
use crate::ffi::types::MAX_RECVS;
use crate::gpu;
use crate::join::{Joined, RECEIVES_LOG, Registered, Role, SLOTS_LOG};
use crate::large::{self, Incoming, Invitation, Outgoing};
use crate::log;
use crate::path::{self, Path};
use crate::plugin::{Lane, Runtime};
use crate::pushes::{self, Pushes};
use crate::reach;
use crate::socket::Stream;
use crate::watch::{self, Peer};

/// Requests of a connection: NCCL's 32 for each buffer of a receive.
const REQUESTS: usize = 32 * MAX_RECVS;

/// How long a connection that is closed waits for the GPU.
const SETTLE: Duration = Duration::from_secs(2);

/// A registration, as NCCL holds it.
#[derive(Clone, Copy, Debug)]
pub struct Mr {
    pub key: u32,
    pub address: usize,
    pub bytes: usize,
    /// Memory of the lane's GPU.
    pub cuda: bool,
    /// ... which its worker pushes: the engine knows nothing of it, and `key` nothing.
    pub pushed: bool,
}

/// What is registered.
#[derive(Clone, Copy)]
pub enum Kind<'a> {
    Host,
    /// Memory of the lane's GPU, with a dma-buf and the place in it if NCCL has one.
    Cuda(Option<(BorrowedFd<'a>, u64)>),
}

impl Mr {
    /// Where `size` bytes at `data` lie in it.
    pub fn offset(&self, data: usize, size: usize) -> Result<u64> {
        let offset = data.checked_sub(self.address).filter(|o| *o <= self.bytes && size <= self.bytes - o);
        offset.map(|o| o as u64).ok_or_else(|| {
            let text = format!(
                "{size} bytes at {data:#x} leave their registration of {} bytes at {:#x}",
                self.bytes, self.address
            );
            Failure::new(Code::Usage, text)
        })
    }
}

/// One buffer of a receive.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    pub data: usize,
    pub size: usize,
    pub tag: u32,
    pub mr: Option<&'a Mr>,
}

/// What NCCL tests: its place in its connection. All else is the connection's.
pub struct Request {
    comm: *const Comm,
    index: u32,
}

// SAFETY: the pointer is used by `test` alone, whose caller vouches for it.
unsafe impl Send for Request {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Request {}

/// See the module's text.
pub struct Comm {
    link: Link,
    side: Side,
    requests: Box<[Request]>,
}

enum Side {
    Send(Box<Exclusive<Sender>>),
    Receive(Box<Exclusive<Receiver>>),
}

/// What both sides have.
struct Link {
    role: Role,
    qp: QpId,
    peer: Arc<Peer>,
    stream: Arc<Stream>,
    watched: u64,
    /// A region for receives of nothing that name none, on a receiving end.
    nothing: u32,
    lane: Arc<Lane>,
    /// The RDMA device is used on the GPU's memory.
    reaches: bool,
    pushes: pushes::Counts,
    /// What the lane's GPU sees of this connection's memory; goes when the engine has let go.
    registrations: Vec<Registered>,
    runtime: Arc<Runtime>,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.role == Role::Send { "sending" } else { "receiving" };
        write!(f, "{end} end of connection {}", self.qp.0)
    }
}

/// What a receive of nothing names. Not of 0 bytes, which RDMA devices do not register;
/// an atomic, for a peer that breaks the rules could write there.
static NOTHING: AtomicU64 = AtomicU64::new(0);

impl Comm {
    /// A connection of a queue pair that was joined; `stream` says when the peer goes.
    pub fn new(runtime: Arc<Runtime>, joined: Joined, stream: Stream, role: Role) -> Result<Box<Comm>> {
        let (stream, peer) = (Arc::new(stream), Arc::new(Peer::default()));
        let Joined {
            qp,
            producer,
            geometry,
            lane,
            window,
            regions,
            in_record,
            reaches,
            flusher,
            registrations,
        } = joined;
        // From here on its drop takes the queue pair out again.
        let mut link = Link {
            role,
            qp,
            peer: peer.clone(),
            stream: stream.clone(),
            watched: u64::MAX,
            nothing: 0,
            lane,
            reaches,
            pushes: pushes::Counts::default(),
            registrations,
            runtime,
        };
        if link.lane.gpu.as_ref().is_some_and(|gpu| gpu.copies()) {
            gpu::warn_of_one_queue();
        }
        if role == Role::Receive {
            let memory = RegionMemory::Host { address: &raw const NOTHING as usize, keep: None };
            // SAFETY: a static atomic, which others may write.
            link.nothing = unsafe { link.lane.engine.add_region(qp, memory, 8)? };
        }
        link.watched = link.runtime.watch.add(stream, peer, &link.lane.engine, qp)?;
        let side = match role {
            Role::Send => {
                let whole = (abi::PUSHGATE_UNIT as usize) << geometry.window_log >> 1;
                Side::Send(Box::new(Exclusive::new(Sender::new(producer, whole, window, regions, in_record))))
            }
            Role::Receive => Side::Receive(Box::new(Exclusive::new(Receiver::new(producer, flusher)))),
        };
        let mut comm = Box::new(Comm { link, side, requests: Box::default() });
        let at: *const Comm = &*comm;
        comm.requests = (0..REQUESTS as u32).map(|index| Request { comm: at, index }).collect();
        Ok(comm)
    }

    /// Registers memory of the host or of the GPU. From any thread, at any time; calls no CUDA.
    pub fn register(&self, address: usize, bytes: usize, kind: Kind<'_>) -> Result<Mr> {
        let cuda = matches!(kind, Kind::Cuda(_));
        if cuda && self.link.lane.gpu.is_none() {
            let text = format!("{}: GPU memory, but this connection was made for none", self.link);
            return Err(Failure::new(Code::Usage, text));
        }
        let memory = match (kind, self.link.role) {
            (Kind::Host, _) => RegionMemory::Host { address, keep: None },
            (Kind::Cuda(dma_buf), _) if self.link.reaches => {
                let exported = Some(reach::exported(dma_buf)?);
                RegionMemory::Device { address: address as u64, exported }
            }
            // The worker pushes it, by its address.
            (Kind::Cuda(_), Role::Send) => return Ok(Mr { key: 0, address, bytes, cuda, pushed: true }),
            // It pulls what has arrived in host memory.
            (Kind::Cuda(_), Role::Receive) => {
                RegionMemory::Device { address: address as u64, exported: None }
            }
        };
        let failed = |why: &dyn fmt::Display| {
            let text = format!("{}: registering {bytes} bytes at {address:#x}: {why}", self.link);
            Failure::new(Code::System, text)
        };
        let engine = &self.link.lane.engine;
        // SAFETY: NCCL keeps registered memory mapped until `deregister`, which waits for
        // copies under way, or until the connection is closed, which takes the queue pair
        // out. It is C's memory, of which nobody has a Rust reference. The rings' orderings
        // keep the engine's accesses apart from NCCL's: it posts before and tests after.
        // A dma-buf is NCCL's of this memory.
        let key = unsafe { engine.add_region(self.link.qp, memory, bytes as u64) }.map_err(|e| failed(&e))?;
        // NCCL was told of what the RDMA device does with such memory: no other way then.
        if cuda && self.link.reaches && !engine.is_offered(self.link.qp, key)? {
            engine.remove_region(self.link.qp, key)?;
            let how = match kind {
                Kind::Cuda(Some(_)) => "by the dma-buf that NCCL gave",
                _ => "by its address, for NCCL gave no dma-buf (NCCL_DMABUF_ENABLE?)",
            };
            return Err(failed(&format!(
                "the RDMA device does not take that memory {how}; set PUSHGATE_PATH=push and PUSHGATE_LANDING=host \
                 to do without"
            )));
        }
        Ok(Mr { key, address, bytes, cuda, pushed: false })
    }

    /// The reverse. Posted receives into it that a message meets later end the connection.
    pub fn deregister(&self, mr: Mr) -> Result<()> {
        if let (true, Side::Send(sender)) = (mr.pushed, &self.side) {
            return self.pushes_end(sender);
        }
        if self.link.lane.engine.remove_region(self.link.qp, mr.key)? {
            return Ok(());
        }
        let text = format!(
            "{}: {} bytes at {:#x} are not registered there, or a message still goes out of them or comes into them",
            self.link, mr.bytes, mr.address
        );
        Err(Failure::new(Code::Usage, text))
    }

    /// Waits until the GPU has read what it was told to push before, or reads no more.
    fn pushes_end(&self, sender: &Exclusive<Sender>) -> Result<()> {
        let told = self.link.pushes.told();
        let began = Instant::now();
        while self.link.pushes.done() < told && !self.link.gpu_has_ended() {
            if began.elapsed() > SETTLE {
                let text = format!("{}: the GPU still reads memory that is deregistered", self.link);
                return Err(Failure::new(Code::System, text));
            }
            if began.elapsed() > SETTLE / 10 {
                // Maybe nobody tests any more, as behind an abort: look for ourselves.
                sender.visit(|s| s.advance_pushes(&self.link));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Sends; `None`: no room now, try again.
    ///
    /// # Safety
    /// The `size` bytes at `data` can be read until the request is done.
    #[inline]
    pub unsafe fn send(
        &self,
        data: *const u8,
        size: usize,
        tag: u32,
        mr: Option<&Mr>,
    ) -> Result<Option<&Request>> {
        let Side::Send(sender) = &self.side else { return Err(self.wrong_side("isend")) };
        // SAFETY: the caller's.
        let request = sender.enter(|s| unsafe { s.send(&self.link, data, size, tag, mr) });
        let request = request.ok_or_else(|| self.two_threads())??;
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    /// Posts a receive of one to eight buffers; `None`: no room now, try again.
    ///
    /// # Safety
    /// The buffers can be written until the request is done.
    #[inline]
    pub unsafe fn receive(&self, wanted: &[Wanted<'_>]) -> Result<Option<&Request>> {
        let Side::Receive(receiver) = &self.side else { return Err(self.wrong_side("irecv")) };
        let request = receiver.enter(|r| r.receive(&self.link, wanted));
        let request = request.ok_or_else(|| self.two_threads())??;
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    /// Begins to make complete what RDMA has written into the GPU's memory; `None`: nothing
    /// has to be waited for.
    pub fn flush<'a>(
        &self,
        flushed: impl Iterator<Item = (usize, Option<&'a Mr>)>,
    ) -> Result<Option<&Request>> {
        let Side::Receive(receiver) = &self.side else { return Err(self.wrong_side("iflush")) };
        let any = flushed.into_iter().any(|(size, mr)| size > 0 && mr.is_some_and(|mr| mr.cuda));
        let request = receiver.enter(|r| if any { r.flush() } else { Ok(None) });
        let request = request.ok_or_else(|| self.two_threads())??;
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    #[cold]
    fn wrong_side(&self, call: &str) -> Failure {
        Failure::new(Code::Argument, format!("{call} on the {}", self.link))
    }

    #[cold]
    fn two_threads(&self) -> Failure {
        let text =
            format!("{}: two threads post or test at once, or one of them has failed there", self.link);
        Failure::new(Code::Usage, text)
    }

    /// Closes in order. Requests that are not done are dropped with it.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for Comm {
    /// Waits for what the GPU still pushes: then the window may go.
    fn drop(&mut self) {
        let Side::Send(sender) = &self.side else { return };
        let settled = sender.enter(|s| s.settle(&self.link)).unwrap_or(false);
        if !settled {
            log::warn(&format!("{}: the GPU still pushes into its window, which stays", self.link));
            std::mem::forget(std::mem::take(&mut self.link.registrations));
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.runtime.watch.remove(self.watched);
        // Of an engine that is gone nothing needs to be taken out.
        let counters = match self.lane.engine.remove_qp(self.qp) {
            Err(EngineError::Unsettled(counters)) => {
                log::warn(&format!("{self}: the GPU still pulls out of the peer's window, which stays"));
                std::mem::forget(std::mem::take(&mut self.registrations));
                *counters
            }
            other => other.unwrap_or_default(),
        };
        watch::say_goodbye(&self.stream, counters.delivered);
        self.stream.shutdown();
    }
}

impl Link {
    /// An error if the lane's GPU copies no more. The peer hears of it too, and what waits there ends.
    #[inline]
    fn gpu_lives(&self) -> Result<()> {
        match self.lane.gpu.as_ref().and_then(|gpu| gpu.lost()) {
            None => Ok(()),
            Some(lost) => Err(self.gpu_is_lost(&lost.reason)),
        }
    }

    #[cold]
    fn gpu_is_lost(&self, reason: &str) -> Failure {
        // An engine that is gone has ended it already.
        let _ = self.lane.engine.fail(Some(self.qp), Status::new(abi::PUSHGATE_ABORTED));
        let text = format!("{self}: the GPU's copying kernel is lost: {reason}");
        Failure::new(Code::System, text)
    }

    /// Nothing of ours runs on the GPU any more, or ever will.
    fn gpu_has_ended(&self) -> bool {
        self.lane.gpu.as_ref().and_then(|gpu| gpu.lost()).is_some_and(|lost| lost.ended)
    }

    /// What a request that is not done has come to: it waits, or never will be done. `status` is
    /// the queue pair's.
    #[inline]
    fn waits(&self, status: Option<Status>) -> Result<bool> {
        // It says the cause.
        self.gpu_lives()?;
        match status {
            None => Ok(false),
            Some(status) => Err(Failure::ended(status, self)),
        }
    }
}

impl Request {
    /// True when it is done; `size` is told the bytes of each buffer. From then on it may
    /// be another's.
    ///
    /// # Safety
    /// Its connection is not closed.
    #[inline]
    pub unsafe fn test(&self, size: impl Fn(usize, usize)) -> Result<bool> {
        // SAFETY: a connection does not move, and the caller says that it is there.
        let comm = unsafe { &*self.comm };
        let done = match &comm.side {
            Side::Send(s) => s.enter(|s| s.test(&comm.link, self.index, size)),
            Side::Receive(r) => r.enter(|r| r.test(&comm.link, self.index, size)),
        };
        done.ok_or_else(|| comm.two_threads())?
    }
}

/// Fixed places for requests.
struct Pool<T> {
    slots: Box<[Option<T>]>,
    free: Vec<u32>,
}

impl<T> Pool<T> {
    fn new() -> Self {
        let n = REQUESTS as u32;
        Pool { slots: (0..n).map(|_| None).collect(), free: (0..n).rev().collect() }
    }

    fn free(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Fills the place that `free` named.
    fn fill(&mut self, value: T) {
        let i = self.free.pop().expect("`free` named it");
        self.slots[i as usize] = Some(value);
    }

    fn empty(&mut self, i: u32) {
        self.slots[i as usize] = None;
        self.free.push(i);
    }

    fn get(&mut self, i: u32) -> Result<&mut T> {
        self.slots[i as usize].as_mut().ok_or_else(|| {
            Failure::new(Code::Argument, "test of a request that is done already, or was never handed out")
        })
    }
}

// -------------------------------------------------------------------- sending

struct Sent {
    size: usize,
    /// Its last slot, and how many messages of the connection came before it; `None`
    /// while slices of it are still to be posted.
    last: Option<(u64, u64)>,
}

/// Whether messages may go out of registered regions. A peer tells only when it has
/// tried, so the engine is asked again behind a message that arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Regions {
    Known(bool),
    /// Asked again when so many messages have been sent.
    Unknown(u64),
}

struct Sender {
    producer: Producer,
    pushes: Pushes,
    in_record: bool,
    regions: Regions,
    /// What goes through the window at once: half of it, so that there is always a place
    /// for it when the other half is given back.
    whole: usize,
    pool: Pool<Sent>,
    messages: u64,
    sends: u64,
    sums: large::Sums,
    large: Option<Outgoing>,
}

impl Sender {
    /// `window`: where the GPU sees it. `regions`: whether messages may go out of registered
    /// memory, if that is known. `in_record`: short payload may go in its record.
    fn new(
        producer: Producer,
        whole: usize,
        window: Option<u64>,
        regions: Option<bool>,
        in_record: bool,
    ) -> Self {
        let regions = regions.map_or(Regions::Unknown(0), Regions::Known);
        // One for each slot at most.
        let pushes = Pushes::new(window, 1 << SLOTS_LOG);
        let (pool, sums) = (Pool::new(), large::Sums::default());
        Sender { producer, pushes, regions, in_record, whole, pool, messages: 0, sends: 0, sums, large: None }
    }

    /// False if the GPU does not come to an end with its pushes.
    fn settle(&mut self, link: &Link) -> bool {
        let began = Instant::now();
        loop {
            self.advance_pushes(link);
            if self.pushes.is_empty() || link.gpu_has_ended() {
                return true;
            }
            if began.elapsed() > SETTLE {
                return false;
            }
            std::thread::yield_now();
        }
    }

    #[inline]
    fn advance_pushes(&mut self, link: &Link) {
        self.pushes.advance(link.lane.gpu.as_deref(), &link.pushes, &mut self.producer);
    }

    /// # Safety
    /// As [`Comm::send`].
    unsafe fn send(
        &mut self,
        link: &Link,
        data: *const u8,
        size: usize,
        tag: u32,
        mr: Option<&Mr>,
    ) -> Result<Option<u32>> {
        self.advance_pushes(link);
        self.advance_large(link)?;
        link.waits(self.producer.status())?;
        let ways = path::Ways {
            regions: self.regions == Regions::Known(true),
            in_record: self.in_record,
            whole: self.whole,
        };
        let path = path::choose(data as usize, size, mr, ways)?;
        let Some(request) = self.pool.free() else { return Ok(None) };
        // The first SEND of one that goes in slices must be the next.
        if self.large.as_ref().is_some_and(|l| path == Path::Slices || l.begins()) {
            return Ok(None);
        }
        let record = Record { tag, ..Record::new(Opcode::Send) };
        let record = match path {
            Path::Inline => Record { flags: Record::INLINE, ..record },
            Path::Push | Path::Worker => record,
            Path::Region { key, offset } => {
                Record { flags: Record::REGION, place: key, place_offset: offset, ..record }
            }
            Path::Slices => {
                let gpu = mr.is_some_and(|mr| mr.cuda);
                self.large = Some(Outgoing::new(request, data, size, tag, gpu, self.whole));
                self.pool.fill(Sent { size, last: None });
                self.advance_large(link)?;
                return Ok(Some(request));
            }
        };
        let slot = match path {
            // SAFETY: the caller's.
            Path::Worker => unsafe {
                self.pushes.push(
                    link.lane.gpu.as_deref(),
                    &link.pushes,
                    &mut self.producer,
                    record,
                    (data, size),
                )?
            },
            // SAFETY: the caller's.
            _ => unsafe { self.producer.post_raw(record, data, size) },
        };
        let Some(slot) = slot else { return Ok(None) };
        self.pool.fill(Sent { size, last: Some((slot, self.messages)) });
        self.messages += 1;
        self.sends += 1;
        Ok(Some(request))
    }

    #[cold]
    fn ask(&mut self, link: &Link) -> Result<()> {
        let proxy: &dyn Proxy = &*link.lane.engine;
        self.regions = match proxy.region_sends(link.qp)? {
            RegionSends::Yes => Regions::Known(true),
            RegionSends::Unknown => Regions::Unknown(2 * self.messages + 1),
            RegionSends::No(why) => {
                log::info(&format!("{link}: messages are copied into the window: {why}"));
                Regions::Known(false)
            }
        };
        Ok(())
    }

    fn advance_large(&mut self, link: &Link) -> Result<()> {
        let Some(large) = &mut self.large else { return Ok(()) };
        if let Some(r) = self.producer.try_recv() {
            self.producer.release(1);
            self.producer.wake();
            let fits = r.flags & Record::INLINE != 0 && r.length as usize == Invitation::BYTES;
            if !fits || !large.invited(Invitation::decode(&r.inline)) {
                return Err(Failure::new(
                    Code::Remote,
                    format!("{link}: the receiver sent what nobody asked for"),
                ));
            }
        }
        let before = self.sends;
        let (messages, sends) = (&mut self.messages, &mut self.sends);
        let posted = |send: bool| {
            *messages += 1;
            *sends += send as u64;
        };
        let (pushes, gpu) = (&mut self.pushes, large.gpu);
        let slice = |producer: &mut Producer, record, data, size| match gpu {
            // SAFETY: a slice of what `Comm::send` was told, whose request is not done.
            true => unsafe {
                pushes.push(link.lane.gpu.as_deref(), &link.pushes, producer, record, (data, size))
            },
            // SAFETY: as above.
            false => Ok(unsafe { producer.post_raw(record, data, size) }),
        };
        if let Some(slot) = large.advance(&mut self.producer, &mut self.sums, before, slice, posted)? {
            let request = large.request;
            self.large = None;
            self.pool.get(request)?.last = Some((slot, self.messages - 1));
        }
        Ok(())
    }

    #[inline]
    fn test(&mut self, link: &Link, request: u32, size: impl Fn(usize, usize)) -> Result<bool> {
        if !self.pushes.is_empty() {
            self.advance_pushes(link);
        }
        if self.large.is_some() {
            self.advance_large(link)?;
        }
        let sent = self.pool.get(request)?;
        // Before the slots that were given back: then these are not older.
        let status = self.producer.status();
        if let Some((slot, number)) = sent.last
            && (self.producer.retired() > slot || link.peer.received() > number)
        {
            size(0, sent.size);
            self.pool.empty(request);
            if matches!(self.regions, Regions::Unknown(at) if self.messages >= at) {
                self.ask(link)?;
            }
            return Ok(true);
        }
        link.waits(status)
    }
}

// ------------------------------------------------------------------ receiving

/// A buffer that was posted.
struct Posted {
    request: u32,
    buffer: u8,
    key: u32,
    offset: u64,
    size: usize,
    /// A message met it.
    met: bool,
}

/// What NCCL waits for on a receiving end.
enum Awaited {
    Receive(Receiving),
    /// The number of a flush.
    Flush(u64),
}

struct Receiving {
    buffers: u8,
    left: u8,
    sizes: [usize; MAX_RECVS],
}

struct Receiver {
    producer: Producer,
    /// What the RDMA device wrote into the GPU's memory is complete behind it.
    flusher: Option<Flusher>,
    pool: Pool<Awaited>,
    /// In the order in which they were posted, from the oldest that no message met.
    posted: VecDeque<Posted>,
    /// Its number.
    oldest: u64,
    /// SENDs that arrived.
    arrived: u64,
    large: Option<Incoming>,
    large_bytes: u64,
    large_messages: u64,
}

impl Receiver {
    fn new(producer: Producer, flusher: Option<Flusher>) -> Self {
        Receiver {
            producer,
            flusher,
            pool: Pool::new(),
            posted: VecDeque::with_capacity(1 << RECEIVES_LOG),
            oldest: 0,
            arrived: 0,
            large: None,
            large_bytes: 0,
            large_messages: 0,
        }
    }

    fn receive(&mut self, link: &Link, wanted: &[Wanted<'_>]) -> Result<Option<u32>> {
        link.waits(self.producer.status())?;
        let Some(request) = self.pool.free() else { return Ok(None) };
        if self.posted.len() + wanted.len() > 1 << RECEIVES_LOG {
            return Ok(None);
        }
        // All or none is posted: so first what may be wrong with any.
        let mut places = [(0, 0); MAX_RECVS];
        for (w, place) in wanted.iter().zip(&mut places) {
            *place = match w.mr {
                Some(mr) => (mr.key, mr.offset(w.data, w.size)?),
                None if w.size == 0 => (link.nothing, 0),
                None => {
                    let text = format!("{link}: a receive of {} bytes without registration", w.size);
                    return Err(Failure::new(Code::Usage, text));
                }
            };
        }
        for (i, (w, (key, offset))) in wanted.iter().zip(places).enumerate() {
            // No message is longer.
            let size = w.size.min(crate::props::MAX_BYTES);
            assert!(self.producer.post_recv(key, offset, size as u32, w.tag), "room was counted");
            self.posted.push_back(Posted { request, buffer: i as u8, key, offset, size, met: false });
        }
        self.producer.wake();
        let n = wanted.len() as u8;
        self.pool.fill(Awaited::Receive(Receiving { buffers: n, left: n, sizes: [0; MAX_RECVS] }));
        Ok(Some(request))
    }

    /// Takes in what arrived.
    fn progress(&mut self, link: &Link) -> Result<()> {
        let mut any = false;
        while let Some(r) = self.producer.try_recv() {
            any = true;
            // The payload is in its buffer: the record holds nothing.
            self.producer.release(1);
            self.arrive(link, &r)?;
        }
        if any {
            self.producer.wake();
        }
        if self.large.is_some() {
            self.advance_large()?;
        }
        Ok(())
    }

    fn arrive(&mut self, link: &Link, r: &Received) -> Result<()> {
        self.arrived += 1;
        // The engine says which receive it took, by the low 32 bits of its number.
        let at = r.place.wrapping_sub(self.oldest as u32) as usize;
        let Some(p) = self.posted.get_mut(at).filter(|p| !p.met) else {
            let text =
                format!("{link}: a message of tag {} for receive {}, which is not posted", r.tag, r.place);
            return Err(Failure::new(Code::Internal, text));
        };
        p.met = true;
        let (request, buffer, room) = (p.request, p.buffer, p.size);
        let rest = Invitation { key: p.key, offset: p.offset + r.length as u64 };
        if self.producer.signal(large::BEGINS) == self.arrived {
            // One at a time: the last one is complete, though nobody may have looked since.
            self.advance_large()?;
            let bytes = self.producer.signal(large::BYTES);
            // The peer's word: no sum that is less than the last, and the last message has ended.
            let size = bytes.wrapping_sub(self.large_bytes) as usize;
            self.large_bytes = bytes;
            self.large_messages += 1;
            let ended = self.large.is_none();
            if size > room || !ended {
                let text = match ended {
                    true => format!("{link}: {size} bytes arrived for a buffer of {room}"),
                    false => format!("{link}: a message in slices arrived amid another"),
                };
                let status = Status { rank: Some(0), ..Status::new(abi::PUSHGATE_REFUSED) };
                link.lane.engine.fail(Some(link.qp), status)?;
                return Err(Failure::new(Code::Usage, text));
            }
            let number = self.large_messages;
            self.large = Some(Incoming { request, buffer, size, invitation: Some(rest), number });
        } else {
            self.arrived_whole(request, buffer, r.length as usize)?;
        }
        while self.posted.front().is_some_and(|p| p.met) {
            self.posted.pop_front();
            self.oldest += 1;
        }
        Ok(())
    }

    fn arrived_whole(&mut self, request: u32, buffer: u8, size: usize) -> Result<()> {
        let Awaited::Receive(receiving) = self.pool.get(request)? else {
            unreachable!("a place is a receive's until that is done")
        };
        receiving.left -= 1;
        receiving.sizes[buffer as usize] = size;
        Ok(())
    }

    /// What the worker has pulled is complete when the receive is; what the RDMA device wrote
    /// may be on its way yet. (A message that took the other way there costs a read too many.)
    fn flush(&mut self) -> Result<Option<u32>> {
        let Some(flusher) = &mut self.flusher else { return Ok(None) };
        let Some(request) = self.pool.free() else {
            let text = format!("more than {REQUESTS} receives and flushes at once on a connection");
            return Err(Failure::new(Code::Usage, text));
        };
        self.pool.fill(Awaited::Flush(flusher.begin()?));
        Ok(Some(request))
    }

    fn advance_large(&mut self) -> Result<()> {
        let Some(large) = &mut self.large else { return Ok(()) };
        if let Some(invitation) = large.invitation {
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            if self.producer.post(record, &invitation.encode()) {
                large.invitation = None;
            }
        }
        if self.producer.signal(large::ENDS) >= large.number {
            let Incoming { request, buffer, size, .. } = *large;
            self.large = None;
            self.arrived_whole(request, buffer, size)?;
        }
        Ok(())
    }

    #[inline]
    fn test(&mut self, link: &Link, request: u32, size: impl Fn(usize, usize)) -> Result<bool> {
        // Before what arrived: then that is not older.
        let status = self.producer.status();
        self.progress(link)?;
        let receiving = match self.pool.get(request)? {
            Awaited::Receive(receiving) => receiving,
            Awaited::Flush(number) => {
                let flusher = self.flusher.as_mut().expect("it began this one");
                let done = flusher.done(*number)?;
                if done {
                    self.pool.empty(request);
                } else {
                    // Not by the queue pair's end: what has arrived is complete without a peer.
                    link.gpu_lives()?;
                }
                return Ok(done);
            }
        };
        if receiving.left == 0 {
            for i in 0..receiving.buffers as usize {
                size(i, receiving.sizes[i]);
            }
            self.pool.empty(request);
            return Ok(true);
        }
        link.waits(status)
    }
}
