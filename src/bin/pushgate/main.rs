//! The `pushgate` command: a proxy for several programs, benches, settings, the topology.

#![allow(missing_docs)] // a program, not a library

mod bench;
mod doctor;
mod exit;
mod model;
mod probe;
mod proxy;
mod report;
mod signals;
mod topo;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use pushgate::{Error, Settings};

fn command() -> Command {
    let settings = |mut c: Command| {
        for key in Settings::KEYS {
            let help = format!("{} ({}) [default: {}]", key.help.trim(), key.allowed, key.default);
            let mut arg = Arg::new(key.flag()).long(key.flag()).value_name("VALUE").help(help);
            if key.is_switch() {
                arg = arg.num_args(0..=1).require_equals(true).default_missing_value("true");
            }
            c = c.arg(arg);
        }
        c
    };
    Command::new("pushgate")
        .about("GPU-initiated networking that pushes")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(settings(
            Command::new("proxy").about("Serves programs of this user that run with proxy = process"),
        ))
        .subcommand(settings(
            Command::new("config").about("Prints every setting: its value, default and what is allowed"),
        ))
        .subcommand(settings(
            Command::new("devices").about("Says which executors there are, and why not the others"),
        ))
        .subcommand(doctor::command(settings))
        .subcommand(model::command())
        .subcommand(probe::command(settings))
        .subcommand(report::command(settings))
        .subcommand(topo::command())
        .subcommand(bench::command(settings))
}

fn settings(m: &ArgMatches) -> Result<Settings, Error> {
    let mut settings = Settings::load()?;
    for key in Settings::KEYS {
        if let Some(v) = m.get_one::<String>(&key.flag()) {
            settings.set(key.name, v)?;
        }
    }
    Ok(settings)
}

/// The settings, with a warning for each that has no effect.
fn warned(m: &ArgMatches) -> Result<Settings, Error> {
    let settings = settings(m)?;
    // A rank that a bench started says nothing that the bench has said.
    if std::env::var_os(bench::ROLE).is_none() {
        settings.without_effect().iter().for_each(|said| eprintln!("pushgate: warning: {said}"));
    }
    Ok(settings)
}

fn main() -> ExitCode {
    let filter = std::env::var("PUSHGATE_LOG").unwrap_or_else(|_| "warn".into());
    let colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours).init();
    let matches = command().get_matches();
    let (name, m) = matches.subcommand().expect("clap requires one");
    let done = (|| -> Result<ExitCode> {
        match name {
            "doctor" => return doctor::run(m),
            "model" => model::run(m)?,
            "proxy" => return proxy::run(m, &settings(m)?),
            "report" => report::run(m)?,
            "config" => {
                config(m);
                settings(m)?;
            }
            "devices" => {
                settings(m)?;
                for a in pushgate::available_executors() {
                    match a.state {
                        Ok(what) => println!("{}: {what}", a.name),
                        Err(why) => println!("{}: not available: {why}", a.name),
                    }
                }
            }
            "probe" => probe::run(m, &warned(m)?)?,
            "topo" => topo::run(m)?,
            _ => bench::run(m, warned)?,
        }
        Ok(ExitCode::SUCCESS)
    })();
    match done {
        Ok(code) => code,
        Err(e) => {
            eprintln!("pushgate: {}", exit::sentence(&e));
            ExitCode::from(exit::code(&e))
        }
    }
}

fn config(m: &ArgMatches) {
    println!("{:<14} {:<26} {:<18} {:<48} help", "setting", "variable", "default", "allowed");
    for key in Settings::KEYS {
        println!(
            "{:<14} {:<26} {:<18} {:<48} {}",
            key.flag(),
            key.variable(),
            key.default,
            key.allowed,
            key.help.trim()
        );
    }
    if let Ok(s) = settings(m) {
        println!("\nin force: {s:#?}");
    }
}
