//! A simulated RDMA device of the tests. Its reliable connections carry RDMA WRITEs between queue
//! pairs of this process.
//!
//! A WRITE is cut into pieces. The test places the pieces of all WRITEs under way in any order
//! ([`Sim::place`]), as a device with out-of-order placement may, and completes the WRITEs of a
//! queue pair in the order of their posting ([`Sim::complete`]). A completion, of a send or of a
//! receive, comes when all pieces of its WRITE and of the WRITEs before it are placed. A queue pair
//! in the error state goes on reading and writing until it is drained ([`Sim::drain`]): the work
//! requests whose completions have not come yet may be under way at such a device.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate_rdma_core_sys::*;

use super::device::Device;
use super::mock::Mock;

/// Bytes of a piece of a short WRITE, and of a long one.
const WORD: usize = 8;
const PACKET: usize = 256;
/// `EINVAL`.
const INVALID: c_int = 22;

/// One WRITE under way.
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
    /// What is not placed yet.
    pieces: Vec<Range<usize>>,
}

#[derive(Default)]
struct Qp {
    peer: u32,
    error: bool,
    ready: bool,
    cq: usize,
    sends: VecDeque<Write>,
    receives: VecDeque<u64>,
}

#[derive(Default)]
struct Nic {
    next: u32,
    qps: BTreeMap<u32, Qp>,
    cqs: BTreeMap<usize, VecDeque<ibv_wc>>,
    /// Address and bytes of what is registered, by its key.
    memory: BTreeMap<u32, (u64, u64)>,
    /// Nobody answers: nothing is placed, nothing completes.
    silent: bool,
    /// Every WRITE is carried out as soon as it is posted.
    prompt: bool,
    /// A queue pair in the error state completes all of its work requests at once.
    drains: bool,
}

/// The devices of this process by their contexts. A union of C that a completion holds is plain data.
static NICS: Mutex<BTreeMap<usize, Nic>> = Mutex::new(BTreeMap::new());

fn nics() -> MutexGuard<'static, BTreeMap<usize, Nic>> {
    NICS.lock().unwrap_or_else(|e| e.into_inner())
}

fn with<T>(context: *mut ibv_context, act: impl FnOnce(&mut Nic) -> T) -> T {
    act(nics().entry(context.addr()).or_default())
}

fn wc(wr_id: u64, status: ibv_wc_status) -> ibv_wc {
    ibv_wc { wr_id, status, ..Default::default() }
}

impl Nic {
    fn push(&mut self, cq: usize, wc: ibv_wc) {
        if let Some(cq) = self.cqs.get_mut(&cq) {
            cq.push_back(wc);
        }
    }

    fn registered(&self, key: u32, address: u64, bytes: u64) -> bool {
        let at = self.memory.get(&key);
        at.is_some_and(|(from, n)| *from <= address && address + bytes <= from + n)
    }

    /// True if the WRITEs of this queue pair are carried out.
    fn answers(&self, number: u32) -> bool {
        let qp = &self.qps[&number];
        let peer = self.qps.get(&qp.peer);
        !self.silent && qp.ready && peer.is_some_and(|p| p.peer == number && !p.error)
    }

    /// Places a piece of a WRITE.
    fn place(&mut self, number: u32, write: usize, piece: usize) {
        let w = &self.qps[&number].sends[write];
        let (from, to) = (w.from + w.pieces[piece].start as u64, w.to + w.pieces[piece].start as u64);
        let n = w.pieces[piece].len();
        assert!(self.registered(w.rkey, to, n as u64), "WRITE {} to {to:#x}, not registered", w.id);
        let source = match &w.inline {
            Some(bytes) => bytes[w.pieces[piece].clone()].to_vec(),
            None => {
                assert!(
                    self.registered(w.lkey, from, n as u64),
                    "the device reads {n} bytes at {from:#x} for WRITE {}, which are not registered any more",
                    w.id
                );
                // SAFETY: it is registered, which its owner may do only with memory that is there.
                unsafe { std::slice::from_raw_parts(from as *const u8, n) }.to_vec()
            }
        };
        if n == WORD && to.is_multiple_of(8) {
            let word = u64::from_ne_bytes(source.try_into().expect("it is a word"));
            // SAFETY: as above, and aligned. The code under test reads such words as atomics.
            unsafe { AtomicU64::from_ptr(to as *mut u64) }.store(word, Ordering::Release);
        } else {
            // SAFETY: as above; the code under test holds no references there.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to as *mut u8, n) };
        }
        self.qps.get_mut(&number).expect("it is there").sends[write].pieces.swap_remove(piece);
    }

    /// Completes the oldest WRITE of a queue pair. False if there is none that can.
    fn complete(&mut self, number: u32) -> bool {
        if !self.answers(number) || self.qps[&number].sends.is_empty() {
            return false;
        }
        while let Some(last) = self.qps[&number].sends[0].pieces.len().checked_sub(1) {
            self.place(number, 0, last);
        }
        let qp = self.qps.get_mut(&number).expect("it is there");
        let (w, cq, peer) = (qp.sends.pop_front().expect("it is there"), qp.cq, qp.peer);
        if let Some(imm) = w.imm {
            let peer = self.qps.get_mut(&peer).expect("it answers");
            let receive = peer.receives.pop_front().expect("P4: a receive for immediate data");
            let mut arrived = wc(receive, ibv_wc_status::IBV_WC_SUCCESS);
            arrived.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
            arrived.__bindgen_anon_1.imm_data = imm;
            let cq = peer.cq;
            self.push(cq, arrived);
        }
        if w.signaled {
            self.push(cq, wc(w.id, ibv_wc_status::IBV_WC_SUCCESS));
        }
        true
    }

    /// A queue pair fails: its oldest WRITE ends with this.
    fn fail(&mut self, number: u32, status: ibv_wc_status) {
        let qp = self.qps.get_mut(&number).expect("it is there");
        qp.error = true;
        let (cq, oldest) = (qp.cq, qp.sends.pop_front());
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
        let flushed: Vec<u64> = qp.receives.drain(..).chain(qp.sends.drain(..).map(|w| w.id)).collect();
        for id in flushed {
            self.push(cq, wc(id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
        }
    }

    /// Carries out what is posted as far as `prompt` and `drains` say.
    fn react(&mut self) {
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
pub(super) struct Sim {
    pub(super) device: Arc<Device>,
    context: usize,
    _mock: Mock,
}

impl Drop for Sim {
    fn drop(&mut self) {
        nics().remove(&self.context);
    }
}

impl Sim {
    pub(super) fn new() -> Self {
        let mock = Mock::with_functions(|verbs, context| {
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
            verbs.ibv_query_qp = Ok(query_qp);
            verbs.ibv_query_port = Ok(query_port);
        });
        let device = mock.device.clone();
        Sim { context: device.raw().addr(), device, _mock: mock }
    }

    fn nic<T>(&self, act: impl FnOnce(&mut Nic) -> T) -> T {
        act(nics().entry(self.context).or_default())
    }

    /// Nobody answers from now on.
    pub(super) fn silence(&self) {
        self.nic(|nic| nic.silent = true);
    }

    /// What is posted is carried out at once, in order.
    pub(super) fn prompt(&self) {
        self.nic(|nic| {
            nic.prompt = true;
            nic.react();
        });
    }

    /// A queue pair in the error state is drained at once.
    pub(super) fn drains(&self) {
        self.nic(|nic| {
            nic.drains = true;
            nic.react();
        });
    }

    /// Places one piece of all that are under way, chosen by `number`. False if there is none.
    pub(super) fn place(&self, number: usize) -> bool {
        self.nic(|nic| {
            let mut writes = Vec::new();
            for (number, qp) in nic.qps.iter().filter(|(number, _)| nic.answers(**number)) {
                let under_way = qp.sends.iter().enumerate().filter(|(_, w)| !w.pieces.is_empty());
                writes.extend(under_way.map(|(i, w)| (*number, i, w.pieces.len())));
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
    pub(super) fn complete(&self, number: usize) -> bool {
        self.nic(|nic| {
            let numbers: Vec<u32> = nic.qps.keys().copied().collect();
            let n = numbers.len().max(1);
            (0..numbers.len()).any(|i| nic.complete(numbers[(number + i) % n]))
        })
    }

    /// The first queue pair fails by itself: its oldest WRITE ends with an error.
    pub(super) fn break_one(&self) {
        self.nic(|nic| {
            let number = *nic.qps.keys().next().expect("there is one");
            nic.fail(number, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
        });
    }

    /// Time passes: the retries of WRITEs that nobody answers are exceeded.
    pub(super) fn expire(&self) {
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
    pub(super) fn drain(&self) {
        self.nic(|nic| {
            let numbers: Vec<u32> = nic.qps.keys().copied().collect();
            numbers.into_iter().for_each(|q| nic.drain(q));
        });
    }

    /// Queue pairs that still read or write memory, or may: they are neither destroyed nor drained in the
    /// error state.
    pub(super) fn working(&self) -> usize {
        self.nic(|nic| nic.qps.values().filter(|qp| !qp.error || !qp.sends.is_empty()).count())
    }

    /// Queue pairs that were not destroyed.
    pub(super) fn queue_pairs(&self) -> usize {
        self.nic(|nic| nic.qps.len())
    }

    /// Registrations that are there.
    pub(super) fn registrations(&self) -> usize {
        self.nic(|nic| nic.memory.len())
    }
}

unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, _: c_int) -> *mut ibv_mr {
    // SAFETY: the domain is the caller's.
    let context = unsafe { (*pd).context };
    let key = with(context, |nic| {
        nic.next += 1;
        nic.memory.insert(nic.next, (address as u64, length as u64));
        nic.next
    });
    Box::into_raw(Box::new(ibv_mr { context, lkey: key, rkey: key, ..Default::default() }))
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
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

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the domain and the attributes are the caller's.
    let (context, cq) = unsafe { ((*pd).context, (*init).send_cq) };
    let number = with(context, |nic| {
        nic.next += 1;
        nic.qps.insert(nic.next, Qp { cq: cq.addr(), ..Qp::default() });
        nic.next
    });
    Box::into_raw(Box::new(ibv_qp { context, qp_num: number, ..Default::default() }))
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made by `create_qp`, and destroyed once.
    let qp = unsafe { Box::from_raw(qp) };
    with(qp.context, |nic| nic.qps.remove(&qp.qp_num));
    0
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    // SAFETY: the queue pair is there, the attributes are the caller's.
    let (context, number, a) = unsafe { ((*qp).context, (*qp).qp_num, *attr) };
    with(context, |nic| {
        let qp = nic.qps.get_mut(&number).expect("it is there");
        match a.qp_state {
            ibv_qp_state::IBV_QPS_RTR => qp.peer = a.dest_qp_num,
            ibv_qp_state::IBV_QPS_RTS => qp.ready = true,
            ibv_qp_state::IBV_QPS_ERR => {
                qp.error = true;
                nic.react();
            }
            _ => {}
        }
    });
    0
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the queue pair is there.
    let (context, number) = unsafe { ((*qp).context, (*qp).qp_num) };
    let error = with(context, |nic| nic.qps[&number].error);
    let state = if error { ibv_qp_state::IBV_QPS_ERR } else { ibv_qp_state::IBV_QPS_RTS };
    // SAFETY: the attributes are the caller's.
    unsafe { (*attr).qp_state = state };
    0
}

unsafe extern "C" fn query_port(_: *mut ibv_context, _: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    // SAFETY: the caller's attributes begin as those of this type do.
    unsafe { (*attr.cast::<ibv_port_attr>()).state = ibv_port_state::IBV_PORT_ACTIVE };
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, mut wr: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the queue pair is there.
    let (context, number) = unsafe { ((*qp).context, (*qp).qp_num) };
    with(context, |nic| {
        while !wr.is_null() {
            // SAFETY: a list of requests, RDMA WRITEs with one source at most.
            let (r, source) = unsafe { (*wr, (*wr).sg_list.as_ref().copied().unwrap_or_default()) };
            let imm = match r.opcode {
                ibv_wr_opcode::IBV_WR_RDMA_WRITE => None,
                // SAFETY: what the opcode says.
                ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => Some(unsafe { r.__bindgen_anon_1.imm_data }),
                _ => return INVALID,
            };
            let bytes = if r.num_sge == 0 { 0 } else { source.length as usize };
            let inline = (r.send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0 && bytes > 0)
                // SAFETY: an inline request's bytes are there until the call returns.
                .then(|| unsafe { std::slice::from_raw_parts(source.addr as *const u8, bytes) }.to_vec());
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
                pieces: (0..bytes).step_by(step).map(|at| at..bytes.min(at + step)).collect(),
            });
            wr = r.next;
        }
        nic.react();
        0
    })
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the queue pair and the request are there.
    let (context, number, id) = unsafe { ((*qp).context, (*qp).qp_num, (*wr).wr_id) };
    with(context, |nic| nic.qps.get_mut(&number).expect("it is there").receives.push_back(id));
    0
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
