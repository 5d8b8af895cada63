//! Finding the copier of a GPU, starting one if there is none, and trying it.
//!
//! A copier listens at an abstract Unix address that names the user and the GPU by its UUID. Both ends check that the other one is of
//! the same user. The first client starts the program of the copier, which puts itself into the background and tells by its standard
//! output that it serves, or why not.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::file::read_text;
use pushgate_driver_shim::users::{is_ours, remark};
use rustix::net::SocketAddrUnix;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::client::Copier;
use super::protocol::{OPENS, PATIENCE, VERSION};
use super::shared::{Direction, Unavailable};
use crate::cuda::CudaExecutor;
use crate::executor::Executor;

/// After how long a client says that it still waits for a copier to open its GPU.
const SLOW: Duration = Duration::from_secs(20);
/// How often a client that found no copier, or one that was just leaving, starts one.
const TRIES: usize = 3;
/// How long a copy of the trial may take.
const TRIAL: Duration = Duration::from_secs(60);

/// The program that a client starts to have a copier. It gets the arguments `--gpu` with the GPU's UUID and `--cpus` with [`CopierCpus`]
/// after these, and calls [`crate::copier::serve`].
#[derive(Clone, Debug)]
pub struct Program {
    /// The program.
    pub path: PathBuf,
    /// The program's first arguments.
    pub args: Vec<OsString>,
}

/// The cores that a copier uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CopierCpus {
    /// The cores near the GPU, also beyond the binding of the process that started the copier, where that is allowed (a cgroup's cpuset is kept).
    #[default]
    Auto,
    /// The cores of the process that started the copier.
    Inherit,
    /// These.
    List(Vec<usize>),
}

impl CopierCpus {
    /// Binds this process. `pci`: the GPU's PCI address.
    pub(super) fn take(&self, pci: Option<&str>) {
        let near = || {
            let path = format!("/sys/bus/pci/devices/{}/local_cpulist", pci?.to_lowercase());
            parse_list(read_text(path).ok()?.trim())
        };
        let wanted = match self {
            CopierCpus::Inherit => return,
            CopierCpus::List(cores) => cores.clone(),
            CopierCpus::Auto => near().unwrap_or_else(|| (0..CpuSet::MAX_CPU).collect()),
        };
        let mut set = CpuSet::new();
        wanted.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
        if let Err(e) = sched_setaffinity(None, &set) {
            tracing::debug!("the copier stays on the cores that it was started on: {e}");
        }
    }
}

impl fmt::Display for CopierCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CopierCpus::Auto => f.write_str("auto"),
            CopierCpus::Inherit => f.write_str("inherit"),
            CopierCpus::List(cores) => {
                let all: Vec<String> = cores.iter().map(usize::to_string).collect();
                f.write_str(&all.join(","))
            }
        }
    }
}

impl std::str::FromStr for CopierCpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(CopierCpus::Auto),
            "inherit" => Ok(CopierCpus::Inherit),
            list => match parse_list(list) {
                Some(cores) if !cores.is_empty() => Ok(CopierCpus::List(cores)),
                _ => Err("auto, inherit, or cores such as 0-3,8".into()),
            },
        }
    }
}

/// Parses cores such as `0-3,8`, as the kernel writes them.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if last >= CpuSet::MAX_CPU || first > last {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// The name of this user's copier of the GPU with this UUID, or of `cpu`.
pub(super) fn name(gpu: &str) -> String {
    let scope = std::env::var("_PUSHGATE_COPIER_SCOPE").unwrap_or_default();
    format!("pushgate-copier-{VERSION}-{}-{gpu}{scope}", geteuid().as_raw())
}

/// The abstract address of a name.
pub(super) fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

impl Copier {
    /// Joins the copier of the executor's device, which `program` starts if there is none, and tries it: memory as NCCL allocates it is
    /// handed over, and bytes are copied both ways. May take some seconds. The error says why no copier can copy here.
    pub fn join(
        executor: &Arc<dyn Executor>,
        program: &Program,
        cpus: &CopierCpus,
    ) -> Result<Copier, Unavailable> {
        let gpu = match executor.as_cuda() {
            Some(cuda) => cuda.uuid().map_err(|e| Unavailable(e.to_string()))?,
            None => "cpu".to_owned(),
        };
        Copier::join_at(&name(&gpu), &gpu, executor, program, cpus, PATIENCE)
    }

    /// Joins a copier as [`Copier::join`] does. A copier whose queue of new clients is full, or a stranger who has taken the name first and accepts
    /// nobody, is waited for as long as `patience`.
    pub(super) fn join_at(
        name: &str,
        gpu: &str,
        executor: &Arc<dyn Executor>,
        program: &Program,
        cpus: &CopierCpus,
        patience: Duration,
    ) -> Result<Copier, Unavailable> {
        let at = SocketAddrUnix::new_abstract_name(name.as_bytes())
            .map_err(|e| Unavailable(format!("the address {name}: {e}")))?;
        let mut why = Unavailable(String::new());
        for _ in 0..TRIES {
            match PeerStream::connect(&at, Instant::now() + patience) {
                Ok(stream) => {
                    let peer = socket_peercred(&stream)
                        .map_err(|e| Unavailable(format!("the copier's socket: {e}")))?;
                    if !is_ours(peer.uid.as_raw()) {
                        let text = format!(
                            "another user ({}{}) listens at the abstract address {name}, where this user's copier would",
                            peer.uid.as_raw(),
                            remark(peer.uid.as_raw())
                        );
                        return Err(Unavailable(text));
                    }
                    match Copier::over(stream, executor)
                        .and_then(|copier| copier.trial(executor).map(|()| copier))
                    {
                        Ok(copier) => return Ok(copier),
                        // It may just have been leaving.
                        Err(e) => why = e,
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => start(program, gpu, cpus)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let text = format!(
                        "who listens at the abstract address {name} accepted nobody within {patience:?}"
                    );
                    return Err(Unavailable(text));
                }
                Err(e) => why = Unavailable(format!("the address {name}: {e}")),
            }
        }
        Err(why)
    }

    /// Copies a few bytes both ways.
    fn trial(&self, executor: &Arc<dyn Executor>) -> Result<(), Unavailable> {
        let failed =
            |what: &str, e: &dyn fmt::Display| Unavailable(format!("trying the copier: {what}: {e}"));
        let (mut push, mut pull) = (self.queue(Direction::Push), self.queue(Direction::Pull));
        // Memory that can be handed over as a descriptor; where there is none, of cuMemAlloc.
        let exportable = executor.as_cuda().and_then(|cuda: &CudaExecutor| cuda.exportable().ok());
        let buffer = match &exportable {
            Some(_) => None,
            None => Some(executor.alloc(1 << 16).map_err(|e| failed("device memory", &e))?),
        };
        let memory = exportable.as_ref().map(|(memory, _)| memory.address());
        let address =
            memory.or(buffer.as_ref().map(|buffer| buffer.addr())).expect("one of the two was made");
        let _held = self.register_device(address, 1 << 16)?;
        let words = 512;
        let bytes = words * 8;
        let (from, to) = (pull.aside().0, push.aside().0);
        for word in 0..words {
            // SAFETY: within the queue's own memory, which no copy uses yet.
            unsafe { (from as *mut u64).add(word).write_volatile(0x5a5a_0000 + word as u64) };
        }
        let wait = |queue: &mut super::queue::CopyQueue, ticket| {
            let began = Instant::now();
            while !queue.done(ticket) {
                queue.health().map_err(|e| failed("a copy", &e))?;
                if began.elapsed() > TRIAL {
                    return Err(Unavailable(format!("trying the copier: no copy was done within {TRIAL:?}")));
                }
                thread::yield_now();
            }
            Ok(())
        };
        // SAFETY: memory of this function and of the queues; each copy is waited for, or the copier is given up.
        let ticket = unsafe { pull.post(address, from as u64, bytes) }.map_err(|e| failed("a copy", &e))?;
        wait(&mut pull, ticket)?;
        // SAFETY: as above.
        let ticket = unsafe { push.post(address, to as u64, bytes) }.map_err(|e| failed("a copy", &e))?;
        wait(&mut push, ticket)?;
        // SAFETY: within the queue's own memory; the copy there is complete.
        let right = |word: usize| unsafe { (to as *const u64).add(word).read_volatile() } == 0x5a5a_0000 + word as u64;
        match (0..words).all(right) {
            true => Ok(()),
            false => Err(Unavailable("trying the copier: other bytes came back than were sent".into())),
        }
    }
}

/// Starts a copier, and waits until it serves or says why not.
fn start(program: &Program, gpu: &str, cpus: &CopierCpus) -> Result<(), Unavailable> {
    let name = program.path.display();
    let failed = |e: &dyn fmt::Display| Unavailable(format!("starting the copier ({name}): {e}"));
    // What the program's environment says to CUDA, to loaders and to profilers is meant for the program. A copier needs to find the
    // driver, and to see the same GPUs.
    const KEPT: [&str; 5] = ["PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];
    let kept = |name: &str| {
        KEPT.contains(&name)
            || ["CUDA_MPS_PIPE", "CUDA_MPS_LOG", "PUSHGATE_", "_PUSHGATE_", "NVIDIA_", "RUST_"]
                .iter()
                .any(|p| name.starts_with(p))
    };
    let environment = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept));
    let mut child = Command::new(&program.path)
        .args(&program.args)
        .args(["--gpu", gpu, "--cpus", &cpus.to_string()])
        .env_clear()
        .envs(environment)
        // A hardware queue for each stream of the clients.
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| failed(&e))?;
    let mut said = child.stdout.take().expect("piped");
    // The program goes to the background, and its first process ends: nothing stays that the program's own waits could take up.
    let (tell, told) = std::sync::mpsc::channel();
    let reader = thread::Builder::new().name("copier-start".into()).spawn(move || {
        let mut text = String::new();
        let read = said.read_to_string(&mut text).map(|_| text);
        let _ = tell.send(read);
    });
    reader.map_err(|e| failed(&e))?;
    let mut text = told.recv_timeout(SLOW);
    if text.is_err() {
        tracing::warn!("the copier of GPU {gpu} has been opening the GPU for {SLOW:?}; waiting for it");
        text = told.recv_timeout(OPENS);
    }
    if text.is_err() {
        let _ = child.kill();
    }
    let _ = child.wait();
    let text =
        text.map_err(|_| failed(&format!("it did not serve within {OPENS:?}")))?.map_err(|e| failed(&e))?;
    match text.trim() {
        said if said.starts_with(READY) => Ok(()),
        "" => Err(failed(&"it ended without a word")),
        why => Err(failed(&why)),
    }
}

/// How a copier that a client has started says that it serves; anything else is why not.
pub(super) const READY: &str = "ready: ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_written_as_the_kernel_writes_them() {
        assert_eq!("auto".parse(), Ok(CopierCpus::Auto));
        assert_eq!("inherit".parse(), Ok(CopierCpus::Inherit));
        let list = CopierCpus::List(vec![0, 1, 2, 8]);
        assert_eq!("0-2,8".parse(), Ok(list.clone()));
        assert_eq!(list.to_string().parse(), Ok(list));
        for wrong in ["", "some", "3-1", "1-", "0-99999999"] {
            assert!(wrong.parse::<CopierCpus>().is_err(), "{wrong}");
        }
    }
}
