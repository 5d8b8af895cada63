//! An agent: what NIXL calls.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate::{Context, Settings};
use pushgate_door::Secret;
use pushgate_driver_shim::eventfd::EventFd;

use crate::engine::{Core, LINGER, Peer, State, Waiting};
use crate::gpu::{Gpus, Offer};
use crate::greet::{self, Connection, LONGEST_NAME};
use crate::on_gpu::Within;
use crate::pieces::{Element, join};
use crate::registrations::{Memory, Published};
#[cfg(test)]
use crate::session::Session;
use crate::session::receiving::LONGEST_NOTE;
use crate::status::{Result, Status};
use crate::transfer::{Copying, Transfer, Way, is_used};
use crate::wire::Place;

/// The least window of a connection: it holds several messages on their way. Those of GPU memory are longer.
const WINDOW: u64 = 8 << 20;
const GPU_WINDOW: u64 = 16 << 20;

/// The setting `stuck` at its largest.
const LONGEST_STUCK: &str = "24h";

/// A release waits for as long at most while nothing moves.
const SILENT: Duration = Duration::from_secs(1);

/// An element of a descriptor list, as the face hands it over.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Described {
    /// Address in its owner's process.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The device's number.
    pub device: u64,
    /// Our number of the registration.
    pub registration: u64,
}

/// An agent.
pub struct Agent {
    pub core: Arc<Core>,
    bell: EventFd,
    threads: Vec<JoinHandle<()>>,
}

/// Each parameter of the backend that is no setting: name and default.
pub const PARAMETERS: [(&str, &str); 2] = [("direct", "true"), ("gpu_context", "own")];

impl Agent {
    /// Makes an agent. Parameters are [`PARAMETERS`] and every setting of pushgate but those that the agent sets: `device`, `drive`,
    /// `proxy`, `rendezvous` and `stuck`.
    pub fn open(
        name: &str,
        parameters: &[(String, String)],
        offer: Offer,
    ) -> std::result::Result<Agent, String> {
        if name.is_empty() || name.len() > LONGEST_NAME {
            return Err(format!("an agent's name has 1 to {LONGEST_NAME} bytes, not {}", name.len()));
        }
        let mut settings = Settings::load().map_err(|e| e.to_string())?;
        let (mut direct, mut own_context) = (true, true);
        for (key, value) in parameters {
            match key.as_str() {
                "direct" => {
                    let allowed = || format!("invalid direct `{value}`: expected true or false");
                    direct = value.parse().map_err(|_| allowed())?;
                }
                "gpu_context" => {
                    own_context = match value.as_str() {
                        "own" => true,
                        "program" => false,
                        _ => return Err(format!("invalid gpu_context `{value}`: expected own or program")),
                    };
                }
                _ => settings.set(key, value).map_err(|e| e.to_string())?,
            }
        }
        for (key, value) in
            [("device", "cpu"), ("drive", "caller"), ("proxy", "thread"), ("rendezvous", "none")]
        {
            settings.set(key, value).map_err(|e| e.to_string())?;
        }
        // A GPU that the program's kernels fill publishes late what it was given to fill, and the engine sees GPUs that fail.
        settings.set("stuck", LONGEST_STUCK).map_err(|e| e.to_string())?;
        let most = if offer == Offer::Nothing { WINDOW } else { GPU_WINDOW };
        let windows = [most, WINDOW].map(|window| settings.window_size.max(window));
        let context = Context::builder().settings(settings).build().map_err(|e| e.to_string())?;
        let (_, instance) = Secret::random::<16>().map_err(|e| format!("a random number: {e}"))?;
        let instance: String = instance.iter().map(|byte| format!("{byte:02x}")).collect();
        let (door, connection) = greet::open(&context, &instance)?;
        let gpus = Gpus::new(offer, own_context);
        let core = Arc::new(Core::new(name, instance, direct, windows, context, (connection, gpus)));
        let mut agent =
            Agent { core, bell: EventFd::new().map_err(|e| format!("eventfd: {e}"))?, threads: Vec::new() };
        let bell = agent.bell.try_clone().map_err(|e| format!("eventfd: {e}"))?;
        agent.spawn("pushgate-nixl", |core| core.run())?;
        agent.spawn("pushgate-door", move |core| core.let_in(&door, &bell))?;
        Ok(agent)
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce(&Arc<Core>) + Send + 'static,
    ) -> std::result::Result<(), String> {
        let core = self.core.clone();
        let started = std::thread::Builder::new().name(name.into()).spawn(move || run(&core));
        self.threads.push(started.map_err(|e| format!("a thread: {e}"))?);
        Ok(())
    }

    /// Registers memory of this process: `memory` is a value of `nixl_mem_t`, `device` the number of a GPU.
    pub fn register(&self, address: u64, length: u64, memory: i32, device: u64) -> Result<u64> {
        let memory = Memory::of(memory)?;
        let mut state = self.core.state();
        let device = match memory {
            Memory::Host => 0,
            Memory::Gpu => state.shared.gpus.check(device, address, length)?,
        };
        state.shared.registrations.add(address, length, memory, device)
    }

    /// What other agents need to know of a registration.
    pub fn publish(&self, key: u64) -> Result<Vec<u8>> {
        let mut state = self.core.state();
        let own = state.shared.registrations.own(key)?;
        let Core { instance, .. } = &*self.core;
        let published = Published {
            instance: instance.clone(),
            key,
            address: own.address,
            length: own.length,
            memory: own.memory,
        };
        Ok(serde_json::to_vec(&published).expect("it has no map"))
    }

    /// Ends a registration. Transfers of this agent that use it are cancelled, and peers that copy directly are waited for.
    pub fn deregister(&self, key: u64) -> Result<()> {
        let core = &self.core;
        let mut state = core.state();
        let State { shared, sessions, transfers, .. } = &mut *state;
        let own = shared.registrations.own(key)?;
        own.ends = true;
        let used = transfers.values().filter(|t| t.uses(key) && (t.is_active() || t.is_copied()));
        let used: Vec<_> = used.cloned().collect();
        own.leased.iter().filter_map(|number| sessions.get_mut(number).map(|s| s.revoke(key))).for_each(drop);
        for transfer in &used {
            core.cancel(&mut state, transfer);
        }
        let (begin, limit) = (Instant::now(), core.context.settings().timeout);
        loop {
            let own = state.shared.registrations.own(key)?;
            let held = !own.leased.is_empty() || used.iter().any(|t| t.is_copied());
            let State { shared, sessions, .. } = &mut *state;
            let own = shared.registrations.own(key)?;
            if !held && !is_used(&own.users) && sessions.values_mut().all(|s| s.let_go(key, own)) {
                state.shared.registrations.remove(key);
                return Ok(());
            }
            if begin.elapsed() >= limit {
                tracing::error!(
                    "a peer did not end its use of a registration within {limit:?}: the memory must stay"
                );
                return Err(Status::Backend);
            }
            core.advance(&mut state);
            drop(state);
            let _ = core.context.drive();
            std::thread::yield_now();
            state = core.state();
        }
    }

    /// How other agents reach this one.
    pub fn connection(&self) -> Vec<u8> {
        self.core.connection.to_bytes()
    }

    /// Notes how an agent is reached.
    pub fn load_connection(&self, peer: &str, connection: &[u8]) -> Result<()> {
        let connection = Connection::from_bytes(connection).map_err(|why| {
            tracing::warn!(peer, "{why}");
            Status::Mismatch
        })?;
        let mut state = self.core.state();
        if state.peers.get(peer).is_some_and(|known| known.connection == connection) {
            return Ok(());
        }
        self.core.forget(&mut state, peer);
        // The agent may have connected by itself.
        let mut sessions = state.sessions.values().filter(|s| !s.has_left());
        let session = sessions.find(|s| s.instance == connection.instance).map(|s| s.number);
        state.peers.insert(peer.into(), Peer { connection, session, dialling: false, waiting: Vec::new() });
        Ok(())
    }

    /// Begins to connect.
    pub fn connect(&self, peer: &str) -> Result<()> {
        if peer == self.core.name {
            return Ok(());
        }
        let mut state = self.core.state();
        self.core.dial(&mut state, peer)
    }

    /// Ends the connection with an agent, and forgets how it is reached.
    pub fn disconnect(&self, peer: &str) -> Result<()> {
        self.core.linger(Some(peer));
        let mut state = self.core.state();
        match self.core.forget(&mut state, peer) {
            true => Ok(()),
            false if peer == self.core.name => Ok(()),
            false => Err(Status::NotFound),
        }
    }

    /// Reads what an agent published of a registration.
    pub fn load(&self, peer: &str, published: &[u8], memory: i32) -> Result<u64> {
        let memory = Memory::of(memory)?;
        let published: Published = serde_json::from_slice(published).map_err(|e| {
            tracing::warn!(peer, "metadata of a registration that can't be read: {e}");
            Status::Mismatch
        })?;
        let mut state = self.core.state();
        let known = state.peers.get(peer).ok_or(Status::NotFound)?;
        let fits = published.memory == memory && published.address.checked_add(published.length).is_some();
        if !fits || known.connection.instance != published.instance {
            tracing::warn!(
                peer,
                "metadata of another run of the agent: load what the agent that runs now publishes"
            );
            return Err(Status::Mismatch);
        }
        Ok(state.shared.registrations.load(peer, published))
    }

    /// Forgets what was read.
    pub fn unload(&self, registration: u64) -> Result<()> {
        self.core.state().shared.registrations.unload(registration)
    }

    /// Prepares a transfer.
    pub fn prepare(
        &self,
        write: bool,
        peer: &str,
        memory: [i32; 2],
        here: &[Described],
        there: &[Described],
    ) -> Result<Arc<Transfer>> {
        let [own_memory, their_memory] = [Memory::of(memory[0])?, Memory::of(memory[1])?];
        let mut state = self.core.state();
        let State { shared, peers, next, .. } = &mut *state;
        let registrations = &shared.registrations;
        let place = |key: u64, d: &Described| Place { key, address: d.address, length: d.length };
        let whole = |list: &[Described]| match list.iter().all(|d| d.address.checked_add(d.length).is_some())
        {
            true => Ok(()),
            false => Err(Status::InvalidParam),
        };
        whole(here)?;
        whole(there)?;
        let mut checker = registrations.checker();
        let mut own = |d: &Described, memory| match checker.check(&place(d.registration, d)) {
            Ok(own) if own.memory == memory => Ok((d.registration, own.device)),
            Ok(_) => Err(Status::NotFound),
            Err(status) => Err(status),
        };
        let mut elements = Vec::with_capacity(here.len());
        for d in here {
            let (key, device) = own(d, own_memory)?;
            elements.push(Element { address: d.address, length: d.length, key, device });
        }
        let mut own_keys: Vec<u64> = elements.iter().map(|e| e.key).collect();
        // Neighbours are mostly of one registration, so that few keys are left to sort.
        own_keys.dedup();
        own_keys.sort_unstable();
        own_keys.dedup();
        let instance;
        let mut theirs = HashMap::new();
        if peer == self.core.name {
            instance = self.core.instance.clone();
            for d in there {
                own(d, their_memory)?;
                theirs.insert(d.registration, d.registration);
            }
        } else {
            instance = peers.get(peer).ok_or(Status::NotFound)?.connection.instance.clone();
            for d in there {
                let found = registrations.theirs(d.registration)?;
                found.check(&place(found.published.key, d), their_memory)?;
                if found.peer != peer || found.published.instance != instance {
                    return Err(Status::Mismatch);
                }
                theirs.insert(d.registration, found.published.key);
            }
        }
        let element = |d: &Described| Element {
            address: d.address,
            length: d.length,
            key: theirs[&d.registration],
            device: 0,
        };
        let pieces = join(elements.into_iter(), there.iter().map(element))?;
        *next += 1;
        let mut their_keys: Vec<u64> = theirs.into_values().collect();
        their_keys.sort_unstable();
        let own_keys = match peer == self.core.name {
            true => own_keys.into_iter().chain(their_keys.iter().copied()).collect(),
            false => own_keys,
        };
        let transfer = Arc::new(Transfer::new(
            *next,
            write,
            (peer.into(), instance),
            [own_memory, their_memory],
            pieces,
            own_keys,
            their_keys,
        ));
        state.transfers.insert(transfer.id, transfer.clone());
        Ok(transfer)
    }

    /// Starts a transfer. A notification of more than [`LONGEST_NOTE`] bytes: refused.
    pub fn post(&self, transfer: &Arc<Transfer>, note: Option<&[u8]>) -> Result<Status> {
        let core = &self.core;
        if note.is_some_and(|note| note.len() > LONGEST_NOTE) {
            return Err(Status::InvalidParam);
        }
        let mut state = core.state();
        if transfer.is_active() || transfer.is_copied() {
            return Err(Status::RepostActive);
        }
        let live = transfer
            .own_keys
            .iter()
            .all(|key| state.shared.registrations.own(*key).is_ok_and(|own| !own.ends));
        if !live {
            return Err(Status::NotFound);
        }
        transfer.begin(note.map(<[u8]>::to_vec));
        if transfer.peer == core.name && transfer.pieces.is_empty() {
            state.shared.inbox.extend(transfer.run().note.take().map(|note| (core.name.clone(), note)));
            transfer.end(Status::Success);
            return Ok(Status::Success);
        }
        if transfer.peer == core.name && transfer.is_gpu() {
            state.shared.within.push(Within::new(transfer.clone()));
            core.advance(&mut state);
            return Ok(Status::of_transfer(transfer));
        }
        if transfer.peer == core.name {
            let copying = Arc::new(Copying::new(transfer.clone(), Way::Own));
            transfer.run().copying = Some(copying.clone());
            drop(state);
            core.copy(copying);
            return Ok(Status::of_transfer(transfer));
        }
        let begun = core.start(&mut state, Waiting::Transfer(transfer.clone()), &transfer.peer);
        if let Err(status) = begun {
            transfer.end(status);
            return Err(status);
        }
        // A copy that needs no message begins at once.
        if state.begun.is_empty() {
            core.advance(&mut state);
            let _ = core.context.drive();
        }
        let begun = std::mem::take(&mut state.begun);
        drop(state);
        begun.into_iter().for_each(|copying| core.copy(copying));
        Ok(Status::of_transfer(transfer))
    }

    /// How a transfer stands; moves it on.
    pub fn check(&self, transfer: &Transfer) -> Status {
        if !transfer.is_active() {
            return Status::of_transfer(transfer);
        }
        let core = &self.core;
        let copying = transfer.run().copying.clone();
        match copying {
            Some(copying) => core.help(&copying),
            None => {
                // Relaxed: a hint for the thread.
                core.polled.fetch_add(1, Ordering::Relaxed);
                let _ = core.context.drive();
                if core.progress() {
                    let _ = core.context.drive();
                }
            }
        }
        Status::of_transfer(transfer)
    }

    /// Cancels a transfer and forgets it. After success nothing of it touches memory of this process.
    ///
    /// NIXL holds its own lock during the call, and Python's: other calls wait. So this fails once nothing has moved for [`SILENT`], and
    /// NIXL releases the transfer again when the program wants that. NIXL does not hear of a second failure, so the peer's connection is
    /// ended then. What a GPU or a system call still uses stays known to [`Agent::deregister`].
    pub fn release(&self, transfer: &Arc<Transfer>) -> Result<()> {
        let core = &self.core;
        let mut state = core.state();
        if transfer.is_active() {
            core.cancel(&mut state, transfer);
        }
        let (begin, limit) = (Instant::now(), core.context.settings().timeout);
        let (again, mut seen, mut moved) = (transfer.run().refused, 0, begin);
        // A batch takes less than a millisecond, and a copy of a GPU ends when kernels of the program leave it an SM. A queue pair's
        // peer may be stopped.
        while transfer.is_copied() {
            let using = state.sessions.values().filter(|session| session.uses(transfer));
            let (numbers, moves): (Vec<_>, Vec<_>) = using.map(|s| (s.number, s.moves())).unzip();
            if std::mem::replace(&mut seen, moves.iter().sum::<u64>()) != seen {
                moved = Instant::now();
            }
            let silent = moved.elapsed();
            if silent >= SILENT || begin.elapsed() >= limit {
                let peer = &transfer.peer;
                if again && !numbers.is_empty() {
                    tracing::warn!(
                        peer,
                        "nothing has come for {silent:?}: it loses its connection, for a transfer was released"
                    );
                    numbers.iter().for_each(|number| core.end(&mut state, *number, Status::RemoteDisconnect));
                    continue;
                }
                let what = match (numbers.is_empty(), transfer.is_gpu()) {
                    (false, _) => "the peer has not let go of",
                    (true, true) => "a GPU has not ended copies of",
                    (true, false) => "a system call has not ended a copy of",
                };
                tracing::error!(peer, "a transfer can't be released: {what} its memory, which must stay");
                transfer.run().refused = true;
                return Err(Status::Backend);
            }
            core.advance(&mut state);
            drop(state);
            let _ = core.context.drive();
            std::thread::yield_now();
            state = core.state();
        }
        state.transfers.remove(&transfer.id);
        transfer.run().copying = None;
        Ok(())
    }

    /// Takes the notifications that have come.
    pub fn notifications(&self) -> VecDeque<(String, Vec<u8>)> {
        let core = &self.core;
        core.progress();
        let mut state = core.state();
        state.shared.inbox_bytes = 0;
        std::mem::take(&mut state.shared.inbox)
    }

    /// How many connections there are.
    #[cfg(test)]
    pub fn connections(&self) -> usize {
        self.core.state().sessions.len()
    }

    /// Whether bytes are under way out of regions.
    #[cfg(test)]
    pub fn puts(&self) -> bool {
        self.core.state().sessions.values().any(Session::puts)
    }

    /// Breaks the links of all connections: how many stood.
    #[cfg(test)]
    pub fn break_links(&self) -> usize {
        self.core.state().sessions.values().filter(|session| session.break_link()).count()
    }

    /// Sends a notification. Of more than [`LONGEST_NOTE`] bytes: refused.
    pub fn notify(&self, peer: &str, text: &[u8]) -> Result<()> {
        let core = &self.core;
        if text.len() > LONGEST_NOTE {
            return Err(Status::InvalidParam);
        }
        let mut state = core.state();
        if peer == core.name {
            state.shared.inbox.push_back((peer.into(), text.into()));
            return Ok(());
        }
        core.start(&mut state, Waiting::Note(text.into()), peer)?;
        core.advance(&mut state);
        drop(state);
        let _ = core.context.drive();
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let core = &self.core;
        core.linger(None);
        // Relaxed: the joins order the rest.
        core.closing.store(true, Ordering::Relaxed);
        self.bell.ring();
        core.copies.some.notify_all();
        let _ = core.context.drive();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let mut state = core.state();
        let names: Vec<_> = state.peers.keys().cloned().collect();
        names.iter().for_each(|peer| _ = core.forget(&mut state, peer));
        let numbers: Vec<_> = state.sessions.keys().copied().collect();
        numbers.into_iter().for_each(|number| core.end(&mut state, number, Status::Canceled));
        let begin = Instant::now();
        let ends = |state: &State| state.needs_looks() || !state.shared.closing.is_empty();
        while ends(&state) && begin.elapsed() < LINGER {
            core.advance(&mut state);
            std::thread::yield_now();
        }
        if !state.shared.closing.is_empty() {
            tracing::error!("a peer did not end its direct copies within {LINGER:?}: memory must stay");
        }
        if state.needs_looks() {
            tracing::error!(
                "a GPU did not end its copies within {LINGER:?}: their windows stay in the process"
            );
            std::mem::take(&mut state.shared.graves).into_iter().for_each(std::mem::forget);
            std::mem::take(&mut state.shared.within).into_iter().for_each(std::mem::forget);
        }
        let farewells = std::mem::take(&mut state.farewells);
        drop(state);
        farewells.into_iter().for_each(|thread| _ = thread.join());
    }
}
