//! The address of a PCI function on its bus.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Domain, bus, device and function of a PCI function, as sysfs writes it: `0000:17:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Domain (segment). It has more than 16 bits where a driver makes domains of its own (Intel's
    /// VMD begins at 10000).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device on that bus, 0 to 31.
    pub device: u8,
    /// Function of that device, 0 to 7.
    pub function: u8,
}

/// The error for a text that is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address: write domain:bus:device.function in hexadecimal, like 0000:17:00.0")]
pub struct BadAddress(pub String);

impl Address {
    /// The function that a folder of sysfs belongs to: the last part of its real path that is an
    /// address. An auxiliary device (a sub-function of mlx5's) lies below its function.
    pub fn of_path(real: &Path) -> Option<Self> {
        real.components().rev().find_map(|c| c.as_os_str().to_str()?.parse().ok())
    }

    /// An address that no host has, for what is known by its place in a tree alone; `n` tells such addresses apart.
    pub(crate) fn made_up(n: u32) -> Self {
        Self { domain: u32::MAX - (n >> 13), bus: (n >> 5) as u8, device: n as u8 & 31, function: 0 }
    }

    /// Whether the address is one that no host has.
    pub(crate) fn is_made_up(self) -> bool {
        self.domain > u32::MAX - (1 << 8)
    }

    /// Whether both addresses are functions of one device.
    pub fn same_device(self, other: Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

/// Parses hexadecimal digits and nothing else: `from_str_radix` alone would accept a sign.
pub(crate) fn hex(text: &str, max_digits: usize) -> Option<u32> {
    let fits = (1..=max_digits).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if fits { u32::from_str_radix(text, 16).ok() } else { None }
}

impl FromStr for Address {
    type Err = BadAddress;

    /// Accepts any case, and a domain of 4 to 8 digits or none: NVML writes 8, lspci none.
    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let parse = || {
            let (front, function) = text.rsplit_once('.')?;
            let (front, device) = front.rsplit_once(':')?;
            let (domain, bus) = front.rsplit_once(':').unwrap_or(("0", front));
            let address = Self {
                domain: hex(domain, 8)?,
                bus: hex(bus, 2)? as u8,
                device: hex(device, 2)? as u8,
                function: hex(function, 1)? as u8,
            };
            (address.device < 32 && address.function < 8).then_some(address)
        };
        parse().ok_or_else(|| BadAddress(text.chars().take(64).collect()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_form_that_tools_write() {
        let a: Address = "0000:17:1f.7".parse().unwrap();
        assert_eq!(a, Address { domain: 0, bus: 0x17, device: 0x1f, function: 7 });
        assert_eq!(a.to_string(), "0000:17:1f.7");
        assert_eq!("17:1F.7".parse(), Ok(a));
        assert_eq!("00000000:17:1F.7".parse(), Ok(a));
        assert_eq!("10000:00:1d.0".parse::<Address>().unwrap().to_string(), "10000:00:1d.0");
    }

    #[test]
    fn the_nearest_function_of_a_path_is_its_own() {
        let of = |path: &str| Address::of_path(path.as_ref()).map(|a| a.to_string());
        let function = "/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0";
        assert_eq!(of(function).as_deref(), Some("0000:03:00.0"));
        assert_eq!(of(&format!("{function}/mlx5_core.sf.4")).as_deref(), Some("0000:03:00.0"));
        assert_eq!(of("/sys/devices/virtual/net/lo"), None);
        assert_eq!(of("/sys/devices/pci0000:00/usb1/1-1/1-1:1.0"), None);
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_it_was() {
        let wrong =
            ["", "0000", "0000:17:00", "0000:17:20.0", "0000:17:00.8", "0000:+7:00.0", "0000:117:00.0"];
        for text in
            wrong.into_iter().chain(["fffffff:ffff:ff", "0000:17:00.0\n", "1:2:3:4.5", "0000:é7:00.0"])
        {
            let e = text.parse::<Address>().unwrap_err();
            assert!(e.to_string().contains("is no PCI address: write"), "{e}");
        }
    }
}
