//! A queue pair's own memory in one window: control segment, work segment and payload, one after
//! the other on whole pages.
//!
//! A process that has the window finds all parts, because the control segment's header says how
//! large they are. This serves a device that shares nothing but a BAR with its proxy, and a proxy
//! that takes over what another one left in staging.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ShimError;
use crate::abi;
use crate::record::{Record, lap_of};
use crate::segment::{Geometry, HeaderError, Segment, check_header, write_header_words};
use crate::window::{Piece, Window};

const HEADER: usize = 8;

/// The parts of a window that holds a queue pair's own memory.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Sizes of the rings.
    pub geometry: Geometry,
    /// The control segment.
    pub control: Piece,
    /// The work segment.
    pub work: Piece,
    /// The payload ring.
    pub payload: Piece,
}

/// Bytes of a window that holds all parts.
pub fn bytes(geometry: &Geometry) -> usize {
    geometry.control_bytes() + geometry.work_bytes() + geometry.window_bytes()
}

impl Placed {
    /// Writes both headers into a zeroed window of at least [`bytes`].
    pub fn write(window: Arc<dyn Window>, geometry: &Geometry) -> Result<Self, ShimError> {
        let placed = Self::parts(&window, *geometry)?;
        let g = geometry;
        // The control segment's header is written last: a process that finds it finds the rest.
        write_header_words(placed.work.words(0, HEADER), g.work_bytes(), Segment::Work, g)?;
        write_header_words(placed.control.words(0, HEADER), g.control_bytes(), Segment::Control, g)?;
        Ok(placed)
    }

    /// Finds the parts of a window that another process or machine has written. Nothing in the
    /// window is trusted: headers that are wrong, disagree or reach beyond the window are refused.
    pub fn find(window: Arc<dyn Window>) -> Result<Self, ShimError> {
        let all = Piece::whole(window.clone());
        let words = all.words(0, HEADER.min(all.len() / 8));
        // The header names its segment's size, so the size is read from there.
        let named = words.get(2).map_or(0, |w| w.load(Ordering::Relaxed)) as usize;
        let geometry = check_header(words, Segment::Control, named.min(all.len()))?;
        let placed = Self::parts(&window, geometry)?;
        let work = check_header(placed.work.words(0, HEADER), Segment::Work, placed.work.len())?;
        if work != geometry {
            return Err(HeaderError::Disagree { control: geometry, work }.into());
        }
        Ok(placed)
    }

    fn parts(window: &Arc<dyn Window>, geometry: Geometry) -> Result<Self, ShimError> {
        geometry.validate()?;
        let (found, expected) = (window.len(), bytes(&geometry));
        if found < expected {
            return Err(HeaderError::Size { found, expected }.into());
        }
        let (control, work) = (geometry.control_bytes(), geometry.work_bytes());
        Ok(Placed {
            control: Piece::part(window, 0, control),
            work: Piece::part(window, control, work),
            payload: Piece::part(window, control + work, geometry.window_bytes()),
            geometry,
        })
    }

    /// All parts: they lie one after the other, control first.
    pub fn whole(&self) -> Piece {
        let bytes = bytes(&self.geometry);
        self.control.beginning(bytes)
    }

    /// Describes what an earlier device did in this window, if any did: a device that begins at 0
    /// must not use such a window.
    pub fn used(&self) -> Option<String> {
        let State { credit, status, delivered, waiting, .. } = self.state();
        let word = |offset: usize| self.work.words(offset, 1)[0].load(Ordering::Acquire);
        let consumed = word(abi::PUSHGATE_WORK_CONSUMED as usize);
        let posted = word(self.geometry.work_receives_offset());
        let found = [
            ("status", status),
            ("credit", credit),
            ("delivered", delivered),
            ("released receives", consumed),
            ("first posted receive", posted),
            ("waiting WQEs", waiting.len() as u64),
        ];
        let (name, value) = found.into_iter().find(|(_, value)| *value != 0)?;
        Some(format!("{name} {value:#x}"))
    }

    /// The content of the rings.
    pub fn state(&self) -> State {
        let g = &self.geometry;
        let line = self.control.words(abi::PUSHGATE_CTL_CREDIT as usize, 3);
        let [credit, status, delivered] = [0, 1, 2].map(|i: usize| line[i].load(Ordering::Acquire));
        let slots = 1u64 << g.slots_log;
        let ring = self.work.words(abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log);
        // A cursor of 24 bits; the lap in a WQE tells no more than that anyway.
        let retired = credit >> abi::PUSHGATE_CURSOR_BITS & abi::PUSHGATE_CURSOR_MASK as u64;
        let words = |slot: u64| {
            let first = (slot & (slots - 1)) as usize * 8;
            std::array::from_fn(|i| ring[first + i].load(Ordering::Acquire))
        };
        let is_there = |w: &[u64; 8], slot| {
            w.iter().all(|w| (w >> abi::PUSHGATE_LAP_SHIFT) as u8 == lap_of(slot, g.slots_log))
        };
        let waiting = (retired..retired + slots)
            .map(|slot| (slot, words(slot)))
            .take_while(|(slot, w)| is_there(w, *slot))
            .map(|(slot, w)| {
                let r = Record::decode(&w).ok();
                let (place, length) = r.map_or((0, 0), |r| (r.place, r.length));
                Waiting { slot, place, length, words: w }
            })
            .collect();
        State { credit, status, delivered, retired, waiting }
    }
}

/// A ring's state as it lies in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The credit word.
    pub credit: u64,
    /// The status word; 0 while the queue pair worked.
    pub status: u64,
    /// Slots whose messages the peer has, cumulative.
    pub delivered: u64,
    /// Slots retired, modulo 2^24.
    pub retired: u64,
    /// WQEs published and not retired, oldest first.
    pub waiting: Vec<Waiting>,
}

/// A WQE that was published and not retired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The cursor of the WQE's slot.
    pub slot: u64,
    /// Where the WQE's payload begins, in units of the payload ring.
    pub place: u32,
    /// Length of the WQE's payload in bytes.
    pub length: u32,
    /// All words of the WQE.
    pub words: [u64; 8],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;

    fn geometry() -> Geometry {
        Geometry {
            window_log: 6,
            slots_log: 3,
            cq_log: 3,
            rx_log: 3,
            link_log: 3,
            landing_log: 6,
            signals: 4,
            rank: 2,
        }
    }

    fn window(bytes: usize) -> Arc<dyn Window> {
        Arc::new(SharedMemory::builder("window", bytes).create().unwrap())
    }

    #[test]
    fn what_was_written_is_found() {
        let all = window(bytes(&geometry()));
        let written = Placed::write(all.clone(), &geometry()).unwrap();
        let found = Placed::find(all.clone()).unwrap();
        assert_eq!(found.geometry, geometry());
        for (a, b) in [(&written.control, &found.control), (&written.work, &found.work)] {
            assert_eq!((a.begin(), a.len()), (b.begin(), b.len()));
        }
        assert_eq!(found.payload.begin() + found.payload.len(), all.len());
        let state = found.state();
        assert_eq!((state.retired, state.waiting.len(), state.status), (0, 0, 0));
    }

    #[test]
    fn p8_a_window_whose_headers_are_wrong_is_refused() {
        let g = geometry();
        assert!(Placed::write(window(bytes(&g) - 4096), &g).is_err());
        assert!(Placed::find(window(8192)).is_err(), "zeros");
        let all = window(bytes(&g));
        let placed = Placed::write(all.clone(), &g).unwrap();
        for (piece, what) in [(&placed.control, "control"), (&placed.work, "work")] {
            for i in 0..7 {
                for wrong in [0, 1, 1 << 40, u64::MAX] {
                    let word = &piece.words(0, HEADER)[i];
                    let good = word.swap(wrong, Ordering::Relaxed);
                    assert!(good == wrong || Placed::find(all.clone()).is_err(), "{what} {i} {wrong:#x}");
                    word.store(good, Ordering::Relaxed);
                }
            }
        }
        // Two headers, each valid and of the same sizes, but of different queue pairs.
        let other = Geometry { rank: 3, ..g };
        let words = placed.work.words(0, HEADER);
        write_header_words(words, g.work_bytes(), Segment::Work, &other).unwrap();
        let e = Placed::find(all.clone()).unwrap_err().to_string();
        assert!(e.contains("rank: 2 }, the work segment Geometry {") && e.contains("rank: 3 }"), "{e}");
        write_header_words(words, g.work_bytes(), Segment::Work, &g).unwrap();
        Placed::find(all.clone()).unwrap();
        // A valid header of more memory than there is.
        let large = Geometry { window_log: 20, ..g };
        let words = placed.control.words(0, HEADER);
        write_header_words(words, large.control_bytes(), Segment::Control, &large).unwrap();
        assert!(Placed::find(all).is_err());
    }

    #[test]
    fn traces_of_an_earlier_device_are_reported() {
        let g = geometry();
        let placed = Placed::write(window(bytes(&g)), &g).unwrap();
        assert_eq!(placed.used(), None);
        let (c, w) = (&placed.control, &placed.work);
        for (piece, offset, name) in [
            (c, abi::PUSHGATE_CTL_CREDIT as usize, "credit 0x7"),
            (c, abi::PUSHGATE_CTL_STATUS as usize, "status 0x7"),
            (c, abi::PUSHGATE_CTL_DELIVERED as usize, "delivered 0x7"),
            (w, abi::PUSHGATE_WORK_CONSUMED as usize, "released receives 0x7"),
            (w, g.work_receives_offset(), "first posted receive 0x7"),
        ] {
            let word = &piece.words(offset, 1)[0];
            word.store(7, Ordering::Relaxed);
            assert_eq!(placed.used().as_deref(), Some(name));
            word.store(0, Ordering::Relaxed);
        }
        let lap = (lap_of(0, g.slots_log) as u64) << abi::PUSHGATE_LAP_SHIFT;
        let slot = w.words(abi::PUSHGATE_WORK_RING as usize, 8);
        slot.iter().for_each(|word| word.store(lap, Ordering::Relaxed));
        assert_eq!(placed.used().as_deref(), Some("waiting WQEs 0x1"));
        slot.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        // What arrived from the peer belongs to the process that attaches.
        c.words(g.control_rx_offset(), 1)[0].store(lap, Ordering::Relaxed);
        assert_eq!(placed.used(), None);
    }

    #[test]
    fn published_wqes_are_reported() {
        let g = geometry();
        let placed = Placed::write(window(bytes(&g)), &g).unwrap();
        let ring = placed.work.words(abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log);
        let publish = |slot: u64| {
            let lap = (lap_of(slot, g.slots_log) as u64) << abi::PUSHGATE_LAP_SHIFT;
            (0..8).for_each(|i| ring[(slot & 7) as usize * 8 + i].store(lap | i as u64, Ordering::Relaxed));
        };
        (0..8).for_each(publish);
        assert_eq!(placed.state().waiting.len(), 8);
        let credit = &placed.control.words(abi::PUSHGATE_CTL_CREDIT as usize, 1)[0];
        credit.store(5 << abi::PUSHGATE_CURSOR_BITS, Ordering::Relaxed);
        publish(8);
        let slots: Vec<_> = placed.state().waiting.iter().map(|w| w.slot).collect();
        assert_eq!(slots, [5, 6, 7, 8]);
    }
}
