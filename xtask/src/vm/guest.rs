//! Runs the virtual machines: the job that they get, their output, and how they end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::host::Helper;
use super::initramfs::Archive;
use super::ivshmem::{Device, Server};
use super::kernel::{self, Kernel};
use super::qemu::Machine;
use crate::output::{Output, say};
use crate::paths::Paths;
use crate::process::{self, Running};
use crate::progress::{Guard, Watch};
use crate::system;

/// How long a machine may be silent while it boots, which takes about 6 s in all on two idle cores.
const BOOT_SILENCE: Duration = Duration::from_secs(60);
/// How often guests whose kernel does not reach user space are booted.
const BOOTS: u32 = 3;
/// How long the other machine gets to end once one has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(60);
/// The first line of the guest's first program on the console: what fails before it is the kernel or
/// the emulation, and nothing of ours.
const USER_SPACE: &str = "pushgate-vm starts user space";
/// How many lines of a console's end are shown after a failure.
const LAST_LINES: usize = 15;

/// Modules that every guest has, with their options. The modules that they depend on are found
/// automatically.
const MODULES: &[(&str, &str)] = &[
    ("virtio_pci", ""),
    ("virtio_console", ""),
    ("virtio_net", ""),
    ("9pnet_virtio", ""),
    ("9p", ""),
    // Without a crc32 transform no soft-RoCE device can be made.
    ("crc32_generic", ""),
    ("crc32_pclmul", ""),
    ("crc32c_generic", ""),
    ("ib_uverbs", ""),
    ("rdma_ucm", ""),
    ("rdma_rxe", ""),
    // The module makes no device by itself: links are made by name.
    ("dummy", "numdummies=0"),
];

/// What runs in the guests.
pub struct Job {
    /// A shell script.
    pub script: String,
    /// Files beside the script in /run/vm, by name.
    pub files: Vec<(String, String)>,
    /// The number of guests, 1 or 2.
    pub guests: u8,
    /// PCI functions of the first guest.
    pub devices: Vec<Device>,
    /// A shell script that the first guest may have run on the host.
    pub host: Option<String>,
    /// Memory of each guest in MiB.
    pub memory: u32,
    /// The time that the job may take, including the boot, if the user has set a limit.
    pub limit: Option<Duration>,
    /// What ends a guest that hangs.
    pub guard: Guard,
}

/// How a job ended.
pub struct Ended {
    /// The exit status of each guest's script. An error if a guest came up and did not reach the
    /// end of its script.
    pub codes: Result<Vec<u8>>,
    /// The folder of the run: `1/out` and `2/out` in it are what the guests left in /run/out.
    pub folder: PathBuf,
}

/// A machine that is running.
struct Guest {
    number: u8,
    qemu: Running,
    folder: PathBuf,
    output_ended: mpsc::Receiver<()>,
    code: Option<u8>,
    /// QEMU ended by itself.
    gone: bool,
}

/// Boots the guests, runs the job in them with its output on ours, and returns once they are off.
pub fn run(paths: &Paths, kernel: &Kernel, job: &Job) -> Result<Ended> {
    let folder = run_folder(&paths.scratch("vm")?)?;
    fs::write(folder.join("initrd"), initramfs(paths, kernel, job)?)?;
    let machine = Machine {
        qemu: vec!["qemu-system-x86_64".into()],
        modules: None,
        image: kernel.image(),
        root: "/".into(),
    };
    boot(&machine, folder, job)
}

/// Boots guests as [`run`] does, on a machine of the caller's; `folder` is the run's and holds the
/// `initrd`.
///
/// Fails if a guest does not come up. A kernel that panics or stands still before user space, as
/// emulated timers and processors on a busy host make it do, is booted up to [`BOOTS`] times.
pub fn boot(machine: &Machine, folder: PathBuf, job: &Job) -> Result<Ended> {
    let mut boots = 1;
    loop {
        let (guests, result) = boot_once(machine, &folder, job)?;
        let error = match result {
            Ok(codes) => return Ok(Ended { codes: Ok(codes), folder }),
            Err(error) => error,
        };
        if process::interrupted() || job.guard.is_over() {
            return Err(error);
        }
        if guests.iter().all(Guest::is_up) {
            return Ok(Ended { codes: Err(error), folder });
        }
        let Some(early) = guests.iter().find(|guest| guest.failed_in_kernel()).filter(|_| boots < BOOTS)
        else {
            return Err(error);
        };
        let what = if early.panicked() { "panicked" } else { "stood still" };
        say!("{}: the kernel {what} before user space; it is booted once more", early.name());
        for guest in &guests {
            guest.clear(boots)?;
        }
        fs::remove_dir_all(folder.join("both"))?;
        boots += 1;
    }
}

/// Boots once: returns the machines, which are off, and the exit status of each script.
fn boot_once(machine: &Machine, folder: &Path, job: &Job) -> Result<(Vec<Guest>, Result<Vec<u8>>)> {
    let mut cables = match job.guests {
        1 => [None, None],
        _ => {
            let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            [Some(a), Some(b)]
        }
    };
    // Started before QEMU, which waits for it.
    let server = Server::start(folder, &job.devices)?;
    let mut guests = Vec::new();
    for number in 1..=job.guests {
        let cable = cables[usize::from(number) - 1].take();
        guests.push(Guest::start(number, machine, job, folder, cable)?);
    }
    let script = job.host.clone();
    let helper = script.map(|script| Helper::start(folder, folder.join("1"), script, server.bells()));
    let result = wait(&mut guests, job);
    drop(helper);
    for guest in &mut guests {
        // A guest that was cut short is ended first: its output ends with it.
        if result.is_err() {
            guest.qemu.end();
        }
        let _ = guest.output_ended.recv_timeout(process::GRACE);
    }
    drop(server);
    Ok((guests, result))
}

fn wait(guests: &mut [Guest], job: &Job) -> Result<Vec<u8>> {
    let until = job.limit.map(|limit| Instant::now() + limit);
    let mut boot = Watch::new(job.guard.but_silent_for(BOOT_SILENCE));
    let mut watch = None;
    let mut failed: Option<(u8, u8, Watch)> = None;
    loop {
        if process::interrupted() {
            bail!("interrupted");
        }
        for guest in guests.iter_mut().filter(|guest| guest.code.is_none()) {
            if guest.qemu.has_ended()? {
                guest.gone = true;
                let code = guest.ended()?;
                guest.code = Some(code);
                if code != 0 && failed.is_none() {
                    let guard = job.guard.but_silent_for(AFTER_FAILURE);
                    failed = Some((guest.number, code, Watch::new(guard)));
                }
            }
        }
        let Some(slow) = guests.iter().find(|guest| guest.code.is_none()) else {
            return Ok(guests.iter().filter_map(|guest| guest.code).collect());
        };
        if until.is_some_and(|until| Instant::now() >= until) {
            bail!("ended at the limit that was set: {}", slow.name());
        }
        if let Some((number, code, watch)) = &mut failed {
            // Whatever the other guest still prints, it waits for a peer that is gone.
            if let Err(reason) = watch.look(0) {
                bail!(
                    "guest {number} ended with exit code {code}, and {} did not end: {reason}",
                    slow.name()
                );
            }
        } else if let Some(down) = guests.iter().find(|guest| !guest.is_up()) {
            if let Err(reason) = boot.look(guests.iter().map(Guest::console_bytes).sum()) {
                // The other guest may wait for the one that hangs.
                let down = guests.iter().find(|guest| guest.failed_in_kernel()).unwrap_or(down);
                bail!("{} did not come up: {reason}{}", down.name(), down.console());
            }
        } else {
            let watch = watch.get_or_insert_with(|| Watch::new(job.guard));
            if let Err(reason) = watch.look(guests.iter().map(Guest::heard).sum()) {
                bail!("{}: {reason}{}", slow.name(), slow.console());
            }
        }
        thread::sleep(process::TICK);
    }
}

impl Guest {
    fn start(number: u8, machine: &Machine, job: &Job, run: &Path, cable: Option<OwnedFd>) -> Result<Guest> {
        let folder = run.join(number.to_string());
        let mut command = machine.command(number, job.memory, run)?;
        if let Some(cable) = &cable {
            command.arg("-netdev").arg(format!("socket,id=cable,fd={}", cable.as_raw_fd()));
            let address = format!("52:54:00:00:00:0{number}");
            command
                .arg("-device")
                .arg(format!("virtio-net-pci,netdev=cable,mac={address},host_mtu=4200,romfile="));
            process::inherit(&mut command, cable.as_fd());
        }
        if number == 1 {
            for device in &job.devices {
                command.args(device.arguments(run)?);
            }
        }
        process::die_with_us(&mut command);
        command.stdout(Stdio::piped()).stderr(fs::File::create(folder.join("qemu.log"))?);
        let mut qemu = Running::start(command)?;
        let pipe = qemu.stdout().context("no pipe")?;
        let prefix = if job.guests > 1 { format!("[{number}] ") } else { String::new() };
        let mut printer = Printer { output: Output::of_this_thread(), prefix, line: Vec::new() };
        let output_ended = process::pass_on(pipe, &qemu.heard, move |bytes| printer.print(bytes));
        Ok(Guest { number, qemu, folder, output_ended, code: None, gone: false })
    }

    /// Removes what the `boot`-th boot has left, before another boot.
    fn clear(&self, boot: u32) -> Result<()> {
        let _ = fs::rename(self.folder.join("console.log"), self.folder.join(format!("console-{boot}.log")));
        for name in ["started", "status"] {
            let _ = fs::remove_file(self.folder.join(name));
        }
        Ok(())
    }

    /// Whether the kernel did not come as far as the first program. A QEMU that ended by itself, as one that
    /// can't start does, has no kernel to blame unless that panicked.
    fn failed_in_kernel(&self) -> bool {
        !self.console_text().contains(USER_SPACE) && (!self.gone || self.panicked())
    }

    fn panicked(&self) -> bool {
        self.console_text().contains("Kernel panic")
    }

    fn console_bytes(&self) -> u64 {
        fs::metadata(self.folder.join("console.log")).map_or(0, |file| file.len())
    }

    fn heard(&self) -> u64 {
        self.qemu.heard.load(Ordering::Relaxed)
    }

    fn name(&self) -> String {
        format!("the virtual machine (guest {})", self.number)
    }

    fn is_up(&self) -> bool {
        self.folder.join("started").exists()
    }

    /// The script's exit status, once the machine is off.
    fn ended(&self) -> Result<u8> {
        if let Ok(code) = fs::read_to_string(self.folder.join("status")) {
            return code.trim().parse().with_context(|| format!("a guest's exit status is {code:?}"));
        }
        let what = if self.is_up() { "went down while its command ran" } else { "did not come up" };
        let log = fs::read_to_string(self.folder.join("qemu.log")).unwrap_or_default();
        let qemu = if log.trim().is_empty() { String::new() } else { format!("\nQEMU says: {}", log.trim()) };
        let panic = if self.panicked() { ": a kernel panic" } else { "" };
        Err(anyhow!("{} {what}{panic}{qemu}{}", self.name(), self.console()))
    }

    fn console_text(&self) -> String {
        let bytes = fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The console's end, for an error message.
    fn console(&self) -> String {
        let text = self.console_text();
        let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return "; its console is empty".into();
        }
        let file = self.folder.join("console.log");
        format!("; its console ({}) says:\n  {}", file.display(), telling(&lines).join("\n  "))
    }
}

/// The lines of a console that tell most: from the first word of a crash on, or the last ones.
fn telling<'a>(lines: &'a [&'a str]) -> &'a [&'a str] {
    let is_crash = |line: &&str| {
        ["BUG: ", "Oops", "general protection", "Kernel panic", "pushgate-vm:"]
            .iter()
            .any(|w| line.contains(w))
    };
    let last = lines.len().saturating_sub(LAST_LINES);
    let from = lines.iter().position(is_crash).map_or(last, |at| at.min(last));
    &lines[from..lines.len().min(from + 2 * LAST_LINES)]
}

/// Prints a guest's output on ours, line by line if it has a prefix.
struct Printer {
    output: Output,
    prefix: String,
    line: Vec<u8>,
}

impl Printer {
    fn print(&mut self, bytes: &[u8]) {
        if self.prefix.is_empty() {
            return self.output.write(bytes);
        }
        self.line.extend_from_slice(bytes);
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let rest = self.line.split_off(end + 1);
            self.print_line();
            self.line = rest;
        }
    }

    fn print_line(&self) {
        self.output.write(&[self.prefix.as_bytes(), &self.line].concat());
    }
}

/// The last line may have no end, so it is printed on drop.
impl Drop for Printer {
    fn drop(&mut self) {
        if !self.line.is_empty() {
            self.line.push(b'\n');
            self.print_line();
        }
    }
}

/// The initial file system from which the guest boots, including the job.
pub fn initramfs(paths: &Paths, kernel: &Kernel, job: &Job) -> Result<Vec<u8>> {
    let busybox = system::static_busybox().context("no static busybox")?;
    let mut archive = Archive::default();
    archive.folder("bin");
    archive.file("bin/busybox", &fs::read(busybox)?);
    archive.file("init", include_bytes!("init.sh"));
    archive.folder("vm");
    archive.file("vm/stage2.sh", include_bytes!("stage2.sh"));
    archive.file("vm/lib.sh", include_bytes!("lib.sh"));

    archive.folder("vm/modules");
    let names: Vec<_> = MODULES.iter().map(|(name, _)| *name).collect();
    let mut list = String::new();
    for file in kernel.modules(&names)? {
        let name = kernel::module_name(&file.to_string_lossy());
        archive.file(&format!("vm/modules/{name}"), &kernel::read_module(&file)?);
        let options = MODULES.iter().find(|(known, _)| *known == name).map_or("", |(_, options)| options);
        list.push_str(&format!("{name} {options}\n"));
    }
    archive.file("vm/modules/list", list.as_bytes());

    let (root, target) = (paths.root.canonicalize()?, paths.target.canonicalize()?);
    let programs = kernel::cargo_bin();
    let settings = [
        ("ROOT", root.as_path()),
        ("TARGET", target.as_path()),
        ("KERNEL_DIR", kernel.dir.as_path()),
        ("CARGO_BIN", programs.as_path()),
        ("GUESTS", Path::new(if job.guests == 1 { "1" } else { "2" })),
    ];
    let line = |(name, value): &(&str, &Path)| format!("{name}={}\n", process::quote(value.as_os_str()));
    archive.file("vm/settings", settings.iter().map(line).collect::<String>().as_bytes());
    let visible: Vec<_> = [&root, &target].iter().map(|path| format!("{}\n", path.display())).collect();
    archive.file("vm/visible", visible.concat().as_bytes());
    // The kernel starts modprobe by this name, and without our variables.
    let modprobe = format!(
        "#!/bin/sh\nexec {} -d {} \"$@\"\n",
        system::find_program("modprobe").context("no modprobe")?.display(),
        process::quote(kernel.dir.as_os_str())
    );
    archive.file("vm/modprobe", modprobe.as_bytes());

    archive.file("vm/job", job.script.as_bytes());
    for (name, content) in &job.files {
        ensure!(!name.contains('/'), "{name} is no name of a file");
        archive.file(&format!("vm/{name}"), content.as_bytes());
    }
    Ok(archive.finish())
}

/// Makes a new folder for this run below `all`. Folders of runs that are over are removed, except
/// the logs of the last one.
pub fn run_folder(all: &Path) -> Result<PathBuf> {
    for file in fs::read_dir(all)?.flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        let owner = ["run-", "part-"].iter().find_map(|start| name.strip_prefix(start));
        if let Some(owner) = owner.and_then(|rest| rest.split('-').next())
            && !Path::new("/proc").join(owner).exists()
        {
            let _ = fs::remove_dir_all(file.path());
        }
    }
    let new = (1..).map(|count| all.join(format!("run-{}-{count}", std::process::id())));
    let folder = new.into_iter().find(|folder| !folder.exists()).expect("numbers do not end");
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder.canonicalize()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_shown_from_its_start() {
        let mut lines = vec!["usual"; 100];
        assert_eq!(telling(&lines).len(), LAST_LINES);
        lines[50] = "[    6.2] BUG: kernel NULL pointer dereference";
        assert!(telling(&lines)[0].contains("BUG"));
        assert_eq!(telling(&lines).len(), 2 * LAST_LINES);
        assert!(telling(&[]).is_empty());
    }
}
