//! Which RDMA devices NCCL is told of, and in which order: pure choices over what sysfs and the settings say.
//!
//! NCCL names a device by its place in the list, and puts the lists of a host's ranks together. So the list is the same in all ranks of
//! a host, wherever their GPUs are: NCCL itself takes the devices that are near a GPU.

use std::ffi::c_int;
use std::fmt;

use pushgate_link_verbs::choice::{Candidate, Choice, Reach};
use pushgate_topology::Address;

/// The variable by which NCCL's own network is told which devices to take.
pub const HCA: &str = "NCCL_IB_HCA";
/// Variables that ask for several devices in place of one.
pub const MERGE_NICS: &str = "NCCL_IB_MERGE_NICS";
pub const MERGE_LEVEL: &str = "NCCL_NET_MERGE_LEVEL";
pub const FORCE_MERGE: &str = "NCCL_NET_FORCE_MERGE";

/// What [`HCA`] asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hca {
    text: String,
    /// All devices but those that are named.
    but: bool,
    /// Names are whole, and not beginnings.
    whole: bool,
    names: Vec<(String, Option<u8>)>,
}

impl Hca {
    /// Reads the variable as NCCL does: `[^][=]NAME[:PORT],...`. Nothing where it names nothing. The plugin takes port `port` of each
    /// device: a name with another port can't be honoured, and neither can a rail or a plane.
    pub fn parse(text: &str, port: u8) -> Result<Option<Hca>, String> {
        let (but, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (whole, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let refused = |why: String| Err(format!("{HCA}={text}: {why}"));
        let mut names = Vec::new();
        for entry in rest.split(',').filter(|entry| !entry.is_empty()) {
            let mut parts = entry.split(':');
            let name = parts.next().unwrap_or_default();
            if name.is_empty() {
                continue;
            }
            let asked = match parts.next().filter(|port| !port.is_empty()).map(str::parse::<u8>) {
                None => None,
                Some(Ok(asked)) if asked == port || but => Some(asked),
                Some(Ok(asked)) => {
                    return refused(format!(
                        "port {asked} of {name}, and the plugin takes port {port} of each device; set PUSHGATE_IB_PORT={asked}"
                    ));
                }
                Some(Err(_)) => return refused(format!("`{entry}` has no port's number")),
            };
            if parts.any(|part| !part.is_empty()) {
                return refused(format!(
                    "`{entry}` names a rail or a plane, and the plugin tells NCCL of neither"
                ));
            }
            names.push((name.to_owned(), asked));
        }
        Ok((!names.is_empty()).then(|| Hca { text: text.to_owned(), but, whole, names }))
    }

    /// Whether it lets this port of a device be taken.
    pub fn takes(&self, device: &str, port: u8) -> bool {
        let named = self.names.iter().any(|(name, asked)| {
            let fits = if self.whole { device == name } else { device.starts_with(&**name) };
            fits && asked.is_none_or(|asked| asked == port)
        });
        named != self.but
    }
}

impl fmt::Display for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HCA}={}", self.text)
    }
}

/// Ports of a host that may stand in one list, those that are preferred first, and why each other port is in none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    /// Each has at least one name. The second is for a host on which no device of the first can be opened.
    pub classes: Vec<Vec<String>>,
    pub left_out: Vec<(String, String)>,
}

impl Classes {
    /// Sorts the ports of a choice that [`Hca`] lets through: a list has ports that reach as much as each other, over the same transport,
    /// adapters or devices in software. A rank connects any of its devices to any of another rank's, so all of a list must reach each
    /// other.
    pub fn of(choice: &Choice, hca: Option<&Hca>) -> Classes {
        let worth = |c: &Candidate| (c.reach, c.transport, c.description.software);
        let mut found = Classes::default();
        let mut last: Option<&Candidate> = None;
        let mut rest: Vec<&Candidate> = Vec::new();
        for candidate in choice.ranked() {
            let d = &candidate.description;
            if let Some(hca) = hca.filter(|hca| !hca.takes(&d.device, d.port)) {
                found.left_out.push((d.device.clone(), hca.to_string()));
            } else if candidate.reach >= Reach::Down {
                found.left_out.push((d.device.clone(), candidate.reach.to_string()));
            } else {
                rest.push(candidate);
            }
        }
        // Speed ranks before transport, so ports of one class need not be neighbours.
        while let Some(first) = rest.first().copied() {
            let (class, others): (Vec<&Candidate>, _) = rest.iter().partition(|c| worth(c) == worth(first));
            if let Some(best) = last {
                found.left_out.extend(class.iter().map(|c| (c.description.device.clone(), unlike(c, best))));
            }
            last = last.or(Some(first));
            found.classes.push(class.into_iter().map(|c| c.description.device.clone()).collect());
            rest = others;
        }
        found
    }
}

/// Why a port stands in no list with the best one.
fn unlike(this: &Candidate, best: &Candidate) -> String {
    match () {
        () if this.reach != best.reach => this.reach.to_string(),
        () if this.description.software => "it is in software".into(),
        () => format!("{} is taken only where no device has {}", this.transport, best.transport),
    }
}

/// Brings devices into the order of their list: by the PCI address, so that two hosts of one kind list their devices alike whatever
/// their names are, then those without by name.
pub fn in_order(devices: &mut [(Option<Address>, String)]) {
    devices.sort_by(|(at_a, a), (at_b, b)| {
        let by_name = || (a.len(), a).cmp(&(b.len(), b));
        (at_a.is_none(), at_a).cmp(&(at_b.is_none(), at_b)).then_with(by_name)
    });
}

/// The function 0 of a PCI function's device, in a path or an address. NCCL takes devices with one path for ports of one adapter, which
/// share its link.
pub fn adapter(path: &str) -> String {
    match path.rsplit_once('.') {
        Some((device, _)) => format!("{device}.0"),
        None => path.to_owned(),
    }
}

/// For each of a list, how many before it are ports of the same adapter.
pub fn ports_before(paths: &[Option<&str>]) -> Vec<usize> {
    let adapter_of = |at: usize| paths[at].map(adapter);
    (0..paths.len())
        .map(|at| match adapter_of(at) {
            None => 0,
            own => (0..at).filter(|before| adapter_of(*before) == own).count(),
        })
        .collect()
}

/// Why a list can't stand beside what NCCL's variables ask for, if so: the plugin makes no device of several. `variable` gives a
/// variable's value; `before` is what [`ports_before`] says of the list.
pub fn merging(
    variable: impl Fn(&str) -> Option<String>,
    names: &[&str],
    before: &[usize],
) -> Option<String> {
    let value = |name: &str| variable(name).filter(|value| !value.is_empty());
    let level = value(MERGE_LEVEL).map(|level| level.to_uppercase());
    let second = before.iter().position(|before| *before > 0);
    let ports = second.map(|at| format!("{} and another port of its adapter", names[at]));
    let several = (names.len() > 1).then(|| format!("several of {}", names.join(", ")));
    let asked = [
        (MERGE_NICS, value(MERGE_NICS).filter(|value| value.trim() != "0"), &ports),
        (MERGE_LEVEL, level.clone().filter(|level| level == "PORT"), &ports),
        (MERGE_LEVEL, level.filter(|level| level != "PORT" && level != "LOC"), &several),
        (FORCE_MERGE, value(FORCE_MERGE), &several),
    ];
    asked.into_iter().find_map(|(name, value, which)| {
        let (value, which) = (value?, which.as_ref()?);
        Some(format!(
            "{name}={value} asks for one device in place of {which}, and the plugin tells NCCL of each as it is; unset {name}, or name \
             the devices to be used in PUSHGATE_IB_DEV"
        ))
    })
}

/// What two hosts must have alike of their lists: by it NCCL chooses how many channels lead to a peer, at each rank alone. `speeds` of a
/// list of RDMA devices in Mbit/s. NCCL takes the speed of a single device for the rate of its collectives alone, which its ranks agree
/// on.
pub fn compared(speeds: &[c_int]) -> String {
    match speeds {
        [_] => "1 RDMA device".into(),
        [first, rest @ ..] if rest.iter().all(|speed| speed == first) => {
            format!("{} RDMA devices of {first} Mbit/s", speeds.len())
        }
        _ => {
            let mut sorted = speeds.to_vec();
            sorted.sort_unstable();
            let each: Vec<_> = sorted.iter().map(c_int::to_string).collect();
            format!("{} RDMA devices of {} Mbit/s", speeds.len(), each.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use pushgate_link_verbs::choice::{Description, Wish};
    use pushgate_link_verbs::kinds::Protocol;

    use super::*;

    /// An InfiniBand adapter whose port is up.
    fn infiniband(device: &str, gigabits: f64) -> Description {
        Description {
            device: device.into(),
            port: 1,
            exists: true,
            protocol: Some(Protocol::Ib),
            infiniband: true,
            active: true,
            lid: 7,
            gigabits: Some(gigabits),
            ..Description::default()
        }
    }

    /// An iWARP adapter with an address.
    fn iwarp(device: &str) -> Description {
        Description {
            protocol: Some(Protocol::Iwarp),
            infiniband: false,
            addresses: vec!["10.0.0.1".parse().unwrap()],
            ..infiniband(device, 100.0)
        }
    }

    fn classes(all: impl IntoIterator<Item = Description>, hca: Option<&str>) -> Classes {
        let hca = hca.map(|text| Hca::parse(text, 1).unwrap().unwrap());
        Classes::of(&Choice::new(all, &Wish::default()), hca.as_ref())
    }

    #[test]
    fn a_list_has_the_devices_that_reach_as_much_over_one_transport_whatever_their_speed() {
        let down = |d| Description { active: false, ..d };
        let soft = |d| Description { software: true, ..d };
        let all = [
            infiniband("mlx5_0", 400.0),
            infiniband("mlx5_1", 400.0),
            infiniband("slow", 100.0),
            down(infiniband("dark", 400.0)),
            iwarp("cxgb4_0"),
            soft(iwarp("siw0")),
        ];
        let mut reversed = all.clone();
        reversed.reverse();
        for all in [all, reversed] {
            let Classes { classes, left_out } = classes(all, None);
            assert_eq!(classes, [&["mlx5_0", "mlx5_1", "slow"][..], &["cxgb4_0"], &["siw0"]]);
            let why = |name: &str| left_out.iter().find(|(device, _)| device == name).map(|(_, why)| &**why);
            assert_eq!(why("dark"), Some("its port is down"));
            assert_eq!(why("cxgb4_0"), Some("iWARP is taken only where no device has InfiniBand"));
            assert_eq!(why("siw0"), Some("it is in software"));
            assert_eq!((why("mlx5_0"), left_out.len()), (None, 3));
        }
        let none = classes([down(infiniband("dark", 1.0))], None);
        assert_eq!((none.classes.len(), none.left_out.len()), (0, 1));
    }

    #[test]
    fn nccls_choice_of_devices_is_read_as_nccl_reads_it() {
        let takes = |text: &str, names: &[&str]| -> Vec<bool> {
            let hca = Hca::parse(text, 1).unwrap().unwrap();
            names.iter().map(|name| hca.takes(name, 1)).collect()
        };
        let names = ["mlx5_1", "mlx5_10", "bnxt_re0"];
        assert_eq!(takes("mlx5_1", &names), [true, true, false]);
        assert_eq!(takes("=mlx5_1", &names), [true, false, false]);
        assert_eq!(takes("^mlx5_1", &names), [false, false, true]);
        assert_eq!(takes("^=mlx5_1,bnxt", &names), [false, true, true]);
        assert_eq!(takes("mlx5_10:1,bnxt_re0:1", &names), [false, true, true]);
        assert_eq!(takes("^=mlx5_1:2", &names), [true; 3], "of port 2 alone");
        for nothing in ["", "^", "=", ",", ":1"] {
            assert_eq!(Hca::parse(nothing, 1).unwrap(), None, "{nothing:?}");
        }
        let all = [infiniband("mlx5_1", 400.0), infiniband("mlx5_2", 400.0)];
        let Classes { classes, left_out } = classes(all, Some("=mlx5_2"));
        assert_eq!(
            (classes, left_out),
            (vec![vec!["mlx5_2".to_owned()]], vec![("mlx5_1".into(), "NCCL_IB_HCA==mlx5_2".into())])
        );
    }

    #[test]
    fn what_can_not_be_honoured_of_nccls_choice_is_refused_by_its_name() {
        for (text, says) in [
            ("mlx5_0:2", "NCCL_IB_HCA=mlx5_0:2: port 2 of mlx5_0, and the plugin takes port 1"),
            ("mlx5_0,mlx5_1:2", "set PUSHGATE_IB_PORT=2"),
            ("mlx5_0:one", "`mlx5_0:one` has no port's number"),
            ("mlx5_0:1:3", "names a rail or a plane"),
            ("mlx5_0::0:1", "names a rail or a plane"),
        ] {
            let why = Hca::parse(text, 1).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn a_list_is_in_the_order_of_pci_addresses_then_of_names_with_numbers() {
        let mut devices = [
            ("rxe10", None),
            ("mlx5_0", Some("0000:9a:00.0")),
            ("rxe9", None),
            ("mlx5_2", Some("0000:1b:00.1")),
            ("far", Some("10000:01:00.0")),
            ("mlx5_10", Some("0000:1b:00.0")),
        ]
        .map(|(name, at)| (at.map(|at| at.parse().unwrap()), name.to_owned()));
        in_order(&mut devices);
        assert_eq!(devices.map(|(_, name)| name), ["mlx5_10", "mlx5_2", "mlx5_0", "far", "rxe9", "rxe10"]);
    }

    #[test]
    fn ports_of_one_adapter_share_its_path_and_are_counted() {
        let paths = ["/a/0000:1b:00.0", "/a/0000:1b:00.1", "/b/0000:9a:00.0", "/a/0000:1b:00.2"].map(Some);
        assert_eq!(ports_before(&paths), [0, 1, 0, 2]);
        assert_eq!(ports_before(&[None, None]), [0, 0]);
        assert_eq!(adapter("/a/0000:1b:00.1"), "/a/0000:1b:00.0");
    }

    #[test]
    fn a_list_of_which_nccls_variables_want_one_device_is_refused_by_name_and_no_other() {
        let refused = |set: (&str, &str), before: &[usize]| {
            let variable = |name: &str| (name == set.0).then(|| set.1.to_owned());
            merging(variable, &["a", "b"][..before.len()], before)
        };
        for (set, of_apart, of_ports) in [
            (("NCCL_IB_MERGE_NICS", "0"), false, false),
            (("NCCL_IB_MERGE_NICS", "1"), false, true),
            (("NCCL_NET_MERGE_LEVEL", "LOC"), false, false),
            (("NCCL_NET_MERGE_LEVEL", "PORT"), false, true),
            (("NCCL_NET_MERGE_LEVEL", "PIX"), true, true),
            (("NCCL_NET_FORCE_MERGE", "a,b"), true, true),
            (("NCCL_IB_HCA", "a"), false, false),
        ] {
            for (before, expected) in [([0, 0], of_apart), ([0, 1], of_ports)] {
                let why = refused(set, &before);
                assert_eq!(why.is_some(), expected, "{set:?} {before:?}");
                assert!(why.is_none_or(|why| why.starts_with(&format!("{}={} asks", set.0, set.1))));
            }
            assert_eq!(refused(set, &[0]), None, "a single device has nothing to be merged with");
        }
    }

    #[test]
    fn lists_of_several_devices_are_compared_by_their_speeds_and_a_single_ones_speed_does_not_matter() {
        assert_eq!(compared(&[400_000; 8]), "8 RDMA devices of 400000 Mbit/s");
        assert_eq!(compared(&[200_000, 100_000]), compared(&[100_000, 200_000]));
        assert_ne!(compared(&[200_000, 100_000]), compared(&[200_000; 2]));
        assert_eq!(compared(&[100_000]), compared(&[400_000]));
        assert_ne!(compared(&[100_000]), compared(&[100_000; 2]));
    }
}
