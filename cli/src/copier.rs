//! `pushgate copier`: the copier of a GPU as a service of a user.

use anyhow::{Result, anyhow};
use clap::{Arg, ArgMatches, Command};
use pushgate::Error;
use pushgate::copier::{CopierCpus, ServeOptions, serve};

use crate::output::outln;

pub fn command() -> Command {
    Command::new("copier")
        .about("Copies memory of a GPU for the NCCL plugin of this user's programs, until it is killed")
        .after_help(
            "The plugin starts a copier by itself where there is none, and such a copier ends after its last client. This one stays, so \
             that programs start sooner. docs/copier.md says what a copier does.",
        )
        .arg(
            Arg::new("gpu")
                .long("gpu")
                .value_name("GPU")
                .default_value("0")
                .help("Index of the GPU, its UUID as 32 digits, or cpu"),
        )
        .arg(
            Arg::new("cpus")
                .long("cpus")
                .value_name("CORES")
                .default_value("auto")
                .help("auto (those near the GPU), inherit, or cores such as 0-3,8"),
        )
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let text = |name: &str| m.get_one::<String>(name).expect("has a default").clone();
    let cpus: CopierCpus =
        text("cpus").parse().map_err(|allowed| Error::flag("cpus", text("cpus"), allowed))?;
    let options = ServeOptions { gpu: text("gpu"), cpus, stay: true };
    let mut told = Ok(());
    serve(&options, &mut |who| told = outln!("{who}")).map_err(|why| anyhow!(why))?;
    Ok(told?)
}
