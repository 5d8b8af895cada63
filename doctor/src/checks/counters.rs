//! What ports have counted.

use super::rdma::{chosen, none};
use crate::finding::Finding;
use crate::readings::Readings;

/// The kernel's names of errors on the way between two ports, in the folders `counters` (IB specification, PortCounters) and
/// `hw_counters` (drivers: mlx5's out_of_sequence and others, soft-RoCE's). Each means packets that were lost, damaged or sent
/// again.
pub(crate) const ERRORS: [&str; 19] = [
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "symbol_error",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "out_of_sequence",
    "packet_seq_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "rx_icrc_encapsulated",
    "completer_retry_err",
    "rcvd_seq_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
];

/// Errors are told with their counts. They say nothing of when they happened, so two looks are compared.
pub fn errors(r: &Readings) -> Vec<Finding> {
    let mut findings: Vec<_> = none(r).into_iter().collect();
    for (device, port) in chosen(r).flat_map(|d| d.ports.iter().map(move |p| (d, p))) {
        let subject = format!("{}/{}", device.name, port.number);
        let told = port.errors.iter().map(|(name, count)| format!("{name} {count}"));
        findings.push(match port.errors.is_empty() {
            true => Finding::passed(&subject, "none since the driver was loaded"),
            false => Finding::warned(
                &subject,
                format!("since the driver was loaded: {}", told.collect::<Vec<_>>().join(", ")),
                "look again after a job: where a count has grown, packets are lost (RoCE: see rdma-pfc and rdma-ecn) or damaged \
                 (cable, transceiver)",
            ),
        });
    }
    if findings.is_empty() {
        findings.push(Finding::not_applicable("", "no RDMA device has a port"));
    }
    findings
}
