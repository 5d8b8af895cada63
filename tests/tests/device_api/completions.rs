//! Completions: once each, in order, and with the status of a queue pair that ended (P5).

use std::time::Duration;

use pushgate::{QpConfig, abi, status_name};
use pushgate_tests::hang;

use crate::rig::{Rig, SCOPES, THREAD, all_ok, finish, noise, on_every_device, read_words, window};
use crate::step::Step;

#[test]
fn p5_completions_come_once_and_in_order() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(8), ..window(4096) });
        let shared = rig.context.shared("region", 4096).unwrap();
        let registered = pair[1].qp.register_shared(&shared).unwrap();
        let rkey = registered.key();
        let (from, to) = (rig.upload(&noise(4096, 5)), rig.zeroed(4096));
        // The kinds in turn, every third without a completion, far more than the CQ holds.
        let (mut steps, mut expected, mut sends) = (Vec::new(), Vec::new(), 0);
        for i in 0..50u32 {
            let wr_id = 0xfedc_0000 + i;
            let (step, opcode, length) = match i % 4 {
                0 => (Step::send(from.addr(), 33, i), abi::PUSHGATE_OP_SEND, 33),
                1 => (Step::put(rkey, 0, from.addr(), 777), abi::PUSHGATE_OP_PUT, 777),
                2 => (Step::signal(3, i.into()), abi::PUSHGATE_OP_SIGNAL, 0),
                _ => (Step::nop(), abi::PUSHGATE_OP_NOP, 0),
            };
            sends += (i % 4 == 0) as usize;
            if i % 3 == 0 {
                steps.push(step);
                continue;
            }
            expected.push((wr_id, (opcode as u64) << 32 | length));
            steps.push(step.signaled(wr_id));
            if expected.len().is_multiple_of(5) {
                steps.extend([Step::poll(hang()); 5]);
            }
        }
        let left = expected.len() % 5;
        steps.extend(vec![Step::poll(hang()); left]);
        steps.extend([Step::flush(), Step::poll(Duration::from_millis(20))]);
        let receives = [Step::recv(to.addr(), 33), Step::release(1)].repeat(sends);
        for scope in [THREAD, SCOPES[3]] {
            let receiver = pair[1].start(THREAD, &receives);
            let mut sent = pair[0].run(scope, &steps);
            all_ok(&receiver.end());
            assert_eq!(sent.pop().unwrap().status, "again", "there is no completion left");
            all_ok(&sent);
            let got: Vec<_> = sent.iter().filter(|o| o.x != 0).map(|o| (o.x as u32, o.y)).collect();
            assert_eq!(got, expected, "{scope:?}");
        }
    });
}

#[test]
fn p5_many_threads_post_and_poll_and_each_completion_comes_once() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(32), ..QpConfig::default() });
        let (each, total) = (7, 7 * 256);
        let shared = rig.context.shared("region", total * 8).unwrap();
        let registered = pair[1].qp.register_shared(&shared).unwrap();
        let rkey = registered.key();
        let (seen, result) = (rig.zeroed(total * 8), rig.zeroed(32));
        let first = 0xffff_ff00u64;
        let params = [pair[0].descriptor.addr(), seen.addr(), result.addr(), each, first << 32 | rkey as u64];
        finish(&pair[0].launch(&rig.crowd, "completions", rig.crowd(), params));
        let r = read_words(&result, 3);
        assert_eq!((status_name(r[0]), r[1], r[2]), ("ok", 256 * 4, 0));
        let expected: Vec<_> = (0..total as u64).map(|i| (i % each % 2 == 0) as u64).collect();
        assert_eq!(read_words(&seen, total), expected);
        all_ok(&pair[0].run(THREAD, &[Step::flush()]));
        for (i, word) in shared.words(0, total).iter().enumerate() {
            assert_eq!(word.load(std::sync::atomic::Ordering::Acquire), i as u64 + 1, "put {i}");
        }
    });
}

#[test]
fn p5_what_was_not_retired_completes_with_the_status() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { receives: Some(2), ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let sends: Vec<_> = (0..6).map(|i| Step::send(from.addr(), 8, i).signaled(100 + i)).collect();
        all_ok(&pair[0].run(THREAD, &sends));
        // Inline messages are retired when they have arrived: two of them.
        let poll = Step::poll(hang());
        let two = pair[0].run(THREAD, &[poll, poll, Step::poll(Duration::from_millis(50))]);
        assert_eq!(two[2].status, "again");
        let ok = (abi::PUSHGATE_OP_SEND as u64) << 32 | 8;
        assert_eq!([(two[0].x, two[0].y), (two[1].x, two[1].y)], [(100, ok), (101, ok)]);
        pair[0].qp.abort().unwrap();
        let rest = pair[0].run(THREAD, &[poll, Step::poll(Duration::from_millis(50))]);
        assert_eq!((rest[0].x, rest[0].y), (102, (abi::PUSHGATE_ABORTED as u64) << 40 | ok));
    });
}
