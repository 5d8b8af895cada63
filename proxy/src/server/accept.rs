//! The serving loop: takes connections, admits or refuses them, and starts a thread for each program.

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::process::Process;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::wire::{self, PeerCred, Refusal, Reply};

use super::client::attend;
use super::options::ServerOptions;
use super::wait::{WaitEnd, wait};

/// How often the loop looks for threads that have ended, and how long a refused program may take to receive the
/// reason.
const WATCH: Duration = Duration::from_millis(100);
/// How long [`serve`] waits at its end for its programs' threads.
const GRACE: Duration = Duration::from_secs(10);

/// Serves programs until `options.stop` is rung. Each connection of this process's user or of root gets an engine of
/// its own.
///
/// When it returns, all engines have ended, and their queue pairs with *aborted*. Errors are the listener's own; what a
/// program does causes none.
pub fn serve(listener: UnixListener, options: ServerOptions) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (need, have) = (options.descriptors() as u64, getrlimit(Resource::Nofile).current);
    if have.is_some_and(|have| have < need) {
        tracing::warn!(need, have, "the limit of open files is low: a greedy program is felt by the others");
    }
    let uid = rustix::process::geteuid().as_raw();
    let server = Arc::new(options);
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    let mut number = 0u64;
    tracing::info!("the proxy serves");
    let result = loop {
        let watch = (!clients.is_empty()).then_some(WATCH);
        let event = match wait(&server.stop, &listener, None, None, watch) {
            Err(e) => break Err(e),
            Ok(event) => event,
        };
        // In every turn and not only in idle ones: where accept fails, the listener stays ready and no turn is idle.
        reap(&mut clients);
        match event {
            WaitEnd::Stop => break Ok(()),
            WaitEnd::Nothing => continue,
            // This wait names no process and no other descriptor.
            WaitEnd::Ready { .. } | WaitEnd::Died | WaitEnd::Other => {}
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if accept_again(&e) => {
                // Do not spin on a cause that lasts, such as a lack of descriptors.
                if e.kind() != ErrorKind::WouldBlock {
                    tracing::warn!("accepting a program: {e}");
                    std::thread::sleep(WATCH);
                }
                continue;
            }
            Err(e) => break Err(e),
        };
        number += 1;
        let admitted = wire::peer_cred(&stream)
            .map_err(|e| format!("SO_PEERCRED: {e}"))
            .and_then(|cred| admit(cred, uid, clients.len(), server.max_clients).map(|()| cred));
        match admitted {
            Ok(cred) => match start(&server, stream, cred, number) {
                Ok(client) => clients.push(client),
                Err(e) => tracing::warn!(client = number, "starting its thread: {e}"),
            },
            Err(why) => refuse(&stream, number, why),
        }
    };
    // Stopped or broken: the programs' threads wait for this bell, too.
    server.stop.ring();
    let begin = Instant::now();
    while !clients.is_empty() && begin.elapsed() < GRACE {
        reap(&mut clients);
        std::thread::sleep(Duration::from_millis(5));
    }
    if !clients.is_empty() {
        tracing::error!(left = clients.len(), "programs' threads did not end");
    }
    tracing::info!("the proxy has ended");
    result
}

/// Whether a connection of this user may be a program of a proxy of user `uid`, which has `clients` programs of `most`.
fn admit(cred: PeerCred, uid: u32, clients: usize, most: usize) -> Result<(), String> {
    if cred.uid != uid && cred.uid != 0 {
        return Err(format!(
            "this proxy is user {uid}'s, the program user {}'s: start a proxy as that user",
            cred.uid
        ));
    }
    if clients >= most {
        return Err(format!("{clients} programs are connected, which is the limit: end one, or raise it"));
    }
    Ok(())
}

/// Starts the thread of a program that was admitted.
fn start(
    server: &Arc<ServerOptions>,
    stream: UnixStream,
    cred: PeerCred,
    number: u64,
) -> io::Result<JoinHandle<()>> {
    tracing::debug!(client = number, cred.pid, cred.uid, cred.gid, "connected");
    let server = server.clone();
    // The number is 0 for a process of another PID namespace: only the socket tells its end.
    let process = u32::try_from(cred.pid).ok().and_then(|pid| Process::of(pid).ok());
    std::thread::Builder::new()
        .name(format!("pushgate-{number}"))
        .spawn(move || attend(&server, &stream, process.as_ref(), number))
}

/// Tells a program why it is not served.
fn refuse(stream: &UnixStream, number: u64, why: String) {
    tracing::warn!(client = number, "refused: {why}");
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
    use super::*;

    fn of(uid: u32) -> PeerCred {
        PeerCred { pid: 1, uid, gid: 7 }
    }

    #[test]
    fn p8_only_programs_of_the_proxys_user_and_of_root_are_admitted() {
        admit(of(1000), 1000, 0, 1).unwrap();
        admit(of(0), 1000, 0, 1).unwrap();
        let why = admit(of(1001), 1000, 0, 1).unwrap_err();
        assert!(why.contains("user 1000's, the program user 1001's"), "{why}");
        // Root's proxy sees the memory of its programs: a user's program needs a proxy of that user.
        admit(of(1000), 0, 0, 1).unwrap_err();
    }

    #[test]
    fn a_program_over_the_limit_is_refused_with_the_limit() {
        admit(of(5), 5, 2, 3).unwrap();
        assert!(admit(of(5), 5, 3, 3).unwrap_err().starts_with("3 programs are connected"));
    }

    #[test]
    fn a_lack_of_descriptors_ends_no_listener_and_a_broken_socket_does() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(accept_again(&error(Errno::MFILE)) && accept_again(&error(Errno::CONNABORTED)));
        assert!(!accept_again(&error(Errno::BADF)) && !accept_again(&error(Errno::INVAL)));
    }
}
