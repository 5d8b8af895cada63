//! A queue pair of two ranks over TCP.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use pushgate_door::addresses::{Message, Wish, offer};
use pushgate_driver_shim::interrupt;
use pushgate_engine::connect::{Opening, TcpMet, TcpOpening};
use pushgate_engine::idle::Wake;
use pushgate_link_tcp::Config;

use super::local::recovery;
use super::memory::{DrivenEnd, Own};
use super::verbs;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::Call;
use crate::settings::Settings;

/// Between two looks whether the streams are there.
const LOOK: Duration = Duration::from_micros(200);

/// The part of the configuration that the settings determine. The caller fills in posted receives.
impl From<&Settings> for Config {
    fn from(s: &Settings) -> Self {
        Config {
            streams: s.tcp_streams,
            checksum: s.tcp_checksum,
            posted_receives: false,
            ahead: 0,
            thrifty: false,
            // The kernel finds a dead path only while something is under way.
            beat: match s.path_timeout.as_nanos() as u64 {
                0 => 1_000_000_000,
                limit => limit / 4,
            },
        }
    }
}

/// Makes what the other end is offered. `reached` is the address of this host by which that rank reaches it, without a port; the
/// setting `host` goes before it.
pub(super) fn open(context: &Context, own: &Own, reached: SocketAddr, peer: u32) -> Result<Opening> {
    let s = context.settings();
    let address = listens(s, reached)?;
    let rank = own.geometry.rank;
    let meeting = context.tcp(address, rank < peer)?;
    let config = Config { posted_receives: own.config.posted_receives, ..Config::from(s) };
    let opening = TcpOpening::new(config, own.geometry, own.window.clone(), meeting).map_err(Error::Tcp)?;
    let opening = if recovery(context).is_some() { opening.recovering() } else { opening };
    Ok(Opening::Tcp(Box::new(opening)))
}

/// Where this end listens.
fn listens(s: &Settings, reached: SocketAddr) -> Result<SocketAddr> {
    match s.host.as_str() {
        "auto" => Ok(reached),
        host => Ok(offer(&Wish { host, ..Wish::default() }).map_err(Error::Tcp)?.sockets()[0]),
    }
}

/// Waits for the streams, then hands both ends to the engine.
pub(super) fn drive(
    context: &Context,
    own: Own,
    (peer, reached): (u32, SocketAddr),
    met: TcpMet,
    call: &mut Call<'_>,
) -> Result<DrivenEnd> {
    let TcpMet { mut link, mirror, peer_geometry, .. } = met;
    let after = context.settings().timeout;
    let until = Instant::now() + after;
    let mut asked = interrupt::Now::begin();
    while !link.joined().map_err(|why| Error::Tcp(format!("streams to rank {peer}: {why}")))? {
        if Instant::now() >= until {
            let at = listens(context.settings(), reached)?.ip().to_string();
            let what = Message::NotDialled { rank: peer, at: &at }.to_string();
            return Err(Error::TimedOut { what, after });
        }
        asked.check()?;
        std::thread::sleep(LOOK);
    }
    let tell = call.teller();
    let again = recovery(context).filter(|_| link.recovers()).map(|limit| (limit, call.hand_over()));
    let can_wake = context.inner.wake == Wake::Doorbell;
    let driven = verbs::drive_link(
        context,
        own,
        peer,
        Box::new(link),
        (mirror, peer_geometry),
        can_wake,
        tell,
        again,
    )?;
    Ok(DrivenEnd { streams: true, ..driven })
}
