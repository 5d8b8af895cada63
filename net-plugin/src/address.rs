//! The address at which other hosts reach this one.

use std::net::{IpAddr, UdpSocket};

use pushgate::Settings;
use pushgate_proxy::link::verbs::Device;

use crate::error::{Failure, Result};

/// The address at which other hosts reach this one: the setting, or else the RDMA device's, if there is one, or else
/// that of the default route.
pub fn own_address(settings: &Settings, device: Option<&Device>) -> Result<IpAddr> {
    if let Ok(ip) = settings.host.parse() {
        return Ok(ip);
    }
    let mut ips = device.map(Device::addresses).unwrap_or_default();
    ips.retain(|ip| !matches!(ip, IpAddr::V6(v) if v.is_unicast_link_local()));
    ips.sort_by_key(|ip| ip.is_ipv6());
    if let Some(ip) = ips.first() {
        return Ok(*ip);
    }
    // Sends nothing: connecting a UDP socket only asks which route the kernel would take.
    let routed =
        UdpSocket::bind("0.0.0.0:0").and_then(|s| s.connect("192.0.2.1:9").and_then(|()| s.local_addr()));
    routed
        .map(|a| a.ip())
        .map_err(Failure::system("no address at which others reach this host; set PUSHGATE_HOST to one"))
}
