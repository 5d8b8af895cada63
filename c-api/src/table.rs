//! The handles of a process.
//!
//! A handle that C holds is a number in the form of a pointer. It is looked up in a table and never followed, so a handle
//! that is closed, of another kind, or no handle at all is found out, whatever it is. Numbers are never used again. They are odd,
//! as the address of no object in C that has an alignment.
//!
//! A call holds the object that it works on by an `Arc`, and an object holds those that it was made with. So the count of an `Arc`
//! says whether something uses the object, and a handle in use can't be closed.
//!
//! A child of `fork` has a table of its own: the parent's lock may be held for ever there by a thread that the child does not have.

use std::any::Any;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use pushgate_driver_shim::fork::{Forked, Owner};

use crate::boundary::{Failure, Result};
use crate::codes::*;

/// A kind of object that C has handles of.
pub(crate) trait Object: Any + Send + Sync {
    /// The type that C's pointer points to. There is no value of it.
    type Handle;
    /// The kind's name in messages.
    const NAME: &'static str;
}

struct Entry {
    name: &'static str,
    object: Arc<dyn Any + Send + Sync>,
}

struct Handles {
    next: usize,
    open: HashMap<usize, Entry>,
}

struct Table {
    owner: Owner,
    /// Lower numbers are handles of processes that this one was forked from.
    first: usize,
    handles: RwLock<Handles>,
}

/// The first handle of a process that was not forked from one with handles.
const FIRST: usize = 0x1001;
/// The numbers that a child leaves out. What its parent gave between the fork and now lies among them, and means nothing here.
const GAP: usize = 1 << 40;

static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());

/// This process's table, made at the first call.
fn table() -> &'static Table {
    // Acquire: pairs with the release below, so the table is whole.
    let mut at = TABLE.load(Ordering::Acquire);
    loop {
        // SAFETY: the pointer is null or one that was stored below, of a table that is never freed.
        let found = unsafe { at.as_ref() };
        if let Some(table) = found.filter(|table| table.owner.is_here()) {
            return table;
        }
        // A table of the parent's is left as it is, with what is in it: drops of its objects would do nothing here.
        let first = found.map_or(FIRST, |parents| parents.first + GAP);
        let handles = RwLock::new(Handles { next: first, open: HashMap::new() });
        let new = Box::into_raw(Box::new(Table { owner: Owner::here(), first, handles }));
        match TABLE.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => at = new,
            Err(other) => {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                at = other;
            }
        }
    }
}

/// Gives an object a handle.
pub(crate) fn open<T: Object>(object: T) -> *mut T::Handle {
    let mut handles = table().handles.write().unwrap_or_else(PoisonError::into_inner);
    let number = handles.next;
    handles.next += 2;
    handles.open.insert(number, Entry { name: T::NAME, object: Arc::new(object) });
    std::ptr::without_provenance_mut(number)
}

/// The object of a handle, for the time of a call or for an object that is made with it.
pub(crate) fn get<T: Object>(handle: *const T::Handle) -> Result<Arc<T>> {
    let table = table();
    let number = handle.addr();
    let handles = table.handles.read().unwrap_or_else(PoisonError::into_inner);
    match handles.open.get(&number) {
        Some(entry) => entry.object.clone().downcast().map_err(|_| wrong::<T>(number, entry.name)),
        None => Err(missing::<T>(table, number)),
    }
}

/// Closes a handle, and drops its object before the call returns. NULL is no error.
pub(crate) fn close<T: Object>(handle: *const T::Handle) -> Result<()> {
    close_if::<T>(handle, |_| Ok(()))
}

/// Closes a handle once `may` has said yes about its object, which nothing else uses then.
pub(crate) fn close_if<T: Object>(
    handle: *const T::Handle,
    may: impl FnOnce(&T) -> Result<()>,
) -> Result<()> {
    if handle.is_null() {
        return Ok(());
    }
    let table = table();
    let number = handle.addr();
    let mut handles = table.handles.write().unwrap_or_else(PoisonError::into_inner);
    let Some(entry) = handles.open.remove(&number) else { return Err(missing::<T>(table, number)) };
    let Entry { name, object } = entry;
    let mut object = match object.downcast::<T>() {
        Ok(object) => object,
        Err(object) => {
            handles.open.insert(number, Entry { name, object });
            return Err(wrong::<T>(number, name));
        }
    };
    let is_free = Arc::get_mut(&mut object).is_some();
    if !is_free {
        let mut others: Vec<_> = handles.open.iter().map(|(number, other)| (*number, other.name)).collect();
        others.sort_unstable();
        let others: Vec<_> =
            others.iter().rev().take(8).map(|(number, name)| format!("{name} {number:#x}")).collect();
        handles.open.insert(number, Entry { name, object });
        let open = match others.is_empty() {
            true => String::new(),
            false => format!(" (the last ones that are open: {})", others.join(", ")),
        };
        let why = format!(
            "is in use: close what was made with it{open}, and let calls of other threads end, before it"
        );
        return Err(Failure::new(PUSHGATE_E_BUSY, format!("the {name} {number:#x} {why}")));
    }
    // Without the lock: what follows may wait for a device or a peer. Other calls find the handle closed meanwhile.
    drop(handles);
    if let Err(refused) = may(&object) {
        let mut handles = table.handles.write().unwrap_or_else(PoisonError::into_inner);
        handles.open.insert(number, Entry { name, object });
        return Err(refused);
    }
    drop(object);
    Ok(())
}

fn wrong<T: Object>(number: usize, name: &str) -> Failure {
    Failure::new(PUSHGATE_E_HANDLE, format!("{number:#x} is a {name}, expected a {}", T::NAME))
}

fn missing<T: Object>(table: &Table, number: usize) -> Failure {
    if number == 0 {
        return Failure::new(PUSHGATE_E_HANDLE, format!("NULL, expected a {}", T::NAME));
    }
    if number < table.first && number % 2 == 1 && number >= FIRST {
        return Failure::new(PUSHGATE_E_FORKED, Forked.to_string());
    }
    let why = "it was closed, or no call has returned it";
    Failure::new(PUSHGATE_E_HANDLE, format!("{number:#x} is no {}: {why}", T::NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Cup(#[allow(dead_code)] Arc<()>);
    struct Spoon(#[allow(dead_code)] Arc<Cup>);
    struct cup;
    struct spoon;

    impl Object for Cup {
        type Handle = cup;
        const NAME: &'static str = "cup";
    }

    impl Object for Spoon {
        type Handle = spoon;
        const NAME: &'static str = "spoon";
    }

    fn refused<T>(done: Result<T>, code: i32, says: &str) {
        let failed = done.err().expect("it is refused");
        assert!(failed.code == code && failed.message.contains(says), "{failed:?}");
    }

    #[test]
    fn a_handle_that_is_closed_null_foreign_or_of_another_kind_is_refused() {
        let one = open(Cup(Arc::default()));
        get::<Cup>(one).unwrap();
        refused(get::<Spoon>(one.cast()), PUSHGATE_E_HANDLE, "is a cup, expected a spoon");
        refused(close::<Spoon>(one.cast()), PUSHGATE_E_HANDLE, "is a cup, expected a spoon");
        close::<Cup>(one).unwrap();
        refused(get::<Cup>(one), PUSHGATE_E_HANDLE, "it was closed");
        refused(close::<Cup>(one), PUSHGATE_E_HANDLE, "it was closed");
        refused(get::<Cup>(null_mut()), PUSHGATE_E_HANDLE, "NULL, expected a cup");
        let on_the_stack = cup;
        refused(get::<Cup>(&on_the_stack), PUSHGATE_E_HANDLE, "no call has returned it");
        close::<Cup>(null_mut()).unwrap();
        assert_ne!(open(Cup(Arc::default())), one, "a number is never used again");
    }

    #[test]
    fn a_handle_in_use_stays_open_until_its_last_user_is_gone() {
        let inside = Arc::new(());
        let under = open(Cup(inside.clone()));
        let over = open(Spoon(get::<Cup>(under).unwrap()));
        refused(close::<Cup>(under), PUSHGATE_E_BUSY, "close what was made with it");
        let in_a_call = get::<Spoon>(over).unwrap();
        refused(close::<Spoon>(over), PUSHGATE_E_BUSY, "the spoon");
        drop(in_a_call);
        close::<Spoon>(over).unwrap();
        assert_eq!(Arc::strong_count(&inside), 2);
        close::<Cup>(under).unwrap();
        assert_eq!(Arc::strong_count(&inside), 1, "the object is gone when the call returns");
    }

    #[test]
    fn an_object_that_may_not_be_closed_yet_keeps_its_handle() {
        let one = open(Cup(Arc::default()));
        let busy = |_: &Cup| Err(Failure::new(PUSHGATE_E_BUSY, "copies are under way"));
        refused(close_if::<Cup>(one, busy), PUSHGATE_E_BUSY, "copies");
        get::<Cup>(one).unwrap();
        close::<Cup>(one).unwrap();
    }

    #[test]
    fn threads_that_open_and_close_do_not_meet() {
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..1000 {
                        let one = open(Cup(Arc::default()));
                        get::<Cup>(one).unwrap();
                        close::<Cup>(one).unwrap();
                        assert!(get::<Cup>(one).is_err());
                    }
                });
            }
        });
    }
}
