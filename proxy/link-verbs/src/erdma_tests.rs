//! A simulated device that refuses what eRDMA refuses, or software iWARP, and the link's own calls against it.
//!
//! The rules are those of rdma-core's providers and Linux's drivers, written down here apart from the table of kinds: a row of
//! the table that is wrong makes the device refuse a call.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ptr::null_mut;

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_rdma_core_sys::*;

use super::config::{Config, RdmaCm, WriteOrder};
use super::kinds::{Kind, Protocol};
use super::setup::VerbsOpening;
use super::simulated::{self, Sim};
use super::simulated_tests::{any_order_on, pair};
use crate::VerbsError;
use pushgate_test_ends::{GEOMETRY, memory};

const EIO: c_int = 5;
const EINVAL: c_int = 22;

/// What a device takes.
#[derive(Clone, Copy, Debug)]
struct Rules {
    protocol: Protocol,
    vendor: u32,
    most_inline: u32,
    receive_sges: (c_int, c_int),
    imm: bool,
    /// RTS by `ibv_modify_qp`.
    rts: bool,
}

/// erdma_push_one_sqe, push_recv_wqe, erdma_qp_validate_cap.
const ROCE: Rules = Rules {
    protocol: Protocol::Ib,
    vendor: 0x1ded,
    most_inline: 96,
    receive_sges: (0, 1),
    imm: true,
    rts: true,
};
/// erdma_modify_qp_state_to_rts wants the handle of a connection, which its CM alone has.
const IWARP: Rules = Rules { protocol: Protocol::Iwarp, rts: false, ..ROCE };
/// push_send_wqe and push_recv_wqe of siw.
const SIW: Rules = Rules { vendor: 0x62_6d74, most_inline: 80, receive_sges: (1, 6), imm: false, ..IWARP };

thread_local! {
    static RULES: Cell<Rules> = const { Cell::new(ROCE) };
    /// What was refused. Each test has a thread of its own.
    static REFUSED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Notes a call that the device refuses.
fn refused(why: String) {
    REFUSED.with_borrow_mut(|all| all.push(why));
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes attributes.
    let (cap, kind, shared) = unsafe { ((*init).cap, (*init).qp_type, !(*init).srq.is_null()) };
    let rules = RULES.get();
    let fits = cap.max_inline_data <= rules.most_inline
        && (1..=8192).contains(&cap.max_send_wr)
        && (1..=8192).contains(&cap.max_recv_wr)
        && cap.max_send_sge <= 6
        && cap.max_recv_sge <= rules.receive_sges.1 as u32;
    if !fits || kind != ibv_qp_type::IBV_QPT_RC || shared {
        refused(format!("create_qp: {cap:?}"));
        return null_mut();
    }
    // SAFETY: the caller's arguments, handed on.
    unsafe { simulated::create_qp(pd, init) }
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller passes attributes.
    let state = unsafe { (*attr).qp_state };
    if state == ibv_qp_state::IBV_QPS_RTS && !RULES.get().rts {
        refused("modify_qp: RTS".into());
        return EINVAL;
    }
    // SAFETY: the caller's arguments, handed on; libibverbs notes the state so, and the provider looks at it.
    unsafe {
        (*qp).state = state;
        simulated::modify_qp(qp, attr, mask)
    }
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let rules = RULES.get();
    // SAFETY: the queue pair is there.
    if unsafe { (*qp).state } == ibv_qp_state::IBV_QPS_ERR {
        refused("post_send in the error state".into());
        return -EIO;
    }
    let mut at = wr;
    while !at.is_null() {
        // SAFETY: the caller passes a list of requests.
        let r = unsafe { *at };
        // SAFETY: the request names `num_sge` elements.
        let bytes: u32 = (0..r.num_sge as usize).map(|i| unsafe { (*r.sg_list.add(i)).length }).sum();
        let inline = r.send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0;
        let takes = match r.opcode {
            ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_READ => true,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => rules.imm,
            _ => false,
        };
        if !takes || r.num_sge > 6 || inline && bytes > rules.most_inline {
            refused(format!("post_send: opcode {}, {} sges, {bytes} bytes", r.opcode.0, r.num_sge));
            return -EINVAL;
        }
        at = r.next;
    }
    // SAFETY: the caller's arguments, handed on.
    unsafe { simulated::post_send(qp, wr, bad) }
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the queue pair and the request are there.
    let (state, sges) = unsafe { ((*qp).state, (*wr).num_sge) };
    if state == ibv_qp_state::IBV_QPS_ERR {
        refused("post_recv in the error state".into());
        return -EIO;
    }
    let (least, most) = RULES.get().receive_sges;
    if !(least..=most).contains(&sges) {
        refused(format!("post_recv: {sges} sges"));
        return -EINVAL;
    }
    // SAFETY: the caller's arguments, handed on.
    unsafe { simulated::post_recv(qp, wr, bad) }
}

/// A device with these rules, of the kind that the table says.
fn device(rules: Rules) -> Sim {
    RULES.set(rules);
    REFUSED.take();
    // What eRDMA's provider does not have, no extended verb among it, is missing in the mock's library and contexts too: a call of
    // it would end the test.
    Sim::of_kind(Kind::of(rules.protocol, rules.vendor), |verbs, context| {
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        verbs.ibv_create_qp = Ok(create_qp);
        verbs.ibv_modify_qp = Ok(modify_qp);
    })
}

/// What the device takes once its CM has connected the queue pair.
fn connected(rules: Rules) -> Rules {
    Rules { rts: true, ..rules }
}

#[test]
fn p3_p6_no_call_of_a_link_is_refused_by_erdma_or_software_iwarp_whatever_breaks() {
    for rules in [ROCE, connected(IWARP), connected(SIW)] {
        for imm in [true, false] {
            let mut links = 0;
            for seed in 1..8 {
                links += any_order_on(&device(rules), seed, imm, true);
                any_order_on(&device(rules), seed, imm, false);
                assert_eq!(
                    REFUSED.take(),
                    Vec::<String>::new(),
                    "{rules:?}, immediate data {imm}, seed {seed}"
                );
            }
            assert!(links > 0, "no link was replaced");
        }
    }
}

#[test]
fn p7_over_software_iwarp_credit_comes_back_while_no_read_is_answered() {
    let sim = device(connected(SIW));
    // A simulated device does not say that it keeps the order of WRITEs. This test does.
    let config = Config { cm: RdmaCm::Off, write_order: WriteOrder::Assume, ..Config::default() };
    let [mut a, mut b] = pair(&sim, &config);
    for round in 0..4 {
        let before = sim.completions();
        for n in 1..=1 << GEOMETRY.link_log {
            let sent = (round << GEOMETRY.link_log) + n;
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            assert!(a.device.post(record, &[1; 8]), "message {sent}");
            a.poll();
            // WRITEs arrive. The answers to READs come after them, and are not there yet.
            while sim.place(0) {}
            b.poll();
            assert!(b.device.try_recv().is_some(), "message {sent}");
            b.device.release(1);
            b.poll();
            while sim.place(0) {}
            a.poll();
            assert_eq!(a.endpoint.counters().retired, sent, "the peer's counts wait for a READ");
        }
        assert_eq!(sim.completions(), before);
        // Now READs are answered, so that the send queue has room for as many messages again.
        for _ in 0..10 {
            while sim.complete(0) {}
            a.poll();
            b.poll();
        }
    }
    assert!(!sim.place(0) && REFUSED.take().is_empty());
}

/// An end and what it offers.
fn opening(sim: &Sim, rank: u32) -> VerbsOpening {
    let geometry = pushgate_driver_shim::segment::Geometry { rank, ..GEOMETRY };
    let window = memory("window", geometry.window_bytes());
    let mut allocate = super::mock::allocate;
    // Simulated devices have no rdma_cm.
    let config = Config { cm: RdmaCm::Off, ..Config::default() };
    VerbsOpening::new(&sim.device, &config, geometry, window, &mut allocate).unwrap()
}

#[test]
fn immediate_data_is_offered_by_erdma_in_both_modes_and_not_by_software_iwarp() {
    for (rules, imm, iwarp) in [(ROCE, true, false), (IWARP, true, true), (SIW, false, true)] {
        let offer = opening(&device(rules), 0).offer();
        assert_eq!((offer.imm, offer.iwarp), (imm, iwarp), "{rules:?}");
        assert!(REFUSED.take().is_empty());
    }
}

#[test]
fn erdma_in_iwarp_mode_and_in_roce_mode_refuse_each_other() {
    let (roce, iwarp) = (device(ROCE), device(IWARP));
    let (a, b) = (opening(&roce, 0), opening(&iwarp, 1));
    let offer = b.offer();
    let why = a.prepare(1, &offer, &mut super::mock::allocate).err().expect("refused").to_string();
    assert!(why.contains("its RDMA device speaks iWARP, ours RoCE v2"), "{why}");
}

#[test]
fn the_device_of_these_tests_refuses_what_erdma_refuses() {
    let sim = device(ROCE);
    let end = opening(&sim, 0);
    let rc = &end.rc;
    let post = |wr: &mut ibv_send_wr| {
        // SAFETY: one request, whose sources are there.
        unsafe { rc.post_send(wr) }.map_err(|e| e.raw_os_error())
    };
    let mut bytes = [0u8; 97];
    let mut source = ibv_sge { addr: bytes.as_mut_ptr() as u64, length: 97, lkey: 0 };
    let mut wr = ibv_send_wr { num_sge: 1, ..Default::default() };
    wr.sg_list = &mut source;
    wr.send_flags = ibv_send_flags::IBV_SEND_INLINE.0;
    // An errno of either sign is the same error to the link.
    assert_eq!(post(&mut wr), Err(Some(EINVAL)), "inline");
    wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
    wr.send_flags = 0;
    assert_eq!(post(&mut wr), Err(Some(EINVAL)), "no opcode of the link");
    let attributes = |state| ibv_qp_attr { qp_state: state, ..Default::default() };
    RULES.set(IWARP);
    let why = rc.modify("moving to RTS", attributes(ibv_qp_state::IBV_QPS_RTS), 1).unwrap_err();
    assert!(
        matches!(why, VerbsError::Call { ref error, .. } if error.raw_os_error() == Some(EINVAL)),
        "{why}"
    );
    RULES.set(Rules { receive_sges: (2, 2), ..ROCE });
    assert_eq!(rc.post_receives(1).map_err(|e| e.raw_os_error()), Err(Some(EINVAL)), "sges");
    RULES.set(ROCE);
    rc.modify("moving to ERR", attributes(ibv_qp_state::IBV_QPS_ERR), 1).unwrap();
    wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
    wr.num_sge = 0;
    assert_eq!(post(&mut wr), Err(Some(EIO)), "in the error state");
    assert_eq!(rc.post_receives(1).map_err(|e| e.raw_os_error()), Err(Some(EIO)), "in the error state");
    assert_eq!(REFUSED.take().len(), 6);
}
