//! The 128-byte handle by which a connector finds a listener. NCCL carries it from one rank to the
//! other, so its content is checked on arrival.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 to 7 | "PGNCCLH1"; its last character is the version |
//! | 8 to 11 | 1: a Unix socket of this host; 2: TCP |
//! | 12 to 13 | TCP: port |
//! | 16 to 31 | nonce: made for this listener; names the Unix socket, and the greeting must repeat it |
//! | 32 to 47 | TCP: IPv6 address, or an IPv4 address mapped into it. Unix: the host's boot id |
//! | 48 to 51 | TCP: scope of a link-local address |
//! | 56 to 63 | checksum of the bytes before |
//! | 64 to 71 | not carried: the connector's own mark in its copy, 0 at first |

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::error::{Code, Failure, Result};

/// The size of a handle, `NCCL_NET_HANDLE_MAXSIZE`.
pub const BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"PGNCCLH1";
const CHECKED: usize = 56;
const MARK: std::ops::Range<usize> = 64..72;

/// 16 random bytes.
pub type Nonce = [u8; 16];

/// The address at which a listener listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket named after the nonce, on the host with this boot id.
    Unix([u8; 16]),
    Tcp(SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub nonce: Nonce,
    pub address: Address,
}

/// The checksum, FNV-1a: it detects accidents, not forgeries.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ *b as u64).wrapping_mul(0x0100_0000_01b3))
}

impl Handle {
    pub fn encode(&self) -> [u8; BYTES] {
        let mut h = [0; BYTES];
        h[..8].copy_from_slice(&MAGIC);
        h[16..32].copy_from_slice(&self.nonce);
        match self.address {
            Address::Unix(boot) => {
                h[8] = 1;
                h[32..48].copy_from_slice(&boot);
            }
            Address::Tcp(a) => {
                h[8] = 2;
                h[12..14].copy_from_slice(&a.port().to_le_bytes());
                let (ip, scope) = match a {
                    SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
                    SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
                };
                h[32..48].copy_from_slice(&ip.octets());
                h[48..52].copy_from_slice(&scope.to_le_bytes());
            }
        }
        let check = sum(&h[..CHECKED]);
        h[CHECKED..CHECKED + 8].copy_from_slice(&check.to_le_bytes());
        h
    }

    pub fn decode(h: &[u8; BYTES]) -> Result<Handle> {
        let wrong = |why: String| {
            Err(Failure::new(
                Code::Argument,
                format!(
                    "a connection handle that no listener of pushgate made: {why}; do all ranks load the same build of the plugin?"
                ),
            ))
        };
        if h[..8] != MAGIC {
            return wrong(format!("it begins with {:02x?}, not with {MAGIC:02x?}", &h[..8]));
        }
        if h[CHECKED..CHECKED + 8] != sum(&h[..CHECKED]).to_le_bytes() {
            return wrong("its check sum is wrong".into());
        }
        let sixteen = |at: usize| -> [u8; 16] { h[at..at + 16].try_into().expect("sixteen bytes") };
        let address = match h[8] {
            1 => Address::Unix(sixteen(32)),
            2 => {
                let port = u16::from_le_bytes([h[12], h[13]]);
                let scope = u32::from_le_bytes(h[48..52].try_into().expect("four bytes"));
                let ip = Ipv6Addr::from(sixteen(32));
                Address::Tcp(match IpAddr::V6(ip).to_canonical() {
                    IpAddr::V4(v4) => (v4, port).into(),
                    IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, scope).into(),
                })
            }
            kind => return wrong(format!("its kind is {kind}, known are 1 and 2")),
        };
        Ok(Handle { nonce: sixteen(16), address })
    }
}

/// The connector's mark in its copy of a handle.
pub fn mark(h: &[u8; BYTES]) -> u64 {
    u64::from_le_bytes(h[MARK].try_into().expect("eight bytes"))
}

/// Sets the connector's mark in its copy of a handle.
pub fn set_mark(h: &mut [u8; BYTES], mark: u64) {
    h[MARK].copy_from_slice(&mark.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_back_and_garbage_is_refused() {
        for address in [
            Address::Unix([7; 16]),
            Address::Tcp("10.1.2.3:4567".parse().unwrap()),
            Address::Tcp("[2001:db8::5]:1".parse().unwrap()),
            Address::Tcp(SocketAddrV6::new("fe80::1".parse().unwrap(), 9, 0, 3).into()),
        ] {
            let handle = Handle { nonce: [0xab; 16], address };
            let mut bytes = handle.encode();
            assert_eq!(Handle::decode(&bytes).unwrap(), handle);
            set_mark(&mut bytes, 12);
            assert_eq!((Handle::decode(&bytes).unwrap(), mark(&bytes)), (handle, 12));
            for i in 0..64 {
                let mut bad = bytes;
                bad[i] ^= 0x40;
                assert_eq!(Handle::decode(&bad).unwrap_err().code, Code::Argument, "byte {i}");
            }
        }
        for bad in [[0; BYTES], [0xff; BYTES]] {
            assert!(Handle::decode(&bad).unwrap_err().text.contains("same build"));
        }
    }
}
