//! `pushgate metrics`: what the engines of this host count, as Prometheus reads it.

mod families;
mod http;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use prometheus::TextEncoder;
use pushgate::settings::parse_time;
use pushgate_pcie_model::whole;

use crate::exit::Input;
use crate::find;
use crate::output::out;

/// Where [`http::serve`] listens unless told otherwise.
const LISTEN: &str = "127.0.0.1:9400";

pub fn command() -> Command {
    Command::new("metrics")
        .about("Prints what the engines of this host count, as Prometheus reads it")
        .after_help(
            "Reads the flight recorders of the processes that this user may look at, as `pushgate inspect` does: root \
             sees all. docs/metrics.md has the names.",
        )
        .arg(
            Arg::new("listen")
                .long("listen")
                .value_name("[ADDRESS:]PORT")
                .value_parser(listen)
                .num_args(0..=1)
                .default_missing_value(LISTEN)
                .help("Serves them by HTTP until a signal ends the command [without a value: 127.0.0.1:9400]"),
        )
        .arg(
            Arg::new("any-address")
                .long("any-address")
                .action(ArgAction::SetTrue)
                .requires("listen")
                .help("Allows --listen an address that other hosts reach: everybody who can connect to the address can read the metrics"),
        )
        .arg(
            Arg::new("textfile")
                .long("textfile")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .conflicts_with("listen")
                .help("Writes them to a file, whole or not at all, for node_exporter's textfile collector (*.prom)"),
        )
        .arg(
            Arg::new("every")
                .long("every")
                .value_name("TIME")
                .requires("textfile")
                .value_parser(time)
                .help("Writes the file again and again, as 15s, until a signal ends the command"),
        )
        .arg(
            Arg::new("engines-only")
                .long("engines-only")
                .action(ArgAction::SetTrue)
                .help("Without the metrics of each queue pair: some 60 for each engine, however many queue pairs there are"),
        )
}

/// Where to listen: an address with a port, or a port alone, of this host's loopback.
fn listen(text: &str) -> Result<SocketAddr, String> {
    let port = || Some(SocketAddr::from((Ipv4Addr::LOCALHOST, text.trim_start_matches(':').parse().ok()?)));
    let address = text.parse().ok().or_else(port);
    address.ok_or_else(|| "expected ADDRESS:PORT, as 127.0.0.1:9400, or a port of 127.0.0.1, as 9400".into())
}

/// A time of the command line.
fn time(text: &str) -> Result<Duration, String> {
    match parse_time(text) {
        Some(time) if !time.is_zero() => Ok(time),
        _ => Err("expected a time as 500ms, 15s or 1min".into()),
    }
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let each = !m.get_flag("engines-only");
    if let Some(address) = m.get_one::<SocketAddr>("listen") {
        if !address.ip().is_loopback() && !m.get_flag("any-address") {
            let why = format!(
                "invalid --listen `{address}`: expected an address of the loopback, or --any-address beside it: everybody \
                 who can connect to the address can read the metrics, without a password"
            );
            return Err(Input(why).into());
        }
        return http::serve(*address, &|| text(each));
    }
    let Some(file) = m.get_one::<PathBuf>("textfile") else {
        return Ok(out!("{}", text(each)?)?);
    };
    loop {
        whole::write(file, &text(each)?).with_context(|| format!("writing {}", file.display()))?;
        match m.get_one::<Duration>("every") {
            Some(every) => std::thread::sleep(*every),
            None => return Ok(()),
        }
    }
}

/// The metrics of this host, in the text format.
fn text(each: bool) -> Result<String> {
    let found = find::all().context("looking for processes in /proc")?;
    // A process that is of a job and has no engine counts nothing.
    let found = found.into_iter().filter(|f| !f.process.engines.is_empty() || !f.unread.is_empty()).collect();
    Ok(TextEncoder::new().encode_to_string(&families::families(found, each))?)
}
