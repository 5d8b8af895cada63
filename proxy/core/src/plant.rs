//! Planted faults: errors in the code of this project that the simulator switches on, one at a time, to prove that it
//! finds them. They exist only in builds with the feature `sim`.

use std::cell::Cell;

/// A planted fault, named after the promise that it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// P1: the credit word gives back one unit of the window too many.
    P1Credit,
    /// P2: a record counts as complete once its first word carries the lap that is due.
    P2Lap,
    /// P3: a signal is written when the copy of its data begins.
    P3Signal,
    /// P4: of the work requests that complete together, one gives nothing back.
    P4Leaked,
    /// P4: a SEND gets its permit without a receive of the peer.
    P4Forged,
    /// P5: a place is given back once its message has arrived, though it is still read there.
    P5Freed,
    /// P5: over TCP a slot is given back while the stream may still read it.
    P5Settled,
    /// P6: over TCP what has landed of a message in part counts over the next link, too.
    P6Landed,
    /// P6: a rewind begins one message too late.
    P6Rewind,
    /// P6: an end takes frames that were sent to an earlier incarnation of it.
    P6Stale,
    /// P6: a session with rails accepts a message that lacks a stripe, once the message after it is whole.
    P6Hole,
    /// P6: a PUT is written straight into its region while an earlier one to the same bytes is on its way.
    P6Overlap,
    /// P6: an end says what it has taken in over a rail before the rail's link has stopped.
    P6Fence,
    /// P6: an end says what it has taken in over a rail before the rail's link is let go.
    P6Cleared,
    /// P6: an end takes in what comes over a link that broke after it has said how much it has accepted.
    P6Late,
    /// P6: an end posts over a link that broke before the next link is live.
    P6Early,
    /// P6: slots are given back before the session segment says so.
    P6Session,
    /// P7: an engine that falls asleep does not look for work once more.
    P7WakeUp,
    /// P7: an end that gets ready after the peer does not say so.
    P7Ready,
    /// P7: an end whose peer does not answer tries no second time to replace its link.
    P7Attempt,
    /// P8: offset and length in a region are not checked.
    P8Region,
}

impl Plant {
    /// All planted faults with their names on the command line.
    pub const ALL: [(&'static str, Plant); 21] = [
        ("p1", Plant::P1Credit),
        ("p2", Plant::P2Lap),
        ("p3", Plant::P3Signal),
        ("p4", Plant::P4Leaked),
        ("p4-forged", Plant::P4Forged),
        ("p5", Plant::P5Freed),
        ("p5-settled", Plant::P5Settled),
        ("p6", Plant::P6Rewind),
        ("p6-landed", Plant::P6Landed),
        ("p6-stale", Plant::P6Stale),
        ("p6-hole", Plant::P6Hole),
        ("p6-overlap", Plant::P6Overlap),
        ("p6-fence", Plant::P6Fence),
        ("p6-cleared", Plant::P6Cleared),
        ("p6-late", Plant::P6Late),
        ("p6-early", Plant::P6Early),
        ("p6-session", Plant::P6Session),
        ("p7", Plant::P7WakeUp),
        ("p7-ready", Plant::P7Ready),
        ("p7-attempt", Plant::P7Attempt),
        ("p8", Plant::P8Region),
    ];

    /// The fault of this name.
    pub fn named(name: &str) -> Option<Plant> {
        Plant::ALL.iter().find(|(n, _)| *n == name).map(|(_, plant)| *plant)
    }
}

thread_local! {
    static PLANTED: Cell<Option<Plant>> = const { Cell::new(None) };
}

/// Switches one fault on for this thread, or all of them off.
pub fn set(plant: Option<Plant>) {
    PLANTED.set(plant);
}

/// Whether this fault is switched on.
#[inline]
pub fn is(plant: Plant) -> bool {
    PLANTED.get() == Some(plant)
}
