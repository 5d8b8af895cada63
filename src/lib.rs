//! GPU-initiated networking that pushes: a kernel writes its payload into a window with posted
//! stores, and a proxy on the CPU posts each message to the queue pair once it holds every resource
//! that the send will consume.
//!
//! A program opens a [`Context`] (one device, one engine), joins a [`Comm`], makes [`QueuePair`]s
//! and launches kernels that use the queue pairs through the device API (`pushgate/device.cuh`,
//! docs/device-api.md):
//!
//! ```no_run
//! use pushgate::{Comm, Context, QpConfig};
//! # fn main() -> pushgate::Result<()> {
//! let context = Context::builder().build()?;
//! let ranks = Comm::local(&context, 2)?;
//! println!("{}", context.why());
//! # let _ = (ranks, QpConfig::default());
//! # Ok(())
//! # }
//! ```
//! `examples/custom_kernel.rs` is a complete program with a kernel of its own, `examples/allreduce.rs` one whose ranks are
//! processes. docs/architecture.md explains how the library works inside.

mod attached;
mod comm;
mod context;
pub mod copier;
mod effect;
mod engine;
mod error;
mod explain;
mod gpu_mover;
mod host_memory;
mod mesh;
mod origin;
mod pending;
mod placement;
mod qp;
pub mod ranks;
#[doc(hidden)]
pub mod rdma;
mod relay;
pub mod settings;
mod shared;
mod watch;

pub use attached::AttachedQueuePair;
pub use comm::Comm;
pub use context::{Context, ContextBuilder, Module};
pub use error::{Error, ErrorCode, Result, status_name};
pub use explain::explain;
pub use host_memory::HostMemory;
pub use pending::PendingQueuePairs;
pub use pushgate_driver_shim::abi;
pub use pushgate_driver_shim::interrupt::{interrupt_by, left_undone};
pub use pushgate_driver_shim::placed::{State as RingState, Waiting};
pub use pushgate_engine::counters::Counters;
pub use pushgate_engine::idle::Step;
pub use pushgate_gpu_kernels::{
    Available, DeviceBuffer, DeviceChoice, DeviceError, Image, Launch, Running, Source, Stream, Target,
    WaitOutcome, available_executors, probe as probe_cuda,
};
pub use qp::{
    DeviceEnd, HostEnd, HostMessage, InPlace, QpConfig, QueuePair, Region, RegionKey, Staged,
    upload_descriptors,
};
pub use ranks::{Bootstrap, MAX_RANKS, Membership, UniqueId};
pub use relay::RelayStats;
pub use settings::Settings;
pub use shared::Shared;
/// The version of this crate, as in `0.2.0 (commit 0123456789ab)`.
///
/// `, changed` behind the commit means that the sources had been changed since. A build that is not made in the
/// project's repository has no commit.
pub const VERSION: &str = env!("_PUSHGATE_VERSION");

/// Re-exported for the derives (`IntoBytes`, `Immutable`) on structs of kernel parameters. A crate that does not depend on
/// zerocopy itself says where the derives find it:
///
/// ```
/// use pushgate::zerocopy::{Immutable, IntoBytes};
///
/// #[derive(IntoBytes, Immutable)]
/// #[zerocopy(crate = "pushgate::zerocopy")]
/// #[repr(C)]
/// struct Params {
///     queue_pair: u64,
///     bytes: u64,
/// }
/// ```
pub use zerocopy;

pub mod proxy {
    //! The proxy as a process of its own: what `pushgate proxy` runs.

    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use pushgate_driver_shim::closing::PeerListener;
    use pushgate_driver_shim::eventfd::EventFd;
    use pushgate_engine::engine::StallReport;
    pub use pushgate_service::server::Leaves;
    use pushgate_service::server::{ServerOptions, bind, bind_for_users, serve};
    use pushgate_service::users::Users;
    use pushgate_service::wire::Amounts;
    pub use pushgate_service::wire::{Usage, UserUsage};
    use rustix::process::{Resource, getrlimit};

    use crate::error::{Error, Result};
    use crate::settings::Settings;

    /// Serves programs at `socket` (a path, or @ and an abstract name) until `stop` is rung; each
    /// program gets an engine of its own.
    pub fn run(socket: &Path, stop: EventFd) -> Result<()> {
        run_and_tell(&Settings { proxy_socket: socket.into(), ..Settings::default() }, stop, || {})
    }

    /// Serves programs at the `proxy_socket` of these settings as [`run`] does, with their `stall_report`, the users of their
    /// `proxy_serves` and the quotas of their `proxy_user_...`, and calls `serving` once programs can connect.
    pub fn run_and_tell(settings: &Settings, stop: EventFd, serving: impl FnOnce()) -> Result<()> {
        run_as_process(settings, None, || Leaves::OF_A_PROGRAM, stop, serving)
    }

    /// Serves programs as [`run_and_tell`] does, for a process that ends when this returns. With `listener` that socket takes
    /// the place of the one that the settings name. `leaves` is asked when `stop` is rung: what becomes of the queue pairs.
    pub fn run_as_process(
        settings: &Settings,
        listener: Option<UnixListener>,
        leaves: fn() -> Leaves,
        stop: EventFd,
        serving: impl FnOnce(),
    ) -> Result<()> {
        raise_open_files();
        let (least, most) = (ServerOptions::least_open_files(), getrlimit(Resource::Nofile).current);
        if most.is_some_and(|most| most < least) {
            let what = format!("a proxy that serves one program needs {least} open files");
            return Err(Error::io(what)(rustix::io::Errno::MFILE.into()));
        }
        let users = Users::find(&settings.proxy_serves)
            .map_err(|e| settings.refused("proxy-serves", format!("users and groups of this host; {e}")))?;
        let bind = if users.others() { bind_for_users } else { bind };
        let socket = &settings.proxy_socket;
        let failed = |e| Error::io(format!("proxy at {}", socket.display()))(e);
        let (listener, _file) = match listener {
            // The service manager has the socket too, and keeps for the next proxy who connects meanwhile.
            Some(listener) => (PeerListener::from(listener).shared(), None),
            None => bind(socket).map(|(listener, file)| (listener, Some(file))).map_err(failed)?,
        };
        serving();
        let stall_report = StallReport { after: settings.stall_report, receives: false };
        let defaults = ServerOptions::new(stop);
        let options = ServerOptions {
            // The quotas bound a user; this bounds the threads.
            max_clients: if users.others() { MOST_PROGRAMS } else { defaults.max_clients },
            users,
            quota: Amounts {
                programs: settings.proxy_user_programs,
                queue_pairs: settings.proxy_user_queue_pairs,
                bytes: settings.proxy_user_memory,
                descriptors: settings.proxy_user_descriptors,
            },
            stall_report,
            leaves,
            ..defaults
        };
        serve(listener, options).map_err(failed)
    }

    /// What users hold of the proxy process that these settings name: all of them for root and the proxy's own user, else the
    /// user that asks alone.
    pub fn usage(settings: &Settings) -> Result<Usage> {
        Ok(pushgate_service::remote::usage(&settings.proxy_socket, settings.proxy_trusts()?)?)
    }

    /// The most programs of a proxy that serves several users.
    const MOST_PROGRAMS: usize = 1024;

    pub use pushgate_driver_shim::eventfd::EventFd as Stop;

    /// Raises this process's limit of open files as far as the system allows.
    ///
    /// A queue pair holds about ten descriptors, so a program with many queue pairs calls this
    /// before it makes them. The library itself never changes the limit.
    pub fn raise_open_files() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}
