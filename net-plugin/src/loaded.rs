//! What the first init of a process reads: the settings, and the devices that they name.

use std::sync::{Arc, Mutex};

use pushgate::settings::{PluginSettings, ProxyPlace, QpKind, WindowKind};
use pushgate_door::addresses::Offered;
use pushgate_service::folder::Folder;
use pushgate_topology::Sysfs;

use crate::address::own_addresses;
use crate::alike::Alike;
use crate::error::{Code, Failure, Result};
use crate::hosts::Listed;
use crate::identity::Identity;
use crate::log;
use crate::path::{self, Choice, Opened, OverRdma};
use crate::props::{Network, Properties};
use crate::ranks::{Cores, Ranks};
use crate::rdma::{self, Rdma};
use crate::taken;
use crate::trace::Traces;
use crate::under_way::{self, UnderWay};
use crate::variables;

/// What the first init has read.
pub struct Loaded {
    pub settings: PluginSettings,
    pub identity: Identity,
    /// Where processes of other containers of this host come.
    pub folder: Option<Folder>,
    /// The RDMA devices for `verbs` queue pairs, as NCCL numbers them.
    pub rdma: Vec<Arc<Rdma>>,
    /// Why there is none, where the settings leave it open.
    pub no_rdma: Option<String>,
    /// The addresses at which other hosts reach this process; or why there is none.
    pub at: std::result::Result<Offered, String>,
    /// This process meets others there over `tcp` queue pairs too.
    pub tcp: bool,
    /// The devices that NCCL is told of.
    pub network: Network,
    /// What the other ends must have been told too.
    pub alike: Alike,
    /// The RDMA devices, for other ranks of this host; nothing without.
    pub listed: Option<Listed>,
    /// NCCL may hand over memory of GPUs; the first of them, already opened.
    pub gpu: Option<Mutex<Option<Opened>>>,
    /// For which RDMA devices NCCL was told to hand over dma-bufs.
    dma_bufs: Vec<bool>,
    /// What all connections have under way in their windows. Bounded where GPUs copy.
    pub under_way: Arc<UnderWay>,
    /// The cores that this process may use.
    pub cores: Cores,
    /// Where the ends of connections write traces of NCCL's calls.
    pub traces: Option<Arc<Traces>>,
}

impl Loaded {
    /// A process whose queue pairs are `local`, without GPU memory. NCCL has been told all variables.
    pub fn without_devices(
        settings: PluginSettings,
        network: Network,
        cores: Cores,
        under_way: Arc<UnderWay>,
    ) -> Self {
        Loaded {
            alike: Alike::here(&settings, &network),
            settings,
            identity: Identity::here(),
            folder: None,
            rdma: Vec::new(),
            no_rdma: None,
            at: Err("no address was asked for".into()),
            tcp: false,
            network,
            listed: None,
            gpu: None,
            dma_bufs: Vec::new(),
            under_way,
            cores,
            traces: None,
        }
    }

    /// Reads the settings, opens what they name, and tells NCCL's log.
    pub fn new() -> Result<Self> {
        let mut settings = PluginSettings::load()?;
        let sockets = variables::heed(&mut settings);
        settings.check()?;
        if settings.proxy == ProxyPlace::Process {
            return Err(settings.refused("proxy", "thread in the NCCL plugin").into());
        }
        if settings.window != WindowKind::Memory {
            return Err(settings.refused("window", "memory in the NCCL plugin").into());
        }
        let folder = Folder::of_setting(&settings.local_folder);
        let folder = folder.map_err(|why| settings.refused("local-folder", why))?;
        let (rdma, no_rdma) = match settings.qp {
            QpKind::Local => (Vec::new(), None),
            QpKind::Tcp => (Vec::new(), Some("qp = tcp here".into())),
            qp => match rdma::open(&settings)? {
                Ok(devices) => (devices, None),
                // Ranks of this host need none.
                Err(e) if qp == QpKind::Auto => (Vec::new(), Some(e.to_string())),
                Err(e) => return Err(e.into()),
            },
        };
        let at = match settings.qp {
            QpKind::Local => Err("qp = local here".into()),
            qp => match own_addresses(&settings, &sockets, rdma.first()) {
                // Ranks of this host need none.
                Err(why) if qp != QpKind::Auto => return Err(Failure::new(Code::System, why)),
                at => at,
            },
        };
        let tcp = at.is_ok() && matches!(settings.qp, QpKind::Auto | QpKind::Tcp);
        let path = Choice::of(&settings, &rdma.iter().collect::<Vec<_>>())?;
        let over_tcp = settings.qp == QpKind::Tcp;
        let wants_gpu = path::wants_gpu_memory(&settings);
        let network = match rdma.is_empty() {
            // Over TCP as many devices with GPU memory as without, for as many connections.
            true if over_tcp => Network::of_host(true).in_order(),
            true => Network::of_host(wants_gpu),
            false => Network::of_devices(rdma::properties(&rdma)),
        };
        if let Some(why) = network.merging(|name| std::env::var(name).ok()) {
            return Err(Failure::new(Code::Usage, why));
        }
        let network = network
            .with_gpu_memory(path.gpu.is_some())
            .with_dma_bufs(|dev| path.dma_bufs.get(dev).is_some_and(|takes| *takes));
        path.why.iter().for_each(|why| log::init(why));
        if wants_gpu || over_tcp {
            path::tell_nccl(settings.qp);
        }
        if wants_gpu {
            taken::tell_without_tuner();
        }
        if settings.qp == QpKind::Auto && !rdma.is_empty() && path.gpu.is_some() {
            log::init(&format!("over local queue pairs: {}", path::OVER_LOCAL));
        }
        let topology = Sysfs::host().read();
        let ranks = Ranks::of_host(&settings, &topology);
        let cores = Cores::here(ranks);
        let bound = path.gpu.is_some().then(|| under_way::bound(&settings, &topology, ranks));
        let under_way = UnderWay::new(bound.and_then(|(bound, why)| {
            log::init(&why);
            bound
        }));
        let host = Loaded::without_devices(settings, network, cores, under_way);
        let names: Vec<_> = rdma.iter().map(|rdma| rdma.device.name()).collect();
        let id = std::env::var("NCCL_HOSTID").ok();
        let listed = (!names.is_empty()).then(|| Listed::here(&host.identity, id.as_deref(), &names));
        let (gpu, dma_bufs) = (path.gpu, path.dma_bufs);
        let rdma = rdma.into_iter().map(Arc::new).collect();
        let traces = Traces::of(&host.settings, &host.identity, cores.allowed)?;
        let loaded = Loaded { folder, rdma, no_rdma, at, tcp, listed, gpu, dma_bufs, traces, ..host };
        let window = loaded.settings.net_window_size;
        log::init(&format!("queue pairs are {}; window of {window} bytes a connection", loaded.transports()));
        Ok(loaded)
    }

    /// Which ranks are reached over which transport, for the log.
    fn transports(&self) -> String {
        let of_qp = self.settings.qp;
        if self.rdma.is_empty() {
            let why = self.no_rdma.as_ref().map(|why| format!(", for lack of an RDMA device ({why})"));
            let why = why.unwrap_or_default();
            return match (of_qp, &self.at) {
                (QpKind::Tcp, Ok(at)) => format!("tcp, at {at}"),
                (QpKind::Local, _) => "local: ranks of this host only".into(),
                (_, Ok(at)) => format!("local to ranks of this host, tcp to others, at {at}{why}"),
                (_, Err(none)) => {
                    format!("local: ranks of this host only, for lack of an address ({none}){why}")
                }
            };
        }
        let at = match &self.at {
            Ok(at) => format!("; connections are made at {at}"),
            Err(none) => {
                format!("; only ranks of this host can connect here, for lack of an address ({none})")
            }
        };
        let kinds = match of_qp {
            QpKind::Auto => "local to ranks of this host, verbs to others",
            _ => "verbs",
        };
        let of = |(rdma, p): (&Arc<Rdma>, &Properties)| format!("{}, {} Mbit/s", rdma.describe(), p.speed);
        let devices: Vec<_> = self.rdma.iter().zip(self.network.all()).map(of).collect();
        format!("{kinds}: {}{at}", devices.join("; "))
    }

    /// Whether there are queue pairs to ranks of other hosts.
    pub fn reaches_others(&self) -> bool {
        self.at.is_ok() && (!self.rdma.is_empty() || self.tcp)
    }

    /// Why there are no `tcp` queue pairs from here, if so.
    pub fn no_tcp(&self) -> Option<String> {
        match &self.at {
            _ if self.tcp => None,
            Ok(_) => Some(format!("qp = {} here", self.settings.qp)),
            Err(why) => Some(why.clone()),
        }
    }

    /// Opens a GPU other than the first, whose memory NCCL hands over as it was told for the first.
    pub fn another(&self, index: u32) -> Result<Opened> {
        let devices: Vec<_> = self.rdma.iter().map(|rdma| &**rdma).collect();
        let mut opened = Opened::new(index, &devices, &self.settings)?;
        opened.join_copier(&self.settings).map_err(|why| {
            let text = format!("no other process can copy memory of GPU {index}: {why}; set PUSHGATE_PATH=bounce on all ranks");
            Failure::new(Code::System, text)
        })?;
        opened.why.iter().for_each(|why| log::init(&format!("GPU {index}, beside the first: {why}")));
        let unlike = |(over, told): (&OverRdma, &bool)| over.reach.is_some() && over.dma_buf != *told;
        let Some(dev) = opened.rdma.iter().zip(&self.dma_bufs).position(unlike) else { return Ok(opened) };
        let text = format!(
            "the memory of GPU {index} is registered with {} in another way than that of the first GPU of the process; \
             set PUSHGATE_PATH=push and PUSHGATE_LANDING=host",
            self.rdma[dev].describe()
        );
        Err(Failure::new(Code::Usage, text))
    }
}
