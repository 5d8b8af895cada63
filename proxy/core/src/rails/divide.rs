//! Where a message is cut: stripes whose lengths let all rails end at the same time, as far as their speeds are known.

use super::MOST_RAILS;

/// Stripes begin at multiples of this in the payload, bytes: a unit of the window.
const UNIT: u128 = 64;

/// What is known of a rail that takes stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Bytes that the rail carries in a millisecond, at least 1.
    pub speed: u64,
    /// Bytes that were posted over the rail and that the peer has not taken in.
    pub backlog: u64,
}

impl Load {
    /// Whether `bytes` more end here before they would end on `other`.
    #[inline]
    pub fn ends_before(&self, other: &Load, bytes: u32) -> bool {
        let end = |load: &Load, speed: u64| (load.backlog + bytes as u64) as u128 * speed as u128;
        end(self, other.speed) < end(other, self.speed)
    }
}

/// Cuts `length` bytes: what each rail carries so that all end together, what is on its way counted. A rail whose share
/// would be shorter than `shortest`, a multiple of 64, carries nothing. `None` is a rail that takes nothing. All shares are
/// 0 if no rail takes anything.
pub fn divide(length: u32, loads: &[Option<Load>; MOST_RAILS], shortest: u32) -> [u32; MOST_RAILS] {
    let mut taking = *loads;
    loop {
        let (mut bytes, mut speed, mut count) = (length as u128, 0u128, 0);
        for load in taking.iter().flatten() {
            (bytes, speed, count) = (bytes + load.backlog as u128, speed + load.speed as u128, count + 1);
        }
        if count == 0 {
            return [0; MOST_RAILS];
        }
        // All end after `bytes / speed`, and a rail carries its part of that time less what is on its way.
        let share = taking.map(|load| {
            load.map(|load| (bytes * load.speed as u128 / speed).saturating_sub(load.backlog as u128))
        });
        let each = share.iter().enumerate().filter_map(|(rail, share)| share.map(|share| (share, rail)));
        let (Some(least), Some(most)) = (each.clone().min(), each.max()) else {
            unreachable!("a rail takes")
        };
        if count > 1 && least.0 < shortest.max(1) as u128 {
            taking[least.1] = None;
            continue;
        }
        let mut shares = share.map(|share| (share.unwrap_or(0) / UNIT * UNIT).min(length as u128) as u32);
        shares[most.1] = 0;
        // What rounding leaves goes to the rail that carries most.
        shares[most.1] = length - shares.iter().sum::<u32>();
        return shares;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn load(speed: u64, backlog: u64) -> Option<Load> {
        Some(Load { speed, backlog })
    }

    #[test]
    fn equal_rails_carry_equal_shares_and_a_fast_one_carries_more() {
        assert_eq!(divide(4096, &[load(9, 0), load(9, 0), None, None], 64), [2048, 2048, 0, 0]);
        assert_eq!(divide(4096, &[load(30, 0), load(10, 0), None, None], 64), [3072, 1024, 0, 0]);
        assert_eq!(divide(4096, &[load(10, 4096), load(10, 0), None, None], 64), [0, 4096, 0, 0]);
    }

    #[test]
    fn a_short_message_goes_over_the_rail_that_ends_first() {
        assert_eq!(divide(100, &[load(10, 0), None, load(80, 0), load(20, 0)], 64), [0, 0, 100, 0]);
        assert_eq!(divide(100, &[load(10, 0), None, load(80, 9000), load(20, 0)], 128), [0, 0, 0, 100]);
    }

    #[test]
    fn without_a_rail_nothing_is_cut() {
        assert_eq!(divide(100, &[None; MOST_RAILS], 64), [0; MOST_RAILS]);
    }

    proptest! {
        #[test]
        fn shares_cover_the_message_are_no_shorter_than_allowed_and_end_together(
            length in 0u32..1 << 24,
            rails in prop::array::uniform4(prop::option::of((1u64..1 << 30, 0u64..1 << 26))),
            shortest in (1u32..100).prop_map(|n| 64 * n),
        ) {
            let loads = rails.map(|rail| rail.map(|(speed, backlog)| Load { speed, backlog }));
            let shares = divide(length, &loads, shortest);
            if loads.iter().all(Option::is_none) {
                prop_assert_eq!(shares, [0; MOST_RAILS]);
                return Ok(());
            }
            prop_assert_eq!(shares.iter().map(|s| *s as u64).sum::<u64>(), length as u64);
            let used: Vec<usize> = (0..MOST_RAILS).filter(|rail| shares[*rail] > 0).collect();
            prop_assert!(used.len() <= 1 || used.iter().all(|rail| shares[*rail] >= shortest), "{:?}", shares);
            prop_assert!(used.iter().all(|rail| loads[*rail].is_some()));
            // All that carry something end at the same time, within what rounding moves: 64 bytes for each other rail.
            let end = |rail: usize, more: u64| {
                let load = loads[rail].unwrap();
                (load.backlog + shares[rail] as u64 + more) as f64 / load.speed as f64
            };
            for (a, b) in used.iter().flat_map(|a| used.iter().map(move |b| (*a, *b))) {
                prop_assert!(end(a, 0) <= end(b, 64 * 4) + 1e-9 || shares[a] == shares.into_iter().max().unwrap());
            }
        }
    }
}
