//! Messages: send and receive at every size and scope, and slow readers (P4).

use std::time::Duration;

use pushgate::{DeviceBuffer, Launch, QpConfig, status_name};
use pushgate_tests::wait_until;

use crate::rig::{
    End, Rig, SCOPES, Scope, THREAD, all_ok, finish, noise, on_every_device, read, read_words, window,
};
use crate::step::Step;

/// Sizes of messages: the ends of what travels inline, of a unit of the window, and of the window.
pub const SIZES: [usize; 15] = [0, 1, 7, 8, 16, 39, 40, 41, 63, 64, 65, 1000, 4096, 8191, 8192];

/// Sends messages of every size, at each scope, and checks what arrives.
pub fn every_size(rig: &Rig, scopes: &[Scope]) {
    let pair = rig.pair(window(8192));
    // Each in 16 KiB of its own, so that a write beyond the end shows.
    const EACH: usize = 16 << 10;
    let data = noise(SIZES.len() * EACH, 1);
    let from = rig.upload(&data);
    for (round, &scope) in scopes.iter().enumerate() {
        for shift in [0, 3] {
            let clean = vec![0xee; data.len()];
            let to = rig.upload(&clean);
            let tag = |i| 0xa000_0000 + (round * 100 + i) as u32;
            let at = |i: usize| (i * EACH + shift * (i % 5)) as u64;
            let to_at = |i: usize| (i * EACH + shift * (i % 3)) as u64;
            let n = 0..SIZES.len();
            let mut sends: Vec<_> =
                n.clone().map(|i| Step::send(from.addr() + at(i), SIZES[i], tag(i))).collect();
            sends.push(Step::flush());
            let receives: Vec<_> = n
                .clone()
                .flat_map(|i| [Step::recv(to.addr() + to_at(i), SIZES[i]), Step::release(1)])
                .collect();
            let receiver = pair[1].start(scope, &receives);
            let sent = pair[0].run(scope, &sends);
            let got = receiver.end();
            all_ok(&sent);
            all_ok(&got);
            let mut expected = clean;
            for i in n {
                let o = &got[2 * i];
                assert_eq!((o.length(), o.tag()), (SIZES[i] as u64, tag(i)), "{scope:?}, message {i}");
                assert_eq!(o.y == 1, SIZES[i] <= 40, "{scope:?}: {} bytes inline", SIZES[i]);
                let (at, to) = (at(i) as usize, to_at(i) as usize);
                expected[to..to + SIZES[i]].copy_from_slice(&data[at..at + SIZES[i]]);
            }
            assert!(read(&to, expected.len()) == expected, "{scope:?}, shift {shift}: other bytes arrived");
        }
    }
}

#[test]
fn send_and_recv_every_size_at_every_scope() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        every_size(&rig, &SCOPES);
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn recv_each_takes_a_message_for_each_thread() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(128), receives: Some(128), ..window(16384) });
        for (scope, threads) in [("warp", 32), ("warp", 20), ("block", 64)] {
            for bytes in [8u64, 40, 120] {
                let (sent, taken) = (rig.zeroed(32), rig.zeroed(32));
                let rounds = 12;
                let shape = Launch::new(1, threads).cooperating();
                let params =
                    |end: &End<'_>, r: &DeviceBuffer| [end.descriptor.addr(), r.addr(), rounds, bytes];
                let take = pair[1].launch(
                    &rig.crowd,
                    &format!("recv_each_{scope}"),
                    shape,
                    params(&pair[1], &taken),
                );
                let send =
                    pair[0].launch(&rig.crowd, &format!("send_each_{scope}"), shape, params(&pair[0], &sent));
                finish(&send);
                finish(&take);
                let (s, t) = (read_words(&sent, 1), read_words(&taken, 3));
                assert_eq!(
                    (status_name(s[0]), status_name(t[0]), t[2]),
                    ("ok", "ok", 0),
                    "{scope}, {bytes} bytes"
                );
            }
        }
    });
}

#[test]
fn p4_a_slow_receiver_stalls_the_gate_and_loses_nothing() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let config = QpConfig { receives: Some(4), slots: Some(64), ..window(8192) };
        let pair = rig.pair(config);
        let data = noise(64 << 10, 3);
        let from = rig.upload(&data);
        let to = rig.zeroed(64 << 10);
        let size = |i: u64| if i.is_multiple_of(2) { 24 } else { 1000 };
        let sends: Vec<_> = (0..60).map(|i| Step::send(from.addr() + i * 1000, size(i), i as u32)).collect();
        let sender = pair[0].start(THREAD, &sends);
        wait_until("a stall", || rig.counters().stall_receive >= 1 && rig.counters().delivered >= 4);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(rig.counters().delivered, 4, "no more than there are receives");
        let mut receives = Vec::new();
        for i in 0..60 {
            receives.push(Step::recv(to.addr() + i * 1000, 1000));
            // Several at once, which is allowed.
            if i % 3 == 2 {
                receives.push(Step::release(3));
            }
        }
        let got = pair[1].run(THREAD, &receives);
        all_ok(&got);
        all_ok(&sender.end());
        let tags: Vec<_> = got.iter().filter(|o| o.x != 0 || o.y != 0).map(|o| o.tag()).collect();
        assert_eq!(tags, (0..60).collect::<Vec<_>>(), "in order, each once");
        let arrived = read(&to, 60000);
        for i in 0..60usize {
            let (at, n) = (i * 1000, size(i as u64));
            assert!(arrived[at..at + n] == data[at..at + n], "message {i}");
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused, c.delivered), (0, 0, 0, 60));
    });
}

#[test]
fn p4_what_a_slow_reader_holds_too_long_is_copied_out() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(window(4096));
        let data = noise(64 << 10, 4);
        let (from, to) = (rig.upload(&data), rig.zeroed(64 << 10));
        let mut sends: Vec<_> = (0..40).map(|i| Step::send(from.addr() + i * 1000, 1000, i as u32)).collect();
        // Time to count as slow, between the third and the fourth: an engine that sleeps reads its
        // clock ten times a second.
        sends.insert(3, Step::poll(Duration::from_millis(500)));
        // After the fourth.
        sends.insert(5, Step::signal(0, 1));
        let sender = pair[0].start(THREAD, &sends);
        // Three messages are read late, in place: three quarters of the window.
        let mut receives: Vec<_> = (0..3).map(|i| Step::recv(to.addr() + i * 1000, 1000)).collect();
        receives.push(Step::wait_signal(0, 1));
        for i in 3..40 {
            receives.push(Step::release(1));
            receives.push(Step::recv(to.addr() + i * 1000, 1000));
        }
        receives.push(Step::release(3));
        let got = pair[1].run(THREAD, &receives);
        all_ok(&got);
        let sent = sender.end();
        assert!(
            sent.iter().enumerate().all(|(i, o)| o.status == if i == 3 { "again" } else { "ok" }),
            "{sent:?}"
        );
        assert!(read(&to, 40000) == data[..40000]);
        let c = rig.counters();
        assert!(c.copied_out >= 1, "{c:?}");
        assert_eq!((c.dropped, c.refused), (0, 0));
    });
}

#[test]
fn p3_messages_go_out_of_and_into_variables_of_a_thread_and_shared_memory_of_a_block() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(16), receives: Some(16), ..window(8192) });
        let (each, most) = (400, 64);
        let (sent, taken) = (rig.zeroed(32), rig.zeroed(32));
        let params = |end: &End<'_>, result: &DeviceBuffer| {
            [end.descriptor.addr(), 0, 0, result.addr(), 1, each, most]
        };
        let one = Launch::new(1, 1).shared_bytes(most as u32 * 8).cooperating();
        let sink = pair[1].launch(&rig.crowd, "own_sink", one, params(&pair[1], &taken));
        let push = pair[0].launch(&rig.crowd, "own_push", one, params(&pair[0], &sent));
        finish(&push);
        finish(&sink);
        assert_eq!(status_name(read_words(&sent, 1)[0]), "ok");
        let t = read_words(&taken, 3);
        assert_eq!((status_name(t[0]), t[1], t[2]), ("ok", each, 0));
    });
}
