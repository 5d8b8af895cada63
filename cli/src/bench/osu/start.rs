//! Where the two ranks run: two processes of this host, threads of one, or one here and
//! one elsewhere, as `--rank` or a launcher says.

use std::process::ExitCode;

use anyhow::{Result, bail};
use pushgate::{Comm, Context};

use super::super::ranks::{self, Processes, Role};
use super::{Options, rank};
use crate::output::{errln, outln};

pub fn run(o: &Options) -> Result<ExitCode> {
    if let Some(role) = ranks::role()? {
        return child(o, &Role::parse(&role)?);
    }
    if let Some(membership) = &o.membership {
        let context = Context::builder().settings(o.settings.clone()).for_rank(membership).build()?;
        let wrong = one(o, &Comm::join(&context, membership)?, 1)?;
        // Of ranks that a launcher started rank 0 speaks for both.
        return verdict(wrong.filter(|_| membership.rank == 0 || o.rank.is_some()));
    }
    let devices = ranks::devices(&o.settings)?;
    // Kernels of two processes take turns on a GPU, milliseconds each.
    match o.processes.unwrap_or(if devices == Some(1) { 1 } else { 2 }) {
        1 => both(o),
        _ => parent(),
    }
}

fn verdict(wrong: Option<String>) -> Result<ExitCode> {
    match wrong {
        None => Ok(ExitCode::SUCCESS),
        Some(wrong) => bail!("validation failed: {wrong}"),
    }
}

/// Runs one rank. One that fails does not leave its peer waiting.
fn one(o: &Options, comm: &Comm, processes: u32) -> Result<Option<String>> {
    let done = rank::run(o, comm, processes);
    if done.is_err() {
        comm.abort();
    }
    done
}

/// Both ranks as threads, over one device and one engine.
fn both(o: &Options) -> Result<ExitCode> {
    let context = Context::builder().settings(o.settings.clone()).share(0, 1).build()?;
    let comms = Comm::local(&context, 2)?;
    let wrong = ranks::threads(comms.into_iter().map(|comm| move || one(o, &comm, 1)))?;
    verdict(wrong.into_iter().flatten().next())
}

fn child(o: &Options, role: &Role) -> Result<ExitCode> {
    let devices = ranks::devices(&o.settings)?.unwrap_or(1);
    let context = Context::builder()
        .settings(o.settings.clone())
        .device_index(role.index % devices.max(1))
        .share(role.index as usize, 2)
        .build()?;
    let wrong = one(o, &Comm::connect(&context, &role.job, role.index, 2)?, 2)?;
    // Rank 0 speaks for both.
    verdict(wrong.filter(|_| role.index == 0))
}

/// Two processes of this program with the same arguments. Rank 0 prints, by way of this process.
fn parent() -> Result<ExitCode> {
    let processes = Processes::start(2, &format!("osu-{}", std::process::id()), &[])?;
    let tell = |what: String| errln!("pushgate: {what}");
    let failed = processes.wait(|rank| format!("rank {rank}"), tell, |line| Ok(outln!("{line}")?))?;
    Ok(failed.map_or(ExitCode::SUCCESS, ExitCode::from))
}
