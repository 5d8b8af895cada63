//! Tests `pushgate probe` as a program on the CPU executor: what it prints and keeps, and what it
//! says about files that it can't read.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate_pcie_model::findings::{Device, Findings, Transfer};
use pushgate_tests::built;
use pushgate_topology::Sysfs;
use rustix::process::{Pid, Signal, kill_process};

/// The limit of one run on a busy machine, where a single kernel may take half a minute; normally a
/// run takes a second.
fn limit() -> Duration {
    4 * pushgate_tests::hang()
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pushgate-probe-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The command, in an environment without settings, keeping its findings in `folder`.
fn probe(folder: &Folder, args: &[&str]) -> Command {
    let mut command = Command::new(built::pushgate());
    command.args(["probe", "--device", "cpu"]).args(args);
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG").env_remove("PUSHGATE_PROBE_FILE");
    command.env("XDG_CACHE_HOME", &folder.0).stdin(Stdio::null());
    command
}

fn run(folder: &Folder, args: &[&str]) -> (Output, String, String) {
    let start = Instant::now();
    let output = probe(folder, args).output().unwrap();
    assert!(start.elapsed() < limit(), "{args:?} took {:?}", start.elapsed());
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

fn kept(folder: &Folder) -> Vec<PathBuf> {
    match fs::read_dir(folder.0.join("pushgate")) {
        Ok(entries) => entries.map(|e| e.unwrap().path()).collect(),
        Err(_) => Vec::new(),
    }
}

#[test]
fn a_probe_measures_and_keeps_its_findings() {
    let folder = Folder::new("keeps");
    let (output, out, err) = run(&folder, &[]);
    assert!(output.status.success(), "{err}");
    assert!(out.contains("no GPU: these are memory copies of this CPU"), "{out}");
    let files = kept(&folder);
    assert_eq!(files.len(), 1, "{files:?}");
    assert!(out.contains(&files[0].display().to_string()), "{out}");

    let found = Findings::load(&files[0]).unwrap();
    assert!(files[0].ends_with(format!("probe-{}.toml", found.topology)));
    assert_eq!((found.executor.as_str(), found.devices.len(), found.pairs.len()), ("cpu", 1, 1));
    let asked_for = Sysfs::host().read().fingerprint("cpu");
    assert_eq!(found.topology, asked_for, "`pushgate topo` and the NCCL plugin look for this name");
    assert_eq!(Findings::kept_at(&files[0], &found.topology).unwrap().as_ref(), Some(&found));
    let device = &found.devices[0];
    for way in [Transfer::Push, Transfer::Read, Transfer::CopyOut, Transfer::CopyIn, Transfer::Bounce] {
        let line = device.lines.iter().find(|l| l.way == way).unwrap();
        // From 64 B to 4 MiB.
        assert_eq!(
            line.points.iter().map(|p| p.0).collect::<Vec<_>>(),
            (3..12).map(|i| 4u64.pow(i)).collect::<Vec<_>>()
        );
        // 4 MiB take longer than 64 B; otherwise nothing was moved.
        assert!(line.points[8].1 > 10.0 * line.points[0].1, "{way}: {:?}", line.points);
    }
    for way in [Transfer::Push, Transfer::Bounce, Transfer::Pull] {
        assert!(found.line("cpu", "cpu", way).is_some(), "{way}");
    }
    let both: Vec<(u32, u64)> = found.both.iter().map(|b| (b.devices, b.bytes)).collect();
    assert_eq!(both, [(1, 1 << 20), (1, 4 << 20)]);
    assert!(out.contains("both ways at once, 1 device, GB/s each way: 1 MiB "), "{out}");
    // A file named by the variable, which is not a setting.
    let named = folder.0.join("named.toml");
    let output = probe(&folder, &[]).env("PUSHGATE_PROBE_FILE", &named).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(Findings::load(&named).unwrap().topology, found.topology);
}

#[test]
fn json_is_the_file() {
    let folder = Folder::new("json");
    let file = folder.0.join("own/name.toml");
    let name = file.to_str().unwrap();
    let (output, out, err) = run(&folder, &["--json", "--out", name]);
    assert!(output.status.success(), "{err}");
    serde_json::from_str::<Findings>(out.trim()).unwrap();
    let said = Findings::load(&file).unwrap();
    // Compared as text: a number may differ in its last bit after JSON's reader.
    assert_eq!(out.trim(), serde_json::to_string(&said).unwrap());
    assert!(kept(&folder).is_empty());

    // An additional device, which this process does not see, is not measured and causes no panic.
    let mut more = said.clone();
    more.devices.insert(0, Device { pci: "0000:01:00.0".into(), ..said.devices[0].clone() });
    more.save(&file).unwrap();
    let said = more;

    // Measured again and compared: whatever the figures, each size has its line.
    for (option, key) in [("--check", "check"), ("--choice", "choice")] {
        let (output, out, err) = run(&folder, &["--json", "--out", name, option]);
        let rows: Vec<serde_json::Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert!(rows.iter().all(|row| row.get(key).is_some()), "{out}");
        let sizes = if option == "--check" { 2 + 4 * 9 } else { 2 * 9 };
        assert_eq!(rows.len(), sizes, "{out}");
        assert_eq!(
            option == "--check",
            err.contains("0000:01:00.0 is in the findings and not seen"),
            "{err}"
        );
        // On a busy machine the findings may not hold; then the command says so.
        assert!(output.status.success() || err.contains("on an idle host"), "{err}");
    }
    assert_eq!(said, Findings::load(&file).unwrap(), "a check has changed the findings");
}

#[test]
fn findings_that_cannot_be_read_are_reported_in_a_sentence() {
    let folder = Folder::new("garbage");
    let file = folder.0.join("probe.toml");
    let name = file.to_str().unwrap();
    fs::write(&file, "format = 1\nhost = [").unwrap();
    let (output, _, err) = run(&folder, &["--check", "--out", name]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err.contains(name) && err.contains("no file of findings") && !err.contains("panicked"), "{err}");
    let (output, _, err) = run(&folder, &["--out", name]);
    assert!(output.status.success(), "{err}");
    // Findings of other devices only.
    let mut found = Findings::load(&file).unwrap();
    found.devices[0].pci = "0000:01:00.0".into();
    found.pairs.clear();
    found.save(&file).unwrap();
    for (option, word) in [("--check", "none of the devices"), ("--choice", "no messages between devices")] {
        let (output, _, err) = run(&folder, &[option, "--out", name]);
        assert!(output.status.code() == Some(1) && err.contains(word), "{err}");
    }
    // Findings of another host.
    let mut found = Findings::load(&file).unwrap();
    found.topology = "00000000000000aa".into();
    found.save(&file).unwrap();
    let (output, _, err) = run(&folder, &["--choice", "--out", name]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err.contains("00000000000000aa"), "{err}");
    let (output, _, err) = run(&folder, &["--out", "/dev/null/no/probe.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("/dev/null/no/probe.toml"), "{err}");
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    let folder = Folder::new("interrupt");
    for wait in [5, 60, 150] {
        let mut child = probe(&folder, &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        let start = Instant::now();
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > limit() {
                child.kill().unwrap();
                panic!("it did not end after an interrupt");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            // The run ended before the interrupt.
            Some(0) => kept(&folder).iter().for_each(|path| fs::remove_file(path).unwrap()),
            Some(130) => assert_eq!(err, "pushgate: interrupted; nothing was kept\n"),
            // The signal came before the run could handle it.
            None => {}
            other => panic!("{other:?}: {err}"),
        }
        let left = kept(&folder);
        assert!(left.is_empty(), "{left:?}");
    }
}
