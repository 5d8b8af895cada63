//! Compares the formulas with measured and published figures: the tables of docs/pcie-model.md.
//! Each row, fitted or predicted, is within 10 %, or is among those that the page discusses. For
//! these the ratio is checked too, so that the page stays true.

use pushgate_pcie_model::cost::{read_rate, read_time, round_trip};
use pushgate_pcie_model::transfers::{
    bulk_store, copy, cpu_store, fence, flag_round_trip, flag_round_trip_bar, gpu_flag, gpu_poll, sm_load,
    sm_store,
};
use pushgate_pcie_model::{Completions, Dllps, Hop, Link, Parameters, Route, Way, estimate};

/// One row of the page's tables.
struct Row {
    what: &'static str,
    source: &'static str,
    unit: &'static str,
    formula: f64,
    measured: f64,
    /// The parameters that were chosen to reproduce this row, among others.
    fits: &'static [&'static str],
}

fn row(what: &'static str, source: &'static str, unit: &'static str, formula: f64, measured: f64) -> Row {
    Row { what, source, unit, formula, measured, fits: &[] }
}

impl Row {
    fn fits(self, fits: &'static [&'static str]) -> Row {
        Row { fits, ..self }
    }

    fn off(&self) -> f64 {
        (self.formula / self.measured - 1.0).abs()
    }

    /// The row as the page has it.
    fn text(&self) -> String {
        let Row { what, source, unit, formula, measured, fits } = self;
        let ratio = formula / measured;
        let formula = if *formula >= 100.0 { format!("{formula:.0}") } else { format!("{formula:.2}") };
        let mut s = format!("| {what} | {source} | {formula} | {measured} {unit} | {ratio:.2} |");
        if !fits.is_empty() {
            s += &format!(" {} |", fits.iter().map(|f| format!("`{f}`")).collect::<Vec<_>>().join(", "));
        }
        s
    }
}

const OWN: &str = "H200";
const TWO: &str = "2 x H200";
const KERNEL_MODULES: &str = "open-gpu-kernel-modules";

fn gen5() -> Link {
    Link::default()
}

fn older(generation: u32, lanes: u32) -> Link {
    Link::new(generation, lanes).unwrap()
}

fn stores(link: &Link, p: &Parameters, threads: u32, bytes: u32) -> f64 {
    sm_store(link, p, threads, bytes).unwrap().gbs
}

fn loads(p: &Parameters, threads: u32) -> f64 {
    sm_load(&gen5(), p, threads, 16).unwrap().gbs
}

fn bulk(p: &Parameters, blocks: u32) -> f64 {
    bulk_store(&gen5(), p, blocks, 16 << 10).unwrap().gbs
}

/// The time of a read over these hops of Gen3 x8, with its time on the wire.
fn nfp(p: &Parameters, hops: &[Hop], bytes: u64) -> f64 {
    let route = Route { link: older(3, 8), hops: hops.to_vec(), ..Route::default() };
    read_time(&route, p, round_trip(hops, p), 0, bytes, f64::INFINITY)
}

fn pushes(p: &Parameters) -> f64 {
    estimate(Way::Push, &Route::default(), p, 1 << 30).unwrap().stream.gbs
}

/// The time of 64 KiB, a fence, and a flag there and back, with this many threads.
fn burst(p: &Parameters, threads: u32) -> f64 {
    (flag_round_trip(&[], p) + fence(&[], p) + 65536.0 / stores(&gen5(), p, threads, 16)) / 1e3
}

/// The rows that parameters were fitted to: that they are reproduced shows that the formula has the
/// right shape, nothing more.
fn fitted(p: &Parameters) -> Vec<Row> {
    let copied = |bytes| copy(p, bytes) / 1e3;
    let flags = &["sm_ns", "cpu_turn_ns", "gpu_turn_ns"];
    vec![
        row("NFP, Gen3 x8, DMA read of 64 B", "pcie-bench", "ns", nfp(p, &[], 64), 548.0).fits(&["rtt_ns"]),
        row(
            "EPYC Turin and PEX890xx, peer latency in a node",
            KERNEL_MODULES,
            "us",
            round_trip(&[Hop::Switch], p) / 1e3,
            0.72,
        )
        .fits(&["switch_ns"]),
        row(
            "the same, across nodes",
            KERNEL_MODULES,
            "us",
            round_trip(&[Hop::Switch, Hop::Socket], p) / 1e3,
            1.3,
        )
        .fits(&["socket_ns"]),
        row(
            "V100, Gen3 x16, CPU write-combined store of 64 B",
            "gdrcopy README",
            "ns",
            cpu_store(&older(3, 16), p, 64).unwrap(),
            89.0,
        )
        .fits(&["cpu_store_ns"]),
        row(
            "A40, flag to the CPU and back into the BAR",
            "gdrcopy pplat",
            "us",
            flag_round_trip_bar(&[], p) / 1e3,
            1.088,
        )
        .fits(flags),
        row("flag GPU, CPU, GPU", OWN, "us", flag_round_trip(&[], p) / 1e3, 2.23).fits(flags),
        row(
            "the same, after payload and a fence",
            OWN,
            "us",
            (flag_round_trip(&[], p) + fence(&[], p)) / 1e3,
            3.35,
        )
        .fits(flags),
        row("a system fence after stores", OWN, "us", fence(&[], p) / 1e3, 1.1).fits(&["sm_ns"]),
        row(
            "flag from GPU to GPU in host memory",
            TWO,
            "us",
            (gpu_flag(&[], p) + gpu_poll(&[], p)) / 1e3,
            1.64,
        )
        .fits(&["sm_ns"]),
        row(
            "the same, relayed by a CPU",
            TWO,
            "us",
            (gpu_flag(&[], p) + p.cpu_turn_ns + gpu_poll(&[], p)) / 1e3,
            1.86,
        )
        .fits(&["sm_ns", "cpu_turn_ns"]),
        row(
            "H100, Gen5 x16, SM stores to the host",
            "nvbandwidth #24",
            "GB/s",
            stores(&gen5(), p, 1 << 14, 16),
            52.77,
        )
        .fits(&["store_tlp"]),
        row("16 B stores, 8192 threads", OWN, "GB/s", stores(&gen5(), p, 8192, 16), 52.4)
            .fits(&["store_tlp"]),
        row("16 B stores, 256 threads", OWN, "GB/s", stores(&gen5(), p, 256, 16), 10.2)
            .fits(&["store_interval_ns"]),
        row("16 B stores, 1024 threads", OWN, "GB/s", stores(&gen5(), p, 1024, 16), 38.0)
            .fits(&["store_interval_ns"]),
        row("4 B stores, 4096 threads", OWN, "GB/s", stores(&gen5(), p, 4096, 4), 44.3)
            .fits(&["store_interval_ns"]),
        row("bulk stores of 16 KiB, 1 block", OWN, "GB/s", bulk(p, 1), 8.2).fits(&["bulk_interval_ns"]),
        row("16 B loads, 1024 threads", OWN, "GB/s", loads(p, 1024), 12.2).fits(&["load_interval_ns"]),
        row("16 B loads, 4096 threads", OWN, "GB/s", loads(p, 4096), 43.0).fits(&["load_interval_ns"]),
        row("copy engine, 4 KiB", OWN, "us", copied(4 << 10), 2.9).fits(&["copy_launch_ns"]),
        row("copy engine, 64 KiB", OWN, "us", copied(64 << 10), 4.1).fits(&["copy_launch_ns", "copy_gbs"]),
        row("copy engine, 512 KiB", OWN, "us", copied(512 << 10), 12.4).fits(&["copy_launch_ns", "copy_gbs"]),
        row("copy engine, 4 MiB", OWN, "us", copied(4 << 20), 78.6).fits(&["copy_gbs"]),
    ]
}

/// The rows that no parameter was fitted to, within 10 %.
fn predicted(p: &Parameters) -> Vec<Row> {
    let v100 = older(3, 16);
    let written = |bytes| cpu_store(&v100, p, bytes).unwrap();
    vec![
        row(
            "V100, Gen3 x16, CPU write-combined 64 B stores, many",
            "gdrcopy README",
            "GB/s",
            v100.write_rate(64).unwrap(),
            9.6,
        ),
        row(
            "V100, Gen3 x16, CPU write-combined store of 1 KiB",
            "gdrcopy README",
            "ns",
            written(1 << 10),
            180.0,
        ),
        row(
            "V100, Gen3 x16, CPU write-combined store of 4 KiB",
            "gdrcopy README",
            "ns",
            written(4 << 10),
            440.0,
        ),
        row(
            "A100, Gen4 x16, SM stores to the host",
            "nvbandwidth #53",
            "GB/s",
            stores(&older(4, 16), p, 1 << 14, 16),
            25.0,
        ),
        row(
            "A100, Gen4 x16, SM loads from the host",
            "nvbandwidth #53",
            "GB/s",
            older(4, 16).read_rate(),
            25.0,
        ),
        row("H100, Gen5 x16, copy engine", "nvbandwidth", "GB/s", gen5().ceiling(), 55.0),
        row(
            "PEX890xx, Gen5 x16, peers below one switch",
            KERNEL_MODULES,
            "GB/s",
            gen5().write_rate(256).unwrap(),
            53.5,
        ),
        row("NFP, Gen3 x8, DMA read of 8 B", "pcie-bench", "ns", nfp(p, &[], 8), 520.0),
        row("16 B stores, 2048 threads", OWN, "GB/s", stores(&gen5(), p, 2048, 16), 51.0),
        row("8 B stores, 4096 threads", OWN, "GB/s", stores(&gen5(), p, 4096, 8), 51.8),
        row("bulk stores of 16 KiB, 4 blocks", OWN, "GB/s", bulk(p, 4), 31.0),
        row("bulk stores of 16 KiB, 8 blocks", OWN, "GB/s", bulk(p, 8), 52.4),
        row("16 B loads, 16384 threads", OWN, "GB/s", loads(p, 16384), 51.3),
        row("copy engine, ceiling of the link", OWN, "GB/s", gen5().ceiling(), 55.4),
        row("stream of pushes through host memory, one GPU out, one in", TWO, "GB/s", pushes(p), 51.5),
    ]
}

/// Rows that are further off; the page says why.
fn further_off(p: &Parameters) -> Vec<Row> {
    let wire = gen5().write_rate(256).unwrap();
    vec![
        row("NFP, Gen3 x8, remote node", "pcie-bench", "ns", nfp(p, &[Hop::Socket], 64), 648.0),
        row("H100, Gen5 x16, SM loads from the host", "nvbandwidth #24", "GB/s", loads(p, 1 << 14), 35.2),
        row("V100, CPU reads of the BAR", "gdrcopy README", "GB/s", older(3, 16).read_rate(), 0.53),
        row("256 threads, 64 KiB in one burst", OWN, "us", burst(p, 256), 4.6),
        row("both directions busy, each", TWO, "GB/s", pushes(p), 40.4),
        row(
            "EPYC Turin and PEX890xx, peer latency in a node, as a read of GPU memory",
            KERNEL_MODULES,
            "us",
            (round_trip(&[Hop::Switch], p) + p.gpu_memory_ns) / 1e3,
            0.72,
        ),
        row("peers across two PEX890xx, write", KERNEL_MODULES, "GB/s", wire, 36.8),
        row(
            "peers across two PEX890xx, read",
            KERNEL_MODULES,
            "GB/s",
            read_rate(&Route::default(), p, 1300.0).gbs,
            40.1,
        ),
        row("two GPUs on one up-link to two root ports, writes", KERNEL_MODULES, "GB/s", wire, 2.7),
    ]
}

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/pcie-model.md");
    std::fs::read_to_string(path).expect("docs/pcie-model.md is readable")
}

/// The rows of the first table after a heading, without its two header lines.
fn table<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
    let at =
        page.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("docs/pcie-model.md has no {heading}"));
    let lines = page[at..].lines().skip_while(|l| !l.starts_with('|'));
    lines.take_while(|l| l.starts_with('|')).skip(2).collect()
}

#[test]
fn every_row_is_within_ten_percent_or_discussed() {
    let p = Parameters::default();
    let near = fitted(&p).into_iter().chain(predicted(&p)).filter(|r| r.off() > 0.1);
    let far = further_off(&p).into_iter().filter(|r| r.off() <= 0.1);
    let wrong: Vec<String> = near.chain(far).map(|r| r.text()).collect();
    assert!(wrong.is_empty(), "listed on the wrong side: {wrong:#?}");
}

/// The page has exactly these rows, with these figures.
#[test]
fn the_page_has_these_rows_and_no_others() {
    let (p, page) = (Parameters::default(), page());
    let texts = |rows: Vec<Row>| rows.iter().map(Row::text).collect::<Vec<_>>();
    for (heading, rows) in [
        ("### Fitted", texts(fitted(&p))),
        ("### Predicted", texts(predicted(&p))),
        ("### Rows that are further off", texts(further_off(&p))),
    ] {
        assert_eq!(table(&page, heading), rows, "{heading} should be:\n{}\n", rows.join("\n"));
    }
}

/// A row to which a parameter is said to be fitted depends on that parameter.
#[test]
fn what_is_fitted_moves_with_its_parameter() {
    let p = Parameters::default();
    for (i, row) in fitted(&p).into_iter().enumerate() {
        assert!(!row.fits.is_empty(), "{}: which parameter?", row.what);
        for name in row.fits {
            let mut all = toml::Table::try_from(&p).unwrap();
            let value = all.get_mut(*name).unwrap_or_else(|| panic!("{}: no parameter {name}", row.what));
            *value = match value {
                toml::Value::Integer(n) => toml::Value::Integer(*n / 2),
                toml::Value::Float(v) => toml::Value::Float(*v / 2.0),
                other => panic!("{name} is {other}"),
            };
            let moved = fitted(&all.try_into().unwrap()).swap_remove(i).formula;
            assert!((moved / row.formula - 1.0).abs() > 0.01, "{} does not feel {name}: {moved}", row.what);
        }
    }
}

/// What pcie-bench's formulas give in GB/s, worked out apart from this code, and the page's table
/// of it.
#[test]
fn ceilings_are_those_of_pcie_bench() {
    let page = page();
    let by_width = [
        (3, [2.0, 3.6, 5.7, 8.1, 10.3, 12.0, 13.0]),
        (4, [4.1, 7.1, 11.4, 16.2, 20.7, 23.9, 26.0]),
        (5, [8.1, 14.2, 22.7, 32.5, 41.3, 47.9, 52.0]),
    ];
    for (generation, all) in by_width {
        let link = older(generation, 16);
        let ours = [4, 8, 16, 32, 64, 128, 256].map(|tlp| link.write_rate(tlp).unwrap());
        for (ours, theirs) in ours.iter().zip(all) {
            assert!((ours - theirs).abs() < 0.06, "Gen{generation}: {ours} for {theirs}");
        }
        let line = format!("| Gen{generation} x16 |{}", ours.map(|v| format!(" {v:.1} |")).concat());
        assert!(page.contains(&line), "docs/pcie-model.md lacks:\n{line}");
    }
    let reads = |mps, mrrs, completions| Link { mps, mrrs, completions, ..gen5() }.read_rate();
    let writes = |mps| Link { mps, ..gen5() }.write_rate(mps).unwrap();
    for (ours, theirs) in [
        (writes(128), 47.0),
        (writes(512), 54.7),
        (reads(128, 512, Completions::Mps), 48.3),
        (reads(256, 512, Completions::Mps), 52.7),
        (reads(256, 512, Completions::Rcb), 43.3),
        (reads(512, 4096, Completions::Mps), 55.2),
    ] {
        assert!((ours - theirs).abs() < 0.06, "{ours} for {theirs}");
    }
}

/// Reads that tags limit: Little's law by hand in GB/s, beside the page's table, which adds a
/// request's time on the wire.
#[test]
fn reads_with_few_tags_follow_littles_law() {
    let page = page();
    for (rtt, by_hand) in [
        (550.0, [14.9, 29.8, 59.6, 238.0]),
        (720.0, [11.4, 22.8, 45.5, 182.0]),
        (1300.0, [6.3, 12.6, 25.2, 101.0]),
        (2000.0, [4.1, 8.2, 16.4, 65.5]),
    ] {
        let of = |tags, mrrs| {
            let route = Route { link: Link { tags, mrrs, ..gen5() }, ..Route::default() };
            read_rate(&route, &Parameters::default(), rtt).gbs
        };
        let ours = [of(32, 256), of(64, 256), of(64, 512), of(256, 512)];
        for (ours, by_hand) in ours.iter().zip(by_hand) {
            let bound = gen5().read_rate().min(by_hand);
            assert!((ours / bound - 1.0).abs() < 0.03, "RTT {rtt}: {ours} for {bound}");
        }
        let line = format!("| {rtt:.0} |{}", ours.map(|v| format!(" {v:.1} |")).concat());
        assert!(page.contains(&line), "docs/pcie-model.md lacks:\n{line}");
    }
}

/// Another reading of the same tables: narrower TLPs and cheaper DLLPs also give what H200s reach.
#[test]
fn both_ways_of_counting_dllps_fit_stores() {
    let symbols = Link { dllps: Dllps::SymbolTimes, ..Link::default() };
    for rate in [symbols.write_rate(128).unwrap(), Link::default().write_rate(256).unwrap()] {
        assert!((rate / 52.6 - 1.0).abs() < 0.02, "{rate}");
    }
}

/// The table of the page: the completions that answer 512 bytes at offsets into a line, by MPS and
/// RCB.
#[test]
fn the_page_has_the_table_of_unaligned_reads() {
    let page = page();
    let links = [(256, 64), (256, 128), (128, 64)].map(|(mps, rcb)| Link { mps, rcb, ..Link::default() });
    for offset in [0u64, 4, 32, 60, 64, 68] {
        let cells = links.map(|link| {
            let r = link.read_wire(offset, 512);
            format!(" {} ({:.2}) |", r.completions, 512.0 / r.wire as f64 * 100.0)
        });
        let row = format!("| {offset} |{}", cells.concat());
        assert!(page.contains(&row), "docs/pcie-model.md lacks:\n{row}");
    }
}
