//! What a peer may send to set a queue pair over RDMA up: offers and places, and frames about rails, of any bytes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pushgate_core::connect::{of_rail, rail};
use pushgate_core::recovery::Control;
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;
use pushgate_tests::fuzz::{fuzz, kind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::cm::CmOffer;
use super::config::Config;
use super::inbox::InboxLayout;
use super::mock;
use super::offer::{Offer, Places};
use super::rails_tests::{pair_over, work};
use super::setup::VerbsOpening;
use super::simulated::Sim;
use super::simulated_tests::{End, GEOMETRY, memory};
use crate::connect::{Fds, Frame, Incarnation, Opening, Prepared, RailsOpening};
use crate::mailbox::{Mailbox, SendFrame};

/// A text of JSON after its length.
fn part(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u16).to_le_bytes(), text].concat()
}

/// Splits what [`part`] put in front.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    Some(rest.split_at(rest.len().min(u16::from_le_bytes(*length).into())))
}

/// What is read of a text, or what kind of error it is; it is written as it is read.
fn read<T: Serialize + DeserializeOwned>(text: &[u8]) -> Result<T, u64> {
    let value: T = serde_json::from_slice(text).map_err(kind)?;
    let written = serde_json::to_vec(&value).unwrap();
    let again: T = serde_json::from_slice(&written).expect("what was written is read");
    assert_eq!(written, serde_json::to_vec(&again).unwrap(), "it is not what was written");
    Ok(value)
}

fn geometry(rank: u32) -> Geometry {
    Geometry { rank, ..GEOMETRY }
}

/// An end over one of the devices, or over both.
fn opening(sims: &[Sim; 2], rank: u32, over_both: bool, window: &Arc<SharedMemory>) -> Opening {
    let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
    let devices = sims.each_ref().map(|sim| sim.device.clone());
    let (window, config): (Arc<dyn Window>, _) = (window.clone(), Config::default());
    match over_both {
        true => {
            let rails = RailsOpening::new(&devices, &config, geometry(rank), &window, &mut allocate);
            Opening::Rails(rails.unwrap())
        }
        false => {
            let one = VerbsOpening::new(&devices[0], &config, geometry(rank), window, &mut allocate);
            Opening::Verbs(Box::new(one.unwrap()))
        }
    }
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_offer_or_places_of_a_peer_over_rdma_make_an_end_panic_or_ask_for_more_than_the_largest_rings() {
    // The bytes that the largest rings take, and those that a machine of the test has.
    const ROOM: usize = 1 << 20;
    let largest = (64usize << abi::PUSHGATE_MAX_UNITS_LOG)
        .max(InboxLayout::new(abi::PUSHGATE_MAX_SLOTS_LOG, abi::PUSHGATE_MAX_RX_LOG).bytes);
    let sims = [Sim::new(), Sim::new()];
    sims.iter().for_each(Sim::drains);
    let windows = [0, 1].map(|rank| memory("window", geometry(rank).window_bytes()));
    let mut allocate = |name: &str, bytes: usize| {
        assert!(bytes <= largest, "{bytes} bytes for {name}");
        match bytes <= ROOM {
            true => SharedMemory::builder(name, bytes).create(),
            false => Err(ShimError::Size { name: name.into(), bytes, allowed: "what the test has" }),
        }
    };
    let mut seeds = Vec::new();
    for both in [false, true] {
        let [ours, theirs] = [0, 1].map(|rank| opening(&sims, rank, both, &windows[rank as usize]));
        let [to_them, to_us] = [&ours, &theirs].map(|opening| opening.offer(7, &[]).unwrap());
        let prepared: Prepared = theirs.prepare::<u32>(0, to_them.clone(), 0, &mut allocate).unwrap().0;
        seeds.push([&[both.into()], &part(&to_us.bytes)[..], &prepared.places()].concat());
    }
    let met = std::cell::Cell::new(0);
    let mut target = |bytes: &[u8]| {
        let Some((&which, (offer, places))) = bytes.split_first().and_then(|(w, b)| Some((w, split(b)?)))
        else {
            return 0;
        };
        let frame = Frame { bytes: offer.to_vec(), along: Fds::default() };
        let own = opening(&sims, 0, which & 1 != 0, &windows[0]);
        let answer = match own.prepare::<u32>(1, frame, 0, &mut allocate) {
            Ok((prepared, ..)) => match prepared.meet(places) {
                Ok(_) => {
                    met.set(met.get() + 1);
                    1
                }
                Err(e) => kind(e) ^ 2,
            },
            Err(e) => kind(e),
        };
        mock::take();
        for sim in &sims {
            assert_eq!((sim.queue_pairs(), sim.registrations()), (0, 0), "an end keeps what it made");
        }
        answer
    };
    // Ends that were only opened are gone before the first input.
    seeds.iter().for_each(|seed| _ = target(seed));
    assert_eq!(met.get(), 2, "what the other end says is taken");
    fuzz(&seeds, target);
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_offer_that_is_checked_against_ends_of_each_kind_makes_the_check_panic_or_is_read_otherwise() {
    let sim = Sim::new();
    let window = memory("window", geometry(0).window_bytes());
    let [ours, theirs] = [0, 1].map(|rank| {
        let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
        let config = Config::default();
        let opening =
            VerbsOpening::new(&sim.device, &config, geometry(rank), window.clone(), &mut allocate).unwrap();
        opening.offer()
    });
    let cm = CmOffer { address: "10.0.0.1".parse().unwrap(), port: 7, nonce: 9 };
    let kinds = |offer: &Offer| {
        [
            offer.clone(),
            Offer { cm: Some(cm), ethernet: true, roce_v2: true, ..offer.clone() },
            Offer { iwarp: true, cm: Some(cm), ethernet: true, roce_v2: false, ..offer.clone() },
            Offer { ethernet: true, roce_v2: true, ..offer.clone() },
        ]
    };
    let places = Places { mirror: 1 << 40, mirror_key: 1, inbox: 1 << 41, inbox_key: 2 };
    let all = kinds(&ours);
    let places = serde_json::to_vec(&places).unwrap();
    let offers = kinds(&theirs).map(|offer| serde_json::to_vec(&offer).unwrap());
    let seeds = offers.map(|offer| [part(&offer), places.clone()].concat());
    let taken = std::cell::Cell::new(0);
    let target = |bytes: &[u8]| {
        let Some((offer, places)) = split(bytes) else { return 0 };
        let offer = match read::<Offer>(offer) {
            Ok(offer) => offer,
            Err(e) => return e,
        };
        let places = read::<Places>(places);
        let mut answer = 0u64;
        for ours in &all {
            answer = answer.wrapping_mul(31)
                ^ match offer.check(ours, 1) {
                    Ok(agreed) => {
                        agreed.peer_geometry.validate().expect("rings that were agreed on");
                        assert!(offer.link_log <= agreed.peer_geometry.link_log && offer.rank == 1);
                        assert_ne!(offer.name(), 0);
                        let at = places.map(|places| places.check(&agreed.peer_geometry, offer.link_log));
                        taken.set(taken.get() + usize::from(matches!(at, Ok(Ok(())))));
                        at.map_or_else(|e| e, |at| at.map_or_else(kind, |()| 3))
                    }
                    Err(why) => {
                        assert!(!why.contains(char::is_control) && why.len() < 4096, "{why:?}");
                        kind(why)
                    }
                };
        }
        answer
    };
    seeds.iter().for_each(|seed| _ = target(seed));
    assert!(taken.get() >= seeds.len(), "an end of the same kind takes each: {}", taken.get());
    fuzz(&seeds, target);
}

/// Lets both devices and an end work for a while, in which the thread that makes links has its turn too.
fn goes_on(sims: &[Sim; 2], end: &mut End) {
    sims.iter().for_each(work);
    end.now += 3_000_000;
    end.poll();
    std::thread::sleep(Duration::from_micros(20));
}

/// What an end whose rail breaks says to the other one until the rail is there again, each frame as a step of an input.
fn said_about_a_rail(sims: &[Sim; 2]) -> Vec<u8> {
    let said = Arc::new(Mutex::new(Vec::new()));
    let mailboxes: [Mailbox; 2] = Default::default();
    let sends = [0, 1].map(|rank| -> SendFrame {
        let (to, said) = (mailboxes[1 - rank].clone(), said.clone());
        Box::new(move |frame: Frame| {
            if rank == 1 {
                said.lock().unwrap().push(frame.bytes.clone());
            }
            to.put(frame);
        })
    });
    let mut ends = pair_over(sims, &Config::default(), &mailboxes, sends);
    assert!(ends[1].endpoint.break_link());
    let begin = std::time::Instant::now();
    let is_ready = |bytes: &Vec<u8>| matches!(of_rail(bytes), Some((_, Control::Ready { .. }, _)));
    while !said.lock().unwrap().iter().any(is_ready) {
        assert!(begin.elapsed() < pushgate_tests::hang(), "the rail does not come back");
        ends.iter_mut().for_each(|end| goes_on(sims, end));
    }
    drop(ends);
    let said = said.lock().unwrap();
    said.iter().flat_map(|bytes| [&[15], &part(bytes)[..]].concat()).collect()
}

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_frames_of_a_peer_about_rails_make_an_end_panic_or_keep_links_that_it_made() {
    let one = Incarnation::MIN;
    let sims = [Sim::new(), Sim::new()];
    // Nobody lets the devices work while an end that is dropped waits for its last words.
    sims.iter().for_each(Sim::drains);
    sims.iter().for_each(Sim::prompt);
    let said = said_about_a_rail(&sims);
    let breaks = rail(one, one, 1, Control::Break { epoch: 0 }, &[]);
    let ends_it = rail(one, one, 0, Control::End(crate::session::Status::new(abi::PUSHGATE_ABORTED)), &[]);
    let step = |bytes: &[u8]| [&[3], &part(bytes)[..]].concat();
    // The first byte says whether this end breaks a rail of its own first.
    let seeds = [
        [&[0][..], &said].concat(),
        [&[1][..], &said].concat(),
        [&[0][..], &step(&breaks), &step(&ends_it)].concat(),
    ];
    let resumed = std::cell::Cell::new(0);
    let target = |bytes: &[u8]| {
        let Some((first, mut rest)) = bytes.split_first() else { return 0 };
        let answer = Arc::new(Mutex::new(0u64));
        let mailboxes: [Mailbox; 2] = Default::default();
        let says = answer.clone();
        let sends: [SendFrame; 2] = [
            Box::new(move |frame: Frame| {
                let Some((rail, control, body)) = of_rail(&frame.bytes) else { return };
                let control = match control {
                    Control::Break { .. } => 1,
                    Control::Resume { .. } => 2,
                    Control::Ready { .. } => 3,
                    Control::End(_) => 4,
                };
                let mut says = says.lock().unwrap();
                *says = says.wrapping_mul(31)
                    ^ (u64::from(rail) << 8 | control << 1 | u64::from(body.is_empty()));
            }),
            Box::new(|_| {}),
        ];
        let [mut own, _peer] = pair_over(&sims, &Config::default(), &mailboxes, sends);
        if first & 1 != 0 {
            own.endpoint.break_link();
        }
        while let Some((turns, frame, after)) = rest.split_first().and_then(|(n, rest)| {
            let (frame, after) = split(rest)?;
            Some((n % 16, frame, after))
        }) {
            rest = after;
            if let Some((number, control, body)) = of_rail(frame) {
                let again = rail(one, one, number, control, body);
                assert_eq!(of_rail(&again), Some((number, control, body)), "what is read is written so");
            }
            mailboxes[0].put(Frame { bytes: frame.to_vec(), along: Fds::default() });
            (0..turns).for_each(|_| goes_on(&sims, &mut own));
        }
        let status = own.endpoint.status().map_or(0, |status| status.code.into());
        resumed.set(resumed.get() + usize::from(own.endpoint.counters().recovered > 0));
        drop((own, _peer));
        mock::take();
        for sim in &sims {
            assert_eq!((sim.queue_pairs(), sim.registrations()), (0, 0), "an end keeps what it made");
        }
        let said = *answer.lock().unwrap();
        said.wrapping_mul(31) ^ status
    };
    seeds.iter().for_each(|seed| _ = target(seed));
    assert!(resumed.get() > 0, "a rail is joined again");
    fuzz(&seeds, target);
}
