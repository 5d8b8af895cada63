//! Ranks of two hosts meet again when their connection broke: what a rank says to the others, and whom it takes
//! ([`pushgate_door::redial`] has the rest).
//!
//! Each rank listens as long as its mesh lives, and the rank with the higher number dials.

use std::net::SocketAddr;

use pushgate_door::Terms;
use pushgate_door::addresses::Places;
use pushgate_door::redial::{self, Party};
use pushgate_driver_shim::versions::ABI;
use serde::Serialize;

use super::{Hello, VERSIONS, differs};

/// What a rank needs to meet the others again.
pub(in crate::mesh) type Again = redial::Again<Ranks>;
/// By which a thread says what it has found.
pub(in crate::mesh) type Finder = redial::Finder<u32>;
/// What a thread found about a rank.
pub(in crate::mesh) type Found = redial::Found<u32>;

/// Who this rank is, and where the others listen. A connection is named by the other rank's number.
#[derive(Debug)]
pub(in crate::mesh) struct Ranks {
    pub(super) job: String,
    pub(super) rank: u32,
    pub(super) size: u32,
    /// What rank 0 gave to this job's ranks.
    pub(super) token: String,
    /// By rank; that of this one is not used. Of a rank that this one dialled at set-up, the address that was reached.
    pub(super) places: Vec<Places>,
    /// What all ranks must agree on.
    pub(super) terms: Terms,
}

impl Party for Ranks {
    type Key = u32;

    fn version(&self) -> u32 {
        VERSIONS.oldest()
    }

    fn dials(&self, rank: u32) -> bool {
        rank < self.rank
    }

    fn places(&self, rank: u32) -> Vec<SocketAddr> {
        self.places[rank as usize].all()
    }

    fn terms(&self, _: u32) -> Terms {
        self.terms.clone()
    }

    fn greeting(&self, rank: u32, received: u64) -> impl Serialize {
        Hello {
            newest: VERSIONS.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            job: self.job.clone(),
            size: self.size,
            rank: self.rank,
            to: rank,
            listens: None,
            also: Vec::new(),
            token: Some(self.token.clone()),
            again: Some(received),
        }
    }

    fn check(&self, version: u32, body: &[u8]) -> std::result::Result<(u32, u64), Option<redial::Answer>> {
        let hello = Hello::read(version, body, &self.job, self.size);
        hello.and_then(|hello| self.allowed(hello)).map_err(|why| Some(redial::Answer::Refused(why)))
    }
}

impl Ranks {
    fn allowed(&self, hello: Hello) -> std::result::Result<(u32, u64), String> {
        if hello.rank == self.rank || hello.rank >= self.size || hello.to != self.rank {
            let allowed = format!("another rank of {}", self.size);
            return differs("rank", &hello.rank, &allowed, "give every rank a number of its own");
        }
        if hello.token.as_deref() != Some(&*self.token) {
            return Err("its token is not that of this job".into());
        }
        let Some(received) = hello.again else {
            return Err("all ranks of this job are there already".into());
        };
        Ok((hello.rank, received))
    }
}
