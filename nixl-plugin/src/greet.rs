//! How two agents meet. Each agent listens; what others load as its connection names the addresses and a secret. Who wants to
//! connect goes through that door with a unique id that it has made, and both join the communicator of that id: two ranks, between
//! which the library chooses the transport.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use pushgate::{Comm, Context, HostEnd, QpConfig, UniqueId};
use pushgate_door::addresses::{Wish, listen, offer};
use pushgate_door::{Arrival, Door, DoorError, Limits, Purpose, Secret, Stream, Terms, dial};
use serde::{Deserialize, Serialize};

/// The version of connections and greetings.
const VERSION: u32 = 2;
/// What a proof is for.
const PURPOSE: Purpose = Purpose::new("nixl");
/// The longest name of an agent.
pub const LONGEST_NAME: usize = 1024;
/// The most bytes of a greeting: names are escaped in it.
const LONGEST_GREETING: usize = 16 << 10;
/// For one address, and for the answer. Long, for the host may be one whose cores are all taken.
const DIAL: Duration = Duration::from_secs(10);
/// What a full door answers.
const FULL: &str = "too many agents connect at once";
/// The most bytes of an answer.
const LONGEST_ANSWER: usize = 256;
/// What a door that lets a peer in answers.
const WELCOME: &str = "welcome";

/// How an agent is reached, as other agents load it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Connection {
    pushgate: u32,
    /// Which run of the agent it is.
    pub instance: String,
    places: Vec<SocketAddr>,
    key: [u8; 32],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Greeting {
    pushgate: u32,
    /// Who is wanted, and who comes: runs of agents.
    to: String,
    from: String,
    name: String,
    id: String,
}

/// Who has come, and the communicator that it waits in.
pub struct Visitor {
    /// The agent's name.
    pub name: String,
    /// Which run of it.
    pub instance: String,
    id: UniqueId,
}

/// Why an agent was not reached.
#[derive(Debug)]
pub struct Unreached {
    /// A sentence.
    pub why: String,
    /// Another attempt may succeed.
    pub again: bool,
    /// The queue pair that was asked for can't be: another attempt needs another window.
    pub unfit: bool,
}

impl Unreached {
    fn for_now(why: impl ToString) -> Unreached {
        Unreached { why: why.to_string(), again: true, unfit: false }
    }
}

/// Opens an agent's door, and says how it is reached.
pub fn open(context: &Context, instance: &str) -> Result<(Door, Connection), String> {
    let s = context.settings();
    let offered = offer(&Wish { host: &s.host, ..Wish::default() })?;
    let listeners = listen(&offered.sockets()).map_err(|e| format!("listening: {e}"))?;
    let (secret, key) = Secret::random::<32>().map_err(|e| format!("a secret: {e}"))?;
    let limits = Limits { greeting: LONGEST_GREETING, time: 2 * DIAL, ..Limits::default() };
    let door = Door::on_all(listeners, terms(secret, s.tls), limits).map_err(|e| e.to_string())?;
    let places = door.local_addrs().map_err(|e| e.to_string())?;
    Ok((door, Connection { pushgate: VERSION, instance: instance.into(), places, key }))
}

fn terms(secret: Secret, tls: bool) -> Terms {
    Terms { secret, purpose: PURPOSE, tls }
}

impl Connection {
    /// The bytes that other agents load.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("it has no map with keys that are no text")
    }

    /// Reads what another agent gave.
    pub fn from_bytes(bytes: &[u8]) -> Result<Connection, String> {
        let read: Connection = serde_json::from_slice(bytes)
            .map_err(|e| format!("a connection that no agent of pushgate {} made: {e}", pushgate::VERSION))?;
        match read.pushgate == VERSION && !read.places.is_empty() && read.places.len() <= 64 {
            true => Ok(read),
            false => Err(format!("a connection of version {}; this is version {VERSION}", read.pushgate)),
        }
    }

    /// Connects to the agent. Waits: for a thread of its own.
    pub fn dial(
        &self,
        context: &Context,
        name: &str,
        instance: &str,
        window: u64,
    ) -> Result<(Comm, HostEnd), Unreached> {
        let id = UniqueId::new(context).map_err(Unreached::for_now)?;
        let greeting = Greeting {
            pushgate: VERSION,
            to: self.instance.clone(),
            from: instance.into(),
            name: name.into(),
            id: id.to_string(),
        };
        let greeting = serde_json::to_vec(&greeting).expect("text alone");
        let secret = Secret::new(&self.key).map_err(Unreached::for_now)?;
        let terms = terms(secret, context.settings().tls);
        let mut failed = Unreached { why: String::new(), again: false, unfit: false };
        for place in &self.places {
            match dial(*place, &terms, &greeting, Instant::now() + DIAL) {
                Ok(stream) => match answer(&stream).map_err(Unreached::for_now)?.trim_end() {
                    WELCOME => {
                        return join(context, &id, 0, window).map_err(|e| Unreached {
                            why: e.to_string(),
                            again: !e.is_config(),
                            unfit: e.is_config(),
                        });
                    }
                    other => {
                        let (why, again) = (format!("it refuses: {other}"), other == FULL);
                        return Err(Unreached { why, again, unfit: false });
                    }
                },
                Err(e) => {
                    // Where nobody listens, the agent has ended.
                    let ended = matches!(&e, DoorError::Connect { error, .. } if error.kind() == ErrorKind::ConnectionRefused);
                    failed.again |= !ended;
                    failed.why =
                        format!("{}{}{e}", failed.why, if failed.why.is_empty() { "" } else { "; " });
                }
            }
        }
        Err(failed)
    }
}

/// Reads who has come, and answers: a visitor to join, or why not.
pub fn receive(arrival: &Arrival, instance: &str, room: bool) -> Result<Visitor, String> {
    let visitor = read(arrival, instance).and_then(|visitor| match room {
        true => Ok(visitor),
        false => Err(FULL.to_owned()),
    });
    let text = match &visitor {
        Ok(_) => format!("{WELCOME}\n"),
        Err(why) => format!("{why}\n"),
    };
    // A new connection takes so few bytes at once. A peer that has gone does not matter.
    let _ = arrival.stream.send(&[IoSlice::new(text.as_bytes())]);
    arrival.stream.close();
    visitor
}

fn read(arrival: &Arrival, instance: &str) -> Result<Visitor, String> {
    let greeting: Greeting = serde_json::from_slice(&arrival.greeting)
        .map_err(|e| format!("a greeting that can't be read: {e}"))?;
    if greeting.pushgate != VERSION {
        return Err(format!("a greeting of version {}; this is version {VERSION}", greeting.pushgate));
    }
    if greeting.to != instance {
        return Err("the agent that was meant has ended: load the metadata of the one that runs now".into());
    }
    if greeting.name.len() > LONGEST_NAME || greeting.from.len() > LONGEST_NAME {
        return Err(format!("a name of more than {LONGEST_NAME} bytes"));
    }
    let id = greeting.id.parse::<UniqueId>().map_err(|e| e.to_string())?;
    Ok(Visitor { name: greeting.name, instance: greeting.from, id })
}

impl Visitor {
    /// Joins the visitor. Waits: for a thread of its own.
    pub fn join(&self, context: &Context, window: u64) -> pushgate::Result<(Comm, HostEnd)> {
        join(context, &self.id, 1, window)
    }
}

fn answer(stream: &Stream) -> Result<String, String> {
    let (until, mut all) = (Instant::now() + DIAL, Vec::new());
    while !all.ends_with(b"\n") && all.len() < LONGEST_ANSWER {
        let mut some = [0; LONGEST_ANSWER];
        match stream.recv(&mut [IoSliceMut::new(&mut some)]) {
            Ok(0) if all.is_empty() => return Err("its door closed the connection without an answer".into()),
            Ok(0) => break,
            Ok(n) => all.extend(&some[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(e) => return Err(format!("its door did not answer: {e}")),
        }
    }
    String::from_utf8(all).map_err(|_| "its door answered no text".into())
}

fn join(context: &Context, id: &UniqueId, rank: u32, window: u64) -> pushgate::Result<(Comm, HostEnd)> {
    let comm = Comm::connect_with(context, id, rank, 2)?;
    let config = QpConfig { window_size: Some(window), ..QpConfig::default() };
    let qp = comm.queue_pair(1 - rank, 0, config)?;
    let end = std::sync::Arc::new(qp).host_end()?;
    Ok((comm, end))
}
