//! `pushgate doctor --listen`: the end that answers a `pushgate doctor --peer`.

use std::io::{Error, ErrorKind, Result as IoResult};
use std::net::TcpListener;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use pushgate::Settings;
use pushgate_door::addresses::own;
use pushgate_door::redial::envelope::envelope;
use pushgate_door::{Arrival, Door, Limits};
use pushgate_driver_shim::log::Foreign;

use super::side::{
    CHUNK, GIVE, LONGEST, PING, PURPOSE, SESSION, Side, TAKE, Talk, VERSION, addresses, ask, mtu,
};
use crate::output::outln;

/// Serves peers, one after the other, until the process is ended.
pub fn serve(place: &str, settings: &Settings) -> Result<()> {
    let at = addresses(place)
        .with_context(|| format!("--listen {place}: expected ADDRESS[:PORT] of this host"))?;
    let at = *own(at).first().ok_or_else(|| anyhow!("--listen {place}: the name has no address"))?;
    let terms = settings.terms(PURPOSE)?;
    let limits = Limits { greeting: LONGEST, ..Limits::default() };
    let listener = TcpListener::bind(at).with_context(|| format!("listening at {at}"))?;
    let door = Door::on(listener, terms, limits)?;
    outln!(
        "listening at {}; try `pushgate doctor --peer` at the other host, Ctrl-C ends this",
        door.local_addr()?
    )?;
    loop {
        let Some(Arrival { stream, greeting, from }) = door.wait(None, None)? else { continue };
        let talk = Talk { stream, until: Instant::now() + SESSION };
        match answer(&talk, &greeting, &settings.host) {
            Ok(release) => outln!("{from}: answered, pushgate {release}")?,
            Err(e) => outln!("{from}: {e}")?,
        }
        talk.stream.close();
    }
}

/// Answers what one peer asks. Returns its release.
fn answer(talk: &Talk, greeting: &[u8], host: &str) -> IoResult<String> {
    let theirs: Side = serde_json::from_slice(greeting)
        .map_err(|e| Error::new(ErrorKind::InvalidData, Foreign::word(e).to_string()))?;
    talk.put(&envelope(VERSION, &Side::of_this_host(mtu(&talk.stream), host)))?;
    let mut bytes = vec![0; CHUNK];
    loop {
        let mut asked = [0; 9];
        match talk.take(&mut asked) {
            Ok(()) => {}
            // The peer has all that it wants.
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
                return Ok(Foreign::word(&theirs.release).to_string());
            }
            Err(e) => return Err(e),
        }
        let length = u64::from_le_bytes(asked[1..].try_into().expect("eight bytes"));
        let fits = usize::try_from(length).ok().filter(|length| *length <= CHUNK);
        match (asked[0], fits) {
            (PING, Some(0)) => talk.put(&asked)?,
            (TAKE, Some(length)) => {
                talk.take(&mut bytes[..length])?;
                talk.put(&ask(TAKE, length))?;
            }
            (GIVE, Some(length)) => talk.put(&bytes[..length])?,
            (kind, _) => {
                let text =
                    format!("it asks for {kind} of {length} bytes: run one release of pushgate on all hosts");
                return Err(Error::new(ErrorKind::InvalidData, text));
            }
        }
    }
}
