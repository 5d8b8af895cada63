//! The end that accepts: takes one connection after the other.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pushgate::settings::Transport;
use pushgate_driver_shim::closing::Closes;
use pushgate_driver_shim::limited;

use super::greeting::{greet, greeting, lost, same_told};
use super::progress::{Made, Progress};
use crate::error::Result;
use crate::handle::{self, Between, Handle, Key, Nonce, random};
use crate::join::{NewEnd, Purpose, Role};
use crate::listening::{GREETING, STRANGERS, Sockets};
use crate::loaded::Loaded;
use crate::runtime::Runtime;
use crate::socket::Channel;
use crate::stream::Stream;

/// Accepts one connection after the other.
pub struct Listener {
    key: Key,
    sockets: Sockets,
    class: Option<u8>,
    pub(super) state: Mutex<Accepting>,
    runtime: Arc<Runtime>,
    /// Of strangers.
    closes: Closes,
}

#[derive(Default)]
pub(super) struct Accepting {
    strangers: Vec<(Channel, Instant)>,
    /// Connectors that have greeted.
    ready: Vec<(Channel, Vec<u8>)>,
    pub(super) current: Option<Progress>,
}

impl Listener {
    /// Starts to listen; returns the handle for connectors.
    pub fn new(runtime: Arc<Runtime>, class: Option<u8>) -> Result<(Self, [u8; handle::BYTES])> {
        let key = Key(random()?);
        let sockets = Sockets::open(&runtime.loaded, &key)?;
        let (unix, tcp) = sockets.addresses()?;
        let Loaded { rdma, tcp: links, identity, .. } = &*runtime.loaded;
        let between = match tcp {
            Some(_) => Between { verbs: !rdma.is_empty(), tcp: *links },
            None => Between::default(),
        };
        let bytes = Handle { key, unix, tcp, between, listener: *identity }.encode();
        let (state, closes) = (Mutex::default(), Closes::default());
        Ok((Listener { key, sockets, class, state, runtime, closes }, bytes))
    }

    /// What names the listener where others may read it.
    pub fn nonce(&self) -> Nonce {
        self.key.nonce()
    }

    /// The threads that its queue pairs are carried by.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Whether a connection is being made. No descriptor of [`Listener::bells`] announces that it can go on.
    pub fn is_busy(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        state.current.is_some() || !(state.strangers.is_empty() && state.ready.is_empty())
    }

    /// Descriptors that become readable when somebody comes.
    pub fn bells(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.bells()
    }

    /// Returns the next queue pair if it is ready. All calls name the same purpose.
    pub fn next(&self, purpose: &Purpose) -> Result<Option<Made>> {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let state = &mut *state;
        if state.current.is_none() {
            self.let_in(&mut state.strangers)?;
            self.hear(state);
        }
        loop {
            if state.current.is_none() {
                if state.ready.is_empty() {
                    return Ok(None);
                }
                let (channel, bytes) = state.ready.remove(0);
                // An end that is refused hears from our greeting why.
                let answer = || {
                    let ours = greet(&self.runtime, &self.key, None, false);
                    let _ = channel.send(&ours, Vec::new());
                };
                // Any process can connect here and send anything.
                let heard = greeting(&bytes, &self.key).and_then(|heard| {
                    let transport = transport(&self.runtime, channel.stream(), heard.links)?;
                    Ok((heard, transport))
                });
                let (again, transport) = match heard {
                    Ok((heard, transport)) => {
                        // It knew the key, so it is a rank of this job, and none that fits will come in its place.
                        same_told(&self.runtime, &heard).inspect_err(|_| answer())?;
                        (heard.again, transport)
                    }
                    Err(e) => {
                        answer();
                        limited!(warn, 0u32, "refused a connection at the listening socket: {e}");
                        continue;
                    }
                };
                let end = NewEnd::new(&self.runtime, Role::Receive, self.class, transport, purpose)?;
                let offer = end.offer()?;
                let mut progress = Progress::new(&self.runtime, channel, end, offer, self.key, transport)?;
                progress.greeted(again, Role::Receive);
                state.current = Some(progress);
            }
            let Some(current) = &mut state.current else { continue };
            // The connector is the rank that this call waits for: if it fails, no other one comes in its place.
            let made = current.advance(&self.runtime).inspect_err(|_| state.current = None)?;
            if made.is_some() {
                state.current = None;
            }
            return Ok(made);
        }
    }

    fn let_in(&self, strangers: &mut Vec<(Channel, Instant)>) -> Result<()> {
        // More wait at the socket: these are processes of this user, or have proved the key.
        while strangers.len() < STRANGERS
            && let Some(stream) = self.sockets.accept()?
        {
            strangers.push((Channel::closed_by(stream, &self.closes), Instant::now()));
        }
        Ok(())
    }

    fn hear(&self, state: &mut Accepting) {
        for (mut channel, since) in std::mem::take(&mut state.strangers) {
            match channel.receive() {
                // A greeting has no descriptors.
                Ok(Some((bytes, fds))) => {
                    channel.discard(fds);
                    state.ready.push((channel, bytes));
                }
                Ok(None) if since.elapsed() < GREETING => state.strangers.push((channel, since)),
                Ok(None) => {
                    limited!(
                        warn,
                        0u32,
                        "a connection at the listening socket did not greet within {GREETING:?}"
                    )
                }
                Err(e) => limited!(warn, 0u32, "refused a connection at the listening socket: {e}"),
            }
        }
    }
}

/// The transport of a queue pair whose connector came over `stream`, and asks for `tcp` if `links`.
fn transport(runtime: &Runtime, stream: &Stream, links: bool) -> Result<Transport> {
    let loaded = &runtime.loaded;
    match stream {
        Stream::Unix(_) => Ok(Transport::Local),
        Stream::Tcp(_) if links && loaded.tcp => Ok(Transport::Tcp),
        Stream::Tcp(_) if !links && !loaded.rdma.is_empty() => Ok(Transport::Verbs),
        Stream::Tcp(_) => {
            Err(lost("it asks for queue pairs that this end does not make; set qp alike on all ranks"))
        }
    }
}
