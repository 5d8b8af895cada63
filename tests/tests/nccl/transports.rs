//! Over which transport ranks reach each other, where the settings leave that open (`qp = auto`).

use std::process::Command;

use super::{GPU, command, limit, logged, output, run, run_with, times};

/// The lines of a log that say how a peer is reached, without the peer.
fn told(log: &str) -> Vec<&str> {
    let lines = log.lines().filter_map(|line| line.split_once("queue pairs to process "));
    lines.map(|(_, rest)| rest.split_once(" are ").expect("how").1).collect()
}

/// A caller whose settings leave the queue pairs open, whatever the environment says.
fn auto(arguments: &str) -> Command {
    let mut command = command(arguments);
    command.env_remove("PUSHGATE_QP");
    command
}

#[test]
fn without_a_setting_ranks_of_one_host_use_local_queue_pairs_and_each_says_so_once() {
    let (_, log) = logged(auto("traffic --processes --groups 20"));
    assert_eq!(told(&log), ["local: it is on this host"; 2], "{log}");
    let (_, log) = logged(auto("many --times 5"));
    assert_eq!(told(&log), ["local: it is on this host"], "{log}");
    let mut gpu = auto("traffic --processes --groups 20");
    gpu.envs(GPU);
    let (_, log) = logged(gpu);
    assert_eq!(told(&log), ["local: it is on this host"; 2], "{log}");
}

#[test]
fn a_rank_serves_a_peer_of_its_process_and_one_of_another_at_once() {
    run(&format!("mixed --groups {}", times(100, 15)));
    run_with(command(&format!("mixed --groups {} --max 120000", times(50, 8))), &GPU);
}

#[test]
fn without_an_rdma_device_a_rank_of_another_host_is_reached_by_tcp_and_the_log_says_why() {
    for gpu in [&[][..], &GPU] {
        // No host has a device of this name.
        let mut elsewhere = auto("traffic --processes --groups 10");
        elsewhere.env("PUSHGATE_IB_DEV", "none-such").envs(gpu.iter().copied());
        // A machine without a route has no other address.
        elsewhere.env("PUSHGATE_HOST", "127.0.0.1");
        elsewhere.env("NCCL_CALLER_RANK_1", "_PUSHGATE_NET_HOST=elsewhere");
        let (_, log) = logged(elsewhere);
        let said = told(&log);
        assert_eq!(said.len(), 2, "{log}");
        for said in said {
            let why = said.starts_with("tcp: ") && said.contains("is another host, and host ");
            assert!(why && said.contains(" has no RDMA device for verbs ("), "{log}");
        }
        assert!(log.contains("queue pairs are local to ranks of this host, tcp to others, at "), "{log}");
    }
}

#[test]
fn connections_over_tcp_carry_everything_whether_threads_of_the_plugin_or_nccls_drive_them() {
    // GPU memory is taken where it is asked for, and by itself the plugin asks NCCL for host memory.
    for (threads, gpu, path) in
        [("0", &GPU[..], "push"), ("1", &[], "auto"), ("3", &GPU[..1], "auto"), ("3", &GPU, "push")]
    {
        let mut over_tcp = command("traffic --processes --groups 20");
        over_tcp.env("PUSHGATE_QP", "tcp").env("PUSHGATE_HOST", "127.0.0.1").env("PUSHGATE_PATH", path);
        over_tcp.env("PUSHGATE_NET_TCP_THREADS", threads).envs(gpu.iter().copied());
        let (_, log) = logged(over_tcp);
        let said = told(&log);
        assert!(said.len() == 2 && said.iter().all(|said| said.starts_with("tcp: ")), "{log}");
        assert_eq!(log.contains("path bounce: "), path == "auto", "{log}");
    }
}

#[test]
fn a_rank_that_no_setting_lets_this_one_reach_is_refused_with_the_remedy() {
    let elsewhere = "_PUSHGATE_NET_HOST=elsewhere";
    let mut local = command("traffic --processes --groups 3");
    local.env("PUSHGATE_QP", "local").env("NCCL_CALLER_RANK_1", elsewhere);
    let log = output_of(local);
    assert!(log.contains("elsewhere is another host; with qp = local here nothing else is tried"), "{log}");
    // One that takes tcp alone, and one that takes none.
    let mut mixed = command("traffic --processes --groups 3");
    mixed.env("PUSHGATE_QP", "tcp").env("NCCL_CALLER_RANK_1", "PUSHGATE_QP=local");
    mixed.env("PUSHGATE_HOST", "127.0.0.1");
    let log = output_of(mixed);
    assert!(log.contains("set qp alike on all ranks"), "{log}");
}

/// NCCL compares none of this, and its ranks would take each other's messages for other ones.
#[test]
fn ranks_at_which_nccl_was_told_different_things_refuse_each_other_with_both_values() {
    for (other, said) in [
        ("NCCL_P2P_NET_CHUNKSIZE=131072", "NCCL_P2P_NET_CHUNKSIZE is 524288 here and 131072 there"),
        ("NCCL_ALLOC_P2P_NET_LL_BUFFERS=0", "NCCL_ALLOC_P2P_NET_LL_BUFFERS is 1 here and 0 there"),
        ("NCCL_TUNER_PLUGIN=none", "tuner is the plugin's here and none there"),
        ("PUSHGATE_PATH=bounce", "GPU memory is handed over here and stays with NCCL (path bounce) there"),
        ("PUSHGATE_QP=auto", "qp is local here and auto there"),
    ] {
        let mut differing = command("traffic --processes --groups 3");
        differing.env("PUSHGATE_QP", "local").envs(GPU).env("NCCL_CALLER_RANK_1", other);
        for name in ["NCCL_P2P_NET_CHUNKSIZE", "NCCL_ALLOC_P2P_NET_LL_BUFFERS", "NCCL_TUNER_PLUGIN"] {
            differing.env_remove(name);
        }
        let log = output_of(differing);
        assert!(log.contains(said) && log.contains("which would exchange wrong bytes"), "{other}: {log}");
    }
}

/// The log of a caller that fails.
fn output_of(mut command: Command) -> String {
    let output = output(command.env("NCCL_CALLER_VERBOSE", "1"), limit());
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{log}");
    log
}

/// Another network namespace of this host, and a pair of links between both.
struct Namespace;

impl Namespace {
    const NAME: &str = "pushgate-test";
    /// Addresses here and there.
    const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

    fn new() -> Self {
        let name = Self::NAME;
        let [here, there] = Self::ADDRESSES;
        ip(&format!("netns add {name}"));
        let made = Namespace;
        ip(&format!("link add pgt0 type veth peer name pgt1 netns {name}"));
        ip(&format!("address add {here}/24 dev pgt0"));
        ip(&format!("-n {name} address add {there}/24 dev pgt1"));
        ip("link set pgt0 up");
        ip(&format!("-n {name} link set pgt1 up"));
        made
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The links go with it.
        ip(&format!("netns delete {}", Self::NAME));
    }
}

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).status().expect("the command ip");
    assert!(done.success() || std::thread::panicking(), "ip {arguments}: {done}");
}

#[test]
#[ignore = "needs root and an RDMA device: cargo xtask vm --suite nccl"]
fn ranks_in_two_network_namespaces_use_verbs_and_ranks_in_one_use_local() {
    let _namespace = Namespace::new();
    let within = format!("ip netns exec {}", Namespace::NAME);
    let [here, there] = Namespace::ADDRESSES;
    let traffic = |variables: &[(&str, &str)]| {
        let mut command = auto("traffic --processes --groups 15");
        command.envs(variables.iter().copied());
        logged(command).1
    };
    let there = format!("PUSHGATE_HOST={there}");
    let between =
        [("NCCL_CALLER_RANK_1_WITHIN", &*within), ("PUSHGATE_HOST", here), ("NCCL_CALLER_RANK_1", &there)];
    // Host memory, and memory of a GPU that the device reads and writes.
    let pull = [GPU[0], GPU[1], ("PUSHGATE_PATH", "pull")];
    for gpu in [&[][..], &pull] {
        let log = traffic(&[&between[..], gpu].concat());
        let said = told(&log);
        assert_eq!(said.len(), 2, "{log}");
        for said in said {
            assert!(said.starts_with("verbs (") && said.contains("in another network namespace"), "{said}");
        }
        assert!(log.contains("queue pairs are local to ranks of this host, verbs to others: "), "{log}");
        let log = traffic(gpu);
        assert_eq!(told(&log), ["local: it is on this host"; 2], "{log}");
    }
    // Peers of both kinds at once. The GPU pushes to the one, and the RDMA device reads its memory for the other.
    for gpu in [&[][..], &pull] {
        let mut mixed = auto("mixed --groups 15");
        mixed.env("NCCL_CALLER_RANK_1", "_PUSHGATE_NET_HOST=elsewhere").envs(gpu.iter().copied());
        let (_, log) = logged(mixed);
        let said = told(&log);
        let verbs = said.iter().filter(|said| said.starts_with("verbs (")).count();
        assert_eq!((verbs, said.len()), (2, 3), "{log}");
    }
    // A rank of another host.
    let log = traffic(&[("NCCL_CALLER_RANK_1", "_PUSHGATE_NET_HOST=elsewhere")]);
    assert!(told(&log).iter().all(|said| said.starts_with("verbs (")) && told(&log).len() == 2, "{log}");
    // Without the device they go over TCP.
    for gpu in [&[][..], &GPU] {
        let mut command = auto("traffic --processes --groups 3");
        command.envs(between).env("PUSHGATE_IB_DEV", "none-such").envs(gpu.iter().copied());
        let (_, log) = logged(command);
        assert!(told(&log).iter().all(|said| said.starts_with("tcp: ")) && told(&log).len() == 2, "{log}");
    }
}
