// Generated from include/pushgate/abi.h by `cargo xtask bindings`; do not edit.

pub const PUSHGATE_ABI_VERSION: u32 = 2;
pub const PUSHGATE_MAGIC: u64 = 4995689661072627024;
pub const PUSHGATE_UNIT: u32 = 64;
pub const PUSHGATE_UNIT_LOG: u32 = 6;
pub const PUSHGATE_RECORD_WORDS: u32 = 8;
pub const PUSHGATE_RECORD_BYTES: u32 = 64;
pub const PUSHGATE_MAX_SLOTS_LOG: u32 = 16;
pub const PUSHGATE_MAX_UNITS_LOG: u32 = 23;
pub const PUSHGATE_MAX_CQ_LOG: u32 = 15;
pub const PUSHGATE_MAX_RX_LOG: u32 = 16;
pub const PUSHGATE_MAX_SIGNALS: u32 = 65536;
pub const PUSHGATE_INLINE_SEND: u32 = 40;
pub const PUSHGATE_INLINE_PUT: u32 = 16;
pub const PUSHGATE_MAX_MESSAGE: u32 = 536870912;
pub const PUSHGATE_SIGNAL_MAX: u64 = 72057594037927935;
pub const PUSHGATE_LAP_SHIFT: u32 = 56;
pub const PUSHGATE_LAP_MASK: i64 = -72057594037927936;
pub const PUSHGATE_DATA_MASK: u64 = 72057594037927935;
pub const PUSHGATE_OPCODE_SHIFT: u32 = 48;
pub const PUSHGATE_FLAGS_SHIFT: u32 = 40;
pub const PUSHGATE_ID_HIGH_SHIFT: u32 = 32;
pub const PUSHGATE_ID_LOW_SHIFT: u32 = 32;
pub const PUSHGATE_ID_LOW_BITS: u32 = 24;
pub const PUSHGATE_SIGNAL_SHIFT: u32 = 32;
pub const PUSHGATE_OP_NOP: u32 = 1;
pub const PUSHGATE_OP_SEND: u32 = 2;
pub const PUSHGATE_OP_PUT: u32 = 3;
pub const PUSHGATE_OP_SIGNAL: u32 = 4;
pub const PUSHGATE_F_INLINE: u32 = 1;
pub const PUSHGATE_F_REGION: u32 = 2;
pub const PUSHGATE_F_SIGNALED: u32 = 4;
pub const PUSHGATE_F_WITH_SIGNAL: u32 = 8;
pub const PUSHGATE_F_LANDING: u32 = 16;
pub const PUSHGATE_F_BUFFER: u32 = 32;
pub const PUSHGATE_F_WQE_MASK: u32 = 15;
pub const PUSHGATE_CQE_WORDS: u32 = 2;
pub const PUSHGATE_CQE_STATUS_SHIFT: u32 = 48;
pub const PUSHGATE_CQE_OPCODE_SHIFT: u32 = 40;
pub const PUSHGATE_RECV_WORDS: u32 = 4;
pub const PUSHGATE_ANY_TAG: u32 = 4294967295;
pub const PUSHGATE_OK: u32 = 0;
pub const PUSHGATE_AGAIN: u32 = 1;
pub const PUSHGATE_PEER_LOST: u32 = 2;
pub const PUSHGATE_ABORTED: u32 = 3;
pub const PUSHGATE_TIMED_OUT: u32 = 4;
pub const PUSHGATE_REFUSED: u32 = 5;
pub const PUSHGATE_STUCK: u32 = 6;
pub const PUSHGATE_OVERRUN: u32 = 7;
pub const PUSHGATE_INVALID: u32 = 8;
pub const PUSHGATE_LINK_DOWN: u32 = 9;
pub const PUSHGATE_DOWN_PORT: u32 = 1;
pub const PUSHGATE_DOWN_ADDRESS: u32 = 2;
pub const PUSHGATE_DOWN_DEVICE: u32 = 3;
pub const PUSHGATE_DOWN_RETRY: u32 = 4;
pub const PUSHGATE_DOWN_RNR: u32 = 5;
pub const PUSHGATE_DOWN_ACCESS: u32 = 6;
pub const PUSHGATE_DOWN_STREAM: u32 = 7;
pub const PUSHGATE_DOWN_WC: u32 = 256;
pub const PUSHGATE_STATUS_RANK_SHIFT: u32 = 8;
pub const PUSHGATE_STATUS_DETAIL_SHIFT: u32 = 32;
pub const PUSHGATE_NO_RANK: u32 = 16777215;
pub const PUSHGATE_CURSOR_BITS: u32 = 24;
pub const PUSHGATE_CURSOR_MASK: u32 = 16777215;
pub const PUSHGATE_CQ_CURSOR_SHIFT: u32 = 48;
pub const PUSHGATE_CQ_CURSOR_MASK: u32 = 65535;
pub const PUSHGATE_COUNT_BITS: u32 = 48;
pub const PUSHGATE_COUNT_MASK: u64 = 281474976710655;
pub const PUSHGATE_SEG_WINDOW: u32 = 1;
pub const PUSHGATE_SEG_WORK: u32 = 2;
pub const PUSHGATE_SEG_CONTROL: u32 = 3;
pub const PUSHGATE_SEG_LINK: u32 = 4;
pub const PUSHGATE_PAGE: u32 = 4096;
pub const PUSHGATE_WORK_CONSUMED: u32 = 64;
pub const PUSHGATE_WORK_RING: u32 = 4096;
pub const PUSHGATE_CTL_CREDIT: u32 = 64;
pub const PUSHGATE_CTL_STATUS: u32 = 72;
pub const PUSHGATE_CTL_DELIVERED: u32 = 80;
pub const PUSHGATE_CTL_SLEEPING: u32 = 128;
pub const PUSHGATE_CTL_SIGNALS: u32 = 4096;
pub const PUSHGATE_LINK_RECEIVED: u32 = 64;
pub const PUSHGATE_LINK_RELEASED: u32 = 72;
pub const PUSHGATE_LINK_GRANTED: u32 = 80;
pub const PUSHGATE_LINK_STATUS: u32 = 88;
pub const PUSHGATE_LINK_ADDRESS: u32 = 96;
pub const PUSHGATE_LINK_READS: u32 = 104;
pub const PUSHGATE_LINK_SLEEPING: u32 = 128;
pub const PUSHGATE_LINK_RING: u32 = 4096;
pub const PUSHGATE_READS_YES: u32 = 1;
pub const PUSHGATE_READS_UNKNOWN: u32 = 2;
pub const PUSHGATE_READS_DENIED: u32 = 3;
pub const PUSHGATE_READS_ELSEWHERE: u32 = 4;
pub type pushgate_u32 = u32;
pub type pushgate_u64 = u64;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pushgate_header {
    pub magic: pushgate_u64,
    pub version: pushgate_u32,
    pub kind: pushgate_u32,
    pub bytes: pushgate_u64,
    pub window_log: pushgate_u32,
    pub slots_log: pushgate_u32,
    pub cq_log: pushgate_u32,
    pub rx_log: pushgate_u32,
    pub link_log: pushgate_u32,
    pub landing_log: pushgate_u32,
    pub signals: pushgate_u32,
    pub rank: pushgate_u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_header"][::core::mem::size_of::<pushgate_header>() - 56usize];
    ["Alignment of pushgate_header"][::core::mem::align_of::<pushgate_header>() - 8usize];
    ["Offset of field: pushgate_header::magic"][::core::mem::offset_of!(pushgate_header, magic) - 0usize];
    ["Offset of field: pushgate_header::version"][::core::mem::offset_of!(pushgate_header, version) - 8usize];
    ["Offset of field: pushgate_header::kind"][::core::mem::offset_of!(pushgate_header, kind) - 12usize];
    ["Offset of field: pushgate_header::bytes"][::core::mem::offset_of!(pushgate_header, bytes) - 16usize];
    ["Offset of field: pushgate_header::window_log"]
        [::core::mem::offset_of!(pushgate_header, window_log) - 24usize];
    ["Offset of field: pushgate_header::slots_log"]
        [::core::mem::offset_of!(pushgate_header, slots_log) - 28usize];
    ["Offset of field: pushgate_header::cq_log"][::core::mem::offset_of!(pushgate_header, cq_log) - 32usize];
    ["Offset of field: pushgate_header::rx_log"][::core::mem::offset_of!(pushgate_header, rx_log) - 36usize];
    ["Offset of field: pushgate_header::link_log"]
        [::core::mem::offset_of!(pushgate_header, link_log) - 40usize];
    ["Offset of field: pushgate_header::landing_log"]
        [::core::mem::offset_of!(pushgate_header, landing_log) - 44usize];
    ["Offset of field: pushgate_header::signals"]
        [::core::mem::offset_of!(pushgate_header, signals) - 48usize];
    ["Offset of field: pushgate_header::rank"][::core::mem::offset_of!(pushgate_header, rank) - 52usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pushgate_qp_state {
    pub reserved: pushgate_u64,
    pub pad0: [pushgate_u64; 15usize],
    pub credit: pushgate_u64,
    pub cq_head: pushgate_u64,
    pub pad1: [pushgate_u64; 14usize],
    pub rx_head: pushgate_u64,
    pub rx_released: pushgate_u64,
    pub rx_posted: pushgate_u64,
    pub pad2: [pushgate_u64; 13usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_qp_state"][::core::mem::size_of::<pushgate_qp_state>() - 384usize];
    ["Alignment of pushgate_qp_state"][::core::mem::align_of::<pushgate_qp_state>() - 8usize];
    ["Offset of field: pushgate_qp_state::reserved"]
        [::core::mem::offset_of!(pushgate_qp_state, reserved) - 0usize];
    ["Offset of field: pushgate_qp_state::pad0"][::core::mem::offset_of!(pushgate_qp_state, pad0) - 8usize];
    ["Offset of field: pushgate_qp_state::credit"]
        [::core::mem::offset_of!(pushgate_qp_state, credit) - 128usize];
    ["Offset of field: pushgate_qp_state::cq_head"]
        [::core::mem::offset_of!(pushgate_qp_state, cq_head) - 136usize];
    ["Offset of field: pushgate_qp_state::pad1"][::core::mem::offset_of!(pushgate_qp_state, pad1) - 144usize];
    ["Offset of field: pushgate_qp_state::rx_head"]
        [::core::mem::offset_of!(pushgate_qp_state, rx_head) - 256usize];
    ["Offset of field: pushgate_qp_state::rx_released"]
        [::core::mem::offset_of!(pushgate_qp_state, rx_released) - 264usize];
    ["Offset of field: pushgate_qp_state::rx_posted"]
        [::core::mem::offset_of!(pushgate_qp_state, rx_posted) - 272usize];
    ["Offset of field: pushgate_qp_state::pad2"][::core::mem::offset_of!(pushgate_qp_state, pad2) - 280usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pushgate_qp {
    pub window: pushgate_u64,
    pub wqes: pushgate_u64,
    pub receives: pushgate_u64,
    pub consumed: pushgate_u64,
    pub credit: pushgate_u64,
    pub delivered: pushgate_u64,
    pub sleeping: pushgate_u64,
    pub signals: pushgate_u64,
    pub cq: pushgate_u64,
    pub rx: pushgate_u64,
    pub landing: pushgate_u64,
    pub peer_window: pushgate_u64,
    pub state: pushgate_u64,
    pub doorbell: pushgate_u64,
    pub doorbell_arg: pushgate_u64,
    pub limit_ns: pushgate_u64,
    pub window_log: pushgate_u32,
    pub slots_log: pushgate_u32,
    pub cq_log: pushgate_u32,
    pub rx_log: pushgate_u32,
    pub landing_log: pushgate_u32,
    pub peer_window_log: pushgate_u32,
    pub n_signals: pushgate_u32,
    pub rank: pushgate_u32,
    pub peer: pushgate_u32,
    pub pad: pushgate_u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_qp"][::core::mem::size_of::<pushgate_qp>() - 168usize];
    ["Alignment of pushgate_qp"][::core::mem::align_of::<pushgate_qp>() - 8usize];
    ["Offset of field: pushgate_qp::window"][::core::mem::offset_of!(pushgate_qp, window) - 0usize];
    ["Offset of field: pushgate_qp::wqes"][::core::mem::offset_of!(pushgate_qp, wqes) - 8usize];
    ["Offset of field: pushgate_qp::receives"][::core::mem::offset_of!(pushgate_qp, receives) - 16usize];
    ["Offset of field: pushgate_qp::consumed"][::core::mem::offset_of!(pushgate_qp, consumed) - 24usize];
    ["Offset of field: pushgate_qp::credit"][::core::mem::offset_of!(pushgate_qp, credit) - 32usize];
    ["Offset of field: pushgate_qp::delivered"][::core::mem::offset_of!(pushgate_qp, delivered) - 40usize];
    ["Offset of field: pushgate_qp::sleeping"][::core::mem::offset_of!(pushgate_qp, sleeping) - 48usize];
    ["Offset of field: pushgate_qp::signals"][::core::mem::offset_of!(pushgate_qp, signals) - 56usize];
    ["Offset of field: pushgate_qp::cq"][::core::mem::offset_of!(pushgate_qp, cq) - 64usize];
    ["Offset of field: pushgate_qp::rx"][::core::mem::offset_of!(pushgate_qp, rx) - 72usize];
    ["Offset of field: pushgate_qp::landing"][::core::mem::offset_of!(pushgate_qp, landing) - 80usize];
    ["Offset of field: pushgate_qp::peer_window"]
        [::core::mem::offset_of!(pushgate_qp, peer_window) - 88usize];
    ["Offset of field: pushgate_qp::state"][::core::mem::offset_of!(pushgate_qp, state) - 96usize];
    ["Offset of field: pushgate_qp::doorbell"][::core::mem::offset_of!(pushgate_qp, doorbell) - 104usize];
    ["Offset of field: pushgate_qp::doorbell_arg"]
        [::core::mem::offset_of!(pushgate_qp, doorbell_arg) - 112usize];
    ["Offset of field: pushgate_qp::limit_ns"][::core::mem::offset_of!(pushgate_qp, limit_ns) - 120usize];
    ["Offset of field: pushgate_qp::window_log"][::core::mem::offset_of!(pushgate_qp, window_log) - 128usize];
    ["Offset of field: pushgate_qp::slots_log"][::core::mem::offset_of!(pushgate_qp, slots_log) - 132usize];
    ["Offset of field: pushgate_qp::cq_log"][::core::mem::offset_of!(pushgate_qp, cq_log) - 136usize];
    ["Offset of field: pushgate_qp::rx_log"][::core::mem::offset_of!(pushgate_qp, rx_log) - 140usize];
    ["Offset of field: pushgate_qp::landing_log"]
        [::core::mem::offset_of!(pushgate_qp, landing_log) - 144usize];
    ["Offset of field: pushgate_qp::peer_window_log"]
        [::core::mem::offset_of!(pushgate_qp, peer_window_log) - 148usize];
    ["Offset of field: pushgate_qp::n_signals"][::core::mem::offset_of!(pushgate_qp, n_signals) - 152usize];
    ["Offset of field: pushgate_qp::rank"][::core::mem::offset_of!(pushgate_qp, rank) - 156usize];
    ["Offset of field: pushgate_qp::peer"][::core::mem::offset_of!(pushgate_qp, peer) - 160usize];
    ["Offset of field: pushgate_qp::pad"][::core::mem::offset_of!(pushgate_qp, pad) - 164usize];
};
