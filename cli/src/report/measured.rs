//! What a probe measured, as tables, beside the model and the links' ceilings.

use pushgate_pcie_model::choose::{Between, choose};
use pushgate_pcie_model::findings::{Both, Device, Findings, Line, Rate, Transfer, Writers, collapses};
use pushgate_pcie_model::plot::bytes as size;
use pushgate_pcie_model::transfers::{bulk_store, flag_round_trip, sm_load, sm_store};
use pushgate_pcie_model::{Link, Parameters, Way};

use super::html::{Body, Cell};

/// Threads of a block of the probe's kernels on a GPU, bytes of a bulk store, and how many a block has under way
/// (docs/probe.md).
const THREADS: u32 = 512;
const BULK: u32 = 16 << 10;
const BULKS: u32 = 2;
/// Of a table, and of a matrix.
const MOST_SIZES: usize = 64;
const MOST_ENDS: usize = 23;
/// Accesses of a thread that loads, in flight.
const LOADS: u32 = 8;

/// Whatever its magnitude, three digits that count.
fn figure(v: f64) -> String {
    match v {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v if v <= 0.0 => "0".into(),
        v => format!("{v:.4}"),
    }
}

fn number(v: f64) -> Cell {
    Cell::number(figure(v))
}

/// A device's parameters as they fit onto a link.
pub fn fitting(p: Parameters, link: &Link) -> Parameters {
    Parameters { store_tlp: p.store_tlp.min(link.mps), ..p }
}

/// A device with the label that the tree gives it, and its link to the host, if that is told.
pub struct Unit<'a> {
    pub label: String,
    pub device: &'a Device,
    pub link: Option<Link>,
}

/// All that was measured of devices, each by itself. The model's column is of the first link that is told.
pub fn devices(body: &mut Body, f: &Findings, units: &[Unit]) {
    let rows: Vec<Vec<Cell>> = units
        .iter()
        .map(|u| {
            let mut row: Vec<Cell> =
                vec![u.label.clone().into(), u.device.name.clone().into(), u.device.pci.clone().into()];
            match &u.link {
                Some(l) => row.extend([
                    format!("PCIe {} x{}, MPS {}", l.generation, l.lanes, l.mps).into(),
                    number(l.ceiling()),
                    number(l.read_ceiling()),
                ]),
                None => row.push("not told".into()),
            }
            row
        })
        .collect();
    let head =
        ["device", "name", "address", "link to the host", "ceiling written, GB/s", "ceiling read, GB/s"];
    body.table("Devices", &head, &rows);
    if f.executor != "cpu" && units.iter().any(|u| u.link.is_none()) {
        body.missing(
            "the ceiling of a link: this tree does not tell the link of that address. On a virtual machine say how the \
             machine is built with --topology FILE (pushgate topo --from-nccl makes one).",
        );
    }
    let link = units.iter().find_map(|u| u.link);
    rates(body, units, link.as_ref());
    curves(body, units);
    latencies(body, units, link.is_some());
    if link.is_some() {
        parameters(body, f, units);
    }
    let all: Vec<(&str, &[Writers])> = units.iter().map(|u| (&*u.label, &*u.device.writers)).collect();
    writers(body, "Streams of one device storing to host memory at once, all together, GB/s", &all);
}

/// A row of figures of each device behind what they are.
fn head<'a>(first: &[&'a str], units: &'a [Unit]) -> Vec<&'a str> {
    first.iter().copied().chain(units.iter().map(|u| &*u.label)).collect()
}

/// With its part of what there could be.
fn of_ceiling(rate: f64, ceiling: Option<f64>) -> Cell {
    Cell::number(ceiling.map_or(figure(rate), |c| format!("{} ({:.0} %)", figure(rate), rate / c * 100.0)))
}

/// What the model has for such an access, and what no link exceeds.
fn expected(stores: bool, r: &Rate, link: &Link) -> Option<(pushgate_pcie_model::Rate, f64)> {
    let p = fitting(Parameters::default(), link);
    let threads = THREADS.saturating_mul(r.blocks);
    let model = match (stores, r.width) {
        (true, 0) => bulk_store(link, &p, BULKS.saturating_mul(r.blocks), BULK),
        (true, width) => sm_store(link, &p, threads, width),
        (false, width) => sm_load(link, &p, threads, LOADS.saturating_mul(width)),
    };
    Some((model.ok()?, if stores { link.ceiling() } else { link.read_ceiling() }))
}

fn rates(body: &mut Body, units: &[Unit], link: Option<&Link>) {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    let Some(first) = units.first() else { return };
    let kinds =
        first.device.stores.iter().map(|r| (true, r)).chain(first.device.loads.iter().map(|r| (false, r)));
    for (stores, kind) in kinds {
        let what = match (stores, kind.width) {
            (true, 0) => "bulk stores".to_owned(),
            (true, width) => format!("stores of {width} B"),
            (false, width) => format!("loads of {width} B"),
        };
        let mut row = vec![Cell::from(what), Cell::number(kind.blocks.to_string())];
        if let Some(link) = link {
            match expected(stores, kind, link) {
                Some((model, _)) => row.extend([number(model.gbs), model.limit.to_string().into()]),
                None => row.extend(["".into(), "".into()]),
            }
        }
        row.extend(units.iter().map(|u| {
            let all = if stores { &u.device.stores } else { &u.device.loads };
            let same = all.iter().find(|r| (r.width, r.blocks) == (kind.width, kind.blocks));
            let ceiling = u.link.as_ref().and_then(|l| Some(expected(stores, kind, l)?.1));
            same.map_or("-".into(), |r| of_ceiling(r.rate, ceiling))
        }));
        rows.push(row);
    }
    let first: &[&str] = match link {
        Some(_) => &["a kernel's", "blocks", "model", "bound by"],
        None => &["a kernel's", "blocks"],
    };
    let caption = "Rates over host memory, GB/s, and what of the ceiling they are. The model has its defaults: what was expected \
                   before any probe";
    body.table(caption, &head(first, units), &rows);
}

/// What no transfer of that kind exceeds, GB/s.
fn line_ceiling(way: Transfer, link: &Link) -> Option<f64> {
    match way {
        Transfer::Push | Transfer::CopyOut => Some(link.ceiling()),
        Transfer::Read | Transfer::CopyIn => Some(link.read_ceiling()),
        _ => None,
    }
}

fn curves(body: &mut Body, units: &[Unit]) {
    let Some(first) = units.first() else { return };
    let line = |u: &Unit, way| -> Option<Line> { u.device.lines.iter().find(|l| l.way == way).cloned() };
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for way in first.device.lines.iter().map(|l| l.way) {
        let row = |what: &str, of: &dyn Fn(&Unit, &Line) -> Cell| {
            let cells = units.iter().map(|u| line(u, way).map_or("-".into(), |l| of(u, &l)));
            std::iter::once(Cell::from(format!("{way}: {what}"))).chain(cells).collect::<Vec<_>>()
        };
        rows.push(row("fixed, us", &|_, l| number(l.curve.fixed)));
        rows.push(row("GB/s", &|u, l| {
            of_ceiling(l.curve.rate, u.link.as_ref().and_then(|k| line_ceiling(way, k)))
        }));
        rows.push(row("largest error", &|_, l| Cell::number(format!("{:.0} %", l.worst * 100.0))));
    }
    let caption = "Curves fitted to single transfers: of large ones the time is fixed + bytes / rate";
    body.table(caption, &head(&["way"], units), &rows);
}

/// Times by size of several ways, side by side.
pub fn by_size(body: &mut Body, caption: &str, lines: &[Line]) {
    let heads: Vec<[String; 3]> =
        lines.iter().map(|l| [format!("{} us", l.way), "curve us".into(), "GB/s".into()]).collect();
    let mut head = vec!["size"];
    head.extend(heads.iter().flatten().map(String::as_str));
    let mut sizes: Vec<u64> = lines.iter().flat_map(|l| &l.points).map(|p| p.0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    // A probe takes a dozen.
    sizes.truncate(MOST_SIZES);
    let rows: Vec<Vec<Cell>> = sizes
        .iter()
        .map(|n| {
            let cells = lines.iter().flat_map(|l| match l.points.iter().find(|p| p.0 == *n) {
                Some((_, us)) => [number(*us), number(l.curve.time(*n)), number(*n as f64 / us / 1e3)],
                None => Default::default(),
            });
            std::iter::once(Cell::number(size(*n as f64))).chain(cells).collect()
        })
        .collect();
    body.table(caption, &head, &rows);
}

fn latencies(body: &mut Body, units: &[Unit], model: bool) {
    let flag = flag_round_trip(&[], &Parameters::default()) / 2e3;
    let row = |what: &str, expected: Option<f64>, of: fn(&Device) -> f64| {
        let expected = model.then(|| expected.map_or("".into(), number));
        let cells = units.iter().map(|u| number(of(u.device)));
        std::iter::once(Cell::from(what)).chain(expected).chain(cells).collect::<Vec<_>>()
    };
    let rows = [
        row("flag of 8 B, kernel to CPU, one way", Some(flag), |d| d.flag),
        row("record of 64 B, the same", None, |d| d.record),
        row("an empty kernel, from the call to its end", None, |d| d.launch),
    ];
    let first: &[&str] = if model { &["latency", "model"] } else { &["latency"] };
    body.table("Latencies, us", &head(first, units), &rows);
}

/// What the probe changes of the model.
fn parameters(body: &mut Body, f: &Findings, units: &[Unit]) {
    let default = Parameters::default();
    let probed: Vec<Parameters> = units.iter().map(|u| f.parameters(&u.device.pci, &default)).collect();
    let row = |name: &str, of: fn(&Parameters) -> f64| {
        std::iter::once(Cell::from(name))
            .chain(std::iter::once(&default).chain(&probed).map(|p| number(of(p))))
            .collect::<Vec<_>>()
    };
    let rows = [
        row("copy engine: launch, ns", |p| p.copy_launch_ns),
        row("copy engine: GB/s", |p| p.copy_gbs),
        row("between two stores of a thread, ns", |p| p.store_interval_ns),
        row("between two rounds of loads of a thread, ns", |p| p.load_interval_ns),
        row("between an SM and the GPU's port, there and back, ns", |p| p.sm_ns),
        row("the CPU's turn at a flag, ns", |p| p.cpu_turn_ns),
        row("the GPU's turn, ns", |p| p.gpu_turn_ns),
    ];
    body.table("Parameters of the model, by this probe", &head(&["parameter", "default"], units), &rows);
}

/// A column for each, a row for each number of writers; and a word where they collapse.
fn writers(body: &mut Body, caption: &str, all: &[(&str, &[Writers])]) {
    let mut counts: Vec<u32> = all.iter().flat_map(|(_, w)| *w).map(|w| w.n).collect();
    counts.sort_unstable();
    counts.dedup();
    if counts.is_empty() {
        return;
    }
    let row = |n: &u32| {
        let cells =
            all.iter().map(|(_, w)| w.iter().find(|w| w.n == *n).map_or("-".into(), |w| number(w.rate)));
        std::iter::once(Cell::number(n.to_string())).chain(cells).collect()
    };
    // A probe takes three or four.
    let rows: Vec<Vec<Cell>> = counts.iter().take(MOST_SIZES).map(row).collect();
    let head: Vec<&str> = std::iter::once("writers").chain(all.iter().map(|(label, _)| *label)).collect();
    body.table(caption, &head, &rows);
    for (label, w) in all {
        if let Some(w) = collapses(w) {
            body.beware(&format!(
                "{label}: {} writers at once reach {:.1} GB/s together, less than half of what fewer reach: posted \
                 writes are in each other's way here.",
                w.n, w.rate
            ));
        }
    }
}

/// A column for each number of devices, a row for each number of bytes under way.
fn both(body: &mut Body, all: &[Both]) {
    if all.is_empty() {
        return;
    }
    let mut counts: Vec<u32> = all.iter().map(|b| b.devices).collect();
    let mut totals: Vec<u64> = all.iter().map(|b| b.bytes).collect();
    counts.sort_unstable();
    counts.dedup();
    totals.sort_unstable();
    totals.dedup();
    // A probe takes three at most, and six numbers of bytes.
    counts.truncate(MOST_ENDS);
    let row = |bytes: &u64| {
        let of = |n: &u32| all.iter().find(|b| b.devices == *n && b.bytes == *bytes);
        let cells = counts.iter().map(|n| of(n).map_or("-".into(), |b| number(b.rate)));
        std::iter::once(Cell::from(size(*bytes as f64))).chain(cells).collect()
    };
    let rows: Vec<Vec<Cell>> = totals.iter().take(MOST_SIZES).map(row).collect();
    let mut head = vec!["under way in all".to_owned()];
    head.extend(counts.iter().map(|n| format!("{n} device{}", if *n == 1 { "" } else { "s" })));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    body.table(
        "Devices storing to and loading from host memory at once, GB/s of each device, each way",
        &head,
        &rows,
    );
}

/// Sizes for which the choice is shown.
const CHOSEN: [u64; 3] = [4 << 10, 512 << 10, 16 << 20];

/// Writes what was measured between devices.
pub fn pairs(body: &mut Body, f: &Findings, label: &dyn Fn(&str) -> String) {
    let quickest = |from: &str, to: &str| {
        let pair = f.pairs.iter().find(|p| p.from == from && p.to == to)?;
        let rate = |l: &Line| l.points.last().map(|(n, us)| (*n, *n as f64 / us / 1e3, l.way));
        pair.lines.iter().filter_map(rate).max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let record = |from: &str, to: &str| Some(f.pairs.iter().find(|p| p.from == from && p.to == to)?.record);
    let mut ends: Vec<&str> = f.pairs.iter().flat_map(|p| [&*p.from, &*p.to]).collect();
    ends.sort_unstable();
    ends.dedup();
    if ends.len() > MOST_ENDS {
        body.para(&format!("The matrices show {MOST_ENDS} of {} devices.", ends.len()));
        ends.truncate(MOST_ENDS);
    }
    let labels: Vec<String> = ends.iter().map(|e| label(e)).collect();
    let mut head = vec!["from / to"];
    head.extend(labels.iter().map(String::as_str));
    let matrix = |cell: &dyn Fn(&str, &str) -> Cell| -> Vec<Vec<Cell>> {
        let row = |(from, label): (&&str, &String)| {
            std::iter::once(Cell::from(&**label)).chain(ends.iter().map(|to| cell(from, to))).collect()
        };
        ends.iter().zip(&labels).map(row).collect()
    };
    let all = || ends.iter().flat_map(|a| ends.iter().map(move |b| (*a, *b)));
    let most = all().filter_map(|(a, b)| Some(quickest(a, b)?.1)).fold(0.0, f64::max);
    let largest = all().filter_map(|(a, b)| Some(quickest(a, b)?.0)).max().unwrap_or(0);
    let rows = matrix(&|a, b| match quickest(a, b) {
        Some((_, gbs, way)) => Cell::shaded(format!("{} {way}", figure(gbs)), gbs / most),
        None => "-".into(),
    });
    body.table(
        &format!(
            "GPU x GPU: GB/s of the quickest way for a message of {}; the darker, the faster",
            size(largest as f64)
        ),
        &head,
        &rows,
    );
    let least = all().filter_map(|(a, b)| record(a, b)).fold(f64::INFINITY, f64::min);
    let rows = matrix(&|a, b| match record(a, b) {
        Some(us) => Cell::shaded(figure(us), least / us),
        None => "-".into(),
    });
    body.table("GPU x GPU: microseconds of a 64-byte record, one way; the darker, the faster", &head, &rows);

    let mut head = vec!["pair".to_owned()];
    head.extend(CHOSEN.iter().map(|n| format!("taken for {}", size(*n as f64))));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let rows: Vec<Vec<Cell>> = f
        .pairs
        .iter()
        .take(256)
        .map(|p| {
            let can: Vec<Way> = Way::ALL
                .into_iter()
                .filter(|w| p.lines.iter().any(|l| l.way == Transfer::from(*w)))
                .collect();
            let between = Between::Devices { from: &p.from, to: &p.to };
            let taken = |n: u64| {
                let choice = choose(Some(f), &Parameters::default(), between, &can, n);
                choice.us.map_or(choice.reason, |us| format!("{}, {} us", choice.way, figure(us)))
            };
            std::iter::once(Cell::from(format!("{} to {}", label(&p.from), label(&p.to))))
                .chain(CHOSEN.map(|n| Cell::from(taken(n))))
                .collect()
        })
        .collect();
    body.table("Between devices: the way that the choice takes, out of those measured", &head, &rows);
    writers(
        body,
        "Devices storing to host memory at once, all together, GB/s",
        &[("all devices", &f.writers)],
    );
    both(body, &f.both);
}
