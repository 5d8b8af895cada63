//! How a message leaves: in its WQE, by way of the window, or from where it lies. And
//! whether NCCL hands over memory of the GPU, or of the host that its own kernels have
//! pushed to.

use std::sync::{Mutex, Once};

use pushgate::settings::{NetPath, QpKind};
use pushgate::{Error, Settings};
use pushgate_driver_shim::abi;
use pushgate_gpu_kernels::DeviceChoice;
use pushgate_proxy::mover::Mover;

use crate::comm::Mr;
use crate::error::{Code, Failure, Result};
use crate::gpu::{self, Gpu};
use crate::log;

/// The GPU of the thread that came first, opened to see whether it can be.
pub type FirstGpu = (u32, Gpu, Box<dyn Mover>);

/// What is done with GPU memory, and why.
pub struct Choice {
    /// NCCL may hand it over.
    pub gpu: Option<Mutex<Option<FirstGpu>>>,
    /// A sentence.
    pub why: String,
}

impl Choice {
    /// By settings and what is there.
    pub fn of(settings: &Settings) -> Result<Choice> {
        let bounce = |why: &str| Ok(Choice { gpu: None, why: format!("path bounce: {why}") });
        let refused = |allowed: &str| Err(Error::config("path", settings.path, allowed).into());
        match (settings.path, settings.qp) {
            (NetPath::Bounce, _) => return bounce("as asked for; NCCL's kernels push to host memory"),
            (NetPath::Pull, _) => {
                return refused("auto, push or bounce (pull needs a NIC that reads GPU memory; not built)");
            }
            (NetPath::Push, QpKind::Verbs) => {
                return refused("auto or bounce with qp = verbs (GPU memory over a NIC is not built)");
            }
            (NetPath::Auto, QpKind::Verbs) => {
                return bounce("with qp = verbs NCCL's kernels push to host memory, which the NIC sends");
            }
            _ => {}
        }
        let forced = settings.path == NetPath::Push;
        if settings.device == DeviceChoice::Cpu && !forced {
            return bounce("device = cpu");
        }
        let Some(index) = gpu::current() else {
            return match forced {
                true => refused("auto or bounce where the calling thread has no GPU"),
                false => bounce("the calling thread has no GPU"),
            };
        };
        match Gpu::open(index) {
            Ok((gpu, mover)) => {
                let why = format!(
                    "path push: GPU memory is pushed into the window, and pulled out of it by the receiver's GPU \
                     ({})",
                    gpu.describe()
                );
                Ok(Choice { gpu: Some(Mutex::new(Some((index, gpu, mover)))), why })
            }
            // Not another way in silence: all ranks must go the same.
            Err(e) => {
                Err(Failure::new(e.code, format!("{e}; set PUSHGATE_PATH=bounce on all ranks to do without")))
            }
        }
    }
}

/// What NCCL must be told, unless the user has said something: it hands GPU memory to a NIC only
/// if that is near the GPU, as it thinks, and ours has no place on PCIe; and with as few
/// channels and as small pieces as it would take, too little is under way to fill the GPU's
/// link. (Channels to a peer it has counted before any plugin is asked.)
const TOLD: [(&str, &str); 3] =
    [("NCCL_NET_GDR_LEVEL", "SYS"), ("NCCL_MIN_NCHANNELS", "8"), ("NCCL_P2P_NET_CHUNKSIZE", "524288")];

/// Tells it, once.
pub fn tell_nccl() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, value) in TOLD {
            match std::env::var(name) {
                Ok(theirs) => log::init(&format!("{name} stays {theirs}, as set; ours would be {value}")),
                Err(_) => {
                    // SAFETY: the first init of the first communicator, on the user's thread, before
                    // NCCL has started threads of its own; Rust's own readers are locked out. A C
                    // thread of the program's that reads the environment now would race, as with
                    // any library that NCCL loads to set it.
                    unsafe { std::env::set_var(name, value) };
                    log::init(&format!("set {name}={value}"));
                }
            }
        }
    });
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// It fits into the WQE.
    Inline,
    /// We copy it into the window.
    Push,
    /// The WQE names a stretch of a region; nobody copies it here.
    Region { key: u32, offset: u64 },
    /// Too long for the window at once: in slices, which we copy or the GPU pushes.
    Slices,
    /// Memory of the GPU: its worker pushes it into the window.
    Worker,
}

/// Chooses for `size` bytes at `data`, registered as `mr`. `regions`: the queue pair
/// sends from regions. `whole`: what goes through the window at once.
pub fn choose(data: usize, size: usize, mr: Option<&Mr>, regions: bool, whole: usize) -> Result<Path> {
    if size > crate::props::MAX_BYTES {
        let text = format!(
            "a message of {} bytes, at most {} (maxP2pBytes)",
            size as isize,
            crate::props::MAX_BYTES
        );
        return Err(Failure::new(Code::Usage, text));
    }
    let offset = match mr {
        Some(mr) => Some((mr.key, mr.offset(data, size)?)),
        None => None,
    };
    if mr.is_some_and(|mr| mr.cuda) && size > 0 {
        return Ok(if size <= whole { Path::Worker } else { Path::Slices });
    }
    if size <= abi::PUSHGATE_INLINE_SEND as usize {
        return Ok(Path::Inline);
    }
    Ok(match offset {
        Some((key, offset)) if regions => Path::Region { key, offset },
        _ if size <= whole => Path::Push,
        _ => Path::Slices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_size_and_registration() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 1 << 20, cuda: false };
        let choose = |size, mr: Option<&Mr>, regions| choose(0x1100, size, mr, regions, 65536).unwrap();
        assert_eq!(choose(0, None, true), Path::Inline);
        assert_eq!(choose(40, Some(&mr), true), Path::Inline);
        assert_eq!(choose(41, Some(&mr), true), Path::Region { key: 9, offset: 0x100 });
        assert_eq!(choose(41, None, true), Path::Push);
        assert_eq!(choose(65536, Some(&mr), false), Path::Push);
        assert_eq!(choose(65537, Some(&mr), false), Path::Slices);
        let mr = Mr { cuda: true, ..mr };
        assert_eq!(choose(0, Some(&mr), true), Path::Inline);
        assert_eq!(
            (choose(1, Some(&mr), true), choose(65536, Some(&mr), false)),
            (Path::Worker, Path::Worker)
        );
        assert_eq!(choose(65537, Some(&mr), true), Path::Slices);
    }

    #[test]
    fn what_leaves_its_registration_is_refused() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 100, cuda: false };
        for (data, size) in [(0xfff, 1), (0x1000, 101), (0x1064, 1), (usize::MAX, 2)] {
            let e = choose(data, size, Some(&mr), true, 65536).unwrap_err();
            assert_eq!(e.code, Code::Usage, "{e}");
        }
        assert!(choose(0, usize::MAX, None, true, 64).unwrap_err().text.contains("-1 bytes"));
    }
}
