//! `pushgate probe`: what this host does, in numbers, and the choice of path by them.
//! docs/probe.md says what is measured and how.

mod both;
mod check;
mod pairs;
mod rig;
mod single;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::{DeviceChoice, DeviceError, Settings};
use pushgate_gpu_kernels::{CudaExecutor, Executor, choose as choose_device, probe as probe_cuda};
use pushgate_pcie_model::findings::{self, FORMAT, Findings, Rate, Transfer, collapses};
use pushgate_topology::Sysfs;
use pushgate_topology::nvml::busy;

use self::rig::Rig;
use crate::exit::Input;
use crate::output::{out, outln};
use crate::signals;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    settings(
        Command::new("probe")
            .about("Measures this host (bandwidths, latencies, GPU to GPU) and keeps what it found, by which paths are chosen")
            .arg(switch("json", "JSON in place of tables"))
            .arg(switch("force", "Measure although other programs use a GPU"))
            .arg(switch("check", "Measure again, beside what the kept figures predict; fails above 15 %"))
            .arg(switch("choice", "Send messages each way, and the one that the choice takes"))
            .arg(
                Arg::new("out")
                    .long("out")
                    .value_name("FILE")
                    .help("File to keep it in and read it from [default: PUSHGATE_PROBE_FILE, else $XDG_CACHE_HOME/pushgate/probe-TOPOLOGY.toml]"),
            ),
    )
}

/// Progress on a terminal; nothing elsewhere.
pub struct Bar(indicatif::ProgressBar);

impl Bar {
    fn new(steps: u64, quiet: bool) -> Result<Self> {
        if quiet || !std::io::stderr().is_terminal() {
            return Ok(Self(indicatif::ProgressBar::hidden()));
        }
        let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")?;
        Ok(Self(indicatif::ProgressBar::new(steps).with_style(style)))
    }

    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    pub fn step<T>(&self, measure: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = measure();
        self.0.inc(1);
        done
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

pub fn run(m: &ArgMatches, settings: &Settings) -> Result<()> {
    let json = m.get_flag("json");
    let executors = executors(settings.device, m.get_flag("force"))?;
    // Seen between two measurements, which are short; then all is taken down in order.
    signals::catch(None);

    // Of the host, whatever CUDA_VISIBLE_DEVICES hides: who reads the findings may see others.
    let topology = Sysfs::host().read().fingerprint(executors[0].name());
    let path = match m.get_one::<String>("out") {
        Some(path) => PathBuf::from(path),
        None => Findings::path(&topology)?,
    };
    // What is wrong with kept findings matters to those alone who want to use them.
    let again = m.get_flag("check") || m.get_flag("choice");
    let kept =
        if again { Findings::kept_at(&path, &topology).map_err(|e| Input(e.to_string()))? } else { None };
    let began = Instant::now();
    let rig = Rig::new(executors)?;
    let found = match kept {
        Some(kept) => kept,
        None => {
            let found = measure(&rig, topology, json)?;
            found.save(&path)?;
            // What others will read.
            let found = Findings::load(&path)?;
            if json {
                outln!("{}", serde_json::to_string(&found)?)?;
            } else {
                summary(&found)?;
                outln!("\n{:.1} s; kept in {}", began.elapsed().as_secs_f64(), path.display())?;
            }
            found
        }
    };
    if m.get_flag("check") {
        check::against(&rig, &found, json)?;
    }
    if m.get_flag("choice") {
        check::choice(&rig, &found, json)?;
    }
    Ok(())
}

/// Every GPU, or the CPU; refuses where others are at work.
fn executors(device: DeviceChoice, force: bool) -> Result<Vec<Arc<dyn Executor>>> {
    let count = match (device, probe_cuda()) {
        (DeviceChoice::Cpu, _) => 0,
        (_, Ok(info)) => info.devices,
        (DeviceChoice::Cuda, Err(reason)) => return Err(DeviceError::CudaUnavailable { reason }.into()),
        (_, Err(_)) => 0,
    };
    if count == 0 {
        return Ok(vec![choose_device(DeviceChoice::Cpu)?.0]);
    }
    let mut executors: Vec<Arc<dyn Executor>> = Vec::new();
    for index in 0..count {
        let gpu = CudaExecutor::new(index)?;
        match busy(gpu.pci_bus_id()) {
            Ok(busy) if !busy.processes.is_empty() && !force => bail!(
                "device {index} ({}) is used by {} other process(es) ({}); their speed and these figures would \
                 suffer: stop them, hide the device with CUDA_VISIBLE_DEVICES, or say --force",
                gpu.pci_bus_id(),
                busy.processes.len(),
                busy.processes.iter().take(8).map(u32::to_string).collect::<Vec<_>>().join(", ")
            ),
            Ok(busy) if busy.utilization.unwrap_or(0) > 5 && !force => bail!(
                "device {index} ({}) is at work ({} % of the last second), for a program that does not show: wait \
                 for it, hide the device with CUDA_VISIBLE_DEVICES, or say --force",
                gpu.pci_bus_id(),
                busy.utilization.unwrap_or(0)
            ),
            Ok(_) => {}
            Err(reason) => tracing::warn!("nobody can say whether device {index} is in use: {reason}"),
        }
        executors.push(Arc::new(gpu));
    }
    Ok(executors)
}

fn measure(rig: &Rig, topology: String, quiet: bool) -> Result<Findings> {
    let pairs = pairs::all(rig);
    let counts = both::counts(rig);
    let alone = (0..rig.units.len()).map(|u| single::steps(rig, u)).sum::<u64>();
    let steps = alone + pairs.len() as u64 + 1 + counts.len() as u64;
    let bar = Bar::new(steps, quiet)?;
    let devices = (0..rig.units.len())
        .map(|unit| single::device(rig, unit, &bar).with_context(|| rig.units[unit].pci.clone()))
        .collect::<Result<Vec<_>>>()?;
    let pairs = pairs
        .into_iter()
        .map(|(a, b)| bar.step(|| pairs::pair(rig, a, b, &bar)))
        .collect::<Result<Vec<_>>>()?;
    let writers = bar.step(|| pairs::writers(rig))?;
    let both =
        counts.into_iter().map(|n| bar.step(|| both::both(rig, n, &bar))).collect::<Result<Vec<_>>>()?;
    // Bounce is no transfer of its own, and its memcpy knows several caches.
    let lines = devices.iter().flat_map(|d| &d.lines).filter(|l| l.way != Transfer::Bounce);
    let worst_error = lines.map(|l| l.worst).fold(0.0, f64::max);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Findings {
        format: FORMAT,
        date: date(now),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        executor: rig.units[0].executor.name().to_owned(),
        driver: match probe_cuda() {
            Ok(info) if !rig.is_cpu() => format!("CUDA {}.{}", info.driver.0, info.driver.1),
            _ => "none".to_owned(),
        },
        topology,
        worst_error,
        devices,
        pairs,
        writers,
        both: both.concat(),
    })
}

/// A time since 1970 in UTC, as RFC 3339 has it. Days to a date: H. Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
pub fn date(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let days = seconds / 86400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (month, day) =
        (if shifted < 10 { shifted + 3 } else { shifted - 9 }, of_year - (153 * shifted + 2) / 5 + 1);
    let year = year + era * 400 + u64::from(month <= 2);
    let (h, m, s) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}Z")
}

pub fn size(bytes: u64) -> String {
    match bytes {
        n if n >= 1 << 20 && n % (1 << 20) == 0 => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 && n % (1 << 10) == 0 => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

fn rates(what: &str, rates: &[Rate], width: u32) -> Result<()> {
    let of: Vec<String> = rates
        .iter()
        .filter(|r| r.width == width)
        .map(|r| format!("{} blocks {:.1}", r.blocks, r.rate))
        .collect();
    Ok(outln!("  {what:<28} {}", of.join(", "))?)
}

fn summary(found: &Findings) -> Result<()> {
    outln!(
        "{}, executor {}, driver {}, topology {}",
        found.host,
        found.executor,
        found.driver,
        found.topology
    )?;
    for d in &found.devices {
        outln!("\ndevice {}: {} at {}", d.index, d.name, d.pci)?;
        if found.executor == "cpu" {
            outln!("  no GPU: these are memory copies of this CPU")?;
        }
        for width in [4, 8, 16] {
            rates(&format!("stores of {width} B, GB/s"), &d.stores, width)?;
        }
        if d.stores.iter().any(|r| r.width == 0) {
            rates("bulk stores, GB/s", &d.stores, 0)?;
        }
        rates("loads of 16 B, GB/s", &d.loads, 16)?;
        let writers: Vec<String> = d.writers.iter().map(|w| format!("{} {:.1}", w.n, w.rate)).collect();
        outln!("  {:<28} {}", "writers at once, GB/s", writers.join(", "))?;
        outln!("  one way, us: flag {:.2}, 64 B {:.2}; empty kernel {:.1}", d.flag, d.record, d.launch)?;
        table(&d.lines)?;
    }
    for p in &found.pairs {
        let peer = p.peer_record.map_or(String::new(), |us| format!(", in the peer's memory {us:.2}"));
        outln!("\n{} to {}: 64 B one way {:.2} us{peer}; messages, host to host:", p.from, p.to, p.record)?;
        table(&p.lines)?;
    }
    if !found.writers.is_empty() {
        let writers: Vec<String> = found.writers.iter().map(|w| format!("{} {:.1}", w.n, w.rate)).collect();
        outln!("\ndevices writing to host memory at once, GB/s: {}", writers.join(", "))?;
    }
    for row in found.both.chunk_by(|a, b| a.devices == b.devices) {
        let (n, s) = (row[0].devices, if row[0].devices == 1 { "" } else { "s" });
        let rates: Vec<String> = row.iter().map(|b| format!("{} {:.1}", size(b.bytes), b.rate)).collect();
        outln!("\nboth ways at once, {n} device{s}, GB/s each way: {}", rates.join(", "))?;
    }
    for writers in std::iter::once(&found.writers).chain(found.devices.iter().map(|d| &d.writers)) {
        if let Some(w) = collapses(writers) {
            outln!(
                "COLLAPSE: {} writers at once reach {:.1} GB/s together, less than half of fewer",
                w.n,
                w.rate
            )?;
        }
    }
    Ok(())
}

fn table(lines: &[findings::Line]) -> Result<()> {
    let ways: String = lines.iter().map(|line| format!(" {:>20}", line.way)).collect();
    outln!("  {:>8}{ways}", "")?;
    let Some(first) = lines.first() else { return Ok(()) };
    for (i, (bytes, _)) in first.points.iter().enumerate() {
        out!("  {:>8}", size(*bytes))?;
        for line in lines {
            let (n, us) = line.points[i];
            out!(" {us:>9.2} us {:>6.2} G", n as f64 / us / 1e3)?;
        }
        outln!()?;
    }
    out!("  {:>8}", "fitted")?;
    for l in lines {
        out!(" {:>20}", format!("{:.1} + n/{:.1}, {:.0} %", l.curve.fixed, l.curve.rate, l.worst * 100.0))?;
    }
    Ok(outln!()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let at = |s| date(Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
