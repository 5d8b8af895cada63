//! `pushgate completions` and `pushgate manual`: what shells and `man` know of the command, made from its flags.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::output::out;

pub fn commands() -> [Command; 2] {
    let shell = Arg::new("shell").required(true).value_name("SHELL").value_parser(value_parser!(Shell));
    let folder = Arg::new("folder").long("folder").value_name("FOLDER").value_parser(value_parser!(PathBuf));
    [
        Command::new("completions")
            .about("Prints what a shell needs to complete this command's arguments")
            .after_help(
                "For bash: pushgate completions bash > ~/.local/share/bash-completion/completions/pushgate",
            )
            .arg(shell.help("The shell")),
        // For packages.
        Command::new("manual")
            .about("Prints the manual page pushgate(1), as in: pushgate manual | man -l -")
            .hide(true)
            .arg(folder.help("Writes that page and one for each subcommand into this folder instead")),
    ]
}

/// `command` has the values of settings as possible values.
pub fn completions(m: &ArgMatches, mut command: Command) -> Result<()> {
    let shell = *m.get_one::<Shell>("shell").expect("clap requires it");
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "pushgate", &mut script);
    Ok(out!("{}", String::from_utf8(script)?)?)
}

pub fn manual(m: &ArgMatches, command: Command) -> Result<()> {
    let command = command.disable_help_subcommand(true);
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    let page = String::from_utf8(page)? + ".SH SEE ALSO\npushgate(4), the kernel module\n";
    let Some(folder) = m.get_one::<PathBuf>("folder") else { return Ok(out!("{page}")?) };
    clap_mangen::generate_to(command, folder)
        .and_then(|()| std::fs::write(folder.join("pushgate.1"), page))
        .with_context(|| format!("cannot write manual pages into {}", folder.display()))
}
