//! What an agent has registered, and what other agents have published of theirs. Keys are never given twice, so what a peer still
//! names after a registration has ended is refused.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::status::{Result, Status};
use crate::wire::Place;

/// A kind of memory, with NIXL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(i32)]
pub enum Memory {
    /// `DRAM_SEG`.
    Host = 0,
    /// `VRAM_SEG`.
    Gpu = 1,
}

impl Memory {
    /// The kind of a value of `nixl_mem_t`.
    pub fn of(value: i32) -> Result<Memory> {
        match value {
            0 => Ok(Memory::Host),
            1 => Ok(Memory::Gpu),
            _ => Err(Status::NotSupported),
        }
    }
}

/// Memory of this process that peers may name.
#[derive(Clone, Debug)]
pub struct Own {
    /// The first byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// What memory it is.
    pub memory: Memory,
    /// The GPU whose memory it is.
    pub device: u32,
    /// Copies of GPUs, and bytes on their way out of it, hold a clone while they use it.
    pub users: Arc<()>,
    /// The connections whose peers may copy into and out of it directly.
    pub leased: HashSet<u64>,
    /// It ends: no new use begins.
    pub ends: bool,
}

/// What an agent publishes of a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Which run of the agent it is of.
    pub instance: String,
    /// The registration.
    pub key: u64,
    /// The first byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// What memory it is.
    pub memory: Memory,
}

/// A registration of another agent, as it was published.
#[derive(Clone, Debug)]
pub struct Theirs {
    /// The agent.
    pub peer: String,
    /// What it published.
    pub published: Published,
}

/// Both tables of an agent.
#[derive(Default)]
pub struct Registrations {
    own: HashMap<u64, Own>,
    theirs: HashMap<u64, Theirs>,
    next: u64,
}

impl Registrations {
    fn key(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Registers memory of this process. Its key.
    pub fn add(&mut self, address: u64, length: u64, memory: Memory, device: u32) -> Result<u64> {
        if length > 0 && address == 0 || address.checked_add(length).is_none() {
            return Err(Status::InvalidParam);
        }
        let key = self.key();
        let (leased, users) = Default::default();
        self.own.insert(key, Own { address, length, memory, device, users, leased, ends: false });
        Ok(key)
    }

    /// A registration of this process.
    pub fn own(&mut self, key: u64) -> Result<&mut Own> {
        self.own.get_mut(&key).ok_or(Status::NotFound)
    }

    /// Ends a registration of this process.
    pub fn remove(&mut self, key: u64) {
        self.own.remove(&key);
    }

    /// Takes all leases of a connection back.
    pub fn unlease(&mut self, session: u64) {
        self.own.values_mut().for_each(|own| _ = own.leased.remove(&session));
    }

    /// Notes what an agent has published. Our number for it.
    pub fn load(&mut self, peer: &str, published: Published) -> u64 {
        let key = self.key();
        self.theirs.insert(key, Theirs { peer: peer.into(), published });
        key
    }

    /// What an agent has published.
    pub fn theirs(&self, key: u64) -> Result<&Theirs> {
        self.theirs.get(&key).ok_or(Status::NotFound)
    }

    /// Forgets it.
    pub fn unload(&mut self, key: u64) -> Result<()> {
        self.theirs.remove(&key).map(drop).ok_or(Status::NotFound)
    }

    /// Checks many places.
    pub fn checker(&self) -> Checker<'_> {
        Checker { all: self, last: None }
    }

    /// The registration of this process that the bytes lie in, if it lives.
    pub fn check(&self, place: &Place) -> Result<&Own> {
        let own = self.own.get(&place.key).filter(|own| !own.ends).ok_or(Status::NotFound)?;
        covers((own.address, own.length), place).map(|()| own)
    }
}

/// Checks places one after the other; neighbours are mostly of one registration.
pub struct Checker<'a> {
    all: &'a Registrations,
    last: Option<(u64, &'a Own)>,
}

impl<'a> Checker<'a> {
    /// The registration of this process that the bytes lie in, if it lives.
    pub fn check(&mut self, place: &Place) -> Result<&'a Own> {
        match self.last {
            Some((key, own)) if key == place.key => covers((own.address, own.length), place).map(|()| own),
            _ => {
                let own = self.all.check(place)?;
                self.last = Some((place.key, own));
                Ok(own)
            }
        }
    }
}

impl Theirs {
    /// Checks that bytes of an agent lie in what it published.
    pub fn check(&self, place: &Place, memory: Memory) -> Result<()> {
        let Published { address, length, memory: of, .. } = self.published;
        covers((address, length), place)?;
        if of == memory { Ok(()) } else { Err(Status::NotFound) }
    }
}

fn covers((address, length): (u64, u64), place: &Place) -> Result<()> {
    // Neither sum leaves 64 bits: both were checked when they came.
    let within = place.address >= address && place.address + place.length <= address + length;
    if within { Ok(()) } else { Err(Status::NotFound) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_a_place_is_allowed_in_its_own_registration_alone_and_only_while_that_lives() {
        let mut all = Registrations::default();
        let (first, second) =
            (all.add(4096, 100, Memory::Host, 0).unwrap(), all.add(8192, 8, Memory::Host, 0).unwrap());
        let check =
            |all: &Registrations, key, address, length| all.check(&Place { key, address, length }).map(drop);
        assert_eq!(check(&all, first, 4096, 100), Ok(()));
        assert_eq!(check(&all, first, 4195, 1), Ok(()));
        for (key, address, length) in
            [(first, 4095, 1), (first, 4196, 1), (first, 4096, 101), (second, 4096, 8), (99, 0, 1)]
        {
            assert_eq!(check(&all, key, address, length), Err(Status::NotFound));
        }
        all.own(second).unwrap().ends = true;
        assert_eq!(check(&all, second, 8192, 8), Err(Status::NotFound));
        all.remove(first);
        // The key of what has ended is not given again.
        let again = all.add(4096, 100, Memory::Host, 0).unwrap();
        assert_eq!(check(&all, first, 4096, 1), Err(Status::NotFound));
        assert_eq!(check(&all, again, 4096, 1), Ok(()));
        assert_eq!(all.add(u64::MAX, 2, Memory::Host, 0), Err(Status::InvalidParam));
        assert_eq!(all.add(0, 2, Memory::Host, 0), Err(Status::InvalidParam));
    }
}
