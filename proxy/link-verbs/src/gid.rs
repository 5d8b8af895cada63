//! The addresses of an RDMA port as sysfs shows them, and which of them a queue
//! pair takes: a pure choice.

use std::io::Read;
use std::net::Ipv6Addr;
use std::path::Path;

use pushgate_door::addresses::Family;

/// An address as the wire has it: an IPv6 address, IPv4 ones mapped into it.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Gid(pub [u8; 16]);

impl std::fmt::Display for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ip = Ipv6Addr::from(self.0);
        match ip.to_ipv4_mapped() {
            Some(v4) => v4.fmt(f),
            None => ip.fmt(f),
        }
    }
}

impl std::fmt::Debug for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// How packets that carry an address look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand, or RoCE v1 on Ethernet: not routed over IP.
    IbOrRoceV1,
    /// Over UDP.
    RoceV2,
}

/// One entry of a port's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Place in the table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// What packets look like.
    pub kind: GidType,
    /// The entry's network interface, if any.
    pub netdev: Option<String>,
}

impl GidEntry {
    /// Of an end that has none yet.
    pub(super) fn none() -> Self {
        GidEntry { index: 0, gid: Gid([0; 16]), kind: GidType::IbOrRoceV1, netdev: None }
    }

    /// The IP address that it stands for on Ethernet.
    pub fn ip(&self) -> std::net::IpAddr {
        let v6 = Ipv6Addr::from(self.gid.0);
        v6.to_ipv4_mapped().map_or(v6.into(), Into::into)
    }

    fn family(&self) -> Family {
        match Ipv6Addr::from(self.gid.0).to_ipv4_mapped() {
            Some(_) => Family::V4,
            None => Family::V6,
        }
    }

    /// Whether the address reaches no further than the link.
    pub fn link_local(&self) -> bool {
        self.gid.0[0] == 0xfe && self.gid.0[1] & 0xc0 == 0x80
    }
}

/// Entries that are looked at. Ports have 256 or fewer, most of them empty.
const MOST: usize = 4096;
/// Bytes of a file. An address has 39; a name is shorter.
const LONGEST: u64 = 256;

/// The entries of a port's table that hold an address: `port` is its folder in sysfs
/// (`/sys/class/infiniband/DEVICE/ports/N`), `net` that of the network interfaces
/// (`/sys/class/net`). What can't be read is left out, and what is more than a port has.
pub fn table(port: &Path, net: &Path) -> Vec<GidEntry> {
    let mut all = Vec::new();
    for file in std::fs::read_dir(port.join("gids")).into_iter().flatten().take(MOST).flatten() {
        let Some(index) = file.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(Some(gid)) = at(port, index) else { continue };
        let read = |what: &str| {
            let path = port.join("gid_attrs").join(what).join(index.to_string());
            text(&path).ok().map(|s| s.trim().to_owned())
        };
        let kind = match read("types").as_deref() {
            Some("RoCE v2") => GidType::RoceV2,
            _ => GidType::IbOrRoceV1,
        };
        // One of another network namespace is not seen here, and so not missed later.
        let netdev = read("ndevs").filter(|n| !n.is_empty() && net.join(n).exists());
        all.push(GidEntry { index, gid, kind, netdev });
    }
    all.sort_by_key(|e| e.index);
    all
}

/// The address at an index of the port's table, if there is one.
pub(super) fn at(port: &Path, index: u32) -> std::io::Result<Option<Gid>> {
    let text = match text(&port.join("gids").join(index.to_string())) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let Ok(ip) = text.trim().parse::<Ipv6Addr>() else { return Ok(None) };
    // The lower half names the port. That of an iWARP device is the hardware address of its interface, in the upper half.
    let (prefix, port) = ((ip.to_bits() >> 64) as u64, ip.to_bits() as u64);
    let empty = port == 0 && [0, 0xfe80 << 48].contains(&prefix);
    Ok((!empty).then_some(Gid(ip.octets())))
}

pub(super) fn text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LONGEST).read_to_string(&mut text)?;
    Ok(text)
}

/// Addresses of an end that the other end is told of, at most.
pub(super) const MOST_TOLD: usize = 16;

/// An address that packets of a link may carry as their source.
#[derive(Clone, Debug)]
pub(super) struct OwnAddress {
    pub(super) entry: GidEntry,
    /// Its leading bits that all addresses of its subnet have; 0: not known.
    pub(super) subnet: u8,
}

/// One of these as the other end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Told {
    pub(super) gid: Gid,
    pub(super) subnet: u8,
}

impl Told {
    /// Whether no router is between two addresses. The links that link-local ones are of have no names.
    fn shares_subnet(&self, other: &Told) -> bool {
        let bits = u32::from(self.subnet.max(other.subnet)).min(128);
        let differ = u128::from_be_bytes(self.gid.0) ^ u128::from_be_bytes(other.gid.0);
        let link_local = self.gid.0[0] == 0xfe && self.gid.0[1] & 0xc0 == 0x80;
        bits > 0 && !link_local && differ.leading_zeros() >= bits
    }
}

/// Which of an end's addresses and of the other end's go together: of those in one subnet the first ones, else the first of each. Both
/// ends choose alike.
pub(super) fn meet(first: &[Told], second: &[Told]) -> (usize, usize) {
    let each = |i: usize| (0..second.len()).map(move |j| (i, j));
    let pairs = (0..first.len()).flat_map(each);
    let near = pairs.filter(|(i, j)| first[*i].shares_subnet(&second[*j]));
    near.min_by_key(|(i, j)| (i + j, *i)).unwrap_or((0, 0))
}

/// The best of the entries, by `ranked`.
pub fn choose(entries: &[GidEntry], family: Option<Family>) -> Option<&GidEntry> {
    ranked(entries, family).first().copied()
}

/// Entries whose network interface is seen here before all else, for other ones are of other containers; RoCE v2, for v1 is
/// not routed; then the family that the hosts use for each other; then an address that reaches beyond the link; IPv4 before
/// IPv6, for that is what RoCE networks are set up with; then the first.
pub(super) fn ranked(entries: &[GidEntry], family: Option<Family>) -> Vec<&GidEntry> {
    let mut all: Vec<_> = entries.iter().collect();
    all.sort_by_key(|e| {
        (
            e.netdev.is_none(),
            e.kind != GidType::RoceV2,
            family.is_some_and(|f| f != e.family()),
            e.link_local(),
            e.family() != Family::V4,
            e.index,
        )
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, ip: &str, kind: GidType) -> GidEntry {
        let ip = match ip.parse().unwrap() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            std::net::IpAddr::V6(v6) => v6,
        };
        GidEntry { index, gid: Gid(ip.octets()), kind, netdev: None }
    }

    #[test]
    fn roce_v2_and_the_hosts_own_family_come_first() {
        use GidType::*;
        let table = [
            entry(0, "fe80::1", IbOrRoceV1),
            entry(1, "fe80::1", RoceV2),
            entry(2, "10.1.2.3", IbOrRoceV1),
            entry(3, "10.1.2.3", RoceV2),
            entry(5, "2001:db8::7", RoceV2),
        ];
        let index = |entries, family| choose(entries, family).map(|e| e.index);
        assert_eq!(index(&table, None), Some(3));
        assert_eq!(index(&table, Some(Family::V4)), Some(3));
        assert_eq!(index(&table, Some(Family::V6)), Some(5));
        assert_eq!(index(&table[..4], Some(Family::V6)), Some(1), "v2 counts more than the family");
        assert_eq!(index(&table[..1], Some(Family::V4)), Some(0), "InfiniBand has nothing else");
        assert_eq!(index(&[], None), None);
    }

    #[test]
    fn an_entry_of_an_interface_that_is_seen_here_comes_before_those_of_other_containers() {
        use GidType::*;
        let seen = |e: GidEntry| GidEntry { netdev: Some("eth1".into()), ..e };
        let table = [
            entry(2, "10.1.2.3", RoceV2),
            seen(entry(6, "10.1.2.4", IbOrRoceV1)),
            seen(entry(7, "10.1.2.4", RoceV2)),
        ];
        assert_eq!(choose(&table, None).map(|e| e.index), Some(7));
        assert_eq!(
            choose(&table[..1], None).map(|e| e.index),
            Some(2),
            "as on InfiniBand, without interfaces"
        );
    }

    #[test]
    fn addresses_of_one_subnet_meet_and_both_ends_choose_the_same_pair() {
        let told = |all: &[(&str, u8)]| -> Vec<Told> {
            let one = |(ip, prefix): &(&str, u8)| {
                let v4 = !ip.contains(':');
                let subnet = if *prefix == 0 { 0 } else { prefix + if v4 { 96 } else { 0 } };
                Told { gid: entry(0, ip, GidType::RoceV2).gid, subnet }
            };
            all.iter().map(one).collect()
        };
        let cases = [
            // The first ones are good.
            (vec![("10.1.0.1", 24), ("10.2.0.1", 24)], vec![("10.1.0.2", 24), ("10.2.0.2", 24)], (0, 0)),
            // A host on two networks, and one on the second.
            (vec![("10.1.0.1", 24), ("10.2.0.1", 24)], vec![("10.2.0.2", 24)], (1, 0)),
            (vec![("10.1.0.1", 24), ("10.2.0.1", 24)], vec![("10.3.0.9", 24), ("10.2.0.2", 24)], (1, 1)),
            // A router is between them.
            (vec![("10.1.0.1", 24), ("10.2.0.1", 24)], vec![("10.9.0.2", 24), ("10.8.0.2", 24)], (0, 0)),
            // One end knows of no subnets: it has one address, and takes what comes.
            (vec![("10.1.0.1", 24), ("10.2.0.1", 24)], vec![("10.2.0.2", 0)], (1, 0)),
            (vec![("10.2.0.1", 0)], vec![("10.2.0.2", 0)], (0, 0)),
            (vec![("fe80::1", 64), ("2001:db8::1", 64)], vec![("fe80::2", 64), ("2001:db8::2", 64)], (1, 1)),
            (vec![("10.1.0.1", 24), ("2001:db8::1", 64)], vec![("2001:db8::2", 64)], (1, 0)),
        ];
        for (ours, theirs, met) in cases {
            assert_eq!(meet(&told(&ours), &told(&theirs)), met, "{ours:?} and {theirs:?}");
        }
        assert_eq!(meet(&[], &told(&[("10.1.0.1", 24)])), (0, 0));
    }

    #[test]
    fn a_table_without_an_end_is_read_to_its_bound() {
        let folder = std::env::temp_dir().join(format!("pushgate-gids-{}", std::process::id()));
        let gids = folder.join("gids");
        std::fs::create_dir_all(&gids).unwrap();
        for index in 0..MOST + 50 {
            std::fs::write(gids.join(index.to_string()), "fe80::1\n").unwrap();
        }
        let read = table(&folder, Path::new("/sys/class/net")).len();
        // A file is read to its own.
        std::fs::write(gids.join("0"), format!("fe80::1{}", " ".repeat(1 << 20)) + "x").unwrap();
        let (cut, whole) = (text(&gids.join("0")).unwrap().len(), at(&folder, 1).unwrap());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((read, cut as u64), (MOST, LONGEST));
        assert_eq!(whole.unwrap().to_string(), "fe80::1");
    }

    #[test]
    fn addresses_are_shown_as_their_family_writes_them() {
        assert_eq!(entry(0, "10.1.2.3", GidType::RoceV2).gid.to_string(), "10.1.2.3");
        assert_eq!(entry(0, "fe80::1", GidType::RoceV2).gid.to_string(), "fe80::1");
    }
}
