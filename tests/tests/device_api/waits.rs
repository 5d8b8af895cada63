//! Waits that end with a timeout or an abort (P7).

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pushgate::{Error, QpConfig};
use pushgate_tests::{hang, patience, wait_until};

use crate::rig::{Rig, SCOPES, THREAD, all_ok, noise, on_every_device, works};
use crate::step::Step;

#[test]
fn p7_waits_end_with_a_time_out() {
    on_every_device(|device| {
        // What must not time out below has to be done within this time.
        let limit = patience(Duration::from_secs(1));
        let rig = Rig::new(device, &[("timeout", &limit.as_millis().to_string())]);
        let pair = rig.pair(QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let to = rig.zeroed(64);
        let send = Step::send(from.addr(), 16, 0);
        for scope in [THREAD, SCOPES[3]] {
            let got = pair[1].run(scope, &[Step::recv(to.addr(), 64), Step::wait_signal(1, 1)]);
            // Two messages arrive, eight wait, and then there is no slot.
            all_ok(&pair[0].run(scope, &[send, send, Step::flush()]));
            wait_until("both are retired", || rig.counters().retired == rig.counters().released);
            let sent = pair[0].run(scope, &[send.filling(), send, Step::flush()]);
            assert_eq!(sent[0].x, 8);
            for o in got.iter().chain(&sent[1..]) {
                assert_eq!(o.status, "timed out");
                assert!(o.took >= limit && o.took < limit + hang(), "{o:?}");
            }
            // A timeout ends the wait, not the queue pair.
            pair[0].qp.check().unwrap();
            all_ok(&pair[1].run(scope, &[Step::recv(to.addr(), 64), Step::release(1)].repeat(10)));
            works(&pair, 1);
        }
    });
}

#[test]
fn p7_abort_ends_waits_at_both_ends() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(64, 1));
        let send = Step::send(from.addr(), 16, 0);
        let config = QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() };
        for scope in [THREAD, SCOPES[3]] {
            let cases: [(&str, Vec<Step>); 4] = [
                ("recv", vec![Step::recv(0, 0)]),
                ("wait_signal", vec![Step::wait_signal(1, 1)]),
                ("send", vec![send.filling(), send]),
                ("flush", vec![send.filling(), Step::flush()]),
            ];
            for (what, steps) in cases {
                let pair = rig.pair(config);
                let near = pair[0].start(scope, &steps);
                let far = pair[1].start(scope, &[Step::wait_signal(2, 1)]);
                std::thread::sleep(Duration::from_millis(150));
                assert!(!near.running.is_done().unwrap() && !far.running.is_done().unwrap(), "{what} waits");
                let start = Instant::now();
                let qp = &pair[0].qp;
                std::thread::scope(|s| s.spawn(|| qp.abort().unwrap()).join().unwrap());
                assert_eq!(near.end().last().unwrap().status, "aborted", "{what}");
                assert_eq!(far.end()[0].status, "aborted", "{what}");
                // Ended by the abort, and not by their own limits.
                assert!(start.elapsed() < hang(), "{what}: {:?}", start.elapsed());
                for end in &pair {
                    let e = end.ended();
                    assert!(matches!(e, Error::Aborted { rank: 0 }), "{what}: {e}");
                }
            }
        }
    });
}

#[test]
fn a_wait_for_a_kernel_that_goes_on_is_interrupted_and_the_kernel_is_waited_for_again() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig::default());
        let waits = pair[0].start(THREAD, &[Step::wait_signal(1, 1)]);
        let questions = Rc::new(Cell::new(0));
        let asked = questions.clone();
        pushgate::interrupt_by(Some(Rc::new(move || {
            asked.set(asked.get() + 1);
            asked.get() == 2
        })));
        let interrupted = rig.context.wait(&waits.running, Some(hang()));
        pushgate::interrupt_by(None);
        assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
        assert_eq!(questions.get(), 2);
        assert!(!waits.running.is_done().unwrap());
        pair[0].qp.abort().unwrap();
        assert_eq!(waits.end()[0].status, "aborted");
    });
}
