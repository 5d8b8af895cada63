//! `pushgate config`: every setting with its value and where the value comes from.

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::settings::{Key, PluginSettings};
use serde_json::{Value, json};

use crate::flags;
use crate::output::outln;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    settings(
        Command::new("config")
            .about("Prints every setting: its value, the value's source and unit, its default and what is allowed")
            .after_help(
                "A flag --window-size, a variable PUSHGATE_WINDOW_SIZE and a key window_size in the TOML file (that \
                 PUSHGATE_CONFIG names, else /etc/pushgate.toml) are one setting. Flags win over variables, variables \
                 over the file. docs/operations.md describes all.",
            )
            .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints one JSON array instead")),
    )
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let settings = flags::load_plugins(m)?;
    if m.get_flag("json") {
        let all: Vec<Value> =
            settings.each().iter().map(|(key, value)| object(&settings, key, value)).collect();
        return Ok(outln!("{}", serde_json::to_string_pretty(&all)?)?);
    }
    let mut rows = vec![["setting", "value", "source", "unit", "default", "allowed"].map(String::from)];
    rows.extend(settings.each().into_iter().map(|(key, value)| row(&settings, key, value)));
    let widths: [usize; 6] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        outln!("{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// A time is shown in its unit, milliseconds.
fn row(settings: &PluginSettings, key: &'static Key, value: String) -> [String; 6] {
    let in_unit = |value: String| match key.number(&value) {
        Some(ms) if key.unit == "ms" => ms.to_string(),
        _ => value,
    };
    let unit = if key.unit.is_empty() { "-" } else { key.unit };
    let source = settings.origin(key).to_string();
    [key.flag(), in_unit(value), source, unit.into(), in_unit(key.default.into()), key.allowed.into()]
}

/// Numbers are in the setting's unit.
fn object(settings: &PluginSettings, key: &'static Key, value: &str) -> Value {
    let typed = |value: &str| match (key.is_switch(), key.number(value)) {
        (true, _) => Value::from(value == "true"),
        (false, Some(number)) => number.into(),
        (false, None) => value.into(),
    };
    json!({
        "setting": key.flag(), "value": typed(value), "source": settings.origin(key).to_string(),
        "unit": (!key.unit.is_empty()).then_some(key.unit), "default": typed(key.default), "allowed": key.allowed,
        "variable": key.variable(), "key": key.name, "help": key.help.trim(),
    })
}
