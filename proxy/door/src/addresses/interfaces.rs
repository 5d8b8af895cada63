//! The network interfaces of this network namespace with their addresses, as rtnetlink tells them. Numbers are those of
//! rtnetlink.h, if_link.h, if_addr.h and if.h.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use super::is_link_local;
use crate::netlink::{ask, attributes, ip_of, u32_at};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFLA_IFNAME: u16 = 3;
const IFA_FLAGS: u16 = 8;
const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const IFF_RUNNING: u32 = 0x40;
/// The kernel has not found yet that no other host has the address, or has found one.
const IFA_F_UNUSABLE: u32 = 0x40 | 0x08;
/// Of an address that changes every few hours, or that shall begin no more connections.
const IFA_F_PASSING: u32 = 0x01 | 0x20;

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Interface {
    /// The interface's number in the namespace.
    pub index: u32,
    /// `eth0`.
    pub name: String,
    /// The interface is up and has a carrier.
    pub up: bool,
    /// The interface is the loopback device.
    pub loopback: bool,
    /// The interface's addresses.
    pub addresses: Vec<Held>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Held {
    /// The address.
    pub ip: IpAddr,
    /// Length of its network's prefix.
    pub prefix: u8,
    /// The address may be used: no other host is known or feared to have it.
    pub usable: bool,
    /// The address is soon replaced by another one.
    pub passing: bool,
    /// The default route of its family begins with it.
    pub routed: bool,
}

impl Interface {
    /// The interfaces of this namespace, in the kernel's order.
    ///
    /// # Errors
    /// A sentence, where the kernel can't be asked.
    pub fn all() -> Result<Vec<Interface>, String> {
        // struct ifinfomsg and struct ifaddrmsg of any family.
        let links = ask(RTM_GETLINK, true, &[0; 16]).map_err(|e| e.to_string())?;
        let mut all: Vec<Interface> = links
            .iter()
            .filter(|(kind, _)| *kind == RTM_NEWLINK)
            .filter_map(|(_, body)| link(body))
            .collect();
        let routed = [default_of(false), default_of(true)];
        let addresses = ask(RTM_GETADDR, true, &[0; 8]).map_err(|e| e.to_string())?;
        for (_, body) in addresses.iter().filter(|(kind, _)| *kind == RTM_NEWADDR) {
            let Some((index, mut held)) = held(body) else { continue };
            held.routed = routed.contains(&Some(held.ip));
            if let Some(interface) = all.iter_mut().find(|interface| interface.index == index) {
                interface.addresses.push(held);
            }
        }
        Ok(all)
    }

    /// Whether the interface leads to its link's other hosts by their link-local IPv6 addresses.
    pub(super) fn has_link_scope(&self) -> bool {
        let link_scope = |held: &Held| held.ip.is_ipv6() && is_link_local(held.ip);
        self.up && !self.loopback && self.addresses.iter().any(link_scope)
    }
}

/// A struct ifinfomsg and its attributes.
fn link(body: &[u8]) -> Option<Interface> {
    let (index, flags) = (u32_at(body, 4)?, u32_at(body, 8)?);
    let (_, name) = attributes(body.get(16..)?).find(|(kind, _)| *kind == IFLA_IFNAME)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(Interface {
        index,
        name: String::from_utf8_lossy(name).into_owned(),
        up: flags & (IFF_UP | IFF_RUNNING) == IFF_UP | IFF_RUNNING,
        loopback: flags & IFF_LOOPBACK != 0,
        addresses: Vec::new(),
    })
}

/// A struct ifaddrmsg and its attributes: the interface's index, and the address.
fn held(body: &[u8]) -> Option<(u32, Held)> {
    let (index, ip) = ip_of(body)?;
    let long =
        attributes(body.get(8..)?).find(|(kind, _)| *kind == IFA_FLAGS).and_then(|(_, v)| u32_at(v, 0));
    let flags = long.unwrap_or(u32::from(*body.get(2)?));
    let (usable, passing) = (flags & IFA_F_UNUSABLE == 0, flags & IFA_F_PASSING != 0);
    Some((index, Held { ip, prefix: *body.get(1)?, usable, passing, routed: false }))
}

/// The address with which the default route of a family begins, if there is one. Sends nothing: connecting a UDP socket only asks
/// the kernel for its route. The addresses asked for are of documentation (RFC 5737, RFC 3849).
fn default_of(v6: bool) -> Option<IpAddr> {
    let (own, to): (SocketAddr, SocketAddr) = match v6 {
        false => ((Ipv4Addr::UNSPECIFIED, 0).into(), (Ipv4Addr::new(192, 0, 2, 1), 9).into()),
        true => {
            ((Ipv6Addr::UNSPECIFIED, 0).into(), (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into())
        }
    };
    let socket = UdpSocket::bind(own).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|own| own.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_found_by_the_kernel_itself() {
        let all = Interface::all().unwrap();
        // A namespace may have it down and without an address.
        let lo = all.iter().find(|interface| interface.loopback).expect("each namespace has one");
        assert!(lo.addresses.iter().all(|held| !lo.up || held.ip.is_loopback() || held.prefix > 0), "{lo:?}");
        assert!(!lo.has_link_scope());
    }

    #[test]
    fn p8_answers_that_are_cut_short_give_no_interface_and_no_address() {
        for length in 0..16 {
            assert_eq!(link(&vec![1; length]), None);
            assert_eq!(held(&vec![1; length.min(8)]), None);
        }
    }
}
