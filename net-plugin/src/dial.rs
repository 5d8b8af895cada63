//! How a connector reaches a listener: over which transport, decided for each connection, and the dialing.
//!
//! With `qp = auto` a peer is taken for one of this host if both run under one kernel and a Unix socket of its listener
//! can be dialed from here: abstract names belong to a network namespace, and the kernel tells the peer's user. So two
//! containers of a host that share neither a network namespace nor a folder are taken for two hosts, which the log says.

use std::io::ErrorKind;
use std::time::Instant;

use pushgate::settings::{QpKind, Transport};
use pushgate_door::addresses::{Message, Places};
use pushgate_driver_shim::closing::PeerStream;
use pushgate_service::folder::Folder;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::error::{Code, Failure, Result};
use crate::handle::{Handle, Nonce};
use crate::identity::Identity;
use crate::listening::{file_of, is_ours, name_of};
use crate::loaded::Loaded;
use crate::stream::Stream;

/// What a connector knows of itself.
#[derive(Clone)]
pub struct Here<'a> {
    pub qp: QpKind,
    pub identity: &'a Identity,
    /// Why `verbs` is not possible from here, if it is not.
    pub no_rdma: Option<&'a str>,
    /// Why `tcp` is not possible from here, if it is not.
    pub no_tcp: Option<String>,
}

impl<'a> Here<'a> {
    pub fn of(loaded: &'a Loaded) -> Self {
        let Loaded { settings, identity, no_rdma, .. } = loaded;
        Here { qp: settings.qp, identity, no_rdma: no_rdma.as_deref(), no_tcp: loaded.no_tcp() }
    }
}

/// What to dial.
#[derive(Debug, PartialEq, Eq)]
pub enum Dial {
    /// The Unix socket, for a `local` queue pair.
    Unix,
    /// These addresses, for a queue pair over that transport: `verbs` or `tcp`.
    Tcp(Places, Transport),
}

/// Chooses what to dial, and says why. `not_local`: why the Unix socket led nowhere, once it was dialed. The failure names
/// the peer, what is missing and what to do about it.
pub fn choose(here: Here<'_>, handle: &Handle, not_local: Option<&str>) -> Result<(Dial, String)> {
    let peer = &handle.listener;
    let not_local = match not_local {
        _ if !matches!(here.qp, QpKind::Auto | QpKind::Local) => format!("qp = {} here", here.qp),
        _ if !handle.unix => "qp is neither auto nor local there".into(),
        _ if !here.identity.shares_kernel_with(peer) => format!("{} is another host", peer.host()),
        Some(why) => why.into(),
        None => return Ok((Dial::Unix, "it is on this host".into())),
    };
    let unreachable = |code, why: String| Err(Failure::new(code, format!("{peer} can't be reached: {why}")));
    if here.qp == QpKind::Local {
        let remedy = "with qp = local here nothing else is tried; unset PUSHGATE_QP on all ranks";
        return unreachable(Code::Usage, format!("{not_local}; {remedy}"));
    }
    let (own, theirs) = (here.identity.host(), peer.host());
    let no_rdma = match (here.no_rdma, handle.between.verbs) {
        (None, true) => None,
        (Some(why), _) => Some(format!("host {own} has no RDMA device for verbs ({why})")),
        (_, false) => Some(format!("host {theirs} offers no verbs, as the log of a rank there says")),
    };
    match (handle.tcp, no_rdma) {
        (Some(to), None) => Ok((Dial::Tcp(to, Transport::Verbs), not_local)),
        (Some(to), Some(why)) if here.no_tcp.is_none() && handle.between.tcp => {
            Ok((Dial::Tcp(to, Transport::Tcp), format!("{not_local}, and {why}")))
        }
        (_, why) => {
            let why = why.unwrap_or_else(|| {
                format!("host {theirs} listens at no address, as the log of a rank there says")
            });
            let no_tcp = match here.no_tcp {
                Some(why) => format!("host {own} takes no tcp ({why})"),
                None => format!("host {theirs} offers no tcp, as the log of a rank there says"),
            };
            let why = format!(
                "local queue pairs do not go there ({not_local}), {why}, and {no_tcp}; set qp alike on all ranks: \
                 PUSHGATE_QP=auto takes tcp where there is no RDMA device, verbs needs one on each host (`pushgate doctor --qp \
                 verbs` says what is missing)"
            );
            unreachable(Code::System, Message::NoWay { why: &why }.to_string())
        }
    }
}

/// What came of dialing a Unix socket.
pub enum Dialed {
    Connected(Stream),
    /// The listener's backlog is full; try again.
    Later,
    /// Why this way leads nowhere.
    Nowhere(String),
}

/// Dials the Unix socket of a listener: the abstract name, then the one in the folder of several containers, if there is a folder.
pub fn dial_unix(nonce: &Nonce, folder: Option<&Folder>) -> Result<Dialed> {
    let name = name_of(nonce);
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(Failure::system("a socket's name"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Failure::system("socket"))?;
    let stream = match (rustix::net::connect(&socket, &address), folder) {
        (Ok(()), _) => PeerStream::from(socket),
        (Err(Errno::AGAIN | Errno::INTR), _) => return Ok(Dialed::Later),
        (Err(Errno::CONNREFUSED), Some(folder)) => match folder.dial(&file_of(nonce), Instant::now()) {
            Ok(stream) => stream,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(Dialed::Later);
            }
            Err(e) => {
                let why = format!(
                    "{name}: in another network namespace, and its listener has no socket in {} ({e}), or is closed",
                    folder.path().display()
                );
                return Ok(Dialed::Nowhere(why));
            }
        },
        (Err(e), _) => {
            let why = format!("{name}: {e}; its listener is closed, or in another network namespace");
            return Ok(Dialed::Nowhere(why));
        }
    };
    let stream = Stream::Unix(stream);
    Ok(match is_ours(&stream) {
        true => Dialed::Connected(stream),
        false => Dialed::Nowhere("its listener runs as another user".into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::{Between, Key};
    use crate::listening::Sockets;
    use crate::runtime::Runtime;

    fn to() -> Places {
        "10.1.2.3:4567".parse::<std::net::SocketAddr>().unwrap().into()
    }

    fn handle(unix: bool, verbs: bool, tcp: bool, listener: Identity) -> Handle {
        let between = Between { verbs, tcp };
        Handle { key: Key([1; 16]), unix, tcp: (verbs || tcp).then(to), between, listener }
    }

    /// What is dialed first, and what if that is the Unix socket and leads nowhere.
    fn both(qp: QpKind, no_rdma: Option<&str>, handle: &Handle) -> [Result<Dial, String>; 2] {
        let identity = Identity::here();
        let no_tcp = (!matches!(qp, QpKind::Auto | QpKind::Tcp)).then(|| format!("qp = {qp} here"));
        [None, Some("the socket's name: refused")].map(|not_local| {
            let chosen =
                choose(Here { qp, identity: &identity, no_rdma, no_tcp: no_tcp.clone() }, handle, not_local);
            chosen.map(|(dial, _)| dial).map_err(|e| e.text)
        })
    }

    #[test]
    fn a_rank_is_reached_by_local_on_this_host_then_by_verbs_then_by_tcp() {
        let same = Identity { pid: 1, ..Identity::here() };
        let other = Identity { boot_id: [7; 16], ..same };
        let auto = |no_rdma, handle: &Handle| both(QpKind::Auto, no_rdma, handle).map(Result::unwrap);
        let over = |transport| Dial::Tcp(to(), transport);
        let (verbs, tcp) = (|| over(Transport::Verbs), || over(Transport::Tcp));
        assert_eq!(auto(None, &handle(true, true, true, same)), [Dial::Unix, verbs()]);
        assert_eq!(auto(None, &handle(true, true, true, other)), [verbs(), verbs()]);
        assert_eq!(auto(None, &handle(false, true, false, same)), [verbs(), verbs()]);
        assert_eq!(auto(Some("no device"), &handle(true, true, true, same)), [Dial::Unix, tcp()]);
        assert_eq!(auto(None, &handle(true, false, true, other)), [tcp(), tcp()]);
        assert_eq!(both(QpKind::Auto, None, &handle(true, false, false, same))[0], Ok(Dial::Unix));
        // A setting decides over the place.
        let asked = |qp, no_rdma| both(qp, no_rdma, &handle(true, true, true, same)).map(Result::unwrap);
        assert_eq!(asked(QpKind::Verbs, None), [verbs(), verbs()]);
        assert_eq!(asked(QpKind::Tcp, Some("qp = tcp here")), [tcp(), tcp()]);
        assert_eq!(both(QpKind::Local, None, &handle(true, true, true, same))[0], Ok(Dial::Unix));
    }

    #[test]
    fn a_rank_that_can_not_be_reached_is_refused_with_host_device_and_remedy() {
        let here = Identity::here();
        let mut name = [0; crate::identity::NAME];
        name[..5].copy_from_slice(b"node7");
        let other = Identity { boot_id: [7; 16], pid: 12, name };
        let refused = |qp, no_rdma, handle: &Handle, says: &[&str]| {
            let [first, second] = both(qp, no_rdma, handle);
            let why = first.err().or(second.err()).expect("it is refused");
            for says in says {
                assert!(why.contains(says), "{why:?} says nothing of {says:?}");
            }
        };
        let missing = Some("this host has none");
        let process = "process 12 of host node7 can't be reached";
        let lacks = format!("host {} has no RDMA device for verbs (this host has none)", here.host());
        let remedy = "PUSHGATE_QP=auto";
        refused(
            QpKind::Auto,
            missing,
            &handle(true, true, false, other),
            &["node7 offers no tcp", "PUSHGATE_HOST"],
        );
        refused(
            QpKind::Auto,
            missing,
            &handle(true, true, false, other),
            &[process, "node7 is another host", &lacks, remedy],
        );
        refused(
            QpKind::Auto,
            None,
            &handle(true, false, false, other),
            &[process, "host node7 offers no verbs", remedy],
        );
        refused(
            QpKind::Verbs,
            None,
            &handle(true, false, true, other),
            &["qp = verbs here", "offers no verbs"],
        );
        refused(
            QpKind::Local,
            missing,
            &handle(true, true, true, other),
            &["another host", "unset PUSHGATE_QP on all"],
        );
        refused(QpKind::Local, None, &handle(false, true, false, here), &["neither auto nor local there"]);
        let beside = Identity { boot_id: here.boot_id, ..other };
        refused(QpKind::Local, None, &handle(true, true, true, beside), &["the socket's name: refused"]);
    }

    #[test]
    fn a_rank_without_an_address_says_at_the_failure_why_it_takes_no_tcp() {
        let identity = Identity { pid: 1, ..Identity::here() };
        let other = Identity { boot_id: [7; 16], ..identity };
        let no_tcp = Some("no interface has an address: eth0 is down".to_owned());
        let here =
            Here { qp: QpKind::Auto, identity: &identity, no_rdma: Some("this host has none"), no_tcp };
        let why = choose(here, &handle(true, false, true, other), None).unwrap_err().text;
        assert!(why.contains("takes no tcp (no interface has an address: eth0 is down)"), "{why}");
        assert!(why.contains("PUSHGATE_HOST"), "{why}");
    }

    #[test]
    fn a_socket_that_is_closed_leads_nowhere() {
        let key = Key([0x5a; 16]);
        let nonce = key.nonce();
        let nowhere = || match dial_unix(&nonce, None).unwrap() {
            Dialed::Nowhere(why) => why,
            _ => panic!("nobody listens there"),
        };
        assert!(nowhere().contains("in another network namespace"));
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let sockets = Sockets::open(&runtime.loaded, &key).unwrap();
        assert_eq!(sockets.addresses().unwrap(), (true, None));
        assert!(matches!(dial_unix(&nonce, None).unwrap(), Dialed::Connected(_)));
        assert!(matches!(sockets.accept().unwrap(), Some(Stream::Unix(_))));
        assert!(sockets.accept().unwrap().is_none());
        drop(sockets);
        nowhere();
    }
}
