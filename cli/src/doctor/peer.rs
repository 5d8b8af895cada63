//! `pushgate doctor --peer`: what this host and another one are to each other.

use std::io::{ErrorKind, Result as IoResult};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use pushgate::settings::{QpKind, Transport};
use pushgate::{Result, Settings};
use pushgate_doctor::{Finding, Report};
use pushgate_door::addresses::{REMEDY, routes};
use pushgate_door::redial::envelope::{Incoming, wait};
use pushgate_door::{DoorError, PASSAGE, Refused, dial};
use pushgate_driver_shim::log::Foreign;
use rustix::event::{PollFd, PollFlags};
use serde::Serialize;

use super::side::{
    CHUNK, GIVE, LONGEST, Offers, PING, PURPOSE, Port, SESSION, Side, TAKE, Talk, addresses, ask, mtu, same,
};

/// Round trips that are measured.
const PINGS: usize = 64;
/// How long bytes cross in each direction, and how many at most.
const TIME: Duration = Duration::from_secs(1);
const MOST: u64 = 2 << 30;
/// Chunks that are under way.
const WINDOW: u64 = 64;

/// What was measured, for `--json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Where the peer listens.
    pub address: String,
    pub release: Option<String>,
    pub round_trip_us: Option<f64>,
    pub least_round_trip_us: Option<f64>,
    pub mtu: Option<u32>,
    pub peer_mtu: Option<u32>,
    pub to_peer_gbs: Option<f64>,
    pub from_peer_gbs: Option<f64>,
}

/// All that was found about a peer.
#[derive(Serialize)]
pub struct About {
    #[serde(flatten)]
    pub report: Report,
    pub peer: Measured,
}

/// Looks at the path to a peer, at `HOST[:PORT]`.
pub fn look(place: &str, settings: &Settings) -> Result<About> {
    let verbs = settings.transports() == [Transport::Verbs];
    let mut peer = Measured { address: place.into(), ..Measured::default() };
    let findings = match reach(place, settings)? {
        Err(finding) => vec![named("peer-reach", finding)],
        Ok((talk, own, theirs, at)) => {
            peer.address = at.to_string();
            findings(&talk, &own, &theirs, verbs, &mut peer)
        }
    };
    let report = Report {
        queue_pair: match settings.qp {
            QpKind::Verbs => "verbs",
            QpKind::Tcp => "tcp",
            QpKind::Local => "local",
            _ => "auto",
        },
        looked_for: format!("Looked at the path between this host and {place}; both ends were asked."),
        ..Report::new(findings)
    };
    Ok(About { report, peer })
}

fn named(check: &'static str, finding: Finding) -> Finding {
    Finding { check, ..finding }
}

type Reached = (Talk, Side, Side, SocketAddr);

/// Goes through the peer's door, and hears what the peer says of itself. A finding says why that failed.
fn reach(place: &str, settings: &Settings) -> Result<std::result::Result<Reached, Finding>> {
    let failed = |reading: String, remedy: &str| Ok(Err(Finding::failed(place, reading, remedy)));
    let terms = settings.terms(PURPOSE)?;
    let all = match addresses(place) {
        Ok(all) if !all.is_empty() => all,
        Ok(_) => return failed("the name has no address".into(), "name a host as its resolver knows it"),
        Err(e) => return failed(format!("{e}"), "name HOST or HOST:PORT, [ADDRESS]:PORT for IPv6"),
    };
    if terms.secret.is_public() && all.iter().any(|at| !at.ip().to_canonical().is_loopback()) {
        return failed(
            "this host has no secret, without which no other host lets it in".into(),
            "set secret-file or PUSHGATE_SECRET to one secret on both hosts",
        );
    }
    let own = Side::of_this_host(None, &settings.host);
    let greeting = serde_json::to_vec(&own).expect("plain data");
    let mut tried = Vec::new();
    // A link-local address is tried at the link of each interface.
    for at in routes(&all) {
        match dial(at, &terms, &greeting, Instant::now() + PASSAGE) {
            Err(e) => tried.push(refused(at, &e)),
            Ok(stream) => {
                let talk = Talk { stream, until: Instant::now() + SESSION };
                return Ok(hear(&talk).map(|theirs| (talk, own, theirs, at)).map_err(|why| {
                    Finding::failed(place, why, "run one release of pushgate on both hosts")
                }));
            }
        }
    }
    Ok(Err(unreached(place, tried)))
}

/// What came of all addresses of a peer: the last one's finding, with the others beside it.
fn unreached(place: &str, mut tried: Vec<Finding>) -> Finding {
    let Some(mut last) = tried.pop() else {
        let reading = "no interface of this host leads to link-local addresses".to_owned();
        return Finding::failed(place, reading, "bring an interface of this host up");
    };
    for before in tried {
        last.reading += &format!("; tried before: {}", before.reading);
    }
    last
}

/// What the peer says of itself.
fn hear(talk: &Talk) -> std::result::Result<Side, String> {
    let mut incoming = Incoming::default();
    let until = Instant::now() + PASSAGE;
    loop {
        match incoming.open(&talk.stream, LONGEST)? {
            Some((_, body)) => {
                return serde_json::from_slice(&body)
                    .map_err(|e| format!("what it says of itself: {}", Foreign::word(e)));
            }
            None if wait(&mut [PollFd::new(&talk.stream, PollFlags::IN)], until) => {}
            None => {
                return Err("it lets this host in and says nothing; perhaps it serves another peer".into());
            }
        }
    }
}

/// Why a peer was not reached, and what to do.
fn refused(at: SocketAddr, e: &DoorError) -> Finding {
    let at = at.to_string();
    let remedy = match e {
        DoorError::Connect { error, .. } => match error.kind() {
            ErrorKind::ConnectionRefused => {
                format!("nobody listens there: run `pushgate doctor --listen {at}` on that host")
            }
            ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                format!(
                    "no answer at all: a firewall drops the packets, the host is down, or it is reached at another address (on it {REMEDY}); \
                     open this TCP port, and try `ping`"
                )
            }
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
                format!(
                    "no way leads there: look at `ip route get {}`",
                    at.rsplit_once(':').map_or(&*at, |a| a.0)
                )
            }
            ErrorKind::PermissionDenied => "a firewall of this host forbids it: open this TCP port".into(),
            _ => "look at the address, and at the networks of both hosts".into(),
        },
        DoorError::Refused(Refused::Late) => {
            "something listens there and does not answer: is it `pushgate doctor --listen`?".into()
        }
        DoorError::Refused(Refused::Foreign | Refused::Closed) => {
            format!(
                "another program listens there: run `pushgate doctor --listen` on that host at a free port, not {at}"
            )
        }
        DoorError::Refused(Refused::Proof | Refused::TurnedAway | Refused::Secret { .. }) => {
            "the secrets differ: set secret-file or PUSHGATE_SECRET to one secret on both hosts".into()
        }
        DoorError::Refused(Refused::Tls { .. }) => "set tls (PUSHGATE_TLS) alike on both hosts".into(),
        _ => "run one release of pushgate on both hosts".into(),
    };
    Finding::failed(&at, e.to_string(), remedy)
}

fn findings(talk: &Talk, own: &Side, theirs: &Side, verbs: bool, peer: &mut Measured) -> Vec<Finding> {
    let mut all = Vec::new();
    let mut push = |check, finding| all.push(named(check, finding));
    peer.release = Some(theirs.release.clone());
    peer.mtu = mtu(&talk.stream);
    peer.peer_mtu = theirs.mtu;
    let cut = |e: std::io::Error| {
        let remedy =
            "the path breaks, or is very slow: look at both hosts' interfaces and at what lies between";
        Finding::failed("", format!("the connection stood and then failed: {e}"), remedy)
    };
    push(
        "peer-reach",
        match round_trips(talk) {
            Ok((median, least)) => {
                (peer.round_trip_us, peer.least_round_trip_us) = (Some(median), Some(least));
                let tls = if talk.stream.is_encrypted() { ", encrypted" } else { "" };
                let address = &peer.address;
                Finding::passed(
                    "",
                    format!(
                        "{address} lets this host in{tls}; round trip {median:.0} us, at best {least:.0}"
                    ),
                )
            }
            Err(e) => cut(e),
        },
    );
    push("peer-address", offers(own.offers.as_ref(), theirs.offers.as_ref(), &peer.address));
    push("peer-version", versions(own, theirs));
    push("peer-mtu", mtus(peer.mtu, peer.peer_mtu));
    push("peer-rdma", rdma(&own.ports, &theirs.ports, verbs));
    push(
        "peer-speed",
        match speed(talk) {
            Ok((to, from)) => {
                (peer.to_peer_gbs, peer.from_peer_gbs) = (Some(to), Some(from));
                Finding::passed(
                    "",
                    format!("over one TCP connection {to:.2} GB/s to the peer, {from:.2} GB/s from it"),
                )
            }
            Err(e) => cut(e),
        },
    );
    all
}

/// The median and the least of some round trips, us.
fn round_trips(talk: &Talk) -> IoResult<(f64, f64)> {
    let mut all = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let begin = Instant::now();
        talk.put(&ask(PING, 0))?;
        talk.take(&mut [0; 9])?;
        all.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    all.sort_by(f64::total_cmp);
    Ok((all[PINGS / 2], all[0]))
}

/// GB/s to the peer and from it.
fn speed(talk: &Talk) -> IoResult<(f64, f64)> {
    let mut bytes = vec![0; CHUNK];
    let chunk = [&ask(TAKE, CHUNK)[..], &bytes].concat();
    let to = stream(|| talk.put(&chunk), || talk.take(&mut [0; 9]))?;
    let from = stream(|| talk.put(&ask(GIVE, CHUNK)), || talk.take(&mut bytes))?;
    Ok((to, from))
}

/// GB/s of chunks, some of them under way at each time, for a bounded time and of bounded number.
fn stream(mut begin: impl FnMut() -> IoResult<()>, mut end: impl FnMut() -> IoResult<()>) -> IoResult<f64> {
    let start = Instant::now();
    let (mut begun, mut ended) = (0, 0);
    while start.elapsed() < TIME && begun * (CHUNK as u64) < MOST {
        begin()?;
        begun += 1;
        if begun - ended >= WINDOW {
            end()?;
            ended += 1;
        }
    }
    while ended < begun {
        end()?;
        ended += 1;
    }
    Ok((begun * CHUNK as u64) as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// Whether ranks of both ends offer addresses that the other end may reach.
fn offers(own: Option<&Offers>, theirs: Option<&Offers>, reached: &str) -> Finding {
    let (Some(own), Some(theirs)) = (own, theirs) else {
        return Finding::not_applicable(
            "",
            "an end of an earlier release does not say what addresses it offers",
        );
    };
    let reading = format!("ranks offer {} here, {} at the peer", own.at, theirs.at);
    match own.only_here || theirs.only_here {
        false => Finding::passed("", reading),
        true => {
            let remedy = format!("{REMEDY}: {reached} leads to the peer");
            Finding::failed("", reading, remedy)
        }
    }
}

fn versions(own: &Side, theirs: &Side) -> Finding {
    match own.release == theirs.release {
        true => Finding::passed("", format!("pushgate {} at both ends", own.release)),
        false => Finding::warned(
            "",
            format!("pushgate {} here, {} at the peer", own.release, theirs.release),
            "run one release of pushgate on all hosts",
        ),
    }
}

fn mtus(here: Option<u32>, there: Option<u32>) -> Finding {
    match (here, there) {
        (Some(here), Some(there)) if here == there => {
            Finding::passed("", format!("path MTU {here} from both ends"))
        }
        (Some(here), Some(there)) => Finding::warned(
            "",
            format!("path MTU {here} from here, {there} from the peer"),
            "give the interfaces of both hosts one MTU (ip link set dev INTERFACE mtu N), with frames as large at the switches between them",
        ),
        _ => Finding::not_applicable("", "a kernel does not tell the path MTU"),
    }
}

/// Whether RDMA devices of the two ends can reach each other, as far as their addresses say.
fn rdma(own: &[Port], theirs: &[Port], verbs: bool) -> Finding {
    let names = |ports: &[Port]| {
        let kind = |port: &Port| match (port.iwarp, port.ethernet) {
            (true, _) => "iWARP",
            (false, true) => "RoCE",
            (false, false) => "InfiniBand",
        };
        let all: Vec<_> = ports.iter().map(|port| format!("{} ({})", port.name, kind(port))).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    };
    let both = format!("RDMA devices with active ports: here {}, at the peer {}", names(own), names(theirs));
    let without = |reading: String, remedy: &str| match verbs {
        true => Finding::failed("", reading, remedy),
        false => Finding::warned("", format!("{reading}; queue pairs are tcp"), remedy),
    };
    let set_up =
        "`pushgate doctor --qp verbs` on the host without them says what is missing; or use qp = tcp";
    match (own.is_empty(), theirs.is_empty()) {
        (true, true) if !verbs => {
            return Finding::not_applicable("", "neither end has an RDMA device with an active port");
        }
        (true, _) | (_, true) => return without(both, set_up),
        _ => {}
    }
    if own.iter().any(|p| !p.ethernet) && theirs.iter().any(|p| !p.ethernet) {
        return Finding::passed("", format!("{both}; both have InfiniBand"));
    }
    if !own.iter().any(|p| p.ethernet) || !theirs.iter().any(|p| p.ethernet) {
        return without(
            format!("{both}; one end has InfiniBand alone, the other Ethernet alone"),
            "use qp = tcp",
        );
    }
    let (ours, their) = (own.iter().any(|p| p.iwarp), theirs.iter().any(|p| p.iwarp));
    let roce = |ports: &[Port]| ports.iter().any(|p| p.ethernet && !p.iwarp);
    if (ours || their) && !(roce(own) && roce(theirs)) {
        return match ours && their {
            true => Finding::passed("", format!("{both}; both have iWARP")),
            false => without(
                format!("{both}; one end has iWARP, the other does not"),
                "use devices of one kind at both ends, or qp = tcp",
            ),
        };
    }
    let v2 = |ports: &[Port]| -> Vec<_> {
        let of = |port: &Port| -> Vec<_> {
            port.gids.iter().filter(|gid| gid.roce_v2).map(|gid| (port.name.clone(), gid.clone())).collect()
        };
        ports.iter().filter(|port| port.ethernet && !port.iwarp).flat_map(of).collect()
    };
    let (here, there) = (v2(own), v2(theirs));
    let pair = here.iter().flat_map(|a| there.iter().map(move |b| (a, b))).find(|((_, a), (_, b))| {
        a.prefix.is_some() && a.prefix == b.prefix && same(a.ip, b.ip, a.prefix.unwrap_or(0))
    });
    match pair {
        Some(((device, a), (other, b))) => Finding::passed(
            "",
            format!(
                "RoCE v2 within one network: {device} {}/{} here, {other} {} at the peer",
                a.ip,
                a.prefix.unwrap_or(0),
                b.ip
            ),
        ),
        None if here.is_empty() || there.is_empty() => Finding::warned(
            "",
            format!(
                "{both}; {} no address for RoCE v2",
                if here.is_empty() { "here there is" } else { "the peer has" }
            ),
            "give the interface below the RDMA device an IP address (ip address add ADDRESS/LENGTH dev INTERFACE)",
        ),
        None => Finding::warned(
            "",
            format!("{both}; no two of their RoCE v2 addresses are of one network"),
            "give both interfaces addresses of one network, or see that routers carry UDP port 4791 between the two",
        ),
    }
}

#[cfg(test)]
mod tests {
    use pushgate_doctor::Status;

    use super::super::side::Gid;
    use super::*;

    fn port(ethernet: bool, gids: &[(&str, bool, u8)]) -> Vec<Port> {
        let gid = |(ip, roce_v2, prefix): &(&str, bool, u8)| Gid {
            ip: ip.parse().unwrap(),
            roce_v2: *roce_v2,
            prefix: Some(*prefix),
        };
        vec![Port { name: "rxe0/1".into(), ethernet, iwarp: false, gids: gids.iter().map(gid).collect() }]
    }

    #[test]
    fn rdma_devices_of_both_ends_are_compared() {
        let here = port(true, &[("10.0.0.1", true, 24)]);
        let near = port(true, &[("2001:db8::1", true, 64), ("10.0.0.2", true, 24)]);
        let far = port(true, &[("10.0.1.2", true, 24)]);
        let old = port(true, &[("10.0.0.2", false, 24)]);
        let ib = port(false, &[]);
        let iwarp = vec![Port { name: "siw0/1".into(), ethernet: true, iwarp: true, gids: Vec::new() }];
        let both = [here.clone(), iwarp.clone()].concat();
        for (theirs, verbs, status, says) in [
            (
                &near,
                false,
                Status::Passed,
                "RoCE v2 within one network: rxe0/1 10.0.0.1/24 here, rxe0/1 10.0.0.2",
            ),
            (&far, false, Status::Warned, "no two of their RoCE v2 addresses are of one network"),
            (&old, false, Status::Warned, "the peer has no address for RoCE v2"),
            (
                &iwarp,
                false,
                Status::Warned,
                "here rxe0/1 (RoCE), at the peer siw0/1 (iWARP); one end has iWARP",
            ),
            (&iwarp, true, Status::Failed, "one end has iWARP, the other does not"),
            (&ib, false, Status::Warned, "one end has InfiniBand alone"),
            (&ib, true, Status::Failed, "one end has InfiniBand alone"),
            (&Vec::new(), false, Status::Warned, "here rxe0/1 (RoCE), at the peer none; queue pairs are tcp"),
            (&Vec::new(), true, Status::Failed, "here rxe0/1 (RoCE), at the peer none"),
        ] {
            let finding = rdma(&here, theirs, verbs);
            assert!(finding.status == status && finding.reading.contains(says), "{finding:?}");
            assert_eq!(finding.remedy.is_some(), status != Status::Passed);
        }
        assert_eq!(rdma(&[], &[], false).status, Status::NotApplicable);
        assert_eq!(rdma(&[], &[], true).status, Status::Failed);
        assert_eq!(rdma(&ib, &ib, true).status, Status::Passed);
        assert!(rdma(&iwarp, &iwarp, true).reading.ends_with("both have iWARP"));
        assert_eq!(rdma(&both, &iwarp, true).status, Status::Passed);
        assert!(rdma(&both, &near, true).reading.starts_with("RoCE v2 within one network"));
    }

    #[test]
    fn ends_that_differ_in_release_or_mtu_are_warned_of() {
        let side = |release: &str| Side { release: release.into(), ..Side::default() };
        assert_eq!(versions(&side("1"), &side("1")).status, Status::Passed);
        assert_eq!(versions(&side("1"), &side("2")).status, Status::Warned);
        assert_eq!(mtus(Some(1500), Some(1500)).status, Status::Passed);
        assert_eq!(mtus(Some(9000), Some(1500)).status, Status::Warned);
        assert_eq!(mtus(None, Some(1500)).status, Status::NotApplicable);
    }

    #[test]
    fn a_peer_that_no_address_reaches_is_told_with_what_came_of_each() {
        let refused = |port: u16, kind: ErrorKind| {
            let at = SocketAddr::from(([10, 1, 2, 3], port));
            super::refused(at, &DoorError::Connect { at, error: kind.into() })
        };
        let tried = vec![refused(1, ErrorKind::TimedOut), refused(2, ErrorKind::ConnectionRefused)];
        let finding = unreached("node7", tried);
        let parts: Vec<_> = finding.reading.split("; tried before: ").collect();
        assert!(parts[0].contains("10.1.2.3:2") && parts[1].contains("10.1.2.3:1"), "{}", finding.reading);
        assert!(finding.remedy.unwrap().contains("--listen 10.1.2.3:2"));
        let silent = refused(1, ErrorKind::TimedOut).remedy.unwrap();
        assert!(silent.contains("PUSHGATE_HOST"), "{silent}");
        assert!(unreached("node7", Vec::new()).reading.contains("link-local"));
    }

    #[test]
    fn why_a_peer_was_not_reached_has_a_remedy_of_its_own() {
        let at: SocketAddr = "192.0.2.1:7118".parse().unwrap();
        let connect = |kind: ErrorKind| DoorError::Connect { at, error: kind.into() };
        for (e, says) in [
            (connect(ErrorKind::ConnectionRefused), "run `pushgate doctor --listen 192.0.2.1:7118`"),
            (connect(ErrorKind::TimedOut), "a firewall drops the packets"),
            (connect(ErrorKind::HostUnreachable), "`ip route get 192.0.2.1`"),
            (Refused::Late.into(), "does not answer"),
            (Refused::Foreign.into(), "another program listens there"),
            (Refused::TurnedAway.into(), "one secret on both hosts"),
            (Refused::Tls { here: true }.into(), "set tls"),
            (Refused::Version(9).into(), "one release"),
        ] {
            let finding = refused(at, &e);
            assert!(finding.remedy.as_ref().is_some_and(|remedy| remedy.contains(says)), "{finding:?}");
        }
    }
}
