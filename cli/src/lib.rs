//! The `pushgate` command: a proxy for several programs, benches, settings, the topology.

#![allow(missing_docs)] // a program, not a library

mod bench;
mod chaos;
mod config;
mod copier;
mod doctor;
mod exit;
mod find;
mod flags;
mod folder;
mod inspect;
mod log;
mod metrics;
mod model;
mod nccl_check;
mod nccl_tests;
mod nixl_check;
mod output;
mod pages;
mod plugin;
mod probe;
mod proxy;
mod ranks;
mod report;
mod run;
mod signals;
mod top;
mod topo;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, Command};
use pushgate::settings::{Key, PluginSettings};
use pushgate::{Error, Membership, Settings};

use flags::load as settings;
use output::{OutputError, errln, outln};

/// The whole command line. `completing`: settings name the values that are allowed, where they are few.
fn command(completing: bool) -> Command {
    let settings = |c: Command| flags::settings(c, completing);
    let command = Command::new("pushgate")
        .about("GPU-initiated networking that pushes")
        .version(env!("_PUSHGATE_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(
            "Settings are flags, PUSHGATE_ variables or keys of /etc/pushgate.toml; `pushgate config` shows them all.\n\
             Exit status: 0; 2 for a wrong setting or argument; 1 for anything else. `doctor` and `run` have their own.",
        )
        .subcommand(proxy::command(settings))
        .subcommand(chaos::command(settings))
        .subcommand(config::command(settings))
        .subcommand(copier::command())
        .subcommand(settings(
            Command::new("devices").about("Says which executors there are, and why not the others"),
        ))
        .subcommand(doctor::command(settings))
        .subcommand(inspect::command())
        .subcommand(metrics::command())
        .subcommand(model::command())
        .subcommand(nccl_check::command(settings))
        .subcommand(nixl_check::command())
        .subcommand(probe::command(settings))
        .subcommand(ranks::command(settings))
        .subcommand(report::command(settings))
        .subcommand(run::command())
        .subcommand(top::command())
        .subcommand(topo::command())
        .subcommand(bench::command(settings))
        .subcommands(pages::commands());
    flags::help(command)
}

/// What the command line asks for, or how a help page or a wrong argument ends the program.
fn arguments() -> Result<ArgMatches, ExitCode> {
    command(false).try_get_matches().map_err(|e| match e.print() {
        Err(why) if !e.use_stderr() => ended(&OutputError::from(why).into()),
        _ => ExitCode::from(e.exit_code() as u8),
    })
}

/// The settings, with a warning for each that has no effect. `qp`: what the queue pairs of this command are, whatever the settings say.
fn warned(m: &ArgMatches, qp: Option<&str>) -> Result<Settings, Error> {
    let mut settings = settings(m)?;
    if let Some(qp) = qp {
        settings.set("qp", qp)?;
    }
    // A rank that a command started says nothing that the command has said; of a launcher's ranks rank 0 speaks.
    let rank = Membership::of_process(&settings).ok().flatten();
    let started = [bench::ROLE, chaos::ROLE].iter().any(|role| std::env::var_os(role).is_some());
    if !started && rank.as_ref().is_none_or(|found| found.rank == 0) {
        let mut in_force = settings.clone();
        if let Some(place) = rank.and_then(|found| found.rendezvous) {
            in_force.rendezvous = place;
        }
        in_force.without_effect().iter().for_each(|said| errln!("pushgate: warning: {said}"));
        let given = |key: &&Key| m.try_get_one::<String>(&key.flag()).is_ok_and(|value| value.is_some());
        for key in PluginSettings::KEYS.iter().filter(given) {
            errln!("pushgate: warning: {} has no effect: the NCCL plugin alone has this setting", key.flag());
        }
    }
    Ok(settings)
}

/// Runs what the command line asks for; returns what the program exits with.
pub fn main() -> ExitCode {
    if let Err(e) = log::start("warn") {
        return ended(&e.into());
    }
    let matches = match arguments() {
        Ok(matches) => matches,
        Err(code) => return code,
    };
    let (name, m) = matches.subcommand().expect("clap requires one");
    if ["bench", "chaos", "nccl-check", "probe", "proxy"].contains(&name) {
        // The commands that run engines.
        // Standard error may be gone.
        signals::on_usr1(|| drop(std::io::stderr().write_all(inspect::of_this_process().as_bytes())));
    }
    let done = (|| -> Result<ExitCode> {
        match name {
            "chaos" => return chaos::run(m, &warned(m, None)?),
            "doctor" => return doctor::run(m),
            "inspect" => inspect::run(m)?,
            "metrics" => metrics::run(m)?,
            "model" => model::run(m)?,
            "nccl-check" => nccl_check::run(m)?,
            "nixl-check" => nixl_check::run(m)?,
            "proxy" => return proxy::run(m, &settings(m)?),
            "ranks" => ranks::run(m)?,
            "run" => return run::run(m),
            "report" => report::run(m)?,
            "config" => config::run(m)?,
            "copier" => copier::run(m)?,
            "devices" => devices(m)?,
            "probe" => probe::run(m, &warned(m, None)?)?,
            "top" => top::run(m)?,
            "topo" => topo::run(m)?,
            "completions" => pages::completions(m, command(true))?,
            "manual" => pages::manual(m, command(false))?,
            _ => return bench::run(m, warned),
        }
        Ok(ExitCode::SUCCESS)
    })();
    done.unwrap_or_else(|e| ended(&e))
}

/// Says why the program ends, unless its reader has gone, and returns what it exits with.
fn ended(e: &anyhow::Error) -> ExitCode {
    if e.downcast_ref().is_some_and(OutputError::is_closed) {
        return ExitCode::SUCCESS;
    }
    // Standard error may lie on the full disk too; then the exit code alone says that it failed.
    errln!("pushgate: {}", exit::sentence(e));
    ExitCode::from(exit::code(e))
}

fn devices(m: &ArgMatches) -> Result<()> {
    settings(m)?;
    for a in pushgate::available_executors() {
        match a.state {
            Ok(what) => outln!("{}: {what}", a.name)?,
            Err(why) => outln!("{}: not available: {why}", a.name)?,
        }
    }
    Ok(())
}
