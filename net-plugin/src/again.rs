//! Two ends of a connection between hosts meet again when their TCP socket broke: who may dial, and which connection is
//! meant ([`pushgate_proxy::redial`] has the rest).
//!
//! One listening socket of the process takes those who dial again, because NCCL may close a listener as soon as its
//! connections are there. Each end makes a token of 16 random bytes for each connection and tells it to the other end in its greeting, together
//! with the place of that socket. Who dials names the other end's token. The connector dials. An end that was closed in order
//! leaves the number of messages that it had received, for a peer that dials later.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pushgate_driver_shim::versions::Versions;
use pushgate_proxy::redial::envelope::plain;
use pushgate_proxy::redial::{self, Answer, Party};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::handle::Nonce;
use crate::handshake::{VERSIONS, random};

/// What this process needs to meet others again.
pub type Again = redial::Again<Ends>;
/// By which a thread says what it has found.
pub type Finder = redial::Finder<Key>;
/// What a thread found about a connection.
pub type Found = redial::Found<Key>;

/// The most greetings that are read side by side.
const GREETINGS: usize = 256;
/// How much longer than `recover` the count of an end that was closed is kept: the peer may notice late.
const LATE: Duration = Duration::from_secs(10);

/// What an end tells in its greeting, so that the other end can dial it again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Place {
    pub at: SocketAddr,
    pub token: Nonce,
}

/// A connection, as the threads that dial and greet know it.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The connection's number at the watch.
    pub id: u64,
    /// This end dials.
    pub dials: bool,
    /// Where the other end is dialled, and its token.
    pub other: Place,
}

/// What a token stands for.
enum Known {
    /// A connection that is being made, or is not watched yet.
    Making,
    Open(Key),
    /// This end was closed when it had received so many messages.
    Closed {
        received: u64,
        until: Instant,
    },
}

/// The tokens that this process has told.
#[derive(Default)]
pub struct Tokens(Mutex<HashMap<Nonce, Known>>);

impl Tokens {
    fn known(&self) -> MutexGuard<'_, HashMap<Nonce, Known>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// This process, for others that dial it again.
pub struct Ends(Arc<Tokens>);

/// A greeting of one who dials again.
#[derive(Serialize, Deserialize)]
struct Hello {
    /// The token of the end that is dialled.
    token: Nonce,
    /// How many frames the sender has received.
    received: u64,
}

impl Party for Ends {
    type Key = Key;

    fn version(&self) -> u32 {
        VERSIONS.oldest()
    }

    fn most(&self) -> usize {
        GREETINGS
    }

    fn dials(&self, key: Key) -> bool {
        key.dials
    }

    fn place(&self, key: Key) -> SocketAddr {
        key.other.at
    }

    fn greeting(&self, key: Key, received: u64) -> impl Serialize {
        Hello { token: key.other.token, received }
    }

    fn check(&self, version: u32, body: &[u8]) -> Result<(Key, u64), Option<Answer>> {
        let refused = |why: String| Some(Answer::Refused(why));
        VERSIONS.agree(Versions::told(version, None)).map_err(|e| refused(e.to_string()))?;
        let hello: Hello = serde_json::from_slice(body)
            .map_err(|e| refused(format!("its greeting: {}", plain(&e.to_string()))))?;
        match self.0.known().get(&hello.token) {
            Some(Known::Open(key)) => Ok((*key, hello.received)),
            Some(Known::Making) => Err(None),
            Some(Known::Closed { received, .. }) => Err(Some(Answer::Closed { received: *received })),
            None => Err(refused("its token is that of no connection of this process".into())),
        }
    }
}

/// Starts to listen for those who dial again.
pub fn listen(listener: TcpListener, recover: Duration) -> std::io::Result<(Again, Here)> {
    let at = listener.local_addr()?;
    let tokens = Arc::new(Tokens::default());
    let again = Again::new(listener, Ends(tokens.clone()), recover)?;
    Ok((again, Here { at, tokens, recover }))
}

/// Where this process is dialled again.
pub struct Here {
    at: SocketAddr,
    tokens: Arc<Tokens>,
    recover: Duration,
}

impl Here {
    /// A token for a new connection.
    pub fn token(&self) -> Result<Token> {
        let place = Place { at: self.at, token: random()? };
        self.tokens.known().insert(place.token, Known::Making);
        Ok(Token { place, tokens: self.tokens.clone(), recover: self.recover })
    }
}

/// The token of a connection. Who names the token is taken from [`Token::open`] on until this is dropped, or told that the connection was
/// closed.
pub struct Token {
    place: Place,
    tokens: Arc<Tokens>,
    recover: Duration,
}

impl Token {
    /// What the other end is told.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The connection is watched.
    pub fn open(&self, key: Key) {
        self.tokens.known().insert(self.place.token, Known::Open(key));
    }

    /// The connection is not watched any more, or not yet: who dials is to try again.
    pub fn making(&self) {
        self.tokens.known().insert(self.place.token, Known::Making);
    }

    /// This end is closed in order; it has received so many messages.
    pub fn close(&self, received: u64) {
        let (now, mut known) = (Instant::now(), self.tokens.known());
        known.retain(|_, known| !matches!(known, Known::Closed { until, .. } if *until < now));
        known.insert(self.place.token, Known::Closed { received, until: now + self.recover + LATE });
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let mut known = self.tokens.known();
        if !matches!(known.get(&self.place.token), Some(Known::Closed { .. })) {
            known.remove(&self.place.token);
        }
    }
}
