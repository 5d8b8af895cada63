//! Values that are made once for all who want them at the same time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A value as long as somebody has it. Locked by who makes it.
type Slot<V> = Arc<Mutex<Weak<V>>>;

/// Values by what they are of. Each lives as long as somebody has it, and is made anew after that.
pub(super) struct Once<K, V>(Mutex<Slots<K, V>>);

struct Slots<K, V> {
    slots: HashMap<K, Slot<V>>,
    /// From this number on those whose value nobody has are taken out.
    many: usize,
}

impl<K, V> Default for Once<K, V> {
    fn default() -> Self {
        Once(Mutex::new(Slots { slots: HashMap::new(), many: 16 }))
    }
}

impl<K: Eq + Hash, V> Once<K, V> {
    /// The value that somebody has, or else what `make` makes, which may be nothing. Waits while another thread makes it.
    pub(super) fn get<E>(
        &self,
        of: K,
        make: impl FnOnce() -> Result<Option<V>, E>,
    ) -> Result<Option<Arc<V>>, E> {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner).slot(of);
        let mut there = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = there.upgrade() {
            return Ok(Some(value));
        }
        let made = make()?.map(Arc::new);
        *there = made.as_ref().map_or_else(Weak::new, Arc::downgrade);
        Ok(made)
    }
}

impl<K: Eq + Hash, V> Slots<K, V> {
    fn slot(&mut self, of: K) -> Slot<V> {
        if self.slots.len() >= self.many {
            // A value that is just being made is in use.
            self.slots.retain(|_, slot| slot.try_lock().map_or(true, |value| value.strong_count() > 0));
            self.many = 2 * self.slots.len() + 16;
        }
        self.slots.entry(of).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_again_after_the_last_owner_has_dropped_it() {
        let once = Once::default();
        let mut made = 0;
        let mut get = |of: u32| {
            let value = once.get(of, || {
                made += 1;
                Ok::<_, ()>((of != 9).then_some(made))
            });
            value.unwrap()
        };
        let (a, b) = (get(1).unwrap(), get(1).unwrap());
        assert_eq!((*a, *b, *get(2).unwrap()), (1, 1, 2));
        drop(a);
        assert_eq!(*get(1).unwrap(), 1);
        drop(b);
        assert_eq!(*get(1).unwrap(), 3);
        assert_eq!((get(9), get(9)), (None, None));
        let failed: Result<Option<Arc<i32>>, _> = once.get(7, || Err("no"));
        assert_eq!(failed, Err("no"));
    }

    #[test]
    fn places_whose_values_are_gone_are_not_kept_for_ever() {
        let once = Once::<u32, u32>::default();
        let kept = once.get(0, || Ok::<_, ()>(Some(0))).unwrap();
        (1..10_000).for_each(|of| drop(once.get(of, || Ok::<_, ()>(Some(of)))));
        assert!(once.0.lock().unwrap().slots.len() < 64);
        assert!(Arc::ptr_eq(&kept.unwrap(), &once.get(0, || Err(())).unwrap().unwrap()));
    }

    #[test]
    fn two_threads_that_want_a_value_at_once_have_one() {
        let (once, made) = (Once::default(), Mutex::new(0));
        let get = || {
            once.get(5, || {
                *made.lock().unwrap() += 1;
                std::thread::sleep(std::time::Duration::from_millis(20));
                Ok::<_, ()>(Some(5))
            })
        };
        let both = std::thread::scope(|s| [s.spawn(get), s.spawn(get)].map(|t| t.join().unwrap().unwrap()));
        assert!(Arc::ptr_eq(both[0].as_ref().unwrap(), both[1].as_ref().unwrap()));
        assert_eq!(*made.lock().unwrap(), 1);
    }
}
