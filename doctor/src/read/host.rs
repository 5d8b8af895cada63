//! The kernel, this process, and the limits that it has.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};

use pushgate_door::addresses::Interface;
use pushgate_driver_shim::memory;
use pushgate_link::process_vm_readv_callable;

use super::files::{UNREADABLE, failed, kept_unreadable, names, number, open, text};
use super::roots::Roots;
use crate::readings::{Cgroup, Host, HugePages, Limit, Read, Wants};

pub fn host(roots: &Roots, wants: &Wants) -> Host {
    let sysctl = roots.proc.join("sys/kernel");
    let status = text(&roots.proc.join("self/status"));
    let huge = roots.sys.join("kernel/mm/hugepages/hugepages-2048kB");
    let live = |look: &dyn Fn() -> Result<(), String>| match roots.live {
        true => look().map_or_else(Read::Unreadable, Read::Is),
        false => Read::Absent,
    };
    Host {
        release: text(&sysctl.join("osrelease")),
        umem_dmabuf: Read::Absent,
        capabilities: status.then(|text| capabilities(&text)),
        user_namespace: text(&roots.proc.join("self/uid_map")).is().is_some_and(|map| !is_whole(map)),
        memlock: text(&roots.proc.join("self/limits")).then(|text| memlock(&text)),
        systemd_memlock: systemd_memlock(&roots.etc),
        huge_pages: match (number(&huge.join("nr_hugepages")), number(&huge.join("free_hugepages"))) {
            (Read::Is(all), Read::Is(free)) => Read::Is((all, free)),
            (Read::Unreadable(why), _) | (_, Read::Unreadable(why)) => Read::Unreadable(why),
            _ => Read::Absent,
        },
        ptrace_scope: number(&sysctl.join("yama/ptrace_scope")),
        readv: live(&|| process_vm_readv_callable().map_err(|e| format!("process_vm_readv is refused: {e}"))),
        memfd: live(&|| memfd(wants)),
        shm: if roots.live { shm(&roots.dev.join("shm")) } else { Read::Absent },
        interfaces: match roots.live {
            true => Interface::all().map_or_else(Read::Unreadable, Read::Is),
            false => Read::Absent,
        },
        cgroup: cgroup(roots),
    }
}

/// The first user namespace maps all users to themselves (user_namespaces(7)).
pub(crate) fn is_whole(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn capabilities(status: &str) -> Result<u64, String> {
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .ok_or_else(|| "/proc/self/status has no capabilities".to_string())
}

/// Limits from here on bound nothing: programs write the greatest number that they know where they mean none, as i64::MAX, and so does
/// the kernel in control groups of version 1.
const NO_LIMIT: u64 = 1 << 60;

/// proc(5): name, soft limit, hard limit, unit.
fn memlock(limits: &str) -> Result<(u64, u64), String> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"));
    let number = |word: &str| match word {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok().map(|n| if n < NO_LIMIT { n } else { u64::MAX }),
    };
    line.and_then(|line| {
        let mut words = line.split_whitespace();
        Some((number(words.next()?)?, number(words.next()?)?))
    })
    .ok_or_else(|| "/proc/self/limits does not tell the limit of locked memory".to_string())
}

/// DefaultLimitMEMLOCK of systemd-system.conf(5): the main file, then the folder's in order. The
/// default of 8 MiB is from the manual of systemd 250 and later.
fn systemd_memlock(etc: &Path) -> Option<String> {
    let folder = etc.join("systemd");
    let parts = names(&folder.join("system.conf.d")).into_iter().filter(|n| n.ends_with(".conf"));
    let files =
        [folder.join("system.conf")].into_iter().chain(parts.map(|n| folder.join("system.conf.d").join(n)));
    let mut found = false;
    let mut value = None;
    for file in files {
        let Read::Is(text) = text(&file) else { continue };
        found = true;
        let mut lines = text.lines().filter_map(|l| l.trim().strip_prefix("DefaultLimitMEMLOCK="));
        value = lines.next_back().map(|v| v.trim().to_string()).or(value);
    }
    found.then(|| value.unwrap_or_else(|| "its default (8 MiB since version 250)".into()))
}

/// Whether the kernel has a symbol. Addresses are hidden from users, names are not.
pub fn symbol(roots: &Roots, name: &str) -> Read<bool> {
    let path = roots.proc.join("kallsyms");
    // Ten times the symbols of a large kernel.
    let file = match open(&path) {
        Ok(file) => file.take(256 << 20),
        Err(error) => return failed(&path, &error),
    };
    for line in BufReader::new(file).split(b'\n') {
        match line {
            // Address, type, name, module.
            Ok(line) => {
                if let Some(why) = line.strip_prefix(UNREADABLE) {
                    return kept_unreadable(&path, why);
                }
                if line.split(|b| b.is_ascii_whitespace()).nth(2) == Some(name.as_bytes()) {
                    return Read::Is(true);
                }
            }
            Err(error) => return failed(&path, &error),
        }
    }
    Read::Is(false)
}

/// A window as a queue pair would have it.
fn memfd(wants: &Wants) -> Result<(), String> {
    let bytes =
        usize::try_from(wants.window_size).map_err(|_| "the window is larger than memory".to_string())?;
    let huge = match wants.huge_pages {
        HugePages::Try => memory::HugePages::Try,
        HugePages::Never => memory::HugePages::Never,
        HugePages::Require => memory::HugePages::Require,
    };
    let made = memory::SharedMemory::builder("pushgate-doctor", bytes).huge_pages(huge).create();
    made.map(drop).map_err(|e| e.to_string())
}

fn shm(path: &Path) -> Read<(u64, u64)> {
    match rustix::fs::statvfs(path) {
        Ok(fs) => {
            Read::Is((fs.f_blocks.saturating_mul(fs.f_frsize), fs.f_bavail.saturating_mul(fs.f_frsize)))
        }
        Err(error) => failed(path, &error.into()),
    }
}

/// The tightest limits of this process's group and those above it: cgroup v2, and v1's memory and
/// pids (cgroup-v2.rst and cgroup-v1 of the kernel's documentation).
fn cgroup(roots: &Roots) -> Cgroup {
    let mut c = Cgroup::default();
    let Read::Is(groups) = text(&roots.proc.join("self/cgroup")) else { return c };
    let mount = roots.sys.join("fs/cgroup");
    for line in groups.lines() {
        // Number, controllers, path.
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let has = |name| controllers.split(',').any(|c| c == name);
        match controllers {
            "" => {
                for folder in upwards(&mount, path) {
                    c.found |= folder.join("cgroup.controllers").exists();
                    let read = limit(&folder, "memory.max", "memory.current", &mut c.unreadable);
                    tighten(&mut c.memory, without_cache(&folder, "", read));
                    tighten(&mut c.pids, limit(&folder, "pids.max", "pids.current", &mut c.unreadable));
                    tighten(
                        &mut c.huge,
                        limit(&folder, "hugetlb.2MB.max", "hugetlb.2MB.current", &mut c.unreadable),
                    );
                    rdma_objects(&folder, &mut c.rdma_objects);
                }
            }
            _ if has("memory") => {
                for folder in upwards(&mount.join("memory"), path) {
                    let read =
                        limit(&folder, "memory.limit_in_bytes", "memory.usage_in_bytes", &mut c.unreadable);
                    c.found |= folder.join("memory.limit_in_bytes").exists();
                    tighten(&mut c.memory, without_cache(&folder, "total_", read));
                }
            }
            _ if has("pids") => {
                for folder in upwards(&mount.join("pids"), path) {
                    tighten(&mut c.pids, limit(&folder, "pids.max", "pids.current", &mut c.unreadable));
                }
            }
            _ => {}
        }
    }
    c
}

/// A group's folder and those above it, up to the mount. In a container the path may be one of
/// outside; then it is the mount alone.
fn upwards(mount: &Path, path: &str) -> Vec<PathBuf> {
    let relative = Path::new(path.trim_start_matches('/'));
    let plain = relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
    let relative = if plain { relative } else { Path::new("") };
    relative.ancestors().map(|part| mount.join(part)).filter(|folder| folder.is_dir()).collect()
}

fn limit(folder: &Path, max: &str, used: &str, unreadable: &mut Vec<String>) -> Limit {
    let limit = match text(&folder.join(max)) {
        Read::Is(text) if text == "max" || text.parse().is_ok_and(|n: u64| n >= NO_LIMIT) => return None,
        Read::Is(text) => Read::Is(text),
        other => other,
    };
    let of = |read: Read<String>, name: &str| {
        read.then(|t| t.parse::<u64>().map_err(|_| format!("{} is no number", folder.join(name).display())))
    };
    match (of(limit, max), of(text(&folder.join(used)), used)) {
        (Read::Is(max), Read::Is(used)) => Some((max, used)),
        (Read::Unreadable(why), _) | (Read::Is(_), Read::Unreadable(why)) => {
            unreadable.push(why);
            None
        }
        _ => None,
    }
}

/// A limit of memory without what pages of files use (memory.stat: those on the lists of files, which
/// tmpfs is not on).
fn without_cache(folder: &Path, prefix: &str, limit: Limit) -> Limit {
    let (max, used) = limit?;
    let stat = text(&folder.join("memory.stat"));
    let of = |name: &str| -> Option<u64> {
        let mut words = stat.is()?.lines().filter_map(|l| l.split_once(' '));
        words.find(|(key, _)| key.strip_prefix(prefix) == Some(name))?.1.trim().parse().ok()
    };
    let files = ["inactive_file", "active_file"].into_iter().filter_map(of);
    Some((max, files.fold(used, u64::saturating_sub)))
}

fn tighten(limit: &mut Limit, other: Limit) {
    let left = |l: (u64, u64)| l.0.saturating_sub(l.1);
    *limit = match (*limit, other) {
        (Some(a), Some(b)) => Some(if left(b) < left(a) { b } else { a }),
        (a, b) => a.or(b),
    };
}

/// `mlx5_0 hca_handle=max hca_object=2000`, a line for each device.
fn rdma_objects(folder: &Path, all: &mut BTreeMap<String, (u64, u64)>) {
    let objects = |file: &str| -> BTreeMap<String, u64> {
        let Read::Is(text) = text(&folder.join(file)) else { return BTreeMap::new() };
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            let device = words.next()?.to_string();
            Some((device, words.find_map(|w| w.strip_prefix("hca_object="))?.parse().ok()?))
        };
        text.lines().filter_map(line).collect()
    };
    let used = objects("rdma.current");
    for (device, max) in objects("rdma.max") {
        let mut tightest = all.get(&device).copied();
        tighten(&mut tightest, Some((max, used.get(&device).copied().unwrap_or(0))));
        all.extend(tightest.map(|t| (device, t)));
    }
}
