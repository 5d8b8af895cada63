//! The next link of a `local` session: each end makes a new link segment and hands it to the peer. Records and counts begin
//! at 0 over zeroed memory, so no word of an earlier link is taken for one of this link. Windows, doorbells and regions stay.

use pushgate_driver_shim::segment::{Segment, write_header};

use super::LocalLink;
use super::next::LinkOffer;
use crate::frame::Frame;
use crate::{Renew, RenewError};

impl Renew for LocalLink {
    fn fence(&mut self, _now: u64) -> bool {
        // The peer's next segment is another memory, and nothing reads the present one for this end but this engine.
        true
    }

    fn offer(&mut self) -> Result<Option<Frame>, RenewError> {
        let here = |e: &dyn std::fmt::Display| RenewError::Here(format!("a link segment: {e}"));
        let next = &mut self.next;
        let memory = (next.make)(next.geometry.bytes(Segment::Link)).map_err(|e| here(&e))?;
        write_header(&memory, Segment::Link, &next.geometry).map_err(|e| here(&e))?;
        memory.seal_against_writers().map_err(|e| here(&e))?;
        let fd = memory.fd().try_clone_to_owned().map_err(|e| here(&e))?;
        let offer = LinkOffer { link: memory.len() };
        let own = next.segment(&memory.into());
        let before = next.own.replace(own);
        if std::mem::take(&mut next.ready) {
            next.given_up = before;
        }
        let bytes = serde_json::to_vec(&offer).expect("an offer is plain data");
        Ok(Some(Frame { bytes, along: vec![fd].into() }))
    }

    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError> {
        self.next.peer = Some(self.next.take(offer)?);
        // The peer has left every attempt before this one, or it would not have made an offer.
        (self.next.ready, self.next.given_up) = (true, None);
        Ok(())
    }

    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError> {
        Ok(Some(Vec::new()))
    }

    fn go(&mut self, _places: &[u8], accepted: u64) -> Result<(), RenewError> {
        let (Some(own), Some(peer)) = (self.next.own.take(), self.next.peer.take()) else {
            unreachable!("a link goes live when both ends have prepared")
        };
        self.next.ready = false;
        for region in self.regions.values_mut() {
            (region.before, region.used) = (region.last(self.base), 0);
        }
        (self.own, self.peer) = (own, peer);
        (self.base, self.sent, self.completed, self.inbound) = (accepted, 0, accepted, 0);
        self.dirty = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use pushgate_driver_shim::memory::{HugePages, SharedMemory};
    use pushgate_driver_shim::record::{Opcode, Record};
    use pushgate_driver_shim::segment::Geometry;

    use super::*;
    use crate::local::Processes;
    use crate::memory::Mapped;
    use crate::region::RegionMemory;
    use crate::{Arrival, Link, OwnRegions, PeerCounts, Telling};
    use pushgate_core::gate::{Gate, Need};

    const GEOMETRY: Geometry = Geometry {
        window_log: 4,
        slots_log: 2,
        cq_log: 1,
        rx_log: 2,
        link_log: 2,
        landing_log: 4,
        signals: 1,
        rank: 0,
    };

    fn segment(geometry: &Geometry) -> Arc<SharedMemory> {
        let bytes = geometry.bytes(Segment::Link);
        let memory =
            SharedMemory::builder("renew-test", bytes).huge_pages(HugePages::Never).create().unwrap();
        write_header(&memory, Segment::Link, geometry).unwrap();
        Arc::new(memory)
    }

    fn frame(bytes: &str, memory: &[&SharedMemory]) -> Frame {
        let fds = memory.iter().map(|m| m.fd().try_clone_to_owned().unwrap()).collect::<Vec<_>>();
        Frame { bytes: bytes.into(), along: fds.into() }
    }

    /// Two ends of one process that can't read each other's process.
    fn ends() -> [LocalLink; 2] {
        let geometries = [0, 1].map(|rank| Geometry { rank, ..GEOMETRY });
        let segments = geometries.each_ref().map(segment);
        [0, 1].map(|i: usize| {
            let [own, peer] = [i, 1 - i].map(|i| Mapped::from(&segments[i]));
            let window = Mapped::heap(GEOMETRY.window_bytes());
            let processes = Processes { peer: None, in_program: true };
            LocalLink::new(&own, &geometries[i], &peer, &geometries[1 - i], window, (None, None), processes)
        })
    }

    fn offer(link: &mut LocalLink) -> Frame {
        link.offer().unwrap().expect("a segment is made at once")
    }

    fn post(link: &mut LocalLink, sequence: u64, record: &Record) {
        let gate = Gate::new(0, link.budget());
        let permit = gate.reserve(Need { bytes: 0, receive: false }).unwrap();
        link.post_send(permit, sequence, record, &record.encode(0)).unwrap();
    }

    fn arrives(link: &mut LocalLink) -> Option<u32> {
        let mut words = [0; 8];
        match link.poll_recv(&mut words) {
            Arrival::Record => Some(Record::decode(&words).unwrap().id),
            Arrival::Empty => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn p6_the_next_link_begins_after_what_was_accepted_and_brings_nothing_of_the_one_before() {
        let [mut a, mut b] = ends();
        let memory = RegionMemory::Host { address: 4096, keep: None };
        a.add_region(7, &memory, 64);
        let signal = Record::new(Opcode::Signal);
        let out_of_region =
            Record { flags: Record::REGION, place: 7, length: 8, ..Record::new(Opcode::Send) };
        for sequence in 0..3 {
            post(&mut a, sequence, if sequence == 1 { &out_of_region } else { &signal });
        }
        assert_eq!((arrives(&mut b), arrives(&mut b)), (Some(0), Some(1)));
        b.acknowledge(PeerCounts { released: 1, received: 1, granted: 4 });
        assert_eq!(a.poll_send(1).unwrap(), 1);

        let [of_a, of_b] = [offer(&mut a), offer(&mut b)];
        a.prepare(of_b).unwrap();
        b.prepare(of_a).unwrap();
        assert_eq!((a.prepared().unwrap(), b.prepared().unwrap()), (Some(vec![]), Some(vec![])));
        // A peer that is live already, and ends, is heard over the next link; one that is not, over this one.
        a.set_status(77);
        assert_eq!(b.peer_status(), 77);
        // Two messages were accepted, one of them is not received yet.
        a.go(&[], 2).unwrap();
        b.go(&[], 0).unwrap();
        assert_eq!((arrives(&mut b), b.peer_counts(), b.peer_status()), (None, PeerCounts::default(), 77));
        assert_eq!(a.peer_counts(), PeerCounts::default());
        assert!(
            a.region_in_use(7, 1) && !a.region_in_use(7, 2),
            "message 1 went out of it over the first link"
        );
        assert_eq!(
            (a.poll_send(1).unwrap(), a.poll_send(2).unwrap()),
            (0, 0),
            "what holds no slot completes nothing"
        );
        post(&mut a, 2, &out_of_region);
        assert_eq!(arrives(&mut b), Some(2));
        assert!(a.region_in_use(7, 2));
        assert_eq!(a.poll_send(3).unwrap(), 1);
        assert!(!a.region_in_use(7, 3));
    }

    #[test]
    fn p3_p7_a_peer_that_is_live_over_a_link_which_this_end_gave_up_finds_this_ends_status() {
        let [mut a, mut b] = ends();
        let [of_a, of_b] = [offer(&mut a), offer(&mut b)];
        a.prepare(of_b).unwrap();
        b.prepare(of_a).unwrap();
        b.go(&[], 0).unwrap();
        // The attempt is given up at this end alone, twice.
        offer(&mut a);
        offer(&mut a);
        assert_eq!(b.peer_status(), 0);
        a.set_status(77);
        assert_eq!(b.peer_status(), 77);
    }

    #[test]
    fn p8_attempts_that_are_given_up_keep_two_segments_at_most() {
        let [mut a, mut b] = ends();
        let made = Arc::new(Mutex::new(Vec::new()));
        let theirs = made.clone();
        a = a.with_segments(Box::new(move |bytes| {
            let memory = SharedMemory::builder("renew-test", bytes).huge_pages(HugePages::Never);
            let memory = Arc::new(memory.create()?);
            theirs.lock().unwrap().push(Arc::downgrade(&memory.mapping()));
            Ok(memory)
        }));
        let kept = || made.lock().unwrap().iter().filter(|m| m.strong_count() > 0).count();
        for attempt in 1..20 {
            offer(&mut a);
            assert_eq!(kept(), 1, "attempt {attempt}, whose peer does not answer");
        }
        for attempt in 1..20 {
            offer(&mut a);
            a.prepare(offer(&mut b)).unwrap();
            assert_eq!(kept(), 1, "attempt {attempt}, whose peer answers and goes no further");
        }
        offer(&mut a);
        assert_eq!(kept(), 2, "the peer may be live over the one before");
    }

    #[test]
    fn p8_an_offer_of_the_next_link_that_does_not_fit_is_refused_with_a_sentence() {
        let [mut a, _b] = ends();
        let theirs = Geometry { rank: 1, ..GEOMETRY };
        let (fits, bytes) = (segment(&theirs), theirs.bytes(Segment::Link));
        let text = format!(r#"{{"link":{bytes}}}"#);
        let larger = segment(&Geometry { link_log: 7, ..theirs });
        let empty = SharedMemory::builder("renew-test", bytes).huge_pages(HugePages::Never).create().unwrap();
        let other = segment(&Geometry { signals: 2, ..theirs });
        let longer = format!(r#"{{"link":{}}}"#, larger.len());
        let offers = [
            (frame("{", &[&fits]), "its offer of the next link"),
            (frame(&text, &[]), "0 descriptors with its offer of the next link, expected 1"),
            (frame(&text, &[&fits, &fits]), "2 descriptors"),
            (frame(&longer, &[&larger]), "expected"),
            (frame(&text, &[&larger]), "agreed on were"),
            (frame(&text, &[&empty]), "its link segment"),
            (frame(&text, &[&other]), "its link segment says"),
        ];
        for (offer, sentence) in offers {
            match a.prepare(offer) {
                Err(RenewError::Peer(why)) => assert!(why.contains(sentence), "{why}"),
                other => panic!("{sentence}: {other:?}"),
            }
        }
        a.prepare(frame(&text, &[&fits])).unwrap();
    }
}
