//! Registrations of this agent as regions of a connection's queue pair: bytes of host memory go out of them and into them without a
//! copy, where the queue pair can do that (over `tcp`, and by RDMA).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use pushgate::{HostEnd, QueuePair, Region};

use crate::registrations::{Memory, Own};
use crate::transfer::is_used;
use crate::wire::{Place, Remote};

/// Pieces of a transfer with fewer bytes in the mean go in messages, many in one.
pub const LEAST: u64 = 16 << 10;
/// The most bytes of a put: those after it wait no longer.
const LONGEST: u64 = 1 << 20;

enum Known {
    /// A thread registers it, for an RDMA device may take long.
    Making(Receiver<Option<Region>>),
    Made(Region, u64),
    /// It can't be one.
    Never,
}

/// What a registration is for the queue pair.
pub enum Standing<'a> {
    /// Not known yet.
    Unknown,
    /// Its region, and the address of the region's first byte.
    Region(&'a Region, u64),
    /// It has none.
    None,
}

/// The regions of a connection.
#[derive(Default)]
pub struct Regions {
    all: HashMap<u64, Known>,
    /// An answer was [`Standing::Unknown`].
    unknown: bool,
    /// What bytes under way out of regions belong to: how many posts the peer has then.
    under_way: VecDeque<(u64, Arc<()>)>,
}

impl Regions {
    /// What a registration is here. The first question for it begins to register it.
    pub fn standing(&mut self, qp: &Arc<QueuePair>, key: u64, own: &Own) -> Standing<'_> {
        let known = self.all.entry(key).or_insert_with(|| {
            if own.memory != Memory::Host || own.length == 0 {
                return Known::Never;
            }
            let (tell, told) = channel();
            let (qp, address, length) = (qp.clone(), own.address, own.length);
            let register = move || {
                // SAFETY: the memory is the registration's, which the program keeps until it has deregistered; that waits for
                // `Regions::let_go`. Of a connection that has ended the queue pair has failed, and touches no memory.
                let region = unsafe { qp.register_device(address, length) };
                let direct = region.and_then(|region| Ok(region.is_direct()?.then_some(region)));
                let region = direct.inspect_err(|e| tracing::warn!("memory goes by copies: {e}"));
                let _ = tell.send(region.ok().flatten());
            };
            match std::thread::Builder::new().name("pushgate-region".into()).spawn(register) {
                Ok(_) => Known::Making(told),
                Err(_) => Known::Never,
            }
        });
        if let Known::Making(told) = known
            && let Some(made) = asked(told)
        {
            *known = made.map_or(Known::Never, |region| Known::Made(region, own.address));
        }
        match known {
            Known::Making(_) => {
                self.unknown = true;
                Standing::Unknown
            }
            Known::Made(region, base) => Standing::Region(region, *base),
            Known::Never => Standing::None,
        }
    }

    /// Whether [`Regions::standing`] did not know an answer, and is to be asked again.
    pub fn is_asked(&self) -> bool {
        self.unknown
    }

    /// Whether an answer was not known since the last call of this, after which the caller asks again.
    pub fn ask_again(&mut self) -> bool {
        std::mem::take(&mut self.unknown)
    }

    /// Puts bytes of a registration into a region of the peer: at most [`LONGEST`] of them. How many; `None` without credit.
    /// `users` are cloned until the peer has them.
    pub fn put(
        &mut self,
        end: &mut HostEnd,
        (key, from): (u64, u64),
        (to, place): (Remote, Place),
        users: [&Arc<()>; 2],
    ) -> pushgate::Result<Option<u64>> {
        let Some(Known::Made(region, base)) = self.all.get(&key) else {
            unreachable!("bytes are put out of registrations that are regions")
        };
        let length = place.length.min(LONGEST);
        let at = place.address.wrapping_sub(to.base);
        if !end.try_put_region((region, from - base), length as usize, to.rkey, at)? {
            return Ok(None);
        }
        for user in users {
            match self.under_way.iter_mut().rev().take(2).find(|(_, other)| Arc::ptr_eq(other, user)) {
                Some((posts, _)) => *posts = end.posted(),
                None => self.under_way.push_back((end.posted(), user.clone())),
            }
        }
        Ok(Some(length))
    }

    /// A registration's region here, if there is one.
    pub fn own(&self, key: u64) -> Option<Remote> {
        match self.all.get(&key) {
            Some(Known::Made(region, base)) => Some(Remote { rkey: region.key(), base: *base }),
            _ => None,
        }
    }

    /// Drops what the peer has.
    pub fn settle(&mut self, end: &HostEnd) {
        if !self.under_way.is_empty() {
            let delivered = end.delivered();
            self.under_way.retain(|(posts, _)| *posts > delivered);
        }
    }

    /// Whether bytes of this user are under way.
    pub fn uses(&self, user: &Arc<()>) -> bool {
        self.under_way.iter().any(|(_, other)| Arc::ptr_eq(other, user))
    }

    /// Whether bytes are under way.
    #[cfg(test)]
    pub fn puts(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Notes that the peer has all bytes of a transfer.
    pub fn arrived(&mut self, users: &Arc<()>) {
        self.under_way.retain(|(_, other)| !Arc::ptr_eq(other, users));
    }

    /// Ends a registration's region, which no peer may name any more. False: something still uses the memory.
    pub fn let_go(&mut self, key: u64, own: &Own) -> bool {
        if is_used(&own.users) {
            return false;
        }
        match self.all.get_mut(&key) {
            Some(Known::Making(told)) => {
                let Some(made) = asked(told) else { return false };
                self.all.insert(key, made.map_or(Known::Never, |region| Known::Made(region, own.address)));
                self.let_go(key, own)
            }
            Some(Known::Made(region, _)) => {
                // An error says that the engine is gone.
                let free = region.deregister().unwrap_or(true);
                if free {
                    self.all.remove(&key);
                }
                free
            }
            Some(Known::Never) => {
                self.all.remove(&key);
                true
            }
            None => true,
        }
    }

    /// Ends all regions of a queue pair that has failed, before the queue pair goes: then nothing of it touches their memory, but for
    /// the registrations that are returned.
    pub fn close(self) -> Vec<u64> {
        let used = |known: &Known| matches!(known, Known::Made(region, _) if matches!(region.deregister(), Ok(false)));
        self.all.iter().filter(|(_, known)| used(known)).map(|(key, _)| *key).collect()
    }
}

/// The answer of the thread that registers, once there is one.
fn asked(told: &Receiver<Option<Region>>) -> Option<Option<Region>> {
    match told.try_recv() {
        Ok(made) => Some(made),
        Err(TryRecvError::Empty) => None,
        Err(TryRecvError::Disconnected) => Some(None),
    }
}
