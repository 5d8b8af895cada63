//! What the programs are made of: a check of all crates, and a bill of materials.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::bench::{Bench, Outcome};
use crate::output::say;
use crate::paths::Paths;
use crate::progress::Guard;
use crate::tools::Tool;
use crate::{process, workspace};

const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", options: &[] };
const CYCLONEDX: Tool = Tool { name: "cargo-cyclonedx", version: "0.5.9", options: &[] };

/// The packages of what users install: the command, the plugins, the C library.
const INSTALLED: [&str; 4] = ["pushgate-cli", "pushgate-net-plugin", "pushgate-nixl-plugin", "pushgate-c"];

/// The step `supply-chain`. Known holes are left out where their database cannot be fetched.
pub fn step(bench: &mut Bench) -> Result<Outcome> {
    let deny = DENY.get(&bench.paths, bench.guard)?;
    let check = |what: &[&str]| {
        let mut command = process::command(&deny, &bench.paths.root);
        command.args(["--workspace", "check", "--hide-inclusion-graph"]).args(what);
        command
    };
    process::run(check(&["licenses", "bans", "sources"]), bench.guard)?;
    let mut fetch = process::command(&deny, &bench.paths.root);
    fetch.args(["fetch", "db"]);
    match process::run(fetch, bench.guard) {
        Ok(()) => process::run(check(&["--disable-fetch", "advisories"]), bench.guard)?,
        Err(_) => bench.skips.push(
            "crates not compared with known holes: cannot fetch https://github.com/RustSec/advisory-db"
                .into(),
        ),
    }
    for file in sbom(&bench.paths, bench.guard)? {
        say!("{}", file.display());
    }
    Ok(Outcome::Passed)
}

/// Writes a bill of materials for each thing that users install, in CycloneDX's form; returns their paths.
pub fn sbom(paths: &Paths, guard: Guard) -> Result<Vec<PathBuf>> {
    let cyclonedx = CYCLONEDX.get(paths, guard)?;
    let out = paths.target.join("sbom");
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut command = process::command(&cyclonedx, &paths.root);
    command.args(["cyclonedx", "--format", "json", "--spec-version", "1.5", "--quiet"]);
    process::run(command, guard)?;
    // The program writes a file into the folder of every package of the workspace.
    let mut made = Vec::new();
    for package in workspace::packages(paths)? {
        let name = format!("{}.cdx.json", package.name);
        let file = paths.root.join(&package.folder).join(&name);
        let text = fs::read_to_string(&file).with_context(|| format!("no {}", file.display()))?;
        fs::remove_file(&file)?;
        if INSTALLED.contains(&package.name.as_str()) {
            check(&text).with_context(|| name.clone())?;
            fs::write(out.join(&name), text)?;
            made.push(out.join(&name));
        }
    }
    ensure!(made.len() == INSTALLED.len(), "only {made:?} were made");
    Ok(made)
}

/// Checks that a bill of materials names crates, each with version and licence.
fn check(text: &str) -> Result<()> {
    let bill: serde_json::Value = serde_json::from_str(text)?;
    let components = bill["components"].as_array().context("no components")?;
    ensure!(components.len() > 10, "{} components", components.len());
    for component in components {
        let is_whole = component["version"].is_string() && component["licenses"].is_array();
        ensure!(is_whole, "{} has no version or no licence", component["name"]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bill_of_materials_without_a_licence_is_refused() {
        let component = r#"{"name": "a", "version": "1.0", "licenses": [{"expression": "MIT"}]}"#;
        let bill =
            |last: &str| format!(r#"{{"components": [{}{last}]}}"#, format!("{component},").repeat(11));
        check(&bill(component)).unwrap();
        for wrong in [r#"{"name": "b", "version": "1.0"}"#, r#"{"name": "b", "licenses": []}"#] {
            let error = check(&bill(wrong)).unwrap_err().to_string();
            assert!(error.contains("\"b\" has no"), "{error}");
        }
        check(r#"{"components": []}"#).unwrap_err();
    }
}
