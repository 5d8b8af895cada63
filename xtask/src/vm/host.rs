//! Runs a suite's script on the host while its guest waits: a process outside of the machine that
//! shares a function's memory with the machine.
//!
//! The script belongs to the suite. The guest only says when, and gives numbers: a file `ask` in
//! the guest's output folder with lines `NAME=NUMBER`, which the script finds as `ASK_NAME`. The
//! script's output goes to `host.txt` there, its exit status to `answer`.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::ivshmem::Bells;
use crate::process::{self, Running};
use crate::progress::{Guard, Watch};

const TICK: Duration = Duration::from_millis(5);

/// The thread that waits for the guest's request; dropping it ends what it has started.
pub struct Helper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// Starts the thread. `folder` is the guest's part of `run`.
    pub fn start(run: &Path, folder: PathBuf, script: String, bells: Bells) -> Helper {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, run) = (stop.clone(), run.to_path_buf());
        let thread = thread::spawn(move || {
            let (ask, answer) = (folder.join("out/ask"), folder.join("out/answer"));
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(TICK);
                let Ok(text) = fs::read_to_string(&ask) else { continue };
                let code = match perform(&run, &folder, &script, &text, &bells, &stopped) {
                    Ok(code) => code,
                    Err(error) => {
                        println!("on the host: {error:#}");
                        255
                    }
                };
                let part = folder.join("out/answer.part");
                let _ = fs::remove_file(&ask);
                let _ = fs::write(&part, format!("{code}\n")).and_then(|()| fs::rename(&part, &answer));
            }
        });
        Helper { stop, thread: Some(thread) }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn perform(
    run: &Path,
    folder: &Path,
    script: &str,
    asked: &str,
    bells: &Bells,
    stop: &AtomicBool,
) -> Result<i32> {
    let mut command = process::command("/bin/sh", run);
    command.args(["-euc", script]).env("RUN", run);
    for (name, value) in numbers(asked)? {
        command.env(format!("ASK_{name}"), value.to_string());
    }
    // Vector 0 of each function with interrupts, in the order of their slots.
    let held: Vec<OwnedFd> = bells.all()?;
    for (i, bell) in held.iter().enumerate() {
        command.env(format!("BELL_{i}"), bell.as_raw_fd().to_string());
        process::inherit(&mut command, bell.as_fd());
    }
    let log = fs::File::create(folder.join("out/host.txt"))?;
    command.stderr(log.try_clone()?).stdout(Stdio::from(log));
    let mut running = Running::start(command)?;
    // The guest waits for the answer, and the guest's own guard ends both.
    let mut watch = Watch::new(Guard::NONE);
    loop {
        if let Some(status) = running.poll(&mut watch)? {
            return Ok(status.code().unwrap_or(255));
        }
        if stop.load(Ordering::Relaxed) {
            running.end();
            return Ok(255);
        }
        thread::sleep(TICK);
    }
}

/// Parses lines NAME=NUMBER and nothing else: a guest must not decide what its host runs.
fn numbers(text: &str) -> Result<Vec<(&str, u64)>> {
    let line = |line| -> Result<_> {
        let (name, value) = str::split_once(line, '=').context("not NAME=NUMBER")?;
        let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        ensure!(plain, "{name:?} is no name");
        Ok((name, value.parse().with_context(|| format!("{name} is {value:?}, no number"))?))
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_gives_numbers_alone() {
        assert_eq!(numbers("OFFSET=4096\nCOUNT_OF=1\n").unwrap(), [("OFFSET", 4096), ("COUNT_OF", 1)]);
        for wrong in ["X", "X=", "X=1;id", "x=1", "=1", "X=-1", "A B=1"] {
            assert!(numbers(wrong).is_err(), "{wrong}");
        }
    }
}
