//! Memory that NCCL has registered with a coll comm. A memory's number is its place in the order of registrations, which
//! is the same on all ranks.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Code, Failure, Result};

/// A registered memory.
#[derive(Debug)]
pub struct Memory {
    /// The memory's number.
    pub number: u32,
    /// The address of the first byte; the GPU's if `cuda`.
    pub address: usize,
    /// The memory's size, bytes.
    pub bytes: usize,
    /// The memory belongs to the lane's GPU.
    pub cuda: bool,
    /// Nobody but this plugin writes to signals in the memory, once it is registered.
    pub kept: bool,
}

impl Memory {
    /// The address of `length` bytes at `offset`, if they lie in the memory.
    pub fn address_of(&self, offset: u64, length: u64) -> Option<usize> {
        let end = offset.checked_add(length)?;
        (end <= self.bytes as u64).then(|| self.address + offset as usize)
    }

    /// The address of a stretch ([`Memory::address_of`]), or the error for NCCL.
    pub fn stretch(&self, offset: u64, length: u64) -> Result<usize> {
        self.address_of(offset, length).ok_or_else(|| {
            let text = format!(
                "{length} bytes at offset {offset} leave their registration of {} bytes at {:#x}",
                self.bytes, self.address
            );
            Failure::new(Code::Usage, text)
        })
    }

    /// The address of a signal at `offset`: 8 aligned bytes in the memory.
    pub fn signal(&self, offset: u64) -> Result<usize, String> {
        match self.address_of(offset, 8) {
            Some(address) if address.is_multiple_of(8) => Ok(address),
            Some(address) => Err(format!("a signal at {address:#x}, which is no multiple of 8")),
            None => Err(format!("a signal at offset {offset} of a registration of {} bytes", self.bytes)),
        }
    }
}

/// What a number names.
pub enum Found {
    /// A memory.
    Here(Arc<Memory>),
    /// This rank has not registered a memory of this number yet.
    NotYet,
    /// The memory was deregistered.
    Gone,
}

/// The memories of a coll comm. NCCL registers on one thread while another one makes progress.
#[derive(Default)]
pub struct Memories(Mutex<Vec<Option<Arc<Memory>>>>);

impl Memories {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Memory>>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers a memory, which gets the next number.
    pub fn add(&self, address: usize, bytes: usize, cuda: bool, kept: bool) -> Arc<Memory> {
        let mut all = self.lock();
        let number = u32::try_from(all.len()).expect("fewer than 2^32 registrations");
        let memory = Arc::new(Memory { number, address, bytes, cuda, kept });
        all.push(Some(memory.clone()));
        memory
    }

    /// What `number` names.
    pub fn find(&self, number: u32) -> Found {
        match self.lock().get(number as usize) {
            None => Found::NotYet,
            Some(None) => Found::Gone,
            Some(Some(memory)) => Found::Here(memory.clone()),
        }
    }

    /// Forgets a memory. False if it was forgotten before.
    pub fn remove(&self, memory: &Memory) -> bool {
        self.lock()[memory.number as usize].take().is_some()
    }
}

/// Bytes of registered memory.
#[derive(Clone, Copy)]
pub struct Stretch<'a> {
    pub memory: &'a Arc<Memory>,
    pub offset: u64,
}

/// A signal of the other rank, and what is added to it.
#[derive(Clone, Copy)]
pub struct Signal<'a> {
    pub at: Stretch<'a>,
    pub value: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_only_stretches_of_a_memory_have_an_address() {
        let memories = Memories::default();
        let memory = memories.add(0x1000, 100, false, false);
        assert_eq!((memory.address_of(0, 100), memory.address_of(100, 0)), (Some(0x1000), Some(0x1064)));
        for (offset, length) in [(0, 101), (1, 100), (101, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(memory.address_of(offset, length), None, "{offset} {length}");
        }
        assert_eq!(memory.signal(88), Ok(0x1058));
        assert!(memory.signal(93).is_err() && memory.signal(84).is_err() && memory.signal(96).is_err());
    }

    #[test]
    fn a_number_is_never_given_twice() {
        let memories = Memories::default();
        let first = memories.add(0x1000, 8, false, false);
        assert!(matches!(memories.find(0), Found::Here(_)) && matches!(memories.find(1), Found::NotYet));
        assert!(memories.remove(&first) && !memories.remove(&first));
        assert!(matches!(memories.find(0), Found::Gone));
        assert_eq!(memories.add(0x1000, 8, false, false).number, 1);
    }
}
