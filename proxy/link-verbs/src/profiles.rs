//! Profiles of the simulated device that behave as adapters do, and what a link makes of them. The facts are of rdma-core's providers and of
//! what its history has for earlier releases.

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

/// What an adapter does.
#[derive(Clone, Copy)]
pub struct Profile {
    /// What has it.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the messages of tests"))]
    pub(super) name: &'static str,
    pub(super) in_error: InError,
}

const MLX5: InError = InError { refuses: false, drops: false, receives_first: false };

/// The devices whose ways differ, by their drivers.
pub static PROFILES: [Profile; 4] = [
    // `mlx5_post_send` looks at no state, and the device flushes what comes late.
    Profile { name: "mlx5", in_error: MLX5 },
    // `irdma_upost_send` has the queue flushed anew only where nothing was left in it.
    Profile { name: "irdma", in_error: InError { drops: true, ..MLX5 } },
    // Earlier releases of libbnxt_re refuse what is posted in the error state with EINVAL.
    Profile { name: "bnxt_re", in_error: InError { refuses: true, ..MLX5 } },
    // A completion that begins the flush of receives (`ionic_poll_recv`) may come before that of the send that failed. Earlier releases
    // refuse what is posted; today's take it.
    Profile { name: "ionic", in_error: InError { refuses: true, receives_first: true, ..MLX5 } },
];

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::abi;
    use pushgate_rdma_core_sys::ibv_wc_status;

    use super::super::config::Config;
    use super::super::kinds::{Kind, Protocol};
    use super::super::mock::{self, Mock};
    use super::super::simulated::Sim;
    use super::super::simulated_tests::any_order_on;
    use super::super::verbs_link::tests::pair;
    use super::PROFILES;
    use pushgate_link::{Link, LinkDown};

    #[test]
    fn p3_p6_links_that_break_and_are_replaced_lose_double_and_reorder_nothing_over_each_profile() {
        for profile in &PROFILES {
            for imm in [true, false] {
                let sim = || Sim::new().of_profile(profile);
                let links: u64 = (1..8).map(|seed| any_order_on(&sim(), seed, imm, true)).sum();
                assert!(links > 8, "{}: {links} links took the place of one that broke", profile.name);
            }
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
