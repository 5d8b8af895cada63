//! What a peer says of its queue pair, mutated, checked against ends of each kind.

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_test_ends::{GEOMETRY, memory};
use pushgate_tests::fuzz::{fuzz, kind, part, split};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::cm::CmOffer;
use super::config::Config;
use super::offer::{Offer, Places};
use super::setup::VerbsOpening;
use super::simulated::Sim;

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
