//! The requests of a coll comm: what NCCL waits for. NCCL holds each as a number in place of a pointer, so a wrong one is
//! refused and never followed.

use std::sync::Arc;

use super::memory::Memory;
use crate::error::{Code, Failure, Result};

/// A request, as NCCL holds it. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// Why operations failed: for each of them, and for each later one.
#[derive(Clone, Debug)]
pub struct Cause {
    pub code: Code,
    pub text: Arc<str>,
}

impl Cause {
    /// The failure of a call.
    pub fn failure(&self) -> Failure {
        Failure::new(self.code, self.text.to_string())
    }
}

impl From<Failure> for Cause {
    fn from(failure: Failure) -> Self {
        Cause { code: failure.code, text: failure.text.into() }
    }
}

/// What an operation is counted against: a place among the counts of its contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The contexts' number.
    pub contexts: u32,
    /// The place.
    pub place: u32,
}

/// A get that is under way: where its bytes belong.
pub struct Get {
    pub memory: Arc<Memory>,
    pub offset: u64,
    pub bytes: u64,
    /// Bytes that have arrived.
    pub arrived: u64,
    /// The rank that sends them.
    pub from: u32,
}

enum State {
    Free,
    Waiting(Option<Get>),
    Done,
    Failed(Cause),
}

struct Slot {
    /// How often the place was used before, so that the handle of an earlier use is refused.
    uses: u32,
    counted: Counted,
    state: State,
}

/// Places for requests, which are reused.
#[derive(Default)]
pub struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests so far that are done or have failed.
    ended: u64,
}

impl Requests {
    /// A new request, which waits.
    pub fn add(&mut self, counted: Counted, get: Option<Get>) -> Handle {
        let state = State::Waiting(get);
        let index = match self.free.pop() {
            Some(index) => {
                let slot = &mut self.slots[index as usize];
                (slot.counted, slot.state) = (counted, state);
                index
            }
            None => {
                self.slots.push(Slot { uses: 0, counted, state });
                self.slots.len() as u32 - 1
            }
        };
        Handle(u64::from(self.slots[index as usize].uses) << 32 | (u64::from(index) + 1))
    }

    fn index(&self, Handle(handle): Handle) -> Option<usize> {
        let index = (handle as u32).checked_sub(1)? as usize;
        let slot = self.slots.get(index)?;
        let live = slot.uses == (handle >> 32) as u32 && !matches!(slot.state, State::Free);
        live.then_some(index)
    }

    fn set(&mut self, handle: Handle, state: State) {
        if let Some(index) = self.index(handle)
            && let State::Waiting(_) = self.slots[index].state
        {
            self.slots[index].state = state;
            self.ended += 1;
        }
    }

    /// How many requests were done or have failed so far.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// How many requests are neither done nor failed.
    pub fn waiting(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot.state, State::Waiting(_))).count()
    }

    /// The operation is done.
    pub fn done(&mut self, handle: Handle) {
        self.set(handle, State::Done);
    }

    /// The operation has failed.
    pub fn fail(&mut self, handle: Handle, cause: &Cause) {
        self.set(handle, State::Failed(cause.clone()));
    }

    /// All gets from this rank have failed. Returns whether there were any.
    pub fn fail_gets(&mut self, from: u32, cause: &Cause) -> bool {
        let mut any = false;
        for slot in &mut self.slots {
            if matches!(&slot.state, State::Waiting(Some(get)) if get.from == from) {
                slot.state = State::Failed(cause.clone());
                any = true;
            }
        }
        any
    }

    /// All gets into this memory have failed.
    pub fn fail_gets_into(&mut self, memory: &Arc<Memory>, cause: &Cause) {
        for slot in &mut self.slots {
            if matches!(&slot.state, State::Waiting(Some(get)) if Arc::ptr_eq(&get.memory, memory)) {
                slot.state = State::Failed(cause.clone());
            }
        }
    }

    /// Everything that waits has failed.
    pub fn fail_all(&mut self, cause: &Cause) {
        for slot in &mut self.slots {
            if let State::Waiting(_) = slot.state {
                slot.state = State::Failed(cause.clone());
            }
        }
    }

    /// The get that a handle names, if it is under way.
    pub fn get(&mut self, handle: Handle) -> Option<&mut Get> {
        let index = self.index(handle)?;
        match &mut self.slots[index].state {
            State::Waiting(get) => get.as_mut(),
            _ => None,
        }
    }

    /// Bytes of a get are in place. The get is done with its last one.
    pub fn arrived(&mut self, handle: Handle, bytes: u64) {
        if let Some(get) = self.get(handle) {
            get.arrived += bytes;
            if get.arrived >= get.bytes {
                self.done(handle);
            }
        }
    }

    /// How many requests NCCL has not seen the end of.
    pub fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether a request is done. Once it is, or has failed, the handle names nothing more, and the second value is what the
    /// operation was counted against.
    pub fn test(&mut self, handle: Handle) -> Result<(bool, Option<Counted>), (Failure, Option<Counted>)> {
        let Some(index) = self.index(handle) else {
            let text =
                format!("test of request {:#x}, which is done already or was never handed out", handle.0);
            return Err((Failure::new(Code::Argument, text), None));
        };
        let slot = &mut self.slots[index];
        let answer = match &slot.state {
            State::Waiting(_) => return Ok((false, None)),
            State::Done => Ok((true, Some(slot.counted))),
            State::Failed(cause) => Err((cause.failure(), Some(slot.counted))),
            State::Free => unreachable!("`index` finds none that is free"),
        };
        slot.state = State::Free;
        slot.uses = slot.uses.wrapping_add(1);
        self.free.push(index as u32);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTED: Counted = Counted { contexts: 1, place: 2 };

    #[test]
    fn a_request_is_tested_until_it_is_done_and_not_again() {
        let mut requests = Requests::default();
        let [a, b] = [0; 2].map(|_| requests.add(COUNTED, None));
        assert_eq!(requests.test(a).unwrap(), (false, None));
        requests.done(a);
        assert_eq!(requests.test(a).unwrap(), (true, Some(COUNTED)));
        assert_eq!(requests.test(a).unwrap_err().0.code, Code::Argument);
        // The place is used again under another handle.
        let c = requests.add(COUNTED, None);
        assert!(c != a && requests.test(a).is_err());
        let cause = Cause { code: Code::Remote, text: "gone".into() };
        requests.fail_all(&cause);
        requests.done(b);
        for handle in [b, c] {
            let (failure, counted) = requests.test(handle).unwrap_err();
            assert_eq!((failure.code, counted), (Code::Remote, Some(COUNTED)));
        }
        assert_eq!(requests.count(), 0);
        for wrong in [0, 3, u64::MAX, 1 << 32] {
            assert!(requests.test(Handle(wrong)).is_err(), "{wrong:#x}");
        }
    }

    #[test]
    fn a_get_is_done_with_its_last_byte_and_fails_with_its_rank_alone() {
        let memory = super::super::memory::Memories::default().add(0x1000, 100, false, false);
        let mut requests = Requests::default();
        let [a, b] = [1, 2].map(|from| {
            requests
                .add(COUNTED, Some(Get { memory: memory.clone(), offset: 0, bytes: 100, arrived: 0, from }))
        });
        requests.arrived(a, 60);
        assert!(!requests.test(a).unwrap().0);
        let cause = Cause { code: Code::Remote, text: "gone".into() };
        assert_eq!([2, 2].map(|rank| requests.fail_gets(rank, &cause)), [true, false]);
        assert!(requests.test(b).is_err() && requests.get(b).is_none());
        requests.arrived(a, 40);
        assert!(requests.test(a).unwrap().0);
    }
}
