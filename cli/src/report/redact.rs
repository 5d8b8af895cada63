//! What tells a host from others of its kind, out of text: its name, the home folder, addresses of networks,
//! GUIDs and UUIDs. PCI addresses stay: every machine of a kind has the same.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// What to take out. The default takes out nothing.
#[derive(Clone, Debug, Default)]
pub struct Redact {
    names: Vec<(String, &'static str)>,
    addresses: bool,
}

impl Redact {
    /// What to take out of texts about a host of these names, and a user with that home folder.
    pub fn new(hosts: &[&str], home: Option<&str>) -> Self {
        let mut names: Vec<(String, &'static str)> = hosts
            .iter()
            .filter(|name| !name.is_empty() && **name != "localhost")
            // The short name alone may stand elsewhere.
            .flat_map(|name| [*name, name.split('.').next().unwrap_or(name)])
            .map(|name| (name.to_owned(), "(host)"))
            .collect();
        names.extend(home.filter(|h| h.len() > 1).map(|h| (h.trim_end_matches('/').to_owned(), "~")));
        // The longer first: one may be part of another.
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        names.dedup();
        Self { names, addresses: true }
    }

    /// What to take out of texts about this host, its user, and what else a host was called.
    pub fn of_this_host(also: &[&str]) -> Self {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let variable = |name: &str| std::env::var(name).ok();
        let hosts: Vec<&str> = std::iter::once(&*name).chain(also.iter().copied()).collect();
        let mut redact = Self::new(&hosts, variable("HOME").as_deref());
        // Root is a user of every host.
        let user = variable("USER").or_else(|| variable("LOGNAME"));
        redact.names.extend(user.filter(|u| !u.is_empty() && u != "root").map(|u| (u, "(user)")));
        redact
    }

    /// The text without what is to be taken out.
    pub fn of(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, instead) in &self.names {
            text = without(&text, name, instead);
        }
        if self.addresses { addresses(&text) } else { text }
    }
}

/// `text` with `instead` wherever `name` stands as a word, in capitals or not.
fn without(text: &str, name: &str, instead: &str) -> String {
    // Lengths stay: only ASCII changes.
    let (lower, name) = (text.to_ascii_lowercase(), name.to_ascii_lowercase());
    let edge = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric());
    let (mut out, mut from) = (String::new(), 0);
    for (at, _) in lower.match_indices(&name) {
        let end = at + name.len();
        let inside = edge(lower[..at].chars().next_back()) && edge(lower[end..].chars().next());
        if at >= from && inside {
            out += &text[from..at];
            out += instead;
            from = end;
        }
    }
    out + &text[from..]
}

fn addresses(text: &str) -> String {
    let part = |c: char| c.is_alphanumeric() || matches!(c, ':' | '.' | '-' | '_');
    let (mut out, mut rest) = (String::new(), text);
    while !rest.is_empty() {
        let start = rest.find(part).unwrap_or(rest.len());
        out += &rest[..start];
        rest = &rest[start..];
        let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        // A sentence's full stop, or the colon of "fe80::1: active".
        let bare = word.trim_end_matches(['.', ':', '-']);
        let word = if word.parse::<IpAddr>().is_ok() { word } else { bare };
        match kind(word) {
            Some(kind) => out += kind,
            None => out += &joined(word),
        }
        rest = &rest[word.len()..];
        let (between, after) = rest.split_at(rest.len() - after.len());
        out += between;
        rest = after;
    }
    out
}

/// A word that is more than an address, as in "10.0.0.5-10.0.0.9" or "eth0:10.0.0.5".
fn joined(word: &str) -> String {
    let joint = [':', '-', '_'];
    let part = |part: &str| {
        let bare = part.trim_end_matches(joint);
        match bare.parse::<Ipv4Addr>() {
            Ok(ip) if is_of_a_host(ip.into()) => format!("(address){}", &part[bare.len()..]),
            _ => part.to_owned(),
        }
    };
    word.split_inclusive(joint).map(part).collect()
}

fn is_of_a_host(ip: IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified()
}

/// What of it must not be shown, if it is such a thing.
fn kind(word: &str) -> Option<&'static str> {
    let ip = word.parse().or_else(|_| word.parse().map(|a: SocketAddr| a.ip()));
    if let Ok(ip) = ip {
        return is_of_a_host(ip).then_some("(address)");
    }
    let hex = |s: &str, n: usize| s.len() == n && s.bytes().all(|b| b.is_ascii_hexdigit());
    for separator in [':', '-'] {
        let groups: Vec<&str> = word.split(separator).collect();
        // Ethernet 6, EUI-64 8, IP over InfiniBand 20.
        if groups.len() >= 6 && groups.iter().all(|g| hex(g, 2)) {
            return Some("(MAC)");
        }
        if groups.len() == 4 && groups.iter().all(|g| hex(g, 4)) {
            return Some("(GUID)");
        }
    }
    // As some switches write them, and as systemd names interfaces by them.
    let groups: Vec<&str> = word.split('.').collect();
    let named = ["enx", "wlx"].iter().any(|kind| word.strip_prefix(kind).is_some_and(|mac| hex(mac, 12)));
    if named || (groups.len() == 3 && groups.iter().all(|g| hex(g, 4))) {
        return Some("(MAC)");
    }
    // A GID as one number, a machine's id, a UUID without its dashes.
    if hex(word.trim_start_matches("0x"), 32) {
        return Some("(GUID)");
    }
    // The older form has both: MIG-GPU-UUID/GI/CI.
    let uuid = word.trim_start_matches("MIG-").trim_start_matches("GPU-");
    let groups: Vec<&str> = uuid.split('-').collect();
    let lengths = [8, 4, 4, 4, 12];
    if groups.len() == 5 && groups.iter().zip(lengths).all(|(g, n)| hex(g, n)) {
        return Some("(UUID)");
    }
    word.strip_prefix("0x").filter(|digits| hex(digits, 16)).map(|_| "(GUID)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tells_a_host_goes_and_the_rest_stays() {
        let r = Redact::new(&["node17.cluster.example", "node17"], Some("/home/ann"));
        for (text, said) in [
            ("NODE17: up, node17.cluster.example too", "(host): up, (host) too"),
            ("node170 and xnode17 are others", "node170 and xnode17 are others"),
            ("/home/ann/.cache/x, /home/anna", "~/.cache/x, /home/anna"),
            ("rxe0/1: fe80::a00:27ff:fe12:3456, active", "rxe0/1: (address), active"),
            ("fe80:0000:0000:0000:0a00:27ff:fe12:3456.", "(address)."),
            ("GID ::ffff:10.0.0.5: here", "GID (address): here"),
            ("10.1.2.3:7000 and [2001:db8::1]:7000", "(address) and [(address)]:7000"),
            ("d0 has 02:00:5e:10:00:01, 02-00-5E-10-00-01", "d0 has (MAC), (MAC)"),
            ("guid 0c42:a103:0000:1234, 0x0c42a10300001234", "guid (GUID), (GUID)"),
            ("GPU-1b2c3d4e-0000-1111-2222-333344445555", "(UUID)"),
            ("MIG-GPU-1b2c3d4e-0000-1111-2222-333344445555/1/0", "(UUID)/1/0"),
            ("MIG-1b2c3d4e-0000-1111-2222-333344445555", "(UUID)"),
            (
                "10.0.0.5-10.0.0.9, eth0:10.0.0.5, 10.0.0.5/24",
                "(address)-(address), eth0:(address), (address)/24",
            ),
            ("lo:127.0.0.1 and fe80::1%eth0", "lo:127.0.0.1 and (address)%eth0"),
            ("0200.5e10.0001 is enx02005e100001", "(MAC) is (MAC)"),
            ("gid fe800000000000000a0027fffe123456", "gid (GUID)"),
            (
                "topology 0123456789abcdef of 2026-01-31T23:59:59Z",
                "topology 0123456789abcdef of 2026-01-31T23:59:59Z",
            ),
            ("0000:17:00.0 -> 0000:98:00.0, 10de:2335", "0000:17:00.0 -> 0000:98:00.0, 10de:2335"),
            ("127.0.0.1, ::1 and 0.0.0.0; driver 580.95.05", "127.0.0.1, ::1 and 0.0.0.0; driver 580.95.05"),
            ("6.1.0-25-amd64 at 12:34:56Z, é", "6.1.0-25-amd64 at 12:34:56Z, é"),
            ("::", "::"),
            (": . -:", ": . -:"),
        ] {
            assert_eq!(r.of(text), said);
        }
        assert_eq!(Redact::default().of("node17 10.0.0.1"), "node17 10.0.0.1");
        assert_eq!(Redact::new(&["localhost", ""], Some("/")).of("localhost /x"), "localhost /x");
    }
}
