//! Draws a topology as text: the tree, the matrices, the advice.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::address::Address;
use crate::advise::Advice;
use crate::config::Read;
use crate::distance::{AcsOnWay, Distance};
use crate::host_link::HostLink;
use crate::pair::Pair;
use crate::report::Report;
use crate::tree::{DEEPEST, Function, Nic, Parent, Role, RootComplex, Source, Topology};

/// Options of the drawing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Draws lines in ASCII instead of box-drawing characters.
    pub ascii: bool,
    /// Draws every function, instead of only GPUs, NICs and shim functions with what is above them.
    pub all: bool,
}

impl Style {
    /// The prefixes of an entry and of what is below the entry.
    fn branch(self, last: bool) -> (&'static str, &'static str) {
        match (self.ascii, last) {
            (false, false) => ("├─ ", "│  "),
            (false, true) => ("└─ ", "   "),
            (true, false) => ("|- ", "|  "),
            (true, true) => ("`- ", "   "),
        }
    }
}

/// Draws everything: host, tree, matrices, advice, findings, notes.
pub fn report(report: &Report, style: Style) -> String {
    let t = &report.topology;
    let mut out = host(t);
    out += &tree(t, style);
    out += &gpu_nic(report);
    out += &gpu_gpu(report);
    if let Some(advice) = &report.without_nic {
        let _ = writeln!(out, "\nadvice: {}: {}", advice.method, advice.reason);
    }
    out += &advice(report);
    let last = notes(report);
    if !last.is_empty() {
        out += "\nnotes\n";
        for note in last {
            let _ = writeln!(out, "  {note}");
        }
    }
    out
}

/// What looks wrong and what could not be read, one sentence each.
pub fn notes(report: &Report) -> Vec<String> {
    let mut said = report.findings.clone();
    if report.needs_root {
        said.push(
            "configuration spaces are cut to 64 bytes: run as root to see MPS, MRRS, tags and ACS".into(),
        );
    }
    said.extend(report.topology.notes.iter().cloned());
    said
}

/// Describes the host in a few lines.
pub fn host(t: &Topology) -> String {
    let m = &t.machine;
    let product: Vec<&str> = [&m.vendor, &m.product].into_iter().flatten().map(String::as_str).collect();
    let mut said = Vec::new();
    if !product.is_empty() {
        said.push(product.join(" "));
    }
    said.extend(m.cpu_model.clone());
    if !m.nodes.is_empty() {
        let mut packages: Vec<u32> = m.nodes.iter().filter_map(|n| n.package).collect();
        packages.sort();
        packages.dedup();
        let bare = m.nodes.iter().filter(|n| !n.processors).count();
        let nodes = plural(m.nodes.len() - bare, "NUMA node");
        let nodes = match packages.len() {
            0 => nodes,
            n => format!("{nodes} in {}", plural(n, "socket")),
        };
        said.push(if bare > 0 { format!("{nodes} and {bare} without processors") } else { nodes });
    }
    if let Some(version) = &m.nvidia_driver {
        said.push(format!("NVIDIA driver {version}"));
    }
    let mut out = String::new();
    if !said.is_empty() {
        let _ = writeln!(out, "host: {}", said.join(", "));
    }
    match (&m.virtual_machine, t.source, m.flat) {
        (_, Source::File, _) => out += "tree: from a file\n",
        (Some(why), _, true) => {
            let _ = writeln!(
                out,
                "tree: a virtual machine's ({why}), and flat: it does not tell how far devices are from each other.\n\
                 {:6}Say how the machine is built with --topology FILE; --from-nccl FILE.xml makes one (docs/topology.md).",
                ""
            );
        }
        (Some(why), _, false) => {
            let _ = writeln!(out, "tree: a virtual machine's ({why}): as the hypervisor shows it");
        }
        (None, ..) => {}
    }
    out
}

fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Draws the tree: root complexes by NUMA node, and below them what matters, or everything.
pub fn tree(t: &Topology, style: Style) -> String {
    let mut out = String::new();
    let drawn = shown(t, style);
    let software = t.nics.iter().filter(|n| n.address.is_none());
    if drawn.is_empty() {
        let n = t.functions.len();
        let _ = writeln!(
            out,
            "\nno GPU, no RDMA NIC and no function of the shim driver among {}{}",
            plural(n, "PCI function"),
            if n > 0 { "; --all shows them" } else { "" }
        );
    } else {
        out.push('\n');
    }
    let numa_of = |r: &RootComplex| r.numa.or_else(|| t.machine.only_node());
    let mut numa: Vec<Option<u32>> = t.root_complexes.iter().map(numa_of).collect();
    numa.sort();
    numa.dedup();
    for node in numa {
        let roots: Vec<_> = t
            .root_complexes
            .iter()
            .filter(|r| numa_of(r) == node)
            .map(|r| (r, Parent::RootComplex(r.name.clone())))
            .filter(|(_, at)| t.below(at).any(|f| drawn.contains(&f.address)))
            .collect();
        if roots.is_empty() {
            continue;
        }
        match node {
            Some(n) => {
                let package = t.machine.nodes.iter().find(|m| m.number == n).and_then(|m| m.package);
                let socket = package.map_or(String::new(), |p| format!(", socket {p}"));
                let _ = writeln!(out, "NUMA node {n}{socket}");
            }
            None => out += "NUMA node not told\n",
        }
        for (i, (root, at)) in roots.iter().enumerate() {
            let (mark, below) = style.branch(i + 1 == roots.len());
            let _ = writeln!(out, "{mark}root complex {}", root.name);
            branch(t, at, below, (style, &drawn), &mut out);
        }
    }
    for nic in software {
        let _ = writeln!(out, "{}", nic_text(nic, true));
    }
    out
}

/// The functions that are drawn.
fn shown(t: &Topology, style: Style) -> BTreeSet<Address> {
    let with_above = |f: &Function| t.above(f.address).0.into_iter().map(|f| f.address).collect::<Vec<_>>();
    t.functions.values().filter(|f| style.all || t.matters(f.address)).flat_map(with_above).collect()
}

fn branch(t: &Topology, parent: &Parent, indent: &str, how: (Style, &BTreeSet<Address>), out: &mut String) {
    if indent.chars().count() > 3 * DEEPEST {
        let _ = writeln!(out, "{indent}...");
        return;
    }
    let below: Vec<&Function> = t.below(parent).filter(|f| how.1.contains(&f.address)).collect();
    for (i, f) in below.iter().enumerate() {
        let (mark, deeper) = how.0.branch(i + 1 == below.len());
        let _ = writeln!(out, "{indent}{mark}{} {}", f.address, function_text(t, f));
        branch(t, &Parent::Function(f.address), &format!("{indent}{deeper}"), how, out);
    }
}

fn function_text(t: &Topology, f: &Function) -> String {
    let mut said = Vec::new();
    match f.role {
        Role::RootPort => said.push("root port".to_owned()),
        Role::Switch => said.push("switch".into()),
        Role::DownstreamPort => said.push("port".into()),
        Role::Bridge => said.push("bridge".into()),
        Role::Endpoint if !t.matters(f.address) => said.push(f.class_name().into()),
        Role::Endpoint => {}
    }
    for gpu in t.gpus.iter().filter(|g| g.address == f.address) {
        let name = gpu.name.as_deref().unwrap_or("NVIDIA GPU");
        said.push(format!("{} {name}", t.gpu_label(gpu.address)));
        match t.host_link(gpu.address) {
            HostLink::Pcie => {}
            HostLink::NvLink => said.push("NVLink-C2C to the processor".into()),
            HostLink::Unified => said.push("one memory with the processor".into()),
        }
        if let Some(mig) = &gpu.mig {
            said.push(format!("MIG: {}", plural(mig.instances.len(), "instance")));
        }
        if gpu.mps == Some(true) {
            said.push("MPS service".into());
        }
    }
    said.extend(t.nics.iter().filter(|n| n.address == Some(f.address)).map(|n| nic_text(n, false)));
    for shim in t.shims.iter().filter(|s| s.address == f.address) {
        said.push(format!("{} window", shim.name.as_deref().unwrap_or("pushgate (no device file)")));
    }
    match (f.link.now, f.link.best) {
        (Some(now), Some(best)) if now != best => said.push(format!("{now} (of {best})")),
        (Some(link), _) => said.push(link.to_string()),
        (None, Some(best)) if t.source == Source::File => said.push(best.to_string()),
        (None, _) => {}
    }
    if let (true, Read::Is(e)) = (t.matters(f.address), &f.config.express) {
        said.push(format!("MPS {} MRRS {}", e.max_payload, e.max_read_request));
    }
    if f.config.acs.get().is_some_and(|a| a.redirects_requests()) {
        said.push("ACS redirects".into());
    }
    match &f.driver {
        Some(driver) if f.role == Role::Endpoint => said.push(format!("driver {driver}")),
        None if f.role == Role::Endpoint && t.matters(f.address) && t.source == Source::Sysfs => {
            said.push("no driver".into());
        }
        _ => {}
    }
    said.join(", ")
}

fn nic_text(nic: &Nic, alone: bool) -> String {
    let mut text = nic.name.clone();
    if nic.software {
        text += " (software";
        text += &nic.netdev.as_ref().map_or(String::new(), |n| format!(" on {n}"));
        text += if alone { ", no PCI function)" } else { ")" };
    } else if let Some(netdev) = &nic.netdev {
        let _ = write!(text, " ({netdev})");
    }
    for port in &nic.ports {
        let parts = [
            port.gigabits.map(|g| format!("{g} Gb/s")),
            port.link_layer.clone(),
            port.state.clone().filter(|s| s != "ACTIVE"),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        if !parts.is_empty() {
            let _ = write!(text, " {}", parts.join(" "));
        }
    }
    text
}

/// A table: rows of cells with aligned columns.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| Some(r.get(c)?.chars().count())).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::from(" ");
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, " {cell:width$} ");
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// The matrix GPU x NIC: the distances, and the methods advised.
pub fn gpu_nic(report: &Report) -> String {
    let t = &report.topology;
    if report.gpu_nic.is_empty() {
        return String::new();
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    for gpu in &t.gpus {
        let pairs = report.gpu_nic.iter().filter(|p| p.pair.gpu == gpu.address);
        if rows.is_empty() {
            rows.push(
                [String::new()].into_iter().chain(pairs.clone().map(|p| p.pair.name.clone())).collect(),
            );
        }
        let cells = pairs.map(|p| format!("{} {}", distance_cell(p.distance, &p.pair), p.advice.method));
        rows.push([t.gpu_label(gpu.address)].into_iter().chain(cells).collect());
    }
    let used: Vec<Distance> = report.gpu_nic.iter().map(|p| p.distance).collect();
    format!("\nGPU x NIC\n{}{}", table(&rows), legend(&used, false))
}

fn distance_cell(distance: Distance, pair: &Pair) -> String {
    let redirects = pair.path.as_ref().and_then(|p| p.acs.redirects()) == Some(true);
    if pair.to.is_none() {
        "-".into()
    } else {
        format!("{}{}", distance.short(), if redirects { "+ACS" } else { "" })
    }
}

/// The matrix GPU x GPU: the distances over PCIe, NVLinks, peer access.
pub fn gpu_gpu(report: &Report) -> String {
    let t = &report.topology;
    if report.gpu_gpu.is_empty() {
        return String::new();
    }
    let of = |a: Address, b: Address| {
        report.gpu_gpu.iter().find(|p| (p.from, p.to) == (a, b) || (p.from, p.to) == (b, a))
    };
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(t.gpus.iter().map(|g| t.gpu_label(g.address)));
    for a in &t.gpus {
        let cell = |b: Address| match of(a.address, b) {
            None => "X".to_owned(),
            Some(p) => {
                let nvlink = if p.nvlinks > 0 { format!(" NV{}", p.nvlinks) } else { String::new() };
                let peer = match p.peer_access {
                    Some(true) => " peer",
                    Some(false) => " no-peer",
                    None => "",
                };
                format!("{}{nvlink}{peer}", p.distance.short())
            }
        };
        let mut row = vec![t.gpu_label(a.address)];
        row.extend(t.gpus.iter().map(|b| cell(b.address)));
        rows.push(row);
    }
    let used: Vec<Distance> = report.gpu_gpu.iter().map(|p| p.distance).collect();
    let nvlinks = report.gpu_gpu.iter().any(|p| p.nvlinks > 0);
    format!("\nGPU x GPU\n{}{}", table(&rows), legend(&used, nvlinks))
}

fn legend(used: &[Distance], nvlinks: bool) -> String {
    let mut used = used.to_vec();
    used.sort();
    used.dedup();
    let mut said: Vec<String> = used.iter().map(|d| format!("{} {d}", d.short())).collect();
    if nvlinks {
        said.push("NVn that many NVLinks".into());
    }
    format!("  ({})\n", said.join("; "))
}

/// Lists each advice with the pairs that it is for, like `gpu0-mlx5_0`.
pub fn advised(report: &Report) -> Vec<(&Advice, Vec<String>)> {
    let mut groups: Vec<(&Advice, Vec<String>)> = Vec::new();
    for p in &report.gpu_nic {
        let name = format!("{}-{}", p.gpu_label, p.pair.name);
        match groups.iter_mut().find(|(a, _)| **a == p.advice) {
            Some((_, names)) => names.push(name),
            None => groups.push((&p.advice, vec![name])),
        }
    }
    groups
}

fn advice(report: &Report) -> String {
    let groups = advised(report);
    if groups.is_empty() {
        return String::new();
    }
    let mut out = String::from("\nadvice\n");
    for (advice, names) in groups {
        let _ = writeln!(out, "  {}: {}", advice.method, names.join(" "));
        let _ = writeln!(out, "      {}", advice.reason);
        for warning in &advice.warnings {
            let _ = writeln!(out, "      beware: {warning}");
        }
    }
    out
}

/// Draws the way between two functions, hop by hop.
pub fn path(t: &Topology, from: Address, to: Address) -> Option<String> {
    let path = t.path(from, to)?;
    let mut out = format!("{from} to {to}: {}\n", path.distance);
    if !path.hops.is_empty() {
        let hops: Vec<String> = path.hops.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "  over      {}", hops.join(", "));
    }
    let through: Vec<String> = path.through.iter().map(ToString::to_string).collect();
    let _ = writeln!(out, "  functions {}", through.join(" "));
    if let Some(link) = path.narrowest {
        let state = link.state;
        let _ =
            writeln!(out, "  narrowest {state} above {}, {:.1} GB/s each way", link.below, state.gigabytes());
    }
    let acs = match &path.acs {
        AcsOnWay::NotAsked => "plays no part".to_owned(),
        AcsOnWay::Direct => "lets packets take the short path".into(),
        AcsOnWay::Redirects(ports) => {
            let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
            format!("redirects to the root complex at {}", ports.join(", "))
        }
        AcsOnWay::InferredRedirects => "redirects, as the IOMMU groups tell".into(),
        AcsOnWay::Unknown => "not known: root may read it, a file may tell it".into(),
    };
    if !path.hops.is_empty() {
        let _ = writeln!(out, "  ACS       {acs}");
    }
    let p = crate::pair::Parameters::of(t, &path);
    let number = |what: &str, value: Option<u32>| value.map(|v| format!("{what} {v}"));
    let parameters: Vec<String> = [
        number("MPS", p.max_payload),
        number("MRRS", p.max_read_request),
        number("RCB", p.read_completion_boundary),
        number("tags", p.tags),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !parameters.is_empty() {
        let _ = writeln!(out, "  packets   {} (the last three of {to})", parameters.join(", "));
    }
    Some(out)
}
