//! The variables of NCCL's own networks that users bring: those that mean something to the plugin are heeded where the setting of ours
//! for that is at its default, and of each other one the log says once that it does nothing here, and what to set instead.
//! docs/nccl.md has the table.

use std::sync::Once;

use pushgate::settings::{Key, Origin, PluginSettings};
use pushgate_door::addresses::Family;
use pushgate_door::addresses::Names;

use crate::devices::{HCA, MERGE_NICS};
use crate::log;

/// The interfaces that NCCL's sockets take.
const IFNAME: &str = "NCCL_SOCKET_IFNAME";
/// The family of their addresses.
const FAMILY: &str = "NCCL_SOCKET_FAMILY";
/// Which kind of device NCCL's kernels drive, if a number says so.
const GIN_TYPE: &str = "NCCL_GIN_TYPE";
/// The kind that NCCL's proxy drives by calls of the RMA table. (NCCL's `NCCL_NET_DEVICE_GIN_PROXY`.)
const BY_PROXY: i64 = 2;
/// Variables that stand for a setting of ours, and the setting. Values are NCCL's numbers.
const SETTINGS: [(&str, &str); 5] = [
    ("NCCL_IB_GID_INDEX", "gid-index"),
    ("NCCL_IB_TC", "traffic-class"),
    ("NCCL_IB_SL", "service-level"),
    ("NCCL_IB_TIMEOUT", "ack-timeout"),
    ("NCCL_IB_RETRY_CNT", "retry-count"),
];
/// Variables that do nothing here, and what to do instead.
const NOTHING: [(&str, &str); 10] = [
    ("NCCL_IB_DISABLE", "set PUSHGATE_QP=tcp on all ranks to do without RDMA"),
    ("NCCL_IB_QPS_PER_CONNECTION", "a connection has one queue pair"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", "a connection has one queue pair"),
    ("NCCL_IB_ADAPTIVE_ROUTING", "set PUSHGATE_WRITE_ORDER where the fabric may change the order of writes"),
    (
        "NCCL_IB_PKEY",
        "set PUSHGATE_PKEY to the partition's key, such as 0x8001, which each host may have at another index",
    ),
    ("NCCL_IB_ROCE_VERSION_NUM", "set PUSHGATE_GID_INDEX to choose another entry of the GID table"),
    ("NCCL_IB_ADDR_FAMILY", "set PUSHGATE_GID_INDEX to choose another entry of the GID table"),
    ("NCCL_IB_ADDR_RANGE", "set PUSHGATE_GID_INDEX to choose another entry of the GID table"),
    ("NCCL_SOCKET_NTHREADS", "set PUSHGATE_NET_TCP_THREADS"),
    ("NCCL_NSOCKS_PERTHREAD", "set PUSHGATE_TCP_STREAMS"),
];

/// What the variables ask of the addresses at which a process listens.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    pub names: Option<Names>,
    pub family: Option<Family>,
}

/// Takes in the variables of this process, and tells NCCL's log, once.
pub fn heed(settings: &mut PluginSettings) -> Sockets {
    let mut all: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, value)| name.starts_with("NCCL_") && !value.is_empty())
        .collect();
    all.sort();
    let (sockets, told) = take(settings, &all);
    static ONCE: Once = Once::new();
    ONCE.call_once(|| told.iter().for_each(|line| log::init(line)));
    sockets
}

/// Takes in these variables; returns lines for the log besides.
fn take(settings: &mut PluginSettings, all: &[(String, String)]) -> (Sockets, Vec<String>) {
    let (mut sockets, mut told) = (Sockets::default(), Vec::new());
    for (name, value) in all {
        let value = value.trim();
        let no_effect = |why: &str| format!("{name}={value} has no effect: {why}");
        let ours = |setting: &str| {
            let key = Key::of(setting).expect("a setting");
            let set = settings.origin(key) != Origin::Default;
            set.then(|| format!("{}={} goes before it", key.variable(), settings.text(key)))
        };
        let line = match name.as_str() {
            IFNAME | FAMILY if ours("host").is_some() => no_effect(&ours("host").expect("it is set")),
            IFNAME => match Names::parse(IFNAME, value) {
                Some(names) => {
                    sockets.names = Some(names);
                    format!("{name}={value} chooses the interfaces at which connections arrive")
                }
                None => no_effect("it names no interface"),
            },
            FAMILY => match value {
                "AF_INET" => {
                    sockets.family = Some(Family::V4);
                    format!("{name}={value}: connections arrive at IPv4 addresses")
                }
                "AF_INET6" => {
                    sockets.family = Some(Family::V6);
                    format!("{name}={value}: connections arrive at IPv6 addresses")
                }
                _ => no_effect("expected AF_INET or AF_INET6"),
            },
            HCA | MERGE_NICS => continue,
            GIN_TYPE if number(value) == Some(BY_PROXY) && ours("net-rma").is_none() => {
                let origin = Origin::Variable(name.clone());
                settings.set_from("net-rma", "true", origin).expect("a switch takes true");
                format!("{name}={value} asks for NCCL's RMA table, which is offered")
            }
            name_of => {
                let setting = SETTINGS.iter().find(|(variable, _)| *variable == name_of).map(|(_, of)| *of);
                let nothing = NOTHING.iter().find(|(variable, _)| *variable == name_of).map(|(_, why)| *why);
                match (setting, nothing) {
                    (Some(setting), _) => match ours(setting) {
                        Some(why) => no_effect(&why),
                        None => match number(value) {
                            // NCCL's word for its own choice.
                            Some(n) if n < 0 => continue,
                            Some(n) => {
                                let origin = Origin::Variable(name.clone());
                                match settings.set_from(setting, &n.to_string(), origin) {
                                    Ok(()) => format!("{name}={value} is taken for {setting}"),
                                    Err(e) => no_effect(&e.to_string()),
                                }
                            }
                            None => no_effect("it is no number"),
                        },
                    },
                    (None, Some(_)) if name_of == "NCCL_IB_DISABLE" && number(value) == Some(0) => continue,
                    (None, Some(instead)) => no_effect(instead),
                    (None, None)
                        if name_of.starts_with("NCCL_IB_") || name_of.starts_with("NCCL_SOCKET_") =>
                    {
                        no_effect("it is of NCCL's own network")
                    }
                    // NCCL's own.
                    (None, None) => continue,
                }
            }
        };
        told.push(line);
    }
    (sockets, told)
}

/// A number as NCCL reads it: decimal, or hexadecimal with 0x before it.
fn number(text: &str) -> Option<i64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use pushgate::settings::AutoOr;

    use super::*;

    fn taken(settings: &mut PluginSettings, all: &[(&str, &str)]) -> (Sockets, Vec<String>) {
        let all: Vec<_> = all.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        take(settings, &all)
    }

    #[test]
    fn numbers_of_nccls_own_network_are_taken_where_no_setting_of_ours_is_set() {
        let mut settings = PluginSettings::default();
        settings.set("service-level", "2").unwrap();
        let all = [
            ("NCCL_IB_GID_INDEX", "3"),
            ("NCCL_IB_RETRY_CNT", "5"),
            ("NCCL_IB_SL", "4"),
            ("NCCL_IB_TC", "0x6a"),
            ("NCCL_IB_TIMEOUT", "40"),
        ];
        let (_, told) = taken(&mut settings, &all);
        let s = &settings;
        assert_eq!(s.gid_index, AutoOr::Is(3));
        assert_eq!((s.service_level, s.traffic_class), (AutoOr::Is(2), AutoOr::Is(106)));
        assert_eq!((s.retry_count, s.ack_timeout), (5, 14));
        assert_eq!(told[0], "NCCL_IB_GID_INDEX=3 is taken for gid-index");
        assert_eq!(told[2], "NCCL_IB_SL=4 has no effect: PUSHGATE_SERVICE_LEVEL=2 goes before it");
        let says = "NCCL_IB_TIMEOUT=40 has no effect: invalid ack-timeout `40` (from NCCL_IB_TIMEOUT): expected 1 to 31";
        assert!(told[4].starts_with(says), "{}", told[4]);
        let (_, told) = taken(&mut PluginSettings::default(), &[("NCCL_IB_GID_INDEX", "-1")]);
        assert!(told.is_empty(), "{told:?}");
    }

    #[test]
    fn interfaces_and_family_of_nccls_sockets_choose_addresses_where_host_is_not_set() {
        let all = [("NCCL_SOCKET_FAMILY", "AF_INET6"), ("NCCL_SOCKET_IFNAME", "^docker,lo")];
        let (sockets, _) = taken(&mut PluginSettings::default(), &all);
        let names = sockets.names.unwrap();
        assert!(names.takes("eth0") && !names.takes("docker0"));
        assert_eq!(sockets.family, Some(Family::V6));
        let mut settings = PluginSettings::default();
        settings.set("host", "10.0.0.1").unwrap();
        let (sockets, told) = taken(&mut settings, &all);
        assert_eq!(sockets, Sockets::default());
        assert!(
            told.iter().all(|line| line.ends_with("has no effect: PUSHGATE_HOST=10.0.0.1 goes before it")),
            "{told:?}"
        );
    }

    #[test]
    fn a_job_that_asks_for_nccls_proxy_is_offered_the_rma_table_unless_the_setting_says_no() {
        let offered = |set: Option<&str>, value: &str| {
            let mut settings = PluginSettings::default();
            set.into_iter().for_each(|set| settings.set("net-rma", set).unwrap());
            let (_, told) = taken(&mut settings, &[("NCCL_GIN_TYPE", value)]);
            (settings.net_rma, told.len())
        };
        assert_eq!((offered(None, "2"), offered(None, "0x2")), ((true, 1), (true, 1)));
        assert_eq!((offered(Some("false"), "2"), offered(Some("true"), "2")), ((false, 0), (true, 0)));
        for other in ["3", "-1", "0", "proxy"] {
            assert_eq!(offered(None, other), (false, 0), "{other}");
        }
    }

    #[test]
    fn a_variable_that_does_nothing_is_named_with_what_to_set_instead() {
        let says = |name: &str, value: &str| taken(&mut PluginSettings::default(), &[(name, value)]).1.pop();
        assert!(
            says("NCCL_IB_DISABLE", "1")
                .unwrap()
                .ends_with("set PUSHGATE_QP=tcp on all ranks to do without RDMA")
        );
        assert_eq!(says("NCCL_IB_DISABLE", "0"), None);
        assert!(says("NCCL_SOCKET_NTHREADS", "4").unwrap().contains("PUSHGATE_NET_TCP_THREADS"));
        assert!(says("NCCL_IB_PKEY", "1").unwrap().contains("PUSHGATE_PKEY"));
        assert!(
            says("NCCL_IB_RETURN_ASYNC_EVENTS", "1")
                .unwrap()
                .ends_with("has no effect: it is of NCCL's own network")
        );
        // NCCL reads these itself, and what asks for devices is taken where devices are chosen.
        for name in
            ["NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_IB_MERGE_NICS"]
        {
            assert_eq!(says(name, "1"), None, "{name}");
        }
    }
}
