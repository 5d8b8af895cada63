//! What a host said that is in no file: the part of an archive that stands beside the files.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use pushgate_door::addresses::{Held, Interface, split};
use pushgate_link_verbs::PortState;
use serde::{Deserialize, Serialize};

use crate::read::files::binary;
use crate::readings::{Dcb, GPU, Nccl, Opened, RdmaCm, Read, Readings, Wants};
use crate::stand_ins::StandIns;

/// The file in an archive's folder that holds what is no file on the host.
pub const ANSWERS: &str = "answers.json";
/// The layout of [`ANSWERS`].
const FORMAT: u32 = 1;

/// What the host said that is in no file, and the settings that the checks looked with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answers {
    format: u32,
    pushgate: String,
    wants: Wants,
    /// What libibverbs says of a port, by device and port.
    ports: BTreeMap<String, Read<Port>>,
    /// Addresses and bridging of an interface, by its name.
    netdevs: BTreeMap<String, (Read<Vec<IpAddr>>, Read<Dcb>)>,
    readv: Read<()>,
    memfd: Read<()>,
    shm: Read<(u64, u64)>,
    module: Vec<(String, Opened)>,
    /// Earlier releases say nothing.
    #[serde(default)]
    rdma_cm: Option<RdmaCm>,
    nccl: Nccl,
    /// Earlier releases say nothing.
    #[serde(default)]
    interfaces: Read<Vec<Interface>>,
    /// Earlier releases say nothing.
    #[serde(default)]
    compute_modes: Read<Vec<u32>>,
    /// `PCI_WR_ORDERING`, by device. Earlier releases say nothing.
    #[serde(default)]
    write_ordering: BTreeMap<String, Read<String>>,
}

/// [`PortState`], as the file has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Port {
    active: bool,
    mtu: u32,
    max_mtu: u32,
    lid: u16,
    ethernet: bool,
    /// Earlier releases say nothing.
    #[serde(default)]
    global: bool,
    message: u32,
    in_order: bool,
}

impl From<&PortState> for Port {
    fn from(state: &PortState) -> Port {
        let PortState { active, mtu, max_mtu, lid, ethernet, global, message, in_order } = *state;
        Port { active, mtu, max_mtu, lid, ethernet, global, message, in_order }
    }
}

impl From<&Port> for PortState {
    fn from(port: &Port) -> PortState {
        let Port { active, mtu, max_mtu, lid, ethernet, global, message, in_order } = *port;
        PortState { active, mtu, max_mtu, lid, ethernet, global, message, in_order }
    }
}

/// An interface without what tells its host from others.
fn stood_in(interface: Interface, stand: &StandIns<'_>) -> Interface {
    let held = |held: Held| Held { ip: stand.ip(held.ip), ..held };
    let addresses = interface.addresses.into_iter().map(held).collect();
    Interface { name: stand.name(&interface.name), addresses, ..interface }
}

impl Answers {
    /// The answers in a folder that was an archive; nothing if the folder has none.
    pub(crate) fn load(root: &Path) -> Result<Option<Answers>, String> {
        let path = root.join(ANSWERS);
        let wrong =
            |why: String| format!("{} is no file of `pushgate doctor --archive`: {why}", path.display());
        let bytes = match binary(&path) {
            Read::Absent => return Ok(None),
            Read::Unreadable(why) => return Err(why),
            Read::Is(bytes) => bytes,
        };
        let answers: Answers = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        match answers.format {
            FORMAT => Ok(Some(answers)),
            other => Err(wrong(format!("its format is {other}, and this pushgate reads {FORMAT}"))),
        }
    }

    /// The settings that the host was looked at with.
    pub fn wants(&self) -> &Wants {
        &self.wants
    }

    /// Puts the answers where a host that can be asked would have put them.
    pub(crate) fn fill(&self, r: &mut Readings) {
        for device in r.rdma.is_mut().into_iter().flatten() {
            for port in &mut device.ports {
                if let Some(said) = self.ports.get(&format!("{}/{}", device.name, port.number)) {
                    port.verbs = said.clone().then(|port| Ok(PortState::from(&port)));
                }
            }
        }
        for (name, dev) in &mut r.netdevs {
            if let Some((addresses, dcb)) = self.netdevs.get(name) {
                (dev.addresses, dev.dcb) = (addresses.clone(), dcb.clone());
            }
        }
        (r.host.readv, r.host.memfd, r.host.shm) = (self.readv.clone(), self.memfd.clone(), self.shm.clone());
        r.host.interfaces = self.interfaces.clone();
        r.module.devices = self.module.clone();
        r.rdma_cm = self.rdma_cm.clone().unwrap_or_default();
        r.nccl = self.nccl.clone();
        r.gpu.compute_modes = self.compute_modes.clone();
        for function in &mut r.pci {
            function.write_ordering = self.write_ordering.get(&function.what).cloned().unwrap_or_default();
        }
    }

    /// The answers in `readings`, for an archive.
    pub(crate) fn of(r: &Readings, stand: &StandIns) -> Answers {
        let ports = r.rdma.is().into_iter().flatten().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
        let devices = r.module.devices.iter().map(|(path, opened)| {
            (outside(r, path), opened.clone().map_err(|why| stand.text(&outside(r, &why))))
        });
        let nccl = &r.nccl;
        let of_host = |read: &Read<()>| match read {
            Read::Unreadable(why) => Read::Unreadable(stand.text(&outside(r, why))),
            read => read.clone(),
        };
        Answers {
            format: FORMAT,
            pushgate: env!("CARGO_PKG_VERSION").into(),
            wants: Wants {
                devices: r.wants.devices.iter().map(|name| stand.name(name)).collect(),
                host: r.wants.host.as_deref().map(|host| match split(host) {
                    Some((ip, zone)) => {
                        let zone = zone.map(|zone| format!("%{}", stand.name(zone))).unwrap_or_default();
                        format!("{}{zone}", stand.ip(ip))
                    }
                    None => stand.text(host),
                }),
                settings: match &r.wants.settings {
                    Ok(from) => Ok(stand.text(from)),
                    Err(why) => Err(stand.text(why)),
                },
                ..r.wants.clone()
            },
            ports: ports
                .map(|(d, p)| {
                    let said = stand.read(&p.verbs).then(|state| Ok(Port::from(&state)));
                    (format!("{}/{}", stand.name(&d.name), p.number), said)
                })
                .collect(),
            netdevs: r
                .netdevs
                .iter()
                .map(|(name, dev)| {
                    let addresses = stand.read(&dev.addresses);
                    let addresses =
                        addresses.then(|all| Ok(all.into_iter().map(|ip| stand.ip(ip)).collect()));
                    (stand.name(name), (addresses, stand.read(&dev.dcb)))
                })
                .collect(),
            readv: stand.read(&r.host.readv),
            memfd: stand.read(&r.host.memfd),
            shm: stand.read(&r.host.shm),
            interfaces: stand
                .read(&r.host.interfaces)
                .then(|all| Ok(all.into_iter().map(|interface| stood_in(interface, stand)).collect())),
            module: devices.collect(),
            rdma_cm: Some(RdmaCm {
                module: stand.read(&r.rdma_cm.module),
                device: of_host(&r.rdma_cm.device),
                library: stand.read(&r.rdma_cm.library),
            }),
            nccl: Nccl {
                version: stand.read(&nccl.version).then(|(code, from)| Ok((code, stand.text(&from)))),
                plugin_variable: nccl.plugin_variable.as_deref().map(|v| stand.text(v)),
                ref_count: nccl.ref_count.clone(),
                plugin: stand.read(&nccl.plugin).then(|mut plugin| {
                    plugin.file = stand.text(&plugin.file);
                    Ok(plugin)
                }),
            },
            compute_modes: stand.read(&r.gpu.compute_modes),
            write_ordering: (r.pci.iter().filter(|function| function.what != GPU))
                .map(|function| (stand.name(&function.what), stand.read(&function.write_ordering)))
                .collect(),
        }
    }
}

/// A path as it is on the host, of one below the folder that was read.
fn outside(r: &Readings, text: &str) -> String {
    if r.root.is_empty() { text.into() } else { text.replace(&format!("{}/", r.root), "/") }
}
