//! A connector on its way to a listener of another host: at which of the listener's addresses it gets through the door.

use std::net::SocketAddr;

use pushgate_door::addresses::{Message, Places, Reach};
use pushgate_door::{Dialer, Stream, Terms};

/// The dialed addresses, and the connection that is at the door. No call waits.
pub struct Reaching {
    reach: Reach,
    at_the_door: Option<(SocketAddr, Dialer)>,
    terms: Terms,
    /// The listener's host, for messages.
    host: String,
}

impl Reaching {
    /// Begins to dial a listener of this host.
    pub fn new(to: &Places, terms: Terms, host: String) -> Self {
        Reaching { reach: Reach::new(&to.all()), at_the_door: None, terms, host }
    }

    /// Goes as far as it can; the connection, once the listener has let this end in. Fails once no address is left, with what came of
    /// each.
    pub fn advance(&mut self) -> Result<Option<Stream>, String> {
        loop {
            if let Some((at, mut dialer)) = self.at_the_door.take() {
                match dialer.advance() {
                    Ok(true) => return Ok(Some(dialer.finish())),
                    Ok(false) => {
                        self.at_the_door = Some((at, dialer));
                        return Ok(None);
                    }
                    // Perhaps another process, as where two hosts have one address.
                    Err(e) => self.reach.leads_elsewhere(at, e.to_string()),
                }
            }
            let whom = format!("host {}", self.host);
            let tried = |tried: String| {
                Message::Unreached { whom: &whom, tried: &tried, host: "that host" }.to_string()
            };
            let Some((at, socket)) = self.reach.advance().map_err(tried)? else { return Ok(None) };
            match Dialer::new(socket, &self.terms, &[]) {
                Ok(dialer) => self.at_the_door = Some((at, dialer)),
                Err(e) => self.reach.leads_elsewhere(at, e.to_string()),
            }
        }
    }
}
