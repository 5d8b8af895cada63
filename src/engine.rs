//! The engine of a context: a thread of this process, or the proxy process's.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_gpu_kernels::Executor;
use pushgate_proxy::engine::{Drive, Engine, EngineOptions, StallReport};
use pushgate_proxy::proxy::Proxy;
use pushgate_proxy::remote::RemoteEngine;

use crate::error::{Error, Result};
use crate::gpu_mover;
use crate::settings::{AutoOr, DriveChoice, ProxyPlace, Settings};
use crate::watch::Watch;

/// An engine that runs, as a context holds it.
pub(crate) struct Started {
    pub(crate) proxy: Arc<dyn Proxy>,
    pub(crate) bell: Doorbell,
    /// The thread that sees to the proxy process; none if the engine runs in this process.
    pub(crate) watch: Option<Watch>,
}

/// Starts the engine, or joins the proxy process, as the settings say. This context is number `index` of `engines`
/// contexts on this host.
pub(crate) fn start(
    settings: &Settings,
    executor: &Arc<dyn Executor>,
    index: usize,
    engines: usize,
) -> Result<Started> {
    Ok(match settings.proxy {
        ProxyPlace::Thread => {
            let (cpu, alone) = core(settings.proxy_cpu, index, engines);
            let mover = gpu_mover::of(executor)?;
            let bell = EventFd::new().map_err(Error::io("eventfd"))?;
            let theirs = bell.try_clone().map_err(Error::io("eventfd"))?;
            let drive = match settings.drive {
                DriveChoice::Auto | DriveChoice::Thread => Drive::Thread,
                DriveChoice::Caller => Drive::Caller,
            };
            // A program may post receives long before it waits for messages.
            let stall_report = StallReport { after: settings.stall_report, receives: false };
            let options =
                EngineOptions { drive, cpu, alone, mover, stall_report, ..EngineOptions::default() };
            let engine = Engine::start(theirs, options)?;
            Started { proxy: Arc::new(engine), bell: Doorbell::Thread(bell), watch: None }
        }
        ProxyPlace::Process => {
            let trusts = settings.proxy_trusts()?;
            let remote = RemoteEngine::connect_trusting(&settings.proxy_socket, "pushgate", trusts)?;
            let remote = Arc::new(remote);
            let watch = Some(Watch::start(remote.clone())?);
            Started { proxy: remote.clone(), bell: Doorbell::Process(remote), watch }
        }
    })
}

/// What this program's producers ring when they find the engine asleep.
pub(crate) enum Doorbell {
    /// The eventfd of an engine in this process.
    Thread(EventFd),
    /// The ringer of an engine in the proxy process.
    Process(Arc<RemoteEngine>),
}

impl Doorbell {
    /// The descriptor that a producer writes to ring the engine.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Doorbell::Thread(bell) => bell.as_fd(),
            Doorbell::Process(remote) => remote.ringer().as_fd(),
        }
    }
}

/// Chooses the core for an engine, and whether the engine may spin there.
///
/// Engines take the last cores, one each, if at least three cores for each engine remain for the
/// rest.
fn core(setting: AutoOr<usize>, index: usize, engines: usize) -> (Option<usize>, bool) {
    let allowed = crate::effect::cores();
    let alone = allowed.len() >= 4 * engines;
    let cpu = match setting {
        AutoOr::Is(cpu) => Some(cpu),
        AutoOr::None => None,
        AutoOr::Auto => alone.then(|| allowed[allowed.len() - 1 - index % allowed.len()]),
    };
    (cpu, alone)
}
