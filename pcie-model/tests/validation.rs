//! What the formulas say beside what was measured and published: the rows of docs/pcie-model.md. Each is within 10 %, or
//! stands among those that the page discusses; there, too, the ratio is held, so that the page stays true.

use pushgate_pcie_model::cost::{read_rate, round_trip};
use pushgate_pcie_model::transfers::{
    bulk_store, copy, cpu_store, fence, flag_round_trip, flag_round_trip_bar, gpu_flag, gpu_poll, sm_load,
    sm_store,
};
use pushgate_pcie_model::{Dllps, Hop, Link, Parameters, Route, Way, estimate};

/// What, source, unit, formula, measured.
type Row = (&'static str, &'static str, &'static str, f64, f64);

fn gbs(link: &Link, threads: u32, bytes: u32) -> f64 {
    sm_store(link, &Parameters::default(), threads, bytes).unwrap().gbs
}

fn rows() -> Vec<Row> {
    let p = Parameters::default();
    let gen5 = Link::default();
    let (gen3, gen4) = (Link::new(3, 16).unwrap(), Link::new(4, 16).unwrap());
    let own = "this project, H200";
    let load = |threads| sm_load(&gen5, &p, threads, 16).unwrap().gbs;
    let bulk = |blocks| bulk_store(&gen5, &p, blocks, 16 << 10).unwrap().gbs;
    let copied = |bytes| copy(&p, bytes) / 1e3;
    let written = |bytes| cpu_store(&gen3, &p, bytes).unwrap();
    let direct = Route::default();
    let big = |way| estimate(way, &direct, &p, 1 << 30).unwrap().stream.gbs;
    vec![
        (
            "V100, Gen3 x16, CPU write-combined 64 B stores",
            "gdrcopy README",
            "GB/s",
            gen3.write_rate(64).unwrap(),
            9.6,
        ),
        ("the same, 64 B", "gdrcopy README", "ns", written(64), 89.0),
        ("the same, 1 KiB", "gdrcopy README", "ns", written(1 << 10), 180.0),
        ("the same, 4 KiB", "gdrcopy README", "ns", written(4 << 10), 440.0),
        (
            "A40, flag to the CPU and back into the BAR",
            "gdrcopy pplat",
            "us",
            flag_round_trip_bar(&[], &p) / 1e3,
            1.088,
        ),
        ("A100, Gen4 x16, SM stores to the host", "nvbandwidth #53", "GB/s", gbs(&gen4, 1 << 14, 16), 25.0),
        ("H100, Gen5 x16, SM stores to the host", "nvbandwidth #24", "GB/s", gbs(&gen5, 1 << 14, 16), 52.77),
        ("H100, Gen5 x16, copy engine", "nvbandwidth", "GB/s", gen5.ceiling(), 55.0),
        (
            "PEX890xx, Gen5 x16, peers below one switch",
            "open-gpu-kernel-modules",
            "GB/s",
            gen5.write_rate(256).unwrap(),
            53.5,
        ),
        (
            "EPYC Turin and PEX890xx, peer latency in a node",
            "open-gpu-kernel-modules",
            "us",
            round_trip(&[Hop::Switch], &p) / 1e3,
            0.72,
        ),
        (
            "the same, across nodes",
            "open-gpu-kernel-modules",
            "us",
            round_trip(&[Hop::Switch, Hop::Socket], &p) / 1e3,
            1.3,
        ),
        ("NFP, Gen3 x8, DMA read of 64 B", "pcie-bench", "ns", round_trip(&[], &p), 548.0),
        ("NFP, Gen3 x8, remote node", "pcie-bench", "ns", round_trip(&[Hop::Socket], &p), 648.0),
        ("16 B stores, 256 threads", own, "GB/s", gbs(&gen5, 256, 16), 10.2),
        ("16 B stores, 1024 threads", own, "GB/s", gbs(&gen5, 1024, 16), 38.0),
        ("16 B stores, 2048 threads", own, "GB/s", gbs(&gen5, 2048, 16), 51.0),
        ("16 B stores, 8192 threads", own, "GB/s", gbs(&gen5, 8192, 16), 52.4),
        ("8 B stores, 4096 threads", own, "GB/s", gbs(&gen5, 4096, 8), 51.8),
        ("4 B stores, 4096 threads", own, "GB/s", gbs(&gen5, 4096, 4), 44.3),
        ("bulk stores of 16 KiB, 1 block", own, "GB/s", bulk(1), 8.2),
        ("bulk stores of 16 KiB, 4 blocks", own, "GB/s", bulk(4), 31.0),
        ("bulk stores of 16 KiB, 8 blocks", own, "GB/s", bulk(8), 52.4),
        ("16 B loads, 1024 threads", own, "GB/s", load(1024), 12.2),
        ("16 B loads, 4096 threads", own, "GB/s", load(4096), 43.0),
        ("16 B loads, 16384 threads", own, "GB/s", load(16384), 51.3),
        ("copy engine, ceiling of the link", own, "GB/s", gen5.ceiling(), 55.4),
        ("copy engine, 4 KiB", own, "us", copied(4 << 10), 2.9),
        ("copy engine, 64 KiB", own, "us", copied(64 << 10), 4.1),
        ("copy engine, 512 KiB", own, "us", copied(512 << 10), 12.4),
        ("copy engine, 4 MiB", own, "us", copied(4 << 20), 78.6),
        ("flag GPU, CPU, GPU", own, "us", flag_round_trip(&[], &p) / 1e3, 2.23),
        (
            "the same, behind payload and a fence",
            own,
            "us",
            (flag_round_trip(&[], &p) + fence(&[], &p)) / 1e3,
            3.35,
        ),
        ("a system fence behind stores", own, "us", fence(&[], &p) / 1e3, 1.1),
        (
            "flag from GPU to GPU in host memory",
            "this project, 2 x H200",
            "us",
            (gpu_flag(&[], &p) + gpu_poll(&[], &p)) / 1e3,
            1.64,
        ),
        (
            "the same, relayed by a CPU",
            "this project, 2 x H200",
            "us",
            (gpu_flag(&[], &p) + p.cpu_turn_ns + gpu_poll(&[], &p)) / 1e3,
            1.86,
        ),
        (
            "64 KiB of payload, fence, flag there and back",
            own,
            "us",
            (flag_round_trip(&[], &p) + fence(&[], &p) + 65536.0 / gbs(&gen5, 8192, 16)) / 1e3,
            4.6,
        ),
        (
            "stream of pushes through host memory, one GPU out, one in",
            "this project, 2 x H200",
            "GB/s",
            big(Way::Push),
            51.5,
        ),
        // Discussed.
        ("H100, Gen5 x16, SM loads from the host", "nvbandwidth #24", "GB/s", load(1 << 14), 35.2),
        ("V100, CPU reads of the BAR", "gdrcopy README", "GB/s", gen3.read_rate(), 0.53),
        (
            "256 threads, 64 KiB in one burst",
            own,
            "us",
            (flag_round_trip(&[], &p) + fence(&[], &p) + 65536.0 / gbs(&gen5, 256, 16)) / 1e3,
            4.6,
        ),
        ("both directions busy, each", "this project, 2 x H200", "GB/s", big(Way::Push), 40.4),
        (
            "peers across two PEX890xx, write",
            "open-gpu-kernel-modules",
            "GB/s",
            gen5.write_rate(256).unwrap(),
            36.8,
        ),
        (
            "peers across two PEX890xx, read",
            "open-gpu-kernel-modules",
            "GB/s",
            read_rate(&direct, &p, 1300.0).gbs,
            40.1,
        ),
        (
            "two GPUs on one up-link to two root ports, writes",
            "open-gpu-kernel-modules",
            "GB/s",
            gen5.write_rate(256).unwrap(),
            2.7,
        ),
    ]
}

/// Rows that are further off; the page says why.
const DISCUSSED: [&str; 8] = [
    "NFP, Gen3 x8, remote node",
    "H100, Gen5 x16, SM loads from the host",
    "V100, CPU reads of the BAR",
    "256 threads, 64 KiB in one burst",
    "both directions busy, each",
    "peers across two PEX890xx, write",
    "peers across two PEX890xx, read",
    "two GPUs on one up-link to two root ports, writes",
];

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/pcie-model.md");
    std::fs::read_to_string(path).expect("docs/pcie-model.md is readable")
}

#[test]
fn every_row_is_within_ten_percent_or_discussed() {
    let mut wrong = Vec::new();
    for (what, _, unit, formula, measured) in rows() {
        let off = (formula / measured - 1.0).abs();
        if DISCUSSED.contains(&what) == (off <= 0.1) {
            wrong.push(format!("{what}: {formula:.3} for {measured} {unit}, {:.1} % off", off * 100.0));
        }
    }
    assert!(wrong.is_empty(), "listed on the wrong side: {wrong:#?}");
}

#[test]
fn the_page_has_every_row() {
    let page = page();
    let digits = |v: f64| if v >= 100.0 { format!("{v:.0}") } else { format!("{v:.2}") };
    let missing: Vec<String> = rows()
        .into_iter()
        .map(|(what, source, unit, formula, measured)| {
            let (ratio, formula) = (formula / measured, digits(formula));
            format!("| {what} | {source} | {formula} | {measured} {unit} | {ratio:.2} |")
        })
        .filter(|row| !page.contains(row))
        .collect();
    assert!(missing.is_empty(), "docs/pcie-model.md lacks:\n{}", missing.join("\n"));
}

/// Other reading of the same tables: narrower TLPs and cheaper DLLPs give what H200s reach as well.
#[test]
fn both_ways_of_counting_dllps_fit_stores() {
    let symbols = Link { dllps: Dllps::SymbolTimes, ..Link::default() };
    for rate in [symbols.write_rate(128).unwrap(), Link::default().write_rate(256).unwrap()] {
        assert!((rate / 52.6 - 1.0).abs() < 0.02, "{rate}");
    }
}

/// An answer to 512 bytes at offsets into a line, by MPS and RCB: the table of the page.
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
