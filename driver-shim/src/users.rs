//! Whether another process's user is ours.
//!
//! In a user namespace every user that has no number there shows as one number, the overflow uid (user_namespaces(7)), 65534 unless
//! it was set otherwise. A process that runs as that number would take any user of the host for its own.

use std::fs;

use rustix::process::geteuid;

/// The kernel's own value, for where /proc is not readable.
const OVERFLOW: u32 = 65534;
/// How many numbers of users there are; 2^32 - 1 names nobody.
const ALL: u64 = u32::MAX as u64;

/// Whether `uid`, as the kernel tells it of another process, is this process's effective user and no other one. Reads /proc.
pub fn is_ours(uid: u32) -> bool {
    uid == geteuid().as_raw() && without_number() != Some(uid)
}

/// Whether `uid` is this process's effective user ([`is_ours`]) or root.
pub fn is_ours_or_root(uid: u32) -> bool {
    uid == 0 || is_ours(uid)
}

/// The number that stands for all users without one in this namespace. `None`: each user of the host has a number here.
pub fn without_number() -> Option<u32> {
    if fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| maps_all(&map)) {
        return None;
    }
    let text = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    Some(text.and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW))
}

/// What a refusal of a user adds, if the user may be any one that has no number here; else nothing.
pub fn remark(uid: u32) -> String {
    match without_number() == Some(uid) {
        true => format!(" ({uid} stands for every user without a number in this user namespace)"),
        false => String::new(),
    }
}

/// Whether a map of users (user_namespaces(7): begin inside, begin outside, length) has all numbers.
fn maps_all(map: &str) -> bool {
    let length = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
    map.lines().map(|line| length(line).unwrap_or(0)).sum::<u64>() >= ALL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_only_a_map_of_all_users_lets_the_overflow_uid_name_one_user() {
        assert!(maps_all("         0          0 4294967295\n"));
        // Two ranges that have all of them together.
        assert!(maps_all("0 0 65534\n65534 65534 4294901761\n"));
        for map in ["", "0 1000 1\n", "0 100000 65536\n", "0 0 4294967294\n", "x y z\n"] {
            assert!(!maps_all(map), "{map:?}");
        }
    }

    #[test]
    fn the_effective_user_of_this_process_is_ours_and_another_one_is_not() {
        let own = geteuid().as_raw();
        assert_eq!(is_ours(own), without_number() != Some(own));
        assert!(!is_ours(own ^ 1) && is_ours_or_root(0));
        assert_eq!(is_ours_or_root(own ^ 1), own ^ 1 == 0);
        assert_eq!(remark(own).is_empty(), without_number() != Some(own));
    }
}
