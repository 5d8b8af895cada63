//! The engine of a context: a thread of this process, or the proxy process's.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_engine::engine::{Drive, Engine, EngineOptions, StallReport};
use pushgate_engine::proxy::Proxy;
use pushgate_gpu_kernels::Executor;
use pushgate_service::remote::RemoteEngine;

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

/// Starts the engine, or joins the proxy process, as the settings say. `share`: the number of this context among those of the host,
/// and how many they are.
pub(crate) fn start(
    settings: &Settings,
    executor: &Arc<dyn Executor>,
    share: Option<(usize, usize)>,
) -> Result<Started> {
    Ok(match settings.proxy {
        ProxyPlace::Thread => {
            let (cpu, alone) = core(settings.proxy_cpu, &crate::effect::cores(), share);
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
            Started { proxy: Arc::new(engine), bell: Doorbell::Thread(Arc::new(bell)), watch: None }
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
    Thread(Arc<EventFd>),
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
/// Engines take the last cores that the process may use, one each, if at least three cores for each engine remain for the
/// rest. An engine that knows nothing of the others is not pinned: another one may have taken the last core.
fn core(setting: AutoOr<usize>, allowed: &[usize], share: Option<(usize, usize)>) -> (Option<usize>, bool) {
    let alone = allowed.len() >= 4 * share.map_or(1, |(_, engines)| engines.max(1));
    let cpu = match (setting, share) {
        (AutoOr::Is(cpu), _) => Some(cpu),
        (AutoOr::Auto, Some((index, _))) if alone => Some(allowed[allowed.len() - 1 - index % allowed.len()]),
        _ => None,
    };
    (cpu, alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_pinned_only_where_it_knows_of_the_others() {
        let cores: Vec<usize> = (8..16).collect();
        let auto = |share| core(AutoOr::Auto, &cores, share);
        assert_eq!(auto(None), (None, true));
        assert_eq!(auto(Some((0, 1))), (Some(15), true));
        assert_eq!(auto(Some((1, 2))), (Some(14), true));
        // Too few cores for three engines.
        assert_eq!(auto(Some((1, 3))), (None, false));
        assert_eq!(core(AutoOr::Auto, &cores[..3], None), (None, false));
        assert_eq!(core(AutoOr::None, &cores, Some((0, 1))), (None, true));
        assert_eq!(core(AutoOr::Is(9), &cores, None), (Some(9), true));
        // The kernel does not say which cores there are.
        assert_eq!(core(AutoOr::Auto, &[], Some((0, 1))), (None, false));
    }
}
