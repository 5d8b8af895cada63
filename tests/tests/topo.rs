//! Tests `pushgate topo` as a command over a sysfs and a /proc in a folder: what it prints in each
//! form, and what it refuses. The crate's tests (topology/tests) cover trees of every shape.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use pushgate_tests::pushgate;
use serde_json::Value;

/// A GPU and a NIC at two ports of one root complex, in a folder that is removed with its owner.
struct Host(PathBuf);

impl Host {
    fn new(name: &str) -> Host {
        let host = Host(std::env::temp_dir().join(format!("pushgate-topo-{}-{name}", std::process::id())));
        host.file("proc/cpuinfo", "model name\t: AMD EPYC 9575F 64-Core Processor\nflags\t: fpu\n");
        host.file("sys/devices/system/node/node0/cpulist", "0-7\n");
        host.file("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
        host.function("0000:00:01.0", "0000:00:01.0", "0x1022", "0x060400");
        host.function("0000:00:02.0", "0000:00:02.0", "0x1022", "0x060400");
        host.function("0000:00:01.0/0000:01:00.0", "0000:01:00.0", "0x10de", "0x030200");
        host.function("0000:00:02.0/0000:02:00.0", "0000:02:00.0", "0x15b3", "0x020700");
        let nic = "sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/infiniband/mlx5_0";
        host.file(&format!("{nic}/ports/1/rate"), "400 Gb/sec (4X NDR)\n");
        symlink("../..", host.0.join(nic).join("device")).unwrap();
        fs::create_dir_all(host.0.join("sys/class/infiniband")).unwrap();
        symlink(host.0.join(nic), host.0.join("sys/class/infiniband/mlx5_0")).unwrap();
        host
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn function(&self, place: &str, name: &str, vendor: &str, class: &str) {
        let folder = format!("sys/devices/pci0000:00/{place}");
        for (file, text) in [("vendor", vendor), ("class", class), ("numa_node", "0")] {
            self.file(&format!("{folder}/{file}"), text);
        }
        let devices = self.0.join("sys/bus/pci/devices");
        fs::create_dir_all(&devices).unwrap();
        symlink(self.0.join(folder), devices.join(name)).unwrap();
    }

    fn topo(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(pushgate());
        command.arg("topo").arg("--sysfs").arg(self.0.join("sys")).arg("--proc").arg(self.0.join("proc"));
        command.args(arguments).output().unwrap()
    }

    /// The command's output when it succeeds.
    fn said(&self, arguments: &[&str]) -> String {
        let output = self.topo(arguments);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_form_shows_the_host_of_the_folder() {
    let host = Host::new("forms");
    let text = host.said(&["--ascii"]);
    for part in [
        "host: AMD EPYC 9575F 64-Core Processor, 1 NUMA node in 1 socket",
        "   |- 0000:00:01.0 root port\n   |  `- 0000:01:00.0 gpu0 NVIDIA GPU",
        "  gpu0  RC push",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(text.is_ascii() && !text.contains("\nnotes"), "{text}");

    // Its sysfs does not say what kind of device it is.
    assert!(
        text.ends_with("\nib-dev = auto: no RDMA device can be taken: mlx5_0: it has no RC queue pairs\n"),
        "{text}"
    );
    for (file, content) in [
        ("node_type", "1: CA\n"),
        ("ports/1/state", "4: ACTIVE\n"),
        ("ports/1/link_layer", "InfiniBand\n"),
        ("ports/1/lid", "0x1\n"),
    ] {
        host.file(&format!("sys/class/infiniband/mlx5_0/{file}"), content);
    }
    for (file, content) in [("node_type", "4: RNIC\n"), ("ports/1/state", "4: ACTIVE\n")] {
        host.file(&format!("sys/class/infiniband/irdma0/{file}"), content);
    }
    let taken = "mlx5_0 is taken: InfiniBand, 400 Gb/s, distance from the GPU: same root complex; irdma0 not: it has no address";
    let text = host.said(&["--ascii"]);
    assert!(text.ends_with(&format!("\nib-dev = auto: {taken}\n")), "{text}");

    let json: Value = serde_json::from_str(&host.said(&["--json"])).unwrap();
    assert_eq!(json["rdma_choice"], Value::from(vec![taken]));
    // irdma0 is in no place of the tree.
    let distances: Vec<_> =
        json["gpu_nic"].as_array().unwrap().iter().map(|pair| (&pair["name"], &pair["distance"])).collect();
    assert_eq!(
        distances,
        [(&"irdma0".into(), &"unknown".into()), (&"mlx5_0".into(), &"same_root_complex".into())]
    );
    assert_eq!(json["topology"]["nics"][1]["ports"][0]["gigabits"], 400.0);
    assert_eq!(json["topology"]["notes"], Value::Array(vec![]));

    let way = host.said(&["gpu0", "mlx5_0"]);
    assert!(way.starts_with("0000:01:00.0 to 0000:02:00.0: same root complex\n"), "{way}");
    assert!(way.contains("over      root complex pci0000:00\n"), "{way}");
}

#[test]
fn what_it_writes_as_a_file_it_reads_again() {
    let host = Host::new("file");
    host.file("topo.toml", &host.said(&["--toml"]));
    let file = host.0.join("topo.toml");
    let text = host.said(&["--topology", file.to_str().unwrap()]);
    assert!(text.contains("tree: from a file\n") && text.contains("gpu0  RC push"), "{text}");

    host.file("nccl.xml", r#"<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="0"/></pci></cpu></system>"#);
    let file = host.0.join("nccl.xml");
    let output = host.topo(&["--from-nccl", file.to_str().unwrap()]);
    assert!(output.status.success() && !output.stderr.is_empty(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("[[gpu]]\naddress = \"0000:01:00.0\""));
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let host = Host::new("refused");
    let nowhere = host.0.join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    for (arguments, says) in [
        (["gpu0", "mlx5_9"], "known are gpu0, mlx5_0"),
        (["--topology", nowhere], "nowhere cannot be read"),
        (["--from-nccl", nowhere], "nowhere cannot be read"),
    ] {
        let output = host.topo(&arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty() && text.contains(says), "{text}");
    }
    for flag in ["--sysfs", "--proc"] {
        let output = Command::new(pushgate()).args(["topo", flag, nowhere]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains("no such folder") && text.contains(flag), "{text}");
    }
}
