//! The settings of the NCCL plugin. `settings.rs` has their table.

use std::ops::{Deref, DerefMut};

use super::{Key, Origin, PluginSettings, Settings, load};
use crate::error::Result;

impl PluginSettings {
    /// Every setting: those of every program, then the plugin's own.
    pub fn keys() -> impl Iterator<Item = &'static Key> {
        Settings::KEYS.iter().chain(PluginSettings::KEYS)
    }

    /// Every setting with its value, as text that [`PluginSettings::set`] takes.
    pub fn each(&self) -> Vec<(&'static Key, String)> {
        let mut all = self.common.each();
        all.extend(self.own());
        all
    }

    pub(super) fn set_by(&self, key: &Key) -> Option<&(String, Origin)> {
        self.origins.get(key.name).or_else(|| self.common.set_by(key))
    }

    pub(super) fn set_named(&mut self, name: &str, value: &str, origin: Origin) -> Result<()> {
        let key = Key::of(name).ok_or_else(|| load::unknown(name.into(), Origin::Program))?;
        match key.is_plugins() {
            true => self.set_own(key, value, origin),
            false => self.common.set_own(key, value, origin),
        }
    }
}

impl Deref for PluginSettings {
    type Target = Settings;

    fn deref(&self) -> &Settings {
        &self.common
    }
}

impl DerefMut for PluginSettings {
    fn deref_mut(&mut self) -> &mut Settings {
        &mut self.common
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{AutoOr, NetPath};

    const BOTH: &str = "window_size = \"2M\"\npath = \"pull\"\nnet_tcp_threads = 2\nqp = \"tcp\"";

    #[test]
    fn one_file_is_for_programs_and_for_the_plugin() {
        let (mut program, mut plugin) = (Settings::default(), PluginSettings::default());
        program.apply_toml(BOTH, "/etc/x.toml").unwrap();
        plugin.apply_toml(BOTH, "/etc/x.toml").unwrap();
        assert_eq!(program, plugin.common);
        assert_eq!(
            (plugin.window_size, plugin.path, plugin.net_tcp_threads),
            (2 << 20, NetPath::Pull, AutoOr::Is(2))
        );
        for (name, line) in [("window-size", 1), ("path", 2), ("qp", 4)] {
            assert_eq!(plugin.origin(Key::of(name).unwrap()).to_string(), format!("/etc/x.toml:{line}"));
        }
        let e = plugin.refused("path", "auto here").to_string();
        assert_eq!(e, "invalid path `pull` (from /etc/x.toml:2): expected auto here");
        // Not equal where an own value differs.
        assert_ne!(plugin, PluginSettings { path: NetPath::Auto, ..plugin.clone() });
    }

    #[test]
    fn a_wrong_value_of_the_plugins_is_refused_by_programs_too() {
        let e = Settings::default().apply_toml("slots = 64\npath = \"smoke\"", "/etc/x.toml").unwrap_err();
        let says = "invalid path `smoke` (from /etc/x.toml:2): expected auto, push, pull or bounce";
        assert_eq!(e.to_string(), says);
        let e =
            PluginSettings::default().apply_toml("slots = 64\npath = \"smoke\"", "/etc/x.toml").unwrap_err();
        assert_eq!(e.to_string(), says);
    }

    #[test]
    fn a_program_that_sets_what_is_the_plugins_alone_is_told_so() {
        let mut s = Settings::default();
        for (name, value) in [("path", "push"), ("net-window-size", "4M"), ("copier_cpus", "0-3,8")] {
            let e = s.set(name, value).unwrap_err().to_string();
            let key = Key::of(name).unwrap();
            assert!(key.is_plugins() && s.text(key).is_empty());
            let says = "expected nothing here: the NCCL plugin alone has this setting";
            assert_eq!(e, format!("invalid {} `{value}`: {says}", key.flag()));
            PluginSettings::default().set(name, value).unwrap();
        }
        assert_eq!(s, Settings::default());
    }

    #[test]
    fn every_key_is_in_one_of_the_two_tables() {
        let mut all: Vec<_> = PluginSettings::keys().map(|key| key.name).collect();
        let count = all.len();
        assert!(Settings::KEYS.iter().all(|key| !key.is_plugins()));
        assert!(PluginSettings::KEYS.iter().all(Key::is_plugins));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        let each = PluginSettings::default().each();
        assert!(each.iter().all(|(key, value)| *value == key.default) && each.len() == count);
    }
}
