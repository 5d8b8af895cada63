//! Data centre bridging of an interface, over rtnetlink. Numbers are those of rtnetlink.h and dcbnl.h.

use pushgate_door::netlink::{Refused, ask, attributes, u16_at};

use crate::readings::{Dcb, Read};

const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_ETS: u16 = 1;
const DCB_ATTR_IEEE_PFC: u16 = 2;
const DCB_ATTR_IEEE_APP_TABLE: u16 = 3;
const DCB_ATTR_IEEE_APP: u16 = 1;
/// EOPNOTSUPP: the driver has no such operation.
const NOT_SUPPORTED: i32 = 95;

/// Data centre bridging of an interface; absent: its driver has none.
pub fn dcb(interface: &str) -> Read<Dcb> {
    // struct dcbmsg, and the interface's name with its zero.
    let mut body = vec![0, DCB_CMD_IEEE_GET, 0, 0];
    body.extend((4 + interface.len() as u16 + 1).to_ne_bytes());
    body.extend(DCB_ATTR_IFNAME.to_ne_bytes());
    body.extend(interface.as_bytes());
    body.resize((body.len() + 1).next_multiple_of(4), 0);
    match ask(RTM_GETDCB, false, &body) {
        Ok(answers) => match answers.iter().find_map(|(_, body)| bridging(body)) {
            Some(dcb) => Read::Is(dcb),
            None => {
                Read::Unreadable(format!("the kernel's answer about DCB of {interface} has no IEEE part"))
            }
        },
        Err(Refused::Errno(NOT_SUPPORTED)) => Read::Absent,
        Err(refused) => Read::Unreadable(format!("DCB of {interface}: {}", refused)),
    }
}

/// A struct dcbmsg and its attributes.
fn bridging(body: &[u8]) -> Option<Dcb> {
    let (_, ieee) = attributes(body.get(4..)?).find(|(kind, _)| *kind == DCB_ATTR_IEEE)?;
    let mut dcb = Dcb::default();
    for (kind, value) in attributes(ieee) {
        match kind {
            // struct ieee_pfc: capability, enabled, ...
            DCB_ATTR_IEEE_PFC => dcb.pfc = value.get(1).copied(),
            // struct ieee_ets: three bytes, three times eight, then the class of each priority.
            DCB_ATTR_IEEE_ETS => dcb.prio_tc = value.get(27..35).and_then(|v| v.try_into().ok()),
            // struct dcb_app: selector, priority, protocol.
            DCB_ATTR_IEEE_APP_TABLE => dcb.apps.extend(
                attributes(value)
                    .filter(|(kind, _)| *kind == DCB_ATTR_IEEE_APP)
                    .filter_map(|(_, app)| Some((*app.first()?, *app.get(1)?, u16_at(app, 2)?))),
            ),
            _ => {}
        }
    }
    Some(dcb)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn dcb_is_read_out_of_nested_attributes() {
        let mut ets = vec![0u8; 59];
        ets[27..35].copy_from_slice(&[0, 0, 0, 3, 0, 0, 0, 0]);
        let app = [&[5u8, 3][..], &26u16.to_ne_bytes()].concat();
        let table = attribute(DCB_ATTR_IEEE_APP, &app);
        let ieee = [
            attribute(DCB_ATTR_IEEE_PFC, &[8, 0b1000, 0, 0]),
            attribute(DCB_ATTR_IEEE_ETS, &ets),
            attribute(DCB_ATTR_IEEE_APP_TABLE, &table),
        ]
        .concat();
        let body = [vec![0, 21, 0, 0], attribute(DCB_ATTR_IEEE | 0x8000, &ieee)].concat();
        let expected = Dcb { pfc: Some(8), prio_tc: Some([0, 0, 0, 3, 0, 0, 0, 0]), apps: vec![(5, 3, 26)] };
        assert_eq!(bridging(&body), Some(expected));
        // Cut anywhere, it is less or nothing.
        for end in 0..body.len() {
            let _ = bridging(&body[..end]);
        }
    }

    #[test]
    fn an_interface_without_bridging_and_one_that_is_not_there_are_told_apart() {
        assert_eq!(dcb("lo"), Read::Absent, "the loopback interface has no DCB");
        assert!(matches!(dcb("nosuch0"), Read::Unreadable(why) if why.contains("nosuch0")));
    }
}
