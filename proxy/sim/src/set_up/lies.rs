//! Frames that an end may forge: it writes what it likes to its own channel, and knows what its own end and the other one
//! have said.

use pushgate_engine::connect::{Fds, Frame};
use serde_json::Value;

use crate::random::Random;

/// Bytes of a frame's head, and of the head with the word that RESUME and END have (docs/protocol.md).
const HEAD: usize = 21;
const RESUME_HEAD: usize = HEAD + 8;
const RESUME: u8 = 1;
const READY: u8 = 2;
const END: u8 = 4;

/// Makes frames of those that an end has `sent`, and says what they are. `peer` is the other end's incarnation.
pub(super) fn forge(sent: &[Frame], peer: u64, seed: u64) -> (&'static str, Vec<Frame>) {
    let mut random = Random::new(seed, 8);
    let own = |kind: u8| sent.iter().rev().find(|f| f.bytes.first() == Some(&kind)).cloned();
    let made_up = || Frame { bytes: vec![READY; RESUME_HEAD], along: Fds::default() };
    let of = |random: &mut Random| {
        let kinds = [RESUME, READY];
        own(random.of(&kinds)).or_else(|| own(RESUME)).unwrap_or_else(made_up)
    };
    let mut frame = of(&mut random);
    let word = |random: &mut Random, near: u64| {
        let far = random.next();
        random.of(&[0, 1, 2, near, near + 1, u64::MAX, far])
    };
    let what = match random.below(14) {
        0 => {
            frame.bytes[0] = random.next() as u8;
            "a frame of another kind"
        }
        1 | 2 => {
            let far = random.next() as u32;
            let epoch: u32 = random.of(&[1, 2, 3, 1023, 1024, 1025, u32::MAX, far]);
            frame.bytes[1..5].copy_from_slice(&epoch.to_le_bytes());
            "a frame of another epoch"
        }
        3 => {
            let from = word(&mut random, peer);
            frame.bytes[5..13].copy_from_slice(&from.to_le_bytes());
            "a frame of another incarnation"
        }
        4 => {
            let to = word(&mut random, peer);
            frame.bytes[13..HEAD].copy_from_slice(&to.to_le_bytes());
            "a frame to another incarnation"
        }
        5 => {
            frame.bytes.truncate(random.below(RESUME_HEAD as u64 + 4) as usize);
            "a frame that is cut off"
        }
        6 => {
            frame.bytes = (0..random.below(200)).map(|_| random.next() as u8).collect();
            "random bytes"
        }
        7 => {
            frame.bytes[0] = END;
            let status = random.next();
            frame.bytes.truncate(HEAD);
            frame.bytes.extend(status.to_le_bytes());
            "an end that was not"
        }
        8 => {
            frame = own(READY).unwrap_or_else(|| {
                let mut ready = of(&mut random);
                ready.bytes[0] = READY;
                ready.bytes.truncate(HEAD);
                Frame { along: Fds::default(), ..ready }
            });
            frame.bytes[13..HEAD].copy_from_slice(&peer.to_le_bytes());
            let places = match random.below(4) {
                0 => Vec::new(),
                1 => (0..random.below(100)).map(|_| random.next() as u8).collect(),
                _ => places(&mut random),
            };
            frame.bytes.truncate(HEAD);
            frame.bytes.extend(places);
            "other places"
        }
        9 => {
            frame = own(RESUME).unwrap_or(frame);
            frame.bytes.truncate(RESUME_HEAD);
            let offers: [&[u8]; 4] = [b"", b"{", b"null", br#"{"offer":{"Tcp":1},"note":0}"#];
            frame.bytes.extend(random.of(&offers));
            "an offer that is none"
        }
        10 | 11 => {
            frame = own(RESUME).unwrap_or(frame);
            let offer = frame.bytes.get(RESUME_HEAD..).and_then(|offer| edited(offer, &mut random));
            frame.bytes.truncate(RESUME_HEAD);
            frame.bytes.extend(offer.unwrap_or_default());
            "an offer of something else"
        }
        12 => {
            frame = own(RESUME).unwrap_or(frame);
            let mut fds = frame.along.into_owned().expect("descriptors are there");
            match random.below(3) {
                0 => _ = fds.pop(),
                1 => fds.reverse(),
                _ => fds.extend(fds.first().map(|fd| fd.try_clone().expect("a descriptor"))),
            }
            frame.along = fds.into();
            "other descriptors"
        }
        _ => return ("the same frame many times", vec![frame; 40]),
    };
    let times = random.within(1, 3) as usize;
    (what, vec![frame; times])
}

/// Places that are not there.
fn places(random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..16).map(|_| random.next() as u8).collect();
    let mut word = || {
        let far = random.next();
        random.of(&[0, 4096, u64::MAX, u64::MAX - 4096, far])
    };
    let [mirror, inbox] = [word(), word()];
    let text = format!(
        r#"{{"mirror":{mirror},"mirror_key":{},"inbox":{inbox},"inbox_key":0}}"#,
        word() as u32 | 1 << 31
    );
    bytes.extend(text.bytes());
    bytes
}

/// An offer with one entry changed.
fn edited(offer: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut told: Value = serde_json::from_slice(offer).ok()?;
    let transport = told.get_mut("offer")?.as_object_mut()?.values_mut().next()?;
    let entries = transport.as_object_mut()?;
    let at = random.below(entries.len() as u64) as usize;
    let entry = entries.values_mut().nth(at)?;
    // Few: memory is made for what an offer's rings say.
    let small = random.below(9);
    let far = random.next() >> 1;
    let number = random.of(&[0, 1, small, 77, u32::MAX as u64, far]);
    match entry {
        Value::Bool(is) => *is = !*is,
        Value::Array(all) if !all.is_empty() => {
            let at = random.below(all.len() as u64) as usize;
            all[at] = small.into();
        }
        entry => *entry = number.into(),
    }
    serde_json::to_vec(&told).ok()
}
