//! What a report is made of. The only part of it that looks at the host.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::ArgMatches;
use pushgate::settings::PluginSettings;
use pushgate_doctor::{self as doctor, Roots};
use pushgate_pcie_model::findings::Findings;
use pushgate_pcie_model::whole;
use pushgate_topology::{self as topology, Sysfs, nvml};

use super::super::{doctor as checks, probe, topo};
use crate::exit::Input;

/// All that a page shows.
#[derive(Clone, Debug)]
pub struct Facts {
    /// When it was made, as in 2026-01-31T23:59:59Z.
    pub date: String,
    /// The host's name.
    pub host: String,
    /// Components and their versions.
    pub versions: Vec<(String, String)>,
    /// The tree, judged.
    pub topology: topology::Report,
    /// What a probe found, or why there is nothing and what to do.
    pub findings: Result<Findings, String>,
    /// What a reader must know of them.
    pub beware: Vec<String>,
    /// What the doctor says.
    pub doctor: doctor::Report,
    /// The settings in force, as far as they are right.
    pub settings: PluginSettings,
    /// What is wrong with the rest.
    pub wrong_setting: Option<String>,
}

/// Who runs the kernels of findings of this host: a GPU's first, then those of a host without one.
const EXECUTORS: [&str; 2] = ["cuda", "cpu"];

/// Looks at the host.
///
/// # Errors
/// A file that was named and can't be read, or is none of its kind.
pub fn gather(m: &ArgMatches) -> Result<Facts> {
    let file = |name: &str| m.get_one::<String>(name).map(String::as_str);
    let (settings, told) = checks::settings(m);
    let wrong_setting = told.as_ref().err().cloned().or_else(|| Some(settings.check().err()?.to_string()));

    let tree = topo::topology("/sys", "/proc", file("topology"))?;
    let prints = EXECUTORS.map(|executor| Sysfs::host().read().fingerprint(executor));
    let findings = match file("findings") {
        Some(path) => Ok(Findings::load(Path::new(path)).map_err(|e| Input(e.to_string()))?),
        None => kept(&prints),
    };
    let mut beware = Vec::new();
    if let Ok(f) = &findings {
        if !prints.contains(&f.topology) {
            beware.push(format!(
                "the probe's file is of the topology {}, and this host's is {}: its figures are another host's, or \
                 this one's before it was changed. `pushgate probe` measures this one.",
                f.topology, prints[0]
            ));
        }
        if f.executor == "cpu" {
            beware.push(
                "the probe found no GPU: its figures are memory copies by this CPU, and say nothing of PCIe."
                    .into(),
            );
        }
    }
    // As for `pushgate topo`: advice on GPUs takes figures of GPUs alone.
    let measured = findings.as_ref().ok().filter(|f| f.executor == "cuda");
    let topology = topo::judged(&tree, measured);

    let all = doctor::named(&[]).unwrap_or_default();
    let doctor = doctor::run(&all, &Roots::host(), checks::wants(&settings, told));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Facts {
        date: probe::date(now),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        versions: versions(&topology, findings.as_ref().ok()),
        topology,
        findings,
        beware,
        doctor,
        settings,
        wrong_setting,
    })
}

/// What is kept of this host. The error is a sentence with its remedy.
fn kept(prints: &[String]) -> Result<Findings, String> {
    let mut wrong = None;
    for print in prints {
        match Findings::kept(print) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            Err(e) => wrong = wrong.or(Some(e.to_string())),
        }
    }
    Err(wrong.unwrap_or_else(|| {
        "no probe has measured this host: run `pushgate probe`, then this again; --findings FILE names a file that \
         is kept elsewhere."
            .into()
    }))
}

fn versions(report: &topology::Report, findings: Option<&Findings>) -> Vec<(String, String)> {
    let uname = rustix::system::uname();
    let text = |s: &std::ffi::CStr| s.to_string_lossy().into_owned();
    let machine = &report.topology.machine;
    let mut all = vec![
        ("pushgate".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        (text(uname.sysname()), format!("{} ({})", text(uname.release()), text(uname.machine()))),
    ];
    all.push((
        "NVIDIA driver".to_owned(),
        machine.nvidia_driver.clone().unwrap_or_else(|| match nvml::read() {
            Ok(_) => "loaded, and does not tell its version".into(),
            Err(why) => format!("not here ({why})"),
        }),
    ));
    for executor in pushgate::available_executors() {
        let state = match executor.state {
            Ok(what) => what.to_string(),
            Err(why) => format!("not available: {why}"),
        };
        all.push((format!("executor {}", executor.name), state));
    }
    if let Some(f) = findings {
        all.push(("driver when the probe ran".to_owned(), f.driver.clone()));
        all.push(("format of the probe's file".to_owned(), f.format.to_string()));
    }
    all
}

/// Refuses what a page can't be written over.
///
/// # Errors
/// Something is there, and `force` is not set; or it is no file.
pub fn may_write(path: &Path, force: bool) -> Result<()> {
    whole::may_replace(path)?;
    if path.exists() && !force {
        bail!("{} is there: --force writes over it, --out FILE names another", path.display());
    }
    Ok(())
}
