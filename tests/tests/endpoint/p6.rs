//! P6: puts to the same bytes, whichever way each of them takes.

use pushgate_driver_shim::record::Record;

use crate::common::*;
use crate::sending::sending;
use crate::{bytes, put};

#[test]
fn p6_puts_to_the_same_bytes_land_in_their_order() {
    let mut s = sending(remote(), 4000);
    let region = |record: Record| Record { flags: record.flags | Record::REGION, place: s.lkey, ..record };
    let mut value = 0;
    // Inline, short and long payloads; then what an RDMA device writes where it belongs.
    for length in [9, 100, 128, 300] {
        for (from_region, offset) in [(false, 0), (true, 0), (false, 200), (true, 90)] {
            let mut next = |record: Record, length: usize, flags: u8| {
                value += 1;
                let record = Record { flags: record.flags | flags, signal_value: value, ..record };
                let content = bytes(value, length);
                assert!(s.pair.devices[0].post(record, &content));
                content
            };
            let inline = if length <= 16 { Record::INLINE } else { 0 };
            let first = next(put(s.rkey, 0, 0, 0), length, inline);
            let mut expected = first;
            expected.resize(1000, 0);
            s.to.write(length, &vec![0; 1000 - length]);
            let second = match from_region {
                false => next(put(s.rkey, offset, 0, 0), 500, 0),
                true => {
                    value += 1;
                    let record = region(put(s.rkey, offset, 0, value));
                    assert!(s.pair.devices[0].post_from(record, 500));
                    s.from.read(0, 500)
                }
            };
            expected[offset as usize..][..500].copy_from_slice(&second);
            // Both are on their way before the peer looks.
            s.pair.poll(0);
            s.pair.settle();
            assert_eq!(s.pair.devices[1].signal(0), value);
            let what = format!("{length} bytes, then 500 at {offset}, out of a region: {from_region}");
            assert!(s.to.read(0, 1000) == expected, "{what}");
            while s.pair.devices[0].poll_cq().is_some() {}
            s.pair.settle();
        }
    }
    if remote() {
        assert!(s.pair.ends[1].counters().placed > 0, "what touches nothing goes straight there");
    }
    s.pair.assert_clean();
}
