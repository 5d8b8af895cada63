//! Tests of frames that come for queue pairs of this rank, from ranks that are made by hand and can misbehave.

use std::io::Write;
use std::os::fd::AsFd;

use pushgate_driver_shim::closing::MOST_CLOSES;
use pushgate_driver_shim::fdpass::{recv_message, send_message};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_tests::fuse::Hanging;
use pushgate_tests::hang;
use pushgate_tests::lingering::lingering;

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
    let waiting = || mesh.shared.peer(1).out().waiting();
    for _ in 0..40 {
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
    // This rank's own ENDs are never dropped, and come after the answers.
    mesh.shared.tell_end(1, LABEL, connect::end(incarnation(9), None, Status::new(abi::PUSHGATE_ABORTED)));
    while answer() != incarnation(9) {}
}

/// A RESUME of the peer's incarnation 1 to an incarnation of this end.
fn resume_to(incarnation: u64) -> Vec<u8> {
    let mut frame = LABEL.to_le_bytes().to_vec();
    frame.extend([1, 0, 0, 0, 0]);
    frame.extend(1u64.to_le_bytes());
    frame.extend(incarnation.to_le_bytes());
    frame.extend(0u64.to_le_bytes());
    frame
}

fn route(own: u64, with: u64) -> (Route, Mailbox) {
    let mailbox = Mailbox::default();
    let (own, with) = (incarnation(own), incarnation(with));
    (Route { own, with, mailbox: mailbox.clone(), tell: Arc::new(|| {}) }, mailbox)
}

#[test]
fn p8_descriptors_that_linger_are_closed_and_counted_out_while_their_other_ends_live() {
    const SENT: usize = 40;
    for gone in [true, false] {
        let (mesh, lost, others) = by_hand(2, hang());
        let mut state = mesh.shared.inbox.state();
        let _mailbox = match gone {
            true => {
                state.gone.insert((1, LABEL), incarnation(1));
                None
            }
            false => {
                let (route, mailbox) = route(1, 1);
                state.routes.insert((1, LABEL), route);
                Some(mailbox)
            }
        };
        drop(state);
        let mut ends = Vec::new();
        for _ in 0..SENT {
            let (socket, end) = lingering();
            // The mesh closes its copy when this one is closed, or this close would be the last.
            let state = mesh.shared.inbox.state();
            send_message(&others[0], &resume_to(1), &[socket.as_fd()]).unwrap();
            drop(socket);
            drop(state);
            ends.push(end);
        }
        let open = || mesh.shared.inbox.state().waiting.get(&1).map_or(0, |load| load.open());
        // The last frame comes after all other frames.
        (&others[0]).write_all(&wire(3, b"last")).unwrap();
        pushgate_tests::wait_until("all have come", || {
            mesh.shared.inbox.state().frames.contains_key(&(1, 3))
        });
        pushgate_tests::wait_until("all are counted out", || open() == 0);
        drop(ends);
        assert!(lost.try_recv().is_err(), "gone: {gone}");
    }
}

/// Each close of the descriptors hangs for as long as the rank likes.
#[test]
fn p7_p8_a_rank_whose_frames_bring_files_that_hang_leaves_few_threads_and_its_frames_are_answered() {
    let (mesh, _lost, others) = by_hand(2, hang());
    let hanging = match Hanging::open(1) {
        Ok(hanging) => hanging,
        Err(e) => {
            return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
        }
    };
    mesh.shared.inbox.state().gone.insert((1, LABEL), incarnation(1));
    for _ in 0..60 {
        send_message(&others[0], &resume_to(1), &[hanging.files()[0].as_fd()]).unwrap();
        let (bytes, _) = recv_message(&others[0], 1 << 10, 0).unwrap();
        assert_eq!(connect::ended(&bytes[4..]).unwrap().expect("an END").0, incarnation(1));
    }
    let open = || mesh.shared.inbox.state().waiting[&1].open();
    // Each close under way has two threads.
    pushgate_tests::wait_until("closes hang", || hanging.waiting() >= MOST_CLOSES);
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!((hanging.waiting(), open()), (MOST_CLOSES, 60));
    drop(hanging);
    pushgate_tests::wait_until("all are counted out", || open() == 0);
}

#[test]
fn p7_p8_frames_to_an_earlier_queue_pair_that_is_gone_are_answered_whichever_was_freed_first() {
    for freed in [[1, 2], [2, 1]] {
        let (mesh, _lost, mut others) = by_hand(2, hang());
        let (newer, _mailbox) = route(2, 2);
        mesh.shared.inbox.state().routes.insert((1, LABEL), newer);
        let shared = Arc::downgrade(&mesh.shared);
        let channel = |own| Channel { shared: shared.clone(), rank: 1, label: LABEL, own: incarnation(own) };
        // Of another incarnation of the peer than the one that the route is joined with.
        let mut stranger = break_to(2);
        stranger[5] = 9;
        let [first, second] = freed.map(channel);
        drop(first);
        assert_eq!(mesh.shared.inbox.state().routes.is_empty(), freed[0] == 2);
        others[0].write_all(&wire(LABEL, &break_to(1))).unwrap();
        let answer = || {
            let (bytes, _) = recv_message(&others[0], 1 << 10, 0).unwrap();
            connect::ended(&bytes[4..]).unwrap().expect("an END").0
        };
        assert_eq!(answer(), incarnation(1), "{freed:?}");
        drop(second);
        (&others[0]).write_all(&wire(LABEL, &break_to(1))).unwrap();
        (&others[0]).write_all(&wire(LABEL, &stranger)).unwrap();
        assert_eq!([answer(), answer()], [1, 2].map(incarnation), "{freed:?}");
        assert!(mesh.shared.inbox.state().frames.is_empty(), "{freed:?}");
    }
}

#[test]
fn p8_descriptors_in_mailboxes_count_as_the_peers_until_engines_take_them() {
    let (mesh, _lost, others) = by_hand(2, hang());
    let mailbox = mesh.shared.inbox.state().mailbox(1);
    let made = Route { mailbox: mailbox.clone(), ..route(1, 1).0 };
    mesh.shared.inbox.state().routes.insert((1, LABEL), made);
    let memory = SharedMemory::builder("set-up-test", 4096).create().unwrap();
    let open = || mesh.shared.inbox.state().waiting[&1].open();
    for _ in 0..2 {
        send_message(&others[0], &resume_to(1), &[memory.fd()]).unwrap();
    }
    pushgate_tests::wait_until("both are counted", || open() == 2);
    mesh.shared.inbox.state().routes.clear();
    drop(mailbox);
    assert_eq!(open(), 0);
}
