//! A connection in use: NCCL's sendComm or recvComm, its registrations, its requests. What each
//! end does with messages is in `send` and `receive`.
//!
//! NCCL lets one thread post and test on a connection, while another registers and
//! deregisters. The first has the state of the connection to itself (`Exclusive`), the
//! second only asks the engine.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_proxy::engine::{EngineError, QpId};
use pushgate_proxy::region::RegionMemory;
use pushgate_proxy::session::Status;

use crate::error::{Code, Failure, Result};
use crate::exclusive::{Exclusive, Refused};
use crate::ffi::types::MAX_RECVS;
use crate::gpu;
use crate::join::{Joined, Registered, Role};
use crate::log;
use crate::plugin::{Lane, Runtime};
use crate::pushes;
use crate::reach;
use crate::receive::Receiver;
use crate::send::Sender;
use crate::socket::Stream;
use crate::watch::{self, Peer};

/// Requests of a connection: NCCL's 32 for each buffer of a receive.
pub const REQUESTS: usize = 32 * MAX_RECVS;

/// How long a connection that is closed waits for the GPU.
pub const SETTLE: Duration = Duration::from_secs(2);

/// How long a deregistration tries to look at the requests between posts and tests, each of which takes
/// microseconds, on a machine that may not run their thread for a while.
const VISIT: Duration = Duration::from_secs(5);

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
pub struct Link {
    role: Role,
    pub qp: QpId,
    pub peer: Arc<Peer>,
    stream: Arc<Stream>,
    watched: u64,
    /// A region for receives of nothing that name none, on a receiving end.
    pub nothing: u32,
    pub lane: Arc<Lane>,
    /// The RDMA device is used on the GPU's memory.
    reaches: bool,
    pub pushes: pushes::Counts,
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
            longest,
            reaches,
            flusher,
            receives,
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
                let Some(receives) = receives else {
                    let text = "the receiving end does not show its receives: load the same build on both";
                    return Err(Failure::new(Code::Remote, text));
                };
                let sender = Sender::new(producer, receives, (whole, longest), window, regions, in_record);
                Side::Send(Box::new(Exclusive::new(sender)))
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
        if cuda && self.link.reaches && !engine.is_registered(self.link.qp, key)? {
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

    /// Deregisters memory. If a receive into the memory has no message yet, or slices of a message out of it are
    /// still to be posted, the connection ends before; posts and tests of another thread wait for a moment.
    pub fn deregister(&self, mr: Mr) -> Result<()> {
        if self.stop(&mr)? {
            self.link.lane.engine.fail(Some(self.link.qp), Status::new(abi::PUSHGATE_ABORTED))?;
            self.ended_by_deregistration();
        }
        if let (true, Side::Send(sender)) = (mr.pushed, &self.side) {
            return self.pushes_end(sender);
        }
        let engine = &self.link.lane.engine;
        if engine.remove_region(self.link.qp, mr.key)? {
            return Ok(());
        }
        // A message still goes out of it, to a peer that has stopped. An error here would have NCCL, which frees
        // a communicator then, leave all that it has not freed yet: so the message ends, with its connection.
        engine.fail(Some(self.link.qp), Status::new(abi::PUSHGATE_ABORTED))?;
        if engine.remove_region(self.link.qp, mr.key)? {
            self.ended_by_deregistration();
            return Ok(());
        }
        let text = format!(
            "{}: {} bytes at {:#x} are not registered there, or a message still comes into them",
            self.link, mr.bytes, mr.address
        );
        Err(Failure::new(Code::Usage, text))
    }

    /// Whether requests that are not done need the memory, of which the engine does not know yet. A message in
    /// slices out of the memory is stopped with that look: no thread that tests reads on behind the look.
    pub fn stop(&self, mr: &Mr) -> Result<bool> {
        let began = Instant::now();
        loop {
            let needed = match &self.side {
                Side::Send(sender) => sender.visit(|s| s.stop(mr)),
                Side::Receive(receiver) => receiver.visit(|r| r.needs(mr)),
            };
            match needed {
                Ok(needed) => return Ok(needed),
                // Nobody gets in any more, and nobody posts or reads.
                Err(Refused::Poisoned) => return Ok(false),
                Err(Refused::Busy) if began.elapsed() > VISIT => {
                    let text = format!(
                        "{}: {} bytes at {:#x} stay registered: another thread was in each post or test for {VISIT:?}; \
                         try again, or close the connection",
                        self.link, mr.bytes, mr.address
                    );
                    return Err(Failure::new(Code::System, text));
                }
                Err(Refused::Busy) => std::thread::yield_now(),
            }
        }
    }

    #[cold]
    fn ended_by_deregistration(&self) {
        log::info(&format!("{}: ended, for memory was deregistered that a request still needs", self.link));
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
                let _ = sender.visit(|s| s.advance_pushes(&self.link));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Sends; `None`: no room now, or no receive of that tag is posted; try again. Of a connection that has ended
    /// the test of the request says how.
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

    /// Posts a receive of one to eight buffers; `None`: no room now, try again. Of a connection that has ended
    /// the test of the request says how.
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
    pub fn gpu_lives(&self) -> Result<()> {
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
    pub fn gpu_has_ended(&self) -> bool {
        self.lane.gpu.as_ref().and_then(|gpu| gpu.lost()).is_some_and(|lost| lost.ended)
    }

    /// What a request that is not done has come to: it waits, or never will be done. `status` is
    /// the queue pair's.
    #[inline]
    pub fn waits(&self, status: Option<Status>) -> Result<bool> {
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
