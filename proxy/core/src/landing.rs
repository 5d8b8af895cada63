//! The landing ring: room in the control segment for payload that is copied out of the way.
//!
//! Messages take room at the head, in units of 64 bytes and each in one piece, and give it back at the tail, in the
//! same order. Units that a message skips at the ring's end belong to that message.

/// Room for one payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The first unit, counted from the ring's start.
    pub unit: u64,
    /// Units that the payload takes, those skipped at the ring's end included.
    pub taken: u64,
}

/// Why the ring has no room for a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// Messages before it hold the room.
    Now,
    /// The payload is longer than the ring.
    Ever,
}

/// The landing ring of one queue pair. Its cursors are cumulative.
#[derive(Debug, Clone)]
pub struct Landing {
    units: u64,
    head: u64,
    tail: u64,
}

impl Landing {
    /// An empty ring of `1 << log` units.
    pub fn new(log: u32) -> Self {
        Landing { units: 1 << log, head: 0, tail: 0 }
    }

    /// Units of the whole ring.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Room for a payload of `units`, which [`Landing::take`] then takes.
    #[inline]
    pub fn room(&mut self, units: u64) -> Result<Room, NoRoom> {
        if self.head == self.tail {
            // Nothing lies in the ring: from its start a payload longer than half of it finds room, too.
            let start = self.head.next_multiple_of(self.units);
            (self.head, self.tail) = (start, start);
        }
        if units > self.units {
            return Err(NoRoom::Ever);
        }
        let position = self.head & (self.units - 1);
        let skip = if position + units > self.units { self.units - position } else { 0 };
        if self.head + skip + units - self.tail > self.units {
            return Err(NoRoom::Now);
        }
        Ok(Room { unit: (self.head + skip) & (self.units - 1), taken: skip + units })
    }

    /// Takes the room that [`Landing::room`] found, before anything else happens to the ring.
    #[inline]
    pub fn take(&mut self, room: Room) {
        self.head += room.taken;
    }

    /// Takes the room of a payload of `units` that lies at `unit` already, behind all that is held. Returns the units that the
    /// payload takes, those skipped at the ring's end included; `None` if the payload can't lie there.
    pub fn retake(&mut self, unit: u64, units: u64) -> Option<u64> {
        if units > self.units || unit > self.units - units {
            return None;
        }
        if self.head == self.tail {
            let start = self.head.next_multiple_of(self.units) + unit;
            (self.head, self.tail) = (start, start);
        }
        let skip = unit.wrapping_sub(self.head) & (self.units - 1);
        let taken = skip + units;
        if self.head + taken - self.tail > self.units {
            return None;
        }
        self.head += taken;
        Some(taken)
    }

    /// Gives back the oldest `taken` units that are still held.
    ///
    /// # Panics
    ///
    /// If fewer are held.
    #[inline]
    pub fn give_back(&mut self, taken: u64) {
        assert!(taken <= self.head - self.tail, "{taken} units given back of {}", self.head - self.tail);
        self.tail += taken;
    }

    /// The longest free stretch: its first unit, and its units.
    pub fn longest_free(&self) -> (u64, u64) {
        let (head, tail) = (self.head & (self.units - 1), self.tail & (self.units - 1));
        match self.head - self.tail {
            0 => (0, self.units),
            held if held == self.units => (head, 0),
            _ if head < tail => (head, tail - head),
            // What is held lies between: one stretch before it, and one behind.
            _ if tail > self.units - head => (0, tail),
            _ => (head, self.units - head),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_empty_ring_has_room_for_a_payload_of_its_whole_length() {
        let mut ring = Landing::new(3);
        for _ in 0..3 {
            for units in [3, 8] {
                let room = ring.room(units).unwrap();
                assert_eq!(room, Room { unit: 0, taken: units });
                ring.take(room);
                ring.give_back(units);
            }
        }
        assert_eq!(ring.room(9), Err(NoRoom::Ever));
    }

    proptest! {
        /// Against a list of the payloads that lie in the ring: no two share a unit, none passes the ring's end, the
        /// free stretch is free, and a payload that is refused fits neither behind the head nor at the start.
        #[test]
        fn p1_payloads_share_no_unit(steps in prop::collection::vec((any::<bool>(), 0u64..20), 1..200)) {
            let mut ring = Landing::new(4);
            // First unit, units, units taken.
            let mut held: VecDeque<(u64, u64, u64)> = VecDeque::new();
            for (take, n) in steps {
                let used = |unit: u64, held: &VecDeque<(u64, u64, u64)>| {
                    held.iter().any(|(first, units, _)| (*first..first + units).contains(&unit))
                };
                let (first, free) = ring.longest_free();
                prop_assert!(first + free <= 16 && (first..first + free).all(|unit| !used(unit, &held)));
                if take {
                    match ring.room(n) {
                        Ok(room) => {
                            prop_assert!(room.unit + n <= 16 && room.taken >= n);
                            prop_assert!((room.unit..room.unit + n).all(|unit| !used(unit, &held)));
                            ring.take(room);
                            held.push_back((room.unit, n, room.taken));
                        }
                        Err(NoRoom::Ever) => prop_assert!(n > 16),
                        Err(NoRoom::Now) => {
                            let behind = held.back().map_or(0, |(first, units, _)| first + units);
                            let fits = |at: u64| at + n <= 16 && (at..at + n).all(|unit| !used(unit, &held));
                            prop_assert!(!fits(behind) || !fits(0) || n == 0, "{:?}", held);
                        }
                    }
                } else if let Some((_, _, taken)) = held.pop_front() {
                    ring.give_back(taken);
                }
            }
        }
    }
}
