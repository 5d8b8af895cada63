//! Allreduce through window, staging ring, gate and queue pair: the ranks, each a process of its own on the CPU, one process
//! for each GPU otherwise, print what they measured as nccl-tests does, each size out of place and in place.
//!
//! On several hosts it is started once on each, with `--nodes` and `--node`; or a launcher starts every rank (torchrun,
//! mpirun, srun, `pushgate run`), and each of its processes is one rank.

mod data;
mod rank;
mod rnr;
mod start;
mod table;

use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::ranks::{Environment, Given};
use pushgate::settings::parse_size;
use pushgate::{Error, MAX_RANKS, Membership, Settings};

use self::data::{Dtype, Op};
use super::ranks;
use crate::{flags, nccl_tests};

/// Whether a result goes over the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Out,
    In,
}

/// What is printed on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Table,
    Json,
    Csv,
}

/// What the command line asks for, checked.
pub struct Options {
    pub ranks: u32,
    /// This process is one rank, which a launcher started.
    pub membership: Option<Membership>,
    pub node: u32,
    /// Ranks of this node.
    pub share: Range<u32>,
    pub job: String,
    /// Odd ranks start each iteration this much later.
    pub late: Duration,
    pub sizes: Vec<u64>,
    pub iters: u32,
    pub warmup: u32,
    pub dtype: Dtype,
    pub op: Op,
    pub channels: Option<u32>,
    pub block: Option<u32>,
    pub push_lanes: Option<u32>,
    pub slice: Option<u64>,
    /// In what order each size is run.
    pub places: &'static [Place],
    pub form: Form,
    /// A socket of the proxy process was named: the proxy there runs already.
    pub proxy_runs: bool,
    pub settings: Settings,
}

/// Smallest size, largest size and factor of `-b`, `-e` and `-f`.
const RANGE: [&str; 3] = ["8", "16M", "2"];

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let arg = |name: &'static str, value: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).default_value(default).help(help)
    };
    let option =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).value_name("N").help(help);
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let command = Command::new("allreduce")
        .about("Allreduce around a ring of ranks, every element checked, in the form of nccl-tests")
        .arg(arg("ranks", "N", "4", "Ranks, on all nodes together; a launcher says their number itself"))
        .arg(option("rank", "This is one rank, the others are started elsewhere; with --ranks").requires("ranks"))
        .arg(arg("nodes", "N", "1", "Hosts that this is started on, with --rendezvous at that of node 0"))
        .arg(arg("node", "I", "0", "Which of them this is; node 0 prints the results"))
        .arg(
            Arg::new("job").long("job").value_name("NAME").help(
                "Name of the job, the same on all nodes [default: allreduce, on one node with its pid]",
            ),
        )
        .arg(
            Arg::new("size").long("size").value_name("BYTES,...").help(
                "Bytes a rank (1024-based); a list runs from small to large; in place of -b, -e and -f [default: 16M]",
            ),
        )
        .args(nccl_tests::range_flags(RANGE))
        .arg(arg("iters", "N", "5", "Iterations measured, each checked").short('n'))
        .arg(arg("warmup", "N", "1", "Iterations before, checked too").short('w'))
        .arg(arg("dtype", "TYPE", "f32", "f32, f64, f16, bf16, i32 or i64"))
        .arg(arg("op", "OP", "sum", "sum, max, min or prod"))
        .arg(option("channels", "Queue pairs to a peer [default: 1 on the CPU, 16 shared by a GPU's ranks]"))
        .arg(option("block", "Threads of a block [default: 1 on the CPU, 512 on a GPU]"))
        .arg(option("push-lanes", "Threads of a block that store into the window [default: 64 on a GPU]"))
        .arg(option("slice", "Bytes of a message [default: a quarter of the window, at most 256K]"))
        .arg(arg("late-ms", "N", "0", "Odd ranks start each iteration this much later, milliseconds"))
        .arg(switch("in-place", "Runs in place alone, output over input [default: both, out of place first]"))
        .arg(switch("out-of-place", "Runs out of place alone").conflicts_with("in-place"))
        .arg(switch("json", "One JSON object a line"))
        .arg(switch("csv", "One CSV line a size, below a line of names").conflicts_with("json"));
    settings(command)
}

fn options(m: &ArgMatches, mut settings: Settings) -> Result<Options, Error> {
    let text = |name: &str| m.get_one::<String>(name).map(String::as_str);
    let number = |name, min, max| flags::number(m, name, min, max);
    let dtype = text("dtype").expect("has a default");
    let dtype = Dtype::parse(dtype).ok_or_else(|| Error::flag("dtype", dtype, Dtype::ALL))?;
    let op = text("op").expect("has a default");
    let op = Op::parse(op).ok_or_else(|| Error::flag("op", op, Op::ALL))?;
    let allowed = format!("whole {} elements, at most 64G, as in 4096, 16M or 1K,1M", dtype.name());
    let mut sizes = Vec::new();
    match (text("size"), nccl_tests::range(m, dtype.size() as u64, RANGE)?) {
        (Some(list), Some(_)) => {
            return Err(Error::flag("size", list, "none beside --minbytes, --maxbytes and --stepfactor"));
        }
        (None, Some(range)) => sizes = range,
        (list, None) => {
            for s in list.unwrap_or("16M").split(',') {
                let bytes = parse_size(s)
                    .filter(|b| *b > 0 && *b <= nccl_tests::MOST && b % dtype.size() as u64 == 0);
                sizes.push(bytes.ok_or_else(|| Error::flag("size", s, &allowed))?);
            }
        }
    }
    // The last line is the largest size, whatever the order they came in.
    sizes.sort_unstable();
    let slice = match text("slice") {
        None => None,
        Some(s) => {
            let window = settings.window_size;
            let slice = parse_size(s).filter(|b| *b >= 16 && b.is_multiple_of(16) && *b <= window);
            let allowed = format!("a multiple of 16, at most the window's {window}");
            Some(slice.ok_or_else(|| Error::flag("slice", s, allowed))?)
        }
    };
    let ranks = number("ranks", 1, MAX_RANKS)?.expect("has a default");
    let membership = membership(m, ranks, &settings)?;
    let ranks = membership.as_ref().map_or(ranks, |found| found.size);
    if let Some(place) = membership.as_ref().and_then(|found| found.rendezvous.as_ref()) {
        settings.rendezvous.clone_from(place);
    }
    let nodes = number("nodes", 1, ranks)?.expect("has a default");
    let node = number("node", 0, nodes - 1)?.expect("has a default");
    if let Some(found) = membership.as_ref().filter(|_| nodes > 1) {
        return Err(Error::flag(
            "nodes",
            nodes,
            format!("none beside one rank, which {} named", found.launcher),
        ));
    }
    if nodes > 1 && settings.rendezvous == "none" {
        let allowed = format!("HOST:PORT of node 0 with nodes = {nodes}");
        return Err(settings.refused("rendezvous", allowed));
    }
    settings.check()?;
    let job = match text("job") {
        Some(job) if job.is_empty() || job.len() > 80 => {
            return Err(Error::flag("job", job, "a name of 1 to 80 bytes"));
        }
        Some(job) => job.into(),
        None if nodes > 1 => "allreduce".into(),
        None => format!("allreduce-{}", std::process::id()),
    };
    Ok(Options {
        node,
        share: share(ranks, nodes, node),
        job,
        late: Duration::from_millis(number("late-ms", 0, 60_000)?.expect("has a default").into()),
        ranks,
        membership,
        sizes,
        iters: number("iters", 1, 1_000_000)?.expect("has a default"),
        warmup: number("warmup", 0, 1_000_000)?.expect("has a default"),
        dtype,
        op,
        channels: number("channels", 1, 64)?,
        block: number("block", 1, 512)?,
        push_lanes: number("push-lanes", 1, 512)?,
        slice,
        places: match (m.get_flag("out-of-place"), m.get_flag("in-place")) {
            (true, _) => &[Place::Out],
            (_, true) => &[Place::In],
            _ => &[Place::Out, Place::In],
        },
        form: match (m.get_flag("json"), m.get_flag("csv")) {
            (true, _) => Form::Json,
            (_, true) => Form::Csv,
            _ => Form::Table,
        },
        proxy_runs: text("proxy-socket").is_some()
            || std::env::var_os("PUSHGATE_PROXY_SOCKET").is_some()
            || settings.proxy_socket != Settings::default().proxy_socket,
        settings,
    })
}

/// Which rank of a launcher's this process is; `None`: it starts ranks itself, or was started so.
fn membership(m: &ArgMatches, ranks: u32, settings: &Settings) -> Result<Option<Membership>, Error> {
    if std::env::var_os(ranks::ROLE).is_some() {
        return Ok(None);
    }
    let given = m.value_source("ranks") == Some(ValueSource::CommandLine);
    let rank = flags::number(m, "rank", 0, MAX_RANKS - 1)?;
    let job = m.get_one::<String>("job").cloned();
    let flags = Given { rank, ranks: (given && rank.is_some()).then_some(ranks), job };
    let found = Membership::find(&Environment::of_process(), &flags, settings)?;
    match found {
        // A person in a shell that srun started is no rank of a larger job.
        Some(found) if given && found.size == 1 && ranks > 1 => Ok(None),
        Some(found) if given && found.size != ranks => {
            Err(Error::flag("ranks", ranks, format!("{}, as {} says", found.size, found.launcher)))
        }
        found => Ok(found),
    }
}

/// Ranks of a node: as many as of any other, or one more on the first nodes.
fn share(ranks: u32, nodes: u32, node: u32) -> Range<u32> {
    let begin = |node: u32| node * (ranks / nodes) + node.min(ranks % nodes);
    begin(node)..begin(node + 1)
}

/// Runs the bench, or the part of it that this process has.
pub fn run(m: &ArgMatches, settings: Settings) -> Result<ExitCode> {
    start::run(&mut options(m, settings)?)
}
