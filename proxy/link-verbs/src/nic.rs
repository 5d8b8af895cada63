//! Memory of the RDMA device itself, which a window could lie in: it sends from
//! there without a read over PCIe.
//!
//! No setting offers it. A kernel must store into it, and for that the device's
//! driver must export it, see "Windows in the NIC" in docs/driver.md.

use std::ptr::NonNull;
use std::sync::Arc;

use pushgate_rdma_core_sys as sys;

use super::VerbsError;
use super::device::Device;
use super::kinds::failure;
use super::objects::{Mr, Pd, SEND_ONLY};

/// Allocated memory of a device.
struct Dm {
    device: Arc<Device>,
    raw: NonNull<sys::ibv_dm>,
}

// SAFETY: as for `Pd`: libibverbs' calls are thread-safe, and nothing is tied to
// a thread.
unsafe impl Send for Dm {}

impl Drop for Dm {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // SAFETY: allocated by `NicMemory::new`; a region over it went before.
        unsafe { sys::ibv_free_dm(self.raw.as_ptr()) };
    }
}

/// Memory of a device, registered for sending from: addressed from 0, as all
/// such regions are.
pub(super) struct NicMemory {
    // In this order: a region goes before its memory.
    mr: Mr,
    dm: Dm,
    bytes: usize,
}

impl NicMemory {
    pub(super) fn new(pd: &Arc<Pd>, bytes: usize) -> Result<Self, VerbsError> {
        let device = &pd.device;
        let most = limit(device)?;
        if bytes as u64 > most {
            return Err(VerbsError::NicMemory { device: device.name().into(), bytes, most });
        }
        let failed = |doing: &str| VerbsError::Call {
            what: format!("{doing} {bytes} bytes of {}'s own memory", device.name()),
            error: std::io::Error::last_os_error(),
            remedy: "; others may have taken it: use window = memory".into(),
        };
        let mut attributes = sys::ibv_alloc_dm_attr { length: bytes, ..Default::default() };
        // SAFETY: the context is open, the attributes are ours.
        let raw = unsafe { sys::ibv_alloc_dm(device.raw(), &mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("allocating"))?;
        let dm = Dm { device: device.clone(), raw };
        // Kernels refuse such a region that is not zero-based.
        let access = SEND_ONLY | sys::ibv_access_flags::IBV_ACCESS_ZERO_BASED.0;
        // SAFETY: domain and memory are of one context, and alive.
        let raw = unsafe { sys::ibv_reg_dm_mr(pd.raw.as_ptr(), dm.raw.as_ptr(), 0, bytes, access) };
        let mr = Mr::made(pd, raw, || failed("registering"))?;
        Ok(NicMemory { mr, dm, bytes })
    }

    /// For work requests that send from it.
    pub(super) fn lkey(&self) -> u32 {
        self.mr.lkey
    }

    /// Copies to byte `offset`. Some devices take whole words alone.
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> Result<(), VerbsError> {
        self.check(offset, from.len());
        // SAFETY: within the memory, as just checked; `from` is readable.
        let r = unsafe {
            sys::ibv_memcpy_to_dm(self.dm.raw.as_ptr(), offset as u64, from.as_ptr().cast(), from.len())
        };
        self.copied(r)
    }

    /// Copies from byte `offset`.
    pub(super) fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), VerbsError> {
        self.check(offset, to.len());
        // SAFETY: within the memory, as just checked; `to` is writable.
        let r = unsafe {
            sys::ibv_memcpy_from_dm(to.as_mut_ptr().cast(), self.dm.raw.as_ptr(), offset as u64, to.len())
        };
        self.copied(r)
    }

    fn check(&self, offset: usize, length: usize) {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.bytes), "{length} bytes at {offset} of {}", self.bytes);
    }

    fn copied(&self, errno: i32) -> Result<(), VerbsError> {
        if errno == 0 {
            return Ok(());
        }
        Err(VerbsError::Call {
            what: format!("copying to or from {}'s own memory", self.dm.device.name()),
            error: failure(errno),
            remedy: String::new(),
        })
    }
}

/// Most bytes that one piece of the device's memory can have; 0 if it has none.
fn limit(device: &Device) -> Result<u64, VerbsError> {
    // SAFETY: plain data.
    let mut attributes: sys::ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open, the place ours, and nothing is asked for besides.
    let r =
        unsafe { sys::ibv_query_device_ex(device.verbs, device.raw(), std::ptr::null(), &mut attributes) };
    if r != 0 {
        return Err(VerbsError::Call {
            what: format!("querying RDMA device {}", device.name()),
            error: failure(r),
            remedy: String::new(),
        });
    }
    Ok(attributes.max_dm_size)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::super::mock::{self, Mock};
    use super::super::objects::REMOTE_WRITE;
    use super::*;

    fn sentence(r: Result<NicMemory, VerbsError>) -> String {
        r.err().expect("refused").to_string()
    }

    #[test]
    fn memory_is_allocated_registered_used_and_freed_in_order() {
        let mock = Mock::new(8192);
        let pd = Pd::new(&mock.device).unwrap();
        let memory = NicMemory::new(&pd, 4096).unwrap();
        assert_eq!(memory.lkey(), mock::LKEY);
        memory.write(64, b"a payload").unwrap();
        let mut back = [0; 9];
        memory.read(64, &mut back).unwrap();
        assert_eq!(&back, b"a payload");
        drop(pd);
        drop(memory);
        drop(mock);
        let expected = [
            ("alloc_pd", vec![]),
            ("query_device_ex", vec![]),
            ("alloc_dm", vec![4096, 0]),
            ("reg_dm_mr", vec![0, 4096, 32]), // IBV_ACCESS_ZERO_BASED
            ("memcpy_to_dm", vec![64, 9]),
            ("memcpy_from_dm", vec![64, 9]),
            // The region first. Memory is the device's and outlives a domain.
            ("dereg_mr", vec![]),
            ("dealloc_pd", vec![]),
            ("free_dm", vec![]),
            ("close_device", vec![]),
        ];
        assert_eq!(mock::take(), expected);
    }

    #[test]
    fn a_device_without_memory_or_with_too_little_says_so() {
        let none = Mock::new(0);
        let pd = Pd::new(&none.device).unwrap();
        assert_eq!(
            sentence(NicMemory::new(&pd, 4096)),
            "mock0 has no memory of its own (max_dm_size 0): use window = memory"
        );
        let little = Mock::new(2048);
        let pd = Pd::new(&little.device).unwrap();
        assert_eq!(
            sentence(NicMemory::new(&pd, 4096)),
            "mock0 gives at most 2048 bytes of its own memory (max_dm_size), and 4096 were asked for: use \
             window = memory"
        );
        assert!(mock::take().iter().all(|(name, _)| *name != "alloc_dm"));
    }

    #[test]
    fn memory_that_cannot_be_registered_is_freed() {
        let mock = Mock::new(8192);
        mock::refuse("reg_dm_mr");
        let pd = Pd::new(&mock.device).unwrap();
        let why = sentence(NicMemory::new(&pd, 4096));
        assert!(why.starts_with("registering 4096 bytes of mock0's own memory: "), "{why}");
        let names: Vec<_> = mock::take().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["alloc_pd", "query_device_ex", "alloc_dm", "reg_dm_mr", "free_dm"]);
    }

    #[test]
    #[should_panic(expected = "2 bytes at 4095 of 4096")]
    fn p8_a_copy_stays_within_the_memory() {
        let mock = Mock::new(8192);
        let pd = Pd::new(&mock.device).unwrap();
        let _ = NicMemory::new(&pd, 4096).unwrap().write(4095, &[1, 2]);
    }

    #[test]
    fn exported_memory_is_registered_as_it_was_given() {
        let mock = Mock::new(0);
        let pd = Pd::new(&mock.device).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let register =
            // SAFETY: the mock touches no memory.
            |pd| unsafe { Mr::dmabuf(pd, file.as_fd(), 0xe00, 1000, 0x7f00_0000_0e00, REMOTE_WRITE) };
        let mr = register(&pd).unwrap();
        assert_eq!((mr.lkey, mr.rkey), (mock::LKEY, mock::RKEY));
        drop(mr);
        let fd = file.as_raw_fd() as u64;
        let calls = mock::take();
        // Local and remote writes, and nothing relaxed.
        assert_eq!(calls[1], ("reg_dmabuf_mr", vec![0xe00, 1000, 0x7f00_0000_0e00, fd, 1 | 2]));
        assert_eq!(calls[2].0, "dereg_mr");

        mock::refuse("reg_dmabuf_mr");
        let why = register(&pd).err().unwrap().to_string();
        assert!(why.starts_with("registering 1000 bytes of device memory with mock0: "), "{why}");
        let old = Mock::old();
        let pd = Pd::new(&old.device).unwrap();
        let why = register(&pd).err().unwrap().to_string();
        assert!(why.contains("no ibv_reg_dmabuf_mr (rdma-core 34 or later), needed on mock0"), "{why}");
    }

    /// On whatever RDMA devices there are: those that have memory give it, and
    /// soft-RoCE says that it has none.
    #[test]
    #[ignore = "needs RDMA devices: cargo xtask vm --suite verbs-endpoint"]
    fn real_devices_give_memory_or_say_that_they_have_none() {
        let names = Device::list().unwrap();
        assert!(!names.is_empty(), "no RDMA device");
        for name in names {
            let device = Device::open(&name, 1).unwrap();
            let pd = Pd::new(&device).unwrap();
            match NicMemory::new(&pd, 4096) {
                Ok(memory) => {
                    memory.write(64, &[7; 64]).unwrap();
                    let mut back = [0; 64];
                    memory.read(64, &mut back).unwrap();
                    assert_eq!(back, [7; 64]);
                    println!("{name}: {} bytes of its own", limit(&device).unwrap());
                }
                // Others may have taken what there is.
                Err(e) => {
                    println!("{e}");
                    assert_eq!(matches!(e, VerbsError::NicMemory { .. }), limit(&device).unwrap() < 4096);
                }
            }
        }
    }
}
