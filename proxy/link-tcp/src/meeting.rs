//! How the two ends of a link come by its streams. The end with the lower rank dials; the other one waits for it.

use std::fmt;
use std::net::SocketAddr;

use pushgate_door::linger::Lingered;
use serde::{Deserialize, Serialize};

use super::wire::Wire;

/// Where an end waits for the streams of a link, and what opens its door.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Addresses at which it listens, in the order in which they are to be tried.
    pub addresses: Vec<SocketAddr>,
    /// Names the link there: 128 random bits, as hexadecimal digits.
    pub token: String,
    /// The secret of its door: 256 random bits, as hexadecimal digits.
    pub key: String,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Token and key belong in no log.
        f.debug_struct("Place").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bytes that hexadecimal digits spell, two digits a byte.
fn bytes_of<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let whole = digits.len() == 2 * N && digits.bytes().all(|b| b.is_ascii_hexdigit());
    for (to, at) in bytes.iter_mut().zip((0..2 * N).step_by(2)).filter(|_| whole) {
        *to = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    whole.then_some(bytes)
}

/// The most addresses that a place may have.
pub const MOST_ADDRESSES: usize = 16;

impl Place {
    /// Checks what a peer says; a sentence if it is no place.
    pub fn check(&self) -> Result<(), String> {
        if self.addresses.is_empty() || self.addresses.len() > MOST_ADDRESSES {
            return Err(format!("{} addresses, expected 1 to {MOST_ADDRESSES}", self.addresses.len()));
        }
        if self.token_bytes().is_none() || self.key_bytes().is_none() {
            return Err("a token that is not 32 hexadecimal digits, or a key that is not 64".into());
        }
        Ok(())
    }

    /// The token's bytes, if it is one.
    pub fn token_bytes(&self) -> Option<[u8; 16]> {
        bytes_of(&self.token)
    }

    /// The key's bytes, if it is one.
    pub fn key_bytes(&self) -> Option<[u8; 32]> {
        bytes_of(&self.key)
    }
}

/// Brings the streams of one link after the other of one end. No call waits for the peer.
pub trait Meeting: Send {
    /// Says where this end is met over the next link. What was begun before is given up.
    fn offer(&mut self) -> Result<Place, String>;

    /// Begins to meet the peer, which is met at `peer`, over `streams` streams.
    fn begin(&mut self, peer: &Place, streams: usize) -> Result<(), String>;

    /// The streams, once they are there. `None`: not yet. An error is a sentence; then this meeting has failed.
    fn met(&mut self) -> Option<Result<Box<dyn Wire>, String>>;

    /// Gives up what was begun.
    fn give_up(&mut self);

    /// How long the links of this process may wait for peers that do not take their last words.
    fn lingered(&self) -> &Lingered;
}
