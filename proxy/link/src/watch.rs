//! Words that tell whether a queue pair in which nothing moves has something to do again. A pass over a queue pair reads some
//! twenty cache lines, one after the other; a look at its [`Watch`] reads four, independent of each other and of those of
//! the queue pairs after it. So an engine with a thousand idle queue pairs looks at their words alone.
//!
//! A watch is a hint: an engine that finds a change makes a pass, which reads the words anew and in their orders. A change that is
//! missed for ever would be a wait without an end, so a queue pair is watched only where nothing but these words, a command
//! or the time can give it something to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::memory::Mapping;

/// The most words of a watch: a work segment's head, CONSUMED and next posted receive; a link segment's next record and
/// three counts.
const WORDS: usize = 7;
/// The most mappings that they lie in.
const MAPPINGS: usize = 2;

/// Shared words with the values that they had when they were added. Empty: nothing is watched.
#[derive(Default)]
pub struct Watch {
    seen: [Option<(&'static AtomicU64, u64)>; WORDS],
    keep: [Option<Mapping>; MAPPINGS],
    words: usize,
}

impl Watch {
    /// Adds a word that lies in a mapping; returns its value. False in the second place: there is no room.
    pub(crate) fn add(&mut self, word: &'static AtomicU64, keep: &Mapping) -> (u64, bool) {
        // Relaxed: the value is compared with later ones and with nothing else.
        let value = word.load(Ordering::Relaxed);
        let is_it = |kept: &Option<Mapping>| kept.as_ref().is_none_or(|kept| Arc::ptr_eq(kept, keep));
        let (Some(kept), true) = (self.keep.iter_mut().find(|kept| is_it(kept)), self.words < WORDS) else {
            return (value, false);
        };
        kept.get_or_insert_with(|| keep.clone());
        self.seen[self.words] = Some((word, value));
        self.words += 1;
        (value, true)
    }

    /// Watches nothing any more.
    pub fn clear(&mut self) {
        if self.words > 0 {
            *self = Watch::default();
        }
    }

    /// Whether there are words, and none has changed.
    #[inline(always)]
    pub fn is_quiet(&self) -> bool {
        // Relaxed: the pass that follows a change orders what it reads.
        let seen = self.seen[..self.words].iter().flatten();
        self.words > 0 && seen.fold(0, |all, (word, value)| all | (word.load(Ordering::Relaxed) ^ value)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Mapped, Words};

    fn words() -> Words {
        Words::writable(Mapped::heap(4096), 64, 8)
    }

    #[test]
    fn a_watch_is_quiet_until_one_of_its_words_changes() {
        let (words, mut watch) = (words(), Watch::default());
        assert!(!watch.is_quiet(), "an empty watch says nothing");
        words[1].store(7, Ordering::Relaxed);
        assert_eq!([0, 1].map(|i| words.watch(i, &mut watch)), [(0, true), (7, true)]);
        assert!(watch.is_quiet());
        words[2].store(1, Ordering::Relaxed);
        assert!(watch.is_quiet(), "that word is not watched");
        words[1].store(8, Ordering::Relaxed);
        assert!(!watch.is_quiet());
        words[1].store(7, Ordering::Relaxed);
        assert!(watch.is_quiet());
        watch.clear();
        assert!(!watch.is_quiet());
    }

    #[test]
    fn a_watch_keeps_the_memory_of_its_words() {
        let mut watch = Watch::default();
        words().watch(0, &mut watch);
        // Under a checker of memory a word that was freed would show here.
        assert!(watch.is_quiet());
    }

    #[test]
    fn a_word_for_which_a_watch_has_no_room_is_refused() {
        let (all, mut watch) = (words(), Watch::default());
        assert!((0..WORDS).all(|i| all.watch(i, &mut watch).1));
        assert!(!all.watch(WORDS, &mut watch).1);
        let mut watch = Watch::default();
        assert!((0..MAPPINGS).all(|_| words().watch(0, &mut watch).1));
        assert!(!words().watch(0, &mut watch).1, "a third mapping");
    }
}
