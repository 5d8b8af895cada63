//! What a probe measured, as tables, beside the model and the links' ceilings.

use pushgate_pcie_model::choose::{Between, choose};
use pushgate_pcie_model::findings::{Device, Findings, Line, Rate, Transfer, Writers, collapses};
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

fn percent(part: f64, whole: f64) -> Cell {
    Cell::number(format!("{:.0} %", part / whole * 100.0))
}

/// Whatever its magnitude, three digits that count.
fn figure(v: f64) -> String {
    match v {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v => format!("{v:.4}"),
    }
}

fn number(v: f64) -> Cell {
    Cell::number(figure(v))
}

/// What fits onto that link.
pub fn fitting(p: Parameters, link: &Link) -> Parameters {
    Parameters { store_tlp: p.store_tlp.min(link.mps), ..p }
}

/// All of one device.
pub fn device(body: &mut Body, f: &Findings, d: &Device, link: Option<&Link>) {
    match link {
        Some(l) => body.para(&format!(
            "Its way to the host: PCIe {} x{}, MPS {}. Payload at most {:.1} GB/s written, {:.1} GB/s read.",
            l.generation,
            l.lanes,
            l.mps,
            l.ceiling(),
            l.read_rate()
        )),
        None if f.executor == "cpu" => {}
        None => body.missing(
            "the ceiling of its link: this tree does not tell the link of that address. On a virtual machine say how \
             the machine is built with --topology FILE (pushgate topo --from-nccl makes one).",
        ),
    }
    rates(body, d, link);
    lines(body, d, link);
    latencies(body, d, link.is_some());
    if link.is_some() {
        parameters(body, f, d);
    }
    writers(body, "Streams of this device storing to host memory at once", &d.writers);
}

fn rates(body: &mut Body, d: &Device, link: Option<&Link>) {
    let row = |what: String, r: &Rate, model: Option<pushgate_pcie_model::Rate>, ceiling: Option<f64>| {
        let mut row = vec![Cell::from(what), Cell::number(r.blocks.to_string()), number(r.rate)];
        if let (Some(model), Some(ceiling)) = (model, ceiling) {
            row.extend([
                number(model.gbs),
                model.limit.to_string().into(),
                number(ceiling),
                percent(r.rate, ceiling),
            ]);
        }
        row
    };
    let p = link.map(|l| fitting(Parameters::default(), l));
    let both = link.zip(p.as_ref());
    let mut rows = Vec::new();
    for r in &d.stores {
        let threads = THREADS.saturating_mul(r.blocks);
        let bulk = r.width == 0;
        let model = both.and_then(|(l, p)| {
            if bulk {
                bulk_store(l, p, BULKS.saturating_mul(r.blocks), BULK)
            } else {
                sm_store(l, p, threads, r.width)
            }
            .ok()
        });
        let what = if bulk { "bulk stores".to_owned() } else { format!("stores of {} B", r.width) };
        let ceiling = both.and_then(|(l, p)| l.write_rate(if bulk { l.mps } else { p.store_tlp }).ok());
        rows.push(row(what, r, model, ceiling));
    }
    for r in &d.loads {
        let in_flight = LOADS.saturating_mul(r.width);
        let model = both.and_then(|(l, p)| sm_load(l, p, THREADS.saturating_mul(r.blocks), in_flight).ok());
        rows.push(row(format!("loads of {} B", r.width), r, model, link.map(Link::read_rate)));
    }
    let mut head = vec!["a kernel's", "blocks", "measured GB/s"];
    if link.is_some() {
        head.extend(["model GB/s", "bound by", "ceiling GB/s", "of the ceiling"]);
    }
    body.table("Rates over host memory; the model with its defaults, before any probe", &head, &rows);
}

/// What no transfer of that kind exceeds, GB/s.
fn line_ceiling(way: Transfer, link: &Link) -> Option<f64> {
    match way {
        Transfer::Push | Transfer::CopyOut => Some(link.ceiling()),
        Transfer::Read | Transfer::CopyIn => Some(link.read_rate()),
        _ => None,
    }
}

fn lines(body: &mut Body, d: &Device, link: Option<&Link>) {
    let mut head = vec!["way", "fixed us", "GB/s", "worst error of the curve"];
    if link.is_some() {
        head.extend(["ceiling GB/s", "of the ceiling"]);
    }
    let rows: Vec<Vec<Cell>> = d
        .lines
        .iter()
        .map(|l| {
            let mut row = vec![
                l.way.to_string().into(),
                number(l.curve.fixed),
                number(l.curve.rate),
                percent(l.worst, 1.0),
            ];
            row.extend(
                link.and_then(|link| line_ceiling(l.way, link))
                    .into_iter()
                    .flat_map(|c| [number(c), percent(l.curve.rate, c)]),
            );
            row
        })
        .collect();
    body.table(
        "Curves fitted to single transfers: time = fixed + bytes / rate, for large ones",
        &head,
        &rows,
    );
    by_size(body, "Single transfers by size: measured and by the curve", &d.lines);
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

fn latencies(body: &mut Body, d: &Device, model: bool) {
    let p = Parameters::default();
    let mut rows = vec![
        vec!["flag of 8 B, kernel to CPU, one way".into(), number(d.flag)],
        vec!["record of 64 B, the same".into(), number(d.record)],
        vec!["an empty kernel, from the call to its end".into(), number(d.launch)],
    ];
    let mut head = vec!["latency", "measured us"];
    if model {
        head.push("model us");
        rows[0].push(number(flag_round_trip(&[], &p) / 2e3));
    }
    body.table("Latencies", &head, &rows);
}

/// What the probe changes of the model.
fn parameters(body: &mut Body, f: &Findings, d: &Device) {
    let default = Parameters::default();
    let probed = f.parameters(&d.pci, &default);
    let row = |name: &str, of: fn(&Parameters) -> f64| {
        vec![Cell::from(name), number(of(&default)), number(of(&probed))]
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
    body.table("Parameters of the model", &["parameter", "default", "by this probe"], &rows);
}

fn writers(body: &mut Body, caption: &str, all: &[Writers]) {
    if all.is_empty() {
        return;
    }
    let rows: Vec<Vec<Cell>> =
        all.iter().map(|w| vec![Cell::number(w.n.to_string()), number(w.rate)]).collect();
    body.table(caption, &["writers", "all together, GB/s"], &rows);
    if let Some(w) = collapses(all) {
        body.beware(&format!(
            "{} writers at once reach {:.1} GB/s together, less than half of what fewer reach: posted writes are in \
             each other's way here, and paths that push are not chosen.",
            w.n, w.rate
        ));
    }
}

/// Sizes for which the choice is shown.
const CHOSEN: [u64; 3] = [4 << 10, 512 << 10, 16 << 20];

/// Everything between devices.
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
            let taken = |n: u64| choose(Some(f), &Parameters::default(), between, &can, n).reason;
            std::iter::once(Cell::from(format!("{} to {}", label(&p.from), label(&p.to))))
                .chain(CHOSEN.map(|n| Cell::from(taken(n))))
                .collect()
        })
        .collect();
    body.table("Between devices: the way that the choice takes, out of those measured", &head, &rows);
    writers(body, "Devices storing to host memory at once", &f.writers);
}
