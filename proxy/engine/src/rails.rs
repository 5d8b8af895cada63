//! Several links under one session: messages are striped over rails, and a rail that breaks leaves the session alive.
//!
//! [`Rails`] stands where an endpoint has its link, and is a [`Link`](pushgate_link::Link) itself. A session over one link has that link there and
//! pays nothing for this. `pushgate-core` decides ([`Sending`], [`Arriving`], [`Placing`], and one [`Recovery`] for each
//! rail); this posts, polls and tells.
//!
//! A rail that breaks is left at both ends, fenced, and joined again over the next epoch:
//!
//! 1. The end that notices stops posting over the rail, sends BREAK, stops the link and takes in the stripes that have arrived.
//!    When the link is let go and nothing of it can land in this end's memory any more, the end sends RESUME with their count.
//! 2. With its own link stopped and the peer's RESUME there, an end knows which stripes the peer never got. They go over the
//!    other rails, before younger ones.
//! 3. The end prepares the next link of the rail and says READY, as a session over one link does ([`Renew`](pushgate_link::Renew)). With the
//!    peer's READY it posts over the rail again. While the device does not work the ends try again and again, once a second in
//!    the end.
//!
//! Over the other rails messages go on all the while. The session's link is down if for [`Options::recover`] no rail carries, or
//! what a rail owes is not known.

mod again;
mod link;

use std::collections::BTreeMap;

use pushgate_core::rails::Rules;
use pushgate_core::rails::arriving::Arriving;
use pushgate_core::rails::placing::Placing;
use pushgate_core::rails::sending::Sending;
use pushgate_core::recovery::{Control, Order, Patience, Recovery};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};

pub use pushgate_core::rails::MOST_RAILS;
use pushgate_core::session::Status;
use pushgate_link::{LinkDown, PeerCounts, Rail, StripeArrival};

/// How many epochs of a rail a control message may be ahead of this end.
const AHEAD: u32 = 1024;

/// What rails have beside their links: a way for control messages that outlives each of the links. Belongs to one engine
/// thread; no call blocks.
pub trait Beside: Send {
    /// Sends a control message about a rail to the peer. `body` is about this end's next link: an offer, or nothing, with RESUME;
    /// places with READY. What can't be sent is lost.
    fn send(&mut self, rail: usize, control: Control, body: &[u8]);

    /// Takes the next control message of the peer, if there is one: the rail that it is about, the message, its body.
    fn receive(&mut self) -> Option<(usize, Control, Vec<u8>)>;

    /// Tells the peer how this end ended, if no link can.
    fn set_status(&mut self, word: u64);

    /// The peer's status word, if it came this way; else 0.
    fn peer_status(&self) -> u64;
}

/// Sizes and limits of a session's rails.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What both ends share.
    pub rules: Rules,
    /// The messages of the peer that may be on their way at once, logarithm to base 2: its `rules.window_log`.
    pub peer_window_log: u32,
    /// Limits of an attempt to join a rail again. A rail is never given up by this end: `whole` has no effect.
    pub patience: Patience,
    /// The session's link is down if for this long no rail carries, or it is not known what a rail owes, nanoseconds.
    pub recover: u64,
    /// SENDs of this end may land in regions of the peer, at places that the peer chooses.
    pub peer_posts: bool,
    /// Ranks of this end and of the peer.
    pub ranks: [u32; 2],
}

/// One rail.
struct One {
    link: Box<dyn Rail>,
    recovery: Recovery,
    /// The link takes stripes in.
    receives: bool,
    /// The link is being stopped and let go, since this time.
    fencing: Option<u64>,
    /// How far the rail's next link is.
    next: Next,
    /// The offer of this end's next link, once it is made.
    offer: Vec<u8>,
    /// The epoch in which the peer was sent that offer.
    offered: Option<u32>,
    /// The peer's last offer, and its epoch.
    theirs: (u32, Vec<u8>),
    /// This end's places of the next link, once this end is ready.
    places: Vec<u8>,
    /// The peer's last places, and their epoch.
    their_places: (u32, Vec<u8>),
    /// The peer's READY of this epoch has come before this end was ready.
    ready: Option<u32>,
    /// When the rail left, if it is away.
    away_since: Option<u64>,
    /// The peer has not said what it got over the links before.
    undecided: bool,
    /// The peer has given the rail up for good.
    over: bool,
    /// The rail has had no link yet, and does not look for one yet.
    unborn: bool,
    /// Stripes posted and taken in over the rail before the present epoch.
    before: [u64; 2],
    /// Stripes taken in that the peer was told of.
    told: u64,
}

/// How far the next link of a rail is.
enum Next {
    Nothing,
    /// Of this epoch, and the peer is to be told when it is ready.
    Preparing(u32),
    Prepared(u32),
}

/// A message on its way: the record as the producer wrote it, and as the peer gets it.
#[derive(Clone, Copy)]
struct Held {
    record: Record,
    words: RecordWords,
}

/// Memory of this end that messages go out of.
struct Own {
    /// Messages taken up to the last one out of it.
    used: u64,
}

/// Several links under one session.
pub struct Rails {
    rails: Vec<One>,
    /// A rail that had a link from the start: what all links have in common it is asked for.
    first: usize,
    beside: Box<dyn Beside>,
    sending: Sending,
    placing: Placing,
    arriving: Arriving,
    held: Box<[Held]>,
    regions: BTreeMap<u32, Own>,
    options: Options,
    /// Messages of this end that the peer has.
    received: u64,
    /// The peer's counts over links that were let go.
    heard: PeerCounts,
    /// This end's counts and status as told last, for a link that joins.
    counts: PeerCounts,
    status: u64,
    left: bool,
    orders: Vec<Order>,
    /// Why the whole is down, once it is.
    down: Option<LinkDown>,
    /// The peer sent what no sender of this session could have sent.
    torn: bool,
    /// The rail that [`Link::break_one`](pushgate_link::Link::break_one) broke last.
    broken: usize,
    /// When a rail has come back last.
    came_back: Option<u64>,
    /// Rails that have come back and were not told of.
    rejoined: u64,
    now: u64,
}

impl Rails {
    /// A session over these links, each of epoch 0 and joined with its other end, if it carries; else the rail carries at
    /// neither end, and is joined as one that broke. `now`: the time as [`Link::check`](pushgate_link::Link::check) has it.
    ///
    /// # Panics
    ///
    /// If there are more rails than [`pushgate_core::rails::MOST_RAILS`], or none carries.
    pub fn new(
        links: Vec<(Box<dyn Rail>, bool)>,
        beside: Box<dyn Beside>,
        options: Options,
        now: u64,
    ) -> Self {
        let mut sending = Sending::new(options.rules, links.len());
        for (rail, (link, _)) in links.iter().enumerate().filter(|(_, (_, carries))| *carries) {
            sending.join(rail, link.budget());
        }
        let first = links.iter().position(|(_, carries)| *carries).expect("a session starts over a link");
        let window = 1 << options.rules.window_log;
        // A rail comes back whenever its device works again.
        let options = Options { patience: Patience { whole: u64::MAX, ..options.patience }, ..options };
        let gives_up = Status::new(abi::PUSHGATE_LINK_DOWN);
        let rails = links.into_iter().map(|(link, carries)| One {
            link,
            receives: carries,
            unborn: !carries,
            recovery: Recovery::new(options.patience, gives_up),
            fencing: None,
            next: Next::Nothing,
            offer: Vec::new(),
            offered: None,
            theirs: Default::default(),
            places: Vec::new(),
            their_places: Default::default(),
            ready: None,
            away_since: None,
            undecided: false,
            over: false,
            before: [0; 2],
            told: 0,
        });
        Rails {
            rails: rails.collect(),
            first,
            beside,
            sending,
            placing: Placing::new(window),
            arriving: Arriving::new(options.peer_window_log),
            held: vec![Held { record: Record::new(Opcode::Nop), words: [0; 8] }; window].into(),
            regions: BTreeMap::new(),
            options,
            received: 0,
            heard: PeerCounts::default(),
            counts: PeerCounts::default(),
            status: 0,
            left: false,
            orders: Vec::with_capacity(8),
            down: None,
            torn: false,
            broken: 0,
            came_back: None,
            rejoined: 0,
            now,
        }
    }

    fn is_down(&self) -> Result<(), LinkDown> {
        self.down.map_or(Ok(()), Err)
    }

    /// Posts the stripes that rails have room for.
    fn pump(&mut self) {
        loop {
            let Some((rail, permit, stripe)) = self.sending.reserve() else { return };
            let held = &self.held[stripe.message as usize & (self.held.len() - 1)];
            if stripe.placed && !self.rails[rail].link.reaches(&held.record) {
                // A rail that has joined again hears of the peer's regions before it carries such a stripe.
                if self.reach(&held.record) == Some(false) {
                    self.down.get_or_insert(LinkDown::RegionGone);
                }
                return;
            }
            match self.rails[rail].link.post_stripe(permit, &stripe, &held.record, &held.words) {
                Ok(()) => self.sending.posted(rail),
                Err(down) => self.breaks(rail, down),
            }
        }
    }

    /// Takes in the stripes that have arrived over a rail.
    fn take_in(&mut self, rail: usize) {
        let mut words = [0; 8];
        loop {
            match self.rails[rail].link.poll_stripe(&mut words) {
                StripeArrival::Empty => return,
                StripeArrival::Stripe(stripe) => {
                    if let Err(e) = self.arriving.arrive(rail, &stripe, &words) {
                        limited!(warn, rail as u64, rail, "{e}");
                        self.torn = true;
                        return;
                    }
                }
                StripeArrival::Torn => {
                    self.torn = true;
                    return;
                }
            }
        }
    }

    /// The rails over which this end may write to the peer.
    fn live(&mut self) -> impl Iterator<Item = &mut One> {
        let sending = &self.sending;
        self.rails.iter_mut().enumerate().filter(|(rail, _)| sending.is_up(*rail)).map(|(_, one)| one)
    }

    /// Whether all rails can write the payload of a PUT straight into its region; `None` while there is no rail to ask, or a
    /// rail that has come back may not have heard of the region yet.
    fn reach(&self, record: &Record) -> Option<bool> {
        let each = self.receiving().map(|one| one.link.reaches(record));
        let (all, any) =
            each.fold((true, None), |(all, any), one| (all & one, Some(any.unwrap_or(false) | one)));
        match (all, any) {
            (_, None) => None,
            (true, _) => Some(true),
            (false, Some(true)) => None,
            // The peer announces its regions over each link.
            (false, _) => {
                let hears =
                    self.came_back.is_some_and(|at| self.now.saturating_sub(at) < self.options.recover);
                if hears { None } else { Some(false) }
            }
        }
    }

    fn receiving(&self) -> impl Iterator<Item = &One> {
        self.rails.iter().filter(|one| one.receives)
    }
}
