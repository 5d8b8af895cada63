//! Where this process stands in its job: its rank, the number of ranks, the job's name and where the ranks meet.
//!
//! A [`Membership`] is a pure function of variables and flags. The first of these that says a rank wins:
//!
//! 1. what the program was given ([`Given`]), as by flags;
//! 2. `PUSHGATE_RANK` and `PUSHGATE_RANKS`, which `pushgate run` sets;
//! 3. the launcher. Of several launchers the innermost wins, the one that started this very process: torchrun, then
//!    Open MPI, then MPICH, then Slurm. The order is fixed, because launchers are started in this order: torchrun by any
//!    of the others, mpirun by Slurm, Slurm by none. A launcher that says only half of what is needed is passed over if
//!    one further out says all.
//!
//! `launcher.rs` has the variables of each launcher, `hosts.rs` Slurm's lists of hosts, `unique_id.rs` the id of programs
//! that exchange it themselves, `bootstrap.rs` how a program lends its own exchange. docs/clusters.md is the page for users.

mod bootstrap;
mod hosts;
mod launcher;
mod size;
mod unique_id;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, ToSocketAddrs};

use crate::error::{Error, Result};
use crate::settings::Settings;

pub use bootstrap::Bootstrap;
pub use size::MAX_RANKS;
pub(crate) use size::{check_rank, check_size};
pub(crate) use unique_id::Listeners;
pub use unique_id::UniqueId;

/// The job's name where nothing else names it.
const JOB: &str = "pushgate";
/// The longest name of a job that ranks can meet under.
const MAX_JOB: usize = 80;

/// Variables of a process, and the process that started it.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    parent: u32,
}

impl Environment {
    /// The variables and the parent of this process. Bytes that are no UTF-8 become U+FFFD.
    pub fn of_process() -> Self {
        let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        let variables = std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value)));
        Self::new(variables, std::os::unix::process::parent_id())
    }

    /// The environment of a process that `parent` started, with these variables.
    pub fn new<N: Into<String>, V: Into<String>>(
        variables: impl IntoIterator<Item = (N, V)>,
        parent: u32,
    ) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Environment { variables, parent }
    }

    /// The value of a variable; `None` where it is not set, or empty.
    fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A variable that is a whole number of at most `most`.
    fn number(&self, name: &str, least: u32, most: u32) -> Result<Option<u32>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match text.parse() {
            Ok(n) if (least..=most).contains(&n) => Ok(Some(n)),
            _ => Err(wrong(name, text, format!("a whole number, {least} to {most}"))),
        }
    }
}

/// The error for a variable that is not allowed.
fn wrong(name: &str, value: impl ToString, allowed: impl ToString) -> Error {
    Error::config(name, value, allowed)
}

/// What a program was given in place of what variables say, as by flags.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// This process's rank. Needs `ranks` beside it.
    pub rank: Option<u32>,
    /// The number of ranks. Without `rank` the launcher's number must be the same.
    pub ranks: Option<u32>,
    /// The job's name.
    pub job: Option<String>,
}

/// What said where a process stands in its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// The program was given rank and ranks.
    Given,
    /// `pushgate run`, or a person who set its variables.
    Pushgate,
    /// PyTorch's torchrun, or another program that sets its variables.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpiexec of MPICH, or of an MPI made of it.
    Mpich,
    /// srun.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Given => "flags",
            Launcher::Pushgate => "pushgate run",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mpich => "MPICH",
            Launcher::Slurm => "Slurm",
        })
    }
}

/// Where a process stands in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Membership {
    /// This process's number, from 0.
    pub rank: u32,
    /// How many ranks the job has.
    pub size: u32,
    /// This process's number among those of its host, if the launcher says it.
    pub local_rank: Option<u32>,
    /// How many ranks its host has, if the launcher says it.
    pub local_size: Option<u32>,
    /// The job's name, one for each launch.
    pub job: String,
    /// Where the ranks meet, `HOST:PORT`; `None`: all ranks are on this host.
    pub rendezvous: Option<String>,
    /// What said all this.
    pub launcher: Launcher,
}

impl Membership {
    /// Where this process stands, by its environment. `None`: it was started as no rank.
    ///
    /// The setting `rendezvous` is taken in place of the launcher's.
    pub fn of_process(settings: &Settings) -> Result<Option<Self>> {
        Self::find(&Environment::of_process(), &Given::default(), settings)
    }

    /// Where a process with this environment stands. `None`: it was started as no rank.
    ///
    /// The setting `rendezvous` is taken in place of the launcher's.
    pub fn find(env: &Environment, given: &Given, settings: &Settings) -> Result<Option<Self>> {
        let rendezvous = Some(settings.rendezvous.as_str()).filter(|place| *place != "none");
        if let Some(rank) = given.rank {
            let Some(ranks) = given.ranks else {
                let allowed = "beside ranks, the number of ranks of the job";
                return Err(Error::config("rank", rank, allowed));
            };
            let job = job(env, given, JOB.into())?;
            let all = Membership {
                rank,
                size: ranks,
                local_rank: env.number("PUSHGATE_LOCAL_RANK", 0, MAX_RANKS - 1)?,
                local_size: None,
                job,
                rendezvous: rendezvous.filter(|_| ranks > 1).map(str::to_owned),
                launcher: Launcher::Given,
            };
            return all.check_given().map(Some);
        }
        let Some(mut found) = launcher::find(env, rendezvous)? else { return Ok(None) };
        if let Some(ranks) = given.ranks
            && ranks != found.size
        {
            let allowed = format!("{}, the number of ranks that {} started", found.size, found.launcher);
            return Err(Error::config("ranks", ranks, allowed));
        }
        found.job = job(env, given, found.job)?;
        Ok(Some(found))
    }

    fn check_given(self) -> Result<Self> {
        check_rank(self.rank, self.size)?;
        Ok(self)
    }

    /// The GPU for this rank, by its number among the ranks of its host. `devices`: how many this process sees.
    pub fn device_index(&self, devices: u32) -> u32 {
        self.local_rank.unwrap_or(0) % devices.max(1)
    }

    /// Where rank 0 listens: at the rendezvous, or at its port of all addresses, if rank 0's host knows its own name by
    /// loopback addresses alone, as some distributions have it.
    pub(crate) fn listens(&self) -> Option<String> {
        let place = self.rendezvous.as_ref()?;
        let (host, port) = place.rsplit_once(':')?;
        // A person who wrote an address meant that address.
        if self.rank > 0 || host.starts_with('[') || host == "localhost" || host.parse::<IpAddr>().is_ok() {
            return Some(place.clone());
        }
        let mut all = place.to_socket_addrs().into_iter().flatten().peekable();
        let unreachable = all.peek().is_some() && all.all(|address| address.ip().is_loopback());
        Some(if unreachable { format!("0.0.0.0:{port}") } else { place.clone() })
    }
}

/// The job's name: given, of the variable `PUSHGATE_JOB`, or else `found`.
fn job(env: &Environment, given: &Given, found: String) -> Result<String> {
    let allowed = format!("a name of 1 to {MAX_JOB} bytes");
    match (&given.job, env.get("PUSHGATE_JOB")) {
        (Some(job), _) if job.is_empty() || job.len() > MAX_JOB => Err(Error::config("job", job, allowed)),
        (Some(job), _) => Ok(job.clone()),
        (None, Some(job)) if job.len() > MAX_JOB => Err(wrong("PUSHGATE_JOB", job, allowed)),
        (None, Some(job)) => Ok(job.into()),
        (None, None) => Ok(short(found)),
    }
}

/// A name that ranks can meet under: a longer one is cut, and a hash of all of it added (FNV-1a).
fn short(name: String) -> String {
    if name.len() <= MAX_JOB {
        return name;
    }
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut end = MAX_JOB - 17;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}-{hash:016x}", &name[..end])
}

#[cfg(test)]
mod tests;
