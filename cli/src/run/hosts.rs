//! Which hosts a run has, and which ranks each of them gets.

use std::ops::Range;

use pushgate::{Error, MAX_RANKS};

/// A host as it was named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The name that ssh takes, perhaps with a user.
    pub name: String,
    /// Most ranks of it, where that was said.
    slots: Option<u32>,
}

impl Host {
    /// Reads `host`, `user@host`, `host:slots` or `[address]:slots`. An error says what is wrong.
    fn parse(text: &str) -> Result<Host, String> {
        let (name, slots) = match text.strip_prefix('[') {
            Some(rest) => {
                let (name, rest) = rest.split_once(']').ok_or("it has a [ without a ]")?;
                let slots = rest.strip_prefix(':');
                if slots.is_none() && !rest.is_empty() {
                    return Err(format!("`{rest}` follows its ]"));
                }
                (name, slots)
            }
            None => match text.split_once(':') {
                Some((_, rest)) if rest.contains(':') => return Err("an IPv6 address needs [ and ]".into()),
                Some((name, slots)) => (name, Some(slots)),
                None => (text, None),
            },
        };
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-._@:%".contains(c);
        if name.is_empty() || name.starts_with('-') || !name.chars().all(allowed) {
            return Err(format!("`{name}` is no name of a host"));
        }
        let slots = slots
            .map(|slots| count(slots).ok_or(format!("`{slots}` is no number of ranks, 1 to {MAX_RANKS}")));
        Ok(Host { name: name.into(), slots: slots.transpose()? })
    }

    /// The host without a user, as other hosts reach it.
    pub fn address(&self) -> String {
        let address = self.name.rsplit_once('@').map_or(&*self.name, |(_, address)| address);
        if address.contains(':') { format!("[{address}]") } else { address.into() }
    }
}

fn count(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n| (1..=MAX_RANKS).contains(n))
}

/// The hosts of a list `a,b:4,user@c`. A host that is named twice has the slots of both.
pub fn of_list(list: &str) -> Result<Vec<Host>, Error> {
    let hosts = list.split(',').map(|text| {
        let wrong = |why| Error::flag("hosts", list, format!("hosts as in a,b:4,user@c ({why})"));
        Host::parse(text.trim()).map_err(wrong)
    });
    merge(hosts.collect::<Result<_, _>>()?, "hosts")
}

/// The words of a line of a file of hosts, as Open MPI has them: a host, then `key=value` with or without blanks around the `=`.
fn words(line: &str) -> impl Iterator<Item = String> {
    let line = line.split('#').next().unwrap_or_default();
    let joined = line.split('=').map(str::trim).collect::<Vec<_>>().join("=");
    joined.split_whitespace().map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// The hosts of a file: one a line, as in a list or as `host slots=4`; `#` begins a comment. `max_slots=8` is read and not
/// needed: a host has as many ranks as it has slots.
pub fn of_file(text: &str, name: &str) -> Result<Vec<Host>, Error> {
    let mut hosts = Vec::new();
    // Editors of Windows put a byte-order mark in front.
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let mut words = words(line);
        let Some(first) = words.next() else { continue };
        let parsed = Host::parse(&first).and_then(|mut host| {
            for word in words {
                let wrong = || format!("`{word}` is not slots=N, 1 to {MAX_RANKS}");
                match word.split_once('=').ok_or_else(wrong)? {
                    ("slots", "0") => return Err("a host with slots=0 has no rank: take its line out".into()),
                    ("slots", slots) if host.slots.is_none() => {
                        host.slots = Some(count(slots).ok_or_else(wrong)?)
                    }
                    ("max_slots" | "max-slots", most) if count(most).is_some() => {}
                    _ => return Err(wrong()),
                }
            }
            Ok(host)
        });
        let allowed = "lines as in: node1 slots=4";
        hosts.push(parsed.map_err(|why| {
            Error::flag("hostfile", format!("{name}:{}", number + 1), format!("{allowed} ({why})"))
        })?);
    }
    if hosts.is_empty() {
        return Err(Error::flag("hostfile", name, "a file that names a host"));
    }
    merge(hosts, "hostfile")
}

fn merge(all: Vec<Host>, flag: &str) -> Result<Vec<Host>, Error> {
    let mut hosts: Vec<Host> = Vec::new();
    for host in all {
        match hosts.iter_mut().find(|other| other.name == host.name) {
            // One that stands there again has as many ranks as it stands there.
            Some(other) => other.slots = Some(other.slots.unwrap_or(1) + host.slots.unwrap_or(1)),
            None => hosts.push(host),
        }
    }
    if hosts.len() > MAX_RANKS as usize {
        return Err(Error::flag(flag, format!("{} hosts", hosts.len()), format!("at most {MAX_RANKS}")));
    }
    Ok(hosts)
}

/// The ranks of each host, in blocks.
///
/// Where some host says how many ranks it takes, one that does not say takes one. Where none says it, `ranks` are spread
/// evenly, the first hosts with one more.
pub fn share(hosts: &[Host], ranks: Option<u32>) -> Result<Vec<Range<u32>>, Error> {
    let count = hosts.len() as u32;
    let slots: Vec<u32> = match ranks {
        Some(ranks) if hosts.iter().all(|host| host.slots.is_none()) => {
            (0..count).map(|at| ranks / count + u32::from(at < ranks % count)).collect()
        }
        _ => hosts.iter().map(|host| host.slots.unwrap_or(1)).collect(),
    };
    let all: u32 = slots.iter().sum();
    let ranks = ranks.unwrap_or(all);
    if ranks > all {
        let allowed =
            format!("at most {all}, the ranks that these hosts take: give them more, as in host:{ranks}");
        return Err(Error::flag("ranks", ranks, allowed));
    }
    if ranks > MAX_RANKS {
        return Err(Error::flag("ranks", ranks, format!("1 to {MAX_RANKS}")));
    }
    let mut begin = 0;
    Ok(slots
        .into_iter()
        .map(|slots| {
            let range = begin..ranks.min(begin + slots);
            begin = range.end;
            range
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use pushgate_tests::fuzz::{depth, fuzz, kind};

    use super::*;

    fn shown(hosts: &[Host]) -> Vec<String> {
        hosts
            .iter()
            .map(|h| format!("{} {}", h.address(), h.slots.map_or("-".into(), |n| n.to_string())))
            .collect()
    }

    #[test]
    fn hosts_are_named_with_users_and_slots() {
        let list = of_list("a, b:4,me@c,[fd00::1]:2,[fd00::2],10.0.0.1:3,b").unwrap();
        assert_eq!(shown(&list), ["a -", "b 5", "c -", "[fd00::1] 2", "[fd00::2] -", "10.0.0.1 3"]);
        assert_eq!(list[2].name, "me@c");
        let file = of_file("# ours\nn1 slots=2\n\nn2:3 # here\n n3\nn3\n", "f").unwrap();
        assert_eq!(shown(&file), ["n1 2", "n2 3", "n3 2"]);
        let open_mpi =
            of_file("\u{feff}n1 slots = 2 max_slots=4\r\nn2 max-slots= 8 slots =1\n", "f").unwrap();
        assert_eq!(shown(&open_mpi), ["n1 2", "n2 1"]);
    }

    #[test]
    fn p8_what_is_no_host_is_refused() {
        for list in [
            "",
            "a,",
            "-oProxyCommand=x",
            "a b",
            "a:0",
            "a:257",
            "a:x",
            "fd00::1",
            "[a",
            "[a]b",
            "$(x)",
            "a;b",
        ] {
            let e = of_list(list).unwrap_err();
            assert!(e.is_config() && e.to_string().contains("(from --hosts)"), "{list}: {e}");
        }
        for (text, says) in [
            ("", "a file that names a host"),
            ("# n1", "a file that names a host"),
            ("n1\nn2 slot=3", "`f:2`"),
            ("n1:2 slots=3", "`f:1`"),
            ("n1 slots=0", "a host with slots=0 has no rank"),
            ("n1 slots=2 slots=2", "`slots=2` is not slots=N"),
            ("n1 max_slots=many", "`max_slots=many` is not slots=N"),
        ] {
            let e = of_file(text, "f").unwrap_err().to_string();
            assert!(e.contains(says) && e.contains("--hostfile"), "{text}: {e}");
        }
    }

    #[test]
    fn ranks_fill_hosts_in_blocks() {
        let of = |list: &str, ranks| {
            share(&of_list(list).unwrap(), ranks)
                .map(|all| all.into_iter().map(|r| r.len()).collect::<Vec<_>>())
        };
        assert_eq!(of("a,b,c", None).unwrap(), [1, 1, 1]);
        assert_eq!(of("a,b,c", Some(8)).unwrap(), [3, 3, 2]);
        assert_eq!(of("a:2,b", None).unwrap(), [2, 1]);
        assert_eq!(of("a:4,b:4", Some(5)).unwrap(), [4, 1]);
        assert_eq!(of("a:4,b:4", Some(3)).unwrap(), [3, 0]);
        let e = of("a:2,b", Some(4)).unwrap_err().to_string();
        assert!(e.starts_with("invalid ranks `4` (from --ranks): expected at most 3"), "{e}");
        assert!(of("a:256,b:256", None).is_err());
        let blocks = share(&of_list("a:2,b:2").unwrap(), None).unwrap();
        assert_eq!(blocks, [0..2, 2..4]);
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_list_or_file_of_hosts_makes_its_reader_panic_and_names_hold_nothing_that_a_shell_reads() {
        let texts = [
            "a, b:4,me@c,[fd00::1]:2,[fd00::2],10.0.0.1:3,b",
            "# ours\nn1 slots=2\n\nn2:3 # here\n n3\nn3\n",
        ];
        let seeds = texts.map(|text| text.as_bytes().to_vec());
        fuzz(&seeds, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let one = |hosts: Result<Vec<Host>, Error>| match hosts {
                Ok(hosts) => {
                    assert!((1..=MAX_RANKS as usize).contains(&hosts.len()));
                    for name in hosts.iter().map(|host| &host.name) {
                        assert!(
                            !name.contains([' ', ';', '$', '\'', '"', '`', '\0']) && !name.starts_with('-'),
                            "{name:?}"
                        );
                    }
                    let shared = share(&hosts, Some(7)).is_ok() as u64;
                    depth(hosts.len()) << 1 | shared
                }
                Err(e) => kind(e),
            };
            one(of_list(&text)) ^ one(of_file(&text, "f")).rotate_left(1)
        });
    }
}
