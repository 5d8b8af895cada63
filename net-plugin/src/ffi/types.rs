//! The types of NCCL's headers, field by field. Their layouts are asserted below against those of
//! x86-64 C.

use std::ffi::{c_char, c_int, c_void};

/// The memory type `NCCL_PTR_HOST`.
pub const PTR_HOST: c_int = 1;
/// The memory type `NCCL_PTR_CUDA`.
pub const PTR_CUDA: c_int = 2;
/// The memory type `NCCL_PTR_DMABUF`.
pub const PTR_DMABUF: c_int = 4;
/// The kind of device whose operations NCCL's proxy thread asks for: `NCCL_NET_DEVICE_GIN_PROXY`.
pub const GIN_PROXY: c_int = 2;
/// Flag of a registration: nobody resets signals in the memory, `NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET`.
pub const SIGNAL_NEVER_RESET: u64 = 1 << 1;
/// A signal grows by one: `NCCL_NET_SIGNAL_OP_INC`.
pub const SIGNAL_INC: u32 = 1;
/// A signal grows by the value that is given: `NCCL_NET_SIGNAL_OP_ADD`.
pub const SIGNAL_ADD: u32 = 2;
/// The most buffers that one receive may name.
pub const MAX_RECVS: usize = 8;

/// `ncclNetDeviceHandle_t`, for devices that unpack. This plugin never fills it in.
#[repr(C)]
pub struct DeviceHandle {
    net_device_type: c_int,
    net_device_version: c_int,
    handle: *mut c_void,
    size: usize,
    needs_proxy_progress: c_int,
}

/// `ncclNetCommConfig_v10_t` and later versions.
#[repr(C)]
pub struct CommConfig {
    /// The traffic class; -1 if it is not set.
    pub traffic_class: c_int,
}

/// `ncclNetAttr_v11_t`: hints, which this plugin does not use.
#[repr(C)]
pub struct NetAttr {
    words: [u32; 11],
}

/// `ncclNetVDeviceProps_v9_t` to v11.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct VDevice4 {
    /// How many devices.
    pub ndevs: c_int,
    /// Which devices.
    pub devs: [c_int; 4],
}

/// `ncclNetVDeviceProps_v12_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct VDevice8 {
    /// How many devices.
    pub ndevs: c_int,
    /// Which devices.
    pub devs: [c_int; 8],
}

/// The properties of a device, `ncclNetProperties_v8_t`.
#[repr(C)]
#[allow(missing_docs)] // NCCL's names.
pub struct PropsV8 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// The properties of a device, `ncclNetProperties_v9_t`, which v10 uses too.
#[repr(C)]
#[allow(missing_docs)]
pub struct PropsV9 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub v_props: VDevice4,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
}

/// The properties of a device, `ncclNetProperties_v11_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct PropsV11 {
    pub v9: PropsV9,
    pub max_multi_request_size: c_int,
}

/// The properties of a device, `ncclNetProperties_v12_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct PropsV12 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub v_props: VDevice8,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}

const _: () = {
    use std::mem::{offset_of as at, size_of};
    assert!(size_of::<DeviceHandle>() == 32 && size_of::<CommConfig>() == 4 && size_of::<NetAttr>() == 44);
    assert!(size_of::<VDevice4>() == 20 && size_of::<VDevice8>() == 36);
    assert!(size_of::<PropsV8>() == 64);
    assert!(at!(PropsV8, ptr_support) == 24 && at!(PropsV8, speed) == 32 && at!(PropsV8, latency) == 40);
    assert!(at!(PropsV8, max_recvs) == 48 && at!(PropsV8, net_device_version) == 56);
    assert!(size_of::<PropsV9>() == 104);
    assert!(at!(PropsV9, force_flush) == 32 && at!(PropsV9, speed) == 36 && at!(PropsV9, latency) == 44);
    assert!(at!(PropsV9, max_recvs) == 52 && at!(PropsV9, net_device_version) == 60);
    assert!(
        at!(PropsV9, v_props) == 64
            && at!(PropsV9, max_p2p_bytes) == 88
            && at!(PropsV9, max_coll_bytes) == 96
    );
    assert!(size_of::<PropsV11>() == 112 && at!(PropsV11, max_multi_request_size) == 104);
    assert!(size_of::<PropsV12>() == 128);
    assert!(at!(PropsV12, force_flush) == 32 && at!(PropsV12, net_device_version) == 60);
    assert!(at!(PropsV12, v_props) == 64 && at!(PropsV12, max_p2p_bytes) == 104);
    assert!(at!(PropsV12, max_coll_bytes) == 112 && at!(PropsV12, max_multi_request_size) == 120);
    assert!(at!(PropsV12, rail_id) == 124 && at!(PropsV12, plane_id) == 126);
};

// ------------------------------------------------------------------------ RMA

/// `ncclRmaConfig_v14_t` and v15.
#[repr(C)]
pub struct RmaConfig {
    /// How many contexts.
    pub contexts: c_int,
    /// The traffic class; below 0 if it is not set.
    pub traffic_class: c_int,
    /// How far apart the ranks are that use the contexts.
    pub rank_stride: c_int,
}

/// `ncclGinConfig_v13_t`.
#[repr(C)]
pub struct GinConfig {
    signals: c_int,
    counters: c_int,
    /// How many contexts.
    pub contexts: c_int,
    queue_depth: c_int,
    /// The traffic class; below 0 if it is not set.
    pub traffic_class: c_int,
}

/// `ncclRmaProperties_v16_t`.
#[repr(C)]
pub struct RmaProperties {
    /// Any signal is seen after all earlier puts to its rank.
    pub flushes_all_puts_on_any_signal: bool,
}

const _: () = {
    use std::mem::size_of;
    assert!(size_of::<RmaConfig>() == 12 && size_of::<GinConfig>() == 20 && size_of::<RmaProperties>() == 1);
};
