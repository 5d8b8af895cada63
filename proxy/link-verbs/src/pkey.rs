//! The partition keys of an RDMA port as sysfs shows them, and the place of one among them.

use std::path::Path;

use super::error::VerbsError;
use super::gid::text;

/// The bit that makes a member a full one. Two limited members of a partition do not hear each other.
pub const FULL: u16 = 0x8000;

/// A port's table of partition keys (IB specification, 10.9.2): each place with its key. Empty where there is none.
pub fn table(port: &Path) -> Vec<(u16, u16)> {
    let Ok(all) = std::fs::read_dir(port.join("pkeys")) else { return Vec::new() };
    let entry = |name: &str| -> Option<(u16, u16)> {
        let key = text(&port.join("pkeys").join(name)).ok()?;
        Some((name.parse().ok()?, u16::from_str_radix(key.trim().strip_prefix("0x")?, 16).ok()?))
    };
    let mut table: Vec<_> = all.flatten().filter_map(|file| entry(file.file_name().to_str()?)).collect();
    // A key of 0 is no entry.
    table.retain(|(_, key)| key & !FULL != 0);
    table.sort();
    table
}

/// The place of a partition, whose full member goes before a limited one.
pub fn place(table: &[(u16, u16)], partition: u16) -> Option<u16> {
    let of = |key: u16| (key ^ partition) & !FULL == 0;
    table
        .iter()
        .filter(|(_, key)| of(*key))
        .max_by_key(|(at, key)| (key & FULL, u16::MAX - at))
        .map(|(at, _)| *at)
}

/// The place of the key that a queue pair of the port has: the first one, unless `partition` is set. The subnet manager may change the
/// table, so this is asked for each queue pair.
pub(super) fn index(
    port: &Path,
    partition: Option<u16>,
    named: impl Fn() -> (String, u8),
) -> Result<u16, VerbsError> {
    let Some(partition) = partition else { return Ok(0) };
    let table = table(port);
    place(&table, partition).ok_or_else(|| {
        let (device, port) = named();
        VerbsError::NoPartition {
            device,
            port,
            partition,
            found: table.iter().map(|(_, key)| *key).collect(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_found_by_its_number_and_the_full_member_goes_first() {
        let table = [(0, 0x7fff), (1, 0x0001), (2, 0x8001), (5, 0x8002)];
        let of = |partition| place(&table, partition);
        assert_eq!([of(0x8001), of(0x0001), of(0xffff), of(0x8002)], [Some(2), Some(2), Some(0), Some(5)]);
        assert_eq!(of(0x8003), None);
    }

    #[test]
    fn a_port_without_the_partition_says_which_it_has() {
        let port = std::env::temp_dir().join(format!("pushgate-pkeys-{}", std::process::id()));
        std::fs::create_dir_all(port.join("pkeys")).unwrap();
        for (at, key) in [(0, "0x7fff\n"), (1, "0x8001\n"), (2, "0x0000\n"), (10, "0x8002\n")] {
            std::fs::write(port.join("pkeys").join(at.to_string()), key).unwrap();
        }
        let of = |partition| index(&port, partition, || ("mlx5_0".into(), 1));
        assert_eq!((of(None).unwrap(), of(Some(1)).unwrap(), of(Some(0x8002)).unwrap()), (0, 1, 10));
        let why = of(Some(0x8007)).unwrap_err().to_string();
        assert_eq!(
            why,
            "port 1 of mlx5_0 is in no partition 0x8007; it has 0x7fff, 0x8001, 0x8002: set pkey to one of those, or have the subnet \
             manager put the port into the partition (opensm: partitions.conf)"
        );
        std::fs::remove_dir_all(&port).unwrap();
        assert!(of(Some(1)).unwrap_err().to_string().contains("it has no key at all"));
    }
}
