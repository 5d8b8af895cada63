//! What an RDMA device registers: staging, and no slice.

use std::time::Instant;

use pushgate_tests::wait_until;

use crate::harness::{MIB, alone, function, other_than, staging, state};

#[test]
#[ignore = "needs the kernel module: cargo xtask vm --suite driver"]
fn an_rdma_device_registers_staging_and_refuses_a_slice() {
    let Some(_guard) = alone() else { return };
    let verbs = pushgate_rdma_core_sys::open().unwrap();
    let device = function(0);
    let slice = device.slice(MIB, 0).unwrap().map().unwrap();
    let area = device.create_staging("registered", 4 * MIB, 0).unwrap();
    let map = area.map().unwrap();
    // SAFETY: calls of libibverbs with what earlier calls returned; registered memory outlives its
    // registration.
    unsafe {
        let mut count = 0;
        let list = verbs.ibv_get_device_list(&mut count);
        assert!(count > 0);
        let context = verbs.ibv_open_device(*list);
        verbs.ibv_free_device_list(list);
        assert!(!context.is_null());
        let domain = verbs.ibv_alloc_pd(context);
        assert!(!domain.is_null());
        let begin = Instant::now();
        let region = verbs.ibv_reg_mr(domain, map.as_ptr().as_ptr().cast(), map.len(), 7);
        assert!(!region.is_null(), "{}", std::io::Error::last_os_error());
        println!("ibv_reg_mr of 4 MiB of staging: {:?}", begin.elapsed());
        let refused = verbs.ibv_reg_mr(domain, slice.as_ptr().as_ptr().cast(), slice.len(), 7);
        let error = std::io::Error::last_os_error();
        assert!(refused.is_null());
        println!("ibv_reg_mr of a slice: {error}");
        // Everything is dropped but the pin: the pages stay its own.
        drop((map, slice));
        drop(device);
        wait_until("the area is gone", || state()["areas"] == 0);
        let other = staging();
        let filled = other.create_staging("other", 64 * MIB, 0).unwrap().map().unwrap();
        assert_eq!(other_than(&filled, 0), None);
        assert_eq!(verbs.ibv_dereg_mr(region), 0);
        verbs.ibv_dealloc_pd(domain);
        verbs.ibv_close_device(context);
    }
}
