//! The end that connects: dials, proves that it has the handle, and greets.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

use pushgate::settings::Transport;
use pushgate_service::folder::BESIDE;

use super::greeting::lost;
use super::progress::{Made, Progress};
use crate::dial::{self, Dial, Dialed};
use crate::error::{Code, Failure, Result};
use crate::handle::{self, Handle};
use crate::identity::Identity;
use crate::join::{Joined, NewEnd, Purpose, Role};
use crate::log;
use crate::reaching::Reaching;
use crate::runtime::Runtime;
use crate::socket::Channel;
use crate::stream::Stream;

/// The connections that are being made. Each has a mark, by which the connector's copy of its handle names it.
pub struct Attempts {
    made: Mutex<HashMap<u64, Connecting>>,
    next_mark: AtomicU64,
    /// How each peer is reached, where the log has said it.
    told: Mutex<HashSet<(Identity, String)>>,
}

/// A connection that is being made.
struct Connecting {
    handle: Handle,
    stage: Stage,
    transport: Transport,
    /// Why the transport is what it is.
    why: String,
    /// Why the peer can't be reached by `local`, once that was tried.
    not_local: Option<String>,
}

pub(super) enum Stage {
    /// To be dialed, perhaps again.
    Again,
    /// Over TCP: to one of the listener's addresses, and through its door.
    Reaching(Box<Reaching>),
    /// This end has greeted.
    Joining(Box<Progress>),
}

impl Attempts {
    /// No attempt yet.
    pub fn new() -> Self {
        Attempts { made: Mutex::default(), next_mark: AtomicU64::new(1), told: Mutex::default() }
    }

    /// Makes a queue pair to a listener if that can be completed by now. The call changes the handle to
    /// remember what it has begun. All calls with a handle name the same purpose.
    pub fn dial(
        &self,
        runtime: &Arc<Runtime>,
        bytes: &mut [u8; handle::BYTES],
        class: Option<u8>,
        purpose: &Purpose,
    ) -> Result<Option<Made>> {
        let handle = Handle::decode(bytes)?;
        let table = || self.made.lock().unwrap_or_else(|e| e.into_inner());
        let mark = handle::mark(bytes);
        let mut connecting = match mark {
            0 => Connecting::new(handle),
            _ => table().remove(&mark).filter(|c| c.handle == handle).ok_or_else(|| {
                let text = format!("a connection handle that names attempt {mark}, which was never begun");
                Failure::new(Code::Argument, text)
            })?,
        };
        handle::set_mark(bytes, 0);
        match connecting.advance(runtime, class, purpose)? {
            Some(made) => {
                self.tell(&handle.listener, &made.joined, &connecting.why);
                Ok(Some(made))
            }
            None => {
                let mark = self.next_mark.fetch_add(1, Ordering::Relaxed);
                table().insert(mark, connecting);
                handle::set_mark(bytes, mark);
                Ok(None)
            }
        }
    }

    /// Gives up what [`Attempts::dial`] has begun with this handle.
    pub fn abandon(&self, bytes: &mut [u8; handle::BYTES]) {
        let begun = self.made.lock().unwrap_or_else(|e| e.into_inner()).remove(&handle::mark(bytes));
        handle::set_mark(bytes, 0);
        drop(begun);
    }

    /// Logs, once for each peer and device, how the peer is reached.
    fn tell(&self, peer: &Identity, joined: &Joined, why: &str) {
        let by = match &joined.lane.device {
            Some(rdma) if joined.transport == Transport::Verbs => format!("verbs ({})", rdma.describe()),
            _ => joined.transport.to_string(),
        };
        let mut told = self.told.lock().unwrap_or_else(|e| e.into_inner());
        if !told.insert((*peer, by.clone())) {
            return;
        }
        log::init(&format!("queue pairs to {peer} are {by}: {why}"));
    }
}

impl Connecting {
    fn new(handle: Handle) -> Self {
        let transport = Transport::Local;
        Connecting { handle, stage: Stage::Again, transport, why: String::new(), not_local: None }
    }

    /// Says once that a process of this kernel is reached over TCP: such a job is slower than its user expects.
    fn tell_beside(&self) {
        static ONCE: Once = Once::new();
        if let Some(why) = &self.not_local {
            let peer = &self.handle.listener;
            let says =
                || log::warn(&format!("{peer} runs on this host too, and not over local: {why}; {BESIDE}"));
            ONCE.call_once(says);
        }
    }

    /// Goes as far as it can; the queue pair and its socket once they are there.
    fn advance(&mut self, runtime: &Runtime, class: Option<u8>, purpose: &Purpose) -> Result<Option<Made>> {
        loop {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Again) {
                Stage::Again => {
                    let here = dial::Here::of(&runtime.loaded);
                    let (to, why) = dial::choose(here, &self.handle, self.not_local.as_deref())?;
                    self.why = why;
                    match to {
                        Dial::Tcp(to, transport) => {
                            self.transport = transport;
                            if transport == Transport::Tcp {
                                self.tell_beside();
                            }
                            let terms = self.handle.key.terms(runtime.loaded.settings.tls);
                            let host = self.handle.listener.host();
                            Stage::Reaching(Box::new(Reaching::new(&to, terms, host)))
                        }
                        Dial::Unix => {
                            match dial::dial_unix(&self.handle.key.nonce(), runtime.loaded.folder.as_ref())? {
                                Dialed::Connected(stream) => {
                                    self.transport = Transport::Local;
                                    begin(runtime, &self.handle, stream, (class, Transport::Local), purpose)?
                                }
                                Dialed::Later => return Ok(None),
                                Dialed::Nowhere(why) => {
                                    self.not_local = Some(why);
                                    Stage::Again
                                }
                            }
                        }
                    }
                }
                Stage::Reaching(mut reaching) => {
                    let Some(stream) = reaching.advance().map_err(lost)? else {
                        self.stage = Stage::Reaching(reaching);
                        return Ok(None);
                    };
                    let replaced = runtime.loaded.settings.recovery().is_some();
                    let stream = Stream::tcp(stream, replaced).map_err(lost)?;
                    begin(runtime, &self.handle, stream, (class, self.transport), purpose)?
                }
                Stage::Joining(mut progress) => match progress.advance(runtime) {
                    Ok(Some(made)) => return Ok(Some(made)),
                    Ok(None) => {
                        self.stage = Stage::Joining(progress);
                        return Ok(None);
                    }
                    // The listener takes no process of another user, which this end can't always see.
                    Err(e) if progress.is_unheard_here() => {
                        self.not_local = Some(format!("its listener turned this process away, {e}"));
                        Stage::Again
                    }
                    Err(e) => return Err(e),
                },
            }
        }
    }
}

/// Greets the listener of a handle.
pub(super) fn begin(
    runtime: &Runtime,
    handle: &Handle,
    stream: Stream,
    (class, transport): (Option<u8>, Transport),
    purpose: &Purpose,
) -> Result<Stage> {
    let end = NewEnd::new(runtime, Role::Send, class, transport, purpose)?;
    let offer = end.offer()?;
    let progress = Progress::new(runtime, Channel::new(stream), end, offer, handle.key, transport)?;
    Ok(Stage::Joining(Box::new(progress)))
}
