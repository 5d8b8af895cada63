//! What each end says first.

use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::Versions;
use serde::{Deserialize, Serialize};

use crate::again::Place;
use crate::alike::Alike;
use crate::error::{Code, Failure, Result};
use crate::handle::{Key, Nonce, VERSIONS};
use crate::hosts::Listed;
use crate::runtime::Runtime;

/// A connection that can't be made.
pub fn lost(e: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("making a connection: {e}"))
}

/// The first frame of either end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Greeting {
    /// The oldest version that the sender speaks.
    version: u32,
    /// The newest, if that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    nonce: Nonce,
    /// What NCCL was told at the sender.
    pub told: Alike,
    /// The sender's RDMA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listed: Option<Listed>,
    /// Over TCP: where the sender is dialled when the connection broke, if it replaces connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Place>,
    /// Over TCP: the queue pair is over `tcp`, else over `verbs`. The connector says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub links: bool,
}

/// The part that the greetings of all versions have.
#[derive(Deserialize)]
struct Spoken {
    version: u32,
    newest: Option<u32>,
}

/// The bytes of this end's greeting.
pub fn greet_with(
    key: &Key,
    told: &Alike,
    listed: Option<&Listed>,
    again: Option<Place>,
    links: bool,
) -> Vec<u8> {
    let (nonce, again) = (key.nonce(), again.map(|place| place.hidden(&key.secret())));
    let (version, newest, told) = (VERSIONS.oldest(), VERSIONS.newest(), told.clone());
    let greeting = Greeting { version, newest, nonce, told, listed: listed.cloned(), again, links };
    serde_json::to_vec(&greeting).expect("it is plain data")
}

/// The bytes of this process's greeting.
pub fn greet(runtime: &Runtime, key: &Key, again: Option<Place>, links: bool) -> Vec<u8> {
    greet_with(key, &runtime.loaded.alike, runtime.loaded.listed.as_ref(), again, links)
}

/// Checks a frame that should be a greeting for the listener with this key. What it says is checked by [`same_told`].
pub fn greeting(bytes: &[u8], key: &Key) -> Result<Greeting> {
    // The versions come first: the rest of a greeting of another version can't be read.
    let Spoken { version, newest } = serde_json::from_slice(bytes).map_err(|e| lost(Foreign::word(e)))?;
    VERSIONS.agree(Versions::told(version, newest)).map_err(|e| lost(format!("the other end: {e}")))?;
    let g: Greeting = serde_json::from_slice(bytes).map_err(|e| lost(Foreign::word(e)))?;
    if g.nonce != key.nonce() {
        return Err(lost("the greeting is for another listener"));
    }
    let again = g.again.map(|place| place.hidden(&key.secret()));
    Ok(Greeting { again, ..g })
}

/// Refuses an end at which NCCL was told other things than here, or other devices than at another rank of that end's host.
pub fn same_told(runtime: &Runtime, theirs: &Greeting) -> Result<()> {
    let listed = || theirs.listed.as_ref().and_then(|listed| runtime.hosts.differs(listed));
    match runtime.loaded.alike.differs(&theirs.told).or_else(listed) {
        None => Ok(()),
        Some(why) => Err(Failure::new(Code::Usage, why)),
    }
}
