//! Ranks of several hosts over TCP: network namespaces of the tests' own, joined by a bridge. Where the user may make none,
//! or there is no `ip`, the tests say so.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushgate_tests::namespaces::{Namespaces, Running, ip};
use pushgate_tests::{hang, patience, pushgate, wait_until};
use serde_json::Value;

/// Held by each test: there may be few cores.
static ONE: Mutex<()> = Mutex::new(());

const HOSTS: usize = 4;

/// Hosts: each a network namespace with one end of a veth pair. The other ends lie in a bridge, in one more namespace.
struct Hosts {
    namespaces: Namespaces,
    _alone: MutexGuard<'static, ()>,
}

impl Hosts {
    /// Makes the hosts; nothing, once the reason was told, where this machine allows none.
    fn new() -> Option<Hosts> {
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let namespaces = Namespaces::new(HOSTS + 1, |names| {
            let switch = &names[HOSTS];
            ip(&format!("-n {switch} link add bridge type bridge"))?;
            ip(&format!("-n {switch} link set bridge up"))?;
            for (i, name) in names[..HOSTS].iter().enumerate() {
                ip(&format!("-n {switch} link add port{i} type veth peer name eth0 netns {name}"))?;
                ip(&format!("-n {switch} link set port{i} master bridge up"))?;
                ip(&format!("-n {name} address add {}/24 dev eth0", Hosts::address(i)))?;
                ip(&format!("-n {name} link set eth0 up"))?;
            }
            Ok(())
        })?;
        Some(Hosts { namespaces, _alone: alone })
    }

    fn address(host: usize) -> String {
        format!("10.79.0.{}", host + 1)
    }

    /// This host's part of an allreduce.
    fn command(&self, host: usize) -> Command {
        let mut command = self.namespaces.command(host, pushgate());
        command.args(["bench", "allreduce", "--device", "cpu", "--node", &host.to_string()]);
        command.args(["--rendezvous", &format!("{}:7117", Hosts::address(0))]);
        command
    }

    /// Starts one rank on each host.
    fn start(&self, args: &[&str]) -> Vec<Running> {
        let one = |host: usize| {
            let mut command = self.command(host);
            command.args(["--ranks", "4", "--nodes", "4", "--json", "--qp", "tcp", "--job", "hosts"]);
            Running::start(command.args(args))
        };
        (0..HOSTS).map(one).collect()
    }

    /// Bytes that a host has sent.
    fn sent(&self, host: usize) -> u64 {
        let file = "/sys/class/net/eth0/statistics/tx_bytes";
        let read = self.namespaces.command(host, Path::new("cat")).arg(file).output();
        let text = read.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Pulls a host's cable, or plugs it in.
    fn cable(&self, host: usize, state: &str) {
        ip(&format!("-n {} link set port{host} {state}", self.namespaces.name(HOSTS))).unwrap();
    }
}

fn verified(ended: Vec<(bool, String, String)>) {
    // Of all of them, because the rank that failed first is the one that knows why.
    let said: String =
        ended.iter().enumerate().map(|(i, (_, out, err))| format!("host {i}:\n{out}{err}")).collect();
    assert!(ended.iter().all(|(ok, ..)| *ok), "{said}");
    let line: Value = serde_json::from_str(ended[0].1.lines().last().unwrap_or("")).unwrap();
    assert_eq!((&line["verified"], &line["dropped"]), (&true.into(), &0.into()), "{line}");
}

#[test]
fn ranks_of_four_hosts_reduce_16_mib_over_tcp_in_clear_and_encrypted() {
    let Some(hosts) = Hosts::new() else { return };
    for more in [&["--tcp-streams", "1"][..], &["--tcp-streams", "3"], &["--tls"]] {
        // The limit guards against a hang: four ranks share the cores with whatever runs beside them.
        let args = [&["--size", "16M", "--iters", "1", "--timeout", "5min"][..], more].concat();
        verified(hosts.start(&args).into_iter().map(Running::end).collect());
    }
}

#[test]
fn ranks_of_one_host_are_local_and_those_of_two_tcp_without_a_choice() {
    let Some(hosts) = Hosts::new() else { return };
    // Two ranks on each of the first two hosts, one on each of the others.
    let one = |host: usize| {
        let mut command = hosts.command(host);
        command.args(["--ranks", "6", "--nodes", "4", "--json", "--job", "pairs", "--size", "64K"]);
        command.args(["--iters", "1", "--warmup", "0", "--out-of-place"]);
        Running::start(command.env("PUSHGATE_LOG", "info"))
    };
    let ended: Vec<_> = (0..HOSTS).map(one).collect::<Vec<_>>().into_iter().map(Running::end).collect();
    let said: String = ended.iter().map(|(_, _, err)| err.as_str()).collect();
    let host_of = |rank: u32| if rank < 4 { rank / 2 } else { rank - 2 };
    for (rank, peer) in (0..6).flat_map(|a| (0..6).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        let transport = if host_of(rank) == host_of(peer) { "local" } else { "tcp" };
        let says = format!("queue pairs with rank {peer} are {transport}: ");
        let lines: Vec<_> = said.lines().filter(|line| line.contains(&says)).collect();
        let own = lines.iter().filter(|line| line.contains(&format!("rank={rank}"))).count();
        assert_eq!(own, 1, "rank {rank}: {says}\n{said}");
    }
    let line: Value = serde_json::from_str(ended[0].1.lines().last().unwrap_or("")).unwrap();
    assert_eq!(line["qp"], "local+tcp", "{line}");
    verified(ended);
}

#[test]
fn p6_a_host_that_is_cut_off_for_a_second_goes_on_and_nothing_is_lost() {
    let Some(hosts) = Hosts::new() else { return };
    let patience = hang().as_millis().to_string();
    let args = ["--size", "16M", "--iters", "12", "--timeout", &patience, "--recover", "20s"];
    let ranks = hosts.start(&args);
    wait_until("much has been sent", || hosts.sent(3) > 40 << 20);
    hosts.cable(3, "down");
    std::thread::sleep(Duration::from_secs(1));
    hosts.cable(3, "up");
    let before = hosts.sent(3);
    verified(ranks.into_iter().map(Running::end).collect());
    assert!(hosts.sent(3) > before + (16 << 20), "the cable was pulled when all was over");
}

#[test]
fn p7_a_host_that_stays_cut_off_ends_the_job_and_is_named() {
    let Some(hosts) = Hosts::new() else { return };
    let timeout = format!("{}ms", patience(Duration::from_secs(8)).as_millis());
    let ranks = hosts.start(&["--size", "16M", "--iters", "1000", "--timeout", &timeout, "--recover", "2s"]);
    wait_until("much has been sent", || hosts.sent(3) > 40 << 20);
    hosts.cable(3, "down");
    let ended: Vec<_> = ranks.into_iter().map(Running::end).collect();
    assert!(ended.iter().all(|(ok, ..)| !ok), "{ended:?}");
    // Some find the host gone, others hear of it from these.
    assert!(ended[..3].iter().any(|(.., err)| err.contains("rank 3")), "{ended:?}");
    for (_, out, err) in &ended[..3] {
        // Which of those that leave is noticed first depends on timing.
        let says = ["link", " is lost", "aborted by rank"].iter().any(|what| err.contains(what));
        assert!(says, "{out}{err}");
    }
}

#[test]
fn p8_hosts_with_another_secret_or_none_do_not_get_in() {
    let Some(hosts) = Hosts::new() else { return };
    let timeout = format!("{}ms", patience(Duration::from_secs(3)).as_millis());
    for (secret, says) in [(Some("another secret of many bytes"), "secret"), (None, "secret")] {
        let start = |host: usize| {
            let mut command = hosts.command(host);
            command.args(["--ranks", "2", "--nodes", "2", "--timeout", &timeout, "--job", "hosts"]);
            command.args(["--qp", "tcp", "--size", "64K"]);
            if host == 1 {
                match secret {
                    Some(secret) => _ = command.env("PUSHGATE_SECRET", secret),
                    None => _ = command.env_remove("PUSHGATE_SECRET"),
                }
            }
            Running::start(&mut command)
        };
        for (ok, out, err) in [start(0), start(1)].map(Running::end).iter().skip(1) {
            assert!(!ok && err.contains(says), "{out}{err}");
        }
    }
}
