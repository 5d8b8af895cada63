//! Profiles of the simulated device that behave as adapters do, and what a link makes of them. The facts are of rdma-core's providers and of
//! what its history has for earlier releases.

use super::config::{Config, RdmaCm};
use super::pkey::FULL;

/// What devices do differently with a queue pair in the error state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InError {
    /// They refuse work requests.
    pub(super) refuses: bool,
    /// What is posted then is never completed, unless the queue is empty.
    pub(super) drops: bool,
    /// They flush receives before they complete the send that failed.
    pub(super) receives_first: bool,
}

/// What a subnet manager asks of queue pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Managed {
    /// The keys of the port's partitions. Two ends hear each other in the last one alone.
    pub(super) partitions: [u16; 3],
    /// The service level that has buffers.
    level: u8,
    /// Packets need a global header.
    pub(super) global: bool,
}

impl Managed {
    /// Whether packets with a partition's place, a service level, and a global header or none arrive.
    pub(super) fn carries(&self, (place, level, global): (u16, u8, bool)) -> bool {
        usize::from(place) + 1 == self.partitions.len() && level == self.level && (global || !self.global)
    }
}

/// What an adapter, or its fabric, does.
#[derive(Clone, Copy)]
pub struct Profile {
    /// What has it.
    pub(super) name: &'static str,
    pub(super) in_error: InError,
    /// A command to the firmware takes 1 to 100 ms.
    pub slow: bool,
    /// How often the port gets another LID, MTU and address when a queue pair breaks.
    pub(super) changes: Option<u32>,
    /// The port is InfiniBand's.
    pub(super) managed: Option<Managed>,
    /// The port has addresses of other network namespaces before the own one.
    pub(super) pods: bool,
}

impl Profile {
    /// Whether the port is InfiniBand's, and not RoCE's.
    pub fn is_infiniband(&self) -> bool {
        self.managed.is_some()
    }

    /// What the user of such a fabric sets.
    pub fn config(&self) -> Config {
        let managed = self.managed;
        Config {
            // Simulated devices have no rdma_cm.
            cm: RdmaCm::Off,
            partition: managed.map(|managed| managed.partitions[2] & !FULL),
            service_level: managed.map(|managed| managed.level),
            ..Config::default()
        }
    }
}

/// `mlx5_post_send` looks at no state, and the device flushes what comes late. All profiles copy what is inline out of its source by
/// the CPU, as libmlx5 does: a source in a device's memory ends the process.
const MLX5: Profile = Profile {
    name: "mlx5",
    in_error: InError { refuses: false, drops: false, receives_first: false },
    slow: false,
    changes: None,
    managed: None,
    pods: false,
};

/// Devices and fabrics whose ways differ, the devices by their drivers.
pub static PROFILES: [Profile; 8] = [
    MLX5,
    // `irdma_upost_send` has the queue flushed anew only where nothing was left in it.
    Profile { name: "irdma", in_error: InError { drops: true, ..MLX5.in_error }, ..MLX5 },
    // Earlier releases of libbnxt_re refuse what is posted in the error state with EINVAL.
    Profile { name: "bnxt_re", in_error: InError { refuses: true, ..MLX5.in_error }, ..MLX5 },
    // A completion that begins the flush of receives (`ionic_poll_recv`) may come before that of the send that failed. Earlier releases
    // refuse what is posted; today's take it.
    Profile {
        name: "ionic",
        in_error: InError { refuses: true, receives_first: true, ..MLX5.in_error },
        ..MLX5
    },
    // mlx5, bnxt_re and irdma wait for their firmware in `modify_qp`, `query_port` and `reg_mr`.
    Profile { name: "slow firmware", slow: true, ..MLX5 },
    // A subnet manager that begins anew, an interface with another MTU, an address that moves.
    Profile { name: "a port that changes", changes: Some(6), ..MLX5 },
    Profile {
        name: "InfiniBand with a subnet manager",
        managed: Some(Managed { partitions: [0x7fff, 0x0002, 0x8002], level: 3, global: true }),
        ..MLX5
    },
    // macvlan interfaces of a device, each in a pod.
    Profile { name: "pods", pods: true, ..MLX5 },
];

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::abi;
    use pushgate_rdma_core_sys::ibv_wc_status;

    use super::super::config::Config;
    use super::super::kinds::{Kind, Protocol};
    use super::super::mock::{self, Mock};
    use super::super::simulated_tests::any_order_over;
    use super::super::verbs_link::tests::pair;
    use super::PROFILES;
    use pushgate_link::{Link, LinkDown};

    #[test]
    fn p3_p6_links_that_break_and_are_replaced_lose_double_and_reorder_nothing_over_each_profile() {
        for profile in &PROFILES {
            for imm in [true, false] {
                let links = (1..8).map(|seed| any_order_over(profile, seed, imm, true)).sum::<u64>();
                assert!(links > 8, "{}: {links} links took the place of one that broke", profile.name);
            }
        }
    }

    #[test]
    fn p3_p6_writes_that_are_placed_in_any_order_are_announced_when_they_are_there_over_each_profile() {
        for profile in &PROFILES {
            (1..8).for_each(|seed| _ = any_order_over(profile, seed, seed % 2 == 0, false));
        }
    }

    #[test]
    fn p4_the_cause_of_a_break_is_told_though_the_device_flushes_receives_first() {
        use ibv_wc_status as s;
        for (status, cause) in [
            (s::IBV_WC_RNR_RETRY_EXC_ERR, abi::PUSHGATE_DOWN_RNR),
            (s::IBV_WC_RETRY_EXC_ERR, abi::PUSHGATE_DOWN_RETRY),
        ] {
            let mock = Mock::with_functions(std::ptr::null_mut(), Kind::of(Protocol::Ib, 0), |_, _| {});
            let [mut link, peer] = pair(&mock, &Config::default());
            mock::complete(super::super::RECEIVE, s::IBV_WC_WR_FLUSH_ERR);
            mock::complete(1, status);
            mock::complete(2, s::IBV_WC_WR_FLUSH_ERR);
            link.is_quiet();
            let down = (0..1_000).find_map(|pass| link.check(pass * 1_000_000).err());
            assert_eq!(down, Some(LinkDown::Failed { cause, by_peer: true }));
            drop(peer);
        }
    }
}
