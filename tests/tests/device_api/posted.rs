//! Receives that the receiver posts, with a buffer each (P4, P8).

use std::time::Duration;

use pushgate::{QpConfig, abi};
use pushgate_tests::wait_until;

use crate::rig::{Rig, SCOPES, THREAD, all_ok, noise, on_every_device, read, window};
use crate::step::Step;

#[test]
fn messages_land_in_posted_buffers() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let config = QpConfig { receives: Some(8), posted_receives: true, ..window(8192) };
        let pair = rig.pair(config);
        let buffer = rig.zeroed(32 << 10);
        let shared = rig.context.shared("region", 32 << 10).unwrap();
        // SAFETY: the buffer lives until both kernels have ended, and with them the queue pair's
        // use of it.
        let registered = [
            unsafe { pair[1].qp.register_buffer(&buffer) }.unwrap(),
            pair[1].qp.register_shared(&shared).unwrap(),
        ];
        let lkeys = [registered[0].key(), registered[1].key()];
        let data = noise(32 << 10, 9);
        let from = rig.upload(&data);
        let sizes = [0, 1, 40, 41, 1000, 4096, 8192, 64];
        for (round, scope) in [THREAD, SCOPES[1], SCOPES[3]].into_iter().enumerate() {
            let (mut receives, mut sends) = (Vec::new(), Vec::new());
            let mut at = 0;
            for (i, &n) in sizes.iter().enumerate() {
                let tag = if i % 2 == 0 { abi::PUSHGATE_ANY_TAG } else { i as u32 };
                receives.push(Step::post_recv(lkeys[i % 2], at as u64, n, tag));
                sends.push(Step::send(from.addr() + at as u64, n, i as u32));
                at += n;
            }
            receives.push(Step::post_recv(lkeys[0], 0, 8, 0));
            receives.extend([Step::recv(0, 8192), Step::release(1)].repeat(sizes.len()));
            let receiver = pair[1].start(scope, &receives);
            all_ok(&pair[0].run(scope, &sends));
            let got = receiver.end();
            assert_eq!(got[sizes.len()].status, "again", "as many as there are receives");
            all_ok(&got[..sizes.len()]);
            all_ok(&got[sizes.len() + 1..]);
            for (i, o) in got[sizes.len() + 1..].iter().step_by(2).enumerate() {
                let receive = (round * sizes.len() + i) as u64;
                assert_eq!((o.length(), o.tag()), (sizes[i] as u64, i as u32), "{scope:?}");
                assert_eq!(o.y, 2 | receive << 8, "{scope:?}");
            }
            let there = read(&buffer, at);
            let mut begin = 0;
            for (i, &n) in sizes.iter().enumerate() {
                let arrived = if i % 2 == 0 {
                    there[begin..begin + n].to_vec()
                } else {
                    // SAFETY: nothing writes to the memory now.
                    unsafe { std::slice::from_raw_parts(shared.as_ptr().as_ptr().add(begin), n) }.to_vec()
                };
                assert!(arrived == data[begin..begin + n], "{scope:?}: message {i}");
                begin += n;
            }
            buffer.copy_from_host(&vec![0; at]).unwrap();
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn a_message_says_which_receive_it_took() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let shared = rig.context.shared("region", 4096).unwrap();
        let registered = pair[1].qp.register_shared(&shared).unwrap();
        let lkey = registered.key();
        let from = rig.upload(&noise(64, 1));
        for (round, scope) in SCOPES.into_iter().enumerate() {
            // Posted for the last message first.
            let post = |tag: u32| Step::post_recv(lkey, tag as u64 * 64, 64, tag);
            let mut receives: Vec<_> = (0..4).rev().map(post).collect();
            receives.extend([Step::recv(0, 64), Step::release(1)].repeat(4));
            let receiver = pair[1].start(scope, &receives);
            let send = |tag: u32| Step::send(from.addr(), 16 + 16 * tag as usize, tag);
            all_ok(&pair[0].run(scope, &(0..4).map(send).collect::<Vec<_>>()));
            let got = receiver.end();
            all_ok(&got);
            for (tag, o) in got[4..].iter().step_by(2).enumerate() {
                let receive = (4 * round + 3 - tag) as u64;
                assert_eq!((o.tag(), o.y), (tag as u32, 2 | receive << 8), "{scope:?}");
            }
        }
    });
}

#[test]
fn p4_without_a_posted_buffer_nothing_is_sent() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let from = rig.upload(&noise(64, 1));
        let sender = pair[0].start(THREAD, &[Step::send(from.addr(), 64, 0), Step::flush()]);
        wait_until("a stall", || rig.counters().stall_receive >= 1);
        std::thread::sleep(Duration::from_millis(100));
        let c = rig.counters();
        assert_eq!((c.released, c.delivered), (0, 0));
        let shared = rig.context.shared("region", 4096).unwrap();
        let registered = pair[1].qp.register_shared(&shared).unwrap();
        let lkey = registered.key();
        all_ok(&pair[1].run(THREAD, &[Step::post_recv(lkey, 0, 64, 0), Step::recv(0, 64), Step::release(1)]));
        all_ok(&sender.end());
    });
}

#[test]
fn p8_a_message_that_does_not_fit_its_buffer_is_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(64, 1));
        let shared = rig.context.shared("region", 4096).unwrap();
        let pair = rig.pair(QpConfig { posted_receives: true, ..QpConfig::default() });
        let registered = pair[1].qp.register_shared(&shared).unwrap();
        let lkey = registered.key();
        let receiver = pair[1].start(THREAD, &[Step::post_recv(lkey, 0, 63, 5), Step::recv(0, 64)]);
        let sent = pair[0].run(THREAD, &[Step::send(from.addr(), 64, 5), Step::wait_signal(0, 1)]);
        assert_eq!(sent[1].status, "refused");
        assert_eq!(receiver.end()[1].status, "refused");
    });
}
