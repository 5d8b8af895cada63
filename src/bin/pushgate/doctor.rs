//! `pushgate doctor`: what is wrong with this host for RDMA and GPUs.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::Settings;
use pushgate::settings::{AutoOr, HugePages, QpKind, WindowKind, WriteOrder};
use pushgate_doctor::{self as doctor, Roots, Wants};

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    settings(
        Command::new("doctor")
            .about("Says what is wrong with this host for RDMA and GPUs, and what to do")
            .after_help(
                "Needs no root. Looks with the settings in force: --qp verbs asks more of a host than \
                 --qp local, --window bar more than memory.\n\
                 Exit status: 0 nothing to say, 1 warnings, 2 failures (or a wrong flag). docs/doctor.md \
                 describes each check.",
            )
            .arg(
                Arg::new("only")
                    .long("only")
                    .value_name("NAME,...")
                    .value_delimiter(',')
                    .help("These checks alone, by their names"),
            )
            .arg(
                Arg::new("list")
                    .long("list")
                    .action(ArgAction::SetTrue)
                    .help("Prints the checks and looks at nothing"),
            )
            .arg(
                Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints one JSON object instead"),
            )
            .arg(
                Arg::new("root")
                    .long("root")
                    .value_name("FOLDER")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help("Looks at a tree of files kept of a host (sys, proc, dev, etc) and asks this one nothing"),
            ),
    )
}

/// What the settings ask of a host. Where they are wrong, the rest of them still counts.
pub fn wants(settings: &Settings, told: Result<String, String>) -> Wants {
    Wants {
        verbs: settings.qp == QpKind::Verbs,
        window: match settings.window {
            WindowKind::Staging => doctor::Window::Staging,
            WindowKind::Bar => doctor::Window::Bar,
            _ => doctor::Window::Memory,
        },
        window_size: settings.window_size,
        net_window_size: settings.net_window_size,
        slots: settings.slots,
        receives: settings.receives,
        device: Some(settings.ib_dev.clone()).filter(|name| name != "auto"),
        port: settings.ib_port as u8,
        gid_index: match settings.gid_index {
            AutoOr::Is(index) => Some(index as u32),
            _ => None,
        },
        assumes_order: settings.write_order == WriteOrder::Assume,
        traffic_class: settings.traffic_class as u8,
        huge_pages: match settings.huge_pages {
            HugePages::Try => doctor::HugePages::Try,
            HugePages::Never => doctor::HugePages::Never,
            HugePages::Require => doctor::HugePages::Require,
        },
        settings: told,
    }
}

/// The settings as far as they are right, and what is wrong with the rest.
pub fn settings(m: &ArgMatches) -> (Settings, Result<String, String>) {
    let (mut settings, mut told) = match Settings::load() {
        Ok(settings) => (settings, Ok("environment, file and flags hold allowed settings".to_string())),
        Err(e) => (Settings::default(), Err(e.to_string())),
    };
    for key in Settings::KEYS {
        if let Some(value) = m.get_one::<String>(&key.flag())
            && let Err(e) = settings.set(key.name, value)
        {
            told = told.and(Err(e.to_string()));
        }
    }
    (settings, told)
}

pub fn run(m: &ArgMatches) -> Result<ExitCode> {
    let names: Vec<String> = m.get_many::<String>("only").into_iter().flatten().cloned().collect();
    let checks = match doctor::named(&names) {
        Ok(checks) => checks,
        Err(why) => {
            eprintln!("pushgate: --only: {why}");
            return Ok(ExitCode::from(2));
        }
    };
    if m.get_flag("list") {
        let lines = checks.iter().map(|check| format!("{:<20} {}\n", check.name, check.about));
        return say(&lines.collect::<String>()).map(|()| ExitCode::SUCCESS);
    }
    let roots = match m.get_one::<PathBuf>("root") {
        Some(root) if root.is_dir() => Roots::below(root),
        Some(root) => return Err(anyhow!("--root: {} is no folder", root.display())),
        None => Roots::host(),
    };
    let (settings, told) = settings(m);
    let report = doctor::run(&checks, &roots, wants(&settings, told));
    match m.get_flag("json") {
        true => say(&(serde_json::to_string_pretty(&report)? + "\n"))?,
        false => say(&report.text())?,
    }
    Ok(ExitCode::from(report.exit_code()))
}

/// Whoever reads may have gone: `pushgate doctor | head` is no panic.
fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing what was found"),
    }
}
