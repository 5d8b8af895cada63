//! Hosts whose networks are not as a laptop's: without a default route, with IPv6 alone, with link-local addresses alone, with two
//! networks where one leads nowhere, with addresses on the loopback device. A host is a network namespace of the test's own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pushgate::{Comm, Context, QpConfig, Settings, UniqueId};
use pushgate_tests::built::{c_library, nccl_caller, plugin, pushgate, root, scratch};
use pushgate_tests::namespaces::{Namespaces, Running, ip};
use pushgate_tests::{hang, output, skip, wait_until};

/// Two hosts that are joined by cables, or by none.
struct Hosts(Namespaces);

impl Hosts {
    /// Makes two hosts, in which these commands of `ip` are run, first those of the first host. Nothing, once the reason was told,
    /// where this machine gives no namespaces. An interface `eth0` joins both hosts, and so does `eth1`.
    fn new(commands: [&[&str]; 2]) -> Option<Hosts> {
        let hosts = Hosts(Namespaces::new(2, |names| {
            let [a, b] = names else { unreachable!("two were asked for") };
            // Interfaces of one name have other numbers at the two hosts.
            ip(&format!("-n {b} link add more0 type veth peer name more1"))?;
            for eth in ["eth0", "eth1"] {
                ip(&format!("-n {a} link add {eth} type veth peer name {eth} netns {b}"))?;
            }
            Ok(())
        })?);
        for (host, commands) in commands.into_iter().enumerate() {
            for command in commands {
                ip(&format!("-n {} {command}", hosts.0.name(host))).unwrap();
            }
        }
        for host in 0..2 {
            // Both ends are up some time before the kernel reports a carrier.
            wait_until("interfaces have a carrier", || {
                let shown = ip(&format!("-n {} -o link show up", hosts.0.name(host))).unwrap();
                let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
                let cables = shown.lines().filter(|line| line.contains(": eth"));
                cables.into_iter().all(|line| line.contains("LOWER_UP") && line.contains("state UP"))
            });
        }
        Some(hosts)
    }

    /// A command on a host, without settings of the environment.
    fn command(&self, host: usize, program: &Path) -> Command {
        self.0.command(host, program)
    }

    /// Two ranks of NCCL's caller, one on each host, over tcp; returns whether they succeeded, and what they said.
    fn nccl(&self, set: &[(&str, &str)], second: &str) -> (bool, String) {
        let mut command = self.command(0, &nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
        command.args(["traffic", "--processes", "--groups", "3", "--plugin"]).arg(plugin());
        let within = format!("ip netns exec {}", self.0.name(1));
        command.env("NCCL_CALLER_RANK_1_WITHIN", within).env("NCCL_CALLER_VERBOSE", "1");
        command
            .env("PUSHGATE_QP", "tcp")
            .env("PUSHGATE_NET_WINDOW_SIZE", "256K")
            .env("NCCL_CALLER_RANK_1", second);
        command.envs(set.iter().copied()).stdin(Stdio::null());
        let output = output(&mut command, hang());
        (output.status.success(), text(&output))
    }

    /// Two ranks that reduce 64 KiB, which meet at this address of the first host.
    fn allreduce(&self, at: &str) {
        let rendezvous = format!("{at}:7117");
        let start = |host: usize| {
            let mut command = self.command(host, pushgate());
            command.args(["bench", "allreduce", "--ranks", "2", "--nodes", "2", "--node", &host.to_string()]);
            command.args(["--json", "--device", "cpu"]);
            command.args(["--qp", "tcp", "--rendezvous", &rendezvous, "--job", "addresses", "--size", "64K"]);
            Running::start(command.args(["--iters", "1", "--warmup", "0"]))
        };
        let said = both_succeed([0, 1].map(start));
        assert!(said.contains(r#""verified":true"#), "{said}");
    }

    /// Two ranks, each of a process on a host, meet by a unique id and make a queue pair: in Rust, then by the C API.
    fn meet_by_unique_id(&self) {
        let this = std::env::current_exe().unwrap();
        let rust = |rank: usize, file: &Path| {
            let mut command = self.command(rank, &this);
            command.args(["--ignored", "--exact", "a_rank_that_meets_another_by_a_unique_id", "--nocapture"]);
            command.env(RANK, rank.to_string()).env(FILE, file);
            command
        };
        self.meet(rust);
        let Some(program) = c_program() else { return };
        self.meet(|rank, file| {
            let mut command = self.command(rank, program);
            command.arg(rank.to_string()).arg(file);
            command
        });
    }

    /// Runs both ranks; the first one leaves the id in the file.
    fn meet(&self, rank: impl Fn(usize, &Path) -> Command) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("id-{}-{number}", std::process::id()));
        let set = [("PUSHGATE_DEVICE", "cpu"), ("PUSHGATE_QP", "tcp"), ("PUSHGATE_WINDOW_SIZE", "64K")];
        let ranks = [0, 1].map(|number| Running::start(rank(number, &file).envs(set)));
        let said = both_succeed(ranks);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(said.lines().filter(|line| line.ends_with("met")).count(), 2, "{said}");
    }

    /// The doctor of the second host, asked for the path to `at` of the first one, finds it whole, with these words about both ends'
    /// addresses; and finds no host at `nowhere`.
    fn doctor_finds(&self, at: &str, offers: &str, nowhere: &str) {
        let (code, said) = self.doctor_of_peer(at);
        assert!(said.contains(&format!("ranks offer {offers}")), "{said}");
        assert!(code < 2 && said.contains("lets this host in"), "{code}: {said}");
        let (code, said) = self.doctor(1, &["--peer", nowhere]);
        assert!(code == 2 && said.contains("peer-reach") && said.contains("ip route get"), "{code}: {said}");
    }

    /// What the doctor of a host says with these flags, and its exit status.
    fn doctor(&self, host: usize, flags: &[&str]) -> (i32, String) {
        let mut command = self.command(host, pushgate());
        let output = output(command.arg("doctor").args(flags).stdin(Stdio::null()), hang());
        (output.status.code().expect("it ends by itself"), text(&output))
    }

    /// What the doctor of the second host says of the path to this address of the first one.
    fn doctor_of_peer(&self, at: &str) -> (i32, String) {
        let mut listens = self.command(0, pushgate());
        let _listens = Running::start(listens.args(["doctor", "--listen", at]));
        let begin = Instant::now();
        loop {
            let (code, said) = self.doctor(1, &["--peer", at]);
            if !said.contains("refused") || begin.elapsed() > hang() {
                return (code, said);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).join("")
}

/// Waits for two ranks that must succeed; what they said.
#[track_caller]
fn both_succeed(ranks: [Running; 2]) -> String {
    let ended = ranks.map(Running::end);
    let said: String = ended.iter().map(|(_, out, err)| format!("{out}{err}")).collect();
    assert!(ended.iter().all(|(ok, ..)| *ok), "{said}");
    said
}

/// The variables that tell a process of this file's own test program which rank it is, and which file the id is in.
const RANK: &str = "_PUSHGATE_TEST_RANK";
const FILE: &str = "_PUSHGATE_TEST_ID";

#[test]
#[ignore = "a rank that other tests of this file start"]
fn a_rank_that_meets_another_by_a_unique_id() {
    let (Ok(rank), Some(file)) = (std::env::var(RANK), std::env::var_os(FILE).map(PathBuf::from)) else {
        return skip("a rank on a host: no test has started it");
    };
    let rank: u32 = rank.parse().unwrap();
    let context = Context::builder().settings(Settings::load().unwrap()).build().unwrap();
    let id: UniqueId = match rank {
        0 => {
            let id = UniqueId::new(&context).unwrap();
            let part = file.with_extension("part");
            std::fs::write(&part, id.to_string()).unwrap();
            std::fs::rename(&part, &file).unwrap();
            id
        }
        _ => {
            wait_until("rank 0 has made the id", || file.exists());
            std::fs::read_to_string(&file).unwrap().parse().unwrap()
        }
    };
    let comm = Comm::connect_with(&context, &id, rank, 2).unwrap();
    let _qp = comm.queue_pair(1 - rank, 0, QpConfig::default()).unwrap();
    comm.barrier().unwrap();
    println!("met");
}

/// A rank in C, compiled once; nothing, once the reason was told, where there is no compiler.
fn c_program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let program = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("meets-{}", std::process::id()));
        let why = match c_library() {
            None => "a bundle has no archive of the C API".into(),
            Some(library) => {
                let mut cc = Command::new("cc");
                cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root().join("c-api/include"));
                cc.arg(root().join("tests/tests/meets.c")).arg(library).arg("-o").arg(&program);
                cc.args(["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"]);
                match cc.output() {
                    Ok(output) if output.status.success() => return Some(program),
                    Ok(output) => panic!("{cc:?}: {}", text(&output)),
                    Err(e) => format!("cc: {e}"),
                }
            }
        };
        skip(&format!("ranks in C on two hosts: {why}"));
        None
    };
    PROGRAM.get_or_init(compile).as_deref()
}

const UP: [&str; 2] = ["link set eth0 up", "link set eth1 up"];

#[track_caller]
fn carried(hosts: &Hosts, set: &[(&str, &str)], at: &str) -> String {
    let (ok, log) = hosts.nccl(set, "");
    assert!(ok && log.contains("queue pairs are tcp, at ") && log.contains(at), "{log}");
    log
}

#[test]
fn without_a_default_route_ranks_reduce_over_tcp_and_the_doctor_names_the_address() {
    let commands = ["address add 10.80.0.1/24 dev eth0", "address add 10.80.0.2/24 dev eth0"];
    let Some(hosts) = Hosts::new([&[commands[0], UP[0]], &[commands[1], UP[0]]]) else { return };
    carried(&hosts, &[], "10.80.0.1 (eth0)");
    hosts.allreduce("10.80.0.1");
    hosts.meet_by_unique_id();
    let (_, said) = hosts.doctor(0, &["--qp", "tcp", "--only", "tcp-address"]);
    assert!(said.contains("others connect to this host at 10.80.0.1 (eth0)"), "{said}");
    hosts.doctor_finds("10.80.0.1", "10.80.0.2 (eth0) here, 10.80.0.1 (eth0) at the peer", "10.81.0.1");
}

#[test]
fn with_ipv6_alone_ranks_reduce_over_tcp() {
    let add = |n| format!("address add fd00:80::{n}/64 dev eth0 nodad");
    let [a, b] = [add(1), add(2)];
    let Some(hosts) = Hosts::new([&[&a, UP[0]], &[&b, UP[0]]]) else { return };
    carried(&hosts, &[], "fd00:80::1 (eth0)");
    hosts.allreduce("[fd00:80::1]");
    hosts.meet_by_unique_id();
    hosts.doctor_finds("fd00:80::1", "fd00:80::2 (eth0) here, fd00:80::1 (eth0) at the peer", "fd00:81::1");
}

#[test]
fn with_link_local_addresses_alone_each_end_takes_its_own_interface() {
    let add = |n| format!("address add fe80::{n}/64 dev eth0 nodad");
    let [a, b] = [add(1), add(2)];
    let down = "link set eth0 addrgenmode none";
    let Some(hosts) = Hosts::new([&[down, &a, UP[0]], &[down, &b, UP[0]]]) else { return };
    carried(&hosts, &[], "fe80::1%eth0");
    carried(
        &hosts,
        &[("PUSHGATE_HOST", "fe80::1%eth0"), ("NCCL_CALLER_RANK_1", "PUSHGATE_HOST=fe80::2%eth0")],
        "fe80::1%eth0",
    );
    hosts.allreduce("[fe80::1%eth0]");
    hosts.meet_by_unique_id();
    hosts.doctor_finds("[fe80::1%eth0]:7119", "fe80::2%eth0 here, fe80::1%eth0 at the peer", "10.81.0.1");
}

#[test]
fn where_the_default_route_is_of_a_network_that_does_not_lead_there_the_other_network_is_taken() {
    let add = |n: u32| {
        // The first network is another one at each host, and has the default route.
        [format!("address add 10.8{n}.0.{n}/24 dev eth0"), format!("address add 10.90.0.{n}/24 dev eth1")]
    };
    let [[a0, a1], [b0, b1]] = [add(1), add(2)];
    let routes = [1, 2].map(|n| format!("route add default via 10.8{n}.0.9 dev eth0"));
    let [ra, rb] = &routes;
    let Some(hosts) = Hosts::new([&[&a0, &a1, UP[0], UP[1], ra], &[&b0, &b1, UP[0], UP[1], rb]]) else {
        return;
    };
    let log = carried(&hosts, &[], "10.81.0.1 (eth0), 10.90.0.1 (eth1)");
    assert!(log.contains("10.82.0.2 (eth0), 10.90.0.2 (eth1)"), "{log}");
    hosts.allreduce("10.90.0.1");
    hosts.meet_by_unique_id();
    // Packets to another network go to a router that is not there.
    hosts.doctor_finds(
        "10.90.0.1",
        "10.82.0.2 (eth0), 10.90.0.2 (eth1) here, 10.81.0.1 (eth0), 10.90.0.1 (eth1) at the peer",
        "10.81.0.1",
    );
    // NCCL's own variable names the one.
    carried(&hosts, &[("NCCL_SOCKET_IFNAME", "=eth1")], "at 10.90.0.1 (eth1)");
    carried(
        &hosts,
        &[("NCCL_SOCKET_IFNAME", "^eth0"), ("NCCL_SOCKET_FAMILY", "AF_INET")],
        "at 10.90.0.1 (eth1)",
    );
    let (ok, log) = hosts.nccl(&[("NCCL_SOCKET_IFNAME", "ib")], "");
    assert!(
        !ok && log.contains("eth0 is not in NCCL_SOCKET_IFNAME=ib") && log.contains("PUSHGATE_HOST"),
        "{log}"
    );
}

#[test]
fn addresses_of_the_loopback_device_to_which_routes_lead_are_taken() {
    let set = |own: u32, other: u32| {
        [
            "link set eth0 addrgenmode none".to_owned(),
            format!("address add 10.91.0.{own}/32 dev lo"),
            format!("address add fe80::{own}/64 dev eth0 nodad"),
            UP[0].to_owned(),
            format!("route add 10.91.0.{other} via inet6 fe80::{other} dev eth0 src 10.91.0.{own}"),
        ]
    };
    let [a, b] = [set(1, 2), set(2, 1)];
    let refs = |all: &[String; 5]| all.each_ref().map(|text| text.clone());
    let (a, b) = (refs(&a), refs(&b));
    let (a, b): (Vec<&str>, Vec<&str>) = (a.iter().map(|t| &**t).collect(), b.iter().map(|t| &**t).collect());
    let Some(hosts) = Hosts::new([&a, &b]) else { return };
    carried(&hosts, &[], "10.91.0.1 (lo)");
    hosts.allreduce("10.91.0.1");
    hosts.meet_by_unique_id();
    hosts.doctor_finds("10.91.0.1", "10.91.0.2 (lo) here, 10.91.0.1 (lo) at the peer", "10.81.0.1");
}

#[test]
fn interfaces_of_unlike_mtu_carry_what_fits() {
    let add = |n: u32, mtu: u32| {
        [format!("link set eth0 mtu {mtu}"), format!("address add 10.92.0.{n}/24 dev eth0"), UP[0].to_owned()]
    };
    let [a, b] = [add(1, 9000), add(2, 1400)];
    let refs = |all: &[String; 3]| all.iter().map(String::as_str).map(str::to_owned).collect::<Vec<_>>();
    let (a, b) = (refs(&a), refs(&b));
    let (a, b): (Vec<&str>, Vec<&str>) = (a.iter().map(|t| &**t).collect(), b.iter().map(|t| &**t).collect());
    let Some(hosts) = Hosts::new([&a, &b]) else { return };
    carried(&hosts, &[], "10.92.0.1 (eth0)");
    hosts.allreduce("10.92.0.1");
    hosts.meet_by_unique_id();
    hosts.doctor_finds("10.92.0.1", "10.92.0.2 (eth0) here, 10.92.0.1 (eth0) at the peer", "10.81.0.1");
}

#[test]
fn a_host_that_others_do_not_reach_says_why_and_names_the_setting() {
    let Some(hosts) = Hosts::new([&[], &[]]) else { return };
    let (ok, log) = hosts.nccl(&[], "");
    assert!(!ok, "{log}");
    for says in [
        "127.0.0.1 (lo), ::1 (lo), which no other host reaches",
        "eth0 is down",
        "set PUSHGATE_HOST",
        "on that host",
    ] {
        assert!(log.contains(says), "{says}: {log}");
    }
    let (ok, log) = hosts.nccl(&[("PUSHGATE_QP", "auto")], "_PUSHGATE_NET_HOST=elsewhere");
    assert!(!ok && log.contains("which no other host reaches") && log.contains("PUSHGATE_HOST"), "{log}");
    let (code, said) = hosts.doctor(0, &["--qp", "tcp", "--only", "tcp-address"]);
    assert!(
        code == 2 && said.contains("which no other host reaches") && said.contains("PUSHGATE_HOST"),
        "{said}"
    );
    let (code, said) = hosts.doctor(0, &["--only", "tcp-address"]);
    assert!(code == 1 && said.contains("queue pairs are local, to ranks of this host alone"), "{said}");
}
