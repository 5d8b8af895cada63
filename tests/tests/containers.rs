//! Two containers of one host, which share neither network, PID, IPC, mount nor user namespace, and at most a folder: ranks find each
//! other there, and queue pairs are `local`; without the folder they fall to TCP, and are told so.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use pushgate_tests::built::{nccl_caller, plugin, pushgate};
use pushgate_tests::namespaces::{Namespaces, Running, ip};
use pushgate_tests::{hang, output, skip, wait_until};

/// Makes a container of a network namespace: what stands before a program.
const CONTAINER: &str = "unshare --user --map-root-user --pid --ipc --mount --fork --kill-child --mount-proc";

/// Two containers, whose networks are joined by a cable, and a folder.
struct Containers {
    networks: Namespaces,
    folder: PathBuf,
}

impl Containers {
    /// Nothing, once the reason was told, where this machine gives no such namespaces.
    fn new() -> Option<Containers> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let networks = Namespaces::new(2, |names| {
            ip(&format!("-n {} link add eth0 type veth peer name eth0 netns {}", names[0], names[1]))?;
            for (name, n) in names.iter().zip(1..) {
                ip(&format!("-n {name} address add 10.93.0.{n}/24 dev eth0"))?;
                ip(&format!("-n {name} link set eth0 up"))?;
            }
            Ok(())
        })?;
        wait_until("the cable has a carrier", || {
            [0, 1].iter().all(|host| {
                let shown = ip(&format!("-n {} -o link show eth0", networks.name(*host))).unwrap();
                String::from_utf8_lossy(&shown.stdout).contains("state UP")
            })
        });
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("pushgate-containers-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let containers = Containers { networks, folder };
        let tried = output(containers.command(0, Path::new("true")).stdin(Stdio::null()), hang());
        if !tried.status.success() {
            skip(&format!("containers: no namespaces: {}", text(&tried)));
            return None;
        }
        Some(containers)
    }

    /// A command in a container, without settings of the environment.
    fn command(&self, container: usize, program: &Path) -> Command {
        let mut words = CONTAINER.split(' ');
        let mut command = self.networks.command(container, Path::new(words.next().expect("a program")));
        command.args(words).arg(program).env("PUSHGATE_LOG", "info");
        command
    }

    /// Two ranks, one in each container, reduce 64 KiB with these settings; returns whether they succeeded, and what they said.
    fn allreduce(&self, set: &[(&str, &str)]) -> (bool, String) {
        let start = |rank: usize| {
            let mut command = self.command(rank, pushgate());
            command.args("bench allreduce --json --device cpu --size 64K --iters 2 --warmup 0".split(' '));
            command.env("PUSHGATE_RANK", rank.to_string()).env("PUSHGATE_RANKS", "2");
            command.env("PUSHGATE_JOB", "containers").envs(set.iter().copied());
            Running::start(&mut command)
        };
        let ended = [0, 1].map(start).map(Running::end);
        (ended.iter().all(|end| end.0), ended.map(|(_, out, err)| out + &err).concat())
    }

    /// Two ranks of NCCL's caller, one in each network and the second one in a container; what they said.
    fn nccl(&self, set: &[(&str, &str)]) -> String {
        // The first rank makes the second one's container, which it may not do out of a container of its own.
        let mut command = self.networks.command(0, &nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
        command.args(["traffic", "--processes", "--groups", "3", "--plugin"]).arg(plugin());
        let second = format!("ip netns exec {} {CONTAINER}", self.networks.name(1));
        command.env("NCCL_CALLER_RANK_1_WITHIN", second).env("NCCL_CALLER_VERBOSE", "1");
        command.env("PUSHGATE_NET_WINDOW_SIZE", "256K").envs(set.iter().copied()).stdin(Stdio::null());
        let output = output(&mut command, hang());
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    fn left(&self) -> usize {
        std::fs::read_dir(&self.folder).unwrap().count()
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).join("")
}

#[test]
fn ranks_of_one_job_in_two_containers_meet_in_a_folder_that_both_have() {
    let Some(containers) = Containers::new() else { return };
    let folder = containers.folder.to_str().unwrap();
    let (ok, said) = containers.allreduce(&[("PUSHGATE_LOCAL_FOLDER", folder)]);
    assert!(ok && said.contains(r#""qp":"local""#) && said.contains(r#""verified":true"#), "{said}");
    assert_eq!(containers.left(), 0, "sockets go with their ranks");
    let (ok, said) = containers.allreduce(&[("PUSHGATE_TIMEOUT", "1s")]);
    assert!(!ok && said.contains("PUSHGATE_LOCAL_FOLDER"), "{said}");
}

#[test]
fn ranks_of_two_containers_that_met_over_tcp_are_local_with_a_folder_and_are_told_without() {
    let Some(containers) = Containers::new() else { return };
    let folder = containers.folder.to_str().unwrap();
    let met = [("PUSHGATE_RENDEZVOUS", "10.93.0.1:7117"), ("PUSHGATE_QP", "auto")];
    let (ok, said) = containers.allreduce(&[&met[..], &[("PUSHGATE_LOCAL_FOLDER", folder)]].concat());
    assert!(ok && said.contains(r#""qp":"local""#) && said.contains(r#""verified":true"#), "{said}");
    assert_eq!(containers.left(), 0, "sockets go with their ranks");
    let (ok, said) = containers.allreduce(&met);
    assert!(ok && said.contains(r#""qp":"tcp""#), "{said}");
    for rank in [0, 1] {
        let says = format!("rank {rank} runs on this host too, and queue pairs with it are tcp, not local: ");
        assert!(said.contains(&says) && said.contains("PUSHGATE_LOCAL_FOLDER"), "{said}");
    }
}

#[test]
fn nccl_ranks_of_two_containers_are_local_with_a_folder_and_are_told_without() {
    let Some(containers) = Containers::new() else { return };
    let folder = containers.folder.to_str().unwrap();
    let reached = |said: &str, by: &str| said.matches(&format!("are {by}")).count();
    let said = containers.nccl(&[("PUSHGATE_LOCAL_FOLDER", folder)]);
    assert_eq!(reached(&said, "local: it is on this host"), 2, "{said}");
    assert_eq!(containers.left(), 0, "sockets go with their ranks");
    let said = containers.nccl(&[]);
    assert_eq!(reached(&said, "tcp: "), 2, "{said}");
    assert!(said.contains("runs on this host too") && said.contains("PUSHGATE_LOCAL_FOLDER"), "{said}");
}

#[test]
fn a_folder_that_can_not_be_used_is_named_with_its_setting() {
    let Some(containers) = Containers::new() else { return };
    for (folder, says) in [("/no/such", "a folder that exists"), ("here", "an absolute path")] {
        let (ok, said) = containers.allreduce(&[("PUSHGATE_LOCAL_FOLDER", folder)]);
        let named = format!("invalid local-folder `{folder}` (from PUSHGATE_LOCAL_FOLDER): expected {says}");
        assert!(!ok && said.contains(&named), "{said}");
        let mut doctor = containers.command(0, pushgate());
        doctor.args(["doctor", "--only", "settings", "--local-folder", folder]).stdin(Stdio::null());
        let said = text(&output(&mut doctor, hang()));
        assert!(said.contains("failed") && said.contains(says) && said.contains("local-folder"), "{said}");
    }
}
