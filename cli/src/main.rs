//! The `pushgate` command.

fn main() -> std::process::ExitCode {
    pushgate_cli::main()
}
