//! Both ends of a connection in one process, for tests of one end against a peer that breaks the
//! rules: a bare producer stands in for the peer.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use pushgate::settings::{AutoOr, PluginSettings, QpKind, Transport};
use pushgate_door::addresses::Offered;

use crate::comm::{Comm, Request};
use crate::error::Result;
use crate::join::{Joined, NewEnd, Purpose, Role};
use crate::loaded::Loaded;
use crate::props::{MAX_BYTES, Network};
use crate::ranks::{Cores, Ranks};
use crate::runtime::Runtime;
use crate::socket::Line;
use crate::stream::Stream;
use crate::trace::Traces;
use crate::under_way::{self, UnderWay};

/// A connection of ours, and the peer's end of it.
pub struct Pair {
    pub comm: Box<Comm>,
    pub peer: Joined,
    pub socket: UnixStream,
}

/// A small window, which is soon full.
pub const WINDOW: u64 = 256 << 10;

/// Makes a pair over `local`.
pub fn pair(role: Role) -> Pair {
    pair_of(role, MAX_BYTES, None)
}

/// Makes a pair whose queue pair takes messages of up to `longest` bytes, as far as we know. `pid`:
/// the process whose memory either end may read, if it is to do so.
pub fn pair_of(role: Role, longest: usize, pid: Option<u32>) -> Pair {
    pair_in(Runtime::of_a_test(WINDOW), role, longest, pid)
}

/// Makes a pair as [`pair_of`] does, of this runtime.
pub fn pair_in(runtime: Arc<Runtime>, role: Role, longest: usize, pid: Option<u32>) -> Pair {
    let (own, peer) = joined_in(&runtime, role, longest, pid);
    let (stream, socket) = UnixStream::pair().unwrap();
    let comm = Comm::new(runtime, own, Arc::new(Line::new(Stream::Unix(stream.into()))), role).unwrap();
    Pair { comm, peer, socket }
}

/// The two ends of such a pair before NCCL has the one of `role`, which comes first.
pub fn joined_in(runtime: &Arc<Runtime>, role: Role, longest: usize, pid: Option<u32>) -> (Joined, Joined) {
    let other = if role == Role::Send { Role::Receive } else { Role::Send };
    let [own, theirs] = [role, other].map(|role| {
        NewEnd::new(runtime, role, None, Transport::Local, &Purpose::Messages { dev: 0 }).unwrap()
    });
    let [to_them, to_us] = [&own, &theirs].map(|end| end.offer().unwrap());
    let [own, peer] = [(own, to_us), (theirs, to_them)].map(|(end, offer)| {
        end.prepare(runtime, offer).unwrap().meet(&[]).unwrap().join(runtime, pid, None).unwrap()
    });
    (Joined { longest, ..own }, peer)
}

/// Looks until there is something.
#[track_caller]
pub fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(begun.elapsed() < pushgate_tests::hang(), "it never comes"),
        }
        std::thread::yield_now();
    }
}

/// How a request ends: the bytes of its first buffer, or the failure.
#[track_caller]
pub fn ended(request: &Request) -> Result<usize> {
    let size = std::cell::Cell::new(usize::MAX);
    until(|| {
        // SAFETY: the tests close their connections last.
        match unsafe {
            request.test(|buffer, bytes| {
                if buffer == 0 {
                    size.set(bytes)
                }
            })
        } {
            Ok(true) => Some(Ok(size.get())),
            Ok(false) => None,
            Err(e) => Some(Err(e)),
        }
    })
}

impl Runtime {
    /// Makes a runtime for tests over `local`, without a GPU, whatever the environment says.
    pub fn of_a_test(window: u64) -> Arc<Self> {
        Self::of_a_test_with(window, |_| {})
    }

    /// Makes a runtime for tests without a GPU: the default settings with a window of `window` bytes, after what `change` does to
    /// them. Over `local`, or if `qp` is tcp over the loopback device.
    pub fn of_a_test_with(window: u64, change: impl FnOnce(&mut PluginSettings)) -> Arc<Self> {
        let mut settings = PluginSettings::default();
        settings.net_window_size = window;
        change(&mut settings);
        let under_way = UnderWay::new(match settings.net_under_way {
            AutoOr::Is(most) => Some(under_way::Bound { most, each_gpu: false }),
            _ => None,
        });
        let tcp = settings.qp == QpKind::Tcp;
        let here = || Offered::named(std::net::Ipv4Addr::LOCALHOST.into());
        let (network, cores) = (Network::of_host(false), Cores::here(Ranks::Told(1)));
        let mut loaded = Loaded::without_devices(settings, network, cores, under_way);
        (loaded.no_rdma, loaded.tcp) = (Some("a test has none".into()), tcp);
        loaded.traces = Traces::of(&loaded.settings, &loaded.identity, 1).expect("a folder");
        loaded.at = tcp.then(here).ok_or_else(|| "a test has none".into());
        Arc::new(Runtime::start(Arc::new(loaded), Arc::new(())).expect("a thread"))
    }
}
