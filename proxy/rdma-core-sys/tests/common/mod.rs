//! Makes shared objects with the system's compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Why C can't be compiled on this machine, with or without libibverbs' headers; `None` if it can.
pub fn missing(headers: bool) -> Option<&'static str> {
    if !Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success()) {
        Some("no C compiler (cc)")
    } else if headers && !has_headers() {
        Some("no headers of libibverbs (package libibverbs-dev)")
    } else {
        None
    }
}

/// Asks the compiler: one for another processor has headers of its own.
fn has_headers() -> bool {
    let mut command = Command::new("cc");
    command.args(["-E", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]);
    command.output().is_ok_and(|output| output.status.success())
}

/// Compiles a C text to a shared object of this name, which links no libibverbs.
pub fn shared_object(name: &str, text: &str, options: &[&str]) -> PathBuf {
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(object.parent().unwrap()).unwrap();
    let source = object.with_extension("c");
    std::fs::write(&source, text).unwrap();
    let mut command = Command::new("cc");
    command.args(["-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC"]).args(options);
    let output = command.arg(&source).arg("-o").arg(&object).output().unwrap();
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    object
}
