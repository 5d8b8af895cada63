//! The next link of a session over RDMA, as its engine sees it: each step is begun, and asked for until it is done. The file
//! `next` does what takes long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use pushgate_driver_shim::log::Foreign;
use pushgate_link::frame::Frame;
use pushgate_link::region::MAX_REGIONS;
use pushgate_link::{Renew, RenewError};

use super::super::NOTIFIES;
use super::super::chain::Chain;
use super::super::cm::Connection;
use super::super::health::Health;
use super::super::inbox::REGION_WORDS;
use super::super::line::Line;
use super::super::looker::Watch;
use super::super::next::{Begin, Clear, Made, NextOffer, Objects, Ready};
use super::super::objects::Mr;
use super::super::offer::{Agreed, Places};
use super::super::states::PeerQp;
use super::super::turn::{STEADY, Turn};
use super::super::{VerbsError, device::Device};
use super::ending::Ending;
use super::{VerbsLink, echo, inbox, interval};

/// The answer of a task beside the engine.
pub(super) type Answer<T> = Receiver<T>;

/// How far the next link is.
#[derive(Default)]
pub(super) enum Next {
    /// The present link is live, or was not stopped yet.
    #[default]
    Nothing,
    /// The old objects go. What was made and never used waits.
    Clearing { answer: Answer<()>, cleared: Arc<AtomicBool>, unused: Option<Made> },
    /// Other links of the device have their turn.
    Waiting { unused: Option<Made> },
    /// New objects are made.
    Making { answer: Answer<Result<Made, VerbsError>>, cancelled: Arc<AtomicBool> },
    /// The peer was told.
    Offered(Made),
    /// The queue pair gets ready to receive.
    Preparing(Answer<(Made, Result<(), VerbsError>)>, Agrees),
    /// The peer may write.
    Prepared(Made, Agrees),
    /// It was given up, and what was made goes.
    Going(Answer<()>),
}

/// What the ends agree on for the next link, and the receives that this end has granted with it.
#[derive(Clone, Copy)]
pub(super) struct Agrees {
    pub(super) in_order: bool,
    pub(super) peer_events: bool,
    pub(super) granted: u64,
}

fn here(e: VerbsError) -> RenewError {
    RenewError::Here(e.to_string())
}

fn lost() -> RenewError {
    RenewError::Here("the task that makes the next RDMA link has ended without an answer".into())
}

/// Has `task` done beside the engine, for what `of` names. Returns where its result comes.
pub(super) fn beside<T: Send + 'static>(
    device: &Device,
    of: &str,
    task: impl FnOnce() -> T + Send + 'static,
) -> Result<Answer<T>, RenewError> {
    let (tell, answer) = channel();
    let task = Box::new(move || {
        // A link that is gone lets go of what was made.
        let _ = tell.send(task());
    });
    (device.beside)(task).map_err(|e| RenewError::Here(format!("a thread for {of}: {e}")))?;
    Ok(answer)
}

impl VerbsLink {
    /// Whether the link is being replaced.
    pub(super) fn is_renewing(&self) -> bool {
        !matches!(self.next, Next::Nothing)
    }

    /// A task uses regions of this end.
    pub(super) fn is_registering(&self) -> bool {
        use Next::*;
        matches!(self.next, Clearing { .. } | Making { .. } | Preparing(..) | Going(_))
    }

    /// The next link's registration of a region, which is to be taken back.
    pub(super) fn forget_region(&mut self, key: u32) -> Option<Arc<Mr>> {
        match &mut self.next {
            Next::Offered(made) | Next::Prepared(made, _) | Next::Waiting { unused: Some(made) } => {
                made.regions.remove(&key)
            }
            _ => None,
        }
    }

    /// Gives the next link up. True when nothing of it can touch memory any more.
    pub(super) fn gives_next_up(&mut self) -> bool {
        use TryRecvError::Empty;
        let made = match std::mem::take(&mut self.next) {
            Next::Nothing => {
                self.turn = None;
                return true;
            }
            Next::Clearing { answer, cleared, unused } => match answer.try_recv() {
                Err(Empty) => Err(Next::Clearing { answer, cleared, unused }),
                _ => Ok(unused),
            },
            Next::Making { answer, cancelled } => {
                // Relaxed: the flag orders no other memory.
                cancelled.store(true, Ordering::Relaxed);
                match answer.try_recv() {
                    Err(Empty) => Err(Next::Making { answer, cancelled }),
                    made => Ok(made.ok().and_then(Result::ok)),
                }
            }
            Next::Preparing(answer, agrees) => match answer.try_recv() {
                Err(Empty) => Err(Next::Preparing(answer, agrees)),
                made => Ok(made.ok().map(|(made, _)| made)),
            },
            Next::Going(answer) => match answer.try_recv() {
                Err(Empty) => Err(Next::Going(answer)),
                _ => Ok(None),
            },
            Next::Waiting { unused } => Ok(unused),
            Next::Offered(made) | Next::Prepared(made, _) => Ok(Some(made)),
        };
        self.next = match made {
            Err(under_way) => under_way,
            Ok(None) => return self.gives_next_up(),
            Ok(Some(made)) => {
                let goes = beside(&self.device, "an RDMA link that nobody uses", move || drop(made));
                self.next = goes.map_or(Next::Nothing, Next::Going);
                return self.gives_next_up();
            }
        };
        false
    }

    /// Takes this end's objects out, for another link.
    fn take_objects(&mut self) -> Objects {
        self.watch = None;
        let regions = &mut self.regions.own;
        let mut taken = Objects {
            rc: self.rc.take(),
            _connection: self.connection.take(),
            _registered: self.registered.take(),
            regions: Default::default(),
        };
        for (key, region) in regions {
            // Messages out of it may be posted again.
            (region.before, region.used) = (region.last, 0);
            taken.regions.extend(region.mr.take().map(|mr| (*key, mr)));
        }
        taken
    }

    /// Begins with the next link: what is old goes. Of an attempt before there is one that was given up, or one that nobody has used.
    fn begin_next(&mut self, given_up: Option<Made>, unused: Option<Made>) -> Result<(), RenewError> {
        // What the peer has said of its end is cleared with its line.
        self.peer_ended = self.inbox.status();
        let mut old = vec![self.take_objects()];
        old.extend(given_up.map(Made::into_objects));
        let (rest, registering) = self.regions.registrar.hand_over();
        self.regions.own.extend(rest.into_iter().map(|what| (what.key, super::OwnRegion::new(what, None))));
        let cleared: Arc<AtomicBool> = Arc::default();
        let clear = Clear { old, registering, cleared: cleared.clone(), inbox: self.inbox.memory() };
        let answer = beside(&self.device, "the next RDMA link", move || clear.clear())?;
        self.next = Next::Clearing { answer, cleared, unused };
        Ok(())
    }

    /// Begins to make the next link once the old one is gone, if it is this link's turn.
    fn make_next(&mut self) -> Result<(), RenewError> {
        if let Next::Clearing { answer, unused, .. } = &mut self.next {
            match answer.try_recv() {
                Ok(()) => self.next = Next::Waiting { unused: unused.take() },
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => {
                    self.next = Next::Nothing;
                    return Err(lost());
                }
            }
        }
        let Next::Waiting { unused } = &mut self.next else { return Ok(()) };
        let turn = self.turn.get_or_insert_with(|| {
            Turn::new(&self.device.looker.turns, self.terms.ends[0] ^ self.terms.ends[1])
        });
        if !turn.begins(self.now) {
            return Ok(());
        }
        let (unused, cancelled) = (unused.take(), Arc::<AtomicBool>::default());
        let begin = Begin {
            kept: self.kept.clone(),
            device: self.device.clone(),
            sources: self.sources.clone(),
            unused,
            regions: self.regions.own.values().map(|region| region.what.clone()).collect(),
            cancelled: cancelled.clone(),
        };
        let begun = beside(&self.device, "the next RDMA link", move || begin.make());
        if begun.is_err() {
            turn.made(false, self.now);
        }
        self.next = Next::Making { answer: begun?, cancelled };
        Ok(())
    }

    /// Whether the present link has carried something since it was made. Then other links of the device may follow it without a pause.
    pub(super) fn has_carried(&mut self) {
        let idle = self.chain.written == 0 && self.now.saturating_sub(self.live_since) >= STEADY;
        let carries = self.rc.is_some() && (self.chain.done > 0 || idle);
        if carries && let Some(turn) = self.turn.take() {
            turn.carries();
        }
    }

    /// The frame that tells the peer of the next link.
    fn told(&self, made: &Made) -> Frame {
        let offer = self.kept.end.offer(&made.rc, &made.sources, made.psn, made.told());
        let told =
            |region: &super::OwnRegion| Some(region.what.entry(made.regions.get(&region.what.key)?.rkey));
        let regions = match self.kept.regions_written {
            true => self.regions.own.values().filter_map(told).collect(),
            false => Vec::new(),
        };
        let bytes = serde_json::to_vec(&NextOffer { offer, regions }).expect("an offer is plain data");
        Frame { bytes, along: Default::default() }
    }

    /// Checks the peer's offer of the next link. Nothing may have changed on which memory or counts of the session rest.
    fn check_next(&self, made: &Made, frame: Frame) -> Result<(NextOffer, Agreed), String> {
        if frame.along.into_owned().is_ok_and(|fds| !fds.is_empty()) {
            return Err("descriptors with its offer of the next RDMA link, expected none".into());
        }
        let theirs: NextOffer = serde_json::from_slice(&frame.bytes)
            .map_err(|e| format!("its offer of the next RDMA link: {}", Foreign::word(e)))?;
        let ours = self.kept.end.offer(&made.rc, &made.sources, made.psn, made.told());
        let agreed = theirs.offer.check(&ours, self.terms.peer)?;
        let offer = &theirs.offer;
        let link_log = self.terms.peer_link_log.unwrap_or(offer.link_log);
        let fixed = (self.terms.peer_geometry, link_log, self.terms.imm, self.terms.peer_posts, true);
        let found = (agreed.peer_geometry, offer.link_log, agreed.imm, offer.posted_receives, offer.recovers);
        if found != fixed {
            return Err(format!("its offer of the next RDMA link says {found:?}, expected {fixed:?}"));
        }
        if theirs.regions.len() > MAX_REGIONS {
            return Err(format!("{} regions with its next RDMA link", theirs.regions.len()));
        }
        Ok((theirs, agreed))
    }

    /// The next link takes the place of the present one. The first message over it is the one after the first `accepted` of
    /// the session.
    pub(super) fn adopt(&mut self, made: Made, places: Places, agrees: Agrees, accepted: u64) {
        let Made { rc, connection, registered, regions, sources, gid, .. } = made;
        self.connection = connection;
        if let Some(receives) = &mut self.receives.peer {
            let mask = self.flight.taken.len() as u64 - 1;
            let sent = accepted..self.flight.base + self.flight.sent;
            let taken = sent.filter_map(|message| {
                self.flight.taken[((message - self.flight.base) & mask) as usize].take()
            });
            receives.put_back(taken.collect());
        }
        self.device = rc.pd.device.clone();
        self.chain = {
            let echo = echo(&rc, &places, &self.kept.inbox, &registered.inbox);
            Chain::new(rc.inline, interval(self.own.out_log), echo)
        };
        (self.window.key, self.outbox.key) = (registered.window.lkey, registered.outbox.lkey);
        let address = self.connection.as_ref().and_then(Connection::address);
        self.watch = Some(Watch::new(&self.device, &gid, address, rc.names()));
        (self.rc, self.registered, self.gid, self.peer_places) = (Some(rc), Some(registered), gid, places);
        self.sources = sources;
        self.agrees = agrees;
        for (key, mr) in regions {
            if let Some(region) = self.regions.own.get_mut(&key) {
                (region.lkey, region.mr) = (mr.lkey, Some(mr));
            }
        }
        self.flight.base = accepted;
        (self.flight.sent, self.flight.messages_done, self.flight.completed) = (0, 0, 0);
        self.flight.last_wr.fill(0);
        self.flight.held.clear();
        if !agrees.in_order {
            self.flight.held.reserve(self.flight.last_wr.len());
        }
        self.flight.copies.rewind(accepted);
        self.inbox.begin();
        (self.notifies_sent, self.receives_posted) = (0, agrees.granted + NOTIFIES as u64);
        // Receives that the peer was told of before are told again: the words are the same.
        self.receives.told = self.receives.noted.saturating_sub(1 << self.own.rx_log);
        self.receives.wr = 0;
        (self.line, self.health, self.ending) = (Line::default(), Health::default(), Ending::Open);
        self.path = self.path.anew();
        (self.regions.wr, self.peer_ended, self.fresh) = (0, 0, true);
        self.live_since = self.now;
    }

    /// What has become of this end's regions since the peer was told of the next link. Entries that go come first: another
    /// region may have their places.
    fn publish_changes(&mut self) {
        let changed = std::mem::take(&mut self.regions.later);
        let (stay, gone): (Vec<u32>, Vec<u32>) =
            changed.into_iter().partition(|key| self.regions.own.contains_key(key));
        for key in gone {
            self.publish(key, [0; REGION_WORDS]);
        }
        for key in stay {
            let region = &self.regions.own[&key];
            if let Some(mr) = &region.mr {
                self.publish(key, region.what.entry(mr.rkey));
            }
        }
    }
}

impl Renew for VerbsLink {
    fn fence(&mut self, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.is_renewing() {
            // Of an attempt: its objects go when the next one is made.
            return true;
        }
        // The peer hears of the break beside the link, and nothing more goes out over this one.
        self.has_carried();
        if matches!(self.ending, Ending::Open | Ending::Telling(_)) {
            self.begin_to_drain();
        }
        self.move_to_the_end()
    }

    fn offer(&mut self) -> Result<Option<Frame>, RenewError> {
        match std::mem::take(&mut self.next) {
            Next::Nothing => self.begin_next(None, None)?,
            Next::Offered(made) => self.begin_next(None, Some(made))?,
            Next::Prepared(made, _) => self.begin_next(Some(made), None)?,
            Next::Preparing(answer, agrees) => match answer.try_recv() {
                Ok((made, _)) => self.begin_next(Some(made), None)?,
                Err(TryRecvError::Empty) => {
                    self.next = Next::Preparing(answer, agrees);
                    return Ok(None);
                }
                Err(TryRecvError::Disconnected) => return Err(lost()),
            },
            under_way => self.next = under_way,
        }
        self.make_next()?;
        let Next::Making { answer, .. } = &self.next else { return Ok(None) };
        let made = match answer.try_recv() {
            Ok(made) => made,
            Err(TryRecvError::Empty) => return Ok(None),
            Err(TryRecvError::Disconnected) => Err(VerbsError::Library(lost().to_string())),
        };
        self.next = Next::Nothing;
        if let Some(turn) = &mut self.turn {
            turn.made(made.is_ok(), self.now);
        }
        let made = made.map_err(here)?;
        self.regions.due.clear();
        self.regions.later.clear();
        let frame = self.told(&made);
        self.next = Next::Offered(made);
        Ok(Some(frame))
    }

    fn is_cleared(&self) -> bool {
        match &self.next {
            Next::Clearing { cleared, .. } => cleared.load(Ordering::Acquire),
            // Objects that could not be handed to a thread are gone, too.
            Next::Nothing => self.rc.is_none(),
            Next::Preparing(..) | Next::Going(_) => false,
            Next::Waiting { .. } | Next::Making { .. } | Next::Offered(_) | Next::Prepared(..) => true,
        }
    }

    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError> {
        let Next::Offered(mut made) = std::mem::take(&mut self.next) else {
            unreachable!("an end prepares what it offered")
        };
        let (theirs, agreed) = match self.check_next(&made, offer) {
            Ok(checked) => checked,
            Err(why) => {
                self.next = Next::Offered(made);
                return Err(RenewError::Peer(why));
            }
        };
        let ours = self.kept.end.offer(&made.rc, &made.sources, made.psn, made.told());
        let NextOffer { offer, regions } = theirs;
        if self.terms.peer_link_log.is_none() {
            self.terms.peer_link_log = Some(offer.link_log);
            self.inbox = inbox(&self.kept, &self.terms.peer_geometry, offer.link_log, self.terms.imm);
        }
        let (own, gid) = ours.way(&offer);
        made.gid = made.sources[own].entry.clone();
        let cm = offer.cm.map(|theirs| (theirs, ours.connects(&offer)));
        // Before the peer can be live, and write entries there itself.
        regions.into_iter().for_each(|entry| self.inbox.tell_region(entry));
        let granted = self.line.granted();
        let agrees =
            Agrees { in_order: agreed.in_order, peer_events: offer.events && self.terms.imm, granted };
        // Those of SENDs that were accepted are consumed.
        let open = granted.saturating_sub(self.inbox.sends()).min(1 << self.own.rx_log) as u32;
        let ready = Ready {
            kept: self.kept.clone(),
            made,
            remote: PeerQp { number: offer.qp, psn: offer.psn, gid, lid: offer.lid },
            mtu: agreed.mtu,
            cm,
            receives: if self.terms.imm { open + NOTIFIES } else { 0 },
        };
        // A thread that can't be had takes the objects along: the next attempt makes others.
        let answer = beside(&self.device, "the next RDMA link", move || ready.make())?;
        self.next = Next::Preparing(answer, agrees);
        Ok(())
    }

    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError> {
        let Next::Preparing(answer, agrees) = &self.next else { return Err(lost()) };
        let (agrees, answered) = (*agrees, answer.try_recv());
        let (made, ready) = match answered {
            Ok(answered) => answered,
            Err(TryRecvError::Empty) => return Ok(None),
            Err(TryRecvError::Disconnected) => {
                self.next = Next::Nothing;
                return Err(lost());
            }
        };
        let places = made.places(&self.kept);
        self.next = Next::Prepared(made, agrees);
        ready.map_err(here)?;
        Ok(Some(serde_json::to_vec(&places).expect("places are plain data")))
    }

    fn go(&mut self, places: &[u8], accepted: u64) -> Result<(), RenewError> {
        let end = &self.kept.end;
        let places: Places = serde_json::from_slice(places).map_err(|e| {
            RenewError::Peer(format!("its places of the next RDMA link: {}", Foreign::word(e)))
        })?;
        places.check(&end.geometry, end.link_log).map_err(RenewError::Peer)?;
        let Next::Prepared(made, agrees) = std::mem::take(&mut self.next) else {
            unreachable!("a link goes live when both ends have prepared")
        };
        self.adopt(made, places, agrees, accepted);
        self.publish_changes();
        // What was added since the link was made.
        self.go_on_registering();
        Ok(())
    }
}
