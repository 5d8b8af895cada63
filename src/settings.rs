//! One settings struct. A flag `--window-size`, a variable `PUSHGATE_WINDOW_SIZE`
//! and a key `window_size` in the TOML file mean the same, because all three are
//! made from one table. Flags win over variables, variables over the file.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use pushgate_driver_shim::file::read_text;

use crate::error::{Error, Result};

/// Which device runs the kernels.
pub use pushgate_gpu_kernels::DeviceChoice;
/// Whether an RDMA record may follow its payload at once.
pub use pushgate_proxy::qp::verbs::WriteOrder;

/// Where windows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowKind {
    /// Shared memory of the host.
    Memory,
    /// Pages of the kernel module.
    Staging,
    /// A slice of a PCI function's BAR, by the kernel module.
    Bar,
}

/// Which transport queue pairs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QpKind {
    /// Between ranks of one host.
    Local,
    /// RDMA: InfiniBand, RoCE or soft-RoCE, between ranks anywhere.
    Verbs,
}

impl fmt::Display for WindowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WindowKind::Memory => "memory",
            WindowKind::Staging => "staging",
            WindowKind::Bar => "bar",
        })
    }
}

impl fmt::Display for QpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QpKind::Local => "local",
            QpKind::Verbs => "verbs",
        })
    }
}

/// How an engine hears of completions of an RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqEvents {
    /// Choose: events where the engine may sleep.
    Auto,
    /// Look again and again.
    Poll,
    /// Be woken.
    Event,
}

/// Where the proxy's engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyPlace {
    /// A thread of this process.
    Thread,
    /// A `pushgate proxy` process.
    Process,
}

/// Where WQE rings and control words lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingsPlace {
    /// In host memory of their own.
    Host,
    /// In the window, before the payload.
    Window,
}

/// What the NCCL plugin does with GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetPath {
    /// Choose.
    Auto,
    /// The GPU pushes it into the window.
    Push,
    /// The NIC reads it.
    Pull,
    /// NCCL's kernels push to host memory, which is sent.
    Bounce,
}

impl fmt::Display for NetPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NetPath::Auto => "auto",
            NetPath::Push => "push",
            NetPath::Pull => "pull",
            NetPath::Bounce => "bounce",
        })
    }
}

/// Where the NCCL plugin has messages for GPU memory arrive over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetLanding {
    /// Choose.
    Auto,
    /// In the GPU's memory: the RDMA device writes there.
    Gpu,
    /// In host memory, out of which the GPU pulls.
    Host,
}

impl fmt::Display for NetLanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NetLanding::Auto => "auto",
            NetLanding::Gpu => "gpu",
            NetLanding::Host => "host",
        })
    }
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
                kind: stringify!($type),
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

            /// Every setting with its value in force, for people to read.
            pub fn each(&self) -> Vec<(&'static Key, String)> {
                let values = [$(format!("{:?}", self.$name),)+];
                Self::KEYS.iter().zip(values).collect()
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
    kind: &'static str,
}

impl Key {
    /// As a flag, without the dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// It is true or false: the flag may stand alone for true, and takes a value
    /// only with `=`.
    pub fn is_switch(&self) -> bool {
        self.kind == "bool"
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
    window: WindowKind = "memory", parse_window, "memory, staging or bar";
    /// Device file of the kernel module; auto is /dev/pushgate for staging, the first /dev/pushgateN with room for bar
    window_dev: PathBuf = "auto", parse_path, "auto, or a device's path";
    /// Where WQE rings and control words lie: host memory, or in the window beside the payload, for a device that shares nothing else with the proxy
    rings: RingsPlace = "host", parse_rings, "host or window";
    /// A staging window outlives a process that was killed by this, milliseconds
    staging_ttl: Duration = "60000", parse_ms, "1 to 86400000";
    /// Transport of the queue pairs
    qp: QpKind = "local", parse_qp, "local or verbs";
    /// Where the proxy runs: a thread of this process, or a `pushgate proxy` process
    proxy: ProxyPlace = "thread", parse_proxy, "thread or process";
    /// Socket of the proxy process; a leading @ means an abstract name
    proxy_socket: PathBuf = "@pushgate-proxy", parse_path, "a path, or @ and a name";
    /// The NCCL plugin's way for GPU memory: pushed into the window, pulled by the NIC, or pushed to host memory by NCCL's kernels (bounce)
    path: NetPath = "auto", parse_net_path, "auto, push, pull or bounce";
    /// Where messages for GPU memory arrive over RDMA, in the NCCL plugin: in that memory, or in host memory, out of which the GPU pulls
    landing: NetLanding = "auto", parse_net_landing, "auto, gpu or host";
    /// Core of the proxy's thread; auto pins only where there are cores to spare
    proxy_cpu: AutoOr<usize> = "auto", parse_auto, "auto, none or a core's number";
    /// Payload ring of a queue pair, bytes
    window_size: u64 = "1M", parse_window_size, "a power of two, 64 to 512M (1024-based)";
    /// Payload ring of a connection of the NCCL plugin, bytes
    net_window_size: u64 = "4M", parse_net_window_size, "a power of two, 64K to 512M (1024-based)";
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
    /// Where ranks of several hosts meet: rank 0 listens there; none: all ranks are on this host
    rendezvous: String = "none", parse_rendezvous, "none or HOST:PORT ([ADDRESS]:PORT for IPv6)";
    /// Address at which this rank listens to others; auto is the one that reaches the rendezvous
    host: String = "auto", parse_host, "auto or an IP address of this host";
    /// RDMA device; auto is the first with an active port
    ib_dev: String = "auto", parse_device_name, "auto or a device's name, as in rxe0 or mlx5_0";
    /// Port of the RDMA device
    ib_port: u32 = "1", parse_port, "1 to 255";
    /// Entry of the port's GID table; auto takes RoCE v2 first
    gid_index: AutoOr<usize> = "auto", parse_gid_index, "auto or 0 to 255";
    /// Path MTU, bytes; auto is the port's
    ib_mtu: AutoOr<usize> = "auto", parse_mtu, "auto, 256, 512, 1024, 2048 or 4096";
    /// Traffic class of RDMA packets (RoCE: DSCP and ECN)
    traffic_class: u32 = "0", parse_byte, "0 to 255";
    /// Service level of RDMA packets
    service_level: u32 = "0", parse_service_level, "0 to 15";
    /// An RDMA packet is sent again after 4.096 us times 2 to the power of this
    ack_timeout: u32 = "14", parse_ack_timeout, "1 to 31";
    /// Times that an RDMA packet is sent again before the link counts as down
    retry_count: u32 = "7", parse_retry_count, "0 to 7";
    /// RDMA without immediate data
    no_imm: bool = "false", parse_bool, "true or false";
    /// Whether an RDMA record that announces itself follows its payload at once (assume) or when the payload's WRITE has completed (wait); auto: at once where both ends' devices are known to place WRITEs in order
    write_order: WriteOrder = "auto", parse_write_order, "auto, assume or wait";
    /// How the engine hears of RDMA completions; auto: events where it may sleep
    cq_events: CqEvents = "auto", parse_cq_events, "auto, poll or event";
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
    Some(match s {
        "memory" => WindowKind::Memory,
        "staging" => WindowKind::Staging,
        "bar" => WindowKind::Bar,
        _ => return None,
    })
}

fn parse_qp(s: &str) -> Option<QpKind> {
    Some(match s {
        "local" => QpKind::Local,
        "verbs" => QpKind::Verbs,
        _ => return None,
    })
}

fn parse_net_path(s: &str) -> Option<NetPath> {
    Some(match s {
        "auto" => NetPath::Auto,
        "push" => NetPath::Push,
        "pull" => NetPath::Pull,
        "bounce" => NetPath::Bounce,
        _ => return None,
    })
}

fn parse_net_landing(s: &str) -> Option<NetLanding> {
    Some(match s {
        "auto" => NetLanding::Auto,
        "gpu" => NetLanding::Gpu,
        "host" => NetLanding::Host,
        _ => return None,
    })
}

fn parse_rings(s: &str) -> Option<RingsPlace> {
    Some(match s {
        "host" => RingsPlace::Host,
        "window" => RingsPlace::Window,
        _ => return None,
    })
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

fn parse_net_window_size(s: &str) -> Option<u64> {
    parse_window_size(s).filter(|n| *n >= 64 << 10)
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

fn parse_rendezvous(s: &str) -> Option<String> {
    if s != "none" {
        let (host, port) = s.rsplit_once(':')?;
        in_range(port, 1, 65535)?;
        // An IPv6 address without brackets can't be told from its port.
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        match bare {
            Some(address) => drop(address.parse::<std::net::Ipv6Addr>().ok()?),
            None if host.is_empty() || host.contains([':', '[', ']', '/', ' ']) => return None,
            None => {}
        }
    }
    Some(s.into())
}

fn parse_host(s: &str) -> Option<String> {
    // One that stands for all addresses is of no use to those who are told it.
    (s == "auto" || s.parse().is_ok_and(|a: IpAddr| !a.is_unspecified())).then(|| s.into())
}

fn parse_device_name(s: &str) -> Option<String> {
    // It becomes part of a path in sysfs, and the kernel's limit is 63 bytes.
    let allowed = |b: u8| b.is_ascii_graphic() && b != b'/';
    ((1..=63).contains(&s.len()) && s.bytes().all(allowed) && !s.starts_with('.')).then(|| s.into())
}

fn in_range(s: &str, min: u32, max: u32) -> Option<u32> {
    s.bytes().all(|b| b.is_ascii_digit()).then_some(())?;
    s.parse().ok().filter(|n| (min..=max).contains(n))
}

fn parse_port(s: &str) -> Option<u32> {
    in_range(s, 1, 255)
}

fn parse_byte(s: &str) -> Option<u32> {
    in_range(s, 0, 255)
}

fn parse_service_level(s: &str) -> Option<u32> {
    in_range(s, 0, 15)
}

fn parse_ack_timeout(s: &str) -> Option<u32> {
    in_range(s, 1, 31)
}

fn parse_retry_count(s: &str) -> Option<u32> {
    in_range(s, 0, 7)
}

fn parse_gid_index(s: &str) -> Option<AutoOr<usize>> {
    if s == "auto" { Some(AutoOr::Auto) } else { in_range(s, 0, 255).map(|n| AutoOr::Is(n as usize)) }
}

fn parse_write_order(s: &str) -> Option<WriteOrder> {
    Some(match s {
        "auto" => WriteOrder::Auto,
        "assume" => WriteOrder::Assume,
        "wait" => WriteOrder::Wait,
        _ => return None,
    })
}

fn parse_mtu(s: &str) -> Option<AutoOr<usize>> {
    Some(match s {
        "auto" => AutoOr::Auto,
        "256" | "512" | "1024" | "2048" | "4096" => AutoOr::Is(s.parse().ok()?),
        _ => return None,
    })
}

fn parse_bool(s: &str) -> Option<bool> {
    Some(match s {
        "true" | "1" => true,
        "false" | "0" => false,
        _ => return None,
    })
}

fn parse_cq_events(s: &str) -> Option<CqEvents> {
    Some(match s {
        "auto" => CqEvents::Auto,
        "poll" => CqEvents::Poll,
        "event" => CqEvents::Event,
        _ => return None,
    })
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
        match read_text(&path) {
            Ok(text) => settings.apply_toml(&text, &path.display().to_string())?,
            Err(e) if !must && e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io(format!("settings file {}", path.display()))(e)),
        }
        for (name, value) in std::env::vars_os() {
            let Some(key) = name.to_str().and_then(|n| n.strip_prefix("PUSHGATE_")) else { continue };
            // What else of ours stands in the environment, and is no setting.
            if ["CONFIG", "LOG", "NVCC", "NVRTC_DIR", "PROBE_FILE", "PYTHON_SITE", "SKIP_LOG"].contains(&key)
            {
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
                toml::Value::Boolean(b) => b.to_string(),
                other => {
                    return Err(Error::config(&name, other, "a string, a whole number, true or false"));
                }
            };
            self.set(&name, &value)?;
        }
        Ok(())
    }

    /// Refuses settings that are each allowed but do not go together.
    pub fn check(&self) -> Result<()> {
        if self.rendezvous != "none" && self.qp == QpKind::Local {
            let allowed = "none with qp = local (ranks of several hosts need qp = verbs)";
            return Err(Error::config("rendezvous", &self.rendezvous, allowed));
        }
        if self.qp == QpKind::Local && self.window != WindowKind::Memory {
            let allowed = "memory with qp = local (its peer maps the window; use qp = verbs)";
            return Err(Error::config("window", self.window, allowed));
        }
        if self.rings == RingsPlace::Window && self.window == WindowKind::Memory {
            let allowed = "host with window = memory (a window of the kernel module holds rings as well)";
            return Err(Error::config("rings", "window", allowed));
        }
        if self.qp == QpKind::Verbs && self.proxy == ProxyPlace::Process {
            return Err(Error::config("proxy", "process", "thread with qp = verbs"));
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
        assert_eq!(e, "qp is carrier-pigeon, allowed is local or verbs");
        let e = s.set("windo", "memory").unwrap_err().to_string();
        assert!(e.starts_with("setting is windo, allowed is device, window, window-dev"), "{e}");
        for (name, value) in [("window-size", "3M"), ("slots", "100"), ("timeout", "0"), ("timeout", "-1")] {
            assert!(s.set(name, value).is_err(), "{name} {value}");
        }
        assert!(s.apply_toml("qp = [1]", "t").is_err());
        assert!(s.apply_toml("qp =", "t").is_err());
        assert_eq!(s, Settings::default());
    }

    #[test]
    fn values_of_every_kind() {
        let mut s = Settings::default();
        let good = [
            ("rendezvous", "none node0:7000 10.0.0.1:1 [2001:db8::1]:65535"),
            ("host", "auto 10.0.0.1 2001:db8::1 127.0.0.1"),
            ("ib-dev", "auto rxe0 mlx5_0"),
            ("ib-port", "1 255"),
            ("gid-index", "auto 0 255"),
            ("ib-mtu", "auto 256 512 1024 2048 4096"),
            ("traffic-class", "0 255"),
            ("service-level", "0 15"),
            ("ack-timeout", "1 31"),
            ("retry-count", "0 7"),
            ("no-imm", "true false 1 0"),
            ("write-order", "auto assume wait"),
            ("cq-events", "auto poll event"),
        ];
        for (name, value) in good.iter().flat_map(|(n, all)| all.split(' ').map(move |v| (n, v))) {
            s.set(name, value).unwrap();
        }
        let bad = [
            (
                "rendezvous",
                "node0 :7000 node0: node0:0 node0:65536 2001:db8::1:7000 [node0]:1 http://node0:1 node0:+1",
            ),
            ("host", "none node0 0.0.0.0 :: 10.0.0.1:7000"),
            ("ib-dev", "../x a/b . ."),
            ("ib-port", "0 256 auto +1"),
            ("gid-index", "none 256 -1"),
            ("ib-mtu", "none 0 1500 8192"),
            ("traffic-class", "256 -1"),
            ("service-level", "16"),
            ("ack-timeout", "0 32"),
            ("retry-count", "8"),
            ("no-imm", "yes TRUE 2"),
            ("write-order", "Auto none true"),
            ("cq-events", "none events"),
        ];
        for (name, value) in bad.iter().flat_map(|(n, all)| all.split(' ').map(move |v| (n, v))) {
            assert!(s.set(name, value).is_err(), "{name} {value}");
        }
        for (name, _) in good {
            assert!(s.set(name, "").is_err(), "{name}");
        }
        s.apply_toml("no_imm = true\nib_port = 2\nib_mtu = 1024\ngid_index = 3", "test").unwrap();
        assert_eq!((s.no_imm, s.ib_port, s.ib_mtu, s.gid_index), (true, 2, AutoOr::Is(1024), AutoOr::Is(3)));
        let switches: Vec<_> = Settings::KEYS.iter().filter(|k| k.is_switch()).map(|k| k.name).collect();
        assert_eq!(switches, ["no_imm"]);
    }

    #[test]
    fn local_queue_pairs_do_not_go_with_a_rendezvous() {
        let mut s = Settings::default();
        s.check().unwrap();
        s.set("rendezvous", "node0:7000").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("rendezvous is node0:7000, allowed is none with qp = local"), "{e}");
        s.set("qp", "verbs").unwrap();
        s.check().unwrap();
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
