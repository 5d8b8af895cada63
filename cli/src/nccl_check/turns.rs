//! One turn: the processes of all ranks, started for one transport, watched, and ended.
//!
//! Every wait ends. A rank that says nothing for too long, or that fails, ends the turn, and what NCCL's log said last
//! is told with it.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::barrier::Barrier;
use super::evidence::Evidence;
use super::rank::{MARK, Said, TASK, Task, Timed};
use super::transport::Way;
use crate::signals;

/// How long ranks may take to end by themselves after one of them has failed, so that each says its own part.
const GRACE: Duration = Duration::from_secs(2);
/// How long the last words of ranks that have all ended are waited for. They are in the pipes, and the threads that read
/// those may be late on a busy machine. A process that a rank left behind may hold a pipe for ever.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Of a rank's own log, bytes at most: a log at INFO has some hundred kilobytes.
const LONGEST: u64 = 16 << 20;

/// What is the same in all turns.
pub struct Plan {
    /// The program that becomes a rank, with its arguments.
    pub program: (PathBuf, Vec<OsString>),
    /// A rank's task, but for its number and folder.
    pub task: Task,
    pub plugin: PathBuf,
    /// What CUDA_VISIBLE_DEVICES shows of each GPU.
    pub gpus: Vec<String>,
    /// Settings of the command line, for the plugin.
    pub settings: Vec<(String, String)>,
    /// Most time in which no rank says anything.
    pub silence: Duration,
}

/// What a turn brought.
#[derive(Debug, Default)]
pub struct Turn {
    /// One entry for each rank, collective and size.
    pub rows: Vec<Timed>,
    pub device: Option<String>,
    pub logs: Vec<Evidence>,
}

/// The processes. All of them are ended on drop, by their numbers.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        // All stop before one of them dies: the others would write that it is lost.
        for signal in [Signal::STOP, Signal::KILL] {
            // One that was waited for is gone, and its number another's.
            for child in self.0.iter_mut().filter_map(|c| matches!(c.try_wait(), Ok(None)).then_some(c)) {
                let _ = kill_process(Pid::from_child(child), signal);
            }
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}

/// Passes on what a rank says.
fn listen(rank: usize, stdout: ChildStdout, sender: Sender<(usize, Said)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let said = line.strip_prefix(MARK).and_then(|said| serde_json::from_str(said).ok());
            if said.is_some_and(|said| sender.send((rank, said)).is_err()) {
                return;
            }
        }
    });
}

/// The end of a file's text.
fn read(path: &Path) -> String {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let Ok(mut file) = File::open(path) else { return String::new() };
    let length = file.metadata().map_or(0, |m| m.len());
    let mut bytes = Vec::new();
    let _ = file.seek(SeekFrom::Start(length.saturating_sub(LONGEST)));
    let _ = file.take(LONGEST).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a turn in `folder`. The inner error says why the transport failed; the outer one ends the command.
pub fn run(plan: &Plan, way: Way, folder: &Path) -> Result<Result<Turn, String>> {
    DirBuilder::new().mode(0o700).create(folder).with_context(|| format!("making {}", folder.display()))?;
    Barrier::make(&folder.join("barrier"))?;
    let (sender, said) = channel();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..plan.task.ranks {
        let mut child = start(plan, way, rank, folder)?;
        listen(rank as usize, child.stdout.take().expect("it is piped"), sender.clone());
        ranks.0.push(child);
    }
    drop(sender);
    let ended = watch(plan, &mut ranks, &said)?;
    drop(ranks);
    let logs: Vec<Evidence> =
        (0..plan.task.ranks).map(|rank| Evidence::of(&read(&folder.join(log_name(rank))))).collect();
    Ok(match ended {
        Ok(turn) => Ok(Turn { logs, ..turn }),
        Err(Failure { rank, pid, why }) => {
            let mut told = format!("rank {rank} (pid {pid}) {why}");
            if let Some(words) = logs[rank].last_words() {
                told += &format!("; NCCL's log said last: {words}");
            }
            let stderr = read(&folder.join(format!("rank-{rank}.err")));
            if let Some(line) = stderr.lines().map(str::trim).rfind(|line| !line.is_empty()) {
                told += &format!("; standard error: {line}");
            }
            Err(told)
        }
    })
}

fn log_name(rank: u32) -> String {
    format!("nccl-{rank}.log")
}

fn start(plan: &Plan, way: Way, rank: u32, folder: &Path) -> Result<Child> {
    let task = Task { rank, folder: folder.to_owned(), ..plan.task.clone() };
    let stderr = folder.join(format!("rank-{rank}.err"));
    let stderr = File::create(&stderr).with_context(|| format!("making {}", stderr.display()))?;
    let (set, unset) = way.variables(rank, &plan.plugin);
    let (program, arguments) = &plan.program;
    let mut command = Command::new(program);
    command.args(arguments);
    for name in unset {
        command.env_remove(name);
    }
    command
        .envs(set)
        .envs(plan.settings.iter().map(|(name, value)| (name, value)))
        .env("CUDA_VISIBLE_DEVICES", &plan.gpus[rank as usize % plan.gpus.len()])
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET")
        // NCCL puts a host's name or a process's number for some letters behind a %.
        .env("NCCL_DEBUG_FILE", folder.join(log_name(rank)).to_string_lossy().replace('%', "%%"))
        .env(TASK, serde_json::to_string(&task)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .with_context(|| format!("starting rank {rank}"))
}

/// Whether a process was stopped by a signal (proc_pid_stat(5)).
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything but ends at the last parenthesis.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Why a turn failed, and at which rank.
struct Failure {
    rank: usize,
    pid: u32,
    why: String,
}

/// What has been heard of the ranks.
struct Heard {
    turn: Turn,
    /// What each rank does.
    doing: Vec<String>,
    /// When each rank said something.
    last: Vec<Instant>,
    /// The first failure, which is the cause: the others hear of a rank that is lost.
    failed: Option<(Instant, Failure)>,
}

impl Heard {
    fn hear(&mut self, rank: usize, pid: u32, said: Said) {
        self.last[rank] = Instant::now();
        match said {
            Said::Device(name) => self.turn.device = Some(name),
            Said::Begins(what) => self.doing[rank] = what,
            // Of a time to come nothing has elapsed.
            Said::Takes(ms) => self.last[rank] += Duration::from_millis(ms),
            Said::Row(row) => self.turn.rows.push(row),
            Said::Failed(why) => {
                // Its end may have been seen first, which says less.
                let own = self.failed.take().filter(|(_, failure)| failure.rank != rank);
                let why = format!("failed at {}: {why}", self.doing[rank]);
                self.failed = own.or_else(|| Some((Instant::now(), Failure { rank, pid, why })));
            }
        }
    }

    fn fail(&mut self, rank: usize, pid: u32, end: &str) {
        let why = format!("{end} at {}", self.doing[rank]);
        self.failed.get_or_insert_with(|| (Instant::now(), Failure { rank, pid, why }));
    }
}

fn watch(plan: &Plan, ranks: &mut Ranks, said: &Receiver<(usize, Said)>) -> Result<Result<Turn, Failure>> {
    let count = ranks.0.len();
    let pids: Vec<u32> = ranks.0.iter().map(Child::id).collect();
    let mut heard = Heard {
        turn: Turn::default(),
        doing: vec!["its start".into(); count],
        last: vec![Instant::now(); count],
        failed: None,
    };
    let all_have_ended = loop {
        if signals::caught().is_some() {
            bail!("interrupted; the ranks were ended");
        }
        match said.recv_timeout(Duration::from_millis(20)) {
            Ok((rank, said)) => {
                heard.hear(rank, pids[rank], said);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            // All pipes are closed: the processes have ended or are about to.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
        }
        let mut running = 0;
        for (rank, child) in ranks.0.iter_mut().enumerate() {
            match child.try_wait()? {
                None => {
                    running += 1;
                    if heard.last[rank].elapsed() > plan.silence {
                        let end = format!("said nothing for {} s and was ended", plan.silence.as_secs());
                        heard.fail(rank, pids[rank], &end);
                    }
                }
                Some(status) if status.success() => {}
                Some(status) => {
                    let end = match (status.signal(), status.code()) {
                        (Some(signal), _) => format!("was killed by signal {signal}"),
                        (_, code) => format!("ended with {}", code.unwrap_or(-1)),
                    };
                    heard.fail(rank, pids[rank], &end);
                }
            }
        }
        let grace = heard.failed.as_ref().is_some_and(|(since, _)| since.elapsed() > GRACE);
        if running == 0 || grace {
            if let Some((_, failure)) = &mut heard.failed {
                // The others fail because they wait for such a rank.
                let stopped = pids.iter().enumerate().filter(|(_, pid)| is_stopped(**pid));
                failure.why.extend(
                    stopped.map(|(rank, pid)| format!("; rank {rank} (pid {pid}) is stopped (SIGSTOP)")),
                );
            }
            break running == 0;
        }
    };
    if heard.failed.is_none() {
        // All have ended, so their pipes end.
        said.iter().for_each(|(rank, said)| heard.hear(rank, pids[rank], said));
    } else {
        let until = Instant::now() + if all_have_ended { LAST_WORDS } else { Duration::ZERO };
        while let Ok((rank, said)) = said.recv_timeout(until.saturating_duration_since(Instant::now())) {
            heard.hear(rank, pids[rank], said);
        }
    }
    Ok(match heard.failed {
        Some((_, failure)) => Err(failure),
        None => Ok(heard.turn),
    })
}

#[cfg(test)]
mod tests {
    use super::super::collective::Collective;
    use super::super::transport::Transport;
    use super::*;

    /// A turn of two ranks, each of them this shell script, with `$rank`, and what came of it.
    fn turn(name: &str, silence: Duration, script: &str) -> (Result<Turn, String>, PathBuf) {
        let folder = std::env::temp_dir().join(format!("pushgate-turn-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let script = format!(
            "case \"${TASK}\" in *'\"rank\":1,'*) rank=1;; *) rank=0;; esac\n\
             here=${{NCCL_DEBUG_FILE%/*}}\necho $$ >\"$here/pid-$rank\"\n\
             say() {{ echo '{MARK}'\"$1\"; }}\n{script}"
        );
        let plan = Plan {
            program: ("/bin/sh".into(), vec!["-c".into(), script.into()]),
            task: Task {
                rank: 0,
                ranks: 2,
                parent: std::process::id() as i32,
                nccl: "/x/libnccl.so.2".into(),
                folder: PathBuf::new(),
                collectives: vec![Collective::AllReduce],
                sizes: vec![8],
                iters: 1,
                warmup: 0,
                seed: 1,
                timeout_ms: 1000,
            },
            plugin: "/x/p.so".into(),
            gpus: vec!["3".into()],
            settings: vec![("PUSHGATE_PATH".into(), "bounce".into())],
            silence,
        };
        (run(&plan, Transport::Pushgate.ways()[0], &folder).unwrap(), folder)
    }

    /// No process of the turn is left.
    fn all_gone(folder: &Path) {
        for rank in 0..2 {
            let pid: i32 =
                fs::read_to_string(folder.join(format!("pid-{rank}"))).unwrap().trim().parse().unwrap();
            let left = rustix::process::test_kill_process(Pid::from_raw(pid).unwrap());
            assert!(left.is_err(), "rank {rank} ({pid}) is left");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    const LONG: Duration = Duration::from_secs(120);

    #[test]
    fn what_ranks_say_and_log_is_collected() {
        let script = r#"
            say '{"Device":"a GPU"}'
            echo "a library's own line"
            say '{"Begins":"all_reduce of 8 bytes"}'
            say '{"Row":{"collective":"all_reduce","size":0,"us":2.5,"wrong":0}}'
            echo "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/pushgate/0" >"$NCCL_DEBUG_FILE"
            echo "h:1:2 [0] NCCL INFO $CUDA_VISIBLE_DEVICES $PUSHGATE_PATH $NCCL_HOSTID $NCCL_NET" >>"$NCCL_DEBUG_FILE""#;
        let (turn, folder) = turn("right", LONG, script);
        let turn = turn.unwrap();
        assert_eq!((turn.rows.len(), turn.device.as_deref()), (2, Some("a GPU")));
        assert!(turn.rows.iter().all(|row| row.us == 2.5 && row.collective == Collective::AllReduce));
        assert!(turn.logs.iter().all(Evidence::is_over_the_plugin));
        assert_eq!(turn.logs[1].last, "3 bounce pushgate-rank-1 pushgate");
        all_gone(&folder);
    }

    #[test]
    fn a_rank_that_fails_is_named_with_its_reason_and_the_logs_last_words() {
        let script = r#"
            say '{"Begins":"joining"}'
            echo "h:1:2 [0] NCCL WARN NET/pushgate: init: no" >"$NCCL_DEBUG_FILE"
            [ $rank = 0 ] && exec sleep 600
            say '{"Failed":"ncclCommInitRank: internal error"}'
            echo "what the loader said" >&2
            kill -9 $$"#;
        let (turn, folder) = turn("fails", LONG, script);
        let why = turn.unwrap_err();
        assert!(why.starts_with("rank 1 (pid "), "{why}");
        let rest = ") failed at joining: ncclCommInitRank: internal error; NCCL's log said last: NET/pushgate: init: no; \
                    standard error: what the loader said";
        assert!(why.ends_with(rest), "{why}");
        all_gone(&folder);
    }

    #[test]
    fn a_rank_that_says_nothing_is_ended() {
        let (turn, folder) = turn("hangs", Duration::from_secs(4), "[ $rank = 1 ] && exec sleep 600; exit 0");
        let why = turn.unwrap_err();
        let rest = ") said nothing for 4 s and was ended at its start";
        assert!(why.starts_with("rank 1 (pid ") && why.ends_with(rest), "{why}");
        all_gone(&folder);
    }

    #[test]
    fn a_rank_that_says_that_it_takes_longer_has_not_been_silent_meanwhile() {
        let mut heard = Heard {
            turn: Turn::default(),
            doing: vec![String::new()],
            last: vec![Instant::now()],
            failed: None,
        };
        heard.hear(0, 1, Said::Takes(3_600_000));
        assert_eq!(heard.last[0].elapsed(), Duration::ZERO);
        heard.hear(0, 1, Said::Begins("the next".into()));
        assert!(heard.last[0] <= Instant::now());
    }

    #[test]
    fn a_rank_that_was_killed_or_ends_with_a_code_is_named() {
        let (turn, folder) = turn("killed", LONG, "[ $rank = 1 ] && kill -11 $$; exit 0");
        let why = turn.unwrap_err();
        assert!(
            why.starts_with("rank 1 (pid ") && why.ends_with(") was killed by signal 11 at its start"),
            "{why}"
        );
        all_gone(&folder);
        let (turn, folder) = self::turn("code", LONG, "[ $rank = 0 ] && exit 7; exit 0");
        let why = turn.unwrap_err();
        assert!(why.starts_with("rank 0 (pid ") && why.ends_with(") ended with 7 at its start"), "{why}");
        all_gone(&folder);
    }
}
