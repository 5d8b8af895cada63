//! A proxy that serves several users: whom it admits, what each of them may hold, and that no user disturbs another.
//!
//! Root alone can become other users. The users have numbers and no names.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, io};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::users::is_ours;
use pushgate_engine::connect::Incarnation;
use pushgate_engine::engine::EngineError;
use pushgate_engine::idle::Wake;
use pushgate_service::remote::{RemoteEngine, usage};
use pushgate_service::server::{ServerOptions, bind, bind_for_users, serve};
use pushgate_service::users::Users;
use pushgate_service::wire::{self, Amounts, Answer, MAX_FDS, Refusal, Request, SessionOffer, UserUsage};
use pushgate_tests::fuse::Hanging;
use pushgate_tests::lingering::{lingering, send_along};
use pushgate_tests::users::{STRANGER, as_user, is_root};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::process::{Gid, Uid, setpriority_process};
use rustix::thread::{
    CpuSet, UnshareFlags, sched_getaffinity, sched_setaffinity, set_thread_gid, set_thread_groups,
    set_thread_res_uid, unshare_unsafe,
};
use rustix::time::{ClockId, clock_gettime};

#[path = "common/programs.rs"]
mod programs;

use programs::*;

const A: u32 = 65001;
const B: u32 = 65002;
/// Nobody that a proxy here serves.
const C: u32 = STRANGER;

/// Held by each test, because engines need a core.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const PLENTY: Amounts = Amounts { programs: 100, queue_pairs: 1000, bytes: 1 << 30, descriptors: 10_000 };

/// A server of users A and B with this quota.
fn server_of(quota: Amounts) -> TestServer {
    server_with(|o| {
        o.users = Users::Some { users: [A, B].into(), groups: [].into() };
        (o.quota, o.max_clients) = (quota, 200);
    })
}

// ------------------------------------------------------------------ programs

/// A program of another user: a process that runs [`role`].
struct Role {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    /// How many lines of traffic that was checked.
    checked: Arc<AtomicU64>,
    _folder: Folder,
}

/// The user namespace of a program.
enum Namespace {
    /// That of the tests.
    Same,
    /// A new one in which no user has a number: the program, and every other user, shows as the overflow uid.
    NewUser,
}

/// A folder in which other users find this program.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Role {
    fn start(uid: u32, what: &str, server: &TestServer) -> Role {
        Role::start_in(Namespace::Same, uid, what, &server.path).unwrap()
    }

    /// Fails with the kernel's error where it makes no such namespace.
    fn start_in(namespace: Namespace, uid: u32, what: &str, socket: &Path) -> io::Result<Role> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pushgate-users-{}-{n}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.join("program");
        // The user may not be able to enter the folder of this one.
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(&program);
        if let Namespace::NewUser = namespace {
            // SAFETY: one system call, which changes the child alone; the child has one thread and shares no memory that it writes.
            let unshares = || unsafe { unshare_unsafe(UnshareFlags::NEWUSER) }.map_err(io::Error::from);
            // SAFETY: the closure calls nothing that is unsafe between fork and exec: it takes no lock and no memory.
            unsafe { command.pre_exec(unshares) };
        }
        let folder = Folder(folder);
        let mut child = command
            .args(["--ignored", "--exact", "role", "--nocapture"])
            .env("USERS_ROLE", what)
            .env("USERS_SOCKET", socket)
            .current_dir("/")
            .gid(uid)
            .uid(uid)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (to, lines) = mpsc::channel();
        let checked = Arc::new(AtomicU64::new(0));
        let count = checked.clone();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(io::Result::ok) {
                match line.split_once('@') {
                    Some((_, "checked")) => _ = count.fetch_add(1, Ordering::Relaxed),
                    Some((_, line)) => _ = to.send(line.to_owned()),
                    None => {}
                }
            }
        });
        Ok(Role { stdin: child.stdin.take(), child, lines, checked, _folder: folder })
    }

    /// The next line that the program says.
    fn line(&self) -> String {
        self.lines.recv_timeout(long()).expect("the program says something")
    }

    /// Waits until more traffic has been checked.
    fn goes_on(&self) {
        let before = self.checked.load(Ordering::Relaxed);
        until("traffic of the other user", || self.checked.load(Ordering::Relaxed) >= before + 5);
    }

    /// Ends the program, which must have found nothing wrong.
    fn end(mut self) {
        self.stdin = None;
        assert!(self.child.wait().unwrap().success());
    }

    /// Ends the program; returns its last words.
    fn stop(mut self) -> String {
        self.stdin = None;
        let said = self.line();
        self.end();
        said
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Set when standard input is closed.
fn closed() -> Arc<AtomicBool> {
    let closed = Arc::new(AtomicBool::new(false));
    let set = closed.clone();
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        set.store(true, Ordering::Relaxed);
    });
    closed
}

fn say(what: &str) {
    println!("@{what}");
    io::stdout().flush().unwrap();
}

fn engine() -> Result<RemoteEngine, EngineError> {
    RemoteEngine::connect(Path::new(&std::env::var_os("USERS_SOCKET").unwrap()), "role")
}

/// What a process of another user does.
#[test]
#[ignore = "a process that the tests of this file start"]
fn role() {
    let what = std::env::var("USERS_ROLE").expect("started by a test of this file");
    let closed = closed();
    match what.split_once(' ') {
        None => traffic(&closed),
        Some(("hog", quota)) => hog(quota, &closed),
        Some(("serves", _)) => serves(&closed),
        Some(("dials", as_of)) => dials(as_of.parse().unwrap()),
        Some(("busy", n)) => busy(n.parse().unwrap(), false, &closed),
        Some(("counted", n)) => busy(n.parse().unwrap(), true, &closed),
        Some(("attacks", who)) => attacks(who == "member", &closed),
        _ => panic!("{what}"),
    }
}

/// Passes messages between two programs both ways, and checks each of them.
fn traffic(closed: &AtomicBool) {
    let (a, b) = (engine().unwrap(), engine().unwrap());
    let mut pair = Pair::new(&a, a.ringer(), &b, b.ringer());
    while !closed.load(Ordering::Relaxed) {
        pair.a_to_b(20);
        pair.b_to_a(20);
        say("checked");
    }
}

/// Serves programs of its own user, and says where.
fn serves(closed: &AtomicBool) {
    let own = rustix::process::geteuid().as_raw();
    assert!(!is_ours(own), "a number of many users is taken for its own");
    let server = server();
    say(server.path.to_str().unwrap());
    until("the end", || closed.load(Ordering::Relaxed));
}

/// Says why it is not served: before it has said that it trusts a proxy that seems to be of user `of`, and afterwards.
fn dials(of: u32) {
    let socket = std::env::var_os("USERS_SOCKET").unwrap();
    for trusts in [None, Some(of)] {
        say(&remote_sentence(RemoteEngine::connect_trusting(Path::new(&socket), "dials", trusts)));
    }
}

fn memory(bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::builder("region", bytes).huge_pages(HugePages::Never).create().unwrap())
}

/// Takes of one thing until that is refused; then gives one back and takes it again.
fn hog(quota: &str, closed: &AtomicBool) {
    let a = engine().unwrap();
    let (mut programs, mut qps, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    let qp = || {
        let (x, y) = (Side::new(0), Side::new(1));
        a.add_qp(&x.fds(&y, None), options(1), Wake::Doorbell)
    };
    let first = (quota == "bytes" || quota == "descriptors").then(|| qp().unwrap());
    let mut take = || match quota {
        "programs" => engine().map(|engine| programs.push(engine)),
        "queue pairs" => qp().map(|qp| qps.push(qp)),
        "bytes" => a.add_region(first.unwrap(), &memory(1 << 20)).map(|key| keys.push(key)),
        "descriptors" => a.add_region(first.unwrap(), &memory(4096)).map(|key| keys.push(key)),
        _ => panic!("{quota}"),
    };
    let why = loop {
        match take() {
            Ok(()) => {}
            Err(EngineError::Remote(why)) => break why,
            Err(e) => panic!("{e}"),
        }
    };
    say(&why);
    // For as long as it is told to, all is asked for again and again.
    let mut tries = 0;
    while !closed.load(Ordering::Relaxed) {
        assert!(take().is_err());
        tries += 1;
    }
    assert!(tries > 0);
    drop(programs.pop());
    qps.pop().map(|qp| a.remove_qp(qp).unwrap());
    if let Some(key) = keys.pop() {
        assert!(a.remove_region(first.unwrap(), key).unwrap());
    }
    match quota {
        "programs" => drop(engine().unwrap()),
        "queue pairs" => drop(qp().unwrap()),
        _ => drop(a.add_region(first.unwrap(), &memory(4096)).unwrap()),
    }
}

// ----------------------------------------------------------------------- tests

#[test]
fn p8_each_quota_of_a_user_is_refused_by_name_and_another_users_messages_go_on() {
    let _one = alone();
    if !is_root("p8_each_quota_of_a_user_is_refused_by_name_and_another_users_messages_go_on") {
        return;
    }
    let quotas = [
        (
            "programs",
            Amounts { programs: 5, ..PLENTY },
            "5 programs in this proxy (proxy-user-programs), 5 are in use",
        ),
        (
            "queue pairs",
            Amounts { queue_pairs: 7, ..PLENTY },
            "7 queue pairs in this proxy (proxy-user-queue-pairs), 7 are",
        ),
        (
            "bytes",
            Amounts { bytes: 32 << 20, ..PLENTY },
            "33554432 bytes in this proxy (proxy-user-memory), 3",
        ),
        (
            "descriptors",
            Amounts { descriptors: 80, ..PLENTY },
            "80 descriptors in this proxy (proxy-user-descriptors), 80",
        ),
    ];
    for (name, quota, says) in quotas {
        let server = server_of(quota);
        let good = Role::start(B, "traffic", &server);
        good.goes_on();
        let hog = Role::start(A, &format!("hog {name}"), &server);
        let why = hog.line();
        assert!(why.starts_with(&format!("user {A} may have {says}")), "{why}");
        assert!(why.contains(" raised where the proxy is started"), "{why}");
        // While the first user asks for more all the time.
        good.goes_on();
        let late = Role::start(B, "traffic", &server);
        late.goes_on();
        hog.end();
        late.end();
        good.end();
    }
}

#[test]
fn p8_users_that_are_not_named_are_refused_and_groups_are_named_by_number() {
    let _one = alone();
    if !is_root("p8_users_that_are_not_named_are_refused_and_groups_are_named_by_number") {
        return;
    }
    let server = server_of(PLENTY);
    let connect = || RemoteEngine::connect(&server.path, "c");
    let why = as_user(C, || remote_sentence(connect()));
    assert!(why.contains("does not serve user 65003") && why.contains("proxy-serves"), "{why}");
    as_user(A, || connect().unwrap());
    connect().unwrap();

    let of_group = server_with(|o| o.users = Users::Some { users: [].into(), groups: [B, 70_000].into() });
    let connect = || RemoteEngine::connect(&of_group.path, "g");
    // By the own group, and by one of the others.
    as_user(B, || connect().unwrap());
    as_user(C, || remote_sentence(connect()));
    std::thread::scope(|s| {
        let member = s.spawn(|| {
            let many: Vec<_> = (0..200).map(|n| Gid::from_raw(69_900 + n)).collect();
            set_thread_groups(&many).unwrap();
            let uid = Uid::from_raw(C);
            set_thread_gid(Gid::from_raw(C)).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
            connect().unwrap();
        });
        member.join().unwrap();
    });
}

#[test]
fn p8_a_program_accepts_the_proxy_of_root_of_its_own_user_and_of_the_one_that_it_names_alone() {
    let _one = alone();
    if !is_root("p8_a_program_accepts_the_proxy_of_root_of_its_own_user_and_of_the_one_that_it_names_alone") {
        return;
    }
    let folder = Folder(std::env::temp_dir().join(format!("pushgate-users-trust-{}", std::process::id())));
    fs::create_dir(&folder.0).unwrap();
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&folder.0, Some(C), Some(C)).unwrap();
    let path = folder.0.join("proxy");
    let (listener, _file) = as_user(C, || bind_for_users(&path).unwrap());
    let stop = EventFd::new().unwrap();
    let options = ServerOptions { users: Users::Any, ..ServerOptions::new(stop.try_clone().unwrap()) };
    let server = std::thread::spawn(move || serve(listener, options));
    let connect = |trusts| RemoteEngine::connect_trusting(&path, "x", trusts);
    for uid in [0, A] {
        // Root is no exception: a proxy sees the program's memory.
        for trusts in [None, Some(B)] {
            let why = as_user(uid, || remote_sentence(connect(trusts)));
            assert!(why.contains(&format!("is user {C}'s, this program is user {uid}'s")), "{why}");
            assert!(why.contains("set proxy-user to 65003"), "{why}");
            as_user(uid, || usage(&path, trusts).unwrap_err());
        }
        as_user(uid, || connect(Some(C)).unwrap());
    }
    as_user(C, || connect(None).unwrap());
    stop.ring();
    server.join().unwrap().unwrap();

    // Root's own.
    let server = server_of(PLENTY);
    as_user(A, || RemoteEngine::connect(&server.path, "x").unwrap());
}

/// In a user namespace without a map all users are one number, the server's and the program's own too.
#[test]
fn p8_in_user_namespaces_without_numbers_users_are_refused_by_name_and_none_is_taken_for_ones_own() {
    let _one = alone();
    let test =
        "p8_in_user_namespaces_without_numbers_users_are_refused_by_name_and_none_is_taken_for_ones_own";
    if !is_root(test) {
        return;
    }
    let start = |uid, what: &str, path: &Path| Role::start_in(Namespace::NewUser, uid, what, path);
    let server = match start(A, "serves its user", Path::new("")) {
        Ok(server) => server,
        Err(e) => return pushgate_tests::skip(&format!("{test}: this kernel makes no user namespace: {e}")),
    };
    let path = PathBuf::from(server.line());
    let overflow: u32 = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap().trim().parse().unwrap();
    let refused = format!("the program's user has no number here ({overflow} stands for all of those)");
    // Users of the host: another one, root, and the one that runs the proxy, who can't be told from the others.
    for uid in [B, 0, A] {
        let why = as_user(uid, || remote_sentence(RemoteEngine::connect_trusting(&path, "x", Some(A))));
        assert!(why.contains(&refused), "user {uid}: {why}");
    }
    // A user of a second namespace like that.
    let other = start(B, &format!("dials {overflow}"), &path).unwrap();
    let why = other.line();
    assert!(why.contains(&format!("({overflow} stands for every user without a number")), "{why}");
    let why = other.line();
    assert!(why.contains(&refused), "{why}");
    other.end();
    // There the proxy of the host's other users is nobody's own either.
    let host = server_of(PLENTY);
    let program = start(B, &format!("dials {overflow}"), &host.path).unwrap();
    let why = program.line();
    assert!(why.contains(&format!("is user {overflow}'s, this program is user {overflow}'s")), "{why}");
    // Served in the host, whose proxy sees the user's own number.
    drop(program);
    server.end();
}

#[test]
fn a_socket_for_several_users_lies_where_others_may_enter_and_not_write() {
    let _one = alone();
    let base = Folder(std::env::temp_dir().join(format!("pushgate-users-bind-{}", std::process::id())));
    fs::create_dir(&base.0).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let path = base.0.join("made").join("proxy");
    let (_listener, file) = bind_for_users(&path).unwrap();
    assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o755, 0o666));
    drop(file);
    assert!(!path.exists());
    for (bits, fits) in
        [(0o755, true), (0o750, true), (0o711, true), (0o700, false), (0o777, false), (0o775, false)]
    {
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(bits)).unwrap();
        match bind_for_users(&path) {
            Ok(_) => assert!(fits, "{bits:o}"),
            Err(e) => {
                assert!(!fits, "{bits:o}: {e}");
                assert!(e.kind() == io::ErrorKind::PermissionDenied && e.to_string().contains("0755"), "{e}");
            }
        }
    }
}

#[test]
fn p8_a_user_reaches_no_queue_pair_of_another_user() {
    let _one = alone();
    if !is_root("p8_a_user_reaches_no_queue_pair_of_another_user") {
        return;
    }
    let server = server_of(PLENTY);
    let (a, b) = as_user(B, || (server.program("a"), server.program("b")));
    let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    pair.a_to_b(3);
    as_user(A, || {
        let stream = server.raw();
        let ask = |request: &Request, fds: &[BorrowedFd<'_>]| {
            wire::send(&stream, request, fds).unwrap();
            answer(&stream)
        };
        let page = memory(4096);
        // Both ends of the other user's, whose numbers are the first ones.
        for qp in [pair.a_qp, pair.b_qp] {
            for refused in [
                ask(&Request::Status { qp }, &[]),
                ask(&Request::RemoveQp { qp }, &[]),
                ask(&Request::Fail { qp: Some(qp), status: 4 }, &[]),
                ask(&Request::AddRegion { qp, bytes: 4096 }, &[page.fd()]),
                ask(&Request::RemoveRegion { qp, key: 1 }, &[]),
            ] {
                assert!(matches!(refused, Err(Refusal::NoQp(_))), "{refused:?}");
            }
        }
        // All of this user's, which are none.
        assert!(matches!(ask(&Request::Fail { qp: None, status: 4 }, &[]), Ok(Answer::Done)));
    });
    pair.a_to_b(20);
    pair.b_to_a(20);
    assert_eq!((pair.a.status(), pair.b.status()), (None, None));
}

#[test]
fn p8_a_session_goes_on_under_the_user_that_began_it_alone() {
    let _one = alone();
    if !is_root("p8_a_session_goes_on_under_the_user_that_began_it_alone") {
        return;
    }
    let server = server_of(PLENTY);
    let (mine, peer) = as_user(A, || (Side::new(0), Side::new(1)));
    let of = |uid| as_user(uid, || memory(4096));
    let own = Incarnation::new(1).unwrap();
    let session =
        SessionOffer { tag: 0, own, peer: Incarnation::new(2).unwrap(), epoch: 1, recover_ns: 1_000_000_000 };
    let resumes = |uid, session_of: &SharedMemory| {
        as_user(uid, || {
            let stream = server.raw();
            let request = Request::ResumeQp {
                options: options(1),
                wake: Wake::Doorbell,
                bell: false,
                peer_bell: false,
                session,
            };
            let fds = [
                mine.work.fd(),
                mine.control.fd(),
                mine.link.fd(),
                peer.link.fd(),
                peer.window.fd(),
                session_of.fd(),
            ];
            wire::send(&stream, &request, &fds).unwrap();
            sentence(answer(&stream))
        })
    };
    let why = resumes(B, &of(A));
    assert_eq!(
        why,
        "session segment: it is user 65001's, the program user 65002's: a session goes on under the user that began it"
    );
    // Those that may are refused for what the segment lacks, which is all.
    for (uid, session_of) in [(A, of(A)), (0, of(A)), (B, of(B))] {
        let why = resumes(uid, &session_of);
        assert!(why.contains("way of frames"), "{why}");
    }
}

#[test]
fn p8_connections_that_say_nothing_are_bounded_for_each_user() {
    let _one = alone();
    if !is_root("p8_connections_that_say_nothing_are_bounded_for_each_user") {
        return;
    }
    let server = server_of(Amounts { programs: 2, ..PLENTY });
    let silent = as_user(A, || {
        let mut silent: Vec<UnixStream> = Vec::new();
        let why = loop {
            let stream = server.dial();
            stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            match wire::recv::<wire::Reply>(&stream) {
                Ok((reply, _)) => break sentence(reply),
                Err(_) => silent.push(stream),
            }
            assert!(silent.len() < 50);
        };
        assert!(why.contains("connections to this proxy, the most are 10 (proxy-user-programs"), "{why}");
        silent
    });
    let (a, b) = as_user(B, || (server.program("a"), server.program("b")));
    Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell()).a_to_b(5);
    drop(silent);
    as_user(A, || until("room for the first user", || RemoteEngine::connect(&server.path, "late").is_ok()));
}

/// The last close of what the stranger sends would take an hour on the thread that accepts programs.
#[test]
fn p7_a_stranger_whose_descriptors_linger_holds_up_no_program() {
    let _one = alone();
    if !is_root("p7_a_stranger_whose_descriptors_linger_holds_up_no_program") {
        return;
    }
    let mut ends = Vec::new();
    // Closed here before the server accepts, so that the server has the last of each.
    let strangers = |name: &str| {
        for _ in 0..20 {
            let stranger =
                || UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
            let (fd, end) = lingering();
            assert!(send_along(as_user(C, stranger), &fd, &[1]));
            ends.push(end);
        }
    };
    let server = server_behind(strangers, |o| {
        o.users = Users::Some { users: [A].into(), groups: [].into() };
    });
    let (a, b) = as_user(A, || (server.program("a"), server.program("b")));
    Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell()).a_to_b(5);
}

/// The close of what the strangers send would take an hour on the thread that ends the server.
#[test]
fn p7_strangers_in_the_queue_whose_descriptors_linger_hold_up_no_end_of_a_server() {
    let _one = alone();
    if !is_root("p7_strangers_in_the_queue_whose_descriptors_linger_hold_up_no_end_of_a_server") {
        return;
    }
    let mut all = Vec::new();
    let strangers = |name: &str| {
        for _ in 0..20 {
            let stranger =
                || UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
            let (stranger, (fd, end)) = (as_user(C, stranger), lingering());
            assert!(send_along(&stranger, &fd, &[1]));
            all.push((stranger, end));
        }
    };
    // The server ends before it accepts anybody.
    let mut server = server_behind(strangers, |o| o.stop.ring());
    until("the server has ended", || server.thread.as_ref().unwrap().is_finished());
    server.end().unwrap();
    // Nobody holds the name.
    bind(&server.path).unwrap();
}

#[test]
fn a_user_sees_what_it_holds_and_root_sees_what_all_hold() {
    let _one = alone();
    if !is_root("a_user_sees_what_it_holds_and_root_sees_what_all_hold") {
        return;
    }
    let quota = Amounts { programs: 2, ..PLENTY };
    let server = server_of(quota);
    let (a, b) = as_user(A, || (server.program("a"), server.program("b")));
    let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    pair.a_to_b(3);
    let other = as_user(B, || server.program("c"));
    // The first user has all of its programs, and is told all the same.
    let seen = as_user(A, || usage(&server.path, None).unwrap());
    assert_eq!((seen.proxy, seen.quota, seen.left_out, seen.users.len()), (0, quota, 0, 1));
    let UserUsage { uid, held, cpu_ns, nice } = seen.users[0];
    assert_eq!((uid, held.programs, held.queue_pairs, nice), (A, 2, 2, 0));
    assert!(cpu_ns > 0 && held.descriptors == 2 * 5 + 2 * 11, "{held:?}");
    let before = held.bytes;
    let key = a.proxy.add_region(pair.a_qp, &memory(1 << 20)).unwrap();
    let held_now = || as_user(A, || usage(&server.path, None).unwrap().users[0].held);
    assert_eq!((held_now().bytes, held_now().descriptors), (before + (1 << 20), held.descriptors + 1));
    assert!(a.proxy.remove_region(pair.a_qp, key).unwrap());
    assert_eq!(held_now(), held);

    let all = usage(&server.path, None).unwrap();
    // Root itself is connected, to ask.
    let rows: Vec<_> = all.users.iter().map(|user| (user.uid, user.held.programs)).collect();
    assert_eq!(rows, [(0, 0), (A, 2), (B, 1)]);
    let why = as_user(C, || usage(&server.path, None).unwrap_err().to_string());
    assert!(why.contains("does not serve user 65003"), "{why}");
    let b_qp = pair.b_qp;
    drop(pair);
    drop((a, other));
    let rows = || -> Vec<_> { usage(&server.path, None).unwrap().users.iter().map(|u| u.uid).collect() };
    until("the users that are gone", || rows() == [0, A]);
    b.proxy.remove_qp(b_qp).unwrap();
    assert_eq!(held_now().queue_pairs, 0);
}

// ----------------------------------------------------------------- fair shares

/// Payload of one message of a busy queue pair. A full ring is more work than the engine that copies does in one turn of the
/// core: with less it sleeps while the engine that sends waits for a turn after sixteen other threads, and its user's part is small
/// because it wants little.
const COPIED: usize = 2 << 20;
const UNITS: u32 = COPIED as u32 / abi::PUSHGATE_UNIT;

/// The rings of a busy queue pair: large messages, so that the engine works long for little work of the program.
const BUSY: Geometry = Geometry {
    window_log: 17,
    slots_log: 3,
    cq_log: 3,
    rx_log: 3,
    link_log: 3,
    landing_log: 6,
    signals: 8,
    rank: 0,
};

/// Whether proxy and programs have all cores of the machine, for a look at machines of many: else the proxy has one core, and its programs
/// and attackers the next one, so that as much attacks on each machine.
fn all_cores() -> bool {
    std::env::var_os("_PUSHGATE_TEST_ALL_CORES").is_some()
}

/// Keeps the calling thread, and those that it starts, on the core after the engines'.
fn leave_the_engines_core() {
    if all_cores() {
        return;
    }
    let all = sched_getaffinity(None).unwrap();
    let next = (core() + 1..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).expect("there are two");
    let mut set = CpuSet::new();
    set.set(next);
    sched_setaffinity(None, &set).unwrap();
}

/// Messages of a busy queue pair for each line that it was counted.
const COUNTED: u64 = 4;

/// Keeps `n` pairs of programs busy, the second program of each pair with copies, until standard input is closed.
fn busy(n: usize, counted: bool, closed: &AtomicBool) {
    // So that there is always something to copy.
    leave_the_engines_core();
    let all: Vec<_> = (0..2 * n).map(|_| engine().unwrap()).collect();
    let mut pairs: Vec<_> = all
        .chunks(2)
        .map(|two| {
            let pair = Pair::of(BUSY, &two[0], two[0].ringer(), &two[1], two[1].ringer());
            let region = memory(COPIED);
            let rkey = two[1].add_region(pair.b_qp, &region).unwrap();
            (pair, rkey, region)
        })
        .collect();
    say("busy");
    while !closed.load(Ordering::Relaxed) {
        for (pair, rkey, _) in &mut pairs {
            while pair.a.has_room((1 << BUSY.window_log) / UNITS as u64) {
                let record = Record {
                    length: COPIED as u32,
                    place: (pair.a.sent as u32 * UNITS) & ((1 << BUSY.window_log) - 1),
                    place_offset: UNITS.into(),
                    rkey: *rkey,
                    ..Record::new(Opcode::Put)
                };
                pair.a.post(record, &[], pair.a_bell);
                if counted && pair.a.sent.is_multiple_of(COUNTED) {
                    say("checked");
                }
            }
            assert_eq!((pair.a.status(), pair.b.status()), (None, None));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Attacks a proxy in many ways at once, until standard input is closed: each on a thread, while the file beside this program is there.
/// Without the file the threads use as much of a processor, and leave the proxy alone. `member`: the proxy serves this user.
fn attacks(member: bool, closed: &AtomicBool) {
    leave_the_engines_core();
    // Below the program whose messages are measured, so that it is the proxy that holds them up, if anything does.
    setpriority_process(None, 19).unwrap();
    let file = std::env::current_exe().unwrap().with_file_name("attack");
    let socket = std::env::var("USERS_SOCKET").unwrap();
    let address = SocketAddr::from_abstract_name(socket.strip_prefix('@').unwrap()).unwrap();
    // `None`: the server's queue is full of the others.
    let dial = || UnixStream::connect_addr(&address).ok();
    let garbage = |stream: &UnixStream, fds: &[BorrowedFd<'_>]| _ = fdpass::send_message(stream, b"{", fds);
    type Attack<'a> = Box<dyn FnMut() + Send + 'a>;
    let engines: Vec<_> = (0..if member { 2 } else { 0 }).map(|_| engine().unwrap()).collect();
    // Connections that say nothing; those beyond the quota are refused.
    let mut silent = VecDeque::new();
    let says_nothing = || {
        silent.extend(dial());
        if silent.len() > 20 {
            silent.pop_front();
        }
    };
    let says_garbage = || dial().iter().for_each(|stream| garbage(stream, &[]));
    // The proxy has the last of each descriptor.
    let mut ends = VecDeque::new();
    let lingers = || {
        let (fd, end) = lingering();
        dial().iter().for_each(|stream| garbage(stream, &[fd.as_fd()]));
        // The proxy's copy may be closed already, and then this close lingers, until the other end is closed.
        std::thread::spawn(|| drop(fd));
        ends.push_back(end);
        if ends.len() > 20 {
            ends.pop_front();
        }
    };
    let mut all: Vec<Attack<'_>> = vec![Box::new(says_nothing), Box::new(says_garbage), Box::new(lingers)];
    if let [asks, rings] = &engines[..] {
        let (x, y) = (Side::new(0), Side::new(1));
        let qp = asks.add_qp(&x.fds(&y, None), options(1), Wake::Doorbell).unwrap();
        let (sparse, whole) = (memory(1 << 20), memory(4096));
        fallocate(sparse.fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096).unwrap();
        // Until it is over the limit.
        while asks.add_region(qp, &whole).is_ok() {}
        let refused = move || {
            asks.add_region(qp, &sparse).unwrap_err();
            asks.add_region(qp, &whole).unwrap_err();
        };
        let names = || {
            _ = RemoteEngine::connect(Path::new(&socket), "\x1b[2J\nroot: all is well\r".repeat(40).as_str())
        };
        all.push(Box::new(refused));
        all.push(Box::new(|| (0..100).for_each(|_| rings.ringer().ring())));
        all.push(Box::new(names));
    }
    let tried: Vec<_> = all.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|s| {
        for (mut attack, tried) in all.into_iter().zip(&tried) {
            let file = &file;
            s.spawn(move || {
                while !closed.load(Ordering::Relaxed) {
                    let begin = Instant::now();
                    match fs::exists(file).unwrap() {
                        true => {
                            attack();
                            tried.fetch_add(1, Ordering::Relaxed);
                        }
                        false => while begin.elapsed() < Duration::from_micros(200) {},
                    }
                }
            });
        }
        say("ready");
    });
    say(&format!("{:?}", tried.iter().map(|n| n.load(Ordering::Relaxed)).collect::<Vec<_>>()));
}

/// The core of the engines.
fn core() -> usize {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).find(|cpu| set.is_set(*cpu)).unwrap()
}

#[test]
fn a_user_with_eight_busy_programs_leaves_a_user_with_one_a_fair_share_of_a_core() {
    let _one = alone();
    let name = "a_user_with_eight_busy_programs_leaves_a_user_with_one_a_fair_share_of_a_core";
    if !is_root(name) {
        return;
    }
    if sched_getaffinity(None).unwrap().count() < 2 {
        return pushgate_tests::skip(&format!("{name}: one core, where the programs take the engines' time"));
    }
    let server = server_with(|o| {
        o.users = Users::Any;
        (o.quota, o.max_clients, o.cpus) = (PLENTY, 200, vec![core()]);
    });
    let (many, one) = (Role::start(A, "busy 8", &server), Role::start(B, "busy 1", &server));
    assert_eq!((many.line(), one.line()), ("busy".into(), "busy".into()));
    let of = |uid| -> UserUsage {
        let all = usage(&server.path, None).unwrap().users;
        *all.iter().find(|user| user.uid == uid).unwrap()
    };
    until("the first user stands back", || of(A).nice >= 7 && of(B).nice == 0);
    // Threads that have just become heavier make up for the past.
    std::thread::sleep(Duration::from_millis(500));
    let share = || {
        let before = [of(A), of(B)].map(|user| user.cpu_ns);
        until("time", || of(B).cpu_ns - before[1] > 500_000_000);
        let [many_ns, one_ns] = [of(A).cpu_ns - before[0], of(B).cpu_ns - before[1]];
        let share = one_ns as f64 / (many_ns + one_ns) as f64;
        eprintln!("shares of a core: {:.3} for 8 busy programs, {share:.3} for one", 1.0 - share);
        share
    };
    // Without nice values it is a ninth each time. The one program may get no core for a while on a busy machine.
    assert!(std::iter::repeat_with(share).take(5).any(|share| (0.25..0.75).contains(&share)));
    // A user alone yields to nobody.
    one.end();
    until("the first user is alone", || of(A).nice == 0);
    many.end();
}

/// The least part of its speed that a user keeps: the first user has less time for its own programs, so it can be more than before.
const LEAST_SPEED: f64 = 0.8;

/// What is compared: the messages of a user for each second of processor time that the proxy has, which all is on one core; where the proxy
/// has [`all_cores`], for each second. While the first user
/// is peaceful it has busy programs too, and its other threads use as much of their core as when they attack.
#[test]
fn p8_a_proxy_under_all_attacks_at_once_serves_another_user_at_much_of_its_speed() {
    let _one = alone();
    let name = "p8_a_proxy_under_all_attacks_at_once_serves_another_user_at_much_of_its_speed";
    if !is_root(name) {
        return;
    }
    if sched_getaffinity(None).unwrap().count() < 2 {
        return pushgate_tests::skip(&format!("{name}: one core, where the programs take the engines' time"));
    }
    // All threads of the proxy, also those that accept and close.
    let starts = || {
        let options = |o: &mut ServerOptions| {
            o.users = Users::Some { users: [A, B].into(), groups: [].into() };
            (o.quota, o.max_clients) = (Amounts { programs: 20, ..PLENTY }, 200);
        };
        if all_cores() {
            return server_with(options);
        }
        let mut set = CpuSet::new();
        set.set(core());
        let all = sched_getaffinity(None).unwrap();
        sched_setaffinity(None, &set).unwrap();
        let server = server_with(|o| {
            options(o);
            o.cpus = vec![core()];
        });
        sched_setaffinity(None, &all).unwrap();
        server
    };
    let server = starts();
    let (one, busy) = (Role::start(B, "counted 1", &server), Role::start(A, "busy 3", &server));
    assert_eq!((one.line(), busy.line()), ("busy".into(), "busy".into()));
    let attackers =
        [(A, "attacks member"), (C, "attacks stranger")].map(|(uid, what)| Role::start(uid, what, &server));
    attackers.iter().for_each(|attacker| assert_eq!(attacker.line(), "ready"));
    let has = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    // Processor time of the engines of the user that is measured.
    let engines = || -> f64 {
        let all = usage(&server.path, None).unwrap().users;
        all.iter().filter(|user| user.uid == B).map(|user| user.cpu_ns as f64 / 1e9).sum()
    };
    // Messages, seconds of processor time, seconds, seconds of processor time of that user's engines.
    let measure = |attack: bool| {
        for file in attackers.iter().map(|attacker| attacker._folder.0.join("attack")) {
            match attack {
                true => fs::write(file, "").unwrap(),
                false => _ = fs::remove_file(file),
            }
        }
        // Users' shares follow what the users want.
        std::thread::sleep(Duration::from_millis(400));
        let (before, messages, had, begin) =
            (engines(), one.checked.load(Ordering::Relaxed), has(), Instant::now());
        std::thread::sleep(Duration::from_millis(400));
        let messages = (one.checked.load(Ordering::Relaxed) - messages) * COUNTED;
        let (had, took) = ((has() - had).as_secs_f64(), begin.elapsed().as_secs_f64());
        [messages as f64, had, took, engines() - before]
    };
    let mut sums = [[0.0; 4]; 2];
    let (mut peace, mut war, mut ratio) = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0);
    // What else runs on the machine disturbs a measurement; then more are made.
    for round in 1..=24 {
        for (attack, sum) in sums.iter_mut().enumerate() {
            let measured = measure(attack == 1);
            sum.iter_mut().zip(measured).for_each(|(sum, more)| *sum += more);
        }
        [peace, war] =
            sums.map(|[messages, had, time, engines]| (messages / had, messages / time, engines / had));
        ratio = if all_cores() { war.1 / peace.1 } else { war.0 / peace.0 };
        if round >= 8 && ratio > LEAST_SPEED {
            break;
        }
    }
    let by_time = war.1 / peace.1;
    eprintln!(
        "messages a second of processor time: {:.0} in peace, {:.0} under attack: {ratio:.3}; by the clock {by_time:.3}; \
         part of the processor time that the user's engines have: {:.2}, {:.2}",
        peace.0, war.0, peace.2, war.2
    );
    for attacker in attackers {
        let said = attacker.stop();
        eprintln!("attacks: {said}");
        assert!(!said.contains("[0,") && !said.contains(" 0"), "one was not tried: {said}");
    }
    busy.end();
    one.end();
    // The attackers' connections may still fill the queue, which the thread that stands back empties.
    until("a new program is served", || RemoteEngine::connect(&server.path, "late").is_ok());
    server.still_works();
    assert!(ratio > LEAST_SPEED, "{ratio}");
}

/// The close of a file of the first user hangs for as long as that user likes.
#[test]
fn p7_p8_a_user_whose_closes_hang_holds_up_no_close_of_another_user() {
    let _one = alone();
    let name = "p7_p8_a_user_whose_closes_hang_holds_up_no_close_of_another_user";
    if !is_root(name) {
        return;
    }
    let server = server_of(Amounts { programs: 2, ..PLENTY });
    let hanging = match Hanging::open(8) {
        Ok(hanging) => hanging,
        Err(e) => return pushgate_tests::skip(&format!("{name}: no file system in user space: {e}")),
    };
    // A frame that is no message: the server closes what came with it.
    let sends = |uid, fds: &[BorrowedFd<'_>]| {
        let stream = as_user(uid, || server.dial());
        fdpass::send_message(&stream, b"{", fds).unwrap();
        stream
    };
    let files: Vec<_> = hanging.files().iter().map(|fd| fd.as_fd()).collect();
    let _hangs = sends(A, &files[..MAX_FDS.min(files.len())]);
    until("a close hangs", || hanging.waiting() > 0);
    // As many as the second user may have connections; each counts until its descriptor is closed.
    let ends: Vec<_> = (0..10)
        .map(|_| {
            let (fd, end) = lingering();
            sends(B, &[fd.as_fd()]);
            end
        })
        .collect();
    let mut programs = Vec::new();
    until("room for the other user", || {
        programs.extend(as_user(B, || RemoteEngine::connect(&server.path, "late").ok()));
        programs.len() == 2
    });
    Pair::new(&programs[0], programs[0].ringer(), &programs[1], programs[1].ringer()).a_to_b(5);
    drop((ends, hanging));
}

/// Each close that hangs keeps threads of the proxy.
#[test]
fn p7_p8_a_program_whose_frames_bring_files_that_hang_leaves_few_threads_and_its_frames_end() {
    let _one = alone();
    let name = "p7_p8_a_program_whose_frames_bring_files_that_hang_leaves_few_threads_and_its_frames_end";
    if !is_root(name) {
        return;
    }
    let server = server_of(PLENTY);
    let stream = as_user(A, || server.raw());
    wire::send(&stream, &Request::Channel, &[]).unwrap();
    let (reply, fds) = wire::recv::<wire::Reply>(&stream).unwrap();
    assert!(matches!(reply, Ok(Answer::Channel)));
    let hanging = match Hanging::open(1) {
        Ok(hanging) => hanging,
        Err(e) => return pushgate_tests::skip(&format!("{name}: no file system in user space: {e}")),
    };
    let mut sent = 0;
    until("the way of frames ends", || {
        sent += u32::from(send_along(&fds[0], &hanging.files()[0], &[1; 8]));
        !matches!(recv(&fds[0], &mut [0; 1], RecvFlags::DONTWAIT), Err(Errno::AGAIN))
    });
    assert!(sent >= 16 && hanging.waiting() <= 16, "{sent} sent, {} hang", hanging.waiting());
    as_user(B, || server.still_works());
    drop(hanging);
}
