//! The serving loop: takes connections, admits or refuses them, and starts a thread for each program.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::closing::{PeerListener, PeerStream};
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Lines;
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::users::without_number;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::wire::{self, PeerCred, Refusal, Reply};

use super::client::{Guest, Server, attend};
use super::ledger::{Lease, Ledger};
use super::options::ServerOptions;
use super::share::Share;
use super::wait::{WaitEnd, wait};

/// How often the loop looks for threads that have ended, and how long a refused program may take to receive the
/// reason.
const WATCH: Duration = Duration::from_millis(100);
/// How long [`serve`] waits at its end for its programs' threads.
const GRACE: Duration = Duration::from_secs(10);

/// Serves programs until `options.stop` is rung. Each connection of this process's user, of root and of
/// [`ServerOptions::users`] gets an engine of its own.
///
/// When it returns, all engines have ended, and their queue pairs with *aborted*. Errors are the listener's own; what a
/// program does causes none. Programs that it has not accepted by then are refused, unless another process has the listener too
/// ([`PeerListener::shared`]).
pub fn serve(listener: PeerListener, options: ServerOptions) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // Several users do not all take what they may: for two of them there should be enough.
    let need = match options.users.others() {
        true => options.quota.descriptors.saturating_mul(2).min(options.descriptors() as u64),
        false => options.descriptors() as u64,
    };
    let have = getrlimit(Resource::Nofile).current;
    if have.is_some_and(|have| have < need) {
        tracing::warn!(need, have, "the limit of open files is low: a greedy program is felt by the others");
    }
    let uid = rustix::process::geteuid().as_raw();
    if options.users.others() {
        // A core file of this process would show the memory of its programs to its own user.
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        if let Err(e) = setrlimit(Resource::Core, none) {
            tracing::warn!("core files of this proxy may have memory of other users' programs: {e}");
        }
    }
    let server = Arc::new(Server {
        ledger: Ledger::new(options.quota, have),
        share: Share::new(options.users.others()),
        uid,
        options,
    });
    let without_number = without_number();
    // Those of each user, whichever of its programs caused them, are counted together.
    let lines = Lines::default();
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    let mut number = 0u64;
    let mut looked = Instant::now();
    server.share.stand_back();
    tracing::info!("the proxy serves");
    let result = loop {
        let watch = (!clients.is_empty()).then_some(WATCH);
        let event = match wait(&server.options.stop, &listener, None, None, watch) {
            Err(e) => break Err(e),
            Ok(event) => event,
        };
        // In every turn and not only in idle ones: where accept fails, the listener stays ready and no turn is idle.
        reap(&mut clients);
        if looked.elapsed() >= WATCH {
            server.share.look();
            looked = Instant::now();
        }
        match event {
            WaitEnd::Stop => break Ok(()),
            WaitEnd::Nothing => continue,
            // This wait names no process and no other descriptor.
            WaitEnd::Ready { .. } | WaitEnd::Died | WaitEnd::Other => {}
        }
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(e) if accept_again(&e) => {
                // Do not spin on a cause that lasts, such as a lack of descriptors.
                if e.kind() != ErrorKind::WouldBlock {
                    limited!(warn, uid, "accepting a program: {e}");
                    std::thread::sleep(WATCH);
                }
                continue;
            }
            Err(e) => break Err(e),
        };
        number += 1;
        let place = Place { uid, without_number, clients: clients.len() };
        let cred = wire::peer_cred(&stream).map_err(|e| format!("SO_PEERCRED: {e}"));
        let started = cred.as_ref().map_err(String::clone).and_then(|cred| {
            admit(&server.options, place, *cred, || wire::peer_groups(&stream))?;
            Ok((*cred, server.ledger.connect(cred.uid)?))
        });
        match started {
            Ok((cred, connection)) => {
                match start(&server, stream, cred, connection, (number, lines.about(cred.uid))) {
                    Ok(client) => clients.push(client),
                    Err(e) => limited!(warn, cred.uid, client = number, "starting its thread: {e}"),
                }
            }
            Err(why) => refuse(&stream, number, cred.map_or(u32::MAX, |cred| cred.uid), why),
        }
    };
    // Stopped or broken: the programs' threads wait for this bell, too.
    server.options.stop.ring();
    let begin = Instant::now();
    while !clients.is_empty() && begin.elapsed() < GRACE {
        reap(&mut clients);
        std::thread::sleep(Duration::from_millis(5));
    }
    if !clients.is_empty() {
        tracing::error!(left = clients.len(), "programs' threads did not end");
    }
    server.share.come_forward(uid);
    tracing::info!("the proxy has ended");
    result
}

/// What a connection comes to: a server of user `uid` to which `clients` programs are connected. `without_number` stands for users without
/// a number here.
#[derive(Clone, Copy)]
struct Place {
    uid: u32,
    without_number: Option<u32>,
    clients: usize,
}

/// Whether a connection may be a program of a server. `groups` finds the groups of the other end besides its own one.
fn admit(
    options: &ServerOptions,
    place: Place,
    cred: PeerCred,
    groups: impl FnOnce() -> io::Result<Vec<u32>>,
) -> Result<(), String> {
    let Place { uid, without_number, clients } = place;
    let theirs = cred.uid;
    if theirs == 0 {
        // Root reads any program's memory anyway.
    } else if Some(theirs) == without_number {
        return Err(format!(
            "the program's user has no number here ({theirs} stands for all of those): start a proxy in the \
             program's user namespace"
        ));
    } else if theirs != uid {
        if !options.users.others() {
            return Err(format!(
                "this proxy is user {uid}'s, the program user {theirs}'s: start a proxy as that user, or have this one \
                 serve other users too (proxy-serves)"
            ));
        }
        let mut why = String::new();
        // Groups that are not known are none.
        let others =
            groups().inspect_err(|e| why = format!(" (the program's groups: {e})")).unwrap_or_default();
        if !options.users.names(theirs, others.into_iter().chain([cred.gid])) {
            return Err(format!(
                "this proxy does not serve user {theirs}{why}: have the user, or a group of the user, added to \
                 proxy-serves where the proxy is started"
            ));
        }
    }
    if clients >= options.max_clients {
        return Err(format!("{clients} programs are connected, which is the limit: end one, or raise it"));
    }
    Ok(())
}

/// Starts the thread of a program that was admitted.
fn start(
    server: &Arc<Server>,
    stream: PeerStream,
    cred: PeerCred,
    connection: Lease,
    (number, lines): (u64, Lines),
) -> io::Result<JoinHandle<()>> {
    tracing::debug!(client = number, cred.pid, cred.uid, cred.gid, "connected");
    let server = server.clone();
    // The number is 0 for a process of another PID namespace: only the socket tells its end.
    let process = u32::try_from(cred.pid).ok().and_then(|pid| Process::of(pid).ok());
    // The connection counts as its user's until what came over it is closed.
    let guest = Guest { stream: stream.within(Arc::new(connection)), process, uid: cred.uid, number };
    std::thread::Builder::new().name(format!("pushgate-{number}")).spawn(move || {
        lines.enter();
        attend(&server, guest)
    })
}

/// Tells a program why it is not served. Anybody can connect, so the log is told of few of a user's programs.
fn refuse(stream: &PeerStream, number: u64, uid: u32, why: String) {
    limited!(warn, uid, client = number, "refused: {why}");
    // The socket is new and its buffer empty, so this does not wait.
    let _ = stream.set_write_timeout(Some(WATCH));
    let _ = wire::send(stream, &Reply::Err(Refusal::Why(why)), &[]);
}

/// Joins the threads that have ended.
fn reap(clients: &mut Vec<JoinHandle<()>>) {
    for client in clients.extract_if(.., |c| c.is_finished()) {
        if client.join().is_err() {
            tracing::error!("a program's thread panicked; the others go on");
        }
    }
}

/// Whether an error of `accept` says nothing about the listener, so that the next call may succeed.
fn accept_again(e: &io::Error) -> bool {
    [
        Errno::AGAIN,
        Errno::INTR,
        Errno::CONNABORTED,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
        Errno::PERM,
    ]
    .iter()
    .any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::eventfd::EventFd;

    use super::*;
    use crate::users::Users;

    const PLACE: Place = Place { uid: 1000, without_number: Some(65534), clients: 0 };

    fn of(uid: u32) -> PeerCred {
        PeerCred { pid: 1, uid, gid: 7 }
    }

    fn options(users: Users) -> ServerOptions {
        ServerOptions { users, max_clients: 3, ..ServerOptions::new(EventFd::new().unwrap()) }
    }

    fn admitted(users: Users, uid: u32, groups: &[u32]) -> Result<(), String> {
        admit(&options(users), PLACE, of(uid), || Ok(groups.to_vec()))
    }

    #[test]
    fn p8_without_a_list_only_programs_of_the_proxys_user_and_of_root_are_admitted() {
        admitted(Users::Own, 1000, &[]).unwrap();
        admitted(Users::Own, 0, &[]).unwrap();
        let why = admitted(Users::Own, 1001, &[1000, 0]).unwrap_err();
        assert!(
            why.contains("user 1000's, the program user 1001's") && why.contains("proxy-serves"),
            "{why}"
        );
        // A proxy that runs as the number of all users without one can't tell its own user.
        let nobody = |number| Place { uid: 65534, without_number: number, ..PLACE };
        let why = admit(&options(Users::Own), nobody(Some(65534)), of(65534), || Ok(vec![])).unwrap_err();
        assert!(why.contains("has no number here"), "{why}");
        admit(&options(Users::Own), nobody(None), of(65534), || Ok(vec![])).unwrap();
        // Root's proxy too.
        admit(&options(Users::Own), Place { uid: 0, ..PLACE }, of(1000), || Ok(vec![])).unwrap_err();
    }

    #[test]
    fn p8_a_list_admits_users_and_groups_that_it_names_and_nobody_without_a_number() {
        let list = || Users::Some { users: [1001].into(), groups: [44, 7].into() };
        admitted(list(), 1001, &[]).unwrap();
        // By the process's own group, 7.
        admitted(list(), 1002, &[]).unwrap();
        let other = || Users::Some { users: [1001].into(), groups: [44].into() };
        admitted(other(), 1002, &[3, 44]).unwrap();
        admitted(other(), 0, &[]).unwrap();
        let why = admitted(other(), 1002, &[3]).unwrap_err();
        assert!(why.contains("does not serve user 1002:") && why.contains("proxy-serves"), "{why}");
        let unknown = || Err(io::Error::other("refused here"));
        let why = admit(&options(other()), PLACE, of(1002), unknown).unwrap_err();
        assert!(why.contains("user 1002 (the program's groups: refused here)"), "{why}");
        admit(&options(other()), PLACE, of(1001), || Err(io::Error::other("refused here"))).unwrap();
        admitted(Users::Any, 1003, &[]).unwrap();
        let why = admitted(Users::Any, 65534, &[]).unwrap_err();
        assert!(why.contains("no number here (65534"), "{why}");
    }

    #[test]
    fn a_program_over_the_limit_is_refused_with_the_limit() {
        let at = |clients| admit(&options(Users::Own), Place { clients, ..PLACE }, of(1000), || Ok(vec![]));
        at(2).unwrap();
        assert!(at(3).unwrap_err().starts_with("3 programs are connected"));
    }

    #[test]
    fn a_lack_of_descriptors_ends_no_listener_and_a_broken_socket_does() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(accept_again(&error(Errno::MFILE)) && accept_again(&error(Errno::CONNABORTED)));
        assert!(!accept_again(&error(Errno::BADF)) && !accept_again(&error(Errno::INVAL)));
    }
}
