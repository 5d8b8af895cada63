//! What an agent's calls and its threads share. One lock guards the connections; copies of host memory are made outside of it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate::{Comm, Context, HostEnd};
use pushgate_door::{Door, Secret};
use pushgate_driver_shim::eventfd::EventFd;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::gpu::Gpus;
use crate::greet::{self, Connection};
use crate::session::{Ended, Session, Shared};
use crate::status::{Result, Status};
use crate::transfer::{Copying, Transfer};
use crate::wire::TOKEN;

/// How long the thread that progresses waits at most for work.
const REST: Duration = Duration::from_millis(100);
/// While the program polls without a pause, the thread looks this often whether it still does: it has polled this number of times.
const POLLED: Duration = Duration::from_micros(500);
const OFTEN: u64 = 20;
/// How long an end waits at most for what was posted.
#[cfg(not(test))]
pub const LINGER: Duration = Duration::from_secs(2);
/// Tests share two cores with others.
#[cfg(test)]
pub const LINGER: Duration = crate::tests::HANG;
/// Between two attempts to reach a peer.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// How long the thread looks without a pause for copies of GPUs to end, and how long it pauses then.
const SPIN: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_micros(20);
/// Peers that join, and such as have not taken a farewell, at once.
const MOST_JOINING: usize = 32;

/// What waits for a connection.
pub enum Waiting {
    Transfer(Arc<Transfer>),
    Note(Vec<u8>),
}

impl Waiting {
    /// Whether the program still wants it.
    fn is_due(&self) -> bool {
        match self {
            Waiting::Transfer(transfer) => transfer.is_active(),
            Waiting::Note(_) => true,
        }
    }
}

/// Notes that a connection has ended.
fn part(peers: &mut HashMap<String, Peer>, number: u64) {
    peers.values_mut().filter(|peer| peer.session == Some(number)).for_each(|peer| peer.session = None);
}

/// An agent whose connection was loaded.
pub struct Peer {
    pub connection: Connection,
    pub session: Option<u64>,
    pub dialling: bool,
    pub waiting: Vec<Waiting>,
}

impl Peer {
    /// Ends what waits for a connection that there will not be.
    fn give_up(&mut self, name: &str, status: Status) {
        let mut notes = 0;
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Transfer(transfer) => transfer.end(status),
                Waiting::Note(_) => notes += 1,
            }
        }
        if notes > 0 {
            tracing::error!(peer = name, "{notes} notifications were not sent");
        }
    }
}

pub struct State {
    pub shared: Shared,
    /// By number: older ones first.
    pub sessions: BTreeMap<u64, Session>,
    pub peers: HashMap<String, Peer>,
    pub transfers: HashMap<u64, Arc<Transfer>>,
    pub next: u64,
    pub begun: Vec<Arc<Copying>>,
    /// Threads that say farewell to peers whose connections have ended.
    pub farewells: Vec<JoinHandle<()>>,
}

impl State {
    /// How many peers of connections that have ended have not taken the farewell.
    pub fn farewells_under_way(&self) -> usize {
        self.farewells.iter().filter(|thread| !thread.is_finished()).count()
    }

    /// Whether anything waits for GPUs or for memory that is being registered.
    pub fn needs_looks(&self) -> bool {
        let Shared { graves, within, .. } = &self.shared;
        !graves.is_empty() || !within.is_empty() || self.sessions.values().any(Session::needs_looks)
    }
}

/// Copies that threads make.
#[derive(Default)]
pub struct Copies {
    pub waiting: Mutex<VecDeque<Arc<Copying>>>,
    pub some: Condvar,
    pub threads: AtomicUsize,
}

pub struct Core {
    pub name: String,
    pub instance: String,
    pub direct: bool,
    /// The window of a connection, in bytes.
    window: AtomicU64,
    /// The window where the first one can't be: an RDMA device may send shorter messages only.
    least_window: u64,
    pub context: Context,
    pub connection: Connection,
    pub state: Mutex<State>,
    /// The cores of the thread that made the agent.
    cores: Option<CpuSet>,
    /// How often the program has polled, and so made progress.
    pub polled: AtomicU64,
    pub closing: AtomicBool,
    pub joining: AtomicUsize,
    pub copies: Copies,
}

impl Core {
    /// The engine of an agent without connections.
    pub fn new(
        name: &str,
        instance: String,
        direct: bool,
        [window, least_window]: [u64; 2],
        context: Context,
        (connection, gpus): (Connection, Gpus),
    ) -> Core {
        Core {
            name: name.into(),
            instance,
            direct,
            window: AtomicU64::new(window),
            least_window,
            context,
            connection,
            cores: sched_getaffinity(None).ok(),
            state: Mutex::new(State {
                shared: Shared::new(gpus),
                sessions: BTreeMap::new(),
                peers: HashMap::new(),
                transfers: HashMap::new(),
                next: 0,
                begun: Vec::new(),
                farewells: Vec::new(),
            }),
            polled: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            joining: AtomicUsize::new(0),
            copies: Copies::default(),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_closing(&self) -> bool {
        // Relaxed: see `Agent::drop`.
        self.closing.load(Ordering::Relaxed)
    }

    // ------------------------------------------------------------ the threads

    /// Progresses while the program does not.
    pub fn run(self: &Arc<Self>) {
        let (mut seen, mut last, mut moved) = (0, Instant::now(), false);
        while !self.is_closing() {
            // A program that polls without a pause makes all the progress itself.
            let polled = self.polled.load(Ordering::Relaxed);
            let often = polled - std::mem::replace(&mut seen, polled) >= OFTEN;
            if often {
                std::thread::sleep(POLLED);
                continue;
            }
            // GPUs wake nobody, nor do threads that register memory.
            let looks = self.state().needs_looks();
            // A queue pair that has ended wakes nobody for messages that are left.
            let waited = if looks || moved {
                self.context.drive().map(drop)
            } else {
                self.context.rest(REST).map(drop)
            };
            if let Err(e) = waited {
                tracing::error!("the engine has ended: {e}");
                return;
            }
            moved = self.progress();
            if moved {
                last = Instant::now();
            } else if looks && last.elapsed() > SPIN {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Lets peers in.
    pub fn let_in(self: &Arc<Self>, door: &Door, bell: &EventFd) {
        while !self.is_closing() {
            let arrival = match door.wait(None, Some(bell.as_fd())) {
                Ok(Some(arrival)) => arrival,
                Ok(None) => continue,
                Err(e) => {
                    tracing::error!("nobody can connect any more: {e}");
                    return;
                }
            };
            let leaving = self.state().farewells_under_way();
            // Relaxed: a bound, of this thread alone.
            let room = self.joining.load(Ordering::Relaxed) + leaving < MOST_JOINING;
            let visitor = match greet::receive(&arrival, &self.instance, room) {
                Ok(visitor) => visitor,
                Err(why) => {
                    tracing::warn!(from = %arrival.from, "a peer was refused: {why}");
                    continue;
                }
            };
            self.joining.fetch_add(1, Ordering::Relaxed);
            let core = self.clone();
            let joins = self.spawn("pushgate-join", move || {
                let made = visitor.join(&core.context, core.window());
                core.joining.fetch_sub(1, Ordering::Relaxed);
                match made {
                    Ok(made) => core.connected(visitor.name, visitor.instance, made),
                    // The peer dials again.
                    Err(e) if e.is_config() && core.takes_less() => {}
                    Err(why) => tracing::warn!(peer = visitor.name, "a peer that connected has gone: {why}"),
                }
            });
            if joins.is_none() {
                self.joining.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Starts a thread on the cores on which the agent was made: a program may have bound the thread that calls now. `None`: no thread
    /// can be started, and `run` was dropped.
    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Option<JoinHandle<()>> {
        let cores = self.cores;
        let run = move || {
            if let Some(cores) = cores {
                let _ = sched_setaffinity(None, &cores);
            }
            run();
        };
        let started = std::thread::Builder::new().name(name.into()).spawn(run);
        started.inspect_err(|e| tracing::error!("a thread: {e}")).ok()
    }

    // ------------------------------------------------------------ connections

    /// Dials a peer, unless there is a connection or a dial.
    pub fn dial(self: &Arc<Self>, state: &mut State, name: &str) -> Result<()> {
        let peer = state.peers.get_mut(name).ok_or(Status::NotFound)?;
        if peer.session.is_some() || std::mem::replace(&mut peer.dialling, true) {
            return Ok(());
        }
        let (core, name, connection) = (self.clone(), name.to_owned(), peer.connection.clone());
        if self.spawn("pushgate-dial", move || core.reach(name, &connection)).is_none() {
            peer.dialling = false;
            return Err(Status::Backend);
        }
        Ok(())
    }

    /// Dials a peer until the peer is reached, for the setting `timeout` at most.
    fn reach(self: &Arc<Self>, name: String, connection: &Connection) {
        let (begin, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            match connection.dial(&self.context, &self.name, &self.instance, self.window()) {
                Ok(made) => return self.connected(name, connection.instance.clone(), made),
                Err(e) if e.unfit && self.takes_less() => {
                    tracing::info!(peer = name, "a smaller window: {}", e.why)
                }
                Err(e)
                    if e.again
                        && begin.elapsed() < self.context.settings().timeout
                        && self.seeks(&name, connection) =>
                {
                    tracing::info!(peer = name, "the agent was not reached, and is dialled again: {}", e.why);
                    std::thread::sleep(pause);
                    pause = LAST_PAUSE.min(2 * pause);
                }
                Err(e) => return self.unreached(&name, connection, &e.why),
            }
        }
    }

    fn window(&self) -> u64 {
        // Relaxed: a number.
        self.window.load(Ordering::Relaxed)
    }

    /// Lets later connections have the least window. False: they have it already.
    fn takes_less(&self) -> bool {
        self.window.swap(self.least_window, Ordering::Relaxed) != self.least_window
    }

    /// Whether the peer is still to be reached in this way.
    fn seeks(&self, name: &str, connection: &Connection) -> bool {
        let state = self.state();
        let peer = state.peers.get(name).filter(|peer| peer.connection == *connection);
        !self.is_closing() && peer.is_some_and(|peer| peer.session.is_none())
    }

    pub fn unreached(&self, name: &str, connection: &Connection, why: &str) {
        let mut state = self.state();
        let Some(peer) = state.peers.get_mut(name).filter(|peer| peer.connection == *connection) else {
            return;
        };
        peer.dialling = false;
        if peer.session.is_some() {
            return;
        }
        tracing::warn!(peer = name, "the agent can't be reached: {why}");
        peer.give_up(name, Status::RemoteDisconnect);
    }

    pub fn connected(self: &Arc<Self>, name: String, instance: String, (comm, end): (Comm, HostEnd)) {
        let Ok((_, token)) = Secret::random::<TOKEN>() else { return };
        let mut state = self.state();
        if self.is_closing() {
            return;
        }
        state.next += 1;
        let number = state.next;
        let session = Session::new(number, name, instance.clone(), comm, end, self.direct, token);
        state.sessions.insert(number, session);
        let State { shared, peers, sessions, begun, .. } = &mut *state;
        let session = sessions.get_mut(&number).expect("inserted above");
        for peer in peers.values_mut().filter(|peer| peer.connection.instance == instance) {
            peer.dialling = false;
            peer.session.get_or_insert(number);
            for waiting in std::mem::take(&mut peer.waiting) {
                match waiting {
                    Waiting::Transfer(transfer) if transfer.is_active() => {
                        begun.extend(session.start(transfer, &mut shared.registrations))
                    }
                    Waiting::Transfer(_) => {}
                    Waiting::Note(text) => session.notify(&text),
                }
            }
        }
        self.advance(&mut state);
        let begun = std::mem::take(&mut state.begun);
        drop(state);
        begun.into_iter().for_each(|copying| self.copy(copying));
        let _ = self.context.drive();
    }

    /// Hands something to a peer's connection, or keeps it until there is one.
    pub fn start(self: &Arc<Self>, state: &mut State, what: Waiting, name: &str) -> Result<()> {
        let State { shared, peers, sessions, begun, .. } = &mut *state;
        let peer = peers.get_mut(name).ok_or(Status::NotFound)?;
        if let Waiting::Transfer(transfer) = &what
            && transfer.instance != peer.connection.instance
        {
            return Err(Status::RemoteDisconnect);
        }
        match peer.session.and_then(|number| sessions.get_mut(&number)) {
            Some(session) => match what {
                Waiting::Transfer(transfer) => {
                    begun.extend(session.start(transfer, &mut shared.registrations))
                }
                Waiting::Note(text) => session.notify(&text),
            },
            None => {
                self.dial(state, name)?;
                state.peers.get_mut(name).expect("dialled above").waiting.push(what);
            }
        }
        Ok(())
    }

    /// Forgets a peer, and ends its connection. False: it was not known.
    pub fn forget(&self, state: &mut State, name: &str) -> bool {
        let Some(mut peer) = state.peers.remove(name) else { return false };
        peer.give_up(name, Status::Canceled);
        if let Some(number) = peer.session {
            self.end(state, number, Status::Canceled);
        }
        true
    }

    /// Waits for a moment until a peer, or each peer, has all that was posted: a notification may be the last thing.
    pub fn linger(self: &Arc<Self>, with: Option<&str>) {
        let begin = Instant::now();
        let owes = || {
            let state = self.state();
            let of = |name: &str| with.is_none_or(|with| with == name);
            let dials = |(name, peer): (&String, &Peer)| of(name) && peer.waiting.iter().any(Waiting::is_due);
            let number = with.and_then(|name| state.peers.get(name)?.session);
            let sends = |s: &Session| (with.is_none() || number == Some(s.number)) && !s.is_empty();
            state.peers.iter().any(dials) || state.sessions.values().any(sends)
        };
        while begin.elapsed() < LINGER && owes() {
            self.progress();
            let _ = self.context.drive();
            std::thread::yield_now();
        }
    }

    pub fn end(&self, state: &mut State, number: u64, status: Status) {
        let Some(session) = state.sessions.remove(&number) else { return };
        session.end(&mut state.shared, status);
        self.dismiss(state);
        part(&mut state.peers, number);
    }

    /// Drops connections that have ended, each by a thread of its own: a farewell waits as long as the setting `timeout` for a peer
    /// that takes nothing.
    fn dismiss(&self, state: &mut State) {
        let State { shared, farewells, .. } = state;
        if shared.ended.is_empty() {
            return;
        }
        farewells.retain(|thread| !thread.is_finished());
        // Where no thread can be started, the connection is dropped here.
        let dismissed = shared.ended.drain(..).map(|ended| self.spawn("pushgate-bye", move || drop(ended)));
        farewells.extend(dismissed.flatten());
    }

    /// Cancels a transfer that is under way.
    pub fn cancel(&self, state: &mut State, transfer: &Arc<Transfer>) {
        transfer.cancel();
        state.sessions.values_mut().for_each(|session| session.forget(transfer));
    }

    // --------------------------------------------------------------- progress

    /// Moves all connections on, if no other thread does. True if there was something.
    pub fn progress(self: &Arc<Self>) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return false };
        let some = self.advance(&mut state);
        let begun = std::mem::take(&mut state.begun);
        drop(state);
        begun.into_iter().for_each(|copying| self.copy(copying));
        some
    }

    /// Moves all connections on. True if there was something.
    pub fn advance(&self, state: &mut State) -> bool {
        let State { shared, sessions, peers, begun, .. } = &mut *state;
        let (mut some, mut ended) = (false, Vec::new());
        // Runs of peers whose earlier connections have ended, with messages left: what came over later ones is taken after these.
        let mut draining: Vec<String> = Vec::new();
        for session in sessions.values_mut() {
            let (before, takes) = (session.has_left(), !draining.contains(&session.instance));
            match session.progress(takes, shared, begun) {
                Ok(moved) => {
                    some |= moved;
                    if session.has_left() && !before {
                        tracing::info!(peer = session.peer, "the agent has left");
                        part(peers, session.number);
                    }
                    if session.is_over() {
                        draining.push(session.instance.clone());
                    }
                }
                Err(why) => ended.push((session.number, session.peer.clone(), why)),
            }
        }
        some |= shared.advance(&self.name);
        self.dismiss(state);
        for (number, peer, why) in ended {
            match why {
                Ended::Left => tracing::info!(peer, "the agent has ended the connection"),
                Ended::Failed(why) => tracing::warn!(peer, "the connection has ended: {why}"),
            }
            self.end(state, number, Status::RemoteDisconnect);
            some = true;
        }
        some
    }

    // ----------------------------------------------------------------- copies

    /// Makes a copy: at once if it is small, else with the threads that copy.
    pub fn copy(self: &Arc<Self>, copying: Arc<Copying>) {
        if copying.transfer.is_small() {
            while copying.has_more() {
                self.help(&copying);
            }
            return;
        }
        let mut waiting = self.copies.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back(copying);
        drop(waiting);
        self.copies.some.notify_all();
        // The program's own thread copies too, when it asks how the transfer stands.
        let cores = self.cores.map_or(1, |cores| cores.count() as usize);
        let wanted = (cores / 2).clamp(1, 4);
        if self.copies.threads.fetch_max(wanted, Ordering::Relaxed) == 0 {
            let start = |_: &usize| {
                let core = self.clone();
                self.spawn("pushgate-copy", move || core.copy_all()).is_some()
            };
            // Relaxed: a bound. If none has started, the next copy tries again.
            self.copies.threads.store((0..wanted).filter(start).count(), Ordering::Relaxed);
        }
    }

    pub fn copy_all(self: &Arc<Self>) {
        while !self.is_closing() {
            let mut waiting = self.copies.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            while waiting.front().is_some_and(|copying| !copying.has_more()) {
                waiting.pop_front();
            }
            let Some(copying) = waiting.front().cloned() else {
                let wait = self.copies.some.wait_timeout(waiting, REST);
                drop(wait);
                continue;
            };
            drop(waiting);
            self.help(&copying);
        }
    }

    /// Makes a batch of a copy, and ends the transfer with the last one.
    pub fn help(self: &Arc<Self>, copying: &Arc<Copying>) {
        if !copying.help() {
            if !copying.has_more() {
                std::thread::yield_now();
            }
            return;
        }
        let (transfer, outcome) = (&copying.transfer, copying.outcome());
        if transfer.end_copy(copying, outcome) {
            return;
        }
        let mut state = self.state();
        // With the agent's lock, which a call that posts takes too.
        if !copying.is_current() {
            return;
        }
        if transfer.peer == self.name {
            if let Some(note) =
                transfer.run().note.take().filter(|_| outcome == Status::Success && transfer.is_active())
            {
                state.shared.inbox.push_back((self.name.clone(), note));
            }
            return transfer.end(outcome);
        }
        let number = state.peers.get(&transfer.peer).and_then(|peer| peer.session);
        match number.and_then(|number| state.sessions.get_mut(&number)) {
            Some(session) => session.finish(transfer, outcome),
            None => transfer.end(Status::RemoteDisconnect),
        }
        self.advance(&mut state);
        drop(state);
        let _ = self.context.drive();
    }
}
