//! How two ends of a queue pair meet, the first time and every later time: the frames that they send each other, and what
//! each end does next.
//!
//! Each end sends RESUME with its transport's offer. An end that has the peer's offer gets ready to receive and sends
//! READY with its transport's places: where the peer may write. An end that is ready and has the peer's READY goes
//! **live**. An end that gives a link up sends BREAK and begins the next epoch with a new offer. END says that its sender
//! has ended, with the cause. [`Recovery`] decides the phases; this module adds what travels: offers, places, and who sent
//! them.
//!
//! Either program may repeat a call that failed while the other program still waits in its own call. So each call is an
//! **incarnation** of its end, with a number that only grows, and each frame names its sender's incarnation and, where it
//! is known, its receiver's. A frame to another incarnation of this end is ignored. If a newer incarnation of the peer
//! comes before this end is live, everything that the older incarnation said is void: this end repeats its RESUME if it
//! had not taken the older one's offer, and else begins the next epoch.
//!
//! An incarnation of the peer that ends before this end is live ends this end too if its END names this end's incarnation.
//! An END that names another incarnation, or none, is of a call that had given up before this end came; this end waits for
//! the peer's next call.
//!
//! Pure state. Time is passed in, in nanoseconds of any monotonic clock. No call waits. The caller hands frames that
//! arrive to [`Connect::take`], calls [`Connect::tick`] at [`Connect::wakes_at`], and performs what [`Connect::poll`]
//! answers, until that is `None`.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::num::NonZeroU64;

use pushgate_abi::abi;

use crate::recovery::{Control, Order, Patience, Phase, Recovery};
use crate::session::Status;

/// The number of one incarnation of an end. Later ones of the same end have greater numbers.
pub type Incarnation = NonZeroU64;

/// Length of a frame's head: kind, epoch, the sender's incarnation, the receiver's incarnation or 0.
const HEAD: usize = 21;
/// How many epochs a frame may be ahead of this end. Two ends whose channel was lost for a while differ by a few dozen.
const AHEAD: u32 = 1024;
/// The last epoch that a frame may name. This end's own epochs go on from there, a few each second, and never overflow.
const LAST_EPOCH: u32 = u32::MAX / 2;
/// The pause before the second new epoch in a row; it doubles up to `LONGEST_PAUSE`. Nanoseconds.
const FIRST_PAUSE: u64 = 10_000_000;
const LONGEST_PAUSE: u64 = 1_000_000_000;

/// What one end sends the other: bytes, and what travels beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame<F> {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// What travels beside them, such as descriptors.
    pub along: F,
}

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Resume {
        accepted: u64,
    },
    Ready,
    Break,
    End(Status),
    /// What follows is about one of several links.
    Rail,
}

/// The head of a frame and what the frame says, without the transport's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    said: Said,
    epoch: u32,
    from: Incarnation,
    to: Option<Incarnation>,
}

/// A frame that no end of this release would send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Too short for what it is.
    #[error("a set-up frame of {bytes} bytes, expected at least {least}")]
    Short {
        /// Bytes of the frame.
        bytes: usize,
        /// The least that a frame of this kind has.
        least: usize,
    },
    /// A kind that does not exist.
    #[error("a set-up frame of kind {0}, expected 1 to 5")]
    Kind(u8),
    /// The sender is incarnation 0, or a READY names no receiver.
    #[error("a set-up frame that does not name both incarnations")]
    Unnamed,
    /// An epoch that the sender can't have reached.
    #[error("a set-up frame of epoch {epoch}, this end is at {ours}")]
    Epoch {
        /// The frame's.
        epoch: u32,
        /// This end's.
        ours: u32,
    },
    /// A RESUME that has accepted messages of an end that was never live.
    #[error("a set-up frame that has accepted {0} messages of a queue pair that is new")]
    Accepted(u64),
    /// An END with a status word that says OK.
    #[error("an end without a status")]
    NoStatus,
}

impl Head {
    /// The kinds' numbers, as they are sent.
    const RESUME: u8 = 1;
    const READY: u8 = 2;
    const BREAK: u8 = 3;
    const END: u8 = 4;
    const RAIL: u8 = 5;

    fn bytes(&self) -> Vec<u8> {
        let (kind, word) = match self.said {
            Said::Resume { accepted } => (Self::RESUME, Some(accepted)),
            Said::Ready => (Self::READY, None),
            Said::Break => (Self::BREAK, None),
            Said::End(status) => (Self::END, Some(status.word())),
            Said::Rail => (Self::RAIL, None),
        };
        let mut bytes = vec![kind];
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.from.get().to_le_bytes());
        bytes.extend(self.to.map_or(0, Incarnation::get).to_le_bytes());
        bytes.extend(word.into_iter().flat_map(u64::to_le_bytes));
        bytes
    }

    /// Reads a frame's head. What follows is the transport's.
    fn parse(bytes: &[u8]) -> Result<(Head, &[u8]), Malformed> {
        let short = |least| Malformed::Short { bytes: bytes.len(), least };
        let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or(short(HEAD))?;
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let next = || {
            let (word, rest) = rest.split_first_chunk::<8>().ok_or(short(HEAD + 8))?;
            Ok((u64::from_le_bytes(*word), rest))
        };
        let (said, rest) = match head[0] {
            Self::RESUME => next().map(|(accepted, rest)| (Said::Resume { accepted }, rest))?,
            Self::READY => (Said::Ready, rest),
            Self::BREAK => (Said::Break, rest),
            Self::RAIL => (Said::Rail, rest),
            Self::END => {
                let (word, rest) = next()?;
                (Said::End(Status::from_word(word).ok_or(Malformed::NoStatus)?.checked()), rest)
            }
            kind => return Err(Malformed::Kind(kind)),
        };
        let epoch = u32::from_le_bytes(head[1..5].try_into().expect("four bytes"));
        let (from, to) = (Incarnation::new(word(5)).ok_or(Malformed::Unnamed)?, Incarnation::new(word(13)));
        if said == Said::Ready && to.is_none() {
            return Err(Malformed::Unnamed);
        }
        Ok((Head { said, epoch, from, to }, rest))
    }
}

/// The incarnation that sent a frame; `None` if the frame is malformed.
pub fn sender(bytes: &[u8]) -> Option<Incarnation> {
    Head::parse(bytes).ok().map(|(head, _)| head.from)
}

/// The incarnation to which a frame was sent; `None` if the frame names none, or is malformed.
pub fn receiver(bytes: &[u8]) -> Option<Incarnation> {
    Head::parse(bytes).ok().and_then(|(head, _)| head.to)
}

/// The incarnation that has ended, and its status, if the frame is an END. For a reader of the channel, which sees frames
/// while no [`Connect`] takes them.
pub fn ended(bytes: &[u8]) -> Result<Option<(Incarnation, Status)>, Malformed> {
    if bytes.first() != Some(&Head::END) {
        return Ok(None);
    }
    let (head, _) = Head::parse(bytes)?;
    match head.said {
        Said::End(status) => Ok(Some((head.from, status))),
        _ => Ok(None),
    }
}

/// The bytes of the END that incarnation `own` sends to the peer's incarnation `peer`, where that is known.
pub fn end(own: Incarnation, peer: Option<Incarnation>, status: Status) -> Vec<u8> {
    Head { said: Said::End(status), epoch: 0, from: own, to: peer }.bytes()
}

/// The bytes of a control message about rail `rail` of a queue pair, from incarnation `own` to the peer's incarnation
/// `peer`; `body` follows it, an offer or places. A [`Connect`] takes no such frame.
pub fn rail(own: Incarnation, peer: Incarnation, rail: u8, control: Control, body: &[u8]) -> Vec<u8> {
    let (said, epoch) = match control {
        Control::Break { epoch } => (Said::Break, epoch),
        Control::Resume { epoch, accepted } => (Said::Resume { accepted }, epoch),
        Control::Ready { epoch } => (Said::Ready, epoch),
        Control::End(status) => (Said::End(status), 0),
    };
    let to = Some(peer);
    let mut bytes = Head { said: Said::Rail, epoch: 0, from: own, to }.bytes();
    bytes.push(rail);
    bytes.extend(Head { said, epoch, from: own, to }.bytes());
    bytes.extend(body);
    bytes
}

/// Reads what [`rail`] wrote: the rail, the control message about it, and what follows. `None` for any other frame.
pub fn of_rail(bytes: &[u8]) -> Option<(u8, Control, &[u8])> {
    let (Head { said: Said::Rail, .. }, rest) = Head::parse(bytes).ok()? else { return None };
    let (rail, rest) = rest.split_first()?;
    let (Head { said, epoch, .. }, body) = Head::parse(rest).ok()?;
    let control = match said {
        Said::Break => Control::Break { epoch },
        Said::Resume { accepted } => Control::Resume { epoch, accepted },
        Said::Ready => Control::Ready { epoch },
        Said::End(status) => Control::End(status),
        Said::Rail => return None,
    };
    Some((*rail, control, body))
}

/// What the caller has to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<F> {
    /// Send this to the peer. What can't be sent because the channel is lost is dropped.
    Send(Frame<F>),
    /// Bring everything of the last link, and of a link that was prepared, to its end, then call [`Connect::fenced`] with
    /// a new offer.
    Fence,
    /// Get ready to receive over the link of this epoch, then call [`Connect::prepared`].
    Prepare {
        /// The link's epoch.
        epoch: u32,
        /// The peer's offer.
        offer: Frame<F>,
    },
    /// Go live: post over the link of this epoch, beginning after the first `accepted` messages.
    Go {
        /// The link's epoch.
        epoch: u32,
        /// Where the peer's transport may be written.
        places: Vec<u8>,
        /// Messages of this end that the peer says it has accepted: 0 the first time. Only the caller knows how many it
        /// has sent.
        accepted: u64,
    },
    /// The session has ended. Nothing follows but frames to send.
    End(Status),
}

/// The peer's latest incarnation.
#[derive(Clone, Copy, Debug)]
struct Peer {
    incarnation: Incarnation,
    /// It has sent END.
    ended: bool,
}

/// How one end of a queue pair meets the other. `F` is what travels beside bytes.
#[derive(Debug)]
pub struct Connect<F> {
    recovery: Recovery,
    own: Incarnation,
    peer: Option<Peer>,
    /// This end has been live with the peer's incarnation: no other incarnation may take its place.
    bound: bool,
    /// Messages of the peer that this end has accepted, as of its last fence.
    accepted: u64,
    /// This end's offer for the epoch; `None` from [`Event::Fence`] to [`Connect::fenced`], and from [`Event::Go`] on.
    offer: Option<Frame<F>>,
    /// The peer's offer for the epoch, until [`Event::Prepare`] hands it out.
    theirs: Option<Frame<F>>,
    /// This end's places, once it is ready to receive, until [`Event::Go`].
    places: Option<Vec<u8>>,
    /// The peer's places, until [`Event::Go`] hands them out.
    their_places: Option<Vec<u8>>,
    events: VecDeque<Event<F>>,
    orders: Vec<Order>,
}

impl<F: Clone + Default> Connect<F> {
    /// An end that meets the peer for the first time. It sends `offer` at once. If the peer does not answer within `limit`
    /// nanoseconds, or both have not met within `limit` of the peer's first answer, it ends with `gives_up`.
    pub fn new(own: Incarnation, offer: Frame<F>, limit: u64, gives_up: Status, now: u64) -> Self {
        let jitter = own.get();
        let patience = Patience {
            attempt: limit,
            first_pause: FIRST_PAUSE,
            longest_pause: LONGEST_PAUSE,
            whole: limit,
            jitter,
        };
        let mut orders = Vec::new();
        let recovery = Recovery::offered(patience, gives_up, now, &mut orders);
        let mut connect = Connect {
            recovery,
            own,
            peer: None,
            bound: false,
            accepted: 0,
            offer: Some(offer),
            theirs: None,
            places: None,
            their_places: None,
            events: VecDeque::new(),
            orders,
        };
        connect.perform();
        connect
    }

    /// An end that is live with the peer's incarnation `peer` over the link of `epoch`, for an engine that did not see the ends
    /// meet. `None` if no ends meet in such an epoch.
    pub fn joined(own: Incarnation, peer: Incarnation, epoch: u32) -> Option<Self> {
        let patience = Patience {
            attempt: 0,
            first_pause: FIRST_PAUSE,
            longest_pause: LONGEST_PAUSE,
            whole: 0,
            jitter: 0,
        };
        let recovery = Recovery::new(patience, Status::new(abi::PUSHGATE_LINK_DOWN)).in_epoch(epoch);
        (epoch <= LAST_EPOCH).then(|| Connect {
            recovery,
            own,
            peer: Some(Peer { incarnation: peer, ended: false }),
            bound: true,
            accepted: 0,
            offer: None,
            theirs: None,
            places: None,
            their_places: None,
            events: VecDeque::new(),
            orders: Vec::new(),
        })
    }

    /// Limits and last status of the recoveries to come, for an end that has just gone live for the first time.
    pub fn recovers(&mut self, patience: Patience, gives_up: Status) {
        self.recovery.set_patience(patience, gives_up);
    }

    /// Says how far the session has come: a count that grows with each message that either end has accepted, and whether
    /// messages that this end has posted have not arrived. To be told before a link is given up, and before a frame is taken
    /// ([`Recovery::progress`]).
    pub fn progress(&mut self, count: u64, waits: bool) {
        self.recovery.progress(count, waits);
    }

    /// The next thing to do. Call it until it is `None` after every other call.
    pub fn poll(&mut self) -> Option<Event<F>> {
        self.events.pop_front()
    }

    /// The next time at which [`Connect::tick`] has something to do, if there is one.
    pub fn wakes_at(&self) -> Option<u64> {
        self.recovery.wakes_at()
    }

    /// Whether the peer's latest incarnation has sent END.
    pub fn peer_has_ended(&self) -> bool {
        self.peer.is_some_and(|peer| peer.ended)
    }

    /// Where the session stands.
    pub fn phase(&self) -> Phase {
        self.recovery.phase()
    }

    /// The epoch of the link that is live, or of the next one.
    pub fn epoch(&self) -> u32 {
        self.recovery.epoch()
    }

    /// This end's incarnation.
    pub fn own(&self) -> Incarnation {
        self.own
    }

    /// The peer's latest incarnation that was heard of. Once this end is live: the incarnation that it is live with.
    pub fn peer(&self) -> Option<Incarnation> {
        self.peer.map(|peer| peer.incarnation)
    }

    /// Takes a frame of the peer. A frame that is out of date changes nothing. Frames that are not taken before
    /// [`Event::End`] are for the next incarnation of this end.
    pub fn take(&mut self, frame: Frame<F>, now: u64) -> Result<(), Malformed> {
        let Frame { mut bytes, along } = frame;
        let (head, rest) = Head::parse(&bytes)?;
        let (at, ours) = (bytes.len() - rest.len(), self.recovery.epoch());
        if head.epoch > ours.saturating_add(AHEAD).min(LAST_EPOCH) {
            return Err(Malformed::Epoch { epoch: head.epoch, ours });
        }
        let old =
            self.peer.is_some_and(|p| head.from < p.incarnation || head.from == p.incarnation && p.ended);
        if old || matches!(self.phase(), Phase::Ended(_)) {
            return Ok(());
        }
        if head.said == Said::Rail {
            // A link of this session is its only one.
            return Err(Malformed::Kind(Head::RAIL));
        }
        if let Said::End(status) = head.said {
            self.peer_ended(&head, status, now);
            return Ok(());
        }
        if head.to.is_some_and(|to| to != self.own) && !planted!(P6Stale) {
            return Ok(());
        }
        if let Said::Resume { accepted: accepted @ 1.. } = head.said
            && !self.bound
        {
            return Err(Malformed::Accepted(accepted));
        }
        self.meet(head.from, now);
        let ours = self.recovery.epoch();
        let control = match head.said {
            Said::Resume { accepted } => {
                let awaited = matches!(self.phase(), Phase::Fencing | Phase::Offered) && head.epoch == ours;
                if awaited || head.epoch > ours {
                    bytes.drain(..at);
                    self.theirs = Some(Frame { bytes, along });
                }
                Control::Resume { epoch: head.epoch, accepted }
            }
            Said::Ready => {
                if matches!(self.phase(), Phase::Offered | Phase::Joining) && head.epoch == ours {
                    bytes.drain(..at);
                    self.their_places = Some(bytes);
                }
                self.go(now);
                return Ok(());
            }
            Said::Break => Control::Break { epoch: head.epoch },
            Said::End(_) | Said::Rail => unreachable!("handled above"),
        };
        self.recovery.take(control, self.accepted, now, &mut self.orders);
        self.perform();
        Ok(())
    }

    /// This end is ready to receive over the link of `epoch`; `places` is what the peer needs to know for that.
    pub fn prepared(&mut self, epoch: u32, places: Vec<u8>, now: u64) {
        if self.phase() != Phase::Joining || self.recovery.epoch() != epoch {
            return;
        }
        self.places = Some(places);
        if self.their_places.is_none() || !planted!(P7Ready) {
            self.send_ready();
        }
        self.go(now);
    }

    /// [`Event::Fence`] was carried out: nothing of an earlier link can touch this end's memory, and `accepted` messages
    /// of the peer were accepted. `offer` is this end's offer for the next link.
    pub fn fenced(&mut self, accepted: u64, offer: Frame<F>, now: u64) {
        self.accepted = accepted;
        self.offer = Some(offer);
        self.recovery.fenced(accepted, now, &mut self.orders);
        self.perform();
    }

    /// The link that is live or being joined has broken; `gives_up` is what the session ends with if no other takes its
    /// place.
    pub fn link_down(&mut self, gives_up: Status, now: u64) {
        self.recovery.link_down(now, gives_up, &mut self.orders);
        self.perform();
    }

    /// Looks at the time.
    pub fn tick(&mut self, now: u64) {
        self.recovery.tick(self.accepted, now, &mut self.orders);
        self.perform();
    }

    /// Ends the session, and tells the peer.
    pub fn abort(&mut self, status: Status) {
        self.recovery.abort(status, &mut self.orders);
        self.perform();
    }

    /// A frame of an incarnation of the peer that has not ended has come.
    fn meet(&mut self, from: Incarnation, now: u64) {
        let newer = self.peer.is_some_and(|p| p.incarnation != from);
        if newer && self.bound {
            // The newer incarnation knows nothing of the messages that the older one had. The END names the older one, so
            // the newer one goes on waiting, for this end's next incarnation.
            self.abort(Status::new(abi::PUSHGATE_ABORTED));
            return;
        }
        self.peer = Some(Peer { incarnation: from, ended: false });
        if newer {
            let offered = self.phase() == Phase::Offered;
            self.forget(now);
            if offered {
                // The older one may have taken it.
                self.send_resume();
            }
        }
    }

    /// An incarnation of the peer that is not known to have ended has sent END.
    fn peer_ended(&mut self, head: &Head, status: Status, now: u64) {
        self.peer = Some(Peer { incarnation: head.from, ended: true });
        if self.bound || head.to == Some(self.own) {
            self.recovery.take(Control::End(status), self.accepted, now, &mut self.orders);
            self.perform();
        } else {
            self.forget(now);
        }
    }

    /// Voids everything that the peer has said so far.
    fn forget(&mut self, now: u64) {
        (self.theirs, self.their_places) = (None, None);
        self.recovery.forget_peer(now, &mut self.orders);
        self.perform();
    }

    /// Goes live if this end and the peer are ready to receive.
    fn go(&mut self, now: u64) {
        if self.phase() == Phase::Joining && self.places.is_some() && self.their_places.is_some() {
            let ready = Control::Ready { epoch: self.recovery.epoch() };
            self.recovery.take(ready, self.accepted, now, &mut self.orders);
            self.perform();
        }
    }

    fn perform(&mut self) {
        for order in std::mem::take(&mut self.orders) {
            match order {
                Order::Send(Control::Resume { .. }) => self.send_resume(),
                // Without places it is sent when the caller is ready.
                Order::Send(Control::Ready { .. }) => self.send_ready(),
                Order::Send(Control::Break { epoch }) => {
                    if self.peer.is_none_or(|p| !p.ended) {
                        self.send(Said::Break, epoch, self.peer(), Vec::new(), F::default());
                    }
                }
                Order::Send(Control::End(status)) => {
                    self.send(
                        Said::End(status),
                        self.recovery.epoch(),
                        self.peer(),
                        Vec::new(),
                        F::default(),
                    );
                }
                Order::Fence => {
                    (self.offer, self.places, self.their_places) = (None, None, None);
                    self.events.push_back(Event::Fence);
                }
                Order::Prepare(epoch) => {
                    let offer = self.theirs.take().expect("the peer's RESUME comes with its offer");
                    self.events.push_back(Event::Prepare { epoch, offer });
                }
                Order::Go { epoch, accepted } => {
                    self.bound = true;
                    (self.offer, self.places) = (None, None);
                    let places = self.their_places.take().expect("the peer's READY comes with its places");
                    self.events.push_back(Event::Go { epoch, places, accepted });
                }
                Order::End(status) => self.events.push_back(Event::End(status)),
            }
        }
    }

    fn send_resume(&mut self) {
        let Some(Frame { bytes, along }) = self.offer.clone() else { return };
        let to = self.peer.filter(|p| !p.ended).map(|p| p.incarnation);
        let said = Said::Resume { accepted: self.accepted };
        self.send(said, self.recovery.epoch(), to, bytes, along);
    }

    fn send_ready(&mut self) {
        let Some(places) = self.places.clone() else { return };
        self.send(Said::Ready, self.recovery.epoch(), self.peer(), places, F::default());
    }

    fn send(&mut self, said: Said, epoch: u32, to: Option<Incarnation>, body: Vec<u8>, along: F) {
        let mut bytes = Head { said, epoch, from: self.own, to }.bytes();
        bytes.extend(body);
        self.events.push_back(Event::Send(Frame { bytes, along }));
    }
}
