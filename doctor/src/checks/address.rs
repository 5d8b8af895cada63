//! The addresses at which other hosts reach this one.

use pushgate_door::addresses::{REMEDY, Wish, choose};

use crate::finding::Finding;
use crate::readings::{QueuePairs, Read, Readings};

/// Queue pairs over TCP take an address that other hosts reach, and ranks with queue pairs over RDMA meet over TCP. Without the setting
/// `host` all addresses of the host's interfaces are offered, and each peer takes one that it reaches.
pub fn reach(r: &Readings) -> Vec<Finding> {
    // What the settings ask for by name fails without an address; ranks of one host need none.
    let wrong = |reading: String| match r.wants.verbs || r.wants.qp == QueuePairs::Tcp {
        true => Finding::failed("", reading, REMEDY),
        false => Finding::warned(
            "",
            format!("{reading}; queue pairs are local, to ranks of this host alone"),
            REMEDY,
        ),
    };
    let wish = Wish { host: r.wants.host.as_deref().unwrap_or("auto"), ..Wish::default() };
    vec![match &r.host.interfaces {
        _ if r.wants.qp == QueuePairs::Local => Finding::not_applicable("", "qp = local needs no address"),
        Read::Absent => Finding::not_applicable("", "not looked at"),
        Read::Unreadable(why) => Finding::warned("", why, REMEDY),
        Read::Is(all) => match choose(all, &wish, |_| None) {
            Err(why) => wrong(why),
            Ok(offered) if offered.only_here.is_some() => wrong(offered.to_string()),
            Ok(offered) => match offered.at.iter().find(|at| !at.interface.is_empty()) {
                Some(_) => Finding::passed("", format!("others connect to this host at {offered}")),
                None => wrong(format!("host is {offered}, and no interface has that address")),
            },
        },
    }]
}
