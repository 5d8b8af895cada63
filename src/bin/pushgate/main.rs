//! The `pushgate` command: a proxy for several programs, benches, settings, the topology.

#![allow(missing_docs)] // a program, not a library

mod bench;
mod config;
mod doctor;
mod flags;
mod model;
mod output;
mod pages;
mod probe;
mod report;
mod topo;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, Command};
use pushgate::{Error, Settings};

use flags::load as settings;
use output::{OutputError, outln};

/// The whole command line. `completing`: settings name the values that are allowed, where they are few.
fn command(completing: bool) -> Command {
    let settings = |c: Command| flags::settings(c, completing);
    let command = Command::new("pushgate")
        .about("GPU-initiated networking that pushes")
        .version(pushgate::VERSION)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(
            "Settings are flags, PUSHGATE_ variables or keys of /etc/pushgate.toml; `pushgate config` shows them all.\n\
             Exit status: 0; 2 for a wrong setting or argument; 1 for anything else. `doctor` has its own.",
        )
        .subcommand(settings(
            Command::new("proxy").about("Serves programs of this user that run with proxy = process"),
        ))
        .subcommand(config::command(settings))
        .subcommand(settings(
            Command::new("devices").about("Says which executors there are, and why not the others"),
        ))
        .subcommand(doctor::command(settings))
        .subcommand(model::command())
        .subcommand(probe::command(settings))
        .subcommand(report::command(settings))
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

fn main() -> ExitCode {
    let filter = std::env::var("PUSHGATE_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let matches = match arguments() {
        Ok(matches) => matches,
        Err(code) => return code,
    };
    let (name, m) = matches.subcommand().expect("clap requires one");
    let done = (|| -> Result<ExitCode> {
        match name {
            "doctor" => return doctor::run(m),
            "model" => model::run(m)?,
            "proxy" => proxy(&settings(m)?)?,
            "report" => report::run(m)?,
            "config" => config::run(m)?,
            "devices" => devices(m)?,
            "probe" => probe::run(m, &settings(m)?)?,
            "topo" => topo::run(m)?,
            "completions" => pages::completions(m, command(true))?,
            "manual" => pages::manual(m, command(false))?,
            _ => bench::run(m, settings)?,
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
    // The same disk may be full, and nobody is left to be told.
    let _ = writeln!(std::io::stderr(), "pushgate: {}", sentence(e));
    ExitCode::from(if e.downcast_ref().is_some_and(Error::is_config) { 2 } else { 1 })
}

/// An error with its causes. Some errors print their cause themselves, so none is said twice.
fn sentence(e: &anyhow::Error) -> String {
    let mut text = e.to_string();
    for cause in e.chain().skip(1).map(|cause| cause.to_string()) {
        if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
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

/// Serves until SIGINT or SIGTERM; then the socket goes, and every program's
/// queue pairs end with *aborted*.
fn proxy(settings: &Settings) -> Result<()> {
    let stop = pushgate::proxy::Stop::new()?;
    let ring = stop.try_clone()?;
    ctrlc::set_handler(move || ring.ring())?;
    eprintln!("pushgate proxy: serving at {}", settings.proxy_socket.display());
    Ok(pushgate::proxy::run(&settings.proxy_socket, stop)?)
}
