//! Memory of a GPU, or of another device, as an RDMA device registers it: by the dma-buf
//! that the GPU's driver exports, or by its address, where that driver lends memory to
//! RDMA drivers (nvidia_peermem).

use std::os::fd::AsFd;
use std::sync::Arc;

use pushgate_link::region::Exported;

use super::VerbsError;
use super::device::Device;
use super::objects::{Mr, Pd, REMOTE_WRITE};

impl Mr {
    /// Registers memory of another device.
    ///
    /// # Safety
    /// As for [`Mr::new`], of the `bytes` at device address `address`, which `exported`
    /// is of.
    pub(super) unsafe fn of_device(
        pd: &Arc<Pd>,
        address: u64,
        bytes: usize,
        exported: &Exported,
        access: u32,
    ) -> Result<Self, VerbsError> {
        match exported {
            // SAFETY: the caller's promise.
            Exported::DmaBuf(fd, offset) => unsafe {
                Mr::dmabuf(pd, fd.as_fd(), *offset, bytes, address, access)
            },
            Exported::Address => {
                let remedy = "; the kernel's RDMA drivers must know the GPU's memory: load nvidia_peermem, or \
                              have it exported as a dma-buf";
                // SAFETY: the caller's promise.
                unsafe { Mr::with_remedy(pd, "device memory", address as usize, bytes, access, remedy) }
            }
        }
    }
}

impl Device {
    /// Tries whether this device can register such memory for peers to write and to send
    /// from, and takes it back.
    ///
    /// # Safety
    /// The `bytes` at device address `address` stay allocated during the call; `exported` is
    /// of them.
    pub unsafe fn try_device_memory(
        self: &Arc<Self>,
        address: u64,
        bytes: usize,
        exported: &Exported,
    ) -> Result<(), VerbsError> {
        let pd = Pd::new(self)?;
        // SAFETY: the caller's promise; it is deregistered before the return.
        unsafe { Mr::of_device(&pd, address, bytes, exported, REMOTE_WRITE) }.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::super::mock::{self, Mock};
    use super::*;

    fn dma_buf(offset: u64) -> (Exported, u64) {
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let number = file.as_raw_fd() as u64;
        (Exported::DmaBuf(Arc::new(file), offset), number)
    }

    const AT: u64 = 0x7f00_0000_0000;

    #[test]
    fn what_is_exported_is_tried_as_it_will_be_registered_and_taken_back() {
        let mock = Mock::new(0);
        let (exported, fd) = dma_buf(0x200);
        for (exported, call) in [
            (&exported, ("reg_dmabuf_mr", vec![0x200, 4096, AT, fd, 1 | 2])),
            (&Exported::Address, ("reg_mr", vec![AT, 4096, 1 | 2])),
        ] {
            // SAFETY: the mock touches no memory.
            unsafe { mock.device.try_device_memory(AT, 4096, exported) }.unwrap();
            let expected = [("alloc_pd", vec![]), call, ("dereg_mr", vec![]), ("dealloc_pd", vec![])];
            assert_eq!(mock::take(), expected);
        }
    }

    #[test]
    fn what_can_not_be_registered_says_what_to_do() {
        let mock = Mock::new(0);
        let (exported, _) = dma_buf(0);
        for (call, exported, said) in [
            ("reg_dmabuf_mr", &exported, "registering 4096 bytes of device memory with mock0"),
            ("reg_mr", &Exported::Address, "load nvidia_peermem"),
        ] {
            mock::refuse(call);
            // SAFETY: the mock touches no memory.
            let why = unsafe { mock.device.try_device_memory(AT, 4096, exported) }.unwrap_err().to_string();
            assert!(why.contains(said), "{why}");
            let names: Vec<_> = mock::take().into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["alloc_pd", call, "dealloc_pd"], "the domain stays");
        }
    }
}
