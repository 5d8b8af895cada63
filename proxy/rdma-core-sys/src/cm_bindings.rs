// Generated from <rdma/rdma_cma.h> of rdma-core 44 by `cargo xtask bindings`; do not edit.

use crate::bindings::*;
use crate::sockaddr;

#[derive(PartialEq, Eq, Copy, Clone, Debug, Hash)]
#[repr(C, align(8))]
pub struct __BindgenOpaqueArray8<T>(pub T);
impl<T: Copy + Default, const N: usize> Default for __BindgenOpaqueArray8<[T; N]> {
    fn default() -> Self {
        Self([<T as Default>::default(); N])
    }
}
impl rdma_cm_event_type {
    pub const RDMA_CM_EVENT_ADDR_RESOLVED: rdma_cm_event_type = rdma_cm_event_type(0);
    pub const RDMA_CM_EVENT_ADDR_ERROR: rdma_cm_event_type = rdma_cm_event_type(1);
    pub const RDMA_CM_EVENT_ROUTE_RESOLVED: rdma_cm_event_type = rdma_cm_event_type(2);
    pub const RDMA_CM_EVENT_ROUTE_ERROR: rdma_cm_event_type = rdma_cm_event_type(3);
    pub const RDMA_CM_EVENT_CONNECT_REQUEST: rdma_cm_event_type = rdma_cm_event_type(4);
    pub const RDMA_CM_EVENT_CONNECT_RESPONSE: rdma_cm_event_type = rdma_cm_event_type(5);
    pub const RDMA_CM_EVENT_CONNECT_ERROR: rdma_cm_event_type = rdma_cm_event_type(6);
    pub const RDMA_CM_EVENT_UNREACHABLE: rdma_cm_event_type = rdma_cm_event_type(7);
    pub const RDMA_CM_EVENT_REJECTED: rdma_cm_event_type = rdma_cm_event_type(8);
    pub const RDMA_CM_EVENT_ESTABLISHED: rdma_cm_event_type = rdma_cm_event_type(9);
    pub const RDMA_CM_EVENT_DISCONNECTED: rdma_cm_event_type = rdma_cm_event_type(10);
    pub const RDMA_CM_EVENT_DEVICE_REMOVAL: rdma_cm_event_type = rdma_cm_event_type(11);
    pub const RDMA_CM_EVENT_MULTICAST_JOIN: rdma_cm_event_type = rdma_cm_event_type(12);
    pub const RDMA_CM_EVENT_MULTICAST_ERROR: rdma_cm_event_type = rdma_cm_event_type(13);
    pub const RDMA_CM_EVENT_ADDR_CHANGE: rdma_cm_event_type = rdma_cm_event_type(14);
    pub const RDMA_CM_EVENT_TIMEWAIT_EXIT: rdma_cm_event_type = rdma_cm_event_type(15);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct rdma_cm_event_type(pub ::core::ffi::c_uint);
impl rdma_port_space {
    pub const RDMA_PS_IPOIB: rdma_port_space = rdma_port_space(2);
    pub const RDMA_PS_TCP: rdma_port_space = rdma_port_space(262);
    pub const RDMA_PS_UDP: rdma_port_space = rdma_port_space(273);
    pub const RDMA_PS_IB: rdma_port_space = rdma_port_space(319);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct rdma_port_space(pub ::core::ffi::c_uint);
#[repr(C)]
#[repr(align(8))]
#[derive(Debug, Default, Copy, Clone)]
pub struct rdma_route {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 312usize]>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_route"][::core::mem::size_of::<rdma_route>() - 312usize];
    ["Alignment of rdma_route"][::core::mem::align_of::<rdma_route>() - 8usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct rdma_event_channel {
    pub fd: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_event_channel"][::core::mem::size_of::<rdma_event_channel>() - 4usize];
    ["Alignment of rdma_event_channel"][::core::mem::align_of::<rdma_event_channel>() - 4usize];
    ["Offset of field: rdma_event_channel::fd"][::core::mem::offset_of!(rdma_event_channel, fd) - 0usize];
};
#[repr(C)]
pub struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut ::core::ffi::c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: rdma_port_space,
    pub port_num: u8,
    pub event: *mut rdma_cm_event,
    pub send_cq_channel: *mut ibv_comp_channel,
    pub send_cq: *mut ibv_cq,
    pub recv_cq_channel: *mut ibv_comp_channel,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub pd: *mut ibv_pd,
    pub qp_type: ibv_qp_type,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_id"][::core::mem::size_of::<rdma_cm_id>() - 416usize];
    ["Alignment of rdma_cm_id"][::core::mem::align_of::<rdma_cm_id>() - 8usize];
    ["Offset of field: rdma_cm_id::verbs"][::core::mem::offset_of!(rdma_cm_id, verbs) - 0usize];
    ["Offset of field: rdma_cm_id::channel"][::core::mem::offset_of!(rdma_cm_id, channel) - 8usize];
    ["Offset of field: rdma_cm_id::context"][::core::mem::offset_of!(rdma_cm_id, context) - 16usize];
    ["Offset of field: rdma_cm_id::qp"][::core::mem::offset_of!(rdma_cm_id, qp) - 24usize];
    ["Offset of field: rdma_cm_id::route"][::core::mem::offset_of!(rdma_cm_id, route) - 32usize];
    ["Offset of field: rdma_cm_id::ps"][::core::mem::offset_of!(rdma_cm_id, ps) - 344usize];
    ["Offset of field: rdma_cm_id::port_num"][::core::mem::offset_of!(rdma_cm_id, port_num) - 348usize];
    ["Offset of field: rdma_cm_id::event"][::core::mem::offset_of!(rdma_cm_id, event) - 352usize];
    ["Offset of field: rdma_cm_id::send_cq_channel"]
        [::core::mem::offset_of!(rdma_cm_id, send_cq_channel) - 360usize];
    ["Offset of field: rdma_cm_id::send_cq"][::core::mem::offset_of!(rdma_cm_id, send_cq) - 368usize];
    ["Offset of field: rdma_cm_id::recv_cq_channel"]
        [::core::mem::offset_of!(rdma_cm_id, recv_cq_channel) - 376usize];
    ["Offset of field: rdma_cm_id::recv_cq"][::core::mem::offset_of!(rdma_cm_id, recv_cq) - 384usize];
    ["Offset of field: rdma_cm_id::srq"][::core::mem::offset_of!(rdma_cm_id, srq) - 392usize];
    ["Offset of field: rdma_cm_id::pd"][::core::mem::offset_of!(rdma_cm_id, pd) - 400usize];
    ["Offset of field: rdma_cm_id::qp_type"][::core::mem::offset_of!(rdma_cm_id, qp_type) - 408usize];
};
impl Default for rdma_cm_id {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct rdma_conn_param {
    pub private_data: *const ::core::ffi::c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_conn_param"][::core::mem::size_of::<rdma_conn_param>() - 24usize];
    ["Alignment of rdma_conn_param"][::core::mem::align_of::<rdma_conn_param>() - 8usize];
    ["Offset of field: rdma_conn_param::private_data"]
        [::core::mem::offset_of!(rdma_conn_param, private_data) - 0usize];
    ["Offset of field: rdma_conn_param::private_data_len"]
        [::core::mem::offset_of!(rdma_conn_param, private_data_len) - 8usize];
    ["Offset of field: rdma_conn_param::responder_resources"]
        [::core::mem::offset_of!(rdma_conn_param, responder_resources) - 9usize];
    ["Offset of field: rdma_conn_param::initiator_depth"]
        [::core::mem::offset_of!(rdma_conn_param, initiator_depth) - 10usize];
    ["Offset of field: rdma_conn_param::flow_control"]
        [::core::mem::offset_of!(rdma_conn_param, flow_control) - 11usize];
    ["Offset of field: rdma_conn_param::retry_count"]
        [::core::mem::offset_of!(rdma_conn_param, retry_count) - 12usize];
    ["Offset of field: rdma_conn_param::rnr_retry_count"]
        [::core::mem::offset_of!(rdma_conn_param, rnr_retry_count) - 13usize];
    ["Offset of field: rdma_conn_param::srq"][::core::mem::offset_of!(rdma_conn_param, srq) - 14usize];
    ["Offset of field: rdma_conn_param::qp_num"][::core::mem::offset_of!(rdma_conn_param, qp_num) - 16usize];
};
impl Default for rdma_conn_param {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[repr(align(8))]
#[derive(Debug, Default, Copy, Clone)]
pub struct rdma_ud_param {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 56usize]>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_ud_param"][::core::mem::size_of::<rdma_ud_param>() - 56usize];
    ["Alignment of rdma_ud_param"][::core::mem::align_of::<rdma_ud_param>() - 8usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: rdma_cm_event_type,
    pub status: ::core::ffi::c_int,
    pub param: rdma_cm_event__bindgen_ty_1,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union rdma_cm_event__bindgen_ty_1 {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_event__bindgen_ty_1"][::core::mem::size_of::<rdma_cm_event__bindgen_ty_1>() - 56usize];
    ["Alignment of rdma_cm_event__bindgen_ty_1"]
        [::core::mem::align_of::<rdma_cm_event__bindgen_ty_1>() - 8usize];
    ["Offset of field: rdma_cm_event__bindgen_ty_1::conn"]
        [::core::mem::offset_of!(rdma_cm_event__bindgen_ty_1, conn) - 0usize];
    ["Offset of field: rdma_cm_event__bindgen_ty_1::ud"]
        [::core::mem::offset_of!(rdma_cm_event__bindgen_ty_1, ud) - 0usize];
};
impl Default for rdma_cm_event__bindgen_ty_1 {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_event"][::core::mem::size_of::<rdma_cm_event>() - 80usize];
    ["Alignment of rdma_cm_event"][::core::mem::align_of::<rdma_cm_event>() - 8usize];
    ["Offset of field: rdma_cm_event::id"][::core::mem::offset_of!(rdma_cm_event, id) - 0usize];
    ["Offset of field: rdma_cm_event::listen_id"][::core::mem::offset_of!(rdma_cm_event, listen_id) - 8usize];
    ["Offset of field: rdma_cm_event::event"][::core::mem::offset_of!(rdma_cm_event, event) - 16usize];
    ["Offset of field: rdma_cm_event::status"][::core::mem::offset_of!(rdma_cm_event, status) - 20usize];
    ["Offset of field: rdma_cm_event::param"][::core::mem::offset_of!(rdma_cm_event, param) - 24usize];
};
impl Default for rdma_cm_event {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub struct Cm {
    __library: ::libloading::Library,
    pub rdma_create_event_channel:
        Result<unsafe extern "C" fn() -> *mut rdma_event_channel, ::libloading::Error>,
    pub rdma_destroy_event_channel:
        Result<unsafe extern "C" fn(channel: *mut rdma_event_channel), ::libloading::Error>,
    pub rdma_create_id: Result<
        unsafe extern "C" fn(
            channel: *mut rdma_event_channel,
            id: *mut *mut rdma_cm_id,
            context: *mut ::core::ffi::c_void,
            ps: rdma_port_space,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_destroy_id:
        Result<unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int, ::libloading::Error>,
    pub rdma_bind_addr: Result<
        unsafe extern "C" fn(id: *mut rdma_cm_id, addr: *mut sockaddr) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_resolve_addr: Result<
        unsafe extern "C" fn(
            id: *mut rdma_cm_id,
            src_addr: *mut sockaddr,
            dst_addr: *mut sockaddr,
            timeout_ms: ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_resolve_route: Result<
        unsafe extern "C" fn(id: *mut rdma_cm_id, timeout_ms: ::core::ffi::c_int) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_connect: Result<
        unsafe extern "C" fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_establish:
        Result<unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int, ::libloading::Error>,
    pub rdma_listen: Result<
        unsafe extern "C" fn(id: *mut rdma_cm_id, backlog: ::core::ffi::c_int) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_accept: Result<
        unsafe extern "C" fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_reject: Result<
        unsafe extern "C" fn(
            id: *mut rdma_cm_id,
            private_data: *const ::core::ffi::c_void,
            private_data_len: u8,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_disconnect:
        Result<unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int, ::libloading::Error>,
    pub rdma_get_cm_event: Result<
        unsafe extern "C" fn(
            channel: *mut rdma_event_channel,
            event: *mut *mut rdma_cm_event,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_ack_cm_event:
        Result<unsafe extern "C" fn(event: *mut rdma_cm_event) -> ::core::ffi::c_int, ::libloading::Error>,
    pub rdma_get_src_port: Result<unsafe extern "C" fn(id: *mut rdma_cm_id) -> __be16, ::libloading::Error>,
    pub rdma_event_str: Result<
        unsafe extern "C" fn(event: rdma_cm_event_type) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub rdma_set_option: Result<
        unsafe extern "C" fn(
            id: *mut rdma_cm_id,
            level: ::core::ffi::c_int,
            optname: ::core::ffi::c_int,
            optval: *mut ::core::ffi::c_void,
            optlen: usize,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub rdma_init_qp_attr: Result<
        unsafe extern "C" fn(
            id: *mut rdma_cm_id,
            qp_attr: *mut ibv_qp_attr,
            qp_attr_mask: *mut ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
}
impl Cm {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = ::libloading::Library::new(path)?;
        Self::from_library(library)
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let rdma_create_event_channel = __library.get(b"rdma_create_event_channel\0").map(|sym| *sym);
        let rdma_destroy_event_channel = __library.get(b"rdma_destroy_event_channel\0").map(|sym| *sym);
        let rdma_create_id = __library.get(b"rdma_create_id\0").map(|sym| *sym);
        let rdma_destroy_id = __library.get(b"rdma_destroy_id\0").map(|sym| *sym);
        let rdma_bind_addr = __library.get(b"rdma_bind_addr\0").map(|sym| *sym);
        let rdma_resolve_addr = __library.get(b"rdma_resolve_addr\0").map(|sym| *sym);
        let rdma_resolve_route = __library.get(b"rdma_resolve_route\0").map(|sym| *sym);
        let rdma_connect = __library.get(b"rdma_connect\0").map(|sym| *sym);
        let rdma_establish = __library.get(b"rdma_establish\0").map(|sym| *sym);
        let rdma_listen = __library.get(b"rdma_listen\0").map(|sym| *sym);
        let rdma_accept = __library.get(b"rdma_accept\0").map(|sym| *sym);
        let rdma_reject = __library.get(b"rdma_reject\0").map(|sym| *sym);
        let rdma_disconnect = __library.get(b"rdma_disconnect\0").map(|sym| *sym);
        let rdma_get_cm_event = __library.get(b"rdma_get_cm_event\0").map(|sym| *sym);
        let rdma_ack_cm_event = __library.get(b"rdma_ack_cm_event\0").map(|sym| *sym);
        let rdma_get_src_port = __library.get(b"rdma_get_src_port\0").map(|sym| *sym);
        let rdma_event_str = __library.get(b"rdma_event_str\0").map(|sym| *sym);
        let rdma_set_option = __library.get(b"rdma_set_option\0").map(|sym| *sym);
        let rdma_init_qp_attr = __library.get(b"rdma_init_qp_attr\0").map(|sym| *sym);
        Ok(Cm {
            __library,
            rdma_create_event_channel,
            rdma_destroy_event_channel,
            rdma_create_id,
            rdma_destroy_id,
            rdma_bind_addr,
            rdma_resolve_addr,
            rdma_resolve_route,
            rdma_connect,
            rdma_establish,
            rdma_listen,
            rdma_accept,
            rdma_reject,
            rdma_disconnect,
            rdma_get_cm_event,
            rdma_ack_cm_event,
            rdma_get_src_port,
            rdma_event_str,
            rdma_set_option,
            rdma_init_qp_attr,
        })
    }
    pub unsafe fn rdma_create_event_channel(&self) -> *mut rdma_event_channel {
        (self.rdma_create_event_channel.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn rdma_destroy_event_channel(&self, channel: *mut rdma_event_channel) {
        (self.rdma_destroy_event_channel.as_ref().expect("Expected function, got error."))(channel)
    }
    pub unsafe fn rdma_create_id(
        &self,
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut ::core::ffi::c_void,
        ps: rdma_port_space,
    ) -> ::core::ffi::c_int {
        (self.rdma_create_id.as_ref().expect("Expected function, got error."))(channel, id, context, ps)
    }
    pub unsafe fn rdma_destroy_id(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        (self.rdma_destroy_id.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn rdma_bind_addr(&self, id: *mut rdma_cm_id, addr: *mut sockaddr) -> ::core::ffi::c_int {
        (self.rdma_bind_addr.as_ref().expect("Expected function, got error."))(id, addr)
    }
    pub unsafe fn rdma_resolve_addr(
        &self,
        id: *mut rdma_cm_id,
        src_addr: *mut sockaddr,
        dst_addr: *mut sockaddr,
        timeout_ms: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.rdma_resolve_addr.as_ref().expect("Expected function, got error."))(
            id, src_addr, dst_addr, timeout_ms,
        )
    }
    pub unsafe fn rdma_resolve_route(
        &self,
        id: *mut rdma_cm_id,
        timeout_ms: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.rdma_resolve_route.as_ref().expect("Expected function, got error."))(id, timeout_ms)
    }
    pub unsafe fn rdma_connect(
        &self,
        id: *mut rdma_cm_id,
        conn_param: *mut rdma_conn_param,
    ) -> ::core::ffi::c_int {
        (self.rdma_connect.as_ref().expect("Expected function, got error."))(id, conn_param)
    }
    pub unsafe fn rdma_establish(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        (self.rdma_establish.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn rdma_listen(&self, id: *mut rdma_cm_id, backlog: ::core::ffi::c_int) -> ::core::ffi::c_int {
        (self.rdma_listen.as_ref().expect("Expected function, got error."))(id, backlog)
    }
    pub unsafe fn rdma_accept(
        &self,
        id: *mut rdma_cm_id,
        conn_param: *mut rdma_conn_param,
    ) -> ::core::ffi::c_int {
        (self.rdma_accept.as_ref().expect("Expected function, got error."))(id, conn_param)
    }
    pub unsafe fn rdma_reject(
        &self,
        id: *mut rdma_cm_id,
        private_data: *const ::core::ffi::c_void,
        private_data_len: u8,
    ) -> ::core::ffi::c_int {
        (self.rdma_reject.as_ref().expect("Expected function, got error."))(
            id,
            private_data,
            private_data_len,
        )
    }
    pub unsafe fn rdma_disconnect(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        (self.rdma_disconnect.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn rdma_get_cm_event(
        &self,
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> ::core::ffi::c_int {
        (self.rdma_get_cm_event.as_ref().expect("Expected function, got error."))(channel, event)
    }
    pub unsafe fn rdma_ack_cm_event(&self, event: *mut rdma_cm_event) -> ::core::ffi::c_int {
        (self.rdma_ack_cm_event.as_ref().expect("Expected function, got error."))(event)
    }
    pub unsafe fn rdma_get_src_port(&self, id: *mut rdma_cm_id) -> __be16 {
        (self.rdma_get_src_port.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn rdma_event_str(&self, event: rdma_cm_event_type) -> *const ::core::ffi::c_char {
        (self.rdma_event_str.as_ref().expect("Expected function, got error."))(event)
    }
    pub unsafe fn rdma_set_option(
        &self,
        id: *mut rdma_cm_id,
        level: ::core::ffi::c_int,
        optname: ::core::ffi::c_int,
        optval: *mut ::core::ffi::c_void,
        optlen: usize,
    ) -> ::core::ffi::c_int {
        (self.rdma_set_option.as_ref().expect("Expected function, got error."))(
            id, level, optname, optval, optlen,
        )
    }
    pub unsafe fn rdma_init_qp_attr(
        &self,
        id: *mut rdma_cm_id,
        qp_attr: *mut ibv_qp_attr,
        qp_attr_mask: *mut ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.rdma_init_qp_attr.as_ref().expect("Expected function, got error."))(id, qp_attr, qp_attr_mask)
    }
}
