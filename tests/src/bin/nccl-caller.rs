//! Drives a network plugin as NCCL does: `nccl-caller SCENARIO --plugin FILE`, with the scenarios
//! of `pushgate_tests::nccl::scenario`; or its tables for one-sided operations: `nccl-caller rma SCENARIO --plugin FILE`, with
//! those of `pushgate_tests::rma`. Exit status 0, or 101 with what was wrong.

use pushgate_tests::nccl::scenario::{self, Options};

fn main() {
    let names =
        |all: &[(&str, scenario::Scenario)]| all.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    let usage = format!(
        "nccl-caller SCENARIO --plugin FILE [--version 8..12] [--processes] [--nccl-rules] [--unregistered] \
         [--groups N] [--max BYTES] [--in-flight N] [--seed N] [--times N] [--threads N] [--cores N]\n\
         scenarios of any plugin: {}\n\
         of this project's alone: {}\n\
         --nccl-rules: only what NCCL asks of a plugin is checked; what is left out is said\n\
         nccl-caller rma: the tables for one-sided operations, which have scenarios of their own",
        names(&scenario::NCCL),
        names(&scenario::OWN)
    );
    let mut arguments = std::env::args().skip(1);
    let scenario = arguments.next().unwrap_or_default();
    if scenario == "rma" {
        if let Err(what) = pushgate_tests::rma::run(arguments) {
            eprintln!("{what}");
            std::process::exit(2)
        }
        return;
    }
    let mut options = Options {
        plugin: "libnccl-net.so".into(),
        version: 11,
        processes: false,
        unregistered: false,
        groups: 300,
        max: 600_000,
        in_flight: 8,
        seed: 1,
        times: 1000,
        threads: 1,
        cores: 0,
        nccl_rules: false,
    };
    let wrong = |what: &str| -> ! {
        eprintln!("{what}\n{usage}");
        std::process::exit(2)
    };
    while let Some(name) = arguments.next() {
        let flag = match name.as_str() {
            "--processes" => Some(&mut options.processes),
            "--unregistered" => Some(&mut options.unregistered),
            "--nccl-rules" => Some(&mut options.nccl_rules),
            _ => None,
        };
        if let Some(flag) = flag {
            *flag = true;
            continue;
        }
        let Some(value) = arguments.next() else { wrong(&format!("{name} takes a value")) };
        if name == "--plugin" {
            options.plugin = value.into();
            continue;
        }
        let Ok(n) = value.parse::<u64>() else { wrong(&format!("{name} is {value}, expected a number")) };
        match name.as_str() {
            "--version" => options.version = n as u32,
            "--groups" => options.groups = n as usize,
            "--max" => options.max = n as usize,
            "--in-flight" => options.in_flight = n as usize,
            "--seed" => options.seed = n,
            "--times" => options.times = n as usize,
            "--threads" => options.threads = n as usize,
            "--cores" => options.cores = n as usize,
            _ => wrong(&format!("{name} is no option")),
        }
    }
    if !scenario::run(&scenario, &options) {
        wrong("which scenario?");
    }
}
