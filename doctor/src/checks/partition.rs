//! What InfiniBand fabrics ask of queue pairs: a partition, and global headers.

use pushgate_link_verbs::pkey::{FULL, place};

use super::rdma::{each_port_but_iwarp, is_ethernet, wrong};
use crate::finding::Finding;
use crate::readings::{Read, Readings};

/// A queue pair has the first key of its port's table, or the one that `pkey` names. Two limited members of a partition do not hear each
/// other (IB specification, 10.9.3).
pub fn pkey(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, _, port| {
        if is_ethernet(port) {
            return Finding::not_applicable(subject, "not InfiniBand");
        }
        let keys = port.pkeys.iter().map(|(_, key)| format!("{key:#06x}")).collect::<Vec<_>>().join(", ");
        let taken = match r.wants.pkey {
            Some(wanted) => place(&port.pkeys, wanted),
            None => Some(0),
        };
        let key = taken.and_then(|at| port.pkeys.iter().find(|(place, _)| *place == at)).map(|(_, key)| *key);
        match (key, r.wants.pkey) {
            (Some(key), _) if key & FULL != 0 => {
                Finding::passed(subject, format!("{key:#06x}: a full member (all keys: {keys})"))
            }
            (Some(key), _) => Finding::warned(
                subject,
                format!("{key:#06x}: a limited member, which hears no other limited one (all keys: {keys})"),
                "have the subnet manager make each host a full member of one partition, and name its key by pkey",
            ),
            (None, Some(wanted)) => wrong(
                r,
                subject,
                format!(
                    "pkey is {wanted:#06x}, and the port has {}",
                    if keys.is_empty() { "none" } else { &keys }
                ),
                "name a key that the port has, or have the subnet manager give it this one",
            ),
            (None, None) => wrong(
                r,
                subject,
                format!(
                    "no partition key at the first place of the table (keys: {})",
                    if keys.is_empty() { "none" } else { &keys }
                ),
                "name one of its keys by pkey; without any the subnet manager has not set the port up",
            ),
        }
    })
}

/// A port without a LID, as virtual functions have, routes by GID (`IBV_QPF_GRH_REQUIRED`): queue pairs then carry a global header.
pub fn global(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, _, port| {
        if is_ethernet(port) {
            return Finding::not_applicable(subject, "not InfiniBand: RoCE has a header of IP");
        }
        match &port.verbs {
            Read::Is(state) if !state.global => {
                Finding::passed(subject, format!("not asked for: LID {:#x} leads there", state.lid))
            }
            Read::Is(_) if port.gids.is_empty() => wrong(
                r,
                subject,
                "the port asks for global headers, and has no GID to put into them",
                "have the subnet manager give the port its GID; a virtual function has one once its GUID is set (ip link set \
                 dev INTERFACE vf N node_guid and port_guid)",
            ),
            Read::Is(_) => Finding::passed(
                subject,
                "the port asks for global headers, 40 bytes a packet, and queue pairs carry them",
            ),
            Read::Absent => Finding::not_applicable(subject, "libibverbs was not asked"),
            Read::Unreadable(why) => Finding::not_applicable(subject, why),
        }
    })
}
