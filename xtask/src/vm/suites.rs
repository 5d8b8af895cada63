//! The suites that run in the virtual machine.

use super::ivshmem::{Device, Memory};
use crate::system::Need;

/// What the suite `package` needs: the machine, our module for comparison, and the package.
pub const PACKAGE_NEEDS: &[Need] = &[
    Need::Qemu,
    Need::Busybox,
    Need::RdmaTools,
    Need::Kmod,
    Need::ModuleBuild,
    Need::Cxx,
    Need::Packaging,
    Need::Manual,
    Need::Installing,
    Need::CBuild,
];

/// One suite of the table.
pub struct Suite {
    /// The name for `--suite`, in lower case and dashes.
    pub name: &'static str,
    /// How many machines the suite runs in: 1 or 2.
    pub guests: u8,
    /// Seconds that the script should take in the guest on a quiet host of two cores. Reported,
    /// never enforced.
    pub budget: u64,
    /// Whether `cargo xtask test` runs the suite: with one machine in the step `vm`, with two in
    /// `vm-pair`.
    pub default: bool,
    /// What the suite shows, for `--list`.
    pub about: &'static str,
    /// What must be built on the host first: calls of cargo, `build` or `test`, to which
    /// `--release` (and `--no-run`) is added.
    pub build: &'static [&'static [&'static str]],
    /// Additional PCI functions of the guest.
    pub devices: &'static [Device],
    /// Whether the suite loads our kernel module; then `KMOD_DIR` is the folder of the module's
    /// files.
    pub module: bool,
    /// Whether the suite makes devices of software iWARP (`siw` of lib.sh); then `SIW_DIR` is the folder of
    /// the module siw, built for the guest's kernel. Where the module's source can't be fetched, the
    /// suite is left out.
    pub siw: bool,
    /// Whether the suite installs our Debian package; then `PACKAGE` is that file, and
    /// `HEADERS_DIR` the folder in which the headers of the guest's kernel are unpacked.
    pub package: bool,
    /// A script that `/bin/sh -eu` runs on the host when the guest asks for it (`on_host` of
    /// lib.sh). It has the variables that name programs, `RUN` (the run's folder, where functions'
    /// memory is), and a descriptor `BELL_x` that rings the x-th function with interrupts.
    pub host: Option<&'static str>,
    /// The suite's script, run in the guest as root by `/bin/sh -eu`, in the repository's root,
    /// which is read-only. With two guests it runs in both. Results go to /run/out. The script has
    ///
    /// * the functions of lib.sh;
    /// * `BIN_DIR`, cargo's release folder;
    /// * a variable for each program built: `BIN_x`, `EXAMPLE_x` and `TEST_x` (an integration test,
    ///   or the unit tests of crate x), in capitals with underscores for dashes;
    /// * `VM_GUEST`, 1 or 2, and with two guests `VM_GUEST_IP`, `VM_PEER_IP`. (Names that begin
    ///   with PUSHGATE are settings, and the library refuses those that it does not know.)
    pub script: &'static str,
}

const PUSHGATE: &[&str] = &["build", "-p", "pushgate-cli"];
const OUTSIDE: &[&str] = &["build", "--example", "outside"];
// `--bin`: the right command must not be built with this feature.
const UNGATED: &[&str] =
    &["build", "--package", "pushgate-cli", "--bin", "pushgate-ungated", "--features", "test-ungated"];
/// The suite of queue pairs.
pub const ENDPOINT_TESTS: &[&str] =
    &["test", "--package", "pushgate-tests", "--features", "test-ungated", "--test", "endpoint"];
// With pushgate-tests beside, cargo gives the dependencies the features that they have in all other builds of `cargo xtask
// test`, and builds none of them again.
const LINK_UNIT_TESTS: &[&str] =
    &["test", "--package", "pushgate-link-verbs", "--package", "pushgate-tests", "--lib"];
const DRIVER_TESTS: &[&str] = &["test", "--package", "pushgate-tests", "--test", "driver"];

const DOCTOR_TESTS: &[&str] = &["test", "--package", "pushgate-tests", "--test", "doctor"];

/// All suites, in the order in which they run.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "rdma-smoke",
        guests: 1,
        budget: 8,
        default: true,
        about: "a soft-RoCE device is active and carries writes between two processes",
        build: &[],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: r#"
rdma link show rxe0/1 | grep 'state ACTIVE'
ibv_devinfo -d rxe0 | tee /run/out/devinfo.txt
grep -q 'active_mtu:.*4096' /run/out/devinfo.txt
ls /dev/infiniband/rdma_cm /dev/infiniband/uverbs0
ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 -F >/run/out/server.txt 2>&1 &
listening 18515
ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 -F 10.9.0.1
wait $!
"#,
    },
    Suite {
        name: "leaves-running",
        guests: 1,
        budget: 2,
        default: true,
        about: "a suite that leaves a process and files behind, which the next suite must not find",
        build: &[],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: r#"
for folder in /tmp /dev/shm; do : >"$folder/left-behind"; done
# Out of the suite's process group and session, and with the suite's output open.
setsid sh -c 'while :; do echo left-behind; echo left-behind >>/tmp/left-behind; sleep 0.05; done' &
until grep -q left-behind /tmp/left-behind; do sleep 0.05; done
"#,
    },
    Suite {
        name: "finds-nothing",
        guests: 1,
        budget: 4,
        default: true,
        about: "nothing of the suite before this one is left: no process, no file",
        build: &[],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: r#"
# If the process still existed, it would have written its file again by now.
sleep 1
! find /tmp /var/tmp /dev/shm -xdev -name 'left-behind' | grep . || exit 1
"#,
    },
    Suite {
        name: "doctor",
        guests: 1,
        budget: 15,
        default: true,
        about: "pushgate doctor names what is wrong: no GID, MTU 1500, port down, no address, v1, memlock, no module",
        build: &[PUSHGATE, DOCTOR_TESTS],
        devices: &[],
        module: true,
        siw: false,
        package: false,
        host: None,
        script: include_str!("suites/doctor.sh"),
    },
    Suite {
        name: "nccl-devices",
        guests: 1,
        budget: 90,
        default: true,
        about: "the NCCL plugin with two RDMA devices: what NCCL is told of them, ranks with one each and with both, lists that differ",
        build: &[&["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/nccl_devices.sh")),
    },
    Suite {
        name: "verbs-endpoint",
        guests: 1,
        budget: 50,
        default: true,
        about: "the suite of queue pairs over RDMA, with immediate data and without",
        build: &[ENDPOINT_TESTS, LINK_UNIT_TESTS],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/endpoint.sh"),
            include_str!("suites/verbs_endpoint.sh")
        ),
    },
    Suite {
        name: "verbs-cm",
        guests: 1,
        budget: 80,
        default: false,
        about: "the suite of queue pairs over soft-RoCE through rdma_cm, with immediate data and without",
        build: &[ENDPOINT_TESTS],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/endpoint.sh"),
            include_str!("suites/verbs_cm.sh")
        ),
    },
    Suite {
        name: "siw",
        guests: 1,
        budget: 75,
        default: true,
        about: "queue pairs over software iWARP, which rdma_cm connects: their suite, a hundred at once, the bench allreduce",
        build: &[ENDPOINT_TESTS, LINK_UNIT_TESTS, PUSHGATE],
        devices: &[],
        module: false,
        siw: true,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/endpoint.sh"),
            include_str!("suites/siw.sh")
        ),
    },
    Suite {
        name: "siw-faults",
        guests: 1,
        budget: 90,
        default: false,
        about: "software iWARP: ports, addresses and ranks that go; links that break and are replaced; the NCCL plugin",
        build: &[PUSHGATE, &["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: true,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/faults.sh"),
            include_str!("suites/siw_faults.sh")
        ),
    },
    Suite {
        name: "verbs",
        guests: 1,
        budget: 45,
        default: true,
        about: "the bench allreduce over RDMA is right and sees no RNR; senders without credit do",
        build: &[PUSHGATE, UNGATED],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/verbs.sh")),
    },
    Suite {
        name: "verbs-faults",
        guests: 1,
        budget: 35,
        default: true,
        about: "links, addresses, devices and ranks that go during a run; wrong devices; no libibverbs",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/faults.sh"),
            include_str!("suites/verbs_faults.sh")
        ),
    },
    Suite {
        name: "verbs-rails",
        guests: 1,
        budget: 70,
        default: true,
        about: "queue pairs over two RDMA devices at once: both carry, one goes on while the other is away, or starts without it",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/verbs_rails.sh")),
    },
    Suite {
        name: "verbs-recovery",
        guests: 1,
        budget: 105,
        default: true,
        about: "links over RDMA that break are replaced, with immediate data and without: a minute of chaos, and the NCCL plugin's caller",
        build: &[PUSHGATE, &["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/verbs_recovery.sh")),
    },
    Suite {
        name: "nccl",
        guests: 1,
        budget: 90,
        default: true,
        about: "the NCCL plugin over RDMA, under its caller, on host memory: the oldest and the newest version, strangers, deaths, many connections; local and verbs by namespace",
        build: &[&["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            "set -- --skip gpu_\n",
            include_str!("suites/nccl.sh")
        ),
    },
    Suite {
        name: "nccl-gpu",
        guests: 1,
        budget: 300,
        default: false,
        about: "the same on GPU memory, with the CPU executor as GPU: push with either landing, pull, a GPU that is lost",
        build: &[&["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), "set -- gpu_\n", include_str!("suites/nccl.sh")),
    },
    Suite {
        name: "nixl",
        guests: 1,
        budget: 60,
        default: false,
        about: "agents of the NIXL plugin over RDMA: host memory and played GPU memory, links that break",
        build: &[&["test", "--package", "pushgate-nixl-plugin", "--package", "pushgate-tests", "--lib"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/nixl.sh")),
    },
    Suite {
        name: "rma",
        guests: 1,
        budget: 150,
        default: false,
        about: "the NCCL plugin's tables for one-sided operations under their caller, over RDMA; deaths and closing over TCP",
        build: &[&["test", "--package", "pushgate-tests", "--test", "rma"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/rma.sh")),
    },
    Suite {
        name: "rdma-smoke-pair",
        guests: 2,
        budget: 10,
        default: true,
        about: "the same between two machines, by sends over UDP",
        build: &[],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: r#"
rdma link show rxen0/1 | grep 'state ACTIVE'
if [ "$VM_GUEST" = 1 ]; then
    ib_send_bw -d rxen0 -x 1 -s 65536 -n 200 -F &
    listening 18515
    together server
    wait $!
else
    together server
    ib_send_bw -d rxen0 -x 1 -s 65536 -n 200 -F "$VM_PEER_IP" >/run/out/client.txt 2>&1
fi
"#,
    },
    Suite {
        name: "siw-pair",
        guests: 2,
        budget: 60,
        default: true,
        about: "software iWARP between two machines, whose cable is cut and joined again: nothing lost, doubled or wrong",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: true,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/two.sh"),
            include_str!("suites/siw_pair.sh")
        ),
    },
    Suite {
        name: "verbs-bench",
        guests: 1,
        budget: 400,
        default: false,
        about: "the verbs queue pair beside perftest, in turns: bandwidth and latency",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/perftest.sh"), include_str!("suites/verbs_bench.sh")),
    },
    Suite {
        name: "siw-bench",
        guests: 1,
        budget: 300,
        default: false,
        about: "queue pairs that rdma_cm connects beside perftest -R, in turns, over software iWARP and soft-RoCE",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: true,
        package: false,
        host: None,
        script: concat!(include_str!("suites/perftest.sh"), include_str!("suites/siw_bench.sh")),
    },
    Suite {
        name: "verbs-pair",
        guests: 2,
        budget: 100,
        default: true,
        about: "the bench allreduce over two machines: right, no RNR; strangers, mismatches, a bad cable",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/verbs_pair.sh")),
    },
    Suite {
        name: "nccl-trace",
        guests: 1,
        budget: 25,
        default: true,
        about: "replays of NCCL's calls over tcp between four network namespaces: 50 us, 1 % loss, 1 Gbit/s; bare sockets beside",
        build: &[PUSHGATE, &["test", "--package", "pushgate-tests", "--test", "nccl"]],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/nccl_trace.sh")),
    },
    Suite {
        name: "chaos-pair",
        guests: 2,
        budget: 110,
        default: false,
        about: "chaos over two machines, RDMA and TCP: each breaks its own rank, sockets and port; nothing lost, doubled or wrong",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/two.sh"),
            include_str!("suites/chaos_pair.sh")
        ),
    },
    Suite {
        name: "tcp-pair",
        guests: 2,
        budget: 40,
        default: false,
        about: "the bench allreduce over two machines: RDMA without a choice; tcp over 50 ms and 1 % loss; what io_uring copies",
        build: &[PUSHGATE],
        devices: &[],
        module: false,
        siw: false,
        package: false,
        host: None,
        script: concat!(include_str!("suites/allreduce.sh"), include_str!("suites/tcp_pair.sh")),
    },
    Suite {
        name: "driver",
        guests: 1,
        budget: 85,
        default: true,
        about: "the kernel module on ivshmem functions: windows, slices, staging, doorbells, hostile calls; devices of other drivers",
        build: &[OUTSIDE, PUSHGATE, DRIVER_TESTS],
        devices: DRIVER,
        module: true,
        siw: false,
        package: false,
        host: Some(concat!("DEVICE=cpu THREADS=1\n", include_str!("suites/driver_host.sh"))),
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/outside.sh"),
            include_str!("suites/driver.sh")
        ),
    },
    Suite {
        name: "osu",
        guests: 1,
        budget: 240,
        default: false,
        about: "tables in the form of the OSU micro-benchmarks over RDMA, every byte checked, through every window",
        build: &[PUSHGATE],
        devices: &[Device { slot: 0x10, memory: Memory::Own(4) }],
        module: true,
        siw: false,
        package: false,
        host: None,
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/outside.sh"),
            include_str!("suites/osu.sh")
        ),
    },
    Suite {
        name: "driver-gpu",
        guests: 1,
        budget: 400,
        default: false,
        about: "a GPU of the host pushes into a BAR of the guest (--pack takes it to a host with a GPU)",
        build: &[OUTSIDE],
        devices: &[Device { slot: 0x12, memory: Memory::Shared }],
        module: true,
        siw: false,
        package: false,
        host: Some(concat!("DEVICE=cuda THREADS=256\n", include_str!("suites/driver_host.sh"))),
        script: concat!(
            include_str!("suites/allreduce.sh"),
            include_str!("suites/outside.sh"),
            include_str!("suites/driver_gpu.sh")
        ),
    },
    Suite {
        name: "package",
        guests: 1,
        budget: 900,
        default: false,
        about: "the Debian package: installed, built by dkms, loaded, devices of its group, removed, nothing left",
        build: &[DRIVER_TESTS],
        devices: IVSHMEM,
        module: true,
        siw: false,
        package: true,
        host: None,
        script: include_str!("suites/package.sh"),
    },
];

/// Four functions for the driver: two with memory of their own, and two peers that share one memory
/// and ring each other.
const IVSHMEM: &[Device] = &[
    Device { slot: 0x10, memory: Memory::Own(4) },
    Device { slot: 0x11, memory: Memory::Own(4) },
    Device { slot: 0x12, memory: Memory::Shared },
    Device { slot: 0x13, memory: Memory::Shared },
];

/// The functions of [`IVSHMEM`], and two devices of other drivers: a network card below a port, where errors reach it as they reach a
/// card in a slot, and a disk.
const DRIVER: &[Device] = &[
    IVSHMEM[0],
    IVSHMEM[1],
    IVSHMEM[2],
    IVSHMEM[3],
    Device {
        slot: 0x14,
        memory: Memory::Other(&[
            "-device",
            "pcie-root-port,id=slot1,chassis=1,slot=1,x-speed=5,addr=SLOT",
            "-device",
            "e1000e,romfile=,bus=slot1",
        ]),
    },
    Device {
        slot: 0x15,
        memory: Memory::Other(&[
            "-blockdev",
            "driver=null-co,node-name=disk,size=1048576,read-zeroes=on",
            "-device",
            "nvme,serial=pushgate,drive=disk,addr=SLOT",
        ]),
    },
];

/// The names of all suites.
pub fn names() -> impl Iterator<Item = &'static str> {
    SUITES.iter().map(|suite| suite.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::STEPS;

    #[test]
    fn names_are_unique_and_plain() {
        let mut sorted: Vec<_> = names().collect();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), SUITES.len());
        // The names become names of files and stand in scripts.
        assert!(sorted.iter().all(|n| n.chars().all(|c| c.is_ascii_lowercase() || c == '-')));
    }

    #[test]
    fn every_suite_can_run() {
        for suite in SUITES {
            assert!((1..=2).contains(&suite.guests), "{}", suite.name);
            let is_known = |call: &&[&str]| matches!(call[0], "build" | "test");
            assert!(suite.build.iter().all(is_known), "{}", suite.name);
        }
    }

    #[test]
    fn budgets_fit_into_the_steps() {
        for (name, guests) in [("vm", 1), ("vm-pair", 2)] {
            let budget = STEPS.iter().find(|step| step.name == name).unwrap().budget;
            let suites = SUITES.iter().filter(|suite| suite.default && suite.guests == guests);
            assert!(suites.map(|suite| suite.budget).sum::<u64>() < budget, "{name}");
        }
    }
}
