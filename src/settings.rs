//! One settings struct. A flag `--window-size`, a variable `PUSHGATE_WINDOW_SIZE`
//! and a key `window_size` in the TOML file mean the same, because all three are
//! made from one table. Flags win over variables, variables over the file.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

/// Which device runs the kernels.
pub use pushgate_gpu_kernels::DeviceChoice;

/// Where windows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowKind {
    /// Shared memory of the host.
    Memory,
}

/// Which transport queue pairs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QpKind {
    /// Between ranks of one host.
    Local,
}

/// Where the proxy's engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyPlace {
    /// A thread of this process.
    Thread,
    /// A `pushgate proxy` process.
    Process,
}

/// Something that may be left to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOr<T> {
    /// Choose.
    Auto,
    /// Do without.
    None,
    /// This one.
    Is(T),
}

pub use pushgate_driver_shim::memory::HugePages;

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:literal, $parse:path, $allowed:literal;)+) => {
        /// See the module's text. Every field can also be set by name with [`Settings::set`].
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct Settings { $($(#[doc = $doc])+ pub $name: $type,)+ }

        impl Default for Settings {
            fn default() -> Self {
                Settings { $($name: $parse($default).expect("defaults are allowed"),)+ }
            }
        }

        impl Settings {
            /// Every setting.
            pub const KEYS: &'static [Key] = &[$(Key {
                name: stringify!($name),
                help: concat!($($doc),+),
                default: $default,
                allowed: $allowed,
            },)+];

            /// Sets one by its name, with `-` or `_` alike. An unknown name and a
            /// value that is not allowed are refused.
            pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
                match name.replace('-', "_").as_str() {
                    $(stringify!($name) => {
                        self.$name = $parse(value).ok_or_else(|| {
                            Error::config(&stringify!($name).replace('_', "-"), value, $allowed)
                        })?;
                    })+
                    _ => {
                        let known: Vec<_> = Self::KEYS.iter().map(|k| k.flag()).collect();
                        return Err(Error::config("setting", name, known.join(", ")));
                    }
                }
                Ok(())
            }
        }
    };
}

/// A setting: its name as a TOML key, and what is said of it.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// TOML key.
    pub name: &'static str,
    /// A sentence.
    pub help: &'static str,
    /// Default, as text.
    pub default: &'static str,
    /// What is allowed.
    pub allowed: &'static str,
}

impl Key {
    /// As a flag, without the dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// As an environment variable.
    pub fn variable(&self) -> String {
        format!("PUSHGATE_{}", self.name.to_uppercase())
    }
}

settings! {
    /// What runs the kernels: a GPU where one is usable, else the CPU
    device: DeviceChoice = "auto", parse_device, "auto, cpu or cuda";
    /// Where the payload lands
    window: WindowKind = "memory", parse_window, "memory";
    /// Transport of the queue pairs
    qp: QpKind = "local", parse_qp, "local";
    /// Where the proxy runs: a thread of this process, or a `pushgate proxy` process
    proxy: ProxyPlace = "thread", parse_proxy, "thread or process";
    /// Socket of the proxy process; a leading @ means an abstract name
    proxy_socket: PathBuf = "@pushgate-proxy", parse_path, "a path, or @ and a name";
    /// Core of the proxy's thread; auto pins only where there are cores to spare
    proxy_cpu: AutoOr<usize> = "auto", parse_auto, "auto, none or a core's number";
    /// Payload ring of a queue pair, bytes
    window_size: u64 = "1M", parse_window_size, "a power of two, 64 to 512M (1024-based)";
    /// WQE slots of a queue pair
    slots: u64 = "1024", parse_slots, "a power of two, 2 to 65536";
    /// Receives of a queue pair
    receives: u64 = "1024", parse_slots, "a power of two, 2 to 65536";
    /// Signal words of a queue pair
    signals: u64 = "64", parse_signals, "1 to 65536";
    /// 2 MiB pages for windows
    huge_pages: HugePages = "try", parse_huge, "try, never or require";
    /// NUMA node of windows; auto is the GPU's
    numa_node: AutoOr<usize> = "auto", parse_auto, "auto, none or a node's number";
    /// Every wait on a device or in a call ends after this, milliseconds
    timeout: Duration = "30000", parse_ms, "1 to 86400000";
    /// A WQE slot reserved and not published for this long ends its queue pair, milliseconds
    stuck: Duration = "2000", parse_ms, "1 to 86400000";
}

fn parse_device(s: &str) -> Option<DeviceChoice> {
    Some(match s {
        "auto" => DeviceChoice::Auto,
        "cpu" => DeviceChoice::Cpu,
        "cuda" => DeviceChoice::Cuda,
        _ => return None,
    })
}

fn parse_window(s: &str) -> Option<WindowKind> {
    (s == "memory").then_some(WindowKind::Memory)
}

fn parse_qp(s: &str) -> Option<QpKind> {
    (s == "local").then_some(QpKind::Local)
}

fn parse_proxy(s: &str) -> Option<ProxyPlace> {
    Some(match s {
        "thread" => ProxyPlace::Thread,
        "process" => ProxyPlace::Process,
        _ => return None,
    })
}

fn parse_path(s: &str) -> Option<PathBuf> {
    (!s.is_empty() && s != "@").then(|| s.into())
}

fn parse_auto(s: &str) -> Option<AutoOr<usize>> {
    Some(match s {
        "auto" => AutoOr::Auto,
        "none" => AutoOr::None,
        n => AutoOr::Is(n.parse().ok()?),
    })
}

fn parse_window_size(s: &str) -> Option<u64> {
    parse_size(s).filter(|n| n.is_power_of_two() && (64..=512 << 20).contains(n))
}

fn parse_slots(s: &str) -> Option<u64> {
    s.parse().ok().filter(|n: &u64| n.is_power_of_two() && (2..=65536).contains(n))
}

fn parse_signals(s: &str) -> Option<u64> {
    s.parse().ok().filter(|n| (1..=65536).contains(n))
}

fn parse_huge(s: &str) -> Option<HugePages> {
    Some(match s {
        "try" => HugePages::Try,
        "never" => HugePages::Never,
        "require" => HugePages::Require,
        _ => return None,
    })
}

fn parse_ms(s: &str) -> Option<Duration> {
    s.parse().ok().filter(|n| (1..=86_400_000).contains(n)).map(Duration::from_millis)
}

/// A size in bytes: a whole number with K, M or G behind it (1024-based), or none.
pub fn parse_size(s: &str) -> Option<u64> {
    let (number, shift) = match s.as_bytes().last()? {
        b'K' | b'k' => (&s[..s.len() - 1], 10),
        b'M' | b'm' => (&s[..s.len() - 1], 20),
        b'G' | b'g' => (&s[..s.len() - 1], 30),
        _ => (s, 0),
    };
    // `parse` alone would take a leading plus.
    number.bytes().all(|b| b.is_ascii_digit()).then_some(())?;
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl Settings {
    /// Defaults, then the TOML file (`PUSHGATE_CONFIG`, else /etc/pushgate.toml if
    /// there is one), then the environment. A setting that is unknown or wrong is
    /// named and refused.
    pub fn load() -> Result<Self> {
        let mut settings = Settings::default();
        let (path, must) = match std::env::var_os("PUSHGATE_CONFIG") {
            Some(p) => (PathBuf::from(p), true),
            None => (PathBuf::from("/etc/pushgate.toml"), false),
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => settings.apply_toml(&text, &path.display().to_string())?,
            Err(e) if !must && e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io(format!("settings file {}", path.display()))(e)),
        }
        for (name, value) in std::env::vars_os() {
            let Some(key) = name.to_str().and_then(|n| n.strip_prefix("PUSHGATE_")) else { continue };
            // What else of ours stands in the environment, and is no setting.
            if ["CONFIG", "LOG", "NVCC", "NVRTC_DIR", "PYTHON_SITE", "SKIP_LOG"].contains(&key) {
                continue;
            }
            let value = value.to_str().ok_or_else(|| Error::config(key, "not UTF-8", "text"))?;
            settings.set(&key.to_lowercase(), value)?;
        }
        Ok(settings)
    }

    /// Takes in TOML text; `source` names it in errors.
    pub fn apply_toml(&mut self, text: &str, source: &str) -> Result<()> {
        let table: toml::Table =
            text.parse().map_err(|e: toml::de::Error| Error::config(source, e.message(), "valid TOML"))?;
        for (name, value) in table {
            let value = match value {
                toml::Value::String(s) => s,
                toml::Value::Integer(i) => i.to_string(),
                other => return Err(Error::config(&name, other, "a string or a whole number")),
            };
            self.set(&name, &value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_keys_and_variables_are_one_table() {
        let mut s = Settings::default();
        for key in Settings::KEYS {
            s.set(&key.flag(), key.default).unwrap();
            s.set(key.name, key.default).unwrap();
        }
        assert_eq!(s, Settings::default());
        s.apply_toml("window_size = \"2M\"\nslots = 64", "test").unwrap();
        assert_eq!((s.window_size, s.slots), (2 << 20, 64));
    }

    #[test]
    fn wrong_settings_are_named_with_what_is_allowed() {
        let mut s = Settings::default();
        let e = s.set("qp", "carrier-pigeon").unwrap_err().to_string();
        assert_eq!(e, "qp is carrier-pigeon, allowed is local");
        let e = s.set("windo", "memory").unwrap_err().to_string();
        assert!(e.starts_with("setting is windo, allowed is device, window, qp"), "{e}");
        for (name, value) in [("window-size", "3M"), ("slots", "100"), ("timeout", "0"), ("timeout", "-1")] {
            assert!(s.set(name, value).is_err(), "{name} {value}");
        }
        assert!(s.apply_toml("qp = [1]", "t").is_err());
        assert!(s.apply_toml("qp =", "t").is_err());
        assert_eq!(s, Settings::default());
    }

    #[test]
    fn sizes_are_1024_based() {
        for (text, bytes) in [("0", 0), ("17", 17), ("4K", 4096), ("16m", 16 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "K", "-1", "+1", "1.5M", "4 K", "99999999999G", "x"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
