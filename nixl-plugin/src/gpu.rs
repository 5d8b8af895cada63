//! GPU memory: the GPUs that an agent uses, and copies between their memory and the windows of its connections.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use pushgate::HostEnd;
use pushgate_gpu_kernels::{
    Access, CpuExecutor, CudaExecutor, Executor, PageCopies, PageCopy, PageTicket, PageWay, Registration,
    probe,
};

use crate::status::{self, Status};

/// Whether, and how, an agent serves GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// This host has no GPU that can be used.
    Nothing,
    /// Memory of CUDA's devices.
    Cuda,
    /// Host memory that plays the memory of GPUs, for tests.
    Played,
}

impl Offer {
    /// What this host has. With `_PUSHGATE_NIXL_GPU=cpu` in the environment the CPU executor plays all GPUs.
    pub fn of_host() -> Offer {
        match std::env::var_os("_PUSHGATE_NIXL_GPU") {
            Some(value) if value == "cpu" => Offer::Played,
            _ if probe().is_ok() => Offer::Cuda,
            _ => Offer::Nothing,
        }
    }
}

/// The GPUs of an agent, each opened when memory of it is first registered.
pub struct Gpus {
    offer: Offer,
    own_context: bool,
    open: HashMap<u32, Gpu>,
}

struct Gpu {
    // The copies use the executor.
    copies: PageCopies,
    executor: Arc<dyn Executor>,
}

/// Copies that go on. Their memories must stay until [`Gpus::is_done`].
pub struct Work {
    parts: Vec<(u32, PageTicket)>,
    /// Why the rest was not started.
    failed: Option<String>,
    /// What may not be touched any more before somebody's end looks whether these are the last.
    _users: Vec<Arc<()>>,
}

/// Copies that are to be started, by GPU. One end of each lies in host memory of a connection.
#[derive(Default)]
pub struct Lists(Vec<(u32, Vec<PageCopy>)>);

/// The memories of a connection's messages, as GPUs see them.
pub struct Windows {
    places: Vec<(NonNull<u8>, usize, Access)>,
    /// The registrations of each GPU, in the order of `places`. `None`: the GPU can't see that memory.
    seen: HashMap<u32, Vec<Option<Registration>>>,
}

// SAFETY: the pointers name memory that the connection keeps; only the driver gets them.
unsafe impl Send for Windows {}

impl Work {
    fn new(users: Vec<Arc<()>>) -> Work {
        Work { parts: Vec::new(), failed: None, _users: users }
    }
}

impl Lists {
    /// Adds a copy between a message's bytes and GPU memory.
    pub fn add(&mut self, device: u32, (dst, src): (u64, u64), length: u64) {
        let piece = PageCopy { dst, src, length };
        match self.0.iter_mut().find(|(of, _)| *of == device) {
            Some((_, list)) => list.push(piece),
            None => self.0.push((device, vec![piece])),
        }
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Windows {
    /// The memories of a connection. No GPU sees them yet.
    pub fn of(end: &HostEnd) -> Windows {
        Windows { places: end.memories(), seen: HashMap::new() }
    }

    /// The address at which a GPU sees a byte of a message, if it does.
    fn address(&mut self, gpus: &Gpus, device: u32, at: u64) -> Option<u64> {
        let places = &self.places;
        let seen = self.seen.entry(device).or_insert_with(|| {
            places.iter().map(|(at, bytes, access)| gpus.register(device, *at, *bytes, *access)).collect()
        });
        places.iter().zip(seen).find_map(|((base, bytes, _), registration)| {
            let offset = at.checked_sub(base.as_ptr() as u64).filter(|offset| *offset < *bytes as u64)?;
            registration.as_ref().map(|registration| registration.device_addr() + offset)
        })
    }
}

impl Gpus {
    /// No GPU is open yet. `own_context`: copy engines have a CUDA context of their own.
    pub fn new(offer: Offer, own_context: bool) -> Gpus {
        Gpus { offer, own_context, open: HashMap::new() }
    }

    /// Opens a GPU, and checks that memory which is to be registered is the GPU's.
    pub fn check(&mut self, device: u64, address: u64, length: u64) -> status::Result<u32> {
        let device = u32::try_from(device).map_err(|_| Status::InvalidParam)?;
        if !self.open.contains_key(&device) {
            let gpu = self.make(device).map_err(|why| {
                tracing::error!(device, "GPU memory can't be served: {why}");
                Status::NotSupported
            })?;
            self.open.insert(device, gpu);
        }
        match self.open[&device].executor.as_cuda() {
            Some(cuda) if length > 0 && !cuda.holds(address, length) => {
                tracing::error!("{length} bytes at {address:#x} are no memory of GPU {device}");
                Err(Status::InvalidParam)
            }
            _ => Ok(device),
        }
    }

    fn make(&self, device: u32) -> Result<Gpu, String> {
        let executor: Arc<dyn Executor> = match self.offer {
            Offer::Nothing => return Err("this host has no usable GPU".into()),
            Offer::Cuda => Arc::new(CudaExecutor::new(device).map_err(|e| e.to_string())?),
            Offer::Played => Arc::new(CpuExecutor::new()),
        };
        let copies = PageCopies::new(&executor, self.own_context).map_err(|e| e.to_string())?;
        Ok(Gpu { copies, executor })
    }

    fn register(&self, device: u32, at: NonNull<u8>, bytes: usize, access: Access) -> Option<Registration> {
        let executor = &self.open.get(&device)?.executor;
        executor
            .register(at, bytes, access, false)
            .inspect_err(|e| tracing::warn!("copies of GPU {device} are slow: {e}"))
            .ok()
    }

    /// Starts copies between a message of a connection and GPU memory. `users` live until these are complete.
    ///
    /// # Safety
    /// The GPU memory was registered, and the message's bytes lie in a memory of `windows`; all stay until [`Gpus::is_done`] has
    /// returned true.
    pub unsafe fn start(
        &mut self,
        windows: &mut Windows,
        lists: Lists,
        way: PageWay,
        users: Vec<Arc<()>>,
    ) -> Work {
        let mut work = Work::new(users);
        for (device, mut list) in lists.0 {
            let host = |piece: &PageCopy| if way == PageWay::Out { piece.dst } else { piece.src };
            let first = host(&list[0]);
            // The bytes of a message lie in one memory, which a GPU may see at another address than the CPU.
            let way = match windows.address(self, device, first) {
                Some(address) if address == first => way,
                Some(address) => {
                    for piece in &mut list {
                        let at = if way == PageWay::Out { &mut piece.dst } else { &mut piece.src };
                        *at = at.wrapping_sub(first).wrapping_add(address);
                    }
                    way
                }
                None => PageWay::Any,
            };
            // SAFETY: the caller's promise.
            unsafe { self.begin(&mut work, device, &list, way) };
        }
        work
    }

    /// Starts copies between memories of this agent, GPU memory at one end of each at least.
    ///
    /// # Safety
    /// All lies in registrations of the agent, and stays until [`Gpus::is_done`] has returned true.
    pub unsafe fn start_own(&mut self, lists: Lists, way: PageWay, users: Vec<Arc<()>>) -> Work {
        let mut work = Work::new(users);
        for (device, list) in lists.0 {
            // SAFETY: the caller's promise.
            unsafe { self.begin(&mut work, device, &list, way) };
        }
        work
    }

    /// Starts a part, unless one before it could not be started.
    unsafe fn begin(&mut self, work: &mut Work, device: u32, list: &[PageCopy], way: PageWay) {
        if work.failed.is_some() {
            return;
        }
        let started = match self.open.get_mut(&device) {
            // SAFETY: the caller's promise.
            Some(gpu) => unsafe { gpu.copies.start(list, way) }.map_err(|e| e.to_string()),
            None => Err("memory of a GPU that is not open".into()),
        };
        match started {
            Ok(ticket) => work.parts.push((device, ticket)),
            Err(why) => work.failed = Some(why),
        }
    }

    /// Whether copies are complete. Never waits. An error is the GPU's, which has failed; what was started before is complete then.
    pub fn is_done(&mut self, work: &mut Work) -> Result<bool, String> {
        while let Some((device, ticket)) = work.parts.last_mut() {
            let gpu = self.open.get_mut(device).expect("it was used");
            if !gpu.copies.is_done(ticket).map_err(|e| e.to_string())? {
                return Ok(false);
            }
            work.parts.pop();
        }
        match &work.failed {
            Some(why) => Err(why.clone()),
            None => Ok(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_what_was_started_before_a_part_that_cannot_be_is_complete_before_the_error() {
        let mut gpus = Gpus::new(Offer::Played, false);
        let bytes = [7u8; 64];
        let to = Box::into_raw(Box::new([0u8; 64]));
        gpus.check(0, to as u64, 64).unwrap();
        let mut lists = Lists::default();
        lists.add(0, (to as u64, bytes.as_ptr() as u64), 64);
        lists.add(3, (to as u64, bytes.as_ptr() as u64), 64);
        let user = Arc::new(());
        // SAFETY: both arrays stay until the copies have ended.
        let mut work = unsafe { gpus.start_own(lists, PageWay::Any, vec![user.clone()]) };
        assert!(matches!(gpus.is_done(&mut work), Ok(false)), "the CPU copies only after some questions");
        let error = loop {
            match gpus.is_done(&mut work) {
                Ok(done) => assert!(!done),
                Err(why) => break why,
            }
        };
        assert!(error.contains("not open") && Arc::strong_count(&user) == 2, "{error}");
        // SAFETY: nothing else has the array any more.
        assert_eq!(*unsafe { Box::from_raw(to) }, bytes);
    }
}
