//! What NCCL asks of the plugin as a whole: settings, communicators, connections. A process has one of each: the
//! settings that its init read, and the [`Runtime`].
//!
//! The threads run as long as a context or a connection needs them. (Contexts came with v11 of the interface; in earlier
//! versions NCCL never says that it is done.)

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pushgate_driver_shim::fork::Owner;
use pushgate_engine::recorder;

use crate::comm::Comm;
use crate::error::{Code, Failure, Result};
use crate::handle::{self, Handle, Nonce};
use crate::handshake::{Attempts, Listener, Made};
use crate::join::{Purpose, Role};
use crate::loaded::Loaded;
use crate::props::{Network, Properties};
use crate::runtime::Runtime;
use crate::trace;

/// Which of the plugin's tables a communicator uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Net,
    Rma,
}

/// One of NCCL's communicators, at one table.
pub struct Context {
    pub traffic_class: Option<u8>,
    communicator: u64,
    table: Table,
    /// The empty memfd by whose name `pushgate inspect` finds the processes of a communicator.
    _job: Option<OwnedFd>,
    _runtime: Arc<Runtime>,
}

#[derive(Default)]
struct Process {
    loaded: Option<Arc<Loaded>>,
    runtime: Weak<Runtime>,
    /// The runtime has the only lasting reference, so attempts end with it.
    attempts: Weak<Attempts>,
    /// Communicators whose network this is, each as often as it has a context.
    nets: Vec<u64>,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { loaded: None, runtime: Weak::new(), attempts: Weak::new(), nets: Vec::new() });

impl Process {
    /// Reads the settings, unless something made from earlier settings is in use.
    fn load(&mut self) -> Result<()> {
        if self.runtime.strong_count() == 0 {
            // If the new settings are wrong, the old ones must not stay in force.
            self.loaded = None;
            self.loaded = Some(Arc::new(Loaded::new()?));
        }
        Ok(())
    }

    /// The running threads, which are started if needed.
    fn running(&mut self) -> Result<Arc<Runtime>> {
        if let Some(runtime) = self.runtime.upgrade() {
            return Ok(runtime);
        }
        let attempts = Arc::new(Attempts::new());
        let runtime = Arc::new(Runtime::start(loaded(self)?.clone(), attempts.clone())?);
        self.runtime = Arc::downgrade(&runtime);
        self.attempts = Arc::downgrade(&attempts);
        Ok(runtime)
    }
}

/// Fails in a child of the process that made the first call: NCCL's connections, and the threads
/// that serve them, belong to the parent. Makes no system call.
#[inline]
pub fn here() -> Result<()> {
    static OWNER: OnceLock<Owner> = OnceLock::new();
    OWNER.get_or_init(Owner::here).check().map_err(|forked| Failure::new(Code::Usage, forked.to_string()))
}

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(|e| e.into_inner())
}

/// Reads the settings, unless something made from earlier settings is in use.
pub fn load() -> Result<()> {
    here()?;
    process().load()
}

/// Reads the settings for a communicator, and starts the threads that it needs. `communicator` is NCCL's number of it,
/// which all of its ranks have and NCCL's log shows as `commId`.
pub fn open(traffic_class: Option<u8>, communicator: u64, table: Table) -> Result<Context> {
    here()?;
    let mut process = process();
    // A thread that ends the last context must not come between.
    process.load()?;
    let runtime = process.running()?;
    drop(process);
    // Before NCCL's kernels run.
    runtime.open_gpu()?;
    let _job = recorder::announce(&format!("nccl-{communicator:x}"));
    if table == Table::Net {
        self::process().nets.push(communicator);
    }
    Ok(Context { traffic_class, communicator, table, _job, _runtime: runtime })
}

/// Whether this plugin is a communicator's network. One that shares its parent's network (`splitShare`) is not known.
pub fn serves(communicator: u64) -> bool {
    here().is_ok() && process().nets.contains(&communicator)
}

/// Whether the settings offer NCCL the RMA table.
pub fn offers_rma() -> bool {
    here().is_ok() && process().loaded.as_ref().is_some_and(|loaded| loaded.settings.net_rma)
}

/// Ends a context. The last one, if no connection is open, joins all threads.
pub fn close(context: Context) {
    let Context { communicator, table, .. } = context;
    drop(context);
    let mut process = process();
    let of = |net: &u64| table == Table::Net && *net == communicator;
    if let Some(at) = process.nets.iter().position(of) {
        process.nets.swap_remove(at);
    }
    if process.runtime.strong_count() == 0 {
        // This closes the RDMA device too.
        process.loaded = None;
    }
}

/// Calls `with` for the devices that NCCL is told of.
pub fn network<T>(with: impl FnOnce(&Network) -> Result<T>) -> Result<T> {
    here()?;
    with(&loaded(&process())?.network)
}

/// What getProperties returns of a device.
pub fn properties(dev: c_int) -> Result<Properties> {
    network(|network| network.get(dev).copied())
}

fn loaded(process: &Process) -> Result<&Arc<Loaded>> {
    process.loaded.as_ref().ok_or_else(|| {
        Failure::new(Code::Internal, "called before init, or after one that failed: call init first")
    })
}

/// The running threads, which are started if needed.
pub fn running() -> Result<Arc<Runtime>> {
    here()?;
    process().running()
}

/// The running threads, and the connections that are being made.
pub fn running_with_attempts() -> Result<(Arc<Runtime>, Arc<Attempts>)> {
    let runtime = running()?;
    let attempts = process().attempts.upgrade().expect("a runtime keeps its attempts");
    Ok((runtime, attempts))
}

/// What NCCL calls a listenComm.
pub struct Listening {
    listener: Listener,
    purpose: Purpose,
    dev: usize,
    /// When NCCL called, for traces.
    begun: u64,
}

impl Listening {
    /// Starts to listen for connections over device `dev` of this process; returns the handle for connectors, whose device is theirs.
    pub fn new(dev: c_int, class: Option<u8>) -> Result<(Self, [u8; handle::BYTES])> {
        let begun = trace::now();
        let purpose = messages(dev)?;
        let (listener, bytes) = Listener::new(running()?, class)?;
        Ok((Listening { listener, purpose, dev: dev as usize, begun }, bytes))
    }

    /// Returns the next connection if it is ready.
    pub fn accept(&self) -> Result<Option<Box<Comm>>> {
        let Some(made) = self.listener.next(&self.purpose)? else { return Ok(None) };
        let nonce = || Ok(self.listener.nonce());
        made_comm(self.listener.runtime().clone(), made, (Role::Receive, self.dev, Some(self.begun)), nonce)
            .map(Some)
    }
}

/// Connects over device `dev` of this process to the listener of a handle, if that can be completed by now ([`Attempts::dial`]).
pub fn connect(dev: c_int, handle: &mut [u8; handle::BYTES], class: Option<u8>) -> Result<Option<Box<Comm>>> {
    let purpose = messages(dev)?;
    let (runtime, attempts) = running_with_attempts()?;
    let Some(made) = attempts.dial(&runtime, handle, class, &purpose)? else { return Ok(None) };
    let nonce = || Ok(Handle::decode(handle)?.key.nonce());
    made_comm(runtime, made, (Role::Send, dev as usize, None), nonce).map(Some)
}

/// A connection in use, with a trace of its own if the settings ask for traces. `end`: which end it is, over which device, and when
/// NCCL began to listen. `nonce` names the connection at both ends.
fn made_comm(
    runtime: Arc<Runtime>,
    Made { joined, line }: Made,
    (role, dev, listened): (Role, usize, Option<u64>),
    nonce: impl FnOnce() -> Result<Nonce>,
) -> Result<Box<Comm>> {
    let mut comm = Comm::new(runtime.clone(), *joined, line, role)?;
    // Once there is a connection, so that it ends, and its peer hears of that, where no trace can be written.
    if let Some(traces) = &runtime.loaded.traces {
        let trace = traces.end(role, nonce()?, dev)?;
        trace.made(listened);
        comm.trace(trace);
    }
    Ok(comm)
}

/// What connections of NCCL's network table over device `dev` are for.
fn messages(dev: c_int) -> Result<Purpose> {
    properties(dev)?;
    Ok(Purpose::Messages { dev: dev as usize })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::props::MAX_BYTES;
    use crate::socket::Line;
    use crate::stream::Stream;
    use crate::testing::{WINDOW, joined_in};

    #[test]
    fn p7_a_connection_whose_trace_cannot_be_written_leaves_no_queue_pair() {
        let folder = std::env::temp_dir().join(format!("pushgate-no-traces-{}", std::process::id()));
        let runtime = Runtime::of_a_test_with(WINDOW, |settings| settings.net_trace = folder.clone());
        std::fs::remove_dir(&folder).unwrap();
        let (own, _peer) = joined_in(&runtime, Role::Send, MAX_BYTES, None);
        let (qp, lane) = (own.qp, own.lane.clone());
        lane.engine.counters_of(qp).unwrap();
        let (stream, _socket) = UnixStream::pair().unwrap();
        let line = Arc::new(Line::new(Stream::Unix(stream.into())));
        let made = Made { joined: Box::new(own), line };
        let nonce = || Ok(handle::Key([9; 16]).nonce());
        let e = made_comm(runtime, made, (Role::Send, 0, None), nonce).err().expect("there is no folder");
        assert!(e.text.contains("the trace ") && e.text.contains("set PUSHGATE_NET_TRACE"), "{e}");
        assert!(lane.engine.counters_of(qp).is_err(), "it is still there");
    }
}
