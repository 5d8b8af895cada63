//! Host memory that is registered with the CPU executor.

use std::ffi::c_void;

/// A registered range of host memory.
///
/// A GPU pins the pages. If the range is unmapped before it is unregistered, the GPU goes on using
/// the old pages, even after other memory has been mapped and registered at that address. On the
/// CPU that mistake does no harm and would stay unnoticed, so this executor checks for it.
pub(super) struct CpuHostRange {
    pub(super) addr: usize,
    pub(super) len: usize,
}

impl Drop for CpuHostRange {
    fn drop(&mut self) {
        let start = self.addr & !(rustix::param::page_size() - 1);
        let length = self.addr + self.len - start;
        // SAFETY: msync with MS_ASYNC changes nothing. On Linux it only checks that all of the
        // range is mapped (msync(2), ENOMEM).
        let mapped =
            unsafe { rustix::mm::msync(start as *mut c_void, length, rustix::mm::MsyncFlags::ASYNC) };
        if mapped == Err(rustix::io::Errno::NOMEM) {
            tracing::error!(
                "{} bytes at {:#x} are unmapped and still registered with the device; drop the registration first",
                self.len,
                self.addr
            );
        }
    }
}
