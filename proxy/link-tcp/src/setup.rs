//! One end of a queue pair over TCP on its way up: with the peer's [`Offer`] a [`TcpOpening`] becomes a [`TcpPrepared`] end,
//! and that the link. The streams come beside that, and the link waits for them.

use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::versions::{ABI, Versions};
use pushgate_link::memory::Mapped;
use pushgate_link::receives::{MOST_AHEAD, PostedReceives};
use serde::{Deserialize, Serialize};

use super::frame::MOST_PAYLOAD;
use super::inbox::{Inbox, Mirror};
use super::meeting::{Meeting, Place};
use super::tcp_link::{TcpLink, Terms};

/// Versions of offers and frames that this build speaks.
pub const WIRE: Versions = Versions::new(1, 1);

/// The most streams of a link.
pub const MOST_STREAMS: u32 = 16;

/// How an end sets its link up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Streams of the link, 1 to 16. Of two ends that differ the lower number counts.
    pub streams: u32,
    /// Payloads have checksums. They do if either end asks for it.
    pub checksum: bool,
    /// Receives of this end name buffers.
    pub posted_receives: bool,
    /// SENDs of an end that may come before the receives that they take are posted, where those name buffers: short ones, which wait at
    /// the receiver. A SEND that waits for its receive holds up those after it, whatever their tags are. At most [`MOST_AHEAD`], and
    /// as many as the receiver posts at once. Both ends must say the same.
    pub ahead: u32,
    /// The program's own threads drive the engine, so a system call takes the program's time: where SENDs of the peer need not wait for
    /// news of receives, that news waits until there is more.
    pub thrifty: bool,
    /// Without anything else under way a beat is sent so often, nanoseconds.
    pub beat: u64,
}

/// What an end tells the peer first: who it is, what it can, and where it is met.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest_abi: Option<u32>,
    rank: u32,
    rings: [u32; 7],
    streams: u32,
    checksum: bool,
    posted_receives: bool,
    /// Not told by builds whose SENDs all wait for their receives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ahead: Option<u32>,
    recovers: bool,
    place: Place,
}

/// This end over TCP, before the other end is known.
pub struct TcpOpening {
    config: Config,
    geometry: Geometry,
    window: Mapped,
    meeting: Box<dyn Meeting>,
    place: Place,
    recovers: bool,
    part: usize,
}

/// This end over TCP, once it knows what the peer offers. Its streams are on their way.
pub struct TcpPrepared {
    terms: Terms,
    window: Mapped,
    meeting: Box<dyn Meeting>,
    mirror: Arc<SharedMemory>,
}

impl TcpOpening {
    /// An end that `meeting` brings streams. `window` is its payload ring; the geometry is checked. An error is a sentence.
    pub fn new(
        config: Config,
        geometry: Geometry,
        window: impl Into<Mapped>,
        mut meeting: Box<dyn Meeting>,
    ) -> Result<Self, String> {
        geometry.validate().map_err(|e| e.to_string())?;
        let place = meeting.offer()?;
        let (streams, ahead) = (config.streams.clamp(1, MOST_STREAMS), config.ahead.min(MOST_AHEAD));
        let config = Config { streams, ahead, ..config };
        let window = window.into();
        Ok(TcpOpening { config, geometry, window, meeting, place, recovers: false, part: MOST_PAYLOAD })
    }

    /// Has the end replace a link that breaks, if the other end does so too ([`TcpLink::recovers`]).
    pub fn recovering(self) -> Self {
        TcpOpening { recovers: true, ..self }
    }

    /// Messages are cut into parts of `bytes` bytes, at least 8. Shorter ones show more of how parts travel.
    #[cfg(any(test, feature = "sim"))]
    pub fn in_parts(self, bytes: usize) -> Self {
        TcpOpening { part: bytes.clamp(8, MOST_PAYLOAD), ..self }
    }

    /// The offer that the peer is told.
    pub fn offer(&self) -> Offer {
        let g = &self.geometry;
        Offer {
            version: WIRE.oldest(),
            newest: WIRE.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            rank: g.rank,
            rings: [g.window_log, g.slots_log, g.cq_log, g.rx_log, g.link_log, g.landing_log, g.signals],
            streams: self.config.streams,
            checksum: self.config.checksum,
            posted_receives: self.config.posted_receives,
            ahead: Some(self.config.ahead),
            recovers: self.recovers,
            place: self.place.clone(),
        }
    }

    /// Takes the offer of rank `peer`: checks it, makes the copy of the peer's window with `allocate`, and begins to meet
    /// the peer. An error is a sentence.
    pub fn prepare(
        mut self,
        peer: u32,
        offer: &Offer,
        allocate: &mut dyn FnMut(&str, usize) -> Result<SharedMemory, ShimError>,
    ) -> Result<TcpPrepared, String> {
        let peer_geometry = offer.check(peer)?;
        let (own, theirs) = (self.config.ahead, offer.ahead.unwrap_or(0));
        if own != theirs {
            return Err(format!(
                "it lets {theirs} messages leave before their receives are posted, and this end {own}: use the same release, and in the \
                 NCCL plugin the same PUSHGATE_QP, on all ranks"
            ));
        }
        let mirror = Arc::new(allocate("mirror", peer_geometry.window_bytes()).map_err(|e| e.to_string())?);
        let streams = self.config.streams.min(offer.streams) as usize;
        self.meeting.begin(&offer.place, streams)?;
        let most = self.config.ahead;
        let ahead = |posts: bool, receiver: Geometry| if posts { most.min(1 << receiver.rx_log) } else { 0 };
        let terms = Terms {
            geometry: self.geometry,
            peer_geometry,
            streams,
            posts_receives: self.config.posted_receives,
            peer_posts_receives: offer.posted_receives,
            goes_ahead: ahead(offer.posted_receives, peer_geometry),
            takes_ahead: ahead(self.config.posted_receives, self.geometry),
            recovers: self.recovers && offer.recovers,
            thrifty: self.config.thrifty,
            sums: self.config.checksum || offer.checksum,
            beat: self.config.beat,
            part: self.part,
        };
        Ok(TcpPrepared { terms, window: self.window, meeting: self.meeting, mirror })
    }
}

impl Offer {
    /// Checks the offer of rank `peer`: the peer's rings, or a sentence.
    fn check(&self, peer: u32) -> Result<Geometry, String> {
        let wire = WIRE.agree(Versions::told(self.version, self.newest));
        wire.map_err(|e| format!("frames over TCP: {e}"))?;
        ABI.agree(Versions::told(self.abi, self.newest_abi)).map_err(|e| format!("segments: {e}"))?;
        if self.rank != peer {
            return Err(format!("it says that it is rank {}", self.rank));
        }
        let [window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals] = self.rings;
        let geometry =
            Geometry { window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals, rank: peer };
        geometry.validate().map_err(|e| format!("its rings: {e}"))?;
        if let Some(ahead) = self.ahead.filter(|ahead| *ahead > MOST_AHEAD) {
            return Err(format!("{ahead} messages before their receives, expected at most {MOST_AHEAD}"));
        }
        if !(1..=MOST_STREAMS).contains(&self.streams) {
            return Err(format!("{} streams, expected 1 to {MOST_STREAMS}", self.streams));
        }
        self.place.check()?;
        Ok(geometry)
    }
}

impl TcpPrepared {
    /// The copy of the peer's window, where its payload arrives.
    pub fn mirror(&self) -> &Arc<SharedMemory> {
        &self.mirror
    }

    /// The peer's rings, checked.
    pub fn peer_geometry(&self) -> Geometry {
        self.terms.peer_geometry
    }

    /// Makes the link, and what the program sees of the peer's posted receives, if the peer posts any.
    pub fn join(self) -> (TcpLink, Option<PostedReceives>) {
        let terms = self.terms;
        let receives =
            terms.peer_posts_receives.then(|| Inbox::receives_of(&terms.peer_geometry, terms.goes_ahead));
        let log = terms.peer_geometry.rx_log;
        let posted = receives.clone().map(|ring| PostedReceives::new(ring, log, terms.goes_ahead));
        let mirror = Mirror::new(self.mirror, &terms.peer_geometry);
        let posts = terms.posts_receives.then_some((terms.geometry.rx_log, terms.takes_ahead));
        let inbox = Inbox::new(mirror, &terms.peer_geometry, posts, receives);
        (TcpLink::new(terms, self.window, inbox, self.meeting), posted)
    }
}
