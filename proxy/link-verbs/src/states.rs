//! The states of a reliable connected queue pair, up to the one in which it sends: INIT, RTR
//! (ready to receive), RTS (ready to send).

use pushgate_rdma_core_sys as sys;
use sys::ibv_qp_attr_mask as m;

use super::VerbsError;
use super::config::Config;
use super::device::PortState;
use super::gid::{Gid, GidEntry};
use super::objects::Rc;

/// The queue pair at the other end.
pub(super) struct PeerQp {
    pub(super) number: u32,
    /// Of its first packet.
    pub(super) psn: u32,
    pub(super) gid: Gid,
    pub(super) lid: u16,
}

/// Moves one queue pair from state to state.
pub(super) struct States<'a> {
    pub(super) rc: &'a Rc,
    /// It, in errors.
    pub(super) name: &'static str,
    pub(super) config: &'a Config,
    /// The address that packets carry as their source.
    pub(super) gid: &'a GidEntry,
    /// Of its own first packet.
    pub(super) psn: u32,
}

impl States<'_> {
    /// To INIT. `access`: what the other end may do to memory through it.
    pub(super) fn initialise(&self, access: u32) -> Result<(), VerbsError> {
        let mut a = attributes(sys::ibv_qp_state::IBV_QPS_INIT);
        let device = &self.rc.pd.device;
        a.pkey_index = device.partition(self.config.partition)?;
        a.port_num = device.port();
        a.qp_access_flags = access as _;
        let mask = m::IBV_QP_STATE.0 | m::IBV_QP_PKEY_INDEX.0 | m::IBV_QP_PORT.0 | m::IBV_QP_ACCESS_FLAGS.0;
        self.rc.modify(&format!("moving {} to INIT", self.name), a, mask)
    }

    /// To RTR, of packets from `remote`. `mtu`: as an `ibv_mtu`.
    pub(super) fn ready_to_receive(&self, remote: &PeerQp, mtu: sys::ibv_mtu) -> Result<(), VerbsError> {
        let mut a = attributes(sys::ibv_qp_state::IBV_QPS_RTR);
        a.path_mtu = mtu;
        a.dest_qp_num = remote.number & 0xff_ffff;
        a.rq_psn = remote.psn & 0xff_ffff;
        // Only a flush reads; but not every driver takes 0.
        a.max_dest_rd_atomic = 1;
        // Never needed; 0.64 ms, should a peer without a gate be there.
        a.min_rnr_timer = 12;
        self.route(&mut a, remote);
        let mask = m::IBV_QP_STATE.0
            | m::IBV_QP_AV.0
            | m::IBV_QP_PATH_MTU.0
            | m::IBV_QP_DEST_QPN.0
            | m::IBV_QP_RQ_PSN.0
            | m::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | m::IBV_QP_MIN_RNR_TIMER.0;
        let what = format!("moving {} to RTR (from {} to {})", self.name, self.gid.gid, remote.gid);
        self.rc.modify(&what, a, mask)
    }

    /// Where packets go, and from which address of ours.
    fn route(&self, a: &mut sys::ibv_qp_attr, remote: &PeerQp) {
        a.ah_attr.is_global = is_global(&self.rc.port, self.gid.gid, remote) as u8;
        a.ah_attr.grh.dgid.raw = remote.gid.0;
        a.ah_attr.grh.sgid_index = self.gid.index as u8;
        a.ah_attr.grh.hop_limit = 64;
        a.ah_attr.grh.traffic_class = self.config.traffic_class.unwrap_or(0);
        a.ah_attr.dlid = remote.lid;
        a.ah_attr.sl = self.config.service_level.unwrap_or(0);
        a.ah_attr.port_num = self.rc.pd.device.port();
    }

    /// To RTS.
    pub(super) fn ready_to_send(&self) -> Result<(), VerbsError> {
        let mut a = attributes(sys::ibv_qp_state::IBV_QPS_RTS);
        a.timeout = self.config.ack_timeout;
        a.retry_cnt = self.config.retry_count;
        // P4: the first RNR NAK is an error. With a gate there is none.
        a.rnr_retry = 0;
        a.sq_psn = self.psn;
        a.max_rd_atomic = 1;
        let mask = m::IBV_QP_STATE.0
            | m::IBV_QP_TIMEOUT.0
            | m::IBV_QP_RETRY_CNT.0
            | m::IBV_QP_RNR_RETRY.0
            | m::IBV_QP_SQ_PSN.0
            | m::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.rc.modify(&format!("moving {} to RTS", self.name), a, mask)
    }
}

/// Whether packets to `remote` carry a global header: always on Ethernet; on InfiniBand where an end has no LID or the port asks for
/// one, and into another subnet, whose GIDs begin otherwise.
fn is_global(port: &PortState, own: Gid, remote: &PeerQp) -> bool {
    port.ethernet || port.global || port.lid == 0 || remote.lid == 0 || own.0[..8] != remote.gid.0[..8]
}

/// A number for a queue pair's first packet, 24 bits, that no packet of an earlier queue pair has except by chance. From
/// the seed of the standard library's hash maps.
pub(super) fn first_packet() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

fn attributes(state: sys::ibv_qp_state) -> sys::ibv_qp_attr {
    // SAFETY: plain data; the mask says which fields count.
    let mut a: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
    a.qp_state = state;
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_carry_a_global_header_on_ethernet_and_on_infiniband_where_the_lid_does_not_lead_there() {
        let gid = |text: &str| Gid(text.parse::<std::net::Ipv6Addr>().unwrap().octets());
        let infiniband = PortState {
            active: true,
            mtu: 4096,
            max_mtu: 4096,
            lid: 7,
            ethernet: false,
            global: false,
            message: 1 << 30,
            in_order: false,
        };
        let (own, near) = (gid("fe80::1:1"), gid("fe80::1:2"));
        for (port, lid, remote, global) in [
            (infiniband, 8, near, false),
            (PortState { ethernet: true, lid: 0, ..infiniband }, 0, near, true),
            (PortState { global: true, ..infiniband }, 8, near, true),
            (PortState { lid: 0, ..infiniband }, 8, near, true),
            (infiniband, 0, near, true),
            (infiniband, 8, gid("fec0::1:2"), true),
        ] {
            let remote = PeerQp { number: 1, psn: 0, gid: remote, lid };
            assert_eq!(is_global(&port, own, &remote), global, "{port:?} to {}, LID {lid}", remote.gid);
        }
    }
}
