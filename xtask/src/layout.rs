//! Checks that C, C++ and Rust agree about abi.h: compares the numbers that abi.rs states, which
//! rustc checks when it compiles that file, with those that the system's compilers see.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::output::say;
use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// C expressions of constants, sizes, alignments and offsets, with their values as 64-bit patterns,
/// because bindgen gives a C constant above `i64::MAX` a signed type.
type Numbers = BTreeMap<String, u64>;

/// Compares the numbers with those of this machine's compilers; an error names everything that differs.
pub fn check(paths: &Paths, guard: Guard) -> Result<()> {
    let out = paths.scratch("layout")?;
    for (compiler, standard, file) in [("cc", "-std=c11", "layout.c"), ("g++", "-std=c++17", "layout.cpp")] {
        let mut compile = process::command(compiler, &paths.root);
        compile.args(["-Wall", "-Wextra", "-Werror"]);
        let run = |binary: &Path| process::command(binary, &paths.root);
        check_with((compile, standard), &out.join(file), run, paths, guard)?;
    }
    Ok(())
}

/// Compares the numbers with those of a compiler, for a program that it makes of `source`, which is written first. `run` says
/// how the program is run.
pub fn check_with(
    (mut compile, standard): (Command, &str),
    source: &Path,
    run: impl Fn(&Path) -> Command,
    paths: &Paths,
    guard: Guard,
) -> Result<()> {
    let rust =
        fs::read_to_string(paths.root.join("driver-shim/abi/src/abi.rs")).context("cannot read abi.rs")?;
    let rust = stated(&rust)?;
    fs::write(source, program(&rust))?;
    let binary = source.with_extension("program");
    compile.args([standard, "-Idriver-shim/include"]).arg(source).arg("-o").arg(&binary);
    process::run(compile, guard)?;
    let seen = process::capture(run(&binary), false, guard)?;
    compare(standard, &rust, &seen)?;
    say!("{standard}: {} numbers agree", rust.len());
    Ok(())
}

/// The numbers that bindgen's output states.
fn stated(rust: &str) -> Result<Numbers> {
    let mut numbers = Numbers::new();
    // rustfmt breaks long lines; without the breaks each statement is in one piece.
    let code = rust.lines().filter(|line| !line.starts_with("//"));
    let text = code.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
    for part in text.split([';', '{']) {
        let part = part.trim();
        if let Some((name, value)) = part.strip_prefix("pub const ").and_then(|rest| rest.split_once(": "))
            && let Some((_, value)) = value.split_once(" = ")
        {
            numbers.insert(name.into(), number(value)?);
        }
        let Some((_, expression)) = part.rsplit_once("[::core::mem::") else { continue };
        let expression = expression.trim_end_matches(']');
        let (what, value) =
            expression.rsplit_once(" - ").context("abi.rs has an assertion without a value")?;
        let value = number(value.trim_end_matches("usize"))?;
        let of = |prefix, suffix| what.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix));
        let c = if let Some(name) = of("size_of::<", ">()") {
            format!("sizeof(struct {name})")
        } else if let Some(name) = of("align_of::<", ">()") {
            format!("alignof(struct {name})")
        } else if let Some(field) = of("offset_of!(", ")") {
            format!("offsetof(struct {field})")
        } else {
            bail!("abi.rs asserts something else than a size, an alignment or an offset: {what}");
        };
        numbers.insert(c, value);
    }
    for prefix in ["PUSHGATE_", "sizeof", "alignof", "offsetof"] {
        if !numbers.keys().any(|name| name.starts_with(prefix)) {
            bail!("found no {prefix} in abi.rs: has bindgen's output changed?");
        }
    }
    Ok(numbers)
}

fn number(text: &str) -> Result<u64> {
    let value: i128 = text.parse().with_context(|| format!("abi.rs: {text:?} is not a number"))?;
    Ok(value as u64)
}

/// A program, in C as well as C++, that prints every number.
fn program(numbers: &Numbers) -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#ifndef __cplusplus\n#include <stdalign.h>\n#endif\n\
         #include \"pushgate/abi.h\"\n\nint main(void)\n{\n",
    );
    for name in numbers.keys() {
        let _ = writeln!(text, "\tprintf(\"%s = %llu\\n\", \"{name}\", (unsigned long long)({name}));");
    }
    text + "\treturn 0;\n}\n"
}

fn compare(compiler: &str, rust: &Numbers, seen: &str) -> Result<()> {
    let mut seen: BTreeMap<&str, &str> = seen.lines().filter_map(|line| line.split_once(" = ")).collect();
    let mut differ = String::new();
    for (name, value) in rust {
        let found = seen.remove(name.as_str()).unwrap_or("nothing");
        if found != value.to_string() {
            let _ = write!(differ, "\n  {name}: {compiler} {found}, Rust {value}");
        }
    }
    if !differ.is_empty() {
        bail!("abi.h and abi.rs differ:{differ}\nrun: cargo xtask bindings");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: &str = r#"// Made from x; do not edit.
pub const PUSHGATE_A: i64 = -2;
#[repr(C)]
pub struct s {
    pub f: [u64; 2usize],
}
const _: () = {
    ["Size of s"][::core::mem::size_of::<s>() - 16usize];
    ["Alignment of s"][::core::mem::align_of::<s>() - 8usize];
    ["Offset of field: s::f"]
        [::core::mem::offset_of!(s, f) - 0usize];
};
"#;

    #[test]
    fn every_number_of_the_bindings_is_found() {
        let numbers = stated(SOME).unwrap();
        let wanted = [
            ("PUSHGATE_A", u64::MAX - 1),
            ("alignof(struct s)", 8),
            ("offsetof(struct s, f)", 0),
            ("sizeof(struct s)", 16),
        ];
        assert_eq!(numbers, wanted.map(|(name, value)| (name.to_string(), value)).into());
    }

    #[test]
    fn a_difference_is_named() {
        let numbers = Numbers::from([("A".into(), 1), ("B".into(), 2)]);
        compare("cc", &numbers, "A = 1\nB = 2\n").unwrap();
        let error = compare("cc", &numbers, "A = 1\nB = 3\n").unwrap_err().to_string();
        assert!(error.contains("B: cc 3, Rust 2") && !error.contains("A:"), "{error}");
    }
}
