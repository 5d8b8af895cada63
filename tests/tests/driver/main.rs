//! Tests the kernel module in the virtual machine: `cargo xtask vm --suite driver`. Elsewhere every test here is
//! skipped. The machine has four ivshmem functions: two with a memory of their own, and two peers that share one memory
//! and ring each other; and a network card and a disk, which have drivers of their own. Modelled on gdrcopy's sanity suite.

mod calls;
mod dma_buf;
mod doorbell;
mod foreign;
mod harness;
mod killed_proxy;
mod rdma;
mod removal;
mod slice_limits;
mod slices;
mod staging;

use crate::calls::random_calls;
use crate::harness::{MIB, PATTERN, WINDOW, fill, function, other_than, read, staging, write};
use crate::killed_proxy::rank;

/// What the processes of [`harness::Actor`] do.
#[test]
#[ignore = "other tests start this in processes of their own"]
fn role() {
    let role = std::env::var("DRIVER_ROLE").expect("no test by itself");
    let hear = || {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        line.trim().to_string()
    };
    match role.as_str() {
        // Maps all of /dev/pushgate0, writes it, gives it back and stays.
        "former-owner" => {
            let take = || {
                let device = function(0);
                let slice = device.slice(WINDOW, 0).unwrap();
                let map = slice.map().unwrap();
                assert_eq!(other_than(&map, 0), None);
                fill(&map, PATTERN);
            };
            take();
            println!("@given back");
            hear();
            // The process itself may get it again.
            take();
            println!("@taken again");
            hear();
        }
        "reader" => {
            let device = function(0);
            let slice = device.slice(MIB, 0).unwrap();
            let map = slice.map().unwrap();
            write(&map, 8, PATTERN);
            println!("@mapped {:x}", read(&map, 8));
            hear();
            println!("@read {:x}", read(&map, 8));
        }
        "staging-owner" => {
            let device = staging();
            let area = device.create_staging("survivor", 3 * MIB + 5, 20_000).unwrap();
            let map = area.map().unwrap();
            (0..map.len()).step_by(8).for_each(|at| write(&map, at, at as u64 ^ PATTERN));
            println!("@written");
            hear();
        }
        "random" => random_calls(),
        "killed-proxy" => rank(0),
        "peer-of-the-killed" => rank(1),
        other => panic!("no role {other}"),
    }
}
