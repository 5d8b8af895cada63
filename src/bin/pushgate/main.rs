//! The `pushgate` command: a proxy for several programs, benches, settings, the topology.

#![allow(missing_docs)] // a program, not a library

mod bench;
mod doctor;
mod model;
mod probe;
mod report;
mod topo;

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

fn main() -> ExitCode {
    let filter = std::env::var("PUSHGATE_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let matches = command().get_matches();
    let (name, m) = matches.subcommand().expect("clap requires one");
    let done = (|| -> Result<ExitCode> {
        match name {
            "doctor" => return doctor::run(m),
            "model" => model::run(m)?,
            "proxy" => proxy(&settings(m)?)?,
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
            "probe" => probe::run(m, &settings(m)?)?,
            "topo" => topo::run(m)?,
            _ => bench::run(m, settings)?,
        }
        Ok(ExitCode::SUCCESS)
    })();
    match done {
        Ok(code) => code,
        Err(e) => {
            eprintln!("pushgate: {e:#}");
            ExitCode::from(if matches!(e.downcast_ref(), Some(Error::Config { .. })) { 2 } else { 1 })
        }
    }
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
