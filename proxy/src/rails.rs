//! Several links under one session: messages are striped over rails, and a rail that breaks leaves the session alive.
//!
//! [`Rails`] stands where an endpoint has its link, and is a [`Link`](crate::link::Link) itself. A session over one link has that link there and
//! pays nothing for this. `pushgate-core` decides ([`Sending`], [`Arriving`], [`Placing`], and one [`Recovery`] for each
//! rail); this posts, polls and tells.
//!
//! A rail that breaks is left at both ends, fenced, and joined again over the next epoch:
//!
//! 1. The end that notices stops posting over the rail, sends BREAK, and stops the link. When nothing of the link can land in
//!    this end's memory any more, the end takes in the stripes that have arrived and sends RESUME with their count.
//! 2. With its own link stopped and the peer's RESUME there, an end knows which stripes the peer never got. They go over the
//!    other rails, before younger ones.
//! 3. The end prepares the next link of the rail and says READY. With the peer's READY it posts over the rail again.
//!
//! Over the other rails messages go on all the while. If no rail is left, or a rail is given up before the peer has said what
//! it got, the session's link is down.

mod link;

use std::collections::BTreeMap;

use pushgate_core::rails::Rules;
use pushgate_core::rails::arriving::Arriving;
use pushgate_core::rails::placing::Placing;
use pushgate_core::rails::sending::Sending;
use pushgate_core::recovery::{Control, Order, Patience, Recovery};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};

use crate::link::{LinkDown, PeerCounts, Rail, StripeArrival};
use crate::region::RegionMemory;
use crate::session::Status;

/// How many epochs of a rail a control message may be ahead of this end.
const AHEAD: u32 = 1024;

/// What rails need from beside their links: a way for control messages that outlives each of the links, and the next link
/// of a rail. Belongs to one engine thread; no call blocks.
pub trait Beside: Send {
    /// Sends a control message about a rail to the peer. What can't be sent is lost.
    fn send(&mut self, rail: usize, control: Control);

    /// Takes the next control message of the peer, if there is one, and the rail that it is about.
    fn receive(&mut self) -> Option<(usize, Control)>;

    /// Makes this end of a rail's link of `epoch`, ready to receive. `None` gives the attempt up.
    fn prepare(&mut self, rail: usize, epoch: u32) -> Option<Box<dyn Rail>>;

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
    /// Limits of a rail's recovery.
    pub patience: Patience,
    /// SENDs of this end may land in regions of the peer, at places that the peer chooses.
    pub peer_posts: bool,
    /// Ranks of this end and of the peer.
    pub ranks: [u32; 2],
}

/// One rail.
struct One {
    /// The link of the present epoch, or one that has stopped and is replaced when the rail is joined again.
    link: Box<dyn Rail>,
    recovery: Recovery,
    /// The link takes stripes in: it is live, or prepared.
    receives: bool,
    /// The link is being stopped.
    fencing: bool,
    /// The rail is given up for good.
    over: bool,
    /// Stripes posted and taken in over the rail before the present epoch.
    before: [u64; 2],
    /// Stripes taken in that the peer was told of.
    told: u64,
}

/// A message on its way: the record as the producer wrote it, and as the peer gets it.
#[derive(Clone, Copy)]
struct Held {
    record: Record,
    words: RecordWords,
}

/// Memory of this end that messages go out of.
struct Own {
    memory: RegionMemory,
    bytes: u64,
    /// Messages taken up to the last one out of it.
    used: u64,
}

/// Several links under one session.
pub struct Rails {
    rails: Vec<One>,
    beside: Box<dyn Beside>,
    sending: Sending,
    placing: Placing,
    arriving: Arriving,
    held: Box<[Held]>,
    regions: BTreeMap<u32, Own>,
    options: Options,
    /// Messages of this end that the peer has.
    received: u64,
    /// This end's counts and status as told last, for a link that joins.
    counts: PeerCounts,
    status: u64,
    left: bool,
    orders: Vec<Order>,
    /// Why the whole is down, once it is.
    down: Option<LinkDown>,
    /// The peer sent what no sender of this session could have sent.
    torn: bool,
    now: u64,
}

impl Rails {
    /// A session over these links, each of epoch 0 and joined with its other end. `now`: the time as [`Link::check`](crate::link::Link::check) has it.
    ///
    /// # Panics
    ///
    /// If there are more links than [`pushgate_core::rails::MOST_RAILS`], or none.
    pub fn new(links: Vec<Box<dyn Rail>>, beside: Box<dyn Beside>, options: Options, now: u64) -> Self {
        let mut sending = Sending::new(options.rules, links.len());
        links.iter().enumerate().for_each(|(rail, link)| sending.join(rail, link.budget()));
        let window = 1 << options.rules.window_log;
        let gives_up = Status::new(abi::PUSHGATE_LINK_DOWN);
        let rails = links.into_iter().map(|link| One {
            link,
            recovery: Recovery::new(options.patience, gives_up),
            receives: true,
            fencing: false,
            over: false,
            before: [0; 2],
            told: 0,
        });
        Rails {
            rails: rails.collect(),
            beside,
            sending,
            placing: Placing::new(window),
            arriving: Arriving::new(options.peer_window_log),
            held: vec![Held { record: Record::new(Opcode::Nop), words: [0; 8] }; window].into(),
            regions: BTreeMap::new(),
            options,
            received: 0,
            counts: PeerCounts::default(),
            status: 0,
            left: false,
            orders: Vec::with_capacity(8),
            down: None,
            torn: false,
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
                        tracing::warn!(rail, "{e}");
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

    // ------------------------------------------------------------- a rail that breaks

    /// A rail's link broke.
    #[cold]
    fn breaks(&mut self, rail: usize, down: LinkDown) {
        let LinkDown::Failed { .. } = down else {
            // The peer left as a whole, or a message can't be posted over any rail.
            self.down.get_or_insert(down);
            self.sending.leave(rail);
            return;
        };
        tracing::info!(rail, "a rail broke: {down}");
        let [own, peer] = self.options.ranks;
        let gives_up = down.status(own, peer);
        self.tell_progress(rail);
        self.rails[rail].recovery.link_down(self.now, gives_up, &mut self.orders);
        self.perform(rail);
    }

    /// Tells a rail's recovery how many stripes have come over the rail, both ways.
    fn tell_progress(&mut self, rail: usize) {
        let taken = self.arriving.taken(rail);
        let one = &mut self.rails[rail];
        one.recovery.progress(taken + one.before[0] + one.link.stripes_taken(), self.sending.owes(rail) > 0);
    }

    /// Does what a rail's recovery has ordered.
    fn perform(&mut self, rail: usize) {
        // An order may bring others about.
        while !self.orders.is_empty() {
            let order = self.orders.remove(0);
            match order {
                Order::Send(control) => self.beside.send(rail, control),
                Order::Fence => {
                    self.sending.leave(rail);
                    self.rails[rail].fencing = true;
                    self.fence(rail);
                }
                Order::Prepare(epoch) => self.prepare(rail, epoch),
                Order::Go { accepted, .. } => {
                    let one = &mut self.rails[rail];
                    one.before[0] = accepted;
                    one.told = one.before[1];
                    // The peer takes in what is written over the link from now on.
                    one.link.acknowledge(self.counts);
                    if self.status != 0 {
                        one.link.set_status(self.status);
                    }
                    self.sending.join(rail, one.link.budget());
                }
                Order::End(_) => self.give_up(rail),
            }
        }
    }

    /// Stops a rail's link. Once nothing of the link can touch memory of this end any more, takes in what has arrived.
    fn fence(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        if !one.fencing || !one.link.stopped(self.now) && !planted!(P6Fence) {
            return;
        }
        if self.rails[rail].receives {
            self.take_in(rail);
        }
        let (one, taken) = (&mut self.rails[rail], self.arriving.taken(rail));
        (one.fencing, one.receives) = (false, false);
        one.recovery.fenced(taken, self.now, &mut self.orders);
        self.perform(rail);
    }

    /// Both ends have fenced a rail: what it owes goes over the others, and its next link is made.
    fn prepare(&mut self, rail: usize, epoch: u32) {
        let taken = self.rails[rail].recovery.peer_accepted().expect("its RESUME is there");
        match self.sending.owed(rail, taken) {
            Ok(stripes) => tracing::info!(rail, stripes, "what the rail owes goes over the others"),
            Err(e) => {
                tracing::warn!(rail, "{e}");
                self.torn = true;
                return;
            }
        }
        let Some(mut link) = self.beside.prepare(rail, epoch) else {
            // The peer must not hear that this end is ready.
            self.orders.retain(|order| *order != Order::Send(Control::Ready { epoch }));
            let gives_up = Status::new(abi::PUSHGATE_LINK_DOWN);
            self.rails[rail].recovery.link_down(self.now, gives_up, &mut self.orders);
            return;
        };
        self.regions.iter().for_each(|(key, own)| link.add_region(*key, &own.memory, own.bytes));
        let taken_in = self.arriving.taken(rail);
        let one = &mut self.rails[rail];
        (one.link, one.receives) = (link, true);
        one.before = [taken, taken_in];
    }

    /// A rail is given up for good.
    #[cold]
    fn give_up(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        (one.over, one.fencing) = (true, true);
        self.sending.leave(rail);
        let [own, _] = self.options.ranks;
        tracing::warn!(rank = own, rail, "a rail is given up");
        // What it owes is known only if the peer has fenced it.
        if self.sending.owes(rail) > 0 || self.rails.iter().all(|one| one.over) {
            let cause = abi::PUSHGATE_DOWN_PORT;
            self.down.get_or_insert(LinkDown::Failed { cause, by_peer: false });
        }
    }

    /// Control messages, and fences that are under way.
    fn move_on(&mut self) {
        while let Some((rail, control)) = self.beside.receive() {
            let Some(one) = self.rails.get_mut(rail) else { continue };
            let epoch = match control {
                Control::Break { epoch } | Control::Resume { epoch, .. } | Control::Ready { epoch } => epoch,
                Control::End(_) => 0,
            };
            if epoch > one.recovery.epoch().saturating_add(AHEAD) {
                continue;
            }
            self.tell_progress(rail);
            let one = &mut self.rails[rail];
            one.recovery.take(control, self.arriving.taken(rail), self.now, &mut self.orders);
            self.perform(rail);
        }
        for rail in 0..self.rails.len() {
            self.fence(rail);
        }
    }

    /// The rails over which this end may write to the peer.
    fn live(&mut self) -> impl Iterator<Item = &mut One> {
        let sending = &self.sending;
        self.rails.iter_mut().enumerate().filter(|(rail, _)| sending.is_up(*rail)).map(|(_, one)| one)
    }

    /// Whether all rails can write the payload of a PUT straight into its region; `None` while there is no rail to ask.
    fn reach(&self, record: &Record) -> Option<bool> {
        let each = self.receiving().map(|one| one.link.reaches(record));
        each.reduce(|all, one| all & one)
    }

    fn receiving(&self) -> impl Iterator<Item = &One> {
        self.rails.iter().filter(|one| one.receives)
    }
}
