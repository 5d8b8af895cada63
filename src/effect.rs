//! Settings that were set and have no effect.

use crate::settings::{AutoOr, ProxyPlace, Settings, Transport, WindowKind};

impl Settings {
    /// The settings that differ from their default and have no effect together with the others: a
    /// sentence for each.
    ///
    /// Programs print the sentences as warnings. Settings of the NCCL plugin and of `pushgate proxy` are left out, because
    /// a host may set these for all of its programs.
    pub fn without_effect(&self) -> Vec<String> {
        let defaults = Settings::default();
        let mut all = Vec::new();
        macro_rules! idle {
            ($why:expr, $($name:ident),+) => {{$(
                if self.$name != defaults.$name {
                    all.push(format!("{} has no effect: {}", stringify!($name).replace('_', "-"), $why));
                }
            )+}};
        }
        let transports = self.transports();
        if !transports.contains(&Transport::Tcp) {
            idle!("queue pairs are not tcp", tcp_streams, tcp_checksum, tcp_io);
        }
        if !transports.contains(&Transport::Local) {
            idle!("queue pairs are not local", local_folder);
        }
        match transports[..] {
            [Transport::Local] => {
                idle!("queue pairs are local, whose ranks are all on this host", host);
                idle!(
                    "queue pairs are local, which use no RDMA device",
                    ib_dev,
                    ib_port,
                    gid_index,
                    ib_mtu,
                    traffic_class,
                    service_level,
                    pkey,
                    path_timeout,
                    ack_timeout,
                    retry_count,
                    no_imm,
                    write_order,
                    rdma_cm,
                    rdma_port_range,
                    cq_events
                );
            }
            [Transport::Tcp] => {
                idle!(
                    "queue pairs are tcp, which use no RDMA device",
                    ib_dev,
                    ib_port,
                    gid_index,
                    ib_mtu,
                    traffic_class,
                    service_level,
                    pkey,
                    ack_timeout,
                    retry_count,
                    no_imm,
                    write_order,
                    rdma_cm,
                    rdma_port_range,
                    cq_events
                );
            }
            _ if self.rendezvous == "none" => idle!("without a rendezvous all ranks are on this host", host),
            _ => {}
        }
        match self.window {
            WindowKind::Memory => {
                idle!("window is memory, which needs no kernel module", window_dev, staging_ttl)
            }
            WindowKind::Bar => idle!("window is bar, which ends with its process", staging_ttl),
            _ => {}
        }
        match self.proxy {
            ProxyPlace::Thread => {
                idle!(
                    "proxy is thread; set proxy to process to use a proxy process",
                    proxy_socket,
                    proxy_user
                );
                let cores = cores();
                if let AutoOr::Is(core) = self.proxy_cpu
                    && !cores.is_empty()
                    && !cores.contains(&core)
                {
                    let may = ranges(&cores);
                    all.push(format!("proxy-cpu {core} has no effect: this process may run on cores {may}"));
                }
            }
            ProxyPlace::Process => {
                idle!("proxy is process, which chooses its own cores", proxy_cpu, drive);
                idle!("proxy is process, which reports by a stall-report of its own", stall_report);
            }
        }
        all
    }
}

/// The cores that this process may run on, in order; none if the kernel does not say.
pub(crate) fn cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Numbers in order as ranges: `0-3, 8`.
fn ranges(numbers: &[usize]) -> String {
    let rows = numbers.chunk_by(|a, b| a + 1 == *b);
    let row = |row: &[usize]| match row {
        [one] => one.to_string(),
        _ => format!("{}-{}", row[0], row[row.len() - 1]),
    };
    rows.map(row).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(given: &[(&str, &str)]) -> Vec<String> {
        let mut settings = Settings::default();
        given.iter().for_each(|(name, value)| settings.set(name, value).unwrap());
        settings.without_effect()
    }

    #[test]
    fn a_setting_without_effect_is_named_with_its_reason() {
        assert_eq!(said(&[]), [""; 0]);
        assert_eq!(said(&[("slots", "64"), ("timeout", "1000")]), [""; 0]);
        assert_eq!(
            said(&[("host", "10.0.0.1"), ("ib-mtu", "1024")]),
            [
                "host has no effect: queue pairs are local, whose ranks are all on this host",
                "ib-mtu has no effect: queue pairs are local, which use no RDMA device"
            ]
        );
        let verbs = ("qp", "verbs");
        assert_eq!(
            said(&[verbs, ("host", "10.0.0.1")]),
            ["host has no effect: without a rendezvous all ranks are on this host"]
        );
        assert_eq!(said(&[verbs, ("host", "10.0.0.1"), ("rendezvous", "node0:7000")]), [""; 0]);
        assert_eq!(said(&[verbs, ("ib-mtu", "1024")]), [""; 0]);
        assert_eq!(
            said(&[verbs, ("local-folder", "/run/jobs")]),
            ["local-folder has no effect: queue pairs are not local"]
        );
        assert_eq!(
            said(&[("staging-ttl", "5")]),
            ["staging-ttl has no effect: window is memory, which needs no kernel module"]
        );
        assert_eq!(
            said(&[("proxy-socket", "@x")]),
            ["proxy-socket has no effect: proxy is thread; set proxy to process to use a proxy process"]
        );
        let process = ("proxy", "process");
        assert_eq!(said(&[process, ("proxy-socket", "@x")]), [""; 0]);
        assert_eq!(
            said(&[process, ("proxy-cpu", "0")]),
            ["proxy-cpu has no effect: proxy is process, which chooses its own cores"]
        );
    }

    #[test]
    fn a_core_that_this_process_may_not_use_is_named_with_those_that_it_may() {
        let cores = cores();
        assert_eq!(said(&[("proxy-cpu", &cores[0].to_string())]), [""; 0]);
        let says = said(&[("proxy-cpu", "999")]);
        assert_eq!(
            says,
            [format!("proxy-cpu 999 has no effect: this process may run on cores {}", ranges(&cores))]
        );
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3, 8, 10-11");
    }
}
