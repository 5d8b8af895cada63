//! Puts into registered regions, and signals (P3).

use pushgate::settings::QpKind;
use pushgate::{QpConfig, abi};

use crate::rig::{Rig, SCOPES, Scope, THREAD, all_ok, noise, on_every_device, read, window, works};
use crate::step::Step;
use crate::two_sided::SIZES;

/// What kind of memory a put lands in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    Shared,
    Buffer,
}

/// Puts of every size, at each scope, each with a signal after it. The receiver reads as soon as the
/// signal is there.
pub fn one_sided(rig: &Rig, scopes: &[Scope], target: Target) {
    let pair = rig.pair(window(8192));
    let shared = rig.context.shared("region", 64 << 10).unwrap();
    let buffer = rig.zeroed(64 << 10);
    let (region, registered) = match target {
        Target::Shared => (shared.device_addr(), pair[1].qp.register_shared(&shared).unwrap()),
        // SAFETY: deregistered below, before the buffer is freed.
        Target::Buffer => (buffer.addr(), unsafe { pair[1].qp.register_buffer(&buffer) }.unwrap()),
    };
    let rkey = registered.key();
    let data = noise(64 << 10, 2);
    let from = rig.upload(&data);
    let mut sizes = SIZES.to_vec();
    sizes.extend([15, 17, 200]);
    let mut value = 0;
    for &scope in scopes {
        let to = rig.zeroed(sizes.len() << 13);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (i, &n) in sizes.iter().enumerate() {
            value += 1;
            let (at, remote) = ((i * 137) as u64, (i * 61) as u64);
            let put = Step::put(rkey, remote, from.addr() + at, n);
            if i % 2 == 0 {
                sends.push(put.and_signal(7, value));
            } else {
                sends.extend([put, Step::signal(7, value)]);
            }
            // The receiver reads at once what was announced, and only then the same bytes are
            // written again.
            receives.push(Step::wait_signal(7, value));
            receives.push(Step::copy(to.addr() + ((i as u64) << 13), region + remote, n));
            receives.push(Step::signal(0, value));
            sends.push(Step::wait_signal(0, value));
        }
        sends.push(Step::flush());
        let receiver = pair[1].start(scope, &receives);
        let sent = pair[0].run(scope, &sends);
        let got = receiver.end();
        all_ok(&sent);
        all_ok(&got);
        let arrived = read(&to, sizes.len() << 13);
        for (i, &n) in sizes.iter().enumerate() {
            let (at, to) = (i * 137, i << 13);
            assert!(arrived[to..to + n] == data[at..at + n], "{target:?}, {scope:?}: put {i} of {n} bytes");
        }
    }
    assert!(registered.deregister().unwrap());
    assert!(registered.deregister().unwrap(), "it is free already");
}

#[test]
fn p3_data_is_there_before_its_signal() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        one_sided(&rig, &SCOPES, Target::Shared);
        one_sided(&rig, &SCOPES, Target::Buffer);
        let c = rig.counters();
        assert_eq!((c.dropped, c.rnr, c.refused), (0, 0, 0));
    });
}

#[test]
fn signals_only_grow() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig::default());
        let sent = pair[0].run(
            THREAD,
            &[
                Step::signal(63, 5),
                Step::signal(63, 3),
                Step::signal(1, abi::PUSHGATE_SIGNAL_MAX),
                Step::signal(2, abi::PUSHGATE_SIGNAL_MAX + 1),
                Step::flush(),
            ],
        );
        let statuses: Vec<_> = sent.iter().map(|o| o.status).collect();
        assert_eq!(statuses, ["ok", "ok", "ok", "invalid", "ok"]);
        let got = pair[1].run(
            THREAD,
            &[
                Step::wait_signal(63, 5),
                Step::wait_signal(1, abi::PUSHGATE_SIGNAL_MAX),
                Step::wait_signal(64, 0),
                Step::wait_signal(2, 0),
            ],
        );
        let statuses: Vec<_> = got.iter().map(|o| o.status).collect();
        assert_eq!(statuses, ["ok", "ok", "invalid", "ok"]);
        works(&pair, 9);
    });
}

#[test]
fn a_send_out_of_a_region_arrives() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let pair = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let data = noise(4096, 3);
        for (i, bytes) in data.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().unwrap());
            shared.words(i * 8, 1)[0].store(word, std::sync::atomic::Ordering::Relaxed);
        }
        let registered = pair[0].qp.register_shared(&shared).unwrap();
        let lkey = registered.key();
        let to = rig.zeroed(4096);
        let sent = pair[0].run(THREAD, &[Step::send(0, 3000, 7).out_of_region(lkey, 100), Step::flush()]);
        if rig.context.settings().qp == QpKind::Tcp {
            // Such a payload has no place at a peer whose receives name no buffers.
            assert_eq!(sent[1].status, "refused");
            return;
        }
        all_ok(&sent);
        let got = pair[1].run(THREAD, &[Step::recv(to.addr(), 4096), Step::release(1)]);
        all_ok(&got);
        assert_eq!((got[0].length(), got[0].tag()), (3000, 7));
        assert!(read(&to, 3000) == data[100..3100]);
    });
}
