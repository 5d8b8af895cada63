//! The `pushgate` command.
fn main() {}
