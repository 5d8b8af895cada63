//! Parses a function's configuration space: bytes in, facts out, without I/O.
//!
//! Offsets and bits are those of the PCI Express Base Specification, named as in Linux'
//! `pci_regs.h`. Every user may read the first 64 bytes (128 of a CardBus bridge), and root the
//! rest.

use serde::Serialize;

use crate::link::LinkState;

/// A fact, or why it is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Read<T> {
    /// The fact, as read.
    Is(T),
    /// The function does not have it.
    Absent,
    /// The fact lies beyond the 64 bytes that every user may read.
    NeedsRoot,
    /// The fact could not be read.
    #[default]
    Unread,
}

impl<T> Read<T> {
    /// The fact, if it was read.
    pub fn get(&self) -> Option<&T> {
        match self {
            Self::Is(t) => Some(t),
            _ => None,
        }
    }
}

/// The kind of port of a PCIe function (Device/Port Type of the PCI Express Capabilities register).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PortType {
    /// An endpoint, a legacy endpoint, or an endpoint integrated into the root complex.
    Endpoint,
    /// A port of the root complex.
    Root,
    /// The port of a switch towards the root complex.
    Upstream,
    /// A port of a switch away from the root complex.
    Downstream,
    /// A bridge between PCIe and PCI.
    Bridge,
    /// Any other kind: event collectors, reserved numbers.
    Other,
}

/// The PCI Express capability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Express {
    /// The kind of port.
    pub port: PortType,
    /// The largest payload of a packet that the function sends and accepts now (MPS), in bytes.
    pub max_payload: u32,
    /// The largest payload that the function supports, in bytes.
    pub max_payload_supported: u32,
    /// The largest read that the function requests (MRRS), in bytes.
    pub max_read_request: u32,
    /// Read completion boundary in bytes, 64 or 128. A root port cuts completions at it; an
    /// endpoint has the value that it was told for its root port.
    pub read_completion_boundary: u32,
    /// Whether 8-bit tags are enabled.
    pub extended_tags: bool,
    /// Whether 10-bit tags are enabled, as requester.
    pub ten_bit_tags: bool,
    /// Whether the function may mark its packets relaxed-ordered.
    pub relaxed_ordering: bool,
    /// The link as trained now.
    pub link_now: Option<LinkState>,
    /// The best link that the function supports.
    pub link_best: Option<LinkState>,
}

impl Express {
    /// How many reads may be under way, by the tags.
    pub fn tags(&self) -> u32 {
        match (self.ten_bit_tags, self.extended_tags) {
            (true, _) => 768,
            (false, true) => 256,
            (false, false) => 32,
        }
    }
}

/// Access control services: what a port does to traffic between its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Acs {
    /// The ACS Capability register.
    pub capability: u16,
    /// The ACS Control register.
    pub control: u16,
}

impl Acs {
    const REQUEST_REDIRECT: u16 = 1 << 2;
    const COMPLETION_REDIRECT: u16 = 1 << 3;
    const EGRESS_CONTROL: u16 = 1 << 5;

    /// Whether requests to a peer go up to the root complex instead.
    pub fn redirects_requests(self) -> bool {
        self.control & Self::REQUEST_REDIRECT != 0
    }

    /// Whether completions to a peer go up to the root complex instead.
    pub fn redirects_completions(self) -> bool {
        self.control & Self::COMPLETION_REDIRECT != 0
    }

    /// Whether a table decides which peers may be reached at all. The table itself is not read.
    pub fn egress_controlled(self) -> bool {
        self.control & Self::EGRESS_CONTROL != 0
    }
}

/// What a configuration space says.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Config {
    /// How many bytes could be read.
    pub readable: usize,
    /// The PCI Express capability.
    pub express: Read<Express>,
    /// The ACS extended capability.
    pub acs: Read<Acs>,
}

const STATUS: usize = 0x06;
const STATUS_CAP_LIST: u16 = 1 << 4;
const HEADER_TYPE: usize = 0x0e;
const HEADER_CARDBUS: u8 = 2;
const CAPABILITY_LIST: usize = 0x34;
const CARDBUS_CAPABILITY_LIST: usize = 0x14;
/// The end of the header, in which no capability lies.
const HEADER: usize = 0x40;
const CAP_ID_EXPRESS: u8 = 0x10;
const EXT_CAP_ID_ACS: u16 = 0x000d;
const EXTENDED: usize = 0x100;

/// The bytes that every user may read: 64, and 128 of a CardBus bridge.
const UNPRIVILEGED: usize = 128;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Parses `bytes`, the beginning of a configuration space.
pub fn parse(bytes: &[u8]) -> Config {
    let all_ones = bytes.len() >= 4 && bytes[..4] == [0xff; 4];
    if bytes.len() < 64 || all_ones {
        // Too short for a configuration space, or a function that does not answer: it is gone or
        // asleep.
        return Config { readable: bytes.len(), ..Config::default() };
    }
    let express = match find(bytes, CAP_ID_EXPRESS) {
        Read::Is(at) => express(bytes, at),
        Read::Absent => Read::Absent,
        Read::NeedsRoot => Read::NeedsRoot,
        Read::Unread => Read::Unread,
    };
    let acs = match bytes.len() {
        0..=UNPRIVILEGED => Read::NeedsRoot,
        n if n <= EXTENDED => Read::Absent,
        _ => acs(bytes),
    };
    Config { readable: bytes.len(), express, acs }
}

/// Finds the offset of a capability.
fn find(bytes: &[u8], id: u8) -> Read<usize> {
    if u16_at(bytes, STATUS).is_none_or(|s| s & STATUS_CAP_LIST == 0) {
        return Read::Absent;
    }
    let list = match bytes[HEADER_TYPE] & 0x7f {
        HEADER_CARDBUS => CARDBUS_CAPABILITY_LIST,
        _ => CAPABILITY_LIST,
    };
    let mut at = usize::from(bytes[list] & !3);
    // 48 capabilities fill the space; a longer list is a loop.
    for _ in 0..48 {
        if at < HEADER {
            return if at == 0 { Read::Absent } else { Read::Unread };
        }
        let Some(head) = u16_at(bytes, at) else {
            return if bytes.len() <= UNPRIVILEGED { Read::NeedsRoot } else { Read::Unread };
        };
        if head as u8 == id {
            return Read::Is(at);
        }
        at = usize::from((head >> 8) as u8 & !3);
    }
    Read::Unread
}

fn link(speed: u32, width: u32) -> Option<LinkState> {
    let gts = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0].get((speed as usize).checked_sub(1)?).copied()?;
    (1..=32).contains(&width).then_some(LinkState { gts, width: width as u8 })
}

fn express(bytes: &[u8], at: usize) -> Read<Express> {
    let parse = || {
        let flags = u16_at(bytes, at + 2)?;
        let device_cap = u32_at(bytes, at + 4)?;
        let device_ctl = u16_at(bytes, at + 8)?;
        let link_cap = u32_at(bytes, at + 12)?;
        let link_ctl = u16_at(bytes, at + 16)?;
        let link_status = u16_at(bytes, at + 18)?;
        let version = flags & 0xf;
        // The first version of the capability ends before Device Control 2.
        let device_ctl2 = if version >= 2 { u16_at(bytes, at + 40)? } else { 0 };
        let port = match flags >> 4 & 0xf {
            0 | 1 | 9 => PortType::Endpoint,
            4 => PortType::Root,
            5 => PortType::Upstream,
            6 => PortType::Downstream,
            7 | 8 => PortType::Bridge,
            _ => PortType::Other,
        };
        Some(Express {
            port,
            max_payload: 128 << (device_ctl >> 5 & 7),
            max_payload_supported: 128 << (device_cap & 7),
            max_read_request: 128 << (device_ctl >> 12 & 7),
            read_completion_boundary: if link_ctl & 1 << 3 != 0 { 128 } else { 64 },
            extended_tags: device_ctl & 1 << 8 != 0,
            ten_bit_tags: device_ctl2 & 1 << 12 != 0,
            relaxed_ordering: device_ctl & 1 << 4 != 0,
            link_now: link(u32::from(link_status & 0xf), u32::from(link_status >> 4 & 0x3f)),
            link_best: link(link_cap & 0xf, link_cap >> 4 & 0x3f),
        })
    };
    match parse() {
        Some(express) => Read::Is(express),
        None if bytes.len() <= UNPRIVILEGED => Read::NeedsRoot,
        None => Read::Unread,
    }
}

fn acs(bytes: &[u8]) -> Read<Acs> {
    let mut at = EXTENDED;
    // 960 capabilities of one word fill the space; a longer list is a loop.
    for _ in 0..960 {
        let Some(head) = u32_at(bytes, at) else { return Read::Unread };
        if head == 0 || head == u32::MAX {
            return Read::Absent;
        }
        if head as u16 == EXT_CAP_ID_ACS {
            return match (u16_at(bytes, at + 4), u16_at(bytes, at + 6)) {
                (Some(capability), Some(control)) => Read::Is(Acs { capability, control }),
                _ => Read::Unread,
            };
        }
        at = (head >> 20) as usize & !3;
        if at == 0 {
            return Read::Absent;
        }
        if at < EXTENDED {
            return Read::Unread;
        }
    }
    Read::Unread
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A configuration space with a PCI Express capability at 0x60 after power management at 0x40,
    /// and ACS at 0x148 after AER at 0x100.
    fn space() -> Vec<u8> {
        let mut b = vec![0u8; 4096];
        b[STATUS] = STATUS_CAP_LIST as u8;
        b[CAPABILITY_LIST] = 0x40;
        b[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
        b[0x60..0x64].copy_from_slice(&[CAP_ID_EXPRESS, 0, 0x62, 0]);
        b[0x64..0x68].copy_from_slice(&0x2u32.to_le_bytes());
        b[0x68..0x6a].copy_from_slice(&(1u16 << 5 | 2 << 12 | 1 << 8 | 1 << 4).to_le_bytes());
        b[0x6c..0x70].copy_from_slice(&(5u32 | 16 << 4).to_le_bytes());
        b[0x70] = 1 << 3;
        b[0x72..0x74].copy_from_slice(&(4u16 | 8 << 4).to_le_bytes());
        b[0x88..0x8a].copy_from_slice(&(1u16 << 12).to_le_bytes());
        b[0x100..0x104].copy_from_slice(&(1u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        b[0x148..0x14c].copy_from_slice(&(0xdu32 | 1 << 16).to_le_bytes());
        b[0x14c..0x150].copy_from_slice(&[0x5f, 0, 0x1d, 0]);
        b
    }

    #[test]
    fn root_sees_all() {
        let config = parse(&space());
        let e = config.express.get().unwrap();
        assert_eq!((e.port, e.max_payload, e.max_payload_supported), (PortType::Downstream, 256, 512));
        assert_eq!((e.max_read_request, e.read_completion_boundary, e.tags()), (512, 128, 768));
        assert!(e.relaxed_ordering && e.extended_tags);
        assert_eq!(e.link_now, Some(LinkState { gts: 16.0, width: 8 }));
        assert_eq!(e.link_best, Some(LinkState { gts: 32.0, width: 16 }));
        let acs = *config.acs.get().unwrap();
        assert!(acs.redirects_requests() && acs.redirects_completions() && !acs.egress_controlled());
    }

    #[test]
    fn facts_that_need_root_say_so() {
        let config = parse(&space()[..64]);
        assert_eq!((config.express, config.acs), (Read::NeedsRoot, Read::NeedsRoot));
        let conventional = parse(&space()[..256]);
        assert!(conventional.express.get().is_some());
        assert_eq!(conventional.acs, Read::Absent);
    }

    #[test]
    fn cardbus_bridges_have_their_list_elsewhere() {
        let mut b = space();
        (b[HEADER_TYPE], b[CARDBUS_CAPABILITY_LIST], b[CAPABILITY_LIST]) = (0x82, 0x40, 0);
        assert!(parse(&b).express.get().is_some());
    }

    #[test]
    fn loops_and_silent_functions_end() {
        let mut b = space();
        b[0x41] = 0x40;
        b[0x148..0x14c].copy_from_slice(&(0x2u32 | 1 << 16 | 0x100 << 20).to_le_bytes());
        let config = parse(&b);
        assert_eq!((config.express, config.acs), (Read::Unread, Read::Unread));
        let mut b = space();
        b[CAPABILITY_LIST] = 0x10;
        assert_eq!(parse(&b).express, Read::Unread, "a list that leads into the header");
        assert_eq!(parse(&[0xff; 4096]).express, Read::Unread);
        assert_eq!(parse(&[]).express, Read::Unread);
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken(mut bytes in proptest::collection::vec(any::<u8>(), 0..4200), list in any::<bool>()) {
            if list && bytes.len() > STATUS {
                bytes[STATUS] |= STATUS_CAP_LIST as u8;
            }
            prop_assert_eq!(parse(&bytes).readable, bytes.len());
        }
    }
}
