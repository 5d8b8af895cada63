//! driver-shim/src/abi.rs, generated from abi.h. The result depends on neither libclang's version
//! nor the caller's rustfmt settings, so it can be compared byte for byte.

#[cfg(not(feature = "bindings"))]
use crate::process;
use crate::{Paths, process::Deadline};
use anyhow::Result;

/// The committed file, from the repository root.
#[cfg(feature = "bindings")]
const RUST: &str = "driver-shim/src/abi.rs";
#[cfg(feature = "bindings")]
const HEADER: &str = "driver-shim/include/pushgate/abi.h";

/// Writes the file, or with `check` compares it. This xtask has no bindgen; the one that runs it
/// here is built into a target folder of its own, so that neither evicts the other.
#[cfg(not(feature = "bindings"))]
pub fn run(paths: &Paths, check: bool, deadline: Deadline) -> Result<()> {
    let mut command = process::cargo(&paths.root);
    command.args(["run", "--package", "xtask", "--features", "bindings", "--target-dir"]);
    command.arg(paths.target.join("bindings")).args(["--", "bindings"]);
    if check {
        command.arg("--check");
    }
    process::run(command, deadline)
}

/// Writes the file, or with `check` compares it.
#[cfg(feature = "bindings")]
pub fn run(paths: &Paths, check: bool, _: Deadline) -> Result<()> {
    use anyhow::{Context, bail};
    use std::fs;

    let made = generate(paths)?;
    let path = paths.root.join(RUST);
    if !check {
        return fs::write(&path, made).with_context(|| format!("cannot write {}", path.display()));
    }
    let committed = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if committed == made {
        println!("{RUST} is what {HEADER} says");
        return Ok(());
    }
    let line = committed.lines().zip(made.lines()).take_while(|(a, b)| a == b).count();
    let of = |text: &str| text.lines().nth(line).unwrap_or("(the end)").to_string();
    bail!(
        "{RUST} is not what {HEADER} says; line {}:\n  committed  {}\n  generated  {}\nrun: cargo xtask bindings",
        line + 1,
        of(&committed),
        of(&made)
    );
}

#[cfg(feature = "bindings")]
fn generate(paths: &Paths) -> Result<String> {
    use anyhow::Context;

    let bindings = bindgen::builder()
        .header(paths.root.join(HEADER).to_str().context("the repository's path is not UTF-8")?)
        .use_core()
        .merge_extern_blocks(true)
        .allowlist_file(r".*/pushgate/abi\.h")
        .derive_default(true)
        .rust_target(bindgen::RustTarget::stable(85, 0).map_err(|e| anyhow::anyhow!("{e}"))?)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .disable_header_comment()
        .raw_line("// Generated from include/pushgate/abi.h by `cargo xtask bindings`; do not edit.")
        .clang_args(["-x", "c"])
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(paths.root.join("rustfmt.toml")))
        .generate()
        .context("bindgen failed")?;
    // Not to_string(): that one leaves the text unformatted when rustfmt fails.
    let mut text = Vec::new();
    bindings.write(Box::new(&mut text)).context("cannot format the bindings with rustfmt")?;
    String::from_utf8(text).context("the bindings are not UTF-8")
}
