//! `pushgate top`: what the queue pairs of this host do now.

mod columns;
mod rows;
mod screen;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::parse_time;
use pushgate_engine::recorder::report::Process;

use self::rows::{Before, Order, Row};
use crate::output::out;
use crate::{find, inspect};

/// Between the first two looks, from which the first rates come, at most.
const FIRST: Duration = Duration::from_millis(300);

pub fn command() -> Command {
    Command::new("top")
        .about("Shows what the queue pairs of this host do, as it changes")
        .after_help(
            "Keys: q ends; b, m, w, p, n sort by bytes, messages, waits, process, name; f shows a row for each process \
             or for each queue pair; arrows choose a row, whose queue pair is told below. Where standard output is no \
             terminal a plain table is printed once. docs/metrics.md says more.",
        )
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("TIME")
                .default_value("1s")
                .value_parser(interval)
                .help("Between two looks"),
        )
        .arg(
            Arg::new("sort")
                .long("sort")
                .value_name("BY")
                .default_value(Order::Bytes.word())
                .value_parser(PossibleValuesParser::new(Order::ALL.map(|(word, _)| word)))
                .help("What rows are sorted by"),
        )
        .arg(Arg::new("fold").long("fold").action(ArgAction::SetTrue).help("A row for each process"))
        .arg(
            Arg::new("once")
                .long("once")
                .action(ArgAction::SetTrue)
                .help("Prints a plain table, whose rates are those of one interval, and ends"),
        )
}

/// A time of the command line.
fn interval(text: &str) -> Result<Duration, String> {
    match parse_time(text) {
        Some(time) if (Duration::from_millis(50)..=Duration::from_secs(3600)).contains(&time) => Ok(time),
        _ => Err("expected a time from 50ms to 1h, as 500ms or 2s".into()),
    }
}

/// What is shown, and how.
struct View {
    interval: Duration,
    order: Order,
    folded: bool,
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let word = m.get_one::<String>("sort").expect("it has a default");
    let order = Order::ALL.iter().find(|(known, _)| known == word).expect("clap checks it").1;
    let view = View {
        interval: *m.get_one("interval").expect("it has a default"),
        order,
        folded: m.get_flag("fold"),
    };
    if m.get_flag("once") || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let before = Before::of(&look()?);
        std::thread::sleep(view.interval);
        let now = look()?;
        let rows = rows::rows(&now, &before, view.folded, view.order);
        return Ok(out!("{}", columns::table(&Vec::from_iter(rows.iter().map(Row::cells))))?);
    }
    screen::run(view)
}

/// The processes that have engines. What can't be read is left out; `pushgate inspect --all` says why.
fn look() -> Result<Vec<Process>> {
    Ok(inspect::split(find::all().context("looking for processes in /proc")?).0)
}
