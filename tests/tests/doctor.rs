//! Tests `pushgate doctor` on a host that is right and on one that is wrong in seven ways, in the
//! virtual machine: `cargo xtask vm --suite doctor`. The crate's own tests (doctor/tests) cover
//! what it says about files; here the kernel provides the readings. One test, which runs anywhere,
//! covers what it says about NCCL's plugin as it is built.
//!
//! After a fault was found, the remedy that the doctor named is applied where possible, and then
//! the finding must be gone.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A user without rights.
const NOBODY: u32 = 65534;

fn sh(script: &str) {
    let status = Command::new("/bin/sh").args(["-euc", script]).status().unwrap();
    assert!(status.success(), "{status}: {script}");
}

/// The soft-RoCE device and the link below it. All tests use this one device, in turn.
const DEVICE: &str = "rxedoc";
const LINK: &str = "doc0";
const PORT: &str = "/sys/class/infiniband/rxedoc/ports/1";

/// Waits until the interface's address shows as a GID, anywhere in the table.
fn wait_for_gid() {
    let end = Instant::now() + pushgate_tests::hang();
    let has = |file: std::fs::DirEntry| {
        std::fs::read_to_string(file.path()).is_ok_and(|gid| gid.trim().ends_with("ffff:0a09:6801"))
    };
    while !std::fs::read_dir(format!("{PORT}/gids")).unwrap().flatten().any(has) {
        assert!(Instant::now() < end, "the address of {LINK} has not become a GID");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Makes the device, or repairs it if an earlier test has changed it; waits for its GID.
fn right() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if Path::new(PORT).exists() {
        sh(&format!("ip link set dev {LINK} mtu 4200 up; ip address replace 10.9.104.1/24 dev {LINK}"));
        wait_for_gid();
    } else {
        sh(&format!(". /run/vm/lib.sh; dummy {LINK} 10.9.104.1/24; rxe {DEVICE} {LINK}"));
    }
    guard
}

fn doctor() -> Doctor {
    Doctor::default().with(&["--qp", "verbs", "--ib-dev", DEVICE])
}

/// The status with which this one check ended.
fn status(check: &str) -> String {
    doctor().with(&["--only", check]).look().status(check).to_string()
}

/// How the doctor is called.
#[derive(Clone, Default)]
struct Doctor {
    arguments: Vec<String>,
    /// Run in a mount namespace of its own, after these commands.
    before: Option<String>,
    /// Run with this limit of locked memory in KiB, as a user without rights.
    memlock: Option<&'static str>,
}

impl Doctor {
    fn with(mut self, arguments: &[&str]) -> Doctor {
        self.arguments.extend(arguments.iter().map(ToString::to_string));
        self
    }

    fn command(&self) -> Command {
        let program = std::env::var_os("BIN_PUSHGATE").expect("the suite names the program");
        let mut command = match (&self.before, self.memlock) {
            (Some(before), _) => {
                let mut unshare = Command::new("unshare");
                unshare.args(["-m", "/bin/sh", "-euc", &format!("{before}\nexec \"$0\" \"$@\"")]);
                unshare
            }
            (None, Some(limit)) => {
                let mut shell = Command::new("/bin/sh");
                shell
                    .args(["-euc", &format!("ulimit -l {limit}; exec \"$0\" \"$@\"")])
                    .uid(NOBODY)
                    .gid(NOBODY);
                shell
            }
            (None, None) => return self.finish(Command::new(program)),
        };
        command.arg(program);
        self.finish(command)
    }

    fn finish(&self, mut command: Command) -> Command {
        command.arg("doctor").args(&self.arguments);
        command
    }

    fn text(&self) -> (i32, String) {
        let output = self.command().output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        print!("-- {:?}\n{text}{}", self.arguments, String::from_utf8_lossy(&output.stderr));
        (output.status.code().expect("it ends by itself"), text)
    }

    fn look(&self) -> Seen {
        let (code, text) = self.clone().with(&["--json"]).text();
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("no JSON ({e}): {text}"));
        let findings = report["findings"].as_array().unwrap().clone();
        let count = |status: &str| findings.iter().filter(|f| f["status"] == status).count();
        let seen = Seen { code, findings: findings.clone() };
        for status in ["passed", "warned", "failed", "not_applicable"] {
            assert_eq!(report[status], count(status), "{status}");
        }
        let expected = if count("failed") > 0 { 2 } else { i32::from(count("warned") > 0) };
        assert_eq!(code, expected, "the exit code is that of the worst");
        for f in &findings {
            let wants_remedy = f["status"] == "warned" || f["status"] == "failed";
            assert_eq!(f["remedy"].is_string(), wants_remedy, "{f}");
        }
        seen
    }
}

struct Seen {
    code: i32,
    findings: Vec<Value>,
}

impl Seen {
    fn status(&self, check: &str) -> &str {
        let mut found = self.findings.iter().filter(|f| f["check"] == check);
        found.next().unwrap_or_else(|| panic!("no finding of {check}"))["status"].as_str().unwrap()
    }

    /// The checks that failed.
    fn failed(&self) -> Vec<&str> {
        let failed = self.findings.iter().filter(|f| f["status"] == "failed");
        failed.map(|f| f["check"].as_str().unwrap()).collect()
    }

    /// Checks that a check ended with this status, this reading and this remedy.
    fn says(&self, check: &str, status: &str, reading: &str, remedy: &str) {
        let of = |f: &&Value| f["check"] == check && f["status"] == status;
        let found = self.findings.iter().find(of);
        let found = found.unwrap_or_else(|| panic!("{check} is {}, not {status}", self.status(check)));
        let has = |key: &str, words: &str| found[key].as_str().is_some_and(|text| text.contains(words));
        assert!(has("reading", reading), "not {reading:?}: {found}");
        assert!(has("remedy", remedy), "not {remedy:?}: {found}");
    }
}

const RDMA: [&str; 8] = [
    "rdma-devices",
    "rdma-verbs",
    "rdma-port",
    "rdma-gid",
    "rdma-gid-type",
    "rdma-address",
    "rdma-write-order",
    "rdma-mtu",
];

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn nothing_fails_where_soft_roce_is_right() {
    let _device = right();
    let seen = doctor().look();
    assert_eq!(seen.failed(), [""; 0]);
    for check in RDMA.into_iter().chain(["settings", "memlock", "memfd", "process-vm-readv"]) {
        assert_eq!(seen.status(check), "passed", "{check}");
    }
    // A user without rights sees the same. Without the warnings about this guest's memory there is
    // nothing to report.
    let only = [&RDMA[..], &["memlock"]].concat().join(",");
    let (code, text) = Doctor { memlock: Some("unlimited"), ..doctor() }.with(&["--only", &only]).text();
    assert_eq!(code, 0);
    assert_eq!(text.lines().last(), Some("9 passed, 0 warned, 0 failed, 0 not applicable"));
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_port_that_is_down_is_found() {
    let _device = right();
    sh(&format!("ip link set dev {LINK} down"));
    let seen = doctor().look();
    let remedy = format!("ip link set dev {LINK} up");
    seen.says("rdma-port", "failed", "DOWN", &remedy);
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-port"], 2), "and nothing that follows from it");
    sh(&remedy);
    assert_eq!(status("rdma-port"), "passed");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn an_interface_of_mtu_1500_is_found() {
    let _device = right();
    sh(&format!("ip link set {LINK} mtu 1500"));
    let seen = doctor().look();
    let remedy = format!("ip link set dev {LINK} mtu 4200");
    seen.says("rdma-mtu", "warned", "path MTU 1024", &remedy);
    assert_eq!((seen.failed(), seen.code), (vec![], 1));
    sh(&remedy);
    let (code, text) = doctor().with(&["--only", "rdma-mtu"]).text();
    assert_eq!(code, 0);
    assert!(text.starts_with("passed  rdma-mtu  rxedoc/1: path MTU 4096"), "{text}");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn an_interface_without_an_address_is_found() {
    let _device = right();
    let remedy = format!("ip address add ADDRESS/LENGTH dev {LINK}");
    sh(&format!("ip -4 address flush dev {LINK}"));
    // The address that the kernel assigns by itself reaches only the link. (Set again, because it
    // may be gone.)
    sh(&format!("ip link set dev {LINK} down; ip link set dev {LINK} up"));
    let seen = doctor().with(&["--only", "rdma-address"]).look();
    seen.says("rdma-address", "warned", "only a link-local address", &remedy);
    // The entry that the kernel makes from the interface's hardware address stays all the same.
    sh(&format!("ip address flush dev {LINK}"));
    let seen = doctor().look();
    seen.says("rdma-address", "failed", "it has no address", &remedy);
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-address"], 2));
    sh(&remedy.replace("ADDRESS/LENGTH", "10.9.104.1/24"));
    wait_for_gid();
    assert_eq!(status("rdma-address"), "passed");
}

/// The kernel keeps an entry for each interface, so soft-RoCE never has an empty table: a folder of
/// empty entries, as the kernel shows them, is mounted over the table.
#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_port_without_a_gid_is_found() {
    let _device = right();
    let before = format!(
        "mount -t tmpfs none {PORT}/gids\n\
         for i in 0 1 2; do echo 0000:0000:0000:0000:0000:0000:0000:0000 >{PORT}/gids/$i; done"
    );
    let seen = Doctor { before: Some(before), ..doctor() }.look();
    seen.says("rdma-gid", "failed", "no GID", &format!("dev {LINK}"));
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-gid"], 2), "and nothing that follows from it");
}

/// Soft-RoCE supports only v2, so the files with an entry's type are replaced by mounts with what
/// the kernel says for v1.
#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn roce_v1_alone_is_found() {
    let _device = right();
    let before = format!(
        "echo 'IB/RoCE v1' >/tmp/v1\nfor i in 0 1; do mount --bind /tmp/v1 {PORT}/gid_attrs/types/$i; done"
    );
    let seen = Doctor { before: Some(before), ..doctor() }.look();
    seen.says("rdma-gid-type", "warned", "RoCE v1 alone", "offer RoCE v2");
    assert_eq!((seen.failed(), seen.code), (vec![], 1));
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_low_limit_of_locked_memory_is_found() {
    let _device = right();
    let seen = Doctor { memlock: Some("64"), ..doctor() }.look();
    seen.says("memlock", "failed", "not one fits", "ulimit -l unlimited");
    assert_eq!((seen.failed(), seen.code), (vec!["memlock"], 2));
    let seen = Doctor { memlock: Some("8192"), ..doctor() }.with(&["--only", "memlock"]).look();
    seen.says("memlock", "warned", "2 fit", "LimitMEMLOCK=infinity");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_module_that_is_not_loaded_is_found() {
    let _device = right();
    if Path::new("/sys/module/pushgate").exists() {
        sh("rmmod pushgate");
    }
    assert_eq!(status("module"), "not_applicable", "a memory window needs none");
    let seen = doctor().with(&["--window", "staging"]).look();
    seen.says("module", "failed", "the module pushgate is not loaded", "sudo modprobe pushgate");
    assert_eq!((seen.failed(), seen.code), (vec!["module"], 2));
    sh("insmod \"$KMOD_DIR/pushgate.ko\"");
    let staging = doctor().with(&["--window", "staging", "--only", "module"]);
    assert_eq!(staging.look().status("module"), "passed");
    // The module is loaded, but this user may not open its device.
    let user = Doctor { memlock: Some("unlimited"), ..staging.clone() }.look();
    user.says("module", "failed", "Permission denied", "group pushgate");
    // No function is bound, so there is no BAR.
    let bar = doctor().with(&["--window", "bar", "--only", "module"]).look();
    bar.says("module", "failed", "no PCI function", "drivers_probe");
    sh("rmmod pushgate");
}

const CHILD: &str = "DOCTOR_TEST_CHILD";

/// Run by the next test with an environment of its own, because libraries that were opened stay.
#[test]
#[ignore = "another test starts this in processes of its own"]
fn looks_at_nccl() {
    assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
    let checks = pushgate_doctor::named(&["nccl".into(), "nccl-plugin".into()]).unwrap();
    let report = pushgate_doctor::run(&checks, &pushgate_doctor::Roots::host(), Default::default());
    println!("\nreport {}", serde_json::to_string(&report).unwrap());
}

/// The findings of `nccl` and `nccl-plugin` in this environment.
fn nccl(variables: &[(&str, &Path)]) -> Seen {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "looks_at_nccl", "--ignored", "--nocapture"]).env(CHILD, "1");
    for name in
        ["LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT", "VIRTUAL_ENV", "CONDA_PREFIX"]
    {
        child.env_remove(name);
    }
    let output = child.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.lines().find_map(|line| line.strip_prefix("report "));
    let report = report.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let report: Value = serde_json::from_str(report).unwrap();
    Seen { code: 0, findings: report["findings"].as_array().unwrap().clone() }
}

#[test]
fn the_plugin_is_found_as_nccl_would_find_it() {
    let built = pushgate_tests::built::plugin();
    let folder = pushgate_tests::built::scratch(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("doctor-nccl-{}", std::process::id()));
    let site = folder.join("nvidia/nccl/lib");
    std::fs::create_dir_all(&site).unwrap();
    // A library that reports its version as NCCL does, and has nothing else.
    let source = folder.join("nccl.c");
    std::fs::write(&source, "int ncclGetVersion(int *v) { *v = 22809; return 0; }").unwrap();
    let stub = site.join("libnccl.so.2");
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&stub, &source]).status().unwrap();
    assert!(cc.success());
    let python = ("PUSHGATE_PYTHON_SITE", folder.as_path());

    let seen = nccl(&[python, ("NCCL_NET_PLUGIN", &built), ("NCCL_NET_PLUGIN_REF_COUNT", Path::new("1"))]);
    // A host may have NCCL itself where the linker looks first.
    if seen.findings[0]["reading"].as_str().unwrap().contains(stub.to_str().unwrap()) {
        assert_eq!(seen.findings[0]["reading"], format!("NCCL 2.28.9 ({})", stub.display()));
        let forgets = nccl(&[python, ("NCCL_NET_PLUGIN", &built)]);
        forgets.says("nccl-plugin", "warned", "forgets NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT=1");
    }
    assert_eq!((seen.status("nccl"), seen.status("nccl-plugin")), ("passed", "passed"));
    assert!(seen.findings[1]["reading"].as_str().unwrap().ends_with("tables v12, v11, v10, v9, v8"));

    // By its name, where the linker finds it.
    std::fs::copy(&built, folder.join("libnccl-net-pushgate.so")).unwrap();
    let path = ("LD_LIBRARY_PATH", folder.as_path());
    let seen = nccl(&[path, ("NCCL_NET_PLUGIN", Path::new("nosuch,pushgate"))]);
    assert_eq!(seen.status("nccl-plugin"), "passed");
    nccl(&[path]).says("nccl-plugin", "warned", "is not set", "NCCL_NET_PLUGIN=pushgate");
    assert_eq!(nccl(&[]).status("nccl-plugin"), "not_applicable");

    // A file that does not exist, a file that is no library, and a library that is no plugin.
    let absent = folder.join("absent.so");
    nccl(&[("NCCL_NET_PLUGIN", &absent)]).says(
        "nccl-plugin",
        "failed",
        "no such library",
        "cargo xtask plugin",
    );
    let text = folder.join("text.so");
    std::fs::write(&text, "no library").unwrap();
    nccl(&[("NCCL_NET_PLUGIN", &text)]).says(
        "nccl-plugin",
        "failed",
        "can't be loaded",
        "cargo xtask plugin",
    );
    nccl(&[("NCCL_NET_PLUGIN", &stub)]).says("nccl-plugin", "failed", "has no table", "cargo xtask plugin");
    std::fs::write(&stub, "no library").unwrap();
    let seen = nccl(&[python]);
    assert!(["warned", "passed"].contains(&seen.status("nccl")), "{:?}", seen.findings);
    std::fs::remove_dir_all(&folder).unwrap();
}
