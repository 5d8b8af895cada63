//! What a peer says of its RDMA queue pair and of rails, mutated.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pushgate_core::connect::{of_rail, rail};
use pushgate_core::recovery::Control;
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;
use pushgate_engine::connect::{Incarnation, Opening, Prepared, RailsOpening, VerbsOpening};
use pushgate_link::frame::{Fds, Frame};
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link_verbs::simulated::Sim;
use pushgate_link_verbs::{Config, inbox_bytes, mock};
use pushgate_test_ends::{End, GEOMETRY, memory};
use pushgate_tests::fuzz::{fuzz, kind, part, split};

use crate::rails_tests::{pair_over, work};

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
        .max(inbox_bytes(abi::PUSHGATE_MAX_SLOTS_LOG, abi::PUSHGATE_MAX_RX_LOG));
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
    let ends_it =
        rail(one, one, 0, Control::End(pushgate_core::session::Status::new(abi::PUSHGATE_ABORTED)), &[]);
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
