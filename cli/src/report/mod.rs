//! `pushgate report`: what this host is and does, as one page that can be sent. docs/report.md describes it.

mod gather;
mod html;
mod measured;
mod page;
mod plots;
pub mod redact;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate_pcie_model::whole;

use self::redact::Redact;
use crate::output::{out, outln};

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let file =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).value_name("FILE").help(help);
    settings(
        Command::new("report")
            .about("Writes what is known of this host as one HTML page that can be sent: the doctor's findings, topology, advice, measurements, plots")
            .after_help(
                "Measures nothing: figures are those that `pushgate probe` has kept; what is not there is named, with \
                 what to do. The page holds all it needs: no scripts, nothing is fetched. It shows addresses of this \
                 host's network and its name, unless --redact is given: look at it before you send it. docs/report.md \
                 describes it.",
            )
            .arg(file("out", "File to write; - is standard output").default_value("pushgate-report.html"))
            .arg(switch("force", "Write over a file that is there"))
            .arg(file("topology", "The machine's shape, as for `pushgate topo`"))
            .arg(file("findings", "What a probe found [default: what is kept of this host]"))
            .arg(switch(
                "redact",
                "Leave out the names of host and user, the home folder, UUIDs, GUIDs and addresses of networks",
            )),
    )
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let out = PathBuf::from(m.get_one::<String>("out").expect("has a default"));
    let to_stdout = out == Path::new("-");
    let force = m.get_flag("force");
    // Before the work, not after it.
    if !to_stdout {
        gather::may_write(&out, force)?;
    }
    let facts = gather::gather(m)?;
    let redact = match m.get_flag("redact") {
        true => {
            let probed = facts.findings.as_ref().map_or("", |f| f.host.as_str());
            Redact::of_this_host(&[probed])
        }
        false => Redact::default(),
    };
    let page = page::html(&facts, redact);
    if to_stdout {
        return Ok(out!("{page}")?);
    }
    write(&out, &page, force).with_context(|| format!("{} can't be written", out.display()))?;
    Ok(outln!("{}: {} KiB", out.display(), page.len().div_ceil(1024))?)
}

/// Over another file only with `force`, and then whole or not at all.
fn write(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    if force {
        return whole::write(path, text);
    }
    // A file that was made since the question is not written over.
    let mut file = fs::File::create_new(path)?;
    file.write_all(text.as_bytes()).inspect_err(|_| drop(fs::remove_file(path)))
}
