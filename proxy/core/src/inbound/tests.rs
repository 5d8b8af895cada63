use std::collections::VecDeque;

use proptest::prelude::*;
use pushgate_abi::abi;

use super::*;

const ANY: u32 = abi::PUSHGATE_ANY_TAG;
/// Units of the peer's window.
const WINDOW: u32 = 64;
/// A region in host memory.
const HOST: u32 = 1;
/// A region in the device's memory.
const DEVICE: u32 = 2;
const REGION_BYTES: u64 = 1 << 16;

const RULES: Rules = Rules {
    rx_log: 2,
    landing_log: 4,
    signals: 4,
    in_place: 8,
    slow_ns: 0,
    posted_receives: false,
    ahead: 0,
};

#[derive(Debug, thiserror::Error)]
#[error("no such region")]
struct NoRegion;

/// A receiver's surroundings. Both regions are offered to the peer's device.
#[derive(Clone, Copy)]
struct Around {
    in_place: bool,
}

impl Site for Around {
    type Refused = NoRegion;

    fn region(&self, key: u32, offset: u64, length: u32) -> Result<Stretch, NoRegion> {
        match key {
            _ if offset + length as u64 > REGION_BYTES => Err(NoRegion),
            HOST => Ok(Stretch::Host(0x1000 + offset as usize)),
            DEVICE => Ok(Stretch::Device(0x2000 + offset)),
            _ => Err(NoRegion),
        }
    }

    fn offers(&self, key: u32) -> bool {
        key == HOST || key == DEVICE
    }

    fn reads_in_place(&self) -> bool {
        self.in_place
    }

    fn reads_peer(&self) -> bool {
        true
    }

    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        (unit + units <= WINDOW).then_some(0x9000 + unit as usize * 64)
    }
}

const AROUND: Around = Around { in_place: true };

fn send(id: u64, length: u32) -> Record {
    let units = length.div_ceil(64);
    Record { id: id as u32, length, place_offset: units as u64, ..Record::new(Opcode::Send) }
}

fn inline(id: u64) -> Record {
    Record { flags: Record::INLINE, ..send(id, 8) }
}

fn put(id: u64, key: u32, length: u32) -> Record {
    Record { rkey: key, remote_offset: 64, ..Record { opcode: Opcode::Put, ..send(id, length) } }
}

fn signal(id: u64, index: u32) -> Record {
    Record { id: id as u32, signal: index, signal_value: id + 1, ..Record::new(Opcode::Signal) }
}

fn take(inbound: &mut Inbound, r: &Record, placed: bool) -> Result<Action, Fault> {
    let (record, sequence) = inbound.accept(&r.encode(0))?;
    inbound.place(&record, placed, sequence, &AROUND)
}

fn peers_fault(step: Result<Action, Fault>, part: &str) {
    let Err(Fault::Peer(_, why)) = step else { panic!("{step:?}") };
    assert!(why.to_string().contains(part), "{why}");
}

#[test]
fn p4_a_message_whose_number_is_not_the_next_or_for_which_no_receive_was_granted_is_an_overrun() {
    let mut i = Inbound::new(RULES);
    for id in 0..4 {
        assert_eq!(take(&mut i, &inline(id), false).unwrap(), Action::ShowWords);
    }
    for wrong in [3, 5, 17] {
        let Err(Fault::Overrun(why)) = take(&mut i, &inline(wrong), false) else {
            panic!("{wrong} is taken")
        };
        assert_eq!(why.to_string(), format!("sequence number {wrong}, expected 4"));
    }
    let Err(Fault::Overrun(why)) = take(&mut i, &inline(4), false) else { panic!("a fifth is taken") };
    assert_eq!(why.to_string(), "no receive was granted for this message");
}

#[test]
fn p8_what_no_sender_may_send_is_the_peers_fault() {
    let fresh = || Inbound::new(RULES);
    let nop = Record::new(Opcode::Nop);
    let Err(Fault::Peer(_, why)) = fresh().accept(&nop.encode(0)) else { panic!("a NOP is accepted") };
    assert_eq!(why.to_string(), "a NOP on the link");
    let Err(Fault::Peer(..)) = fresh().accept(&[u64::MAX; 8]) else { panic!("garbage is accepted") };
    peers_fault(take(&mut fresh(), &send(0, 64), true), "a payload came alone");
    peers_fault(take(&mut fresh(), &signal(0, 0), true), "a payload came alone");
    peers_fault(take(&mut fresh(), &signal(0, 4), false), "signal out of range");
    let with_signal = Record { flags: Record::WITH_SIGNAL, signal: 4, ..put(0, HOST, 8) };
    peers_fault(take(&mut fresh(), &with_signal, false), "signal out of range");
    peers_fault(take(&mut fresh(), &put(0, 7, 8), false), "no such region");
    peers_fault(take(&mut fresh(), &put(0, HOST, 1 << 17), false), "no such region");
    let outside = Record { place: WINDOW - 1, ..send(0, 65) };
    peers_fault(take(&mut fresh(), &outside, false), "leave the peer's window");
    let few = Record { place_offset: 1, ..send(0, 65) };
    peers_fault(take(&mut fresh(), &few, false), "65 bytes in 1 units");
    let mut posted = Inbound::new(Rules { posted_receives: true, ..RULES });
    posted.post(Posted { number: 0, key: HOST, offset: 0, length: 64, tag: 3 });
    peers_fault(
        take(&mut posted, &Record { tag: 3, ..send(0, 65) }, false),
        "65 bytes arrived for receive 0",
    );
    let mut posted = Inbound::new(Rules { posted_receives: true, ..RULES });
    posted.post(Posted { number: 0, key: HOST, offset: 0, length: 64, tag: 3 });
    peers_fault(
        take(&mut posted, &Record { tag: 3, place: 1, ..send(0, 64) }, true),
        "it wrote to receive 1",
    );
}

#[test]
fn p8_a_device_that_gives_back_what_it_was_not_shown_or_names_no_region_is_itself_at_fault() {
    let mut i = Inbound::new(RULES);
    take(&mut i, &inline(0), false).unwrap();
    let Err(Fault::Device(_, why)) = i.consume(2) else { panic!("2 of 1 given back") };
    assert_eq!(why.to_string(), "2 receive records released of 1");
    assert!(i.consume(1).unwrap() && !i.consume(1).unwrap());
    assert!(matches!(i.consume(0), Err(Fault::Device(..))));
    let mut posted = Inbound::new(Rules { posted_receives: true, ..RULES });
    posted.post(Posted { number: 0, key: 9, offset: 0, length: 64, tag: ANY });
    assert!(matches!(take(&mut posted, &send(0, 64), false), Err(Fault::Device(..))));
}

#[test]
fn p4_p6_a_send_that_may_come_before_its_receive_waits_for_it_and_holds_up_those_after_it() {
    let mut i = Inbound::new(Rules { posted_receives: true, ahead: 2, ..RULES });
    assert_eq!(i.counts(), Counts { released: 0, received: 0, granted: 2 });
    let first = Record { tag: 3, ..inline(0) };
    let (record, sequence) = i.accept(&first.encode(0)).unwrap();
    assert_eq!(i.place(&record, false, sequence, &AROUND).unwrap(), Action::Wait);
    assert!(!i.keeps_another(), "none waits");
    i.keep(Message { record, words: first.encode(0), placed: false, sequence });
    // It is here, and its place at the sender is still needed.
    assert_eq!(i.counts(), Counts { released: 0, received: 1, granted: 2 });
    assert!(i.keeps_another() && i.lacks_receive());
    let second = Record { tag: 4, ..inline(1) };
    let (record, sequence) = i.accept(&second.encode(0)).unwrap();
    i.keep_behind(Message { record, words: second.encode(0), placed: false, sequence });
    assert_eq!(i.counts(), Counts { released: 0, received: 2, granted: 2 });
    assert!(!i.keeps_another(), "no more may come before their receives");
    for (number, tag) in [4, 3].into_iter().enumerate() {
        let m = i.retry().unwrap();
        assert_eq!(i.place(&m.record, false, m.sequence, &AROUND).unwrap(), Action::Wait);
        i.keep(m);
        i.post(Posted { number: number as u64, key: HOST, offset: 0, length: 64, tag });
    }
    let m = i.retry().unwrap();
    assert!(matches!(i.place(&m.record, false, m.sequence, &AROUND).unwrap(), Action::Copy { .. }));
    let (_, Finish::Show(shown)) = i.copied() else { panic!("a SEND is shown") };
    assert_eq!((shown.place, i.in_places()), (1, 1));
    assert_eq!(i.counts(), Counts { released: 1, received: 2, granted: 4 });
    let m = i.retry().unwrap();
    assert!(matches!(i.place(&m.record, false, m.sequence, &AROUND).unwrap(), Action::Copy { .. }));
    assert_eq!((i.copied().0.id, i.counts().released, i.waits()), (1, 2, false));
}

#[test]
fn p3_a_signal_after_a_copy_waits_until_the_copy_is_complete() {
    let mut i = Inbound::new(RULES);
    assert!(matches!(take(&mut i, &put(0, DEVICE, 64), false).unwrap(), Action::Copy { .. }));
    assert!(i.takes_another());
    let (record, sequence) = i.accept(&signal(1, 0).encode(0)).unwrap();
    assert_eq!(i.place(&record, false, sequence, &AROUND).unwrap(), Action::Wait);
    i.keep(Message { record, words: signal(1, 0).encode(0), placed: false, sequence });
    assert_eq!(i.counts().received, 0);
    assert_eq!(i.copied().1, Finish::Nothing);
    assert_eq!(i.counts().received, 1);
    let m = i.retry().unwrap();
    assert_eq!(i.place(&m.record, false, m.sequence, &AROUND).unwrap(), Action::Finish(Finish::Signal));
    assert_eq!(i.counts().received, 2);
}

#[test]
fn p5_a_sender_keeps_what_is_read_in_place_until_the_reader_gives_it_back() {
    let mut i = Inbound::new(RULES);
    for id in 0..2 {
        assert!(matches!(take(&mut i, &send(id, 128), false).unwrap(), Action::Finish(Finish::Show(_))));
    }
    assert_eq!(i.counts(), Counts { released: 0, received: 2, granted: 4 });
    i.consume(1).unwrap();
    assert_eq!(i.counts(), Counts { released: 1, received: 2, granted: 5 });
    i.consume(2).unwrap();
    assert_eq!(i.counts(), Counts { released: 2, received: 2, granted: 6 });
}

#[test]
fn a_reader_that_is_not_slow_is_never_copied_for() {
    let mut i = Inbound::new(Rules { slow_ns: 100, ..RULES });
    // The device always holds a message, and gives one back before each tick.
    for id in 0..6 {
        assert!(matches!(take(&mut i, &send(id, 512), false).unwrap(), Action::Finish(Finish::Show(_))));
        i.consume(id).unwrap();
        i.tick(id * 1000);
    }
    i.tick(5100);
    let Action::Copy { to, .. } = take(&mut i, &send(6, 512), false).unwrap() else {
        panic!("not copied out")
    };
    assert_eq!(to, Destination::Landing(0));
}

/// What may arrive.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Inline,
    Send(u32),
    RegionSend(u32),
    Put(u32, bool),
    Placed(u32, bool),
    Signal,
}

fn kind() -> impl Strategy<Value = Kind> {
    let region = || prop_oneof![Just(HOST), Just(DEVICE)];
    prop_oneof![
        Just(Kind::Inline),
        (1u32..1000).prop_map(Kind::Send),
        (1u32..1000).prop_map(Kind::RegionSend),
        (region(), any::<bool>()).prop_map(|(key, inline)| Kind::Put(key, inline)),
        (region(), any::<bool>()).prop_map(|(key, signal)| Kind::Placed(key, signal)),
        Just(Kind::Signal),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(Kind, u32),
    Copied,
    Consume,
    Post(u32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (kind(), 0u32..3).prop_map(|(kind, tag)| Event::Arrive(kind, tag)),
        2 => Just(Event::Copied),
        2 => Just(Event::Consume),
        1 => (0u32..4).prop_map(|tag| Event::Post(if tag == 3 { ANY } else { tag })),
    ]
}

/// A receiver among a sender that keeps to its credit, copies that end in order, and a device; beside it what a reader
/// of the rules would expect.
struct World {
    inbound: Inbound,
    around: Around,
    posted: bool,
    sent: u64,
    sends: u64,
    /// Messages that were completed.
    finished: u64,
    copies: VecDeque<u64>,
    /// Records shown and not given back: sequence number, and whether the payload lies with the sender.
    held: VecDeque<(u64, bool)>,
    shown: u64,
    consumed: u64,
    posts: u64,
}

impl World {
    fn finish(&mut self, sequence: u64, step: &Action) {
        assert_eq!(sequence, self.finished, "completed out of order");
        self.finished += 1;
        match step {
            Action::ShowWords => self.show(sequence, false),
            Action::Finish(Finish::Show(r)) | Action::Placed(_, Finish::Show(r)) => {
                self.show(sequence, r.flags & (Record::LANDING | Record::BUFFER) == 0);
            }
            _ => {}
        }
        assert_eq!(self.inbound.shown(), self.shown);
    }

    fn show(&mut self, sequence: u64, in_place: bool) {
        self.held.push_back((sequence, in_place));
        self.shown += 1;
    }

    /// Does what is answered; true unless the message waits.
    fn perform(&mut self, step: Action, sequence: u64) -> bool {
        match step {
            Action::Wait => return false,
            Action::Copy { .. } => self.copies.push_back(sequence),
            done => self.finish(sequence, &done),
        }
        true
    }

    fn attempt(&mut self, m: Message) {
        let step = self.inbound.place(&m.record, m.placed, m.sequence, &self.around).unwrap();
        if !self.perform(step, m.sequence) {
            self.inbound.keep(m);
        }
    }

    fn arrive(&mut self, kind: Kind, tag: u32) {
        if !self.inbound.takes_another() {
            return;
        }
        if let Some(m) = self.inbound.retry() {
            return self.attempt(m);
        }
        let id = self.sent;
        let record = match kind {
            Kind::Inline => inline(id),
            Kind::Send(length) => send(id, length),
            Kind::RegionSend(length) => Record { flags: Record::REGION, ..send(id, length) },
            Kind::Put(key, inline) => {
                let flags = if inline { Record::INLINE } else { 0 };
                Record { flags, ..put(id, key, if inline { 8 } else { 300 }) }
            }
            Kind::Placed(key, signal) => {
                let flags = if signal { Record::WITH_SIGNAL } else { 0 };
                Record { flags, ..put(id, key, 300) }
            }
            Kind::Signal => signal(id, 0),
        };
        let record = Record { tag, ..record };
        let is_send = record.opcode == Opcode::Send;
        // P4: the sender has a credit for each SEND.
        if is_send && self.sends >= self.inbound.counts().granted {
            return;
        }
        self.sends += is_send as u64;
        self.sent += 1;
        let words = record.encode(0);
        let (record, sequence) = self.inbound.accept(&words).unwrap();
        assert_eq!(sequence, id);
        self.attempt(Message { record, words, placed: matches!(kind, Kind::Placed(..)), sequence });
    }

    fn copied(&mut self) {
        if let Some(sequence) = self.copies.pop_front() {
            let (record, finish) = self.inbound.copied();
            assert_eq!(record.id as u64, sequence);
            self.finish(sequence, &Action::Finish(finish));
        }
    }

    fn consume(&mut self) {
        if self.held.pop_front().is_some() {
            self.consumed += 1;
            assert!(self.inbound.consume(self.consumed).unwrap());
        }
    }

    fn post(&mut self, tag: u32) {
        if self.posted
            && let Some(number) = self.inbound.next_post()
        {
            // A device whose receives all have tags that nobody sends would be stuck by its own fault.
            let tag = if self.posts - self.consumed == 3 { ANY } else { tag };
            self.inbound.post(Posted { number, key: HOST, offset: 0, length: 1000, tag });
            self.posts += 1;
        }
    }

    fn check(&self) {
        let counts = self.inbound.counts();
        assert_eq!(counts.received, self.finished);
        let oldest = self.held.iter().find(|(_, in_place)| *in_place);
        assert_eq!(counts.released, oldest.map_or(self.finished, |(sequence, _)| *sequence));
        let granted = if self.posted { self.posts } else { self.consumed + 4 };
        assert_eq!(counts.granted, granted);
        assert!(self.held.len() <= 4, "more records than the ring has slots");
    }
}

proptest! {
    /// Whatever arrives and whenever copies end: messages are completed in the order of their sequence numbers, once
    /// each; the counts say what is complete and what is held; no record overwrites one that the device holds; and
    /// nothing waits for ever.
    #[test]
    fn p3_p5_p6_messages_are_completed_once_each_in_order(
        events in prop::collection::vec(event(), 1..300),
        posted in any::<bool>(),
        in_place in any::<bool>(),
    ) {
        let rules = Rules { posted_receives: posted, ..RULES };
        let mut w = World {
            inbound: Inbound::new(rules),
            around: Around { in_place },
            posted,
            sent: 0,
            sends: 0,
            finished: 0,
            copies: VecDeque::new(),
            held: VecDeque::new(),
            shown: 0,
            consumed: 0,
            posts: 0,
        };
        for e in events {
            match e {
                Event::Arrive(kind, tag) => w.arrive(kind, tag),
                Event::Copied => w.copied(),
                Event::Consume => w.consume(),
                Event::Post(tag) => w.post(tag),
            }
            w.check();
        }
        for _ in 0..200 {
            w.copied();
            w.consume();
            w.post(ANY);
            if w.inbound.takes_another() && let Some(m) = w.inbound.retry() {
                w.attempt(m);
            }
            w.check();
        }
        prop_assert_eq!(w.finished, w.sent);
    }
}
