//! What happens to handles in a child of `fork`.
//!
//! A child inherits a copy of every handle, but none of the threads that the handles rely on. So a
//! handle remembers which process made it. In any other process its calls fail with [`Forked`], and
//! dropping it does nothing.
//!
//! The check costs two loads and no system call. The process's number stands in a page that the
//! kernel gives to a child zeroed (`MADV_WIPEONFORK`), however the child was made.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memmap2::MmapRaw;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::abi::PUSHGATE_PAGE;

/// The error of a call on a handle that another process made, from which this one was forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this process was forked from the one that opened the context, whose handles do not work here: open a new \
     context in the child, or start children with spawn (fork and exec) instead of fork"
)]
pub struct Forked;

/// The process that made a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u64);

impl Owner {
    /// Names this process.
    pub fn here() -> Owner {
        Owner(this_process())
    }

    /// True in the process that made this value, and false in its children. Makes no system call.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == this_process()
    }

    /// Fails with [`Forked`] in any process but the one that made this value. Makes no system call.
    #[inline]
    pub fn check(self) -> Result<(), Forked> {
        if self.is_here() { Ok(()) } else { Err(Forked) }
    }
}

/// The word that is zeroed in a child; null until it is first needed.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
/// How many numbers have been given to processes, in this process and its ancestors: a child goes
/// on from its parent's count, so its number is different from all of theirs.
static GIVEN: AtomicU64 = AtomicU64::new(0);

#[inline]
fn this_process() -> u64 {
    // Acquire: the page was mapped and advised before the pointer to it was stored.
    let word = WORD.load(Ordering::Acquire);
    if !word.is_null() {
        // SAFETY: the pointer is stored below, to a page that is never unmapped afterwards; a child
        // has the page too, zeroed.
        let number = unsafe { &*word }.load(Ordering::Relaxed);
        if number != 0 {
            return number;
        }
    }
    number_this_process()
}

/// Gives this process its number, on the first call.
#[cold]
fn number_this_process() -> u64 {
    let mut word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        let new = wiped_word();
        // Release: pairs with the acquire in `this_process`. No lock, because a fork may come at
        // any moment.
        word = match WORD.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(first) => {
                if new != plain_word() {
                    // SAFETY: mapped a moment ago, and no other thread has seen it.
                    let _ = unsafe { munmap(new.cast(), PUSHGATE_PAGE as usize) };
                }
                first
            }
        };
    }
    // Relaxed, here and below: the numbers are only compared and publish no other memory.
    let number = GIVEN.fetch_add(1, Ordering::Relaxed) + 1;
    // SAFETY: the page is mapped and never unmapped, as in `this_process`.
    let word = unsafe { &*word };
    word.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed)
        .map_or_else(|first| first, |_| number)
}

/// Makes a word in a page of its own that is zeroed in a child. Where the kernel lacks such pages
/// (before Linux 4.14), a word in ordinary memory: a fork is not noticed there.
fn wiped_word() -> *mut AtomicU64 {
    let bytes = PUSHGATE_PAGE as usize;
    // SAFETY: the kernel chooses the place, so no memory of ours is affected.
    let mapped =
        unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    let Ok(page) = mapped else { return plain_word() };
    // SAFETY: the range is the mapping just made, which holds zeroes.
    match unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) } {
        Ok(()) => page.cast(),
        Err(_) => {
            // SAFETY: mapped above, and no other thread has seen it.
            let _ = unsafe { munmap(page, bytes) };
            plain_word()
        }
    }
}

fn plain_word() -> *mut AtomicU64 {
    static PLAIN: AtomicU64 = AtomicU64::new(0);
    (&raw const PLAIN).cast_mut()
}

/// A value that is dropped only in the process that made it.
///
/// In a child the value is leaked. Its drop would act on things of the parent's (queue pairs,
/// sockets, memory at addresses that now belong to something else), or wait for a thread that the
/// child does not have.
#[derive(Debug)]
pub struct OwnedHere<T> {
    value: ManuallyDrop<T>,
    owner: Owner,
}

impl<T> OwnedHere<T> {
    /// Wraps a value that belongs to this process.
    pub fn new(value: T) -> Self {
        OwnedHere { value: ManuallyDrop::new(value), owner: Owner::here() }
    }

    /// The process that made the value.
    #[inline]
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// The value, or [`Forked`] in a child.
    #[inline]
    pub fn here(&self) -> Result<&T, Forked> {
        self.owner.check().map(|()| &*self.value)
    }
}

impl<T> Deref for OwnedHere<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for OwnedHere<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for OwnedHere<T> {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

/// Keeps a shared mapping out of children: a child that stored to it would change what the parent's
/// devices and peers read (P1, P2).
pub(crate) fn keep_from_children(map: &MmapRaw) -> io::Result<()> {
    // SAFETY: the range is the mapping that `map` owns, and the advice changes no byte of it.
    Ok(unsafe { madvise(map.as_mut_ptr().cast(), map.len(), Advice::LinuxDontFork) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn a_handle_is_of_the_process_that_made_it_on_every_thread() {
        let owner = Owner::here();
        assert!(owner.is_here());
        assert_eq!(owner.check(), Ok(()));
        let others: Vec<_> = (0..8).map(|_| std::thread::spawn(Owner::here)).collect();
        for other in others {
            assert_eq!(other.join().unwrap(), owner);
        }
        assert_eq!(Owner(owner.0 + 1).check(), Err(Forked));
    }

    #[test]
    fn a_value_is_dropped_where_it_was_made_and_leaked_elsewhere() {
        let value = Rc::new(());
        drop(OwnedHere::new(value.clone()));
        assert_eq!(Rc::strong_count(&value), 1);
        let mut elsewhere = OwnedHere::new(value.clone());
        elsewhere.owner = Owner(u64::MAX);
        assert_eq!(elsewhere.here(), Err(Forked));
        drop(elsewhere);
        assert_eq!(Rc::strong_count(&value), 2);
    }
}
