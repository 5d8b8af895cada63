//! A receiver in place of one whose engine died.
//!
//! The journal says how many messages were in their places when it was written last. SENDs that were shown after that are
//! found in the ring of receive records: a record carries its message's sequence number. A message that was only accepted,
//! or half copied, is not among them: the peer sends it again.

use pushgate_abi::abi;
use pushgate_abi::record::{Opcode, Record, RecordWords};

use super::{Held, Inbound, Rules};
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
        let own = (Record::LANDING as u64) << abi::PUSHGATE_FLAGS_SHIFT;
        let mut words = *words;
        words[0] &= !own;
        let r = Record::decode(&words).ok().filter(|r| r.opcode == Opcode::Send)?;
        Some(Shown { id: r.id, flags, length: r.length, place: r.place, units: r.units() as u64 })
    }
}

impl Inbound {
    /// A receiver that goes on behind what is kept of an earlier one. `kept` was checked; the device has given back `consumed`
    /// receive records; `record` finds the words of the receive record of a number, if it was written. For queue pairs without
    /// posted receives.
    pub fn resumed(
        rules: Rules,
        kept: &Taken,
        consumed: u64,
        record: impl Fn(u64) -> Option<RecordWords>,
    ) -> Result<Self, Broken> {
        let ring = 1u64 << rules.rx_log;
        if kept.shown > consumed && kept.shown - consumed > ring {
            return Err(Broken(format!(
                "{} receive records, of which {consumed} were given back",
                kept.shown
            )));
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
            if r.flags & Record::LANDING != 0 {
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
        Ok(inbound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pushgate_abi::record::with_lap;

    const RULES: Rules =
        Rules { rx_log: 2, landing_log: 3, signals: 1, in_place: 8, slow_ns: 1, posted_receives: false };

    fn send(flags: u8, id: u32, place: u32, length: u32) -> RecordWords {
        let units = length.div_ceil(abi::PUSHGATE_UNIT) as u64;
        let r = Record { flags, id, place, length, place_offset: units, ..Record::new(Opcode::Send) };
        with_lap(&r.encode(0), 1)
    }

    /// `records`: those of numbers `first` and on.
    fn resumed(kept: Taken, consumed: u64, first: u64, records: &[RecordWords]) -> Result<Inbound, Broken> {
        let record = |at: u64| records.get(at.checked_sub(first)? as usize).copied();
        Inbound::resumed(RULES, &kept, consumed, record)
    }

    #[test]
    fn p6_a_send_that_was_shown_behind_the_last_journal_counts_with_the_puts_before_it() {
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
}
