//! The end that listens: a door, and the connections on their way through it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::crowd::{Crowd, Place};
use super::passage::Passage;
use super::{Counts, DoorError, PASSAGE, Refused, Stream, Terms};

/// How long a process without descriptors takes in nobody.
const NOT_NOW: Duration = Duration::from_millis(100);
/// How many connections, and how many that said something, one look takes.
const AT_ONCE: usize = 64;

/// What a door spends on connections that are on their way.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many may be on their way that have proved nothing, and as many again that have proved the secret. When one more comes, one
    /// of the address with the most makes room.
    pub places: usize,
    /// The most bytes of a greeting.
    pub greeting: usize,
    /// How long one may take from its arrival to the end of its greeting.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { places: 64, greeting: 1024, time: PASSAGE }
    }
}

/// A connection that has come through.
#[derive(Debug)]
pub struct Arrival {
    /// The connection, after the greeting.
    pub stream: Stream,
    /// What the dialer says it wants.
    pub greeting: Vec<u8>,
    /// Where the dialer is.
    pub from: SocketAddr,
}

/// A listening socket that lets those through who know the secret.
///
/// The descriptor ([`AsFd`]) is readable when there is something to do: an owner that polls adds it to its set and calls
/// [`Door::next`] until there is nothing; nothing in it waits. A thread of its own calls [`Door::wait`].
pub struct Door {
    /// One for each address; at least one.
    listeners: Vec<TcpListener>,
    terms: Terms,
    limits: Limits,
    /// Has the listeners, the timer and all connections that are on their way.
    epoll: OwnedFd,
    /// Fires when the oldest connection is late, or the listeners may be looked at again.
    timer: OwnedFd,
    state: Mutex<State>,
    counts: Arc<Counts>,
}

struct State {
    /// In the order of arrival.
    on_their_way: BTreeMap<u64, OnItsWay>,
    crowd: Crowd,
    through: VecDeque<Arrival>,
    /// Until then no descriptor is sought for another connection.
    paused: Option<Instant>,
}

struct OnItsWay {
    passage: Passage,
    place: Place,
    from: SocketAddr,
    until: Instant,
    awaits: PollFlags,
}

/// The most listeners of a door.
const MOST: u64 = 64;
const TIMER: u64 = u64::MAX;
/// Connections have numbers below, listeners those from the next one on.
const STRANGERS: u64 = TIMER - 1 - MOST;

impl Door {
    /// Listens at the first free one of these ports; port 0 is any free one. An address that other hosts reach takes a
    /// secret.
    pub fn listen(
        ip: IpAddr,
        ports: RangeInclusive<u16>,
        terms: Terms,
        limits: Limits,
    ) -> Result<Door, DoorError> {
        check(ip, &terms)?;
        let mut last = io::Error::new(ErrorKind::InvalidInput, "an empty range of ports");
        for port in ports.clone() {
            match TcpListener::bind((ip, port)) {
                Ok(listener) => return Door::on(listener, terms, limits),
                Err(e) => {
                    let taken = e.kind() == ErrorKind::AddrInUse;
                    last = e;
                    if !taken {
                        break;
                    }
                }
            }
        }
        let what = match (*ports.start(), *ports.end()) {
            (port, end) if port == end => format!("listening at {}", SocketAddr::new(ip, port)),
            (first, last) => format!("listening at {ip}, ports {first} to {last}"),
        };
        Err(DoorError::Io { what, error: last })
    }

    /// Listens with a socket that is bound already. An address that other hosts reach takes a secret.
    pub fn on(listener: TcpListener, terms: Terms, limits: Limits) -> Result<Door, DoorError> {
        Door::on_all(vec![listener], terms, limits)
    }

    /// Listens as [`Door::on`] does, with sockets of several addresses, at least one.
    pub fn on_all(listeners: Vec<TcpListener>, terms: Terms, limits: Limits) -> Result<Door, DoorError> {
        assert!(!listeners.is_empty() && listeners.len() as u64 <= MOST, "{} listeners", listeners.len());
        let made = || -> io::Result<(OwnedFd, OwnedFd, Vec<IpAddr>)> {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            let into = |fd: BorrowedFd<'_>, number| {
                epoll::add(&epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
            };
            let mut ips = Vec::new();
            for (listener, number) in listeners.iter().zip(STRANGERS + 1..) {
                listener.set_nonblocking(true)?;
                into(listener.as_fd(), number)?;
                ips.push(listener.local_addr()?.ip());
            }
            into(timer.as_fd(), TIMER)?;
            Ok((epoll, timer, ips))
        };
        let failed = |error| DoorError::Io { what: "a listening socket".into(), error };
        let (epoll, timer, ips) = made().map_err(failed)?;
        ips.into_iter().try_for_each(|ip| check(ip, &terms))?;
        let state = State {
            on_their_way: BTreeMap::new(),
            crowd: Crowd::new(limits.places),
            through: VecDeque::new(),
            paused: None,
        };
        Ok(Door { listeners, terms, limits, epoll, timer, state: Mutex::new(state), counts: Arc::default() })
    }

    /// The address at which the door listens; the first of several.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listeners[0].local_addr()
    }

    /// All addresses at which the door listens.
    pub fn local_addrs(&self) -> io::Result<Vec<SocketAddr>> {
        self.listeners.iter().map(TcpListener::local_addr).collect()
    }

    /// On what terms connections come through.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// How many connections came through, and why others did not.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// How many connections are on their way.
    pub fn on_their_way(&self) -> usize {
        self.state().on_their_way.len()
    }

    /// Takes in what has arrived, and returns a connection that has come through, if there is one. Never waits. Call it until
    /// there is none.
    pub fn next(&self) -> Option<Arrival> {
        let mut state = self.state();
        if state.through.is_empty() {
            self.look(&mut state);
        }
        state.through.pop_front()
    }

    /// Waits for a connection that has come through; `None` once the time is over, or `bell` is readable.
    pub fn wait(&self, until: Option<Instant>, bell: Option<BorrowedFd<'_>>) -> io::Result<Option<Arrival>> {
        loop {
            if let Some(arrival) = self.next() {
                return Ok(Some(arrival));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let mut fds = vec![PollFd::new(self, PollFlags::IN)];
            fds.extend(bell.map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)));
            match poll(&mut fds, left.map(timespec).as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            if fds.get(1).is_some_and(|bell| !bell.revents().is_empty()) {
                return Ok(None);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn look(&self, state: &mut State) {
        let mut events = [const {
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }
        }; AT_ONCE];
        let now_is_enough = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(n) = epoll::wait(&self.epoll, &mut events, Some(&now_is_enough)) else { return };
        for event in &events[..n] {
            match event.data.u64() {
                // The listeners come last: connections that have said something go before those that make them make room.
                STRANGERS.. => {}
                number => self.advance(state, number),
            }
        }
        self.make_room(state);
        for event in &events[..n] {
            match event.data.u64() {
                TIMER => {
                    let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                }
                number @ STRANGERS.. => {
                    let listener = self.listeners.get((number - STRANGERS - 1) as usize);
                    listener.into_iter().for_each(|listener| self.accept(state, listener));
                }
                _ => {}
            }
        }
        self.tidy(state);
    }

    /// Lets connections go that are late, and sets the timer for the next one.
    fn tidy(&self, state: &mut State) {
        let now = Instant::now();
        while let Some((&oldest, _)) = state.on_their_way.first_key_value().filter(|(_, on)| on.until <= now)
        {
            self.let_go(state, oldest, Refused::Late);
        }
        if state.paused.is_some_and(|until| until <= now) {
            state.paused = None;
            self.listens(true);
        }
        let late = state.on_their_way.first_key_value().map(|(_, oldest)| oldest.until);
        let next = late.into_iter().chain(state.paused).min();
        // A zero would switch the timer off.
        let left = |at: Instant| at.saturating_duration_since(now).max(Duration::from_nanos(1));
        let it_value = timespec(next.map_or(Duration::ZERO, left));
        let time = Itimerspec { it_interval: timespec(Duration::ZERO), it_value };
        let set = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time);
        debug_assert!(set.is_ok());
    }

    /// Whether the descriptor reports connections that wait to be taken in.
    fn listens(&self, listens: bool) {
        let flags = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (listener, number) in self.listeners.iter().zip(STRANGERS + 1..) {
            let _ = epoll::modify(&self.epoll, listener, epoll::EventData::new_u64(number), flags);
        }
    }

    fn accept(&self, state: &mut State, listener: &TcpListener) {
        for _ in 0..AT_ONCE {
            match listener.accept() {
                Ok((socket, from)) => {
                    let passage = match Passage::listener(socket, &self.terms, self.limits.greeting) {
                        Ok(passage) => passage,
                        Err(e) => {
                            self.counts.refused(from, Refused::Io(e.kind()));
                            continue;
                        }
                    };
                    let place = state.crowd.comes(from.ip());
                    let number = place.number;
                    let awaits = PollFlags::IN;
                    let data = epoll::EventData::new_u64(number);
                    if let Err(e) = epoll::add(&self.epoll, passage.stream(), data, epoll::EventFlags::IN) {
                        state.crowd.goes(place);
                        self.counts.refused(from, Refused::Io(io::Error::from(e).kind()));
                        continue;
                    }
                    let until = Instant::now() + self.limits.time;
                    state.on_their_way.insert(number, OnItsWay { passage, place, from, until, awaits });
                    // Its first bytes have often come already.
                    self.advance(state, number);
                    self.make_room(state);
                }
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // No descriptor is left, for example. That of a stranger is free now; if there is none, the connection waits in the
                // listener, which is not looked at for a while.
                Err(e) => match state.crowd.stranger() {
                    Some(number) => self.let_go(state, number, Refused::Crowded),
                    None => {
                        tracing::warn!("taking in a connection: {e}");
                        state.paused = Some(Instant::now() + NOT_NOW);
                        self.listens(false);
                        return;
                    }
                },
            }
        }
    }

    /// Lets connections go until all others have a place.
    fn make_room(&self, state: &mut State) {
        while let Some(number) = state.crowd.makes_room() {
            // Others were taken in since this one was looked at; what it said meanwhile may keep it.
            self.advance(state, number);
            if state.crowd.makes_room() == Some(number) {
                self.let_go(state, number, Refused::Crowded);
            }
        }
    }

    /// Ends a connection. A forked child of ours may hold the socket too, so closing it is not enough: it would stay in the set,
    /// and readable.
    fn let_go(&self, state: &mut State, number: u64, why: Refused) {
        let Some(on) = self.take(state, number) else { return };
        on.passage.stream().shutdown();
        self.counts.refused(on.from, why);
    }

    /// Takes a connection out of those on their way.
    fn take(&self, state: &mut State, number: u64) -> Option<OnItsWay> {
        let on = state.on_their_way.remove(&number)?;
        state.crowd.goes(on.place);
        let _ = epoll::delete(&self.epoll, on.passage.stream());
        Some(on)
    }

    fn advance(&self, state: &mut State, number: u64) {
        let Some(on) = state.on_their_way.get_mut(&number) else { return };
        match on.passage.advance() {
            Ok(false) => {
                let awaits = on.passage.awaits();
                if awaits != on.awaits {
                    let flags = match awaits {
                        PollFlags::OUT => epoll::EventFlags::OUT,
                        _ => epoll::EventFlags::IN,
                    };
                    let data = epoll::EventData::new_u64(number);
                    let _ = epoll::modify(&self.epoll, on.passage.stream(), data, flags);
                    on.awaits = awaits;
                }
                let heard = on.passage.heard();
                state.crowd.hears(&mut on.place, heard);
            }
            Ok(true) => {
                let on = self.take(state, number).expect("it is there");
                self.counts.accepted();
                let (stream, greeting) = on.passage.finish();
                state.through.push_back(Arrival { stream, greeting, from: on.from });
            }
            Err(why) => self.let_go(state, number, why),
        }
    }
}

/// Whether a door on these terms may listen at this address.
fn check(ip: IpAddr, terms: &Terms) -> Result<(), DoorError> {
    match terms.secret.is_public() && !ip.to_canonical().is_loopback() {
        true => Err(DoorError::Open(ip)),
        false => Ok(()),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Door({:?}, {:?})", self.listeners, self.terms)
    }
}
