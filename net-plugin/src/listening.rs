//! The sockets at which a listener waits for connectors: a Unix socket for `local` queue pairs, TCP for `verbs` and `tcp`. A
//! listener does not know who will connect, so with `qp = auto` it has both.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::Once;
use std::time::Duration;

use pushgate::settings::QpKind;
use pushgate_door::addresses::{Message, Places, listen};
use pushgate_door::{Door, Limits};
use pushgate_driver_shim::closing::PeerListener;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::users::is_ours_or_root;
use pushgate_service::server::SocketFile;
use pushgate_service::wire::peer_cred;

use crate::error::{Code, Failure, Result};
use crate::handle::{Key, Nonce};
use crate::loaded::Loaded;
use crate::log;
use crate::stream::Stream;

/// Time within which a connector must greet. NCCL calls the connector from a thread that also allocates and registers memory, and
/// calls nothing meanwhile. A connection that never greets occupies one descriptor for this time.
pub const GREETING: Duration = Duration::from_secs(600);
/// How many connections may be about to greet. The ranks of a job may all come at once, as for their first puts (RMA), and NCCL calls
/// none of them to the end before the others.
pub const STRANGERS: usize = 2048;

/// The abstract name of a listener's Unix socket.
pub fn name_of(nonce: &Nonce) -> String {
    format!("pushgate/net/{}", file_of(nonce))
}

/// The name of a listener's socket in the folder of several containers.
pub fn file_of(nonce: &Nonce) -> String {
    format!("{:032x}", u128::from_be_bytes(*nonce))
}

/// The sockets of a listener; at least one.
pub struct Sockets {
    unix: Option<PeerListener>,
    /// The one in the folder where processes of other containers of this host come, if there is a folder.
    folder: Option<(PeerListener, SocketFile)>,
    tcp: Option<Door>,
    /// TCP connections are replaced when they break.
    replaced: bool,
}

impl Sockets {
    /// Listens wherever the settings let a connector come from.
    pub fn open(loaded: &Loaded, key: &Key) -> Result<Self> {
        let settings = &loaded.settings;
        let unix = matches!(settings.qp, QpKind::Auto | QpKind::Local);
        let folder = loaded.folder.as_ref().filter(|_| unix);
        let folder =
            folder.map(|folder| folder.listen(&file_of(&key.nonce())).map_err(failed())).transpose()?;
        let unix = unix.then(|| listen_unix(&key.nonce())).transpose()?;
        let door = || listen_tcp(loaded).and_then(|tcp| open_door(tcp, key, settings.tls));
        let tcp = match loaded.reaches_others().then(door) {
            None => None,
            Some(Ok(tcp)) => Some(tcp),
            // Ranks of this host come all the same.
            Some(Err(e)) if unix.is_some() => {
                static ONCE: Once = Once::new();
                ONCE.call_once(|| log::init(&format!("only ranks of this host can connect here: {e}")));
                None
            }
            Some(Err(e)) => return Err(e),
        };
        Ok(Sockets { unix, folder, tcp, replaced: settings.recovery().is_some() })
    }

    /// Whether it listens at the Unix socket, and where it listens for TCP.
    pub fn addresses(&self) -> Result<(bool, Option<Places>)> {
        let tcp = self.tcp.as_ref().map(Door::local_addrs).transpose().map_err(failed())?;
        Ok((self.unix.is_some(), tcp.and_then(|all| Places::of(&all))))
    }

    /// Descriptors that become readable when [`Sockets::accept`] has something to do.
    pub fn bells(&self) -> Vec<BorrowedFd<'_>> {
        let unix = self.unix.iter().chain(self.folder.iter().map(|(listener, _)| listener));
        unix.map(|unix| unix.as_fd()).chain(self.tcp.iter().map(AsFd::as_fd)).collect()
    }

    /// The next connection of a process that may connect, if there is one.
    pub fn accept(&self) -> Result<Option<Stream>> {
        for unix in self.unix.iter().chain(self.folder.iter().map(|(listener, _)| listener)) {
            if let Some(stream) = next(|| unix.accept().map(Stream::Unix))? {
                return Ok(Some(stream));
            }
        }
        let arrival = self.tcp.as_ref().and_then(Door::next);
        let stream = arrival.map(|arrival| Stream::tcp(arrival.stream, self.replaced)).transpose();
        stream.map_err(Failure::system("accepting a connection"))
    }
}

/// Lets connectors in who have the handle.
fn open_door(tcp: Vec<TcpListener>, key: &Key, tls: bool) -> Result<Door> {
    // What a connector says first comes in a frame, as over a Unix socket.
    let limits = Limits { places: STRANGERS, greeting: 0, time: GREETING };
    Door::on_all(tcp, key.terms(tls), limits).map_err(failed())
}

/// What `accept` of a socket gives, without strangers and connectors that have gone.
fn next(mut accept: impl FnMut() -> std::io::Result<Stream>) -> Result<Option<Stream>> {
    loop {
        match accept() {
            Ok(stream) if is_ours(&stream) => return Ok(Some(stream)),
            Ok(_) => limited!(warn, 0u32, "refused a process of another user at the listening socket"),
            Err(e) => match e.kind() {
                ErrorKind::WouldBlock => return Ok(None),
                // The connector had gone before we accepted it.
                ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted => {}
                _ => return Err(Failure::system("accepting a connection")(e)),
            },
        }
    }
}

/// Over Unix sockets, accepts only processes of our own user or root's, because they get our
/// memory.
pub fn is_ours(stream: &Stream) -> bool {
    match stream {
        Stream::Unix(s) => peer_cred(s).is_ok_and(|peer| is_ours_or_root(peer.uid)),
        Stream::Tcp(_) => true,
    }
}

fn failed<E: std::fmt::Display + 'static>() -> impl FnOnce(E) -> Failure {
    Failure::system("listening for connections")
}

fn listen_unix(nonce: &Nonce) -> Result<PeerListener> {
    let name = UnixAddr::from_abstract_name(name_of(nonce)).map_err(failed())?;
    let socket = PeerListener::from(UnixListener::bind_addr(&name).map_err(failed())?);
    socket.set_nonblocking(true).map_err(failed())?;
    Ok(socket)
}

/// Sockets at which other hosts reach this one, of one port.
pub fn listen_tcp(loaded: &Loaded) -> Result<Vec<TcpListener>> {
    let at = loaded.at.as_ref().map_err(|why| Failure::new(Code::System, why.as_str()))?;
    let mut all = at.sockets();
    all.truncate(Places::MOST);
    listen(&all).map_err(|e| {
        let (at, why) = (at.to_string(), e.to_string());
        Failure::new(Code::System, Message::Listening { at: &at, why: &why }.to_string())
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use std::net::{SocketAddr, TcpStream};
    use std::os::unix::net::UnixStream;

    use pushgate_door::{Dialer, DoorError, Refused, Secret, Terms, dial};
    use pushgate_driver_shim::closing::PeerStream;

    use pushgate_tests::lingering::{lingering, send_along};
    use pushgate_tests::wait_until;

    use super::*;
    use crate::testing::until;

    #[test]
    fn p8_over_tcp_only_a_connector_with_the_handle_comes_through() {
        let key = Key([5; 16]);
        for tls in [false, true] {
            // At any address: the key is no secret that everybody knows.
            let door = open_door(vec![TcpListener::bind("0.0.0.0:0").unwrap()], &key, tls).unwrap();
            let at = SocketAddr::from(([127, 0, 0, 1], door.local_addr().unwrap().port()));
            let sockets = Sockets { unix: None, folder: None, tcp: Some(door), replaced: true };
            let connects = |terms: Terms| {
                let until = Instant::now() + pushgate_tests::hang();
                std::thread::spawn(move || dial(at, &terms, &[], until))
            };
            for secret in [Key([6; 16]).secret(), Secret::new(&key.nonce()).unwrap()] {
                let stranger = connects(Terms { secret, ..key.terms(tls) });
                until(|| {
                    assert!(sockets.accept().unwrap().is_none(), "it came through");
                    stranger.is_finished().then_some(())
                });
                let e = stranger.join().unwrap().unwrap_err();
                assert!(matches!(e, DoorError::Refused(Refused::TurnedAway)), "{e}");
            }
            let connector = connects(key.terms(tls));
            let Stream::Tcp(stream) = until(|| sockets.accept().unwrap()) else { panic!("it came over TCP") };
            assert_eq!(stream.is_encrypted(), tls);
            connector.join().unwrap().unwrap();
        }
    }

    /// The close of the descriptor would take an hour on NCCL's thread.
    #[test]
    fn p7_a_listener_is_closed_at_once_with_strangers_that_nobody_accepted() {
        let nonce = Key([7; 16]).nonce();
        let at = UnixAddr::from_abstract_name(name_of(&nonce)).unwrap();
        for _ in 0..2 {
            let sockets = Sockets {
                unix: Some(listen_unix(&nonce).unwrap()),
                folder: None,
                tcp: None,
                replaced: false,
            };
            let stranger = PeerStream::from(UnixStream::connect_addr(&at).unwrap());
            let (fd, end) = lingering();
            assert!(send_along(&stranger, &fd, &[1]));
            drop(fd);
            let closes = std::thread::spawn(move || drop(sockets));
            wait_until("the listener is closed", || closes.is_finished());
            drop(end);
        }
    }

    #[test]
    fn p7_300_connectors_that_have_all_begun_before_any_of_them_goes_on_come_through() {
        let key = Key([5; 16]);
        let door = open_door(vec![TcpListener::bind("127.0.0.1:0").unwrap()], &key, false).unwrap();
        let at = door.local_addr().unwrap();
        let sockets = Sockets { unix: None, folder: None, tcp: Some(door), replaced: true };
        let mut dialers: Vec<_> = (0..300)
            .map(|_| {
                let mut dialer =
                    Dialer::new(TcpStream::connect(at).unwrap(), &key.terms(false), &[]).unwrap();
                assert!(!dialer.advance().unwrap(), "it is through already");
                assert!(sockets.accept().unwrap().is_none(), "it is through already");
                dialer
            })
            .collect();
        let mut come = 0;
        until(|| {
            dialers.retain_mut(|dialer| !dialer.advance().unwrap());
            while sockets.accept().unwrap().is_some() {
                come += 1;
            }
            (come == 300 && dialers.is_empty()).then_some(())
        });
    }
}
