//! Values of settings, made from text and told as text.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use pushgate_door::addresses::split;
use pushgate_service::users::{is_list, is_name};

use super::{
    AutoOr, CopierCpus, CqEvents, DeviceChoice, DriveChoice, HugePages, NetLanding, NetPath, ProxyPlace,
    QpKind, RdmaCm, RingsPlace, TcpIo, Transport, WindowKind, WriteOrder,
};

/// A setting's value. Its text makes the same value again.
pub(super) trait Value {
    /// The value as text, of a setting with this unit.
    fn text(&self, unit: &str) -> String;

    /// Every value that is allowed, where they are few.
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }
}

/// One of a few values with names.
pub(super) trait Choice: Copy + PartialEq + 'static {
    /// All of them.
    const ALL: &'static [(&'static str, Self)];

    /// The choice's name.
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, value)| *value == self).map_or("unknown", |(name, _)| name)
    }
}

macro_rules! choices {
    ($($type:ident { $($name:literal => $variant:ident),+ })+) => {$(
        impl Choice for $type {
            const ALL: &'static [(&'static str, Self)] = &[$(($name, $type::$variant)),+];
        }
    )+};
}

choices! {
    DeviceChoice { "auto" => Auto, "cpu" => Cpu, "cuda" => Cuda }
    WindowKind { "memory" => Memory, "staging" => Staging, "bar" => Bar }
    RingsPlace { "host" => Host, "window" => Window }
    QpKind { "auto" => Auto, "local" => Local, "verbs" => Verbs, "tcp" => Tcp }
    TcpIo { "auto" => Auto, "io-uring" => IoUring, "socket" => Socket }
    Transport { "local" => Local, "verbs" => Verbs, "tcp" => Tcp }
    ProxyPlace { "thread" => Thread, "process" => Process }
    DriveChoice { "auto" => Auto, "thread" => Thread, "caller" => Caller }
    NetPath { "auto" => Auto, "push" => Push, "pull" => Pull, "bounce" => Bounce }
    NetLanding { "auto" => Auto, "gpu" => Gpu, "host" => Host }
    HugePages { "try" => Try, "never" => Never, "require" => Require }
    WriteOrder { "auto" => Auto, "assume" => Assume, "wait" => Wait }
    RdmaCm { "auto" => Auto, "on" => On, "off" => Off }
    CqEvents { "auto" => Auto, "poll" => Poll, "event" => Event }
}

impl<T: Choice> Value for T {
    fn text(&self, _unit: &str) -> String {
        self.name().into()
    }

    fn choices() -> Vec<&'static str> {
        T::ALL.iter().map(|(name, _)| *name).collect()
    }
}

macro_rules! display_by_name {
    ($($type:ident)+) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    )+};
}

display_by_name! { WindowKind RingsPlace QpKind Transport ProxyPlace NetPath NetLanding CqEvents }

impl Value for CopierCpus {
    fn text(&self, _unit: &str) -> String {
        self.to_string()
    }
}

impl Value for PathBuf {
    fn text(&self, _unit: &str) -> String {
        self.display().to_string()
    }
}

impl Value for String {
    fn text(&self, _unit: &str) -> String {
        self.clone()
    }
}

impl Value for bool {
    fn text(&self, _unit: &str) -> String {
        self.to_string()
    }

    fn choices() -> Vec<&'static str> {
        vec!["true", "false"]
    }
}

impl Value for u32 {
    fn text(&self, _unit: &str) -> String {
        self.to_string()
    }
}

impl Value for u64 {
    fn text(&self, unit: &str) -> String {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        match units.iter().find(|(shift, _)| *self > 0 && self.is_multiple_of(1 << shift)) {
            Some((shift, suffix)) if unit == "bytes" => format!("{}{suffix}", self >> shift),
            _ => self.to_string(),
        }
    }
}

impl Value for AutoOr<usize> {
    fn text(&self, _unit: &str) -> String {
        match self {
            AutoOr::Auto => "auto".into(),
            AutoOr::None => "none".into(),
            AutoOr::Is(n) => n.to_string(),
        }
    }
}

impl Value for AutoOr<u64> {
    fn text(&self, unit: &str) -> String {
        match self {
            AutoOr::Auto => "auto".into(),
            AutoOr::None => "none".into(),
            AutoOr::Is(n) => n.text(unit),
        }
    }
}

impl Value for AutoOr<(u16, u16)> {
    fn text(&self, _unit: &str) -> String {
        match self {
            AutoOr::Is((low, high)) => format!("{low}-{high}"),
            _ => "auto".into(),
        }
    }
}

impl Value for AutoOr<Duration> {
    fn text(&self, unit: &str) -> String {
        match self {
            AutoOr::Auto => "auto".into(),
            AutoOr::None => "0".into(),
            AutoOr::Is(time) => time.text(unit),
        }
    }
}

impl Value for Duration {
    fn text(&self, _unit: &str) -> String {
        match self.as_millis() {
            ms if ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
            ms => format!("{ms}ms"),
        }
    }
}

/// One of a few values, by its name.
pub(super) fn choice<T: Choice>(s: &str) -> Option<T> {
    T::ALL.iter().find(|(name, _)| *name == s).map(|(_, value)| *value)
}

/// A whole number from `min` to `max`, in digits alone.
pub(super) fn number<T: FromStr + PartialOrd>(min: T, max: T) -> impl Fn(&str) -> Option<T> {
    move |s| digits(s).filter(|n| *n >= min && *n <= max)
}

/// A whole number in digits alone: `parse` would take a leading plus.
fn digits<T: FromStr>(s: &str) -> Option<T> {
    s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok())?
}

pub(super) fn power_of_two(s: &str) -> Option<u64> {
    number(2, 65536)(s).filter(|n: &u64| n.is_power_of_two())
}

pub(super) fn window_size(least: u64) -> impl Fn(&str) -> Option<u64> {
    move |s| parse_size(s).filter(|n| n.is_power_of_two() && (least..=512 << 20).contains(n))
}

/// A size of memory of at least `least` bytes.
pub(super) fn size(least: u64) -> impl Fn(&str) -> Option<u64> {
    move |s| parse_size(s).filter(|n| (least..=1 << 40).contains(n))
}

pub(super) fn time(s: &str) -> Option<Duration> {
    parse_time(s).filter(|time| (1..=86_400_000).contains(&time.as_millis()))
}

pub(super) fn time_or_0(s: &str) -> Option<Duration> {
    parse_time(s).filter(|time| time.as_millis() <= 86_400_000)
}

pub(super) fn path_timeout(s: &str) -> Option<Duration> {
    time_or_0(s).filter(|time| time.is_zero() || *time >= Duration::from_millis(100))
}

pub(super) fn recover(s: &str) -> Option<AutoOr<Duration>> {
    match s {
        "auto" => Some(AutoOr::Auto),
        "0" | "none" => Some(AutoOr::None),
        s => time(s).map(AutoOr::Is),
    }
}

pub(super) fn switch(s: &str) -> Option<bool> {
    match s {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

pub(super) fn copier_cpus(s: &str) -> Option<CopierCpus> {
    s.parse().ok()
}

pub(super) fn path(s: &str) -> Option<PathBuf> {
    (!s.is_empty() && s != "@").then(|| s.into())
}

pub(super) fn auto_or_none(s: &str) -> Option<AutoOr<usize>> {
    match s {
        "auto" => Some(AutoOr::Auto),
        "none" => Some(AutoOr::None),
        n => digits(n).map(AutoOr::Is),
    }
}

pub(super) fn auto_or_number(min: usize, max: usize) -> impl Fn(&str) -> Option<AutoOr<usize>> {
    move |s| if s == "auto" { Some(AutoOr::Auto) } else { number(min, max)(s).map(AutoOr::Is) }
}

/// `auto`, or the key of an InfiniBand partition, which is more than the bit of full members.
pub(super) fn auto_or_pkey(s: &str) -> Option<AutoOr<usize>> {
    if s == "auto" {
        return Some(AutoOr::Auto);
    }
    let key = match s.strip_prefix("0x") {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => usize::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None => digits(s),
    };
    key.filter(|key| *key <= 0xffff && key & 0x7fff != 0).map(AutoOr::Is)
}

/// `auto`, `none`, or a size of memory of at least `least` bytes.
pub(super) fn auto_or_size(least: u64) -> impl Fn(&str) -> Option<AutoOr<u64>> {
    move |s| match s {
        "auto" => Some(AutoOr::Auto),
        "none" => Some(AutoOr::None),
        s => size(least)(s).map(AutoOr::Is),
    }
}

/// Ports from the first to the last, both included.
pub(super) fn port_range(s: &str) -> Option<AutoOr<(u16, u16)>> {
    if s == "auto" {
        return Some(AutoOr::Auto);
    }
    let (low, high) = s.split_once('-')?;
    let [low, high] = [low, high].map(|port| number(1, 65535)(port));
    let (low, high) = (low? as u16, high? as u16);
    (low <= high).then_some(AutoOr::Is((low, high)))
}

/// A user's name or number, or `own`.
pub(super) fn user(s: &str) -> Option<String> {
    (is_name(s) && s != "any").then(|| s.into())
}

/// Names and numbers of users and groups, `own` or `any`.
pub(super) fn users(s: &str) -> Option<String> {
    is_list(s).then(|| s.into())
}

pub(super) fn mtu(s: &str) -> Option<AutoOr<usize>> {
    match s {
        "auto" => Some(AutoOr::Auto),
        "256" | "512" | "1024" | "2048" | "4096" => digits(s).map(AutoOr::Is),
        _ => None,
    }
}

pub(super) fn rendezvous(s: &str) -> Option<String> {
    if s != "none" {
        let (host, port) = s.rsplit_once(':')?;
        number(1, 65535)(port)?;
        // An IPv6 address without brackets can't be told from its port.
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        match bare {
            Some(address) => drop(split(address).filter(|(ip, _)| ip.is_ipv6())?),
            None if host.is_empty() || host.contains([':', '[', ']', '/', ' ']) => return None,
            None => {}
        }
    }
    Some(s.into())
}

pub(super) fn host(s: &str) -> Option<String> {
    // The peers connect to it: an address that stands for all of a host's is of no use to them.
    (s == "auto" || split(s).is_some_and(|(ip, _)| !ip.is_unspecified())).then(|| s.into())
}

/// The names of RDMA devices, or `auto`.
/// The most RDMA devices that may be named. NCCL may be told of as many; a queue pair stands on fewer.
const MOST_DEVICES: usize = 32;

pub(super) fn device_names(s: &str) -> Option<String> {
    let names: Vec<&str> = s.split(',').collect();
    let each = names.len() == 1 || !["auto", "near"].iter().any(|word| names.contains(word));
    let twice = (1..names.len()).any(|i| names[..i].contains(&names[i]));
    let fits = each && !twice && names.len() <= MOST_DEVICES && names.iter().all(|name| is_device_name(name));
    fits.then(|| s.into())
}

fn is_device_name(s: &str) -> bool {
    // It becomes part of a path in sysfs, and the kernel's limit is 63 bytes. NCCL's lists have the signs of NCCL_IB_HCA besides, and
    // a device that is named with its port would be sought in vain.
    let allowed = |b: u8| b.is_ascii_graphic() && !b"/^=:".contains(&b);
    (1..=63).contains(&s.len()) && s.bytes().all(allowed) && !s.starts_with('.')
}

/// A size in bytes: a whole number, alone or with K, M or G (or KiB, MiB, GiB) behind it, which are 1024-based.
pub fn parse_size(s: &str) -> Option<u64> {
    let number = s.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &s[number.len()..] {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "m" | "MiB" => 20,
        "G" | "g" | "GiB" => 30,
        _ => return None,
    };
    digits::<u64>(number)?.checked_mul(1 << shift)
}

/// A time: a whole number of milliseconds, or of the unit behind it (ms, s, min or h).
pub fn parse_time(s: &str) -> Option<Duration> {
    let number = s.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &s[number.len()..] {
        "" | "ms" => 1,
        "s" => 1_000,
        "min" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    digits::<u64>(number)?.checked_mul(unit).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_1024_based() {
        for (text, bytes) in
            [("0", 0), ("17", 17), ("4K", 4096), ("16m", 16 << 20), ("1G", 1 << 30), ("2MiB", 2 << 20)]
        {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "K", "-1", "+1", "1.5M", "4 K", "99999999999G", "x", "1MB", "1kib"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn times_have_units_or_are_milliseconds() {
        for (text, ms) in
            [("0", 0), ("250", 250), ("250ms", 250), ("30s", 30_000), ("2min", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(parse_time(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-1s", "+1s", "1.5s", "30 s", "30S", "2m", "1d", "99999999999999999h"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }
}
