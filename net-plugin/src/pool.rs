//! The requests of a connection that are under way.

use crate::error::{Code, Failure, Result};
use crate::ffi::types::MAX_RECVS;

/// The most requests of a connection: NCCL's 32 for each buffer of a receive.
pub const REQUESTS: usize = 32 * MAX_RECVS;

/// Fixed places for requests.
pub struct Pool<T> {
    slots: Box<[Option<T>]>,
    free: Vec<u32>,
}

impl<T> Pool<T> {
    pub fn new() -> Self {
        let n = REQUESTS as u32;
        Pool { slots: (0..n).map(|_| None).collect(), free: (0..n).rev().collect() }
    }

    /// A free place, if there is one.
    #[inline]
    pub fn free(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Fills the place that `free` returned.
    #[inline]
    pub fn fill(&mut self, value: T) {
        let i = self.free.pop().expect("`free` named it");
        self.slots[i as usize] = Some(value);
    }

    /// Frees a place whose request is done.
    #[inline]
    pub fn empty(&mut self, i: u32) {
        self.slots[i as usize] = None;
        self.free.push(i);
    }

    /// The request at a place; fails if there is none.
    #[inline]
    pub fn get(&mut self, i: u32) -> Result<&mut T> {
        self.slots[i as usize].as_mut().ok_or_else(|| {
            Failure::new(Code::Argument, "test of a request that is done already, or was never handed out")
        })
    }
}
