//! Every setting, in one table.
//!
//! A flag `--window-size`, a variable `PUSHGATE_WINDOW_SIZE` and a key `window_size` in the TOML file mean the
//! same, because all three are made from this table. Flags win over variables, variables over the file.
//! `settings/choices.rs` has the values of settings that are a choice, `settings/parse.rs` turns text into values and
//! values into text, `settings/load.rs` reads the file and the environment.

mod choices;
mod load;
mod parse;
mod plugin;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pushgate_door::{Purpose, Secret, SecretError, Terms, VARIABLE};
use pushgate_service::folder::Folder;
use pushgate_service::users::find_user;

use self::parse::{
    Value, auto_or_none, auto_or_number, auto_or_pkey, auto_or_size, choice, copier_cpus, device_names, host,
    mtu, number, path, path_timeout, port_range, power_of_two, recover, rendezvous, size, switch, time,
    time_or_0, user, users, window_size,
};
use crate::error::{Error, Result};

pub use self::choices::{
    AutoOr, CqEvents, DriveChoice, NetLanding, NetPath, ProxyPlace, QpKind, RingsPlace, TcpIo, Transport,
    WindowKind,
};
pub use self::parse::{parse_size, parse_time};
pub use crate::origin::Origin;
/// Memory in 2 MiB pages or not.
pub use pushgate_driver_shim::memory::HugePages;
/// The kind of device that runs the kernels.
pub use pushgate_gpu_kernels::DeviceChoice;
/// The cores that a copier uses.
pub use pushgate_gpu_kernels::copier::CopierCpus;
/// Whether an RDMA record may follow its payload at once.
pub use pushgate_link_verbs::{RdmaCm, WriteOrder};

/// What a setting is about. Help pages show the groups that matter to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// What runs the kernels.
    Device,
    /// The memory that payload is pushed into.
    Window,
    /// Queue pairs of every transport.
    QueuePair,
    /// The proxy's engine.
    Proxy,
    /// Limits of waits.
    Waits,
    /// How ranks of several hosts meet.
    Ranks,
    /// RDMA devices and their queue pairs.
    Rdma,
    /// Queue pairs over TCP.
    Tcp,
    /// The NCCL plugin alone.
    Nccl,
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
    /// Unit of a number without a unit of its own: `bytes`, `ms` or another, empty for a count and for what is no
    /// number.
    pub unit: &'static str,
    /// What it is about.
    pub group: Group,
    /// Every value that is allowed, where they are few; else empty.
    pub choices: fn() -> Vec<&'static str>,
    kind: &'static str,
}

impl Key {
    /// The key of this name, of a program's settings or the NCCL plugin's, with `-` or `_` alike.
    pub fn of(name: &str) -> Option<&'static Key> {
        let name = name.replace('-', "_");
        PluginSettings::keys().find(|key| key.name == name)
    }

    /// Whether the NCCL plugin alone has the setting ([`PluginSettings`]).
    pub fn is_plugins(&self) -> bool {
        self.group == Group::Nccl
    }

    /// The setting's name as a flag, without the dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// The setting's name as an environment variable.
    pub fn variable(&self) -> String {
        format!("PUSHGATE_{}", self.name.to_uppercase())
    }

    /// Whether the setting is true or false. The flag may then stand alone for true, and takes a value only with `=`.
    pub fn is_switch(&self) -> bool {
        self.kind == "bool"
    }

    /// A value, as text, as a number in the setting's unit. Nothing for `auto`, `none` and what is no number.
    pub fn number(&self, value: &str) -> Option<u64> {
        match (self.kind, self.unit) {
            ("Duration" | "AutoOr<Duration>", _) => parse_time(value).map(|time| time.as_millis() as u64),
            ("u64", "bytes") => parse_size(value),
            ("u64" | "u32" | "AutoOr<usize>", _) => value.parse().ok(),
            _ => None,
        }
    }
}

macro_rules! settings {
    ($(#[$about:meta])+ $settings:ident $(extends $base:ident: $all:ty)?;
     $($(#[doc = $doc:literal])+
       $name:ident: $type:ty = $default:literal, $parse:expr, $allowed:literal, $unit:literal, $group:ident;)+) => {
        $(#[$about])+
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub struct $settings {
            $(
                /// The settings of every program.
                pub $base: $all,
            )?
            $($(#[doc = $doc])+ pub $name: $type,)+
            /// Where values come from that a source set, with the value as text at that time.
            pub(crate) origins: BTreeMap<&'static str, (String, Origin)>,
        }

        impl Default for $settings {
            fn default() -> Self {
                $settings {
                    $($base: Default::default(),)?
                    $($name: ($parse)($default).expect("defaults are allowed"),)+
                    origins: BTreeMap::new(),
                }
            }
        }

        impl PartialEq for $settings {
            fn eq(&self, other: &Self) -> bool {
                $(self.$base == other.$base &&)? $(self.$name == other.$name)&&+
            }
        }

        impl $settings {
            /// Every setting that this structure has itself.
            pub const KEYS: &'static [Key] = &[$(Key {
                name: stringify!($name),
                help: concat!($($doc),+),
                default: $default,
                allowed: $allowed,
                unit: $unit,
                group: Group::$group,
                choices: <$type as Value>::choices,
                kind: stringify!($type),
            },)+];

            /// Sets the field of a key of [`Self::KEYS`]. False, and nothing changed, if the value is not allowed.
            fn put(&mut self, key: &Key, value: &str) -> bool {
                match key.name {
                    $(stringify!($name) => ($parse)(value).map(|value| self.$name = value).is_some(),)+
                    _ => unreachable!("{} is in the table", key.name),
                }
            }

            /// The settings of [`Self::KEYS`] with their values.
            fn own(&self) -> Vec<(&'static Key, String)> {
                let values = [$(Value::text(&self.$name, $unit),)+];
                Self::KEYS.iter().zip(values).collect()
            }

            fn set_own(&mut self, key: &'static Key, value: &str, origin: Origin) -> Result<()> {
                if !self.put(key, value) {
                    return Err(Error::config(&key.flag(), value, key.allowed).from_origin(origin));
                }
                self.origins.insert(key.name, (self.text(key), origin));
                Ok(())
            }

            /// Sets a setting by its name, with `-` or `_` alike. An unknown name and a value that is not allowed are refused.
            pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
                self.set_named(name, value, Origin::Program)
            }

            /// Sets a setting that something else says in its own way, as another program's variable, which errors then name.
            pub fn set_from(&mut self, name: &str, value: &str, origin: Origin) -> Result<()> {
                self.set_named(name, value, origin)
            }

            /// Sets a setting that a flag of the command line gives. `name` is the flag's, without the dashes.
            pub fn set_flag(&mut self, name: &str, value: &str) -> Result<()> {
                let flag = Key::of(name).map_or_else(|| name.to_owned(), Key::flag);
                self.set_named(name, value, Origin::Flag(format!("--{flag}")))
            }

            /// The value of a setting, as text that [`Self::set`] takes. Empty for a key that these settings do not have.
            pub fn text(&self, key: &Key) -> String {
                let found = self.each().into_iter().find(|(other, _)| other.name == key.name);
                found.map_or(String::new(), |(_, value)| value)
            }

            /// Where the value of a setting comes from.
            pub fn origin(&self, key: &Key) -> Origin {
                let value = self.text(key);
                match self.set_by(key) {
                    Some((set, origin)) if *set == value => origin.clone(),
                    None if value == key.default => Origin::Default,
                    // A field was written since.
                    _ => Origin::Program,
                }
            }

            /// The error for a value that is allowed but can't be used here. `name` is a setting's, `allowed` says what
            /// could be used.
            ///
            /// # Panics
            ///
            /// If there is no such setting.
            pub fn refused(&self, name: &str, allowed: impl ToString) -> Error {
                let key = Key::of(name).unwrap_or_else(|| panic!("{name} is no setting"));
                Error::config(&key.flag(), self.text(key), allowed).from_origin(self.origin(key))
            }
        }
    };
}

settings! {
    /// The settings of a program.
    ///
    /// Every field can also be set by its name, with [`Settings::set`]. Two are equal if all values are,
    /// wherever these come from. The NCCL plugin has more: [`PluginSettings`].
    Settings;
    /// What runs the kernels: a GPU where one is usable, else the CPU
    device: DeviceChoice = "auto", choice, "auto, cpu or cuda", "", Device;
    /// Where the payload lands
    window: WindowKind = "memory", choice, "memory, staging or bar", "", Window;
    /// Device file of the kernel module; auto is /dev/pushgate for staging, the first /dev/pushgateN with room for bar
    window_dev: PathBuf = "auto", path, "auto, or a device's path", "", Window;
    /// Where WQE rings and control words lie: host memory, or in the window beside the payload, for a device that shares nothing else with the proxy
    rings: RingsPlace = "host", choice, "host or window", "", Window;
    /// A staging window outlives a process that was killed by this
    staging_ttl: Duration = "60s", time, "1ms to 24h, as in 500ms, 30s, 2min or 1h; a number alone is milliseconds", "ms", Window;
    /// Transport of the queue pairs; auto, for each pair of ranks: local on one host, verbs where both have an RDMA device, else tcp; without a rendezvous local
    qp: QpKind = "auto", choice, "auto, local, verbs or tcp", "", QueuePair;
    /// Where the proxy runs: a thread of this process, or a `pushgate proxy` process
    proxy: ProxyPlace = "thread", choice, "thread or process", "", Proxy;
    /// Socket of the proxy process; a leading @ means an abstract name
    proxy_socket: PathBuf = "@pushgate-proxy", path, "a path, or @ and a name", "", Proxy;
    /// The user whose proxy process this program uses besides root's and its own user's: that user's proxy sees this program's memory; own: no other
    proxy_user: String = "own", user, "own, or a user's name or number", "", Proxy;
    /// Whom `pushgate proxy` serves besides its own user and root; own: nobody else; any: every user of the host
    proxy_serves: String = "own", users, "own, any, or names and numbers of users, and of groups with @ before them, with commas between them", "", Proxy;
    /// The most programs of one user in `pushgate proxy`
    proxy_user_programs: u64 = "64", number(1, 65536), "1 to 65536", "", Proxy;
    /// The most queue pairs of one user in `pushgate proxy`, over all of the user's programs
    proxy_user_queue_pairs: u64 = "4096", number(1, 1 << 20), "1 to 1048576", "", Proxy;
    /// The most memory of one user in `pushgate proxy`: windows, rings and regions that are mapped there, and what the proxy has of its own for the user
    proxy_user_memory: u64 = "64G", size(1 << 20), "1M to 1024G; bytes, K, M and G are 1024-based", "bytes", Proxy;
    /// The most descriptors that `pushgate proxy` has open for one user: 5 for a program, 11 for a queue pair, 1 for a region
    proxy_user_descriptors: u64 = "65536", number(16, 1 << 20), "16 to 1048576", "", Proxy;
    /// What drives the proxy in this process: a thread, or calls of a program that polls anyway; auto: thread, in the NCCL plugin caller
    drive: DriveChoice = "auto", choice, "auto, thread or caller", "", Proxy;
    /// A queue pair in which nothing has moved for this long, while something should, is reported to the log, once for each stall; 0: never
    stall_report: Duration = "30s", time_or_0, "0 or 1ms to 24h, as in 500ms, 30s, 2min or 1h; a number alone is milliseconds", "ms", Proxy;
    /// Core of the proxy's thread; auto pins only where there are cores to spare
    proxy_cpu: AutoOr<usize> = "auto", auto_or_none, "auto, none or a core's number", "", Proxy;
    /// Payload ring of a queue pair
    window_size: u64 = "1M", window_size(64), "a power of two, 64 to 512M; bytes, K, M and G are 1024-based", "bytes", Window;
    /// The most memory that one end of a queue pair may make for its window, rings and control words, all of which a device keeps in place; a queue pair that would need more is refused
    peer_memory: u64 = "2G", size(64 << 10), "64K to 1024G; bytes, K, M and G are 1024-based", "bytes", Window;
    /// WQE slots of a queue pair
    slots: u64 = "1024", power_of_two, "a power of two, 2 to 65536", "", QueuePair;
    /// Receives of a queue pair
    receives: u64 = "1024", power_of_two, "a power of two, 2 to 65536", "", QueuePair;
    /// Signal words of a queue pair
    signals: u64 = "64", number(1, 65536), "1 to 65536", "", QueuePair;
    /// 2 MiB pages for windows
    huge_pages: HugePages = "try", choice, "try, never or require", "", Window;
    /// NUMA node of windows; auto is the GPU's
    numa_node: AutoOr<usize> = "auto", auto_or_none, "auto, none or a node's number", "", Window;
    /// Every wait on a device or in a call ends after this
    timeout: Duration = "30s", time, "1ms to 24h, as in 500ms, 30s, 2min or 1h; a number alone is milliseconds", "ms", Waits;
    /// A WQE slot reserved and not published for this long ends its queue pair
    stuck: Duration = "2s", time, "1ms to 24h, as in 500ms, 30s, 2min or 1h; a number alone is milliseconds", "ms", Waits;
    /// A link that breaks is replaced within this, or its queue pair ends; 0: its queue pair ends at once; auto: 10 s, or half of `timeout` if that is less
    recover: AutoOr<Duration> = "auto", recover, "auto, 0, or 1ms to 24h and less than timeout", "ms", Waits;
    /// A path over which the peer's RDMA device answers nothing is found within this, and the link is replaced; 0: by the RDMA device's own retries alone
    path_timeout: Duration = "1s", path_timeout, "0, or 100ms to 24h, as in 500ms or 2s; a number alone is milliseconds", "ms", Rdma;
    /// Where ranks of several hosts meet: rank 0 listens there; none: all ranks are on this host
    rendezvous: String = "none", rendezvous, "none or HOST:PORT ([ADDRESS]:PORT for IPv6)", "", Ranks;
    /// Address at which this rank listens to others; auto: the one that reaches the rendezvous first, then others of this host's interfaces
    host: String = "auto", host, "auto or an IP address of this host (fe80::1%eth0 for a link-local one)", "", Ranks;
    /// Folder that containers of this host have in common: ranks of other containers meet this one there, so that queue pairs with them can be `local`; none: ranks of one network namespace find each other
    local_folder: PathBuf = "none", path, "none or a folder's path", "", Ranks;
    /// File with the secret that all ranks prove to know before they are let in; the variable PUSHGATE_SECRET, which has a secret itself, comes before it; none: other hosts can't connect
    secret_file: PathBuf = "none", path, "none or a path", "", Ranks;
    /// Encrypts the connections over which ranks of several hosts meet, and sockets of the NCCL plugin (TLS 1.3); RDMA is not encrypted
    tls: bool = "false", switch, "true or false", "", Ranks;
    /// RDMA device; auto is the best that has an address (in the NCCL plugin all as good), near all of those nearest to the GPU, up to 4
    ib_dev: String = "auto", device_names, "auto, near, a device's name as in rxe0 or mlx5_0, or up to 4 names with commas between them (32 in the NCCL plugin); whole names, the port is ib-port", "", Rdma;
    /// Port of the RDMA device
    ib_port: u32 = "1", number(1, 255), "1 to 255", "", Rdma;
    /// Entry of the port's GID table; auto takes RoCE v2 first
    gid_index: AutoOr<usize> = "auto", auto_or_number(0, 255), "auto or 0 to 255", "", Rdma;
    /// Path MTU; auto is the port's
    ib_mtu: AutoOr<usize> = "auto", mtu, "auto, 256, 512, 1024, 2048 or 4096", "bytes", Rdma;
    /// Traffic class of RDMA packets (RoCE: DSCP and ECN); auto: what rdma_cm finds where a queue pair comes up through it, else 0
    traffic_class: AutoOr<usize> = "auto", auto_or_number(0, 255), "auto or 0 to 255", "", Rdma;
    /// Service level of RDMA packets; auto: as for traffic-class
    service_level: AutoOr<usize> = "auto", auto_or_number(0, 15), "auto or 0 to 15", "", Rdma;
    /// InfiniBand partition of RDMA packets, by its key; auto: the first of the port's table. rdma_cm takes the network interface's
    pkey: AutoOr<usize> = "auto", auto_or_pkey, "auto, or a key such as 0x8001", "", Rdma;
    /// An RDMA packet is sent again after 4.096 us times 2 to the power of this
    ack_timeout: u32 = "14", number(1, 31), "1 to 31", "4.096 us x 2^N", Rdma;
    /// Times that an RDMA packet is sent again before the link counts as down
    retry_count: u32 = "7", number(0, 7), "0 to 7", "", Rdma;
    /// RDMA without immediate data
    no_imm: bool = "false", switch, "true or false", "", Rdma;
    /// Whether an RDMA record that announces itself follows its payload at once (assume) or when the payload's WRITE has completed (wait); auto: at once where both ends' devices are known to place WRITEs in order
    write_order: WriteOrder = "auto", choice, "auto, assume or wait", "", Rdma;
    /// Whether queue pairs over RDMA come up through rdma_cm; auto: where the device needs it (iWARP); both ends alike
    rdma_cm: RdmaCm = "auto", choice, "auto, on or off", "", Rdma;
    /// Ports at which rdma_cm listens for the peer; auto: the kernel's choice
    rdma_port_range: AutoOr<(u16, u16)> = "auto", port_range, "auto or LOW-HIGH with LOW of 1 or more, as in 20000-20999", "", Rdma;
    /// TCP connections of a queue pair over tcp; of two ends that differ the lower number counts
    tcp_streams: u32 = "1", number(1, 16), "1 to 16", "", Tcp;
    /// Payload over tcp carries a checksum beside TCP's own
    tcp_checksum: bool = "false", switch, "true or false", "", Tcp;
    /// What moves bytes over tcp; auto: io_uring where it is allowed and a short transfer over loopback was faster with it
    tcp_io: TcpIo = "auto", choice, "auto, io-uring or socket", "", Tcp;
    /// How the engine hears of RDMA completions; auto: events where it may sleep
    cq_events: CqEvents = "auto", choice, "auto, poll or event", "", Rdma;
}

settings! {
    /// The settings of the NCCL plugin: those of every program, and the plugin's own.
    ///
    /// Files and variables of one host hold both: programs check the plugin's own and pass them over.
    PluginSettings extends common: Settings;
    /// The NCCL plugin's way for GPU memory: pushed into the window, pulled by the NIC, or pushed to host memory by NCCL's kernels (bounce)
    path: NetPath = "auto", choice, "auto, push, pull or bounce", "", Nccl;
    /// Where messages for GPU memory arrive over RDMA, in the NCCL plugin: in that memory, or in host memory, from which the GPU pulls
    landing: NetLanding = "auto", choice, "auto, gpu or host", "", Nccl;
    /// Cores of the copier, the process that copies GPU memory for the NCCL plugin: auto: those near the GPU, also beyond the program's binding where that is allowed; inherit: those of the program that starts it
    copier_cpus: CopierCpus = "auto", copier_cpus, "auto, inherit, or cores such as 0-3,8", "", Nccl;
    /// Payload ring of a connection of the NCCL plugin
    net_window_size: u64 = "4M", window_size(64 << 10), "a power of two, 64K to 512M; bytes, K, M and G are 1024-based", "bytes", Nccl;
    /// Bytes that all connections of a process that uses the NCCL plugin have under way in their windows; auto: what a probe found to cost nothing, else an eighth of the last-level cache, shared by the ranks of the host; none: as many as the windows have
    net_under_way: AutoOr<u64> = "auto", auto_or_size(64 << 10), "auto, none or a size, 64K to 1024G; bytes, K, M and G are 1024-based", "bytes", Nccl;
    /// NCCL's RMA table, by which kernels use NCCL's device API; also on where this is not set and the variable NCCL_GIN_TYPE=2 asks NCCL for its proxy
    net_rma: bool = "false", switch, "true or false", "", Nccl;
    /// Threads of the NCCL plugin for each GPU that carry its connections over tcp; 0: NCCL's own threads do; auto: one for every four cores that the process may use, at most 8, and at most half of the GPU's part of the host's cores
    net_tcp_threads: AutoOr<usize> = "auto", auto_or_number(0, 16), "auto or 0 to 16", "", Nccl;
    /// Folder into which the NCCL plugin writes a trace of NCCL's calls, a file for each end of a connection, for `pushgate bench nccl-trace`; none: no traces
    net_trace: PathBuf = "none", path, "none or a folder's path", "", Nccl;
}

impl Settings {
    /// Every setting with its value, as text that [`Settings::set`] takes.
    pub fn each(&self) -> Vec<(&'static Key, String)> {
        self.own()
    }

    fn set_by(&self, key: &Key) -> Option<&(String, Origin)> {
        self.origins.get(key.name)
    }

    fn set_named(&mut self, name: &str, value: &str, origin: Origin) -> Result<()> {
        let key = Key::of(name).ok_or_else(|| load::unknown(name.into(), Origin::Program))?;
        if key.is_plugins() {
            let allowed = "nothing here: the NCCL plugin alone has this setting";
            return Err(Error::config(&key.flag(), value, allowed).from_origin(origin));
        }
        self.set_own(key, value, origin)
    }

    /// Adds where the value comes from to an error that refuses the value of a setting. Leaves every other error as
    /// it is.
    pub(crate) fn with_origin(&self, e: Error) -> Error {
        let key = match &e {
            Error::Config { name, value, .. } => Key::of(name).filter(|key| self.text(key) == *value),
            _ => None,
        };
        match key {
            Some(key) => e.from_origin(self.origin(key)),
            None => e,
        }
    }

    /// The transports that queue pairs may have, the first choice first. With `qp = auto` that is `local` alone where all
    /// ranks are on this host. Where they have a rendezvous, which ranks of several hosts need, each pair of ranks takes the
    /// first of `local`, `verbs` and `tcp` by which the two reach each other; those with which the other settings do not go are
    /// left out.
    pub fn transports(&self) -> Vec<Transport> {
        self.transports_between(false)
    }

    /// The transports of a communicator, as [`Settings::transports`] says. `hosts`: its ranks have met at a rendezvous that
    /// their launcher or their unique id names.
    pub(crate) fn transports_between(&self, hosts: bool) -> Vec<Transport> {
        match self.qp {
            QpKind::Local => vec![Transport::Local],
            QpKind::Verbs => vec![Transport::Verbs],
            QpKind::Tcp => vec![Transport::Tcp],
            QpKind::Auto if self.rendezvous == "none" && !hosts => vec![Transport::Local],
            QpKind::Auto => {
                let goes = |transport: &Transport| self.check_with(*transport).is_ok();
                [Transport::Local, Transport::Verbs, Transport::Tcp].into_iter().filter(goes).collect()
            }
        }
    }

    /// The folder where ranks of other containers of this host meet this one, if one is set. Each call looks at it.
    pub(crate) fn folder(&self) -> Result<Option<Folder>> {
        Folder::of_setting(&self.local_folder).map_err(|why| self.refused("local-folder", why))
    }

    /// The number of the user whose proxy process is used besides root's and that of this program's own user.
    pub fn proxy_trusts(&self) -> Result<Option<u32>> {
        match &*self.proxy_user {
            "own" => Ok(None),
            name => find_user(name)
                .map(Some)
                .map_err(|e| self.refused("proxy-user", format!("a user of this host; {e}"))),
        }
    }

    /// For how long the ends of a queue pair may try to replace a link that broke. `None`: they do not.
    pub fn recovery(&self) -> Option<Duration> {
        match self.recover {
            AutoOr::Auto => Some((self.timeout / 2).min(Duration::from_secs(10))),
            AutoOr::None => None,
            AutoOr::Is(time) => Some(time),
        }
    }

    /// The RDMA devices that are named; none where the setting `ib-dev` is `auto` or `near`.
    pub fn rdma_devices(&self) -> Vec<&str> {
        match &*self.ib_dev {
            "auto" | "near" => Vec::new(),
            names => names.split(',').collect(),
        }
    }

    /// Whether the RDMA devices are those near the GPU.
    pub fn near_devices(&self) -> bool {
        self.ib_dev == "near"
    }

    /// The RDMA device that is named, where only one may be; `reason` says where. `None`: any.
    pub fn rdma_device(&self, reason: &str) -> Result<Option<&str>> {
        match self.rdma_devices()[..] {
            [] if !self.near_devices() => Ok(None),
            [one] => Ok(Some(one)),
            _ => Err(self.refused("ib-dev", format!("auto or one device {reason}"))),
        }
    }

    /// What the two ends of a TCP connection must agree on. The secret is that of `PUSHGATE_SECRET`, or else of the file; without
    /// both it is one that everybody knows.
    #[doc(hidden)]
    pub fn terms(&self, purpose: Purpose) -> Result<Terms> {
        let secret = self.secret(Secret::from_environment())?;
        Ok(Terms { secret, purpose, tls: self.tls })
    }

    /// `variable`: what `PUSHGATE_SECRET` holds.
    fn secret(&self, variable: Result<Option<Secret>, SecretError>) -> Result<Secret> {
        let of_variable = variable.map_err(|e| {
            Error::config(VARIABLE, "(hidden)", format!("a secret of at least 16 bytes; it {e}"))
        })?;
        match of_variable {
            Some(secret) => Ok(secret),
            None if self.secret_file == Path::new("none") => Ok(Secret::public()),
            None => Secret::from_file(&self.secret_file).map_err(|e| {
                let allowed = format!("none or a file with a secret that others can't read; it {e}");
                self.refused("secret-file", allowed)
            }),
        }
    }

    /// Refuses settings that are each allowed but do not go together.
    pub fn check(&self) -> Result<()> {
        self.check_between(false)
    }

    /// Refuses settings that do not go together in a communicator. `hosts` as for [`Settings::transports_between`].
    pub(crate) fn check_between(&self, hosts: bool) -> Result<()> {
        if let AutoOr::Is(time) = self.recover
            && time >= self.timeout
        {
            let timeout = self.timeout.as_millis();
            let allowed = format!("less than timeout ({timeout} ms), so that calls outlast a recovery; or 0");
            return Err(self.refused("recover", allowed));
        }
        if self.rendezvous != "none" && self.qp == QpKind::Local {
            let allowed = "none with qp = local (ranks of several hosts need qp = verbs or tcp)";
            return Err(self.refused("rendezvous", allowed));
        }
        if hosts && self.qp == QpKind::Local {
            return Err(self.refused("qp", "auto, verbs or tcp, because the ranks meet at a rendezvous"));
        }
        if self.rings == RingsPlace::Window && self.window == WindowKind::Memory {
            let allowed = "host with window = memory (a window of the kernel module holds rings as well)";
            return Err(self.refused("rings", allowed));
        }
        match self.transports_between(hosts)[..] {
            [one] => self.check_with(one)?,
            // Nothing goes with the other settings: verbs goes with the most of them.
            [] => self.check_with(Transport::Verbs)?,
            _ => {}
        }
        if self.drive == DriveChoice::Caller && self.proxy == ProxyPlace::Process {
            return Err(self.refused("proxy", "thread with drive = caller"));
        }
        Ok(())
    }

    /// Refuses settings that do not go together with a transport.
    fn check_with(&self, transport: Transport) -> Result<()> {
        if transport == Transport::Local && self.window == WindowKind::Bar {
            let allowed = "memory or staging with qp = local (its peer maps the window; use qp = verbs)";
            return Err(self.refused("window", allowed));
        }
        if transport == Transport::Local && self.rings == RingsPlace::Window {
            return Err(self.refused("rings", "host with qp = local (engine and peer map each part alone)"));
        }
        if transport != Transport::Local && self.proxy == ProxyPlace::Process {
            return Err(self.refused("proxy", format!("thread with qp = {transport}")));
        }
        if transport == Transport::Tcp && self.window == WindowKind::Bar {
            let allowed =
                "memory or staging with qp = tcp (the kernel reads the window; a BAR is read slowly)";
            return Err(self.refused("window", allowed));
        }
        if transport == Transport::Tcp && self.rings == RingsPlace::Window {
            return Err(self.refused("rings", "host with qp = tcp"));
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
    fn every_value_as_text_sets_the_same_value() {
        let mut s = Settings::default();
        for (key, value) in Settings::default().each() {
            assert_eq!(value, key.default, "{}", key.name);
            for choice in (key.choices)() {
                s.set(key.name, choice).unwrap();
                assert_eq!(s.text(key), choice, "{}", key.name);
            }
        }
        for (name, value) in
            [("timeout", "1500ms"), ("window-size", "512"), ("ib-mtu", "1024"), ("no-imm", "true")]
        {
            s.set(name, value).unwrap();
            assert_eq!(s.text(Key::of(name).unwrap()), value);
        }
    }

    #[test]
    fn numbers_are_in_the_unit_of_their_setting() {
        let number = |name: &str, value| Key::of(name).unwrap().number(value);
        assert_eq!(number("timeout", "30s"), Some(30_000));
        assert_eq!(number("window-size", "1M"), Some(1 << 20));
        assert_eq!((number("ib-mtu", "auto"), number("ib-mtu", "1024")), (None, Some(1024)));
        assert_eq!((number("signals", "64"), number("qp", "local")), (Some(64), None));
    }

    #[test]
    fn an_error_names_setting_value_origin_and_what_is_allowed() {
        let mut s = Settings::default();
        let e = s.set("qp", "carrier-pigeon").unwrap_err().to_string();
        assert_eq!(e, "invalid qp `carrier-pigeon`: expected auto, local, verbs or tcp");
        let e = s.set_flag("qp", "two\nlines").unwrap_err().to_string();
        assert_eq!(e, "invalid qp `two\\nlines` (from --qp): expected auto, local, verbs or tcp");
        for (name, value) in [("window-size", "3M"), ("slots", "100"), ("timeout", "0"), ("timeout", "-1")] {
            assert!(s.set(name, value).is_err(), "{name} {value}");
        }
        assert_eq!(s, Settings::default());
    }

    #[test]
    fn the_origin_of_a_value_is_known_until_the_program_writes_another() {
        let origin = |s: &Settings, name: &str| s.origin(Key::of(name).unwrap()).to_string();
        let mut s = Settings::default();
        assert_eq!(origin(&s, "slots"), "default");
        s.apply_toml("\nslots = 64\nreceives = 64", "/etc/x.toml").unwrap();
        s.set_flag("receives", "32").unwrap();
        assert_eq!(
            (origin(&s, "slots"), origin(&s, "receives")),
            ("/etc/x.toml:2".into(), "--receives".into())
        );
        s.slots = 128;
        s.signals = 1;
        assert_eq!(
            (origin(&s, "slots"), origin(&s, "signals")),
            ("the program".into(), "the program".into())
        );
    }

    #[test]
    fn an_error_about_a_settings_value_is_told_where_the_value_comes_from() {
        let mut s = Settings::default();
        s.set_flag("rendezvous", "192.0.2.1:7000").unwrap();
        let refused = |value: &str| s.with_origin(Error::config("rendezvous", value, "another")).to_string();
        assert_eq!(
            refused("192.0.2.1:7000"),
            "invalid rendezvous `192.0.2.1:7000` (from --rendezvous): expected another"
        );
        // Not the setting's value, so its origin is not the setting's.
        assert_eq!(refused("10.0.0.1:7000"), "invalid rendezvous `10.0.0.1:7000`: expected another");
    }

    #[test]
    fn values_of_every_kind() {
        let mut s = Settings::default();
        let good = [
            ("rendezvous", "none node0:7000 10.0.0.1:1 [2001:db8::1]:65535 [fe80::1%eth0]:7000"),
            ("host", "auto 10.0.0.1 2001:db8::1 127.0.0.1 fe80::1%eth0 fe80::1"),
            ("secret-file", "none /etc/pushgate.secret"),
            ("tls", "true false 1 0"),
            ("ib-dev", "auto near rxe0 mlx5_0 mlx5_0,mlx5_1 a,b,c,d,e,f,g,h"),
            ("ib-port", "1 255"),
            ("gid-index", "auto 0 255"),
            ("ib-mtu", "auto 256 512 1024 2048 4096"),
            ("traffic-class", "0 255"),
            ("service-level", "0 15"),
            ("pkey", "auto 0x8001 0x1 0xffff 32769"),
            ("ack-timeout", "1 31"),
            ("retry-count", "0 7"),
            ("no-imm", "true false 1 0"),
            ("write-order", "auto assume wait"),
            ("rdma-cm", "auto on off"),
            ("rdma-port-range", "auto 1-65535 20000-20999 7-7"),
            ("cq-events", "auto poll event"),
            ("timeout", "1 1ms 30s 2min 24h 86400000"),
            ("stall-report", "0 0s 1 30s 24h"),
            ("proxy-cpu", "auto none 0 7"),
            ("drive", "auto thread caller"),
            ("proxy-user", "own pushgate 65001 0"),
            ("proxy-serves", "own any alice @gpu alice,1000,@gpu"),
            ("proxy-user-programs", "1 65536"),
            ("proxy-user-queue-pairs", "1 1048576"),
            ("proxy-user-memory", "1M 1024G"),
            ("proxy-user-descriptors", "16 1048576"),
        ];
        for (name, value) in good.iter().flat_map(|(n, all)| all.split(' ').map(move |v| (n, v))) {
            s.set(name, value).unwrap();
        }
        let bad = [
            (
                "rendezvous",
                "node0 :7000 node0: node0:0 node0:65536 2001:db8::1:7000 [node0]:1 http://node0:1 node0:+1",
            ),
            ("host", "none node0 0.0.0.0 :: 10.0.0.1:7000 fe80::1% 10.0.0.1%eth0"),
            ("ib-dev", "../x a/b . , a, ,a a,auto near,a a,a =mlx5_0 ^mlx5_0 mlx5_0:1"),
            ("ib-port", "0 256 auto +1"),
            ("gid-index", "none 256 -1"),
            ("ib-mtu", "none 0 1500 8192"),
            ("traffic-class", "256 -1"),
            ("service-level", "16"),
            ("pkey", "0 0x0 0x8000 0x10000 65536 8001h none"),
            ("ack-timeout", "0 32"),
            ("retry-count", "8"),
            ("no-imm", "yes TRUE 2"),
            ("tls", "yes on"),
            ("write-order", "Auto none true"),
            ("rdma-cm", "true none"),
            ("rdma-port-range", "0-5 9-8 5 1-65536 - a-b 1-2-3"),
            ("cq-events", "none events"),
            ("timeout", "0 0s 25h 86400001 30m s 1.5s -1s"),
            ("stall-report", "25h never -1 auto"),
            ("proxy-cpu", "-1 +1 x"),
            ("drive", "none process"),
            ("proxy-user", "any a/b @gpu a,b -a"),
            ("proxy-serves", "own,a @ a,,b @@a a/b"),
            ("proxy-user-programs", "0 65537 auto"),
            ("proxy-user-queue-pairs", "0 1048577"),
            ("proxy-user-memory", "0 1K 2048G"),
            ("proxy-user-descriptors", "15 1048577"),
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
        assert_eq!(switches, ["tls", "no_imm", "tcp_checksum"]);
    }

    #[test]
    fn a_recovery_is_shorter_than_the_timeout_or_switched_off() {
        let mut s = Settings::default();
        assert_eq!(s.recovery(), Some(Duration::from_secs(10)));
        s.set("timeout", "3s").unwrap();
        assert_eq!(s.recovery(), Some(Duration::from_millis(1500)));
        s.set("recover", "2s").unwrap();
        s.check().unwrap();
        assert_eq!(
            (s.recovery(), s.text(Key::of("recover").unwrap())),
            (Some(Duration::from_secs(2)), "2s".into())
        );
        s.set("recover", "3s").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("invalid recover `3s`: expected less than timeout (3000 ms)"), "{e}");
        s.set("recover", "0").unwrap();
        s.check().unwrap();
        assert_eq!((s.recovery(), s.text(Key::of("recover").unwrap())), (None, "0".into()));
        assert!(s.set("recover", "-1").is_err());
    }

    #[test]
    fn no_program_drives_the_engine_of_another_process() {
        let mut s = Settings::default();
        s.set("drive", "caller").unwrap();
        s.check().unwrap();
        s.set("proxy", "process").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("invalid proxy `process`: expected thread with drive = caller"), "{e}");
    }

    #[test]
    fn without_a_choice_the_transport_is_local_on_one_host_and_chosen_for_each_pair_with_a_rendezvous() {
        use Transport::{Local, Tcp, Verbs};
        let mut s = Settings::default();
        assert_eq!(s.transports(), [Local]);
        assert_eq!(s.transports_between(true), [Local, Verbs, Tcp]);
        s.set("rendezvous", "node0:7000").unwrap();
        assert_eq!(s.transports(), [Local, Verbs, Tcp]);
        s.check().unwrap();
        s.set("proxy", "process").unwrap();
        s.check().unwrap();
        assert_eq!(s.transports(), [Local]);
        s.set("window", "bar").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("invalid proxy `process`: expected thread with qp = verbs"), "{e}");
        s.set("proxy", "thread").unwrap();
        s.check().unwrap();
        assert_eq!(s.transports(), [Verbs]);
        s.set("rendezvous", "none").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("invalid window `bar`: expected memory or staging with qp = local"), "{e}");
        s.set("qp", "verbs").unwrap();
        assert_eq!(s.transports(), [Verbs]);
        s.check().unwrap();
    }

    #[test]
    fn local_queue_pairs_do_not_go_with_a_rendezvous() {
        let mut s = Settings::default();
        s.set("qp", "local").unwrap();
        s.check().unwrap();
        s.set("rendezvous", "node0:7000").unwrap();
        let e = s.check().unwrap_err().to_string();
        assert!(e.starts_with("invalid rendezvous `node0:7000`: expected none with qp = local"), "{e}");
        s.set("qp", "verbs").unwrap();
        s.check().unwrap();
    }

    #[test]
    fn the_secret_is_that_of_the_variable_or_else_of_the_file_and_errors_do_not_show_it() {
        let mut s = Settings::default();
        assert!(s.secret(Ok(None)).unwrap().is_public());
        let short = Secret::new(b"swordfish").unwrap_err();
        let e = s.secret(Err(short)).unwrap_err().to_string();
        let says =
            "invalid PUSHGATE_SECRET `(hidden)`: expected a secret of at least 16 bytes; it has 9 bytes";
        assert!(e.starts_with(says), "{e}");
        s.set_flag("secret-file", "/nowhere/secret").unwrap();
        let e = s.secret(Ok(None)).unwrap_err().to_string();
        let says = "invalid secret-file `/nowhere/secret` (from --secret-file): expected none or a file with a \
                    secret that others can't read; it can't be read: No such file";
        assert!(e.starts_with(says), "{e}");
        // The file is not looked at.
        assert!(!s.secret(Ok(Some(Secret::new(&[7; 16]).unwrap()))).unwrap().is_public());
    }

    #[test]
    fn devices_near_the_gpu_are_neither_named_nor_one() {
        let mut settings = Settings::default();
        assert!(!settings.near_devices() && settings.rdma_device("here").unwrap().is_none());
        settings.set("ib-dev", "near").unwrap();
        assert!(settings.near_devices() && settings.rdma_devices().is_empty());
        let e = settings.rdma_device("in a test").unwrap_err().to_string();
        assert!(e.contains("invalid ib-dev `near`") && e.contains("auto or one device in a test"), "{e}");
    }
}
