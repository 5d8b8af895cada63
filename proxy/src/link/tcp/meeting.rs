//! How the two ends of a link come by its streams. The end with the lower rank dials; the other one waits for it.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::wire::Wire;

/// Where an end waits for the streams of a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Addresses at which it listens, in the order in which they are to be tried.
    pub addresses: Vec<SocketAddr>,
    /// Names the link there: 128 random bits, as hexadecimal digits.
    pub token: String,
}

/// The most addresses that a place may have.
pub const MOST_ADDRESSES: usize = 16;

impl Place {
    /// Checks what a peer says; a sentence if it is no place.
    pub fn check(&self) -> Result<(), String> {
        if self.addresses.is_empty() || self.addresses.len() > MOST_ADDRESSES {
            return Err(format!("{} addresses, expected 1 to {MOST_ADDRESSES}", self.addresses.len()));
        }
        if self.token.len() != 32 || !self.token.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err("a token that is not 32 hexadecimal digits".into());
        }
        Ok(())
    }
}

/// Brings the streams of one link after the other of one end. No call waits for the peer.
pub trait Meeting: Send {
    /// Says where this end is met over the next link. What was begun before is given up.
    fn offer(&mut self) -> Result<Place, String>;

    /// Begins to meet the peer, which is met at `peer`, over so many streams.
    fn begin(&mut self, peer: &Place, streams: usize) -> Result<(), String>;

    /// The streams, once they are there. `None`: not yet. An error is a sentence; then this meeting has failed.
    fn met(&mut self) -> Option<Result<Box<dyn Wire>, String>>;

    /// Gives up what was begun.
    fn give_up(&mut self);
}
