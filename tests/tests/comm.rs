//! Tests ranks of one host through the public API, on the CPU executor: set-up while strangers
//! connect, collectives and queue pairs that are tried again, and how the death of a rank is
//! noticed.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use pushgate::ranks::{Environment, Given};
use pushgate::settings::{PluginSettings, Transport};
use pushgate::{Comm, Context, Error, Membership, QpConfig, Result, Settings, UniqueId};
use pushgate_driver_shim::fdpass::recv_message;
use pushgate_tests::{hang, patience};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};

fn context(limit: Duration) -> Context {
    let mut settings = Settings::default();
    settings.set("device", "cpu").unwrap();
    settings.set("window-size", "64K").unwrap();
    settings.set("timeout", &limit.as_millis().to_string()).unwrap();
    Context::builder().settings(settings).build().unwrap()
}

/// A name that no other job of this host has.
fn job(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// The name under which a rank of a job listens.
fn listens(job: &str, rank: u32) -> String {
    format!("pushgate/{}/{job}/{rank}", rustix::process::geteuid().as_raw())
}

/// Runs a call that may hang on a thread of its own.
fn beside<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, result) = channel();
    thread::spawn(move || {
        let _ = sender.send(run());
    });
    result
}

#[track_caller]
fn ends<T>(result: &Receiver<T>) -> T {
    result.recv_timeout(hang()).expect("it hangs")
}

/// Repeats a call as long as it times out.
fn again<T>(mut call: impl FnMut() -> Result<T>) -> T {
    let begin = Instant::now();
    loop {
        match call() {
            Ok(value) => return value,
            Err(Error::TimedOut { .. }) if begin.elapsed() < hang() => {}
            Err(e) => panic!("{e}"),
        }
    }
}

#[track_caller]
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begin.elapsed() < hang(), "waiting for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

// ------------------------------------------------------------ calls that are tried again

#[test]
fn p7_a_barrier_that_timed_out_and_is_tried_again_leaves_the_next_all_gather_whole() {
    let context = context(Duration::from_millis(300));
    let mut comms = Comm::local(&context, 2).unwrap();
    let (b, a) = (comms.pop().unwrap(), comms.pop().unwrap());
    // The other rank is late.
    assert!(matches!(a.barrier(), Err(Error::TimedOut { .. })));
    let both = [(a, "zero"), (b, "one")].map(|(comm, says)| {
        beside(move || {
            again(|| comm.barrier());
            let all = again(|| comm.all_gather(says.as_bytes()));
            (comm, all)
        })
    });
    // Neither rank leaves before the other is done.
    let both: Vec<_> = both.iter().map(ends).collect();
    for (comm, all) in &both {
        assert_eq!(all, &[b"zero".to_vec(), b"one".to_vec()], "rank {}", comm.rank());
    }
}

#[test]
fn p7_an_all_gather_that_timed_out_refuses_other_bytes_when_it_is_tried_again() {
    let context = context(Duration::from_millis(300));
    let mut comms = Comm::local(&context, 2).unwrap();
    let (b, a) = (comms.pop().unwrap(), comms.pop().unwrap());
    assert!(matches!(a.all_gather(b"first"), Err(Error::TimedOut { .. })));
    // The first bytes are on their way already, and would be taken for these.
    let e = a.all_gather(b"other").unwrap_err().to_string();
    assert!(e.contains("the collective that timed out"), "{e}");
    let other = beside(move || (again(|| b.all_gather(b"there")), b));
    let all = [b"first".to_vec(), b"there".to_vec()];
    assert_eq!(again(|| a.all_gather(b"first")), all);
    assert_eq!(ends(&other).0, all);
}

#[test]
fn p7_a_barrier_after_an_all_gather_that_lost_a_rank_names_that_rank() {
    for timed_out_first in [false, true] {
        let context = context(Duration::from_millis(300));
        let mut comms = Comm::local(&context, 3).unwrap();
        let (c, b, a) = (comms.pop().unwrap(), comms.pop().unwrap(), comms.pop().unwrap());
        if timed_out_first {
            assert!(matches!(a.all_gather(b"first"), Err(Error::TimedOut { .. })));
        }
        // A rank that unwinds counts as lost.
        let unwinds = thread::spawn(move || {
            let _c = c;
            std::panic::resume_unwind(Box::new(()))
        });
        unwinds.join().unwrap_err();
        if !timed_out_first {
            let lost = until("the loss", || match a.all_gather(b"first") {
                Err(Error::TimedOut { .. }) => None,
                other => Some(other),
            });
            assert!(matches!(lost, Err(Error::PeerLost { rank: 2 })), "{lost:?}");
        }
        until("the loss", || a.check().err());
        let e = a.barrier().unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 2 }), "{e}");
        drop(b);
    }
}

#[test]
fn p7_a_queue_pair_that_is_tried_again_takes_no_offer_of_the_attempt_that_failed() {
    // Both ranks make a queue pair within this time, even on a busy machine.
    let context = context(patience(Duration::from_secs(3)));
    let mut comms = Comm::local(&context, 2).unwrap();
    let (b, a) = (comms.pop().unwrap(), comms.pop().unwrap());
    // The other rank is late.
    assert!(matches!(a.queue_pair(1, 7, QpConfig::default()), Err(Error::TimedOut { .. })));
    let other = beside(move || (again(|| b.queue_pair(0, 7, QpConfig::default())), b));
    let ours = again(|| a.queue_pair(1, 7, QpConfig::default()));
    let (theirs, _b) = ends(&other);
    assert!(theirs.check().is_ok());
    // The end of one queue pair is reported to its own two ends only.
    ours.abort().unwrap();
    let e = until("the other end to hear of it", || theirs.check().err());
    assert!(matches!(e, Error::Aborted { rank: 0 }), "{e}");
}

// ------------------------------------------------------------ set-up beside strangers

/// Connects to a rank's name as soon as the rank listens.
fn stranger(job: &str, rank: u32) -> UnixStream {
    let address = SocketAddr::from_abstract_name(listens(job, rank)).unwrap();
    until("a rank to listen", || UnixStream::connect_addr(&address).ok())
}

fn start(job: &str, rank: u32, size: u32) -> Receiver<Result<(Comm, Context)>> {
    let job = job.to_owned();
    beside(move || {
        let context = context(hang() / 2);
        Comm::connect(&context, &job, rank, size).map(|comm| (comm, context))
    })
}

#[track_caller]
fn met(ranks: &[Receiver<Result<(Comm, Context)>>]) {
    let met: Vec<_> = ranks.iter().map(|r| ends(r).unwrap()).collect();
    let sizes: Vec<_> = met.iter().map(|(comm, _)| comm.size()).collect();
    assert_eq!(sizes, vec![ranks.len() as u32; ranks.len()]);
}

#[test]
fn p7_p8_a_connection_that_says_nothing_holds_up_no_ranks() {
    let job = job("silent");
    let first = start(&job, 0, 2);
    let _silent: Vec<_> = (0..8).map(|_| stranger(&job, 0)).collect();
    met(&[first, start(&job, 1, 2)]);
}

#[test]
fn p8_garbage_at_the_rendezvous_ends_no_set_up() {
    let job = job("garbage");
    let first = start(&job, 0, 2);
    let mut open = Vec::new();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 8],
        &[0xff; 64],
        &[4, 0, 0, 0, 0, 0, 0, 0, 1],
        &[20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
        b"x",
    ] {
        let mut stream = stranger(&job, 0);
        // The rank may close the connection before everything is written.
        let _ = stream.write_all(garbage);
        open.push(stream);
    }
    for _ in 0..100 {
        drop(stranger(&job, 0));
    }
    met(&[first, start(&job, 1, 2)]);
}

#[test]
fn ranks_meet_over_tcp_with_a_secret_of_a_file_encrypted_and_a_rank_without_it_is_refused() {
    let file = std::env::temp_dir().join(format!("pushgate-ranks-secret-{}", std::process::id()));
    let mut created =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&file).unwrap();
    created.write_all(b"the secret of these ranks\n").unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let context = |secret: bool| {
        let mut settings = Settings::default();
        for (name, value) in [("device", "cpu"), ("rendezvous", &free.to_string()), ("tls", "true")] {
            settings.set(name, value).unwrap();
        }
        settings.set("timeout", &hang().as_millis().to_string()).unwrap();
        if secret {
            settings.set("secret-file", file.to_str().unwrap()).unwrap();
        }
        Context::builder().settings(settings).build().unwrap()
    };
    let job = job("secret");
    let rank = |rank, context: Context| {
        let job = job.clone();
        beside(move || Comm::connect(&context, &job, rank, 3).map(|comm| comm.barrier().unwrap()))
    };
    let first = rank(0, context(true));
    let e = ends(&rank(1, context(false))).unwrap_err().to_string();
    assert!(
        e.contains("the other end has a secret, and this end has none: set one secret on all hosts"),
        "{e}"
    );
    let others = [1, 2].map(|number| rank(number, context(true)));
    ends(&first).unwrap();
    others.iter().for_each(|other| ends(other).unwrap());
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_rank_of_the_release_before_is_refused_with_a_sentence() {
    let job = job("before");
    let first = start(&job, 0, 2);
    let mut before = stranger(&job, 0);
    before.set_read_timeout(Some(hang())).unwrap();
    // 16 bytes without descriptors: version, rank, the other's rank, ranks.
    let greeting: Vec<u8> = [16u32, 0, 2, 1, 0, 2].iter().flat_map(|word| word.to_le_bytes()).collect();
    before.write_all(&greeting).unwrap();
    let (answer, _) = recv_message(&before, 1024, 1).unwrap();
    let why = String::from_utf8(answer[1..].to_vec()).unwrap();
    assert!(why.contains("it speaks version 2, this rank version 3: run one release"), "{why}");
    met(&[first, start(&job, 1, 2)]);
}

#[test]
fn p7_a_rank_whose_connection_is_not_taken_ends_at_its_limit() {
    let job = job("full");
    let socket = || {
        socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap()
    };
    let address = SocketAddrUnix::new_abstract_name(listens(&job, 0).as_bytes()).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 1).unwrap();
    let mut waiting: Vec<OwnedFd> = Vec::new();
    loop {
        let one = socket();
        match connect(&one, &address) {
            Ok(()) => waiting.push(one),
            Err(Errno::AGAIN) => break,
            Err(e) => panic!("{e}"),
        }
    }
    let rank = beside(move || {
        let context = context(Duration::from_millis(300));
        Comm::connect(&context, &job, 1, 2).err().expect("no rank accepts it")
    });
    let e = ends(&rank);
    assert!(matches!(e, Error::TimedOut { .. }), "{e}");
}

// ------------------------------------------------------------ processes

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn sleep(seconds: u32) -> u32;
    safe fn _exit(code: i32) -> !;
}

/// What a process of [`Rank`] does: it is rank 1 of a job, forks a sleeper if it is told to, and
/// then follows commands until it is killed.
#[test]
#[ignore = "a process that the tests of this file start"]
fn role() {
    let job = std::env::var("COMM_JOB").expect("started by a test of this file");
    let context = context(hang());
    let comm = Comm::connect(&context, &job, 1, 2).unwrap();
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "fork" => match fork() {
                // The sleeper has all of its parent's sockets.
                0 => {
                    sleep(3600);
                    _exit(0)
                }
                pid => println!("@{pid}"),
            },
            "barrier" => {
                comm.barrier().unwrap();
                println!("@0");
            }
            other => panic!("{other}"),
        }
    }
}

/// Rank 1 of a job, in a process of its own. Dropping it kills the process and what it forked.
struct Rank {
    child: Child,
    says: ChildStdin,
    hears: BufReader<ChildStdout>,
    forked: Option<Pid>,
}

impl Rank {
    fn start(job: &str) -> Rank {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]);
        for key in PluginSettings::keys() {
            command.env_remove(key.variable());
        }
        command.env("COMM_JOB", job).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let says = child.stdin.take().unwrap();
        let hears = BufReader::new(child.stdout.take().unwrap());
        Rank { child, says, hears, forked: None }
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.says, "{what}").unwrap();
    }

    fn answer(&mut self) -> i32 {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.hears.read_line(&mut line).unwrap() > 0, "it has ended");
            // The first answer follows what the test harness prints.
            if let Some((_, number)) = line.split_once('@') {
                return number.trim().parse().unwrap();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Some(pid) = self.forked {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes rank 0 in this process and rank 1 in a process of its own.
fn two(name: &str) -> (Comm, Rank) {
    let job = job(name);
    let rank = Rank::start(&job);
    let context = context(hang());
    (Comm::connect(&context, &job, 0, 2).unwrap(), rank)
}

/// Measures how long rank 0 takes to notice that rank 1 was killed.
fn time_to_notice(name: &str, forks: bool) -> Duration {
    let (comm, mut rank) = two(name);
    if forks {
        rank.tell("fork");
        rank.forked = Some(Pid::from_raw(rank.answer()).unwrap());
    }
    let begin = Instant::now();
    rank.signal(Signal::KILL);
    let e = until("the death of a rank", || comm.check().err());
    let took = begin.elapsed();
    assert!(matches!(e, Error::PeerLost { rank: 1 }), "{e}");
    took
}

#[test]
fn p7_a_rank_that_is_killed_is_lost_within_a_second_though_its_forked_child_holds_its_sockets() {
    // The promise is 1 s. A busy machine may take longer for anything, so the limit has room for
    // ten deaths as measured here without a fork. If only the sockets' end showed the death, the
    // wait would never end, because the sleeper lives for an hour.
    let usual = time_to_notice("killed", false);
    let took = time_to_notice("forked", true);
    assert!(took < Duration::from_secs(1) + 10 * usual, "{took:?}, and {usual:?} without a forked child");
}

#[test]
fn p7_a_rank_that_is_stopped_is_not_lost() {
    let (comm, mut rank) = two("stopped");
    rank.tell("barrier");
    comm.barrier().unwrap();
    assert_eq!(rank.answer(), 0);
    rank.signal(Signal::STOP);
    // A death would be noticed within a second.
    thread::sleep(Duration::from_millis(1500));
    comm.check().unwrap();
    rank.signal(Signal::CONT);
    rank.tell("barrier");
    comm.barrier().unwrap();
    assert_eq!(rank.answer(), 0);
}

// ------------------------------------------------------------------------------------ launchers, unique ids

/// Rank `rank` of what the variables in `all` say, which have `@` in the place of its number.
fn membership(all: &str, rank: u32) -> Membership {
    let all = all.replace("@", &rank.to_string());
    let pairs = all.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    Membership::find(&Environment::new(pairs, 1), &Given::default(), &Settings::default()).unwrap().unwrap()
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ranks_that_a_launcher_started_meet_where_it_says() {
    let (one_host, several) = (job("launched"), free_port() - 1);
    for (variables, transport) in [
        (
            format!(
                "OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=@ \
                 OMPI_COMM_WORLD_LOCAL_SIZE=3 PMIX_NAMESPACE={one_host}"
            ),
            Transport::Local,
        ),
        // As on three hosts. The launcher's own port is the one before.
        (
            format!(
                "RANK=@ WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={several}"
            ),
            Transport::Local,
        ),
    ] {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let membership = membership(&variables, rank);
                beside(move || {
                    let comm = Comm::join(&context(hang()), &membership).unwrap();
                    let all = comm.all_gather(&[comm.rank() as u8]).unwrap();
                    (all.concat(), comm.size(), comm.transports())
                })
            })
            .collect();
        for rank in &ranks {
            assert_eq!(ends(rank), (vec![0, 1, 2], 3, vec![transport]), "{variables}");
        }
    }
}

#[test]
fn a_context_for_a_rank_of_several_hosts_has_its_launchers_rendezvous() {
    let several = "RANK=@ WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=7000";
    let one = "RANK=@ WORLD_SIZE=2 LOCAL_RANK=@ LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=7000";
    let built = |variables, set: &str| {
        let mut settings = context(hang()).settings().clone();
        settings.set("rendezvous", set).unwrap();
        let built =
            Context::builder().settings(settings).for_rank(&membership(variables, 1)).build().unwrap();
        (built.settings().rendezvous.clone(), built.settings().transports())
    };
    let any = vec![Transport::Local, Transport::Verbs, Transport::Tcp];
    assert_eq!(built(several, "none"), ("10.0.0.1:7001".into(), any.clone()));
    assert_eq!(built(several, "node0:5"), ("node0:5".into(), any));
    assert_eq!(built(one, "none"), ("none".into(), vec![Transport::Local]));
}

#[test]
fn a_rank_alone_joins_without_any_other_process() {
    let membership = membership("PUSHGATE_RANK=@ PUSHGATE_RANKS=1", 0);
    let context = context(hang());
    // A name that is not listened at can't be taken twice.
    let [a, b] = [(); 2].map(|()| Comm::join(&context, &membership).unwrap());
    assert_eq!((a.size(), b.all_gather(b"x").unwrap()), (1, vec![b"x".to_vec()]));
    let id = UniqueId::new(&context).unwrap();
    assert_eq!(Comm::connect_with(&context, &id, 0, 1).unwrap().size(), 1);
}

#[test]
fn ranks_that_were_handed_an_id_meet_and_are_local_on_one_host() {
    let context0 = context(hang());
    let id = UniqueId::new(&context0).unwrap();
    // As programs hand it on.
    let text = id.to_string();
    let mut ranks = vec![beside(move || {
        let comm = Comm::connect_with(&context0, &id, 0, 3).unwrap();
        let qps = comm.queue_pairs(&[(1, 0), (2, 0)], QpConfig::default()).unwrap();
        comm.barrier().unwrap();
        (comm.transports(), qps.len())
    })];
    for rank in 1..3 {
        let id: UniqueId = text.parse().unwrap();
        ranks.push(beside(move || {
            let comm = Comm::connect_with(&context(hang()), &id, rank, 3).unwrap();
            let qps = comm.queue_pairs(&[(0, 0)], QpConfig::default()).unwrap();
            comm.barrier().unwrap();
            (comm.transports(), qps.len())
        }));
    }
    assert_eq!(ranks.iter().map(ends).collect::<Vec<_>>(), [2, 1, 1].map(|n| (vec![Transport::Local], n)));
}

#[test]
fn an_id_serves_for_one_communicator_and_only_its_maker_is_rank_0() {
    let (maker, other) = (context(hang()), context(hang()));
    let id = UniqueId::new(&maker).unwrap();
    let refused = |context: &Context, rank, size| {
        let e = Comm::connect_with(context, &id, rank, size).err().expect("it joined");
        assert!(e.is_config(), "{e}");
        e.to_string()
    };
    assert!(refused(&other, 0, 2).contains("an id that this context made"));
    assert!(refused(&maker, 2, 2).starts_with("invalid rank `2`"));
    assert!(refused(&maker, 0, 0).starts_with("invalid ranks `0`"));
    Comm::connect_with(&maker, &id, 0, 1).unwrap();
    let said = refused(&maker, 0, 1);
    assert!(said.contains("no rank 0 has joined with") && !said.contains(&id.to_string()[96..]), "{said}");
}

#[test]
fn p7_ids_whose_ranks_never_meet_hold_a_bounded_number_of_sockets() {
    let context = context(hang());
    let ids: Vec<_> = (0..64).map(|_| UniqueId::new(&context).unwrap()).collect();
    let e = UniqueId::new(&context).unwrap_err();
    assert!(e.is_config() && e.to_string().contains("at most 64"), "{e}");
    Comm::connect_with(&context, &ids[0], 0, 1).unwrap();
    UniqueId::new(&context).unwrap();
}

#[test]
fn p7_every_rank_that_never_came_is_named_to_those_that_did() {
    let job = job("absent");
    // Those that come must meet within it.
    let limit = patience(Duration::from_secs(5));
    let start = |rank| {
        let job = job.clone();
        beside(move || Comm::connect(&context(limit), &job, rank, 5).err().expect("all came").to_string())
    };
    let ranks = [0, 2].map(start);
    let [first, second] = ranks.each_ref().map(ends);
    assert!(first.starts_with("waiting for rank 1, 3, 4 timed out"), "{first}");
    // Rank 0 says so before rank 2 gives up by itself, or rank 1, for which rank 2 waits then, is the one that is missing.
    let told = second.contains("rank 0: refused rank 2: rank 1, 3, 4 did not come");
    assert!(told || second.starts_with("waiting for rank 1"), "{second}");
}
