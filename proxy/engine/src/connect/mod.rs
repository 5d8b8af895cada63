//! What an end of a queue pair does with its transport when it meets the other end.
//!
//! [`Connect`] (of `pushgate-core`) says when; this module does it, for every transport and every user:
//!
//! 1. An [`Opening`] is this end before the other end is known. It makes the offer that goes with RESUME.
//! 2. With the peer's offer it becomes a [`Prepared`] end, which is ready to receive. Its places go with READY.
//! 3. With the peer's places it becomes a [`Met`] end: what an engine is handed.
//!
//! Dropping any of the three releases everything that the end has, with the memory that the peer could write.
//!
//! Beside the transport's offer travels a note of the user's own, and after the transport's descriptors those that the
//! user appends.

mod local;
mod rails;
mod tcp;
mod verbs;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use pushgate_driver_shim::log::Foreign;
use pushgate_link_tcp::Offer as TcpOffer;
use pushgate_link_verbs::{Allocate, Offer, VerbsError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use local::{LocalMet, LocalOffer, LocalOpening, LocalPeer, LocalPrepared};
pub use pushgate_core::connect::{
    Connect, Event, Incarnation, Malformed, end, ended, of_rail, rail, receiver, sender,
};
pub use pushgate_core::recovery::Patience;
pub use rails::{RailFrames, RailsMet, RailsOpening, RailsPrepared};
pub use tcp::TcpMet;
pub use verbs::VerbsMet;

pub use pushgate_link::frame::{Fds, Frame, are_memory};
pub use pushgate_link_tcp::{TcpOpening, TcpPrepared};
pub use pushgate_link_verbs::{VerbsOpening, VerbsPrepared};

/// Why an end could not be joined to the other.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// What the peer sent does not fit; the text is a sentence.
    #[error("{0}")]
    Peer(String),
    /// The RDMA device, or what it was asked for.
    #[error(transparent)]
    Rdma(VerbsError),
    /// Descriptors could not be duplicated.
    #[error("descriptors of a queue pair: {0}")]
    Descriptors(io::Error),
}

impl From<VerbsError> for ConnectError {
    fn from(e: VerbsError) -> Self {
        match e {
            VerbsError::Peer { why, .. } => ConnectError::Peer(why),
            e => ConnectError::Rdma(e),
        }
    }
}

/// The body of a RESUME: the transport's offer, and the user's note.
#[derive(Serialize, Deserialize)]
struct Told<N> {
    offer: TransportOffer,
    note: N,
}

#[derive(Serialize, Deserialize)]
enum TransportOffer {
    Local(LocalOffer),
    Verbs(Offer),
    /// One for each rail; none for one whose device can't carry anything now.
    Rails(Vec<Option<Offer>>),
    Tcp(Box<TcpOffer>),
}

impl TransportOffer {
    fn transport(&self) -> &'static str {
        match self {
            TransportOffer::Local(_) => "local",
            TransportOffer::Verbs(_) => "verbs",
            TransportOffer::Rails(_) => "verbs over several devices",
            TransportOffer::Tcp(_) => "tcp",
        }
    }
}

/// This end, before the other end is known.
pub enum Opening {
    /// Over shared memory of one host.
    Local(LocalOpening),
    /// Over RDMA.
    Verbs(Box<VerbsOpening>),
    /// Over RDMA, with a link for each of several devices.
    Rails(RailsOpening),
    /// Over TCP.
    Tcp(Box<TcpOpening>),
}

/// This end, ready to receive what the other end sends.
pub enum Prepared {
    /// Over shared memory of one host.
    Local(Box<LocalPrepared>),
    /// Over RDMA.
    Verbs(Box<VerbsPrepared>),
    /// Over RDMA, with a link for each of several devices.
    Rails(RailsPrepared),
    /// Over TCP.
    Tcp(Box<TcpPrepared>),
}

/// This end, once both ends are ready: what an engine is handed.
pub enum Met {
    /// Over shared memory of one host.
    Local(Box<LocalMet>),
    /// Over RDMA.
    Verbs(Box<VerbsMet>),
    /// Over RDMA, with a link for each of several devices.
    Rails(Box<RailsMet>),
    /// Over TCP.
    Tcp(Box<TcpMet>),
}

impl Opening {
    /// The offer for [`Connect`], with the user's own `note` and the descriptors that the user appends.
    pub fn offer<N: Serialize>(&self, note: N, appended: &[BorrowedFd<'_>]) -> Result<Frame, ConnectError> {
        let (offer, fds) = match self {
            Opening::Local(opening) => (TransportOffer::Local(opening.offer()), opening.fds()),
            Opening::Verbs(opening) => (TransportOffer::Verbs(opening.offer()), Vec::new()),
            Opening::Rails(opening) => (TransportOffer::Rails(opening.offer()), Vec::new()),
            Opening::Tcp(opening) => (TransportOffer::Tcp(Box::new(opening.offer())), Vec::new()),
        };
        let fds =
            fds.iter().chain(appended).map(|fd| fd.try_clone_to_owned()).collect::<io::Result<Vec<_>>>();
        let bytes = serde_json::to_vec(&Told { offer, note }).expect("an offer is plain data");
        Ok(Frame { bytes, along: fds.map_err(ConnectError::Descriptors)?.into() })
    }

    /// Takes the offer of rank `peer`: checks it, and gets ready to receive. Returns with it the peer's note, and the
    /// `appended` descriptors that the peer's user must have appended. `allocate` makes the memory that the peer writes.
    pub fn prepare<N: DeserializeOwned>(
        self,
        peer: u32,
        offer: Frame,
        appended: usize,
        allocate: &mut Allocate<'_>,
    ) -> Result<(Prepared, N, Vec<OwnedFd>), ConnectError> {
        let Told { offer: theirs, note } = serde_json::from_slice(&offer.bytes).map_err(|e| {
            ConnectError::Peer(format!(
                "its offer of a queue pair: {}; run one release of pushgate at both ends",
                Foreign::word(e)
            ))
        })?;
        let mut fds = offer.along.into_owned().map_err(ConnectError::Descriptors)?;
        let (n, expected) = match &theirs {
            TransportOffer::Local(offer) => (fds.len(), offer.descriptors() + appended),
            _ => (fds.len(), appended),
        };
        if n != expected {
            return Err(ConnectError::Peer(format!(
                "{n} descriptors with a queue pair, expected {expected}"
            )));
        }
        let behind = fds.split_off(expected - appended);
        let prepared = match (self, theirs) {
            (Opening::Local(opening), TransportOffer::Local(offer)) => {
                Prepared::Local(Box::new(opening.prepare(peer, &offer, fds).map_err(ConnectError::Peer)?))
            }
            (Opening::Verbs(opening), TransportOffer::Verbs(offer)) => {
                Prepared::Verbs(Box::new(opening.prepare(peer, &offer, allocate)?))
            }
            (Opening::Rails(opening), TransportOffer::Rails(offers)) => {
                Prepared::Rails(opening.prepare(peer, &offers, allocate)?)
            }
            (Opening::Tcp(opening), TransportOffer::Tcp(offer)) => {
                Prepared::Tcp(Box::new(opening.prepare(peer, &offer, allocate).map_err(ConnectError::Peer)?))
            }
            (opening, theirs) => {
                let (ours, theirs) = (opening.transport(), theirs.transport());
                let why = format!(
                    "one end is qp = {ours}, the other qp = {theirs}; set qp and ib-dev alike on both (PUSHGATE_QP, \
                     PUSHGATE_IB_DEV)"
                );
                return Err(ConnectError::Peer(why));
            }
        };
        Ok((prepared, note, behind))
    }

    fn transport(&self) -> &'static str {
        match self {
            Opening::Local(_) => "local",
            Opening::Verbs(_) => "verbs",
            Opening::Rails(_) => "verbs over several devices",
            Opening::Tcp(_) => "tcp",
        }
    }
}

impl Prepared {
    /// Where the peer may write, for [`Connect::prepared`].
    pub fn places(&self) -> Vec<u8> {
        match self {
            Prepared::Local(_) | Prepared::Tcp(_) => Vec::new(),
            Prepared::Verbs(prepared) => {
                serde_json::to_vec(&prepared.places()).expect("places are plain data")
            }
            Prepared::Rails(prepared) => {
                // Of the rails that carry.
                serde_json::to_vec(&prepared.places()).expect("places are plain data")
            }
        }
    }

    /// Takes the peer's places: this end may send now.
    pub fn meet(self, places: &[u8]) -> Result<Met, ConnectError> {
        let malformed = |e: serde_json::Error| {
            ConnectError::Peer(format!("its places of a queue pair: {}", Foreign::word(e)))
        };
        Ok(match self {
            Prepared::Local(prepared) => Met::Local(Box::new(prepared.meet())),
            Prepared::Verbs(prepared) => {
                let places = serde_json::from_slice(places).map_err(malformed)?;
                Met::Verbs(Box::new(VerbsMet::new(*prepared, places)?))
            }
            Prepared::Rails(prepared) => {
                let places: Vec<_> = serde_json::from_slice(places).map_err(malformed)?;
                Met::Rails(Box::new(prepared.meet(places)?))
            }
            Prepared::Tcp(prepared) => Met::Tcp(Box::new(TcpMet::new(*prepared))),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use pushgate_driver_shim::bell;
    use pushgate_driver_shim::memory::SharedMemory;
    use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
    use pushgate_driver_shim::window::Window;
    use pushgate_tests::fuzz::{fuzz, kind};

    use super::*;
    use pushgate_core::session::Status;

    const GEOMETRY: Geometry = Geometry {
        window_log: 6,
        slots_log: 4,
        cq_log: 4,
        rx_log: 3,
        link_log: 4,
        landing_log: 6,
        signals: 4,
        rank: 0,
    };

    fn opening(rank: u32, rings: bool) -> Opening {
        Opening::Local(local(rank, rings))
    }

    fn local(rank: u32, rings: bool) -> LocalOpening {
        let geometry = Geometry { rank, ..GEOMETRY };
        let make = |bytes| Arc::new(SharedMemory::builder("connect-test", bytes).create().unwrap());
        let link = make(geometry.bytes(Segment::Link));
        write_header(&link, Segment::Link, &geometry).unwrap();
        let window: Arc<dyn Window> = make(geometry.window_bytes());
        let bells = rings.then(|| bell::pair().unwrap());
        LocalOpening::new(link, window, false, bells)
    }

    fn no_memory(name: &str, _bytes: usize) -> Result<SharedMemory, pushgate_driver_shim::ShimError> {
        panic!("`local` needs no memory, and was asked for {name}")
    }

    #[test]
    fn two_ends_of_one_host_meet_with_each_others_notes_and_appended_descriptors() {
        let (a, b) = (opening(0, true), opening(1, false));
        let stdin = io::stdin();
        let from_a = a.offer("from a", &[stdin.as_fd()]).unwrap();
        let from_b = b.offer(7, &[]).unwrap();
        let (a, note, behind): (_, u32, _) = a.prepare(1, from_b, 0, &mut no_memory).unwrap();
        assert_eq!((note, behind.len()), (7, 0));
        let (b, note, behind): (_, String, _) = b.prepare(0, from_a, 1, &mut no_memory).unwrap();
        assert_eq!((&note[..], behind.len()), ("from a", 1));
        let (at_a, at_b) = (a.places(), b.places());
        for (end, places, peer, sleeps) in [(a, at_b, 1, false), (b, at_a, 0, true)] {
            let Met::Local(met) = end.meet(&places).unwrap() else { panic!("not over RDMA") };
            assert_eq!((met.peer.geometry.rank, met.peer.bell.is_some()), (peer, sleeps));
        }
    }

    #[test]
    fn ends_have_no_doorbells_where_both_ring_beside_replace_links_and_sleep_and_else_those_that_they_offered()
     {
        // The other end: one that rings beside; one that replaces no link; one that knows doorbells alone, as an earlier release;
        // one whose engine polls.
        let beside = |rank| local(rank, true).recovering().ringing_beside();
        let others = [
            (beside(1), true, true),
            (local(1, true).ringing_beside(), true, false),
            (local(1, true).recovering(), true, false),
            (local(1, false).recovering().ringing_beside(), false, false),
        ];
        for (n, (other, offers, expected)) in others.into_iter().enumerate() {
            let (a, b) = (Opening::Local(beside(0)), Opening::Local(other));
            let (from_a, from_b) = (a.offer((), &[]).unwrap(), b.offer((), &[]).unwrap());
            let (a, ..) = a.prepare::<()>(1, from_b, 0, &mut no_memory).unwrap();
            let (b, ..) = b.prepare::<()>(0, from_a, 0, &mut no_memory).unwrap();
            for (end, [own, peers]) in [(a, [true, offers]), (b, [offers, true])] {
                let Met::Local(met) = end.meet(&[]).unwrap() else { panic!("not over RDMA") };
                let bells = [met.bell.is_some(), met.peer.bell.is_some()];
                let doorbells = if expected { [false; 2] } else { [own, peers] };
                assert_eq!((met.beside, bells), (expected, doorbells), "{n}");
            }
        }
    }

    #[test]
    fn p8_an_offer_that_does_not_fit_is_refused_with_a_sentence() {
        let refused = |change: &dyn Fn(Frame) -> Frame, appended| {
            let theirs = change(opening(1, true).offer((), &[]).unwrap());
            match opening(0, false).prepare::<()>(1, theirs, appended, &mut no_memory) {
                Err(ConnectError::Peer(why)) => why,
                Err(e) => panic!("{e}"),
                Ok(_) => panic!("taken"),
            }
        };
        let text = |to: &'static str| move |f: Frame| Frame { bytes: to.into(), ..f };
        assert!(refused(&text("{"), 0).contains("run one release"));
        assert!(refused(&text(r#"{"offer":{"Tcp":1},"note":null}"#), 0).contains("run one release"));
        let bare = |f: Frame| Frame { along: Fds::default(), ..f };
        assert_eq!(refused(&bare, 0), "0 descriptors with a queue pair, expected 3");
        assert_eq!(refused(&|f| f, 1), "3 descriptors with a queue pair, expected 4");
        let verbs = r#"{"offer":{"Verbs":{"version":3,"abi":2,"rank":1,"rings":[6,4,4,3,4,6,4],"link_log":4,"qp":1,"psn":1,
            "lid":0,"ethernet":true,"gid":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"roce_v2":true,"mtu":4096,"imm":true,
            "in_order":true,"events":false,"posted_receives":false}},"note":null}"#;
        let over_rdma = |_| Frame { bytes: verbs.into(), along: Fds::default() };
        assert!(refused(&over_rdma, 0).contains("one end is qp = local, the other qp = verbs"));
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_frames_or_offers_of_a_peer_make_a_meeting_panic_or_ask_for_memory() {
        let aborted = || Status::new(pushgate_driver_shim::abi::PUSHGATE_ABORTED);
        let end = |offer: &[u8]| {
            let offer = Frame { bytes: offer.to_vec(), along: Fds::default() };
            Connect::new(Incarnation::MIN, offer, u64::MAX, aborted(), 0)
        };
        // What one end sends until it is ready, each frame after its length.
        let offer = opening(1, true).offer(7, &[]).unwrap().bytes;
        let (mut ends, mut said) = ([end(&offer), end(&offer)], Vec::new());
        let mut live = 0;
        while live < 2 {
            for (from, to) in [(0, 1), (1, 0)] {
                match ends[from].poll() {
                    Some(Event::Send(frame)) => {
                        if from == 0 {
                            said.extend((frame.bytes.len() as u16).to_le_bytes());
                            said.extend(&frame.bytes);
                        }
                        ends[to].take(frame, 0).unwrap();
                    }
                    Some(Event::Prepare { epoch, .. }) => ends[from].prepared(epoch, b"places".to_vec(), 0),
                    Some(Event::Go { .. }) => live += 1,
                    Some(Event::Fence | Event::End(_)) => unreachable!("nothing breaks"),
                    None => {}
                }
            }
        }
        let farewell = pushgate_core::connect::end(Incarnation::MIN, None, aborted());
        let farewell = [&(farewell.len() as u16).to_le_bytes(), &farewell[..]].concat();
        let seeds = [said.clone(), [said, farewell].concat()];
        let met = std::cell::Cell::new(0);
        let target = |bytes: &[u8]| {
            let (mut own, mut rest, mut answer) = (end(&offer), bytes, 0u64);
            loop {
                while let Some(event) = own.poll() {
                    answer = answer.wrapping_mul(31)
                        ^ match event {
                            Event::Send(frame) => u64::from(frame.bytes[0]),
                            Event::Prepare { epoch, offer } => {
                                own.prepared(epoch, Vec::new(), 0);
                                let along = opening(1, true).offer(7, &[]).unwrap().along;
                                let offer = Frame { along, ..offer };
                                match opening(0, false).prepare::<u32>(1, offer, 0, &mut no_memory) {
                                    Ok((prepared, ..)) => {
                                        met.set(met.get() + 1);
                                        prepared.meet(b"").is_ok().into()
                                    }
                                    Err(e) => kind(e),
                                }
                            }
                            Event::Go { accepted, .. } => 16 + u64::from(accepted > 0),
                            Event::Fence => 18,
                            Event::End(_) => return answer ^ 19,
                        };
                }
                let Some((length, after)) = rest.split_first_chunk() else { return answer };
                let now;
                (now, rest) = after.split_at(after.len().min(u16::from_le_bytes(*length).into()));
                if let Err(e) = own.take(Frame { bytes: now.to_vec(), along: Fds::default() }, 0) {
                    return answer ^ kind(e);
                }
            }
        };
        seeds.iter().for_each(|seed| _ = target(seed));
        assert_eq!(met.get(), 2, "the offers are taken");
        fuzz(&seeds, target);
    }
}
