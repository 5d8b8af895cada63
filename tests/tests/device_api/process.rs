//! Two devices exchange messages while the engine of each runs in a proxy process.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pushgate::proxy;
use pushgate_tests::hang;

use crate::one_sided::{Target, one_sided};
use crate::rig::{Rig, SCOPES, THREAD, on_every_device};
use crate::two_sided::every_size;

#[test]
fn an_engine_in_another_process_does_the_same() {
    on_every_device(|device| {
        let socket = PathBuf::from(format!("@pushgate-device-api-{}-{device:?}", std::process::id()));
        let stop = proxy::Stop::new().unwrap();
        let rung = stop.try_clone().unwrap();
        std::thread::scope(|s| {
            let server = s.spawn(|| proxy::run(&socket, rung));
            let start = Instant::now();
            let name = socket.to_str().unwrap();
            while std::os::unix::net::UnixStream::connect_addr(&abstract_name(&name[1..])).is_err() {
                assert!(start.elapsed() < hang(), "the proxy does not listen");
                std::thread::sleep(Duration::from_millis(5));
            }
            let rig = Rig::new(device, &[("proxy", "process"), ("proxy-socket", name), ("qp", "local")]);
            assert_eq!(rig.context.proxy_place(), "process");
            every_size(&rig, &[THREAD, SCOPES[3]]);
            one_sided(&rig, &[THREAD], Target::Shared);
            drop(rig);
            stop.ring();
            server.join().unwrap().unwrap();
        });
    });
}

fn abstract_name(name: &str) -> std::os::unix::net::SocketAddr {
    use std::os::linux::net::SocketAddrExt;
    std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap()
}
