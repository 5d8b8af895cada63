//! What two ranks of different hosts say to each other before frames: a greeting and its answer, 16 bytes and JSON.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use pushgate_door::Stream;
use pushgate_door::addresses::Places;
use pushgate_door::redial::envelope::{envelope, send_all};
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::{ABI, Versions};
use serde::{Deserialize, Serialize};

use super::ANSWER;

/// Versions that this build speaks of everything that goes over these connections.
pub(super) const VERSIONS: Versions = Versions::new(6, 6);
pub(super) const MAX_GREETING: usize = 1024;
pub(super) const MAX_ANSWER: usize = 1 << 17;
/// A greeting: who connects, and to which rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    /// The newest version that the sender speaks, if that is another than the header's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest: Option<u32>,
    pub(super) abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest_abi: Option<u32>,
    pub(super) job: String,
    pub(super) size: u32,
    pub(super) rank: u32,
    pub(super) to: u32,
    /// Sent to rank 0 only: where this rank listens.
    pub(super) listens: Option<SocketAddr>,
    /// Sent to rank 0 only: more addresses at which this rank listens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) also: Vec<SocketAddr>,
    /// Sent to other ranks, and by a rank that dials again: what rank 0 gave to this job's ranks alone, so that jobs with one secret stay apart.
    pub(super) token: Option<String>,
    /// From a rank whose connection broke: how many frames it has received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) again: Option<u64>,
}

/// The part of a greeting that tells whether the rest can be read.
#[derive(Deserialize)]
pub(super) struct Spoken {
    newest: Option<u32>,
}

impl Hello {
    /// Reads a greeting, and checks that its sender is of this job. An error says what is wrong, what is allowed and what to
    /// do.
    pub(super) fn read(
        version: u32,
        body: &[u8],
        job: &str,
        size: u32,
    ) -> std::result::Result<Hello, String> {
        let newest = serde_json::from_slice::<Spoken>(body).ok().and_then(|s| s.newest);
        if let Err(e) = VERSIONS.agree(Versions::told(version, newest)) {
            return differs("wire version", &e.theirs, &e.ours, RELEASE);
        }
        let hello: Hello = serde_json::from_slice(body)
            .map_err(|e| format!("its greeting: {}: {RELEASE}", Foreign::word(e)))?;
        if let Err(e) = ABI.agree(Versions::told(hello.abi, hello.newest_abi)) {
            return differs("ABI version", &e.theirs, &e.ours, RELEASE);
        }
        if hello.job != job {
            let remedy = "give all ranks of a job its name, and every job a rendezvous of its own";
            return differs("job", &Foreign::word(&hello.job), &job, remedy);
        }
        if hello.size != size {
            return differs("size", &hello.size, &size, "give all ranks the same number of ranks");
        }
        Ok(hello)
    }

    /// Where the sender listens; `None` if it names no address, or more than a rank does.
    pub(super) fn places(&self) -> Option<Places> {
        let first = self.listens?;
        Places::try_from([vec![first], self.also.clone()].concat()).ok()
    }
}

/// What to do about ranks whose versions differ.
pub(super) const RELEASE: &str = "run one release of pushgate on all hosts";

pub(super) fn differs<T>(
    what: &str,
    its: &dyn Display,
    allowed: &dyn Display,
    remedy: &str,
) -> std::result::Result<T, String> {
    Err(format!("its {what} is {its}, expected {allowed}: {remedy}"))
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// From rank 0: where ranks 1, 2, ... listen, and the port at which rank 0 listens for ranks that dial again; 0 if it
    /// takes none.
    Table {
        token: String,
        addresses: Vec<SocketAddr>,
        /// More addresses of each of these ranks, if one has more.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        also: Vec<Vec<SocketAddr>>,
        port: u16,
    },
    Welcome,
    Refused(String),
}

pub(super) fn answer(stream: &Stream, answer: &Answer) -> io::Result<()> {
    send_all(stream, &envelope(VERSIONS.oldest(), answer), Instant::now() + ANSWER)
}
