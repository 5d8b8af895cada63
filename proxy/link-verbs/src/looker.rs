//! Who looks at a port for the links of this process: one thread a port, beside the engines, for a look is a command to the
//! device's firmware, which takes up to a tenth of a second and, where the firmware hangs, has no end. Links read what was
//! seen, without a lock or a system call. The thread begins with the first link and ends with the last one.
//!
//! A look that does not return says nothing: links go on by what their completions tell.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pushgate_door::netlink;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::device::Device;
use super::gid::GidEntry;
use super::health::{LOOK as SHORTEST, SETTLE};
use super::turn::Turns;

/// Between two looks at a port about which nothing was said, nanoseconds.
const LOOK: u64 = 500_000_000;
/// Between two looks where something is amiss, or may be: a link that waits to see whether a sign lasts knows the port as it was within
/// this time, nanoseconds.
const SOON: u64 = 100_000_000;

/// What a link has looked after.
struct Watched {
    device: Arc<Device>,
    entry: GidEntry,
    /// The address of an iWARP connection, whose entry of the GID table stays when the address goes.
    ip: Option<IpAddr>,
    /// What events name: the queue pair and its completion queue.
    names: [usize; 2],
    /// What is wrong with the way out of this host, `PUSHGATE_DOWN_*`; 0: nothing.
    found: AtomicU32,
    /// The device reported the queue pair's error state.
    in_error: AtomicBool,
}

/// A link's part in the looks at its port.
pub(super) struct Watch {
    looker: Arc<Looker>,
    watched: Arc<Watched>,
}

impl Watch {
    /// Of a queue pair of `device`, whose packets carry the address of `entry`, or over iWARP `ip`. `names`: libibverbs' handles of the
    /// queue pair and of its completion queue.
    pub(super) fn new(device: &Arc<Device>, entry: &GidEntry, ip: Option<IpAddr>, names: [usize; 2]) -> Self {
        let watched = Arc::new(Watched {
            device: device.clone(),
            entry: entry.clone(),
            ip,
            names,
            found: AtomicU32::new(0),
            in_error: AtomicBool::new(false),
        });
        let looker = device.looker.clone();
        looker.takes(&watched);
        Watch { looker, watched }
    }

    /// What is wrong with the way out of this host, `PUSHGATE_DOWN_*`, as of the last look.
    pub(super) fn found(&self) -> Option<u32> {
        // Relaxed, as below: nothing else is read by it.
        Some(self.watched.found.load(Ordering::Relaxed)).filter(|cause| *cause != 0)
    }

    /// Whether the device has reported the queue pair's error state.
    pub(super) fn is_in_error(&self) -> bool {
        self.watched.in_error.load(Ordering::Relaxed)
    }

    /// Has the port looked at soon, and again in steps until a sign of failure counts.
    pub(super) fn asks(&self) {
        self.looker.asked.store(true, Ordering::Relaxed);
        self.looker.rouse();
    }

    /// Looks if that is due, where nobody else does: in the simulator, and where no thread could be had. `now`: the engine's time.
    pub(super) fn drive(&self, now: u64) {
        if self.looker.driven.load(Ordering::Relaxed) {
            let watched = self.looker.watched();
            self.looker.turn(&watched, now);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The thread forgets the link, which may have been the last one. A child of `fork` has no such thread, and maybe its lock.
        if self.watched.device.owner.is_here() {
            self.looker.rouse();
        }
    }
}

/// Who looks at one port.
pub(super) struct Looker {
    /// The links look, each by its engine's time.
    driven: AtomicBool,
    asked: AtomicBool,
    /// Wakes the thread, once there is one.
    bell: Mutex<Option<Arc<EventFd>>>,
    links: Mutex<Links>,
    times: Mutex<Times>,
    /// Whose turn it is among the port's links that are to be made anew.
    pub(super) turns: Arc<Turns>,
}

#[derive(Default)]
struct Links {
    all: Vec<Weak<Watched>>,
    /// A thread looks after them.
    attended: bool,
}

/// When somebody looked last, nanoseconds.
#[derive(Default)]
struct Times {
    events: Option<u64>,
    looked: Option<u64>,
    /// Until then looks follow each other in steps of [`SOON`].
    wary_until: u64,
    /// The last look found something.
    amiss: bool,
}

impl Times {
    /// How long until the next look at the port is due, if nobody asks for one.
    fn until_look(&self, now: u64) -> u64 {
        let interval = if self.amiss || now < self.wary_until { SOON } else { LOOK };
        self.looked.filter(|at| *at <= now).map_or(0, |at| (at + interval).saturating_sub(now))
    }
}

/// Whether `time` lies within `interval` before `now`. Where links look, each passes its engine's time, and engines count from starts of their
/// own: what another one has noted may be the future, which does not count.
fn is_within(time: Option<u64>, now: u64, interval: u64) -> bool {
    time.is_some_and(|time| time <= now && now - time < interval)
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves what is held whole.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Looker {
    /// The one of this process for a port.
    pub(super) fn of(device: &str, port: u8) -> Arc<Self> {
        static ALL: Mutex<BTreeMap<(String, u8), Weak<Looker>>> = Mutex::new(BTreeMap::new());
        let mut all = lock(&ALL);
        let place = all.entry((device.into(), port)).or_default();
        place.upgrade().unwrap_or_else(|| {
            let looker = Self::new(false, Turns::of_host());
            *place = Arc::downgrade(&looker);
            looker
        })
    }

    /// Of a device of its own. `driven`: the links look.
    pub(super) fn new(driven: bool, turns: Turns) -> Arc<Self> {
        Arc::new(Looker {
            driven: driven.into(),
            asked: false.into(),
            bell: Mutex::default(),
            links: Mutex::default(),
            times: Mutex::default(),
            turns: Arc::new(turns),
        })
    }

    /// Forgets when anybody looked or failed, for another run of the simulator.
    #[cfg(feature = "sim")]
    pub(super) fn reset(&self) {
        self.asked.store(false, Ordering::Relaxed);
        *lock(&self.times) = Times::default();
        self.turns.reset();
    }

    /// Looks after one more link.
    fn takes(self: &Arc<Self>, watched: &Arc<Watched>) {
        let mut links = lock(&self.links);
        links.all.retain(|link| link.strong_count() > 0);
        links.all.push(Arc::downgrade(watched));
        // What is known of the port is not known of this address.
        self.asked.store(true, Ordering::Relaxed);
        if !links.attended && !self.driven.load(Ordering::Relaxed) {
            let begun = self.begins();
            links.attended = begun.is_ok();
            if let Err(e) = begun {
                tracing::warn!("no thread to look at RDMA ports, so the engines do: {e}");
                self.driven.store(true, Ordering::Relaxed);
            }
        }
        drop(links);
        self.rouse();
    }

    /// Begins the thread.
    fn begins(self: &Arc<Self>) -> std::io::Result<()> {
        let bell = Arc::new(EventFd::new()?);
        *lock(&self.bell) = Some(bell.clone());
        let looker = self.clone();
        std::thread::Builder::new()
            .name("pushgate-look".into())
            .spawn(move || looker.attends(&bell))
            .map(drop)
    }

    fn rouse(&self) {
        if let Some(bell) = &*lock(&self.bell) {
            bell.ring();
        }
    }

    fn watched(&self) -> Vec<Arc<Watched>> {
        lock(&self.links).all.iter().filter_map(Weak::upgrade).collect()
    }

    /// What the thread does, until no link is left.
    #[allow(clippy::disallowed_methods, reason = "this thread waits for the device, with the clock")]
    fn attends(&self, bell: &EventFd) {
        let begin = Instant::now();
        *lock(&self.times) = Times::default();
        let now = || begin.elapsed().as_nanos() as u64;
        loop {
            bell.drain();
            let watched = self.watched();
            {
                let mut links = lock(&self.links);
                links.all.retain(|link| link.strong_count() > 0);
                // The list above has what is left alive.
                if watched.is_empty() && links.all.is_empty() {
                    links.attended = false;
                    *lock(&self.bell) = None;
                    return;
                }
            }
            self.turn(&watched, now());
            let limit = lock(&self.times).until_look(now());
            let limit =
                Timespec { tv_sec: (limit / 1_000_000_000) as i64, tv_nsec: (limit % 1_000_000_000) as i64 };
            let devices = distinct(&watched);
            let fds = devices.iter().map(|device| device.async_fd()).chain([bell.as_fd()]);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // A wait that fails, as with a signal, is a look that comes early.
            let _ = poll(&mut fds, Some(&limit));
            // However many events come, and however many links ask.
            std::thread::sleep(Duration::from_nanos(SHORTEST));
        }
    }

    /// Takes the events that wait and looks at the port, each if it is due.
    fn turn(&self, watched: &[Arc<Watched>], now: u64) {
        let mut times = lock(&self.times);
        if self.driven.load(Ordering::Relaxed) {
            if is_within(times.events, now, SHORTEST) {
                return;
            }
            times.events = Some(now);
        }
        let mut news = false;
        for device in distinct(watched) {
            news |= device.take_events(|name| {
                let named = watched.iter().filter(|one| one.names.contains(&name));
                named.for_each(|one| one.in_error.store(true, Ordering::Relaxed));
            });
        }
        // Of many that ask at once, and of a flood of events, comes one look.
        let asked = self.asked.swap(false, Ordering::Relaxed) || news;
        if asked {
            times.wary_until = now + SETTLE + SOON;
        }
        if asked || times.until_look(now) == 0 {
            (times.looked, times.amiss) = (Some(now), look(watched));
        }
    }
}

/// The devices of links, each once.
fn distinct(watched: &[Arc<Watched>]) -> Vec<&Arc<Device>> {
    let all: BTreeMap<_, _> =
        watched.iter().map(|one| (Arc::as_ptr(&one.device).addr(), &one.device)).collect();
    all.into_values().collect()
}

/// Looks what is wrong with the ways that links take out of this host, and notes for each the farthest-reaching cause. True if anything is.
fn look(watched: &[Arc<Watched>]) -> bool {
    // All contexts are of one port: what one of them says of the port holds for all, but each may be lost by itself.
    let mut port = None;
    let devices: BTreeMap<usize, Option<u32>> = distinct(watched)
        .into_iter()
        .map(|device| {
            let found = if device.is_lost() {
                Some(abi::PUSHGATE_DOWN_DEVICE)
            } else {
                port = port.or_else(|| device.query_port().ok().map(|port| port.active));
                match port {
                    Some(true) => None,
                    Some(false) => Some(abi::PUSHGATE_DOWN_PORT),
                    None => Some(abi::PUSHGATE_DOWN_DEVICE),
                }
            };
            (Arc::as_ptr(device).addr(), found)
        })
        .collect();
    // Of the links' addresses there are few.
    let (mut entries, mut addresses) = (Vec::<(&GidEntry, Option<u32>)>::new(), None);
    let mut amiss = false;
    for one in watched {
        let known = entries.iter().find(|(entry, _)| *entry == &one.entry).map(|(_, found)| *found);
        let of_entry = known.unwrap_or_else(|| {
            let found = if is_gone(one.entry.netdev.as_deref()) {
                Some(abi::PUSHGATE_DOWN_DEVICE)
            } else {
                one.device.has_lost(&one.entry).then_some(abi::PUSHGATE_DOWN_ADDRESS)
            };
            entries.push((&one.entry, found));
            found
        });
        // A host that can't be asked has the address still.
        let mut has = |ip: &IpAddr| {
            let all = addresses.get_or_insert_with(netlink::addresses).as_ref();
            all.map_or(true, |all| all.values().flatten().any(|held| held == ip))
        };
        let of_ip = || one.ip.as_ref().is_some_and(|ip| !has(ip)).then_some(abi::PUSHGATE_DOWN_ADDRESS);
        let of_device = devices[&Arc::as_ptr(&one.device).addr()];
        let [device, address] = [of_device, of_entry].map(|found| found.unwrap_or(0));
        // The interface of a device that was removed goes too.
        let found = match address {
            abi::PUSHGATE_DOWN_DEVICE => address,
            _ if device != 0 => device,
            _ => of_entry.or_else(of_ip).unwrap_or(0),
        };
        one.found.store(found, Ordering::Relaxed);
        amiss |= found != 0;
    }
    amiss
}

/// Whether a network interface is gone.
fn is_gone(netdev: Option<&str>) -> bool {
    netdev.is_some_and(|name| !Path::new("/sys/class/net").join(name).exists())
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;
    use std::os::fd::{IntoRawFd, OwnedFd};
    use std::ptr::null_mut;
    use std::sync::Condvar;

    use pushgate_rdma_core_sys as sys;
    use pushgate_tests::hang;

    use super::super::config::Config;
    use super::super::kinds::{Kind, Protocol};
    use super::super::mock::{self, Mock};
    use super::super::verbs_link::tests::pair;
    use super::*;
    use pushgate_link::{Link, LinkDown};

    const MS: u64 = 1_000_000;

    /// Firmware of one device.
    struct Firmware {
        /// Hangs, and how many queries of the port wait for it.
        hangs: Mutex<(bool, u32)>,
        changed: Condvar,
        down: AtomicBool,
    }

    impl Firmware {
        const fn new() -> Self {
            Firmware { hangs: Mutex::new((false, 0)), changed: Condvar::new(), down: AtomicBool::new(false) }
        }

        fn hangs(&self, hangs: bool) {
            lock(&self.hangs).0 = hangs;
            self.changed.notify_all();
        }

        fn queried(&self) {
            let mut hangs = lock(&self.hangs);
            hangs.1 += 1;
            self.changed.notify_all();
            let (mut hangs, waited) =
                self.changed.wait_timeout_while(hangs, hang(), |hangs| hangs.0).unwrap();
            // A thread that the test needs waits for the firmware. In a function of C this ends the process.
            assert!(!waited.timed_out(), "an engine waits for the firmware");
            hangs.1 -= 1;
        }

        /// Waits until a query does not return.
        fn holds_a_query(&self) {
            let (hangs, waited) =
                self.changed.wait_timeout_while(lock(&self.hangs), hang(), |hangs| hangs.1 == 0).unwrap();
            assert!(!waited.timed_out() && hangs.1 == 1, "one look at a time");
        }
    }

    static FIRMWARE: Firmware = Firmware::new();
    static SOUND: Firmware = Firmware::new();

    unsafe extern "C" fn query<const HANGS: bool>(
        context: *mut sys::ibv_context,
        port: u8,
        to: *mut sys::_compat_ibv_port_attr,
    ) -> c_int {
        let firmware = if HANGS { &FIRMWARE } else { &SOUND };
        firmware.queried();
        // SAFETY: the caller's promise.
        let result = unsafe { mock::query_port(context, port, to) };
        if firmware.down.load(Ordering::Relaxed) {
            // SAFETY: as above; the attributes begin as those of this type do.
            unsafe { (*to.cast::<sys::ibv_port_attr>()).state = sys::ibv_port_state::IBV_PORT_DOWN };
        }
        result
    }

    /// A device at which a thread looks.
    fn attended<const HANGS: bool>() -> Mock {
        let mut mock = Mock::with_functions(null_mut(), Kind::of(Protocol::Ib, 0), |verbs, context| {
            verbs.ibv_query_port = Ok(query::<HANGS>);
            let silent: OwnedFd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            context.async_fd = silent.into_raw_fd();
        });
        Arc::get_mut(&mut mock.device).expect("nobody has it yet").looker =
            Looker::new(false, Turns::of_host());
        mock
    }

    fn until(mut done: impl FnMut() -> bool) {
        #[allow(clippy::disallowed_methods, reason = "the thread under test keeps real time")]
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < hang(), "it did not come to pass");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    #[test]
    fn p7_a_query_of_the_port_that_does_not_return_holds_up_no_queue_pair_of_the_engine() {
        let mock = attended::<true>();
        let [mut a, mut peer] = pair(&mock, &Config::default());
        FIRMWARE.hangs(true);
        FIRMWARE.holds_a_query();
        // Another queue pair may be made only where its own query returns; those that are there go on, and one breaks.
        mock::complete(1, sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        a.signal_all();
        let mut now = 0;
        let broken = loop {
            now += 10 * MS;
            assert!(now < 10_000 * MS, "the link that broke does not say so");
            // Until its only look of before is done, the firmware answers nobody.
            peer.check(now).unwrap();
            a.poll_send(0).ok();
            a.is_quiet();
            if let Err(down) = a.check(now) {
                break down;
            }
        };
        assert_eq!(broken, LinkDown::Failed { cause: abi::PUSHGATE_DOWN_RETRY, by_peer: true });
        FIRMWARE.holds_a_query();
        FIRMWARE.hangs(false);
    }

    #[test]
    fn p7_a_port_that_goes_down_is_seen_by_a_thread_that_ends_with_the_last_link() {
        let mock = attended::<false>();
        let looker = mock.device.looker.clone();
        let attended = || lock(&looker.links).attended;
        assert!(!attended(), "nobody waits");
        let begin = Instant::now();
        let mut pairs = [pair(&mock, &Config::default()), pair(&mock, &Config::default())];
        assert!(attended());
        SOUND.down.store(true, Ordering::Relaxed);
        for link in pairs.iter_mut().flatten() {
            let mut failed = None;
            until(|| {
                failed = link.check(begin.elapsed().as_nanos() as u64).err();
                failed.is_some()
            });
            let cause = abi::PUSHGATE_DOWN_PORT;
            assert_eq!(failed, Some(LinkDown::Failed { cause, by_peer: false }));
        }
        let [first, second] = pairs;
        drop(first);
        assert!(attended());
        drop(second);
        until(|| !attended());
        // Another link has another thread.
        drop(pair(&mock, &Config::default()));
        until(|| !attended());
    }

    #[test]
    fn p7_an_event_that_names_a_queue_pair_concerns_its_link_alone() {
        let mock = Mock::new(0);
        let watch = |names| Watch::new(&mock.device, &GidEntry::none(), None, names);
        let (one, other, third) = (watch([1, 2]), watch([3, 4]), watch([5, 6]));
        mock::say_of(sys::ibv_event_type::IBV_EVENT_COMM_EST, 1);
        mock::say_of(sys::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR, 3);
        mock::say_of(sys::ibv_event_type::IBV_EVENT_CQ_ERR, 6);
        one.drive(0);
        assert_eq!([&one, &other, &third].map(Watch::is_in_error), [false, true, true]);
    }
}
