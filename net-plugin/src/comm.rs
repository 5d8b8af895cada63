//! A connection in use: NCCL's sendComm or recvComm, its registrations, its requests. `end` has what both ends have in
//! common; `send` and `receive` say what each end does with messages.
//!
//! NCCL lets one thread post and test on a connection while another registers and deregisters. The
//! first thread has the connection's state to itself (`Exclusive`); the second only calls the
//! engine.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pushgate::settings::Transport;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_link::region::RegionMemory;

use crate::end::{CommEnd, SETTLE};
use crate::error::{Code, Failure, Result};
use crate::exclusive::{Exclusive, Refused};
use crate::ffi::types::MAX_RECVS;
use crate::join::{Joined, Role};
use crate::log;
use crate::pool::REQUESTS;
use crate::reach;
use crate::receive::Receiver;
use crate::registration::{Held, Kind, Mr, Wanted};
use crate::runtime::Runtime;
use crate::send::Sender;
use crate::socket::Line;
use crate::trace::{self, Posted, Trace};
use crate::under_way::Share;

/// How long a deregistration tries to get between two posts or tests to look at the requests. Each
/// post or test takes microseconds, but a busy machine may suspend their thread for a while.
const VISIT: Duration = Duration::from_secs(5);

/// A request, as NCCL tests it: its connection and its place there. The connection has everything
/// else.
pub struct Request {
    comm: *const Comm,
    index: u32,
}

// SAFETY: only `test` uses the pointer, and its caller promises that the connection is not closed.
unsafe impl Send for Request {}
// SAFETY: the fields never change, and only `test` uses the pointer, as for Send.
unsafe impl Sync for Request {}

/// A connection in use: what NCCL calls a sendComm or a recvComm.
pub struct Comm {
    end: CommEnd,
    side: Side,
    requests: Box<[Request]>,
    /// Records the calls, if the settings ask for it.
    trace: Option<Box<Trace>>,
}

enum Side {
    Send(Box<Exclusive<Sender>>),
    Receive(Box<Exclusive<Receiver>>),
}

/// The memory that an empty receive names. It is not of 0 bytes, because RDMA devices do not
/// register that; it is an atomic, because a peer that breaks the rules could write to it.
static NOTHING: AtomicU64 = AtomicU64::new(0);

impl Comm {
    /// Makes a connection from a queue pair that was joined; `line` reports the end of the peer.
    pub fn new(runtime: Arc<Runtime>, joined: Joined, line: Arc<Line>, role: Role) -> Result<Box<Comm>> {
        let Joined {
            qp,
            mailbox,
            producer,
            geometry,
            lane,
            transport,
            window,
            regions,
            in_record,
            longest,
            reaches,
            flusher,
            receives,
            inbound: _,
            registrations,
        } = joined;
        let mut end = CommEnd::new(runtime, role, line, (qp, mailbox, lane, registrations))?;
        end.reaches = reaches;
        // Over TCP news of the receive would leave at once, in a system call before those of what NCCL sends next.
        end.receives_drive = transport != Transport::Tcp;
        if role == Role::Receive {
            let memory = RegionMemory::Host { address: &raw const NOTHING as usize, keep: None };
            // SAFETY: a static atomic, which other threads and devices may write.
            end.nothing = unsafe { end.lane.engine.add_region(qp, memory, 8)? };
        }
        let side = match role {
            Role::Send => {
                let whole = (abi::PUSHGATE_UNIT as usize) << geometry.window_log >> 1;
                let Some(receives) = receives else {
                    let text = "the receiving end does not show its receives: load the same build on both";
                    return Err(Failure::new(Code::Remote, text));
                };
                let share = Share::new(end.runtime.loaded.under_way.clone());
                let limits = (whole, longest);
                let sender = Sender::new(producer, share, receives, limits, window, regions, in_record);
                Side::Send(Box::new(Exclusive::new(sender)))
            }
            Role::Receive => Side::Receive(Box::new(Exclusive::new(Receiver::new(producer, flusher)))),
        };
        let mut comm = Box::new(Comm { end, side, requests: Box::default(), trace: None });
        let at: *const Comm = &*comm;
        comm.requests = (0..REQUESTS as u32).map(|index| Request { comm: at, index }).collect();
        Ok(comm)
    }

    /// Records the calls from now on.
    pub fn trace(&mut self, trace: Trace) {
        self.trace = Some(Box::new(trace));
    }

    /// Registers memory of the host or of the GPU. May be called from any thread at any time. For memory of the GPU that the copier
    /// uses it asks the driver for a handle of the allocation, as NCCL does before it hands over a dma-buf.
    pub fn register(&self, address: usize, bytes: usize, kind: Kind<'_>) -> Result<Held> {
        let begun = self.trace.as_ref().map(|_| trace::now());
        let held = self.add(address, bytes, kind)?;
        if let (Some(trace), Some(begun)) = (&self.trace, begun) {
            trace.registered(begun, address, bytes, &kind);
        }
        Ok(held)
    }

    fn add(&self, address: usize, bytes: usize, kind: Kind<'_>) -> Result<Held> {
        let cuda = matches!(kind, Kind::Cuda(_));
        if cuda && self.end.lane.gpu.is_none() {
            let text = format!("{}: GPU memory, but this connection was made for none", self.end);
            return Err(Failure::new(Code::Usage, text));
        }
        let device = match &self.end.lane.gpu {
            Some(gpu) if cuda && !self.end.reaches => Some(gpu.register_device(address, bytes)?),
            _ => None,
        };
        let memory = match (kind, self.end.role) {
            (Kind::Host, _) => RegionMemory::Host { address, keep: None },
            (Kind::Cuda(dma_buf), _) if self.end.reaches => {
                let exported = Some(reach::exported(dma_buf)?);
                RegionMemory::Device { address: address as u64, exported }
            }
            // The copier pushes this memory by its address.
            (Kind::Cuda(_), Role::Send) => {
                return Ok(Held { mr: Mr { key: 0, address, bytes, cuda, pushed: true }, _device: device });
            }
            // The copier pulls into this memory what has arrived in host memory.
            (Kind::Cuda(_), Role::Receive) => {
                RegionMemory::Device { address: address as u64, exported: None }
            }
        };
        let failed = |why: &dyn fmt::Display| {
            let text = format!("{}: registering {bytes} bytes at {address:#x}: {why}", self.end);
            Failure::new(Code::System, text)
        };
        let engine = &self.end.lane.engine;
        // SAFETY: NCCL keeps registered memory mapped until `deregister`, which waits for copies
        // under way, or until the connection is closed, which takes the queue pair out. The memory
        // is C's, and no Rust reference to it exists. The rings' orderings keep the engine's
        // accesses apart from NCCL's, which posts before them and tests after them. A dma-buf is
        // NCCL's own of this memory.
        let key = unsafe { engine.add_region(self.end.qp, memory, bytes as u64) }.map_err(|e| failed(&e))?;
        // NCCL was told what the RDMA device does with such memory, so no other path may replace
        // it.
        if cuda && self.end.reaches && !engine.is_registered(self.end.qp, key)? {
            engine.remove_region(self.end.qp, key)?;
            let how = match kind {
                Kind::Cuda(Some(_)) => "by the dma-buf that NCCL gave",
                _ => "by its address, because NCCL gave no dma-buf (NCCL_DMABUF_ENABLE?)",
            };
            return Err(failed(&format!(
                "the RDMA device does not take that memory {how}; set PUSHGATE_PATH=push and PUSHGATE_LANDING=host \
                 to do without"
            )));
        }
        Ok(Held { mr: Mr { key, address, bytes, cuda, pushed: false }, _device: device })
    }

    /// Deregisters memory. If a receive into the memory has no message yet, or slices of a message
    /// out of it are still to be posted, the connection ends first; posts and tests of another
    /// thread wait briefly.
    pub fn deregister(&self, held: Held) -> Result<()> {
        let mr = held.mr;
        if let Some(trace) = &self.trace {
            trace.deregistered(trace::now(), mr.address, mr.bytes);
        }
        if self.stop(&mr)? {
            self.end.lane.engine.fail(Some(self.end.qp), Status::new(abi::PUSHGATE_ABORTED))?;
            self.ended_by_deregistration();
        }
        if let (true, Side::Send(sender)) = (mr.pushed, &self.side) {
            return self.pushes_end(sender);
        }
        let engine = &self.end.lane.engine;
        if engine.remove_region(self.end.qp, mr.key)? {
            return Ok(());
        }
        // A message still goes out of the memory, to a peer that has stopped. An error here would
        // make NCCL, which frees a communicator at this point, leave everything that it has not
        // freed yet. So the message ends, and the connection with it.
        engine.fail(Some(self.end.qp), Status::new(abi::PUSHGATE_ABORTED))?;
        if engine.remove_region(self.end.qp, mr.key)? {
            self.ended_by_deregistration();
            return Ok(());
        }
        let text = format!(
            "{}: {} bytes at {:#x} are not registered there, or a message still comes into them",
            self.end, mr.bytes, mr.address
        );
        Err(Failure::new(Code::Usage, text))
    }

    /// Whether requests that are not done need the memory, although the engine does not know of
    /// them yet. The same look stops a message in slices out of the memory, so that a thread that
    /// tests reads nothing from the memory afterwards.
    pub fn stop(&self, mr: &Mr) -> Result<bool> {
        let began = Instant::now();
        loop {
            let needed = match &self.side {
                Side::Send(sender) => sender.visit(|s| s.stop(mr)),
                Side::Receive(receiver) => receiver.visit(|r| r.needs(mr)),
            };
            match needed {
                Ok(needed) => return Ok(needed),
                // No thread can enter any more, so none posts or reads.
                Err(Refused::Poisoned) => return Ok(false),
                Err(Refused::Busy) if began.elapsed() > VISIT => {
                    let text = format!(
                        "{}: {} bytes at {:#x} stay registered: another thread was in each post or test for {VISIT:?}; \
                         try again, or close the connection",
                        self.end, mr.bytes, mr.address
                    );
                    return Err(Failure::new(Code::System, text));
                }
                Err(Refused::Busy) => std::thread::yield_now(),
            }
        }
    }

    #[cold]
    fn ended_by_deregistration(&self) {
        log::info(&format!(
            "{}: ended, because memory that a request still needs was deregistered",
            self.end
        ));
    }

    /// Waits until the GPU has done the pushes posted so far, or will read no more.
    fn pushes_end(&self, sender: &Exclusive<Sender>) -> Result<()> {
        let told = self.end.pushes.told();
        let began = Instant::now();
        while self.end.pushes.done() < told && !self.end.gpu_has_ended() {
            if began.elapsed() > SETTLE {
                let text = format!("{}: the GPU still reads memory that is deregistered", self.end);
                return Err(Failure::new(Code::System, text));
            }
            if began.elapsed() > SETTLE / 10 {
                // Perhaps no thread tests any more (after an abort, say), so advance the pushes
                // here.
                let _ = sender.visit(|s| s.advance_pushes(&self.end));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Sends a message. `None` means to try again: there is no room now, or no receive of that tag
    /// is posted. If the connection has ended, the request's test returns the cause.
    ///
    /// # Safety
    /// The `size` bytes at `data` stay readable until the request is done.
    #[inline]
    pub unsafe fn send(
        &self,
        data: *const u8,
        size: usize,
        tag: u32,
        mr: Option<&Mr>,
    ) -> Result<Option<&Request>> {
        // SAFETY: the caller's promise.
        let post = || unsafe { self.post_send(data, size, tag, mr) };
        let Some(trace) = &self.trace else { return post() };
        let begun = trace::now();
        let outcome = post();
        let what = Posted::Send { data: data as usize, size, tag, registered: mr.is_some() };
        trace.posted(begun, what, place(&outcome));
        outcome
    }

    /// # Safety
    /// The requirements of [`Comm::send`] hold.
    #[inline]
    unsafe fn post_send(
        &self,
        data: *const u8,
        size: usize,
        tag: u32,
        mr: Option<&Mr>,
    ) -> Result<Option<&Request>> {
        let Side::Send(sender) = &self.side else { return Err(self.wrong_side("isend")) };
        self.end.lane.rouse();
        // SAFETY: the caller's promise.
        let request = sender.enter(|s| unsafe { s.send(&self.end, data, size, tag, mr) });
        let request = request.ok_or_else(|| self.two_threads())??;
        // A message that was not taken waits for what the engine has yet to find: over TCP for news of a posted receive, or for room.
        // There may be no other request whose test drives.
        self.drive();
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    /// Posts a receive of one to eight buffers. `None` means to try again: there is no room now. If
    /// the connection has ended, the request's test returns the cause.
    ///
    /// # Safety
    /// The buffers stay writable until the request is done.
    #[inline]
    pub unsafe fn receive(&self, wanted: &[Wanted<'_>]) -> Result<Option<&Request>> {
        // SAFETY: the caller's promise.
        let post = || unsafe { self.post_receive(wanted) };
        let Some(trace) = &self.trace else { return post() };
        let begun = trace::now();
        let outcome = post();
        trace.posted(begun, Posted::Receive(wanted), place(&outcome));
        outcome
    }

    /// # Safety
    /// The requirements of [`Comm::receive`] hold.
    #[inline]
    unsafe fn post_receive(&self, wanted: &[Wanted<'_>]) -> Result<Option<&Request>> {
        let Side::Receive(receiver) = &self.side else { return Err(self.wrong_side("irecv")) };
        self.end.lane.rouse();
        let request = receiver.enter(|r| r.receive(&self.end, wanted));
        let request = request.ok_or_else(|| self.two_threads())??;
        // Its message may be there already.
        if self.end.receives_drive {
            self.drive();
        }
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    /// Begins to make complete what RDMA has written into the GPU's memory. `None`: there is
    /// nothing to wait for.
    pub fn flush<'a>(
        &self,
        flushed: impl Iterator<Item = (usize, Option<&'a Mr>)>,
    ) -> Result<Option<&Request>> {
        let begun = self.trace.as_ref().map(|_| trace::now());
        let outcome = self.post_flush(flushed);
        if let (Some(trace), Some(begun)) = (&self.trace, begun) {
            trace.posted(begun, Posted::Flush, place(&outcome));
        }
        outcome
    }

    fn post_flush<'a>(
        &self,
        flushed: impl Iterator<Item = (usize, Option<&'a Mr>)>,
    ) -> Result<Option<&Request>> {
        let Side::Receive(receiver) = &self.side else { return Err(self.wrong_side("iflush")) };
        let any = flushed.into_iter().any(|(size, mr)| size > 0 && mr.is_some_and(|mr| mr.cuda));
        let request = receiver.enter(|r| if any { r.flush() } else { Ok(None) });
        let request = request.ok_or_else(|| self.two_threads())??;
        Ok(request.map(|i| &self.requests[i as usize]))
    }

    /// Moves the connection on, where NCCL's thread drives the engine. False: another thread was at it.
    #[inline]
    fn drive(&self) -> bool {
        self.end.lane.drive(self.end.qp)
    }

    #[cold]
    fn wrong_side(&self, call: &str) -> Failure {
        Failure::new(Code::Argument, format!("{call} on the {}", self.end))
    }

    #[cold]
    fn two_threads(&self) -> Failure {
        let text = format!("{}: two threads post or test at once, or one of them has failed there", self.end);
        Failure::new(Code::Usage, text)
    }

    /// Closes the connection in order. Requests that are not done are dropped with it.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for Comm {
    /// Waits for the GPU's pushes under way, after which the window may be unmapped, and until the peer has what was sent.
    fn drop(&mut self) {
        if let Some(trace) = &self.trace {
            trace.close();
        }
        let Side::Send(sender) = &self.side else { return };
        let settled = sender.enter(|s| s.settle(&self.end)).unwrap_or(false);
        // Where a thread has failed on the connection its state is not to be relied on, and that was told.
        sender.enter(|s| s.linger(&self.end));
        if !settled {
            log::warn(&format!(
                "{}: the GPU still pushes into its window, so the window stays mapped",
                self.end
            ));
            std::mem::forget(std::mem::take(&mut self.end.registrations));
        }
    }
}

/// What a trace holds of the outcome of a call that posts.
fn place<'a>(outcome: &'a Result<Option<&Request>>) -> trace::Outcome<'a> {
    outcome.as_ref().map(|request| request.map(|request| request.index))
}

impl Request {
    /// Whether the request is done. If so, calls `size` with the bytes of each buffer; from then on
    /// the request may be reused.
    ///
    /// # Safety
    /// The request's connection is not closed.
    #[inline]
    pub unsafe fn test(&self, size: impl Fn(usize, usize)) -> Result<bool> {
        // SAFETY: a connection does not move, and the caller promises that it is not closed.
        let comm = unsafe { &*self.comm };
        match &comm.trace {
            None => self.look(comm, size),
            Some(trace) => self.look_traced(comm, trace, size),
        }
    }

    /// [`Request::test`] where the calls are recorded.
    fn look_traced(&self, comm: &Comm, trace: &Trace, size: impl Fn(usize, usize)) -> Result<bool> {
        let sizes = [const { Cell::new(0) }; MAX_RECVS];
        let count = Cell::new(0);
        let begun = trace::now();
        let ended = self.look(comm, |i, bytes| {
            sizes[i].set(bytes);
            count.set(count.get().max(i + 1));
            size(i, bytes);
        });
        let sizes = sizes.map(Cell::into_inner);
        trace.tested(begun, self.index, ended.as_ref().copied(), &sizes[..count.get()]);
        ended
    }

    #[inline]
    fn look(&self, comm: &Comm, size: impl Fn(usize, usize)) -> Result<bool> {
        let done = match &comm.side {
            // What the GPU has pushed is published first, so that the engine posts it in this call and not in the next one.
            Side::Send(s) => s.enter(|s| {
                s.advance_pushes(&comm.end);
                let seen = comm.drive();
                s.test(&comm.end, self.index, seen, size)
            }),
            Side::Receive(r) => {
                comm.drive();
                r.enter(|r| r.test(&comm.end, self.index, size))
            }
        };
        done.ok_or_else(|| comm.two_threads())?
    }
}
