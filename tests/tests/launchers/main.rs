//! Tests ranks as launchers start them: under mpirun where it is installed, and with the variables of torchrun, MPICH, Slurm
//! and `pushgate run` set by hand. `run.rs` tests `pushgate run` itself.

mod run;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_tests::{hang, pushgate, skip};

/// Held by each test: there may be few cores, so one group of processes runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A program without the variables of any launcher and without settings.
fn program(path: impl AsRef<Path>) -> Command {
    let mut command = Command::new(path.as_ref());
    let keep = |name: &str| ["PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "USER", "LOGNAME"].contains(&name);
    command.env_clear().envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(keep)));
    command.env("PUSHGATE_TIMEOUT", hang().as_millis().to_string());
    command.stdin(Stdio::null());
    command
}

/// A program that runs. Dropping it kills it.
struct Run {
    child: Child,
    output: [Option<JoinHandle<String>>; 2],
    start: Instant,
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    fn start(command: &mut Command) -> Run {
        fn collect(mut from: impl Read + Send + 'static) -> Option<JoinHandle<String>> {
            Some(std::thread::spawn(move || {
                let mut bytes = Vec::new();
                from.read_to_end(&mut bytes).unwrap();
                String::from_utf8(bytes).unwrap()
            }))
        }
        let start = Instant::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = [collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap())];
        Run { child, output, start }
    }

    fn end(mut self) -> Ended {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(self.start.elapsed() < 2 * hang(), "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        // The output is complete when the last process that has it open is gone.
        let [stdout, stderr] = self.output.each_mut().map(|o| o.take().unwrap().join().unwrap());
        Ended { code: status.code(), stdout, stderr }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A bench of few bytes that prints one line.
const ALLREDUCE: [&str; 11] =
    ["bench", "allreduce", "--device", "cpu", "--size", "4K", "-n", "2", "-w", "1", "--csv"];

/// Checks that a table of one size, of that many ranks, was printed once.
#[track_caller]
fn is_table(stdout: &str, ranks: u32) {
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{stdout}");
    let row: BTreeMap<&str, &str> = lines[0].split(',').zip(lines[1].split(',')).collect();
    assert_eq!((row["ranks"], row["verified"]), (ranks.to_string().as_str(), "true"), "{stdout}");
}

/// Starts the command as each of several ranks, with variables in which `@` stands for the rank.
fn by_hand(variables: &str, ranks: u32, arguments: &[&str]) -> Vec<Ended> {
    each(pushgate(), variables, ranks, arguments)
}

/// Starts a program as each of several ranks.
fn each(path: &Path, variables: &str, ranks: u32, arguments: &[&str]) -> Vec<Ended> {
    let start = |rank: u32| {
        let mut command = program(path);
        for pair in variables.replace('@', &rank.to_string()).split_whitespace() {
            let (name, value) = pair.split_once('=').unwrap();
            command.env(name, value);
        }
        Run::start(command.args(arguments))
    };
    let all: Vec<Run> = (0..ranks).map(start).collect();
    all.into_iter().map(Run::end).collect()
}

#[test]
fn processes_with_a_launchers_variables_are_the_ranks_and_rank_0_alone_prints() {
    let _alone = alone();
    let own = std::process::id();
    for variables in [
        format!(
            "RANK=@ WORLD_SIZE=3 LOCAL_RANK=@ LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
             TORCHELASTIC_RUN_ID=test-{own}"
        ),
        // The parent, which names the job, is this test.
        "PMI_RANK=@ PMI_SIZE=3 MPI_LOCALRANKID=@ MPI_LOCALNRANKS=3".into(),
        format!(
            "SLURM_JOB_ID={own} SLURM_STEP_ID=0 SLURM_PROCID=@ SLURM_NTASKS=3 SLURM_LOCALID=@ SLURM_NODEID=0 \
             SLURM_STEP_NODELIST=node7 SLURM_STEP_TASKS_PER_NODE=3"
        ),
        format!("PUSHGATE_RANK=@ PUSHGATE_RANKS=3 PUSHGATE_LOCAL_RANK=@ PUSHGATE_JOB=by-hand-{own}"),
    ] {
        for (rank, ended) in by_hand(&variables, 3, &ALLREDUCE).into_iter().enumerate() {
            assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{variables}");
            match rank {
                0 => is_table(&ended.stdout, 3),
                _ => assert_eq!(ended.stdout, "", "{variables}"),
            }
        }
    }
}

#[test]
fn a_setting_without_effect_is_told_by_rank_0_alone() {
    let _alone = alone();
    let variables = format!(
        "PUSHGATE_RANK=@ PUSHGATE_RANKS=2 PUSHGATE_JOB=idle-{} PUSHGATE_QP=local PUSHGATE_TCP_STREAMS=2",
        std::process::id()
    );
    let said: Vec<String> =
        by_hand(&variables, 2, &ALLREDUCE).into_iter().map(|ended| ended.stderr).collect();
    assert_eq!(said, ["pushgate: warning: tcp-streams has no effect: queue pairs are not tcp\n", ""]);
}

#[test]
fn ranks_of_several_hosts_meet_where_their_launcher_says() {
    let _alone = alone();
    // The launcher's own port is the one before.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // Not a number that others are likely to take at the same time.
    let job = std::process::id();
    for (variables, place) in [
        (
            format!(
                "RANK=@ WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={}",
                port - 1
            ),
            format!("127.0.0.1:{port}"),
        ),
        (
            format!(
                "SLURM_JOB_ID={job} SLURM_STEP_ID=7 SLURM_PROCID=@ SLURM_NTASKS=3 SLURM_LOCALID=0 SLURM_NODEID=@ \
             SLURM_STEP_NODELIST=localhost,node[1-2] SLURM_STEP_TASKS_PER_NODE=1(x3)"
            ),
            format!("localhost:{}", 23000 + (job * 16 + 7) % 4000),
        ),
        (
            format!(
                "OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 \
                 PMIX_NAMESPACE=several PUSHGATE_RENDEZVOUS=127.0.0.1:{port}"
            ),
            format!("127.0.0.1:{port}"),
        ),
    ] {
        for (rank, ended) in each(pushgate(), &variables, 3, &["ranks", "--join"]).into_iter().enumerate() {
            assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{variables}");
            let lines: Vec<&str> = ended.stdout.lines().collect();
            assert!(lines[0].ends_with(&format!(", meets at {place}")), "{lines:?}");
            // These hosts are one, as the ranks find.
            assert_eq!(lines[1], format!("rank {rank}: all 3 are there, queue pairs would be local"));
        }
    }
}

#[test]
fn a_process_that_no_launcher_started_is_no_rank() {
    let ended = each(pushgate(), "PUSHGATE_QP=local", 1, &["ranks"]).remove(0);
    let says = "no rank: no launcher has started this process\n";
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(0), says, ""));
    let ended = each(pushgate(), "", 1, &["ranks", "--join"]).remove(0);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), says));
    let says = "pushgate: invalid launcher `none`: expected pushgate run, torchrun, mpirun or srun";
    assert!(ended.stderr.starts_with(says), "{}", ended.stderr);
}

#[test]
fn p7_a_rank_that_its_launcher_did_not_start_is_named() {
    let _alone = alone();
    let own = std::process::id();
    // Long enough for two processes to start on a busy machine.
    let variables = format!(
        "RANK=@ WORLD_SIZE=4 LOCAL_RANK=@ LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1 TORCHELASTIC_RUN_ID=absent-{own} \
         PUSHGATE_TIMEOUT=3s"
    );
    let all = by_hand(&variables, 2, &ALLREDUCE);
    let says = &all[0].stderr;
    assert!(says.starts_with("pushgate: waiting for rank 2, 3 timed out after 3s"), "{says}");
    assert_eq!(all.iter().map(|ended| ended.code).collect::<Vec<_>>(), [Some(1); 2]);
}

#[test]
fn variables_that_contradict_each_other_end_the_bench_with_2() {
    let _alone = alone();
    for (variables, arguments, says) in [
        (
            "RANK=2 WORLD_SIZE=2",
            &ALLREDUCE[..],
            "pushgate: invalid RANK `2`: expected 0 to 1, below WORLD_SIZE=2\n",
        ),
        (
            "PUSHGATE_RANK=0 PUSHGATE_RANKS=2",
            &["bench", "allreduce", "--ranks", "3"],
            "pushgate: invalid ranks `3` (from --ranks): expected 2, as pushgate run says\n",
        ),
        (
            "PUSHGATE_RANK=0 PUSHGATE_RANKS=2",
            &["bench", "allreduce", "--nodes", "2"],
            "pushgate: invalid nodes `2` (from --nodes): expected none beside one rank, which pushgate run named\n",
        ),
    ] {
        let ended = by_hand(variables, 1, arguments).remove(0);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(2), says), "{variables}");
    }
}

#[test]
fn a_shell_that_a_launcher_started_alone_may_start_ranks_of_its_own() {
    let _alone = alone();
    let variables = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1";
    let arguments = [&ALLREDUCE[..], &["--ranks", "2"]].concat();
    let ended = by_hand(variables, 1, &arguments).remove(0);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    is_table(&ended.stdout, 2);
}

#[test]
fn ranks_are_started_by_mpirun() {
    let _alone = alone();
    let mut seen = 0;
    for name in ["mpirun.openmpi", "mpiexec.hydra", "mpirun"] {
        let Ok(version) = Command::new(name).arg("--version").output() else { continue };
        let is_mpich = String::from_utf8_lossy(&version.stdout).contains("HYDRA");
        let start = |ranks: u32, of: &Path, arguments: &[&str]| {
            let mut command = program(name);
            if !is_mpich {
                // Open MPI refuses root, and more ranks than cores, unless it is told.
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                command.arg("--oversubscribe");
            }
            let ended = Run::start(command.args(["-n", &ranks.to_string()]).arg(of).args(arguments)).end();
            assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{name}");
            ended.stdout
        };
        is_table(&start(3, pushgate(), &ALLREDUCE), 3);
        let bench = ["bench", "osu-latency", "--device", "cpu", "-m", "8:8", "-i", "5", "-x", "1", "--json"];
        let line = start(2, pushgate(), &bench);
        assert_eq!((line.lines().count(), line.contains("\"osu-latency\"")), (1, true), "{name}: {line}");
        seen += 1;
    }
    if seen == 0 {
        skip("there is no mpirun (Debian: openmpi-bin or mpich)");
    }
}
