//! The `pushgate` command in a build whose gates ignore receive credit if told so.

fn main() -> std::process::ExitCode {
    pushgate_cli::main()
}
