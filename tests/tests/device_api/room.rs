//! Room in the window and the rings: full, exactly used, shared by many producers (P1, P6).

use pushgate::{DeviceBuffer, Launch, QpConfig, status_name};
use pushgate_tests::hang;

use crate::rig::{
    End, Rig, SCOPES, THREAD, all_ok, finish, noise, on_every_device, read, read_words, window, works,
};
use crate::step::Step;

#[test]
fn p1_a_window_that_holds_exactly_one_message() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        for bytes in [64, 4096] {
            let pair = rig.pair(window(bytes));
            assert_eq!(pair[0].qp.max_message(), bytes);
            let data = noise(bytes as usize, bytes);
            let (from, to) = (rig.upload(&data), rig.zeroed(bytes as usize * 8));
            let mut sends = vec![
                Step::send(from.addr(), bytes as usize + 1, 0),
                Step::batch(2, bytes as usize, 0, from.addr()),
                Step::batch(2048, 0, 0, from.addr()),
            ];
            let refused = sends.len();
            sends.extend((0..8).map(|i| Step::send(from.addr(), bytes as usize, i)));
            sends.push(Step::flush());
            let receives: Vec<_> = (0..8)
                .flat_map(|i| [Step::recv(to.addr() + i * bytes, bytes as usize), Step::release(1)])
                .collect();
            let receiver = pair[1].start(THREAD, &receives);
            let sent = pair[0].run(THREAD, &sends);
            // What can never fit is reported at once and takes nothing.
            assert!(sent[..refused].iter().all(|o| o.status == "invalid"), "{sent:?}");
            all_ok(&sent[refused..]);
            let got = receiver.end();
            all_ok(&got);
            for (i, o) in got.iter().step_by(2).enumerate() {
                assert_eq!((o.length(), o.tag()), (bytes, i as u32));
            }
            assert!(read(&to, data.len() * 8) == data.repeat(8));
        }
    });
}

#[test]
fn p1_p6_many_blocks_push_into_one_queue_pair() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig { slots: Some(64), receives: Some(32), ..window(16384) });
        const MOST: u64 = 150;
        for (kernel, producers, each) in
            [("push_thread", 256, 6), ("push_warp", 8, 80), ("push_block", 4, 80)]
        {
            let scratch = rig.zeroed((producers * MOST) as usize * 8);
            let next = rig.zeroed(producers as usize * 8);
            let (result, taken) = (rig.zeroed(32), rig.zeroed(32));
            let params = |end: &End<'_>, result: &DeviceBuffer| {
                let qp = end.descriptor.addr();
                [qp, scratch.addr(), next.addr(), result.addr(), producers, each, MOST]
            };
            // On the CPU each additional thread costs a switch at each message.
            let threads = if rig.cpu() { 1 } else { 64 };
            let sink = Launch::new(1, threads).cooperating();
            let sink = pair[1].launch(&rig.crowd, "crowd_sink", sink, params(&pair[1], &taken));
            let push = pair[0].launch(&rig.crowd, kernel, rig.crowd(), params(&pair[0], &result));
            finish(&push);
            finish(&sink);
            assert_eq!(status_name(read_words(&result, 1)[0]), "ok", "{kernel}");
            let t = read_words(&taken, 3);
            assert_eq!((status_name(t[0]), t[1], t[2]), ("ok", producers * each, 0), "{kernel}");
            assert_eq!(read_words(&next, producers as usize), vec![each; producers as usize], "{kernel}");
        }
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused, c.stuck), (0, 0, 0, 0));
    });
}

#[test]
fn batches_go_out_whole_and_cancelled_ones_not_at_all() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        // Three messages of 1000 bytes and their padding do not divide the window.
        let pair = rig.pair(QpConfig { slots: Some(16), ..window(8192) });
        let data = noise(3000, 6);
        let (from, to, spare) = (rig.upload(&data), rig.zeroed(3000), rig.zeroed(8000));
        for scope in [THREAD, SCOPES[1], SCOPES[3]] {
            let before = rig.counters();
            let (mut sends, mut receives, mut tags) = (Vec::new(), Vec::new(), Vec::new());
            for r in 0..20u32 {
                let batch = Step::batch(3, 1000, r * 3, from.addr());
                match r % 4 {
                    1 => sends.push(batch.cancelled()),
                    2 => {
                        sends.extend([Step::nop(), Step::batch(5, 1600, 0, spare.addr()).cancelled(), batch])
                    }
                    3 => sends.push(Step::nop()),
                    _ => sends.push(batch),
                }
                if r % 2 == 0 {
                    for i in 0..3 {
                        receives.push(Step::recv(to.addr() + i * 1000, 1000));
                        tags.push(((1000 - i % 2) << 32) | (r as u64 * 3 + i));
                    }
                    receives.push(Step::release(3));
                }
            }
            sends.push(Step::flush());
            let receiver = pair[1].start(scope, &receives);
            all_ok(&pair[0].run(scope, &sends));
            let got = receiver.end();
            all_ok(&got);
            let got: Vec<_> = got.iter().filter(|o| o.y != 0).map(|o| o.x).collect();
            assert_eq!(got, tags, "{scope:?}");
            let mut expected = data.clone();
            expected[1999] = read(&to, 2000)[1999]; // the second is a byte shorter
            assert!(read(&to, 3000) == expected, "{scope:?}");
            let c = rig.counters() - before;
            assert!(c.nops >= 10 + 15 + 5 && c.delivered == 30 && c.refused == 0, "{c:?}");
        }
    });
}

#[test]
fn p1_try_forms_take_nothing_when_something_is_full() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(4096, 7));
        let to = rig.zeroed(4096);
        let drain = |n: usize| [Step::recv(to.addr(), 4096), Step::release(1)].repeat(n);
        // The window: four messages of 16 units. The slots: two receives and eight messages that
        // wait.
        let cases = [
            ("window", window(4096), 1000, 4),
            ("slots", QpConfig { slots: Some(8), receives: Some(2), ..QpConfig::default() }, 8, 10),
        ];
        for (what, config, bytes, room) in cases {
            for scope in [THREAD, SCOPES[3]] {
                let pair = rig.pair(config);
                let empty = pair[1].run(scope, &[Step::recv(to.addr(), 4096).trying()]);
                assert_eq!(empty[0].status, "again");
                let send = Step::send(from.addr(), bytes, 0);
                let full = pair[0].run(
                    scope,
                    &[
                        send.filling(),
                        Step::batch(1, bytes.next_multiple_of(64), 0, from.addr()).trying(),
                        send.trying(),
                    ],
                );
                assert_eq!((full[0].x, full[0].y), (room, 0), "{what}, {scope:?}: {full:?}");
                assert!(full.iter().all(|o| o.status == "again"), "{what}: {full:?}");
                all_ok(&pair[1].run(scope, &drain(room as usize)));
                works(&pair, 1);
            }
        }
        // The CQ: messages that were retired long ago, and no thread has polled.
        let pair = rig.pair(QpConfig { slots: Some(8), ..QpConfig::default() });
        let signal = Step::signal(1, 1);
        for _ in 0..2 {
            let full = pair[0].run(THREAD, &[signal.signaled(1).filling(), Step::flush(), signal.trying()]);
            assert_eq!((full[0].status, full[0].x, full[0].y), ("again", 8, 0));
            // Without a completion there is room.
            all_ok(&full[1..]);
            let poll = Step::poll(hang());
            let some = pair[0].run(THREAD, &[poll, signal.signaled(2).trying(), signal.signaled(2).trying()]);
            let statuses: Vec<_> = some.iter().map(|o| o.status).collect();
            assert_eq!(statuses, ["ok", "ok", "again"]);
            all_ok(&pair[0].run(THREAD, &[poll; 8]));
        }
        works(&pair, 2);
    });
}
