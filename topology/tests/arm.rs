//! Hosts with 64-bit ARM: Grace-Hopper, DGX Spark, Graviton.
//!
//! No such host was at hand. The fixtures are put together from public facts, and each says from which. Numbers of
//! GPUs, ConnectX, ENA and EFA are those of the PCI ID list (pci-ids.ucw.cz); those of Grace's root ports and of EC2's host bridge were
//! not checked against it. What is not known is left out of a fixture: most links, NUMA distances.

mod common;

use common::*;
use pushgate_topology::{
    CpuKind, Distance, Evidence, Figures, Gpu, HostLink, Method, NvLink, NvLinkEnd, Report, Topology, draw,
};

/// A processor's entries in /proc/cpuinfo, as Linux writes them on 64-bit ARM: numbers and no model.
fn cores(host: &Host, parts: &[&str]) {
    let core = |(i, part): (usize, &&str)| {
        format!(
            "processor\t: {i}\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd evtstrm atomics\nCPU implementer\t: 0x41\n\
             CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 0\n\n"
        )
    };
    host.file("proc/cpuinfo", parts.iter().enumerate().map(core).collect::<String>());
}

fn dmi(host: &Host, vendor: &str, product: &str) {
    host.file("sys/class/dmi/id/sys_vendor", format!("{vendor}\n"));
    host.file("sys/class/dmi/id/product_name", format!("{product}\n"));
}

/// A function without what is not known of it.
fn bare(class: u32, id: (u16, u16), driver: &'static str) -> Dev {
    Dev { device: id.1, driver: Some(driver), link: None, ..dev(class, id.0, ENDPOINT) }.cut()
}

/// A root port. Only its number is known.
fn port(device: u16) -> Dev {
    Dev { device, link: None, vendor: 0x10de, ..root_port() }
}

const CONNECTX7: (u16, u16) = (0x15b3, 0x1021);

/// One Grace with one Hopper and two ConnectX-7. Node 0 has the 72 cores, node 1 the GPU's memory, and seven more wait for MIG
/// instances (lscpu of such hosts; the driver's documentation). PCI domains of their own for each root port and the GPU in domain
/// 9 are as in public lspci outputs; the ports' numbers are not in the list, and the NICs' domains are chosen.
fn grace_hopper() -> Host {
    let host = Host::new();
    dmi(&host, "Supermicro", "ARS-111GL-NHR");
    cores(&host, &["0xd4f"; 72]);
    host.file("sys/devices/system/node/node0/cpulist", "0-71\n");
    host.file("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
    (1..9).for_each(|node| host.file(&format!("sys/devices/system/node/node{node}/cpulist"), "\n"));
    host.add("pci0009:00/0009:00:00.0", port(0x22b1));
    // A link that no slot would have, and nothing to blame: the GPU reaches the host by NVLink.
    let few = [("16.0 GT/s PCIe", 1), ("32.0 GT/s PCIe", 16)];
    let gpu = Dev { link: Some(few), ..bare(0x030200, (0x10de, 0x2342), "nvidia") };
    host.add("pci0009:00/0009:00:00.0/0009:01:00.0", gpu);
    for (domain, name) in [(0, "mlx5_0"), (2, "mlx5_1")] {
        let root = format!("pci{domain:04x}:00/{domain:04x}:00:00.0");
        let at = format!("{root}/{domain:04x}:01:00.0");
        host.add(&root, port(0x22b8));
        host.add(&at, Dev { link: Some(GEN5), ..bare(0x020700, CONNECTX7, "mlx5_core") });
        host.rdma(name, &at);
    }
    host
}

/// GB10: ten Cortex-X925 and ten Cortex-A725; the GPU in domain f below its own bridge; a ConnectX-7 with two ports on two links
/// of four lanes, so that each port is there twice, in domains 0 and 2 (public lspci and `nvidia-smi topo -m`, which says NODE for
/// each pair; names as `ibdev2netdev` prints them). With one cable the second port is down.
fn dgx_spark() -> Host {
    let host = Host::new();
    dmi(&host, "NVIDIA", "NVIDIA_DGX_Spark");
    cores(&host, &[["0xd87"; 5], ["0xd85"; 5], ["0xd87"; 5], ["0xd85"; 5]].concat());
    host.file("sys/devices/system/node/node0/cpulist", "0-19\n");
    host.file("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
    host.add("pci000f:00/000f:00:00.0", port(0x22d1).on(-1));
    let gpu = bare(0x030200, (0x10de, 0x2e12), "nvidia").on(-1);
    host.add("pci000f:00/000f:00:00.0/000f:01:00.0", gpu);
    for (domain, name) in [("0000", "rocep1s0f"), ("0002", "roceP2p1s0f")] {
        host.add(&format!("pci{domain}:00/{domain}:00:00.0"), port(0x22ce).on(-1));
        for function in 0..2 {
            let at = format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.{function}");
            let four = [("32.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 16)];
            let nic = Dev { link: Some(four), ..bare(0x020000, CONNECTX7, "mlx5_core") };
            host.add(&at, nic.on(-1));
            let name = format!("{name}{function}");
            host.rdma(&name, &at);
            let state = if function == 0 { "4: ACTIVE\n" } else { "1: DOWN\n" };
            host.file(&format!("sys/devices/{at}/infiniband/{name}/ports/1/state"), state);
            host.file(&format!("sys/devices/{at}/infiniband/{name}/ports/1/rate"), "200 Gb/sec (4X HDR)\n");
            host.file(&format!("sys/devices/{at}/infiniband/{name}/ports/1/link_layer"), "Ethernet\n");
        }
    }
    host
}

/// An instance of EC2 on Graviton: one flat bus with ENA, EBS's NVMe and, of g5g, T4G; of others EFA (amzn-drivers and the kernel's
/// drivers efa and ena tell the numbers; that EFA's node type is 7, the kernel's `enum rdma_node_type`).
fn graviton(product: &str, part: &str, gpus: u8, efa: bool) -> Host {
    let host = Host::new();
    dmi(&host, "Amazon EC2", product);
    cores(&host, &[part; 64]);
    host.node(0, 0);
    let flat = |device, class, driver| bare(class, (0x1d0f, device), driver);
    host.add("pci0000:00/0000:00:00.0", Dev { driver: None, ..flat(0x0200, 0x060000, "") });
    host.add("pci0000:00/0000:00:04.0", flat(0x8061, 0x010802, "nvme"));
    host.add("pci0000:00/0000:00:05.0", flat(0xec20, 0x020000, "ena"));
    for gpu in 0..gpus {
        let at = format!("pci0000:00/0000:00:{:02x}.0", 0x1f - gpu);
        host.add(&at, bare(0x030200, (0x10de, 0x1eb4), "nvidia"));
    }
    if efa {
        let at = "pci0000:00/0000:00:06.0";
        host.add(at, flat(0xefa2, 0x020000, "efa"));
        host.rdma("rdmap0s6", at);
        host.file(&format!("sys/devices/{at}/infiniband/rdmap0s6/node_type"), "7: unspecified\n");
    }
    host
}

/// The report with figures of the cost model, as the command makes it.
fn report(t: &Topology) -> Report {
    let parameters = pushgate_pcie_model::Parameters::default();
    t.report(Evidence::Model { costs: &Figures { findings: None, parameters: &parameters }, bytes: 1 << 19 })
}

fn text(report: &Report) -> String {
    draw::report(report, draw::Style::default())
}

#[test]
fn where_stores_go_over_c2c_it_pushes_and_says_so() {
    let t = grace_hopper().clean();
    assert_eq!((t.machine.cpu_model.as_deref(), t.machine.cpu), (Some("Arm Neoverse V2"), CpuKind::Server));
    assert_eq!(t.host_link(at("0009:01:00.0")), HostLink::NvLink);
    let report = report(&t);
    for pair in &report.gpu_nic {
        assert_eq!((pair.distance, pair.advice.method), (Distance::SameSocket, Method::Push));
        assert_eq!(
            pair.advice.reason,
            "the GPU's stores and copy engines reach host memory over NVLink-C2C, not over PCIe, and the NIC reads host memory"
        );
    }
    assert_eq!(report.findings, Vec::<String>::new(), "few lanes of PCIe are no fault of this GPU's");
    let text = text(&report);
    assert!(text.starts_with(
        "host: Supermicro ARS-111GL-NHR, Arm Neoverse V2, 1 NUMA node in 1 socket and 8 without processors\n\nNUMA node 0, socket 0\n"
    ), "{text}");
    assert!(text.contains("0009:01:00.0 gpu0 NVIDIA GPU, NVLink-C2C to the processor, 16 GT/s x1"), "{text}");
}

#[test]
fn a_gpu_of_an_unknown_number_that_nvml_sees_at_the_processor_is_no_other() {
    let host = grace_hopper();
    host.file("sys/devices/pci0009:00/0009:00:00.0/0009:01:00.0/device", "0x7777\n");
    let mut t = host.clean();
    let gpu = at("0009:01:00.0");
    assert_eq!(t.host_link(gpu), HostLink::Pcie);
    t.learn_gpus(vec![Gpu { nvlinks: vec![NvLink { to: NvLinkEnd::Cpu, links: 10 }], ..Gpu::new(gpu) }]);
    assert_eq!(t.host_link(gpu), HostLink::NvLink);
}

#[test]
fn on_a_dgx_spark_no_nic_reads_the_gpu_and_a_window_is_what_its_maker_advises() {
    let t = dgx_spark().clean();
    let gpu = at("000f:01:00.0");
    assert_eq!(t.machine.cpu_model.as_deref(), Some("Arm Cortex-A725 and Cortex-X925"));
    assert_eq!((t.gpus.len(), t.nics.len(), t.host_link(gpu)), (1, 4, HostLink::Unified));
    let report = report(&t);
    assert_eq!(report.gpu_nic.len(), 4);
    for pair in &report.gpu_nic {
        assert_eq!((pair.distance, pair.advice.method), (Distance::SameSocket, Method::Push));
        for said in ["no NIC can read", "GDRCopy do not work", "host memory registered with CUDA"] {
            assert!(pair.advice.reason.contains(said), "{}", pair.advice.reason);
        }
    }
    let text = text(&report);
    assert!(
        text.contains("000f:01:00.0 gpu0 NVIDIA GPU, one memory with the processor, driver nvidia"),
        "{text}"
    );
    assert!(text.contains("rocep1s0f1 200 Gb/s Ethernet DOWN"), "{text}");
    assert!(text.contains("  gpu0  NODE push     NODE push     NODE push   NODE push\n"), "{text}");
}

#[test]
fn a_graviton_instance_is_a_virtual_machine_and_its_efa_no_nic() {
    let t = graviton("g5g.16xlarge", "0xd0c", 2, false).clean();
    assert_eq!((t.machine.cpu_model.as_deref(), t.gpus.len()), (Some("Arm Neoverse N1"), 2));
    assert!(t.machine.flat, "{:?}", t.machine);
    let report_ = report(&t);
    assert_eq!(report_.without_nic.as_ref().unwrap().method, Method::Local);
    assert_eq!(
        (report_.gpu_gpu[0].distance, t.host_link(at("0000:00:1f.0"))),
        (Distance::Virtual, HostLink::Pcie)
    );

    let metal = graviton("g5g.metal", "0xd0c", 2, false).clean();
    assert_eq!(metal.machine.virtual_machine, None);

    let t = graviton("hpc7g.16xlarge", "0xd40", 0, true).read();
    assert_eq!(
        t.notes,
        [
            "rdmap0s6: node type 7: unspecified: no InfiniBand, RoCE or iWARP (Amazon's EFA has no such queue pairs): not \
             counted as a NIC"
        ]
    );
    assert!(t.nics.is_empty());
    let text = text(&report(&t));
    assert!(
        text.contains("advice: local: this host has no RDMA NIC") && text.contains("go over tcp\n"),
        "{text}"
    );
}
