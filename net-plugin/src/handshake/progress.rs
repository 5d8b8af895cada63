//! A connection between the greeting and the joined queue pair, alike at both ends.

use std::sync::Arc;

use pushgate::settings::Transport;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_engine::connect::{self, Connect, Event, Fds, Incarnation};
use pushgate_engine::engine::EngineError;

use super::greeting::{greet, greeting, lost, same_told};
use crate::again::{Here, Place, Token};
use crate::error::{Failure, Result};
use crate::handle::Key;
use crate::join::{Again, Joined, MetEnd, NewEnd, ReadyEnd, Role};
use crate::runtime::Runtime;
use crate::socket::{Channel, Line, Renewal};
use crate::stream::Stream;

/// A queue pair that was just made, and the socket by which its ends hear of each other's end.
pub struct Made {
    pub joined: Box<Joined>,
    pub line: Arc<Line>,
}

/// The most frames that one end takes from the other. Three are needed: greeting, RESUME, READY.
pub(super) const FRAMES: u32 = 8;

/// A connection between the greeting and the joined queue pair. NCCL calls as long as it waits, and gives up by closing
/// the connection, so this end has no limit of its own and no clock.
pub struct Progress {
    channel: Channel,
    key: Key,
    /// That of the queue pair.
    transport: Transport,
    /// How many frames of the other end have come. The first is its greeting.
    heard: u32,
    /// `None` once the queue pair's engine has it.
    connect: Option<Connect<Fds>>,
    pub(super) step: Step,
    joined: Unclaimed,
    /// By which the other end names this connection when it dials again.
    token: Option<Token>,
}

/// How far this end is.
pub(super) enum Step {
    New(NewEnd),
    Ready(ReadyEnd),
    /// Both ends are ready; the link may still lack its streams.
    Met(Box<MetEnd>),
    /// Joined, or failed on the way.
    Over,
}

/// A queue pair that belongs to no connection yet. If it is dropped here, the engine lets go of it
/// before the GPU lets go of its memory.
struct Unclaimed(Option<Joined>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(mut joined) = self.0.take() else { return };
        if let Err(EngineError::Unsettled(_)) = joined.lane.engine.remove_qp(joined.qp) {
            std::mem::forget(std::mem::take(&mut joined.registrations));
        }
    }
}

impl Progress {
    /// Greets the other end and makes it an offer.
    pub fn new(
        runtime: &Runtime,
        channel: Channel,
        end: NewEnd,
        offer: connect::Frame,
        key: Key,
        transport: Transport,
    ) -> Result<Self> {
        let between_hosts = transport != Transport::Local;
        let token = runtime.watch.here().filter(|_| between_hosts).map(Here::token).transpose()?;
        let links = transport == Transport::Tcp;
        let ours = greet(runtime, &key, token.as_ref().map(Token::place), links);
        channel.send(&ours, Vec::new()).map_err(lost)?;
        // A connection has one call of each end; none is repeated.
        let own = Incarnation::MIN;
        let connect = Connect::new(own, offer, u64::MAX, Status::new(abi::PUSHGATE_ABORTED), 0);
        let connect = Some(connect);
        let (step, joined) = (Step::New(end), Unclaimed(None));
        Ok(Progress { channel, key, transport, heard: 0, connect, step, joined, token })
    }

    /// The other end has greeted; it is dialled again at `again` if this end dials, and dials this end otherwise.
    pub fn greeted(&mut self, again: Option<Place>, role: Role) {
        self.heard = 1;
        if let Some((own, other)) = self.token.take_if(|_| again.is_some()).zip(again) {
            let other = match self.channel.stream() {
                Stream::Tcp(s) => s.peer_addr().map_or(other, |peer| other.reached(peer)),
                Stream::Unix(_) => other,
            };
            self.channel.line().may_renew(Renewal { own, dials: role == Role::Send, other });
        }
    }

    /// Returns the queue pair and its socket once every frame has been sent and received.
    pub fn advance(&mut self, runtime: &Runtime) -> Result<Option<Made>> {
        let advanced = self.exchange(runtime);
        // An end that refuses this one greets it and closes, perhaps before this end has sent its offer.
        if advanced.is_err()
            && self.heard == 0
            && let Ok(Some((bytes, fds))) = self.channel.receive()
        {
            self.channel.discard(fds);
            same_told(runtime, &greeting(&bytes, &self.key)?)?;
        }
        let made = |joined| Made { joined: Box::new(joined), line: self.channel.line().clone() };
        Ok(advanced?.map(made))
    }

    /// Whether the other end of a socket of this host has said nothing.
    pub fn is_unheard_here(&self) -> bool {
        self.heard == 0 && self.transport == Transport::Local
    }

    fn exchange(&mut self, runtime: &Runtime) -> Result<Option<Joined>> {
        self.perform(runtime)?;
        // Looked at before the streams: they come before the other end closes.
        let is_hung_up = matches!(self.step, Step::Met(_)) && self.channel.stream().is_hung_up();
        self.join(runtime)?;
        if is_hung_up && matches!(self.step, Step::Met(_)) {
            return Err(lost(
                "the other end gave up while the streams of the queue pair were to come; its log says why",
            ));
        }
        // What comes after the last frame is the watch's.
        while self.joined.0.is_none()
            && !matches!(self.step, Step::Met(_))
            && let Some((bytes, fds)) = self.channel.receive().map_err(lost)?
        {
            if self.heard == 0 {
                self.channel.discard(fds);
                let heard = greeting(&bytes, &self.key)?;
                same_told(runtime, &heard)?;
                self.greeted(heard.again, Role::Send);
                continue;
            }
            self.heard += 1;
            // Otherwise a peer that sends all the time would keep this call going, and one that reads nothing could make
            // our answers pile up.
            if self.heard > FRAMES {
                return Err(lost(format!("the other end sent more than {FRAMES} frames")));
            }
            let frame = connect::Frame { bytes, along: fds.into() };
            let connect = self.connect.as_mut().expect("it is not joined");
            connect.take(frame, 0).map_err(lost)?;
            self.perform(runtime)?;
        }
        let sent = self.channel.flush().map_err(lost)?;
        Ok(if sent { self.joined.0.take() } else { None })
    }

    /// Joins the queue pair, if both ends are ready and the link has all that it needs.
    fn join(&mut self, runtime: &Runtime) -> Result<()> {
        if let Step::Met(end) = &mut self.step
            && end.is_complete()?
            && let Step::Met(end) = std::mem::replace(&mut self.step, Step::Over)
        {
            let pid = self.channel.stream().peer_pid();
            let again = Again { connect: &mut self.connect, line: self.channel.line() };
            self.joined.0 = Some(end.join(runtime, pid, Some(again))?);
        }
        Ok(())
    }

    /// Does everything that the machine says.
    fn perform(&mut self, runtime: &Runtime) -> Result<()> {
        while let Some(connect) = &mut self.connect
            && let Some(event) = connect.poll()
        {
            match (event, std::mem::replace(&mut self.step, Step::Over)) {
                (Event::Send(connect::Frame { bytes, along }), step) => {
                    self.step = step;
                    let fds = along.into_owned().map_err(Failure::system("a connection's descriptors"))?;
                    self.channel.send(&bytes, fds).map_err(lost)?;
                }
                (Event::Prepare { epoch, offer }, Step::New(end)) => {
                    let ready = end.prepare(runtime, offer)?;
                    connect.prepared(epoch, ready.places(), 0);
                    self.step = Step::Ready(ready);
                }
                (Event::Go { places, .. }, Step::Ready(end)) => {
                    self.step = Step::Met(Box::new(end.meet(&places)?));
                    return self.join(runtime);
                }
                _ => return Err(lost("the other end gave it up; its log says why")),
            }
        }
        Ok(())
    }
}
