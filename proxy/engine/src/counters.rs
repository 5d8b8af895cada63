//! What can be counted, is: plain numbers that the engine copies out now and then.

use serde::{Deserialize, Serialize};

#[cfg(feature = "sim")]
/// Messages of an endpoint, for the simulator: what the invariants of a session relate to each other.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Of this end: those whose places the peer no longer needs, as last heard.
    pub released: u64,
    /// Of this end: those that the peer has, as last heard.
    pub received: u64,
    /// Of the peer: those that this end has accepted.
    pub accepted: u64,
    /// Of this end: those posted and not put back by a rewind.
    pub sent: u64,
    /// Of this end: those that the peer had accepted when the present link began.
    pub resumed: u64,
    /// The link is live.
    pub live: bool,
    /// The end goes on in place of one whose engine died, and has not counted again what that one had posted.
    pub rebuilds: bool,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of one queue pair or, added up, of an engine. They only grow.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        // A proxy of an earlier release knows fewer.
        #[serde(default)]
        #[non_exhaustive]
        pub struct Counters { $($(#[$doc])* pub $name: u64,)* }

        impl std::ops::AddAssign for Counters {
            // Saturating: what another process says that it counts may be anything.
            fn add_assign(&mut self, other: Self) { $(self.$name = self.$name.saturating_add(other.$name);)* }
        }

        impl std::ops::Sub for Counters {
            type Output = Self;
            fn sub(self, other: Self) -> Self { Counters { $($name: self.$name - other.$name,)* } }
        }

        impl Counters {
            /// Each count with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// How many counts there are.
            pub(crate) const WORDS: usize = [$(stringify!($name)),*].len();

            /// The counts, in the order of [`Counters::iter`].
            pub(crate) fn words(&self) -> [u64; Self::WORDS] {
                [$(self.$name),*]
            }

            /// The counters with these counts, in the order of [`Counters::iter`].
            pub(crate) fn of(words: [u64; Self::WORDS]) -> Self {
                let [$($name),*] = words;
                Counters { $($name),* }
            }
        }
    };
}

counters! {
    /// Messages released to the queue pair.
    released,
    /// Payload of those, bytes.
    released_bytes,
    /// Messages retired: the peer has them and their place is free again.
    retired,
    /// Messages delivered here, to this side's device.
    delivered,
    /// Payload of those, bytes.
    delivered_bytes,
    /// NOPs.
    nops,
    /// Payloads that the proxy copied.
    copies,
    /// Bytes of those.
    copied_bytes,
    /// PUTs and SENDs whose payload the transport wrote to its region itself.
    placed,
    /// Payloads copied on the sender's side, for the transport can't send from the window.
    bounced,
    /// Bytes of those.
    bounced_bytes,
    /// Of the copies, those made because a slow reader held too much in place.
    copied_out,
    /// The gate had no free send-queue slot.
    stall_send_queue,
    /// The gate had no free CQ slot.
    stall_completion_queue,
    /// The gate had no receive of the peer.
    stall_receive,
    /// The gate had too many bytes in flight.
    stall_bytes,
    /// Receiver-not-ready answers of the transport. P4: stays 0.
    rnr,
    /// Messages posted that the peer could not take. P4: stays 0.
    dropped,
    /// WQEs and records refused.
    refused,
    /// Slots reserved and never published.
    stuck,
    /// Doorbells rung at a peer's engine.
    rings,
    /// Times that the engine slept.
    sleeps,
    /// Times that a window's interrupt woke it.
    interrupts,
    /// Links that took the place of one that broke.
    #[serde(skip_serializing_if = "is_zero")]
    recovered,
    /// Of the messages released, those whose payload lies in the WQE itself.
    #[serde(skip_serializing_if = "is_zero")]
    inline,
}

/// A count that an earlier release does not know is told only when there is something to tell.
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Counters {
    /// All stalls of the gate together.
    pub fn credit_stalls(&self) -> u64 {
        self.stall_send_queue + self.stall_completion_queue + self.stall_receive + self.stall_bytes
    }
}
