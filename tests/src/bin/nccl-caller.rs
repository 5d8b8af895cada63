//! Drives a network plugin as NCCL does: `nccl-caller SCENARIO --plugin FILE`, with
//! the scenarios of `pushgate_tests::nccl::scenario`. Exit status 0, or 101 with what was wrong.

use pushgate_tests::nccl::scenario::{self, Options};

fn main() {
    let usage = "nccl-caller SCENARIO --plugin FILE [--version 8..12] [--processes] [--unregistered] [--groups N] [--max BYTES] \
                 [--in-flight N] [--seed N] [--times N]\nscenarios: traffic, rules, truncation, garbage, many, \
                 reload, setting, killed, lost, deregister, queue";
    let mut arguments = std::env::args().skip(1);
    let run = arguments.next().and_then(|name| scenario::find(&name));
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
    };
    let wrong = |what: &str| -> ! {
        eprintln!("{what}\n{usage}");
        std::process::exit(2)
    };
    let Some(run) = run else { wrong("which scenario?") };
    while let Some(name) = arguments.next() {
        if name == "--processes" {
            options.processes = true;
            continue;
        }
        if name == "--unregistered" {
            options.unregistered = true;
            continue;
        }
        let Some(value) = arguments.next() else { wrong(&format!("{name} takes a value")) };
        if name == "--plugin" {
            options.plugin = value.into();
            continue;
        }
        let Ok(n) = value.parse::<u64>() else { wrong(&format!("{name} is {value}, allowed is a number")) };
        match name.as_str() {
            "--version" => options.version = n as u32,
            "--groups" => options.groups = n as usize,
            "--max" => options.max = n as usize,
            "--in-flight" => options.in_flight = n as usize,
            "--seed" => options.seed = n,
            "--times" => options.times = n as usize,
            _ => wrong(&format!("{name} is no option")),
        }
    }
    run(&options);
}
