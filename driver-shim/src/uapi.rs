// Generated from include/uapi/pushgate.h by `cargo xtask bindings`; do not edit.

type __u32 = u32;
type __s32 = i32;
type __u64 = u64;

pub const PUSHGATE_UAPI_VERSION: u32 = 1;
pub const PUSHGATE_IOC_MAGIC: u32 = 189;
pub const PUSHGATE_MMAP_SLICE: u32 = 0;
pub const PUSHGATE_MMAP_STATUS: u64 = 1099511627776;
pub const PUSHGATE_MMAP_DOORBELL: u64 = 2199023255552;
pub const PUSHGATE_MMAP_STAGING: u64 = 3298534883328;
pub const PUSHGATE_FEATURE_STAGING: u32 = 1;
pub const PUSHGATE_FEATURE_SLICE: u32 = 2;
pub const PUSHGATE_FEATURE_DMABUF: u32 = 4;
pub const PUSHGATE_FEATURE_INTERRUPT: u32 = 8;
pub const PUSHGATE_FEATURE_DOORBELL_MMAP: u32 = 16;
pub const PUSHGATE_FEATURE_DOORBELL_RING: u32 = 32;
pub const PUSHGATE_FEATURE_STAGING_EXPORT: u32 = 64;
pub const PUSHGATE_VIEW_NAME: &[u8; 19] = b"[pushgate-staging]\0";
pub const PUSHGATE_FUNCTION_NONE: u32 = 0;
pub const PUSHGATE_FUNCTION_LIVE: u32 = 1;
pub const PUSHGATE_FUNCTION_GONE: u32 = 2;
pub const PUSHGATE_NAME_BYTES: u32 = 64;
pub const PUSHGATE_ARM: u32 = 1;
pub const PUSHGATE_DISARM: u32 = 2;
#[repr(C)]
pub struct pushgate_status_page {
    pub function: __u64,
    pub rings: __u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_status_page"][::core::mem::size_of::<pushgate_status_page>() - 16usize];
    ["Alignment of pushgate_status_page"][::core::mem::align_of::<pushgate_status_page>() - 8usize];
    ["Offset of field: pushgate_status_page::function"]
        [::core::mem::offset_of!(pushgate_status_page, function) - 0usize];
    ["Offset of field: pushgate_status_page::rings"]
        [::core::mem::offset_of!(pushgate_status_page, rings) - 8usize];
};
impl Default for pushgate_status_page {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_info {
    pub size: __u32,
    pub flags: __u32,
    pub version: __u32,
    pub vectors: __u32,
    pub features: __u64,
    pub window_bytes: __u64,
    pub granule: __u64,
    pub doorbell_offset: __u64,
    pub function: __u32,
    pub node: __s32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_info"][::core::mem::size_of::<pushgate_info>() - 56usize];
    ["Alignment of pushgate_info"][::core::mem::align_of::<pushgate_info>() - 8usize];
    ["Offset of field: pushgate_info::size"][::core::mem::offset_of!(pushgate_info, size) - 0usize];
    ["Offset of field: pushgate_info::flags"][::core::mem::offset_of!(pushgate_info, flags) - 4usize];
    ["Offset of field: pushgate_info::version"][::core::mem::offset_of!(pushgate_info, version) - 8usize];
    ["Offset of field: pushgate_info::vectors"][::core::mem::offset_of!(pushgate_info, vectors) - 12usize];
    ["Offset of field: pushgate_info::features"][::core::mem::offset_of!(pushgate_info, features) - 16usize];
    ["Offset of field: pushgate_info::window_bytes"]
        [::core::mem::offset_of!(pushgate_info, window_bytes) - 24usize];
    ["Offset of field: pushgate_info::granule"][::core::mem::offset_of!(pushgate_info, granule) - 32usize];
    ["Offset of field: pushgate_info::doorbell_offset"]
        [::core::mem::offset_of!(pushgate_info, doorbell_offset) - 40usize];
    ["Offset of field: pushgate_info::function"][::core::mem::offset_of!(pushgate_info, function) - 48usize];
    ["Offset of field: pushgate_info::node"][::core::mem::offset_of!(pushgate_info, node) - 52usize];
};
impl Default for pushgate_info {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_slice_alloc {
    pub size: __u32,
    pub flags: __u32,
    pub bytes: __u64,
    pub align: __u64,
    pub offset: __u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_slice_alloc"][::core::mem::size_of::<pushgate_slice_alloc>() - 32usize];
    ["Alignment of pushgate_slice_alloc"][::core::mem::align_of::<pushgate_slice_alloc>() - 8usize];
    ["Offset of field: pushgate_slice_alloc::size"]
        [::core::mem::offset_of!(pushgate_slice_alloc, size) - 0usize];
    ["Offset of field: pushgate_slice_alloc::flags"]
        [::core::mem::offset_of!(pushgate_slice_alloc, flags) - 4usize];
    ["Offset of field: pushgate_slice_alloc::bytes"]
        [::core::mem::offset_of!(pushgate_slice_alloc, bytes) - 8usize];
    ["Offset of field: pushgate_slice_alloc::align"]
        [::core::mem::offset_of!(pushgate_slice_alloc, align) - 16usize];
    ["Offset of field: pushgate_slice_alloc::offset"]
        [::core::mem::offset_of!(pushgate_slice_alloc, offset) - 24usize];
};
impl Default for pushgate_slice_alloc {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_slice_export {
    pub size: __u32,
    pub flags: __u32,
    pub fd: __s32,
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_slice_export"][::core::mem::size_of::<pushgate_slice_export>() - 16usize];
    ["Alignment of pushgate_slice_export"][::core::mem::align_of::<pushgate_slice_export>() - 4usize];
    ["Offset of field: pushgate_slice_export::size"]
        [::core::mem::offset_of!(pushgate_slice_export, size) - 0usize];
    ["Offset of field: pushgate_slice_export::flags"]
        [::core::mem::offset_of!(pushgate_slice_export, flags) - 4usize];
    ["Offset of field: pushgate_slice_export::fd"]
        [::core::mem::offset_of!(pushgate_slice_export, fd) - 8usize];
    ["Offset of field: pushgate_slice_export::reserved"]
        [::core::mem::offset_of!(pushgate_slice_export, reserved) - 12usize];
};
impl Default for pushgate_slice_export {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_staging_create {
    pub size: __u32,
    pub flags: __u32,
    pub bytes: __u64,
    pub node: __s32,
    pub ttl_ms: __u32,
    pub pieces: __u64,
    pub name: [::core::ffi::c_char; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_staging_create"][::core::mem::size_of::<pushgate_staging_create>() - 96usize];
    ["Alignment of pushgate_staging_create"][::core::mem::align_of::<pushgate_staging_create>() - 8usize];
    ["Offset of field: pushgate_staging_create::size"]
        [::core::mem::offset_of!(pushgate_staging_create, size) - 0usize];
    ["Offset of field: pushgate_staging_create::flags"]
        [::core::mem::offset_of!(pushgate_staging_create, flags) - 4usize];
    ["Offset of field: pushgate_staging_create::bytes"]
        [::core::mem::offset_of!(pushgate_staging_create, bytes) - 8usize];
    ["Offset of field: pushgate_staging_create::node"]
        [::core::mem::offset_of!(pushgate_staging_create, node) - 16usize];
    ["Offset of field: pushgate_staging_create::ttl_ms"]
        [::core::mem::offset_of!(pushgate_staging_create, ttl_ms) - 20usize];
    ["Offset of field: pushgate_staging_create::pieces"]
        [::core::mem::offset_of!(pushgate_staging_create, pieces) - 24usize];
    ["Offset of field: pushgate_staging_create::name"]
        [::core::mem::offset_of!(pushgate_staging_create, name) - 32usize];
};
impl Default for pushgate_staging_create {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_staging_open {
    pub size: __u32,
    pub flags: __u32,
    pub bytes: __u64,
    pub attaches: __u64,
    pub ttl_ms: __u32,
    pub reserved: __u32,
    pub name: [::core::ffi::c_char; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_staging_open"][::core::mem::size_of::<pushgate_staging_open>() - 96usize];
    ["Alignment of pushgate_staging_open"][::core::mem::align_of::<pushgate_staging_open>() - 8usize];
    ["Offset of field: pushgate_staging_open::size"]
        [::core::mem::offset_of!(pushgate_staging_open, size) - 0usize];
    ["Offset of field: pushgate_staging_open::flags"]
        [::core::mem::offset_of!(pushgate_staging_open, flags) - 4usize];
    ["Offset of field: pushgate_staging_open::bytes"]
        [::core::mem::offset_of!(pushgate_staging_open, bytes) - 8usize];
    ["Offset of field: pushgate_staging_open::attaches"]
        [::core::mem::offset_of!(pushgate_staging_open, attaches) - 16usize];
    ["Offset of field: pushgate_staging_open::ttl_ms"]
        [::core::mem::offset_of!(pushgate_staging_open, ttl_ms) - 24usize];
    ["Offset of field: pushgate_staging_open::reserved"]
        [::core::mem::offset_of!(pushgate_staging_open, reserved) - 28usize];
    ["Offset of field: pushgate_staging_open::name"]
        [::core::mem::offset_of!(pushgate_staging_open, name) - 32usize];
};
impl Default for pushgate_staging_open {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_staging_free {
    pub size: __u32,
    pub flags: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_staging_free"][::core::mem::size_of::<pushgate_staging_free>() - 8usize];
    ["Alignment of pushgate_staging_free"][::core::mem::align_of::<pushgate_staging_free>() - 4usize];
    ["Offset of field: pushgate_staging_free::size"]
        [::core::mem::offset_of!(pushgate_staging_free, size) - 0usize];
    ["Offset of field: pushgate_staging_free::flags"]
        [::core::mem::offset_of!(pushgate_staging_free, flags) - 4usize];
};
impl Default for pushgate_staging_free {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_staging_export {
    pub size: __u32,
    pub flags: __u32,
    pub fd: __s32,
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_staging_export"][::core::mem::size_of::<pushgate_staging_export>() - 16usize];
    ["Alignment of pushgate_staging_export"][::core::mem::align_of::<pushgate_staging_export>() - 4usize];
    ["Offset of field: pushgate_staging_export::size"]
        [::core::mem::offset_of!(pushgate_staging_export, size) - 0usize];
    ["Offset of field: pushgate_staging_export::flags"]
        [::core::mem::offset_of!(pushgate_staging_export, flags) - 4usize];
    ["Offset of field: pushgate_staging_export::fd"]
        [::core::mem::offset_of!(pushgate_staging_export, fd) - 8usize];
    ["Offset of field: pushgate_staging_export::reserved"]
        [::core::mem::offset_of!(pushgate_staging_export, reserved) - 12usize];
};
impl Default for pushgate_staging_export {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_doorbell_set {
    pub size: __u32,
    pub flags: __u32,
    pub eventfd: __s32,
    pub vector: __u32,
    pub interval_us: __u32,
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_doorbell_set"][::core::mem::size_of::<pushgate_doorbell_set>() - 24usize];
    ["Alignment of pushgate_doorbell_set"][::core::mem::align_of::<pushgate_doorbell_set>() - 4usize];
    ["Offset of field: pushgate_doorbell_set::size"]
        [::core::mem::offset_of!(pushgate_doorbell_set, size) - 0usize];
    ["Offset of field: pushgate_doorbell_set::flags"]
        [::core::mem::offset_of!(pushgate_doorbell_set, flags) - 4usize];
    ["Offset of field: pushgate_doorbell_set::eventfd"]
        [::core::mem::offset_of!(pushgate_doorbell_set, eventfd) - 8usize];
    ["Offset of field: pushgate_doorbell_set::vector"]
        [::core::mem::offset_of!(pushgate_doorbell_set, vector) - 12usize];
    ["Offset of field: pushgate_doorbell_set::interval_us"]
        [::core::mem::offset_of!(pushgate_doorbell_set, interval_us) - 16usize];
    ["Offset of field: pushgate_doorbell_set::reserved"]
        [::core::mem::offset_of!(pushgate_doorbell_set, reserved) - 20usize];
};
impl Default for pushgate_doorbell_set {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_doorbell_arm {
    pub size: __u32,
    pub flags: __u32,
    pub seen: __u64,
    pub rings: __u64,
    pub armed: __u32,
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_doorbell_arm"][::core::mem::size_of::<pushgate_doorbell_arm>() - 32usize];
    ["Alignment of pushgate_doorbell_arm"][::core::mem::align_of::<pushgate_doorbell_arm>() - 8usize];
    ["Offset of field: pushgate_doorbell_arm::size"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, size) - 0usize];
    ["Offset of field: pushgate_doorbell_arm::flags"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, flags) - 4usize];
    ["Offset of field: pushgate_doorbell_arm::seen"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, seen) - 8usize];
    ["Offset of field: pushgate_doorbell_arm::rings"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, rings) - 16usize];
    ["Offset of field: pushgate_doorbell_arm::armed"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, armed) - 24usize];
    ["Offset of field: pushgate_doorbell_arm::reserved"]
        [::core::mem::offset_of!(pushgate_doorbell_arm, reserved) - 28usize];
};
impl Default for pushgate_doorbell_arm {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
pub struct pushgate_doorbell_ring {
    pub size: __u32,
    pub flags: __u32,
    pub value: __u32,
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of pushgate_doorbell_ring"][::core::mem::size_of::<pushgate_doorbell_ring>() - 16usize];
    ["Alignment of pushgate_doorbell_ring"][::core::mem::align_of::<pushgate_doorbell_ring>() - 4usize];
    ["Offset of field: pushgate_doorbell_ring::size"]
        [::core::mem::offset_of!(pushgate_doorbell_ring, size) - 0usize];
    ["Offset of field: pushgate_doorbell_ring::flags"]
        [::core::mem::offset_of!(pushgate_doorbell_ring, flags) - 4usize];
    ["Offset of field: pushgate_doorbell_ring::value"]
        [::core::mem::offset_of!(pushgate_doorbell_ring, value) - 8usize];
    ["Offset of field: pushgate_doorbell_ring::reserved"]
        [::core::mem::offset_of!(pushgate_doorbell_ring, reserved) - 12usize];
};
impl Default for pushgate_doorbell_ring {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
