//! Settings as flags of the subcommands, which of them a subcommand's help shows, and flags that are numbers.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::{Group, Key, PluginSettings};
use pushgate::{Error, Settings};

/// The settings that the doctor looks at.
const DOCTOR: [&str; 13] = [
    "qp",
    "window",
    "window_size",
    "net_window_size",
    "slots",
    "receives",
    "huge_pages",
    "local_folder",
    "ib_dev",
    "ib_port",
    "gid_index",
    "write_order",
    "traffic_class",
];

/// The settings beside its own that the NCCL plugin has, and the check of it.
const NCCL: [&str; 7] = ["device", "qp", "host", "huge_pages", "numa_node", "timeout", "stall_report"];

/// The settings of `pushgate proxy` alone.
const SERVER: [&str; 5] = [
    "proxy_serves",
    "proxy_user_programs",
    "proxy_user_queue_pairs",
    "proxy_user_memory",
    "proxy_user_descriptors",
];

/// Whether a setting changes what `pushgate proxy` does.
pub fn of_proxy(key: &Key) -> bool {
    // proxy_user is for --status.
    SERVER.contains(&key.name) || ["proxy_socket", "proxy_user", "stall_report"].contains(&key.name)
}

/// Whether a setting changes what a subcommand does.
fn matters(subcommand: &str, key: &Key) -> bool {
    match subcommand {
        "config" => true,
        "devices" | "gate" => false,
        "proxy" => of_proxy(key),
        _ if SERVER.contains(&key.name) => false,
        "doctor" => DOCTOR.contains(&key.name) || ["secret_file", "tls"].contains(&key.name),
        "report" => key.group == Group::Device || DOCTOR.contains(&key.name),
        "probe" => key.group == Group::Device,
        "ranks" => key.group == Group::Ranks || ["qp", "timeout", "recover"].contains(&key.name),
        "nccl-check" => matches!(key.group, Group::Nccl | Group::Rdma) || NCCL.contains(&key.name),
        "nccl-trace" => {
            matches!(key.group, Group::Nccl | Group::Rdma | Group::Tcp) || NCCL.contains(&key.name)
        }
        "rdma" => matches!(key.group, Group::Rdma | Group::Waits) && key.name != "cq_events",
        "tcp" => {
            matches!(key.group, Group::Tcp | Group::Waits)
                || ["huge_pages", "slots", "receives"].contains(&key.name)
        }
        name if name.starts_with("osu-") || ["allreduce", "chaos"].contains(&name) => {
            key.group != Group::Nccl
        }
        // Both ranks are in one process.
        _ => !matches!(key.group, Group::Nccl | Group::Ranks),
    }
}

/// Adds every setting as a flag. `--help` shows those that matter to this subcommand, `--help-all` the others too:
/// these are taken as well, so that one set of flags fits all subcommands.
pub fn settings(mut command: Command, completing: bool) -> Command {
    let name = command.get_name().to_owned();
    for key in PluginSettings::keys() {
        let help = format!("{} ({}) [default: {}]", key.help.trim(), key.allowed, key.default);
        let value = match key.unit {
            "bytes" => "BYTES",
            "ms" => "TIME",
            _ => "VALUE",
        };
        let mut arg = Arg::new(key.flag()).long(key.flag()).value_name(value).help(help);
        if key.is_switch() {
            arg = arg.num_args(0..=1).require_equals(true).default_missing_value("true");
        }
        let choices = (key.choices)();
        if completing && !choices.is_empty() {
            arg = arg.value_parser(PossibleValuesParser::new(choices)).hide_possible_values(true);
        }
        command = command.arg(match matters(&name, key) {
            true => arg.help_heading("Settings"),
            false => arg.help_heading("Settings without effect here").hide_short_help(true),
        });
    }
    command
}

/// Gives a command and those below it `--help`, and `--help-all` where that shows more.
pub fn help(command: Command) -> Command {
    let more = command.get_arguments().any(Arg::is_hide_short_help_set);
    let command = command
        .mut_subcommands(help)
        .disable_help_flag(true)
        .arg(Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help("Print help"));
    if !more {
        return command;
    }
    let all = Arg::new("help-all").long("help-all").action(ArgAction::HelpLong);
    command.arg(all.help("Print help with the settings that have no effect here"))
}

/// The settings in force of a program: file, environment, and the flags of a subcommand.
pub fn load(m: &ArgMatches) -> Result<Settings, Error> {
    load_plugins(m).map(|settings| settings.common)
}

/// The settings in force of the NCCL plugin.
pub fn load_plugins(m: &ArgMatches) -> Result<PluginSettings, Error> {
    let mut settings = PluginSettings::load()?;
    for key in PluginSettings::keys() {
        if let Some(value) = m.get_one::<String>(&key.flag()) {
            settings.set_flag(key.name, value)?;
        }
    }
    Ok(settings)
}

/// The whole number of a flag, from `min` to `max`; `None` where the flag is not given.
pub fn number(m: &ArgMatches, name: &str, min: u32, max: u32) -> Result<Option<u32>, Error> {
    let Some(text) = m.get_one::<String>(name) else { return Ok(None) };
    match text.parse() {
        Ok(n) if (min..=max).contains(&n) => Ok(Some(n)),
        _ => Err(Error::flag(name, text, format!("{min} to {max}"))),
    }
}
