//! An archive of what the checks read of a host, redacted, for somebody else to run the checks on.
//!
//! [`write()`] makes a tar file with one folder, [`FOLDER`]. The folder holds the parts of the kernel's files that
//! the checks look at, where they lie on the host, and [`ANSWERS`]: what libibverbs, netlink, system calls,
//! the kernel module and NCCL said, and the settings. [`Roots::kept`](crate::Roots::kept) takes the unpacked
//! folder, and the checks come to the same ends.
//!
//! Names and addresses that tell one host from another are replaced by stand-ins, the same stand-in
//! wherever one stands. What no check looks at is left out: GUIDs, MAC addresses, serial numbers, other
//! processes, other lines of a file. docs/doctor.md lists both.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use pushgate_link_verbs::choice::SOFTWARE_IWARP;
use pushgate_link_verbs::gid::{GidEntry, GidType};

use crate::answers::{ANSWERS, Answers};
use crate::read::files::{UNREADABLE, binary, names};
use crate::read::{ATS, Roots, host};
use crate::readings::{GPU, Read, Readings};
use crate::stand_ins::StandIns;

/// Access Control Services, an extended capability.
const ACS: u16 = 0xd;

/// The folder that an archive unpacks to.
pub const FOLDER: &str = "pushgate-doctor";

enum Entry {
    Folder,
    File(Vec<u8>),
    Link(String),
}

/// The archive while it is put together: entries by their paths, without a slash at the beginning.
struct Pack<'a> {
    /// Where the host's files are: `/`, or a tree that was kept.
    root: PathBuf,
    stand: StandIns<'a>,
    entries: BTreeMap<String, Entry>,
}

/// Writes an archive of what the checks read. `readings` are of all parts. `hide` takes out of sentences what
/// tells one host from another: names of host and user, addresses. Returns the number of files.
///
/// # Errors
/// Those of `out`.
pub fn write(
    out: impl Write,
    roots: &Roots,
    readings: &Readings,
    hide: &dyn Fn(&str) -> String,
) -> io::Result<usize> {
    let mut pack = Pack {
        root: roots.sys.parent().unwrap_or(Path::new("/")).to_owned(),
        stand: StandIns::new(hide),
        entries: BTreeMap::new(),
    };
    pack.rdma(readings);
    pack.pci(readings);
    pack.gpu(readings);
    pack.host(roots);
    pack.module();
    let answers = serde_json::to_vec_pretty(&Answers::of(readings, &pack.stand))?;
    pack.put(ANSWERS.into(), Entry::File(answers));
    pack.tar(out)
}

/// The whole text.
fn all(_: &StandIns, text: &str) -> String {
    text.into()
}

/// Those of its lines that begin so.
fn lines<'a>(starts: &'a [&'a str]) -> impl Fn(&StandIns, &str) -> String + 'a {
    move |_, text| {
        let kept = text.lines().filter(|line| starts.iter().any(|start| line.trim().starts_with(start)));
        kept.collect::<Vec<_>>().join("\n")
    }
}

impl Pack<'_> {
    fn put(&mut self, path: String, entry: Entry) {
        let there = self.entries.contains_key(&path);
        if !(there && matches!(entry, Entry::Folder)) {
            self.entries.insert(path, entry);
        }
    }

    /// A folder, if it is there.
    fn folder(&mut self, path: &str) {
        if self.root.join(path).is_dir() {
            self.put(self.stand.path(path), Entry::Folder);
        }
    }

    /// What `keep` leaves of a file's text, if the file is there.
    fn file(&mut self, path: &str, keep: impl FnOnce(&StandIns, &str) -> String) {
        self.file_as(path, self.stand.path(path), keep);
    }

    fn file_as(&mut self, path: &str, shown: String, keep: impl FnOnce(&StandIns, &str) -> String) {
        let bytes = match binary(&self.root.join(path)) {
            Read::Absent => return,
            Read::Unreadable(why) => unreadable(&self.stand, &why),
            Read::Is(bytes) => match std::str::from_utf8(&bytes) {
                Ok(text) => keep(&self.stand, text.trim()).into_bytes(),
                // No text on the host, and none in the archive.
                Err(_) => vec![0xff],
            },
        };
        self.put(shown, Entry::File(bytes));
    }

    /// Follows a path through the symbolic links on it, and keeps these. Returns the path without links;
    /// nothing if it leads nowhere, or out of the tree.
    fn follow(&mut self, path: &str) -> Option<String> {
        /// As many as the kernel follows.
        const MOST_LINKS: usize = 40;
        let mut at: Vec<String> = Vec::new();
        let mut rest: VecDeque<String> = path.split('/').map(String::from).collect();
        let mut links = 0;
        while let Some(name) = rest.pop_front() {
            if name == ".." {
                at.pop();
                continue;
            }
            at.push(name);
            let here = at.join("/");
            let real = self.root.join(&here);
            if !real.symlink_metadata().ok()?.is_symlink() {
                continue;
            }
            links += 1;
            if links > MOST_LINKS {
                return None;
            }
            let target = real.read_link().ok()?;
            let inside = match target.is_absolute() {
                true => {
                    at.clear();
                    target.strip_prefix(&self.root).ok()?.to_owned()
                }
                false => {
                    at.pop();
                    target
                }
            };
            let parts = inside.components().map(|part| match part {
                Component::Normal(name) => Some(name.to_str()?.to_owned()),
                Component::ParentDir => Some("..".to_owned()),
                _ => None,
            });
            let parts: Vec<String> = parts.collect::<Option<_>>()?;
            let mut to = at.clone();
            for part in &parts {
                if part == ".." {
                    to.pop();
                } else {
                    to.push(part.clone());
                }
            }
            let target = relative(&self.stand.path(&here), &self.stand.path(&to.join("/")));
            self.put(self.stand.path(&here), Entry::Link(target));
            for part in parts.into_iter().rev() {
                rest.push_front(part);
            }
        }
        let end = at.join("/");
        self.folder(&end);
        Some(end)
    }

    fn rdma(&mut self, r: &Readings) {
        self.folder("sys/class/infiniband");
        for device in r.rdma.is().into_iter().flatten() {
            let Some(at) = self.follow(&format!("sys/class/infiniband/{}", device.name)) else { continue };
            self.file(&format!("{at}/node_type"), all);
            // What else it says may name the host.
            self.file(&format!("{at}/node_desc"), |_, text| match text == SOFTWARE_IWARP {
                true => text.into(),
                false => String::new(),
            });
            self.file(&format!("{at}/parent"), |stand, name| stand.name(name));
            if let Some(function) = self.follow(&format!("{at}/device")) {
                for name in names(&self.root.join(&function).join("net")) {
                    self.folder(&format!("{function}/net/{name}"));
                    if let Some(net) = self.follow(&format!("sys/class/net/{name}")) {
                        self.file(&format!("{net}/dev_port"), all);
                    }
                }
            }
            for port in &device.ports {
                let at = format!("{at}/ports/{}", port.number);
                self.folder(&at);
                for file in ["state", "phys_state", "link_layer", "rate", "lid"] {
                    self.file(&format!("{at}/{file}"), all);
                }
                for name in port.errors.iter().map(|(name, _)| name) {
                    for folder in ["counters", "hw_counters"] {
                        self.file(&format!("{at}/{folder}/{name}"), all);
                    }
                }
                let own = format!("sys/kernel/config/rdma_cm/{}/ports/{}", device.name, port.number);
                self.file_as(
                    &format!("{own}/default_roce_tos"),
                    self.stand.path(&format!("{own}/default_roce_tos")),
                    all,
                );
                for (place, _) in &port.pkeys {
                    self.file(&format!("{at}/pkeys/{place}"), all);
                }
                let at = self.stand.path(&at);
                // That of an iWARP device is known by a hardware address, which is left out.
                let by_hardware = if device.is_iwarp() { port.netdev.as_ref() } else { None };
                let netdev = |entry: &'_ GidEntry| entry.netdev.clone().or(by_hardware.cloned());
                for entry in &port.gids {
                    let kind = match entry.kind {
                        GidType::RoceV2 => "RoCE v2",
                        GidType::IbOrRoceV1 => "IB/RoCE v1",
                    };
                    let mut texts =
                        vec![("gid_attrs/types", kind.to_owned()), ("gids", self.stand.gid(entry.ip()))];
                    texts.extend(netdev(entry).map(|name| ("gid_attrs/ndevs", self.stand.name(&name))));
                    for (file, text) in texts {
                        self.put(format!("{at}/{file}/{}", entry.index), Entry::File(text.into_bytes()));
                    }
                }
            }
        }
        for name in r.netdevs.keys() {
            let Some(at) = self.follow(&format!("sys/class/net/{name}")) else { continue };
            self.file(&format!("{at}/mtu"), all);
            for point in ["roce_np", "roce_rp"] {
                for priority in 0..8 {
                    self.file(&format!("{at}/ecn/{point}/enable/{priority}"), all);
                }
            }
        }
    }

    fn pci(&mut self, r: &Readings) {
        // The command line may hold names and addresses of hosts, and numbers of disks.
        self.file("proc/cmdline", |_, text| {
            text.split_whitespace().filter(|word| word.contains("iommu")).collect::<Vec<_>>().join(" ")
        });
        let groups = "sys/kernel/iommu_groups";
        if let Some(first) = names(&self.root.join(groups)).first() {
            self.folder(&format!("{groups}/{first}"));
        }
        for function in &r.pci {
            let Some(at) = self.follow(&format!("sys/bus/pci/devices/{}", function.address)) else {
                continue;
            };
            self.file(&format!("{at}/vendor"), all);
            self.file(&format!("{at}/class"), all);
            if let Some(group) = self.follow(&format!("{at}/iommu_group")) {
                self.file(&format!("{group}/type"), all);
            }
            let driver = self.root.join(&at).join("driver").read_link().ok();
            if let Some(name) = driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) {
                let link = format!("{at}/driver");
                let target = relative(&link, &format!("sys/bus/pci/drivers/{name}"));
                self.put(link, Entry::Link(target));
            }
            if let Read::Is(bytes) = binary(&self.root.join(&at).join("config"))
                && function.what != GPU
            {
                let config = express_alone(&bytes);
                self.put(format!("{at}/config"), Entry::File(config));
            }
            for bridge in &function.bridges {
                let Some(at) = self.follow(&format!("sys/bus/pci/devices/{}", bridge.address)) else {
                    continue;
                };
                let config = match binary(&self.root.join(&at).join("config")) {
                    Read::Absent => continue,
                    Read::Unreadable(why) => unreadable(&self.stand, &why),
                    Read::Is(bytes) => extended_alone(&bytes, ACS),
                };
                self.put(format!("{at}/config"), Entry::File(config));
            }
        }
    }

    fn gpu(&mut self, r: &Readings) {
        let nvidia = "proc/driver/nvidia";
        self.file(&format!("{nvidia}/version"), |_, text| text.lines().next().unwrap_or("").into());
        self.file(&format!("{nvidia}/params"), |_, text| {
            let kept = text.lines().filter(|line| line.contains("PeerMappingOverride"));
            kept.collect::<Vec<_>>().join("\n")
        });
        let capabilities = format!("{nvidia}/capabilities");
        for gpu in names(&self.root.join(&capabilities)) {
            for instance in names(&self.root.join(&capabilities).join(&gpu).join("mig")) {
                let path = format!("{capabilities}/{gpu}/mig/{instance}");
                self.folder(&path);
            }
        }
        for module in ["nvidia_peermem", "nv_peer_mem"] {
            self.folder(&format!("sys/module/{module}"));
        }
        if let Some(pid) = r.gpu.mps {
            self.file(&format!("proc/{pid}/comm"), all);
            self.file(&format!("proc/{pid}/cmdline"), |_, _| "nvidia-cuda-mps-control".into());
        }
    }

    fn host(&mut self, roots: &Roots) {
        self.file("proc/sys/kernel/osrelease", all);
        self.file("proc/sys/kernel/yama/ptrace_scope", all);
        self.file("proc/self/status", lines(&["CapEff:"]));
        self.file("proc/self/limits", lines(&["Max locked memory"]));
        // Whether all users are mapped; not which.
        self.file("proc/self/uid_map", |_, text| {
            if host::is_whole(text) { "0 0 4294967295" } else { "0 1 1" }.into()
        });
        let symbol = match host::symbol(roots, "ib_umem_dmabuf_get") {
            Read::Absent => None,
            Read::Is(true) => Some(b"0 t ib_umem_dmabuf_get\n".to_vec()),
            Read::Is(false) => Some(b"0 t start\n".to_vec()),
            Read::Unreadable(why) => Some(unreadable(&self.stand, &why)),
        };
        if let Some(symbol) = symbol {
            self.put("proc/kallsyms".into(), Entry::File(symbol));
        }
        let limit = lines(&["DefaultLimitMEMLOCK="]);
        self.file("etc/systemd/system.conf", &limit);
        let parts = "etc/systemd/system.conf.d";
        for (n, name) in names(&self.root.join(parts)).iter().filter(|n| n.ends_with(".conf")).enumerate() {
            // In the same order.
            self.file_as(&format!("{parts}/{name}"), format!("{parts}/{n:03}.conf"), &limit);
        }
        for file in ["nr_hugepages", "free_hugepages"] {
            self.file(&format!("sys/kernel/mm/hugepages/hugepages-2048kB/{file}"), all);
        }
        self.groups();
    }

    /// This process's control groups and those above them.
    fn groups(&mut self) {
        const FILES: [&str; 11] = [
            "cgroup.controllers",
            "memory.max",
            "memory.current",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "pids.max",
            "pids.current",
            "hugetlb.2MB.max",
            "hugetlb.2MB.current",
            "rdma.max",
            "rdma.current",
        ];
        let device_first = |stand: &StandIns, text: &str| {
            let line = |line: &str| match line.split_once(' ') {
                Some((device, rest)) => format!("{} {rest}", stand.name(device)),
                None => line.to_owned(),
            };
            text.lines().map(line).collect::<Vec<_>>().join("\n")
        };
        let Read::Is(bytes) = binary(&self.root.join("proc/self/cgroup")) else { return };
        let mut kept = String::new();
        for line in String::from_utf8_lossy(&bytes).lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let has = |name| controllers.split(',').any(|c| c == name);
            let (controller, mount) = match controllers {
                "" => ("", "sys/fs/cgroup".to_owned()),
                _ if has("memory") => ("memory", "sys/fs/cgroup/memory".to_owned()),
                _ if has("pids") => ("pids", "sys/fs/cgroup/pids".to_owned()),
                _ => continue,
            };
            let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
            // Of a group outside of a container's view, the mount alone is looked at.
            let names = if names.iter().any(|name| [".", ".."].contains(name)) { Vec::new() } else { names };
            let (mut real, mut shown) = (mount.clone(), mount.clone());
            let mut group = String::new();
            for name in std::iter::once(None).chain(names.into_iter().map(Some)) {
                if let Some(name) = name {
                    let stand = self.stand.group(name);
                    real = format!("{real}/{name}");
                    shown = format!("{shown}/{stand}");
                    group = format!("{group}/{stand}");
                }
                if self.root.join(&real).is_dir() {
                    self.put(shown.clone(), Entry::Folder);
                }
                for file in FILES {
                    let (from, to) = (format!("{real}/{file}"), format!("{shown}/{file}"));
                    match file.starts_with("rdma") {
                        true => self.file_as(&from, to, device_first),
                        false => self.file_as(&from, to, all),
                    }
                }
                let of_files =
                    lines(&["inactive_file ", "active_file ", "total_inactive_file ", "total_active_file "]);
                self.file_as(&format!("{real}/memory.stat"), format!("{shown}/memory.stat"), of_files);
            }
            kept += &format!("0:{controller}:{}\n", if group.is_empty() { "/" } else { &group });
        }
        self.put("proc/self/cgroup".into(), Entry::File(kept.into_bytes()));
    }

    fn module(&mut self) {
        self.folder("sys/module/pushgate");
        self.file("sys/module/pushgate/version", all);
    }

    /// Times, owners and modes are the same in every archive.
    fn tar(self, out: impl Write) -> io::Result<usize> {
        let mut tar = tar::Builder::new(out);
        let mut files = 0;
        for (path, entry) in self.entries {
            let path = format!("{FOLDER}/{path}");
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mtime(0);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mode(if matches!(entry, Entry::File(_)) { 0o644 } else { 0o755 });
            match entry {
                Entry::Folder => {
                    header.set_entry_type(tar::EntryType::Directory);
                    tar.append_data(&mut header, path, io::empty())?;
                }
                Entry::Link(target) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    tar.append_link(&mut header, path, target)?;
                }
                Entry::File(bytes) => {
                    files += 1;
                    header.set_size(bytes.len() as u64);
                    tar.append_data(&mut header, path, &*bytes)?;
                }
            }
        }
        tar.into_inner()?.flush()?;
        Ok(files)
    }
}

/// A file that stands for one that could not be read, for this reason.
fn unreadable(stand: &StandIns, why: &str) -> Vec<u8> {
    // The sentence names the path, which the archive holds anyway.
    let reason = why.split_once("can't be read: ").map_or(why, |(_, reason)| reason);
    [UNREADABLE, stand.text(reason).as_bytes()].concat()
}

/// The target of a symbolic link at `link` to `to`, both below one folder.
fn relative(link: &str, to: &str) -> String {
    let (link, to): (Vec<&str>, Vec<&str>) = (link.split('/').collect(), to.split('/').collect());
    let folder = &link[..link.len() - 1];
    let common = folder.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("..", folder.len() - common);
    let path: Vec<&str> = up.chain(to[common..].iter().copied()).collect();
    if path.is_empty() { ".".into() } else { path.join("/") }
}

/// A configuration space with nothing in it but the capabilities PCI Express and ATS, and the way to them. Numbers that tell one device
/// from another lie elsewhere.
fn express_alone(bytes: &[u8]) -> Vec<u8> {
    /// Status, header type and the beginning of the list (PCI, "Type 0/1 Configuration Space Header").
    const HEADER: [(usize, usize); 4] = [(0, 4), (0x6, 2), (0xe, 1), (0x34, 1)];
    const EXPRESS: (u8, usize) = (0x10, 0x3c);
    let mut kept = extended_alone(bytes, ATS);
    let mut copy = |from: usize, length: usize| {
        let length = length.min(bytes.len().min(256).saturating_sub(from));
        kept[from..from + length].copy_from_slice(&bytes[from..from + length]);
    };
    HEADER.into_iter().for_each(|(from, length)| copy(from, length));
    let mut at = usize::from(bytes.get(0x34).copied().unwrap_or(0) & !3);
    for _ in 0..48 {
        let Some([id, next]) = bytes.get(at..at + 2).filter(|_| (0x40..0xfe).contains(&at)) else { break };
        copy(at, if *id == EXPRESS.0 { EXPRESS.1 } else { 2 });
        at = usize::from(next & !3);
    }
    kept
}

/// A configuration space with nothing but the heads of extended capabilities and the registers of one: other capabilities hold serial
/// numbers.
fn extended_alone(bytes: &[u8], wanted: u16) -> Vec<u8> {
    /// Where extended capabilities begin (PCI Express, "Extended Configuration Space").
    const EXTENDED: usize = 0x100;
    let mut kept = vec![0; bytes.len().min(4096)];
    let mut copy = |from: usize, length: usize| -> Option<u32> {
        let word = bytes.get(from..from + length)?;
        kept.get_mut(from..from + length)?.copy_from_slice(word);
        Some(u32::from_le_bytes(word.try_into().ok()?))
    };
    // All ones of a function that does not answer.
    copy(0, 4);
    let mut at = EXTENDED;
    for _ in 0..(4096 - EXTENDED) / 4 {
        let Some(head) = copy(at, 4) else { break };
        if head as u16 == wanted {
            copy(at + 4, 4);
            break;
        }
        at = (head >> 20) as usize & !3;
        if at < EXTENDED {
            break;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_relative_to_their_folder() {
        assert_eq!(relative("sys/class/net/eth0", "sys/devices/x/eth0"), "../../devices/x/eth0");
        assert_eq!(relative("a/b", "a"), ".");
        assert_eq!(relative("a/b", "a/c/d"), "c/d");
    }

    #[test]
    fn a_configuration_space_keeps_its_acs_registers_alone() {
        let mut bytes = vec![7u8; 4096];
        bytes[0x100..0x104].copy_from_slice(&[3, 0, 0x81, 0x14]);
        bytes[0x148..0x150].copy_from_slice(&[0xd, 0, 1, 0, 9, 9, 0x1d, 0]);
        let kept = extended_alone(&bytes, ACS);
        assert_eq!(pushgate_topology::parse_config(&kept).acs, pushgate_topology::parse_config(&bytes).acs);
        assert_eq!(kept.iter().filter(|b| **b == 7).count(), 4, "the function's own number");
        for bytes in [vec![0xff; 4096], vec![0; 64], vec![0xff; 64], vec![], vec![0x13; 4096]] {
            let (kept, told) = (extended_alone(&bytes, ACS), pushgate_topology::parse_config(&bytes));
            assert_eq!(
                pushgate_topology::parse_config(&kept).acs,
                told.acs,
                "{:?}",
                &bytes[..bytes.len().min(4)]
            );
        }
    }
}
