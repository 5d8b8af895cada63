//! Memory that a client has registered with the copier, and the check of each command against it (P8). Pure.

use std::any::Any;
use std::sync::Arc;

use super::layout::Command;

/// Memories of a kind that a client may have registered at once.
pub(super) const MOST: usize = 1 << 16;

/// A registered memory, where the copier's device sees it.
pub(super) struct Place {
    pub address: u64,
    pub bytes: u64,
    pub writable: bool,
    /// Keeps the memory in place.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// A copy between two addresses that were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// From the device to the host.
    pub out: bool,
    pub device: u64,
    pub host: u64,
    pub length: u64,
}

/// The two kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Device,
    Host,
}

/// The memories of one client.
#[derive(Default)]
pub(super) struct Places {
    device: Vec<Option<Place>>,
    host: Vec<Option<Place>>,
}

impl Places {
    fn of(&mut self, kind: Kind) -> &mut Vec<Option<Place>> {
        match kind {
            Kind::Device => &mut self.device,
            Kind::Host => &mut self.host,
        }
    }

    /// Adds a memory. Returns its key; `None` if there are [`MOST`].
    pub fn add(&mut self, kind: Kind, place: Place) -> Option<u32> {
        let all = self.of(kind);
        let free = all.iter().position(Option::is_none);
        let key = match free {
            Some(key) => key,
            None if all.len() < MOST => {
                all.push(None);
                all.len() - 1
            }
            None => return None,
        };
        all[key] = Some(place);
        Some(key as u32)
    }

    /// Takes a memory out.
    pub fn remove(&mut self, kind: Kind, key: u32) -> Option<Place> {
        self.of(kind).get_mut(key as usize)?.take()
    }

    /// Checks a command: both stretches must lie within memories of this client, and the one that is written must be writable.
    pub fn check(&self, command: &Command) -> Result<Checked, String> {
        let Command { out, device_offset, host_offset, length, .. } = *command;
        let device = stretch(&self.device, "device", command.device, device_offset, length, !out)?;
        let host = stretch(&self.host, "host", command.host, host_offset, length, out)?;
        Ok(Checked { out, device, host, length })
    }
}

fn stretch(
    all: &[Option<Place>],
    kind: &str,
    key: u32,
    offset: u64,
    length: u64,
    write: bool,
) -> Result<u64, String> {
    let place = all.get(key as usize).and_then(Option::as_ref);
    let place = place.ok_or_else(|| format!("{kind} memory {key} is not registered"))?;
    if offset.checked_add(length).is_none_or(|end| end > place.bytes) {
        return Err(format!(
            "{length} bytes at offset {offset} leave {kind} memory {key} of {} bytes",
            place.bytes
        ));
    }
    if write && !place.writable {
        return Err(format!("{kind} memory {key} was registered to be read alone"));
    }
    Ok(place.address + offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(address: u64, bytes: u64, writable: bool) -> Place {
        Place { address, bytes, writable, keep: Arc::new(()) }
    }

    #[test]
    fn p8_a_copy_outside_of_what_its_client_registered_is_refused() {
        let mut places = Places::default();
        assert_eq!(places.add(Kind::Device, place(0x1000, 100, true)), Some(0));
        assert_eq!(places.add(Kind::Host, place(0x2000, 100, false)), Some(0));
        assert_eq!(places.add(Kind::Host, place(0x3000, 50, true)), Some(1));
        let good = Command { out: false, device: 0, host: 0, device_offset: 10, host_offset: 20, length: 80 };
        assert_eq!(places.check(&good), Ok(Checked { out: false, device: 0x100a, host: 0x2014, length: 80 }));
        for bad in [
            Command { device: 1, ..good },
            Command { host: 2, ..good },
            Command { host: u32::MAX, ..good },
            Command { length: 81, ..good },
            Command { length: u64::MAX, ..good },
            Command { device_offset: u64::MAX - 1, ..good },
            Command { host_offset: 101, length: 0, ..good },
            // Out of the device, into memory that is only read.
            Command { out: true, ..good },
            Command { out: true, host: 1, ..good },
        ] {
            assert!(places.check(&bad).is_err(), "{bad:?}");
        }
        assert!(places.check(&Command { out: true, host: 1, host_offset: 0, length: 50, ..good }).is_ok());
        // The key of a memory that was taken out names nothing, until another one gets it.
        assert!(places.remove(Kind::Device, 0).is_some() && places.remove(Kind::Device, 0).is_none());
        assert!(places.check(&good).is_err());
        assert_eq!(places.add(Kind::Device, place(0x9000, 10, true)), Some(0));
        assert!(places.check(&good).is_err());
    }
}
