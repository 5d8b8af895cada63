//! Links of queue pairs that break. All tests but the ignored one name `local`, so they are the same wherever they run.

use super::{GPU, command, run_with};

/// The plugin breaks the links of both processes every 10 ms, also while they close.
#[test]
fn p6_p7_links_of_two_processes_that_break_again_and_again_lose_and_double_nothing() {
    // On a busy host many links in a row may break before either process has run: the limit is not the subject.
    let broken = [
        ("PUSHGATE_QP", "local"),
        ("_PUSHGATE_BREAK_LINKS", "10"),
        ("PUSHGATE_RECOVER", "300s"),
        ("PUSHGATE_TIMEOUT", "600s"),
    ];
    let run = |more: &[(&str, &str)]| {
        let variables: Vec<_> = broken.iter().chain(more).copied().collect();
        run_with(command("recovering --groups 100 --times 60 --seed 7"), &variables);
    };
    run(&[("PUSHGATE_DRIVE", "caller")]);
    run(&[("PUSHGATE_DRIVE", "thread")]);
    run(&GPU);
}

/// Over RDMA, as the suite says by `PUSHGATE_QP` and `PUSHGATE_IB_DEV`.
#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-recovery"]
fn p6_p7_links_over_rdma_of_two_processes_that_break_again_and_again_lose_and_double_nothing() {
    for drive in ["caller", "thread"] {
        let broken = [
            ("_PUSHGATE_BREAK_LINKS", "3000"),
            ("PUSHGATE_RECOVER", "300s"),
            ("PUSHGATE_TIMEOUT", "600s"),
            ("PUSHGATE_DRIVE", drive),
        ];
        run_with(command("recovering --groups 20 --times 6 --seed 7"), &broken);
    }
}

/// Two processes that take each other for other hosts, over loopback. Their links break too, so that frames go over the sockets.
#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-recovery"]
fn p6_p7_sockets_between_hosts_that_are_cut_again_and_again_lose_and_double_nothing() {
    let cut = [
        ("_PUSHGATE_CUT_SOCKETS", "100"),
        ("_PUSHGATE_BREAK_LINKS", "2000"),
        ("PUSHGATE_RECOVER", "300s"),
        ("PUSHGATE_TIMEOUT", "600s"),
        ("NCCL_CALLER_RANK_1", "_PUSHGATE_NET_HOST=elsewhere"),
    ];
    let said = run_with(command("recovering --groups 20 --times 4 --seed 7"), &cut);
    let replaced = said.trim_end().strip_suffix(" sockets").and_then(|said| said.rsplit(' ').next());
    let replaced: u32 = replaced.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("how many? {said}"));
    assert!(replaced > 10, "{said}");
}

#[test]
fn p7_a_connection_whose_link_is_being_replaced_closes_and_leaves_nothing() {
    for drive in ["caller", "thread"] {
        let variables =
            [("PUSHGATE_QP", "local"), ("_PUSHGATE_BREAK_LINKS", "10"), ("PUSHGATE_DRIVE", drive)];
        run_with(command("abandoned --times 3"), &variables);
    }
}

#[test]
fn p7_a_link_that_is_not_replaced_within_recover_fails_its_requests() {
    for drive in ["caller", "thread"] {
        let variables = [
            ("PUSHGATE_QP", "local"),
            ("_PUSHGATE_BREAK_LINKS", "10"),
            ("PUSHGATE_RECOVER", "500ms"),
            ("PUSHGATE_DRIVE", drive),
        ];
        run_with(command("given-up --times 1"), &variables);
    }
}

#[test]
fn a_rank_without_recovery_and_a_rank_with_recovery_join_without_recovery() {
    let variables = [
        ("PUSHGATE_QP", "local"),
        ("_PUSHGATE_BREAK_LINKS", "10"),
        ("NCCL_CALLER_RANK_1", "PUSHGATE_RECOVER=0"),
    ];
    // A link that broke would end its queue pair.
    run_with(command("traffic --processes --groups 50 --seed 8"), &variables);
}
