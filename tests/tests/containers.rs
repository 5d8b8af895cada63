//! Two containers of one host, which share neither network, PID, IPC, mount nor user namespace, and at most a folder: ranks find each
//! other there, and queue pairs are `local`; without the folder they fall to TCP, and are told so.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use pushgate::settings::PluginSettings;
use pushgate_tests::built::{example, nccl_caller, plugin, pushgate};
use pushgate_tests::{hang, output, wait_until};

/// What makes a container of a network namespace: a command before the program.
const CONTAINER: &str = "unshare --user --map-root-user --pid --ipc --mount --fork --kill-child --mount-proc";

/// Two containers, whose networks are joined by a cable, and a folder.
struct Containers {
    networks: [String; 2],
    folder: PathBuf,
}

fn ip(arguments: &str) -> Result<(), String> {
    run(Command::new("ip").args(arguments.split(' ')))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Containers {
    /// Nothing, once the reason was told, where this machine gives no such namespaces.
    fn new() -> Option<Containers> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("pgc{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(&id);
        std::fs::create_dir(&folder).unwrap();
        let containers = Containers { networks: [format!("{id}-a"), format!("{id}-b")], folder };
        let [a, b] = &containers.networks;
        let make = || -> Result<(), String> {
            for network in [a, b] {
                ip(&format!("netns add {network}"))?;
                ip(&format!("-n {network} link set lo up"))?;
            }
            ip(&format!("-n {a} link add eth0 type veth peer name eth0 netns {b}"))?;
            for (network, n) in [(a, 1), (b, 2)] {
                ip(&format!("-n {network} address add 10.93.0.{n}/24 dev eth0"))?;
                ip(&format!("-n {network} link set eth0 up"))?;
            }
            run(containers.command(0, Path::new("true")).stdin(Stdio::null()))?;
            wait_until("the cable has a carrier", || {
                [a, b].iter().all(|network| {
                    let shown =
                        Command::new("ip").args(["-n", network, "-o", "link", "show", "eth0"]).output();
                    String::from_utf8_lossy(&shown.unwrap().stdout).contains("state UP")
                })
            });
            Ok(())
        };
        match make() {
            Ok(()) => Some(containers),
            Err(why) => {
                pushgate_tests::skip(&format!("containers: no namespaces: {why}"));
                None
            }
        }
    }

    fn within(&self, container: usize) -> String {
        format!("ip netns exec {} {CONTAINER}", self.networks[container])
    }

    /// A command in a container, without settings of the environment.
    fn command(&self, container: usize, program: &Path) -> Command {
        Self::bare(&self.within(container), program)
    }

    fn bare(within: &str, program: &Path) -> Command {
        let mut words = within.split(' ');
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).arg(program);
        for key in PluginSettings::keys() {
            command.env_remove(key.variable());
        }
        command.env_remove("PUSHGATE_CONFIG").env("PUSHGATE_LOG", "info");
        command.env("PUSHGATE_SECRET", "a secret that these two containers alone know");
        command
    }

    /// Two ranks, one in each container, reduce 64 KiB with these settings; returns whether they succeeded, and what they said.
    fn allreduce(&self, set: &[(&str, &str)]) -> (bool, String) {
        let program = example("allreduce");
        let start = |rank: usize| {
            let mut command = self.command(rank, &program);
            let rank = rank.to_string();
            command.args("--json --device cpu --size 64K --iters 2 --warmup 0".split(' '));
            command.env("PUSHGATE_RANK", rank).env("PUSHGATE_RANKS", "2").env("PUSHGATE_JOB", "containers");
            Running::start(command.envs(set.iter().copied()))
        };
        let ended = [0, 1].map(start).map(Running::end);
        (ended.iter().all(|output| output.status.success()), ended.iter().map(text).collect())
    }

    /// Two ranks of NCCL's caller, one in each network and the second one in a container; what they said.
    fn nccl(&self, set: &[(&str, &str)]) -> String {
        // The first rank makes the second one's container, which it may not do out of a container of its own.
        let network = format!("ip netns exec {}", self.networks[0]);
        let mut command = Self::bare(&network, &nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
        command.args(["traffic", "--processes", "--groups", "3", "--plugin"]).arg(plugin());
        command.env("NCCL_CALLER_RANK_1_WITHIN", self.within(1)).env("NCCL_CALLER_VERBOSE", "1");
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
        // The cable goes with them. Some may not have been made.
        for network in &self.networks {
            let _ = ip(&format!("netns delete {network}"));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).join("")
}

/// A program that is killed when the test gives up.
struct Running(Option<Child>);

impl Running {
    fn start(command: &mut Command) -> Running {
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(Some(piped.spawn().unwrap()))
    }

    fn end(mut self) -> Output {
        let begin = Instant::now();
        let child = self.0.as_mut().expect("it runs");
        while child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < hang(), "a rank hangs");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        self.0.take().expect("it runs").wait_with_output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // This is `unshare`, whose end the kernel answers by ending the rank.
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
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
