//! `pushgate doctor`: what is wrong with this host for RDMA and GPUs, and with the path to another one.

mod listen;
mod peer;
mod side;

use std::fs::File;
use std::io::{BufWriter, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::{AutoOr, HugePages, PluginSettings, QpKind, Transport, WindowKind, WriteOrder};
use pushgate_doctor::{self as doctor, QueuePairs, Roots, Wants};
use pushgate_service::folder::Folder;

use crate::exit;
use crate::flags;
use crate::output::{errln, out, outln};
use crate::report::redact::Redact;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    settings(
        Command::new("doctor")
            .about("Says what is wrong with this host for RDMA and GPUs, and what to do")
            .after_help(
                "Needs no root. Looks with the settings in force: --qp verbs asks more of a host than \
                 --qp local, --window bar more than memory.\n\
                 Exit status: 0 nothing to say, 1 warnings (or an archive that can't be written), 2 failures (or a \
                 wrong flag). docs/doctor.md describes each check, and what an archive leaves out.",
            )
            .arg(
                Arg::new("only")
                    .long("only")
                    .value_name("NAME,...")
                    .value_delimiter(',')
                    .help("These checks alone, by their names"),
            )
            .arg(
                Arg::new("queue-pairs")
                    .long("queue-pairs")
                    .value_name("N")
                    .value_parser(clap::value_parser!(u64).range(1..=1_000_000))
                    .help("Holds limits of memory and of RDMA objects against this number of queue pairs [default: 64]"),
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
                Arg::new("peer")
                    .long("peer")
                    .value_name("HOST[:PORT]")
                    .conflicts_with_all(["only", "list", "root", "archive", "listen"])
                    .help(
                        "Looks at the path to another host instead, on which `pushgate doctor --listen` runs (port 7118 \
                         unless another one is named); both need one secret",
                    ),
            )
            .arg(
                Arg::new("listen")
                    .long("listen")
                    .value_name("ADDRESS[:PORT]")
                    .conflicts_with_all(["only", "list", "root", "archive", "json"])
                    .help("Answers other hosts' `pushgate doctor --peer` until Ctrl-C"),
            )
            .arg(
                Arg::new("root")
                    .long("root")
                    .value_name("FOLDER")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help(
                        "Looks at a host's files kept in this folder, such as an unpacked archive, and asks this host \
                         nothing",
                    ),
            )
            .arg(
                Arg::new("archive")
                    .long("archive")
                    .value_name("FILE")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help(
                        "Also packs what the checks read into a tar file, without names and addresses, for somebody \
                         else to look at with --root",
                    ),
            ),
    )
}

/// What the settings ask of a host. Where they are wrong, the rest of them still counts.
pub fn wants(settings: &PluginSettings, told: Result<String, String>) -> Wants {
    Wants {
        verbs: settings.transports() == [Transport::Verbs],
        qp: match settings.qp {
            QpKind::Local => QueuePairs::Local,
            QpKind::Verbs => QueuePairs::Verbs,
            QpKind::Tcp => QueuePairs::Tcp,
            _ => QueuePairs::Auto,
        },
        host: (settings.host != "auto").then(|| settings.host.clone()),
        window: match settings.window {
            WindowKind::Staging => doctor::Window::Staging,
            WindowKind::Bar => doctor::Window::Bar,
            _ => doctor::Window::Memory,
        },
        window_size: settings.window_size,
        net_window_size: settings.net_window_size,
        slots: settings.slots,
        receives: settings.receives,
        devices: settings.rdma_devices().into_iter().map(Into::into).collect(),
        port: settings.ib_port as u8,
        gid_index: match settings.gid_index {
            AutoOr::Is(index) => Some(index as u32),
            _ => None,
        },
        pkey: match settings.pkey {
            AutoOr::Is(key) => Some(key as u16),
            _ => None,
        },
        assumes_order: settings.write_order == WriteOrder::Assume,
        traffic_class: match settings.traffic_class {
            AutoOr::Is(class) => class as u8,
            _ => 0,
        },
        huge_pages: match settings.huge_pages {
            HugePages::Try => doctor::HugePages::Try,
            HugePages::Never => doctor::HugePages::Never,
            HugePages::Require => doctor::HugePages::Require,
        },
        settings: told,
        ..Wants::default()
    }
}

/// The settings as far as they are right, and what is wrong with the rest.
pub fn settings(m: &ArgMatches) -> (PluginSettings, Result<String, String>) {
    let (mut settings, mut told) = match PluginSettings::load() {
        Ok(settings) => (settings, Ok("environment, file and flags hold allowed settings".to_string())),
        Err(e) => (PluginSettings::default(), Err(e.to_string())),
    };
    for key in PluginSettings::keys() {
        if let Some(value) = m.get_one::<String>(&key.flag())
            && let Err(e) = settings.set_flag(key.name, value)
        {
            told = told.and(Err(e.to_string()));
        }
    }
    if let Err(why) = Folder::of_setting(&settings.local_folder) {
        told = told.and(Err(settings.refused("local-folder", why).to_string()));
    }
    (settings, told)
}

pub fn run(m: &ArgMatches) -> Result<ExitCode> {
    if let Some(place) = m.get_one::<String>("listen") {
        return listen::serve(place, &flags::load(m)?).map(|()| ExitCode::SUCCESS);
    }
    if let Some(place) = m.get_one::<String>("peer") {
        let about = peer::look(place, &flags::load(m)?)?;
        match m.get_flag("json") {
            true => outln!("{}", serde_json::to_string_pretty(&about)?)?,
            false => out!("{}", about.report.text())?,
        }
        return Ok(ExitCode::from(about.report.exit_code()));
    }
    let names: Vec<String> = m.get_many::<String>("only").into_iter().flatten().cloned().collect();
    let checks = match doctor::named(&names) {
        Ok(checks) => checks,
        Err(why) => {
            errln!("pushgate: --only: {why}");
            return Ok(ExitCode::from(exit::WRONG));
        }
    };
    if m.get_flag("list") {
        let lines = checks.iter().map(|check| format!("{:<20} {}\n", check.name, check.about));
        out!("{}", lines.collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    let roots = match m.get_one::<PathBuf>("root").map(|root| Roots::kept(root)) {
        None => Roots::host(),
        Some(Ok(roots)) => roots,
        Some(Err(why)) => {
            errln!("pushgate: --root: {why}");
            return Ok(ExitCode::from(exit::WRONG));
        }
    };
    // Before the work, not after it.
    let archive = m.get_one::<PathBuf>("archive").map(|path| Ok::<_, anyhow::Error>((path, create(path)?)));
    let archive = archive.transpose()?;
    // An archive is looked at as its host was, unless a flag asks for something else.
    let given = PluginSettings::keys().any(|key| matches!(m.try_get_one::<String>(&key.flag()), Ok(Some(_))));
    let mut wants = match &roots.answers {
        Some(answers) if !given => answers.wants().clone(),
        _ => {
            let (settings, told) = settings(m);
            wants(&settings, told)
        }
    };
    if let Some(queue_pairs) = m.get_one("queue-pairs") {
        wants.queue_pairs = *queue_pairs;
    }
    let readings = match &archive {
        Some(_) => doctor::look(&doctor::named(&[]).unwrap_or_default(), &roots, wants),
        None => doctor::look(&checks, &roots, wants),
    };
    let report = doctor::judge(&checks, &readings);
    let packed = archive.map(|(path, file)| pack(path, file, &roots, &readings)).transpose()?;
    match m.get_flag("json") {
        true => outln!("{}", serde_json::to_string_pretty(&report)?)?,
        false => out!("{}", report.text())?,
    }
    if let Some(packed) = packed {
        errln!("pushgate: {packed}");
    }
    Ok(ExitCode::from(report.exit_code()))
}

/// The file of an archive. One that is there stays.
fn create(path: &Path) -> Result<File> {
    File::create_new(path).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => {
            anyhow!("{} is there: --archive FILE names a file that is not", path.display())
        }
        _ => anyhow!("{} can't be written: {e}", path.display()),
    })
}

/// Packs what was read, without what tells this host from others. Returns what to do with the file.
fn pack(path: &Path, file: File, roots: &Roots, readings: &doctor::Readings) -> Result<String> {
    let redact = Redact::of_this_host(&[]);
    let written = doctor::archive::write(BufWriter::new(file), roots, readings, &|text| redact.of(text));
    let files = written.inspect_err(|_| drop(std::fs::remove_file(path)));
    let files = files.with_context(|| format!("{} can't be written", path.display()))?;
    Ok(format!(
        "{0} holds {files} files, without names and addresses. Look at it before you send it. To look at this host \
         elsewhere: tar xf {0} && pushgate doctor --root {1}",
        path.display(),
        doctor::archive::FOLDER
    ))
}
