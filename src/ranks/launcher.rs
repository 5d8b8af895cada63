//! The variables of each launcher, and what follows from them.

use super::hosts::{hosts, tasks_of};
use super::size::MAX_RANKS;
use super::{Environment, JOB, Launcher, Membership, wrong};
use crate::error::{Error, Result};

/// The first port of those that jobs of Slurm meet at, and how many there are: 23000 to 26999, below the ports that systems
/// hand out by themselves.
const SLURM_PORTS: [u64; 2] = [23000, 4000];
/// Step numbers from here on are Slurm's own: a batch script, an allocation's shell and the like, which are no ranks.
const SLURM_OWN_STEPS: u32 = 0xffff_fff0;

/// The four numbers of a rank, each by its variable.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const PUSHGATE: Names = Names {
    launcher: Launcher::Pushgate,
    rank: "PUSHGATE_RANK",
    size: "PUSHGATE_RANKS",
    local_rank: "PUSHGATE_LOCAL_RANK",
    local_size: "PUSHGATE_LOCAL_RANKS",
};
const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_size: "LOCAL_WORLD_SIZE",
};
const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
};
const MPICH: Names = Names {
    launcher: Launcher::Mpich,
    rank: "PMI_RANK",
    size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
};
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
    // A list, which `of_slurm` reads.
    local_size: "SLURM_STEP_TASKS_PER_NODE",
};

/// The rank that the variables name. `rendezvous` is the setting.
pub(super) fn find(env: &Environment, rendezvous: Option<&str>) -> Result<Option<Membership>> {
    // Ours are complete or wrong.
    if PUSHGATE.any(env) {
        return of_pushgate(env, rendezvous).map(Some);
    }
    let mut incomplete = None;
    for (names, of) in LAUNCHERS {
        match names.missing(env) {
            None => match of(env, rendezvous) {
                Ok(None) => {}
                found => return found,
            },
            Some(error) if names.any(env) => incomplete = incomplete.or(Some(error)),
            Some(_) => {}
        }
    }
    incomplete.map_or(Ok(None), Err)
}

type Of = fn(&Environment, Option<&str>) -> Result<Option<Membership>>;

/// From the innermost to the outermost.
const LAUNCHERS: [(Names, Of); 4] =
    [(TORCHRUN, of_torchrun), (OPEN_MPI, of_open_mpi), (MPICH, of_mpich), (SLURM, of_slurm)];

impl Names {
    /// Whether this launcher has started the process, or another that it inherits variables of.
    fn any(&self, env: &Environment) -> bool {
        let has = |name: &str| env.get(name).is_some();
        match self.launcher {
            // A program may have a variable RANK of its own.
            Launcher::Torchrun => has(self.size) || has("TORCHELASTIC_RUN_ID"),
            // An allocation's shell has the number of tasks, and is no rank.
            Launcher::Slurm => false,
            _ => has(self.size) || has(self.rank),
        }
    }

    /// The error for a launcher that says a rank without a size, or a size without a rank.
    fn missing(&self, env: &Environment) -> Option<Error> {
        let (missing, there) = match (env.get(self.rank), env.get(self.size)) {
            (Some(_), Some(_)) => return None,
            (None, Some(_)) => (self.rank, self.size),
            (Some(_), None) => (self.size, self.rank),
            (None, None) => (self.rank, "TORCHELASTIC_RUN_ID"),
        };
        let value = env.get(there).unwrap_or_default();
        let allowed = format!(
            "a number beside {there}={value}: have {} start every process, or unset {there}",
            self.launcher
        );
        Some(wrong(missing, "not set", allowed))
    }

    /// How many ranks this host has, where the variable is a number.
    fn here(&self, env: &Environment) -> Result<Option<u32>> {
        env.number(self.local_size, 1, u32::MAX)
    }

    /// The numbers, checked against each other. The rendezvous is still open.
    fn read(&self, env: &Environment, local_size: Option<u32>, job: String) -> Result<Membership> {
        if let Some(error) = self.missing(env) {
            return Err(error);
        }
        let size = env.number(self.size, 1, MAX_RANKS)?.expect("it is there");
        let rank = env.number(self.rank, 0, u32::MAX)?.expect("it is there");
        let below = |name: &str, n: u32, limit: u32, why: &str| match n < limit {
            true => Ok(()),
            false => Err(wrong(name, n, format!("0 to {}, below {why}={limit}", limit.saturating_sub(1)))),
        };
        below(self.rank, rank, size, self.size)?;
        if let Some(n) = local_size.filter(|n| *n > size) {
            return Err(wrong(self.local_size, n, format!("1 to {size}, at most {}={size}", self.size)));
        }
        let local_rank = env.number(self.local_rank, 0, u32::MAX)?;
        if let Some(n) = local_rank {
            match local_size {
                Some(limit) => below(self.local_rank, n, limit, self.local_size)?,
                None => below(self.local_rank, n, size, self.size)?,
            }
        }
        Ok(Membership { rank, size, local_rank, local_size, job, rendezvous: None, launcher: self.launcher })
    }
}

impl Membership {
    /// Whether all ranks are known to be on this host.
    fn is_one_host(&self) -> bool {
        self.size == 1 || self.local_size == Some(self.size)
    }

    /// Puts in where the ranks meet: at the setting, nowhere if all ranks are on this host, or else where the launcher says.
    fn meeting(
        mut self,
        setting: Option<&str>,
        launchers: impl FnOnce(&Self) -> Result<String>,
    ) -> Result<Option<Self>> {
        self.rendezvous = match setting {
            _ if self.size == 1 => None,
            Some(place) => Some(place.into()),
            None if self.is_one_host() => None,
            None => Some(launchers(&self)?),
        };
        Ok(Some(self))
    }
}

fn of_pushgate(env: &Environment, rendezvous: Option<&str>) -> Result<Membership> {
    let found = PUSHGATE.read(env, PUSHGATE.here(env)?, JOB.into())?;
    // Without a number of ranks of this host they are all here, as without any launcher.
    let here = Membership { local_size: found.local_size.or(Some(found.size)), ..found.clone() };
    let met = here.meeting(rendezvous, |here| Err(no_address(here, "PUSHGATE_RENDEZVOUS=HOST:PORT")))?;
    let met = met.expect("a meeting is one");
    Ok(Membership { rendezvous: met.rendezvous, ..found })
}

fn of_torchrun(env: &Environment, rendezvous: Option<&str>) -> Result<Option<Membership>> {
    let [address, port] = ["MASTER_ADDR", "MASTER_PORT"].map(|name| env.get(name).unwrap_or("-"));
    // Many runs have the id `none`. The store at that address and port is the run's own, as long as the run lasts.
    let id = env.get("TORCHELASTIC_RUN_ID").unwrap_or("none");
    let job = format!("torchrun-{id}-{address}:{port}");
    TORCHRUN.read(env, TORCHRUN.here(env)?, job)?.meeting(rendezvous, |_| {
        let host = env.get("MASTER_ADDR").ok_or_else(|| {
            wrong(
                "MASTER_ADDR",
                "not set",
                "rank 0's host, as torchrun sets it; or set PUSHGATE_RENDEZVOUS=HOST:PORT",
            )
        })?;
        let port = env.number("MASTER_PORT", 1, u16::MAX.into())?.ok_or_else(|| {
            wrong(
                "MASTER_PORT",
                "not set",
                "a port, as torchrun sets it; or set PUSHGATE_RENDEZVOUS=HOST:PORT",
            )
        })?;
        // At MASTER_PORT listens torchrun's store.
        let ours = if port == u32::from(u16::MAX) { port - 1 } else { port + 1 };
        Ok(place(host, ours.into()))
    })
}

fn of_open_mpi(env: &Environment, rendezvous: Option<&str>) -> Result<Option<Membership>> {
    let namespace = env.get("PMIX_NAMESPACE").map(str::to_owned);
    let name = namespace.unwrap_or_else(|| env.parent.to_string());
    let found = OPEN_MPI.read(env, OPEN_MPI.here(env)?, format!("mpirun-{name}"))?;
    if let Some(other) = env.number("PMIX_RANK", 0, u32::MAX)?
        && other != found.rank
    {
        let allowed = format!(
            "{}, as OMPI_COMM_WORLD_RANK: unset the variables of the launcher that did not start this",
            found.rank
        );
        return Err(wrong("PMIX_RANK", other, allowed));
    }
    found.meeting(rendezvous, |found| Err(no_address(found, "mpirun -x PUSHGATE_RENDEZVOUS=HOST:PORT")))
}

fn of_mpich(env: &Environment, rendezvous: Option<&str>) -> Result<Option<Membership>> {
    // srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, for the same ranks. Slurm's own variables name the hosts.
    if env.get("MPI_LOCALNRANKS").is_none() && is_slurm_task(env)? {
        return Ok(None);
    }
    // All ranks of a host have one parent.
    let found = MPICH.read(env, MPICH.here(env)?, format!("mpiexec-{}", env.parent))?;
    let across = found
        .meeting(rendezvous, |found| Err(no_address(found, "mpiexec -genv PUSHGATE_RENDEZVOUS HOST:PORT")))?;
    // Ranks of other hosts have other parents, and the rendezvous is this job's alone.
    Ok(across.map(|found| match found.rendezvous {
        Some(_) => Membership { job: "mpiexec".into(), ..found },
        None => found,
    }))
}

/// Whether srun started this process as a task. Slurm numbers the steps of users from 0.
fn is_slurm_task(env: &Environment) -> Result<bool> {
    let has = |name: &str| env.get(name).is_some();
    let step = env.number("SLURM_STEP_ID", 0, u32::MAX)?;
    Ok(has("SLURM_JOB_ID")
        && has(SLURM.rank)
        && has(SLURM.size)
        && step.is_some_and(|step| step < SLURM_OWN_STEPS))
}

fn of_slurm(env: &Environment, rendezvous: Option<&str>) -> Result<Option<Membership>> {
    if !is_slurm_task(env)? {
        return Ok(None);
    }
    let [job, step] = ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| env.number(name, 0, u32::MAX));
    let (job, step) = (job?.expect("it is there"), step?.expect("it is there"));
    let size = env.number(SLURM.size, 1, MAX_RANKS)?.expect("it is there");
    let [list, name] = match env.get("SLURM_STEP_NODELIST") {
        Some(list) => [list, "SLURM_STEP_NODELIST"],
        None => [env.get("SLURM_NODELIST").unwrap_or_default(), "SLURM_NODELIST"],
    };
    let remedy = "hosts as in node[01-03,7],gpu1, as srun sets it; or set PUSHGATE_RENDEZVOUS=HOST:PORT";
    let nodes = match list {
        "" => Err(wrong(name, "not set", remedy)),
        list => hosts(list).map_err(|why| wrong(name, list, format!("{remedy} ({why})"))),
    };
    let local_size = match (&nodes, env.number("SLURM_NODEID", 0, u32::MAX)?) {
        (Ok(nodes), _) if nodes.len() == 1 => Some(size),
        (_, Some(node)) => env.get("SLURM_STEP_TASKS_PER_NODE").and_then(|list| tasks_of(list, node)),
        _ => None,
    };
    let found = SLURM.read(env, local_size, format!("slurm-{job}.{step}"))?;
    found.meeting(rendezvous, |_| {
        // Tasks in the order of a file of hosts: no rank can tell from its own variables where rank 0 is.
        if let Some(order) = env.get("SLURM_DISTRIBUTION").filter(|order| order.starts_with("arbitrary")) {
            let allowed = "an order that puts rank 0 on the first host, as block or cyclic; or set \
                           PUSHGATE_RENDEZVOUS=HOST:PORT, with rank 0's host, for all ranks";
            return Err(wrong("SLURM_DISTRIBUTION", order, allowed));
        }
        let [first, count] = SLURM_PORTS;
        let port = first + (u64::from(job) * 16 + u64::from(step)) % count;
        Ok(place(&nodes?[0], port))
    })
}

/// `HOST:PORT`, with brackets around an IPv6 address, which may have them already.
fn place(host: &str, port: u64) -> String {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The error for ranks on several hosts whose launcher names none of them.
fn no_address(found: &Membership, remedy: &str) -> Error {
    let here = found.local_size.map_or("some".into(), |n| n.to_string());
    let allowed = format!(
        "HOST:PORT at rank 0's host, because {} has {here} of {} ranks on this host and names no host: {remedy}",
        found.launcher, found.size
    );
    Error::config("rendezvous", "none", allowed)
}
