//! A communicator: the ranks of a job, and the queue pairs between them.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pushgate_core::session::Status;
use pushgate_door::{Purpose, Secret, Terms};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::window::WeakPiece;
use pushgate_engine::connect::Incarnation;
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::proxy::Proxy;
use pushgate_engine::recorder;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{BothReady, Call, Ended, Events, Meetings, Mesh, QUEUE_PAIRS, TellEngine, listen_at};
use crate::qp::{OwnEnd, QpConfig, QueuePair};
use crate::ranks::{Membership, UniqueId, check_rank, check_size};
use crate::settings::{QpKind, Transport};
use crate::watch::tell;

/// The mesh's label for the frames of collectives.
const GATHER: u32 = 1;

/// The queue pairs of this communicator, kept so that each can be ended when its peer is lost or
/// the peer's end breaks.
type Members = Arc<Mutex<HashMap<QpId, Member>>>;

#[derive(Clone)]
struct Member {
    control: WeakPiece,
    peer: u32,
    label: u32,
    /// Which of the peer's calls made the other end.
    incarnation: Incarnation,
}

/// A collective that has begun. A repeated call goes on from here and does not repeat finished
/// steps.
struct Gather {
    bytes: Vec<u8>,
    /// By rank: whether `bytes` has been sent to it.
    sent: Vec<bool>,
    all: Vec<Option<Vec<u8>>>,
}

/// One rank's view of a job.
///
/// Queue pairs may outlive it. A link that breaks then is not replaced, because the ends meet again over the communicator's
/// sockets: the queue pair ends with *link down* once the setting `recover` is over.
///
/// Any thread may call any method. A collective ([`Comm::barrier`], [`Comm::all_gather`]) is called
/// by one thread of every rank at once.
pub struct Comm {
    // Dropped first, because its thread uses `members`. In a child of `fork` the drop does nothing:
    // the child must not say goodbye to the parent's peers.
    mesh: OwnedHere<Mesh>,
    members: Members,
    gather: Mutex<Option<Gather>>,
    context: Context,
    /// Names the job of this process: `pushgate inspect` finds the process by it.
    _job: Option<OwnedFd>,
}

/// Ends queue pairs with `status`. The engine writes the status for the device; if the engine is
/// gone, this function writes it.
fn fail(proxy: &dyn Proxy, members: Vec<(QpId, Member)>, status: Status) {
    for (qp, member) in members {
        if proxy.fail(Some(qp), status).is_err()
            && let Some(control) = member.control.upgrade()
        {
            tell(&control, status);
        }
    }
}

/// Copies of the members that satisfy `fits`; the lock is released on return.
fn select(members: &Members, fits: impl Fn(&Member) -> bool) -> Vec<(QpId, Member)> {
    let members = members.lock().unwrap_or_else(|e| e.into_inner());
    members.iter().filter(|(_, m)| fits(m)).map(|(qp, m)| (*qp, m.clone())).collect()
}

impl Comm {
    /// Makes a communicator of `size` ranks inside this process, all on one context.
    pub fn local(context: &Context, size: u32) -> Result<Vec<Comm>> {
        context.here()?;
        check_size(size)?;
        let meshes = Mesh::local(size, context.settings().timeout)?;
        meshes.into_iter().map(|mesh| Comm::new(context.clone(), mesh, None)).collect()
    }

    /// Joins the communicator of `job` as rank `rank` of `size`; the other ranks are processes that
    /// were given the same `job`.
    ///
    /// Without the setting `rendezvous` all ranks run on this host, and no other job of this host
    /// may have the same name. With `rendezvous` they may run on any host, and no other job may
    /// have the same rendezvous.
    pub fn connect(context: &Context, job: &str, rank: u32, size: u32) -> Result<Comm> {
        context.here()?;
        check_rank(rank, size)?;
        let s = context.settings();
        let mesh = match s.rendezvous.as_str() {
            "none" => Mesh::connect(job, rank, size, s.timeout, s.folder()?.as_ref())?,
            place => {
                let terms = s.terms(Purpose::MESH)?;
                let may = context.may(false)?;
                Mesh::connect_tcp(job, rank, size, place, &s.host, s.timeout, s.recovery(), terms, &may)
                    .map_err(|e| s.with_origin(e))?
            }
        };
        Comm::new(context.clone(), mesh, recorder::announce(job))
    }

    /// Joins the job that a launcher started this process for: `pushgate run`, torchrun, mpirun, srun, or variables that are
    /// set by hand ([`ranks`](crate::ranks) has the rules).
    ///
    /// Ranks that are all on one host meet there; ranks of several hosts meet at the setting `rendezvous`, or else where the
    /// launcher says. A program that does without a launcher asks [`Membership::of_process`] first.
    pub fn from_environment(context: &Context) -> Result<Comm> {
        context.here()?;
        let allowed = "pushgate run, torchrun, mpirun or srun to start this program, or PUSHGATE_RANK and PUSHGATE_RANKS";
        let found = Membership::of_process(context.settings())?;
        Comm::join(context, &found.ok_or_else(|| Error::config("launcher", "none", allowed))?)
    }

    /// Joins the job that this membership describes. The other ranks do so too, each with its own.
    pub fn join(context: &Context, membership: &Membership) -> Result<Comm> {
        context.here()?;
        let Membership { rank, size, ref job, .. } = *membership;
        check_rank(rank, size)?;
        let s = context.settings();
        let mesh = match &membership.rendezvous {
            _ if size == 1 => alone(s.timeout)?,
            None => Mesh::connect(job, rank, size, s.timeout, s.folder()?.as_ref())?,
            Some(place) => {
                s.check_between(true)?;
                let (recover, terms, may) = (s.recovery(), s.terms(Purpose::MESH)?, context.may(true)?);
                let mesh = match rank {
                    0 => {
                        let at = membership.listens().expect("it has a rendezvous");
                        let listeners = listen_at(&at);
                        listeners.and_then(|listeners| {
                            Mesh::listen_tcp(job, size, (listeners, &at), s.timeout, recover, terms, &may)
                        })
                    }
                    _ => Mesh::connect_tcp(job, rank, size, place, &s.host, s.timeout, recover, terms, &may),
                };
                mesh.map_err(|e| s.with_origin(e))?
            }
        };
        Comm::new(context.clone(), mesh, recorder::announce(job))
    }

    /// Joins the communicator of an id as rank `rank` of `size`. Rank 0's process made the id, and the program handed it to
    /// the other ranks.
    ///
    /// The ranks meet at the first of the id's addresses that they reach.
    pub fn connect_with(context: &Context, id: &UniqueId, rank: u32, size: u32) -> Result<Comm> {
        context.here()?;
        check_rank(rank, size)?;
        let s = context.settings();
        let (job, recover) = (id.name(), s.recovery());
        let listeners = (rank == 0).then(|| context.inner.listeners.take(id)).transpose()?;
        if size == 1 {
            return Comm::new(context.clone(), alone(s.timeout)?, recorder::announce(&job));
        }
        // Ranks that are all on one host may ask for `local`.
        s.check_between(s.qp != QpKind::Local)?;
        let may = context.may(true)?;
        // The id carries a secret of its own.
        let secret = Secret::new(&id.key()).expect("32 bytes are enough");
        let place = id.places().iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
        let terms = Terms { secret, purpose: Purpose::MESH, tls: s.tls };
        let mesh = match listeners {
            Some(listeners) => {
                Mesh::listen_tcp(&job, size, (listeners, &place), s.timeout, recover, terms, &may)
            }
            None => Mesh::connect_tcp(&job, rank, size, &place, &s.host, s.timeout, recover, terms, &may),
        };
        Comm::new(context.clone(), mesh.map_err(|e| s.with_origin(e))?, recorder::announce(&job))
    }

    /// The transport of queue pairs with a rank.
    pub fn transport(&self, peer: u32) -> Result<Transport> {
        let agreed = self.mesh.transport(self.other(peer)?);
        Ok(agreed.unwrap_or_else(|| self.context.transport_here()))
    }

    /// The transports of this rank's queue pairs, each once; of a rank alone the one that the settings name.
    pub fn transports(&self) -> Vec<Transport> {
        let others = (0..self.size()).filter(|rank| *rank != self.rank());
        let all: BTreeSet<_> = others.filter_map(|rank| self.transport(rank).ok()).collect();
        if all.is_empty() { vec![self.context.transport_here()] } else { all.into_iter().collect() }
    }

    fn new(context: Context, mut mesh: Mesh, job: Option<OwnedFd>) -> Result<Comm> {
        let members = Members::default();
        let (told, proxy) = (members.clone(), context.inner.proxy.clone());
        let lost = move |rank| {
            let status = Status { rank: Some(rank), ..Status::new(abi::PUSHGATE_PEER_LOST) };
            fail(&*proxy, select(&told, |_| true), status);
        };
        let (told, proxy) = (members.clone(), context.inner.proxy.clone());
        let ended = move |Ended { rank, label, incarnation, status }| {
            let it = |m: &Member| (m.peer, m.label, m.incarnation) == (rank, label, incarnation);
            fail(&*proxy, select(&told, it), status);
        };
        mesh.listen(Events { lost: Box::new(lost), ended: Box::new(ended) })?;
        Ok(Comm { mesh: OwnedHere::new(mesh), members, gather: Mutex::default(), context, _job: job })
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> u32 {
        self.mesh.rank
    }

    /// How many ranks the communicator has.
    pub fn size(&self) -> u32 {
        self.mesh.size
    }

    /// The context (device and engine) that this communicator uses.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Makes a queue pair with `peer`, which makes the same call with the same label (below 2^24)
    /// and its own rank's sizes. Returns when both ends know each other.
    ///
    /// Two ranks that share several queue pairs give each a label of its own.
    ///
    /// After an error either rank may call this again. This call fails with [`Error::Aborted`] if the peer's
    /// call fails after it has heard of this one; if the peer's call had failed before, this call waits for
    /// the peer's next one. If the peer's call fails after this one has succeeded, the queue pair ends with
    /// *aborted*.
    pub fn queue_pair(&self, peer: u32, label: u32, config: QpConfig) -> Result<QueuePair> {
        Ok(self.queue_pairs(&[(peer, label)], config)?.pop().expect("one was asked for"))
    }

    /// Begins to meet the peers of several queue pairs.
    pub(crate) fn meetings(&self, ends: &[(u32, u32)], config: QpConfig) -> Result<Meetings<'_, OwnEnd<'_>>> {
        self.mesh.here()?;
        let mut own = Vec::with_capacity(ends.len());
        for &(peer, label) in ends {
            self.other(peer)?;
            if label >= 1 << 24 {
                return Err(Error::config("label", label, "0 to 16777215"));
            }
            let set_up = self.mesh.set_up(peer, QUEUE_PAIRS + label);
            own.push((set_up, OwnEnd::new(&self.context, &self.mesh, peer, config)?));
        }
        Meetings::begin(&self.mesh, own)
    }

    /// Joins ends that are ready, and whose peers are.
    pub(crate) fn join_all<'a>(&'a self, ready: Vec<BothReady<'a, OwnEnd<'a>>>) -> Result<Vec<QueuePair>> {
        let mut joined = Vec::with_capacity(ready.len());
        for BothReady { end, places, mut call } in ready {
            let qp = end.join(&places, &mut call)?;
            let (label, incarnation) = call.peers();
            let member = Member { control: qp.control().downgrade(), peer: qp.peer(), label, incarnation };
            let mut members = self.members.lock().unwrap_or_else(|e| e.into_inner());
            members.retain(|_, m| m.control.is_alive());
            members.insert(qp.id(), member.clone());
            drop(members);
            joined.push((qp, member, call));
        }
        // A rank that was lost in the meantime ended only the queue pairs that were members then,
        // so the new ones must be checked here.
        if let Some(rank) = self.mesh.lost() {
            return Err(Error::PeerLost { rank });
        }
        // All or none: an error up to here also ends the peers' ends of these queue pairs.
        let keep = |(qp, member, call): (QueuePair, Member, Call<'_>)| {
            // Weak: the mesh's thread, which has this, must not be the last one that has the engine.
            let (proxy, id) = (Arc::downgrade(&self.context.inner.proxy), qp.id());
            let tell = move || {
                if let Some(proxy) = proxy.upgrade() {
                    // An engine that is gone has ended its queue pairs.
                    let _ = proxy.control(id);
                }
            };
            let tell = call.is_handed_over().then(|| Arc::new(tell) as TellEngine);
            if let Some(status) = call.joined(tell) {
                fail(&*self.context.inner.proxy, vec![(qp.id(), member)], status);
            }
            qp
        };
        Ok(joined.into_iter().map(keep).collect())
    }

    /// Exchanges bytes between all ranks: returns every rank's bytes in the order of ranks. A
    /// collective; at most 2^24 - 4 bytes of each rank.
    ///
    /// After *timed out* the call may be repeated with the same bytes and goes on where it stopped.
    /// Until it has succeeded, other bytes are refused if some rank may already have received the
    /// first ones. After any other error the collective starts from the beginning.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.mesh.here()?;
        let mut begun = self.gather.lock().unwrap_or_else(|e| e.into_inner());
        // A collective that has sent and received nothing counts as not begun: it holds only this
        // rank's bytes.
        let pristine = |g: &mut Gather| !g.sent.contains(&true) && g.all.iter().flatten().count() == 1;
        begun.take_if(pristine);
        let done = self.go_on(&mut begun, bytes);
        if !matches!(done, Err(Error::TimedOut { .. } | Error::Config { .. })) {
            *begun = None;
        }
        done
    }

    /// Goes on with the collective that has begun, or begins one with `bytes`.
    fn go_on(&self, begun: &mut Option<Gather>, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let others = || (0..self.size()).filter(|r| *r != self.rank());
        let size = self.size() as usize;
        let gather = begun.get_or_insert_with(|| {
            let mut all = vec![None; size];
            all[self.rank() as usize] = Some(bytes.to_vec());
            Gather { bytes: bytes.to_vec(), sent: vec![false; size], all }
        });
        if gather.bytes != bytes {
            self.check()?;
            let allowed =
                "the bytes of the collective that timed out before: call it again until it succeeds";
            return Err(Error::config("bytes", format!("{} other bytes", bytes.len()), allowed));
        }
        for rank in others() {
            if !gather.sent[rank as usize] {
                self.mesh.send(rank, GATHER, bytes, &[])?;
                gather.sent[rank as usize] = true;
            }
        }
        for rank in others() {
            let from = &mut gather.all[rank as usize];
            if from.is_none() {
                *from = Some(self.mesh.recv(rank, GATHER)?.0);
            }
        }
        let all = std::mem::take(&mut gather.all);
        Ok(all.into_iter().map(|bytes| bytes.expect("received above")).collect())
    }

    /// Waits until every rank has called `barrier`. A collective; after *timed out* it may be called
    /// again.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Ends all queue pairs of this rank with *aborted*, here and at their peers.
    ///
    /// For a rank that gives up; otherwise the other ranks wait until their timeouts. Does nothing
    /// in a child of `fork`.
    pub fn abort(&self) {
        if self.mesh.here().is_err() {
            return;
        }
        let status = Status { rank: Some(self.rank()), ..Status::new(abi::PUSHGATE_ABORTED) };
        for (qp, _) in select(&self.members, |_| true) {
            // Another error means that the engine is gone; then it has already written the status everywhere.
            if let Err(EngineError::Interrupted(_)) = self.context.inner.proxy.fail(Some(qp), status) {
                interrupt::leaves_undone("not all queue pairs were told that this rank has aborted");
                return;
            }
        }
    }

    /// The number of a rank's process, as the kernel says, if the process is of this host and has a number in this PID namespace.
    #[doc(hidden)]
    pub fn process_number(&self, rank: u32) -> Result<Option<u32>> {
        Ok(self.mesh.here()?.pid(self.other(rank)?))
    }

    /// A handle of a rank's process, if the process is of this host and the kernel gives one: of a process without a number in this PID
    /// namespace the one that it has handed over.
    #[doc(hidden)]
    pub fn process(&self, rank: u32) -> Result<Option<Arc<Process>>> {
        Ok(self.mesh.here()?.process(self.other(rank)?))
    }

    /// Cuts the connection that carries set-up messages to and from another rank, as a fault would: both ends see a reset. The
    /// ranks must have a rendezvous. For tests of recovery.
    #[doc(hidden)]
    pub fn cut(&self, rank: u32) -> Result<()> {
        self.mesh.here()?.cut(self.other(rank)?)
    }

    /// Holds all set-up messages to and from another rank back for `time`. For tests of recovery.
    #[doc(hidden)]
    pub fn hold(&self, rank: u32, time: Duration) -> Result<()> {
        self.mesh.here()?.hold(self.other(rank)?, time);
        Ok(())
    }

    /// Checks that a rank is another rank of this communicator.
    fn other(&self, rank: u32) -> Result<u32> {
        match rank < self.size() && rank != self.rank() {
            true => Ok(rank),
            false => Err(Error::config("peer", rank, format!("another rank of 0 to {}", self.size() - 1))),
        }
    }

    /// Fails with [`Error::PeerLost`] once a rank has been lost.
    pub fn check(&self) -> Result<()> {
        self.mesh.here()?.lost().map_or(Ok(()), |rank| Err(Error::PeerLost { rank }))
    }
}

/// The mesh of a rank that is the only one.
fn alone(timeout: Duration) -> Result<Mesh> {
    Ok(Mesh::local(1, timeout)?.pop().expect("one was asked for"))
}
