//! A communicator: the ranks of a job, and the queue pairs between them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::window::WeakPiece;
use pushgate_proxy::engine::QpId;
use pushgate_proxy::proxy::Proxy;
use pushgate_proxy::session::Status;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Ended, Events, Mesh, QUEUE_PAIRS, SetUp};
use crate::qp::{Half, QpConfig, QueuePair};
use crate::watch::tell;

/// Label of collectives on the mesh.
const GATHER: u32 = 1;

/// Ranks that a communicator may have.
pub const MAX_RANKS: u32 = 256;

/// The queue pairs of this communicator: what must be told when their peer, or its end, is gone.
type Members = Arc<Mutex<HashMap<QpId, Member>>>;

#[derive(Clone)]
struct Member {
    control: WeakPiece,
    peer: u32,
    label: u32,
    /// The peer's number of its attempt to make the queue pair.
    attempt: u64,
}

/// A collective that has begun: what it has done is not done again when it is called again.
struct Gather {
    bytes: Vec<u8>,
    /// The ranks that were sent these.
    sent: Vec<bool>,
    all: Vec<Option<Vec<u8>>>,
}

/// One rank's view of a job. Calls may be made from any thread; a collective
/// ([`Comm::barrier`], [`Comm::all_gather`]) by one thread of every rank at once.
pub struct Comm {
    // Dropped first: its thread uses `members`. A child says no farewell to the parent's peers.
    mesh: OwnedHere<Mesh>,
    members: Members,
    gather: Mutex<Option<Gather>>,
    context: Context,
}

/// Ends queue pairs. The engine tells the device. If the engine is gone, we do.
fn fail(proxy: &dyn Proxy, members: Vec<(QpId, Member)>, status: Status) {
    for (qp, member) in members {
        if proxy.fail(Some(qp), status).is_err()
            && let Some(control) = member.control.upgrade()
        {
            tell(&control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0], status);
        }
    }
}

/// Those of the members that fit, without the lock.
fn select(members: &Members, fits: impl Fn(&Member) -> bool) -> Vec<(QpId, Member)> {
    let members = members.lock().unwrap_or_else(|e| e.into_inner());
    members.iter().filter(|(_, m)| fits(m)).map(|(qp, m)| (*qp, m.clone())).collect()
}

impl Comm {
    /// `size` ranks of this process on one context.
    pub fn local(context: &Context, size: u32) -> Result<Vec<Comm>> {
        context.here()?;
        check_size(size)?;
        let meshes = Mesh::local(size, context.settings().timeout)?;
        meshes.into_iter().map(|mesh| Comm::new(context.clone(), mesh)).collect()
    }

    /// Rank `rank` of `size`, the others being processes that were given the same
    /// `job`. Without the setting `rendezvous` all are on this host, and no other
    /// job of this host has that name. With it they may be on any, and no other
    /// job has that rendezvous.
    pub fn connect(context: &Context, job: &str, rank: u32, size: u32) -> Result<Comm> {
        context.here()?;
        check_size(size)?;
        if rank >= size {
            return Err(Error::config("rank", rank, format!("0 to {}", size - 1)));
        }
        let s = context.settings();
        let mesh = match s.rendezvous.as_str() {
            "none" => Mesh::connect(job, rank, size, s.timeout)?,
            place => Mesh::connect_tcp(job, rank, size, place, &s.host, s.timeout)?,
        };
        Comm::new(context.clone(), mesh)
    }

    fn new(context: Context, mut mesh: Mesh) -> Result<Comm> {
        let members = Members::default();
        let (told, proxy) = (members.clone(), context.inner.proxy.clone());
        let lost = move |rank| {
            let status = Status { rank: Some(rank), ..Status::new(abi::PUSHGATE_PEER_LOST) };
            fail(&*proxy, select(&told, |_| true), status);
        };
        let (told, proxy) = (members.clone(), context.inner.proxy.clone());
        let ended = move |Ended { rank, label, attempt, status }| {
            let it = |m: &Member| (m.peer, m.label, m.attempt) == (rank, label, attempt);
            fail(&*proxy, select(&told, it), status);
        };
        mesh.listen(Events { lost: Box::new(lost), ended: Box::new(ended) })?;
        Ok(Comm { mesh: OwnedHere::new(mesh), members, gather: Mutex::default(), context })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.mesh.rank
    }

    /// Ranks in all.
    pub fn size(&self) -> u32 {
        self.mesh.size
    }

    /// The device and engine that it uses.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Makes a queue pair with `peer`, which calls this too, with the same label
    /// (below 2^24) and its own rank's sizes. Different queue pairs of two ranks
    /// have different labels. Returns when both know each other.
    ///
    /// After an error either rank may call it again while the other still waits. An attempt
    /// that the peer gave up behind this rank's join ends the queue pair with *aborted*.
    pub fn queue_pair(&self, peer: u32, label: u32, config: QpConfig) -> Result<QueuePair> {
        Ok(self.queue_pairs(&[(peer, label)], config)?.pop().expect("one was asked for"))
    }

    /// Several at once: all of one step goes out before the first answer to it is waited
    /// for, so rings and meshes of queue pairs come up whatever the order.
    pub fn queue_pairs(&self, ends: &[(u32, u32)], config: QpConfig) -> Result<Vec<QueuePair>> {
        self.mesh.here()?;
        let mut halves = Vec::with_capacity(ends.len());
        for &(peer, label) in ends {
            if peer >= self.size() || peer == self.rank() {
                return Err(Error::config("peer", peer, format!("another rank of 0 to {}", self.size() - 1)));
            }
            if label >= 1 << 24 {
                return Err(Error::config("label", label, "0 to 16777215"));
            }
            let set_up = self.mesh.set_up(peer, QUEUE_PAIRS + label);
            halves.push(Half::offer(&self.context, set_up, config)?);
        }
        for half in &mut halves {
            half.take_offer()?;
        }
        let mut accepted = Vec::with_capacity(ends.len());
        for half in halves {
            accepted.push(half.accept(&self.context)?);
        }
        let mut joined = Vec::with_capacity(ends.len());
        for end in accepted {
            let (qp, set_up) = end.join(&self.context)?;
            let (label, attempt) = set_up.peers();
            let member = Member { control: qp.control().downgrade(), peer: qp.peer(), label, attempt };
            let mut members = self.members.lock().unwrap_or_else(|e| e.into_inner());
            members.retain(|_, m| m.control.is_alive());
            members.insert(qp.id(), member.clone());
            drop(members);
            joined.push((qp, member, set_up));
        }
        // A rank lost meanwhile has told only those that were members then.
        if let Some(rank) = self.mesh.lost() {
            return Err(Error::PeerLost { rank });
        }
        // All or none: until here an error ends the peers' ends too.
        let keep = |(qp, member, set_up): (QueuePair, Member, SetUp<'_>)| {
            if let Some(status) = set_up.joined() {
                fail(&*self.context.inner.proxy, vec![(qp.id(), member)], status);
            }
            qp
        };
        Ok(joined.into_iter().map(keep).collect())
    }

    /// Every rank's bytes, in the order of ranks; at most 2^24 - 4 of each. A collective.
    ///
    /// After *timed out* it may be called again, with the same bytes: it goes on where it
    /// was. Until it has succeeded, other bytes are refused where a rank may have those of
    /// before. After any other error it begins anew.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.mesh.here()?;
        let mut begun = self.gather.lock().unwrap_or_else(|e| e.into_inner());
        // One of which nothing has gone out or come in is as good as not begun: this rank's bytes are all there is.
        let pristine = |g: &mut Gather| !g.sent.contains(&true) && g.all.iter().flatten().count() == 1;
        begun.take_if(pristine);
        let done = self.go_on(&mut begun, bytes);
        if !matches!(done, Err(Error::TimedOut { .. } | Error::Config { .. })) {
            *begun = None;
        }
        done
    }

    /// Goes on with the collective that has begun, or begins one.
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

    /// Returns when every rank has called it. A collective; after *timed out* it may be
    /// called again.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Ends all queue pairs of this rank with *aborted*, here and at their peers.
    /// For a rank that gives up: without it the others would wait to their limits.
    /// Does nothing in a child of `fork`.
    pub fn abort(&self) {
        if self.mesh.here().is_err() {
            return;
        }
        let status = Status { rank: Some(self.rank()), ..Status::new(abi::PUSHGATE_ABORTED) };
        let members = self.members.lock().unwrap_or_else(|e| e.into_inner());
        for qp in members.keys() {
            // An engine that is gone has told them already.
            let _ = self.context.inner.proxy.fail(Some(*qp), status);
        }
    }

    /// `Err` once a rank has been lost.
    pub fn check(&self) -> Result<()> {
        self.mesh.here()?.lost().map_or(Ok(()), |rank| Err(Error::PeerLost { rank }))
    }
}

fn check_size(size: u32) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::config("ranks", size, format!("1 to {MAX_RANKS}")));
    }
    Ok(())
}
