//! Build and test tasks: `cargo xtask help`.

mod aarch64;
#[cfg(test)]
mod architecture;
mod bench;
mod bindings;
mod chroot;
mod cuda;
mod files;
mod gpu;
mod install;
mod kmod;
mod lanes;
mod layout;
mod manual;
mod markdown;
mod output;
mod package;
mod paths;
mod plugin;
mod process;
mod programs;
mod progress;
mod promises;
mod runner;
mod sim;
mod site;
mod steps;
mod supply_chain;
mod system;
mod test_programs;
mod tools;
mod venv;
mod vm;
mod words;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};

use crate::paths::Paths;
use crate::progress::Guard;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build and test tasks of pushgate", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the tests: every step that this machine can run, then a summary.
    Test {
        /// A skip is a failure too, unless its reason begins with "no GPU", "no second core" or "no sshd".
        #[arg(long)]
        strict: bool,
        /// Also run the steps that take longer than all others together may.
        #[arg(long)]
        full: bool,
        /// Run the quick steps alone: format, promises, words, clippy, unit tests.
        #[arg(long, conflicts_with_all = ["full", "only"])]
        quick: bool,
        /// Install no package and no component, even as root: what is missing is a skip.
        #[arg(long)]
        no_install: bool,
        /// End the run after so long, with its summary; steps not run by then count as failed
        /// [default: 80, with --full 240].
        #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
        limit: Option<u64>,
        /// Run these steps only, in the order of the table.
        #[arg(long, value_name = "STEP,...", value_delimiter = ',',
              value_parser = PossibleValuesParser::new(steps::names()))]
        only: Vec<String>,
        /// Show the steps and their budgets, and run nothing.
        #[arg(long)]
        list: bool,
    },
    /// Write abi.rs from abi.h, the bindings of libibverbs from verbs.h, and the C API's header (needs libclang and rustfmt).
    Bindings {
        /// Write nothing; fail if a committed file differs.
        #[arg(long)]
        check: bool,
    },
    /// Write docs/promises.md, the list of each promise's tests, from the tests' names.
    Promises {
        /// Write nothing; fail if the committed page differs, or if a promise has no test.
        #[arg(long)]
        check: bool,
    },
    /// Build docs/ as a site with search, rustdoc beside it, and print where it is (compiles mdBook once).
    Docs,
    /// Say what to run on a GPU host, or gather what runs there.
    Gpu {
        /// Build the release binaries, device code included, into one folder.
        #[arg(long)]
        bundle: bool,
        /// Folder of the bundle [default: gpu-bundle in the target folder].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Integration tests to bundle besides, by name.
        #[arg(long, value_name = "TEST,...", value_delimiter = ',')]
        tests: Vec<String>,
    },
    /// Build the NCCL plugin for release, and print where it is.
    Plugin,
    /// Run a command or suites in a virtual machine that has RDMA devices in software.
    Vm(vm::Options),
    /// Run what `vm --pack` has put into a folder (its script `run` does).
    #[command(hide = true)]
    Packed {
        /// The folder.
        folder: PathBuf,
    },
    /// Simulate clusters in virtual time, with faults, and check every promise (`cargo xtask sim --help`).
    #[command(disable_help_flag = true)]
    Sim {
        /// Arguments of the simulator.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build the kernel module for the virtual machine's kernel; a warning is an error.
    Kmod,
    /// Make packages for users without Rust, and print where they are: the Debian package, if no option names another.
    Package {
        /// The Debian package.
        #[arg(long)]
        deb: bool,
        /// The RPM package.
        #[arg(long)]
        rpm: bool,
        /// The archive with install.sh, uninstall.sh and a Containerfile.
        #[arg(long)]
        archive: bool,
        /// The Python wheel, into wheels in the target folder.
        #[arg(long)]
        wheel: bool,
        /// All of them.
        #[arg(long)]
        all: bool,
        /// The processors that they are for.
        #[arg(long, value_enum, default_value_t = package::Arch::HOST)]
        arch: package::Arch,
    },
    /// Write what the programs are made of, in CycloneDX's form, and print where it is (compiles cargo-cyclonedx once).
    Sbom,
    /// Install the C library, libpushgate.so, with its headers, its manual, and what pkg-config and CMake look for.
    Install {
        /// Folder below which programs will find them, an absolute path.
        #[arg(long, value_name = "DIR")]
        prefix: PathBuf,
        /// Folder that stands for the root, for packages [default: the root itself].
        #[arg(long, value_name = "DIR")]
        destdir: Option<PathBuf>,
        /// Folder of libraries, below the prefix.
        #[arg(long, value_name = "DIR", default_value = "lib")]
        libdir: PathBuf,
    },
    /// Print the path of a CUDA 13 nvcc (for PUSHGATE_NVCC), fetching it if there is none.
    Nvcc,
}

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        if process::interrupted() { ExitCode::from(130) } else { ExitCode::FAILURE }
    })
}

fn run(cli: Cli) -> Result<ExitCode> {
    let paths = Paths::find()?;
    process::catch_signals();
    match cli.task {
        Task::Test { list: true, .. } => {
            runner::list();
            Ok(ExitCode::SUCCESS)
        }
        Task::Test { strict, full, quick, no_install, limit, only, .. } => {
            let limit = limit.unwrap_or(if full { runner::FULL_LIMIT } else { runner::LIMIT });
            let limit = Duration::from_secs(60 * limit);
            runner::test(paths, &runner::Options { strict, full, quick, no_install, limit, only })
        }
        Task::Bindings { check } => bindings::run(&paths, check, Guard::NONE).map(|()| ExitCode::SUCCESS),
        Task::Promises { check } => promises::run(&paths, check).map(|()| ExitCode::SUCCESS),
        Task::Docs => {
            println!("{}", site::build(&paths, Guard::NONE)?.display());
            Ok(ExitCode::SUCCESS)
        }
        Task::Gpu { bundle: false, .. } => {
            gpu::explain();
            Ok(ExitCode::SUCCESS)
        }
        Task::Gpu { out, tests, .. } => gpu::bundle(&paths, out, &tests).map(|()| ExitCode::SUCCESS),
        Task::Plugin => {
            println!("{}", plugin::build(&paths, None, Guard::NONE)?.display());
            Ok(ExitCode::SUCCESS)
        }
        Task::Vm(options) => vm::run(&paths, &options),
        Task::Sim { arguments } => sim::run(&paths, &arguments),
        Task::Packed { folder } => vm::run_packed(&folder),
        Task::Kmod => {
            println!("{}", kmod::task(&paths)?.display());
            Ok(ExitCode::SUCCESS)
        }
        Task::Package { deb, rpm, archive, wheel, all, arch } => {
            let named = [deb, rpm, archive, wheel];
            let takes = |index: usize| all || named[index] || (index == 0 && !named.contains(&true));
            let kinds: Vec<_> = package::ALL
                .into_iter()
                .enumerate()
                .filter(|(i, _)| takes(*i))
                .map(|(_, kind)| kind)
                .collect();
            for package in package::build(&paths, arch, package::For::Users, &kinds, Guard::NONE)? {
                println!("{}", package.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Task::Sbom => {
            for file in supply_chain::sbom(&paths, Guard::NONE)? {
                println!("{}", file.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Task::Install { prefix, destdir, libdir } => {
            let target = install::Target { prefix, destdir, libdir, is_movable: false };
            for file in install::run(&paths, &target, Guard::NONE)? {
                println!("{}", file.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Task::Nvcc => {
            println!("{}", cuda::toolkit(&paths, Guard::NONE)?.nvcc.display());
            Ok(ExitCode::SUCCESS)
        }
    }
}
