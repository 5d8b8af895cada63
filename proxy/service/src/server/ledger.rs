//! What users hold of a server, against the quota of a user. Numbers alone: no memory, no engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::costs::{self, PROGRAM};
use crate::wire::Amounts;

/// The connections of a user beyond the programs of the quota: those that have not said Hello yet, or ask for the usage.
const SPARE: u64 = 8;
/// Descriptors that are kept for the server itself.
const KEPT: u64 = 128;
/// Descriptors of a connection: its socket, its process, and those of a request.
const CONNECTION: u64 = 2 + crate::wire::MAX_FDS as u64;

/// A part of a quota: what it is called, the setting that says how much there is of it, and whether it counts bytes.
struct Part {
    name: &'static str,
    setting: &'static str,
    of: fn(&Amounts) -> u64,
}

const PARTS: [Part; 4] = [
    Part { name: "programs", setting: "proxy-user-programs", of: |a| a.programs },
    Part { name: "queue pairs", setting: "proxy-user-queue-pairs", of: |a| a.queue_pairs },
    Part { name: "bytes", setting: "proxy-user-memory", of: |a| a.bytes },
    Part { name: "descriptors", setting: "proxy-user-descriptors", of: |a| a.descriptors },
];

/// What every user holds. Shared by all threads of a server, which take and give back by [`Lease`]s.
#[derive(Debug)]
pub(super) struct Ledger {
    quota: Amounts,
    /// Descriptors that there are for all users together.
    descriptors: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    users: BTreeMap<u32, Holding>,
    /// Descriptors of all users, those of connections included.
    descriptors: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Holding {
    amounts: Amounts,
    connections: u64,
}

impl Ledger {
    /// The fewest descriptors of a process with which a program is served that has one queue pair with one region.
    pub(super) fn least() -> u64 {
        KEPT + CONNECTION
            + PROGRAM.descriptors
            + costs::queue_pair(0, 0, 0).descriptors
            + costs::region(0).descriptors
    }

    /// A ledger in which nobody holds anything. The process may open `open_files` descriptors; `None`: without a limit.
    pub(super) fn new(quota: Amounts, open_files: Option<u64>) -> Arc<Ledger> {
        let descriptors = open_files.map_or(u64::MAX, |n| n.saturating_sub(KEPT));
        Arc::new(Ledger { quota, descriptors, state: Mutex::default() })
    }

    pub(super) fn quota(&self) -> Amounts {
        self.quota
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Sums are changed when nothing can fail any more, so a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each user holds that is connected, by the user's number.
    pub(super) fn users(&self) -> Vec<(u32, Amounts)> {
        self.state().users.iter().map(|(uid, held)| (*uid, held.amounts)).collect()
    }

    /// A connection of a user, before it says what it is.
    pub(super) fn connect(self: &Arc<Self>, uid: u32) -> Result<Lease, String> {
        self.take(uid, Amounts::default(), 1)
    }

    /// Takes amounts for a user, or says in a sentence which quota has no room for them.
    pub(super) fn lease(self: &Arc<Self>, uid: u32, amounts: Amounts) -> Result<Lease, String> {
        self.take(uid, amounts, 0)
    }

    fn take(self: &Arc<Self>, uid: u32, amounts: Amounts, connections: u64) -> Result<Lease, String> {
        let mut state = self.state();
        let held = state.users.get(&uid).copied().unwrap_or_default();
        let fits = |held: u64, more: u64, most: u64| held.checked_add(more).is_some_and(|sum| sum <= most);
        for Part { name, setting, of } in &PARTS {
            let (used, more, most) = (of(&held.amounts), of(&amounts), of(&self.quota));
            if more > 0 && !fits(used, more, most) {
                return Err(format!(
                    "user {uid} may have {most} {name} in this proxy ({setting}), {used} are in use, and {more} more do \
                     not fit: end programs of this user, or have {setting} raised where the proxy is started"
                ));
            }
        }
        let most = self.quota.programs.saturating_add(SPARE);
        if connections > 0 && !fits(held.connections, connections, most) {
            return Err(format!(
                "user {uid} has {} connections to this proxy, the most are {most} (proxy-user-programs and {SPARE} more): \
                 end programs of this user, or have proxy-user-programs raised where the proxy is started",
                held.connections
            ));
        }
        let descriptors = amounts.descriptors + connections * CONNECTION;
        if !fits(state.descriptors, descriptors, self.descriptors) {
            return Err(format!(
                "{descriptors} more descriptors, with the {} of all users, are over the {} that this proxy may open for \
                 programs: have its limit of open files raised (LimitNOFILE of its unit, `ulimit -n`)",
                state.descriptors, self.descriptors
            ));
        }
        state.descriptors += descriptors;
        let held = state.users.entry(uid).or_default();
        held.connections += connections;
        held.amounts = sum(held.amounts, amounts);
        Ok(Lease { ledger: self.clone(), uid, amounts, connections })
    }

    fn give_back(&self, uid: u32, amounts: Amounts, connections: u64) {
        let mut state = self.state();
        state.descriptors -= amounts.descriptors + connections * CONNECTION;
        let Some(held) = state.users.get_mut(&uid) else { return };
        held.connections -= connections;
        held.amounts = Amounts {
            programs: held.amounts.programs - amounts.programs,
            queue_pairs: held.amounts.queue_pairs - amounts.queue_pairs,
            bytes: held.amounts.bytes - amounts.bytes,
            descriptors: held.amounts.descriptors - amounts.descriptors,
        };
        if *held == Holding::default() {
            state.users.remove(&uid);
        }
    }
}

/// Adds amounts that fit in a quota.
fn sum(a: Amounts, b: Amounts) -> Amounts {
    Amounts {
        programs: a.programs + b.programs,
        queue_pairs: a.queue_pairs + b.queue_pairs,
        bytes: a.bytes + b.bytes,
        descriptors: a.descriptors + b.descriptors,
    }
}

/// Amounts that a user holds. Dropping it gives them back.
#[derive(Debug)]
pub(super) struct Lease {
    ledger: Arc<Ledger>,
    uid: u32,
    amounts: Amounts,
    connections: u64,
}

impl Lease {
    /// Takes more for the same user.
    pub(super) fn more(&self, amounts: Amounts) -> Result<Lease, String> {
        self.ledger.lease(self.uid, amounts)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.give_back(self.uid, self.amounts, self.connections);
    }
}

#[cfg(test)]
impl Lease {
    /// A lease of nothing, of a user without a limit.
    pub(super) fn nothing() -> Lease {
        let most = u64::MAX;
        let all = Amounts { programs: most, queue_pairs: most, bytes: most, descriptors: most };
        Ledger::new(all, None).lease(1, Amounts::default()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u32 = 65001;
    const B: u32 = 65002;
    const QUOTA: Amounts = Amounts { programs: 2, queue_pairs: 4, bytes: 1000, descriptors: 50 };

    /// Amounts with one part alone.
    fn only(part: usize, n: u64) -> Amounts {
        let of = |at| if at == part { n } else { 0 };
        Amounts { programs: of(0), queue_pairs: of(1), bytes: of(2), descriptors: of(3) }
    }

    #[test]
    fn p8_each_quota_is_refused_by_name_value_and_use_and_no_other_user_pays_for_it() {
        let quotas = [
            ("2 programs", "proxy-user-programs"),
            ("4 queue pairs", "proxy-user-queue-pairs"),
            ("1000 bytes", "proxy-user-memory"),
            ("50 descriptors", "proxy-user-descriptors"),
        ];
        for (part, (most, setting)) in quotas.into_iter().enumerate() {
            let ledger = Ledger::new(QUOTA, None);
            let all = (PARTS[part].of)(&QUOTA);
            let held = ledger.lease(A, only(part, all - 1)).unwrap();
            let last = ledger.lease(A, only(part, 1)).unwrap();
            let why = ledger.lease(A, only(part, 1)).unwrap_err();
            assert!(
                why.starts_with(&format!(
                    "user {A} may have {most} in this proxy ({setting}), {all} are in use"
                )),
                "{why}"
            );
            assert!(why.contains(&format!("have {setting} raised")), "{why}");
            // A refusal changes nothing, sums do not wrap, and another user has a quota of its own.
            assert_eq!(ledger.users(), [(A, only(part, all))]);
            ledger.lease(A, only(part, u64::MAX)).unwrap_err();
            drop(ledger.lease(B, only(part, all)).unwrap());
            drop(last);
            drop(ledger.lease(A, only(part, 1)).unwrap());
            ledger.lease(A, only(part, 2)).unwrap_err();
            drop(held);
            // Nobody is kept who holds nothing.
            assert_eq!(ledger.users(), []);
            assert_eq!(ledger.state().descriptors, 0);
        }
    }

    #[test]
    fn p8_connections_of_a_user_that_say_nothing_are_bounded() {
        let ledger = Ledger::new(QUOTA, None);
        let mut all: Vec<_> = (0..2 + SPARE).map(|_| ledger.connect(A).unwrap()).collect();
        let why = ledger.connect(A).unwrap_err();
        assert!(why.starts_with("user 65001 has 10 connections to this proxy, the most are 10"), "{why}");
        ledger.connect(B).unwrap();
        all.pop();
        ledger.connect(A).unwrap();
    }

    #[test]
    fn p8_the_descriptors_of_all_users_leave_some_for_the_server() {
        let ledger = Ledger::new(Amounts { descriptors: 1000, ..QUOTA }, Some(KEPT + 100));
        let a = ledger.lease(A, only(3, 60)).unwrap();
        let b = ledger.lease(B, only(3, 40)).unwrap();
        let why = ledger.lease(B, only(3, 1)).unwrap_err();
        assert!(why.starts_with("1 more descriptors, with the 100 of all users, are over the 100"), "{why}");
        assert!(why.contains("LimitNOFILE"), "{why}");
        assert!(ledger.connect(B).is_err());
        drop(a);
        ledger.connect(B).unwrap();
        drop(b.more(only(3, 60)).unwrap());
        assert!(Ledger::new(QUOTA, Some(5)).connect(A).is_err());
    }
}
