//! What reaches whom: ranks that have met at a rendezvous agree on the transport of each pair's queue pairs.
//!
//! Each rank tells each other rank what its queue pairs may be. Two ranks whose queue pairs may be `local` try whether they share
//! a host: the lower rank listens at a Unix socket of an abstract name, and the higher rank connects to that name. Only a process
//! of the same host and network namespace reaches the name, and only the rank itself knows the proof that it was told over TCP.
//! Where a folder is set, the lower rank also listens there, for ranks of other containers of its host. Then the Unix socket takes
//! the place of the TCP connection, so that descriptors can cross.
//!
//! This can't deadlock: no rank waits for another one's answer before it has said everything that the other waits for.

use std::io::{self, Read as _};
use std::time::Instant;

use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_service::folder::{BESIDE, Folder};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{ANSWER, Incoming, Joined, MAX_ANSWER, Me, VERSIONS, envelope, mismatch, send_all};
use super::{PollFd, PollFlags, Stream};
use crate::error::{Error, Result};
use crate::mesh::Link;
use crate::mesh::tcp::Again;
use crate::mesh::unix::{self, At};
use crate::settings::Transport;

/// What the ports of RDMA devices are joined by: only ports of one kind reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Fabric {
    Ethernet,
    Infiniband,
}

/// What the queue pairs of this rank may be.
#[derive(Clone, Debug)]
pub(crate) struct May {
    pub(crate) local: bool,
    /// Where ranks of other containers of this host meet this one.
    pub(crate) folder: Option<Folder>,
    /// How its RDMA devices reach others; or why queue pairs can't be `verbs`.
    pub(crate) verbs: std::result::Result<Fabric, String>,
    pub(crate) tcp: bool,
}

/// How the names begin of the sockets at which ranks of one host meet.
const NAMES: &str = "pushgate/";

/// What a rank tells another one.
#[derive(Serialize, Deserialize)]
struct Reach {
    /// Where the rank listens for ranks of its host, if queue pairs may be `local`.
    local: Option<Place>,
    verbs: Option<Fabric>,
    tcp: bool,
    /// Names one start of one kernel; releases that do not say it meet ranks of their own network namespace alone.
    #[serde(default)]
    boot_id: Option<String>,
}

/// A Unix socket's abstract name, and what is to be said there.
#[derive(Clone, Serialize, Deserialize)]
struct Place {
    name: String,
    proof: String,
}

impl Place {
    /// A name and a proof that nobody guesses.
    fn new() -> io::Result<Place> {
        Ok(Place { name: format!("{NAMES}{}", secret()?), proof: secret()? })
    }

    /// The names of its sockets.
    fn names<'a>(&self, folder: Option<&'a Folder>) -> Vec<At<'a>> {
        let of_folder = folder.map(|folder| At::In(folder, self.name[NAMES.len()..].into()));
        [At::Abstract(self.name.clone())].into_iter().chain(of_folder).collect()
    }

    /// Whether a rank can have made this: this rank dials no other program's socket because a peer says so.
    fn is_a_ranks(&self) -> bool {
        let digits = |s: &str| s.len() == 32 && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        self.name.strip_prefix(NAMES).is_some_and(digits) && digits(&self.proof)
    }
}

/// From the higher rank of two whose queue pairs may be `local`.
#[derive(Serialize, Deserialize)]
struct Reached {
    here: bool,
}

/// The connections to all ranks with the transport of each pair, and what replaces TCP connections that break.
pub(in crate::mesh) type Agreed = (Vec<Option<Link>>, Option<Again>);

impl Me<'_> {
    /// Agrees with each other rank on the transport of their queue pairs.
    pub(in crate::mesh) fn agree(&self, (streams, again): Joined, may: &May) -> Result<Agreed> {
        let others = || streams.iter().zip(0..).filter_map(|(stream, rank)| Some((rank, stream.as_ref()?)));
        let door = self.open(may);
        let place = door.as_ref().map(|(_, place)| place.clone());
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        let own = Reach { local: place, verbs: may.verbs.as_ref().ok().copied(), tcp: may.tcp, boot_id };
        for (rank, stream) in others() {
            self.tell(stream, rank, &own)?;
        }
        let mut theirs: Vec<Option<Reach>> = streams.iter().map(|_| None).collect();
        for (rank, stream) in others() {
            let reach: Reach = self.hear(stream, rank)?;
            if let Some(place) = reach.local.as_ref().filter(|place| !place.is_a_ranks()) {
                let reason =
                    format!("its Unix socket has the name {}, which no rank has", Foreign::word(&place.name));
                return Err(mismatch(rank, reason));
            }
            theirs[rank as usize] = Some(reach);
        }
        let mut links: Vec<Option<Link>> = streams.iter().map(|_| None).collect();
        if let Some((here, place)) = &door {
            // The lower ranks listen since before they said so.
            let mut dialled = Vec::new();
            for (rank, stream) in others().filter(|(rank, _)| *rank < self.rank) {
                let Some(at) = theirs[rank as usize].as_ref().and_then(|r| r.local.as_ref()) else {
                    continue;
                };
                let me = self.at_the_place(here);
                let mut found = Err(unix::Dial::Later(io::ErrorKind::NotFound.into()));
                for name in at.names(may.folder.as_ref()) {
                    found = me.dial(rank, &name, at.proof.as_bytes());
                    if let Err(unix::Dial::Wrong(Error::Interrupted)) = found {
                        return Err(Error::Interrupted);
                    }
                    if found.is_ok() {
                        break;
                    }
                }
                self.tell(stream, rank, &Reached { here: found.is_ok() })?;
                match found {
                    Ok(found) => dialled.push((rank, found)),
                    Err(e) => tracing::debug!(rank = self.rank, "rank {rank} is not on this host: {e}"),
                }
            }
            let mut come = Vec::new();
            for (rank, stream) in others().filter(|(rank, _)| *rank > self.rank) {
                if theirs[rank as usize].as_ref().is_some_and(|r| r.local.is_some())
                    && self.hear::<Reached>(stream, rank)?.here
                {
                    come.push(rank);
                }
            }
            let me = unix::Me { proof: place.proof.as_bytes(), ..self.at_the_place(here) };
            me.accept(&here.listeners, &come, &mut links)?;
            for (rank, found) in dialled {
                let link = me.answered(found, rank)?.map_err(|e| self.gone(rank, &e.to_string()))?;
                links[rank as usize] = Some(link);
            }
        }
        for ((rank, stream), link) in streams.into_iter().enumerate().zip(&mut links) {
            let (Some(stream), Some(reach)) = (stream, &theirs[rank]) else { continue };
            let (transport, why) = match link {
                Some(_) => (Transport::Local, "it is on this host".to_owned()),
                None => self.choose(rank as u32, may, reach)?,
            };
            if transport == Transport::Tcp && beside(&own, reach) {
                limited!(
                    warn,
                    0u32,
                    rank = self.rank,
                    "rank {rank} runs on this host too, and queue pairs with it are tcp, not local: {BESIDE}"
                );
            }
            tracing::info!(rank = self.rank, "queue pairs with rank {rank} are {transport}: {why}");
            let link = link.get_or_insert_with(|| stream.into());
            link.transport = Some(transport);
        }
        let all_here = links.iter().flatten().all(|link| link.transport == Some(Transport::Local));
        Ok((links, again.filter(|_| !all_here)))
    }

    /// Opens the socket at which ranks of this host arrive; without one no rank counts as on this host.
    fn open(&self, may: &May) -> Option<(unix::Here, Place)> {
        let open = || -> io::Result<_> {
            let place = Place::new()?;
            Ok((unix::Here::open(&place.names(may.folder.as_ref()), self.rank)?, place))
        };
        let failed =
            |e| tracing::warn!(rank = self.rank, "ranks of this host can't be found by a Unix socket: {e}");
        may.local.then(|| open().map_err(failed).ok()).flatten()
    }

    fn at_the_place<'a>(&'a self, here: &'a unix::Here) -> unix::Me<'a> {
        unix::Me {
            job: self.job,
            rank: self.rank,
            size: self.size,
            timeout: self.timeout,
            deadline: self.deadline + ANSWER,
            process: here.process.as_ref(),
            proof: &[],
        }
    }

    /// The transport of queue pairs with a rank that is not found on this host, and why it is that one.
    fn choose(&self, rank: u32, may: &May, reach: &Reach) -> Result<(Transport, String)> {
        let why = match (&may.verbs, reach.verbs) {
            (Ok(own), Some(its)) if *own == its => {
                return Ok((Transport::Verbs, "both ends have an RDMA device".into()));
            }
            (Ok(own), Some(its)) => format!("RDMA devices are {own:?} here and {its:?} there"),
            (Err(why), _) => why.clone(),
            (_, None) => format!("rank {rank} has no RDMA device for it"),
        };
        match may.tcp && reach.tcp {
            true => Ok((Transport::Tcp, why)),
            false => {
                let local = match may.local && reach.local.is_some() {
                    true => "it is not on this host",
                    false => "qp, window, rings or proxy of an end allow no local one",
                };
                let tcp = "qp, window, rings or proxy of an end allow no tcp";
                let reason = format!(
                    "no transport of queue pairs is left: {local}; no verbs: {why}; {tcp}. Give all ranks the same `qp`, \
                     with window = memory and proxy = thread where ranks are on several hosts"
                );
                Err(mismatch(rank, reason))
            }
        }
    }

    fn tell(&self, stream: &Stream, rank: u32, what: &impl Serialize) -> Result<()> {
        let sent = send_all(stream, &envelope(VERSIONS.oldest(), what), Instant::now() + ANSWER);
        sent.map_err(|e| self.gone(rank, &e.to_string()))
    }

    fn hear<T: DeserializeOwned>(&self, stream: &Stream, rank: u32) -> Result<T> {
        let mut incoming = Incoming::default();
        // A rank that was the last to join still has some of its own time.
        let until = self.deadline + ANSWER;
        let (_, body) = loop {
            match incoming.open(stream, MAX_ANSWER) {
                Ok(Some(all)) => break all,
                Ok(None) if interrupt::wait(&mut [PollFd::new(stream, PollFlags::IN)], until)? => {}
                Ok(None) => {
                    let what = format!("waiting for rank {rank} to say what its queue pairs may be");
                    return Err(Error::TimedOut { what, after: self.timeout });
                }
                Err(why) => return Err(self.gone(rank, &why)),
            }
        };
        let no_reach = |e: serde_json::Error| {
            mismatch(rank, format!("what it says of its queue pairs: {}", Foreign::word(e)))
        };
        serde_json::from_slice(&body).map_err(no_reach)
    }

    fn gone(&self, rank: u32, why: &str) -> Error {
        limited!(warn, rank, rank = self.rank, "rank {rank} left before all were there: {why}");
        Error::PeerLost { rank }
    }
}

/// Whether this rank and a rank that it did not find by a socket run under one kernel all the same.
fn beside(own: &Reach, its: &Reach) -> bool {
    let both = own.local.is_some() && its.local.is_some();
    both && own.boot_id.is_some() && own.boot_id == its.boot_id
}

/// 128 random bits, as hexadecimal digits.
pub(super) fn secret() -> io::Result<String> {
    let mut random = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::{slice, thread};

    use pushgate_driver_shim::versions::ABI;
    use pushgate_tests::fuzz::{depth, fuzz, kind};
    use pushgate_tests::hang;

    use super::super::tests::{join, me, rank0};
    use super::super::{Answer, HEADER, Hello, opened};
    use super::*;
    use crate::mesh::Mesh;

    fn may(local: bool, verbs: Option<Fabric>, tcp: bool) -> May {
        May { local, folder: None, verbs: verbs.ok_or_else(|| "none here".into()), tcp }
    }

    /// Joins ranks that may do these things, and has each pair agree.
    fn agreed(all: Vec<May>) -> Vec<Result<Agreed>> {
        let size = all.len() as u32;
        let (place, first) = rank0("127.0.0.1:0", size);
        let others = (1..size).map(|rank| join(&place, rank, size));
        let joined: Vec<_> = [first].into_iter().chain(others).collect();
        let one = |(joined, (rank, may)): (thread::JoinHandle<Result<Joined>>, (u32, May))| {
            thread::spawn(move || me(rank, size).agree(joined.join().unwrap()?, &may))
        };
        let all: Vec<_> = joined.into_iter().zip((0..size).zip(all)).map(one).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn each_pair_takes_the_first_transport_by_which_the_two_reach_each_other() {
        use Fabric::{Ethernet, Infiniband};
        use Transport::{Local, Tcp, Verbs};
        let all = agreed(vec![
            may(true, Some(Ethernet), true),
            may(true, Some(Ethernet), true),
            may(false, Some(Ethernet), true),
            may(false, Some(Infiniband), true),
            may(true, None, true),
        ]);
        let meshes: Vec<Mesh> = all
            .into_iter()
            .zip(0..)
            .map(|(agreed, rank)| {
                let (links, again) = agreed.unwrap();
                Mesh::new(rank, links, hang(), again).unwrap()
            })
            .collect();
        let expected = [
            ((0, 1), Local),
            ((0, 2), Verbs),
            ((0, 3), Tcp),
            ((0, 4), Local),
            ((1, 2), Verbs),
            ((1, 3), Tcp),
            ((1, 4), Local),
            ((2, 3), Tcp),
            ((2, 4), Tcp),
            ((3, 4), Tcp),
        ];
        for ((a, b), transport) in expected {
            let both = [meshes[a].transport(b as u32), meshes[b].transport(a as u32)];
            assert_eq!(both, [Some(transport); 2], "{a} and {b}");
            // Only ranks of one host can be handed a descriptor.
            let sent = meshes[a].send(b as u32, 16, b"x", &[std::io::stdin().as_fd()]);
            assert_eq!(sent.is_ok(), transport == Local, "{a} to {b}: {sent:?}");
        }
    }

    #[test]
    fn ranks_to_which_no_transport_is_left_are_told_so_at_both_ends() {
        for (ranks, says) in [
            ([may(true, None, false), may(false, None, true)], "allow no local one; no verbs: none here"),
            ([may(false, Some(Fabric::Ethernet), false), may(false, None, true)], "no verbs: "),
        ] {
            for (agreed, peer) in agreed(ranks.into()).into_iter().zip([1, 0]) {
                let Err(Error::Mismatch { rank, reason }) = agreed else { panic!("they agreed: {says}") };
                let remedy = reason.contains("Give all ranks the same `qp`");
                assert!(rank == peer && reason.contains(says) && remedy, "{rank}: {reason}");
            }
        }
    }

    #[test]
    fn p8_a_name_of_a_socket_that_no_rank_makes_is_not_dialled() {
        let good = Place::new().unwrap();
        assert!(good.is_a_ranks());
        let names =
            ["pushgate/job/0", "/run/docker.sock", "", "pushgate/", &good.name[1..]].map(str::to_owned);
        let more = [format!("{}0", good.name), good.name.to_uppercase(), format!("{}\0", &good.name[..40])];
        for name in names.into_iter().chain(more) {
            assert!(!Place { name: name.clone(), ..good.clone() }.is_a_ranks(), "{name:?}");
        }
        assert!(!Place { proof: "x".repeat(32), ..good }.is_a_ranks());
    }

    #[test]
    fn p8_who_finds_the_socket_and_was_not_told_the_proof_is_refused() {
        let name = format!("pushgate/{}", secret().unwrap());
        let (lower, higher) = (me(0, 2), me(1, 2));
        let name = At::Abstract(name);
        let here = unix::Here::open(slice::from_ref(&name), 0).unwrap();
        for wrong in [&b""[..], b"another proof of as many bytes!!"] {
            let stranger = higher.at_the_place(&here).dial(0, &name, wrong).ok().unwrap();
            let refused = thread::spawn(move || me(1, 2).at_the_place(&here_of(1)).answered(stranger, 0));
            let rank = higher.at_the_place(&here).dial(0, &name, b"the proof").ok().unwrap();
            let mut links = vec![None, None];
            unix::Me { proof: b"the proof", ..lower.at_the_place(&here) }
                .accept(&here.listeners, &[1], &mut links)
                .unwrap();
            assert!(links[1].is_some());
            assert!(higher.at_the_place(&here).answered(rank, 0).unwrap().is_ok());
            let e = refused.join().unwrap().err().expect("a stranger got in").to_string();
            assert!(e.contains("its greeting does not end with what this rank has told"), "{e}");
        }
    }

    /// A rank that nobody finds.
    fn here_of(rank: u32) -> unix::Here {
        unix::Here::open(&[At::Abstract(format!("pushgate/{}", secret().unwrap()))], rank).unwrap()
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_greeting_table_or_reach_of_a_stranger_makes_a_rank_panic() {
        let me = me(0, 4);
        let places: Vec<_> = (0..4).map(|_| None).collect();
        let hello = Hello {
            newest: None,
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            job: me.job.into(),
            size: 4,
            rank: 2,
            to: 0,
            listens: Some("[fd00::1]:7".parse().unwrap()),
            also: vec!["[fe80::1%3]:7".parse().unwrap()],
            token: None,
            again: None,
        };
        let table = Answer::Table {
            token: secret().unwrap(),
            addresses: vec!["10.0.0.1:7".parse().unwrap(); 3],
            also: vec![vec!["10.1.0.1:7".parse().unwrap()]; 3],
            port: 9,
        };
        let reach = Reach {
            local: Some(Place::new().unwrap()),
            verbs: Some(Fabric::Ethernet),
            tcp: true,
            boot_id: None,
        };
        let version = VERSIONS.oldest();
        let seeds = [
            envelope(version, &hello),
            envelope(version, &Hello { token: Some(secret().unwrap()), again: Some(7), ..hello }),
            envelope(version, &table),
            envelope(version, &Answer::Refused("another size".into())),
            envelope(version, &reach),
            envelope(version, &Reached { here: true }),
        ];
        let (version, body) = opened(&seeds[0]).unwrap();
        assert_eq!(me.check(version, body, None, &places).map(|hello| hello.rank), Ok(2));
        fuzz(&seeds, |bytes| {
            // The length says less than the fields of the body do.
            let (version, body) = match opened(bytes) {
                Ok(both) => both,
                Err(_) => (VERSIONS.oldest(), bytes.get(HEADER..).unwrap_or_default()),
            };
            let greeting = match me.check(version, body, None, &places) {
                Ok(hello) => {
                    assert!((1..4).contains(&hello.rank) && hello.listens.is_some());
                    1
                }
                Err(why) => kind(why),
            };
            let answer = match serde_json::from_slice(body) {
                Ok(Answer::Table { addresses, .. }) => depth(addresses.len()),
                Ok(Answer::Welcome) => 2,
                Ok(Answer::Refused(why)) => {
                    let shown = Foreign::sentence(why).to_string();
                    assert!(!shown.contains(char::is_control), "{shown:?}");
                    3
                }
                Err(e) => kind(e),
            };
            let reach = match serde_json::from_slice::<Reach>(body) {
                Ok(reach) => reach.local.is_some_and(|place| place.is_a_ranks()) as u64,
                Err(e) => kind(e),
            };
            let reached = serde_json::from_slice::<Reached>(body).is_ok_and(|reached| reached.here) as u64;
            greeting ^ answer.rotate_left(8) ^ reach.rotate_left(16) ^ reached.rotate_left(24)
        });
    }
}
