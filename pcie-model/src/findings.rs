//! What a probe of this host found, as kept in a file: the raw readings, and the curves fitted to
//! them.
//!
//! This module serves the writer (`pushgate probe`) and the readers (`pushgate topo`, the NCCL
//! plugin). The file is TOML. Everything wrong with it is reported in a sentence, and nothing has
//! to trust the file: numbers are checked here, and a wrong choice of path costs time, never bytes.

use std::collections::HashSet;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::curve::Curve;
use crate::parameters::Parameters;
use crate::transfers::{fit_interval, flag_round_trip};
use crate::whole;

/// Version of the format. Other versions are refused, because a new probe takes only seconds.
pub const FORMAT: u32 = 1;

/// Environment variable that names the file to use in place of the one below the cache folder.
pub const VARIABLE: &str = "PUSHGATE_PROBE_FILE";

const MOST_BYTES: u64 = 4 << 20;

/// The most writers at once, and so the most figures of them: each is compared with each.
const MOST_WRITERS: usize = 256;

/// The most figures of devices that store and load at once.
const MOST_BOTH: usize = 256;

/// The part of the best rate that counts as reaching it.
/// Two runs of a probe differ by up to 5 %.
const NEARLY_BEST: f64 = 0.9;

/// Why a file of findings can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindingsError {
    /// The file can't be read or written.
    #[error("findings {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not one of findings.
    #[error("findings {}: {reason}; run `pushgate probe` to write it again", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// There is no folder to keep the file in.
    #[error("no folder for findings: set XDG_CACHE_HOME or HOME, or name a file with {VARIABLE} or --out")]
    NoFolder,
}

/// Everything that one run of the probe found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    /// The version of the format, [`FORMAT`].
    pub format: u32,
    /// When the probe ran, like 2026-01-31T23:59:59Z.
    pub date: String,
    /// The host's name.
    pub host: String,
    /// What ran the kernels: "cuda", or "cpu" if there was no GPU (then the figures are those of
    /// memcpy).
    pub executor: String,
    /// A description of the driver.
    pub driver: String,
    /// The topology for which the findings hold: 16 hexadecimal digits.
    pub topology: String,
    /// The largest relative error of the devices' curves (push, read, copies) at their own points.
    pub worst_error: f64,
    /// Findings of each device by itself.
    pub devices: Vec<Device>,
    /// Messages between devices; with only one device, from that device to itself.
    #[serde(default)]
    pub pairs: Vec<Pair>,
    /// Several devices writing to host memory at once.
    #[serde(default)]
    pub writers: Vec<Writers>,
    /// Several devices that store to and load from host memory at once, in order of devices, then of
    /// bytes. Empty in files of probes that did not measure it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub both: Vec<Both>,
}

/// Findings of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The device's index among those that the probe saw.
    pub index: u32,
    /// The device's name.
    pub name: String,
    /// The device's PCI address, or "cpu".
    pub pci: String,
    /// Rates of stores to host memory by width and blocks.
    pub stores: Vec<Rate>,
    /// Rates of loads from host memory by blocks.
    pub loads: Vec<Rate>,
    /// Times of single transfers by size.
    pub lines: Vec<Line>,
    /// Half of a round trip between a kernel of the device and the CPU, through 8-byte flags in
    /// host memory, in microseconds.
    pub flag: f64,
    /// Half of a round trip with records of 64 bytes, in which each word shows that it has arrived,
    /// in microseconds.
    pub record: f64,
    /// Microseconds from the call that launches an empty kernel to its end.
    pub launch: f64,
    /// Several streams of this device that store to host memory at once.
    pub writers: Vec<Writers>,
}

/// The rate of a kernel's accesses to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Bytes of one access of a thread; 0: bulk stores by the SM's copy unit.
    pub width: u32,
    /// Blocks of the kernel, with 512 threads each on a GPU.
    pub blocks: u32,
    /// Gigabytes a second.
    pub rate: f64,
}

/// What carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Transfer {
    /// A kernel's stores into a window in host memory; between devices, followed by the receiver's
    /// loads.
    Push,
    /// A kernel's loads from host memory.
    Read,
    /// The copy engine, device to host.
    CopyOut,
    /// The copy engine, host to device.
    CopyIn,
    /// Copy engines through host memory; with one device, with a memcpy between the two copies.
    Bounce,
    /// A kernel's loads from another device's memory; to a NIC, the NIC's reads.
    Pull,
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Transfer::Push => "push",
            Transfer::Read => "read",
            Transfer::CopyOut => "copy-out",
            Transfer::CopyIn => "copy-in",
            Transfer::Bounce => "bounce",
            Transfer::Pull => "pull",
        })
    }
}

/// Times of one way by size, and the curve through them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// What carried the transfers.
    pub way: Transfer,
    /// Microseconds of the host's part (a call of the driver), which the points do not contain; 0
    /// if there is none.
    pub launch: f64,
    /// Points (bytes, microseconds) in order of bytes.
    pub points: Vec<(u64, f64)>,
    /// The curve fitted to the points.
    pub curve: Curve,
    /// The largest relative error of the curve at the points.
    pub worst: f64,
}

impl Line {
    /// Fits a curve to points; `None` without a point.
    pub fn fitted(
        way: Transfer,
        launch: f64,
        points: Vec<(u64, f64)>,
        slice: u64,
        blocks: u32,
    ) -> Option<Self> {
        let curve = Curve::fitted(&points, slice, blocks)?;
        let worst = curve.worst(&points)?.0;
        Some(Self { way, launch, points, curve, worst })
    }

    /// Microseconds of a transfer of `bytes`: between two readings by a power law through them,
    /// beyond the readings by the curve.
    pub fn time(&self, bytes: u64) -> f64 {
        let after = self.points.partition_point(|(n, _)| *n < bytes);
        match (after.checked_sub(1).map(|i| self.points[i]), self.points.get(after)) {
            (_, Some((n, us))) if *n == bytes => *us,
            (Some((n0, t0)), Some((n1, t1))) => {
                let along = (bytes as f64 / n0 as f64).ln() / (*n1 as f64 / n0 as f64).ln();
                t0 * (t1 / t0).powf(along)
            }
            _ => self.curve.time(bytes),
        }
    }
}

/// Messages from one device's memory to another's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// The sender's PCI address.
    pub from: String,
    /// The receiver's PCI address.
    pub to: String,
    /// Microseconds, one way, of a 64-byte record that the receiver polls in host memory.
    pub record: f64,
    /// Microseconds, one way, of a record that the sender stores into the receiver's own memory;
    /// `None` without peer access.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_record: Option<f64>,
    /// Times from the host's word that the transfer may begin until the word that it is complete.
    pub lines: Vec<Line>,
}

/// The rate of several writers at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writers {
    /// How many writers.
    pub n: u32,
    /// Gigabytes a second of all writers together.
    pub rate: f64,
}

/// The rate of devices when each stores to host memory and loads, at the same time, what the
/// next device stores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Both {
    /// How many devices.
    pub devices: u32,
    /// Bytes of host memory under way in all: the devices store to all of it, each to its own
    /// part, over and over.
    pub bytes: u64,
    /// Gigabytes a second of each device, each way.
    pub rate: f64,
}

/// The writers that get less than half of what the best smaller number of writers gets: their
/// posted writes obstruct each other. Such hosts are known (8 GPUs behind one switch: 2.7 of 37
/// GB/s), and only a reading shows them.
pub fn collapses(writers: &[Writers]) -> Option<Writers> {
    writers.iter().find(|w| writers.iter().any(|fewer| fewer.n < w.n && w.rate < fewer.rate / 2.0)).copied()
}

impl Findings {
    /// The line of one way between two devices, by PCI address.
    pub fn line(&self, from: &str, to: &str, way: Transfer) -> Option<&Line> {
        self.pairs.iter().find(|p| p.from == from && p.to == to)?.lines.iter().find(|l| l.way == way)
    }

    /// A device by its PCI address.
    pub fn device(&self, pci: &str) -> Option<&Device> {
        self.devices.iter().find(|d| d.pci == pci)
    }

    /// The most bytes of host memory that `devices` devices may have under way in all, so that each
    /// one still gets nearly its best rate (90 %) when it stores and loads at once.
    ///
    /// `Some` is the largest number of bytes measured that did, where a larger number did not.
    /// `None`: no bound is known to be needed, because nothing was measured, or because the largest
    /// number of bytes measured did too. A lower rate at fewer bytes is no bound: short messages and
    /// other work on the host cause that.
    ///
    /// If that many devices were not measured, the figures of the next greater number count, or
    /// those of the greatest if there is none.
    pub fn under_way(&self, devices: u32) -> Option<u64> {
        let counts = || self.both.iter().map(|b| b.devices);
        let taken = counts().filter(|n| *n >= devices).min().or_else(|| counts().max())?;
        let row = || self.both.iter().filter(|b| b.devices == taken);
        let best = row().map(|b| b.rate).fold(0.0, f64::max);
        let most = row().filter(|b| b.rate >= NEARLY_BEST * best).map(|b| b.bytes).max()?;
        row().any(|b| b.bytes > most).then_some(most)
    }

    /// The model's parameters for a device: what the readings tell, and `others` for the rest.
    pub fn parameters(&self, pci: &str, others: &Parameters) -> Parameters {
        let mut p = others.clone();
        let Some(device) = self.device(pci) else { return p };
        let line = |way| device.lines.iter().find(|l| l.way == way);
        if let Some(copy) = line(Transfer::CopyOut) {
            p.copy_launch_ns = copy.curve.fixed * 1e3;
            p.copy_gbs = copy.curve.rate;
        }
        // A probe's figures are of blocks of 512 threads (docs/probe.md). If one block fills the
        // link already, its figure says nothing about the threads.
        let one_block = |rates: &[Rate]| {
            let most = rates.iter().map(|r| r.rate).fold(0.0, f64::max);
            rates.iter().find(|r| r.width == 16 && r.blocks == 1 && r.rate < 0.95 * most).map(|r| r.rate)
        };
        if let Some(rate) = one_block(&device.stores) {
            p.store_interval_ns = fit_interval(512, p.store_bytes, rate);
        }
        if let Some(rate) = one_block(&device.loads) {
            p.load_interval_ns = fit_interval(512, 8 * p.store_bytes, rate);
        }
        if let Some(read) = line(Transfer::Read) {
            // A read's trip consists of the SM's part and the bus's. The bus's part is known from
            // other devices, so the rest is the SM's.
            p.sm_ns = (read.curve.fixed * 1e3 - p.rtt_ns).max(0.0);
        }
        // The part of a flag's round trip to the CPU that is not travel.
        let trips = flag_round_trip(&[], &Parameters { cpu_turn_ns: 0.0, gpu_turn_ns: 0.0, ..p.clone() });
        let turns = (device.flag * 2e3 - trips).max(0.0);
        (p.cpu_turn_ns, p.gpu_turn_ns) = (turns / 2.0, turns / 2.0);
        p
    }

    /// The file for the findings of a topology: the one that [`VARIABLE`] names, or else
    /// `pushgate/probe-TOPOLOGY.toml` below XDG_CACHE_HOME or HOME/.cache.
    pub fn path(topology: &str) -> Result<PathBuf, FindingsError> {
        Self::path_with(topology, |name| std::env::var_os(name).map(PathBuf::from))
    }

    fn path_with(topology: &str, var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, FindingsError> {
        let set = |name: &str| var(name).filter(|path| !path.as_os_str().is_empty());
        if let Some(named) = set(VARIABLE) {
            return Ok(named);
        }
        // The base directory specification: a relative path must be ignored.
        let cache = set("XDG_CACHE_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| Some(set("HOME")?.join(".cache")))
            .ok_or(FindingsError::NoFolder)?;
        Ok(cache.join("pushgate").join(format!("probe-{topology}.toml")))
    }

    /// Loads the findings kept for a topology; `None` if there is no file.
    pub fn kept(topology: &str) -> Result<Option<Self>, FindingsError> {
        Self::kept_at(&Self::path(topology)?, topology)
    }

    /// Loads the findings of a topology from the file `path`; `None` if there is no file. Findings
    /// of another topology are an error.
    pub fn kept_at(path: &Path, topology: &str) -> Result<Option<Self>, FindingsError> {
        let found = match Self::load(path) {
            Err(FindingsError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(None);
            }
            found => found?,
        };
        if found.topology != topology {
            let reason = format!("is of topology {}, and this is {topology}", found.topology);
            return Err(FindingsError::Wrong { path: path.to_owned(), reason });
        }
        Ok(Some(found))
    }

    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, FindingsError> {
        let io = |source| FindingsError::Io { path: path.to_owned(), source };
        let wrong = |reason: String| FindingsError::Wrong { path: path.to_owned(), reason };
        // A pipe, or a device without an end, would hold up the reader.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(wrong("is no regular file: name another".to_owned()));
        }
        let mut bytes = Vec::new();
        fs::File::open(path).map_err(io)?.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(wrong(format!("is longer than {MOST_BYTES} bytes")));
        }
        let text = String::from_utf8(bytes).map_err(|_| wrong("is no text".to_owned()))?;
        Self::parse(&text).map_err(wrong)
    }

    /// Reads and checks a text; the error is the reason.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            format: u32,
        }
        let one_line = |error: toml::de::Error| {
            let line = error.span().map(|s| text[..s.start.min(text.len())].lines().count().max(1));
            let at = line.map_or(String::new(), |line| format!(", line {line}"));
            format!("is no file of findings ({}{at})", error.message())
        };
        let version: Versioned = toml::from_str(text).map_err(one_line)?;
        if version.format != FORMAT {
            return Err(format!("has format {}, and this program knows {FORMAT}", version.format));
        }
        let found: Self = toml::from_str(text).map_err(one_line)?;
        found.check()?;
        Ok(found)
    }

    /// Writes the file ([`whole::write`]), and makes its folder. Refuses to write findings that could not be read back.
    pub fn save(&self, path: &Path) -> Result<(), FindingsError> {
        self.check().map_err(|reason| FindingsError::Wrong { path: path.to_owned(), reason })?;
        let io = |source| FindingsError::Io { path: path.to_owned(), source };
        let text = toml::to_string(self)
            .map_err(|e| FindingsError::Wrong { path: path.to_owned(), reason: e.to_string() })?;
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(io)?;
        }
        whole::write(path, &text).map_err(io)
    }

    fn check(&self) -> Result<(), String> {
        let hex = self.topology.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if self.topology.len() != 16 || !hex {
            return Err(format!(
                "names the topology {:?}, which is not 16 hexadecimal digits",
                self.topology
            ));
        }
        if self.executor != "cuda" && self.executor != "cpu" {
            return Err(format!("is of the executor {:?}, neither cuda nor cpu", self.executor));
        }
        let sane = |what: &str, v: f64| match v.is_finite() && v > 0.0 && v < 1e9 {
            true => Ok(()),
            false => Err(format!("says {what} = {v}")),
        };
        if !(0.0..1e9).contains(&self.worst_error) {
            return Err(format!("says worst_error = {}", self.worst_error));
        }
        let line = |line: &Line| {
            for pair in line.points.windows(2) {
                if pair[0].0 >= pair[1].0 {
                    return Err(format!("has points of {} that are not in order", line.way));
                }
            }
            line.points.iter().try_for_each(|(n, us)| match n {
                0 => Err(format!("has a point of {} with 0 bytes", line.way)),
                _ => sane("a time", *us),
            })?;
            if line.points.is_empty() || !line.curve.is_sane() || !(0.0..1e9).contains(&line.launch) {
                return Err(format!("has a curve of {} that nothing could have: {:?}", line.way, line.curve));
            }
            if !(line.worst >= 0.0 && line.worst.is_finite()) {
                return Err(format!("says worst = {} of {}", line.worst, line.way));
            }
            Ok(())
        };
        // If there were two lines of one way, only the first would ever count, unnoticed.
        let lines = |lines: &[Line]| {
            let mut ways = HashSet::new();
            lines.iter().try_for_each(|l| match ways.insert(l.way) {
                true => line(l),
                false => Err(format!("has {} twice for one device or pair", l.way)),
            })
        };
        let writers = |writers: &[Writers]| {
            if writers.len() > MOST_WRITERS {
                return Err(format!("has {} figures of writers, more than {MOST_WRITERS}", writers.len()));
            }
            writers.iter().try_for_each(|w| sane("a rate of writers", w.rate))
        };
        let (mut devices, mut pairs) = (HashSet::new(), HashSet::new());
        for device in &self.devices {
            device.stores.iter().chain(&device.loads).try_for_each(|r| sane("a rate", r.rate))?;
            if !devices.insert(&device.pci) {
                return Err(format!("has the device {:?} twice", device.pci));
            }
            writers(&device.writers)?;
            lines(&device.lines)?;
            for (what, v) in [("flag", device.flag), ("record", device.record), ("launch", device.launch)] {
                sane(what, v)?;
            }
        }
        for pair in &self.pairs {
            sane("record", pair.record)?;
            pair.peer_record.map_or(Ok(()), |v| sane("peer_record", v))?;
            if !pairs.insert((&pair.from, &pair.to)) {
                return Err(format!("has the pair {:?} to {:?} twice", pair.from, pair.to));
            }
            lines(&pair.lines)?;
        }
        writers(&self.writers)?;
        if self.both.len() > MOST_BOTH {
            return Err(format!(
                "has {} figures of both ways at once, more than {MOST_BOTH}",
                self.both.len()
            ));
        }
        if self.both.iter().any(|b| b.devices == 0 || b.bytes == 0) {
            return Err("has a figure of both ways at once of 0 devices or 0 bytes".to_owned());
        }
        if !self.both.is_sorted_by(|a, b| (a.devices, a.bytes) < (b.devices, b.bytes)) {
            return Err("has figures of both ways at once that are not in order".to_owned());
        }
        self.both.iter().try_for_each(|b| sane("a rate of both ways at once", b.rate))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn example() -> Findings {
        let line = |way, fixed: f64, rate: f64| {
            let points = (3..14).map(|i| (4u64.pow(i), fixed + 4f64.powi(i as i32) / rate / 1e3)).collect();
            Line::fitted(way, 0.0, points, 1, 1).unwrap()
        };
        Findings {
            format: FORMAT,
            date: "2026-01-31T23:59:59Z".into(),
            host: "host".into(),
            executor: "cuda".into(),
            driver: "CUDA 13.0".into(),
            topology: "0123456789abcdef".into(),
            worst_error: 0.03,
            devices: vec![Device {
                index: 0,
                name: "GPU".into(),
                pci: "0000:01:00.0".into(),
                stores: vec![Rate { width: 16, blocks: 4, rate: 51.0 }],
                loads: vec![Rate { width: 16, blocks: 4, rate: 43.0 }],
                lines: vec![line(Transfer::Push, 1.5, 52.0), line(Transfer::CopyOut, 2.8, 55.0)],
                flag: 1.1,
                record: 1.2,
                launch: 6.0,
                writers: vec![Writers { n: 1, rate: 52.0 }, Writers { n: 2, rate: 51.0 }],
            }],
            pairs: vec![Pair {
                from: "0000:01:00.0".into(),
                to: "0000:02:00.0".into(),
                record: 1.6,
                peer_record: None,
                lines: vec![line(Transfer::Push, 4.0, 49.0), line(Transfer::Bounce, 12.0, 53.0)],
            }],
            writers: vec![],
            both: vec![],
        }
    }

    fn both(devices: u32, bytes: u64, rate: f64) -> Both {
        Both { devices, bytes, rate }
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pushgate-findings-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = Folder::new("round");
        let path = folder.0.join("new/folder/probe.toml");
        let mut findings = example();
        findings.both = vec![both(1, 4 << 20, 41.5), both(1, 8 << 20, 42.0), both(2, 4 << 20, 38.0)];
        findings.save(&path).unwrap();
        findings.save(&path).unwrap();
        assert_eq!(Findings::load(&path).unwrap(), findings);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let mut wrong = findings.clone();
        wrong.devices[0].flag = f64::NAN;
        assert!(wrong.save(&path).unwrap_err().to_string().contains("flag = NaN"));
        assert_eq!(Findings::load(&path).unwrap(), findings);
        assert!(matches!(Findings::load(&folder.0.join("none")), Err(FindingsError::Io { .. })));
    }

    #[test]
    fn a_file_from_before_both_ways_were_measured_is_read() {
        let text = toml::to_string(&example()).unwrap();
        assert!(!text.contains("both"), "{text}");
        assert_eq!(Findings::parse(&text).unwrap(), example());
    }

    #[test]
    fn garbage_is_a_sentence() {
        let folder = Folder::new("garbage");
        let good = toml::to_string(&example()).unwrap();
        assert!(Findings::parse(&good).is_ok());
        let change = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            good.replacen(from, to, 1)
        };
        let with = |change: fn(&mut Findings)| {
            let mut findings = example();
            change(&mut findings);
            toml::to_string(&findings).unwrap()
        };
        for (text, word) in [
            (String::new(), "format"),
            ("\u{0}\u{1}".into(), "no file of findings"),
            ("format = 'x'".into(), "no file of findings"),
            (change("format = 1", "format = 2"), "format 2"),
            (change("topology = \"0123456789abcdef\"", "topology = \"../../etc/passwd\""), "16 hexadecimal"),
            (change("executor = \"cuda\"", "executor = \"abacus\""), "abacus"),
            (change("flag = 1.1", "flag = -1.1"), "flag = -1.1"),
            (change("flag = 1.1", "flag = nan"), "flag = NaN"),
            (change("worst_error = 0.03", "worst_error = inf"), "worst_error"),
            (change("way = \"push\"", "way = \"teleport\""), "teleport"),
            (change("most_blocks = 1", "most_blocks = 0"), "nothing could have"),
            (change("[64, ", "[9999999999, "), "not in order"),
            (change("[64, ", "[0, "), "0 bytes"),
            (with(|f| f.devices.push(f.devices[0].clone())), "\"0000:01:00.0\" twice"),
            (with(|f| f.pairs.push(f.pairs[0].clone())), "\"0000:02:00.0\" twice"),
            (with(|f| f.pairs[0].lines[1].way = Transfer::Push), "push twice"),
            (with(|f| f.writers = vec![Writers { n: 1, rate: 1.0 }; 257]), "257 figures"),
            (with(|f| f.both = (1..258).map(|n| both(1, n, 1.0)).collect()), "257 figures"),
            (with(|f| f.both = vec![both(2, 4, 1.0), both(1, 4, 1.0)]), "not in order"),
            (with(|f| f.both = vec![both(2, 4, 1.0), both(2, 4, 1.0)]), "not in order"),
            (with(|f| f.both = vec![both(0, 4, 1.0)]), "0 devices"),
            (with(|f| f.both = vec![both(1, 0, 1.0)]), "0 bytes"),
            (with(|f| f.both = vec![both(1, 4, f64::INFINITY)]), "both ways at once = inf"),
            (with(|f| f.both = vec![both(1, 4, 0.0)]), "both ways at once = 0"),
            (with(|f| f.devices[0].lines[0].worst = f64::NAN), "worst = NaN"),
            (good[..good.len() / 2].to_owned(), "no file of findings"),
            (format!("{good}\n[surprise]\n"), "surprise"),
        ] {
            let path = folder.0.join("probe.toml");
            fs::write(&path, &text).unwrap();
            let error = Findings::load(&path).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("pushgate probe"), "{word}: {error}");
            assert!(!error.trim().contains('\n'), "{error}");
        }
        fs::write(folder.0.join("probe.toml"), [0xff, 0xfe]).unwrap();
        assert!(Findings::load(&folder.0.join("probe.toml")).unwrap_err().to_string().contains("no text"));
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_a_sentence_or_findings() {
        let good = toml::to_string(&example()).unwrap();
        for at in (0..good.len()).step_by(17) {
            let _ = Findings::parse(&good[..at]);
            for byte in ["\"", "-", "9", "\n", "é"] {
                let _ = Findings::parse(&format!("{}{byte}{}", &good[..at], &good[at + 1..]));
            }
        }
    }

    #[test]
    fn the_file_lies_where_it_was_asked_for() {
        let at = |vars: &[(&str, &str)]| {
            let find = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v));
            Findings::path_with("0123456789abcdef", find)
        };
        let kept = "pushgate/probe-0123456789abcdef.toml";
        assert_eq!(at(&[("HOME", "/h")]).unwrap(), Path::new("/h/.cache").join(kept));
        assert_eq!(at(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]).unwrap(), Path::new("/c").join(kept));
        assert_eq!(
            at(&[("HOME", "/h"), ("XDG_CACHE_HOME", "c")]).unwrap(),
            Path::new("/h/.cache").join(kept)
        );
        assert_eq!(at(&[("HOME", "/h"), (VARIABLE, "f")]).unwrap(), Path::new("f"));
        assert!(matches!(at(&[("HOME", "")]), Err(FindingsError::NoFolder)));
    }

    #[test]
    fn between_readings_a_line_goes_through_them() {
        let points = vec![(64, 2.0), (1024, 8.0)];
        let line = Line::fitted(Transfer::Push, 0.0, points, 1, 1).unwrap();
        assert_eq!((line.time(64), line.time(1024)), (2.0, 8.0));
        assert!((line.time(256) - 4.0).abs() < 1e-9);
        assert!(line.time(8) > 0.0 && line.time(1 << 30) > line.time(1 << 20));
    }

    #[test]
    fn the_model_takes_what_was_read() {
        let mut findings = example();
        let others = Parameters::default();
        assert_eq!(findings.parameters("no such device", &others), others);
        let device = &mut findings.devices[0];
        device.stores =
            vec![Rate { width: 16, blocks: 1, rate: 20.0 }, Rate { width: 16, blocks: 4, rate: 52.0 }];
        device.lines.push(Line::fitted(Transfer::Read, 0.0, vec![(64, 2.4), (1 << 20, 23.0)], 1, 1).unwrap());
        let p = findings.parameters("0000:01:00.0", &others);
        assert!((p.copy_launch_ns - 2800.0).abs() < 60.0 && (p.copy_gbs - 55.0).abs() < 1.0, "{p:?}");
        assert_eq!(p.store_interval_ns, 512.0 * 16.0 / 20.0);
        assert_eq!(p.load_interval_ns, others.load_interval_ns);
        assert!((p.sm_ns - 1850.0).abs() < 40.0, "{p:?}");
        // Either the flags' round trip results, or nothing is left for the turns.
        let flags = flag_round_trip(&[], &p);
        assert!((flags - 2200.0).abs() < 1.0 || p.cpu_turn_ns == 0.0, "{flags}");
        assert!(p.check(&crate::Link::default()).is_ok());
    }

    #[test]
    fn a_collapse_is_seen() {
        let w = |n, rate| Writers { n, rate };
        assert_eq!(collapses(&[w(1, 50.0), w(2, 100.0), w(4, 190.0)]), None);
        assert_eq!(collapses(&[w(1, 52.0), w(2, 50.0)]), None);
        assert_eq!(collapses(&[w(1, 37.0), w(2, 2.7)]), Some(w(2, 2.7)));
        assert_eq!(collapses(&[w(1, 37.0), w(2, 70.0), w(4, 30.0)]), Some(w(4, 30.0)));
        assert_eq!(collapses(&[]), None);
    }

    #[test]
    fn what_may_be_under_way_is_the_most_that_costs_nothing() {
        let of = |rows: &[(u32, &[f64])]| {
            let row = |&(devices, rates): &(u32, &[f64])| -> Vec<Both> {
                rates.iter().zip(22..).map(|(rate, i)| both(devices, 1 << i, *rate)).collect()
            };
            Findings { both: rows.iter().flat_map(row).collect(), ..example() }
        };
        // 4 to 128 MiB under way, as on a host with four GPUs: two lose nothing up to 128 MiB, and
        // of four the writes no longer fit into their part of the last-level cache from 64 MiB on.
        let host = of(&[
            (1, &[40.0, 41.0, 41.5, 41.0, 41.0]),
            (2, &[36.0, 38.0, 39.0, 39.0, 38.5, 38.5]),
            (4, &[30.2, 36.0, 38.0, 38.0, 30.0, 27.0]),
        ]);
        host.check().unwrap();
        assert_eq!(host.under_way(4), Some(32 << 20));
        // Neither of these rows has a bound.
        assert_eq!((host.under_way(1), host.under_way(2)), (None, None));
        // Three are taken for four, and so are eight.
        assert_eq!((host.under_way(3), host.under_way(8)), (Some(32 << 20), Some(32 << 20)));
        assert_eq!(host.under_way(0), None);

        // The best rate counts wherever it is; 90 % of it is enough, and less is not.
        assert_eq!(of(&[(2, &[40.0, 36.0, 35.9])]).under_way(2), Some(8 << 20));
        assert_eq!(of(&[(2, &[40.0, 35.9, 35.9])]).under_way(2), Some(4 << 20));
        assert_eq!(of(&[(2, &[35.9, 40.0, 36.0])]).under_way(2), None);
        // A dip before is no bound.
        assert_eq!(of(&[(2, &[40.0, 20.0, 40.0, 20.0])]).under_way(2), Some(16 << 20));
        assert_eq!(of(&[(2, &[40.0])]).under_way(2), None);
        assert_eq!(of(&[]).under_way(2), None);
    }
}
