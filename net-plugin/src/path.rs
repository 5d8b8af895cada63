//! Chooses how a message leaves (in its WQE, through the window, or out of its own memory), and
//! whether NCCL hands over memory of the GPU or host memory to which its own kernels have pushed.

use std::sync::{Mutex, Once};

use pushgate::settings::{NetLanding, NetPath, PluginSettings, QpKind};
use pushgate_driver_shim::abi;
use pushgate_gpu_kernels::DeviceChoice;
use pushgate_link_verbs::Device;
use pushgate_pcie_model::findings::Findings;
use pushgate_topology::{Address, Pair, Sysfs, Topology};

use crate::error::{Code, Failure, Result};
use crate::gpu::{self, Gpu};
use crate::log;
use crate::plan::{self, Plan, Way};
use crate::props::LONGEST;
use crate::rdma::Rdma;
use crate::reach::{Reach, Sample};
use crate::registration::Mr;

/// What is done with GPU memory over `local` queue pairs.
pub const OVER_LOCAL: &str = "path push: the GPU pushes into the window, and the receiver's pulls out of it";

/// Why the path over TCP is `bounce`, unless another one is asked for.
const OVER_TCP: &str = "over TCP the kernel copies host memory at both ends, so NCCL's own kernels push there and no other copy is needed";

/// Why the path is `bounce` for a GPU that NCCL hands over no memory of.
const WITHOUT_RDMA: &str =
    "the GPU has no GPUDirect RDMA by its driver, so NCCL keeps its messages in host memory";

/// A GPU that is open, and what is done with its memory.
pub struct Opened {
    pub index: u32,
    pub gpu: Gpu,
    /// Over each of the RDMA devices.
    pub rdma: Vec<OverRdma>,
    /// The reasons, as sentences.
    pub why: Vec<String>,
}

/// What is done with a GPU's memory over an RDMA device.
pub struct OverRdma {
    pub plan: Plan,
    /// How the RDMA device registers that memory, if the plan needs that.
    pub reach: Option<Reach>,
    /// The RDMA device takes that memory by dma-buf, if any GPU's plan over the device needs that.
    pub dma_buf: bool,
}

impl Opened {
    /// Opens a GPU, on the thread on which it is current.
    pub fn new(index: u32, devices: &[&Rdma], settings: &PluginSettings) -> Result<Opened> {
        let gpu = Gpu::open(index)?;
        if devices.is_empty() {
            let why = vec![format!("{OVER_LOCAL} ({})", gpu.describe())];
            return Ok(Opened { index, gpu, rdma: Vec::new(), why });
        }
        let PluginSettings { path, landing, .. } = *settings;
        let sample = Sample::of(&gpu)?;
        let around = Around::here(&gpu);
        let mut rdma = Vec::new();
        // Devices with one and the same message are named together.
        let mut said: Vec<(String, Vec<&str>, String)> = Vec::new();
        for Rdma { device, .. } in devices {
            let reach = Reach::of(&sample, device);
            let registers = reach.as_ref().map(|_| ()).map_err(|why| why.as_str());
            let (plan, why) =
                plan::choose(path, landing, &around.way_to(device), registers).map_err(|e| {
                    settings.refused(e.setting, format!("{}: {}: {}", e.allowed, device.name(), e.why))
                })?;
            // Where this GPU is far from the device, another GPU of the process may be near.
            let dma_buf = landing != NetLanding::Host && reach.as_ref().is_ok_and(Reach::by_dma_buf);
            let reach = reach.ok().filter(|_| plan.reaches());
            let how = reach.as_ref().map_or(String::new(), |r| format!("; {}", r.describe()));
            let why = format!("{plan}: {why} ({}, ", gpu.describe());
            match said.iter_mut().find(|(before, _, after)| (before, after) == (&why, &how)) {
                Some((_, names, _)) => names.push(device.name()),
                None => said.push((why, vec![device.name()], how)),
            }
            rdma.push(OverRdma { plan, reach, dma_buf });
        }
        let why = said.into_iter().map(|(why, names, how)| format!("{why}{}{how})", names.join(", ")));
        Ok(Opened { index, gpu, rdma, why: why.collect() })
    }

    /// Joins the GPU's copier, if some connections need one. The error is a sentence.
    pub fn join_copier(&mut self, settings: &PluginSettings) -> Result<(), String> {
        // Connections over `local` copy, whatever the plan over RDMA is.
        let copies = self.rdma.is_empty()
            || self.rdma.iter().any(|rdma| rdma.plan.copies())
            || settings.qp == QpKind::Auto;
        if copies {
            self.gpu.join_copier(&settings.copier_cpus)?;
            let copier =
                self.gpu.copier().map_or(String::new(), |pid| format!("; the copier is process {pid}"));
            self.why.iter_mut().for_each(|why| *why += &copier);
        }
        Ok(())
    }

    /// For which devices NCCL must hand over dma-bufs.
    pub fn dma_bufs(&self) -> Vec<bool> {
        self.rdma.iter().map(|over| over.dma_buf).collect()
    }
}

/// How packets travel between a GPU and the RDMA devices, as sysfs shows it, with what a probe of this host found.
struct Around {
    at: Option<Address>,
    pairs: Vec<Pair>,
    findings: Option<Findings>,
}

impl Around {
    fn here(gpu: &Gpu) -> Around {
        let Some(at) = gpu.pci().and_then(|at| at.parse().ok()) else {
            return Around { at: None, pairs: Vec::new(), findings: None };
        };
        let topology = Sysfs::host().read();
        Around { at: Some(at), pairs: topology.pairs(), findings: findings(&topology) }
    }

    fn way_to(&self, device: &Device) -> Way {
        let is_this = |pair: &&Pair| Some(pair.gpu) == self.at && pair.name == device.name();
        Way::of(self.pairs.iter().find(is_this), self.findings.as_ref())
    }
}

/// What a probe of this host found, if one has run.
pub fn findings(topology: &Topology) -> Option<Findings> {
    Findings::kept(&topology.fingerprint("cuda")).unwrap_or_else(|e| {
        tracing::warn!("{e}");
        None
    })
}

/// What is done with GPU memory, and why.
pub struct Choice {
    /// NCCL may hand over GPU memory; the first GPU, once opened.
    pub gpu: Option<Mutex<Option<Opened>>>,
    /// For which RDMA devices NCCL was told to hand over dma-bufs, which holds for every GPU.
    pub dma_bufs: Vec<bool>,
    /// The reasons, as sentences.
    pub why: Vec<String>,
}

impl Choice {
    /// Chooses by the settings and by what the host has: the RDMA devices, if the settings use them.
    pub fn of(settings: &PluginSettings, devices: &[&Rdma]) -> Result<Choice> {
        let bounce = |why: &str| {
            Ok(Choice { gpu: None, dma_bufs: Vec::new(), why: vec![format!("path bounce: {why}")] })
        };
        let refused = |allowed: &str| Err(settings.refused("path", allowed).into());
        match (settings.path, settings.qp) {
            (NetPath::Bounce, _) => return bounce("as asked for; NCCL's kernels push to host memory"),
            (NetPath::Pull, QpKind::Local) => {
                return refused(
                    "auto, push or bounce with qp = local (pull needs a NIC that reads GPU memory)",
                );
            }
            (NetPath::Pull, _) if devices.is_empty() => {
                return refused(
                    "auto, push or bounce without an RDMA device (pull needs a NIC that reads GPU memory)",
                );
            }
            _ => {}
        }
        let forced = settings.path != NetPath::Auto;
        if settings.device == DeviceChoice::Cpu && !forced {
            return bounce("device = cpu");
        }
        // One-sided operations of kernels are on GPU memory.
        if settings.qp == QpKind::Tcp && !forced && !settings.net_rma {
            return bounce(OVER_TCP);
        }
        let Some(index) = gpu::current() else {
            return match forced {
                true => refused("auto or bounce where the calling thread has no GPU"),
                false => bounce("the calling thread has no GPU"),
            };
        };
        match Opened::new(index, devices, settings) {
            Ok(opened) if !opened.gpu.is_handed_over() => match forced {
                true => refused(&format!("auto or bounce: {WITHOUT_RDMA}")),
                false => bounce(WITHOUT_RDMA),
            },
            Ok(mut opened) => {
                if let Err(why) = opened.join_copier(settings) {
                    let why = format!("no other process can copy GPU memory here: {why}");
                    return match forced {
                        true => refused(&format!("bounce here: {why}")),
                        false => bounce(&format!(
                            "{why}; NCCL's kernels push to host memory, which is slower (docs/copier.md)"
                        )),
                    };
                }
                let (dma_bufs, why) = (opened.dma_bufs(), opened.why.clone());
                Ok(Choice { gpu: Some(Mutex::new(Some(opened))), dma_bufs, why })
            }
            // Do not fall back silently to another path: all ranks must use the same one.
            Err(e) => {
                Err(Failure::new(e.code, format!("{e}; set PUSHGATE_PATH=bounce on all ranks to do without")))
            }
        }
    }
}

/// Variables that the plugin sets for NCCL unless the user has set them. NCCL hands GPU memory only
/// to a NIC that it takes to be near the GPU, and ours may be far or have no place on PCIe. With NCCL's own choice
/// of channels too little is under way to fill the GPU's link, or too few sockets are used. (NCCL has
/// counted its channels to a peer before it asks any plugin.)
const TOLD: [(&str, &str); 2] = [("NCCL_NET_GDR_LEVEL", "SYS"), ("NCCL_MIN_NCHANNELS", "8")];

/// Another one: the bytes of a piece of send/recv. A copy by the GPU's copy engines needs longer pieces than a socket does (docs/benchmarks.md,
/// NCCL over TCP).
const PIECE: &str = "NCCL_P2P_NET_CHUNKSIZE";
const PIECE_OVER_TCP: &str = "262144";
const PIECE_ELSE: &str = "524288";

/// A variable that the plugin sets besides, unless all queue pairs are over RDMA. NCCL then has buffers for its protocol LL
/// between every two ranks, so the shortest messages of send/recv take LL too. And NCCL receives LL in host memory, in
/// every connection, so that no copy by the copier stands between a message and the kernel that waits for the message.
const LL_BUFFERS: &str = "NCCL_ALLOC_P2P_NET_LL_BUFFERS";

/// All variables that the plugin sets.
pub const VARIABLES: [&str; 4] = [TOLD[0].0, TOLD[1].0, PIECE, LL_BUFFERS];

/// Whether the settings, which are those of all ranks, leave it open that NCCL hands over GPU memory. A single rank may still come to
/// the path `bounce`; it then says so in its greeting ([`crate::alike`]).
pub fn wants_gpu_memory(settings: &PluginSettings) -> bool {
    match settings.path {
        NetPath::Bounce => false,
        // One-sided operations of kernels are on GPU memory.
        NetPath::Auto => {
            settings.device != DeviceChoice::Cpu && (settings.qp != QpKind::Tcp || settings.net_rma)
        }
        _ => true,
    }
}

/// Sets those variables, once. They depend on the settings alone, not on what this host or rank has: NCCL wants such settings to be the
/// same on all ranks.
pub fn tell_nccl(qp: QpKind) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let piece = [(PIECE, if qp == QpKind::Tcp { PIECE_OVER_TCP } else { PIECE_ELSE })];
        let ll = (qp != QpKind::Verbs).then_some((LL_BUFFERS, "1"));
        for (name, value) in TOLD.into_iter().chain(piece).chain(ll) {
            match std::env::var(name) {
                Ok(theirs) => log::init(&format!("{name} stays {theirs}, as set; ours would be {value}")),
                Err(_) => {
                    // SAFETY: this is the first init of the first communicator, on the user's
                    // thread, before NCCL has started threads of its own; Rust's own readers are
                    // locked out. A race remains, as with any library that is loaded to set a
                    // variable: a C thread of the program that reads the environment now, or a
                    // thread of NCCL's where one call makes communicators for several GPUs, each on
                    // a thread (ncclCommInitAll, a group). docs/nccl.md says so; a user who sets
                    // these variables beforehand avoids it.
                    unsafe { std::env::set_var(name, value) };
                    log::init(&format!("set {name}={value}"));
                }
            }
        }
    });
}

/// Whether NCCL receives messages of the protocol LL in host memory ([`LL_BUFFERS`]). NCCL has read the variable by
/// the time that it asks a tuner.
pub fn ll_lands_on_host() -> bool {
    let value = std::env::var(LL_BUFFERS).ok();
    value.and_then(|value| value.trim().parse::<i64>().ok()).is_some_and(|value| value != 0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The message fits into the WQE.
    Inline,
    /// The plugin copies the message into the window.
    Push,
    /// The WQE names a stretch of a region; this host copies nothing.
    Region { key: u32, offset: u64 },
    /// The message is too long to leave at once.
    Slices(Slices),
    /// The message is in GPU memory: the copier pushes it into the window.
    Copier,
}

impl Path {
    /// Whether a message may leave before its receive is known, as registered in `mr`. Then its payload waits in the peer's mirror of the
    /// window, so memory of the host that would leave from where it lies is copied.
    pub fn goes_ahead(&mut self, mr: Option<&Mr>) -> bool {
        if matches!(self, Path::Region { .. }) && mr.is_some_and(|mr| !mr.cuda) {
            *self = Path::Push;
        }
        matches!(self, Path::Inline | Path::Push | Path::Copier)
    }
}

/// How slices leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slices {
    /// The plugin copies them into the window.
    Copied,
    /// The copier pushes them into the window.
    Pushed,
    /// The WQEs name stretches of a region; the first begins here.
    Region { key: u32, offset: u64 },
}

/// Host memory up to this length is copied into the window though the queue pair could send it from where it lies, bytes. The
/// copy takes less time than the program would wait for the peer's word that it has the message. On two cores a message of 4 KiB
/// each way at once took half the time over `local` and `tcp`, and one of 16 KiB longer.
const COPIED: usize = 8 << 10;

/// The ways that a connection offers.
#[derive(Clone, Copy)]
pub struct Ways {
    /// The queue pair sends from regions.
    pub regions: bool,
    /// A short payload may travel in its record.
    pub in_record: bool,
    /// The most bytes that go through the window at once.
    pub whole: usize,
    /// The most bytes that go out of a region at once.
    pub longest: usize,
}

/// Chooses the path for `size` bytes at `data`, registered as `mr`.
pub fn choose(data: usize, size: usize, mr: Option<&Mr>, ways: Ways) -> Result<Path> {
    let Ways { regions, in_record, whole, longest } = ways;
    if size > LONGEST {
        let text = format!("a message of {} bytes, at most {LONGEST}", size as isize);
        return Err(Failure::new(Code::Usage, text));
    }
    // For an empty message NCCL may name any address, even beyond the registration's end.
    if size == 0 {
        return Ok(Path::Inline);
    }
    let region = match mr {
        Some(mr) => Some((mr.key, mr.offset(data, size)?)).filter(|_| regions && !mr.pushed),
        None => None,
    };
    let cuda = mr.is_some_and(|mr| mr.cuda);
    if size <= abi::PUSHGATE_INLINE_SEND as usize && in_record && !cuda {
        return Ok(Path::Inline);
    }
    Ok(match region {
        Some(_) if size <= COPIED.min(whole) && !cuda => Path::Push,
        Some((key, offset)) if size <= longest => Path::Region { key, offset },
        Some((key, offset)) => Path::Slices(Slices::Region { key, offset }),
        None if size <= whole && cuda => Path::Copier,
        None if size <= whole => Path::Push,
        None if cuda => Path::Slices(Slices::Pushed),
        None => Path::Slices(Slices::Copied),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_size_and_registration() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 1 << 20, cuda: false, pushed: false };
        let ways = |regions| Ways { regions, in_record: true, whole: 65536, longest: 1 << 19 };
        let choose = |size, mr: Option<&Mr>, regions| super::choose(0x1100, size, mr, ways(regions)).unwrap();
        assert_eq!(choose(0, None, true), Path::Inline);
        assert_eq!(choose(40, Some(&mr), true), Path::Inline);
        assert_eq!([41, COPIED].map(|size| choose(size, Some(&mr), true)), [Path::Push; 2]);
        assert_eq!(choose(COPIED + 1, Some(&mr), true), Path::Region { key: 9, offset: 0x100 });
        assert_eq!(choose(COPIED + 1, None, true), Path::Push);
        assert_eq!(choose(65536, Some(&mr), false), Path::Push);
        assert_eq!(choose(65537, Some(&mr), false), Path::Slices(Slices::Copied));
        assert_eq!(choose(1 << 19, Some(&mr), true), Path::Region { key: 9, offset: 0x100 });
        let slices = Path::Slices(Slices::Region { key: 9, offset: 0x100 });
        assert_eq!(choose((1 << 19) + 1, Some(&mr), true), slices);
        // Only an RDMA device writes the receiver's GPU memory.
        let written = |size, mr, regions| {
            super::choose(0x1100, size, mr, Ways { in_record: false, ..ways(regions) }).unwrap()
        };
        assert_eq!(written(0, Some(&mr), true), Path::Inline);
        assert_eq!(written(1, Some(&mr), true), Path::Push);
        assert_eq!(written(COPIED + 1, Some(&mr), true), Path::Region { key: 9, offset: 0x100 });
        let pushed = Mr { cuda: true, pushed: true, ..mr };
        assert_eq!(choose(0, Some(&pushed), true), Path::Inline);
        assert_eq!(
            [1, 65536, 65537].map(|size| choose(size, Some(&pushed), true)),
            [Path::Copier, Path::Copier, Path::Slices(Slices::Pushed)]
        );
        // The RDMA device reads any length of GPU memory, even what a WQE would hold.
        let read = Mr { cuda: true, ..mr };
        assert_eq!(choose(0, Some(&read), true), Path::Inline);
        for size in [1, 65537] {
            assert_eq!(choose(size, Some(&read), true), Path::Region { key: 9, offset: 0x100 });
        }
        assert_eq!(choose((1 << 19) + 1, Some(&read), true), slices);
    }

    #[test]
    fn host_memory_is_copied_to_go_ahead_and_gpu_memory_out_of_a_region_waits() {
        let mr = |cuda| Mr { key: 9, address: 0x1000, bytes: 1 << 20, cuda, pushed: false };
        let goes = |mut path: Path, cuda| (path.goes_ahead(Some(&mr(cuda))), path);
        let region = Path::Region { key: 9, offset: 0 };
        assert_eq!(goes(region, false), (true, Path::Push));
        assert_eq!(goes(region, true), (false, region));
        assert_eq!(goes(Path::Inline, true), (true, Path::Inline));
        assert_eq!(goes(Path::Copier, true), (true, Path::Copier));
        let slices = Path::Slices(Slices::Copied);
        assert_eq!(goes(slices, false), (false, slices));
    }

    #[test]
    fn a_buffer_beyond_its_registration_is_refused() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 100, cuda: false, pushed: false };
        let ways = Ways { regions: true, in_record: true, whole: 65536, longest: 65536 };
        for (data, size) in [(0xfff, 1), (0x1000, 101), (0x1064, 1), (usize::MAX, 2)] {
            let e = choose(data, size, Some(&mr), ways).unwrap_err();
            assert_eq!(e.code, Code::Usage, "{e}");
        }
        assert!(choose(0, usize::MAX, None, ways).unwrap_err().text.contains("-1 bytes"));
        // An empty message lies nowhere, so every address is accepted.
        for data in [0, 0xfff, 0x1065, usize::MAX] {
            assert_eq!(choose(data, 0, Some(&mr), ways).unwrap(), Path::Inline);
        }
    }
}
