//! Builds programs with cargo and tells where they are.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// The kind of target that a program is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A command.
    Bin,
    /// An example.
    Example,
    /// An integration test, or the unit tests of a crate.
    Test,
}

/// A program that was built.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name of the program's target.
    pub name: String,
    /// The program's path.
    pub path: PathBuf,
    /// The folder of the program's package, in which cargo runs tests.
    pub package: PathBuf,
    /// The kind of the program's target.
    pub kind: Kind,
}

/// Has cargo build for release; returns the programs that were asked for.
pub fn build(
    paths: &Paths,
    arguments: &[&str],
    variables: &[(&str, &OsStr)],
    guard: Guard,
) -> Result<Vec<Program>> {
    let mut command = process::cargo(&paths.root);
    command.args(arguments).envs(variables.iter().copied());
    build_by(command, guard)
}

/// Has this command of cargo build for release; returns the programs that were asked for.
pub fn build_by(mut command: Command, guard: Guard) -> Result<Vec<Program>> {
    command.args(["--release", "--message-format=json-render-diagnostics"]);
    let programs = programs(&process::capture(command, false, guard)?)?;
    if programs.is_empty() {
        bail!("cargo has built no program");
    }
    Ok(programs)
}

/// Finds the programs in cargo's messages.
fn programs(messages: &str) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's output is no JSON")?;
        if let (Some(path), Some(name)) = (message["executable"].as_str(), message["target"]["name"].as_str())
        {
            let kind = if message["profile"]["test"] == true {
                Kind::Test
            } else if message["target"]["kind"][0] == "example" {
                Kind::Example
            } else {
                Kind::Bin
            };
            let manifest = message["manifest_path"].as_str().context("cargo names no manifest")?;
            let package = Path::new(manifest).parent().context("the manifest is in no folder")?.into();
            programs.push(Program { name: name.into(), path: path.into(), package, kind });
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_messages_name_the_programs() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"a"},"profile":{"test":false},"manifest_path":"/s/a/Cargo.toml","executable":null}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"a"},"profile":{"test":true},"manifest_path":"/s/a/Cargo.toml","executable":"/t/a-1"}
{"reason":"compiler-artifact","target":{"kind":["example"],"name":"b"},"profile":{"test":false},"manifest_path":"/s/a/Cargo.toml","executable":"/t/b"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"c"},"profile":{"test":false},"manifest_path":"/s/Cargo.toml","executable":"/t/c"}
{"reason":"build-finished","success":true}"#;
        let found = programs(messages).unwrap();
        let found: Vec<_> =
            found.iter().map(|p| (p.name.as_str(), p.kind, p.package.to_str().unwrap())).collect();
        let wanted = [("a", Kind::Test, "/s/a"), ("b", Kind::Example, "/s/a"), ("c", Kind::Bin, "/s")];
        assert_eq!(found, wanted);
    }
}
