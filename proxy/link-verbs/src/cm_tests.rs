//! Queue pairs that rdma_cm connects, on a real device.

use std::sync::Arc;
use std::time::Instant;

use pushgate_driver_shim::segment::Geometry;

use super::config::{Config, RdmaCm};
use super::device::Device;
use super::mock::allocate;
use super::setup::{VerbsOpening, VerbsPrepared};
use pushgate_test_ends::GEOMETRY;

/// Queue pairs between the two ends.
const PAIRS: u32 = 100;

/// Every second queue pair has this end as the one that connects, so each end waits for requests and makes requests at once.
#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite siw"]
fn a_hundred_connections_that_both_ends_set_up_at_once_all_come_up() {
    let name = std::env::var("PUSHGATE_TEST_IB_DEV").expect("PUSHGATE_TEST_IB_DEV names a device");
    let device = Device::open(&name, 1).unwrap();
    let config = Config { cm: RdmaCm::On, ..Config::default() };
    let begin = Instant::now();
    let opening = |rank| {
        let geometry = Geometry { rank, ..GEOMETRY };
        let window = Arc::new(allocate("window", geometry.window_bytes()).unwrap());
        VerbsOpening::new(&device, &config, geometry, window, &mut allocate).unwrap()
    };
    let ranks = |pair: u32| if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] };
    let mut ends: [Vec<VerbsPrepared>; 2] = Default::default();
    for pair in 0..PAIRS {
        let [first, second] = ranks(pair).map(opening);
        let [from_first, from_second] = [first.offer(), second.offer()];
        let [to_first, to_second] = ranks(pair);
        ends[0].push(first.prepare(to_second, &from_second, &mut allocate).unwrap());
        ends[1].push(second.prepare(to_first, &from_first, &mut allocate).unwrap());
    }
    let [first, second] = &ends;
    let places: Vec<_> = first.iter().zip(second).map(|(a, b)| [b.places(), a.places()]).collect();
    let [first, second] = ends;
    let offered = begin.elapsed();
    // The ends join in opposite orders: an end that waited for the other one's turn would wait for ever.
    let of_first = first.into_iter().zip(places.iter().map(|to| to[0]));
    let of_second = second.into_iter().zip(places.iter().map(|to| to[1])).rev();
    let joined = std::thread::scope(|scope| {
        let first = scope.spawn(move || of_first.map(|(end, to)| end.join(to).unwrap()).collect::<Vec<_>>());
        let second: Vec<_> = of_second.map(|(end, to)| end.join(to).unwrap()).collect();
        [first.join().unwrap(), second]
    });
    assert!(joined.iter().all(|end| end.len() == PAIRS as usize));
    println!(
        "{PAIRS} connections over {name}: offered in {offered:?}, all there after {:?}",
        begin.elapsed()
    );
}
