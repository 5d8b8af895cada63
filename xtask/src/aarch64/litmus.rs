//! The barriers of `driver-shim/src/order.rs` under the model of 64-bit ARM that its maker keeps, by herd7 (herdtools7).
//!
//! Each test of `tests/litmus/arm` names a function in braces and an outcome that must not be. With the function's instruction
//! herd7 must never find the outcome; without one, and with a weaker barrier, it must: else the test would show nothing.
//!
//! The model has one domain of sharing, so it tells `osh` from `ish` as little as QEMU does, and no device: the other thread
//! stands for one. It has no buffers that combine writes.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::toolchain::Toolchain;
use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// The tests, each with a barrier beside `nop` that does not do.
const TESTS: [(&str, &str); 5] = [
    ("from_device", "dmb oshst"),
    ("to_device", "dmb oshld"),
    // The reason why `to_device` is more than a barrier of stores.
    ("to_device_loads", "dmb oshst"),
    ("total", "dmb oshst"),
    ("drain", "dmb oshld"),
];

/// Runs the tests.
pub fn run(paths: &Paths, tools: &Toolchain, guard: Guard) -> Result<()> {
    let source = fs::read_to_string(paths.root.join("driver-shim/src/order.rs"))?;
    let file = paths.scratch("aarch64")?.join("test.litmus");
    for (name, weak) in TESTS {
        let text = fs::read_to_string(paths.root.join(format!("tests/litmus/arm/{name}.litmus")))?;
        // The first braces hold the registers.
        let (_, last) = text.rsplit_once('{').with_context(|| format!("{name}.litmus names no function"))?;
        let function = last.split('}').next().unwrap_or_default();
        let strong = instruction(&source, function)
            .with_context(|| format!("driver-shim/src/order.rs has no barrier in {function}"))?;
        for (barrier, wanted) in [(strong, "Never"), (weak, "Sometimes"), ("nop", "Sometimes")] {
            fs::write(&file, text.replace(&format!("{{{function}}}"), barrier))?;
            let said = process::capture(tools.herd(&file), false, guard)?;
            let found = observed(&said).with_context(|| format!("herd7 says nothing of {name}: {said}"))?;
            ensure!(
                found == wanted,
                "{name} with `{barrier}`: herd7 finds the outcome {found}, not {wanted}: {said}"
            );
        }
    }
    say!("aarch64: herd7 finds no outcome that {} barriers must prevent, and each without them", TESTS.len());
    Ok(())
}

/// The instruction of a function's barrier for ARM.
fn instruction<'a>(source: &'a str, function: &str) -> Option<&'a str> {
    let (_, body) = source.split_once(&format!("pub fn {function}()"))?;
    let body = body.split("pub fn ").next()?;
    body.split_once("barrier!(\"")?.1.split('"').next()
}

/// How often herd7 found the outcome: `Never`, `Sometimes` or `Always`.
fn observed(said: &str) -> Option<&str> {
    let line = said.lines().find_map(|line| line.strip_prefix("Observation "))?;
    line.split_whitespace().nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_barrier_of_a_function_is_its_own() {
        let source = "pub fn one() {\n x();\n}\npub fn two() {\n barrier!(\"dmb osh\");\n}";
        assert_eq!((instruction(source, "one"), instruction(source, "two")), (None, Some("dmb osh")));
    }

    #[test]
    fn what_herd7_observed_is_a_word() {
        assert_eq!(observed("Test MP\nObservation MP+dmb Sometimes 1 3\nTime MP 0.01\n"), Some("Sometimes"));
        assert_eq!(observed("Warning: File \"x\""), None);
    }
}
