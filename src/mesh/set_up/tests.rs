//! Tests of frames that come for queue pairs of this rank, from ranks that are made by hand and can misbehave.

use std::io::Write;

use pushgate_driver_shim::fdpass::recv_message;
use pushgate_tests::hang;

use super::*;
use crate::mesh::QUEUE_PAIRS;
use crate::mesh::tests::{by_hand, wire};

const LABEL: u32 = QUEUE_PAIRS + 7;

/// A BREAK of epoch 0 from the peer's incarnation 1 to an incarnation of this end, without the label.
fn break_to(incarnation: u64) -> Vec<u8> {
    let mut frame = vec![3, 0, 0, 0, 0];
    frame.extend(1u64.to_le_bytes());
    frame.extend(incarnation.to_le_bytes());
    frame
}

fn incarnation(n: u64) -> Incarnation {
    Incarnation::new(n).unwrap()
}

#[test]
fn p8_answers_to_a_peer_that_reads_nothing_are_bounded_and_go_on_when_it_reads() {
    let (mesh, _lost, mut others) = by_hand(2, hang());
    mesh.shared.inbox.state().gone.insert((1, LABEL), incarnation(1));
    let many = wire(LABEL, &break_to(1)).repeat(1000);
    let waiting = || mesh.shared.peer(1).out().frames.len();
    for _ in 0..10 {
        others[0].write_all(&many).unwrap();
    }
    pushgate_tests::wait_until("answers are dropped", || waiting() > MOST_TOLD);
    for _ in 0..20 {
        others[0].write_all(&many).unwrap();
        assert!(waiting() < MOST_TOLD + 100, "{} bytes wait", waiting());
    }
    let answer = || {
        let (bytes, _) = recv_message(&others[0], 1 << 10, 0).unwrap();
        connect::ended(&bytes[4..]).unwrap().expect("an END").0
    };
    assert_eq!(answer(), incarnation(1));
    while waiting() > 0 {
        answer();
    }
    assert_eq!(mesh.lost(), None);
    // This rank's own ENDs are never dropped, and come behind the answers.
    mesh.shared.tell_end(1, LABEL, connect::end(incarnation(9), None, Status::new(abi::PUSHGATE_ABORTED)));
    while answer() != incarnation(9) {}
}
