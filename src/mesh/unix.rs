//! The ranks of one host, joined by Unix sockets under abstract names made of user, job and rank, or in a folder that the ranks'
//! containers have in common.
//!
//! Each rank connects to all lower ranks and greets them. A rank answers a greeting once all ranks
//! higher than itself have greeted it. With greeting and answer each rank hands the other a pidfd
//! of itself. This can't deadlock: all wait for rank 0 first, which waits for none of them, then
//! for rank 1, and so on.
//!
//! Any process of this host can connect to an abstract name. So greetings are read side by side, limited in
//! bytes and in time, and a wrong one costs only its sender the connection.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use pushgate_driver_shim::closing::{Closes, PeerListener, PeerStream};
use pushgate_driver_shim::fdpass::{Frame, Incoming, send_message};
use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::users::{is_ours, is_ours_or_root, remark};
use pushgate_service::folder::{self, BESIDE, Folder};
use pushgate_service::server::SocketFile;
use pushgate_service::wire;
use rustix::event::{PollFd, PollFlags};
use rustix::process::geteuid;

use super::{Link, Stream};
use crate::error::{Error, Result};

/// Version of the messages between ranks of one host.
const VERSION: u32 = 3;
/// The most bytes of a greeting or of an answer.
const MAX_HELLO: usize = 64;
const MAX_ANSWER: usize = 1024;
/// First byte of an answer that accepts; in a refusal the reason follows the first byte.
const WELCOME: u8 = 0;
const REFUSED: u8 = 1;
/// Time within which a rank that has connected must say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// How many connections may be about to greet, in addition to one for each rank.
const STRANGERS: usize = 64;
/// How much longer than its own deadline a rank waits for a lower rank's answer. That rank has perhaps begun later, and says
/// at its deadline which ranks are missing.
const ANSWER: Duration = Duration::from_secs(2);
/// Pause between two tries to connect.
const PAUSE: Duration = Duration::from_millis(5);

type Links = Vec<Option<Link>>;

/// Makes the sockets of all ranks of one process, in pairs.
pub(super) fn pairs(size: u32) -> Result<Vec<Vec<Option<UnixStream>>>> {
    let mut streams: Vec<Vec<Option<UnixStream>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for (a, b) in (0..size as usize).flat_map(|a| (a + 1..size as usize).map(move |b| (a, b))) {
        let (x, y) = UnixStream::pair().map_err(Error::io("socket pair between ranks"))?;
        (streams[a][b], streams[b][a]) = (Some(x), Some(y));
    }
    Ok(streams)
}

/// A name at which a rank listens.
pub(super) enum At<'a> {
    Abstract(String),
    In(&'a Folder, String),
}

impl At<'_> {
    /// The place of a rank of a job whose ranks are all on this host.
    fn of_job<'a>(job: &str, rank: u32, folder: Option<&'a Folder>) -> Result<At<'a>> {
        let Some(folder) = folder else { return Ok(At::Abstract(name(job, rank))) };
        let plain = |b: u8| match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => char::from(b).to_string(),
            _ => format!("%{b:02x}"),
        };
        let name = format!("{}-{rank}", job.bytes().map(plain).collect::<String>());
        match name.len() > folder::LONGEST {
            true => {
                let most = folder::LONGEST - format!("-{rank}").len();
                Err(Error::config(
                    "job",
                    job,
                    format!("a name of at most {most} letters and digits with local-folder"),
                ))
            }
            false => Ok(At::In(folder, name)),
        }
    }

    fn listen(&self) -> io::Result<(PeerListener, Option<SocketFile>)> {
        match self {
            At::In(folder, name) => folder.listen(name).map(|(listener, file)| (listener, Some(file))),
            At::Abstract(name) => {
                let bound = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                bound.set_nonblocking(true)?;
                Ok((bound.into(), None))
            }
        }
    }

    fn dial(&self, deadline: Instant) -> io::Result<PeerStream> {
        match self {
            At::Abstract(name) => wire::dial(Path::new(&format!("@{name}")), deadline),
            At::In(folder, name) => folder.dial(name, deadline),
        }
    }
}

/// Connects a rank in a process of its own: it listens under a name made of its user, `job` and its rank, and connects to all
/// lower ranks. The name is abstract and disappears with the process, however it ends; with a folder it is a file there.
pub(super) fn connect(
    job: &str,
    rank: u32,
    size: u32,
    timeout: Duration,
    folder: Option<&Folder>,
) -> Result<Links> {
    let deadline = Instant::now() + timeout;
    let own = At::of_job(job, rank, folder)?;
    if folder.is_none() && SocketAddr::from_abstract_name(name(job, rank)).is_err() {
        return Err(Error::config("job", job, "a name of at most 80 bytes"));
    }
    let (listener, _file) = own.listen().map_err(|e| {
        let why = taken_by(&own).unwrap_or_else(|| "is it running twice?".into());
        Error::io(format!("listening as rank {rank} of job {job}; {why}"))(e)
    })?;
    let process = own_process(rank);
    let me = Me { job, rank, size, timeout, deadline, process: process.as_ref(), proof: &[] };
    let mut links: Links = (0..size).map(|_| None).collect();
    for lower in 0..rank {
        links[lower as usize] = Some(me.join(lower, &At::of_job(job, lower, folder)?)?);
    }
    let higher: Vec<u32> = (rank + 1..size).collect();
    me.accept(&[listener], &higher, &mut links)?;
    Ok(links)
}

/// Where ranks of this host arrive that have met elsewhere.
pub(super) struct Here {
    pub(super) listeners: Vec<PeerListener>,
    pub(super) process: Option<Process>,
    _file: Option<SocketFile>,
}

impl Here {
    /// Listens at all of these names.
    pub(super) fn open(names: &[At<'_>], rank: u32) -> io::Result<Here> {
        let mut here = Here { listeners: Vec::new(), process: own_process(rank), _file: None };
        for name in names {
            let (listener, file) = name.listen()?;
            here.listeners.push(listener);
            here._file = file.or(here._file);
        }
        Ok(here)
    }
}

/// A handle of this process for other ranks.
fn own_process(rank: u32) -> Option<Process> {
    Process::own()
        .inspect_err(|e| {
            tracing::warn!(rank, "no pidfd ({e}): while a forked child lives, this rank's death is not seen");
        })
        .ok()
}

/// Jobs of different users may have one name. Any user can take a name first that is easily guessed, and so keep the
/// rank from it; `pushgate run` gives its jobs names that are not.
fn name(job: &str, rank: u32) -> String {
    format!("pushgate/{}/{job}/{rank}", geteuid().as_raw())
}

/// Says which other user listens at a name, if one does.
fn taken_by(at: &At<'_>) -> Option<String> {
    let stream = at.dial(Instant::now() + PAUSE).ok()?;
    let uid = wire::peer_cred(&stream).ok()?.uid;
    (!is_ours(uid)).then(|| {
        format!(
            "user {uid}{} listens there: give the job a name that others do not guess (PUSHGATE_JOB), or start it by \
             `pushgate run`, which does",
            remark(uid)
        )
    })
}

/// A connection that has not said yet who it is.
struct Greeting {
    stream: PeerStream,
    incoming: Incoming,
    until: Instant,
}

/// Why a lower rank was not greeted.
pub(super) enum Dial {
    /// Another try may succeed.
    Later(io::Error),
    /// The name is another program's.
    Wrong(Error),
}

impl std::fmt::Display for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dial::Later(e) => e.fmt(f),
            Dial::Wrong(e) => e.fmt(f),
        }
    }
}

/// This rank while it connects to the others.
pub(super) struct Me<'a> {
    pub(super) job: &'a str,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
    pub(super) process: Option<&'a Process>,
    /// What a higher rank's greeting must end with.
    pub(super) proof: &'a [u8],
}

impl Me<'_> {
    /// Connects to a lower rank and greets it; repeats until that rank listens or time is up.
    fn join(&self, lower: u32, at: &At<'_>) -> Result<Link> {
        loop {
            let answered = match self.dial(lower, at, &[]) {
                Ok(stream) => self.answered(stream, lower)?,
                Err(Dial::Wrong(e)) => return Err(e),
                Err(Dial::Later(e)) => Err(e),
            };
            let why = match answered {
                Ok(link) => return Ok(link),
                Err(why) => why,
            };
            if Instant::now() >= self.deadline {
                let user = geteuid().as_raw();
                let beside = match at {
                    At::Abstract(_) => format!("; {BESIDE}"),
                    At::In(..) => String::new(),
                };
                let what =
                    format!("waiting for rank {lower} of user {user}'s job {} ({why}{beside})", self.job);
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            // The lower rank does not listen yet, or it has gone and may come back.
            interrupt::check()?;
            std::thread::sleep(PAUSE);
        }
    }

    /// Connects to a lower rank at its name, and greets it. `proof` ends the greeting.
    pub(super) fn dial(
        &self,
        lower: u32,
        at: &At<'_>,
        proof: &[u8],
    ) -> std::result::Result<PeerStream, Dial> {
        let stream = loop {
            let until = self.deadline.min(Instant::now() + interrupt::LOOK);
            match at.dial(until) {
                // Its queue of connections is full.
                Err(e) if e.kind() == ErrorKind::WouldBlock && until < self.deadline => {
                    interrupt::check().map_err(|interrupted| Dial::Wrong(interrupted.into()))?;
                }
                dialled => break dialled.map_err(Dial::Later)?,
            }
        };
        check_owner(&stream, lower).map_err(Dial::Wrong)?;
        let words = [VERSION, self.rank, lower, self.size];
        let hello: Vec<u8> =
            words.iter().flat_map(|v| v.to_le_bytes()).chain(proof.iter().copied()).collect();
        self.say(&stream, &hello).map_err(Dial::Later)?;
        Ok(stream)
    }

    /// Waits for the answer of a lower rank that was greeted. After an inner error another try may succeed.
    pub(super) fn answered(
        &self,
        stream: PeerStream,
        lower: u32,
    ) -> Result<std::result::Result<Link, io::Error>> {
        let mut incoming = Incoming::default();
        let (answer, fds) = loop {
            match incoming.receive(&stream, MAX_ANSWER, 1) {
                Ok(Some(frame)) => break frame,
                Ok(None)
                    if interrupt::wait(
                        &mut [PollFd::new(&stream, PollFlags::IN)],
                        self.deadline + ANSWER,
                    )? => {}
                Ok(None) => {
                    let why = "it is there and does not answer, perhaps because it waits for other ranks";
                    return Ok(Err(io::Error::new(ErrorKind::TimedOut, why)));
                }
                Err(e) => return Ok(Err(e)),
            }
        };
        let mismatch = |reason| Error::Mismatch { rank: lower, reason };
        match answer.split_first() {
            Some((&WELCOME, [])) => Ok(Ok(link(stream, fds).map_err(mismatch)?)),
            Some((&REFUSED, why)) => {
                let why = Foreign::sentence(String::from_utf8_lossy(why));
                Err(mismatch(format!("refused rank {}: {why}", self.rank)))
            }
            _ => Err(mismatch("its answer is none: run one release of pushgate for all ranks".into())),
        }
    }

    /// Sends a greeting or an answer, with our pidfd. Does not wait: the socket is new and its
    /// buffer empty.
    fn say(&self, stream: &UnixStream, bytes: &[u8]) -> io::Result<()> {
        stream.set_write_timeout(Some(GREETING))?;
        let fds: Vec<_> = self.process.map(|p| p.as_fd()).into_iter().collect();
        send_message(stream, bytes, &fds)
    }

    /// Waits until these higher ranks have greeted, and answers them.
    pub(super) fn accept(&self, listeners: &[PeerListener], higher: &[u32], links: &mut Links) -> Result<()> {
        let mut greetings: Vec<Greeting> = Vec::new();
        // Of those that greet, all together.
        let closes = Closes::default();
        let mut last_refused = String::new();
        let higher = || higher.iter().map(|r| *r as usize);
        loop {
            let missing: Vec<_> = higher().filter(|r| links[*r].is_none()).map(|r| r.to_string()).collect();
            if missing.is_empty() {
                break;
            }
            let now = Instant::now();
            if now >= self.deadline {
                let missing = missing.join(", ");
                let why = format!("rank {missing} did not come within {:?}", self.timeout);
                for link in higher().filter_map(|r| links[r].as_ref()) {
                    self.refuse(&link.stream, &why);
                }
                let what = format!("waiting for rank {missing}{last_refused}");
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            greetings.retain(|g| g.until > now);
            let until = greetings.iter().map(|g| g.until).fold(self.deadline, Instant::min);
            let mut fds: Vec<_> =
                listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
            fds.extend(greetings.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN)));
            let here: Vec<usize> = higher().filter(|r| links[*r].is_some()).collect();
            let settled = || here.iter().filter_map(|r| links[*r].as_ref());
            fds.extend(settled().map(|link| PollFd::from_borrowed_fd(link.stream.fd(), PollFlags::IN)));
            if !interrupt::wait(&mut fds, until)? {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
            drop(fds);
            let (to_listeners, ready) = ready.split_at(listeners.len());
            let (to_greetings, to_settled) = ready.split_at(greetings.len());
            // A rank that waits for its answer sends nothing, so a readable socket means that the
            // rank has gone; it may come back.
            for (rank, _) in here.iter().zip(to_settled).filter(|(_, ready)| **ready) {
                limited!(warn, *rank as u64, rank = self.rank, "rank {rank} left before all were there");
                links[*rank] = None;
            }
            let mut i = 0;
            for ready in to_greetings {
                let g = &mut greetings[i];
                let heard = if *ready { g.incoming.receive(&g.stream, MAX_HELLO, 1) } else { Ok(None) };
                if matches!(heard, Ok(None)) {
                    i += 1;
                    continue;
                }
                let g = greetings.remove(i);
                let taken = match heard {
                    Ok(frame) => self.check(&g.stream, frame.expect("handled above"), &closes),
                    Err(e) => Err(e.to_string()),
                };
                match taken {
                    // A rank that was started again replaces its earlier connection.
                    Ok((from, process)) => {
                        links[from as usize] = Some(Link { process, ..g.stream.into() });
                    }
                    Err(why) => {
                        limited!(
                            warn,
                            0u32,
                            rank = self.rank,
                            "refused a connection at the rendezvous: {why}"
                        );
                        last_refused = format!(" (the last that was refused: {why})");
                        self.refuse(&Stream::Unix(g.stream), &why);
                    }
                }
            }
            for (listener, _) in listeners.iter().zip(to_listeners).filter(|(_, ready)| **ready) {
                match listener.accept() {
                    Ok(stream) => {
                        // Any process can connect to the name; processes of other users are refused
                        // before they are read.
                        if let Err(e) = check_owner(&stream, self.rank) {
                            limited!(
                                warn,
                                0u32,
                                rank = self.rank,
                                "refused a connection at the rendezvous: {e}"
                            );
                            continue;
                        }
                        // The oldest connection is the least likely to be a rank of ours.
                        if greetings.len() >= self.size as usize + STRANGERS {
                            greetings.remove(0);
                        }
                        let until = Instant::now() + GREETING;
                        greetings.push(Greeting { stream, incoming: Incoming::closed_by(&closes), until });
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    Err(e) => {
                        limited!(warn, 0u32, rank = self.rank, "accepting a rank: {e}");
                        // Perhaps no descriptor is left; some will be free again soon.
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        }
        for rank in higher() {
            let Some(Link { stream: Stream::Unix(stream), .. }) = &links[rank] else { continue };
            // A rank that has gone in the meantime is noticed as lost once all ranks listen.
            let _ = self.say(stream, &[WELCOME]);
        }
        Ok(())
    }

    /// Checks a greeting. An error says what is wrong.
    fn check(
        &self,
        stream: &UnixStream,
        (bytes, fds): Frame,
        closes: &Closes,
    ) -> std::result::Result<(u32, Option<Process>), String> {
        match self.sender(stream, &bytes) {
            Ok(from) => Ok((from, process(fds, closes)?)),
            Err(why) => {
                closes.close(fds, ());
                Err(why)
            }
        }
    }

    /// The rank that greets with these bytes.
    fn sender(&self, stream: &UnixStream, bytes: &[u8]) -> std::result::Result<u32, String> {
        let release = "run one release of pushgate for all ranks";
        let Some(words) = bytes.strip_suffix(self.proof) else {
            return Err("its greeting does not end with what this rank has told the ranks of its job".into());
        };
        let words: Vec<u32> =
            words.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().expect("four bytes"))).collect();
        let [version, from, to, size] = words[..] else {
            return Err(format!("its greeting has {} bytes, expected 16: {release}", bytes.len()));
        };
        if version != VERSION {
            return Err(format!("it speaks version {version}, this rank version {VERSION}: {release}"));
        }
        if (to, size) != (self.rank, self.size) || from <= self.rank || from >= self.size {
            return Err(format!(
                "it is rank {from} of {size} and greets rank {to}, but this is rank {} of {}: give all ranks the \
                 same number of ranks and each a number of its own",
                self.rank, self.size
            ));
        }
        check_owner(stream, from).map_err(|e| e.to_string())?;
        Ok(from)
    }

    fn refuse(&self, stream: &Stream, why: &str) {
        let Stream::Unix(stream) = stream else { return };
        let mut bytes = vec![REFUSED];
        bytes.extend(why.bytes().take(MAX_ANSWER - 1));
        // The sender receives the reason, or finds the connection closed.
        let _ = self.say(stream, &bytes);
    }
}

fn link(stream: PeerStream, fds: Vec<OwnedFd>) -> std::result::Result<Link, String> {
    Ok(Link { process: process(fds, &Closes::default())?, ..stream.into() })
}

/// The peer's process, if the peer could hand over a pidfd of itself.
fn process(mut fds: Vec<OwnedFd>, closes: &Closes) -> std::result::Result<Option<Process>, String> {
    let (e, fd) = match fds.pop().map(Process::from_fd).transpose() {
        Ok(process) => return Ok(process),
        Err(wrong) => wrong,
    };
    closes.close(vec![fd], ());
    if e.kind() == ErrorKind::InvalidInput {
        return Err(e.to_string());
    }
    limited!(
        warn,
        0u32,
        "a pidfd that can't be checked ({e}): while a forked child lives, its rank's death is not seen"
    );
    Ok(None)
}

/// Refuses processes of other users: only our own user's processes, or root's, may be ranks of our
/// job.
fn check_owner(stream: &UnixStream, rank: u32) -> Result<()> {
    let peer = wire::peer_cred(stream).map_err(Error::io("peer's user"))?;
    if !is_ours_or_root(peer.uid) {
        let own = geteuid().as_raw();
        let reason = format!("runs as user {}, this rank as {own}{}", peer.uid, remark(peer.uid));
        return Err(Error::Mismatch { rank, reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::thread;

    use pushgate_driver_shim::closing::MOST_CLOSES;
    use pushgate_tests::fuse::Hanging;
    use pushgate_tests::fuzz::{fuzz, kind};
    use pushgate_tests::lingering::{lingering, send_along};
    use pushgate_tests::users::{STRANGER, as_user, is_root};
    use pushgate_tests::{hang, wait_until};

    use super::*;

    #[test]
    fn p8_a_rank_whose_name_another_user_has_taken_says_which_user_and_what_helps() {
        if !is_root("a name that another user has taken") {
            return;
        }
        let job = format!("squatted-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(name(&job, 0)).unwrap();
        // The kernel keeps the user of the thread that calls listen.
        let _squatted = as_user(STRANGER, || UnixListener::bind_addr(&at).unwrap());
        let Err(e) = connect(&job, 0, 2, hang(), None) else { panic!("two listen under one name") };
        let e = e.to_string();
        assert!(e.contains("user 65003 listens there") && e.contains("pushgate run"), "{e}");
        // A user's jobs are other ones than root's.
        assert_ne!(as_user(STRANGER, || name("job", 0)), name("job", 0));
    }

    /// Waits until somebody listens, and connects.
    fn connects(at: &SocketAddr) -> UnixStream {
        let mut stream = None;
        wait_until("a rank listens", || {
            stream = UnixStream::connect_addr(at).ok();
            stream.is_some()
        });
        stream.unwrap()
    }

    /// A greeting of rank 1 of 2, for rank 0.
    fn greeting_of_rank_1() -> Vec<u8> {
        [VERSION, 1, 0, 2].map(u32::to_le_bytes).concat()
    }

    #[test]
    fn p7_p8_strangers_of_another_user_are_refused_unread_and_the_ranks_meet() {
        if !is_root("strangers of another user at a rank's name") {
            return;
        }
        let job = format!("strangers-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(name(&job, 0)).unwrap();
        let rank = |n| {
            let job = job.clone();
            thread::spawn(move || connect(&job, n, 2, hang(), None).map(drop))
        };
        let first = rank(0);
        connects(&at);
        // More than the ranks that are about to greet.
        let strangers: Vec<_> = (0..STRANGERS + 4)
            .map(|_| {
                let stranger = as_user(STRANGER, || connects(&at));
                let (fd, end) = lingering();
                // It may be refused before all is said.
                let _ = send_message(&stranger, &greeting_of_rank_1(), &[fd.as_fd()]);
                // The rank's copy may be closed already, and then this close lingers.
                thread::spawn(|| drop(fd));
                (stranger, end)
            })
            .collect();
        for (stranger, _) in &strangers {
            // A rank that had read the greeting would answer.
            assert!(!matches!((&mut &*stranger).read(&mut [0]), Ok(1..)));
        }
        for rank in [rank(1), first] {
            wait_until("the ranks meet", || rank.is_finished());
            rank.join().unwrap().unwrap();
        }
    }

    /// Each close of the descriptors hangs, or lingers, for as long as the stranger likes.
    #[test]
    fn p7_p8_greetings_with_files_that_hang_hold_up_no_rank_and_leave_few_threads() {
        // The threads that close begin before there is a file that hangs.
        let _before = PeerStream::from(UnixStream::pair().unwrap().0);
        let hanging = match Hanging::open(1) {
            Ok(hanging) => hanging,
            Err(e) => {
                return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
            }
        };
        let job = format!("hanging-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(name(&job, 0)).unwrap();
        let rank = |n| {
            let job = job.clone();
            thread::spawn(move || connect(&job, n, 2, hang(), None).map(drop))
        };
        let first = rank(0);
        for n in 0..60 {
            let stranger = connects(&at);
            stranger.set_read_timeout(Some(hang())).unwrap();
            let (greeting, right) = ([VERSION, 7, 0, 2].map(u32::to_le_bytes).concat(), greeting_of_rank_1());
            // Not a rank's greeting; a greeting with a descriptor that is no process's; a frame that ends in the middle.
            match n % 3 {
                0 => send_message(&stranger, &greeting, &[hanging.files()[0].as_fd()]).unwrap(),
                1 => send_message(&stranger, &right, &[hanging.files()[0].as_fd()]).unwrap(),
                _ => {
                    (&stranger).write_all(&[16, 0, 0, 0, 1, 0, 0, 0]).unwrap();
                    assert!(send_along(&stranger, &hanging.files()[0], &[0]));
                    stranger.shutdown(std::net::Shutdown::Write).unwrap();
                }
            }
            // The rank has taken what this one said.
            let heard = (&mut &stranger).read_to_end(&mut Vec::new());
            let held_up = heard.is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
            assert!(!held_up, "stranger {n} holds the rank up");
        }
        // Each close under way has two threads.
        wait_until("closes hang", || hanging.waiting() >= MOST_CLOSES);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(hanging.waiting(), MOST_CLOSES);
        for rank in [rank(1), first] {
            wait_until("the ranks meet", || rank.is_finished());
            rank.join().unwrap().unwrap();
        }
    }

    /// The close of the descriptor would take an hour on the thread that closes the listener.
    #[test]
    fn p7_a_rank_that_gives_up_waits_for_no_stranger_that_it_has_not_accepted() {
        let job = format!("gives-up-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(name(&job, 1)).unwrap();
        // Rank 0 never comes, so rank 1 accepts nobody.
        let rank =
            thread::spawn(move || connect(&job, 1, 2, Duration::from_secs(1), None).map(drop).unwrap_err());
        let stranger = connects(&at);
        let (fd, _end) = lingering();
        assert!(send_along(stranger, &fd, &[1]));
        // The rank's copy may be closed already.
        thread::spawn(|| drop(fd));
        wait_until("rank 1 gives up", || rank.is_finished());
        let e = rank.join().unwrap();
        assert!(matches!(e, Error::TimedOut { .. }), "{e}");
        UnixListener::bind_addr(&at).unwrap();
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_greeting_or_answer_of_a_stranger_makes_a_rank_of_this_host_panic() {
        const PROOF: &[u8] = b"the proof";
        // A stranger's socket that has said these bytes, and sends no more.
        let said = |bytes: &[u8]| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(bytes).unwrap();
            PeerStream::from(ours)
        };
        let me = Me {
            job: "fuzz",
            rank: 1,
            size: 4,
            timeout: hang(),
            deadline: Instant::now() + 100 * hang(),
            process: None,
            proof: PROOF,
        };
        let frame = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes()[..], &[0; 4], bytes].concat();
        let words = [VERSION, 2, 1, 4].map(u32::to_le_bytes).concat();
        let greeting = frame(&[&words, PROOF].concat());
        let taken = Incoming::default().receive(&said(&greeting), MAX_HELLO, 1).unwrap().unwrap();
        assert_eq!(me.check(&said(&[]), taken, &Closes::default()).unwrap().0, 2);
        // The first byte says which of the two it is.
        let seeds = [
            [&[0][..], &greeting].concat(),
            [&[1][..], &frame(&[WELCOME])].concat(),
            [&[1][..], &frame(b"\x01another job")].concat(),
        ];
        fuzz(&seeds, |bytes| {
            let Some((which, bytes)) = bytes.split_first() else { return 0 };
            let stream = said(bytes);
            if which % 2 == 1 {
                return match me.answered(stream, 0) {
                    Ok(Ok(_)) => 1,
                    Ok(Err(e)) => kind(e),
                    Err(e) => kind(e),
                };
            }
            match Incoming::default().receive(&stream, MAX_HELLO, 1) {
                Ok(Some(frame)) => match me.check(&stream, frame, &Closes::default()) {
                    Ok((from, _)) => {
                        assert!(from > me.rank && from < me.size);
                        2
                    }
                    Err(why) => kind(why),
                },
                Ok(None) => 3,
                Err(e) => kind(e),
            }
        });
    }
}
