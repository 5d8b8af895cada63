//! Stand-ins for names and addresses that tell one host from another: the same stand-in wherever one stands.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::readings::Read;

/// What stands for names and addresses of one host.
pub(crate) struct StandIns<'a> {
    /// Takes host names, user names and addresses out of text.
    hide: &'a dyn Fn(&str) -> String,
    known: RefCell<Known>,
}

#[derive(Default)]
struct Known {
    addresses: BTreeMap<IpAddr, IpAddr>,
    names: BTreeMap<String, String>,
    groups: BTreeMap<String, String>,
}

impl<'a> StandIns<'a> {
    /// None yet. `hide` takes host names, user names and addresses out of text.
    pub(crate) fn new(hide: &'a dyn Fn(&str) -> String) -> StandIns<'a> {
        StandIns { hide, known: RefCell::default() }
    }

    /// An address of the same kind: of the host itself, of the link alone, or one for documentation and
    /// tests (RFC 2544, RFC 3849).
    pub(crate) fn ip(&self, ip: IpAddr) -> IpAddr {
        if ip.is_loopback() || ip.is_unspecified() {
            return ip;
        }
        let known = &mut self.known.borrow_mut().addresses;
        let n = known.len() as u16 + 1;
        let v6 = |first: [u16; 2]| Ipv6Addr::new(first[0], first[1], 0, 0, 0, 0, 0, n).into();
        let new = || match ip {
            IpAddr::V4(v4) => {
                let [high, low] = n.to_be_bytes();
                let [a, b] = if v4.is_link_local() { [169, 254] } else { [198, 18] };
                Ipv4Addr::new(a, b, high, low).into()
            }
            IpAddr::V6(ip) if ip.is_unicast_link_local() => v6([0xfe80, 0]),
            IpAddr::V6(_) => v6([0x2001, 0xdb8]),
        };
        *known.entry(ip).or_insert_with(new)
    }

    /// The GID of an address: IPv4 ones stand mapped into IPv6.
    pub(crate) fn gid(&self, ip: IpAddr) -> String {
        let v6 = match self.ip(ip) {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        v6.segments().map(|part| format!("{part:04x}")).join(":")
    }

    /// A name of a device or an interface, with other digits where it holds a MAC address or a GUID, as in
    /// `enx02005e100001`.
    pub(crate) fn name(&self, name: &str) -> String {
        /// Digits of a MAC address.
        const MAC: usize = 12;
        let digits = |c: char| c.is_ascii_hexdigit();
        let Some(start) = name.char_indices().map(|(at, _)| at).find(|at| {
            let rest = &name[*at..];
            rest.len() - rest.trim_start_matches(digits).len() >= MAC
        }) else {
            return name.into();
        };
        let known = &mut self.known.borrow_mut().names;
        let n = known.len() + 1;
        let rest = name[start..].trim_start_matches(digits);
        let width = name.len() - start - rest.len();
        known.entry(name.into()).or_insert_with(|| format!("{}{n:0width$}{rest}", &name[..start])).clone()
    }

    /// A path, each of its names as [`StandIns::name`].
    pub(crate) fn path(&self, path: &str) -> String {
        path.split('/').map(|name| self.name(name)).collect::<Vec<_>>().join("/")
    }

    /// A name of a control group: they are made of users' numbers and names of jobs.
    pub(crate) fn group(&self, name: &str) -> String {
        let known = &mut self.known.borrow_mut().groups;
        let n = known.len() + 1;
        known.entry(name.into()).or_insert_with(|| format!("group{n}")).clone()
    }

    /// A sentence.
    pub(crate) fn text(&self, text: &str) -> String {
        let known = self.known.borrow();
        let named = known.names.iter().fold(text.to_owned(), |text, (name, other)| text.replace(name, other));
        (self.hide)(&named)
    }

    /// What was read; its reason if it could not be, as a sentence.
    pub(crate) fn read<T: Clone>(&self, read: &Read<T>) -> Read<T> {
        match read {
            Read::Unreadable(why) => Read::Unreadable(self.text(why)),
            other => other.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_one_stand_in_of_its_own_kind() {
        let hide = |text: &str| text.to_owned();
        let stand = StandIns::new(&hide);
        let ip = |text: &str| stand.ip(text.parse().unwrap()).to_string();
        assert_eq!(
            (ip("10.1.2.3"), ip("fe80::1:2"), ip("2001:67c::9")),
            ("198.18.0.1".into(), "fe80::2".into(), "2001:db8::3".into())
        );
        assert_eq!((ip("169.254.3.4"), ip("10.1.2.3")), ("169.254.0.4".into(), "198.18.0.1".into()));
        assert_eq!(
            (ip("127.0.0.1"), ip("::1"), ip("0.0.0.0")),
            ("127.0.0.1".into(), "::1".into(), "0.0.0.0".into())
        );
        assert_eq!(stand.gid("10.1.2.3".parse().unwrap()), "0000:0000:0000:0000:0000:ffff:c612:0001");
    }

    #[test]
    fn names_that_hold_a_mac_address_or_a_guid_get_other_digits() {
        let hide = |text: &str| text.replace("node17", "(host)");
        let stand = StandIns::new(&hide);
        assert_eq!(stand.name("enx02005e100001"), "enx000000000001");
        assert_eq!(stand.name("ibx0c42a10300001234"), "ibx0000000000000002");
        assert_eq!(stand.name("mlx5_0"), "mlx5_0");
        assert_eq!(stand.path("sys/class/net/enx02005e100001/mtu"), "sys/class/net/enx000000000001/mtu");
        assert_eq!(stand.text("DCB of enx02005e100001 at node17"), "DCB of enx000000000001 at (host)");
    }
}
