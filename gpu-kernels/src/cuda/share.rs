//! Memory of a GPU in two processes: how one hands an allocation over, and the other maps it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags_enum as AccessFlags, CUmemAccessDesc_st,
    CUmemAllocationHandleType_enum as HandleType, CUmemAllocationProp_st,
    CUmemAllocationType_enum as AllocationType, CUmemGenericAllocationHandle, CUmemLocation_st,
    CUmemLocationType_enum as LocationType,
};

use super::context::Context;
use super::copy_stream::CopyStream;
use super::driver::SUCCESS;
use super::executor::CudaExecutor;
use crate::error::{DeviceError, Result};

/// An allocation on its way to another process.
pub(crate) enum HandedOver {
    /// Memory of cuMemCreate: a descriptor.
    Allocation(OwnedFd),
    /// Memory of cuMemAlloc: a CUDA IPC handle of the whole allocation.
    Ipc([u8; 64]),
}

/// An allocation of another process, mapped here.
pub(crate) struct Imported {
    context: Arc<Context>,
    address: CUdeviceptr,
    /// Bytes that are mapped, and the handle of the allocation; `None` for memory by CUDA IPC.
    mapped: Option<(usize, CUmemGenericAllocationHandle)>,
}

fn lacks(name: &str) -> DeviceError {
    DeviceError::CudaUnavailable { reason: format!("libcuda.so.1 lacks {name}: it is a stub, or too old") }
}

/// Memory of this GPU alone.
fn here(context: &Context) -> CUmemLocation_st {
    CUmemLocation_st { type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device }
}

impl Context {
    /// The allocation that an address lies in: where it begins, and its bytes.
    fn allocation(&self, address: u64) -> Result<(u64, u64)> {
        let range = self.driver.cuMemGetAddressRange_v2.ok_or_else(|| lacks("cuMemGetAddressRange"))?;
        let _current = self.current()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes an address and a size; the driver looks the address up.
        let code = unsafe { range(&mut base, &mut bytes, address) };
        self.check("cuMemGetAddressRange", code, || format!("asking for the allocation at {address:#x}"))?;
        Ok((base, bytes as u64))
    }

    /// Hands the allocation at `base` over.
    fn hand_over(&self, base: u64) -> Result<HandedOver> {
        let driver = self.driver;
        let doing = || format!("handing the allocation at {base:#x} to another process");
        let _current = self.current()?;
        if let (Some(retain), Some(export), Some(release)) =
            (driver.cuMemRetainAllocationHandle, driver.cuMemExportToShareableHandle, driver.cuMemRelease)
        {
            let mut handle = 0;
            // SAFETY: writes one handle; for memory that is not of cuMemCreate the driver says so.
            if unsafe { retain(&mut handle, base as *mut c_void) } == SUCCESS {
                let mut fd: c_int = -1;
                let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                // SAFETY: for this type of handle the driver writes one int.
                let code = unsafe { export((&raw mut fd).cast(), handle, kind, 0) };
                // SAFETY: retained above; the descriptor holds the allocation by itself.
                unsafe { release(handle) };
                self.check("cuMemExportToShareableHandle", code, doing)?;
                // SAFETY: a new descriptor, which the driver hands over to the caller.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                // Programs that this process starts must not inherit the GPU's memory.
                rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|e| DeviceError::Io {
                    what: "closing on exec",
                    path: "an allocation's descriptor".into(),
                    source: e.into(),
                })?;
                return Ok(HandedOver::Allocation(fd));
            }
        }
        let get = driver.cuIpcGetMemHandle.ok_or_else(|| lacks("cuIpcGetMemHandle"))?;
        let mut handle = sys::CUipcMemHandle_st { reserved: [0; 64] };
        // SAFETY: writes one handle; the driver looks the address up.
        let code = unsafe { get(&mut handle, base) };
        self.check("cuIpcGetMemHandle", code, doing)?;
        Ok(HandedOver::Ipc(handle.reserved.map(|c| c as u8)))
    }

    /// Maps an allocation of another process.
    fn import(self: &Arc<Self>, handed: HandedOver, bytes: u64) -> Result<Imported> {
        let driver = self.driver;
        let doing = || format!("mapping an allocation of {bytes} bytes of another process");
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let _current = self.current()?;
        match handed {
            HandedOver::Ipc(handle) => {
                let open = driver.cuIpcOpenMemHandle_v2.ok_or_else(|| lacks("cuIpcOpenMemHandle"))?;
                let handle = sys::CUipcMemHandle_st { reserved: handle.map(|byte| byte as _) };
                let mut address = 0;
                // Flag 1: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value that the driver takes.
                // SAFETY: writes one address.
                self.check("cuIpcOpenMemHandle", unsafe { open(&mut address, handle, 1) }, doing)?;
                let imported = Imported { context: self.clone(), address, mapped: None };
                // The client says how long the allocation is. The driver knows.
                let (base, length) = self.allocation(address)?;
                if address - base + bytes as u64 > length {
                    return Err(DeviceError::Range {
                        what: "an allocation of another process",
                        offset: (address - base) as usize,
                        len: bytes,
                        size: length as usize,
                    });
                }
                Ok(imported)
            }
            HandedOver::Allocation(fd) => {
                let import = driver
                    .cuMemImportFromShareableHandle
                    .ok_or_else(|| lacks("cuMemImportFromShareableHandle"))?;
                let mut handle = 0;
                let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                // SAFETY: for this type the driver takes the descriptor in place of a pointer; writes one handle.
                let code = unsafe { import(&mut handle, fd.as_raw_fd() as usize as *mut c_void, kind) };
                self.check("cuMemImportFromShareableHandle", code, doing)?;
                // SAFETY: the handle is new.
                unsafe { self.map(handle, bytes) }
            }
        }
    }

    /// Maps an allocation for this GPU. The context must be current.
    ///
    /// # Safety
    /// `handle` is an allocation's, and belongs to the result from here on.
    unsafe fn map(self: &Arc<Self>, handle: CUmemGenericAllocationHandle, bytes: usize) -> Result<Imported> {
        let driver = self.driver;
        let doing = || format!("mapping an allocation of {bytes} bytes");
        // From here on dropping the value undoes what was done.
        let mut mapping = Imported { context: self.clone(), address: 0, mapped: Some((0, handle)) };
        let (Some(reserve), Some(map), Some(access)) =
            (driver.cuMemAddressReserve, driver.cuMemMap, driver.cuMemSetAccess)
        else {
            return Err(lacks("cuMemMap"));
        };
        // SAFETY: writes one address; no alignment, no wish.
        let code = unsafe { reserve(&mut mapping.address, bytes, 0, 0, 0) };
        self.check("cuMemAddressReserve", code, doing)?;
        // SAFETY: the range was reserved above; the driver refuses more bytes than the allocation has.
        let code = unsafe { map(mapping.address, bytes, 0, handle, 0) };
        if code != SUCCESS {
            mapping.free(bytes);
        }
        self.check("cuMemMap", code, doing)?;
        mapping.mapped = Some((bytes, handle));
        let flags = AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let readable = CUmemAccessDesc_st { location: here(self), flags };
        // SAFETY: reads one description; the range was mapped above.
        let code = unsafe { access(mapping.address, bytes, &readable, 1) };
        self.check("cuMemSetAccess", code, doing)?;
        Ok(mapping)
    }

    /// Makes an allocation that can be handed over as a descriptor, of one unit of the GPU's.
    fn exportable(self: &Arc<Self>) -> Result<(Imported, usize)> {
        let driver = self.driver;
        let (Some(create), Some(granularity)) = (driver.cuMemCreate, driver.cuMemGetAllocationGranularity)
        else {
            return Err(lacks("cuMemCreate"));
        };
        let doing = || "making memory that another process may have".to_owned();
        let _current = self.current()?;
        // SAFETY: a structure of numbers, for which zeros are valid: no flags, no compression.
        let mut of: CUmemAllocationProp_st = unsafe { std::mem::zeroed() };
        of.type_ = AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        of.requestedHandleTypes = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        of.location = here(self);
        let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut bytes, mut handle) = (0, 0);
        // SAFETY: writes one size.
        self.check("cuMemGetAllocationGranularity", unsafe { granularity(&mut bytes, &of, least) }, doing)?;
        // SAFETY: writes one handle.
        self.check("cuMemCreate", unsafe { create(&mut handle, bytes, &of, 0) }, doing)?;
        // SAFETY: the handle is new.
        Ok((unsafe { self.map(handle, bytes)? }, bytes))
    }
}

impl Imported {
    /// Where the allocation lies in this process.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    fn free(&mut self, bytes: usize) {
        if let Some(free) = self.context.driver.cuMemAddressFree {
            // SAFETY: reserved with this size, and nothing is mapped there.
            let code = unsafe { free(self.address, bytes) };
            self.context.note("cuMemAddressFree", code, || format!("giving back {bytes} bytes of addresses"));
        }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let context = self.context.clone();
        let Ok(_current) = context.current() else { return };
        let Some((bytes, handle)) = self.mapped else {
            if let Some(close) = context.driver.cuIpcCloseMemHandle {
                // SAFETY: opened in `import`.
                let code = unsafe { close(self.address) };
                context.note("cuIpcCloseMemHandle", code, || {
                    "letting go of another process's memory".to_owned()
                });
            }
            return;
        };
        if bytes > 0 {
            if let Some(unmap) = context.driver.cuMemUnmap {
                // SAFETY: mapped as a whole in `import`; copies to and from it are complete, as its owner promises.
                let code = unsafe { unmap(self.address, bytes) };
                context.note("cuMemUnmap", code, || format!("unmapping {bytes} bytes of another process"));
            }
            self.free(bytes);
        }
        if let Some(release) = context.driver.cuMemRelease {
            // SAFETY: the handle is this value's.
            let code = unsafe { release(handle) };
            context.note("cuMemRelease", code, || "letting go of an allocation".to_owned());
        }
    }
}

impl CudaExecutor {
    /// The allocation that an address lies in: where it begins, and its bytes.
    pub(crate) fn allocation(&self, address: u64) -> Result<(u64, u64)> {
        self.context().allocation(address)
    }

    /// Hands the allocation at `base` over to another process.
    pub(crate) fn hand_over(&self, base: u64) -> Result<HandedOver> {
        self.context().hand_over(base)
    }

    /// Maps an allocation of another process, `bytes` long.
    pub(crate) fn import(&self, handed: HandedOver, bytes: u64) -> Result<Imported> {
        self.context().import(handed, bytes)
    }

    /// Memory that can be handed over as a descriptor, as NCCL's is, and its bytes.
    pub(crate) fn exportable(&self) -> Result<(Imported, usize)> {
        self.context().exportable()
    }

    /// A stream of copies, of the highest priority.
    pub(crate) fn copy_stream(&self) -> Result<CopyStream> {
        CopyStream::new(self.context())
    }

    /// The GPU's UUID (of a MIG instance, the instance's), as 32 digits.
    pub(crate) fn uuid(&self) -> Result<String> {
        uuid_of(self.context().device)
    }
}

/// The index of the GPU with this UUID ([`CudaExecutor::uuid`]) among those that this process sees.
pub(crate) fn index_of(uuid: &str) -> Result<u32> {
    let (_, info) = super::driver::driver().map_err(|reason| DeviceError::CudaUnavailable { reason })?;
    for index in 0..info.devices {
        if uuid_of(index as c_int)? == uuid {
            return Ok(index);
        }
    }
    Err(DeviceError::CudaUnavailable {
        reason: format!("none of the {} GPUs seen here has the UUID {uuid}", info.devices),
    })
}

/// The UUID of the GPU with this index among those that this process sees ([`CudaExecutor::uuid`]).
pub(crate) fn uuid_at(index: u32) -> Result<String> {
    uuid_of(c_int::try_from(index).unwrap_or(c_int::MAX))
}

/// The UUID of a device, as 32 digits. Makes no context.
fn uuid_of(device: c_int) -> Result<String> {
    let (driver, _) = super::driver::driver().map_err(|reason| DeviceError::CudaUnavailable { reason })?;
    let get = driver.cuDeviceGetUuid_v2.ok_or_else(|| lacks("cuDeviceGetUuid"))?;
    let mut uuid = sys::CUuuid_st { bytes: [0; 16] };
    // SAFETY: writes 16 bytes about a device; a number that is none is an error.
    let code = unsafe { get(&mut uuid, device) };
    driver.check("cuDeviceGetUuid", code, || format!("asking device {device} for its UUID"))?;
    Ok(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
}
