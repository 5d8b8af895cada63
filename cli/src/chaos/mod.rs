//! `pushgate chaos`: breaks real processes while a checked workload runs, and says what was lost.
//!
//! This process is the supervisor. The ranks are children that run this program with the same arguments ([`rank`]), and their
//! kernels send numbered messages to each other and check what arrives. The supervisor ([`supervisor`]) takes faults from a
//! seeded sequence ([`fault`]), orders or signals the children ([`children`]), and counts ([`tally`]).

mod child;
mod children;
mod fault;
mod names;
mod net;
mod rank;
mod supervisor;
mod tally;

use std::io::Write as _;
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::ranks::{Environment, Given};
use pushgate::settings::{Transport, parse_size, parse_time};
use pushgate::{Error, Membership, Settings};

pub use self::names::ROLE;
use self::net::Links;
use self::supervisor::{Hung, Interrupted, Supervisor};
use crate::output::{errln, outln};
use crate::{exit, flags, inspect, signals};

/// What the command line asks for, checked.
struct Options {
    settings: Settings,
    seconds: u32,
    every: Duration,
    seed: u64,
    ranks: u32,
    /// The place of this process's one rank, where the other ranks are started elsewhere.
    membership: Option<Membership>,
    json: bool,
    /// Bytes of memory that each rank registers with each of its queue pairs.
    region: Option<u64>,
    /// The network devices that faults are made of.
    links: Option<String>,
    /// The RDMA devices of each rank, where they are not those of `ib-dev`.
    ib_devs: Vec<String>,
}

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    settings(
        Command::new("chaos")
            .about("Breaks links and processes of a checked workload, and says whether messages were lost")
            .after_help(
                "Ranks of this host send numbered messages to each other and check every word. The faults: a queue pair's link \
                 broken at one end, at both, or several times in a row; a rank stopped and continued; a link broken \
                 while the rank at its other end is stopped, or while the ranks' sockets carry nothing; with a rendezvous, \
                 sockets that are reset. A rank that is killed or aborts ends the job by design: then the other \
                 ranks must have a status that names that rank within `timeout`, and the ranks start again. With proxy = \
                 process the proxy is killed and another one started, which takes over; links break in no other way then.\n\
                 The same seed gives the same faults in the same order with the same gaps. What the ranks do meanwhile depends \
                 on timing, so two runs with one seed differ.\n\
                 Works over qp = local, and with proxy = thread over qp = verbs and tcp. All ranks run on this host; with rendezvous = \
                 ADDRESS:PORT their sockets are those of ranks of several hosts. With --rank, or started by a launcher, this process \
                 starts that rank alone and makes its faults alone; ranks are not killed then. Signals no process but its own children, and \
                 touches no network but the devices of --link, which must not be those of a host.\n\
                 Exit status: 1 if a message was lost, doubled or wrong, or if something hung. docs/recovery.md says more.",
            )
            .arg(arg("seconds", "N", "How long faults are made [default: 60]"))
            .arg(arg("every", "TIME", "Mean gap between two faults; each is half to one and a half of this [default: 2s]"))
            .arg(arg("seed", "N", "Seed of the faults and of the messages [default: from the clock, and printed]"))
            .arg(arg("ranks", "N", "Ranks, 2 to 8 [default: 2, or as many as a launcher started]"))
            .arg(arg("rank", "N", "Start this rank alone; the others are started elsewhere. With --rendezvous and --seed"))
            .arg(arg("region", "SIZE", "Memory that each rank registers with each of its queue pairs [default: none]"))
            .arg(arg(
                "link",
                "NAMES",
                "Network devices that are set down, lose packets and delay them: virtual ones of a network namespace made for this \
                 [default: none]",
            ))
            .arg(
                arg(
                    "rank-ib-dev",
                    "NAMES",
                    "RDMA devices of rank 0, then of rank 1 and so on; as often as there are ranks [default: those of ib-dev]",
                )
                .action(ArgAction::Append),
            )
            .arg(
                Arg::new("json")
                    .long("json")
                    .action(ArgAction::SetTrue)
                    .help("Prints the summary as one JSON object on the last line"),
            ),
    )
}

impl Options {
    fn new(m: &ArgMatches, settings: &Settings) -> Result<Self> {
        settings.check()?;
        if settings.recovery().is_none() {
            return Err(settings
                .refused("recover", "a time: without recovery each broken link ends its queue pair")
                .into());
        }
        let every = match m.get_one::<String>("every") {
            None => Duration::from_secs(2),
            Some(text) => parse_time(text)
                .filter(|every| (1..=3_600_000).contains(&every.as_millis()))
                .ok_or_else(|| Error::flag("every", text, "1ms to 1h, as in 500ms or 2s"))?,
        };
        let seed = match m.get_one::<String>("seed") {
            None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64,
            Some(text) => text.parse().map_err(|_| Error::flag("seed", text, "a whole number below 2^64"))?,
        };
        let rank = flags::number(m, "rank", 0, 7)?;
        let ranks = flags::number(m, "ranks", 2, 8)?.or(rank.map(|_| 2));
        let given = Given { rank, ranks: ranks.filter(|_| rank.is_some()), job: None };
        let found = Membership::find(&Environment::of_process(), &given, settings)?;
        // A person in a shell that srun started is no rank of a job.
        let membership = found.filter(|found| found.size > 1);
        let ranks = match &membership {
            None => ranks.unwrap_or(2),
            Some(found) if found.size > 8 || ranks.is_some_and(|ranks| ranks != found.size) => {
                let allowed = "2 to 8, as many as the launcher started";
                return Err(Error::config("ranks", ranks.unwrap_or(found.size), allowed).into());
            }
            Some(found) => found.size,
        };
        if let Some(rank) = rank
            && settings.rendezvous == "none"
        {
            let allowed = "none without --rendezvous HOST:PORT: all ranks are started here then";
            return Err(Error::flag("rank", rank, allowed).into());
        }
        if membership.is_some() && m.get_one::<String>("seed").is_none() {
            let allowed = "a number, the same for all ranks that are started one by one";
            return Err(Error::flag("seed", "none", allowed).into());
        }
        let links = m.get_one::<String>("link").cloned();
        let ib_devs: Vec<_> = m.get_many::<String>("rank-ib-dev").into_iter().flatten().cloned().collect();
        let mut settings = settings.clone();
        if let Some(place) = membership.as_ref().and_then(|found| found.rendezvous.as_ref()) {
            settings.rendezvous.clone_from(place);
        }
        let transports = settings.transports();
        let (verbs, tcp) = (transports == [Transport::Verbs], transports == [Transport::Tcp]);
        for (name, value, goes, allowed) in [
            ("link", links.as_ref(), verbs || tcp, "qp = verbs or tcp: no other queue pair uses the network"),
            ("rank-ib-dev", ib_devs.first(), verbs, "qp = verbs: no other queue pair uses RDMA devices"),
        ] {
            if let Some(value) = value.filter(|_| !goes) {
                return Err(Error::flag(name, value, allowed).into());
            }
        }
        if !ib_devs.is_empty() && ib_devs.len() != ranks as usize {
            let allowed = format!("once for each of {ranks} ranks");
            return Err(Error::flag("rank-ib-dev", ib_devs.join(" "), allowed).into());
        }
        let size = |text: &String| {
            let size = parse_size(text).filter(|size| (1..=1 << 40).contains(size));
            size.ok_or_else(|| Error::flag("region", text, "1 byte to 1024G, as in 64K or 1G"))
        };
        Ok(Options {
            settings,
            membership,
            region: m.get_one("region").map(size).transpose()?,
            links,
            ib_devs,
            seconds: flags::number(m, "seconds", 1, 86_400)?.unwrap_or(60),
            every,
            seed,
            ranks,
            json: m.get_flag("json"),
        })
    }

    /// The ranks that this process starts.
    fn own(&self) -> Range<u32> {
        self.membership.as_ref().map_or(0..self.ranks, |found| found.rank..found.rank + 1)
    }
}

pub fn run(m: &ArgMatches, settings: &Settings) -> Result<ExitCode> {
    let options = Options::new(m, settings)?;
    if let Ok(role) = std::env::var(ROLE) {
        child::run(&options, &role)?;
        return Ok(ExitCode::SUCCESS);
    }
    let links = options.links.as_deref().map(Links::new).transpose()?;
    signals::catch(None);
    say(format_args!(
        "seed {}, {} ranks, {} s, a fault every {:?}",
        options.seed, options.ranks, options.seconds, options.every
    ));
    let mut supervisor = Supervisor::new(&options, links);
    let done = supervisor.run();
    if done.as_ref().is_err_and(|e| e.is::<Hung>()) {
        let pids = supervisor.pids();
        drop(std::io::stderr().write_all(inspect::of_processes(&pids).as_bytes()));
    }
    // The children end here, before the summary.
    let tally = supervisor.end();
    match options.json {
        true => outln!("{}", tally.json())?,
        false => outln!("{tally}")?,
    }
    match done {
        Err(e) if e.is::<Interrupted>() => {
            Ok(ExitCode::from(exit::of_signal(signals::caught().unwrap_or_default())))
        }
        Err(e) => Err(e.context(format!("chaos with --seed {} failed", options.seed))),
        Ok(()) if tally.is_clean() => Ok(ExitCode::SUCCESS),
        Ok(()) => {
            Err(anyhow!("chaos with --seed {} failed: messages were lost, doubled or wrong", options.seed))
        }
    }
}

/// Progress.
fn say(what: std::fmt::Arguments<'_>) {
    errln!("pushgate chaos: {what}");
}
