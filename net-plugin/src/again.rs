//! Two ends of a connection between hosts meet again when their TCP socket broke: who may dial, and which connection is
//! meant ([`pushgate_door::redial`] has the rest).
//!
//! One listening socket of the process takes those who dial again, because NCCL may close a listener as soon as its
//! connections are there. Its door has a key of the process. Each end makes a token of 16 random bytes for each connection and tells it to
//! the other end in its greeting, together with the place of that socket and the key, which is hidden by the connection's own. Who dials
//! proves to know the key and names the other end's token. The connector dials. An end that was closed in order
//! leaves the number of messages that it had received, for a peer that dials later.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pushgate_door::addresses::Places;
use pushgate_door::redial::{self, Answer, Party};
use pushgate_door::{Door, Secret, Terms};
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::Versions;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::handle::{self, Nonce, VERSIONS, random};

/// What this process needs to meet others again.
pub type Again = redial::Again<Ends>;
/// By which a thread says what it has found.
pub type Finder = redial::Finder<Key>;
/// What a thread found about a connection.
pub type Found = redial::Found<Key>;

/// How many of those who dial may be on their way through the door.
const GREETINGS: usize = 256;
/// How much longer than `recover` the count of an end that was closed is kept: the peer may notice late.
const LATE: Duration = Duration::from_secs(10);

/// What an end tells in its greeting, so that the other end can dial it again.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Place {
    /// The addresses of the process's socket.
    pub at: Places,
    pub token: Nonce,
    /// What the socket's door asks for.
    key: [u8; 16],
}

impl Place {
    /// Some place.
    #[cfg(test)]
    pub fn of_a_test() -> Place {
        Place { at: SocketAddr::from(([127, 0, 0, 1], 1)).into(), token: [3; 16], key: [9; 16] }
    }

    /// What both ends of a socket that is dialled there agree on.
    pub fn terms(&self, tls: bool) -> Terms {
        handle::Key(self.key).terms(tls)
    }

    /// The place with the one address at which the other end of a connection is known to be reached, if the place has that address.
    pub fn reached(mut self, peer: SocketAddr) -> Place {
        let same = |at: &SocketAddr| at.ip().to_canonical() == peer.ip().to_canonical();
        if let Some(at) = self.at.all().into_iter().find(same) {
            self.at = at.into();
        }
        self
    }

    /// Hides the place's key by a secret that both ends of the connection know; a second call shows it again. A token belongs to
    /// one connection, so no two keys are hidden alike.
    pub fn hidden(mut self, secret: &Secret) -> Place {
        let mask = secret.bytes::<16>(&[b"again".as_slice(), &self.token].concat());
        self.key.iter_mut().zip(mask).for_each(|(byte, mask)| *byte ^= mask);
        self
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({})", self.at)
    }
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
    /// This end was closed when it had received `received` messages.
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
pub struct Ends {
    tokens: Arc<Tokens>,
    tls: bool,
}

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

    fn dials(&self, key: Key) -> bool {
        key.dials
    }

    fn places(&self, key: Key) -> Vec<SocketAddr> {
        key.other.at.all()
    }

    fn terms(&self, key: Key) -> Terms {
        key.other.terms(self.tls)
    }

    fn greeting(&self, key: Key, received: u64) -> impl Serialize {
        Hello { token: key.other.token, received }
    }

    fn check(&self, version: u32, body: &[u8]) -> Result<(Key, u64), Option<Answer>> {
        let refused = |why: String| Some(Answer::Refused(why));
        VERSIONS.agree(Versions::told(version, None)).map_err(|e| refused(e.to_string()))?;
        let hello: Hello = serde_json::from_slice(body)
            .map_err(|e| refused(format!("its greeting: {}", Foreign::word(e))))?;
        match self.tokens.known().get(&hello.token) {
            Some(Known::Open(key)) => Ok((*key, hello.received)),
            Some(Known::Making) => Err(None),
            Some(Known::Closed { received, .. }) => Err(Some(Answer::Closed { received: *received })),
            None => Err(refused("its token is that of no connection of this process".into())),
        }
    }
}

/// Starts to listen for those who dial again. `tls`: sockets are encrypted.
pub fn listen(listeners: Vec<TcpListener>, recover: Duration, tls: bool) -> Result<(Again, Here)> {
    let key = random()?;
    let listening = Failure::system("listening for those who dial again");
    let opened = Door::on_all(listeners, handle::Key(key).terms(tls), redial::limits(GREETINGS));
    let door = opened.map_err(listening)?;
    let at = door.local_addrs().map_err(Failure::system("listening for those who dial again"))?;
    let at = Places::of(&at).expect("a door listens somewhere");
    let tokens = Arc::new(Tokens::default());
    let again = Again::new(door, Ends { tokens: tokens.clone(), tls }, recover);
    Ok((again, Here { at, key, tokens, recover }))
}

/// Where this process is dialled again.
pub struct Here {
    at: Places,
    key: [u8; 16],
    tokens: Arc<Tokens>,
    recover: Duration,
}

impl Here {
    /// A token for a new connection.
    pub fn token(&self) -> Result<Token> {
        let place = Place { at: self.at, token: random()?, key: self.key };
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

    /// This end is closed in order; it has received `received` messages.
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

#[cfg(test)]
mod tests {
    use pushgate_door::redial::envelope::{envelope, opened};
    use pushgate_tests::fuzz::{depth, fuzz, kind};

    use super::*;

    #[test]
    fn a_place_on_the_wire_shows_its_key_to_those_alone_who_have_the_handle() {
        let place = Place::of_a_test();
        let [ours, theirs] = [[1; 16], [2; 16]].map(|bytes| handle::Key(bytes).secret());
        let wire = place.hidden(&ours);
        assert!(wire.key != place.key && wire.token == place.token);
        assert_eq!(wire.hidden(&ours).key, place.key);
        assert!(wire.hidden(&theirs).key != place.key);
        let other = Place { token: [4; 16], ..place }.hidden(&ours);
        assert!(other.key != wire.key);
        assert!(!format!("{wire:?}{place:?}").contains('9'));
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_greeting_of_one_who_dials_again_makes_the_plugin_panic_or_reaches_another_connection() {
        let token = |n: u8| [n; 16];
        let key = |n: u8| {
            let other = Place { token: token(n), ..Place::of_a_test() };
            Key { id: n.into(), dials: n == 2, other }
        };
        let tokens = Arc::new(Tokens::default());
        tokens.known().extend([
            (token(1), Known::Open(key(1))),
            (token(2), Known::Open(key(2))),
            (token(3), Known::Making),
            (token(4), Known::Closed { received: 5, until: Instant::now() }),
        ]);
        let ends = Ends { tokens, tls: false };
        // Both ends of the connections of this test have the same token, so what one of them says the other takes.
        let mut seeds: Vec<_> = (1..6).map(|n| envelope(ends.version(), &ends.greeting(key(n), 7))).collect();
        seeds.push(envelope(77, &ends.greeting(key(1), 7)));
        let taken = std::cell::Cell::new(0);
        let target = |bytes: &[u8]| {
            let (version, body) = match opened(bytes) {
                Ok(opened) => opened,
                Err(why) => return kind(why),
            };
            match ends.check(version, body) {
                Ok((found, received)) => {
                    taken.set(taken.get() + 1);
                    let again = envelope(ends.version(), &ends.greeting(found, received));
                    let (version, body) = opened(&again).expect("a greeting of this end");
                    let (same, again) = ends.check(version, body).expect("a greeting of this end");
                    assert_eq!((same.id, again), (found.id, received));
                    found.id << 8 | depth(received as usize)
                }
                Err(None) => 1,
                Err(Some(Answer::Closed { received })) => {
                    assert_eq!(received, 5);
                    2
                }
                Err(Some(Answer::Refused(why))) => {
                    assert!(!why.contains(char::is_control) && why.len() < 2048, "{why:?}");
                    kind(why)
                }
                Err(Some(Answer::Again { .. })) => unreachable!("the watch gives this answer"),
            }
        };
        let answers: Vec<_> = seeds.iter().map(|seed| target(seed)).collect();
        assert_eq!((taken.get(), &answers[2..4]), (2, &[1, 2][..]), "each token is found");
        fuzz(&seeds, target);
    }
}
