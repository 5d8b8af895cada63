//! Settings from the TOML file and from the environment.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use pushgate_driver_shim::file::read_text;
use toml::de::{DeTable, DeValue};

use super::{Key, Origin, PluginSettings, Settings};
use crate::error::{Error, Result};

/// What every variable of ours begins with.
const PREFIX: &str = "PUSHGATE_";
/// The variables of ours that are no settings.
const OTHERS: [&str; 13] = [
    "CONFIG",
    "JOB",
    "LOCAL_RANK",
    "LOCAL_RANKS",
    "LOG",
    "NVCC",
    "NVRTC_DIR",
    "PROBE_FILE",
    "PYTHON_SITE",
    "RANK",
    "RANKS",
    "SECRET",
    "SKIP_LOG",
];

/// Settings that a file and the environment may set.
trait Takes {
    /// Takes the value of a setting of any kind.
    fn take(&mut self, key: &'static Key, value: &str, origin: Origin) -> Result<()>;
}

impl Takes for Settings {
    fn take(&mut self, key: &'static Key, value: &str, origin: Origin) -> Result<()> {
        match key.is_plugins() {
            // Of no effect here: the host has one file, and programs may have one environment with NCCL's. Refused is what the
            // plugin would refuse.
            true => PluginSettings::default().set_own(key, value, origin),
            false => self.set_own(key, value, origin),
        }
    }
}

impl Takes for PluginSettings {
    fn take(&mut self, key: &'static Key, value: &str, origin: Origin) -> Result<()> {
        match key.is_plugins() {
            true => self.set_own(key, value, origin),
            false => self.common.take(key, value, origin),
        }
    }
}

impl Settings {
    /// Defaults, then the TOML file (`PUSHGATE_CONFIG`, else /etc/pushgate.toml if it is there), then the
    /// environment. Refuses a setting that is unknown or not allowed, and says where it stands. Settings of the NCCL plugin alone are
    /// checked and passed over.
    pub fn load() -> Result<Self> {
        load()
    }

    /// Takes in TOML text; `file` names it in errors. The first line in the file that is wrong is refused.
    pub fn apply_toml(&mut self, text: &str, file: &str) -> Result<()> {
        apply_toml(self, text, file)
    }
}

impl PluginSettings {
    /// Loads settings as [`Settings::load`] does, the plugin's own included.
    pub fn load() -> Result<Self> {
        load()
    }

    /// Takes in TOML text as [`Settings::apply_toml`] does, the plugin's own settings included.
    pub fn apply_toml(&mut self, text: &str, file: &str) -> Result<()> {
        apply_toml(self, text, file)
    }
}

fn load<T: Takes + Default>() -> Result<T> {
    let mut settings = T::default();
    let named = std::env::var_os("PUSHGATE_CONFIG").map(PathBuf::from);
    let path = named.clone().unwrap_or("/etc/pushgate.toml".into());
    match read_text(&path) {
        Ok(text) => apply_toml(&mut settings, &text, &path.display().to_string())?,
        Err(e) if named.is_none() && e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => {
            let from = if named.is_some() { " (from PUSHGATE_CONFIG)" } else { "" };
            return Err(Error::io(format!("cannot read the settings file {}{from}", path.display()))(e));
        }
    }
    apply_environment(&mut settings, std::env::vars_os())?;
    Ok(settings)
}

fn apply_toml(settings: &mut impl Takes, text: &str, file: &str) -> Result<()> {
    let table = DeTable::parse(text)
        .map_err(|e| Error::SettingsFile { path: file.into(), why: e.to_string().trim_end().into() })?;
    let mut entries: Vec<_> = table.into_inner().into_iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in entries {
        let line = 1 + text[..name.span().start].matches('\n').count();
        let origin = Origin::File { path: file.into(), line };
        let Some(key) = Key::of(name.get_ref()) else {
            return Err(unknown(name.get_ref().to_string(), origin));
        };
        // As it stands there: what is no setting's value, as an array, none of them allows.
        let written = &text[value.span()];
        let value = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(n) => {
                i64::from_str_radix(n.as_str(), n.radix()).map_or_else(|_| written.into(), |n| n.to_string())
            }
            _ => written.into(),
        };
        settings.take(key, &value, origin)?;
    }
    Ok(())
}

/// Takes in variables; those of others are passed over.
fn apply_environment(
    settings: &mut impl Takes,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<()> {
    for (name, value) in variables {
        let Some(rest) = name.as_bytes().strip_prefix(PREFIX.as_bytes()) else { continue };
        if OTHERS.iter().any(|other| other.as_bytes() == rest) {
            continue;
        }
        let name = name.to_string_lossy().into_owned();
        let Some(key) = PluginSettings::keys().find(|key| key.variable() == name) else {
            return Err(unknown(name.clone(), Origin::Variable(name)));
        };
        let Some(value) = value.to_str() else {
            let (value, allowed) = (value.to_string_lossy(), format!("{}, in UTF-8", key.allowed));
            return Err(Error::config(&key.flag(), value, allowed).from_origin(Origin::Variable(name)));
        };
        settings.take(key, value, Origin::Variable(name))?;
    }
    Ok(())
}

/// The error for an unknown setting. `name` is as `origin` spells it.
pub(super) fn unknown(name: String, origin: Origin) -> Error {
    let near = match &origin {
        Origin::Variable(_) => {
            let settings = PluginSettings::keys().map(Key::variable);
            nearest(
                &name,
                settings.chain(OTHERS.iter().map(|other| format!("{PREFIX}{other}"))),
                PREFIX.len(),
            )
        }
        Origin::Program | Origin::Flag(_) => nearest(&name, PluginSettings::keys().map(Key::flag), 0),
        _ => nearest(&name, PluginSettings::keys().map(|key| key.name.into()), 0),
    };
    Error::UnknownSetting { name, origin, near }
}

/// The name that differs least from a wrong one, if it is near enough to be meant. `common` bytes at the beginning
/// are alike in all names.
fn nearest(wrong: &str, names: impl Iterator<Item = String>, common: usize) -> Option<String> {
    let plain = |name: &str| name.to_lowercase().replace('-', "_");
    let most = ((wrong.len() - common) / 3).max(1);
    let measured = names.map(|name| (distance(&plain(wrong), &plain(&name)), name));
    measured
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// How many characters must be put in, left out, replaced or exchanged with their neighbour to make `b` of `a`
/// (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let one = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                let exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                if exchanged { one.min(rows[i - 2][j - 2] + 1) } else { one }
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn toml(text: &str) -> String {
        Settings::default().apply_toml(text, "/etc/pushgate.toml").unwrap_err().to_string()
    }

    fn variable(name: &[u8], value: &[u8]) -> Result<Settings> {
        let mut settings = Settings::default();
        let os = |bytes: &[u8]| OsString::from_vec(bytes.into());
        apply_environment(&mut settings, [(os(name), os(value))]).map(|()| settings)
    }

    #[test]
    fn the_plugin_refuses_an_unknown_variable_and_programs_a_wrong_value_of_the_plugins() {
        let plugin = |name: &str, value: &str| {
            let mut settings = PluginSettings::default();
            apply_environment(&mut settings, [(name.into(), value.into())]).map(|()| settings)
        };
        let e = plugin("PUSHGATE_PATHS", "push").unwrap_err().to_string();
        assert_eq!(
            e,
            "unknown setting `PUSHGATE_PATHS` (from the environment): did you mean `PUSHGATE_PATH`?"
        );
        let set = plugin("PUSHGATE_NET_WINDOW_SIZE", "8M").unwrap();
        assert_eq!((set.net_window_size, plugin("PUSHGATE_SLOTS", "64").unwrap().slots), (8 << 20, 64));
        let e = plugin("PUSHGATE_PATH", "smoke").unwrap_err().to_string();
        assert_eq!(variable(b"PUSHGATE_PATH", b"smoke").unwrap_err().to_string(), e);
        assert_eq!(variable(b"PUSHGATE_PATH", b"push").unwrap(), Settings::default());
    }

    #[test]
    fn a_value_in_a_file_is_refused_with_file_and_line() {
        for (text, says) in [
            (
                "qp = \"smoke\"",
                "invalid qp `smoke` (from /etc/pushgate.toml:1): expected auto, local, verbs or tcp",
            ),
            (
                "\n\nqp = [1,\n 2]",
                "invalid qp `[1,\\n 2]` (from /etc/pushgate.toml:3): expected auto, local, verbs or tcp",
            ),
            (
                "slots = 0x63",
                "invalid slots `99` (from /etc/pushgate.toml:1): expected a power of two, 2 to 65536",
            ),
            ("ib_port = 1.0", "invalid ib-port `1.0` (from /etc/pushgate.toml:1): expected 1 to 255"),
            (
                "slots = 64\nwindowsize = 1",
                "unknown setting `windowsize` (from /etc/pushgate.toml:2): did you mean `window_size`?",
            ),
            (
                "[pushgate]\nqp = \"local\"",
                "unknown setting `pushgate` (from /etc/pushgate.toml:1): `pushgate config` lists the settings",
            ),
        ] {
            assert_eq!(toml(text), says);
        }
        let mut s = Settings::default();
        s.apply_toml("slots = 0x40\ntimeout = \"90s\"\nstuck = 500\nno_imm = true", "x").unwrap();
        assert_eq!((s.slots, s.timeout.as_secs(), s.stuck.as_millis(), s.no_imm), (64, 90, 500, true));
    }

    #[test]
    fn text_that_is_no_toml_is_shown_with_line_and_caret() {
        assert_eq!(
            toml("slots = 64\nqp = local"),
            "invalid settings file /etc/pushgate.toml: TOML parse error at line 2, column 6\n  |\n2 | qp = local\n  \
             |      ^^^^^\nstring values must be quoted, expected literal string"
        );
        assert!(toml("slots = 64\nslots = 32").contains("line 2"), "{}", toml("slots = 64\nslots = 32"));
    }

    #[test]
    fn a_variable_that_is_no_setting_is_refused_with_the_nearest() {
        let says = |name: &[u8], value: &[u8]| variable(name, value).unwrap_err().to_string();
        for (name, near) in [
            ("PUSHGATE_WINDOWSIZE", "PUSHGATE_WINDOW_SIZE"),
            ("PUSHGATE_qp", "PUSHGATE_QP"),
            ("PUSHGATE_HOTS", "PUSHGATE_HOST"),
            ("PUSHGATE_LOGS", "PUSHGATE_LOG"),
            ("PUSHGATE_TIME_OUT", "PUSHGATE_TIMEOUT"),
        ] {
            let expected = format!("unknown setting `{name}` (from the environment): did you mean `{near}`?");
            assert_eq!(says(name.as_bytes(), b"1"), expected);
        }
        for (name, shown) in [("PUSHGATE_", "PUSHGATE_"), ("PUSHGATE_PIGEON", "PUSHGATE_PIGEON")] {
            let expected = format!(
                "unknown setting `{shown}` (from the environment): `pushgate config` lists the settings"
            );
            assert_eq!(says(name.as_bytes(), b"1"), expected);
        }
        assert!(says(b"PUSHGATE_Q\xffP", b"local").starts_with("unknown setting `PUSHGATE_Q\u{fffd}P`"));
        let says = says(b"PUSHGATE_QP", b"lo\xffcal");
        assert_eq!(
            says,
            "invalid qp `lo\u{fffd}cal` (from PUSHGATE_QP): expected auto, local, verbs or tcp, in UTF-8"
        );
        for (name, value) in [("PUSHGATE_LOG", "x"), ("_PUSHGATE_ROLE", "x"), ("PATH", "x")] {
            assert_eq!(variable(name.as_bytes(), value.as_bytes()).unwrap(), Settings::default());
        }
        assert_eq!(variable(b"PUSHGATE_SLOTS", b"64").unwrap().slots, 64);
    }

    #[test]
    fn differences_count_characters() {
        for (a, b, n) in
            [("", "", 0), ("qp", "qp", 0), ("windo", "window", 1), ("hots", "host", 1), ("ab", "xyz", 3)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (n, n), "{a} {b}");
        }
    }
}
