//! `pushgate doctor` on a host that is right and on one that is wrong in seven ways, in the virtual
//! machine: `cargo xtask vm --suite doctor`. What it says about files alone is tested with the crate
//! (doctor/tests); here the kernel says it.
//!
//! Each test has a soft-RoCE device and a link of its own. After what is wrong was found, the remedy
//! that was named is applied where it can be, and the finding must be gone.

use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::Value;

/// A user without any right.
const NOBODY: u32 = 65534;

fn sh(script: &str) {
    let status = Command::new("/bin/sh").args(["-euc", script]).status().unwrap();
    assert!(status.success(), "{status}: {script}");
}

/// A soft-RoCE device over a link, both gone at the end.
struct Device {
    name: String,
    link: String,
}

impl Device {
    fn new(number: u8) -> Device {
        let (name, link) = (format!("rxedoc{number}"), format!("doc{number}"));
        sh(&format!(". /run/vm/lib.sh; dummy {link} 10.9.{}.1/24; rxe {name} {link}", 100 + number));
        Device { name, link }
    }

    fn doctor(&self) -> Doctor {
        Doctor::default().with(&["--qp", "verbs", "--ib-dev", &self.name])
    }

    fn port(&self) -> String {
        format!("/sys/class/infiniband/{}/ports/1", self.name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for (program, what) in [("rdma", &self.name), ("ip", &self.link)] {
            let _ = Command::new(program).args(["link", "delete", what]).status();
        }
    }
}

/// How the doctor is called.
#[derive(Clone, Default)]
struct Doctor {
    arguments: Vec<String>,
    /// In a mount namespace of its own, after these commands.
    before: Option<String>,
    /// With this limit of locked memory in KiB, by a user without rights.
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

    /// This check ended so, says this, and names this remedy.
    fn says(&self, check: &str, status: &str, reading: &str, remedy: &str) {
        let of = |f: &&Value| f["check"] == check && f["status"] == status;
        let found = self.findings.iter().find(of);
        let found = found.unwrap_or_else(|| panic!("{check} is {}, not {status}", self.status(check)));
        let has = |key: &str, words: &str| found[key].as_str().is_some_and(|text| text.contains(words));
        assert!(has("reading", reading), "not {reading:?}: {found}");
        assert!(has("remedy", remedy), "not {remedy:?}: {found}");
    }
}

const RDMA: [&str; 7] =
    ["rdma-devices", "rdma-verbs", "rdma-port", "rdma-gid", "rdma-gid-type", "rdma-address", "rdma-mtu"];

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn nothing_fails_where_soft_roce_is_right() {
    let device = Device::new(1);
    let seen = device.doctor().look();
    assert_eq!(seen.failed(), [""; 0]);
    for check in RDMA.into_iter().chain(["settings", "memlock", "memfd", "process-vm-readv", "io-uring"]) {
        assert_eq!(seen.status(check), "passed", "{check}");
    }
    // Without the warnings that are about this guest's memory it has nothing to say.
    let (code, text) = device.doctor().with(&["--only", &RDMA.join(",")]).text();
    assert_eq!(code, 0);
    assert_eq!(text.lines().last(), Some("7 passed, 0 warned, 0 failed, 0 not applicable"));
    // A user without rights sees the same.
    let user = Doctor { memlock: Some("unlimited"), ..device.doctor() }.look();
    assert_eq!(user.failed(), [""; 0]);
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_port_that_is_down_is_found() {
    let device = Device::new(2);
    sh(&format!("ip link set {} down", device.link));
    let seen = device.doctor().look();
    seen.says("rdma-port", "failed", "DOWN", &format!("ip link set dev {} up", device.link));
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-port"], 2), "and nothing that follows from it");
    // Where other devices could be taken it is a warning.
    let any = Doctor::default().with(&["--qp", "verbs", "--only", "rdma-port"]).look();
    any.says("rdma-port", "warned", "another is active", &format!("ip link set dev {} up", device.link));
    sh(&format!("ip link set dev {} up", device.link));
    assert_eq!(device.doctor().look().status("rdma-port"), "passed");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn an_interface_of_mtu_1500_is_found() {
    let device = Device::new(3);
    sh(&format!("ip link set {} mtu 1500", device.link));
    let seen = device.doctor().look();
    let remedy = format!("ip link set dev {} mtu 4200", device.link);
    seen.says("rdma-mtu", "warned", "path MTU 1024", &remedy);
    assert_eq!(seen.failed(), [""; 0]);
    let (code, text) = device.doctor().with(&["--only", "rdma-mtu"]).text();
    assert_eq!(code, 1);
    assert!(text.lines().nth(1).is_some_and(|line| line.trim_start().starts_with(&format!("-> {remedy}"))));
    sh(&remedy);
    assert_eq!(device.doctor().look().status("rdma-mtu"), "passed");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn an_interface_without_an_address_is_found() {
    let device = Device::new(4);
    let remedy = format!("ip address add ADDRESS/LENGTH dev {}", device.link);
    sh(&format!("ip -4 address flush dev {}", device.link));
    // What the kernel gives it by itself, if it does, reaches the link alone.
    let seen = device.doctor().look();
    seen.says("rdma-address", "warned", "only a link-local address", &remedy);
    // The entry that the kernel makes of the interface's hardware address stays all the same.
    sh(&format!("ip address flush dev {}", device.link));
    let seen = device.doctor().look();
    seen.says("rdma-address", "failed", "it has no address", &remedy);
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-address"], 2));
    sh(&remedy.replace("ADDRESS/LENGTH", "10.9.104.1/24"));
    sh(&format!("until grep -q 0a09:6801 {}/gids/1; do sleep 0.05; done", device.port()));
    assert_eq!(device.doctor().look().status("rdma-address"), "passed");
}

/// The kernel keeps an entry for each interface that is there, so one without is not to be had of
/// soft-RoCE: a folder of empty entries, as the kernel shows those, is mounted over the table.
#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_port_without_a_gid_is_found() {
    let device = Device::new(5);
    let before = format!(
        "mount -t tmpfs none {0}/gids\n\
         for i in 0 1 2; do echo 0000:0000:0000:0000:0000:0000:0000:0000 >{0}/gids/$i; done",
        device.port()
    );
    let seen = Doctor { before: Some(before), ..device.doctor() }.look();
    seen.says("rdma-gid", "failed", "no GID", &format!("dev {}", device.link));
    assert_eq!((seen.failed(), seen.code), (vec!["rdma-gid"], 2), "and nothing that follows from it");
    assert_eq!(device.doctor().look().status("rdma-gid"), "passed");
}

/// Soft-RoCE is v2 alone, so the files that tell an entry's type are others, mounted over them, which
/// say what the kernel says of v1.
#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn roce_v1_alone_is_found() {
    let device = Device::new(6);
    let before = format!(
        "echo 'IB/RoCE v1' >/tmp/v1\nfor i in 0 1; do mount --bind /tmp/v1 {}/gid_attrs/types/$i; done",
        device.port()
    );
    let seen = Doctor { before: Some(before), ..device.doctor() }.look();
    seen.says("rdma-gid-type", "warned", "RoCE v1 alone", "offer RoCE v2");
    assert_eq!(seen.failed(), [""; 0]);
    assert_eq!(device.doctor().look().status("rdma-gid-type"), "passed");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_low_limit_of_locked_memory_is_found() {
    let device = Device::new(7);
    let with = |limit| Doctor { memlock: Some(limit), ..device.doctor() }.look();
    let none = with("64");
    none.says("memlock", "failed", "not one fits", "ulimit -l unlimited");
    assert_eq!((none.failed(), none.code), (vec!["memlock"], 2));
    with("8192").says("memlock", "warned", "2 fit", "LimitMEMLOCK=infinity");
    assert_eq!(with("unlimited").status("memlock"), "passed");
}

#[test]
#[ignore = "in the virtual machine: cargo xtask vm --suite doctor"]
fn a_module_that_is_not_loaded_is_found() {
    let device = Device::new(8);
    let loaded = || std::path::Path::new("/sys/module/pushgate").exists();
    if loaded() {
        sh("rmmod pushgate");
    }
    assert_eq!(device.doctor().look().status("module"), "not_applicable", "a memory window needs none");
    let staging = device.doctor().with(&["--window", "staging"]);
    let seen = staging.look();
    seen.says("module", "failed", "the module pushgate is not loaded", "sudo modprobe pushgate");
    assert_eq!((seen.failed(), seen.code), (vec!["module"], 2));
    sh("insmod \"$KMOD_DIR/pushgate.ko\"");
    assert_eq!(staging.look().status("module"), "passed");
    // Loaded, and this user may not open it.
    let user = Doctor { memlock: Some("unlimited"), ..staging.clone() }.look();
    user.says("module", "failed", "Permission denied", "group pushgate");
    // No function is bound, so there is no BAR.
    let bar = device.doctor().with(&["--window", "bar", "--only", "module"]).look();
    bar.says("module", "failed", "no PCI function", "drivers_probe");
    sh("rmmod pushgate");
}
