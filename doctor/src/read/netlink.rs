//! Two questions over rtnetlink: the addresses of interfaces, and their data centre bridging.
//! Numbers are those of linux/netlink.h, rtnetlink.h, if_addr.h and dcbnl.h. Both are reads, which
//! need no rights.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with, sockopt,
};

use crate::readings::{Dcb, Read};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
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
/// NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const FLAGS: u16 = 0xc000;

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
enum Refused {
    /// The kernel's errno.
    Errno(i32),
    /// It could not be asked, or what it said makes no sense.
    Other(String),
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    message.extend((16 + body.len() as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // A sequence number of our own: one question for each socket.
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    message
}

/// The messages of one datagram: type and body. Ends at what is no whole message.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32_at(bytes, 0)? as usize;
        let kind = u16_at(bytes, 4)?;
        let body = bytes.get(16..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, body))
    })
}

/// The attributes of a body: type and value. Ends at what is no whole attribute.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & !FLAGS;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// Asks, and takes answers until there is no more.
fn ask(kind: u16, dump: bool, body: &[u8]) -> Result<Vec<(u16, Vec<u8>)>, Refused> {
    let other = |what: &'static str| {
        move |e: rustix::io::Errno| Refused::Other(format!("netlink can't be asked: {what}: {e}"))
    };
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)
        .map_err(other("socket"))?;
    // The kernel answers at once; nobody waits for one that does not.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_secs(2)))
        .map_err(other("setsockopt"))?;
    let message = request(kind, if dump { NLM_F_DUMP } else { 0 }, body);
    sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).map_err(other("sendto"))?;
    let mut answers = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty()).map_err(other("recv"))?;
        let mut any = false;
        for (kind, body) in messages(&buffer[..length]) {
            any = true;
            match kind {
                NLMSG_DONE => return Ok(answers),
                NLMSG_ERROR => match u32_at(body, 0).map(|code| (code as i32).wrapping_neg()) {
                    Some(0) => return Ok(answers),
                    Some(errno) => return Err(Refused::Errno(errno)),
                    None => return Err(Refused::Other("netlink's answer is cut short".into())),
                },
                _ => answers.push((kind, body.to_vec())),
            }
        }
        if !any {
            return Err(Refused::Other("netlink's answer makes no sense".into()));
        }
        if !dump {
            return Ok(answers);
        }
    }
}

fn sentence(refused: &Refused) -> String {
    match refused {
        Refused::Errno(errno) => format!("netlink refuses: {}", std::io::Error::from_raw_os_error(*errno)),
        Refused::Other(why) => why.clone(),
    }
}

/// The IP addresses of this network namespace's interfaces, by index.
pub fn addresses() -> Result<HashMap<u32, Vec<IpAddr>>, String> {
    // struct ifaddrmsg of any family.
    let answers = ask(RTM_GETADDR, true, &[0; 8]).map_err(|e| sentence(&e))?;
    let mut all = HashMap::<u32, Vec<IpAddr>>::new();
    for (kind, body) in &answers {
        if let (RTM_NEWADDR, Some((index, ip))) = (*kind, address(body)) {
            all.entry(index).or_default().push(ip);
        }
    }
    Ok(all)
}

/// A struct ifaddrmsg and its attributes.
fn address(body: &[u8]) -> Option<(u32, IpAddr)> {
    let index = u32_at(body, 4)?;
    let of =
        |wanted| attributes(body.get(8..).unwrap_or(&[])).find(|(kind, _)| *kind == wanted).map(|(_, v)| v);
    // On a link between two points ADDRESS is the other one's.
    let value = of(IFA_LOCAL).or_else(|| of(IFA_ADDRESS))?;
    let ip = match value.len() {
        4 => Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?).into(),
        16 => Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into(),
        _ => return None,
    };
    Some((index, ip))
}

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
        Err(refused) => Read::Unreadable(format!("DCB of {interface}: {}", sentence(&refused))),
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
    fn lengths_that_lie_end_the_walk() {
        for length in [0u32, 3, 15, 16, 17, 400, u32::MAX] {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend([0; 28]);
            assert!(messages(&bytes).count() <= 2);
        }
        for length in [0u16, 3, 5, 40, u16::MAX] {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend([0; 20]);
            assert!(attributes(&bytes).count() <= 6);
        }
        assert_eq!(address(&[0; 7]), None);
        assert_eq!(
            address(&[vec![2, 24, 0, 0, 7, 0, 0, 0], attribute(IFA_LOCAL, &[1, 2, 3])].concat()),
            None
        );
    }

    #[test]
    fn the_loopback_interface_is_found_by_the_kernel_itself() {
        let Read::Is(index) = super::super::files::number::<u32>("/sys/class/net/lo/ifindex".as_ref()) else {
            panic!("no loopback interface")
        };
        let all = addresses().unwrap();
        // A namespace may have it down and without an address; the answer itself must make sense.
        if let Some(of_lo) = all.get(&index) {
            assert!(of_lo.iter().any(IpAddr::is_loopback), "{of_lo:?}");
        }
        assert_eq!(dcb("lo"), Read::Absent, "the loopback interface has no DCB");
        assert!(matches!(dcb("nosuch0"), Read::Unreadable(why) if why.contains("nosuch0")));
    }
}
