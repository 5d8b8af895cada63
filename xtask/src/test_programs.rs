//! Runs test programs beside each other. Cargo runs one program after the other, and most tests wait for a peer or for the clock:
//! on two cores the programs of the step `tests` used half of the machine.

use std::collections::VecDeque;
use std::process::Command;
use std::sync::{Mutex, mpsc};
use std::thread;

use anyhow::{Result, anyhow};

use crate::output::{self, Output};
use crate::process;
use crate::progress::{self, Guard};

/// How many commands run at a time on `cores` cores.
pub fn at_once(cores: usize) -> usize {
    cores.clamp(1, 2)
}

/// Runs the commands of `alone` one after the other, then the others `at_once` at a time, each with its output in one piece after
/// its end. A failure does not stop the commands after it; the error names each command that failed.
pub fn run(alone: Vec<Command>, others: Vec<Command>, at_once: usize, guard: Guard) -> Result<()> {
    let mut failed = Vec::new();
    for command in alone {
        failed.extend(process::run(command, guard).err());
    }
    let waiting = Mutex::new(VecDeque::from(others));
    let next = || waiting.lock().expect("no holder panics").pop_front();
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..at_once {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(command) = next() {
                    let (result, output) = output::collect(|| process::run(command, guard));
                    let _ = sender.send((result, output, progress::take_usage()));
                }
            });
        }
        drop(sender);
        for (result, output, usage) in receiver {
            progress::add(usage);
            Output::of_this_thread().write(&output);
            failed.extend(result.err());
        }
    });
    match failed.len() {
        0 => Ok(()),
        1 => Err(failed.remove(0)),
        n => {
            let all: Vec<_> = failed.iter().map(|error| format!("{error:#}")).collect();
            Err(anyhow!("{n} test programs failed: {}", all.join("; ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = process::command("sh", Path::new("/"));
        command.args(["-c", script]);
        command
    }

    #[test]
    fn commands_run_beside_each_other_and_the_output_of_each_stays_together() {
        // Each ends only when the other has begun.
        let folder = folder();
        let meet = |ours: &str, other: &str| {
            let folder = folder.display();
            shell(&format!(
                "echo {ours}1; : >{folder}/{ours}; until [ -e {folder}/{other} ]; do sleep 0.01; done; echo {ours}2"
            ))
        };
        let commands = vec![meet("a", "b"), meet("b", "a")];
        let (result, output) = output::collect(|| run(Vec::new(), commands, 2, Guard::NONE));
        std::fs::remove_dir_all(&folder).unwrap();
        result.unwrap();
        let output = String::from_utf8(output).unwrap();
        assert!(output.contains("a1\na2\n") && output.contains("b1\nb2\n"), "{output}");
    }

    fn folder() -> std::path::PathBuf {
        let name = format!("pushgate-xtask-{}-{:?}", std::process::id(), Instant::now());
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    #[test]
    fn a_command_that_fails_is_named_and_those_after_it_run() {
        let commands = vec![shell("echo after"), shell("exit 4")];
        let (result, output) = output::collect(|| run(vec![shell("exit 3")], commands, 1, Guard::NONE));
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains("exit 3") && error.contains("exit 4"), "{error}");
        assert!(String::from_utf8(output).unwrap().contains("\nafter\n"));
    }

    #[test]
    fn a_command_that_is_to_run_alone_has_ended_when_another_begins() {
        let folder = folder();
        let alone = || {
            let there = folder.join("there");
            shell(&format!("mkdir {0} && sleep 0.1 && rmdir {0}", there.display()))
        };
        let (result, _) = output::collect(|| run(vec![alone(), alone()], vec![alone()], 2, Guard::NONE));
        std::fs::remove_dir_all(&folder).unwrap();
        result.unwrap();
    }

    #[test]
    fn one_core_runs_one_program_at_a_time() {
        assert_eq!([1, 2, 16].map(at_once), [1, 2, 2]);
    }
}
