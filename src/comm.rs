//! A communicator: the ranks of a job, and the queue pairs between them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::window::WeakPiece;
use pushgate_proxy::engine::QpId;
use pushgate_proxy::session::Status;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::qp::{Half, QpConfig, QueuePair};
use crate::watch::tell;

/// Labels of the mesh: collectives, then queue pairs by their own label.
const GATHER: u32 = 1;
const QP_BASE: u32 = 16;

/// Ranks that a communicator may have.
pub const MAX_RANKS: u32 = 256;

/// What must be told when a rank is lost: the queue pairs of this communicator.
type Members = Arc<Mutex<HashMap<QpId, WeakPiece>>>;

/// One rank's view of a job. Calls may be made from any thread; a collective
/// ([`Comm::barrier`], [`Comm::all_gather`]) by one thread of every rank at once.
pub struct Comm {
    // Dropped first: its thread uses `members`. A child says no farewell to the parent's peers.
    mesh: OwnedHere<Mesh>,
    members: Members,
    context: Context,
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
        mesh.listen(Box::new(move |rank| {
            let status = Status { rank: Some(rank), ..Status::new(abi::PUSHGATE_PEER_LOST) };
            let all: Vec<_> =
                told.lock().unwrap_or_else(|e| e.into_inner()).iter().map(|(q, c)| (*q, c.clone())).collect();
            for (qp, control) in all {
                // The engine tells the device. If the engine is gone, we do.
                if proxy.fail(Some(qp), status).is_err()
                    && let Some(control) = control.upgrade()
                {
                    tell(&control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0], status);
                }
            }
        }))?;
        Ok(Comm { mesh: OwnedHere::new(mesh), members, context })
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
    pub fn queue_pair(&self, peer: u32, label: u32, config: QpConfig) -> Result<QueuePair> {
        Ok(self.queue_pairs(&[(peer, label)], config)?.pop().expect("one was asked for"))
    }

    /// Several at once: all offers go out before the first answer is waited for,
    /// so rings and meshes of queue pairs come up whatever the order.
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
            let label = QP_BASE + label;
            halves.push((peer, label, Half::offer(&self.context, &self.mesh, peer, label, config)?));
        }
        let mut accepted = Vec::with_capacity(ends.len());
        for (peer, label, half) in halves {
            accepted.push((peer, label, half.accept(&self.context, &self.mesh, peer, label)?));
        }
        let mut qps = Vec::with_capacity(ends.len());
        for (peer, label, end) in accepted {
            let qp = end.join(&self.context, &self.mesh, peer, label)?;
            let mut members = self.members.lock().unwrap_or_else(|e| e.into_inner());
            members.retain(|_, control| control.is_alive());
            members.insert(qp.id(), qp.control().downgrade());
            qps.push(qp);
        }
        // A rank lost meanwhile has told only those that were members then.
        match self.mesh.lost() {
            Some(rank) => Err(Error::PeerLost { rank }),
            None => Ok(qps),
        }
    }

    /// Every rank's bytes, in the order of ranks. A collective.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.mesh.here()?;
        let others = || (0..self.size()).filter(|r| *r != self.rank());
        for rank in others() {
            self.mesh.send(rank, GATHER, bytes, &[])?;
        }
        let mut all = vec![Vec::new(); self.size() as usize];
        all[self.rank() as usize] = bytes.to_vec();
        for rank in others() {
            all[rank as usize] = self.mesh.recv(rank, GATHER)?.0;
        }
        Ok(all)
    }

    /// Returns when every rank has called it. A collective.
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
