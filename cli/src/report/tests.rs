//! Whole pages: every section, every figure, nothing but text from outside, and what is said of what is missing.

use pushgate::settings::PluginSettings;
use pushgate_doctor as doctor;
use pushgate_pcie_model::findings::{Both, Device, FORMAT, Findings, Line, Pair, Rate, Transfer, Writers};
use pushgate_topology::{LinkState, Topology};
use roxmltree::{Document, Node, ParsingOptions};

use super::super::topo;
use super::gather::Facts;
use super::page::html;
use super::redact::Redact;

const GPUS: [&str; 4] = ["0000:53:00.0", "0000:54:00.0", "0000:a8:00.0", "0000:a9:00.0"];

/// Two sockets, below each a switch with two GPUs and a NIC.
fn tree() -> String {
    let mut text = String::from("version = 1\n");
    let mut gpus = String::new();
    for (side, name) in ["left", "right"].into_iter().enumerate() {
        text += &format!(
            "[[node]]\nnumber = {side}\npackage = {side}\n[[root_complex]]\nname = \"{name}\"\nnuma = {side}\n\
             [[device]]\naddress = \"ffff:0{side}:00.0\"\nparent = \"{name}\"\nrole = \"switch\"\nspeed = 32.0\n\
             width = 16\nacs = \"direct\"\n"
        );
        let nic = ["0000:4f:00.0", "0000:a6:00.0"][side];
        for (i, at) in [GPUS[2 * side], GPUS[2 * side + 1], nic].into_iter().enumerate() {
            text += &format!(
                "[[device]]\naddress = \"{at}\"\nparent = \"ffff:0{side}:00.0\"\nspeed = 32.0\nwidth = 16\n"
            );
            gpus += &match i {
                2 => format!(
                    "[[nic]]\nname = \"mlx5_{side}\"\naddress = \"{at}\"\nports = [{{ number = 1, gigabits = 400.0 }}]\n"
                ),
                _ => format!(
                    "[[gpu]]\naddress = \"{at}\"\nindex = {}\nname = \"NVIDIA H200\"\n\
                     nvlinks = [{{ to = \"switch\", links = 18 }}]\n",
                    2 * side + i
                ),
            };
        }
    }
    text + &gpus
}

fn line(way: Transfer, fixed: f64, rate: f64) -> Line {
    let points = (3..14).map(|i| (4u64.pow(i), fixed + 4f64.powi(i as i32) / rate / 1e3)).collect();
    Line::fitted(way, 0.0, points, 1, 1).unwrap()
}

/// As of four H200, each 0.1 us and 1 GB/s from the next.
fn findings() -> Findings {
    let rate = |width, blocks, rate| Rate { width, blocks, rate };
    let device = |(index, pci): (usize, &&str)| Device {
        index: index as u32,
        name: "NVIDIA H200".into(),
        pci: (*pci).into(),
        stores: vec![rate(16, 1, 20.4), rate(16, 4, 51.9), rate(0, 4, 53.1)],
        loads: vec![rate(16, 1, 9.7), rate(16, 8, 43.2)],
        lines: vec![
            line(Transfer::Push, 1.5, 52.0),
            line(Transfer::Read, 2.4, 43.0),
            line(Transfer::CopyOut, 2.8, 55.0),
            line(Transfer::CopyIn, 2.9, 54.0),
        ],
        flag: 1.1,
        record: 1.23,
        launch: 6.1,
        writers: vec![Writers { n: 1, rate: 52.0 }, Writers { n: 2, rate: 51.0 }],
    };
    let mut pairs = Vec::new();
    for (a, from) in GPUS.into_iter().enumerate() {
        for (b, to) in GPUS.into_iter().enumerate().filter(|(b, _)| *b != a) {
            let far = a.abs_diff(b) as f64;
            pairs.push(Pair {
                from: from.into(),
                to: to.into(),
                record: 1.6 + far / 10.0,
                peer_record: None,
                lines: vec![line(Transfer::Push, 4.0, 46.0 - far), line(Transfer::Bounce, 12.0, 53.0 - far)],
            });
        }
    }
    Findings {
        format: FORMAT,
        date: "2026-01-31T23:59:59Z".into(),
        host: "node17".into(),
        executor: "cuda".into(),
        driver: "CUDA 13.0".into(),
        topology: "0123456789abcdef".into(),
        worst_error: 0.034,
        devices: GPUS.iter().enumerate().map(device).collect(),
        pairs,
        writers: vec![Writers { n: 1, rate: 52.0 }, Writers { n: 4, rate: 190.0 }],
        both: [(1, 64, 41.5), (4, 32, 38.2), (4, 64, 30.1)]
            .map(|(devices, mib, rate)| Both { devices, bytes: mib << 20, rate })
            .into(),
    }
}

fn facts() -> Facts {
    let topology = Topology::from_toml(&tree()).unwrap();
    let found = findings();
    let checks = [
        doctor::Finding { check: "rdma-port", ..doctor::Finding::passed("mlx5_0/1", "active, InfiniBand") },
        doctor::Finding {
            check: "rdma-gid",
            ..doctor::Finding::warned(
                "mlx5_1/1",
                "entry 3 is fe80::a00:27ff:fe12:3456",
                "see the switch's table",
            )
        },
        doctor::Finding { check: "module", ..doctor::Finding::failed("", "not loaded", "modprobe pushgate") },
        doctor::Finding { check: "rdma-pfc", ..doctor::Finding::not_applicable("", "InfiniBand has none") },
    ];
    let mut settings = PluginSettings::default();
    settings.set("slots", "64").unwrap();
    Facts {
        date: "2026-02-01T08:00:00Z".into(),
        host: "node17".into(),
        versions: vec![
            ("pushgate".into(), "0.1.0".into()),
            ("Linux".into(), "6.1.0-25-amd64 (x86_64)".into()),
        ],
        topology: topo::judged(&topology, Some(&found)),
        findings: Ok(found),
        beware: Vec::new(),
        doctor: doctor::Report::new(checks.into()),
        settings,
        wrong_setting: None,
    }
}

/// The page as XML, after what holds for every page was asserted.
fn parse(page: &str) -> Document<'_> {
    assert!(page.starts_with("<!DOCTYPE html>\n") && page.len() < 1 << 20, "{} bytes", page.len());
    let parsed =
        Document::parse_with_options(page, ParsingOptions { allow_dtd: true, ..Default::default() }).unwrap();
    // Nothing is fetched and nothing runs.
    let outside = page.replace("http://www.w3.org/2000/svg", "");
    for word in
        ["http:", "https:", "<script", "javascript:", "src=", "url(", "@import", "<link", "onload", "\"//"]
    {
        assert!(!outside.contains(word), "{word}");
    }
    let links = parsed.descendants().filter_map(|n| n.attribute("href"));
    for link in links {
        let id = link.strip_prefix('#').unwrap();
        assert!(parsed.descendants().any(|n| n.attribute("id") == Some(id)), "{id}");
    }
    for empty in ["NaN", "inf ", ">inf<", "None<", "Some("] {
        assert!(!outside.contains(empty), "{empty}");
    }
    parsed
}

fn text(node: Node) -> String {
    node.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect::<Vec<_>>().join(" ")
}

fn section(page: &Document, id: &str) -> String {
    let found =
        page.descendants().find(|n| n.tag_name().name() == "section" && n.attribute("id") == Some(id));
    text(found.unwrap_or_else(|| panic!("no section {id}")))
}

/// The rows of the table with such a caption, as texts of cells.
fn table(page: &Document, caption: &str) -> Vec<Vec<String>> {
    let named = |n: &Node| n.tag_name().name() == "caption" && text(*n).contains(caption);
    let found = page.descendants().find(named).unwrap_or_else(|| panic!("no table {caption}"));
    let rows = found.parent().unwrap().descendants().filter(|n| n.tag_name().name() == "tr");
    rows.map(|row| row.children().filter(Node::is_element).map(text).collect()).collect()
}

#[test]
fn a_whole_page_has_every_section_and_figure() {
    let page = html(&facts(), Redact::default());
    let p = parse(&page);
    let first = p.descendants().find(|n| n.tag_name().name() == "section").unwrap();
    assert_eq!(first.attribute("id"), Some("doctor"), "the page opens with the doctor's findings");
    for (id, words) in [
        (
            "summary",
            &[
                "4 GPUs, 2 RDMA devices",
                "in the shape of a file",
                "2026-01-31T23:59:59Z",
                "1 passed, 1 warned, 1 failed",
            ][..],
        ),
        ("topology", &["root complex left", "0000:53:00.0 gpu0 NVIDIA H200", "└─", "GPU x NIC", "NV18"]),
        ("advice", &["gpu0-mlx5_0", "pull", "push", "from a probe of this host", "probe"]),
        ("measurements", &["gpu3", "NVIDIA H200", "PCIe 5 x16", "copy-out", "CUDA 13.0", "3.4 %"]),
        ("plots", &["by the model", "hops", "points measured, lines fitted"]),
        ("doctor", &["modprobe pushgate", "not loaded", "InfiniBand has none"]),
        ("versions", &["6.1.0-25-amd64", "window-size", "0.1.0"]),
    ] {
        let said = section(&p, id);
        words.iter().for_each(|w| assert!(said.contains(w), "{id}: no {w} in {said}"));
    }
    assert!(text(p.root()).contains("node17, 2026-02-01T08:00:00Z"));

    // Measured, the model and the ceiling, beside each other. Gen 5 x16: 63.0 GB/s, 256 of 280 bytes payload.
    let rates = table(&p, "Rates over host memory");
    assert_eq!(rates[0][4..], ["gpu0", "gpu1", "gpu2", "gpu3"]);
    assert_eq!(rates[2][..2], ["stores of 16 B", "4"], "{rates:?}");
    assert_eq!(rates[2][4], format!("51.9 ({:.0} %)", 51.9 / (63.015 * 256.0 / 280.0) * 100.0));
    let one: f64 = rates[1][2].parse().unwrap();
    assert!((one - 512.0 * 16.0 / 400.0).abs() < 0.1 && rates[1][3] == "issue", "{rates:?}");
    let flags = table(&p, "Latencies, us");
    assert_eq!((flags[0][1].as_str(), flags[1][2].as_str(), flags[1].len()), ("model", "1.10", 6));
    assert!(flags[1][1].parse::<f64>().unwrap() > 0.3, "{flags:?}");
    // Push of 64 KiB: 1.5 us and 65536 bytes at 52 GB/s.
    let sizes = table(&p, "Single transfers of gpu0, by size");
    let row = sizes.iter().find(|r| r[0] == "64 KiB").unwrap();
    assert_eq!(row[1..4], ["2.76", "2.76", "23.7"], "{row:?}");
    // Each pair has its own figures: the quickest is bounce, and slower the farther.
    let matrix = table(&p, "GPU x GPU: GB/s");
    assert_eq!(matrix[0][1..], ["gpu0", "gpu1", "gpu2", "gpu3"]);
    assert_eq!(matrix[1][1], "-");
    let gbs: Vec<f64> =
        (2..5).map(|i| matrix[1][i].strip_suffix(" bounce").unwrap().parse().unwrap()).collect();
    assert!(gbs[0] > gbs[1] && gbs[1] > gbs[2] && (50.0..52.0).contains(&gbs[0]), "{matrix:?}");
    let records = table(&p, "64-byte record");
    assert_eq!(records[1][2..], ["1.70", "1.80", "1.90"]);
    let both = table(&p, "Devices storing to and loading from host memory at once");
    assert_eq!(both[0], ["under way in all", "1 device", "4 devices"]);
    assert_eq!(both[1..], [["32 MiB", "-", "38.2"], ["64 MiB", "41.5", "30.1"]]);
    assert!(page.contains("style=\"background:#"));
    // A failure comes first.
    let checks = table(&p, "What the doctor found");
    assert_eq!([&checks[1][0], &checks[2][0], &checks[3][0]], ["module", "rdma-gid", "rdma-port"]);
    let set = table(&p, "Settings in force");
    assert!(
        set.iter().any(|r| r[..3] == ["slots", "64", "set"])
            && set.len() == PluginSettings::keys().count() + 1
    );
}

#[test]
fn plots_have_every_way_and_every_point() {
    let page = html(&facts(), Redact::default());
    let p = parse(&page);
    let plots: Vec<Node> = p.descendants().filter(|n| n.tag_name().name() == "svg").collect();
    // Two routes (below one switch, across the sockets), hops, four devices, two pairs that differ: two each but hops.
    assert_eq!(plots.len(), 2 * 2 + 1 + 2 * 4 + 2 * 2, "{}", plots.len());
    let titled = |word: &str| -> Vec<&Node> { plots.iter().filter(|n| text(**n).contains(word)).collect() };
    for plot in titled("by the model") {
        let said = text(*plot);
        for way in ["push", "pull", "bounce"] {
            assert!(said.contains(way), "{said}");
        }
    }
    assert_eq!(titled("by the model").len(), 4);
    assert_eq!(titled("hops").len(), 1);
    let device = titled("gpu0: time")[0];
    let count = |tag: &str| device.descendants().filter(|n| n.tag_name().name() == tag).count();
    // Push is discs: one for each of 11 points, one for the legend; rings of copy-in are circles as well.
    assert_eq!((count("polyline"), count("circle")), (4, 24));
    for way in ["push", "read", "copy-out", "copy-in"] {
        assert!(text(*device).contains(way), "{}", text(*device));
    }
    assert!(text(*titled("gpu0: rate")[0]).contains("ceiling of its link: 57.5"));
}

#[test]
fn names_that_are_markup_stay_names() {
    let mut f = facts();
    let name = "</td><script>alert('x')</script><b a=\"\u{1}\u{202e}&";
    let found = f.findings.as_mut().unwrap();
    found.devices[0].name = name.into();
    found.devices[1].pci = name.into();
    found.pairs[0].from = name.into();
    (found.host, found.driver) = (name.into(), name.into());
    f.host = name.into();
    f.versions.push((name.into(), name.into()));
    f.wrong_setting = Some(name.into());
    f.beware.push(name.into());
    let t = &mut f.topology.topology;
    t.gpus[0].name = Some(name.into());
    (t.nics[0].netdev, t.machine.product) = (Some(name.into()), Some(name.into()));
    t.notes.push(name.into());
    f.topology.gpu_nic[0].pair.name = name.into();
    f.topology.gpu_nic[0].advice.reason = name.into();
    f.doctor.findings[0].reading = name.into();
    f.doctor.findings[1].remedy = Some(name.into());
    let page = html(&f, Redact::default());
    let p = parse(&page);
    let shown = name.replace(['\u{1}', '\u{202e}'], "\u{fffd}");
    for (id, ..) in
        [("summary", 1), ("topology", 1), ("advice", 1), ("measurements", 1), ("plots", 1), ("doctor", 1)]
    {
        assert!(section(&p, id).contains(&shown), "{id}");
    }
    assert!(p.descendants().all(|n| n.tag_name().name() != "b"));
}

#[test]
fn what_is_missing_is_said_with_its_remedy() {
    let mut f = facts();
    f.findings = Err("no probe has measured this host: run `pushgate probe`, then this again".into());
    f.topology = topo::judged(&Topology::default(), None);
    f.doctor = doctor::Report::new(Vec::new());
    let page = html(&f, Redact::default());
    let p = parse(&page);
    for (id, words) in [
        ("summary", &["missing", "pushgate probe"][..]),
        ("topology", &["no GPU of NVIDIA", "pushgate topo --all"]),
        ("advice", &["without a NIC", "local"]),
        ("measurements", &["pushgate probe"]),
        ("plots", &["no path from a GPU to a NIC is known here", "pushgate probe"]),
        ("doctor", &["no check had anything"]),
    ] {
        let said = section(&p, id);
        words.iter().for_each(|w| assert!(said.contains(w), "{id}: no {w} in {said}"));
    }

    // GPUs, and neither links nor NICs.
    let mut f = facts();
    let mut t = f.topology.topology.clone();
    t.nics.clear();
    t.functions.values_mut().for_each(|f| f.link = Default::default());
    f.topology = topo::judged(&t, None);
    let found = f.findings.as_mut().unwrap();
    found.pairs.clear();
    let page = html(&f, Redact::default());
    let p = parse(&page);
    assert!(section(&p, "topology").contains("no RDMA device"));
    let said = section(&p, "measurements");
    assert!(said.contains("the ceiling of a link") && said.contains("no messages between devices"), "{said}");
    assert!(!said.contains(" %)"), "{said}");

    let mut f = facts();
    f.findings.as_mut().unwrap().devices[0].writers =
        vec![Writers { n: 1, rate: 37.0 }, Writers { n: 2, rate: 2.7 }];
    let page = html(&f, Redact::default());
    assert!(section(&parse(&page), "measurements").contains("2 writers at once reach 2.7 GB/s together"));
}

#[test]
fn narrow_links_and_small_packets_have_a_model() {
    let mut f = facts();
    let mut t = f.topology.topology.clone();
    let slow = Some(LinkState { gts: 8.0, width: 4 });
    t.functions.values_mut().for_each(|f| (f.link.now, f.link.best) = (slow, slow));
    f.topology = topo::judged(&t, None);
    let page = html(&f, Redact::default());
    let said = section(&parse(&page), "plots");
    assert!(said.contains("PCIe 3 x4") && !said.contains("the model refuses"), "{said}");
}

#[test]
fn redacted_it_names_no_host() {
    let mut f = facts();
    f.topology.topology.gpus[0].uuid = Some("GPU-1b2c3d4e-0000-1111-2222-333344445555".into());
    f.topology.topology.notes.push("/home/ann/x: node17 has 02:00:5e:10:00:01".into());
    f.settings.set("host", "10.1.2.3").unwrap();
    let secrets = ["node17", "fe80::a00", "10.1.2.3", "02:00:5e", "/home/ann", "1b2c3d4e"];
    let page = html(&f, Redact::default());
    assert!(secrets[..5].iter().all(|s| page.contains(s)));
    let page = html(&f, Redact::new(&["node17"], Some("/home/ann")));
    parse(&page);
    secrets.iter().for_each(|s| assert!(!page.contains(s), "{s}"));
    // What the page is for is still there.
    assert!(page.contains("0000:53:00.0") && page.contains("51.9"));
}

#[test]
fn however_much_there_is_the_page_can_be_sent() {
    let mut f = facts();
    let found = f.findings.as_mut().unwrap();
    found.devices = vec![found.devices[0].clone(); 400];
    found.pairs = (0..2000).map(|i| Pair { from: format!("{i}"), ..found.pairs[0].clone() }).collect();
    let points = (1..20_000).map(|n| (n, n as f64)).collect();
    found.devices[0].lines[0].points = points;
    f.topology.topology.notes = vec!["<<<<".repeat(1000); 3000];
    f.versions = vec![("&".repeat(1000), "&".repeat(1000)); 3000];
    let page = html(&f, Redact::default());
    let p = parse(&page);
    let said = section(&p, "measurements");
    assert!(
        said.contains("Shown are 16 of 400 devices") && said.contains("23 of 2001 devices"),
        "{}",
        said.len()
    );
}
