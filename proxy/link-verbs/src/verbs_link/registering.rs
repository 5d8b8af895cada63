//! Regions that are registered, and whose registrations are taken back, beside the engine: a GiB takes a third of a second on
//! common adapters, any memory as long as firmware takes for a command, and the engine has other queue pairs.
//!
//! One region of a link is registered at a time. Until that is done messages out of it wait, and the program has no key of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

use pushgate_driver_shim::limited;

use super::super::VerbsError;
use super::super::inbox::REGION_WORDS;
use super::super::next::{Region, Registration};
use super::super::objects::Mr;
use super::renew::{Answer, beside};
use super::{OwnRegion, VerbsLink};

/// What is registered or taken back beside the engine.
#[derive(Default)]
pub(super) struct Registrar {
    under_way: Option<(Region, Answer<Registration>)>,
    /// Regions whose turn is still to come, oldest first.
    waiting: VecDeque<Region>,
    /// Regions whose registrations are taken back.
    leaving: Vec<(u32, Answer<()>)>,
}

impl Registrar {
    /// Whether a region is still to be registered.
    pub(super) fn awaits(&self, key: u32) -> bool {
        self.under_way.iter().map(|(what, _)| what).chain(&self.waiting).any(|what| what.key == key)
    }

    /// Whether every region that was added is registered, or will not be.
    pub(super) fn is_done(&self) -> bool {
        self.under_way.is_none() && self.waiting.is_empty()
    }

    /// Whether a region is being registered, or its registration taken back.
    pub(super) fn works_on(&self, key: u32) -> bool {
        self.under_way.as_ref().is_some_and(|(what, _)| what.key == key)
            || self.leaving.iter().any(|(leaving, _)| *leaving == key)
    }

    /// The regions that are still to be registered, which the next link registers, and the answer that is still to come of the
    /// present one.
    pub(super) fn hand_over(&mut self) -> (Vec<Region>, Option<Answer<Registration>>) {
        let (under_way, answer) = self.under_way.take().unzip();
        (under_way.into_iter().chain(self.waiting.drain(..)).collect(), answer)
    }
}

impl VerbsLink {
    /// Registers a region for the present link, beside the engine.
    pub(super) fn register(&mut self, what: Region) {
        self.regions.registrar.waiting.push_back(what);
        self.go_on_registering();
    }

    /// Takes in what was registered and taken back beside the engine, and begins with the next region.
    pub(super) fn go_on_registering(&mut self) {
        self.regions
            .registrar
            .leaving
            .retain(|(_, answer)| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        loop {
            if let Some((what, answer)) = self.regions.registrar.under_way.take() {
                match answer.try_recv() {
                    Err(TryRecvError::Empty) => {
                        return self.regions.registrar.under_way = Some((what, answer));
                    }
                    Ok(registration) => self.registered(what, registration),
                    Err(TryRecvError::Disconnected) => {
                        let lost = "the task that registers a region has ended without an answer";
                        self.registered(what, Err(VerbsError::Library(lost.into())));
                    }
                }
            }
            // A link that is about to be replaced leaves the rest to the next one.
            if self.is_renewing() || self.has_ended() {
                return;
            }
            let Some(pd) = self.rc.as_ref().map(|rc| rc.pd.clone()) else { return };
            let Some(what) = self.regions.registrar.waiting.pop_front() else { return };
            let written = self.kept.regions_written;
            let task = what.clone();
            match beside(&self.device, "a region", move || task.register_once(&pd, written)) {
                Ok(answer) => self.regions.registrar.under_way = Some((what, answer)),
                Err(e) => self.registered(what, Err(VerbsError::Library(e.to_string()))),
            }
        }
    }

    /// A region of the present link is registered, or will not be.
    fn registered(&mut self, what: Region, registration: Registration) {
        let key = what.key;
        match registration {
            Ok(None) => {}
            Ok(Some(mr)) => {
                let entry = what.entry(mr.rkey);
                self.regions.own.insert(key, OwnRegion::new(what, Some(mr)));
                self.publish(key, entry);
            }
            // Payload for it lands in the mirror and is moved from there.
            Err(e) => limited!(
                info,
                self.terms.peer,
                rank = self.own.rank,
                peer = self.terms.peer,
                "{e}: its payload will be copied"
            ),
        }
    }

    /// A region that nothing under way reads is to go. True while its registration is being made or taken back.
    pub(super) fn is_being_registered(&mut self, key: u32) -> bool {
        self.go_on_registering();
        self.regions.registrar.works_on(key)
    }

    /// Begins to take a registration back beside the engine. True while that lasts.
    pub(super) fn takes_back(&mut self, key: u32) -> bool {
        let of_both_links = self.remove(key);
        if of_both_links.iter().all(Option::is_none) {
            return false;
        }
        // Without a thread it is taken back here.
        let taken_back = beside(&self.device, "a region that goes", move || drop(of_both_links));
        self.regions.registrar.leaving.extend(taken_back.map(|answer| (key, answer)).ok());
        self.go_on_registering();
        self.regions.registrar.works_on(key)
    }

    /// Forgets a region, and tells the peer. Returns the registrations for the present link and the next one.
    pub(super) fn remove(&mut self, key: u32) -> [Option<Arc<Mr>>; 2] {
        self.regions.registrar.waiting.retain(|what| what.key != key);
        let Some(region) = self.regions.own.remove(&key) else { return [None, None] };
        self.publish(key, [0; REGION_WORDS]);
        [region.mr, self.forget_region(key)]
    }

    /// For a link that ends: true when no thread registers anything any more.
    pub(super) fn ends_registering(&mut self) -> bool {
        self.regions.registrar.waiting.clear();
        self.go_on_registering();
        self.regions.registrar.is_done() && self.regions.registrar.leaving.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_int, c_void};
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::Duration;

    use pushgate_driver_shim::record::{Opcode, Record};
    use pushgate_rdma_core_sys as sys;

    use super::super::super::config::Config;
    use super::super::super::kinds::{Kind, Protocol};
    use super::super::super::mock::{self, Mock};
    use super::super::tests::pair;
    use pushgate_link::region::RegionMemory;
    use pushgate_link::{Link, OwnRegions, RegionSends};

    const GIB: u64 = 1 << 30;

    /// What holds up the device while it registers a GiB, or takes that back.
    #[derive(Default)]
    struct Gate {
        closed: bool,
        /// Calls that wait.
        waiting: u32,
        /// Nobody opened the gate while a call waited.
        late: bool,
    }

    static GATE: (Mutex<Gate>, Condvar) =
        (Mutex::new(Gate { closed: false, waiting: 0, late: false }), Condvar::new());

    fn pass_the_gate() {
        let mut gate = GATE.0.lock().unwrap_or_else(|e| e.into_inner());
        gate.waiting += 1;
        GATE.1.notify_all();
        let (mut gate, waited) =
            GATE.1.wait_timeout_while(gate, Duration::from_secs(10), |gate| gate.closed).unwrap();
        gate.late |= waited.timed_out();
        gate.waiting -= 1;
    }

    /// Opens the gate for those who wait when a test fails.
    struct Opens;

    impl Drop for Opens {
        fn drop(&mut self) {
            set_gate(false);
        }
    }

    fn set_gate(closed: bool) {
        GATE.0.lock().unwrap_or_else(|e| e.into_inner()).closed = closed;
        GATE.1.notify_all();
    }

    /// Waits until the device is at work, beside this thread.
    fn the_device_works() {
        let gate = GATE.0.lock().unwrap_or_else(|e| e.into_inner());
        let limit = Duration::from_secs(10);
        let (gate, _) = GATE.1.wait_timeout_while(gate, limit, |gate| gate.waiting == 0).unwrap();
        assert!(gate.waiting == 1 && gate.closed && !gate.late, "the engine's thread was held up");
    }

    unsafe extern "C" fn reg_mr(
        pd: *mut sys::ibv_pd,
        address: *mut c_void,
        length: usize,
        access: c_int,
    ) -> *mut sys::ibv_mr {
        if length as u64 == GIB {
            pass_the_gate();
        }
        // SAFETY: the caller's promise.
        unsafe { mock::reg_mr(pd, address, length, access) }
    }

    unsafe extern "C" fn dereg_mr(mr: *mut sys::ibv_mr) -> c_int {
        pass_the_gate();
        // SAFETY: the caller's promise.
        unsafe { mock::dereg_mr(mr) }
    }

    fn until(mut done: impl FnMut() -> bool) {
        for _ in 0..10_000 {
            if done() {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        panic!("it did not come to pass");
    }

    #[test]
    fn a_gib_that_is_registered_or_taken_back_holds_up_no_other_queue_pair() {
        let mut mock = Mock::with_functions(std::ptr::null_mut(), Kind::of(Protocol::Ib, 0), |verbs, _| {
            verbs.ibv_reg_mr = Ok(reg_mr);
            verbs.ibv_dereg_mr = Ok(dereg_mr);
        });
        Arc::get_mut(&mut mock.device).expect("nobody has it yet").beside =
            |task| std::thread::Builder::new().spawn(task).map(drop);
        let [mut a, _a] = pair(&mock, &Config::default());
        let [mut b, _b] = pair(&mock, &Config::default());
        let _opens = Opens;
        // What an engine does for the other queue pair meanwhile: a pass that posts.
        let mut others_go_on = || {
            mock::take();
            let (from, to) = (b.outbox(0, 64), b.at_inbox(0));
            b.chain.write(from, to, None, true);
            b.flush().unwrap();
            assert!(mock::take().iter().any(|(name, _)| *name == "post_send"));
            let gate = GATE.0.lock().unwrap_or_else(|e| e.into_inner());
            assert!(gate.waiting == 1 && !gate.late, "the device was done before");
        };
        let memory = RegionMemory::Host { address: 0x1000, keep: None };
        let put = Record { flags: Record::REGION, place: 1, length: 8, ..Record::new(Opcode::Put) };

        set_gate(true);
        a.add_region(1, &memory, GIB);
        the_device_works();
        others_go_on();
        assert!(!a.regions_told() && !a.registers(1) && a.region_in_use(1, 0) && a.works_on_region(1));
        assert_eq!(a.takes_region(&put), RegionSends::Unknown);
        // Another one of the same queue pair has its turn after it.
        a.add_region(2, &memory, 4096);
        assert!(!a.registers(2));
        set_gate(false);
        until(|| {
            a.notify().unwrap();
            a.registers(2)
        });
        assert!(a.registers(1));

        set_gate(true);
        assert!(a.region_in_use(1, 0));
        the_device_works();
        others_go_on();
        assert!(a.region_in_use(1, 0) && !a.registers(1));
        // A link that ends waits for the device.
        assert!(!a.ends_registering());
        set_gate(false);
        until(|| !a.region_in_use(1, 0));
        a.remove_region(1);
        assert!(a.registers(2) && a.ends_registering());
    }

    /// How often the device did this since the last look, of memory of this size if one is named.
    fn did(what: &str, bytes: Option<u64>) -> usize {
        let is = |(name, with): &(&str, Vec<u64>)| *name == what && bytes.is_none_or(|n| with.contains(&n));
        mock::take().iter().filter(|call| is(call)).count()
    }

    #[test]
    fn queue_pairs_that_share_a_domain_register_a_region_once() {
        const BYTES: u64 = 12_345;
        for (domain, domains, times) in [(Some(Arc::default()), 1, 1), (None, 4, 2)] {
            let mock = Mock::new(0);
            mock::take();
            let config = Config { domain, ..Config::default() };
            let [mut a, _a] = pair(&mock, &config);
            let [mut b, _b] = pair(&mock, &config);
            assert_eq!(did("alloc_pd", None), domains);
            let memory = RegionMemory::Host { address: 0x1000, keep: None };
            a.add_region(1, &memory, BYTES);
            b.add_region(7, &memory, BYTES);
            assert_eq!(did("reg_mr", Some(BYTES)), times);
            assert!(a.registers(1) && b.registers(7));
            // Other memory has a registration of its own.
            b.add_region(8, &RegionMemory::Host { address: 0x2000, keep: None }, BYTES);
            assert_eq!(did("reg_mr", Some(BYTES)), 1);

            a.remove_region(1);
            assert_eq!(did("dereg_mr", None), times - 1, "another queue pair has it");
            b.remove_region(7);
            assert_eq!(did("dereg_mr", None), 1);
            a.add_region(2, &memory, BYTES);
            assert_eq!(did("reg_mr", Some(BYTES)), 1, "the memory may be another one at the same address");
            drop((a, b, _a, _b));
            assert_eq!(did("dealloc_pd", None), domains);
        }
    }
}
