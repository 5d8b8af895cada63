//! A receiver in place of one whose engine died.
//!
//! The journal says how many messages were in their places when it was written last. SENDs that were shown after that are
//! found in the ring of receive records: a record carries its message's sequence number. A message that was only accepted,
//! or half copied, is not among them: the peer sends it again.
//!
//! A posted receive is open until a receive record names it. A device posts at most as many receives ahead of the records
//! that it has given back as the ring has slots. So an open receive lies in the program's ring, if its number is not below that of the
//! next receive record. An engine keeps an older one in the journal before it writes the receive record of that number. Which of the
//! younger ones are taken is said by the last records, one fewer than the ring has, which are all still there.

use pushgate_abi::abi;
use pushgate_abi::record::{Opcode, Record, RecordWords};

use super::{Held, Inbound, Posted, Rules};
use crate::journal::{Broken, Taken};

/// A receive record that a device holds.
struct Shown {
    id: u32,
    flags: u8,
    length: u32,
    place: u32,
    /// Units that are held at the sender, for a payload that lies there.
    units: u64,
}

impl Shown {
    fn of(words: &RecordWords) -> Option<Self> {
        let flags = (words[0] >> abi::PUSHGATE_FLAGS_SHIFT) as u8;
        // A receive record has flags that no other record has.
        let own = ((Record::LANDING | Record::BUFFER) as u64) << abi::PUSHGATE_FLAGS_SHIFT;
        let mut words = *words;
        words[0] &= !own;
        let r = Record::decode(&words).ok().filter(|r| r.opcode == Opcode::Send)?;
        Some(Shown { id: r.id, flags, length: r.length, place: r.place, units: r.units() as u64 })
    }
}

impl Inbound {
    /// A receiver that goes on after what is kept of an earlier one. `kept` was checked; the device has given back `consumed`
    /// receive records; `record` finds the words of the receive record of a number, if it was written. Where SENDs go to posted
    /// receives, `open` are those that are kept, and `receive` finds that of a number in the program's ring.
    pub fn resumed(
        rules: Rules,
        kept: &Taken,
        consumed: u64,
        record: impl Fn(u64) -> Option<RecordWords>,
        open: &[Posted],
        receive: impl Fn(u64) -> Option<Posted>,
    ) -> Result<Self, Broken> {
        let ring = 1u64 << rules.rx_log;
        if kept.shown > consumed && kept.shown - consumed > ring {
            return Err(Broken(format!("{} receive records, {consumed} of them given back", kept.shown)));
        }
        let read = |at: u64| {
            let shown = record(at).as_ref().and_then(Shown::of);
            shown.ok_or_else(|| Broken(format!("receive record {at} is none")))
        };
        let (mut accepted, mut shown) = (kept.received, kept.shown);
        // The engine wrote no record twice between two writes of the journal, so each is still there.
        while shown - kept.shown < ring && record(shown).is_some() {
            let ahead = read(shown)?.id.wrapping_sub(accepted as u32);
            if ahead > u32::MAX / 2 {
                return Err(Broken(format!("receive record {shown} is of a message before {accepted}")));
            }
            accepted += ahead as u64 + 1;
            shown += 1;
        }
        if consumed > shown {
            return Err(Broken(format!("{consumed} receive records given back of {shown}")));
        }
        let mut inbound = Inbound { accepted, shown, consumed, ..Inbound::new(rules) };
        let mut before = None;
        for rx in consumed..shown {
            let r = read(rx)?;
            let sequence = accepted.checked_sub((accepted as u32).wrapping_sub(r.id) as u64);
            let sequence = sequence
                .filter(|s| *s < accepted && before.is_none_or(|before| before < *s))
                .ok_or_else(|| Broken(format!("receive record {rx} is of a message that can't be")))?;
            before = Some(sequence);
            if (r.flags & Record::BUFFER != 0) != rules.posted_receives {
                return Err(Broken(format!("receive record {rx} is of another kind of queue pair")));
            }
            if r.flags & Record::BUFFER != 0 {
                // Its payload lies in memory of the program.
            } else if r.flags & Record::LANDING != 0 {
                let units = r.length.div_ceil(abi::PUSHGATE_UNIT) as u64;
                let taken = inbound.landing.retake(r.place as u64, units);
                let units = taken.ok_or_else(|| {
                    Broken(format!("receive record {rx} names no room of the landing ring"))
                })?;
                inbound.landed.push_back(Held { rx, sequence, units });
            } else if r.flags & Record::INLINE == 0 {
                inbound.in_place.push_back(Held { rx, sequence, units: r.units });
                inbound.in_place_units += r.units;
            }
        }
        if rules.posted_receives {
            // The one before may be half overwritten by the next one. Its receive has a number below `shown`.
            let last = (shown + 1).saturating_sub(ring)..shown;
            let taken = last.map(|rx| Ok(read(rx)?.place)).collect::<Result<Vec<_>, Broken>>()?;
            inbound.reopen(taken, open, receive)?;
        }
        Ok(inbound)
    }

    /// Puts the posted receives in place that are not among those `taken` by the last receive records.
    fn reopen(
        &mut self,
        mut taken: Vec<u32>,
        open: &[Posted],
        receive: impl Fn(u64) -> Option<Posted>,
    ) -> Result<(), Broken> {
        let ring = 1u64 << self.rules.rx_log;
        taken.sort_unstable();
        let is_open = |p: &Posted| taken.binary_search(&(p.number as u32)).is_err();
        // One that was kept and whose receive record was not written lies in the ring too.
        let mut kept: Vec<_> = open.iter().copied().filter(|p| p.number < self.shown && is_open(p)).collect();
        kept.sort_unstable_by_key(|p| p.number);
        if kept.windows(2).any(|pair| pair[0].number == pair[1].number) {
            return Err(Broken("a posted receive was kept twice".into()));
        }
        if kept.len() > ring as usize {
            return Err(Broken(format!("{} posted receives are kept, of {ring} at most", kept.len())));
        }
        kept.into_iter().for_each(|p| self.posted.post(p));
        self.posts = self.shown;
        while self.posts - self.consumed < ring
            && let Some(p) = receive(self.posts)
        {
            if is_open(&p) {
                self.posted.post(p);
            }
            self.posts += 1;
        }
        // Each record has taken one.
        if self.posted.len() as u64 != self.posts - self.shown {
            let (found, posts, shown) = (self.posted.len(), self.posts, self.shown);
            return Err(Broken(format!(
                "{found} open receives, of {posts} posted ones and {shown} taken ones"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pushgate_abi::record::with_lap;

    const RULES: Rules = Rules {
        rx_log: 2,
        landing_log: 3,
        signals: 1,
        in_place: 8,
        slow_ns: 1,
        posted_receives: false,
        ahead: 0,
    };

    fn send(flags: u8, id: u32, place: u32, length: u32) -> RecordWords {
        let units = length.div_ceil(abi::PUSHGATE_UNIT) as u64;
        let r = Record { flags, id, place, length, place_offset: units, ..Record::new(Opcode::Send) };
        with_lap(&r.encode(0), 1)
    }

    /// `records`: those of numbers `first` and on.
    fn resumed(kept: Taken, consumed: u64, first: u64, records: &[RecordWords]) -> Result<Inbound, Broken> {
        let record = |at: u64| records.get(at.checked_sub(first)? as usize).copied();
        Inbound::resumed(RULES, &kept, consumed, record, &[], |_| None)
    }

    #[test]
    fn p6_a_send_that_was_shown_after_the_last_journal_counts_with_the_puts_before_it() {
        let kept = Taken { received: 10, shown: 4, signal: None };
        // Messages 10 and 11 were PUTs, 12 was a SEND.
        let i = resumed(kept, 4, 4, &[send(Record::INLINE, 12, 0, 8)]).unwrap();
        assert_eq!((i.accepted(), i.shown(), i.counts().received, i.counts().released), (13, 5, 13, 13));
        let i = resumed(kept, 4, 4, &[]).unwrap();
        assert_eq!((i.accepted(), i.shown(), i.counts().granted), (10, 4, 8));
        // The device had given it back already.
        let i = resumed(kept, 5, 4, &[send(0, 10, 3, 8)]).unwrap();
        assert_eq!((i.accepted(), i.counts().released), (11, 11));
    }

    #[test]
    fn p5_what_the_device_holds_stays_held_in_its_place() {
        let kept = Taken { received: (1 << 33) + 9, shown: 6, signal: None };
        let records = [send(0, 3, 1, 100), send(Record::LANDING, 5, 6, 128), send(Record::LANDING, 8, 0, 64)];
        let mut i = resumed(kept, 3, 3, &records).unwrap();
        assert_eq!((i.counts().released, i.counts().received), ((1 << 33) + 3, (1 << 33) + 9));
        assert_eq!((i.in_place_units, i.landing.longest_free()), (2, (1, 5)));
        assert!(i.consume(4).unwrap());
        assert_eq!((i.counts().released, i.in_place_units), ((1 << 33) + 9, 0));
        assert!(i.consume(6).unwrap());
        assert_eq!(i.landing.longest_free(), (0, 8));
    }

    #[test]
    fn p8_receive_records_that_cannot_be_are_refused() {
        let kept = Taken { received: 10, shown: 4, signal: None };
        let put = with_lap(&Record { id: 10, ..Record::new(Opcode::Put) }.encode(0), 1);
        let inline = |id| send(Record::INLINE, id, 0, 8);
        let cases: [(u64, u64, &[RecordWords]); 8] = [
            (5, 4, &[]),
            (3, 4, &[]),
            (4, 4, &[put]),
            (4, 4, &[inline(9)]),
            (3, 3, &[inline(10)]),
            (2, 2, &[inline(8), inline(8)]),
            (3, 3, &[send(Record::LANDING, 9, 7, 128)]),
            (2, 2, &[send(Record::LANDING, 8, 2, 128), send(Record::LANDING, 9, 1, 128)]),
        ];
        for (at, (consumed, first, records)) in cases.into_iter().enumerate() {
            assert!(resumed(kept, consumed, first, records).is_err(), "case {at}");
        }
        assert!(resumed(Taken { shown: 9, ..kept }, 4, 4, &[]).is_err());
    }

    const POSTS: Rules = Rules { posted_receives: true, ..RULES };

    fn posted(number: u64, tag: u32) -> Posted {
        Posted { number, key: 1, offset: 64 * number, length: 64, tag }
    }

    /// Receives of tag 1 lie in the ring up to number `posts`. `taken`: the receives that the records name, from number `first` on.
    fn reopened(
        consumed: u64,
        first: u64,
        taken: &[u32],
        open: &[Posted],
        posts: u64,
    ) -> Result<Inbound, Broken> {
        let shown = first + taken.len() as u64;
        let kept = Taken { received: shown, shown, signal: None };
        let record = |at: u64| {
            let place = *taken.get(at.checked_sub(first)? as usize)?;
            let r = Record { flags: Record::BUFFER, id: at as u32, place, ..Record::new(Opcode::Send) };
            Some(with_lap(&r.encode(0), 1))
        };
        Inbound::resumed(POSTS, &kept, consumed, record, open, |n| (n < posts).then(|| posted(n, 1)))
    }

    #[test]
    fn p6_receives_that_no_record_names_are_open_in_their_order() {
        let open = |i: &Inbound| i.posted.iter().map(|p| p.number).collect::<Vec<_>>();
        // A ring of four. Receives 1, 4, 5 and 7 were taken early; 0 is kept, in whose place 4 and 8 were posted.
        let i = reopened(6, 2, &[2, 3, 5, 7], &[posted(0, 9)], 9).unwrap();
        assert_eq!((open(&i), i.posts, i.counts().granted), (vec![0, 6, 8], 9, 9));
        // 5 was named and is still kept; 6 was kept before its record was to be written.
        let i = reopened(6, 2, &[2, 3, 5, 7], &[posted(5, 1), posted(0, 9), posted(6, 1)], 8).unwrap();
        assert_eq!((open(&i), i.next_post()), (vec![0, 6], Some(8)));
    }

    #[test]
    fn p8_open_receives_that_cannot_be_are_refused() {
        let named = &[2, 3, 5, 7];
        let kept = [posted(0, 9)];
        reopened(6, 2, named, &kept, 9).unwrap();
        // One is missing, one is kept twice, one is too many, one was never posted.
        assert!(reopened(6, 2, named, &[], 9).is_err());
        assert!(reopened(6, 2, named, &[kept[0], kept[0]], 9).is_err());
        assert!(reopened(6, 2, named, &[kept[0], posted(1, 9)], 9).is_err());
        assert!(reopened(6, 2, &[2, 3, 5, 70], &kept, 9).is_err());
        assert!(reopened(6, 2, &[2, 3, 5, 5], &kept, 9).is_err());
    }
}
