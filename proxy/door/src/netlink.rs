//! Questions over rtnetlink, and one of them: the IP addresses of interfaces. Numbers are those of linux/netlink.h,
//! rtnetlink.h and if_addr.h. A question is a read, which needs no rights.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with, sockopt,
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const FLAGS: u16 = 0xc000;

/// Why a question got no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The kernel's errno.
    Errno(i32),
    /// The kernel could not be asked, or what it said makes no sense.
    Other(String),
}

/// The number of two bytes at a place, in this host's order; none beyond the end.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The number of four bytes at a place, in this host's order; none beyond the end.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
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
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & !FLAGS;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// Asks the kernel, and takes answers, each with its type and body, until there is no more. `kind` is the question's type, `dump` asks for all
/// objects, `body` follows the header.
///
/// # Errors
/// Where the kernel refuses, does not answer within 2 s, or its answer makes no sense.
pub fn ask(kind: u16, dump: bool, body: &[u8]) -> Result<Vec<(u16, Vec<u8>)>, Refused> {
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

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refused::Errno(errno) => {
                write!(f, "netlink refuses: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Refused::Other(why) => f.write_str(why),
        }
    }
}

/// The IP addresses of this network namespace's interfaces, by index.
///
/// # Errors
/// A sentence, where the kernel can't be asked.
pub fn addresses() -> Result<HashMap<u32, Vec<IpAddr>>, String> {
    // struct ifaddrmsg of any family.
    let answers = ask(RTM_GETADDR, true, &[0; 8]).map_err(|e| e.to_string())?;
    let mut all = HashMap::<u32, Vec<IpAddr>>::new();
    for (kind, body) in &answers {
        if let (RTM_NEWADDR, Some((index, ip))) = (*kind, ip_of(body)) {
            all.entry(index).or_default().push(ip);
        }
    }
    Ok(all)
}

/// A struct ifaddrmsg and its attributes: the interface's index, and the address.
pub fn ip_of(body: &[u8]) -> Option<(u32, IpAddr)> {
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

/// The IP addresses of the interface of this name; none where it has none or the kernel can't be asked.
pub fn addresses_of(interface: &str) -> Vec<IpAddr> {
    let index = std::fs::read_to_string(format!("/sys/class/net/{interface}/ifindex"));
    let index = index.ok().and_then(|text| text.trim().parse::<u32>().ok());
    index.and_then(|index| addresses().ok()?.remove(&index)).unwrap_or_default()
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
        assert_eq!(ip_of(&[0; 7]), None);
        assert_eq!(ip_of(&[vec![2, 24, 0, 0, 7, 0, 0, 0], attribute(IFA_LOCAL, &[1, 2, 3])].concat()), None);
    }

    #[test]
    fn the_loopback_interface_is_found_by_the_kernel_itself() {
        // A namespace may have it down and without an address; the answer itself must make sense.
        let of_lo = addresses_of("lo");
        assert!(of_lo.is_empty() || of_lo.iter().any(IpAddr::is_loopback), "{of_lo:?}");
        assert!(addresses().is_ok() && addresses_of("nosuch0").is_empty());
    }
}
