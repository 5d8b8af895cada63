//! `pushgate model`: what a message costs on its way from a GPU to a NIC, pushed, pulled and bounced.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::Error;
use pushgate_driver_shim::file::read_text;
use pushgate_pcie_model::hops::{self, Latency};
use pushgate_pcie_model::plot::bytes as size;
use pushgate_pcie_model::{
    Completions, Crossing, Dllps, Estimate, Hop, Link, ParameterError, Parameters, Route, Way, Window,
    crossings, estimate,
};
use pushgate_topology::{Pair, route};
use serde::Serialize;

use crate::exit::Input;
use crate::output::{out, outln};
use crate::topo;

/// Hops of the table by hops.
const HOPS: u32 = 6;

pub fn command() -> Command {
    let d = Link::default();
    let value = |name: &'static str, value: &'static str, default: String, help: &'static str| {
        Arg::new(name).long(name).value_name(value).default_value(default).help(help)
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let chosen = |name: &'static str, of: [&'static str; 2], help: &'static str| {
        Arg::new(name).long(name).value_parser(of).default_value(of[0]).help(help)
    };
    let optional = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    Command::new("model")
        .about("Says what messages cost over PCIe, pushed by the GPU, pulled by the NIC, bounced through the host, and why")
        .after_help(
            "Nothing is measured here; --between and --found take what is known of this host. The link's values are what `lspci -vv` shows: LnkSta (generation, lanes), DevCtl \
             (MaxPayload, MaxReadReq), LnkCtl (RCB). Times are in microseconds, from the GPU's first store, or its \
             request, until the NIC holds the last byte. docs/pcie-model.md has the formulas.",
        )
        .arg(value("gen", "1..6", d.generation.to_string(), "PCIe generation of the narrowest link"))
        .arg(value("lanes", "N", d.lanes.to_string(), "Its lanes: 1, 2, 4, 8 or 16"))
        .arg(value("mps", "BYTES", d.mps.to_string(), "Maximum payload size: a power of two, 128 to 4096"))
        .arg(value("mrrs", "BYTES", d.mrrs.to_string(), "Maximum read request size: a power of two, 128 to 4096"))
        .arg(value("rcb", "BYTES", d.rcb.to_string(), "Read completion boundary: 64 or 128"))
        .arg(value("tags", "N", d.tags.to_string(), "Reads that the NIC may have outstanding: 32, 256 (extended), 768"))
        .arg(switch("ecrc", "TLPs carry an end-to-end CRC"))
        .arg(switch("addr32", "Addresses of 32 bits: headers are 4 bytes shorter"))
        .arg(chosen("completions", ["mps", "rcb"], "Where completers cut their answers: old root complexes at every RCB"))
        .arg(chosen("dllps", ["pcie-bench", "symbol-times"], "How ACKs and flow control are counted: by bytes, or by symbol times"))
        .arg(value(
            "hops",
            "LIST",
            "switch".into(),
            "What lies between GPU and NIC: switch, root (complex), socket, joined by commas, or none",
        ))
        .arg(
            Arg::new("between")
                .long("between")
                .num_args(2)
                .value_names(["GPU", "NIC"])
                .conflicts_with_all(["gen", "lanes", "mps", "mrrs", "rcb", "tags", "hops", "window"])
                .help("Takes link and way of two of this host, by their names in `pushgate topo`: gpu0 mlx5_0"),
        )
        .arg(
            optional("topology", "FILE", "Takes the shape of the machine from this TOML file, as `pushgate topo` does")
                .requires("between"),
        )
        .arg(chosen("window", ["host", "nic"], "Where the window lies that is pushed into"))
        .arg(value("sharers", "N", "1".into(), "GPUs that send over the narrowest link at the same time"))
        .arg(optional("store-width", "BYTES", "TLP payload of coalesced stores, 4 to MPS; before what --params says [default: 256, or MPS]"))
        .arg(optional("params", "FILE", "TOML with the host's parameters (names: --params-help); others keep their defaults"))
        .arg(
            switch("found", "Takes the parameters that `pushgate probe` found here for the GPU of --between, else for the first")
                .conflicts_with("params"),
        )
        .arg(switch("params-help", "Prints all parameters with their values in force, as TOML, and ends"))
        .arg(optional("bytes", "BYTES,...", "Sizes of a message (1024-based) [default: 8 B to 64 MiB]"))
        .arg(optional("plot", "FILE", "Writes the latency by hops as SVG"))
        .arg(switch("json", "One JSON object"))
}

/// What a run is about.
struct Asked {
    route: Route,
    parameters: Parameters,
    sizes: Vec<u64>,
}

#[derive(Serialize)]
struct Cell {
    way: Way,
    bytes: u64,
    #[serde(flatten)]
    estimate: Estimate,
    reason: &'static str,
}

#[derive(Serialize)]
struct Report<'a> {
    route: &'a Route,
    parameters: &'a Parameters,
    messages: Vec<Cell>,
    crossings: Vec<Crossing>,
    latency_by_hops: Vec<Latency>,
}

/// As the other commands name a value that is not allowed: by its flag.
fn wrong(e: ParameterError) -> Error {
    let flag = match e.name {
        "generation" => "gen",
        "store_tlp" => "store-width",
        name => name,
    };
    Error::flag(flag, e.value, e.allowed)
}

fn number(m: &ArgMatches, name: &str) -> Result<u32, Error> {
    let text: &String = m.get_one(name).expect("has a default");
    text.parse().map_err(|_| Error::flag(name, text, "a whole number"))
}

/// The way between two functions of this host, and the GPU's address.
fn between(m: &ArgMatches) -> Result<Option<(Route, String)>> {
    let Some(names) = m.get_many::<String>("between") else { return Ok(None) };
    let names: Vec<&String> = names.collect();
    let file = m.get_one::<String>("topology").map(String::as_str);
    let topology = topo::topology("/sys", "/proc", file)?;
    let pairs = topology.pairs();
    let label = |p: &Pair| format!("{} {}", topology.gpu_label(p.gpu), p.name);
    let asked = format!("{} {}", names[0], names[1]);
    let Some(pair) = pairs.iter().find(|p| label(p) == asked || format!("{} {}", p.gpu, p.name) == asked)
    else {
        let known: Vec<String> = pairs.iter().map(label).collect();
        let known =
            if known.is_empty() { "none: `pushgate topo` shows why".into() } else { known.join(", ") };
        return Err(Error::flag("between", asked, known).into());
    };
    let route = route(pair).with_context(|| {
        format!("the tree does not tell the way between {asked}: name a file that does by --topology")
    })?;
    Ok(Some((route, pair.gpu.to_string())))
}

/// What a probe of this host found for a GPU, or for the first.
fn found(gpu: Option<&str>) -> Result<Parameters> {
    let findings =
        topo::kept()?.context("no probe has measured the GPUs of this host: run `pushgate probe` first")?;
    let first = || findings.devices.first().map(|d| d.pci.as_str());
    let gpu = gpu.or_else(first).context("the probe's file has no device: run `pushgate probe` again")?;
    if findings.device(gpu).is_none() {
        bail!("the probe's file has no {gpu}: run `pushgate probe` again, with all GPUs visible");
    }
    Ok(findings.parameters(gpu, &Parameters::default()))
}

fn parameters(m: &ArgMatches, link: &Link, gpu: Option<&str>) -> Result<Parameters> {
    // A default that does not fit into a TLP of this link is no mistake of the user's.
    let fitting = |p: Parameters| Parameters { store_tlp: p.store_tlp.min(link.mps), ..p };
    let mut p = match m.get_one::<String>("params") {
        None if m.get_flag("found") => fitting(found(gpu)?),
        None => fitting(Parameters::default()),
        Some(file) => {
            let text = read_text(file).with_context(|| Input(format!("cannot read {file}")))?;
            let read: toml::Table = text.parse().with_context(|| Input(format!("{file} is not TOML")))?;
            let said = read.contains_key("store_tlp");
            let p: Parameters =
                read.try_into().with_context(|| Input(format!("{file} holds no parameters of the model")))?;
            if said { p } else { fitting(p) }
        }
    };
    if let Some(text) = m.get_one::<String>("store-width") {
        p.store_tlp = text.parse().map_err(|_| Error::flag("store-width", text, "a whole number"))?;
    }
    p.check(link).map_err(wrong)?;
    Ok(p)
}

fn asked(m: &ArgMatches) -> Result<Asked> {
    let text = |name: &str| m.get_one::<String>(name).map_or("", String::as_str);
    let link = Link {
        generation: number(m, "gen")?,
        lanes: number(m, "lanes")?,
        mps: number(m, "mps")?,
        mrrs: number(m, "mrrs")?,
        rcb: number(m, "rcb")?,
        tags: number(m, "tags")?,
        ecrc: m.get_flag("ecrc"),
        addr64: !m.get_flag("addr32"),
        completions: if text("completions") == "rcb" { Completions::Rcb } else { Completions::Mps },
        dllps: if text("dllps") == "symbol-times" { Dllps::SymbolTimes } else { Dllps::PcieBench },
    };
    let list = text("hops");
    let hops = if list == "none" { Ok(Vec::new()) } else { list.split(',').map(str::parse::<Hop>).collect() };
    let window = if text("window") == "nic" { Window::Nic } else { Window::Host };
    let sharers = number(m, "sharers")?;
    let (route, gpu) = match between(m)? {
        Some((r, gpu)) => {
            let Link { generation, lanes, mps, mrrs, rcb, tags, .. } = r.link;
            let link = Link { generation, lanes, mps, mrrs, rcb, tags, ..link };
            (Route { link, sharers, ..r }, Some(gpu))
        }
        None => (Route { link, hops: hops.map_err(wrong)?, window, sharers }, None),
    };
    route.check().map_err(wrong)?;
    let sizes = match m.get_one::<String>("bytes") {
        None => (3..=26).map(|e| 1 << e).collect(),
        Some(all) => {
            let parse = |s: &str| {
                pushgate::settings::parse_size(s)
                    .filter(|n| (1..=1 << 40).contains(n))
                    .ok_or_else(|| Error::flag("bytes", s, "1 to 1024G, as 4096, 64K or 1M"))
            };
            all.split(',').map(parse).collect::<Result<_, _>>()?
        }
    };
    Ok(Asked { parameters: parameters(m, &route.link, gpu.as_deref())?, route, sizes })
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let a = asked(m)?;
    if m.get_flag("params-help") {
        out!("{}", toml::to_string(&a.parameters)?)?;
        return Ok(());
    }
    // The chain of the table by hops is of the first kind that the way has.
    let hop = a.route.hops.first().copied().unwrap_or(Hop::Switch);
    let by_hops = hops::by_hops(&a.route.link, &a.parameters, hop, HOPS).map_err(wrong)?;
    if let Some(file) = m.get_one::<String>("plot") {
        std::fs::write(file, hops::plot(&by_hops, hop).svg())
            .with_context(|| format!("cannot write {file}"))?;
    }
    let mut messages = Vec::new();
    for &bytes in &a.sizes {
        for way in Way::ALL {
            let e = estimate(way, &a.route, &a.parameters, bytes).map_err(wrong)?;
            messages.push(Cell { way, bytes, estimate: e, reason: e.reason() });
        }
    }
    let crossings = crossings(&a.route, &a.parameters).map_err(wrong)?;
    let report =
        Report { route: &a.route, parameters: &a.parameters, messages, crossings, latency_by_hops: by_hops };
    if m.get_flag("json") {
        outln!("{}", serde_json::to_string(&report)?)?;
    } else {
        out!("{}", text(&report, hop))?;
    }
    Ok(())
}

/// The report as tables.
fn text(r: &Report, hop: Hop) -> String {
    let (mut s, l) = (String::new(), &r.route.link);
    let way: Vec<String> = r.route.hops.iter().map(Hop::to_string).collect();
    let way = if way.is_empty() { "nothing".into() } else { way.join(", ") };
    let window = if r.route.window == Window::Nic { "the NIC" } else { "host memory" };
    let _ = writeln!(
        s,
        "PCIe {} x{}, MPS {}, MRRS {}, RCB {}, {} tags; between: {way}; window in {window}; stores in TLPs of {} B",
        l.generation, l.lanes, l.mps, l.mrrs, l.rcb, l.tags, r.parameters.store_tlp
    );
    let _ = writeln!(
        s,
        "GB/s: one message alone; limit: of a stream of them, or latency, if that is most of the time"
    );
    let fence = if r.parameters.fence {
        "push: each message has a fence of its own, a round trip; fence = false in --params: many share one, or need none"
    } else {
        "push: no fence is charged: many messages share one, or need none"
    };
    let _ = writeln!(s, "{fence}\n");
    let _ = write!(s, "{:>8}", "size");
    for way in Way::ALL {
        let us = format!("{way} us");
        let _ = write!(s, "  {us:>10}");
        let _ = write!(s, " {:>6} {:<18}", "GB/s", "limit");
    }
    let _ = writeln!(s, " best");
    for row in r.messages.chunks(Way::ALL.len()) {
        let _ = write!(s, "{:>8}", size(row[0].bytes as f64));
        for c in row {
            let limit = if c.estimate.is_latency_bound() {
                "latency".into()
            } else {
                c.estimate.stream.limit.to_string()
            };
            let _ = write!(s, "  {:>10.2}", c.estimate.time_ns / 1e3);
            let _ = write!(s, " {:>6.2} {limit:<18}", c.estimate.bandwidth);
        }
        let best = row.iter().min_by(|a, b| a.estimate.time_ns.total_cmp(&b.estimate.time_ns));
        let _ = writeln!(s, " {}", best.map(|c| c.way.to_string()).unwrap_or_default());
    }
    let _ = writeln!(s, "\nwhy, for the largest:");
    for c in r.messages.iter().rev().take(Way::ALL.len()).rev() {
        let _ = writeln!(s, "  {}: up to {:.1} GB/s; {}", c.way, c.estimate.stream.gbs, c.reason);
    }
    let _ = writeln!(s, "\nwhere the faster of two changes, 8 B to 1 GiB:");
    for (i, &a) in Way::ALL.iter().enumerate() {
        for &b in &Way::ALL[i + 1..] {
            let pair = |c: &&Crossing| [(a, b), (b, a)].contains(&(c.below, c.above));
            let all: Vec<String> = r
                .crossings
                .iter()
                .filter(pair)
                .map(|c| format!("{} below {} B, {} from there", c.below, c.bytes, c.above))
                .collect();
            let said = if all.is_empty() { "no change".into() } else { all.join("; ") };
            let _ = writeln!(s, "  {a} and {b}: {said}");
        }
    }
    let _ = writeln!(s, "\nlatency of {} bytes by hops ({hop}), ns:", hops::BYTES);
    let _ = writeln!(s, "{:>5} {:>10} {:>10} {:>6}", "hops", "push", "pull", "ratio");
    for h in &r.latency_by_hops {
        let _ = writeln!(
            s,
            "{:>5} {:>10.0} {:>10.0} {:>6.2}",
            h.hops,
            h.push_ns,
            h.pull_ns,
            h.pull_ns / h.push_ns
        );
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Result<Asked> {
        let all = std::iter::once("model").chain(flags.iter().copied());
        asked(&command().try_get_matches_from(all)?)
    }

    #[test]
    fn flags_arrive_where_they_belong() {
        let a = parse(&[
            "--gen",
            "4",
            "--mps",
            "128",
            "--hops",
            "switch,root",
            "--window",
            "nic",
            "--bytes",
            "8,4K",
        ]);
        let a = a.unwrap();
        assert_eq!((a.route.link.generation, a.route.link.mps, a.route.window), (4, 128, Window::Nic));
        assert_eq!(a.route.hops, [Hop::Switch, Hop::RootComplex]);
        assert_eq!(a.sizes, [8, 4096]);
        assert_eq!(a.parameters.store_tlp, 128, "the default fits into MPS");
        assert!(parse(&["--hops", "none"]).unwrap().route.hops.is_empty());
    }

    #[test]
    fn what_is_not_allowed_is_named_by_its_flag() {
        let why = |flags: &[&str]| parse(flags).err().expect("is refused").to_string();
        assert_eq!(why(&["--gen", "7"]), "invalid gen `7` (from --gen): expected one of 1, 2, 3, 4, 5, 6");
        assert_eq!(why(&["--lanes", "x"]), "invalid lanes `x` (from --lanes): expected a whole number");
        assert_eq!(
            why(&["--store-width", "48"]),
            "invalid store-width `48` (from --store-width): expected a power of two from 4 to MPS (256)"
        );
        assert_eq!(
            why(&["--bytes", "0"]),
            "invalid bytes `0` (from --bytes): expected 1 to 1024G, as 4096, 64K or 1M"
        );
        assert_eq!(why(&["--params", "/nowhere.toml"]), "cannot read /nowhere.toml");
    }

    #[test]
    fn the_report_names_the_best_and_the_reason() {
        let a = parse(&["--tags", "32", "--hops", "root,socket", "--window", "nic"]).unwrap();
        let cell = |way| {
            let estimate = estimate(way, &a.route, &a.parameters, 1 << 30).unwrap();
            Cell { way, bytes: 1 << 30, estimate, reason: estimate.reason() }
        };
        let messages = Way::ALL.map(cell).into();
        let (route, parameters) = (&a.route, &a.parameters);
        let report = Report { route, parameters, messages, crossings: vec![], latency_by_hops: vec![] };
        let said = text(&report, Hop::Switch);
        let row = said.lines().find(|l| l.trim_start().starts_with("1 GiB")).unwrap();
        assert!(row.ends_with(" push"), "{row}");
        assert!(said.contains("outstanding requests do not cover the round trip"), "{said}");
        assert!(said.contains("push and pull: no change"));
        assert!(said.contains("each message has a fence of its own"));
    }
}
