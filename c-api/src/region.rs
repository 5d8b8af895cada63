//! Regions: memory that the peer of a queue pair may put into.

use std::ffi::c_int;
use std::sync::Arc;

use pushgate::Region;

use crate::arguments::Out;
use crate::boundary::{Failure, call};
use crate::codes::*;
use crate::memory::{MemoryObject, Place, pushgate_memory};
use crate::queue_pair::{QueuePairObject, pushgate_queue_pair};
use crate::table::{self, Object};

/// Memory that is registered with a queue pair: the peer's kernels may put into it, and work requests of this end may name it.
/// Any thread may use one.
pub struct pushgate_region;

/// A region, with what it was made of.
pub(crate) struct RegionObject {
    region: Region,
    _qp: Arc<QueuePairObject>,
    _memory: Arc<MemoryObject>,
}

impl Object for RegionObject {
    type Handle = pushgate_region;
    const NAME: &'static str = "region";
}

/// Registers all of a memory with a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_region_create(
    qp: *const pushgate_queue_pair,
    memory: *const pushgate_memory,
    region: *mut *mut pushgate_region,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::handle("region", region)? };
        let qp = table::get::<QueuePairObject>(qp)?;
        let memory = table::get::<MemoryObject>(memory)?;
        let registered = match &memory.place {
            Place::Host(memory) => qp.qp.register_shared(memory)?,
            // SAFETY: the region holds the memory, and the memory's handle can't be closed before the region's, which is
            // closed after a successful deregistration alone.
            Place::Device(memory) => unsafe { qp.qp.register_buffer(memory)? },
            // SAFETY: as above; that the program keeps it mapped as long is what pushgate_memory_use_host asks for.
            Place::OwnHost(memory) => unsafe { qp.qp.register_host(memory)? },
            // SAFETY: as above, by pushgate_memory_use_device.
            Place::OwnDevice { address, size } => unsafe { qp.qp.register_device(*address, *size)? },
        };
        out.put(table::open(RegionObject { region: registered, _qp: qp, _memory: memory }));
        Ok(())
    })
}

/// The region's key: lkey and rkey in one. The peer needs it to put into the region; pushgate_comm_all_gather brings it there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_region_key(region: *const pushgate_region, key: *mut u32) -> c_int {
    call(|| {
        let object = table::get::<RegionObject>(region)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe { Out::new("key", key)? }.put(object.region.key());
        Ok(())
    })
}

/// Deregisters a region and closes it, once nothing under way uses it. NULL is no error.
///
/// Returns PUSHGATE_E_BUSY if messages out of the region, or copies into it, did not end within 2 s: it stays open then, and its
/// memory must stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_region_close(region: *mut pushgate_region) -> c_int {
    call(|| {
        table::close_if::<RegionObject>(region, |object| match object.region.deregister()? {
            true => Ok(()),
            false => {
                let why = format!("messages or copies still use the region {:#x}", object.region.key());
                Err(Failure::new(PUSHGATE_E_BUSY, why))
            }
        })
    })
}
