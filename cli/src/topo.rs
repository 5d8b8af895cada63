//! `pushgate topo`: where GPUs, NICs and windows sit, and which path is advised for each pair.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::{Settings, rdma};
use pushgate_door::netlink::addresses_of;
use pushgate_driver_shim::file::read_text;
use pushgate_pcie_model::Parameters;
use pushgate_pcie_model::findings::{Findings, FindingsError};
use pushgate_topology::{Address, Figures, Report, Sysfs, Topology, draw, evidence, nvml};

use crate::exit::Input;
use crate::output::{errln, out};

pub fn command() -> Command {
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let value = |name: &'static str, what: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(what).help(help)
    };
    Command::new("topo")
        .about("Shows where GPUs, NICs and windows sit, and which path is advised for each pair")
        .after_help("docs/topology.md says how distances are judged, and describes the files.")
        .arg(
            Arg::new("between")
                .num_args(2)
                .value_names(["FROM", "TO"])
                .help("Shows the way between two alone: a PCI address, gpu0, mlx5_0, pushgate0"),
        )
        .arg(flag("json", "One JSON object"))
        .arg(flag("toml", "Prints the topology as a file for --topology"))
        .arg(flag("ascii", "Draws lines in ASCII"))
        .arg(flag("all", "Draws every PCI function, not only those with a GPU, NIC or window below"))
        .arg(value(
            "topology",
            "FILE",
            "Takes the shape of the machine from this TOML file, for virtual machines",
        ))
        .arg(
            value(
                "from-nccl",
                "FILE.xml",
                "Writes such a TOML file from what NCCL_TOPO_DUMP_FILE wrote, to stdout",
            )
            .conflicts_with_all(["topology", "json", "all", "ascii", "between", "toml"]),
        )
        .arg(value("sysfs", "DIR", "Reads a sysfs elsewhere").default_value("/sys"))
        .arg(value("proc", "DIR", "Reads a /proc elsewhere").default_value("/proc"))
        .group(clap::ArgGroup::new("form").args(["json", "toml", "between"]))
}

pub fn run(m: &ArgMatches) -> Result<()> {
    if let Some(path) = m.get_one::<String>("from-nccl") {
        let topology = Topology::from_nccl(&text(path)?).with_context(|| Input(path.clone()))?;
        for note in &topology.notes {
            errln!("pushgate topo: {path}: {note}");
        }
        let head = "# From NCCL's topology; docs/topology.md describes this file.";
        return show(&format!("{head}\n{}", topology.to_toml()));
    }
    let folder = |name: &str| m.get_one::<String>(name).expect("has a default");
    let file = m.get_one::<String>("topology").map(String::as_str);
    let mut topology = topology(folder("sysfs"), folder("proc"), file)?;
    if let Some(mut ends) = m.get_many::<String>("between") {
        let mut end = || {
            let name = ends.next().expect("clap takes two");
            let known = || {
                let gpus = topology.gpus.iter().map(|g| topology.gpu_label(g.address));
                let nics = topology.nics.iter().filter(|n| n.address.is_some()).map(|n| n.name.clone());
                let all: Vec<String> =
                    gpus.chain(nics).chain(topology.shims.iter().filter_map(|s| s.name.clone())).collect();
                if all.is_empty() {
                    "no GPU, NIC or window is known".into()
                } else {
                    format!("known are {}", all.join(", "))
                }
            };
            topology.find(name).with_context(|| {
                Input(format!(
                    "`{name}` is no PCI function here: give an address like 0000:17:00.0 or a name; {}",
                    known()
                ))
            })
        };
        let (from, to) = (end()?, end()?);
        return show(&draw::path(&topology, from, to).context("one of the two is not in the tree")?);
    }
    if m.get_flag("toml") {
        return show(&format!("# docs/topology.md describes this file.\n{}", topology.to_toml()));
    }
    // No probe was of another machine's shape.
    let own = m.get_one::<String>("sysfs").is_some_and(|sys| sys == "/sys");
    let kept = if own { kept() } else { Ok(None) };
    let kept = kept.unwrap_or_else(|e| {
        topology.notes.push(e.to_string());
        None
    });
    let report = judged(&topology, kept.as_ref());
    let choices =
        choices(Path::new(folder("sysfs")), &topology, if own { addresses_of } else { |_| Vec::new() });
    if m.get_flag("json") {
        let mut all = serde_json::to_value(&report)?;
        all["rdma_choice"] = choices.into();
        return show(&format!("{}\n", serde_json::to_string_pretty(&all)?));
    }
    show(&draw::report(&report, draw::Style { ascii: m.get_flag("ascii"), all: m.get_flag("all") }))?;
    choices.iter().try_for_each(|line| show(&format!("\nib-dev = auto: {line}\n")))
}

/// Which RDMA device `ib-dev = auto` takes, and why: a line for all GPUs, or one for each that has another. None without RDMA
/// devices.
fn choices(sys: &Path, topology: &Topology, addresses: fn(&str) -> Vec<IpAddr>) -> Vec<String> {
    let rank = |gpu| rdma::rank(sys, &Settings::default(), topology, gpu, addresses);
    if rank(None).ranked().is_empty() {
        return Vec::new();
    }
    let of = |gpu: Address| (topology.gpu_label(gpu), rank(Some(gpu)).report());
    let all: Vec<_> = topology.gpus.iter().map(|gpu| of(gpu.address)).collect();
    match all.first() {
        None => vec![rank(None).report()],
        Some((_, first)) if all.iter().all(|(_, report)| report == first) => vec![first.clone()],
        Some(_) => all.into_iter().map(|(gpu, report)| format!("for {gpu} {report}")).collect(),
    }
}

/// What a probe of this host's GPUs found, if there was one.
pub fn kept() -> Result<Option<Findings>, FindingsError> {
    Findings::kept(&Sysfs::host().read().fingerprint("cuda"))
}

/// Judges a topology by the model, with what a probe found on that host if it was there.
pub fn judged(topology: &Topology, findings: Option<&Findings>) -> Report {
    let parameters = Parameters::default();
    let figures = Figures { findings, parameters: &parameters };
    topology.report(evidence(&figures, findings))
}

fn show(text: &str) -> Result<()> {
    Ok(out!("{text}")?)
}

/// Reads a host's tree, with what its GPUs' driver tells if it is this one, in the shape of a file if one is named.
pub fn topology(sys: &str, proc: &str, file: Option<&str>) -> Result<Topology> {
    if !Path::new(sys).is_dir() {
        return Err(Input(format!("{sys}: no such folder; --sysfs takes the root of a sysfs")).into());
    }
    if !Path::new(proc).is_dir() {
        return Err(Input(format!("{proc}: no such folder; --proc takes the root of a /proc")).into());
    }
    let mut topology = Sysfs::new(sys).with_proc(proc).read();
    // Another machine's files know nothing of this one's GPUs.
    let own = sys == "/sys";
    let told = if own { Some(nvml::read()) } else { None };
    match told {
        Some(Ok(told)) => {
            topology.learn_gpus(told.gpus);
            topology.notes.extend(told.notes);
        }
        Some(Err(why)) if !topology.gpus.is_empty() => {
            topology.notes.push(format!("NVML can't be asked for MIG, NVLinks and peer access: {why}"));
        }
        _ => {}
    }
    let Some(path) = file else { return Ok(topology) };
    let file = Topology::from_toml(&text(path)?).with_context(|| Input(path.to_owned()))?;
    Ok(file.on_host(topology))
}

fn text(path: &str) -> Result<String> {
    read_text(path).with_context(|| Input(format!("{path} cannot be read")))
}
