//! What takes long of the next link over RDMA: the old link's objects go, new ones are made, and the queue pair gets ready to
//! receive. All of it happens beside the engine, for each step is one or more calls of the kernel.
//!
//! The memory stays where it is, for devices have it mapped; it is registered again, so no key of an earlier link is good for
//! anything. (Where queue pairs share a protection domain, another queue pair may keep a region registered.)

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_link::memory::Words;
use pushgate_link::region::RegionMemory;
use pushgate_rdma_core_sys as sys;
use serde::{Deserialize, Serialize};

use super::VerbsError;
use super::cm::{CmOffer, Connection, Listening};
use super::config::sources;
use super::device::Device;
use super::gid::{GidEntry, OwnAddress};
use super::inbox::{InboxLayout, OF_DEVICE, REGION_WORDS, clear};
use super::objects::{Mr, Pd, REMOTE_WRITE, Rc, SEND_ONLY};
use super::offer::{Offer, Places};
use super::sending::Source;
use super::setup::{OwnEnd, register_inbound, register_outbox};
use super::states::{PeerQp, first_packet};

/// How long an attempt to connect the next link through rdma_cm may take; another attempt follows.
const RECONNECT: std::time::Duration = std::time::Duration::from_secs(5);

/// What an end tells the peer of its next link.
#[derive(Serialize, Deserialize)]
pub(super) struct NextOffer {
    pub(super) offer: Offer,
    /// Entries of the peer's table of this end's regions, with the keys of the next link.
    pub(super) regions: Vec<[u64; REGION_WORDS]>,
}

/// A region of this end as it is registered for each link.
#[derive(Clone)]
pub(super) struct Region {
    pub(super) key: u32,
    pub(super) memory: RegionMemory,
    pub(super) bytes: u64,
}

impl Region {
    /// Its address as the device names it, and the flags of its entry.
    pub(super) fn place(&self) -> (u64, u64) {
        match &self.memory {
            RegionMemory::Host { address, .. } => (*address as u64, 0),
            RegionMemory::Device { address, .. } => (*address, OF_DEVICE),
        }
    }

    /// The registration of it, that of another queue pair where the domain is shared; `None` for memory that no RDMA device
    /// reaches. `written`: the peer's device may write there.
    pub(super) fn register_once(&self, pd: &Arc<Pd>, written: bool) -> Registration {
        pd.once((self.place(), self.bytes, written), || self.register(pd, written))
    }

    fn register(&self, pd: &Arc<Pd>, written: bool) -> Result<Option<Mr>, VerbsError> {
        let access = if written { REMOTE_WRITE } else { SEND_ONLY };
        let bytes = self.bytes as usize;
        match &self.memory {
            // SAFETY: a caller that adds a region promises that it stays mapped and free of
            // references until it is removed, which drops the registration.
            RegionMemory::Host { address, .. } => unsafe { Mr::new(pd, "a region", *address, bytes, access) },
            RegionMemory::Device { address, exported: Some(exported) } => {
                // SAFETY: as above, of the device's memory.
                unsafe { Mr::of_device(pd, *address, bytes, exported, access) }
            }
            // A copy engine brings it there.
            RegionMemory::Device { exported: None, .. } => return Ok(None),
        }
        .map(Some)
    }

    /// Its entry of the peer's table, with the key of a registration.
    pub(super) fn entry(&self, rkey: u32) -> [u64; REGION_WORDS] {
        let (id, (address, flags)) = (self.key as u64, self.place());
        [id | flags, address, self.bytes, id << 32 | rkey as u64]
    }
}

/// What came of registering a region for a link; `None`: no RDMA device reaches its memory.
pub(super) type Registration = Result<Option<Arc<Mr>>, VerbsError>;

/// The registrations of a link's own memory.
pub(super) struct Registered {
    pub(super) window: Mr,
    pub(super) outbox: Mr,
    pub(super) mirror: Mr,
    pub(super) inbox: Mr,
}

/// The objects of a link. Dropping them destroys the queue pair, then takes the registrations back.
pub(super) struct Objects {
    pub(super) rc: Option<Rc>,
    pub(super) _connection: Option<Connection>,
    pub(super) _registered: Option<Registered>,
    pub(super) regions: BTreeMap<u32, Arc<Mr>>,
}

/// The memory of an end, which outlives its links.
pub(super) struct Kept {
    pub(super) end: OwnEnd,
    pub(super) source: Source,
    pub(super) outbox: Arc<SharedMemory>,
    pub(super) mirror: Arc<SharedMemory>,
    pub(super) inbox: Arc<SharedMemory>,
    pub(super) regions_written: bool,
}

/// The next link, with its queue pair in INIT or a later state.
pub(super) struct Made {
    // The queue pair goes before the registrations.
    pub(super) listening: Option<Listening>,
    pub(super) rc: Rc,
    pub(super) connection: Option<Connection>,
    pub(super) registered: Registered,
    pub(super) regions: BTreeMap<u32, Arc<Mr>>,
    pub(super) sources: Vec<OwnAddress>,
    /// The one that packets carry.
    pub(super) gid: GidEntry,
    pub(super) psn: u32,
}

impl Made {
    /// Where this end listens to rdma_cm.
    pub(super) fn told(&self) -> Option<CmOffer> {
        self.listening.as_ref().map(|listening| listening.told)
    }

    /// Whether a link that nobody has used is as good as one made now.
    fn is_good(&self) -> bool {
        let device = &self.rc.pd.device;
        device.as_now().is_ok_and(|now| Arc::ptr_eq(&now, device))
            && device.query_port().is_ok_and(|port| port == self.rc.port)
            && device.has_all(&self.sources)
    }

    pub(super) fn into_objects(self) -> Objects {
        Objects {
            rc: Some(self.rc),
            _connection: self.connection,
            _registered: Some(self.registered),
            regions: self.regions,
        }
    }

    /// Where the peer may write.
    pub(super) fn places(&self, kept: &Kept) -> Places {
        let address = |m: &SharedMemory| m.as_ptr().as_ptr() as u64;
        Places {
            mirror: address(&kept.mirror),
            mirror_key: self.registered.mirror.rkey,
            inbox: address(&kept.inbox),
            inbox_key: self.registered.inbox.rkey,
        }
    }
}

/// What an earlier link leaves.
pub(super) struct Clear {
    /// The objects of the link that broke, and of an attempt that was given up.
    pub(super) old: Vec<Objects>,
    /// A region that is being registered for the link that broke.
    pub(super) registering: Option<Receiver<Registration>>,
    /// Set once the old queue pairs are destroyed.
    pub(super) cleared: Arc<AtomicBool>,
    pub(super) inbox: (Words, InboxLayout),
}

impl Clear {
    /// Lets the old objects go.
    pub(super) fn clear(self) {
        let Clear { mut old, registering, cleared, inbox } = self;
        // First: nothing of an earlier link may touch the memory once the peer hears of this one. What stays registered the
        // link's peer does not reach without a queue pair, and taking registrations back lasts longer the more they are.
        old.iter_mut().for_each(|objects| objects.rc = None);
        clear(&inbox.0, &inbox.1);
        cleared.store(true, Ordering::Release);
        drop(registering.map(|registering| registering.recv()));
    }
}

/// What the making of a link begins with.
pub(super) struct Begin {
    pub(super) kept: Arc<Kept>,
    pub(super) device: Arc<Device>,
    /// Those of the link that broke.
    pub(super) sources: Vec<OwnAddress>,
    /// A link that was made, and that the peer has not got ready for.
    pub(super) unused: Option<Made>,
    pub(super) regions: Vec<Region>,
    /// Nobody waits for the link any more.
    pub(super) cancelled: Arc<AtomicBool>,
}

impl Begin {
    /// Makes the link.
    pub(super) fn make(self) -> Result<Made, VerbsError> {
        let Begin { kept, device, sources: before, unused, regions, cancelled } = self;
        let unused = unused.filter(Made::is_good);
        let mut made = unused.map_or_else(|| Self::anew(&kept, &device, before), Ok)?;
        for region in &regions {
            // Relaxed: the flag orders no other memory.
            if cancelled.load(Ordering::Relaxed) {
                break;
            }
            if !made.regions.contains_key(&region.key)
                && let Some(mr) = region.register_once(&made.rc.pd, kept.regions_written)?
            {
                made.regions.insert(region.key, mr);
            }
        }
        Ok(made)
    }

    /// Makes a link, on which no regions are registered.
    fn anew(kept: &Kept, device: &Arc<Device>, before: Vec<OwnAddress>) -> Result<Made, VerbsError> {
        let device = device.as_now()?;
        // A look at a few entries: the whole table takes hundreds of files.
        let sources = if device.has_all(&before) { before } else { sources(&device, &kept.end.config)? };
        let gid = sources[0].entry.clone();
        let psn = first_packet();
        let rc = kept.end.queue_pair(&device)?;
        let pd = &rc.pd;
        let outbox = register_outbox(pd, &kept.outbox)?;
        let [mirror, inbox] = register_inbound(pd, &kept.mirror, &kept.inbox)?;
        let registered = Registered { window: kept.source.register(pd)?, outbox, mirror, inbox };
        kept.end.states(&rc, &gid, psn).initialise(device.kind.access())?;
        let listening = kept.end.listen(&device, &gid)?;
        let regions = BTreeMap::new();
        Ok(Made { listening, rc, connection: None, registered, regions, sources, gid, psn })
    }
}

/// What getting ready to receive takes.
pub(super) struct Ready {
    pub(super) kept: Arc<Kept>,
    pub(super) made: Made,
    pub(super) remote: PeerQp,
    /// As an `ibv_mtu`.
    pub(super) mtu: u32,
    /// Where the peer listens to rdma_cm, and whether this end connects.
    pub(super) cm: Option<(CmOffer, bool)>,
    /// Receives that the peer may count on.
    pub(super) receives: u32,
}

impl Ready {
    /// Posts the receives and moves the queue pair to RTR, then to RTS. The objects come back though that failed.
    pub(super) fn make(self) -> (Made, Result<(), VerbsError>) {
        let Ready { kept, mut made, remote, mtu, receives, cm } = self;
        let posted = made.rc.post_receives(receives).map_err(|error| VerbsError::Call {
            what: "posting receives".into(),
            error,
            remedy: String::new(),
        });
        let mtu = sys::ibv_mtu(mtu);
        let ready = posted.and_then(|()| match (made.listening.take(), cm) {
            (Some(listening), Some((peer, connects))) => {
                let (config, never) = (&kept.end.config, AtomicBool::new(false));
                let lent = made.rc.lend();
                let connection =
                    listening.connect(peer, connects, &lent, (config, mtu), &never, RECONNECT)?;
                made.connection = Some(connection);
                Ok(())
            }
            // It may send, which it does when the peer is ready too: no step to the device is left for the engine then.
            _ => {
                let states = kept.end.states(&made.rc, &made.gid, made.psn);
                states.ready_to_receive(&remote, mtu).and_then(|()| states.ready_to_send())
            }
        });
        (made, ready)
    }
}
