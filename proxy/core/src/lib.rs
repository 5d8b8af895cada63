//! What a queue pair decides: the staging ring, the gate, the sender and the receiver as state machines.
//!
//! Nothing here knows I/O, a clock, a thread or shared memory. The caller tells what happened and performs what is
//! answered, so one seed replays a failure, and any schedule can be tried.
//!
//! * [`staging`] keeps the sender's slots and payload until the peer no longer needs them (P1, P5).
//! * [`gate`] lends what a send consumes, as permits (P4).
//! * [`outbound`] joins both: the sender of one queue pair.
//! * [`inbound`] is the receiver of one queue pair; [`landing`] is the ring that it copies payload to.
//! * [`receives`] is which posted receive a SEND takes, for the receiver and the sender of it.
//! * [`copies`] is which bytes of the peer's regions messages on their way go to.
//! * [`session`] is what both ends know of each other.
//! * [`rails`] carries one session over several links: stripes, the accepted prefix, what a rail that left owes.
//! * [`connect`] is how two ends meet, the first time and every later time; [`recovery`] has its phases; [`fabric`] says
//!   how many links of a device begin again at once.

#![forbid(unsafe_code)]
// One seed replays a run: nothing here reads a clock or hashes at random.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

/// Whether a planted fault is switched on. Without the feature `sim` there is none.
#[cfg(feature = "sim")]
#[macro_export]
macro_rules! planted {
    ($plant:ident) => {
        $crate::plant::is($crate::plant::Plant::$plant)
    };
}
#[cfg(not(feature = "sim"))]
#[macro_export]
/// Whether a planted fault is switched on. Without the feature `sim` there is none.
macro_rules! planted {
    ($plant:ident) => {
        false
    };
}

pub mod connect;
pub mod copies;
pub mod fabric;
pub mod gate;
pub mod inbound;
pub mod journal;
pub mod landing;
pub mod outbound;
#[cfg(feature = "sim")]
pub mod plant;
pub mod rails;
pub mod receives;
pub mod recovery;
pub mod refusal;
mod scatter;
pub mod session;
pub mod staging;
