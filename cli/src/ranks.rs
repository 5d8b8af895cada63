//! `pushgate ranks`: which rank a launcher made of this process, and whether all ranks meet.

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::{DeviceChoice, Transport};
use pushgate::{Comm, Context, Membership};

use crate::flags;
use crate::output::outln;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    settings(
        Command::new("ranks")
            .about("Says which rank a launcher made of this process, and with --join whether all ranks meet")
            .after_help(
                "Start it as the program: torchrun --no-python --nproc-per-node 2 pushgate ranks --join; srun -n 2 pushgate \
                 ranks; mpirun -n 2 pushgate ranks; pushgate run -n 2 -- pushgate ranks. docs/clusters.md says what is taken \
                 from which launcher.",
            )
            .arg(
                Arg::new("join")
                    .long("join")
                    .action(ArgAction::SetTrue)
                    .help("Waits until all ranks are there; makes no queue pair and uses no GPU"),
            ),
    )
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let mut settings = flags::load(m)?;
    let found = Membership::of_process(&settings)?;
    match &found {
        None => outln!("no rank: no launcher has started this process")?,
        Some(found) => outln!("{}", described(found))?,
    }
    if !m.get_flag("join") {
        return Ok(());
    }
    settings.device = DeviceChoice::Cpu;
    let comm = Comm::from_environment(&Context::builder().settings(settings).build()?)?;
    comm.barrier()?;
    Ok(outln!(
        "rank {}: all {} are there, queue pairs would be {}",
        comm.rank(),
        comm.size(),
        Transport::names(&comm.transports())
    )?)
}

/// `rank 1 of 4 (1 of 2 here), by torchrun, job X, meets at HOST:PORT`.
fn described(m: &Membership) -> String {
    let here = match (m.local_rank, m.local_size) {
        (Some(rank), Some(size)) => format!(" ({rank} of {size} here)"),
        (Some(rank), None) => format!(" ({rank} here)"),
        _ => String::new(),
    };
    let place = m.rendezvous.as_ref().map_or("on this host".into(), |place| format!("at {place}"));
    format!("rank {} of {}{here}, by {}, job {}, meets {place}", m.rank, m.size, m.launcher, m.job)
}

#[cfg(test)]
mod tests {
    use pushgate::Settings;
    use pushgate::ranks::{Environment, Given};

    use super::*;

    #[test]
    fn a_rank_is_described_on_one_line() {
        let said = |variables: &[(&str, &str)]| {
            let env = Environment::new(variables.iter().copied(), 1);
            described(&Membership::find(&env, &Given::default(), &Settings::default()).unwrap().unwrap())
        };
        let own = [("PUSHGATE_RANK", "1"), ("PUSHGATE_RANKS", "2")];
        assert_eq!(said(&own), "rank 1 of 2, by pushgate run, job pushgate, meets on this host");
        let torch = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7";
        let torch: Vec<_> = torch.split(' ').map(|pair| pair.split_once('=').unwrap()).collect();
        assert_eq!(
            said(&torch),
            "rank 1 of 4 (1 of 2 here), by torchrun, job torchrun-none-a:7, meets at a:8"
        );
    }
}
