//! WQEs, keys and counts that are wrong (P8), and slots that are never published (P2).

use std::time::Duration;

use pushgate::{Error, QpConfig, abi};
use pushgate_tests::hang;

use crate::rig::{Rig, THREAD, noise, on_every_device, works};
use crate::step::Step;

const LAP: u64 = 1 << abi::PUSHGATE_LAP_SHIFT;

/// The eight words of slot 0 in its first lap: 100 bytes in the window's first two units.
fn wqe(opcode: u32, flags: u32) -> [u64; 8] {
    let head = (opcode as u64) << abi::PUSHGATE_OPCODE_SHIFT | (flags as u64) << abi::PUSHGATE_FLAGS_SHIFT;
    [head | 100, 0, 0, 0, 0, 0, 2, 0].map(|w| w | LAP)
}

#[test]
fn p8_hostile_wqes_end_their_queue_pair_alone() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let other = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let send = || wqe(abi::PUSHGATE_OP_SEND, 0);
        let with = |mut words: [u64; 8], changes: &[(usize, u64)]| {
            for &(i, w) in changes {
                words[i] = w | LAP;
            }
            words
        };
        let raw = |mut words: [u64; 8], i: usize, word: u64| {
            words[i] = word;
            words
        };
        let length = |words: [u64; 8], n: u64| raw(words, 0, words[0] & !0xffff_ffff | n);
        let (put, region) = (abi::PUSHGATE_OP_PUT, abi::PUSHGATE_F_REGION);
        let inline = abi::PUSHGATE_F_INLINE;
        let whole = abi::PUSHGATE_DATA_MASK;
        let cases = [
            ("another lap in its first word", raw(send(), 0, send()[0] + 8 * LAP)),
            ("another lap in one word", raw(send(), 3, 7 * LAP)),
            ("another lap in its last word", raw(send(), 7, 255 << 56)),
            ("opcode 0", wqe(0, 0)),
            ("an unknown opcode", wqe(0x77, 0)),
            ("an unknown flag", wqe(abi::PUSHGATE_OP_SEND, 0x80)),
            ("a flag of receive records", wqe(abi::PUSHGATE_OP_SEND, abi::PUSHGATE_F_LANDING)),
            ("inline and from a region", wqe(abi::PUSHGATE_OP_SEND, inline | region)),
            ("a signal flag on a send", wqe(abi::PUSHGATE_OP_SEND, abi::PUSHGATE_F_WITH_SIGNAL)),
            ("more bytes than room", length(send(), 129)),
            ("more bytes than any window", length(send(), 0xffff_ffff)),
            ("too long to be inline", length(wqe(abi::PUSHGATE_OP_SEND, inline), 41)),
            ("a put too long to be inline", length(wqe(put, inline), 17)),
            ("not where the ring's cursor is", with(send(), &[(5, 1)])),
            ("far outside of the window", with(send(), &[(5, 0xffff_ffff)])),
            ("more room than the window", with(send(), &[(6, 1 << 24)])),
            ("more room than a number holds", with(send(), &[(6, whole)])),
            ("a NOP with more room than the window", with(wqe(abi::PUSHGATE_OP_NOP, 0), &[(6, 1 << 20)])),
            ("from a region that is none", with(wqe(put, region), &[(5, 0xdead_beef), (6, 0)])),
            ("from past its own region", with(wqe(put, region), &[(5, 0), (6, whole)])),
            ("signal 64 of 64", length(with(wqe(abi::PUSHGATE_OP_SIGNAL, 0), &[(2, 64 << 32)]), 0)),
            (
                "the last signal there could be",
                length(with(wqe(abi::PUSHGATE_OP_SIGNAL, 0), &[(2, 0xff_ffff << 32)]), 0),
            ),
            ("a put with signal 64 of 64", with(wqe(put, abi::PUSHGATE_F_WITH_SIGNAL), &[(2, 64 << 32)])),
            ("into a region that is none", with(wqe(put, 0), &[(2, 0xdead_beef)])),
            ("all ones", [u64::MAX; 8]),
        ];
        for (i, (what, mut words)) in cases.into_iter().enumerate() {
            let pair = rig.pair(QpConfig::default());
            let registered = pair[0].qp.register_shared(&shared).unwrap();
            if what == "from past its own region" {
                words[5] |= u64::from(registered.key());
            }
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let there = rig.upload(&bytes);
            let before = rig.counters();
            let far = pair[1].start(THREAD, &[Step::recv(0, 0)]);
            let near = pair[0].run(THREAD, &[Step::raw(there.addr(), 0), Step::wait_signal(0, 1)]);
            assert_eq!(near[1].status, "refused", "{what}");
            assert_eq!(far.end()[0].status, "refused", "{what}");
            assert_eq!((pair[0].refused(), pair[1].refused()), (0, 0), "{what}: both name the rank");
            let said = pair.each_ref().map(|end| end.qp.check().unwrap_err().to_string());
            assert!(said[0] == said[1] && !said[0].contains("says why"), "{what}: {said:?}");
            let c = rig.counters() - before;
            assert_eq!((c.refused, c.delivered, c.dropped), (1, 0, 0), "{what}");
            works(&other, i as u32);
        }
    });
}

#[test]
fn p8_puts_outside_of_what_was_registered_are_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let from = rig.upload(&noise(256, 8));
        let other = rig.pair(QpConfig::default());
        let shared = rig.context.shared("region", 4096).unwrap();
        let bytes = shared.len() as u64;
        let at_another = other[1].qp.register_shared(&shared).unwrap();
        let foreign = at_another.key();
        drop(other[1].qp.register_shared(&shared).unwrap());
        type Put = fn(u32, u32, u64) -> (u32, u64);
        let cases: [(&str, Put); 5] = [
            ("another key", |rkey, _, _| (rkey ^ 1 << 20, 0)),
            ("a key of another queue pair", |_, foreign, _| (foreign, 0)),
            ("past the end", |rkey, _, bytes| (rkey, bytes - 199)),
            ("far past the end", |rkey, _, _| (rkey, abi::PUSHGATE_DATA_MASK - 100)),
            ("index without a region", |rkey, _, _| (rkey + 1, 0)),
        ];
        for (what, case) in cases {
            let pair = rig.pair(QpConfig::default());
            let registered = pair[1].qp.register_shared(&shared).unwrap();
            let rkey = registered.key();
            // Only by chance does a seed for each key keep the tags of two queue pairs apart; with
            // equal tags this would not be another key.
            let (key, offset) = case(rkey, if foreign == rkey { !rkey } else { foreign }, bytes);
            let before = rig.counters().refused;
            let sent =
                pair[0].run(THREAD, &[Step::put(key, offset, from.addr(), 200), Step::wait_signal(0, 1)]);
            assert_eq!((sent[0].status, sent[1].status), ("ok", "refused"), "{what}");
            let far = pair[1].run(THREAD, &[Step::recv(0, 0)]);
            assert_eq!(far[0].status, "refused", "{what}");
            assert_eq!((pair[0].refused(), pair[1].refused()), (0, 0), "{what}: both name the sender");
            // The end at which the region is knew the reason, and both say it.
            for end in &pair {
                let said = end.qp.check().unwrap_err().to_string();
                let why = "a request of rank 0 was refused: the peer has registered no region of this rkey";
                assert!(said.starts_with(why), "{what}: {said}");
            }
            assert_eq!(rig.counters().refused - before, 1, "{what}");
            assert!(
                shared
                    .words(0, bytes as usize / 8)
                    .iter()
                    .all(|w| { w.load(std::sync::atomic::Ordering::Relaxed) == 0 })
            );
            works(&other, 3);
        }
    });
}

#[test]
fn p8_a_receiver_that_gives_back_what_it_never_had_is_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[]);
        let other = rig.pair(QpConfig::default());
        let pair = rig.pair(QpConfig::default());
        let got = pair[1].run(THREAD, &[Step::consumed(1000), Step::wait_signal(0, 1)]);
        assert_eq!(got[1].status, "refused");
        let far = pair[0].run(THREAD, &[Step::wait_signal(0, 1)]);
        assert_eq!(far[0].status, "refused");
        assert_eq!((pair[0].refused(), pair[1].refused()), (1, 1), "both name the receiver");
        assert_eq!(rig.counters().refused, 1);
        works(&other, 1);
    });
}

#[test]
fn p2_a_slot_that_is_never_published_is_stuck() {
    on_every_device(|device| {
        let rig = Rig::new(device, &[("stuck", "200")]);
        let other = rig.pair(QpConfig::default());
        let from = rig.upload(&noise(64, 1));
        let half: Vec<u8> = {
            let mut words = wqe(abi::PUSHGATE_OP_SEND, 0);
            words[5] = 0; // still has the last lap's number
            words.iter().flat_map(|w| w.to_le_bytes()).collect()
        };
        let half = rig.upload(&half);
        let cases: [(&str, Vec<Step>); 2] = [
            ("a slot", vec![Step::reserve(1, 64), Step::send(from.addr(), 8, 0), Step::wait_signal(0, 1)]),
            (
                "words of a slot",
                vec![Step::reserve(1, 128), Step::raw(half.addr(), 0), Step::wait_signal(0, 1)],
            ),
        ];
        for (i, (what, steps)) in cases.into_iter().enumerate() {
            let pair = rig.pair(QpConfig::default());
            let near = pair[0].run(THREAD, &steps).pop().unwrap();
            assert_eq!(near.status, "stuck", "{what}");
            assert!(near.took >= Duration::from_millis(150) && near.took < hang(), "{near:?}");
            for end in &pair {
                let e = end.ended();
                assert!(matches!(e, Error::Stuck { rank: 0, slot: 0 }), "{what}: {e}");
            }
            assert_eq!(rig.counters().stuck, i as u64 + 1);
            works(&other, i as u32);
        }
    });
}
