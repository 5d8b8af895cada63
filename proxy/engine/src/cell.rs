//! A few words that one writer replaces, and that any reader copies whole or not at all: what the flight recorder
//! (`recorder`) is made of.
//!
//! A cell is a mark and the words behind it. The mark is 0 before the first store, odd while a store is under way, and even
//! after it. The writer never waits. A reader that meets a store under way gets nothing; it never waits either, for the
//! writer may have been stopped in the middle of a store for good.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Replaces the words of a cell by those of its `number`th store, from 0. The cell has one writer, whose numbers grow.
///
/// The order: the odd mark, then the words, then the even mark. The release fence keeps the words after the odd mark, the
/// release store keeps the even mark after the words.
pub(crate) fn store<const N: usize>(cell: &[AtomicU64], number: u64, words: &[u64; N]) {
    let (mark, places) = (&cell[0], &cell[1..=N]);
    // Relaxed: the fence after it is what orders it.
    mark.store(2 * number + 1, Ordering::Relaxed);
    fence(Ordering::Release);
    for (place, word) in places.iter().zip(words) {
        place.store(*word, Ordering::Relaxed);
    }
    mark.store(2 * number + 2, Ordering::Release);
}

/// A copy of a cell's words and the number of the store that they are of. `None` if nothing was stored, or if a store is
/// under way or came in between.
///
/// Why the copy is whole: the mark was even before the copy, so the store that it names had ended, and the first fence
/// makes that store's words, or later ones, visible to the copy. If the copy took a word of a later store, that word was
/// stored after the later store's odd mark and release fence, and the second fence stands after the load of the word: so
/// the second load of the mark sees the odd mark or one after it, and the marks differ.
///
/// Fences and relaxed loads, because the cell may lie on pages that are mapped read-only, where Rust promises relaxed loads
/// alone.
pub(crate) fn load<const N: usize>(cell: &[AtomicU64]) -> Option<(u64, [u64; N])> {
    let (mark, places) = (&cell[0], &cell[1..=N]);
    let before = mark.load(Ordering::Relaxed);
    if before == 0 || !before.is_multiple_of(2) {
        return None;
    }
    fence(Ordering::Acquire);
    let words = std::array::from_fn(|i| places[i].load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    (mark.load(Ordering::Relaxed) == before).then_some((before / 2 - 1, words))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn cell() -> Vec<AtomicU64> {
        (0..4).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_cell_holds_its_last_store() {
        let cell = cell();
        assert_eq!(load::<3>(&cell), None);
        for number in 0..5 {
            store(&cell, number, &[number, 10 + number, 20 + number]);
            assert_eq!(load::<3>(&cell), Some((number, [number, 10 + number, 20 + number])));
        }
    }

    #[test]
    fn a_store_that_was_never_ended_is_nothing() {
        let cell = cell();
        store(&cell, 0, &[1, 2, 3]);
        cell[0].store(3, Ordering::Relaxed);
        cell[1].store(9, Ordering::Relaxed);
        assert_eq!(load::<3>(&cell), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// However two stores and a copy interleave, and in whatever order the words become visible, the copy is of one store.
    #[test]
    fn a_copy_is_of_one_store() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let cell: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
            let theirs = cell.clone();
            let writer = thread::spawn(move || {
                for number in 0..2 {
                    store(&theirs, number, &[100 + number, 200 + number]);
                }
            });
            if let Some((number, words)) = load::<2>(&cell) {
                assert_eq!(words, [100 + number, 200 + number]);
            }
            writer.join().unwrap();
            assert_eq!(load::<2>(&cell), Some((1, [101, 201])));
        });
    }
}
