//! A simulated RDMA device of the tests and of the simulator. Its reliable connections carry RDMA WRITEs between queue
//! pairs of this process.
//!
//! A WRITE is cut into pieces. The caller places the pieces of all WRITEs under way in any order
//! ([`Sim::place`]), as a device with out-of-order placement may, and completes the WRITEs of a
//! queue pair in the order of their posting ([`Sim::complete`]). A completion, of a send or of a
//! receive, comes when all pieces of its WRITE and of the WRITEs before it are placed. On a device that speaks iWARP a WRITE
//! completes while it may still be placed, and a READ when all WRITEs before it are placed. A queue pair
//! in the error state goes on reading and writing until it is drained ([`Sim::drain`]): the work
//! requests whose completions have not come yet may be under way at such a device. What had reached a queue pair before its
//! error state may be placed until the queue pair is destroyed: a WRITE that arrives consumes no request that would be flushed.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::net::Ipv6Addr;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate_rdma_core_sys::*;

use super::device::Device;
use super::firmware;
use super::kinds::{Kind, Protocol};
use super::mock::{self, Mock};
use super::profiles::{InError, Managed, Profile};

/// Bytes of a piece of a short WRITE, and of a long one.
const WORD: usize = 8;
const PACKET: usize = 256;
/// `EINVAL`.
const INVALID: c_int = 22;
/// What is only sent from.
const NO_ACCESS: ibv_access_flags = ibv_access_flags(0);

/// One WRITE under way, or a READ of a few bytes.
struct Write {
    id: u64,
    signaled: bool,
    imm: Option<u32>,
    /// Its bytes, if it was posted inline.
    inline: Option<Vec<u8>>,
    from: u64,
    lkey: u32,
    to: u64,
    rkey: u32,
    /// The length of a READ in bytes, from `to` to `from`; `None` for a WRITE.
    read: Option<u64>,
    /// Its completion has come, and it is still to be placed.
    completed: bool,
    /// What is not placed yet.
    pieces: Vec<Range<usize>>,
}

/// A piece of a WRITE that has reached a queue pair which came to the error state then.
struct Late {
    to: u64,
    rkey: u32,
    bytes: Vec<u8>,
}

/// The LID, the MTU as an `ibv_mtu`, and the address of a port; `None`: any.
#[derive(Clone, Copy, Default)]
struct Port {
    lid: Option<u16>,
    mtu: Option<u32>,
    gid: Option<[u8; 16]>,
}

#[derive(Default)]
struct Qp {
    peer: u32,
    /// The port as it was when the queue pair was made.
    port: Port,
    /// Where its packets go, and how long they are, as an `ibv_mtu`.
    lid: u16,
    gid: Option<[u8; 16]>,
    /// The address that its packets carry.
    from: Option<[u8; 16]>,
    mtu: u32,
    /// The place of its partition's key, and its service level.
    pkey: u16,
    level: u8,
    error: bool,
    ready: bool,
    cq: usize,
    sends: VecDeque<Write>,
    receives: VecDeque<u64>,
    late: Vec<Late>,
}

#[derive(Default)]
pub(super) struct Nic {
    in_error: InError,
    next: u32,
    qps: BTreeMap<u32, Qp>,
    cqs: BTreeMap<usize, VecDeque<ibv_wc>>,
    /// Address and bytes of what is registered, and what may be done to it, by its key.
    memory: BTreeMap<u32, (u64, u64, u32)>,
    /// A WRITE completes before it is placed, as one may over iWARP.
    early: bool,
    /// Nobody answers: nothing is placed, nothing completes.
    silent: bool,
    /// WRITEs that have completed without an error.
    completions: u64,
    /// Every WRITE is carried out as soon as it is posted.
    prompt: bool,
    /// A queue pair in the error state completes all of its work requests at once.
    drains: bool,
    /// A WRITE to memory that is not registered ends with an error, as at a real device. Else it is a failed test.
    refuses: bool,
    /// The port is down, as a look at it tells.
    down: bool,
    /// What the port has been given since it was opened.
    port: Port,
    /// How often the port changes yet when a queue pair comes to the error state, if it is one that changes: those that are there go
    /// on with the port as it was.
    changes: Option<u32>,
    /// Where the port's folder is, if its address changes too.
    moves: Option<PathBuf>,
    /// What a subnet manager asks for.
    managed: Option<Managed>,
    /// The addresses of each context's port, by their places. No router is between subnets of 24 bits of IPv4.
    tables: BTreeMap<usize, Vec<(u32, [u8; 16])>>,
    /// Addresses at which the CPU finds nothing, as those of a GPU's memory, by what names them: the device reads there, and its
    /// provider may not.
    of_devices: BTreeMap<usize, Range<u64>>,
}

/// The device's state that backs a context. It is never freed: a queue pair may outlive its device's [`Sim`].
fn nic(context: *mut ibv_context) -> MutexGuard<'static, Nic> {
    // SAFETY: `Sim::new` has put it there.
    let nic: &'static Mutex<Nic> = unsafe { &*mock::own(context).cast() };
    nic.lock().unwrap_or_else(|e| e.into_inner())
}

fn with<T>(context: *mut ibv_context, act: impl FnOnce(&mut Nic) -> T) -> T {
    act(&mut nic(context))
}

/// An address of the network.
fn of_subnet(number: u128) -> Ipv6Addr {
    (mock::SUBNET.to_bits() + number).into()
}

fn wc(wr_id: u64, status: ibv_wc_status) -> ibv_wc {
    ibv_wc { wr_id, status, ..Default::default() }
}

impl Write {
    /// The bytes of a piece, whose source is registered, or was when the WRITE left.
    fn bytes(&self, piece: usize) -> Vec<u8> {
        let piece = self.pieces[piece].clone();
        match &self.inline {
            Some(bytes) => bytes[piece].into(),
            None => {
                let mut bytes = vec![0; piece.len()];
                let from = (self.from as usize + piece.start) as *const u8;
                // SAFETY: the source is registered, which its owner may do only with memory that is there; the code under test
                // writes there as a program that breaks its own message may.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
                bytes
            }
        }
    }
}

/// Places bytes in registered memory.
fn put(to: u64, bytes: &[u8]) {
    if let Ok(word) = bytes.try_into().map(u64::from_ne_bytes)
        && to.is_multiple_of(8)
    {
        // SAFETY: registered, which its owner may do only with memory that is there, and aligned. The code under test reads
        // such words as atomics.
        unsafe { AtomicU64::from_ptr(to as *mut u64) }.store(word, Ordering::Release);
    } else {
        // SAFETY: as above; the code under test holds no references there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
    }
}

impl Nic {
    /// A queue pair comes to the error state. What the other end has posted is on its way to it.
    fn fall(&mut self, number: u32) {
        let qp = &self.qps[&number];
        let mut late = Vec::new();
        if !qp.error && self.answers(qp.peer) {
            for w in &self.qps[&qp.peer].sends {
                let rkey = w.rkey;
                let pieces = (0..w.pieces.len())
                    .filter(|i| {
                        let (from, n) = (w.from + w.pieces[*i].start as u64, w.pieces[*i].len() as u64);
                        w.inline.is_some() || self.registered(w.lkey, from, n, NO_ACCESS)
                    })
                    .map(|i| Late { to: w.to + w.pieces[i].start as u64, rkey, bytes: w.bytes(i) });
                late.extend(pieces);
            }
        }
        let qp = self.qps.get_mut(&number).expect("it is there");
        let fell = !std::mem::replace(&mut qp.error, true);
        qp.late.append(&mut late);
        if fell {
            self.change();
        }
    }

    /// The port gets another LID, MTU and address, where it is one that changes.
    fn change(&mut self) {
        let Some(left) = self.changes.as_mut().filter(|left| **left > 0) else { return };
        *left -= 1;
        let lid = self.port.lid.unwrap_or(0) + 1;
        (self.port.lid, self.port.mtu) = (Some(lid), Some(3 + u32::from(lid) % 3));
        let Some(port) = &self.moves else { return };
        let (place, address) = (u32::from(lid), of_subnet(u128::from(lid) + 1));
        mock::has_addresses(port, &[(place, address)]);
        self.port.gid = Some(address.octets());
        // An end may still use what it told the other one of.
        self.tables.values_mut().for_each(|all| all.push((place, address.octets())));
    }

    /// Places a piece of what had reached a queue pair before its error state, chosen by `which`. The queue pair's number,
    /// if there is one.
    fn place_late(&mut self, which: usize) -> Option<u32> {
        let count: usize = self.qps.values().map(|qp| qp.late.len()).sum();
        let mut which = which.checked_rem(count)?;
        for number in self.qps.keys().copied().collect::<Vec<_>>() {
            let qp = self.qps.get_mut(&number).expect("it is there");
            if which < qp.late.len() {
                let Late { to, rkey, bytes } = qp.late.swap_remove(which);
                // A device drops what its owner lets nobody write any more.
                if self.registered(rkey, to, bytes.len() as u64, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE) {
                    put(to, &bytes);
                }
                return Some(number);
            }
            which -= qp.late.len();
        }
        unreachable!("counted above")
    }

    fn push(&mut self, cq: usize, wc: ibv_wc) {
        if let Some(cq) = self.cqs.get_mut(&cq) {
            cq.push_back(wc);
        }
    }

    /// Whether these bytes are registered by the key for all of `access`.
    fn registered(&self, key: u32, address: u64, bytes: u64, access: ibv_access_flags) -> bool {
        let at = self.memory.get(&key);
        at.is_some_and(|(from, n, may)| {
            *from <= address && address + bytes <= from + n && may & access.0 == access.0
        })
    }

    /// True if the WRITEs of this queue pair are carried out.
    fn answers(&self, number: u32) -> bool {
        let Some(qp) = self.qps.get(&number) else { return false };
        let peer = self.qps.get(&qp.peer);
        let port = |peer: &Qp| if self.changes.is_some() { peer.port } else { self.port };
        let leads =
            peer.map(port).is_some_and(|port| {
                port.lid.is_none_or(|lid| lid == qp.lid)
                    && port.mtu.is_none_or(|mtu| qp.mtu <= mtu)
                    && port.gid.is_none_or(|gid| qp.gid.is_none_or(|to| to == gid))
            }) && qp.from.is_none_or(|from| {
                // A queue pair takes packets of the one address that it goes to.
                qp.gid.is_some_and(|to| from[..15] == to[..15]) && peer.is_some_and(|p| p.gid == Some(from))
            }) && self.managed.is_none_or(|managed| managed.carries((qp.pkey, qp.level, qp.gid.is_some())));
        !self.silent && leads && qp.ready && peer.is_some_and(|p| p.peer == number && !p.error)
    }

    /// True if there is something to place or to complete for this queue pair.
    #[cfg(feature = "sim")]
    fn works(&self, number: u32) -> bool {
        let qp = &self.qps[&number];
        self.answers(number) && qp.sends.iter().any(|w| !qp.error || !w.pieces.is_empty())
    }

    /// Places a piece of a WRITE. False if the WRITE was refused.
    fn place(&mut self, number: u32, write: usize, piece: usize) -> bool {
        let w = &self.qps[&number].sends[write];
        let (from, to) = (w.from + w.pieces[piece].start as u64, w.to + w.pieces[piece].start as u64);
        let n = w.pieces[piece].len();
        let rkey = w.rkey;
        if !self.registered(rkey, to, n as u64, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE) {
            assert!(self.refuses, "WRITE {} to {to:#x}, not registered", w.id);
            self.fail(number, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
            return false;
        }
        assert!(
            w.inline.is_some() || self.registered(w.lkey, from, n as u64, NO_ACCESS),
            "the device reads {n} bytes at {from:#x} for WRITE {}, which are not registered any more",
            w.id
        );
        put(to, &w.bytes(piece));
        self.qps.get_mut(&number).expect("it is there").sends[write].pieces.swap_remove(piece);
        self.forget_placed(number);
        true
    }

    /// Drops the oldest WRITEs of a queue pair that have completed and are placed.
    fn forget_placed(&mut self, number: u32) {
        let sends = &mut self.qps.get_mut(&number).expect("it is there").sends;
        while sends.front().is_some_and(|w| w.completed && w.pieces.is_empty()) {
            sends.pop_front();
        }
    }

    /// Immediate data of a queue pair arrive at the other end, if there are any.
    fn deliver(&mut self, number: u32, imm: Option<u32>) {
        let Some(imm) = imm else { return };
        let peer = self.qps[&number].peer;
        let peer = self.qps.get_mut(&peer).expect("it answers");
        let receive = peer.receives.pop_front().expect("P4: a receive for immediate data");
        let mut arrived = wc(receive, ibv_wc_status::IBV_WC_SUCCESS);
        arrived.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
        arrived.__bindgen_anon_1.imm_data = imm;
        let cq = peer.cq;
        self.push(cq, arrived);
    }

    /// Completes the oldest WRITE or READ of a queue pair that has not completed. Before a READ all WRITEs in front of it are placed, and
    /// before immediate data arrive its own WRITE too. False if there is none, or the connection does not work.
    fn complete_early(&mut self, number: u32) -> bool {
        let oldest = |nic: &Nic| nic.qps[&number].sends.iter().position(|w| !w.completed);
        if !self.answers(number) || self.qps[&number].error {
            return false;
        }
        let Some(mut at) = oldest(self) else { return false };
        let (read, imm) = (self.qps[&number].sends[at].read, self.qps[&number].sends[at].imm);
        if read.is_some() || imm.is_some() {
            while let Some(w) = self.qps[&number].sends.iter().take(at + 1).position(|w| !w.pieces.is_empty())
            {
                if !self.place(number, w, 0) {
                    return true;
                }
                at = oldest(self).expect("it has not completed");
            }
        }
        self.deliver(number, imm);
        let w = &self.qps[&number].sends[at];
        if let Some(bytes) = read {
            let (from, to) = (w.from, w.to);
            let readable = self.registered(w.rkey, to, bytes, ibv_access_flags::IBV_ACCESS_REMOTE_READ);
            let writable = self.registered(w.lkey, from, bytes, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE);
            assert!(readable && writable, "READ {} of {to:#x} to {from:#x}, not registered for it", w.id);
            // SAFETY: both are registered; the code under test holds no references there.
            unsafe { std::ptr::copy(to as *const u8, from as *mut u8, bytes as usize) };
        }
        let qp = self.qps.get_mut(&number).expect("it is there");
        let (cq, w) = (qp.cq, &mut qp.sends[at]);
        w.completed = true;
        if w.signaled {
            let done = wc(w.id, ibv_wc_status::IBV_WC_SUCCESS);
            self.push(cq, done);
        }
        self.forget_placed(number);
        self.completions += 1;
        true
    }

    /// Completes the oldest WRITE of a queue pair. False if there is none that can: after a WRITE that failed none
    /// completes, at neither end, though pieces of it may be placed.
    fn complete(&mut self, number: u32) -> bool {
        if self.early {
            return self.complete_early(number);
        }
        let qp = &self.qps[&number];
        if !self.answers(number) || qp.error || qp.sends.is_empty() {
            return false;
        }
        while let Some(last) = self.qps[&number].sends[0].pieces.len().checked_sub(1) {
            if !self.place(number, 0, last) {
                return true;
            }
        }
        let qp = &self.qps[&number];
        if self.refuses && qp.sends[0].imm.is_some() && self.qps[&qp.peer].receives.is_empty() {
            // A liar had promised a receive.
            self.fail(number, ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR);
            return true;
        }
        let qp = self.qps.get_mut(&number).expect("it is there");
        let (w, cq) = (qp.sends.pop_front().expect("it is there"), qp.cq);
        self.deliver(number, w.imm);
        if w.signaled {
            self.push(cq, wc(w.id, ibv_wc_status::IBV_WC_SUCCESS));
        }
        self.completions += 1;
        true
    }

    /// A queue pair fails: its oldest WRITE ends with this.
    fn fail(&mut self, number: u32, status: ibv_wc_status) {
        self.fall(number);
        let qp = self.qps.get_mut(&number).expect("it is there");
        let oldest = qp.sends.iter().position(|w| !w.completed);
        let (cq, oldest) = (qp.cq, oldest.and_then(|oldest| qp.sends.remove(oldest)));
        let first =
            if self.in_error.receives_first { std::mem::take(&mut qp.receives) } else { VecDeque::new() };
        for id in first {
            self.push(cq, wc(id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
        }
        if let Some(oldest) = oldest {
            self.push(cq, wc(oldest.id, status));
        }
        self.react();
    }

    /// Completes all work requests of a queue pair in the error state.
    fn drain(&mut self, number: u32) {
        let qp = self.qps.get_mut(&number).expect("it is there");
        if !qp.error {
            return;
        }
        let cq = qp.cq;
        let sends = qp.sends.drain(..).filter(|w| !w.completed).map(|w| w.id);
        let flushed: Vec<u64> = qp.receives.drain(..).chain(sends).collect();
        for id in flushed {
            self.push(cq, wc(id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
        }
    }

    /// Carries out what is posted as far as `prompt` and `drains` say.
    fn react(&mut self) {
        if !self.prompt && !self.drains {
            return;
        }
        let numbers: Vec<u32> = self.qps.keys().copied().collect();
        for number in numbers {
            while self.prompt && !self.qps[&number].error && self.complete(number) {}
            if self.drains {
                self.drain(number);
            }
        }
    }
}

/// A simulated device.
pub struct Sim {
    /// The device as a link has it.
    pub device: Arc<Device>,
    _mock: Mock,
}

impl Sim {
    /// A device of RoCE.
    #[expect(clippy::new_without_default, reason = "a device has no value that it begins with")]
    pub fn new() -> Self {
        Self::of_kind(Kind::of(Protocol::Ib, 0), |_, _| {})
    }

    /// A device whose port is of InfiniBand and has no network interface.
    pub fn infiniband() -> Self {
        let Sim { device, _mock } = Self::new();
        // The mock has the one handle that is left.
        drop(device);
        let mock = _mock.on_infiniband();
        Sim { device: mock.device.clone(), _mock: mock }
    }

    /// A device of this kind, with other functions in place of some.
    pub(super) fn of_kind(kind: &'static Kind, change: impl FnOnce(&mut Verbs, &mut ibv_context)) -> Self {
        let early = kind.protocol == Protocol::Iwarp;
        let state: &'static Mutex<Nic> = Box::leak(Box::new(Mutex::new(Nic { early, ..Nic::default() })));
        let mut mock = Mock::with_functions((&raw const *state).cast_mut().cast(), kind, |verbs, context| {
            functions(verbs, context);
            change(verbs, context);
        });
        Arc::get_mut(&mut mock.device).expect("nobody has it yet").beside = firmware::beside;
        Sim { device: mock.device.clone(), _mock: mock }
    }

    /// A device that does as an adapter does.
    #[cfg(test)]
    pub(super) fn of_profile(profile: &Profile) -> Self {
        let sim = if profile.managed.is_some() { Self::infiniband() } else { Self::new() };
        sim.is_of(profile);
        sim
    }

    /// From now on the device does as an adapter does. The port is InfiniBand's where the profile has a subnet manager.
    pub fn is_of(&self, profile: &Profile) {
        let (context, port) = (self.device.raw().addr(), self._mock.port());
        if let Some(managed) = profile.managed {
            assert!(!self.device.is_ethernet(), "{}: no subnet manager is on Ethernet", profile.name);
            mock::has_partitions(port, &managed.partitions);
        }
        let (index, own) = (if profile.pods { 4 } else { 0 }, of_subnet(1));
        if profile.pods {
            // Those of other network namespaces come first.
            let others = (0..index).map(|i| (i, of_subnet(2 + u128::from(i))));
            mock::has_addresses(port, &others.chain([(index, own)]).collect::<Vec<_>>());
            mock::has_interface(port, index);
        }
        self.nic(|nic| {
            nic.in_error = profile.in_error;
            nic.managed = profile.managed;
            nic.changes = profile.changes;
            nic.moves = profile.changes.map(|_| port.into());
            if profile.changes.is_some() || profile.pods {
                nic.tables.insert(context, vec![(index, own.octets())]);
            }
        });
    }

    /// The port's address does not change: links that go end their queue pairs.
    #[cfg(feature = "sim")]
    pub fn keeps_its_address(&self) {
        self.nic(|nic| nic.moves = None);
    }

    /// Another device on the same network.
    #[cfg(test)]
    pub(super) fn another(&self) -> Self {
        let state = mock::own(self.device.raw());
        let mock = Mock::with_functions(state, self.device.kind(), functions);
        Sim { device: mock.device.clone(), _mock: mock }
    }

    fn nic<T>(&self, act: impl FnOnce(&mut Nic) -> T) -> T {
        act(&mut nic(self.device.raw()))
    }

    /// A device on which nothing is made: what was there is forgotten.
    #[cfg(feature = "sim")]
    pub fn reset(&self) {
        let before = self.nic(std::mem::take);
        if !before.tables.is_empty() {
            mock::has_addresses(self._mock.port(), &[(0, of_subnet(1))]);
        }
        self.device.looker.reset();
        mock::take();
    }

    /// One event of the device: it places a piece of a WRITE, or completes the oldest WRITE of a queue pair; `number`
    /// chooses. The number of the queue pair that did something, and whether that was a completion.
    #[cfg(feature = "sim")]
    pub fn step(&self, number: u64) -> Option<(u32, bool)> {
        self.nic(|nic| {
            let busy = nic.qps.keys().filter(|q| nic.works(**q)).count();
            if (busy == 0 || number.is_multiple_of(3))
                && let Some(qp) = nic.place_late(number as usize >> 8)
            {
                return Some((qp, false));
            }
            if busy == 0 {
                return None;
            }
            let chosen = (number >> 32) as usize % busy;
            let qp = *nic.qps.keys().filter(|q| nic.works(**q)).nth(chosen).expect("counted above");
            let under_way = nic.qps[&qp].sends.iter().filter(|w| !w.pieces.is_empty()).count();
            // Some completions are early: what is not placed yet is then placed at once.
            if (under_way == 0 || number.is_multiple_of(8)) && nic.complete(qp) {
                return Some((qp, true));
            }
            let chosen = (number >> 8) as usize % under_way;
            let mut all = nic.qps[&qp].sends.iter().enumerate().filter(|(_, w)| !w.pieces.is_empty());
            let (write, pieces) = all.nth(chosen).map(|(i, w)| (i, w.pieces.len())).expect("counted above");
            nic.place(qp, write, (number >> 20) as usize % pieces);
            Some((qp, false))
        })
    }

    /// True if [`Sim::step`] would do something.
    #[cfg(feature = "sim")]
    pub fn is_busy(&self) -> bool {
        self.nic(|nic| nic.qps.iter().any(|(q, qp)| nic.works(*q) || !qp.late.is_empty()))
    }

    /// A peer lies: WRITEs to where nothing is registered are no fault of the code under test any more.
    pub fn refuses(&self) {
        self.nic(|nic| nic.refuses = true);
    }

    /// The queue pair of this number fails by itself: its oldest WRITE ends with an error.
    #[cfg(feature = "sim")]
    pub fn break_down(&self, number: u32) {
        self.nic(|nic| {
            if nic.qps.get(&number).is_some_and(|qp| !qp.error) {
                nic.fail(number, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
            }
        });
    }

    /// The process of the queue pair of this number is gone, and the queue pair with it: the other end gets no answer.
    #[cfg(feature = "sim")]
    pub fn kill(&self, number: u32) {
        self.nic(|nic| {
            if let Some(qp) = nic.qps.get_mut(&number) {
                qp.error = true;
                nic.drain(number);
            }
        });
    }

    /// The CPU finds nothing at these addresses from now on; the device does. Those that had this name before are memory of the host.
    pub fn is_of_device(&self, name: usize, addresses: Range<usize>) {
        let addresses = addresses.start as u64..addresses.end as u64;
        self.nic(|nic| nic.of_devices.insert(name, addresses));
    }

    /// WRITEs that have completed without an error.
    pub fn completions(&self) -> u64 {
        self.nic(|nic| nic.completions)
    }

    /// A look at the port finds it up, or down.
    pub fn port(&self, up: bool) {
        self.nic(|nic| nic.down = !up);
    }

    /// A subnet manager gives the port another LID: nothing reaches the one before.
    #[cfg(test)]
    pub(crate) fn lid(&self, lid: u16) {
        self.nic(|nic| nic.port.lid = Some(lid));
    }

    /// The network takes no packet that is longer than this `ibv_mtu`, as the port says.
    #[cfg(test)]
    pub(crate) fn mtu(&self, mtu: u32) {
        self.nic(|nic| nic.port.mtu = Some(mtu));
    }

    /// The address at index 0 of the port gives way to another one, at this index: nothing reaches the one before.
    #[cfg(test)]
    pub(crate) fn address(&self, index: u32, address: Ipv6Addr) {
        mock::has_addresses(self._mock.port(), &[(index, address)]);
        self.nic(|nic| nic.port.gid = Some(address.octets()));
    }

    /// The port has these addresses, and packets get from them to those of the same subnet alone.
    #[cfg(test)]
    pub(crate) fn addresses(&self, all: &[(u32, Ipv6Addr)]) {
        mock::has_addresses(self._mock.port(), all);
        let context = self.device.raw().addr();
        let table = all.iter().map(|(index, address)| (*index, address.octets())).collect();
        self.nic(|nic| nic.tables.insert(context, table));
    }

    /// The device answers again.
    pub fn speaks(&self) {
        self.nic(|nic| nic.silent = false);
    }

    /// Nobody answers from now on.
    pub fn silence(&self) {
        self.nic(|nic| nic.silent = true);
    }

    /// What is posted is carried out at once, in order.
    pub fn prompt(&self) {
        self.nic(|nic| {
            nic.prompt = true;
            nic.react();
        });
    }

    /// A queue pair in the error state is drained at once.
    pub fn drains(&self) {
        self.nic(|nic| {
            nic.drains = true;
            nic.react();
        });
    }

    /// Places one piece of all that are under way, chosen by `number`. False if there is none.
    pub fn place(&self, number: usize) -> bool {
        self.nic(|nic| {
            let mut writes = Vec::new();
            for (number, qp) in nic.qps.iter().filter(|(number, _)| nic.answers(**number)) {
                let under_way = qp.sends.iter().enumerate().filter(|(_, w)| !w.pieces.is_empty());
                writes.extend(under_way.map(|(i, w)| (*number, i, w.pieces.len())));
            }
            if (writes.is_empty() || number.is_multiple_of(3)) && nic.place_late(number).is_some() {
                return true;
            }
            if writes.is_empty() {
                return false;
            }
            let (qp, write, pieces) = writes[number % writes.len()];
            nic.place(qp, write, (number / writes.len()) % pieces);
            true
        })
    }

    /// Completes the oldest WRITE of a queue pair, chosen by `number`. False if there is none.
    pub fn complete(&self, number: usize) -> bool {
        self.nic(|nic| {
            let numbers: Vec<u32> = nic.qps.keys().copied().collect();
            let n = numbers.len().max(1);
            (0..numbers.len()).any(|i| nic.complete(numbers[(number + i) % n]))
        })
    }

    /// Completes the oldest WRITE of this queue pair. False if there is none that can.
    #[cfg(test)]
    #[inline(never)]
    pub(super) fn complete_of(&self, number: u32) -> bool {
        self.nic(|nic| nic.complete(number))
    }

    /// WRITEs of this queue pair that have not completed.
    #[cfg(test)]
    pub(super) fn under_way(&self, number: u32) -> usize {
        self.nic(|nic| nic.qps[&number].sends.len())
    }

    /// The first queue pair, if there is one, fails by itself: its oldest WRITE ends with an error.
    pub fn break_one(&self) {
        self.nic(|nic| {
            let Some(number) = nic.qps.keys().next().copied() else { return };
            // Over iWARP rdma_cm reports the end of a queue pair that has nothing under way, and there is none here.
            if nic.early && nic.qps[&number].sends.iter().all(|w| w.completed) {
                return;
            }
            nic.fail(number, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
        });
    }

    /// Time passes: the retries of WRITEs that nobody answers are exceeded.
    pub fn expire(&self) {
        self.nic(|nic| {
            let numbers: Vec<u32> = nic.qps.keys().copied().collect();
            for number in numbers {
                if !nic.qps[&number].sends.is_empty() && !nic.qps[&number].error && !nic.answers(number) {
                    nic.fail(number, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
                }
            }
        });
    }

    /// Drains the queue pairs that are in the error state.
    pub fn drain(&self) {
        self.nic(|nic| {
            let numbers: Vec<u32> = nic.qps.keys().copied().collect();
            numbers.into_iter().for_each(|q| nic.drain(q));
        });
    }

    /// Queue pairs that still read or write memory, or may: they are neither destroyed nor drained in the
    /// error state.
    pub(crate) fn working(&self) -> usize {
        self.nic(|nic| nic.qps.values().filter(|qp| !qp.error || !qp.sends.is_empty()).count())
    }

    /// Numbers of the queue pairs that were not destroyed.
    pub fn numbers(&self) -> Vec<u32> {
        self.nic(|nic| nic.qps.keys().copied().collect())
    }

    /// Queue pairs that were not destroyed.
    pub fn queue_pairs(&self) -> usize {
        self.nic(|nic| nic.qps.len())
    }

    /// Registrations that are there.
    pub fn registrations(&self) -> usize {
        self.nic(|nic| nic.memory.len())
    }
}

/// The functions of a simulated device.
fn functions(verbs: &mut Verbs, context: &mut ibv_context) {
    context.ops.poll_cq = Some(poll_cq);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    verbs.ibv_reg_mr = Ok(reg_mr);
    verbs.ibv_dereg_mr = Ok(dereg_mr);
    verbs.ibv_create_cq = Ok(create_cq);
    verbs.ibv_destroy_cq = Ok(destroy_cq);
    verbs.ibv_create_qp = Ok(create_qp);
    verbs.ibv_destroy_qp = Ok(destroy_qp);
    verbs.ibv_modify_qp = Ok(modify_qp);
    verbs.ibv_query_port = Ok(query_port);
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    firmware::command();
    // SAFETY: the domain is the caller's.
    let context = unsafe { (*pd).context };
    let key = with(context, |nic| {
        nic.next += 1;
        nic.memory.insert(nic.next, (address as u64, length as u64, access as u32));
        nic.next
    });
    Box::into_raw(Box::new(ibv_mr { context, lkey: key, rkey: key, ..Default::default() }))
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    firmware::command();
    // SAFETY: made by `reg_mr`, and deregistered once.
    let mr = unsafe { Box::from_raw(mr) };
    with(mr.context, |nic| nic.memory.remove(&mr.lkey));
    0
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let cq = Box::into_raw(Box::new(ibv_cq { context, ..Default::default() }));
    with(context, |nic| nic.cqs.insert(cq.addr(), VecDeque::new()));
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made by `create_cq`, and destroyed once.
    let context = unsafe { Box::from_raw(cq) }.context;
    with(context, |nic| nic.cqs.remove(&cq.addr()));
    0
}

pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    firmware::command();
    // SAFETY: the domain and the attributes are the caller's.
    let (context, cq) = unsafe { ((*pd).context, (*init).send_cq) };
    let number = with(context, |nic| {
        nic.next += 1;
        nic.qps.insert(nic.next, Qp { cq: cq.addr(), port: nic.port, ..Qp::default() });
        nic.next
    });
    Box::into_raw(Box::new(ibv_qp { context, qp_num: number, ..Default::default() }))
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    firmware::command();
    // SAFETY: made by `create_qp`, and destroyed once.
    let qp = unsafe { Box::from_raw(qp) };
    with(qp.context, |nic| nic.qps.remove(&qp.qp_num));
    0
}

pub(super) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    firmware::command();
    // SAFETY: the queue pair is there, the attributes are the caller's.
    let (context, number, a) = unsafe { ((*qp).context, (*qp).qp_num, *attr) };
    with(context, |nic| {
        let table = nic.tables.get(&context.addr());
        let qp = nic.qps.get_mut(&number).expect("it is there");
        match a.qp_state {
            ibv_qp_state::IBV_QPS_INIT => qp.pkey = a.pkey_index,
            ibv_qp_state::IBV_QPS_RTR => {
                (qp.peer, qp.lid, qp.mtu) = (a.dest_qp_num, a.ah_attr.dlid, a.path_mtu.0);
                qp.level = a.ah_attr.sl;
                // SAFETY: any bytes are an address.
                let to = unsafe { a.ah_attr.grh.dgid.raw };
                qp.gid = (a.ah_attr.is_global != 0).then_some(to);
                let place = u32::from(a.ah_attr.grh.sgid_index);
                let of = |all: &Vec<(u32, [u8; 16])>| all.iter().find(|one| one.0 == place).map(|one| one.1);
                // Nothing answers an address that is another one's.
                qp.from = table.map(|all| of(all).unwrap_or([0xff; 16]));
            }
            ibv_qp_state::IBV_QPS_RTS => qp.ready = true,
            ibv_qp_state::IBV_QPS_ERR => {
                nic.fall(number);
                nic.react();
            }
            _ => {}
        }
    });
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promises are the same.
    let result = unsafe { mock::query_port(context, port, attr) };
    // SAFETY: the caller's attributes begin as those of this type do.
    let a = unsafe { &mut *attr.cast::<ibv_port_attr>() };
    with(context, |nic| {
        if nic.down {
            a.state = ibv_port_state::IBV_PORT_DOWN;
        }
        a.lid = nic.port.lid.unwrap_or(a.lid);
        a.active_mtu = nic.port.mtu.map_or(a.active_mtu, ibv_mtu);
        a.flags |= nic.managed.map_or(0, |managed| managed.global.into());
    });
    result
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the queue pair is there.
    let (context, number) = unsafe { ((*qp).context, (*qp).qp_num) };
    with(context, |nic| {
        let (qp, rules) = (&nic.qps[&number], nic.in_error);
        if qp.error && rules.refuses {
            return INVALID;
        }
        if qp.error && rules.drops && !qp.sends.is_empty() {
            return 0;
        }
        while !wr.is_null() {
            // SAFETY: a list of requests, RDMA WRITEs and READs with one source at most.
            let (r, source) = unsafe { (*wr, (*wr).sg_list.as_ref().copied().unwrap_or_default()) };
            let imm = match r.opcode {
                ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_READ => None,
                // SAFETY: what the opcode says.
                ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => Some(unsafe { r.__bindgen_anon_1.imm_data }),
                _ => return INVALID,
            };
            let bytes = if r.num_sge == 0 { 0 } else { source.length as usize };
            let inline = r.send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0 && bytes > 0;
            // As libmlx5's memcpy out of the source would.
            let faults = nic.of_devices.values().any(|memory| memory.contains(&source.addr));
            assert!(
                !(inline && faults),
                "SIGSEGV: {bytes} bytes of a device's memory were to be sent inline"
            );
            let inline = inline
                // SAFETY: an inline request's bytes are there until the call returns.
                .then(|| unsafe { std::slice::from_raw_parts(source.addr as *const u8, bytes) }.to_vec());
            let read = (r.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ).then_some(bytes as u64);
            let placed = if read.is_some() { 0 } else { bytes };
            let step = if bytes <= PACKET { WORD } else { PACKET };
            // SAFETY: what the opcode says.
            let rdma = unsafe { r.wr.rdma };
            nic.qps.get_mut(&number).expect("it is there").sends.push_back(Write {
                id: r.wr_id,
                signaled: r.send_flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0,
                imm,
                inline,
                from: source.addr,
                lkey: source.lkey,
                to: rdma.remote_addr,
                rkey: rdma.rkey,
                read,
                completed: false,
                pieces: (0..placed).step_by(step).map(|at| at..bytes.min(at + step)).collect(),
            });
            wr = r.next;
        }
        nic.react();
        0
    })
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue pair and the request are there.
    let (context, number, id) = unsafe { ((*qp).context, (*qp).qp_num, (*wr).wr_id) };
    with(context, |nic| {
        let rules = nic.in_error;
        let qp = nic.qps.get_mut(&number).expect("it is there");
        if qp.error && rules.refuses {
            return INVALID;
        }
        if !(qp.error && rules.drops && !qp.receives.is_empty()) {
            qp.receives.push_back(id);
        }
        0
    })
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: the CQ is there.
    let context = unsafe { (*cq).context };
    with(context, |nic| {
        let all = nic.cqs.get_mut(&cq.addr()).expect("it is there");
        let n = all.len().min(room as usize);
        for (i, wc) in all.drain(..n).enumerate() {
            // SAFETY: the caller has so much room.
            unsafe { to.add(i).write(wc) };
        }
        n as c_int
    })
}
