//! What a child of a run is: a rank, or the proxy that has the ranks' engines.

use std::path::Path;

use anyhow::{Result, bail};
use pushgate::proxy::Stop;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::names::{ROLE, proxy_socket};
use super::{Options, rank};

/// Runs as what `role` says, until the supervisor ends this process.
pub fn run(o: &Options, role: &str) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let parts: Vec<&str> = role.split('/').collect();
    let &[what, parent, number] = &parts[..] else { bail!("{ROLE} is {role}, expected RANK/PARENT/NUMBER") };
    let (parent, number) = (parent.parse()?, number.parse()?);
    // The supervisor may have ended before that.
    if getppid().map(|p| p.as_raw_nonzero().get() as u32) != Some(parent) {
        bail!("the program that started this one has ended");
    }
    match what {
        "proxy" => Ok(pushgate::proxy::run(Path::new(&proxy_socket(parent, number)), Stop::new()?)?),
        rank => rank::run(o, rank.parse()?, parent, number),
    }
}
