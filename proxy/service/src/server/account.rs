//! What one program holds of a server, counted against the program's limits. Numbers alone: no memory, no engine.

use std::collections::HashMap;

use pushgate_engine::engine::QpId;
use pushgate_link::region::MAX_REGIONS;

use crate::wire::Refusal;

use super::costs;
use super::ledger::Lease;
use super::options::ServerOptions;

/// The most that one program may hold. [`ServerOptions`] says what each number means.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    qps: usize,
    regions: usize,
    bytes: u64,
}

impl From<&ServerOptions> for Limits {
    fn from(options: &ServerOptions) -> Self {
        Limits { qps: options.max_qps, regions: options.max_regions, bytes: options.max_bytes }
    }
}

/// The queue pairs, regions and mapped bytes of one program.
///
/// `may_*` and [`Account::room_for`] answer before the engine is asked; the other calls record what the engine did.
#[derive(Debug)]
pub(super) struct Account {
    limits: Limits,
    /// What the program itself takes of its user's quota.
    user: Lease,
    qps: HashMap<QpId, Qp>,
    /// Bytes that are mapped, those of regions included.
    bytes: u64,
    regions: usize,
}

#[derive(Debug)]
struct Qp {
    /// Bytes of its segments and of the peer's window.
    bytes: u64,
    /// Its regions, by key.
    regions: HashMap<u32, Region>,
    /// What it takes of the user's quota.
    _lease: Lease,
}

#[derive(Debug)]
struct Region {
    bytes: u64,
    /// What it takes of the user's quota.
    _lease: Lease,
}

impl Account {
    /// The account of a program that holds nothing but `user`, what it takes of its user's quota itself.
    pub(super) fn new(limits: Limits, user: Lease) -> Self {
        Account { limits, user, qps: HashMap::new(), bytes: 0, regions: 0 }
    }

    /// Takes what a queue pair takes of the user's quota. [`costs::queue_pair`] says what the numbers are.
    pub(super) fn lease_qp(&self, mapped: u64, segments: u64, links: u64) -> Result<Lease, Refusal> {
        self.user.more(costs::queue_pair(mapped, segments, links)).map_err(Refusal::Why)
    }

    /// Takes what a region takes of the user's quota.
    pub(super) fn lease_region(&self, bytes: u64) -> Result<Lease, Refusal> {
        self.user.more(costs::region(bytes)).map_err(Refusal::Why)
    }

    /// The program's queue pairs.
    pub(super) fn qps(&self) -> impl Iterator<Item = QpId> + '_ {
        self.qps.keys().copied()
    }

    /// Whether the program has this queue pair.
    pub(super) fn check(&self, qp: QpId) -> Result<(), Refusal> {
        if self.qps.contains_key(&qp) { Ok(()) } else { Err(Refusal::NoQp(qp.0)) }
    }

    /// Whether the program may have one more queue pair.
    pub(super) fn may_add_qp(&self) -> Result<(), Refusal> {
        let most = self.limits.qps;
        if self.qps.len() >= most {
            return Err(Refusal::Why(format!("the program has {most} queue pairs, which is the limit")));
        }
        Ok(())
    }

    /// Whether the program may have one more region, on this queue pair.
    pub(super) fn may_add_region(&self, qp: QpId) -> Result<(), Refusal> {
        let entry = self.qps.get(&qp).ok_or(Refusal::NoQp(qp.0))?;
        let most = self.limits.regions;
        if self.regions >= most {
            return Err(Refusal::Why(format!("the program has {most} regions, which is the limit")));
        }
        if entry.regions.len() >= MAX_REGIONS {
            return Err(Refusal::TooManyRegions);
        }
        Ok(())
    }

    /// Whether a queue pair that the program does not have yet may have one more region than `regions`.
    pub(super) fn may_restore_region(&self, regions: usize) -> Result<(), Refusal> {
        let most = self.limits.regions;
        if self.regions + regions >= most {
            return Err(Refusal::Why(format!("the program has {most} regions, which is the limit")));
        }
        if regions >= MAX_REGIONS {
            return Err(Refusal::TooManyRegions);
        }
        Ok(())
    }

    /// Whether `bytes` more of the program's memory may be mapped.
    pub(super) fn room_for(&self, bytes: u64) -> Result<(), Refusal> {
        let most = self.limits.bytes;
        if self.bytes.checked_add(bytes).is_some_and(|sum| sum <= most) {
            return Ok(());
        }
        Err(Refusal::Why(format!(
            "{bytes} more bytes, with the {} that the program has mapped here, are over the limit of {most}",
            self.bytes
        )))
    }

    /// Records a queue pair that the engine took in.
    pub(super) fn add_qp(&mut self, qp: QpId, bytes: u64, lease: Lease) {
        self.bytes += bytes;
        self.qps.insert(qp, Qp { bytes, regions: HashMap::new(), _lease: lease });
    }

    /// Records that a queue pair is gone, with all of its regions.
    pub(super) fn remove_qp(&mut self, qp: QpId) {
        if let Some(gone) = self.qps.remove(&qp) {
            self.bytes -= gone.bytes + gone.regions.values().map(|region| region.bytes).sum::<u64>();
            self.regions -= gone.regions.len();
        }
    }

    /// Records a region that the engine registered. The program must have the queue pair ([`Account::check`]).
    pub(super) fn add_region(&mut self, qp: QpId, key: u32, bytes: u64, lease: Lease) {
        self.bytes += bytes;
        self.regions += 1;
        let qp = self.qps.get_mut(&qp).expect("a queue pair of this program");
        qp.regions.insert(key, Region { bytes, _lease: lease });
    }

    /// Records that a region is gone.
    pub(super) fn remove_region(&mut self, qp: QpId, key: u32) {
        if let Some(gone) = self.qps.get_mut(&qp).and_then(|entry| entry.regions.remove(&key)) {
            self.bytes -= gone.bytes;
            self.regions -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::Ledger;
    use super::*;

    const A: QpId = QpId(1);
    const B: QpId = QpId(2);

    fn account(qps: usize, regions: usize, bytes: u64) -> Account {
        Account::new(Limits { qps, regions, bytes }, Lease::nothing())
    }

    fn sentence(refused: Result<(), Refusal>) -> String {
        match refused {
            Err(Refusal::Why(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn p8_each_limit_is_refused_by_name_and_what_is_given_back_can_be_taken_again() {
        let mut held = account(2, 2, 100);
        held.add_qp(A, 40, Lease::nothing());
        held.add_qp(B, 40, Lease::nothing());
        assert_eq!(sentence(held.may_add_qp()), "the program has 2 queue pairs, which is the limit");
        held.room_for(20).unwrap();
        assert!(sentence(held.room_for(21)).starts_with("21 more bytes, with the 80 that"));
        // The sum does not wrap.
        assert!(sentence(held.room_for(u64::MAX)).contains("over the limit of 100"));

        held.add_region(A, 7, 10, Lease::nothing());
        held.add_region(B, 7, 10, Lease::nothing());
        assert_eq!(sentence(held.may_add_region(A)), "the program has 2 regions, which is the limit");
        assert!(held.room_for(1).is_err());
        held.remove_region(A, 7);
        held.may_add_region(A).unwrap();
        held.room_for(10).unwrap();
        // A queue pair takes its regions with it.
        held.remove_qp(B);
        held.may_add_qp().unwrap();
        held.room_for(60).unwrap();
        held.remove_qp(A);
        held.room_for(100).unwrap();
        assert_eq!((held.bytes, held.regions), (0, 0));
    }

    #[test]
    fn a_queue_pair_of_nobody_is_refused_by_its_number_and_changes_nothing() {
        let mut held = account(2, 2, 100);
        held.add_qp(A, 40, Lease::nothing());
        for refused in [held.check(B), held.may_add_region(B)] {
            assert!(matches!(refused, Err(Refusal::NoQp(2))), "{refused:?}");
        }
        held.remove_qp(B);
        held.remove_region(B, 1);
        held.remove_region(A, 1);
        assert_eq!((held.bytes, held.regions), (40, 0));
        held.check(A).unwrap();
    }

    #[test]
    fn a_queue_pair_whose_table_of_regions_is_full_is_refused() {
        let mut held = account(1, usize::MAX, u64::MAX);
        held.add_qp(A, 0, Lease::nothing());
        (0..MAX_REGIONS as u32).for_each(|key| held.add_region(A, key, 1, Lease::nothing()));
        assert!(matches!(held.may_add_region(A), Err(Refusal::TooManyRegions)));
    }

    #[test]
    fn p8_what_a_program_gives_back_its_user_can_take_again() {
        let mut quota = costs::queue_pair(1000, 100, 10);
        quota.programs = 1;
        quota.descriptors += costs::PROGRAM.descriptors + 1;
        quota.bytes += costs::PROGRAM.bytes + 5;
        let ledger = Ledger::new(quota, None);
        let limits = Limits { qps: 9, regions: 9, bytes: u64::MAX };
        let mut held = Account::new(limits, ledger.lease(7, costs::PROGRAM).unwrap());
        let all = |held: &Account| held.lease_qp(1000, 100, 10);
        held.add_qp(A, 1000, all(&held).unwrap());
        assert!(sentence(all(&held).map(drop)).contains("user 7 may have 1 queue pairs in this proxy"));
        assert!(sentence(held.lease_region(6).map(drop)).contains("proxy-user-memory"));
        held.add_region(A, 1, 5, held.lease_region(5).unwrap());
        assert!(sentence(held.lease_region(0).map(drop)).contains("proxy-user-descriptors"));
        held.remove_region(A, 1);
        held.add_region(A, 2, 4, held.lease_region(4).unwrap());
        // A lease that is not used.
        drop(held.lease_region(0));
        held.remove_qp(A);
        held.add_qp(B, 1000, all(&held).unwrap());
        held.add_region(B, 3, 5, held.lease_region(5).unwrap());
        drop(held);
        assert_eq!(ledger.users(), []);
    }
}
