//! The page, section by section. Pure: facts in, HTML out.

use pushgate_doctor::{Finding, Status};
use pushgate_pcie_model::findings::{Device, Findings, collapses};
use pushgate_pcie_model::{Hop, Link, Parameters, Route, Window, hops};
use pushgate_topology::{Address, Basis, Source, draw, link_to_host, route};

use super::gather::Facts;
use super::html::{Body, Cell};
use super::measured::fitting;
use super::redact::Redact;
use super::{measured, plots};

/// Devices, and pairs of them, that have tables and plots of their own.
const MOST_DEVICES: usize = 16;
const MOST_PLOTTED: usize = 4;
/// Routes that have plots of the model.
const MOST_ROUTES: usize = 3;
/// Hops of the plot by hops.
const HOPS: u32 = 6;

/// Sections: what links name them, and their titles.
const SECTIONS: [(&str, &str); 7] = [
    ("doctor", "Doctor"),
    ("summary", "Summary"),
    ("topology", "Topology"),
    ("advice", "Advice"),
    ("measurements", "Measurements"),
    ("plots", "Plots"),
    ("versions", "Versions and settings"),
];

/// The page.
pub fn html(facts: &Facts, redact: Redact) -> String {
    let mut body = Body::new(redact);
    let title = format!("pushgate report: {}", facts.host);
    body.raw("<header>");
    body.raw("<h1>pushgate report</h1>");
    body.para(&format!("Host {}, {}, pushgate {}", facts.host, facts.date, env!("CARGO_PKG_VERSION")));
    body.raw("</header>\n<nav aria-label=\"Contents\"><ul>");
    for (id, title) in SECTIONS {
        body.raw(&format!("<li><a href=\"#{id}\">{title}</a></li>"));
    }
    body.raw("</ul></nav>\n<main>");
    let write: [fn(&mut Body, &Facts); 7] =
        [doctor, summary, topology, advice, measurements, all_plots, versions];
    for ((id, title), write) in SECTIONS.into_iter().zip(write) {
        body.section(id, title);
        write(&mut body, facts);
        body.end_section();
    }
    body.raw("</main>\n<footer>");
    body.para(
        "GB/s are 10^9 bytes a second, KiB and MiB 2^10 and 2^20 bytes, us microseconds. What the figures mean and how \
         they are measured stands in docs/topology.md, probe.md, pcie-model.md and doctor.md of pushgate.",
    );
    body.raw("</footer>");
    body.page(&title)
}

fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn summary(body: &mut Body, facts: &Facts) {
    let t = &facts.topology.topology;
    let there = |yes: bool| if yes { "here".into() } else { Cell::marked("missing", "warned") };
    let row = |part: &str, state: Cell, said: String| vec![Cell::from(part), state, said.into()];
    let found = match &facts.findings {
        Ok(f) => format!(
            "measured {} on {} by {}, largest error of a curve {:.0} %",
            f.date,
            plural(f.devices.len(), "device"),
            f.executor,
            f.worst_error * 100.0
        ),
        Err(why) => why.clone(),
    };
    let d = &facts.doctor;
    let worst = match (d.failed, d.warned) {
        (0, 0) => Cell::from("passed"),
        (0, _) => Cell::marked("warned", "warned"),
        _ => Cell::marked("failed", "failed"),
    };
    let mut parts = vec![
        plural(t.gpus.len(), "GPU"),
        plural(t.nics.len(), "RDMA device"),
        plural(t.shims.len(), "function") + " of the shim driver",
    ];
    if t.source == Source::File {
        parts.push("in the shape of a file".into());
    }
    let rows = [
        row("topology", there(!t.gpus.is_empty()), parts.join(", ")),
        row("measurements", there(facts.findings.is_ok()), found),
        row(
            "doctor",
            worst,
            format!(
                "{} passed, {} warned, {} failed, {} not applicable",
                d.passed, d.warned, d.failed, d.not_applicable
            ),
        ),
        match &facts.wrong_setting {
            None => row("settings", "allowed".into(), "each, and together".into()),
            Some(why) => row("settings", Cell::marked("refused", "failed"), why.clone()),
        },
    ];
    body.table("What is on this page", &["part", "state", "summary"], &rows);
    facts.beware.iter().for_each(|said| body.beware(said));
}

/// Why there is nothing to show of GPUs.
const NO_GPU: &str = "no GPU of NVIDIA is among the PCI functions. Where there should be one, `pushgate topo --all` \
                      shows every function and `pushgate doctor` the driver's state; --topology FILE shows another \
                      machine's shape.";

fn topology(body: &mut Body, facts: &Facts) {
    let report = &facts.topology;
    let t = &report.topology;
    if t.gpus.is_empty() {
        body.missing(NO_GPU);
    }
    let tree = draw::host(t) + &draw::tree(t, draw::Style::default());
    body.heading("Tree");
    body.drawing("The tree of PCI functions", &tree);
    let matrices = [("GPU x NIC", draw::gpu_nic(report)), ("GPU x GPU", draw::gpu_gpu(report))];
    for (name, drawn) in matrices {
        body.heading(name);
        // Its own first line says the same.
        let drawn = drawn.trim_start_matches('\n');
        match drawn.strip_prefix(name).unwrap_or(drawn).trim_matches('\n') {
            "" if t.gpus.is_empty() => body.missing("without a GPU there are no pairs."),
            "" if name == "GPU x GPU" => body.para("There is one GPU: no pairs."),
            "" => body.missing(
                "no RDMA device and no window of the kernel module to pair GPUs with; `rdma link` lists devices, \
                 `modprobe mlx5_ib` or the like brings a NIC's up.",
            ),
            drawn => body.drawing(&format!("Distances {name}"), drawn),
        }
    }
    let notes = draw::notes(report);
    if !notes.is_empty() {
        body.heading("What looks wrong, and what could not be read");
        body.list(&notes);
    }
}

fn advice(body: &mut Body, facts: &Facts) {
    let report = &facts.topology;
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for (advice, pairs) in draw::advised(report) {
        let why = advice.warnings.iter().fold(advice.reason.clone(), |why, w| format!("{why}. Beware: {w}"));
        let basis = match advice.basis {
            Basis::Distance => "distance",
            Basis::Model => "model",
            Basis::Probe => "probe",
        };
        rows.push(vec![
            pairs.join(" ").into(),
            Cell::from(advice.method.to_string()),
            why.into(),
            basis.into(),
        ]);
    }
    if let Some(advice) = &report.without_nic {
        rows.push(vec![
            "without a NIC".into(),
            advice.method.to_string().into(),
            advice.reason.clone().into(),
            "distance".into(),
        ]);
    }
    match rows.is_empty() {
        true => body.missing(NO_GPU),
        false => {
            body.table("Which path is advised, and why", &["pairs", "path", "because", "known from"], &rows)
        }
    }
    if facts.findings.is_err() && !report.gpu_nic.is_empty() {
        body.para("Advice is by distance: with what `pushgate probe` finds it is by figures of this host.");
    }
}

/// A GPU's label, where the tree has it; else its address.
fn label(facts: &Facts, pci: &str) -> String {
    let known = pci.parse::<Address>().ok().filter(|at| facts.topology.topology.function(*at).is_some());
    known.map_or_else(|| pci.to_owned(), |at| facts.topology.topology.gpu_label(at))
}

/// What a device is called in tables and plots.
fn name(facts: &Facts, d: &Device) -> String {
    if d.pci == "cpu" { "CPU executor".into() } else { label(facts, &d.pci) }
}

/// The link of a device that a probe measured.
fn link(facts: &Facts, pci: &str) -> Option<Link> {
    link_to_host(&facts.topology.topology, pci.parse().ok()?)
}

fn measurements(body: &mut Body, facts: &Facts) {
    let f = match &facts.findings {
        Ok(f) => f,
        Err(why) => return body.missing(why),
    };
    body.para(&format!(
        "Measured {} on {}, executor {}, driver {}, topology {}. Largest error of a device's curve beside its points: \
         {:.1} %.",
        f.date,
        f.host,
        f.executor,
        f.driver,
        f.topology,
        f.worst_error * 100.0
    ));
    facts.beware.iter().for_each(|said| body.beware(said));
    if f.devices.is_empty() {
        body.missing("the probe's file has no device: run `pushgate probe` again.");
    }
    let unit = |d| measured::Unit { label: name(facts, d), device: d, link: link(facts, &d.pci) };
    let units: Vec<measured::Unit> = f.devices.iter().take(MOST_DEVICES).map(unit).collect();
    body.heading("Each device by itself");
    measured::devices(body, f, &units);
    for u in units.iter().take(MOST_PLOTTED) {
        measured::by_size(body, &format!("Single transfers of {}, by size", u.label), &u.device.lines);
    }
    if f.devices.len() > MOST_DEVICES {
        body.para(&format!("Shown are {MOST_DEVICES} of {} devices.", f.devices.len()));
    }
    body.heading("Between devices");
    match f.pairs.is_empty() {
        true => body.missing("the probe's file has no messages between devices: run `pushgate probe` again."),
        false => {
            measured::pairs(body, f, &|pci| label(facts, pci));
            for p in plotted(f) {
                let who = format!("{} to {}", label(facts, &p.from), label(facts, &p.to));
                measured::by_size(body, &format!("Messages, host to host: {who}"), &p.lines);
            }
        }
    }
}

/// The pairs whose lines are shown: the quickest and the slowest for a record.
fn plotted(f: &Findings) -> Vec<&pushgate_pcie_model::findings::Pair> {
    let by = |a: &&_, b: &&_| {
        let record = |p: &pushgate_pcie_model::findings::Pair| p.record;
        record(a).total_cmp(&record(b))
    };
    let ends = [f.pairs.iter().min_by(by), f.pairs.iter().max_by(by)];
    let mut shown: Vec<_> = ends.into_iter().flatten().collect();
    shown.dedup_by(|a, b| std::ptr::eq(*a, *b));
    shown
}

/// Routes from GPUs to NICs that differ, with the pairs of each, and the GPU of the first.
fn routes(facts: &Facts) -> Vec<(Route, Address, Vec<String>)> {
    let mut all: Vec<(Route, Address, Vec<String>)> = Vec::new();
    for p in &facts.topology.gpu_nic {
        let Some(route) = route(&p.pair) else { continue };
        let name = format!("{} to {}", p.gpu_label, p.pair.name);
        match all.iter_mut().find(|(r, ..)| *r == route) {
            Some((.., names)) => names.push(name),
            None => all.push((route, p.pair.gpu, vec![name])),
        }
    }
    all
}

fn all_plots(body: &mut Body, facts: &Facts) {
    let known = routes(facts);
    match known.is_empty() {
        true => body.missing(
            "the model has no plots: no path from a GPU to a NIC is known here. `pushgate topo` says why; --topology \
             FILE names the path.",
        ),
        false => model_plots(body, facts, &known),
    }

    body.heading("Measured, over the fitted curves");
    let f = match &facts.findings {
        Ok(f) => f,
        Err(why) => return body.missing(why),
    };
    for d in f.devices.iter().take(MOST_PLOTTED) {
        let who = name(facts, d);
        for plot in plots::device(&who, d, self::link(facts, &d.pci).as_ref()) {
            body.plot(plot, &format!("Single transfers of {} ({}), by itself.", d.name, d.pci));
        }
    }
    if f.devices.len() > MOST_PLOTTED {
        body.para(&format!(
            "Plotted are {MOST_PLOTTED} of {} devices; the tables have all.",
            f.devices.len()
        ));
    }
    for p in plotted(f) {
        let who = format!("{} to {}", label(facts, &p.from), label(facts, &p.to));
        for plot in plots::pair(&who, p) {
            body.plot(
                plot,
                "Messages from device to device, by the host's clock, from its word to the last byte.",
            );
        }
    }
    if f.devices.iter().map(|d| &d.writers).chain([&f.writers]).any(|w| collapses(w).is_some()) {
        body.para("Writers at once collapse on this host: see the tables of measurements.");
    }
}

/// Push, pull and bounce by size over each route, and latency by hops over the first.
fn model_plots(body: &mut Body, facts: &Facts, known: &[(Route, Address, Vec<String>)]) {
    let findings = facts.findings.as_ref().ok().filter(|f| f.executor == "cuda");
    body.heading("The model: push, pull and bounce by size");
    if known.len() > MOST_ROUTES {
        body.para(&format!("Shown are {MOST_ROUTES} of {} kinds of ways.", known.len()));
    }
    for (route, gpu, names) in known.iter().take(MOST_ROUTES) {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        let who = format!("{}{more}", names[0]);
        let pci = gpu.to_string();
        let probed = findings.filter(|f| f.device(&pci).is_some());
        let p = probed.map_or_else(Parameters::default, |f| f.parameters(&pci, &Parameters::default()));
        let p = fitting(p, &route.link);
        let between: Vec<String> = route.hops.iter().map(Hop::to_string).collect();
        let caption = format!(
            "{}: PCIe {} x{}, MPS {}; between them: {}; window in {}; parameters: {}.",
            who,
            route.link.generation,
            route.link.lanes,
            route.link.mps,
            if between.is_empty() { "nothing".to_owned() } else { between.join(", ") },
            if route.window == Window::Nic { "the far end's memory" } else { "host memory" },
            if probed.is_some() { "this host's probe" } else { "defaults" }
        );
        match plots::by_size(&who, route, &p) {
            Ok(both) => both.into_iter().for_each(|plot| body.plot(plot, &caption)),
            Err(e) => body.missing(&format!("the model refuses the way of {who}: {e}")),
        }
    }

    body.heading("The model: latency by hops");
    let link = known[0].0.link;
    let p = fitting(Parameters::default(), &link);
    match hops::by_hops(&link, &p, Hop::Switch, HOPS) {
        Ok(rows) => body.plot(
            hops::plot(&rows, Hop::Switch),
            "Each switch more costs a posted write once and a read twice. Parameters: defaults.",
        ),
        Err(e) => body.missing(&format!("the model refuses this link: {e}")),
    }
}

fn doctor(body: &mut Body, facts: &Facts) {
    let report = &facts.doctor;
    if !report.looked_for.is_empty() {
        body.para(&report.looked_for);
    }
    body.para(&format!(
        "{} passed, {} warned, {} failed, {} not applicable.",
        report.passed, report.warned, report.failed, report.not_applicable
    ));
    let (idle, mut told): (Vec<&Finding>, Vec<&Finding>) =
        report.findings.iter().partition(|f| f.status == Status::NotApplicable);
    // The worst first, else in the order of the checks.
    told.sort_by_key(|f| std::cmp::Reverse(f.status));
    let rows: Vec<Vec<Cell>> = told
        .iter()
        .map(|f| {
            let class = match f.status {
                Status::Failed => "failed",
                Status::Warned => "warned",
                _ => "",
            };
            vec![
                f.check.into(),
                Cell::marked(f.status.word(), class),
                f.subject.clone().into(),
                f.reading.clone().into(),
                f.remedy.clone().unwrap_or_default().into(),
            ]
        })
        .collect();
    match rows.is_empty() {
        true => body.missing("no check had anything to look at."),
        false => {
            body.table("What the doctor found", &["check", "status", "subject", "reading", "remedy"], &rows)
        }
    }
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for f in idle {
        let why =
            if f.subject.is_empty() { f.reading.clone() } else { format!("{}: {}", f.subject, f.reading) };
        match reasons.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, checks)) => checks.push(f.check),
            None => reasons.push((why, vec![f.check])),
        }
    }
    if !reasons.is_empty() {
        body.heading("Checks that had nothing to look at");
        body.list(
            &reasons.iter().map(|(why, checks)| format!("{}: {why}", checks.join(", "))).collect::<Vec<_>>(),
        );
    }
}

fn versions(body: &mut Body, facts: &Facts) {
    let rows: Vec<Vec<Cell>> =
        facts.versions.iter().map(|(what, is)| vec![Cell::from(&**what), Cell::from(&**is)]).collect();
    body.table("Versions", &["what", "version"], &rows);
    if let Some(why) = &facts.wrong_setting {
        body.beware(&format!("the settings are refused: {why}. Those below are what is left of them."));
    }
    let defaults = pushgate::settings::PluginSettings::default().each();
    let rows: Vec<Vec<Cell>> = facts
        .settings
        .each()
        .into_iter()
        .zip(defaults)
        .map(|((key, value), (_, default))| {
            let changed = value != default;
            vec![
                key.flag().into(),
                if changed { Cell::marked(&value, "warned") } else { value.into() },
                if changed { "set".into() } else { "default".into() },
                key.help.trim().into(),
            ]
        })
        .collect();
    body.table(
        "Settings in force, by flags, variables and the file",
        &["setting", "value", "from", "what it is"],
        &rows,
    );
}
