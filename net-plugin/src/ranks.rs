//! How many ranks share this host, and what part of its cores a rank has.

use pushgate::Membership;
use pushgate::settings::PluginSettings;
use pushgate_topology::Topology;

/// Who shares what a host has.
#[derive(Clone, Copy)]
pub enum Ranks {
    /// The number of ranks, as the launcher says.
    Told(u32),
    /// Nobody says how many ranks there are. The number of GPUs, each counted as one rank.
    Gpus(u32),
}

impl Ranks {
    /// The ranks of the host of this topology.
    pub fn of_host(settings: &PluginSettings, topology: &Topology) -> Ranks {
        // A launcher's variable that is wrong counts as none: where it is used, it is named.
        match Membership::of_process(&settings.common).ok().flatten().and_then(|m| m.local_size) {
            Some(ranks) => Ranks::Told(ranks.max(1)),
            None => Ranks::Gpus((topology.gpus.len() as u32).max(1)),
        }
    }

    pub fn count(self) -> u32 {
        let (Ranks::Told(n) | Ranks::Gpus(n)) = self;
        n
    }
}

/// The cores of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Cores that the process may use.
    pub allowed: usize,
    /// Cores that the process may use without taking another rank's part of the host's cores.
    pub own: usize,
}

impl Cores {
    /// The cores of a process on this host beside other ranks.
    pub fn here(ranks: Ranks) -> Cores {
        let allowed = std::thread::available_parallelism().map_or(1, usize::from);
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
        Cores::of(allowed, online.and_then(|list| count(list.trim())).unwrap_or(allowed), ranks.count())
    }

    /// The cores of a process that may use `allowed` of the host's cores beside other ranks.
    pub fn of(allowed: usize, host: usize, ranks: u32) -> Cores {
        Cores { allowed, own: allowed.min((host / ranks.max(1) as usize).max(1)) }
    }
}

/// How many cores a list names, as in `0-3,8-11`.
fn count(list: &str) -> Option<usize> {
    list.split(',').try_fold(0usize, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cores_is_counted_and_what_is_none_is_not() {
        assert_eq!(["0", "0-3", "0-3,8-11,16"].map(count), [Some(1), Some(4), Some(9)]);
        assert_eq!(["", "a", "3-1", "0-18446744073709551615"].map(count), [None; 4]);
    }

    #[test]
    fn a_rank_that_is_not_bound_has_its_part_of_the_host_and_a_bound_one_what_it_may_use() {
        let own = |allowed, host, ranks| Cores::of(allowed, host, ranks).own;
        assert_eq!([own(64, 64, 8), own(8, 64, 8), own(4, 64, 8), own(2, 2, 8)], [8, 8, 4, 1]);
    }
}
