//! What rails have beside their links: frames of a channel that outlives the links, and a thread that makes the next ones.
//!
//! RESUME of a rail carries the offer of this end's next link, once that link is opened; READY carries its places. An end whose
//! link is not opened sends RESUME without an offer: the ends learn at once what the rail owes, the attempt fails, and a later
//! one has the offers of both.

use std::collections::VecDeque;

use pushgate_core::recovery::Control;

use super::maker::{Answer, Job, Maker};
use crate::connect::{self, Incarnation};
use crate::endpoint::{Mailbox, SendFrame};
use crate::frame::Frame;
use crate::link::Rail;
use crate::link::verbs::{Offer, Places, VerbsOpening};
use crate::rails::{Beside, KnownRegion, Made};

/// Where the frames about rails go, and where they come from.
pub struct RailFrames {
    /// This end's incarnation.
    pub own: Incarnation,
    /// The peer's incarnation that this end is live with.
    pub peer: Incarnation,
    /// The peer's frames.
    pub mailbox: Mailbox,
    /// The way of this end's frames.
    pub send: SendFrame,
}

/// How far this end's next link of a rail is.
enum Next {
    Nothing,
    /// The maker opens it.
    Opening,
    /// It is opened, and can be offered in any epoch.
    Opened(Box<VerbsOpening>),
    /// The maker prepares it.
    Preparing,
    Prepared,
    /// The maker joins it.
    Joining,
    Joined(Box<dyn Rail>),
    /// The last attempt failed.
    Failed,
    /// The maker frees it.
    Freeing,
}

/// One rail.
struct One {
    next: Next,
    /// What was prepared or is being joined is to be freed as soon as the maker hands it back.
    drops: bool,
    /// The epoch in which this end's offer was sent.
    offered: Option<u32>,
    /// The peer's last offer, and its epoch.
    theirs: Option<(u32, Offer)>,
    /// This end's places, once the link is prepared.
    places: Vec<u8>,
    /// The peer's last places, and their epoch.
    their_places: Option<(u32, Places)>,
}

/// Frames of a channel, and the thread that makes links.
pub(super) struct Frames {
    channel: RailFrames,
    waiting: VecDeque<Frame>,
    rails: Vec<One>,
    maker: Maker,
}

impl Frames {
    pub(super) fn new(channel: RailFrames, rails: usize, maker: Maker) -> Self {
        let one = |_| One {
            next: Next::Nothing,
            drops: false,
            offered: None,
            theirs: None,
            places: Vec::new(),
            their_places: None,
        };
        Frames { channel, waiting: VecDeque::new(), rails: (0..rails).map(one).collect(), maker }
    }

    /// Has the maker open a rail's next link, unless that is done.
    fn open(&mut self, rail: usize) {
        if let next @ (Next::Nothing | Next::Failed) = &mut self.rails[rail].next {
            *next = Next::Opening;
            self.maker.begin(rail, Job::Open);
        }
    }

    /// Takes what the maker has done.
    fn hear_maker(&mut self) {
        while let Some((rail, answer)) = self.maker.answer() {
            let one = &mut self.rails[rail];
            one.next = match answer {
                Answer::Opened(opening) => Next::Opened(opening),
                Answer::Prepared(places) => {
                    one.places = places;
                    Next::Prepared
                }
                Answer::Joined(link) => Next::Joined(link),
                Answer::Failed => Next::Failed,
                Answer::Freed => Next::Nothing,
            };
            if one.drops {
                self.let_go(rail);
            }
        }
    }

    /// Frees what was prepared or joined, or has the maker do so once it has that link done.
    fn let_go(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        one.drops = false;
        match &one.next {
            Next::Nothing | Next::Opening | Next::Opened(_) | Next::Failed | Next::Freeing => {}
            Next::Preparing | Next::Joining => one.drops = true,
            Next::Prepared | Next::Joined(_) => {
                let link = match std::mem::replace(&mut one.next, Next::Freeing) {
                    Next::Joined(link) => Some(link),
                    _ => None,
                };
                self.maker.begin(rail, Job::Free(link));
            }
        }
    }
}

impl Beside for Frames {
    fn send(&mut self, rail: usize, control: Control) {
        let body = match control {
            Control::Resume { epoch, .. } => {
                self.hear_maker();
                self.open(rail);
                let one = &mut self.rails[rail];
                match &one.next {
                    Next::Opened(opening) => {
                        one.offered = Some(epoch);
                        serde_json::to_vec(&opening.offer()).expect("an offer is plain data")
                    }
                    _ => Vec::new(),
                }
            }
            Control::Ready { .. } => self.rails[rail].places.clone(),
            Control::Break { .. } | Control::End(_) => Vec::new(),
        };
        let RailFrames { own, peer, send, .. } = &mut self.channel;
        let bytes = connect::rail(*own, *peer, rail as u8, control, &body);
        send(Frame { bytes, along: Default::default() });
    }

    fn receive(&mut self) -> Option<(usize, Control)> {
        if self.waiting.is_empty() {
            if self.channel.mailbox.is_empty() {
                return None;
            }
            self.waiting = self.channel.mailbox.take_all();
        }
        while let Some(frame) = self.waiting.pop_front() {
            // A peer of this session sends no other frame. The reader of the channel has looked at the sender.
            let Some((rail, control, body)) = connect::of_rail(&frame.bytes) else { continue };
            let Some(one) = self.rails.get_mut(rail as usize) else { continue };
            match control {
                // An offer or places that can't be read are none: the attempt fails.
                Control::Resume { epoch, .. } => {
                    one.theirs = serde_json::from_slice(body).ok().map(|offer| (epoch, offer));
                }
                Control::Ready { epoch } => {
                    one.their_places = serde_json::from_slice(body).ok().map(|places| (epoch, places));
                }
                Control::Break { .. } | Control::End(_) => {}
            }
            return Some((rail as usize, control));
        }
        None
    }

    fn prepare(&mut self, rail: usize, epoch: u32) -> Made<()> {
        self.hear_maker();
        let one = &mut self.rails[rail];
        match &one.next {
            Next::Preparing => Made::Pending,
            Next::Prepared => Made::Done(()),
            Next::Opened(_) if one.offered == Some(epoch) => {
                let Some((_, offer)) = one.theirs.take().filter(|(of, _)| *of == epoch) else {
                    return Made::Failed;
                };
                let Next::Opened(opening) = std::mem::replace(&mut one.next, Next::Preparing) else {
                    unreachable!("just seen")
                };
                self.maker.begin(rail, Job::Prepare(opening, Box::new(offer)));
                Made::Pending
            }
            _ => Made::Failed,
        }
    }

    fn join(&mut self, rail: usize, regions: Vec<KnownRegion>) {
        let one = &mut self.rails[rail];
        // What was prepared is of the epoch in which this end's offer was sent.
        let theirs = one.their_places.take().filter(|(epoch, _)| one.offered == Some(*epoch));
        if let (Next::Prepared, Some((_, places))) = (&one.next, theirs) {
            one.next = Next::Joining;
            self.maker.begin(rail, Job::Join(places, regions));
        }
    }

    fn joined(&mut self, rail: usize) -> Made<Box<dyn Rail>> {
        self.hear_maker();
        let one = &mut self.rails[rail];
        match std::mem::replace(&mut one.next, Next::Nothing) {
            Next::Joined(link) => Made::Done(link),
            next => {
                one.next = next;
                if matches!(one.next, Next::Joining) { Made::Pending } else { Made::Failed }
            }
        }
    }

    fn fence(&mut self, rail: usize) -> bool {
        self.hear_maker();
        self.let_go(rail);
        let held = &self.rails[rail].next;
        !matches!(held, Next::Preparing | Next::Prepared | Next::Joining | Next::Joined(_) | Next::Freeing)
    }

    fn retire(&mut self, link: Box<dyn Rail>) {
        self.maker.retire(link);
    }

    // The queue pair's owner tells the peer over the same channel.
    fn set_status(&mut self, _word: u64) {}

    fn peer_status(&self) -> u64 {
        0
    }
}
