//! Files that describe a machine, TOML and NCCL's XML: reading, writing, and what is refused.

mod common;

use common::at;
use proptest::prelude::*;
use pushgate_topology::{
    AcsOnWay, Distance, Evidence, FileError, Hop, LinkState, Method, NvLink, NvLinkEnd, Topology, advise,
    draw,
};

/// A file as NCCL writes it: two sockets; on each a switch with a GPU and a NIC, the second GPU
/// separated from its NIC; a socket transport, a second host, a switch that virtual machines do not
/// see.
const NCCL: &str = r#"<system version="1">
  <cpu host_hash="0xa1" numaid="0" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" device="0x2335" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:05:00.0" count="9" tclass="0x068000"/>
          <nvlink target="0000:06:00.0" count="9" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" latency="0.0" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
    <nic>
      <net name="eth0" dev="3" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
  <cpu host_hash="0xa1" numaid="1" arch="x86_64">
    <pci busid="0000:98:00.0" class="0x030200" link_speed="" link_width="0">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>
        <c2c bw="300000" count="2"/>
      </gpu>
    </pci>
    <pci busid="0000:9a:00.0" class="0x020000" link_speed="16.0 GT/s PCIe" link_width="8">
      <nic><net name="mlx5_1" speed="100000" port="1"/></nic>
    </pci>
    <pci busid="nonsense" class="0x0604"/>
  </cpu>
  <cpu host_hash="0xb2" numaid="0"><pci busid="0000:18:00.0" class="0x030200"/></cpu>
</system>
"#;

#[test]
fn nccl_knows_switches_and_sockets() {
    let t = Topology::from_nccl(NCCL).unwrap();
    let way = |a: &str, b: &str| t.path(at(a), at(b)).unwrap();
    let near = way("0000:18:00.0", "0000:19:00.0");
    assert_eq!((near.distance, &near.acs), (Distance::SameSwitch, &AcsOnWay::Unknown));
    assert_eq!(near.hops, [Hop::Switch(at("0000:16:00.0"))]);
    let far = way("0000:18:00.0", "0000:9a:00.0");
    assert_eq!(far.distance, Distance::AcrossSockets);
    assert_eq!(far.hops[0], Hop::Switch(at("0000:16:00.0")));
    assert_eq!(far.hops[2], Hop::Sockets(0, 1));
    assert_eq!(far.narrowest.unwrap().state, LinkState { gts: 16.0, width: 8 });
    assert_eq!(way("0000:98:00.0", "0000:9a:00.0").distance, Distance::SameSocket);

    assert_eq!(t.gpus[0].nvlinks, [NvLink { to: NvLinkEnd::Switch, links: 18 }]);
    let ends = [NvLink { to: NvLinkEnd::Switch, links: 18 }, NvLink { to: NvLinkEnd::Cpu, links: 2 }];
    assert_eq!((t.gpus[1].index, &t.gpus[1].nvlinks[..]), (Some(1), &ends[..]));
    assert_eq!(t.nvlinks(at("0000:18:00.0"), at("0000:98:00.0")), 18);
    let names: Vec<&str> = t.nics.iter().map(|n| n.name.as_str()).collect();
    assert_eq!((names, t.nics[0].ports[0].gigabits), (vec!["mlx5_0", "mlx5_1"], Some(400.0)));
    for expected in [
        "eth0: port 0 is NCCL's socket transport",
        "<pci>: busid: \"nonsense\" is no PCI address",
        "it holds more than one host: the first is read",
        "NCCL does not tell root complexes apart",
    ] {
        assert!(t.notes.iter().any(|n| n.starts_with(expected)), "{expected} is not in {:?}", t.notes);
    }
    assert_eq!(t.notes.len(), 4);
    let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
    let matrix = "        mlx5_0    mlx5_1\n  gpu0  SW pull   SYS push\n  gpu1  SYS push  NODE push\n";
    assert!(text.contains(matrix), "{text}");
}

#[test]
fn xml_to_toml_to_tree_and_back_loses_nothing() {
    let mut first = Topology::from_nccl(NCCL).unwrap();
    let text = first.to_toml();
    let second = Topology::from_toml(&text).unwrap();
    first.notes.clear();
    assert_eq!(second, first);
    assert_eq!(second.to_toml(), text);
}

#[test]
fn xml_that_is_none_is_refused() {
    let deep = format!("<system><cpu numaid=\"0\">{}", "<pci busid=\"0000:01:00.0\">".repeat(100));
    let closed = format!("{deep}{}</cpu></system>", "</pci>".repeat(100));
    for (xml, expected) in [
        ("", "it is no topology of NCCL's: "),
        ("<system", "it is no topology of NCCL's: "),
        ("<graphs version=\"1\"/>", "its first element is <graphs>, where <system> should be"),
        ("<system version=\"1\"/>", "it has no <cpu> with a <pci> in it"),
        (&deep, "it is no topology of NCCL's: "),
        // Entities that grow: none of them is expanded.
        ("<!DOCTYPE s [<!ENTITY a \"b\">]><system>&a;</system>", "it is no topology of NCCL's: "),
    ] {
        let e = Topology::from_nccl(xml).unwrap_err();
        assert!(matches!(e, FileError::Xml(_)) && e.to_string().contains(expected), "{e}");
    }
    // One function 100 times, each below the one before: they are switches that have one bus id.
    let t = Topology::from_nccl(&closed).unwrap();
    assert!(t.notes.iter().any(|n| n.contains("64 switches deep")), "{:?}", t.notes);
    assert_eq!(t.functions.len(), 65);
    assert!(Topology::from_nccl(&"<a>".repeat(300_000)).is_err());
    assert!(
        Topology::from_nccl(&" ".repeat(5 << 20))
            .unwrap_err()
            .to_string()
            .contains("at most 4194304 are read")
    );
}

/// The example of docs/topology.md.
fn example() -> &'static str {
    let page = include_str!("../../docs/topology.md");
    let from = page.find("```toml\n").expect("an example") + 8;
    &page[from..from + page[from..].find("```").unwrap()]
}

#[test]
fn the_example_of_the_page_is_what_the_page_says() {
    let t = Topology::from_toml(example()).unwrap();
    let pairs = t.pairs();
    let said: Vec<_> = pairs
        .iter()
        .map(|p| (t.gpu_label(p.gpu), p.name.as_str(), p.distance(), advise(p, Evidence::ByDistance).method))
        .collect();
    let gpu = |n: u32| format!("gpu{n}");
    assert_eq!(
        said,
        [
            (gpu(0), "mlx5_0", Distance::SameSwitch, Method::Pull),
            (gpu(0), "mlx5_1", Distance::AcrossSockets, Method::Push),
            (gpu(1), "mlx5_0", Distance::AcrossSockets, Method::Push),
            (gpu(1), "mlx5_1", Distance::SameSwitch, Method::Push),
        ]
    );
    assert_eq!(t.nvlinks(pairs[0].gpu, pairs[2].gpu), 18);
    let again = Topology::from_toml(&t.to_toml()).unwrap();
    assert_eq!(again, t);
}

#[test]
fn what_can_not_be_is_refused_with_where_and_what() {
    let good = "version = 1\n[[root_complex]]\nname = \"r\"\n[[device]]\naddress = \"0000:01:00.0\"\nparent = \"r\"\n";
    Topology::from_toml(good).unwrap();
    for (from, to, expected) in [
        ("version = 1", "version = 2", "version: \"2\": 1 is what this program reads"),
        ("version = 1", "version = \"one\"", "it is no topology in TOML: "),
        ("version = 1", "version = 1\ncolour = 3", "unknown field `colour`"),
        (
            "\"r\"\n[[device]]",
            "\"0000:01:00.1\"\n[[device]]",
            "root_complex: name: \"0000:01:00.1\": each name once",
        ),
        ("name = \"r\"", "name = \"\\u001b\"", "1 to 256 bytes without control characters"),
        ("address = \"0000:01:00.0\"", "address = \"here\"", "is no PCI address"),
        (
            "parent = \"r\"",
            "parent = \"s\"",
            "device 0000:01:00.0: parent: \"s\": the name of a root_complex",
        ),
        ("parent = \"r\"", "parent = \"0000:02:00.0\"", "no such device: name a root_complex or a device"),
        ("parent = \"r\"", "parent = \"0000:01:00.0\"", "the way up must end at a root_complex"),
        ("parent = \"r\"", "parent = \"r\"\nspeed = 32", "give speed and width, or neither"),
        (
            "parent = \"r\"",
            "parent = \"r\"\nspeed = 1e9\nwidth = 16",
            "speed: \"1000000000\": 2.5 to 256 GT/s",
        ),
        ("parent = \"r\"", "parent = \"r\"\nspeed = nan\nwidth = 16", "2.5 to 256 GT/s"),
        ("parent = \"r\"", "parent = \"r\"\nspeed = 8\nwidth = 0", "width: \"0\": 1 to 32 lanes"),
        ("parent = \"r\"", "parent = \"r\"\nclass = \"display\"", "class: \"display\": 0x and up to 6"),
        ("parent = \"r\"", "parent = \"r\"\nrole = \"hub\"", "unknown variant `hub`"),
        (
            "parent = \"r\"",
            "parent = \"r\"\n[[device]]\naddress = \"0000:01:00.0\"\nparent = \"r\"",
            "each address once",
        ),
        (
            "parent = \"r\"",
            "parent = \"r\"\n[[gpu]]\naddress = \"0000:09:00.0\"",
            "gpu: address: \"0000:09:00.0\": the address of a device",
        ),
        (
            "parent = \"r\"",
            "parent = \"r\"\n[[nic]]\nname = \"a\"\n[[nic]]\nname = \"a\"",
            "nic: name: \"a\": each NIC once",
        ),
        (
            "parent = \"r\"",
            "parent = \"r\"\n[[gpu]]\naddress = \"0000:01:00.0\"\nnvlinks = [{to = \"moon\", links = 1}]",
            "nvlinks: to: \"moon\": the address of a GPU",
        ),
        (
            "parent = \"r\"",
            "parent = \"r\"\n[[nic]]\nname = \"a\"\nports = [{number = 1, gigabits = -1.0}]",
            "nic: gigabits: \"-1\"",
        ),
    ] {
        assert!(good.contains(from));
        let e = Topology::from_toml(&good.replace(from, to)).unwrap_err().to_string();
        assert!(e.contains(expected), "{expected:?} is not in {e:?}");
    }
}

#[test]
fn more_entries_than_any_host_has_are_refused() {
    let nodes =
        |n: u32| (0..n).fold("version = 1\n".to_owned(), |t, i| t + &format!("[[node]]\nnumber = {i}\n"));
    assert_eq!(Topology::from_toml(&nodes(4096)).unwrap().machine.nodes.len(), 4096);
    let e = Topology::from_toml(&nodes(4097)).unwrap_err().to_string();
    assert_eq!(e, "node: \"4097 entries\": at most 4096");
}

#[test]
fn a_chain_that_is_too_long_is_refused() {
    let mut text = "version = 1\n[[root_complex]]\nname = \"r\"\n".to_owned();
    for bus in 0..255 {
        let parent = if bus == 0 { "r".into() } else { format!("0000:{:02x}:00.0", bus - 1) };
        text += &format!("[[device]]\naddress = \"0000:{bus:02x}:00.0\"\nparent = \"{parent}\"\n");
    }
    let e = Topology::from_toml(&text).unwrap_err().to_string();
    assert!(e.contains("0000:40:00.0") && e.contains("more than 64 devices"), "{e}");
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}", cut in 0..NCCL.len(), with in "\\PC{0,12}") {
        let _ = Topology::from_toml(&text);
        let _ = Topology::from_nccl(&text);
        for whole in [NCCL, example()] {
            let Some((head, tail)) = whole.split_at_checked(cut.min(whole.len())) else { continue };
            let spoiled = format!("{head}{with}{}", tail.get(with.len()..).unwrap_or_default());
            for t in [Topology::from_toml(&spoiled), Topology::from_nccl(&spoiled)].into_iter().flatten() {
                let text = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
                prop_assert!(!text.chars().any(|c| c.is_control() && c != '\n'));
                prop_assert_eq!(Topology::from_toml(&t.to_toml()).unwrap().to_toml(), t.to_toml());
            }
        }
    }
}

#[test]
fn p8_a_file_of_nccls_that_says_more_than_a_host_has_is_refused_and_not_read_for_minutes() {
    let many = |n: usize, one: &dyn Fn(usize) -> String| (0..n).map(one).collect::<String>();
    let busid = |n: usize| format!("{:04x}:{:02x}:00.0", n >> 8, n & 0xff);
    let gpu = |n| format!(r#"<pci busid="{}" class="0x030200"/>"#, busid(n));
    let function = |n| format!(r#"<pci busid="{}"/>"#, busid(n));
    for (inside, says) in [
        (many(65, &gpu), "65 GPUs; at most 64 are read"),
        (many(1 << 15, &function), "32768 <pci>; at most 16384 are read"),
        (
            format!("<nic>{}</nic>", many(5000, &|n| format!(r#"<net name="n{n}"/>"#))),
            "5000 <net>; at most 4096 are read",
        ),
        (many(5000, &|_| "<nvlink/>".into()), "5000 <nvlink>; at most 4096 are read"),
        // The reader of XML compares each attribute of an element with every other one.
        (
            format!("<pci {}/>", many(300_000, &|n| format!(r#"a{n}="" "#))),
            "an element with 300000 attributes; at most 1024 are read",
        ),
    ] {
        let refused =
            Topology::from_nccl(&format!("<system><cpu>{inside}</cpu></system>")).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
}
