//! What NCCL is told of RDMA devices, and that `listen` and `connect` use the device that NCCL names, at each end its own.
//!
//! Most tests need two devices whose packets really go from one to the other: soft-RoCE over the two ends of a cable, `rxea` over `va`
//! and `rxeb` over `vb`, beside the `rxe0` and `rxe1` of every guest (`cargo xtask vm --suite nccl-devices`).

use std::process::Command;

use super::{GPU, command, limit, logged, output, run_with};

/// The devices and their links.
const DEVICES: [(&str, &str); 2] = [("rxea", "va"), ("rxeb", "vb")];

/// Packets that each device has sent, and bytes that have left its link.
fn sent() -> [(u64, u64); 2] {
    // For 10 ms the kernel returns the values that it read before.
    std::thread::sleep(std::time::Duration::from_millis(50));
    DEVICES.map(|(device, link)| {
        let read = |path: String| -> u64 {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
            text.trim().parse().expect("a count")
        };
        let packets = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
        (read(packets), read(format!("/sys/class/net/{link}/statistics/tx_bytes")))
    })
}

/// What was sent since.
fn since(before: [(u64, u64); 2]) -> [(u64, u64); 2] {
    let now = sent();
    [0, 1].map(|at| (now[at].0 - before[at].0, now[at].1 - before[at].1))
}

/// A caller over RDMA, whose ranks have both devices.
fn over_both(arguments: &str) -> Command {
    let mut command = command(arguments);
    command.env("PUSHGATE_QP", "verbs").env("PUSHGATE_IB_DEV", "rxea,rxeb");
    command.env("PUSHGATE_ACK_TIMEOUT", "20").env("PUSHGATE_PATH_TIMEOUT", "30s");
    command
}

/// The bytes of the messages that a caller's first rank has received; the other has received as many.
fn bytes(said: &str) -> u64 {
    let before = said.split(" bytes received and right").next().and_then(|said| said.rsplit(' ').next());
    before.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("how many bytes? {said}"))
}

/// What a rank is told of devices.
fn told(variables: &[(&str, &str)]) -> String {
    let mut command = over_both("devices");
    command.env_remove("PUSHGATE_IB_DEV");
    run_with(command, variables)
}

/// The log of a caller that fails.
fn refused(mut command: Command, variables: &[(&str, &str)]) -> String {
    command.env("NCCL_CALLER_VERBOSE", "1").envs(variables.iter().copied());
    let output = output(&mut command, limit());
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{log}");
    log
}

#[test]
fn without_a_setting_and_without_an_rdma_device_devices_of_host_memory_are_told() {
    let plain = |n: usize| {
        let name = |at: usize| if at == 0 { "pushgate".into() } else { format!("pushgate-{at}") };
        let speed = if n == 4 { 100_000 } else { 200_000 };
        let line =
            |at| format!("{at} {} no place 0x7075736867617465 {speed} Mbit/s port {}\n", name(at), at + 1);
        (0..n).map(line).collect::<String>()
    };
    let bounce = &[("PUSHGATE_PATH", "bounce")];
    for (qp, variables, n) in [
        ("local", &[][..], 4),
        ("local", bounce, 1),
        ("auto", &GPU, 4),
        ("auto", bounce, 1),
        ("tcp", &[], 4),
        ("tcp", bounce, 4),
    ] {
        let mut command = command("devices");
        // No host has a device of this name.
        command.env("PUSHGATE_QP", qp).env("PUSHGATE_IB_DEV", "none-such").env("PUSHGATE_HOST", "127.0.0.1");
        assert_eq!(run_with(command, variables), plain(n), "{qp} {variables:?}");
    }
}

#[test]
fn choices_of_devices_that_can_not_be_honoured_are_refused_by_name() {
    for (name, value, said) in [
        (
            "PUSHGATE_IB_DEV",
            "near",
            "invalid ib-dev `near` (from PUSHGATE_IB_DEV): expected auto or names of devices",
        ),
        ("NCCL_IB_HCA", "mlx5_0:2", "NCCL_IB_HCA=mlx5_0:2: port 2 of mlx5_0, and the plugin takes port 1"),
        ("NCCL_IB_HCA", "=mlx5_0:1:3", "names a rail or a plane"),
    ] {
        for qp in ["auto", "verbs"] {
            let mut command = command("setting");
            command.env("PUSHGATE_QP", qp).env_remove("PUSHGATE_IB_DEV");
            let found = run_with(command, &[(name, value)]);
            assert!(found.contains(said), "{name}={value}: {found}");
        }
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn all_ranks_are_told_of_every_device_with_its_name_and_nccls_choice_among_them_is_honoured() {
    let line = |at: usize, name: &str| {
        let sysfs =
            |file: &str| std::fs::read_to_string(format!("/sys/class/infiniband/{name}/{file}")).unwrap();
        let guid = sysfs("sys_image_guid").trim().replace(':', "");
        let rate = sysfs("ports/1/rate");
        let rate: f64 = rate.split(' ').next().and_then(|rate| rate.parse().ok()).expect("a rate");
        format!("{at} {name} no place 0x{guid} {} Mbit/s port 1\n", (rate * 1000.0) as u64)
    };
    let all = |names: &[&str]| names.iter().enumerate().map(|(at, name)| line(at, name)).collect::<String>();
    for qp in ["verbs", "auto"] {
        for gpu in [&[][..], &GPU] {
            let with =
                |more: &[(&'static str, &'static str)]| told(&[&[("PUSHGATE_QP", qp)], gpu, more].concat());
            assert_eq!(with(&[]), all(&["rxe0", "rxe1", "rxea", "rxeb"]), "{qp}");
            assert_eq!(with(&[("NCCL_IB_HCA", "rxeb,rxea:1")]), all(&["rxea", "rxeb"]));
            assert_eq!(with(&[("NCCL_IB_HCA", "^rxea")]), all(&["rxe0", "rxe1", "rxeb"]));
            assert_eq!(with(&[("NCCL_IB_HCA", "=rxeb")]), all(&["rxeb"]));
            // The setting goes before NCCL's variable, and has an order.
            assert_eq!(
                with(&[("NCCL_IB_HCA", "=rxe0"), ("PUSHGATE_IB_DEV", "rxeb,rxea")]),
                all(&["rxeb", "rxea"])
            );
        }
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn two_ranks_each_with_its_own_device_send_through_these_and_the_numbers_at_the_ends_differ() {
    for gpu in [&[][..], &GPU, &[GPU[0], GPU[1], ("PUSHGATE_PATH", "pull")]] {
        let before = sent();
        let mut apart = over_both("traffic --processes --groups 15");
        apart.env("NCCL_CALLER_DEVICES", "0").env("NCCL_CALLER_RANK_1", "NCCL_CALLER_DEVICES=1");
        apart.envs(gpu.iter().copied());
        let (said, log) = logged(apart);
        let bytes = bytes(&said);
        let sent = since(before);
        assert!(bytes > 100_000 && sent.iter().all(|(_, out)| *out > bytes / 2), "{bytes} of {sent:?}");
        for device in ["verbs (rxea port 1)", "verbs (rxeb port 1)"] {
            assert_eq!(log.matches(device).count(), 1, "{log}");
        }
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn a_device_that_no_rank_names_carries_nothing() {
    for (named, other) in [(0, 1), (1, 0)] {
        let before = sent();
        let mut one = over_both("traffic --processes --groups 15");
        one.env("NCCL_CALLER_DEVICES", named.to_string());
        run_with(one, &[]);
        let sent = since(before);
        assert!(sent[named].0 > 100 && sent[other].0 == 0, "device {named}: {sent:?}");
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn a_rank_with_both_devices_at_once_sends_through_each_what_its_connections_there_have() {
    let before = sent();
    let mut both = over_both("traffic --processes --groups 15");
    // Of each of the connections the ends have different numbers.
    both.env("NCCL_CALLER_DEVICES", "0,1").env("NCCL_CALLER_RANK_1", "NCCL_CALLER_DEVICES=1,0");
    let (said, log) = logged(both);
    let (bytes, sent) = (bytes(&said), since(before));
    // Both connections have the same messages each way.
    assert!(sent.iter().all(|(_, out)| *out > bytes), "{bytes} of {sent:?}");
    let [(_, a), (_, b)] = sent;
    assert!(a.abs_diff(b) < bytes / 4, "{bytes} of {sent:?}");
    for device in ["verbs (rxea port 1)", "verbs (rxeb port 1)"] {
        assert_eq!(log.matches(device).count(), 2, "{log}");
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn with_qp_auto_the_device_counts_between_hosts_and_not_within_one() {
    for (elsewhere, crosses) in [(" _PUSHGATE_NET_HOST=elsewhere", true), ("", false)] {
        let before = sent();
        let mut auto = over_both("traffic --processes --groups 15");
        auto.env("PUSHGATE_QP", "auto").env("NCCL_CALLER_DEVICES", "1");
        auto.env("NCCL_CALLER_RANK_1", format!("NCCL_CALLER_DEVICES=0{elsewhere}"));
        let bytes = bytes(&run_with(auto, &[]));
        let sent = since(before);
        assert!(
            sent.iter().all(|(packets, out)| if crosses { *out > bytes / 2 } else { *packets == 0 }),
            "{sent:?}"
        );
    }
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn hosts_whose_lists_differ_refuse_each_other_by_name() {
    let elsewhere = "_PUSHGATE_NET_HOST=elsewhere";
    for (other, said) in [
        ("PUSHGATE_IB_DEV=rxea", " Mbit/s here and 1 RDMA device there"),
        ("PUSHGATE_IB_DEV=none-such PUSHGATE_HOST=10.9.30.1", " of host memory, for no RDMA device there"),
    ] {
        for gpu in [&[][..], &GPU] {
            let mut differing = over_both("traffic --processes --groups 3");
            differing.env("PUSHGATE_QP", "auto").env("NCCL_CALLER_RANK_1", format!("{elsewhere} {other}"));
            let log = refused(differing, gpu);
            let refusal = "devices is 2 RDMA devices of ";
            assert!(log.contains(refusal) && log.contains(said) && log.contains("PUSHGATE_QP=tcp"), "{log}");
        }
    }
    // Names are each host's own, and so are they of a rank that is a host for NCCL; among ranks of a host they are alike.
    let alike = |other: &str| {
        let mut alike = over_both("traffic --processes --groups 3");
        alike
            .env("PUSHGATE_IB_DEV", "rxea")
            .env("NCCL_CALLER_RANK_1", format!("PUSHGATE_IB_DEV=rxeb {other}"));
        alike
    };
    run_with(alike(elsewhere), &[]);
    run_with(alike("NCCL_HOSTID=1"), &[]);
    let log = refused(alike(""), &[]);
    assert!(log.contains("list different RDMA devices, rxe") && log.contains("PUSHGATE_IB_DEV"), "{log}");
}

#[test]
#[ignore = "needs two RDMA devices: cargo xtask vm --suite nccl-devices"]
fn what_asks_for_one_device_in_place_of_several_and_a_device_that_is_missing_are_refused_by_name() {
    let init = |variables: &[(&str, &str)]| {
        let mut command = over_both("setting");
        command.env("NCCL_CALLER_VERBOSE", "1");
        run_with(command, variables)
    };
    for (name, value) in [("NCCL_NET_FORCE_MERGE", "rxea,rxeb"), ("NCCL_NET_MERGE_LEVEL", "PIX")] {
        let said = init(&[(name, value)]);
        assert!(
            said.contains(&format!("{name}={value} asks for one device in place of several of rxea, rxeb")),
            "{said}"
        );
    }
    let said = init(&[("PUSHGATE_IB_DEV", "rxea,none-such")]);
    assert!(said.contains("none-such"), "{said}");
    let said = init(&[("PUSHGATE_IB_DEV", "auto"), ("NCCL_IB_HCA", "=mlx5_0")]);
    assert!(said.contains("NCCL_IB_HCA==mlx5_0"), "{said}");
    // They ask for nothing of one device.
    for (name, value) in [("NCCL_NET_FORCE_MERGE", "rxea,rxeb"), ("NCCL_IB_MERGE_NICS", "1")] {
        let mut one = over_both("devices");
        one.env("PUSHGATE_IB_DEV", "rxea").env(name, value);
        run_with(one, &[]);
    }
    // Ports of one adapter alone are merged by these.
    let mut apart = over_both("devices");
    apart.env("NCCL_IB_MERGE_NICS", "1").env("NCCL_NET_MERGE_LEVEL", "PORT");
    run_with(apart, &[]);
}
