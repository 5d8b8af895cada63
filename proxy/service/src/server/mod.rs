//! `pushgate proxy`: a server that runs engines for programs of other processes, which reach it over a Unix socket.
//!
//! Each program has a connection, a thread that answers it, and **an engine of its own**. The engine of its own costs a
//! thread for each program, and shuts the programs off from one another by construction (P8):
//!
//! * A queue pair or a region is looked up in the program's own engine alone, so no number names another program's.
//! * A program that floods its rings, or whose WQEs make its engine work, takes time from its own thread, which the
//!   kernel's scheduler bounds.
//! * An engine that fails takes down the queue pairs of one program.
//! * When the connection ends, dropping one engine drops everything that the program brought.
//!
//! Two programs share only what they agreed on themselves: a link segment and a window, each read-only for the other.
//!
//! A server may serve **several users** ([`ServerOptions::users`]). Each user then has quotas over all of their programs, and a
//! share of the processors that does not grow with the number of their programs.
//!
//! What a program hands over is checked where it enters. Memory must be of a sealed size, because truncating memory
//! that is mapped here would raise SIGBUS here; it is counted against the limits of [`ServerOptions`]. A doorbell must
//! be a Unix socket on which no call waits, whatever a program or its peer sets there
//! ([`pushgate_driver_shim::bell`]).
//!
//! | file | subject |
//! | --- | --- |
//! | `options.rs` | how a server runs, and the limits of one program |
//! | `socket.rs` | the listening socket and its file |
//! | `accept.rs` | the serving loop: connections are admitted or refused |
//! | `client.rs` | one program: its thread, its engine, its requests |
//! | `account.rs` | what one program holds, against the limits (pure) |
//! | `ledger.rs` | what one user holds, against the quotas (pure) |
//! | `share.rs` | the processor time that users get |
//! | `sessions.rs` | queue pairs whose links are replaced, and those that another proxy drove |
//! | `descriptors.rs` | the memory and the bells that a program hands over |
//! | `wait.rs` | waiting for a descriptor, the end of a process, or the end of the server |

mod accept;
mod account;
mod client;
mod costs;
mod descriptors;
#[cfg(test)]
mod fuzzed;
mod ledger;
mod options;
mod sessions;
mod share;
mod socket;
mod wait;

pub use accept::serve;
pub use options::{Leaves, ServerOptions};
pub use socket::{bind, bind_for_users};

pub use crate::socket_file::SocketFile;
